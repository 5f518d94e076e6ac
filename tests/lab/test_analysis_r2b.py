"""The analysis of a made-up R2b campaign gives the truth that the campaign was made from."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic_r1
import synthetic_r2
import synthetic_r2b as made
from synthetic_r1 import floor_us

from lab import (
    analysis_r2,
    analysis_r2b,
    audit,
    bars,
    bars_r2b,
    clocks,
    dispatch,
    gemm_r2b,
    profile_r2,
    records,
    registry,
    report_audit,
    verdicts,
)
from lab.arm_times import ArmTimes
from lab.dispatch import REGRET
from lab.product_cells import ProductCell
from lab.rows import NotReached

PREREG = made.PREREG
SHAPES = {s["name"]: (s["N"], s["K"]) for s in made.SHAPES}
#: Two shapes at three M, without profiler.
SMALL = {"shapes": ("q_o_proj", "gate_up"), "ms": (16, 64, 512), "counters": False}


def analysed(**how) -> analysis_r2b.Analysis:
    return analysis_r2b.analyse(made.campaign(**how), "r2b-x", made.SHAPES)


@pytest.fixture(scope="module")
def exact() -> analysis_r2b.Analysis:
    return analysed()


def cell(found: analysis_r2b.Analysis, fmt: str, shape: str, m: int) -> ProductCell:
    (one,) = [c for c in found.cells if (c.format, c.point.shape, c.point.M) == (fmt, shape, m)]
    return one


def bar(found: analysis_r2b.Analysis, name: str, fmt: str | None = "mxfp4") -> bars.Bar:
    (one,) = [b for b in found.bars if (b.id, b.format) == (name, fmt)]
    return one


def slower(times: float, *which: str):
    """A change that makes kernels so many times slower."""
    return lambda kernel, fmt, shape, m, t: t * (times if kernel in which else 1.0)


# Cells.


def test_every_cell_of_the_plan_is_there(exact):
    tabulated = [c for c in exact.cells if c.point.M in gemm_r2b.MS]
    assert len([c for c in tabulated if c.format == "nvfp4"]) == 9 * 10
    assert len([c for c in exact.cells if c.format == "int4_g128"]) == 6
    assert len([c for c in exact.cells if c.point.M in gemm_r2b.ODD_MS]) == 15
    near = [c.point.M for c in exact.cells if c.point.shape == gemm_r2b.NEIGHBOUR]
    assert near == [64, 512, 2048]
    assert len(exact.choices) == 9 * 10 + 6 * 4


@pytest.mark.parametrize(
    ("fmt", "shape", "m", "kind"),
    [("mxfp4", "gate_up", 32, "memory"), ("nvfp4", "q_o_proj", 2048, "tensor")],
)
def test_a_cell_has_the_ratios_and_the_bound_that_it_was_made_with(exact, fmt, shape, m, kind):
    c, (n, k) = cell(exact, fmt, shape, m), SHAPES[shape]
    ours = made.ours_us(fmt, n, k, m)
    assert c.time.value == pytest.approx(ours)
    assert c.over_fp8.value == pytest.approx(
        made.FP8 * made.roof_us("fp8_e4m3", n, k, m, 1400) / ours
    )
    assert c.over_bf16.value == pytest.approx(made.BF16 * made.roof_us("bf16", n, k, m) / ours)
    bound = gemm_r2b.bound_of(c, exact.peak)
    assert bound.kind == kind
    assert bound.time.value == pytest.approx(made.roof_us(fmt, n, k, m))
    assert gemm_r2b.over(c, bound).value == pytest.approx(made.OURS[fmt])


def test_the_bound_is_the_floor_where_no_rate_of_the_device_is_known(exact):
    c = cell(exact, "mxfp4", "q_o_proj", 2048)
    bound = gemm_r2b.bound_of(c, None)
    assert (bound.time, bound.kind) == (c.floor, "")
    assert gemm_r2b.over(c, bound) == c.over_floor
    assert gemm_r2b.over(c, gemm_r2b.Bound(None, None)) is None


def test_another_part_is_refused():
    other = synthetic_r2.campaign(ms=(1,), chain=False, counters=False)
    with pytest.raises(ValueError, match="is a campaign of R2, not of R2b"):
        analysis_r2b.analyse(other, "r2-x", made.SHAPES)
    with pytest.raises(ValueError, match="is a campaign of R2b, not of R2"):
        analysis_r2.analyse(made.campaign(**SMALL), "r2b-x", made.SHAPES)


def test_steps_run_from_the_plain_kernel_to_the_product(exact):
    own = [s for s in exact.steps if (s.point.shape, s.point.M) == ("gate_up", 512)]
    assert [s.kernel for s in own] == [f"qgemm_mx/step{i}" for i in range(6)] + ["qgemm_mx"]
    times = [*made.STEPS[:6], 1.0]
    for i, step in enumerate(own[1:], 1):
        assert step.over_previous.value == pytest.approx(times[i] / times[i - 1])
    assert len(exact.steps) == 6 * 7 and exact.elements == ()


# Dispatch.


def test_linear_stands_beside_both_kernels(tmp_path):
    folder = records.write(made.campaign(**SMALL), tmp_path)
    alone = analysis_r2b.of_folder(folder, made.SHAPES)
    assert alone.decode == "" and all(c.gemv is None for c in alone.choices)
    decode = records.write(synthetic_r2.campaign(ms=(1, 16), chain=False, counters=False), tmp_path)
    both = analysis_r2b.of_folder(folder, made.SHAPES)
    assert both.decode == decode.name
    at = {(c.cell.point.shape, c.cell.point.M): c for c in both.choices}
    few, many = at["gate_up", 16], at["gate_up", 64]
    n, k = SHAPES["gate_up"]
    assert (few.kernel, many.kernel) == ("qgemv_mx", "qgemm_mx")
    assert few.gemv.value == pytest.approx(synthetic_r2.ours_us("mxfp4", n, k, 16))
    assert few.over_gemm.value == pytest.approx(made.GEMV / made.OURS["mxfp4"])
    assert many.gemv is None and many.over_gemm.value == pytest.approx(1.0)


def test_the_regret_is_one_number_over_both_parts(tmp_path):
    folder = records.write(made.campaign(**SMALL), tmp_path)
    alone = analysis_r2b.of_folder(folder, made.SHAPES).constants.found[REGRET]
    here = [1 / made.SEARCHED] * 2
    assert alone["value"] == pytest.approx(1 / made.SEARCHED)
    assert alone["how"] == (
        "time of linear over qgemm_mx/searched, geometric mean of 2 cells, cold_graph"
    )
    decode = records.write(synthetic_r2.campaign(ms=(1, 2), chain=False, counters=False), tmp_path)
    found = analysis_r2b.of_folder(folder, made.SHAPES).constants.found[REGRET]
    there = [1 / synthetic_r2.SEARCHED] * 18
    assert found["value"] == pytest.approx(math.prod([*here, *there]) ** (1 / 20))
    assert f"20 cells, 18 of them of {decode.name}" in found["how"]
    # A campaign of the decode part that came after does not change what was found; it has both itself.
    own = analysis_r2.of_folder(decode, made.SHAPES).constants.found[REGRET]
    assert own["value"] == pytest.approx(1 / synthetic_r2.SEARCHED)
    assert own["how"].startswith("time of qgemv_mx over qgemv_mx/searched, geometric mean of 18")


def test_a_decode_part_that_is_younger_or_of_another_device_is_not_pooled(tmp_path, monkeypatch):
    import recorded

    folder = records.write(made.campaign(**SMALL), tmp_path)
    plain, how = recorded.header, {"ms": (1,), "chain": False, "counters": False}
    for change in (
        {"created_utc": "2026-02-01T00:00:00Z"},
        {"device": plain()["device"] | {"name": "ANOTHER GPU"}},
    ):
        monkeypatch.setattr(recorded, "header", lambda c=change, **k: plain(**(k | c)))
        records.write(synthetic_r2.campaign(**how), tmp_path)
    monkeypatch.setattr(recorded, "header", plain)
    found = analysis_r2b.of_folder(folder, made.SHAPES)
    assert found.decode == "" and "2 cells" in found.constants.found[REGRET]["how"]


@pytest.mark.parametrize(("times", "expected"), [(0.5, 1.0), (2.0, None)])
def test_a_dispatch_to_the_faster_kernel_has_no_regret_and_none_under_1(
    times, expected, monkeypatch
):
    """Where linear launches qgemv_mx it is no regret that the search of qgemm_mx found no plan as fast."""
    chosen = made.chosen

    def change(kernel, fmt, shape, m, t):
        return t * times if kernel == "linear" and m == 32 else t

    def other(kernel, fmt, m):
        said = chosen(kernel, fmt, m)
        return said.replace("qgemm", "qgemv") if kernel == "linear" and m == 32 else said

    monkeypatch.setattr(made, "chosen", other)
    how = SMALL | {"ms": (32, 128)}
    regrets = dispatch.regrets(ArmTimes(made.campaign(change=change, **how)))
    few = [r for r in regrets if r.point.M == 32]
    ratio = expected or times / made.SEARCHED
    assert [r.ratio.value for r in few] == pytest.approx([ratio] * 2)
    assert all((r.searched == r.chosen) == (expected is not None) for r in few)
    rest = [r.ratio.value for r in regrets if r.point.M != 32]
    assert rest == pytest.approx([1 / made.SEARCHED] * 2)


def test_without_a_search_the_regret_says_why():
    found = analysed(without=("qgemm_mx/searched",), **SMALL).constants
    assert (found.found, found.missing) == ({}, {REGRET: "no search was timed"})
    assert analysis_r2b.gives(REGRET) and not analysis_r2b.gives("qgemv_m16_over_m1")


# Crossings.


def test_a_crossing_lies_where_the_times_meet(exact):
    at = {(x.shape, x.against): x for x in exact.crossings}
    assert len(at) == 18
    for (shape, against), x in at.items():
        ratios = {
            c.cell.point.M: (c.cell.over_fp8 if against == "cublaslt_fp8" else c.cell.over_bf16).value
            for c in exact.choices
            if c.cell.point.shape == shape and c.cell.point.M >= 16
        }  # fmt: skip
        if math.isinf(x.value):
            assert min(ratios.values()) > 1 and x.m == 8192
            continue
        below = max(m for m in ratios if m < x.value)
        assert ratios[below] > 1 > ratios[2 * below] and x.m == 2 * below
        share = math.log(ratios[below]) / math.log(ratios[below] / ratios[2 * below])
        assert x.value == pytest.approx(below * 2**share)
        assert x.ratio.value == pytest.approx(ratios[x.m])


def test_what_sets_the_time_at_a_crossing_is_a_rule_over_roofline_and_profile():
    def change(kernel, fmt, shape, m, t):
        return 2.0 * t if kernel == "linear" and m == 64 else t

    found = analysed(change=change)
    at = {(x.shape, x.against): x for x in found.crossings}
    x = at["gate_up", "cublaslt_fp8"]
    assert (x.m, x.mechanism) == (64, "dequantisation issue")
    assert x.tensor == pytest.approx(1 / 2.2)
    assert "products at the measured BF16 rate take 45 % of its time" in x.why
    assert "issue-bound" in x.why
    later = at["q_o_proj", "cublaslt_bf16"]
    assert later.mechanism in ("dequantisation issue", "tensor")
    bare = analysed(change=change, counters=False)
    (y,) = [y for y in bare.crossings if (y.shape, y.against) == ("gate_up", "cublaslt_fp8")]
    assert y.mechanism == "not profiled" and y.why.endswith("not profiled")


@pytest.mark.parametrize(
    ("memory", "tensor", "word"),
    [
        (0.85, 0.3, "memory"),
        (0.3, 0.85, "tensor"),
        (0.3, 0.3, "dequantisation issue"),
        (None, None, "dequantisation issue"),
    ],
)
def test_the_mechanism_names_the_first_that_takes_most_of_the_time(exact, memory, tensor, word):
    c = cell(exact, "mxfp4", "gate_up", 64)
    assert gemm_r2b.mechanism(c, memory, tensor, exact.profiles)[0] == word


def test_no_profile_of_this_kernel_explains_a_call_of_another(exact):
    c = replace(cell(exact, "mxfp4", "gate_up", 64), chosen="qgemv_mx_mxfp4_bf16_t16, 132 x 384")
    word, why = gemm_r2b.mechanism(c, 0.3, 0.3, exact.profiles)
    assert word == "not profiled" and why.endswith("qgemv_mx is launched, not profiled here")
    assert gemm_r2b.mechanism(c, 0.9, 0.3, exact.profiles)[0] == "memory"


def test_a_rival_that_is_never_faster_is_crossed_beyond_what_was_measured():
    found = analysed(change=slower(9.0, "cublaslt_bf16"), **SMALL)
    bf16 = [x for x in found.crossings if x.against == "cublaslt_bf16"]
    assert [x.value for x in bf16] == [math.inf] * 2 and {x.m for x in bf16} == {512}
    found = analysed(change=slower(0.1, "cublaslt_bf16"), **SMALL)
    assert [x.value for x in found.crossings if x.against == "cublaslt_bf16"] == [0.0, 0.0]


# Bars.


def test_every_bar_of_the_issue_is_judged_and_met_by_the_made_up_kernel(exact):
    ids = [b.id for b in exact.bars]
    assert len(ids) == 3 + 9 + 6 + 9 + 1 + 3 + 1 + 1 + 1
    assert {b.format for b in exact.bars if bars.split(b.id)[0] == "peers"} == {"mxfp4"}
    lost = {(b.id, b.format) for b in exact.bars if b.status != bars.MET}
    assert lost == set(), lost


@pytest.mark.parametrize("m", [32, 64, 128, 256, 512, 1024, 2048, 4096, 8192])
def test_a_kernel_that_is_slow_at_one_m_misses_its_bars_there_alone(m):
    slow = {("mxfp4", name, m): 3.0 for name in SHAPES}
    found = analysed(slow=slow, counters=False, ms=(m,))
    for b in found.bars:
        kind, at = bars.split(b.id)
        if kind in ("fp8_mean", "bf16_mean", "bf16_least", "peers") and b.format == "mxfp4":
            assert b.status == (bars.MISSED if at == m else bars.NOT_RUN), b.id
    mean = bar(found, f"bf16_mean.m{m}")
    assert (mean.cells, mean.missed) == (9, 9)
    assert mean.limit == bars_r2b.OVER_BF16[m][0] and mean.off < 0
    assert "a kernel at the bound in every cell would reach that, " in mean.reason
    assert mean.reason.endswith("; not profiled")


def test_a_mean_that_the_bound_itself_does_not_reach_says_so():
    found = analysed(change=slower(0.3, "cublaslt_bf16"), ms=(512,))
    reason = bar(found, "bf16_mean.m512").reason
    assert "BF16's time over the bound of these cells is 0.345" in reason
    assert "it is faster than the bound itself, whose rate is that of a long product" in reason
    assert "; in its own profile: tensor-bound" in reason
    # FP8 has twice the rate, so it may well be under the bound of BF16.
    found = analysed(change=slower(0.3, "cublaslt_fp8"), ms=(64,))
    assert "and even that is less than 1.3;" in bar(found, "fp8_mean.m64").reason


def test_a_cell_below_its_bound_says_so():
    def change(kernel, fmt, shape, m, t):
        if kernel == "cublaslt_bf16":
            return 0.6 * t
        return 0.8 * t if kernel == "qgemm_mx" else t

    found = analysed(change=change, ms=(512,))
    (miss, *_) = [x for x in found.misses if x.bar.id == "bf16_least.m512"]
    assert miss.reason.startswith(
        "it takes 0.880 times its bound (tensor), whose rate is that of a"
    )


def test_a_plan_in_a_reason_is_short():
    whole = (
        "qgemm_mx_mxfp4_bf16_t64, grid 128 x 384, tokens 64, k_ways 2, share 1, split 4, jobs 64"
    )
    assert (
        bars_r2b.short_plan(whole) == "qgemm_mx_mxfp4_bf16_t64, grid 128 x 384, k_ways 2, split 4"
    )
    assert bars_r2b.short_plan("") == ""


def test_one_slow_cell_misses_the_bar_of_any_cell_and_not_the_mean():
    found = analysed(slow={("mxfp4", "kv_gqa", 256): 1.5}, ms=(256,))
    assert bar(found, "bf16_mean.m256").status == bars.MET
    least = bar(found, "bf16_least.m256")
    assert (least.status, least.missed, least.worst.shape) == (bars.MISSED, 1, "kv_gqa")
    (miss,) = [x for x in found.misses if x.bar.id == "bf16_least.m256"]
    assert miss.off == pytest.approx(miss.observed.value / 0.95 - 1)
    assert miss.reason.startswith("at its bound (tensor) it would reach 1.54; ")


def test_a_peer_that_is_faster_is_named():
    found = analysed(change=slower(0.5, "peer/humming_bf16"), ms=(128,))
    lost = bar(found, "peers.m128")
    assert (lost.status, lost.missed) == (bars.MISSED, 9) and "peer/humming_bf16" in lost.how
    assert {x.against for x in found.misses if x.bar.id == "peers.m128"} == {"peer/humming_bf16"}


def test_missing_shapes_keep_a_bar_from_being_met():
    found = analysed(**SMALL)
    mean = bar(found, "bf16_mean.m64")
    assert (mean.status, mean.cells, mean.how) == (bars.UNDECIDED, 2, "2 of 9 cells")


# A campaign that its minutes ended.


#: A shape at each of its M, a point in the middle of another, and the neighbour.
LOST = [
    *(("llama70b_down", m) for m in gemm_r2b.MS),
    ("gate_up", 128),
    *((gemm_r2b.NEIGHBOUR, m) for m in bars_r2b.NEIGHBOUR_MS),
]


@pytest.fixture(scope="module")
def cut() -> analysis_r2b.Analysis:
    return analysis_r2b.analyse(made.closed(LOST), "r2b-x", made.SHAPES)


def test_a_bar_of_which_cells_were_not_reached_is_never_met(cut):
    assert len(cut.lost) == len(LOST) and cut.taken == 132 - len(LOST)
    for b in cut.bars:
        kind, m = bars.split(b.id)
        if kind in ("ragged", "regret"):
            assert (b.status, b.cells) == (bars.NOT_RUN, 0), b.id
        else:
            assert b.status == bars.UNDECIDED and b.cells < b.planned, b.id
        if m is not None:
            assert (b.cells, b.planned) == (7 if m == 128 else 8, 9)
            assert b.how.startswith(f"{b.cells} of 9 cells")
    found = {(b.id, b.format): b for b in cut.bars}
    # No step leads over an M that was not reached.
    assert (found["odd_m", "mxfp4"].cells, found["odd_m", "mxfp4"].planned) == (13, 15)
    assert found["growth", "mxfp4"].cells == 81 - 9 - 2
    assert found["growth_linear", "mxfp4"].cells == 105 - 9 - 2


def test_a_missed_bar_stays_missed_by_the_cells_that_were_reached():
    slow = {("mxfp4", name, 512): 3.0 for name in SHAPES}
    made_up = made.closed([("llama70b_down", 512)], slow=slow, ms=(128, 512))
    found = analysis_r2b.analyse(made_up, "r2b-x", made.SHAPES)
    mean = bar(found, "bf16_mean.m512")
    assert (mean.status, mean.cells, mean.planned) == (bars.MISSED, 8, 9)


def test_the_regret_is_not_given_over_a_part_of_its_points(cut):
    why = "4 of the 28 points with a search were not reached"
    assert cut.constants.found == {} and cut.constants.missing == {REGRET: why}
    assert isinstance(cut.constants.missing[REGRET], NotReached)
    one = bar(cut, "regret", None)
    assert (one.status, one.reason) == (bars.NOT_RUN, why)
    # The other formats' points, and the neighbour, have no search.
    found = analysis_r2b.analyse(made.closed([("kv_gqa", 1024)]), "r2b-x", made.SHAPES)
    assert REGRET in found.constants.found


def test_the_points_with_a_search_are_those_of_the_protocol(exact):
    own = {(p.point.shape, p.point.M) for p in exact.regrets}
    named = {(name, m) for name in SHAPES for m in gemm_r2b.SEARCHED_MS}
    assert own == named | {gemm_r2b.SEARCHED_TOO}
    decode = [r for r in made.PROTOCOL["plan"]["rows"] if r["group"] == "decode"]
    assert {tuple(r["m"]) for r in decode} == {gemm_r2b.DECODE_MS}
    assert made.PROTOCOL["plan"]["further"][0]["m"] == list(bars_r2b.NEIGHBOUR_MS)


def test_a_crossing_lies_within_its_own_ends_where_the_ratio_rises_again():
    def change(kernel, fmt, shape, m, t):
        if kernel != "cublaslt_bf16" or m < 32:
            return t
        ratio = 1.3 if m < 256 else 1.1 if m == 8192 else 0.999
        return ratio * made.ours_us("mxfp4", *SHAPES[shape], m)

    how = {"shapes": ("gate_up",), "noise": 0.01, "blocks": 4, "counters": False}
    found = analysed(change=change, **how)
    (x,) = [x for x in found.crossings if x.against == "cublaslt_bf16"]
    assert 128 < x.value < 512 and x.low <= x.value and math.isinf(x.high)


def test_claims_about_points_that_were_not_reached_are_not_run(tmp_path):
    """Those about all of their cells, some of them, and the regret, for which no older campaign stands in."""
    folder = records.write(made.closed(LOST, noise=0.002, blocks=4), tmp_path)
    records.write(synthetic_r2.campaign(noise=0.002, blocks=4, ms=(1, 2)), tmp_path)
    computed = {
        "R2": lambda f: analysis_r2.of_folder(f, made.SHAPES).constants,
        "R2b": lambda f: analysis_r2b.of_folder(f, made.SHAPES).constants,
    }
    folders = sorted((tmp_path / "campaigns").glob("*"))
    assert len(folders) == 2 and folder in folders
    claims = registry.load_registered(PREREG).claims
    evidence = verdicts.Evidence.from_campaigns(folders, computed=computed)
    judged = {v.claim: v for v in verdicts.judge(claims, evidence)}
    gone = {(8192, 28672, m) for m in gemm_r2b.MS} | {(*SHAPES["gate_up"], 128)}
    about = 0
    for claim in claims:
        if not claim.id.startswith(("r2.qgemm_mx.", "r2.crossover.", "r2.bar.gemm_")):
            continue
        touched = any((c.N, c.K, c.M) in gone for c in claim.estimand.cells)
        assert (judged[claim.id].verdict == "NOT_RUN") == touched, claim.id
        about += touched
    assert about > 17
    regret = judged["r2.bar.dispatch_regret"]
    assert regret.verdict == "NOT_RUN" and "4 of the 28 points" in regret.reason
    alone = verdicts.Evidence.from_campaigns([f for f in folders if f != folder], computed=computed)
    assert REGRET in alone.constants


def test_nvfp4_is_held_against_mxfp4_over_all_m(exact):
    found = analysed(change=lambda k, f, s, m, t: 1.2 * t if (k, f) == ("qgemm_mx", "nvfp4") else t)
    one = bar(found, "nvfp4", "nvfp4")
    assert one.status == bars.MISSED and one.cells == one.planned == 90
    assert one.observed.value == pytest.approx(1.2 * bar(exact, "nvfp4", "nvfp4").observed.value)


def test_a_cliff_is_the_step_to_a_faster_larger_m(exact):
    assert bar(exact, "growth").cells == 81 and bar(exact, "growth_linear").cells == 105
    found = analysed(slow={("mxfp4", "kv_gqa", 32): 1.1})
    for name in ("growth", "growth_linear"):
        one = bar(found, name)
        assert (one.status, one.missed) == (bars.MISSED, 1)
        assert (one.worst.shape, one.worst.M) == ("kv_gqa", 64)
        assert one.observed.value == pytest.approx(1 / 1.1)
        assert one.reason.startswith("against M = 32; from the plan qgemm_mx_mxfp4_bf16_t32, ")
    assert bar(found, "growth", "nvfp4").status == bars.MET


def test_an_m_between_the_tabulated_ones_costs_no_more_than_the_next(exact):
    one = bar(exact, "odd_m")
    assert one.cells == one.planned == 15 and one.observed.value == pytest.approx(made.ODD)
    found = analysed(change=lambda k, f, s, m, t: 1.05 * t if (k, m) == ("qgemm_mx", 100) else t)
    one = bar(found, "odd_m")
    assert (one.status, one.missed, one.worst.M) == (bars.MISSED, 3, 100)
    assert one.observed.value == pytest.approx(1.05 * made.ODD)
    assert one.reason.startswith("against M = 128; ")


def test_the_ragged_shape_is_as_efficient_as_its_neighbour(exact):
    one = bar(exact, "ragged")
    assert one.cells == one.planned == 3
    n, k = SHAPES["gpt_oss_2880"]
    few = made.ours_us("mxfp4", 3072, 3072, 64) / made.ours_us("mxfp4", n, k, 64)
    assert one.observed.value == pytest.approx(min(1.0, few * n * k / 3072**2))
    found = analysed(slow={("mxfp4", "gpt_oss_2880", 2048): 1.3})
    one = bar(found, "ragged")
    assert (one.status, one.worst.M) == (bars.MISSED, 2048)
    assert one.observed.value == pytest.approx(1 / 1.3)


def test_a_dispatch_that_costs_more_than_its_bar_is_missed():
    found = analysed(change=slower(0.9, "qgemm_mx/searched"), **SMALL)
    assert bar(found, "regret", None).status == bars.MISSED


def test_the_id_of_a_bar_says_its_m():
    assert bars.split("peers.m32") == ("peers", 32) and bars.split("odd_m") == ("odd_m", None)


# The profiler's reason.


ISSUE = "smsp__issue_active.avg.pct_of_peak_sustained_active"


def call(m: int, **changes) -> profile_r2.Profile:
    n, k = SHAPES["gate_up"]
    size = n * k * 17 / 32 + 2 * m * k
    values = {"dram__bytes_read.sum": size, "gpu__time_duration.sum": size / 1e3, **synthetic_r2.LATENCY}  # fmt: skip
    return profile_r2.Profile("qgemm_mx", "mxfp4", "gate_up", n, k, m, values | changes, 4.4)


@pytest.mark.parametrize(
    ("m", "changes", "word"),
    [
        (512, {made.TENSOR: 75.0, ISSUE: 90.0}, "tensor-bound"),
        (16, {made.TENSOR: 75.0, ISSUE: 90.0}, "issue-bound"),
        (512, {made.TENSOR: 74.0, ISSUE: 90.0}, "issue-bound"),
        (512, {"dram__bytes_read.sum": 9e7, "gpu__time_duration.sum": 9e4}, "latency-bound"),
        (16, {"dram__bytes_read.sum": 9e7}, "times the bytes of its operands"),
        (512, {"dram__bytes_read.sum": 9e7, "gpu__time_duration.sum": 3e4}, "times the bytes of its operands"),
        (512, {"smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio": 20.0}, "for products of their own"),
    ],
)  # fmt: skip
def test_with_many_tokens_products_may_be_the_limit(m, changes, word):
    p = call(m, **changes)
    said = profile_r2.reason(p, p.N, p.K, p.M)
    assert word in said and ("tensor pipe" in said) == (m > 16 and made.TENSOR in changes)


def test_the_activations_are_operands_too():
    p = call(4096)
    assert p.read_over_operands == pytest.approx(1.0) and p.read_over_weight > 1.5


# Power.


def test_clock_and_power_are_medians_over_the_legs_of_each_arm():
    campaign = made.campaign(
        shapes=("q_o_proj",), ms=(64, 1024), regimes=("cold_graph", "hot_graph")
    )
    table = clocks.by_arm(campaign.samples, campaign.telemetry, 1024)
    assert set(table["M"]) == {1024}
    legs = campaign.samples
    own = legs[(legs["kernel"] == "qgemm_mx") & (legs["format"] == "mxfp4") & (legs["M"] == 1024)]
    own = own[own["regime"] == "cold_graph"]
    at = campaign.telemetry
    inside = [
        at[(at["t_ns"] >= a) & (at["t_ns"] <= b)]["sm_clock_mhz"]
        for a, b in zip(own["start_ns"], own["end_ns"], strict=True)
    ]
    clock = [value for some in inside for value in some]
    (row,) = table[(table["kernel"] == "qgemm_mx") & (table["format"] == "mxfp4")].to_dict("records")  # fmt: skip
    assert row["readings"] == len(clock) > 2
    assert row["sm_clock_mhz"] == sorted(clock)[len(clock) // 2] or row["sm_clock_mhz"] == 1867.5
    assert (row["power_w"], row["capped"]) == (400.0, 0.0)
    capped = campaign.telemetry.assign(throttle_reasons=4)
    assert set(clocks.by_arm(campaign.samples, capped, 1024)["capped"]) == {1.0}
    assert clocks.by_arm(campaign.samples, campaign.telemetry.iloc[:0], 1024).empty


# Tables.


def test_tables_are_the_same_every_time_and_empty_before_any_campaign(exact):
    again = analysed()
    for name, table in analysis_r2b.tables(exact).items():
        text = analysis_r2b.to_csv(table)
        assert text == analysis_r2b.to_csv(analysis_r2b.tables(again)[name]), name
        assert tuple(table.columns) == tuple(analysis_r2b.empty_tables()[name].columns)
        assert "nan" not in text.lower() and len(table) > 0
    assert all(t.empty for t in analysis_r2b.tables(None).values())


def test_the_table_of_cells_has_kernel_dispatch_and_bound(exact):
    table = analysis_r2b.tables(exact)["r2b_cells"]
    (row,) = table[
        (table["kernel"] == "linear") & (table["shape"] == "gate_up") & (table["M"] == 32)
    ].to_dict("records")
    n, k = SHAPES["gate_up"]
    assert row["launches"] == "qgemm_mx" and row["bound"] == "memory"
    assert row["bound_us"] == pytest.approx(floor_us("mxfp4", n, k))
    assert row["over_gemm"] == pytest.approx(1.0)
    assert set(table.loc[table["kernel"] == "qgemm_mx", "launches"].isna()) == {True}


def test_the_campaign_of_a_part_is_chosen_among_those_of_a_report(tmp_path):
    decode = records.write(synthetic_r2.campaign(ms=(1,), chain=False, counters=False), tmp_path)
    folder = records.write(made.campaign(**SMALL), tmp_path)
    assert analysis_r2.chosen([decode, folder], "R2b") == folder
    assert analysis_r2.chosen([decode, folder]) == decode
    assert analysis_r2.chosen([decode], "R2b") is None


# Claims.


@pytest.fixture(scope="module")
def repo(tmp_path_factory) -> Path:
    """A repository with campaigns of both parts."""
    root = tmp_path_factory.mktemp("repo")
    (root / "prereg").mkdir()
    (root / "prereg" / "shapes.json").write_text(json.dumps({"shapes": made.SHAPES}))
    records.write(made.campaign(noise=0.002, blocks=4), root / "data")
    records.write(synthetic_r2.campaign(noise=0.002, blocks=4), root / "data")
    return root


@pytest.fixture(scope="module")
def judged(repo) -> dict[str, verdicts.Verdict]:
    """Verdicts of all registered claims on campaigns of both parts, computed as the audit does."""
    computed = {
        "R2": lambda f: report_audit.analysis_r2_of(repo, f).constants,
        "R2b": lambda f: report_audit.analysis_r2b_of(repo, f).constants,
    }
    folders = sorted((repo / "data" / "campaigns").glob("*"))
    evidence = verdicts.Evidence.from_campaigns(folders, computed=computed)
    found = verdicts.judge(registry.load_registered(PREREG).claims, evidence)
    return {v.claim: v for v in found}


def test_every_claim_about_the_matrix_kernel_is_judged(judged):
    own = {k: v for k, v in judged.items() if k.startswith(("r2.qgemm_mx.", "r2.crossover."))}
    assert len(own) >= 360 + 18
    assert {v.verdict for v in own.values()} <= {
        "HIT", "MISS", "STRADDLE", "CONFIRMED", "REFUTED", "INCONCLUSIVE",
    }  # fmt: skip
    assert all(v.campaign.startswith("r2b-") for v in own.values())
    gemm = [v for k, v in judged.items() if k.startswith("r2.bar.gemm_")]
    assert len(gemm) == 17
    assert {v.verdict for v in gemm} <= {"CONFIRMED", "REFUTED", "INCONCLUSIVE"}
    decode = [v for k, v in judged.items() if k.startswith("r2.bar.gemv_")]
    assert decode and all(v.campaign.startswith("r2-") for v in decode)


def test_a_bar_and_the_claim_about_it_observe_the_same_number(judged, repo):
    (folder,) = (repo / "data" / "campaigns").glob("r2b-*")
    found = report_audit.analysis_r2b_of(repo, folder)
    claimed = {b.claim: b for b in found.bars if b.claim}
    registered = {c.id: c for c in registry.load_registered(PREREG).claims}
    gemm = {k for k in registered if k.startswith("r2.bar.gemm_")}
    assert set(claimed) == gemm | {"r2.bar.dispatch_regret"}
    for name, b in claimed.items():
        assert judged[name].observed == pytest.approx(b.observed.value, rel=1e-9), name
        assert registered[name].threshold == pytest.approx(b.limit)


def test_a_crossing_and_the_claim_about_it_observe_the_same_number(judged, repo):
    (folder,) = (repo / "data" / "campaigns").glob("r2b-*")
    found = report_audit.analysis_r2b_of(repo, folder)
    short = {"cublaslt_fp8": "fp8", "cublaslt_bf16": "bf16"}
    seen = 0
    for x in found.crossings:
        verdict = judged[f"r2.crossover.{short[x.against]}.{x.shape}"]
        if math.isfinite(x.value):
            assert verdict.observed == pytest.approx(x.value, rel=1e-9)
            seen += 1
    assert seen == sum(math.isfinite(x.value) for x in found.crossings) >= 9


def test_the_claim_about_regret_is_judged_over_both_parts(judged):
    own = judged["r2.bar.dispatch_regret"]
    assert own.campaign.startswith("r2b-")
    there, here = 45, 28
    logs = [math.log(1 / synthetic_r2.SEARCHED)] * there + [math.log(1 / made.SEARCHED)] * here
    assert own.observed == pytest.approx(math.exp(sum(logs) / 73), rel=2e-3)


def test_the_audit_knows_what_a_campaign_of_r2b_answers():
    claims = {c.id: c for c in registry.load_registered(PREREG).claims}
    holds = audit._Answers.of({"rung": "R2b"})
    assert holds.hold(claims["r2.bar.dispatch_regret"])
    assert not holds.hold(claims["r2.bar.chain_pdl_over_asymptote"])


def test_the_tables_of_a_report_are_held_against_the_campaign(repo):
    reports = repo / "reports"
    reports.mkdir()
    (folder,) = (repo / "data" / "campaigns").glob("r2b-*")
    for name, table in analysis_r2b.tables(report_audit.analysis_r2b_of(repo, folder)).items():
        (reports / f"{name}.csv").write_text(analysis_r2b.to_csv(table))

    def problems() -> list:
        return report_audit._rung_problems(
            repo, analysis_r2b, lambda f: report_audit.analysis_r2b_of(repo, f)
        )

    assert problems() == []
    path = reports / "r2b_power.csv"
    path.write_text(path.read_text().replace("400", "401"))
    ((where, reason),) = problems()
    assert where == path and "is not what the data give" in reason


def test_only_shapes_of_the_set_are_in_means():
    assert synthetic_r1.SHAPES is made.SHAPES
    assert gemm_r2b.NEIGHBOUR not in SHAPES
