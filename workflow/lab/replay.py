"""The campaigns that a report is made from: the rungs' pointer files, followed to what they point at."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

from lab import clocks, files, samples, seal, select, sittings, statistics
from lab.records import CAMPAIGN, SAMPLES, TELEMETRY
from lab.rows import KEY_COLUMNS, CampaignError
from qgemm_mx.formats import DENSE_BYTES, FORMATS, bytes_per_weight


def chosen_campaigns(pointers: Iterable[str | Path], repo: str | Path = ".") -> list[Path]:
    """Folders of the campaigns that pointer files name, in the order given; a rung without one is left out.

    Raises CampaignError for one whose bytes are not those of its sums and its name.
    """
    ids = [files.read_json(pointer)["campaign"] for pointer in pointers]
    folders = [Path(repo, select.CAMPAIGNS, campaign) for campaign in ids if campaign is not None]
    for folder in folders:
        if problems := seal.problems(folder):
            raise CampaignError(f"{folder.name} is not to be used: " + "; ".join(problems))
    return folders


def weight_sizes() -> dict[str, float]:
    """Bytes that a weight takes in each format, scales included."""
    return {name: bytes_per_weight(name) for name in (*FORMATS, *DENSE_BYTES)}


def described(folder: str | Path) -> dict[str, Any]:
    """campaign.json with its `id`, and what the report prints of its tables and attempts.

    That is `legs`, `telemetry`, `a_a`, `clocks` (lab.clocks), `sittings` and `longest_pause_s` (lab.sittings).
    """
    folder = Path(folder)
    campaign = files.read_json(folder / CAMPAIGN)
    legs = samples.read_table(folder / SAMPLES, samples.SAMPLES_SCHEMA)
    telemetry = samples.read_table(folder / TELEMETRY, samples.TELEMETRY_SCHEMA)
    return {
        "id": folder.name,
        **campaign,
        "legs": samples.leg_summary(legs),
        "telemetry": samples.telemetry_summary(telemetry),
        "a_a": twins(legs),
        "clocks": clocks.steadiness(legs, telemetry),
        "sittings": sittings.sittings(campaign["attempts"]),
        "longest_pause_s": sittings.longest_pause(telemetry),
    }


def twins(legs: pd.DataFrame) -> dict[str, Any] | None:
    """How often an arm seems to differ from its own A/A duplicate, over all points; None where no arm has one.

    `points` compared by block-paired 95% intervals, `differ` of them exclude a ratio of 1, `low` and `high` the 95%
    range of that number when each point errs independently with chance 5% (binomial), `median` and `largest`
    |ratio - 1|, the latter of `kernel`, `format`, `regime`, `shape` and `M`; `kernels` are all that had a duplicate.
    """
    blocks = samples.block_times(legs)
    doubled = blocks[blocks["arm"].str.endswith(samples.DUPLICATE_SUFFIX)]
    key = list(KEY_COLUMNS)
    both = blocks[~blocks.index.isin(doubled.index)].merge(doubled, on=[*key, "block"])
    found = []
    for cell, pair in both.groupby(key, sort=True):
        if len(pair) < 2:
            continue
        arm, twin = pair["log_time_x"], pair["log_time_y"]
        off = abs(statistics.paired_log_ratio(arm, twin).value - 1)
        found.append(
            (off, bool(statistics.a_a_differs(arm, twin)), dict(zip(key, cell, strict=True)))
        )
    if not found:
        return None
    offs = [off for off, _, _ in found]
    largest, _, cell = max(found, key=lambda row: row[0])
    chances = special.bdtr(np.arange(len(found) + 1), len(found), statistics.ALPHA)
    low, high = np.searchsorted(chances, [statistics.ALPHA / 2, 1 - statistics.ALPHA / 2])
    return {
        **{k: cell[k] for k in ("kernel", "format", "regime", "shape", "M")},
        "kernels": sorted({cell["kernel"] for _, _, cell in found}),
        "points": len(found),
        "differ": sum(differs for _, differs, _ in found),
        "low": int(low),
        "high": int(high),
        "median": float(np.median(offs)),
        "largest": float(largest),
    }
