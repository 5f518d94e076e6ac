"""The measuring bench: device, stream, kernels, random source and baselines library, opened once a process.

Whoever measures opens a bench and forbids itself the predictions (firewall, METHOD 1).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import device
from lab.cublaslt import CublasLt
from lab.operands import FP8_ACTIVATION_SCALE, FP8_SCALE, Random
from lab.timing import Timer, check_rotation, copies_for

PREDICTION_FOLDERS = ("/prereg/claims", "/prereg/forecasts", "/prereg/amendments")


def forbid_predictions() -> None:
    """Firewall (METHOD 1): from here on this process cannot open a prediction."""

    def hook(event: str, arguments: tuple) -> None:
        if event == "open" and any(
            f in str(arguments[0]).replace("\\", "/") for f in PREDICTION_FOLDERS
        ):
            raise PermissionError(f"a measuring process must not read predictions: {arguments[0]}")

    sys.addaudithook(hook)


@dataclass
class Bench:
    """Everything that a point needs: device, stream, kernels, random source, baselines library, protocol."""

    protocol: dict[str, Any]
    probe: dict[str, Any]
    modules: device.Modules
    stream: Any
    timer: Timer
    random: Random
    lt: CublasLt

    @classmethod
    def open(cls, protocol: dict[str, Any], cubin_dir: Path, seed: int) -> Bench:
        """Probe the device and load the harness."""
        import cupy as cp

        probe = device.probe()
        if probe["mig"]:
            raise device.DeviceError(
                f"{probe['name']}: MIG is on; a slice cannot be measured as the device"
            )
        modules = device.Modules(cubin_dir)
        harness = modules["harness"]
        # A blocking stream is ordered with the default stream, on which CuPy fills and checks operands.
        stream = cp.cuda.Stream(non_blocking=False)
        stream.use()
        timer = Timer(stream, harness.kernel("delay"))
        maps = (harness.kernel("map_bytes_u8"), harness.kernel("map_words_u16"))
        random = Random(harness.kernel("fill_random"), *maps, seed=seed)
        frozen = protocol["cublaslt"]
        lt = CublasLt(
            frozen["workspace_bytes"],
            float(FP8_SCALE),
            float(FP8_ACTIVATION_SCALE),
            frozen["fp8_fast_accumulation"],
        )
        return cls(protocol, probe, modules, stream, timer, random, lt)

    def copies(self, weight_bytes: int) -> int:
        """Weight copies for a cold rotation on this device."""
        rotation = self.protocol["rotation"]
        copies = copies_for(
            weight_bytes, self.probe["l2_bytes"], rotation["l2_multiple"], rotation["min_copies"]
        )
        check_rotation(copies, weight_bytes, self.probe["l2_bytes"], rotation["l2_multiple"])
        return copies
