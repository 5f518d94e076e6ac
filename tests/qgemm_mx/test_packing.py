"""Packing, quantisation, dequantisation and the float64 oracle."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qgemm_mx import formats, packing
from qgemm_mx.formats import FORMATS
from qgemm_mx.packing import (
    PackedWeight,
    concatenate,
    dequantize,
    pack_nibbles,
    quantize,
    reference_matmul,
    unpack_nibbles,
)

RULES = [(name, rule) for name, f in FORMATS.items() for rule in f.scale_rules]
SHAPES = [(1, 1), (7, 1), (3, 5), (33, 2)]  # N, groups along K


def realistic(n: int, k: int, seed: int = 0) -> np.ndarray:
    """float32 [N, K]: normal, with row scales that differ by orders of magnitude, and both zeros."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(0, 1, (n, k)) * np.exp2(rng.integers(-12, 4, (n, 1)))
    weight[rng.random((n, k)) < 0.02] = 0.0
    weight[rng.random((n, k)) < 0.02] = -0.0
    return weight.astype(np.float32)


def ones(format: str, n: int, k: int, code: int, byte: int = 0x22) -> PackedWeight:
    """All elements e2m1 1.0 (int4 2) or the nibbles of `byte`, all scales `code`, tensor scale 1."""
    fmt = FORMATS[format]
    values = np.full((n, k // 2), byte, np.uint8)
    scales = np.full((n, k // fmt.group), code, fmt.scale_dtype)
    return PackedWeight(format, n, k, values, scales, np.ones(1))


# --- A second quantiser, one element at a time ----------------------------------------------------


def naive_quantize(
    weight: np.ndarray, format: str, rule: str
) -> tuple[np.ndarray, np.ndarray, float]:
    """codes [N, K], scales [N, K/group] and tensor scale, by Python loops over exact fractions."""
    fmt, f32 = FORMATS[format], np.float32
    tensor_scale = f32(1)
    if format == "nvfp4":
        tensor_scale = max(f32(np.abs(weight).max()) / f32(2688), f32(2.0**-126))
    n, k = weight.shape
    codes, scales = np.zeros((n, k), int), np.zeros((n, k // fmt.group), int)
    for row in range(n):
        for block in range(k // fmt.group):
            columns = range(block * fmt.group, (block + 1) * fmt.group)
            amax = max(abs(weight[row, c]) for c in columns)
            scales[row, block], scale = naive_scale(amax, format, rule, tensor_scale)
            for c in columns:
                codes[row, c] = naive_code(weight[row, c], scale * tensor_scale, fmt.element)
    return codes, scales, tensor_scale


def naive_scale(
    amax: np.float32, format: str, rule: str, tensor_scale: np.float32
) -> tuple[int, np.float32]:
    f32 = np.float32
    if amax == 0:
        return 0, f32(0)
    if format == "mxfp4":
        candidates = range(-160, 128)
        if rule == "ocp_floor":
            e = max(e for e in candidates if Fraction(2) ** (e + 2) <= Fraction(float(amax)))
        else:
            e = min(e for e in candidates if Fraction(float(amax)) <= 6 * Fraction(2) ** e)
        code = min(max(e + 127, 0), 254)
        return code, f32(2.0 ** (code - 127))
    if format == "nvfp4":
        scale = np.minimum(amax / (f32(6) * tensor_scale), f32(448))
        scale = max(scale.astype(ml_dtypes.float8_e4m3fn), ml_dtypes.float8_e4m3fn(2.0**-9))
        return int(scale.view(np.uint8)), f32(scale)
    scale = (amax / f32(7)).astype(ml_dtypes.bfloat16)
    return int(scale.view(np.uint16)), f32(scale)


def naive_code(w: np.float32, divisor: np.float32, element: str) -> int:
    quotient = np.float32(0) if divisor == 0 else w / divisor
    if element == "int4":
        return max(-7, min(7, round(Fraction(float(quotient))))) & 0xF
    magnitude = abs(Fraction(float(quotient)))
    values = [Fraction(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
    code = min(range(8), key=lambda c: (abs(magnitude - values[c]), c % 2))
    return code | (8 if np.signbit(w) else 0)


@pytest.mark.parametrize(("format", "rule"), RULES)
@pytest.mark.parametrize(("n", "groups"), SHAPES)
def test_quantize_equals_the_naive_quantiser_bit_for_bit(
    format: str, rule: str, n: int, groups: int
) -> None:
    weight = realistic(n, groups * FORMATS[format].group, seed=n)
    packed = quantize(weight, format, rule)
    codes, scales, tensor_scale = naive_quantize(weight, format, rule)
    assert np.array_equal(unpack_nibbles(packed.values), codes)
    assert np.array_equal(packed.scales, scales)
    assert packed.tensor_scale == tensor_scale


@pytest.mark.parametrize(("format", "rule"), RULES)
@pytest.mark.parametrize("power", [-149, -140, -127, -120, -60, 60, 125])
def test_quantize_equals_the_naive_quantiser_at_the_ends_of_float32(
    format: str, rule: str, power: int
) -> None:
    k = 2 * FORMATS[format].group
    weight = np.random.default_rng(3).uniform(-7.9, 7.9, (3, k)) * 2.0**power
    weight[1, : k // 2] = 0
    weight[2] *= 2.0**-20
    weight = weight.astype(np.float32)
    packed = quantize(weight, format, rule)
    codes, scales, tensor_scale = naive_quantize(weight, format, rule)
    assert np.array_equal(packed.scales, scales)
    assert packed.tensor_scale == tensor_scale
    assert np.array_equal(unpack_nibbles(packed.values), codes)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(RULES), st.data())
def test_quantize_equals_the_naive_quantiser_on_any_bits(case: tuple[str, str], data) -> None:
    group = FORMATS[case[0]].group
    elements = st.floats(-(2.0**127), 2.0**127, width=32)
    weight = data.draw(hnp.arrays(np.float32, (1, group), elements=elements))
    packed = quantize(weight, *case)
    codes, scales, _ = naive_quantize(weight, *case)
    assert np.array_equal(packed.scales, scales)
    assert np.array_equal(unpack_nibbles(packed.values), codes)


# --- Nibbles --------------------------------------------------------------------------------------


def test_the_low_nibble_is_the_even_index() -> None:
    assert pack_nibbles(np.array([0x1, 0xF, 0x8, 0x0], np.uint8)).tolist() == [0xF1, 0x08]
    assert unpack_nibbles(np.array([0xF1, 0x08], np.uint8)).tolist() == [0x1, 0xF, 0x8, 0x0]
    with pytest.raises(ValueError, match="K=3 is odd"):
        pack_nibbles(np.zeros((2, 3), np.uint8))


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (np.array([[0, 1], [16, 2]], np.uint8), "code 16 is above 15"),
        (np.array([0, 255], np.uint8), "code 255 is above 15"),
        (np.array([0, -1], np.int8), "codes are int8, not uint8"),
        (np.array([256, 1]), "codes are int64, not uint8"),
        (np.array([0.9, 1.0]), "codes are float64, not uint8"),
    ],
)
def test_what_does_not_fit_in_a_nibble_is_refused(codes: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_nibbles(codes)


@given(hnp.arrays(np.uint8, st.tuples(st.integers(0, 4), st.integers(1, 9))))
def test_nibbles_round_trip(values: np.ndarray) -> None:
    assert np.array_equal(pack_nibbles(unpack_nibbles(values)), values)


# --- Quantise and dequantise ----------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_a_format_holds_survives_the_round_trip(format: str, data) -> None:
    """dequantize(quantize(w)) == w for a w whose groups reach the largest magnitude."""
    fmt = FORMATS[format]
    shape = (data.draw(st.integers(1, 5)), 2 * fmt.group)
    legal = [c for c in range(16) if c != 8 or fmt.element == "e2m1"]
    codes = data.draw(hnp.arrays(np.uint8, shape, elements=st.sampled_from(legal)))
    codes[:, :: fmt.group] = 7
    scales = {"e8m0": 120, "e4m3": 0x7E, "bf16": 0x3F80}[fmt.scale]
    packed = PackedWeight(
        format,
        *shape,
        pack_nibbles(codes),
        np.full((shape[0], 2), scales, fmt.scale_dtype),
        np.ones(1),
    )
    again = quantize(dequantize(packed), format)
    assert np.array_equal(again.values, packed.values)
    assert np.array_equal(again.scales, packed.scales)
    assert again.tensor_scale == packed.tensor_scale


@pytest.mark.parametrize(("format", "rule"), RULES)
@pytest.mark.parametrize(("n", "k"), [(1, 2944), (2880, 128), (7, 2688)])
def test_rounding_stays_within_half_a_step(format: str, rule: str, n: int, k: int) -> None:
    """|w - decoded| stays within half the widest gap (2 for e2m1, 1 for int4), or the cut, scaled.

    ocp_floor cuts [6, 8) to 6; a bf16 scale is at most 2^-9 too small, which cuts 7 by 0.03.
    """
    weight = realistic(n, k)
    packed = quantize(weight, format, rule)
    group = packed.spec.group
    step = formats.decode_scales(format, packed.scales) * packed.tensor_scale[0]
    if format == "nvfp4":
        # A scale code c below 8 is subnormal and up to half a code too small: 6 * 0.5 / c is cut.
        half = np.maximum(1.0, 3.0 / np.maximum(packed.scales, 1))
    else:
        half = {"ocp_floor": 2.0, "modelopt_ceil": 1.0, "amax_over_7": 0.55}[rule]
    error = np.abs(weight - dequantize(packed)).reshape(n, -1, group)
    assert (error <= (half * step * (1 + 1e-6))[..., None]).all()


@pytest.mark.parametrize("format", FORMATS)
def test_threads_do_not_change_a_bit(format: str) -> None:
    weight = realistic(300, 4096)  # several chunks
    one, many = quantize(weight, format, threads=1), quantize(weight, format, threads=5)
    assert np.array_equal(one.values, many.values) and np.array_equal(one.scales, many.scales)
    assert np.array_equal(one.tensor_scale, many.tensor_scale)
    assert np.array_equal(dequantize(one, threads=1), dequantize(one, threads=5))


@pytest.mark.parametrize("format", FORMATS)
def test_a_view_quantises_as_its_copy(format: str) -> None:
    weight = realistic(40, 1024)
    view = weight[::3, 256:768]
    a, b = quantize(view, format), quantize(view.copy(), format)
    assert np.array_equal(a.values, b.values) and np.array_equal(a.scales, b.scales)


@pytest.mark.parametrize("format", FORMATS)
def test_decoding_follows_ml_dtypes(format: str) -> None:
    """Random codes of all kinds, decoded element by element by another library."""
    fmt, rng = FORMATS[format], np.random.default_rng(5)
    n, k = 9, 3 * fmt.group
    values = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = rng.integers(0, 2 ** (8 * fmt.scale_dtype.itemsize), (n, 3)).astype(fmt.scale_dtype)
    tensor_scale = np.array([0.0123], np.float32) if fmt.has_tensor_scale else None
    packed = PackedWeight(format, n, k, values, scales, tensor_scale)

    nibbles = np.stack([values & 15, values >> 4], -1).reshape(n, k)
    if fmt.element == "e2m1":
        elements = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    else:
        elements = np.where(nibbles > 7, nibbles.astype(np.float32) - 16, nibbles)
    scale_type = {
        "e8m0": ml_dtypes.float8_e8m0fnu, "e4m3": ml_dtypes.float8_e4m3fn, "bf16": ml_dtypes.bfloat16
    }[fmt.scale]  # fmt: skip
    with np.errstate(over="ignore", invalid="ignore"):
        oracle = elements * np.repeat(scales.view(scale_type).astype(np.float32), fmt.group, axis=1)
        oracle = (oracle * packed.tensor_scale[0]).astype(np.float32)
    decoded = dequantize(packed)
    assert np.array_equal(decoded, oracle, equal_nan=True)
    number = ~np.isnan(oracle)
    assert np.array_equal(np.signbit(decoded[number]), np.signbit(oracle[number]))


# --- The cases ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_case_2_e8m0_code_0_is_a_subnormal(dtype: type) -> None:
    packed = ones("mxfp4", 2, 64, code=0, byte=0x91)  # +0.5 at even K, -0.5 at odd K
    decoded = dequantize(packed, dtype)
    assert (decoded[:, 0::2] == 2.0**-128).all() and (decoded[:, 1::2] == -(2.0**-128)).all()
    assert (reference_matmul(np.eye(1, 64), packed) == 2.0**-128).all()


@pytest.mark.parametrize(("format", "code"), [("mxfp4", 255), ("nvfp4", 0x7F), ("nvfp4", 0xFF)])
def test_case_3_a_nan_scale_makes_exactly_its_block_nan(format: str, code: int) -> None:
    group = FORMATS[format].group
    packed = ones(format, 5, 4 * group, code=0x38)
    scales = packed.scales.copy()
    scales[3, 2] = code
    packed = dataclasses.replace(packed, scales=scales)
    nan = np.zeros((5, 4 * group), bool)
    nan[3, 2 * group : 3 * group] = True
    for decoded in (dequantize(packed), dequantize(packed, np.float64)):
        assert np.array_equal(np.isnan(decoded), nan) and np.isfinite(decoded[~nan]).all()
    y = reference_matmul(np.ones((2, 4 * group)), packed)
    assert np.isnan(y[:, 3]).all() and np.isfinite(np.delete(y, 3, axis=1)).all()
    # Even where x is zero: NaN times zero is NaN.
    assert np.isnan(reference_matmul(np.zeros((1, 4 * group)), packed)[0, 3])


def test_case_3_code_134_is_128() -> None:
    assert (dequantize(ones("mxfp4", 1, 32, code=134)) == 128).all()


def test_case_4_e4m3_subnormals() -> None:
    for code in range(8):
        assert (dequantize(ones("nvfp4", 1, 16, code=code)) == code * 2.0**-9).all()


def test_case_5_the_tensor_scale_is_applied_in_fp32() -> None:
    packed = ones("nvfp4", 1, 32, code=0x01)
    packed = dataclasses.replace(packed, tensor_scale=np.array([3 * 2.0**-40], np.float32))
    assert (dequantize(packed) == np.float32(3 * 2.0**-49)).all()  # FP16 would have underflowed
    # element * scale is exact, the tensor scale is the one rounding.
    tensor_scale = np.float32(1 / 3)
    packed = dataclasses.replace(
        ones("nvfp4", 1, 32, code=0x7D, byte=0x55),  # 3 * 416 is exact
        tensor_scale=np.array([tensor_scale]),
    )
    assert (dequantize(packed) == np.float32(3 * 416) * tensor_scale).all()
    assert (dequantize(packed, np.float64) == 3.0 * 416.0 * float(tensor_scale)).all()


@pytest.mark.parametrize("format", FORMATS)
def test_case_7_shards_keep_their_tensor_scales(format: str) -> None:
    k = FORMATS[format].group * 2
    parts = [realistic(n, k, seed=n) * np.float32(s) for n, s in ((3, 1), (5, 64), (1, 2.0**-9))]
    shards = [quantize(part, format) for part in parts]
    fused = concatenate(shards)
    assert fused.shard_rows == (3, 5, 1) and fused.n == 9
    assert np.array_equal(fused.tensor_scale, np.concatenate([s.tensor_scale for s in shards]))
    assert np.array_equal(dequantize(fused), np.concatenate([dequantize(s) for s in shards]))
    x = np.random.default_rng(0).normal(size=(4, k))
    y = np.concatenate([reference_matmul(x, s) for s in shards], axis=1)
    assert np.allclose(reference_matmul(x, fused), y, rtol=1e-13, atol=0)
    if format == "nvfp4":
        assert len(set(fused.tensor_scale.tolist())) == 3
        merged = dataclasses.replace(fused, tensor_scale=np.full(3, fused.tensor_scale.max()))
        assert not np.array_equal(dequantize(merged), dequantize(fused))
    again = concatenate([fused, shards[0]])
    assert again.shard_rows == (3, 5, 1, 3)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("k", [2881, 30, 2880 + 8])
def test_case_8_a_k_outside_the_groups_names_itself(format: str, k: int) -> None:
    group = FORMATS[format].group
    with pytest.raises(
        ValueError, match=f"K={k} is not a multiple of the {format} .*group {group}"
    ):
        quantize(np.zeros((4, k), np.float32), format)


@pytest.mark.parametrize(("format", "rule"), [r for r in RULES if "int4" not in r[0]])
def test_case_13_negative_zero_is_kept(format: str, rule: str) -> None:
    weight = np.zeros((2, 64), np.float32)
    weight[0, 1::3] = -0.0
    weight[1] = realistic(1, 64)
    weight[1, 5] = -0.0
    weight[1, 6] = -1e-30  # rounds to zero, with its sign
    decoded = dequantize(quantize(weight, format, rule))
    assert np.array_equal(np.signbit(decoded), np.signbit(weight))
    assert decoded[1, 6] == 0


def test_int4_has_no_negative_zero() -> None:
    decoded = dequantize(quantize(np.full((1, 64), -0.0, np.float32), "int4_g64"))
    assert not np.signbit(decoded).any()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_case_13_x_reaches_its_row_and_no_other(format: str, value: float) -> None:
    k = 2 * FORMATS[format].group
    packed = quantize(realistic(11, k), format)
    x = np.random.default_rng(0).normal(size=(3, k))
    clean = reference_matmul(x, packed)
    x[1, k - 1] = value
    y = reference_matmul(x, packed)
    assert np.array_equal(np.delete(y, 1, axis=0), np.delete(clean, 1, axis=0))
    column = dequantize(packed)[:, k - 1].astype(np.float64)
    with np.errstate(invalid="ignore"):
        row = value * column
    assert np.array_equal(y[1], row, equal_nan=True)


@pytest.mark.parametrize("format", FORMATS)
def test_weights_must_be_finite(format: str) -> None:
    for value in (np.nan, np.inf, -np.inf):
        weight = realistic(700, 1024)
        weight[650, 77] = value  # beyond the first chunk
        with pytest.raises(ValueError, match=f"row 650, column 77 is {value}"):
            quantize(weight, format, threads=1)


# --- The oracle -----------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("m", [0, 1, 3, 33])
def test_reference_matmul_is_the_product(format: str, m: int) -> None:
    packed = quantize(realistic(65, 2 * FORMATS[format].group), format)
    x = np.random.default_rng(m).normal(size=(m, packed.k)).astype(np.float32)
    y = reference_matmul(x, packed)
    oracle = np.einsum("mk,nk->mn", x.astype(np.float64), dequantize(packed, np.float64))
    assert y.shape == (m, 65) and y.dtype == np.float64
    assert np.allclose(y, oracle, rtol=1e-12, atol=1e-12)


def test_reference_matmul_over_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = quantize(realistic(37, 256), "nvfp4")
    x = np.random.default_rng(0).integers(-8, 8, (3, 256))
    whole = reference_matmul(x, packed)
    monkeypatch.setattr(packing, "_CHUNK_ELEMENTS", 512)
    assert np.array_equal(reference_matmul(x, packed), whole)
    with pytest.raises(ValueError, match=r"x is \[3, 255\], not \[M, K=256\]"):
        reference_matmul(x[:, 1:], packed)


# --- PackedWeight ---------------------------------------------------------------------------------


def test_sizes_and_row_scales() -> None:
    for format, fmt in FORMATS.items():
        packed = ones(format, 6, 2 * fmt.group, code=1)
        assert packed.nbytes == formats.weight_bytes(format, 6, 2 * fmt.group)
        assert packed.shard_rows == (6,) and packed.tensor_scale.tolist() == [1]
    scales = np.array([2, 3], np.float32)
    packed = ones("nvfp4", 3, 16, code=1)
    packed = dataclasses.replace(packed, tensor_scale=scales, shard_rows=(1, 2))
    assert packed.row_tensor_scale.tolist() == [2, 3, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "fp4"}, "'fp4' is not one of"),
        ({"k": 2881}, "K=2881 is not a multiple of the nvfp4 scale group 16"),
        ({"n": 0}, "N=0 is below 1"),
        ({"n": 4.0}, "N=4.0 is float, not an integer"),
        ({"n": True}, "N=True is bool, not an integer"),
        ({"k": "32"}, "K='32' is str, not an integer"),
        ({"shard_rows": (2.5, 1.5)}, "shard_rows=2.5 is float, not an integer"),
        ({"tensor_scale": None}, r"tensor_scale is missing: nvfp4 needs one per shard \(4,\)"),
        ({"values": np.ma.masked_all((4, 16), np.uint8)}, "values is a masked array"),
        (
            {"values": np.zeros((4, 17), np.uint8)},
            r"values is uint8 \[4, 17\], not uint8 \[4, 16\]",
        ),
        ({"values": np.zeros((4, 16), np.int8)}, "values is int8"),
        ({"scales": np.zeros((4, 1), np.uint8)}, r"scales is uint8 \[4, 1\], not uint8 \[4, 2\]"),
        ({"scales": np.zeros((4, 2), np.uint16)}, "scales is uint16"),
        ({"tensor_scale": np.zeros(1)}, "is not positive and finite"),
        ({"tensor_scale": np.array([np.nan])}, "is not positive and finite"),
        ({"tensor_scale": np.array([-1.0])}, "is not positive and finite"),
        ({"tensor_scale": np.ones(2)}, "not one per shard"),
        ({"shard_rows": (1, 2)}, "do not sum to N=4"),
        ({"shard_rows": (4, 0)}, "each at least 1"),
        ({"shard_rows": ()}, "do not sum to N=4"),
    ],
)
def test_impossible_weights_are_refused(change: dict, message: str) -> None:
    good = ones("nvfp4", 4, 32, code=1)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(good, **change)


def test_sizes_are_python_integers_whatever_integers_came() -> None:
    packed = dataclasses.replace(
        ones("mxfp4", 4, 32, code=1),
        n=np.int32(4),
        k=np.int64(32),
        tensor_scale=None,
        shard_rows=np.array([1, 3]),
    )
    assert [type(v) for v in (packed.n, packed.k, *packed.shard_rows)] == [int] * 4


@pytest.mark.parametrize("name", ["values", "scales", "tensor_scale"])
def test_nobody_can_change_a_weight(name: str) -> None:
    good = ones("nvfp4", 4, 32, code=1)
    mine = np.array(getattr(good, name))
    before = mine.copy()
    view = mine[...]
    view.flags.writeable = False  # a window through which nobody writes, on memory that I do write
    for array in (mine, view):
        packed = dataclasses.replace(good, **{name: array})
        mine[...] = 3
        assert np.array_equal(getattr(packed, name), before)
        mine[...] = before
        with pytest.raises(ValueError, match="read-only"):
            getattr(packed, name)[0] = 0


def test_what_nobody_can_write_to_is_not_copied() -> None:
    packed = quantize(realistic(4, 32), "nvfp4")
    again = dataclasses.replace(packed, tensor_scale=np.ones(1))
    assert again.values is packed.values and again.scales is packed.scales
    for joined in (packed, concatenate([packed, packed])):
        assert joined.values.base is None and not joined.values.flags.writeable
    stored = packed.values.tobytes()
    shared = dataclasses.replace(
        packed, values=np.frombuffer(stored, np.uint8).reshape(packed.values.shape)
    )
    assert np.shares_memory(shared.values, np.frombuffer(stored, np.uint8))
    held = dataclasses.replace(
        packed, values=np.frombuffer(bytearray(stored), np.uint8).reshape(packed.values.shape)
    )
    assert held.values.base is None, "a bytearray can change: it is copied"


def test_only_nvfp4_has_a_tensor_scale() -> None:
    with pytest.raises(ValueError, match="mxfp4 has no tensor scale"):
        dataclasses.replace(ones("mxfp4", 1, 32, code=127), tensor_scale=np.array([2.0]))


def test_arguments_are_checked() -> None:
    weight = realistic(2, 128)
    with pytest.raises(ValueError, match=r"weight is float64 \[2, 128\], not float32"):
        quantize(weight.astype(np.float64), "mxfp4")
    with pytest.raises(ValueError, match="not float32"):
        quantize(weight[0], "mxfp4")
    with pytest.raises(ValueError, match="'modelopt' is not one of ocp_floor, modelopt_ceil"):
        quantize(weight, "mxfp4", "modelopt")
    with pytest.raises(ValueError, match="weight is a masked array: fill it first"):
        quantize(np.ma.masked_greater(weight, 0), "mxfp4")
    for format in ("mxfp4", "nvfp4"):
        for threads in (0, -1):
            with pytest.raises(ValueError, match=f"threads={threads} is below 1"):
                quantize(weight, format, threads=threads)
            with pytest.raises(ValueError, match=f"threads={threads} is below 1"):
                dequantize(quantize(weight, format), threads=threads)
    with pytest.raises(ValueError, match="threads=1.5 is float, not an integer"):
        quantize(weight, "mxfp4", threads=1.5)
    with pytest.raises(ValueError, match="float16 is neither float32 nor float64"):
        dequantize(quantize(weight, "mxfp4"), np.float16)
    with pytest.raises(ValueError, match="at least one shard"):
        concatenate([])
    with pytest.raises(ValueError, match="shard 1 is nvfp4 with K=128, shard 0 is mxfp4"):
        concatenate([quantize(weight, "mxfp4"), quantize(weight, "nvfp4")])
