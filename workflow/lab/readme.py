"""The numbers of README.md: blocks between markers, filled from the report's tables and from nothing else.

A block stands between `<!-- NAME -->` and `<!-- /NAME -->`. `snakemake --cores 1 readme` fills them; a test holds them
against the committed tables.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from lab import analysis_r1, analysis_r2, analysis_r2b, readme_r2, readme_r2b
from lab.decomposition import CLOSES
from lab.experiments_r1 import CAUSE, EXTRA_SHAPE
from lab.files import write_text
from lab.production import PRODUCTION
from lab.r1_words import plain
from lab.rungs import RUNGS
from qgemm_mx.formats import bytes_per_weight

HEADLINE_REGIME = "cold_graph"
NO_CAMPAIGN = "No campaign has been recorded yet."
NO_R1 = "No campaign of R1 has been recorded yet."
FLOOR = "stream_read"
CUBLASLT = {"bf16": "cublaslt_bf16", "fp8_e4m3": "cublaslt_fp8"}
LINE = 124
SHOWN_M = (1, 4, 16, 64, 256, 1024)
# The faster format and the one that it is held against, with their names in prose.
STEPS = (("mxfp4", "fp8_e4m3"), ("nvfp4", "fp8_e4m3"), ("fp8_e4m3", "bf16"))
NAMES = {"mxfp4": "MXFP4", "nvfp4": "NVFP4", "fp8_e4m3": "FP8", "bf16": "BF16"}
# Verdicts in the order in which a reader wants them; the rest follow by name.
VERDICT_ORDER = (
    "HIT", "STRADDLE", "MISS", "CONFIRMED", "INCONCLUSIVE", "REFUTED", "DEVIATED", "INVALID", "TAMPERED",
    "EXPLORATORY", "NOT_RUN",
)  # fmt: skip


R1Tables = Mapping[str, pd.DataFrame]  # name in reports/, without its suffix -> table
R2Tables = Mapping[str, pd.DataFrame]  # the same, of either part of R2


class ReadmeError(ValueError):
    """README.md lacks a marker, or has one that nobody fills."""


def update(
    path: str | Path,
    *,
    cells: pd.DataFrame,
    verdicts: pd.DataFrame,
    r1: R1Tables,
    r2: R2Tables | None = None,
    r2b: R2Tables | None = None,
) -> bool:
    """Fill the blocks of a README in place; True when it changed."""
    text = Path(path).read_text(encoding="utf-8")
    filled = fill(text, blocks(cells, verdicts, r1, r2, r2b))
    if filled != text:
        write_text(path, filled)
    return filled != text


def blocks(
    cells: pd.DataFrame,
    verdicts: pd.DataFrame,
    r1: R1Tables,
    r2: R2Tables | None = None,
    r2b: R2Tables | None = None,
) -> dict[str, str]:
    """Name -> Markdown of every block. r2, r2b: None before any campaign of the part."""
    return {
        "rungs": rung_table(verdicts),
        "headline": headline(cells),
        "prize": prize(cells),
        "throughput": throughput(r1),
        "decode": readme_r2.decode(analysis_r2.empty_tables() if r2 is None else r2, cells),
        "matrix": readme_r2b.matrix(analysis_r2b.empty_tables() if r2b is None else r2b),
    }


def r1_tables(reports: str | Path) -> R1Tables:
    """The tables of R1 that the README reads, from the folder of the report; empty ones where a file is missing."""
    return _tables(reports, ("r1_production", "r1_causes"), analysis_r1.empty_tables())


def r2_tables(reports: str | Path) -> R2Tables:
    """The tables of R2 that the README reads, from the folder of the report; empty ones where a file is missing."""
    return _tables(reports, readme_r2.READ, analysis_r2.empty_tables())


def r2b_tables(reports: str | Path) -> R2Tables:
    """The same of R2b."""
    return _tables(reports, readme_r2b.READ, analysis_r2b.empty_tables())


def _tables(
    reports: str | Path, names: Iterable[str], empty: Mapping[str, pd.DataFrame]
) -> dict[str, pd.DataFrame]:
    paths = {name: Path(reports) / f"{name}.csv" for name in names}
    return {
        name: pd.read_csv(path) if path.is_file() else empty[name] for name, path in paths.items()
    }


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


def current(cells: pd.DataFrame) -> pd.DataFrame:
    """Each cell once: of two campaigns that hold it, one with the floor of its bytes, and else the later rung's.

    The experiments and variants of R1, and the shapes made for them, are no headline.
    """
    if cells.empty:
        return cells
    kept = _shown(cells)
    kept = kept.assign(_floor=kept["floor_us"].notna() if "floor_us" in kept else False)
    key = ["kernel", "format", "shape", "N", "K", "M", "regime"]
    kept = kept.sort_values(["_floor", "rung", "campaign"], kind="stable")
    kept = kept.drop_duplicates(key, keep="last").drop(columns="_floor")
    return kept.sort_values(["rung", "campaign"], kind="stable")


def _shown(cells: pd.DataFrame) -> pd.DataFrame:
    """Cells of the frozen shapes and of kernels that are no variant of an experiment."""
    if cells.empty:
        return cells
    made = cells["shape"].str.fullmatch(EXTRA_SHAPE)
    made |= cells["kernel"].str.startswith((CAUSE, "testbed/-", "qgemv_mx/", "qgemm_mx/"))
    return cells[~made.astype(bool)]


def headline(cells: pd.DataFrame) -> str:
    """How near each measured kernel comes to its size-matched floor at M = 1, over the shapes of the campaign."""
    cells = current(cells)
    shown = cells[
        (cells["regime"] == HEADLINE_REGIME)
        & (cells["M"] == 1)
        & (cells["correctness"] == "passed")
        & ~cells["role"].isin(["floor", "correctness_only"])
        & cells["time_us"].notna()
        & cells["floor_us"].notna()
    ]
    if shown.empty:
        return NO_CAMPAIGN
    sources = shown[["campaign", "device"]].drop_duplicates()
    named = "; ".join(f"`{c}` on {d}" for c, d in sources.itertuples(index=False))
    lines = [
        *_lines(f"Measured in {named}, cold L2, graph replay, M = 1:"),
        "",
        "| kernel | format | percent of the measured floor: geometric mean (lowest to highest shape) | shapes |",
        "|---|---|---|--:|",
    ]
    for (kernel, fmt), rows in shown.groupby(["kernel", "format"], sort=True):
        share = 100 * rows["floor_us"] / rows["time_us"]
        mean = float(np.exp(np.log(share).mean()))
        span = f"{mean:.3g} % ({share.min():.3g} to {share.max():.3g})"
        lines.append(f"| `{kernel}` | {fmt} | {span} | {len(rows)} |")
    if (shown["role"] == "testbed").any():
        lines += ["", "`testbed/full` is the instrument of the decomposition (R1), not a product."]
    elif not (shown["role"] == "product").any():
        lines += [
            "",
            "`naive_dequant` is a deliberately bad baseline: no 4-bit kernel of this project exists yet.",
        ]
    return "\n".join(lines)


def throughput(r1: R1Tables) -> str:
    """Where the throughput goes: speed of the production path over FP8, causes of the testbed's gap at M = 1."""
    own = r1["r1_production"]
    own = own[
        (own["kernel"] == PRODUCTION)
        & (own["over"] == "all")
        & (own["regime"] == HEADLINE_REGIME)
        & (own["against"] == CUBLASLT["fp8_e4m3"])
        & own["M"].isin(SHOWN_M)
    ]
    if own.empty:
        return NO_R1
    lines = [
        f"`{PRODUCTION}` in `{own['campaign'].iloc[0]}`, cold L2, graph replay, geometric mean over"
        f" {own['shapes'].max()} shapes:",
        "",
        "| M | MXFP4 over FP8 | of 1.88 | NVFP4 over FP8 | of 1.78 |",
        "|--:|--:|--:|--:|--:|",
    ]
    for m, rows in own.groupby("M", sort=True):
        parts = [str(m)]
        for fmt in ("mxfp4", "nvfp4"):
            row = rows[rows["format"] == fmt]
            parts += (
                [f"{row['speed'].iloc[0]:.2f}", f"{100 * row['realised'].iloc[0]:.0f} %"]
                if len(row)
                else ["-", "-"]
            )
        lines.append(f"| {' | '.join(parts)} |")
    causes = r1["r1_causes"]
    causes = causes[(causes["over"] == "frozen") & (causes["M"] == 1) & causes["share"].notna()]
    causes = causes[causes["kind"].isin(["term", "factor", "residual"])]
    if causes.empty:
        return "\n".join(lines)
    lines += [
        "",
        f"The time above the floor at M = 1, split by the testbed (MXFP4, mean of {int(causes['shapes'].max())} frozen"
        " shapes):",
        "",
        "| cause | share of the gap (95% interval) |",
        "|---|--:|",
    ]
    for row in causes.sort_values(["share", "cause"], ascending=[False, True]).to_dict("records"):
        name = row["cause"].replace("_", " ")
        point, low, high = (
            plain(100 * row[f"share{end}"], 1) for end in ("", "_ci_low", "_ci_high")
        )
        lines.append(f"| {name} | {point} % ({low} to {high}) |")
    if (causes["share_ci_high"] < 0).any():
        lines += [
            "",
            "A negative share: the kernel is faster with that part, or pays less for it than the floor does.",
        ]
    return "\n".join([*lines, *_closures(r1["r1_causes"])])


def _closures(causes: pd.DataFrame) -> list[str]:
    """What the two closures leave of the gap over all cells, against the limit."""
    cells = causes[(causes["over"] == "cell") & causes["share"].notna()]
    parts = []
    for cause, what in (
        (
            "residual",
            "with all parts removed the kernel comes within {limit} of the gap to the floor in {close} cells",
        ),
        ("counters", "the time that profiler counters predict is so in {close}"),
    ):
        own = cells[cells["cause"] == cause]
        if len(own):
            inside = (own["share_ci_low"] >= -CLOSES) & (own["share_ci_high"] <= CLOSES)
            close, left = f"{int(inside.sum())} of {len(own)}", own["share"]
            said = what.format(limit=f"{100 * CLOSES:.0f} %", close=close)
            parts.append(f"{said} (rest {100 * left.min():.0f} to {100 * left.max():.0f} %)")
    return ["", *_lines(f"Does the sum close? Of all cells, {'; '.join(parts)}.")] if parts else []


def _lines(text: str) -> list[str]:
    """A paragraph in lines that the page allows."""
    return textwrap.wrap(text, LINE, break_long_words=False, break_on_hyphens=False)


def prize(cells: pd.DataFrame) -> str:
    """How much faster fewer bytes make a call at M = 1: by bytes, by measured floors, and by cuBLASLt's times."""
    cells = _shown(cells)
    timed = cells[
        (cells["regime"] == HEADLINE_REGIME) & (cells["M"] == 1) & cells["time_us"].notna()
    ]
    by_kernel = {key: rows for key, rows in timed.groupby(["kernel", "format"])}
    if not any(kernel == FLOOR for kernel, _ in by_kernel):
        return NO_CAMPAIGN
    shapes = timed.loc[timed["kernel"] == FLOOR, "shape"].nunique()
    lines = [
        f"M = 1, geometric mean (lowest to highest of {shapes} shapes):",
        "",
        "| times as fast | by bytes | by measured floors | by calls of cuBLASLt |",
        "|---|--:|--:|--:|",
    ]
    for fast, slow in STEPS:
        floors = _times_as_fast(by_kernel.get((FLOOR, fast)), by_kernel.get((FLOOR, slow)))
        calls = _times_as_fast(
            by_kernel.get((CUBLASLT.get(fast), fast)), by_kernel.get((CUBLASLT[slow], slow))
        )
        by_bytes = bytes_per_weight(slow) / bytes_per_weight(fast)
        lines.append(
            f"| {NAMES[fast]} against {NAMES[slow]} | {by_bytes:.2f} | {floors} | {calls} |"
        )
    return "\n".join(lines)


def _times_as_fast(fast: pd.DataFrame | None, slow: pd.DataFrame | None) -> str:
    """Geometric mean over the shapes that both have, with the lowest and the highest; a dash where there is none.

    Both times are of one campaign, because a session's clock and memory are its own: the one with most shapes, and of
    several the latest.
    """
    if fast is None or slow is None:
        return "-"
    both = fast.merge(slow, on=["rung", "campaign", "shape"], suffixes=("_fast", "_slow"))
    if both.empty:
        return "-"
    sizes = both.groupby(["campaign"]).agg(shapes=("shape", "size"), rung=("rung", "first"))
    chosen = sizes.reset_index().sort_values(["shapes", "rung", "campaign"])["campaign"].iloc[-1]
    both = both[both["campaign"] == chosen]
    ratio = both["time_us_slow"] / both["time_us_fast"]
    mean = float(np.exp(np.log(ratio).mean()))
    return f"{mean:.2f} ({ratio.min():.2f} to {ratio.max():.2f})"
