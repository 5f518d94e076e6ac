"""The seal of a campaign folder: its four files, their hashes, and the name that follows from them.

Checking it reads bytes alone, no row: cheap enough for whoever only wants to use a campaign.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rfc8785

from lab.files import sha256
from lab.rows import CampaignError

CAMPAIGN, SAMPLES, TELEMETRY, SUMS = (
    "campaign.json", "samples.parquet", "telemetry.parquet", "SHA256SUMS.json",
)  # fmt: skip
HASHED = (CAMPAIGN, SAMPLES, TELEMETRY)
FILES = (*HASHED, SUMS)


def problems(folder: Path) -> list[str]:
    """Where a folder is not the campaign that its name and its sums say, one sentence each; empty when nowhere."""
    folder = Path(folder)
    if folder.is_symlink():
        return [f"{folder.name} is a link, not a folder"]
    if not folder.is_dir():
        return [f"{folder.name} is no folder"]
    found = {path.name for path in folder.iterdir()}
    wrong = [f"{name} is missing" for name in FILES if name not in found]
    wrong += [f"{name} does not belong to a campaign" for name in sorted(found - set(FILES))]
    present = sorted(found & set(FILES))
    wrong += [f"{name} is a link, not a file" for name in present if (folder / name).is_symlink()]
    wrong += [f"{name} is no file" for name in present if not (folder / name).is_file()]
    if wrong:
        return wrong
    try:
        sums = read_json(folder / SUMS)
        value = read_json(folder / CAMPAIGN)
        if not isinstance(sums, dict) or set(sums) != set(HASHED):
            return [f"{SUMS} does not list exactly {', '.join(HASHED)}"]
        for name in HASHED:
            if (actual := sha256(folder / name)) != sums[name]:
                wrong.append(f"{name} has SHA-256 {actual}, {SUMS} says {sums[name]}")
        right = campaign_id(value, sums)
    except CampaignError as error:
        return [*wrong, str(error)]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return [*wrong, f"{CAMPAIGN} lacks what the id is made of: {error!r}"]
    if folder.name != right:
        wrong.append(f"the folder is named {folder.name}, its content gives {right}")
    return wrong


def campaign_id(value: Mapping[str, Any], sums: Mapping[str, str]) -> str:
    """`<rung>-<device>-<date>-<12 hex>`, the digest over the RFC 8785 bytes of SHA256SUMS."""
    slug = re.sub(r"[^a-z0-9]+", "-", value["device"]["name"].lower()).strip("-")
    date = value["created_utc"][:10].replace("-", "")
    digest = hashlib.sha256(rfc8785.dumps(dict(sums))).hexdigest()[:12]
    return f"{value['rung'].lower()}-{slug}-{date}-{digest}"


def read_json(path: Path) -> Any:
    """A JSON file without NaN, infinities or repeated keys. Raises CampaignError that names the file."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({n for n in names if names.count(n) > 1})
            raise CampaignError(f"{path.name}: the keys {twice} occur twice")
        return found

    def constant(name: str) -> Any:
        raise CampaignError(f"{path.name} holds {name}, which is no JSON number")

    try:
        return json.loads(
            path.read_text(encoding="utf-8"), object_pairs_hook=unique, parse_constant=constant
        )
    except (OSError, ValueError, RecursionError) as error:
        raise CampaignError(
            f"{path.parent.name}/{path.name} cannot be read as JSON: {error}"
        ) from None
