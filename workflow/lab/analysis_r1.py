"""From an R1 campaign to what claims and report read: decompositions, constants, tables, and go or no-go for R2.

Pure: the same campaign, accuracy record and shapes give the same numbers to the last digit. A cell that cannot be
decomposed is named with the reason, never left out in silence; what then cannot be computed is missing with its reason.
This module reads no prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lab import accuracy, clocks, experiments_r1, files, production, records, samples, statistics
from lab import decomposition as dec
from lab.arm_times import Arm, ArmTimes, Point
from lab.decomposition import FULL, HEADLINE, NONE, Cell, Constants, Decomposition, Summary
from lab.experiments_r1 import COLD, LOOPED, NO_DEQUANT
from lab.production import BF16, FP8, PRODUCTION, Decision
from lab.records import Campaign
from lab.statistics import Estimate

RUNG = "R1"
LAUNCH_TESTBED, LAUNCH_FLOOR = "probe/launch_testbed", "probe/launch_floor"
BALANCED = production.PROBE_BALANCED
#: The counter that says how many instructions a warp issues in the main loop for every 64 weights.
LOOP_INSTRUCTIONS = "loop_instructions_per_64_weights"
LOOPED_SHAPE = "gpt_oss_2880"
SUMMARIES = ("frozen", "large")

#: What the time of the full testbed should be by counters of a separate pass (lab.counters_r1), or None.
Predict = Callable[[Campaign, Cell], Estimate | None]


@dataclass(frozen=True)
class Analysis:
    """Everything that R1 says.

    refused: cell -> why it could not be decomposed. summaries: by (set, M) in the order of the report. missing_peers:
    (kernel, format, reason). probes: time (us, geometric mean) of the probes and bounds by (set, M) and kernel.
    """

    campaign: str
    found: tuple[Decomposition, ...]
    refused: Mapping[str, str]
    summaries: Mapping[tuple[str, int], Summary]
    constants: Constants
    production: pd.DataFrame
    experiments: pd.DataFrame
    decision: Decision
    missing_peers: tuple[tuple[str, str, str], ...]
    probes: Mapping[tuple[str, int], Mapping[str, Estimate]]

    @property
    def causes(self) -> pd.DataFrame:
        """The table of reports/r1_causes.csv."""
        return cause_table(self)


def analyse(
    campaign: Campaign,
    name: str,
    shapes: Sequence[Mapping[str, Any]],
    accuracy_record: Mapping[str, Any] | None = None,
    predict: Predict | None = None,
) -> Analysis:
    """Analyse a campaign of R1; `name` is its id, `shapes` the rows of prereg/shapes.json.

    predict: None takes `lab.counters_r1.prediction`. ValueError for a campaign of another rung.
    """
    if campaign.rung != RUNG:
        raise ValueError(f"{name} is a campaign of {campaign.rung}, not of {RUNG}")
    times = ArmTimes(campaign)
    blocks = samples.block_times(campaign.samples)
    logs = dec.gather(blocks)
    found, refused = decompositions(campaign, logs, predict or _by_counters)
    summaries = _summaries(found, shapes)
    variants = {(c.format, _point(c)): frame for c, frame in logs.items()}
    ours = {point: frame for (fmt, point), frame in variants.items() if fmt == HEADLINE[0]}
    ours = {point: frame for point, frame in ours.items() if point.regime == HEADLINE[1]}
    return Analysis(
        campaign=name,
        found=tuple(found),
        refused=refused,
        summaries=summaries,
        constants=constants(campaign, found, shapes, times, variants, accuracy_record, refused),
        production=production.table(times, shapes, name),
        experiments=experiments_r1.table(times, variants, shapes, name),
        decision=production.decide(times, production.bounds_of(times, ours, shapes), shapes),
        missing_peers=_missing_peers(campaign),
        probes=_probe_times(ours, shapes),
    )


def chosen(folders: Iterable[Path]) -> Path | None:
    """The campaign of R1 among the ones that a report shows, or None."""
    for folder in folders:
        if files.read_json(Path(folder) / records.CAMPAIGN)["rung"] == RUNG:
            return Path(folder)
    return None


def of_folder(
    folder: Path,
    shapes: Sequence[Mapping[str, Any]],
    accuracy_folder: Path | None,
    predict: Predict | None = None,
) -> Analysis:
    """`analyse` of a recorded campaign. CampaignError or AccuracyError where a record is not what it must be."""
    record = None if accuracy_folder is None else accuracy.load(accuracy_folder)
    return analyse(records.load(folder), Path(folder).name, shapes, record, predict)


def _by_counters(campaign: Campaign, cell: Cell) -> Estimate | None:
    from lab.counters_r1 import prediction

    return prediction(campaign, cell)


def _point(cell: Cell) -> Point:
    return Point(cell.shape, cell.N, cell.K, cell.M, cell.regime)


# ---- decompositions ----------------------------------------------------------------------------------------------


def decompositions(
    campaign: Campaign, logs: Mapping[Cell, pd.DataFrame], predict: Predict
) -> tuple[list[Decomposition], dict[str, str]]:
    """The split of every cell that has the variant without factors, and why a cell of these has none."""
    passed = {c.key for c in campaign.cells if c.correctness == "passed"}
    readings = clocks.readings_during(campaign.samples, campaign.telemetry)
    found, refused = [], {}
    for cell, frame in logs.items():
        if NONE not in frame:
            continue  # a format or a regime in which the factorial was not taken
        try:
            if (FULL, *cell) not in passed:
                raise ValueError(f"{cell}: {FULL} has not passed its checks")
            ours = (PRODUCTION, *cell) in passed and PRODUCTION in frame
            ours = ours and bool(np.isfinite(frame[PRODUCTION]).all())
            found.append(
                dec.decompose(
                    cell,
                    frame,
                    terms=terms(cell, frame, readings),
                    predicted=predict(campaign, cell),
                    production=PRODUCTION if ours else None,
                )
            )
        except ValueError as error:
            refused[str(cell)] = str(error).removeprefix(f"{cell}: ")
    return found, refused


def terms(cell: Cell, frame: pd.DataFrame, readings: pd.DataFrame) -> dict[str, dec.Term]:
    """The measured terms, microseconds over what the floor pays, by name; ValueError where a probe was not timed."""
    for probe in (LAUNCH_TESTBED, LAUNCH_FLOOR, BALANCED):
        if probe not in frame:
            raise ValueError(f"{cell}: {probe} was not timed")
    us = np.exp(frame)
    return {
        "launch": us[LAUNCH_TESTBED] - us[LAUNCH_FLOOR],
        "grid_fill": us[NONE] - us[BALANCED],
        "clock": clock_term(cell, us[NONE], readings),
    }


def clock_term(cell: Cell, none_us: pd.Series, readings: pd.DataFrame) -> Estimate:
    """What another clock than the floor's could cost the variant without factors: 0, with the error of the clock.

    The arms of a block run within milliseconds of each other, so on average they share a clock. A leg's clock differs
    from the mean of its point by the spread s of the readings; a block compares two legs with two, which leaves
    none x s, and n blocks leave none x s / sqrt(n). A clock that all readings agree on leaves exactly 0, as does a
    point without 2 readings, where nothing is known: then the term claims nothing.
    """
    here = readings
    for name, value in _point(cell)._asdict().items():
        here = here[here[name] == value]
    clock = here["sm_clock_mhz"].dropna().astype(float)
    if len(clock) < 2:
        return Estimate(0.0, 0.0, math.inf, log=False)
    spread = float(clock.std(ddof=1) / clock.mean())
    error = float(none_us.mean()) * spread / math.sqrt(len(none_us))
    return Estimate(0.0, error, len(clock) - 1, log=False)


def _summaries(
    found: Sequence[Decomposition], shapes: Sequence[Mapping[str, Any]]
) -> dict[tuple[str, int], Summary]:
    out = {}
    ours = [d for d in found if (d.cell.format, d.cell.regime) == HEADLINE]
    for subset in SUMMARIES:
        names = production.shapes_of(shapes, subset)
        for m in sorted({d.cell.M for d in ours}):
            some = [d for d in ours if d.cell.M == m and d.cell.shape in names]
            if some:
                out[subset, m] = dec.summarise(some, subset)
    return out


def _probe_times(
    logs: Mapping[Point, pd.DataFrame], shapes: Sequence[Mapping[str, Any]]
) -> dict[tuple[str, int], dict[str, Estimate]]:
    """Geometric mean over shapes of the time (us) of the probes, the bounds and the floor, by (set, M)."""
    arms = (LAUNCH_TESTBED, LAUNCH_FLOOR, BALANCED, NONE, dec.FLOOR)
    out: dict[tuple[str, int], dict[str, Estimate]] = {}
    for subset in SUMMARIES:
        names = production.shapes_of(shapes, subset)
        for m in sorted({p.M for p in logs}):
            frames = [f for p, f in logs.items() if p.M == m and p.shape in names]
            some = {}
            for arm in arms:
                parts = [statistics.sample_estimate(f[arm].dropna()) for f in frames if arm in f]
                if parts:
                    some[arm] = statistics.geomean(parts)
            if some:
                out[subset, m] = some
    return out


def _missing_peers(campaign: Campaign) -> tuple[tuple[str, str, str], ...]:
    found = {
        (a.kernel, a.format or "", a.reason)
        for a in campaign.attempts
        if a.kernel and a.reason and a.reason.startswith("NOT_")
    }
    return tuple(sorted(found))


# ---- what the claims read ----------------------------------------------------------------------------------------

ISSUE_SLOTS = "issue_slots_per_64_weights_testbed"
DEQUANT_SLOTS = "dequant_instructions_per_64_weights_testbed"
DEQUANT_RATIO = "nvfp4_over_mxfp4_dequant_time"
LOOPED_RATIO = "looped_over_graphed_testbed_2880_m1"
WEIGHT_ERROR = "weight_error_mxfp4_over_nvfp4"


def gives(name: str | None) -> bool:
    """Whether a campaign of R1 answers a claim about the constant, or about the share of the cause, of that name."""
    if name is None:
        return False
    known = (*dec.FACTORS, *dec.TERMS, dec.RESIDUAL, ISSUE_SLOTS, DEQUANT_SLOTS, DEQUANT_RATIO)
    return name in (*known, LOOPED_RATIO) or name.startswith(("largest_residual", WEIGHT_ERROR))


def constants(
    campaign: Campaign,
    found: Sequence[Decomposition],
    shapes: Sequence[Mapping[str, Any]],
    times: ArmTimes,
    variants: Mapping[tuple[str, Point], pd.DataFrame],
    accuracy_record: Mapping[str, Any] | None = None,
    refused: Mapping[str, str] | None = None,
) -> Constants:
    """All constants of R1, and why one is missing. Times of the legs, SASS counts and the accuracy record; no constant
    that the campaign itself recorded.
    """
    out = dec.campaign_constants(found, shapes)
    if refused:
        cell, reason = next(iter(refused.items()))
        note = f"{len(refused)} cells could not be decomposed, the first {cell}: {reason}"
        for name, why in out.missing.items():
            if "no cell of" in why:
                out.missing[name] = f"{why} ({note})"
    for name, give in (
        (ISSUE_SLOTS, lambda: _issue_slots(campaign, FULL)),
        (DEQUANT_SLOTS, lambda: _dequant_slots(campaign)),
        (DEQUANT_RATIO, lambda: _dequant_ratio(variants)),
        (LOOPED_RATIO, lambda: _looped(times, shapes)),
    ):
        value, why = give()
        if value is None:
            out.missing[name] = why
        else:
            out.found[name] = value
    if accuracy_record is None:
        out.missing[WEIGHT_ERROR] = "no accuracy record (snakemake accuracy)"
    else:
        source = accuracy.record_id(accuracy_record)
        for name, value in accuracy.constants(accuracy_record).items():
            out.found[name] = {**value, "campaign": source}
    return out


Found = tuple[dict[str, Any] | None, str]


def _slots(campaign: Campaign, kernel: str) -> tuple[float | None, str]:
    values = {
        float(row["value"])
        for row in campaign.counters
        if (row["metric"], row["kernel"], row["format"], row["M"])
        == (LOOP_INSTRUCTIONS, kernel, "mxfp4", 1)
    }
    if len(values) != 1:
        seen = f"{len(values)} values {sorted(values)}" if values else "no counter row"
        return None, f"{seen} of {LOOP_INSTRUCTIONS} of {kernel} (mxfp4, M=1)"
    return values.pop(), ""


def _issue_slots(campaign: Campaign, kernel: str) -> Found:
    value, why = _slots(campaign, kernel)
    how = f"SASS instructions of a warp in the main loop of {kernel} (mxfp4, M=1) for every 64 weights"
    return (None, why) if value is None else (_exact(value, "instructions", how), "")


def _dequant_slots(campaign: Campaign) -> Found:
    full, why = _slots(campaign, FULL)
    rest, also = _slots(campaign, NO_DEQUANT)
    if full is None or rest is None:
        return None, why or also
    how = f"the same counts, {FULL} minus {NO_DEQUANT}"
    return _exact(full - rest, "instructions", how), ""


def _exact(value: float, unit: str, how: str) -> dict[str, Any]:
    return {"value": value, "unit": unit, "ci_low": None, "ci_high": None, "n": None, "how": how}


def _dequant_ratio(variants: Mapping[tuple[str, Point], pd.DataFrame]) -> Found:
    ratio, how = experiments_r1.nvfp4_over_mxfp4(variants)
    return (None, how) if ratio is None else (_measured(ratio, "ratio", how), "")


def _looped(times: ArmTimes, shapes: Sequence[Mapping[str, Any]]) -> Found:
    size = {s["name"]: (s["N"], s["K"]) for s in shapes}
    if LOOPED_SHAPE not in size:
        return None, f"{LOOPED_SHAPE} is no shape"
    arm, point = Arm(FULL, "mxfp4"), Point(LOOPED_SHAPE, *size[LOOPED_SHAPE], 1, COLD)
    looped = point._replace(regime=LOOPED)
    ratio = times.ratio((arm, looped), (arm, point))
    if ratio is None:
        lost = [p.regime for p in (looped, point) if not times.has(arm, p)]
        return None, f"{FULL} mxfp4 on {LOOPED_SHAPE} at M=1 was not timed in {', '.join(lost)}"
    how = f"time of {FULL} in mxfp4 on {LOOPED_SHAPE}, M=1, {LOOPED} over {COLD}"
    return _measured(ratio, "ratio", how), ""


def _measured(estimate: Estimate, unit: str, how: str) -> dict[str, Any]:
    low, high = estimate.interval()
    n = round(estimate.df) + 1 if math.isfinite(estimate.df) else None
    return {
        "value": estimate.value,
        "unit": unit,
        "ci_low": low,
        "ci_high": high,
        "n": n,
        "how": how,
    }


# ---- tables ------------------------------------------------------------------------------------------------------


def cause_table(found: Analysis) -> pd.DataFrame:
    """One row a cell and cause, then one a set of shapes, M and cause: reports/r1_causes.csv.

    over: "cell", or the set that a row is the mean of, whose amounts are in multiples of the floor (`over_floor`).
    """
    cells = dec.cause_table(found.found)
    if len(cells):
        cells = cells.assign(over="cell", shapes=1)
        factor = [bar.over_floor for d in found.found for bar in _bars(d)]
        cells = pd.concat([cells, _counters_rows(found.found)], ignore_index=True)
        for name, pick in _THREE.items():
            column = [pick(e) for e in factor]
            cells[f"over_floor{name}"] = column + [math.nan] * (len(cells) - len(column))
    rows = [
        {
            "over": subset, "shapes": len(s.shapes), "format": s.format, "M": s.M, "regime": s.regime,
            "cause": bar.name, "kind": bar.kind, "verdict": s.verdict,
            "label": f"stacked on {bar.stacked}" if bar.stacked else "",
            **{f"share{name}": pick(bar.share) for name, pick in _THREE.items()},
            **{f"over_floor{name}": pick(bar.over_floor) for name, pick in _THREE.items()},
        }
        for (subset, _), s in found.summaries.items()
        for bar in (*s.causes, s.residual, *([s.beyond] if s.beyond else []))
    ]  # fmt: skip
    parts = [part for part in (cells, pd.DataFrame(rows)) if len(part)]
    frame = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    frame = frame.reindex(columns=list(TABLE_COLUMNS)).assign(campaign=found.campaign)
    return frame.astype(dict.fromkeys(("shapes", "N", "K", "M"), "Int64"))


def _value(estimate: Estimate | None) -> float:
    return math.nan if estimate is None else estimate.value


def _low(estimate: Estimate | None) -> float:
    return math.nan if estimate is None else estimate.interval().low


def _high(estimate: Estimate | None) -> float:
    return math.nan if estimate is None else estimate.interval().high


_THREE = {"": _value, "_ci_low": _low, "_ci_high": _high}
_AMOUNTS = ("us", "share", "over_floor", "leave_one_out_us", "alone_us")
TABLE_COLUMNS = (
    "campaign", "over", "shapes", *Cell._fields, "cause", "kind",
    *(f"{name}{end}" for name in _AMOUNTS for end in _THREE), "label", "verdict",
)  # fmt: skip


PAIR_COLUMNS = (
    "campaign", *Cell._fields, "others", "first", "second",
    *(f"{name}_us{end}" for name in ("first", "second", "joint", "overlap") for end in _THREE), "label",
)  # fmt: skip


def pair_table(found: Analysis) -> pd.DataFrame:
    """One row a cell, pair of factors and background: reports/r1_interactions.csv."""
    frame = dec.pair_table(found.found).assign(campaign=found.campaign)
    return frame.reindex(columns=list(PAIR_COLUMNS))


def _bars(d: Decomposition) -> list[dec.Cause]:
    return [*d.causes, d.residual, *([d.beyond] if d.beyond else [])]


def _counters_rows(found: Sequence[Decomposition]) -> pd.DataFrame:
    """The second closure: time of the full testbed less what counters predict."""
    rows = []
    for d in found:
        closure = d.closure("counters")
        row = {
            "over": "cell",
            "shapes": 1,
            **d.cell._asdict(),
            "cause": "counters",
            "kind": "closure",
        }
        row |= {f"us{n}": pick(closure.amount) for n, pick in _THREE.items()}
        row |= {f"share{n}": pick(closure.share) for n, pick in _THREE.items()}
        rows.append(row | {"label": "", "verdict": closure.verdict})
    return pd.DataFrame(rows)


def ranking(summary: Summary) -> list[dec.Ranked]:
    """The named causes by falling share; empty where the gap of some shape cannot be told from 0."""
    return [] if summary.no_gap else dec.rank(summary.causes)


def is_conclusive(ranked: Sequence[dec.Ranked]) -> bool:
    """Whether no two neighbours overlap."""
    return bool(ranked) and all(r.then != "inconclusive" for r in ranked)


def to_csv(frame: pd.DataFrame) -> str:
    """CSV text: six significant digits, nothing where there is no number, so that replays agree byte for byte."""
    return frame.to_csv(index=False, float_format="%.6g", lineterminator="\n")


def empty_tables() -> dict[str, pd.DataFrame]:
    """The tables without a row: before any campaign of R1."""
    columns = {
        "r1_causes": TABLE_COLUMNS,
        "r1_interactions": PAIR_COLUMNS,
        "r1_production": production.COLUMNS,
        "r1_experiments": experiments_r1.COLUMNS,
    }
    return {name: pd.DataFrame(columns=list(which)) for name, which in columns.items()}


def tables(found: Analysis | None) -> dict[str, pd.DataFrame]:
    """File name without suffix -> table, for reports/."""
    if found is None:
        return empty_tables()
    return {
        "r1_causes": found.causes,
        "r1_interactions": pair_table(found),
        "r1_production": found.production,
        "r1_experiments": found.experiments,
    }


__all__ = [
    "BF16", "FP8", "Analysis", "analyse", "cause_table", "clock_term", "constants", "decompositions", "is_conclusive",
    "of_folder", "pair_table", "ranking", "tables", "terms", "to_csv",
]  # fmt: skip
