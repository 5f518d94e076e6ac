"""The R1 campaign: production kernels, the testbed's factorial and the experiments on single causes (lab.plan_r1).

What it shares with R2 is in lab.campaign. This module never reads a prediction: an audit hook refuses the open of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lab import campaign, constants, plan_r1
from lab.arms import Arm
from lab.bench import Bench
from lab.campaign import (
    CHAIN_GROUP,
    Activations,
    Budget,
    ChainPair,
    Kit,
    Log,
    Steps,
    Unfinished,
    measure_points,
    peer_versions,
)
from lab.decomposition import FULL
from lab.journal import PartialCampaign
from lab.measure import Selection, take_probes
from lab.operands import WeightCopies, make_weights
from lab.plan import ArmName, Point
from lab.rows import CheckRow
from qgemm_mx.build import BuildRecord

RUNG = "R1"


class Workshop(campaign.Workshop):
    """Makes the testbed's arms beside those of the production kernels."""

    def lay_out(self, kit: Kit, points: Sequence[Point]) -> None:
        """Weights of the layers, where a point is a chain of them."""
        if any(CHAIN_GROUP in p.groups for p in points):
            kit.layers = self._layers(kit)

    def _layers(self, kit: Kit) -> list[WeightCopies]:
        from lab.testbed import CHAIN_LAYERS

        (whole,) = kit.weights.values()
        return [
            make_weights(self.bench.random, whole.format, n, k, whole.copies)
            for n, k in CHAIN_LAYERS
        ]

    def own_arms(self, kit: Kit, point: Point, x: Activations) -> dict[ArmName, Arm]:
        """The testbed's arms of a point, by name. KeyError names one that the testbed does not make."""
        from lab import testbed

        if CHAIN_GROUP in point.groups:
            chain = chain_arm(self.bench, kit)
            return {(chain.kernel, chain.format): chain}
        wanted = [a for a in point.arms if a[0].startswith(("testbed/", "cause/", "probe/"))]
        made: dict[ArmName, Arm] = {}
        for fmt in dict.fromkeys(fmt for _, fmt in wanted):
            problem = testbed.Problem(
                self.bench, kit.weights[fmt], x.bf16, x.bf16_64, kit.layouts.setdefault(fmt, {})
            )
            found: list[Arm] = []
            kernels = [kernel for kernel, f in wanted if f == fmt]
            if any(kernel.startswith("probe/") for kernel in kernels):
                found += testbed.factorial_arms(problem, kit.streams[fmt])
            elif any(kernel.startswith("testbed/") for kernel in kernels):
                found += testbed.cause_arms(problem, "formats")
            causes = dict.fromkeys(k.split("/")[1] for k in kernels if k.startswith("cause/"))
            for experiment in causes:
                found += testbed.cause_arms(problem, experiment)
            by_kernel = {arm.kernel: arm for arm in found}
            made |= {(kernel, fmt): by_kernel[kernel] for kernel in kernels}
        return made


def chain_arm(bench: Bench, kit: Kit) -> ChainPair:
    """The chain of the testbed's layers, each on activations of its own."""
    from lab import testbed

    (whole,) = kit.weights.values()
    problems = []
    for weights in kit.layers:
        x = Activations.make(bench, 1, weights.k)
        problems.append(testbed.Problem(bench, weights, x.bf16, x.bf16_64))
    chains = []
    for pdl in (False, True):
        layers = [p.arm(FULL, testbed.Config(whole.format, pdl=pdl)) for p in problems]
        chains.append(testbed.ChainArm(FULL, whole, layers, bench.stream, pdl))
    return ChainPair(*chains)


def run_campaign_r1(
    repo: Path,
    cubin_dir: Path,
    builds: list[BuildRecord],
    log: Log,
    minutes: float | None = None,
    kind: str = "campaign",
    selection: Selection = Selection(),  # noqa: B008 - frozen
    partial_root: Path | None = None,
) -> Path:
    """Measure the R1 campaign, or go on with it: `lab.campaign.run`. The testbed's cubins are among `builds`."""
    steps = Steps(RUNG, plan_r1.points, Workshop, _open, take_counters)
    return campaign.run(steps, repo, cubin_dir, builds, log, minutes, kind, selection, partial_root)


def _open(bench: Bench, partial: PartialCampaign, log: Log) -> None:
    """Once a campaign: launch floors, and the testbed's structured probes."""
    if not partial.constants:
        with partial.attempt("constants"):
            found = constants.launch_floors(bench.timer, bench.modules, bench.probe["sm_count"])
            partial.add_constants(found)

    def probes() -> list[CheckRow]:
        from lab.testbed import probe_checks

        return probe_checks(bench.modules, bench.stream, bench.probe["sm_count"])

    take_probes(partial, "testbed", probes, log)


def take_counters(
    repo: Path, cubin_dir: Path, partial: PartialCampaign, budget: Budget, log: Log
) -> None:
    """The profiler pass, in a process of its own, on the cells measured so far."""
    from lab import counters_r1

    campaign.take_counters(counters_r1.take, repo, cubin_dir, partial, budget, log)


def main(arguments: list[str] | None = None) -> int:
    """Measure a part of R1 by hand, as a pilot that never enters a verdict: `python -m lab.measure_r1 --ms 1 16`."""
    return campaign.command_line(
        run_campaign_r1,
        "python -m lab.measure_r1",
        main.__doc__,
        lambda source: source.role != "product",
        arguments,
    )


if __name__ == "__main__":
    raise SystemExit(main())


__all__ = [
    "Activations",
    "Budget",
    "ChainPair",
    "Kit",
    "Unfinished",
    "Workshop",
    "measure_points",
    "peer_versions",
    "run_campaign_r1",
]
