"""The product as arms: qgemv_mx, the fastest of all its plans, its batch-invariant mode, its ablation, and a chain.

Weights are packed by `qgemm_mx.gpu_linear.pack_weight`, and a call is one of its `Launch` objects: a node of a captured
graph is exactly what a user's call of `linear` launches, and nothing of the host's work for a call is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from lab.arms import POISON, Truth, check_chain, pick_fastest, poisoned_call
from lab.operands import WeightCopies
from lab.plan_r2 import BATCH_INVARIANT, PRODUCT, SEARCHED
from lab.protocol import tuning_nodes
from lab.rows import CheckRow
from lab.timing import Timer
from qgemm_mx import gemv_plan, probes
from qgemm_mx.device import device
from qgemm_mx.formats import FORMATS, decode_bf16, encode_bf16
from qgemm_mx.gemv_layout import GEMV_FORMATS, K_STEP
from qgemm_mx.gemv_plan import MAX_TOKENS, GemvPlan
from qgemm_mx.gpu_linear import Launch, LinearWeight, linear, pack_weight
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
    """The launch that `linear` makes for M <= 16 rows of BF16."""
    by_rows = weight.programmatic_by_rows if programmatic else weight.by_rows
    return by_rows[ACTIVATION][MAX_TOKENS if batch_invariant else m]


def planned_launch(weight: LinearWeight, plan: GemvPlan, entry: str, source: str) -> Launch:
    """The launch of an entry of a cubin by a plan of the weight's problem, loaded and ready."""
    problem = (weight.format, weight.n, weight.k, ACTIVATION, device(weight.device))
    return Launch.from_plan(plan, *problem, source=source, entry=entry)


def candidates(weight: LinearWeight, m: int) -> Iterator[Launch]:
    """The launches of every plan that fits the problem."""
    gpu = device(weight.device)
    problem = (weight.n, weight.k, m, weight.format)
    for plan in gemv_plan.candidates(*problem, gpu.sm_count, gpu.smem_per_sm):
        yield planned_launch(weight, plan, plan.entry(weight.format, ACTIVATION), PRODUCT)


def ablation_launch(kernel: str, weight: LinearWeight, m: int) -> tuple[Launch, str]:
    """The launch and the entry of a step of the ablation."""
    gpu = device(weight.device)
    step = kernel.removeprefix(f"{PRODUCT}/")
    problem = (weight.n, weight.k, m, weight.format, gpu.sm_count, gpu.smem_per_sm)
    source, entry, plan = gemv_plan.ablation(step, *problem)
    return planned_launch(weight, plan, entry, source), entry


def describe(plan: GemvPlan, entry: str) -> str:
    """One line for the record: the entry, the grid, and every number of the plan."""
    numbers = {f.name: getattr(plan, f.name) for f in fields(plan) if f.name != "reasons"}
    rest = ", ".join(f"{name} {value}" for name, value in numbers.items())
    return f"{entry}, grid {plan.grid} x {plan.threads}, {rest}"


# ---- arms --------------------------------------------------------------------------------------------------------


@dataclass
class ProductArm:
    """Y = X W^T by one launch of the library. x: BF16 patterns, uint16 [M, K], and x64 their values.

    bound: the launch. entry: of it, where it is not the one that its plan names. programmatic: a dependent launch.
    """

    kernel: str
    packed: Packed
    x: Any
    x64: Any
    stream: Any
    protocol: dict[str, Any]
    bound: Launch
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

    def use(self, launch: Launch) -> None:
        """Bind a launch to the operands, copy by copy."""
        addresses = (int(self.x.data.ptr), int(self.y.data.ptr), self.m)
        self.bound = launch
        self._calls = [
            partial(
                launch, weight, *addresses, stream=self.stream.ptr, programmatic=self.programmatic
            )
            for weight in self.packed.copies
        ]

    def describe(self, launch: Launch) -> str:
        """One line for the record."""
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
        for launch in candidates(self.packed.copies[0], self.m):
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
    """The arm of a kernel id: PRODUCT, SEARCHED (not tuned yet), BATCH_INVARIANT, or a part of the ablation."""
    weight, m = packed.copies[0], int(x.shape[0])
    shared = (packed, x, x64, stream, protocol)
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


def probe_checks(stream: Any, ablations: Iterable[str] = ()) -> list[CheckRow]:
    """Every structured probe through the library on the device, in all formats; `ablations`: kernel ids, in MXFP4."""
    runs = [
        (kernel, fmt, problem)
        for kernel in (PRODUCT, BATCH_INVARIANT)
        for fmt in GEMV_FORMATS
        for problem in PROBE_PROBLEMS
    ]
    runs += [(kernel, "mxfp4", p) for kernel in ablations for p in ABLATION_PROBLEMS]
    rows = []
    for kernel, fmt, (n, k, m) in runs:
        if k % max(K_STEP, FORMATS[fmt].group):
            continue
        place = dict(kernel=kernel, format=fmt, shape=f"probe_{n}x{k}", N=n, K=k, M=m)
        for probe in probes.probes_for(fmt, n, k, m):
            found = run_probe(kernel, probe, stream)
            rows.append(CheckRow(**place, **vars(replace(found, name=f"probe_{found.name}"))))
    return rows


def run_probe(kernel: str, probe: probes.Probe, stream: Any) -> CheckResult:
    """One probe through one kernel id; BF16 in and out. The product and its mode go through `linear` itself."""
    import cupy as cp

    m = len(probe.x)
    with stream:
        weight = pack_weight(probe.weight, stream=stream)
        x = cp.asarray(encode_bf16(probe.x))
        y = cp.full((m, probe.weight.n), POISON, cp.uint16)
        if kernel in (PRODUCT, BATCH_INVARIANT):
            linear(x, weight, out=y, stream=stream, batch_invariant=kernel == BATCH_INVARIANT)
        else:
            launch, _ = ablation_launch(kernel, weight, m)
            launch(weight, int(x.data.ptr), int(y.data.ptr), m, stream=stream.ptr)
    stream.synchronize()
    return probes.check(probe, decode_bf16(cp.asnumpy(y)), output="bfloat16")
