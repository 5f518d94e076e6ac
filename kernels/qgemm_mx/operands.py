"""What a call reads off an operand: address, shape, strides, type, device. No copy, no synchronisation.

CuPy arrays and torch tensors are read directly; anything else with DLPack goes through
`cupy.from_dlpack`, which orders the producer's work before CuPy's current stream. Neither CuPy nor torch
is imported here before an operand of theirs has been made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Operand(NamedTuple):
    """One device array as a kernel sees it. Strides in elements; dtype by its NumPy name."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int


class StreamPointer:
    """A CUDA stream of another library, with the one attribute that CuPy's launch asks for."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int):
        self.ptr = ptr


class Library(NamedTuple):
    """How the arrays of one library are read and made, and which stream their work is ordered on."""

    read: Callable[
        [Any], tuple
    ]  # the fields of an Operand, in a plain tuple: it is made twice a call
    empty: Callable[[Any, tuple[int, ...]], Any]  # of the type and on the device of an array
    stream: Callable[[int], Any]  # of a device; None is CuPy's current one


def library_of(name: str, array: Any) -> Library:
    """The library of an operand; TypeError names what is no device array."""
    found = _LIBRARIES.get(type(array))
    if found is None:
        _LIBRARIES[type(array)] = found = _find(name, array)
    return found


def read(name: str, array: Any) -> Operand:
    """What a call reads off an operand, by name."""
    return Operand(*library_of(name, array).read(array))


def stream_of(stream: Any) -> Any:
    """An object with `.ptr` for a CuPy or torch stream, an address, or anything with `__cuda_stream__`."""
    if hasattr(stream, "ptr"):
        return stream
    if isinstance(stream, int):
        return StreamPointer(stream)
    if hasattr(stream, "cuda_stream"):  # torch
        return StreamPointer(stream.cuda_stream)
    if hasattr(stream, "__cuda_stream__"):
        return StreamPointer(stream.__cuda_stream__()[1])
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
        return Library(_read_torch, _empty_torch, _stream_torch)
    if root == "cupy":
        return _CUPY
    if isinstance(array, np.ndarray) or not hasattr(array, "__dlpack__"):
        raise TypeError(
            f"{name} is {type(array).__module__}.{type(array).__name__}:"
            " it must be a device array of CuPy, torch, or anything with DLPack"
        )
    return Library(
        _read_dlpack, lambda like, shape: _empty_cupy(_from_dlpack(like), shape), _stream_cupy
    )


def _read_cupy(array: Any) -> tuple:
    memory, size, strides = array.data, array.itemsize, array.strides
    if len(strides) == 2:
        strides = (strides[0] // size, strides[1] // size)
    else:
        strides = tuple([s // size for s in strides])
    return memory.ptr, array.shape, strides, _name(array.dtype), memory.device_id


def _empty_cupy(like: Any, shape: tuple[int, ...]) -> Any:
    import cupy as cp

    if cp.cuda.runtime.getDevice() == like.data.device_id:
        return cp.empty(shape, like.dtype)
    with cp.cuda.Device(like.data.device_id):
        return cp.empty(shape, like.dtype)


def _stream_cupy(device: int) -> None:
    return None


def _read_torch(tensor: Any) -> tuple:
    if not tensor.is_cuda:
        raise TypeError(f"a torch tensor is on {tensor.device}, not on a CUDA device")
    dtype = _name(tensor.dtype)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), dtype, tensor.get_device()


def _empty_torch(like: Any, shape: tuple[int, ...]) -> Any:
    return like.new_empty(shape)


def _stream_torch(device: int) -> StreamPointer:
    return StreamPointer(sys.modules["torch"].cuda.current_stream(device).cuda_stream)


def _from_dlpack(array: Any) -> Any:
    import cupy as cp

    return cp.from_dlpack(array)


def _read_dlpack(array: Any) -> tuple:
    return _read_cupy(_from_dlpack(array))


def _name(dtype: Any) -> str:
    """`float16` for both numpy.dtype("float16") and torch.float16; formatting one is slow, so once a type."""
    found = _NAMES.get(dtype)
    if found is None:
        _NAMES[dtype] = found = str(dtype).rpartition(".")[2]
    return found


_NAMES: dict[Any, str] = {}
_CUPY = Library(_read_cupy, _empty_cupy, _stream_cupy)
_LIBRARIES: dict[type, Library] = {}
