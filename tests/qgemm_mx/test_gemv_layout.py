"""The packed layout of qgemv_mx without a GPU: its map, its inverse, and the kernel, emulated lane by lane.

The emulation goes the other way round than the packer: from a lane's bytes through `place` to the fragments of
mma.m16n8k16 as the PTX ISA lays them out (section "Matrix Fragments for mma.m16n8k16 with floating point type").
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from qgemm_mx import gemv_layout as gl
from qgemm_mx import probes
from qgemm_mx.formats import FORMATS, decode_scales, encode_bf16
from qgemm_mx.packing import PackedWeight, quantize, reference_matmul, unpack_nibbles

SHAPES = [
    (fmt, n, k)
    for fmt in gl.GEMV_FORMATS
    for n in (1, 7, 40, 1000, 2880)
    for k in (32, 64, 96, 128, 256, 384, 1856, 2688, 2880)
    if k % FORMATS[fmt].group == 0 and n * k <= 2880 * 2880
]


def random_weight(fmt: str, n: int, k: int, seed: int = 0) -> PackedWeight:
    """All codes, and scales in the common range: what a permutation can confuse, it will."""
    rng = np.random.default_rng([seed, n, k])
    spec = FORMATS[fmt]
    values = rng.integers(0, 256, (n, k // 2), np.uint8)
    low, high = {"e8m0": (100, 150), "e4m3": (1, 0x7E), "bf16": (0x3C00, 0x4000)}[spec.scale]
    scales = rng.integers(low, high, (n, k // spec.group)).astype(spec.scale_dtype)
    return PackedWeight(fmt, n, k, values, scales, 0.75 if spec.has_tensor_scale else None)


# ---------------------------------------------------------------- the map


@pytest.mark.parametrize(("fmt", "n", "k"), SHAPES)
def test_pack_is_undone_by_unpack_and_has_the_bytes_that_it_says(fmt, n, k):
    weight = random_weight(fmt, n, k)
    layout = gl.gemv_layout(fmt, n, k)
    packed = gl.pack_host(weight)
    assert packed.dtype == np.uint8 and packed.shape == (layout.nbytes,)
    values, scales = gl.unpack(layout, packed)
    assert np.array_equal(values, weight.values) and np.array_equal(scales, weight.scales)


@pytest.mark.parametrize(("fmt", "unit"), [("mxfp4", 2176), ("nvfp4", 2304), ("int4_g128", 2112)])
def test_unit_bytes(fmt, unit):
    layout = gl.gemv_layout(fmt, 4096, 4096)
    assert layout.unit_bytes == unit and unit % 16 == 0
    assert layout.nbytes == 256 * 16 * unit
    ragged = gl.gemv_layout(fmt, 17, 384)
    assert ragged.nbytes == 2 * (unit + unit // 2) and ragged.chunks_of(1) == 2


@pytest.mark.parametrize("fmt", gl.GEMV_FORMATS)
@pytest.mark.parametrize("pair", range(4))
def test_half_words_of_the_four_pairs_do_not_overlap(fmt, pair):
    bits = gl.half_word_bits(fmt, pair)
    assert len(set(bits.tolist())) == 16
    others = [np.bitwise_or.reduce(gl.half_word_bits(fmt, j)) for j in range(4) if j != pair]
    assert not np.bitwise_or.reduce(bits) & np.bitwise_or.reduce(others)


@pytest.mark.parametrize(
    ("fmt", "n", "k"), [s for s in SHAPES if s[1] in (7, 40) and s[2] in (32, 96, 384, 2688, 2880)]
)
def test_every_weight_stands_where_the_map_says(fmt, n, k):
    weight = random_weight(fmt, n, k)
    layout = gl.gemv_layout(fmt, n, k)
    packed = gl.pack_host(weight)
    row, column = np.arange(n)[:, None], np.arange(k)[None, :]
    place = gl.value_place(layout, row, column)
    words = packed[place.offset[..., None] + np.arange(4)].view(np.uint32)[..., 0]
    half = (words >> (16 * place.half).astype(np.uint32)).astype(np.uint16)
    codes = np.zeros((n, k), np.uint8)
    for j in range(4):
        table = gl.half_word_bits(fmt, j)
        found = half & np.bitwise_or.reduce(table)
        code = np.argmax(found[..., None] == table, axis=-1)
        codes = np.where(place.pair == j, code, codes)
    assert np.array_equal(codes, unpack_nibbles(weight.values))

    size = FORMATS[fmt].scale_dtype.itemsize
    at = gl.scale_offset(layout, row, np.arange(k // FORMATS[fmt].group)[None, :])
    scales = packed[at[..., None] + np.arange(size)].view(FORMATS[fmt].scale_dtype)[..., 0]
    assert np.array_equal(scales, weight.scales)


def test_rows_and_k_that_are_not_there_are_zeros():
    weight = random_weight("mxfp4", 1, 96)
    layout = gl.gemv_layout("mxfp4", 1, 96)
    packed = gl.pack_host(weight)
    mine = gl.value_place(layout, np.zeros(96, int), np.arange(96))
    rest = packed.copy()
    rest[(mine.offset[:, None] + np.arange(4)).ravel()] = 0
    rest[gl.scale_offset(layout, np.zeros(3, int), np.arange(3))] = 0
    assert packed.any() and not rest.any()


# ---------------------------------------------------------------- the kernel's arithmetic


def place(fmt: str, q: np.ndarray) -> np.ndarray:
    """uint32 words [...] -> BF16 pairs uint32 [..., 4]; e2m1 elements times 2^-126."""
    q = q.astype(np.uint32)
    if FORMATS[fmt].element == "int4":
        nibbles = np.stack([(q >> np.uint32(4 * j)) & 0x000F000F for j in range(4)], -1)
        biased = nibbles ^ 0x43084308  # 128 + (code + 8)
        low, high = ((bf16(b) - 136).astype(np.float32) for b in (biased & 0xFFFF, biased >> 16))
        return encode_bf16(low).astype(np.uint32) | encode_bf16(high).astype(np.uint32) << 16
    mask = np.uint32(0x81C081C0)
    shift = [(q << np.uint32(s)) & mask for s in (0, 3, 6)]
    last = ((q << 1) & 0x80008000) | ((q >> 4) & 0x00C000C0) | ((q >> 5) & 0x01000100)
    return np.stack([*shift, last.astype(np.uint32)], -1)


def bf16(bits: np.ndarray) -> np.ndarray:
    """float64 values of BF16 bit patterns, subnormals included."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


G, T = np.divmod(np.arange(32), 4)  # of a lane


def emulate(layout: gl.GemvLayout, packed: np.ndarray, x: np.ndarray, tokens: int) -> np.ndarray:
    """float64 [tokens, N] without tensor scale: what the kernel sums, in the kernel's own order of operands.

    x float32 [M, K] of BF16 values; scales in the common range.
    """
    spec = FORMATS[layout.format]
    int4 = spec.element == "int4"
    of_set = 8 // tokens if tokens < 8 and not int4 else 1  # groups that stand in columns of B
    set_k = of_set * spec.group
    window = 16 if spec.group == 16 else 32
    units = packed.reshape(layout.tiles, layout.tile_bytes)
    padded = np.zeros((max(16, tokens), layout.slices * gl.SLICE))
    padded[: len(x), : layout.k] = x
    if not int4:
        padded *= 2.0**64  # exact, inside BF16
    y = np.zeros((layout.tiles, 16, max(16, tokens)))
    for s in range(layout.slices):
        left = layout.chunks_of(s)
        unit = units[:, s * layout.unit_bytes :]
        chunks = np.zeros((layout.tiles, 4, 32, 4), np.uint32)
        stored = np.ascontiguousarray(unit[:, : left * 512]).view(np.uint32)
        chunks[:, :left] = stored.reshape(layout.tiles, left, 32, 4)
        last = left * (512 + layout.chunk_scale_bytes)
        stored = np.ascontiguousarray(unit[:, left * 512 : last]).view(np.uint32)
        stored = stored.reshape(layout.tiles, -1, 8)  # tile, word, lane group
        scale_words = np.zeros((layout.tiles, layout.chunk_scale_bytes * 4 // 32, 8), np.uint32)
        scale_words[:, : stored.shape[1]] = stored

        pairs = place(layout.format, chunks)  # tile, chunk, lane, step of it, register of A
        pairs = pairs.transpose(0, 1, 3, 2, 4).reshape(layout.tiles, 16, 32, 4)
        a = np.zeros((layout.tiles, 16, 16, 16))  # tile, step, row, k of the step
        for register in range(4):
            for half in range(2):
                bits = (pairs[..., register] >> np.uint32(16 * half)) & 0xFFFF
                a[:, :, G + 8 * (register % 2), 2 * T + half + 8 * (register // 2)] = bf16(bits)

        for column_tile in range(-(-tokens // 8)):
            for first in range(0, gl.SLICE, set_k):
                part = np.zeros((layout.tiles, 16, 8))
                for k0 in range(first, first + set_k, window):
                    token = G // of_set + 8 * column_tile
                    # A column has its own group's k, and zeros elsewhere.
                    own = G % of_set == (k0 - first) // spec.group
                    for u in range(window // 16):
                        b = np.zeros((16, 8))
                        for register in range(2):
                            for half in range(2):
                                mine = window // 4 * T + 4 * u + 2 * register + half
                                x_of = padded[token, s * gl.SLICE + k0 + mine]
                                b[2 * T + half + 8 * register, G] = np.where(own, x_of, 0)
                        part += a[:, k0 // 16 + u] @ b
                number = first // set_k
                for half in range(2):
                    for c in range(2):
                        if int4:
                            word, byte = np.full(32, number), 0
                        elif of_set >= 2:
                            word, byte = number * (of_set // 2) + T % (of_set // 2), c
                        else:
                            word, byte = np.full(32, number // 2), number % 2
                        code = scale_words[:, word, G] >> np.uint32(16 * half + 8 * byte)
                        code = (code & (0xFFFF if int4 else 0xFF)).astype(spec.scale_dtype)
                        scale = decode_scales(layout.format, code).astype(np.float64)
                        scale *= 1.0 if int4 else 2.0**62
                        column = 2 * T + c
                        values = scale * part[:, G + 8 * half, column]
                        tokens_of = column // of_set + 8 * column_tile
                        np.add.at(y, (slice(None), G + 8 * half, tokens_of), values)
    return y.reshape(layout.tiles * 16, -1)[: layout.n, :tokens].T


def bf16_activations(m: int, k: int, seed: int = 1) -> np.ndarray:
    x = np.random.default_rng([seed, m, k]).normal(0, 1, (m, k)).astype(np.float32)
    return (encode_bf16(x).astype(np.uint32) << 16).view(np.float32)


def agrees(y: np.ndarray, x: np.ndarray, weight: PackedWeight) -> bool:
    truth = reference_matmul(x, weight)
    scale = reference_matmul(np.abs(x), _magnitudes(weight))
    return bool((np.abs(y * weight.row_tensor_scale - truth) <= 1e-12 * scale).all())


def _magnitudes(weight: PackedWeight) -> PackedWeight:
    if weight.spec.element == "int4":  # two's complement has no sign bit to clear
        codes = np.abs(weight.spec.element_values).astype(np.uint8)
        codes = np.minimum(codes[unpack_nibbles(weight.values)], 7)
        values = codes[:, 0::2] | codes[:, 1::2] << 4
    else:
        values = weight.values & 0x77
    return dataclasses.replace(weight, values=values)


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    ("fmt", "n", "k"), [s for s in SHAPES if s[1] in (1, 40) and s[2] not in (64, 256, 2880)]
)
def test_the_emulated_kernel_agrees_with_the_oracle(fmt, n, k, tokens):
    weight, x = random_weight(fmt, n, k), bf16_activations(tokens, k)
    y = emulate(gl.gemv_layout(fmt, n, k), gl.pack_host(weight), x, tokens)
    assert agrees(y, x, weight)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_the_emulated_kernel_agrees_on_a_whole_layer(fmt):
    n, k = 2880, 2880
    weight = quantize(np.random.default_rng(4).normal(0, 0.02, (n, k)).astype(np.float32), fmt)
    x = bf16_activations(1, k)
    y = emulate(gl.gemv_layout(fmt, n, k), gl.pack_host(weight), x, 1)
    assert agrees(y, x, weight)


@pytest.mark.parametrize("fmt", gl.GEMV_FORMATS)
def test_probes_are_exact_in_the_emulation(fmt):
    n, k, m = 33, 640, 3
    for probe in (
        probes.one_hot(fmt, n, k, m), probes.ramp(fmt, n, k, m), probes.prime_block_scales(fmt, n, k, m),
        probes.shard_scales(fmt, n, k, m) if fmt == "nvfp4" else probes.ramp(fmt, n, k, m),
    ):  # fmt: skip
        layout = gl.gemv_layout(fmt, n, k)
        y = emulate(layout, gl.pack_host(probe.weight), probe.x, 4)[:m]
        result = probes.check(probe, y * probe.weight.row_tensor_scale)
        assert result.passed, result.detail


def test_the_emulation_sees_a_moved_nibble_and_a_moved_scale():
    weight, x = random_weight("nvfp4", 24, 320), bf16_activations(2, 320)
    layout = gl.gemv_layout("nvfp4", 24, 320)
    for byte in (17, layout.unit_bytes - 40):
        packed = gl.pack_host(weight).copy()
        packed[[byte, byte + 4]] = packed[[byte + 4, byte]]
        assert packed[byte] != packed[byte + 4]
        assert not agrees(emulate(layout, packed, x, 2), x, weight)


def test_placed_elements_are_the_element_times_two_to_the_minus_126():
    for pair in range(4):
        words = gl.half_word_bits("mxfp4", pair).astype(np.uint32)
        values = bf16(place("mxfp4", words)[:, pair] & 0xFFFF)
        assert np.array_equal(values * 2.0**126, FORMATS["mxfp4"].element_values)
        assert np.array_equal(np.signbit(values), np.signbit(FORMATS["mxfp4"].element_values))
        words = gl.half_word_bits("int4_g128", pair).astype(np.uint32)
        values = bf16(place("int4_g128", words)[:, pair] & 0xFFFF)
        assert np.array_equal(values, FORMATS["int4_g128"].element_values)


def test_the_same_bits_are_placed_in_fp16_at_two_to_the_minus_14():
    """The bit order was made for BF16; FP16 has its sign and the place of a magnitude elsewhere."""
    sign, magnitude = np.uint32(0x80008000), np.uint32(0x0E000E00)
    forms = (
        lambda q: (q & sign) | ((q << 3) & magnitude),
        lambda q: ((q << 3) & sign) | ((q << 6) & magnitude),
        lambda q: ((q << 6) & sign) | ((q << 9) & magnitude),
        lambda q: ((q << 1) & sign) | ((q >> 1) & 0x06000600) | ((q >> 2) & 0x08000800),
    )
    for pair, form in enumerate(forms):
        words = gl.half_word_bits("nvfp4", pair).astype(np.uint32)
        words |= words[::-1] << 16  # both halves, with different codes
        placed = form(words).astype(np.uint32)
        low, high = (
            (h.astype(np.uint16)).view(np.float16) for h in (placed & 0xFFFF, placed >> 16)
        )
        elements = FORMATS["nvfp4"].element_values
        assert np.array_equal(low.astype(np.float32) * 2.0**14, elements)
        assert np.array_equal(high.astype(np.float32) * 2.0**14, elements[::-1])


# ---------------------------------------------------------------- what is refused, and what is wide


@pytest.mark.parametrize(
    ("fmt", "codes", "wide"),
    [
        ("mxfp4", [0, 127, 192], False), ("mxfp4", [0, 193], True), ("mxfp4", [255], True),
        ("nvfp4", [0, 1, 0x7E], False), ("nvfp4", [0x7F], True), ("nvfp4", [0x80], True),
        ("nvfp4", [0xFF], True), ("int4_g128", [0xFFFF], False),
    ],
)  # fmt: skip
def test_scales_outside_the_common_range_are_wide(fmt, codes, wide):
    assert gl.is_wide(fmt, np.array([codes], FORMATS[fmt].scale_dtype)) is wide


@pytest.mark.parametrize(
    ("fmt", "k", "message"),
    [
        ("mxfp4", 40, "K=40 is not a multiple of the mxfp4 scale group 32"),
        ("nvfp4", 48, "K=48 is not a multiple of 32, .*scale group 16"),
        ("int4_g128", 2880, "K=2880 is not a multiple of the int4_g128 scale group 128"),
        ("int4_g64", 128, "int4_g64' has no qgemv_mx layout"),
    ],
)
def test_a_k_or_a_format_without_a_layout_is_named(fmt, k, message):
    with pytest.raises(ValueError, match=message):
        gl.gemv_layout(fmt, 16, k)


def test_arrays_of_another_shape_or_type_are_named():
    layout = gl.gemv_layout("mxfp4", 16, 64)
    with pytest.raises(ValueError, match=r"values is uint8 \[16, 31\], not uint8 \[16, 32\]"):
        gl.pack(layout, np.zeros((16, 31), np.uint8), np.zeros((16, 2), np.uint8))
    with pytest.raises(ValueError, match="scales is uint16"):
        gl.pack(layout, np.zeros((16, 32), np.uint8), np.zeros((16, 2), np.uint16))
    with pytest.raises(ValueError, match=r"packed is uint8 \[3\], not uint8 \[544\]"):
        gl.unpack(layout, np.zeros(3, np.uint8))
