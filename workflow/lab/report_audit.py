"""Whether the committed report is what the data give: its tables, the numbers of README.md, and its rendered files.

Tables and README are made again and compared. Rendered files (the page, the figures) are held by
`reports/SHA256SUMS.json`, which the report rule writes last; that they are what the tables give is what a test shows,
which renders them again.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import rfc8785

from lab import (
    accuracy,
    analysis_r1,
    analysis_r2,
    analysis_r2b,
    campaign_audit,
    cells,
    readme,
    records,
    seal,
    select,
    verdicts,
)
from lab.analysis_r1 import Analysis
from lab.files import read_json, sha256, write_text
from lab.registry import Problem
from lab.rows import CampaignError
from lab.verdicts import Verdict

REPORTS = "reports"
VERDICTS, CELLS, SUMS = "verdicts.csv", "cells.csv", "SHA256SUMS.json"
README = "README.md"
AGAIN = "run snakemake --cores 2"
MOST_PARTS = 9  # of a row that name it: the numbers come after

#: Gives the analysis of a campaign of R1, of its folder and of that of the accuracy record.
Analyse = Callable[[Path, Path | None], Analysis]


def sums(reports: Path) -> dict[str, str]:
    """File (`/` between parts) -> SHA-256, of all of a report but the sums themselves; names with a dot are no part."""
    found = {}
    for path in sorted(Path(reports).rglob("*")):
        parts = path.relative_to(reports).parts
        if path.is_file() and not any(p.startswith(".") for p in parts) and parts != (SUMS,):
            found["/".join(parts)] = sha256(path)
    return found


def write_sums(reports: Path) -> None:
    """Write `reports/SHA256SUMS.json`: RFC 8785 bytes and a newline, names sorted."""
    write_text(Path(reports) / SUMS, rfc8785.dumps(sums(reports)).decode() + "\n")


def analysis(repo: Path, folder: Path, record: Path | None) -> Analysis:
    """Analyse a campaign of R1. CampaignError or AccuracyError where a record is not what it must be."""
    shapes = read_json(repo / "prereg" / "shapes.json")["shapes"]
    return analysis_r1.of_folder(folder, shapes, record)


def analysis_r2_of(repo: Path, folder: Path) -> analysis_r2.Analysis:
    """Analyse a campaign of R2. CampaignError where a record is not what it must be."""
    shapes = read_json(repo / "prereg" / "shapes.json")["shapes"]
    return analysis_r2.of_folder(folder, shapes)


def analysis_r2b_of(repo: Path, folder: Path) -> analysis_r2b.Analysis:
    """Analyse a campaign of R2b. CampaignError where a record is not what it must be."""
    shapes = read_json(repo / "prereg" / "shapes.json")["shapes"]
    return analysis_r2b.of_folder(folder, shapes)


def problems(
    repo: Path, fresh: Sequence[Verdict], shown: Path, analyse: Analyse | None = None
) -> list[Problem]:
    """Every difference between the committed report and the data; `shown` is its table of verdicts.

    `analyse` stands in for `analysis`, for a caller that has made one already.
    """
    reports, right = repo / REPORTS, verdicts.to_csv(fresh)
    found = [(shown, reason) for reason in _differs(shown, right)]
    cells_csv = reports / CELLS
    wrong = list(_cells_problems(repo, cells_csv))
    found += [(cells_csv, reason) for reason in wrong]
    make = analyse or partial(analysis, repo)
    split = _rung_problems(
        repo, analysis_r1, lambda folder: make(folder, accuracy.newest(repo / "data"))
    )
    split += _rung_problems(repo, analysis_r2, partial(analysis_r2_of, repo))
    split += _rung_problems(repo, analysis_r2b, partial(analysis_r2b_of, repo))
    found += split
    if not wrong and not split:
        found += [(repo / README, reason) for reason in _readme_problems(repo, right)]
    found += _sums_problems(reports)
    return [Problem("INVALID", _relative(path, repo), reason) for path, reason in found]


def _relative(path: Path, repo: Path) -> str:
    path = path.resolve()
    return path.relative_to(repo).as_posix() if path.is_relative_to(repo) else path.name


def _differs(path: Path, right: str) -> Iterator[str]:
    if not path.is_file():
        yield f"is missing: {AGAIN}"
        return
    there, wanted = path.read_text(encoding="utf-8").splitlines(), right.splitlines()
    shown, given = set(there), set(wanted)
    extra = [line for line in wanted if line not in shown]
    extra += [line for line in there if line not in given]
    if extra or there != wanted:
        line = next(n for n, (a, b) in enumerate(zip_longest(there, wanted), 1) if a != b)
        what = f"rows in another order, or repeated, from line {line} on"
        if extra:
            what = (
                f"{len(extra)} differing rows, first of {_row_name(extra[0])}; from line {line} on"
            )
        yield f"is not what the data give ({what}): {AGAIN}"
    elif path.read_bytes() != right.encode():
        yield f"has the rows that the data give, but other line ends: {AGAIN}"


def _row_name(row: str) -> str:
    """What a row of a table is about: its claim, or what it says after the campaign that all rows share."""
    campaign, *rest = row.split(",")
    known = records.ID_PATTERN.fullmatch(campaign) is not None
    return " ".join(part for part in rest[:MOST_PARTS] if part) if known and rest else campaign


def _cells_problems(repo: Path, path: Path) -> Iterator[str]:
    if not path.is_file():
        yield f"is missing: {AGAIN}"
        return
    try:
        named = sorted(set(cells.read(path)["campaign"]))
    except (ValueError, KeyError) as error:
        yield f"is no table of cells: {error}"
        return
    folders = {name: repo / campaign_audit.FOLDER / str(name) for name in named}
    if absent := [name for name, folder in folders.items() if not folder.is_dir()]:
        yield f"shows campaign {absent[0]}, which is not recorded"
        return
    if not named and campaign_audit.shelf_entries(repo):
        yield "shows no campaign, though one is recorded"
        return
    for rung in select.MEASURED:
        recorded = [campaign.id for campaign in select.recorded_campaigns(repo, rung)]
        if recorded and not set(recorded) & set(named):
            yield f"shows no campaign of {rung}, though {recorded[-1]} is recorded: {AGAIN}"
            return
    try:
        # Every campaign was verified, or has its reasons, before.
        right = cells.table(folders.values(), verify=lambda folder: [])
    except (CampaignError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        yield f"shows a campaign whose cells cannot be read: {error}"
        return
    yield from _differs(path, cells.to_csv(right))


def _rung_problems(
    repo: Path, of: ModuleType, analyse: Callable[[Path], Any]
) -> list[tuple[Path, str]]:
    """Where the tables of a rung are not what their campaign gives; `of`: lab.analysis_r1, _r2 or _r2b."""
    reports = repo / REPORTS
    names = [reports / f"{name}.csv" for name in of.empty_tables()]
    if absent := [path for path in names if not path.is_file()]:
        return [(path, f"is missing: {AGAIN}") for path in absent]
    try:
        shown = sorted({c for path in names for c in pd.read_csv(path)["campaign"].unique()})
        found = None
        if lost := sorted(_campaigns_of(repo, of.RUNG) - set(shown)):
            return [(path, f"does not show {lost[0]}, as {CELLS} does: {AGAIN}") for path in names]
        if shown:
            folder = repo / campaign_audit.FOLDER / str(shown[0])
            if len(shown) > 1 or not folder.is_dir():
                return [(names[0], f"shows campaign {', '.join(shown)}, which is not recorded")]
            found = analyse(folder)
        fresh = of.tables(found)
    except (CampaignError, accuracy.AccuracyError, OSError, ValueError, LookupError) as error:
        return [(names[0], f"cannot be made again: {error}")]
    return [
        (reports / f"{name}.csv", reason)
        for name, table in fresh.items()
        for reason in _differs(reports / f"{name}.csv", of.to_csv(table))
    ]


def _campaigns_of(repo: Path, rung: str) -> set[str]:
    """The recorded campaigns of a rung that the table of cells shows; none where it cannot be read."""
    recorded = {campaign.id for campaign in select.recorded_campaigns(repo, rung)}
    try:
        return recorded & set(cells.read(repo / REPORTS / CELLS)["campaign"])
    except (OSError, ValueError, KeyError):  # said of the table of cells
        return set()


def _readme_problems(repo: Path, right: str) -> Iterator[str]:
    path = repo / README
    if not path.is_file():
        yield "is missing"
        return
    text = path.read_text(encoding="utf-8")
    blocks = readme.blocks(
        cells.read(repo / REPORTS / CELLS),
        pd.read_csv(io.StringIO(right)),
        readme.r1_tables(repo / REPORTS),
        readme.r2_tables(repo / REPORTS),
        readme.r2b_tables(repo / REPORTS),
    )
    for name, content in blocks.items():
        if f"<!-- {name} -->\n{content}\n<!-- /{name} -->" not in text:
            yield f"its block {name!r} is not what the tables give: run snakemake --cores 1 readme"
    try:
        readme.fill(text, blocks)
    except readme.ReadmeError as error:
        yield str(error)


def _sums_problems(reports: Path) -> Iterator[tuple[Path, str]]:
    path = reports / SUMS
    if not path.is_file():
        yield path, f"is missing: {AGAIN}"
        return
    try:
        listed = seal.read_json(path)
    except CampaignError as error:
        yield path, str(error)
        return
    if not isinstance(listed, dict) or path.read_bytes() != rfc8785.dumps(listed) + b"\n":
        yield path, "is not the canonical list of names and sums"
        return
    there = sums(reports)
    for name in sorted(there.keys() | listed.keys()):
        if name not in there:
            yield reports / name, f"is missing: {AGAIN}"
        elif name not in listed:
            yield reports / name, f"is not in {SUMS}: the report rule did not write it"
        elif there[name] != listed[name]:
            yield reports / name, f"is not the file that the report rule wrote: {AGAIN}"
