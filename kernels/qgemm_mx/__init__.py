"""qgemm_mx: block-scaled 4-bit weight formats and their kernels, y = x W^T on NVIDIA GPUs.

Importing the package loads nothing else: the names below are resolved on first use, so that a
process which only wants the version pays neither for numpy nor for a CUDA driver. CuPy is imported
where `pack_weight` or `linear` first needs a device; the rest works without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "FORMATS": "formats",
    "bytes_per_weight": "formats",
    "weight_bytes": "formats",
    "PackedWeight": "packing",
    "quantize": "packing",
    "dequantize": "packing",
    "concatenate": "packing",
    "reference_matmul": "packing",
    "pack_weight": "gpu_linear",
    "linear": "gpu_linear",
    "LinearWeight": "gpu_linear",
    "LaunchError": "launch",
    "DeviceError": "device",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
