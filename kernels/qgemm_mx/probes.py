"""Structured probes: problems y = x W^T whose exact result is known and fits FP32.

Random data hide index errors behind tolerances. A probe is built so that every product and every
partial sum, in any order, is exact in FP32; a kernel's output must then equal the exact result
(rounded once, if the output is BF16), and one wrong nibble or scale shows. What each one claims:

one_hot             each x row is a unit vector: every output is one decoded weight
ramp                all 16 codes along K, dense x: a moved nibble, row or tile
prime_block_scales  all weights are scales, following primes: a moved or wrong scale
shard_scales        a tensor scale per shard (nvfp4): merged or dropped tensor scales
special(...)        the codes and values that other kernels decoded wrong
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from . import formats
from .formats import require_shape
from .packing import PackedWeight, pack_nibbles, reference_matmul

# Not a power of two, so that dropping, repeating or folding it into a scale changes bits.
TENSOR_SCALE = 3 * 2.0**-6
# FP32 holds every integer up to here.
FP32_UNITS = 2**24
_PRIMES = np.array([p for p in range(3, 114) if all(p % d for d in range(2, p))])  # 29 of them


@dataclass(frozen=True, eq=False)
class Probe:
    """A problem with its exact result.

    weight  the packed W[N, K]
    x       float32 [M, K], every value exactly a BF16
    y       float64 [M, N], exact; NaN and infinities where IEEE arithmetic puts them
    """

    name: str
    weight: PackedWeight
    x: np.ndarray
    y: np.ndarray

    def __str__(self) -> str:
        w = self.weight
        return f"{self.name} ({w.format}, N={w.n}, K={w.k}, M={len(self.x)})"


@dataclass(frozen=True)
class CheckResult:
    """Outcome of a check: `measured` outputs differ from the exact result, at most `limit` may."""

    name: str
    passed: bool
    measured: float
    limit: float
    detail: str


def check(
    probe: Probe, y: np.ndarray, output: Literal["float32", "bfloat16"] = "float32"
) -> CheckResult:
    """Compare a kernel's y [M, N] with the exact result, rounded once to the output type.

    Values must be equal and NaN must stand exactly where the exact result has NaN. Zeros of
    either sign are equal: a sum that starts at +0 loses the sign of a -0 product, rightly.
    ValueError if y has another shape.
    """
    y = np.asarray(y).astype(np.float64)
    if y.shape != probe.y.shape:
        raise ValueError(f"{probe}: y is {list(y.shape)}, not {list(probe.y.shape)}")
    exact = probe.y.astype(np.float32)
    if output == "bfloat16":
        exact = formats.round_bf16(exact)
    elif output != "float32":
        raise ValueError(f"output {output!r} is not one of float32, bfloat16")
    differs = ~((y == exact) | (np.isnan(y) & np.isnan(exact)))
    count = int(differs.sum())
    detail = f"{probe}: all {y.size} outputs exact"
    if count:
        m, n = (int(i) for i in np.argwhere(differs)[0])
        detail = (
            f"{probe}: {count} of {y.size} outputs differ, the first at m={m}, n={n}:"
            f" {y[m, n]:.9g} instead of {exact[m, n]:.9g}"
        )
    return CheckResult(probe.name, count == 0, float(count), 0.0, detail)


def probes_for(format: str, n: int, k: int, m: int) -> Iterator[Probe]:
    """Every probe of a problem, the general ones first, built one at a time."""
    yield one_hot(format, n, k, m)
    yield ramp(format, n, k, m)
    yield prime_block_scales(format, n, k, m)
    if formats.get_format(format).has_tensor_scale and n > 1:
        yield shard_scales(format, n, k, m)
    yield from special(format, n, k, m)


# --- General probes -------------------------------------------------------------------------------


def one_hot(format: str, n: int, k: int, m: int, offset: int = 0) -> Probe:
    """Row i of x is the unit vector of `one_hot_columns(...)[(offset + i) % K]`.

    y is columns of W, whose codes and scales are pseudo-random functions of their indices, so a
    read from anywhere else shows. M columns are covered; step `offset` by M to cover all K.
    """
    fmt = require_shape(format, n, k)
    codes = _codes(n, k, lambda row, col: _hash(row, col) >> 28)
    bits = _hash(np.arange(n)[:, None], np.arange(k // fmt.group)[None, :] + k)
    if fmt.scale == "e8m0":
        scales = 119 + (bits >> 28)  # 2^-8 .. 2^7
    elif fmt.scale == "e4m3":
        scales = 1 + (bits >> 8) % 126  # every positive code, subnormals too
    else:
        scales = ((119 + (bits >> 28)) << 7) | ((bits >> 8) & 0x7F)  # every mantissa
    x = np.zeros((m, k), np.float32)
    columns = one_hot_columns(format, k)
    x[np.arange(m), columns[(offset + np.arange(m)) % k]] = 1
    return _probe("one_hot", format, codes, scales, x)


def one_hot_columns(format: str, k: int) -> np.ndarray:
    """A permutation, int [K]: both ends of K and of its groups first, then the rest, spread out."""
    group = require_shape(format, 1, k).group
    ends = [0, k - 1, group - 1, group, 1, k - group, k - 2, 2 * group - 1]
    stride = next(s for s in range(int(k * 0.618) | 1, 2 * k) if np.gcd(s, k) == 1)
    order = np.concatenate([[e for e in ends if 0 <= e < k], np.arange(k) * stride % k])
    return order[np.sort(np.unique(order, return_index=True)[1])]


def ramp(format: str, n: int, k: int, m: int) -> Probe:
    """Codes run through all 16 along K, one further every 16 and three further every row.

    Scales are one and x is dense with different neighbours: swapping the nibbles of any byte
    changes its row's outputs.
    """
    return _probe("ramp", format, _ramp_codes(n, k), _ones(format, n, k), _ramp_x(m, k))


def prime_block_scales(format: str, n: int, k: int, m: int) -> Probe:
    """All elements are one; scales follow the primes 3..113, so neighbours along K differ.

    e8m0: 2^(p mod 7); e4m3: 1 + p mod 13; bf16: p; each window keeps the sum exact, and none
    divides a gap between neighbouring primes here. x hits one k in each group, weighted by group.
    """
    fmt = require_shape(format, n, k)
    index = np.arange(n)[:, None] * 3 + np.arange(k // fmt.group)[None, :]
    prime = _PRIMES[index % len(_PRIMES)]
    if fmt.scale == "e8m0":
        scales = 127 + prime % 7
    elif fmt.scale == "e4m3":
        scales = formats.encode_e4m3(1 + prime % 13)
    else:
        scales = formats.encode_bf16(prime)
    x = _one_per_group(format, m, k)
    return _probe("prime_block_scales", format, _codes_of_one(format, n, k), scales, x)


def shard_scales(format: str, n: int, k: int, m: int) -> Probe:
    """The ramp with two shards of unequal size and different tensor scales (nvfp4, N >= 2)."""
    if not formats.get_format(format).has_tensor_scale:
        raise ValueError(f"{format} has no tensor scale: shard_scales does not apply")
    if n < 2:
        raise ValueError(f"N={n} is below 2: shard_scales needs two shards")
    first = (n + 1) // 3 or 1
    return _probe(
        "shard_scales",
        format,
        _ramp_codes(n, k),
        _ones(format, n, k),
        _ramp_x(m, k),
        tensor_scale=[3 * 2.0**-6, 5 * 2.0**-9],
        shard_rows=(first, n - first),
    )


# --- Special values -------------------------------------------------------------------------------


def special(format: str, n: int, k: int, m: int) -> Iterator[Probe]:
    """Probes of the codes and values that kernels are known to decode wrong, one at a time.

    All formats: x_nan, x_inf, x_large. e2m1: negative_zero. mxfp4: e8m0_code_0,
    e8m0_code_0_subnormal, e8m0_code_254, e8m0_code_255. nvfp4: e4m3_subnormal, e4m3_nan,
    scale_zero, tensor_scale_underflow, tensor_scale_overflow. int4: scale_zero, scale_bf16_range.
    """
    fmt = require_shape(format, n, k)
    groups = k // fmt.group
    ramp_codes, ones = _ramp_codes(n, k), _ones(format, n, k)
    dense, sparse = _ramp_x(m, k), _one_per_group(format, m, k)
    row, block = np.arange(n)[:, None], np.arange(groups)[None, :]

    # NaN and infinity of one x element reach all outputs of their row, and no other row.
    for name, value in (("x_nan", np.nan), ("x_inf", np.inf)):
        x = dense.copy()
        x[m // 2, k // 2 + 1] = value
        yield _probe(name, format, ramp_codes, ones, x)

    # Far outside FP16, inside BF16 and FP32 even after summation.
    yield _probe("x_large", format, ramp_codes, ones, dense * np.float32(2.0**96))

    if fmt.element == "e2m1":
        # All -0 but one element a group: a -0 read as -8, NaN or anything else shows.
        codes = _codes(n, k, lambda r, c: np.where(c % fmt.group == r % fmt.group, 2, 8))
        yield _probe("negative_zero", format, codes, ones, dense)

    if fmt.scale == "e8m0":
        # 2^-127 is subnormal in BF16 and FP32; a large x lifts the outputs back to normal ...
        code_0 = np.zeros((n, groups), np.uint8)
        lifted = dense * np.float32(2.0**96)
        yield _probe("e8m0_code_0", format, ramp_codes, code_0, lifted)
        # ... and a unit vector leaves them subnormal, as FP32 arithmetic gives them.
        unit = one_hot_columns(format, k)[:1]
        x = np.zeros((m, k), np.float32)
        x[:, unit] = 1
        yield _probe("e8m0_code_0_subnormal", format, ramp_codes, code_0, x)
        # 2^127 is the largest scale; magnitudes up to 1.5 (codes 0..3) stay inside FP32.
        code_254 = np.full((n, groups), 254, np.uint8)
        x = dense * np.float32(2.0**-96)
        yield _probe("e8m0_code_254", format, ramp_codes & 0xBB, code_254, x)
        yield _nan_blocks("e8m0_code_255", format, ramp_codes, ones, dense, [255])

    if fmt.scale == "e4m3":
        subnormal = 1 + (row + block) % 7
        yield _probe("e4m3_subnormal", format, ramp_codes, subnormal, sparse)
        yield _nan_blocks("e4m3_nan", format, ramp_codes, ones, dense, [0x7F, 0xFF])

        # A tensor scale folded into 16-bit scales would underflow here: 2^-9 * 3 * 2^-30.
        name = "tensor_scale_underflow"
        yield _probe(name, format, ramp_codes, subnormal, sparse, tensor_scale=[3 * 2.0**-30])
        # The sum before the tensor scale is beyond FP16 here, the output is not.
        sixes = np.full((n, k // 2), 0x77, np.uint8)
        largest = np.full((n, groups), 0x7E, np.uint8)
        x = np.full((m, k), 32, np.float32)
        name = "tensor_scale_overflow"
        yield _probe(name, format, sixes, largest, x, tensor_scale=[3 * 2.0**-20])

    if fmt.scale != "e8m0":  # e8m0 has no zero
        yield _probe("scale_zero", format, ramp_codes, np.where((row + block) % 2, ones, 0), dense)

    if fmt.scale == "bf16":
        # All mantissas at an exponent that FP16 lacks, brought back by x.
        wide = (227 << 7) | ((37 * row + 11 * block) % 128)
        x = sparse * np.float32(2.0**-90)
        yield _probe("scale_bf16_range", format, ramp_codes, wide, x)


def _nan_blocks(
    name: str, format: str, codes: np.ndarray, scales: np.ndarray, x: np.ndarray, nan: list[int]
) -> Probe:
    """Every other row has one NaN group, which moves along K from row to row.

    Elements are positive and not zero, so that a NaN scale decoded as infinity stays an infinity
    and is not turned into the NaN that it ought to be by inf - inf or inf * 0.
    """
    n, groups = scales.shape
    rows = np.arange(0, n, 2)
    scales = scales.copy()
    scales[rows, (rows // 2) % groups] = np.resize(nan, len(rows))
    return _probe(name, format, codes & 0x77 | 0x11, scales, x)


# --- Parts ----------------------------------------------------------------------------------------


def _probe(
    name: str,
    format: str,
    values: np.ndarray,
    scales: np.ndarray,
    x: np.ndarray,
    tensor_scale: list[float] | None = None,
    shard_rows: tuple[int, ...] | None = None,
) -> Probe:
    fmt = formats.get_format(format)
    n, k = values.shape[0], 2 * values.shape[1]
    if len(x) < 1:
        raise ValueError(f"M={len(x)} is below 1 ({name}): a probe needs a row of x")
    if tensor_scale is None and fmt.has_tensor_scale:
        tensor_scale = [TENSOR_SCALE]
    scales = np.asarray(scales).astype(fmt.scale_dtype)
    weight = PackedWeight(format, n, k, values, scales, tensor_scale, shard_rows)
    _require_exact(name, weight, x)
    return Probe(name, weight, x, reference_matmul(x, weight))


def _require_exact(name: str, weight: PackedWeight, x: np.ndarray) -> None:
    """Refuse a problem whose sums, in any order, might need integers that FP32 does not hold.

    Every factor is an integer times a common power of two; the largest row sum of |x|, times the
    largest scale, element and tensor scale, bounds what any partial sum can reach.
    """
    if (np.count_nonzero(x, axis=1) <= 1).all():
        return  # single products: at most 8 + 3 significant bits, and 2 for the tensor scale
    scales = formats.decode_scales(weight.format, np.unique(weight.scales))
    finite = np.where(np.isfinite(x), np.abs(x), 0).astype(np.float64)
    reach = finite.sum(axis=1).max() / _common_unit(x)
    for factor in (scales, weight.spec.element_values):
        reach *= np.nanmax(np.abs(factor), initial=0) / _common_unit(factor)
    reach *= max(float(t) / _common_unit(t) for t in weight.tensor_scale)
    if reach > FP32_UNITS:
        raise ValueError(
            f"K={weight.k} is too long for the probe {name} ({weight.format}): its sums may reach"
            f" {reach:.0f} units and FP32 holds {FP32_UNITS} exactly"
        )


def _common_unit(values: np.ndarray) -> float:
    """The largest power of two that divides all finite float32 values; 1 if all are zero."""
    values = np.asarray(values, np.float64)
    fraction, exponent = np.frexp(values[np.isfinite(values) & (values != 0)])
    integer = np.ldexp(np.abs(fraction), 24).astype(np.int64)
    units = np.ldexp((integer & -integer).astype(np.float64), exponent - 24)
    return float(units.min()) if units.size else 1.0


def _hash(row: np.ndarray, col: np.ndarray) -> np.ndarray:
    """uint32 pseudo-random function of two broadcast indices (finaliser of MurmurHash3)."""
    row, col = row.astype(np.uint32), col.astype(np.uint32)
    h = row * np.uint32(0x9E3779B1) + col * np.uint32(0x7FEB352D)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h ^= h >> np.uint32(shift)
        h *= np.uint32(factor)
    return h ^ (h >> np.uint32(16))


def _codes(n: int, k: int, code: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """Packed uint8 [N, K/2] of code(row, col), built in row chunks to bound memory."""
    values = np.empty((n, k // 2), np.uint8)
    col = np.arange(k)[None, :]
    step = max(1, (1 << 20) // k)
    for start in range(0, n, step):
        row = np.arange(start, min(start + step, n))[:, None]
        values[start : start + step] = pack_nibbles(code(row, col).astype(np.uint8))
    return values


def _ramp_codes(n: int, k: int) -> np.ndarray:
    # 3 * row, not row: a code that depends on k + n alone survives the transposition of a tile.
    def code(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        # Only the last addition is N x K large, and it is one byte wide.
        return (3 * row).astype(np.uint8) + (col + col // 16).astype(np.uint8) & 0xF

    return _codes(n, k, code)


def _ramp_x(m: int, k: int) -> np.ndarray:
    """float32 [M, K]: pseudo-random 1, 3, 5, 7 at even K and 2, 4, 6, 8 at odd K.

    Neighbours always differ, and nothing repeats along K: a periodic x would cancel against the
    ramp, whose codes sum to zero over a period, and outputs of zero would hide every fault.
    """
    row, col = np.arange(m)[:, None], np.arange(k)[None, :]
    return (1 + col % 2 + 2 * (_hash(row, col) >> 30)).astype(np.float32)


def _one_per_group(format: str, m: int, k: int) -> np.ndarray:
    """float32 [M, K]: one k of each group is 1..13, different in neighbouring groups; others 0."""
    group = formats.get_format(format).group
    row, block = np.arange(m)[:, None], np.arange(k // group)[None, :]
    x = np.zeros((m, k), np.float32)
    x[row, block * group + (3 * block + 5 * row) % group] = 1 + (7 * block + 3 * row) % 13
    return x


def _ones(format: str, n: int, k: int) -> np.ndarray:
    """Scale codes [N, K/group] of the value one."""
    fmt = formats.get_format(format)
    one = {"e8m0": 127, "e4m3": 0x38, "bf16": 0x3F80}[fmt.scale]
    return np.full((n, k // fmt.group), one, fmt.scale_dtype)


def _codes_of_one(format: str, n: int, k: int) -> np.ndarray:
    """Packed uint8 [N, K/2] whose elements are all one."""
    byte = 0x22 if formats.get_format(format).element == "e2m1" else 0x11
    return np.full((n, k // 2), byte, np.uint8)
