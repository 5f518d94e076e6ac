"""From an R2b campaign to what claims and report read: cells of the matrix kernel, bars, crossings, steps and power.

Pure: the same campaigns give the same numbers to the last digit. What cannot be computed is missing with its reason.
This module reads no prediction; bars are those that the project set itself, in `lab.bars_r2b`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lab import (
    analysis_r2,
    bars_r2b,
    clocks,
    decode_r2,
    dispatch,
    gemm_r2b,
    product_cells,
    production,
    records,
)
from lab.analysis_r2 import (
    ABLATION_COLUMNS,
    BANDWIDTH,
    BAR_COLUMNS,
    DECODE_COLUMNS,
    bar_table,
    cell_row,
    of_constant,
    three,
    to_csv,
    us,
)
from lab.arm_times import ArmTimes
from lab.bars import Bar, Miss
from lab.decomposition import Constants
from lab.derived import is_derived
from lab.dispatch import LINEAR, REGRET, Regret
from lab.gemm_r2b import (
    KERNEL,
    NEIGHBOUR,
    PEAK,
    PREFILL_M,
    SEARCHED,
    SEARCHED_MS,
    SEARCHED_TOO,
    Choice,
    Crossing,
    bound_of,
    over,
)
from lab.plan import BASELINES
from lab.product_cells import ProductCell, Step
from lab.profile_r2 import FLOOR, Profile, profiles
from lab.records import Campaign
from lab.rows import NotReached, not_reached, to_json
from lab.statistics import Estimate

RUNG = "R2b"
#: Another part of the rung: id and times.
Other = tuple[str, ArmTimes]
#: A constant as recorded, and the campaign that it is from.
Sourced = tuple[Mapping[str, Any], str]


@dataclass(frozen=True)
class Analysis:
    """Everything that R2b says.

    bandwidth, peak: asymptotic read bandwidth (log TB/s) and BF16 rate (log TFLOP/s), sources: campaigns that they are
    from. decode: the campaign of the decode part that stands beside, empty without one. regrets: of this campaign.
    power: readings by arm, see `lab.clocks.by_arm`. ridges: constants that follow from the device, as recorded.
    taken: number of points that were measured; lost: (shape, N, K, M) of those that were not reached.
    """

    campaign: str
    cells: tuple[ProductCell, ...]
    choices: tuple[Choice, ...]
    crossings: tuple[Crossing, ...]
    steps: tuple[Step, ...]
    elements: tuple[Step, ...]
    regrets: tuple[Regret, ...]
    constants: Constants
    bars: tuple[Bar, ...]
    misses: tuple[Miss, ...]
    speeds: pd.DataFrame
    profiles: tuple[Profile, ...]
    power: pd.DataFrame
    bandwidth: Estimate | None
    peak: Estimate | None
    sources: Mapping[str, str]
    ridges: Mapping[str, Mapping[str, Any]]
    decode: str
    taken: int
    lost: tuple[tuple[str, int, int, int], ...]


def analyse(
    campaign: Campaign,
    name: str,
    shapes: Sequence[Mapping[str, Any]],
    constants: Mapping[str, Sourced] | None = None,
    other: Other | None = None,
) -> Analysis:
    """Analyse a campaign of R2b; `name` is its id, `shapes` the rows of prereg/shapes.json.

    constants: of the device, by name, from an earlier campaign where this one has none. other: the decode part.
    ValueError for a campaign of another rung.
    """
    if campaign.rung != RUNG:
        raise ValueError(f"{name} is a campaign of {campaign.rung}, not of {RUNG}")
    times = ArmTimes(campaign)
    known = dict(constants or {}) | {key: (row, name) for key, row in campaign.constants.items()}
    bandwidth, peak = (
        of_constant(known[key][0]) if key in known else None for key in (BANDWIDTH, PEAK)
    )
    decode = decode_r2.decode_cells(other[1], shapes) if other else []
    cells = gemm_r2b.cells_of(times, shapes)
    choices = gemm_r2b.choices(times, shapes, decode)
    searches = dispatch.regrets(times)
    lost = not_reached(map(to_json, campaign.attempts))
    found = _constants(searches, other, lost)
    profiled = profiles(campaign, bandwidth, _is_profiled)
    bars, misses = bars_r2b.judge(cells, choices, found, profiled, shapes, peak)
    return Analysis(
        campaign=name,
        cells=tuple(cells),
        choices=tuple(choices),
        crossings=tuple(gemm_r2b.crossings(choices, peak, profiled)),
        steps=tuple(product_cells.ablation(times, cells, KERNEL)),
        elements=tuple(product_cells.elements(times, cells, KERNEL)),
        regrets=tuple(searches),
        constants=found,
        bars=tuple(bars),
        misses=tuple(misses),
        speeds=production.table(times, shapes, name),
        profiles=tuple(profiled),
        power=clocks.by_arm(campaign.samples, campaign.telemetry, PREFILL_M),
        bandwidth=bandwidth,
        peak=peak,
        sources={key: known[key][1] for key in (BANDWIDTH, PEAK) if key in known},
        ridges={key: row for key, (row, _) in known.items() if is_derived(key)},
        decode=other[0] if other else "",
        taken=len({(c.shape, c.N, c.K, c.M) for c in campaign.cells}),
        lost=tuple(lost),
    )


def _is_profiled(kernel: str) -> bool:
    return kernel in (FLOOR, *BASELINES.values()) or kernel.startswith(KERNEL)


def of_folder(folder: Path, shapes: Sequence[Mapping[str, Any]]) -> Analysis:
    """`analyse` of a recorded campaign. CampaignError where the record is not what it must be."""
    folder = Path(folder)
    campaign = records.load(folder)
    lacking = [key for key in (BANDWIDTH, PEAK) if key not in campaign.constants]
    earlier = {key: analysis_r2.earlier_constant(folder, campaign, key) for key in lacking}
    known = {key: one for key, one in earlier.items() if one is not None}
    other = dispatch.of_other_part(folder, campaign)
    return analyse(campaign, folder.name, shapes, known, other)


# ---- what the claims read ----------------------------------------------------------------------------------------


def gives(name: str | None) -> bool:
    """Whether a campaign of R2b answers a claim about the constant of that name."""
    return name == REGRET


def _constants(
    searches: Sequence[Regret], other: Other | None, lost: Sequence[tuple[str, int, int, int]]
) -> Constants:
    """The regret over both parts; not over a part of the plan, where points with a search were not reached."""
    missing = [p for p in lost if p[3] in SEARCHED_MS or (p[0], p[3]) == SEARCHED_TOO]
    if missing := [p for p in missing if p[0] != NEIGHBOUR]:
        planned = len(missing) + len(searches)
        why = f"{len(missing)} of the {planned} points with a search were not reached"
        return Constants({}, {REGRET: NotReached(why)})
    others = None if other is None else (other[0], dispatch.regrets(other[1]))
    value, why = dispatch.constant(searches, others, f"{LINEAR} over {SEARCHED}")
    return Constants({}, {REGRET: why}) if value is None else Constants({REGRET: value}, {})


# ---- tables ------------------------------------------------------------------------------------------------------

CELL_COLUMNS = (
    "campaign", "kernel", *DECODE_COLUMNS[1:], "bound", "bound_us", "over_bound", "over_bound_low", "over_bound_high",
    "launches", "gemm_us", "gemv_us", "over_gemm", "over_gemm_low", "over_gemm_high",
)  # fmt: skip


def cell_table(found: Analysis) -> pd.DataFrame:
    """One row a cold cell of qgemm_mx, then of `linear`: reports/r2b_cells.csv."""
    rows = []
    for kernel, cell, choice in (
        *((KERNEL, c, None) for c in found.cells),
        *((LINEAR, c.cell, c) for c in found.choices),
    ):
        bound = bound_of(cell, found.peak)
        row = {"campaign": found.campaign, "kernel": kernel, **cell_row(cell)}
        row |= {"bound": bound.kind, "bound_us": us(bound.time)}
        row |= three("over_bound", over(cell, bound))
        row |= three("over_gemm", choice.over_gemm if choice else None)
        if choice:
            row |= {
                "launches": choice.kernel,
                "gemm_us": us(choice.gemm),
                "gemv_us": us(choice.gemv),
            }
        rows.append(row)
    return pd.DataFrame(rows, columns=list(CELL_COLUMNS))


CROSSING_COLUMNS = (
    "campaign", "shape", "against", "crossing_m", "crossing_m_low", "crossing_m_high", "m_lowest", "m_highest", "at_m",
    "ratio", "memory", "tensor", "mechanism", "why",
)  # fmt: skip


def crossing_table(found: Analysis) -> pd.DataFrame:
    """One row a shape and rival: reports/r2b_crossover.csv. 0 or inf: not crossed on that side."""
    rows = [
        {
            "campaign": found.campaign, "shape": x.shape, "against": x.against, "crossing_m": x.value,
            "crossing_m_low": x.low, "crossing_m_high": x.high, "m_lowest": min(x.ms), "m_highest": max(x.ms),
            "at_m": x.m, "ratio": x.ratio.value, "memory": _number(x.memory), "tensor": _number(x.tensor),
            "mechanism": x.mechanism, "why": x.why,
        }
        for x in found.crossings
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=list(CROSSING_COLUMNS))


def _number(value: float | None) -> float:
    return math.nan if value is None else value


POWER_COLUMNS = (
    "campaign", "kernel", "format", "M", "readings", "sm_clock_mhz", "power_w", "capped",
)  # fmt: skip


def power_table(found: Analysis) -> pd.DataFrame:
    """One row an arm and M of prefill: reports/r2b_power.csv."""
    return found.power.assign(campaign=found.campaign)[list(POWER_COLUMNS)]


def empty_tables() -> dict[str, pd.DataFrame]:
    """The tables without a row: before any campaign of R2b."""
    columns = {
        "r2b_cells": CELL_COLUMNS,
        "r2b_bars": BAR_COLUMNS,
        "r2b_crossover": CROSSING_COLUMNS,
        "r2b_ablation": ABLATION_COLUMNS,
        "r2b_power": POWER_COLUMNS,
    }
    return {name: pd.DataFrame(columns=list(which)) for name, which in columns.items()}


def tables(found: Analysis | None) -> dict[str, pd.DataFrame]:
    """File name without suffix -> table, for reports/."""
    if found is None:
        return empty_tables()
    return {
        "r2b_cells": cell_table(found),
        "r2b_bars": bar_table(found.campaign, found.bars, found.misses),
        "r2b_crossover": crossing_table(found),
        "r2b_ablation": analysis_r2.ablation_table(found.campaign, found.steps, found.elements),
        "r2b_power": power_table(found),
    }


__all__ = ["Analysis", "analyse", "empty_tables", "gives", "of_folder", "tables", "to_csv"]
