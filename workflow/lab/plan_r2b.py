"""The points of the R2b campaign and the arms of each, as prereg/protocol_r2b.json plans them. Pure: no device.

R2b is the part of R2 from M = 16 to prefill. A tabulated point (lab.plan) has floors, baselines and the product's arms
first, then the peers that multiply in BF16, then the rows of the plan: the dispatch, the search over all plans, INT4,
the batch-invariant mode, and the ablation, whose steps give right results and have times. A row may name other M: such
a point has the arms of its rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab import plan
from lab.plan import Point

PRODUCT = "qgemm_mx"
#: What a call of `linear` launches, whichever kernel its M asks for.
DISPATCH = "linear"
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
    rows, tabulated = frozen["rows"], frozen["m"]
    plan.check_names({n for row in rows for n in row["shapes"]}, shapes)
    rivals = {
        kernel: [fmt for fmt in peers[kernel] if fmt in frozen["peer_formats"]]
        for kernel in frozen["peers"]
        if kernel in peers
    }

    def groups_at(shape: Mapping[str, Any], m: int) -> plan.Groups:
        groups: plan.Groups = {}
        if m in tabulated:
            groups = plan.production(frozen, rivals)
            others = groups.pop("peers")
            groups["products"] = tuple((PRODUCT, fmt) for fmt in frozen["products"])
            groups["peers"] = others
        plan.add_rows(groups, rows, shape["name"], m)
        return groups

    def ms_of(shape: Mapping[str, Any]) -> list[int]:
        named = (m for row in rows if shape["name"] in row["shapes"] for m in row["m"])
        return list(dict.fromkeys((*tabulated, *sorted(named))))

    return plan.points(protocol, shapes, peers, groups_at, ms_of)


def is_ablation(kernel: str) -> bool:
    """Whether a kernel is a step or an element of the ablation: role testbed, and right."""
    return kernel.startswith((STEP, ELEMENT))


__all__ = [
    "BATCH_INVARIANT",
    "DISPATCH",
    "ELEMENT",
    "PRODUCT",
    "SEARCHED",
    "STEP",
    "Point",
    "is_ablation",
    "points",
]
