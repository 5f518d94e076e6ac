"""A made-up R2b campaign with known truth: the arms of the frozen plan, with times over a made-up roofline.

Nothing here was measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import recorded
import synthetic_r1
import synthetic_r2
from synthetic_r1 import SHAPES, attempts, check_rows, floor_us, legs, readings
from synthetic_r2 import constant

from lab import derived, plan_r2b, records
from lab.records import Campaign
from lab.rows import NOT_REACHED, AttemptRow, CellRow, Tuning
from qgemm_mx.formats import bytes_per_weight

PREREG = Path(__file__).resolve().parents[2] / "prereg"
PROTOCOL = json.loads((PREREG / "protocol_r2b.json").read_text(encoding="utf-8"))
MS = tuple(PROTOCOL["plan"]["m"])
BANDWIDTH, PEAK = 4.4, 700.0  # TB/s, TFLOP/s in BF16
PEERS = {"peer/humming_bf16": ("mxfp4", "nvfp4")}
#: Times over the roofline of the format.
OURS = {"mxfp4": 1.10, "nvfp4": 1.13, "int4_g128": 1.12}
FP8, BF16, PEER, GEMV = 1.20, 1.15, 1.30, 1.08
SEARCHED, INVARIANT, ODD = 0.98, 1.06, 0.99  # times over qgemm_mx
STEPS = (2.4, 1.9, 1.6, 1.4, 1.25, 1.1, 1.05)  # of qgemm_mx, step by step
HOT, LOOPED = 0.8, 1.6  # times over cold_graph

#: (format, shape, M) -> how many times slower qgemm_mx is there.
Slow = Mapping[tuple[str, str, int], float]


def tensor_us(n: int, k: int, m: int, rate: float = PEAK) -> float:
    """Time of the products at a rate in TFLOP/s."""
    return 2e-6 * m * n * k / rate


def roof_us(fmt: str, n: int, k: int, m: int, rate: float = PEAK) -> float:
    """The longer of reading and multiplying."""
    return max(floor_us(fmt, n, k), tensor_us(n, k, m, rate))


def ours_us(fmt: str, n: int, k: int, m: int) -> float:
    """Time of qgemm_mx; between tabulated M a little less than at the next."""
    following = next((t for t in MS if t >= m), m)
    return OURS[fmt] * roof_us(fmt, n, k, following) * (1.0 if following == m else ODD)


def time_us(kernel: str, fmt: str, shape: Mapping[str, Any], m: int, slow: Slow) -> float:
    """Time of an arm."""
    n, k = shape["N"], shape["K"]
    own = (
        ours_us(fmt, n, k, m) * slow.get((fmt, shape["name"], m), 1.0)
        if kernel.startswith(("qgemm", "linear"))
        else 0.0
    )
    if kernel == "stream_read":
        return floor_us(fmt, n, k)
    if kernel == "cublaslt_fp8":
        return FP8 * roof_us(fmt, n, k, m, 2 * PEAK)
    if kernel == "cublaslt_bf16":
        return BF16 * roof_us(fmt, n, k, m)
    if kernel == "linear":
        return GEMV * floor_us(fmt, n, k) if m <= 16 else own
    if kernel.startswith("qgemm_mx/step"):
        return STEPS[int(kernel[-1])] * own
    scale = {"qgemm_mx/searched": SEARCHED, "qgemm_mx/batch_invariant": INVARIANT, "qgemm_mx": 1.0}
    return scale[kernel] * own if kernel in scale else PEER * roof_us(fmt, n, k, m)


def role_of(kernel: str) -> str:
    """Role by kernel id."""
    if plan_r2b.is_ablation(kernel):
        return "testbed"
    ours = kernel.startswith(("qgemm_mx", "linear"))
    return "product" if ours else synthetic_r1.role_of(kernel)


def campaign(
    *,
    ms: Iterable[int] | None = None,
    shapes: Iterable[str] | None = None,
    regimes: Iterable[str] = ("cold_graph",),
    noise: float = 0.0,
    blocks: int = 3,
    slow: Slow | None = None,
    peers: Mapping[str, Iterable[str]] = PEERS,
    peer: float = PEER,
    without: Iterable[str] = (),
    counters: bool = True,
    constants: Mapping[str, Any] | None = None,
    change: Callable[[str, str, str, int, float], float] = lambda kernel, fmt, shape, m, t: t,
) -> Campaign:
    """A campaign of R2b. ms, shapes: of the plan, None: all. change: (kernel, format, shape, M, time) -> time."""
    ms, shapes = ms and set(ms), shapes and set(shapes)
    tables, start, lost = [], 0, set(without)
    for point in plan_r2b.points(PROTOCOL, SHAPES, peers):
        shape, m = point.shape, point.m
        if (ms and m not in ms) or (shapes and shape["name"] not in shapes):
            continue
        arms = {}
        for kernel, fmt in point.arms:
            if kernel in lost:
                continue
            scale = peer / PEER if kernel.startswith("peer/") else 1.0
            taken = scale * time_us(kernel, fmt, shape, m, slow or {})
            arms[kernel, fmt] = change(kernel, fmt, shape["name"], m, taken)
        for regime, scale in (("cold_graph", 1.0), ("hot_graph", HOT)):
            if regime not in regimes:
                continue
            some = {
                a: scale * t
                for a, t in arms.items()
                if regime == "cold_graph" or a[0] == "qgemm_mx" or "cublas" in a[0]
            }
            made = legs(
                shape["name"], shape["N"], shape["K"], m, regime, some, blocks=blocks, noise=noise,
                seed=len(tables), start=start, twin=("qgemm_mx", "mxfp4") if regime == "cold_graph" else None,
            )  # fmt: skip
            start = int(made["end_ns"].max()) + 1000
            tables.append(made)
    samples = pd.concat(tables, ignore_index=True).astype({"drop_reason": object})
    samples["role"] = samples["kernel"].map(role_of)
    cells = cell_rows(samples)
    given = recorded.header(rung="R2b", created_utc="2026-01-04T03:04:05Z")
    given["cubins"] = tuple(given["cubins"])
    return Campaign(
        **given,
        constants=dict(device_constants() if constants is None else constants),
        cells=records.fill_times(cells, samples),
        checks=check_rows(cells),
        attempts=attempts(samples),
        counters=tuple(counter_rows() if counters else ()),
        settings_untouched=True,
        samples=samples,
        telemetry=readings(samples, [1980.0, 1755.0]),
    )


def closed(lost: Iterable[tuple[str, int]] = (), **how: Any) -> Campaign:
    """A made-up campaign without some points, (shape, M), each with the attempt that says so."""
    whole, lost = campaign(**how), list(lost)
    if not lost:
        return whole

    def gone(shape: str, m: int) -> bool:
        return (shape, int(m)) in lost

    samples = whole.samples
    kept = [not gone(s, m) for s, m in zip(samples["shape"], samples["M"], strict=True)]
    sizes = {(c.shape, c.M): (c.N, c.K) for c in whole.cells}
    words = tuple(
        AttemptRow("point", "refused", NOT_REACHED, "2026-01-04T04:00:00Z", 0.0, shape=s, N=sizes[s, m][0],
                   K=sizes[s, m][1], M=m)
        for s, m in lost
    )  # fmt: skip
    return replace(
        whole,
        cells=tuple(c for c in whole.cells if not gone(c.shape, c.M)),
        checks=tuple(c for c in whole.checks if not gone(c.shape, c.M)),
        counters=tuple(c for c in whole.counters if not gone(c["shape"], c["M"])),
        samples=samples[kept].reset_index(drop=True),
        attempts=(*(a for a in whole.attempts if not gone(a.shape, a.M or 0)), *words),
    )


def device_constants() -> dict[str, Any]:
    """What a campaign measures of the device, without intervals, so that sums are exact."""
    found = {
        "read_bandwidth_tbps": constant(BANDWIDTH, "TB/s", 0.0),
        "bf16_peak_tflops": constant(PEAK, "TFLOP/s", 0.0),
        "fp8_peak_tflops": constant(2 * PEAK, "TFLOP/s", 0.0),
    }
    return found | derived.derived(found)


def chosen(kernel: str, fmt: str, m: int) -> str:
    """The plan of an arm of ours, as recorded."""
    own = "qgemv_mx" if kernel == "linear" and m <= 16 else "qgemm_mx"
    other = ", searched" if kernel.endswith("searched") and m == 64 else ""
    return f"{own}_{fmt}_bf16_t{m}, 132 x 384{other}"


def cell_rows(samples: pd.DataFrame) -> list[CellRow]:
    """One cell an arm and point, all of them right."""
    key = ["kernel", "role", "format", "shape", "N", "K", "M", "regime"]
    rows = []
    for kernel, role, fmt, shape, n, k, m, regime in (
        samples[key].drop_duplicates().itertuples(index=False)
    ):
        tuning = Tuning(16, "candidate 3")
        if kernel.startswith(("qgemm_mx", "linear")):
            tuning = Tuning(1, chosen(kernel, fmt, int(m)))
        where = (kernel, role, fmt, shape, int(n), int(k), int(m), regime)
        rows.append(CellRow(*where, round(n * k * bytes_per_weight(fmt)), "passed", tuning))
    return rows


TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
#: Counters of a profiled call: from 512 tokens on the tensor pipe is busy, before it the schedulers are.
BUSY = {
    64: {"smsp__issue_active.avg.pct_of_peak_sustained_active": 76.0, TENSOR: 30.0},
    512: {"smsp__issue_active.avg.pct_of_peak_sustained_active": 60.0, TENSOR: 82.0},
    4096: {"smsp__issue_active.avg.pct_of_peak_sustained_active": 55.0, TENSOR: 88.0},
}


def counter_rows() -> list[dict[str, Any]]:
    """Counters of qgemm_mx at three shapes, three M and two formats, and of its rivals and two steps at one."""
    sizes = {s["name"]: (s["N"], s["K"]) for s in SHAPES}
    rows = []
    calls = [
        ("qgemm_mx", fmt, shape, m)
        for shape in ("q_o_proj", "gate_up", "llama70b_gate_up")
        for m in (64, 512, 4096)
        for fmt in ("mxfp4", "nvfp4")
    ]
    for m in (64, 512, 4096):
        calls.append(("cublaslt_fp8", "fp8_e4m3", "gate_up", m))
        calls.append(("cublaslt_bf16", "bf16", "gate_up", m))
    calls += [(f"qgemm_mx/step{i}", "mxfp4", "gate_up", 512) for i in (0, 1)]
    for kernel, fmt, shape, m in calls:
        n, k = sizes[shape]
        own = {k: v for k, v in synthetic_r2.LATENCY.items() if "issue_active.avg" not in k}
        own |= BUSY[m]
        own["dram__bytes_read.sum"] = n * k * bytes_per_weight(fmt) + 2 * m * k
        us = time_us(kernel, fmt, {"name": shape, "N": n, "K": k}, m, {})
        own["gpu__time_duration.sum"] = 1250 * us
        place = {"kernel": kernel, "format": fmt, "shape": shape, "N": n, "K": k, "M": m}
        rows += [
            {**place, "regime": "cold_loop", "metric": metric, "unit": "", "value": value, "tool": "made up"}
            for metric, value in own.items()
        ]  # fmt: skip
    return rows
