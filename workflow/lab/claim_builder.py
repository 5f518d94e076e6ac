"""How a claim is written down: cells, estimands and claim objects of the closed schema, from few words each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.claims import RULE_OF_KIND

REGISTERED = "2026-11-30"
SOURCE_REGISTERED = "2026-08-12"
SOURCE = "public project qgemm-mx, predictions registered 2026-08-12 before any measurement"
OURS = "this project"
TUNING = "best of at least 16 cuBLASLt heuristic candidates a cell"
DECODE_M = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Shape:
    """A frozen weight shape."""

    name: str
    n: int
    k: int
    set: str


def load_shapes(prereg_dir: Path) -> list[Shape]:
    """The frozen shapes, in file order."""
    document = json.loads((prereg_dir / "shapes.json").read_text(encoding="utf-8"))
    return [Shape(s["name"], s["N"], s["K"], s["set"]) for s in document["shapes"]]


def cell(
    kernel: str,
    fmt: str,
    n: int,
    k: int,
    m: int,
    regime: str = "cold_graph",
    baseline: str | None = None,
) -> dict[str, Any]:
    """A cell as a claim names it."""
    return {
        "kernel": kernel,
        "baseline": baseline,
        "baseline_tuning": TUNING if baseline else None,
        "format": fmt,
        "N": n,
        "K": k,
        "M": m,
        "regime": regime,
    }


def estimand(
    quantity: str,
    cells: list[dict] | None = None,
    reference: list[dict] | None = None,
    aggregate: str = "single",
    name: str | None = None,
) -> dict[str, Any]:
    """The quantity over named cells that decides a claim."""
    return {
        "quantity": quantity,
        "cells": cells or [],
        "reference_cells": reference or [],
        "aggregate": aggregate,
        "name": name,
    }


def claim(
    id: str,
    kind: str,
    statement: str,
    of: dict[str, Any],
    unit: str,
    *,
    formula: str,
    why: str,
    refuted_by: str,
    does_not_show: str,
    novelty: str = "blind",
    direction: str = "two_sided",
    quantiles: dict[str, float] | None = None,
    probability: float | None = None,
    threshold: float | None = None,
    smallest_difference: float = 0.02,
    cost_model: str | None = None,
    source: str = OURS,
    registered: str = REGISTERED,
    access: str = "none",
    family: str | None = None,
) -> dict[str, Any]:
    """One claim object of the closed schema; rung and family come from the id (`rung.family.rest`)."""
    rung = id.split(".", 1)[0].upper()
    return {
        "id": id,
        "rung": rung,
        "family": family or ".".join(id.split(".")[:2]),
        "kind": kind,
        "novelty": novelty,
        "statement": statement,
        "estimand": of,
        "unit": unit,
        "direction": direction,
        "quantiles": quantiles,
        "probability": probability,
        "threshold": threshold,
        "smallest_difference": smallest_difference,
        "decision_rule": RULE_OF_KIND[kind],
        "mechanism": {"formula": formula, "cost_model": cost_model, "text": why},
        "refuted_by": refuted_by,
        "does_not_show": does_not_show,
        "provenance": {"source": source, "registered": registered, "access": access},
    }


def speedup(
    kernel: str, fmt: str, baseline: str, baseline_fmt: str, problems: list, aggregate: str
) -> dict[str, Any]:
    """Estimand time(baseline) / time(kernel) over problems (n, k, m), cold graph replay."""
    cells = [cell(kernel, fmt, n, k, m, baseline=baseline) for n, k, m in problems]
    reference = [cell(baseline, baseline_fmt, n, k, m) for n, k, m in problems]
    return estimand("speedup", cells, reference, aggregate)
