"""Statistics: METHOD 5 (drift, injected delay, A/A, stacked, deleted factor) and the intervals."""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain, combinations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from lab import statistics as st
from lab.statistics import Crossover, Estimate, Extreme

N_BLOCKS = 8  # planned blocks at small M (prereg/protocol.json)
LEG_NOISE = 0.005


def run(times, seed, n=N_BLOCKS, noise=LEG_NOISE, drift=0.0, curve=1.0):
    """Log block values of arms measured in planned order under a drift; {arm: [n]}."""
    rng = np.random.default_rng(seed)
    blocks = st.block_order(list(times), n, seed)
    total = sum(map(len, blocks))
    values = {arm: [] for arm in times}
    clock = 0
    for block in blocks:
        legs = {arm: [] for arm in times}
        for arm in block:
            slow = 1 + drift * (clock / total) ** curve
            legs[arm].append(math.log(times[arm] * slow) + rng.normal(0, noise))
            clock += 1
        for arm, logs in legs.items():
            values[arm].append(np.mean(logs))
    return values


def subsets(names):
    return map(
        frozenset, chain.from_iterable(combinations(names, k) for k in range(len(names) + 1))
    )


# Order.


def test_blocks_are_mirrored_permutations_and_deterministic():
    arms = ["a", "b", "c"]
    blocks = st.block_order(arms, 50, seed=1)
    for block in blocks:
        assert block == block[::-1] and Counter(block) == dict.fromkeys(arms, 2)
    assert len({tuple(block) for block in blocks}) == 6  # every permutation occurs
    assert blocks == st.block_order(arms, 50, seed=1) != st.block_order(arms, 50, seed=2)
    assert {tuple(b) for b in st.block_order(["A", "B"], 20, 0)} == {tuple("ABBA"), tuple("BAAB")}
    # The order is part of the protocol: another generator would change it silently.
    assert st.block_order(["A", "B", "C"], 2, 20261130) == [list("CABBAC"), list("BACCAB")]


def test_block_order_refuses_arms_that_are_not_distinct():
    with pytest.raises(ValueError, match="not distinct"):
        st.block_order(["a", "a"], 2, 0)


# METHOD 5.


@pytest.mark.parametrize("drift", [0.05, 0.3, -0.2])
def test_monotone_linear_drift_is_no_difference(drift):
    """Without noise the mirrored order cancels a linear drift to second order."""
    values = run({"a": 1.0, "b": 1.0}, seed=3, noise=0, drift=drift)
    assert abs(st.paired_log_ratio(values["a"], values["b"]).mean) < 5e-4
    plain = np.log(1 + drift * np.arange(32) / 32)
    assert abs(plain[:16].mean() - plain[16:].mean()) > 0.02  # all A, then all B, would see it


@pytest.mark.parametrize("curve", [1.0, 2.0, 0.5])
def test_drift_keeps_the_false_positive_rate(curve):
    wrong = sum(
        st.a_a_differs(v["a"], v["a#2"])
        for v in (run({"a": 1.0, "a#2": 1.0}, s, drift=0.05, curve=curve) for s in range(200))
    )
    assert wrong <= scipy_stats.binom.ppf(0.999, 200, 0.05)


def test_a_a_200_times_gives_false_positives_within_binomial_bounds():
    wrong = sum(
        st.a_a_differs(v["a"], v["a#2"])
        for v in (run({"a": 5.0, "a#2": 5.0}, seed) for seed in range(200))
    )
    low, high = scipy_stats.binom.ppf([0.001, 0.999], 200, 0.05)
    assert low <= wrong <= high


def test_two_per_cent_delay_is_detected_at_the_planned_n():
    found = 0
    for seed in range(100):
        values = run({"a": 5.0, "b": 5.0 * 1.02}, seed, drift=0.03)
        low, high = st.paired_log_ratio(values["b"], values["a"]).interval()
        found += low > 1
        assert high > 1  # never the wrong sign
    assert found >= 99


def test_max_of_two_is_stacked_and_a_sum_is_not():
    parts = {"load": 4.0, "dequant": 3.95}

    def stacked(on):
        return 1 + max([parts[p] for p in on], default=0)

    def added(on):
        return 1 + sum(parts[p] for p in on)

    found = st.interaction({on: stacked(on) for on in subsets(parts)}, "load", "dequant")
    assert found.label == "stacked" and found.joint > 0.7 and max(found[:2]) < 0.02
    assert (
        st.interaction({s: added(s) for s in subsets(parts)}, "load", "dequant").label == "additive"
    )
    flat = dict.fromkeys(subsets(parts), 5.0)
    assert st.interaction(flat, "load", "dequant").label == "none"


def test_unequal_overlap_is_stacked_too():
    parts = {"load": 4.0, "dequant": 2.0}  # removing load alone shows 2 of the 4
    times = {on: 1 + max([parts[p] for p in on], default=0) for on in subsets(parts)}
    assert st.interaction(times, "load", "dequant").label != "none"
    assert st.interaction(times, "dequant", "load").first == 0


def test_a_deleted_factor_grows_the_residual():
    parts = {"load": 3.0, "layout": 2.0, "dequant": 1.0}
    floor = 10.0

    def time(on):
        return floor + sum(parts[p] for p in on) + (0.5 if {"load", "layout"} <= on else 0)

    full = st.shapley({on: time(on) for on in subsets(parts)})
    assert st.residual(time(frozenset(parts)), floor, full) == pytest.approx(0, abs=1e-12)
    # dequant cannot be removed any more: it stays in every variant.
    left = {on: time(on | {"dequant"}) for on in subsets(["load", "layout"])}
    assert st.residual(time(frozenset(parts)), floor, st.shapley(left)) == pytest.approx(1 / 6.5)


# Factorial.


def test_shapley_closes_and_splits_an_interaction_evenly():
    times = {frozenset(): 1.0, frozenset("a"): 3.0, frozenset("b"): 2.0, frozenset("ab"): 6.0}
    assert st.shapley(times) == pytest.approx({"a": 3.0, "b": 2.0})


def test_incomplete_factorial_is_refused():
    times = {frozenset(): 1.0, frozenset("a"): 3.0, frozenset("ab"): 6.0}
    with pytest.raises(ValueError, match="3 of 4"):
        st.shapley(times)
    with pytest.raises(ValueError, match="no gap"):
        st.residual(1.0, 1.0, {})


# Estimates.


def test_sample_estimate_is_the_t_interval():
    values = np.log([2.0, 2.1, 1.9, 2.05])
    estimate = st.sample_estimate(values)
    right = scipy_stats.t.interval(0.95, 3, values.mean(), scipy_stats.sem(values))
    assert estimate.interval() == pytest.approx(np.exp(right))
    assert st.single_interval(values) == pytest.approx((math.exp(values.mean()), *np.exp(right)))
    paired = st.paired_log_ratio(values + 0.1, values)
    assert paired.interval() == pytest.approx((math.exp(0.1),) * 2)


@pytest.mark.parametrize("values", [[1.0], [], [1.0, math.nan], [1.0, math.inf], [[1.0, 2.0]]])
def test_values_without_an_interval_are_refused(values):
    with pytest.raises(ValueError):
        st.sample_estimate(values)


def test_pairs_of_other_length_are_refused():
    with pytest.raises(ValueError, match="paired by block"):
        st.paired_log_ratio([1.0, 2.0], [1.0, 2.0, 3.0])


def test_welch_difference_agrees_with_scipy():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, 1, 8), rng.normal(0.5, 2, 5)
    found = st.difference(st.sample_estimate(a), st.sample_estimate(b))
    other = scipy_stats.ttest_ind(a, b, equal_var=False)
    assert found.df == pytest.approx(other.df)
    assert found.p_value(1.0) == pytest.approx(other.pvalue)  # log scale: ratio 1


def test_geomean_has_variance_sum_over_c_squared():
    cells = [Estimate(0.1, 0.02, 7), Estimate(0.3, 0.01, 7)]
    mean = st.geomean(cells)
    assert mean.value == pytest.approx(math.exp(0.2))
    assert mean.se == pytest.approx(math.hypot(0.02, 0.01) / 2)
    assert mean.df == pytest.approx((0.0005**2) / ((0.0004**2 + 0.0001**2) / 7))
    with pytest.raises(ValueError, match="no cell"):
        st.geomean([])


def test_published_interval_is_recovered():
    estimate = st.sample_estimate(np.log([2.0, 2.1, 1.9, 2.05]))
    low, high = estimate.interval()
    again = st.from_interval(estimate.value, low, high, 4, log=True)
    assert (again.mean, again.se) == pytest.approx((estimate.mean, estimate.se))
    exact = st.from_interval(0.53125, 0.53125, 0.53125, None, log=False)
    assert exact.interval() == (0.53125, 0.53125)
    assert (exact.p_value(0.5), exact.p_value(0.53125)) == (0.0, 1.0)
    with pytest.raises(ValueError, match="does not hold"):
        st.from_interval(3.0, 1.0, 2.0, 8, log=True)


CURVE = Crossover((1, 4, 16, 64), tuple(Estimate(m, 0.02, 7) for m in (0.5, 0.3, 0.1, -0.2)))
QUANTITIES = {
    "estimate": Estimate(0.1, 0.03, 7),
    "linear": Estimate(1.1, 0.03, 7, log=False),
    "smallest": Extreme((Estimate(0.1, 0.03, 7), Estimate(0.15, 0.05, 7))),
    "largest": Extreme((Estimate(0.1, 0.03, 7), Estimate(0.15, 0.05, 7)), largest=True),
}


@pytest.mark.parametrize("name", QUANTITIES)
@pytest.mark.parametrize("alpha", [0.05, 0.01])
def test_interval_and_p_value_agree(name, alpha):
    quantity = QUANTITIES[name]
    for threshold in np.linspace(0.8, 1.6, 161):
        low, high = quantity.interval(alpha)
        assert (threshold < low or threshold > high) == (quantity.p_value(threshold) < alpha)


def test_smallest_is_above_only_when_each_part_is():
    above, near = Estimate(1.0, 0.01, 7), Estimate(0.0, 0.01, 7)
    assert Extreme((above, above)).interval().low > 2
    assert Extreme((above, near)).interval().low < 1 < Extreme((above, near)).interval().high
    assert Extreme((above, near), largest=True).interval().low > 2


def test_crossover_is_interpolated_and_censored():
    assert CURVE.value == pytest.approx(math.exp(math.log(16) + math.log(4) / 3))
    low, high = CURVE.interval()
    assert 16 < low < CURVE.value < high < 64
    assert CURVE.p_value(4) < 0.001 and CURVE.p_value(CURVE.value) == pytest.approx(1)
    never = Crossover((1, 4), (Estimate(0.5, 0.01, 7), Estimate(0.4, 0.01, 7)))
    assert never.value == math.inf and never.interval() == (4, math.inf)
    before = Crossover((1, 4), (Estimate(-0.5, 0.01, 7), Estimate(-0.6, 0.01, 7)))
    assert before.value == 0 and before.interval() == (0, 1)


# Tests.


def test_holm_levels_by_hand():
    assert st.holm_levels([0.04, 0.01, 0.03]) == pytest.approx([0.025, 0.05 / 3, 0.025])
    assert st.holm_levels([0.01], family_size=4) == [0.0125]
    assert st.holm_levels([]) == []
    with pytest.raises(ValueError, match="family_size=1"):
        st.holm_levels([0.1, 0.2], family_size=1)


def test_holm_levels_decide_as_adjusted_p_values_of_statsmodels_do():
    from statsmodels.stats import multitest

    rng = np.random.default_rng(5)
    for _ in range(30):
        p = rng.uniform(0, 0.06, 5) ** rng.uniform(1, 2)
        size = int(rng.integers(5, 9))
        by_level = [a <= b for a, b in zip(p, st.holm_levels(p, size), strict=True)]
        padded = [*p, *[1.0] * (size - 5)]
        assert by_level == multitest.multipletests(padded, method="holm")[0][:5].tolist()


def test_equivalence_is_not_the_lack_of_a_difference():
    tight, wide = Estimate(0.01, 0.005, 7), Estimate(0.0, 0.2, 7)
    low, high = 1 / 1.05, 1.05
    assert st.equivalence_p(tight, low, high) < 0.05
    assert wide.p_value(1.0) == 1.0 and st.equivalence_p(wide, low, high) > 0.3
    inside = tight.interval(0.10)
    assert low < inside.low and inside.high < high


def test_wilson_against_published_values():
    assert st.wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert st.wilson(0, 0) == (0, 1)


def test_extension_looks_at_width_and_never_at_sign():
    narrow, wide = Estimate(0.3, 0.001, 7), Estimate(0.3, 0.02, 7)
    assert not st.needs_extension([narrow], 0.02)
    assert st.needs_extension([narrow, wide], 0.02)
    for mean in (-3.0, 0.0, 3.0):
        assert st.needs_extension([Estimate(mean, 0.02, 7)], 0.02)
        assert not st.needs_extension([Estimate(mean, 0.001, 7)], 0.02)


def test_more_than_a_tenth_dropped_is_invalid():
    assert st.too_many_dropped(1, 10) is None
    assert "2 of 10 blocks" in st.too_many_dropped(2, 10)
    assert "no block" in st.too_many_dropped(0, 0)
