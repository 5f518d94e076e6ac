"""A made-up R2 campaign with known truth: times are multiples of a made-up stream. Nothing here was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import recorded
import synthetic_r1
from synthetic_r1 import SHAPES, attempts, check_rows, dense_us, floor_us, legs, readings

from lab import records
from lab.records import Campaign
from lab.rows import CellRow, Tuning
from qgemm_mx.formats import bytes_per_weight

MS = (1, 2, 4, 8, 16)
#: Times over the floor of the same format at M = 1; each doubling of M adds GROWTH.
OVER_FLOOR = {"mxfp4": 1.10, "nvfp4": 1.12, "int4_g128": 1.08}
GROWTH = 0.01
PEERS = {("peer/humming_bf16", "mxfp4"): 1.5, ("peer/humming_bf16", "nvfp4"): 1.55}
PEERS |= {("peer/humming_fp8", "mxfp4"): 1.45}
SEARCHED, INVARIANT = 0.98, 1.06  # times over qgemv_mx
STEPS = (1.9, 1.5, 1.35, 1.2, 1.15)  # of qgemv_mx, step by step
ELEMENTS = {"qgemv_mx/-ring": 1.3}
INT4_SHAPES = ("q_o_proj", "gate_up", "llama70b_gate_up")
ABLATED = ("q_o_proj", "gate_up", "llama70b_gate_up")
INVARIANT_SHAPES = ("q_o_proj", "gate_up", "llama70b_down")
BANDWIDTH = 4.4  # TB/s
CHAIN = {"cold_graph": 1.30, "chain_pdl": 1.15}  # over bytes / BANDWIDTH
CHAIN_FLOOR = 1.05
REGIMES = ("cold_graph", "hot_graph", "cold_loop")


def growth(m: int) -> float:
    """Time at M over time at M = 1."""
    return 1 + GROWTH * (m.bit_length() - 1)


def ours_us(fmt: str, n: int, k: int, m: int, over: float = 1.0) -> float:
    """Time of qgemv_mx, `over` times the usual."""
    return OVER_FLOOR[fmt] * floor_us(fmt, n, k) * growth(m) * over


def point_arms(shape: Mapping[str, Any], m: int, slow: Mapping[tuple, float], peers) -> dict:
    """Every arm of a point in cold_graph. slow: (format, shape, M) -> how many times slower our kernel is there."""
    name, n, k = shape["name"], shape["N"], shape["K"]
    formats = ["mxfp4", "nvfp4"] + (["int4_g128"] if name in INT4_SHAPES else [])
    arms = {("stream_read", fmt): floor_us(fmt, n, k) for fmt in formats}
    arms["cublaslt_bf16", "bf16"] = dense_us("bf16", n, k)
    arms["cublaslt_fp8", "fp8_e4m3"] = dense_us("fp8_e4m3", n, k)
    arms |= {arm: over * floor_us(arm[1], n, k) for arm, over in peers.items()}
    for fmt in formats:
        arms["qgemv_mx", fmt] = ours_us(fmt, n, k, m, slow.get((fmt, name, m), 1.0))
    ours = arms["qgemv_mx", "mxfp4"]
    arms["qgemv_mx/searched", "mxfp4"] = SEARCHED * ours
    if m in (1, 4) and name in INVARIANT_SHAPES:
        arms["qgemv_mx/batch_invariant", "mxfp4"] = INVARIANT * ours
    if m in (1, 16) and name in ABLATED:
        arms |= {(f"qgemv_mx/step{i}", "mxfp4"): x * ours for i, x in enumerate(STEPS)}
        arms |= {(kernel, "mxfp4"): x * ours for kernel, x in ELEMENTS.items()}
    return arms


def role_of(kernel: str) -> str:
    """Role by kernel id."""
    if kernel.startswith(("qgemv_mx/step", "qgemv_mx/-")):
        return "testbed"
    return "product" if kernel.startswith("qgemv_mx") else synthetic_r1.role_of(kernel)


def campaign(
    *,
    ms: Iterable[int] = MS,
    shapes: Iterable[Mapping] = SHAPES,
    regimes: Iterable[str] = ("cold_graph",),
    noise: float = 0.0,
    blocks: int = 3,
    slow: Mapping[tuple, float] | None = None,
    peers: Mapping[tuple[str, str], float] = PEERS,
    without: Iterable[str] = (),
    chain: bool = True,
    counters: bool = True,
    constants: Mapping[str, Any] | None = None,
) -> Campaign:
    """A campaign of R2. without: kernels that are left out; slow: see `point_arms`."""
    tables, start, lost = [], 0, set(without)

    def take(shape: str, n: int, k: int, m: int, regime: str, arms: dict) -> None:
        nonlocal start
        arms = {a: t for a, t in arms.items() if a[0] not in lost}
        twin = ("qgemv_mx", "mxfp4") if regime == "cold_graph" else None
        made = legs(
            shape, n, k, m, regime, arms, blocks=blocks, noise=noise, seed=len(tables),
            start=start, twin=twin,
        )  # fmt: skip
        start = int(made["end_ns"].max()) + 1000
        tables.append(made)

    for s in shapes:
        for m in ms:
            arms = point_arms(s, m, slow or {}, peers)
            for regime, scale in (("cold_graph", 1.0), ("hot_graph", 0.8), ("cold_loop", 1.6)):
                if regime in regimes:
                    tried = regime != "cold_graph"
                    own = {a: scale * t for a, t in arms.items() if not tried or "qgemv_mx/" not in a[0]}  # fmt: skip
                    take(s["name"], s["N"], s["K"], m, regime, own)
    if chain:
        n, k = 53248, 4096
        bound = n * k * bytes_per_weight("mxfp4") / BANDWIDTH / 1e6
        for m in (1, 4, 16):
            for regime, over in CHAIN.items():
                arms = {("qgemv_mx", "mxfp4"): over * bound * growth(m)}
                if regime == "cold_graph":
                    arms["stream_read", "mxfp4"] = CHAIN_FLOOR * bound
                take("decode_chain", n, k, m, regime, arms)
    samples = pd.concat(tables, ignore_index=True).astype({"drop_reason": object})
    samples["role"] = samples["kernel"].map(role_of)
    cells = cell_rows(samples)
    given = recorded.header(rung="R2", created_utc="2026-01-03T03:04:05Z")
    given["cubins"] = (
        *given["cubins"],
        {
            "name": "qgemv_mx",
            "arch": "sm_90a",
            "sha256": "4" * 64,
            "registers": 128,
            "spill_bytes": 0,
            "smem_static_bytes": 0,
        },
    )
    return Campaign(
        **given,
        constants=dict(host_constants() if constants is None else constants),
        cells=records.fill_times(cells, samples),
        checks=check_rows(cells),
        attempts=attempts(samples),
        counters=tuple(counter_rows() if counters else ()),
        settings_untouched=True,
        samples=samples,
        telemetry=readings(samples, [1980.0]),
    )


def constant(value: float, unit: str, width: float = 0.02) -> dict[str, Any]:
    """A constant with an interval of so many parts on either side."""
    ends = {"ci_low": value * (1 - width), "ci_high": value * (1 + width)}
    return {"value": value, "unit": unit, **ends, "n": 8, "how": "made up"}


def host_constants() -> dict[str, Any]:
    """What a campaign measures on the host, and the asymptote without an interval, so that sums are exact."""
    return {
        "linear_host_overhead_us_cupy": constant(7.0, "us"),
        "linear_host_overhead_us_torch": constant(8.0, "us"),
        "pack_weight_57344x8192_ms": constant(31.0, "ms"),
        "read_bandwidth_tbps": constant(BANDWIDTH, "TB/s", width=0.0),
    }


def cell_rows(samples: pd.DataFrame) -> list[CellRow]:
    """One cell an arm and point, all of them right."""
    key = ["kernel", "role", "format", "shape", "N", "K", "M", "regime"]
    rows = []
    for kernel, role, fmt, shape, n, k, m, regime in (
        samples[key].drop_duplicates().itertuples(index=False)
    ):
        tuning = Tuning(16, "candidate 3") if role in ("baseline", "peer") else Tuning(1, "made up")
        if kernel.startswith("qgemv_mx"):
            tuning = Tuning(1, f"qgemv_mx_{fmt}_bf16_t{m}_c1, 132 x 512")
        size = round(n * k * bytes_per_weight(fmt))
        where = (kernel, role, fmt, shape, int(n), int(k), int(m), regime)
        rows.append(CellRow(*where, size, "passed", tuning))
    return rows


#: Counters of a profiled call that is bound by latency.
LATENCY = {
    "smsp__issue_active.avg.pct_of_peak_sustained_active": 41.0,
    "sm__warps_active.avg.pct_of_peak_sustained_active": 24.0,
    "smsp__warps_eligible.avg.per_cycle_active": 0.7,
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": 9.5,
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": 1.5,
    "launch__registers_per_thread": 128.0,
    "launch__block_size": 512.0,
    "launch__occupancy_limit_registers": 1.0,
    "launch__occupancy_limit_shared_mem": 1.0,
    "launch__occupancy_limit_warps": 4.0,
    "launch__occupancy_limit_blocks": 32.0,
    "launch__waves_per_multiprocessor": 1.0,
    "smsp__sass_inst_executed_op_local_ld.sum": 0.0,
    "smsp__sass_inst_executed_op_local_st.sum": 0.0,
    "loop_instructions_per_64_weights": 3.25,
    "sass_HMMA": 32.0,
    "sass_LDG": 8.0,
    "sass_LDL": 0.0,
    "sass_total": 40.0,
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": 61.0,
    "smsp__inst_executed.sum": 4.0 * 4096 * 64,
}


def counter_rows(values: Mapping[str, float] = LATENCY) -> list[dict[str, Any]]:
    """Counters of qgemv_mx at two shapes, two M and two formats."""
    rows = []
    for name, n, k in (("q_o_proj", 4096, 4096), ("gate_up", 14336, 4096)):
        for m in (1, 16):
            for fmt in ("mxfp4", "nvfp4"):
                size = n * k * bytes_per_weight(fmt)
                own = {"dram__bytes_read.sum": size, **values}
                own["gpu__time_duration.sum"] = 1000 * 1.25 * ours_us(fmt, n, k, m)
                place = {"kernel": "qgemv_mx", "format": fmt, "shape": name, "N": n, "K": k, "M": m}
                rows += [
                    {**place, "regime": "cold_loop", "metric": metric, "unit": "", "value": value, "tool": "made up"}
                    for metric, value in own.items()
                ]  # fmt: skip
        place = {"kernel": "stream_read", "format": "mxfp4", "shape": name, "N": n, "K": k, "M": 1}
        place |= {"regime": "cold_loop", "unit": "", "tool": "made up"}
        rows.append({**place, "metric": "dram__bytes_read.sum", "value": 1.0})
        rows.append({**place, "metric": "gpu__time_duration.sum", "value": 1e-3 / BANDWIDTH})
    return rows
