"""y = x W^T + bias on a GPU for a 4-bit weight: pack once, then call.

Not exported by the package yet: the kernel in its present form has not run on a device.

Streams. `pack_weight` works on the stream given to it, or the current stream of the library that the
weight came from, and returns when the packed bytes are complete: any stream may use them from then on.
`linear` puts its launches on the stream given, or on the current stream of the library of x, and returns
at once; x, bias and out must be ready on that stream, and nothing else is waited for.

Graph capture. Everything that can be done ahead is done in `pack_weight`: cubins are compiled and loaded,
plans made, shared memory allowed. A call allocates nothing but its result, and not even that with `out`; so
the first call may already be captured (with `out`, or with an allocator that works under capture, as torch's).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np

from . import operands
from .device import by_value, current_device, device
from .formats import FORMATS
from .gemv_layout import gemv_layout
from .gemv_plan import MAX_TOKENS, TOKENS, GemvPlan, plan_gemv, tokens_for
from .launch import LaunchError
from .operands import as_cupy, library_of, stream_of
from .packing import PackedWeight

ACTIVATIONS = {"uint16": "bf16", "bfloat16": "bf16", "float16": "fp16"}  # uint16: BF16 bit patterns
X_ALIGNMENT = 16  # bytes of a load of x
PACK_THREADS = 256
_BYTES = 2  # of an activation
_HERE = nullcontext()
_TOKENS_FOR = (0, *(tokens_for(m) for m in range(1, MAX_TOKENS + 1)))


class Launch:
    """One entry of qgemv_mx with all that stays the same from call to call."""

    def __init__(self, plan: GemvPlan, function: Any, n: int, k: int):
        value = by_value()
        self.plan = plan
        self.function = function
        self.grid, self.block, self.shared_bytes = (plan.grid,), (plan.threads,), plan.shared_bytes
        self.m = tuple(value(np.int32(m)) for m in range(plan.tokens + 1))
        self.sizes = (value(np.int32(n)), value(np.int32(k)))
        self.cut = tuple(
            value(np.int32(v))
            for v in (
                plan.tiles_per_team,
                plan.extra_teams,
                plan.turn_tiles,
                plan.ring_offset,
                plan.depth,
            )
        )

    def __call__(
        self, weight: LinearWeight, bias: int, x: int, y: int, m: int, strides: tuple, stream: Any
    ) -> None:
        """Launch for m rows of x; addresses as integers, strides (x, y) as arguments."""
        arguments = (
            *weight.pointers, bias, x, y, self.m[m], *self.sizes, *strides, *self.cut, weight.wide_flag,
        )  # fmt: skip
        self.function(self.grid, self.block, arguments, self.shared_bytes, stream)


@cache
def launches(ordinal: int, format: str, n: int, k: int) -> dict[tuple[str, int], Launch]:
    """The launches of every (activation, tokens) of W[N, K] on a device, loaded and ready."""
    gpu = device(ordinal)
    ready = {}
    for tokens in TOKENS:
        plan = plan_gemv(n, k, tokens, format, gpu.sm_count, gpu.smem_per_sm)
        for activation in sorted(set(ACTIVATIONS.values())):
            function = gpu.function("qgemv_mx", plan.entry(format, activation), plan.shared_bytes)
            ready[activation, tokens] = Launch(plan, function, n, k)
    return ready


@lru_cache(maxsize=4096)
def _int64(value: int) -> Any:
    """A stride, or the address of a weight, as an argument; a model has few."""
    return by_value()(np.int64(value))


@cache
def _flag(value: bool) -> Any:
    return by_value()(np.int32(value))


@dataclass(frozen=True, eq=False)
class LinearWeight:
    """A weight W[N, K] packed for the device it lies on. `pack_weight` makes it.

    data       uint8 [bytes], the layout of `gemv_layout`; a device array of any library, read-only by agreement
    row_scale  float32 [N], the tensor scale of each row's shard (nvfp4), else None
    wide       whether a scale is outside the common range, see `gemv_layout.is_wide`
    device     ordinal
    """

    format: str
    n: int
    k: int
    data: Any
    row_scale: Any
    wide: bool
    device: int
    pointers: tuple = field(init=False, repr=False)
    wide_flag: Any = field(init=False, repr=False)
    launches: dict = field(init=False, repr=False)

    def __post_init__(self) -> None:
        data = operands.read("data", self.data)
        layout = gemv_layout(self.format, self.n, self.k)
        if data.dtype != "uint8" or tuple(data.shape) != (layout.nbytes,):
            raise LaunchError(
                f"data is {data.dtype} {list(data.shape)}, not uint8 [{layout.nbytes}]"
            )
        row_scale = data
        if FORMATS[self.format].has_tensor_scale:
            row_scale = operands.read("row_scale", self.row_scale)
            if row_scale.dtype != "float32" or tuple(row_scale.shape) != (self.n,):
                raise LaunchError(
                    f"row_scale is {row_scale.dtype} {list(row_scale.shape)}, not float32 [{self.n}]"
                )
        for name, operand in (("data", data), ("row_scale", row_scale)):
            if operand.device != self.device:
                raise LaunchError(f"{name} is on device {operand.device}, not on {self.device}")
            if operand.pointer % X_ALIGNMENT or (operand.strides[0] != 1 and operand.shape[0] != 1):
                raise LaunchError(
                    f"{name} at {operand.pointer:#x} with stride {operand.strides} is not contiguous"
                    f" from a multiple of {X_ALIGNMENT} bytes"
                )
        pointers = (_int64(data.pointer), _int64(row_scale.pointer))
        object.__setattr__(self, "pointers", pointers)
        object.__setattr__(self, "wide_flag", _flag(self.wide))
        object.__setattr__(self, "launches", launches(self.device, self.format, self.n, self.k))

    @property
    def nbytes(self) -> int:
        """Bytes that a call reads of the weight."""
        return gemv_layout(self.format, self.n, self.k).nbytes

    def plan(self, m: int, batch_invariant: bool = False) -> GemvPlan:
        """The plan of a launch of M tokens, with its reasons."""
        tokens = MAX_TOKENS if batch_invariant else tokens_for(m)
        return self.launches["bf16", tokens].plan


def pack_weight(
    values: Any,
    scales: Any = None,
    format: str | None = None,
    tensor_scale: Any = None,
    shard_rows: tuple[int, ...] | None = None,
    stream: Any = None,
) -> LinearWeight:
    """Permute a weight into the kernel's layout, on the GPU, and make its launches ready.

    values        a `PackedWeight`, which brings all the rest and goes to CuPy's current device; or uint8 [N, K/2]
                  (or int8) on a device, two nibbles a byte, the low one the even k, as checkpoints have it
    scales        [N, K/group] on the same device: e8m0 or e4m3 codes (uint8 or a float8 type), BF16 (bits) for int4
    format        mxfp4, nvfp4 or int4_g128
    tensor_scale  nvfp4: a positive float, or one for each shard; a shard keeps its own
    shard_rows    rows of each shard, top to bottom; they sum to N
    stream        CUDA stream (CuPy, torch, address); see the module's text

    The first weight on an architecture compiles the kernels, which are kept on disk. Waits for the stream before it
    returns. ValueError or TypeError names what does not fit.
    """
    if isinstance(values, PackedWeight):
        if any(v is not None for v in (scales, format, tensor_scale, shard_rows)):
            raise ValueError("a PackedWeight brings its scales and format: give no others")
        return _pack_host(values, stream)
    if scales is None or format is None:
        raise ValueError("pack_weight needs values, scales and format, or a PackedWeight alone")
    library = library_of("values", values)
    library_of("scales", scales)
    values, scales = as_cupy("values", values), as_cupy("scales", scales)
    if values.dtype == np.int8:  # DeepSeek's checkpoints say so of the same bytes
        values = values.view(np.uint8)
    if values.ndim != 2 or scales.ndim != 2:
        raise ValueError(
            f"values {list(values.shape)} and scales {list(scales.shape)} must have two dimensions"
        )
    n, k = int(values.shape[0]), 2 * int(values.shape[1])
    row_scale = _row_scale(format, n, tensor_scale, shard_rows)
    ordinal = values.data.device_id
    if scales.data.device_id != ordinal:
        raise LaunchError(
            f"scales are on device {scales.data.device_id}, values on device {ordinal}"
        )
    stream = library.stream(ordinal) if stream is None else stream_of(stream)
    return _pack(format, n, k, values, scales, row_scale, ordinal, stream)


def _pack_host(weight: PackedWeight, stream: Any) -> LinearWeight:
    gemv_layout(weight.format, weight.n, weight.k)  # refuse before anything is copied
    ordinal = current_device()
    stream = None if stream is None else stream_of(stream)
    gpu = device(ordinal)
    with gpu.on(stream):
        values, scales = gpu.upload(weight.values), gpu.upload(weight.scales)
    row_scale = weight.row_tensor_scale if weight.spec.has_tensor_scale else None
    return _pack(weight.format, weight.n, weight.k, values, scales, row_scale, ordinal, stream)


def _pack(
    format: str, n: int, k: int, values: Any, scales: Any, row_scale: Any, ordinal: int, stream: Any
) -> LinearWeight:
    layout = gemv_layout(format, n, k)
    dtype = FORMATS[format].scale_dtype
    value_stride = _columns("values", values, np.dtype(np.uint8), (n, k // 2))
    scale_stride = _columns("scales", scales, dtype, (n, k // FORMATS[format].group))
    gpu = device(ordinal)
    function = gpu.function("pack_gemv", f"pack_gemv_{format}")
    with gpu.on(stream):
        data, wide = gpu.empty(layout.nbytes, np.uint8), gpu.zeros(1, np.int32)
        arguments = (
            values, scales, data, wide,
            np.int32(n), np.int32(k), np.int64(value_stride), np.int64(scale_stride),
        )  # fmt: skip
        function((-(-layout.nbytes // 4 // PACK_THREADS),), (PACK_THREADS,), arguments, 0, stream)
        row_scale = None if row_scale is None else gpu.upload(row_scale)
        is_wide = bool(gpu.download(wide)[0])  # waits: the weight is complete for every stream
    return LinearWeight(format, n, k, data, row_scale, is_wide, ordinal)


def linear(
    x: Any,
    w: LinearWeight,
    out: Any = None,
    bias: Any = None,
    stream: Any = None,
    batch_invariant: bool = False,
) -> Any:
    """y = x W^T + bias, [M, N] of the type of x; the FP32 sum is rounded once.

    x       [M, K] BF16 or FP16 on the device of the weight: CuPy (BF16 as uint16 bit patterns, or as
            ml_dtypes.bfloat16), torch, or anything with DLPack. Rows may be strided, each from a multiple of 16 bytes
    out     [M, N] of the type of x, rows may be strided; without it a new array of the library of x
    bias    [N] of the type of x, contiguous
    stream  CUDA stream (CuPy, torch, address); see the module's text
    batch_invariant  the bits of a row then do not depend on M or on its place: every launch uses the entry for
            16 tokens and one plan

    M = 0 gives an empty result without a launch. M > 16 is cut into launches of 16 rows. LaunchError names the
    object, the value and the limit for a wrong type, shape, stride, alignment or device.
    """
    library = library_of("x", x)
    x_pointer, shape, strides, dtype, x_device = library.read(x)
    activation = ACTIVATIONS.get(dtype)
    if activation is None:
        raise LaunchError(f"x is {dtype}, not BF16 (bfloat16, or bits as uint16) or float16")
    if len(shape) != 2 or shape[1] != w.k:
        raise LaunchError(f"x is {list(shape)}, not [M, K={w.k}]")
    m = shape[0]
    x_stride = _row_stride("x", shape, strides, x_device, w.device)
    if m and (x_pointer % X_ALIGNMENT or (m > 1 and x_stride * _BYTES % X_ALIGNMENT)):
        raise LaunchError(
            f"x at {x_pointer:#x} with rows {x_stride * _BYTES} bytes apart is not aligned:"
            f" every row must begin at a multiple of {X_ALIGNMENT} bytes"
        )
    if out is None:
        out = library.empty(x, (m, w.n))
        y_pointer, y_stride = library.read(out)[0], w.n
    else:
        y_pointer, shape, strides, y_dtype, y_device = library_of("out", out).read(out)
        if y_dtype != dtype and ACTIVATIONS.get(y_dtype) != activation:
            raise LaunchError(f"out is {y_dtype}, x is {dtype}: they must be of one type")
        if len(shape) != 2 or shape[0] != m or shape[1] != w.n:
            raise LaunchError(f"out is {list(shape)}, not [M, N] = {[m, w.n]}")
        y_stride = _row_stride("out", shape, strides, y_device, w.device)
    bias_pointer = 0 if bias is None else _bias(bias, w, activation)
    stream = library.stream(w.device) if stream is None else stream_of(stream)
    strides = (_int64(x_stride), _int64(y_stride))
    gpu = device(w.device)
    with _HERE if gpu.is_current() else gpu.handle:
        for first in range(0, m, MAX_TOKENS):
            count = min(MAX_TOKENS, m - first)
            tokens = MAX_TOKENS if batch_invariant else _TOKENS_FOR[count]
            x_at = x_pointer + first * x_stride * _BYTES
            y_at = y_pointer + first * y_stride * _BYTES
            w.launches[activation, tokens](w, bias_pointer, x_at, y_at, count, strides, stream)
    return out


def _row_stride(name: str, shape: tuple, strides: tuple, on: int, device: int) -> int:
    """Elements from row to row of a matrix whose rows are contiguous; refuses anything else, and another device."""
    rows, columns = shape
    if on != device:
        raise LaunchError(f"{name} is on device {on}, the weight on device {device}")
    if rows == 0:  # strides of an empty array mean nothing
        return columns
    if strides[1] != 1 and columns > 1:
        raise LaunchError(f"{name} has a column stride of {strides[1]} elements, not 1")
    if rows == 1:
        return columns
    if strides[0] < columns:
        raise LaunchError(
            f"{name} has a row stride of {strides[0]} elements for rows of {columns}:"
            " rows overlap or run backwards"
        )
    return strides[0]


def _bias(bias: Any, w: LinearWeight, activation: str) -> int:
    b = operands.read("bias", bias)
    if ACTIVATIONS.get(b.dtype) != activation:
        raise LaunchError(f"bias is {b.dtype}, x is {activation}: they must be of one type")
    if tuple(b.shape) != (w.n,) or (w.n > 1 and b.strides[0] != 1):
        raise LaunchError(
            f"bias is {list(b.shape)} with strides {list(b.strides)}, not contiguous [N={w.n}]"
        )
    if b.device != w.device:
        raise LaunchError(f"bias is on device {b.device}, the weight on device {w.device}")
    return b.pointer


def _columns(name: str, array: Any, dtype: np.dtype, shape: tuple[int, int]) -> int:
    """Row stride in elements of a checkpoint's array after checking it."""
    if array.dtype != dtype or tuple(array.shape) != shape:
        raise ValueError(f"{name} is {array.dtype} {list(array.shape)}, not {dtype} {list(shape)}")
    size = array.itemsize
    if shape[1] > 1 and array.strides[1] != size:
        raise ValueError(f"{name} has a column stride of {array.strides[1]} bytes, not {size}")
    if shape[0] == 1:
        return shape[1]
    if array.strides[0] < shape[1] * size or array.strides[0] % size:
        raise ValueError(
            f"{name} has a row stride of {array.strides[0]} bytes for rows of {shape[1] * size}"
        )
    return array.strides[0] // size


def _row_scale(
    format: str, n: int, tensor_scale: Any, shard_rows: tuple[int, ...] | None
) -> np.ndarray | None:
    """float32 [N], the tensor scale of each row's shard; None for a format without one."""
    if format not in FORMATS or not FORMATS[format].has_tensor_scale:
        if tensor_scale is not None:
            raise ValueError(f"tensor_scale is given: {format} has no tensor scale")
        return None
    if tensor_scale is None:
        raise ValueError(f"tensor_scale is missing: {format} needs one per shard")
    listed = tensor_scale.tolist() if hasattr(tensor_scale, "tolist") else tensor_scale
    scale = np.atleast_1d(np.asarray(listed, np.float32))
    rows = (n,) if shard_rows is None else tuple(int(r) for r in shard_rows)
    if min(rows, default=0) < 1 or sum(rows) != n:
        raise ValueError(f"shard_rows {rows} do not sum to N={n} with each at least 1")
    if scale.shape != (len(rows),):
        raise ValueError(f"tensor_scale has shape {scale.shape}, not one per shard {rows}")
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        raise ValueError(f"tensor_scale {scale.tolist()} is not positive and finite")
    return np.repeat(scale, rows)
