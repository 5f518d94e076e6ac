"""The plan of a call of qgemv_mx: every tile has one team, everything fits, and the choice says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qgemm_mx.gemv_layout import GEMV_FORMATS, gemv_layout
from qgemm_mx.gemv_plan import (
    SMEM_PER_SM,
    _slices_of_first_rank,
    plan_gemv,
    sums_bytes,
    tokens_for,
)

SHAPES = [
    (s["N"], s["K"])
    for s in json.loads((Path(__file__).parents[2] / "prereg/shapes.json").read_text())["shapes"]
]
ODD = [(1, 32), (7, 96), (40, 384), (1856, 2688), (2688, 1856), (57344, 8192), (200_000, 256)]


@pytest.mark.parametrize("fmt", GEMV_FORMATS)
@pytest.mark.parametrize(("n", "k"), SHAPES + ODD)
@pytest.mark.parametrize("m", [1, 3, 16])
def test_teams_have_every_tile_once_and_shared_memory_holds_them(fmt, n, k, m):
    if k % {"int4_g128": 128}.get(fmt, 32):
        k += 128 - k % 128
    layout = gemv_layout(fmt, n, k)
    for sm_count in (1, 7, 78, 132):
        plan = plan_gemv(n, k, m, fmt, sm_count)
        assert plan.teams * plan.tiles_per_team + plan.extra_teams == layout.tiles
        assert 0 <= plan.extra_teams < plan.teams and plan.tiles_per_team >= 1
        assert 1 <= plan.turn_tiles <= plan.tiles_per_team + (plan.extra_teams > 0)
        assert plan.tokens >= m and plan.threads == 32 * plan.warps <= 1024
        used = sums_bytes(fmt, plan.tokens, plan.ranks, plan.warps, plan.turn_tiles)
        assert used <= plan.ring_offset < used + 128 and plan.ring_offset % 128 == 0
        ring = plan.warps * plan.depth * (layout.unit_bytes + 8)
        assert plan.shared_bytes == plan.ring_offset + ring
        blocks = 16 // plan.warps
        assert blocks * (plan.shared_bytes + 1024) <= SMEM_PER_SM
        assert len(plan.reasons) == 3 and all(plan.reasons)


@pytest.mark.parametrize(
    ("m", "tokens"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16)]
)
def test_the_smallest_entry_that_holds_m(m, tokens):
    assert tokens_for(m) == tokens
    assert plan_gemv(4096, 4096, m, "mxfp4", 132).tokens == tokens


def test_a_small_n_shares_k_over_a_cluster_and_says_why():
    plan = plan_gemv(1024, 4096, 1, "mxfp4", 132)
    assert (plan.ranks, plan.warps, plan.teams, plan.grid) == (2, 8, 64, 128)
    assert "8 units on the busiest SM, 7.8" in plan.reasons[1]
    assert "16 with 1 x 16" in plan.reasons[1]
    assert plan_gemv(4096, 4096, 1, "mxfp4", 132).ranks == 1


@pytest.mark.parametrize(
    ("slices", "ranks", "warps", "most"),
    [(16, 1, 16, 16), (16, 2, 8, 8), (16, 2, 16, 16), (12, 2, 8, 8), (33, 2, 8, 17), (3, 2, 8, 3)],
)
def test_the_first_rank_has_the_most_slices(slices, ranks, warps, most):
    each = [sum((s // warps) % ranks == rank for s in range(slices)) for rank in range(ranks)]
    assert max(each) == each[0] == most == _slices_of_first_rank(slices, ranks, warps)


def test_the_entry_is_named_by_the_plan():
    plan = plan_gemv(1024, 4096, 3, "nvfp4", 132)
    name = f"qgemv_mx_nvfp4_fp16_t4_c{plan.ranks}"
    assert plan.entry("nvfp4", "fp16") == name


def test_a_plan_depends_on_its_arguments_alone():
    assert plan_gemv(2880, 2880, 16, "mxfp4", 132) == plan_gemv(2880, 2880, 16, "mxfp4", 132)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4096, 4096, 0, "mxfp4", 132), "M=0 is not in 1..16"),
        ((4096, 4096, 17, "mxfp4", 132), "M=17 is not in 1..16"),
        ((4096, 4100, 1, "mxfp4", 132), "K=4100 is not a multiple"),
        ((4096, 4096, 1, "mxfp4", 0), "sm_count=0"),
        ((4096, 4096, 1, "mxfp4", 132, 20_000), "shared memory of .* bytes a block does not hold"),
    ],
)
def test_what_has_no_plan_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_gemv(*arguments)


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("fmt", GEMV_FORMATS)
def test_the_sums_of_two_ranks_have_room_for_either_exchange(fmt, tokens):
    """A value of every lane, or a result of every token and row; neither may reach into the rings."""
    alone, together = (sums_bytes(fmt, tokens, ranks, 8, 3) for ranks in (1, 2))
    of_a_warp = alone // 8
    assert together - alone >= max(of_a_warp, 4 * 2 * tokens * 3 * 16)
    assert together - alone in (of_a_warp, 4 * 2 * tokens * 3 * 16)
