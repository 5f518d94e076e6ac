"""Scores: formulas by hand, and which claims count."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from prereg_kit import claim, estimand, objects, speedup

from lab import scores
from lab.claims import Forecast, Quantiles
from lab.verdicts import Verdict

OURS = Quantiles(1.0, 1.4, 1.6, 1.8, 2.2)
WIDE = Quantiles(0.1, 0.5, 1.0, 2.0, 10.0)


def verdict(id, word, observed=None):
    nothing = [None] * 5
    return Verdict(id, "R2", "point", "blind", "us", *nothing, observed, None, None, word, "c1")


def test_weighted_interval_score_by_hand():
    # Inside both bands: median term and widths only.
    right = (0.5 * 0.1 + 0.25 * 0.4 + 0.05 * 1.2) / 2.5
    assert scores.weighted_interval_score(OURS, 1.7, log=False) == pytest.approx(right)
    # Above both: 2 / alpha times the distance, times alpha / 2, is the distance.
    right = (0.5 * 1.4 + 0.25 * 0.4 + 1.2 + 0.05 * 1.2 + 0.8) / 2.5
    assert scores.weighted_interval_score(OURS, 3.0, log=False) == pytest.approx(right)
    logs = Quantiles(*map(math.log, OURS))
    assert scores.weighted_interval_score(OURS, 3.0) == pytest.approx(
        scores.weighted_interval_score(logs, math.log(3.0), log=False)
    )
    with pytest.raises(ValueError, match="no log"):
        scores.weighted_interval_score(OURS, 0.0)


def test_weighted_interval_score_is_the_mean_quantile_loss():
    """Bracher et al. 2021: WIS equals twice the mean pinball loss over the same quantiles."""
    for observed in (0.5, 1.2, 1.6, 2.1, 5.0):
        loss = sum(
            2 * ((observed <= q) - tau) * (q - observed)
            for tau, q in zip((0.05, 0.25, 0.5, 0.75, 0.95), OURS, strict=True)
        )
        found = scores.weighted_interval_score(OURS, observed, log=False)
        assert found == pytest.approx(loss / 5)


def test_coverage_counts_inside_the_band():
    pairs = [(OURS, 1.5), (OURS, 2.0), (OURS, 3.0)]
    half, most = (scores.coverage(pairs, band) for band in scores.BANDS)
    assert (half.nominal, half.inside, half.total) == (0.5, 1, 3)
    assert (most.nominal, most.inside, most.fraction) == (0.9, 2, pytest.approx(2 / 3))
    assert most.interval.low < 2 / 3 < most.interval.high
    assert scores.coverage([], scores.BANDS[0]).fraction is None


def test_only_blind_judged_claims_count_and_the_dumb_forecaster_is_beside():
    numeric = [claim(f"r2.a.{i}") for i in range(4)]
    numeric[1]["novelty"] = "seen"
    yes = claim("r2.b.yes", "threshold", speedup(), probability=0.9)
    no = claim("r2.b.no", "threshold", speedup((2,)), probability=0.8)
    open_ = claim("r2.b.open", "threshold", speedup((4,)), probability=0.8)
    claims = objects(*numeric, yes, no, open_)
    claims += [replace(claims[0], id="r2.a.0+a1", amends="r2.a.0")]
    verdicts = [
        verdict("r2.a.0", "HIT", 1.6),
        verdict("r2.a.1", "MISS", 9.0),  # seen
        verdict("r2.a.2", "NOT_RUN"),
        verdict("r2.a.3", "INVALID", 9.0),
        verdict("r2.a.0+a1", "MISS", 9.0),  # amended
        verdict("r2.b.yes", "CONFIRMED", 2.0),
        verdict("r2.b.no", "REFUTED", 1.0),
        verdict("r2.b.open", "INCONCLUSIVE", 1.5),
    ]
    dumb = [Forecast(c.id, WIDE, None) for c in claims[:4]]
    dumb += [Forecast(c.id, None, 0.5) for c in claims[4:7]]
    found = scores.score(claims, verdicts, dumb)
    assert (found.ours.n_numeric, found.ours.n_yes_no) == (1, 2)
    assert found.ours.coverage90.inside == 1
    assert found.ours.wis == pytest.approx(scores.weighted_interval_score(OURS, 1.6))
    assert found.ours.wis < found.dumb.wis
    assert found.ours.brier == pytest.approx((0.01 + 0.64) / 2)
    assert found.dumb.brier == pytest.approx(0.25)
    assert found.not_forecast == ()


def test_a_claim_without_a_dumb_forecast_is_named_and_not_scored():
    claims = objects(claim("r2.a"))
    found = scores.score(claims, [verdict("r2.a", "HIT", 1.6)], [])
    assert found.not_forecast == ("r2.a",) and found.ours.n_numeric == 0
    assert found.ours.wis is None and found.dumb.brier is None


def test_shares_at_zero_are_scored_on_the_linear_scale_for_both():
    quantiles = dict(q05=-0.1, q25=0.0, q50=0.1, q75=0.2, q95=0.3)
    row = claim("r1.s", "share", estimand("share", [], name="layout"), quantiles=quantiles)
    dumb = [Forecast("r1.s", WIDE, None)]
    found = scores.score(objects(row), [verdict("r1.s", "HIT", 0.1)], dumb)
    assert found.dumb.wis == pytest.approx(scores.weighted_interval_score(WIDE, 0.1, log=False))
