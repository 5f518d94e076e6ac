"""Launches of the package's kernels on a device. CuPy is imported at first use, never with the package.

The reference kernel is here to check encodings and other kernels with; it has no time worth knowing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .formats import FORMATS
from .packing import PackedWeight

THREADS = 256


class LaunchError(ValueError):
    """Operands that a kernel cannot take; the message names the object, the value and the limit."""


@cache
def _module(cubin: Path) -> Any:
    import cupy as cp

    return cp.RawModule(path=str(cubin))


def reference_matmul(
    x: Any, values: Any, scales: Any, row_scale: Any, format: str, cubin: Path, out: Any = None
) -> Any:
    """y = x W^T by the reference kernel, FP32 [M, N] on the device.

    x          BF16 bit patterns, uint16 [M, K]; rows may be strided
    values     uint8 [N, K/2] and scales [N, K/group] on the device; rows may be strided
    row_scale  float32 [N], the tensor scale of each row's shard
    out        float32 [M, N] to write into, rows may be strided; a new array without it

    M = 0 gives an empty result without a launch. LaunchError names a wrong dtype, shape, K or layout.
    """
    import cupy as cp

    fmt = FORMATS[format]
    m, k = _matrix("x", x, np.uint16)
    n, half = _matrix("values", values, np.uint8)
    if k % fmt.group:
        raise LaunchError(f"K={k} is not a multiple of the {format} scale group {fmt.group}")
    if 2 * half != k:
        raise LaunchError(f"values have {2 * half} elements a row, x has K={k}")
    if _matrix("scales", scales, fmt.scale_dtype) != (n, k // fmt.group):
        raise LaunchError(f"scales are {list(scales.shape)}, not {[n, k // fmt.group]} ({format})")
    if row_scale.dtype != np.float32 or row_scale.shape != (n,):
        raise LaunchError(
            f"row_scale is {row_scale.dtype} {list(row_scale.shape)}, not float32 [{n}]"
        )
    y = cp.empty((m, n), cp.float32) if out is None else out
    if _matrix("out", y, np.float32) != (m, n):
        raise LaunchError(f"out is {list(y.shape)}, not {[m, n]}")
    if m * n == 0:
        return y
    kernel = _module(Path(cubin)).get_function(f"reference_{format}")
    strides = (_stride(x), _stride(values), _stride(scales), _stride(y))
    sizes = (np.int32(m), np.int32(n), np.int32(k))
    kernel((-(-m * n // THREADS),), (THREADS,), (x, values, scales, row_scale, y, *sizes, *strides))
    return y


def reference_decode(values: Any, scales: Any, row_scale: Any, format: str, cubin: Path) -> Any:
    """W[N, K] in FP32 on the device, decoded by the reference kernel; operands as in `reference_matmul`."""
    import cupy as cp

    fmt = FORMATS[format]
    n, half = _matrix("values", values, np.uint8)
    k = 2 * half
    if k % fmt.group:
        raise LaunchError(f"K={k} is not a multiple of the {format} scale group {fmt.group}")
    if _matrix("scales", scales, fmt.scale_dtype) != (n, k // fmt.group):
        raise LaunchError(f"scales are {list(scales.shape)}, not {[n, k // fmt.group]} ({format})")
    w = cp.empty((n, k), cp.float32)
    kernel = _module(Path(cubin)).get_function(f"reference_decode_{format}")
    strides = (_stride(values), _stride(scales))
    arguments = (values, scales, row_scale, w, np.int32(n), np.int32(k), *strides)
    kernel((-(-n * k // THREADS),), (THREADS,), arguments)
    return w


def to_device(packed: PackedWeight) -> tuple[Any, Any, Any]:
    """Values, scales and per-row tensor scale of a packed weight on the current device."""
    import cupy as cp

    return cp.asarray(packed.values), cp.asarray(packed.scales), cp.asarray(packed.row_tensor_scale)


def _matrix(name: str, array: Any, dtype: Any) -> tuple[int, int]:
    """Shape of a row-major matrix whose rows may be strided; refuses anything else."""
    if array.dtype != dtype or array.ndim != 2:
        raise LaunchError(
            f"{name} is {array.dtype} {list(array.shape)}, not a {np.dtype(dtype)} matrix"
        )
    if array.size == 0:  # strides of an empty array mean nothing
        return int(array.shape[0]), int(array.shape[1])
    if array.shape[1] > 1 and array.strides[1] != array.itemsize:
        raise LaunchError(
            f"{name} has a column stride of {array.strides[1]} bytes, not {array.itemsize}"
        )
    if array.shape[0] > 1 and array.strides[0] < array.shape[1] * array.itemsize:
        raise LaunchError(
            f"{name} has a row stride of {array.strides[0]} bytes: rows overlap or run backwards"
        )
    if array.shape[0] > 1 and array.strides[0] % array.itemsize:
        raise LaunchError(
            f"{name} has a row stride of {array.strides[0]} bytes, no multiple of {array.itemsize}"
        )
    return int(array.shape[0]), int(array.shape[1])


def _stride(array: Any) -> np.int64:
    """Row stride in elements."""
    return np.int64(array.strides[0] // array.itemsize if array.shape[0] > 1 else array.shape[1])
