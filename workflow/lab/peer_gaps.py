"""Where a campaign's times of other people's kernels are slower than an earlier campaign's, and what that changes.

A campaign times the candidate of a peer that its tuning took. Until December 2026 a candidate was screened by one call
whose queueing could outlast the delay in front of it: its time was then the host's, and the best candidate could be
dropped (`timing.Timer.single_call` takes such a call again since). So the faster time of two campaigns is shown beside.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

PEER = "peer/"
REGIME = "cold_graph"
#: Times that differ by less are two campaigns' scatter.
SLOWER = 1.1
KEY = ["kernel", "format", "shape", "N", "K", "M"]


@dataclass(frozen=True)
class Gaps:
    """campaign, earlier: ids. compared: cells that both timed; slower: of them, over SLOWER times the earlier time.

    behind: cells in which `product` is slower than some peer; behind_either: with the faster time of either campaign.
    """

    campaign: str
    earlier: str
    compared: int
    slower: int
    behind: int
    behind_either: int


def gaps(cells: pd.DataFrame, campaign: str, product: str) -> Gaps | None:
    """`cells`: rows of cells.csv. None where no earlier campaign timed the peers of `campaign` on its device."""
    cold = cells[(cells["regime"] == REGIME) & cells["time_us"].notna()]
    own = cold[cold["campaign"] == campaign]
    timed = own.loc[own["kernel"] == product, "M"].unique()
    cold, own = cold[cold["M"].isin(timed)], own[own["M"].isin(timed)]
    peers = own[own["kernel"].str.startswith(PEER)]
    others = cold[
        cold["kernel"].str.startswith(PEER)
        & (cold["campaign"].map(_part) < _part(campaign))
        & cold["device"].isin(own["device"].unique())
    ]
    if peers.empty or others.empty:
        return None
    earlier = sorted(others["campaign"].unique())[-1]
    before = others[others["campaign"] == earlier].set_index(KEY)["time_us"]
    both = peers.set_index(KEY)[["time_us"]].join(before.rename("before"), how="left")
    known = both["before"].notna()
    place = ["format", "shape", "M"]
    mine = own[own["kernel"] == product].set_index(place)["time_us"]
    best = both.groupby(place)["time_us"].min()
    either = both[["time_us", "before"]].min(axis=1).groupby(place).min()
    return Gaps(
        campaign=campaign,
        earlier=earlier,
        compared=int(known.sum()),
        slower=int((both["time_us"] > SLOWER * both["before"]).sum()),
        behind=int((mine > best.reindex(mine.index)).sum()),
        behind_either=int((mine > either.reindex(mine.index)).sum()),
    )


def _part(campaign: str) -> str:
    """The part that a campaign's id begins with; parts were measured in the order of their names."""
    return campaign.partition("-")[0]


#: Why the decode part has slower times of peers.
SCREENED = (
    ", because the tuning of this campaign dropped their better candidate (screening by a single call could take the "
    "host's latency for the kernel's; mended since)"
)


def sentence(found: Gaps | None, why: str = SCREENED) -> str:
    """What a reader of the peers' times must know; empty where there is nothing to say. why: of the slower times."""
    if found is None or not found.slower:
        return ""
    changed = (
        "that changes no cell"
        if found.behind == found.behind_either
        else f"with the faster time of either it would be {found.behind_either}"
    )
    return (
        f"Peers: in {found.slower} of {found.compared} of their cells {found.earlier} was over "
        f"{SLOWER - 1:.0%} faster{why}. The product is slower than some peer in {found.behind} cells; {changed}."
    )


__all__ = ["SCREENED", "Gaps", "gaps", "sentence"]
