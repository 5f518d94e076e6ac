"""CuPy memory as torch tensors, and torch on the harness's stream: no copies, and fit for graph capture."""

from __future__ import annotations

import sys
from typing import Any

from lab.peers._interface import Availability, check_packages

#: torch cannot take these from CuPy by name: the bytes pass as integers and are viewed on the other side.
CARRIERS = {1: "uint8", 2: "int16", 4: "int32"}


def check_device(availability: Availability) -> Availability:
    """`availability`, or why torch cannot reach a device."""
    if not availability.installed:
        return availability
    import torch

    if torch.cuda.is_available():
        return availability
    built = torch.version.cuda or "no CUDA"
    return Availability(
        False, availability.version, f"torch {torch.__version__} ({built}) sees no CUDA device"
    )


def as_tensor(array: Any, dtype: Any) -> Any:
    """A contiguous CuPy (or NumPy) array as a torch tensor of `dtype`, same bytes, same memory."""
    import torch

    carrier = array.view(CARRIERS[array.dtype.itemsize])
    return torch.from_dlpack(carrier).view(dtype)


def adopt(stream: Any) -> Any:
    """Make the harness's CuPy stream torch's current one in this thread, and return torch's view of it.

    The harness has one stream, so it is set once and not in every call: entering a context would be host time that a
    looped leg counts against the peer.
    """
    import torch

    external = torch.cuda.ExternalStream(stream.ptr)
    torch.cuda.set_stream(external)
    return external


def packages(*requires: dict[str, str]) -> Availability:
    """`check_packages` over several mappings, then the device."""
    merged = {k: v for mapping in requires for k, v in mapping.items()}
    return check_device(check_packages(merged))


def free_memory() -> None:
    """Give torch's cached device memory back, where torch is loaded at all."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
