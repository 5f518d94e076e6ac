"""From an R2 campaign to what claims and report read: decode cells, bars, ablation steps, the chain, and constants.

Pure: the same campaign gives the same numbers to the last digit. What cannot be computed is missing with its reason.
This module reads no prediction; bars are those that the project set itself, in `lab.bars_r2`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lab import bars_r2, dispatch, files, production, records, statistics
from lab.arm_times import ArmTimes
from lab.bars_r2 import Bar, Miss
from lab.decode_r2 import (
    CHAIN_SHAPE,
    CHAINED,
    HEADLINE,
    KERNEL,
    SEARCHED,
    Decode,
    Link,
    Step,
    ablation,
    chain_of,
    decode_cells,
    elements,
    growth,
)
from lab.decomposition import Constants
from lab.dispatch import REGRET, Regret
from lab.product_cells import ProductCell
from lab.profile_r2 import Profile, profiles
from lab.records import Campaign
from lab.statistics import Estimate, Extreme, Quantity

RUNG = "R2"
BANDWIDTH = "read_bandwidth_tbps"
M16_OVER_M1 = "qgemv_m16_over_m1"
CHAIN, HOST = "chain_pdl_over_asymptote", "linear_host_overhead_us"
PACK = "pack_weight_57344x8192_ms"
#: Ways of calling `linear` whose host time a campaign may record apart; the claim is about the slowest.
CALLERS = ("cupy", "torch")


@dataclass(frozen=True)
class Analysis:
    """Everything that R2 says about decode.

    bandwidth: asymptotic read bandwidth (log TB/s), with the campaign it is from. host: constants as recorded.
    """

    campaign: str
    decode: tuple[Decode, ...]
    steps: tuple[Step, ...]
    elements: tuple[Step, ...]
    chain: tuple[Link, ...]
    regrets: tuple[Regret, ...]
    constants: Constants
    bars: tuple[Bar, ...]
    misses: tuple[Miss, ...]
    speeds: pd.DataFrame
    profiles: tuple[Profile, ...]
    bandwidth: Estimate | None
    bandwidth_from: str
    host: Mapping[str, Mapping[str, Any]]


def analyse(
    campaign: Campaign,
    name: str,
    shapes: Sequence[Mapping[str, Any]],
    bandwidth: tuple[Mapping[str, Any], str] | None = None,
    other: tuple[str, ArmTimes] | None = None,
) -> Analysis:
    """Analyse a campaign of R2; `name` is its id, `shapes` the rows of prereg/shapes.json.

    bandwidth: the constant of the asymptotic read bandwidth and the campaign that it is from, where this one has none.
    other: the campaign of the other part of R2 that came before it.
    ValueError for a campaign of another rung.
    """
    if campaign.rung != RUNG:
        raise ValueError(f"{name} is a campaign of {campaign.rung}, not of {RUNG}")
    times = ArmTimes(campaign)
    own = campaign.constants.get(BANDWIDTH)
    row, source = (own, name) if own is not None else bandwidth or (None, "")
    rate = None if row is None else of_constant(row)
    cells = decode_cells(times, shapes)
    chain = chain_of(times, rate)
    searches = dispatch.regrets(times)
    found = constants(campaign, cells, chain, shapes, searches, other)
    profiled = profiles(campaign, rate)
    bars, misses = bars_r2.judge(cells, chain, found, profiled, shapes)
    return Analysis(
        campaign=name,
        decode=tuple(cells),
        steps=tuple(ablation(times, cells)),
        elements=tuple(elements(times, cells)),
        chain=tuple(chain),
        regrets=tuple(searches),
        constants=found,
        bars=tuple(bars),
        misses=tuple(misses),
        speeds=production.table(times, shapes, name),
        profiles=tuple(profiled),
        bandwidth=rate,
        bandwidth_from=source,
        host=campaign.constants,
    )


def chosen(folders: Iterable[Path], rung: str = RUNG) -> Path | None:
    """The campaign of a part of R2 among the ones that a report shows, or None."""
    for folder in folders:
        if files.read_json(Path(folder) / records.CAMPAIGN)["rung"] == rung:
            return Path(folder)
    return None


def of_folder(folder: Path, shapes: Sequence[Mapping[str, Any]]) -> Analysis:
    """`analyse` of a recorded campaign. CampaignError where the record is not what it must be."""
    folder = Path(folder)
    campaign = records.load(folder)
    other = dispatch.of_other_part(folder, campaign)
    return analyse(campaign, folder.name, shapes, earlier_constant(folder, campaign), other)


def earlier_constant(
    folder: Path, campaign: Campaign, name: str = BANDWIDTH
) -> tuple[Mapping[str, Any], str] | None:
    """A constant of the device of the newest campaign beside this one that is no younger and of such a device.

    It takes a tuned search of its own, so a campaign need not take it again. A campaign of the same UUID goes before
    one of another device of the same name.
    """
    found = dispatch.earlier(folder, campaign, lambda record: name in record["constants"])
    if not found:
        return None
    *_, source, path = found[-1]
    return files.read_json(path / records.CAMPAIGN)["constants"][name], source


def of_constant(row: Mapping[str, Any]) -> Estimate:
    low, high = row["ci_low"], row["ci_high"]
    value = row["value"]
    ends = (value, value) if low is None or high is None else (low, high)
    return statistics.from_interval(value, *ends, n=row["n"], log=True)


# ---- what the claims read ----------------------------------------------------------------------------------------


def gives(name: str | None) -> bool:
    """Whether a campaign of R2 answers a claim about the constant of that name."""
    return name in (M16_OVER_M1, REGRET, CHAIN, HOST, PACK)


Found = tuple[dict[str, Any] | None, str]


def constants(
    campaign: Campaign,
    cells: Sequence[Decode],
    chain: Sequence[Link],
    shapes: Sequence[Mapping[str, Any]],
    searches: Sequence[Regret] = (),
    other: tuple[str, ArmTimes] | None = None,
) -> Constants:
    """The constants that claims ask for, and why one is missing. Host times stand as they were recorded."""
    out = Constants({}, {})
    recorded = campaign.constants
    makers: tuple[tuple[str, Callable[[], Found]], ...] = (
        (M16_OVER_M1, lambda: _m16_over_m1(cells, shapes)),
        (REGRET, lambda: _regret(searches, other)),
        (CHAIN, lambda: _chain(chain)),
        (HOST, lambda: _host(recorded)),
        (PACK, lambda: _as_recorded(recorded, PACK)),
    )
    for name, make in makers:
        value, why = make()
        if value is None:
            out.missing[name] = why
        else:
            out.found[name] = value
    return out


def _m16_over_m1(cells: Sequence[Decode], shapes: Sequence[Mapping[str, Any]]) -> Found:
    ratios = growth(cells, HEADLINE)
    known = [name for name, _ in ratios]
    if lost := [s["name"] for s in shapes if s["name"] not in known]:
        return (
            None,
            f"{KERNEL} {HEADLINE} was not timed at M=1 and M=16 on {', '.join(lost)}",
        )
    how = (
        f"time of {KERNEL} {HEADLINE} at M=16 over M=1, cold_graph, largest of {len(ratios)} shapes"
    )
    return dispatch.statistics_row(Extreme(tuple(r for _, r in ratios), largest=True), how), ""


def _regret(searches: Sequence[Regret], other: tuple[str, ArmTimes] | None) -> Found:
    if not searches:
        return None, f"{SEARCHED} was not timed"
    others = None if other is None else (other[0], dispatch.regrets(other[1]))
    return dispatch.constant(searches, others, f"{KERNEL} over {SEARCHED}")


def _chain(chain: Sequence[Link]) -> Found:
    own = [x for x in chain if x.kernel == KERNEL and x.regime == CHAINED]
    if not own:
        return None, f"{KERNEL} was not timed on {CHAIN_SHAPE} in {CHAINED}"
    ratios = [x.over_asymptote for x in own]
    if None in ratios:
        return None, f"{BANDWIDTH} is in no campaign of this device"
    ms = ", ".join(str(x.m) for x in own)
    how = f"makespan of {CHAIN_SHAPE} in {CHAINED} over bytes / {BANDWIDTH}, largest of M = {ms}"
    return dispatch.statistics_row(Extreme(tuple(ratios), largest=True), how), ""


def _host(recorded: Mapping[str, Mapping[str, Any]]) -> Found:
    """As recorded, or the slowest way of calling that was."""
    if HOST in recorded:
        return dict(recorded[HOST]), ""
    ways = [recorded[f"{HOST}_{way}"] for way in CALLERS if f"{HOST}_{way}" in recorded]
    if not ways:
        return None, f"{HOST} was not recorded"
    return dict(max(ways, key=lambda row: row["value"])), ""


def _as_recorded(recorded: Mapping[str, Mapping[str, Any]], name: str) -> Found:
    return (dict(recorded[name]), "") if name in recorded else (None, f"{name} was not recorded")


# ---- tables ------------------------------------------------------------------------------------------------------


def three(name: str, quantity: Quantity | None) -> dict[str, float]:
    if quantity is None:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"), math.nan)
    low, high = quantity.interval()
    return {name: quantity.value, f"{name}_low": low, f"{name}_high": high}


RATIOS = ("over_fp8", "over_bf16", "over_peer", "over_floor", "regret", "invariant", "over_mxfp4")
DECODE_COLUMNS = (
    "campaign", "format", "shape", "N", "K", "M", "weight_bytes",
    "floor_us", "time_us", "time_us_low", "time_us_high", "fp8_us", "bf16_us", "peer", "peer_us",
    *(f"{name}{end}" for name in RATIOS for end in ("", "_low", "_high")),
    "chosen", "searched",
)  # fmt: skip


def decode_table(found: Analysis) -> pd.DataFrame:
    """One row a cell of qgemv_mx, cold: reports/r2_decode.csv."""
    rows = [{"campaign": found.campaign, **cell_row(d)} for d in found.decode]
    return pd.DataFrame(rows, columns=list(DECODE_COLUMNS))


def cell_row(d: ProductCell) -> dict[str, Any]:
    """A cell with the columns of a table."""
    peer = d.best_peer
    row: dict[str, Any] = {
        "format": d.format,
        **d.point._asdict(),
        "weight_bytes": d.weight_bytes,
        "floor_us": us(d.floor),
        **three("time_us", d.time),
        "fp8_us": us(d.fp8),
        "bf16_us": us(d.bf16),
        "peer": peer or "",
        "peer_us": us(d.peer_times[peer]) if peer else math.nan,
        "chosen": d.chosen,
        "searched": d.searched,
    }
    for name in RATIOS:
        ratio = (d.peers[peer] if peer else None) if name == "over_peer" else getattr(d, name)
        row |= three(name, ratio)
    return row


def us(estimate: Estimate | None) -> float:
    return math.nan if estimate is None else estimate.value


ABLATION_COLUMNS = (
    "campaign", "kind", "shape", "N", "K", "M", "place", "kernel", "time_us", "time_us_low", "time_us_high", "floor_us",
    "over_previous", "over_previous_low", "over_previous_high", "over_full", "over_full_low", "over_full_high",
)  # fmt: skip


def ablation_table(
    campaign: str, steps: Sequence[Step], elements: Sequence[Step] = ()
) -> pd.DataFrame:
    """One row a point and step, or element taken out alone: reports/r2_ablation.csv."""
    rows = []
    for kind, some in (("step", steps), ("element", elements)):
        for s in some:
            row = {"campaign": campaign, "kind": kind, **s.point._asdict(), "place": s.place}
            row |= {"kernel": s.kernel, "floor_us": us(s.floor), **three("time_us", s.time)}
            row |= three("over_previous", s.over_previous) | three("over_full", s.over_full)
            rows.append(row)
    return pd.DataFrame(rows, columns=list(ABLATION_COLUMNS))


CHAIN_COLUMNS = (
    "campaign", "kernel", "M", "regime", "weight_bytes", "time_us", "time_us_low", "time_us_high", "asymptote_us",
    "over_asymptote", "over_asymptote_low", "over_asymptote_high", "over_plain", "over_plain_low", "over_plain_high",
)  # fmt: skip


def chain_table(found: Analysis) -> pd.DataFrame:
    """One row a kernel, M and regime of the chain: reports/r2_chain.csv."""
    rows = []
    for x in found.chain:
        row = {"campaign": found.campaign, "kernel": x.kernel, "M": x.m, "regime": x.regime}
        rate = found.bandwidth
        bound = math.nan if rate is None else x.weight_bytes / rate.value / 1e6
        row |= {"weight_bytes": x.weight_bytes, "asymptote_us": bound, **three("time_us", x.time)}
        row |= three("over_asymptote", x.over_asymptote) | three("over_plain", x.over_plain)
        rows.append(row)
    return pd.DataFrame(rows, columns=list(CHAIN_COLUMNS))


BAR_COLUMNS = (
    "campaign", "row", "bar", "format", "shape", "M", "direction", "limit", "observed", "observed_low", "observed_high",
    "status", "cells", "missed", "off", "reason", "how", "undecided", "planned",
)  # fmt: skip


def bar_table(campaign: str, bars: Sequence[Bar], misses: Sequence[Miss]) -> pd.DataFrame:
    """One row a bar, then one a cell that misses one or is undecided: reports/r2_bars.csv."""
    rows = []
    for bar in bars:
        worst = bar.worst
        row = {
            "campaign": campaign, "row": "bar", "bar": bar.id, "format": bar.format or "",
            "shape": worst.shape if worst else "", "M": worst.M if worst else None, "direction": bar.direction,
            "limit": bar.limit, **three("observed", bar.observed), "status": bar.status, "cells": bar.cells,
            "missed": bar.missed, "off": bar.off, "reason": bar.reason, "how": bar.how,
            "undecided": bar.undecided, "planned": bar.planned,
        }  # fmt: skip
        rows.append(row)
    for miss in misses:
        bar = miss.bar
        rows.append(
            {
                "campaign": campaign, "row": "cell", "bar": bar.id, "format": miss.format,
                "shape": miss.point.shape, "M": miss.point.M, "direction": bar.direction, "limit": bar.limit,
                **three("observed", miss.observed), "status": miss.status, "cells": 1,
                "missed": int(miss.status == bars_r2.MISSED), "undecided": int(miss.status == bars_r2.UNDECIDED),
                "planned": 1,
                "off": miss.off, "reason": miss.reason, "how": miss.against,
            }
        )  # fmt: skip
    frame = pd.DataFrame(rows, columns=list(BAR_COLUMNS))
    return frame.astype(dict.fromkeys(("M", "cells", "missed", "undecided", "planned"), "Int64"))


def to_csv(frame: pd.DataFrame) -> str:
    """CSV text: six significant digits, nothing where there is no number, so that replays agree byte for byte."""
    return frame.to_csv(index=False, float_format="%.6g", lineterminator="\n")


def empty_tables() -> dict[str, pd.DataFrame]:
    """The tables without a row: before any campaign of R2."""
    columns = {
        "r2_decode": DECODE_COLUMNS,
        "r2_bars": BAR_COLUMNS,
        "r2_ablation": ABLATION_COLUMNS,
        "r2_chain": CHAIN_COLUMNS,
    }
    return {name: pd.DataFrame(columns=list(which)) for name, which in columns.items()}


def tables(found: Analysis | None) -> dict[str, pd.DataFrame]:
    """File name without suffix -> table, for reports/."""
    if found is None:
        return empty_tables()
    return {
        "r2_decode": decode_table(found),
        "r2_bars": bar_table(found.campaign, found.bars, found.misses),
        "r2_ablation": ablation_table(found.campaign, found.steps, found.elements),
        "r2_chain": chain_table(found),
    }


__all__ = [
    "Analysis", "analyse", "chosen", "constants", "earlier_constant", "empty_tables", "gives", "of_folder", "tables",
    "to_csv",
]  # fmt: skip
