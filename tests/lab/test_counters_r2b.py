"""Counters of R2b: what is profiled, in which sets, and the instructions of the entries."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lab import counters_r1, counters_r2b, product_arms, sass_counts, schema
from lab.counters import Found
from lab.counters_r1 import Case
from lab.rows import CellRow, Tuning
from qgemm_mx.formats import weight_bytes

SHAPES = {"q_o_proj": (4096, 4096), "gate_up": (14336, 4096), "kv_gqa": (1024, 4096)}
ROLES = {"cublaslt_bf16": "baseline", "cublaslt_fp8": "baseline", "qgemm_mx/step0": "testbed"}
ENTRY = "qgemm_mx_mxfp4_bf16_t64_r128"
LISTING = f"""\t\tFunction : {ENTRY}
        /*0000*/  LDS.128 R0, [R2] ;   /* 0x0 */
        /*0010*/  HGMMA.64x64x16.F32.BF16 R24, R0, gdesc[UR4] ;   /* 0x0 */
        /*0020*/  @P0 BRA 0x0 ;   /* 0x0 */
        /*0030*/  EXIT ;   /* 0x0 */
\t\t..........
"""


def cell(kernel="qgemm_mx", shape="gate_up", m=64, fmt="mxfp4", regime="cold_graph") -> CellRow:
    n, k = SHAPES[shape]
    role, size = ROLES.get(kernel, "product"), weight_bytes(fmt, n, k)
    tuning = Tuning(1, f"{ENTRY}, grid 112 x 384")
    return CellRow(kernel, role, fmt, shape, n, k, m, regime, size, "passed", tuning)


def test_the_kernel_is_profiled_at_three_m_and_rivals_and_steps_at_one_shape() -> None:
    made = [
        cell(kernel, shape, m, fmt)
        for kernel, fmt in (
            ("qgemm_mx", "mxfp4"), ("qgemm_mx", "nvfp4"), ("qgemm_mx", "int4_g128"), ("linear", "mxfp4"),
            ("qgemm_mx/searched", "mxfp4"), ("qgemm_mx/step0", "mxfp4"), ("cublaslt_bf16", "bf16"),
            ("cublaslt_fp8", "fp8_e4m3"),
        )
        for shape in SHAPES
        for m in (32, 64, 512, 2048)
    ] + [cell(regime="hot_graph")]  # fmt: skip
    found = counters_r2b.cases(made)
    ours = {(c.shape, c.M, c.format) for c in found if c.kernel == "qgemm_mx"}
    assert ours == {
        (shape, m, fmt)
        for shape in ("q_o_proj", "gate_up")
        for m in (64, 512, 2048)
        for fmt in ("mxfp4", "nvfp4")
    }
    rest = {(c.kernel, c.shape, c.M) for c in found if c.kernel != "qgemm_mx"}
    assert rest == {
        ("qgemm_mx/step0", "gate_up", 512),
        *((rival, "gate_up", m) for rival in ("cublaslt_bf16", "cublaslt_fp8") for m in (64, 512, 2048)),
    }  # fmt: skip
    # Weights are made once for each format and shape.
    places = [(c.shape, c.format) for c in found]
    assert len([p for i, p in enumerate(places) if i == 0 or places[i - 1] != p]) == len(set(places))  # fmt: skip


def test_the_sets_ask_for_the_pipe_of_wgmma_and_for_what_its_warps_wait_for() -> None:
    names = {m.name for m in counters_r2b.COUNTS_SET.metrics}
    assert "sm__inst_executed_pipe_tensor_op_gmma.sum" in names
    assert "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active" in names
    assert "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio" in names
    assert len(names) == len(counters_r2b.COUNTS_SET.metrics)
    # What ncu on the H200 said it has not: one such name would take the whole set away.
    assert not any("warpgroup_arrive" in name or "branch_resolve" in name for name in names)
    assert counters_r2b.ESSENTIAL.name == "cold"


def test_the_entries_are_looked_for_in_every_cubin_of_the_kernel(
    repository, tmp_path, monkeypatch
) -> None:
    for name in ("qgemm_mx", "qgemm_ablations", "qgemv_mx"):
        (tmp_path / f"{name}.cubin").touch()
    read, seen = [], {}

    def disassemble(cubin):
        read.append(cubin.stem)
        return LISTING if cubin.stem == "qgemm_mx" else LISTING.replace(ENTRY, "another")

    def profiled(cubin_dir, protocol, log, cold, deep, program, sets):
        seen.update(program=program, sets=sets, cases=len(cold), same=cold == deep)
        return Found(refused="ncu is not on PATH")

    monkeypatch.setattr("lab.sass.disassemble", disassemble)
    monkeypatch.setattr(sass_counts, "tool", lambda: "cuobjdump 13.2")
    monkeypatch.setattr(counters_r1, "profiled", profiled)
    rival = cell("cublaslt_bf16", fmt="bf16")
    found = counters_r2b.take(repository, tmp_path, [cell(), rival], print)
    assert read == ["qgemm_ablations", "qgemm_mx"]
    assert seen["sets"] == (counters_r2b.ESSENTIAL, counters_r2b.ESSENTIAL, counters_r2b.COUNTS_SET)
    assert seen["program"] == counters_r2b.__name__ and seen["cases"] == 2 and seen["same"]
    assert found.refused == "ncu is not on PATH"
    schema.check_counters(found.rows)
    assert {r["kernel"] for r in found.rows} == {"qgemm_mx"}
    assert [r["value"] for r in found.rows if r["metric"] == "sass_HGMMA"] == [1.0]
    assert [r["value"] for r in found.rows if r["metric"] == "sass_loop_total"] == [3.0]
    assert not any("per_64" in r["metric"] for r in found.rows)


@pytest.mark.parametrize("kernel", ["qgemm_mx", "qgemm_mx/step0"])
def test_the_profiled_call_is_the_one_that_the_campaign_chose(monkeypatch, kernel) -> None:
    def arm(asked, packed, x, x64, stream, protocol):
        assert (asked, packed, x, x64) == (kernel, "packed", "x", None)
        return SimpleNamespace(tuning={"chosen": "a plan"}, launch=print)

    monkeypatch.setattr(product_arms, "use_cubins", lambda folder: None)
    monkeypatch.setattr(product_arms, "make_arm", arm)
    monkeypatch.setattr(product_arms.Packed, "of", lambda weights, stream: "packed")
    modules = SimpleNamespace(folder="cubins")
    operands = SimpleNamespace(
        bench=SimpleNamespace(modules=modules, stream=None, protocol={}), weights=None, layouts={},
        x=lambda m: ("x", "x8"),
    )  # fmt: skip
    case = Case(kernel, "mxfp4", "gate_up", 14336, 4096, 64, "a plan")
    assert counters_r2b.launcher(operands, case) is print
    with pytest.raises(LookupError, match="does not offer 'another'"):
        counters_r2b.launcher(operands, Case(*(*vars(case).values(),)[:-1], "another"))


@pytest.mark.parametrize(("fmt", "x"), [("bf16", "x bf16"), ("fp8_e4m3", "x fp8")])
def test_a_baseline_is_profiled_with_the_activations_of_its_format(monkeypatch, fmt, x) -> None:
    from lab import arms

    seen = {}

    def baseline(weights, activations, *rest):
        seen["x"] = activations
        y = SimpleNamespace(data=SimpleNamespace(ptr=0))
        return SimpleNamespace(fp8=fmt == "fp8_e4m3", y=y)

    monkeypatch.setattr(arms, "CublasLtArm", baseline)
    candidate = SimpleNamespace(describe=lambda: "algo 1")
    pointer = SimpleNamespace(data=SimpleNamespace(ptr=0))
    lt = SimpleNamespace(
        plan=lambda *a: SimpleNamespace(candidates=[candidate]), launcher=lambda *a: SimpleNamespace()
    )  # fmt: skip
    weights = SimpleNamespace(format=fmt, copies=2, pointer=lambda copy: 0)
    protocol = {"cublaslt": {"requested_candidates": 32}}
    bench = SimpleNamespace(lt=lt, stream=SimpleNamespace(ptr=0), protocol=protocol)
    given = {"x bf16": pointer, "x fp8": SimpleNamespace(data=pointer.data)}
    operands = SimpleNamespace(
        bench=bench, weights=weights, x=lambda m: (given["x bf16"], given["x fp8"])
    )
    kernel = "cublaslt_fp8" if fmt == "fp8_e4m3" else "cublaslt_bf16"
    counters_r2b.launcher(operands, Case(kernel, fmt, "gate_up", 14336, 4096, 64, "algo 1"))
    assert seen["x"] is given[x]
