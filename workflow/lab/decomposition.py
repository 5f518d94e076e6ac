"""Where the time above the floor goes: a full factorial of the testbed kernel, split into named causes (METHOD 4).

Everything is counted in microseconds above the size-matched stream floor of the same session:

    full - floor = sum of the factors' Shapley shares  (full - none, closes by construction)
                 + measured terms (launch, grid fill)  (each over what the floor itself pays)
                 + residual                            (none - floor - terms: nothing makes it vanish)

`none` is the variant with every factor removed. A removed factor is replaced by its ideal, so `none` must still move
the bytes of the floor: the ideal of `weight_load` is the load of the stream. A variant that reads nothing lies below
the floor, and its residual says so.

A variant's name lists what was REMOVED, in the order of ``FACTORS``: ``testbed/full``, ``testbed/none`` (all removed),
``testbed/-dequant_issue-matrix_issue``. A set of factors has exactly one name.

Every amount is computed in each block, where all arms ran interleaved, and only then averaged with a t interval: a
drift that arms share cancels. A share is the mean amount over the mean gap; its interval is that of the linearised
block values (delta method of a ratio of means, Cochran 1977, chapter 6). So shares and residual sum to exactly 1, and
a block whose gap is small by chance has no undue weight, as it would have in a mean of ratios.

This module knows no prediction and no claim (firewall, METHOD 1): a measuring process may import it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lab import statistics
from lab.samples import DUPLICATE_SUFFIX
from lab.statistics import Estimate, Extreme

PREFIX = "testbed/"
FULL, NONE = "testbed/full", "testbed/none"
FLOOR = "stream_read"
FACTORS = ("weight_load", "layout_staging", "dequant_issue", "matrix_issue", "epilogue_reduction")
TERMS = ("launch", "grid_fill", "clock")
RESIDUAL, BEYOND = "residual", "beyond_testbed"
MAX_FACTORS = 5
CLOSES = 0.10  # METHOD 4: a residual over this fraction of the gap is UNEXPLAINED
MATERIAL = 0.05  # fraction of the gap below which an effect is none: the smallest difference of the share claims
HEADLINE = ("mxfp4", "cold_graph")  # format and regime that the share claims are about
RANKED_M = 1  # the M of share/<cause> without a cell: prediction P4 ranks the causes at M=1

#: The gravest first: a cell has the gravest verdict among its closures.
VERDICTS = ("NO_GAP", "UNEXPLAINED", "NOT_RUN", "INCONCLUSIVE", "CLOSED")


class Cell(NamedTuple):
    """The problem, format and regime of one factorial."""

    format: str
    shape: str
    N: int
    K: int
    M: int
    regime: str

    def __str__(self) -> str:
        return f"{self.format} {self.shape} {self.N}x{self.K} M={self.M} {self.regime}"


# ---- names of variants -------------------------------------------------------------------------------------------


def _check_factors(factors: Sequence[str]) -> None:
    if not 1 <= len(factors) <= MAX_FACTORS or len(set(factors)) != len(factors):
        raise ValueError(f"factors {list(factors)}: 1 to {MAX_FACTORS} distinct names are wanted")
    if unknown := [name for name in factors if name not in FACTORS]:
        raise ValueError(f"factor {unknown[0]!r} is not one of {', '.join(FACTORS)}")


def variant_name(present: Iterable[str], factors: Sequence[str] = FACTORS) -> str:
    """Kernel id of the variant with the factors `present` and the others of `factors` removed.

    ValueError on a factor that the testbed has not.
    """
    _check_factors(factors)
    kept = set(present)
    if unknown := sorted(kept - set(factors)):
        raise ValueError(f"factor {unknown[0]!r} is not one of {', '.join(factors)}")
    removed = [name for name in FACTORS if name in factors and name not in kept]
    if not removed:
        return FULL
    return NONE if not kept else PREFIX + "".join(f"-{name}" for name in removed)


def present_factors(kernel: str, factors: Sequence[str] = FACTORS) -> frozenset[str]:
    """Factors present in the variant `kernel`: the inverse of `variant_name`.

    ValueError on another kernel, an unknown factor, or a second spelling of a variant.
    """
    _check_factors(factors)
    if kernel == FULL:
        return frozenset(factors)
    if kernel == NONE:
        return frozenset()
    if not kernel.startswith(PREFIX + "-"):
        raise ValueError(f"{kernel!r} is no variant: {FULL}, {NONE} or {PREFIX}-<factor>-<factor>")
    removed = kernel[len(PREFIX) + 1 :].split("-")
    if unknown := [name for name in removed if name not in factors]:
        raise ValueError(f"{kernel}: factor {unknown[0]!r} is not one of {', '.join(factors)}")
    present = frozenset(factors) - set(removed)
    if kernel != (name := variant_name(present, factors)):
        raise ValueError(f"{kernel}: this variant is spelled {name}")
    return present


def variants(factors: Sequence[str] = FACTORS) -> list[str]:
    """Kernel ids of the whole factorial, from full to none: 2^len(factors) of them."""
    sizes = range(len(factors), -1, -1)
    return [variant_name(on, factors) for size in sizes for on in combinations(factors, size)]


# ---- from legs to one table a cell -------------------------------------------------------------------------------


def gather(blocks: pd.DataFrame) -> dict[Cell, pd.DataFrame]:
    """Log block times of every cell that has a testbed variant: one row a block, one column an arm.

    `blocks` is a table as of `lab.samples.block_times` (kernel, format, shape, N, K, M, regime, arm, block, log_time in
    log microseconds). Columns are kernel ids; an A/A twin ends with ``#2``. ValueError on a value that is no number and
    on a block in which an arm occurs twice. An arm without legs in some block is NaN here: `decompose` names it.
    """
    if blocks.empty:
        return {}
    twin = blocks["arm"].str.endswith(DUPLICATE_SUFFIX).astype(bool)
    frame = blocks.assign(column=blocks["kernel"] + np.where(twin, DUPLICATE_SUFFIX, ""))
    variant = frame["kernel"].str.startswith(PREFIX).astype(bool)
    cells = frame.groupby(list(Cell._fields), sort=False).ngroup()
    frame = frame[cells.isin(cells[variant])]
    found = {}
    for key, group in frame.groupby(list(Cell._fields), sort=False):
        fmt, shape, n, k, m, regime = key
        cell = Cell(str(fmt), str(shape), int(n), int(k), int(m), str(regime))
        bad = group[~np.isfinite(group["log_time"])]
        if len(bad):
            row = bad.iloc[0]
            raise ValueError(
                f"{cell}: {row['column']} block {row['block']}: log_time={row['log_time']}"
            )
        twice = group[group.duplicated(["column", "block"])]
        if len(twice):
            row = twice.iloc[0]
            raise ValueError(f"{cell}: {row['column']} occurs twice in block {row['block']}")
        found[cell] = group.pivot(index="block", columns="column", values="log_time").sort_index()
    return found


def _times(cell: Cell, table: pd.DataFrame, arms: Sequence[str]) -> dict[str, np.ndarray]:
    """Microseconds of each arm, shape [blocks], all of the same blocks."""
    if len(table) < 2:
        raise ValueError(f"{cell}: {len(table)} blocks; an interval needs 2 or more")
    for axis, what in ((table.columns, "arm"), (table.index, "block")):
        if axis.has_duplicates:
            raise ValueError(f"{cell}: {what} {axis[axis.duplicated()][0]} is given twice")
    if missing := [arm for arm in arms if arm not in table.columns]:
        some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ValueError(f"{cell}: {len(missing)} of {len(arms)} arms are missing: {some}")
    times = {}
    for arm in arms:
        logs = table[arm].astype(float)
        times[arm] = np.exp(logs.to_numpy())
        lost = ~np.isfinite(times[arm]) | (times[arm] <= 0)
        if lost.any():
            block = table.index[lost][0]
            raise ValueError(f"{cell}: {arm} has no time in block {block} (log_time={logs[block]})")
    return times


# ---- amounts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Amount:
    """Microseconds: a value a block, plus weighted pieces that were measured elsewhere, independent of the blocks.

    Pieces go by name, so that one that is added and taken away again leaves no uncertainty behind.
    """

    blocks: np.ndarray
    pieces: Mapping[str, tuple[float, Estimate]] = field(default_factory=dict)

    @classmethod
    def outside(cls, name: str, estimate: Estimate, n_blocks: int) -> Amount:
        """An amount that is one piece only."""
        if estimate.log:
            raise ValueError(f"{name}: a time in microseconds, not its log, is wanted")
        return cls(np.zeros(n_blocks), {name: (1.0, estimate)})

    def plus(self, other: Amount, sign: float = 1.0) -> Amount:
        """Sum, or difference with sign=-1."""
        pieces = dict(self.pieces)
        for name, (weight, estimate) in other.pieces.items():
            pieces[name] = (pieces.get(name, (0.0, estimate))[0] + sign * weight, estimate)
        return Amount(self.blocks + sign * other.blocks, pieces)

    def minus(self, other: Amount) -> Amount:
        """Difference."""
        return self.plus(other, -1.0)

    @property
    def values(self) -> np.ndarray:
        """Block values with the means of the pieces, shape [blocks]."""
        return self.blocks + sum(weight * piece.mean for weight, piece in self.pieces.values())

    def estimate(self) -> Estimate:
        """Mean over blocks, linear scale."""
        return _with_pieces(
            statistics.sample_estimate(self.values, log=False), self.pieces.values()
        )

    def over(self, whole: Amount) -> Estimate:
        """Ratio of the means, with the interval of its linearised block values."""
        bottom = float(whole.values.mean())
        ratio = float(self.values.mean()) / bottom
        linear = ratio + (self.values - ratio * whole.values) / bottom
        pieces = self.plus(whole, -ratio).pieces.values()
        return _with_pieces(
            statistics.sample_estimate(linear, log=False), [(w / bottom, e) for w, e in pieces]
        )


def _with_pieces(base: Estimate, pieces: Iterable[tuple[float, Estimate]]) -> Estimate:
    """`base`, whose mean holds the pieces already, widened by their independent errors."""
    parts, weights = [base], [1.0]
    for weight, piece in pieces:
        if weight and piece.se:
            parts.append(Estimate(0.0, piece.se, piece.df, log=False))
            weights.append(weight)
    return base if len(parts) == 1 else statistics.combine(parts, weights)


def measured(constant: Mapping[str, Any]) -> Estimate:
    """A recorded constant in microseconds as the estimate of a term, of the production time or of a prediction."""
    low, high = constant["ci_low"], constant["ci_high"]
    ends = (constant["value"],) * 2 if low is None or high is None else (low, high)
    return statistics.from_interval(constant["value"], *ends, constant.get("n"), log=False)


# ---- the split of one cell ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cause:
    """One named part of the gap.

    amount: microseconds. share: fraction of the gap (None where there is no gap). over_floor: amount over the floor.
    leave_one_out, alone: microseconds that removing the factor saves with the others present, and that it adds to the
    variant without any; None for what is no factor. label, of a factor: "stacked" (hidden behind another while all are
    present: never "no effect"), "effect", "no_effect" (all readings within +-MATERIAL of the gap) or "inconclusive".
    """

    name: str
    kind: str  # "term", "factor", "residual" or "beyond"
    amount: Estimate
    share: Estimate | None
    over_floor: Estimate
    leave_one_out: Estimate | None = None
    alone: Estimate | None = None
    label: str = ""

    @property
    def stacked(self) -> bool:
        """Whether a single ablation hides this factor."""
        return self.label == "stacked"


@dataclass(frozen=True)
class Pair:
    """What two factors do together, microseconds, with all others `others`: "present" or "absent".

    first, second: time that removing one of them saves while the other is there; joint: removing both. overlap = joint
    - first - second is 0 for a sum and min(a, b) for max(a, b). label: "stacked" (the overlap is at least half of what
    one of them does alone), "partly_stacked", "additive", "coupled" (overlap below 0: they need each other), "none" or
    "inconclusive".
    """

    names: tuple[str, str]
    others: str
    first: Estimate
    second: Estimate
    joint: Estimate
    overlap: Estimate
    label: str


@dataclass(frozen=True)
class Closure:
    """A sum that nothing forces to close. amount: microseconds left over; share: of the gap.

    all_removed: variant without factors - floor - measured terms. counters: observed - predicted from counters.
    production: production time - full testbed.
    """

    name: str
    amount: Estimate | None
    share: Estimate | None
    verdict: str


@dataclass(frozen=True)
class Decomposition:
    """The split of one cell. floor, full, gap, production: microseconds, means over `n_blocks` blocks.

    causes: measured terms, then factors. bare: (variant without factors - floor) / gap, before any measured term.
    a_a_differs: whether the full variant seems to differ from its twin; None without one.
    """

    cell: Cell
    n_blocks: int
    floor: Estimate
    full: Estimate
    gap: Estimate
    causes: tuple[Cause, ...]
    residual: Cause
    pairs: tuple[Pair, ...]
    closures: tuple[Closure, ...]
    bare: Estimate | None
    full_over_floor: Estimate
    production: Estimate | None
    production_over_floor: Estimate | None
    beyond: Cause | None
    a_a_differs: bool | None

    @property
    def verdict(self) -> str:
        """The gravest of the two closures of METHOD 4, for the testbed's own gap."""
        return gravest(c.verdict for c in self.closures if c.name != "production")

    @property
    def production_verdict(self) -> str:
        """The same for the production time: the testbed must also stand for it."""
        return gravest(c.verdict for c in self.closures)

    def closure(self, name: str) -> Closure:
        """The closure of that name."""
        return next(c for c in self.closures if c.name == name)


def gravest(verdicts: Iterable[str]) -> str:
    """The gravest verdict; a residual that is UNEXPLAINED stays so whatever else closes."""
    return min(verdicts, key=VERDICTS.index)


Term = Estimate | pd.Series


def decompose(
    cell: Cell,
    table: pd.DataFrame,
    *,
    terms: Mapping[str, Term],
    predicted: Estimate | None = None,
    production: Estimate | str | None = None,
    factors: Sequence[str] = FACTORS,
    floor: str = FLOOR,
) -> Decomposition:
    """Split one cell.

    table: log block times (log us), index block, a column for each variant of `factors`, one for `floor`, and one for
    the production kernel where `production` names a column; ``testbed/full#2`` is the A/A twin.
    terms: microseconds over what the floor pays, by name of ``TERMS``: a series over the blocks, or an estimate from
    elsewhere. predicted: microseconds of the full testbed, from counters of a separate pass. production: a column, or
    microseconds that were measured in another session, or None. floor: the column of the stream of the same bytes.
    ValueError, with the arm and the block, on a missing, repeated or non-finite input.
    """
    _check_factors(factors)
    names = variants(factors)
    others = [production] if isinstance(production, str) else []
    _refuse_strangers(cell, table, factors)
    times = {arm: Amount(v) for arm, v in _times(cell, table, [*names, floor, *others]).items()}
    n_blocks = len(table)
    base, full, none = times[floor], times[FULL], times[NONE]
    gap = full.minus(base)
    has_gap = gap.estimate().interval().low > 0

    def share(amount: Amount) -> Estimate | None:
        return amount.over(gap) if has_gap else None

    def cause(name: str, kind: str, amount: Amount, **more: Any) -> Cause:
        return Cause(name, kind, amount.estimate(), share(amount), amount.over(base), **more)

    by_set = {present_factors(name, factors): times[name] for name in names}
    limit = MATERIAL * gap.estimate().mean if has_gap else 0.0
    causes, rest = [], none.minus(base)
    for name in _known_terms(cell, terms):
        amount = _term(cell, name, terms[name], table.index)
        causes.append(cause(name, "term", amount))
        rest = rest.minus(amount)
    # Shapley works on whole arrays, so each block gets its own split.
    split = statistics.shapley({on: amount.blocks for on, amount in by_set.items()})
    for name in (name for name in FACTORS if name in factors):
        part = Amount(split[name])
        without = full.minus(by_set[frozenset(factors) - {name}])
        alone = by_set[frozenset({name})].minus(none)
        label = _factor_label(part, without, alone, limit) if has_gap else "inconclusive"
        causes.append(
            cause(
                name,
                "factor",
                part,
                leave_one_out=without.estimate(),
                alone=alone.estimate(),
                label=label,
            )
        )
    end = _production(production, times, n_blocks)
    residual = cause(RESIDUAL, "residual", rest)
    counters = (
        None if predicted is None else full.minus(Amount.outside("counters", predicted, n_blocks))
    )
    beyond = None if end is None else cause(BEYOND, "beyond", end.minus(full))
    closures = [
        _closure("all_removed", residual.amount, residual.share, has_gap),
        _closure(
            "counters",
            counters and counters.estimate(),
            counters and share(counters),
            has_gap,
        ),
    ]
    if beyond is not None:
        closures.append(_closure("production", beyond.amount, beyond.share, has_gap))
    return Decomposition(
        cell=cell,
        n_blocks=n_blocks,
        floor=base.estimate(),
        full=full.estimate(),
        gap=gap.estimate(),
        causes=tuple(causes),
        residual=residual,
        pairs=tuple(_pairs(by_set, factors, limit, has_gap)),
        closures=tuple(closures),
        bare=share(none.minus(base)),
        full_over_floor=full.over(base),
        production=end and end.estimate(),
        production_over_floor=end and end.over(base),
        beyond=beyond,
        a_a_differs=_twin(cell, table),
    )


def _refuse_strangers(cell: Cell, table: pd.DataFrame, factors: Sequence[str]) -> None:
    """A column that looks like a variant must be one: a misspelled name is not left out in silence."""
    for column in table.columns:
        name = str(column).removesuffix(DUPLICATE_SUFFIX)
        if name.startswith(PREFIX):
            try:
                present_factors(name, factors)
            except ValueError as error:
                raise ValueError(f"{cell}: {error}") from None


def _known_terms(cell: Cell, terms: Mapping[str, Term]) -> list[str]:
    if unknown := sorted(set(terms) - set(TERMS)):
        raise ValueError(f"{cell}: term {unknown[0]!r} is not one of {', '.join(TERMS)}")
    return [name for name in TERMS if name in terms]


def _term(cell: Cell, name: str, term: Term, blocks: pd.Index) -> Amount:
    if isinstance(term, Estimate):
        return Amount.outside(name, term, len(blocks))
    if term.index.has_duplicates or set(term.index) != set(blocks):
        raise ValueError(f"{cell}: term {name} has blocks {list(term.index)}, not {list(blocks)}")
    values = term[blocks].astype(float)
    if not np.isfinite(values).all():
        lost = values[~np.isfinite(values)]
        raise ValueError(f"{cell}: term {name} is {lost.iloc[0]} in block {lost.index[0]}")
    return Amount(values.to_numpy())


def _production(
    production: Estimate | str | None, times: Mapping[str, Amount], n_blocks: int
) -> Amount | None:
    if production is None:
        return None
    if isinstance(production, str):
        return times[production]
    return Amount.outside("production", production, n_blocks)


def _twin(cell: Cell, table: pd.DataFrame) -> bool | None:
    name = FULL + DUPLICATE_SUFFIX
    if name not in table.columns:
        return None
    _times(cell, table, [name])
    return statistics.a_a_differs(table[FULL], table[name])


def _closure(name: str, amount: Estimate | None, share: Estimate | None, has_gap: bool) -> Closure:
    if amount is None:
        verdict = "NOT_RUN"
    elif not has_gap or share is None:
        verdict = "NO_GAP"
    elif abs(share.mean) > CLOSES:
        verdict = "UNEXPLAINED"
    else:
        verdict = "CLOSED" if _within(share, CLOSES) else "INCONCLUSIVE"
    return Closure(name, amount, share, verdict)


def _within(estimate: Estimate, limit: float) -> bool:
    """Whether the 95% interval lies inside +-limit."""
    low, high = estimate.interval()
    return -limit <= low and high <= limit


def _factor_label(part: Amount, without: Amount, alone: Amount, limit: float) -> str:
    readings = [amount.estimate() for amount in (part, without, alone)]
    if all(_within(reading, limit) for reading in readings):
        return "no_effect"
    # What the factor costs where it is not hidden: alone, or averaged over all orders of adding.
    seen = max(part, alone, key=lambda amount: amount.estimate().mean)
    hidden = seen.minus(without).estimate()
    if hidden.interval().low > 0 and hidden.mean >= max(limit, seen.estimate().mean / 2):
        return "stacked"
    low, high = readings[0].interval()
    return "effect" if low > 0 or high < 0 else "inconclusive"


def _pairs(
    by_set: Mapping[frozenset[str], Amount], factors: Sequence[str], limit: float, has_gap: bool
) -> Iterable[Pair]:
    """Every pair twice: a third term can hide what two do while it is present, and show it when it is gone."""
    ordered = [name for name in FACTORS if name in factors]
    for a, b in combinations(ordered, 2):
        rest = frozenset(factors) - {a, b}
        # With two factors in all, both backgrounds are the same.
        backgrounds = {"present": rest, "absent": frozenset()} if rest else {"present": rest}
        for others, kept in backgrounds.items():
            both, neither = by_set[kept | {a, b}], by_set[kept]
            first, second = both.minus(by_set[kept | {b}]), both.minus(by_set[kept | {a}])
            joint = both.minus(neither)
            parts = [first, second, joint, joint.minus(first).minus(second)]
            estimates = [part.estimate() for part in parts]
            label = _pair_label(*estimates, limit) if has_gap else "inconclusive"
            yield Pair((a, b), others, *estimates, label)


def _pair_label(
    first: Estimate, second: Estimate, joint: Estimate, overlap: Estimate, limit: float
) -> str:
    if all(_within(part, limit) for part in (first, second, joint)):
        return "none"
    if _within(overlap, limit):
        return "additive"
    low, high = overlap.interval()
    if low > 0 and overlap.mean >= limit:
        # Alone, the smaller one costs what it still shows plus what the other hides.
        return "stacked" if overlap.mean >= min(first.mean, second.mean) else "partly_stacked"
    return "coupled" if high < 0 and overlap.mean <= -limit else "inconclusive"


# ---- over shapes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A cause averaged over shapes. share: of the gap; over_floor: of the floor; stacked: in that many shapes."""

    name: str
    kind: str
    share: Estimate | None
    over_floor: Estimate
    stacked: int = 0


@dataclass(frozen=True)
class Summary:
    """Arithmetic mean over shapes, each shape weighing the same, as the share claims are judged.

    full, production: time over floor. no_gap: shapes whose gap cannot be told from 0; with one, there are no shares.
    """

    label: str
    format: str
    M: int
    regime: str
    shapes: tuple[str, ...]
    full: Estimate
    causes: tuple[Bar, ...]
    residual: Bar
    production: Estimate | None
    beyond: Bar | None
    verdict: str
    production_verdict: str
    no_gap: tuple[str, ...]


def _mean(parts: Sequence[Estimate]) -> Estimate:
    return statistics.combine(parts, [1 / len(parts)] * len(parts))


def summarise(found: Sequence[Decomposition], label: str) -> Summary:
    """Mean over the shapes of one format, M and regime.

    The production time is averaged only if every shape has one. ValueError when there is no cell, when formats, M or
    regimes are mixed, when a shape occurs twice, and when shapes have different causes.
    """
    if not found:
        raise ValueError(f"summary {label}: no cell")
    groups = {(d.cell.format, d.cell.M, d.cell.regime) for d in found}
    if len(groups) > 1:
        raise ValueError(f"summary {label} mixes {sorted(groups)}")
    fmt, m, regime = groups.pop()
    shapes = tuple(d.cell.shape for d in found)
    if len(set(shapes)) != len(shapes):
        raise ValueError(f"summary {label}: a shape occurs twice in {list(shapes)}")
    names = [cause.name for cause in found[0].causes]
    for d in found:
        if (own := [cause.name for cause in d.causes]) != names:
            raise ValueError(f"summary {label}: {d.cell} has causes {own}, {found[0].cell} {names}")
    no_gap = tuple(d.cell.shape for d in found if d.residual.share is None)

    def bar(parts: Sequence[Cause]) -> Bar:
        return Bar(
            parts[0].name,
            parts[0].kind,
            None if no_gap else _mean([part.share for part in parts]),
            _mean([part.over_floor for part in parts]),
            sum(part.stacked for part in parts),
        )

    ends = [d.production_over_floor for d in found]
    complete = None not in ends
    return Summary(
        label=label,
        format=fmt,
        M=m,
        regime=regime,
        shapes=shapes,
        full=_mean([d.full_over_floor for d in found]),
        causes=tuple(bar(parts) for parts in zip(*(d.causes for d in found), strict=True)),
        residual=bar([d.residual for d in found]),
        production=_mean(ends) if complete else None,
        beyond=bar([d.beyond for d in found]) if complete else None,
        verdict=gravest(d.verdict for d in found),
        production_verdict=gravest(d.production_verdict for d in found),
        no_gap=no_gap,
    )


@dataclass(frozen=True)
class Ranked:
    """A cause at its place. `then`: "above" the next, "inconclusive" where the intervals overlap, None at the end."""

    place: int
    name: str
    share: Estimate
    then: str | None


def rank(causes: Sequence[Cause] | Sequence[Bar]) -> list[Ranked]:
    """Causes by falling share. ValueError where there is no share.

    Two intervals that do not overlap differ whatever the correlation of the shares, which come from the same blocks.
    """
    if lost := [cause.name for cause in causes if cause.share is None]:
        raise ValueError(f"no share of {lost[0]}: the gap cannot be told from 0")
    ordered = sorted(causes, key=lambda cause: (-cause.share.mean, cause.name))
    bounds = [cause.share.interval() for cause in ordered]
    then: list[str | None] = [
        "above" if upper.low > lower.high else "inconclusive"
        for upper, lower in zip(bounds, bounds[1:], strict=False)
    ]
    return [
        Ranked(place, cause.name, cause.share, relation)
        for place, (cause, relation) in enumerate(zip(ordered, [*then, None], strict=True), 1)
    ]


# ---- constants and tables ----------------------------------------------------------------------------------------


class Constants(NamedTuple):
    """found: name -> {value, unit, ci_low, ci_high, n, how}. missing: name -> why it could not be computed."""

    found: dict[str, dict[str, Any]]
    missing: dict[str, str]


def share_key(cause: str, cell: Cell | None = None) -> str:
    """Name of a share among a campaign's constants, as `lab.verdicts.share_key` looks it up (a test compares)."""
    if cell is None:
        return f"share/{cause}"
    return f"share/{cause}/{cell.format}/{cell.N}x{cell.K}/m{cell.M}/{cell.regime}"


def campaign_constants(
    found: Sequence[Decomposition], shapes: Sequence[Mapping[str, Any]]
) -> Constants:
    """What the claims of R1 read: shares of each cell, mean shares at M=1 over the frozen shapes, largest residuals.

    `shapes` are the rows of prereg/shapes.json. ``largest_residual_fraction_m<M>`` follows its frozen formula to the
    letter: the largest of |none - floor| / gap and |observed - predicted from counters| / gap over all shapes.
    ``largest_residual_after_terms_fraction_m<M>`` takes the measured terms off first. Each needs every shape and
    both closures: a part that is missing makes the whole missing, never smaller.
    """
    out = Constants({}, {})
    for d in found:
        for cause in (*d.causes, d.residual):
            key = share_key(cause.name, d.cell)
            if key in out.found or key in out.missing:
                raise ValueError(f"{key}: two cells have this name, the second is {d.cell}")
            if cause.share is None:
                out.missing[key] = f"{d.cell}: the gap cannot be told from 0"
            else:
                how = f"{_SHARE_OF[cause.kind]} over the gap of {FULL} to its floor"
                out.found[key] = _constant(cause.share, f"{how}, mean over {d.n_blocks} blocks")
    ours = [d for d in found if (d.cell.format, d.cell.regime) == HEADLINE]
    _ranked_shares(out, ours, [s["name"] for s in shapes if s["set"] == "frozen"])
    for m in sorted({d.cell.M for d in ours}):
        at_m = [d for d in ours if d.cell.M == m]
        _largest_residuals(out, m, at_m, [s["name"] for s in shapes])
    return out


_SHARE_OF = {
    "term": "measured term",
    "factor": "Shapley share",
    "residual": "none - floor - measured terms",
}


def _constant(estimate: Estimate, how: str) -> dict[str, Any]:
    low, high = estimate.interval()
    # A judge rebuilds the standard error with n - 1 degrees of freedom, so n must be the effective number.
    n = round(estimate.df) + 1 if math.isfinite(estimate.df) else 1
    value = {"value": estimate.value, "unit": "fraction", "ci_low": low, "ci_high": high, "n": n}
    return {**value, "how": f"{how}; n is the effective number of blocks"}


def _absent(d: Sequence[Decomposition], names: Sequence[str]) -> str | None:
    lost = [name for name in names if name not in {one.cell.shape for one in d}]
    return f"no cell of {', '.join(lost)}" if lost else None


def _ranked_shares(out: Constants, ours: Sequence[Decomposition], frozen: Sequence[str]) -> None:
    chosen = [d for d in ours if d.cell.M == RANKED_M and d.cell.shape in frozen]
    if not chosen:
        return
    summary = summarise(chosen, "frozen")
    where = f"{HEADLINE[0]} M={RANKED_M} {HEADLINE[1]}"
    reason = _absent(chosen, frozen)
    if summary.no_gap:
        reason = f"the gap cannot be told from 0 on {', '.join(summary.no_gap)}"
    for bar in (*summary.causes, summary.residual):
        key = share_key(bar.name)
        if reason is not None:
            out.missing[key] = f"{where}: {reason}"
        else:
            how = f"mean of {share_key(bar.name)}/... over {len(chosen)} frozen shapes, {where}"
            out.found[key] = _constant(bar.share, how)


def _largest_residuals(
    out: Constants, m: int, at_m: Sequence[Decomposition], names: Sequence[str]
) -> None:
    first = {"": [d.bare for d in at_m], "_after_terms": [d.residual.share for d in at_m]}
    words = {"": "|none - floor|", "_after_terms": "|none - floor - measured terms|"}
    for suffix, parts in first.items():
        key = f"largest_residual{suffix}_fraction_m{m}"
        shares = [*parts, *(d.closure("counters").share for d in at_m)]
        lost = [d.cell.shape for d in at_m if d.closure("counters").share is None]
        if reason := _absent(at_m, names):
            out.missing[key] = reason
        elif no_gap := [d.cell.shape for d in at_m if d.residual.share is None]:
            out.missing[key] = f"the gap cannot be told from 0 on {', '.join(no_gap)}"
        elif lost:
            out.missing[key] = f"no prediction from counters on {', '.join(lost)}"
        else:
            sizes = [Estimate(abs(e.mean), e.se, e.df, log=False) for e in shares]
            largest = Extreme(tuple(sizes), largest=True)
            low, high = largest.interval()
            worst = max(sizes, key=lambda estimate: estimate.mean)
            how = f"largest over {len(at_m)} shapes of {words[suffix]} / gap and |time - counters| / gap"
            out.found[key] = {
                **_constant(worst, how),
                "value": largest.value,
                "ci_low": max(low, 0.0),
                "ci_high": high,
            }


def cause_table(found: Sequence[Decomposition]) -> pd.DataFrame:
    """One row a cell and cause, residual and beyond_testbed among them; times in us, shares as fractions of the gap."""
    rows = []
    for d in found:
        for cause in (*d.causes, d.residual, *([d.beyond] if d.beyond else [])):
            row: dict[str, Any] = {**d.cell._asdict(), "cause": cause.name, "kind": cause.kind}
            row |= _columns("us", cause.amount) | _columns("share", cause.share)
            row |= _columns("leave_one_out_us", cause.leave_one_out)
            row |= _columns("alone_us", cause.alone)
            rows.append({**row, "label": cause.label, "verdict": d.verdict})
    return pd.DataFrame(rows)


def pair_table(found: Sequence[Decomposition]) -> pd.DataFrame:
    """One row a cell, pair and background; times in us."""
    rows = []
    for d in found:
        for pair in d.pairs:
            row: dict[str, Any] = {**d.cell._asdict(), "others": pair.others}
            row |= dict(zip(("first", "second"), pair.names, strict=True))
            for name in ("first", "second", "joint", "overlap"):
                row |= _columns(f"{name}_us", getattr(pair, name))
            rows.append({**row, "label": pair.label})
    return pd.DataFrame(rows)


def _columns(name: str, estimate: Estimate | None) -> dict[str, float]:
    value, low, high = (
        (math.nan,) * 3 if estimate is None else (estimate.value, *estimate.interval())
    )
    return {name: value, f"{name}_ci_low": low, f"{name}_ci_high": high}
