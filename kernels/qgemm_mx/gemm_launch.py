"""A launch of qgemm_mx: one entry, its plan, and memory for its arguments, ready for calls."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_uint8, c_uint32, c_uint64
from typing import TYPE_CHECKING, Any

from .device import TENSOR_MAP_ALIGNMENT, TensorMap, launch_config
from .gemm_plan import GemmPlan, inverse
from .gemv_launch import Launch, fitting
from .gemv_layout import CHUNK, gemv_layout

if TYPE_CHECKING:
    from .gpu_linear import LinearWeight

# The structure that every entry of qgemm_mx.cu takes, in order. Those of OF_A_CALL are written by each call, n, k,
# tile_bytes and slices_inverse are the weight's, UNUSED are zeros, any other is the attribute of the plan that has its
# name.
MATRIX_ARGUMENTS = {
    "weight": c_uint64,
    "tile_bytes": c_uint32,
    "n": c_int32,
    "k": c_int32,
    "row_jobs": c_int32,
    "token_jobs": c_int32,
    "group": c_int32,
    "share": c_uint8,
    "split": c_uint8,
    "x_stages": c_uint8,
    "w_stages": c_uint8,
    "sums_offset": c_uint32,
    "whole_jobs": c_int32,
    "scale_offset": c_uint32,
    "factor": c_float,
    "split_inverse": c_uint32,
    "y": c_uint64,
    "y_stride": c_int64,
    "bias": c_uint64,
    "row_scale": c_uint64,
    "partial": c_uint64,
    "arrived": c_uint64,
    "m": c_int32,
    "slices_inverse": c_uint32,
    "clusters_inverse": c_uint32,
    "reserved": c_uint32 * 3,
    "x": TensorMap,
}
OF_A_CALL = (
    "weight", "row_scale", "scale_offset", "factor", "bias", "x", "y", "m", "y_stride",
    "partial", "arrived", "whole_jobs",
)  # fmt: skip
UNUSED = ("reserved",)


def _structure(arguments: dict[str, Any]) -> type[ctypes.Structure]:
    """The structure of these members as C++ lays it out, with the alignment that a tensor map asks for.

    ctypes knows that alignment from Python 3.13 on; until then it is made of padding.
    """
    members: list[tuple[str, Any]] = []

    def pad_to_alignment(name: str) -> None:
        size = ctypes.sizeof(type("Members", (ctypes.Structure,), {"_fields_": members}))
        if size % TENSOR_MAP_ALIGNMENT:
            members.append((name, c_uint8 * (-size % TENSOR_MAP_ALIGNMENT)))

    for name, kind in arguments.items():
        if kind is TensorMap:
            pad_to_alignment(f"before_{name}")
        members.append((name, kind))
    pad_to_alignment("behind")
    return type("MatrixArguments", (ctypes.Structure,), {"_fields_": members})


MatrixArguments = _structure(MATRIX_ARGUMENTS)

MXFP4_LARGEST_CODE = 193  # from 194 on a code that is stored 62 ahead begins again at 0
# Up to it scale x 2^126, which makes up for the 2^-126 of elements, is a BF16.
MXFP4_PLAIN_CODE = 128


def operand_range(format: str, least: int, largest: int) -> tuple[int, bool]:
    """Shift, and whether the weight's operands are exact: for scale codes from `least` to `largest` (mxfp4).

    An operand is element x scale x 2^-shift as BF16. The shift makes room for the largest scale, and the sums are
    multiplied by 2^shift. All elements are multiples of 0.5, so what BF16 must hold is 2^(least - 128 - shift), and
    its smallest number is 2^-133. NaN, code 255, is beyond all this.
    """
    if format != "mxfp4":
        return 0, True
    shift = max(0, largest - MXFP4_PLAIN_CODE)
    return shift, largest <= MXFP4_LARGEST_CODE and least >= shift - 5


def operand_scale(format: str, shift: int) -> tuple[int, float]:
    """(scale_offset, factor): what makes BF16 exponents of the stored codes of two rows, and what operands lack."""
    if format == "mxfp4":
        return (64 - shift) * 0x00800080 & 0xFFFFFFFF, 2.0**shift
    return 0, 2.0**7 if format == "nvfp4" else 1.0


class _Slot:
    """Memory of one launch. `seen`: address, rows and stride of the x that the tensor map is of."""

    __slots__ = ("address", "addresses", "arguments", "map", "plain", "programmatic", "seen")


class MatrixLaunch(Launch):
    """One entry of qgemm_mx with all that stays the same from call to call. `from_plan` makes it, of any `GemmPlan`.

    The tensor map of x is encoded when x, M or its stride is not that of the call before.
    """

    SOURCE = "qgemm_mx"
    plan: GemmPlan

    def _prepare(self) -> None:
        plan, n, k = self.plan, self.n, self.k
        self._box = (CHUNK, plan.tokens // plan.share)
        layout = gemv_layout(self.format, n, k)
        of_weight = {
            "n": n,
            "k": k,
            "tile_bytes": layout.tile_bytes,
            "slices_inverse": inverse(layout.slices),
        }
        self._constants = {
            name: fitting(name, of_weight[name] if name in of_weight else getattr(plan, name), kind)
            for name, kind in MATRIX_ARGUMENTS.items()
            if name not in (*OF_A_CALL, *UNUSED)
        }

    def _send(
        self,
        slot: _Slot,
        weight: LinearWeight,
        bias: int,
        x: int,
        y: int,
        m: int,
        x_stride: int,
        y_stride: int,
        stream: int,
        programmatic: bool,
    ) -> None:
        a = slot.arguments
        a.weight, a.row_scale, a.bias = weight.pointer, weight.scale_pointer, bias
        a.scale_offset, a.factor = weight.operand_scale
        a.y, a.y_stride, a.m = y, y_stride, m
        if self.plan.streamed:
            # Sums of two launches may not meet in one workspace: a dependent launch, or one on a stream without a
            # workspace, takes all jobs whole.
            workspace = None if programmatic else self.device.workspace(stream)
            a.whole_jobs = self.plan.whole_jobs if workspace else self.plan.jobs
            a.partial, a.arrived = workspace or (0, 0)
        config = slot.programmatic if programmatic else slot.plain
        config.hStream = stream
        if slot.seen != (x, m, x_stride):
            slot.seen = None
            self.device.encode_map(slot.map, x, (self.k, m), 2 * x_stride, self._box)
            slot.seen = (x, m, x_stride)
        self.device.enqueue_as(config, self.function.ptr, slot.address)

    def _slot(self) -> _Slot:
        slot, size = _Slot(), ctypes.sizeof(MatrixArguments)
        memory = (c_uint8 * (size + TENSOR_MAP_ALIGNMENT))()
        at = -ctypes.addressof(memory) % TENSOR_MAP_ALIGNMENT
        slot.arguments = MatrixArguments.from_buffer(memory, at)
        for name, value in self._constants.items():
            setattr(slot.arguments, name, value)
        slot.arguments.whole_jobs = self.plan.jobs
        first = ctypes.addressof(slot.arguments)
        slot.map, slot.seen = first + MatrixArguments.x.offset, None
        slot.addresses = (ctypes.c_void_p * 1)(first)
        slot.address = ctypes.addressof(slot.addresses)
        shape = (self.plan.grid, self.plan.block, self.plan.shared_bytes, self.plan.cluster)
        slot.plain, slot.programmatic = launch_config(*shape), launch_config(*shape, True)
        return slot
