"""Elements, scales and byte counts against ml_dtypes and exact rational arithmetic."""

from __future__ import annotations

import re
import subprocess
import sys
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qgemm_mx import formats

ALL_CODES = np.arange(256, dtype=np.uint8)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal values, equal signs of zero, NaN in the same places."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    nan = np.isnan(a)
    return np.array_equal(nan, np.isnan(b)) and np.array_equal(
        a[~nan].view(np.uint32), b[~nan].view(np.uint32)
    )


def random_bits(count: int) -> np.ndarray:
    """float32 of random bit patterns: every exponent, subnormals, infinities and NaN."""
    bits = np.random.default_rng(1).integers(0, 2**32, count, dtype=np.uint32)
    return bits.view(np.float32)


def with_neighbours(values: np.ndarray) -> np.ndarray:
    """float32 values, and the next one on both sides of each, with both signs."""
    values = np.atleast_1d(np.asarray(values, np.float32))
    with np.errstate(over="ignore"):
        around = [np.nextafter(values, np.float32(towards)) for towards in (0, np.inf)]
    positive = np.concatenate([values, *around])
    return np.concatenate([positive, -positive])


# --- Registry and bytes ---------------------------------------------------------------------------


def test_the_registry_is_closed() -> None:
    assert list(formats.FORMATS) == ["mxfp4", "nvfp4", "int4_g128", "int4_g64"]
    with pytest.raises(TypeError):
        formats.FORMATS["mxfp6"] = formats.FORMATS["mxfp4"]  # type: ignore[index]
    with pytest.raises(ValueError, match="'mxfp6' is not one of mxfp4, nvfp4"):
        formats.get_format("mxfp6")


@pytest.mark.parametrize("name", [["mxfp4"], ["bf16"], {"mxfp4": 1}, None, 4, b"mxfp4"])
def test_a_format_that_is_no_name_is_refused_as_an_unknown_one(name: object) -> None:
    says = re.escape(f"format {name!r} is not one of mxfp4, nvfp4")
    calls = (
        formats.get_format,
        formats.bytes_per_weight,
        lambda name: formats.weight_bytes(name, 8, 128),
        lambda name: formats.require_shape(name, 8, 128),
    )
    for call in calls:
        with pytest.raises(ValueError, match=says):
            call(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bf16", 2.0),
        ("fp8_e4m3", 1.0),
        ("int4_g128", 0.515625),
        ("int4_g64", 0.53125),
        ("mxfp4", 0.53125),
        ("nvfp4", 0.5625),
    ],
)
@pytest.mark.parametrize(("n", "k"), [(1, 128), (2880, 2944), (57344, 8192)])
def test_bytes_per_weight(name: str, value: float, n: int, k: int) -> None:
    assert formats.bytes_per_weight(name) == value
    assert type(formats.weight_bytes(name, n, k)) is int
    assert formats.weight_bytes(name, n, k) == Fraction(value) * n * k


@pytest.mark.parametrize("name", formats.FORMATS)
def test_case_8_a_k_outside_the_groups_is_refused(name: str) -> None:
    group = formats.FORMATS[name].group
    for k in (0, group - 2, 2881, 20 * group + 1):
        with pytest.raises(ValueError, match=f"K={k} is not a multiple of the {name} .*{group}"):
            formats.weight_bytes(name, 8, k)
    with pytest.raises(ValueError, match="N=0 is below 1"):
        formats.weight_bytes(name, 0, group)


@pytest.mark.parametrize("name", [*formats.DENSE_BYTES, *formats.FORMATS])
@pytest.mark.parametrize(
    ("n", "k", "says"),
    [
        (-8, 128, "N=-8"),
        (8, -128, "K=-128"),
        (-8, -128, "N=-8"),
        (0, 128, "N=0"),
        (8, 0, "K=0"),
        (8.0, 128, "N=8.0 is float, not an integer"),
        (8, True, "K=True is bool, not an integer"),
    ],
)
def test_sizes_that_no_weight_has_are_refused(name: str, n: int, k: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        formats.weight_bytes(name, n, k)


@pytest.mark.parametrize("name", [*formats.DENSE_BYTES, *formats.FORMATS])
def test_bytes_do_not_wrap_around_in_numpy_integers(name: str) -> None:
    n = k = 2**17
    found = formats.weight_bytes(name, np.int32(n), np.int32(k))
    assert type(found) is int and found == formats.weight_bytes(name, n, k)


# --- Decode: all codes ----------------------------------------------------------------------------


def test_all_e2m1_codes_decode_as_ml_dtypes_does() -> None:
    codes = np.arange(16, dtype=np.uint8)
    oracle = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert same_bits(formats.E2M1_VALUES, oracle)
    assert formats.E2M1_VALUES[8] == 0 and np.signbit(formats.E2M1_VALUES[8])


def test_all_int4_codes_decode_as_ml_dtypes_does() -> None:
    oracle = np.concatenate([np.arange(8), np.arange(-8, 0)]).astype(ml_dtypes.int4)
    assert same_bits(formats.INT4_VALUES, oracle.astype(np.float32))


def test_all_e8m0_codes_decode_as_ml_dtypes_does() -> None:
    oracle = ALL_CODES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    decoded = formats.decode_scales("mxfp4", ALL_CODES)
    assert same_bits(decoded, oracle)
    # CASES 2 and 3, in so many words.
    assert decoded[0] == np.float32(2.0**-127) and decoded[0] > 0
    assert np.isnan(decoded[255]) and np.isfinite(decoded[:255]).all() and decoded[134] == 128


def test_all_e4m3_codes_decode_as_ml_dtypes_does() -> None:
    oracle = ALL_CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    decoded = formats.decode_scales("nvfp4", ALL_CODES)
    assert same_bits(decoded, oracle)
    assert decoded[1] == 2.0**-9  # CASES 4
    assert np.isnan(decoded[[0x7F, 0xFF]]).all() and not np.isinf(decoded).any()


def test_all_bf16_patterns_decode_as_ml_dtypes_does() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    oracle = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    assert same_bits(formats.decode_scales("int4_g64", bits), oracle)


def test_the_decode_tables_cannot_be_edited() -> None:
    with pytest.raises(ValueError, match="read-only"):
        formats.E8M0_VALUES[0] = 0


# --- Encode ---------------------------------------------------------------------------------------

E2M1_TIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


@pytest.mark.parametrize(
    "x",
    [
        with_neighbours(E2M1_TIES),
        with_neighbours(formats.E2M1_VALUES[:8]),
        with_neighbours([6.5, 7, 8, 1e30, np.finfo(np.float32).max]),
        np.array([np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45], np.float32),
        np.random.default_rng(0).normal(0, 3, 200_000).astype(np.float32),
        random_bits(100_000),
    ],
    ids=["ties", "values", "saturation", "limits", "normal", "bits"],
)
def test_e2m1_encodes_as_ml_dtypes_does(x: np.ndarray) -> None:
    x = x[~np.isnan(x)]
    oracle = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(formats.encode_e2m1(x), oracle)


def test_e2m1_ties_go_to_the_even_code() -> None:
    assert formats.encode_e2m1(E2M1_TIES).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert formats.encode_e2m1(-E2M1_TIES).tolist() == [8, 10, 10, 12, 12, 14, 14]


@given(finite)
def test_e2m1_takes_the_nearest_value(x: float) -> None:
    code = int(formats.encode_e2m1(np.array([x]))[0])
    distance = [abs(abs(Fraction(x)) - Fraction(float(v))) for v in formats.E2M1_VALUES[:8]]
    assert distance[code & 7] == min(distance)
    assert (code >> 3) == np.signbit(x)


@given(finite)
def test_int4_takes_the_nearest_value_in_plus_minus_7(x: float) -> None:
    code = int(formats.encode_int4(np.array([x]))[0])
    assert float(formats.INT4_VALUES[code]) == max(-7, min(7, round(x)))  # Python rounds ties even
    assert code != 8


@pytest.mark.parametrize("encode", [formats.encode_e2m1, formats.encode_int4])
def test_nan_is_refused_with_its_place(encode: object) -> None:
    x = np.zeros((3, 40), np.float32)
    x[2, 17] = np.nan
    with pytest.raises(ValueError, match="row 2, column 17 is nan"):
        encode(x)
    with pytest.raises(ValueError, match=r"index \(57,\) is nan"):
        encode(x.reshape(-1)[40:])


def test_e4m3_encodes_as_ml_dtypes_does() -> None:
    values = np.sort(formats.E4M3_VALUES[:0x7F])
    midpoints = (values[1:] + values[:-1]) / 2
    limits = [448, 464, 465, 480, 1e30, np.inf, np.nan, 2.0**-10, 2.0**-11, 1e-45]
    for x in (with_neighbours(values), with_neighbours(midpoints), with_neighbours(limits)):
        assert_e4m3(x)
    assert_e4m3(random_bits(200_000))
    assert_e4m3(np.random.default_rng(2).uniform(-500, 500, 200_000).astype(np.float32))


def assert_e4m3(x: np.ndarray) -> None:
    with np.errstate(invalid="ignore"):  # signalling NaN
        oracle = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(formats.encode_e4m3(x), oracle)


def test_bf16_encodes_as_ml_dtypes_does() -> None:
    ties = (np.arange(2**16, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    for x in (random_bits(500_000), ties, np.array([3.4e38, np.inf, -np.inf, -0.0], np.float32)):
        with np.errstate(invalid="ignore"):  # signalling NaN
            oracle = x.astype(ml_dtypes.bfloat16).astype(np.float32)
        assert same_bits(formats.decode_bf16(formats.encode_bf16(x)), oracle)
        assert same_bits(formats.round_bf16(x), oracle)


# --- Scale rules ----------------------------------------------------------------------------------


def exact_e8m0(amax: float, rule: str) -> int:
    """The rule in rational arithmetic: no logarithm, no rounding."""
    if amax == 0:
        return 0
    value, power = Fraction(amax), Fraction(2)
    if rule == "ocp_floor":  # the greatest e with 2^(e + 2) <= amax
        e = max(e for e in range(-152, 127) if power ** (e + 2) <= value)
    else:  # the least e with amax <= 6 * 2^e
        e = min(e for e in range(-152, 127) if value <= 6 * power**e)
    return min(max(e + 127, 0), 254)


BOUNDARIES = np.concatenate(
    [
        np.abs(with_neighbours(np.ldexp(np.float32(f), e)))
        for e in (-149, -148, -147, -127, -126, -125, -124, -3, -1, 0, 1, 2, 3, 100, 124)
        for f in (1, 3, 6, 7)
    ]
)


@pytest.mark.parametrize("rule", formats.FORMATS["mxfp4"].scale_rules)
def test_e8m0_rules_match_rational_arithmetic(rule: str) -> None:
    ends = np.array([0, np.finfo(np.float32).max], np.float32)
    amax = np.abs(np.concatenate([BOUNDARIES, random_bits(300), ends]))
    amax = amax[np.isfinite(amax)]
    assert formats.e8m0_scale_codes(amax, rule).tolist() == [
        exact_e8m0(float(a), rule) for a in amax
    ]


def test_e8m0_rules_differ_as_documented() -> None:
    amax = np.array([4, 6, 6.0000005, 7.99, 8], np.float32)
    assert formats.e8m0_scale_codes(amax, "ocp_floor").tolist() == [127, 127, 127, 127, 128]
    assert formats.e8m0_scale_codes(amax, "modelopt_ceil").tolist() == [127, 127, 128, 128, 128]
    with pytest.raises(ValueError, match="'nearest' is not one of ocp_floor, modelopt_ceil"):
        formats.e8m0_scale_codes(amax, "nearest")


@given(hnp.arrays(np.float32, 8, elements=st.floats(0, 1e6, width=32)))
def test_e4m3_scales_follow_modelopt(amax: np.ndarray) -> None:
    tensor_scale = formats.nvfp4_tensor_scale(amax.max())
    codes = formats.e4m3_scale_codes(amax, tensor_scale)
    wanted = np.minimum(amax / (np.float32(6) * tensor_scale), 448)
    oracle = wanted.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(codes[amax > 0], np.maximum(oracle, 1)[amax > 0])
    assert (codes[amax == 0] == 0).all()


def test_nvfp4_tensor_scale() -> None:
    assert formats.nvfp4_tensor_scale(np.float32(2688)) == 1
    assert formats.nvfp4_tensor_scale(np.float32(0)) == np.finfo(np.float32).tiny
    assert formats.nvfp4_tensor_scale(np.float32(1e-45)) == np.finfo(np.float32).tiny
    assert isinstance(formats.nvfp4_tensor_scale(np.float32(1)), np.float32)


# --- The package ----------------------------------------------------------------------------------


def test_import_is_light_and_needs_no_gpu() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); import qgemm_mx; t = time.perf_counter() - t\n"
        "assert t < 0.5, t\n"
        "qgemm_mx.quantize, qgemm_mx.FORMATS, qgemm_mx.PackedWeight\n"
        "assert qgemm_mx.__version__ == '0.1.0'\n"
        "assert not {'cupy', 'cuda', 'pandas', 'ml_dtypes'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_unknown_names_are_refused() -> None:
    import qgemm_mx

    assert set(qgemm_mx.__all__) <= set(dir(qgemm_mx))
    assert all(getattr(qgemm_mx, name) is not None for name in qgemm_mx.__all__)
    with pytest.raises(AttributeError, match="no attribute 'dequantise'"):
        _ = qgemm_mx.dequantise
