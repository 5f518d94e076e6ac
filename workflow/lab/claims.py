"""Claims: load a claim file, refuse what is ambiguous, and give frozen objects.

A claim is data (METHOD 1). A file is read in three steps, each of which names the file, the key
and the reason when it refuses: strict JSON (no duplicate key, no NaN or infinity), the closed
schema of ``workflow/schemas``, and the rules that a schema cannot state. A file must also be its
own canonical form (RFC 8785 and one newline), so that two files with one meaning have one hash.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import rfc8785
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

SCHEMAS = Path(__file__).resolve().parents[1] / "schemas"

RULE_OF_KIND = {
    "point": "interval_vs_band90",
    "share": "interval_vs_band90",
    "threshold": "interval_vs_threshold",
    "ordering": "order_by_interval",
    "equivalence": "tost",
    "correctness": "boolean",
    "exploratory": "none",
}
PAIRED = ("speedup", "regime_ratio", "crossover_m")  # quantities that need reference cells
TIMED = ("time_us", "floor_ratio", *PAIRED)  # quantities that come from timed cells
UNITS = {
    "time_us": ("us",),
    "speedup": ("ratio",),
    "regime_ratio": ("ratio",),
    "floor_ratio": ("ratio",),  # time over the size-matched floor, 1 at the floor
    "share": ("fraction", "ratio"),
}
QUANTILES = ("q05", "q25", "q50", "q75", "q95")


class ClaimError(ValueError):
    """A document is refused; ``problems`` holds (key, reason) pairs."""

    def __init__(self, path: str | Path, problems: Iterable[tuple[str, str]]) -> None:
        self.path = str(path)
        self.problems = list(problems)
        super().__init__("\n".join(f"{path}: {key}: {reason}" for key, reason in self.problems))


class CellKey(NamedTuple):
    """A cell as a claim names it."""

    kernel: str
    baseline: str | None
    baseline_tuning: str | None
    format: str
    N: int
    K: int
    M: int
    regime: str

    @property
    def measured(self) -> tuple[str, str, int, int, int, str]:
        """The part that names a measurement: kernel, format, N, K, M, regime."""
        return (self.kernel, self.format, self.N, self.K, self.M, self.regime)

    def __str__(self) -> str:
        return f"{self.kernel} {self.format} {self.N}x{self.K} M={self.M} {self.regime}"


class Quantiles(NamedTuple):
    """Predicted quantiles in the claim's unit."""

    q05: float
    q25: float
    q50: float
    q75: float
    q95: float


@dataclass(frozen=True)
class Estimand:
    """The quantity over named cells that decides a claim."""

    quantity: str
    cells: tuple[CellKey, ...]
    reference_cells: tuple[CellKey, ...]
    aggregate: str
    name: str | None

    @property
    def items(self) -> tuple[str, ...]:
        """Names of an ordering's items, in the claimed order."""
        return tuple(part.strip() for part in (self.name or "").split(">") if part.strip())


@dataclass(frozen=True)
class Mechanism:
    """Why the number should come out so."""

    formula: str
    cost_model: str | None
    text: str


@dataclass(frozen=True)
class Provenance:
    """Where a claim comes from and what its author had seen."""

    source: str
    registered: str
    access: str


@dataclass(frozen=True)
class Claim:
    """One claim; the fields are those of ``claims.schema.json``."""

    id: str
    rung: str
    family: str
    kind: str
    novelty: str
    statement: str
    estimand: Estimand
    unit: str
    direction: str
    quantiles: Quantiles | None
    probability: float | None
    threshold: float | None
    smallest_difference: float
    decision_rule: str
    mechanism: Mechanism
    refuted_by: str
    does_not_show: str
    provenance: Provenance
    amends: str | None = None

    @classmethod
    def from_json(cls, row: dict[str, Any], amends: str | None = None) -> Claim:
        """Build from a row that has passed the schema."""
        estimand = row["estimand"]
        return cls(
            **{
                **row,
                "estimand": Estimand(
                    quantity=estimand["quantity"],
                    cells=tuple(CellKey(**cell) for cell in estimand["cells"]),
                    reference_cells=tuple(CellKey(**cell) for cell in estimand["reference_cells"]),
                    aggregate=estimand["aggregate"],
                    name=estimand["name"],
                ),
                "quantiles": Quantiles(**row["quantiles"]) if row["quantiles"] else None,
                "mechanism": Mechanism(**row["mechanism"]),
                "provenance": Provenance(**row["provenance"]),
                "amends": amends,
            }
        )


@dataclass(frozen=True)
class Amendment:
    """A dated change of one frozen claim."""

    id: str
    amends: str
    date: str
    access: str
    who_knew_what: str
    reason: str
    replacement: Claim


@dataclass(frozen=True)
class Forecast:
    """What another forecaster says about a claim."""

    claim: str
    quantiles: Quantiles | None
    probability: float | None


def canonical_bytes(document: Any) -> bytes:
    """RFC 8785 bytes of a JSON document, with one newline at the end."""
    return rfc8785.dumps(document) + b"\n"


def parse_strict(data: bytes, path: str | Path) -> Any:
    """Parse JSON; a duplicate key, NaN or an infinity is refused with the key that holds it."""
    refused = object()  # stands for a non-finite number until the key around it is known

    def number(text: str) -> Any:
        value = float(text)
        return value if math.isfinite(value) else refused

    def holds(value: Any) -> bool:
        return value is refused or (isinstance(value, list) and any(map(holds, value)))

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated = [key for key, count in Counter(key for key, _ in items).items() if count > 1]
        if repeated:
            raise ClaimError(path, [(key, "duplicate key") for key in repeated])
        for key, value in items:
            if holds(value):
                raise ClaimError(path, [(key, "not a finite number (NaN or infinity)")])
        return dict(items)

    try:
        document = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=pairs,
            parse_constant=lambda _: refused,
            parse_float=number,
        )
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ClaimError(path, [("(file)", f"not JSON in UTF-8: {error}")]) from error
    if holds(document):
        raise ClaimError(path, [("(file)", "not a finite number (NaN or infinity)")])
    return document


@cache
def _validator(name: str) -> Draft202012Validator:
    schemas = {
        path.name: json.loads(path.read_text(encoding="utf-8"))
        for path in (SCHEMAS / "claims.schema.json", SCHEMAS / "amendment.schema.json")
    }
    registry = Registry().with_resources(
        (key, Resource.from_contents(schema)) for key, schema in schemas.items()
    )
    return Draft202012Validator(schemas[name], registry=registry)


def _check_schema(document: Any, schema: str, path: str | Path) -> None:
    problems = [
        (error.json_path, error.message)
        for error in sorted(_validator(schema).iter_errors(document), key=lambda e: e.json_path)
    ]
    if problems:
        raise ClaimError(path, problems)


def _check_canonical(data: bytes, document: Any, path: str | Path) -> None:
    if data != canonical_bytes(document):
        reason = "not canonical: write RFC 8785 bytes and one newline (lab.claims.canonical_bytes)"
        raise ClaimError(path, [("(file)", reason)])


def _increasing(values: Iterable[float]) -> bool:
    values = list(values)
    return all(low < high for low, high in zip(values, values[1:], strict=False))


def semantic_problems(claim: Claim) -> list[tuple[str, str]]:
    """(key, reason) pairs for what the schema cannot state; empty when the claim is sound."""
    found: list[tuple[str, str]] = []
    estimand, kind, quantity = claim.estimand, claim.kind, claim.estimand.quantity

    def refuse(key: str, reason: str) -> None:
        found.append((f"{claim.id}.{key}", reason))

    rule = RULE_OF_KIND[kind]
    if claim.decision_rule != rule:
        refuse("decision_rule", f"{claim.decision_rule} does not judge a {kind}; use {rule}")
    if not claim.id.startswith(claim.rung.lower() + "."):
        refuse("id", f"does not start with its rung {claim.rung.lower()}.")

    # What the forecast must hold.
    if claim.quantiles and not _increasing(claim.quantiles):
        refuse("quantiles", f"not strictly increasing: {list(claim.quantiles)}")
    positive = quantity in (*TIMED, "bytes_per_weight")
    if claim.quantiles and positive and claim.quantiles.q05 <= 0:
        refuse("quantiles", f"q05={claim.quantiles.q05} of a positive quantity ({quantity})")
    if kind in ("point", "share"):
        if claim.quantiles is None:
            refuse("quantiles", f"missing for a {kind}")
        if claim.probability is not None:
            refuse("probability", f"a {kind} is numeric; give null")
    if kind in ("threshold", "ordering", "correctness") and claim.probability is None:
        refuse("probability", f"missing for a {kind}")
    if kind in ("ordering", "correctness") and claim.quantiles is not None:
        refuse("quantiles", f"a {kind} is yes/no; give null")
    if kind == "equivalence" and claim.probability is None and claim.quantiles is None:
        refuse("probability", "an equivalence needs a probability or quantiles")

    # What the decision rule needs.
    if kind == "threshold" and claim.threshold is None:
        refuse("threshold", "missing for a threshold")
    if kind in ("point", "share", "ordering", "correctness") and claim.threshold is not None:
        refuse("threshold", f"a {kind} has none; give null")
    if positive and claim.threshold is not None and claim.threshold <= 0:
        refuse("threshold", f"{claim.threshold} of a positive quantity ({quantity})")
    if kind in ("threshold", "ordering") and claim.direction == "two_sided":
        refuse("direction", f"a {kind} is above or below")
    if kind == "equivalence" and claim.direction != "two_sided":
        refuse("direction", "an equivalence is two_sided")
    if kind == "equivalence" and claim.smallest_difference <= 0:
        refuse("smallest_difference", "an equivalence needs a margin above 0")
    if kind == "equivalence" and claim.threshold is None and quantity not in PAIRED[:2]:
        refuse("threshold", f"an equivalence of {quantity} needs its reference value")
    if (kind == "share") != (quantity == "share") and kind in ("share", "point"):
        refuse("estimand.quantity", f"{quantity} does not fit kind {kind}")
    if (kind == "correctness") != (quantity == "check") and kind != "exploratory":
        refuse("estimand.quantity", f"{quantity} does not fit kind {kind}")
    if claim.unit not in UNITS.get(quantity, (claim.unit,)):
        refuse("unit", f"{claim.unit} does not fit {quantity}; use {UNITS[quantity][0]}")

    # Cells.
    if quantity in TIMED and not estimand.cells:
        refuse("estimand.cells", f"missing for {quantity}")
    for key in ("cells", "reference_cells"):
        for cell, count in Counter(c.measured for c in getattr(estimand, key)).items():
            # One baseline may serve several arms; an estimand never counts one arm twice.
            if count > 1 and key == "cells":
                refuse(f"estimand.{key}", f"duplicate cell {cell}")
    if quantity in PAIRED and len(estimand.reference_cells) != len(estimand.cells):
        refuse(
            "estimand.reference_cells",
            f"{len(estimand.reference_cells)} for {len(estimand.cells)} cells of {quantity}",
        )
    if quantity not in PAIRED and estimand.reference_cells:
        refuse("estimand.reference_cells", f"{quantity} compares nothing; give an empty list")
    several = kind == "ordering" or quantity in ("crossover_m", "check")
    if estimand.aggregate == "single" and len(estimand.cells) > 1 and not several:
        refuse("estimand.aggregate", f"single over {len(estimand.cells)} cells")
    if quantity == "crossover_m" and not _increasing(cell.M for cell in estimand.cells):
        refuse("estimand.cells", "a crossover needs cells of strictly increasing M")
    if quantity == "crossover_m" and len(estimand.cells) < 2:
        refuse("estimand.cells", "a crossover needs at least two cells")
    named = quantity in ("constant", "share", "check", "external")
    if named and not estimand.name:
        refuse("estimand.name", f"missing for {quantity}")
    if quantity == "bytes_per_weight" and not (estimand.name or estimand.cells):
        refuse("estimand.name", "missing: the format")
    if kind == "ordering" and max(len(estimand.cells), len(estimand.items)) < 2:
        refuse("estimand", "an ordering needs at least two cells, or items joined by '>'")
    for cell, reference in zip(estimand.cells, estimand.reference_cells, strict=False):
        if (cell.N, cell.K, cell.M) != (reference.N, reference.K, reference.M):
            refuse("estimand.reference_cells", f"{reference} is another problem than {cell}")
        if cell.measured == reference.measured:
            refuse("estimand.reference_cells", f"{cell} compared with itself")
        if quantity == "regime_ratio" and cell.kernel != reference.kernel:
            refuse("estimand.reference_cells", f"regime_ratio across kernels: {cell}, {reference}")
        if quantity != "regime_ratio" and cell.baseline != reference.kernel:
            refuse("estimand.cells", f"baseline {cell.baseline} is not {reference.kernel}")
    for cell in estimand.cells:
        if cell.baseline and not cell.baseline_tuning:
            refuse("estimand.cells", f"untuned baseline {cell.baseline} of {cell}: inadmissible")

    if claim.novelty == "blind" and claim.provenance.access in ("some", "all"):
        refuse("novelty", f"blind with access {claim.provenance.access}")
    return found


def duplicate_ids(claims: Iterable[Claim]) -> list[str]:
    """Ids that occur more than once."""
    return [key for key, count in Counter(claim.id for claim in claims).items() if count > 1]


def load(path: str | Path) -> tuple[Claim, ...]:
    """Claims of one file; raises ``ClaimError`` with every problem of the first failing step."""
    path = Path(path)
    data = path.read_bytes()
    document = parse_strict(data, path)
    _check_schema(document, "claims.schema.json", path)
    _check_canonical(data, document, path)
    claims = tuple(Claim.from_json(row) for row in document["claims"])
    problems = [problem for claim in claims for problem in semantic_problems(claim)]
    problems += [(key, "duplicate claim id") for key in duplicate_ids(claims)]
    problems += [
        (c.id, "only an amendment's replacement ends in +a<n>") for c in claims if "+" in c.id
    ]
    if problems:
        raise ClaimError(path, problems)
    return claims


def load_many(paths: Iterable[str | Path]) -> tuple[Claim, ...]:
    """Claims of several files; an id in two files is refused."""
    found: dict[str, Path] = {}
    claims: list[Claim] = []
    for path in map(Path, paths):
        for claim in load(path):
            if claim.id in found:
                raise ClaimError(
                    path, [(claim.id, f"duplicate claim id, also in {found[claim.id]}")]
                )
            found[claim.id] = path
            claims.append(claim)
    return tuple(claims)


def load_amendment(path: str | Path) -> Amendment:
    """One amendment file."""
    path = Path(path)
    data = path.read_bytes()
    document = parse_strict(data, path)
    _check_schema(document, "amendment.schema.json", path)
    _check_canonical(data, document, path)
    replacement = Claim.from_json(document["replacement"], amends=document["amends"])
    problems = semantic_problems(replacement)
    prefix, _, suffix = replacement.id.partition("+")
    if prefix != document["amends"] or not suffix:
        problems.append(("replacement.id", f"{replacement.id} is not {document['amends']}+a<n>"))
    if document["access"] in ("some", "all") and replacement.novelty == "blind":
        problems.append(("replacement.novelty", f"blind with access {document['access']}"))
    if problems:
        raise ClaimError(path, problems)
    fields = {k: v for k, v in document.items() if k not in ("schema_version", "replacement")}
    return Amendment(**fields, replacement=replacement)


def load_forecasts(path: str | Path) -> tuple[Forecast, ...]:
    """Forecasts of another forecaster.

    ``{"schema_version": 1, "freeze": str, "forecaster": str, "forecasts": [{"claim": id,
    "quantiles": {q05..q95} | null, "probability": 0..1 | null}]}``; each row has one of the two.
    """
    path = Path(path)
    data = path.read_bytes()
    document = parse_strict(data, path)
    _check_canonical(data, document, path)
    top = {"schema_version", "freeze", "forecaster", "forecasts"}
    if not isinstance(document, dict) or set(document) != top:
        raise ClaimError(path, [("(file)", f"keys must be exactly {sorted(top)}")])
    rows, problems = [], []
    for index, row in enumerate(document["forecasts"]):
        key = f"forecasts[{index}]"
        if not isinstance(row, dict) or set(row) != {"claim", "quantiles", "probability"}:
            problems.append((key, "keys must be exactly claim, quantiles, probability"))
            continue
        quantiles, probability = row["quantiles"], row["probability"]
        if quantiles is None and probability is None:
            problems.append((key, "neither quantiles nor probability"))
        elif quantiles is not None and (
            set(quantiles) != set(QUANTILES) or not _increasing(quantiles[q] for q in QUANTILES)
        ):
            problems.append((key, f"quantiles must be {QUANTILES}, strictly increasing"))
        elif probability is not None and not 0 <= probability <= 1:
            problems.append((key, f"probability={probability} is outside 0..1"))
        else:
            rows.append(
                Forecast(row["claim"], Quantiles(**quantiles) if quantiles else None, probability)
            )
    repeated = [k for k, count in Counter(row.claim for row in rows).items() if count > 1]
    problems += [(key, "duplicate forecast") for key in repeated]
    if problems:
        raise ClaimError(path, problems)
    return tuple(rows)
