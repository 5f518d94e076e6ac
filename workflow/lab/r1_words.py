"""Numbers of R1 as the report says them, and its prose and columns (templates/words_r1.json)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lab.page import BLANK, absent, number, with_interval
from lab.statistics import Estimate

WORDS = Path(__file__).parent / "templates" / "words_r1.json"
#: The M at which the gap is split.
SUMMARY_M = (1, 16, 64)


def words() -> dict[str, Any]:
    """Prose and columns of the section."""
    return json.loads(WORDS.read_text(encoding="utf-8"))


def _value(estimate: Estimate | None, scale: float = 1.0, digits: int = 3) -> tuple[str, str]:
    if estimate is None:
        return BLANK, BLANK
    low, high = sorted(scale * end for end in estimate.interval())
    point = scale * estimate.value
    if low == high:
        return number(point, digits), BLANK
    return with_interval(point, low, high, digits)


def observed(estimate: Estimate | None, scale: float = 1.0, digits: int = 3, unit: str = "") -> str:
    """`12.3 % (11.9 to 12.7)`: a value with its 95% interval; a dash where there is none."""
    point, interval = _value(estimate, scale, digits)
    if point == BLANK:
        return BLANK
    return f"{point}{unit}" + ("" if interval == BLANK else f" ({interval})")


def share(estimate: Estimate | None) -> str:
    """A share of the gap in percent with its interval: one decimal, up to three where that tells them apart."""
    if estimate is None:
        return BLANK
    low, high = estimate.interval()
    parts = (
        [100 * estimate.value] if low == high else [100 * v for v in (estimate.value, low, high)]
    )
    places = 1
    while places < 3 and len({plain(v, places) for v in parts}) < len(set(parts)):
        places += 1
    point, *ends = (plain(v, places) for v in parts)
    return f"{point} %" + (f" ({ends[0]} to {ends[1]})" if ends else "")


def plain(value: float, places: int) -> str:
    """Fixed decimals, and no minus before a zero."""
    text = f"{value:.{places}f}"
    return text.removeprefix("-") if not float(text) else text


def spread(low: Any, high: Any) -> str:
    """Lowest to highest."""
    return BLANK if absent(low) or absent(high) else f"{number(low)} to {number(high)}"


def three(row: Mapping[str, Any], value: str, low: str, high: str, digits: int = 3) -> str:
    """The value of three columns with the interval of the other two."""
    if absent(row[value]):
        return BLANK
    if row[low] == row[high]:
        return number(row[value], digits)
    point, interval = with_interval(row[value], row[low], row[high], digits)
    return f"{point} ({interval})"


def percent(value: Any) -> str:
    """A fraction as whole percent."""
    return BLANK if absent(value) else f"{plain(100 * value, 0)} %"


def count(n: int, one: str, many: str = "") -> str:
    """`1 shape`, `6 shapes`."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def listed(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def sign(estimate: Estimate | None) -> str:
    """negative or positive where the 95% interval excludes 0, else undecided."""
    if estimate is None:
        return "undecided"
    low, high = estimate.interval()
    return "negative" if high < 0 else "positive" if low > 0 else "undecided"


def pick(frame: pd.DataFrame, **where: Any) -> dict[str, Any] | None:
    """The first row in which every named column has its value, or None."""
    for name, value in where.items():
        frame = frame[frame[name] == value]
    return None if frame.empty else frame.iloc[0].to_dict()


def us(estimate: Estimate | None) -> str:
    """A time without its interval."""
    return BLANK if estimate is None else number(estimate.value)


def constant(value: Mapping[str, Any] | None) -> str:
    """A constant of the campaign with its interval."""
    if value is None:
        return BLANK
    if absent(value["ci_low"]) or value["ci_low"] == value["ci_high"]:
        return number(value["value"])
    point, interval = with_interval(value["value"], value["ci_low"], value["ci_high"], 3)
    return f"{point} ({interval})"
