"""The device edge: what the GPU is, what it is doing, and how a cubin's kernels are launched.

This module and `timing`, `arms`, `measure` are the only ones of the lab that import CuPy, and they do so inside
functions: a machine without a GPU can import everything else. Nothing here changes a clock, a power limit or a mode.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# NVML clock-event reasons (nvml.h, nvmlClocksEventReason*).
THROTTLE_REASONS = {
    "gpu_idle": 0x1,
    "applications_clocks": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake": 0x80,
    "display_clock": 0x100,
}


class DeviceError(RuntimeError):
    """The device cannot be measured; the message names the object, the value and the limit."""


def count_devices() -> int:
    """Number of NVIDIA devices that the driver reports; 0 where there is no driver."""
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0


def device_uuid(index: int = 0) -> str | None:
    """UUID of a device (`GPU-...`), or None where there is none."""
    if count_devices() <= index:
        return None
    import pynvml

    return _text(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _optional(call, *arguments):
    """The answer of an NVML query, or None where this device or driver does not support it."""
    import pynvml

    try:
        return call(*arguments)
    except pynvml.NVMLError:
        return None


def probe(index: int = 0) -> dict[str, Any]:
    """Constants and state of a device as found: one flat dictionary, units in the names."""
    import cupy as cp
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    attributes = cp.cuda.Device(index).attributes
    properties = cp.cuda.runtime.getDeviceProperties(index)
    power_limit = _optional(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    ecc = _optional(pynvml.nvmlDeviceGetEccMode, handle)
    mig = _optional(pynvml.nvmlDeviceGetMigMode, handle)
    processes = _optional(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return {
        "name": _text(pynvml.nvmlDeviceGetName(handle)),
        "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
        "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
        "cuda_driver_version": int(cp.cuda.runtime.driverGetVersion()),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "sm_count": int(attributes["MultiProcessorCount"]),
        "l2_bytes": int(attributes["L2CacheSize"]),
        "smem_per_sm_bytes": int(attributes["MaxSharedMemoryPerMultiprocessor"]),
        "memory_bytes": int(properties["totalGlobalMem"]),
        "max_sm_clock_mhz": _optional(
            pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM
        ),
        "max_mem_clock_mhz": _optional(
            pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM
        ),
        "power_limit_w": None if power_limit is None else power_limit / 1000.0,
        "ecc": None if ecc is None else bool(ecc[0]),
        "mig": None if mig is None else bool(mig[0]),
        "other_processes": None if processes is None else max(0, len(processes) - 1),
    }


class Telemetry:
    """Samples clocks, power, temperature and throttle reasons in a thread while a campaign runs.

    Times are `time.perf_counter_ns`, the clock that the legs are stamped with.
    """

    def __init__(self, period_ms: float, index: int = 0) -> None:
        self.period_s = period_ms / 1000.0
        self.index = index
        self.rows: list[dict[str, float]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def sample(self) -> dict[str, float]:
        """One reading: t_ns, clocks in MHz, power in W, temperature in degrees C, reasons bitmask."""
        import pynvml as nv

        handle = self._handle
        power = _optional(nv.nvmlDeviceGetPowerUsage, handle)
        reasons = _optional(nv.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        return {
            "t_ns": time.perf_counter_ns(),
            "sm_clock_mhz": _optional(nv.nvmlDeviceGetClockInfo, handle, nv.NVML_CLOCK_SM),
            "mem_clock_mhz": _optional(nv.nvmlDeviceGetClockInfo, handle, nv.NVML_CLOCK_MEM),
            "power_w": None if power is None else power / 1000.0,
            "temperature_c": _optional(
                nv.nvmlDeviceGetTemperature, handle, nv.NVML_TEMPERATURE_GPU
            ),
            "throttle_reasons": reasons,
        }

    def _run(self) -> None:
        while not self._stop.wait(self.period_s):
            self.rows.append(self.sample())

    def __enter__(self) -> Telemetry:
        import pynvml

        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(self.index)
        self.rows.append(self.sample())
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.rows.append(self.sample())


def function_handle(kernel: Any) -> int:
    """The CUfunction of a CuPy kernel, for what CuPy does not call itself."""
    return kernel.kernel.ptr if hasattr(kernel, "kernel") else kernel.ptr


@dataclass
class CubinModule:
    """A loaded cubin. Kernels are fetched once; a launch is one driver call."""

    path: Path
    _module: Any = field(init=False, repr=False)
    _kernels: dict[str, Any] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        import cupy as cp

        if not Path(self.path).is_file():
            raise DeviceError(f"cubin {self.path} does not exist: run the target `build` first")
        self._module = cp.RawModule(path=str(self.path))

    def kernel(self, entry: str, dynamic_smem_bytes: int = 0) -> Any:
        """The entry function as a CuPy kernel, allowed `dynamic_smem_bytes` of shared memory."""
        kernel = self._kernels.get(entry)
        if kernel is None:
            kernel = self._kernels[entry] = self._module.get_function(entry)
        if (
            dynamic_smem_bytes > 48 * 1024
            and kernel.max_dynamic_shared_size_bytes < dynamic_smem_bytes
        ):
            kernel.max_dynamic_shared_size_bytes = dynamic_smem_bytes
        return kernel

    def driver_blocks_per_sm(self, entry: str, threads: int, dynamic_smem_bytes: int = 0) -> int:
        """The driver's own occupancy answer, in resident blocks a multiprocessor."""
        import cupy as cp

        function = function_handle(self.kernel(entry, dynamic_smem_bytes))
        return int(
            cp.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
                function, threads, dynamic_smem_bytes
            )
        )


class Modules:
    """The cubins of one architecture folder, loaded on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._loaded: dict[str, CubinModule] = {}

    def __getitem__(self, name: str) -> CubinModule:
        if name not in self._loaded:
            self._loaded[name] = CubinModule(self.folder / f"{name}.cubin")
        return self._loaded[name]


def software_versions() -> dict[str, str]:
    """Versions of what ran: Python, NumPy, CuPy, CUDA runtime, cuBLASLt."""
    import platform

    import cupy as cp
    import numpy as np

    versions = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cupy": cp.__version__,
        "cuda_runtime": str(cp.cuda.runtime.runtimeGetVersion()),
    }
    with contextlib.suppress(ImportError):
        from nvmath.bindings import cublasLt

        versions["cublaslt"] = str(cublasLt.get_version())
    return versions
