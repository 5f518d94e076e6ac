"""The product as arms: each kernel, the fastest of all its plans, its ablation, what `linear` launches, and a chain.

Weights are packed by `qgemm_mx.gpu_linear.pack_weight`, and a call is one of its `Launch` objects, or several: a node
of a captured graph is exactly what a user's call of `linear` launches, and nothing of the host's work for a call is in
it. Ids of kernels are those of lab.plan_r2 and lab.plan_r2b.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from lab import plan_r2b
from lab.arms import POISON, Truth, check_chain, pick_fastest, poisoned_call
from lab.operands import WeightCopies
from lab.plan_r2 import BATCH_INVARIANT, PRODUCT, SEARCHED
from lab.protocol import tuning_nodes
from lab.rows import CheckRow
from lab.timing import Timer
from qgemm_mx import gemm_plan, gemv_plan, probes
from qgemm_mx.device import device
from qgemm_mx.formats import FORMATS, decode_bf16, encode_bf16
from qgemm_mx.gemm_launch import MatrixLaunch
from qgemm_mx.gemm_plan import GemmPlan
from qgemm_mx.gemv_layout import GEMV_FORMATS, K_STEP
from qgemm_mx.gemv_plan import MAX_TOKENS, GemvPlan
from qgemm_mx.gpu_linear import Launch, LinearWeight, linear, pack_weight
from qgemm_mx.launch import LaunchError
from qgemm_mx.probes import CheckResult

ACTIVATION = "bf16"
#: Problems of the structured probes (N, K, M): ragged rows, a K that fills no slice, odd M, and every number of tokens.
PROBE_PROBLEMS = (
    (2880, 2944, 3),
    (1, 128, 1),
    (7, 256, 33),
    (1856, 2688, 7),
    (40, 384, 100),
    (200, 1664, 16),
    (1000, 512, 2),
)
#: Those for the entries of the ablation, which are there for 1 and for 16 tokens.
ABLATION_PROBLEMS = ((1, 128, 1), (200, 1664, 16), (2880, 2944, 1))
#: The same for qgemm_mx and the dispatch, small, because `linear` and its mode run each as well: every number of tokens
#: of a block and one more, one tile and several, of rows too.
MATRIX_PROBLEMS = (
    (7, 256, 3),
    (200, 2688, 7),
    (333, 1664, 16),
    (520, 896, 33),
    (40, 384, 65),
    (1, 640, 100),
    (300, 1152, 129),
    (333, 512, 257),
)
MATRIX_ABLATION_PROBLEMS = ((7, 256, 3), (333, 1664, 65), (300, 512, 257))
#: How the ids of the kernels begin that are probed with those.
MATRIX_KERNELS = (plan_r2b.PRODUCT, plan_r2b.DISPATCH)
#: Kernels that `linear` itself probes: those that are one of its modes, by whether that is the batch-invariant one.
MODES = {
    BATCH_INVARIANT: True,
    plan_r2b.DISPATCH: False,
    plan_r2b.BATCH_INVARIANT: True,
}


def use_cubins(folder: Path, ordinal: int = 0) -> None:
    """From now on the library loads its kernels from `folder`, which a campaign records, and compiles none."""
    device(ordinal)._cubin = lambda name: Path(folder) / f"{name}.cubin"


# ---- weights and launches ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """The copies of a weight as the library packs them, each an allocation of its own. `weights`: for the truth."""

    weights: WeightCopies
    copies: tuple[LinearWeight, ...]

    @classmethod
    def of(cls, weights: WeightCopies, stream: Any) -> Packed:
        """Pack every copy on the device. A packed copy has the bytes of its weight, or more: cold stays cold."""
        scale = weights.tensor_scale if FORMATS[weights.format].has_tensor_scale else None
        made = []
        for copy in range(weights.copies):
            values, scales = weights.views(copy)
            made.append(pack_weight(values, scales, weights.format, scale, stream=stream))
        return cls(weights, tuple(made))


def own_launch(
    weight: LinearWeight, m: int, batch_invariant: bool = False, programmatic: bool = False
) -> Launch:
    """The launch of qgemv_mx for M <= 16 rows of BF16, as `linear` makes it where it takes this kernel."""
    by_rows = weight.programmatic_by_rows if programmatic else weight.by_rows
    return by_rows[ACTIVATION][MAX_TOKENS if batch_invariant else m]


@dataclass(frozen=True)
class Rows:
    """Launches of qgemv_mx for MAX_TOKENS rows each, the last for what is left, as `linear` makes them of more rows."""

    launches: tuple[Launch, ...]

    @property
    def plan(self) -> GemvPlan:
        """Of the first."""
        return self.launches[0].plan

    def __call__(
        self, weight: LinearWeight, x: int, y: int, m: int, stream: int, programmatic: bool = False
    ) -> None:
        """Launch all, as a `Launch` is called; rows of x and y have no gaps."""
        for launch in self.launches:
            rows = min(m, MAX_TOKENS)
            launch(weight, x, y, rows, stream=stream, programmatic=programmatic)
            m, x, y = m - rows, x + 2 * rows * weight.k, y + 2 * rows * weight.n


def dispatched(weight: LinearWeight, m: int, batch_invariant: bool = False) -> Launch | Rows:
    """All that `linear` launches for M rows of BF16."""
    if weight.matrix and not batch_invariant and (launch := weight.matrix_by_rows[m]) is not None:
        return launch
    return decode_launches(weight, m, batch_invariant)


def decode_launches(weight: LinearWeight, m: int, batch_invariant: bool = False) -> Launch | Rows:
    """Launches of qgemv_mx for M rows of BF16, also where `linear` takes another kernel."""
    whole, rest = divmod(m, MAX_TOKENS)
    rows = [MAX_TOKENS] * whole + [rest] * (rest > 0)
    launches = tuple(own_launch(weight, r, batch_invariant) for r in rows)
    return launches[0] if len(launches) == 1 else Rows(launches)


def matrix_launch(weight: LinearWeight, m: int) -> MatrixLaunch:
    """The launch of qgemm_mx for M rows by its own plan, also where `linear` takes another kernel."""
    require_matrix(weight)
    if (launch := weight.matrix_by_rows[m]) is not None:
        return launch
    gpu = device(weight.device)
    problem = (weight.n, weight.k, m, weight.format, gpu.sm_count, gpu.smem_per_sm)
    plan = gemm_plan.plan_gemm(*problem)
    return planned_launch(weight, plan, plan.entry(weight.format, ACTIVATION), MatrixLaunch.SOURCE)


def require_matrix(weight: LinearWeight) -> None:
    """LaunchError for a weight whose scales are too far apart for qgemm_mx."""
    if not weight.matrix:
        raise LaunchError(
            f"W[{weight.n}, {weight.k}] ({weight.format}) has scales that {plan_r2b.PRODUCT} cannot take"
        )


def planned_launch(
    weight: LinearWeight, plan: GemvPlan | GemmPlan, entry: str, source: str
) -> Launch:
    """The launch of an entry of a cubin by a plan of the weight's problem, loaded and ready."""
    problem = (weight.format, weight.n, weight.k, ACTIVATION, device(weight.device))
    kind = MatrixLaunch if isinstance(plan, GemmPlan) else Launch
    return kind.from_plan(plan, *problem, source=source, entry=entry)


def candidates(weight: LinearWeight, m: int, kernel: str = PRODUCT) -> Iterator[Launch]:
    """The launches of every plan of a kernel that is worth timing for the problem."""
    gpu = device(weight.device)
    problem = (weight.n, weight.k, m, weight.format)
    plans = gemv_plan if kernel == PRODUCT else gemm_plan
    for plan in plans.candidates(*problem, gpu.sm_count, gpu.smem_per_sm):
        yield planned_launch(weight, plan, plan.entry(weight.format, ACTIVATION), kernel)


def ablation_launch(kernel: str, weight: LinearWeight, m: int) -> tuple[Launch, str]:
    """The launch and the entry of a step of the ablation."""
    gpu = device(weight.device)
    product, _, step = kernel.partition("/")
    problem = (weight.n, weight.k, m, weight.format, gpu.sm_count, gpu.smem_per_sm)
    plans = gemv_plan
    if product == plan_r2b.PRODUCT:
        require_matrix(weight)
        plans = gemm_plan
    source, entry, plan = plans.ablation(step or product, *problem)
    return planned_launch(weight, plan, entry, source), entry


def describe(plan: GemvPlan | GemmPlan, entry: str) -> str:
    """One line for the record: the entry, the grid, and every number of the plan."""
    numbers = {f.name: getattr(plan, f.name) for f in fields(plan) if f.name != "reasons"}
    rest = ", ".join(f"{name} {value}" for name, value in numbers.items())
    if isinstance(plan, GemmPlan):
        rest += f", jobs {plan.jobs}, {'streamed' if plan.streamed else 'all whole'}"
    return f"{entry}, grid {plan.grid} x {plan.threads}, {rest}"


# ---- arms --------------------------------------------------------------------------------------------------------


@dataclass
class ProductArm:
    """Y = X W^T by the library. x: BF16 patterns, uint16 [M, K], and x64 their values.

    bound: the launch, or the launches. entry: of it, where it is not the one that its plan names. programmatic: a
    dependent launch.
    """

    kernel: str
    packed: Packed
    x: Any
    x64: Any
    stream: Any
    protocol: dict[str, Any]
    bound: Launch | Rows
    entry: str | None = None
    programmatic: bool = False
    role: str = "product"
    tuning: dict[str, Any] | None = None
    claims_right: bool = True
    _truths: dict[int, Truth] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        import cupy as cp

        w = self.packed.weights
        self.format, self.copies, self.weight_bytes = w.format, w.copies, w.copy_bytes
        self.m = int(self.x.shape[0])
        self.y = cp.empty((self.m, w.n), cp.uint16)
        self.use(self.bound)
        self.tuning = {"candidates": 1, "chosen": self.describe(self.bound)}

    def use(self, launch: Launch | Rows) -> None:
        """Bind a launch to the operands, copy by copy."""
        addresses = (int(self.x.data.ptr), int(self.y.data.ptr), self.m)
        self.bound = launch
        self._calls = [
            partial(
                launch, weight, *addresses, stream=self.stream.ptr, programmatic=self.programmatic
            )
            for weight in self.packed.copies
        ]

    def describe(self, launch: Launch | Rows) -> str:
        """One line for the record."""
        if isinstance(launch, Rows):
            first, last = self.describe(launch.launches[0]), self.describe(launch.launches[-1])
            end = "" if last == first else f", the last: {last}"
            return f"{first}, {len(launch.launches)} launches{end}"
        return describe(launch.plan, self.entry or launch.plan.entry(self.format, ACTIVATION))

    def launch(self, copy: int) -> None:
        """Enqueue one call."""
        self._calls[copy]()

    def truth(self, copy: int) -> Truth:
        """FP64 truth of a copy and the frozen limit; worked out once, because a search asks for it for every plan."""
        if copy not in self._truths:
            limits = self.protocol["correctness"]
            self._truths[copy] = Truth.compute(
                self.x64, self.packed.weights, copy, limits["u_out_bf16"], limits["eps_acc_fp32"]
            )
        return self._truths[copy]

    def check(self, copy: int, stage: str) -> list[CheckResult]:
        """`before`: poison, call, compare. `after`: compare what the last timed call left behind."""
        if stage == "before":
            poisoned_call(self.stream, self.y, self.launch, copy)
        self.stream.synchronize()
        return [self.truth(copy).compare(self.y, f"random_fp64_{stage}")]


@dataclass
class SearchedArm(ProductArm):
    """The fastest of all plans; `bound` is the library's own until `tune`. `refused`: plans that are wrong."""

    refused: list[str] = field(default_factory=list)

    def tune(
        self, timer: Timer, pick: Callable[..., tuple[int, list[float]]] = pick_fastest
    ) -> None:
        """Gate and time every plan cold, the library's own first; a plan that is wrong is never timed.

        When all are wrong the library's own stays, so that the gate records how wrong it is.
        """
        own = self.describe(self.bound)
        launches = {own: self.bound}
        kernel = self.kernel.partition("/")[0]
        for launch in candidates(self.packed.copies[0], self.m, kernel):
            launches.setdefault(self.describe(launch), launch)
        right = {name: calls for name, launch in launches.items() if (calls := self._gated(launch))}
        chosen, gain = own, None
        if right:
            nodes = tuning_nodes(self.protocol, self.m, self.copies)
            calls = [lambda copy, calls=calls: calls[copy]() for calls in right.values()]
            legs = self.protocol["search"]["legs"]
            best, medians = pick(timer, calls, self.copies, nodes, legs)
            chosen = list(right)[best]
            gain = medians[0] / medians[best] if own in right else None
        self.use(launches[chosen])
        self.tuning = {
            "candidates": len(launches),
            "chosen": chosen,
            "heuristic_first_over_best": gain,
        }

    def _gated(self, launch: Launch) -> list[partial] | None:
        """The calls of a launch that is right; None, and a line in `refused`, for one that is wrong."""
        self.use(launch)
        wrong = [r for r in self.check(0, "before") if not r.passed]
        name = self.describe(launch)
        self.refused += [f"{name}: {r.name} {r.measured:.3g} > {r.limit:.3g}" for r in wrong]
        return None if wrong else self._calls


def make_arm(
    kernel: str, packed: Packed, x: Any, x64: Any, stream: Any, protocol: dict[str, Any]
) -> ProductArm:
    """The arm of an id: a kernel, its search (not tuned yet), the batch-invariant mode, a step, or the dispatch."""
    weight, m = packed.copies[0], int(x.shape[0])
    shared = (packed, x, x64, stream, protocol)
    if kernel == plan_r2b.SEARCHED:
        return SearchedArm(kernel, *shared, matrix_launch(weight, m))
    if kernel == plan_r2b.PRODUCT:
        return ProductArm(kernel, *shared, matrix_launch(weight, m))
    if kernel in (plan_r2b.DISPATCH, plan_r2b.BATCH_INVARIANT):
        invariant = kernel == plan_r2b.BATCH_INVARIANT
        return ProductArm(kernel, *shared, dispatched(weight, m, invariant))
    if kernel == SEARCHED:
        return SearchedArm(kernel, *shared, own_launch(weight, m))
    if kernel in (PRODUCT, BATCH_INVARIANT):
        return ProductArm(kernel, *shared, own_launch(weight, m, kernel == BATCH_INVARIANT))
    launch, entry = ablation_launch(kernel, weight, m)
    return ProductArm(kernel, *shared, launch, entry, role="testbed")


# ---- a chain of layers -------------------------------------------------------------------------------------------


@dataclass
class Chain:
    """Layers in a row, one call of the product each: `launch(copy)` enqueues all with copy `copy` of each weight.

    Every layer reads activations of its own, because no attention stands between the layers here; the order is kept as
    a model keeps it. `whole`: a weight of the bytes of all layers, whose stream is the floor.
    """

    whole: WeightCopies
    layers: Sequence[ProductArm]
    stream: Any
    kernel: str = PRODUCT
    role: str = "product"
    tuning: dict[str, Any] | None = None
    claims_right: bool = True

    def __post_init__(self) -> None:
        self.format = self.whole.format
        self.copies = min(layer.copies for layer in self.layers)
        self.weight_bytes = sum(layer.weight_bytes for layer in self.layers)
        words = "programmatic launches" if self.layers[0].programmatic else "plain launches"
        plans = "; ".join(layer.describe(layer.bound) for layer in self.layers)
        self.tuning = {"candidates": 1, "chosen": f"{len(self.layers)} {words}: {plans}"}

    @classmethod
    def of(
        cls,
        whole: WeightCopies,
        problems: Sequence[tuple[Packed, Any, Any]],
        stream: Any,
        protocol: dict[str, Any],
        programmatic: bool,
    ) -> Chain:
        """A chain over (weight, x, x64) of each layer, with outputs of its own."""
        layers = []
        for packed, x, x64 in problems:
            m = int(x.shape[0])
            launch = own_launch(packed.copies[0], m, programmatic=programmatic)
            arm = ProductArm(
                PRODUCT, packed, x, x64, stream, protocol, launch, programmatic=programmatic
            )
            layers.append(arm)
        return cls(whole, layers, stream)

    def launch(self, copy: int) -> None:
        """Enqueue the chain."""
        for layer in self.layers:
            layer.launch(copy)

    def check(self, copy: int, stage: str) -> list[CheckResult]:
        """Every layer against FP64, after one call of the whole chain into poisoned outputs."""
        return check_chain(self, copy, stage)


# ---- probes ------------------------------------------------------------------------------------------------------


def probe_checks(
    stream: Any,
    ablations: Iterable[str] = (),
    kernels: Iterable[str] = (PRODUCT, BATCH_INVARIANT),
) -> list[CheckRow]:
    """Every structured probe through the library on the device, in all formats; `ablations`: kernel ids, in MXFP4."""
    runs = [(kernel, GEMV_FORMATS, PROBE_PROBLEMS, MATRIX_PROBLEMS) for kernel in kernels]
    runs += [
        (kernel, ("mxfp4",), ABLATION_PROBLEMS, MATRIX_ABLATION_PROBLEMS) for kernel in ablations
    ]
    asked: dict[tuple[str, int, int, int], list[str]] = {}  # a probe is made once for all kernels
    for kernel, formats, *problems in runs:
        for fmt in formats:
            for problem in problems[kernel.startswith(MATRIX_KERNELS)]:
                asked.setdefault((fmt, *problem), []).append(kernel)
    rows = []
    for (fmt, n, k, m), wanted in asked.items():
        if k % max(K_STEP, FORMATS[fmt].group):
            continue
        place = dict(format=fmt, shape=f"probe_{n}x{k}", N=n, K=k, M=m)
        for probe in probes.probes_for(fmt, n, k, m):
            with stream:
                weight = pack_weight(probe.weight, stream=stream)
            for kernel in wanted:
                if (found := run_probe(kernel, probe, weight, stream)) is not None:
                    named = replace(found, name=f"probe_{found.name}")
                    rows.append(CheckRow(kernel=kernel, **place, **vars(named)))
    return rows


def run_probe(
    kernel: str, probe: probes.Probe, weight: LinearWeight, stream: Any
) -> CheckResult | None:
    """One probe through one kernel id; BF16 in and out. What `linear` has a mode for goes through `linear` itself.

    None where qgemm_mx was asked for and cannot take the scales of the weight.
    """
    import cupy as cp

    m = len(probe.x)
    if kernel not in MODES and kernel.startswith(plan_r2b.PRODUCT) and not weight.matrix:
        return None
    with stream:
        x = cp.asarray(encode_bf16(probe.x))
        y = cp.full((m, probe.weight.n), POISON, cp.uint16)
        if kernel in MODES:
            linear(x, weight, out=y, stream=stream, batch_invariant=MODES[kernel])
        else:
            if kernel == plan_r2b.PRODUCT:
                launch = matrix_launch(weight, m)
            elif kernel == PRODUCT:
                launch = decode_launches(weight, m)
            else:
                launch, _ = ablation_launch(kernel, weight, m)
            launch(weight, int(x.data.ptr), int(y.data.ptr), m, stream=stream.ptr)
    stream.synchronize()
    return probes.check(probe, decode_bf16(cp.asnumpy(y)), output="bfloat16")
