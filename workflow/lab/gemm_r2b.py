"""What R2b measured of the matrix kernel: its cells beside the roofline, what `linear` launches, and crossings of M.

The bound of a cell is the longer of two measured times: reading the bytes of the weight (the floor) and the products at
the measured BF16 rate of the device. No kernel goes below the floor; that rate is of a long product at the power limit,
so a kernel whose call is short, at a higher clock, may go below the bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab import product_cells, profile_r2, statistics
from lab.arm_times import Arm, ArmTimes, Point
from lab.dispatch import LINEAR, launched
from lab.product_cells import COLD, HEADLINE, ProductCell, Step
from lab.production import BF16, FP8
from lab.profile_r2 import ISSUE, ISSUE_BOUND, TENSOR_BOUND, Profile
from lab.statistics import Crossover, Estimate

KERNEL = "qgemm_mx"
SEARCHED, BATCH_INVARIANT = f"{KERNEL}/searched", f"{KERNEL}/batch_invariant"
#: The tabulated M, and M between them that are held against the next of these.
MS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
ODD_MS = (33, 65, 100, 129, 257)
#: M of the decode points at which `linear` is timed too; a step in M leads from each M to the next of both.
DECODE_MS = (1, 2, 4, 8)
LADDER = (*DECODE_MS, *MS)
#: M at which all plans are searched on every shape; the first shape has one more.
SEARCHED_MS, SEARCHED_TOO = (32, 128, 512), ("q_o_proj", 1024)
#: The shape that is no multiple of a tile, and the aligned one of nearly the same size.
RAGGED, NEIGHBOUR = "gpt_oss_2880", "neighbour_3072"
#: From here on a call is prefill: products set its time, and power its clock.
PREFILL_M = 1024
PEAK = "bf16_peak_tflops"
NOT_PROFILED = "not profiled"  # as a mechanism
#: Part of a call's time from which on reading or products set it.
SETS_THE_TIME = 0.8


@dataclass(frozen=True)
class Bound:
    """What a BF16 kernel of a cell is held against. floor, tensor: log us; None where it is not known."""

    floor: Estimate | None
    tensor: Estimate | None

    @property
    def time(self) -> Estimate | None:
        """The longer of both."""
        known = [e for e in (self.floor, self.tensor) if e is not None]
        return max(known, key=lambda e: e.mean) if known else None

    @property
    def kind(self) -> str:
        """Which of both it is."""
        if self.floor is None or self.tensor is None:
            return ""
        return "memory" if self.floor.mean >= self.tensor.mean else "tensor"


@dataclass(frozen=True)
class Choice:
    """What `linear` launches at a point. over_gemm: its time over that of qgemm_mx in the same blocks.

    gemv: time of qgemv_mx in the campaign of the decode part, or None.
    """

    cell: ProductCell
    kernel: str
    gemm: Estimate | None
    over_gemm: Estimate | None
    gemv: Estimate | None


@dataclass(frozen=True)
class Crossing:
    """The M at which `linear` is no longer faster than a rival, between tabulated M in log-log scale.

    value: 0 where it is slower at each M, infinite where it is faster at each. m: the tabulated M at which it first is
    slower, else the largest; there memory and tensor are the parts of its time that reading the weight and the products
    at the measured rate take. mechanism: what sets the time there, by rule, and why in words.
    """

    shape: str
    against: str
    value: float
    low: float
    high: float
    ms: tuple[int, ...]
    m: int
    ratio: Estimate
    memory: float | None
    tensor: float | None
    mechanism: str
    why: str


def cells_of(times: ArmTimes, shapes: Sequence[Mapping[str, Any]]) -> list[ProductCell]:
    """Every cold cell of qgemm_mx on the shapes of the set and on the aligned neighbour, which comes last."""
    near = {p.shape: p for _, p, _ in times if p.shape == NEIGHBOUR}
    further = [{"name": name, "N": p.N, "K": p.K} for name, p in near.items()]
    return product_cells.product_cells(times, [*shapes, *further], KERNEL)


def bound_of(cell: ProductCell, peak: Estimate | None) -> Bound:
    """The bound of a cell; peak: BF16 rate in log TFLOP/s, a million products and sums a microsecond."""
    p = cell.point
    if peak is None:
        return Bound(cell.floor, None)
    work = math.log(2 * p.M * p.N * p.K / 1e6)
    return Bound(cell.floor, Estimate(work - peak.mean, peak.se, peak.df))


def over(cell: ProductCell, bound: Bound) -> Estimate | None:
    """Time over the bound: paired by block where that is the floor."""
    if bound.time is None:
        return None
    if bound.time is bound.floor and cell.over_floor is not None:
        return cell.over_floor
    return statistics.difference(cell.time, bound.time)


# ---- dispatch ----------------------------------------------------------------------------------------------------


def choices(
    times: ArmTimes, shapes: Sequence[Mapping[str, Any]], decode: Sequence[ProductCell]
) -> list[Choice]:
    """What `linear` launches in every cold cell; decode: cells of the decode part, for the times of its kernel."""
    known = {(c.format, c.point): c.time for c in decode}
    found = []
    for cell in product_cells.product_cells(times, shapes, LINEAR):
        gemm = Arm(KERNEL, cell.format), cell.point
        found.append(
            Choice(
                cell,
                launched(cell.chosen),
                times.time(*gemm),
                times.ratio((Arm(LINEAR, cell.format), cell.point), gemm),
                known.get((cell.format, cell.point)),
            )
        )
    return found


# ---- crossings ---------------------------------------------------------------------------------------------------


def crossings(
    choices: Sequence[Choice], peak: Estimate | None, profiled: Sequence[Profile]
) -> list[Crossing]:
    """Where `linear` in MXFP4 stops being faster than FP8 and than BF16, shape by shape, over the tabulated M."""
    own = [c.cell for c in choices if c.cell.format == HEADLINE and c.cell.point.M in MS]
    found = []
    for shape in dict.fromkeys(c.point.shape for c in own):
        for rival in (FP8, BF16):
            cells = {c.point.M: c for c in own if c.point.shape == shape}
            ratios = {m: r for m, c in sorted(cells.items()) if (r := _ratio(c, rival)) is not None}
            if len(ratios) > 1:
                found.append(_crossing(cells, ratios, rival.kernel, peak, profiled))
    order = {FP8.kernel: 0, BF16.kernel: 1}
    return sorted(found, key=lambda x: order[x.against])


def _ratio(cell: ProductCell, rival: Arm) -> Estimate | None:
    return cell.over_fp8 if rival == FP8 else cell.over_bf16


def _crossing(
    cells: Mapping[int, ProductCell],
    ratios: Mapping[int, Estimate],
    against: str,
    peak: Estimate | None,
    profiled: Sequence[Profile],
) -> Crossing:
    crossed = Crossover(tuple(ratios), tuple(ratios.values()))
    low, high = crossed.interval()
    # Where the ratio rises again, the ends are those of the last crossing: they take in the first.
    low, high = min(low, crossed.value), max(high, crossed.value)
    m = next((m for m, ratio in ratios.items() if ratio.mean <= 0), max(ratios))
    cell = cells[m]
    memory, tensor = parts(cell, bound_of(cell, peak))
    word, why = mechanism(cell, memory, tensor, profiled)
    return Crossing(
        cell.point.shape, against, crossed.value, low, high, tuple(ratios), m, ratios[m], memory, tensor, word, why
    )  # fmt: skip


def parts(cell: ProductCell, bound: Bound) -> tuple[float | None, float | None]:
    """Parts of a cell's time that reading the weight, and the products at the measured rate, take."""

    def part(estimate: Estimate | None) -> float | None:
        return None if estimate is None else estimate.value / cell.time.value

    return part(bound.floor), part(bound.tensor)


def mechanism(
    cell: ProductCell, memory: float | None, tensor: float | None, profiled: Sequence[Profile]
) -> tuple[str, str]:
    """What sets the time of a cell, by rule from the roofline and then from the profile; and the numbers in words.

    memory, tensor: as `parts`. A cell that neither sets is issue of instructions (dequantisation, and what feeds the
    tensor cores) where the schedulers are busy, else latency. Where another kernel was launched no profile here is its.
    """
    p, other = cell.point, launched(cell.chosen) not in ("", KERNEL)
    near = None if other else profile_r2.nearest(profiled, cell.format, p.N, p.K, p.M, KERNEL)
    issue = near.values.get(ISSUE) if near else None
    said = "; ".join(
        f"{what} {100 * part:.0f} % of its time"
        for what, part in (
            ("reading the weight takes", memory),
            ("products at the measured BF16 rate take", tensor),
        )
        if part is not None
    )
    if (memory or 0) >= SETS_THE_TIME:
        word = "memory"
    elif (tensor or 0) >= SETS_THE_TIME or (near and (near.tensor or 0) >= TENSOR_BOUND):
        word = "tensor"
    elif issue is not None and issue >= ISSUE_BOUND:
        word = "dequantisation issue"
    elif near is not None:
        word = "latency"
    else:
        word = NOT_PROFILED
    why = profile_r2.reason(near, p.N, p.K, p.M)
    why = f"{launched(cell.chosen)} is launched, {why} here" if other else why
    return word, "; ".join(part for part in (said, why) if part)


# ---- steps between M ---------------------------------------------------------------------------------------------


def growths(cells: Sequence[ProductCell]) -> list[tuple[Point, int, Estimate]]:
    """(point at the larger M, the M before it, time there over time here) for tabulated M in a row of one shape.

    cells: of one kernel in one format. The two points ran one after the other. Where an M between them was not
    reached there is no step.
    """
    by_shape: dict[str, list[ProductCell]] = {}
    for c in cells:
        by_shape.setdefault(c.point.shape, []).append(c)
    found = []
    for own in by_shape.values():
        own = sorted(own, key=lambda c: c.point.M)
        for before, after in zip(own, own[1:], strict=False):
            if LADDER.index(after.point.M) - LADDER.index(before.point.M) != 1:
                continue
            found.append((after.point, before.point.M, statistics.difference(after.time, before.time)))  # fmt: skip
    return found


def odd_steps(cells: Sequence[ProductCell]) -> list[tuple[ProductCell, int, Estimate]]:
    """(cell at an M between the tabulated ones, the next tabulated M, time over time there), where both were timed."""
    at = {(c.format, c.point.shape, c.point.M): c for c in cells}
    found = []
    for c in cells:
        following = next((m for m in MS if m >= c.point.M), None)
        other = at.get((c.format, c.point.shape, following))
        if c.point.M in ODD_MS and other is not None:
            found.append((c, following, statistics.difference(c.time, other.time)))
    return found


def efficiencies(cells: Sequence[ProductCell]) -> list[tuple[ProductCell, Estimate]]:
    """(cell of the ragged shape, its products a second over those of the aligned neighbour at the same M), MXFP4."""
    at = {(c.point.shape, c.point.M): c for c in cells if c.format == HEADLINE}
    found = []
    for (shape, m), c in at.items():
        other = at.get((NEIGHBOUR, m))
        if shape == RAGGED and other is not None:
            time = statistics.difference(other.time, c.time)
            work = math.log(c.point.N * c.point.K / (other.point.N * other.point.K))
            found.append((c, Estimate(time.mean + work, time.se, time.df)))
    return found


__all__ = [
    "COLD", "HEADLINE", "KERNEL", "MS", "Bound", "Choice", "Crossing", "Step", "bound_of", "cells_of", "choices",
    "crossings", "efficiencies", "growths", "mechanism", "odd_steps", "over", "parts",
]  # fmt: skip
