"""Bars: what the project set itself to reach, each judged over its cells: met, missed or undecided, and where and why.

A bar over the worst of several cells is an `Extreme`: met when each cell is on the right side. A bar of which cells are
missing is never met. Nothing here is a prediction: the limits were set before the kernel, and claims about them are
judged elsewhere (`lab.verdicts`). The id of a bar about one M ends in `.m<M>`.
The bars of the decode part of R2 are in `lab.bars_r2`, the others in `lab.bars_r2b`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from lab import statistics
from lab.arm_times import Point
from lab.decomposition import Constants
from lab.statistics import Estimate, Extreme, Quantity, Recorded

MET, MISSED, UNDECIDED, NOT_RUN = "met", "missed", "undecided", "NOT_RUN"


@dataclass(frozen=True)
class Bar:
    """One bar. direction: "above" or "below" the limit is met. claim: id of the frozen claim about it, or None.

    observed: the number with its 95% interval, None where it was not measured. cells: behind it; missed: of these, with
    the whole interval on the wrong side; undecided: with an interval on both sides. worst: the cell farthest on the
    wrong side, or nearest to it.
    """

    id: str
    text: str
    format: str | None
    direction: str
    limit: float
    unit: str
    claim: str | None
    observed: Quantity | None = None
    cells: int = 0
    planned: int = 0
    missed: int = 0
    undecided: int = 0
    worst: Point | None = None
    status: str = NOT_RUN
    reason: str = ""
    how: str = ""

    @property
    def off(self) -> float | None:
        """Observed over the limit, less 1."""
        return None if self.observed is None else self.observed.value / self.limit - 1


@dataclass(frozen=True)
class Miss:
    """A cell that misses a bar or is undecided (status). against: the peer of a bar about peers, else empty."""

    bar: Bar
    format: str
    point: Point
    observed: Estimate
    status: str
    reason: str
    against: str = ""

    @property
    def off(self) -> float:
        """Observed over the limit, less 1."""
        return self.observed.value / self.bar.limit - 1


@dataclass(frozen=True)
class Part:
    """One cell of a bar."""

    point: Point
    format: str
    value: Estimate
    reason: str
    against: str = ""


def split(name: str) -> tuple[str, int | None]:
    """The kind of a bar and its M, from its id."""
    kind, _, m = name.partition(".m")
    return kind, int(m) if m else None


def status_of(quantity: Quantity, direction: str, limit: float) -> str:
    """met or missed where the 95% interval lies wholly on one side, else undecided; a limit reached exactly is met."""
    low, high = quantity.interval()
    right, wrong = (low >= limit, high < limit)
    if direction == "below":
        right, wrong = (high <= limit, low > limit)
    return MET if right else MISSED if wrong else UNDECIDED


def over_cells(bar: Bar, parts: Sequence[Part], planned: int) -> tuple[Bar, list[Miss]]:
    """A bar over the worst of its cells, and the cells that miss it or are undecided."""
    if not parts:
        return replace(bar, planned=planned, reason="no cell of it was measured"), []
    largest = bar.direction == "below"
    observed = Extreme(tuple(p.value for p in parts), largest=largest)
    ranked = sorted(parts, key=lambda p: p.value.value, reverse=largest)
    judged = [(p, status_of(p.value, bar.direction, bar.limit)) for p in ranked]
    status = status_of(observed, bar.direction, bar.limit)
    how = f"{len(parts)} of {planned} cells"
    if len(parts) < planned and status == MET:
        status = UNDECIDED  # a cell that was not measured may miss it
    made = replace(
        bar,
        observed=observed,
        cells=len(parts),
        planned=planned,
        **_counts(word for _, word in judged),
        worst=ranked[0].point,
        status=status,
        reason=ranked[0].reason if status != MET else "",
        how=how,
    )
    return made, [
        Miss(made, p.format, p.point, p.value, word, p.reason, p.against)
        for p, word in judged
        if word != MET
    ]


def _counts(statuses: Iterable[str]) -> dict[str, int]:
    """How many cells miss a bar, and how many are undecided."""
    found = Counter(statuses)
    return {"missed": found[MISSED], "undecided": found[UNDECIDED]}


def mean_of_cells(
    bar: Bar,
    parts: Sequence[Part],
    planned: int,
    reason: Callable[[], str],
) -> Bar:
    """A bar over the geometric mean of its cells; `reason`: why it is not met."""
    bar = replace(bar, planned=planned)
    if not parts:
        return replace(bar, reason="no cell of it was measured")
    observed = statistics.geomean([p.value for p in parts])
    status = status_of(observed, bar.direction, bar.limit)
    if len(parts) < planned and status == MET:
        status = UNDECIDED
    pick = max if bar.direction == "below" else min
    return replace(
        bar,
        observed=observed,
        cells=len(parts),
        **_counts(status_of(p.value, bar.direction, bar.limit) for p in parts),
        worst=pick(parts, key=lambda p: p.value.value).point,
        status=status,
        reason=reason() if status != MET else "",
        how=f"{len(parts)} of {planned} cells",
    )


def of_constant(bar: Bar, key: str, constants: Constants) -> Bar:
    """A bar about a constant, with the interval that the constant has."""
    row = constants.found.get(key)
    if row is None:
        return replace(bar, reason=constants.missing.get(key, "not measured"))
    low, high = row["ci_low"], row["ci_high"]
    value = row["value"]
    if low is None or high is None:
        low = high = value
    observed = Recorded.of(value, low, high, row["n"], log=low > 0)
    status = status_of(observed, bar.direction, bar.limit)
    made = replace(bar, observed=observed, status=status, how=row["how"], cells=1, planned=1)
    return replace(made, **_counts([status]))


__all__ = [
    "MET", "MISSED", "NOT_RUN", "UNDECIDED", "Bar", "Miss", "Part", "mean_of_cells", "of_constant", "over_cells",
    "split", "status_of",
]  # fmt: skip
