"""The product's arms on a device: right in graphs and after them, cold by their own copies, and calls of the host."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lab import host_times, measure_r2, measure_r2b, plan_r2, plan_r2b, product_arms
from lab.campaign import ChainPair
from lab.plan_r2 import BATCH_INVARIANT, PRODUCT, SEARCHED
from lab.product_arms import Chain, Packed
from lab.protocol import file_of
from qgemm_mx import gemm_plan, gemv_plan
from qgemm_mx.device import device
from qgemm_mx.gemv_layout import GEMV_FORMATS

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def r2(bench, repository):
    """The bench under R2's protocol, with the library on the same cubins."""
    bench.protocol = json.loads((repository / file_of("R2")).read_text())
    product_arms.use_cubins(bench.modules.folder)
    return bench


def packed_of(bench, fmt, n, k, copies=2) -> Packed:
    from lab.operands import make_weights

    return Packed.of(make_weights(bench.random, fmt, n, k, copies), bench.stream)


def arm_of(bench, kernel, packed, m):
    from lab.operands import decode_activations, make_activations

    x = make_activations(bench.random, m, packed.weights.k)[0]
    return product_arms.make_arm(
        kernel, packed, x, decode_activations(x), bench.stream, bench.protocol
    )


def passes(results) -> bool:
    return bool(results) and all(r.passed for r in results)


@pytest.mark.parametrize("kernel", [PRODUCT, BATCH_INVARIANT])
@pytest.mark.parametrize("m", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("n", "k"), [(1024, 4096), (2880, 2880), (4096, 14336)])
@pytest.mark.parametrize("fmt", GEMV_FORMATS)
def test_against_fp64_in_a_graph_of_every_copy(r2, fmt, n, k, m, kernel) -> None:
    if fmt == "int4_g128" and k % 128:
        pytest.skip("K is no multiple of the group")
    arm = arm_of(r2, kernel, packed_of(r2, fmt, n, k, copies=3), m)
    for copy in range(arm.copies):
        assert passes(arm.check(copy, "before"))
    assert not arm.truth(0).compare(arm.y, "another copy").passed
    graph = r2.timer.capture(arm.launch, arm.copies, 7)
    with r2.stream:
        arm.y.fill(0x7FFF)
        graph.launch(r2.stream)
    assert passes(arm.check(6 % 3, "after"))


def test_structured_probes(r2) -> None:
    kernels = measure_r2.ablations(r2.protocol)
    assert len(kernels) == len(gemv_plan.ABLATION_STEPS) - 1
    checks = product_arms.probe_checks(r2.stream, kernels)
    assert len(checks) > 300 and {c.kernel for c in checks} >= set(kernels)
    assert not [c.detail for c in checks if not c.passed]


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize(("n", "k"), [(1024, 4096), (14336, 4096)])
def test_the_search_is_right_whichever_plan_it_takes(r2, n, k, m) -> None:
    from qgemm_mx.formats import weight_bytes

    copies = r2.copies(weight_bytes("mxfp4", n, k))
    packed = packed_of(r2, "mxfp4", n, k, copies)
    searched, own = arm_of(r2, SEARCHED, packed, m), arm_of(r2, PRODUCT, packed, m)
    searched.tune(r2.timer)
    assert searched.refused == []
    listed = list(product_arms.candidates(packed.copies[0], m))
    assert searched.tuning["candidates"] == len(listed) > 1
    assert passes(searched.check(1, "before"))

    def time_of(arm) -> float:
        graphs = [r2.timer.capture(arm.launch, copies, i * max(16, copies)) for i in (1, 2)]
        legs = [r2.timer.graph_leg(*graphs, max(16, copies), False).time_us for _ in range(9)]
        return float(np.median(legs))

    assert time_of(searched) <= 1.03 * time_of(own)


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (2880, 2880), (14336, 4096)])
def test_the_ablation_is_right(r2, n, k, m) -> None:
    packed = packed_of(r2, "mxfp4", n, k)
    for kernel in measure_r2.ablations(r2.protocol):
        arm = arm_of(r2, kernel, packed, m)
        assert passes(arm.check(0, "before")) and arm.role == "testbed", kernel
        assert plan_r2.is_ablation(arm.kernel)
        step = kernel.removeprefix(f"{PRODUCT}/")
        place = (n, k, m, "mxfp4", r2.probe["sm_count"], device(0).smem_per_sm)
        assert arm.bound.plan == gemv_plan.ablation(step, *place)[2]


MATRIX = (plan_r2b.PRODUCT, plan_r2b.DISPATCH, plan_r2b.BATCH_INVARIANT)


@pytest.mark.parametrize("kernel", MATRIX)
@pytest.mark.parametrize("m", [3, 33, 129])
@pytest.mark.parametrize("fmt", GEMV_FORMATS)
def test_the_arms_of_r2b_are_right_in_a_graph_of_every_copy(r2, fmt, m, kernel) -> None:
    arm = arm_of(r2, kernel, packed_of(r2, fmt, 1000, 4096, copies=3), m)
    for copy in range(arm.copies):
        assert passes(arm.check(copy, "before"))
    graph = r2.timer.capture(arm.launch, arm.copies, 7)
    with r2.stream:
        arm.y.fill(0x7FFF)
        graph.launch(r2.stream)
    assert passes(arm.check(6 % 3, "after"))


@pytest.fixture(scope="module")
def steps(repository) -> list[str]:
    frozen = json.loads((repository / file_of("R2b")).read_text())
    return measure_r2.ablations(frozen, plan_r2b.is_ablation)


def test_structured_probes_of_r2b(r2, steps) -> None:
    checks = product_arms.probe_checks(r2.stream, steps, measure_r2b.PROBED)
    assert {c.kernel for c in checks} == {*steps, *measure_r2b.PROBED}
    assert not [c.detail for c in checks if not c.passed]


@pytest.mark.parametrize("m", [64, 512])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (2880, 2880)])
def test_the_search_and_the_ablation_of_r2b_are_right(r2, steps, n, k, m) -> None:
    packed = packed_of(r2, "mxfp4", n, k)
    assert len(steps) == len(gemm_plan.ABLATION_STEPS) - 1
    for kernel in steps:
        arm = arm_of(r2, kernel, packed, m)
        assert passes(arm.check(0, "before")) and arm.role == "testbed", kernel
    searched = arm_of(r2, plan_r2b.SEARCHED, packed, m)
    searched.tune(r2.timer)
    assert searched.refused == [] and passes(searched.check(1, "before"))


@pytest.mark.parametrize("m", [1, 4, 16])
def test_a_chain_is_right_plain_and_programmatic(r2, m) -> None:
    from lab.operands import decode_activations, make_activations, make_weights
    from lab.testbed import CHAIN_LAYERS, CHAIN_SHAPE

    problems = []
    for n, k in CHAIN_LAYERS:
        x = make_activations(r2.random, m, k)[0]
        problems.append((packed_of(r2, "mxfp4", n, k), x, decode_activations(x)))
    whole = make_weights(r2.random, "mxfp4", CHAIN_SHAPE["N"], CHAIN_SHAPE["K"], 2)
    shared = (whole, problems, r2.stream, r2.protocol)
    pair = ChainPair(*(Chain.of(*shared, programmatic=p) for p in (False, True)))
    assert pair.weight_bytes == whole.copy_bytes
    early = [{layer.bound.plan.early for layer in c.layers} for c in pair._chains.values()]
    assert early == [{0}, {1}]
    assert passes(pair.check(0, "before"))
    for regime, launch in {"": pair.launch, **pair.launches}.items():
        graph = r2.timer.capture(launch, pair.copies, 6)
        for layer in pair._chains[regime].layers:
            with r2.stream:
                layer.y.fill(0x7FFF)
        with r2.stream:
            graph.launch(r2.stream)
    assert passes(pair.check(1, "after"))


def test_a_rotation_is_cold_and_a_copy_again_and_again_is_not(r2) -> None:
    """Slower over copies of three times L2 than on one copy: the packed copies are distinct memory."""
    from qgemm_mx.formats import weight_bytes

    copies = r2.copies(weight_bytes("mxfp4", 4096, 4096))
    arm = arm_of(r2, PRODUCT, packed_of(r2, "mxfp4", 4096, 4096, copies), 1)

    def time_of(count: int) -> float:
        graphs = [r2.timer.capture(arm.launch, count, i * copies) for i in (1, 2)]
        return float(np.median([r2.timer.graph_leg(*graphs, copies, False).time_us for _ in range(9)]))  # fmt: skip

    assert time_of(copies) > 1.1 * time_of(1)


def test_calls_of_the_host_are_right_and_have_times(r2) -> None:
    calls = host_times.PlainCalls(r2)
    assert passes(calls.checks())
    found = calls.constants()
    assert found[host_times.HOST]["value"] == max(
        row["value"] for name, row in found.items() if name != host_times.HOST
    )
    assert 0.5 < found[host_times.HOST]["value"] < 100
    (packing,) = host_times.pack_time(r2).values()
    assert 0 < packing["value"] < 1000 and packing["unit"] == "ms"
