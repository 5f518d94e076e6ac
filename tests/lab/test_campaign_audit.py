"""Campaigns that agree with themselves, and were not measured as they say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import recorded
from prereg_kit import Repo

from lab import campaign_audit, derived, records, registry, seal, select, source
from lab.records import CellTime, Interval
from lab.rows import to_json

REPOSITORY = Path(__file__).resolve().parents[2]
FROZEN = json.loads((REPOSITORY / "prereg" / "protocol.json").read_text())


def said(found) -> str:
    return " | ".join(str(problem) for problem in found)


# The recorded campaigns of this repository pass.


@pytest.mark.parametrize("folder", campaign_audit.shelf_entries(REPOSITORY), ids=lambda f: f.name)
def test_every_recorded_campaign_follows_the_rules(folder):
    found = campaign_audit.problems(REPOSITORY, folder)
    # A shallow clone or an archive lacks the commit that was measured.
    assert [p for p in found if p.status != "UNVERIFIABLE"] == []


# Source.


@pytest.fixture(scope="module")
def sourced(tmp_path_factory) -> Repo:
    repo = Repo(tmp_path_factory.mktemp("source") / "repo")
    repo.write("kernels/qgemm_mx/cuda/naive_dequant.cu")
    repo.write("kernels/qgemm_mx/build.py")
    repo.first = repo.commit("one")
    repo.write("kernels/qgemm_mx/build.py", "flags\n")
    repo.second = repo.commit("two")
    return repo


def described(repo: Repo, **changes) -> dict:
    return source.describe(repo.root) | changes


def judged(repo: Repo, said: dict) -> list[str]:
    return [status for status, _ in campaign_audit.source_problems(repo.root, said)]


def test_the_source_of_the_named_commit_is_sound(sourced):
    assert judged(sourced, described(sourced)) == []
    stated = described(sourced, commit=None, dirty=None, stated_commit=sourced.second)
    assert judged(sourced, stated) == []


@pytest.mark.parametrize(
    "change",
    [{"tree_digest": "0" * 64}, {"kernels_digest": "0" * 64}],
)
def test_a_digest_that_the_commit_does_not_give_is_tampered(sourced, change):
    assert judged(sourced, described(sourced, **change)) == ["TAMPERED"]


def test_another_commit_is_tampered_also_where_it_was_only_stated(sourced):
    assert judged(sourced, described(sourced, commit=sourced.first)) == ["TAMPERED"] * 2
    stated = described(sourced, commit=None, dirty=None, stated_commit=sourced.first)
    assert judged(sourced, stated) == ["TAMPERED"] * 2


@pytest.mark.parametrize("commit", [None, "a" * 40])
def test_no_commit_or_one_that_is_not_here_is_unverifiable(sourced, commit):
    assert judged(sourced, described(sourced, commit=commit)) == ["UNVERIFIABLE"]


def test_the_digest_of_the_kernels_is_the_same_from_disk_and_from_a_commit(sourced):
    assert source.commit_kernels_digest(sourced.root, sourced.second) == select.kernels_digest(
        sourced.root
    )
    assert source.commit_kernels_digest(REPOSITORY, "0" * 40) is None


# Bytes.


def row(**changes):
    time, floor = CellTime(5.0, 4.9, 5.1, 8), Interval(4.0, 3.9, 4.1)
    return to_json(replace(recorded.cell(), time=time, floor=floor)) | changes


FASTER = {"time_us": 3.0, "ci_low_us": 2.9, "ci_high_us": 3.1, "n_blocks": 8}


def test_a_cell_of_the_right_bytes_above_its_floor_is_sound():
    assert list(campaign_audit.byte_problems([row()])) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"weight_bytes": 4096 * 4096 + 1}, "its weights take 16777216"),
        ({"format": "mxfp4"}, "its weights take 8912896"),
        ({"format": "fp7"}, "no known size"),
        ({"time": FASTER}, "faster than reading its bytes"),
        ({"time": FASTER, "kernel": "naive_dequant", "role": "sanity_floor"}, "faster than"),
        ({"time": FASTER, "kernel": "testbed/full", "role": "testbed"}, "faster than"),
        ({"floor": None}, "no stream of its 16777216 bytes"),
    ],
)
def test_wrong_bytes_and_times_below_the_floor_are_named(change, word):
    (text,) = campaign_audit.byte_problems([row(**change)])
    assert word in text and "q_o_proj" in text


@pytest.mark.parametrize(
    "change",
    [
        {"regime": "hot_graph"},
        {"kernel": "stream_read", "role": "floor"},
        {"floor": {"time_us": 3.2, "ci_low_us": 3.05, "ci_high_us": 3.4}},
    ],
)
def test_what_may_be_faster_than_a_cold_stream(change):
    assert list(campaign_audit.byte_problems([row(time=FASTER, **change)])) == []


# Constants.


def constants():
    def constant(value):
        ends = {"ci_low": value * 0.99, "ci_high": value * 1.01}
        return {"value": value, "unit": "x", **ends, "n": 8, "how": "made up"}

    found = {
        "read_bandwidth_tbps": constant(4.6),
        "bf16_peak_tflops": constant(680.0),
        "fp8_peak_tflops": constant(1200.0),
    }
    return found | derived.derived(found)


def test_constants_that_follow_from_others_agree():
    assert list(campaign_audit.constant_problems(constants())) == []
    assert list(campaign_audit.constant_problems({})) == []


@pytest.mark.parametrize("key", ["value", "ci_low", "ci_high"])
@pytest.mark.parametrize("name", ["ridge_bf16_flop_per_byte", "crossover_m_mxfp4"])
def test_a_constant_that_does_not_follow_is_named(name, key):
    found = constants()
    found[name][key] *= 1 + 1e-6
    (text,) = campaign_audit.constant_problems(found)
    assert f"constant {name}: {key}" in text


def test_a_changed_source_of_others_and_a_missing_one_are_seen():
    found = constants()
    found["read_bandwidth_tbps"]["value"] *= 1.1
    assert len(list(campaign_audit.constant_problems(found))) >= 6
    del found["read_bandwidth_tbps"]
    (text,) = campaign_audit.constant_problems(found)
    assert "'read_bandwidth_tbps'" in text
    found = constants()
    found["crossover_m_fp3"] = found["crossover_m_mxfp4"]
    (text,) = campaign_audit.constant_problems(found)
    assert "crossover_m_fp3 follows from no others" in text


def test_a_value_outside_its_own_interval_is_named():
    found = {"launch_floor_us": constants()["bf16_peak_tflops"]}
    assert list(campaign_audit.constant_problems(found)) == []
    found["launch_floor_us"]["value"] *= 2
    (text,) = campaign_audit.constant_problems(found)
    assert "constant launch_floor_us: its value 1360.0 is outside its own interval" in text
    exact = {"launch_floor_us": constants()["bf16_peak_tflops"] | {"ci_low": None, "ci_high": None}}
    assert list(campaign_audit.constant_problems(exact)) == []


@pytest.mark.parametrize(
    "name",
    [
        "share/launch",
        "share/residual/mxfp4/4096x4096/m1/cold_graph",
        "largest_residual_fraction_m1",
    ],
)
def test_what_legs_alone_give_is_no_recorded_constant(name):
    (text,) = campaign_audit.constant_problems({name: constants()["bf16_peak_tflops"]})
    assert f"constant {name} is recorded, but follows from legs alone" == text


# Counters.


def counters():
    """Counter rows of the one cell of `row`: bytes read, their ratio, and two opcodes with their sum."""
    own = {key: row()[key] for key in ("kernel", "format", "shape", "N", "K", "M")}
    rest = {"regime": "cold_loop", "unit": "x", "tool": "made up"}
    values = {
        campaign_audit.READ: 2.0 * 4096 * 4096,
        campaign_audit.RATIO: 2.0,
        "sass_MOV": 3.0,
        "sass_EXIT": 1.0,
        "sass_loop_total": 2.0,
        "sass_total": 4.0,
    }
    return [{**own, **rest, "metric": name, "value": value} for name, value in values.items()]


def test_counters_that_agree_are_sound():
    assert list(campaign_audit.counter_problems([row()], counters())) == []


@pytest.mark.parametrize(
    ("at", "change", "word"),
    [
        (0, {"N": 999}, "which was not measured"),
        (4, {"kernel": "testbed/nonesuch"}, "which was not measured"),
        (0, {"value": 1.0}, "gives"),
        (1, {"value": 1.0}, "is 1.0, but dram__bytes_read.sum gives 2.0"),
        (2, {"value": 4.0}, "sass_total of cublaslt_fp8"),
        (5, {"value": 5.0}, "is 5, but its opcodes add up to 4"),
        (4, {"metric": "sass_total", "value": 4.0}, "is given twice"),
    ],
)
def test_a_counter_that_cannot_be_is_named(at, change, word):
    found = counters()
    found[at] |= change
    (text,) = campaign_audit.counter_problems([row()], found)
    assert word in text


def test_constants_without_legs_are_noted_in_a_line(tmp_path):
    folder = recorded.planned_campaign(tmp_path, FROZEN, constants=constants())
    note = campaign_audit.without_legs(folder)
    assert "3 constants, such as bf16_peak_tflops" in note or "3 constants, such as" in note
    assert "\n" not in note


# The plan of legs.


def plan(point, frozen=FROZEN):
    cells = [to_json(cell) for cell in point["cells"]]
    checks = [to_json(check) for check in point["checks"]]
    return list(campaign_audit.plan_problems(frozen, cells, checks, point["samples"]))


@pytest.mark.parametrize(("m", "wide"), [(1, False), (1, True), (2048, False), (2048, True)])
def test_a_planned_point_follows_the_protocol(m, wide):
    assert plan(recorded.planned_point(FROZEN, m, wide=wide)) == []


HEADLINE = "cold_graph"


def only_first_blocks(frame):
    return frame[frame["block"] < 2]


def one_block_less(frame):
    return frame[~((frame["regime"] == "hot_graph") & (frame["block"] == 3))]


def a_gap(frame):
    return frame[~((frame["regime"] == HEADLINE) & (frame["block"] == 5))]


def doubled(frame):
    """The second half of an extension that the width did not ask for."""
    first = frame[frame["regime"] == HEADLINE]
    more = first.assign(block=first["block"] + 8, extension=True)
    return pd.concat([frame, more], ignore_index=True)


def swapped(frame):
    """Two arms of one block change their places."""
    frame = frame.copy()
    at = frame.index[(frame["regime"] == HEADLINE) & (frame["block"] == 3)]
    frame.loc[at, "position"] = frame.loc[at, "position"].to_numpy()[::-1].copy()
    names = frame.loc[at].groupby("position")["arm"].first()
    if list(names) == list(names)[::-1]:  # a mirrored block is its own mirror: turn the halves
        half = len(at) // 2
        frame.loc[at, "position"] = (frame.loc[at, "position"] + half) % len(at)
    return frame


def unmarked(frame):
    return frame.assign(extension=~frame["extension"])


def no_twin(frame):
    return frame[~frame["arm"].str.endswith("#2")]


def no_loop(frame):
    return frame[frame["regime"] != "cold_loop"]


def another_regime(frame):
    return pd.concat([frame, frame[frame["regime"] == "hot_graph"].assign(regime="chain_pdl")])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (only_first_blocks, "has blocks 0 to 1 (2); the protocol takes 8, or 16"),
        (one_block_less, "hot_graph: has blocks 0 to 2 (3); the protocol takes 4"),
        (a_gap, "has blocks 0 to 7 (7)"),
        (doubled, "is extended, but its first 8 blocks are not too wide"),
        (swapped, "block 3: its legs are not in the order of the frozen seed"),
        (unmarked, "marked as extension"),
        (no_twin, "arms cublaslt_fp8#2 are not those"),
        (no_loop, "cold_loop: missing"),
        (another_regime, "chain_pdl: no regime of the protocol"),
        (lambda frame: frame.iloc[:0], "has arms, but no legs"),
    ],
)
def test_legs_that_the_protocol_did_not_plan_are_named(change, word):
    point = recorded.planned_point(FROZEN)
    point["samples"] = change(point["samples"])
    assert word in " | ".join(plan(point))


def test_legs_that_were_too_wide_and_not_extended_are_named():
    point = recorded.planned_point(FROZEN, wide=True)
    frame = point["samples"]
    point["samples"] = frame[~frame["extension"]]
    (text,) = plan(point)
    assert "is not extended, but its first 8 blocks are too wide" in text


def test_another_seed_gives_another_order():
    assert any("order" in text for text in plan(recorded.planned_point(FROZEN | {"seed": 1})))


def test_an_arm_that_failed_only_after_its_legs_leaves_gaps_and_no_problem():
    point = recorded.planned_point(FROZEN)
    gone = [c for c in point["cells"] if c.kernel == "stream_read"]
    point["cells"] = [replace(c, correctness="failed") if c in gone else c for c in point["cells"]]
    point["samples"] = point["samples"][point["samples"]["kernel"] != "stream_read"]
    wrong = recorded.check(gone[0], name="checksum_after", passed=False)
    point["checks"] = [wrong, *(c for c in point["checks"] if c.kernel != "stream_read")]
    assert plan(point) == []
    # Failed before its legs, it was never in the order: the same legs are out of place.
    point["checks"][0] = replace(wrong, name="checksum_before")
    assert any("order of the frozen seed" in text for text in plan(point))


def test_a_dropped_arm_cannot_be_left_out_of_the_record():
    point = recorded.planned_point(FROZEN)
    keep = {"cublaslt_fp8", "reference"}
    point["cells"] = [c for c in point["cells"] if c.kernel in keep]
    point["samples"] = point["samples"][point["samples"]["kernel"].isin(keep)]
    assert any("order of the frozen seed" in text for text in plan(point))


# Dropped legs.

THERMAL = 0x40


def drops(frame, readings):
    return " | ".join(campaign_audit.drop_problems(FROZEN, frame, readings))


def watched(reasons=(), end_ns=400_000_000):
    times = np.arange(0, end_ns, 20_000_000)
    bits = np.zeros(len(times), np.int64)
    for at, value in reasons:
        bits[at] = value
    return pd.DataFrame({"t_ns": times, "throttle_reasons": bits})


def leg_frame(**drop):
    frame = recorded.planned_point(FROZEN)["samples"].iloc[:4].copy()
    frame["start_ns"] = [0, 100_000_000, 200_000_000, 300_000_000]
    frame["end_ns"] = frame["start_ns"] + 50_000_000
    frame["drop_reason"] = [drop.get(f"leg{i}") for i in range(4)]
    frame["dropped"] = frame["drop_reason"].notna()
    return frame


def test_drops_that_the_telemetry_gives_are_sound():
    assert drops(leg_frame(), watched([(6, 0x4)])) == ""  # power capping is data
    assert drops(leg_frame(leg1="hw_thermal_slowdown"), watched([(6, THERMAL)])) == ""
    # In the margin after the leg: the reading may have come too late for the decision.
    for found in (leg_frame(), leg_frame(leg1="hw_thermal_slowdown")):
        assert drops(found, watched([(8, THERMAL)])) == ""


@pytest.mark.parametrize(
    ("frame", "readings", "word"),
    [
        (leg_frame(), watched([(6, THERMAL)]), "1 legs ran while a reading shows hw_slowdown"),
        (leg_frame(leg1="hw_thermal_slowdown"), watched(), "which no reading shows"),
        (leg_frame(leg1="hw_slowdown"), watched([(6, THERMAL)]), "dropped for hw_slowdown, which"),
        (leg_frame(leg1="slope_not_positive"), watched(), "as slope_not_positive, but it is"),
        (leg_frame(leg1="bad luck"), watched(), "a reason that the protocol does not have"),
        (leg_frame(), watched().iloc[:0], "4 legs have no telemetry within 500 ms"),
    ],
)
def test_drops_that_the_telemetry_does_not_give_are_named(frame, readings, word):
    assert word in drops(frame, readings)


def test_a_slope_that_is_not_positive_drops():
    frame = leg_frame(leg1="slope_not_positive")
    frame.loc[frame.index[1], "time_us"] = -1.0
    assert drops(frame, watched()) == ""


def test_readings_of_another_sitting_say_nothing_of_a_leg():
    """The second sitting's clock starts anew: its slowdown is not that of the first one's legs."""
    hot = pd.concat([watched(), watched([(6, THERMAL)])], ignore_index=True)
    two = pd.concat([leg_frame(), leg_frame(leg1="hw_thermal_slowdown")], ignore_index=True)
    assert drops(two, hot) == ""
    assert "and were kept" in drops(pd.concat([leg_frame(), leg_frame()], ignore_index=True), hot)


# The clock of the legs.


def timed_legs():
    """Four legs of 250 us that the host saw from their start on for 300 us, in two sittings."""
    frame = recorded.legs(blocks=1)[:4].copy()
    frame["t_n_us"], frame["t_2n_us"] = 100.0, 150.0
    frame["start_ns"] = [0, 400_000, 0, 400_000]
    frame["end_ns"] = frame["start_ns"] + 300_000
    return frame


def test_legs_one_after_the_other_that_fit_into_their_time_are_sound():
    assert list(campaign_audit.span_problems(timed_legs())) == []
    looped = timed_legs().assign(t_2n_us=np.nan, t_n_us=300.0)
    assert list(campaign_audit.span_problems(looped)) == []


@pytest.mark.parametrize(
    ("column", "value", "word"),
    [
        ("t_n_us", 151.0, "1 legs took longer than from their start to their end"),
        ("t_2n_us", 201.0, "1 legs took longer"),
        ("start_ns", 299_000, "1 legs began before the leg before them had ended"),
    ],
)
def test_a_leg_that_the_clock_does_not_allow_is_named(column, value, word):
    frame = timed_legs()
    frame.loc[frame.index[1], column] = value
    if column == "start_ns":
        frame.loc[frame.index[1], "end_ns"] = value + 300_000
    (text,) = campaign_audit.span_problems(frame)
    assert word in text and f"of {frame['arm'].iloc[1]} q_o_proj M=1" in text


# A whole campaign, and what refuses one.


@pytest.fixture
def shelf(tmp_path):
    """A repository with a frozen protocol, a kernel and a campaign that was measured there."""
    repo = Repo(tmp_path / "repo")
    path = repo.write("prereg/protocol.json", json.dumps(FROZEN))
    registry.freeze([path], repo.prereg, "a test", "none")
    repo.write("kernels/qgemm_mx/build.py")
    repo.write(".gitignore", "/partial/\n")
    repo.commit("freeze")
    return repo


def measure(repo: Repo, point=None, **changes):
    known = {
        "source": source.describe(repo.root),
        "protocol_sha256": seal.sha256(repo.prereg / "protocol.json"),
        "prereg_head": registry.head(repo.prereg),
    }
    folder = recorded.planned_campaign(repo.root, FROZEN, point, constants(), **(known | changes))
    assert records.verify(folder) == []
    return folder


def problems(repo: Repo, folder):
    return campaign_audit.problems(repo.root, folder)


def test_a_campaign_that_was_measured_as_it_says_is_sound(shelf):
    assert problems(shelf, measure(shelf)) == []


def test_a_campaign_with_fewer_blocks_and_another_seed_is_invalid(shelf):
    point = recorded.planned_point(FROZEN)
    point["samples"] = only_first_blocks(point["samples"])
    found = problems(shelf, measure(shelf, point, seed=3))
    assert {p.status for p in found} == {"INVALID"}
    assert "the protocol takes" in said(found) and "seed 3 is not the frozen" in said(found)


def test_another_protocol_is_no_matter_of_the_plan(shelf):
    """Its verdicts are DEVIATED."""
    point = recorded.planned_point(FROZEN)
    point["samples"] = only_first_blocks(point["samples"])
    assert problems(shelf, measure(shelf, point, protocol_sha256="0" * 64)) == []


def test_a_campaign_of_another_source_is_tampered(shelf):
    folder = measure(shelf, source=source.describe(shelf.root) | {"tree_digest": "0" * 64})
    (found,) = problems(shelf, folder)
    assert found.status == "TAMPERED" and folder.name in found.path


def test_a_whole_campaign_is_held_against_the_clock_of_its_legs_and_its_counters(
    shelf, monkeypatch
):
    point = recorded.planned_point(FROZEN)
    point["samples"]["end_ns"] = point["samples"]["start_ns"] + 1
    seen = []
    monkeypatch.setattr(
        campaign_audit, "counter_problems", lambda cells, rows: seen.append(rows) or ["odd counter"]
    )
    found = said(problems(shelf, measure(shelf, point)))
    assert "took longer than from their start" in found and "odd counter" in found
    assert seen == [[]]


def test_a_rule_that_meets_what_it_does_not_know_ends_in_invalid(shelf):
    def boom(repo, folder):
        raise ZeroDivisionError("odd data")

    folder = measure(shelf)
    found = campaign_audit.inspect(shelf.root, [folder], records.verify, boom)
    assert found.invalid.keys() == {folder.name}
    assert "ZeroDivisionError: odd data" in said(found.problems)


def edited(folder):
    """Times cut by half without new sums."""
    record = json.loads((folder / "campaign.json").read_text())
    for cell in record["cells"]:
        for key in ("time_us", "ci_low_us", "ci_high_us"):
            if cell["time"]:
                cell["time"][key] /= 2
    (folder / "campaign.json").write_text(json.dumps(record))
    return folder


def resealed(folder):
    """The same with new sums and a new name: only the samples speak against it."""
    value = json.loads((edited(folder) / "campaign.json").read_text())
    sums = {name: seal.sha256(folder / name) for name in seal.HASHED}
    (folder / "SHA256SUMS.json").write_bytes(registry.canonical_bytes(sums).rstrip(b"\n"))
    return folder.rename(folder.parent / seal.campaign_id(value, sums))


def test_a_campaign_whose_bytes_changed_is_neither_chosen_nor_replayed_nor_tabled(shelf):
    from lab import cells, replay

    folder = measure(shelf)
    pointer = shelf.write("pointer.json", json.dumps({"campaign": folder.name}))
    assert replay.chosen_campaigns([pointer], shelf.root) == [folder]
    assert len(select.recorded_campaigns(shelf.root)) == 1
    edited(folder)
    assert select.recorded_campaigns(shelf.root) == []
    assert select.unreadable(shelf.root) == [folder.name]
    with pytest.raises(records.CampaignError, match="SHA-256"):
        replay.chosen_campaigns([pointer], shelf.root)
    with pytest.raises(records.CampaignError, match="does not verify"):
        cells.table([folder])


def test_a_campaign_whose_times_are_not_its_samples_is_not_tabled(shelf):
    from lab import cells

    folder = resealed(measure(shelf))
    assert seal.problems(folder) == []
    with pytest.raises(records.CampaignError, match="but the samples give"):
        cells.table([folder])
