"""R1 in the report: what became of the predictions of the source, and what the two closures say.

Refuted predictions come first and in the words in which they were registered, with the observation beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab import analysis_r1
from lab.analysis_r1 import Analysis
from lab.decomposition import CLOSES, RANKED_M, Decomposition
from lab.page import BLANK, Row, Tables, number, with_interval
from lab.production import FP8, PRODUCTION
from lab.r1_words import count, listed, percent, pick, plain, share
from lab.statistics import Estimate

RANKING = "r1.p4.cause_ranking"
PATH = "r1.p3.production_path"
ACCURACY = "r1.p5.mxfp4_less_accurate"
DEQUANT = f"r1.cause_detail.{analysis_r1.DEQUANT_RATIO}"
CLOSURES = ("all_removed", "counters")

Judged = Mapping[str, Mapping[str, Any]]
Claims = Mapping[str, Mapping[str, Any]]


# ---- do the sums close? ------------------------------------------------------------------------------------------


def _within(found: Sequence[Decomposition], name: str) -> tuple[list[Decomposition], list[float]]:
    """Cells that close by one closure, and what it leaves of the gap in every cell that has it."""
    taken = [d for d in found if d.closure(name).share is not None]
    closed = [d for d in taken if d.closure(name).verdict == "CLOSED"]
    return closed, [d.closure(name).share.value for d in taken]


def _range(parts: Sequence[float]) -> str:
    return f"{percent(min(parts))[:-2]} to {percent(max(parts))}"


def _tenth(estimate: Estimate) -> str:
    return f"{plain(100 * estimate.value, 1)} %"


def closing_facts(found: Analysis, judged: Judged) -> list[dict[str, str]]:
    """One fact a closure: how many cells it closes, what it leaves, and what that means."""
    facts = []
    for name in CLOSURES:
        closed, left = _within(found.found, name)
        if not left:
            facts.append(
                {
                    "value": f"{_TITLE[name]}: not taken",
                    "text": f"in none of {count(len(found.found), 'cell')}. {_WHAT[name]}",
                }
            )
            continue
        facts.append(
            {
                "value": f"{len(closed)} of {len(found.found)} cells close {_BY[name]}",
                "text": f"{_WHAT[name]} What is left runs from {_range(left)} of the gap; up to {percent(CLOSES)} is "
                f"closed. {_meaning(name, closed, left, found, judged)}",
            }
        )
    return facts


_TITLE = {"all_removed": "First closure", "counters": "Second closure"}
_BY = {"all_removed": "by removal", "counters": "by counters"}
_WHAT = {
    "all_removed": "First closure: with all five parts removed, the kernel must come down to the floor.",
    "counters": "Second closure: the time that profiler counters predict, by a formula fixed before the campaign, must "
    "be the time that was measured.",
}


def _meaning(
    name: str, closed: Sequence[Any], left: Sequence[float], found: Analysis, judged: Judged
) -> str:
    if name == "all_removed":
        others = [d for d in found.found if d.closure(name).verdict != "CLOSED" and d.bare]
        rest = [
            f"{d.cell.shape} at M = {d.cell.M} ({_tenth(d.residual.share)}; {_tenth(d.bare)} before the "
            "measured terms)"
            for d in others
        ]
        said = f"Not closed: {listed(rest)}. " if 0 < len(rest) <= 4 else ""
        if others and all(abs(d.bare.value) <= CLOSES for d in others):
            said += (
                "There it is a measured term, launch or grid fill, that does not add up, likely because an empty "
                "launch pays for blocks whose start a stream of bytes can hide. "
            )
        return said + "The split into causes stands on this closure."
    verdicts = sorted(
        {row["verdict"] for claim, row in judged.items() if claim.startswith("r1.closure.")}
    )
    tail = f" Claims r1.closure.*: {listed(verdicts)}." if verdicts else ""
    if len(closed) == len(left):
        return "Counters and clock agree." + tail
    if min(left) > 0:
        return (
            "It is too short everywhere: it multiplies out the mean life of a warp, and a call ends with the last warp "
            "to finish, not with the mean one. The predictor is too crude; the split does not use it."
            + tail
        )
    return "The predictor is too crude; the split does not use it." + tail


def closing_text(found: Analysis) -> str:
    """What the badges of figure 3 and of the tables say about the two closures, in one paragraph."""
    if not found.found:
        return ""
    parts = []
    for name in CLOSURES:
        closed, left = _within(found.found, name)
        what = "without any part" if name == "all_removed" else "predicted by counters"
        parts.append(
            f"{what}, {len(closed)} of {len(found.found)} cells are within {percent(CLOSES)}"
            + (f" (rest {_range(left)})" if left else " (not taken)")
        )
    both = sum(d.verdict == "CLOSED" for d in found.found)
    return (
        f"A cell has the graver of its two verdicts, so {both} of {len(found.found)} are CLOSED by both: "
        f"{'; '.join(parts)}. The residual that is drawn and listed as a cause is that of the first."
    )


# ---- predicted and observed --------------------------------------------------------------------------------------


def outcomes(
    found: Analysis, judged: Judged, claims: Claims, causes: Mapping[str, str]
) -> list[dict]:
    """The judged predictions of the source as `badge`, `title` and `text`, the refuted ones first."""
    given = [
        _outcome(judged, claims, PATH, "P3: today's production path", _path(found, judged, claims)),
        _outcome(judged, claims, RANKING, "P4: the order of the causes", _order(found, claims, causes)),
        _outcome(judged, claims, DEQUANT, "P5: NVFP4 against MXFP4, dequantisation", _dequant(found, judged)),
        _outcome(judged, claims, ACCURACY, "P5: NVFP4 against MXFP4, accuracy", _accuracy(judged)),
    ]  # fmt: skip
    shown = [one for one in given if one]
    return sorted(shown, key=lambda one: one["badge"] not in ("REFUTED", "MISS"))


def _outcome(judged: Judged, claims: Claims, claim: str, title: str, text: str) -> dict | None:
    row = judged.get(claim)
    if row is None or claim not in claims or not text or row["verdict"] == "NOT_RUN":
        return None
    return {"badge": row["verdict"], "title": title, "claim": claim, "text": text}


def _seen(row: Mapping[str, Any]) -> str:
    if row["ci_low"] == row["ci_high"]:
        return number(row["observed"])
    point, interval = with_interval(row["observed"], row["ci_low"], row["ci_high"], 3)
    return point if interval == BLANK else f"{point} ({interval})"


def _path(found: Analysis, judged: Judged, claims: Claims) -> str:
    row = judged.get(PATH)
    one = pick(
        found.production, kernel=PRODUCTION, format="mxfp4", regime="cold_graph", over="frozen", M=1,
        against=FP8.kernel,
    )  # fmt: skip
    if row is None or one is None or PATH not in claims:
        return ""
    slower = (
        f"{percent(abs(1 - row['observed']))} {'below' if row['observed'] < 1 else 'above'} FP8"
    )
    return (
        f"Predicted: “{claims[PATH]['statement'].rstrip('.')}”. Observed: {_seen(row)} times, {slower}. At "
        f"M = 1 the {one['shapes']} shapes run from {number(one['lowest'])} ({one['lowest_shape']}) to "
        f"{number(one['highest'])} ({one['highest_shape']}) times."
    )


def predicted_order(claims: Claims) -> list[str]:
    """The causes in the order of the registered ranking; [] where it is not registered."""
    name = (claims.get(RANKING, {}).get("estimand") or {}).get("name")
    return [part.strip() for part in name.split(">")] if name else []


def _ranked(found: Analysis) -> list[Any]:
    summary = found.summaries.get(("frozen", RANKED_M))
    return analysis_r1.ranking(summary) if summary else []


def _order(found: Analysis, claims: Claims, causes: Mapping[str, str]) -> str:
    order, ranked = predicted_order(claims), _ranked(found)
    seen = [one.name for one in ranked if one.name in order]
    if not order or not ranked:
        return ""
    first, last = seen[0], order[-1]
    unnamed = [one.name for one in ranked[:3] if one.name not in order]
    said = (
        f"Predicted: {' > '.join(causes[n] for n in order)}. Observed among these: "
        f"{' > '.join(causes[n] for n in seen)}."
    )
    if first == last and len(order) > 1:
        said += f" The cause that was put last, {causes[last]}, is the first."
    if unnamed:
        said += (
            f" {listed([causes[n] for n in unnamed]).capitalize()}, which the prediction does not name, "
            f"{'is' if len(unnamed) == 1 else 'are'} among the three largest."
        )
    return said


def order_table(kit: Tables, found: Analysis, claims: Claims, causes: Mapping[str, str]) -> dict:
    """Place by place: the predicted ranking, the order observed among its causes, and that of all causes."""
    order, ranked = predicted_order(claims), _ranked(found)
    seen = [one for one in ranked if one.name in order]

    def said(one: Any) -> str:
        return f"{causes[one.name]}, {share(one.share)}"

    rows: list[Row] = []
    for i in range(max(len(order), len(ranked)) if ranked else 0):
        rows.append(
            {
                "rank_place": str(i + 1),
                "rank_predicted": causes[order[i]] if i < len(order) else BLANK,
                "rank_among": said(seen[i]) if i < len(seen) else BLANK,
                "rank_all": said(ranked[i]) if i < len(ranked) else BLANK,
            }
        )
    summary = found.summaries.get(("frozen", RANKED_M))
    shapes = len(summary.shapes) if summary else 0
    caption = f"P4: predicted and observed order of the causes, M = {RANKED_M}, mean of {shapes} frozen shapes"
    keys = ("rank_place", "rank_predicted", "rank_among", "rank_all")
    return kit.table(keys, rows, caption, "No cell was decomposed.")


def _dequant(found: Analysis, judged: Judged) -> str:
    row = judged.get(DEQUANT)
    if row is None or row["verdict"] == "NOT_RUN":
        return ""
    low, high = row["ci_low"], row["ci_high"]
    word = "cheaper" if high < 1 else "dearer" if low > 1 else "neither cheaper nor dearer"
    return (
        f"Predicted: dequantising NVFP4 takes {number(row['q50'])} ({number(row['q05'])} to {number(row['q95'])}) "
        "times the time of MXFP4, because it has twice the scales and multiplies by them. Observed in the testbed: "
        f"{_seen(row)} times, so it is {word}. Whether a whole kernel is faster in MXFP4 is a claim about rung R2."
    )


def _accuracy(judged: Judged) -> str:
    row = judged.get(ACCURACY)
    if row is None or row["verdict"] == "NOT_RUN":
        return ""
    return (
        f"Predicted: MXFP4 has the larger weight error. Observed: {_seen(row)} times NVFP4's (relative RMS, the "
        "weights of figure 5)."
    )
