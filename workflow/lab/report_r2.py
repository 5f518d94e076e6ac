"""The section of R2 in the report: the decode kernel against its bars, its rivals and its own predecessors.

Everything here turns `lab.analysis_r2.Analysis`, verdicts and recorded rows into text for `templates/r2.html.j2`. Prose
and columns live in `templates/words_r2.json`. What a step of the ablation adds and was predicted to gain stands in
`qgemm_mx.gemv_plan`, and is read here and not by the analysis.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lab import bars, bars_r2, statistics
from lab import figures as drawings
from lab.analysis_r2 import CHAIN, CHAINED, HOST, PACK, Analysis
from lab.bars import Bar, Miss
from lab.decode_r2 import FORMATS, HEADLINE, KERNEL, Decode, Step, growth
from lab.decomposition import FLOOR, Constants
from lab.dispatch import REGRET, Regret
from lab.figures_r2 import Plan, fig_ablation, fig_decode
from lab.page import BLANK, Row, Tables, absent, number, text
from lab.product_cells import ProductCell
from lab.production import BF16, FP8, REGIMES
from lab.profile_r2 import (
    DRAM_PEAK,
    ELIGIBLE,
    FEW_TOKENS,
    ISSUE,
    L2_HITS,
    LOOP,
    REGISTERS,
    WARPS,
    WAVES,
    Profile,
)
from lab.r1_words import constant, count, observed, percent, pick, plain, spread, three
from lab.statistics import Estimate, Quantity
from qgemm_mx import gemv_plan
from qgemm_mx.formats import bytes_per_weight

WORDS = Path(__file__).parent / "templates" / "words_r2.json"
STYLE = Path(__file__).parent / "templates" / "style_r2.css"

#: Gives key, SVG wide and narrow of a figure, as the page wants it.
Figure = Callable[[str], Mapping[str, Any]]


def words() -> dict[str, Any]:
    """Prose and columns of the section."""
    return json.loads(WORDS.read_text(encoding="utf-8"))


def style() -> str:
    """What the section adds to the style sheet of the page."""
    return STYLE.read_text(encoding="utf-8")


def ablation_plan() -> dict[str, tuple[str, float | None]]:
    """Kernel id of a step -> (what it adds, predicted ratio to the step before), as the kernel's own plan says."""
    found = {}
    for name, what, ratio in gemv_plan.ABLATION_STEPS:
        kernel = name if name.startswith(KERNEL) else f"{KERNEL}/{name}"
        found[kernel] = (what, ratio)
    return found


def figures(found: Analysis | None, plan: Plan | None = None) -> dict[str, str]:
    """Figures 6 and 7, wide and narrow, as SVG text; none without a campaign, or without what a figure shows."""
    out: dict[str, str] = {}
    if found is None:
        return out
    plan = ablation_plan() if plan is None else plan
    steps = [s for s in found.steps if s.floor is not None]
    rivals = any(c.over_fp8 is not None or c.over_floor is not None for c in found.decode)
    for suffix, columns in (("", 3), ("_narrow", 1)):
        if steps:
            out[f"fig6_ablation{suffix}"] = fig_ablation(steps, plan, columns=columns)
        if rivals:
            out[f"fig7_decode{suffix}"] = fig_decode(found.decode, columns=columns)
    return out


def section(
    kit: Tables,
    found: Analysis | None,
    verdicts: pd.DataFrame,
    by_id: Mapping[str, Mapping[str, Any]],
    figure: Figure,
    plan: Plan | None = None,
) -> dict[str, Any] | None:
    """What the template prints; None before any campaign of R2.

    `verdicts` with the columns of verdicts.csv; `by_id`: claims; `plan` stands in for `ablation_plan`.
    """
    if found is None:
        return None
    said = words()
    plan = ablation_plan() if plan is None else plan
    judged = dict(zip(verdicts["claim"], verdicts["verdict"], strict=True))
    missing = "what it needs: the campaign has not measured it"
    drawn = {f["key"]: {**f, **figure(f["key"]), "missing": missing} for f in said["figures"]}
    return {
        "campaign": found.campaign,
        "facts": facts(found),
        "figures": drawn,
        "bars": bar_table(kit, said, found.bars, judged),
        "reasons": reasons(said, found.bars),
        "misses": miss_table(kit, said, found.misses),
        "missed_line": missed_line(found.misses),
        "cells": [cell_table(kit, found.decode, fmt) for fmt in FORMATS],
        "by_m": speed_table(kit, found.speeds, (REGIMES[0],), "Means over the shapes, cold"),
        "regimes": speed_table(kit, found.speeds, REGIMES[1:], "Means in other regimes"),
        "steps": step_table(kit, found.steps, plan),
        "elements": element_table(kit, found.elements),
        "regret_line": regret_line(found.constants.found.get(REGRET), found.regrets),
        "regret": regret_table(kit, found.regrets),
        "invariant": invariant_table(kit, found.decode),
        "growth": growth_table(kit, found.decode),
        "formats": format_table(kit, found.decode),
        "chain": chain_table(kit, found),
        "bandwidth": _bandwidth(found),
        "host": host_table(kit, found),
        "profile": profile_table(kit, found.profiles),
        "sass": sass_table(kit, said, found.profiles),
        "families": _families(kit, verdicts, by_id),
        "missing": missing_table(kit, found.constants),
    }


def format_name(fmt: str | None) -> str:
    return BLANK if fmt is None else drawings.FORMAT_NAME.get(fmt, fmt)


def _place(fmt: str) -> int:
    return FORMATS.index(fmt) if fmt in FORMATS else len(FORMATS)


def interval_of(quantity: Quantity | None, digits: int = 3) -> str:
    """A value with its 95% interval, whatever kind of quantity it is."""
    if quantity is None:
        return BLANK
    low, high = quantity.interval()
    row = {"value": quantity.value, "low": low, "high": high}
    return three(row, "value", "low", "high", digits)


# ---- headline ----------------------------------------------------------------------------------------------------


def facts(found: Analysis) -> list[dict[str, str]]:
    """The numbers of the first screen of the section."""
    out = []
    decided = Counter(bar.status for bar in found.bars)
    measured = sum(decided[s] for s in (bars_r2.MET, bars_r2.MISSED, bars_r2.UNDECIDED))
    missed = [bar for bar in found.bars if bar.status == bars_r2.MISSED]
    names = words()["bars"]
    list_of = "; ".join(
        f"{names[b.id]}, {format_name(b.format)}".removesuffix(f", {BLANK}") for b in missed
    )
    out.append(
        {
            "value": f"{decided[bars_r2.MET]} of {len(found.bars)} bars met",
            "text": f"{decided[bars_r2.MISSED]} missed, {decided[bars_r2.UNDECIDED]} undecided, "
            f"{len(found.bars) - measured} not run." + (f" Missed: {list_of}." if missed else ""),
        }
    )
    for bar in found.bars:
        if bar.id == "fp8_geomean" and bar.observed is not None:
            out.append(
                {
                    "value": f"{number(bar.observed.value)} × FP8 in {format_name(bar.format)}",
                    "text": f"is the speed over cuBLASLt FP8, geometric mean of {bar.cells} cells with M = 1 to 16 "
                    f"({interval_of(bar.observed)}; the bar is {bar.limit:g}, the whole of the byte ratio).",
                }
            )
    own = [c for c in found.decode if c.format == HEADLINE and c.point.M == 1]
    over = [c.over_floor for c in own if c.over_floor is not None]
    if over:
        mean = statistics.geomean(over)
        out.append(
            {
                "value": f"{number(mean.value)} × the floor",
                "text": f"is what a call takes in MXFP4 at M = 1 ({observed(mean)}; geometric mean of "
                f"{count(len(over), 'shape')}): 1 would be as fast as reading the weights and nothing else.",
            }
        )
    for name, what in (
        (CHAIN, "× bytes / asymptote", ),
        (HOST, "µs on the host", ),
    ):  # fmt: skip
        row = found.constants.found.get(name)
        if row is not None:
            text_of = {
                CHAIN: "is what a chain of decode layers takes with programmatic dependent launch, over reading its "
                "bytes at the asymptotic bandwidth, at the slowest M",
                HOST: "is what a plain Python call of linear costs the host after the first",
            }
            out.append(
                {
                    "value": f"{number(row['value'])} {what}",
                    "text": f"{text_of[name]} ({constant(row)}).",
                }
            )
    return out


# ---- bars --------------------------------------------------------------------------------------------------------


def limit_of(bar: Bar) -> str:
    """The limit with its side and unit."""
    side = "≥" if bar.direction == "above" else "≤"
    unit = {"ratio": "", "us": " µs"}.get(bar.unit, f" {bar.unit}")
    return f"{side} {bar.limit:.4g}{unit}"


def off_by(off: float | None) -> str:
    """Observed over the limit, in percent with a sign."""
    if absent(off):
        return BLANK
    places = 1 if abs(off) < 0.1 else 0
    said = plain(100 * off, places)
    return f"{'' if said.startswith('-') else '+'}{said} %".replace("-", "−")


def cells_missed(cells: int, missed: int, undecided: int, planned: int = 0) -> str:
    """`6 of 135, 1 undecided, 3 not measured`. planned: cells that there were to be."""
    if not cells:
        return f"none of {planned} measured"
    parts = [f"{missed} of {cells}", f"{undecided} undecided" if undecided else ""]
    parts.append(f"{planned - cells} not measured" if planned > cells else "")
    return ", ".join(filter(None, parts))


def name_of(names: Mapping[str, str], bar: str) -> str:
    """What a bar is called, from its id: one about a single M names it."""
    kind, m = bars.split(bar)
    return names[kind] + ("" if m is None else f", M = {m}")


def bar_table(
    kit: Tables,
    said: Mapping[str, Any],
    judged_bars: Sequence[Bar],
    judged: Mapping[str, str],
    caption: str = "The bars of the decode kernel",
) -> dict:
    """Every bar: limit, observed with its interval, met or not, and the worst cell."""
    rows = []
    for bar in judged_bars:
        worst = bar.worst
        rows.append(
            {
                "r2_bar": name_of(said["bars"], bar.id),
                "r2_text": bar.text,
                "r2_format": format_name(bar.format),
                "r2_limit": limit_of(bar),
                "r2_observed": interval_of(bar.observed),
                "r2_status": bar.status,
                "r2_verdict": judged.get(bar.claim, BLANK) if bar.claim else BLANK,
                "r2_cells": BLANK
                if bar.planned < 2
                else cells_missed(bar.cells, bar.missed, bar.undecided, bar.planned),
                "r2_worst": f"{worst.shape} M = {worst.M}" if worst else BLANK,
                "r2_off": off_by(bar.off),
            }
        )
    keys = ("r2_bar", "r2_format", "r2_status", "r2_limit", "r2_observed", "r2_off")
    keys += ("r2_cells", "r2_worst", "r2_verdict", "r2_text")
    return kit.table(keys, rows, caption, "No bar was measured.")


def reasons(said: Mapping[str, Any], judged: Sequence[Bar]) -> list[dict[str, str]]:
    """Of each bar that is not met why, by rule, for the worst cell; bars with one reason stand together."""
    by_reason: dict[tuple[str, str], list[Bar]] = {}
    for bar in judged:
        if bar.status != bars_r2.MET and bar.reason:
            by_reason.setdefault((bar.status, bar.reason), []).append(bar)
    out = []
    for (status, reason), some in by_reason.items():
        names = [
            name_of(said["bars"], b.id) + (f", {format_name(b.format)}" if b.format else "")
            for b in some
        ]
        worst = dict.fromkeys(f"{b.worst.shape} M = {b.worst.M}" for b in some if b.worst)
        where = f"Worst cell {', '.join(worst)}: " if worst else ""
        out.append({"badge": status, "title": "; ".join(names), "text": f"{where}{reason}."})
    return out


def miss_table(kit: Tables, said: Mapping[str, Any], misses: Sequence[Miss]) -> dict:
    """Every cell that misses a bar or is undecided, by how much, and the profiler's reason."""
    rows = [
        {
            "r2_bar": name_of(said["bars"], miss.bar.id),
            "r2_format": format_name(miss.format),
            "r2_shape": miss.point.shape,
            "r2_m": str(miss.point.M),
            "r2_against": miss.against or BLANK,
            "r2_limit": limit_of(miss.bar),
            "r2_observed": observed(miss.observed),
            "r2_off": off_by(miss.off),
            "r2_status": miss.status,
            "r2_reason": miss.reason,
        }
        for miss in misses
    ]
    keys = ("r2_bar", "r2_format", "r2_shape", "r2_m", "r2_limit", "r2_observed", "r2_off")
    keys += ("r2_status", "r2_against", "r2_reason")
    caption = "Cells that miss a bar or are undecided, the worst first"
    return kit.table(keys, rows, caption, "Every cell measured meets its bars.")


def missed_line(misses: Sequence[Miss]) -> str:
    """`110 cells missed and 6 undecided`; a cell counts once a bar, and once a peer in a bar about peers."""
    counts = Counter(miss.status for miss in misses)
    undecided = counts[bars_r2.UNDECIDED]
    said = f"{count(counts[bars_r2.MISSED], 'cell')} missed"
    return said + (f" and {undecided} undecided" if undecided else "")


# ---- cells -------------------------------------------------------------------------------------------------------


def _us(estimate: Estimate | None) -> str:
    return BLANK if estimate is None else number(estimate.value)


def cell_table(
    kit: Tables,
    cells: Sequence[ProductCell],
    fmt: str,
    kernel: str = KERNEL,
    more: Callable[[ProductCell], Row] = lambda cell: {},
) -> dict:
    """One row a cell of a format, all M. more: further columns of a cell."""
    rows = []
    for d in (d for d in cells if d.format == fmt):
        peer = d.best_peer
        rows.append(
            {
                "r2_shape": d.point.shape,
                "r2_m": str(d.point.M),
                "r2_floor_us": _us(d.floor),
                "r2_time": observed(d.time),
                "r2_fp8_us": _us(d.fp8),
                "r2_bf16_us": _us(d.bf16),
                "r2_peer": peer or BLANK,
                "r2_peer_us": _us(d.peer_times[peer]) if peer else BLANK,
                "r2_over_fp8": observed(d.over_fp8),
                "r2_over_bf16": _us(d.over_bf16),
                "r2_over_peer": _us(d.peers[peer]) if peer else BLANK,
                "r2_over_floor": observed(d.over_floor),
                **more(d),
            }
        )
    keys = (
        "r2_shape", "r2_m", "r2_over_fp8", "r2_over_floor", "r2b_over_bound", "r2_time", "r2_floor_us", "r2b_bound_us",
        "r2b_bound", "r2_fp8_us", "r2_bf16_us", "r2_over_bf16", "r2_peer", "r2_peer_us", "r2_over_peer",
    )  # fmt: skip
    caption = f"{kernel} in {format_name(fmt)}, cold weights, graph replay"
    return kit.table(keys, rows, caption, f"{kernel} was not timed in {format_name(fmt)}.")


def speed_table(
    kit: Tables,
    frame: pd.DataFrame,
    regimes: Sequence[str],
    caption: str,
    kernel: str = KERNEL,
    over: str = "all",
) -> dict:
    """Means over the shapes of a set, one row a format, regime and M."""
    own = frame[
        (frame["kernel"] == kernel) & (frame["over"] == over) & frame["regime"].isin(regimes)
    ]
    rows = []
    groups = list(own.groupby(["format", "regime", "M"], sort=True))
    for (fmt, regime, m), group in sorted(groups, key=lambda g: (_place(g[0][0]), g[0])):
        fp8, bf16, floor = (pick(group, against=a) for a in (FP8.kernel, BF16.kernel, FLOOR))
        row = {"r2_format": format_name(fmt), "r2_regime": regime, "r2_m": str(m)}
        row["r2_shapes"] = str(group["shapes"].max())
        if fp8 is not None:
            row["r2_over_fp8"] = three(fp8, "speed", "ci_low", "ci_high")
            row["r2_range"] = spread(fp8["lowest"], fp8["highest"])
            row["r2_realised"] = percent(fp8["realised"])
        if bf16 is not None:
            row["r2_over_bf16"] = number(bf16["speed"])
        if floor is not None:
            row["r2_of_floor"] = percent(floor["speed"])
        rows.append(row)
    keys = ("r2_format", "r2_regime", "r2_m", "r2_over_fp8", "r2_range", "r2_realised")
    keys += ("r2_over_bf16", "r2_of_floor", "r2_shapes")
    return kit.table(keys, rows, caption, f"{kernel} was not timed in {', '.join(regimes)}.")


# ---- ablation ----------------------------------------------------------------------------------------------------


def _change(ratio: Estimate | None) -> str:
    """A ratio as a change in percent with its interval."""
    if ratio is None:
        return BLANK
    parts = [plain(100 * (value - 1), 1) for value in (ratio.value, *ratio.interval())]
    point, low, high = (f"{'' if p.startswith('-') else '+'}{p}".replace("-", "−") for p in parts)
    return f"{point} % ({low} to {high})"


def step_table(kit: Tables, steps: Sequence[Step], plan: Plan) -> dict:
    """One row a point and step, with the predicted and the observed change."""
    rows = []
    for s in steps:
        what, ratio = plan.get(s.kernel, ("", None))
        rows.append(
            {
                "r2_problem": f"{s.point.shape} M={s.point.M}",
                "r2_step": s.kernel,
                "r2_what": what or BLANK,
                "r2_step_time": observed(s.time),
                "r2_predicted": off_by(None if ratio is None or s.place == 0 else ratio - 1),
                "r2_change": _change(s.over_previous),
                "r2_over_full": observed(s.over_full),
            }
        )
    keys = ("r2_problem", "r2_step", "r2_predicted", "r2_change", "r2_step_time", "r2_over_full")
    caption = "The ablation, step by step (MXFP4)"
    return kit.table((*keys, "r2_what"), rows, caption, "No step of the ablation was measured.")


def element_table(kit: Tables, steps: Sequence[Step]) -> dict:
    """One row a point and element that was taken out alone."""
    rows = [
        {
            "r2_problem": f"{s.point.shape} M={s.point.M}",
            "r2_step": s.kernel,
            "r2_step_time": observed(s.time),
            "r2_over_full": observed(s.over_full),
        }
        for s in steps
    ]
    keys = ("r2_problem", "r2_step", "r2_step_time", "r2_over_full")
    return kit.table(keys, rows, "One element taken out alone (MXFP4)", "")


# ---- dispatch, M, formats, batch-invariant mode ------------------------------------------------------------------


def regret_line(row: Mapping[str, Any] | None, own: Sequence[Regret]) -> str:
    """The regret over all cells, and how often the dispatch found the fastest plan. row: the constant."""
    if row is None:
        return ""
    same = sum(r.chosen == r.searched for r in own)
    worst = max(own, key=lambda r: r.ratio.value)
    mean = statistics.geomean([r.ratio for r in own])
    alone = f"geometric mean of {count(len(own), 'cell')}"
    if not math.isclose(mean.value, row["value"], rel_tol=1e-9):
        alone = f"{row['how'].partition(', ')[2]}; of the {len(own)} here {observed(mean)}"
    return (
        f"The dispatch choice takes {constant(row)} times the fastest plan of an exhaustive search, {alone}; in {same} "
        f"of them both are the same plan. The worst is {worst.point.shape} at M = {worst.point.M}: "
        f"{observed(worst.ratio)}."
    )


def regret_table(kit: Tables, own: Sequence[Regret]) -> dict:
    """One row a cell in which the fastest plan was measured beside the dispatch choice; the worst first."""
    rows = [
        {
            "r2_shape": r.point.shape,
            "r2_m": str(r.point.M),
            "r2_regret": observed(r.ratio),
            "r2_chosen": r.chosen or BLANK,
            "r2_searched": "the same" if r.searched == r.chosen else r.searched or BLANK,
        }
        for r in sorted(own, key=lambda r: -r.ratio.value)
    ]
    keys = ("r2_shape", "r2_m", "r2_regret", "r2_chosen", "r2_searched")
    nothing = "No exhaustive search was measured."
    return kit.table(keys, rows, "Regret of the dispatch choice, the worst first", nothing)


def invariant_table(kit: Tables, cells: Sequence[Decode]) -> dict:
    """What the batch-invariant mode costs."""
    rows = [
        {
            "r2_shape": c.point.shape,
            "r2_m": str(c.point.M),
            "r2_format": format_name(c.format),
            "r2_invariant": observed(c.invariant),
        }
        for c in cells
        if c.invariant is not None
    ]
    keys = ("r2_shape", "r2_m", "r2_format", "r2_invariant")
    nothing = "The batch-invariant mode was not measured."
    return kit.table(keys, rows, "Cost of the batch-invariant mode", nothing)


def growth_table(kit: Tables, cells: Sequence[Decode]) -> dict:
    """Time at M = 16 over time at M = 1, shape by shape."""
    both = {fmt: dict(growth(cells, fmt)) for fmt in ("mxfp4", "nvfp4")}
    rows = [
        {
            "r2_shape": shape,
            "r2_growth_mx": observed(both["mxfp4"].get(shape)),
            "r2_growth_nv": observed(both["nvfp4"].get(shape)),
        }
        for shape in dict.fromkeys(name for own in both.values() for name in own)
    ]
    keys = ("r2_shape", "r2_growth_mx", "r2_growth_nv")
    nothing = "No shape was timed at M = 1 and M = 16."
    return kit.table(keys, rows, "Time at M = 16 over time at M = 1", nothing)


def format_table(kit: Tables, cells: Sequence[Decode]) -> dict:
    """NVFP4 and INT4 over MXFP4 in the same cells, by M and over all M."""
    rows = []
    for fmt in FORMATS[1:]:
        own = [c for c in cells if c.format == fmt and c.over_mxfp4 is not None]
        groups = [(str(m), [c for c in own if c.point.M == m]) for m in sorted({c.point.M for c in own})]  # fmt: skip
        for m, some in [*groups, *([("all", own)] if len(groups) > 1 else [])]:
            rows.append(
                {
                    "r2_format": format_name(fmt),
                    "r2_m": m,
                    "r2_over_mxfp4": observed(statistics.geomean([c.over_mxfp4 for c in some])),
                    "r2_byte_ratio": f"{bytes_per_weight(fmt) / bytes_per_weight(HEADLINE):.3f}",
                    "r2_shapes": str(len({c.point.shape for c in some})),
                }
            )
    keys = ("r2_format", "r2_m", "r2_over_mxfp4", "r2_byte_ratio", "r2_shapes")
    nothing = "No other format was timed beside MXFP4."
    return kit.table(keys, rows, "Other formats against MXFP4, the same cells", nothing)


# ---- chain and host ----------------------------------------------------------------------------------------------


def chain_table(kit: Tables, found: Analysis) -> dict:
    """Makespan with and without programmatic launch against bytes / asymptote."""
    rows = []
    for x in found.chain:
        bound = None if found.bandwidth is None else x.weight_bytes / found.bandwidth.value / 1e6
        rows.append(
            {
                "r2_kernel": x.kernel,
                "r2_m": str(x.m),
                "r2_regime": x.regime,
                "r2_time": observed(x.time),
                "r2_bound": number(bound),
                "r2_over_bound": observed(x.over_asymptote),
                "r2_over_plain": observed(x.over_plain),
            }
        )
    keys = ("r2_m", "r2_kernel", "r2_regime", "r2_time", "r2_bound", "r2_over_bound")
    keys += ("r2_over_plain",)
    caption = f"The chain of decode layers; {CHAINED}: with programmatic dependent launch"
    table = kit.table(keys, rows, caption, "The chain was not measured.")
    for column in table["columns"]:  # here it is a whole chain, and of a stream too
        if column["key"] == "r2_time":
            column["label"] = "makespan (µs, 95 %)"
    return table


def _bandwidth(found: Analysis) -> str:
    if found.bandwidth is None:
        return (
            "No campaign of this device has an asymptotic read bandwidth to hold the time against."
        )
    where = (
        "this campaign"
        if found.bandwidth_from == found.campaign
        else f"campaign {found.bandwidth_from}"
    )
    return f"The asymptotic read bandwidth is {observed(found.bandwidth)} TB/s, of {where}."


_HOST = (
    (HOST, "a plain Python call, the slowest way of calling"),
    (f"{HOST}_cupy", "a plain call with CuPy arrays"),
    (f"{HOST}_torch", "a plain call with torch tensors"),
    (PACK, "packing 57344x8192 on the device"),
)


def host_table(kit: Tables, found: Analysis) -> dict:
    """Host time of a call, and of packing a weight."""
    known = found.host | found.constants.found
    rows = [
        {
            "r2_call": what,
            "r2_value": constant(known[name]),
            "r2_unit": {"us": "µs"}.get(known[name]["unit"], known[name]["unit"]),
            "r2_how": text(known[name]["how"]),
        }
        for name, what in _HOST
        if name in known
    ]
    keys = ("r2_call", "r2_value", "r2_unit", "r2_how")
    return kit.table(keys, rows, "Times on the host", "No time on the host was recorded.")


# ---- counters ----------------------------------------------------------------------------------------------------


def profile_table(
    kit: Tables,
    profiles: Sequence[Profile],
    caption: str = f"Profiler counters of {KERNEL} and its floor",
) -> dict:
    """One row a profiled call: throughput, issue slots, residency, stalls, registers, spills, occupancy."""
    rows = []
    for p in profiles:
        if p.read_tbps is None and ISSUE not in p.values:
            continue  # counted in the compiled code only
        row = {"r2_problem": f"{p.shape} M={p.M}", "r2_format": format_name(p.format)}
        row["r2_kernel"] = p.kernel
        row |= {"r2_tbps": number(p.read_tbps), "r2_asymptote": percent(p.of_asymptote)}
        for key, metric in (
            ("r2_dram", DRAM_PEAK),
            ("r2_issue", ISSUE),
            ("r2_warps", WARPS),
            ("r2_eligible", ELIGIBLE),
            ("r2_waves", WAVES),
        ):
            row[key] = number(p.values.get(metric))
        if p.M > FEW_TOKENS:
            row |= {"r2_tensor": number(p.tensor), "r2_l2": number(p.values.get(L2_HITS))}
        row["r2_registers"] = _whole(p.values.get(REGISTERS))
        row["r2_spills"] = _whole(p.spills)
        row["r2_instructions"] = number(p.instructions)
        if p.stall is not None:
            row["r2_stall"] = f"{p.stall[0].replace('_', ' ')} {number(p.stall[1])}"
        if p.occupancy is not None:
            row["r2_occupancy"], row["r2_limiter"] = percent(p.occupancy[0]), p.occupancy[1]
        rows.append(row)
    keys = (
        "r2_problem", "r2_format", "r2_kernel",
        "r2_tbps", "r2_asymptote", "r2_dram", "r2_tensor", "r2_issue", "r2_warps", "r2_eligible", "r2_stall", "r2_l2",
        "r2_registers", "r2_spills", "r2_occupancy", "r2_limiter", "r2_waves", "r2_instructions",
    )  # fmt: skip
    nothing = "No profiler counters were recorded (see Attempts for the reason)."
    return kit.table(keys, rows, caption, nothing)


def sass_table(
    kit: Tables, said: Mapping[str, Any], profiles: Sequence[Profile], kernel: str = KERNEL
) -> dict:
    """Instructions for 64 weights and by opcode, once a format and M: code does not depend on N and K."""
    rows, seen = [], set()
    for p in profiles:
        if p.kernel != kernel or not p.opcodes() or (p.format, p.M) in seen:
            continue
        seen.add((p.format, p.M))
        codes = p.opcodes()
        some = [f"{codes[name]:.0f} {name}" for name in said["opcodes"] if codes.get(name)]
        rows.append(
            {
                "r2_format": format_name(p.format),
                "r2_m": str(p.M),
                "r2_loop": number(p.values.get(LOOP)),
                "r2_registers": _whole(p.values.get(REGISTERS)),
                "r2_sass": ", ".join(some) or BLANK,
            }
        )
    keys = ("r2_format", "r2_m", "r2_loop", "r2_registers", "r2_sass")
    nothing = "No instruction counts were recorded."
    return kit.table(keys, rows, f"Instructions of {kernel} (compiled code)", nothing)


def _whole(value: float | None) -> str:
    return BLANK if absent(value) else f"{value:.0f}"


# ---- verdicts ----------------------------------------------------------------------------------------------------


def _families(kit: Tables, verdicts: pd.DataFrame, by_id: Mapping[str, Mapping[str, Any]]) -> dict:
    here = verdicts[verdicts["rung"] == "R2"]
    counts: dict[str, Counter] = {}
    for row in here.to_dict("records"):
        family = by_id.get(row["claim"], {}).get("family", "unregistered")
        counts.setdefault(family, Counter())[row["verdict"]] += 1
    rows: list[Row] = [
        {
            "r2_family": family,
            "r2_claims": str(sum(own.values())),
            "r2_counts": ", ".join(f"{n} {verdict}" for verdict, n in sorted(own.items())),
        }
        for family, own in sorted(counts.items())
    ]
    keys = ("r2_family", "r2_claims", "r2_counts")
    return kit.table(keys, rows, "All claims of R2 by family", "None.")


def missing_table(kit: Tables, constants: Constants) -> dict:
    """Numbers that claims ask for and the campaign does not give, with the reason."""
    rows = [{"r2_missing": name, "r2_why_missing": why} for name, why in constants.missing.items()]
    keys = ("r2_missing", "r2_why_missing")
    return kit.table(keys, rows, "Numbers that the campaign does not give", "")


__all__ = [
    "ablation_plan", "cells_missed", "facts", "figures", "limit_of", "missed_line", "off_by", "section", "style",
    "words",
]  # fmt: skip
