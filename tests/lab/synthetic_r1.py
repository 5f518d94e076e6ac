"""A made-up R1 campaign with known truth: every cell, with times that follow from shares that the tests know.

Nothing here was measured. Without noise every number of the analysis follows to the digit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import recorded

from lab import decomposition as dec
from lab import records
from lab.records import Campaign
from lab.rows import INVALID_BY_DESIGN, AttemptRow, CellRow, CheckRow, Tuning
from lab.samples import SAMPLES_SCHEMA, TELEMETRY_SCHEMA
from lab.statistics import Estimate
from qgemm_mx.formats import bytes_per_weight, weight_bytes

SHAPES = json.loads(
    (Path(__file__).resolve().parents[2] / "prereg" / "shapes.json").read_text(encoding="utf-8")
)["shapes"]
ID = "r1-synthetic-gpu-20260102-0123456789ab"

#: Shares of the gap; what is left to 1 is the residual.
SHARES = {
    "launch": 0.12, "grid_fill": 0.13, "weight_load": 0.25, "layout_staging": 0.10, "dequant_issue": 0.20,
    "matrix_issue": 0.05, "epilogue_reduction": 0.10,
}  # fmt: skip
RESIDUAL = 1 - sum(SHARES.values())
GAP = 0.6  # of the floor
#: Times over the floor of the same format.
PEERS = {
    ("peer/humming_bf16", "mxfp4"): 1.5,
    ("peer/humming_bf16", "nvfp4"): 1.55,
    ("peer/humming_fp8", "mxfp4"): 1.45,
    ("peer/humming_fp8_quantised", "mxfp4"): 1.9,
}
NVFP4_DEQUANT = 1.1  # cost of dequantising NVFP4 over that of MXFP4
LOOPED, HOT, CHAINED = 1.6, 0.8, 0.9  # times over cold_graph
FACTORIAL_M = (1, 16, 64)
CLOCK = 1980.0

Arms = dict[tuple[str, str], float]  # (kernel, format) -> microseconds


def floor_us(fmt: str, n: int, k: int) -> float:
    """A stream: 2 us and 4 TB/s."""
    return 2.0 + weight_bytes(fmt, n, k) / 4e6


def dense_us(fmt: str, n: int, k: int) -> float:
    """cuBLASLt, 1.2 times the stream of its bytes."""
    return 1.2 * floor_us(fmt, n, k)


def production_arms(n: int, k: int, peers: Mapping[tuple[str, str], float] = PEERS) -> Arms:
    """What stands at every point."""
    formats = ("mxfp4", "nvfp4")
    arms = {("stream_read", fmt): floor_us(fmt, n, k) for fmt in formats}
    arms |= {
        ("cublaslt_bf16", "bf16"): dense_us("bf16", n, k),
        ("cublaslt_fp8", "fp8_e4m3"): dense_us("fp8_e4m3", n, k),
    }
    return arms | {arm: times * floor_us(arm[1], n, k) for arm, times in peers.items()}


def variant_us(kernel: str, floor: float, shares: Mapping[str, float], gap: float) -> float:
    """A variant: the floor, what no factor removes, and the factors that are present."""
    left = 1 - sum(shares[name] for name in dec.FACTORS)
    on = dec.present_factors(kernel)
    return floor + gap * floor * (left + sum(shares[name] for name in on))


def factorial_arms(
    n: int, k: int, shares: Mapping[str, float] = SHARES, gap: float = GAP, stacked: bool = False
) -> Arms:
    """The 32 variants and the probes. stacked: dequantisation hides behind the weight load, as max(a, b)."""
    floor = floor_us("mxfp4", n, k)

    def time(kernel: str) -> float:
        full = variant_us(kernel, floor, shares, gap)
        if stacked and {"weight_load", "dequant_issue"} <= dec.present_factors(kernel):
            full -= gap * floor * min(shares["weight_load"], shares["dequant_issue"])
        return full

    arms = {(kernel, "mxfp4"): time(kernel) for kernel in dec.variants()}
    none = arms[dec.NONE, "mxfp4"]
    return arms | {
        ("probe/launch_floor", "mxfp4"): 1.5,
        ("probe/launch_testbed", "mxfp4"): 1.5 + gap * floor * shares["launch"],
        ("probe/balanced_grid", "mxfp4"): none - gap * floor * shares["grid_fill"],
    }


def format_arms(n: int, k: int) -> Arms:
    """The testbed in NVFP4, with and without dequantisation."""
    floor = floor_us("mxfp4", n, k)
    cost = GAP * floor * SHARES["dequant_issue"]
    full = 1.62 * floor
    return {
        (dec.FULL, "nvfp4"): full,
        ("testbed/-dequant_issue", "nvfp4"): full - NVFP4_DEQUANT * cost,
    }


def cause_arms(floor: float) -> Arms:
    """Sweeps of single settings, as multiples of the floor."""
    times = {"stages/2": 1.8, "stages/4": 1.6, "stages/8": 1.55, "warps/2x2": 1.7, "warps/4x2": 1.6}
    times |= {"split_k/1": 2.0, "split_k/4": 1.6, "split_k/16": 1.65}
    times |= {"sequence/fp32": 1.9, "sequence/host_bits": 1.58, "sequence/shift_mask": 1.6}
    times |= {"staging/plain": 1.7, "staging/direct": 1.54}
    return {(f"cause/{name}", "mxfp4"): x * floor for name, x in times.items()}


def legs(
    shape: str, n: int, k: int, m: int, regime: str, arms: Arms, *, blocks: int, noise: float,
    seed: int, start: int, twin: tuple[str, str] | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Legs of one point in mirrored blocks; both legs of a block have the same time."""
    rng = np.random.default_rng(seed)
    names = [*arms.items()]
    labels = [f"{kernel}/{fmt}" for (kernel, fmt), _ in names]
    if twin in arms:
        names.append((twin, arms[twin]))
        labels.append(f"{twin[0]}/{twin[1]}#2")
    shared = noise * rng.normal(size=(blocks, 1))
    times = np.array([t for _, t in names]) * np.exp(
        shared + noise * rng.normal(size=(blocks, len(names)))
    )
    nodes, order = 16, [*range(len(names)), *reversed(range(len(names)))]
    rows = []
    for b in range(blocks):
        for position, i in enumerate(order):
            (kernel, fmt), t = names[i][0], float(times[b, i])
            looped = regime == "cold_loop"
            t_n = nodes * t + (0.0 if looped else 3.0)
            t_2n = np.nan if looped else t_n + nodes * t
            at = start + 1000 * (b * len(order) + position)
            rows.append(
                (kernel, fmt, role_of(kernel), shape, n, k, m, regime, labels[i], b, position, False, nodes,
                 t_n, t_2n, t_n / nodes if looped else (t_2n - t_n) / nodes, np.nan if looped else 2 * t_n - t_2n,
                 at, at + 900, False, None)
            )  # fmt: skip
    return pd.DataFrame(rows, columns=SAMPLES_SCHEMA.names)


def role_of(kernel: str) -> str:
    """Role by kernel id."""
    if kernel == "stream_read":
        return "floor"
    if kernel.startswith("cublaslt"):
        return "baseline"
    return "peer" if kernel.startswith("peer/") else "testbed"


def is_right(kernel: str) -> bool:
    """Whether a kernel claims to be right."""
    if kernel.startswith("probe/"):
        return False
    return not kernel.startswith("testbed/") or kernel in (dec.FULL, "testbed/-layout_staging")


def campaign(
    *,
    ms: Iterable[int] = (1, 2, 4, 16, 64, 256),
    shapes: Iterable[Mapping] = SHAPES,
    regimes: Iterable[str] = ("cold_graph", "hot_graph", "cold_loop"),
    noise: float = 0.0,
    blocks: int = 4,
    shares: Mapping[str, float] = SHARES,
    gap: float = GAP,
    stacked: bool = False,
    peers: Mapping[tuple[str, str], float] = PEERS,
    without: Iterable[tuple[str, str, int]] = (),
    counters: bool = True,
    causes: bool = True,
    clocks: Iterable[float] = (CLOCK,),
) -> Campaign:
    """A campaign of R1. without: (kernel, shape, M) whose legs are missing in cold_graph."""
    lost, clocks = set(without), list(clocks)
    tables, starts = [], 0

    def take(shape: str, n: int, k: int, m: int, regime: str, arms: Arms, twins=None) -> None:
        nonlocal starts
        arms = {
            a: t for a, t in arms.items() if (a[0], shape, m) not in lost or regime != "cold_graph"
        }
        seed = len(tables)
        made = legs(
            shape,
            n,
            k,
            m,
            regime,
            arms,
            blocks=blocks,
            noise=noise,
            seed=seed,
            start=starts,
            twin=twins,
        )
        starts = int(made["end_ns"].max()) + 1000
        tables.append(made)

    for s in shapes:
        name, n, k = s["name"], s["N"], s["K"]
        for m in ms:
            arms = production_arms(n, k, peers)
            twins = ("cublaslt_fp8", "fp8_e4m3")
            if m in FACTORIAL_M:
                arms |= factorial_arms(n, k, shares, gap, stacked)
                twins = (dec.FULL, "mxfp4")
                if causes and name == "q_o_proj":
                    arms |= format_arms(n, k) | (
                        cause_arms(floor_us("mxfp4", n, k)) if m == 1 else {}
                    )
            scale = {"cold_graph": 1.0, "hot_graph": HOT, "cold_loop": LOOPED}
            for regime in regimes:
                kept = {
                    a: t * scale[regime]
                    for a, t in arms.items()
                    if regime == "cold_graph" or (is_right(a[0]) and not a[0].startswith("cause/"))
                }
                take(name, n, k, m, regime, kept, twins if regime == "cold_graph" else None)
    if causes:
        for n in (8448, 8512):
            floor = floor_us("mxfp4", n, 4096)
            ratios = {"stream_read": 1.0, dec.FULL: 1.7, "cause/split_k/1": 2.1}
            arms = {(kernel, "mxfp4"): ratio * floor for kernel, ratio in ratios.items()}
            take(f"waves_{n}", n, 4096, 1, "cold_graph", arms)
        # A quarter of q_o_proj is kv_gqa, and was measured under that name.
        for whole, n, parts in (
            ("gate_up", 14336, 2),
            ("gate_up", 14336, 8),
            ("q_o_proj", 4096, 2),
        ):
            n //= parts
            floor = floor_us("mxfp4", n, 4096)
            arms = {("stream_read", "mxfp4"): floor, (dec.FULL, "mxfp4"): 1.6 * floor}
            arms["cublaslt_fp8", "fp8_e4m3"] = dense_us("fp8_e4m3", n, 4096)
            take(f"{whole}_tp{parts}", n, 4096, 1, "cold_graph", arms)
        chain = {(dec.FULL, "mxfp4"): 60.0}
        take("decode_chain", 53248, 4096, 1, "cold_graph", chain)
        take(
            "decode_chain", 53248, 4096, 1, "chain_pdl", {a: CHAINED * t for a, t in chain.items()}
        )
    samples = pd.concat(tables, ignore_index=True).astype({"drop_reason": object})
    cells = cell_rows(samples)
    given = recorded.header(rung="R1")
    given["cubins"] = tuple(given["cubins"])
    return Campaign(
        **given,
        constants={},
        cells=records.fill_times(cells, samples),
        checks=check_rows(cells),
        attempts=attempts(samples),
        counters=tuple(counter_rows() if counters else ()),
        settings_untouched=True,
        samples=samples,
        telemetry=readings(samples, clocks),
    )


def cell_rows(samples: pd.DataFrame) -> list[CellRow]:
    """One cell an arm and point, right or wrong by design."""
    key = ["kernel", "role", "format", "shape", "N", "K", "M", "regime"]
    rows = []
    for kernel, role, fmt, shape, n, k, m, regime in (
        samples[key].drop_duplicates().itertuples(index=False)
    ):
        entry = "testbed_mxfp4_t8_s4_w4x2_f31_shift_mask, grid 64x1 x 256, split 2, 9 B shared memory, 2 blocks an SM"
        tuning = Tuning(16, "candidate 3") if role in ("baseline", "peer") else Tuning(1, entry)
        size = round(n * k * bytes_per_weight(fmt))
        correct = "passed" if is_right(kernel) else INVALID_BY_DESIGN
        rows.append(
            CellRow(kernel, role, fmt, shape, int(n), int(k), int(m), regime, size, correct, tuning)
        )
    return rows


def check_rows(cells: Iterable[CellRow]) -> tuple[CheckRow, ...]:
    """One check a problem of every cell that claims to be right."""
    found = {}
    for c in cells:
        if c.correctness == "passed":
            key = (c.kernel, c.format, c.shape, c.N, c.K, c.M)
            found[key] = CheckRow(*key, "random_fp64_before", True, 0.1, 1.0)
    return tuple(found.values())


def attempts(samples: pd.DataFrame) -> tuple[AttemptRow, ...]:
    """Every point went well; one peer is not installed."""
    now = "2026-01-02T03:04:05Z"
    points = samples[["shape", "N", "K", "M", "regime"]].drop_duplicates()
    rows = [
        AttemptRow("time", "ok", None, now, 1.0, shape=s, N=int(n), K=int(k), M=int(m), regime=r)
        for s, n, k, m, r in points.itertuples(index=False)
    ]
    reason = "NOT_INSTALLED: no module named vllm"
    rows += [
        AttemptRow("peer", "refused", reason, now, 0.0, kernel="peer/marlin_fp4", format=fmt)
        for fmt in ("mxfp4", "nvfp4")
    ]
    return tuple(rows)


def counter_rows() -> list[dict]:
    """Instructions of the main loop, and a few profiler counters."""
    place = {
        "format": "mxfp4",
        "shape": "q_o_proj",
        "N": 4096,
        "K": 4096,
        "M": 1,
        "regime": "cold_graph",
    }
    rows = []
    for kernel, value in ((dec.FULL, 7.25), ("testbed/-dequant_issue", 4.0)):
        for metric, unit, number in (
            ("loop_instructions_per_64_weights", "instructions", value),
            ("sass_HMMA", "instructions", 32.0),
            ("sass_LOP3", "instructions", 16.0 * value),
        ):
            rows.append(
                {
                    "kernel": kernel,
                    **place,
                    "metric": metric,
                    "unit": unit,
                    "value": number,
                    "tool": "made up",
                }
            )
    for kernel, share in (("stream_read", 0.9), (dec.FULL, 0.6), ("peer/humming_bf16", 0.62)):
        for metric, unit, value in (
            ("gpu__time_duration.sum", "ns", 4300.0 / share),
            ("dram__bytes_read.sum", "bytes", 8912896.0),
            ("lts__t_sector_hit_rate.pct", "%", 12.0),
        ):
            rows.append(
                {
                    "kernel": kernel,
                    **place,
                    "metric": metric,
                    "unit": unit,
                    "value": value,
                    "tool": "made up",
                }
            )
    return rows


def readings(samples: pd.DataFrame, clocks: list[float]) -> pd.DataFrame:
    """Telemetry: a reading in every third leg, the clocks in turn."""
    at = samples["start_ns"].to_numpy()[::3] + 10
    table = pd.DataFrame(
        {"t_ns": at, "sm_clock_mhz": [clocks[i % len(clocks)] for i in range(len(at))]}
    )
    table = table.assign(
        mem_clock_mhz=3201.0, power_w=400.0, temperature_c=40.0, throttle_reasons=0
    )
    return table[TELEMETRY_SCHEMA.names]


def accuracy_record() -> dict:
    """The committed record of the formats' accuracy."""
    from lab import accuracy

    folder = accuracy.newest(Path(__file__).resolve().parents[2] / "data")
    assert folder is not None
    return accuracy.load(folder)


def predicted(cell: dec.Cell, over: float = 1.0) -> Estimate:
    """What counters would say: the time of the full testbed, times `over`, exactly."""
    return Estimate(
        over * (1 + GAP) * floor_us(cell.format, cell.N, cell.K), 0.0, math.inf, log=False
    )
