"""An R1 campaign is held against the protocol and the plan of R1: a made-up one, measured by the real flow."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import recorded
from made_up_arms import FakeArm, FakeTimer
from prereg_kit import Repo

from lab import campaign_audit, measure, plan_r1, records, registry, replay, seal, soundness, source
from lab.protocol import file_of
from lab.rows import INVALID_BY_DESIGN, NOT_REACHED, to_json
from qgemm_mx.formats import weight_bytes

SHAPES = [{"name": "q_o_proj", "N": 4096, "K": 4096, "set": "frozen", "why": "made up"}]
PEERS = {"peer/humming_bf16": ("mxfp4",)}


@pytest.fixture(scope="module")
def frozen(repository) -> dict:
    """The protocol of R1 with a plan of one shape, three M and one chain."""
    value = json.loads((repository / file_of("R1")).read_text())
    chain = next(row for row in value["plan"]["further"] if row["group"] == "chain")
    causes = [
        {
            "group": "formats",
            "format": "nvfp4",
            "kernels": ["testbed/full"],
            "shapes": ["q_o_proj"],
            "m": [1],
        }
    ]
    plan = {"m": [1, 2, 1024], "causes": causes, "further": [chain]}
    return {**value, "plan": value["plan"] | plan}


def arm(kernel: str, fmt: str, shape: dict) -> FakeArm:
    family = kernel.split("/")[0]
    role = {"stream_read": "floor", "peer": "peer"}.get(
        family, "testbed" if "/" in kernel else "baseline"
    )
    right = (
        family != "probe"
        and kernel in ("testbed/full", "testbed/-layout_staging")
        or role != "testbed"
    )
    made = FakeArm(kernel, fmt, role, 4.0 if role == "floor" else 6.0, claims_right=right)
    made.weight_bytes = weight_bytes(fmt, shape["N"], shape["K"])
    if role == "baseline":
        made.tuning = {"candidates": 32, "chosen": "made up"}
    if shape["name"] == "decode_chain" and role == "testbed":
        made.launches = {"chain_pdl": made.launch}
    return made


@pytest.fixture(scope="module")
def points(frozen) -> dict[str, dict]:
    """Every point of the plan, measured."""
    timer, found = FakeTimer(), {}
    for p in plan_r1.points(frozen, SHAPES, PEERS):
        arms = [arm(*name, p.shape) for name in p.arms]
        bench = SimpleNamespace(protocol=frozen, timer=timer)
        start = timer.clock
        rows, checks, samples = measure.measure_point(bench, arms, dict(p.shape), p.m, [])
        readings = pd.DataFrame({"t_ns": range(start, timer.clock + 1, 20_000_000)})
        for name in ("sm_clock_mhz", "mem_clock_mhz", "power_w", "temperature_c"):
            readings[name] = 1.0
        readings["throttle_reasons"] = 0
        found[p.name] = {"cells": rows, "checks": checks, "samples": samples, "telemetry": readings}
    return found


@pytest.fixture
def shelf(tmp_path, frozen, repository) -> Repo:
    """A repository with both protocols frozen."""
    repo = Repo(tmp_path / "repo")
    r0 = repo.write("prereg/protocol.json", (repository / "prereg/protocol.json").read_text())
    r1 = repo.write("prereg/protocol_r1.json", json.dumps(frozen))
    shapes = repo.write("prereg/shapes.json", json.dumps({"shapes": SHAPES}))
    registry.freeze([r0, r1, shapes], repo.prereg, "a test", "none")
    repo.write("kernels/qgemm_mx/build.py")
    repo.write(".gitignore", "/partial/\n")
    repo.commit("freeze")
    return repo


def problems(repo: Repo, points: dict, protocol: str = "prereg/protocol_r1.json", **changes) -> str:
    header = recorded.header(
        rung="R1",
        source=source.describe(repo.root),
        protocol_sha256=seal.sha256(repo.root / protocol),
        prereg_head=registry.head(repo.prereg),
        seed=json.loads((repo.root / "prereg/protocol_r1.json").read_text())["seed"],
    )
    partial = records.PartialCampaign.open(repo.root / "partial", header | changes)
    for name, point in points.items():
        partial.append_point(name, **point)
    folder = records.finalise(partial, repo.root / "data")
    assert records.verify(folder) == []
    return " | ".join(p.reason for p in campaign_audit.problems(repo.root, folder))


def test_a_campaign_that_followed_the_protocol_of_r1_is_sound(shelf, points) -> None:
    assert problems(shelf, points) == ""


def test_the_protocol_of_r0_is_not_that_of_r1(shelf, points) -> None:
    """Its verdicts are DEVIATED, so the plan of R1 says nothing of it."""
    kept = {name: points[name] for name in list(points)[:1]}
    assert problems(shelf, kept, protocol="prereg/protocol.json") == ""


def test_missing_points_are_counted_and_a_pilot_may_lack_some(shelf, points) -> None:
    kept = {name: points[name] for name in list(points)[:2]}
    assert "2 points of the plan are missing" in problems(shelf, kept)
    assert problems(shelf, kept, kind="pilot") == ""


# A protocol whose campaigns their minutes may end.


def place(name: str) -> tuple[str, int, int, int]:
    """(shape, N, K, M) of a point by its name."""
    shape, m = name.split("/M")
    n, k = next(((s["N"], s["K"]) for s in SHAPES if s["name"] == shape), (0, 0))
    return shape, n, k, int(m)


def lacking(frozen: dict, points: dict, kept: list[str], lost: list, closing: bool = True) -> str:
    """What is said of a campaign of some points that records others as not reached."""
    known = frozen | ({"closing": "with --config close=true"} if closing else {})
    cells = [to_json(cell) for name in kept for cell in points[name]["cells"]]
    found = campaign_audit.point_problems(known, SHAPES, cells, plan_r1.points, lost)
    return " | ".join(found)


@pytest.fixture(scope="module")
def order(frozen) -> list[tuple]:
    """Places of the plan in the frozen order."""
    offered = {kernel: tuple(formats) for kernel, formats in PEERS.items()}
    found = plan_r1.points(frozen, SHAPES, offered)
    return [(p.shape["name"], p.shape["N"], p.shape["K"], p.m) for p in found]


def test_points_that_the_minutes_did_not_reach_may_be_missing(frozen, points, order) -> None:
    names = list(points)
    assert [place(n)[0] for n in names] == [o[0] for o in order] and len(order) == 4
    for cut in (1, 2, 3):
        assert lacking(frozen, points, names[:cut], order[cut:]) == ""
    assert lacking(frozen, points, names, []) == ""


@pytest.mark.parametrize(
    ("kept", "lost", "closing", "words"),
    [
        (2, [2, 3], False, ["2 points are recorded as not reached, which the protocol does not",
                            "2 points of the plan are missing"]),
        (4, [3], False, ["1 points are recorded as not reached, which"]),
        (2, [3], True, ["1 points of the plan are missing, the first"]),
        (3, [], True, ["1 points of the plan are missing, the first"]),
        (4, [3], True, ["is recorded as not reached, but was measured"]),
        (3, [3, 3], True, ["is recorded as not reached 2 times"]),
        (3, [3, None], True, ["gate_up 14336x4096 M=7 is recorded as not reached, but is no point of the plan"]),
    ],
)  # fmt: skip
def test_an_attempt_excuses_its_own_point_alone(
    frozen, points, order, kept, lost, closing, words
) -> None:
    gone = [("gate_up", 14336, 4096, 7) if i is None else order[i] for i in lost]
    found = lacking(frozen, points, list(points)[:kept], gone, closing)
    assert all(word in found for word in words) and found.count(" | ") == len(words) - 1, found


def test_points_are_not_reached_in_the_frozen_order(frozen, points, order) -> None:
    """A campaign that left out what it did not like, and went on, was not ended by its minutes."""
    names = list(points)
    found = lacking(frozen, points, [names[0], names[2], names[3]], [order[1]])
    assert "before it in the frozen order, is recorded as not reached" in found


def test_a_campaign_that_its_minutes_ended_is_sound_and_noted(
    tmp_path, frozen, points, order, repository
) -> None:
    repo = Repo(tmp_path / "repo")
    known = frozen | {"closing": "with --config close=true the minutes of the run end the campaign"}
    r1 = repo.write("prereg/protocol_r1.json", json.dumps(known))
    shapes = repo.write("prereg/shapes.json", json.dumps({"shapes": SHAPES}))
    registry.freeze([r1, shapes], repo.prereg, "a test", "none")
    repo.write("kernels/qgemm_mx/build.py")
    repo.write(".gitignore", "/partial/\n/data/\n")
    repo.commit("freeze")
    header = recorded.header(
        rung="R1",
        source=source.describe(repo.root),
        protocol_sha256=seal.sha256(r1),
        prereg_head=registry.head(repo.prereg),
        seed=known["seed"],
    )
    said = []
    for excused in (2, 1):  # of the two that are missing
        partial = records.PartialCampaign.open(repo.root / "partial", header)
        for name in list(points)[:2]:
            partial.append_point(name, **points[name])
        for shape, n, k, m in order[2 : 2 + excused]:
            with partial.attempt("point", shape=shape, N=n, K=k, M=m) as attempt:
                attempt.refused(NOT_REACHED)
        folder = records.finalise(partial, repo.root / "data")
        assert records.verify(folder) == []
        said.append([p.reason for p in campaign_audit.problems(repo.root, folder)])
        note = campaign_audit.closed(folder)
        assert f"closed by its minutes, {excused} of {2 + excused} points of its plan" in note
    assert said[0] == [] and "1 points of the plan are missing" in said[1][0]


def test_a_whole_campaign_has_no_note(tmp_path) -> None:
    assert campaign_audit.closed(recorded.campaign(tmp_path)) is None
    assert campaign_audit.closed(tmp_path / "nothing") is None


def without(point: dict, kernel: str) -> dict:
    """A point as if an arm had not been there; the order of the others is that of a run without it."""
    return {
        **point,
        "cells": [c for c in point["cells"] if c.kernel != kernel],
        "checks": [c for c in point["checks"] if c.kernel != kernel],
        "samples": point["samples"][point["samples"].kernel != kernel],
    }


def test_an_arm_of_the_plan_that_is_missing_is_named(shelf, points) -> None:
    found = problems(
        shelf, points | {"q_o_proj/M1": without(points["q_o_proj/M1"], "testbed/none")}
    )
    assert (
        "testbed/none mxfp4 of the plan is missing" in found and "order of the frozen seed" in found
    )


def test_an_arm_that_the_plan_has_not_is_named(shelf, frozen, points) -> None:
    shape = SHAPES[0]
    names = [("stream_read", "mxfp4"), ("stream_read", "nvfp4"), ("cublaslt_bf16", "bf16"),
             ("cublaslt_fp8", "fp8_e4m3"), ("peer/humming_bf16", "mxfp4"), ("cause/stages/9", "mxfp4")]  # fmt: skip
    bench = SimpleNamespace(protocol=frozen, timer=FakeTimer())
    made = [arm(*n, shape) for n in names]
    made[-1].claims_right = True
    rows, checks, samples = measure.measure_point(bench, made, shape, 2, [])
    point = points["q_o_proj/M2"] | {"cells": rows, "checks": checks, "samples": samples}
    found = problems(shelf, points | {"q_o_proj/M2": point})
    assert "cause/stages/9 mxfp4 is no arm of the plan" in found


@pytest.mark.parametrize(
    ("regime", "word"),
    [("chain_pdl", "chain_pdl: missing"), ("hot_graph", "hot_graph: missing")],
)
def test_a_regime_of_a_point_that_is_missing_is_named(shelf, points, regime, word) -> None:
    point = points["decode_chain/M1"]
    cut = point | {
        "cells": [c for c in point["cells"] if c.regime != regime],
        "samples": point["samples"][point["samples"].regime != regime],
    }
    assert word in problems(shelf, points | {"decode_chain/M1": cut})


def test_wrong_arms_are_in_the_headline_alone(points) -> None:
    cells = [c for p in points.values() for c in p["cells"]]
    wrong = [c for c in cells if c.correctness == INVALID_BY_DESIGN]
    assert wrong and {c.regime for c in wrong} == {"cold_graph"}


def test_a_stream_is_owed_to_the_formats_that_the_protocol_names(points, frozen) -> None:
    point = points["q_o_proj/M2"]
    timed = [to_json(c) for c in records.fill_times(point["cells"], point["samples"])]
    floors = frozen["plan"]["floors"]
    assert list(campaign_audit.byte_problems(timed, floors)) == []
    assert {p.split()[0] for p in campaign_audit.byte_problems(timed)} == {
        "cublaslt_bf16",
        "cublaslt_fp8",
    }
    lost = [c | {"floor": None} if c["kernel"] == "peer/humming_bf16" else c for c in timed]
    (text,) = campaign_audit.byte_problems(lost, floors)
    assert text.startswith("peer/humming_bf16")


def test_legs_of_a_wrong_arm_never_extend(shelf, frozen, points) -> None:
    """Its scatter is no reason to extend: legs that were extended for it alone are named."""
    timer, shape = FakeTimer(), SHAPES[0]
    quiet = timer._leg

    def leg(a: FakeArm, nodes: int, looped: bool):
        timer.noise = 0.2 if not a.claims_right else 0.003
        return quiet(a, nodes, looped)

    timer._leg = leg
    (p,) = (p for p in plan_r1.points(frozen, SHAPES, PEERS) if p.name == "q_o_proj/M1")
    arms = [arm(*name, shape) for name in p.arms]
    bench = SimpleNamespace(protocol=frozen, timer=timer)
    rows, checks, samples = measure.measure_point(bench, arms, shape, 1, [])
    point = points["q_o_proj/M1"] | {"cells": rows, "checks": checks, "samples": samples}
    assert problems(shelf, points | {"q_o_proj/M1": point}) == ""
    judged = [
        replace(c, correctness="passed") if c.correctness == INVALID_BY_DESIGN else c for c in rows
    ]
    found = campaign_audit.plan_problems(
        frozen, [to_json(c) for c in judged], [to_json(c) for c in checks], samples
    )
    assert any("is not extended" in text for text in found)


def test_the_report_names_both_kernels_that_run_beside_themselves(points) -> None:
    found = replay.twins(pd.concat([p["samples"] for p in points.values()], ignore_index=True))
    assert found["kernels"] == ["cublaslt_fp8", "testbed/full"]
    words = soundness._twin_answer(None, {"a_a": found})["words"]
    assert words.startswith(
        "cublaslt_fp8 and testbed/full each run beside an exact copy of themselves (A/A)"
    )
    one = soundness._twin_answer(None, {"a_a": found | {"kernels": ["cublaslt_fp8"]}})["words"]
    assert one.startswith("cublaslt_fp8 runs beside an exact copy of itself (A/A)")
