"""The frozen claims follow from the frozen cost model, and the cost model from its formulas."""

from __future__ import annotations

import math

import pytest

from lab import claim_builder, claims, predictions
from lab.cost_model import CostModel, lognormal_quantiles, roofline_us, soft_maximum


@pytest.mark.parametrize("freeze", predictions.FREEZES)
def test_rebuilt_claims_are_the_frozen_bytes(repository, freeze) -> None:
    for path, data in predictions.documents(repository / "prereg", freeze).items():
        assert path.read_bytes() == data, f"{path.name} does not follow from its cost model"


def test_at_least_sixty_blind_claims_and_a_dumb_forecast_of_each_scored_one(repository) -> None:
    found, forecasts = [], []
    for freeze in predictions.FREEZES:
        found += claims.load(repository / f"prereg/claims/{freeze}.json")
        forecasts += claims.load_forecasts(repository / f"prereg/forecasts/{freeze}.json")
    assert sum(c.novelty == "blind" for c in found) >= 60
    scored = {c.id for c in found if c.quantiles or c.probability is not None}
    assert {f.claim for f in forecasts} == scored


def test_every_source_prediction_is_registered_with_its_provenance(repository) -> None:
    found = {c.id: c for c in claims.load(repository / "prereg/claims/r0.json")}
    for number in range(1, 8):
        rows = [c for c in found.values() if f".p{number}." in c.id]
        assert rows, f"P{number}"
        assert all(c.provenance.registered == claim_builder.SOURCE_REGISTERED for c in rows)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_model_is_monotone_and_above_its_floor(repository, version) -> None:
    model = CostModel.load(repository / "prereg", version)
    times = [model.dense_us("fp8", m, 4096, 4096) for m in (1, 64, 256, 1024, 8192)]
    assert times == sorted(times)
    assert model.floor_us("mxfp4", 4096, 4096) < model.floor_us("fp8_e4m3", 4096, 4096)
    assert times[0] > model.floor_us("fp8_e4m3", 4096, 4096)


def test_kernels_are_predicted_between_floor_and_infinity(repository) -> None:
    model = CostModel.load(repository / "prereg", "v2")
    for fmt in ("mxfp4", "nvfp4"):
        floor = model.floor_us(fmt, 8192, 28672)
        assert floor < model.gemv_us(fmt, 1, 8192, 28672) < model.gemv_us(fmt, 16, 8192, 28672)
        assert floor < model.gemm_us(fmt, 16, 8192, 28672) < model.gemm_us(fmt, 8192, 8192, 28672)
        assert floor < model.peer_us("bf16", fmt, 1, 8192, 28672)


def test_quantiles_and_helpers() -> None:
    q = lognormal_quantiles(10.0, 0.1)
    assert q["q50"] == 10.0
    assert q["q95"] / q["q50"] == pytest.approx(math.exp(1.645 * 0.1), rel=1e-3)
    assert soft_maximum(1.0, 1.0) == pytest.approx(2**0.25)
    assert soft_maximum(1.0, 100.0) == pytest.approx(100.0)
    assert roofline_us(4.8e6, 0.0, 4.8, 989.0) == pytest.approx(1.0)
    assert roofline_us(0.0, 989e6, 4.8, 989.0) == pytest.approx(1.0)


def test_a_written_freeze_is_never_overwritten(repository, monkeypatch, capsys) -> None:
    monkeypatch.chdir(repository)
    before = (repository / "prereg/claims/r0.json").read_bytes()
    assert predictions.main(["r0"]) == 1
    assert "by amendment only" in capsys.readouterr().err
    assert (repository / "prereg/claims/r0.json").read_bytes() == before
