"""What the frozen protocol prescribes at a point: seeds, regimes, blocks, their extension, and which legs drop.

Measuring follows it and the audit holds campaigns against it, so both take it from here; nothing here touches a device.
R1 and R2 have protocols of their own: what only they say (`min_nodes_large_m`, `secondary_arms`, `secondary_m`, regimes
of a point) is optional.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lab import device, statistics
from lab.timing import nodes_for

SLOPE = "slope_not_positive"
#: Protocol of a rung, or of a part of one (lab.rungs), from the repository's root.
FILE = "prereg/protocol.json"
OWN_FILES = {
    "R1": "prereg/protocol_r1.json",
    "R2": "prereg/protocol_r2.json",
    "R2b": "prereg/protocol_r2b.json",
}


def file_of(rung: str) -> str:
    """The protocol that a rung is measured by, from the repository's root."""
    return OWN_FILES.get(rung, FILE)


def point_seed(protocol: Mapping[str, Any], *parts: Any) -> int:
    """A seed of one point, from the frozen seed and the point's name."""
    text = ":".join(str(p) for p in (protocol["seed"], *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def shuffled(items: Sequence[Any], seed: int) -> list[Any]:
    """Items in a seeded random order, so that drift does not follow shape or M."""
    return [items[i] for i in np.random.default_rng(seed).permutation(len(items))]


def is_large(protocol: Mapping[str, Any], m: int) -> bool:
    """Whether a point has many rows: fewer blocks, and no sanity floor in the secondary regimes."""
    return m >= protocol["blocks"]["large_from_m"]


def min_nodes(protocol: Mapping[str, Any], m: int) -> int:
    """Calls of the short replay, or of a loop, at least: fewer at large M where the protocol says so."""
    graph = protocol["graph"]
    return (
        graph.get("min_nodes_large_m", graph["min_nodes"])
        if is_large(protocol, m)
        else graph["min_nodes"]
    )


def twin_kernels(protocol: Mapping[str, Any]) -> tuple[str, ...]:
    """Kernels that run beside an exact copy of themselves (A/A) in the headline regime."""
    return tuple(protocol.get("a_a_kernels") or [protocol["a_a_kernel"]])


def regimes_at(protocol: Mapping[str, Any], shape: str, m: int) -> tuple[str, ...]:
    """Regimes of a point in the order they are taken, the headline first."""
    regimes = protocol["regimes"]
    secondary = regimes["secondary"] if m in regimes.get("secondary_m", [m]) else []
    own = regimes.get("of_points", {}).get(shape, {"regimes": []})
    return (regimes["headline"], *secondary, *(own["regimes"] if m in own.get("m", [m]) else []))


def takes_part(
    protocol: Mapping[str, Any], arm: tuple[str, str], wrong: bool, shape: str, m: int, regime: str
) -> bool:
    """Whether an arm (kernel, role) is timed in a regime at a point; `wrong`: it is wrong by design."""
    kernel, role = arm
    regimes = protocol["regimes"]
    if regime == regimes["headline"]:
        return True
    if wrong:
        return False
    if regime in regimes["secondary"]:
        if chosen := regimes.get("secondary_arms"):
            return role in chosen["roles"] or kernel in chosen["kernels"]
        return not (is_large(protocol, m) and role == "sanity_floor")
    own = regimes.get("of_points", {}).get(shape)
    return own is not None and regime in own["regimes"] and kernel in own["kernels"]


def planned_blocks(protocol: Mapping[str, Any], m: int, regime: str) -> int:
    """Blocks of a point in a regime before any extension. KeyError for a regime that the protocol does not have."""
    frozen, regimes = protocol["blocks"], protocol["regimes"]
    large = is_large(protocol, m)
    if regime == regimes["headline"]:
        return frozen["large_m"] if large else frozen["small_m"]
    if regime in regimes["secondary"]:
        return (
            frozen.get("secondary_large_m", frozen["secondary"]) if large else frozen["secondary"]
        )
    if any(regime in own["regimes"] for own in regimes.get("of_points", {}).values()):
        return frozen["of_points"]
    raise KeyError(regime)


def tuning_nodes(protocol: Mapping[str, Any], m: int, copies: int) -> int:
    """Graph nodes with which a candidate is timed while tuning: few at large M, where a call is long."""
    if is_large(protocol, m):
        return protocol["cublaslt"]["tuning_nodes_large_m"]
    return nodes_for(copies, min_nodes(protocol, m))


def block_order(
    protocol: Mapping[str, Any], arms: Sequence[str], shape: str, m: int, regime: str
) -> list[list[str]]:
    """Arms of each planned block in the order they run; in the headline regime also of those of its extension."""
    n = planned_blocks(protocol, m, regime)
    if regime == protocol["regimes"]["headline"]:
        n *= 1 + protocol["blocks"]["extension"]["times"]
    return statistics.block_order(arms, n, point_seed(protocol, shape, m, regime))


def too_wide(legs: Sequence[Mapping[str, Any]] | pd.DataFrame, half_width: float) -> bool:
    """Whether some arm's interval is wider than the frozen half width (width only, never sign).

    Legs have `arm`, `block`, `time_us` and `dropped`; dropped ones do not count.
    """
    frame = pd.DataFrame(legs)
    kept = frame[~frame["dropped"].astype(bool)] if len(frame) else frame
    if kept.empty:
        return True
    values = kept.assign(log=np.log(kept["time_us"])).groupby(["arm", "block"])["log"].mean()
    arms = [g.to_numpy() for _, g in values.groupby("arm") if len(g) >= 2]
    return statistics.needs_extension([statistics.sample_estimate(v) for v in arms], half_width)


def margin_ns(protocol: Mapping[str, Any]) -> int:
    """How long before and after a leg a reading still speaks of it."""
    return int(1e6 * protocol["telemetry"]["period_ms"])


def drop_reason(
    protocol: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], start_ns: int, end_ns: int
) -> str | None:
    """The throttle reason sampled during a leg that drops it, or None. Power capping is data, not a reason."""
    margin = margin_ns(protocol)
    for row in reversed(rows):
        if row["t_ns"] < start_ns - margin:
            break
        for name in protocol["telemetry"]["drop_reasons"]:
            if (
                row["t_ns"] <= end_ns + margin
                and (row["throttle_reasons"] or 0) & device.THROTTLE_REASONS[name]
            ):
                return name
    return None
