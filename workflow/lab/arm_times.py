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
from lab.rows import CellRow
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
        self._series: dict[tuple[Arm, Point], pd.Series] = {}
        self._rows: dict[tuple[Arm, Point], CellRow] = {}
        key = ["kernel", "format", *Point._fields]
        for (kernel, fmt, shape, n, k, m, regime), rows in blocks[~twin].groupby(key, sort=False):
            point = Point(str(shape), int(n), int(k), int(m), str(regime))
            cell = cells.get((str(kernel), str(fmt), *point))
            if cell is not None and len(rows) >= 2:
                where = (Arm(str(kernel), str(fmt)), point)
                self._series[where] = rows.set_index("block")["log_time"].sort_index()
                self._rows[where] = cell

    def __iter__(self) -> Iterator[tuple[Arm, Point, CellRow]]:
        """Every arm at every point with its cell, in a fixed order."""
        for arm, point in sorted(self._series):
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
        return None if series is None else statistics.sample_estimate(series)

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
            shared = over.index.intersection(under.index)
            if len(shared) < 2:
                return None
            found = statistics.paired_log_ratio(over[shared], under[shared])
        else:
            found = statistics.difference(
                statistics.sample_estimate(over), statistics.sample_estimate(under)
            )
        return Estimate(found.mean + math.log(factor), found.se, found.df)

    def over(self, arm: Arm, point: Point, below: pd.Series) -> Estimate | None:
        """time(arm) over the log block times `below` of the same point; None where they share no 2 blocks."""
        series = self._series.get((arm, point))
        shared = [] if series is None else series.index.intersection(below.dropna().index)
        if len(shared) < 2:
            return None
        return statistics.paired_log_ratio(series[shared], below[shared])


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
