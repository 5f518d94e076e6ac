"""What a call reads off an operand: address, shape, strides, type, device. No copy, no synchronisation.

CuPy arrays and torch tensors are read directly; anything else with DLPack goes through
`cupy.from_dlpack`, which orders the producer's work before CuPy's current stream. Neither CuPy nor torch
is imported here before an operand of theirs has been made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np


class Operand(NamedTuple):
    """One device array as a kernel sees it. Strides in elements; dtype by its NumPy name."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int


class Library(NamedTuple):
    """How the arrays of one library are read and made, and which stream their work is ordered on."""

    read: Callable[[Any], tuple]  # the fields of an Operand in a plain tuple, which is made faster
    empty: Callable[[Any, tuple[int, ...]], Any]  # of the type and on the device of an array
    address: Callable[[Any], int]  # of the first element
    stream: Callable[[int], int]  # the current one of a device, as an address


def library_of(name: str, array: Any) -> Library:
    """The library of an operand; TypeError names what is no device array."""
    found = LIBRARIES.get(type(array))
    if found is None:
        LIBRARIES[type(array)] = found = _find(name, array)
    return found


def read(name: str, array: Any) -> Operand:
    """What a call reads off an operand, by name."""
    return Operand(*library_of(name, array).read(array))


def stream_of(stream: Any) -> int:
    """The address of a stream: of CuPy or torch, an address itself, or anything with `__cuda_stream__`."""
    if isinstance(stream, int):
        return stream
    for name in ("ptr", "cuda_stream"):  # CuPy's, torch's
        if hasattr(stream, name):
            return getattr(stream, name)
    if hasattr(stream, "__cuda_stream__"):
        return stream.__cuda_stream__()[1]
    raise TypeError(f"stream is {type(stream).__name__}: neither a CUDA stream nor its address")


def as_cupy(name: str, array: Any) -> Any:
    """A CuPy view of any device array. Types that CuPy lacks come as unsigned integers of their size."""
    import cupy as cp

    if isinstance(array, cp.ndarray):
        return array
    if isinstance(array, np.ndarray):
        raise TypeError(f"{name} is a NumPy array: it must lie on a device")
    if type(array).__module__.partition(".")[0] == "torch":
        import torch

        # float8 and bfloat16 have no CuPy type of their own; the bits are what is wanted.
        array = array.detach()
        if not array.dtype.is_floating_point or array.dtype.itemsize > 2:
            return cp.from_dlpack(array)
        whole = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.uint16)}[array.dtype.itemsize]
        return cp.from_dlpack(array.view(whole[0])).view(whole[1])
    if not hasattr(array, "__dlpack__"):
        raise TypeError(
            f"{name} is {type(array).__name__}: neither a CuPy array nor anything with DLPack"
        )
    found = cp.from_dlpack(array)
    return found.view(np.uint16) if found.dtype.name == "bfloat16" else found


def _find(name: str, array: Any) -> Library:
    root = type(array).__module__.partition(".")[0]
    if root == "torch":
        return _torch()
    if root == "cupy":
        return _cupy()
    given = f"{name} is {type(array).__module__}.{type(array).__name__}"
    if isinstance(array, np.ndarray):
        raise TypeError(
            f"{given}, in the memory of the host: it must lie on a device, as an array of CuPy,"
            " torch, or anything with DLPack (cupy.asarray copies it there)"
        )
    if not hasattr(array, "__dlpack__"):
        raise TypeError(
            f"{given}: it must be a device array of CuPy, torch, or anything with DLPack"
        )
    cupy = _cupy()
    from cupy import from_dlpack

    return Library(
        lambda array: cupy.read(from_dlpack(array)),
        lambda like, shape: cupy.empty(from_dlpack(like), shape),
        cupy.address,
        cupy.stream,
    )


@cache
def _cupy() -> Library:
    import cupy as cp

    get_device, current_stream = cp.cuda.runtime.getDevice, cp.cuda.get_current_stream

    def empty(like: Any, shape: tuple[int, ...]) -> Any:
        if get_device() == like.data.device_id:
            return cp.empty(shape, like.dtype)
        with cp.cuda.Device(like.data.device_id):
            return cp.empty(shape, like.dtype)

    return Library(
        _read_cupy, empty, lambda array: array.data.ptr, lambda device: current_stream(device).ptr
    )


def _read_cupy(array: Any) -> tuple:
    memory, strides = array.data, array.strides
    dtype = array.dtype
    name, size = _NAMES.get(dtype) or _name(dtype)
    if len(strides) == 2:
        strides = (strides[0] // size, strides[1] // size)
    else:
        strides = tuple([s // size for s in strides])
    return memory.ptr, array.shape, strides, name, memory.device_id


@cache
def _torch() -> Library:
    import torch

    # The address alone, as Inductor and Triton ask for it: torch.cuda.current_stream makes an object each time.
    stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if stream is None:

        def stream(device: int) -> int:
            return torch.cuda.current_stream(device).cuda_stream

    return Library(
        _read_torch, lambda like, shape: like.new_empty(shape), torch.Tensor.data_ptr, stream
    )


def _read_torch(tensor: Any) -> tuple:
    if not tensor.is_cuda:
        raise TypeError(f"a torch tensor is on {tensor.device}, not on a CUDA device")
    dtype = tensor.dtype
    name, _ = _NAMES.get(dtype) or _name(dtype)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), name, tensor.get_device()


def _name(dtype: Any) -> tuple[str, int]:
    """`float16` for numpy.dtype("float16") and torch.float16 alike, and bytes; formatting is slow, so once a type."""
    _NAMES[dtype] = found = str(dtype).rpartition(".")[2], dtype.itemsize
    return found


_NAMES: dict[Any, tuple[str, int]] = {}
LIBRARIES: dict[type, Library] = {}
