"""The plan of R2b and its protocol: which points and arms there are, in which order, and what is timed where."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from lab import claims, plan_r2, plan_r2b, protocol, rungs

PEERS = {"peer/humming_bf16": ("mxfp4", "nvfp4"), "peer/humming_fp8": ("mxfp4",)}
TABULATED = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
ODD = {33: 64, 65: 128, 100: 128, 129: 256, 257: 512}


@pytest.fixture(scope="module")
def frozen(repository) -> dict:
    return json.loads((repository / protocol.file_of("R2b")).read_text())


@pytest.fixture(scope="module")
def shapes(repository) -> list[dict]:
    return json.loads((repository / "prereg/shapes.json").read_text())["shapes"]


@pytest.fixture(scope="module")
def points(frozen, shapes) -> dict[str, plan_r2b.Point]:
    made = plan_r2b.points(frozen, shapes, PEERS)
    assert len({p.name for p in made}) == len(made)
    return {p.name: p for p in made}


def where(points, kernel: str, fmt: str) -> set[tuple[str, int]]:
    return {(p.shape["name"], p.m) for p in points.values() if (kernel, fmt) in p.arms}


def test_nine_shapes_at_ten_m_with_decode_odd_m_and_the_neighbour(points, shapes, frozen) -> None:
    assert frozen["plan"]["m"] == TABULATED
    further = [p.further for p in points.values()]
    assert sorted(further) == further and sum(further) == 3
    assert len(points) == 9 * 10 + 6 * 4 + 3 * 5 + 3
    names = [p.shape["name"] for p in points.values() if not p.further]
    blocks = [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    assert sorted(blocks) == sorted(s["name"] for s in shapes)  # shape by shape
    order = [p.m for p in points.values() if p.shape["name"] == "gate_up"]
    assert order != sorted(order) and set(order) == {1, 2, 4, 8, *TABULATED, *ODD}
    beside = [p for p in points.values() if p.further]
    assert {(p.shape["name"], p.shape["N"], p.shape["K"]) for p in beside} == {
        ("neighbour_3072", 3072, 3072)
    }
    assert {p.m for p in beside} == {64, 512, 2048}
    assert all(p.arms == (("stream_read", "mxfp4"), ("qgemm_mx", "mxfp4")) for p in beside)


def test_floors_baselines_products_and_bf16_peers_at_every_tabulated_point(points) -> None:
    front = (
        ("stream_read", "mxfp4"), ("stream_read", "nvfp4"), ("cublaslt_bf16", "bf16"),
        ("cublaslt_fp8", "fp8_e4m3"), ("qgemm_mx", "mxfp4"), ("qgemm_mx", "nvfp4"),
        ("peer/humming_bf16", "mxfp4"), ("linear", "mxfp4"),
    )  # fmt: skip
    for p in points.values():
        assert max(Counter(p.arms).values()) == 1
        if p.m in TABULATED and not p.further:
            assert p.arms[: len(front)] == front, p.name
        else:
            assert not any(kernel.startswith("peer/") for kernel, _ in p.arms)
    assert points["llama70b_down/M8192"].arms == front
    assert points["down_proj/M128"].arms == (*front, ("qgemm_mx/searched", "mxfp4"))


def test_what_stands_at_a_few_points_alone(points, shapes) -> None:
    names = [s["name"] for s in shapes]
    searched = {(name, m) for name in names for m in (32, 128, 512)} | {("q_o_proj", 1024)}
    assert where(points, "qgemm_mx/searched", "mxfp4") == searched
    int4 = {(s, m) for s in ("q_o_proj", "gate_up") for m in (32, 128, 1024)}
    assert where(points, "qgemm_mx", "int4_g128") == int4
    invariant = {(s, m) for s in ("gate_up", "q_o_proj") for m in (32, 128)}
    assert where(points, "qgemm_mx/batch_invariant", "mxfp4") == invariant
    ablated = {k for p in points.values() for k, _ in p.arms if plan_r2b.is_ablation(k)}
    assert len(ablated) >= 6  # steps of the waterfall
    for kernel in ablated:
        assert where(points, kernel, "mxfp4") == {
            (name, m) for name in ("q_o_proj", "gate_up") for m in (64, 512, 2048)
        }
        assert not plan_r2.is_ablation(kernel)


def test_every_odd_m_stands_beside_the_next_tabulated_one(points) -> None:
    own = where(points, "qgemm_mx", "mxfp4")
    for name in ("gpt_oss_2880", "q_o_proj", "gate_up"):
        for m, following in ODD.items():
            assert {(name, m), (name, following)} <= own
            assert min(t for t in TABULATED if t > m) == following
            assert points[f"{name}/M{m}"].arms == (("stream_read", "mxfp4"), ("qgemm_mx", "mxfp4"))
    neighbour = {m for name, m in own if name == "neighbour_3072"}
    assert {("gpt_oss_2880", m) for m in neighbour} <= own


def test_every_product_arm_has_its_floor(points) -> None:
    for p in points.values():
        for kernel, fmt in p.arms:
            if kernel.startswith(("qgemm_mx", "linear")):
                assert ("stream_read", fmt) in p.arms, p.name


def test_every_claim_about_the_kernel_and_the_dispatch_finds_its_cells(
    repository, points, frozen
) -> None:
    """A claim is judged within one campaign: all its cells stand in this plan, with the regimes that they are in."""
    held = {
        (kernel, fmt, p.shape["N"], p.shape["K"], p.m, regime)
        for p in points.values()
        for kernel, fmt in p.arms
        for regime in protocol.regimes_at(frozen, p.shape["name"], p.m)
        if protocol.takes_part(frozen, (kernel, ""), False, p.shape["name"], p.m, regime)
    }
    asked = 0
    for path in sorted((repository / "prereg/claims").glob("*.json")):
        for claim in claims.load(path):
            cells = (*claim.estimand.cells, *claim.estimand.reference_cells)
            if rungs.rung_of("R2b") == claim.rung and {"qgemm_mx", "linear"} & {c.kernel for c in cells}:  # fmt: skip
                asked += 1
                assert [str(c) for c in cells if c.measured not in held] == [], claim.id
    assert asked == 180 + 180 + 17 + 18 + 3 + 2 + 1 + 2


def test_the_ablation_of_the_protocol_is_the_one_that_is_built(frozen) -> None:
    gemm_plan = pytest.importorskip("qgemm_mx.gemm_plan")
    planned = [k for row in frozen["plan"]["rows"] for k in row["kernels"] if plan_r2b.is_ablation(k)]  # fmt: skip
    steps = [step if isinstance(step, str) else step[0] for step in gemm_plan.ABLATION_STEPS]
    steps = [step for step in steps if re.fullmatch(r"step\d+", step)]
    assert planned == [f"qgemm_mx/{step}" for step in steps]


def test_the_order_follows_the_seed_alone(frozen, shapes, points) -> None:
    again = plan_r2b.points(frozen, shapes, {})
    assert [p.name for p in again] == list(points)
    other = plan_r2b.points({**frozen, "seed": 1}, shapes, PEERS)
    assert [p.name for p in other] != list(points) and {p.name for p in other} == set(points)
    bare = {p.name: p.arms for p in again}
    for name, p in points.items():
        assert bare[name] == tuple(a for a in p.arms if not a[0].startswith("peer/"))


def test_a_name_that_is_no_shape_is_refused(frozen, shapes) -> None:
    plan = json.loads(json.dumps(frozen["plan"]))
    plan["rows"][0]["shapes"].append("gate_upp")
    with pytest.raises(ValueError, match="gate_upp"):
        plan_r2b.points({**frozen, "plan": plan}, shapes, {})


@pytest.mark.parametrize(
    ("shape", "m", "regimes"),
    [
        ("gate_up", 128, "cold_graph hot_graph"),
        ("gate_up", 129, "cold_graph"),
        ("gate_up", 256, "cold_graph"),
        ("gpt_oss_2880", 1, "cold_graph cold_loop"),
        ("gpt_oss_2880", 32, "cold_graph hot_graph"),
        ("gpt_oss_2880", 16, "cold_graph"),
        ("q_o_proj", 1, "cold_graph"),
    ],
)
def test_regimes_of_a_point(frozen, shape, m, regimes) -> None:
    assert protocol.regimes_at(frozen, shape, m) == tuple(regimes.split())


@pytest.mark.parametrize(
    ("kernel", "role", "regimes"),
    [
        ("stream_read", "floor", "cold_graph"),
        ("cublaslt_fp8", "baseline", "cold_graph hot_graph"),
        ("peer/humming_bf16", "peer", "cold_graph"),
        ("qgemm_mx", "product", "cold_graph hot_graph"),
        ("qgemm_mx/searched", "product", "cold_graph"),
        ("qgemm_mx/step0", "testbed", "cold_graph"),
        ("linear", "product", "cold_graph cold_loop"),
    ],
)
def test_who_is_timed_where(frozen, kernel, role, regimes) -> None:
    taken = [
        regime
        for regime in ("cold_graph", "hot_graph", "cold_loop")
        if protocol.takes_part(frozen, (kernel, role), False, "gpt_oss_2880", 16, regime)
    ]
    assert " ".join(taken) == regimes
    assert protocol.twin_kernels(frozen) == ("qgemm_mx",)


def test_no_planned_regime_of_a_point_is_without_an_arm(frozen, points) -> None:
    """The audit takes a regime without legs for a missing one."""
    roles = {"stream_read": "floor", "cublaslt_fp8": "baseline", "cublaslt_bf16": "baseline"}
    for p in points.values():
        for regime in protocol.regimes_at(frozen, p.shape["name"], p.m):
            taking = [
                kernel
                for kernel, _ in p.arms
                if protocol.takes_part(
                    frozen, (kernel, roles.get(kernel, "product")), False, p.shape["name"], p.m, regime
                )
            ]  # fmt: skip
            assert taking, (p.name, regime)
