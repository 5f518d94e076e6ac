"""One GPU: its cubins, their entries, and the driver calls that launch them.

Cubins are compiled when a source is first loaded on an architecture and kept in the user's cache folder;
a call never compiles. CuPy is imported at first use, never with the package.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from . import build
from .launch import LaunchError


def cache_folder() -> Path:
    """Where cubins are kept: $XDG_CACHE_HOME/qgemm_mx, or ~/.cache/qgemm_mx."""
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base) / "qgemm_mx" if base else Path.home() / ".cache" / "qgemm_mx"


def architecture(compute_capability: str, source: build.KernelSource) -> str:
    """The architecture of a source that runs on a device such as `90`; LaunchError names both otherwise.

    A cubin runs on devices of its major version from its minor version on; one with the suffix `a` only
    on its own.
    """
    major, minor = int(compute_capability[:-1]), int(compute_capability[-1])
    for name in source.architectures:
        number = name.removeprefix("sm_").rstrip("a")
        if number == compute_capability:
            return name
    for name in source.architectures:
        number = name.removeprefix("sm_")
        if number.isdigit() and int(number[:-1]) == major and int(number[-1]) <= minor:
            return name
    raise LaunchError(
        f"{source.name} is built for {', '.join(source.architectures)}, the device is sm_{compute_capability}"
    )


@cache
def _sources() -> dict[str, build.KernelSource]:
    return build.load_sources()


WORKSPACES = 4  # streams of a device on which jobs are shared between blocks


class DeviceError(RuntimeError):
    """No GPU that can be used, or no CuPy to reach it with."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h; its value is a union of 64 bytes, of which up to three integers are used here."""

    _fields_ = [
        ("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint), ("rest", ctypes.c_uint * 15),
    ]  # fmt: skip


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        *((f"{of}Dim{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "XYZ"),
        ("sharedMemBytes", ctypes.c_uint),
        ("hStream", ctypes.c_void_p),
        ("attrs", ctypes.POINTER(LaunchAttribute)),
        ("numAttrs", ctypes.c_uint),
    ]


CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CU_LAUNCH_ATTRIBUTE_... of cuda.h


def launch_config(
    grid: int,
    block: tuple[int, int],
    shared_bytes: int,
    cluster: int = 1,
    programmatic: bool = False,
) -> LaunchConfig:
    """A launch whose stream is left to be filled in.

    cluster       blocks of a cluster
    programmatic  it may begin before the kernel in front of it has ended
    """
    attributes = []
    if programmatic:
        attributes.append(LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, b"", 1))
    if cluster > 1:
        attributes.append(LaunchAttribute(CLUSTER_DIMENSION, b"", cluster, (1, 1)))
    count = len(attributes)
    attrs = (LaunchAttribute * count)(*attributes) if attributes else None
    return LaunchConfig(grid, 1, 1, *block, 1, shared_bytes, None, attrs, count)


class TensorMap(ctypes.Structure):
    """CUtensorMap of cuda.h, whose contents are the driver's; it begins at a multiple of TENSOR_MAP_ALIGNMENT."""

    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


TENSOR_MAP_ALIGNMENT = (
    128  # of the header from CUDA 13 on; 64 before, and all that the driver asks for
)
# Of cuTensorMapEncodeTiled: BF16, two dimensions; no interleaving, swizzle and L2 of 128 bytes, zeros outside.
_BF16_2D, _SWIZZLE_128 = (9, 2), (0, 3, 2, 0)


class Device:
    """A CUDA device. `device(ordinal)` gives the one object of each.

    enqueue  cuLaunchKernel with integers alone (handle, grid and block x, y, z, shared bytes, stream, address of the
             addresses of the arguments, 0): CuPy's binding, the cheapest that there is, releases the GIL and raises the
             driver's error. A kernel's own call converts each argument each time.
    alone    whether there is no other device, so that the current one need not be asked for
    """

    def __init__(self, ordinal: int):
        cp = _cupy()
        properties = cp.cuda.runtime.getDeviceProperties(ordinal)
        self.ordinal = ordinal
        self.compute_capability = f"{properties['major']}{properties['minor']}"
        self.sm_count = int(properties["multiProcessorCount"])
        self.smem_per_sm = int(properties["sharedMemPerMultiprocessor"])
        self.alone = cp.cuda.runtime.getDeviceCount() == 1
        self.enqueue = cp.cuda.driver.launchKernel
        self._modules: dict[str, Any] = {}
        self._allowed: dict[tuple[str, str], int] = {}
        self._loading = threading.Lock()
        self._workspaces: list[tuple[Any, Any]] = []
        self._workspace_of: dict[int, tuple[int, int] | None] = {}
        self._runtime, self._driver = cp.cuda.runtime, cp.cuda.driver

    def prepare_workspaces(self, block_bytes: int, block_flags: int) -> None:
        """Memory in which blocks of a launch leave sums for one another, for the first WORKSPACES streams; once."""
        with self._loading, self.made_current():
            if not self._workspaces:
                cp = _cupy()
                flags = [
                    cp.zeros(self.sm_count * block_flags, np.uint32) for _ in range(WORKSPACES)
                ]
                sums = [cp.empty(self.sm_count * block_bytes, np.uint8) for _ in range(WORKSPACES)]
                cp.cuda.runtime.deviceSynchronize()
                self._workspaces += zip(sums, flags, strict=True)

    def workspace(self, stream: int) -> tuple[int, int] | None:
        """Addresses of the sums and flags of a stream, which keeps them; None where none is left."""
        try:
            return self._workspace_of[stream]
        except KeyError:
            with self._loading:
                taken = len([found for found in self._workspace_of.values() if found])
                found = None
                if taken < len(self._workspaces):
                    found = tuple(int(array.data.ptr) for array in self._workspaces[taken])
                return self._workspace_of.setdefault(stream, found)

    def is_current(self) -> bool:
        """Whether launches of this thread go to this device as it is."""
        return self.alone or self._runtime.getDevice() == self.ordinal

    @contextmanager
    def made_current(self) -> Iterator[None]:
        """Within the block, the current device of the thread is this one."""
        before = self._runtime.getDevice()
        self._runtime.setDevice(self.ordinal)
        try:
            yield
        finally:
            self._runtime.setDevice(before)

    def enqueue_as(self, config: LaunchConfig, handle: int, arguments: int) -> None:
        """cuLaunchKernelEx, which CuPy has not; `arguments` as in `enqueue`. Raises the driver's error."""
        status = _driver("cuLaunchKernelEx")(ctypes.byref(config), handle, arguments, None)
        if status:
            raise self._driver.CUDADriverError(status)

    def encode_map(
        self, at: int, pointer: int, shape: tuple[int, int], stride: int, box: tuple[int, int]
    ) -> None:
        """Write the tensor map of a BF16 matrix, whose boxes the copy engine lays down with a swizzle of 128 bytes.

        at       address of a `TensorMap`
        pointer  of the matrix, a multiple of 16
        shape, box   columns and rows
        stride   bytes from row to row, a multiple of 16
        """
        status = _driver("cuTensorMapEncodeTiled")(
            at, *_BF16_2D, pointer, (ctypes.c_uint64 * 2)(*shape), (ctypes.c_uint64 * 1)(stride),
            (ctypes.c_uint32 * 2)(*box), (ctypes.c_uint32 * 2)(1, 1), *_SWIZZLE_128,
        )  # fmt: skip
        if status:
            raise self._driver.CUDADriverError(status)

    def attach(self) -> bool:
        """Give a thread that has no CUDA context yet the one of this device; False if it has one."""
        if self._driver.ctxGetCurrent():
            return False
        self._runtime.setDevice(self.ordinal)
        return True

    def function(self, source: str, entry: str, shared_bytes: int = 0) -> Any:
        """An entry of cuda/<source>.cu, loaded, with leave to use `shared_bytes` of dynamic shared memory.

        CuPy's function: `.ptr` is the handle for `enqueue`, a call is function(grid, block, arguments, shared_bytes).
        Compiles the source if it has not been on this architecture; LaunchError names an entry that is not there.
        """
        cp = _cupy()
        with self._loading, self.made_current():
            if source not in self._modules:
                self._modules[source] = cp.RawModule(path=str(self._cubin(source)))
            kernel = self._modules[source].get_function(entry)
            try:
                found = kernel.kernel
            except cp.cuda.driver.CUDADriverError as error:
                raise LaunchError(f"{source} has no entry {entry}: {error}") from None
            # The leave belongs to the entry, which weights of many shapes share: it only grows. Setting it also
            # makes the driver load the function now, and not during a capture.
            allowed = max(shared_bytes, self._allowed.get((source, entry), 0))
            if allowed:
                kernel.max_dynamic_shared_size_bytes = self._allowed[source, entry] = allowed
                # One split of L1 for all entries: an SM that changes it must be empty first, and a dependent kernel
                # could not stand beside the one in front of it.
                kernel.preferred_shared_memory_carveout = 100
            return found

    @contextmanager
    def on(self, stream: int | None) -> Iterator[None]:
        """Allocations, copies and calls of the block go to this device and this stream (None: CuPy's current one)."""
        cp = _cupy()
        with (
            self.made_current(),
            nullcontext() if stream is None else cp.cuda.ExternalStream(stream),
        ):
            yield

    def zeros(self, count: int, dtype: Any) -> Any:
        """A new array of zeros, for use inside `on`."""
        return _cupy().zeros(count, dtype)

    def empty(self, count: int, dtype: Any) -> Any:
        """A new array without contents, for use inside `on`."""
        return _cupy().empty(count, dtype)

    def upload(self, array: np.ndarray) -> Any:
        """A copy of a host array, for use inside `on`."""
        return _cupy().asarray(array)

    def download(self, array: Any) -> np.ndarray:
        """The contents of a device array; waits for the stream. For use inside `on`."""
        return array.get()

    def _cubin(self, name: str) -> Path:
        source = _sources()[name]
        arch = architecture(self.compute_capability, source)
        folder = cache_folder() / "cubins"
        return folder / arch / build.compile_cubin(source, arch, folder).cubin


@cache
def device(ordinal: int) -> Device:
    """The device object of an ordinal."""
    return Device(ordinal)


def current_device() -> int:
    """Ordinal of CuPy's current device; DeviceError where there is none."""
    cp = _cupy()
    try:
        return int(cp.cuda.runtime.getDevice())
    except cp.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(f"no CUDA device can be used here: {error}") from error


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(
            f"CuPy, which packs and launches on a GPU, cannot be imported ({error}): pip install '.[gpu]'"
        ) from error
    return cupy


_ARGUMENTS = {
    "cuLaunchKernelEx": [ctypes.c_void_p] * 4,
    "cuTensorMapEncodeTiled": [
        ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, *[ctypes.c_void_p] * 5, *[ctypes.c_int] * 4,
    ],
}  # fmt: skip


@cache
def _driver(name: str) -> Any:
    """A function of the driver. `ctypes.CDLL` releases the GIL: a full queue makes the driver wait."""
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes, function.restype = _ARGUMENTS[name], ctypes.c_int
    return function
