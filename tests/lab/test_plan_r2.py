"""The plan of R2 and its protocol: which points and arms there are, in which order, and what is timed where."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from lab import plan_r2, protocol, testbed
from qgemm_mx import gemv_plan
from qgemm_mx.build import load_sources
from qgemm_mx.formats import weight_bytes

PEERS = {"peer/humming_bf16": ("mxfp4", "nvfp4"), "peer/humming_fp8": ("mxfp4",)}
THREE = {"q_o_proj", "gate_up", "llama70b_gate_up"}


@pytest.fixture(scope="module")
def frozen(repository) -> dict:
    return json.loads((repository / protocol.file_of("R2")).read_text())


@pytest.fixture(scope="module")
def shapes(repository) -> list[dict]:
    return json.loads((repository / "prereg/shapes.json").read_text())["shapes"]


@pytest.fixture(scope="module")
def points(frozen, shapes) -> dict[str, plan_r2.Point]:
    made = plan_r2.points(frozen, shapes, PEERS)
    assert len({p.name for p in made}) == len(made)
    return {p.name: p for p in made}


def where(points, kernel: str, fmt: str) -> set[tuple[str, int]]:
    return {(p.shape["name"], p.m) for p in points.values() if (kernel, fmt) in p.arms}


def test_nine_shapes_at_five_m_then_the_chain_at_three(points, shapes, frozen) -> None:
    further = [p.further for p in points.values()]
    assert sorted(further) == further and sum(further) == 3
    assert len(points) == 9 * 5 + 3
    names = [p.shape["name"] for p in points.values() if not p.further]
    blocks = [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    assert sorted(blocks) == sorted(s["name"] for s in shapes)  # shape by shape
    order = [p.m for p in points.values() if p.shape["name"] == "gate_up"]
    assert sorted(order) == frozen["plan"]["m"] == [1, 2, 4, 8, 16]
    chain = [p for p in points.values() if p.further]
    assert {p.m for p in chain} == {1, 4, 16}
    assert all(p.arms == (("stream_read", "mxfp4"), ("qgemv_mx", "mxfp4")) for p in chain)


def test_the_chain_has_the_bytes_of_its_layers(points) -> None:
    shape = points["decode_chain/M1"].shape
    whole = weight_bytes("mxfp4", shape["N"], shape["K"])
    assert whole == sum(weight_bytes("mxfp4", n, k) for n, k in testbed.CHAIN_LAYERS)


def test_floors_baselines_and_products_stand_in_front_everywhere(points) -> None:
    front = (
        ("stream_read", "mxfp4"), ("stream_read", "nvfp4"), ("cublaslt_bf16", "bf16"),
        ("cublaslt_fp8", "fp8_e4m3"), ("qgemv_mx", "mxfp4"), ("qgemv_mx", "nvfp4"),
    )  # fmt: skip
    for p in points.values():
        if not p.further:
            assert p.arms[:6] == front
    assert points["down_proj/M8"].arms[6:] == (
        ("peer/humming_bf16", "mxfp4"), ("peer/humming_bf16", "nvfp4"), ("peer/humming_fp8", "mxfp4"),
        ("qgemv_mx/searched", "mxfp4"),
    )  # fmt: skip
    for p in points.values():
        assert max(Counter(p.arms).values()) == 1


def test_what_stands_at_a_few_points_alone(points, shapes, frozen) -> None:
    everywhere = {(s["name"], m) for s in shapes for m in frozen["plan"]["m"]}
    assert where(points, "qgemv_mx/searched", "mxfp4") == everywhere
    int4 = {(name, m) for name in THREE for m in frozen["plan"]["m"]}
    assert where(points, "qgemv_mx", "int4_g128") == int4
    assert where(points, "stream_read", "int4_g128") == int4
    invariant = {(s, m) for s in ("gate_up", "q_o_proj", "llama70b_down") for m in (1, 4)}
    assert where(points, "qgemv_mx/batch_invariant", "mxfp4") == invariant
    ablated = {k for p in points.values() for k, _ in p.arms if plan_r2.is_ablation(k)}
    assert len(ablated) >= 5  # steps of the waterfall
    for kernel in ablated:
        assert where(points, kernel, "mxfp4") == {(name, m) for name in THREE for m in (1, 16)}


def test_every_product_arm_has_its_floor(points) -> None:
    for p in points.values():
        for kernel, fmt in p.arms:
            if kernel.startswith("qgemv_mx"):
                assert ("stream_read", fmt) in p.arms, p.name


def test_the_ablation_of_the_protocol_is_the_one_that_is_built(frozen, points) -> None:
    planned = [k for row in frozen["plan"]["rows"] for k in row["kernels"] if plan_r2.is_ablation(k)]  # fmt: skip
    steps = [step for step, *_ in gemv_plan.ABLATION_STEPS]
    assert [*planned, "qgemv_mx"] == [f"qgemv_mx/{step}" for step in steps[:-1]] + steps[-1:]
    entries = {name: set(source.threads) for name, source in load_sources().items()}
    for p in points.values():  # at every point where a step is planned it has a plan, and an entry
        for kernel, fmt in p.arms:
            if plan_r2.is_ablation(kernel):
                step, place = kernel.removeprefix("qgemv_mx/"), (p.shape["N"], p.shape["K"], p.m)
                source, entry, _ = gemv_plan.ablation(step, *place, fmt, 132)
                assert entry in entries[source], p.name


def test_every_point_of_the_product_has_a_plan_and_the_search_more_than_one(points) -> None:
    for p in points.values():
        place = (p.shape["N"], p.shape["K"], p.m)
        for kernel, fmt in p.arms:
            if kernel == "qgemv_mx" and not p.further:
                assert gemv_plan.plan_gemv(*place, fmt, 132).tokens == p.m
            if kernel == "qgemv_mx/searched":
                assert len(gemv_plan.candidates(*place, fmt, 132)) > 1


def test_the_order_follows_the_seed_alone(frozen, shapes, points) -> None:
    again = plan_r2.points(frozen, shapes, {})
    assert [p.name for p in again] == list(points)
    other = plan_r2.points({**frozen, "seed": 1}, shapes, PEERS)
    assert [p.name for p in other] != list(points) and {p.name for p in other} == set(points)
    bare = {p.name: p.arms for p in again}
    for name, p in points.items():
        assert bare[name] == tuple(a for a in p.arms if not a[0].startswith("peer/"))


def test_a_name_that_is_no_shape_is_refused(frozen, shapes) -> None:
    plan = json.loads(json.dumps(frozen["plan"]))
    plan["rows"][0]["shapes"].append("gate_upp")
    with pytest.raises(ValueError, match="gate_upp"):
        plan_r2.points({**frozen, "plan": plan}, shapes, {})


@pytest.mark.parametrize(
    ("kernel", "role", "regimes"),
    [
        ("stream_read", "floor", "cold hot loop chain"),
        ("cublaslt_fp8", "baseline", "cold hot loop"),
        ("peer/humming_bf16", "peer", "cold hot loop"),
        ("qgemv_mx", "product", "cold hot loop chain"),
        ("qgemv_mx/searched", "product", "cold"),
        ("qgemv_mx/batch_invariant", "product", "cold"),
        ("qgemv_mx/step0", "testbed", "cold"),
    ],
)
def test_who_is_timed_where(frozen, kernel, role, regimes) -> None:
    names = {"cold_graph": "cold", "hot_graph": "hot", "cold_loop": "loop", "chain_pdl": "chain"}
    assert protocol.regimes_at(frozen, "decode_chain", 1) == tuple(names)
    assert protocol.regimes_at(frozen, "gate_up", 1) == tuple(names)[:3]
    taken = [
        short
        for regime, short in names.items()
        if protocol.takes_part(frozen, (kernel, role), False, "decode_chain", 1, regime)
    ]
    assert " ".join(taken) == regimes
    assert protocol.twin_kernels(frozen) == ("cublaslt_fp8", "qgemv_mx")
