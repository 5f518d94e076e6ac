"""The points of the R1 campaign and the arms of each, as prereg/protocol_r1.json plans them. Pure: no device.

A point (lab.plan) stands once in the plan, with the arms of every group that wants it: floors, baselines, peers, the
factorial with its probes, and the experiments on single causes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab import decomposition, plan
from lab.plan import ArmName, Point, further_shapes


def points(
    protocol: Mapping[str, Any],
    shapes: Sequence[Mapping[str, Any]],
    peers: Mapping[str, Sequence[str]],
) -> list[Point]:
    """Every point in the frozen order, as `lab.plan.points`. ValueError for a name of the plan that is no shape."""
    frozen = protocol["plan"]
    named = {n for row in frozen["causes"] for n in row["shapes"]}
    plan.check_names(named | {n for row in frozen["further"] for n in row.get("of", ())}, shapes)

    def groups_at(shape: Mapping[str, Any], m: int) -> plan.Groups:
        groups = plan.production(frozen, peers)
        factorial = frozen["factorial"]
        if m in factorial["m"]:
            kernels = (*decomposition.variants(), *factorial["probes"])
            groups["factorial"] = tuple((kernel, factorial["format"]) for kernel in kernels)
        plan.add_rows(groups, frozen["causes"], shape["name"], m)
        return groups

    return plan.points(protocol, shapes, peers, groups_at)


def shards(
    protocol: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]]
) -> dict[tuple[str, int], str]:
    """(shape, ways) to the name under which that shard of N / ways was measured, 1 way among them.

    A shard with the N and K of another shape is that shape: its cells carry that name.
    """
    measured = {(s["N"], s["K"]): s["name"] for s in shapes}
    measured |= {(s["N"], s["K"]): s["name"] for s, _ in further_shapes(protocol, shapes)}
    found = {}
    for row in protocol["plan"]["further"]:
        for s in shapes:
            if s["name"] in row.get("of", ()):
                for ways in (1, *row["ways"]):
                    name = measured.get((s["N"] // ways, s["K"]))
                    if name is not None and s["N"] % ways == 0:
                        found[s["name"], ways] = name
    return found


__all__ = ["ArmName", "Point", "further_shapes", "points", "shards"]
