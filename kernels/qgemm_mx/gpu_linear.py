"""y = x W^T + bias on a GPU for a 4-bit weight: pack once, then call.

Streams. `pack_weight` works on the stream given to it, or the current stream of the library that the
weight came from, and returns when the packed bytes are complete: any stream may use them from then on.
`linear` puts its launches on the stream given, or on the current stream of the library of x, and returns
at once; x, bias and out must be ready on that stream, and nothing else is waited for.

Kernels. qgemv_mx takes up to 16 rows of x, and more in launches of 16. qgemm_mx takes all rows of BF16 at once, from
where that is faster (`gemm_plan.takes_gemm`). FP16, a weight whose scales are far apart (`LinearWeight.matrix`), and
calls whose bits must not depend on M stay with qgemv_mx.

Repeats. A call gives the same bits each time, with one exception: where blocks of qgemm_mx share jobs
(`GemmPlan.streamed`) their sums meet in a workspace of the stream, of which a device has four. A dependent launch, and
a launch on a fifth stream, take all jobs whole: their sums are added in another order. A captured graph keeps the
workspace of the stream that it was captured on: it must not run beside other calls of that stream.

Graph capture. Everything that can be done ahead is done in `pack_weight`: cubins are compiled and loaded, shared
memory allowed, and for qgemv_mx plans made and arguments laid down; the first call with an M makes the plan of qgemm_mx
for it, on the host alone. A call allocates nothing on the device but its result, and not even that with `out`; so the
first call may already be captured (with `out`, or with an allocator that works under capture, as torch's).

Threads. Any thread may call, with the same weight too: each launch writes its arguments into memory that no
other launch has at that time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from . import operands
from .device import Device, current_device, device
from .formats import FORMATS, get_format
from .gemm_launch import MatrixLaunch, operand_range, operand_scale
from .gemm_plan import MOST_WARPS, PARTIAL_BYTES, GemmPlan, entries, plan_gemm, rounded, takes_gemm
from .gemv_launch import Launch
from .gemv_layout import gemv_layout
from .gemv_plan import (
    MAX_TOKENS,
    SMEM_OF_SYSTEM,
    SMEM_PER_BLOCK,
    TOKENS,
    GemvPlan,
    plan_gemv,
    tokens_for,
)
from .launch import LaunchError
from .operands import LIBRARIES, as_cupy, library_of, stream_of
from .packing import PackedWeight

ACTIVATIONS = {"uint16": "bf16", "bfloat16": "bf16", "float16": "fp16"}  # uint16: BF16 bit patterns
UNQUANTISED = ("float16", "bfloat16", "float32", "float64")  # what a weight is before `quantize`
X_ALIGNMENT = 16  # bytes of a load of x
PACK_THREADS = 256
_BYTES = 2  # of an activation


@cache
def launches(
    ordinal: int, format: str, n: int, k: int, programmatic: bool = False
) -> dict[tuple[str, int], Launch]:
    """The launches of every (activation, tokens) of W[N, K] on a device, loaded and ready; or those to be dependent."""
    gpu = device(ordinal)
    ready = {}
    for tokens in TOKENS:
        plan = plan_gemv(n, k, tokens, format, gpu.sm_count, gpu.smem_per_sm, programmatic)
        for activation in sorted(set(ACTIVATIONS.values())):
            ready[activation, tokens] = Launch.from_plan(plan, format, n, k, activation, gpu)
    return ready


@cache
def _by_rows(
    ordinal: int, format: str, n: int, k: int, programmatic: bool = False
) -> dict[str, tuple[Launch, ...]]:
    """By type of the activations, the launch for each M up to MAX_TOKENS; the first, of M = 0, is not used."""
    ready = launches(ordinal, format, n, k, programmatic)
    tokens = [tokens_for(max(1, m)) for m in range(MAX_TOKENS + 1)]
    return {a: tuple(ready[a, t] for t in tokens) for a in set(ACTIVATIONS.values())}


class _ByRows(dict):
    """The launch of qgemm_mx for M rows of BF16, by M; None where `takes_gemm` says no. Made at first use.

    All entries that a plan may name are loaded with the first of a format, so nothing is left to the driver then.
    """

    def __init__(self, ordinal: int, format: str, n: int, k: int):
        self._problem, self._gpu = (n, k, format), device(ordinal)
        self._functions = _matrix_functions(ordinal, format)

    def __missing__(self, m: int) -> MatrixLaunch | None:
        n, k, format = self._problem
        self[m] = found = self._made(n, k, m, format) if takes_gemm(n, k, m, format) else None
        return found

    def _made(self, n: int, k: int, m: int, format: str) -> MatrixLaunch:
        if (most := rounded(m, format)) != m:
            return self[most]
        plan = plan_gemm(n, k, m, format, self._gpu.sm_count, self._gpu.smem_per_sm)
        function = self._functions[plan.entry(format, "bf16")]
        return MatrixLaunch(plan, function, format, n, k, "bf16", self._gpu)


@cache
def _matrix_functions(ordinal: int, format: str) -> dict[str, Any]:
    """Every entry of qgemm_mx for a format, loaded, with leave to use all the shared memory that a block may have."""
    gpu = device(ordinal)
    gpu.prepare_workspaces(PARTIAL_BYTES, MOST_WARPS)
    most = min(gpu.smem_per_sm - SMEM_OF_SYSTEM, SMEM_PER_BLOCK)
    return {entry: gpu.function(MatrixLaunch.SOURCE, entry, most) for entry in entries(format)}


@cache
def matrix_launches(ordinal: int, format: str, n: int, k: int) -> dict[int, MatrixLaunch | None]:
    """By M, the launch of qgemm_mx for W[N, K] on a device, or None for an M that qgemv_mx keeps."""
    return _ByRows(ordinal, format, n, k)


@dataclass(frozen=True, eq=False)
class LinearWeight:
    """A weight W[N, K] packed for the device it lies on. `pack_weight` makes it.

    data       uint8 [bytes], the layout of `gemv_layout`; a device array of any library, read-only by agreement
    row_scale  float32 [N], the tensor scale of each row's shard (nvfp4), else None
    wide       whether a scale is outside the common range, see `gemv_layout.is_wide`
    device     ordinal
    shift, matrix   power of two that the operands of qgemm_mx lack, and whether that kernel may take the weight: see
               `gemm_launch.operand_range`
    pointer, scale_pointer   addresses of data and row_scale, for a launch
    launches   of qgemv_mx, by (bf16 or fp16, tokens); made with the first weight of a shape
    matrix_by_rows  launches of qgemm_mx by M, None for those that qgemv_mx takes
    """

    format: str
    n: int
    k: int
    data: Any
    row_scale: Any
    wide: bool
    device: int
    shift: int = 0
    matrix: bool = False
    pointer: int = field(init=False, repr=False)
    scale_pointer: int = field(init=False, repr=False)
    launches: dict = field(init=False, repr=False)
    by_rows: dict = field(init=False, repr=False)
    programmatic_by_rows: dict = field(init=False, repr=False)
    matrix_by_rows: dict = field(init=False, repr=False)
    operand_scale: tuple[int, float] = field(init=False, repr=False)
    gpu: Device = field(init=False, repr=False)

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
        problem = (self.device, self.format, self.n, self.k)
        found = {
            "pointer": data.pointer,
            "scale_pointer": row_scale.pointer,
            "launches": launches(*problem, False),  # as `_by_rows` asks: once made, kept
            "by_rows": _by_rows(*problem, False),
            "programmatic_by_rows": _by_rows(*problem, True),
            "matrix_by_rows": matrix_launches(*problem) if self.matrix else {},
            "operand_scale": operand_scale(self.format, self.shift),
            "gpu": device(self.device),
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @property
    def nbytes(self) -> int:
        """Bytes that a call reads of the weight."""
        return gemv_layout(self.format, self.n, self.k).nbytes

    def plan(self, m: int, batch_invariant: bool = False) -> GemvPlan | GemmPlan:
        """The plan of a call with M rows of BF16, with its reasons; of qgemv_mx, that of a launch of at most 16."""
        if self.matrix and not batch_invariant and (launch := self.matrix_by_rows[m]) is not None:
            return launch.plan
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
    dtype = str(getattr(values, "dtype", "")).rpartition(".")[2]
    if dtype in UNQUANTISED:
        raise ValueError(
            f"values is {dtype} {list(values.shape)}, a weight that is not quantised: quantize it first,"
            " pack_weight(quantize(weight, format)) with weight[N, K] a NumPy array"
        )
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
        data = gpu.empty(layout.nbytes, np.uint8)
        status = gpu.upload(np.array([0, 0, 255], np.int32))  # wide, largest code, least code
        arguments = (
            values, scales, data, status,
            np.int32(n), np.int32(k), np.int64(value_stride), np.int64(scale_stride),
        )  # fmt: skip
        function((-(-layout.nbytes // 4 // PACK_THREADS),), (PACK_THREADS,), arguments)
        row_scale = None if row_scale is None else gpu.upload(row_scale)
        # Waits: the weight is complete for every stream.
        wide, largest, least = (int(found) for found in gpu.download(status))
    shift, matrix = operand_range(format, least, largest)
    return LinearWeight(format, n, k, data, row_scale, bool(wide), ordinal, shift, matrix)


def linear(
    x: Any,
    w: LinearWeight,
    out: Any = None,
    bias: Any = None,
    stream: Any = None,
    batch_invariant: bool = False,
    programmatic: bool = False,
) -> Any:
    """y = x W^T + bias, [M, N] of the type of x; the FP32 sum is rounded once.

    x       [M, K] BF16 or FP16 on the device of the weight: CuPy (BF16 as uint16 bit patterns, or as
            ml_dtypes.bfloat16), torch, or anything with DLPack. Rows may be strided, each from a multiple of 16 bytes
    out     [M, N] of the type of x, rows may be strided; without it a new array of the library of x
    bias    [N] of the type of x, contiguous
    stream  CUDA stream (CuPy, torch, address); see the module's text
    batch_invariant  the bits of a row then do not depend on M or on its place: every launch uses the entry of qgemv_mx
            for 16 tokens and one plan
    programmatic  dependent launch: the kernel may start, and read its weight, while the one in front of it on the
            stream still drains; it touches x, bias and out only after that one has ended. For a chain of layers, whose
            weights then stream without a gap. What is in front must not write the weight (`pack_weight` has waited).
            Under capture it becomes a programmatic edge of the graph

    M = 0 gives an empty result without a launch. LaunchError names the object, the value and the limit for a wrong
    type, shape, stride, alignment or device.
    """
    library = LIBRARIES.get(type(x)) or library_of("x", x)
    x_at, shape, strides, dtype, x_device = library.read(x)
    activation = ACTIVATIONS.get(dtype)
    if activation is None:
        raise LaunchError(f"x is {dtype}, not BF16 (bfloat16, or bits as uint16) or float16")
    if len(shape) != 2 or shape[1] != w.k:
        raise LaunchError(f"x is {list(shape)}, not [M, K={w.k}]")
    m = shape[0]
    x_stride = _row_stride("x", m, w.k, strides, x_device, w.device)
    if m and (x_at % X_ALIGNMENT or (m > 1 and x_stride * _BYTES % X_ALIGNMENT)):
        raise LaunchError(
            f"x at {x_at:#x} with rows {x_stride * _BYTES} bytes apart is not aligned:"
            f" every row must begin at a multiple of {X_ALIGNMENT} bytes"
        )
    if out is None:
        out = library.empty(x, (m, w.n))
        y_at, y_stride = library.address(out), w.n
    else:
        y_at, shape, strides, y_dtype, y_device = (
            LIBRARIES.get(type(out)) or library_of("out", out)
        ).read(out)
        if y_dtype != dtype and ACTIVATIONS.get(y_dtype) != activation:
            raise LaunchError(f"out is {y_dtype}, x is {dtype}: they must be of one type")
        if len(shape) != 2 or shape[0] != m or shape[1] != w.n:
            raise LaunchError(f"out is {list(shape)}, not [M, N] = {[m, w.n]}")
        y_stride = _row_stride("out", m, w.n, strides, y_device, w.device)
    bias_at = 0 if bias is None else _bias(bias, w, activation)
    stream = library.stream(w.device) if stream is None else stream_of(stream)
    by_rows = (w.programmatic_by_rows if programmatic else w.by_rows)[activation]
    gpu = w.gpu
    if not (gpu.alone or gpu.is_current()):
        with gpu.made_current():
            linear(x, w, out, bias, stream, batch_invariant, programmatic)
        return out
    if w.matrix and not batch_invariant and activation == "bf16":
        launch = w.matrix_by_rows[m]
        if launch is not None:
            launch.enqueue(w, bias_at, x_at, y_at, m, x_stride, y_stride, stream, programmatic)
            return out
    while m > MAX_TOKENS:
        by_rows[MAX_TOKENS].enqueue(
            w, bias_at, x_at, y_at, MAX_TOKENS, x_stride, y_stride, stream, programmatic
        )
        m -= MAX_TOKENS
        x_at += MAX_TOKENS * x_stride * _BYTES
        y_at += MAX_TOKENS * y_stride * _BYTES
    if m:
        by_rows[MAX_TOKENS if batch_invariant else m].enqueue(
            w, bias_at, x_at, y_at, m, x_stride, y_stride, stream, programmatic
        )
    return out


def _row_stride(name: str, rows: int, columns: int, strides: tuple, on: int, device: int) -> int:
    """Elements from row to row of a matrix whose rows are contiguous; refuses anything else, and another device."""
    if on != device:
        raise LaunchError(f"{name} is on device {on}, the weight on device {device}")
    if rows == 0:  # strides of an empty array mean nothing
        return columns
    step, between = strides
    if between != 1 and columns > 1:
        raise LaunchError(f"{name} has a column stride of {between} elements, not 1")
    if rows == 1:
        return columns
    if step < columns:
        raise LaunchError(
            f"{name} has a row stride of {step} elements for rows of {columns}:"
            " rows overlap or run backwards"
        )
    return step


def _bias(bias: Any, w: LinearWeight, activation: str) -> int:
    at, shape, strides, dtype, on = library_of("bias", bias).read(bias)
    if ACTIVATIONS.get(dtype) != activation:
        raise LaunchError(f"bias is {dtype}, x is {activation}: they must be of one type")
    if len(shape) != 1 or shape[0] != w.n or (w.n > 1 and strides[0] != 1):
        raise LaunchError(
            f"bias is {list(shape)} with strides {list(strides)}, not contiguous [N={w.n}]"
        )
    if on != w.device:
        raise LaunchError(f"bias is on device {on}, the weight on device {w.device}")
    return at


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
    if not get_format(format).has_tensor_scale:
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
