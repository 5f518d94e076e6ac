"""Statistics of times: intervals on log values, tests, block order and the factorial of a gap.

Times are compared as logs, so that a difference is a ratio. A block holds two legs of each arm in
mirrored order (ABBA generalised): a drift that is linear in time adds the same to every arm of a
block and cancels in the block-paired difference.

An estimate is one of three: ``Estimate`` (a t interval), ``Extreme`` (the smallest or largest of
several) or ``Crossover`` (where a curve falls through a level). Each has ``value``,
``interval(alpha)`` and ``p_value(threshold)`` in the unit of the quantity, and the last two agree:
the interval at ``alpha`` excludes the threshold exactly when the p-value is below ``alpha``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

ALPHA = 0.05
MAX_DROPPED = 0.1  # METHOD 3.7


class Interval(NamedTuple):
    """Lower and upper end."""

    low: float
    high: float


class Quantity(Protocol):
    """What a verdict needs of an estimate."""

    @property
    def value(self) -> float:
        """Point estimate."""
        ...

    def interval(self, alpha: float = ALPHA) -> Interval:
        """Interval of confidence 1 - alpha."""
        ...

    def p_value(self, threshold: float) -> float:
        """Two-sided p-value of "the quantity is the threshold"."""
        ...


def t_quantile(tail: float, df: float) -> float:
    """Value that Student's t exceeds with probability `tail`.

    Of `scipy.special`: `scipy.stats` gives the same bits 50 times slower, and takes a second to import.
    """
    return -float(special.stdtrit(df, tail))


@dataclass(frozen=True)
class Estimate:
    """Mean with its standard error and degrees of freedom, on the log scale if ``log``."""

    mean: float
    se: float
    df: float
    log: bool = True

    def __post_init__(self) -> None:
        """Refuse what no sample can give."""
        if not (math.isfinite(self.mean) and math.isfinite(self.se) and self.se >= 0):
            raise ValueError(f"mean={self.mean}, se={self.se}: not a finite estimate")
        if self.se > 0 and not self.df > 0:
            raise ValueError(f"df={self.df} with se={self.se}: an interval needs 2 values or more")

    def _out(self, value: float) -> float:
        return math.exp(value) if self.log else value

    def _in(self, value: float) -> float:
        if not self.log:
            return value
        return math.log(value) if value > 0 else -math.inf

    @property
    def value(self) -> float:
        """Point estimate in the unit of the quantity."""
        return self._out(self.mean)

    def bound(self, tail: float, side: int) -> float:
        """One end: ``tail`` is its one-sided error, ``side`` -1 for the lower, +1 for the upper."""
        if self.se == 0:
            return self.value
        return self._out(self.mean + side * t_quantile(tail, self.df) * self.se)

    def interval(self, alpha: float = ALPHA) -> Interval:
        """Two-sided t interval of confidence 1 - alpha."""
        return Interval(self.bound(alpha / 2, -1), self.bound(alpha / 2, +1))

    def p_above(self, threshold: float) -> float:
        """One-sided p-value of "not above the threshold"."""
        gap = self.mean - self._in(threshold)
        if self.se == 0:
            return 0.0 if gap > 0 else 1.0
        return float(special.stdtr(self.df, -gap / self.se))

    def p_below(self, threshold: float) -> float:
        """One-sided p-value of "not below the threshold"."""
        gap = self.mean - self._in(threshold)
        if self.se == 0:
            return 0.0 if gap < 0 else 1.0
        return float(special.stdtr(self.df, gap / self.se))

    def p_value(self, threshold: float) -> float:
        """Two-sided p-value."""
        return min(1.0, 2 * min(self.p_above(threshold), self.p_below(threshold)))


def sample_estimate(values: ArrayLike, log: bool = True) -> Estimate:
    """Estimate from independent values (logs if ``log``), shape [n >= 2]; n - 1 degrees of freedom."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size < 2:
        raise ValueError(f"shape {array.shape}: an interval needs 2 values or more")
    if not np.isfinite(array).all():
        raise ValueError("NaN or infinity among the values")
    se = float(array.std(ddof=1)) / math.sqrt(array.size)
    return Estimate(float(array.mean()), se, array.size - 1, log)


def single_interval(log_times: ArrayLike) -> tuple[float, float, float]:
    """Time of one arm, with its 95% t interval, from log block values of shape [n >= 2]; same unit."""
    estimate = sample_estimate(log_times)
    return (estimate.value, *estimate.interval())


def paired_log_ratio(numerator: ArrayLike, denominator: ArrayLike) -> Estimate:
    """Ratio of two arms from their log block values, both of shape [n], paired by block."""
    top, bottom = (np.asarray(v, dtype=np.float64) for v in (numerator, denominator))
    if top.shape != bottom.shape:
        raise ValueError(f"shapes {top.shape} and {bottom.shape} cannot be paired by block")
    return sample_estimate(top - bottom)


def difference(a: Estimate, b: Estimate) -> Estimate:
    """A - b of independent estimates on one scale (Welch-Satterthwaite degrees of freedom)."""
    if a.log != b.log:
        raise ValueError("one estimate is on the log scale, the other is not")
    return combine([a, b], [1.0, -1.0])


def combine(parts: Sequence[Estimate], weights: Sequence[float]) -> Estimate:
    """Weighted sum of independent estimates, on their scale.

    Variance sum (w_i se_i)^2; degrees of freedom by Welch-Satterthwaite (Satterthwaite 1946).
    """
    variances = [(w * part.se) ** 2 for part, w in zip(parts, weights, strict=True)]
    mean = sum(w * part.mean for part, w in zip(parts, weights, strict=True))
    below = sum(v**2 / part.df for part, v in zip(parts, variances, strict=True) if v > 0)
    df = sum(variances) ** 2 / below if below > 0 else math.inf
    return Estimate(mean, math.sqrt(sum(variances)), df, parts[0].log)


def geomean(cells: Sequence[Estimate]) -> Estimate:
    """Geometric mean over independent cells: the mean of their mean logs, variance sum / C^2."""
    if not cells:
        raise ValueError("geometric mean of no cell")
    return combine(cells, [1 / len(cells)] * len(cells))


def from_interval(value: float, low: float, high: float, n: int | None, log: bool) -> Estimate:
    """The estimate behind a published 95% t interval of ``n`` values.

    An interval of no width stands for an exact number. Without ``n`` the interval is read as a
    normal one.
    """
    if not low <= value <= high:
        raise ValueError(f"interval [{low}, {high}] does not hold the value {value}")
    scale = math.log if log else float
    return _from_half(scale(value), (scale(high) - scale(low)) / 2, n, log)


def _from_half(mean: float, half: float, n: int | None, log: bool) -> Estimate:
    """The estimate of `n` values whose 95% interval is mean +- half, on its scale."""
    df = n - 1 if n is not None and n > 1 else math.inf
    return Estimate(mean, half / t_quantile(ALPHA / 2, df), df, log)


@dataclass(frozen=True)
class Recorded:
    """A number whose 95% interval was recorded with ends of its own, not equally far from it.

    Each side is a t distribution of its own, so that the interval at 95% has the recorded ends exactly, whatever their
    distances from the value; at another level each distance is scaled as that of a t interval.
    """

    lower: Estimate
    upper: Estimate

    @classmethod
    def of(cls, value: float, low: float, high: float, n: int | None, log: bool) -> Recorded:
        """From a recorded value and interval; see `from_interval` for `n`."""
        if not low <= value <= high:
            raise ValueError(f"interval [{low}, {high}] does not hold the value {value}")
        scale = math.log if log else float
        ends = []
        for end in (low, high):
            half = abs(scale(end) - scale(value))
            ends.append(_from_half(scale(value), half, n, log))
        return cls(*ends)

    @property
    def value(self) -> float:
        """Point estimate."""
        return self.lower.value

    def interval(self, alpha: float = ALPHA) -> Interval:
        """Interval of confidence 1 - alpha, its ends scaled one by one."""
        return Interval(self.lower.bound(alpha / 2, -1), self.upper.bound(alpha / 2, +1))

    def p_value(self, threshold: float) -> float:
        """Two-sided p-value, by the side on which the threshold lies."""
        return (self.lower if threshold < self.value else self.upper).p_value(threshold)


@dataclass(frozen=True)
class Extreme:
    """The smallest (``largest=False``) or largest of several quantities.

    The smallest is above a threshold when each part is (an intersection-union test: no correction)
    and below it when any part is (Bonferroni over the parts).
    """

    parts: tuple[Estimate, ...]
    largest: bool = False

    @property
    def value(self) -> float:
        """Extreme of the point estimates."""
        return (max if self.largest else min)(part.value for part in self.parts)

    def interval(self, alpha: float = ALPHA) -> Interval:
        """Interval of confidence 1 - alpha or more."""
        plain, split = alpha / 2, alpha / (2 * len(self.parts))
        if self.largest:
            lows = [part.bound(split, -1) for part in self.parts]
            highs = [part.bound(plain, +1) for part in self.parts]
            return Interval(max(lows), max(highs))
        lows = [part.bound(plain, -1) for part in self.parts]
        highs = [part.bound(split, +1) for part in self.parts]
        return Interval(min(lows), min(highs))

    def p_value(self, threshold: float) -> float:
        """Two-sided p-value."""
        above = [part.p_above(threshold) for part in self.parts]
        below = [part.p_below(threshold) for part in self.parts]
        every, some = (below, above) if self.largest else (above, below)
        return min(1.0, 2 * min(max(every), len(some) * min(some)))


@dataclass(frozen=True)
class Crossover:
    """The M at which a falling ratio crosses ``level``, between measured M in log-log scale.

    The ratio is taken to fall with M. An end beyond the measured range is 0 or infinity: the
    crossing was not seen on that side.
    """

    ms: tuple[int, ...]
    ratios: tuple[Estimate, ...]
    level: float = 1.0

    def at(self, m: float) -> Estimate:
        """The ratio at ``m`` rows, interpolated; outside the range, that of the nearest M."""
        logs = [math.log(value) for value in self.ms]
        x = min(max(math.log(m), logs[0]), logs[-1])
        right = min(max(int(np.searchsorted(logs, x)), 1), len(logs) - 1)
        weight = (x - logs[right - 1]) / (logs[right] - logs[right - 1])
        return combine(self.ratios[right - 1 : right + 1], [1 - weight, weight])

    def _grid(self) -> list[float]:
        pieces = [
            np.geomspace(low, high, 65)[:-1]
            for low, high in zip(self.ms, self.ms[1:], strict=False)
        ]
        return [*np.concatenate(pieces).tolist(), float(self.ms[-1])]

    @property
    def value(self) -> float:
        """First crossing of the point estimates; 0 or infinity where there is none."""
        logs = [ratio.mean - math.log(self.level) for ratio in self.ratios]
        if logs[0] <= 0:
            return 0.0 if logs[0] < 0 else float(self.ms[0])
        for i in range(1, len(logs)):
            if logs[i] <= 0:
                share = logs[i - 1] / (logs[i - 1] - logs[i])
                x = math.log(self.ms[i - 1]) + share * math.log(self.ms[i] / self.ms[i - 1])
                return math.exp(x)
        return math.inf

    def interval(self, alpha: float = ALPHA) -> Interval:
        """All M at which the ratio cannot be told from the level (inversion of the test)."""
        grid = self._grid()
        bounds = [self.at(m).interval(alpha) for m in grid]
        above = [m for m, bound in zip(grid, bounds, strict=True) if bound.low > self.level]
        below = [m for m, bound in zip(grid, bounds, strict=True) if bound.high < self.level]
        low = max((m for m in above if m <= min(below, default=math.inf)), default=0.0)
        return Interval(low, min((m for m in below if m >= low), default=math.inf))

    def p_value(self, threshold: float) -> float:
        """Two-sided p-value: the crossing lies above M exactly when the ratio at M is above."""
        return self.at(threshold).p_value(self.level)


# Tests.


def holm_levels(p_values: Sequence[float], family_size: int | None = None) -> list[float]:
    """The level at which Holm's procedure (Holm 1979) decides each p-value: alpha / (m - rank + 1).

    After the first that is not rejected the level stays, so the interval at this level excludes
    the threshold exactly when the adjusted p-value is below alpha. ``family_size`` m is the number
    of registered claims; those that have not run count as p = 1, so that a verdict does not depend
    on what else was measured.
    """
    size = len(p_values) if family_size is None else family_size
    if size < len(p_values):
        raise ValueError(f"family_size={size} is below the {len(p_values)} p-values")
    levels, rank, stopped = [0.0] * len(p_values), 0, False
    for index in sorted(range(len(p_values)), key=lambda i: p_values[i]):
        if not stopped:
            rank += 1
        levels[index] = ALPHA / (size - rank + 1)
        stopped = stopped or p_values[index] > levels[index]
    return levels


def equivalence_p(estimate: Estimate, low: float, high: float) -> float:
    """p-value of two one-sided t tests (Schuirmann 1987) of low < quantity < high."""
    return max(estimate.p_above(low), estimate.p_below(high))


def wilson(successes: int, trials: int, alpha: float = ALPHA) -> Interval:
    """Wilson score interval of a proportion (Wilson 1927); [0, 1] without a trial."""
    if trials == 0:
        return Interval(0.0, 1.0)
    from scipy import stats  # takes a second: only where it is needed

    found = stats.binomtest(successes, trials).proportion_ci(1 - alpha, method="wilson")
    return Interval(float(found.low), float(found.high))


def a_a_differs(arm: ArrayLike, twin: ArrayLike, alpha: float = ALPHA) -> bool:
    """Whether an arm seems to differ from its own twin: a false positive of the harness."""
    low, high = paired_log_ratio(arm, twin).interval(alpha)
    return not low <= 1 <= high


# Plan of a session.


def block_order(arms: Sequence[str], n_blocks: int, seed: int) -> list[list[str]]:
    """Arms of each block in the order they run: a random permutation, then its mirror image.

    With two arms that is ABBA or BAAB. Deterministic from the seed (NumPy PCG64).
    """
    if len(set(arms)) != len(arms) or not arms:
        raise ValueError(f"arms {list(arms)} are not distinct, or there are none")
    generator = np.random.Generator(np.random.PCG64(seed))
    blocks = []
    for _ in range(n_blocks):
        half = [arms[i] for i in generator.permutation(len(arms))]
        blocks.append(half + half[::-1])
    return blocks


def needs_extension(estimates: Sequence[Quantity], half_width: float) -> bool:
    """Whether any 95% interval is wider than +-half_width (relative). The sign is never looked at."""
    for estimate in estimates:
        low, high = estimate.interval()
        if math.log(high / low) / 2 > math.log1p(half_width):
            return True
    return False


def too_many_dropped(dropped: int, total: int, limit: float = MAX_DROPPED) -> str | None:
    """The reason for INVALID when more blocks were dropped than the limit allows, else None."""
    if total == 0:
        return "no block was taken"
    if dropped / total > limit:
        return f"{dropped} of {total} blocks dropped for slowdown, above {limit:.0%}"
    return None


# Factorial of a gap.

Times = Mapping[frozenset[str], float]


def _factors(times: Times) -> list[str]:
    names = sorted(set().union(*times))
    missing = 2 ** len(names) - len(times)
    if missing:
        raise ValueError(f"{len(times)} of {2 ** len(names)} combinations of {names}")
    return names


def shapley(times: Times) -> dict[str, float]:
    """Shapley share of each factor in time(all) - time(none), in the unit of the times.

    ``times`` maps each set of PRESENT factors to a time. The share is the mean of the time that a
    factor adds, over all orders of adding (Shapley 1953); shares sum to the gap by construction,
    so the sum proves nothing about completeness: see ``residual``.
    """
    names = _factors(times)
    n, shares = len(names), {}
    for name in names:
        others = [other for other in names if other != name]
        total = 0.0
        for size in range(n):
            weight = math.factorial(size) * math.factorial(n - size - 1) / math.factorial(n)
            for chosen in combinations(others, size):
                without = frozenset(chosen)
                total += weight * (times[without | {name}] - times[without])
        shares[name] = total
    return shares


class Interaction(NamedTuple):
    """Effect of removing one factor, the other, and both, as fractions of the full time."""

    first: float
    second: float
    joint: float
    label: str  # "stacked", "additive" or "none"


def interaction(
    times: Times, first: str, second: str, small: float = 0.02, large: float = 0.1
) -> Interaction:
    """What two factors do together, from the four times with the other factors present.

    When two terms overlap, time = max(a, b): removing one alone reads near zero (below ``small``
    of the full time, or below a quarter of the joint effect) while removing both reads ``large``.
    That is "stacked"; only a small joint effect is "none".
    """
    full = frozenset(_factors(times))
    base = times[full]
    single = [(base - times[full - {name}]) / base for name in (first, second)]
    joint = (base - times[full - {first, second}]) / base
    if joint < small:
        label = "none"
    elif joint >= large and sum(single) < joint / 2 and min(single) < max(small, joint / 4):
        label = "stacked"
    else:
        label = "additive"
    return Interaction(single[0], single[1], joint, label)


def residual(measured: float, floor: float, terms: Mapping[str, float]) -> float:
    """Fraction of the gap (measured - floor) that the named terms leave unexplained."""
    gap = measured - floor
    if not gap > 0:
        raise ValueError(f"measured {measured} is not above the floor {floor}: no gap")
    return (gap - sum(terms.values())) / gap
