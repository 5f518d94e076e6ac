"""What R2 measured of the decode kernel: its cells beside their rivals, the steps of the ablation, and the chain.

An estimate here is paired by block wherever both arms ran at one point; see `lab.arm_times`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab import product_cells, statistics
from lab.arm_times import ArmTimes
from lab.decomposition import FLOOR
from lab.product_cells import COLD, FORMATS, HEADLINE, PEER, ProductCell, Step
from lab.statistics import Estimate

KERNEL = "qgemv_mx"
SEARCHED, BATCH_INVARIANT = f"{KERNEL}/searched", f"{KERNEL}/batch_invariant"
CHAINED, CHAIN_SHAPE = "chain_pdl", "decode_chain"
#: A cell of the decode kernel.
Decode = ProductCell


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


def decode_cells(times: ArmTimes, shapes: Sequence[Mapping[str, Any]]) -> list[Decode]:
    """Every cold cell of qgemv_mx on the shapes of the set, in the order of formats, shapes and M."""
    return product_cells.product_cells(times, shapes, KERNEL)


def ablation(times: ArmTimes, cells: Sequence[Decode]) -> list[Step]:
    """The steps from the naive kernel to qgemv_mx, point by point; a point without steps has none."""
    return product_cells.ablation(times, cells, KERNEL)


def elements(times: ArmTimes, cells: Sequence[Decode]) -> list[Step]:
    """Kernels that lack one element alone; over_full says what the element is worth."""
    return product_cells.elements(times, cells, KERNEL)


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


__all__ = [
    "BATCH_INVARIANT", "CHAINED", "CHAIN_SHAPE", "COLD", "FORMATS", "HEADLINE", "KERNEL", "PEER", "SEARCHED", "Decode",
    "Link", "Step", "ablation", "chain_of", "decode_cells", "elements", "growth",
]  # fmt: skip
