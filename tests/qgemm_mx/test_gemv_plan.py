"""The plan of a call of qgemv_mx: every tile has one team, every warp work, everything fits, the choice says why."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from qgemm_mx import gemv_plan
from qgemm_mx.build import load_sources
from qgemm_mx.gemv_layout import GEMV_FORMATS, gemv_layout
from qgemm_mx.gemv_plan import (
    ABLATION_STEPS,
    BULK,
    MAX_WARPS,
    SMEM_OF_SYSTEM,
    SMEM_PER_BLOCK,
    SMEM_PER_SM,
    Problem,
    ablation,
    candidates,
    plan_gemv,
    sums_bytes,
    tokens_for,
)

SHAPES = [
    (s["N"], s["K"])
    for s in json.loads((Path(__file__).parents[2] / "prereg/shapes.json").read_text())["shapes"]
]
ODD = [(1, 32), (7, 96), (40, 384), (1856, 2688), (2688, 1856), (57344, 8192), (200_000, 256)]


def check(plan, layout, smem_per_sm=SMEM_PER_SM):
    """What every launch relies on."""
    assert plan.teams * plan.tiles_per_team + plan.extra_teams == layout.tiles
    assert 0 <= plan.extra_teams < plan.teams and plan.tiles_per_team >= 1
    assert 1 <= plan.turn_tiles <= plan.tiles_per_team + (plan.extra_teams > 0)
    # Every warp has a slice and a tile: the kernel asks for its first unit without looking.
    assert plan.ranks * plan.warps <= layout.slices == plan.slices
    assert plan.walkers <= plan.tiles_per_team
    assert plan.threads == 32 * plan.warps * plan.walkers <= 32 * MAX_WARPS
    assert plan.block == (32 * plan.warps, plan.walkers)
    assert plan.tile_bytes == layout.tile_bytes
    assert plan.walker_stride == plan.teams * layout.tile_bytes
    assert plan.stride == plan.walkers * plan.walker_stride < 2**32
    used = sums_bytes(layout.format, plan.tokens, plan.ranks, plan.warps, plan.turn_tiles)
    assert used <= plan.ring_offset < used + 128 and plan.ring_offset % 128 == 0
    barrier = 8 if plan.ring == BULK else 0
    ring = plan.warps * plan.walkers * plan.depth * (layout.unit_bytes + barrier)
    assert plan.shared_bytes == plan.ring_offset + ring <= smem_per_sm - SMEM_OF_SYSTEM


def whole_k(fmt, k):
    return k + -k % {"int4_g128": 128}.get(fmt, 32)


@pytest.mark.parametrize("fmt", GEMV_FORMATS)
@pytest.mark.parametrize(("n", "k"), SHAPES + ODD)
@pytest.mark.parametrize("m", [1, 3, 16])
def test_teams_have_every_tile_once_and_shared_memory_holds_them(fmt, n, k, m):
    k = whole_k(fmt, k)
    layout = gemv_layout(fmt, n, k)
    for sm_count in (1, 7, 78, 132):
        for programmatic in (False, True):
            plan = plan_gemv(n, k, m, fmt, sm_count, programmatic=programmatic)
            check(plan, layout)
            assert plan.tokens >= m and len(plan.reasons) == 4 and all(plan.reasons)
            assert plan.early == int(programmatic)


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_dependent_launch_requests_early_and_is_no_cluster(n, k, m):
    plan = plan_gemv(n, k, m, "mxfp4", 132, programmatic=True)
    assert (plan.early, plan.ranks, plan.ring) == (1, 1, "async")
    assert plan_gemv(n, k, m, "mxfp4", 132).early == 0


@pytest.mark.parametrize(
    ("m", "tokens"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16)]
)
def test_the_smallest_entry_that_holds_m(m, tokens):
    assert tokens_for(m) == tokens
    assert plan_gemv(4096, 4096, m, "mxfp4", 132).tokens == tokens


def test_a_small_n_shares_k_over_a_cluster_and_says_why():
    plan = plan_gemv(1024, 4096, 1, "mxfp4", 132)
    assert (plan.ranks, plan.warps, plan.teams, plan.grid) == (2, 8, 64, 128)
    assert "0.5 tiles an SM" in plan.reasons[2] and "async" in plan.reasons[1]
    large = plan_gemv(57344, 8192, 1, "mxfp4", 132)
    assert (large.ranks, large.ring) == (1, BULK) and "265.4 MB" not in large.reasons[0]
    assert "bulk copies" in large.reasons[1]


def test_the_entry_is_named_by_the_plan_and_is_there():
    there = set(load_sources()["qgemv_mx"].threads)
    for n, k in SHAPES:
        for m in (1, 2, 4, 8, 16):
            for fmt in GEMV_FORMATS:
                for plan in candidates(n, whole_k(fmt, k), m, fmt, 132):
                    assert {plan.entry(fmt, "bf16"), plan.entry(fmt, "fp16")} <= there


def test_a_plan_depends_on_its_arguments_alone():
    assert plan_gemv(2880, 2880, 16, "mxfp4", 132) == plan_gemv(2880, 2880, 16, "mxfp4", 132)


@pytest.mark.parametrize(("n", "k"), [*SHAPES, (1, 32), (40, 384)])
@pytest.mark.parametrize("m", [1, 4, 16])
def test_candidates_all_fit_are_distinct_and_begin_with_the_choice(n, k, m):
    found = candidates(n, k, m, "mxfp4", 132)
    assert found[0] == replace(plan_gemv(n, k, m, "mxfp4", 132), reasons=())
    assert len(set(found)) == len(found)
    for plan in found:
        check(plan, gemv_layout("mxfp4", n, k))
    if k >= 2880:
        assert {p.ring for p in found} == {"async", "bulk"} and {p.ranks for p in found} == {1, 2}
        assert 6 <= len(found) <= 50


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_each_step_of_the_ablation_changes_what_it_says(n, k, m):
    steps = [ablation(name, n, k, m, "mxfp4", 132) for name, *_ in ABLATION_STEPS]
    plans = [plan for *_, plan in steps]
    layout = gemv_layout("mxfp4", n, k)
    for plan in plans:
        check(plan, layout)
    assert steps[0][:2] == ("qgemv_ablations", f"qgemv_scaled_t{m}")
    assert plans[0].tokens == max(8, m)  # as many sums of a lane
    assert [p.warps <= 4 for p in plans[:3]] == [True, True, False]
    assert [p.turn_tiles for p in plans[:3]] == [1, 1, 1] and plans[3].turn_tiles >= 1
    assert [p.depth for p in plans[:5]] == [1, 1, 1, 1, 2]
    assert plans[4].warps == plans[3].warps == plans[2].warps
    assert plans[-1] == plan_gemv(n, k, m, "mxfp4", 132)
    there = {name: set(s.threads) for name, s in load_sources().items()}
    assert all(entry in there[source] for source, entry, _ in steps)


def test_a_step_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="'step9' is no step of the ablation: step0"):
        ablation("step9", 4096, 4096, 1, "mxfp4", 132)
    with pytest.raises(ValueError, match="step0 is there for mxfp4 with .*, not for nvfp4, M=1"):
        ablation("step0", 4096, 4096, 1, "nvfp4", 132)
    with pytest.raises(ValueError, match="not for mxfp4, M=4"):
        ablation("step0", 4096, 4096, 4, "mxfp4", 132)


def test_predicted_ratios_stand_beside_every_step_but_the_first():
    assert ABLATION_STEPS[0][2] is None and ABLATION_STEPS[-1][0] == "qgemv_mx"
    assert all(0 < ratio < 1 for _, _, ratio in ABLATION_STEPS[1:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4096, 4096, 0, "mxfp4", 132), "M=0 is not in 1..16"),
        ((4096, 4096, 17, "mxfp4", 132), "M=17 is not in 1..16"),
        ((4096, 4100, 1, "mxfp4", 132), "K=4100 is not a multiple"),
        ((4096, 4096, 1, "mxfp4", 0), "sm_count=0"),
        ((4096, 4096, 1, "mxfp4", 132, 2_000), "shared memory of 2000 bytes an SM does not hold"),
        ((2**20, 16384, 1, "mxfp4", 132), "the limit of qgemv_mx is 4294967295"),
    ],
)
def test_what_has_no_plan_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_gemv(*arguments)


CALLS = {
    "plan_gemv": plan_gemv,
    "candidates": candidates,
    "ablation": lambda *problem: ablation("step3", *problem),
    "the product of an ablation": lambda *problem: ablation("qgemv_mx", *problem),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", ["sm_count", "smem_per_sm"])
@pytest.mark.parametrize("value", [True, np.True_, 132.0, np.float64(132), "132", None, [132]])
def test_a_number_of_the_device_that_is_no_integer_is_named(call, name, value):
    device = {"sm_count": 132, "smem_per_sm": SMEM_PER_SM} | {name: value}
    says = re.escape(f"{name}={value!r} is {type(value).__name__}, not an integer")
    with pytest.raises(ValueError, match=says):
        call(4096, 4096, 1, "mxfp4", *device.values())


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_numpy_integers_give_the_plan_of_python_integers(call):
    plain = call(4096, 4096, 4, "mxfp4", 132, SMEM_PER_SM)
    typed = call(*np.int32([4096, 4096, 4]), "mxfp4", np.uint8(132), np.int64(SMEM_PER_SM))
    assert repr(typed) == repr(plain)  # of which a NumPy integer shows its type
    problem = Problem.of(4096, 4096, 4, "mxfp4", np.uint8(132), np.int64(SMEM_PER_SM))
    assert (type(problem.sm_count), type(problem.smem_per_sm)) == (int, int)


@pytest.mark.parametrize("value", ["false", "", None, 1, 0.0, [True]])
def test_programmatic_is_true_or_false(value):
    says = re.escape(f"programmatic={value!r} is {type(value).__name__}, not True or False")
    with pytest.raises(ValueError, match=says):
        plan_gemv(4096, 4096, 1, "mxfp4", 132, programmatic=value)
    for one in (False, True):
        numpys = plan_gemv(4096, 4096, 1, "mxfp4", 132, programmatic=np.bool(one))
        assert numpys == plan_gemv(4096, 4096, 1, "mxfp4", 132, programmatic=one)


def test_a_block_plans_no_more_than_it_may_have_however_much_an_sm_has():
    assert SMEM_PER_BLOCK == 227 * 1024 == SMEM_PER_SM - SMEM_OF_SYSTEM
    shapes = [(57344, 8192), (200_000, 256), (28672, 8192)]  # whose sums would fill more
    for (n, k), m in product(shapes, (1, 16)):
        for sm_count in (2, 132):
            plain = candidates(n, k, m, "mxfp4", sm_count)
            roomy = candidates(n, k, m, "mxfp4", sm_count, 2**30)
            assert max(p.shared_bytes for p in roomy) <= SMEM_PER_BLOCK
            assert roomy[0] == plain[0]  # alone on an SM: nothing to gain from more
            for programmatic in (False, True):
                problem = (n, k, m, "mxfp4", sm_count)
                own = plan_gemv(*problem, programmatic=programmatic)
                assert plan_gemv(*problem, 2**30, programmatic) == own
    steps = [ablation(name, 57344, 8192, 16, "mxfp4", 2, 2**30)[2] for name, *_ in ABLATION_STEPS]
    assert 200_000 < max(p.shared_bytes for p in steps) <= SMEM_PER_BLOCK


def test_little_shared_memory_takes_more_turns_before_it_is_refused():
    small = plan_gemv(4096, 4096, 16, "mxfp4", 2, 60_000)
    check(small, gemv_layout("mxfp4", 4096, 4096), 60_000)
    assert small.turn_tiles < small.tiles_per_team


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("fmt", GEMV_FORMATS)
def test_the_sums_of_two_ranks_have_room_for_what_they_send(fmt, tokens):
    alone, together = (sums_bytes(fmt, tokens, ranks, 8, 3) for ranks in (1, 2))
    of_a_tile = alone // 24
    assert together - alone == 2 * 2 * of_a_tile  # two ranks, two of three tiles at most


@pytest.mark.parametrize(("slices", "ranks", "most", "cuts"), [
    (16, 1, 16, [16, 8, 6, 4, 3, 2, 1]), (16, 2, 16, [8, 4, 3, 2, 1]), (12, 2, 16, [6, 3, 2, 1]),
    (56, 2, 16, [14, 10, 7, 6, 5, 4, 3, 2, 1]), (1, 1, 16, [1]),
])  # fmt: skip
def test_cuts_share_the_slices_in_even_rounds(slices, ranks, most, cuts):
    problem = Problem(gemv_layout("mxfp4", 16, 256 * slices), 1, 132, SMEM_PER_SM)
    assert problem.cuts(ranks, most) == cuts
    assert gemv_plan.MAX_WARPS >= max(cuts)
