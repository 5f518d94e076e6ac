"""Host packing: float32 weights to 4-bit values and scale codes, and back.

Layout (all families of checkpoints agree): two elements a byte, the LOW nibble is the even K
index; scales row-major along K. Work goes in row chunks that fit a core's cache, spread over
threads (numpy releases the GIL), so memory stays bounded by the result plus a few chunks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from . import formats
from .formats import Format, require_integer, require_shape

_CHUNK_ELEMENTS = 1 << 18  # 1 MiB of float32: input, quotient and codes stay in a core's L2


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A 4-bit weight W[N, K].

    values       uint8 [N, K/2], two nibbles a byte, low nibble = even K
    scales       [N, K/group]: uint8 e8m0 or e4m3 codes, or uint16 BF16 bit patterns
    tensor_scale float32 [shards], positive and finite; nvfp4 must be given one, and for formats
                 without one it is exactly 1
    shard_rows   rows of each shard, top to bottom; they sum to N

    A shard is a part of a fused weight (gate and up; q, k and v) that was quantised on its own.
    Its tensor scale stays its own: merging shards by the largest would requantise the others.

    The arrays are read-only. One that can still be written to, by anybody who holds it, is copied;
    one that cannot is taken as it is, so that `quantize`, `concatenate` and `dataclasses.replace`
    copy nothing.

    ValueError names what does not fit.
    """

    format: str
    n: int
    k: int
    values: np.ndarray
    scales: np.ndarray
    tensor_scale: np.ndarray | None = None
    shard_rows: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        fmt = require_shape(self.format, self.n, self.k)
        n, k = require_integer("N", self.n), require_integer("K", self.k)
        given = (n,) if self.shard_rows is None else self.shard_rows
        rows = tuple(require_integer("shard_rows", r) for r in given)
        if self.tensor_scale is None and fmt.has_tensor_scale:
            raise ValueError(f"tensor_scale is missing: {self.format} needs one per shard {rows}")
        scale = np.ones(len(rows)) if self.tensor_scale is None else self.tensor_scale
        scale = _sealed(np.atleast_1d(np.array(scale, np.float32)))
        values = self._array("values", self.values, np.uint8, (self.n, self.k // 2))
        scales = self._array("scales", self.scales, fmt.scale_dtype, (self.n, self.k // fmt.group))
        if min(rows, default=0) < 1 or sum(rows) != self.n:
            raise ValueError(f"shard_rows {rows} do not sum to N={self.n} with each at least 1")
        if scale.shape != (len(rows),):
            raise ValueError(f"tensor_scale has shape {scale.shape}, not one per shard {rows}")
        if not (np.isfinite(scale).all() and (scale > 0).all()):
            raise ValueError(f"tensor_scale {scale.tolist()} is not positive and finite")
        if not fmt.has_tensor_scale and (scale != 1).any():
            raise ValueError(f"tensor_scale {scale.tolist()}: {self.format} has no tensor scale")
        for name, value in (
            ("n", n),
            ("k", k),
            ("values", values),
            ("scales", scales),
            ("tensor_scale", scale),
            ("shard_rows", rows),
        ):
            object.__setattr__(self, name, value)

    def _array(self, name: str, array: np.ndarray, dtype: np.dtype, shape: tuple) -> np.ndarray:
        _refuse_mask(name, array)
        array = np.asarray(array)
        if array.dtype != dtype or array.shape != shape:
            raise ValueError(
                f"{name} is {array.dtype} {list(array.shape)}, not {np.dtype(dtype)} {list(shape)}"
                f" ({self.format}, N={self.n}, K={self.k})"
            )
        if array.flags.c_contiguous and _immutable(array):
            return array
        return _sealed(np.array(array, order="C"))

    @property
    def spec(self) -> Format:
        """The format's description."""
        return formats.FORMATS[self.format]

    @property
    def nbytes(self) -> int:
        """Bytes of values and group scales."""
        return self.values.nbytes + self.scales.nbytes

    @property
    def row_tensor_scale(self) -> np.ndarray:
        """float32 [N], the tensor scale of each row's shard."""
        return np.repeat(self.tensor_scale, self.shard_rows)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """uint8 [..., K/2] from codes uint8 [..., K] in 0..15; the low nibble is the even index.

    ValueError for another dtype, a code above 15, and an odd K.
    """
    codes = np.ascontiguousarray(codes)
    if codes.dtype != np.uint8:
        raise ValueError(f"codes are {codes.dtype}, not uint8")
    if (largest := codes.max(initial=0)) > 15:
        raise ValueError(f"code {largest} is above 15: a nibble holds four bits")
    if codes.shape[-1] % 2:
        raise ValueError(f"K={codes.shape[-1]} is odd: two nibbles share a byte")
    pairs = codes.view("<u2")  # even code in the low byte, odd code in the high byte
    return (pairs | (pairs >> 4)).astype(np.uint8)


def unpack_nibbles(values: np.ndarray) -> np.ndarray:
    """uint8 codes [..., K] in 0..15 from packed uint8 [..., K/2]: `pack_nibbles` undone."""
    values = np.asarray(values, np.uint8)
    codes = np.empty((*values.shape, 2), np.uint8)
    codes[..., 0] = values & 0xF
    codes[..., 1] = values >> 4
    return codes.reshape(*values.shape[:-1], 2 * values.shape[-1])


def quantize(
    weight: np.ndarray,
    format: str,
    scale_rule: str | None = None,
    threads: int | None = None,
) -> PackedWeight:
    """Quantise weight float32 [N, K] to one shard of `format`.

    Each element is encoded from weight / (scale * tensor scale), one FP32 division by an FP32
    product, rounded to nearest, ties to even. `scale_rule` picks how a group's scale follows from
    its largest magnitude; None is the format's first rule:

    mxfp4      ocp_floor or modelopt_ceil, see `formats.e8m0_scale_codes`
    nvfp4      modelopt, see `formats.e4m3_scale_codes` and `formats.nvfp4_tensor_scale`
    int4_g*    amax_over_7: the BF16 nearest to amax / 7, codes -7..7

    A zero group has scale code 0 and zero elements (signed for e2m1). `threads` defaults to the
    cores at hand. ValueError for another dtype or shape, a K that does not divide into groups,
    an unknown rule, a masked array, threads below 1, and a NaN or infinity (with its row and
    column).
    """
    _refuse_mask("weight", weight)
    weight = np.asarray(weight)
    if weight.dtype != np.float32 or weight.ndim != 2:
        raise ValueError(f"weight is {weight.dtype} {list(weight.shape)}, not float32 [N, K]")
    n, k = weight.shape
    fmt = require_shape(format, n, k)
    rule = fmt.scale_rules[0] if scale_rule is None else scale_rule
    if rule not in fmt.scale_rules:
        raise ValueError(
            f"scale rule {rule!r} is not one of {', '.join(fmt.scale_rules)} ({format})"
        )

    tensor_scale = np.float32(1)
    if fmt.has_tensor_scale:
        peaks = _map_rows(lambda a, b: _group_amax(weight[a:b], fmt.group, a).max(), n, k, threads)
        tensor_scale = formats.nvfp4_tensor_scale(max(peaks))
    values = np.empty((n, k // 2), np.uint8)
    scales = np.empty((n, k // fmt.group), fmt.scale_dtype)

    def encode(start: int, stop: int) -> None:
        rows = weight[start:stop]
        amax = _group_amax(rows, fmt.group, start)
        if fmt.scale == "e8m0":
            codes = formats.e8m0_scale_codes(amax, rule)
        elif fmt.scale == "e4m3":
            codes = formats.e4m3_scale_codes(amax, tensor_scale)
        else:
            codes = formats.encode_bf16(amax / np.float32(formats.INT4_MAX))
        divisor = formats.decode_scales(format, codes) * tensor_scale
        # A zero group, or one whose BF16 scale underflowed: x / inf is a zero with x's sign.
        divisor[(amax == 0) | (divisor == 0)] = np.inf
        quotient = rows.reshape(stop - start, -1, fmt.group) / divisor[..., None]
        encoder = formats.e2m1_codes if fmt.element == "e2m1" else formats.int4_codes
        scales[start:stop] = codes
        values[start:stop] = pack_nibbles(encoder(quotient).reshape(stop - start, k))

    _map_rows(encode, n, k, threads)
    return PackedWeight(format, n, k, _sealed(values), _sealed(scales), np.array([tensor_scale]))


def dequantize(
    packed: PackedWeight, dtype: np.dtype = np.float32, threads: int | None = None
) -> np.ndarray:
    """W[N, K] in float32 or float64: (element * scale) * tensor scale.

    element * scale is exact in both, inside float32's range (an e2m1 magnitude of 2 or more under
    the largest e8m0 code overflows to infinity there); the tensor scale, applied last, is the
    only rounding, and none in float64. NaN scales give NaN blocks; -0 is kept.
    """
    dtype = np.dtype(dtype)
    if dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise ValueError(f"dtype {dtype} is neither float32 nor float64")
    weight = np.empty((packed.n, packed.k), dtype)
    tensor_scale = packed.row_tensor_scale

    def decode(start: int, stop: int) -> None:
        rows = weight[start:stop]
        _decode_rows(packed, start, stop, rows)
        if packed.spec.has_tensor_scale:
            rows *= tensor_scale[start:stop, None]

    _map_rows(decode, packed.n, packed.k, threads)
    return weight


def concatenate(shards: Sequence[PackedWeight]) -> PackedWeight:
    """Stack weights of one format and one K along N; every shard keeps its own tensor scale."""
    if not shards:
        raise ValueError("concatenate needs at least one shard")
    first = shards[0]
    for i, shard in enumerate(shards):
        if (shard.format, shard.k) != (first.format, first.k):
            raise ValueError(
                f"shard {i} is {shard.format} with K={shard.k}, shard 0 is {first.format}"
                f" with K={first.k}"
            )
    return PackedWeight(
        first.format,
        sum(s.n for s in shards),
        first.k,
        _sealed(np.concatenate([s.values for s in shards])),
        _sealed(np.concatenate([s.scales for s in shards])),
        np.concatenate([s.tensor_scale for s in shards]),
        tuple(rows for s in shards for rows in s.shard_rows),
    )


def reference_matmul(x: np.ndarray, packed: PackedWeight) -> np.ndarray:
    """The oracle of the kernels: y = x W^T in float64 [M, N] for x [M, K].

    The operands are exact in float64 and the tensor scale is applied last, to the sum. NaN and
    infinities of x and of scales follow IEEE arithmetic.
    """
    x = np.asarray(x, np.float64)
    if x.ndim != 2 or x.shape[1] != packed.k:
        raise ValueError(f"x is {list(x.shape)}, not [M, K={packed.k}]")
    y = np.empty((x.shape[0], packed.n))
    with np.errstate(invalid="ignore"):
        for start, stop in _row_chunks(packed.n, packed.k, 4 * _CHUNK_ELEMENTS):
            rows = np.empty((stop - start, packed.k))
            _decode_rows(packed, start, stop, rows)
            np.matmul(x, rows.T, out=y[:, start:stop])
        y *= packed.row_tensor_scale
    return y


def _sealed(array: np.ndarray) -> np.ndarray:
    """A fresh array, from now on read-only."""
    array.flags.writeable = False
    return array


def _immutable(array: np.ndarray) -> bool:
    """Whether neither the array nor anything whose memory it shows can be written to."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return False
        owner = owner.base
    try:
        return owner is None or memoryview(owner).readonly
    except TypeError:  # it does not say
        return False


def _refuse_mask(name: str, array: object) -> None:
    if np.ma.isMaskedArray(array):
        raise ValueError(f"{name} is a masked array: fill it first, no format can hold a mask")


def _decode_rows(packed: PackedWeight, start: int, stop: int, out: np.ndarray) -> None:
    """Write element * scale of rows start..stop to `out` [stop-start, K], without tensor scale."""
    byte = np.arange(256)
    table = packed.spec.element_values.astype(out.dtype)
    pairs = np.stack([table[byte & 0xF], table[byte >> 4]], axis=1)  # both elements of a byte
    np.take(
        pairs,
        packed.values[start:stop],
        axis=0,
        out=out.reshape(stop - start, -1, 2),
        mode="clip",  # no index is out of range; the default mode would buffer the output
    )
    scales = formats.decode_scales(packed.format, packed.scales[start:stop]).astype(out.dtype)
    groups = out.reshape(stop - start, -1, packed.spec.group)
    with np.errstate(over="ignore", invalid="ignore"):
        np.multiply(groups, scales[..., None], out=groups)


def _group_amax(rows: np.ndarray, group: int, first_row: int) -> np.ndarray:
    """float32 [R, K/group], the largest magnitude of each group; refuses NaN and infinity.

    Neighbours are halved pairwise: numpy's own reduction over a short inner axis is ten times
    slower. `group` is a power of two.
    """
    amax = np.abs(rows)
    while group > 1:
        amax = np.maximum(amax[:, 0::2], amax[:, 1::2])
        group //= 2
    if not np.isfinite(amax).all():
        formats.refuse_where(~np.isfinite(rows), rows, "weights must be finite", first_row)
    return amax


def _row_chunks(n: int, k: int, elements: int = _CHUNK_ELEMENTS) -> Iterable[tuple[int, int]]:
    rows = max(1, elements // k)
    return ((start, min(start + rows, n)) for start in range(0, n, rows))


def _map_rows(function: Callable, n: int, k: int, threads: int | None) -> list:
    """function(start, stop) over row chunks, in order, on `threads` threads."""
    threads = (os.cpu_count() or 1) if threads is None else require_integer("threads", threads)
    if threads < 1:
        raise ValueError(f"threads={threads} is below 1")
    chunks = list(_row_chunks(n, k))
    workers = min(threads, len(chunks))
    if workers == 1:
        return [function(*chunk) for chunk in chunks]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda chunk: function(*chunk), chunks))
