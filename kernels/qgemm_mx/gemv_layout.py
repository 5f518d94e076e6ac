"""The packed layout of a weight: the bytes that a thread loads are its fragments of the matrix instruction.

One layout serves the decode kernel (qgemv_mx, mma.m16n8k16) and the kernel for more tokens (wgmma m64nNk16,
whose A fragment is that of mma.m16n8k16 in each of its four warps).

A weight is one run of bytes. Rows go in tiles of 16, K in chunks of 64 and slices of four chunks (the
last slice has the chunks that are left). Tile by tile, slice by slice, a unit is

    scales   128 (mxfp4), 256 (nvfp4) or 64 (int4_g128) bytes, those of 256 k in the last slice too
    values   chunks x 512 bytes; lane l = 4g + t of a warp owns the 16 bytes at 16 l of each chunk

Rows, k and groups that are not there are zeros with scale code 0. Behind the last unit are zeros for
the chunks that the last slice lacks: the kernel's asynchronous copies read four chunks of every unit,
those beyond K from what follows, and what follows the last unit has to be memory of the weight.

Values. A lane's 16 bytes are four uint32 words, word s for step s (16 k) of the chunk: the A fragment
of the instruction. A word holds four pairs j of neighbouring k, the even k in the low half word: row g for
even j, row g + 8 for odd j. K stands in the instruction's own order:

    k = 64 chunk + 16 s + 2 t + 8 (j // 2) + {0, 1}

Any other order would do where the activations follow it, but the activations of wgmma come by TMA, which
moves pieces of 16 bytes: nothing can be permuted inside them.

int4: pair j is the nibble at bits 4j of each half word.

e2m1: a pair is wanted as two BF16 with the sign at bit 15 and the magnitude at bits 8, 7, 6, which is the
element times 2^-126. Four pairs have 32 such bits, as many as a word, so the word can be any invertible
linear code of them over GF(2), and it is the one from which they come cheapest (`place`):

    pair 0 = q,  pair 1 = q << 4,  pair 2 = r ^ (q << 6),  pair 3 = r ^ (r << 2)

each & 0x81C081C0, with r = q rotated left by 10: one rotation, three shifts and four three-input logic
instructions. `encode` solves this for q. Bits 15, 8, 7, 6 of a half word are those of pair 0, and bits
11, 4, 3, 2 those of pair 1; pairs 2 and 3 then give the other eight bits one after the other.

Scales. Lane group g has an eighth of the block, at g * unit_scale_bytes / 8, in words of four bytes, row
g then row g + 8: groups 2p and 2p + 1 of the slice as two 8-bit codes each in word p, or group p as one
BF16.

mxfp4: a code is stored as (code + 62) mod 256: as the exponent of an FP32 it is then the scale times 2^62,
which with activations times 2^64 makes up for the 2^-126 of the elements.

nvfp4: a scale 1.m x 2^E is stored as unsigned E5M3, 8 (E + 22) + m, in which E4M3's subnormals are normal:
code << 20 as FP32 is the scale times 2^-105, and (code << 4) + 0x7000 as BF16 the scale times 2^119 (with
the 2^-126 of the elements, all but 2^7). NaN is 255. There is no room for a sign, so it is folded into the
signs of the elements; and none for a zero in that BF16, so a zero scale is code 0 and the magnitudes of its
elements are packed as zeros.

Functions take NumPy or CuPy arrays and give back the same kind. They are the oracle of the packing
kernel (cuda/pack_gemv.cu), which writes the same bytes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from .formats import E4M3_VALUES, FORMATS, require_shape
from .packing import PackedWeight

GEMV_FORMATS = ("mxfp4", "nvfp4", "int4_g128")
ROWS = 16  # rows of W in a tile: the m of mma.m16n8k16
CHUNK = 64  # k of a 16-byte load of each lane
CHUNKS = 4  # of a slice
SLICE = CHUNK * CHUNKS
CHUNK_VALUE_BYTES = ROWS * CHUNK // 2
LANE_GROUPS = 8  # lanes that share rows g and g + 8
K_STEP = 32  # K is a multiple of it, and of the scale group

PAIR_MASK = 0x81C081C0  # e2m1: sign and magnitude of both elements of a pair
MXFP4_CODE_OFFSET = 62  # added to a scale code, modulo 256
# Codes from here on leave the range in which a scale can be applied with one multiplication:
# mxfp4 2^66 and above with NaN; nvfp4, without the sign, NaN.
_FIRST_WIDE = {"mxfp4": 193, "nvfp4": 0x7F}
_UNSIGNED = {"mxfp4": 0xFF, "nvfp4": 0x7F}  # a scale code without its sign
E5M3_BIAS = 22
E5M3_NAN = 255


def _e5m3_codes() -> np.ndarray:
    """uint8 [256]: the E5M3 code of each E4M3 code, whose sign it does not have."""
    mantissa, exponent = np.frexp(np.abs(E4M3_VALUES))  # 0.5 <= mantissa < 1
    codes = 8 * (exponent - 1 + E5M3_BIAS) + 16 * mantissa - 8
    codes = np.where(mantissa == 0, 0, codes)
    return np.where(np.isnan(codes), E5M3_NAN, codes).astype(np.uint8)


E5M3_OF_E4M3 = _e5m3_codes()
_E4M3_OF_E5M3 = np.zeros(256, np.uint8)
_E4M3_OF_E5M3[E5M3_OF_E4M3[:128]] = np.arange(128)


@dataclass(frozen=True)
class GemvLayout:
    """Sizes of the packed W[N, K]; all in bytes or counts. `gemv_layout` makes one."""

    format: str
    n: int
    k: int

    @property
    def tiles(self) -> int:
        """Row tiles of 16."""
        return -(-self.n // ROWS)

    @property
    def chunks(self) -> int:
        """Chunks of 64 k."""
        return -(-self.k // CHUNK)

    @property
    def slices(self) -> int:
        """Slices of 256 k, the last one perhaps shorter."""
        return -(-self.chunks // CHUNKS)

    @property
    def unit_scale_bytes(self) -> int:
        """Bytes of scales of a unit, whole or not: 16 rows x 256 k."""
        fmt = FORMATS[self.format]
        return ROWS * SLICE // fmt.group * fmt.scale_dtype.itemsize

    @property
    def unit_bytes(self) -> int:
        """Bytes of a whole unit: 16 rows x 256 k."""
        return self.unit_scale_bytes + CHUNKS * CHUNK_VALUE_BYTES

    @property
    def tile_bytes(self) -> int:
        """Bytes of 16 rows."""
        return self.slices * self.unit_scale_bytes + self.chunks * CHUNK_VALUE_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight, with the zeros that complete its last unit to four chunks."""
        lacking = CHUNKS - self.chunks_of(self.slices - 1)
        return self.tiles * self.tile_bytes + lacking * CHUNK_VALUE_BYTES

    def chunks_of(self, slice_index: int) -> int:
        """Chunks of a slice, 1..4."""
        return min(CHUNKS, self.chunks - slice_index * CHUNKS)


def gemv_layout(format: str, n: int, k: int) -> GemvLayout:
    """The layout of W[N, K]. ValueError for a format without a kernel and a K that does not divide."""
    fmt = require_shape(format, n, k)
    if format not in GEMV_FORMATS:
        raise ValueError(
            f"format {format!r} has no qgemv_mx layout: {', '.join(GEMV_FORMATS)} have"
        )
    if k % K_STEP:
        raise ValueError(
            f"K={k} is not a multiple of {K_STEP}, the k that qgemv_mx reads of x at a time"
            f" ({format}, scale group {fmt.group})"
        )
    return GemvLayout(format, int(n), int(k))


def is_wide(format: str, scales: Any) -> bool:
    """Whether some scale code is outside the common range, so that the kernel takes its exact path everywhere.

    scales [N, K/group], codes as in `PackedWeight`. Reads the answer back from a device.
    """
    first = _FIRST_WIDE.get(format)
    return first is not None and bool((scales & _UNSIGNED[format] >= first).any())


def code_range(format: str, scales: Any) -> tuple[int, int]:
    """Least and largest scale code of mxfp4; (255, 0), a range of no codes, for other formats.

    Reads the answer back from a device.
    """
    return (int(scales.min()), int(scales.max())) if format == "mxfp4" else (255, 0)


def place(words: Any) -> Any:
    """uint32 [..., 4]: the e2m1 pairs of words uint32 [...], two BF16 each, elements times 2^-126."""
    xp = _module(words)
    q, r = words, _rotated(words, 10)
    return xp.stack([q, q << 4, r ^ q << 6, r ^ r << 2], axis=-1) & np.uint32(PAIR_MASK)


def encode(pairs: Any) -> Any:
    """uint32 [...]: the words that `place` takes apart into pairs uint32 [..., 4]."""
    p0, p1, p2, p3 = (pairs[..., j] for j in range(4))
    q0 = p0 | p1 >> 4
    # Bits of the word q and of its rotation r, in both half words at once.
    r15 = _bit(p3, 15) ^ _bit(q0, 3)
    q9 = _bit(p2, 15) ^ r15
    r8 = _bit(p2, 8) ^ _bit(q0, 2)
    r6 = _bit(p3, 8) ^ r8
    r7 = _bit(p3, 7) ^ _rotated(_bit(q0, 11), 16)
    r4 = _bit(p3, 6) ^ r6
    q1 = _bit(p2, 7) ^ r7
    q = q0 | r15 << 5 | q9 << 9 | q1 << 1 | _bit(p2, 6) ^ r6
    # Bit i of r is bit i - 10 of q: below 10 it comes from the other half word.
    return q | _rotated(r8 << 14 | r6 << 12 | r7 << 13 | r4 << 10, 16)


def pack(layout: GemvLayout, values: Any, scales: Any) -> Any:
    """uint8 [nbytes] from values uint8 [N, K/2] and scales [N, K/group], as in `PackedWeight`."""
    xp = _module(values)
    _require(layout, values, scales)
    if layout.format == "nvfp4":
        values = _folded(values, scales)
    value_bytes = _value_words(layout, values).view(xp.uint8).reshape(layout.tiles, -1)
    scale_bytes = _scale_words(layout, scales).view(xp.uint8)
    scale_bytes = scale_bytes.reshape(layout.tiles, layout.slices, layout.unit_scale_bytes)
    packed = xp.zeros(layout.nbytes, xp.uint8)
    tiles = packed[: layout.tiles * layout.tile_bytes].reshape(layout.tiles, layout.tile_bytes)
    for s in range(layout.slices):
        first, middle, last = _unit_bounds(layout, s)
        tiles[:, first:middle] = scale_bytes[:, s]
        at = s * CHUNKS * CHUNK_VALUE_BYTES
        tiles[:, middle:last] = value_bytes[:, at : at + last - middle]
    return packed


def unpack(layout: GemvLayout, packed: Any) -> tuple[Any, Any]:
    """Values uint8 [N, K/2] and scales [N, K/group] from the packed bytes: `pack` undone.

    nvfp4: an equivalent weight, its scales without a sign, and zeros under a zero scale.
    """
    xp = _module(packed)
    fmt = FORMATS[layout.format]
    if packed.dtype != np.uint8 or packed.shape != (layout.nbytes,):
        raise ValueError(
            f"packed is {packed.dtype} {list(packed.shape)}, not uint8 [{layout.nbytes}]"
            f" ({layout.format}, N={layout.n}, K={layout.k})"
        )
    rows = packed[: layout.tiles * layout.tile_bytes].reshape(layout.tiles, layout.tile_bytes)
    bounds = [_unit_bounds(layout, s) for s in range(layout.slices)]
    value_bytes = xp.concatenate([rows[:, middle:last] for _, middle, last in bounds], axis=1)
    scale_bytes = xp.concatenate([rows[:, first:middle] for first, middle, _ in bounds], axis=1)

    pairs = _pair_bytes(layout.format, xp.ascontiguousarray(value_bytes).view(xp.uint32))
    # tile, chunk, g, t, step, j // 2, row half -> tile, row half, g, chunk, step, j // 2, t
    pairs = pairs.reshape(layout.tiles, layout.chunks, 8, 4, 4, 2, 2).transpose(0, 6, 2, 1, 4, 5, 3)
    values = pairs.reshape(layout.tiles * ROWS, -1)[: layout.n, : layout.k // 2]

    scales = xp.ascontiguousarray(scale_bytes).view(fmt.scale_dtype)
    each = 2 // fmt.scale_dtype.itemsize  # groups a word
    # tile, slice, g, word, row half, group of the word -> tile, row half, g, slice, word, group
    scales = scales.reshape(layout.tiles, layout.slices, LANE_GROUPS, -1, 2, each)
    scales = scales.transpose(0, 4, 2, 1, 3, 5).reshape(layout.tiles * ROWS, -1)
    scales = scales[: layout.n, : layout.k // fmt.group]
    if layout.format == "mxfp4":
        scales = scales - np.uint8(MXFP4_CODE_OFFSET)  # wraps
    elif layout.format == "nvfp4":
        scales = xp.asarray(_E4M3_OF_E5M3)[scales]
    return xp.ascontiguousarray(values), xp.ascontiguousarray(scales)


def pack_host(weight: PackedWeight) -> np.ndarray:
    """`pack` of a weight on the host."""
    return pack(gemv_layout(weight.format, weight.n, weight.k), weight.values, weight.scales)


@dataclass(frozen=True)
class ValuePlace:
    """Where W[row, k] stands. Fields are ints, or integer arrays of one shape.

    offset  byte of the 32-bit word in the packed weight
    lane    that loads it; `step` of its chunk; `pair` 0..3 of the word; `half` 0 for the low half word

    The four bits of an e2m1 element are spread over the word: it is `half` of `place(word)[..., pair]`.
    """

    offset: Any
    lane: Any
    step: Any
    pair: Any
    half: Any


def value_place(layout: GemvLayout, row: Any, k: Any) -> ValuePlace:
    """The fragment map: which lane's word, pair and half holds W[row, k]."""
    chunk, rest = k // CHUNK, k % CHUNK
    step, pair_column, t = rest // 16, rest // 8 % 2, rest // 2 % 4
    lane = 4 * (row % 8) + t
    slice_index = chunk // CHUNKS
    offset = (
        row // ROWS * layout.tile_bytes
        + slice_index * layout.unit_bytes
        + layout.unit_scale_bytes
        + chunk % CHUNKS * CHUNK_VALUE_BYTES
        + 16 * lane
        + 4 * step
    )
    return ValuePlace(offset, lane, step, 2 * pair_column + row // 8 % 2, k % 2)


def scale_offset(layout: GemvLayout, row: Any, group: Any) -> Any:
    """Byte of the scale of W[row, group * G : (group + 1) * G] in the packed weight."""
    fmt = FORMATS[layout.format]
    size, of_slice = fmt.scale_dtype.itemsize, SLICE // fmt.group
    each = 2 // size  # groups a word
    slice_index, rest = group // of_slice, group % of_slice
    return (
        row // ROWS * layout.tile_bytes
        + slice_index * layout.unit_bytes
        + row % LANE_GROUPS * (layout.unit_scale_bytes // LANE_GROUPS)
        + rest // each * 4
        + row // 8 % 2 * 2
        + rest % each * size
    )


def _rotated(words: Any, places: int) -> Any:
    """uint32 words rotated to the left."""
    return words << places | words >> (32 - places)


def _bit(words: Any, place: int) -> Any:
    """One bit of each half word, at its lowest place."""
    return words >> place & np.uint32(0x00010001)


def _folded(values: Any, scales: Any) -> Any:
    """nvfp4: values uint8 [N, K/2] that take over the signs and the zeros of their E4M3 scales [N, K/16]."""
    xp = _module(values)
    signs = np.uint8(0x88)  # of the two elements of a byte
    kept = xp.where(scales & 0x7F, np.uint8(0xFF), signs)[..., None]
    flipped = xp.where(scales & 0x80, signs, np.uint8(0))[..., None]
    return (values.reshape(*scales.shape, -1) & kept ^ flipped).reshape(values.shape)


def _byte_words(format: str) -> np.ndarray:
    """uint32 [4, 256]: the word with a byte of `PackedWeight.values` as pair j, and zeros else.

    A word is linear in its pairs, so it is the XOR of four of these.
    """
    byte = np.arange(256, dtype=np.uint32)
    codes = byte & 15 | byte >> 4 << 16
    if FORMATS[format].element == "int4":
        return np.stack([codes << 4 * j for j in range(4)])
    pairs = np.zeros((4, 256, 4), np.uint32)
    for j in range(4):
        pairs[j, :, j] = (codes & 0x00070007) << 6 | (codes & 0x00080008) << 12
    return encode(pairs)


def _pair_bytes(format: str, words: Any) -> Any:
    """uint8 [..., 4]: the pairs of words uint32 [...] as bytes of `PackedWeight.values`."""
    xp = _module(words)
    if FORMATS[format].element == "int4":
        codes = xp.stack([words >> 4 * j & 0x000F000F for j in range(4)], axis=-1)
    else:
        pairs = place(words)
        codes = pairs >> 6 & 0x00070007 | pairs >> 12 & 0x00080008
    return (codes | codes >> 12).astype(xp.uint8)


def _value_words(layout: GemvLayout, values: Any) -> Any:
    """uint32 [tile, chunk, 128]: the words of every lane."""
    xp = _module(values)
    tiles, chunks = layout.tiles, layout.chunks
    # A byte is a pair: two neighbouring k, the even one in its low nibble.
    pairs = xp.zeros((tiles * ROWS, chunks * CHUNK // 2), xp.uint8)
    pairs[: layout.n, : layout.k // 2] = values
    # tile, row half, g, chunk, step, j // 2, t -> tile, chunk, g, t, step, j // 2, row half
    pairs = pairs.reshape(tiles, 2, 8, chunks, 4, 2, 4).transpose(0, 3, 2, 6, 4, 5, 1)
    pairs = pairs.reshape(tiles, chunks, ROWS * CHUNK // 8, 4)  # tile, chunk, word, j
    words = xp.zeros(pairs.shape[:3], xp.uint32)
    for j, table in enumerate(_byte_words(layout.format)):
        words ^= xp.asarray(table)[pairs[..., j]]
    return words


def _scale_words(layout: GemvLayout, scales: Any) -> Any:
    """[tile, slice, g, word, row half, group of the word] in the scale's own dtype, as stored."""
    xp = _module(scales)
    fmt = FORMATS[layout.format]
    each = 2 // fmt.scale_dtype.itemsize
    padded = xp.zeros((layout.tiles * ROWS, layout.slices * SLICE // fmt.group), fmt.scale_dtype)
    padded[: layout.n, : layout.k // fmt.group] = scales
    if layout.format == "mxfp4":
        padded += np.uint8(MXFP4_CODE_OFFSET)  # wraps
    elif layout.format == "nvfp4":
        padded = xp.asarray(E5M3_OF_E4M3)[padded]
    padded = padded.reshape(layout.tiles, 2, LANE_GROUPS, layout.slices, -1, each)
    return xp.ascontiguousarray(padded.transpose(0, 3, 2, 4, 1, 5))


def _unit_bounds(layout: GemvLayout, s: int) -> tuple[int, int, int]:
    """Bytes of a tile: where the scales of slice `s` begin, where its values begin, where they end."""
    first = s * layout.unit_bytes
    middle = first + layout.unit_scale_bytes
    return first, middle, middle + layout.chunks_of(s) * CHUNK_VALUE_BYTES


def _require(layout: GemvLayout, values: Any, scales: Any) -> None:
    fmt = FORMATS[layout.format]
    for name, array, dtype, columns in (
        ("values", values, np.dtype(np.uint8), layout.k // 2),
        ("scales", scales, fmt.scale_dtype, layout.k // fmt.group),
    ):
        if array.dtype != dtype or tuple(array.shape) != (layout.n, columns):
            raise ValueError(
                f"{name} is {array.dtype} {list(array.shape)}, not {dtype} {[layout.n, columns]}"
                f" ({layout.format}, N={layout.n}, K={layout.k})"
            )


def _module(array: Any) -> Any:
    """The array module of an array: NumPy, or CuPy where it has been imported to make one."""
    return np if isinstance(array, np.ndarray) else sys.modules["cupy"]
