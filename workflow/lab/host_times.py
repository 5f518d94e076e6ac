"""What a user waits for on the host: a plain Python call of `linear`, and the packing of a weight.

A constant here is a median over batches or calls, with the interval of the order statistics: a process that is held up
once by the system moves neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scipy.stats import binom

from lab.arms import POISON, Truth
from lab.operands import decode_activations, make_activations, make_weights
from lab.peers._interface import Availability
from lab.peers._torch import adopt, as_tensor, check_device
from lab.plan_r2 import PRODUCT
from lab.product_arms import Packed
from lab.rows import CheckRow
from qgemm_mx.gpu_linear import linear, pack_weight

HOST = "linear_host_overhead_us"
#: Confidence of the interval, as everywhere.
ALPHA = 0.05


def median_row(values: Sequence[float], unit: str, how: str) -> dict[str, Any]:
    """A constant: the median with an interval of at least 95% between two of the values, at least six of them."""
    ordered, n = sorted(values), len(values)
    if n < 6:
        raise ValueError(f"{n} values: the order statistics of fewer than 6 give no 95% interval")
    low = int(binom.ppf(ALPHA / 2, n, 0.5)) - 1
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    ends = {"ci_low": ordered[low], "ci_high": ordered[n - 1 - low]}
    return {"value": middle, "unit": unit, **ends, "n": n, "how": how}


def batches(
    call: Callable[[], Any], wait: Callable[[], Any], calls: int, count: int
) -> Iterator[float]:
    """Microseconds a call in each of `count` batches, after one that is thrown away; `wait` empties the stream."""
    for batch in range(count + 1):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        taken = time.perf_counter() - start
        if batch:
            yield 1e6 * taken / calls
    wait()


class PlainCalls:
    """linear(x, w, out=out) on one small problem, as a user of CuPy and as one of torch calls it."""

    def __init__(self, bench: Any) -> None:
        """Operands on the device. `bench.protocol["host"]["linear"]` is the problem."""
        import cupy as cp

        frozen = bench.protocol["host"]["linear"]
        self.bench, self.format, self.m = bench, frozen["format"], frozen["M"]
        weights = make_weights(bench.random, self.format, frozen["N"], frozen["K"], 1)
        self.packed = Packed.of(weights, bench.stream)
        self.x = make_activations(bench.random, self.m, weights.k)[0]
        self.y = cp.empty((self.m, weights.n), cp.uint16)
        self.ways: dict[str, Callable[[], Any]] = {"cupy": self._call(self.x, self.y)}
        if (why := _torch_missing()) is None:
            import torch

            adopt(bench.stream)
            tensors = (as_tensor(a, torch.bfloat16) for a in (self.x, self.y))
            self.ways["torch"] = self._call(*tensors)
        self.missing = {} if why is None else {"torch": why}

    def _call(self, x: Any, out: Any) -> Callable[[], Any]:
        weight = self.packed.copies[0]
        return lambda: linear(x, weight, out=out)

    def checks(self) -> list[CheckRow]:
        """The result of each way of calling against FP64, from a poisoned output."""
        limits, weights = self.bench.protocol["correctness"], self.packed.weights
        x64 = decode_activations(self.x)
        truth = Truth.compute(x64, weights, 0, limits["u_out_bf16"], limits["eps_acc_fp32"])
        shape = f"probe_{weights.n}x{weights.k}"
        place = dict(kernel=PRODUCT, format=self.format, shape=shape, N=weights.n, K=weights.k)
        rows = []
        for way, call in self.ways.items():
            with self.bench.stream:
                self.y.fill(POISON)
                call()
            self.bench.stream.synchronize()
            found = truth.compare(self.y, f"linear_{way}_fp64")
            rows.append(CheckRow(**place, M=self.m, **vars(found)))
        return rows

    def constants(self) -> dict[str, dict[str, Any]]:
        """Host time of a call each way, and the larger."""
        frozen = self.bench.protocol["host"]
        calls, count = frozen["calls"], frozen["batches"]
        w = self.packed.weights
        found = {}
        for way, call in self.ways.items():
            times = list(batches(call, self.bench.stream.synchronize, calls, count))
            how = (
                f"linear(x, w, out=out) with {way} arrays, {self.format} {w.n}x{w.k}, M={self.m}: "
                f"median of {count} batches of {calls} calls"
            )
            found[f"{HOST}_{way}"] = median_row(times, "us", how)
        largest = max(found.values(), key=lambda row: row["value"])
        return found | {HOST: dict(largest)}


def _torch_missing() -> str | None:
    """Why torch cannot be called with here, or None."""
    try:
        import torch
    except ImportError as error:
        return str(error)
    return check_device(Availability(True, torch.__version__, None)).reason


def pack_time(bench: Any) -> dict[str, dict[str, Any]]:
    """Milliseconds from values and scales on the device to a weight that is ready: `pack_weight_<N>x<K>_ms`."""
    frozen = bench.protocol["host"]["pack"]
    fmt, n, k, calls = (frozen[key] for key in ("format", "N", "K", "calls"))
    weights = make_weights(bench.random, fmt, n, k, 1)
    values, scales = weights.views(0)
    times = []
    for _ in range(calls + 1):  # the first allocates
        bench.stream.synchronize()
        start = time.perf_counter()
        packed = pack_weight(values, scales, fmt, stream=bench.stream)
        times.append(1e3 * (time.perf_counter() - start))
        del packed
    how = f"pack_weight of {fmt} {n}x{k} on the device: median of {calls} calls"
    return {f"pack_weight_{n}x{k}_ms": median_row(times[1:], "ms", how)}
