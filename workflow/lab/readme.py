"""The numbers of README.md: blocks between markers, filled from the report's tables and from nothing else.

A block stands between `<!-- NAME -->` and `<!-- /NAME -->`. `snakemake --cores 1 readme` fills them; a test holds them
against the committed tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from lab.files import write_text
from lab.rungs import RUNGS

HEADLINE_REGIME = "cold_graph"
# Verdicts in the order in which a reader wants them; the rest follow by name.
VERDICT_ORDER = (
    "HIT", "STRADDLE", "MISS", "CONFIRMED", "INCONCLUSIVE", "REFUTED", "DEVIATED", "INVALID", "TAMPERED",
    "EXPLORATORY", "NOT_RUN",
)  # fmt: skip


class ReadmeError(ValueError):
    """README.md lacks a marker, or has one that nobody fills."""


def update(path: str | Path, *, cells: pd.DataFrame, verdicts: pd.DataFrame) -> bool:
    """Fill the blocks of a README in place; True when it changed."""
    text = Path(path).read_text(encoding="utf-8")
    filled = fill(text, blocks(cells, verdicts))
    if filled != text:
        write_text(path, filled)
    return filled != text


def blocks(cells: pd.DataFrame, verdicts: pd.DataFrame) -> dict[str, str]:
    """Name -> Markdown of every block."""
    return {"rungs": rung_table(verdicts), "headline": headline(cells)}


def fill(text: str, contents: Mapping[str, str]) -> str:
    """The text with each block's content replaced. Raises ReadmeError when markers and blocks do not match."""
    marked = re.findall(r"<!-- (\w+) -->", text)
    if sorted(marked) != sorted(contents):
        raise ReadmeError(
            f"README.md marks the blocks {sorted(marked)}, known are {sorted(contents)}"
        )
    for name, content in contents.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text, n = re.subn(pattern, lambda m, c=content: f"{m[1]}{c}\n{m[2]}", text, flags=re.S)
        if n != 1:
            raise ReadmeError(f"README.md: block {name} is not closed by <!-- /{name} -->")
    return text


def rung_table(verdicts: pd.DataFrame) -> str:
    """One row a rung: its target, what it is for, and how many of its claims ended in which verdict."""
    lines = ["| rung | target | what | claims by verdict |", "|---|---|---|---|"]
    for rung in RUNGS:
        counts = verdicts.loc[verdicts["rung"] == rung.id, "verdict"].value_counts()
        order = [v for v in VERDICT_ORDER if v in counts]
        order += sorted(set(counts.index) - set(order))
        said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in order) or "none registered"
        lines.append(f"| {rung.id} | `{rung.target}` | {rung.title} | {said} |")
    return "\n".join(lines)


def headline(cells: pd.DataFrame) -> str:
    """How near each measured kernel comes to its size-matched floor at M = 1, over the shapes of the campaign."""
    shown = cells[
        (cells["regime"] == HEADLINE_REGIME)
        & (cells["M"] == 1)
        & (cells["correctness"] == "passed")
        & ~cells["role"].isin(["floor", "correctness_only"])
        & cells["time_us"].notna()
        & cells["floor_us"].notna()
    ]
    if shown.empty:
        return "No campaign has been recorded yet."
    sources = shown[["campaign", "device"]].drop_duplicates()
    named = "; ".join(f"`{c}` on {d}" for c, d in sources.itertuples(index=False))
    lines = [
        f"Measured in {named}, cold L2, graph replay, M = 1:",
        "",
        "| kernel | format | percent of the measured floor: geometric mean (lowest to highest shape) | shapes |",
        "|---|---|---|--:|",
    ]
    for (kernel, fmt), rows in shown.groupby(["kernel", "format"], sort=True):
        share = 100 * rows["floor_us"] / rows["time_us"]
        mean = float(np.exp(np.log(share).mean()))
        span = f"{mean:.3g} % ({share.min():.3g} to {share.max():.3g})"
        lines.append(f"| `{kernel}` | {fmt} | {span} | {len(rows)} |")
    return "\n".join(lines)
