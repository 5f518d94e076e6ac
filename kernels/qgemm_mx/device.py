"""One GPU: its cubins, their functions, and arguments that cost nothing to pass again.

Cubins are compiled when a source is first loaded on an architecture and kept in the user's cache folder;
a call never compiles. CuPy is imported at first use, never with the package.
"""

from __future__ import annotations

import os
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


@cache
def by_value() -> type:
    """The class of a kernel argument whose bytes are laid down once: `by_value()(np.int32(7))`.

    CuPy takes a pointer to the bytes as it is; a plain number it would convert in every call.
    """
    from cupy.cuda.function import CPointer

    class ByValue(CPointer):
        def __init__(self, value: np.generic):
            self.memory = np.array([value])
            super().__init__(self.memory.ctypes.data)

    return ByValue


class Device:
    """A CUDA device. `device(ordinal)` gives the one object of each."""

    def __init__(self, ordinal: int):
        import cupy as cp

        properties = cp.cuda.runtime.getDeviceProperties(ordinal)
        self.ordinal = ordinal
        self.handle = cp.cuda.Device(ordinal)
        self.compute_capability = f"{properties['major']}{properties['minor']}"
        self.sm_count = int(properties["multiProcessorCount"])
        self.smem_per_sm = int(properties["sharedMemPerMultiprocessor"])
        self.alone = cp.cuda.runtime.getDeviceCount() == 1
        self._modules: dict[str, Any] = {}
        self._allowed: dict[tuple[str, str], int] = {}
        self._runtime = cp.cuda.runtime

    def is_current(self) -> bool:
        """Whether launches go to this device without changing the current one."""
        return self.alone or self._runtime.getDevice() == self.ordinal

    def function(self, source: str, entry: str, shared_bytes: int = 0) -> Any:
        """An entry of cuda/<source>.cu, loaded, with leave to use `shared_bytes` of dynamic shared memory.

        Called as function(grid, block, arguments, shared_bytes, stream). Compiles the source if it has not
        been on this architecture; LaunchError names an entry that is not there.
        """
        import cupy as cp

        with self.handle:
            if source not in self._modules:
                self._modules[source] = cp.RawModule(path=str(self._cubin(source)))
            kernel = self._modules[source].get_function(entry)
            try:
                found = kernel.kernel
            except cp.cuda.driver.CUDADriverError as error:
                raise LaunchError(f"{source} has no entry {entry}: {error}") from None
            # The leave belongs to the entry, which weights of many shapes share: it only grows. Setting it also makes
            # the driver load the function now, and not during a capture.
            allowed = max(shared_bytes, self._allowed.get((source, entry), 0))
            if allowed:
                kernel.max_dynamic_shared_size_bytes = self._allowed[source, entry] = allowed
            return found

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Allocations and copies of the block go to this device and this stream (None: CuPy's current one)."""
        import cupy as cp

        with self.handle, nullcontext() if stream is None else cp.cuda.ExternalStream(stream.ptr):
            yield

    def zeros(self, count: int, dtype: Any) -> Any:
        """A new array of zeros, for use inside `on`."""
        import cupy as cp

        return cp.zeros(count, dtype)

    def empty(self, count: int, dtype: Any) -> Any:
        """A new array without contents, for use inside `on`."""
        import cupy as cp

        return cp.empty(count, dtype)

    def upload(self, array: np.ndarray) -> Any:
        """A copy of a host array, for use inside `on`."""
        import cupy as cp

        return cp.asarray(array)

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
    """Ordinal of CuPy's current device."""
    import cupy as cp

    return int(cp.cuda.runtime.getDevice())
