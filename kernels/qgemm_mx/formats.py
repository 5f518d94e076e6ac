"""The 4-bit weight formats: elements, group scales, and the bytes they take.

A weight W[N, K] is stored as 4-bit elements along K, one scale per `group` elements, and for
nvfp4 one FP32 tensor scale. Scales are handled as integer codes (uint8, or uint16 for BF16), so
numpy alone is enough. Sources: OCP Microscaling Formats (MX) v1.0, sections 5.3 and 6.3 (e2m1,
e8m0); OCP 8-bit Floating Point (OFP8) v1.0 (e4m3fn).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

E2M1_MAX = 6.0
E4M3_MAX = 448.0
INT4_MAX = 7  # encoded codes are -7..7, so that a weight and its negative encode alike


@dataclass(frozen=True)
class Format:
    """One 4-bit format: what its elements and scales are, and how many share a scale."""

    name: str
    element: Literal["e2m1", "int4"]
    group: int  # elements along K that share one scale
    scale: Literal["e8m0", "e4m3", "bf16"]
    scale_rules: tuple[str, ...]  # what `quantize` accepts; the first is the default
    has_tensor_scale: bool = False

    @property
    def scale_dtype(self) -> np.dtype:
        """Integer dtype that holds one scale code."""
        return np.dtype(np.uint16 if self.scale == "bf16" else np.uint8)

    @property
    def element_values(self) -> np.ndarray:
        """float32 [16], the value of each nibble."""
        return E2M1_VALUES if self.element == "e2m1" else INT4_VALUES


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        f.name: f
        for f in (
            Format("mxfp4", "e2m1", 32, "e8m0", ("ocp_floor", "modelopt_ceil")),
            Format("nvfp4", "e2m1", 16, "e4m3", ("modelopt",), has_tensor_scale=True),
            Format("int4_g128", "int4", 128, "bf16", ("amax_over_7",)),
            Format("int4_g64", "int4", 64, "bf16", ("amax_over_7",)),
        )
    }
)

DENSE_BYTES: Mapping[str, int] = MappingProxyType({"bf16": 2, "fp8_e4m3": 1})


def get_format(name: str) -> Format:
    """The 4-bit format called `name`; ValueError lists the known ones otherwise."""
    if not _is_key(name, FORMATS):
        raise ValueError(f"format {name!r} is not one of {', '.join(FORMATS)}")
    return FORMATS[name]


def _is_key(name: object, table: Mapping[str, object]) -> bool:
    """Whether a name is in a table; a list is not, where `in` alone would raise that it cannot be hashed."""
    return isinstance(name, str) and name in table


def require_integer(name: str, value: object) -> int:
    """`value` as a Python int; ValueError for anything that is no integer, a bool among them."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"{name}={value!r} is {type(value).__name__}, not an integer")


def require_shape(name: str, n: int, k: int) -> Format:
    """The format, after refusing an N < 1 and a K that does not divide into its scale groups."""
    fmt = get_format(name)
    n, k = require_integer("N", n), require_integer("K", k)
    if n < 1:
        raise ValueError(f"N={n} is below 1 ({name})")
    if k < 1 or k % fmt.group:
        raise ValueError(f"K={k} is not a multiple of the {name} scale group {fmt.group}")
    return fmt


# --- Bytes ----------------------------------------------------------------------------------------


def bytes_per_weight(name: str) -> float:
    """Bytes of values and group scales per weight, for the 4-bit and the dense formats."""
    if _is_key(name, DENSE_BYTES):
        return float(DENSE_BYTES[name])
    fmt = get_format(name)
    return 0.5 + fmt.scale_dtype.itemsize / fmt.group


def weight_bytes(name: str, n: int, k: int) -> int:
    """Exact bytes of values and group scales of W[N, K].

    The FP32 tensor scale of nvfp4 (4 bytes a shard) is left out: it is one scalar, not traffic.
    ValueError for sizes below 1 or that are no integers, and a K that does not divide into groups.
    """
    n, k = require_integer("N", n), require_integer("K", k)
    if _is_key(name, DENSE_BYTES):
        if min(n, k) < 1:
            raise ValueError(f"N={n}, K={k}: neither may be below 1 ({name})")
        return DENSE_BYTES[name] * n * k
    fmt = require_shape(name, n, k)
    return n * k // 2 + n * (k // fmt.group) * fmt.scale_dtype.itemsize


# --- Decode ---------------------------------------------------------------------------------------


def _e4m3_values() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(
        exponent == 0,
        np.ldexp(mantissa, -9),  # subnormal: mantissa / 8 * 2^-6
        np.ldexp(8 + mantissa, exponent - 10),
    )
    values = np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)
    values[[0x7F, 0xFF]] = np.nan
    return values


def _e8m0_values() -> np.ndarray:
    # Code 0 is 2^-127, an FP32 subnormal: neither zero nor infinity.
    values = np.ldexp(np.float32(1), np.arange(256) - 127, dtype=np.float32)
    values[255] = np.nan
    return values


def _frozen(values: np.ndarray) -> np.ndarray:
    values = np.ascontiguousarray(values, dtype=np.float32)
    values.flags.writeable = False
    return values


_E2M1_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1_VALUES = _frozen(np.concatenate([_E2M1_MAGNITUDES, -_E2M1_MAGNITUDES]))  # [8] is -0
INT4_VALUES = _frozen(np.concatenate([np.arange(8), np.arange(-8, 0)]))
with np.errstate(over="ignore"):  # code 255 would be 2^128, and is overwritten by NaN
    E8M0_VALUES = _frozen(_e8m0_values())
E4M3_VALUES = _frozen(_e4m3_values())


def decode_bf16(bits: np.ndarray) -> np.ndarray:
    """float32 values of BF16 bit patterns (uint16), same shape. Exact."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def decode_scales(name: str, codes: np.ndarray) -> np.ndarray:
    """float32 values of the scale codes of a format, same shape. Exact; NaN codes give NaN."""
    scale = get_format(name).scale
    if scale == "bf16":
        return decode_bf16(codes)
    return (E8M0_VALUES if scale == "e8m0" else E4M3_VALUES)[codes]


# --- Encode ---------------------------------------------------------------------------------------

# Midpoints between neighbouring magnitudes. A tie goes to the even code, thus upwards (>=) from
# the odd codes 1, 3, 5 and not upwards (>) from 0, 2, 4, 6.
_E2M1_STEPS = (
    (np.greater, 0.25),
    (np.greater_equal, 0.75),
    (np.greater, 1.25),
    (np.greater_equal, 1.75),
    (np.greater, 2.5),
    (np.greater_equal, 3.5),
    (np.greater, 5.0),
)


def e2m1_codes(x: np.ndarray) -> np.ndarray:
    """uint8 codes of float32 x without NaN, same shape: see `encode_e2m1`, which checks.

    Counts the midpoints below |x|: comparisons are exact, where an add-and-round trick would round
    twice, and they vectorise.
    """
    codes = np.signbit(x).view(np.uint8) << 3
    magnitude = np.abs(x)
    passed = np.empty(x.shape, bool)
    for compare, midpoint in _E2M1_STEPS:
        compare(magnitude, np.float32(midpoint), out=passed)
        codes += passed.view(np.uint8)
    return codes


def encode_e2m1(x: np.ndarray) -> np.ndarray:
    """uint8 e2m1 codes (0..15) of float32 x, same shape.

    Rounds to nearest, ties to even; saturates at 6 (infinities too); keeps the sign of zero.
    ValueError names the first NaN.
    """
    x = np.asarray(x, np.float32)
    refuse_where(np.isnan(x), x, "e2m1 has no code for it")
    return e2m1_codes(x)


def int4_codes(x: np.ndarray) -> np.ndarray:
    """uint8 two's complement nibbles of float32 x without NaN, same shape.

    Rounds to nearest, ties to even, and clamps to -7..7; -8 decodes but is never produced. There
    is no negative zero.
    """
    return np.clip(np.rint(x), -INT4_MAX, INT4_MAX).astype(np.int8).view(np.uint8) & 0xF


def encode_int4(x: np.ndarray) -> np.ndarray:
    """uint8 int4 nibbles of float32 x (see `int4_codes`); ValueError names the first NaN."""
    x = np.asarray(x, np.float32)
    refuse_where(np.isnan(x), x, "int4 has no code for it")
    return int4_codes(x)


def encode_e4m3(x: np.ndarray) -> np.ndarray:
    """uint8 e4m3fn codes of float32 x, same shape.

    Rounds to nearest, ties to even, after clamping to +-448 (the format has no infinity; a plain
    cast would make NaN of an overflow). NaN gives 0x7F with the sign of x.
    """
    x = np.asarray(x, np.float32)
    magnitude = np.minimum(np.abs(x), np.float32(E4M3_MAX))
    bits = magnitude.view(np.uint32)
    # Keep three mantissa bits: the carry of the rounding runs into the exponent, as it should.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - np.uint32((127 - 7) << 3)
    subnormal = np.rint(np.where(magnitude < 2.0**-6, magnitude, 0) * np.float32(2.0**9))
    codes = np.where(magnitude < 2.0**-6, subnormal.astype(np.uint32), normal)
    codes = np.where(np.isnan(x), 0x7F, codes).astype(np.uint8)
    return codes | (np.signbit(x).view(np.uint8) << 7)


def encode_bf16(x: np.ndarray) -> np.ndarray:
    """uint16 BF16 bit patterns of float32 x, same shape; nearest, ties to even, NaN stays NaN."""
    x = np.asarray(x, np.float32)
    bits = x.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    # Rounding may carry a NaN's mantissa away, so NaNs are truncated and made quiet instead.
    return np.where(np.isnan(x), (bits >> 16).astype(np.uint16) | np.uint16(0x40), rounded)


def round_bf16(x: np.ndarray) -> np.ndarray:
    """float32 x rounded to the nearest BF16 value (ties to even), as float32."""
    return decode_bf16(encode_bf16(x))


def e8m0_scale_codes(amax: np.ndarray, rule: str) -> np.ndarray:
    """uint8 e8m0 codes (0..254) for the largest magnitudes `amax` of groups, float32 >= 0.

    ocp_floor      floor(log2(amax)) - 2: OCP MX v1.0 section 6.3; magnitudes in (6, 8) x scale
                   saturate.
    modelopt_ceil  ceil(log2(amax / 6)): the least power of two that does not saturate.

    Exponents are read with frexp, never through a rounded log2. A zero group gets code 0.
    """
    fraction, exponent = np.frexp(amax)  # amax = fraction * 2^exponent, fraction in [0.5, 1)
    if rule == "ocp_floor":
        unbiased = exponent - 1 - 2
    elif rule == "modelopt_ceil":
        # amax <= 6 * 2^e  <=>  fraction * 2^exponent <= 0.75 * 2^(e + 3)
        unbiased = exponent - 3 + (fraction > 0.75)
    else:
        raise ValueError(f"scale rule {rule!r} is not one of ocp_floor, modelopt_ceil (mxfp4)")
    return np.where(amax == 0, 0, np.clip(unbiased + 127, 0, 254)).astype(np.uint8)


def e4m3_scale_codes(amax: np.ndarray, tensor_scale: np.float32) -> np.ndarray:
    """uint8 e4m3 codes for the largest magnitudes `amax` of groups, float32 >= 0.

    amax / (6 * tensor_scale) in FP32, clamped to 448, nearest, ties to even (modelopt,
    NVFP4QTensor.get_weights_scaling_factor). Two groups differ from modelopt, which leaves them
    degenerate: a zero group gets code 0 (modelopt 1.0; both decode to zero), and a non-zero group
    whose scale would round to zero gets code 1, 2^-9 (modelopt 0, and then divides by it).
    """
    codes = encode_e4m3(amax / (np.float32(E2M1_MAX) * tensor_scale))
    return np.where(amax == 0, 0, np.maximum(codes, 1)).astype(np.uint8)


def nvfp4_tensor_scale(amax: np.float32) -> np.float32:
    """FP32 tensor scale of a weight whose largest magnitude is `amax`: amax / (448 * 6).

    Never below the least normal FP32, 2^-126, so that a zero or tiny weight divides safely.
    """
    return max(np.float32(amax) / np.float32(E4M3_MAX * E2M1_MAX), np.finfo(np.float32).tiny)


def refuse_where(bad: np.ndarray, x: np.ndarray, why: str, first_row: int = 0) -> None:
    """ValueError that names the first element where `bad` holds; rows count from `first_row`."""
    if not bad.any():
        return
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    value = x[index]
    if x.ndim == 2:
        place = f"row {first_row + index[0]}, column {index[1]}"
    else:
        place = f"index {index}"
    raise ValueError(f"weight at {place} is {value}: {why}")
