"""The closed schema of campaign.json: workflow/schemas/campaign.schema.json."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import fastjsonschema
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend

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
    """Where a campaign.json value breaks the schema, one sentence each with the place; empty when nowhere.

    A compiled check goes first, several times as fast; what it refuses is asked again of the one that names places.
    """
    try:
        _compiled()(value)
    except fastjsonschema.JsonSchemaException:
        return _problems(campaign_schema(), value) or ["the value breaks the schema"]
    return []


@cache
def _compiled() -> Callable[[Any], Any]:
    # The compiler resolves references in place: it gets a schema of its own.
    return fastjsonschema.compile(copy.deepcopy(campaign_schema()), use_default=False)


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


def _validator(schema: dict[str, Any]) -> Any:
    """A validator that asks once for each property and value: the thousands of rows of a campaign repeat most."""
    asked = Draft202012Validator.VALIDATORS["properties"]
    named = cache(lambda ref: schema["$defs"][ref.removeprefix("#/$defs/")])
    sound: set[tuple[int, type, Any]] = set()

    def properties(validator: Any, parts: Any, value: Any, where: Any) -> Iterator[ValidationError]:
        if not isinstance(value, dict):
            return
        for name, part in parts.items():
            if name not in value:
                continue
            inside = value[name]
            plain = not isinstance(inside, dict | list)
            if plain and (id(part), type(inside), inside) in sound:
                continue
            errors = list(asked(validator, {name: part}, value, where))
            yield from errors
            if plain and not errors:
                sound.add((id(part), type(inside), inside))

    def ref(validator: Any, name: str, value: Any, _: Any) -> Iterator[ValidationError]:
        return validator.descend(value, named(name))

    return extend(Draft202012Validator, {"properties": properties, "$ref": ref})(schema)


def _problems(schema: dict[str, Any], value: Any) -> list[str]:
    errors = _validator(schema).iter_errors(value)
    return [f"{error.json_path}: {_short(error.message)}" for error in errors]


def _short(message: str, most: int = 300) -> str:
    return message if len(message) <= most else message[:most] + "..."
