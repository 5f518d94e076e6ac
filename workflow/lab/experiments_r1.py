"""The experiments on single causes: one table of what each setting does to the time, and beside what it is held.

A ratio here is time(kernel) / time(against): above 1 the setting costs time, below 1 it saves some. Arms of one point
are paired by block. The cost of dequantisation is a difference of two variants, of which one is wrong by design; so it
stands as a cost and never as a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lab import statistics
from lab.arm_times import Arm, ArmTimes, Point, spread
from lab.decomposition import FLOOR, FULL, Amount, variant_name
from lab.statistics import Estimate
from qgemm_mx.formats import bytes_per_weight

COLD, LOOPED, CHAINED = "cold_graph", "cold_loop", "chain_pdl"
CAUSE, WAVES, CHAIN_SHAPE = "cause/", "waves_", "decode_chain"
#: Names of the shapes that only an experiment needs.
EXTRA_SHAPE = rf"{WAVES}\d+|.+_tp\d+|{CHAIN_SHAPE}"
WAYS = (2, 4, 8)
NO_SPLIT = "cause/split_k/1"
NO_DEQUANT = variant_name(
    {"weight_load", "layout_staging", "matrix_issue", "epilogue_reduction"}
)  # testbed/-dequant_issue
COLUMNS = (
    "campaign", "experiment", "setting", "kernel", "format", "shape", "N", "K", "M", "regime",
    "time_us", "ci_low_us", "ci_high_us", "read_tbps", "against", "ratio", "ratio_low", "ratio_high",
    "cost_us", "cost_low_us", "cost_high_us", "grid", "ring_bytes_per_sm", "chosen",
)  # fmt: skip


class Row(NamedTuple):
    """One line: an arm at a point under a setting. ratio: log scale; cost: microseconds; None where there is none."""

    experiment: str
    setting: str
    arm: Arm
    point: Point
    against: str = ""
    ratio: Estimate | None = None
    cost: Estimate | None = None


def table(
    times: ArmTimes,
    variants: Mapping[tuple[str, Point], pd.DataFrame],
    shapes: Sequence[Mapping[str, Any]],
    campaign: str,
) -> pd.DataFrame:
    """All experiments, one row a setting, with ``COLUMNS``.

    `variants`: (format, point) -> log block times by kernel of the testbed's variants, right or wrong, for the cost of
    dequantisation. `shapes`: the rows of prereg/shapes.json.
    """
    rows = [
        *_waves(times),
        *_settings(times),
        *_tensor_parallel(times, shapes),
        *_formats(times, variants),
        *_chain(times),
    ]
    plain = [_plain(times, row) for row in rows] + list(_launch(times, shapes))
    frame = pd.DataFrame(
        [[campaign, *(row.get(c) for c in COLUMNS[1:])] for row in plain], columns=list(COLUMNS)
    )
    numbers = [c for c in COLUMNS if c.endswith(("_us", "tbps", "_low", "_high")) or c == "ratio"]
    return frame.astype(
        dict.fromkeys(numbers, float)
        | dict.fromkeys(("N", "K", "grid", "ring_bytes_per_sm"), "Int64")
    )


def _plain(times: ArmTimes, row: Row) -> dict[str, Any]:
    cell, time = times.cell(row.arm, row.point), times.time(row.arm, row.point)
    chosen = cell.tuning.chosen if cell.tuning else ""
    out: dict[str, Any] = {
        "experiment": row.experiment,
        "setting": row.setting,
        **row.arm._asdict(),
        **row.point._asdict(),
        "against": row.against,
        "chosen": chosen,
        "grid": launched_grid(chosen),
        "ring_bytes_per_sm": ring_bytes(chosen, row.arm.format),
    }
    if row.cost is None:  # the row of a cost is about two variants, not about the time of one
        out |= _three("time_us", "ci_low_us", "ci_high_us", time)
        out["read_tbps"] = cell.weight_bytes / time.value / 1e6
    out |= _three("ratio", "ratio_low", "ratio_high", row.ratio)
    return out | _three("cost_us", "cost_low_us", "cost_high_us", row.cost)


#: How the testbed writes its launch down (lab.testbed.Launcher.describe).
_ENTRY = re.compile(r"_s(\d+)_w(\d+)x(\d+)_.*?(\d+) blocks an SM")
_GRID = re.compile(r"grid (\d+)x(\d+)")


def launched_grid(chosen: str) -> int | None:
    """Blocks of a launch, from the line that the testbed records; None where it says nothing of it."""
    said = _GRID.search(chosen)
    return int(said[1]) * int(said[2]) if said else None


def ring_bytes(chosen: str, fmt: str) -> int | None:
    """Weight bytes that the rings of one multiprocessor hold when full: the most that can be in flight to it.

    A ring has `stages` slabs of 16 warps_n rows by 128 warps_k weights.
    """
    said = _ENTRY.search(chosen)
    if said is None:
        return None
    stages, warps_n, warps_k, blocks = map(int, said.groups())
    return round(blocks * stages * 16 * warps_n * 128 * warps_k * bytes_per_weight(fmt))


def _three(value: str, low: str, high: str, estimate: Estimate | None) -> dict[str, float]:
    if estimate is None:
        return {}
    ends = estimate.interval()
    return {value: estimate.value, low: ends.low, high: ends.high}


def _tested(arm: Arm) -> bool:
    """Whether an arm is the testbed or a kernel in use: what a change of the problem is tried on."""
    return arm.kernel == FULL or arm.kernel.startswith("peer/")


def _ours(arm: Arm) -> bool:
    """Whether an arm is what the others are held against."""
    return arm.kernel == FLOOR or arm.kernel.startswith("cublaslt_")


def _waves(times: ArmTimes) -> Iterator[Row]:
    """N around whole waves, with the planned split of K and without: time over the floor of the same bytes."""
    for arm, point, _ in sorted(times, key=lambda row: (row[0].kernel != FULL, row[1].N, row[0])):
        if point.shape.startswith(WAVES) and (_tested(arm) or arm.kernel == NO_SPLIT):
            ratio = times.ratio((arm, point), (Arm(FLOOR, arm.format), point))
            split = "no split of K" if arm.kernel == NO_SPLIT else "as planned"
            yield Row("waves", f"N={point.N}, {split}", arm, point, FLOOR, ratio)


def _settings(times: ArmTimes) -> Iterator[Row]:
    """cause/<experiment>/<value> beside the unchanged testbed of the same format."""
    found: dict[tuple[str, str, Point], list[tuple[str, Arm]]] = {}
    for arm, point, _ in times:
        if arm.kernel.startswith(CAUSE) and not point.shape.startswith(WAVES):
            _, experiment, value = arm.kernel.split("/", 2)
            found.setdefault((experiment, arm.format, point), []).append((value, arm))
    for (experiment, fmt, point), arms in sorted(found.items()):
        base = Arm(FULL, fmt)
        if times.has(base, point):
            yield Row(experiment, "unchanged", base, point)
        for value, arm in sorted(arms, key=lambda pair: _natural(pair[0])):
            ratio = times.ratio((arm, point), (base, point))
            yield Row(experiment, value, arm, point, FULL if ratio else "", ratio)


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", text)]


def _tensor_parallel(times: ArmTimes, shapes: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Shards of N: ways x time of one shard over the time of the whole. 1 is sharding for free.

    A shard is known by its N and K: one that is as large as another shape was measured under that shape's name.
    """
    measured: dict[tuple[int, int, int], dict[Arm, Point]] = {}
    for arm, point, _ in times:
        if point.regime == COLD and (_tested(arm) or arm.kernel.startswith("cublaslt_")):
            measured.setdefault((point.N, point.K, point.M), {})[arm] = point
    sharded = {(p.N, p.K) for arms in measured.values() for p in arms.values()}
    for shape in shapes:
        n, k = shape["N"], shape["K"]
        ways = [w for w in WAYS if n % w == 0 and (n // w, k) in sharded]
        # Where no shard has a name of its own, none was meant.
        own = {f"{shape['name']}_tp{w}" for w in WAYS}
        for m in sorted({p.M for _, p, _ in times if p.shape in own}):
            wholes = measured.get((n, k, m), {})
            for w in ways:
                for arm, point in sorted(measured.get((n // w, k, m), {}).items()):
                    ratio = (
                        times.ratio((arm, point), (arm, wholes[arm]), w) if arm in wholes else None
                    )
                    if ratio is not None:
                        against = f"{shape['name']} / {w}"
                        part = f"1/{w} of {shape['name']}"
                        yield Row("tensor_parallel", part, arm, point, against, ratio)


def _formats(times: ArmTimes, variants: Mapping[tuple[str, Point], pd.DataFrame]) -> Iterator[Row]:
    """What dequantisation costs in each format, beside MXFP4's, wherever another format was tried."""
    tried = {p for fmt, p in variants if fmt != "mxfp4" and p.regime == COLD}
    for point in sorted(tried):
        for fmt, where in sorted(variants):
            arm, base = Arm(FULL, fmt), Arm(FULL, "mxfp4")
            if where != point or not times.has(arm, point):
                continue
            ratio = None if fmt == "mxfp4" else times.ratio((arm, point), (base, point))
            yield Row("formats", "time", arm, point, f"{FULL} mxfp4" if ratio else "", ratio)
            cost = dequant_cost(variants[fmt, point])
            if cost is not None:
                yield Row("formats", "cost of dequantisation", arm, point, cost=cost.estimate())


def dequant_cost(logs: pd.DataFrame) -> Amount | None:
    """Time that removing dequantisation saves with all else present, us a block; None where a variant is missing."""
    if not {FULL, NO_DEQUANT} <= set(logs.columns):
        return None
    pair = logs[[FULL, NO_DEQUANT]].dropna()
    if len(pair) < 2:
        return None
    return Amount(np.exp(pair[FULL].to_numpy()) - np.exp(pair[NO_DEQUANT].to_numpy()))


def _chain(times: ArmTimes) -> Iterator[Row]:
    """A chain with programmatic dependent launch over plain graph replay."""
    for arm, point, _ in times:
        if point.regime == CHAINED:
            plain = point._replace(regime=COLD)
            ratio = times.ratio((arm, point), (arm, plain))
            yield Row("chain", CHAINED, arm, point, COLD if ratio else "", ratio)


def _launch(times: ArmTimes, shapes: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Launched one by one over replayed as a graph: geometric mean over the shapes, for each arm and M."""
    known = {s["name"] for s in shapes}
    found: dict[tuple[Arm, int], list[tuple[str, Estimate]]] = {}
    for arm, point, _ in times:
        if point.regime == LOOPED and point.shape in known and (_tested(arm) or _ours(arm)):
            ratio = times.ratio((arm, point), (arm, point._replace(regime=COLD)))
            if ratio is not None:
                found.setdefault((arm, point.M), []).append((point.shape, ratio))
    for (arm, m), ratios in sorted(found.items()):
        mean = spread(ratios)
        count = f"{mean.shapes} shape" + ("s" if mean.shapes > 1 else "")
        where = {"shape": count, "N": None, "K": None, "M": m, "regime": LOOPED}
        row = {"experiment": "launch", "setting": "launched one by one", **arm._asdict(), **where}
        yield (
            row
            | {"against": COLD, "chosen": ""}
            | _three("ratio", "ratio_low", "ratio_high", mean.mean)
        )


def nvfp4_over_mxfp4(
    variants: Mapping[tuple[str, Point], pd.DataFrame], m: int = 1
) -> tuple[Estimate | None, str]:
    """Cost of dequantising NVFP4 over that of MXFP4 at M = `m`, and what it is made of, or why there is none.

    Both costs are paired by block in units of the floor of MXFP4 and summed over the shapes that have both, so that a
    shape weighs the same whatever its size and no single small cost is divided by.
    """
    pairs = []
    for fmt, point in sorted(variants):
        if fmt != "nvfp4" or point.M != m or point.regime != COLD:
            continue
        ours = variants.get(("mxfp4", point))
        if ours is None or FLOOR not in ours:
            continue
        theirs = variants[fmt, point]
        if not {FULL, NO_DEQUANT} <= set(theirs) & set(ours):
            continue
        both = pd.DataFrame(
            {
                "top": np.exp(theirs[FULL]) - np.exp(theirs[NO_DEQUANT]),
                "bottom": np.exp(ours[FULL]) - np.exp(ours[NO_DEQUANT]),
                "floor": np.exp(ours[FLOOR]),
            }
        ).dropna()
        if len(both) >= 2:
            pairs.append((point.shape, both))
    if not pairs:
        return None, f"no point at M={m} has both formats with and without dequantisation"
    names = ", ".join(shape for shape, _ in pairs)
    scaled = [both[["top", "bottom"]] / both["floor"].mean() for _, both in pairs]
    bottom = statistics.combine(
        [statistics.sample_estimate(s["bottom"], log=False) for s in scaled], [1.0] * len(scaled)
    )
    low, high = bottom.interval()
    if low <= 0:
        return None, (
            f"the cost of dequantising MXFP4 cannot be told from 0 on {names} at M={m}: "
            f"{bottom.mean:.3g} ({low:.3g} to {high:.3g}) of the floor"
        )
    ratio = sum(s["top"].mean() for s in scaled) / bottom.mean
    parts = [
        statistics.sample_estimate((s["top"] - ratio * s["bottom"]) / bottom.mean, log=False)
        for s in scaled
    ]
    error = statistics.combine(parts, [1.0] * len(parts))
    how = (
        f"(full - without dequantisation) of nvfp4 over the same of mxfp4, M={m}, in units of the floor,"
        f" summed over {names}"
    )
    return Estimate(float(ratio), error.se, error.df, log=False), how
