"""The plan of R1 and its protocol: which points and arms there are, in which order, and what is timed where."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from lab import decomposition, plan_r1, protocol
from qgemm_mx.formats import weight_bytes

PEERS = {"peer/humming_bf16": ("mxfp4", "nvfp4"), "peer/humming_fp8": ("mxfp4",)}


@pytest.fixture(scope="module")
def frozen(repository) -> dict:
    return json.loads((repository / protocol.file_of("R1")).read_text())


@pytest.fixture(scope="module")
def shapes(repository) -> list[dict]:
    return json.loads((repository / "prereg/shapes.json").read_text())["shapes"]


@pytest.fixture(scope="module")
def points(frozen, shapes) -> dict[str, plan_r1.Point]:
    made = plan_r1.points(frozen, shapes, PEERS)
    assert len({p.name for p in made}) == len(made)
    return {p.name: p for p in made}


def test_r1_and_r2_have_protocols_of_their_own_and_the_other_rungs_have_not() -> None:
    files = {rung: protocol.file_of(rung) for rung in ("R0", "R1", "R2", "R3")}
    assert files.pop("R1") == "prereg/protocol_r1.json"
    assert files.pop("R2") == "prereg/protocol_r2.json"
    assert set(files.values()) == {"prereg/protocol.json"}


def test_every_shape_at_every_m_then_the_further_shapes(points, shapes, frozen) -> None:
    further = [p.further for p in points.values()]
    assert sorted(further) == further and sum(further) == 23
    assert len(points) - sum(further) == 9 * 14
    names = [p.shape["name"] for p in points.values() if not p.further]
    blocks = [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    assert sorted(blocks) == sorted(s["name"] for s in shapes)  # shape by shape
    order = [p.m for p in points.values() if p.shape["name"] == "gate_up"]
    assert sorted(order) == frozen["plan"]["m"] != order


def test_the_order_follows_the_seed_alone(frozen, shapes, points) -> None:
    again = plan_r1.points(frozen, shapes, {})
    assert [p.name for p in again] == list(points)
    other = plan_r1.points({**frozen, "seed": 1}, shapes, PEERS)
    assert [p.name for p in other] != list(points)
    assert {p.name for p in other} == set(points)


def test_a_production_point(points) -> None:
    assert points["down_proj/M8"].arms == (
        ("stream_read", "mxfp4"), ("stream_read", "nvfp4"), ("cublaslt_bf16", "bf16"),
        ("cublaslt_fp8", "fp8_e4m3"), ("peer/humming_bf16", "mxfp4"), ("peer/humming_bf16", "nvfp4"),
        ("peer/humming_fp8", "mxfp4"),
    )  # fmt: skip


def test_the_factorial_at_three_m_of_every_shape(points, shapes) -> None:
    with_it = {(p.shape["name"], p.m) for p in points.values() if "factorial" in p.groups}
    assert with_it == {(s["name"], m) for s in shapes for m in (1, 16, 64)}
    arms = points["kv_gqa/M64"].groups["factorial"]
    assert {k for k, _ in arms} == {*decomposition.variants()} | {
        "probe/balanced_grid", "probe/launch_testbed", "probe/launch_floor",
    }  # fmt: skip
    assert {fmt for _, fmt in arms} == {"mxfp4"}


def test_causes_stand_in_the_point_of_their_shape_and_every_arm_once(points) -> None:
    point = points["q_o_proj/M1"]
    assert {"stages", "warps", "split_k", "formats"} <= set(point.groups)
    assert max(Counter(point.arms).values()) == 1
    assert ("testbed/full", "nvfp4") in point.arms and ("stream_read", "int4_g128") in point.arms
    assert ("cause/stages/2", "mxfp4") in point.arms
    assert "stages" not in points["q_o_proj/M16"].groups


def test_a_problem_has_one_name(points, shapes) -> None:
    problems = Counter((p.shape["N"], p.shape["K"], p.m) for p in points.values())
    assert max(problems.values()) == 1
    for p in points.values():
        for fmt in p.formats:
            assert weight_bytes(fmt, p.shape["N"], p.shape["K"]) > 0


def test_a_shard_that_is_another_shape_goes_by_its_name(frozen, shapes, points) -> None:
    found = plan_r1.shards(frozen, shapes)
    assert found["q_o_proj", 4] == "kv_gqa" and found["q_o_proj", 1] == "q_o_proj"
    assert found["kv_gqa", 2] == "q_o_proj_tp8" and ("gpt_oss_2880", 2) not in found
    by_name = {s["name"]: s for s in (*shapes, *(p.shape for p in points.values()))}
    for (shape, ways), name in found.items():
        assert by_name[name]["N"] * ways == by_name[shape]["N"]
        assert by_name[name]["K"] == by_name[shape]["K"] and f"{name}/M1" in points


def test_without_a_peer_its_arms_are_missing_and_nothing_else(frozen, shapes, points) -> None:
    bare = plan_r1.points(frozen, shapes, {})
    for p in bare:
        left = tuple(a for a in points[p.name].arms if not a[0].startswith("peer/"))
        assert p.arms == left


@pytest.mark.parametrize("part", ["causes", "further"])
def test_a_name_that_is_no_shape_is_refused(frozen, shapes, part) -> None:
    plan = json.loads(json.dumps(frozen["plan"]))
    row = next(r for r in plan[part] if "of" in r or part == "causes")
    row["of" if part == "further" else "shapes"].append("gate_upp")
    with pytest.raises(ValueError, match="gate_upp"):
        plan_r1.points({**frozen, "plan": plan}, shapes, {})


# What is timed in which regime, and how often.


def test_fewer_nodes_and_blocks_from_1024_on(frozen) -> None:
    assert [protocol.min_nodes(frozen, m) for m in (1, 512, 1024)] == [16, 16, 8]
    blocks = [protocol.planned_blocks(frozen, m, "cold_graph") for m in (512, 1024)]
    assert blocks == [6, 3]
    assert [protocol.planned_blocks(frozen, m, "hot_graph") for m in (512, 1024)] == [3, 2]
    assert protocol.planned_blocks(frozen, 1, "chain_pdl") == 6
    assert protocol.tuning_nodes(frozen, 2048, 2) == 4
    with pytest.raises(KeyError):
        protocol.planned_blocks(frozen, 1, "warm")


@pytest.mark.parametrize(
    ("kernel", "role", "wrong", "regimes"),
    [
        ("stream_read", "floor", False, "cold hot loop chain"),
        ("cublaslt_fp8", "baseline", False, "cold hot loop"),
        ("peer/humming_bf16", "peer", False, "cold hot loop"),
        ("testbed/full", "testbed", False, "cold hot loop chain"),
        ("testbed/-layout_staging", "testbed", False, "cold"),
        ("cause/stages/2", "testbed", False, "cold"),
        ("testbed/none", "testbed", True, "cold"),
        ("probe/launch_floor", "testbed", True, "cold"),
    ],
)
def test_who_is_timed_where(frozen, kernel, role, wrong, regimes) -> None:
    names = {"cold_graph": "cold", "hot_graph": "hot", "cold_loop": "loop", "chain_pdl": "chain"}
    assert protocol.regimes_at(frozen, "decode_chain", 1) == tuple(names)
    assert protocol.regimes_at(frozen, "gate_up", 1) == tuple(names)[:3]
    taken = [
        short
        for regime, short in names.items()
        if protocol.takes_part(frozen, (kernel, role), wrong, "decode_chain", 1, regime)
    ]
    assert " ".join(taken) == regimes


def test_r0_goes_on_as_it_was(repository) -> None:
    r0 = json.loads((repository / "prereg/protocol.json").read_text())
    assert protocol.min_nodes(r0, 8192) == 16 and protocol.twin_kernels(r0) == ("cublaslt_fp8",)
    assert protocol.planned_blocks(r0, 8192, "hot_graph") == r0["blocks"]["secondary"]
    naive = ("naive_dequant", "sanity_floor")
    assert protocol.takes_part(r0, naive, False, "gate_up", 512, "hot_graph")
    assert not protocol.takes_part(r0, naive, False, "gate_up", 1024, "hot_graph")
    assert protocol.takes_part(
        r0, ("cublaslt_bf16", "baseline"), False, "gate_up", 1024, "cold_loop"
    )
