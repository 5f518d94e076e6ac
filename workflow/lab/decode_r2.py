"""What R2 measured of the decode kernel: its cells beside their rivals, the steps of the ablation, and the chain.

An estimate here is paired by block wherever both arms ran at one point; see `lab.arm_times`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab import statistics
from lab.arm_times import Arm, ArmTimes, Point
from lab.decomposition import FLOOR
from lab.production import BF16, FP8
from lab.statistics import Estimate

KERNEL = "qgemv_mx"
SEARCHED, BATCH_INVARIANT = f"{KERNEL}/searched", f"{KERNEL}/batch_invariant"
#: A step of the ablation, and one element taken out alone.
STEP, ELEMENT = re.compile(rf"{KERNEL}/step(\d+)"), re.compile(rf"{KERNEL}/-[a-z0-9_-]+")
FORMATS = ("mxfp4", "nvfp4", "int4_g128")
HEADLINE = "mxfp4"
COLD, CHAINED = "cold_graph", "chain_pdl"
CHAIN_SHAPE = "decode_chain"
PEER = "peer/"


@dataclass(frozen=True)
class Decode:
    """One cell of qgemv_mx, cold. Ratios are on the log scale and paired by block; None where the other was not timed.

    over_fp8, over_bf16: time(other) / time(qgemv_mx). peers: the same of each peer in the format. over_floor:
    time(qgemv_mx) / floor. regret: time / time of the searched plan. invariant: time of the batch-invariant mode /
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
    """One kernel of the ablation at a point. over_previous: time / time of the step before; over_full: / qgemv_mx."""

    point: Point
    place: int
    kernel: str
    time: Estimate
    over_previous: Estimate | None
    over_full: Estimate | None
    floor: Estimate | None


@dataclass(frozen=True)
class Link:
    """The chain of decode layers at one M in one regime. over_asymptote: makespan / (bytes / bandwidth), or None."""

    kernel: str
    m: int
    regime: str
    weight_bytes: int
    time: Estimate
    over_asymptote: Estimate | None
    over_plain: Estimate | None


# ---- decode cells ------------------------------------------------------------------------------------------------


def decode_cells(times: ArmTimes, shapes: Sequence[Mapping[str, Any]]) -> list[Decode]:
    """Every cold cell of qgemv_mx on the shapes of the set, in the order of formats, shapes and M."""
    order = {s["name"]: i for i, s in enumerate(shapes)}
    found = [
        _decode(times, arm, point)
        for arm, point, _ in times
        if arm.kernel == KERNEL and point.regime == COLD and point.shape in order
    ]
    formats = {name: i for i, name in enumerate(FORMATS)}
    return sorted(
        found,
        key=lambda d: (formats.get(d.format, 9), d.format, order[d.point.shape], d.point.M),
    )


def _decode(times: ArmTimes, arm: Arm, point: Point) -> Decode:
    fmt = arm.format

    def over(kernel: str, fmt: str = fmt) -> Estimate | None:
        """time(qgemv_mx) / time(other)."""
        return times.ratio((arm, point), (Arm(kernel, fmt), point))

    def under(kernel: str, fmt: str = fmt) -> Estimate | None:
        """time(other) / time(qgemv_mx)."""
        return times.ratio((Arm(kernel, fmt), point), (arm, point))

    time, cell = times.time(arm, point), times.cell(arm, point)
    assert time is not None
    peers = sorted(
        a.kernel for a, p, _ in times if p == point and a.format == fmt and a.kernel[:5] == PEER
    )
    ratios = {name: ratio for name in peers if (ratio := under(name)) is not None}
    searched = Arm(SEARCHED, fmt)
    plan = times.cell(searched, point).tuning if times.has(searched, point) else None
    return Decode(
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
        regret=over(SEARCHED),
        searched=plan.chosen if plan else "",
        invariant=under(BATCH_INVARIANT),
        over_mxfp4=None if fmt == HEADLINE else over(KERNEL, HEADLINE),
    )


# ---- ablation ----------------------------------------------------------------------------------------------------


def ablation(times: ArmTimes, cells: Sequence[Decode]) -> list[Step]:
    """The steps from the naive kernel to qgemv_mx, point by point; a point without steps has none."""
    found = []
    for cell in (c for c in cells if c.format == HEADLINE):
        own = {
            int(STEP.fullmatch(arm.kernel)[1]): arm
            for arm, point, _ in times
            if point == cell.point and arm.format == HEADLINE and STEP.fullmatch(arm.kernel)
        }
        if own:
            arms = [own[i] for i in sorted(own)] + [Arm(KERNEL, HEADLINE)]
            found += _steps(times, cell, arms)
    return found


def _steps(times: ArmTimes, cell: Decode, arms: Sequence[Arm]) -> list[Step]:
    point, out = cell.point, []
    for i, arm in enumerate(arms):
        before = times.ratio((arm, point), (arms[i - 1], point)) if i else None
        full = times.ratio((arm, point), (arms[-1], point)) if arm != arms[-1] else None
        time = times.time(arm, point)
        out.append(Step(point, i, arm.kernel, time, before, full, cell.floor))
    return out


def elements(times: ArmTimes, cells: Sequence[Decode]) -> list[Step]:
    """Kernels that lack one element alone; over_full says what the element is worth."""
    found = []
    for cell in (c for c in cells if c.format == HEADLINE):
        full = Arm(KERNEL, HEADLINE)
        for arm, point, _ in times:
            if point == cell.point and arm.format == HEADLINE and ELEMENT.fullmatch(arm.kernel):
                ratio = times.ratio((arm, point), (full, point))
                time = times.time(arm, point)
                found.append(Step(point, 0, arm.kernel, time, None, ratio, cell.floor))
    return found


# ---- chain -------------------------------------------------------------------------------------------------------


def chain_of(times: ArmTimes, bandwidth: Estimate | None) -> list[Link]:
    """The chain of layers: the floor and qgemv_mx, each M, plain and with programmatic dependent launch."""
    found = []
    for arm, point, cell in times:
        if point.shape != CHAIN_SHAPE or arm.kernel not in (KERNEL, FLOOR):
            continue
        time, plain = times.time(arm, point), point._replace(regime=COLD)
        over = None if bandwidth is None else _over_asymptote(time, cell.weight_bytes, bandwidth)
        gain = times.ratio((arm, point), (arm, plain)) if point.regime == CHAINED else None
        found.append(Link(arm.kernel, point.M, point.regime, cell.weight_bytes, time, over, gain))
    order = {COLD: 0, CHAINED: 1}
    return sorted(found, key=lambda x: (x.m, x.kernel == KERNEL, order.get(x.regime, 9), x.regime))


def _over_asymptote(time: Estimate, size: int, bandwidth: Estimate) -> Estimate:
    """time (us) x bandwidth (TB/s) / bytes, on the log scale; a TB/s is 1e6 bytes a microsecond."""
    both = statistics.combine([time, bandwidth], [1.0, 1.0])
    return Estimate(both.mean - math.log(size / 1e6), both.se, both.df)


def growth(cells: Sequence[Decode], fmt: str) -> list[tuple[str, Estimate]]:
    """time at M=16 / time at M=1 in a format, by shape; the two points ran one after the other."""
    by_m = {(c.point.shape, c.point.M): c.time for c in cells if c.format == fmt}
    names = dict.fromkeys(c.point.shape for c in cells)
    return [
        (name, statistics.difference(by_m[name, 16], by_m[name, 1]))
        for name in names
        if (name, 16) in by_m and (name, 1) in by_m
    ]
