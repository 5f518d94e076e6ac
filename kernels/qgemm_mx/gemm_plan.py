"""How a call of qgemm_mx is cut: a pure function of the problem and the device, with its reasons.

A block computes `rows` of W by `tokens`. A cluster is `share * split` blocks: `share` blocks own neighbouring
rows and multicast the activations to one another, `split` of them own parts of K. Inside a block `k_ways`
warpgroups take the chunks of K in turn. A job is a row tile (of all blocks that share) by a token tile, and
clusters take jobs in turn.

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

# From here on a call of `linear` takes this kernel. Below, each token costs qgemv_mx little.
FEWEST_ROWS_OF_GEMM = 17
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
    Tile(tokens, rows, k_ways, consumers, 1)
    for tokens in (16, 32, 64)
    for rows, k_ways, consumers in ((128, 1, 2), (256, 1, 4), (64, 2, 2), (64, 4, 4), (128, 2, 4))
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
X_CHUNK_BYTES = 128  # of a token: 64 k in BF16
MIN_SHARED_TOKENS = 8  # of each block that shares: rows of an atom of the swizzle
MAX_CLUSTER = 8

# Clusters lie inside a GPC, so an SM that is left over in one is no use to another. On an H200 clusters of 2, 3, .. 8
# blocks, each with an SM to itself, run 66, 42, 30, 22, 20, 16 and 14 at a time (measured): GPCs of these many SMs.
GPC_SMS = (18, 18, 18, 18, 16, 16, 14, 14)


def cluster_limit(size: int, sm_count: int) -> int:
    """Clusters of `size` blocks that run at a time, one block an SM; other devices in proportion to an H200."""
    return max(1, sum(sms // size for sms in GPC_SMS) * sm_count // sum(GPC_SMS))


# ---- what a plan costs, fitted to times on an H200 --------------------------------------------------------------

CLOCK = 1755  # cycles of an SM in a us
FIXED_US = 2.6  # launch, first loads, last stores
CLUSTER_US = 0.3  # a cluster starts as one
SPLIT_US = 0.8  # sums go to other blocks and come from them
OVER_US = 0.3  # all leave the stages before sums are sent over them
JOB_US = 0.3  # a job after the first: fragments of the old and the new do not overlap
STORE_BYTES_US = 60_000  # of y, of a block
TENSOR_EFFICIENCY = 0.80
FEWEST_TENSOR_CYCLES = 24  # of an instruction with A in registers, however few its tokens
# Of a scheduler, for 64 rows x 256 k: it has one warp of each warpgroup, so ways of K save nothing here.
ISSUE_CYCLES = {"mxfp4": 420, "nvfp4": 460, "int4_g128": 620}
# Of a warpgroup for its own 64 rows x 256 k: its dequantisation and its products in turn, where no other fills in.
ALONE_CYCLES = 900
SM_BYTES_US = 45_000  # into an SM, from the L2
LATENCY_US = 1.0  # of a byte: stages in flight over this are the rate of a block
DRAM_BYTES_US = 4_200_000


@dataclass(frozen=True)
class GemmPlan:
    """The launch of one entry of qgemm_mx.

    tokens, rows, k_ways   name the entry: of a block; warpgroups of a block that share K
    share, split           blocks of a cluster that share activations, and that split K
    x_stages, w_stages     of activations (64 k; 256 k up to 64 tokens) and of weights (256 k) in shared memory
    group                  token tiles that are walked together, for the L2
    row_jobs, token_jobs   tiles of rows (of all blocks that share) and of tokens
    clusters               that take the jobs in turn
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
    def waves(self) -> int:
        """Jobs of the cluster with the most."""
        return -(-self.jobs // self.clusters)

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
    ) -> GemmPlan | None:
        """The plan of these choices; None where it does not fit.

        over      whether sums come in over the stages; None: only where they have no place of their own
        x_stages, w_stages   None: as far ahead as both can be
        group     None: as the L2 likes it
        clusters  at most; None: as many as run at a time
        """
        layout = self.layout
        if share * split > min(MAX_CLUSTER, self.sm_count) or split > layout.chunks:
            return None
        if share > 1 and tile.tokens < MIN_SHARED_TOKENS * share:
            return None
        row_jobs = -(-layout.n // (tile.rows * share))
        token_jobs = -(-self.m // tile.tokens)
        limit = cluster_limit(share * split, self.sm_count)
        clusters = min(row_jobs * token_jobs, limit if clusters is None else clusters)
        chunks = -(-layout.chunks // split) * -(-row_jobs * token_jobs // clusters)  # of a block
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
SPLIT_WAVES = 2  # blocks over those that run at a time, up to which K is split
FEWEST_SPLIT_CHUNKS = 4  # of a part, where there are more parts than one
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
                for over in (False, True) if split * tile.k_ways > 1 else (False,):
                    plan = problem.plan(tile, share, split, over)
                    if plan and (split == 1 or _may_split(problem, plan)):
                        yield plan


def _may_split(problem: Problem, plan: GemmPlan) -> bool:
    return plan.jobs * plan.cluster <= SPLIT_WAVES * problem.sm_count


def _cost_us(problem: Problem, plan: GemmPlan) -> float:
    """What a call takes: a fixed part, then of each job its slices and its end. Sums of the constants above."""
    layout = problem.layout
    tile = _tile(plan.tokens, plan.rows, plan.k_ways)
    slices = -(-layout.chunks // plan.split) / CHUNKS
    job = slices * _slice_us(problem, plan, tile) + plan.rows * plan.tokens * 2 / STORE_BYTES_US
    fixed = FIXED_US + CLUSTER_US * (plan.cluster > 1)
    sums = SPLIT_US * (plan.parts > 1) + OVER_US * plan.over_stages
    busy = plan.waves * (job + sums) + (plan.waves - 1) * JOB_US
    return fixed + max(busy, layout.nbytes / DRAM_BYTES_US)


def _slice_us(problem: Problem, plan: GemmPlan, tile: Tile) -> float:
    """Of a block, for 256 k: the longest of what goes on at a time."""
    tiles = tile.rows // 64
    instruction = max(tile.tokens / 2, FEWEST_TENSOR_CYCLES) / TENSOR_EFFICIENCY
    tensor = tiles * (SLICE // 16) * instruction / CLOCK
    issue = tiles * ISSUE_CYCLES[problem.layout.format] / CLOCK
    alone = tile.row_tiles * (ALONE_CYCLES + (SLICE // 16) * tile.tokens / 2) / tile.k_ways / CLOCK
    weights = problem.w_stage_bytes(tile)
    x = CHUNKS * X_CHUNK_BYTES * tile.tokens
    rate = min(SM_BYTES_US, plan.w_stages * weights / LATENCY_US)
    copies = max(weights / rate, (weights + x / plan.share) / SM_BYTES_US)
    return max(tensor, issue, alone, copies)


# ---- the ablation ----------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """Where a step of the ablation is launched from.

    source, entry   cuda/<source>.cu and its entry, with {format}; None: the product's, of the plan
    choices         of `complete`, instead of what `plan_gemm` chooses
    """

    source: str = "qgemm_mx"
    entry: str | None = None
    choices: dict[str, Any] = {}  # noqa: RUF012 - never written


# Steps from a plain kernel to the product: id, what the step changes, time over that of the step before as it was
# predicted before any of them was timed.
ABLATION_STEPS = (
    ("step0", "one stage of weights, one block a cluster, whole K", None),
    ("step1", "two stages of weights", 0.80),
    ("step2", "as many stages as shared memory holds", 0.90),
    ("step3", "blocks share activations", 0.95),
    ("step4", "blocks of a cluster split K", 0.90),
    ("step5", "token tiles are walked in groups", 0.95),
    ("step6", "warpgroups of a block share K", 0.97),
    ("qgemm_mx", "the plan's own tile and cluster", 0.97),
)
STEPS: dict[str, Step] = {
    "step0": Step(choices={"w_stages": 1, "x_stages": 2, "group": 1, "share": 1, "split": 1}),
    "step1": Step(choices={"w_stages": 2, "group": 1, "share": 1, "split": 1}),
    "step2": Step(choices={"group": 1, "share": 1, "split": 1}),
    "step3": Step(choices={"group": 1, "split": 1}),
    "step4": Step(choices={"group": 1}),
    "step5": Step(),
    "step6": Step(),
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
    made = STEPS[step]
    chosen = {"tokens": own.tokens, "rows": own.rows, "k_ways": own.k_ways}
    chosen |= {"share": own.share, "split": own.split} | made.choices
    plan = complete(n, k, m, format, sm_count, smem_per_sm, **chosen)
    entry = plan.entry(format, "bf16") if made.entry is None else made.entry.format(format=format)
    return made.source, entry, plan
