"""The arms of a campaign: one object a (kernel, format) at a point (shape, M), all with the same few verbs.

`launch(copy)` enqueues one call and nothing else: everything that it needs was allocated before. `check` is the
correctness gate, against FP64 or, for a stream, against the bytes themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from lab.operands import WeightCopies, bf16_values
from lab.protocol import tuning_nodes
from lab.timing import Timer, nodes_for
from qgemm_mx.probes import CheckResult


class Arm(Protocol):
    """What the harness needs of anything that it times."""

    kernel: str
    format: str
    role: str
    copies: int
    weight_bytes: int
    tuning: dict[str, Any] | None

    def launch(self, copy: int) -> None:
        """Enqueue one call on the arm's stream with weight copy `copy`."""

    def check(self, copy: int, stage: str) -> list[CheckResult]:
        """Results of the correctness gate for the output now on the device, or of a fresh call."""


@dataclass(frozen=True)
class StreamShape:
    """A launch shape of the stream kernel."""

    style: str
    threads: int
    grid: int
    chunk_bytes: int = 0
    stages: int = 0

    def describe(self) -> str:
        """One line for the record."""
        ring = f", {self.stages} x {self.chunk_bytes} B" if self.style == "bulk" else ""
        return f"{self.style}, grid {self.grid} x {self.threads}{ring}"

    @property
    def entry(self) -> str:
        """Entry function of the style."""
        return "stream_bulk" if self.style == "bulk" else f"stream_{self.style}"

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block: the ring and one 8-byte barrier a stage."""
        return self.stages * (self.chunk_bytes + 8)


def stream_shapes(
    protocol: dict[str, Any], total_bytes: int, sm_count: int
) -> Iterator[StreamShape]:
    """The frozen grid of launch shapes (protocol: stream) for a run of `total_bytes`."""
    frozen = protocol["stream"]
    words = -(-total_bytes // 16)
    for style in frozen["styles"]:
        if style == "bulk":
            bulk = frozen["bulk"]
            for chunk, flight, per_sm in itertools.product(
                bulk["chunk_bytes"], bulk["bytes_in_flight_per_sm"], bulk["blocks_per_sm"]
            ):
                stages = flight // (chunk * per_sm)
                if stages >= 2:
                    yield StreamShape("bulk", 32, sm_count * per_sm, chunk, stages)
            continue
        unroll = int(style.rsplit("u", 1)[1])
        for threads, per_sm in itertools.product(
            frozen["registers"]["threads"], frozen["registers"]["blocks_per_sm"]
        ):
            tiles = -(-words // (threads * unroll))
            yield StreamShape(
                style, threads, tiles if per_sm == 0 else min(tiles, sm_count * per_sm)
            )


def stream_launches(protocol: dict[str, Any], sm_count: int) -> dict[str, list[tuple[int, int]]]:
    """Every (threads, dynamic shared memory bytes) that the protocol launches a stream entry with, by entry."""
    launches: dict[str, set[tuple[int, int]]] = {}
    for shape in stream_shapes(protocol, protocol["stream"]["asymptote_bytes"], sm_count):
        launches.setdefault(shape.entry, set()).add((shape.threads, shape.smem_bytes))
    return {entry: sorted(found) for entry, found in launches.items()}


def xor_words(buffer: Any) -> int:
    """XOR of the 32-bit words of a device buffer (a multiple of 4 bytes)."""
    import cupy as cp

    words = buffer.view(cp.uint32)
    while words.size > 1:
        half = words.size // 2
        folded = words[:half] ^ words[half : 2 * half]
        if words.size % 2:
            folded[0] ^= words[-1]
        words = folded
    return int(words[0])


@dataclass
class StreamArm:
    """Read-only stream of the bytes of a weight: the size-matched floor."""

    weights: WeightCopies
    modules: Any
    stream: Any
    shape: StreamShape
    kernel: str = "stream_read"
    role: str = "floor"
    tuning: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        import cupy as cp

        self.format = self.weights.format
        self.copies = self.weights.copies
        self.weight_bytes = self.weights.copy_bytes
        self._read_bytes = -(-self.weight_bytes // 16) * 16
        self._sink = cp.zeros(self.shape.grid * self.shape.threads, dtype=cp.uint32)
        self._kernel = self.modules["stream_read"].kernel(self.shape.entry, self.shape.smem_bytes)
        self._arguments = [self._make_arguments(copy, 0) for copy in range(self.copies)]

    def _make_arguments(self, copy: int, check: int) -> tuple:
        source = np.uint64(self.weights.pointer(copy))
        if self.shape.style == "bulk":
            return (
                source,
                np.uint64(self._read_bytes),
                self._sink,
                np.uint32(self.shape.chunk_bytes),
                np.uint32(self.shape.stages),
                np.uint32(check),
            )
        return (
            source,
            np.uint64(self._read_bytes // 16),
            self._sink,
            np.uint32(0x5BD1E995),
            np.uint32(check),
        )

    def _enqueue(self, arguments: tuple) -> None:
        self._kernel(
            (self.shape.grid,), (self.shape.threads,), arguments, shared_mem=self.shape.smem_bytes
        )

    def launch(self, copy: int) -> None:
        """Read copy `copy` once."""
        self._enqueue(self._arguments[copy])

    def check(self, copy: int, stage: str) -> list[CheckResult]:
        """The XOR of what the threads saw equals the XOR of the bytes: each byte was read exactly once."""
        import cupy as cp

        with self.stream:
            self._sink.fill(0)
            self._enqueue(self._make_arguments(copy, 1))
        self.stream.synchronize()
        start = copy * self.weights.stride_bytes
        truth = xor_words(self.weights.buffer[start : start + self._read_bytes])
        seen = xor_words(self._sink.view(cp.uint8))
        return [
            CheckResult(
                f"checksum_{stage}", seen == truth, float(seen), float(truth), "XOR of all words"
            )
        ]


#: A candidate whose single call takes this many times the fastest's is not timed further. A short call is noisier.
SCREEN_FACTOR = 2.0
SCREEN_FACTOR_LONG = 1.25
LONG_CALL_US = 200.0


def pick_fastest(
    timer: Timer, launches: list[Callable[[int], None]], copies: int, nodes: int, legs: int
) -> tuple[int, list[float]]:
    """Index of the candidate with the smallest median cold slope, and all medians in microseconds.

    Single calls screen the candidates first, because a heuristic's answer for another M can be twenty times slower
    than the best and would take most of the tuning's time; the median of a screened candidate is its single call.
    Constraint: every candidate has run before, so that no module load falls into a timed call.
    """
    singles = [timer.single_call(launch) for launch in launches]
    least = min(singles)
    factor = SCREEN_FACTOR_LONG if least > LONG_CALL_US else SCREEN_FACTOR
    medians = []
    for launch, single in zip(launches, singles, strict=True):
        if single > factor * least:
            medians.append(single)
            continue
        graph_n = timer.capture(launch, copies, nodes)
        graph_2n = timer.capture(launch, copies, 2 * nodes)
        taken = [timer.graph_leg(graph_n, graph_2n, nodes, warm=False).time_us for _ in range(legs)]
        medians.append(float(np.median(taken)))
    return int(np.argmin(medians)), medians


def tune_stream(
    timer: Timer, modules: Any, weights: WeightCopies, protocol: dict, sm_count: int
) -> StreamArm:
    """The fastest launch shape of the frozen grid for these bytes, measured cold."""
    nodes = nodes_for(weights.copies, protocol["graph"]["min_nodes"])
    return fastest_stream(timer, modules, weights, protocol, sm_count, nodes, legs=3)


def fastest_stream(
    timer: Timer,
    modules: Any,
    weights: WeightCopies,
    protocol: dict,
    sm_count: int,
    nodes: int,
    legs: int,
) -> StreamArm:
    """As `tune_stream`, with the nodes and legs of a candidate given."""
    arms = [
        StreamArm(weights, modules, timer.stream, shape)
        for shape in stream_shapes(protocol, weights.copy_bytes, sm_count)
    ]
    with timer.stream:
        for arm in arms:
            arm.launch(0)
    timer.stream.synchronize()
    best, _ = pick_fastest(timer, [a.launch for a in arms], weights.copies, nodes, legs)
    arms[best].tuning = {"candidates": len(arms), "chosen": arms[best].shape.describe()}
    return arms[best]


def tolerance(truth: Any, x_norms: Any, w_norms: Any, u_out: float, eps_acc: float, k: int) -> Any:
    """Elementwise limit u_out |y| + eps_acc sqrt(K) |x| |w| (protocol: correctness), float64 [M, N]."""
    import cupy as cp

    return u_out * cp.abs(truth) + eps_acc * float(np.sqrt(k)) * x_norms[:, None] * w_norms[None, :]


#: Weight rows that are decoded to float64 at a time: 28672 x 8192 x 8 bytes is the largest slab, 1.9 GB.
SLAB_ROWS = 8192


def round_to_bf16(values: Any) -> Any:
    """float64 to the nearest BF16 (ties to even), still float64; exact for what FP32 holds."""
    import cupy as cp

    bits = values.astype(cp.float32).view(cp.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & cp.uint32(0xFFFF0000)
    return rounded.view(cp.float32).astype(cp.float64)


@dataclass(frozen=True)
class Product:
    """FP64 X W^T [M, N] with the Euclidean norms of the rows of X [M] and of W [N], tensor scale included."""

    y: Any
    x_norms: Any
    w_norms: Any

    @classmethod
    def compute(cls, x64: Any, weights: WeightCopies, copy: int, n: int, as_bf16: bool) -> Product:
        """The product with the first `n` rows of a weight copy, in row slabs to bound memory."""
        import cupy as cp

        y = cp.empty((x64.shape[0], n), dtype=cp.float64)
        w_norms = cp.empty(n, dtype=cp.float64)
        for start in range(0, n, SLAB_ROWS):
            stop = min(n, start + SLAB_ROWS)
            slab = weights.rows_float64(copy, start, stop)
            if as_bf16:
                slab = round_to_bf16(slab)
            y[:, start:stop] = (x64 @ slab.T) * weights.tensor_scale
            w_norms[start:stop] = cp.linalg.norm(slab, axis=1) * weights.tensor_scale
        return cls(y, cp.linalg.norm(x64, axis=1), w_norms)


class SharedProducts:
    """FP64 products of a point, kept while their bytes fit: arms with the same operands then share one.

    Used as a context manager, around the calls of the gate. Only products of the activations given here are kept; the
    oldest goes when there is no room, so a product that does not fit is computed anew for each arm.
    """

    current: SharedProducts | None = None

    def __init__(self, activations: Sequence[Any], max_bytes: int) -> None:
        self._activations = list(activations)
        self._max_bytes = max_bytes
        self._kept: dict[tuple[Any, ...], tuple[WeightCopies, Product]] = {}

    def __enter__(self) -> SharedProducts:
        SharedProducts.current = self
        return self

    def __exit__(self, *exc_info: object) -> None:
        SharedProducts.current = None
        self._kept.clear()

    def get(self, x64: Any, weights: WeightCopies, copy: int, n: int, as_bf16: bool) -> Product:
        """The product, computed at most once while it is kept."""
        if not any(x64 is known for known in self._activations):
            return Product.compute(x64, weights, copy, n, as_bf16)
        # The weights are held beside the product, so that their id stays theirs.
        key = (id(x64), id(weights), copy, n, as_bf16)
        if key not in self._kept:
            size = 8 * int(x64.shape[0]) * n
            while self._kept and self._bytes() + size > self._max_bytes:
                del self._kept[next(iter(self._kept))]
            product = Product.compute(x64, weights, copy, n, as_bf16)
            if size > self._max_bytes:
                return product
            self._kept[key] = (weights, product)
        return self._kept[key][1]

    def _bytes(self) -> int:
        return sum(int(product.y.nbytes) for _, product in self._kept.values())


def product(x64: Any, weights: WeightCopies, copy: int, n: int, as_bf16: bool) -> Product:
    """FP64 product, from the products that the arms of this point share where there are any."""
    if SharedProducts.current is not None:
        return SharedProducts.current.get(x64, weights, copy, n, as_bf16)
    return Product.compute(x64, weights, copy, n, as_bf16)


@dataclass
class Truth:
    """FP64 result of X W^T on dequantised operands, with its elementwise limit."""

    y: Any
    limit: Any

    @classmethod
    def compute(
        cls,
        x64: Any,
        weights: WeightCopies,
        copy: int,
        u_out: float,
        eps_acc: float,
        rows: int | None = None,
        as_bf16: bool = False,
    ) -> Truth:
        """`y` and its elementwise limit, float64 [M, N] on the device; the tensor scale is applied last.

        `rows` computes the first rows of the weight only; `as_bf16` rounds the weight to BF16 before the product, for
        a kernel that multiplies with the rounded weight.
        """
        found = product(x64, weights, copy, rows or weights.n, as_bf16)
        limit = tolerance(found.y, found.x_norms, found.w_norms, u_out, eps_acc, weights.k)
        return cls(found.y, limit)

    def compare(self, y_bf16: Any, name: str) -> CheckResult:
        """`y_bf16` (uint16 bit patterns [M, N]) against the truth: worst error over its limit, NaN never passes."""
        return self.compare_float(bf16_values(y_bf16), name)

    def compare_float(self, y: Any, name: str, detail: str = "") -> CheckResult:
        """`y` (float32 [M, N]) against the truth, as `compare`."""
        import cupy as cp

        excess = float(cp.max(cp.abs(y.astype(cp.float64) - self.y) / self.limit))
        unwritten = int(cp.count_nonzero(cp.isnan(y)))
        passed = unwritten == 0 and excess <= 1.0
        words = "; ".join(x for x in ("max |error|/limit", f"{unwritten} NaN outputs", detail) if x)
        return CheckResult(name, passed, excess, 1.0, words)


#: BF16 NaN pattern that outputs are poisoned with before a checked call.
POISON = 0x7FFF


def poisoned_call(stream: Any, y: Any, launch: Callable[[int], None], copy: int) -> None:
    """One call into a poisoned output; both go on one stream, because the poison must be there before the call."""
    with stream:
        y.fill(POISON)
        launch(copy)


def check_chain(chain: Any, copy: int, stage: str) -> list[CheckResult]:
    """Every layer of a chain against FP64, as `Arm.check`: `before` after one call of it all into poisoned outputs."""
    if stage == "before":
        with chain.stream:
            for layer in chain.layers:
                layer.y.fill(POISON)
        chain.launch(copy)
    chain.stream.synchronize()
    return [
        layer.truth(copy).compare(layer.y, f"layer_{index}_{stage}")
        for index, layer in enumerate(chain.layers)
    ]


@dataclass
class CublasLtArm:
    """Y = X W^T by cuBLASLt: BF16, or E4M3 with per-tensor scales and BF16 output."""

    weights: WeightCopies
    x: Any
    x64: Any
    lt: Any
    stream: Any
    protocol: dict[str, Any]
    role: str = "baseline"
    tuning: dict[str, Any] | None = None
    _plan: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        import cupy as cp

        self.fp8 = self.weights.format == "fp8_e4m3"
        self.kernel = "cublaslt_fp8" if self.fp8 else "cublaslt_bf16"
        self.format = self.weights.format
        self.copies = self.weights.copies
        self.weight_bytes = self.weights.copy_bytes
        self.m = int(self.x.shape[0])
        self.y = cp.empty((self.m, self.weights.n), dtype=cp.uint16)

    def tune(self, timer: Timer) -> None:
        """Time all heuristic candidates cold and keep the fastest; the choice goes into the record."""
        w = self.weights
        frozen = self.protocol["cublaslt"]
        self._plan = self.lt.plan(self.m, w.n, w.k, self.fp8, frozen["requested_candidates"])
        launches = [(c.describe(), self._launcher(c)) for c in self._plan.candidates]
        nodes = tuning_nodes(self.protocol, self.m, self.copies)
        usable = [index for index in range(len(launches)) if self._runs(*launches[index])]
        if not usable:
            refused = "; ".join(self._plan.refused[:3])
            raise RuntimeError(
                f"cuBLASLt ran none of its candidates for M={self.m}, N={w.n}, K={w.k}: {refused}"
            )
        best, medians = pick_fastest(timer, [launches[i][1] for i in usable], self.copies, nodes, 2)
        self._plan.chosen = usable[best]
        self.tuning = {
            "candidates": len(usable),
            "chosen": launches[usable[best]][0],
            "heuristic_first_over_best": medians[0] / medians[best],
        }
        self.launch = launches[usable[best]][1]

    def _runs(self, name: str, launch: Callable[[int], None]) -> bool:
        """Whether a candidate runs; one that the library refuses is noted, not fatal."""
        try:
            launch(0)
            self.stream.synchronize()
        except Exception as error:
            self._plan.refused.append(f"{name}: {error}")
            return False
        return True

    def _launcher(self, candidate: Any) -> Callable[[int], None]:
        pointers = [self.weights.pointer(copy) for copy in range(self.copies)]
        return self._bind(candidate, pointers, self.y, 1.0)

    def _bind(self, candidate: Any, weights: list[int], y: Any, alpha: float) -> Callable:
        return self.lt.launcher(
            self._plan, candidate, weights, self.x.data.ptr, y.data.ptr, self.stream.ptr, alpha
        )

    def launcher_for(self, weights: list[int], y: Any, alpha: float) -> Callable[[int], None]:
        """The tuned product on other weights (device addresses), into `y`, scaled by `alpha` in FP32."""
        return self._bind(self._plan.candidates[self._plan.chosen], weights, y, alpha)

    def launch(self, copy: int) -> None:
        """Replaced by `tune` with the launcher of the chosen candidate."""
        raise RuntimeError(f"{self.kernel} is not tuned yet")

    def truth(self, copy: int) -> Truth:
        """FP64 result for a weight copy."""
        limits = self.protocol["correctness"]
        eps = limits["eps_acc_fp8_fast"] if self.fp8 else limits["eps_acc_fp32"]
        return Truth.compute(self.x64, self.weights, copy, limits["u_out_bf16"], eps)

    def check(self, copy: int, stage: str) -> list[CheckResult]:
        """`before`: poison, call, compare. `after`: compare what the last timed call left behind."""
        truth = self.truth(copy)
        if stage == "before":
            poisoned_call(self.stream, self.y, self.launch, copy)
        self.stream.synchronize()
        return [truth.compare(self.y, f"random_fp64_{stage}")]
