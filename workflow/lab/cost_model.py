"""The cost model: what time a kernel should take on a device, as a few formulas of bytes, operations and constants.

Formulas are versioned by their parameters: a version is a frozen file `prereg/cost_model_<version>.json`, and a claim
names the version that yielded its number. Times in microseconds, bytes in bytes, bandwidth in TB/s (1 TB/s = 1e6
bytes/us), throughput in TFLOP/s (1 TFLOP/s = 1e6 FLOP/us). Only predictions are made from this module; nothing that
measures reads it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import norm

from qgemm_mx.formats import weight_bytes

QUANTILE_LEVELS = {"q05": 0.05, "q25": 0.25, "q50": 0.50, "q75": 0.75, "q95": 0.95}


@dataclass(frozen=True)
class CostModel:
    """One version: a name and its parameters (the keys of the frozen file)."""

    version: str
    parameters: dict[str, Any]

    @classmethod
    def load(cls, prereg_dir: Path, version: str) -> CostModel:
        """The frozen parameters of a version."""
        document = json.loads(
            (prereg_dir / f"cost_model_{version}.json").read_text(encoding="utf-8")
        )
        return cls(version, document["parameters"])

    def floor_us(self, format_name: str, n: int, k: int) -> float:
        """Cold read of a weight: ramp + bytes / read bandwidth (a line through launch and asymptote)."""
        return self.stream_us(weight_bytes(format_name, n, k))

    def stream_us(self, size_bytes: float) -> float:
        """Cold read-only stream of `size_bytes`."""
        p = self.parameters
        return p["ramp_us"] + size_bytes / (p["read_bandwidth_tbps"] * 1e6)

    def compute_us(self, kind: str, m: int, n: int, k: int) -> float:
        """2 M N K operations at the sustained throughput of a dense tensor-core product (`bf16` or `fp8`)."""
        return 2.0 * m * n * k / (self.parameters[f"{kind}_tflops"] * 1e6)

    def dense_us(self, kind: str, m: int, n: int, k: int) -> float:
        """A library product: the larger of its memory and compute time, and the library's overhead a call."""
        p = self.parameters
        size = weight_bytes("bf16" if kind == "bf16" else "fp8_e4m3", n, k)
        memory = self.stream_us(size) * p[f"{kind}_memory_factor"]
        compute = self.compute_us(kind, m, n, k) / min(1.0, m / math.ceil(m / 64) / 64)
        return max(memory, compute) + p[f"{kind}_overhead_us"]

    def gemv_us(self, fmt: str, m: int, n: int, k: int) -> float:
        """Our decode kernel: floor x factor, a fixed cost, and a little for every token after the first."""
        p = self.parameters
        per_token = 1.0 + p["gemv_per_token"] * (m - 1)
        return self.floor_us(fmt, n, k) * p["gemv_factor"][fmt] * per_token + p["gemv_overhead_us"]

    def gemm_us(self, fmt: str, m: int, n: int, k: int) -> float:
        """Our wgmma kernel: memory and BF16 compute blended near the ridge, and a fixed cost."""
        p = self.parameters
        memory = self.floor_us(fmt, n, k) * p["gemm_memory_factor"][fmt]
        compute = self.compute_us("bf16", m, n, k) / p["gemm_efficiency"][fmt]
        return soft_maximum(memory, compute) + p["gemm_overhead_us"]

    def peer_us(self, kind: str, fmt: str, m: int, n: int, k: int) -> float:
        """Today's production path with BF16 or FP8 activations (`kind`)."""
        p = self.parameters
        memory = self.floor_us(fmt, n, k) * p["peer_factor"][fmt]
        compute = self.compute_us(kind, m, n, k) / p["peer_efficiency"]
        return soft_maximum(memory, compute) + p["peer_overhead_us"]


def soft_maximum(a: float, b: float, power: float = 4.0) -> float:
    """(a^p + b^p)^(1/p): two overlapping terms that disturb each other where they are alike."""
    return (a**power + b**power) ** (1.0 / power)


def lognormal_quantiles(median: float, sigma: float) -> dict[str, float]:
    """Quantiles 5/25/50/75/95 of a log-normal: median exp(z sigma), to four significant digits."""
    return {
        name: float(f"{median * math.exp(norm.ppf(level) * sigma):.4g}")
        for name, level in QUANTILE_LEVELS.items()
    }


def roofline_us(size_bytes: float, flop: float, bandwidth_tbps: float, tflops: float) -> float:
    """The dumb forecaster's time: datasheet roofline, nothing else."""
    return max(size_bytes / (bandwidth_tbps * 1e6), flop / (tflops * 1e6))
