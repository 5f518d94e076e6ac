"""How a call of qgemv_mx is cut: a pure function of the problem and the device, with its reasons.

A team is one block, or a cluster of two that share K. A team owns a run of row tiles of 16; its warps
take the slices of 256 k in turn, so a tile's units are spread over `ranks * warps` warps.
"""

from __future__ import annotations

from dataclasses import dataclass

from .formats import FORMATS, require_integer
from .gemv_layout import ROWS, GemvLayout, gemv_layout

TOKENS = (1, 2, 4, 8, 16)  # of an entry; the smallest that holds M is taken
MAX_TOKENS = TOKENS[-1]
WARPS_PER_SM = 16  # one block of 16 warps or two of 8: what the registers of a warp leave room for
DEPTHS = (2, 3, 4)
SMEM_PER_SM = 233472  # H100 and H200: 228 KiB an SM, of which 1 KiB a block is the system's
SMEM_OF_SYSTEM = 1024
BARRIER_BYTES = 8
CLUSTER_GAIN = 1.1  # a cluster pays for its launch and its exchange with at least this


@dataclass(frozen=True)
class GemvPlan:
    """The launch of one entry of qgemv_mx.

    tokens, ranks                name the entry: tokens at most, blocks of a cluster
    depth, warps                 units a warp keeps in flight, warps of a block
    teams                        blocks or clusters; the first `extra_teams` have tiles_per_team + 1 tiles
    turn_tiles                   tiles whose sums have room in shared memory at one time
    ring_offset, shared_bytes    bytes of the sums in front of the rings (a multiple of 128), and of all
    reasons                      why, one sentence a choice
    """

    tokens: int
    depth: int
    ranks: int
    warps: int
    teams: int
    tiles_per_team: int
    extra_teams: int
    turn_tiles: int
    ring_offset: int
    shared_bytes: int
    reasons: tuple[str, ...]

    @property
    def grid(self) -> int:
        """Blocks."""
        return self.teams * self.ranks

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    def entry(self, format: str, activation: str) -> str:
        """Name of the entry; activation is bf16 or fp16."""
        return f"qgemv_mx_{format}_{activation}_t{self.tokens}_c{self.ranks}"


def tokens_for(m: int) -> int:
    """The smallest entry for M tokens. ValueError unless M is in 1..16."""
    m = require_integer("M", m)
    if not 1 <= m <= MAX_TOKENS:
        raise ValueError(
            f"M={m} is not in 1..{MAX_TOKENS}: a launch of qgemv_mx has no more tokens"
        )
    return next(t for t in TOKENS if t >= m)


def plan_gemv(
    n: int, k: int, m: int, format: str, sm_count: int, smem_per_sm: int = SMEM_PER_SM
) -> GemvPlan:
    """The plan of y[M, N] = x[M, K] W[N, K]^T with M in 1..16 on a device of `sm_count` SMs.

    smem_per_sm  bytes of shared memory of an SM

    ValueError names a size or a format without a plan. Nothing is measured or looked up here.
    """
    layout = gemv_layout(format, n, k)
    tokens = tokens_for(m)
    if sm_count < 1:
        raise ValueError(f"sm_count={sm_count} is below 1")
    ranks, warps, why_cut = _cut(layout, sm_count)
    teams = _teams(layout, ranks, warps, sm_count)
    tiles_per_team, extra_teams = divmod(layout.tiles, teams)
    most_tiles = tiles_per_team + (extra_teams > 0)
    room = smem_per_sm // (WARPS_PER_SM // warps) - SMEM_OF_SYSTEM
    depth, turn_tiles, why_depth = _depth(layout, tokens, ranks, warps, most_tiles, room)
    ring_offset = _ring_offset(format, tokens, ranks, warps, turn_tiles)
    return GemvPlan(
        tokens=tokens,
        depth=depth,
        ranks=ranks,
        warps=warps,
        teams=teams,
        tiles_per_team=tiles_per_team,
        extra_teams=extra_teams,
        turn_tiles=turn_tiles,
        ring_offset=ring_offset,
        shared_bytes=ring_offset + _ring_bytes(layout, warps, depth),
        reasons=(f"{tokens} tokens: the smallest entry for M={m}", why_cut, why_depth),
    )


def sums_bytes(format: str, tokens: int, ranks: int, warps: int, turn_tiles: int) -> int:
    """Bytes of the FP32 sums of a turn: those of each warp, and those that the other ranks send to rank 0."""
    int4 = FORMATS[format].element == "int4"
    values = -(-tokens // 8) * 2 * (1 if tokens <= 4 and not int4 else 2)  # of a lane and a tile
    turn = turn_tiles * values * 32
    return 4 * (warps * turn + max((ranks - 1) * turn, _outputs(tokens, ranks, turn_tiles)))


def _outputs(tokens: int, ranks: int, turn_tiles: int) -> int:
    """Results of a turn, once a rank: what the exchange takes at most in its other form."""
    return ranks * tokens * turn_tiles * ROWS if ranks > 1 else 0


def _teams(layout: GemvLayout, ranks: int, warps: int, sm_count: int) -> int:
    blocks = sm_count * (WARPS_PER_SM // warps)
    return min(layout.tiles, max(1, blocks // ranks))


def _slices_of_first_rank(slices: int, ranks: int, warps: int) -> int:
    """Slices go to the warps of rank 0, then to those of rank 1, and round again: rank 0 has the most."""
    rounds, rest = divmod(slices, ranks * warps)
    return rounds * warps + min(rest, warps)


def _cut(layout: GemvLayout, sm_count: int) -> tuple[int, int, str]:
    """Ranks and warps. What is weighed: units on the busiest SM, then one warp's units one after the other."""

    def weigh(ranks: int, warps: int) -> tuple[float, int, int]:
        teams = _teams(layout, ranks, warps, sm_count)
        most_tiles = -(-layout.tiles // teams)
        blocks = -(-teams * ranks // sm_count)  # on the busiest SM
        of_sm = blocks * most_tiles * _slices_of_first_rank(layout.slices, ranks, warps)
        of_warp = most_tiles * -(-layout.slices // (ranks * warps))
        return of_sm * (CLUSTER_GAIN if ranks > 1 else 1), of_warp * WARPS_PER_SM // warps, of_sm

    candidates = {(r, w): weigh(r, w) for r, w in ((1, 16), (1, 8), (2, 16), (2, 8))}
    ranks, warps = min(candidates, key=candidates.__getitem__)
    best, alone = candidates[ranks, warps][2], candidates[1, 16][2]
    fair = layout.tiles * layout.slices / sm_count
    why = (
        f"{ranks} x {warps} warps share K: {best} units on the busiest SM, {fair:.1f} an even share"
    )
    if (ranks, warps) != (1, 16):
        why += f", {alone} with 1 x 16"
    return ranks, warps, why


def _depth(
    layout: GemvLayout, tokens: int, ranks: int, warps: int, most_tiles: int, room: int
) -> tuple[int, int, str]:
    """Units in flight and tiles a turn: the fewest turns first, then the deepest ring a warp can fill."""
    units = most_tiles * -(-layout.slices // (ranks * warps))  # of the busiest warp
    best = None
    for depth in DEPTHS:
        if depth > DEPTHS[0] and depth > units:
            break
        left = room - _ring_bytes(layout, warps, depth)
        fit = max(
            (t for t in range(1, most_tiles + 1)
             if _ring_offset(layout.format, tokens, ranks, warps, t) <= left),
            default=0,
        )  # fmt: skip
        if not fit:
            continue
        turns = -(-most_tiles // fit)
        if best is None or (turns, -depth) < best[:2]:
            best = (turns, -depth, -(-most_tiles // turns))
    if best is None:
        raise ValueError(
            f"shared memory of {room} bytes a block does not hold the sums and rings"
            f" of {tokens} tokens ({layout.format})"
        )
    turns, depth, turn_tiles = best[0], -best[1], best[2]
    why = f"{depth} units in flight a warp of at most {units}, sums in {turns} turns"
    return depth, turn_tiles, why


def _ring_bytes(layout: GemvLayout, warps: int, depth: int) -> int:
    return warps * depth * (layout.unit_bytes + BARRIER_BYTES)


def _ring_offset(format: str, tokens: int, ranks: int, warps: int, turn_tiles: int) -> int:
    return -(-sums_bytes(format, tokens, ranks, warps, turn_tiles) // 128) * 128
