"""In how many sittings a campaign was measured: runs of the measuring process, told apart by its attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pandas as pd

from lab.rows import NOT_REACHED

#: Every run of the measuring process begins with this stage, and ends with an attempt of these states at the latest.
OPENING_STAGE = "occupancy"
LAST_WORDS = ("crashed", "interrupted")


def sittings(attempts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The sittings behind the attempts of a campaign, which stand in the order of the journal.

    Each has `start` and `end` (UTC), `minutes` between them, `cut_off` (its last attempt has no end, so that the
    sitting lasted longer than stated), `stop` (why it ended, or None), `shapes` of its points that went well, and
    `constants`: whether they were measured in it.
    """
    runs: list[list[Mapping[str, Any]]] = []
    for attempt in attempts:
        # Minutes that end a campaign leave words about its points behind; a profiler pass may follow.
        closes = attempt["reason"] == NOT_REACHED
        ended = not runs or (runs[-1][-1]["status"] in LAST_WORDS and not closes)
        if ended or attempt["stage"] == OPENING_STAGE:
            runs.append([])
        runs[-1].append(attempt)
    return [_sitting(run) for run in runs]


def _sitting(run: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    start = min(_time(a["started_utc"]) for a in run)
    end = max(_time(a["started_utc"]) + timedelta(seconds=a["seconds"] or 0) for a in run)
    last, good = run[-1], [a for a in run if a["status"] == "ok"]
    return {
        "start": f"{start:%Y-%m-%d %H:%M:%S}",
        "end": f"{end:%Y-%m-%d %H:%M:%S}",
        "minutes": (end - start).total_seconds() / 60,
        "cut_off": last["seconds"] is None,
        "stop": last["reason"] if last["status"] in LAST_WORDS else None,
        "shapes": list(dict.fromkeys(a["shape"] for a in good if a.get("shape"))),
        "constants": any(a["stage"] == "constants" for a in good),
    }


def longest_pause(telemetry: pd.DataFrame) -> float | None:
    """Seconds between the two readings that lie farthest apart; None with fewer than two."""
    steps = telemetry["t_ns"].sort_values().diff().dropna()
    return float(steps.max()) / 1e9 if len(steps) else None


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)
