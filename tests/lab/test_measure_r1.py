"""The R1 campaign without a device: made-up arms under the real protocol, plan and journal."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import recorded
from made_up_arms import FakeArm, FakeTimer

from lab import (
    campaign,
    campaign_audit,
    cells,
    decomposition,
    measure,
    measure_r1,
    plan_r1,
    records,
)
from lab.journal import PartialCampaign, check_point
from lab.measure_r1 import Budget, ChainPair, Kit, Unfinished, Workshop
from lab.peers import Availability
from lab.protocol import file_of
from lab.rows import INVALID_BY_DESIGN, AttemptRow, to_json
from lab.samples import DUPLICATE_SUFFIX, block_times, cell_times

SHAPE = {"name": "q_o_proj", "N": 4096, "K": 4096}
WRONG = {"role": "testbed", "claims_right": False}


@pytest.fixture(scope="module")
def protocol(repository) -> dict:
    return json.loads((repository / file_of("R1")).read_text())


@pytest.fixture(scope="module")
def shapes(repository) -> list[dict]:
    return json.loads((repository / "prereg/shapes.json").read_text())["shapes"]


def bench(protocol: dict, noise: float = 0.003) -> Any:
    return SimpleNamespace(
        protocol=protocol, timer=FakeTimer(noise), modules=None, probe={"sm_count": 132}
    )


def arms() -> list[FakeArm]:
    return [
        FakeArm("stream_read", "mxfp4", "floor", 4.0),
        FakeArm("cublaslt_fp8", "fp8_e4m3", "baseline", 7.0),
        FakeArm("peer/humming_bf16", "mxfp4", "peer", 6.0),
        FakeArm("testbed/full", "mxfp4", "testbed", 8.0),
        FakeArm("testbed/-layout_staging", "mxfp4", "testbed", 7.5),
        FakeArm("testbed/none", "mxfp4", time_us=4.5, **WRONG),
        FakeArm("probe/launch_floor", "mxfp4", time_us=1.4, **WRONG),
        FakeArm("cause/stages/2", "mxfp4", "testbed", 9.0),
    ]


def point(
    protocol: dict, some: list[FakeArm], m: int = 16, lost: dict | None = None, **kwargs: Any
):
    return measure.measure_point(bench(protocol, **kwargs), some, SHAPE, m, [], lost)


# One point.


def test_wrong_arms_have_legs_and_no_time(protocol) -> None:
    rows, checks, samples = point(protocol, arms())
    assert check_point(rows, checks, samples) == []
    wrong = {c.kernel: c for c in rows if c.correctness == INVALID_BY_DESIGN}
    assert set(wrong) == {"testbed/none", "probe/launch_floor"}
    assert not {c.kernel for c in checks} & set(wrong)
    timed = records.fill_times(rows, samples)
    assert all(c.time is None and c.floor is None for c in timed if c.kernel in wrong)
    cold = samples[samples.regime == "cold_graph"]
    assert set(cold.kernel) == {a.kernel for a in arms()}
    assert set(samples[samples.regime != "cold_graph"].kernel) == {
        "stream_read", "cublaslt_fp8", "peer/humming_bf16", "testbed/full",
    }  # fmt: skip


def test_the_legs_are_what_the_decomposition_reads(protocol) -> None:
    full = [
        FakeArm(kernel, "mxfp4", "testbed", 4.0 + len(on), claims_right=len(on) == 5)
        for kernel in decomposition.variants()
        for on in [decomposition.present_factors(kernel)]
    ]
    _, _, samples = point(protocol, [arms()[0], *full])
    (table,) = decomposition.gather(block_times(samples[samples.regime == "cold_graph"])).values()
    assert {*decomposition.variants(), "stream_read", "testbed/full#2"} <= set(table.columns)
    assert len(table) >= protocol["blocks"]["small_m"] and not table.isna().any().any()


def test_both_twins_and_the_frozen_numbers_of_blocks(protocol) -> None:
    _, _, samples = point(protocol, arms())
    twins = {a for a in samples.arm if a.endswith(DUPLICATE_SUFFIX)}
    assert twins == {"cublaslt_fp8/fp8_e4m3#2", "testbed/full/mxfp4#2"}
    blocks = samples.groupby("regime").block.nunique()
    assert dict(blocks) == {"cold_graph": 6, "hot_graph": 3, "cold_loop": 3}
    _, _, samples = point(protocol, arms(), m=1024)
    blocks = samples.groupby("regime").block.nunique()
    assert dict(blocks) == {"cold_graph": 3, "hot_graph": 2, "cold_loop": 2}
    assert set(samples.nodes) == {8}


@pytest.mark.parametrize(("which", "extended"), [("testbed/none", False), ("testbed/full", True)])
def test_only_a_right_arm_extends_a_point(protocol, which, extended) -> None:
    some = arms()
    noisy = next(a for a in some if a.kernel == which)
    timer = FakeTimer()
    quiet = timer._leg

    def leg(arm: FakeArm, nodes: int, looped: bool):
        timer.noise = 0.2 if arm is noisy else 0.003
        return quiet(arm, nodes, looped)

    timer._leg = leg
    made = SimpleNamespace(protocol=protocol, timer=timer)
    _, _, samples = measure.measure_point(made, some, SHAPE, 16, [])
    assert samples.extension.any() == extended


@pytest.mark.parametrize("step", ["before", "capture"])
def test_a_peer_that_raises_is_left_out(protocol, step) -> None:
    bad = FakeArm("peer/marlin_fp4", "mxfp4", "peer", 6.0, raises=step)
    lost: dict[str, str] = {}
    rows, checks, samples = point(protocol, [*arms(), bad], lost=lost)
    assert lost == {"peer/marlin_fp4/mxfp4": f"ValueError: made up: {step}"}
    assert check_point(rows, checks, samples) == []
    assert bad.kernel not in {c.kernel for c in rows} | {c.kernel for c in checks}
    assert bad.kernel not in set(samples.kernel) and "peer/humming_bf16" in set(samples.kernel)


def test_a_peer_that_raises_afterwards_loses_its_times(protocol) -> None:
    bad = FakeArm("peer/marlin_fp4", "mxfp4", "peer", 6.0, raises="after")
    rows, checks, samples = point(protocol, [*arms(), bad])
    assert check_point(rows, checks, samples) == []
    assert {c.correctness for c in rows if c.kernel == bad.kernel} == {"failed"}
    assert bad.kernel not in set(samples.kernel)


@pytest.mark.parametrize("step", ["before", "capture", "after"])
def test_what_is_ours_and_raises_ends_the_point(protocol, step) -> None:
    bad = FakeArm("cause/stages/3", "mxfp4", "testbed", 6.0, raises=step)
    with pytest.raises(ValueError, match="made up"):
        point(protocol, [*arms(), bad])


def test_a_wrong_arm_whose_own_check_fails_is_failed_and_loses_its_legs(protocol) -> None:
    bad = FakeArm("probe/balanced_grid", "mxfp4", time_us=4.0, **WRONG)
    bad.check = lambda copy, stage: FakeArm.check(
        replace(bad, claims_right=True, broken="after"), copy, stage
    )
    rows, checks, samples = point(protocol, [*arms(), bad])
    assert check_point(rows, checks, samples) == []
    assert {c.correctness for c in rows if c.kernel == bad.kernel} == {"failed"}
    assert bad.kernel not in set(samples.kernel)


# A chain of layers.


class FakeChain(FakeArm):
    """One of the two chains; it notes its launches."""

    def launch(self, copy: int) -> None:
        self.checked.append((copy, "launch"))


class WalkingTimer(FakeTimer):
    """Captures as the real one does: each node is a call."""

    def capture(self, launch: Any, copies: int, nodes: int) -> Any:
        for node in range(nodes):
            launch(node % copies)
        return getattr(launch, "__self__", None) or FakeArm(
            "testbed/full", "mxfp4", "testbed", 20.0
        )

    def loop_leg(self, launch: Any, copies: int, nodes: int):
        for node in range(nodes):
            launch(node % copies)
        return self._leg(launch.__self__, nodes, looped=True)


def test_a_chain_is_timed_in_its_own_regime_and_each_launch_is_gated(protocol) -> None:
    tuning = {"candidates": 1, "chosen": "4 layers"}
    plain, pdl = (
        FakeChain("testbed/full", "mxfp4", "testbed", t, copies=3, tuning=tuning)
        for t in (30.0, 25.0)
    )
    chain = ChainPair(plain, pdl)
    chain.time_us, chain.raises = 30.0, ""
    shape = {"name": "decode_chain", "N": 53248, "K": 4096}
    made = SimpleNamespace(protocol=protocol, timer=WalkingTimer())
    rows, checks, samples = measure.measure_point(made, [arms()[0], chain], shape, 1, [])
    assert check_point(rows, checks, samples) == []
    assert {c.regime for c in rows if c.kernel == "testbed/full"} == {
        "cold_graph", "hot_graph", "cold_loop", "chain_pdl",
    }  # fmt: skip
    names = {c.name for c in checks if c.kernel == "testbed/full"}
    assert names == {
        "random_fp64_before", "random_fp64_after", "chain_pdl_random_fp64_before", "chain_pdl_random_fp64_after",
    }  # fmt: skip
    # Plain: the last call is the loop's, the 16th of three copies. Programmatic: the 32nd node.
    assert [c for c in plain.checked if c[1] == "after"] == [(15 % 3, "after")]
    assert [c for c in pdl.checked if c[1] == "after"] == [(31 % 3, "after")]
    assert samples[samples.regime == "chain_pdl"].block.nunique() == protocol["blocks"]["of_points"]
    assert cell_times(samples)[
        ("testbed/full", "mxfp4", "decode_chain", 53248, 4096, 1, "chain_pdl")
    ]


# The workshop.


class FakePeer:
    """An adaptor that prepares, warms and binds as told."""

    formats, activations, requires = ("mxfp4",), "bf16", {}

    def __init__(self, name: str, prepare: Any = None, unsupported: str | None = None) -> None:
        self.NAME = name
        self.prepare = prepare or (lambda weights, copies: ("handle", name, copies))
        self._unsupported = unsupported
        self.warmed: list[Any] = []

    def warm(self, work: list, budget: int) -> None:
        self.warmed.append((work, budget))

    def available(self) -> Availability:
        return Availability(True, "made up 1.0", None)

    def unsupported(self, fmt: str, n: int, k: int, m: int) -> str | None:
        return self._unsupported


class Stream:
    """A stream that can be entered."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


@pytest.fixture
def workshop(monkeypatch, protocol):
    """A workshop over made-up weights, activations, baselines and testbed; `notes` holds what it left out."""

    def weights(random, fmt, n, k, copies):
        return SimpleNamespace(format=fmt, n=n, k=k, copies=copies)

    class Baseline(FakeArm):
        def __init__(self, w, x, x64, *rest) -> None:
            kernel = "cublaslt_fp8" if w.format == "fp8_e4m3" else "cublaslt_bf16"
            super().__init__(kernel, w.format, "baseline", 7.0)
            self.x64 = x64

        def tune(self, timer) -> None:
            self.tuning = {"candidates": 32, "chosen": "made up"}

    class MadePeer(FakeArm):
        refused: tuple[str, ...] = ()

        def tune(self, timer) -> None:
            if self.kernel == "peer/broken":
                raise RuntimeError("no such configuration\nand a second line")

    def make_arm(peer, handle, w, x, x8, stream, protocol, budget, x64):
        assert budget == 2 and x64 == (
            "bf16 in FP64" if peer.activations == "bf16" else "fp8 in FP64"
        )
        return MadePeer(peer.NAME, w.format, "peer", 6.0)

    def variant(problem, kernel):
        right = kernel in ("testbed/full", "testbed/-layout_staging") or kernel.startswith("cause/")
        return FakeArm(kernel, problem.weights.format, "testbed", 8.0, claims_right=right)

    testbed = ModuleType("lab.testbed")
    testbed.Problem = lambda bench, w, x, x64, layouts=None: SimpleNamespace(
        weights=w, x64=x64, layouts=layouts
    )
    probes = ("probe/balanced_grid", "probe/launch_testbed", "probe/launch_floor")
    testbed.factorial_arms = lambda p, floor: [
        variant(p, k) for k in (*decomposition.variants(), *probes)
    ]
    values = {
        "stages": (2, 3, 4, 6, 8), "warps": ("2x2", "2x4", "4x2", "8x1", "1x8"), "split_k": (1, 2, 4, 8, 16),
        "sequence": ("shift_mask", "fp32", "host_bits"), "staging": ("swizzled", "plain", "direct"),
    }  # fmt: skip

    def cause_arms(p, experiment):
        if experiment == "formats":
            return [variant(p, k) for k in ("testbed/full", "testbed/-dequant_issue")]
        return [variant(p, f"cause/{experiment}/{v}") for v in values[experiment]]

    testbed.cause_arms = cause_arms
    monkeypatch.setitem(sys.modules, "lab.testbed", testbed)
    monkeypatch.setattr("lab.testbed", testbed, raising=False)
    monkeypatch.setattr(campaign, "make_weights", weights)
    monkeypatch.setattr(
        campaign,
        "tune_stream",
        lambda t, m, w, p, s: FakeArm("stream_read", w.format, "floor", 4.0),
    )
    monkeypatch.setattr(campaign, "CublasLtArm", Baseline)
    monkeypatch.setattr(campaign, "make_arm", make_arm)
    monkeypatch.setattr(campaign, "free", lambda: None)
    monkeypatch.setattr(campaign.constants, "launch_floor", lambda *a: {})
    made = measure_r1.Activations("bf16", "fp8", "bf16 in FP64", "fp8 in FP64")
    monkeypatch.setattr(measure_r1.Activations, "make", lambda bench, m, k: made)

    def build(*peers: FakePeer) -> tuple[Workshop, list[AttemptRow]]:
        notes: list[AttemptRow] = []
        b = bench(protocol)
        b.random, b.lt, b.stream, b.copies = None, None, Stream(), lambda size: 3
        return Workshop(b, peers, notes.append, lambda line: None), notes

    return build


def planned(protocol, shapes, peers, *names: str) -> list[plan_r1.Point]:
    found = plan_r1.points(protocol, shapes, {p.NAME: p.formats for p in peers})
    return [p for p in found if p.name in names]


def test_every_arm_of_every_point_is_made_in_the_order_of_the_plan(
    workshop, protocol, shapes
) -> None:
    peers = [FakePeer("peer/humming_bf16")]
    shop, notes = workshop(*peers)
    points = plan_r1.points(protocol, shapes, {p.NAME: p.formats for p in peers})
    seen = set()
    for p in points:
        if "chain" in p.groups or (p.m > 64 and p.shape["name"] in seen):
            continue
        seen.add(p.shape["name"])
        made = shop.arms(shop.kit([p]), p, measure_r1.Activations.make(None, p.m, 1))
        assert tuple((a.kernel, a.format) for a in made) == p.arms
    assert notes == [] and len(seen) == len({p.shape["name"] for p in points}) - 1


def test_a_shape_is_prepared_once_and_adaptors_share_what_they_prepare_alike(
    workshop, protocol, shapes
) -> None:
    calls = []

    def prepare(weights, copies):
        calls.append(weights.format)
        return object()

    peers = [FakePeer("peer/a", prepare), FakePeer("peer/b", prepare), FakePeer("peer/c")]
    shop, _ = workshop(*peers)
    points = planned(protocol, shapes, peers, "kv_gqa/M2", "kv_gqa/M4", "kv_gqa/M8")
    kit = shop.kit(points)
    assert calls == ["mxfp4"] and kit.handles["peer/a", "mxfp4"] is kit.handles["peer/b", "mxfp4"]
    assert sorted(kit.weights) == ["bf16", "fp8_e4m3", "mxfp4", "nvfp4"]
    shop.warm([kit], points)
    ((work, budget),) = peers[2].warmed
    assert budget == 2
    assert [(handle, sorted(ms)) for handle, ms in work] == [(("handle", "peer/c", 3), [2, 4, 8])]


@pytest.mark.parametrize("how", ["unsupported", "prepare", "tune"])
def test_a_peer_that_cannot_is_noted_and_the_point_goes_on(workshop, protocol, shapes, how) -> None:
    def refuse(weights, copies):
        raise RuntimeError("no layout for this")

    bad = {
        "unsupported": FakePeer("peer/broken", unsupported="N=4096 is odd"),
        "prepare": FakePeer("peer/broken", refuse),
        "tune": FakePeer("peer/broken"),
    }[how]
    peers = [FakePeer("peer/humming_bf16"), bad]
    shop, notes = workshop(*peers)
    (p,) = planned(protocol, shapes, peers, "q_o_proj/M2")
    made = shop.arms(shop.kit([p]), p, measure_r1.Activations.make(None, 2, 1))
    left = [a for a in p.arms if a[0] != "peer/broken"]
    assert [(a.kernel, a.format) for a in made] == left
    (row,) = notes
    assert row.kernel == "peer/broken" and row.shape == "q_o_proj" and "\n" not in row.reason
    word = {"unsupported": "NOT_SUPPORTED: N=4096", "prepare": "no layout", "tune": "no such conf"}
    assert word[how] in row.reason
    assert row.status == ("refused" if how == "unsupported" else "failed")


def test_a_warm_up_that_raises_is_not_the_end(workshop, protocol, shapes) -> None:
    peer = FakePeer("peer/humming_bf16")
    peer.warm = lambda work, budget: 1 / 0
    shop, notes = workshop(peer)
    (p,) = planned(protocol, shapes, [peer], "q_o_proj/M2")
    shop.warm([shop.kit([p])], [p])
    assert notes == []


# The campaign in pieces.


class Clock:
    """Seconds that pass by themselves, `step` at each look."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def telemetry() -> Any:
    return SimpleNamespace(rows=recorded.telemetry().to_dict("records"))


def run(shop, root, points, budget: Budget) -> tuple[PartialCampaign, Exception | None]:
    partial = PartialCampaign.open(root, recorded.header(rung="R1"))
    try:
        measure_r1.measure_points(shop, partial, points, telemetry(), budget, lambda line: None)
    except Unfinished as stopped:
        return partial, stopped
    return partial, None


def test_a_campaign_is_taken_in_pieces_and_says_what_is_left(
    workshop, protocol, shapes, tmp_path
) -> None:
    peers = [FakePeer("peer/humming_bf16")]
    names = [f"{s}/M{m}" for s in ("kv_gqa", "gate_up") for m in (1, 2)] + [
        "waves_4224/M1",
        "kv_gqa_tp8/M1",
    ]
    points = planned(protocol, shapes, peers, *names)
    assert len(points) == 6
    pieces, done = 0, []
    while True:
        shop, _ = workshop(*peers)
        partial, stopped = run(shop, tmp_path / "partial", points, Budget(4, Clock(10)))
        pieces += 1
        assert len(partial.finished) > len(done)  # each piece gets on
        done = partial.finished
        if stopped is None:
            break
        left = len(points) - len(done)
        assert f"{left} point" in str(stopped) and "the same command" in str(stopped)
        last = partial.contents().attempts[-1]
        assert (last.stage, last.status) == ("budget", "interrupted") and str(left) in last.reason
        partial.close()
    assert pieces > 1 and list(done) == [p.name for p in points]
    with partial:
        folder = records.finalise(partial, tmp_path / "data")
    assert records.verify(folder) == [] and folder.name.startswith("r1-")
    table = cells.table([folder])
    assert INVALID_BY_DESIGN not in set(table.correctness)
    assert not table.kernel.str.startswith("probe/").any()
    assert {"testbed/full", "testbed/-layout_staging", "peer/humming_bf16"} <= set(table.kernel)


def test_without_minutes_it_goes_to_the_end(workshop, protocol, shapes, tmp_path) -> None:
    points = planned(protocol, shapes, [], "kv_gqa/M2", "kv_gqa/M4")
    shop, _ = workshop()
    partial, stopped = run(shop, tmp_path, points, Budget(None))
    assert stopped is None and len(partial.finished) == 2


def killed_when(step: str, count: int, measuring: Any) -> None:
    """Run `measuring` in a process that kill -9 ends when it comes to `step` (or to a journal line of that type)."""

    def body() -> None:
        owner, name = {
            "leg": (FakeTimer, "_leg"),
            "between": (campaign, "take_point"),
        }.get(step, (PartialCampaign, "_append"))
        real, seen = getattr(owner, name), []

        def counted(*args: Any, **kwargs: Any) -> Any:
            if name != "_append" or args[1]["type"] == step:
                seen.append(step)
            if len(seen) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(owner, name, counted)
        measuring()

    child = multiprocessing.get_context("fork").Process(target=body)
    child.start()
    child.join(timeout=120)
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("step", "count", "kept", "crashed"),
    [
        ("leg", 150, 0, 1),  # within the first point
        ("leg", 300, 1, 1),  # within a later one
        ("between", 2, 1, 0),
        ("point", 2, 1, 1),  # its legs are on disk, its line is not
        ("attempt", 1, 1, 1),  # it is finished, its attempt is not
    ],
)
def test_a_killed_process_loses_the_point_that_it_was_at(
    workshop, protocol, shapes, tmp_path, step, count, kept, crashed
) -> None:
    peers = [FakePeer("peer/humming_bf16")]
    points = planned(protocol, shapes, peers, "kv_gqa/M1", "kv_gqa/M2", "kv_gqa/M4")
    shop, _ = workshop(*peers)
    killed_when(step, count, lambda: run(shop, tmp_path / "partial", points, Budget(None)))
    header = recorded.header(rung="R1")
    with PartialCampaign.open(tmp_path / "partial", header) as left:
        assert len(left.finished) == kept
        statuses = [a.status for a in left.contents().attempts if a.stage == "point"]
        assert statuses.count("crashed") == crashed
    shop, _ = workshop(*peers)
    partial, stopped = run(shop, tmp_path / "partial", points, Budget(None))
    assert stopped is None and list(partial.finished) == [p.name for p in points]
    with partial:
        folder = records.finalise(partial, tmp_path / "data")
    assert records.verify(folder) == []
    whole = records.load(folder)
    rows = [to_json(c) for c in whole.cells]
    found = campaign_audit.plan_problems(
        protocol, rows, [to_json(c) for c in whole.checks], whole.samples
    )
    assert list(found) == []


def test_a_budget_leaves_room_for_a_step_as_long_as_the_longest() -> None:
    clock = Clock(0)
    budget = Budget(9, clock)
    assert budget.allows("point")
    budget.timed("point", lambda: setattr(clock, "now", 200.0))
    assert budget.left() == 340 and budget.allows("point")
    clock.now = 341
    assert not budget.allows("point") and budget.allows("prepare")


def test_a_peer_lost_at_a_point_is_an_attempt(
    workshop, protocol, shapes, tmp_path, monkeypatch
) -> None:
    peers = [FakePeer("peer/humming_bf16")]
    real = campaign.measure_point

    def losing(bench, some, shape, m, rows, lost):
        next(a for a in some if a.role == "peer").raises = "capture"
        return real(bench, some, shape, m, rows, lost)

    monkeypatch.setattr(campaign, "measure_point", losing)
    shop, _ = workshop(*peers)
    partial, _ = run(shop, tmp_path, planned(protocol, shapes, peers, "kv_gqa/M2"), Budget(None))
    inner, outer = partial.contents().attempts
    assert (inner.stage, inner.status, inner.kernel, inner.M) == (
        "peer",
        "failed",
        "peer/humming_bf16",
        2,
    )
    assert "made up: capture" in inner.reason
    assert (outer.stage, outer.status) == ("point", "ok")


def test_counters_wait_for_the_next_run_when_little_time_is_left(tmp_path, monkeypatch) -> None:
    taken = []
    fake = ModuleType("lab.counters_r1")

    def take(repo, cubins, found, log):
        taken.append(found)
        return SimpleNamespace(rows=[], refused="ncu is not on PATH")

    fake.take = take
    monkeypatch.setitem(sys.modules, "lab.counters_r1", fake)
    monkeypatch.setattr("lab.counters_r1", fake, raising=False)
    with recorded.journal(tmp_path, ms=(1,), rung="R1") as partial:
        clock = Clock(0)
        budget = Budget(9, clock)
        budget.timed("point", lambda: setattr(clock, "now", 400.0))
        with pytest.raises(Unfinished, match="profiler pass is left"):
            measure_r1.take_counters(tmp_path, tmp_path, partial, budget, print)
        assert not taken
        measure_r1.take_counters(tmp_path, tmp_path, partial, Budget(9, Clock(0)), print)
        assert len(taken) == 1 and {c.kernel for c in taken[0]} >= {"cublaslt_fp8"}
        last = partial.contents().attempts[-1]
        assert (last.stage, last.status, last.reason) == (
            "counters",
            "refused",
            "ncu is not on PATH",
        )


def test_a_selection_is_a_part_of_the_plan(protocol, shapes) -> None:
    points = plan_r1.points(protocol, shapes, {})
    some = campaign.chosen(points, measure.Selection(("waves_", "kv_gqa"), (1,)))
    assert {p.shape["name"].split("_tp")[0].split("_")[0] for p in some} == {"waves", "kv"}
    assert {p.m for p in some} == {1}
    assert (
        isinstance(pd.DataFrame([p.name for p in some]), pd.DataFrame)
        and Kit(some[0].shape).lost == {}
    )


def test_versions_of_the_peers_go_into_the_record() -> None:
    from lab.peers import Availability

    class Made:
        def __init__(self, availability):
            self.available = lambda: availability

    here = Availability(True, "humming-kernels 0.1.20, torch 2.12.1", None)
    absent = Availability(False, None, "package vllm is not installed")
    assert measure_r1.peer_versions([Made(here), Made(absent), Made(here)]) == {
        "humming_kernels": "0.1.20",
        "torch": "2.12.1",
    }
