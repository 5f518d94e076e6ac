"""Profiler counters of R2b, in passes of their own (METHOD 4): what holds the kernel up from decode to prefill.

The machinery is that of R1 (lab.counters_r1): a cold set that one pass collects, and a set of counts, here with the
stalls that only warps with wgmma have. Beside them stand the instructions of the kernel's entries (lab.sass_counts).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from lab import counters_r1, counters_r2
from lab.counters import Found
from lab.counters_r1 import Case, Metric, headline_cases
from lab.plan import BASELINES
from lab.plan_r2b import PRODUCT, is_ablation
from lab.protocol import file_of
from lab.rows import CellRow

RUNG = "R2b"
FORMATS = ("mxfp4", "nvfp4")
SHAPES = ("q_o_proj", "gate_up")
MS = (64, 512, 2048)
#: Where rivals and the steps of the ablation are profiled too.
RIVALS_AT, STEPS_AT = ("gate_up", MS), ("gate_up", (512,))
#: Beside those of R2: of the other stalls of warps with wgmma, ncu has no such metric for Hopper.
STALLS = ("gmma", "sleeping")
ESSENTIAL = counters_r2.ESSENTIAL
COUNTS_SET = replace(
    counters_r2.COUNTS_SET,
    metrics=(
        *counters_r2.COUNTS_SET.metrics,
        *(
            Metric(f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio", "cycles", "time")
            for why in STALLS
        ),
        Metric("lts__throughput.avg.pct_of_peak_sustained_elapsed", "%", "time"),
    ),
)  # fmt: skip


def cases(cells: Iterable[CellRow]) -> list[Case]:
    """What is profiled, in both sets: the kernel at three shapes and M, and at fewer its rivals and its ablation."""

    def wanted(case: Case) -> bool:
        if case.kernel == PRODUCT:
            return case.format in FORMATS and case.shape in SHAPES and case.M in MS
        shape, ms = STEPS_AT if is_ablation(case.kernel) else RIVALS_AT
        known = is_ablation(case.kernel) or case.kernel in BASELINES.values()
        return known and case.shape == shape and case.M in ms

    # Weights are made once for each format and shape: their cases stand together, the kernel's first.
    return sorted(
        filter(wanted, headline_cases(cells)),
        key=lambda c: (c.shape, c.format, c.kernel != PRODUCT, c.kernel, c.M),
    )


def take(
    repo: Path, cubin_dir: Path, cells: Iterable[CellRow], log: Callable[[str], None]
) -> Found:
    """Instruction counts, then both runs of the profiler. `refused` names, in one line, all that gave nothing.

    cells: of the campaign so far. Rows may be there beside a refusal.
    """
    protocol = json.loads((repo / file_of(RUNG)).read_text(encoding="utf-8"))
    chosen = cases(cells)
    own = [case for case in chosen if case.kernel not in BASELINES.values()]
    cubins = sorted(path.stem for path in Path(cubin_dir).glob("qgemm*.cubin"))
    counted = counters_r2.sass_rows(cubin_dir, own, cubins, None)
    # R2 found that its larger cold set takes three passes, so the cold cache would be lost: the essential one at once.
    sets = (ESSENTIAL, ESSENTIAL, COUNTS_SET)
    profiled = counters_r1.profiled(
        cubin_dir, protocol, log, chosen, chosen, "lab.counters_r2b", sets
    )
    refused = "; ".join(f.refused for f in (counted, profiled) if f.refused)
    return Found(counted.rows + profiled.rows, refused or None)


launcher = partial(counters_r2.launcher, own=(PRODUCT,))


if __name__ == "__main__":
    raise SystemExit(counters_r1.main(sys.argv[1:], launcher))
