"""The R2b campaign without a device: made-up arms under the real protocol, plan and journal."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import recorded
from made_up_product import Clock, FakePeer, FakeProduct, bench, workshops

from lab import (
    campaign,
    campaign_audit,
    cells,
    constants,
    measure,
    measure_r2b,
    plan_r2b,
    product_arms,
    records,
)
from lab.campaign import Activations, Budget, Unfinished
from lab.journal import PartialCampaign
from lab.protocol import file_of
from lab.rows import NOT_REACHED, CheckRow, not_reached, to_json
from lab.samples import DUPLICATE_SUFFIX


@pytest.fixture(scope="module")
def protocol(repository) -> dict:
    return json.loads((repository / file_of("R2b")).read_text())


@pytest.fixture(scope="module")
def shapes(repository) -> list[dict]:
    return json.loads((repository / "prereg/shapes.json").read_text())["shapes"]


@pytest.fixture
def workshop(monkeypatch, protocol):
    return workshops(monkeypatch, protocol, measure_r2b.Workshop, plan_r2b.is_ablation)


def planned(protocol, shapes, *names: str) -> list[plan_r2b.Point]:
    found = plan_r2b.points(protocol, shapes, {FakePeer.NAME: FakePeer.formats})
    return [p for p in found if not names or p.name in names]


def test_every_arm_of_every_point_is_made_in_the_order_of_the_plan(
    workshop, protocol, shapes
) -> None:
    shop, said, packed = workshop()
    for p in planned(protocol, shapes):
        packed.clear()
        made = shop.arms(shop.kit([p]), p, Activations.make(None, p.m, 1))
        assert tuple((a.kernel, a.format) for a in made) == p.arms
        ours = [a for a in made if isinstance(a, FakeProduct)]
        assert {a.kernel for a in ours if a.tuned} == {
            k for k, _ in p.arms if k == "qgemm_mx/searched"
        }
        formats = dict.fromkeys(f for k, f in p.arms if k.startswith(("qgemm_mx", "linear")))
        assert packed == [(fmt, p.shape["N"], p.shape["K"]) for fmt in formats]
    assert any("1 plans not timed: a plan: random" in line for line in said)


def test_a_weight_is_packed_once_a_shape(workshop, protocol, shapes) -> None:
    shop, _, packed = workshop()
    points = planned(protocol, shapes, "gate_up/M1", "gate_up/M33", "gate_up/M32")
    kit = shop.kit(points)
    for p in points:
        shop.arms(kit, p, Activations.make(None, p.m, 1))
    assert len(points) == 3
    assert sorted(packed) == [(f, 14336, 4096) for f in ("int4_g128", "mxfp4", "nvfp4")]


def test_the_opening_probes_the_kernel_the_mode_and_the_dispatch(
    protocol, tmp_path, monkeypatch
) -> None:
    asked: dict[str, Any] = {"constants": 0}
    place = dict(kernel="qgemm_mx", format="mxfp4", shape="probe_256x512", N=256, K=512, M=33)

    def probes(stream, ablations, kernels):
        asked.update(ablations=list(ablations), kernels=kernels)
        return [CheckRow(**place, name="probe_ramp", passed=True, measured=0.0, limit=1.0)]

    def of_the_device(*arguments):
        asked["constants"] += 1
        ends = {"ci_low": 690.0, "ci_high": 710.0}
        row = {"value": 700.0, "unit": "TFLOP/s", **ends, "n": 8, "how": "made up"}
        return {"bf16_peak_tflops": row}

    monkeypatch.setattr(product_arms, "use_cubins", lambda folder: asked.update(folder=folder))
    monkeypatch.setattr(product_arms, "probe_checks", probes)
    monkeypatch.setattr(constants, "measure", of_the_device)
    monkeypatch.setattr(campaign, "free", lambda: None)
    with PartialCampaign.open(tmp_path, recorded.header(rung="R2b")) as partial:
        for _ in range(2):  # the second is the next sitting
            measure_r2b._open(bench(protocol), partial, lambda line: None)
        assert asked["folder"] == "cubins" and asked["constants"] == 1
        assert asked["kernels"] == ("qgemm_mx", "qgemm_mx/batch_invariant", "linear")
        assert len(asked["ablations"]) >= 6
        assert all(map(plan_r2b.is_ablation, asked["ablations"]))
        assert set(partial.constants) == {"bf16_peak_tflops"}
        assert [a.stage for a in partial.contents().attempts] == ["probes", "constants"]


def test_the_whole_plan_in_pieces_is_what_the_audit_asks_for(
    workshop, protocol, shapes, tmp_path
) -> None:
    points = planned(protocol, shapes)
    telemetry = SimpleNamespace(rows=recorded.telemetry().to_dict("records"))
    header = recorded.header(rung="R2b")
    pieces, stopped = 0, True
    while stopped:
        shop, *_ = workshop()
        partial, stopped = PartialCampaign.open(tmp_path / "partial", header), False
        taken = len(partial.finished)
        try:
            budget = Budget(20, Clock(10))
            campaign.measure_points(shop, partial, points, telemetry, budget, lambda line: None)
        except Unfinished as error:
            stopped = True
            assert f"{len(points) - len(partial.finished)} points of R2b are left" in str(error)
            partial.close()
        pieces += 1
        assert len(partial.finished) > taken  # each piece gets on
    assert pieces > 1 and list(partial.finished) == [p.name for p in points]
    with partial:
        folder = records.finalise(partial, tmp_path / "data")
    assert records.verify(folder) == [] and folder.name.startswith("r2b-")
    whole = records.load(folder)
    rows, checks = ([to_json(x) for x in some] for some in (whole.cells, whole.checks))
    assert list(campaign_audit.plan_problems(protocol, rows, checks, whole.samples)) == []
    plan = campaign_audit.PLANNED["R2b"]
    assert list(campaign_audit.point_problems(protocol, shapes, rows, plan)) == []
    missing = [r for r in rows if r["kernel"] != "qgemm_mx/batch_invariant"]
    found = list(campaign_audit.point_problems(protocol, shapes, missing, plan))
    assert len(found) == 4 and "qgemm_mx/batch_invariant mxfp4 of the plan is missing" in found[0]
    twins = {a for a in whole.samples.arm if a.endswith(DUPLICATE_SUFFIX)}
    assert twins == {f"qgemm_mx/{fmt}#2" for fmt in ("mxfp4", "nvfp4", "int4_g128")}
    table = cells.table([folder])
    assert {"qgemm_mx", "qgemm_mx/searched", "qgemm_mx/step0", "linear"} <= set(table.kernel)
    loop = table[table.regime == "cold_loop"]
    assert list(zip(loop.kernel, loop["shape"], loop.M, strict=True)) == [
        ("linear", "gpt_oss_2880", 1)
    ]
    hot = table[table.regime == "hot_graph"]
    assert set(hot.kernel) == {"qgemm_mx", "cublaslt_bf16", "cublaslt_fp8"} and max(hot.M) == 128
    roles = dict(zip(table.kernel, table.role, strict=True))
    assert (roles["qgemm_mx/step0"], roles["linear"]) == ("testbed", "product")


@pytest.fixture
def machine(workshop, monkeypatch, protocol, repository, tmp_path):
    """`campaign.run` from end to end on a made-up device, with a clock that goes on by itself."""
    for name in (file_of("R2b"), "prereg/shapes.json"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((repository / name).read_bytes())
    taken: list[int] = []

    class Telemetry:
        rows = recorded.telemetry().to_dict("records")

        def __init__(self, period_ms):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            pass

    def counters(repo, cubins, partial, budget, log):
        assert budget.minutes is None  # they are taken however little was left
        taken.append(len(partial.finished))

    made = bench(protocol)
    made.probe["other_processes"] = 0
    header = recorded.header(rung="R2b", seed=protocol["seed"])
    monkeypatch.setattr(campaign.source, "describe", lambda repo: {})
    monkeypatch.setattr(campaign, "forbid_predictions", lambda: None)  # a hook that stays
    monkeypatch.setattr(campaign.Bench, "open", lambda *a: made)
    monkeypatch.setattr(campaign, "discover", list)
    monkeypatch.setattr(campaign, "usable_peers", lambda partial, log: [FakePeer()])
    monkeypatch.setattr(campaign, "header", lambda *a: header)
    monkeypatch.setattr(campaign, "check_occupancy", lambda *a: None)
    monkeypatch.setattr(campaign.device, "Telemetry", Telemetry)
    monkeypatch.setattr(campaign, "Budget", lambda minutes: Budget(minutes, Clock(10)))
    monkeypatch.setattr(measure_r2b, "_open", lambda *a: None)
    monkeypatch.setattr(measure_r2b, "take_counters", counters)
    said: list[str] = []

    def run(minutes, close):
        return measure_r2b.run_campaign_r2b(
            tmp_path, tmp_path, [], said.append, minutes, close=close
        )

    return SimpleNamespace(run=run, root=tmp_path, said=said, counted=taken)


def test_minutes_end_a_campaign_that_is_to_be_closed(machine, protocol, shapes) -> None:
    plan = planned(protocol, shapes)
    with pytest.raises(Unfinished, match="points of R2b are left"):
        machine.run(3, close=False)
    assert not (machine.root / "data").exists() and machine.counted == []
    whole = records.load(folder := machine.run(3, close=True))
    assert records.verify(folder) == []
    taken = {(c.shape, c.N, c.K, c.M) for c in whole.cells}
    attempts = [to_json(a) for a in whole.attempts]
    lost = not_reached(attempts)
    order = [(p.shape["name"], p.shape["N"], p.shape["K"], p.m) for p in plan]
    assert set(order[: len(taken)]) == taken and lost == order[len(taken) :] and len(taken) > 3
    assert machine.counted == [len(taken)]
    assert f"the campaign is closed without {len(lost)} points" in machine.said
    words = [a for a in attempts if a["reason"] == NOT_REACHED]
    assert {(a["kernel"], a["format"], a["regime"]) for a in words} == {(None, None, None)}
    stops = [a["status"] for a in attempts if a["stage"] == "budget"]
    assert (
        stops == ["interrupted"] * 2
    )  # that of the first run, which could go on, and of the second
    points = campaign_audit.PLANNED["R2b"]
    rows = [to_json(c) for c in whole.cells]
    assert list(campaign_audit.point_problems(protocol, shapes, rows, points, lost)) == []
    (missing,) = campaign_audit.point_problems(protocol, shapes, rows, points)
    assert f"{len(lost)} points of the plan are missing" in missing


def test_a_campaign_that_reaches_its_end_has_nothing_to_close(
    machine, monkeypatch, protocol, shapes
) -> None:
    few = planned(protocol, shapes)[:2]
    monkeypatch.setattr(plan_r2b, "points", lambda *a: few)
    found = records.load(machine.run(60, close=True))
    assert not_reached(to_json(a) for a in found.attempts) == [] and machine.counted == [2]
    assert not any("closed" in line for line in machine.said)


def test_a_kernel_that_is_wrong_has_no_time_and_the_rest_goes_on(
    workshop, protocol, shapes
) -> None:
    shop, *_ = workshop()
    (p,) = planned(protocol, shapes, "gate_up/M64")
    arms = shop.arms(shop.kit([p]), p, Activations.make(None, 64, 1))
    next(a for a in arms if a.kernel == "linear").broken = "before"
    rows, _, samples = measure.measure_point(bench(protocol), arms, p.shape, p.m, [])
    assert {c.correctness for c in rows if c.kernel == "linear"} == {"failed"}
    assert "linear" not in set(samples.kernel) and "qgemm_mx" in set(samples.kernel)


def test_counters_are_those_of_r2b(tmp_path, monkeypatch) -> None:
    taken = []
    fake = ModuleType("lab.counters_r2b")

    def take(repo, cubins, found, log):
        taken.append(found)
        return SimpleNamespace(rows=[], refused="ncu is not on PATH")

    fake.take = take
    monkeypatch.setitem(sys.modules, "lab.counters_r2b", fake)
    monkeypatch.setattr("lab.counters_r2b", fake, raising=False)
    with recorded.journal(tmp_path, ms=(16,), rung="R2b") as partial:
        measure_r2b.take_counters(tmp_path, tmp_path, partial, Budget(9, Clock(0)), print)
        last = partial.contents().attempts[-1]
    assert len(taken) == 1 and (last.stage, last.status) == ("counters", "refused")
