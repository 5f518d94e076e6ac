"""The versions that the requirements files pin, to be held against those that a campaign recorded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;#]+)", re.M)


def read(paths: Iterable[str | Path]) -> dict[str, str]:
    """Package name to pinned version, of all the requirements files given."""
    texts = (Path(path).read_text(encoding="utf-8") for path in paths)
    return {name: version for text in texts for name, version in _PIN.findall(text)}


def pin_of(software: str, pins: Mapping[str, str]) -> str | None:
    """The pin of a recorded software, such as that of cupy-cuda13x for cupy; None where none has its name."""
    names = [n for n in sorted(pins) if n == software or n.startswith(f"{software}-cuda")]
    return pins[names[0]] if names else None
