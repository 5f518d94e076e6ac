"""The block of README.md about the decode kernel (R2): its cells, and the bars with the reason where one is missed."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import pandas as pd

from lab import peer_gaps
from lab.bars_r2 import MISSED
from lab.decode_r2 import KERNEL
from lab.page import BLANK, absent, number, with_interval
from lab.report_r2 import cells_missed, name_of, off_by, words

NO_R2 = "No campaign of R2 has been recorded yet."
#: The tables that the block is made from.
READ = ("r2_decode", "r2_bars")
#: M of the table; the report has all.
SHOWN_M = (1, 4, 16)
LINE = 124
NAMES = {"mxfp4": "MXFP4", "nvfp4": "NVFP4", "int4_g128": "INT4-g128"}
UNITS = {"host": " µs", "pack": " ms"}


def decode(r2: Mapping[str, pd.DataFrame], every: pd.DataFrame | None = None) -> str:
    """The cells at M of SHOWN_M, the bars, and of each missed one the cells, by how much, and the reason.

    every: rows of cells.csv, for what an earlier campaign says of the peers.
    """
    cells, bars = r2["r2_decode"], r2["r2_bars"]
    if cells.empty:
        return NO_R2
    lines = wrapped(
        f"`{KERNEL}` in `{cells['campaign'].iloc[0]}`, cold L2, graph replay; times in µs. × FP8: time of cuBLASLt FP8 "
        "over its time; × floor: its time over the floor. The best peer is the fastest kernel of others in MXFP4."
    )
    gaps = None if every is None else peer_gaps.gaps(every, cells["campaign"].iloc[0], KERNEL)
    peers = peer_gaps.sentence(gaps)
    noted = ["", *wrapped(peers)] if peers else []
    return "\n".join([*lines, "", *_cells(cells), *noted, "", *_bars(bars), *_misses(bars)])


def wrapped(text: str, width: int = LINE) -> list[str]:
    """A paragraph in lines that the page allows."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


HEAD = ("shape", "M", "floor", KERNEL, "FP8", "BF16", "best peer", "× FP8", "× floor")
HEAD += (f"NVFP4: {KERNEL}", "× FP8", "× floor")
WHY = (
    "Where a bar is missed (“why” is computed from the floors and the profiler's counters of the worst cell, or of the "
    "profiled call nearest to it):"
)


def _cells(cells: pd.DataFrame) -> list[str]:
    lines = [f"| {' | '.join(HEAD)} |", f"|---|{'--:|' * (len(HEAD) - 1)}"]
    key = ["shape", "M"]
    both = {fmt: cells[cells["format"] == fmt].set_index(key) for fmt in ("mxfp4", "nvfp4")}
    for place in both["mxfp4"].index:
        shape, m = place
        if m not in SHOWN_M:
            continue
        mx = both["mxfp4"].loc[place]
        nv = both["nvfp4"].loc[place] if place in both["nvfp4"].index else None
        parts = [shape, str(m), *(_number(mx[c]) for c in ("floor_us", "time_us", "fp8_us", "bf16_us"))]  # fmt: skip
        peer = mx["peer"]
        named = not absent(peer) and peer
        parts.append(f"{_number(mx['peer_us'])} {peer.removeprefix('peer/')}" if named else "-")
        parts += [_ratio(mx["over_fp8"]), _ratio(mx["over_floor"])]
        parts += (
            ["-"] * 3
            if nv is None
            else [_number(nv["time_us"]), _ratio(nv["over_fp8"]), _ratio(nv["over_floor"])]
        )
        lines.append(f"| {' | '.join(parts)} |")
    return lines


def _number(value: Any) -> str:
    return "-" if absent(value) else number(value)


def _ratio(value: Any) -> str:
    return "-" if absent(value) else f"{value:.2f}"


def _bars(bars: pd.DataFrame) -> list[str]:
    lines = ["| bar | format | limit | observed (95 % interval) | off by | met? | cells missed |"]
    lines.append("|---|---|--:|--:|--:|---|--:|")
    names = words()["bars"]
    for row in bars[bars["row"] == "bar"].to_dict("records"):
        unit = UNITS.get(row["bar"], "")
        side = "≥" if row["direction"] == "above" else "≤"
        observed = "-"
        if not absent(row["observed"]):
            three = (row["observed"], row["observed_low"], row["observed_high"])
            point, ends = with_interval(*three, digits=3)
            observed = f"{point}{unit}" + ("" if ends == BLANK else f" ({ends})")
        several = not absent(row["cells"]) and row["cells"] > 1
        parts = [
            name_of(names, row["bar"]),
            NAMES.get(row["format"], "") if not absent(row["format"]) else "",
            f"{side} {row['limit']:g}{unit}",
            observed,
            off_by(row["off"]) if observed != "-" else "-",
            row["status"],
            cells_missed(*(int(row[n]) for n in ("cells", "missed", "undecided", "planned")))
            if several
            else "",
        ]
        lines.append(f"| {' | '.join(parts)} |")
    return lines


def _misses(bars: pd.DataFrame) -> list[str]:
    """One line a missed bar: how many cells, the worst, by how much, and why."""
    lines: list[str] = []
    told: dict[str, str] = {}
    names = words()["bars"]
    missed = bars[(bars["row"] == "bar") & (bars["status"] == MISSED)]
    for row in missed.to_dict("records"):
        fmt = NAMES.get(row["format"], "") if not absent(row["format"]) else ""
        title = ", ".join(part for part in (name_of(names, row["bar"]), fmt) if part)
        own = bars[(bars["row"] == "cell") & (bars["bar"] == row["bar"])]
        own = own[own["status"] == MISSED]
        own = own[own["format"] == row["format"]] if fmt else own
        cells = [_cell(c) for c in own.to_dict("records")]
        text = f"- **{title}** ({off_by(row['off'])})"
        text += f": {_few(cells)}" if cells else ""
        reason = "" if absent(row["reason"]) else row["reason"]
        # Bars about one cell have one reason: it is said once.
        said = f"as for {told[reason]}" if reason in told else reason
        told.setdefault(reason, title)
        text += f". Why: {said}" if reason else ""
        first, *rest = wrapped(f"{text}.", LINE - 2)
        lines += [first, *(f"  {line}" for line in rest)]
    return ["", *wrapped(WHY), "", *lines] if lines else []


def _cell(row: Mapping[str, Any]) -> str:
    """A cell on the wrong side: where, by how much, and the faster kernel where it is about one."""
    peer = f", {row['how']}" if row["bar"] == "peers" and not absent(row["how"]) else ""
    return f"{row['shape']} M = {int(row['M'])} ({off_by(row['off'])}{peer})"


def _few(cells: list[str], shown: int = 6) -> str:
    """The worst cells, and how many more there are."""
    more = f" and {len(cells) - shown} more" if len(cells) > shown else ""
    return ", ".join(cells[:shown]) + more
