"""Where an earlier campaign timed a peer faster, and whether that changes which kernel is ahead."""

from __future__ import annotations

import pandas as pd
import pytest

from lab import peer_gaps


def rows(campaign, times, device="H", regime="cold_graph", m=1):
    """(kernel, format, shape) -> time."""
    return [
        dict(campaign=campaign, device=device, kernel=k, format=f, shape=s, N=8, K=8, M=m, regime=regime, time_us=t)
        for (k, f, s), t in times.items()
    ]  # fmt: skip


A, B = ("peer/a", "mxfp4", "one"), ("peer/a", "mxfp4", "two")
OWN = {("product", "mxfp4", "one"): 5.0, ("product", "mxfp4", "two"): 5.0}
NEW = rows("r2", {A: 9.0, B: 4.0, **OWN})


def found(*earlier):
    return peer_gaps.gaps(pd.DataFrame([*NEW, *earlier]), "r2", "product")


def test_a_slower_peer_is_counted_and_a_cell_that_it_turns():
    gaps = found(*rows("r1", {A: 4.5, B: 4.1}))
    assert gaps == peer_gaps.Gaps("r2", "r1", 2, 1, 1, 2)
    text = peer_gaps.sentence(gaps)
    assert "in 1 of 2 of their cells r1 was over 10% faster" in text
    assert "slower than some peer in 1 cells; with the faster time of either it would be 2." in text


def test_a_slower_peer_that_turns_nothing_says_so():
    text = peer_gaps.sentence(found(*rows("r1", {A: 6.0})))
    assert "in 1 of 1" in text and "that changes no cell" in text


@pytest.mark.parametrize("change", [{"device": "other"}, {"regime": "hot_graph"}, {"m": 64}])
def test_another_device_regime_or_a_larger_m_is_no_comparison(change):
    assert found(*rows("r1", {A: 1.0}, **change)) is None


def test_nothing_is_said_where_both_agree():
    gaps = found(*rows("r1", {A: 8.5, B: 4.0}))
    assert gaps.slower == 0 and peer_gaps.sentence(gaps) == ""
    assert peer_gaps.sentence(None) == ""


def test_the_newest_of_the_others_is_compared():
    gaps = found(*rows("r0", {A: 1.0}), *rows("r1", {A: 8.9}))
    assert gaps.earlier == "r1" and gaps.slower == 0


def test_a_later_campaign_and_another_m_say_nothing_of_an_earlier_one():
    assert found(*rows("r2b", {A: 4.5, B: 4.1})) is None
    both = found(*rows("r1", {A: 4.5, B: 4.1}), *rows("r2b", {A: 1.0, B: 1.0}))
    assert (both.earlier, both.slower) == ("r1", 1)
    assert found(*rows("r1", {A: 4.5, B: 4.1}, m=64)) is None
    assert "dropped" not in peer_gaps.sentence(both, "")
