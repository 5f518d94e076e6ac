"""Verdicts: judge every claim against the evidence, and nothing else.

Precedence (METHOD 2): TAMPERED, INVALID, NOT_RUN, DEVIATED, then the statistics. Each claim has
exactly one verdict. The interval beside a threshold or ordering verdict is the one that decided
it: its level is that of Holm's procedure over the family, so the verdict can be read off it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lab import samples as legs
from lab import source, statistics
from lab.claims import QUANTILES, TIMED, CellKey, Claim
from lab.files import write_text
from lab.registry import Problem
from lab.rows import CampaignError, NotReached
from lab.rungs import rung_of
from lab.statistics import Crossover, Estimate, Extreme, Interval, Quantity, Recorded

COLUMNS = [
    "claim",
    "rung",
    "kind",
    "novelty",
    "unit",
    *QUANTILES,
    "observed",
    "ci_low",
    "ci_high",
    "verdict",
    "campaign",
]
VERDICTS = (
    "CONFIRMED",
    "REFUTED",
    "INCONCLUSIVE",
    "HIT",
    "STRADDLE",
    "MISS",
    "EXPLORATORY",
    "DEVIATED",
    "NOT_RUN",
    "INVALID",
    "TAMPERED",
)
# What the statistics of an admissible campaign say.
DECIDED = ("CONFIRMED", "REFUTED", "INCONCLUSIVE", "HIT", "STRADDLE", "MISS")
CELL = ["kernel", "format", "N", "K", "M", "regime"]
CELL_COLUMNS = [
    "campaign",
    "kernel",
    "role",
    "format",
    "shape",
    "N",
    "K",
    "M",
    "regime",
    "correctness",
    "time_us",
    "ci_low_us",
    "ci_high_us",
    "n_blocks",
    "floor_us",
    "floor_ci_low_us",
    "floor_ci_high_us",
    "tuning_candidates",
]
BLOCK_COLUMNS = ["campaign", "kernel", "format", "shape", "N", "K", "M", "regime", "block"]
CHECK_COLUMNS = ["campaign", "kernel", "format", "shape", "N", "K", "M", "name", "passed"]


#: Constants by name, and by name why others are missing (lab.decomposition.Constants).
Computed = tuple[Mapping[str, Mapping[str, Any]], Mapping[str, str]]
#: What gives them from a campaign's folder.
Compute = Callable[[Path], Computed]
#: Block values of the legs of a campaign, and (campaign, *cell) -> why a cell is invalid.
Legs = tuple[pd.DataFrame, dict[tuple[Any, ...], str]]


def _empty(columns: Sequence[str]) -> pd.DataFrame:
    return pd.DataFrame(columns=list(columns))


@dataclass
class Evidence:
    """What was measured or computed.

    cells: one row per cell and campaign (``CELL_COLUMNS``; times in us).
    blocks: one row per cell and block, ``log_time`` = mean log of the block's two legs (log us).
    constants: name -> {value, unit, ci_low, ci_high, n, campaign}; null interval: exact.
    own_constants: the same by (rung, name): what a campaign of the claim's own rung gives comes first.
    missing: name of a constant -> why a campaign that was to give it does not.
    uncomputed: (rung, campaign) of unsound campaigns whose legs give no constants: claims on those are as unsound.
    rungs: campaign -> its rung.
    checks: one row per correctness check. facts: name -> number computed from code.
    tampered, invalid: campaign -> reason. invalid_cells: (campaign, *cell) -> reason.
    deviations: campaign -> reason. order: campaigns in the order in which they are asked.
    """

    cells: pd.DataFrame = field(default_factory=lambda: _empty(CELL_COLUMNS))
    blocks: pd.DataFrame = field(default_factory=lambda: _empty([*BLOCK_COLUMNS, "log_time"]))
    constants: dict[str, dict[str, Any]] = field(default_factory=dict)
    own_constants: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    uncomputed: list[tuple[str, str]] = field(default_factory=list)
    rungs: dict[str, str] = field(default_factory=dict)
    checks: pd.DataFrame = field(default_factory=lambda: _empty(CHECK_COLUMNS))
    facts: dict[str, float] = field(default_factory=dict)
    tampered: dict[str, str] = field(default_factory=dict)
    invalid: dict[str, str] = field(default_factory=dict)
    invalid_cells: dict[tuple[Any, ...], str] = field(default_factory=dict)
    deviations: dict[str, str] = field(default_factory=dict)
    order: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Index the rows by campaign and cell."""
        found = [*self.order, *self.cells["campaign"], *self.checks["campaign"]]
        self.order = tuple(dict.fromkeys(found))
        self._rows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in self.cells.to_dict("records"):
            self._rows.setdefault((row["campaign"], *(row[k] for k in CELL)), []).append(row)
        self._logs = dict(legs.logs_of(self.blocks, ["campaign", *CELL]))
        self._series: dict[tuple[Any, ...], pd.Series] = {}

    def asked(self, rung: str) -> list[str]:
        """Campaigns in the order in which a claim of a rung asks them: its own rung's first."""
        return sorted(self.order, key=lambda name: self.rungs.get(name, rung) != rung)

    def constant(self, rung: str, name: str) -> dict[str, Any] | None:
        """A constant as a claim of a rung sees it."""
        return self.own_constants.get((rung, name)) or self.constants.get(name)

    def rows(self, campaign: str, cell: CellKey) -> list[dict[str, Any]]:
        """Rows of one cell in one campaign; more than one is a duplicate."""
        return self._rows.get((campaign, *cell.measured), [])

    def series(self, campaign: str, cell: CellKey) -> pd.Series | None:
        """Log block times of one cell, indexed by block."""
        key = (campaign, *cell.measured)
        if key in self._logs and key not in self._series:  # few of the cells are asked for
            blocks, logs = self._logs[key]
            self._series[key] = pd.Series(logs, blocks)
        return self._series.get(key)

    @classmethod
    def from_campaigns(
        cls,
        folders: Iterable[str | Path],
        protocol_sha256: str | Mapping[str, str | None] | None = None,
        facts: Mapping[str, float] | None = None,
        invalid: Mapping[str, str] | None = None,
        tampered: Mapping[str, str] | None = None,
        computed: Mapping[str, Compute] | None = None,
        read: Callable[[Path], Legs] | None = None,
    ) -> Evidence:
        """Read recorded campaigns, the newest first; pilots are left out.

        ``protocol_sha256`` is that of the frozen protocol, or of each part's: another one is a deviation.
        ``invalid`` and ``tampered`` carry reasons found elsewhere, campaign -> reason.
        ``computed``: part -> what gives the constants that follow from a campaign's legs; they count as recorded.
        ``read`` stands in for `read_legs`, for a caller that reads a campaign more than once.
        """
        loaded = []
        for folder in map(Path, folders):
            record = json.loads((folder / "campaign.json").read_text(encoding="utf-8"))
            if record["kind"] != "pilot":
                loaded.append((record["created_utc"], folder, record))
        loaded.sort(key=lambda item: (item[0], item[1].name), reverse=True)
        evidence: dict[str, Any] = {
            "constants": {},
            "own_constants": {},
            "missing": {},
            "uncomputed": [],
            "rungs": {folder.name: rung_of(record["rung"]) for _, folder, record in loaded},
            "invalid": dict(invalid or {}),
            "tampered": dict(tampered or {}),
            "invalid_cells": {},
            "deviations": {},
            "facts": dict(facts or {}),
            "order": tuple(folder.name for _, folder, _ in loaded),
        }
        cells, blocks, checks = [], [], []
        withheld: set[tuple[str, str]] = set()
        for _, folder, record in loaded:
            name = folder.name
            cells += [_flat_cell(name, row) for row in record["cells"]]
            checks += [{"campaign": name, **row} for row in record["checks"]]
            found = dict(record["constants"])
            if record["rung"] in (computed or {}):
                try:
                    given, lost = computed[record["rung"]](folder)
                    found |= given
                    for key, why in lost.items():
                        evidence["missing"].setdefault(key, why)
                        if isinstance(why, NotReached):
                            withheld.add((rung_of(record["rung"]), key))
                except (CampaignError, ValueError, LookupError, TypeError, AttributeError):
                    if name not in evidence["invalid"] and name not in evidence["tampered"]:
                        raise
                    evidence["uncomputed"].append((rung_of(record["rung"]), name))
            for key, constant in found.items():
                if (rung_of(record["rung"]), key) in withheld:
                    continue
                sourced = {"campaign": name, **constant}
                evidence["constants"].setdefault(key, sourced)
                evidence["own_constants"].setdefault((rung_of(record["rung"]), key), sourced)
            reason = _deviation(record, protocol_sha256, folder)
            if reason:
                evidence["deviations"][name] = reason
            if not record["settings_untouched"]:
                evidence["invalid"].setdefault(name, "device settings were changed")
            try:
                values, dropped = (read or read_legs)(folder)
            except CampaignError as error:
                evidence["invalid"].setdefault(name, str(error))
                continue
            blocks.append(values.assign(campaign=name))
            evidence["invalid_cells"].update(dropped)
        return cls(
            cells=pd.DataFrame(cells, columns=CELL_COLUMNS),
            blocks=pd.concat(blocks) if blocks else _empty([*BLOCK_COLUMNS, "log_time"]),
            checks=pd.DataFrame(checks) if checks else _empty(CHECK_COLUMNS),
            **evidence,
        )


def _flat_cell(campaign: str, row: Mapping[str, Any]) -> dict[str, Any]:
    time, floor, tuning = row["time"] or {}, row["floor"] or {}, row["tuning"] or {}
    return {
        "campaign": campaign,
        **{key: row[key] for key in ("kernel", "role", "format", "shape", "N", "K", "M")},
        "regime": row["regime"],
        "correctness": row["correctness"],
        **{key: time.get(key) for key in ("time_us", "ci_low_us", "ci_high_us", "n_blocks")},
        "floor_us": floor.get("time_us"),
        "floor_ci_low_us": floor.get("ci_low_us"),
        "floor_ci_high_us": floor.get("ci_high_us"),
        "tuning_candidates": tuning.get("candidates"),
    }


def _deviation(
    record: Mapping[str, Any], frozen: str | Mapping[str, str | None] | None, folder: Path
) -> str | None:
    protocol_sha256 = frozen.get(record["rung"]) if isinstance(frozen, Mapping) else frozen
    if protocol_sha256 is not None and record["protocol_sha256"] != protocol_sha256:
        frozen_one = f"the frozen {protocol_sha256[:12]}" if protocol_sha256 else "frozen"
        return f"protocol {record['protocol_sha256'][:12]} is not {frozen_one}"
    repo = folder.resolve().parents[2]  # data/campaigns/ID
    if record["source"].get("dirty") and source.measured_commit(repo, record["source"]) is None:
        return "the source was dirty when it was measured, and no commit has its files"
    return None


def read_legs(folder: Path) -> Legs:
    """What the legs of a campaign give. CampaignError when they cannot be read."""
    samples = legs.read_table(folder / "samples.parquet", legs.SAMPLES_SCHEMA)
    return _block_values(samples), _dropped_cells(folder.name, samples)


def _block_values(samples: pd.DataFrame) -> pd.DataFrame:
    """Log time of each cell and kept block; the twins of A/A have no cell."""
    with np.errstate(invalid="ignore", divide="ignore"):
        times = legs.block_times(samples)
    return times[~times["arm"].str.endswith(legs.DUPLICATE_SUFFIX).astype(bool)]


def _dropped_cells(campaign: str, samples: pd.DataFrame) -> dict[tuple[Any, ...], str]:
    """Cells of sessions in which too many blocks were dropped (METHOD 3.7)."""
    found = {}
    cells = samples[["shape", *CELL]].drop_duplicates()
    for row in legs.dropped_blocks(samples).itertuples(index=False):
        reason = statistics.too_many_dropped(int(row.dropped), int(row.blocks))
        if reason:
            session = ["shape", "N", "K", "M", "regime"]
            same = (cells[session] == [getattr(row, name) for name in session]).all(axis=1)
            keys = cells.loc[same, CELL].itertuples(index=False, name=None)
            found.update({(campaign, *key): reason for key in keys})
    return found


@dataclass(frozen=True)
class Verdict:
    """The verdict of one claim; None where a number does not exist."""

    claim: str
    rung: str
    kind: str
    novelty: str
    unit: str
    q05: float | None
    q25: float | None
    q50: float | None
    q75: float | None
    q95: float | None
    observed: float | None
    ci_low: float | None
    ci_high: float | None
    verdict: str
    campaign: str | None
    reason: str = ""
    amends: str | None = None


class _Stop(Exception):
    """A claim ends before the statistics."""

    def __init__(self, verdict: str, reason: str, campaign: str | None = None) -> None:
        super().__init__(reason)
        self.verdict, self.reason, self.campaign = verdict, reason, campaign


@dataclass(frozen=True)
class _Item:
    """One term of an estimand: its estimate, and its block values where it has them."""

    estimate: Estimate
    series: pd.Series | None = None
    session: tuple[Any, ...] | None = None  # legs of one session ran interleaved

    def over(self, other: _Item) -> Estimate:
        """Log ratio (or difference) to another item, paired by block where they share blocks."""
        if self.series is not None and other.series is not None and self.session == other.session:
            shared = self.series.index.intersection(other.series.index)
            if len(shared) >= 2:
                return statistics.paired_log_ratio(self.series[shared], other.series[shared])
        return statistics.difference(self.estimate, other.estimate)


@dataclass(frozen=True)
class _Observation:
    """The quantity that decides a claim, and the campaign it comes from."""

    quantity: Quantity | bool
    campaign: str | None


class _Bench:
    """Looks up and combines evidence for one claim."""

    def __init__(self, claim: Claim, evidence: Evidence) -> None:
        self.claim, self.evidence, self.campaign = claim, evidence, None

    def observe(self) -> _Observation:
        estimand, kind = self.claim.estimand, self.claim.kind
        if estimand.quantity == "check":
            return self._check()
        if estimand.quantity in TIMED:
            self._choose([*estimand.cells, *estimand.reference_cells])
        if estimand.quantity == "constant" and kind != "ordering":
            quantity: Quantity = self._recorded(estimand.name)
            self._trust()
            return _Observation(quantity, self.campaign)
        items = self._items()
        if kind == "ordering":
            quantity = self._margins(items)
        elif estimand.quantity == "crossover_m":
            ms = tuple(cell.M for cell in estimand.cells)
            quantity = Crossover(ms, tuple(item.estimate for item in items))
        elif estimand.aggregate in ("min", "max"):
            parts = tuple(item.estimate for item in items)
            quantity = Extreme(parts, largest=estimand.aggregate == "max")
        elif estimand.aggregate == "geomean":
            quantity = statistics.geomean([item.estimate for item in items])
        else:
            quantity = items[0].estimate
        self._trust()
        return _Observation(quantity, self.campaign)

    def _stop(self, verdict: str, reason: str) -> _Stop:
        return _Stop(verdict, reason, self.campaign)

    def _trust(self) -> None:
        for verdict, reasons in (
            ("TAMPERED", self.evidence.tampered),
            ("INVALID", self.evidence.invalid),
        ):
            if self.campaign in reasons:
                raise self._stop(verdict, reasons[self.campaign])

    def _choose(self, cells: Sequence[CellKey]) -> None:
        """Take the first campaign that holds every cell: arms are compared within a campaign."""
        best: tuple[int, str] | None = None
        for campaign in self.evidence.asked(self.claim.rung):
            missing = [cell for cell in cells if not self.evidence.rows(campaign, cell)]
            if not missing:
                self.campaign = campaign
                break
            if best is None or len(missing) < best[0]:
                best = (len(missing), str(missing[0]))
        else:
            if best is None:
                raise _Stop("NOT_RUN", "no campaign is recorded")
            raise _Stop("NOT_RUN", f"missing: {best[0]} of {len(cells)} cells, first {best[1]}")
        self._trust()
        for cell in cells:
            reason = self._cell_fault(cell)
            if reason:
                raise self._stop("INVALID", f"{cell}: {reason}")

    def _cell_fault(self, cell: CellKey) -> str | None:
        rows = self.evidence.rows(self.campaign, cell)
        if len(rows) > 1:
            return f"duplicate cell, {len(rows)} rows"
        row = rows[0]
        fault = self.evidence.invalid_cells.get((self.campaign, *cell.measured))
        if fault:
            return fault
        if row["role"] == "correctness_only":
            return "role correctness_only has no time"
        if row["correctness"] not in ("passed", "not_applicable"):
            return f"correctness {row['correctness']}"
        time = row["time_us"]
        if time is None or not math.isfinite(time) or time <= 0:
            return f"time_us={time} is not a finite time"
        series = self.evidence.series(self.campaign, cell)
        if series is not None and not np.isfinite(series).all():
            return "a block value is NaN or infinite"
        if series is not None and series.index.has_duplicates:
            return "a block occurs twice"
        if row["role"] == "baseline" and not _positive(row.get("tuning_candidates")):
            return "the baseline has no tuning record: inadmissible"
        return None

    def _arm(self, cell: CellKey) -> _Item:
        series = self.evidence.series(self.campaign, cell)
        if series is not None and len(series) >= 2:
            session = (cell.N, cell.K, cell.M, cell.regime)
            return _Item(statistics.sample_estimate(series), series, session)
        row = self.evidence.rows(self.campaign, cell)[0]
        return _Item(self._published(cell, row, ""))

    def _published(self, cell: CellKey, row: Mapping[str, Any], prefix: str) -> Estimate:
        name = f"{prefix}us" if prefix else "time_us"
        numbers = [row[name], row[f"{prefix}ci_low_us"], row[f"{prefix}ci_high_us"]]
        if any(not _positive(number) for number in numbers):
            raise self._stop("INVALID", f"{cell}: {name} with its interval is {numbers}")
        n = int(row["n_blocks"]) if _positive(row["n_blocks"]) else None
        return statistics.from_interval(*numbers, n=n, log=True)

    def _items(self) -> list[_Item]:
        estimand = self.claim.estimand
        if estimand.quantity not in TIMED:
            names = estimand.items if self.claim.kind == "ordering" else (estimand.name,)
            if estimand.quantity == "bytes_per_weight":
                names = (
                    (estimand.name,)
                    if estimand.name
                    else tuple(cell.format for cell in estimand.cells)
                )
            return [_Item(self._named(key)) for name in names for key in self._keys(name)]
        if estimand.quantity == "time_us":
            return [self._arm(cell) for cell in estimand.cells]
        if estimand.quantity == "floor_ratio":
            return [self._floor_ratio(cell) for cell in estimand.cells]
        pairs = zip(estimand.cells, estimand.reference_cells, strict=True)
        return [
            self._ratio(self._arm(cell), self._arm(other), cell, other) for cell, other in pairs
        ]

    def _ratio(self, arm: _Item, other: _Item, cell: CellKey, reference: CellKey) -> _Item:
        """time(reference) / time(cell)."""
        if arm.series is None or other.series is None or arm.session != other.session:
            return _Item(other.over(arm))
        shared = arm.series.index.intersection(other.series.index)
        if len(shared) < 2:
            reason = f"{cell} and {reference} share {len(shared)} blocks: not interleaved"
            raise self._stop("INVALID", reason)
        return _Item(other.over(arm), other.series[shared] - arm.series[shared], arm.session)

    def _floor_ratio(self, cell: CellKey) -> _Item:
        """Time / floor. The floor is another cell's published interval, so it is not paired."""
        row = self.evidence.rows(self.campaign, cell)[0]
        floor = self._published(cell, row, "floor_")
        return _Item(statistics.difference(self._arm(cell).estimate, floor))

    def _margins(self, items: Sequence[_Item]) -> Extreme:
        """Each item over the next one: the claimed order holds when the smallest margin does."""
        sign = 1 if self.claim.direction == "above" else -1
        ordered = list(items)[::sign]
        return Extreme(tuple(a.over(b) for a, b in zip(ordered, ordered[1:], strict=False)))

    def _keys(self, name: str) -> list[str]:
        quantity, cells = self.claim.estimand.quantity, self.claim.estimand.cells
        if quantity == "bytes_per_weight":
            return [f"bytes_per_weight/{name}"]
        if quantity == "share":
            return [share_key(name, cell) for cell in cells] or [share_key(name)]
        return [name]

    def _numbers(self, key: str) -> tuple[float, float, float, int | None]:
        """Value, ends of the 95% interval and number of values of a constant."""
        constant = self.evidence.constant(self.claim.rung, key)
        if constant is None:
            if key not in self.evidence.facts:
                for rung, name in self.evidence.uncomputed:
                    if rung == self.claim.rung:
                        self.campaign = name
                        self._trust()
                why = self.evidence.missing.get(key)
                raise _Stop("NOT_RUN", f"missing: {key}" + (f": {why}" if why else ""))
            constant = {"value": self.evidence.facts[key], "ci_low": None, "ci_high": None}
        campaign = constant.get("campaign")
        if self.campaign is not None and campaign not in (None, self.campaign):
            raise self._stop("INVALID", f"{key} comes from another campaign, {campaign}")
        self.campaign = campaign or self.campaign
        value, low, high = constant["value"], constant["ci_low"], constant["ci_high"]
        if low is None and high is None:
            low = high = value
        numbers = (value, low, high)
        if any(not isinstance(v, int | float) or not math.isfinite(v) for v in numbers):
            raise self._stop("INVALID", f"{key}: value with its interval is {numbers}")
        if not low <= value <= high:
            raise self._stop("INVALID", f"{key}: [{low}, {high}] does not hold {value}")
        return (*numbers, constant.get("n"))

    def _recorded(self, key: str) -> Recorded:
        """A constant with the ends of its own interval: that of a largest value is not symmetric on any scale."""
        value, low, high, n = self._numbers(key)
        return Recorded.of(value, low, high, n, _log_scale(value, low, high))

    def _named(self, key: str) -> Estimate:
        """A constant as a term of a sum, with the symmetric error that such a term must have."""
        value, low, high, n = self._numbers(key)
        # Items of an ordering share one scale, the linear one.
        log = _log_scale(value, low, high)
        log = log and self.claim.kind != "ordering" and self.claim.estimand.quantity != "share"
        return statistics.from_interval(value, low, high, n, log)

    def _check(self) -> _Observation:
        """All rows of the named check ('*': of every check) over the cells must have passed."""
        name, cells = self.claim.estimand.name, self.claim.estimand.cells
        table = self.evidence.checks
        if name != "*":
            table = table[table["name"] == name]
        missing = f"missing: check {name}"
        for campaign in self.evidence.asked(self.claim.rung):
            rows = table[table["campaign"] == campaign]
            groups = [_rows_of(rows, cell) for cell in cells] if cells else [rows]
            absent = [i for i, group in enumerate(groups) if not len(group)]
            if absent:
                missing = f"missing: check {name}" + (f" of {cells[absent[0]]}" if cells else "")
                continue
            self.campaign = campaign
            self._trust()
            passed = pd.concat(groups)["passed"]
            if passed.isna().any():
                raise self._stop("INVALID", f"check {name} without a result")
            return _Observation(bool(passed.astype(bool).all()), campaign)
        raise _Stop("NOT_RUN", missing)


def share_key(cause: str, cell: CellKey | None = None) -> str:
    """Name under which a campaign records the share of a cause in the gap of a cell."""
    if cell is None:
        return f"share/{cause}"
    return f"share/{cause}/{cell.format}/{cell.N}x{cell.K}/m{cell.M}/{cell.regime}"


def _log_scale(value: float, low: float, high: float) -> bool:
    """Whether an interval is nearer to symmetric on the log scale. Ratios of times come from logs."""
    return low > 0 and abs(math.sqrt(low * high) - value) < abs((low + high) / 2 - value)


def _positive(number: Any) -> bool:
    return number is not None and math.isfinite(number) and number > 0


def _rows_of(rows: pd.DataFrame, cell: CellKey) -> pd.DataFrame:
    keep = pd.Series(True, index=rows.index)
    for key in ("kernel", "format", "N", "K", "M"):
        keep &= rows[key] == getattr(cell, key)
    return rows[keep]


def _holm_families(
    claims: Sequence[Claim], observed: Mapping[str, _Observation]
) -> dict[str, float]:
    """Level of the interval that decides each threshold or ordering claim.

    The size of a family is the number of its registered claims, fixed at freezing; amended claims
    form a family of their own.
    """
    families: dict[tuple[str, bool], list[Claim]] = {}
    for claim in claims:
        if claim.kind in ("threshold", "ordering"):
            families.setdefault((claim.family, claim.amends is not None), []).append(claim)
    levels = {}
    for family in families.values():
        tested = [claim for claim in family if claim.id in observed]
        p_values = [
            observed[claim.id].quantity.p_value(_threshold(claim, observed[claim.id].quantity))
            for claim in tested
        ]
        found = statistics.holm_levels(p_values, len(family))
        levels.update(zip((claim.id for claim in tested), found, strict=True))
    return levels


def _threshold(claim: Claim, quantity: Quantity) -> float:
    if claim.kind != "ordering":
        return claim.threshold
    return 1.0 if quantity.parts[0].log else 0.0


def _by_side(interval: Interval, threshold: float, direction: str) -> str:
    above, below = interval.low > threshold, interval.high < threshold
    if not (above or below):
        return "INCONCLUSIVE"
    return "CONFIRMED" if above == (direction == "above") else "REFUTED"


def _by_band(interval: Interval, low: float, high: float) -> str:
    if low <= interval.low and interval.high <= high:
        return "HIT"
    return "MISS" if interval.high < low or interval.low > high else "STRADDLE"


def _by_margin(claim: Claim, quantity: Quantity) -> str:
    """Two one-sided tests at 5%: the 90% interval lies inside the margin (Schuirmann 1987)."""
    d = claim.smallest_difference
    if claim.estimand.quantity in TIMED:
        centre = claim.threshold if claim.threshold is not None else 1.0
        low, high = centre / (1 + d), centre * (1 + d)
    else:
        low, high = claim.threshold - d, claim.threshold + d
    inner, outer = quantity.interval(2 * statistics.ALPHA), quantity.interval()
    if low < inner.low and inner.high < high:
        return "CONFIRMED"
    return "REFUTED" if outer.high < low or outer.low > high else "INCONCLUSIVE"


def judge(
    claims: Sequence[Claim],
    evidence: Evidence,
    integrity: Sequence[Problem] = (),
    registered: Iterable[str] | None = None,
) -> list[Verdict]:
    """Exactly one verdict for each claim, in the order given.

    ``integrity`` are problems of the registry and its history. ``registered`` are the ids of the
    manifest (None: every claim given): a claim outside it is EXPLORATORY at most, and an id in it
    without a claim that can be read is TAMPERED.
    """
    repeated = [key for key, n in Counter(claim.id for claim in claims).items() if n > 1]
    if repeated:
        raise ValueError(f"{repeated[0]} is given twice; an id has one verdict")
    ids = {claim.id for claim in claims}
    known = ids if registered is None else set(registered)
    tampered: dict[str, str] = {}
    for problem in integrity:
        if problem.status == "TAMPERED":
            # A problem without ids (the chain, the protocol, the shapes) touches every claim.
            for key in problem.claims or sorted(ids | known):
                tampered.setdefault(key, str(problem))

    stops: dict[str, _Stop] = {}
    observed: dict[str, _Observation] = {}
    for claim in claims:
        try:
            if claim.id in tampered:
                raise _Stop("TAMPERED", tampered[claim.id])
            observed[claim.id] = _Bench(claim, evidence).observe()
        except _Stop as stop:
            stops[claim.id] = stop
    real = [claim for claim in claims if claim.id in known]
    levels = _holm_families(real, observed)

    verdicts = []
    for claim in claims:
        stop = stops.get(claim.id)
        if stop is None:
            seen = observed[claim.id]
            verdicts.append(_decide(claim, seen, evidence, levels, claim.id in known))
        elif stop.verdict != "TAMPERED" and claim.id not in known:
            reason = f"not registered; {stop.reason}"
            verdicts.append(_verdict(claim, "EXPLORATORY", stop.campaign, reason))
        else:
            verdicts.append(_verdict(claim, stop.verdict, stop.campaign, stop.reason))
    lost = [key for key in dict.fromkeys([*(registered or ()), *tampered]) if key not in ids]
    for key in lost:
        reason = tampered.get(key, "registered, but its file cannot be read")
        nothing = [None] * 8
        verdicts.append(Verdict(key, "", "", "", "", *nothing, "TAMPERED", None, reason))
    return verdicts


def _decide(
    claim: Claim,
    observation: _Observation,
    evidence: Evidence,
    levels: Mapping[str, float],
    registered: bool,
) -> Verdict:
    quantity, campaign = observation.quantity, observation.campaign
    if isinstance(quantity, bool):
        value, interval = float(quantity), Interval(math.nan, math.nan)
    else:
        value = quantity.value
        interval = quantity.interval(levels.get(claim.id, statistics.ALPHA))
    reason = ""
    if not registered:
        verdict, reason = "EXPLORATORY", "not registered"
    elif campaign in evidence.deviations:
        verdict, reason = "DEVIATED", evidence.deviations[campaign]
    elif claim.kind == "exploratory":
        verdict = "EXPLORATORY"
    elif claim.kind == "correctness":
        verdict = "CONFIRMED" if quantity else "REFUTED"
    elif claim.kind == "equivalence":
        verdict = _by_margin(claim, quantity)
    elif claim.kind == "ordering":
        verdict = _by_side(interval, _threshold(claim, quantity), "above")
    elif claim.kind == "threshold":
        verdict = _by_side(interval, claim.threshold, claim.direction)
    else:
        verdict = _by_band(interval, claim.quantiles.q05, claim.quantiles.q95)
    return _verdict(claim, verdict, campaign, reason, value, interval)


def _verdict(
    claim: Claim,
    verdict: str,
    campaign: str | None,
    reason: str,
    value: float | None = None,
    interval: Interval | None = None,
) -> Verdict:
    def finite(number: float | None) -> float | None:
        return number if number is not None and math.isfinite(number) else None

    low, high = interval or (None, None)
    return Verdict(
        claim.id,
        claim.rung,
        claim.kind,
        claim.novelty,
        claim.unit,
        *(claim.quantiles or [None] * len(QUANTILES)),
        finite(value),
        finite(low),
        finite(high),
        verdict,
        campaign,
        reason,
        claim.amends,
    )


def disagreements(own: Sequence[Verdict], others: Iterable[Sequence[Verdict]]) -> list[str]:
    """Notes on claims to which another campaign, taken alone, gives another verdict than the newest that decides.

    ``own`` are the verdicts, ``others`` those by one campaign each, about the same claims.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    alone = [{v.claim: v for v in some} for some in others]
    for v in own:
        if v.campaign is None or v.verdict in ("TAMPERED", "INVALID"):
            continue  # the campaign's problem is given as such
        for other in (some.get(v.claim) for some in alone):
            if other is None or other.campaign in (None, v.campaign):
                continue
            if other.verdict in DECIDED and other.verdict != v.verdict:
                key = (v.verdict, v.campaign, other.verdict, other.campaign)
                found.setdefault(key, []).append(v.claim)
    return [
        f"{new} by {campaign}, but {old} by {older}: {', '.join(claims)}"
        for (new, campaign, old, older), claims in found.items()
    ]


def to_frame(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """Verdicts with the exact columns of reports/verdicts.csv."""
    return pd.DataFrame([[getattr(v, c) for c in COLUMNS] for v in verdicts], columns=COLUMNS)


def to_csv(verdicts: Sequence[Verdict]) -> str:
    """Text of reports/verdicts.csv: six significant digits, empty where a number does not exist."""
    return to_frame(verdicts).to_csv(index=False, float_format="%.6g", lineterminator="\n")


def write_csv(verdicts: Sequence[Verdict], path: str | Path) -> None:
    """Write reports/verdicts.csv."""
    write_text(path, to_csv(verdicts))
