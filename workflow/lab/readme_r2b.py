"""The block of README.md about the matrix kernel (R2b): means by M with their bars, the others, and why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lab.bars import MET, MISSED, NOT_RUN, UNDECIDED, split
from lab.dispatch import LINEAR
from lab.gemm_r2b import KERNEL, MS
from lab.page import absent
from lab.readme_r2 import NAMES, wrapped
from lab.report_r2 import cells_missed, name_of, off_by
from lab.report_r2b import crossed, words

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
    ("peers", "nvfp4", "NVFP4: × peers, slowest"),
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
    lines += ["", *_by_m(cells, bars), "", *_others(bars)]
    said = _crossings(r2b["r2b_crossover"])
    lines += ["", *wrapped(said)] if said else []
    return "\n".join([*lines, *_misses(bars)])


HEAD = ("M", "MXFP4: × bound", *(title for *_, title in BY_M), "NVFP4: × FP8", "NVFP4: × BF16")


def _by_m(cells: pd.DataFrame, bars: pd.DataFrame) -> list[str]:
    lines = [f"| {' | '.join(HEAD)} |", f"|{'--:|' * len(HEAD)}"]
    own = cells[(cells["kernel"] == KERNEL) & cells["M"].isin(MS)]
    known = _at(own)
    judged = bars[bars["row"] == "bar"].set_index(["bar", "format"])
    for m in sorted(own["M"].unique()):
        parts = [str(m), _mean(known, "mxfp4", m, "over_bound")]
        for kind, fmt, _ in BY_M:
            column = {"fp8_mean": "over_fp8", "bf16_mean": "over_bf16"}.get(kind)
            parts.append(_judged(judged, f"{kind}.m{m}", fmt, _mean(known, fmt, m, column)))
        parts += [_mean(known, "nvfp4", m, name) for name in ("over_fp8", "over_bf16")]
        lines.append(f"| {' | '.join(parts)} |")
    return lines


def _at(cells: pd.DataFrame) -> pd.DataFrame:
    """Geometric means by format and M, over the shapes of the set: those with FP8 or BF16 beside them."""
    names = ["over_fp8", "over_bf16", "over_bound"]
    own = cells[cells["over_fp8"].notna() | cells["over_bf16"].notna()]
    logs = own[["format", "M"]].assign(**{name: np.log(own[name].astype(float)) for name in names})
    return np.exp(logs.groupby(["format", "M"])[names].mean())


def _mean(known: pd.DataFrame, fmt: str, m: int, name: str | None) -> str:
    if name is None or (fmt, m) not in known.index or absent(known.loc[(fmt, m), name]):
        return "-"
    return f"{known.loc[(fmt, m), name]:.2f}"


def _judged(bars: pd.DataFrame, name: str, fmt: str, mean: str) -> str:
    """The number that a bar judges, the bar, and whether it is met; else the mean."""
    if (name, fmt) not in bars.index:
        return mean
    row = bars.loc[(name, fmt)]
    if absent(row["observed"]):
        return NOT_RUN
    side = "≥" if row["direction"] == "above" else "≤"
    return f"{row['observed']:.2f} ({side} {row['limit']:g}){SIGNS[row['status']]}"


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
        several = not absent(row["cells"]) and row["cells"] > 1
        counts = [int(row[name]) for name in ("cells", "missed", "undecided")] if several else []
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
        low, middle, high = (crossed(values[i], ms) for i in (0, len(values) // 2, -1))
        mechanisms = rows["mechanism"].value_counts()
        why = ", ".join(f"{name} on {n}" for name, n in sorted(mechanisms.items()))
        parts.append(
            f"faster than `{against}` up to M = {middle} (median of {len(values)} shapes; {low} to {high}; what sets "
            f"its time there: {why})"
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
