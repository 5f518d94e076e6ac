"""A launch of qgemv_mx: one entry, its plan, and memory for its arguments, ready for calls."""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_int32, c_int64, c_uint8, c_uint32, c_uint64
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from .device import Device, LaunchConfig, launch_config
from .gemv_plan import GemvPlan
from .launch import LaunchError

if TYPE_CHECKING:
    from .gpu_linear import LinearWeight

# The arguments of every entry of qgemv_mx.cu, in order. Those of OF_A_CALL are written by each call, n and k are the
# weight's, any other is the attribute of the plan that has its name.
ARGUMENTS = {
    "weight": c_uint64,
    "x": c_uint64,
    "tile_bytes": c_uint32,
    "walker_stride": c_uint32,
    "stride": c_uint32,
    "ring_offset": c_uint32,
    "tiles_per_team": c_int32,
    "extra_teams": c_int32,
    "slices": c_int32,
    "warps": c_uint8,
    "depth": c_uint8,
    "walkers": c_uint8,
    "early": c_uint8,
    "y": c_uint64,
    "y_stride": c_int64,
    "x_stride": c_int64,
    "bias": c_uint64,
    "row_scale": c_uint64,
    "teams": c_int32,
    "turn_tiles": c_int32,
    "k": c_int32,
    "n": c_int32,
    "m": c_int32,
    "wide": c_int32,
}
OF_A_CALL = ("weight", "row_scale", "wide", "bias", "x", "y", "m", "x_stride", "y_stride")
_write = struct.Struct(f"={len(OF_A_CALL)}q").pack_into


def fitting(name: str, value: int, kind: Any) -> int:
    """The value of an argument; LaunchError where its type does not hold it."""
    bits = 8 * ctypes.sizeof(kind)
    least = -(2 ** (bits - 1)) if kind(-1).value < 0 else 0
    if not least <= value < least + 2**bits:
        raise LaunchError(f"{name}={value} does not fit into the {bits} bits of its argument")
    return value


class _Slot(NamedTuple):
    """Memory of the arguments of one launch: 8 bytes each, of which the driver reads as many as the type has."""

    values: ctypes.Array
    addresses: ctypes.Array
    address: int  # of the addresses: what the driver takes
    config: LaunchConfig  # of a programmatic launch


class Launch:
    """One entry with all that stays the same from call to call. `from_plan` makes it, of any plan."""

    SOURCE = "qgemv_mx"

    def __init__(
        self,
        plan: GemvPlan,
        function: Any,
        format: str,
        n: int,
        k: int,
        activation: str,
        device: Device,
    ):
        self.plan, self.format, self.n, self.k, self.activation = plan, format, n, k, activation
        self.function, self.device = function, device  # the function keeps its module loaded
        self._prepare()
        self._free = [self._slot()]

    def _prepare(self) -> None:
        """What all slots share."""
        self._constants = {
            name: self._constant(name) for name in ARGUMENTS if name not in OF_A_CALL
        }
        shape = (self.plan.grid, 1, 1, *self.plan.block, 1, self.plan.shared_bytes)
        self._plain = partial(self.device.enqueue, self.function.ptr, *shape)

    @classmethod
    def from_plan(
        cls,
        plan: GemvPlan,
        format: str,
        n: int,
        k: int,
        activation: str,
        device: Device,
        source: str | None = None,
        entry: str | None = None,
    ) -> Self:
        """The launch of a plan of y[M, N] = x[M, K] W[N, K]^T, loaded and ready.

        activation  bf16 or fp16
        device      `qgemm_mx.device.device(ordinal)`
        source      cuda/<source>.cu with entries of the same arguments, instead of the kernel's own
        entry       instead of the plan's own

        LaunchError names an entry that is not there.
        """
        entry = plan.entry(format, activation) if entry is None else entry
        function = device.function(source or cls.SOURCE, entry, plan.shared_bytes)
        return cls(plan, function, format, n, k, activation, device)

    def __call__(
        self,
        weight: LinearWeight,
        x: int,
        y: int,
        m: int,
        x_stride: int | None = None,
        y_stride: int | None = None,
        bias: int = 0,
        stream: int = 0,
        programmatic: bool = False,
    ) -> None:
        """Launch for m rows of x on the current device. Addresses as integers, strides in elements (None: no gaps).

        LaunchError where the weight or m is not what this was made for. x, y and bias are not looked at: `linear` does
        that.
        """
        made_for, given = (self.format, self.n, self.k), (weight.format, weight.n, weight.k)
        if made_for != given:
            raise LaunchError(f"the weight is {given}, the launch is made for {made_for}")
        if not 1 <= m <= self.plan.most_rows:
            raise LaunchError(f"M={m} is not in 1..{self.plan.most_rows}: the launch takes no more")
        x_stride = self.k if x_stride is None else x_stride
        y_stride = self.n if y_stride is None else y_stride
        self.enqueue(weight, bias, x, y, m, x_stride, y_stride, stream, programmatic)

    def enqueue(
        self,
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
        """`__call__` without its checks: what every call of `linear` pays."""
        try:
            slot = self._free.pop()  # one step, so no two threads get the same
        except IndexError:  # more threads are in here than ever before
            slot = self._slot()
        try:
            self._send(slot, weight, bias, x, y, m, x_stride, y_stride, stream, programmatic)
        except RuntimeError:
            if not self.device.attach():
                raise
            # It was this thread's first use of CUDA, and without a context.
            self._send(slot, weight, bias, x, y, m, x_stride, y_stride, stream, programmatic)
        self._free.append(slot)

    def _send(
        self,
        slot: Any,
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
        """Write the arguments of a call into a slot and give them to the driver."""
        values, _, arguments, config = slot
        _write(
            values, 0,
            weight.pointer, weight.scale_pointer, weight.wide, bias, x, y, m, x_stride, y_stride,
        )  # fmt: skip
        if programmatic:
            config.hStream = stream
            self.device.enqueue_as(config, self.function.ptr, arguments)
        else:
            self._plain(stream, arguments, 0)

    def _constant(self, name: str) -> int:
        return fitting(
            name, getattr(self if name in ("n", "k") else self.plan, name), ARGUMENTS[name]
        )

    def _slot(self) -> Any:
        names = (*OF_A_CALL, *self._constants)
        values = (c_int64 * len(names))(*[0] * len(OF_A_CALL), *self._constants.values())
        place = {name: ctypes.addressof(values) + 8 * i for i, name in enumerate(names)}
        addresses = (ctypes.c_void_p * len(ARGUMENTS))(*[place[name] for name in ARGUMENTS])
        shape = (self.plan.grid, self.plan.block, self.plan.shared_bytes)
        config = launch_config(*shape, programmatic=True)
        return _Slot(values, addresses, ctypes.addressof(addresses), config)
