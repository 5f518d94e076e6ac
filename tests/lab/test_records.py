"""Campaigns: impossible states are refused, a killed writer loses nothing, and an edited campaign is found out."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import jsonschema
import numpy as np
import pandas as pd
import pytest
import recorded
import rfc8785
from scipy import stats

from lab import files, records, rows, samples, schema
from lab.records import CampaignError, CellTime, Interval, PartialCampaign

REPO = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------- rows

GOOD_TIME = CellTime(5.0, 4.9, 5.1, 8)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"time": GOOD_TIME, "correctness": "failed"}, "correctness is 'failed'"),
        ({"time": GOOD_TIME, "correctness": "not_applicable"}, "not_applicable"),
        ({"role": "fastest"}, "fastest"),
        ({"regime": "warm"}, "warm"),
        ({"correctness": "maybe"}, "maybe"),
        ({"m": 0}, "M=0"),
        ({"N": 4096.0}, "N=4096.0"),
        ({"weight_bytes": -1}, "weight_bytes=-1"),
        ({"shape": ""}, "shape=''"),
        ({"time": {"time_us": 5.0}}, "dict"),
    ],
)
def test_impossible_cells_are_refused(changes, says):
    with pytest.raises(CampaignError, match=says):
        recorded.cell(**changes)


def test_the_reference_kernel_can_have_no_time_under_any_role():
    with pytest.raises(CampaignError, match="can never have a time"):
        recorded.cell("reference", "correctness_only", time=GOOD_TIME)
    for role in set(rows.ROLES) - {"correctness_only"}:
        with pytest.raises(CampaignError, match="correctness_only"):
            recorded.cell("reference", role, time=GOOD_TIME)
    with pytest.raises(CampaignError, match="only it"):
        recorded.cell("qgemv_mx", "correctness_only")
    untimed = recorded.cell("reference", "correctness_only")
    with pytest.raises(CampaignError, match="can never have a time"):
        replace(untimed, time=GOOD_TIME)


@pytest.mark.parametrize(
    "time",
    [
        (math.nan, 1.0, 2.0),
        (1.0, math.nan, 2.0),
        (1.0, 0.5, math.inf),
        (-1.0, -2.0, 2.0),
        (0.0, 0.0, 1.0),
        (1.0, 1.1, 2.0),
        (1.0, 0.5, 0.9),
        ("1", 0.5, 2.0),
        (True, 0.5, 2.0),
    ],
)
def test_impossible_times_are_refused(time):
    with pytest.raises(CampaignError):
        Interval(*time)
    with pytest.raises(CampaignError):
        CellTime(*time, n_blocks=4)


def test_a_cell_time_needs_two_blocks():
    with pytest.raises(CampaignError, match="n_blocks=1"):
        CellTime(1.0, 0.9, 1.1, 1)


def test_checks_that_contradict_themselves_are_refused():
    cell = recorded.cell()
    with pytest.raises(CampaignError, match="above limit"):
        recorded.check(cell, measured=2.0, limit=1.0)
    with pytest.raises(CampaignError, match="measured=nan"):
        recorded.check(cell, measured=math.nan, limit=1.0)
    with pytest.raises(CampaignError, match="passed=1"):
        recorded.check(cell, passed=1)


def test_a_failed_check_that_measured_nan_keeps_it_in_words():
    found = recorded.check(
        recorded.cell(), passed=False, measured=math.nan, limit=1.0, detail="row 3"
    )
    assert (found.measured, found.limit) == (None, 1.0)
    assert found.detail == "row 3 (measured was nan)"


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "ok", "reason": "why"},
        {"status": "failed", "reason": None},
        {"status": "lost"},
        {"started_utc": "yesterday"},
        {"seconds": -1.0},
        {"stage": ""},
    ],
)
def test_impossible_attempts_are_refused(changes):
    good = {
        "stage": "build",
        "status": "failed",
        "reason": "why",
        "started_utc": "2026-01-01T00:00:00Z",
        "seconds": 1.0,
    }
    records.AttemptRow(**good)
    with pytest.raises(CampaignError):
        records.AttemptRow(**(good | changes))


def test_schema_says_the_same_of_a_row_whatever_rows_came_before():
    rows = [{**records.to_json(recorded.cell()), "N": n} for n in (1, True, 1.0, 0, None, 0, 1)]
    rows[-1].pop("N")
    value = {"cells": rows}
    whole = schema.campaign_schema()
    part = {"$defs": whole["$defs"], "properties": {"cells": whole["properties"]["cells"]}}
    plain = jsonschema.Draft202012Validator(part).iter_errors(value)
    assert schema._problems(part, value) == [f"{e.json_path}: {e.message}" for e in plain]
    assert len(schema._problems(part, value)) == 5


def test_schema_and_rows_have_the_same_keys_and_every_key_is_described():
    whole = schema.campaign_schema()
    for name, cls in [
        ("cell", records.CellRow),
        ("check", records.CheckRow),
        ("attempt", records.AttemptRow),
        ("cell_time", CellTime),
        ("interval", Interval),
        ("tuning", records.Tuning),
    ]:
        assert set(whole["$defs"][name]["properties"]) == {f.name for f in fields(cls)}, name
    assert {*whole["properties"], "samples", "telemetry"} == {
        "schema_version",
        *(f.name for f in fields(records.Campaign)),
    }

    def closed(value, path):
        if isinstance(value, dict):
            if value.get("type") == "object" and "if" not in path:
                assert value["additionalProperties"] is False, path
            for name, part in value.get("properties", {}).items():
                if "if" not in path and "then" not in path:
                    assert part["description"] and part["unit"], (path, name)
            for name, part in value.items():
                closed(part, [*path, name])
        elif isinstance(value, list):
            for part in value:
                closed(part, path)

    closed(whole, [])


def test_the_data_dictionary_names_every_column_and_key():
    text = (REPO / "data/README.md").read_text()
    names = [*samples.SAMPLES_SCHEMA.names, *samples.TELEMETRY_SCHEMA.names, *records.FILES]
    names += [
        k
        for k in schema.campaign_schema()["properties"]
        if k not in ("schema_version", "created_utc")
    ]
    assert [name for name in names if f"`{name}`" not in text] == []


# ---------------------------------------------------------------- samples


def _broken(edit):
    frame = recorded.legs()
    edited = edit(frame)
    return frame if edited is None else edited


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda f: f.__setitem__("time_us", f["time_us"].where(f.index != 3)), "not a number"),
        (lambda f: f.__setitem__("t_2n_us", f["t_2n_us"].where(f.index != 3)), "t_2n_us"),
        (lambda f: f.__setitem__("t_n_us", f["t_n_us"].where(f.index != 3)), "t_n_us"),
        (lambda f: f.__setitem__("time_us", f["time_us"].mask(f.index == 3, -1.0)), "0 or less"),
        (
            lambda f: f.__setitem__("time_us", f["time_us"] * np.where(f.index == 3, 0.9, 1)),
            "slope",
        ),
        (
            lambda f: f.__setitem__("role", f["role"].mask(f.index == 3, "correctness_only")),
            "never timed",
        ),
        (
            lambda f: f.__setitem__("kernel", f["kernel"].mask(f.index == 3, "reference")),
            "never timed",
        ),
        (lambda f: f.__setitem__("regime", "warm"), "unknown regime"),
        (lambda f: f.__setitem__("end_ns", 0), "end before"),
        (lambda f: f.__setitem__("dropped", f.index == 3), "without a reason"),
        (lambda f: f.__setitem__("position", 0), "share a place"),
        (lambda f: f.drop(index=3), "has not 2 legs"),
        (lambda f: f.__setitem__("arm", f["arm"].str.replace("#2", "-again")), "has 2 arms"),
        (lambda f: f.drop(columns="nodes"), "nodes"),
        (lambda f: f.__setitem__("note", "x"), "note"),
    ],
)
def test_impossible_samples_are_refused(edit, says):
    assert samples.check_samples(recorded.legs()) == []
    problems = samples.check_samples(_broken(edit))
    assert any(says in text for text in problems), problems


def test_looped_legs_have_no_slope():
    frame = recorded.legs(regime="cold_loop")
    assert frame["t_2n_us"].isna().all()
    assert samples.check_samples(frame) == []


def test_block_value_is_the_mean_log_of_its_two_legs():
    frame = recorded.legs(blocks=3)
    found = records.block_times(frame)
    assert list(found.columns) == [
        "kernel", "format", "role", "shape", "N", "K", "M", "regime", "arm", "block", "log_time",
    ]  # fmt: skip
    assert len(found) == 3 * 3
    one = frame[(frame["arm"] == "cublaslt_fp8#2") & (frame["block"] == 1)]["time_us"]
    row = found[(found["arm"] == "cublaslt_fp8#2") & (found["block"] == 1)]
    assert row["log_time"].item() == pytest.approx(math.log(math.sqrt(one.iloc[0] * one.iloc[1])))


def test_a_dropped_leg_drops_its_block_for_every_arm_and_no_other():
    frame = recorded.legs(blocks=5)
    leg = (frame["block"] == 2) & (frame["position"] == 0)
    frame["dropped"], frame["drop_reason"] = leg, np.where(leg, "thermal", None)
    assert samples.check_samples(frame) == []
    assert set(records.block_times(frame)["block"]) == {0, 1, 3, 4}
    assert records.cell_times(frame)[recorded.cell().key].n_blocks == 4
    drops = samples.dropped_blocks(frame).iloc[0]
    assert (drops["blocks"], drops["dropped"], drops["fraction"]) == (5, 1, 0.2)
    assert records.leg_summary(frame) == {
        "total": 30,
        "dropped": 1,
        "extension": 0,
        "reasons": {"thermal": 1},
    }


def test_logs_of_an_arm_are_in_the_order_of_its_blocks_and_pair_by_block():
    frame = pd.DataFrame(
        {"kernel": list("abbaa"), "block": [2, 5, 0, 0, 1], "log_time": [2.0, 5.5, 0.5, 0.0, 1.0]}
    )
    found = dict(samples.logs_of(frame, ["kernel"]))
    assert list(found) == [("a",), ("b",)]
    a, b = found[("a",)], found[("b",)]
    assert (a.blocks.tolist(), a.logs.tolist()) == ([0, 1, 2], [0.0, 1.0, 2.0])
    assert (b.blocks.tolist(), b.logs.tolist()) == ([0, 5], [0.5, 5.5])
    assert [part.tolist() for part in a.paired(b)] == [[0.0], [0.5]]
    assert dict(samples.logs_of(frame[:0], ["kernel"])) == {}


def test_cell_time_is_the_t_interval_over_block_logs():
    frame = recorded.legs(blocks=6)
    blocks = records.block_times(frame)
    logs = blocks[blocks["arm"] == "cublaslt_fp8"]["log_time"].to_numpy()
    low, high = stats.t.interval(0.95, len(logs) - 1, logs.mean(), stats.sem(logs))
    found = records.cell_times(frame)[recorded.cell().key]
    assert found.n_blocks == 6
    np.testing.assert_allclose(
        [found.time_us, found.ci_low_us, found.ci_high_us],
        np.exp([logs.mean(), low, high]),
        rtol=1e-12,
    )


def test_one_kept_block_gives_no_time():
    assert records.cell_times(recorded.legs(blocks=1)) == {}


# ---------------------------------------------------------------- floors


def test_floor_is_the_cold_stream_of_as_many_bytes():
    arms = recorded.ARMS
    frame = pd.concat(
        [recorded.legs(m=1, arms=arms, seed=1), recorded.legs(m=8, arms=arms, seed=2)]
    )
    stream = [recorded.cell("stream_read", "floor", m=m) for m in (1, 8)]
    cells = [
        *stream,
        recorded.cell(m=8),
        recorded.cell("qgemv_mx", "product", "mxfp4", m=8, weight_bytes=5),
    ]
    filled = records.fill_times(cells, frame)
    one, eight, fp8, other_bytes = filled
    assert one.time.time_us != eight.time.time_us
    assert fp8.floor == Interval(eight.time.time_us, eight.time.ci_low_us, eight.time.ci_high_us)
    assert other_bytes.floor is None and other_bytes.time is None
    far = recorded.cell(m=64)
    assert records.fill_times([*stream, far], frame)[-1].floor.time_us == one.time.time_us


# ---------------------------------------------------------------- the journal


def test_finalised_campaign_reads_back_whole(tmp_path):
    folder = recorded.campaign(tmp_path)
    assert records.verify(folder) == []
    found = records.load(folder)
    assert records.ID_PATTERN.fullmatch(folder.name)
    assert folder.name.startswith("r0-synthetic-gpu-20260102-")
    assert [c.M for c in found.cells] == [1, 1, 1, 8, 8, 8]
    assert [c.time is None for c in found.cells] == [False, False, True] * 2
    assert all(c.floor is not None for c in found.cells)
    assert found.constants["launch_floor_us"]["value"] == 1.5
    assert [a.status for a in found.attempts] == ["ok", "ok"]
    written = pd.concat([recorded.legs(1, seed=1), recorded.legs(8, seed=8)], ignore_index=True)
    assert found.samples.pop("drop_reason").isna().all() and written.pop("drop_reason").isna().all()
    pd.testing.assert_frame_equal(found.samples, written, check_dtype=False)
    assert found.telemetry["mem_clock_mhz"].isna().all()
    assert records.telemetry_summary(found.telemetry)["power_w"] == {
        "min": 300.0,
        "median": 300.0,
        "max": 300.0,
    }
    assert records.invalid(found) == []
    assert not list((tmp_path / "partial").iterdir()), "the journal is gone"
    assert sorted(p.name for p in folder.iterdir()) == sorted(records.FILES)


def test_same_campaign_again_is_left_alone_and_other_content_refused(tmp_path):
    folder = recorded.campaign(tmp_path)
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.iterdir()}
    campaign = records.load(folder)
    assert records.write(campaign, tmp_path / "data") == folder
    assert before == {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.iterdir()}
    (folder / "samples.parquet").write_bytes(b"tampered")
    with pytest.raises(CampaignError, match="never overwritten"):
        records.write(campaign, tmp_path / "data")
    assert (folder / "samples.parquet").read_bytes() == b"tampered"
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("to", ["nowhere", "elsewhere", "same"])
def test_a_link_in_a_campaigns_place_is_refused(tmp_path, to):
    folder = recorded.campaign(tmp_path)
    campaign = records.load(folder)
    aside = folder.rename(tmp_path / "same")
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / to)
    with pytest.raises(CampaignError, match=f"{folder.name} is a link"):
        records.write(campaign, tmp_path / "data")
    assert folder.is_symlink() and [p.name for p in folder.parent.iterdir()] == [folder.name]
    assert not list((tmp_path / "elsewhere").iterdir())
    folder.unlink()
    assert records.write(campaign, tmp_path / "data") == folder and aside.is_dir()


def test_rerun_goes_on_where_the_journal_ends(tmp_path):
    with recorded.journal(tmp_path, ms=(1,)) as partial:
        first = partial.header["created_utc"]
    with PartialCampaign.open(
        tmp_path, recorded.header(created_utc="2027-01-01T00:00:00Z")
    ) as again:
        assert again.finished == ("q_o_proj/M1",)
        assert list(again.constants) == ["launch_floor_us"]
        assert again.header["created_utc"] == first
        with pytest.raises(CampaignError, match="finished already"):
            again.append_point("q_o_proj/M1", **recorded.point(1))
        with pytest.raises(CampaignError, match="earlier point"):
            again.append_point("q_o_proj/M1-again", **recorded.point(1))
        with pytest.raises(CampaignError, match="recorded already"):
            again.add_constants(again.constants)
        again.append_point("q_o_proj/M8", **recorded.point(8))
        folder = records.finalise(again, tmp_path / "data")
    assert {c.M for c in records.load(folder).cells} == {1, 8}


@pytest.mark.parametrize(
    "changes",
    [{"seed": 8}, {"protocol_sha256": "9" * 64}, {"cubins": []}, {"rung": "R1"}, {"kind": "pilot"}],
)
def test_legs_that_cannot_be_compared_start_another_journal(tmp_path, changes):
    recorded.journal(tmp_path, ms=(1,)).close()
    with PartialCampaign.open(tmp_path, recorded.header(**changes)) as other:
        assert other.finished == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1.5},
        {"rung": "R9"},
        {"device": {"name": "x"}},
        {"source": recorded.header()["source"] | {"tree_digest": "short"}},
        {"extra": 1},
    ],
)
def test_header_is_refused_before_the_work(tmp_path, changes):
    with pytest.raises(CampaignError, match="header"):
        PartialCampaign.open(tmp_path, recorded.header(**changes))


def test_two_processes_cannot_write_one_journal(tmp_path):
    with recorded.journal(tmp_path, ms=()), pytest.raises(CampaignError, match="open in another"):
        PartialCampaign.open(tmp_path, recorded.header())
    PartialCampaign.open(tmp_path, recorded.header()).close()


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda p: p["checks"].clear(), "passed without a check"),
        (
            lambda p: p["checks"].append(recorded.check(p["cells"][1], "poison", False)),
            "1 of its 2 checks failed",
        ),
        (
            lambda p: p["cells"].__setitem__(1, replace(p["cells"][1], correctness="failed")),
            "failed, but no check",
        ),
        (lambda p: p["cells"].append(p["cells"][0]), "occurs twice"),
        (lambda p: p["cells"].pop(0), "no cell here"),
        (lambda p: p["cells"].append(recorded.cell(role="product", m=2)), "has the roles"),
    ],
)
def test_impossible_points_are_refused_whole(tmp_path, edit, says):
    with recorded.journal(tmp_path, ms=()) as partial:
        point = recorded.point()
        edit(point)
        with pytest.raises(CampaignError, match=says):
            partial.append_point("p", **point)
        assert partial.finished == ()
        partial.append_point("p", **recorded.point())


def test_a_failed_cell_is_recorded_without_samples_and_makes_the_campaign_invalid(tmp_path):
    with recorded.journal(tmp_path, ms=()) as partial:
        bad = recorded.cell("qgemv_mx", "product", correctness="failed")
        partial.append_point(
            "p", [bad], [recorded.check(bad, passed=False, measured=3.0, limit=1.0)]
        )
        folder = records.finalise(partial, tmp_path / "data")
    assert records.verify(folder) == []
    found = records.load(folder)
    assert found.cells[0].time is None
    assert records.invalid(found) == [f"{bad} failed its correctness checks"]


def test_a_point_where_every_arm_failed_has_an_empty_table(tmp_path):
    bad = recorded.cell(correctness="failed")
    nothing = pd.DataFrame([], columns=samples.SAMPLES_SCHEMA.names)
    window = pd.DataFrame([], columns=samples.TELEMETRY_SCHEMA.names)
    with recorded.journal(tmp_path, ms=()) as partial:
        partial.append_point("p", [bad], [recorded.check(bad, passed=False)], nothing, window)
        partial.append_point("q_o_proj/M8", **recorded.point(8))
        assert len(partial.contents().samples) == len(recorded.legs())


def test_more_than_a_tenth_of_the_blocks_dropped_is_invalid(tmp_path):
    point = recorded.point(blocks=9)
    leg = point["samples"]["block"] == 0
    point["samples"]["dropped"] = leg
    point["samples"]["drop_reason"] = np.where(leg, "hw_slowdown", None)
    with recorded.journal(tmp_path, ms=()) as partial:
        partial.append_point("p", **point)
        found = records.load(records.finalise(partial, tmp_path / "data"))
    assert len(records.invalid(found)) == 1 and "1 of 9" in records.invalid(found)[0]


def test_attempts_record_refusals_failures_crashes_and_interruptions(tmp_path):
    with recorded.journal(tmp_path, ms=()) as partial:
        with partial.attempt("a") as attempt:
            attempt.refused("2 copies fit, 9 are needed")
        with partial.attempt("b", kernel="x", M=1) as attempt:
            attempt.failed("probe_ramp")
        with pytest.raises(ValueError), partial.attempt("c"):
            raise ValueError("boom")
        with pytest.raises(KeyboardInterrupt), partial.attempt("d"):
            raise KeyboardInterrupt
        with pytest.raises(TypeError), partial.attempt("e", color="red"):
            pass
        found = [(a.stage, a.status, a.reason) for a in partial.contents().attempts]
    assert found == [
        ("a", "refused", "2 copies fit, 9 are needed"),
        ("b", "failed", "probe_ramp"),
        ("c", "crashed", "ValueError: boom"),
        ("d", "interrupted", "KeyboardInterrupt"),
    ]


WRITER = """
import sys, time
from pathlib import Path
sys.path[:0] = {path!r}
import recorded
partial = recorded.journal(Path({root!r}), ms=(1,))
with partial.attempt("point", shape="q_o_proj", M=8):
    part = partial.folder / "part-00001.samples.parquet"
    part.write_bytes(b"half a part")
    with (partial.folder / "journal.jsonl").open("ab") as file:
        file.write(b'{{"type": "point", "point": "q_o_')
        file.flush()
        print("writing", flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_writer_loses_one_point_and_leaves_an_attempt(tmp_path, how):
    paths = [str(REPO / "tests/lab"), str(REPO / "workflow"), str(REPO / "kernels")]
    code = WRITER.format(path=paths, root=str(tmp_path))
    writer = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert writer.stdout.readline() == b"writing\n"
    writer.send_signal(how)
    writer.wait()
    writer.stdout.close()
    with PartialCampaign.open(tmp_path, recorded.header()) as partial:
        assert partial.finished == ("q_o_proj/M1",)
        statuses = [a.status for a in partial.contents().attempts]
        assert statuses == ["ok", "interrupted" if how == signal.SIGINT else "crashed"]
        partial.append_point("q_o_proj/M8", **recorded.point(8))
        folder = records.finalise(partial, tmp_path / "data")
    assert records.verify(folder) == []
    assert {c.M for c in records.load(folder).cells} == {1, 8}


def test_a_part_that_changes_under_an_open_journal_is_refused(tmp_path):
    with recorded.journal(tmp_path) as partial:
        part = partial.folder / "part-00001.samples.parquet"
        part.write_bytes(part.read_bytes()[:-1])
        with pytest.raises(CampaignError, match="part-00001.samples.parquet of point q_o_proj/M8"):
            records.finalise(partial, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_parts_and_their_names_are_on_the_disk_before_the_line_that_vouches_for_them(
    tmp_path, monkeypatch
):
    with recorded.journal(tmp_path, ms=()) as partial:
        synced, fsync = [], os.fsync

        def watched(handle):
            fsync(handle)
            found = os.fstat(handle)
            names = sorted(p.name for p in partial.folder.glob("part-*.parquet"))
            synced.append((found.st_ino, found.st_size, names))

        monkeypatch.setattr(os, "fsync", watched)
        partial.append_point("q_o_proj/M1", **recorded.point(1))
        parts = [partial.folder / f"part-00000.{name}.parquet" for name in ("samples", "telemetry")]
        wanted = [*parts, partial.folder, partial.folder / "journal.jsonl"]
        assert [inode for inode, *_ in synced] == [path.stat().st_ino for path in wanted]
        assert [size for _, size, _ in synced[:2]] == [path.stat().st_size for path in parts]
        assert synced[2][2] == [path.name for path in parts], "the folder after the renames"


def test_a_new_journal_is_on_the_disk_with_its_folder_and_header(tmp_path, monkeypatch):
    synced, fsync = set(), os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: (synced.add(os.fstat(handle).st_ino), fsync(handle))
    )
    with PartialCampaign.open(tmp_path / "partial", recorded.header()) as partial:
        for path in (tmp_path / "partial", partial.folder, partial.folder / "header.json"):
            assert path.stat().st_ino in synced, path


def _cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def _zeroed(path):
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("damage", [Path.unlink, _cut, _zeroed])
@pytest.mark.parametrize("kind", ["samples", "telemetry"])
def test_a_point_whose_part_a_power_cut_took_is_taken_again(tmp_path, damage, kind):
    with recorded.journal(tmp_path) as partial:
        file = f"part-00000.{kind}.parquet"
        damage(partial.folder / file)
    for _ in range(2):  # said once, however often the journal is opened
        with PartialCampaign.open(tmp_path, recorded.header()) as again:
            assert again.finished == ("q_o_proj/M8",)
            attempts = again.contents().attempts
            assert [a.status for a in attempts] == ["ok", "ok", "crashed"]
            assert file in attempts[-1].reason and "q_o_proj/M1" in attempts[-1].reason
    with PartialCampaign.open(tmp_path, recorded.header()) as again:
        again.append_point("q_o_proj/M1", **recorded.point(1, seed=1))
        assert again.finished == ("q_o_proj/M8", "q_o_proj/M1")
    with PartialCampaign.open(tmp_path, recorded.header()) as last:
        assert last.finished == ("q_o_proj/M8", "q_o_proj/M1")
        folder = records.finalise(last, tmp_path / "data")
    assert records.verify(folder) == []
    found = records.load(folder)
    whole = recorded.campaign(tmp_path / "other")
    assert {c.key: c.time for c in found.cells} == {
        c.key: c.time for c in records.load(whole).cells
    }
    assert len(found.attempts) == 3


def _at(number):
    """Put `line` at the place of line `number`, moving the rest down."""

    def edit(journal, line):
        lines = journal.read_bytes().splitlines(keepends=True)
        journal.write_bytes(b"".join([*lines[: number - 1], line + b"\n", *lines[number - 1 :]]))

    return edit


def _first(journal, kind):
    return next(
        line for line in map(json.loads, journal.read_text().splitlines()) if line["type"] == kind
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"garbage", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1, 2]", "list, not an object"),
        (b"null", "NoneType, not an object"),
        (b'"point"', "str, not an object"),
        (b"7", "int, not an object"),
        (b"{}", "type None is not one of"),
        (b'{"type": "finish"}', "type 'finish' is not one of"),
        (b'{"type": ["point"]}', "no line of a journal"),
        (b'{"type": "begin"}', "no line of a journal"),
        (b'{"type": "begin", "stage": "x", "started_utc": "now"}', "not a UTC time"),
        (b'{"type": "point", "point": "p"}', "a point of the keys"),
        (b'{"type": "point"}', "no line of a journal"),
        (b'{"type": "lost", "point": "p"}', "point 'p' is lost, but never was"),
        (b'{"type": "constants", "constants": {"x": 1}}', "constants"),
        (b'{"type": "constants"}', "no line of a journal"),
        (b'{"type": "counters", "counters": [1]}', "counters"),
    ],
)
def test_a_line_that_no_campaign_writes_is_refused_with_its_number(tmp_path, line, says):
    with recorded.journal(tmp_path) as partial:
        journal = partial.folder / "journal.jsonl"
    _at(2)(journal, line)
    with pytest.raises(CampaignError, match="line 2 of .*journal.jsonl") as refused:
        PartialCampaign.open(tmp_path, recorded.header())
    assert says in str(refused.value)


def test_an_attempt_that_never_began_is_refused_with_its_number(tmp_path):
    with recorded.journal(tmp_path) as partial:
        journal = partial.folder / "journal.jsonl"
    ended = json.dumps(_first(journal, "attempt")).encode()
    _at(1)(journal, ended)
    with pytest.raises(CampaignError, match="line 1 of .*an attempt ends that never began"):
        PartialCampaign.open(tmp_path, recorded.header())


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda p: None, "finished already"),
        (lambda p: p.update(point="q", cells=5), "no line of a journal"),
        (lambda p: p.update(point="q", cells=[{}]), "cell lacks the keys"),
        (lambda p: p.update(point="q", checks=[7]), "check is int"),
        (lambda p: p.update(point="q", parts={}), "are not samples and telemetry"),
        (lambda p: p.update(point="q", parts=3), "no line of a journal"),
        (
            lambda p: p.update(point="q") or p["parts"]["samples"].update(file="../x.parquet"),
            "no part of a point",
        ),
    ],
)
def test_a_point_line_that_no_campaign_writes_is_refused(tmp_path, edit, says):
    with recorded.journal(tmp_path) as partial:
        journal = partial.folder / "journal.jsonl"
    line = _first(journal, "point")
    edit(line)
    with journal.open("a") as file:
        file.write(json.dumps(line) + "\n")
    last = len(journal.read_text().splitlines())
    with pytest.raises(CampaignError, match=f"line {last} of .*journal.jsonl") as refused:
        PartialCampaign.open(tmp_path, recorded.header())
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (lambda t: t[: len(t) // 2], "Unterminated|Expecting"),
        (lambda t: "", "Expecting value"),
        (lambda t: "\0" * len(t), "Expecting value"),
        (lambda t: f"[{t}]", "list, not an object"),
        (lambda t: t.replace('"seed": 7', '"seed": 8'), "its key is"),
        (lambda t: t.replace('"seed": 7', '"seed": NaN'), "NaN"),
        (lambda t: t.replace('"rung": "R0"', '"rung": "R9"'), "R9"),
        (lambda t: t.replace('"created_utc"', '"created"'), "created"),
    ],
)
def test_a_damaged_header_is_refused_and_the_error_says_what_to_do(tmp_path, text, says):
    with recorded.journal(tmp_path) as partial:
        path = partial.folder / "header.json"
    path.write_text(text(path.read_text()))
    with pytest.raises(CampaignError, match=says) as refused:
        PartialCampaign.open(tmp_path, recorded.header())
    assert f"move the folder {path.parent} away" in str(refused.value)
    path.parent.rename(tmp_path / "away")
    with PartialCampaign.open(tmp_path, recorded.header()) as fresh:
        assert fresh.finished == ()


def test_too_large_a_campaign_is_refused_with_size_and_limit_and_keeps_its_journal(tmp_path):
    with recorded.journal(tmp_path / "partial") as partial:
        with pytest.raises(CampaignError, match=r"is \d+ bytes, over the limit of 1000 bytes"):
            records.finalise(partial, tmp_path / "data", max_bytes=1000)
        assert not list((tmp_path / "data/campaigns").iterdir())
        assert records.verify(records.finalise(partial, tmp_path / "data")) == []


def test_an_interrupted_finalise_leaves_no_half_campaign(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with recorded.journal(tmp_path / "partial") as partial:
        monkeypatch.setattr(records, "place", killed)
        with pytest.raises(KeyboardInterrupt):
            records.finalise(partial, tmp_path / "data")
    assert records.list_campaigns(tmp_path / "data") == []
    assert not list((tmp_path / "data/campaigns").iterdir())


# ---------------------------------------------------------------- tampering


def _redo_sums(folder: Path) -> Path:
    """What a careful forger does after an edit: new sums, new name."""
    sums = {name: files.sha256(folder / name) for name in records.HASHED}
    (folder / records.SUMS).write_bytes(rfc8785.dumps(sums))
    value = json.loads((folder / records.CAMPAIGN).read_text())
    target = folder.with_name(records.campaign_id(value, sums))
    os.rename(folder, target)
    return target


def _edit_json(folder: Path, edit) -> None:
    value = json.loads((folder / records.CAMPAIGN).read_text())
    edit(value)
    (folder / records.CAMPAIGN).write_text(json.dumps(value))


@pytest.mark.parametrize("name", records.FILES)
def test_one_changed_byte_of_any_file_is_found(tmp_path, name):
    folder = recorded.campaign(tmp_path)
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    assert records.verify(folder)
    with pytest.raises(CampaignError, match=folder.name):
        records.load(folder)


def test_missing_extra_and_linked_files_and_a_new_name_are_found(tmp_path):
    folder = recorded.campaign(tmp_path)
    (folder / "note.txt").write_text("x")
    assert any("note.txt does not belong" in text for text in records.verify(folder))
    (folder / "note.txt").unlink()
    os.rename(folder / "telemetry.parquet", tmp_path / "elsewhere")
    assert records.verify(folder) == ["telemetry.parquet is missing"]
    os.symlink(tmp_path / "elsewhere", folder / "telemetry.parquet")
    assert any("is a link" in text for text in records.verify(folder))
    (folder / "telemetry.parquet").unlink()
    os.rename(tmp_path / "elsewhere", folder / "telemetry.parquet")
    assert records.verify(folder) == []
    renamed = folder.with_name(folder.name.replace("20260102", "20260103"))
    os.rename(folder, renamed)
    assert any("its content gives" in text for text in records.verify(renamed))
    assert records.verify(tmp_path / "nowhere") == ["nowhere is no folder"]


def _faster(value):
    value["cells"][1]["time"]["time_us"] *= 0.999


def _lower_floor(value):
    value["cells"][1]["floor"]["ci_low_us"] *= 0.9


def _fewer_blocks(value):
    value["cells"][1]["time"]["n_blocks"] += 1


def _drop_time(value):
    value["cells"][1]["time"] = None


@pytest.mark.parametrize("edit", [_faster, _lower_floor, _fewer_blocks, _drop_time])
def test_a_time_that_the_samples_do_not_give_is_found_even_with_new_sums(tmp_path, edit):
    folder = recorded.campaign(tmp_path)
    _edit_json(folder, edit)
    problems = records.verify(_redo_sums(folder))
    assert problems and all("the samples give" in text for text in problems), problems


def test_edited_samples_are_found_even_with_new_sums(tmp_path):
    folder = recorded.campaign(tmp_path)
    frame = samples.read_table(folder / records.SAMPLES, samples.SAMPLES_SCHEMA)
    for name in ("t_n_us", "t_2n_us", "time_us", "intercept_us"):
        frame[name] *= np.where(frame["kernel"] == "cublaslt_fp8", 0.99, 1.0)
    samples.write_table(frame, samples.SAMPLES_SCHEMA, folder / records.SAMPLES)
    problems = records.verify(_redo_sums(folder))
    assert len(problems) == 2 and all("cublaslt_fp8" in text for text in problems), problems


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda v: v.__setitem__("surprise", 1), "surprise"),
        (lambda v: v.pop("seed"), "seed"),
        (lambda v: v["cells"][0].__setitem__("note", "x"), "note"),
        (lambda v: v["device"].__setitem__("serial", "x"), "serial"),
        (lambda v: v["cells"][0].__setitem__("N", "4096"), "N"),
        (lambda v: v["cells"].append(v["cells"][0]), "twice"),
        (lambda v: v["cells"][2].__setitem__("time", v["cells"][1]["time"]), "null"),
        (lambda v: v["cells"].pop(1), "no cell here"),
        (lambda v: v.__setitem__("schema_version", 2), "schema_version"),
        (lambda v: v["constants"]["launch_floor_us"].pop("how"), "how"),
        (lambda v: v["attempts"][0].__setitem__("status", "fine"), "fine"),
    ],
)
def test_closed_schema_even_with_new_sums(tmp_path, edit, says):
    folder = recorded.campaign(tmp_path)
    _edit_json(folder, edit)
    folder = _redo_sums(folder)
    problems = records.verify(folder)
    assert any(says in text for text in problems), problems


@pytest.mark.parametrize("text", ['"seed": NaN', '"seed": Infinity', '"seed": 7, "seed": 7'])
def test_json_that_is_no_json_is_refused(tmp_path, text):
    folder = recorded.campaign(tmp_path)
    path = folder / records.CAMPAIGN
    path.write_text(path.read_text().replace('"seed": 7', text))
    problems = records.verify(folder)
    assert any("NaN" in p or "Infinity" in p or "twice" in p for p in problems), problems


def test_nan_cannot_be_written(tmp_path):
    point = recorded.point()
    point["samples"].loc[0, "time_us"] = math.nan
    with recorded.journal(tmp_path, ms=()) as partial:
        with pytest.raises(CampaignError, match="not a number"):
            partial.append_point("p", **point)
        good = partial.constants["launch_floor_us"]
        with pytest.raises(CampaignError, match="JSON"):
            partial.add_constants({"x": good | {"value": math.nan}})
        with pytest.raises(CampaignError, match="how"):
            partial.add_constants({"x": {k: v for k, v in good.items() if k != "how"}})
        partial.add_constants({"x": good | {"value": np.float32(2.5), "n": np.int64(3)}})
        assert partial.constants["x"]["value"] == 2.5
        counter = {
            "kernel": "stream_read", "format": "bf16", "shape": "q_o_proj", "N": 1, "K": 1, "M": 1,
            "regime": "cold_graph", "metric": "dram__bytes_read.sum", "unit": "bytes", "value": 1.0, "tool": "ncu",
        }  # fmt: skip
        with pytest.raises(CampaignError, match="value"):
            partial.add_counters([counter | {"value": "many"}])
        partial.add_counters([counter])
        assert partial.contents().counters == (counter,)


# ---------------------------------------------------------------- the shelf


def test_newest_by_rung_device_cubins_and_kind(tmp_path):
    data = tmp_path / "data"
    assert records.newest(data, "R0") is None
    device = recorded.header()["device"]
    old = recorded.campaign(tmp_path, ms=(1,))
    new = recorded.campaign(
        tmp_path, ms=(1,), created_utc="2026-02-02T00:00:00Z", device=device | {"uuid": "GPU-1"}
    )
    pilot = recorded.campaign(tmp_path, ms=(1,), created_utc="2026-03-02T00:00:00Z", kind="pilot")
    (data / "campaigns" / ".writing-x").mkdir()
    assert records.list_campaigns(data) == sorted([old, new, pilot])
    assert records.newest(data, "R0") == new
    assert records.newest(data, "R0", kind="pilot") == pilot
    assert records.newest(data, "R0", device_uuid="GPU-0") == old
    assert records.newest(data, "R0", cubins={"3" * 64}) == new
    assert records.newest(data, "R0", cubins={"4" * 64}) is None
    assert records.newest(data, "R0", cubins=()) is None
    assert records.newest(data, "R1") is None


def test_a_constant_may_be_a_share_of_a_cell() -> None:
    """The judge reads shares under such names (lab.verdicts.share_key)."""
    import re

    from lab.schema import campaign_schema
    from lab.verdicts import share_key

    (pattern,) = campaign_schema()["properties"]["constants"]["patternProperties"]
    assert re.match(pattern, share_key("launch"))
    assert re.match(pattern, "share/launch/mxfp4/4096x4096/m1/cold_graph")
    for bad in ("Share", "share/", "share//x", "/share", "share/A"):
        assert not re.match(pattern, bad)
