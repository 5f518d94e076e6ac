"""How a call of qgemv_mx is cut: a pure function of the problem and the device, with its reasons.

A team is one block, or a cluster of two that share K. A team owns every `teams`-th row tile of 16. A warp
owns slices of 256 k and walks the tiles; `walkers` warps share a slice and take tiles in turn. So a tile's
units are spread over `ranks * warps` warps, whose sums are added at the end.

`candidates` lists every plan that fits, for an exhaustive search; `ablation` gives the plans of the steps
from a plain kernel to this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from .formats import FORMATS, require_integer
from .gemv_layout import GemvLayout, gemv_layout

TOKENS = (1, 2, 4, 8, 16)  # of an entry; the smallest that holds M is taken
MAX_TOKENS = TOKENS[-1]
CUTS = (16, 12, 8, 4)  # warps that share K, at most: what a search tries
MAX_WARPS = 16  # of a block, and of an SM: what the registers of a warp leave room for
ASYNC, BULK = "async", "bulk"
ASYNC_DEPTH = 2  # compiled into the entries with cp.async rings
BULK_DEPTH = 2
# The copy engine streams faster, copies by the lanes start sooner. Measured on an H200 (log in kernels/README.md):
# at 31 MB the lanes win or draw, at 47 MB the copy engine wins by 3 percent, at 133 MB by 5.
BULK_FROM_BYTES = 40_000_000
# A cluster costs its launch and an exchange. It pays where blocks would be short of tiles, and from 8 tokens on,
# where each block then loads half of the activations; with many tiles a block the sums of two ranks do not fit.
# Tiles an SM, by tokens.
CLUSTER_BELOW_TILES = {1: 1.0, 2: 1.0, 4: 1.0, 8: 3.0, 16: 10.0}
FEW_TILES = 3.0  # an SM: under it sixteen warps of a block share K, from it on eight
# A walker has at least this many tiles, or it is not worth its registers.
TILES_OF_A_WALKER = 3
SMEM_PER_SM = 233472  # H100 and H200: 228 KiB an SM, of which 1 KiB a block is the system's
SMEM_OF_SYSTEM = 1024
SMEM_PER_BLOCK = 232448  # 227 KiB: what one block may have on Hopper, however much an SM has
BARRIER_BYTES = 8
OFFSET_LIMIT = 2**32  # the kernel's offsets into a weight have 32 bits


@dataclass(frozen=True)
class GemvPlan:
    """The launch of one entry of qgemv_mx.

    tokens, ranks, ring          name the entry: tokens at most, blocks of a cluster, async or bulk copies
    depth                        units of a warp in flight
    warps, walkers               warps of a block that share K, and warps that share a slice
    early                        1: all units in flight are requested before the kernel ahead is waited for
    teams                        blocks or clusters; the first `extra_teams` have tiles_per_team + 1 tiles
    turn_tiles                   tiles whose sums have room in shared memory at one time
    slices                       of 256 k
    tile_bytes, walker_stride, stride   bytes to the next row tile, to the next walker's, to a warp's own next
    ring_offset, shared_bytes    bytes of the sums in front of the rings (a multiple of 128), and of all
    reasons                      why, one sentence a choice
    """

    tokens: int
    ranks: int
    ring: str
    depth: int
    warps: int
    walkers: int
    early: int
    teams: int
    tiles_per_team: int
    extra_teams: int
    turn_tiles: int
    slices: int
    tile_bytes: int
    walker_stride: int
    stride: int
    ring_offset: int
    shared_bytes: int
    reasons: tuple[str, ...] = ()

    @property
    def most_rows(self) -> int:
        """M at most."""
        return self.tokens

    @property
    def grid(self) -> int:
        """Blocks."""
        return self.teams * self.ranks

    @property
    def block(self) -> tuple[int, int]:
        """Threads of a block in x (the warps that share K) and y (the walkers)."""
        return 32 * self.warps, self.walkers

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps * self.walkers

    def entry(self, format: str, activation: str) -> str:
        """Name of the entry; activation is bf16 or fp16."""
        suffix = "_bulk" if self.ring == BULK else ""
        return f"qgemv_mx_{format}_{activation}_t{self.tokens}_c{self.ranks}{suffix}"


def tokens_for(m: int) -> int:
    """The smallest entry for M tokens. ValueError unless M is in 1..16."""
    m = require_integer("M", m)
    if not 1 <= m <= MAX_TOKENS:
        raise ValueError(
            f"M={m} is not in 1..{MAX_TOKENS}: a launch of qgemv_mx has no more tokens"
        )
    return next(t for t in TOKENS if t >= m)


@dataclass(frozen=True)
class Problem:
    """What a plan is made for: the packed weight, tokens of the entry, and the device's numbers."""

    layout: GemvLayout
    tokens: int
    sm_count: int
    smem_per_sm: int

    @classmethod
    def of(
        cls, n: int, k: int, m: int, format: str, sm_count: int, smem_per_sm: int = SMEM_PER_SM
    ) -> Problem:
        """ValueError names a size or a format without a plan, and a number that is no integer."""
        layout = gemv_layout(format, n, k)
        tokens = tokens_for(m)
        sm_count = require_integer("sm_count", sm_count)
        smem_per_sm = require_integer("smem_per_sm", smem_per_sm)
        if sm_count < 1:
            raise ValueError(f"sm_count={sm_count} is below 1")
        if layout.nbytes >= OFFSET_LIMIT:
            raise ValueError(
                f"W[{n}, {k}] in {format} is packed into {layout.nbytes} bytes: the limit of"
                f" qgemv_mx is {OFFSET_LIMIT - 1}"
            )
        return cls(layout, tokens, sm_count, smem_per_sm)

    def plan(
        self,
        ring: str,
        ranks: int,
        warps: int,
        walkers: int = 1,
        depth: int | None = None,
        blocks: int = 1,
        most_turn_tiles: int | None = None,
        early: int = 0,
    ) -> GemvPlan | None:
        """The plan of these choices, with the fewest turns that fit; None where it does not fit.

        blocks           of an SM at a time
        most_turn_tiles  a smaller turn than fits, for the ablation
        """
        layout = self.layout
        teams = min(layout.tiles, self.sm_count * blocks // ranks)
        if teams < 1 or ranks * warps > layout.slices or warps * walkers * blocks > MAX_WARPS:
            return None
        tiles_per_team, extra_teams = divmod(layout.tiles, teams)
        if walkers > tiles_per_team:
            return None
        if depth is None:
            depth = ASYNC_DEPTH if ring == ASYNC else BULK_DEPTH
        rings = warps * walkers * depth
        ring_bytes = rings * (layout.unit_bytes + (BARRIER_BYTES if ring == BULK else 0))
        most_bytes = min(self.smem_per_sm // blocks - SMEM_OF_SYSTEM, SMEM_PER_BLOCK)
        room = most_bytes - ring_bytes
        most = tiles_per_team + (extra_teams > 0)
        fit = min(most, most_turn_tiles or most)
        while fit and self._sums(ranks, warps, fit) > room:
            fit -= 1
        if not fit:
            return None
        turn_tiles = -(-most // -(-most // fit))
        ring_offset = self._sums(ranks, warps, turn_tiles)
        return GemvPlan(
            tokens=self.tokens,
            ranks=ranks,
            ring=ring,
            depth=depth,
            warps=warps,
            walkers=walkers,
            early=early,
            teams=teams,
            tiles_per_team=tiles_per_team,
            extra_teams=extra_teams,
            turn_tiles=turn_tiles,
            slices=layout.slices,
            tile_bytes=layout.tile_bytes,
            walker_stride=layout.tile_bytes * teams,
            stride=layout.tile_bytes * teams * walkers,
            ring_offset=ring_offset,
            shared_bytes=ring_offset + ring_bytes,
        )

    def _sums(self, ranks: int, warps: int, turn_tiles: int) -> int:
        used = sums_bytes(self.layout.format, self.tokens, ranks, warps, turn_tiles)
        return -(-used // 128) * 128

    def cuts(self, ranks: int, most: int = MAX_WARPS) -> list[int]:
        """Numbers of warps, at most `most`, that share the slices of a rank in even rounds; most first."""
        share = -(-self.layout.slices // ranks)
        return list(dict.fromkeys(-(-share // r) for r in range(-(-share // most), share + 1)))


def sums_bytes(format: str, tokens: int, ranks: int, warps: int, turn_tiles: int) -> int:
    """Bytes of the FP32 sums of a turn: those of each warp, and those that the ranks send to each other."""
    int4 = FORMATS[format].element == "int4"
    values = -(-tokens // 8) * 2 * (1 if tokens <= 4 and not int4 else 2)  # of a lane and a tile
    sent = ranks * -(-turn_tiles // ranks) if ranks > 1 else 0
    return 4 * 32 * values * (warps * turn_tiles + sent)


def plan_gemv(
    n: int,
    k: int,
    m: int,
    format: str,
    sm_count: int,
    smem_per_sm: int = SMEM_PER_SM,
    programmatic: bool = False,
) -> GemvPlan:
    """The plan of y[M, N] = x[M, K] W[N, K]^T with M in 1..16 on a device of `sm_count` SMs.

    smem_per_sm   bytes of shared memory of an SM; a block has SMEM_PER_BLOCK at most
    programmatic  for a dependent launch, which requests its first units before the kernel ahead has ended

    ValueError names a size or a format without a plan, a number that is no integer, and a programmatic that is
    neither true nor false. Nothing is measured or looked up here.
    """
    # By truth, "false" would be a dependent launch.
    if not isinstance(programmatic, bool | np.bool):
        raise ValueError(
            f"programmatic={programmatic!r} is {type(programmatic).__name__}, not True or False"
        )
    problem = Problem.of(n, k, m, format, sm_count, smem_per_sm)
    found = _programmatic(problem) if programmatic else _choose(problem)
    if found is None:
        raise ValueError(
            f"shared memory of {smem_per_sm} bytes an SM does not hold the sums and rings"
            f" of {problem.tokens} tokens ({format})"
        )
    plan, reasons = found
    return replace(plan, reasons=(f"{problem.tokens} tokens: the smallest for M={m}", *reasons))


def _choose(problem: Problem) -> tuple[GemvPlan, tuple[str, ...]] | None:
    """Ring by bytes and tokens, ranks by tiles an SM, then the cut with the fewest turns and the most warps."""
    layout, tokens = problem.layout, problem.tokens
    tiles = layout.tiles / problem.sm_count
    large = layout.nbytes >= BULK_FROM_BYTES
    ring = BULK if large and tokens < MAX_TOKENS else ASYNC
    why_ring = (
        f"{layout.nbytes / 1e6:.1f} MB, {tokens} tokens: {ring} copies"
        f" (bulk from {BULK_FROM_BYTES / 1e6:.0f} MB with fewer than {MAX_TOKENS})"
    )
    halves = ring == ASYNC and problem.sm_count >= 2 and layout.slices >= 2
    ranks = 2 if halves and tiles < CLUSTER_BELOW_TILES[tokens] else 1
    why_ranks = f"{tiles:.1f} tiles an SM: {ranks} block(s) share K"
    most = MAX_WARPS if ranks > 1 or ring == BULK or tiles < FEW_TILES else MAX_WARPS // 2
    plans = []
    for warps in problem.cuts(ranks, most):
        for walkers in (1, 2, 4):
            plan = problem.plan(ring, ranks, warps, walkers)
            if plan is not None and (walkers == 1 or _walks(plan)):
                plans.append(plan)
    if not plans:
        plan = _smallest(problem)
        return None if plan is None else (plan, (why_ring, why_ranks, "the least shared memory"))
    least = min(_turns(p) for p in plans)
    plan = max((p for p in plans if _turns(p) == least), key=_rank)
    why = (
        f"{plan.warps} warps x {plan.walkers} share {layout.slices} slices:"
        f" sums in {least} turn(s) of {plan.turn_tiles} tiles"
    )
    return plan, (why_ring, why_ranks, why)


def _rank(plan: GemvPlan) -> tuple[int, int]:
    """More warps that work, in fours where a few less give that: an SM has four schedulers."""
    working = plan.warps * min(plan.walkers, _wanted(plan))
    even = plan.ranks == 1 and working % 4 == 0
    return working + (3 if even else 0), plan.warps


def _turns(plan: GemvPlan) -> int:
    return -(-(plan.tiles_per_team + (plan.extra_teams > 0)) // plan.turn_tiles)


def _walks(plan: GemvPlan) -> bool:
    return plan.tiles_per_team >= TILES_OF_A_WALKER * plan.walkers


def _wanted(plan: GemvPlan) -> int:
    """Walkers that pay: with 16 tokens arithmetic is the limit, and every warp counts."""
    return MAX_WARPS if plan.tokens >= MAX_TOKENS or plan.ring == BULK else 1


def _smallest(problem: Problem) -> GemvPlan | None:
    for ring in (BULK, ASYNC):
        for warps in reversed(problem.cuts(1)):
            plan = problem.plan(ring, 1, warps, depth=1 if ring == BULK else None)
            if plan is not None:
                return plan
    return None


def _programmatic(problem: Problem) -> tuple[GemvPlan, tuple[str, ...]] | None:
    """All warps on one block's tiles, and what they may have in flight requested before the kernel ahead has ended.

    Measured on a chain of layers: leaving half an SM to the next kernel costs this one more than the next one gains.
    """
    cuts = problem.cuts(1)
    for warps in cuts:
        plan = problem.plan(ASYNC, 1, warps, early=1)
        if plan is not None and (_turns(plan) == 1 or warps == cuts[-1]):
            return plan, (
                "async copies: they start soonest",
                "1 block: no cluster has to be whole before it starts",
                f"{plan.warps} warps share {plan.slices} slices,"
                f" {plan.depth} units each requested before the kernel ahead has ended",
            )
    return None


def candidates(
    n: int, k: int, m: int, format: str, sm_count: int, smem_per_sm: int = SMEM_PER_SM
) -> tuple[GemvPlan, ...]:
    """Every plan worth timing, each once; the choice of `plan_gemv` is among them."""
    problem = Problem.of(n, k, m, format, sm_count, smem_per_sm)
    own = replace(plan_gemv(n, k, m, format, sm_count, smem_per_sm), reasons=())
    return tuple(dict.fromkeys((own, *_fitting(problem))))


def _fitting(problem: Problem) -> Iterator[GemvPlan]:
    """Either ring, one or two ranks, the largest even cuts up to 16, 12, 8 and 4 warps, one or two blocks an SM."""
    for ring, ranks, depths in ((ASYNC, 1, (None,)), (ASYNC, 2, (None,)), (BULK, 1, (2, 3))):
        cuts = problem.cuts(ranks)
        chosen = dict.fromkeys(max((w for w in cuts if w <= most), default=1) for most in CUTS)
        for warps, walkers, depth in product(chosen, (1, 2, 4), depths):
            for blocks in (1, 2):
                plan = problem.plan(ring, ranks, warps, walkers, depth, blocks)
                if plan is not None and min(6, cuts[0]) <= warps * walkers:
                    yield plan


# Steps from a plain kernel to the product: id, what the step changes, time over that of the step before as it was
# predicted before any of them was timed (M = 1, a layer of 31 MB).
ABLATION_STEPS = (
    ("step0", "each weight times its scale; 4 warps, 1 unit in flight, sums after each tile", None),
    ("step1", "a scale on each sum instead of on each weight", 0.90),
    ("step2", "16 warps instead of 4", 0.45),
    ("step3", "sums once instead of after each tile", 0.85),
    ("step4", "2 units in flight a warp instead of 1", 0.85),
    ("qgemv_mx", "the plan's own ring, cluster and cut", 0.97),
)
ABLATION_TOKENS = (1, 16)  # of the entries with a scale on each weight


def ablation(
    step: str, n: int, k: int, m: int, format: str, sm_count: int, smem_per_sm: int = SMEM_PER_SM
) -> tuple[str, str, GemvPlan]:
    """(source, entry, plan) of a step of ABLATION_STEPS, BF16. ValueError: no such step, or no plan that fits."""
    problem = Problem.of(n, k, m, format, sm_count, smem_per_sm)
    if step == "qgemv_mx":
        plan = plan_gemv(n, k, m, format, sm_count, smem_per_sm)
        return "qgemv_mx", plan.entry(format, "bf16"), plan
    names = [name for name, *_ in ABLATION_STEPS]
    if step not in names:
        raise ValueError(f"{step!r} is no step of the ablation: {', '.join(names)}")
    number = names.index(step)
    if number == 0:  # a column is a token: as many sums of a lane as with 8
        problem = replace(problem, tokens=max(8, problem.tokens))
    warps = problem.cuts(1, MAX_WARPS if number >= 2 else 4)[0]
    plan = problem.plan(
        BULK, 1, warps,
        depth=2 if number >= 4 else 1,
        most_turn_tiles=None if number >= 3 else 1,
    )  # fmt: skip
    if plan is None:
        raise ValueError(f"{step} has no plan for W[{n}, {k}] in {format} with M={m}")
    if number == 0:
        if tokens_for(m) not in ABLATION_TOKENS or format != "mxfp4":
            raise ValueError(
                f"{step} is there for mxfp4 with {ABLATION_TOKENS} tokens, not for {format}, M={m}"
            )
        return "qgemv_ablations", f"qgemv_scaled_t{tokens_for(m)}", plan
    return "qgemv_mx", plan.entry(format, "bf16"), plan
