"""The harness on a device: legs, rotation, the stream's checksum, the correctness gate."""

from __future__ import annotations

import numpy as np
import pytest

from qgemm_mx import build

pytestmark = pytest.mark.gpu


def weights(bench, fmt="mxfp4", n=1024, k=4096, copies=2):
    from lab.operands import make_weights

    return make_weights(bench.random, fmt, n, k, copies)


def graph_legs(bench, launch, copies, nodes, warm=False, count=5):
    graphs = (
        bench.timer.capture(launch, copies, nodes),
        bench.timer.capture(launch, copies, 2 * nodes),
    )
    return [bench.timer.graph_leg(*graphs, nodes, warm) for _ in range(count)]


def test_a_kernel_of_known_length_takes_that_long(bench) -> None:
    delay = bench.modules["harness"].kernel("delay")

    def launch(_copy: int) -> None:
        delay((1,), (1,), (np.uint64(20_000),))

    legs = graph_legs(bench, launch, 1, 16)
    assert all(20.0 < leg.time_us < 24.0 for leg in legs)
    assert all(leg.t_2n_us > leg.t_n_us for leg in legs)
    assert 20.0 < bench.timer.loop_leg(launch, 1, 16).time_us < 60.0


@pytest.mark.parametrize("fmt", ["bf16", "mxfp4", "int4_g64"])
@pytest.mark.parametrize(("n", "k"), [(37, 128), (100, 2688)])
def test_every_stream_shape_reads_every_byte(bench, fmt, n, k) -> None:
    from lab.arms import StreamArm, stream_shapes

    copies = weights(bench, fmt, n, k)
    for shape in stream_shapes(bench.protocol, copies.copy_bytes, bench.probe["sm_count"]):
        arm = StreamArm(copies, bench.modules, bench.stream, shape)
        assert all(c.passed for copy in (0, 1) for c in arm.check(copy, "before")), shape.describe()


def test_a_stream_that_skips_bytes_is_caught(bench) -> None:
    from lab.arms import StreamArm, stream_shapes

    copies = weights(bench)
    shape = next(stream_shapes(bench.protocol, copies.copy_bytes, bench.probe["sm_count"]))
    arm = StreamArm(copies, bench.modules, bench.stream, shape)
    whole, make = arm._read_bytes, arm._make_arguments

    def skipping(copy: int, check: int) -> tuple:
        arm._read_bytes = whole - 4096
        try:
            return make(copy, check)
        finally:
            arm._read_bytes = whole

    arm._make_arguments = skipping
    assert not arm.check(0, "before")[0].passed


def test_rotation_makes_a_small_weight_cold(bench) -> None:
    from lab.arms import tune_stream

    size = weights(bench).copy_bytes
    arm = tune_stream(
        bench.timer,
        bench.modules,
        weights(bench, copies=bench.copies(size)),
        bench.protocol,
        bench.probe["sm_count"],
    )
    cold = np.median([leg.time_us for leg in graph_legs(bench, arm.launch, arm.copies, arm.copies)])
    hot = np.median([leg.time_us for leg in graph_legs(bench, arm.launch, 1, 16, warm=True)])
    assert cold > 1.05 * hot


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("m", [1, 3, 100])
def test_the_gate_passes_the_right_product_and_no_other(bench, fmt, m) -> None:
    from lab.arms import POISON, CublasLtArm
    from lab.operands import decode_activations, make_activations

    x = make_activations(bench.random, m, 4096)[fmt == "fp8_e4m3"]
    arm = CublasLtArm(
        weights(bench, fmt), x, decode_activations(x), bench.lt, bench.stream, bench.protocol
    )
    arm.tune(bench.timer)
    assert arm.tuning["candidates"] >= bench.protocol["cublaslt"]["min_candidates"]
    assert all(c.passed for c in arm.check(0, "before"))
    assert not arm.truth(1).compare(arm.y, "another copy").passed
    arm.y[-1, -1] = POISON
    assert not arm.check(0, "after")[0].passed


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "int4_g128", "int4_g64"])
def test_the_naive_path_is_right_in_every_format(bench, fmt) -> None:
    from lab.arms import CublasLtArm
    from lab.fp4_arms import NaiveDequantArm
    from lab.operands import decode_activations, make_activations

    x = make_activations(bench.random, 7, 4096)[0]
    dense = CublasLtArm(
        weights(bench, "bf16"), x, decode_activations(x), bench.lt, bench.stream, bench.protocol
    )
    dense.tune(bench.timer)
    arm = NaiveDequantArm(weights(bench, fmt), dense, bench.modules, bench.stream)
    assert all(c.passed for copy in (0, 1) for c in arm.check(copy, "before"))


def test_occupancy_is_the_drivers(bench) -> None:
    from lab import arms, occupancy

    records = [build.read_record(path) for path in sorted(bench.modules.folder.glob("*.json"))]
    table = occupancy.table(records, arms.stream_launches(bench.protocol, bench.probe["sm_count"]))
    driver = {
        (row.entry, row.arch, row.threads, row.smem_dynamic_bytes): bench.modules[
            row.kernel
        ].driver_blocks_per_sm(row.entry, row.threads, row.smem_dynamic_bytes)
        for row in table.itertuples()
    }
    assert occupancy.compare(table, driver) == []
