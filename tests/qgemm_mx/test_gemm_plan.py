"""Plans of qgemm_mx: what every plan must keep to whatever the cost model says, its entries, and the ablation."""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache

import pytest

from qgemm_mx import build, gemm_plan
from qgemm_mx.gemm_plan import (
    ABLATION_STEPS,
    MAX_CLUSTER,
    MAX_STAGES,
    MOST_CANDIDATES,
    MOST_WARPS,
    PARTIAL_BYTES,
    STEPS,
    TILES,
    GemmPlan,
    Problem,
    ablation,
    candidates,
    cluster_limit,
    complete,
    entries,
    plan_gemm,
    rounded,
    takes_gemm,
)
from qgemm_mx.gemv_layout import CHUNKS, gemv_layout
from qgemm_mx.gemv_plan import SMEM_PER_BLOCK, SMEM_PER_SM

FORMATS = ("mxfp4", "nvfp4", "int4_g128")
SHAPES = (
    (1, 128),
    (40, 384),
    (333, 1664),
    (2880, 2944),
    (1024, 4096),
    (14336, 4096),
    (57344, 8192),
)
MS = (1, 3, 16, 17, 33, 64, 65, 100, 129, 257, 512, 1000, 2048, 8192)
DEVICES = (132, 1, 7, 66, 148)


@cache
def plans(n: int, k: int, m: int, fmt: str, sm_count: int = 132) -> tuple[GemmPlan, ...]:
    """All candidates, and one streamed plan of each tile that has one: the search need not list them."""
    problem = Problem.of(n, k, m, fmt, sm_count)
    streamed = [
        problem.plan(tile, share, streamed=True) for tile in TILES[fmt] for share in (1, 2, 4)
    ]
    return (*candidates(n, k, m, fmt, sm_count), *filter(None, streamed))


def problems(shapes=SHAPES, ms=MS, devices=(132,)):
    return [
        (n, k, m, fmt, sms) for n, k in shapes for m in ms for fmt in FORMATS for sms in devices
    ]


EVERYWHERE = problems() + problems(SHAPES[:5], (1, 33, 300), DEVICES[1:])


def high(a: int, b: int) -> int:
    """__umulhi, of numbers that fit."""
    assert 0 <= a < 2**31 and 0 <= b < 2**32
    return a * b >> 32


def pieces(plan: GemmPlan, slices: int, cluster: int) -> list[tuple[int, int, int]]:
    """(job, first slice, last) in the order in which a cluster takes them: `Walk` of qgemm_mx.cuh."""
    found = [(job, 0, slices) for job in range(cluster, plan.whole_jobs, plan.clusters)]
    line = (plan.jobs - plan.whole_jobs) * slices
    if line:
        run = plan.clusters - 1 - cluster
        at, end = (high(line * r, plan.clusters_inverse) for r in (run, run + 1))
        assert at < end, "a cluster without a slice leaves no sums"
        while at < end:
            job = high(at, gemm_plan.inverse(slices))
            first = at - job * slices
            last = min(slices, first + end - at)
            found.append((plan.whole_jobs + job, first, last))
            at += last - first
    return found


@pytest.mark.parametrize("problem", EVERYWHERE, ids=str)
def test_every_plan_covers_every_job_and_fits(problem) -> None:
    n, k, m, fmt, sms = problem
    layout = gemv_layout(fmt, n, k)
    listed = plans(*problem)
    assert listed
    for plan in listed:
        tile = next(t for t in TILES[fmt] if t[:3] == (plan.tokens, plan.rows, plan.k_ways))
        assert plan.entry(fmt, "bf16") in entries(fmt)
        # The tiles cover y, and none of them is empty.
        assert (plan.token_jobs - 1) * plan.tokens < m <= plan.most_rows
        assert (plan.row_jobs - 1) * plan.rows * plan.share < n <= plan.row_jobs * plan.rows * plan.share  # fmt: skip
        # Clusters.
        assert plan.share in (1, 2, 4) and plan.cluster <= min(MAX_CLUSTER, sms)
        assert plan.tokens // plan.share % 8 == 0  # rows of an atom of the swizzle
        assert 1 <= plan.clusters <= cluster_limit(plan.cluster, sms)
        assert plan.grid == plan.clusters * plan.cluster <= sms
        assert plan.threads == 128 * (tile.consumers + 1) and 1 <= plan.group <= plan.token_jobs
        # Shared memory: stages, barriers, and the sums of other parts of K behind or over them.
        stages = Problem.of(*problem).stage_bytes(tile, plan.x_stages, plan.w_stages)
        barriers = gemm_plan.barrier_bytes(plan.x_stages, plan.w_stages)
        sums = gemm_plan.sums_bytes(tile, plan.split)
        assert plan.shared_bytes <= SMEM_PER_BLOCK and 2 <= plan.x_stages <= MAX_STAGES
        assert 1 <= plan.w_stages <= MAX_STAGES
        if plan.sums_offset:
            assert plan.sums_offset % 128 == 0 and plan.sums_offset >= stages + barriers
            assert plan.shared_bytes >= plan.sums_offset + sums and sums
        else:
            assert plan.shared_bytes >= stages + barriers and sums <= stages
        # K.
        if plan.k_ways > 1:
            assert plan.split > 1
        chunks, grain = layout.chunks, CHUNKS if plan.k_ways > 1 else 1
        grains = -(-chunks // grain)
        if plan.split > 1:
            cut = [high(grains * p, plan.split_inverse) for p in range(plan.split + 1)]
            assert cut == [grains * p // plan.split for p in range(plan.split + 1)]
            assert all(a < b for a, b in zip(cut, cut[1:], strict=False))
        if plan.streamed:
            assert plan.split == plan.k_ways == 1 and plan.whole_jobs % plan.clusters == 0
            assert 4 * plan.tokens * plan.rows <= PARTIAL_BYTES
            assert 4 * tile.consumers <= MOST_WARPS
        else:
            assert plan.whole_jobs == plan.jobs and plan.clusters <= plan.jobs


@pytest.mark.parametrize("problem", EVERYWHERE, ids=str)
def test_every_slice_of_every_job_is_taken_once_and_nobody_waits_for_a_later_cluster(
    problem,
) -> None:
    slices = gemv_layout(problem[3], *problem[:2]).slices
    seen = set()
    for plan in plans(*problem):
        cut = (plan.jobs, plan.whole_jobs, plan.clusters)
        if cut in seen or plan.jobs > 4096:
            continue
        seen.add(cut)
        parts: dict[int, list[tuple[int, int, int]]] = {}
        for cluster in range(plan.clusters):
            own = pieces(plan, slices, cluster)
            for place, (job, first, last) in enumerate(own):
                parts.setdefault(job, []).append((first, last, cluster))
                # A job that others end is the last thing that a cluster does; one that others begin, the first after
                # those that it takes whole.
                if last < slices:
                    assert place == len(own) - 1
                if first > 0:
                    assert own[:place] == [
                        piece for piece in own[:place] if piece[0] < plan.whole_jobs
                    ]
        assert sorted(parts) == list(range(plan.jobs))
        for taken in parts.values():
            taken.sort()
            assert [first for first, *_ in taken] == [0, *(last for _, last, _ in taken[:-1])]
            assert taken[-1][1] == slices
            clusters = [cluster for *_, cluster in taken]
            # The one that begins adds up what clusters with the next lower indices left.
            assert clusters == list(range(clusters[0], clusters[0] - len(clusters), -1))


@pytest.mark.parametrize("problem", problems(SHAPES[2:6], (257, 1000, 8192)), ids=str)
def test_groups_walk_every_tile_once(problem) -> None:
    plan = plan_gemm(*problem)

    def job_at(index: int) -> tuple[int, int]:
        if plan.token_jobs == 1:
            return index, 0
        group, rest = divmod(index, plan.group * plan.row_jobs)
        width = min(plan.group, plan.token_jobs - group * plan.group)
        return rest // width, group * plan.group + rest % width

    walked = {job_at(index) for index in range(plan.jobs)}
    assert walked == {(r, t) for r in range(plan.row_jobs) for t in range(plan.token_jobs)}


@pytest.mark.parametrize("problem", problems(SHAPES[:6], MS), ids=str)
def test_the_choice_is_the_first_candidate_and_sees_no_more_of_m_than_its_tiles(problem) -> None:
    n, k, m, fmt, sms = problem
    listed = candidates(*problem)
    own = plan_gemm(*problem)
    assert own == listed[0] and len(own.reasons) >= 4
    assert len(set(listed)) == len(listed) <= MOST_CANDIDATES
    most = rounded(m, fmt)
    assert most >= m and rounded(most, fmt) == most
    assert plan_gemm(n, k, most, fmt, sms) == own


def test_from_nine_rows_on_the_matrix_kernel_takes_them() -> None:
    taken = [takes_gemm(4096, 4096, m, "mxfp4") for m in (1, 8, 9, 16, 64, 8192)]
    assert taken == [False, False, True, True, True, True]


@pytest.mark.parametrize("size", range(1, MAX_CLUSTER + 1))
def test_no_more_clusters_than_there_are_sms(size) -> None:
    assert all(1 <= cluster_limit(size, sms) <= max(1, sms // size) for sms in range(1, 300))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m": 0}, "M=0 is not in 1"), ({"m": 2**31}, "M=2147483648 is not in 1"),
        ({"sm_count": 0}, "sm_count=0 is below 1"), ({"format": "fp8"}, "fp8"),
        ({"m": 1.5}, "M"), ({"smem_per_sm": 1 << 14}, "does not hold the stages"),
    ],
)  # fmt: skip
def test_a_problem_without_a_plan_is_named(change, message) -> None:
    given = {"n": 64, "k": 256, "m": 32, "format": "mxfp4", "sm_count": 132}
    with pytest.raises((ValueError, TypeError), match=message):
        plan_gemm(**given | change)


@pytest.mark.parametrize(
    "choices",
    [
        {"tokens": 64, "rows": 64, "k_ways": 2}, {"tokens": 64, "rows": 128, "split": 2, "streamed": True},
        {"tokens": 16, "rows": 128, "share": 4}, {"tokens": 64, "rows": 128, "share": 4, "split": 4},
        {"tokens": 64, "rows": 128, "w_stages": 60},
    ],
)  # fmt: skip
def test_choices_that_do_not_fit_are_named(choices) -> None:
    with pytest.raises(ValueError, match="do not fit W"):
        complete(4096, 4096, 100, "mxfp4", 132, **choices)
    with pytest.raises(ValueError, match="no entry of int4_g128 has 16 tokens"):
        complete(4096, 4096, 16, "int4_g128", 132, tokens=16, rows=128)


# ---------------------------------------------------------------- entries


def sidecar(name: str) -> dict:
    return json.loads((build.CUDA_DIR / f"{name}.json").read_text())


def in_source(name: str) -> dict[str, tuple[str, ...]]:
    """Entries of a source after its macros, with the parameters of their configuration."""
    text = (build.CUDA_DIR / f"{name}.cu").read_text().replace('#include "qgemm_mx.cuh"', "")
    made = subprocess.run(
        ["c++", "-E", "-P", "-x", "c++", "-"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    pattern = r"(qgemm_mx_\w+)\s*\(const.*?Config\s*<([^>]*)>"
    found = re.findall(pattern, made.stdout, flags=re.S)
    return {entry: tuple(p.strip() for p in given.split(",")) for entry, given in found}


KINDS = {"mxfp4": "Format::kMxfp4", "nvfp4": "Format::kNvfp4", "int4_g128": "Format::kInt4"}


def test_entries_of_plan_source_and_sidecar_are_the_same() -> None:
    wanted, threads = {}, {}
    for fmt in FORMATS:
        assert len(set(entries(fmt))) == len(TILES[fmt])
        for entry, tile in zip(entries(fmt), TILES[fmt], strict=True):
            numbers = (tile.tokens, tile.row_tiles, tile.consumers, tile.k_ways)
            wanted[entry] = (KINDS[fmt], *map(str, numbers))
            threads[entry] = 128 * (tile.consumers + 1)
            assert tile.rows == 64 * tile.row_tiles * tile.consumers // tile.k_ways
    assert in_source("qgemm_mx") == wanted
    assert sidecar("qgemm_mx")["threads"] == threads


# ---------------------------------------------------------------- the ablation

NAMES = [name for name, *_ in ABLATION_STEPS]


def test_the_steps_and_their_predictions() -> None:
    assert NAMES == ["step0", "step1", "step2", "step3", "step4", "step5", "qgemm_mx"]
    assert list(STEPS) == NAMES[:-1]
    assert [ratio for *_, ratio in ABLATION_STEPS] == [None, 0.55, 0.85, 0.75, 0.97, 0.85, 0.97]
    assert len({change for _, change, _ in ABLATION_STEPS}) == len(ABLATION_STEPS)


def test_every_entry_of_the_ablation_is_there() -> None:
    declared = {source: sidecar(source)["threads"] for source in ("qgemm_mx", "qgemm_ablations")}
    assert in_source("qgemm_ablations").keys() == declared["qgemm_ablations"].keys()
    launched = set()
    for n, k, m, fmt, sms in problems(SHAPES[:6], MS):
        if fmt == "mxfp4":
            for step in NAMES:
                source, entry, plan = ablation(step, n, k, m, fmt, sms)
                assert declared[source][entry] == plan.threads
                launched.add((source, entry))
    assert {entry for source, entry in launched if source == "qgemm_ablations"} == set(
        declared["qgemm_ablations"]
    )


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (14336, 4096), (4096, 14336), (2880, 2880)])
@pytest.mark.parametrize("m", [1, 3, 33, 64, 65, 512, 2048])
def test_a_step_keeps_what_the_steps_before_it_changed(n, k, m) -> None:
    own = plan_gemm(n, k, m, "mxfp4", 132)
    steps = [ablation(step, n, k, m, "mxfp4", 132) for step in NAMES]
    made = [plan for *_, plan in steps]
    assert all(plan.shared_bytes <= SMEM_PER_SM for plan in made)
    assert made[-1] == own and steps[-1][:2] == ("qgemm_mx", own.entry("mxfp4", "bf16"))
    waiting = ("qgemm_ablations", "qgemm_mx_waiting_mxfp4_bf16_t64_r128")
    assert [step[:2] for step in steps[:2]] == [waiting] * 2
    assert all(source == "qgemm_mx" for source, *_ in steps[2:])
    assert steps[2][1] == "qgemm_mx_mxfp4_bf16_t64_r128" and made[1] == made[2]
    for plan in made[:-1]:
        assert (plan.rows, plan.k_ways, plan.share) == (128, 1, 1)
    for plan in made[:3]:
        assert plan.tokens == 64
    for plan in made[:4]:
        assert plan.clusters == plan.jobs == plan.grid and plan.group == 1
    for plan in made[:5]:
        assert plan.split == 1 and not plan.streamed
    first = made[0]
    assert (first.w_stages, first.x_stages) == (1, 2)
    assert made[1].w_stages > 1 and {p.tokens for p in made[3:]} == {own.tokens}
    assert made[4].clusters == min(made[4].jobs, 132) and made[4].group == own.group
    assert made[5].split == own.split


def test_a_streamed_choice_is_streamed_in_the_step_for_it(monkeypatch) -> None:
    streamed = complete(
        14336, 4096, 512, "mxfp4", 132, tokens=256, rows=128, share=2, streamed=True
    )
    monkeypatch.setattr(gemm_plan, "plan_gemm", lambda *problem: streamed)
    assert ablation("step5", 14336, 4096, 512, "mxfp4", 132)[2].streamed
    full = complete(132 * 128, 4096, 256, "mxfp4", 132, tokens=256, rows=128)
    assert not full.streamed and full.jobs == 132  # nothing is left to share without sharing
    step = ablation("step5", 132 * 128, 4096, 256, "mxfp4", 132)[2]
    assert not step.streamed and step.clusters == 132


def test_no_step_of_that_name_and_no_such_format() -> None:
    with pytest.raises(ValueError, match="'step6' is no step of the ablation: step0, .*, qgemm_mx"):
        ablation("step6", 4096, 4096, 64, "mxfp4", 132)
    with pytest.raises(ValueError, match="step0 is there for mxfp4, not for nvfp4"):
        ablation("step0", 4096, 4096, 64, "nvfp4", 132)
