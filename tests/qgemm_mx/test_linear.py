"""`pack_weight` and `linear` without a GPU: the operands they refuse, and the launches they make, on a made-up device.

The device records launches and runs none; arrays have the attributes that CuPy's have. What the kernels compute is
tested on a device (tests/gpu/test_linear_on_device.py).
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from qgemm_mx import build, device, gemv_layout, gpu_linear, operands
from qgemm_mx.gemv_plan import plan_gemv
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


class Value:
    def __init__(self, value):
        self.value = value


class Gpu:
    """Records what is launched. `ordinal` 0; 132 SMs."""

    ordinal, sm_count, smem_per_sm = 0, 132, 233472

    def __init__(self):
        self.launched, self.loaded, self.allocated, self.current = [], [], 0, True
        self.handle = nullcontext()
        self.wide = 0

    def is_current(self):
        return self.current

    def function(self, source, entry, shared_bytes=0):
        self.loaded.append((source, entry, shared_bytes))

        def launch(grid, block, arguments, shared, stream):
            plain = [a.value if isinstance(a, Value) else a for a in arguments]
            self.launched.append(SimpleNamespace(
                entry=entry, grid=grid, block=block, arguments=plain, shared=shared, stream=stream,
            ))  # fmt: skip

        return launch

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

    library = operands.Library(operands._read_cupy, empty, lambda ordinal: None)
    monkeypatch.setitem(operands._LIBRARIES, Array, library)
    monkeypatch.setattr(gpu_linear, "as_cupy", lambda name, array: array)
    monkeypatch.setattr(gpu_linear, "device", lambda ordinal: made)
    monkeypatch.setattr(gpu_linear, "current_device", lambda: 0)
    monkeypatch.setattr(gpu_linear, "by_value", lambda: Value)
    caches = (gpu_linear.launches, gpu_linear._int64, gpu_linear._flag)
    for cached in caches:
        cached.cache_clear()
    yield made
    for cached in caches:
        cached.cache_clear()


def weight_of(gpu, fmt="mxfp4", n=40, k=384, **more):
    rng = np.random.default_rng(2)
    packed = quantize(rng.normal(0, 1, (n, k)).astype(np.float32), fmt)
    weight = gpu_linear.pack_weight(packed, **more)
    gpu.launched.clear()
    return weight


ARGUMENTS = (
    "weight row_scale bias x y m n k x_stride y_stride tiles_per_team extra_teams turn_tiles ring_offset depth wide"
).split()


def named(launch):
    assert len(launch.arguments) == len(ARGUMENTS)
    return SimpleNamespace(**dict(zip(ARGUMENTS, launch.arguments, strict=True)))


# ---------------------------------------------------------------- packing


def test_packing_launches_one_thread_a_word_and_makes_every_launch_ready(gpu):
    packed = quantize(np.ones((40, 384), np.float32), "mxfp4")
    weight = gpu_linear.pack_weight(packed)
    (launch,) = gpu.launched
    layout = gemv_layout.gemv_layout("mxfp4", 40, 384)
    assert launch.entry == "pack_gemv_mxfp4" and launch.block == (256,)
    assert 256 * (launch.grid[0] - 1) < layout.nbytes // 4 <= 256 * launch.grid[0]
    assert launch.arguments[2] is weight.data and launch.arguments[4:] == [40, 384, 192, 12]
    loaded = [entry for source, entry, _ in gpu.loaded if source == "qgemv_mx"]
    assert len(loaded) == 10 and len(set(loaded)) == 10  # five sizes, two types
    plan = plan_gemv(40, 384, 1, "mxfp4", 132)
    assert ("qgemv_mx", plan.entry("mxfp4", "bf16"), plan.shared_bytes) in gpu.loaded
    assert weight.plan(1) == plan and weight.nbytes == layout.nbytes


def test_signed_bytes_are_the_same_bytes(gpu):
    values, scales = Array((40, 192), np.int8), Array((40, 12), np.uint8)
    gpu_linear.pack_weight(values, scales, "mxfp4")
    assert gpu.launched[0].arguments[0].data.ptr == values.data.ptr


def test_a_shard_keeps_its_own_tensor_scale(gpu):
    values, scales = Array((40, 192), np.uint8), Array((40, 24), np.uint8)
    weight = gpu_linear.pack_weight(
        values, scales, "nvfp4", tensor_scale=[0.5, 0.25], shard_rows=(16, 24)
    )
    assert np.array_equal(weight.row_scale.contents, np.repeat(np.float32([0.5, 0.25]), (16, 24)))
    assert named_pointers(weight)[1] == weight.row_scale.data.ptr


def named_pointers(weight):
    return [p.value for p in weight.pointers]


def test_a_format_without_a_tensor_scale_passes_a_valid_pointer(gpu):
    weight = weight_of(gpu)
    assert named_pointers(weight) == [weight.data.data.ptr] * 2


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
    assert gpu.launched[0].arguments[4:] == [40, 384, 200, 7]


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
        ({"values": np.zeros((40, 192), np.uint8)}, TypeError, "values is numpy.ndarray"),
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


def test_a_packed_weight_takes_no_more(gpu):
    packed = quantize(np.ones((8, 64), np.float32), "mxfp4")
    with pytest.raises(ValueError, match="give no others"):
        gpu_linear.pack_weight(packed, format="mxfp4")


def test_data_of_another_size_is_named(gpu):
    with pytest.raises(LaunchError, match=r"data is uint8 \[7\], not uint8 \[544\]"):
        gpu_linear.LinearWeight("mxfp4", 16, 64, Array((7,), np.uint8), None, False, 0)
    with pytest.raises(LaunchError, match="data is on device 1, not on 0"):
        gpu_linear.LinearWeight("mxfp4", 16, 64, Array((544,), np.uint8, ordinal=1), None, False, 0)
    shifted = Array((544,), np.uint8, address=8)
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
    assert launch.entry == plan.entry("mxfp4", activation)
    assert (launch.grid, launch.block) == ((plan.grid,), (plan.threads,))
    assert launch.shared == plan.shared_bytes
    assert (a.x, a.y, a.bias) == (x.data.ptr, out.data.ptr, 0)
    assert (a.m, a.n, a.k, a.x_stride, a.y_stride) == (m, 40, 384, 384, 40)
    assert (a.tiles_per_team, a.extra_teams) == (plan.tiles_per_team, plan.extra_teams)
    assert (a.turn_tiles, a.ring_offset, a.depth) == (
        plan.turn_tiles,
        plan.ring_offset,
        plan.depth,
    )
    assert [type(v) for v in (a.m, a.x_stride, a.wide)] == [np.int32, np.int64, np.int32]


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
    cuts = {(c.entry, c.grid, c.block, c.shared, *c.arguments[10:]) for c in gpu.launched}
    assert len(cuts) == 1 and gpu.launched[0].entry.split("_")[4] == "t16"
    assert weight.plan(1, batch_invariant=True) == weight.plan(16)


def test_nothing_is_made_or_loaded_by_a_call_with_out(gpu):
    weight = weight_of(gpu)
    x, out = Array((2, 384), BF16), Array((2, 40), BF16)
    loaded, allocated = len(gpu.loaded), gpu.allocated
    for _ in range(2):  # the first call too: it may be captured
        gpu_linear.linear(x, weight, out=out, batch_invariant=True)
        gpu_linear.linear(x, weight, out=out)
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
        (None, None), (SimpleNamespace(ptr=5), 5), (7, 7), (SimpleNamespace(cuda_stream=9), 9),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 11)), 11),
    ],
)  # fmt: skip
def test_the_stream_that_is_given_is_used(gpu, stream, address):
    weight = weight_of(gpu)
    gpu_linear.linear(Array((1, 384), BF16), weight, stream=stream)
    used = gpu.launched[0].stream
    assert (None if used is None else used.ptr) == address


def test_a_call_goes_to_the_device_of_the_weight(gpu):
    weight = weight_of(gpu)
    entered = []

    @contextmanager
    def handle():
        entered.append(len(gpu.launched))
        yield

    gpu.current, gpu.handle = False, handle()
    gpu_linear.linear(Array((1, 384), BF16), weight)
    assert entered == [0] and len(gpu.launched) == 1


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
        ({"x": np.zeros((2, 384), BF16)}, TypeError, "x is numpy.ndarray: it must be a device array"),
        ({"x": [1.0]}, TypeError, "x is builtins.list"),
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
        leave = self.leave = {}
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
                object.__setattr__(self, name, value)

        properties = {
            "major": 9, "minor": 0, "multiProcessorCount": 132, "sharedMemPerMultiprocessor": 233472,
        }  # fmt: skip
        self.cuda = SimpleNamespace(
            Device=lambda ordinal: nullcontext(),
            driver=SimpleNamespace(CUDADriverError=DriverError),
            runtime=SimpleNamespace(
                getDeviceProperties=lambda ordinal: properties,
                getDeviceCount=lambda: 1,
                getDevice=lambda: 0,
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
    assert (gpu.compute_capability, gpu.sm_count, gpu.is_current()) == ("90", 132, True)


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
        "from qgemm_mx import gemv_plan, gpu_linear\n"
        "assert callable(gpu_linear.linear) and callable(gpu_linear.pack_weight)\n"
        "assert not {'cupy', 'torch', 'cuda'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=build.CUDA_DIR.parents[1])
