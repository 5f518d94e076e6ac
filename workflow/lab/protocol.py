"""What the frozen protocol prescribes at a point: seeds, numbers of blocks, their extension, and which legs drop.

Measuring follows it and the audit holds campaigns against it, so both take it from here; nothing here touches a device.
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


def point_seed(protocol: Mapping[str, Any], *parts: Any) -> int:
    """A seed of one point, from the frozen seed and the point's name."""
    text = ":".join(str(p) for p in (protocol["seed"], *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def is_large(protocol: Mapping[str, Any], m: int) -> bool:
    """Whether a point has many rows: fewer blocks, and no sanity floor in the secondary regimes."""
    return m >= protocol["blocks"]["large_from_m"]


def planned_blocks(protocol: Mapping[str, Any], m: int, regime: str) -> int:
    """Blocks of a point in a regime before any extension. KeyError for a regime that the protocol does not have."""
    frozen, regimes = protocol["blocks"], protocol["regimes"]
    if regime == regimes["headline"]:
        return frozen["large_m"] if is_large(protocol, m) else frozen["small_m"]
    if regime in regimes["secondary"]:
        return frozen["secondary"]
    raise KeyError(regime)


def tuning_nodes(protocol: Mapping[str, Any], m: int, copies: int) -> int:
    """Graph nodes with which a candidate is timed while tuning: few at large M, where a call is long."""
    if is_large(protocol, m):
        return protocol["cublaslt"]["tuning_nodes_large_m"]
    return nodes_for(copies, protocol["graph"]["min_nodes"])


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
