"""`pack_weight` and `linear` without a GPU: the operands they refuse, and the launches they make, on a made-up device.

The device records launches and runs none; arrays have the attributes that CuPy's have. What the kernels compute is
tested on a device (tests/gpu/test_linear_on_device.py).
"""

from __future__ import annotations

import ctypes
import importlib
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from qgemm_mx import (
    build,
    device,
    gemm_launch,
    gemm_plan,
    gemv_launch,
    gemv_layout,
    gpu_linear,
    operands,
)
from qgemm_mx.device import DeviceError
from qgemm_mx.gemm_plan import plan_gemm
from qgemm_mx.gemv_plan import TOKENS, plan_gemv
from qgemm_mx.launch import LaunchError
from qgemm_mx.packing import quantize

BF16 = np.uint16


class Array:
    """What the library reads off a CuPy array; its memory is an interval of made-up addresses."""

    next_address = 1 << 30

    def __init__(self, shape, dtype, strides=None, address=None, ordinal=0):
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.itemsize, self.ndim = self.dtype.itemsize, len(self.shape)
        steps = np.cumprod([1, *self.shape[:0:-1]])[::-1] * self.itemsize
        self.strides = tuple(int(s) for s in steps) if strides is None else strides
        if address is None:
            address = Array.next_address
            Array.next_address += -(-(int(np.prod(shape)) * self.itemsize + 1) // 512) * 512
        self.data = SimpleNamespace(ptr=address, device_id=ordinal)

    contents = None

    def view(self, dtype):
        return Array(self.shape, dtype, self.strides, self.data.ptr)


def in_memory(arguments):
    """What a driver reads: `arguments` is the address of the addresses of the arguments, each as long as its type."""
    addresses = (ctypes.c_void_p * len(gemv_launch.ARGUMENTS)).from_address(arguments)
    return {
        name: kind.from_address(address).value
        for (name, kind), address in zip(gemv_launch.ARGUMENTS.items(), addresses, strict=True)
    }


def in_structure(arguments):
    """The same of an entry that takes one structure; of the tensor map what `Gpu.encode_map` wrote."""
    address = ctypes.c_void_p.from_address(arguments).value
    assert address % 64 == 0
    found = gemm_launch.MatrixArguments.from_address(address)
    values = {name: getattr(found, name) for name in gemm_launch.MATRIX_ARGUMENTS}
    pointer, columns, rows, stride, *box = values["x"].opaque[:6]
    x = SimpleNamespace(pointer=pointer, columns=columns, rows=rows, stride=stride, box=tuple(box))
    return {**values, "x": x}


class Gpu:
    """Records what is launched. `ordinal` 0; 132 SMs."""

    ordinal, sm_count, smem_per_sm = 0, 132, 233472

    def __init__(self):
        self.launched, self.packed, self.loaded, self.allocated, self.encoded = [], [], [], 0, 0
        self.alone, self.current, self.attached = True, True, True
        self.status, self.without_context, self.refused = (0, 124, 110), 0, None  # of packing
        self.entered, self.during = [], lambda: None
        self.prepared, self.workspaces = None, 4  # sizes of a block; streams that get one
        self.workspace_of = {}

    def is_current(self):
        return self.current

    @contextmanager
    def made_current(self):
        before, self.current = self.current, True
        self.entered.append(len(self.launched))
        yield
        self.current = before

    def function(self, source, entry, shared_bytes=0):
        self.loaded.append((source, entry, shared_bytes))

        def call(grid, block, arguments):
            self.packed.append(
                SimpleNamespace(entry=entry, grid=grid, block=block, arguments=arguments)
            )

        call.ptr = len(self.loaded) - 1
        return call

    def enqueue(self, handle, *shape_and_stream_and_arguments):
        *shape, shared, stream, arguments, extra = shape_and_stream_and_arguments
        assert self.alone or self.current
        assert extra == 0 and shape[1:3] == [1, 1] and shape[5:] == [1]
        self.record(handle, shape[0], tuple(shape[3:5]), shared, stream, arguments, False)

    def enqueue_as(self, config, handle, arguments):
        assert (config.gridDimY, config.gridDimZ, config.blockDimZ) == (1,) * 3
        found = {a.id: (a.value, *a.rest[:2]) for a in config.attrs[: config.numAttrs]}
        assert found.pop(6, None) in (None, (1, 0, 0)) and set(found) <= {4}
        cluster, *ones = found.get(4, (1, 1, 1))
        assert ones == [1, 1] and config.gridDimX % cluster == 0
        self.record(
            handle, config.gridDimX, (config.blockDimX, config.blockDimY), config.sharedMemBytes,
            config.hStream or 0, arguments, config.numAttrs > len(found), cluster,
        )  # fmt: skip

    def record(self, handle, grid, block, shared, stream, arguments, programmatic, cluster=1):
        if self.refused:
            raise self.refused
        self.during()
        source, entry, _ = self.loaded[handle]
        read = in_structure if source == "qgemm_mx" else in_memory
        self.launched.append(SimpleNamespace(
            entry=entry, grid=grid, block=block, shared=shared, stream=stream,
            programmatic=programmatic, arguments=read(arguments), cluster=cluster,
        ))  # fmt: skip

    def encode_map(self, at, pointer, shape, stride, box):
        if self.refused:
            raise self.refused
        assert at % 64 == 0 and pointer % 16 == 0 and stride % 16 == 0
        self.encoded += 1
        device.TensorMap.from_address(at).opaque[:6] = [pointer, *shape, stride, *box]

    def prepare_workspaces(self, block_bytes, block_flags):
        self.prepared = (block_bytes, block_flags)

    def workspace(self, stream):
        if stream not in self.workspace_of and len(self.workspace_of) < self.workspaces:
            place = 1 + len(self.workspace_of)
            self.workspace_of[stream] = (place << 20, place << 10)
        return self.workspace_of.get(stream)

    def attach(self):
        first, self.attached, self.refused = not self.attached, True, None
        return first

    @contextmanager
    def on(self, stream):
        yield

    def empty(self, count, dtype):
        self.allocated += 1
        return Array((count,), dtype)

    zeros = empty

    def upload(self, array):
        made = Array(array.shape, array.dtype)
        made.contents = array
        return made

    def download(self, array):
        return np.array(self.status)


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()

    def empty(like, shape):
        made.allocated += 1
        return Array(shape, like.dtype)

    library = operands.Library(operands._read_cupy, empty, lambda a: a.data.ptr, lambda device: 77)
    monkeypatch.setitem(operands.LIBRARIES, Array, library)
    monkeypatch.setattr(gpu_linear, "as_cupy", lambda name, array: array)
    monkeypatch.setattr(gpu_linear, "device", lambda ordinal: made)
    monkeypatch.setattr(gpu_linear, "current_device", lambda: 0)
    caches = (
        gpu_linear.launches, gpu_linear._by_rows, gpu_linear.matrix_launches,
        gpu_linear._matrix_functions,
    )  # fmt: skip
    for cached in caches:
        cached.cache_clear()
    yield made
    for cached in caches:
        cached.cache_clear()


def weight_of(gpu, fmt="mxfp4", n=40, k=384, **more):
    rng = np.random.default_rng(2)
    packed = quantize(rng.normal(0, 1, (n, k)).astype(np.float32), fmt)
    return gpu_linear.pack_weight(packed, **more)


def named(launch):
    return SimpleNamespace(**launch.arguments)


OF_THE_PLAN = [a for a in gemv_launch.ARGUMENTS if a not in (*gemv_launch.OF_A_CALL, "n", "k")]


def cut(launch):
    """What the plan decides of a recorded launch."""
    shape = (launch.entry, launch.grid, launch.block, launch.shared)
    return shape, {name: launch.arguments[name] for name in OF_THE_PLAN}


def planned(plan, fmt, activation):
    """The same, as the plan has it."""
    shape = (plan.entry(fmt, activation), plan.grid, plan.block, plan.shared_bytes)
    return shape, {name: getattr(plan, name) for name in OF_THE_PLAN}


# ---------------------------------------------------------------- packing


def test_packing_launches_one_thread_a_word_and_makes_every_launch_ready(gpu):
    packed = quantize(np.ones((40, 384), np.float32), "mxfp4")
    weight = gpu_linear.pack_weight(packed)
    (launch,) = gpu.packed
    layout = gemv_layout.gemv_layout("mxfp4", 40, 384)
    assert launch.entry == "pack_gemv_mxfp4" and launch.block == (256,)
    assert 256 * (launch.grid[0] - 1) < layout.nbytes // 4 <= 256 * launch.grid[0]
    assert launch.arguments[2] is weight.data and launch.arguments[4:] == (40, 384, 192, 12)
    loaded = [one[1:] for one in gpu.loaded if one[0] == "qgemv_mx"]
    wanted = []  # two ways of launching, five sizes, two types
    for programmatic in (False, True):
        for m in TOKENS:
            plan = plan_gemv(40, 384, m, "mxfp4", 132, programmatic=programmatic)
            wanted += [(plan.entry("mxfp4", a), plan.shared_bytes) for a in ("bf16", "fp16")]
    assert loaded == wanted and len(wanted) == 20  # each once
    assert weight.plan(1) == plan_gemv(40, 384, 1, "mxfp4", 132)
    assert weight.nbytes == layout.nbytes


def test_signed_bytes_are_the_same_bytes(gpu):
    values, scales = Array((40, 192), np.int8), Array((40, 12), np.uint8)
    gpu_linear.pack_weight(values, scales, "mxfp4")
    assert gpu.packed[0].arguments[0].data.ptr == values.data.ptr


def test_a_shard_keeps_its_own_tensor_scale(gpu):
    values, scales = Array((40, 192), np.uint8), Array((40, 24), np.uint8)
    weight = gpu_linear.pack_weight(
        values, scales, "nvfp4", tensor_scale=[0.5, 0.25], shard_rows=(16, 24)
    )
    assert np.array_equal(weight.row_scale.contents, np.repeat(np.float32([0.5, 0.25]), (16, 24)))
    gpu_linear.linear(Array((1, 384), BF16), weight)
    a = named(gpu.launched[0])
    assert (a.weight, a.row_scale) == (weight.data.data.ptr, weight.row_scale.data.ptr)


def test_a_format_without_a_tensor_scale_passes_a_valid_pointer(gpu):
    weight = weight_of(gpu)
    gpu_linear.linear(Array((1, 384), BF16), weight)
    assert named(gpu.launched[0]).row_scale == weight.data.data.ptr


@pytest.mark.parametrize("found", [0, 1])
def test_wide_is_what_the_packing_kernel_found(gpu, found):
    gpu.status = (found, 193 if found else 192, 190)
    weight = weight_of(gpu)
    gpu_linear.linear(Array((1, 384), BF16), weight)
    assert weight.wide is bool(found) and named(gpu.launched[0]).wide == found


def test_strided_checkpoints_are_read_where_they_lie(gpu):
    values = Array((40, 192), np.uint8, strides=(200, 1))
    scales = Array((40, 3), np.uint16, strides=(14, 2))
    gpu_linear.pack_weight(values, scales, "int4_g128")
    assert gpu.packed[0].arguments[4:] == (40, 384, 200, 7)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scales": None}, ValueError, "needs values, scales and format"),
        ({"format": "int4_g64"}, ValueError, "no qgemv_mx layout"),
        ({"format": "fp8"}, ValueError, "format 'fp8' is not one of"),
        ({"format": "nvfp4"}, ValueError, "tensor_scale is missing"),
        ({"tensor_scale": 0.5}, ValueError, "mxfp4 has no tensor scale"),
        ({"scales": Array((40, 13), np.uint8)}, ValueError, r"scales is uint8 \[40, 13\]"),
        ({"values": Array((40, 100), np.uint8)}, ValueError, "K=200 is not a multiple"),
        ({"values": Array((40, 192), np.int16)}, ValueError, "values is int16"),
        ({"values": Array((40, 192), np.uint8, strides=(100, 1))}, ValueError, "row stride of 100"),
        ({"values": Array((40, 192), np.uint8, strides=(1, 40))}, ValueError, "column stride of 40"),
        ({"scales": Array((40, 12), np.uint8, ordinal=1)}, LaunchError, "scales are on device 1"),
        ({"format": ["mxfp4"]}, ValueError, r"format \['mxfp4'\] is not one of mxfp4, nvfp4"),
        ({"values": np.zeros((40, 192), np.uint8)}, TypeError, "values is numpy.ndarray.*must lie on a device"),
    ],
)  # fmt: skip
def test_a_weight_that_does_not_fit_is_named(gpu, change, error, message):
    given = {
        "values": Array((40, 192), np.uint8), "scales": Array((40, 12), np.uint8), "format": "mxfp4",
    }  # fmt: skip
    with pytest.raises(error, match=message):
        gpu_linear.pack_weight(**given | change)


@pytest.mark.parametrize(
    ("scale", "rows", "message"),
    [
        ([0.5, 0.5], None, "not one per shard"), (0.5, (16, 16), "do not sum to N=40"),
        ([1.0, 0.0], (16, 24), "not positive and finite"), (float("nan"), None, "not positive"),
    ],
)  # fmt: skip
def test_a_tensor_scale_that_does_not_fit_is_named(gpu, scale, rows, message):
    values, scales = Array((40, 192), np.uint8), Array((40, 24), np.uint8)
    with pytest.raises(ValueError, match=message):
        gpu_linear.pack_weight(values, scales, "nvfp4", tensor_scale=scale, shard_rows=rows)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("make", [np.zeros, Array], ids=["host", "device"])
@pytest.mark.parametrize("more", [{}, {"scales": Array((40, 12), np.uint8), "format": "mxfp4"}])
def test_a_weight_that_is_not_quantised_is_sent_to_quantize(gpu, dtype, make, more):
    name = np.dtype(dtype).name
    says = rf"values is {name} \[40, 384\], .* quantize it first, pack_weight\(quantize\("
    with pytest.raises(ValueError, match=says):
        gpu_linear.pack_weight(make((40, 384), dtype), **more)
    assert not gpu.packed


def test_a_packed_weight_takes_no_more(gpu):
    packed = quantize(np.ones((8, 64), np.float32), "mxfp4")
    with pytest.raises(ValueError, match="give no others"):
        gpu_linear.pack_weight(packed, format="mxfp4")


def test_data_of_another_size_is_named(gpu):
    size = gemv_layout.gemv_layout("mxfp4", 16, 64).nbytes
    with pytest.raises(LaunchError, match=rf"data is uint8 \[7\], not uint8 \[{size}\]"):
        gpu_linear.LinearWeight("mxfp4", 16, 64, Array((7,), np.uint8), None, False, 0)
    elsewhere = Array((size,), np.uint8, ordinal=1)
    with pytest.raises(LaunchError, match="data is on device 1, not on 0"):
        gpu_linear.LinearWeight("mxfp4", 16, 64, elsewhere, None, False, 0)
    shifted = Array((size,), np.uint8, address=8)
    with pytest.raises(LaunchError, match="not contiguous from a multiple of 16 bytes"):
        gpu_linear.LinearWeight("mxfp4", 16, 64, shifted, None, False, 0)


# ---------------------------------------------------------------- calls


@pytest.mark.parametrize("m", [1, 3, 7, 8])
@pytest.mark.parametrize(("dtype", "activation"), [(BF16, "bf16"), (np.float16, "fp16")])
def test_a_call_is_one_launch_of_the_planned_entry(gpu, m, dtype, activation):
    weight = weight_of(gpu)
    x, out = Array((m, 384), dtype), Array((m, 40), dtype)
    assert gpu_linear.linear(x, weight, out=out) is out
    (launch,) = gpu.launched
    plan, a = plan_gemv(40, 384, m, "mxfp4", 132), named(launch)
    assert cut(launch) == planned(plan, "mxfp4", activation)
    assert (a.x, a.y, a.bias) == (x.data.ptr, out.data.ptr, 0)
    assert (a.m, a.n, a.k, a.x_stride, a.y_stride) == (m, 40, 384, 384, 40)
    assert not launch.programmatic and launch.stream == 77


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("dtype", "activation"), [(BF16, "bf16"), (np.float16, "fp16")])
@pytest.mark.parametrize(("n", "k"), [(40, 384), (1024, 4096), (4096, 4096)])
def test_a_dependent_call_has_the_dependent_plan_and_a_plain_one_the_plain(
    gpu, n, k, dtype, activation, batch_invariant
):
    weight = weight_of(gpu, n=n, k=k)
    for m in (1, 3, 16, 37) if batch_invariant or activation == "fp16" else (1, 3, 8):
        x, cuts = Array((m, k), dtype), []
        for programmatic in (False, True, False):
            gpu.launched.clear()
            gpu_linear.linear(x, weight, batch_invariant=batch_invariant, programmatic=programmatic)
            rows = [min(16, m - first) for first in range(0, m, 16)]
            assert [named(c).m for c in gpu.launched] == rows
            for launch, own in zip(gpu.launched, rows, strict=True):
                tokens = 16 if batch_invariant else own
                plan = plan_gemv(n, k, tokens, "mxfp4", 132, programmatic=programmatic)
                assert cut(launch) == planned(plan, "mxfp4", activation)
                assert launch.programmatic is programmatic
                assert named(launch).early == int(programmatic)
            cuts.append([cut(launch) for launch in gpu.launched])
        assert cuts[0] == cuts[2] and all(a != b for a, b in zip(*cuts[:2], strict=True))


def test_rows_may_be_strided(gpu):
    weight = weight_of(gpu)
    x = Array((3, 384), BF16, strides=(1024, 2))
    out = Array((3, 40), BF16, strides=(98, 2), address=1002)
    gpu_linear.linear(x, weight, out=out, bias=Array((40,), BF16, address=4242))
    a = named(gpu.launched[0])
    assert (a.x_stride, a.y_stride, a.y, a.bias) == (512, 49, 1002, 4242)


def test_more_than_sixteen_rows_of_fp16_go_in_several_launches(gpu):
    weight = weight_of(gpu)
    x = Array((37, 384), np.float16, strides=(800, 2))
    out = Array((37, 40), np.float16, strides=(100, 2))
    gpu_linear.linear(x, weight, out=out)
    calls = [named(launch) for launch in gpu.launched]
    assert [c.m for c in calls] == [16, 16, 5]
    assert [c.x - x.data.ptr for c in calls] == [0, 16 * 800, 32 * 800]
    assert [c.y - out.data.ptr for c in calls] == [0, 16 * 100, 32 * 100]
    assert [launch.entry.split("_")[4] for launch in gpu.launched] == ["t16", "t16", "t8"]


def test_no_rows_are_no_launch(gpu):
    weight = weight_of(gpu)
    y = gpu_linear.linear(Array((0, 384), BF16), weight)
    assert y.shape == (0, 40) and not gpu.launched


def test_batch_invariant_calls_use_one_entry_and_one_plan(gpu):
    weight = weight_of(gpu, n=1024, k=4096)
    for m in (1, 2, 8, 16, 33):
        gpu_linear.linear(Array((m, 4096), BF16), weight, batch_invariant=True)
    assert len(gpu.launched) == 7
    wanted = planned(plan_gemv(1024, 4096, 16, "mxfp4", 132), "mxfp4", "bf16")
    assert all(cut(c) == wanted for c in gpu.launched)
    assert gpu.launched[0].entry.split("_")[4] == "t16"
    assert weight.plan(1, batch_invariant=True) == plan_gemv(1024, 4096, 16, "mxfp4", 132)


def test_nothing_is_made_or_loaded_by_a_call_with_out(gpu, monkeypatch):
    weight = weight_of(gpu)
    monkeypatch.delattr(
        gpu_linear.Launch, "_slot"
    )  # the memory of the arguments is there, and comes back
    x, out = Array((2, 384), BF16), Array((2, 40), BF16)
    loaded, allocated = len(gpu.loaded), gpu.allocated
    for _ in range(2):  # the first call too: it may be captured
        for programmatic in (False, True):
            for invariant in (False, True):
                gpu_linear.linear(x, weight, out, None, None, invariant, programmatic)
    assert len(gpu.launched) == 8
    assert (len(gpu.loaded), gpu.allocated) == (loaded, allocated)
    gpu_linear.linear(x, weight)
    assert gpu.allocated == allocated + 1


def test_weights_of_one_shape_share_their_launches(gpu):
    weight_of(gpu)
    loaded = len([source for source, *_ in gpu.loaded if source == "qgemv_mx"])
    other = weight_of(gpu)
    assert len([source for source, *_ in gpu.loaded if source == "qgemv_mx"]) == loaded
    gpu_linear.linear(Array((1, 384), BF16), other)
    assert named(gpu.launched[0]).weight == other.data.data.ptr


@pytest.mark.parametrize(
    ("stream", "address"),
    [
        (None, 77), (SimpleNamespace(ptr=5), 5), (7, 7), (SimpleNamespace(cuda_stream=9), 9),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 11)), 11),
    ],
)  # fmt: skip
def test_the_stream_that_is_given_is_used(gpu, stream, address):
    weight = weight_of(gpu)
    gpu_linear.linear(Array((1, 384), BF16), weight, stream=stream)
    gpu_linear.linear(Array((1, 384), BF16), weight, stream=stream, programmatic=True)
    assert [(c.stream, c.programmatic) for c in gpu.launched] == [(address, False), (address, True)]
    assert gpu.launched[0].arguments.keys() == gpu.launched[1].arguments.keys()


def test_a_call_goes_to_the_device_of_the_weight(gpu):
    weight = weight_of(gpu)
    gpu.alone = gpu.current = False
    for m in (1, 17):
        out = Array((m, 40), BF16)
        assert gpu_linear.linear(Array((m, 384), BF16), weight, out=out) is out
    assert gpu.entered == [0, 1] and len(gpu.launched) == 2 and not gpu.current
    for m in (1, 17):
        made = gpu_linear.linear(Array((m, 384), BF16), weight)
        assert named(gpu.launched[-1]).y == made.data.ptr


def test_a_thread_without_a_context_gets_one(gpu):
    weight = weight_of(gpu)
    for programmatic in (False, True):
        gpu.attached, gpu.refused = False, RuntimeError("CUDA_ERROR_INVALID_CONTEXT")
        gpu_linear.linear(Array((1, 384), BF16), weight, programmatic=programmatic)
    assert [c.programmatic for c in gpu.launched] == [False, True] and gpu.attached


def test_what_the_driver_refuses_is_raised_and_later_calls_work(gpu):
    weight = weight_of(gpu)
    gpu.refused = RuntimeError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")
    with pytest.raises(RuntimeError, match="OUT_OF_RESOURCES"):
        gpu_linear.linear(Array((1, 384), BF16), weight)
    x = Array((1, 384), BF16)
    gpu_linear.linear(x, weight)
    assert [named(c).x for c in gpu.launched] == [x.data.ptr]


def test_a_launch_within_a_launch_has_arguments_of_its_own(gpu):
    """As when another thread calls while the driver has not yet read the arguments of this one."""
    weight = weight_of(gpu)
    x, other = Array((1, 384), BF16), Array((1, 384), BF16)

    def during():
        gpu.during = lambda: None
        gpu_linear.linear(other, weight)

    gpu.during = during
    gpu_linear.linear(x, weight)
    assert [named(c).x for c in gpu.launched] == [other.data.ptr, x.data.ptr]


def test_threads_do_not_mix_their_arguments(gpu):
    weight = weight_of(gpu)
    gpu.during = lambda: time.sleep(1e-5)  # lets another thread in, as the driver's call does
    xs = [Array((m, 384), BF16) for m in (1, 1, 1, 1) for _ in range(100)]
    outs = [Array((1, 40), BF16) for _ in xs]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda x, out: gpu_linear.linear(x, weight, out=out), xs, outs))
    seen = {(named(c).x, named(c).y) for c in gpu.launched}
    assert seen == {(x.data.ptr, y.data.ptr) for x, y in zip(xs, outs, strict=True)}


# ---------------------------------------------------------------- a plan of one's own


def test_a_launch_of_another_plan(gpu):
    weight = weight_of(gpu)
    plan = replace(plan_gemv(40, 384, 3, "mxfp4", 132), teams=2, tiles_per_team=1, extra_teams=1)
    launch = gpu_linear.Launch.from_plan(plan, "mxfp4", 40, 384, "fp16", gpu)
    launch(weight, 4096, 8192, 3, stream=5, bias=9, x_stride=400, programmatic=True)
    launch(weight, 4096, 8192, 2)
    first, second = gpu.launched
    assert first.entry == plan.entry("mxfp4", "fp16") and first.grid == plan.grid
    assert (first.stream, first.programmatic, second.stream) == (5, True, 0)
    a, b = named(first), named(second)
    assert (a.x, a.y, a.m, a.bias, a.x_stride, a.y_stride) == (4096, 8192, 3, 9, 400, 40)
    assert (b.m, b.bias, b.x_stride) == (2, 0, 384)
    assert (a.tiles_per_team, a.extra_teams, a.weight) == (1, 1, weight.pointer)


def test_a_launch_of_another_source(gpu):
    plan = plan_gemv(40, 384, 1, "mxfp4", 132)
    problem = ("mxfp4", 40, 384, "bf16", gpu)
    gpu_linear.Launch.from_plan(plan, *problem, source="ablations", entry="without")
    assert gpu.loaded[-1] == ("ablations", "without", plan.shared_bytes)


def test_a_launch_refuses_what_it_is_not_made_for(gpu):
    weight = weight_of(gpu)
    plan = plan_gemv(40, 384, 4, "mxfp4", 132)
    launch = gpu_linear.Launch.from_plan(plan, "mxfp4", 40, 384, "bf16", gpu)
    for m in (0, 5):
        with pytest.raises(LaunchError, match=f"M={m} is not in 1..4"):
            launch(weight, 4096, 8192, m)
    with pytest.raises(LaunchError, match=r"made for \('mxfp4', 40, 384\)"):
        launch(weight_of(gpu, n=48), 4096, 8192, 1)
    assert not gpu.launched


@pytest.mark.parametrize(
    ("name", "least", "most", "bits"),
    [
        ("ring_offset", 0, 2**32 - 1, 32), ("stride", 0, 2**32 - 1, 32), ("depth", 0, 255, 8),
        ("walkers", 0, 255, 8), ("slices", -(2**31), 2**31 - 1, 32),
    ],
)  # fmt: skip
def test_a_number_that_an_argument_does_not_hold_is_named(gpu, name, least, most, bits):
    weight = weight_of(gpu)
    plan = plan_gemv(40, 384, 4, "mxfp4", 132)

    def launch(value):
        # In the argument alone: block and shared memory stay those of the plan.
        made = type("Made", (type(plan),), {"block": plan.block})
        changed = made(**{f.name: getattr(plan, f.name) for f in fields(plan)} | {name: value})
        return gpu_linear.Launch.from_plan(changed, "mxfp4", 40, 384, "bf16", gpu)

    for value in (least, most):
        launch(value)(weight, 4096, 8192, 1)
        assert gpu.launched[-1].arguments[name] == value
    for value in (least - 1, most + 1):
        with pytest.raises(LaunchError, match=f"{name}={value} does not fit into the {bits} bits"):
            launch(value)


def compiles(folder, lines):
    """What a C++ compiler says of a source that may include the toolkit's headers; nothing when all is well."""
    include = build.find_tool("nvcc").resolve().parents[1] / "include"
    (folder / "check.cpp").write_text("\n".join(lines) + "\n")
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{include}", "check.cpp"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stderr


KINDS = {
    "long long": ctypes.c_int64, "int": ctypes.c_int32, "uint32_t": ctypes.c_uint32,
    "uint8_t": ctypes.c_uint8,
}  # fmt: skip


@pytest.mark.parametrize("name", ["qgemv_mx", "qgemv_ablations"])
def test_the_arguments_are_those_of_every_entry(name):
    """In order, in size and in sign, after the preprocessor has made the entries; and as their structure has them."""
    _, macro = (build.CUDA_DIR / "qgemv_mx.cuh").read_text().split("#define QGEMV_ENTRY")
    source = "#define QGEMV_ENTRY" + macro + (build.CUDA_DIR / f"{name}.cu").read_text()
    text = "".join(line for line in source.splitlines(True) if not line.startswith("#include"))
    command = ["g++", "-E", "-P", "-x", "c++", "-"]
    expanded = subprocess.run(
        command, input=text, capture_output=True, text=True, check=True
    ).stdout
    entries = re.findall(r"\b(qgemv_\w+)\s*\(([^)]*)\)\s*\{([^;]*;[^;]*;)", expanded)
    assert {entry for entry, *_ in entries} == set(build.load_sources()[name].threads)

    def kind(declared):
        return ctypes.c_uint64 if "*" in declared else KINDS[declared.rpartition(" ")[0]]

    for parameters, body in {tuple(rest) for _, *rest in entries}:
        declared = [" ".join(p.split()) for p in parameters.split(",")]
        found = {re.findall(r"\w+$", p)[0]: kind(p) for p in declared}
        assert list(found.items()) == list(gemv_launch.ARGUMENTS.items())
        (passed,) = re.findall(r"\(\s*\{([^}]*)\}\s*\)", body)
        assert [p.strip() for p in passed.split(",")] == list(gemv_launch.ARGUMENTS)
    text = (build.CUDA_DIR / "qgemv_mx.cuh").read_text()
    (members,) = re.findall(r"^struct Arguments \{(.*?)^\};", text, flags=re.M | re.S)
    members = re.sub(r"//.*", "", members)
    names = [
        member.split()[-1].lstrip("*")
        for line in members.split(";")
        for member in line.split(",")
        if member.strip()
    ]
    assert names == list(gemv_launch.ARGUMENTS)


def test_the_structure_of_the_matrix_kernel_is_that_of_its_source(tmp_path):
    """In order, and in place and size as the compiler lays it out."""
    text = (build.CUDA_DIR / "qgemm_mx.cuh").read_text()
    (members,) = re.findall(r"^struct Arguments \{(.*?)^\};", text, flags=re.M | re.S)
    declared = re.sub(r"//.*", "", members)
    names = [
        re.findall(r"(\w+)(?:\[\d+\])?$", member.strip())[0]
        for line in declared.split(";")
        for member in line.split(",")
        if member.strip()
    ]
    assert names == list(gemm_launch.MATRIX_ARGUMENTS)
    mirror = gemm_launch.MatrixArguments
    lines = [
        "#include <cuda.h>", "#include <cstddef>", "#include <cstdint>",
        "struct __nv_bfloat16 { uint16_t bits; }; struct float4;", f"struct Arguments {{{members}}};",
        f"static_assert(sizeof(Arguments) == {ctypes.sizeof(mirror)});",
    ]  # fmt: skip
    for name in names:
        place = getattr(mirror, name)
        lines.append(f"static_assert(offsetof(Arguments, {name}) == {place.offset});")
        lines.append(f"static_assert(sizeof(Arguments::{name}) == {place.size});")
    for kind, sign in (("c_int32", -1), ("c_uint32", 1), ("c_uint8", 1), ("c_int64", -1)):
        lines += [
            f"static_assert(static_cast<decltype(Arguments::{name})>(-1) {'<' if sign < 0 else '>'} 0);"
            for name, found in gemm_launch.MATRIX_ARGUMENTS.items()
            if found is getattr(ctypes, kind)
        ]
    assert compiles(tmp_path, lines) == ""


# ---------------------------------------------------------------- the matrix kernel


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "int4_g128"])
@pytest.mark.parametrize("m", [17, 33, 100, 300])
@pytest.mark.parametrize("programmatic", [False, True])
def test_many_rows_of_bf16_are_one_launch_of_the_matrix_kernel(gpu, fmt, m, programmatic):
    weight = weight_of(gpu, fmt)
    x = Array((m, 384), BF16, strides=(800, 2))
    out = Array((m, 40), BF16, strides=(98, 2), address=1002)
    bias = Array((40,), BF16)
    gpu_linear.linear(x, weight, out=out, bias=bias, programmatic=programmatic)
    (launch,) = gpu.launched
    plan, a = plan_gemm(40, 384, m, fmt, 132), named(launch)
    assert weight.plan(m) == plan and weight.plan(m).reasons
    assert launch.entry == plan.entry(fmt, "bf16") and launch.programmatic is programmatic
    assert (launch.grid, launch.block, launch.cluster) == (plan.grid, plan.block, plan.cluster)
    assert (launch.shared, launch.stream) == (plan.shared_bytes, 77)
    kept = [n for n in gemm_launch.MATRIX_ARGUMENTS if n not in gemm_launch.OF_A_CALL and hasattr(plan, n)]  # fmt: skip
    assert len(kept) >= 10 and all(getattr(a, name) == getattr(plan, name) for name in kept)
    assert (a.weight, a.y, a.y_stride, a.bias) == (weight.pointer, 1002, 49, bias.data.ptr)
    assert (a.m, a.n, a.k) == (m, 40, 384)
    assert a.tile_bytes == gemv_layout.gemv_layout(fmt, 40, 384).tile_bytes
    x_map = (a.x.pointer, a.x.columns, a.x.rows, a.x.stride, a.x.box)
    assert x_map == (x.data.ptr, 384, m, 800, (64, plan.tokens // plan.share))
    assert a.factor == {"mxfp4": 1.0, "nvfp4": 128.0, "int4_g128": 1.0}[fmt]
    if fmt == "nvfp4":
        assert a.row_scale == weight.scale_pointer


def test_all_entries_are_loaded_and_workspaces_made_with_the_first_weight(gpu):
    weight_of(gpu, "nvfp4")
    loaded = {entry: shared for source, entry, shared in gpu.loaded if source == "qgemm_mx"}
    assert set(loaded) == set(gemm_plan.entries("nvfp4"))
    assert set(loaded.values()) == {gpu.smem_per_sm - 1024}
    assert gpu.prepared == (gemm_plan.PARTIAL_BYTES, gemm_plan.MOST_WARPS)
    before = len(gpu.loaded)
    weight = weight_of(gpu, "nvfp4", n=56)
    for m in (17, 64, 300, 2000):
        gpu_linear.linear(Array((m, 384), BF16), weight)
    assert not [one for one in gpu.loaded[before:] if one[0] == "qgemm_mx"]


def test_a_tensor_map_is_encoded_only_for_other_rows_than_before(gpu):
    weight = weight_of(gpu)
    x = Array((33, 384), BF16)
    for _ in range(3):
        gpu_linear.linear(x, weight)
    assert gpu.encoded == 1
    gpu_linear.linear(Array((33, 384), BF16), weight)  # at another address
    gpu_linear.linear(Array((40, 384), BF16, address=x.data.ptr), weight)
    assert gpu.encoded == 3
    assert [named(call).x.rows for call in gpu.launched] == [33, 33, 33, 33, 40]


@pytest.mark.parametrize(
    ("given", "status", "more"),
    [
        (np.float16, (0, 124, 110), {}),
        (BF16, (0, 124, 110), {"batch_invariant": True}),
        (BF16, (1, 200, 110), {}),  # a scale that is stored beyond the end of the codes
        (BF16, (1, 255, 110), {}),  # NaN
        (BF16, (0, 160, 20), {}),  # scales too far apart for one shift
    ],
    ids=["fp16", "batch_invariant", "beyond", "nan", "far_apart"],
)  # fmt: skip
def test_what_the_matrix_kernel_does_not_take_goes_in_launches_of_sixteen_rows(
    gpu, given, status, more
):
    gpu.status = status
    weight = weight_of(gpu)
    assert weight.matrix is (status[1:] == (124, 110))
    gpu_linear.linear(Array((37, 384), given), weight, **more)
    assert all(launch.entry.startswith("qgemv_mx_mxfp4") for launch in gpu.launched)
    assert [named(launch).m for launch in gpu.launched] == [16, 16, 5]


def test_a_wide_weight_whose_operands_are_exact_stays_with_the_matrix_kernel(gpu):
    gpu.status = (1, 193, 190)
    weight = weight_of(gpu)
    assert weight.wide and weight.matrix and weight.shift == 65
    gpu_linear.linear(Array((37, 384), BF16), weight)
    a = named(gpu.launched[0])
    assert (a.scale_offset, a.factor) == gemm_launch.operand_scale("mxfp4", 65)


def test_operands_of_mxfp4_are_exact_where_it_is_said_so():
    exact = 0
    for largest in range(256):
        for least in range(largest + 1):
            shift, matrix = gemm_launch.operand_range("mxfp4", least, largest)
            if not matrix:
                continue
            exact += 1
            assert largest != 255 and shift >= 0
            for code in (least, largest):
                # The factor is code -> 2^(code - 127 + 126 - shift), whose BF16 exponent is that of the stored code
                # with the offset; elements are k/2 x 2^-126, so an operand is a multiple of 2^(code - 128 - shift).
                exponent = (code + 62) % 256 + 64 - shift
                assert exponent == code + 126 - shift and 1 <= exponent <= 254
                assert code - 128 - shift >= -133 and 6 * 2.0 ** (code - 127 - shift) < 2.0**128
    assert exact > 10_000
    assert gemm_launch.operand_range("mxfp4", 110, 124) == (0, True)
    assert not gemm_launch.operand_range("mxfp4", 100, 255)[1]
    for fmt in ("nvfp4", "int4_g128"):
        assert gemm_launch.operand_range(fmt, 0, 255) == (0, True)
    offset, factor = gemm_launch.operand_scale("mxfp4", 65)
    assert factor == 2.0**65 and offset == (-1 * 0x00800080) & 0xFFFFFFFF


@pytest.fixture
def streamed(gpu):
    """A weight, and the launch of a plan whose jobs are shared between clusters."""
    weight = weight_of(gpu, n=4096, k=4096)
    plan = gemm_plan.complete(4096, 4096, 33, "mxfp4", 132, tokens=64, rows=128, streamed=True)
    assert plan.streamed and plan.whole_jobs == 0 and plan.clusters == 132 and plan.jobs == 32
    return weight, gemm_launch.MatrixLaunch.from_plan(plan, "mxfp4", 4096, 4096, "bf16", gpu)


def shared(gpu) -> tuple:
    a = named(gpu.launched[-1])
    return a.whole_jobs, a.partial, a.arrived


def test_a_streamed_launch_has_the_workspace_of_its_stream(gpu, streamed):
    weight, launch = streamed
    for stream in (5, 6, 5):
        launch(weight, 1 << 16, 1 << 17, 33, stream=stream)
    found = [(named(c).whole_jobs, named(c).partial, named(c).arrived) for c in gpu.launched]
    assert found == [(0, 1 << 20, 1 << 10), (0, 2 << 20, 2 << 10), (0, 1 << 20, 1 << 10)]


def test_a_streamed_launch_takes_all_jobs_whole_where_sums_could_meet(gpu, streamed):
    weight, launch = streamed
    launch(weight, 1 << 16, 1 << 17, 33, stream=5, programmatic=True)
    assert shared(gpu) == (32, 0, 0) and gpu.launched[-1].programmatic
    launch(weight, 1 << 16, 1 << 17, 33, stream=5)
    assert shared(gpu) == (0, 1 << 20, 1 << 10)
    gpu.workspaces = 1
    launch(weight, 1 << 16, 1 << 17, 33, stream=6)
    assert shared(gpu) == (32, 0, 0)
    launch(weight, 1 << 16, 1 << 17, 33, stream=5)
    assert shared(gpu) == (0, 1 << 20, 1 << 10)


def test_no_more_streams_than_workspaces_get_one(monkeypatch):
    made = object.__new__(device.Device)
    made._loading, made._workspace_of = device.threading.Lock(), {}
    made._workspaces = [
        (
            SimpleNamespace(data=SimpleNamespace(ptr=i)),
            SimpleNamespace(data=SimpleNamespace(ptr=-i)),
        )
        for i in range(1, device.WORKSPACES + 1)
    ]
    streams = [7, 0, 7, 3, 4, 9, 3, 9]
    found = [made.workspace(stream) for stream in streams]
    assert found == [(1, -1), (2, -2), (1, -1), (3, -3), (4, -4), None, (3, -3), None]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": Array((2, 384), np.float32)}, LaunchError, "x is float32, not BF16"),
        ({"x": Array((2, 256), BF16)}, LaunchError, r"x is \[2, 256\], not \[M, K=384\]"),
        ({"x": Array((384,), BF16)}, LaunchError, r"x is \[384\], not"),
        ({"x": Array((2, 384), BF16, ordinal=1)}, LaunchError, "x is on device 1, the weight on device 0"),
        ({"x": Array((2, 384), BF16, address=1032)}, LaunchError, "multiple of 16 bytes"),
        ({"x": Array((2, 384), BF16, strides=(776, 2))}, LaunchError, "rows 776 bytes apart"),
        ({"x": Array((2, 384), BF16, strides=(2, 4))}, LaunchError, "column stride of 2 elements"),
        ({"x": Array((2, 384), BF16, strides=(-768, 2))}, LaunchError, "rows overlap or run backwards"),
        ({"x": Array((2, 384), BF16, strides=(0, 2))}, LaunchError, "rows overlap or run backwards"),
        ({"x": np.zeros((2, 384), BF16)}, TypeError, "x is numpy.ndarray, .* it must lie on a device"),
        ({"out": np.zeros((2, 40), BF16)}, TypeError, "out is numpy.ndarray, .* lie on a device"),
        ({"x": [1.0]}, TypeError, "x is builtins.list: it must be a device array"),
        ({"out": Array((2, 41), BF16)}, LaunchError, r"out is \[2, 41\], not \[M, N\] = \[2, 40\]"),
        ({"out": Array((2, 40), np.float16)}, LaunchError, "out is float16, x is uint16"),
        ({"out": Array((2, 40), np.float32)}, LaunchError, "out is float32"),
        ({"out": Array((2, 40), BF16, ordinal=1)}, LaunchError, "out is on device 1"),
        ({"out": Array((2, 40), BF16, strides=(2, 4))}, LaunchError, "out has a column stride"),
        ({"out": Array((2, 40), BF16, strides=(60, 2))}, LaunchError, "out has a row stride of 30"),
        ({"bias": Array((41,), BF16)}, LaunchError, r"bias is \[41\]"),
        ({"bias": Array((40,), np.float32)}, LaunchError, "bias is float32, x is bf16"),
        ({"bias": Array((40,), BF16, strides=(4,))}, LaunchError, "not contiguous"),
        ({"bias": Array((40,), BF16, ordinal=1)}, LaunchError, "bias is on device 1"),
        ({"stream": "main"}, TypeError, "stream is str"),
    ],
)  # fmt: skip
def test_operands_that_a_call_cannot_take_are_named(gpu, change, error, message):
    weight = weight_of(gpu)
    with pytest.raises(error, match=message):
        gpu_linear.linear(**{"x": Array((2, 384), BF16), "w": weight} | change)
    assert not gpu.launched


def test_one_row_needs_no_aligned_stride(gpu):
    weight = weight_of(gpu)
    gpu_linear.linear(Array((1, 384), BF16, strides=(6, 2)), weight)
    assert named(gpu.launched[0]).x_stride == 384


# ---------------------------------------------------------------- the device edge


@pytest.mark.parametrize(
    ("capability", "architectures", "found"),
    [
        ("90", ("sm_86", "sm_90a"), "sm_90a"), ("86", ("sm_86", "sm_90a"), "sm_86"),
        ("89", ("sm_86", "sm_90a"), "sm_86"), ("80", ("sm_86",), None), ("100", ("sm_90a",), None),
        ("86", ("sm_90a",), None),
    ],
)  # fmt: skip
def test_the_architecture_is_one_that_runs_on_the_device(capability, architectures, found):
    source = SimpleNamespace(name="kernel", architectures=architectures)
    if found is None:
        with pytest.raises(LaunchError, match=f"the device is sm_{capability}"):
            device.architecture(capability, source)
    else:
        assert device.architecture(capability, source) == found


def test_cubins_are_kept_in_the_cache_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert device.cache_folder() == tmp_path / "qgemm_mx"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert device.cache_folder() == tmp_path / ".cache" / "qgemm_mx"


class Driver:
    """As much of CuPy as `Device` asks for; a kernel's leave belongs to its name, as in the driver."""

    def __init__(self):
        leave, carveout = self.leave, self.carveout = {}, {}
        missing = self.missing = {"gone"}

        class DriverError(Exception):
            pass

        class Kernel:
            def __init__(self, name):
                self.name = name

            @property
            def kernel(self):
                if self.name in missing:
                    raise DriverError("CUDA_ERROR_NOT_FOUND")
                return self

            def __setattr__(self, name, value):
                if name == "max_dynamic_shared_size_bytes":
                    leave[self.name] = value
                if name == "preferred_shared_memory_carveout":
                    carveout[self.name] = value
                object.__setattr__(self, name, value)

        properties = {
            "major": 9, "minor": 0, "multiProcessorCount": 132, "sharedMemPerMultiprocessor": 233472,
        }  # fmt: skip
        self.current, self.context = [0], 16
        self.cuda = SimpleNamespace(
            driver=SimpleNamespace(
                CUDADriverError=DriverError,
                launchKernel=None,
                ctxGetCurrent=lambda: self.context,
            ),
            runtime=SimpleNamespace(
                getDeviceProperties=lambda ordinal: properties,
                getDeviceCount=lambda: 1,
                getDevice=lambda: self.current[-1],
                setDevice=self.current.append,
            ),
        )
        self.RawModule = lambda path: SimpleNamespace(get_function=Kernel)


@pytest.fixture
def made_up(monkeypatch):
    driver = Driver()
    monkeypatch.setitem(sys.modules, "cupy", driver)
    monkeypatch.setattr(device.Device, "_cubin", lambda self, name: f"{name}.cubin")
    return driver, device.Device(0)


def test_leave_to_use_shared_memory_only_grows(made_up):
    driver, gpu = made_up
    for shared_bytes, leave in ((60_000, 60_000), (200_000, 200_000), (70_000, 200_000)):
        gpu.function("qgemv_mx", "entry", shared_bytes)
        assert driver.leave == {"entry": leave}
        assert driver.carveout == {"entry": 100}  # one split of L1: dependent kernels share SMs
    assert (gpu.compute_capability, gpu.sm_count, gpu.is_current()) == ("90", 132, True)


def test_the_current_device_comes_back(made_up):
    driver, gpu = made_up
    driver.current[:] = [3]
    with pytest.raises(KeyError), gpu.made_current():
        assert driver.current[-1] == 0
        raise KeyError
    assert driver.current == [3, 0, 3]


def test_a_device_is_attached_only_to_a_thread_without_a_context(made_up):
    driver, gpu = made_up
    assert not gpu.attach() and driver.current == [0]
    driver.context = 0
    assert gpu.attach() and driver.current == [0, 0]


def test_a_configured_launch_goes_to_the_driver_and_its_error_comes_back(made_up, monkeypatch):
    driver, gpu = made_up
    seen = []

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    def launch(config, handle, arguments, extra):
        config = device.LaunchConfig.from_address(config)
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        seen.append((grid, block, config.sharedMemBytes, config.hStream))
        attributes = [(a.id, a.value, *a.rest[:3]) for a in config.attrs[: config.numAttrs]]
        seen.append((handle, arguments, extra, attributes))
        return 0 if handle == 5 else 701

    monkeypatch.setattr(device, "_driver", {"cuLaunchKernelEx": launch}.get)
    dependent, cluster = (6, 1, 0, 0, 0), (4, 4, 1, 1, 0)  # a cluster has three dimensions
    for size, programmatic, attributes in (
        (1, False, []), (1, True, [dependent]), (4, False, [cluster]), (4, True, [dependent, cluster]),
    ):  # fmt: skip
        config = device.launch_config(132, (256, 2), 200_000, size, programmatic)
        config.hStream = 9
        seen.clear()
        gpu.enqueue_as(config, 5, 1234)
        assert seen == [((132, 1, 1), (256, 2, 1), 200_000, 9), (5, 1234, None, attributes)]
    with pytest.raises(driver.cuda.driver.CUDADriverError, match="701"):
        gpu.enqueue_as(config, 6, 1234)


def test_a_tensor_map_is_asked_of_the_driver_and_its_error_comes_back(made_up, monkeypatch):
    driver, gpu = made_up
    seen = []

    def encode(at, kind, rank, pointer, dims, strides, box, steps, *modes):
        sizes = [list(array) for array in (dims, strides, box, steps)]
        seen.append((kind, rank, pointer, *sizes, modes))
        return 0 if at == 64 else 1

    encode.argtypes = device._ARGUMENTS["cuTensorMapEncodeTiled"]
    assert len(encode.argtypes) == 12
    monkeypatch.setattr(device, "_driver", {"cuTensorMapEncodeTiled": encode}.get)
    gpu.encode_map(64, 4096, (384, 100), 800, (64, 32))
    assert seen == [(9, 2, 4096, [384, 100], [800], [64, 32], [1, 1], (0, 3, 2, 0))]
    with pytest.raises(driver.cuda.driver.CUDADriverError, match="1"):
        gpu.encode_map(128, 4096, (384, 100), 800, (64, 32))


def test_the_structures_are_those_of_cuda_h(tmp_path):
    lines = ["#include <cuda.h>", "#include <cstddef>"]
    for name, mirror in (
        ("CUlaunchConfig", device.LaunchConfig),
        ("CUlaunchAttribute", device.LaunchAttribute),
        ("CUtensorMap", device.TensorMap),
    ):
        lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(mirror)});")
        lines += [
            f"static_assert(offsetof({name}, {field}) == {getattr(mirror, field).offset});"
            for field, _ in mirror._fields_
            if field != "rest"
        ]
    constants = {
        "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": device.PROGRAMMATIC_STREAM_SERIALIZATION,
        "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION": device.CLUSTER_DIMENSION,
        "alignof(CUtensorMap)": device.TENSOR_MAP_ALIGNMENT,
        "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16": device._BF16_2D[0],
        "CU_TENSOR_MAP_INTERLEAVE_NONE": device._SWIZZLE_128[0],
        "CU_TENSOR_MAP_SWIZZLE_128B": device._SWIZZLE_128[1],
        "CU_TENSOR_MAP_L2_PROMOTION_L2_128B": device._SWIZZLE_128[2],
        "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE": device._SWIZZLE_128[3],
    }
    lines += [f"static_assert({name} == {value});" for name, value in constants.items()]
    assert compiles(tmp_path, lines) == ""


def test_without_cupy_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"pip install '\.\[gpu\]'"):
        gpu_linear.pack_weight(quantize(np.ones((8, 64), np.float32), "mxfp4"))


def test_without_torch_the_operator_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "qgemm_mx.torch_op", raising=False)
    with pytest.raises(ImportError, match="torch_op needs torch, for the operator"):
        importlib.import_module("qgemm_mx.torch_op")


def test_without_a_device_the_message_says_so(made_up):
    driver, _ = made_up

    class RuntimeApiError(Exception):
        pass

    def no_device():
        raise RuntimeApiError("cudaErrorNoDevice")

    driver.cuda.runtime.getDevice, driver.cuda.runtime.CUDARuntimeError = no_device, RuntimeApiError
    with pytest.raises(DeviceError, match="no CUDA device can be used here: cudaErrorNoDevice"):
        gpu_linear.pack_weight(quantize(np.ones((8, 64), np.float32), "mxfp4"))


def test_an_entry_that_is_not_there_is_named(made_up):
    with pytest.raises(LaunchError, match="qgemv_mx has no entry gone: CUDA_ERROR_NOT_FOUND"):
        made_up[1].function("qgemv_mx", "gone", 100)


def test_the_packing_kernel_has_an_entry_for_each_format():
    source = build.load_sources()["pack_gemv"]
    assert set(source.threads) == {f"pack_gemv_{f}" for f in gemv_layout.GEMV_FORMATS}
    assert set(source.threads.values()) == {gpu_linear.PACK_THREADS}


def test_importing_the_library_imports_no_gpu_library():
    code = (
        "import sys\n"
        "import qgemm_mx\n"
        "assert 'qgemm_mx.gpu_linear' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert callable(qgemm_mx.linear) and callable(qgemm_mx.pack_weight)\n"
        "assert issubclass(qgemm_mx.LaunchError, ValueError)\n"
        "assert issubclass(qgemm_mx.DeviceError, RuntimeError)\n"
        "assert qgemm_mx.LinearWeight.__module__ == 'qgemm_mx.gpu_linear'\n"
        "assert not {'cupy', 'torch', 'cuda'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=build.CUDA_DIR.parents[1])


def test_the_readme_names_the_formats_that_linear_takes():
    text = (Path(__file__).parents[2] / "README.md").read_text()
    text = " ".join(text.split("## The library\n")[1].split("\n## ")[0].split())
    names, step = re.findall(r"takes weights in (.*?), with K a multiple of (\d+) and", text)[0]
    assert tuple(re.findall(r"`(\w+)`", names)) == gemv_layout.GEMV_FORMATS
    assert int(step) == gemv_layout.K_STEP
    assert "`LaunchError`, which is a `ValueError`" in text and issubclass(LaunchError, ValueError)
