"""How one time is taken (METHOD section 3): graph replay of N and 2N calls, queued behind a delay, timed by events.

A leg yields the slope (t_2N - t_N)/N, the time of a call, and the intercept 2 t_N - t_2N. Both replays are queued
while the stream is busy with `delay`, so that no host latency enters; a leg whose first event was reached before its
last command was queued is taken again with a longer delay. The looped time is host-driven on purpose and has no
delay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: First delay in front of a leg, and the longest that is tried before the leg is refused.
DELAY_NS = 120_000
MAX_DELAY_NS = 60_000_000


class LegError(RuntimeError):
    """A leg could not be taken as the protocol wants it."""


@dataclass(frozen=True)
class Leg:
    """One leg. Times in microseconds; `start_ns`/`end_ns` on the host's perf_counter clock."""

    nodes: int
    t_n_us: float
    t_2n_us: float
    time_us: float
    intercept_us: float
    start_ns: int
    end_ns: int


def copies_for(weight_bytes: int, l2_bytes: int, l2_multiple: float, min_copies: int) -> int:
    """Distinct weight copies so that their total is at least `l2_multiple` times L2 (METHOD 3.3)."""
    if weight_bytes <= 0:
        raise ValueError(f"weight_bytes={weight_bytes} must be positive")
    return max(min_copies, math.ceil(l2_multiple * l2_bytes / weight_bytes))


def check_rotation(copies: int, weight_bytes: int, l2_bytes: int, l2_multiple: float) -> None:
    """Refuse a cold measurement whose copies could stay in L2."""
    total = copies * weight_bytes
    if total < l2_multiple * l2_bytes:
        raise LegError(
            f"{copies} copies of {weight_bytes} bytes are {total} bytes, "
            f"under {l2_multiple} x L2 ({l2_bytes} bytes): the measurement would not be cold"
        )


def nodes_for(copies: int, min_nodes: int) -> int:
    """Graph nodes of the N replay: at least `min_nodes`, and every copy captured."""
    return max(min_nodes, copies)


class Timer:
    """Takes legs on one stream. `launch(copy)` must only enqueue work on `stream`."""

    def __init__(self, stream: Any, delay_kernel: Any) -> None:
        import cupy as cp

        self._cp = cp
        self.stream = stream
        self._delay_kernel = delay_kernel
        self._events = [cp.cuda.Event() for _ in range(3)]

    def capture(self, launch: Callable[[int], None], copies: int, nodes: int) -> Any:
        """A graph of `nodes` calls that walk the copies in order (copies=1: the same copy, hot)."""
        with self.stream:
            self.stream.begin_capture()
            try:
                for node in range(nodes):
                    launch(node % copies)
            finally:
                graph = self.stream.end_capture()
        graph.upload(self.stream)
        self.stream.synchronize()
        return graph

    def delay(self, nanoseconds: int) -> None:
        """Occupy the stream for `nanoseconds`."""
        import numpy as np

        with self.stream:
            self._delay_kernel((1,), (1,), (np.uint64(nanoseconds),))

    def single_call(self, launch: Callable[[int], None]) -> float:
        """Microseconds of one queued call with weight copy 1: to screen candidates, never to report."""
        first, _, last = self._events

        def enqueue() -> None:
            with self.stream:
                first.record(self.stream)
                launch(1)
                last.record(self.stream)

        self._queued_ahead(enqueue, "one call")
        return 1000.0 * self._cp.cuda.get_elapsed_time(first, last)

    def graph_leg(self, graph_n: Any, graph_2n: Any, nodes: int, warm: bool) -> Leg:
        """Slope and intercept from one replay of each graph; `warm` replays graph_n once before, untimed (hot)."""
        first, middle, last = self._events

        def enqueue() -> None:
            if warm:
                graph_n.launch(self.stream)
            first.record(self.stream)
            graph_n.launch(self.stream)
            middle.record(self.stream)
            graph_2n.launch(self.stream)
            last.record(self.stream)

        start_ns, end_ns = self._queued_ahead(enqueue, f"a leg of {nodes} and {2 * nodes} nodes")
        t_n = 1000.0 * self._cp.cuda.get_elapsed_time(first, middle)
        t_2n = 1000.0 * self._cp.cuda.get_elapsed_time(middle, last)
        return Leg(nodes, t_n, t_2n, (t_2n - t_n) / nodes, 2 * t_n - t_2n, start_ns, end_ns)

    def _queued_ahead(self, enqueue: Callable[[], None], what: str) -> tuple[int, int]:
        """Enqueue behind a delay, longer each time until the device finds it all queued; start and end on the host.

        `enqueue` records the first and the last event around what is timed. One that the device did not find queued is
        taken again: its time would be the host's. LegError where no delay is long enough.
        """
        first, _, last = self._events
        delay_ns = DELAY_NS
        while delay_ns <= MAX_DELAY_NS:
            start_ns = time.perf_counter_ns()
            self.delay(delay_ns)
            enqueue()
            queued_ahead = not first.done
            last.synchronize()
            end_ns = time.perf_counter_ns()
            if queued_ahead:
                return start_ns, end_ns
            delay_ns *= 4
        raise LegError(f"the host needs more than {MAX_DELAY_NS} ns to queue {what}")

    def loop_leg(self, launch: Callable[[int], None], copies: int, nodes: int) -> Leg:
        """`nodes` calls launched one by one by the host; the time of a call is the span over `nodes`."""
        first, last = self._events[0], self._events[2]
        self.stream.synchronize()
        start_ns = time.perf_counter_ns()
        with self.stream:
            first.record(self.stream)
            for call in range(nodes):
                launch(call % copies)
            last.record(self.stream)
        last.synchronize()
        end_ns = time.perf_counter_ns()
        span = 1000.0 * self._cp.cuda.get_elapsed_time(first, last)
        return Leg(nodes, span, float("nan"), span / nodes, float("nan"), start_ns, end_ns)
