"""Profiler counters of R1, in passes of their own (METHOD 4): where the warps of the testbed and of the peers wait.

`take` runs this module under ncu twice. A kernel whose metrics need several passes is replayed, and every replay but
the first finds its weights in L2 as far as they fit: so what must be cold is a set of few metrics that one pass
collects, and the rest is a set of its own. ncu says how many passes it took, and a value that depends on the cache and
comes from several passes is recorded under the regime `hot_graph`, never as cold.

`take` also counts the instructions of the testbed's entries (lab.sass_counts). From the cold set, `predicted_us` says
how long a call should take without having seen a timed one: the second closure.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from lab import counters
from lab.counters import Found
from lab.decomposition import (
    FACTORS,
    FLOOR,
    FULL,
    NONE,
    Cell,
    measured,
    present_factors,
    variant_name,
)
from lab.plan import BASELINES
from lab.rows import INVALID_BY_DESIGN, CellRow
from lab.statistics import Estimate
from qgemm_mx.formats import weight_bytes

RUNG = "R1"
FORMAT = "mxfp4"
COLD, HOT = "cold_loop", "hot_graph"
CHOSEN_IN = "cold_graph"  # regime of the cells whose configurations are profiled
#: Shapes and M at which variants, baselines and peers are profiled; testbed/full and the stream at all M of COLD_M.
VARIANTS = (
    FULL,
    NONE,
    "testbed/-layout_staging",
    "testbed/-dequant_issue",
    "testbed/-matrix_issue",
)
#: Kernels whose instructions are counted: each factor removed alone, all, none, and every way to dequantise.
ENTRIES = (FULL, NONE, *(variant_name(set(FACTORS) - {name}) for name in FACTORS))
ENTRY_FAMILY = "cause/sequence/"
VARIANT_SHAPES = ("q_o_proj", "gate_up", "llama70b_down")
RIVAL_SHAPES = ("q_o_proj", "gate_up")
RIVAL, RIVAL_FORMAT, PEER = "cublaslt_fp8", "fp8_e4m3", "peer/"
COLD_M, BOTH_M = (1, 16, 64), (1, 64)
TIMEOUT_S = 60
KERNELS, RATIO = "kernels_per_call", "dram_bytes_over_weight_bytes"
#: Part of the weight's bytes that a cold call reads from DRAM at least.
COLD_FRACTION = 0.97
LAUNCH = "probe/launch_testbed"  # an empty kernel in the testbed's grid, block and shared memory


@dataclass(frozen=True)
class Metric:
    """A metric, the unit that it is recorded in, how kernels of a call are put together, and whether L2 changes it.

    merge: `sum` adds; `time` is the mean weighted by duration; `longest` is the value of the longest kernel.
    """

    name: str
    unit: str
    merge: str = "sum"
    cache: bool = True

    @property
    def base(self) -> str:
        """Name without the roll-up, as `ncu --query-metrics` lists it."""
        return self.name.split(".")[0]


@dataclass(frozen=True)
class MetricSet:
    """What one run of the profiler collects, and how many calls of a case it profiles."""

    name: str
    metrics: tuple[Metric, ...]
    calls: int


_DURATION = Metric("gpu__time_duration.sum", "ns")
_DRAM = Metric("dram__bytes_read.sum", "bytes")
_INSTRUCTIONS = Metric("smsp__inst_executed.sum", "instructions", cache=False)
_WARPS = Metric("smsp__warps_launched.sum", "warps", cache=False)
_LATENCY = Metric("smsp__average_warp_latency_per_inst_issued.ratio", "cycles", "time")
_WAVES = Metric("launch__waves_per_multiprocessor", "waves", "longest", cache=False)
_GRID = Metric("launch__grid_size", "blocks", "longest", cache=False)
#: Known at the launch: these cost no pass.
_LAUNCH = (
    _WAVES,
    _GRID,
    Metric("launch__block_size", "threads", "longest", cache=False),
    Metric("launch__registers_per_thread", "registers", "longest", cache=False),
    *(
        Metric(f"launch__occupancy_limit_{what}", "blocks", "longest", cache=False)
        for what in ("blocks", "registers", "shared_mem", "warps")
    ),
)
#: What the prediction needs: taken alone where ncu does not fit all of the cold set into one pass.
ESSENTIAL = MetricSet("cold", (_DRAM, _DURATION, _INSTRUCTIONS, _WARPS, _LATENCY, *_LAUNCH), 2)
COLD_SET = MetricSet(
    "cold",
    (
        *ESSENTIAL.metrics,
        Metric("sm__cycles_active.max", "cycles"),
        Metric("sm__cycles_elapsed.max", "cycles"),
        Metric("sm__warps_active.avg.pct_of_peak_sustained_active", "%", "time"),
    ),
    2,
)
STALLS = (
    "long_scoreboard", "short_scoreboard", "barrier", "mio_throttle", "math_pipe_throttle", "wait", "not_selected",
    "lg_throttle",
)  # fmt: skip
COUNTS_SET = MetricSet(
    "counts",
    (
        _DURATION,
        Metric("smsp__issue_active.avg.pct_of_peak_sustained_active", "%", "time"),
        Metric("smsp__warps_eligible.avg.per_cycle_active", "warps", "time"),
        *(
            Metric(f"sm__inst_executed_pipe_{pipe}.sum", "instructions", cache=False)
            for pipe in ("alu", "fma", "xu", "lsu", "tensor_op_hmma", "tensor_op_gmma")
        ),
        Metric("sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active", "%", "time"),
        Metric("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "%", "time"),
        *(
            Metric(f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{op}.sum", "conflicts", cache=False)
            for op in ("ld", "st")
        ),
        *(
            Metric(f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio", "cycles", "time")
            for why in STALLS
        ),
        *(
            Metric(f"smsp__sass_inst_executed_op_local_{op}.sum", "instructions", cache=False)
            for op in ("ld", "st")
        ),
        Metric("lts__t_sector_hit_rate.pct", "%", "time"),
    ),
    1,
)  # fmt: skip


# ---- cases -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One call to profile: a cell, and the configuration that its tuning chose."""

    kernel: str
    format: str
    shape: str
    N: int
    K: int
    M: int
    chosen: str

    @property
    def place(self) -> dict[str, Any]:
        """The columns of a counter row that say where."""
        return {name: getattr(self, name) for name in ("kernel", "format", "shape", "N", "K", "M")}

    def __str__(self) -> str:
        return f"{self.kernel} {self.format} {self.shape} M={self.M}"


def cases(cells: Iterable[CellRow], shapes: Sequence[str]) -> tuple[list[Case], list[Case]]:
    """The cases of the cold set and those of the counts set, from the cells of a campaign that may be timed at all.

    `shapes`: names of prereg/shapes.json. A kernel that was not measured, or is wrong without being meant to, has no
    case. Our own kernels come first, so that a rival that ends the program takes none of ours with it.
    """
    usable = headline_cases(cells)

    def deep(case: Case) -> bool:
        if case.kernel in VARIANTS:
            return case.format == FORMAT and case.shape in VARIANT_SHAPES and case.M in BOTH_M
        rival = case.kernel == RIVAL or case.kernel.startswith(PEER)
        return rival and case.shape in RIVAL_SHAPES and case.M in BOTH_M

    def wide(case: Case) -> bool:
        ours = case.kernel in (FLOOR, FULL) and case.format == FORMAT
        return ours and case.shape in shapes and case.M in COLD_M

    def order(case: Case) -> tuple:
        ours = case.kernel in (FLOOR, *VARIANTS)
        return (not ours, case.shape, case.format, case.kernel, case.M)

    cold = sorted({c for c in usable if deep(c) or wide(c)}, key=order)
    return cold, sorted({c for c in usable if deep(c)}, key=order)


def headline_cases(cells: Iterable[CellRow]) -> list[Case]:
    """The cells of the headline that have a configuration and are not wrong without being meant to."""
    return [
        Case(c.kernel, c.format, c.shape, c.N, c.K, c.M, c.tuning.chosen)
        for c in cells
        if c.regime == CHOSEN_IN and c.tuning and c.correctness in ("passed", INVALID_BY_DESIGN)
    ]


# ---- running ncu -------------------------------------------------------------------------------------------------


def take(
    repo: Path,
    cubin_dir: Path,
    cells: Iterable[CellRow],
    log: Callable[[str], None],
    protocol: Mapping[str, Any] | None = None,
) -> Found:
    """Instruction counts, then both runs of the profiler. `refused` names, in one line, all that gave nothing.

    cells: of the campaign so far, because their configurations are profiled. protocol: the campaign's; None reads R1's.
    Rows may be there beside a refusal: what was collected is kept.
    """
    cells = list(cells)
    counted, profiled = (
        sass_rows(cubin_dir, cells),
        _profiled(repo, cubin_dir, cells, log, protocol),
    )
    refused = "; ".join(f.refused for f in (counted, profiled) if f.refused)
    return Found(counted.rows + profiled.rows, refused or None)


def sass_rows(cubin_dir: Path, cells: Iterable[CellRow]) -> Found:
    """Instruction counts of the entries of ENTRIES that the cells ran, each under one cell of its kernel and M.

    Code does not depend on N and K: an entry that several shapes ran is listed under the first. Which entry it was, the
    first word of the chosen configuration says.
    """
    from lab import sass_counts, testbed
    from lab.sass import SassError
    from qgemm_mx.build import BuildError

    configs = {config.entry: config for config in testbed.all_configs()}
    wanted: dict[tuple[str, str, int], Case] = {}
    for c in sorted(headline_cases(cells), key=lambda c: (c.shape not in VARIANT_SHAPES, c.shape)):
        if (c.kernel in ENTRIES or c.kernel.startswith(ENTRY_FAMILY)) and c.M in COLD_M:
            wanted.setdefault((c.kernel, c.format, c.M), c)
    rows, refusals, counts = [], [], {}
    for c in wanted.values():
        entry = c.chosen.split(",")[0]
        config = configs.get(entry)
        if config is None:
            refusals.append(
                f"instruction counts of {c.kernel}: {entry!r} is no entry of the testbed"
            )
            continue
        try:
            if config.source not in counts:
                counts[config.source] = sass_counts.count_cubin(
                    cubin_dir / f"{config.source}.cubin"
                )
            found = counts[config.source][entry]
            place = {"shape": c.shape, "N": c.N, "K": c.K, "M": c.M}
            weights = weights_per_iteration(config)
            rows += sass_counts.counter_rows(found, c.kernel, c.format, place, weights)
        except (SassError, BuildError, KeyError) as error:
            refusals.append(f"instruction counts of {c.kernel}: {type(error).__name__}: {error}")
    return Found(rows, "; ".join(refusals) or None)


def weights_per_iteration(config: Any) -> int:
    """Weights that a warp of a testbed variant handles in an iteration of its main loop.

    One slab, 16 rows and 128 k of it, where a stage is read from shared memory; all stages of the ring where they are
    held in registers, whose indices must be known to the compiler.
    """
    slab = config.rows // config.warps_n * (config.slab // config.warps_k)
    return slab * (1 if "layout_staging" in config.factors else config.stages)


def _profiled(
    repo: Path,
    cubin_dir: Path,
    cells: list[CellRow],
    log: Callable[[str], None],
    protocol: Mapping[str, Any] | None,
) -> Found:
    from lab.protocol import file_of

    if protocol is None:
        protocol = json.loads((repo / file_of(RUNG)).read_text(encoding="utf-8"))
    frozen = json.loads((repo / "prereg" / "shapes.json").read_text(encoding="utf-8"))
    cold, deep = cases(cells, [s["name"] for s in frozen["shapes"]])
    return profiled(cubin_dir, protocol, log, cold, deep)


def profiled(
    cubin_dir: Path,
    protocol: Mapping[str, Any],
    log: Callable[[str], None],
    cold: Sequence[Case],
    deep: Sequence[Case],
    program: str = "lab.counters_r1",
    sets: tuple[MetricSet, MetricSet, MetricSet] | None = None,
) -> Found:
    """Both runs of the profiler on `program`, a module: the cold set on `cold`, the counts set on `deep`.

    sets: the cold one, what is taken of it where ncu does not fit all into one pass, and the counts; None: R1's.
    """
    cold_set, essential, counts_set = sets or (COLD_SET, ESSENTIAL, COUNTS_SET)
    ncu = shutil.which("ncu")
    if ncu is None:
        return Found(refused="ncu is not on PATH")
    if not cold:
        return Found(refused="the campaign has no cell to profile yet")
    known = known_metrics(ncu)
    if not known:
        return Found(refused="ncu lists no metric: --query-metrics")
    run = _Run(ncu, counters.tool(ncu), dict(protocol), cubin_dir, known, log, program)
    found = run(cold_set, cold)
    if found.passes is not None and found.passes > 1:
        log(f"cold set took {found.passes} passes: again with what the prediction needs")
        found = run(essential, cold)
    parts = [found]
    if deep:
        parts.append(run(counts_set, deep))
    rows = {
        (*(row[name] for name in ("kernel", "format", "shape", "M", "regime", "metric")),): row
        for part in reversed(parts)  # a value that both sets have is that of the cold one
        for row in part.rows
    }
    return Found(list(rows.values()), "; ".join(r for p in parts for r in p.refusals) or None)


def known_metrics(ncu: str) -> set[str]:
    """Base names of the metrics that ncu has for the device; metrics of a launch are a collection of their own."""
    found: set[str] = set()
    for collection in ([], ["--query-metrics-collection", "launch"]):
        done = subprocess.run(
            [ncu, "--query-metrics", *collection], capture_output=True, text=True, check=False
        )
        found |= listed(done.stdout)
    return found


def listed(text: str) -> set[str]:
    """Base names in the listing of `ncu --query-metrics`: the first word of a line, `unit__quantity`."""
    return set(re.findall(r"^ {0,2}([a-z0-9]+__\w+)", text, re.MULTILINE))


@dataclass
class Part:
    """What one run gave. passes: the most that a profiled call took; None where ncu did not say."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    passes: int | None = None


@dataclass
class _Run:
    """Runs of the profiler, each on a module as a program."""

    ncu: str
    tool: str
    protocol: dict[str, Any]
    cubin_dir: Path
    known: set[str]
    log: Callable[[str], None]
    program: str

    def __call__(self, wanted: MetricSet, cases: Sequence[Case]) -> Part:
        metrics = [m for m in wanted.metrics if m.base in self.known]
        missing = [m.name for m in wanted.metrics if m.base not in self.known]
        refusals = [f"ncu has no metric {name}" for name in missing]
        self.log(
            f"profiler pass {wanted.name}: {len(cases)} cases, {wanted.calls * len(cases)} calls"
        )
        with tempfile.TemporaryDirectory() as folder:
            plan, outcomes = Path(folder, "plan.json"), Path(folder, "outcomes.json")
            plan.write_text(
                json.dumps(
                    {
                        "protocol": self.protocol,
                        "cubins": str(self.cubin_dir),
                        "calls": wanted.calls,
                        "cases": [asdict(case) for case in cases],
                    }
                )
            )
            command = [
                self.ncu, *counters.UNTOUCHED, "--print-units", "base",
                "--metrics", ",".join(m.name for m in metrics), "--csv", "--page", "raw",
                "--profile-from-start", "off",
                sys.executable, "-m", self.program, str(plan), str(outcomes),
            ]  # fmt: skip
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
                )
            except subprocess.TimeoutExpired:
                words = f"{wanted.name} set: ncu took over {TIMEOUT_S} s"
                return Part(refusals=[*refusals, words])
            reasons = json.loads(outcomes.read_text()) if outcomes.is_file() else []
        passes = passes_of(self.ncu, [m.name for m in metrics])
        part = parse(
            done.stdout, wanted.name, metrics, wanted.calls, cases, reasons, self.tool, passes
        )
        if done.returncode:
            words = _last_words(done.stdout + done.stderr)
            refusals.append(f"{wanted.name} set: ncu: exit {done.returncode}: {words}")
        return Part(part.rows, refusals + part.refusals, part.passes)


def _last_words(text: str) -> str:
    """ncu's own errors, or the end of what was printed, on one line."""
    errors = list(dict.fromkeys(re.findall(r"^==ERROR==\s*(.+?)\s*$", text, re.MULTILINE)))
    words = " / ".join(errors) if errors else " ".join(text.split())
    return words[-400:] or "no word"


# ---- reading its table -------------------------------------------------------------------------------------------


def parse(
    text: str,
    name: str,
    metrics: Sequence[Metric],
    calls: int,
    cases: Sequence[Case],
    reasons: Sequence[str | None],
    tool: str,
    passes: int | None = None,
) -> Part:
    """Counter rows from what ncu printed: the mean of a call, over `calls` profiled calls of each case.

    passes: how many the metrics take, where the text does not say it (`passes_of`). reasons: for each case that the
    program came to, why it was not run, or None. A metric without a column, and a value that is no number, is refused
    by name and never zero. A call of several kernels: `Metric.merge`, said in `tool`.
    """
    units, groups = counters.read_groups(text)
    passes = _passes(text) or passes
    part = Part(passes=passes)
    if not units:
        part.refusals.append(f"{name} set: ncu printed no table: {_last_words(text)}")
        return part
    absent = [m.name for m in metrics if m.name not in units]
    part.refusals += [f"{name} set: ncu did not report {metric}" for metric in absent]
    if passes is None:
        part.refusals.append(f"{name} set: ncu did not say how many passes it took")
    present = [m for m in metrics if m.name in units]
    ended = groups[:-1]  # behind the last marker there is nothing, or a case that was cut short
    lost: Counter[str] = Counter()
    for index, case in enumerate(cases):
        why = reasons[index] if index < len(reasons) else None
        rows = ended[index] if index < len(ended) else []
        if index >= len(ended):
            why = why or "the program ended before it"
        elif not rows:
            why = why or "ncu reported no kernel"
        elif len(rows) % calls:
            why = why or f"{len(rows)} kernels in {calls} calls"
        if why is not None:
            part.refusals.append(f"{name} set: {case}: {why}")
            continue
        kernels, values = len(rows) // calls, {}
        for metric in present:
            try:
                values[metric.name] = _merged(rows, metric, units, calls)
            except ValueError:
                lost[metric.name] += 1
                continue
            part.rows.append(_row(case, metric, values[metric.name], passes, calls, kernels, tool))
        if passes == 1 and name == ESSENTIAL.name:
            part.rows += _derived(case, values.get(_DRAM.name), kernels, tool)
    part.refusals += [
        f"{name} set: {metric} has no value in {n} of {len(cases)} cases"
        for metric, n in lost.items()
    ]
    return part


#: A program with kernels of no interest: how many passes metrics take does not depend on the kernel.
PLAIN_PROGRAM = "import cupy; (cupy.arange(2.0) + 1).sum().item()"


def passes_of(ncu: str, metrics: Sequence[str]) -> int | None:
    """Passes that ncu takes for these metrics, or None where it does not say.

    It says so in its progress lines alone, and prints none of them beside a CSV table: a run of its own asks for them.
    """
    command = [
        ncu, *counters.UNTOUCHED, "--metrics", ",".join(metrics), sys.executable, "-c", PLAIN_PROGRAM,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return _passes(done.stdout)


def _passes(text: str) -> int | None:
    """The most passes that a profiled kernel took, from ncu's progress lines."""
    said = re.findall(
        r'^==PROF== Profiling "(.*?)".*?100% - (\d+) pass(?:es)?\s*$', text, re.MULTILINE
    )
    return max((int(n) for kernel, n in said if kernel != counters.MARKER), default=None)


def _merged(
    rows: Sequence[Mapping[str, str]], metric: Metric, units: Mapping[str, str], calls: int
) -> float:
    """The value of a call. ValueError where a kernel has none, or a weight is missing that is needed."""
    values = [_number(row[metric.name], units[metric.name]) for row in rows]
    if metric.merge == "sum":
        return sum(values) / calls
    if len(rows) == calls and metric.merge == "longest":
        return values[0]
    weights = [1.0] * len(rows)
    if len(rows) > calls or _DURATION.name in units:
        if _DURATION.name not in units:
            raise ValueError(f"{metric.name}: no duration to weight by")
        weights = [_number(row[_DURATION.name], units[_DURATION.name]) for row in rows]
    if metric.merge == "longest":
        return values[weights.index(max(weights))]
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


_PREFIX = re.compile(r"([KMGT])[a-z%]")
_POWERS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def _number(text: str, unit: str) -> float:
    """A value of ncu's CSV in bytes, nanoseconds or what is counted, unscaled. ValueError where it is no number."""
    value = float(text.replace(",", ""))
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is no number")
    if unit.endswith(("byte", "second")) or unit in ("ns", "us", "ms"):
        try:
            return counters.scaled(text, unit)
        except KeyError:
            raise ValueError(f"unit {unit!r} is not understood") from None
    prefix = _PREFIX.match(unit)
    return value * (_POWERS[prefix[1]] if prefix else 1.0)


_MERGED = {
    "sum": "sum of {n} kernels a call",
    "time": "mean of {n} kernels a call, weighted by duration",
    "longest": "of the longest of {n} kernels a call",
}


def _row(
    case: Case,
    metric: Metric,
    value: float,
    passes: int | None,
    calls: int,
    kernels: int,
    tool: str,
) -> dict[str, Any]:
    cold = passes == 1 or not metric.cache
    words = [tool, f"{calls} calls" if calls > 1 else "1 call"]
    words.append(f"{passes or 'unknown number of'} pass{'' if passes == 1 else 'es'}")
    if not cold:
        words.append("replayed: all passes but the first find in L2 what fits of the weights")
    if kernels > 1:
        words.append(_MERGED[metric.merge].format(n=kernels))
    return {
        **case.place,
        "regime": COLD if cold else HOT,
        "metric": metric.name,
        "unit": metric.unit,
        "value": value,
        "tool": ", ".join(words),
    }


def _derived(case: Case, read_bytes: float | None, kernels: int, tool: str) -> list[dict[str, Any]]:
    """Kernels of a call; at M=1, where the activations are nothing, also DRAM bytes over the weight's bytes."""
    from qgemm_mx.formats import weight_bytes

    where = {**case.place, "regime": COLD, "tool": tool}
    found = [{**where, "metric": KERNELS, "unit": "kernels", "value": float(kernels)}]
    if case.M == 1 and read_bytes is not None:
        ratio = read_bytes / weight_bytes(case.format, case.N, case.K)
        found.append({**where, "metric": RATIO, "unit": "ratio", "value": ratio})
    return found


# ---- a time from counters ----------------------------------------------------------------------------------------


def predicted_us(
    rows: Iterable[Mapping[str, Any]],
    sm_clock_mhz: float,
    launch_us: float,
    resident_blocks: int | None = None,
) -> float:
    """Microseconds that a call should take, by Little's law on warps, from counters alone.

        launch + waves x (instructions a warp) x (warp latency an instruction) / clock

    rows: counter rows of one cell; those of the regime `cold_loop` are read. Instructions a warp: smsp__inst_executed
    over smsp__warps_launched. Latency: smsp__average_warp_latency_per_inst_issued, cycles that a warp spends for each
    instruction that it issues; the product is the mean life of a warp. launch_us: an empty kernel of the same grid.
    Waves: grid over resident_blocks (blocks that the device holds at once, or what ncu says of the launch), at least
    one; a partial last wave counts as the fraction that its blocks take, because fewer warps share the memory then.

    What it cannot see: a warp that lives longer than the mean, be it that blocks have unequal work or start late, since
    the call ends with the last one; the drain of a wave, while the places of warps that have ended stay empty; a clock
    or a memory that is slower in the timed run than in the profiler's; instructions that are issued twice. It is for a
    call of one kernel.

    ValueError where a counter is missing or given twice, or where the call has several kernels.
    """
    found: dict[str, float] = {}
    for row in rows:
        if row["regime"] == COLD:
            if row["metric"] in found:
                raise ValueError(f"{row['kernel']}: {row['metric']} is given twice")
            found[row["metric"]] = float(row["value"])

    def value(name: str) -> float:
        if name not in found:
            raise ValueError(f"no {name} in the regime {COLD}")
        if not (math.isfinite(found[name]) and found[name] > 0):
            raise ValueError(f"{name}={found[name]} is not above 0")
        return found[name]

    if found.get(KERNELS, 1) != 1:
        raise ValueError(f"a call of {found[KERNELS]:g} kernels: the prediction is for one")
    if not sm_clock_mhz > 0 or (resident_blocks is not None and resident_blocks < 1):
        raise ValueError(
            f"sm_clock_mhz={sm_clock_mhz}, resident_blocks={resident_blocks}: not above 0"
        )
    waves = value(_GRID.name) / resident_blocks if resident_blocks else value(_WAVES.name)
    life_cycles = value(_INSTRUCTIONS.name) / value(_WARPS.name) * value(_LATENCY.name)
    return launch_us + max(1.0, waves) * life_cycles / sm_clock_mhz


def proven_cold(rows: Sequence[Mapping[str, Any]], bytes_of_weight: int) -> list[Mapping[str, Any]]:
    """Counter rows of a cell, those under `hot_graph` taken as cold where the profile read the whole weight from DRAM.

    ncu may not say how many passes it took; then what depends on the cache is recorded under `hot_graph`. A profile
    whose DRAM bytes are the weight's (97% of them or more) found nothing of it in L2. It does not show that every
    metric came from that replay: one from a later, warmer replay would make the prediction too short. On an H200 the
    metrics of the cold set take one pass (ncu said so when asked without a table, 2026-12-01), so there is none.
    """
    cold = {row["metric"] for row in rows if row["regime"] == COLD}
    read = [r["value"] for r in rows if r["metric"] == _DRAM.name]
    if not read or min(read) < COLD_FRACTION * bytes_of_weight:
        return list(rows)
    return [
        row if row["regime"] == COLD else {**row, "regime": COLD}
        for row in rows
        if row["regime"] == COLD or row["metric"] not in cold
    ]


def prediction(campaign: Any, cell: Cell) -> Estimate | None:
    """`predicted_us` of testbed/full at a cell of a recorded campaign (lab.records), or None where a part is missing.

    Launch: median over the legs of the empty kernel in the same blocks. Clock: median of the readings during the legs
    of the point. The prediction is one number without an interval: two profiled calls do not make one. Where ncu did
    not say how many passes it took, DRAM bytes decide whether the profile was cold (`proven_cold`).
    """
    from lab import clocks

    place = cell._asdict()
    rows = [
        row
        for row in campaign.counters
        if row["kernel"] == FULL and all(row[k] == place[k] for k in ("format", "shape", "M"))
    ]
    legs = campaign.samples
    for name in ("shape", "M", "regime"):
        legs = legs[legs[name] == place[name]]
    launch = legs.loc[
        (legs["kernel"] == LAUNCH) & (legs["format"] == cell.format) & ~legs["dropped"], "time_us"
    ]
    clock = clocks.readings_during(legs, campaign.telemetry)["sm_clock_mhz"].dropna()
    if not rows or launch.empty or clock.empty:
        return None
    try:
        rows = proven_cold(rows, weight_bytes(cell.format, cell.N, cell.K))
        value = predicted_us(rows, float(clock.median()), float(launch.median()))
    except ValueError:
        return None
    return measured({"value": value, "ci_low": None, "ci_high": None})


# ---- the profiled program ----------------------------------------------------------------------------------------


@dataclass
class Operands:
    """What the cases of one weight share: copies on the device, activations by M, layouts of testbed and peers."""

    bench: Any
    weights: Any
    activations: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    layouts: dict[str, Any] = field(default_factory=dict)

    def x(self, m: int) -> tuple[Any, Any]:
        """BF16 patterns and E4M3 codes [m, K]."""
        from lab.operands import make_activations

        if m not in self.activations:
            self.activations[m] = make_activations(self.bench.random, m, self.weights.k)
        return self.activations[m]


def main(arguments: list[str], make: Callable[[Operands, Case], Any] | None = None) -> int:
    """The profiled program: arguments are the plan (JSON) and where to write what became of each case.

    make: gives the call of a case; None: `launcher`.
    """
    from lab.bench import Bench, forbid_predictions
    from lab.operands import make_weights
    from lab.peers._torch import free_memory
    from qgemm_mx.formats import weight_bytes

    plan = json.loads(Path(arguments[0]).read_text())
    forbid_predictions()
    bench = Bench.open(plan["protocol"], Path(plan["cubins"]), int(plan["protocol"]["seed"]))
    outcomes: list[str | None] = []
    planned = [Case(**case) for case in plan["cases"]]
    for (fmt, _, n, k), group in groupby(planned, key=lambda c: (c.format, c.shape, c.N, c.K)):
        copies = bench.copies(weight_bytes(fmt, n, k))
        operands = Operands(bench, make_weights(bench.random, fmt, n, k, copies))
        for case in group:
            launch, why = _nothing, None
            try:
                launch = (make or launcher)(operands, case)
                launch(0)
                bench.stream.synchronize()
            except Exception as error:  # one rival that fails here must not take the others with it
                why = f"{type(error).__name__}: {error}"[:300]
            counters.profile(bench, launch, copies, 0 if why else plan["calls"])
            outcomes.append(why)
            Path(arguments[1]).write_text(json.dumps(outcomes))
        del operands
        free_memory()
    return 0


def _nothing(copy: int) -> None:
    """The launch of a case that could not be built."""


def launcher(operands: Operands, case: Case) -> Callable[[int], None]:
    """The call of a case in the configuration that the campaign chose; nothing is tuned. LookupError if it is gone."""
    if case.kernel == FLOOR:
        return _stream(operands, case)
    if case.kernel in VARIANTS:
        return _testbed(operands, case)
    return _cublaslt(operands, case) if case.kernel in BASELINES.values() else _peer(operands, case)


def pick(case: Case, candidates: Iterable[Any], name: Callable[[Any], str]) -> Any:
    """The candidate that the campaign chose, by name. LookupError if it is not offered."""
    for candidate in candidates:
        if name(candidate) == case.chosen:
            return candidate
    raise LookupError(f"{case} does not offer {case.chosen!r} any more")


def _stream(operands: Operands, case: Case) -> Callable[[int], None]:
    from lab.arms import StreamArm, StreamShape, stream_shapes

    bench, weights = operands.bench, operands.weights
    offered = stream_shapes(bench.protocol, weights.copy_bytes, bench.probe["sm_count"])
    shape = pick(case, offered, StreamShape.describe)
    return StreamArm(weights, bench.modules, bench.stream, shape).launch


def _testbed(operands: Operands, case: Case) -> Callable[[int], None]:
    from lab import testbed

    bench, weights = operands.bench, operands.weights
    x, _ = operands.x(case.M)
    config = testbed.Config(
        weights.format, testbed.tokens_for(case.M), factors=present_factors(case.kernel)
    )
    # Nothing is checked here, so the activations are not decoded.
    problem = testbed.Problem(bench, weights, x, None, operands.layouts)
    return pick(case, [problem.arm(case.kernel, config)], lambda a: a.tuning["chosen"]).launch


def _cublaslt(operands: Operands, case: Case) -> Callable[[int], None]:
    from lab.arms import CublasLtArm

    bench, weights = operands.bench, operands.weights
    x = operands.x(case.M)[weights.format == RIVAL_FORMAT]
    arm = CublasLtArm(weights, x, None, bench.lt, bench.stream, bench.protocol)
    requested = bench.protocol["cublaslt"]["requested_candidates"]
    plan = bench.lt.plan(case.M, case.N, case.K, arm.fp8, requested)
    candidate = pick(case, plan.candidates, lambda c: c.describe())
    pointers = [weights.pointer(copy) for copy in range(weights.copies)]
    launch = bench.lt.launcher(
        plan, candidate, pointers, x.data.ptr, arm.y.data.ptr, bench.stream.ptr, 1.0
    )
    launch.operands = arm  # the addresses above point into these
    return launch


def _peer(operands: Operands, case: Case) -> Callable[[int], None]:
    from lab.peer_arm import make_arm
    from lab.peers import discover

    bench, weights = operands.bench, operands.weights
    peer = next((p for p in discover() if p.NAME == case.kernel), None)
    if peer is None:
        raise LookupError(f"{case}: no adaptor has this name")
    with bench.stream:
        if peer.NAME not in operands.layouts:
            operands.layouts[peer.NAME] = peer.prepare(weights, weights.copies)
        handle = operands.layouts[peer.NAME]
        arm = make_arm(peer, handle, weights, *operands.x(case.M), bench.stream, bench.protocol)
        budget = int(bench.protocol["peers"]["budget"])
        candidates = peer.bind(handle, arm.x, arm.y, bench.stream, budget)
    chosen = pick(case, candidates, lambda c: c.name)

    def launch(copy: int) -> None:
        chosen.launch(copy)

    launch.operands = arm
    return launch


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
