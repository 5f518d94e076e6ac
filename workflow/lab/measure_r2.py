"""The R2 campaign: the decode kernel beside floors, baselines and peers, its ablation, and a chain (lab.plan_r2).

What it shares with R1 is in lab.campaign. This module never reads a prediction: an audit hook refuses the open of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lab import campaign, constants, host_times, plan_r2, product_arms
from lab.arms import Arm
from lab.bench import Bench
from lab.campaign import CHAIN_GROUP, Activations, Budget, ChainPair, Kit, Log, Steps
from lab.journal import PartialCampaign
from lab.measure import Selection, failures, take_probes
from lab.operands import make_weights
from lab.plan import ArmName, Point
from lab.plan_r2 import PRODUCT, SEARCHED
from lab.product_arms import Chain, Packed
from lab.rows import CheckRow
from qgemm_mx.build import BuildRecord

RUNG = "R2"


class Workshop(campaign.Workshop):
    """Makes the product's arms beside those of the production kernels.

    own: how the ids of the kernels begin that the library makes. searched: the one of them that is searched here.
    """

    own: tuple[str, ...] = (PRODUCT,)
    searched = SEARCHED

    def lay_out(self, kit: Kit, points: Sequence[Point]) -> None:
        """Every copy of a weight packed by the library; for a chain the weights of its layers instead."""
        if any(CHAIN_GROUP in p.groups for p in points):
            kit.layers = self._layers(kit)
            return
        for fmt in dict.fromkeys(f for p in points for k, f in p.arms if k.startswith(self.own)):
            kit.layouts[fmt] = {PRODUCT: Packed.of(kit.weights[fmt], self.bench.stream)}

    def _layers(self, kit: Kit) -> list[Packed]:
        from lab.testbed import CHAIN_LAYERS

        (whole,) = kit.weights.values()
        layers = (
            make_weights(self.bench.random, whole.format, n, k, whole.copies)
            for n, k in CHAIN_LAYERS
        )
        return [Packed.of(weights, self.bench.stream) for weights in layers]

    def own_arms(self, kit: Kit, point: Point, x: Activations) -> dict[ArmName, Arm]:
        """The product's arms of a point, by name; the search is done here."""
        bench = self.bench
        if CHAIN_GROUP in point.groups:
            chain = self._chain(kit, point)
            return {(chain.kernel, chain.format): chain}
        made: dict[ArmName, Arm] = {}
        for kernel, fmt in point.arms:
            if kernel.startswith(self.own):
                packed: Packed = kit.layouts[fmt][PRODUCT]
                made[kernel, fmt] = arm = product_arms.make_arm(
                    kernel, packed, x.bf16, x.bf16_64, bench.stream, bench.protocol
                )
                if kernel == self.searched:
                    self._search(arm, point)
        return made

    def _search(self, arm: Any, point: Point) -> None:
        arm.tune(self.bench.timer)
        if arm.refused:
            self.log(f"{point.name}: {len(arm.refused)} plans not timed: {arm.refused[0][:200]}")

    def _chain(self, kit: Kit, point: Point) -> ChainPair:
        (whole,) = kit.weights.values()
        problems = []
        for packed in kit.layers:
            x = Activations.make(self.bench, point.m, packed.weights.k)
            problems.append((packed, x.bf16, x.bf16_64))
        shared = (whole, problems, self.bench.stream, self.bench.protocol)
        return ChainPair(*(Chain.of(*shared, programmatic=p) for p in (False, True)))


def run_campaign_r2(
    repo: Path,
    cubin_dir: Path,
    builds: list[BuildRecord],
    log: Log,
    minutes: float | None = None,
    kind: str = "campaign",
    selection: Selection = Selection(),  # noqa: B008 - frozen
    partial_root: Path | None = None,
) -> Path:
    """Measure the R2 campaign, or go on with it: `lab.campaign.run`. The product's cubins are among `builds`."""
    steps = Steps(RUNG, plan_r2.points, Workshop, _open, take_counters)
    return campaign.run(steps, repo, cubin_dir, builds, log, minutes, kind, selection, partial_root)


def ablations(
    protocol: dict[str, Any], is_ablation: Callable[[str], bool] = plan_r2.is_ablation
) -> list[str]:
    """Steps and elements that the plan has, each once."""
    kernels = (kernel for row in protocol["plan"]["rows"] for kernel in row["kernels"])
    return list(dict.fromkeys(filter(is_ablation, kernels)))


def _open(bench: Bench, partial: PartialCampaign, log: Log) -> None:
    """The product from the recorded cubins; once a campaign its probes, then constants of the device and the host."""
    product_arms.use_cubins(bench.modules.folder)

    def probes() -> list[CheckRow]:
        checks = product_arms.probe_checks(bench.stream, ablations(bench.protocol))
        return checks + host_times.PlainCalls(bench).checks()

    take_probes(partial, "product", probes, log)
    if not partial.constants:
        with partial.attempt("constants") as attempt:
            found = _constants(bench)
            calls = host_times.PlainCalls(bench)
            if wrong := failures(calls.checks()):  # what is wrong has no time
                attempt.failed("; ".join(wrong))
            else:
                found |= calls.constants()
            partial.add_constants(found)
        for way, why in calls.missing.items():
            log(f"no time of a call with {way} arrays: {why}")
        campaign.free()


def _constants(bench: Bench) -> dict[str, Any]:
    """Launch floors, the asymptotic read bandwidth that the chain is held against, and the time of packing."""
    sms = bench.probe["sm_count"]
    found = constants.launch_floors(bench.timer, bench.modules, sms)
    found |= constants.read_bandwidth(bench.timer, bench.modules, bench.random, bench.protocol, sms)
    campaign.free()
    return found | host_times.pack_time(bench)


def take_counters(
    repo: Path, cubin_dir: Path, partial: PartialCampaign, budget: Budget, log: Log
) -> None:
    """The profiler pass, in a process of its own, on the cells measured so far."""
    from lab import counters_r2

    campaign.take_counters(counters_r2.take, repo, cubin_dir, partial, budget, log)


def main(arguments: list[str] | None = None) -> int:
    """Measure a part of R2 by hand, as a pilot that never enters a verdict: `python -m lab.measure_r2 --ms 1 16`."""
    return campaign.command_line(
        run_campaign_r2,
        "python -m lab.measure_r2",
        main.__doc__,
        lambda source: not source.name.startswith("testbed"),
        arguments,
    )


if __name__ == "__main__":
    raise SystemExit(main())
