"""The packed layout of qgemv_mx: the bytes that a thread loads are its fragments of the matrix instruction.

A weight is one run of bytes. Rows go in tiles of 16, K in chunks of 64 and slices of four chunks (the
last slice has the chunks that are left); rows and k that are not there are zeros with scale code 0.
Tile by tile, slice by slice, a unit is

    values       chunks x 512 bytes; lane l = 4g + t of a warp owns the 16 bytes at 16 l of each chunk
    scale words  chunks x W x 32 bytes; W is 1 (mxfp4), 2 (nvfp4) or 1/2 (int4_g128)

A lane's 16 bytes are four uint32 words, word s for step s (16 k) of the chunk: the A fragment of
mma.m16n8k16. A word holds four pairs j of neighbouring k, the even k in the low half word: row g for
even j, row g + 8 for odd j. Which k a lane owns is free as long as the activations agree, so its k are
neighbours over a window of 32 k (16 in nvfp4), and one load of x serves the window:

    mxfp4, int4  k = 64 chunk + 32 (s // 2) + 8 t + 4 (s % 2) + 2 (j // 2) + {0, 1}
    nvfp4        k = 64 chunk + 16 s + 4 t + 2 (j // 2) + {0, 1}

e2m1 half words are ordered so that a shift and a mask leave sign, lowest exponent bits and highest
mantissa bit of a BF16 in place, the element times 2^-126 (`PLACES`). int4: pair j is the nibble at bit 4j.

Word p of a unit's scales has, for lane group g at byte 4g, row g then row g + 8: groups 2p and 2p + 1
of the slice as two 8-bit codes each, or group p as one BF16.

Functions take NumPy or CuPy arrays and give back the same kind. They are the oracle of the packing
kernel (cuda/pack_gemv.cu), which writes the same bytes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from .formats import FORMATS, require_shape
from .packing import PackedWeight

GEMV_FORMATS = ("mxfp4", "nvfp4", "int4_g128")
ROWS = 16  # rows of W in a tile: the m of mma.m16n8k16
CHUNK = 64  # k of a 16-byte load of each lane
CHUNKS = 4  # of a slice
SLICE = CHUNK * CHUNKS
CHUNK_VALUE_BYTES = ROWS * CHUNK // 2
SCALE_WORD_BYTES = 32  # eight lane groups, four bytes each
K_STEP = 32  # K is a multiple of it, and of the scale group

# e2m1: where pair j of a half word has its magnitude's bits (lowest first) and its sign.
PLACES = (((6, 7, 8), 15), ((3, 4, 5), 12), ((0, 1, 2), 9), ((10, 11, 13), 14))
# Codes from here on leave the range in which a scale can be applied with one multiplication:
# mxfp4 2^66 and above with NaN; nvfp4 NaN, and everything with a sign.
_FIRST_WIDE = {"mxfp4": 193, "nvfp4": 0x7F}


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
    def chunk_scale_bytes(self) -> int:
        """Bytes of scales a chunk: 32 W."""
        fmt = FORMATS[self.format]
        return ROWS * CHUNK * fmt.scale_dtype.itemsize // fmt.group

    @property
    def unit_bytes(self) -> int:
        """Bytes of a whole unit: 16 rows x 256 k."""
        return CHUNKS * (CHUNK_VALUE_BYTES + self.chunk_scale_bytes)

    @property
    def tile_bytes(self) -> int:
        """Bytes of 16 rows."""
        return self.chunks * (CHUNK_VALUE_BYTES + self.chunk_scale_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return self.tiles * self.tile_bytes

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
    return first is not None and bool((scales >= first).any())


def pack(layout: GemvLayout, values: Any, scales: Any) -> Any:
    """uint8 [nbytes] from values uint8 [N, K/2] and scales [N, K/group], as in `PackedWeight`."""
    xp = _module(values)
    _require(layout, values, scales)
    words = _value_words(layout, values)  # [tile, chunk, 128]
    value_bytes = words.view(xp.uint8).reshape(layout.tiles, layout.chunks * CHUNK_VALUE_BYTES)
    scale_bytes = _scale_words(layout, scales).view(xp.uint8).reshape(layout.tiles, -1)
    packed = xp.empty((layout.tiles, layout.tile_bytes), xp.uint8)
    for s in range(layout.slices):
        (v0, v1), (s0, s1) = _unit_spans(layout, s)
        first = s * CHUNKS * CHUNK_VALUE_BYTES
        packed[:, v0:v1] = value_bytes[:, first : first + v1 - v0]
        first = s * CHUNKS * layout.chunk_scale_bytes
        packed[:, s0:s1] = scale_bytes[:, first : first + s1 - s0]
    return packed.reshape(-1)


def unpack(layout: GemvLayout, packed: Any) -> tuple[Any, Any]:
    """Values uint8 [N, K/2] and scales [N, K/group] from the packed bytes: `pack` undone."""
    xp = _module(packed)
    fmt = FORMATS[layout.format]
    if packed.dtype != np.uint8 or packed.shape != (layout.nbytes,):
        raise ValueError(
            f"packed is {packed.dtype} {list(packed.shape)}, not uint8 [{layout.nbytes}]"
            f" ({layout.format}, N={layout.n}, K={layout.k})"
        )
    rows = packed.reshape(layout.tiles, layout.tile_bytes)
    spans = [_unit_spans(layout, s) for s in range(layout.slices)]
    value_bytes = xp.concatenate([rows[:, v0:v1] for (v0, v1), _ in spans], axis=1)
    scale_bytes = xp.concatenate([rows[:, s0:s1] for _, (s0, s1) in spans], axis=1)

    halves = xp.ascontiguousarray(value_bytes).view(xp.uint16)
    # tile, chunk, g, t, step, half word
    halves = halves.reshape(layout.tiles, layout.chunks, 8, 4, 4, 2)
    codes = xp.stack([_code(layout.format, halves, j) for j in range(4)], axis=-1)
    # tile, chunk, g, t, step, half word, j // 2, j % 2
    codes = codes.reshape(layout.tiles, layout.chunks, 8, 4, 4, 2, 2, 2)
    # -> tile, row half, g, chunk, then the k of a chunk from the highest digit down
    if fmt.group == 16:
        order = (0, 7, 2, 1, 4, 3, 6, 5)
    else:
        codes = codes.reshape(layout.tiles, layout.chunks, 8, 4, 2, 2, 2, 2, 2)
        order = (0, 8, 2, 1, 4, 3, 5, 7, 6)
    codes = codes.transpose(order).reshape(layout.tiles * ROWS, layout.chunks * CHUNK)
    codes = codes[: layout.n, : layout.k]
    values = codes[:, 0::2] | (codes[:, 1::2] << 4)

    scales = xp.ascontiguousarray(scale_bytes).view(fmt.scale_dtype)
    each = 2 // fmt.scale_dtype.itemsize  # groups a word
    scales = scales.reshape(layout.tiles, -1, 8, 2, each).transpose(0, 3, 2, 1, 4)
    scales = scales.reshape(layout.tiles * ROWS, -1)[: layout.n, : layout.k // fmt.group]
    return xp.ascontiguousarray(values), xp.ascontiguousarray(scales)


def pack_host(weight: PackedWeight) -> np.ndarray:
    """`pack` of a weight on the host."""
    return pack(gemv_layout(weight.format, weight.n, weight.k), weight.values, weight.scales)


@dataclass(frozen=True)
class ValuePlace:
    """Where W[row, k] stands. Fields are ints, or integer arrays of one shape.

    offset  byte of the 32-bit word in the packed weight
    lane    that loads it; `step` of its chunk; `pair` 0..3 of the word; `half` 0 for the low half word
    """

    offset: Any
    lane: Any
    step: Any
    pair: Any
    half: Any


def value_place(layout: GemvLayout, row: Any, k: Any) -> ValuePlace:
    """The fragment map: which lane's word, pair and half holds W[row, k]."""
    chunk, rest = k // CHUNK, k % CHUNK
    if FORMATS[layout.format].group == 16:
        step, t, pair_column = rest // 16, rest // 4 % 4, rest // 2 % 2
    else:
        step, t, pair_column = 2 * (rest // 32) + rest // 4 % 2, rest // 8 % 4, rest // 2 % 2
    lane = 4 * (row % 8) + t
    slice_index = chunk // CHUNKS
    offset = (
        row // ROWS * layout.tile_bytes
        + slice_index * layout.unit_bytes
        + chunk % CHUNKS * CHUNK_VALUE_BYTES
        + 16 * lane
        + 4 * step
    )
    return ValuePlace(offset, lane, step, 2 * pair_column + row // 8 % 2, k % 2)


def scale_offset(layout: GemvLayout, row: Any, group: Any) -> Any:
    """Byte of the scale of W[row, group * G : (group + 1) * G] in the packed weight."""
    fmt = FORMATS[layout.format]
    size, of_slice = fmt.scale_dtype.itemsize, SLICE // fmt.group
    slice_index, rest = group // of_slice, group % of_slice
    chunks = np.minimum(CHUNKS, layout.chunks - slice_index * CHUNKS)
    each = 2 // size  # groups a word
    return (
        row // ROWS * layout.tile_bytes
        + slice_index * layout.unit_bytes
        + chunks * CHUNK_VALUE_BYTES
        + rest // each * SCALE_WORD_BYTES
        + row % 8 * 4
        + row // 8 % 2 * 2
        + rest % each * size
    )


def half_word_bits(format: str, pair: int) -> np.ndarray:
    """uint16 [16]: the bits of each code as pair `pair` of a half word."""
    code = np.arange(16, dtype=np.uint16)
    if FORMATS[format].element == "int4":
        return code << np.uint16(4 * pair)
    magnitude, sign = PLACES[pair]
    bits = (code >> 3) << np.uint16(sign)
    for i, place in enumerate(magnitude):
        bits |= (code >> np.uint16(i) & np.uint16(1)) << np.uint16(place)
    return bits


def _code(format: str, halves: Any, pair: int) -> Any:
    """uint8 codes 0..15 of pair `pair` of uint16 half words."""
    if FORMATS[format].element == "int4":
        return (halves >> (4 * pair) & 15).astype(np.uint8)
    magnitude, sign = PLACES[pair]
    code = (halves >> sign & 1) << 3
    for i, place in enumerate(magnitude):
        code |= (halves >> place & 1) << i
    return code.astype(np.uint8)


def _value_words(layout: GemvLayout, values: Any) -> Any:
    """uint32 [tile, chunk, 128]: the words of every lane."""
    xp = _module(values)
    tiles, chunks = layout.tiles, layout.chunks
    # A byte is a pair: two neighbouring k, the even one in its low nibble.
    pairs = xp.zeros((tiles * ROWS, chunks * CHUNK // 2), xp.uint8)
    pairs[: layout.n, : layout.k // 2] = values
    # tile, row half, g, chunk, pair of the chunk
    pairs = pairs.reshape(tiles, 2, 8, chunks, CHUNK // 2)
    if FORMATS[layout.format].group == 16:
        pairs = pairs.reshape(tiles, 2, 8, chunks, 4, 4, 2)  # .., step, t, j // 2
        pairs = pairs.transpose(0, 3, 2, 5, 4, 6, 1)
    else:
        pairs = pairs.reshape(tiles, 2, 8, chunks, 2, 4, 2, 2)  # .., window, t, step of it, j // 2
        pairs = pairs.transpose(0, 3, 2, 5, 4, 6, 7, 1)
    pairs = pairs.reshape(tiles, chunks, ROWS * CHUNK // 8, 4)  # tile, chunk, word, j
    words = xp.zeros(pairs.shape[:3], xp.uint32)
    byte = np.arange(256)
    for j in range(4):
        bits = half_word_bits(layout.format, j).astype(np.uint32)
        words |= xp.asarray(bits[byte & 15] | bits[byte >> 4] << np.uint32(16))[pairs[..., j]]
    return words


def _scale_words(layout: GemvLayout, scales: Any) -> Any:
    """[tile, word, g, row half, groups of a word] in the scale's own dtype."""
    xp = _module(scales)
    fmt = FORMATS[layout.format]
    each = 2 // fmt.scale_dtype.itemsize
    groups = layout.chunks * CHUNK // fmt.group  # int4: K is a multiple of two chunks
    padded = xp.zeros((layout.tiles * ROWS, groups), fmt.scale_dtype)
    padded[: layout.n, : layout.k // fmt.group] = scales
    padded = padded.reshape(layout.tiles, 2, 8, groups // each, each)
    return xp.ascontiguousarray(padded.transpose(0, 3, 2, 1, 4))


def _unit_spans(layout: GemvLayout, s: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Byte ranges of the values and of the scales of slice `s` inside a tile."""
    first, left = s * layout.unit_bytes, layout.chunks_of(s)
    middle = first + left * CHUNK_VALUE_BYTES
    return (first, middle), (middle, middle + left * layout.chunk_scale_bytes)


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
