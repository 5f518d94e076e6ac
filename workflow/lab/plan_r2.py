"""The points of the R2 campaign and the arms of each, as prereg/protocol_r2.json plans them. Pure: no device.

A point (lab.plan) has floors, baselines and the product's arms first, then the peers, then the rows of the plan: the
search over all plans, INT4, the batch-invariant mode, and the ablation, whose steps give right results and have times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab import plan
from lab.plan import Point

PRODUCT = "qgemv_mx"
#: The fastest of all plans; the mode in which the bits of a row do not depend on M.
SEARCHED, BATCH_INVARIANT = f"{PRODUCT}/searched", f"{PRODUCT}/batch_invariant"
#: Ablation: steps from the naive kernel to the product, and the product with one element taken out.
STEP, ELEMENT = f"{PRODUCT}/step", f"{PRODUCT}/-"


def points(
    protocol: Mapping[str, Any],
    shapes: Sequence[Mapping[str, Any]],
    peers: Mapping[str, Sequence[str]],
) -> list[Point]:
    """Every point in the frozen order, as `lab.plan.points`. ValueError for a name of the plan that is no shape."""
    frozen = protocol["plan"]
    plan.check_names({n for row in frozen["rows"] for n in row["shapes"]}, shapes)

    def groups_at(shape: Mapping[str, Any], m: int) -> plan.Groups:
        groups = plan.production(frozen, peers)
        rivals = groups.pop("peers")
        groups["products"] = tuple((PRODUCT, fmt) for fmt in frozen["products"])
        groups["peers"] = rivals
        plan.add_rows(groups, frozen["rows"], shape["name"], m)
        return groups

    return plan.points(protocol, shapes, peers, groups_at)


def is_ablation(kernel: str) -> bool:
    """Whether a kernel is a step or an element of the ablation: role testbed, and right."""
    return kernel.startswith((STEP, ELEMENT))


__all__ = [
    "BATCH_INVARIANT",
    "ELEMENT",
    "PRODUCT",
    "SEARCHED",
    "STEP",
    "Point",
    "is_ablation",
    "points",
]
