"""The reference kernel on a device: CASES 1, 2, 3, 4, 5, 8, 9 and 13, guard bytes and strided rows."""

from __future__ import annotations

import numpy as np
import pytest

from qgemm_mx import build, launch, probes
from qgemm_mx.formats import FORMATS, encode_bf16
from qgemm_mx.packing import quantize, reference_matmul

pytestmark = pytest.mark.gpu

PROBLEMS = [(1, 128, 1), (7, 256, 33), (2880, 2944, 3), (1856, 2688, 7), (40, 384, 100)]
GUARD = 0xA5


@pytest.fixture(scope="module")
def cubin(tmp_path_factory):
    out = tmp_path_factory.mktemp("cubins")
    record = build.compile_cubin(build.load_sources()["reference"], "sm_90a", out)
    return out / "sm_90a" / record.cubin


def run(probe, cubin, out=None):
    import cupy as cp

    values, scales, row_scale = launch.to_device(probe.weight)
    x = cp.asarray(encode_bf16(probe.x))
    y = launch.reference_matmul(x, values, scales, row_scale, probe.weight.format, cubin, out=out)
    return cp.asnumpy(y)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_probe(fmt, problem, cubin):
    failed = [
        str(result.detail)
        for probe in probes.probes_for(fmt, *problem)
        if not (result := probes.check(probe, run(probe, cubin))).passed
    ]
    assert not failed


@pytest.mark.parametrize("fmt", FORMATS)
def test_one_hot_reaches_every_k(fmt, cubin):
    n, k, m = 33, 256, 64
    for offset in range(0, k, m):
        probe = probes.one_hot(fmt, n, k, m, offset)
        assert probes.check(probe, run(probe, cubin)).passed


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_swapped_nibble_is_caught_on_the_device(fmt, cubin):
    probe = probes.ramp(fmt, 8, 256, 2)
    wrong = probe.weight.values.copy()
    wrong[3, 17] = (wrong[3, 17] >> 4) | ((wrong[3, 17] & 15) << 4)
    broken = probes.Probe(probe.name, type(probe.weight)(
        fmt, 8, 256, wrong, probe.weight.scales, probe.weight.tensor_scale, probe.weight.shard_rows
    ), probe.x, probe.y)  # fmt: skip
    assert not probes.check(broken, run(broken, cubin)).passed


@pytest.mark.parametrize("fmt", FORMATS)
def test_random_against_fp64(fmt, cubin):
    rng = np.random.default_rng(7)
    n, k, m = 100, 2688, 5
    weight = quantize(rng.normal(0, 0.02, (n, k)).astype(np.float32), fmt)
    x = encode_bf16(rng.normal(0, 1, (m, k)).astype(np.float32))
    exact_x = (x.astype(np.uint32) << 16).view(np.float32)
    import cupy as cp

    y = launch.reference_matmul(cp.asarray(x), *launch.to_device(weight), fmt, cubin)
    truth = reference_matmul(exact_x, weight)
    norms = np.linalg.norm(exact_x, axis=1)[:, None] * np.linalg.norm(
        reference_matmul(np.eye(k, dtype=np.float32), weight), axis=0
    )
    assert np.max(np.abs(cp.asnumpy(y) - truth) / (np.sqrt(k) * 2.0**-24 * norms)) < 1


@pytest.mark.parametrize("fmt", FORMATS)
def test_neighbours_of_strided_rows_stay_untouched(fmt, cubin):
    import cupy as cp

    probe = probes.ramp(fmt, 13, 256, 5)
    values, scales, row_scale = launch.to_device(probe.weight)

    def strided(array, pad):
        wide = cp.full((array.shape[0], array.shape[1] + pad), GUARD, array.dtype)
        wide[:, : array.shape[1]] = array
        return wide[:, : array.shape[1]], wide

    x, x_wide = strided(cp.asarray(encode_bf16(probe.x)), 3)
    values, _ = strided(values, 5)
    scales, _ = strided(scales, 7)
    buffer = cp.full((5 + 2, 13 + 9), np.float32(-777), cp.float32)
    y = buffer[1:6, 4:17]
    launch.reference_matmul(x, values, scales, row_scale, fmt, cubin, out=y)
    assert probes.check(probe, cp.asnumpy(y)).passed
    outside = cp.asnumpy(buffer)
    outside[1:6, 4:17] = -777
    assert (outside == -777).all()
    assert (cp.asnumpy(x_wide[:, -3:]) == GUARD).all()


def test_m_zero_returns_an_empty_result(cubin):
    import cupy as cp

    weight = probes.ramp("mxfp4", 8, 64, 1).weight
    y = launch.reference_matmul(
        cp.zeros((0, 64), cp.uint16), *launch.to_device(weight), "mxfp4", cubin
    )
    assert y.shape == (0, 8)


@pytest.mark.parametrize(
    ("k", "message"),
    [(2881 - 1, "not a multiple of the int4_g128 scale group 128"), (256, "x has K=256")],
)
def test_a_wrong_k_is_named(k, message, cubin):
    import cupy as cp

    weight = probes.ramp("int4_g128", 8, 128, 1).weight
    x = cp.zeros((1, k), cp.uint16)
    with pytest.raises(launch.LaunchError, match=message):
        launch.reference_matmul(x, *launch.to_device(weight), "int4_g128", cubin)


def test_bits_repeat_and_do_not_depend_on_m(cubin):
    import cupy as cp

    rng = np.random.default_rng(3)
    weight = quantize(rng.normal(0, 0.02, (96, 512)).astype(np.float32), "nvfp4")
    x = cp.asarray(encode_bf16(rng.normal(0, 1, (9, 512)).astype(np.float32)))
    operands = launch.to_device(weight)
    whole = cp.asnumpy(launch.reference_matmul(x, *operands, "nvfp4", cubin))
    again = cp.asnumpy(launch.reference_matmul(x, *operands, "nvfp4", cubin))
    alone = cp.asnumpy(launch.reference_matmul(x[4:5], *operands, "nvfp4", cubin))
    assert (whole.view(np.uint32) == again.view(np.uint32)).all()
    assert (whole[4:5].view(np.uint32) == alone.view(np.uint32)).all()
