"""Counters of R2: what is profiled, in which sets, and the instructions of the inner loop."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from lab import counters_r1, counters_r2, product_arms, sass_counts, schema
from lab.counters import Found
from lab.counters_r1 import Case
from lab.rows import CellRow, Tuning
from qgemm_mx.formats import weight_bytes

SHAPES = {"q_o_proj": (4096, 4096), "gate_up": (14336, 4096), "kv_gqa": (1024, 4096)}
ENTRY = "qgemv_mx_mxfp4_bf16_t1_c1"


def listing(entry: str, *lines: str) -> str:
    """What cuobjdump prints: an instruction every 16 bytes."""
    code = "".join(
        f"        /*{16 * i:04x}*/  {line};   /* 0x0 */\n" for i, line in enumerate(lines)
    )
    return f"\t\tFunction : {entry}\n{code}\t\t..........\n"


#: Slices, and in them two loops over tiles: the exact path, then the common one, with a wait of its own inside.
LOOPS = (
    "LDG.E R0, [R2] ",                      # 00: slices
    "LDS R0, [R2] ",                        # 10: exact
    "FMUL R0, R0, R1 ",                     # 20
    "FMUL R0, R0, R1 ",                     # 30
    "HMMA.16816.F32.BF16 R4, R0, R2, R4 ",  # 40
    "@P0 BRA 0x10 ",                        # 50
    "SYNCS.PHASECHK.TRANS64 P1, [R2] ",     # 60: common
    "@!P1 BRA 0x60 ",                       # 70
    "HMMA.16816.F32.BF16 R4, R0, R2, R4 ",  # 80
    "@P2 BRA 0x60 ",                        # 90
    "@P3 BRA 0x0 ",                         # a0
    "EXIT ",
)  # fmt: skip


def cell(kernel="qgemv_mx", shape="q_o_proj", m=1, fmt="mxfp4", regime="cold_graph") -> CellRow:
    n, k = SHAPES[shape]
    role = "floor" if kernel == "stream_read" else "product"
    chosen = f"{ENTRY}, grid 132 x 512"
    size = weight_bytes(fmt, n, k)
    return CellRow(kernel, role, fmt, shape, n, k, m, regime, size, "passed", Tuning(1, chosen))


def test_the_kernel_is_profiled_at_the_shapes_of_the_ablation_beside_its_floor() -> None:
    cells = [
        cell(kernel, shape, m, fmt)
        for kernel in ("stream_read", "qgemv_mx", "qgemv_mx/searched")
        for shape in SHAPES
        for m in (1, 2, 16)
        for fmt in ("mxfp4", "nvfp4", "int4_g128")
    ] + [cell(regime="hot_graph")]
    cold, deep = counters_r2.cases(cells)
    kernel = {(c.shape, c.M, c.format) for c in cold if c.kernel == "qgemv_mx"}
    assert kernel == {
        (shape, m, fmt) for shape in ("q_o_proj", "gate_up") for m in (1, 16) for fmt in ("mxfp4", "nvfp4")
    }  # fmt: skip
    assert {(c.shape, c.M, c.format) for c in cold if c.kernel == "stream_read"} == {
        (shape, 1, fmt) for shape in ("q_o_proj", "gate_up") for fmt in ("mxfp4", "nvfp4")
    }
    assert [c for c in cold if c.kernel == "qgemv_mx"] == deep
    # Weights are made once for each format and shape.
    places = [(c.shape, c.format) for c in cold]
    assert len([p for i, p in enumerate(places) if i == 0 or places[i - 1] != p]) == 4


def test_the_sets_ask_for_memory_and_schedulers_too() -> None:
    names = {m.name for m in counters_r2.COLD_SET.metrics}
    assert {m.name for m in counters_r1.COLD_SET.metrics} < names
    assert "dram__throughput.avg.pct_of_peak_sustained_elapsed" in names
    assert "smsp__issue_active.avg.pct_of_peak_sustained_active" in names
    assert "launch__registers_per_thread" in names and counters_r2.COLD_SET.name == "cold"


def test_the_inner_loop_is_the_common_one() -> None:
    (loops,) = sass_counts.matrix_loops(listing(ENTRY, *LOOPS)).values()
    assert [loop.first for loop in loops] == [0x60, 0x10]
    assert loops[0].path["HMMA"] == 1 and loops[0].path_total == 4


def test_instructions_of_the_inner_loop_for_64_weights(tmp_path, monkeypatch) -> None:
    text = listing(ENTRY, *LOOPS)
    monkeypatch.setattr("lab.sass.disassemble", lambda cubin: text)
    monkeypatch.setattr(sass_counts, "tool", lambda: "cuobjdump 13.2")
    _, deep = counters_r2.cases([cell(), cell(shape="gate_up")])
    found = counters_r2.sass_rows(tmp_path, deep)
    assert found.refused is None
    schema.check_counters(found.rows)
    per_64 = [r for r in found.rows if r["metric"] == "loop_instructions_per_64_weights"]
    assert {r["shape"] for r in per_64} == {"q_o_proj", "gate_up"}
    assert all(r["value"] == 64 * 4 / 4096 and "inner loop" in r["tool"] for r in per_64)
    assert sum(r["value"] for r in found.rows if r["metric"] == "sass_HMMA") == 4
    gone = Case("qgemv_mx", "mxfp4", "q_o_proj", 4096, 4096, 1, "qgemv_mx_gone, grid 1 x 1")
    assert "'qgemv_mx_gone' is no entry" in counters_r2.sass_rows(tmp_path, [gone]).refused


def test_the_profiler_runs_this_module(repository, tmp_path, monkeypatch) -> None:
    seen = {}

    def profiled(cubin_dir, protocol, log, cold, deep, program, sets):
        seen.update(program=program, sets=sets, cold=len(cold), seed=protocol["seed"])
        return Found(refused="ncu is not on PATH")

    monkeypatch.setattr(counters_r1, "profiled", profiled)
    monkeypatch.setattr(counters_r2, "sass_rows", lambda *a: Found([{"metric": "sass_total"}]))
    found = counters_r2.take(repository, tmp_path, [cell()], print)
    assert seen["program"] == counters_r2.__name__ and seen["cold"] == 1
    assert [s.name for s in seen["sets"]] == ["cold", "cold", "counts"]
    frozen = json.loads((repository / "prereg/protocol_r2.json").read_text())
    assert seen["seed"] == frozen["seed"]
    assert found.rows and found.refused == "ncu is not on PATH"


def test_the_profiled_call_is_the_one_that_the_campaign_chose(monkeypatch) -> None:
    def arm(kernel, packed, x, x64, stream, protocol):
        assert (kernel, packed, x, x64) == ("qgemv_mx", "packed", "x", None)
        return SimpleNamespace(tuning={"chosen": "a plan"}, launch=print)

    monkeypatch.setattr(product_arms, "use_cubins", lambda folder: None)
    monkeypatch.setattr(product_arms, "make_arm", arm)
    monkeypatch.setattr(product_arms.Packed, "of", lambda weights, stream: "packed")
    modules = SimpleNamespace(folder="cubins")
    operands = SimpleNamespace(
        bench=SimpleNamespace(modules=modules, stream=None, protocol={}), weights=None, layouts={},
        x=lambda m: ("x", "x8"),
    )  # fmt: skip
    case = Case("qgemv_mx", "mxfp4", "q_o_proj", 4096, 4096, 1, "a plan")
    assert counters_r2.launcher(operands, case) is print
    with pytest.raises(LookupError, match="does not offer 'another'"):
        counters_r2.launcher(operands, Case(*(*vars(case).values(),)[:-1], "another"))
