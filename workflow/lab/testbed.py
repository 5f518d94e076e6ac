"""The testbed kernel as arms: its variants by name, the packed operand that they read, their launches.

A variant is one entry function, and its name holds every switch of `kernels/qgemm_mx/cuda/testbed.cuh`. Variants whose
result is wrong by design are timed for the decomposition alone: they have no checks and can have no time of a cell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.arms import POISON, Truth, check_chain, poisoned_call
from lab.decomposition import FACTORS, FULL, NONE, present_factors, variant_name, variants
from lab.device import function_handle
from lab.files import write_json
from lab.operands import WeightCopies, align
from lab.rows import CheckRow
from qgemm_mx import probes
from qgemm_mx.formats import FORMATS, decode_bf16, encode_bf16
from qgemm_mx.probes import CheckResult

ROLE = "testbed"
TOKENS = (8, 16, 64)
SEQUENCES = ("shift_mask", "fp32", "host_bits")
#: Factors whose removal leaves the result right.
HARMLESS = frozenset({"layout_staging"})
#: Shared memory that the blocks of a multiprocessor can have, and what the driver keeps of it for each.
SMEM_BYTES_PER_SM, SMEM_RESERVED_BYTES = 228 * 1024, 1024
SMEM_ALIGNMENT_BYTES = 128
LAUNCH_FLOOR, LAUNCH_TESTBED, BALANCED = (
    "probe/launch_floor",
    "probe/launch_testbed",
    "probe/balanced_grid",
)
#: A pattern that the folded results have once in 2^32 calls: the store that keeps loads alive never happens.
IMPROBABLE = 0x9E3779B1


class TestbedError(ValueError):
    """A variant, a problem or an operand that the testbed lacks; the message names object, value and limit."""

    __test__ = False


@dataclass(frozen=True)
class Config:
    """Switches of one variant.

    tokens: n8 columns of a block (8, 16 or 64). stages: slabs of the ring. A block is warps_n x warps_k warps, each
    with 16 rows of W and 128 k of a slab. factors: those present. sequence: how codes become BF16. swizzle: off shows
    what bank conflicts cost. pdl: waits for the kernel before it only where the activations are read.
    """

    format: str = "mxfp4"
    tokens: int = 8
    stages: int = 4
    warps_n: int = 4
    warps_k: int = 2
    factors: frozenset[str] = frozenset(FACTORS)
    sequence: str = "shift_mask"
    swizzle: bool = True
    pdl: bool = False

    @property
    def entry(self) -> str:
        """Entry function."""
        bits = sum(1 << i for i, name in enumerate(FACTORS) if name in self.factors)
        shape = f"t{self.tokens}_s{self.stages}_w{self.warps_n}x{self.warps_k}"
        name = f"testbed_{self.format}_{shape}_f{bits}_{self.sequence}"
        return name + ("" if self.swizzle else "_plain") + ("_pdl" if self.pdl else "")

    @property
    def source(self) -> str:
        """Cubin that holds the entry: the factorial of its tokens, or the causes."""
        plain = replace(Config(), tokens=self.tokens, factors=self.factors)
        return f"testbed_t{self.tokens}" if self == plain else "testbed_causes"

    @property
    def claims_right(self) -> bool:
        """Whether the result is meant to be right: then it is checked, and only then it can have a time."""
        return frozenset(FACTORS) - self.factors <= HARMLESS

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps_n * self.warps_k

    @property
    def rows(self) -> int:
        """Rows of W of a block."""
        return 16 * self.warps_n

    @property
    def slab(self) -> int:
        """Elements of K of a stage."""
        return 128 * self.warps_k

    @property
    def ring_bytes(self) -> int:
        """Shared memory of the ring: values, scales and activations of every stage."""
        spec = FORMATS[self.format]
        scales = self.rows * (self.slab // spec.group) * spec.scale_dtype.itemsize
        return self.stages * (self.rows * self.slab // 2 + scales + self.tokens * self.slab * 2)

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor: held down by shared memory, the same for all variants of a size."""
        return 1 if self.tokens == 64 else 2 * max(1, 256 // self.threads)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a launch: `resident` blocks have room for it, so that registers do not decide."""
        room = SMEM_BYTES_PER_SM // self.resident - SMEM_RESERVED_BYTES - 2 * SMEM_ALIGNMENT_BYTES
        return max(self.ring_bytes, room // SMEM_ALIGNMENT_BYTES * SMEM_ALIGNMENT_BYTES)

    def split(self, n: int, k: int, m: int, sm_count: int) -> int:
        """Parts of K: as many as fill the multiprocessors once, with two slabs each at least."""
        tiles = math.ceil(n / self.rows) * math.ceil(m / self.tokens)
        slabs = math.ceil(k / self.slab)
        return max(1, min(sm_count * self.resident // tiles, slabs // 2))


def tokens_for(m: int) -> int:
    """Tokens of a block for M rows of X."""
    return next((t for t in TOKENS if m <= t), TOKENS[-1])


def factorial_configs(m: int) -> dict[str, Config]:
    """The 32 variants of the full factorial in MXFP4, by kernel id."""
    return {
        name: Config(tokens=tokens_for(m), factors=present_factors(name)) for name in variants()
    }


def cause_configs() -> dict[str, Config]:
    """Variants of the experiments on single causes, all in MXFP4 with 8 tokens unless their name says otherwise."""
    found = {f"cause/stages/{s}": Config(stages=s) for s in (2, 3, 4, 6, 8)}
    for n, k in ((2, 2), (2, 4), (4, 2), (8, 1), (1, 8)):
        found[f"cause/warps/{n}x{k}"] = Config(warps_n=n, warps_k=k)
    found |= {f"cause/sequence/{s}": Config(sequence=s) for s in SEQUENCES}
    return found | {
        "cause/staging/swizzled": Config(),
        "cause/staging/plain": Config(swizzle=False),
        "cause/staging/direct": Config(factors=frozenset(FACTORS) - HARMLESS),
    }


def all_configs() -> list[Config]:
    """Every variant that is built, without repeats, by entry."""
    found = [c for m in TOKENS for c in factorial_configs(m).values()]
    found += cause_configs().values()
    found += [Config(tokens=16, sequence=s) for s in SEQUENCES]
    without = frozenset(FACTORS) - {"dequant_issue"}
    for fmt in ("nvfp4", "int4_g128"):
        for tokens in TOKENS:
            found += [Config(fmt, tokens), Config(fmt, tokens, factors=without)]
    found.append(Config(pdl=True))
    return sorted(set(found), key=lambda c: c.entry)


# ---- the packed operand ------------------------------------------------------------------------------------------


def reorder_words(words: Any, sequence: str = "shift_mask") -> Any:
    """uint32 words of eight nibbles in the order of K, as the kernel extracts them; NumPy or CuPy.

    shift_mask, fp32: nibble j holds element 2j and nibble 4 + j element 2j + 1, so that one shift and one mask give
    the pair j. host_bits: each half word holds the even (low half) or odd elements; the magnitudes of pairs 0, 1, 2, 3
    stand at bits 6, 3, 0, 9 and their signs at bits 15, 12, 14, 13.
    """
    nibble = [(words >> np.uint32(4 * i)) & np.uint32(15) for i in range(8)]
    out = words & np.uint32(0)
    for pair in range(4):
        for odd in (0, 1):
            code = nibble[2 * pair + odd]
            if sequence == "host_bits":
                magnitude, sign = (6, 3, 0, 9)[pair], (15, 12, 14, 13)[pair]
                out |= (code & np.uint32(7)) << np.uint32(16 * odd + magnitude)
                out |= (code >> np.uint32(3)) << np.uint32(16 * odd + sign)
            else:
                out |= code << np.uint32(16 * odd + 4 * pair)
    return out


def k_step(fmt: str) -> int:
    """K of a weight is a multiple of this: a lane's word holds 32 k, and whole scale groups."""
    return max(32, FORMATS[fmt].group)


def scale_stride(n: int) -> int:
    """Scales of a group of K: N, padded so that 16-byte copies stay aligned."""
    return -(-n // 16) * 16


@dataclass(frozen=True)
class Prepared:
    """Weight copies in the testbed's layout: values [N, K/2], words reordered, then scales [K/group, scale_stride].

    run_bytes: values and scales of a copy, the bytes that a call reads: the checkpoint's when 16 divides N.
    row_scale: float32 [N], the tensor scale of each row's shard.
    """

    format: str
    n: int
    k: int
    copies: int
    stride_bytes: int
    scale_offset_bytes: int
    run_bytes: int
    buffer: Any
    row_scale: Any

    def pointer(self, copy: int) -> int:
        """Device address of a copy's values."""
        return int(self.buffer.data.ptr) + copy * self.stride_bytes


def prepare_views(
    fmt: str, views: Iterable[tuple[Any, Any]], copies: int, row_scale: Any, sequence: str
) -> Prepared:
    """Repack (values uint8 [N, K/2], scale codes [N, K/group]) of each copy on the device. TestbedError on a bad K."""
    import cupy as cp

    spec = FORMATS[fmt]
    made: Prepared | None = None
    for copy, (values, scales) in enumerate(views):
        n, k = int(values.shape[0]), 2 * int(values.shape[1])
        if k % k_step(fmt):
            raise TestbedError(
                f"K={k} is not a multiple of {k_step(fmt)}, the k of a lane's word ({fmt})"
            )
        width = spec.scale_dtype.itemsize
        offset = n * k // 2
        run = offset + (k // spec.group) * scale_stride(n) * width
        stride = align(run)
        if made is None:
            buffer = cp.zeros(copies * stride, cp.uint8)
            made = Prepared(fmt, n, k, copies, stride, offset, run, buffer, row_scale)
        base = copy * stride
        words = cp.ascontiguousarray(values).reshape(-1).view(cp.uint32)
        made.buffer[base : base + offset] = reorder_words(words, sequence).view(cp.uint8)
        place = made.buffer[base + offset : base + run].view(spec.scale_dtype)
        place.reshape(k // spec.group, scale_stride(n))[:, :n] = scales.T
    assert made is not None
    return made


def prepare(weights: WeightCopies, sequence: str = "shift_mask") -> Prepared:
    """All copies of a weight in the testbed's layout; made once a shape, format and bit order, and never timed."""
    import cupy as cp

    row_scale = cp.full(weights.n, weights.tensor_scale, cp.float32)
    views = (weights.views(copy) for copy in range(weights.copies))
    return prepare_views(weights.format, views, weights.copies, row_scale, sequence)


def order_of(sequence: str) -> str:
    """The bit order that a dequantisation sequence reads: `prepare` makes two."""
    return sequence if sequence == "host_bits" else "shift_mask"


# ---- launches ----------------------------------------------------------------------------------------------------


@dataclass
class Launcher:
    """One variant bound to operands: `arguments(copy)` and the grid; allocates its workspace once."""

    config: Config
    prepared: Prepared
    x: Any
    y: Any
    sm_count: int
    split: int | None = None
    grid_x: int | None = None

    def __post_init__(self) -> None:
        import cupy as cp

        c, p = self.config, self.prepared
        self.m = int(self.x.shape[0])
        if int(self.x.shape[1]) != p.k:
            raise TestbedError(f"x has K={int(self.x.shape[1])}, the weight K={p.k}")
        tiles = math.ceil(p.n / c.rows)
        token_tiles = max(1, math.ceil(self.m / c.tokens))
        if self.split is None:
            self.split = c.split(p.n, p.k, self.m, self.sm_count)
        slabs = math.ceil(p.k / c.slab)
        if not 1 <= self.split <= slabs:
            raise TestbedError(f"split={self.split} is not in 1..{slabs}, the slabs of K={p.k}")
        self.grid = (self.grid_x or tiles * self.split, token_tiles)
        self.workspace = cp.empty(self.split * token_tiles * tiles * c.tokens * c.rows, cp.float32)
        self.arrivals = cp.zeros(token_tiles * tiles, cp.uint32)

    def arguments(self, copy: int) -> tuple:
        """Kernel arguments of a call with weight copy `copy`."""
        p = self.prepared
        values = p.pointer(copy)
        return (
            np.uint64(values),
            np.uint64(values + p.scale_offset_bytes),
            p.row_scale,
            self.x,
            self.y,
            self.workspace,
            self.arrivals,
            np.int32(self.m),
            np.int32(p.n),
            np.int32(p.k),
            np.int32(scale_stride(p.n)),
            np.int32(self.split),
            np.uint64(p.run_bytes),
            np.uint32(IMPROBABLE),
        )

    def describe(self) -> str:
        """One line for the record."""
        c = self.config
        return (
            f"{c.entry}, grid {self.grid[0]}x{self.grid[1]} x {c.threads}, split {self.split},"
            f" {c.smem_bytes} B shared memory, {c.resident} blocks an SM"
        )


@dataclass
class TestbedArm:
    """Y = X W^T by a variant of the testbed. `kernel` is its id: testbed/<variant>, cause/<...> or probe/<...>.

    weights: the checkpoint's copies, for the truth. prepared: the same in the testbed's layout. x: BF16 patterns,
    uint16 [M, K]. split: parts of K, or None for the planned number; grid_x: blocks, for a balanced grid.
    truths: `Truth` of a copy, shared with other arms of the same operands; computed here without it.
    """

    __test__ = False

    kernel: str
    config: Config
    weights: WeightCopies
    prepared: Prepared
    x: Any
    x64: Any
    modules: Any
    stream: Any
    protocol: dict[str, Any]
    sm_count: int
    split: int | None = None
    grid_x: int | None = None
    truths: Callable[[int], Truth] | None = None
    role: str = ROLE
    tuning: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        import cupy as cp

        self.format, self.copies = self.weights.format, self.weights.copies
        self.weight_bytes = self.weights.copy_bytes
        self.claims_right = self.config.claims_right and self.grid_x is None
        self.m = int(self.x.shape[0])
        self.y = cp.empty((self.m, self.weights.n), cp.uint16)
        self.bound = Launcher(
            self.config, self.prepared, self.x, self.y, self.sm_count, self.split, self.grid_x
        )
        self.grid, self.threads, self.smem_bytes = (
            self.bound.grid,
            self.config.threads,
            self.config.smem_bytes,
        )
        module = self.modules[self.config.source]
        self._kernel = module.kernel(self.config.entry, self.smem_bytes)
        self._arguments = [self.bound.arguments(copy) for copy in range(self.copies)]
        self.tuning = {"candidates": 1, "chosen": self.bound.describe()}

    def launch(self, copy: int) -> None:
        """Enqueue one call."""
        self._kernel(self.grid, (self.threads,), self._arguments[copy], shared_mem=self.smem_bytes)

    def truth(self, copy: int) -> Truth:
        """FP64 truth of a copy and the frozen limit."""
        if self.truths is not None:
            return self.truths(copy)
        limits = self.protocol["correctness"]
        return Truth.compute(
            self.x64, self.weights, copy, limits["u_out_bf16"], limits["eps_acc_fp32"]
        )

    def check(self, copy: int, stage: str) -> list[CheckResult]:
        """The gate of an arm that claims to be right; [] for one that is wrong by design."""
        if not self.claims_right:
            return []
        if stage == "before":
            poisoned_call(self.stream, self.y, self.launch, copy)
        self.stream.synchronize()
        return [self.truth(copy).compare(self.y, f"random_fp64_{stage}")]


@dataclass
class EmptyArm:
    """An empty kernel with another launch's grid, block and shared memory: what a launch costs, never a result."""

    kernel: str
    weights: WeightCopies
    modules: Any
    grid: tuple[int, ...]
    threads: int
    smem_bytes: int
    role: str = ROLE
    tuning: dict[str, Any] | None = None
    claims_right: bool = False

    def __post_init__(self) -> None:
        self.format, self.copies = self.weights.format, self.weights.copies
        self.weight_bytes = self.weights.copy_bytes
        self._kernel = self.modules["harness"].kernel("empty", self.smem_bytes)
        self.tuning = {
            "candidates": 1,
            "chosen": f"empty, grid {'x'.join(map(str, self.grid))} x {self.threads}, {self.smem_bytes} B",
        }

    def launch(self, copy: int) -> None:
        """Enqueue one empty call."""
        self._kernel(self.grid, (self.threads,), (), shared_mem=self.smem_bytes)

    def check(self, copy: int, stage: str) -> list[CheckResult]:
        """Nothing is computed."""
        return []


# ---- arms of a point ---------------------------------------------------------------------------------------------


@dataclass
class Problem:
    """What the arms of a point share: a bench, weight copies of a format, activations, and the layouts made so far."""

    bench: Any
    weights: WeightCopies
    x: Any
    x64: Any
    prepared: dict[str, Prepared] = field(default_factory=dict)
    truths: Callable[[int], Truth] | None = None

    def layout(self, sequence: str) -> Prepared:
        """The packed operand for a sequence, made on first use."""
        order = order_of(sequence)
        if order not in self.prepared:
            self.prepared[order] = prepare(self.weights, order)
        return self.prepared[order]

    def arm(
        self, kernel: str, config: Config, split: int | None = None, grid_x: int | None = None
    ) -> TestbedArm:
        """An arm of this point."""
        return TestbedArm(
            kernel,
            config,
            self.weights,
            self.layout(config.sequence),
            self.x,
            self.x64,
            self.bench.modules,
            self.bench.stream,
            self.bench.protocol,
            self.bench.probe["sm_count"],
            split,
            grid_x,
            self.truths,
        )

    @property
    def m(self) -> int:
        """Rows of X."""
        return int(self.x.shape[0])


def balanced_grid(config: Config, sm_count: int) -> int:
    """Blocks that give every multiprocessor the same number of them."""
    return sm_count * config.resident


def factorial_arms(problem: Problem, floor: Any) -> list[Any]:
    """All 32 variants and the probes of the measured terms. `floor`: the tuned stream of the same bytes."""
    configs = factorial_configs(problem.m)
    arms: list[Any] = [problem.arm(name, config) for name, config in configs.items()]
    full = next(a for a in arms if a.kernel == FULL)
    sms = problem.bench.probe["sm_count"]
    arms.append(
        problem.arm(BALANCED, configs[NONE], full.bound.split, balanced_grid(configs[NONE], sms))
    )
    modules, shape = problem.bench.modules, floor.shape
    launches = (
        (LAUNCH_TESTBED, full.grid, full.threads, full.smem_bytes),
        (LAUNCH_FLOOR, (shape.grid,), shape.threads, shape.smem_bytes),
    )
    return arms + [EmptyArm(name, problem.weights, modules, *rest) for name, *rest in launches]


def cause_arms(problem: Problem, experiment: str) -> list[TestbedArm]:
    """Arms of an experiment: stages, warps, sequence, staging (entries built for the tokens of M), split_k, formats."""
    tokens = tokens_for(problem.m)
    if experiment == "formats":
        full = Config(problem.weights.format, tokens)
        without = replace(full, factors=full.factors - {"dequant_issue"})
        return [problem.arm(FULL, full), problem.arm(variant_name(without.factors), without)]
    if experiment == "split_k":
        config = Config(tokens=tokens)
        slabs = math.ceil(problem.weights.k / config.slab)
        return [
            problem.arm(f"cause/split_k/{s}", config, split=s)
            for s in (1, 2, 4, 8, 16)
            if s <= slabs
        ]
    built = set(all_configs())
    arms = []
    for name, config in cause_configs().items():
        config = replace(config, tokens=tokens)
        if name.split("/")[1] == experiment and config in built:
            arms.append(problem.arm(name, config))
    if not arms:
        raise TestbedError(
            f"experiment {experiment!r} has no variant for {tokens} tokens; there are stages, warps, sequence, staging,"
            " split_k and formats"
        )
    return arms


# ---- a chain of layers -------------------------------------------------------------------------------------------

#: Layers of a decode step of an 8-billion model (N, K): they have the bytes of one weight of CHAIN_SHAPE.
CHAIN_LAYERS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
CHAIN_SHAPE = {"name": "decode_chain", "N": 53248, "K": 4096}


def launch_programmatic(
    function: int, grid: tuple[int, int], threads: int, smem: int, values: tuple, stream: int
) -> None:
    """Enqueue a kernel that may start before the one in front of it has ended (programmatic stream serialisation).

    function: CUfunction. values: (value, ctypes type) of every argument. Raises TestbedError with the driver's code.
    """
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid[0], grid[1], 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = smem
    config.hStream = stream
    config.attrs = [attribute]
    config.numAttrs = 1
    (status,) = driver.cuLaunchKernelEx(config, function, values, 0)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise TestbedError(f"cuLaunchKernelEx: {status.name}")


def _typed(arguments: tuple) -> tuple[tuple, tuple]:
    """Kernel arguments as cuda.bindings takes them: values and ctypes types."""
    import ctypes

    kinds = {"i4": ctypes.c_int32, "u4": ctypes.c_uint32, "u8": ctypes.c_uint64}
    pairs = [
        (int(argument), kinds[argument.dtype.str[1:]])
        if isinstance(argument, np.generic)
        else (int(argument.data.ptr), ctypes.c_void_p)
        for argument in arguments
    ]
    return tuple(value for value, _ in pairs), tuple(kind for _, kind in pairs)


@dataclass
class ChainArm:
    """Four layers in a row, one testbed kernel each: `launch(copy)` enqueues all four with copy `copy` of each weight.

    Every layer reads a buffer of activations of its own, because no attention stands between the layers here; the order
    is kept as a model keeps it. With `pdl`, a layer requests its weights while the one in front of it drains, and waits
    for it before it reads activations.
    """

    kernel: str
    whole: WeightCopies
    layers: list[TestbedArm]
    stream: Any
    pdl: bool
    role: str = ROLE
    tuning: dict[str, Any] | None = None
    claims_right: bool = True

    def __post_init__(self) -> None:
        self.format = self.whole.format
        self.copies = min(layer.copies for layer in self.layers)
        self.weight_bytes = sum(layer.weight_bytes for layer in self.layers)
        self.m = self.layers[0].m
        words = "programmatic launches" if self.pdl else "plain launches"
        self.tuning = {
            "candidates": 1,
            "chosen": f"{len(self.layers)} {words}: "
            + "; ".join(a.bound.describe() for a in self.layers),
        }
        self._calls = [
            [
                (function_handle(layer._kernel), _typed(layer._arguments[copy]))
                for layer in self.layers
            ]
            for copy in range(self.copies)
        ]

    def launch(self, copy: int) -> None:
        """Enqueue the chain."""
        if not self.pdl:
            for layer in self.layers:
                layer.launch(copy)
            return
        for layer, (handle, values) in zip(self.layers, self._calls[copy], strict=True):
            launch_programmatic(
                handle, layer.grid, layer.threads, layer.smem_bytes, values, self.stream.ptr
            )

    def check(self, copy: int, stage: str) -> list[CheckResult]:
        """Every layer against FP64, after one call of the whole chain into poisoned outputs."""
        return check_chain(self, copy, stage)


# ---- probes ------------------------------------------------------------------------------------------------------

#: Problems of the structured probes (N, K, M): ragged rows, a K that is no multiple of a slab, odd M.
PROBE_PROBLEMS = (
    (2880, 2944, 3),
    (1, 128, 1),
    (7, 256, 33),
    (1856, 2688, 7),
    (40, 384, 100),
    (200, 1664, 16),
)


def probe_checks(
    modules: Any, stream: Any, sm_count: int, problems: Iterable = PROBE_PROBLEMS
) -> list[CheckRow]:
    """Every structured probe on every variant that claims to be right, on the device."""
    rows = []
    for config in all_configs():
        if not config.claims_right or config.pdl:
            continue
        kernel = f"probe/{config.entry}"
        for n, k, m in problems:
            if k % k_step(config.format):
                continue
            place = dict(kernel=kernel, format=config.format, shape=f"probe_{n}x{k}", N=n, K=k, M=m)
            for probe in probes.probes_for(config.format, n, k, m):
                found = run_probe(config, probe, modules, stream, sm_count)
                rows.append(CheckRow(**place, **vars(replace(found, name=f"probe_{found.name}"))))
    return rows


def run_probe(
    config: Config,
    probe: probes.Probe,
    modules: Any,
    stream: Any,
    sm_count: int,
    split: int | None = None,
) -> CheckResult:
    """One probe through one variant; the output is BF16."""
    import cupy as cp

    w = probe.weight
    with stream:
        values, scales = cp.asarray(w.values), cp.asarray(w.scales)
        row_scale = cp.asarray(w.row_tensor_scale)
        prepared = prepare_views(
            w.format, [(values, scales)], 1, row_scale, order_of(config.sequence)
        )
        x = cp.asarray(encode_bf16(probe.x))
        y = cp.full((len(probe.x), w.n), POISON, cp.uint16)
        bound = Launcher(config, prepared, x, y, sm_count, split)
        kernel = modules[config.source].kernel(config.entry, config.smem_bytes)
        kernel(bound.grid, (config.threads,), bound.arguments(0), shared_mem=config.smem_bytes)
    stream.synchronize()
    return probes.check(probe, decode_bf16(cp.asnumpy(y)), output="bfloat16")


def write_sidecars(folder: Path) -> None:
    """Write testbed_*.json beside the sources: what is declared there follows from `all_configs`."""
    by_source: dict[str, list[Config]] = {}
    for config in all_configs():
        by_source.setdefault(config.source, []).append(config)
    for source, configs in by_source.items():
        about = (
            "Testbed variants for the experiments on single causes."
            if source == "testbed_causes"
            else f"Testbed: full factorial in MXFP4, {configs[0].tokens} tokens a block."
        )
        value = {
            "name": source,
            "role": "testbed",
            "description": about,
            "architectures": ["sm_90a"],
            "threads": {c.entry: c.threads for c in configs},
            "sass": {"sm_90a": {"require": ["HMMA", "LDGSTS", "LDG"], "forbid": ["LDL", "STL"]}},
        }
        write_json(folder / f"{source}.json", value)
