"""The section of R2b in the report: the matrix kernel against its bars, its rivals and its own predecessors.

Everything here turns `lab.analysis_r2b.Analysis`, verdicts and recorded rows into text for `templates/r2b.html.j2`.
What it has in common with the decode part is in `lab.report_r2`. Prose and columns live in `templates/words_r2b.json`.
What a step of the ablation adds and was predicted to gain stands in `qgemm_mx.gemm_plan`, and is read here and not by
the analysis.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lab import bars, report_r2, statistics
from lab.analysis_r2b import Analysis
from lab.bars_r2b import OVER_BF16, OVER_FP8
from lab.dispatch import LINEAR, REGRET
from lab.figures_r2 import Plan
from lab.figures_r2b import fig_ablation, fig_speed
from lab.gemm_r2b import HEADLINE, KERNEL, MS, PEAK, Choice, Crossing, bound_of, over
from lab.page import BLANK, Row, Tables, absent, number
from lab.plan import BASELINES, FLOOR, PEER
from lab.plan_r2b import is_ablation
from lab.product_cells import FORMATS, ProductCell
from lab.production import BF16, FP8, REGIMES
from lab.r1_words import constant, count, listed, observed, percent, pick
from lab.report_r2 import Figure, format_name, interval_of
from lab.statistics import Estimate
from qgemm_mx import gemm_plan

WORDS = Path(__file__).parent / "templates" / "words_r2b.json"
#: What the source predicted of a correct kernel on sm_90, on 2026-08-12 (P2, P3 and below them).
SOURCE_RIDGE_M, SOURCE_OF_FLOOR, SOURCE_MOST_M = 44, 85, 16
SOURCE_SPEED, SOURCE_SPEED_M = 1.5, 4
SOURCE_FALLS = {1.2: 32, 1.0: 64}
#: Shapes of the frozen set.
FROZEN_SHAPES = 6


def words() -> dict[str, Any]:
    """Prose and columns of the section."""
    return json.loads(WORDS.read_text(encoding="utf-8"))


def ablation_plan() -> dict[str, tuple[str, float | None]]:
    """Kernel id of a step -> (what it adds, predicted ratio to the step before), as the kernel's own plan says."""
    found = {}
    for name, what, ratio in gemm_plan.ABLATION_STEPS:
        kernel = name if name.startswith(KERNEL) else f"{KERNEL}/{name}"
        found[kernel] = (what, ratio)
    return found


def figures(found: Analysis | None, plan: Plan | None = None) -> dict[str, str]:
    """Figures 8 and 9, wide and narrow, as SVG text; none without a campaign, or without what a figure shows."""
    out: dict[str, str] = {}
    if found is None:
        return out
    plan = ablation_plan() if plan is None else plan
    held = {c.point for c in found.cells if bound_of(c, found.peak).time is not None}
    steps = [s for s in found.steps if s.point in held]
    rivals = any(c.over_fp8 is not None or c.over_bf16 is not None for c in found.cells)
    for suffix, columns in (("", 3), ("_narrow", 1)):
        if rivals:
            out[f"fig8_gemm{suffix}"] = fig_speed(found.cells, columns=columns)
        if steps:
            out[f"fig9_gemm_ablation{suffix}"] = fig_ablation(
                steps, found.cells, found.peak, plan, columns=columns
            )
    return out


def section(
    kit: Tables,
    found: Analysis | None,
    verdicts: pd.DataFrame,
    figure: Figure,
    plan: Plan | None = None,
) -> dict[str, Any] | None:
    """What the template prints; None before any campaign of R2b.

    `verdicts` with the columns of verdicts.csv; `plan` stands in for `ablation_plan`.
    """
    if found is None:
        return None
    said = words()
    plan = ablation_plan() if plan is None else plan
    judged = dict(zip(verdicts["claim"], verdicts["verdict"], strict=True))
    missing = "what it needs: the campaign has not measured it"
    drawn = {f["key"]: {**f, **figure(f["key"]), "missing": missing} for f in said["figures"]}
    profiled = sorted(found.profiles, key=lambda p: (not p.kernel.startswith(KERNEL),))
    caption = f"Profiler counters of {KERNEL}, of steps of its ablation, and of cuBLASLt"
    return {
        "campaign": found.campaign,
        "decode": found.decode,
        "facts": facts(found),
        "closed": closed(found),
        "figures": drawn,
        "bars": report_r2.bar_table(kit, said, found.bars, judged, "The bars of the matrix kernel"),
        "reasons": report_r2.reasons(said, found.bars),
        "misses": report_r2.miss_table(kit, said, found.misses),
        "missed_line": report_r2.missed_line(found.misses),
        "cells": [cell_table(kit, found, fmt) for fmt in FORMATS],
        "by_m": report_r2.speed_table(
            kit, found.speeds, REGIMES[:1], f"{KERNEL}: means over the shapes, cold", KERNEL
        ),
        "hot": report_r2.speed_table(
            kit, found.speeds, REGIMES[1:2], f"{KERNEL}: means, hot (weights in the L2)", KERNEL
        ),
        "linear_by_m": report_r2.speed_table(
            kit, found.speeds, REGIMES[:1], f"{LINEAR}: means over the shapes, cold", LINEAR
        ),
        "choices": choice_table(kit, found.choices),
        "regret_line": regret_line(found),
        "regret": report_r2.regret_table(kit, found.regrets),
        "crossings": crossing_table(kit, found.crossings),
        "mechanisms": mechanism_table(kit, found.crossings),
        "source": source_table(kit, found),
        "steps": report_r2.step_table(kit, found.steps, plan),
        "elements": report_r2.element_table(kit, found.elements),
        "formats": report_r2.format_table(kit, of_the_plan(found)),
        "invariant": report_r2.invariant_table(kit, found.cells),
        "power": power_table(kit, found),
        "profile": report_r2.profile_table(kit, profiled, caption),
        "sass": report_r2.sass_table(kit, said, found.profiles, KERNEL),
        "peak": _peak(found),
        "missing": report_r2.missing_table(kit, found.constants),
    }


def closed(found: Analysis) -> str:
    """Which points the minutes of the campaign did not reach, and what follows; empty where the plan is whole."""
    if not found.lost:
        return ""
    there = {c.point.shape for c in found.cells}
    by_shape: dict[str, list[int]] = {}
    for shape, _, _, m in found.lost:
        by_shape.setdefault(shape, []).append(m)
    whole = [shape for shape in by_shape if shape not in there]
    parts = [f"{listed(whole)} at every M"] if whole else []
    parts += [
        f"{shape} at M = {', '.join(map(str, sorted(ms)))}"
        for shape, ms in by_shape.items()
        if shape in there
    ]
    return (
        f"The minutes of this campaign ended it before its plan: {len(found.lost)} of {found.taken + len(found.lost)} "
        f"points were not reached ({'; '.join(parts)}). A claim about any of them is NOT_RUN. A bar with cells that "
        "were not measured is never met: it is missed by those that were, or undecided. A mean is over the shapes that "
        "were measured, and its table says how many."
    )


def regret_line(found: Analysis) -> str:
    """The regret over all cells; where some were not reached, that it is not known, and what the others give."""
    why = found.constants.missing.get(REGRET)
    if why is None or not found.regrets:
        return report_r2.regret_line(found.constants.found.get(REGRET), found.regrets)
    mean = statistics.geomean([r.ratio for r in found.regrets])
    return (
        f"Of the dispatch choice over the fastest plan of an exhaustive search, {why}: the bar is not judged. The "
        f"{count(len(found.regrets), 'point')} that were give {observed(mean)} in geometric mean."
    )


def of_the_plan(found: Analysis) -> list[ProductCell]:
    """Cells at the tabulated M."""
    return [c for c in found.cells if c.point.M in MS]


def _peak(found: Analysis) -> str:
    if found.peak is None:
        return "No campaign of this device has a BF16 rate, so the bound is the floor alone."
    source = found.sources[PEAK]
    where = "this campaign" if source == found.campaign else f"campaign {source}"
    return f"The BF16 rate is {observed(found.peak)} TFLOP/s, of {where}."


# ---- headline ----------------------------------------------------------------------------------------------------


def facts(found: Analysis) -> list[dict[str, str]]:
    """The numbers of the first screen of the section."""
    decided = Counter(bar.status for bar in found.bars)
    measured = sum(decided[s] for s in (bars.MET, bars.MISSED, bars.UNDECIDED))
    out = [
        {
            "value": f"{decided[bars.MET]} of {len(found.bars)} bars met",
            "text": f"{decided[bars.MISSED]} missed, {decided[bars.UNDECIDED]} undecided, "
            f"{len(found.bars) - measured} not run.",
        }
    ]
    for rival, name, ms in (
        ("FP8", "fp8_mean", OVER_FP8),
        ("BF16", "bf16_mean", OVER_BF16),
    ):
        means = [(m, bar_of(found, f"{name}.m{m}")) for m in ms]
        known = [(m, bar) for m, bar in means if bar is not None and bar.observed is not None]
        if known:
            m, first = known[0]
            rest = "; ".join(f"M = {m}: {number(b.observed.value)}" for m, b in known[1:])
            out.append(
                {
                    "value": f"{number(first.observed.value)} × {rival} at M = {m}",
                    "text": f"is the speed over cuBLASLt {rival} in MXFP4, geometric mean of "
                    f"{_of(first.cells, first.planned)} ({interval_of(first.observed)}; the bar is {first.limit:g})."
                    + (f" At other M: {rest}." if rest else ""),
                }
            )
    for against, rival in ((FP8.kernel, "FP8"), (BF16.kernel, "BF16")):
        own = [x for x in found.crossings if x.against == against]
        if own:
            values = sorted((x.value, x.shape) for x in own)
            middle, ms = values[len(values) // 2][0], own[0].ms
            low, high = (crossed(values[i][0], ms) for i in (0, -1))
            ends = (
                ""
                if low == high
                else f" (lowest {low} on {values[0][1]}, highest {high} on {values[-1][1]})"
            )
            out.append(
                {
                    "value": f"faster than {rival} {faster_up_to(middle, ms)}",
                    "text": f"is {LINEAR} in MXFP4, median of {count(len(own), 'shape')}{ends}.",
                }
            )
    return out


def bar_of(found: Analysis, name: str) -> bars.Bar | None:
    """The bar with an id in the headline format, or None."""
    return next((b for b in found.bars if b.id == name and b.format == HEADLINE), None)


def crossed(value: float, ms: Sequence[int]) -> str:
    """An M of a crossing: a number, or on which side of what was measured it lies."""
    if value == 0:
        return f"under {min(ms)}"
    return f"over {max(ms)}" if math.isinf(value) else f"{value:.0f}"


def faster_up_to(value: float, ms: Sequence[int]) -> str:
    """`up to M = 123`, or that it is at no M or at every M that was measured."""
    if value == 0:
        return f"at no M from {min(ms)} on"
    return f"at every M up to {max(ms)}" if math.isinf(value) else f"up to M = {value:.0f}"


def _of(cells: int, planned: int) -> str:
    """`9 shapes`, `6 of 9 shapes`."""
    return count(cells, "shape") if cells >= planned else f"{cells} of {planned} shapes"


# ---- cells and dispatch ------------------------------------------------------------------------------------------


def cell_table(kit: Tables, found: Analysis, fmt: str) -> dict:
    """One row a cell of a format, all M, beside its bound."""

    def bound(cell: ProductCell) -> Row:
        own = bound_of(cell, found.peak)
        return {
            "r2b_bound": own.kind or BLANK,
            "r2b_bound_us": BLANK if own.time is None else number(own.time.value),
            "r2b_over_bound": observed(over(cell, own)),
        }

    return report_r2.cell_table(kit, found.cells, fmt, KERNEL, bound)


def choice_table(kit: Tables, choices: Sequence[Choice]) -> dict:
    """What `linear` launches, beside the kernels that it chooses from."""
    rows = [
        {
            "r2_shape": c.cell.point.shape,
            "r2_m": str(c.cell.point.M),
            "r2b_launches": c.kernel or BLANK,
            "r2b_linear_us": observed(c.cell.time),
            "r2b_gemm_us": _us(c.gemm),
            "r2b_gemv_us": _us(c.gemv),
            "r2b_over_gemm": observed(c.over_gemm),
            "r2_over_fp8": observed(c.cell.over_fp8),
            "r2_over_bf16": _us(c.cell.over_bf16),
            "r2_over_floor": observed(c.cell.over_floor),
        }
        for c in choices
    ]
    keys = (
        "r2_shape", "r2_m", "r2b_launches", "r2b_linear_us", "r2b_gemm_us", "r2b_gemv_us", "r2b_over_gemm",
        "r2_over_fp8", "r2_over_bf16", "r2_over_floor",
    )  # fmt: skip
    caption = f"What {LINEAR} launches in MXFP4, beside both kernels"
    return kit.table(keys, rows, caption, f"{LINEAR} was not timed.")


def _us(estimate: Estimate | None) -> str:
    return BLANK if estimate is None else number(estimate.value)


# ---- crossings ---------------------------------------------------------------------------------------------------


def crossing_table(kit: Tables, crossings: Sequence[Crossing]) -> dict:
    """One row a shape and rival: where `linear` stops being faster, and what sets its time there."""
    rows = [
        {
            "r2_shape": x.shape,
            "r2b_against": x.against,
            "r2b_crossing": crossed(x.value, x.ms),
            "r2b_crossing_ends": f"{crossed(x.low, x.ms)} to {crossed(x.high, x.ms)}",
            "r2b_at_m": str(x.m),
            "r2b_ratio": observed(x.ratio),
            "r2b_memory": percent(x.memory),
            "r2b_tensor_part": percent(x.tensor),
            "r2b_mechanism": x.mechanism,
        }
        for x in crossings
    ]
    keys = (
        "r2_shape", "r2b_against", "r2b_crossing", "r2b_crossing_ends", "r2b_mechanism", "r2b_at_m", "r2b_ratio",
        "r2b_memory", "r2b_tensor_part",
    )  # fmt: skip
    caption = f"The M at which {LINEAR} in MXFP4 stops being faster"
    return kit.table(keys, rows, caption, f"{LINEAR} was not timed over M.")


def mechanism_table(kit: Tables, crossings: Sequence[Crossing]) -> dict:
    """What each mechanism of a crossing follows from."""
    rows = [
        {
            "r2_shape": x.shape,
            "r2b_against": x.against,
            "r2b_at_m": str(x.m),
            "r2b_mechanism": x.mechanism,
            "r2_reason": x.why,
        }
        for x in crossings
    ]
    keys = ("r2_shape", "r2b_against", "r2b_at_m", "r2b_mechanism", "r2_reason")
    return kit.table(keys, rows, "What the mechanisms follow from", "")


def _means(found: Analysis, against: str) -> dict[int, Mapping[str, Any]]:
    """Mean speed of `linear` over a rival on the frozen shapes by M; rivals and floors as `lab.production`."""
    frame = found.speeds
    own = frame[
        (frame["kernel"] == LINEAR)
        & (frame["format"] == HEADLINE)
        & (frame["over"] == "frozen")
        & (frame["regime"] == REGIMES[0])
    ]
    rows = {m: pick(own, M=m, against=against) for m in sorted(own["M"].unique())}
    return {int(m): row for m, row in rows.items() if row is not None}


def falls_under(means: Mapping[int, Mapping[str, Any]], level: float) -> str:
    """The M at which a mean speed falls under a level, between measured M in log-log scale."""
    ratios = [
        statistics.from_interval(row["speed"], row["ci_low"], row["ci_high"], None, log=True)
        for row in means.values()
    ]
    return crossed(statistics.Crossover(tuple(means), tuple(ratios), level).value, tuple(means))


def source_table(kit: Tables, found: Analysis) -> dict:
    """What the source predicted before there was a kernel, beside what `linear` does on the frozen shapes."""
    rows: list[Row] = []

    def add(what: str, predicted: str, seen: str) -> None:
        rows.append({"r2b_what": what, "r2b_source": predicted, "r2b_seen": seen})

    ridge = found.ridges.get(f"crossover_m_{HEADLINE}")
    if ridge is not None:
        what = "M at which reading the weight and BF16 products take as long, from measured rates of the device"
        add(what, f"about {SOURCE_RIDGE_M}", constant(ridge))
    floors = {m: row for m, row in _means(found, FLOOR).items() if m <= SOURCE_MOST_M}
    if floors:
        least = min(floors, key=lambda m: floors[m]["speed"])
        what = f"least percent of the floor up to M = {SOURCE_MOST_M}"
        add(what, f"over {SOURCE_OF_FLOOR} %", f"{percent(floors[least]['speed'])} at M = {least}")
    speeds = _means(found, FP8.kernel)
    few = {m: row for m, row in speeds.items() if m <= SOURCE_SPEED_M}
    if few:
        least = min(few, key=lambda m: few[m]["speed"])
        what = f"least speed over FP8 at M up to {SOURCE_SPEED_M}"
        add(what, f"over {SOURCE_SPEED:g}", f"{number(few[least]['speed'])} at M = {least}")
    if len(speeds) > 1:
        for level, m in SOURCE_FALLS.items():
            what = f"M at which the speed over FP8 falls under {level:g}"
            add(what, f"about {m}", falls_under(speeds, level))
    keys = ("r2b_what", "r2b_source", "r2b_seen")
    used = max((int(row["shapes"]) for row in (*floors.values(), *speeds.values())), default=0)
    caption = (
        f"The source's predictions (P2, P3) and {LINEAR} in MXFP4, geometric means of "
        f"{_of(used, FROZEN_SHAPES)} of the frozen set"
    )
    return kit.table(keys, rows, caption, f"{LINEAR} was not timed.")


# ---- power -------------------------------------------------------------------------------------------------------


def power_table(kit: Tables, found: Analysis) -> dict:
    """Clock and power of prefill by arm: our kernel first, then its rivals; no steps and no floor."""

    def place(kernel: str) -> int:
        order = (KERNEL, LINEAR, *BASELINES.values())
        return order.index(kernel) if kernel in order else len(order)

    shown = [
        row
        for row in found.power.to_dict("records")
        if row["kernel"] in (KERNEL, LINEAR, *BASELINES.values()) or row["kernel"].startswith(PEER)
    ]
    rows = [
        {
            "r2b_arm": row["kernel"],
            "r2_format": format_name(row["format"]),
            "r2_m": str(row["M"]),
            "r2b_clock": _whole(row["sm_clock_mhz"]),
            "r2b_power": _whole(row["power_w"]),
            "r2b_capped": percent(row["capped"]),
            "r2b_readings": str(row["readings"]),
        }
        for row in sorted(shown, key=lambda r: (place(r["kernel"]), r["kernel"], r["format"], r["M"]))
    ]  # fmt: skip
    assert not any(is_ablation(row["r2b_arm"]) for row in rows)
    keys = ("r2b_arm", "r2_format", "r2_m", "r2b_clock", "r2b_power", "r2b_capped", "r2b_readings")
    caption = "Clock and power of the prefill legs, medians over the shapes measured"
    return kit.table(keys, rows, caption, "No reading fell into a leg of prefill.")


def _whole(value: float | None) -> str:
    return BLANK if absent(value) else f"{value:.0f}"


__all__ = [
    "ablation_plan", "closed", "crossed", "facts", "falls_under", "faster_up_to", "figures", "section", "words",
]  # fmt: skip
