"""What the dispatch of `linear` costs against an exhaustive search of plans, over both parts of R2.

A cell of it is a point at which a search was timed: the choice is `linear` where that was timed beside it, else the
kernel whose plans were searched. The decode part and the part from M = 16 on are campaigns of their own; the regret is
one number over both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import files, records, statistics
from lab.arm_times import Arm, ArmTimes, Point
from lab.product_cells import COLD
from lab.records import Campaign
from lab.rungs import PARTS, rung_of
from lab.statistics import Estimate

LINEAR = "linear"
REGRET = "dispatch_regret"
SEARCHED = re.compile(r"(\w+)/searched")
KERNEL = re.compile(r"qgem[vm]_mx")


@dataclass(frozen=True)
class Regret:
    """The choice at a point over the fastest plan of the search: `chosen` and `searched` are plans as recorded."""

    format: str
    point: Point
    ratio: Estimate
    chosen: str
    searched: str


def launched(chosen: str) -> str:
    """The kernel that a recorded plan launches; empty where it names none."""
    found = KERNEL.search(chosen)
    return found[0] if found else ""


def regrets(times: ArmTimes) -> list[Regret]:
    """One for each cold point and format with a search, in a fixed order.

    Where the choice is another kernel than the searched one, and the faster of both, it is the fastest of all: 1.
    """
    found = []
    for arm, point, cell in times:
        own = SEARCHED.fullmatch(arm.kernel)
        if own is None or point.regime != COLD:
            continue
        linear = Arm(LINEAR, arm.format)
        choice = linear if times.has(linear, point) else Arm(own[1], arm.format)
        ratio = times.ratio((choice, point), (arm, point))
        if ratio is None:
            continue
        plan, best = times.cell(choice, point).tuning, cell.tuning
        chosen, searched = plan.chosen if plan else "", best.chosen if best else ""
        if launched(chosen) not in ("", own[1]) and ratio.mean < 0:
            ratio, searched = Estimate(0.0, 0.0, ratio.df), chosen
        found.append(Regret(arm.format, point, ratio, chosen, searched))
    return found


def constant(
    own: Sequence[Regret], other: tuple[str, Sequence[Regret]] | None, what: str
) -> tuple[dict[str, Any] | None, str]:
    """The regret over the cells of a campaign and those of the other part, (its id, cells), as a constant.

    what: the arms of the campaign alone, for the record.
    """
    others = other[1] if other else ()
    ratios = [r.ratio for r in (*own, *others)]
    if not own:
        return None, "no search was timed"
    how = f"time of {what}, geometric mean of {len(ratios)} cells, {COLD}"
    if others:
        how = (
            f"time of the dispatch choice over the fastest plan of the search, geometric mean of {len(ratios)} cells, "
            f"{len(others)} of them of {other[0]}, {COLD}"
        )
    return statistics_row(statistics.geomean(ratios), how), ""


def statistics_row(quantity: statistics.Quantity, how: str, unit: str = "ratio") -> dict[str, Any]:
    """A quantity as a row of constants."""
    low, high = quantity.interval()
    df = quantity.df if isinstance(quantity, Estimate) else math.inf
    n = round(df) + 1 if math.isfinite(df) else None
    value = min(max(quantity.value, low), high)
    return {"value": value, "unit": unit, "ci_low": low, "ci_high": high, "n": n, "how": how}


def other_part(folder: Path, campaign: Campaign) -> Path | None:
    """The newest campaign of the other part of the rung beside `folder`, no younger and of such a device; None: none.

    One of the same UUID goes before one of another device of the same name.
    """
    parts = {part for part in (rung_of(campaign.rung), *PARTS) if rung_of(part) == rung_of(campaign.rung)}  # fmt: skip
    found = earlier(folder, campaign, lambda record: record["rung"] in parts - {campaign.rung})
    return found[-1][-1] if found else None


def earlier(folder: Path, campaign: Campaign, holds: Any) -> list[tuple[bool, str, str, Path]]:
    """(same UUID, time, id, folder) of campaigns beside one, no younger, of such a device, that `holds`; best last."""
    found = []
    for path in sorted(Path(folder).parent.glob(f"*/{records.CAMPAIGN}")):
        if path.parent.name.startswith(".") or path.parent == Path(folder):
            continue
        other: Mapping[str, Any] = files.read_json(path)
        device, own = other["device"], campaign.device
        if other["kind"] != "campaign" or device["name"] != own["name"]:
            continue
        if other["created_utc"] <= campaign.created_utc and holds(other):
            same = device["uuid"] == own["uuid"]
            found.append((same, other["created_utc"], path.parent.name, path.parent))
    return sorted(found)


def of_other_part(folder: Path, campaign: Campaign) -> tuple[str, ArmTimes] | None:
    """Id and times of `other_part`; None where there is none."""
    path = other_part(folder, campaign)
    return None if path is None else (path.name, ArmTimes(records.load(path)))


__all__ = [
    "LINEAR", "REGRET", "Regret", "constant", "earlier", "launched", "of_other_part", "other_part", "regrets",
    "statistics_row",
]  # fmt: skip
