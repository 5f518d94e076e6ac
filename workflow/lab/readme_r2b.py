"""The block of README.md about the matrix kernel (R2b): means by M with their bars, the others, and why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lab.bars import MET, MISSED, NOT_RUN, UNDECIDED, split
from lab.dispatch import LINEAR
from lab.gemm_r2b import KERNEL, MS, NOT_PROFILED
from lab.page import absent
from lab.readme_r2 import NAMES, wrapped
from lab.report_r2 import cells_missed, name_of, off_by
from lab.report_r2b import crossed, faster_up_to, words

NO_R2B = "No campaign of R2 from M = 16 to prefill (R2b) has been recorded yet."
#: The tables that the block is made from.
READ = ("r2b_cells", "r2b_bars", "r2b_crossover")
LINE = 124
#: Bars about one M, a column each.
BY_M = (
    ("fp8_mean", "mxfp4", "× FP8"),
    ("bf16_mean", "mxfp4", "× BF16"),
    ("bf16_least", "mxfp4", "× BF16, slowest"),
    ("peers", "mxfp4", "× peers, slowest"),
)
SIGNS = {MET: "", MISSED: " **missed**", UNDECIDED: " undecided", NOT_RUN: " NOT_RUN"}


def matrix(r2b: Mapping[str, pd.DataFrame]) -> str:
    """One row an M with means and bars, the bars over several M, the crossings, and the reasons of missed bars."""
    cells, bars = r2b["r2b_cells"], r2b["r2b_bars"]
    if cells.empty:
        return NO_R2B
    lines = wrapped(
        f"`{KERNEL}` in `{cells['campaign'].iloc[0]}`, cold L2, graph replay. A number is time of the rival over its "
        "time in MXFP4, geometric mean of the shapes or the slowest of them; × bound is its time over that. Behind "
        "a number stands the bar, and what was not met; one without a bar is reported alone."
    )
    if _at(cells[cells["kernel"] == KERNEL])["over_bound"].min() < 1:
        lines += ["", *wrapped(BELOW)]
    if said := _not_measured(cells, bars):
        lines += ["", *wrapped(said)]
    lines += ["", *_by_m(cells, bars), "", *_others(bars)]
    said = _crossings(r2b["r2b_crossover"])
    lines += ["", *wrapped(said)] if said else []
    return "\n".join([*lines, *_misses(bars)])


def _not_measured(cells: pd.DataFrame, bars: pd.DataFrame) -> str:
    """What part of the shapes was measured, where that is not all."""
    planned, shapes = _planned(bars), list(dict.fromkeys(_of_the_set(cells)["shape"]))
    if not planned or not (bars["planned"] > bars["cells"]).any():
        return ""
    return (
        f"The minutes of the campaign ended it before its plan: measured are {len(shapes)} of {planned} shapes "
        f"({', '.join(shapes)}). Means are over those. A bar with cells that were not measured is never met: it is "
        "missed by those that were, or undecided."
    )


def _planned(bars: pd.DataFrame) -> int:
    """Number of shapes that a mean was to be over; 0 where no bar says so."""
    own = bars.loc[bars["bar"].str.startswith("bf16_mean"), "planned"].dropna()
    return int(own.max()) if len(own) else 0


BELOW = "The BF16 rate of the bound is that of a long product at the power limit: a short call can take less."
HEAD = (
    "M",
    "shapes",
    "MXFP4: × bound",
    *(title for *_, title in BY_M),
    "NVFP4: × FP8",
    "NVFP4: × BF16",
)


def _by_m(cells: pd.DataFrame, bars: pd.DataFrame) -> list[str]:
    lines = [f"| {' | '.join(HEAD)} |", f"|{'--:|' * len(HEAD)}"]
    own = cells[(cells["kernel"] == KERNEL) & cells["M"].isin(MS)]
    known = _at(own)
    judged = bars[bars["row"] == "bar"].set_index(["bar", "format"])
    planned, set_of = _planned(bars), _of_the_set(own[own["format"] == "mxfp4"])
    for m in sorted(own["M"].unique()):
        n = set_of.loc[set_of["M"] == m, "shape"].nunique()
        shapes = f"{n} of {planned}" if n < planned else str(n)
        parts = [str(m), shapes, _mean(known, "mxfp4", m, "over_bound")]
        for kind, fmt, _ in BY_M:
            column = {"fp8_mean": "over_fp8", "bf16_mean": "over_bf16"}.get(kind)
            parts.append(_judged(judged, f"{kind}.m{m}", fmt, _mean(known, fmt, m, column), n))
        parts += [_mean(known, "nvfp4", m, name) for name in ("over_fp8", "over_bf16")]
        lines.append(f"| {' | '.join(parts)} |")
    return lines


def _at(cells: pd.DataFrame) -> pd.DataFrame:
    """Geometric means by format and M, over the shapes of the set: those with FP8 or BF16 beside them."""
    names = ["over_fp8", "over_bf16", "over_bound"]
    own = _of_the_set(cells)
    logs = own[["format", "M"]].assign(**{name: np.log(own[name].astype(float)) for name in names})
    return np.exp(logs.groupby(["format", "M"])[names].mean())


def _of_the_set(cells: pd.DataFrame) -> pd.DataFrame:
    """Cells of the shapes of the set."""
    return cells[cells["over_fp8"].notna() | cells["over_bf16"].notna()]


def _mean(known: pd.DataFrame, fmt: str, m: int, name: str | None) -> str:
    if name is None or (fmt, m) not in known.index or absent(known.loc[(fmt, m), name]):
        return "-"
    return f"{known.loc[(fmt, m), name]:.2f}"


def _judged(bars: pd.DataFrame, name: str, fmt: str, mean: str, shapes: int) -> str:
    """The number that a bar judges, the bar, and whether it is met; else the mean.

    shapes: those measured at this M; where a bar has fewer cells, their number is said.
    """
    if (name, fmt) not in bars.index:
        return mean
    row = bars.loc[(name, fmt)]
    if absent(row["observed"]):
        return NOT_RUN
    side = "≥" if row["direction"] == "above" else "≤"
    few = f" ({int(row['cells'])} cells)" if row["cells"] < shapes else ""
    return f"{row['observed']:.2f} ({side} {row['limit']:g}){SIGNS[row['status']]}{few}"


def _others(bars: pd.DataFrame) -> list[str]:
    """The bars over several M."""
    lines = ["| bar | format | limit | observed (95 % interval) | met? | cells missed |"]
    lines.append("|---|---|--:|--:|---|--:|")
    for row in bars[bars["row"] == "bar"].to_dict("records"):
        if split(row["bar"])[1] is not None:
            continue
        seen = "-"
        if not absent(row["observed"]):
            low, high = row["observed_low"], row["observed_high"]
            seen = f"{row['observed']:.3f} ({low:.3f} to {high:.3f})"
        several = not absent(row["planned"]) and row["planned"] > 1
        names = ("cells", "missed", "undecided", "planned")
        counts = [int(row[name]) for name in names] if several else []
        side = "≥" if row["direction"] == "above" else "≤"
        name = name_of(words()["bars"], row["bar"])
        parts = [name, _format(row), f"{side} {row['limit']:g}", seen, row["status"]]
        lines.append(f"| {' | '.join([*parts, cells_missed(*counts) if counts else ''])} |")
    return lines


def _format(row: Mapping[str, Any]) -> str:
    return "" if absent(row["format"]) else NAMES.get(row["format"], "")


def _crossings(crossings: pd.DataFrame) -> str:
    """Up to which M `linear` is faster."""
    parts = []
    for against, rows in crossings.groupby("against", sort=False):
        values = sorted(rows["crossing_m"])
        ms = (int(rows["m_lowest"].min()), int(rows["m_highest"].max()))
        low, high = (crossed(values[i], ms) for i in (0, -1))
        middle = faster_up_to(values[len(values) // 2], ms)
        mechanisms = rows["mechanism"].value_counts()
        why = ", ".join(f"{name} on {n}" for name, n in sorted(mechanisms.items()))
        ends = f"; {low} to {high}" if low != high else ""
        why = (
            f"; what sets its time there: {why}" if set(mechanisms.index) != {NOT_PROFILED} else ""
        )
        parts.append(
            f"faster than `{against}` {middle} (median of {len(values)} shapes{ends}{why})"
        )
    return f"`{LINEAR}` in MXFP4 is {'; '.join(parts)}." if parts else ""


def _misses(bars: pd.DataFrame) -> list[str]:
    """One line a kind of bar that is missed: at which M, by how much, the worst cell, and why."""
    missed = bars[(bars["row"] == "bar") & (bars["status"] == MISSED)]
    if missed.empty:
        return []
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in missed.to_dict("records"):
        kinds.setdefault((split(row["bar"])[0], _format(row)), []).append(row)
    lines = []
    for (kind, fmt), rows in kinds.items():
        title = ", ".join(part for part in (words()["bars"][kind], fmt) if part)
        worst = max(rows, key=lambda row: abs(row["off"]))
        at = [(split(row["bar"])[1], off_by(row["off"])) for row in rows]
        where = [f"M = {m} ({off})" for m, off in at if m is not None]
        said = f" at {', '.join(where)}" if where else f" ({off_by(worst['off'])})"
        lines += _item(f"- **{title}**{said}. {_worst(worst)}")
    intro = "Where a bar is missed, and why (computed from the bound and the profiler's counters of the worst cell):"
    return ["", *wrapped(intro), "", *lines]


def _worst(row: Mapping[str, Any]) -> str:
    cell = "" if absent(row["shape"]) else f"Worst cell {row['shape']} M = {int(row['M'])}: "
    reason = "" if absent(row["reason"]) else row["reason"]
    return f"{cell}{reason}." if reason else ""


def _item(text: str) -> Sequence[str]:
    first, *rest = wrapped(text.strip(), LINE - 2)
    return [first, *(f"  {line}" for line in rest)]


__all__ = ["NO_R2B", "READ", "matrix"]
