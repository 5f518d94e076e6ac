"""How a call of qgemm_mx is cut: a pure function of the problem and the device, with its reasons.

A block computes `rows` of W by `tokens`. A cluster is `share * split` blocks: `share` blocks own neighbouring
rows and multicast the activations to one another, `split` of them own parts of K. Inside a block `k_ways`
warpgroups take the chunks of K in turn. A job is a row tile (of all blocks that share) by a token tile, and
clusters take jobs in turn. Where the last wave would leave clusters without work, its jobs and those of the wave
before are streamed: their slices stand in one line, of which each cluster has an equal run.

`candidates` lists the plans that are worth timing, for a search; `complete` makes the plan of any choice; and
`ablation` gives the plans of the steps from a plain kernel to this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, NamedTuple

from .formats import require_integer
from .gemv_layout import CHUNKS, ROWS, SLICE, GemvLayout, gemv_layout
from .gemv_plan import SMEM_OF_SYSTEM, SMEM_PER_BLOCK, SMEM_PER_SM

# From here on a call of `linear` takes this kernel. In the R2b campaign it took 0.73 to 0.92 of the time of qgemv_mx at
# M = 16 on all six shapes that were measured (its `linear` still went to qgemv_mx there), and more than it at M = 8.
FEWEST_ROWS_OF_GEMM = 9
MOST_M = 2**31 - 1
WARPGROUP = 128  # threads


class Tile(NamedTuple):
    """What an entry is compiled for. Each of `consumers` warpgroups has row_tiles of 64 rows; k_ways share K."""

    tokens: int
    rows: int
    k_ways: int
    consumers: int
    row_tiles: int


_FEW = tuple(
    Tile(tokens, rows, k_ways, 2, 1)
    for tokens in (16, 32, 64)
    for rows, k_ways in ((128, 1), (64, 2))
)
_MANY = (Tile(128, 128, 1, 2, 1), Tile(128, 256, 1, 2, 2), Tile(256, 128, 1, 2, 1))
_INT4 = ((32, 128, 1), (64, 128, 1), (128, 128, 1))
# The entries of qgemm_mx.cu, by format.
TILES: dict[str, tuple[Tile, ...]] = {
    "mxfp4": _FEW + _MANY,
    "nvfp4": _FEW + _MANY,
    "int4_g128": tuple(t for t in _FEW + _MANY if (t.tokens, t.rows, t.k_ways) in _INT4),
}

# ---- what a block has, as in qgemm_mx.cuh ----------------------------------------------------------------------

BARRIER_BYTES = 8
MAX_STAGES = 16  # one lane makes the barriers of a stage, and more would wait for nothing
FEWEST_X_STAGES = 2
PARTIAL_BYTES = (
    4 * 128 * 256
)  # of the FP32 sums that a block leaves for another: of the largest tile
MOST_WARPS = 8  # of consumers: each has a flag
X_CHUNK_BYTES = 128  # of a token: 64 k in BF16
MIN_SHARED_TOKENS = 8  # of each block that shares: rows of an atom of the swizzle
MAX_CLUSTER = 8

# Clusters of 1, 2, .. 8 blocks, each block with an SM to itself, of which no more than these run at a time on the 132
# SMs of an H200. A cluster lies inside a GPC, and what is left over there is of no use to another: 42 clusters of 3, or
# 16 of 7, took a wave more. Found by timing; where the edge was not found the number is the last that was seen to fit.
CLUSTERS_AT_A_TIME = (132, 66, 36, 30, 18, 16, 12, 10)


def cluster_limit(size: int, sm_count: int) -> int:
    """Clusters of `size` blocks that run at a time, one block an SM; other devices in proportion to an H200."""
    return max(1, CLUSTERS_AT_A_TIME[size - 1] * sm_count // CLUSTERS_AT_A_TIME[0])


# ---- what a plan costs -----------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Of a tile, in us: 256 k of a block; the end of a job; sums of parts of K; jobs that are streamed."""

    slice: float
    job: float
    split: float
    stream: float


# Fitted (least squares of the relative error) to 640 cold times of MXFP4 on an H200, all nine shapes, M = 16 to 4096.
# Every plan pays FIXED_US. A slice is bound by dequantisation and issue up to 64 tokens, by tensor cores from 128 on.
FIXED_US = 2.24
COSTS = {
    (16, 64, 2): Cost(0.523, 0.0, 1.6, 0.0),
    (16, 128, 1): Cost(0.727, 0.8, 1.1, 6.0),
    (32, 64, 2): Cost(0.549, 0.0, 1.9, 0.0),
    (32, 128, 1): Cost(0.764, 0.7, 1.5, 6.2),
    (64, 64, 2): Cost(0.607, 2.4, 0.0, 0.0),
    (64, 128, 1): Cost(0.924, 0.9, 2.0, 6.8),
    (128, 128, 1): Cost(1.416, 1.0, 3.6, 8.8),
    (128, 256, 1): Cost(2.567, 1.9, 5.6, 20.1),
    (256, 128, 1): Cost(2.535, 1.4, 5.1, 14.5),
}
OVER_US = 0.5  # all leave the stages before sums are sent over them
SHARED_FACTOR = 1.02  # blocks that share activations wait for one another


def inverse(divisor: int) -> int:
    """2^32 / divisor, rounded up: the upper half of a 64-bit product with it is a division, of numbers below inverse.

    Nothing is divided by 1: its inverse does not fit into 32 bits.
    """
    return -(-(2**32) // divisor) % 2**32


@dataclass(frozen=True)
class GemmPlan:
    """The launch of one entry of qgemm_mx.

    tokens, rows, k_ways   name the entry: of a block; warpgroups of a block that share K
    share, split           blocks of a cluster that share activations, and that split K
    x_stages, w_stages     of activations (64 k; 256 k up to 64 tokens) and of weights (256 k) in shared memory
    group                  token tiles that are walked together, for the L2
    row_jobs, token_jobs   tiles of rows (of all blocks that share) and of tokens
    clusters               that take the jobs in turn
    whole_jobs             the first, which clusters take whole; the rest is streamed
    sums_offset            bytes to where sums of other parts of K come in; 0 where they come in over the stages
    shared_bytes           of dynamic shared memory
    reasons                why, one sentence a choice; no part of what a plan is
    """

    tokens: int
    rows: int
    k_ways: int
    share: int
    split: int
    x_stages: int
    w_stages: int
    group: int
    row_jobs: int
    token_jobs: int
    clusters: int
    whole_jobs: int
    sums_offset: int
    shared_bytes: int
    reasons: tuple[str, ...] = field(default=(), compare=False)

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return _tile(self.tokens, self.rows, self.k_ways).consumers

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers and one warpgroup that requests."""
        return WARPGROUP * (self.consumers + 1)

    @property
    def block(self) -> tuple[int, int]:
        """Threads of a block in x and y."""
        return self.threads, 1

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.share * self.split

    @property
    def grid(self) -> int:
        """Blocks."""
        return self.clusters * self.cluster

    @property
    def parts(self) -> int:
        """Of K whose sums are added at the end."""
        return self.split * self.k_ways

    @property
    def jobs(self) -> int:
        """Tiles of y."""
        return self.row_jobs * self.token_jobs

    @property
    def split_inverse(self) -> int:
        """The kernel divides by the split by it."""
        return inverse(self.split)

    @property
    def clusters_inverse(self) -> int:
        """The kernel divides by the clusters by it."""
        return inverse(self.clusters)

    @property
    def streamed(self) -> bool:
        """Whether some jobs are shared between clusters, whose sums then go through memory."""
        return self.whole_jobs < self.jobs

    @property
    def waves(self) -> float:
        """Jobs of the cluster with the most; of each, where slices are shared evenly."""
        return self.jobs / self.clusters if self.streamed else -(-self.jobs // self.clusters)

    @property
    def most_rows(self) -> int:
        """M at most."""
        return self.tokens * self.token_jobs

    @property
    def over_stages(self) -> bool:
        """Whether sums come in over the stages."""
        return self.parts > 1 and self.sums_offset == 0

    def entry(self, format: str, activation: str) -> str:
        """Name of the entry; activation is bf16, the only one there is."""
        ways = f"_k{self.k_ways}" if self.k_ways > 1 else ""
        return f"qgemm_mx_{format}_{activation}_t{self.tokens}_r{self.rows}{ways}"


def _tile(tokens: int, rows: int, k_ways: int, format: str = "mxfp4") -> Tile:
    for tile in TILES[format]:
        if tile[:3] == (tokens, rows, k_ways):
            return tile
    raise ValueError(
        f"no entry of {format} has {tokens} tokens, {rows} rows and {k_ways} way(s) of K"
    )


def entries(format: str) -> tuple[str, ...]:
    """All that a plan of a format may name."""
    return tuple(
        f"qgemm_mx_{format}_bf16_t{t.tokens}_r{t.rows}" + (f"_k{t.k_ways}" if t.k_ways > 1 else "")
        for t in TILES[format]
    )


def rounded(m: int, format: str) -> int:
    """The largest M with the plan of M: the choice sees no more of M than the number of token tiles."""
    tokens = sorted({tile.tokens for tile in TILES[format]})
    cover = next((t for t in tokens if t >= m), None)
    return cover or -(-m // (tokens[-1] // 2)) * (tokens[-1] // 2)


def takes_gemm(n: int, k: int, m: int, format: str) -> bool:
    """Whether `linear` gives M rows of BF16 to this kernel, and not to qgemv_mx in launches of 16 rows."""
    return FEWEST_ROWS_OF_GEMM <= m <= MOST_M


@dataclass(frozen=True)
class Problem:
    """What a plan is made for: the packed weight, M, and the device's numbers."""

    layout: GemvLayout
    m: int
    sm_count: int
    smem_per_sm: int

    @classmethod
    def of(
        cls, n: int, k: int, m: int, format: str, sm_count: int, smem_per_sm: int = SMEM_PER_SM
    ) -> Problem:
        """ValueError names a size or a format without a plan, and a number that is no integer."""
        layout = gemv_layout(format, n, k)
        m = require_integer("M", m)
        if not 1 <= m <= MOST_M:
            raise ValueError(f"M={m} is not in 1..{MOST_M}")
        sm_count = require_integer("sm_count", sm_count)
        smem_per_sm = require_integer("smem_per_sm", smem_per_sm)
        if sm_count < 1:
            raise ValueError(f"sm_count={sm_count} is below 1")
        return cls(layout, m, sm_count, smem_per_sm)

    @property
    def budget(self) -> int:
        """Bytes of dynamic shared memory that a block may have."""
        return min(self.smem_per_sm - SMEM_OF_SYSTEM, SMEM_PER_BLOCK)

    @property
    def smallest_tokens(self) -> int:
        """Of the entries that hold all M tokens the smallest number; where none does, the largest."""
        tokens = sorted({tile.tokens for tile in TILES[self.layout.format]})
        return next((t for t in tokens if t >= self.m), tokens[-1])

    def plan(
        self,
        tile: Tile,
        share: int = 1,
        split: int = 1,
        over: bool | None = None,
        x_stages: int | None = None,
        w_stages: int | None = None,
        group: int | None = None,
        clusters: int | None = None,
        streamed: bool = False,
    ) -> GemmPlan | None:
        """The plan of these choices; None where it does not fit.

        over      whether sums come in over the stages; None: only where they have no place of their own
        x_stages, w_stages   None: as far ahead as both can be
        group     None: as the L2 likes it
        clusters  at most; None: as many as run at a time
        streamed  share the slices of the jobs that fill no wave; there is no such plan where all waves are full
        """
        layout = self.layout
        if share * split > min(MAX_CLUSTER, self.sm_count) or split > layout.chunks:
            return None
        if share > 1 and tile.tokens < MIN_SHARED_TOKENS * share:
            return None
        if (tile.k_ways > 1 and split == 1) or (streamed and split > 1):
            return None  # warpgroups send their sums as blocks of a cluster do
        row_jobs = -(-layout.n // (tile.rows * share))
        token_jobs = -(-self.m // tile.tokens)
        limit = cluster_limit(share * split, self.sm_count)
        jobs = row_jobs * token_jobs
        clusters, whole_jobs = min(jobs, limit) if clusters is None else min(jobs, clusters), jobs
        if streamed:
            full, rest = divmod(jobs, limit)
            if not rest or layout.slices == 1 or limit == 1:
                return None
            # Every run has a slice, or a cluster would wait for one that leaves no sums.
            clusters, whole_jobs = min(limit, jobs * layout.slices), max(0, full - 1) * limit
        chunks = -(-layout.chunks // split) * -(-jobs // clusters)  # of a block
        sums = sums_bytes(tile, split)
        if over is None:
            found = self._stages(tile, chunks, self.budget - sums, x_stages, w_stages)
            over = not found and sums > 0
        over = over and sums > 0
        room = self.budget - (0 if over else sums)
        found = self._stages(tile, chunks, room, x_stages, w_stages)
        if not found:
            return None
        x_stages, w_stages = found
        stages, barriers = self.stage_bytes(tile, *found), barrier_bytes(*found)
        sums_offset = 0
        if over and sums > stages:  # barriers stand behind the stages
            return None
        if sums and not over:
            sums_offset = -(-(stages + barriers) // 128) * 128
        return GemmPlan(
            tokens=tile.tokens,
            rows=tile.rows,
            k_ways=tile.k_ways,
            share=share,
            split=split,
            x_stages=x_stages,
            w_stages=w_stages,
            group=min(token_jobs, group or self._group(tile, share, split, clusters)),
            row_jobs=row_jobs,
            token_jobs=token_jobs,
            clusters=clusters,
            whole_jobs=whole_jobs,
            sums_offset=sums_offset,
            shared_bytes=sums_offset + sums if sums_offset else stages + barriers,
        )

    def stage_bytes(self, tile: Tile, x_stages: int, w_stages: int) -> int:
        """Of all stages."""
        return x_stages * x_stage_bytes(tile) + w_stages * self.w_stage_bytes(tile)

    def w_stage_bytes(self, tile: Tile) -> int:
        """Of a stage of weights: 256 k of each row."""
        return tile.rows // ROWS * self.layout.unit_bytes

    def _stages(
        self, tile: Tile, chunks: int, room: int, x_stages: int | None, w_stages: int | None
    ) -> tuple[int, int] | None:
        """Stages of activations and of weights: the furthest that both are ahead, and then the most even.

        One more than a block has in all is never of use: a part of K may begin inside a slice.
        """
        each = x_chunks(tile)
        most_x = min(MAX_STAGES, max(FEWEST_X_STAGES, -(-chunks // each) + 1))
        most_w = min(MAX_STAGES, -(-chunks // CHUNKS) + 1)
        found = []
        for w in (w_stages,) if w_stages else range(1, most_w + 1):
            left = room - 128 - barrier_bytes(MAX_STAGES, w) - w * self.w_stage_bytes(tile)
            x = x_stages or min(most_x, left // x_stage_bytes(tile))
            if x >= FEWEST_X_STAGES and x * x_stage_bytes(tile) <= left:
                ahead = min(CHUNKS * w, each * x)
                found.append((min(ahead, chunks), -abs(CHUNKS * w - each * x), x, w))
        return max(found)[2:] if found else None

    def _group(self, tile: Tile, share: int, split: int, clusters: int) -> int:
        """Token tiles that are walked together, so that what runs at a time reads the fewest bytes.

        `clusters` jobs are g token tiles by clusters / g row tiles; the bytes of both are least where they are equal.
        """
        weights = share * tile.rows * self.layout.unit_bytes / (ROWS * SLICE)  # of one k
        return max(1, round(sqrt(clusters * weights / (2 * tile.tokens))))


def x_chunks(tile: Tile) -> int:
    """Chunks of 64 k in a stage of activations."""
    return CHUNKS if tile.tokens <= 64 else 1


def x_stage_bytes(tile: Tile) -> int:
    """Of a stage of activations."""
    return tile.tokens * X_CHUNK_BYTES * x_chunks(tile)


def barrier_bytes(x_stages: int, w_stages: int) -> int:
    """Full and empty of each stage, and one for the sums."""
    return BARRIER_BYTES * (2 * x_stages + 2 * w_stages + 1)


def sums_bytes(tile: Tile, split: int) -> int:
    """Of the FP32 sums that a block gets of all parts: four a thread of each octet of tokens, octets dealt to parts."""
    parts = split * tile.k_ways
    if parts == 1:
        return 0
    octets = tile.tokens // 8 * tile.row_tiles
    return parts * -(-octets // parts) * WARPGROUP * tile.consumers * 16


def complete(
    n: int,
    k: int,
    m: int,
    format: str,
    sm_count: int,
    smem_per_sm: int = SMEM_PER_SM,
    *,
    tokens: int,
    rows: int,
    k_ways: int = 1,
    **choices: Any,
) -> GemmPlan:
    """The plan of any choices, those of `Problem.plan`, with its stages. ValueError where it does not fit."""
    problem = Problem.of(n, k, m, format, sm_count, smem_per_sm)
    plan = problem.plan(_tile(tokens, rows, k_ways, format), **choices)
    if plan is None:
        raise ValueError(
            f"{tokens} tokens x {rows} rows x {k_ways} way(s) with {choices} do not fit W[{n}, {k}]"
            f" ({format}) into {problem.budget} bytes of shared memory and {sm_count} SMs"
        )
    return plan


# ---- the choice ------------------------------------------------------------------------------------------------


def plan_gemm(
    n: int, k: int, m: int, format: str, sm_count: int, smem_per_sm: int = SMEM_PER_SM
) -> GemmPlan:
    """The plan of y[M, N] = x[M, K] W[N, K]^T on a device of `sm_count` SMs: of all candidates the cheapest.

    ValueError names a size or a format without a plan, and a number that is no integer. Nothing is measured or looked
    up here.
    """
    problem = Problem.of(n, k, m, format, sm_count, smem_per_sm)
    plan = _worth_timing(problem)[0]
    slices = -(-problem.layout.chunks // plan.split) / CHUNKS
    where = "over the stages" if plan.over_stages else "in a place of their own"
    reasons = (
        f"{plan.tokens} tokens a block: {plan.token_jobs} tile(s) of them for M={m}",
        f"{plan.rows} rows a block, {plan.share} block(s) share activations:"
        f" {plan.jobs} jobs in {plan.waves} wave(s) of {plan.clusters} clusters",
        f"{plan.parts} part(s) of K: {slices:g} slices a block"
        + (f", sums come in {where}" if plan.parts > 1 else ""),
        f"{plan.x_stages} stages of activations and {plan.w_stages} of weights fill shared memory",
        f"{_cost_us(problem, plan):.1f} us by the cost model, the least of all candidates",
    )
    return replace(plan, reasons=reasons)


MOST_CANDIDATES = 40
FEWEST_SPLIT_CHUNKS = 4  # of a part, where there are more parts than one
STREAMED_WAVES = 4  # from so many on the last one costs less than the sums that go through memory
FEWEST_BUSY = 0.25  # of the SMs, where another plan has more


def candidates(
    n: int, k: int, m: int, format: str, sm_count: int, smem_per_sm: int = SMEM_PER_SM
) -> tuple[GemmPlan, ...]:
    """The plans worth timing, each once, at most MOST_CANDIDATES; the choice of `plan_gemm` is the first."""
    return tuple(_worth_timing(Problem.of(n, k, m, format, sm_count, smem_per_sm)))


def _worth_timing(problem: Problem) -> list[GemmPlan]:
    plans = dict.fromkeys(_fitting(problem))
    if not plans:
        raise ValueError(
            f"shared memory of {problem.smem_per_sm} bytes an SM does not hold the stages"
            f" of any entry of {problem.layout.format}"
        )
    most = max(plan.grid for plan in plans)
    busy = [plan for plan in plans if plan.grid >= FEWEST_BUSY * most]
    return sorted(busy, key=lambda plan: _cost_us(problem, plan))[:MOST_CANDIDATES]


def _fitting(problem: Problem) -> Iterator[GemmPlan]:
    """Tiles about as large as M, and every cluster; K is split where that does not make more waves."""
    layout, cover = problem.layout, problem.smallest_tokens
    for tile in TILES[layout.format]:
        if not cover // 2 <= tile.tokens <= cover:
            continue
        for share in (1, 2, 4):
            for split in range(1, MAX_CLUSTER // share + 1):
                if split > 1 and layout.chunks < FEWEST_SPLIT_CHUNKS * split:
                    continue
                for over in _over(tile, split):
                    plan = problem.plan(tile, share, split, over)
                    if plan and (split == 1 or _may_split(problem, plan)):
                        yield plan
            plan = problem.plan(tile, share, streamed=True)
            if plan and plan.jobs < STREAMED_WAVES * plan.clusters:
                yield plan


def _over(tile: Tile, split: int) -> tuple[bool, ...]:
    """Whether sums may come in over the stages: from 128 tokens on a place of their own would leave too few stages."""
    if split == 1:
        return (False,)
    return (True,) if tile.tokens >= 128 else (False, True)


def _may_split(problem: Problem, plan: GemmPlan) -> bool:
    return plan.jobs <= cluster_limit(plan.cluster, problem.sm_count)


def _cost_us(problem: Problem, plan: GemmPlan) -> float:
    """What a call takes: a fixed part, the slices and ends of the jobs of a cluster, and what sums of others cost."""
    cost = COSTS[plan.tokens, plan.rows, plan.k_ways]
    slices = -(-problem.layout.chunks // plan.split) / CHUNKS
    jobs = plan.waves * (slices * cost.slice + cost.job)
    sums = cost.split * (plan.split > 1) + cost.stream * plan.streamed
    over = OVER_US * plan.over_stages
    return FIXED_US + sums + over + jobs * (SHARED_FACTOR if plan.share > 1 else 1.0)


# ---- the ablation ----------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """Where a step of the ablation is launched from.

    source, entry   cuda/<source>.cu and its entry, with {format}; None: the entry of the plan
    choices         of `complete`, beside those of the steps before
    own             what is from here on as `plan_gemm` has it
    """

    source: str = "qgemm_mx"
    entry: str | None = None
    choices: dict[str, Any] = {}  # noqa: RUF012 - never written
    own: tuple[str, ...] = ()


# Steps from a plain kernel to the product: id, what the step changes, time over that of the step before as it was
# predicted before the campaign. Each keeps what those before it changed. The chain itself had not been timed then, but
# tiles, splits of K and streamed jobs had been, one by one, in development: those predictions are not blind.
ABLATION_STEPS = (
    (
        "step0",
        "one stage of weights, every product waited for, 64 tokens a block, no cluster, a block a job,"
        " token tiles one after the other",
        None,
    ),
    ("step1", "as many stages as shared memory holds", 0.55),
    ("step2", "the next fragments are made while a product runs", 0.85),
    ("step3", "as many tokens a block as M asks for", 0.75),
    ("step4", "persistent blocks that walk token tiles in groups", 0.97),
    ("step5", "K split over a cluster, or jobs streamed, as the plan has it", 0.85),
    ("qgemm_mx", "the plan's own tile and cluster", 0.97),
)
_WAITING = ("qgemm_ablations", "qgemm_mx_waiting_{format}_bf16_t64_r128")
_PLAIN = {"tokens": 64, "rows": 128, "w_stages": 1, "x_stages": 2, "group": 1, "clusters": MOST_M}
STEPS: dict[str, Step] = {
    "step0": Step(*_WAITING, choices=_PLAIN),
    "step1": Step(*_WAITING, choices={"w_stages": None, "x_stages": None}),
    "step2": Step(),
    "step3": Step(own=("tokens",)),
    "step4": Step(choices={"clusters": None}, own=("group",)),
    "step5": Step(own=("split", "over", "streamed")),
}


def ablation(
    step: str, n: int, k: int, m: int, format: str, sm_count: int, smem_per_sm: int = SMEM_PER_SM
) -> tuple[str, str, GemmPlan]:
    """(source, entry, plan) of a step of ABLATION_STEPS, BF16. ValueError: no such step, or no plan that fits."""
    own = plan_gemm(n, k, m, format, sm_count, smem_per_sm)
    if step == ABLATION_STEPS[-1][0]:
        return "qgemm_mx", own.entry(format, "bf16"), own
    if step not in STEPS:
        names = ", ".join(name for name, *_ in ABLATION_STEPS)
        raise ValueError(f"{step!r} is no step of the ablation: {names}")
    has = {"tokens": own.tokens, "group": own.group, "split": own.split, "over": own.over_stages}
    has["streamed"] = own.streamed
    chosen: dict[str, Any] = {}
    for name, made in STEPS.items():
        chosen |= made.choices | {of: has[of] for of in made.own}
        if name == step:
            break
    if made.entry is not None and format != "mxfp4":
        raise ValueError(f"{step} is there for mxfp4, not for {format}")
    problem = (n, k, m, format, sm_count, smem_per_sm)
    try:
        plan = complete(*problem, **chosen)
    except ValueError:  # with this tile all waves are full, or sums have no such place
        plan = complete(*problem, **chosen | {"over": None, "streamed": False})
    entry = plan.entry(format, "bf16") if made.entry is None else made.entry.format(format=format)
    return made.source, entry, plan
