"""The block times of a campaign by arm and point, and their ratios: paired by block where two arms ran interleaved.

An arm is a kernel in a format; a point is a problem in a regime. Only arms whose cell passed its checks are here: what
is wrong by design has no time that may be compared (`lab.decomposition` reads those legs, and nothing else does).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pandas as pd

from lab import samples, statistics
from lab.records import Campaign
from lab.rows import KEY_COLUMNS, CellRow
from lab.statistics import Estimate


class Arm(NamedTuple):
    """A kernel in a weight format."""

    kernel: str
    format: str


class Point(NamedTuple):
    """A problem in a regime; the arms of one point ran interleaved."""

    shape: str
    N: int
    K: int
    M: int
    regime: str


class ArmTimes:
    """Log block times (log us) of every arm that passed, of one campaign."""

    def __init__(self, campaign: Campaign) -> None:
        """Read the legs once."""
        cells = {c.key: c for c in campaign.cells if c.correctness == "passed"}
        blocks = samples.block_times(campaign.samples)
        twin = blocks["arm"].str.endswith(samples.DUPLICATE_SUFFIX).astype(bool)
        found: dict[tuple[Arm, Point], samples.BlockLogs] = {}
        rows: dict[tuple[Arm, Point], CellRow] = {}
        for key, series in samples.logs_of(blocks[~twin], KEY_COLUMNS):
            cell = cells.get(key)
            if cell is not None and len(series.logs) >= 2:
                kernel, fmt, *point = key
                where = (Arm(kernel, fmt), Point(*point))
                found[where], rows[where] = series, cell
        self._series = {where: found[where] for where in sorted(found)}
        self._rows = rows

    def __iter__(self) -> Iterator[tuple[Arm, Point, CellRow]]:
        """Every arm at every point with its cell, in a fixed order."""
        for arm, point in self._series:
            yield arm, point, self._rows[arm, point]

    def has(self, arm: Arm, point: Point) -> bool:
        """Whether the arm was timed at the point."""
        return (arm, point) in self._series

    def cell(self, arm: Arm, point: Point) -> CellRow:
        """The cell of an arm at a point. KeyError where it was not timed."""
        return self._rows[arm, point]

    def time(self, arm: Arm, point: Point) -> Estimate | None:
        """Time of a call (log us), or None where it was not timed."""
        series = self._series.get((arm, point))
        return None if series is None else statistics.sample_estimate(series.logs)

    def ratio(
        self, top: tuple[Arm, Point], bottom: tuple[Arm, Point], factor: float = 1.0
    ) -> Estimate | None:
        """factor x time(top) / time(bottom), log scale; None where one was not timed, or two arms share no 2 blocks.

        Paired by block at one point; of two points, which ran one after the other, the errors are independent.
        """
        over, under = self._series.get(top), self._series.get(bottom)
        if over is None or under is None:
            return None
        if top[1] == bottom[1]:
            own, others = over.paired(under)
            if len(own) < 2:
                return None
            found = statistics.paired_log_ratio(own, others)
        else:
            found = statistics.difference(
                statistics.sample_estimate(over.logs), statistics.sample_estimate(under.logs)
            )
        return Estimate(found.mean + math.log(factor), found.se, found.df)

    def over(self, arm: Arm, point: Point, below: pd.Series) -> Estimate | None:
        """time(arm) over the log block times `below` of the same point; None where they share no 2 blocks."""
        series, below = self._series.get((arm, point)), below.dropna().sort_index()
        if series is None:
            return None
        own, others = series.paired(samples.BlockLogs(below.index.to_numpy(), below.to_numpy()))
        return None if len(own) < 2 else statistics.paired_log_ratio(own, others)


class Spread(NamedTuple):
    """Geometric mean over shapes, and the lowest and highest shape."""

    mean: Estimate
    shapes: int
    lowest: float
    lowest_shape: str
    highest: float
    highest_shape: str


def spread(ratios: Sequence[tuple[str, Estimate]]) -> Spread | None:
    """The spread of (shape, ratio) pairs; None where there is none."""
    if not ratios:
        return None
    low = min(ratios, key=lambda pair: (pair[1].value, pair[0]))
    high = max(ratios, key=lambda pair: (pair[1].value, pair[0]))
    mean = statistics.geomean([ratio for _, ratio in ratios])
    return Spread(mean, len(ratios), low[1].value, low[0], high[1].value, high[0])
