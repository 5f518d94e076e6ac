"""The bars of the matrix kernel (issue 5), judged as `lab.bars` judges any: which cells, which limits, and why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lab import bars, profile_r2, statistics
from lab.bars import Bar, Miss, Part
from lab.decomposition import Constants
from lab.dispatch import LINEAR, REGRET
from lab.gemm_r2b import (
    DECODE_MS,
    HEADLINE,
    KERNEL,
    MS,
    NEIGHBOUR,
    ODD_MS,
    RAGGED,
    Choice,
    bound_of,
    efficiencies,
    growths,
    odd_steps,
    over,
)
from lab.page import number
from lab.product_cells import ProductCell
from lab.profile_r2 import Profile
from lab.statistics import Estimate

FORMATS = ("mxfp4", "nvfp4")
#: Least geometric mean of the speed over cuBLASLt FP8, by M; at another M it is reported alone.
OVER_FP8 = {32: 1.6, 64: 1.3, 128: 0.95}
#: Least geometric mean of the speed over cuBLASLt BF16, and least of any cell (None: no bar), by M.
OVER_BF16: dict[int, tuple[float, float | None]] = {
    32: (2.5, None), 64: (2.0, None), 128: (1.5, None), 256: (1.0, 0.95), 512: (1.0, 0.95),
    1024: (1.0, 0.96), 2048: (1.0, 0.96), 4096: (1.0, 0.96), 8192: (1.0, 0.96),
}  # fmt: skip
#: M at which claims about the means and the peers were frozen.
CLAIMED = (32, 64, 128, 256, 512, 1024, 8192)
PEERS, NVFP4_OVER_MXFP4, GROWTH, ODD_M, EFFICIENCY, DISPATCH_REGRET = (
    1.0,
    1.06,
    0.97,
    1.0,
    0.90,
    1.03,
)
#: What the plan times between tabulated M, and beside the aligned neighbour.
ODD_SHAPES, NEIGHBOUR_MS = 3, (64, 512, 2048)
#: Steps of `linear` below the tabulated M, on six shapes.
DECODE_STEPS = len(DECODE_MS) * 6

#: Why a cell can be below its bound.
POWER_LIMITED = "whose rate is that of a long product at the power limit"
#: Parts of a plan that a reason names.
SPLITS = ("ranks ", "k_ways ", "share ", "split ")

Judged = tuple[Bar, list[Miss]]


def judge(
    cells: Sequence[ProductCell],
    choices: Sequence[Choice],
    constants: Constants,
    profiled: Sequence[Profile],
    shapes: Sequence[Mapping[str, Any]],
    peak: Estimate | None,
) -> tuple[list[Bar], list[Miss]]:
    """Every bar in the order of the issue, and every cell that is not met, the worst first within a bar.

    peak: measured BF16 rate (log TFLOP/s).
    """
    judge = _Judge(profiled, peak, len(shapes))
    known = {s["name"] for s in shapes}
    own = [c for c in cells if c.point.shape in known]
    mx = [c for c in own if c.format == HEADLINE]
    found: list[Judged] = []
    for m in OVER_BF16:
        at = [c for c in mx if c.point.M == m]
        if m in OVER_FP8:
            found.append(judge.mean(f"fp8_mean.m{m}", "FP8", m, at, OVER_FP8[m]))
        mean, least = OVER_BF16[m]
        found.append(judge.mean(f"bf16_mean.m{m}", "BF16", m, at, mean))
        if least is not None:
            found.append(judge.least(m, at, least))
        found.append(judge.peers(m, at))
    found.append(judge.formats(own))
    for fmt in FORMATS:
        some = [c for c in own if c.format == fmt and c.point.M in MS]
        found.append(judge.cliffs("growth", KERNEL, fmt, some, 0))
    linear = [c.cell for c in choices if c.cell.format == HEADLINE]
    found.append(judge.cliffs("growth_linear", LINEAR, HEADLINE, linear, DECODE_STEPS))
    found.append(judge.odd(mx))
    found.append(judge.ragged(cells))
    text = "time of the dispatch choice over exhaustive search, geometric mean, both parts of R2"
    bar = Bar("regret", text, None, "below", DISPATCH_REGRET, "ratio", "r2.bar.dispatch_regret")
    found.append((bars.of_constant(bar, REGRET, constants), []))
    return [bar for bar, _ in found], [miss for _, lost in found for miss in lost]


class _Judge:
    """Makes the bars with what all their reasons need."""

    def __init__(self, profiled: Sequence[Profile], peak: Estimate | None, shapes: int) -> None:
        self.profiled, self.peak, self.shapes = profiled, peak, shapes

    def mean(
        self, name: str, rival: str, m: int, cells: Sequence[ProductCell], limit: float
    ) -> Judged:
        """Geometric mean of the speed over cuBLASLt at one M."""
        text = f"speed over cuBLASLt {rival} at M = {m}, geometric mean of the shapes"
        claim = f"r2.bar.gemm_cublaslt_{rival.lower()}.m{m}" if m in CLAIMED else None
        bar = Bar(name, text, HEADLINE, "above", limit, "ratio", claim)
        speed = _fp8 if rival == "FP8" else _bf16
        used = [c for c in cells if speed(c) is not None]
        parts = [Part(c.point, HEADLINE, speed(c), "") for c in used]

        def reason() -> str:
            return self._of_mean(used, speed, rival, limit)

        return bars.mean_of_cells(bar, parts, self.shapes, reason), []

    def _of_mean(
        self, used: Sequence[ProductCell], speed: Callable, rival: str, limit: float
    ) -> str:
        """How far the bounds themselves would reach, how far the kernel is from them; the slowest cell's counters."""
        both = [(speed(c), self._over(c)) for c in used]
        both = [(s, o) for s, o in both if o is not None]
        worst = min(used, key=lambda c: speed(c).value)
        profile = self._profile(worst)
        if not both:
            return f"no bound was measured beside these cells; {profile}"
        own = statistics.geomean([o for _, o in both]).value
        most = statistics.geomean([s for s, _ in both]).value * own
        word = "more than" if most > limit else "and even that is less than"
        said = f"a kernel at the bound in every cell would reach that, {word} {limit:g}"
        if rival == "BF16" and most < 1:
            said = f"it is faster than the bound itself, {POWER_LIMITED}"
        return (
            f"{rival}'s time over the bound of these cells is {number(most)} in geometric mean: {said}; this one takes "
            f"{number(own)} times the bound; {profile}"
        )

    def least(self, m: int, cells: Sequence[ProductCell], limit: float) -> Judged:
        """The slowest cell against cuBLASLt BF16 at one M."""
        text = f"speed over cuBLASLt BF16 at M = {m}, the slowest shape"
        bar = Bar(f"bf16_least.m{m}", text, HEADLINE, "above", limit, "ratio", None)
        parts = [
            Part(c.point, HEADLINE, c.over_bf16, self._why(c, c.over_bf16))
            for c in cells
            if c.over_bf16 is not None
        ]
        return bars.over_cells(bar, parts, self.shapes)

    def peers(self, m: int, cells: Sequence[ProductCell]) -> Judged:
        """Every installed peer at one M, in MXFP4 as the plan has them: those that multiply in BF16."""
        text = f"speed over every installed peer with BF16 activations at M = {m}, the slowest cell"
        claim = f"r2.bar.gemm_peer.m{m}" if m in CLAIMED else None
        bar = Bar(f"peers.m{m}", text, HEADLINE, "above", PEERS, "ratio", claim)
        parts = [
            Part(c.point, HEADLINE, ratio, self._why(c, ratio), name)
            for c in cells
            for name, ratio in c.peers.items()
        ]
        names = dict.fromkeys(p.against for p in parts)
        made, lost = bars.over_cells(bar, parts, self.shapes * max(1, len(names)))
        return replace(made, how="; ".join(filter(None, (made.how, *names)))), lost

    def formats(self, cells: Sequence[ProductCell]) -> Judged:
        """NVFP4 over MXFP4, all shapes and M."""
        text = "time in NVFP4 over time in MXFP4, geometric mean of all shapes and M"
        bar = Bar("nvfp4", text, "nvfp4", "below", NVFP4_OVER_MXFP4, "ratio", None)
        used = [
            c for c in cells if c.format == "nvfp4" and c.point.M in MS and c.over_mxfp4 is not None
        ]
        parts = [Part(c.point, "nvfp4", c.over_mxfp4, "") for c in used]

        def reason() -> str:
            return self._profile(max(used, key=lambda c: c.over_mxfp4.value))

        return bars.mean_of_cells(bar, parts, self.shapes * len(MS), reason), []

    def cliffs(
        self, name: str, kernel: str, fmt: str, cells: Sequence[ProductCell], more: int
    ) -> Judged:
        """No step up in M makes a call faster by more than 3 %. more: steps beside those of the tabulated M."""
        text = f"time of {kernel} at the next tabulated M over time at M, the lowest"
        bar = Bar(name, text, fmt, "above", GROWTH, "ratio", None)
        at = {c.point: c for c in cells}
        parts = [
            Part(point, fmt, ratio, f"against M = {before}; {self._plans(at, point, before)}")
            for point, before, ratio in growths(cells)
        ]
        return bars.over_cells(bar, parts, self.shapes * (len(MS) - 1) + more)

    def _plans(self, at: Mapping, point: Any, before: int) -> str:
        """The plans on both sides of a step."""
        plans = [short_plan(at[p].chosen) for p in (point._replace(M=before), point)]
        return f"from the plan {plans[0] or '?'} to {plans[1] or '?'}"

    def odd(self, cells: Sequence[ProductCell]) -> Judged:
        """M between tabulated ones costs no more than the next of these."""
        text = f"time at M = {', '.join(map(str, ODD_MS))} over time at the next tabulated M, the slowest"
        bar = Bar("odd_m", text, HEADLINE, "below", ODD_M, "ratio", None)
        at = {c.point: c for c in cells}
        parts = []
        for cell, following, ratio in odd_steps(cells):
            after = cell.point._replace(M=following)
            why = f"against M = {following}; {self._plans(at, after, cell.point.M)}"
            parts.append(Part(cell.point, HEADLINE, ratio, why))
        return bars.over_cells(bar, parts, ODD_SHAPES * len(ODD_MS))

    def ragged(self, cells: Sequence[ProductCell]) -> Judged:
        """Products a second of the shape that fills no tile, over those of its aligned neighbour."""
        text = f"products a second of {RAGGED} over those of {NEIGHBOUR}, the lowest M"
        bar = Bar("ragged", text, HEADLINE, "above", EFFICIENCY, "ratio", None)
        parts = [
            Part(c.point, HEADLINE, ratio, self._profile(c)) for c, ratio in efficiencies(cells)
        ]
        return bars.over_cells(bar, parts, len(NEIGHBOUR_MS))

    def _over(self, cell: ProductCell) -> Estimate | None:
        return over(cell, bound_of(cell, self.peak))

    def _why(self, cell: ProductCell, speed: Estimate) -> str:
        """By rule: how far the bound would reach, then what the profiler counted."""
        bound = bound_of(cell, self.peak)
        own = over(cell, bound)
        if own is None:
            return self._profile(cell)
        kind = f" ({bound.kind})" if bound.kind else ""
        if own.value < 1:
            return f"it takes {number(own.value)} times its bound{kind}, {POWER_LIMITED}; {self._profile(cell)}"
        return (
            f"at its bound{kind} it would reach {number(speed.value * own.value)}; it takes {number(own.value)} times "
            f"the bound; {self._profile(cell)}"
        )

    def _profile(self, cell: ProductCell) -> str:
        p = cell.point
        near = profile_r2.nearest(self.profiled, cell.format, p.N, p.K, p.M, KERNEL)
        return profile_r2.reason(near, p.N, p.K, p.M)


def short_plan(chosen: str) -> str:
    """Entry, grid, and how the work is split, of a recorded plan."""
    first, rest = chosen.split(", ")[:2], chosen.split(", ")[2:]
    kept = [part for part in rest if part.startswith(SPLITS) and not part.endswith(" 1")]
    return ", ".join([*first, *kept])


def _fp8(cell: ProductCell) -> Estimate | None:
    return cell.over_fp8


def _bf16(cell: ProductCell) -> Estimate | None:
    return cell.over_bf16


__all__ = ["OVER_BF16", "OVER_FP8", "judge"]
