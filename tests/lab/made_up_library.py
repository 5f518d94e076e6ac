"""A made-up device under the real library: `pack_weight`, `Launch` and `linear` run, and launches are noted."""

from __future__ import annotations

import ctypes
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lab import product_arms
from lab.product_arms import Packed
from qgemm_mx import gemm_launch, gemv_launch, gpu_linear, operands
from qgemm_mx.device import TensorMap
from qgemm_mx.formats import FORMATS, weight_bytes


class Array:
    """What the library and the arms read off a CuPy array, at a made-up address."""

    address = 1 << 30

    def __init__(self, shape: tuple, dtype: Any) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.itemsize, self.ndim = self.dtype.itemsize, len(self.shape)
        steps = np.cumprod([1, *self.shape[:0:-1]])[::-1] * self.itemsize
        self.strides = tuple(int(s) for s in steps)
        self.data = SimpleNamespace(ptr=Array.address, device_id=0)
        Array.address += -(-(int(np.prod(shape)) * self.itemsize + 1) // 512) * 512

    def fill(self, value: int) -> None:
        """Nothing to fill."""


def in_memory(arguments: int) -> dict[str, Any]:
    """What a driver reads of qgemv_mx: the addresses of the arguments, each as long as its type."""
    addresses = (ctypes.c_void_p * len(gemv_launch.ARGUMENTS)).from_address(arguments)
    return {
        name: kind.from_address(address).value
        for (name, kind), address in zip(gemv_launch.ARGUMENTS.items(), addresses, strict=True)
    }


def in_structure(arguments: int) -> dict[str, Any]:
    """The same of qgemm_mx, which takes one structure; of the tensor map what `Gpu.encode_map` wrote."""
    at = ctypes.c_void_p.from_address(arguments).value
    found = gemm_launch.MatrixArguments.from_address(at)
    kept = [name for name in gemm_launch.MATRIX_ARGUMENTS if name not in gemm_launch.UNUSED]
    values = {name: getattr(found, name) for name in kept}
    return {**values, "x": tuple(values["x"].opaque[:6])}


class Gpu:
    """Notes what is launched, in order: entry, grid, cluster, stream, programmatic, arguments by name."""

    ordinal, sm_count, smem_per_sm, alone = 0, 132, 233472, True

    def __init__(self) -> None:
        self.launched: list[SimpleNamespace] = []
        self.loaded: list[tuple[str, str]] = []
        self.prepared: tuple[int, int] | None = None
        self.status = (0, 124, 110)  # of packing: wide, largest and least code

    def is_current(self) -> bool:
        return True

    def function(self, source: str, entry: str, shared_bytes: int = 0) -> Any:
        self.loaded.append((source, entry))

        def packing(grid: Any, block: Any, arguments: Any) -> None:
            pass

        packing.ptr = len(self.loaded) - 1
        return packing

    def enqueue(self, handle: int, grid: int, *rest: int) -> None:
        *_, stream, arguments, _ = rest
        self._note(handle, grid, stream, arguments, False)

    def enqueue_as(self, config: Any, handle: int, arguments: int) -> None:
        found = {a.id: a.value for a in config.attrs[: config.numAttrs]}
        assert set(found) <= {4, 6}
        stream, cluster = config.hStream or 0, found.get(4, 1)
        self._note(handle, config.gridDimX, stream, arguments, 6 in found, cluster)

    def encode_map(
        self, at: int, pointer: int, shape: tuple[int, int], stride: int, box: tuple[int, int]
    ) -> None:
        TensorMap.from_address(at).opaque[:6] = [pointer, *shape, stride, *box]

    def prepare_workspaces(self, block_bytes: int, block_flags: int) -> None:
        self.prepared = (block_bytes, block_flags)

    def workspace(self, stream: int) -> tuple[int, int] | None:
        return (1 << 20, 1 << 21) if self.prepared else None

    def _note(
        self, handle: int, grid: int, stream: int, at: int, programmatic: bool, cluster: int = 1
    ) -> None:
        source, entry = self.loaded[handle]
        read = in_structure if source.startswith("qgemm") else in_memory
        self.launched.append(
            SimpleNamespace(
                source=source, entry=entry, grid=grid, stream=stream, programmatic=programmatic,
                arguments=read(at), cluster=cluster,
            )
        )  # fmt: skip

    @contextmanager
    def on(self, stream: Any):
        yield

    def empty(self, count: int, dtype: Any) -> Array:
        return Array((count,), dtype)

    zeros = empty

    def upload(self, array: np.ndarray) -> Array:
        return Array(array.shape, array.dtype)

    def download(self, array: Any) -> np.ndarray:
        return np.array(self.status)


class Stream:
    """A stream that can be entered and waited for."""

    ptr = 77

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


def install(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Put the made-up device under the library, and a CuPy that only allocates under the arms."""
    made = Gpu()
    cupy = ModuleType("cupy")
    cupy.uint16, cupy.empty = np.uint16, Array
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    library = operands.Library(
        operands._read_cupy, lambda like, shape: Array(shape, like.dtype), lambda a: a.data.ptr,
        lambda device: Stream.ptr,
    )  # fmt: skip
    monkeypatch.setitem(operands.LIBRARIES, Array, library)
    monkeypatch.setattr(gpu_linear, "as_cupy", lambda name, array: array)
    for module in (gpu_linear, product_arms):
        monkeypatch.setattr(module, "device", lambda ordinal: made)
    forget()
    return made


def forget() -> None:
    """Drop the launches that the library keeps."""
    for cached in (
        gpu_linear.launches, gpu_linear._by_rows, gpu_linear.matrix_launches,
        gpu_linear._matrix_functions,
    ):  # fmt: skip
        cached.cache_clear()


def weights(fmt: str = "mxfp4", n: int = 40, k: int = 384, copies: int = 3) -> SimpleNamespace:
    """Weight copies as `lab.operands` makes them."""
    spec = FORMATS[fmt]

    def views(copy: int) -> tuple[Array, Array]:
        return Array((n, k // 2), np.uint8), Array((n, k // spec.group), spec.scale_dtype)

    return SimpleNamespace(
        format=fmt, n=n, k=k, copies=copies, copy_bytes=weight_bytes(fmt, n, k), tensor_scale=0.5,
        views=views,
    )  # fmt: skip


def packed(*args: Any, **kwargs: Any) -> Packed:
    """Those copies, packed."""
    return Packed.of(weights(*args, **kwargs), Stream())
