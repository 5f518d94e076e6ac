"""Random operands on the device, fresh per run, with realistic distributions (METHOD 3.2).

Random bytes index a table of quantiles, so a value is a sample of the table's distribution and the same seed gives
the same operand on any machine (SplitMix64, kernel `fill_random`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from scipy.stats import norm

from qgemm_mx import formats

ALIGNMENT_BYTES = 256

#: Standard deviation of a linear layer's weights; activations have unit variance.
WEIGHT_SIGMA = 0.02
FP8_SCALE = np.float32(2.0**-12)


def align(size_bytes: int) -> int:
    """`size_bytes` rounded up to the buffer alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def normal_quantiles(count: int, sigma: float) -> np.ndarray:
    """`count` equally likely values of N(0, sigma), float64."""
    return sigma * norm.ppf((np.arange(count) + 0.5) / count)


def bf16_table(sigma: float) -> np.ndarray:
    """65536 BF16 bit patterns: one for each 16-bit random word."""
    return normal_quantiles(65536, sigma).astype(ml_dtypes.bfloat16).view(np.uint16)


def fp8_table(sigma: float, scale: float) -> np.ndarray:
    """256 E4M3 codes of N(0, sigma)/scale, saturated at 448."""
    values = np.clip(normal_quantiles(256, sigma) / scale, -448, 448)
    return values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


#: float64 value of each E4M3FN code.
E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def bf16_values(codes: Any) -> Any:
    """BF16 bit patterns (uint16) as float32, of the same shape, on the device."""
    import cupy as cp

    return (codes.astype(cp.uint32) << 16).view(cp.float32)


def e4m3_values(codes: Any) -> Any:
    """E4M3 codes (uint8) as float64, of the same shape, on the device."""
    import cupy as cp

    return cp.asarray(E4M3_VALUES)[codes]


class Random:
    """Fills device memory from a seed; every call draws from a new part of the sequence."""

    def __init__(self, fill_kernel: Any, map_u8: Any, map_u16: Any, seed: int) -> None:
        self._fill, self._map_u8, self._map_u16 = fill_kernel, map_u8, map_u16
        self._next = np.uint64(seed) << np.uint64(20)

    def bytes(self, count: int) -> Any:
        """`count` random bytes, uint8 [count] on the device."""
        import cupy as cp

        words = -(-count // 8)
        out = cp.empty(words, dtype=cp.uint64)
        self._fill((1056,), (256,), (out, np.uint64(words), self._next))
        with np.errstate(over="ignore"):
            self._next = self._next + np.uint64(words)
        return out.view(cp.uint8)[:count]

    def mapped_u8(self, count: int, table: np.ndarray) -> Any:
        """`count` bytes drawn from a table of 256 bytes."""
        import cupy as cp

        raw = self.bytes(count)
        self._map_u8(
            (1056,), (256,), (raw, raw, np.uint64(count), cp.asarray(table.astype(np.uint8)))
        )
        return raw

    def mapped_u16(self, count: int, table: np.ndarray) -> Any:
        """`count` 16-bit words drawn from a table of 65536 words, uint16 [count]."""
        import cupy as cp

        raw = self.bytes(2 * count).view(cp.uint16)
        self._map_u16(
            (1056,), (256,), (raw, raw, np.uint64(count), cp.asarray(table.astype(np.uint16)))
        )
        return raw


@dataclass(frozen=True)
class WeightCopies:
    """Distinct copies of a weight [N, K] in one buffer, each starting at a multiple of 256 bytes.

    `copy_bytes` is the exact number of bytes of a copy (values, then scales), `stride_bytes` the distance of copies.
    Scales start at `scale_offset_bytes` of a copy: directly behind the values, so a copy is one contiguous run.
    """

    format: str
    n: int
    k: int
    copies: int
    copy_bytes: int
    stride_bytes: int
    scale_offset_bytes: int
    tensor_scale: float
    buffer: Any

    def pointer(self, copy: int) -> int:
        """Device address of a copy."""
        return int(self.buffer.data.ptr) + copy * self.stride_bytes

    def scale_pointer(self, copy: int) -> int:
        """Device address of a copy's scales."""
        return self.pointer(copy) + self.scale_offset_bytes

    def views(self, copy: int) -> tuple[Any, Any]:
        """Values uint8 [N, K/2] and scale codes [N, K/group] of a block-scaled copy, as views of the buffer."""
        spec = formats.FORMATS[self.format]
        base = copy * self.stride_bytes
        values = self.buffer[base : base + self.scale_offset_bytes].reshape(self.n, self.k // 2)
        scales = self.buffer[base + self.scale_offset_bytes : base + self.copy_bytes]
        return values, scales.view(spec.scale_dtype).reshape(self.n, self.k // spec.group)

    def rows_float64(self, copy: int, start: int, stop: int) -> Any:
        """Rows [start, stop) of a copy, decoded to float64 [stop - start, K] on the device.

        The tensor scale is not applied: it belongs to the epilogue. Decoding uses tables of `ml_dtypes`, never a CUDA
        kernel under test.
        """
        import cupy as cp

        base = copy * self.stride_bytes
        if self.format == "bf16":
            codes = self.buffer[base : base + self.copy_bytes].view(cp.uint16)
            codes = codes.reshape(self.n, self.k)[start:stop]
            return bf16_values(codes).astype(cp.float64)
        if self.format == "fp8_e4m3":
            codes = self.buffer[base : base + self.copy_bytes].reshape(self.n, self.k)[start:stop]
            return e4m3_values(codes) * float(FP8_SCALE)
        return self._block_scaled_rows(copy, start, stop)

    def _block_scaled_rows(self, copy: int, start: int, stop: int) -> Any:
        import cupy as cp

        spec = formats.FORMATS[self.format]
        packed, codes = (view[start:stop] for view in self.views(copy))
        elements = cp.asarray(element_table(self.format))
        values = cp.stack([elements[packed & 15], elements[packed >> 4]], axis=-1)
        if spec.scale == "bf16":
            scales = bf16_values(codes).astype(cp.float64)
        else:
            scales = cp.asarray(scale_table(self.format))[codes]
        return values.reshape(stop - start, self.k) * cp.repeat(scales, spec.group, axis=1)


def element_table(format_name: str) -> np.ndarray:
    """float64 value of each of the 16 nibble codes of a block-scaled format."""
    codes = np.arange(16, dtype=np.uint8)
    if formats.FORMATS[format_name].element == "e2m1":
        return codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return np.where(codes < 8, codes, codes.astype(np.int64) - 16).astype(np.float64)


def scale_table(format_name: str) -> np.ndarray:
    """float64 value of each of the 256 scale codes of an 8-bit scale."""
    if formats.FORMATS[format_name].scale == "e8m0":
        codes = np.arange(256, dtype=np.uint8)
        return codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return E4M3_VALUES


def nibble_pair_table(format_name: str) -> np.ndarray:
    """256 bytes, each two nibble codes of a normal weight whose block maximum is the format's largest magnitude."""
    levels = element_table(format_name)
    quantiles = normal_quantiles(16, float(np.max(levels)) / 2.5)
    codes = np.array([int(np.argmin(np.abs(levels - q))) for q in quantiles], dtype=np.uint8)
    low, high = np.meshgrid(codes, codes)
    return (low | (high << 4)).ravel().astype(np.uint8)


def scale_code_table(format_name: str) -> np.ndarray:
    """256 scale codes spread as the scales of a trained layer are: a few binades around sigma."""
    rank = np.arange(256)
    if formats.FORMATS[format_name].scale == "e8m0":
        return (118 + np.round(norm.ppf((rank + 0.5) / 256)).clip(-3, 3)).astype(np.uint8)
    values = np.clip(2.0 ** (5 + norm.ppf((rank + 0.5) / 256)), 2.0**-9, 448)
    return values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def make_weights(random: Random, format_name: str, n: int, k: int, copies: int) -> WeightCopies:
    """Random weight copies of a format on the device."""
    import cupy as cp

    copy_bytes = formats.weight_bytes(format_name, n, k)
    stride = align(copy_bytes)
    scale_offset = {"bf16": 2 * n * k, "fp8_e4m3": n * k}.get(format_name, n * k // 2)
    tensor_scale = 1.0
    if format_name == "bf16":
        buffer = random.mapped_u16(copies * stride // 2, bf16_table(WEIGHT_SIGMA)).view(cp.uint8)
    elif format_name == "fp8_e4m3":
        buffer = random.mapped_u8(copies * stride, fp8_table(WEIGHT_SIGMA, float(FP8_SCALE)))
    else:
        buffer = random.mapped_u8(copies * stride, nibble_pair_table(format_name))
        count = copy_bytes - scale_offset
        for copy in range(copies):
            first = copy * stride + scale_offset
            if formats.FORMATS[format_name].scale == "bf16":
                scales = random.mapped_u16(count // 2, int4_scale_table()).view(cp.uint8)
            else:
                scales = random.mapped_u8(count, scale_code_table(format_name))
            buffer[first : first + count] = scales
        if format_name == "nvfp4":
            tensor_scale = float(np.float32(WEIGHT_SIGMA / 64))
    return WeightCopies(
        format_name, n, k, copies, copy_bytes, stride, scale_offset, tensor_scale, buffer
    )


def int4_scale_table() -> np.ndarray:
    """65536 positive BF16 bit patterns around sigma: the scales of an INT4 layer."""
    values = WEIGHT_SIGMA * 2.0 ** (0.5 * norm.ppf((np.arange(65536) + 0.5) / 65536)) / 2.5
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def make_activations(random: Random, m: int, k: int) -> tuple[Any, Any]:
    """Activations [M, K] of unit variance: BF16 bit patterns (uint16) and E4M3 codes (uint8) on the device."""
    bf16 = random.mapped_u16(m * k, bf16_table(1.0)).reshape(m, k)
    fp8 = random.mapped_u8(m * k, fp8_table(1.0, 2.0**-4)).reshape(m, k)
    return bf16, fp8


#: Scale of the E4M3 activations that `make_activations` returns.
FP8_ACTIVATION_SCALE = np.float32(2.0**-4)


def decode_activations(x: Any) -> Any:
    """Activations as float64 [M, K]: BF16 bit patterns (uint16), or E4M3 codes (uint8) times their scale."""
    import cupy as cp

    if x.dtype == cp.uint16:
        return bf16_values(x).astype(cp.float64)
    return e4m3_values(x) * float(FP8_ACTIVATION_SCALE)
