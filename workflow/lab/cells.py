"""cells.csv: one row per measured cell, with its size-matched floor beside it.

A testbed variant that is wrong by design is no cell of performance and is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from lab import records
from lab.files import write_text
from lab.rows import INVALID_BY_DESIGN, CampaignError

KEY = ("campaign", "rung", "kernel", "format", "shape", "N", "K", "M", "regime")
NUMBERS = ("time_us", "ci_low_us", "ci_high_us", "floor_us")
COLUMNS = (
    "campaign", "device", "rung", "kernel", "role", "format", "shape", "N", "K", "M", "regime",
    *NUMBERS, "correctness",
)  # fmt: skip
SIGNIFICANT_DIGITS = 6


def table(
    campaign_dirs: Iterable[str | Path], verify: Callable[[Path], list[str]] = records.verify
) -> pd.DataFrame:
    """The cells of some campaigns, sorted, with COLUMNS; times in microseconds, NaN where a cell has none.

    Raises CampaignError for a campaign that does not verify, ValueError naming the cell when one occurs twice.
    """
    folders = [Path(folder) for folder in campaign_dirs]
    for folder in folders:
        if problems := verify(folder):
            more = f" (and {len(problems) - 1} more reasons)" if problems[1:] else ""
            raise CampaignError(f"{folder.name} does not verify: {problems[0]}{more}")
    rows = [row for folder in folders for row in _rows(folder)]
    frame = pd.DataFrame(rows, columns=list(COLUMNS)).astype(dict.fromkeys(NUMBERS, float))
    if (twice := frame.duplicated(list(KEY))).any():
        cell = frame.loc[twice, list(KEY)].iloc[0].to_dict()
        raise ValueError(f"cell {cell} occurs twice")
    return frame.sort_values(list(KEY), kind="stable", ignore_index=True)


def to_csv(frame: pd.DataFrame) -> str:
    """The CSV text: six significant digits, nothing where there is no number, so that replays agree byte for byte."""
    out = frame.copy()
    for column in NUMBERS:
        out[column] = [
            "" if math.isnan(value) else f"{value:.{SIGNIFICANT_DIGITS}g}"
            for value in frame[column]
        ]
    return out.to_csv(index=False, lineterminator="\n")


def write(frame: pd.DataFrame, path: str | Path) -> None:
    """Write cells.csv."""
    write_text(path, to_csv(frame))


def read(path: str | Path) -> pd.DataFrame:
    """Read cells.csv back, with the types that `table` gives."""
    return pd.read_csv(path, dtype=dict.fromkeys(NUMBERS, float))


def _rows(folder: Path) -> list[dict[str, Any]]:
    campaign = json.loads((folder / "campaign.json").read_text())
    rows = []
    for cell in campaign["cells"]:
        if cell["correctness"] == INVALID_BY_DESIGN:
            continue
        time, floor = cell["time"] or {}, cell["floor"] or {}
        rows.append(
            {
                "campaign": folder.name,
                "device": campaign["device"]["name"],
                "rung": campaign["rung"],
                **{
                    key: cell[key]
                    for key in ("kernel", "role", "format", "shape", "N", "K", "M", "regime")
                },
                "time_us": time.get("time_us"),
                "ci_low_us": time.get("ci_low_us"),
                "ci_high_us": time.get("ci_high_us"),
                "floor_us": floor.get("time_us"),
                "correctness": cell["correctness"],
            }
        )
    return rows
