"""The campaigns that a report is made from: the rungs' pointer files, followed to what they point at."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lab import files, samples, select
from lab.records import CAMPAIGN, SAMPLES, TELEMETRY
from qgemm_mx.formats import DENSE_BYTES, FORMATS, bytes_per_weight


def chosen_campaigns(pointers: Iterable[str | Path], repo: str | Path = ".") -> list[Path]:
    """Folders of the campaigns that pointer files name, in the order given; a rung without one is left out."""
    ids = [files.read_json(pointer)["campaign"] for pointer in pointers]
    return [Path(repo, select.CAMPAIGNS, campaign) for campaign in ids if campaign is not None]


def weight_sizes() -> dict[str, float]:
    """Bytes that a weight takes in each format, scales included."""
    return {name: bytes_per_weight(name) for name in (*FORMATS, *DENSE_BYTES)}


def described(folder: str | Path) -> dict[str, Any]:
    """campaign.json with its `id`, and summaries of its `legs` and its `telemetry`, as the report prints them."""
    folder = Path(folder)
    legs = samples.read_table(folder / SAMPLES, samples.SAMPLES_SCHEMA)
    telemetry = samples.read_table(folder / TELEMETRY, samples.TELEMETRY_SCHEMA)
    return {
        "id": folder.name,
        **files.read_json(folder / CAMPAIGN),
        "legs": samples.leg_summary(legs),
        "telemetry": samples.telemetry_summary(telemetry),
    }
