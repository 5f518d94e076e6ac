"""The testbed on a device: variants that claim to be right against probes and FP64, the others without a fault."""

from __future__ import annotations

import numpy as np
import pytest

from lab import testbed
from lab.decomposition import FULL
from lab.testbed import CHAIN_LAYERS, CHAIN_SHAPE, ChainArm, Config, Problem

pytestmark = pytest.mark.gpu

RIGHT = [c for c in testbed.all_configs() if c.claims_right and not c.pdl]
WRONG = [c for c in testbed.all_configs() if not c.claims_right]


def problem_of(bench, fmt, n, k, m, copies=2):
    from lab.operands import decode_activations, make_activations, make_weights

    weights = make_weights(bench.random, fmt, n, k, copies)
    x = make_activations(bench.random, m, k)[0]
    return Problem(bench, weights, x, decode_activations(x))


def passes(results):
    return bool(results) and all(r.passed for r in results)


@pytest.mark.parametrize("config", RIGHT, ids=lambda c: c.entry)
def test_structured_probes(bench, config) -> None:
    from qgemm_mx import probes

    sms = bench.probe["sm_count"]
    for n, k, m in testbed.PROBE_PROBLEMS:
        if k % testbed.k_step(config.format):
            continue
        for probe in probes.probes_for(config.format, n, k, m):
            found = testbed.run_probe(config, probe, bench.modules, bench.stream, sms)
            assert found.passed, found.detail


@pytest.mark.parametrize("m", [1, 3, 8, 16, 33, 64, 100])
@pytest.mark.parametrize(("n", "k"), [(1024, 4096), (2880, 2880), (72, 1664)])
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "int4_g128"])
def test_against_fp64_with_every_split(bench, fmt, n, k, m) -> None:
    if fmt == "int4_g128" and k % 128:
        pytest.skip("K is no multiple of the group")
    problem = problem_of(bench, fmt, n, k, m)
    for split in (None, 1, 2, 3, 5):
        arm = problem.arm(FULL, Config(fmt, testbed.tokens_for(m)), split=split)
        for copy in (0, 1):
            assert passes(arm.check(copy, "before")), (split, arm.check(copy, "after"))
        assert not arm.truth(0).compare(arm.y, "another copy").passed


def test_a_repeated_call_has_the_same_bits_and_leaves_its_neighbours_alone(bench) -> None:
    import cupy as cp

    problem = problem_of(bench, "mxfp4", 1000, 4096, 5)
    arm = problem.arm(FULL, Config(), split=7)
    wide = cp.full((5 + 2, 1000), 0x1234, cp.uint16)
    before = problem.layout("shift_mask").buffer.copy()
    arm.bound.y = arm.y = wide[1:6]
    arm._arguments = [arm.bound.arguments(copy) for copy in range(arm.copies)]
    seen = []
    for _ in range(20):
        with bench.stream:
            arm.y.fill(0x7FFF)
            arm.launch(1)
        bench.stream.synchronize()
        seen.append(cp.asnumpy(arm.y))
    assert all((one == seen[0]).all() for one in seen)
    assert (wide[0] == 0x1234).all() and (wide[6] == 0x1234).all()
    assert (problem.layout("shift_mask").buffer == before).all()
    assert not arm.bound.arrivals.any()


@pytest.mark.parametrize("m", [1, 16, 64])
def test_variants_that_are_wrong_by_design_run_and_read_everything(bench, m) -> None:
    """A variant whose loads were deleted would be faster than any stream."""
    from lab.arms import tune_stream

    problem = problem_of(bench, "mxfp4", 4096, 4096, m, copies=bench.copies(4096 * 4096 * 17 // 32))
    floor = tune_stream(
        bench.timer, bench.modules, problem.weights, bench.protocol, bench.probe["sm_count"]
    )

    def time_of(arm):
        graphs = [bench.timer.capture(arm.launch, arm.copies, n * arm.copies) for n in (1, 2)]
        return float(
            np.median([bench.timer.graph_leg(*graphs, arm.copies, False).time_us for _ in range(7)])
        )

    least = time_of(floor)
    for arm in testbed.factorial_arms(problem, floor):
        with bench.stream:
            arm.launch(0)
        bench.stream.synchronize()
        if arm.kernel not in (testbed.LAUNCH_FLOOR, testbed.LAUNCH_TESTBED):
            assert time_of(arm) > 0.95 * least, arm.kernel


@pytest.mark.parametrize("config", WRONG, ids=lambda c: c.entry)
def test_every_wrong_variant_runs_on_a_ragged_problem(bench, config) -> None:
    problem = problem_of(bench, config.format, 200, 1664, config.tokens - 3)
    arm = problem.arm("testbed/none", config)
    assert arm.check(0, "before") == []
    with bench.stream:
        arm.launch(1)
    bench.stream.synchronize()


@pytest.mark.parametrize(
    "experiment", ["stages", "warps", "sequence", "staging", "split_k", "formats"]
)
@pytest.mark.parametrize("m", [1, 16])
def test_arms_of_the_experiments_are_right(bench, experiment, m) -> None:
    if m == 16 and experiment in ("stages", "warps"):
        pytest.skip("built for 8 tokens")
    problem = problem_of(bench, "mxfp4", 2880, 2880, m)
    for arm in testbed.cause_arms(problem, experiment):
        if arm.claims_right:
            assert passes(arm.check(0, "before")), arm.kernel


@pytest.mark.parametrize("pdl", [False, True])
def test_a_chain_of_layers_is_right_in_a_graph(bench, pdl) -> None:
    from lab.operands import make_weights

    layers = []
    for n, k in CHAIN_LAYERS:
        problem = problem_of(bench, "mxfp4", n, k, 1)
        layers.append(problem.arm(FULL, Config(pdl=pdl)))
    whole = make_weights(bench.random, "mxfp4", CHAIN_SHAPE["N"], CHAIN_SHAPE["K"], 1)
    chain = ChainArm("testbed/full", whole, layers, bench.stream, pdl)
    assert chain.weight_bytes == whole.copy_bytes
    assert passes(chain.check(0, "before"))
    graph = bench.timer.capture(chain.launch, chain.copies, 6)
    with bench.stream:
        for layer in layers:
            layer.y.fill(0x7FFF)
        graph.launch(bench.stream)
    assert passes(chain.check(1, "after"))
