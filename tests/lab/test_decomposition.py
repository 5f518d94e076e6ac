"""The split of a gap, on made-up times with known truth. Nothing here was measured."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from lab import claims, samples, statistics, verdicts
from lab import decomposition as dec
from lab.decomposition import FACTORS, FULL, NONE, Cell
from lab.protocol import file_of
from lab.statistics import Estimate

CELL = Cell("mxfp4", "q_o_proj", 4096, 4096, 1, "cold_graph")
SHAPES = [
    {"name": f"shape_{i}", "N": 1024 * (i + 1), "K": 4096, "set": "frozen" if i < 6 else "large"}
    for i in range(9)
]
FLOOR_US = 10.0
PARTS = dict(zip(FACTORS, (3.0, 1.5, 1.0, 0.5, 0.8), strict=True))
TERMS = {"launch": 1.2, "grid_fill": 0.9}
GAP_US = sum(PARTS.values()) + sum(TERMS.values())


def exact(value: float) -> Estimate:
    return Estimate(value, 0.0, math.inf, log=False)


def added(parts=PARTS, hidden=0.0):
    """Time of a variant in which all parts add up; `hidden` is a cost that no factor removes."""
    return lambda on: FLOOR_US + sum(TERMS.values()) + hidden + sum(parts[p] for p in on)


def overlapped(a: str, b: str, parts=PARTS):
    """Two factors as max(a, b), the others added."""

    def time(on):
        pair = [parts[p] for p in on if p in (a, b)]
        rest = sum(parts[p] for p in on if p not in (a, b))
        return FLOOR_US + sum(TERMS.values()) + rest + max(pair, default=0.0)

    return time


def table(time, *, factors=FACTORS, n=8, noise=0.0, seed=0, kept=(), **arms) -> pd.DataFrame:
    """Log block times of a factorial. `kept` are factors that no variant removes; `arms` are further columns, us."""
    rng = np.random.default_rng(seed)
    truth = {
        kernel: time(dec.present_factors(kernel, factors) | set(kept))
        for kernel in dec.variants(factors)
    } | {dec.FLOOR: FLOOR_US, **arms}
    shared = rng.normal(0, 0.02, n)  # what all arms of a block have in common
    return pd.DataFrame(
        {k: np.log(v) + shared + noise * rng.normal(size=n) for k, v in truth.items()}
    )


def split(time=None, *, cell=CELL, terms=TERMS, factors=FACTORS, more=None, **how):
    found = table(time or added(), factors=factors, **how)
    given = {
        name: exact(value) if isinstance(value, float) else value for name, value in terms.items()
    }
    return dec.decompose(cell, found, terms=given, factors=factors, **(more or {}))


def cause(found, name):
    return next(c for c in found.causes if c.name == name)


def in_interval(estimate: Estimate, value: float) -> bool:
    low, high = estimate.interval()
    return low <= value <= high


# Names.


def test_every_set_of_factors_has_one_name_and_comes_back():
    names = dec.variants()
    assert len(names) == len(set(names)) == 32 and names[0] == FULL and names[-1] == NONE
    sets = [frozenset(on) for size in range(6) for on in combinations(FACTORS, size)]
    assert {dec.present_factors(name) for name in names} == set(sets)
    assert all(dec.variant_name(dec.present_factors(name)) == name for name in names)
    gone = set(FACTORS) - {"dequant_issue", "matrix_issue"}
    assert dec.variant_name(gone) == "testbed/-dequant_issue-matrix_issue"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("testbed/-speed", "'speed' is not one of"),
        ("testbed/-matrix_issue-dequant_issue", "spelled testbed/-dequant_issue-matrix_issue"),
        ("testbed/-dequant_issue-dequant_issue", "spelled testbed/-dequant_issue"),
        ("testbed/" + "".join(f"-{f}" for f in FACTORS), "spelled testbed/none"),
        ("testbed/fast", "is no variant"),
        ("qgemv_mx", "is no variant"),
    ],
)
def test_other_names_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        dec.present_factors(name)


def test_factors_are_a_few_known_names():
    for factors in ([], ["weight_load"] * 2, [*FACTORS, "clock"], ["clock"]):
        with pytest.raises(ValueError, match="factor"):
            dec.variants(factors)


def test_names_of_shares_are_those_that_the_judge_looks_up():
    key = claims.CellKey(
        "testbed/full", None, None, CELL.format, CELL.N, CELL.K, CELL.M, CELL.regime
    )
    for name in (*FACTORS, "launch", "grid_fill"):
        assert dec.share_key(name, CELL) == verdicts.share_key(name, key)
        assert dec.share_key(name) == verdicts.share_key(name)


def test_causes_are_those_of_the_claims():
    from lab.predictions_kernels import SHARES

    assert set(SHARES) <= {*FACTORS, *dec.TERMS}


def test_measuring_may_import_it():
    """Firewall: neither claims nor predictions nor verdicts come along."""
    code = "import sys, lab.decomposition; print([m for m in sys.modules if m.startswith('lab.')])"
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    ).stdout
    assert "lab.decomposition" in out
    assert not any(
        name in out for name in ("claims", "registry", "verdicts", "cost_model", "predic")
    )


# The split.


def test_an_additive_truth_is_recovered():
    found = split(noise=0.002)
    for name, value in (PARTS | TERMS).items():
        assert cause(found, name).share.value == pytest.approx(value / GAP_US, abs=0.02), name
    for name, value in PARTS.items():
        part = cause(found, name)
        for reading in (part.amount, part.leave_one_out, part.alone):
            assert reading.value == pytest.approx(value, abs=0.08)
        assert part.label == "effect"
    assert found.gap.value == pytest.approx(GAP_US, rel=0.02)
    assert found.residual.share.value == pytest.approx(0, abs=0.02)
    assert found.closure("all_removed").verdict == "CLOSED"
    assert {pair.label for pair in found.pairs} == {"additive"}


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_shares_and_residual_sum_to_the_gap(noise):
    found = split(overlapped("weight_load", "dequant_issue"), noise=noise, n=5)
    parts = [*found.causes, found.residual]
    assert sum(c.share.mean for c in parts) == pytest.approx(1, abs=1e-12)
    assert sum(c.amount.mean for c in parts) == pytest.approx(found.gap.mean, abs=1e-12)
    assert found.full.mean - found.floor.mean == pytest.approx(found.gap.mean, abs=1e-12)


def test_terms_by_block_and_from_elsewhere():
    rng = np.random.default_rng(2)
    by_block = pd.Series(1.2 + 0.05 * rng.normal(size=8))
    elsewhere = Estimate(0.9, 0.08, 7, log=False)
    found = split(terms={"launch": by_block, "grid_fill": elsewhere}, noise=0.002)
    assert cause(found, "launch").amount.value == pytest.approx(by_block.mean())
    assert cause(found, "grid_fill").amount.se == pytest.approx(0.08, rel=1e-6)
    # What is uncertain in a term is uncertain in the residual, and in nothing else.
    assert found.residual.amount.se > 0.08 > cause(found, "dequant_issue").amount.se
    assert sum(c.share.mean for c in (*found.causes, found.residual)) == pytest.approx(1)


def test_a_share_is_the_ratio_of_the_means():
    """A block whose gap is small by chance has no more weight than its gap: a mean of ratios would give 0.6."""
    part, gap = dec.Amount(np.array([1.0, 2.0])), dec.Amount(np.array([1.0, 10.0]))
    share = part.over(gap)
    assert share.value == pytest.approx(3.0 / 11.0)
    # Linearised: (part - share x gap) / mean gap is +-(1 - 3/11) / 5.5 about the share.
    assert share.se == pytest.approx((1 - 3 / 11) / 5.5)


def test_a_constant_becomes_an_estimate():
    constant = {"value": 1.2, "unit": "us", "ci_low": 1.1, "ci_high": 1.3, "n": 8, "how": "x"}
    assert dec.measured(constant).interval() == pytest.approx((1.1, 1.3))
    assert dec.measured({**constant, "ci_low": None, "ci_high": None}).se == 0
    with pytest.raises(ValueError, match="launch: a time in microseconds"):
        split(terms={"launch": Estimate(0.1, 0.0, 7)})


# Stacked.


@pytest.mark.parametrize("small", [3.0, 2.9, 1.0])
def test_max_of_two_is_stacked_and_never_no_effect(small):
    parts = PARTS | {"weight_load": 3.0, "dequant_issue": small}
    found = split(overlapped("weight_load", "dequant_issue", parts), noise=0.002)
    hidden = cause(found, "dequant_issue")
    assert hidden.leave_one_out.value == pytest.approx(0, abs=0.05)
    assert hidden.label == "stacked" and hidden.alone.value == pytest.approx(small, abs=0.05)
    for pair in found.pairs:
        own = pair.names == ("weight_load", "dequant_issue")
        assert pair.label == ("stacked" if own else "additive")
        if own:
            assert pair.overlap.value == pytest.approx(small, abs=0.1)
            assert pair.joint.value == pytest.approx(3.0, abs=0.1)
    # The larger one still shows what the other does not hide.
    assert cause(found, "weight_load").label == ("stacked" if small > 2 else "effect")


def test_three_stacked_factors_show_only_when_the_third_is_gone():
    three = ("weight_load", "dequant_issue", "matrix_issue")
    base = FLOOR_US + sum(TERMS.values())

    def time(on):
        rest = sum(PARTS[p] for p in on if p not in three)
        return base + rest + (3.0 if on & set(three) else 0.0)

    found = split(time, noise=0.002)
    assert {cause(found, name).label for name in three} == {"stacked"}
    labels = {pair.others: pair.label for pair in found.pairs if pair.names == (three[0], three[1])}
    assert labels == {"present": "none", "absent": "stacked"}


def test_factors_that_need_each_other_are_coupled():
    def time(on):
        return added()(on) + (2.0 if {"layout_staging", "epilogue_reduction"} <= on else 0.0)

    found = split(time, noise=0.002)
    labels = {p.label for p in found.pairs if p.names == ("layout_staging", "epilogue_reduction")}
    assert labels == {"coupled"}


def test_half_hidden_is_partly_stacked():
    def time(on):
        both = {"weight_load", "layout_staging"} <= on
        return added(PARTS | {"layout_staging": 3.0})(on) - (0.9 if both else 0.0)

    found = split(time, noise=0.001)
    labels = {p.label for p in found.pairs if p.names == ("weight_load", "layout_staging")}
    assert labels == {"partly_stacked"}


def test_no_effect_is_said_only_with_a_narrow_interval():
    parts = PARTS | {"matrix_issue": 0.0}
    assert cause(split(added(parts), noise=0.001), "matrix_issue").label == "no_effect"
    vague = cause(split(added(parts), noise=0.05, seed=3), "matrix_issue")
    assert in_interval(vague.share, 0) and vague.label == "inconclusive"


# Closure.


def test_a_deleted_factor_grows_the_residual():
    left = [name for name in FACTORS if name != "layout_staging"]
    whole = split(noise=0.002)
    less = split(noise=0.002, factors=left, kept=["layout_staging"])
    assert abs(whole.residual.share.value) < 0.02
    assert less.residual.share.value == pytest.approx(PARTS["layout_staging"] / GAP_US, abs=0.02)
    assert (whole.closure("all_removed").verdict, less.verdict) == ("CLOSED", "UNEXPLAINED")


def test_a_missing_term_grows_the_residual():
    found = split(noise=0.002, terms={"grid_fill": 0.9})
    assert found.residual.share.value == pytest.approx(1.2 / GAP_US, abs=0.02)
    assert found.verdict == "UNEXPLAINED"


@pytest.mark.parametrize(
    ("hidden", "verdict"), [(0.0, "CLOSED"), (0.4, "CLOSED"), (2.0, "UNEXPLAINED")]
)
def test_a_hidden_term_opens_the_closure_though_shapley_closes(hidden, verdict):
    found = split(
        added(hidden=hidden), noise=0.001, more={"predicted": exact(FLOOR_US + GAP_US + hidden)}
    )
    assert found.closure("all_removed").verdict == found.verdict == verdict
    assert sum(c.share.mean for c in (*found.causes, found.residual)) == pytest.approx(1)
    assert found.residual.amount.value == pytest.approx(hidden, abs=0.1)


def test_the_closure_by_counters_is_independent_of_the_other():
    right, wrong = exact(FLOOR_US + GAP_US), exact(FLOOR_US + GAP_US - 2.0)
    assert split(noise=0.001, more={"predicted": right}).verdict == "CLOSED"
    found = split(noise=0.001, more={"predicted": wrong})
    assert found.closure("all_removed").verdict == "CLOSED"
    assert found.closure("counters").verdict == found.verdict == "UNEXPLAINED"
    assert found.closure("counters").amount.value == pytest.approx(2.0, abs=0.5)


def test_without_counters_a_cell_is_not_closed():
    found = split(noise=0.001)
    assert found.closure("counters").verdict == found.verdict == "NOT_RUN"
    # but what is unexplained stays unexplained
    assert split(added(hidden=3.0)).verdict == "UNEXPLAINED"


def test_a_residual_that_may_exceed_the_limit_is_inconclusive():
    wide = {"launch": Estimate(1.2, 0.6, 7, log=False), "grid_fill": 0.9}
    assert split(terms=wide).closure("all_removed").verdict == "INCONCLUSIVE"


def test_variants_that_load_nothing_lie_below_the_floor_and_do_not_close():
    found = split(lambda on: added()(on) - (0.0 if "weight_load" in on else 9.0))
    assert found.residual.share.value < -0.5 and found.verdict == "UNEXPLAINED"


def test_the_production_time_is_a_bar_of_its_own():
    end = FLOOR_US + GAP_US + 3.0
    paired = split(noise=0.001, more={"production": "peer/x"}, **{"peer/x": end})
    assert paired.beyond.amount.value == pytest.approx(3.0, abs=0.1)
    assert paired.verdict == "NOT_RUN" and paired.production_verdict == "UNEXPLAINED"
    alone = split(noise=0.001, more={"production": Estimate(end, 0.2, 7, log=False)})
    assert alone.production.value == end and alone.beyond.amount.se > 0.2
    assert split().production is None and split().beyond is None


def test_without_a_gap_there_are_no_shares():
    found = split(lambda on: FLOOR_US, terms={}, noise=0.01)
    assert found.verdict == "NO_GAP" and found.bare is None
    assert {c.share for c in (*found.causes, found.residual)} == {None}
    assert {c.label for c in found.causes} == {"inconclusive"}
    with pytest.raises(ValueError, match="no share of weight_load"):
        dec.rank(found.causes)
    out = dec.campaign_constants([found], [{"name": "q_o_proj", "set": "frozen"}])
    assert not out.found and "cannot be told from 0" in out.missing["share/weight_load"]


# Drift and A/A, from legs.


def legs(truth, drift, *, n=8, noise=0.0, seed=0) -> pd.DataFrame:
    """Legs as a session takes them: random order and its mirror image; `drift(i, total)` in log time within a block."""
    rng = np.random.default_rng(seed)
    rows = []
    for block, order in enumerate(statistics.block_order(sorted(truth), n, seed)):
        for position, arm in enumerate(order):
            log = math.log(truth[arm]) + drift(position, len(order)) + noise * rng.normal()
            rows.append((arm.removesuffix("#2"), arm, block, position, math.exp(log)))
    frame = pd.DataFrame(rows, columns=["kernel", "arm", "block", "position", "time_us"])
    return frame.assign(role="testbed", dropped=False, **CELL._asdict())


def linear(position, total):
    return 0.10 * position / total


def saturating(position, total):
    return 0.10 * (1 - math.exp(-5 * position / total))


def dead_factor(drift, seed):
    """A split of legs under drift, with A = B for dequant_issue: removing it changes nothing."""
    parts = PARTS | {"dequant_issue": 0.0}
    truth = {k: added(parts)(dec.present_factors(k)) for k in dec.variants()}
    truth |= {dec.FLOOR: FLOOR_US, FULL + "#2": truth[FULL]}
    ((cell, found),) = dec.gather(samples.block_times(legs(truth, drift, seed=seed))).items()
    return dec.decompose(cell, found, terms={})


def test_monotone_drift_within_blocks_gives_a_dead_factor_no_share():
    found = dead_factor(linear, 0)
    assert cause(found, "dequant_issue").share.value == pytest.approx(0, abs=1e-9)
    assert cause(found, "dequant_issue").label == "no_effect"
    # A drift that is not linear is left to the random order: no share beyond chance.
    runs = [dead_factor(saturating, seed) for seed in range(40)]
    shares = [cause(found, "dequant_issue").share for found in runs]
    limit = stats.binom.interval(0.999, 40, 0.05)[1]
    assert sum(not in_interval(share, 0) for share in shares) <= limit
    assert sum(found.a_a_differs for found in runs) <= limit
    assert abs(np.mean([share.value for share in shares])) < 0.003
    assert {cause(found, "weight_load").label for found in runs} == {"effect"}


def test_an_injected_delay_of_two_percent_is_detected_at_the_planned_blocks(repository):
    """A factor that delays every variant that has it by 2%, in the blocks of the protocol, under drift and noise."""
    planned = json.loads((repository / file_of("R1")).read_text())["blocks"]["small_m"]
    parts = PARTS | {"dequant_issue": 0.0}

    def share(delay, seed):
        truth = {k: added(parts)(dec.present_factors(k)) for k in dec.variants()}
        for kernel in truth:
            if "dequant_issue" in dec.present_factors(kernel):
                truth[kernel] *= 1 + delay
        truth[dec.FLOOR] = FLOOR_US
        made = legs(truth, linear, n=planned, noise=0.01, seed=seed)
        ((cell, found),) = dec.gather(samples.block_times(made)).items()
        return cause(dec.decompose(cell, found, terms={}), "dequant_issue").share

    runs = range(40)
    detected = sum(share(0.02, seed).interval().low > 0 for seed in runs)
    falsely = sum(not in_interval(share(0.0, seed), 0) for seed in runs)
    assert detected >= 38 and falsely <= stats.binom.interval(0.999, 40, 0.05)[1]


def test_a_drift_that_is_linear_cancels_to_the_last_digits():
    truth = {k: added()(dec.present_factors(k)) for k in dec.variants()} | {dec.FLOOR: FLOOR_US}
    still, moving = (
        next(iter(dec.gather(samples.block_times(legs(truth, drift))).values()))
        for drift in (lambda *_: 0.0, linear)
    )
    terms = {n: exact(0.0) for n in TERMS}
    a, b = (dec.decompose(CELL, t, terms=terms) for t in (still, moving))
    for one, other in zip((*a.causes, a.residual), (*b.causes, b.residual), strict=True):
        assert one.share.value == pytest.approx(other.share.value, abs=1e-9)


def test_all_then_all_would_have_given_a_share():
    """The drift of the test above is large enough to be seen, were the order not mirrored."""
    parts = PARTS | {"dequant_issue": 0.0}
    names = dec.variants()
    late = [name for name in names if "dequant_issue" in dec.present_factors(name)]
    times = {n: added(parts)(dec.present_factors(n)) * (1.05 if n in late else 1.0) for n in names}
    found = pd.DataFrame({k: np.log([v] * 4) for k, v in (times | {dec.FLOOR: FLOOR_US}).items()})
    assert cause(dec.decompose(CELL, found, terms={}), "dequant_issue").share.value > 0.05


def test_a_a_false_positives_and_coverage_are_within_binomial_bounds():
    parts = PARTS | {"dequant_issue": 0.0}
    full, gap = added(parts)(frozenset(FACTORS)), GAP_US - PARTS["dequant_issue"]
    dead = twins = missed = 0
    for seed in range(200):
        found = split(added(parts), noise=0.01, seed=seed, **{FULL + "#2": full})
        dead += not in_interval(cause(found, "dequant_issue").share, 0)
        missed += not in_interval(cause(found, "weight_load").share, 3.0 / gap)
        twins += found.a_a_differs
    low, high = stats.binom.interval(0.999, 200, 0.05)
    for wrong in (dead, twins, missed):
        assert low <= wrong <= high


# Input.


def test_gather_takes_cells_with_a_testbed_only_and_keeps_the_twin():
    truth = {FULL: 12.0, FULL + "#2": 12.0, dec.FLOOR: 10.0}
    blocks = samples.block_times(legs(truth, linear, n=2))
    other = blocks.assign(kernel="cublaslt_fp8", arm="cublaslt_fp8", format="fp8_e4m3")
    (found,) = dec.gather(pd.concat([blocks, other.drop_duplicates("block")])).items()
    assert found[0] == CELL and set(found[1]) == set(truth) and len(found[1]) == 2
    assert dec.gather(blocks[:0]) == {}


def test_gather_refuses_what_is_repeated_or_no_number():
    blocks = samples.block_times(legs({FULL: 12.0, dec.FLOOR: 10.0}, linear, n=2))
    with pytest.raises(ValueError, match=r"q_o_proj .*stream_read occurs twice in block 1"):
        dec.gather(pd.concat([blocks, blocks[(blocks.kernel == dec.FLOOR) & (blocks.block == 1)]]))
    with pytest.raises(ValueError, match=r"q_o_proj .*testbed/full block 0: log_time=nan"):
        lost = (blocks.kernel == FULL) & (blocks.block == 0)
        dec.gather(blocks.assign(log_time=blocks.log_time.mask(lost)))


DEAD = "testbed/-dequant_issue-matrix_issue"


def broken(change) -> pd.DataFrame:
    return change(table(added()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop(columns=DEAD), f"1 of 33 arms are missing: {DEAD}"),
        (lambda t: t.drop(columns=dec.FLOOR), "missing: stream_read"),
        (lambda t: pd.concat([t, t[[DEAD]]], axis=1), f"arm {DEAD} is given twice"),
        (lambda t: pd.concat([t, t[-1:]]), "block 7 is given twice"),
        (
            lambda t: t.assign(**{DEAD: t[DEAD].mask(t.index == 3)}),
            f"{DEAD} has no time in block 3",
        ),
        (lambda t: t.assign(**{DEAD: np.inf}), f"{DEAD} has no time in block 0"),
        (lambda t: t[:1], "1 blocks; an interval needs 2"),
        (lambda t: t.assign(**{"testbed/-speed": 1.0}), "'speed' is not one of"),
    ],
)
def test_invalid_tables_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=f"mxfp4 q_o_proj 4096x4096 M=1 cold_graph: .*{message}"):
        dec.decompose(CELL, broken(change), terms={})


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"magic": exact(1.0)}, "term 'magic' is not one of"),
        ({"launch": pd.Series([1.0] * 7)}, "term launch has blocks"),
        ({"launch": pd.Series([1.0] * 7 + [math.nan])}, "term launch is nan in block 7"),
    ],
)
def test_invalid_terms_are_refused_by_name(terms, message):
    with pytest.raises(ValueError, match=message):
        dec.decompose(CELL, table(added()), terms=terms)


def test_a_missing_production_arm_is_named():
    with pytest.raises(ValueError, match="missing: peer/x"):
        split(more={"production": "peer/x"})


# Over shapes, ranking, constants.


def campaign(time=None, **how):
    found = []
    for i, shape in enumerate(SHAPES):
        cell = Cell("mxfp4", shape["name"], shape["N"], shape["K"], 1, "cold_graph")
        more = {"predicted": exact(FLOOR_US + GAP_US)}
        found.append(split(time, cell=cell, noise=0.002, seed=i, more=more, **how))
    return found


def test_a_summary_weighs_shapes_alike_and_closes():
    found = campaign()[:3]
    summary = dec.summarise(found, "frozen")
    for i, bar in enumerate(summary.causes):
        assert bar.share.value == pytest.approx(np.mean([d.causes[i].share.value for d in found]))
    assert sum(b.share.mean for b in (*summary.causes, summary.residual)) == pytest.approx(1)
    parts = sum(b.over_floor.mean for b in (*summary.causes, summary.residual))
    assert 1 + parts == pytest.approx(summary.full.mean, abs=1e-9)
    assert summary.shapes == ("shape_0", "shape_1", "shape_2")


def test_a_summary_has_the_gravest_verdict_and_counts_what_is_stacked():
    fine = campaign()[:2]
    cell = fine[0].cell._replace(shape="other")
    pair = overlapped("weight_load", "dequant_issue", PARTS | {"dequant_issue": 3.0})
    odd = split(lambda on: pair(on) + 3.0, cell=cell, noise=0.001)
    summary = dec.summarise([*fine, odd], "frozen")
    assert summary.verdict == "UNEXPLAINED"
    assert {b.name: b.stacked for b in summary.causes}["dequant_issue"] == 1


def test_a_summary_refuses_a_mixture():
    one, two = campaign()[:2]
    with pytest.raises(ValueError, match="no cell"):
        dec.summarise([], "frozen")
    with pytest.raises(ValueError, match="occurs twice"):
        dec.summarise([one, one], "frozen")
    with pytest.raises(ValueError, match="mixes"):
        dec.summarise([one, split(cell=two.cell._replace(M=16))], "frozen")
    with pytest.raises(ValueError, match="has causes"):
        dec.summarise([one, split(cell=two.cell, terms={"launch": 1.2})], "frozen")


def test_rank_is_inconclusive_where_neighbours_overlap():
    parts = PARTS | {"layout_staging": 1.0, "dequant_issue": 1.0}
    order = dec.rank(split(added(parts), noise=0.002).causes)
    assert [r.place for r in order] == list(range(1, 8))
    assert order[0].name == "weight_load" and order[0].then == "above" and order[-1].then is None
    values = [r.share.value for r in order]
    assert values == sorted(values, reverse=True)
    for upper, lower in zip(order, order[1:], strict=False):
        if {upper.name, lower.name} == {"layout_staging", "dequant_issue"}:
            assert upper.then == "inconclusive"
            break
    else:
        pytest.fail("equal causes are not neighbours")


def test_constants_are_what_the_judge_reads():
    found = campaign()
    out = dec.campaign_constants(found, SHAPES)
    assert not out.missing
    assert len(out.found) == 9 * 8 + 8 + 2
    first = found[0]
    one = out.found[dec.share_key("dequant_issue", first.cell)]
    share = cause(first, "dequant_issue").share
    assert (one["value"], one["ci_low"], one["ci_high"]) == (share.value, *share.interval())
    assert one["n"] == 8 and one["unit"] == "fraction"
    rebuilt = statistics.from_interval(one["value"], one["ci_low"], one["ci_high"], one["n"], False)
    assert rebuilt.se == pytest.approx(share.se)
    ranked = out.found["share/launch"]
    frozen = [cause(d, "launch").share.value for d in found[:6]]
    assert ranked["value"] == pytest.approx(np.mean(frozen))
    for constant in out.found.values():
        assert constant["ci_low"] <= constant["value"] <= constant["ci_high"]
        assert set(constant) == {"value", "unit", "ci_low", "ci_high", "n", "how"}


def test_the_judge_decides_the_frozen_claims_by_them():
    repo = Path(__file__).parents[2] / "prereg"
    shapes = json.loads((repo / "shapes.json").read_text(encoding="utf-8"))["shapes"]
    found = []
    for m in (1, 16, 64):
        for shape in shapes:
            cell = Cell("mxfp4", shape["name"], shape["N"], shape["K"], m, "cold_graph")
            found.append(
                split(cell=cell, noise=0.002, more={"predicted": exact(FLOOR_US + GAP_US)})
            )
    out = dec.campaign_constants(found, shapes)
    evidence = verdicts.Evidence(
        constants={name: {**value, "campaign": "c"} for name, value in out.found.items()}
    )
    frozen = claims.load_many([repo / "claims" / "r0.json", repo / "claims" / "r1_r3.json"])
    ours = [c for c in frozen if c.id.startswith(("r1.cause.", "r1.closure.", "r1.p4."))]
    judged = {v.claim: v for v in verdicts.judge(ours, evidence)}
    assert len(judged) == 7 * 2 * 3 + 3 + 1
    assert not {v.verdict for v in judged.values()} & {"NOT_RUN", "INVALID", "TAMPERED"}
    load = judged["r1.cause.weight_load.frozen.m1"]
    assert load.verdict == "HIT" and load.observed == pytest.approx(3.0 / GAP_US, abs=0.02)
    assert judged["r1.p4.cause_ranking"].verdict == "REFUTED"
    assert judged["r1.closure.residual.m1"].verdict == "REFUTED"


def test_largest_residuals_take_the_worst_shape_and_both_closures():
    found = campaign()
    bare = sum(TERMS.values()) / GAP_US
    out = dec.campaign_constants(found, SHAPES).found
    literal, after = (out[f"largest_residual{s}_fraction_m1"] for s in ("", "_after_terms"))
    assert (
        literal["value"] == max(abs(d.bare.value) for d in found) == pytest.approx(bare, abs=0.02)
    )
    assert after["value"] == max(
        abs(s.value) for d in found for s in (d.residual.share, d.closure("counters").share)
    )
    assert literal["ci_low"] > 0.1 > after["value"]


def test_a_shape_or_a_counter_that_is_missing_leaves_no_constant():
    found = campaign()
    out = dec.campaign_constants(found[:-1], SHAPES)
    assert out.missing["largest_residual_fraction_m1"] == "no cell of shape_8"
    assert "share/launch" in out.found
    out = dec.campaign_constants(found[1:], SHAPES)
    assert "no cell of shape_0" in out.missing["share/launch"]
    bare = split(cell=found[0].cell)
    out = dec.campaign_constants([bare, *found[1:]], SHAPES)
    assert "no prediction from counters on shape_0" in out.missing["largest_residual_fraction_m1"]
    with pytest.raises(ValueError, match="two cells have this name"):
        dec.campaign_constants([found[0], found[0]], SHAPES)


def test_tables_hold_every_cause_and_every_pair():
    found = campaign()[:2]
    causes, pairs = dec.cause_table(found), dec.pair_table(found)
    assert len(causes) == 2 * 8 and causes.groupby("shape")[
        "share"
    ].sum().tolist() == pytest.approx([1, 1])
    assert len(pairs) == 2 * 20 and set(pairs["label"]) == {"additive"}
    assert causes["alone_us"].notna().sum() == 2 * 5


def test_the_same_input_gives_the_same_numbers():
    a, b = (dec.cause_table(campaign()[:2]) for _ in range(2))
    pd.testing.assert_frame_equal(a, b, check_exact=True)
