"""The 4-bit arms of R0: the naive path, which is timed, and the reference kernel, which never is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.arms import CublasLtArm, Truth, poisoned_call
from lab.operands import WeightCopies
from lab.rows import CheckRow
from qgemm_mx import launch, probes
from qgemm_mx.formats import FORMATS, encode_bf16
from qgemm_mx.packing import PackedWeight, dequantize
from qgemm_mx.probes import CheckResult

#: Multiply-adds that one reference launch is given at most; beyond it, only the first rows of the weight are computed.
REFERENCE_BUDGET = 1e10

#: Problem of the structured probes (N, K, M): unaligned N, odd M, K a multiple of every group.
PROBE_PROBLEM = (2880, 3584, 3)
#: Awkward problems beside it (CASES 1, 8, 9): one row, a tail of rows, one scale group, odd M.
AWKWARD_PROBLEMS = ((1, 128, 1), (7, 256, 33), (1856, 2688, 7), (40, 384, 100))


@dataclass
class NaiveDequantArm:
    """Dequantise the whole weight to BF16 in memory, then cuBLASLt BF16 on it: two kernels a call."""

    weights: WeightCopies
    dense: CublasLtArm
    modules: Any
    stream: Any
    kernel: str = "naive_dequant"
    role: str = "sanity_floor"
    _launch_dense: Callable[[int], None] = field(default=None, repr=False)

    def __post_init__(self) -> None:
        import cupy as cp

        w = self.weights
        self.format, self.copies, self.weight_bytes = w.format, w.copies, w.copy_bytes
        self.tuning = self.dense.tuning
        self._dequantised = cp.empty(w.n * w.k, dtype=cp.uint16)
        self._kernel = self.modules["naive_dequant"].kernel(f"naive_dequant_{w.format}")
        slices = w.n * w.k // 16
        self._grid = (-(-slices // 256),)
        self._arguments = [
            (
                np.uint64(w.pointer(copy)),
                np.uint64(w.scale_pointer(copy)),
                self._dequantised,
                np.int64(slices),
            )
            for copy in range(w.copies)
        ]
        self.y = cp.empty((self.dense.m, w.n), dtype=cp.uint16)
        self._launch_dense = self.dense.launcher_for(
            [int(self._dequantised.data.ptr)], self.y, w.tensor_scale
        )

    def launch(self, copy: int) -> None:
        """Dequantise copy `copy`, then multiply."""
        self._kernel(self._grid, (256,), self._arguments[copy])
        self._launch_dense(0)

    def check(self, copy: int, stage: str) -> list[CheckResult]:
        """As every timed arm: poisoned output, FP64 truth on the operands as the product sees them (BF16)."""
        limits = self.dense.protocol["correctness"]
        truth = Truth.compute(
            self.dense.x64,
            self.weights,
            copy,
            limits["u_out_bf16"],
            limits["eps_acc_fp32"],
            as_bf16=True,
        )
        if stage == "before":
            poisoned_call(self.stream, self.y, self.launch, copy)
        self.stream.synchronize()
        return [truth.compare(self.y, f"random_fp64_{stage}")]


@dataclass
class ReferenceArm:
    """The reference kernel on the same operands as the timed arms. It has a correctness and can have no time."""

    weights: WeightCopies
    x: Any
    x64: Any
    protocol: dict[str, Any]
    cubin: Path
    kernel: str = "reference"
    role: str = "correctness_only"

    def check(self) -> CheckResult:
        """FP32 output against FP64 truth; the first rows of the weight where all would be too many operations."""
        import cupy as cp

        w = self.weights
        m = int(self.x.shape[0])
        rows = min(w.n, max(1, int(REFERENCE_BUDGET / (m * w.k))))
        values, scales = w.views(0)
        row_scale = cp.full(rows, w.tensor_scale, cp.float32)
        y = cp.full((m, rows), cp.nan, cp.float32)
        launch.reference_matmul(
            self.x, values[:rows], scales[:rows], row_scale, w.format, self.cubin, out=y
        )
        limits = self.protocol["correctness"]
        truth = Truth.compute(self.x64, w, 0, 2.0**-24, limits["eps_acc_fp32"], rows=rows)
        return truth.compare_float(y, "random_fp64_before", f"rows 0..{rows - 1} of {w.n}")


def probe_checks(cubin: Path) -> list[CheckRow]:
    """Every structured probe, and bit-for-bit decoding, of the reference kernel in all formats on the device."""
    rows = []
    for fmt in FORMATS:
        for n, k, m in (PROBE_PROBLEM, *AWKWARD_PROBLEMS):
            place = {
                "kernel": "reference",
                "format": fmt,
                "shape": f"probe_{n}x{k}",
                "N": n,
                "K": k,
                "M": m,
            }
            rows += [
                CheckRow(**place, **vars(result)) for result in _probe_results(fmt, n, k, m, cubin)
            ]
    return rows


def _probe_results(fmt: str, n: int, k: int, m: int, cubin: Path) -> list[CheckResult]:
    import cupy as cp

    found = []
    for probe in probes.probes_for(fmt, n, k, m):
        values, scales, row_scale = launch.to_device(probe.weight)
        x = cp.asarray(encode_bf16(probe.x))
        y = cp.full((m, n), cp.nan, cp.float32)
        launch.reference_matmul(x, values, scales, row_scale, fmt, cubin, out=y)
        result = probes.check(probe, cp.asnumpy(y))
        found.append(replace(result, name=f"probe_{result.name}"))
        if probe.name == "one_hot":
            decoded = cp.asnumpy(launch.reference_decode(values, scales, row_scale, fmt, cubin))
            found.append(_same_bits("decode_bits", decoded, dequantize(probe.weight)))
    found.append(_every_code(fmt, cubin))
    return found


def _same_bits(name: str, seen: np.ndarray, host: np.ndarray) -> CheckResult:
    """FP32 arrays bit for bit; any NaN equals any NaN, because IEEE leaves its payload open."""
    differs = (seen.view(np.uint32) != host.view(np.uint32)) & ~(np.isnan(seen) & np.isnan(host))
    count = int(np.count_nonzero(differs))
    return CheckResult(
        name, count == 0, float(count), 0.0, f"{count} of {host.size} weights differ in a bit"
    )


def _every_code(fmt: str, cubin: Path) -> CheckResult:
    """All element codes under all scale codes (256, or all 65536 BF16 scales), decoded bit for bit."""
    import cupy as cp

    spec = FORMATS[fmt]
    count = 256 if spec.scale_dtype.itemsize == 1 else 65536
    scales = np.arange(count, dtype=np.int64).astype(spec.scale_dtype).reshape(-1, 1)
    byte = np.arange(spec.group // 2, dtype=np.uint16)
    values = np.tile(((2 * byte) % 16 | ((2 * byte + 1) % 16) << 4).astype(np.uint8), (count, 1))
    packed = PackedWeight(fmt, count, spec.group, values, scales, np.ones(1))
    decoded = cp.asnumpy(launch.reference_decode(*launch.to_device(packed), fmt, cubin))
    with np.errstate(over="ignore", invalid="ignore"):
        return _same_bits("all_codes", decoded, dequantize(packed))
