"""Campaigns on disk: written once, named by their content, and never changed.

`data/campaigns/<id>/` holds campaign.json, samples.parquet, telemetry.parquet and SHA256SUMS.json;
the id ends in the digest of the last. `PartialCampaign` takes the legs, `finalise` makes the
campaign, `load` reads it, `verify` doubts it. The data dictionary is data/README.md.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import rfc8785

from lab.files import sha256
from lab.journal import Attempt, Contents, PartialCampaign, check_point, partial_key, utc_now
from lab.rows import (
    INVALID_BY_DESIGN,
    AttemptRow,
    CampaignError,
    CellRow,
    CellTime,
    CheckRow,
    Interval,
    Tuning,
    name_of,
    to_json,
)
from lab.samples import (
    SAMPLES_SCHEMA,
    TELEMETRY_SCHEMA,
    block_times,
    cell_keys,
    cell_times,
    dropped_blocks,
    leg_summary,
    read_table,
    telemetry_summary,
    write_table,
)
from lab.schema import campaign_problems
from lab.seal import CAMPAIGN, FILES, HASHED, SAMPLES, SUMS, TELEMETRY, campaign_id
from lab.seal import problems as _hash_problems
from lab.seal import read_json as _read_json

SCHEMA_VERSION = 1
MAX_BYTES = 16 * 1024 * 1024
FLOOR_REGIME = "cold_graph"
ID_PATTERN = re.compile(r"(r[0-3]|r2b)-([a-z0-9][a-z0-9-]*)-(\d{8})-([0-9a-f]{12})")
# Times are recomputed with the library at hand; its last digits may differ from those of the machine that measured.
TIME_TOLERANCE = 1e-9


@dataclass(frozen=True, eq=False)
class Campaign:
    """One campaign. `samples` and `telemetry` are the tables of lab.samples; the rest is campaign.json."""

    rung: str
    kind: str
    created_utc: str
    device: Mapping[str, Any]
    software: Mapping[str, str]
    source: Mapping[str, Any]
    prereg_head: str | None
    protocol_sha256: str
    seed: int
    cubins: tuple[Mapping[str, Any], ...]
    constants: Mapping[str, Mapping[str, Any]]
    cells: tuple[CellRow, ...]
    checks: tuple[CheckRow, ...]
    attempts: tuple[AttemptRow, ...]
    counters: tuple[Mapping[str, Any], ...]
    settings_untouched: bool
    samples: pd.DataFrame
    telemetry: pd.DataFrame

    def __post_init__(self) -> None:
        problems = check_point(self.cells, self.checks, self.samples)
        timed = {c.key for c in self.cells if c.time is not None}
        if not problems:
            untaken = sorted(timed - cell_keys(self.samples))
            problems += [f"{name_of(key)} has a time but no samples" for key in untaken]
        if problems:
            raise CampaignError("; ".join(problems))

    def to_json(self) -> dict[str, Any]:
        """The value of campaign.json, keys in the order of the data dictionary."""
        return {
            "schema_version": SCHEMA_VERSION,
            **{name: _copy(getattr(self, name)) for name in _PLAIN_KEYS},
            "cells": [to_json(c) for c in self.cells],
            "checks": [to_json(c) for c in self.checks],
            "attempts": [to_json(a) for a in self.attempts],
            "counters": _copy(list(self.counters)),
            "settings_untouched": self.settings_untouched,
        }

    @classmethod
    def from_json(cls, value: Any, samples: pd.DataFrame, telemetry: pd.DataFrame) -> Campaign:
        """The inverse of `to_json`. Raises CampaignError on unknown, missing or impossible parts."""
        wanted = {"schema_version", *_PLAIN_KEYS, *_ROW_KEYS, "settings_untouched"}
        if not isinstance(value, dict) or set(value) != wanted:
            odd = sorted(set(value) ^ wanted) if isinstance(value, dict) else type(value).__name__
            raise CampaignError(f"{CAMPAIGN} has unknown or missing keys: {odd}")
        if value["schema_version"] != SCHEMA_VERSION:
            raise CampaignError(
                f"{CAMPAIGN}: schema_version {value['schema_version']!r} is not {SCHEMA_VERSION}"
            )
        plain = {name: value[name] for name in _PLAIN_KEYS}
        return cls(
            **{**plain, "cubins": tuple(plain["cubins"])},
            cells=tuple(CellRow.from_json(c) for c in value["cells"]),
            checks=tuple(CheckRow.from_json(c) for c in value["checks"]),
            attempts=tuple(AttemptRow.from_json(a) for a in value["attempts"]),
            counters=tuple(value["counters"]),
            settings_untouched=value["settings_untouched"],
            samples=samples,
            telemetry=telemetry,
        )


_ROW_KEYS = ("cells", "checks", "attempts", "counters")
_PLAIN_KEYS = (
    "rung", "kind", "created_utc", "device", "software", "source", "prereg_head", "protocol_sha256", "seed",
    "cubins", "constants",
)  # fmt: skip


# ---------------------------------------------------------------- making a campaign


def fill_times(cells: Iterable[CellRow], samples: pd.DataFrame) -> tuple[CellRow, ...]:
    """The same cells with time and floor as the samples give them.

    The floor of a cell is the cold time of the stream (role `floor`) that reads as many bytes: of
    its own format, N, K and M where that was measured, else of its format, N and K, else of any;
    the smallest M of those. A cell that is wrong by design gets neither, whatever its legs say.
    """
    times = cell_times(samples)
    timed = [
        replace(cell, time=None if _wrong_by_design(cell) else times.get(cell.key), floor=None)
        for cell in cells
    ]
    floors: dict[int, list[CellRow]] = {}
    for cell in timed:
        if cell.role == "floor" and cell.regime == FLOOR_REGIME and cell.time is not None:
            floors.setdefault(cell.weight_bytes, []).append(cell)
    return tuple(
        cell
        if _wrong_by_design(cell)
        else replace(cell, floor=_floor(cell, floors.get(cell.weight_bytes, [])))
        for cell in timed
    )


def _wrong_by_design(cell: CellRow) -> bool:
    return cell.correctness == INVALID_BY_DESIGN


def _floor(cell: CellRow, floors: list[CellRow]) -> Interval | None:
    if not floors:
        return None

    def distance(floor: CellRow) -> tuple[bool, bool, int]:
        same_weight = (floor.format, floor.N, floor.K) == (cell.format, cell.N, cell.K)
        return (not (same_weight and floor.M == cell.M), not same_weight, floor.M)

    time = min(floors, key=distance).time
    assert time is not None
    return Interval(time.time_us, time.ci_low_us, time.ci_high_us)


def finalise(
    partial: PartialCampaign,
    data_dir: Path,
    settings_untouched: bool = True,
    max_bytes: int = MAX_BYTES,
) -> Path:
    """Make `data_dir/campaigns/<id>` of a journal and remove the journal. Returns the campaign's folder.

    The campaign is written under a temporary name and renamed, so that nobody meets half of one. An
    existing campaign is never written over. Raises CampaignError, and keeps the journal, when a part
    is impossible or the size is over the limit.
    """
    contents: Contents = partial.contents()
    campaign = Campaign(
        **{**contents.header, "cubins": tuple(contents.header["cubins"])},
        constants=contents.constants,
        cells=fill_times(contents.cells, contents.samples),
        checks=contents.checks,
        attempts=contents.attempts,
        counters=contents.counters,
        settings_untouched=settings_untouched,
        samples=contents.samples,
        telemetry=contents.telemetry,
    )
    target = write(campaign, data_dir, max_bytes)
    partial.close()
    shutil.rmtree(partial.folder)
    return target


def write(campaign: Campaign, data_dir: Path, max_bytes: int = MAX_BYTES) -> Path:
    """Write a campaign once; the folder's name is its id. The same campaign again is left alone."""
    value = campaign.to_json()
    if problems := campaign_problems(value):
        raise CampaignError(f"{CAMPAIGN}: " + "; ".join(problems[:10]))
    campaigns = Path(data_dir) / "campaigns"
    campaigns.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=campaigns, prefix=".writing-"))
    try:
        scratch.chmod(0o755)
        (scratch / CAMPAIGN).write_text(_lines(value), encoding="utf-8")
        write_table(campaign.samples, SAMPLES_SCHEMA, scratch / SAMPLES)
        write_table(campaign.telemetry, TELEMETRY_SCHEMA, scratch / TELEMETRY)
        sums = {name: sha256(scratch / name) for name in HASHED}
        (scratch / SUMS).write_bytes(rfc8785.dumps(sums))
        size = sum((scratch / name).stat().st_size for name in FILES)
        if size > max_bytes:
            raise CampaignError(
                f"the campaign is {size} bytes, over the limit of {max_bytes} bytes"
            )
        return place(scratch, campaigns / campaign_id(value, sums))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def place(scratch: Path, target: Path) -> Path:
    """Rename a complete campaign folder to its place.

    The same campaign there already is left alone; other content under that name, or a link, is a CampaignError.
    """
    # Asked before `exists`, which follows a link and sees nothing where a dangling one stands.
    if target.is_symlink():
        raise CampaignError(
            f"{target.name} is a link, and a campaign is a folder of files: remove the link first"
        )
    if target.exists():
        there = {name: sha256(target / name) for name in FILES if (target / name).is_file()}
        if there == {name: sha256(scratch / name) for name in FILES}:
            return target
        raise CampaignError(
            f"{target.name} exists already with other content: a campaign is never overwritten"
        )
    os.replace(scratch, target)
    return target


# ---------------------------------------------------------------- reading and doubting one


def load(campaign_dir: Path) -> Campaign:
    """Read a campaign whose bytes match its sums and its name. Raises CampaignError with every reason otherwise."""
    folder = Path(campaign_dir)
    if problems := _hash_problems(folder):
        raise CampaignError(f"{folder.name}: " + "; ".join(problems))
    value = _read_json(folder / CAMPAIGN)
    try:
        return Campaign.from_json(
            value,
            read_table(folder / SAMPLES, SAMPLES_SCHEMA),
            read_table(folder / TELEMETRY, TELEMETRY_SCHEMA),
        )
    except CampaignError as error:
        raise CampaignError(f"{folder.name}: {error}") from None


def verify(campaign_dir: Path) -> list[str]:
    """Everything that speaks against a campaign's integrity, one sentence each; empty when nothing does.

    Files and hashes, the id, the closed schema, impossible rows, and the times and floors against the
    samples. It does not stop at the first: a campaign whose sums were redone still shows what was
    edited.
    """
    folder = Path(campaign_dir)
    problems = _hash_problems(folder)
    if not all((folder / name).is_file() for name in HASHED):
        return problems
    try:
        value = _read_json(folder / CAMPAIGN)
        samples = read_table(folder / SAMPLES, SAMPLES_SCHEMA)
        telemetry = read_table(folder / TELEMETRY, TELEMETRY_SCHEMA)
    except CampaignError as error:
        return [*problems, str(error)]
    if broken := campaign_problems(value):
        return [*problems, *(f"{CAMPAIGN} {text}" for text in broken)]
    try:
        campaign = Campaign.from_json(value, samples, telemetry)
    except CampaignError as error:
        return [*problems, str(error)]
    return problems + _time_problems(campaign)


def invalid(campaign: Campaign) -> list[str]:
    """What makes an untampered campaign's data invalid (METHOD 3.7, 3.9), one sentence each."""
    from lab.statistics import too_many_dropped

    problems = []
    for row in dropped_blocks(campaign.samples).itertuples(index=False):
        if why := too_many_dropped(row.dropped, row.blocks):
            problems.append(f"{row.shape} {row.N}x{row.K} M={row.M} {row.regime}: {why}")
    problems += [
        f"{cell} failed its correctness checks"
        for cell in campaign.cells
        if cell.correctness == "failed"
    ]
    if not campaign.settings_untouched:
        problems.append("the device's settings were changed")
    return problems


def _time_problems(campaign: Campaign) -> list[str]:
    problems = []
    for cell, true in zip(
        campaign.cells, fill_times(campaign.cells, campaign.samples), strict=True
    ):
        for name in ("time", "floor"):
            said, found = getattr(cell, name), getattr(true, name)
            if not _same(said, found):
                problems.append(f"{cell}: {name} is {said}, but the samples give {found}")
    return problems


def _same(said: Interval | None, found: Interval | None) -> bool:
    if said is None or found is None:
        return said is found
    same = all(
        math.isclose(getattr(said, name), getattr(found, name), rel_tol=TIME_TOLERANCE)
        for name in ("time_us", "ci_low_us", "ci_high_us")
    )
    return same and getattr(said, "n_blocks", None) == getattr(found, "n_blocks", None)


# ---------------------------------------------------------------- the shelf


def list_campaigns(data_dir: Path) -> list[Path]:
    """Every campaign folder under `data_dir/campaigns`, sorted by name; unfinished writes (`.writing-*`) left out."""
    campaigns = Path(data_dir) / "campaigns"
    if not campaigns.is_dir():
        return []
    return sorted(p for p in campaigns.iterdir() if p.is_dir() and not p.name.startswith("."))


def newest(
    data_dir: Path,
    rung: str,
    device_uuid: str | None = None,
    cubins: Collection[str] | None = None,
    kind: str = "campaign",
) -> Path | None:
    """The newest campaign of a rung by created_utc, or None.

    `cubins` is a set of SHA-256: only a campaign that loaded exactly those counts. Raises
    CampaignError on an unreadable campaign.
    """
    found = []
    for folder in list_campaigns(data_dir):
        value = _read_json(folder / CAMPAIGN)
        if value["rung"] != rung or value["kind"] != kind:
            continue
        if device_uuid is not None and value["device"]["uuid"] != device_uuid:
            continue
        if cubins is not None and {c["sha256"] for c in value["cubins"]} != set(cubins):
            continue
        found.append((value["created_utc"], folder.name, folder))
    return max(found)[2] if found else None


# ---------------------------------------------------------------- JSON


def _lines(value: Mapping[str, Any]) -> str:
    # One row a line: campaigns are read by people and compared by git. Infinity and NaN are refused.
    parts = []
    for key, part in value.items():
        if isinstance(part, list) and part:
            rows = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in part)
            parts.append(f" {json.dumps(key)}: [\n{rows}\n ]")
        else:
            text = json.dumps(part, allow_nan=False, indent=1).replace("\n", "\n ")
            parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


__all__ = [
    "MAX_BYTES",
    "Attempt",
    "AttemptRow",
    "Campaign",
    "CampaignError",
    "CellRow",
    "CellTime",
    "CheckRow",
    "Interval",
    "PartialCampaign",
    "Tuning",
    "block_times",
    "campaign_id",
    "cell_times",
    "fill_times",
    "finalise",
    "invalid",
    "leg_summary",
    "list_campaigns",
    "load",
    "newest",
    "partial_key",
    "place",
    "telemetry_summary",
    "utc_now",
    "verify",
    "write",
]
