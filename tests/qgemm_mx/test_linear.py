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

from qgemm_mx import build, device, gemv_layout, gpu_linear, operands
from qgemm_mx.device import DeviceError
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
    addresses = (ctypes.c_void_p * len(gpu_linear.ARGUMENTS)).from_address(arguments)
    return {
        name: kind.from_address(address).value
        for (name, kind), address in zip(gpu_linear.ARGUMENTS.items(), addresses, strict=True)
    }


class Gpu:
    """Records what is launched. `ordinal` 0; 132 SMs."""

    ordinal, sm_count, smem_per_sm = 0, 132, 233472

    def __init__(self):
        self.launched, self.packed, self.loaded, self.allocated = [], [], [], 0
        self.alone, self.current, self.attached = True, True, True
        self.wide, self.without_context, self.refused = 0, 0, None
        self.entered, self.during = [], lambda: None

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

    def enqueue_programmatic(self, config, handle, arguments):
        assert (config.gridDimY, config.gridDimZ, config.blockDimZ) == (1,) * 3
        assert config.numAttrs == 1 and (config.attrs[0].id, config.attrs[0].value) == (6, 1)
        self.record(
            handle, config.gridDimX, (config.blockDimX, config.blockDimY), config.sharedMemBytes,
            config.hStream or 0, arguments, True,
        )  # fmt: skip

    def record(self, handle, grid, block, shared, stream, arguments, programmatic):
        if self.refused:
            raise self.refused
        self.during()
        self.launched.append(SimpleNamespace(
            entry=self.loaded[handle][1], grid=grid, block=block, shared=shared, stream=stream,
            programmatic=programmatic, arguments=in_memory(arguments),
        ))  # fmt: skip

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
        return np.array([self.wide])


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
    caches = (gpu_linear.launches, gpu_linear._by_rows)
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


OF_THE_PLAN = [a for a in gpu_linear.ARGUMENTS if a not in (*gpu_linear.OF_A_CALL, "n", "k")]


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
    gpu.wide = found
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


@pytest.mark.parametrize("m", [1, 3, 7, 16])
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
    for m in (1, 3, 16, 37):
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


def test_more_than_sixteen_rows_go_in_several_launches(gpu):
    weight = weight_of(gpu)
    x, out = Array((37, 384), BF16, strides=(800, 2)), Array((37, 40), BF16, strides=(100, 2))
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
    assert weight.plan(1, batch_invariant=True) == weight.plan(16)


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
    out = Array((17, 40), BF16)
    assert gpu_linear.linear(Array((17, 384), BF16), weight, out=out) is out
    assert gpu.entered == [0] and len(gpu.launched) == 2 and not gpu.current
    made = gpu_linear.linear(Array((1, 384), BF16), weight)
    assert named(gpu.launched[2]).y == made.data.ptr


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


KINDS = {
    "long long": ctypes.c_int64, "int": ctypes.c_int32, "uint32_t": ctypes.c_uint32,
    "uint8_t": ctypes.c_uint8,
}  # fmt: skip


@pytest.mark.parametrize("name", ["qgemv_mx", "qgemv_ablations"])
def test_the_arguments_are_those_of_every_entry(name):
    """In order, in size and in sign, after the preprocessor has made the entries; and as their structure has them."""
    source = (build.CUDA_DIR / f"{name}.cu").read_text()
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
        assert list(found.items()) == list(gpu_linear.ARGUMENTS.items())
        (passed,) = re.findall(r"\(\s*\{([^}]*)\}\s*\)", body)
        assert [p.strip() for p in passed.split(",")] == list(gpu_linear.ARGUMENTS)
    text = (build.CUDA_DIR / "qgemv_mx.cuh").read_text()
    (members,) = re.findall(r"^struct Arguments \{(.*?)^\};", text, flags=re.M | re.S)
    members = re.sub(r"//.*", "", members)
    names = [
        member.split()[-1].lstrip("*")
        for line in members.split(";")
        for member in line.split(",")
        if member.strip()
    ]
    assert names == list(gpu_linear.ARGUMENTS)


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


def test_a_programmatic_launch_goes_to_the_driver_and_its_error_comes_back(made_up, monkeypatch):
    driver, gpu = made_up
    seen = []

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    def launch(config, handle, arguments, extra):
        config = device.LaunchConfig.from_address(config)
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        seen.append((grid, block, config.sharedMemBytes, config.hStream))
        seen.append((handle, arguments, extra, config.attrs[0].id, config.attrs[0].value))
        return 0 if handle == 5 else 701

    monkeypatch.setattr(device, "_launch_ex", lambda: launch)
    config = device.programmatic_config(132, (256, 2), 200_000)
    config.hStream = 9
    gpu.enqueue_programmatic(config, 5, 1234)
    assert seen == [((132, 1, 1), (256, 2, 1), 200_000, 9), (5, 1234, None, 6, 1)]
    with pytest.raises(driver.cuda.driver.CUDADriverError, match="701"):
        gpu.enqueue_programmatic(config, 6, 1234)


def test_the_structures_are_those_of_cuda_h(tmp_path):
    include = build.find_tool("nvcc").resolve().parents[1] / "include"
    lines = ["#include <cuda.h>", "#include <cstddef>"]
    for name, mirror in (
        ("CUlaunchConfig", device.LaunchConfig),
        ("CUlaunchAttribute", device.LaunchAttribute),
    ):
        lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(mirror)});")
        lines += [
            f"static_assert(offsetof({name}, {field}) == {getattr(mirror, field).offset});"
            for field, _ in mirror._fields_
            if field != "rest"
        ]
    lines.append(
        "static_assert(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
        f" == {device.PROGRAMMATIC_STREAM_SERIALIZATION});"
    )
    (tmp_path / "check.cpp").write_text("\n".join(lines))
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{include}", "check.cpp"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
