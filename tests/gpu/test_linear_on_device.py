"""`pack_weight` and `linear` on a device. The rows of CASES (what users of other FP4 kernels hit):

 1 ragged N and K        test_every_probe, test_random_against_fp64, test_neighbours_stay_untouched
 2 E8M0 code 0           test_every_probe (e8m0_code_0, e8m0_code_0_subnormal)
 3 E8M0 codes 255, 254   test_every_probe (e8m0_code_255, e8m0_code_254), test_each_scale_code
 4 E4M3 subnormals       test_every_probe (e4m3_subnormal), test_each_scale_code
 5 tensor scale in FP32  test_every_probe (tensor_scale_underflow, tensor_scale_overflow)
 6 both conventions      test_both_conventions_of_a_tensor_scale_give_the_same_bits
 7 scales per shard      test_every_probe (shard_scales)
 8 K                     test_a_wrong_k_is_named, test_every_k_in_steps_of_the_group
 9 M = 0, odd M          test_m_zero, test_every_probe
10 bits                  test_bits_repeat, test_bits_of_a_row_do_not_depend_on_m
11 alignment             test_a_misaligned_view_is_refused_and_a_misaligned_result_is_not
12 graph capture         test_the_first_call_can_be_captured
13 NaN, infinity, -0     test_every_probe (x_nan, x_inf, negative_zero), test_nan_stays_in_its_row
14 BF16 range            test_every_probe (x_large), test_activations_over_the_whole_range
15 devices and streams   test_packing_on_one_stream_and_calling_on_another, test_two_devices,
                         test_a_new_thread_may_call, test_threads_share_a_weight

From 17 rows of BF16 on a call is one of qgemm_mx: M in PROBLEMS and MS reaches it, and tests of its own stand below.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from qgemm_mx import checkpoints, gemm_plan, gemv_layout, gemv_plan, gpu_linear, probes
from qgemm_mx.device import device
from qgemm_mx.formats import FORMATS, encode_bf16
from qgemm_mx.gemm_launch import MatrixLaunch
from qgemm_mx.launch import LaunchError
from qgemm_mx.packing import PackedWeight, dequantize, quantize, reference_matmul

pytestmark = pytest.mark.gpu

PROBLEMS = [
    (1, 128, 1), (7, 256, 16), (40, 384, 100), (2880, 2944, 3), (1856, 2688, 7), (1024, 4096, 2),
    (333, 640, 33), (4096, 1536, 5), (520, 896, 65), (300, 1152, 129), (333, 512, 257),
]  # fmt: skip
WAYS = [
    {}, {"batch_invariant": True}, {"programmatic": True},
    {"batch_invariant": True, "programmatic": True},
]  # fmt: skip
RANDOM = [(2880, 2880), (1856, 2688), (1000, 128), (1024, 4096), (128, 14336), (6144, 4096)]
MS = [1, 2, 3, 4, 8, 11, 16, 37, 65, 200]


@pytest.fixture(scope="module", autouse=True)
def cubins(repository):
    """Cubins are kept in the workflow's cache, not in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(repository / ".work" / "cache"))
        yield


@pytest.fixture
def cp():
    return pytest.importorskip("cupy")


def decode(bits: np.ndarray) -> np.ndarray:
    """float32 of BF16 bit patterns; other types as they are."""
    if bits.dtype != np.uint16:
        return bits.astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def activations(m: int, k: int, seed: int = 7) -> np.ndarray:
    """BF16 bit patterns."""
    return encode_bf16(np.random.default_rng([seed, m, k]).normal(0, 1, (m, k)).astype(np.float32))


def random_weight(fmt: str, n: int, k: int, seed: int = 5) -> PackedWeight:
    rng = np.random.default_rng([seed, n, k])
    return quantize(rng.normal(0, 0.02, (n, k)).astype(np.float32), fmt)


def fits(fmt: str, k: int) -> bool:
    return k % max(32, FORMATS[fmt].group) == 0


def both_ways(x, weight, **more) -> np.ndarray:
    """[2, M, N]: of a plain call, and of a dependent one, whose plan is another."""
    return np.stack([
        gpu_linear.linear(x, weight, programmatic=programmatic, **more).get()
        for programmatic in (False, True)
    ])  # fmt: skip


def assert_close(y: np.ndarray, x: np.ndarray, weight: PackedWeight, bias=0.0) -> None:
    """One rounding to the output type, and an FP32 sum of K products. y: [M, N], or several [..., M, N]."""
    truth = reference_matmul(decode(x), weight) + bias
    u = 2.0**-8 if x.dtype == np.uint16 else 2.0**-11
    norms = np.linalg.norm(decode(x).astype(np.float64), axis=1)[:, None]
    norms = norms * np.linalg.norm(dequantize(weight, np.float64), axis=1)
    limit = u * np.abs(truth) + np.sqrt(weight.k) * 2.0**-22 * norms + 2.0**-24
    assert (np.abs(decode(y) - truth) <= limit).all()


# ---------------------------------------------------------------- whole layers


@pytest.mark.parametrize("fmt", gemv_layout.GEMV_FORMATS)
@pytest.mark.parametrize(("n", "k"), [(10240, 8192), (4096, 14336)])
def test_a_large_layer_is_right_every_time(fmt, n, k, cp):
    """Rings turn many times here. A copy that overtook loads of the unit in front of it went wrong at M = 4 alone."""
    pattern = random_weight(
        fmt, 256, k
    )  # rows of a large weight in 256 kinds, so that the truth is cheap
    scale = pattern.tensor_scale.tolist() if pattern.spec.has_tensor_scale else None
    values, scales = (
        cp.tile(cp.asarray(a), (n // 256, 1)) for a in (pattern.values, pattern.scales)
    )
    weight = gpu_linear.pack_weight(values, scales, fmt, scale)
    for m in (1, 2, 4, 8, 16):
        x = activations(m, k)
        first = gpu_linear.linear(cp.asarray(x), weight).get()
        kinds = first.reshape(m, n // 256, 256)
        assert (kinds == kinds[:, :1]).all(), f"M={m}: rows of one kind differ"
        assert_close(kinds[:, 0], x, pattern)
        for _ in range(20):
            again = gpu_linear.linear(cp.asarray(x), weight).get()
            assert np.array_equal(first, again), f"M={m}: another result"


# ---------------------------------------------------------------- packing


@pytest.mark.parametrize("fmt", gemv_layout.GEMV_FORMATS)
@pytest.mark.parametrize("n", [1, 7, 40, 1000, 2880])
@pytest.mark.parametrize("k", [32, 96, 128, 384, 1856, 2688, 2880])
def test_packed_bytes_are_the_ones_of_the_host(fmt, n, k, cp):
    if not fits(fmt, k):
        with pytest.raises(ValueError, match=f"K={k} is not a multiple"):
            gemv_layout.gemv_layout(fmt, n, k)
        return
    host = random_weight(fmt, n, k)
    weight = gpu_linear.pack_weight(host)
    assert np.array_equal(weight.data.get(), gemv_layout.pack_host(host)) and not weight.wide


@pytest.mark.parametrize("fmt", gemv_layout.GEMV_FORMATS)
def test_strided_checkpoints_and_the_array_path_on_the_device(fmt, cp):
    host = random_weight(fmt, 40, 640)

    def strided(array, pad):
        wide = cp.full((array.shape[0], array.shape[1] + pad), 0x5A, array.dtype)
        wide[:, : array.shape[1]] = cp.asarray(array)
        return wide[:, : array.shape[1]]

    scale = host.tensor_scale.tolist() if host.spec.has_tensor_scale else None
    weight = gpu_linear.pack_weight(strided(host.values, 5), strided(host.scales, 3), fmt, scale)
    packed = gemv_layout.pack_host(host)
    assert np.array_equal(weight.data.get(), packed)
    layout = gemv_layout.gemv_layout(fmt, 40, 640)
    on_device = gemv_layout.pack(layout, cp.asarray(host.values), cp.asarray(host.scales))
    assert np.array_equal(on_device.get(), packed)
    values, scales = gemv_layout.unpack(layout, weight.data)
    assert np.array_equal(values.get(), host.values) and np.array_equal(scales.get(), host.scales)


@pytest.mark.parametrize(
    ("fmt", "code", "wide"),
    [("mxfp4", 192, False), ("mxfp4", 193, True), ("mxfp4", 255, True), ("nvfp4", 0x7E, False),
     ("nvfp4", 0xFE, False), ("nvfp4", 0x7F, True), ("nvfp4", 0xFF, True)],
)  # fmt: skip
def test_one_wide_scale_is_found(fmt, code, wide, cp):
    host = random_weight(fmt, 100, 640)
    scales = host.scales.copy()
    scales[99, -1] = code
    shards = host.tensor_scale if host.spec.has_tensor_scale else None
    host = PackedWeight(fmt, 100, 640, host.values, scales, shards)
    assert gpu_linear.pack_weight(host).wide is wide


def test_a_large_weight_is_packed_within_50_ms(cp):
    n, k = 57344, 8192
    values = cp.random.randint(0, 256, (n, k // 2), np.uint8)
    scales = cp.full((n, k // 32), 120, cp.uint8)
    times = []
    for _ in range(3):  # the first compiles, loads and fills the memory pool
        cp.cuda.Device().synchronize()
        start = time.perf_counter()
        weight = gpu_linear.pack_weight(values, scales, "mxfp4")
        times.append(time.perf_counter() - start)
        del weight
    assert min(times) < 0.050, times


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("fmt", gemv_layout.GEMV_FORMATS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "+".join(way) or "plain")
def test_every_probe(fmt, problem, way, cp):
    failed = []
    for probe in probes.probes_for(fmt, *problem):
        weight = gpu_linear.pack_weight(probe.weight)
        x = cp.asarray(encode_bf16(probe.x))
        y = gpu_linear.linear(x, weight, **way)
        result = probes.check(probe, decode(y.get()), "bfloat16")
        if not result.passed:
            failed.append(result.detail)
    assert not failed


@pytest.mark.parametrize("fmt", gemv_layout.GEMV_FORMATS)
@pytest.mark.parametrize("m", [1, 2, 4, 8, 16])
def test_one_hot_reaches_every_k(fmt, m, cp):
    n, k = 33, 640
    for offset in range(0, k, m):
        probe = probes.one_hot(fmt, n, k, m, offset)
        x, weight = cp.asarray(encode_bf16(probe.x)), gpu_linear.pack_weight(probe.weight)
        for y in both_ways(x, weight):
            result = probes.check(probe, decode(y), "bfloat16")
            assert result.passed, result.detail


@pytest.mark.parametrize("fmt", gemv_layout.GEMV_FORMATS)
def test_a_swapped_nibble_is_caught(fmt, cp):
    probe = probes.ramp(fmt, 8, 256, 2)
    values = probe.weight.values.copy()
    values[3, 17] = (values[3, 17] >> 4) | ((values[3, 17] & 15) << 4)
    shards = probe.weight.tensor_scale if probe.weight.spec.has_tensor_scale else None
    wrong = PackedWeight(fmt, 8, 256, values, probe.weight.scales, shards)
    y = gpu_linear.linear(cp.asarray(encode_bf16(probe.x)), gpu_linear.pack_weight(wrong))
    assert not probes.check(probe, decode(y.get()), "bfloat16").passed


@pytest.mark.parametrize("fmt", gemv_layout.GEMV_FORMATS)
@pytest.mark.parametrize(("n", "k"), RANDOM)
@pytest.mark.parametrize("dtype", [np.uint16, np.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_random_against_fp64(fmt, n, k, dtype, with_bias, cp):
    if not fits(fmt, k):
        k -= k % 128  # int4_g128
    host = random_weight(fmt, n, k)
    weight = gpu_linear.pack_weight(host)
    for m in MS:
        x, bias = activations(m, k), encode_bf16(np.linspace(-3, 3, n).astype(np.float32))
        if dtype == np.float16:
            x, bias = decode(x).astype(np.float16), decode(bias).astype(np.float16)
        given = cp.asarray(bias) if with_bias else None
        y = both_ways(cp.asarray(x), weight, bias=given)
        assert y.dtype == dtype and y.shape == (2, m, n)
        assert_close(y, x, host, decode(bias).astype(np.float64) if with_bias else 0.0)


@pytest.mark.parametrize("fmt", gemv_layout.GEMV_FORMATS)
def test_every_k_in_steps_of_the_group(fmt, cp):
    step = max(32, FORMATS[fmt].group)
    for k in range(step, 20 * step, step):
        host, x = random_weight(fmt, 24, k), activations(3, k)
        assert_close(both_ways(cp.asarray(x), gpu_linear.pack_weight(host)), x, host)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("m", [1, 4, 8, 16])
@pytest.mark.parametrize("wide", [False, True])
def test_each_scale_code(fmt, m, wide, cp):
    """Row i has scale code i everywhere, elements of one; x lifts or lowers it into BF16's range."""
    n, group = 256, FORMATS[fmt].group
    k = 8 * group if fmt == "nvfp4" else 4 * group
    values = np.full((n, k // 2), 0x22, np.uint8)
    codes = np.broadcast_to(np.arange(n, dtype=np.uint8)[:, None], (n, k // group))
    if not wide:  # without them, every slice would take the exact path
        most = {"mxfp4": 192, "nvfp4": 0x7E}[fmt]
        sign = 0x80 if fmt == "nvfp4" else 0
        codes = np.minimum(codes & ~np.uint8(sign), most) | codes & sign
    host = PackedWeight(fmt, n, k, values, codes.copy(), 1.0 if fmt == "nvfp4" else None)
    weight = gpu_linear.pack_weight(host)
    assert weight.wide is wide
    for power in (-100, 0, 20, 100):
        x = encode_bf16(np.full((m, k), 2.0**power, np.float32))
        with np.errstate(over="ignore"):
            truth = reference_matmul(decode(x), host).astype(np.float32)
        # Powers of two and their small multiples: exact where FP32 and BF16 hold them, subnormals aside.
        kept = (np.abs(truth) >= 2.0**-126) & np.isfinite(truth)
        limit = 2.0**-8 * np.abs(truth[kept]) if fmt == "nvfp4" else 0.0
        for y in decode(both_ways(cp.asarray(x), weight)):
            assert np.array_equal(np.isnan(y), np.isnan(truth))
            assert (np.abs(y[kept] - truth[kept]) <= limit).all()


@pytest.mark.parametrize("fmt", gemv_layout.GEMV_FORMATS)
@pytest.mark.parametrize("m", [1, 4, 16])
def test_activations_over_the_whole_range(fmt, m, cp):
    host = random_weight(fmt, 64, 1024)
    weight = gpu_linear.pack_weight(host)
    base = decode(activations(m, 1024)).astype(np.float64)
    for power in (-118, -60, -31, -29, 40, 61, 63, 100, 116):
        x = encode_bf16((base * 2.0**power).astype(np.float32))
        y = decode(both_ways(cp.asarray(x), weight)).astype(np.float64)
        assert np.isfinite(y).all()
        lifted = encode_bf16((decode(x).astype(np.float64) * 2.0**-power).astype(np.float32))
        assert_close((y * 2.0**-power).astype(np.float32), lifted, host)


def test_nan_stays_in_its_row(cp):
    host = random_weight("mxfp4", 40, 640)
    weight = gpu_linear.pack_weight(host)
    x = activations(8, 640)
    clean = gpu_linear.linear(cp.asarray(x), weight).get()
    for value in (np.nan, np.inf, -np.inf):
        spoilt = x.copy()
        spoilt[3, 77] = encode_bf16(np.float32([value]))[0]
        truth = reference_matmul(decode(spoilt), host)
        others = np.arange(8) != 3
        for y in both_ways(cp.asarray(spoilt), weight):
            assert np.array_equal(np.isnan(decode(y)), np.isnan(truth))
            assert np.array_equal(np.isinf(decode(y)), np.isinf(truth))
            assert_close(y[others], x[others], host)
    assert np.isfinite(decode(clean)).all()


def test_both_conventions_of_a_tensor_scale_give_the_same_bits(cp):
    host = quantize(np.random.default_rng(1).normal(0, 1, (40, 384)).astype(np.float32), "nvfp4")
    host = PackedWeight("nvfp4", 40, 384, host.values, host.scales, 0.25)  # has an exact reciprocal
    x = cp.asarray(activations(3, 384))
    results = [
        gpu_linear.linear(x, gpu_linear.pack_weight(loaded)).get()
        for loaded in (
            host,
            checkpoints.from_modelopt_nvfp4(**checkpoints.to_modelopt_nvfp4(host)),
            checkpoints.from_compressed_tensors_nvfp4(
                **checkpoints.to_compressed_tensors_nvfp4(host)
            ),
        )
    ]
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


# ---------------------------------------------------------------- bits


@pytest.mark.parametrize("fmt", gemv_layout.GEMV_FORMATS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "+".join(way) or "plain")
@pytest.mark.parametrize(("n", "k"), [(1024, 4096), (2880, 2944), (40, 14336)])
def test_bits_repeat(fmt, way, n, k, cp):
    weight, x = gpu_linear.pack_weight(random_weight(fmt, n, k)), cp.asarray(activations(13, k))
    first = gpu_linear.linear(x, weight, **way)
    for _ in range(20):
        again = gpu_linear.linear(x, weight, **way)
        assert (again == first).all()


@pytest.mark.parametrize("fmt", gemv_layout.GEMV_FORMATS)
@pytest.mark.parametrize(("n", "k"), [(1024, 4096), (2880, 2944), (100, 640)])
@pytest.mark.parametrize("programmatic", [False, True])
def test_bits_of_a_row_do_not_depend_on_m(fmt, n, k, programmatic, cp):
    weight = gpu_linear.pack_weight(random_weight(fmt, n, k))
    x = activations(37, k)
    x[5] = encode_bf16(decode(x[5]) * np.float32(2.0**70))  # a row of another range beside them
    x = cp.asarray(x)
    way = {"batch_invariant": True, "programmatic": programmatic}
    whole = gpu_linear.linear(x, weight, **way)
    for start, stop in ((0, 1), (4, 5), (5, 6), (3, 8), (16, 17), (20, 37), (36, 37)):
        part = gpu_linear.linear(x[start:stop], weight, **way)
        assert (part == whole[start:stop]).all(), (start, stop)


# ---------------------------------------------------------------- memory, alignment, errors


@pytest.mark.parametrize("fmt", gemv_layout.GEMV_FORMATS)
@pytest.mark.parametrize("m", [1, 3, 16, 37])
@pytest.mark.parametrize("programmatic", [False, True])
def test_neighbours_stay_untouched(fmt, m, programmatic, cp):
    n, k, guard = 13, 384, 0x7FC1  # a NaN: reading it would spread
    host = random_weight(fmt, n, k)
    weight = gpu_linear.pack_weight(host)
    before = weight.data.copy()
    x = activations(m, k)
    x_wide = cp.full((m + 2, k + 16), guard, cp.uint16)
    x_wide[1:-1, 8:-8] = cp.asarray(x)
    y_wide = cp.full((m + 2, n + 9), guard, cp.uint16)
    x_before = x_wide.copy()
    out = y_wide[1:-1, 4 : 4 + n]
    gpu_linear.linear(x_wide[1:-1, 8:-8], weight, out=out, programmatic=programmatic)
    assert_close(y_wide[1:-1, 4 : 4 + n].get(), x, host)
    y_wide[1:-1, 4 : 4 + n] = guard
    assert (y_wide == guard).all()
    assert (x_wide == x_before).all() and (weight.data == before).all()


def test_the_end_of_a_buffer_is_not_passed(cp):
    """NaN bits stand right behind x."""
    for fmt in gemv_layout.GEMV_FORMATS:
        host, x = random_weight(fmt, 7, 128), activations(2, 128)
        weight = gpu_linear.pack_weight(host)
        buffer = cp.full(x.size + 64, 0x7FC1, cp.uint16)
        view = buffer[: x.size].reshape(x.shape)
        view[...] = cp.asarray(x)
        assert_close(both_ways(view, weight), x, host)


def test_m_zero(cp):
    weight = gpu_linear.pack_weight(random_weight("mxfp4", 40, 384))
    y = gpu_linear.linear(cp.empty((0, 384), cp.uint16), weight)
    assert y.shape == (0, 40) and y.dtype == cp.uint16


@pytest.mark.parametrize(
    ("fmt", "k", "message"),
    [("mxfp4", 2880 - 16, "K=2864 .* scale group 32"), ("int4_g128", 2880, "K=2880 .* scale group 128")],
)  # fmt: skip
def test_a_wrong_k_is_named(fmt, k, message, cp):
    group = FORMATS[fmt].group
    values, scales = (
        cp.zeros((8, k // 2), cp.uint8),
        cp.zeros((8, k // group), FORMATS[fmt].scale_dtype),
    )
    with pytest.raises(ValueError, match=message):
        gpu_linear.pack_weight(values, scales, fmt)
    weight = gpu_linear.pack_weight(random_weight(fmt, 8, 256))
    with pytest.raises(LaunchError, match=rf"x is \[1, {k}\], not \[M, K=256\]"):
        gpu_linear.linear(cp.zeros((1, k), cp.uint16), weight)


def test_a_misaligned_view_is_refused_and_a_misaligned_result_is_not(cp):
    host, x = random_weight("mxfp4", 40, 384), activations(2, 384)
    weight = gpu_linear.pack_weight(host)
    buffer = cp.zeros(2 * 384 + 8, cp.uint16)
    for shift in (1, 4, 7):
        with pytest.raises(LaunchError, match="multiple of 16 bytes"):
            gpu_linear.linear(buffer[shift:][: 2 * 384].reshape(2, 384), weight)
    with pytest.raises(LaunchError, match="rows 772 bytes apart"):
        gpu_linear.linear(cp.zeros((2, 386), cp.uint16)[:, :384], weight)
    out = cp.zeros(2 * 41 + 1, cp.uint16)[1:].reshape(2, 41)[:, :40]
    gpu_linear.linear(cp.asarray(x), weight, out=out)
    assert_close(out.get(), x, host)


# ---------------------------------------------------------------- streams, graphs, devices, time


@pytest.mark.parametrize("programmatic", [False, True])
def test_the_first_call_can_be_captured(programmatic, cp):
    host = random_weight("nvfp4", 200 + programmatic, 1216)  # a shape of this test alone
    weight = gpu_linear.pack_weight(host)
    for m in (1, 3, 16, 20):
        x = activations(m, 1216)
        given, out = cp.asarray(x), cp.zeros((m, host.n), cp.uint16)
        stream = cp.cuda.Stream(non_blocking=True)
        cp.cuda.Device().synchronize()
        pool = cp.get_default_memory_pool()
        held = pool.used_bytes()
        with stream:
            stream.begin_capture(cp.cuda.runtime.streamCaptureModeGlobal)  # forbids all it can
            gpu_linear.linear(given, weight, out=out, programmatic=programmatic)
            graph = stream.end_capture()
        assert pool.used_bytes() == held and not out.any()
        graph.launch(stream)
        stream.synchronize()
        assert_close(out.get(), x, host)


def test_packing_on_one_stream_and_calling_on_another(cp):
    n, k = 8192, 4096
    host, x = random_weight("mxfp4", n, k), activations(4, k)
    here, there = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
    given = cp.asarray(x)
    cp.cuda.Device().synchronize()
    weight = gpu_linear.pack_weight(host, stream=here)
    out = cp.empty((4, n), cp.uint16)
    gpu_linear.linear(given, weight, out=out, stream=there.ptr)
    there.synchronize()
    assert_close(out.get(), x, host)


def test_weights_of_many_shapes_share_an_entry(cp):
    """A small weight after a large one must not take away the shared memory that the large one needs."""
    shapes = ((8192, 4096), (64, 128), (4096, 14336), (40, 384))
    hosts = [random_weight("mxfp4", n, k) for n, k in shapes]
    weights = [gpu_linear.pack_weight(host) for host in hosts]
    for host, weight in zip(hosts, weights, strict=True):
        for m in (1, 16):
            x = activations(m, host.k)
            assert_close(both_ways(cp.asarray(x), weight), x, host)


def chained(cp, weights, given, outs, capture, rounds=1) -> None:
    """Dependent launches, each of which reads what the one in front has just written; `outs` in turn, given first."""
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    if capture:
        stream.begin_capture()
    for _ in range(rounds):
        x = given
        for i, weight in enumerate(weights):
            out = outs[i % len(outs)]
            gpu_linear.linear(x, weight, out=out, stream=stream, programmatic=True)
            x = out
    if capture:
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()


@pytest.mark.parametrize("m", [1, 5, 16, 20])
def test_dependent_launches_are_right_and_have_the_bits_of_a_graph(m, cp):
    """A chain through buffers of its own, through two that layers share, in one round and several, and captured."""
    k = 4096
    hosts = [random_weight(fmt, k, k, seed) for seed, fmt in enumerate(("mxfp4",) * 4 + ("nvfp4",))]
    weights = [gpu_linear.pack_weight(host) for host in hosts]
    given = cp.asarray(activations(m, k))
    results = []
    for capture in (False, True):
        for rounds in (1, 5):
            outs = [cp.full((m, k), 0x7FC1, cp.uint16) for _ in weights]
            chained(cp, weights, given, outs, capture, rounds)
            results.append(np.stack([out.get() for out in outs]))
            shared = [cp.full((m, k), 0x7FC1, cp.uint16) for _ in range(2)]
            chained(cp, weights, given, shared, capture, rounds)
            for i in (-1, -2):
                assert np.array_equal(shared[(len(weights) + i) % 2].get(), results[-1][i])
    assert all(np.array_equal(one, results[0]) for one in results)
    x = given.get()
    for y, host in zip(results[0], hosts, strict=True):  # each layer against what it has read
        assert np.isfinite(decode(y)).all() and y.any()
        assert_close(y, x, host)
        x = y
    # One after the other, without a kernel to overlap with: the same plan, so the same bits.
    x = given
    for weight, y in zip(weights, results[0], strict=True):
        x = gpu_linear.linear(x, weight, programmatic=True)
        cp.cuda.Device().synchronize()
        assert np.array_equal(x.get(), y)


def test_a_dependent_launch_has_a_plan_of_its_own(cp):
    weight = gpu_linear.pack_weight(random_weight("mxfp4", 4096, 4096))
    gpu = device(weight.device)
    for m in (1, 4, 16):
        for programmatic, by_rows in ((False, weight.by_rows), (True, weight.programmatic_by_rows)):
            problem = (4096, 4096, gemv_plan.tokens_for(m), "mxfp4", gpu.sm_count, gpu.smem_per_sm)
            plan = gemv_plan.plan_gemv(*problem, programmatic=programmatic)
            assert by_rows["bf16"][m].plan == by_rows["fp16"][m].plan == plan
            assert plan.early == int(programmatic)


def test_a_new_thread_may_call(cp):
    host, x = random_weight("mxfp4", 40, 384), activations(2, 384)
    weight, given, out = gpu_linear.pack_weight(host), cp.asarray(x), cp.zeros((2, 40), cp.uint16)
    failed = []

    def call(programmatic):
        try:  # without any other use of CUDA in this thread
            gpu_linear.linear(given, weight, out=out, stream=0, programmatic=programmatic)
        except Exception as error:
            failed.append(error)

    for programmatic in (False, True):
        out[...] = 0
        cp.cuda.Device().synchronize()
        thread = threading.Thread(target=call, args=(programmatic,))
        thread.start()
        thread.join()
        cp.cuda.Device().synchronize()
        assert not failed
        assert_close(out.get(), x, host)


def test_threads_share_a_weight(cp):
    host = random_weight("mxfp4", 256, 1024)
    weight = gpu_linear.pack_weight(host)
    x = activations(64, 1024)
    given, out = cp.asarray(x), cp.zeros((64, 256), cp.uint16)
    cp.cuda.Device().synchronize()

    def rows(first):
        stream = cp.cuda.Stream(non_blocking=True)
        for _ in range(50):
            for i in range(first, 64, 4):
                gpu_linear.linear(given[i : i + 1], weight, out=out[i : i + 1], stream=stream)
        stream.synchronize()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(rows, range(4)))
    assert_close(out.get(), x, host)


def test_a_plan_of_ones_own(cp):
    """Another cut of the same problem, through `Launch`, as a search over plans does it."""
    n, k, m = 1000, 4096, 3
    host, x = random_weight("mxfp4", n, k), activations(m, k)
    weight, given, out = gpu_linear.pack_weight(host), cp.asarray(x), cp.zeros((m, n), cp.uint16)
    plan = weight.plan(16)  # of the entry for 16 tokens, where M = 3 has that for 4
    launch = gpu_linear.Launch.from_plan(plan, "mxfp4", n, k, "bf16", device(weight.device))
    launch(weight, given.data.ptr, out.data.ptr, m)
    assert_close(out.get(), x, host)
    with pytest.raises(LaunchError, match="qgemv_mx has no entry qgemv_mx_none"):
        gpu_linear.Launch.from_plan(
            plan, "mxfp4", n, k, "bf16", device(weight.device), entry="qgemv_mx_none"
        )


def every_cut(fmt, n, k, m, gpu):
    """All plans of the search, and of each ring and cluster those with few tiles in a turn and with several walkers."""
    problem = gemv_plan.Problem.of(n, k, m, fmt, gpu.sm_count, gpu.smem_per_sm)
    plans = dict.fromkeys(gemv_plan.candidates(n, k, m, fmt, gpu.sm_count, gpu.smem_per_sm))
    for ring, ranks in ((gemv_plan.ASYNC, 1), (gemv_plan.ASYNC, 2), (gemv_plan.BULK, 1)):
        for warps, walkers, turn, early in itertools.product((1, 3, 4), (1, 2), (1, 2), (0, 1)):
            made = problem.plan(ring, ranks, warps, walkers, most_turn_tiles=turn, early=early)
            plans |= dict.fromkeys([made] if made else [])
    return list(plans)


@pytest.mark.parametrize("fmt", gemv_layout.GEMV_FORMATS)
@pytest.mark.parametrize("m", [1, 2, 3, 8, 13])
@pytest.mark.parametrize(("n", "k"), [(1000, 4096), (6001, 1152)])
@pytest.mark.parametrize("dtype", [np.uint16, np.float16], ids=["bf16", "fp16"])
def test_every_plan_is_right(fmt, n, k, m, dtype, cp):
    """Whichever plan is taken, plain or dependent; the limit of one FP64 product holds all of them."""
    host, x = random_weight(fmt, n, k), activations(m, k)
    x = x if dtype == np.uint16 else decode(x).astype(np.float16)
    activation = "bf16" if dtype == np.uint16 else "fp16"
    weight, given = gpu_linear.pack_weight(host), cp.asarray(x)
    gpu = device(weight.device)
    plans, results = every_cut(fmt, n, k, m, gpu), []
    for plan in plans:
        launch = gpu_linear.Launch.from_plan(plan, fmt, n, k, activation, gpu)
        outs = [cp.full((m, n), 0x7FC1, cp.uint16).view(dtype) for _ in range(2)]  # NaN in either
        for out, programmatic in zip(outs, (False, True), strict=True):
            stream = cp.cuda.get_current_stream().ptr
            addresses = (given.data.ptr, out.data.ptr)
            launch(weight, *addresses, m, stream=stream, programmatic=programmatic)
        results.append(outs[0].get())
        bits = [out.view(cp.uint16) for out in outs]
        assert (bits[0] == bits[1]).all(), plan  # the bits are the plan's, however it is launched
    assert {(p.ring, p.ranks) for p in plans} == {("async", 1), ("async", 2), ("bulk", 1)}
    assert_close(np.stack(results), x, host)


def matrix_plans(fmt, n, k, m, gpu):
    """All that a search has, and a streamed plan of every entry, which it need not have."""
    problem = gemm_plan.Problem.of(n, k, m, fmt, gpu.sm_count, gpu.smem_per_sm)
    streamed = [
        problem.plan(tile, share, streamed=True)
        for tile in gemm_plan.TILES[fmt]
        for share in (1, 2, 4)
    ]
    found = gemm_plan.candidates(n, k, m, fmt, gpu.sm_count, gpu.smem_per_sm)
    return dict.fromkeys((*found, *filter(None, streamed)))


@pytest.mark.parametrize("fmt", gemv_layout.GEMV_FORMATS)
@pytest.mark.parametrize("m", [3, 33, 100, 300])
@pytest.mark.parametrize(("n", "k"), [(1000, 4096), (6001, 1152)])
def test_every_plan_of_the_matrix_kernel_is_right_and_has_its_bits_again(fmt, n, k, m, cp):
    gpu = device(0)
    host = random_weight(fmt, n, k)
    weight = gpu_linear.pack_weight(host)
    bits, bias = activations(m, k), encode_bf16(np.linspace(-3, 3, n).astype(np.float32))
    x, given = cp.asarray(bits), cp.asarray(bias)
    stream = cp.cuda.get_current_stream().ptr
    plans = matrix_plans(fmt, n, k, m, gpu)
    assert any(plan.streamed for plan in plans)
    for plan in plans:
        launch = MatrixLaunch.from_plan(plan, fmt, n, k, "bf16", gpu)
        found = []
        for programmatic in (False, False, True):
            y = cp.full((m, n), 0x7FFF, np.uint16)
            launch(
                weight, int(x.data.ptr), int(y.data.ptr), m, bias=int(given.data.ptr),
                stream=stream, programmatic=programmatic,
            )  # fmt: skip
            found.append(y.get())
        assert np.array_equal(found[0], found[1]), plan
        assert_close(np.stack(found[1:]), bits, host, decode(bias).astype(np.float64))


@pytest.mark.parametrize("m", [17, 64, 300])
def test_the_first_call_of_the_matrix_kernel_can_be_captured(m, cp):
    n, k = 520, 1152
    host = random_weight("mxfp4", n, k)
    weight = gpu_linear.pack_weight(host)
    bits = activations(m, k)
    x, y = cp.asarray(bits), cp.full((m, n), 0x7FFF, np.uint16)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        gpu_linear.linear(x, weight, out=y)
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    assert_close(y.get(), bits, host)


@pytest.mark.parametrize("m", [33, 129])
def test_the_matrix_kernel_writes_its_rows_alone_and_reads_strided_ones(m, cp):
    n, k = 333, 640
    host = random_weight("nvfp4", n, k)
    weight = gpu_linear.pack_weight(host)
    bits = activations(m, k)
    x = cp.full((m, k + 24), 0x7FC0, np.uint16)  # NaN between the rows
    x[:, :k] = cp.asarray(bits)
    frame = cp.full((m + 2, n + 3), 0x1234, np.uint16)
    gpu_linear.linear(x[:, :k], weight, out=frame[1:-1, 1 : n + 1])
    found = frame.get()
    assert_close(found[1:-1, 1 : n + 1], bits, host)
    found[1:-1, 1 : n + 1] = 0x1234
    assert (found == 0x1234).all()


def test_anything_with_dlpack_is_used_where_it_lies(cp):
    class Holder:
        """Neither of CuPy nor of torch."""

        def __init__(self, array):
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    host, x = random_weight("mxfp4", 40, 384), activations(3, 384)
    x = decode(x).astype(np.float16)
    weight = gpu_linear.pack_weight(
        Holder(cp.asarray(host.values)), Holder(cp.asarray(host.scales)), "mxfp4"
    )
    out = cp.zeros((3, 40), cp.float16)
    gpu_linear.linear(Holder(cp.asarray(x)), weight, out=Holder(out))
    assert_close(out.get(), x, host)
    assert_close(gpu_linear.linear(Holder(cp.asarray(x)), weight).get(), x, host)


def test_two_devices(cp):
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two CUDA devices")
    host, x = random_weight("mxfp4", 40, 384), activations(2, 384)
    with cp.cuda.Device(1):
        weight, given = gpu_linear.pack_weight(host), cp.asarray(x)
    assert weight.device == 1 and cp.cuda.runtime.getDevice() == 0
    y = gpu_linear.linear(given, weight, stream=cp.cuda.Stream.null)
    cp.cuda.Device(1).synchronize()
    assert y.device.id == 1
    assert_close(y.get(), x, host)
    with pytest.raises(LaunchError, match="x is on device 0, the weight on device 1"):
        gpu_linear.linear(cp.asarray(x), weight)


@pytest.mark.parametrize("programmatic", [False, True])
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_call_costs_the_host_less_than_ten_microseconds(library, programmatic, cp):
    weight = gpu_linear.pack_weight(random_weight("mxfp4", 128, 256))
    x, out = cp.zeros((1, 256), cp.uint16), cp.empty((1, 128), cp.uint16)
    if library == "torch":
        torch = pytest.importorskip("torch")
        x = torch.zeros((1, 256), dtype=torch.bfloat16, device="cuda")
        out = torch.empty((1, 128), dtype=torch.bfloat16, device="cuda")
    gpu_linear.linear(x, weight, out=out, programmatic=programmatic)
    times = []
    for _ in range(20):
        cp.cuda.Device().synchronize()
        start = time.perf_counter()
        for _ in range(100):  # fewer than a stream queues before the host waits
            gpu_linear.linear(x, weight, out=out, programmatic=programmatic)
        times.append((time.perf_counter() - start) / 100)
    assert np.median(times) < 10e-6, times


# ---------------------------------------------------------------- torch and the page


@pytest.mark.parametrize("fmt", gemv_layout.GEMV_FORMATS)
def test_torch_tensors_are_used_where_they_lie(fmt, cp):
    torch = pytest.importorskip("torch")
    host, bits = random_weight(fmt, 40, 384), activations(3, 384)
    scales = torch.from_dlpack(
        cp.asarray(host.scales.view(np.int16) if fmt == "int4_g128" else host.scales)
    )
    kind = {"mxfp4": "float8_e8m0fnu", "nvfp4": "float8_e4m3fn", "int4_g128": "bfloat16"}[fmt]
    scale = torch.tensor(host.tensor_scale.tolist()) if fmt == "nvfp4" else None
    weight = gpu_linear.pack_weight(
        torch.from_dlpack(cp.asarray(host.values)), scales.view(getattr(torch, kind)), fmt, scale
    )
    x = torch.from_numpy(bits.view(np.int16)).cuda().view(torch.bfloat16)
    out = torch.zeros((3, 40), dtype=torch.bfloat16, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        given = x.clone()  # ordered on the side stream alone
        assert gpu_linear.linear(given, weight, out=out) is out
        made = gpu_linear.linear(given, weight)
    side.synchronize()
    assert made.dtype == torch.bfloat16 and torch.equal(made, out)
    assert_close(out.view(torch.int16).cpu().numpy().view(np.uint16), bits, host)


def test_the_torch_operator_compiles_and_is_captured(cp):
    torch = pytest.importorskip("torch")
    from qgemm_mx import torch_op

    host, bits = random_weight("nvfp4", 40, 384), activations(6, 384)
    bias = torch.linspace(-1, 1, 40, dtype=torch.bfloat16, device="cuda")
    module = torch_op.Linear(gpu_linear.pack_weight(host), bias)
    x = torch.from_numpy(bits.view(np.int16)).cuda().view(torch.bfloat16).reshape(2, 3, 384)
    eager = module(x)
    assert eager.shape == (2, 3, 40)
    y = eager.reshape(6, 40).view(torch.int16).cpu().numpy().view(np.uint16)
    assert_close(y, bits, host, bias.double().cpu().numpy())
    arguments = (
        x.reshape(6, 384), module.data, module.row_scale, bias, "nvfp4", 40, 384, False, 0, True,
    )  # fmt: skip
    torch.library.opcheck(torch_op.linear, arguments, test_utils=("test_schema", "test_faketensor"))
    assert torch.equal(torch.compile(module, fullgraph=True)(x), eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = module(x)
    graph.replay()
    assert torch.equal(captured, eager)


def test_the_example_of_the_page_prints_what_it_says(repository, capsys):
    text = (repository / "README.md").read_text()
    (code,) = re.findall(r"```py\n(.*?)```", text, flags=re.S)
    assert "qgemm_mx.pack_weight(" in code and "qgemm_mx.linear(" in code
    exec(compile(code, "README.md", "exec"), {})
    said = re.findall(r"^print\(.*\)  # (.*)$", code, flags=re.M)
    assert len(said) == code.count("print(") > 0
    assert capsys.readouterr().out.splitlines() == said
