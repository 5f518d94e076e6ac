"""Cells of a kernel of ours beside floor, cuBLASLt and the kernels of others, and the steps of its ablation.

What both parts of R2 read from a campaign. An estimate is paired by block wherever both arms ran at one point; see
`lab.arm_times`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.arm_times import Arm, ArmTimes, Point
from lab.decomposition import FLOOR
from lab.production import BF16, FP8
from lab.statistics import Estimate

FORMATS = ("mxfp4", "nvfp4", "int4_g128")
HEADLINE = "mxfp4"
COLD = "cold_graph"
PEER = "peer/"


@dataclass(frozen=True)
class ProductCell:
    """One cell of a kernel of ours, cold. Ratios: log scale, paired by block; None where the other was not timed.

    over_fp8, over_bf16: time(other) / time(kernel). peers: the same of each peer in the format. over_floor:
    time(kernel) / floor. regret: time / time of the searched plan. invariant: time of the batch-invariant mode /
    time. over_mxfp4: time / time in MXFP4.
    """

    format: str
    point: Point
    weight_bytes: int
    chosen: str
    time: Estimate
    floor: Estimate | None
    fp8: Estimate | None
    bf16: Estimate | None
    peer_times: Mapping[str, Estimate]
    over_fp8: Estimate | None
    over_bf16: Estimate | None
    peers: Mapping[str, Estimate]
    over_floor: Estimate | None
    regret: Estimate | None
    searched: str
    invariant: Estimate | None
    over_mxfp4: Estimate | None

    @property
    def best_peer(self) -> str | None:
        """The fastest peer here."""
        times = self.peer_times
        return min(times, key=lambda name: (times[name].value, name)) if times else None

    @property
    def reach(self) -> Estimate | None:
        """Speed over FP8 of a kernel as fast as the floor: what no kernel of these bytes exceeds."""
        if self.over_fp8 is None or self.over_floor is None:
            return None
        return Estimate(
            self.over_fp8.mean + self.over_floor.mean,
            math.hypot(self.over_fp8.se, self.over_floor.se),
            min(self.over_fp8.df, self.over_floor.df),
        )


@dataclass(frozen=True)
class Step:
    """One kernel of the ablation at a point.

    over_previous: time / time of the step before; over_full: over the time of the whole kernel.
    """

    point: Point
    place: int
    kernel: str
    time: Estimate
    over_previous: Estimate | None
    over_full: Estimate | None
    floor: Estimate | None


def product_cells(
    times: ArmTimes, shapes: Sequence[Mapping[str, Any]], kernel: str
) -> list[ProductCell]:
    """Every cold cell of a kernel on the shapes of the set, in the order of formats, shapes and M."""
    order = {s["name"]: i for i, s in enumerate(shapes)}
    peers: dict[tuple[str, Point], list[str]] = {}
    for arm, point, _ in times:
        if arm.kernel.startswith(PEER):
            peers.setdefault((arm.format, point), []).append(arm.kernel)
    found = [
        _cell(times, arm, point, peers.get((arm.format, point), []))
        for arm, point, _ in times
        if arm.kernel == kernel and point.regime == COLD and point.shape in order
    ]
    formats = {name: i for i, name in enumerate(FORMATS)}
    return sorted(
        found,
        key=lambda c: (formats.get(c.format, 9), c.format, order[c.point.shape], c.point.M),
    )


def _cell(times: ArmTimes, arm: Arm, point: Point, rivals: Sequence[str]) -> ProductCell:
    own, fmt = arm

    def over(kernel: str, fmt: str = fmt) -> Estimate | None:
        """time / time(other)."""
        return times.ratio((arm, point), (Arm(kernel, fmt), point))

    def under(kernel: str, fmt: str = fmt) -> Estimate | None:
        """time(other) / time."""
        return times.ratio((Arm(kernel, fmt), point), (arm, point))

    time, cell = times.time(arm, point), times.cell(arm, point)
    assert time is not None
    ratios = {name: ratio for name in sorted(rivals) if (ratio := under(name)) is not None}
    searched = Arm(f"{own}/searched", fmt)
    plan = times.cell(searched, point).tuning if times.has(searched, point) else None
    return ProductCell(
        format=fmt,
        point=point,
        weight_bytes=cell.weight_bytes,
        chosen=cell.tuning.chosen if cell.tuning else "",
        time=time,
        floor=times.time(Arm(FLOOR, fmt), point),
        fp8=times.time(FP8, point),
        bf16=times.time(BF16, point),
        peer_times={name: times.time(Arm(name, fmt), point) for name in ratios},
        over_fp8=under(*FP8),
        over_bf16=under(*BF16),
        peers=ratios,
        over_floor=over(FLOOR),
        regret=over(searched.kernel),
        searched=plan.chosen if plan else "",
        invariant=under(f"{own}/batch_invariant"),
        over_mxfp4=None if fmt == HEADLINE else over(own, HEADLINE),
    )


# ---- ablation ----------------------------------------------------------------------------------------------------


def ablation(times: ArmTimes, cells: Sequence[ProductCell], kernel: str) -> list[Step]:
    """The steps from a plain kernel to `kernel`, point by point; a point without steps has none."""
    step = re.compile(rf"{kernel}/step(\d+)")
    at: dict[Point, dict[int, Arm]] = {}
    for arm, point, _ in times:
        if arm.format == HEADLINE and (found := step.fullmatch(arm.kernel)):
            at.setdefault(point, {})[int(found[1])] = arm
    out: list[Step] = []
    for cell in (c for c in cells if c.format == HEADLINE and c.point in at):
        own = at[cell.point]
        out += _steps(times, cell, [*(own[i] for i in sorted(own)), Arm(kernel, HEADLINE)])
    return out


def _steps(times: ArmTimes, cell: ProductCell, arms: Sequence[Arm]) -> list[Step]:
    point, out = cell.point, []
    for i, arm in enumerate(arms):
        before = times.ratio((arm, point), (arms[i - 1], point)) if i else None
        full = times.ratio((arm, point), (arms[-1], point)) if arm != arms[-1] else None
        time = times.time(arm, point)
        out.append(Step(point, i, arm.kernel, time, before, full, cell.floor))
    return out


def elements(times: ArmTimes, cells: Sequence[ProductCell], kernel: str) -> list[Step]:
    """Kernels that lack one element alone; over_full says what the element is worth."""
    element = re.compile(rf"{kernel}/-[a-z0-9_-]+")
    at: dict[Point, list[Arm]] = {}
    for arm, point, _ in times:
        if arm.format == HEADLINE and element.fullmatch(arm.kernel):
            at.setdefault(point, []).append(arm)
    found = []
    for cell in (c for c in cells if c.format == HEADLINE):
        for arm in at.get(cell.point, []):
            ratio = times.ratio((arm, cell.point), (Arm(kernel, HEADLINE), cell.point))
            time = times.time(arm, cell.point)
            found.append(Step(cell.point, 0, arm.kernel, time, None, ratio, cell.floor))
    return found


__all__ = [
    "COLD", "FORMATS", "HEADLINE", "PEER", "ProductCell", "Step", "ablation", "elements", "product_cells",
]  # fmt: skip
