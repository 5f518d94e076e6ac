"""The section of R1 in the report: where the throughput goes, in tables and in words whose numbers the analysis gives.

Everything here turns `lab.analysis_r1.Analysis`, verdicts and recorded rows into text for `templates/r1.html.j2`. Prose
and columns live in `templates/words_r1.json`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from lab import analysis_r1
from lab import figures as drawings
from lab.accuracy_figure import fig_accuracy
from lab.analysis_r1 import Analysis
from lab.decomposition import FLOOR, RANKED_M, Summary
from lab.page import Row, Tables, number
from lab.production import FP8, PRODUCTION, format_speeds
from lab.r1_words import SUMMARY_M, constant, observed, percent, pick, share, three, words
from lab.report_causes import (
    cause_matrix,
    cause_table,
    interactions,
    paragraphs,
    ranking,
    ranking_table,
    residual_table,
)
from lab.report_counts import experiments, profile, profile_note, profile_rest, sass_table
from lab.report_outcomes import closing_facts, closing_text, order_table, outcomes
from lab.report_production import (
    decision,
    decision_table,
    gap_table,
    others_table,
    peer_table,
    speed_note,
)
from lab.waterfall import fig_waterfall

#: Predictions of the source by number, and the ids of the claims that carry them.
SOURCE = tuple((p, rf"r\d\.{p.lower()}\.") for p in ("P2", "P3", "P4", "P5", "P6"))

ClaimRow = Callable[[Mapping[str, Any], Mapping[str, Any] | None], Row]


def figures(found: Analysis | None, accuracy: Sequence[Any]) -> dict[str, str]:
    """Figures 3 and 5, wide and narrow, as SVG text; `accuracy`: results of lab.accuracy, may be empty.

    Without a campaign there is no figure 3, and figure 5 stands on the byte ratios, and says so.
    """
    panels = [s for (_, m), s in found.summaries.items() if m in SUMMARY_M] if found else []
    formats = {r.format for r in accuracy}
    speeds = format_speeds(found.production, formats) if found else dict.fromkeys(formats)
    out: dict[str, str] = {}
    for suffix, columns in (("", 3), ("_narrow", 1)):
        if panels:
            out[f"fig3_waterfall{suffix}"] = fig_waterfall(panels, columns=columns)
        if accuracy:
            out[f"fig5_accuracy{suffix}"] = fig_accuracy(accuracy, speeds, columns=columns)
    return out


def section(
    kit: Tables,
    found: Analysis | None,
    campaign: Mapping[str, Any] | None,
    verdicts: pd.DataFrame,
    by_id: Mapping[str, Mapping[str, Any]],
    claim_row: ClaimRow,
) -> dict[str, Any] | None:
    """What the template prints; None before any campaign of R1.

    campaign: campaign.json of the analysed one. `verdicts` with the columns of verdicts.csv; `by_id`: claims.
    claim_row: a row of the report's tables of claims.
    """
    if found is None or campaign is None:
        return None
    text = words()
    judged = {row["claim"]: row for row in verdicts.to_dict("records")}
    return {
        "campaign": found.campaign,
        "facts": _facts(found, judged),
        "outcomes": outcomes(found, judged, by_id, text["causes"]),
        "order": order_table(kit, found, by_id, text["causes"]),
        "decision": decision(found),
        "decision_table": decision_table(kit, found),
        "gap": gap_table(kit, found.production),
        "others": others_table(
            kit, found.production, "cold_graph", "Other kernels, cold, graph replay"
        ),
        "regimes": [
            others_table(kit, found.production, regime, f"All kernels, {regime}", everything=True)
            for regime in ("hot_graph", "cold_loop")
        ],
        "peers": peer_table(kit, found, campaign),
        "rankings": [ranking(text, found, subset, RANKED_M) for subset in ("frozen", "large")],
        "ranking_table": ranking_table(kit, text, found),
        "causes": [cause_matrix(kit, text, found, s, judged) for s in ("frozen", "large")],
        "cause_rows": [
            cause_table(kit, text, found, s, judged, by_id) for s in ("frozen", "large")
        ],
        "interactions": interactions(kit, text, found),
        "residuals": residual_table(kit, found),
        "closing": closing_text(found),
        "refused": [f"{cell}: {why}" for cell, why in found.refused.items()],
        "paragraphs": paragraphs(text, found, campaign),
        "experiments": experiments(kit, text, found.experiments),
        "profile": profile(kit, text, campaign),
        "profile_rest": profile_rest(kit, text, campaign),
        "profile_note": profile_note(campaign),
        "sass": sass_table(kit, campaign),
        "source": _source(kit, found, verdicts, by_id, claim_row),
        "families": _families(kit, verdicts, by_id),
        "missing": _missing(kit, found, verdicts, by_id),
        "speeds": speed_note(found),
    }


# ---- headline ----------------------------------------------------------------------------------------------------


def _facts(found: Analysis, judged: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    facts = []
    for fmt in ("mxfp4", "nvfp4"):
        row = pick(
            found.production, kernel=PRODUCTION, format=fmt, regime="cold_graph", over="all", M=1,
            against=FP8.kernel,
        )  # fmt: skip
        if row is not None:
            name = drawings.FORMAT_NAME[fmt]
            facts.append(
                {
                    "value": f"{number(row['speed'])} × FP8: {percent(row['realised'])} of {row['byte_ratio']:.2f}",
                    "text": f"is what today's production path ({PRODUCTION}) makes of {name} at M = 1: its speed over "
                    f"cuBLASLt FP8 ({three(row, 'speed', 'ci_low', 'ci_high')}; {number(row['lowest'])} on "
                    f"{row['lowest_shape']} to {number(row['highest'])} on {row['highest_shape']}; geometric mean of "
                    f"{row['shapes']} shapes), of the {row['byte_ratio']:.2f} times by which {name} has fewer bytes.",
                }
            )
    summary = found.summaries.get(("frozen", RANKED_M))
    if summary is not None:
        facts.append(_gap_fact(summary))
        facts += _largest_fact(summary)
    if found.found:
        facts += closing_facts(found, judged)
    return facts


def _gap_fact(summary: Summary) -> dict[str, str]:
    production = (
        ""
        if summary.production is None
        else f" The production path takes {observed(summary.production)} times the floor on the same shapes."
    )
    return {
        "value": f"{number(summary.full.value)} × the floor",
        "text": f"is what the testbed, our kernel in the production style, takes in MXFP4 at M = {summary.M} "
        f"({observed(summary.full)}; mean of {len(summary.shapes)} frozen shapes). The time above the floor is the gap "
        f"that is split into causes.{production}",
    }


def _largest_fact(summary: Summary) -> list[dict[str, str]]:
    ranked = analysis_r1.ranking(summary)
    if not ranked:
        return []
    first = ranked[0]
    name = words()["causes"][first.name]
    tied = [first]
    for one, following in zip(ranked, ranked[1:], strict=False):
        if one.then != "inconclusive":
            break
        tied.append(following)
    tail = (
        "It stands above all others: its interval does not overlap the next one."
        if len(tied) == 1
        else "Its interval overlaps that of "
        + f"{words()['causes'][tied[1].name]}, so that it is the largest is not decided."
    )
    return [
        {
            "value": f"{100 * first.share.value:.0f} % of the gap: {name}",
            "text": f"is the largest named cause at M = {summary.M} ({share(first.share)}, mean of "
            f"{len(summary.shapes)} frozen shapes). {tail}",
        }
    ]


# ---- verdicts ----------------------------------------------------------------------------------------------------


def _source(
    kit: Tables,
    found: Analysis,
    verdicts: pd.DataFrame,
    by_id: Mapping[str, Mapping[str, Any]],
    claim_row: ClaimRow,
) -> dict:
    """Every claim that carries P2 to P6 of the source, whatever became of it."""
    rows = []
    for name, pattern in (*SOURCE, ("R1", r"r1\.(closure|cause_detail)\.")):
        said = _adds(found, name)
        for row in verdicts.to_dict("records"):
            if re.match(pattern, row["claim"]):
                made = claim_row(row, by_id.get(row["claim"]))
                made.pop("anchor", None)  # the same claim stands in full under Claims
                rows.append(made | {"p": name, "adds": said})
                said = ""  # once is enough
    keys = ("p", "verdict", "claim", "observed", "band90", "chance", "unit")
    return kit.table(
        keys,
        rows,
        "Predictions P2 to P6 of the source, and R1's on closure and detail",
        "None is registered.",
    )


def _adds(found: Analysis, name: str) -> str:
    """What this campaign says about a prediction of the source, in numbers."""
    frame, constants = found.production, found.constants.found
    if name == "P2":
        parts = []
        for m in (1, 16, 64, 128):
            row = pick(
                frame, kernel=PRODUCTION, format="mxfp4", regime="cold_graph", over="frozen", M=m, against=FLOOR,
            )  # fmt: skip
            if row is not None:
                parts.append(f"{percent(row['speed'])} at M = {m}")
        return f"{PRODUCTION} in MXFP4 reaches of its floor: {', '.join(parts)}" if parts else ""
    if name == "P3":
        return f"{found.decision.word} for R2, with its evidence under Go or no-go"
    if name == "P4":
        ranked = ranking(words(), found, "frozen", RANKED_M)
        if not ranked:
            return ""
        return (
            f"the order found: {ranked['line']}; the number observed is the smallest difference between the shares of "
            "neighbours in the predicted order, and below 0 the order is another one"
        )
    if name == "P5":
        ratio = constants.get(analysis_r1.DEQUANT_RATIO)
        error = constants.get(analysis_r1.WEIGHT_ERROR)
        parts = [f"dequantising NVFP4 costs {constant(ratio)} times MXFP4's" if ratio else ""]
        parts.append(
            f"MXFP4's weight error is {number(error['value'])} times NVFP4's" if error else ""
        )
        return "; ".join(p for p in parts if p)
    looped = constants.get(analysis_r1.LOOPED_RATIO) if name == "P6" else None
    return f"the testbed on gpt_oss_2880 at M = 1: {constant(looped)} times" if looped else ""


def _families(kit: Tables, verdicts: pd.DataFrame, by_id: Mapping[str, Mapping[str, Any]]) -> dict:
    here = verdicts[verdicts["rung"] == "R1"]
    counts: dict[str, Counter] = {}
    for row in here.to_dict("records"):
        family = by_id.get(row["claim"], {}).get("family", "unregistered")
        counts.setdefault(family, Counter())[row["verdict"]] += 1
    rows = [
        {
            "family": family,
            "claims": str(sum(own.values())),
            "counts": ", ".join(f"{n} {verdict}" for verdict, n in sorted(own.items())),
        }
        for family, own in sorted(counts.items())
    ]
    return kit.table(("family", "claims", "counts"), rows, "All claims of R1 by family", "None.")


def _missing(
    kit: Tables, found: Analysis, verdicts: pd.DataFrame, by_id: Mapping[str, Mapping[str, Any]]
) -> dict:
    """Why a claim of R1 has no number although the campaign was taken."""
    rows = []
    waiting = verdicts[(verdicts["rung"] == "R1") & (verdicts["verdict"] == "NOT_RUN")]
    for row in waiting.to_dict("records"):
        claim = by_id.get(row["claim"], {})
        rows.append(
            {"verdict": row["verdict"], "claim_id": row["claim"], "why_missing": _why(found, claim)}
        )
    keys = ("verdict", "claim_id", "why_missing")
    return kit.table(keys, rows, "Claims of R1 without a number", "Every claim of R1 has a number.")


def _why(found: Analysis, claim: Mapping[str, Any]) -> str:
    estimand = claim.get("estimand", {})
    name = estimand.get("name") or ""
    for key, why in found.constants.missing.items():
        if key == name or (key.startswith("share/") and key.split("/")[1] == name):
            return why
    kernels = {cell["kernel"] for cell in estimand.get("cells", [])}
    for kernel, _, reason in found.missing_peers:
        if kernel in kernels:
            return f"{kernel}: {reason}"
    if found.refused:
        cell, why = next(iter(found.refused.items()))
        return f"{cell}: {why}"
    return "not measured in this campaign"
