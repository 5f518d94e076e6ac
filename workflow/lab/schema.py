"""The closed schema of campaign.json: workflow/schemas/campaign.schema.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from lab.rows import CampaignError

PATH = Path(__file__).resolve().parents[1] / "schemas" / "campaign.schema.json"
HEADER_KEYS = (
    "rung", "kind", "created_utc", "device", "software", "source", "prereg_head", "protocol_sha256",
    "seed", "cubins",
)  # fmt: skip


@cache
def campaign_schema() -> dict[str, Any]:
    """The schema itself."""
    return json.loads(PATH.read_text())


def campaign_problems(value: Any) -> list[str]:
    """Where a campaign.json value breaks the schema, one sentence each with the place; empty when nowhere."""
    return _problems(campaign_schema(), value)


def check_header(header: Mapping[str, Any]) -> None:
    """Refuse a campaign's header that the schema would refuse later: before the work, not after it."""
    _check_part("campaign header", header, HEADER_KEYS)


def check_constants(constants: Mapping[str, Any]) -> None:
    """Refuse constants that the schema of a campaign does not allow."""
    _check_part("constants", {"constants": constants}, ("constants",))


def check_counters(counters: list[Any]) -> None:
    """Refuse profiler rows that the schema of a campaign does not allow."""
    _check_part("counters", {"counters": counters}, ("counters",))


def _check_part(where: str, value: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    whole = campaign_schema()
    schema = {
        "$defs": whole["$defs"],
        "type": "object",
        "additionalProperties": False,
        "required": list(keys),
        "properties": {key: whole["properties"][key] for key in keys},
    }
    if problems := _problems(schema, dict(value)):
        raise CampaignError(f"{where}: " + "; ".join(problems))


def _problems(schema: dict[str, Any], value: Any) -> list[str]:
    errors = Draft202012Validator(schema).iter_errors(value)
    return [f"{error.json_path}: {_short(error.message)}" for error in errors]


def _short(message: str, most: int = 300) -> str:
    return message if len(message) <= most else message[:most] + "..."
