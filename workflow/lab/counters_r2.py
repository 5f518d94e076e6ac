"""Profiler counters of R2, in passes of their own (METHOD 4): what holds the decode kernel up, and what its code costs.

The machinery is that of R1 (lab.counters_r1): a cold set that one pass collects, and a set of counts. Beside them stand
the instructions of the kernel's inner loop for every 64 weights (lab.sass_counts): in it a warp takes one unit of the
packed weight, 16 rows and 256 k.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab import counters_r1
from lab.counters import Found
from lab.counters_r1 import Case, Metric, MetricSet, Operands, headline_cases, pick
from lab.plan import FLOOR
from lab.plan_r2 import PRODUCT
from lab.protocol import file_of
from lab.rows import CellRow
from qgemm_mx.gemv_layout import ROWS, SLICE

RUNG = "R2"
FORMATS = ("mxfp4", "nvfp4")
SHAPES = ("q_o_proj", "gate_up", "llama70b_gate_up")
MS = (1, 16)
WEIGHTS_PER_ITERATION = ROWS * SLICE
INNER_LOOP_RULE = "inner loop: innermost with matrix instructions; of several the one with the fewest, the common path"
#: What a call costs the memory and the schedulers, beside what R1 takes cold.
_MORE = (
    Metric("dram__throughput.avg.pct_of_peak_sustained_elapsed", "%", "time"),
    Metric("smsp__issue_active.avg.pct_of_peak_sustained_active", "%", "time"),
)
ESSENTIAL = counters_r1.ESSENTIAL
COLD_SET = replace(counters_r1.COLD_SET, metrics=(*counters_r1.COLD_SET.metrics, *_MORE))
COUNTS_SET: MetricSet = counters_r1.COUNTS_SET


def cases(cells: Iterable[CellRow]) -> tuple[list[Case], list[Case]]:
    """The cases of the cold set, the kernel beside its floor, and those of the counts set, the kernel alone."""
    wanted = [
        case
        for case in headline_cases(cells)
        if case.kernel in (PRODUCT, FLOOR)
        and case.format in FORMATS
        and case.shape in SHAPES
        and (case.M in MS if case.kernel == PRODUCT else case.M == MS[0])
    ]
    # Weights are made once for each format and shape: their cases stand together, the kernel's first.
    wanted.sort(key=lambda c: (c.shape, c.format, c.kernel != PRODUCT, c.M))
    return wanted, [case for case in wanted if case.kernel == PRODUCT]


def take(
    repo: Path,
    cubin_dir: Path,
    cells: Iterable[CellRow],
    log: Callable[[str], None],
    protocol: Mapping[str, Any] | None = None,
) -> Found:
    """Instruction counts, then both runs of the profiler. `refused` names, in one line, all that gave nothing.

    cells: of the campaign so far. protocol: the campaign's; None reads R2's. Rows may be there beside a refusal.
    """
    if protocol is None:
        protocol = json.loads((repo / file_of(RUNG)).read_text(encoding="utf-8"))
    cold, deep = cases(cells)
    counted = sass_rows(cubin_dir, deep)
    sets = (COLD_SET, ESSENTIAL, COUNTS_SET)
    profiled = counters_r1.profiled(cubin_dir, protocol, log, cold, deep, "lab.counters_r2", sets)
    refused = "; ".join(f.refused for f in (counted, profiled) if f.refused)
    return Found(counted.rows + profiled.rows, refused or None)


def sass_rows(
    cubin_dir: Path,
    wanted: Iterable[Case],
    cubins: Sequence[str] = (PRODUCT,),
    weights_per_iteration: int | None = WEIGHTS_PER_ITERATION,
) -> Found:
    """Instruction counts of the entry of each case, which the first word of its configuration names.

    cubins: names of those that hold the entries. weights_per_iteration: of a warp in the inner loop, None: not known.
    """
    from lab import sass_counts
    from lab.sass import SassError, disassemble
    from qgemm_mx.build import BuildError

    wanted = list(wanted)
    if not wanted:
        return Found()
    try:
        entries, loops = {}, {}
        for name in cubins:
            sass = disassemble(cubin_dir / f"{name}.cubin")
            entries |= sass_counts.count_entries(sass)
            loops |= sass_counts.matrix_loops(sass)
    except (SassError, BuildError) as error:
        return Found(
            refused=f"instruction counts of {', '.join(cubins)}: {type(error).__name__}: {error}"
        )
    rows, refusals = [], []
    for case in wanted:
        entry = case.chosen.split(",")[0]
        if entry not in entries:
            refusals.append(f"instruction counts of {case.kernel}: {entry!r} is no entry of it")
            continue
        found = replace(entries[entry], loop=next(iter(loops[entry]), None))
        place = {"shape": case.shape, "N": case.N, "K": case.K, "M": case.M}
        rows += sass_counts.counter_rows(
            found, case.kernel, case.format, place, weights_per_iteration, rule=INNER_LOOP_RULE
        )
    return Found(rows, "; ".join(refusals) or None)


# ---- the profiled program ----------------------------------------------------------------------------------------


def launcher(
    operands: Operands, case: Case, own: tuple[str, ...] = (PRODUCT,)
) -> Callable[[int], None]:
    """The call of a case in the configuration that the campaign chose; nothing is tuned. LookupError if it is gone.

    own: how the ids of the kernels begin that the library makes.
    """
    if not case.kernel.startswith(own):
        return counters_r1.launcher(operands, case)
    from lab import product_arms

    bench, kept = operands.bench, operands.layouts
    product_arms.use_cubins(bench.modules.folder)
    if PRODUCT not in kept:
        kept[PRODUCT] = product_arms.Packed.of(operands.weights, bench.stream)
    x, _ = operands.x(case.M)
    # Nothing is checked here, so the activations are not decoded.
    arm = product_arms.make_arm(case.kernel, kept[PRODUCT], x, None, bench.stream, bench.protocol)
    return pick(case, [arm], lambda a: a.tuning["chosen"]).launch


if __name__ == "__main__":
    raise SystemExit(counters_r1.main(sys.argv[1:], launcher))
