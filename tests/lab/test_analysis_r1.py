"""From a made-up R1 campaign with known truth to constants, tables and verdicts, to the digit.

Nothing here was measured.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic_r1 as made

from lab import accuracy, analysis_r1, audit, cells, decomposition, records, registry, verdicts
from lab.analysis_r1 import analyse
from lab.arm_times import Arm, ArmTimes, Point
from lab.decomposition import FULL, Cell
from lab.experiments_r1 import launched_grid, nvfp4_over_mxfp4, ring_bytes
from lab.production import CLAIMED, FP8, PRODUCTION, bounds_of, decide, format_speeds
from lab.statistics import Estimate
from qgemm_mx.formats import weight_bytes

FROZEN = [s for s in made.SHAPES if s["set"] == "frozen"]
Q = next(s for s in made.SHAPES if s["name"] == "q_o_proj")


def exact(campaign, cell):
    return made.predicted(cell)


def nothing(campaign, cell):
    return None


def analysed(campaign, predict=exact, record=None):
    return analyse(campaign, made.ID, made.SHAPES, record, predict)


@pytest.fixture(scope="module")
def campaign():
    return made.campaign()


@pytest.fixture(scope="module")
def found(campaign):
    return analysed(campaign, record=made.accuracy_record())


@pytest.fixture(scope="module")
def small():
    """One frozen shape at M = 1: quick."""

    def build(**how):
        given = {"shapes": [Q], "ms": (1,), "regimes": ("cold_graph",), "causes": False}
        return made.campaign(**(given | how))

    return build


def geomean(values) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


# Decompositions.


def test_every_factorial_cell_is_split_into_the_shares_that_it_was_made_of(found):
    assert len(found.found) == 9 * 3 and found.refused == {}
    for d in found.found:
        shares = {c.name: c.share.value for c in d.causes}
        assert shares == pytest.approx(made.SHARES | {"clock": 0.0}, abs=1e-12)
        assert d.residual.share.value == pytest.approx(made.RESIDUAL, abs=1e-12)
        floor = made.floor_us("mxfp4", d.cell.N, d.cell.K)
        assert d.gap.value == pytest.approx(made.GAP * floor)
        assert d.verdict == "CLOSED"
        # The production path is 0.1 floors below the testbed: beyond it by a sixth of the gap.
        assert (
            d.beyond.share.value == pytest.approx(-1 / 6) and d.production_verdict == "UNEXPLAINED"
        )
        assert d.a_a_differs is False


def test_terms_come_from_the_probes_block_by_block(small):
    found = analysed(small(noise=0.01, blocks=8))
    (d,) = found.found
    launch = next(c for c in d.causes if c.name == "launch")
    low, high = launch.share.interval()
    assert low < launch.share.value < high and low <= made.SHARES["launch"] <= high


def test_an_unexplained_rest_is_named(small):
    shares = made.SHARES | {"weight_load": 0.10}
    (d,) = analysed(small(shares=shares)).found
    assert d.residual.share.value == pytest.approx(0.20) and d.verdict == "UNEXPLAINED"


def test_counters_that_predict_another_time_leave_the_cell_unexplained(small):
    (d,) = analysed(small(), predict=lambda c, cell: made.predicted(cell, over=0.9)).found
    assert d.closure("all_removed").verdict == "CLOSED"
    assert d.closure("counters").share.value == pytest.approx(0.1 * 1.6 / 0.6)
    assert d.verdict == "UNEXPLAINED"


def test_without_counters_the_second_closure_has_not_run(small):
    found = analysed(small(counters=False), predict=nothing)
    (d,) = found.found
    assert d.closure("counters").verdict == d.verdict == "NOT_RUN"
    assert (
        "no prediction from counters"
        in analysed(
            made.campaign(ms=(1,), regimes=("cold_graph",), causes=False), predict=nothing
        ).constants.missing["largest_residual_fraction_m1"]
    )
    assert "no counter row" in found.constants.missing["issue_slots_per_64_weights_testbed"]


def test_a_factor_behind_another_is_stacked_not_absent(small):
    (d,) = analysed(small(stacked=True)).found
    causes = {c.name: c for c in d.causes}
    assert causes["dequant_issue"].stacked
    assert causes["dequant_issue"].leave_one_out.value == pytest.approx(0.0, abs=1e-12)
    assert causes["dequant_issue"].alone.value == pytest.approx(0.2 * d.gap.value / 0.8)


def test_without_a_gap_there_is_no_share_and_no_ranking(small):
    found = analysed(small(gap=0.0))
    (d,) = found.found
    assert d.verdict == "NO_GAP" and found.summaries["frozen", 1].no_gap == ("q_o_proj",)
    assert analysis_r1.ranking(found.summaries["frozen", 1]) == []
    key = "share/launch/mxfp4/4096x4096/m1/cold_graph"
    assert "cannot be told from 0" in found.constants.missing[key]
    assert analysis_r1.to_csv(found.causes).count("NO_GAP") > 8


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("probe/launch_floor", "probe/launch_floor was not timed"),
        ("testbed/-weight_load", "1 of 34 arms are missing: testbed/-weight_load"),
    ],
)
def test_a_cell_that_cannot_be_split_is_named_with_the_reason(small, kernel, reason):
    found = analysed(small(without=[(kernel, "q_o_proj", 1)]))
    assert found.found == () and found.summaries == {}
    assert found.refused == {"mxfp4 q_o_proj 4096x4096 M=1 cold_graph": reason}


def test_a_lost_cell_makes_the_whole_missing_with_its_reason(campaign):
    lost = made.campaign(
        ms=(1,),
        regimes=("cold_graph",),
        causes=False,
        without=[("probe/launch_floor", "kv_gqa", 1)],
    )
    found = analysed(lost)
    why = found.constants.missing["share/launch"]
    assert "no cell of kv_gqa" in why and "probe/launch_floor was not timed" in why
    assert "no cell of kv_gqa" in found.constants.missing["largest_residual_fraction_m1"]
    assert found.summaries["frozen", 1].shapes == tuple(
        s["name"] for s in FROZEN if s["name"] != "kv_gqa"
    )


def test_a_testbed_that_failed_its_checks_is_not_decomposed(small):
    whole = small()
    changed = [
        c
        if c.kernel != FULL
        else type(c)(**{**vars(c), "correctness": "not_applicable", "time": None})
        for c in whole.cells
    ]
    found, refused = analysis_r1.decompositions(
        type("C", (), {**vars(whole), "cells": changed})(),
        decomposition.gather(records.block_times(whole.samples)),
        exact,
    )
    assert found == [] and "has not passed" in next(iter(refused.values()))


def test_without_the_peer_the_testbed_is_split_all_the_same(small):
    (d,) = analysed(small(peers={})).found
    assert d.production is None and d.beyond is None and d.verdict == "CLOSED"


def test_another_rung_is_refused(small):
    whole = small()
    with pytest.raises(ValueError, match="R0, not of R1"):
        analyse(type("C", (), {**vars(whole), "rung": "R0"})(), "x", made.SHAPES)


def test_the_clock_is_zero_with_the_error_of_its_readings(small):
    cell = Cell("mxfp4", "q_o_proj", 4096, 4096, 1, "cold_graph")
    place = {"shape": "q_o_proj", "N": 4096, "K": 4096, "M": 1, "regime": "cold_graph"}
    none = pd.Series([5.0, 5.0, 5.0, 5.0])

    def term(*clocks):
        return analysis_r1.clock_term(
            cell,
            none,
            pd.DataFrame(
                [place | {"sm_clock_mhz": c} for c in clocks] or [place | {"sm_clock_mhz": None}]
            ),
        )

    steady, unknown, loose = term(1980.0, 1980.0), term(), term(1980.0, 1960.0, 1970.0)
    assert (steady.mean, steady.se) == (unknown.mean, unknown.se) == (0.0, 0.0)
    assert loose.mean == 0 and loose.se == pytest.approx(5.0 * 10 / 1970 / 2) and loose.df == 2
    other = pd.DataFrame([place | {"M": 16, "sm_clock_mhz": c} for c in (1980.0, 1500.0)])
    assert analysis_r1.clock_term(cell, none, other).se == 0


def test_the_clock_of_a_cell_is_that_of_the_variant_without_factors(small):
    """A clock of another speed costs what runs: the error scales with the time of none, not with that of the whole."""
    (d,) = analysed(small(clocks=(1980.0, 1960.0))).found
    clock = next(c for c in d.causes if c.name == "clock")
    none = (
        d.floor.value
        + (made.SHARES["launch"] + made.SHARES["grid_fill"] + made.RESIDUAL) * d.gap.value
    )
    full = d.full.value
    for time, same in ((none, True), (full, False)):
        spread = 10 / 1970  # half of the readings at either clock
        error = time * spread / math.sqrt(d.n_blocks)
        assert (clock.amount.se == pytest.approx(error, rel=0.02)) is same


# Constants.


def test_constants_are_what_the_campaign_was_made_of(found):
    value = {name: c["value"] for name, c in found.constants.found.items()}
    assert value["share/launch"] == pytest.approx(0.12)
    assert value["share/dequant_issue/mxfp4/1024x4096/m64/cold_graph"] == pytest.approx(0.2)
    bare = made.SHARES["launch"] + made.SHARES["grid_fill"] + made.RESIDUAL
    for m in (1, 16, 64):
        assert value[f"largest_residual_fraction_m{m}"] == pytest.approx(bare)
        assert value[f"largest_residual_after_terms_fraction_m{m}"] == pytest.approx(made.RESIDUAL)
    assert value["issue_slots_per_64_weights_testbed"] == 7.25
    assert value["dequant_instructions_per_64_weights_testbed"] == 3.25
    assert value["nvfp4_over_mxfp4_dequant_time"] == pytest.approx(made.NVFP4_DEQUANT)
    assert value["looped_over_graphed_testbed_2880_m1"] == pytest.approx(made.LOOPED)
    record = made.accuracy_record()
    name = "weight_error_mxfp4_over_nvfp4"
    assert value[name] == accuracy.constants(record)[name]["value"]
    assert found.constants.found[name]["campaign"] == accuracy.record_id(record)
    assert found.constants.missing == {}
    assert all(map(analysis_r1.gives, (n for n in value if not n.startswith("share/"))))
    assert not analysis_r1.gives("read_bandwidth_tbps") and not analysis_r1.gives(None)


def test_counts_that_disagree_are_no_constant(small):
    whole = small()
    rows = [{**row, "shape": "kv_gqa", "value": row["value"] + 1} for row in whole.counters]
    both = type("C", (), {**vars(whole), "counters": (*whole.counters, *rows)})()
    why = analysed(both).constants.missing["issue_slots_per_64_weights_testbed"]
    assert why.startswith("2 values [7.25, 8.25]")


def variants_of(mx_cost, nv_cost, noise=0.0, n=6, shapes=("a",)):
    rng = np.random.default_rng(3)
    out = {}
    for shape in shapes:
        point = Point(shape, 128, 128, 1, "cold_graph")
        for fmt, cost in (("mxfp4", mx_cost), ("nvfp4", nv_cost)):
            full = 10 + noise * rng.normal(size=n)
            times = {FULL: full, "testbed/-dequant_issue": full - cost - noise * rng.normal(size=n)}
            times |= {"stream_read": np.full(n, 5.0)}
            out[fmt, point] = np.log(pd.DataFrame(times))
    return out


def test_the_dequantisation_ratio_is_one_of_sums_in_units_of_the_floor():
    ratio, how = nvfp4_over_mxfp4(variants_of(2.0, 3.0, shapes=("a", "b")))
    assert ratio.value == pytest.approx(1.5) and ratio.se == pytest.approx(0) and "over a, b" in how
    ratio, _ = nvfp4_over_mxfp4(variants_of(2.0, 3.0, noise=0.05, shapes=("a", "b")))
    low, high = ratio.interval()
    assert low < 1.5 < high and high - low < 0.3


def test_a_cost_that_cannot_be_told_from_0_divides_nothing():
    ratio, why = nvfp4_over_mxfp4(variants_of(0.0, 1.0, noise=0.2))
    assert ratio is None and "cannot be told from 0 on a at M=1" in why
    only = {k: v for k, v in variants_of(1.0, 1.0).items() if k[0] == "nvfp4"}
    assert nvfp4_over_mxfp4(only)[1].startswith("no point at M=1")


# Tables.


def test_the_production_gap_to_the_digit(found):
    frame = found.production
    ratios = [
        made.dense_us("fp8_e4m3", s["N"], s["K"]) / (1.5 * made.floor_us("mxfp4", s["N"], s["K"]))
        for s in made.SHAPES
    ]
    own = frame[(frame["kernel"] == PRODUCTION) & (frame["format"] == "mxfp4") & (frame["M"] == 1)]
    cold = own[(own["regime"] == "cold_graph") & (own["over"] == "all")].set_index("against")
    fp8 = cold.loc["cublaslt_fp8"]
    assert fp8["speed"] == pytest.approx(geomean(ratios)) and fp8["shapes"] == 9
    assert fp8["lowest"] == pytest.approx(min(ratios)) and fp8["highest"] == pytest.approx(
        max(ratios)
    )
    assert (fp8["lowest_shape"], fp8["highest_shape"]) == ("kv_gqa", "llama70b_gate_up")
    assert fp8["byte_ratio"] == pytest.approx(8 / 4.25)
    assert fp8["realised"] == pytest.approx(geomean(ratios) * 4.25 / 8)
    assert cold.loc["stream_read", "speed"] == pytest.approx(1 / 1.5)
    assert cold.loc["stream_read", "realised"] == cold.loc["stream_read", "speed"]
    assert cold.loc["cublaslt_bf16", "byte_ratio"] == pytest.approx(16 / 4.25)
    # All arms of a regime are scaled alike, so the speed stays.
    assert own[own["against"] == "cublaslt_fp8"].groupby("over")["speed"].nunique().max() <= 3
    assert set(frame["M"]) == {1, 2, 4, 16, 64, 256}
    assert set(frame["kernel"]) == {k for k, _ in made.PEERS} | {FULL}
    assert set(frame.loc[frame["kernel"] == FULL, "M"]) == {1, 16, 64}
    assert format_speeds(frame, ["mxfp4", "nvfp4", "int4_g64"]) == {
        "mxfp4": pytest.approx(fp8["speed"]), "nvfp4": pytest.approx(
            frame[(frame["kernel"] == PRODUCTION) & (frame["format"] == "nvfp4") & (frame["M"] == 1)
                  & (frame["regime"] == "cold_graph") & (frame["over"] == "all")
                  & (frame["against"] == "cublaslt_fp8")]["speed"].iloc[0]), "int4_g64": None,
    }  # fmt: skip


def test_what_is_wrong_by_design_is_in_no_table_of_performance(found, campaign, tmp_path):
    wrong = {c.kernel for c in campaign.cells if c.correctness == "invalid_by_design"}
    assert "testbed/none" in wrong and "probe/balanced_grid" in wrong and len(wrong) == 33
    for frame in (found.production, found.experiments):
        assert not wrong & set(frame["kernel"])
    times = ArmTimes(campaign)
    assert not wrong & {arm.kernel for arm, _, _ in times}
    folder = records.write(campaign, tmp_path)
    table = cells.table([folder])
    assert not wrong & set(table["kernel"]) and FULL in set(table["kernel"])


def test_a_twin_enters_no_time(small):
    """testbed/full#2 shows whether the harness is steady; it is no second leg of testbed/full."""
    made_up = small(noise=0.01)
    own = made_up.samples[made_up.samples["arm"] == f"{FULL}/mxfp4"]
    alone = replace(made_up, samples=made_up.samples[~made_up.samples["arm"].str.endswith("#2")])
    assert made_up.samples["arm"].eq(f"{FULL}/mxfp4#2").sum() == len(own) > 0
    arm, point = Arm(FULL, "mxfp4"), Point("q_o_proj", 4096, 4096, 1, "cold_graph")
    assert ArmTimes(made_up).time(arm, point) == ArmTimes(alone).time(arm, point)


def test_experiments_to_the_digit(found):
    frame = found.experiments
    assert set(frame["experiment"]) == {
        "waves", "split_k", "stages", "warps", "sequence", "staging", "tensor_parallel", "formats", "chain", "launch",
    }  # fmt: skip

    def one(**where):
        rows = frame
        for name, value in where.items():
            rows = rows[rows[name] == value]
        assert len(rows) == 1, where
        return rows.iloc[0]

    assert one(experiment="split_k", setting="1")["ratio"] == pytest.approx(2.0 / 1.6)
    unchanged = one(experiment="split_k", setting="unchanged")
    assert unchanged["kernel"] == FULL and math.isnan(unchanged["ratio"])
    assert unchanged["time_us"] == pytest.approx(1.6 * made.floor_us("mxfp4", 4096, 4096))
    size = weight_bytes("mxfp4", 4096, 4096)
    assert unchanged["read_tbps"] == pytest.approx(size / unchanged["time_us"] / 1e6)
    assert one(experiment="waves", setting="N=8448, as planned")["ratio"] == pytest.approx(1.7)
    assert one(experiment="waves", setting="N=8448, no split of K")["ratio"] == pytest.approx(2.1)
    assert one(experiment="chain")["ratio"] == pytest.approx(made.CHAINED)
    shard = one(
        experiment="tensor_parallel", setting="1/8 of gate_up", kernel=FULL, against="gate_up / 8"
    )
    whole = made.floor_us("mxfp4", 14336, 4096)
    assert shard["ratio"] == pytest.approx(8 * made.floor_us("mxfp4", 1792, 4096) / whole)
    # A quarter of q_o_proj has the N and K of kv_gqa, and was measured under that name.
    alias = one(experiment="tensor_parallel", against="q_o_proj / 4", kernel=FULL, M=1)
    assert alias["shape"] == "kv_gqa"
    cost = one(experiment="formats", setting="cost of dequantisation", format="nvfp4", M=1)
    gap = made.GAP * made.floor_us("mxfp4", 4096, 4096)
    assert cost["cost_us"] == pytest.approx(made.NVFP4_DEQUANT * 0.2 * gap)
    assert math.isnan(cost["time_us"]) and math.isnan(cost["ratio"])
    looped = one(experiment="launch", kernel=PRODUCTION, format="nvfp4", M=4)
    assert looped["ratio"] == pytest.approx(made.LOOPED) and looped["shape"] == "9 shapes"
    assert pd.isna(looped["N"]) and math.isnan(looped["time_us"])


def test_a_launch_is_read_from_its_line():
    line = "testbed_mxfp4_t8_s4_w4x2_f31_shift_mask, grid 64x2 x 256, split 2, 4 B shared memory, 2 blocks an SM"
    assert launched_grid(line) == 128 and launched_grid("candidate 3") is None
    # 2 blocks x 4 stages x 64 rows x 256 k at 0.53125 bytes.
    assert ring_bytes(line, "mxfp4") == 2 * 4 * 64 * 256 * 17 // 32
    assert ring_bytes("candidate 3", "mxfp4") is None


def test_the_table_of_causes_holds_every_cell_and_every_mean(found):
    frame = found.causes
    assert tuple(frame.columns) == analysis_r1.TABLE_COLUMNS
    cell = frame[frame["over"] == "cell"]
    # Eight causes, residual, beyond the testbed, and the closure by counters.
    assert len(cell) == 27 * 11 and len(frame) == 27 * 11 + 6 * 10
    closure = cell[cell["kind"] == "closure"]
    assert (closure["share"].abs() < 1e-12).all() and set(closure["verdict"]) == {"CLOSED"}
    mean = frame[(frame["over"] == "large") & (frame["M"] == 16)].set_index("cause")
    assert mean.loc["weight_load", "share"] == pytest.approx(0.25)
    assert mean.loc["weight_load", "over_floor"] == pytest.approx(0.25 * made.GAP)
    assert mean.loc["weight_load", "shapes"] == 3 and pd.isna(mean.loc["weight_load", "N"])
    pairs = analysis_r1.pair_table(found)
    assert len(pairs) == 27 * 10 * 2 and tuple(pairs.columns) == analysis_r1.PAIR_COLUMNS


def test_tables_are_the_same_text_again_and_exist_before_any_campaign(found, campaign):
    again = analysed(campaign, record=made.accuracy_record())
    for name, table in analysis_r1.tables(found).items():
        text = analysis_r1.to_csv(table)
        assert text == analysis_r1.to_csv(analysis_r1.tables(again)[name])
        empty = analysis_r1.to_csv(analysis_r1.tables(None)[name])
        assert empty == text.splitlines()[0] + "\n"


def test_ranking_has_an_order_only_where_intervals_leave_one(found):
    ranked = analysis_r1.ranking(found.summaries["frozen", 1])
    assert [r.name for r in ranked][:3] == ["weight_load", "dequant_issue", "grid_fill"]
    # layout_staging and epilogue_reduction were made equal.
    tied = {r.name for r in ranked if r.then == "inconclusive"}
    assert len(tied) == 1 and tied < {"layout_staging", "epilogue_reduction"}
    assert not analysis_r1.is_conclusive(ranked) and not analysis_r1.is_conclusive([])
    assert analysis_r1.is_conclusive([r for r in ranked if r.name not in tied])


# Go or no-go.


def test_the_decision_follows_the_room_above_the_floor(found):
    d = found.decision
    room = geomean(
        [
            1.2 * made.floor_us("fp8_e4m3", s["N"], s["K"]) / made.floor_us("mxfp4", s["N"], s["K"])
            for s in FROZEN
        ]
    )
    assert d.word == "GO" and d.room.value == d.room_m1.value == pytest.approx(room)
    assert d.need == pytest.approx(room / CLAIMED)
    reached = {name: ratio.value for name, ratio in d.reached}
    assert reached[PRODUCTION] == pytest.approx(room / 1.5)
    assert reached[FULL] == pytest.approx(room / (1 + made.GAP))
    assert reached["testbed/none"] == pytest.approx(room / (1 + made.GAP * 0.3))
    assert reached["probe/balanced_grid"] == pytest.approx(room / (1 + made.GAP * 0.17))


@pytest.mark.parametrize(
    ("speed", "word"), [(1.4, "NO-GO"), (1.1, "NO-GO"), (1.6, "GO"), (None, "OPEN")]
)
def test_no_room_is_a_no_go_and_no_floor_is_open(speed, word):
    class Times:
        def ratio(self, top, bottom, factor=1.0):
            return None if speed is None else Estimate(math.log(speed), 0.001, 5)

        def has(self, arm, point):
            return True

    assert decide(Times(), {}, made.SHAPES).word == word


class TimesByM:
    """Speeds over FP8 that depend on M alone."""

    def __init__(self, **speeds: float) -> None:
        self.speeds = {int(name[1:]): speed for name, speed in speeds.items()}

    def ratio(self, top, bottom, factor=1.0):
        return Estimate(math.log(self.speeds[top[1].M]), 0.001, 5)

    def has(self, arm, point):
        return True


def test_the_room_is_that_of_one_two_and_four_tokens_together():
    decision = decide(TimesByM(m1=1.8, m2=1.6, m4=1.2), {}, made.SHAPES)
    assert decision.room.value == pytest.approx((1.8 * 1.6 * 1.2) ** (1 / 3))
    assert decision.room_m1.value == pytest.approx(1.8) and decision.word == "GO"
    assert decide(TimesByM(m1=1.8, m2=1.6, m4=1.0), {}, made.SHAPES).word == "NO-GO"


def test_one_token_below_the_falsifying_speed_is_a_no_go_whatever_the_others():
    decision = decide(TimesByM(m1=1.1, m2=2.0, m4=2.0), {}, made.SHAPES)
    assert decision.room.interval().low > CLAIMED and decision.word == "NO-GO"


def test_an_interval_across_the_claim_is_open():
    class Times:
        def ratio(self, top, bottom, factor=1.0):
            return Estimate(math.log(1.5), 0.5, 5)

    assert decide(Times(), {}, made.SHAPES).word == "OPEN"


def test_a_bound_needs_every_frozen_shape(small):
    whole = small()
    times = ArmTimes(whole)
    logs = {
        Point(c.shape, c.N, c.K, c.M, c.regime): frame
        for c, frame in decomposition.gather(records.block_times(whole.samples)).items()
    }
    bounds = bounds_of(times, logs, made.SHAPES)
    assert {name: len(parts) for name, parts in bounds.items()} == {
        "testbed/none": 1,
        "probe/balanced_grid": 1,
    }
    assert decide(times, bounds, made.SHAPES).reached == ()


def test_ratios_pair_by_block_at_one_point_and_are_independent_of_two(campaign):
    times = ArmTimes(campaign)
    point = Point("q_o_proj", 4096, 4096, 1, "cold_graph")
    peer = Arm(PRODUCTION, "mxfp4")
    ratio = times.ratio((FP8, point), (peer, point))
    assert ratio.df == 3
    other = times.ratio((peer, point._replace(regime="cold_loop")), (peer, point), factor=2.0)
    assert other.value == pytest.approx(2 * made.LOOPED)
    assert times.ratio((peer, point), (Arm("peer/none", "mxfp4"), point)) is None
    assert times.time(Arm("peer/none", "mxfp4"), point) is None


def test_peers_that_are_not_there_are_named(found):
    assert found.missing_peers == (
        ("peer/marlin_fp4", "mxfp4", "NOT_INSTALLED: no module named vllm"),
        ("peer/marlin_fp4", "nvfp4", "NOT_INSTALLED: no module named vllm"),
    )


# Verdicts.


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """The registered claims of R1 judged by a noisy campaign on disk, with the constants that follow from its legs."""
    folder = records.write(
        made.campaign(noise=0.004, blocks=6, ms=(1, 2, 4, 16, 64, 256, 1024)),
        tmp_path_factory.mktemp("data"),
    )
    prereg = Path(__file__).resolve().parents[2] / "prereg"
    registered = registry.load_registered(prereg)
    mine = [c for c in registered.claims if c.rung == "R1"]
    ids = [c.id for c in mine]

    def computed(path):
        record = made.accuracy_record()
        return analyse(records.load(path), path.name, made.SHAPES, record, exact).constants

    evidence = verdicts.Evidence.from_campaigns([folder], computed={"R1": computed})
    return {v.claim: v for v in verdicts.judge(mine, evidence, registered=ids)}, evidence


def test_every_claim_of_r1_has_a_verdict_and_a_number(judged):
    found, _ = judged
    assert len(found) == 186
    undecided = [
        v.claim for v in found.values() if v.observed is None or v.verdict not in verdicts.DECIDED
    ]
    assert undecided == []


def test_shares_and_constants_reach_their_claims(judged):
    found, _ = judged
    share = found["r1.cause.launch.large.m16"]
    assert share.verdict == "HIT" and share.ci_low < 0.12 < share.ci_high
    assert found["r1.p4.cause_ranking"].verdict == "REFUTED"
    slots = found["r1.cause_detail.issue_slots_per_64_weights_testbed"]
    assert slots.verdict == "HIT" and slots.observed == slots.ci_low == slots.ci_high == 7.25
    error = found["r1.p5.mxfp4_less_accurate"]
    assert error.verdict == "CONFIRMED" and error.campaign.startswith("all-minilm-l6-v2-")
    looped = found["r1.cause_detail.looped_over_graphed_testbed_2880_m1"]
    assert looped.verdict == "HIT" and looped.observed == pytest.approx(made.LOOPED, rel=0.01)


def test_a_recorded_interval_keeps_its_own_ends_where_it_decides(judged):
    found, evidence = judged
    constant = evidence.constants["largest_residual_fraction_m1"]
    verdict = found["r1.closure.residual.m1"]
    # Three claims in a family: Holm widens the interval, but each end from its own distance.
    assert verdict.verdict == "REFUTED" and verdict.observed == pytest.approx(constant["value"])
    up = (verdict.ci_high - constant["value"]) / (constant["ci_high"] - constant["value"])
    down = (constant["value"] - verdict.ci_low) / (constant["value"] - constant["ci_low"])
    assert up == pytest.approx(down) and up > 1
    alone = verdicts.Evidence(constants={"largest_residual_fraction_m1": constant})
    prereg = Path(__file__).resolve().parents[2] / "prereg"
    claim = next(c for c in registry.load_registered(prereg).claims if c.id == verdict.claim)
    (v,) = verdicts.judge([claim], alone)
    assert (v.ci_low, v.ci_high) == pytest.approx(
        (constant["ci_low"], constant["ci_high"]), rel=1e-12
    )


def test_what_cannot_be_computed_says_why_in_the_verdict():
    why = "the gap cannot be told from 0"
    evidence = verdicts.Evidence(missing={"largest_residual_fraction_m1": why})
    prereg = Path(__file__).resolve().parents[2] / "prereg"
    claim = next(
        c for c in registry.load_registered(prereg).claims if c.id == "r1.closure.residual.m1"
    )
    (v,) = verdicts.judge([claim], evidence)
    assert v.verdict == "NOT_RUN" and v.reason.endswith(why)


def test_an_unsound_campaign_spoils_the_claims_on_what_follows_from_its_legs(tmp_path):
    folder = records.write(
        made.campaign(shapes=[Q], ms=(1,), regimes=("cold_graph",), causes=False), tmp_path
    )
    prereg = Path(__file__).resolve().parents[2] / "prereg"
    claim = next(
        c for c in registry.load_registered(prereg).claims if c.id == "r1.closure.residual.m1"
    )

    def fails(path):
        raise records.CampaignError("edited")

    def gives(path):
        plain = {"unit": "fraction", "ci_low": None, "ci_high": None, "n": None, "value": 0.05}
        return {claim.estimand.name: plain}, {}

    for how, word in (("invalid", "INVALID"), ("tampered", "TAMPERED")):
        for compute in (fails, gives):
            evidence = verdicts.Evidence.from_campaigns(
                [folder], computed={"R1": compute}, **{how: {folder.name: "spoilt"}}
            )
            (v,) = verdicts.judge([claim], evidence)
            assert (v.verdict, v.reason, v.campaign) == (word, "spoilt", folder.name)
    with pytest.raises(records.CampaignError):
        verdicts.Evidence.from_campaigns([folder], computed={"R1": fails})


def test_a_claim_asks_the_campaigns_of_its_own_rung_first():
    prereg = Path(__file__).resolve().parents[2] / "prereg"
    claim = next(
        c for c in registry.load_registered(prereg).claims if c.id == "r1.closure.residual.m1"
    )
    name = claim.estimand.name
    plain = {"unit": "fraction", "ci_low": None, "ci_high": None, "n": None}
    newer, own = (
        plain | {"value": 0.5, "campaign": "r2-x"},
        plain | {"value": 0.05, "campaign": "r1-x"},
    )
    evidence = verdicts.Evidence(
        constants={name: newer}, own_constants={("R1", name): own}, order=("r2-x", "r1-x"),
        rungs={"r2-x": "R2", "r1-x": "R1"},
    )  # fmt: skip
    (v,) = verdicts.judge([claim], evidence)
    assert v.campaign == "r1-x" and v.verdict == "CONFIRMED"
    assert evidence.asked("R1") == ["r1-x", "r2-x"] and evidence.asked("R0") == ["r2-x", "r1-x"]


def test_a_protocol_of_its_own_is_held_against_its_own_rung(tmp_path):
    folder = records.write(
        made.campaign(shapes=[Q], ms=(1,), regimes=("cold_graph",), causes=False), tmp_path
    )
    sha = json.loads((folder / "campaign.json").read_text())["protocol_sha256"]

    def deviations(frozen):
        return verdicts.Evidence.from_campaigns([folder], protocol_sha256=frozen).deviations

    assert deviations({"R0": "a" * 64, "R1": sha}) == {}
    assert "is not the frozen aaaa" in deviations({"R1": "a" * 64})[folder.name]
    assert deviations({"R1": ""})[folder.name].endswith("is not frozen")


def test_computed_constants_prove_their_order_as_recorded_ones_do():
    prereg = Path(__file__).resolve().parents[2] / "prereg"
    claims = {c.id: c for c in registry.load_registered(prereg).claims}
    answers = {
        r: audit._Answers.of({"rung": r, "constants": {}, "cells": [], "checks": []})
        for r in ("R0", "R1")
    }
    for key in (
        "r1.cause.launch.frozen.m1",
        "r1.p4.cause_ranking",
        "r1.closure.residual.m16",
        "r1.p5.mxfp4_less_accurate",
    ):
        assert answers["R1"].hold(claims[key]) and not answers["R0"].hold(claims[key])
    assert not answers["R1"].hold(claims["r0.p2.crossover_m.mxfp4"])
