"""Scores of the forecasts, beside those of a frozen dumb forecaster.

Only blind claims whose observation is sound count in the headline. A numeric claim is scored by
the coverage of its 50% and 90% bands and by the weighted interval score, a yes/no claim by the
Brier score. Lower scores are better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lab.claims import Claim, Forecast, Quantiles
from lab.statistics import Interval, wilson
from lab.verdicts import Verdict

BANDS = ((0.5, "q25", "q75"), (0.1, "q05", "q95"))  # alpha of a central band, its ends
JUDGED = ("HIT", "STRADDLE", "MISS", "CONFIRMED", "REFUTED", "INCONCLUSIVE")


@dataclass(frozen=True)
class Coverage:
    """How many observations lay inside a band of nominal coverage."""

    nominal: float
    inside: int
    total: int
    interval: Interval

    @property
    def fraction(self) -> float | None:
        """Observed coverage; None without an observation."""
        return self.inside / self.total if self.total else None


@dataclass(frozen=True)
class Score:
    """Scores of one forecaster over the same claims; None without a claim of that sort."""

    forecaster: str
    coverage50: Coverage
    coverage90: Coverage
    wis: float | None
    n_numeric: int
    brier: float | None
    n_yes_no: int


@dataclass(frozen=True)
class Comparison:
    """Ours and the dumb forecaster's scores over the claims that both forecast."""

    novelty: str
    ours: Score
    dumb: Score
    not_forecast: tuple[str, ...]  # claims that the dumb forecaster leaves out


def interval_score(low: float, high: float, observed: float, alpha: float) -> float:
    """Interval score of a central 1 - alpha band (Gneiting and Raftery 2007, eq. 43)."""
    below, above = max(low - observed, 0.0), max(observed - high, 0.0)
    return (high - low) + 2 / alpha * (below + above)


def weighted_interval_score(quantiles: Quantiles, observed: float, log: bool = True) -> float:
    """Weighted interval score, on natural log values if ``log``.

    Bracher, Ray, Gneiting and Reich (2021), eq. 1, with weights w_0 = 1/2 and w_k = alpha_k / 2:
    (|y - median| / 2 + sum_k alpha_k / 2 * IS_alpha_k) / (K + 1/2). Raises ``ValueError`` for a
    value that has no log.
    """
    values = [*quantiles, observed]
    if log and min(values) <= 0:
        raise ValueError(f"{min(values)} has no log; score it on the linear scale")
    scaled = [math.log(v) for v in values] if log else [float(v) for v in values]
    q, y = Quantiles(*scaled[:5]), scaled[5]
    total = 0.5 * abs(y - q.q50)
    for alpha, low, high in BANDS:
        total += alpha / 2 * interval_score(getattr(q, low), getattr(q, high), y, alpha)
    return total / (len(BANDS) + 0.5)


def brier(probability: float, outcome: bool) -> float:
    """Squared error of a probability (Brier 1950)."""
    return (probability - float(outcome)) ** 2


def coverage(pairs: Iterable[tuple[Quantiles, float]], band: tuple[float, str, str]) -> Coverage:
    """Coverage of one of ``BANDS`` with its Wilson interval."""
    alpha, low, high = band
    inside = [getattr(q, low) <= y <= getattr(q, high) for q, y in pairs]
    return Coverage(1 - alpha, sum(inside), len(inside), wilson(sum(inside), len(inside)))


def score(
    claims: Sequence[Claim],
    verdicts: Sequence[Verdict],
    dumb: Sequence[Forecast],
    novelty: str = "blind",
) -> Comparison:
    """Score the judged claims of one novelty, against the dumb forecaster on the same claims.

    Only claims that both forecast count; those that the dumb forecaster leaves out are named. An
    INCONCLUSIVE yes/no claim has no outcome. Amended claims do not count, because their authors
    knew more.
    """
    result: Mapping[str, Verdict] = {verdict.claim: verdict for verdict in verdicts}
    rival = {forecast.claim: forecast for forecast in dumb}
    numeric: list[tuple[Quantiles, Quantiles, float]] = []
    yes_no: list[tuple[float, float, bool]] = []
    left_out = []
    for claim in claims:
        verdict, other = result.get(claim.id), rival.get(claim.id)
        if claim.novelty != novelty or claim.amends or verdict is None:
            continue
        if verdict.verdict not in JUDGED:
            continue
        if claim.quantiles is not None and verdict.observed is not None:
            if other is None or other.quantiles is None:
                left_out.append(claim.id)
            else:
                numeric.append((claim.quantiles, other.quantiles, verdict.observed))
        elif claim.probability is not None and verdict.verdict in ("CONFIRMED", "REFUTED"):
            if other is None or other.probability is None:
                left_out.append(claim.id)
            else:
                outcome = verdict.verdict == "CONFIRMED"
                yes_no.append((claim.probability, other.probability, outcome))
    # A share at or below zero has no log: then both forecasters are scored on the linear scale.
    logs = [min(*ours, *theirs, y) > 0 for ours, theirs, y in numeric]

    def of(name: str, which: int) -> Score:
        bands = [(row[which], row[2]) for row in numeric]
        wis = [weighted_interval_score(q, y, log) for (q, y), log in zip(bands, logs, strict=True)]
        briers = [brier(row[which], row[2]) for row in yes_no]
        return Score(
            name,
            coverage(bands, BANDS[0]),
            coverage(bands, BANDS[1]),
            sum(wis) / len(wis) if wis else None,
            len(wis),
            sum(briers) / len(briers) if briers else None,
            len(briers),
        )

    return Comparison(novelty, of("ours", 0), of("dumb (roofline only)", 1), tuple(left_out))
