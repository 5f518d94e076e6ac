"""Values and tables as the report prints them: numbers for people, a dash where there is none, explained columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

BLANK = "–"

Row = dict[str, str]


def absent(value: Any) -> bool:
    """True for None, NaN and pandas' NA."""
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def number(value: Any, digits: int = 3) -> str:
    """A number for people: `digits` significant digits, an exponent outside 1e-4 to 1e9; a dash where there is none."""
    if absent(value):
        return BLANK
    value = float(f"{float(value):.{digits - 1}e}")  # rounded first: 9.999 has the digits of 10
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{digits - 1}e}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}"


def text(value: Any) -> str:
    """Any recorded value as one line."""
    if absent(value) or value == "":
        return BLANK
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value, 4)
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {text(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(text(v) for v in value)
    return str(value)


def span(low: Any, high: Any, digits: int = 3) -> str:
    """A range, or a dash."""
    if absent(low) or absent(high):
        return BLANK
    return f"{number(low, digits)} to {number(high, digits)}"


def with_interval(value: Any, low: Any, high: Any, digits: int = 4) -> tuple[str, str]:
    """A value and its interval with equally many decimals: `digits` significant ones, or as many more as it takes to
    tell them apart. An exact value (both ends equal it) stands in full and has no interval.
    """
    if absent(value) or absent(low) or absent(high):
        return number(value, digits), BLANK
    if low == value == high:
        return f"{float(value):.10g}", BLANK
    given = [float(v) for v in (value, low, high)]
    size = max(abs(v) for v in given)
    if not 1e-4 <= size < 1e9:
        return number(value, digits), span(low, high, digits)
    least = abs(given[0]) or size
    places = max(0, digits - 1 - math.floor(math.log10(least)))
    while True:
        shown = [f"{v:.{places}f}" for v in given]
        if places >= 12 or len(set(shown)) == len(set(given)):
            return shown[0], f"{shown[1]} to {shown[2]}"
        places += 1


class Tables:
    """Makes tables out of rows, with the columns of words.json, and remembers which columns the page uses."""

    def __init__(self, columns: Mapping[str, Sequence[str]]) -> None:
        self._columns = columns
        self._used: set[str] = set()

    def table(self, keys: Iterable[str], rows: list[Row], caption: str, nothing: str) -> dict:
        """A table of `rows`; a column in which no row has a value is left out; `nothing` stands for no rows."""
        keys = [k for k in keys if any(r.get(k, BLANK) != BLANK for r in rows)]
        self._used |= set(keys)
        rows = [r | {k: r.get(k, BLANK) for k in keys} for r in rows]
        return {
            "columns": [self._column(k) for k in keys],
            "rows": rows,
            "caption": caption,
            "nothing": nothing,
        }

    def _column(self, key: str) -> dict[str, str]:
        label, kind, explanation = self._columns[key]
        return {"key": key, "label": label, "kind": kind, "help": explanation}

    def used(self) -> list[dict[str, str]]:
        """The columns used so far, in the order of words.json."""
        return [self._column(k) for k in self._columns if k in self._used]
