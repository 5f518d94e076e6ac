"""R1 in the report: shares of the causes with evidence and verdict, what closes, and one paragraph a cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

from lab import analysis_r1
from lab.analysis_r1 import LAUNCH_FLOOR, LAUNCH_TESTBED, Analysis
from lab.decomposition import FACTORS, FULL, NONE, Bar, Summary
from lab.page import BLANK, Row, Tables, absent, number
from lab.production import PROBE_BALANCED, PRODUCTION
from lab.r1_words import SUMMARY_M, constant, pick, share, spread, three, us


def ranking(text: Mapping[str, Any], found: Analysis, subset: str, m: int) -> dict[str, str] | None:
    """The order of the causes as one line, with ≈ where two neighbours overlap."""
    summary = found.summaries.get((subset, m))
    ranked = analysis_r1.ranking(summary) if summary else []
    if not ranked:
        return None
    parts = []
    for one in ranked:
        parts.append(f"{text['causes'][one.name]} {100 * one.share.value:.0f} %")
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
        if bar.stacked:
            said += f"; stacked (hidden behind another factor) on {bar.stacked} of {len(summary.shapes)} shapes"
        return said
    if bar.name == "residual":
        verdicts = Counter(d.verdict for d in _cells(found, summary))
        said = "by cell: " + ", ".join(f"{n} {word}" for word, n in sorted(verdicts.items()))
        largest = found.constants.found.get(f"largest_residual_fraction_m{summary.M}")
        if largest:
            percent = f"{100 * largest['value']:.0f} %"
            said += f"; the frozen claim reads the largest rest of nine shapes before measured terms: {percent}"
        return said
    return f"{PRODUCTION} less the testbed, in the same blocks"


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
    return f"{100 * sum(parts) / len(parts):.0f} %" if parts else BLANK


def residual_table(kit: Tables, found: Analysis) -> dict:
    """One row a decomposed cell: what is left over by each closure."""
    rows = []
    for d in found.found:
        counters = d.closure("counters")
        rows.append(
            {
                "shape": d.cell.shape,
                "m": str(d.cell.M),
                "cell_floor_us": number(d.floor.value),
                "gap_us": number(d.gap.value),
                "bare": share(d.bare),
                "residual_share": share(d.residual.share),
                "counters_share": share(counters.share),
                "closes": d.verdict,
                "beyond": share(d.beyond.share) if d.beyond else BLANK,
                "production_closes": d.production_verdict if d.beyond else BLANK,
            }
        )
    rows.sort(key=lambda row: (int(row["m"]), row["shape"]))
    keys = ("shape", "m", "closes", "cell_floor_us", "gap_us", "bare", "residual_share")
    keys += ("counters_share", "beyond", "production_closes")
    caption = "Does the sum close? Every decomposed cell (MXFP4, cold, graph replay)"
    return kit.table(keys, rows, caption, "No cell was decomposed.")


# ---- one paragraph a cause ---------------------------------------------------------------------------------------


def paragraphs(text: Mapping[str, Any], found: Analysis) -> list[dict[str, str]]:
    """Title and sentence of each cause; a cause without any number is left out."""
    if not found.summaries:
        return []
    common = _common(found)
    out = []
    for name, sentence in text["paragraphs"].items():
        given = common | _of_cause(found, name)
        if given["share_m1"] == BLANK and name != "residual":
            continue
        out.append({"title": text["causes"][name], "text": sentence.format(**given)})
    return out


def _of_cause(found: Analysis, name: str) -> dict[str, str]:
    given = {}
    for m in SUMMARY_M:
        summary = found.summaries.get(("frozen", m))
        bars = [] if summary is None else [*summary.causes, summary.residual]
        bar = next((b for b in bars if b.name == name), None)
        given[f"share_m{m}"] = share(bar.share) if bar else BLANK
        factor = bar is not None and name in FACTORS
        given[f"leave_one_out_m{m}"] = (
            _mean_share(found, summary, name, "leave_one_out") if factor else BLANK
        )
    return given


def _common(found: Analysis) -> dict[str, str]:
    probes = found.probes.get(("frozen", 1), {})
    constants = found.constants.found
    given = {
        "set": "frozen",
        "production": PRODUCTION,
        "launch_testbed_m1": us(probes.get(LAUNCH_TESTBED)),
        "launch_floor_m1": us(probes.get(LAUNCH_FLOOR)),
        "none_m1": us(probes.get(NONE)),
        "balanced_m1": us(probes.get(PROBE_BALANCED)),
        "closed": str(sum(d.verdict == "CLOSED" for d in found.found)),
        "cells": str(len(found.found)),
        "looped": constant(constants.get(analysis_r1.LOOPED_RATIO)),
        "dequant_ratio": constant(constants.get(analysis_r1.DEQUANT_RATIO)),
        "dequant_slots": constant(constants.get(analysis_r1.DEQUANT_SLOTS)),
        "issue_slots": constant(constants.get(analysis_r1.ISSUE_SLOTS)),
        "stacked_dequant": _stacked(found, "dequant_issue"),
    }
    frame = found.experiments
    for name in ("waves", "split_k", "tensor_parallel", "stages", "warps", "sequence"):
        given[name] = _range(frame, name)
    looped = pick(frame, experiment="launch", kernel=PRODUCTION, format="mxfp4", M=1)
    given["peer_looped"] = three(looped, "ratio", "ratio_low", "ratio_high") if looped else BLANK
    chain = pick(frame, experiment="chain", kernel=FULL)
    given["chain"] = three(chain, "ratio", "ratio_low", "ratio_high") if chain else BLANK
    direct = pick(frame, experiment="staging", setting="direct")
    plain = pick(frame, experiment="staging", setting="plain")
    said = []
    if direct:
        said.append(
            f"from memory to registers {three(direct, 'ratio', 'ratio_low', 'ratio_high')} times"
        )
    if plain:
        said.append(
            f"without the swizzle that avoids bank conflicts {three(plain, 'ratio', 'ratio_low', 'ratio_high')} times"
        )
    given["staging"] = (
        f"Beside the unchanged testbed, {' and '.join(said)} its time." if said else ""
    )
    return given


def _range(frame: pd.DataFrame, experiment: str) -> str:
    """Lowest to highest ratio of an experiment at the testbed; a dash where it was not run."""
    own = frame[(frame["experiment"] == experiment) & frame["ratio"].notna()]
    own = own[~own["kernel"].str.startswith(("cublaslt_", "peer/"))] if len(own) else own
    return BLANK if own.empty else spread(own["ratio"].min(), own["ratio"].max())


def _stacked(found: Analysis, cause: str) -> str:
    """A sentence where single ablations hide a factor; empty otherwise."""
    said = []
    for m in SUMMARY_M:
        summary = found.summaries.get(("frozen", m))
        bar = next((b for b in summary.causes if b.name == cause), None) if summary else None
        if bar and bar.stacked:
            said.append(f"{bar.stacked} of {len(summary.shapes)} shapes at M = {m}")
    if not said:
        return ""
    where = " and ".join(said)
    return f"It is stacked on {where}: another factor hides it while both are there, which is not “no effect”. "
