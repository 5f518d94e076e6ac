"""R1 in the report: shares of the causes with evidence and verdict, what closes, and one paragraph a cause."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

from lab import analysis_r1
from lab.analysis_r1 import LAUNCH_FLOOR, LAUNCH_TESTBED, Analysis
from lab.decomposition import FACTORS, FULL, NONE, Bar, Summary
from lab.experiments_r1 import NO_DEQUANT
from lab.page import BLANK, Row, Tables, absent, number
from lab.production import PROBE_BALANCED, PRODUCTION
from lab.r1_words import (
    SUMMARY_M,
    constant,
    count,
    percent,
    pick,
    share,
    sign,
    spread,
    three,
    us,
)
from lab.statistics import Estimate


def ranking(text: Mapping[str, Any], found: Analysis, subset: str, m: int) -> dict[str, str] | None:
    """The order of the causes as one line, with ≈ where two neighbours overlap."""
    summary = found.summaries.get((subset, m))
    ranked = analysis_r1.ranking(summary) if summary else []
    if not ranked:
        return None
    parts = []
    for one in ranked:
        parts.append(f"{text['causes'][one.name]} {percent(one.share.value)}")
        if one.then:
            parts.append("≈" if one.then == "inconclusive" else ">")
    decided = sum(one.then == "above" for one in ranked)
    word = "decided" if analysis_r1.is_conclusive(ranked) else "inconclusive"
    return {
        "title": f"{len(summary.shapes)} {subset} shapes, M = {m}",
        "line": " ".join(parts),
        "word": word,
        "note": f"{decided} of {len(ranked) - 1} neighbours are told apart (> against ≈).",
    }


def ranking_table(kit: Tables, text: Mapping[str, Any], found: Analysis) -> dict:
    """The place of every cause, for each set of shapes and M."""
    rows = []
    for (subset, m), summary in found.summaries.items():
        for one in analysis_r1.ranking(summary):
            rows.append(
                {
                    "shapes_m": f"{subset} shapes, M = {m}",
                    "place": str(one.place),
                    "cause": text["causes"][one.name],
                    "share": share(one.share),
                    "then": one.then or BLANK,
                }
            )
    keys = ("shapes_m", "place", "cause", "share", "then")
    return kit.table(
        keys, rows, "Causes by share, every set of shapes and M", "No cell was decomposed."
    )


def _claim_of(name: str, subset: str, m: int) -> str:
    """Id of the claim about a share; the residual's is about the largest of all nine shapes."""
    return f"r1.closure.residual.m{m}" if name == "residual" else f"r1.cause.{name}.{subset}.m{m}"


def cause_matrix(
    kit: Tables,
    text: Mapping[str, Any],
    found: Analysis,
    subset: str,
    judged: Mapping[str, Mapping[str, Any]],
) -> dict:
    """One row a cause: its share and the verdict about it at each M, and the evidence at the first."""
    rows: dict[str, Row] = {}
    shapes = 0
    for m in SUMMARY_M:
        summary = found.summaries.get((subset, m))
        if summary is None:
            continue
        shapes = max(shapes, len(summary.shapes))
        for bar in _all_bars(summary):
            row = rows.setdefault(
                bar.name,
                {"cause": text["causes"][bar.name], "evidence": evidence(found, summary, bar)},
            )
            verdict = judged.get(_claim_of(bar.name, subset, m))
            row |= {f"share_{m}": share(bar.share)}
            row |= {f"verdict_{m}": verdict["verdict"] if verdict else BLANK}
    keys = ["cause", *(f"{k}_{m}" for m in SUMMARY_M for k in ("share", "verdict")), "evidence"]
    caption = f"Causes of the MXFP4 gap, mean over {shapes} {subset} shapes; evidence at M = 1"
    nothing = f"No cell of the {subset} shapes was decomposed."
    return kit.table(keys, list(rows.values()), caption, nothing)


def _all_bars(summary: Summary) -> list[Bar]:
    return [*summary.causes, summary.residual, *([summary.beyond] if summary.beyond else [])]


def interactions(kit: Tables, text: Mapping[str, Any], found: Analysis) -> dict:
    """What two factors do together on the frozen shapes: labels by number of shapes, and the mean overlap."""
    rows: dict[tuple[str, str, str], Row] = {}
    for m in SUMMARY_M:
        summary = found.summaries.get(("frozen", m))
        cells = [d for d in _cells(found, summary) if d.residual.share] if summary else []
        seen: dict[tuple[str, str, str], list[tuple[str, float]]] = {}
        for d in cells:
            for pair in d.pairs:
                part = pair.overlap.value / d.gap.value
                seen.setdefault((*pair.names, pair.others), []).append((pair.label, part))
        for (first, second, others), parts in seen.items():
            labels = Counter(label for label, _ in parts)
            said = ", ".join(f"{n} {label}" for label, n in labels.most_common())
            mean = 100 * sum(part for _, part in parts) / len(parts)
            row = rows.setdefault((first, second, others), {"others": others})
            row["pair"] = f"{text['causes'][first]} × {text['causes'][second]}"
            row[f"overlap_{m}"] = f"{said}; {mean:.1f} %"
    keys = ("pair", "others", *(f"overlap_{m}" for m in SUMMARY_M))
    return kit.table(keys, list(rows.values()), "Factors two by two, frozen shapes", "No pair.")


def cause_table(
    kit: Tables,
    text: Mapping[str, Any],
    found: Analysis,
    subset: str,
    judged: Mapping[str, Mapping[str, Any]],
    by_id: Mapping[str, Mapping[str, Any]],
) -> dict:
    """Every cause at every M of a set: share, evidence, the claim about it and the verdict."""
    rows, order = [], None
    for m in SUMMARY_M:
        summary = found.summaries.get((subset, m))
        if summary is None:
            continue
        order = order or [bar.name for bar in summary.causes]
        for bar in _all_bars(summary):
            claim = _claim_of(bar.name, subset, m)
            verdict = judged.get(claim)
            row = {
                "cause": text["causes"][bar.name],
                "m": str(m),
                "share": share(bar.share),
                "over_floor": number(bar.over_floor.value),
                "evidence": evidence(found, summary, bar),
                "verdict": verdict["verdict"] if verdict else BLANK,
                "claim_id": claim if verdict else BLANK,
            }
            if verdict and not absent(verdict["q05"]):
                row["band90"] = f"{100 * verdict['q05']:.0f} to {100 * verdict['q95']:.0f} %"
            elif verdict and claim in by_id and not absent(by_id[claim].get("threshold")):
                row["band90"] = f"≤ {100 * by_id[claim]['threshold']:.0f} %"
            rows.append(row)
    names = [*(order or []), "residual", "beyond_testbed"]
    place = {text["causes"][name]: i for i, name in enumerate(names)}
    rows.sort(key=lambda row: (place[row["cause"]], int(row["m"])))
    shapes = len(next((s.shapes for (one, _), s in found.summaries.items() if one == subset), ()))
    keys = ("cause", "m", "share", "band90", "verdict", "over_floor", "evidence", "claim_id")
    caption = f"Causes of the MXFP4 gap, mean over {shapes} {subset} shapes"
    return kit.table(keys, rows, caption, f"No cell of the {subset} shapes was decomposed.")


def evidence(found: Analysis, summary: Summary, bar: Bar) -> str:
    """What was done to get a share, with its own numbers."""
    probes = found.probes.get((summary.label, summary.M), {})
    if bar.name == "launch" and {LAUNCH_TESTBED, LAUNCH_FLOOR} <= set(probes):
        top, bottom = number(probes[LAUNCH_TESTBED].value), number(probes[LAUNCH_FLOOR].value)
        return f"empty kernel: {top} µs launched as the testbed, {bottom} µs as the floor"
    if bar.name == "grid_fill" and {NONE, PROBE_BALANCED} <= set(probes):
        top, bottom = number(probes[NONE].value), number(probes[PROBE_BALANCED].value)
        return f"same bytes, no factor: {top} µs on its own grid, {bottom} µs on a balanced one"
    if bar.name == "clock":
        return "arms share the clock of their block; interval from the clock readings"
    if bar.name in FACTORS:
        alone, without = (
            _mean_share(found, summary, bar.name, name) for name in ("alone", "leave_one_out")
        )
        said = f"taking it away alone saves {without}; adding it alone to nothing costs {alone}"
        if sign(bar.share) == "negative":
            return f"{said}; negative: the kernel is faster with it"
        if bar.stacked:
            said += f"; stacked (hidden behind another factor) on {bar.stacked} of {len(summary.shapes)} shapes"
        return said
    if bar.name == "residual":
        said = "; ".join(
            f"{words}: {_verdicts(found, summary, name)}"
            for name, words in (("all_removed", "by removal"), ("counters", "by counters"))
        )
        largest = found.constants.found.get(f"largest_residual_fraction_m{summary.M}")
        if largest:
            said += (
                "; the verdict is about the largest rest of nine shapes by either closure, before measured terms: "
                f"{percent(largest['value'])}"
            )
        return said
    return f"{PRODUCTION} less the testbed, in the same blocks"


def _verdicts(found: Analysis, summary: Summary, name: str) -> str:
    verdicts = Counter(d.closure(name).verdict for d in _cells(found, summary))
    return ", ".join(f"{n} {word}" for word, n in sorted(verdicts.items()))


def _cells(found: Analysis, summary: Summary) -> list[Any]:
    place = (summary.format, summary.M, summary.regime)
    return [
        d
        for d in found.found
        if (d.cell.format, d.cell.M, d.cell.regime) == place and d.cell.shape in summary.shapes
    ]


def _mean_share(found: Analysis, summary: Summary, cause: str, amount: str) -> str:
    """Mean over the shapes of an amount as a part of the gap, in percent."""
    parts = []
    for d in _cells(found, summary):
        estimate = getattr(next(c for c in d.causes if c.name == cause), amount)
        if estimate is None or d.residual.share is None:
            return BLANK
        parts.append(estimate.value / d.gap.value)
    return percent(sum(parts) / len(parts)) if parts else BLANK


def residual_table(kit: Tables, found: Analysis) -> dict:
    """One row a decomposed cell: what is left over by each closure, and its verdict."""
    rows = []
    for d in found.found:
        removed, counters = d.closure("all_removed"), d.closure("counters")
        rows.append(
            {
                "shape": d.cell.shape,
                "m": str(d.cell.M),
                "cell_floor_us": number(d.floor.value),
                "gap_us": number(d.gap.value),
                "bare": share(d.bare),
                "residual_share": share(d.residual.share),
                "closes_removed": removed.verdict,
                "counters_share": _plain_share(counters.share),
                "closes_counters": counters.verdict,
                "closes": d.verdict,
                "beyond": _plain_share(d.beyond.share) if d.beyond else BLANK,
                "production_closes": d.closure("production").verdict if d.beyond else BLANK,
            }
        )
    rows.sort(key=lambda row: (int(row["m"]), row["shape"]))
    keys = ("shape", "m", "cell_floor_us", "gap_us", "bare", "residual_share", "closes_removed")
    keys += ("counters_share", "closes_counters", "beyond", "production_closes")
    caption = "Does the sum close? Every decomposed cell (MXFP4, cold, graph replay)"
    return kit.table(keys, rows, caption, "No cell was decomposed.")


def _plain_share(estimate: Estimate | None) -> str:
    """A share without its interval, which reports/r1_causes.csv has."""
    return BLANK if estimate is None else percent(estimate.value)


# ---- one paragraph a cause ---------------------------------------------------------------------------------------


def paragraphs(
    text: Mapping[str, Any], found: Analysis, campaign: Mapping[str, Any]
) -> list[dict[str, str]]:
    """Title and sentence of each cause; a cause without any number is left out.

    Where the sign of a share changes what it means, the sentence is chosen by the interval of the share at M = 1.
    """
    if not found.summaries:
        return []
    common = _common(found, campaign)
    out = []
    for name, sentence in text["paragraphs"].items():
        given = common | _of_cause(found, name)
        if given["share_m1"] == BLANK and name != "residual":
            continue
        signs = text["signs"].get(name)
        summary = found.summaries.get(("frozen", 1))
        bar = next((b for b in _all_bars(summary) if b.name == name), None) if summary else None
        given["sign"] = signs[sign(bar.share if bar else None)].format(**given) if signs else ""
        out.append({"title": text["causes"][name], "text": sentence.format(**given)})
    return out


def _of_cause(found: Analysis, name: str) -> dict[str, str]:
    given = {"stacked": _stacked(found, name) if name in FACTORS else ""}
    for m in SUMMARY_M:
        for subset, end in (("frozen", ""), ("large", "_large")):
            summary = found.summaries.get((subset, m))
            bars = [] if summary is None else _all_bars(summary)
            bar = next((b for b in bars if b.name == name), None)
            given[f"share_m{m}{end}"] = share(bar.share) if bar else BLANK
            given[f"size_m{m}{end}"] = _size(bar)
            factor = bar is not None and name in FACTORS
            given[f"leave_one_out_m{m}{end}"] = (
                _mean_share(found, summary, name, "leave_one_out") if factor else BLANK
            )
    given["without_m1"] = given["leave_one_out_m1"].removeprefix("-")
    return given


def _size(bar: Bar | None) -> str:
    """Size and direction of a difference, for the production path against the testbed."""
    if bar is None or bar.share is None:
        return BLANK
    return f"{'slower' if bar.share.value > 0 else 'faster'} by {percent(abs(bar.share.value))} of the gap"


_EMPTY = re.compile(r"grid (\d+)(?:x(\d+))? x (\d+)")


def _grids(found: Analysis, campaign: Mapping[str, Any]) -> str:
    """How the floor's launch differs from the testbed's, from the launches that were recorded for the two probes."""
    summary = found.summaries.get(("frozen", 1))
    blocks: dict[str, dict[str, int]] = {}
    for cell in campaign.get("cells", ()):
        said = _EMPTY.search((cell["tuning"] or {}).get("chosen") or "")
        if summary and said and cell["M"] == 1 and cell["shape"] in summary.shapes:
            grid = int(said[1]) * int(said[2] or 1)
            blocks.setdefault(cell["kernel"], {})[cell["shape"]] = grid
    ours, floor = blocks.get(LAUNCH_TESTBED, {}), blocks.get(LAUNCH_FLOOR, {})
    both = [shape for shape in ours if shape in floor]
    if not both:
        return ""
    more = sum(floor[shape] > ours[shape] for shape in both)
    spans = [f"{min(own[s] for s in both)} to {max(own[s] for s in both)}" for own in (floor, ours)]
    return (
        f" The floor's stream launches {spans[0]} blocks and the testbed {spans[1]}; it has more of them on {more} of "
        f"{count(len(both), 'shape')}."
    )


def _common(found: Analysis, campaign: Mapping[str, Any]) -> dict[str, str]:
    probes = found.probes.get(("frozen", 1), {})
    constants = found.constants.found
    given = {
        "set": "frozen",
        "production": PRODUCTION,
        "launch_testbed_m1": us(probes.get(LAUNCH_TESTBED)),
        "launch_floor_m1": us(probes.get(LAUNCH_FLOOR)),
        "none_m1": us(probes.get(NONE)),
        "balanced_m1": us(probes.get(PROBE_BALANCED)),
        "grids": _grids(found, campaign),
        "executed": _executed(campaign),
        "closed_removed": _closed(found, "all_removed"),
        "closed_counters": _closed(found, "counters"),
        "cells": str(len(found.found)),
        "looped": constant(constants.get(analysis_r1.LOOPED_RATIO)),
        "dequant_ratio": constant(constants.get(analysis_r1.DEQUANT_RATIO)),
        "dequant_slots": constant(constants.get(analysis_r1.DEQUANT_SLOTS)),
        "issue_slots": constant(constants.get(analysis_r1.ISSUE_SLOTS)),
    }
    frame = found.experiments
    for name in ("waves", "split_k", "tensor_parallel", "stages", "warps", "sequence"):
        given[name] = _range(frame, name)
        given[f"{name}_best"] = _best(frame, name)
    looped = pick(frame, experiment="launch", kernel=PRODUCTION, format="mxfp4", M=1)
    given["peer_looped"] = three(looped, "ratio", "ratio_low", "ratio_high") if looped else BLANK
    chain = pick(frame, experiment="chain", kernel=FULL)
    given["chain"] = three(chain, "ratio", "ratio_low", "ratio_high") if chain else BLANK
    settings = (
        ("direct", "From memory to registers"),
        ("plain", "Without the swizzle that avoids bank conflicts"),
    )
    said = ""
    for setting, how in settings:
        row = pick(frame, experiment="staging", setting=setting)
        if row:
            said += f" {how} it takes {three(row, 'ratio', 'ratio_low', 'ratio_high')} times the unchanged time."
    given["staging"] = said
    return given


def _executed(campaign: Mapping[str, Any]) -> str:
    """Instructions that the profiler saw executed for 64 weights, with and without dequantisation, at M = 1."""
    seen: dict[str, dict[str, float]] = {}
    for row in campaign.get("counters", ()):
        if (row["metric"], row["format"], row["M"]) == ("smsp__inst_executed.sum", "mxfp4", 1):
            seen.setdefault(row["kernel"], {})[row["shape"]] = row["value"] / (
                row["N"] * row["K"] / 64
            )
    full, rest = seen.get(FULL, {}), seen.get(NO_DEQUANT, {})
    both = sorted(set(full) & set(rest), key=lambda shape: full[shape])
    if not both:
        return ""
    shape = both[0]  # the fewest instructions around the main loop
    return (
        f" That is the longest way round the loop; the profiler saw {number(full[shape])} executed in a whole call on "
        f"{shape} at M = 1, and {number(rest[shape])} without dequantisation."
    )


def _closed(found: Analysis, name: str) -> str:
    return str(sum(d.closure(name).verdict == "CLOSED" for d in found.found))


def _range(frame: pd.DataFrame, experiment: str) -> str:
    """Lowest to highest ratio of an experiment at the testbed; a dash where it was not run."""
    own = frame[(frame["experiment"] == experiment) & frame["ratio"].notna()]
    own = own[~own["kernel"].str.startswith(("cublaslt_", "peer/"))] if len(own) else own
    return BLANK if own.empty else spread(own["ratio"].min(), own["ratio"].max())


def _best(frame: pd.DataFrame, experiment: str) -> str:
    """The setting with the lowest ratio, and where, if it is faster than what it is held against; else empty."""
    own = frame[(frame["experiment"] == experiment) & (frame["ratio_high"] < 1)]
    own = own[~own["kernel"].str.startswith(("cublaslt_", "peer/"))] if len(own) else own
    if own.empty:
        return ""
    row = own.loc[own["ratio"].idxmin()]
    return f" (fastest: {row['kernel']} on {row['shape']} at M = {row['M']})"


def _stacked(found: Analysis, cause: str) -> str:
    """A sentence where single ablations hide a factor; empty otherwise."""
    said = []
    for m in SUMMARY_M:
        summary = found.summaries.get(("frozen", m))
        bar = next((b for b in summary.causes if b.name == cause), None) if summary else None
        if bar and bar.stacked and sign(bar.share) != "negative":
            said.append(f"{bar.stacked} of {len(summary.shapes)} shapes at M = {m}")
    if not said:
        return ""
    where = " and ".join(said)
    return f" It is stacked on {where}: another factor hides it while both are there, which is not “no effect”."
