"""The R2b campaign (lab.plan_r2b): the kernel from M = 16 to prefill beside its rivals, its search and its ablation.

What it shares with R1 is in lab.campaign, and with R2's decode part in lab.measure_r2. This module never reads a
prediction: an audit hook refuses the open of one.
"""

from __future__ import annotations

from pathlib import Path

from lab import campaign, constants, measure_r2, plan_r2b, product_arms
from lab.bench import Bench
from lab.campaign import Budget, Log, Steps
from lab.journal import PartialCampaign
from lab.measure import Selection, take_probes
from lab.measure_r2 import ablations
from lab.plan_r2b import BATCH_INVARIANT, DISPATCH, PRODUCT, SEARCHED
from qgemm_mx.build import BuildRecord

RUNG = "R2b"
#: Kernel ids that go through every structured probe, in all formats.
PROBED = (PRODUCT, BATCH_INVARIANT, DISPATCH)


class Workshop(measure_r2.Workshop):
    """Makes the arms of the kernel and of the dispatch beside those of the production kernels."""

    own, searched = (PRODUCT, DISPATCH), SEARCHED


def run_campaign_r2b(
    repo: Path,
    cubin_dir: Path,
    builds: list[BuildRecord],
    log: Log,
    minutes: float | None = None,
    kind: str = "campaign",
    selection: Selection = Selection(),  # noqa: B008 - frozen
    partial_root: Path | None = None,
    close: bool = False,
) -> Path:
    """Measure the R2b campaign, or go on with it: `lab.campaign.run`. The product's cubins are among `builds`."""
    steps = Steps(RUNG, plan_r2b.points, Workshop, _open, take_counters)
    return campaign.run(
        steps, repo, cubin_dir, builds, log, minutes, kind, selection, partial_root, close
    )


def _open(bench: Bench, partial: PartialCampaign, log: Log) -> None:
    """The product from the recorded cubins; once a campaign its probes, then the constants of the device."""
    product_arms.use_cubins(bench.modules.folder)
    steps = ablations(bench.protocol, plan_r2b.is_ablation)
    take_probes(
        partial, "product", lambda: product_arms.probe_checks(bench.stream, steps, PROBED), log
    )
    if not partial.constants:
        with partial.attempt("constants"):
            found = constants.measure(
                bench.timer,
                bench.modules,
                bench.random,
                bench.lt,
                bench.protocol,
                bench.probe["sm_count"],
            )
            partial.add_constants(found)
        campaign.free()


def take_counters(
    repo: Path, cubin_dir: Path, partial: PartialCampaign, budget: Budget, log: Log
) -> None:
    """The profiler pass, in a process of its own, on the cells measured so far."""
    from lab import counters_r2b

    campaign.take_counters(counters_r2b.take, repo, cubin_dir, partial, budget, log)


def main(arguments: list[str] | None = None) -> int:
    """Measure a part of R2b by hand, as a pilot that never enters a verdict: `python -m lab.measure_r2b --ms 64`."""
    return campaign.command_line(
        run_campaign_r2b,
        "python -m lab.measure_r2b",
        main.__doc__,
        lambda source: not source.name.startswith("testbed"),
        arguments,
    )


if __name__ == "__main__":
    raise SystemExit(main())
