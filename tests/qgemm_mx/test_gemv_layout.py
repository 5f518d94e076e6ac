"""The packed layout of qgemv_mx without a GPU: its map, its inverse, and the kernels, emulated.

The emulation of qgemv_mx goes the other way round than the packer: from a lane's bytes through `place` to the
fragments of mma.m16n8k16 as the PTX ISA lays them out (section "Matrix Fragments for mma.m16n8k16 with floating
point type"). The packing kernel has no device code but its indices, so a C++ compiler builds it for the host.
"""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from qgemm_mx import gemv_layout as gl
from qgemm_mx import probes
from qgemm_mx.formats import E4M3_VALUES, FORMATS, encode_bf16
from qgemm_mx.packing import (
    PackedWeight,
    dequantize,
    quantize,
    reference_matmul,
    unpack_nibbles,
)

SHAPES = [
    (fmt, n, k)
    for fmt in gl.GEMV_FORMATS
    for n in (1, 7, 40, 1000, 2880)
    for k in (32, 64, 96, 128, 256, 384, 1856, 2688, 2880)
    if k % FORMATS[fmt].group == 0 and n * k <= 2880 * 2880
]


def random_weight(
    fmt: str, n: int, k: int, seed: int = 0, scales: np.ndarray | None = None
) -> PackedWeight:
    """All codes, and scales in the common range (or of those given): what can be confused, will be."""
    rng = np.random.default_rng([seed, n, k])
    spec = FORMATS[fmt]
    values = rng.integers(0, 256, (n, k // 2), np.uint8)
    if scales is None:
        low, high = {"e8m0": (100, 150), "e4m3": (1, 0x7F), "bf16": (0x3C00, 0x4000)}[spec.scale]
        scales = np.arange(low, high)
    scales = rng.choice(scales, (n, k // spec.group)).astype(spec.scale_dtype)
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


@pytest.mark.parametrize(
    ("fmt", "scales", "unit"),
    [("mxfp4", 128, 2176), ("nvfp4", 256, 2304), ("int4_g128", 64, 2112)],
)
def test_unit_bytes(fmt, scales, unit):
    layout = gl.gemv_layout(fmt, 4096, 4096)
    assert (layout.unit_scale_bytes, layout.unit_bytes) == (scales, unit) and unit % 16 == 0
    assert layout.nbytes == 256 * 16 * unit
    ragged = gl.gemv_layout(fmt, 17, 384)
    assert ragged.chunks_of(1) == 2 and ragged.tile_bytes == 2 * scales + 6 * 512
    assert ragged.nbytes == 2 * ragged.tile_bytes + 2 * 512


def test_every_word_is_one_set_of_pairs_and_the_other_way_round():
    words = np.random.default_rng(0).integers(0, 2**32, 1 << 18, np.uint32)
    words[:33] = np.append(np.uint32(1) << np.arange(32, dtype=np.uint32), 0)
    assert np.array_equal(gl.encode(gl.place(words)), words)
    pairs = np.random.default_rng(1).integers(0, 2**32, (1 << 18, 4), np.uint32)
    pairs &= np.uint32(gl.PAIR_MASK)
    assert np.array_equal(gl.place(gl.encode(pairs)), pairs)


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
    if fmt == "int4_g128":
        codes = words >> (4 * place.pair + 16 * place.half).astype(np.uint32) & 15
    else:
        pair = np.take_along_axis(gl.place(words), place.pair[..., None], -1)[..., 0]
        bits = pair >> (16 * place.half).astype(np.uint32)
        codes = bits >> 6 & 7 | bits >> 12 & 8
    assert np.array_equal(codes, unpack_nibbles(weight.values))

    size = FORMATS[fmt].scale_dtype.itemsize
    at = gl.scale_offset(layout, row, np.arange(k // FORMATS[fmt].group)[None, :])
    scales = packed[at[..., None] + np.arange(size)].view(FORMATS[fmt].scale_dtype)[..., 0]
    stored = weight.scales
    if fmt == "mxfp4":
        stored = stored + np.uint8(62)  # wraps
    elif fmt == "nvfp4":
        stored = gl.E5M3_OF_E4M3[stored]
    assert np.array_equal(scales, stored)


@pytest.mark.parametrize("fmt", gl.GEMV_FORMATS)
def test_k_stands_in_the_order_of_the_instruction(fmt):
    """Pair j of step s of lane 4g + t is register j of the A fragment, in every format."""
    layout = gl.gemv_layout(fmt, 16, 256)
    chunk, step, j = (np.arange(4).reshape(shape) for shape in ((4, 1, 1, 1), (4, 1, 1), (4, 1)))
    k = 64 * chunk + 16 * step + 2 * T + 8 * (j // 2)
    for low in range(2):
        place = gl.value_place(layout, G + 8 * (j % 2), k + low)
        offset = layout.unit_scale_bytes + 512 * chunk + 16 * np.arange(32) + 4 * step
        assert (place.offset == offset).all()
        assert (place.pair == j).all() and (place.half == low).all()


@pytest.mark.parametrize("fmt", gl.GEMV_FORMATS)
def test_rows_k_and_groups_that_are_not_there_are_zeros_with_scale_code_zero(fmt):
    n, k = 1, 128 if fmt == "int4_g128" else 96
    layout = gl.gemv_layout(fmt, n, k)
    packed = gl.pack_host(random_weight(fmt, n, k))
    assert packed.any()
    mine = gl.value_place(layout, np.zeros(k, int), np.arange(k))
    rest = packed.copy()
    rest[(mine.offset[:, None] + np.arange(4)).ravel()] = 0
    groups, size = k // FORMATS[fmt].group, FORMATS[fmt].scale_dtype.itemsize
    at = gl.scale_offset(layout, np.zeros(groups, int), np.arange(groups))
    empty = 62 if fmt == "mxfp4" else 0
    rest[at[:, None] + np.arange(size)] = empty
    assert (rest[: layout.unit_scale_bytes] == empty).all()
    assert not rest[layout.unit_scale_bytes :].any()


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_every_scale_code_comes_back(fmt):
    scales = np.arange(256, dtype=np.uint8).reshape(16, -1)
    k = 16 * FORMATS[fmt].group
    layout = gl.gemv_layout(fmt, 16, k)
    packed = gl.pack(layout, np.zeros((16, k // 2), np.uint8), scales)
    assert np.array_equal(gl.unpack(layout, packed)[1], scales & (0xFF if fmt == "mxfp4" else 0x7F))


# ---------------------------------------------------------------- what nvfp4 scales become


def test_every_e4m3_scale_is_an_e5m3_code_times_the_powers_that_the_kernels_rely_on():
    codes = gl.E5M3_OF_E4M3
    size = np.abs(E4M3_VALUES.astype(np.float64))
    nan, zero = np.isnan(size), size == 0
    assert codes.dtype == np.uint8 and (codes[nan] == 255).all() and (codes[zero] == 0).all()
    assert (codes[~nan] < 255).all()
    fp32 = (codes.astype(np.uint32) << 20).view(np.float32).astype(np.float64)
    assert np.array_equal(fp32[~nan] * 2.0**105, size[~nan])
    as_bf16 = bf16((codes.astype(np.uint16) << 4) + np.uint16(0x7000))
    assert np.array_equal(as_bf16[~nan & ~zero] * 2.0**-119, size[~nan & ~zero])
    assert np.isnan(as_bf16[nan]).all() and np.isfinite(as_bf16[~nan]).all()
    assert np.unique(codes).size == 128


def test_signs_and_zeros_of_nvfp4_scales_are_folded_into_the_elements():
    """Every scale code over every element, both places of a byte."""
    scales = np.repeat(np.arange(256, dtype=np.uint8), 2).reshape(64, 8)
    values = np.tile(np.arange(16, dtype=np.uint8) * 0x11, (64, 4))
    values[:, 1::2] ^= 0x30  # another element beside it
    layout = gl.gemv_layout("nvfp4", 64, 128)
    packed = gl.pack(layout, values, scales)
    found = gl.unpack(layout, packed)
    assert np.array_equal(found[1], scales & 0x7F)
    assert np.array_equal(gl.pack(layout, *found), packed)
    codes, was = unpack_nibbles(found[0]), unpack_nibbles(values)
    scale = np.repeat(scales, 16, axis=1)
    assert np.array_equal(codes & 8, was & 8 ^ scale >> 4 & 8)
    assert np.array_equal(codes & 7, np.where(scale & 0x7F == 0, 0, was & 7))
    before, after = (
        dequantize(PackedWeight("nvfp4", 64, 128, v, s, 1.0), np.float64)
        for v, s in ((values, scales), found)
    )
    assert np.array_equal(before, after, equal_nan=True)
    number = ~np.isnan(before)
    assert np.array_equal(np.signbit(before[number]), np.signbit(after[number]))


# ---------------------------------------------------------------- the packing kernel, on the host

HOST_KERNEL = """
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
static void atomicMax(int* at, int value) { if (value > *at) *at = value; }
static void atomicMin(int* at, int value) { if (value < *at) *at = value; }
static struct { int x; } blockIdx, blockDim, threadIdx;
#include "SOURCE"
extern "C" void launch(decltype(&pack_gemv_mxfp4) kernel, int blocks, const uint8_t* values, const void* scales,
                       uint32_t* packed, int32_t* status, int n, int k, int64_t value_stride, int64_t scale_stride) {
  for (blockDim.x = 256, blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < 256; ++threadIdx.x)
      kernel(values, scales, packed, status, n, k, value_stride, scale_stride);
}
"""


@pytest.fixture(scope="module")
def host_kernel(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler to build the packing kernel for the host")
    folder = tmp_path_factory.mktemp("pack_gemv")
    cuda = Path(gl.__file__).parent / "cuda" / "pack_gemv.cu"
    (folder / "host.cpp").write_text(HOST_KERNEL.replace("SOURCE", str(cuda)))
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", "host.so", "host.cpp"],
        cwd=folder, check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(folder / "host.so"))


def pack_with(kernel: ctypes.CDLL, layout: gl.GemvLayout, weight: PackedWeight) -> tuple:
    """Packed bytes and the status, from strided arrays, by as many blocks as `pack_weight` launches and one more."""

    def strided(array, pad):
        wide = np.full((len(array), array.shape[1] + pad), 0xA5, array.dtype)
        wide[:, : array.shape[1]] = array
        return wide

    values, scales = strided(weight.values, 5), strided(weight.scales, 3)
    packed = np.full(layout.nbytes + 64, 0xA5, np.uint8)
    status = np.array([0, 0, 255, 77], np.int32)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (values, scales, packed, status)]
    strides = [ctypes.c_int64(a.shape[1]) for a in (values, scales)]
    entry = getattr(kernel, f"pack_gemv_{layout.format}")
    kernel.launch(entry, layout.nbytes // 1024 + 2, *pointers, layout.n, layout.k, *strides)
    assert (packed[layout.nbytes :] == 0xA5).all()
    assert status[3] == 77
    return packed[: layout.nbytes], status[:3].tolist()


def status_of(weight: PackedWeight) -> list[int]:
    least, largest = gl.code_range(weight.format, weight.scales)
    return [int(gl.is_wide(weight.format, weight.scales)), largest, least]


@pytest.mark.parametrize(
    ("fmt", "n", "k"), [s for s in SHAPES if s[1] in (1, 7, 40, 1000) and s[2] != 2880]
)
def test_the_packing_kernel_writes_the_same_bytes(host_kernel, fmt, n, k):
    weight, layout = random_weight(fmt, n, k), gl.gemv_layout(fmt, n, k)
    packed, status = pack_with(host_kernel, layout, weight)
    assert np.array_equal(packed, gl.pack_host(weight))
    assert status == status_of(weight) and not status[0]


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_the_packing_kernel_writes_the_same_bytes_for_all_scale_codes(host_kernel, fmt):
    weight = random_weight(fmt, 40, 384, scales=np.arange(256))
    packed, status = pack_with(host_kernel, gl.gemv_layout(fmt, 40, 384), weight)
    assert np.array_equal(packed, gl.pack_host(weight)) and status == status_of(weight)


@pytest.mark.parametrize(
    ("fmt", "code"), [(f, c) for f in ("mxfp4", "nvfp4") for c in (0, 0x7E, 0x7F, 192, 193, 255)]
)
def test_the_packing_kernel_says_which_weight_is_wide_and_the_range_of_its_codes(
    host_kernel, fmt, code
):
    weight = random_weight(fmt, 17, 320)
    scales = weight.scales.copy()
    scales[16, -1] = code
    weight = dataclasses.replace(weight, scales=scales)
    packed, status = pack_with(host_kernel, gl.gemv_layout(fmt, 17, 320), weight)
    assert np.array_equal(packed, gl.pack_host(weight)) and status == status_of(weight)


# ---------------------------------------------------------------- the kernel's arithmetic


def placed(fmt: str, half: bool, q: np.ndarray) -> np.ndarray:
    """float64 [..., 4, 2], the pairs of words [...] as `place` of the kernel leaves them, low half word first."""
    if FORMATS[fmt].element == "int4":
        # A power of two whose last place is one, plus code + 8, minus that.
        nibbles = np.stack([q >> np.uint32(4 * j) & 0x000F000F for j in range(4)], -1)
        pairs = nibbles ^ np.uint32(0x64086408 if half else 0x43084308)
        bias = 1024 + 8 if half else 128 + 8
    else:
        pairs, bias = gl.place(q), 0
        if half:
            pairs = pairs & np.uint32(0x80008000) | pairs << 3 & np.uint32(0x0E000E00)
    halves = np.stack([pairs & 0xFFFF, pairs >> 16], -1).astype(np.uint16)
    return (halves.view(np.float16).astype(np.float64) if half else bf16(halves)) - bias


def bf16(bits: np.ndarray) -> np.ndarray:
    """float64 values of BF16 bit patterns, subnormals included."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


G, T = np.divmod(np.arange(32), 4)  # of a lane


def scale_of(fmt: str, code: np.ndarray, half: bool, wide: bool, exact: bool) -> np.ndarray:
    """float64, `scale_of` of the kernel: stored codes as the FP32 that they become."""
    code = code.astype(np.uint32)
    if fmt == "int4_g128":
        return bf16(code)
    if fmt == "mxfp4":
        if not exact:
            return (code << 23).view(np.float32).astype(np.float64)
        code = code - np.uint32(62) & 255
        bits = np.where(code == 0, 0x00400000, np.where(code == 255, 0x7FC00000, code << 23))
        scale = bits.astype(np.uint32).view(np.float32).astype(np.float64)
        return scale * 2.0**62 if half and not wide else scale
    bits = code << 20
    if not exact:
        assert (code < 255).all()
        return (bits.view(np.float32) * np.float32(2.0**112)).astype(np.float64)
    bits = np.where(code == 255, np.uint32(0x7FC00000), bits)
    return (bits.view(np.float32) * np.float32(2.0 ** (112 if half else 86))).astype(np.float64)


def finish(fmt: str, half: bool, wide: bool) -> float:
    """The factor of `Result`, but for the tensor scale."""
    if fmt == "int4_g128":
        return 1.0
    if half and wide:
        return 2.0**-7 if fmt == "nvfp4" else 1.0
    return {"mxfp4": 2.0**-48 if half else 1.0, "nvfp4": 2.0**7 if half else 2.0**19}[fmt]


def takes_exact_path(fmt: str, x: np.ndarray, half: bool, wide: bool) -> bool:
    """Whether `prepare` sends a slice with activations x there."""
    if fmt == "int4_g128" or wide or half:
        return wide and fmt != "int4_g128"
    large, common = (2.0**62, 2.0**-30) if fmt == "mxfp4" else (2.0**26, 2.0**-66)
    greatest = np.abs(x).max()
    return bool(greatest >= large or 0 < greatest < common)


def emulate(
    layout: gl.GemvLayout,
    packed: np.ndarray,
    x: np.ndarray,
    tokens: int,
    half: bool = False,
    wide: bool = False,
) -> np.ndarray:
    """float64 [M, N] without tensor scale: what the kernel sums, in the kernel's own order of operands.

    x float32 [M, K] of BF16 (half: FP16) values, M at most `tokens`, the tokens of the entry; wide as `is_wide` says.
    """
    fmt, spec = layout.format, FORMATS[layout.format]
    int4 = spec.element == "int4"
    of_set = 8 // tokens if tokens < 8 and not int4 else 1  # groups that share the columns of B
    set_k = of_set * spec.group
    m = len(x)
    padded = np.zeros((16, layout.slices * gl.SLICE), np.float32)
    padded[:, : layout.k] = x[np.minimum(np.arange(16), m - 1)]  # no token: the last one
    y = np.zeros((layout.tiles, 16, 16))
    for s in range(layout.slices):
        # Four chunks of every unit, those beyond K from what follows.
        at = np.arange(layout.tiles) * layout.tile_bytes + s * layout.unit_bytes
        units = packed[at[:, None] + np.arange(layout.unit_bytes)]
        block = np.ascontiguousarray(units[:, : layout.unit_scale_bytes]).view(np.uint32)
        block = block.reshape(layout.tiles, 8, -1)  # tile, lane group, word
        words = np.ascontiguousarray(units[:, layout.unit_scale_bytes :]).view(np.uint32)

        held = padded[:, s * gl.SLICE : (s + 1) * gl.SLICE]
        exact = takes_exact_path(fmt, held, half, wide)
        if not (int4 or half or exact):
            held = held * np.float32(2.0**64 if fmt == "mxfp4" else 2.0**100)
            assert np.isfinite(held).all()  # inside BF16

        pairs = placed(fmt, half, words.reshape(layout.tiles, 4, 32, 4))
        if exact and not half:
            pairs *= 2.0**126
        # tile, chunk, lane, step of it, register of A, half word -> tile, step, lane, ..
        pairs = pairs.transpose(0, 1, 3, 2, 4, 5).reshape(layout.tiles, 16, 32, 4, 2)
        a = np.zeros((layout.tiles, 16, 16, 16))  # tile, step, row, k of the step
        for register in range(4):
            for low in range(2):
                k_of_step = 2 * T + low + 8 * (register // 2)
                a[:, :, G + 8 * (register % 2), k_of_step] = pairs[..., register, low]

        for column_tile in range(-(-tokens // 8)):
            token = G // of_set + 8 * column_tile  # of the column g, for which a lane holds B
            for index in range(gl.SLICE // set_k):
                for group in range(of_set):
                    # An accumulator: the weights of one group, the activations of each column's own.
                    part = np.zeros((layout.tiles, 16, 8))
                    for step in range(spec.group // 16):
                        first = index * set_k + G % of_set * spec.group + 16 * step
                        b = np.zeros((16, 8))
                        for register in range(2):
                            for low in range(2):
                                k_of_step = 2 * T + low + 8 * register
                                b[k_of_step, G] = held[token, first + k_of_step]
                        number = index * of_set + group
                        part += a[:, number * spec.group // 16 + step] @ b
                    if exact and half:
                        part *= 2.0**14
                    for row_half in range(2):
                        for c in range(2):
                            column = 2 * T + c
                            lane = np.flatnonzero(column % of_set == group)
                            if int4 or of_set == 1:
                                word, byte = index if int4 else index // 2, index % 2
                            else:
                                word, byte = index * (of_set // 2) + T[lane] % (of_set // 2), c
                            code = block[:, G[lane], word] >> np.uint32(16 * row_half)
                            code = code & 0xFFFF if int4 else code >> np.uint32(8 * byte) & 0xFF
                            row, column = G[lane] + 8 * row_half, column[lane]
                            values = scale_of(fmt, code, half, wide, exact) * part[:, row, column]
                            of_token = column // of_set + 8 * column_tile
                            np.add.at(y, (slice(None), row, of_token), values)
    return y.reshape(layout.tiles * 16, -1)[: layout.n, :m].T * finish(fmt, half, wide)


def bf16_activations(m: int, k: int, seed: int = 1) -> np.ndarray:
    x = np.random.default_rng([seed, m, k]).normal(0, 1, (m, k)).astype(np.float32)
    return (encode_bf16(x).astype(np.uint32) << 16).view(np.float32)


def fp16_activations(m: int, k: int) -> np.ndarray:
    x = np.random.default_rng([2, m, k]).normal(0, 1, (m, k))
    return x.astype(np.float16).astype(np.float32)


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
    # Only an e4m3 code has a sign, which no scale that was computed has.
    scales = weight.scales & 0x7F if weight.spec.scale == "e4m3" else weight.scales
    return dataclasses.replace(weight, values=values, scales=scales)


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    ("fmt", "n", "k"), [s for s in SHAPES if s[1] in (1, 40) and s[2] not in (64, 256, 2880)]
)
def test_the_emulated_kernel_agrees_with_the_oracle(fmt, n, k, tokens):
    weight, x = random_weight(fmt, n, k), bf16_activations(tokens, k)
    y = emulate(gl.gemv_layout(fmt, n, k), gl.pack_host(weight), x, tokens)
    assert agrees(y, x, weight)


@pytest.mark.parametrize("fmt", gl.GEMV_FORMATS)
@pytest.mark.parametrize("tokens", [1, 4, 8, 16])
@pytest.mark.parametrize("half", [False, True], ids=["bf16", "fp16"])
@pytest.mark.parametrize("wide", [False, True], ids=["common", "wide"])
def test_the_emulated_kernel_agrees_with_codes_to_the_end_of_their_range(fmt, tokens, half, wide):
    codes = {
        ("mxfp4", False): [0, 1, 2, 65, 66, 127, 191, 192],
        ("mxfp4", True): [0, 1, 65, 127, 192, 193, 194, 220, 254],
        ("nvfp4", False): [0, 1, 7, 8, 0x7E, 0x80, 0x81, 0x88, 0xFE],
    }.get((fmt, wide))
    n, k = 20, 384
    weight = random_weight(fmt, n, k, scales=None if codes is None else np.array(codes))
    wide = wide and codes is not None
    assert gl.is_wide(fmt, weight.scales) is wide
    x = (fp16_activations if half else bf16_activations)(max(1, tokens - 1), k)
    y = emulate(gl.gemv_layout(fmt, n, k), gl.pack_host(weight), x, tokens, half, wide)
    assert agrees(y, x, weight)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("half", [False, True], ids=["bf16", "fp16"])
def test_a_scale_that_is_not_a_number_reaches_its_row_alone(fmt, half):
    clean = random_weight(fmt, 20, 384)
    scales = clean.scales.copy()
    scales[3, 5] = 0xFF
    weight = dataclasses.replace(clean, scales=scales)
    x = (fp16_activations if half else bf16_activations)(2, 384)
    y = emulate(gl.gemv_layout(fmt, 20, 384), gl.pack_host(weight), x, 2, half, True)
    assert np.isnan(y[:, 3]).all() and np.isfinite(np.delete(y, 3, axis=1)).all()
    y[:, 3] = reference_matmul(x, clean)[:, 3] / clean.row_tensor_scale[3]
    assert agrees(y, x, clean)


@pytest.mark.parametrize(("fmt", "large", "small"), [("mxfp4", 62, -31), ("nvfp4", 26, -67)])
@pytest.mark.parametrize("tokens", [2, 16])
def test_activations_out_of_range_take_the_exact_path_slice_by_slice(fmt, large, small, tokens):
    n, k = 20, 832
    weight, x = random_weight(fmt, n, k), bf16_activations(tokens, k)
    x[:, :256] = np.sign(x[:, :256]) * 2.0**small
    x[0, 300] = 2.0**large
    x[:, 768:] = 0
    paths = [takes_exact_path(fmt, x[:, s : s + 256], False, False) for s in range(0, k, 256)]
    assert paths == [True, True, False, False]
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
    for byte in (17, layout.unit_scale_bytes + 17):  # a scale, and four bits of a value
        packed = gl.pack_host(weight).copy()
        packed[[byte, byte + 4]] = packed[[byte + 4, byte]]
        assert packed[byte] != packed[byte + 4]
        assert not agrees(emulate(layout, packed, x, 2), x, weight)


@pytest.mark.parametrize("fmt", gl.GEMV_FORMATS)
@pytest.mark.parametrize("half", [False, True], ids=["bf16", "fp16"])
def test_placed_elements_are_the_element_times_a_power_of_two(fmt, half):
    n, k = 16, 256
    weight, layout = random_weight(fmt, n, k), gl.gemv_layout(fmt, n, k)
    row, column = np.arange(n)[:, None], np.arange(k)[None, :]
    at = gl.value_place(layout, row, column)
    words = gl.pack_host(weight)[at.offset[..., None] + np.arange(4)].view(np.uint32)[..., 0]
    values = placed(fmt, half, words)[row, column, at.pair, at.half]
    elements = FORMATS[fmt].element_values[unpack_nibbles(weight.values)]
    power = 0 if fmt == "int4_g128" else 14 if half else 126
    assert np.array_equal(values * 2.0**power, elements)
    if power:  # -0 included
        assert np.array_equal(np.signbit(values), np.signbit(elements))


# ---------------------------------------------------------------- what is refused, and what is wide


@pytest.mark.parametrize(
    ("fmt", "codes", "wide"),
    [
        ("mxfp4", [0, 127, 192], False), ("mxfp4", [0, 193], True), ("mxfp4", [255], True),
        ("nvfp4", [0, 1, 0x7E, 0x80, 0xFE], False), ("nvfp4", [0x7F], True),
        ("nvfp4", [0xFF], True), ("int4_g128", [0xFFFF], False),
    ],
)  # fmt: skip
def test_scales_outside_the_common_range_are_wide(fmt, codes, wide):
    assert gl.is_wide(fmt, np.array([codes], FORMATS[fmt].scale_dtype)) is wide


def test_the_range_of_scale_codes_is_that_of_mxfp4():
    assert gl.code_range("mxfp4", np.array([[127, 3], [200, 9]], np.uint8)) == (3, 200)
    assert gl.code_range("nvfp4", np.array([[127, 3]], np.uint8)) == (255, 0)


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
    with pytest.raises(ValueError, match=r"packed is uint8 \[3\], not uint8 \[2176\]"):
        gl.unpack(layout, np.zeros(3, np.uint8))
