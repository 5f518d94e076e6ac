"""Counters of R1: what is profiled, how ncu's table is read, what is refused, and the time that counters predict."""

from __future__ import annotations

import csv
import io
import json
import stat
import sys
from collections import Counter
from types import SimpleNamespace

import pandas as pd
import pytest

from lab import counters, counters_r1, sass_counts, schema, testbed
from lab.counters_r1 import COLD, COLD_SET, COUNTS_SET, ESSENTIAL, HOT, Case, Metric, parse
from lab.decomposition import FACTORS, Cell
from lab.rows import CellRow, Tuning
from qgemm_mx.formats import weight_bytes

SHAPES = {"q_o_proj": (4096, 4096), "gate_up": (14336, 4096), "kv_gqa": (1024, 4096)}
TOOL = "ncu 1"


def case(kernel="testbed/full", shape="q_o_proj", m=1, fmt="mxfp4") -> Case:
    return Case(kernel, fmt, shape, *SHAPES[shape], m, "chosen")


def printed(metrics, groups, passes=1, units=None) -> str:
    """What ncu prints: lines of its own, then CSV with a row of units. groups: kernels of a case, as {metric: text}."""
    out = io.StringIO()
    out.write("==PROF== Connected to process 7 (python)\n")
    names = [name for group in groups for name in ["product"] * len(group) + [counters.MARKER]]
    for index, name in enumerate(names):
        took = 9 if name == counters.MARKER else passes
        words = "pass" if took == 1 else "passes"
        out.write(f'==PROF== Profiling "{name}" - {index}: 0%....50%....100% - {took} {words}\n')
    out.write("==PROF== Disconnected from process 7\n")
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerow(["ID", "Kernel Name", "Block Size", *metrics])
    writer.writerow(["", "", "", *((units or {}).get(m, "") for m in metrics)])
    for group in groups:
        for kernel in group:
            row = [kernel.get(m, "1") for m in metrics]
            writer.writerow(["0", "void product<8>(const char *)", "(256, 1, 1)", *row])
        writer.writerow(["0", f"{counters.MARKER}()", "(32, 1, 1)", *["0" for _ in metrics]])
    return out.getvalue()


def read(wanted, groups, cases, metrics=None, passes=1, units=None, reasons=None, text=None):
    names = [m.name for m in wanted.metrics] if metrics is None else metrics
    text = text or printed(names, groups, passes, units)
    reasons = [None] * len(cases) if reasons is None else reasons
    return parse(text, wanted.name, wanted.metrics, wanted.calls, cases, reasons, TOOL)


def value(rows, metric, **where):
    found = [r for r in rows if r["metric"] == metric and all(r[k] == v for k, v in where.items())]
    assert len(found) == 1, (metric, where, len(found))
    return found[0]["value"]


# ---- reading -----------------------------------------------------------------------------------------------------


def test_a_cold_call_is_the_mean_of_its_calls() -> None:
    n, k = SHAPES["q_o_proj"]
    size = weight_bytes("mxfp4", n, k)
    calls = [
        {"dram__bytes_read.sum": f"{size:,}", "gpu__time_duration.sum": f"{ns:,}"}
        for ns in (4000, 6000)
    ]
    units = {"dram__bytes_read.sum": "byte", "gpu__time_duration.sum": "ns"}
    part = read(COLD_SET, [calls, calls], [case(), case(m=16)], units=units)
    assert part.refusals == [] and part.passes == 1
    assert value(part.rows, "gpu__time_duration.sum", M=1) == 5000
    assert value(part.rows, "dram__bytes_read.sum", M=16) == size
    assert value(part.rows, counters_r1.RATIO) == 1.0  # at M=1 alone
    assert {r["regime"] for r in part.rows} == {COLD}
    assert all(r["tool"].startswith(TOOL) for r in part.rows)
    schema.check_counters(part.rows)


def test_a_metric_without_a_column_is_refused_and_the_others_stay() -> None:
    names = [m.name for m in COLD_SET.metrics if m.name != "dram__bytes_read.sum"]
    part = read(COLD_SET, [[{}, {}]], [case()], metrics=names)
    assert part.refusals == ["cold set: ncu did not report dram__bytes_read.sum"]
    recorded = {r["metric"] for r in part.rows}
    assert recorded == {*names, counters_r1.KERNELS}


@pytest.mark.parametrize("text", ["n/a", "", "nan", "(!) n/a"])
def test_a_value_that_is_no_number_is_refused_never_zero(text) -> None:
    broken = {"smsp__inst_executed.sum": text}
    part = read(COLD_SET, [[{}, {}], [broken, {}]], [case(), case(m=16)])
    assert part.refusals == ["cold set: smsp__inst_executed.sum has no value in 1 of 2 cases"]
    assert value(part.rows, "smsp__inst_executed.sum") == 1.0  # of M=1; M=16 has none
    assert value(part.rows, "smsp__warps_launched.sum", M=16) == 1.0


def test_a_refused_permission_is_told_in_the_profilers_words() -> None:
    text = (
        "==PROF== Connected to process 7 (python)\n"
        "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters\n"
        "==PROF== Disconnected from process 7\n"
    )
    part = read(COLD_SET, [], [case()], text=text)
    assert part.rows == [] and len(part.refusals) == 1
    assert "ERR_NVGPUCTRPERM - The user does not have permission" in part.refusals[0]
    assert "Connected" not in part.refusals[0]


def test_a_call_of_two_kernels_adds_weights_or_takes_the_longest() -> None:
    quantiser = {
        "gpu__time_duration.sum": "1000",
        "smsp__inst_executed.sum": "10",
        "launch__grid_size": "7",
    }
    product = {
        "gpu__time_duration.sum": "3000",
        "smsp__inst_executed.sum": "90",
        "launch__grid_size": "132",
    }
    latency, stall = "smsp__average_warp_latency_per_inst_issued.ratio", "launch__grid_size"
    quantiser[latency], product[latency] = "8", "16"
    part = read(COLD_SET, [[quantiser, product] * 2], [case("peer/humming_fp8_quantised")])
    assert part.refusals == []
    assert value(part.rows, "smsp__inst_executed.sum") == 100
    assert value(part.rows, latency) == pytest.approx((8 * 1000 + 16 * 3000) / 4000)
    assert value(part.rows, stall) == 132
    assert value(part.rows, counters_r1.KERNELS) == 2
    said = {r["metric"]: r["tool"] for r in part.rows}
    assert "sum of 2 kernels a call" in said["smsp__inst_executed.sum"]
    assert "weighted by duration" in said[latency] and "longest of 2" in said["launch__grid_size"]
    with pytest.raises(ValueError, match="call of 2 kernels"):
        counters_r1.predicted_us(part.rows, 1980, 2.0)


def test_kernels_of_two_calls_that_do_not_divide_are_refused() -> None:
    part = read(COLD_SET, [[{}, {}, {}]], [case()])
    assert part.rows == []
    assert part.refusals == ["cold set: testbed/full mxfp4 q_o_proj M=1: 3 kernels in 2 calls"]


def test_what_several_passes_gave_is_cold_only_where_the_cache_changes_nothing() -> None:
    part = read(COUNTS_SET, [[{}]], [case()], passes=11)
    regimes = {r["metric"]: r["regime"] for r in part.rows}
    assert part.passes == 11 and part.refusals == []
    assert (
        regimes["smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"] == HOT
    )
    assert regimes["lts__t_sector_hit_rate.pct"] == HOT
    assert regimes["sm__inst_executed_pipe_alu.sum"] == COLD
    assert regimes["l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"] == COLD
    assert all("11 passes" in r["tool"] for r in part.rows)
    assert all(("replayed" in r["tool"]) == (r["regime"] == HOT) for r in part.rows)
    schema.check_counters(part.rows)


def test_a_number_of_passes_that_is_not_known_is_not_taken_for_one() -> None:
    text = "\n".join(
        line
        for line in printed([m.name for m in COLD_SET.metrics], [[{}, {}]]).splitlines()
        if "Profiling" not in line
    )
    part = read(COLD_SET, [], [case()], text=text)
    assert part.refusals == ["cold set: ncu did not say how many passes it took"]
    assert {r["regime"] for r in part.rows if r["metric"] == "dram__bytes_read.sum"} == {HOT}
    assert counters_r1.RATIO not in {r["metric"] for r in part.rows}


def test_a_case_that_was_not_run_shifts_no_other() -> None:
    one, three = {"smsp__inst_executed.sum": "11"}, {"smsp__inst_executed.sum": "33"}
    cases = [case(), case("peer/x"), case(m=64)]
    reasons = [None, "LookupError: gone", None]
    part = read(COLD_SET, [[one, one], [], [three, three]], cases, reasons=reasons)
    assert part.refusals == ["cold set: peer/x mxfp4 q_o_proj M=1: LookupError: gone"]
    assert value(part.rows, "smsp__inst_executed.sum", M=1) == 11
    assert value(part.rows, "smsp__inst_executed.sum", M=64) == 33


def test_a_program_that_ends_early_keeps_what_was_whole() -> None:
    groups = [[{}, {}], [{}]]
    text = printed([m.name for m in COLD_SET.metrics], groups)
    text = text[: text.rindex('"0","empty()"')]  # killed before the second marker
    part = read(COLD_SET, [], [case(), case(m=16), case(m=64)], text=text, reasons=[None])
    assert {r["M"] for r in part.rows} == {1}
    assert [r.split(": ", 1)[1] for r in part.refusals] == [
        "testbed/full mxfp4 q_o_proj M=16: the program ended before it",
        "testbed/full mxfp4 q_o_proj M=64: the program ended before it",
    ]


@pytest.mark.parametrize(
    ("text", "unit", "found"),
    [
        ("1,234.5", "Kbyte", 1234500.0),
        ("2.5", "us", 2500.0),
        ("3", "Kinst", 3000.0),
        ("4.25", "cycle", 4.25),
        ("97.5", "%", 97.5),
        ("8", "", 8.0),
        ("40", "register/thread", 40.0),
    ],
)
def test_units(text, unit, found) -> None:
    metric = Metric("a__b.sum", "x")
    part = parse(
        printed([metric.name], [[{metric.name: text}]], units={metric.name: unit}),
        "counts", [metric], 1, [case()], [None], TOOL,
    )  # fmt: skip
    assert [r["value"] for r in part.rows] == [found]


def test_names_are_read_from_the_listing() -> None:
    text = (
        "Device NVIDIA H200 (GH100)\n"
        "-----------------------------  ---------  -----  ------------\n"
        "Metric Name                    Metric Type  Metric Unit  Metric Description\n"
        "dram__bytes_read               Counter    byte   # of bytes read from DRAM\n"
        "smsp__average_warp_latency_per_inst_issued Ratio cycle  average # of cycles each warp was resident\n"
        "                               dram__bytes_write and others\n"
    )
    assert counters_r1.listed(text) == {
        "dram__bytes_read",
        "smsp__average_warp_latency_per_inst_issued",
    }


# ---- cases -------------------------------------------------------------------------------------------------------


def cell(
    kernel,
    shape="q_o_proj",
    m=1,
    fmt="mxfp4",
    regime="cold_graph",
    correctness="passed",
    chosen="c",
):
    n, k = SHAPES[shape]
    families = {"testbed": "testbed", "peer": "peer", "stream_read": "floor"}
    return CellRow(
        kernel=kernel, role=families.get(kernel.split("/")[0], "baseline"), format=fmt, shape=shape, N=n, K=k, M=m,
        regime=regime, weight_bytes=weight_bytes(fmt, n, k), correctness=correctness, tuning=Tuning(1, chosen),
    )  # fmt: skip


def test_cases_are_the_measured_cells_ours_first() -> None:
    cells = [
        cell("peer/humming_bf16", fmt="nvfp4"),
        cell("peer/humming_bf16", shape="kv_gqa"),  # rivals are profiled at two shapes
        cell("peer/humming_fp8", correctness="failed"),
        cell("cublaslt_fp8", fmt="fp8_e4m3", m=64),
        cell("cublaslt_bf16", fmt="bf16"),
        cell("testbed/none", correctness="invalid_by_design"),
        cell("testbed/-epilogue_reduction", correctness="invalid_by_design"),
        cell("testbed/full", m=16, chosen="entry, grid 3"),
        cell("testbed/full"),
        cell("testbed/full", regime="hot_graph"),
        cell("testbed/full", shape="kv_gqa"),
        cell("testbed/full", fmt="nvfp4"),
        cell("stream_read", shape="kv_gqa", m=64),
        cell("stream_read", m=2),
    ]
    cold, deep = counters_r1.cases(cells, list(SHAPES))
    assert [(c.kernel, c.format, c.shape, c.M) for c in cold] == [
        ("stream_read", "mxfp4", "kv_gqa", 64),
        ("testbed/full", "mxfp4", "kv_gqa", 1),
        ("testbed/full", "mxfp4", "q_o_proj", 1),
        ("testbed/full", "mxfp4", "q_o_proj", 16),
        ("testbed/none", "mxfp4", "q_o_proj", 1),
        ("cublaslt_fp8", "fp8_e4m3", "q_o_proj", 64),
        ("peer/humming_bf16", "nvfp4", "q_o_proj", 1),
    ]
    assert cold[3].chosen == "entry, grid 3"
    assert set(deep) < set(cold)
    assert {c.kernel for c in deep} == {
        "testbed/full", "testbed/none", "cublaslt_fp8", "peer/humming_bf16",
    }  # fmt: skip
    assert all(c.M in (1, 64) and c.shape == "q_o_proj" for c in deep)


def test_a_configuration_that_is_gone_is_named() -> None:
    with pytest.raises(LookupError, match="testbed/full mxfp4 q_o_proj M=1.*'chosen'"):
        counters_r1.pick(case(), ["other"], str)


# ---- instruction counts ------------------------------------------------------------------------------------------

ENTRY = testbed.Config().entry
DIRECT = testbed.Config(factors=frozenset(FACTORS) - {"layout_staging"}).entry


@pytest.fixture
def counted(monkeypatch):
    """Every entry of every cubin has one instruction and a loop of 64; returns the cubins that were read."""
    read: list[str] = []

    def count_cubin(cubin):
        read.append(cubin.name)
        loop = sass_counts.LoopCounts(0, 16, Counter(LOP3=90), Counter(LOP3=64))
        return {
            c.entry: sass_counts.EntryCounts(c.entry, Counter(HMMA=3), loop)
            for c in testbed.all_configs()
        }

    monkeypatch.setattr(sass_counts, "count_cubin", count_cubin)
    return read


def test_instructions_are_counted_once_an_entry_and_m(tmp_path, counted) -> None:
    cells = [
        cell("testbed/full", chosen=f"{ENTRY}, grid 264x1 x 256"),
        cell("testbed/full", shape="kv_gqa", chosen=f"{ENTRY}, grid 33x1 x 256"),
        cell("testbed/full", regime="hot_graph", chosen=f"{ENTRY}, grid 264x1 x 256"),
        cell("testbed/-layout_staging", chosen=f"{DIRECT}, grid 264x1 x 256"),
        cell("testbed/-layout_staging-dequant_issue", correctness="invalid_by_design"),
        cell("stream_read"),
    ]
    found = counters_r1.sass_rows(tmp_path, cells)
    assert found.refused is None and counted == ["testbed_t8.cubin"]
    schema.check_counters(found.rows)
    per_64 = "loop_instructions_per_64_weights"
    # 16 rows x 128 k are 32 times 64 weights; without staging the loop holds the four stages.
    assert value(found.rows, per_64, kernel="testbed/full") == 2.0
    assert value(found.rows, per_64, kernel="testbed/-layout_staging") == 0.5
    assert {r["shape"] for r in found.rows} == {"q_o_proj"}
    assert {r["kernel"] for r in found.rows} == {"testbed/full", "testbed/-layout_staging"}


def test_an_entry_that_is_not_known_or_not_built_is_named(tmp_path, counted, monkeypatch) -> None:
    cells = [cell("testbed/full", chosen="other, grid 1"), cell("testbed/none", chosen=ENTRY)]
    monkeypatch.setattr(sass_counts, "count_cubin", lambda cubin: {})
    found = counters_r1.sass_rows(tmp_path, cells)
    assert found.rows == []
    assert found.refused == (
        "instruction counts of testbed/full: 'other' is no entry of the testbed; "
        f"instruction counts of testbed/none: KeyError: '{ENTRY}'"
    )


# ---- running -----------------------------------------------------------------------------------------------------

FAKE = '''#!{python}
"""Stands for ncu: lists metrics, and prints a table for the plan as the real one does."""
import csv, json, sys
from pathlib import Path
log, absent, passes_of_all = Path({log!r}), {absent!r}, {passes}
arguments = sys.argv[1:]
if "--version" in arguments:
    print("NVIDIA (R) Nsight Compute\\nVersion 2025.3.1.0")
elif "--query-metrics" in arguments:
    launch = "launch" in arguments
    for name in {known!r}:
        if name.startswith("launch__") == launch and name not in absent:
            print(name + "   Counter   inst   words")
elif "--csv" not in arguments:  # beside a table ncu prints no progress
    metrics = arguments[arguments.index("--metrics") + 1].split(",")
    passes = passes_of_all if "sm__cycles_active.max" in metrics else 1
    print('==PROF== Profiling "k" - 0: 0%....50%....100% -', passes, "pass" if passes == 1 else "passes")
else:
    with log.open("a") as file:
        file.write(json.dumps(arguments) + "\\n")
    plan, outcomes = (Path(a) for a in arguments[-2:])
    plan = json.loads(plan.read_text())
    outcomes.write_text(json.dumps([None] * len(plan["cases"])))
    metrics = arguments[arguments.index("--metrics") + 1].split(",")
    table = csv.writer(sys.stdout, quoting=csv.QUOTE_ALL)
    table.writerow(["ID", "Kernel Name", *metrics])
    table.writerow(["", "", *["" for _ in metrics]])
    for case in plan["cases"]:
        for _ in range(plan["calls"]):
            table.writerow(["0", "k(int)", *[str(case["M"])] * len(metrics)])
        table.writerow(["0", "empty()", *["0"] * len(metrics)])
    sys.exit({status})
'''


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch, counted):
    """A program called ncu on PATH; returns a function that installs it and the file with the commands it got."""

    def install(absent=(), passes=1, status=0):
        log = tmp_path / "commands"
        known = {m.base for s in (COLD_SET, COUNTS_SET) for m in s.metrics}
        program = tmp_path / "ncu"
        program.write_text(
            FAKE.format(
                python=sys.executable,
                log=str(log),
                absent=tuple(absent),
                passes=passes,
                known=sorted(known),
                status=status,
            )  # fmt: skip
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path))
        return log

    return install


CELLS = [
    cell("testbed/full", chosen=ENTRY),
    cell("testbed/full", m=16, chosen=testbed.Config(tokens=16).entry),
    cell("stream_read"),
]


def taken(repository, tmp_path):
    words: list[str] = []
    found = counters_r1.take(repository, tmp_path, CELLS, words.append, protocol={"seed": 1})
    return found, words


def commands(log) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_two_runs_leave_the_device_as_it_is(repository, tmp_path, fake_ncu) -> None:
    log = fake_ncu()
    found, words = taken(repository, tmp_path)
    assert found.refused is None
    assert words == [
        "profiler pass cold: 3 cases, 6 calls",
        "profiler pass counts: 1 cases, 1 calls",
    ]
    ran = commands(log)
    assert len(ran) == 2
    for arguments in ran:
        for option in ("--clock-control", "--cache-control"):
            assert arguments[arguments.index(option) + 1] == "none"
        assert arguments[arguments.index("--profile-from-start") + 1] == "off"
    assert value(found.rows, "smsp__inst_executed.sum", M=16) == 16
    assert value(found.rows, "sm__inst_executed_pipe_alu.sum") == 1
    assert "Version 2025.3.1.0" in found.rows[-1]["tool"]
    assert value(found.rows, "sass_HMMA", M=1) == 3
    schema.check_counters(found.rows)


def test_a_metric_that_the_profiler_lacks_is_refused_before_the_run(
    repository, tmp_path, fake_ncu
) -> None:
    lacking = "sm__inst_executed_pipe_tensor_op_gmma"
    log = fake_ncu(absent=[lacking])
    found, _ = taken(repository, tmp_path)
    assert found.refused == f"ncu has no metric {lacking}.sum"
    assert not any(lacking in " ".join(arguments) for arguments in commands(log))
    assert value(found.rows, "sm__inst_executed_pipe_tensor_op_hmma.sum") == 1


def test_a_cold_set_of_two_passes_is_taken_again_with_less(repository, tmp_path, fake_ncu) -> None:
    log = fake_ncu(passes=2)
    found, words = taken(repository, tmp_path)
    assert "cold set took 2 passes" in words[1]
    asked = [arguments[arguments.index("--metrics") + 1] for arguments in commands(log)]
    assert asked[1] == ",".join(m.name for m in ESSENTIAL.metrics)
    assert {r["regime"] for r in found.rows if r["metric"] == "dram__bytes_read.sum"} == {COLD}


def test_an_exit_that_is_not_zero_is_told_and_the_table_kept(
    repository, tmp_path, fake_ncu
) -> None:
    fake_ncu(status=9)
    found, _ = taken(repository, tmp_path)
    assert "cold set: ncu: exit 9" in found.refused and "counts set: ncu: exit 9" in found.refused
    assert value(found.rows, "smsp__inst_executed.sum", M=16) == 16


def test_no_profiler_no_metrics_no_cells(repository, tmp_path, monkeypatch, fake_ncu) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found, _ = taken(repository, tmp_path)
    assert found.refused == "ncu is not on PATH"
    assert value(found.rows, "sass_HMMA", M=16) == 3  # needs no profiler
    fake_ncu(absent=[m.base for s in (COLD_SET, COUNTS_SET) for m in s.metrics])
    assert "ncu lists no metric" in taken(repository, tmp_path)[0].refused
    assert "no cell" in counters_r1.take(repository, tmp_path, [], print, protocol={}).refused


# ---- a time from counters ----------------------------------------------------------------------------------------


def counter(metric, number, regime=COLD, m=1, kernel="testbed/full"):
    return {
        **case(kernel, m=m).place, "regime": regime, "metric": metric, "unit": "x", "value": number, "tool": TOOL,
    }  # fmt: skip


def life(waves=1.0, grid=264, **more):
    """264 blocks of 8 warps, 1000 instructions a warp, 10 cycles an instruction."""
    values = {
        "smsp__inst_executed.sum": grid * 8 * 1000.0,
        "smsp__warps_launched.sum": grid * 8.0,
        "smsp__average_warp_latency_per_inst_issued.ratio": 10.0,
        "launch__waves_per_multiprocessor": waves,
        "launch__grid_size": float(grid),
        counters_r1.KERNELS: 1.0,
    }
    return [counter(name, number) for name, number in (values | more).items()]


@pytest.mark.parametrize(("waves", "lives"), [(0.4, 1.0), (1.0, 1.0), (1.25, 1.25), (3.0, 3.0)])
def test_a_call_takes_its_launch_and_a_life_of_a_warp_a_wave(waves, lives) -> None:
    # 1000 instructions x 10 cycles at 2000 MHz are 5 us.
    assert counters_r1.predicted_us(life(waves), 2000, 2.0) == pytest.approx(2.0 + 5.0 * lives)


def test_resident_blocks_replace_the_profilers_waves() -> None:
    assert counters_r1.predicted_us(life(7.0), 2000, 0.0, 132) == pytest.approx(10.0)


def test_hot_counters_and_other_metrics_do_not_enter() -> None:
    latency = "smsp__average_warp_latency_per_inst_issued.ratio"
    rows = [*life(), counter(latency, 1.0, regime=HOT), counter("lts__t_sector_hit_rate.pct", 3.0)]
    assert counters_r1.predicted_us(rows, 2000, 0.0) == pytest.approx(5.0)


def test_what_cannot_be_predicted_is_refused() -> None:
    for name in (
        "smsp__inst_executed.sum", "smsp__warps_launched.sum", "smsp__average_warp_latency_per_inst_issued.ratio",
        "launch__waves_per_multiprocessor",
    ):  # fmt: skip
        rows = [row for row in life() if row["metric"] != name]
        with pytest.raises(ValueError, match=f"no {name} in the regime cold_loop"):
            counters_r1.predicted_us(rows, 2000, 0.0)
    with pytest.raises(ValueError, match="given twice"):
        counters_r1.predicted_us(life() + life(), 2000, 0.0)
    with pytest.raises(ValueError, match="not above 0"):
        counters_r1.predicted_us(life(**{"smsp__warps_launched.sum": 0.0}), 2000, 0.0)
    with pytest.raises(ValueError, match="sm_clock_mhz=0"):
        counters_r1.predicted_us(life(), 0, 0.0)


def campaign(rows, launch_us=(2.0, 2.2, 2.1)):
    legs = [
        {"kernel": kernel, "format": "mxfp4", "shape": "q_o_proj", "N": 4096, "K": 4096, "M": m, "regime": "cold_graph",
         "time_us": us, "dropped": dropped, "start_ns": 100 * i, "end_ns": 100 * i + 50}
        for i, (kernel, m, us, dropped) in enumerate(
            [("probe/launch_testbed", 1, us, False) for us in launch_us]
            + [("probe/launch_testbed", 1, 99.0, True), ("probe/launch_testbed", 16, 50.0, False),
               ("testbed/full", 1, 30.0, False)]
        )
    ]  # fmt: skip
    telemetry = pd.DataFrame(
        {"t_ns": [10, 210, 320, 520], "sm_clock_mhz": [1980.0, 2000.0, 2000.0, 2000.0]}
    )
    columns = [
        "kernel",
        "format",
        "shape",
        "N",
        "K",
        "M",
        "regime",
        "time_us",
        "dropped",
        "start_ns",
        "end_ns",
    ]
    samples = pd.DataFrame(legs, columns=columns)
    return SimpleNamespace(counters=tuple(rows), samples=samples, telemetry=telemetry)


AT = Cell("mxfp4", "q_o_proj", 4096, 4096, 1, "cold_graph")


def test_the_prediction_of_a_campaign_takes_its_own_launch_and_clock() -> None:
    name = "smsp__warps_launched.sum"
    rows = [*life(), counter(name, 5.0, kernel="testbed/none")]
    for other in ({"format": "nvfp4"}, {"shape": "kv_gqa"}, {"M": 16}):
        rows.append(counter(name, 5.0) | other)
    found = counters_r1.prediction(campaign(rows), AT)
    assert found.value == pytest.approx(2.1 + 5.0)  # the dropped leg and M=16 stay out
    assert found.se == 0


def test_without_a_part_there_is_no_prediction() -> None:
    assert counters_r1.prediction(campaign([]), AT) is None
    assert counters_r1.prediction(campaign(life(), launch_us=()), AT) is None
    assert counters_r1.prediction(campaign(life()[1:]), AT) is None
    assert counters_r1.prediction(campaign(life()), AT._replace(M=16)) is None


@pytest.mark.parametrize(("fraction", "cold"), [(1.0, True), (0.98, True), (0.9, False)])
def test_dram_bytes_prove_that_a_profile_of_unknown_passes_was_cold(fraction, cold) -> None:
    rows = [
        {"metric": "dram__bytes_read.sum", "regime": "hot_graph", "value": fraction * 1e6},
        {"metric": "a", "regime": "hot_graph", "value": 1.0},
        {"metric": "b", "regime": "hot_graph", "value": 2.0},
        {"metric": "b", "regime": "cold_loop", "value": 3.0},
    ]
    found = counters_r1.proven_cold(rows, 1_000_000)
    # Of several readings the lowest decides: each replay must have found nothing in L2.
    warm = [*rows, {"metric": "dram__bytes_read.sum", "regime": "cold_loop", "value": 0.5e6}]
    assert counters_r1.proven_cold(warm, 1_000_000) == warm
    if not cold:
        assert found == rows
        return
    assert {(r["metric"], r["value"]) for r in found if r["regime"] == "cold_loop"} == {
        ("dram__bytes_read.sum", fraction * 1e6),
        ("a", 1.0),
        ("b", 3.0),
    }
