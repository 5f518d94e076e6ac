"""Device constants: launch floor, asymptotic read bandwidth, L2 bandwidth, compute ceilings, ridge.

Each constant is {"value", "unit", "ci_low", "ci_high", "n", "how"}; the interval is a t interval over the logs of its
legs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lab import statistics
from lab.arms import CublasLtArm, StreamArm, fastest_stream, tune_stream
from lab.derived import derived
from lab.operands import decode_activations, make_activations, make_weights
from lab.timing import Timer

LEGS = 8
PEAK_SIDE = 8192
LAUNCH_NODES = 256
L2_PROBE = (2048, 4096)  # N, K of a BF16 run of 16 MiB: well inside L2


def constant(
    times_us: list[float], convert: Callable[[float], float], unit: str, how: str
) -> dict[str, Any]:
    """A constant from leg times: `convert` maps microseconds a call to the unit (it may reverse the order)."""
    estimate = statistics.sample_estimate(np.log(np.asarray(times_us)))
    ends = sorted(convert(end) for end in estimate.interval())
    return {
        "value": convert(estimate.value),
        "unit": unit,
        "ci_low": ends[0],
        "ci_high": ends[1],
        "n": len(times_us),
        "how": how,
    }


def legs(
    timer: Timer, launch: Callable[[int], None], copies: int, nodes: int, warm: bool = False
) -> list[float]:
    """`LEGS` graph legs after one that is thrown away, microseconds a call."""
    graph_n, graph_2n = (
        timer.capture(launch, copies, nodes),
        timer.capture(launch, copies, 2 * nodes),
    )
    timer.graph_leg(graph_n, graph_2n, nodes, warm)
    return [timer.graph_leg(graph_n, graph_2n, nodes, warm).time_us for _ in range(LEGS)]


def measure(
    timer: Timer, modules: Any, random: Any, lt: Any, protocol: dict, sm_count: int
) -> dict[str, Any]:
    """All constants of the device, in about ten seconds."""
    found = launch_floors(timer, modules, sm_count)
    found.update(read_bandwidth(timer, modules, random, protocol, sm_count))
    found.update(_compute_ceilings(timer, random, lt, protocol))
    found.update(derived(found))
    return found


def launch_floors(timer: Timer, modules: Any, sm_count: int) -> dict[str, Any]:
    """What an empty kernel takes in a graph with 1, `sm_count` and 8 `sm_count` blocks, and launched one by one."""
    found: dict[str, Any] = {}
    empty = modules["harness"].kernel("empty")
    for grid in (1, sm_count, 8 * sm_count):

        def launch(_copy: int, grid: int = grid) -> None:
            empty((grid,), (128,), ())

        suffix = {1: "_grid1", sm_count: ""}.get(grid, f"_grid{grid}")
        times = legs(timer, launch, 1, LAUNCH_NODES)
        how = f"empty kernel, grid {grid} x 128, graph of {LAUNCH_NODES} nodes"
        found[f"launch_floor{suffix}_us"] = constant(times, lambda t: t, "us", how)
        if grid == sm_count:
            loop = [timer.loop_leg(launch, 1, LAUNCH_NODES).time_us for _ in range(LEGS)]
            found["launch_loop_us"] = constant(
                loop, lambda t: t, "us", "the same, launched one by one from Python"
            )
    return found


def launch_floor(timer: Timer, modules: Any, arm: StreamArm, shape_name: str) -> dict[str, Any]:
    """Empty kernel of the grid, block and shared memory of a stream: its launch floor, reported, never subtracted."""
    s = arm.shape
    empty = modules["harness"].kernel("empty", s.smem_bytes)

    def launch(_copy: int) -> None:
        empty((s.grid,), (s.threads,), (), shared_mem=s.smem_bytes)

    how = f"empty kernel launched as the {arm.format} stream of {shape_name}: {s.describe()}"
    name = f"launch_floor_stream_{arm.format}_{shape_name}_us"
    return {name: constant(legs(timer, launch, 1, LAUNCH_NODES), lambda t: t, "us", how)}


def read_bandwidth(
    timer: Timer, modules: Any, random: Any, protocol: dict, sm_count: int
) -> dict[str, Any]:
    """The asymptotic read bandwidth, and that of a run of bytes that stays in L2."""
    size = protocol["stream"]["asymptote_bytes"]
    weights = make_weights(random, "bf16", size // (2 * 8192), 8192, 2)
    arm = fastest_stream(timer, modules, weights, protocol, sm_count, nodes=4, legs=1)
    times = legs(timer, arm.launch, 2, 4)
    how = f"read-only stream of {size} bytes, {arm.shape.describe()}"
    found = {"read_bandwidth_tbps": constant(times, lambda t: size / t / 1e6, "TB/s", how)}

    small = make_weights(random, "bf16", *L2_PROBE, 12)
    arm = tune_stream(timer, modules, small, protocol, sm_count)
    times = legs(timer, arm.launch, 1, 16, warm=True)
    how = f"the same {small.copy_bytes} bytes again and again, {arm.shape.describe()}"
    found["l2_read_bandwidth_tbps"] = constant(
        times, lambda t: small.copy_bytes / t / 1e6, "TB/s", how
    )
    return found


def _compute_ceilings(timer: Timer, random: Any, lt: Any, protocol: dict) -> dict[str, Any]:
    side = PEAK_SIDE
    flop = 2.0 * side**3
    bf16, fp8 = make_activations(random, side, side)
    found = {}
    for name, x, format_name in (("bf16", bf16, "bf16"), ("fp8", fp8, "fp8_e4m3")):
        weights = make_weights(random, format_name, side, side, 2)
        arm = CublasLtArm(weights, x, decode_activations(x[:1]), lt, timer.stream, protocol)
        arm.tune(timer)
        times = legs(timer, arm.launch, 2, 4)
        how = f"cuBLASLt {format_name}, {side} cubed, random operands, {arm.tuning['chosen']}"
        found[f"{name}_peak_tflops"] = constant(times, lambda t: flop / t / 1e6, "TFLOP/s", how)
    return found
