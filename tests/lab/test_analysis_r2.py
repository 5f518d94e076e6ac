"""The analysis of a made-up R2 campaign gives the truth that the campaign was made from."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import recorded
import synthetic_r2 as made
from synthetic_r1 import floor_us

from lab import (
    analysis_r2,
    audit,
    bars,
    bars_r2,
    page,
    profile_r2,
    records,
    registry,
    report_audit,
    statistics,
    verdicts,
)
from lab.analysis_r2 import CHAIN, HOST, M16_OVER_M1, PACK, REGRET
from lab.arm_times import Point
from lab.decode_r2 import Decode, Link
from lab.decomposition import Constants
from lab.profile_r2 import Profile
from lab.statistics import Estimate, from_interval

PREREG = Path(__file__).resolve().parents[2] / "prereg"
#: One shape of a rung, without chain or profiler.
SMALL = {"chain": False, "counters": False, "ms": (1, 16)}


def analysed(**how) -> analysis_r2.Analysis:
    return analysis_r2.analyse(made.campaign(**how), "r2-x", made.SHAPES)


@pytest.fixture(scope="module")
def exact() -> analysis_r2.Analysis:
    return analysed()


def cell(found: analysis_r2.Analysis, fmt: str, shape: str, m: int) -> Decode:
    (one,) = [d for d in found.decode if (d.format, d.point.shape, d.point.M) == (fmt, shape, m)]
    return one


def bar(found: analysis_r2.Analysis, name: str, fmt: str | None = None) -> bars_r2.Bar:
    (one,) = [b for b in found.bars if (b.id, b.format) == (name, fmt)]
    return one


# Cells.


def test_every_cell_is_there_in_the_order_of_formats_shapes_and_m(exact):
    assert len(exact.decode) == 45 + 45 + 15
    first = [(d.format, d.point.shape, d.point.M) for d in exact.decode[:6]]
    assert first[0] == ("mxfp4", "q_o_proj", 1) and first[5] == ("mxfp4", "kv_gqa", 1)
    assert {d.format for d in exact.decode[-15:]} == {"int4_g128"}


def test_a_cell_has_the_ratios_that_it_was_made_with(exact):
    n, k = 14336, 4096
    d = cell(exact, "nvfp4", "gate_up", 4)
    ours = made.ours_us("nvfp4", n, k, 4)
    assert d.time.value == pytest.approx(ours)
    assert d.over_floor.value == pytest.approx(1.12 * 1.02)
    assert d.over_fp8.value == pytest.approx(made.dense_us("fp8_e4m3", n, k) / ours)
    assert d.over_bf16.value == pytest.approx(made.dense_us("bf16", n, k) / ours)
    assert d.over_mxfp4.value == pytest.approx(ours / made.ours_us("mxfp4", n, k, 4))
    assert d.best_peer == "peer/humming_bf16" and set(d.peers) == {"peer/humming_bf16"}
    assert d.peers["peer/humming_bf16"].value == pytest.approx(
        1.55 * floor_us("nvfp4", n, k) / ours
    )
    assert d.reach.value == pytest.approx(made.dense_us("fp8_e4m3", n, k) / floor_us("nvfp4", n, k))
    assert d.regret is None and d.invariant is None


def test_the_best_peer_is_the_fastest_one(exact):
    d = cell(exact, "mxfp4", "gate_up", 1)
    assert d.best_peer == "peer/humming_fp8" and len(d.peers) == 2
    assert d.regret.value == pytest.approx(1 / made.SEARCHED)
    assert d.invariant.value == pytest.approx(made.INVARIANT)


def test_what_was_not_timed_is_none_and_not_a_number():
    found = analysed(without=("cublaslt_fp8", "stream_read"), peers={}, **SMALL)
    d = cell(found, "mxfp4", "gate_up", 1)
    assert (d.over_fp8, d.over_floor, d.reach, d.best_peer) == (None, None, None, None)
    table = analysis_r2.decode_table(found)
    assert table["over_fp8"].isna().all() and table["peer_us"].isna().all()


def test_another_rung_is_refused():
    import synthetic_r1

    other = synthetic_r1.campaign(ms=(1,), regimes=("cold_graph",), causes=False, blocks=2)
    with pytest.raises(ValueError, match="is a campaign of R1, not of R2"):
        analysis_r2.analyse(other, "r1-x", made.SHAPES)


# Ablation.


def test_steps_run_from_the_naive_kernel_to_the_product(exact):
    own = [s for s in exact.steps if (s.point.shape, s.point.M) == ("q_o_proj", 16)]
    assert [s.kernel for s in own] == [f"qgemv_mx/step{i}" for i in range(5)] + ["qgemv_mx"]
    assert own[0].over_previous is None and own[-1].over_full is None
    times = [*made.STEPS, 1.0]
    for i, step in enumerate(own[1:], 1):
        assert step.over_previous.value == pytest.approx(times[i] / times[i - 1])
    assert own[1].over_full.value == pytest.approx(made.STEPS[1])
    assert len(exact.steps) == 6 * 6 and len(exact.elements) == 6
    assert exact.elements[0].over_full.value == pytest.approx(1.3)


def test_ten_steps_are_in_the_order_of_their_numbers(monkeypatch):
    monkeypatch.setattr(made, "STEPS", tuple(3.0 - 0.1 * i for i in range(12)))
    found = analysed(**SMALL)
    own = [s.kernel for s in found.steps if (s.point.shape, s.point.M) == ("q_o_proj", 1)]
    assert own[9:12] == ["qgemv_mx/step9", "qgemv_mx/step10", "qgemv_mx/step11"]


# Chain and constants.


def test_the_chain_is_held_against_bytes_over_the_asymptote(exact):
    chained = [x for x in exact.chain if (x.kernel, x.regime) == ("qgemv_mx", "chain_pdl")]
    assert [x.m for x in chained] == [1, 4, 16]
    for x in chained:
        assert x.over_asymptote.value == pytest.approx(1.15 * made.growth(x.m))
        assert x.over_plain.value == pytest.approx(1.15 / 1.30)
    assert exact.constants.found[CHAIN]["value"] == pytest.approx(1.15 * 1.04)
    assert exact.bandwidth.value == pytest.approx(made.BANDWIDTH) and exact.bandwidth_from == "r2-x"


def test_constants_are_largest_or_mean_as_their_claims_say(exact):
    found = exact.constants.found
    assert exact.constants.missing == {}
    assert found[M16_OVER_M1]["value"] == pytest.approx(1.04)
    assert found[REGRET]["value"] == pytest.approx(1 / made.SEARCHED)
    assert "45 cells" in found[REGRET]["how"] and "9 shapes" in found[M16_OVER_M1]["how"]
    assert found[HOST]["value"] == 8.0 and found[PACK]["value"] == 31.0


def test_the_largest_growth_is_that_of_the_worst_shape():
    found = analysed(slow={("mxfp4", "kv_gqa", 16): 1.2}, **SMALL)
    assert found.constants.found[M16_OVER_M1]["value"] == pytest.approx(1.04 * 1.2)
    assert bar(found, "m16_over_m1", "mxfp4").worst.shape == "kv_gqa"


def test_what_cannot_be_computed_says_why():
    found = analysed(
        ms=(1,), chain=False, counters=False, constants={}, without=("qgemv_mx/searched",)
    ).constants
    assert found.found == {}
    assert "at M=1 and M=16 on q_o_proj" in found.missing[M16_OVER_M1]
    assert found.missing[REGRET] == "qgemv_mx/searched was not timed"
    assert "not timed on decode_chain" in found.missing[CHAIN]
    assert found.missing[HOST] == f"{HOST} was not recorded"
    assert "was not recorded" in found.missing[PACK]


def test_a_recorded_host_time_goes_before_its_parts():
    constants = made.host_constants() | {HOST: made.constant(6.0, "us")}
    assert analysed(constants=constants, **SMALL).constants.found[HOST]["value"] == 6.0


def test_only_the_constants_of_r2_are_given():
    assert all(map(analysis_r2.gives, (CHAIN, HOST, M16_OVER_M1, PACK, REGRET)))
    assert not analysis_r2.gives("read_bandwidth_tbps") and not analysis_r2.gives(None)


# The asymptote of another campaign.


def shelf(folder: Path, **headers) -> dict[str, Path]:
    """Campaigns of R0 with an asymptote, by name; their headers change."""
    found = {}
    for name, (value, changes) in headers.items():
        partial = records.PartialCampaign.open(folder / name, recorded.header(**changes))
        partial.append_point("q_o_proj/M1", **recorded.point())
        partial.add_constants({"read_bandwidth_tbps": made.constant(value, "TB/s", 0.0)})
        found[name] = records.finalise(partial, folder / "data")
    return found


def test_without_an_asymptote_the_newest_earlier_one_of_the_device_stands_in(tmp_path):
    device = recorded.header()["device"]
    other = {"device": device | {"name": "ANOTHER GPU", "uuid": "GPU-9"}}
    twin = {"device": device | {"uuid": "GPU-7"}, "created_utc": "2026-01-02T09:00:00Z"}
    later = {"created_utc": "2026-01-04T00:00:00Z"}
    found = shelf(
        tmp_path,
        old=(4.0, {}),
        new=(4.2, {"created_utc": "2026-01-02T08:00:00Z"}),
        twin=(4.6, twin),
        later=(5.0, later),
        other=(9.0, other),
    )
    campaign = made.campaign(constants={}, ms=(1,), counters=False)
    folder = records.write(campaign, tmp_path / "data")
    got = analysis_r2.of_folder(folder, made.SHAPES)
    assert got.bandwidth.value == pytest.approx(4.2) and got.bandwidth_from == found["new"].name
    assert got.constants.found[CHAIN]["value"] == pytest.approx(1.15 * 1.04 * 4.2 / made.BANDWIDTH)


def test_without_any_asymptote_the_chain_has_times_and_no_ratio(tmp_path):
    folder = records.write(made.campaign(constants={}, ms=(1,)), tmp_path)
    got = analysis_r2.of_folder(folder, made.SHAPES)
    assert "read_bandwidth_tbps is in no campaign" in got.constants.missing[CHAIN]
    assert len(got.chain) == 9 and all(x.over_asymptote is None for x in got.chain)
    assert bar(got, "chain", "mxfp4").status == bars_r2.NOT_RUN
    assert analysis_r2.chain_table(got)["asymptote_us"].isna().all()


def test_the_error_of_the_asymptote_widens_the_interval():
    wide = made.host_constants() | {"read_bandwidth_tbps": made.constant(4.4, "TB/s", 0.03)}
    low, high = (
        analysed(constants=wide).constants.found[CHAIN][f"ci_{e}"] for e in ("low", "high")
    )
    assert low < 0.98 * 1.196 and high > 1.02 * 1.196


# Bars.


def test_a_bar_over_the_worst_cell_is_met_only_when_each_cell_is(exact):
    assert bar(exact, "floor_large", "mxfp4").status == bars_r2.MET
    assert bar(exact, "floor_large", "mxfp4").cells == 25
    assert bar(exact, "floor_small", "nvfp4").cells == 20
    slow = analysed(slow={("mxfp4", "llama70b_qkv", 8): 1.1})
    one = bar(slow, "floor_large", "mxfp4")
    assert (one.status, one.missed, one.worst.shape) == (bars_r2.MISSED, 1, "llama70b_qkv")
    assert one.off == pytest.approx(1.1 * 1.13 / 1.2 - 1, abs=0.01)
    (miss,) = [m for m in slow.misses if m.bar.id == "floor_large"]
    assert (miss.point.shape, miss.point.M, miss.format) == ("llama70b_qkv", 8, "mxfp4")


def test_a_peer_that_is_faster_in_one_cell_is_named():
    found = analysed(peers={("peer/humming_fp8", "mxfp4"): 1.12}, ms=made.MS)
    one = bar(found, "peers", "mxfp4")
    assert one.status == bars_r2.MISSED and "peer/humming_fp8" in one.how
    assert {m.against for m in found.misses if m.bar.id == "peers"} == {"peer/humming_fp8"}
    assert bar(found, "peers", "nvfp4").status == bars_r2.NOT_RUN
    table = analysis_r2.tables(found)["r2_bars"]
    lost = table[(table["row"] == "cell") & (table["bar"] == "peers")]
    assert len(lost) == one.missed == 27 and set(lost["how"]) == {"peer/humming_fp8"}


def test_an_undecided_cell_is_not_counted_as_missed_on_either_side_of_the_limit():
    missed, above, below, met = (
        from_interval(value, value / width, value * width, n=8, log=True)
        for value, width in ((1.30, 1.01), (1.21, 1.02), (1.19, 1.02), (1.10, 1.01))
    )
    parts = [
        bars.Part(Point(name, 1, 1, 1, "cold_graph"), "mxfp4", value, "why")
        for name, value in (("b", below), ("a", above), ("met", met), ("missed", missed))
    ]
    empty = bars_r2.Bar("floor_large", "", "mxfp4", "below", 1.2, "ratio", None)
    one, lost = bars.over_cells(empty, parts, 4)
    assert (one.status, one.cells, one.missed, one.undecided) == (bars_r2.MISSED, 4, 1, 2)
    words = [(m.point.shape, m.status) for m in lost]
    assert words == [("missed", "missed"), ("a", "undecided"), ("b", "undecided")]


def test_the_table_of_bars_counts_missed_and_undecided_cells_apart():
    edge = (
        1.2 / 1.1 / 1.03
    )  # at M = 8 this puts the cell on the limit, and noise on both sides of it
    found = analysed(slow={("mxfp4", "llama70b_qkv", 8): edge}, noise=0.02, blocks=3, chain=False)
    table = analysis_r2.tables(found)["r2_bars"]
    assert list(table.columns)[-2:] == ["undecided", "planned"]
    cells = table[table["row"] == "cell"]
    assert set(cells["status"]) == {"missed", "undecided"}
    for word in ("missed", "undecided"):
        assert (cells[word] == (cells["status"] == word)).all()
    own = table[
        (table["row"] == "bar") & ~table["bar"].isin(["fp8_geomean", "host", "pack", "regret"])
    ]
    for row in own.to_dict("records"):
        mine = cells[(cells["bar"] == row["bar"]) & (cells["format"] == row["format"])]
        assert (row["missed"], row["undecided"]) == tuple(mine[["missed", "undecided"]].sum())
    for b in (b for b in found.bars if b.id == "fp8_geomean"):
        over = [d.over_fp8 for d in found.decode if d.format == b.format]
        assert b.missed == sum(e.interval()[1] < b.limit for e in over)
        assert b.undecided == sum(e.interval()[0] < b.limit <= e.interval()[1] for e in over)


def test_a_bar_about_one_number_counts_itself():
    slow = made.host_constants() | {HOST: made.constant(12.0, "us")}
    host = bar(analysed(constants=slow, **SMALL), "host")
    assert (host.status, host.missed, host.undecided) == (bars_r2.MISSED, 1, 0)


def test_missing_cells_keep_a_bar_from_being_met():
    found = analysed(**SMALL)
    one = bar(found, "floor_large", "mxfp4")
    assert (one.status, one.cells, one.planned) == (bars_r2.UNDECIDED, 10, 25)
    assert one.how == "10 of 25 cells"


@pytest.mark.parametrize(
    ("low", "high", "direction", "word"),
    [
        (1.1, 1.2, "above", "met"),
        (0.8, 0.9, "above", "missed"),
        (0.9, 1.1, "above", "undecided"),
        (0.8, 0.9, "below", "met"),
        (1.1, 1.2, "below", "missed"),
        (0.9, 1.1, "below", "undecided"),
        (1.0, 1.0, "below", "met"),
        (1.0, 1.0, "above", "met"),
    ],
)
def test_the_interval_decides(low, high, direction, word):
    estimate = from_interval(math.sqrt(low * high), low, high, n=8, log=True)
    assert bars_r2.status_of(estimate, direction, 1.0) == word


def test_a_missed_mean_says_how_far_the_floors_would_reach():
    found = analysed()
    reason = bar(found, "fp8_geomean", "mxfp4").reason
    assert reason.startswith("FP8's time over the floor of these bytes is 1.90 in geometric mean: ")
    assert "a kernel at the floor in every cell would reach that, more than 1.88" in reason
    over = statistics.geomean([d.over_floor for d in found.decode if d.format == "mxfp4"]).value
    assert reason.endswith(f"this one takes {page.number(over)} times the floor")
    bare = analysed(without=("stream_read",))
    assert "no floor was measured" in bar(bare, "fp8_geomean", "mxfp4").reason


def links(own: float, gain: float | None, **cold: float) -> list[Link]:
    """A chain at M = 1 over its bound: dependent launches, and kernels in plain launches."""
    plain = [Link(k, 1, "cold_graph", 100, exactly(1.0), exactly(x), None) for k, x in cold.items()]
    paired = None if gain is None else exactly(gain)
    other = Link("stream_read", 16, "cold_graph", 100, exactly(1.0), exactly(9.0), None)
    return [
        *plain,
        other,
        Link("qgemv_mx", 1, "chain_pdl", 100, exactly(1.0), exactly(own), paired),
    ]


REST = ": the rest is what the layers take beyond reading"


@pytest.mark.parametrize(
    ("own", "gain", "end"),
    [
        (2.44, 1.02, REST + "; dependent launches take 1.02 times plain ones"),
        (2.0, 0.935, REST + "; dependent launches save 6.5 % of plain ones"),
        (2.0, None, REST),
        (1.07, None, ""),
    ],
)
def test_the_chain_bar_holds_its_launches_against_a_stream_at_the_same_m(own, gain, end):
    chain = links(own, gain, stream_read=1.08, qgemv_mx=2.39)
    (part,) = bars_r2._chain(chain)[1]
    assert part.reason == (
        "one stream of all the bytes takes 1.08 of the bound, plain launches of the layers 2.39, "
        f"dependent ones {page.number(own)}{end}"
    )


def test_a_missed_chain_without_stream_or_plain_launches_says_so():
    for cold in ({"stream_read": 1.04}, {"qgemv_mx": 1.4}):
        found = bars_r2.judge([], links(1.3, 0.9, **cold), Constants({}, {}), [], made.SHAPES)
        (one,) = [b for b in found[0] if b.id == "chain"]
        assert (one.status, one.missed, len(found[1])) == (bars_r2.MISSED, 1, 1)
        assert found[1][0].reason == one.reason
        assert one.reason.endswith("were not both measured")


def exactly(value: float) -> Estimate:
    return Estimate(math.log(value), 0.0, math.inf)


# The profiler's reason.


def call(**changes) -> Profile:
    size = 4096 * 4096 * 17 / 32
    values = {"dram__bytes_read.sum": size, "gpu__time_duration.sum": size / 2.2, **made.LATENCY}
    return Profile("qgemv_mx", "mxfp4", "q_o_proj", 4096, 4096, 1, values | changes, 4.4)


ISSUE = "smsp__issue_active.avg.pct_of_peak_sustained_active"
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "latency-bound, warps wait for memory: too few bytes are on their way (9.50"),
        ({STALLED.format("barrier"): 20.0}, "latency-bound, warps wait at barriers"),
        ({STALLED.format("branch"): 20.0}, "warps wait on branch"),
        ({ISSUE: 70.0}, "issue-bound"),
        ({"gpu__time_duration.sum": 4096 * 4096 * 17 / 32 / 3.9e3, ISSUE: 80.0}, "memory-bound"),
        ({"dram__bytes_read.sum": 4096 * 4096.0}, "it reads 1.88 times the bytes of its operands"),
        ({"smsp__sass_inst_executed_op_local_st.sum": 7.0, ISSUE: 90.0}, "registers spill"),
    ],
)
def test_the_rule_names_the_first_limit_that_the_counters_show(changes, word):
    said = profile_r2.reason(call(**changes), 4096, 4096, 1)
    assert said.partition(": ")[0] == "in its own profile" and word in said.partition(": ")[2]


@pytest.mark.parametrize("place", [(4096, 4096, 2), (8192, 4096, 1), (4096, 8192, 1)])
def test_a_reason_that_rests_on_another_call_says_so_before_anything_else(place):
    said = profile_r2.reason(call(), *place)
    assert said.startswith("in the profiled call, q_o_proj M = 1: latency-bound, ")
    assert "it reads 0.00220 TB/s under the profiler, 0 % of the asymptote" in said


def test_the_reason_of_a_cell_is_that_of_its_own_profile_or_of_the_nearest():
    found = analysed(slow={("mxfp4", s["name"], 1): 1.5 for s in made.SHAPES}, ms=(1,))
    said = {
        m.point.shape: m.reason
        for m in found.misses
        if (m.bar.id, m.format) == ("fp8_least", "mxfp4")
    }
    assert len(said) == 9
    own = {p.shape for p in found.profiles if (p.kernel, p.format, p.M) == ("qgemv_mx", "mxfp4", 1)}
    assert own and {s for s, text in said.items() if "; in its own profile: " in text} == own
    assert all("; in the profiled call, " in said[s] for s in said.keys() - own)


def test_without_stalls_or_counters_the_rule_claims_nothing():
    bare = Profile("qgemv_mx", "mxfp4", "q_o_proj", 4096, 4096, 1, {"gpu__time_duration.sum": 1.0}, None)  # fmt: skip
    said = profile_r2.reason(bare, 4096, 4096, 1)
    assert said == "in its own profile: no limit of these counters is reached"
    assert profile_r2.reason(None, 4096, 4096, 1) == "not profiled"
    assert (bare.read_tbps, bare.of_asymptote, bare.spills, bare.occupancy) == (None,) * 4


def test_a_profile_computes_throughput_and_occupancy():
    p = call()
    assert p.read_tbps == pytest.approx(2.2e-3) and p.of_asymptote == pytest.approx(5e-4)
    assert p.occupancy == (0.25, "registers") and p.spills == 0
    assert p.read_over_weight == pytest.approx(1.0) and p.instructions == pytest.approx(4.0)
    assert p.opcodes() == {"HMMA": 32.0, "LDG": 8.0, "LDL": 0.0}


def test_the_nearest_call_is_near_in_m_and_then_in_size():
    calls = [
        Profile("qgemv_mx", "mxfp4", name, n, 4096, m, {"gpu__time_duration.sum": 1.0}, None)
        for name, n in (("small", 1024), ("large", 16384))
        for m in (1, 16)
    ]
    found = profile_r2.nearest(calls, "mxfp4", 14336, 4096, 2)
    assert (found.shape, found.M) == ("large", 1)
    assert profile_r2.nearest(calls, "mxfp4", 1024, 4096, 8).place == "small M = 16"
    assert profile_r2.nearest(calls, "nvfp4", 1024, 4096, 8) is None
    stream = Profile("stream_read", "mxfp4", "x", 1024, 4096, 8, calls[0].values, None)
    assert profile_r2.nearest([stream], "mxfp4", 1024, 4096, 8) is None
    counted = [Profile("qgemv_mx", "mxfp4", "x", 1, 1, 1, {"sass_HMMA": 1.0}, None)]
    assert profile_r2.nearest(counted, "mxfp4", 1, 1, 1) is None


def test_of_two_rows_of_one_metric_the_cold_one_counts():
    rows = made.counter_rows()[:1]
    rows = [rows[0] | {"value": 2.0}, rows[0] | {"value": 9.0, "regime": "hot_graph"}]
    campaign = made.campaign(ms=(1,), shapes=made.SHAPES[:1], chain=False)
    object.__setattr__(campaign, "counters", tuple(rows))
    (found,) = profile_r2.profiles(campaign, None)
    assert found.values == {"dram__bytes_read.sum": 2.0}


# Tables.


def test_tables_are_the_same_every_time_and_empty_before_any_campaign(exact):
    again = analysed()
    for name, table in analysis_r2.tables(exact).items():
        text = analysis_r2.to_csv(table)
        assert text == analysis_r2.to_csv(analysis_r2.tables(again)[name]), name
        assert tuple(table.columns) == tuple(analysis_r2.empty_tables()[name].columns)
        assert "nan" not in text.lower() and len(table) > 0
    assert all(t.empty for t in analysis_r2.tables(None).values())


def test_the_campaign_of_r2_is_chosen_among_those_of_a_report(tmp_path):
    (old,) = shelf(tmp_path, old=(4.0, {})).values()
    folder = records.write(made.campaign(**SMALL), tmp_path / "data")
    assert analysis_r2.chosen([old, folder]) == folder and analysis_r2.chosen([old]) is None


# Claims.


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> dict[str, verdicts.Verdict]:
    """Verdicts of all registered claims on a made-up campaign, computed as the audit does."""
    data = tmp_path_factory.mktemp("data")
    folder = records.write(made.campaign(noise=0.002, blocks=4), data)
    repo = PREREG.parent
    computed = {"R2": lambda f: report_audit.analysis_r2_of(repo, f).constants}
    evidence = verdicts.Evidence.from_campaigns([folder], computed=computed)
    found = verdicts.judge(registry.load_registered(PREREG).claims, evidence)
    return {v.claim: v for v in found}


def test_every_decode_claim_of_r2_is_judged(judged):
    gemv = {k: v for k, v in judged.items() if k.startswith("r2.qgemv_mx.")}
    assert len(gemv) == 180
    assert {v.verdict for v in gemv.values()} <= {"HIT", "MISS", "STRADDLE"}
    bars = {k: v for k, v in judged.items() if k.startswith("r2.bar.") and ".gemm_" not in k}
    assert len(bars) == 12
    assert {v.verdict for v in bars.values()} <= {"CONFIRMED", "REFUTED", "INCONCLUSIVE"}
    assert all(v.campaign.startswith("r2-") for v in [*gemv.values(), *bars.values()])
    gemm = {v.verdict for k, v in judged.items() if k.startswith("r2.qgemm_mx.")}
    assert gemm == {"NOT_RUN"}


def test_a_bar_and_the_claim_about_it_observe_the_same_number(judged, tmp_path):
    folder = records.write(made.campaign(noise=0.002, blocks=4), tmp_path)
    found = analysis_r2.of_folder(folder, made.SHAPES)
    claimed = [b for b in found.bars if b.claim]
    decode = {k for k in judged if k.startswith("r2.bar.") and ".gemm_" not in k}
    assert {b.claim for b in claimed} == decode
    for b in claimed:
        if b.id == "peers":
            continue  # the claim is about humming_bf16 alone
        assert judged[b.claim].observed == pytest.approx(b.observed.value, rel=1e-9), b.claim
    limits = {c.id: c.threshold for c in registry.load_registered(PREREG).claims}
    assert all(limits[b.claim] == pytest.approx(b.limit) for b in claimed)


def test_a_constant_that_no_leg_gives_is_not_run_with_the_reason(tmp_path):
    folder = records.write(made.campaign(constants={}, **SMALL), tmp_path)
    computed = {"R2": lambda f: analysis_r2.of_folder(f, made.SHAPES).constants}
    evidence = verdicts.Evidence.from_campaigns([folder], computed=computed)
    claims = registry.load_registered(PREREG).claims
    found = {v.claim: v for v in verdicts.judge(claims, evidence)}
    host = found["r2.bar.linear_host_overhead_us"]
    assert host.verdict == "NOT_RUN" and "was not recorded" in host.reason


def test_the_audit_knows_what_a_campaign_of_r2_answers():
    claims = {c.id: c for c in registry.load_registered(PREREG).claims}
    holds = audit._Answers.of({"rung": "R2"})
    assert holds.hold(claims["r2.bar.dispatch_regret"])
    assert not holds.hold(claims["r1.closure.residual.m1"])
    assert not audit._Answers.of({"rung": "R0"}).hold(claims["r2.bar.dispatch_regret"])


def test_the_tables_of_a_report_are_held_against_the_campaign(tmp_path):
    prereg = tmp_path / "prereg"
    prereg.mkdir()
    (prereg / "shapes.json").write_text(json.dumps({"shapes": made.SHAPES}))
    folder = records.write(made.campaign(**SMALL), tmp_path / "data")
    reports = tmp_path / "reports"
    reports.mkdir()
    found = report_audit.analysis_r2_of(tmp_path, folder)
    for name, table in analysis_r2.tables(found).items():
        (reports / f"{name}.csv").write_text(analysis_r2.to_csv(table))

    def problems() -> list:
        return report_audit._rung_problems(
            tmp_path, analysis_r2, lambda f: report_audit.analysis_r2_of(tmp_path, f)
        )

    assert problems() == []
    path = reports / "r2_bars.csv"
    path.write_text(path.read_text().replace("missed", "met"))
    ((where, reason),) = problems()
    assert where == path and "is not what the data give" in reason


def test_a_point_of_the_chain_is_no_decode_cell(exact):
    assert "decode_chain" not in {d.point.shape for d in exact.decode}
    assert Point("decode_chain", 0, 0, 16, "chain_pdl") == bar(exact, "chain", "mxfp4").worst
