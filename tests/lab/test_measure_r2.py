"""The R2 campaign without a device: made-up arms under the real protocol, plan and journal."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import recorded
from made_up_arms import FakeArm
from made_up_product import Clock, FakePeer, FakeProduct, bench, workshops

from lab import (
    campaign,
    campaign_audit,
    cells,
    host_times,
    measure,
    measure_r2,
    plan_r2,
    product_arms,
    records,
)
from lab.campaign import Activations, Budget, ChainPair, Unfinished
from lab.journal import PartialCampaign, check_point
from lab.protocol import file_of
from lab.rows import CheckRow, to_json
from lab.samples import DUPLICATE_SUFFIX

SHAPE = {"name": "q_o_proj", "N": 4096, "K": 4096}


@pytest.fixture(scope="module")
def protocol(repository) -> dict:
    return json.loads((repository / file_of("R2")).read_text())


@pytest.fixture(scope="module")
def shapes(repository) -> list[dict]:
    return json.loads((repository / "prereg/shapes.json").read_text())["shapes"]


# One point.


def role_of(kernel: str) -> str:
    return "testbed" if plan_r2.is_ablation(kernel) else "product"


def arms() -> list[FakeArm]:
    made = [
        FakeArm("stream_read", "mxfp4", "floor", 4.0),
        FakeArm("cublaslt_fp8", "fp8_e4m3", "baseline", 7.0),
        FakeArm("peer/humming_bf16", "mxfp4", "peer", 6.0),
    ]
    for kernel in ("", "/searched", "/batch_invariant", "/step0", "/-columns"):
        name = f"qgemv_mx{kernel}"
        made.append(FakeArm(name, "mxfp4", role_of(name), 5.0 + len(made) / 10))
    return made


def test_the_ablation_is_checked_and_has_times(protocol) -> None:
    rows, checks, samples = measure.measure_point(bench(protocol), arms(), SHAPE, 16, [])
    assert check_point(rows, checks, samples) == []
    timed = records.fill_times(rows, samples)
    cold = {c.kernel: c for c in timed if c.regime == "cold_graph"}
    for kernel in ("qgemv_mx", "qgemv_mx/searched", "qgemv_mx/step0", "qgemv_mx/-columns"):
        assert cold[kernel].correctness == "passed"
        assert cold[kernel].time is not None and cold[kernel].floor is not None
        assert {c.name for c in checks if c.kernel == kernel} == {
            "random_fp64_before", "random_fp64_after",
        }  # fmt: skip
    assert cold["qgemv_mx/step0"].role == "testbed" and cold["qgemv_mx/searched"].role == "product"
    others = set(samples[samples.regime != "cold_graph"].kernel)
    assert others == {"stream_read", "cublaslt_fp8", "peer/humming_bf16", "qgemv_mx"}
    twins = {a for a in samples.arm if a.endswith(DUPLICATE_SUFFIX)}
    assert twins == {"cublaslt_fp8/fp8_e4m3#2", "qgemv_mx/mxfp4#2"}


@pytest.mark.parametrize("kernel", ["qgemv_mx", "qgemv_mx/step0"])
@pytest.mark.parametrize("stage", ["before", "after"])
def test_what_is_wrong_has_no_time(protocol, kernel, stage) -> None:
    some = arms()
    next(a for a in some if a.kernel == kernel).broken = stage
    rows, checks, samples = measure.measure_point(bench(protocol), some, SHAPE, 1, [])
    assert check_point(rows, checks, samples) == []
    assert {c.correctness for c in rows if c.kernel == kernel} == {"failed"}
    assert kernel not in set(samples.kernel) and "stream_read" in set(samples.kernel)


# The workshop.


@pytest.fixture
def workshop(monkeypatch, protocol):
    return workshops(monkeypatch, protocol, measure_r2.Workshop, plan_r2.is_ablation)


def planned(protocol, shapes, *names: str) -> list[plan_r2.Point]:
    found = plan_r2.points(protocol, shapes, {FakePeer.NAME: FakePeer.formats})
    return [p for p in found if not names or p.name in names]


def test_every_arm_of_every_point_is_made_in_the_order_of_the_plan(
    workshop, protocol, shapes
) -> None:
    shop, said, packed = workshop()
    for p in planned(protocol, shapes):
        packed.clear()
        made = shop.arms(shop.kit([p]), p, Activations.make(None, p.m, 1))
        assert tuple((a.kernel, a.format) for a in made) == p.arms
        searched = [a for a in made if a.kernel == "qgemv_mx/searched"]
        assert [a.tuned for a in searched] == ([] if p.further else [1])
        assert all(a.tuned == 0 for a in made if isinstance(a, FakeProduct) and a not in searched)
        if not p.further:
            formats = [fmt for kernel, fmt in p.arms if kernel == "qgemv_mx"]
            assert packed == [(fmt, p.shape["N"], p.shape["K"]) for fmt in formats]
    assert any("1 plans not timed: a plan: random" in line for line in said)


def test_a_weight_is_packed_once_a_shape(workshop, protocol, shapes) -> None:
    shop, _, packed = workshop()
    points = planned(protocol, shapes, "gate_up/M1", "gate_up/M2", "gate_up/M16")
    kit = shop.kit(points)
    for p in points:
        shop.arms(kit, p, Activations.make(None, p.m, 1))
    assert packed == [(f, 14336, 4096) for f in ("mxfp4", "nvfp4", "int4_g128")]


def test_the_chain_is_a_pair_of_plain_and_programmatic_launches(workshop, protocol, shapes) -> None:
    shop, _, packed = workshop()
    (p,) = planned(protocol, shapes, "decode_chain/M4")
    kit = shop.kit([p])
    assert [(n, k) for _, n, k in packed] == [
        (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336),
    ]  # fmt: skip
    _, chain = shop.arms(kit, p, Activations.make(None, 4, 1))
    assert isinstance(chain, ChainPair) and chain.kernel == "qgemv_mx"
    assert chain.tuning["chosen"] == "programmatic False; chain_pdl: programmatic True"


# The opening.


def test_the_opening_probes_first_and_gives_what_is_wrong_no_time(
    protocol, tmp_path, monkeypatch
) -> None:
    place = dict(kernel="qgemv_mx", format="mxfp4", shape="probe_1024x4096", N=1024, K=4096, M=1)
    asked: dict[str, Any] = {}

    def check(name: str, passed: bool) -> CheckRow:
        return CheckRow(**place, name=name, passed=passed, measured=0.5, limit=1.0, detail="")

    class Calls:
        missing = {"torch": "no module named torch"}
        passed = True

        def __init__(self, bench: Any) -> None:
            pass

        def checks(self) -> list[CheckRow]:
            return [check("linear_cupy_fp64", Calls.passed)]

        def constants(self) -> dict:
            return {host_times.HOST: host_times.median_row([7.0] * 21, "us", "made up")}

    def probes(stream, ablations):
        asked["ablations"] = list(ablations)
        return [check("probe_ramp", True)]

    monkeypatch.setattr(product_arms, "use_cubins", lambda folder: asked.update(folder=folder))
    monkeypatch.setattr(product_arms, "probe_checks", probes)
    monkeypatch.setattr(host_times, "PlainCalls", Calls)
    monkeypatch.setattr(measure_r2, "_constants", lambda bench: {})
    monkeypatch.setattr(campaign, "free", lambda: None)
    said: list[str] = []
    with PartialCampaign.open(tmp_path / "a", recorded.header(rung="R2")) as partial:
        measure_r2._open(bench(protocol), partial, said.append)
        assert asked["folder"] == "cubins"
        assert asked["ablations"] == measure_r2.ablations(protocol)
        assert asked["ablations"] and all(map(plan_r2.is_ablation, asked["ablations"]))
        assert set(partial.constants) == {host_times.HOST}
        names = {c.name for c in partial.contents().checks}
        assert names == {"probe_ramp", "linear_cupy_fp64"}
        before = len(partial.contents().attempts)
        measure_r2._open(bench(protocol), partial, said.append)  # the next sitting
        assert len(partial.contents().attempts) == before
    assert "no time of a call with torch arrays: no module named torch" in said
    Calls.passed = False
    with PartialCampaign.open(tmp_path / "b", recorded.header(rung="R2")) as partial:
        measure_r2._open(bench(protocol), partial, said.append)
        assert host_times.HOST not in partial.constants
        assert [a.status for a in partial.contents().attempts] == ["failed", "failed"]


# The campaign in pieces.


def test_the_whole_plan_in_pieces_is_what_the_audit_asks_for(
    workshop, protocol, shapes, tmp_path
) -> None:
    points = planned(protocol, shapes)
    telemetry = SimpleNamespace(rows=recorded.telemetry().to_dict("records"))
    with PartialCampaign.open(tmp_path / "partial", recorded.header(rung="R2")) as partial:
        probed = [
            CheckRow(kernel, "mxfp4", "probe_200x1664", 200, 1664, 16, "probe_ramp", True, 0.0, 0.0, "")
            for kernel in ("qgemv_mx", "qgemv_mx/batch_invariant", "qgemv_mx/step0")
        ]  # fmt: skip
        partial.append_point(measure.PROBES, [], probed)
    pieces, stopped = 0, True
    while stopped:
        shop, *_ = workshop()
        partial = PartialCampaign.open(tmp_path / "partial", recorded.header(rung="R2"))
        taken, stopped = len(partial.finished), False
        try:
            budget = Budget(8, Clock(10))
            campaign.measure_points(shop, partial, points, telemetry, budget, lambda line: None)
        except Unfinished as error:
            stopped = True
            assert f"{len(points) + 1 - len(partial.finished)} points of R2 are left" in str(error)
            partial.close()
        pieces += 1
        assert len(partial.finished) > taken  # each piece gets on
    assert pieces > 1 and list(partial.finished) == [measure.PROBES, *(p.name for p in points)]
    with partial:
        folder = records.finalise(partial, tmp_path / "data")
    assert records.verify(folder) == [] and folder.name.startswith("r2-")
    whole = records.load(folder)
    rows = [to_json(c) for c in whole.cells]
    checks = [to_json(c) for c in whole.checks]
    assert list(campaign_audit.plan_problems(protocol, rows, checks, whole.samples)) == []
    assert (
        list(campaign_audit.point_problems(protocol, shapes, rows, campaign_audit.PLANNED["R2"]))
        == []
    )
    missing = [r for r in rows if r["kernel"] != "qgemv_mx/searched"]
    found = list(
        campaign_audit.point_problems(protocol, shapes, missing, campaign_audit.PLANNED["R2"])
    )
    assert len(found) == 45 and "qgemv_mx/searched mxfp4 of the plan is missing" in found[0]
    table = cells.table([folder])
    assert {"qgemv_mx", "qgemv_mx/searched", "qgemv_mx/batch_invariant"} <= set(table.kernel)
    chained = table[(table["shape"] == "decode_chain") & (table.regime == "chain_pdl")]
    assert set(chained.kernel) == {"qgemv_mx", "stream_read"} and set(chained.M) == {1, 4, 16}


def test_counters_are_those_of_r2(tmp_path, monkeypatch) -> None:
    taken = []
    fake = ModuleType("lab.counters_r2")

    def take(repo, cubins, found, log):
        taken.append(found)
        return SimpleNamespace(rows=[], refused="ncu is not on PATH")

    fake.take = take
    monkeypatch.setitem(sys.modules, "lab.counters_r2", fake)
    monkeypatch.setattr("lab.counters_r2", fake, raising=False)
    with recorded.journal(tmp_path, ms=(1,), rung="R2") as partial:
        measure_r2.take_counters(tmp_path, tmp_path, partial, Budget(9, Clock(0)), print)
        last = partial.contents().attempts[-1]
    assert len(taken) == 1 and (last.stage, last.status) == ("counters", "refused")
