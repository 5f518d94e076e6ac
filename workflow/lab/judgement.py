"""What the judging step found, as JSON for the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab import registry, scores
from lab.audit import AuditResult, Examination
from lab.claims import Claim
from lab.scores import Coverage, Score


def integrity_json(
    result: AuditResult, repo: str | Path, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """State, head of the chain, its freezes and the problems, as the report prints them.

    notes: claims to which a campaign, taken alone, gives another verdict.
    """
    rows = [{"status": p.status, "path": p.path, "reason": p.reason} for p in result.problems]
    return {
        "status": result.status,
        "head": registry.head(Path(repo) / "prereg"),
        "freezes": _freezes(Path(repo) / "prereg" / registry.MANIFEST),
        "problems": rows,
        "notes": list(notes),
    }


def _freezes(manifest: Path) -> list[dict[str, Any]]:
    """Time, number of claims, access and note of each freeze, in order; a damaged line is named by the audit."""
    found = []
    for line in manifest.read_bytes().splitlines() if manifest.exists() else []:
        try:
            entry = json.loads(line)
            known = {k: entry[k] for k in ("seq", "frozen_utc", "access", "note")}
            found.append(known | {"claims": entry["claim_count"]})
        except (ValueError, LookupError, TypeError):
            continue
    return found


def scores_json(found: Examination) -> dict[str, Any]:
    """Scores by novelty (blind is the headline), ours beside the dumb forecaster's."""
    rows = []
    for novelty in ("blind", "seen", "mechanical"):
        pair = scores.score(
            found.claims, found.verdicts, found.registered.forecasts, novelty=novelty
        )
        rows += [_score_row(score, novelty) for score in (pair.ours, pair.dumb)]
    return {"rows": rows}


def claim_json(claim: Claim) -> dict[str, Any]:
    """A claim with the keys and types of its file."""
    value = asdict(claim)
    value["quantiles"] = claim.quantiles and claim.quantiles._asdict()
    for name in ("cells", "reference_cells"):
        value["estimand"][name] = [cell._asdict() for cell in getattr(claim.estimand, name)]
    return value


def _score_row(score: Score, novelty: str) -> dict[str, Any]:
    return {
        "forecaster": score.forecaster,
        "set": novelty,
        "n_numeric": score.n_numeric,
        "coverage50": _coverage(score.coverage50),
        "coverage90": _coverage(score.coverage90),
        "wis": score.wis,
        "n_yes_no": score.n_yes_no,
        "brier": score.brier,
    }


def _coverage(found: Coverage) -> dict[str, Any]:
    low, high = found.interval if found.total else (None, None)
    return {
        "k": found.inside,
        "n": found.total,
        "value": found.fraction,
        "low": low,
        "high": high,
    }
