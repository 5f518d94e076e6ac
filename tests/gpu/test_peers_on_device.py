"""Every installed peer on a device: against FP64 at awkward M in all its formats, in graphs, with no stray writes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lab import peers

pytestmark = pytest.mark.gpu

PEERS = peers.discover()
CASES = [(p, f) for p in PEERS for f in p.formats]
#: (N, K): a frozen one, one that is padded in N, one with few scale groups.
PROBLEMS = [(4096, 4096), (2880, 2880), (1000, 256)]
ROWS = [1, 3, 7, 16, 33, 100]


@pytest.fixture(scope="module")
def prepared(bench):
    """Weights and their handle, made once a (peer, format, N, K)."""
    from lab.operands import make_weights

    kept: dict[tuple, tuple] = {}

    def get(peer, fmt, n, k):
        availability = peer.available()
        if not availability.installed:
            pytest.skip(f"{peer.NAME}: {availability.reason}")
        if reason := peer.unsupported(fmt, n, k, 1):
            pytest.skip(f"{peer.NAME}: {reason}")
        key = (peer.NAME, fmt, n, k)
        if key not in kept:
            weights = make_weights(bench.random, fmt, n, k, 2)
            with bench.stream:
                kept[key] = weights, peer.prepare(weights, weights.copies)
        return kept[key]

    return get


def arm_of(bench, prepared, peer, fmt, n, k, m, budget=2):
    from lab.operands import make_activations
    from lab.peer_arm import make_arm

    weights, handle = prepared(peer, fmt, n, k)
    x = make_activations(bench.random, m, k)
    return make_arm(peer, handle, weights, *x, bench.stream, bench.protocol, budget)


def bound(arm):
    with arm.stream:
        return arm.peer.bind(arm.handle, arm.x, arm.y, arm.stream, arm.budget)


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("n", "k"), PROBLEMS)
@pytest.mark.parametrize(("peer", "fmt"), CASES, ids=lambda v: getattr(v, "NAME", v))
def test_against_fp64(bench, prepared, peer, fmt, n, k, m) -> None:
    """The frozen limit for candidates that add in FP32; the one with u_partial_sums for those that add in BF16."""
    arm = arm_of(bench, prepared, peer, fmt, n, k, m)
    limits = arm.protocol["correctness"] | {"u_partial_sums": 2.0**-5}
    arm.protocol = arm.protocol | {"correctness": limits}
    for candidate in bound(arm):
        for copy in range(arm.copies):
            results = arm._check(candidate, copy, "before", call=True)
            assert all(r.passed for r in results), (candidate.name, results)
            other = arm.truth(candidate, 1 - copy, arm.x64)
            assert not other.compare(arm.y, "another copy").passed


@pytest.mark.parametrize(("peer", "fmt"), CASES, ids=lambda v: getattr(v, "NAME", v))
def test_a_graph_of_calls_is_right_after_every_replay(bench, prepared, peer, fmt) -> None:
    """Nothing in a call is left out of the graph, and the locks of one replay serve the next."""
    import cupy as cp

    from lab.arms import POISON

    arm = arm_of(bench, prepared, peer, fmt, 4096, 4096, 7)
    limits = arm.protocol["correctness"] | {"u_partial_sums": 2.0**-5}
    arm.protocol = arm.protocol | {"correctness": limits}
    for candidate in bound(arm):
        with bench.stream:
            candidate(0)
        bench.stream.synchronize()
        graph = bench.timer.capture(candidate, arm.copies, 2 * arm.copies)
        for _ in range(3):
            with bench.stream:
                arm.y.fill(POISON)
                graph.launch(bench.stream)
            bench.stream.synchronize()
            results = arm._check(candidate, arm.copies - 1, "after", call=False)
            assert all(r.passed for r in results), (candidate.name, results)
    cp.cuda.Device().synchronize()


@pytest.mark.parametrize(("peer", "fmt"), CASES, ids=lambda v: getattr(v, "NAME", v))
def test_operands_stay_as_they_were(bench, prepared, peer, fmt) -> None:
    """Preparation and calls read our buffers and write Y alone: the floor streams the same bytes afterwards."""
    import cupy as cp

    from lab.operands import make_weights

    availability = peer.available()
    if not availability.installed:
        pytest.skip(f"{peer.NAME}: {availability.reason}")
    weights = make_weights(bench.random, fmt, 1024, 512, 2)
    before = weights.buffer.copy()
    with bench.stream:
        handle = peer.prepare(weights, 2)
    arm = arm_of(bench, lambda *_: (weights, handle), peer, fmt, 1024, 512, 5)
    x = arm.x.copy()
    wide = cp.full((5 + 2, 1024), 0x1234, cp.uint16)
    arm.y = wide[1:6]
    for candidate in bound(arm):
        with bench.stream:
            candidate(1)
    bench.stream.synchronize()
    assert (weights.buffer == before).all() and (arm.x == x).all()
    assert (wide[0] == 0x1234).all() and (wide[6] == 0x1234).all()


@pytest.mark.parametrize(("peer", "fmt"), CASES, ids=lambda v: getattr(v, "NAME", v))
def test_tuning_keeps_a_candidate_that_passes_the_frozen_gate(bench, prepared, peer, fmt) -> None:
    arm = arm_of(bench, prepared, peer, fmt, 4096, 4096, 16, budget=3)
    arm.tune(bench.timer)
    assert all(r.passed for r in arm.check(0, "before")), arm.refused
    assert arm.tuning["candidates"] >= 1 and arm.tuning["chosen"]
    time = bench.timer.loop_leg(arm.launch, arm.copies, 16).time_us
    assert np.isfinite(time) and time > 0
    json.dumps(arm.describe())
