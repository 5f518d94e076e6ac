"""The product's arms without a device: they launch exactly what `linear` launches, plan by plan and layer by layer."""

from __future__ import annotations

from dataclasses import replace

import made_up_library
import numpy as np
import pytest
from made_up_library import Array, Stream

from lab import plan_r2b, product_arms
from lab.plan_r2 import BATCH_INVARIANT, PRODUCT, SEARCHED
from lab.product_arms import Chain, ProductArm
from qgemm_mx import gemm_plan, gemv_plan, probes
from qgemm_mx.device import Device
from qgemm_mx.gemv_layout import gemv_layout
from qgemm_mx.gpu_linear import linear
from qgemm_mx.launch import LaunchError
from qgemm_mx.probes import CheckResult

PROTOCOL = {
    "search": {"legs": 2},
    "graph": {"min_nodes": 16},
    "blocks": {"large_from_m": 1024},
    "correctness": {},
}


@pytest.fixture
def gpu(monkeypatch):
    yield made_up_library.install(monkeypatch)
    made_up_library.forget()


@pytest.fixture
def plans(monkeypatch):
    """Every depth of the library's own plan; the third of them is also its own choice."""

    def candidates(n, k, m, fmt, sm_count, smem_per_sm):
        own = gemv_plan.plan_gemv(n, k, m, fmt, sm_count, smem_per_sm)
        depths = (own.depth + 1, own.depth + 2, own.depth)
        return tuple(replace(own, depth=d, reasons=("made up",)) for d in depths)

    monkeypatch.setattr(gemv_plan, "candidates", candidates)


def arm(kernel: str = PRODUCT, fmt: str = "mxfp4", m: int = 3, **more) -> ProductArm:
    packed = made_up_library.packed(fmt, **more)
    x = Array((m, packed.weights.k), np.uint16)
    return product_arms.make_arm(kernel, packed, x, "x64", Stream(), PROTOCOL)


def seen(launch) -> tuple:
    return (launch.entry, launch.grid, launch.stream, launch.programmatic, launch.arguments)


@pytest.mark.parametrize("kernel", [PRODUCT, BATCH_INVARIANT, SEARCHED])
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "int4_g128"])
@pytest.mark.parametrize("m", [1, 2, 3, 8])  # from 9 on linear takes the matrix kernel
def test_a_call_is_the_one_that_linear_makes(gpu, kernel, fmt, m) -> None:
    made = arm(kernel, fmt, m)
    for copy, weight in enumerate(made.packed.copies):
        made.launch(copy)
        linear(
            made.x, weight, out=made.y, stream=Stream(), batch_invariant=kernel == BATCH_INVARIANT
        )
        ours, users = gpu.launched[-2:]
        assert seen(ours) == seen(users)
        assert ours.arguments["weight"] == weight.data.data.ptr
    assert len(gpu.launched) == 2 * made.copies
    assert made.tuning == {"candidates": 1, "chosen": made.describe(made.bound)}
    assert made.tuning["chosen"].split(",")[0] == gpu.launched[-1].entry
    assert made.role == "product"


def test_copies_are_distinct_and_hold_at_least_the_bytes_of_the_weight(gpu) -> None:
    for fmt in ("mxfp4", "nvfp4", "int4_g128"):
        packed = made_up_library.packed(fmt, n=1000, k=2688, copies=5)
        assert len({w.pointer for w in packed.copies}) == 5
        layout = gemv_layout(fmt, 1000, 2688)
        assert all(w.nbytes == layout.nbytes >= packed.weights.copy_bytes for w in packed.copies)


class Picker:
    """A made-up `pick_fastest`: times by place among the candidates."""

    def __init__(self, *times: float) -> None:
        self.times = times

    def __call__(self, timer, launches, copies, nodes, legs):
        assert (copies, nodes, legs) == (3, 16, 2)
        self.count = len(launches)
        for launch in launches:
            launch(1)
        times = list(self.times[: len(launches)])
        return times.index(min(times)), times


def gate(monkeypatch, wrong=lambda plan: False) -> None:
    def check(self, copy, stage):
        bad = wrong(self.bound.plan)
        return [CheckResult(f"random_fp64_{stage}", not bad, 2.0 if bad else 0.5, 1.0, "")]

    monkeypatch.setattr(ProductArm, "check", check)


def test_the_search_takes_the_fastest_of_all_plans_each_once(gpu, plans, monkeypatch) -> None:
    gate(monkeypatch)
    made = arm(SEARCHED)
    own = made.bound.plan
    pick = Picker(6.0, 5.0, 7.0)
    made.tune(None, pick)
    assert pick.count == 3  # the library's own is among the candidates
    assert made.bound.plan.depth == own.depth + 1
    assert made.tuning["candidates"] == 3 and made.tuning["heuristic_first_over_best"] == 1.2
    assert f"depth {own.depth + 1}," in made.tuning["chosen"]
    # What the timer saw of each candidate was that candidate, and the arm now launches the chosen one.
    depths = [launch.arguments["depth"] for launch in gpu.launched]
    assert depths == [own.depth, own.depth + 1, own.depth + 2]
    made.launch(2)
    assert gpu.launched[-1].arguments["depth"] == own.depth + 1
    assert gpu.launched[-1].arguments["weight"] == made.packed.copies[2].pointer


def test_a_wrong_plan_is_never_timed(gpu, plans, monkeypatch) -> None:
    own = arm(SEARCHED).bound.plan.depth
    gate(monkeypatch, lambda plan: plan.depth == own + 1)
    made = arm(SEARCHED)
    pick = Picker(6.0, 9.0)
    made.tune(None, pick)
    assert pick.count == 2 and made.bound.plan.depth == own
    assert len(made.refused) == 1 and f"depth {own + 1}" in made.refused[0]
    assert made.tuning["candidates"] == 3 and made.tuning["heuristic_first_over_best"] == 1.0


def test_when_all_are_wrong_the_librarys_own_is_left_to_the_gate(gpu, plans, monkeypatch) -> None:
    gate(monkeypatch, lambda plan: True)
    made = arm(SEARCHED)
    own = made.bound.plan
    made.tune(None, None)
    assert made.bound.plan == own and len(made.refused) == 3
    assert made.tuning["heuristic_first_over_best"] is None


STEPS = [step for step, *_ in gemv_plan.ABLATION_STEPS]


@pytest.mark.parametrize("step", STEPS[:-1])
@pytest.mark.parametrize("m", [1, 16])
def test_a_step_of_the_ablation_is_launched_by_its_own_plan(gpu, step, m) -> None:
    made = arm(f"{PRODUCT}/{step}", m=m, n=4096, k=4096)
    made.launch(1)
    (launch,) = gpu.launched
    source, entry, plan = gemv_plan.ablation(step, 4096, 4096, m, "mxfp4", 132, gpu.smem_per_sm)
    assert (launch.source, launch.entry, launch.grid) == (source, entry, plan.grid)
    taken = {name: value for name, value in launch.arguments.items() if hasattr(plan, name)}
    assert len(taken) >= 10 and all(getattr(plan, name) == value for name, value in taken.items())
    assert launch.arguments["weight"] == made.packed.copies[1].pointer
    assert made.role == "testbed" and made.tuning["candidates"] == 1
    assert made.tuning["chosen"].split(",")[0] == entry
    assert f" x {plan.threads}," in made.tuning["chosen"]


def test_the_last_step_is_the_product_itself(gpu) -> None:
    assert STEPS[-1] == PRODUCT and STEPS[0] == "step0"
    plain = arm(PRODUCT, m=3, n=1024, k=4096)
    launch, entry = product_arms.ablation_launch(PRODUCT, plain.packed.copies[0], 3)
    assert plain.describe(launch) == plain.describe(plain.bound)  # reasons name another M
    assert entry == plain.bound.plan.entry("mxfp4", "bf16")


def test_a_part_that_is_no_step_is_named(gpu) -> None:
    with pytest.raises(ValueError, match="'-columns' is no step of the ablation: step0"):
        arm(f"{PRODUCT}/-columns")


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "int4_g128"])
def test_the_search_has_every_plan_of_the_library_on_its_own_entry(gpu, monkeypatch, fmt) -> None:
    gate(monkeypatch)
    made = arm(SEARCHED, fmt, m=2, n=4096, k=4096)
    plans = gemv_plan.candidates(4096, 4096, 2, fmt, 132, gpu.smem_per_sm)
    own = made.bound.plan
    pick = Picker(*range(len(plans), 0, -1))
    made.tune(None, pick)
    assert made.tuning["candidates"] == pick.count == len(plans) > 5
    assert made.bound.plan == plans[-1] != replace(own, reasons=())
    tried = [(launch.entry, launch.grid) for launch in gpu.launched]
    assert tried == [(plan.entry(fmt, "bf16"), plan.grid) for plan in plans]
    assert {entry.endswith("_bulk") for entry, _ in tried} == {True, False}


# ---------------------------------------------------------------- qgemm_mx and the dispatch


def calls_of(gpu, made, copy: int) -> tuple[list, list]:
    """What the arm launches, and what `linear` launches for the same operands."""
    invariant = made.kernel == plan_r2b.BATCH_INVARIANT
    gpu.launched.clear()
    made.launch(copy)
    ours = gpu.launched.copy()
    gpu.launched.clear()
    linear(
        made.x,
        made.packed.copies[copy],
        out=made.y,
        stream=Stream(),
        batch_invariant=invariant,
    )
    return [seen(launch) for launch in ours], [seen(launch) for launch in gpu.launched]


@pytest.mark.parametrize("kernel", [plan_r2b.DISPATCH, plan_r2b.BATCH_INVARIANT])
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "int4_g128"])
@pytest.mark.parametrize("m", [1, 2, 8, 16, 17, 32, 33, 100, 512, 2048])
def test_the_dispatch_is_what_linear_launches(gpu, kernel, fmt, m) -> None:
    made = arm(kernel, fmt, m, n=333)
    for copy in range(made.copies):
        ours, users = calls_of(gpu, made, copy)
        assert ours == users
    if kernel == plan_r2b.BATCH_INVARIANT:
        assert len(ours) == -(-m // 16) and {call[0] for call in ours} == {ours[0][0]}
    else:
        assert len(ours) == 1  # qgemm_mx takes over where one launch of qgemv_mx ends
    assert made.tuning["candidates"] == 1 and made.role == "product"
    assert made.tuning["chosen"].split(",")[0] == ours[0][0]
    assert "\n" not in made.tuning["chosen"]


def test_where_the_decode_kernel_keeps_more_rows_the_dispatch_launches_it_again_and_again(
    gpu, monkeypatch
) -> None:
    made_up = lambda n, k, m, fmt: m > 64  # noqa: E731
    monkeypatch.setattr("qgemm_mx.gpu_linear.takes_gemm", made_up)
    made = arm(plan_r2b.DISPATCH, m=37)
    ours, users = calls_of(gpu, made, 1)
    assert ours == users and [call[-1]["m"] for call in ours] == [16, 16, 5]
    first, last = (call[0] for call in (ours[0], ours[-1]))
    assert made.tuning["chosen"].startswith(f"{first}, grid ") and first != last
    assert f", 3 launches, the last: {last}, grid " in made.tuning["chosen"]


@pytest.mark.parametrize("kernel", [plan_r2b.PRODUCT, plan_r2b.SEARCHED])
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "int4_g128"])
@pytest.mark.parametrize("m", [1, 3, 16, 17, 33, 65, 129, 257, 2048])
def test_the_matrix_kernel_is_launched_by_its_own_plan_at_any_m(gpu, kernel, fmt, m) -> None:
    made = arm(kernel, fmt, m, n=333)
    made.launch(2)
    (launch,) = gpu.launched
    plan = gemm_plan.plan_gemm(333, 384, m, fmt, 132, gpu.smem_per_sm)
    assert (launch.source, launch.entry) == ("qgemm_mx", plan.entry(fmt, "bf16"))
    assert (launch.grid, launch.cluster) == (plan.grid, plan.cluster)
    taken = {name: value for name, value in launch.arguments.items() if hasattr(plan, name)}
    assert len(taken) >= 10 and all(getattr(plan, name) == value for name, value in taken.items())
    assert launch.arguments["weight"] == made.packed.copies[2].pointer
    box = (64, plan.tokens // plan.share)
    assert launch.arguments["x"] == (made.x.data.ptr, 384, m, 768, *box)
    assert launch.stream == Stream.ptr and not launch.programmatic
    assert made.tuning == {"candidates": 1, "chosen": made.describe(made.bound)}
    chosen = made.tuning["chosen"]
    assert chosen.startswith(f"{launch.entry}, grid {plan.grid} x {plan.threads}, tokens ")
    assert f", jobs {plan.jobs}, " in chosen and chosen.endswith(("all whole", "streamed"))
    assert made.role == "product"


def test_the_search_has_every_plan_of_the_matrix_kernel_the_librarys_own_first(
    gpu, monkeypatch
) -> None:
    gate(monkeypatch)
    made = arm(plan_r2b.SEARCHED, m=100, n=2880, k=2880)
    plans = gemm_plan.candidates(2880, 2880, 100, "mxfp4", 132, gpu.smem_per_sm)
    assert made.bound.plan == plans[0]
    pick = Picker(*range(len(plans), 0, -1))
    made.tune(None, pick)
    assert made.tuning["candidates"] == pick.count == len(plans) > 5
    assert made.bound.plan == plans[-1]
    assert made.tuning["heuristic_first_over_best"] == len(plans)
    tried = [(launch.entry, launch.grid, launch.cluster) for launch in gpu.launched]
    assert tried == [(p.entry("mxfp4", "bf16"), p.grid, p.cluster) for p in plans]
    for plan, launch in zip(plans, gpu.launched, strict=True):
        assert launch.arguments["whole_jobs"] == plan.whole_jobs
        assert bool(launch.arguments["partial"]) == plan.streamed
    assert {plan.streamed for plan in plans} == {True, False}
    made.launch(2)
    assert gpu.launched[-1].arguments["weight"] == made.packed.copies[2].pointer


MATRIX_STEPS = [step for step, *_ in gemm_plan.ABLATION_STEPS]


@pytest.mark.parametrize("step", MATRIX_STEPS[:-1])
@pytest.mark.parametrize("m", [64, 512, 2048])
def test_a_step_of_the_matrix_kernel_is_launched_by_its_own_plan(gpu, step, m) -> None:
    made = arm(f"{plan_r2b.PRODUCT}/{step}", m=m, n=4096, k=4096)
    made.launch(1)
    (launch,) = gpu.launched
    source, entry, plan = gemm_plan.ablation(step, 4096, 4096, m, "mxfp4", 132, gpu.smem_per_sm)
    assert (launch.source, launch.entry, launch.grid) == (source, entry, plan.grid)
    assert launch.arguments["w_stages"] == plan.w_stages
    assert made.role == "testbed" and made.tuning["candidates"] == 1
    assert made.tuning["chosen"].split(",")[0] == entry
    assert plan_r2b.is_ablation(made.kernel)


def test_a_step_that_is_none_of_the_matrix_kernel_is_named(gpu) -> None:
    with pytest.raises(ValueError, match="'step9' is no step of the ablation: step0"):
        arm(f"{plan_r2b.PRODUCT}/step9", m=64)


@pytest.mark.parametrize("kernel", [plan_r2b.PRODUCT, f"{plan_r2b.PRODUCT}/step2"])
def test_a_weight_that_the_matrix_kernel_cannot_take_is_named(gpu, kernel) -> None:
    gpu.status = (1, 254, 254)
    with pytest.raises(LaunchError, match="has scales that qgemm_mx cannot take"):
        arm(kernel, m=64)
    made = arm(plan_r2b.DISPATCH, m=33)
    ours, users = calls_of(gpu, made, 0)
    assert ours == users and len(ours) == 3


# ---------------------------------------------------------------- probes


@pytest.fixture
def probed(gpu, monkeypatch):
    """`probe_checks` over made-up results: every kernel that is asked for, with what it launched."""
    import cupy

    ran = []

    def pack(weight, stream):
        codes = weight.scales if weight.format == "mxfp4" else np.array([124, 110])
        gpu.status = (0, int(codes.max()), int(codes.min()))
        return pack_weight(weight, stream=None)

    pack_weight = product_arms.pack_weight
    monkeypatch.setattr("qgemm_mx.gpu_linear.current_device", lambda: 0)
    monkeypatch.setattr(product_arms, "pack_weight", pack)
    monkeypatch.setattr(cupy, "asarray", lambda a: Array(a.shape, a.dtype), raising=False)
    monkeypatch.setattr(
        cupy, "full", lambda shape, value, dtype: Array(shape, dtype), raising=False
    )
    monkeypatch.setattr(cupy, "asnumpy", lambda a: np.zeros(a.shape, np.uint16), raising=False)

    def check(probe, y, output):
        ran.append((probe, [launch.source for launch in gpu.launched]))
        gpu.launched.clear()
        return CheckResult(probe.name, True, 0.0, 0.0, "")

    monkeypatch.setattr(probes, "check", check)
    return ran


def test_probes_of_the_matrix_kernel_the_mode_and_the_dispatch(probed) -> None:
    kernels = (plan_r2b.PRODUCT, plan_r2b.BATCH_INVARIANT, plan_r2b.DISPATCH)
    steps = [f"{plan_r2b.PRODUCT}/{step}" for step in MATRIX_STEPS[:-1]]
    rows = product_arms.probe_checks(Stream(), steps, kernels)
    assert len(rows) == len(probed) < 1200 and all(row.passed for row in rows)
    assert {row.kernel for row in rows} == {*kernels, *steps}
    for kernel in kernels:
        own = [row for row in rows if row.kernel == kernel]
        assert {row.format for row in own} == {"mxfp4", "nvfp4", "int4_g128"}
        assert {row.M for row in own} == {3, 7, 16, 33, 65, 100, 129, 257}
        assert any(row.N % 16 for row in own) and any(row.K % 256 for row in own)
    assert {row.format for row in rows if row.kernel in steps} == {"mxfp4"}
    for row, (probe, sources) in zip(rows, probed, strict=True):
        assert row.name == f"probe_{probe.name}" and (row.N, row.K) == (
            probe.weight.n,
            probe.weight.k,
        )
        if row.kernel == plan_r2b.PRODUCT:
            assert sources == ["qgemm_mx"]
        elif row.kernel == plan_r2b.BATCH_INVARIANT:
            assert sources == ["qgemv_mx"] * -(-row.M // 16)
        elif row.kernel == plan_r2b.DISPATCH:
            assert set(sources) <= {"qgemv_mx", "qgemm_mx"}
            matrix = row.M > 8 and "254" not in row.name and "255" not in row.name
            assert (sources == ["qgemm_mx"]) == matrix
        else:
            assert sources in (["qgemm_mx"], ["qgemm_ablations"])


def test_probes_of_the_decode_kernel_are_those_that_they_were(probed) -> None:
    rows = product_arms.probe_checks(Stream())
    assert {row.kernel for row in rows} == {PRODUCT, BATCH_INVARIANT}
    assert {(row.N, row.K, row.M) for row in rows} == set(product_arms.PROBE_PROBLEMS)


@pytest.mark.parametrize("programmatic", [False, True])
def test_a_chain_launches_its_layers_in_order(gpu, programmatic) -> None:
    problems = []
    for n in (48, 40, 96):
        packed = made_up_library.packed(n=n)
        problems.append((packed, Array((2, packed.weights.k), np.uint16), "x64"))
    whole = made_up_library.weights(n=48 + 40 + 96)
    chain = Chain.of(whole, problems, Stream(), PROTOCOL, programmatic)
    chain.launch(1)
    assert [launch.arguments["n"] for launch in gpu.launched] == [48, 40, 96]
    assert {launch.programmatic for launch in gpu.launched} == {programmatic}
    assert [launch.arguments["weight"] for launch in gpu.launched] == [
        packed.copies[1].pointer for packed, *_ in problems
    ]
    assert chain.weight_bytes == whole.copy_bytes and chain.copies == 3
    plans = [
        gemv_plan.plan_gemv(n, 384, 2, "mxfp4", 132, programmatic=programmatic)
        for n in (48, 40, 96)
    ]
    entries = [plan.entry("mxfp4", "bf16") for plan in plans]
    assert [launch.entry for launch in gpu.launched] == entries
    assert {launch.arguments["early"] for launch in gpu.launched} == {int(programmatic)}
    for layer, plan in zip(chain.layers, plans, strict=True):
        assert layer.bound.plan == plan
    words = "programmatic" if programmatic else "plain"
    assert chain.tuning["chosen"].startswith(f"3 {words} launches: {entries[0]}, grid ")


def test_a_dependent_call_is_the_one_that_linear_makes(gpu) -> None:
    packed = made_up_library.packed(n=4096, k=4096)
    x = Array((3, 4096), np.uint16)
    chain = Chain.of(packed.weights, [(packed, x, "x64")], Stream(), PROTOCOL, True)
    chain.launch(2)
    layer = chain.layers[0]
    linear(x, packed.copies[2], out=layer.y, stream=Stream(), programmatic=True)
    ours, users = gpu.launched
    assert seen(ours) == seen(users) and ours.programmatic
    plain = product_arms.own_launch(packed.copies[2], 3)
    assert plain.plan != layer.bound.plan
    assert layer.bound is product_arms.own_launch(packed.copies[0], 3, programmatic=True)


def test_kernels_come_from_the_folder_that_is_recorded(monkeypatch, tmp_path) -> None:
    assert callable(Device._cubin)  # the seam that is used

    class Bare:
        def _cubin(self, name):
            raise AssertionError("the library would compile")

    bare = Bare()
    monkeypatch.setattr(product_arms, "device", lambda ordinal: bare)
    product_arms.use_cubins(tmp_path)
    assert bare._cubin("qgemv_mx") == tmp_path / "qgemv_mx.cubin"
