"""Claim files: what is refused, with the file, the key and the reason."""

from __future__ import annotations

import json
import math

import pytest
from prereg_kit import amendment, cell, claim, document, estimand, fp8, speedup, write_claims

from lab import claims
from lab.claims import ClaimError, canonical_bytes


def refused(tmp_path, data: bytes, load=claims.load) -> str:
    path = tmp_path / "r2.json"
    path.write_bytes(data)
    with pytest.raises(ClaimError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_sound_file_gives_frozen_objects(tmp_path):
    path = write_claims(tmp_path, claim(), claim("r2.x.fast", "threshold", speedup()))
    first, second = claims.load(path)
    assert first.quantiles.q50 == 1.6
    assert second.estimand.cells[0].measured == ("qgemv_mx", "mxfp4", 4096, 4096, 1, "cold_graph")
    assert second.estimand.cells[0].baseline == "cublaslt_fp8"
    with pytest.raises(AttributeError):
        first.threshold = 3.0


def test_duplicate_key_is_refused_with_its_name(tmp_path):
    data = canonical_bytes(document(claim())).replace(b'"unit":"us"', b'"unit":"us","unit":"ms"')
    assert "unit: duplicate key" in refused(tmp_path, data)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
@pytest.mark.parametrize("key", [b'"q50":', b'"smallest_difference":'])
def test_non_finite_number_is_refused_with_its_key(tmp_path, number, key):
    value = {b'"q50":': b"1.6", b'"smallest_difference":': b"0.02"}[key]
    data = canonical_bytes(document(claim())).replace(key + value, key + number)
    message = refused(tmp_path, data)
    assert key.decode().strip('":') in message and "not a finite number" in message


def test_non_finite_number_in_a_list_is_refused(tmp_path):
    assert "cells: not a finite" in refused(tmp_path, b'{"cells": [1, [NaN]]}')


@pytest.mark.parametrize("key", sorted(claim()))
def test_missing_key_is_refused(tmp_path, key):
    row = claim()
    del row[key]
    assert f"'{key}' is a required property" in refused(tmp_path, canonical_bytes(document(row)))


def test_unknown_keys_are_refused_at_every_depth(tmp_path):
    for deep in (lambda row: row, lambda row: row["estimand"], lambda row: row["mechanism"],
                 lambda row: row["estimand"]["cells"][0], lambda row: row["quantiles"]):  # fmt: skip
        row = claim()
        deep(row)["surprise"] = 1
        assert "surprise" in refused(tmp_path, canonical_bytes(document(row)))


def test_file_must_be_canonical(tmp_path):
    data = json.dumps(document(claim())).encode()
    assert "not canonical" in refused(tmp_path, data)
    assert "not canonical" in refused(tmp_path, canonical_bytes(document(claim()))[:-1])
    assert "not JSON" in refused(tmp_path, b"{")


BAD = {
    "quantiles flat": (claim(quantiles=dict(q05=1, q25=2, q50=2, q75=3, q95=4)), "increasing"),
    "quantiles negative": (claim(quantiles=dict(q05=-1, q25=1, q50=2, q75=3, q95=4)), "positive"),
    "point without quantiles": (claim(quantiles=None), "missing for a point"),
    "point with probability": (claim(probability=0.5), "numeric"),
    "wrong rule": (claim(decision_rule="tost"), "does not judge a point"),
    "wrong rung": (claim(rung="R1"), "rung r1."),
    "wrong unit": (claim(unit="ms"), "use us"),
    "threshold without probability": (
        claim("r2.x", "threshold", speedup(), probability=None),
        "probability: missing",
    ),
    "threshold without threshold": (
        claim("r2.x", "threshold", speedup(), threshold=None),
        "threshold: missing",
    ),
    "two-sided threshold": (
        claim("r2.x", "threshold", speedup(), direction="two_sided"),
        "above or below",
    ),
    "equivalence without margin": (
        claim("r2.x", "equivalence", speedup(), smallest_difference=0),
        "margin above 0",
    ),
    "duplicate cell": (
        claim(of=estimand(cells=[cell(), cell()], aggregate="geomean")),
        "duplicate cell",
    ),
    "no cell": (claim(of=estimand(cells=[])), "missing for time_us"),
    "several cells, single": (claim(of=estimand(cells=[cell(), cell(m=2)])), "single over 2"),
    "missing reference": (
        claim("r2.x", "point", speedup() | {"reference_cells": []}, unit="ratio"),
        "0 for 1 cells",
    ),
    "reference of another problem": (
        claim("r2.x", "point", speedup() | {"reference_cells": [fp8(m=2)]}),
        "another problem",
    ),
    "baseline is not the reference": (
        claim("r2.x", "point", speedup() | {"cells": [cell(baseline="cublaslt_bf16")]}),
        "is not cublaslt_fp8",
    ),
    "untuned baseline": (
        claim(
            "r2.x",
            "point",
            speedup() | {"cells": [cell(baseline="cublaslt_fp8") | {"baseline_tuning": None}]},
        ),
        "untuned baseline",
    ),
    "regime ratio across kernels": (
        claim("r2.x", "point", speedup(quantity="regime_ratio")),
        "across kernels",
    ),
    "constant without name": (claim(of=estimand("constant", [])), "missing for constant"),
    "ordering of one": (claim("r2.x", "ordering", estimand()), "at least two"),
    "crossover of unsorted M": (
        claim("r2.x", "point", speedup((4, 1), quantity="crossover_m"), unit="M"),
        "strictly increasing M",
    ),
    "share of a time": (claim("r2.x", "share", estimand(), unit="us"), "does not fit kind share"),
    "correctness of a time": (claim("r2.x", "correctness", estimand()), "does not fit kind"),
    "blind with access": (
        claim(provenance={"source": "s", "registered": "2026-11-30", "access": "all"}),
        "blind with access all",
    ),
    "amended id in a claim file": (claim("r2.x+a1"), "only an amendment"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_semantic_rule_refuses(tmp_path, case):
    row, reason = BAD[case]
    message = refused(tmp_path, canonical_bytes(document(row)))
    assert reason in message and row["id"] in message


def test_duplicate_ids_within_and_across_files(tmp_path):
    message = refused(tmp_path, canonical_bytes(document(claim(), claim())))
    assert "r2.qgemv_mx.time: duplicate claim id" in message
    paths = [write_claims(tmp_path, claim(), freeze=name) for name in ("a", "b")]
    with pytest.raises(ClaimError, match="b.json.*duplicate claim id, also in .*a.json"):
        claims.load_many(paths)
    assert len(claims.load_many(paths[:1])) == 1


def test_amendment_names_its_claim_and_says_who_knew(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(canonical_bytes(amendment()))
    loaded = claims.load_amendment(path)
    assert loaded.replacement.id == "r2.qgemv_mx.time+a1"
    assert loaded.replacement.amends == "r2.qgemv_mx.time"
    silent = amendment()
    del silent["who_knew_what"]
    other = amendment(replacement=claim("r2.other+a1", novelty="seen"))
    blind = amendment(replacement=claim("r2.qgemv_mx.time+a1"))
    for row, reason in ((silent, "who_knew_what"), (other, "is not"), (blind, "blind with")):
        assert reason in refused(tmp_path, canonical_bytes(row), claims.load_amendment)


def test_forecasts_have_one_row_a_claim(tmp_path):
    row = {"claim": "r2.x", "quantiles": None, "probability": 0.5}
    top = {"schema_version": 1, "freeze": "r2", "forecaster": "roofline"}

    def load(*rows):
        path = tmp_path / "f.json"
        path.write_bytes(canonical_bytes(top | {"forecasts": list(rows)}))
        return claims.load_forecasts(path)

    assert load(row)[0].probability == 0.5
    for rows, reason in (
        ([row, row], "duplicate forecast"),
        ([row | {"probability": None}], "neither"),
        ([row | {"probability": 1.5}], "outside"),
        ([row | {"extra": 1}], "exactly"),
    ):
        with pytest.raises(ClaimError, match=reason):
            load(*rows)


def test_every_key_of_the_schemas_has_a_description_and_a_unit():
    def walk(node, where):
        for name, part in node.get("properties", {}).items():
            yield f"{where}.{name}", part
            yield from walk(part, f"{where}.{name}")
            yield from walk(part.get("items", {}), f"{where}.{name}[]")
            for option in part.get("oneOf", []):
                yield from walk(option, f"{where}.{name}")

    seen = 0
    for name in ("claims", "amendment"):
        schema = json.loads((claims.SCHEMAS / f"{name}.schema.json").read_text())
        parts = [*walk(schema, name)]
        for key, definition in schema.get("$defs", {}).items():
            parts += walk(definition, key)
            assert definition["additionalProperties"] is False
        assert schema["additionalProperties"] is False
        for where, part in parts:
            assert part.get("description") and part.get("unit"), where
        seen += len(parts)
    assert seen > 50


def test_canonical_bytes_are_stable():
    assert canonical_bytes({"b": 1.0, "a": 0.02}) == b'{"a":0.02,"b":1}\n'
    with pytest.raises(Exception, match="(?i)nan|finite|float"):
        canonical_bytes({"a": math.nan})
