"""Verdicts: precedence, every decision rule, and the faults of METHOD 5."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from prereg_kit import (
    Repo,
    block_rows,
    cell,
    cell_row,
    claim,
    estimand,
    fp8,
    objects,
    samples,
    speedup,
    tables,
)

from lab import verdicts
from lab.registry import Problem
from lab.samples import SAMPLES_SCHEMA, write_table
from lab.verdicts import Evidence, judge, share_key

FAST = {"threshold": 1.5}


def one(row, evidence, integrity=(), registered=None):
    found = judge(objects(row), evidence, integrity, registered)
    assert [v.claim for v in found] == [row["id"]]
    return found[0]


def pair(time=2.0, reference=4.0, m=1, **more):
    arms = [(cell(m=m), time), (fp8(m), reference)]
    return Evidence(**tables(*arms), **more)


def ratio(kind="threshold", id="r2.x", ms=(1,), aggregate="single", **changes):
    return claim(id, kind, speedup(ms, aggregate), **changes)


# Statistics.


@pytest.mark.parametrize(
    ("reference", "direction", "verdict"),
    [
        (4.0, "above", "CONFIRMED"),
        (2.0, "above", "REFUTED"),
        (3.003, "above", "INCONCLUSIVE"),
        (2.0, "below", "CONFIRMED"),
        (4.0, "below", "REFUTED"),
    ],
)
def test_threshold(reference, direction, verdict):
    found = one(ratio(direction=direction), pair(2.0, reference))
    assert found.verdict == verdict
    assert found.observed == pytest.approx(reference / 2, rel=0.01)
    assert found.campaign == "c1" and found.ci_low < found.observed < found.ci_high


@pytest.mark.parametrize(
    ("time", "verdict"),
    [(1.6, "HIT"), (2.2, "STRADDLE"), (1.0, "STRADDLE"), (5.0, "MISS"), (0.5, "MISS")],
)
def test_point(time, verdict):
    evidence = Evidence(**tables((cell(), time)))
    found = one(claim(), evidence)
    assert found.verdict == verdict
    assert (found.q05, found.q95, found.unit) == (1.0, 2.2, "us")


@pytest.mark.parametrize(
    ("reference", "noise", "verdict"),
    [(2.0, 0.003, "CONFIRMED"), (2.0, 0.5, "INCONCLUSIVE"), (2.4, 0.003, "REFUTED")],
)
def test_equivalence_needs_evidence_and_not_its_absence(reference, noise, verdict):
    evidence = Evidence(**tables((cell(), 2.0), (fp8(), reference), noise=noise))
    row = ratio("equivalence", smallest_difference=0.05)
    assert one(row, evidence).verdict == verdict


def test_ratios_are_paired_by_block():
    """A drift common to both arms of a block leaves the ratio sharp."""
    drift = np.linspace(0, 1, 8)
    blocks = block_rows(key=cell(), time=2.0) + block_rows(key=fp8(), time=3.1, seed=1)
    for row in blocks:
        row["log_time"] += drift[row["block"]]
    cells = pd.DataFrame([cell_row(), cell_row(key=fp8(), time=3.1)])
    found = one(ratio(), Evidence(cells=cells, blocks=pd.DataFrame(blocks)))
    assert found.verdict == "CONFIRMED" and found.ci_high / found.ci_low < 1.03


def test_arms_that_did_not_run_interleaved_are_invalid():
    evidence = tables((cell(), 2.0), (fp8(), 4.0))
    other = evidence["blocks"]["kernel"] == "cublaslt_fp8"
    evidence["blocks"].loc[other, "block"] += 100
    found = one(ratio(), Evidence(**evidence))
    assert found.verdict == "INVALID" and "not interleaved" in found.reason


def test_geomean_min_and_max_over_cells():
    arms = [(cell(m=1), 2.0), (fp8(1), 4.0), (cell(m=2), 2.0), (fp8(2), 2.6)]
    evidence = Evidence(**tables(*arms))
    for aggregate, observed, verdict in (
        ("geomean", math.sqrt(2 * 1.3), "CONFIRMED"),
        ("min", 1.3, "REFUTED"),
        ("max", 2.0, "CONFIRMED"),
    ):
        found = one(ratio(ms=(1, 2), aggregate=aggregate), evidence)
        assert found.observed == pytest.approx(observed, rel=0.01)
        assert found.verdict == verdict


def test_floor_ratio_is_time_over_floor_and_carries_the_floor_s_interval():
    row = claim("r2.x", "point", estimand("floor_ratio"))
    evidence = Evidence(**tables((cell(), 1.6)))
    found = one(row, evidence)
    assert found.verdict == "HIT" and found.observed == pytest.approx(1.6, rel=0.01)
    assert found.ci_high / found.ci_low > 1.02  # the floor's own +-1%
    bare = tables((cell(), 1.6))
    bare["cells"]["floor_us"] = None
    assert one(row, Evidence(**bare)).verdict == "INVALID"


def test_regime_ratio_of_looped_over_graphed():
    looped = cell(regime="cold_loop")
    row = claim("r2.x", "threshold", estimand("regime_ratio", [cell()], [looped]), threshold=2.0)
    assert one(row, Evidence(**tables((cell(), 2.0), (looped, 5.0)))).verdict == "CONFIRMED"


def test_crossover_is_judged_like_a_point():
    arms = [(cell(m=m), 2.0) for m in (1, 16, 64)]
    arms += [(fp8(m), t) for m, t in ((1, 3.6), (16, 2.6), (64, 1.5))]
    quantiles = dict(q05=16, q25=24, q50=30, q75=36, q95=60)
    of = speedup((1, 16, 64), quantity="crossover_m")
    row = claim("r2.x", "point", of, unit="M", quantiles=quantiles)
    found = one(row, Evidence(**tables(*arms)))
    assert found.verdict == "HIT" and 25 < found.observed < 36


def test_ordering_of_cells_and_of_named_causes():
    order = [cell(m=m) for m in (4, 2, 1)]
    arms = [(key, time) for key, time in zip(order, (4.0, 3.0, 2.0), strict=True)]
    row = claim("r2.x", "ordering", estimand(cells=order))
    evidence = Evidence(**tables(*arms))
    assert one(row, evidence).verdict == "CONFIRMED"
    assert one(row | {"direction": "below"}, evidence).verdict == "REFUTED"
    equal = Evidence(**tables(*[(key, 3.0) for key in order]))
    assert one(row, equal).verdict == "INCONCLUSIVE"

    causes = {"grid": 0.5, "launch": 0.3, "dequant": 0.1}
    constants = {
        share_key(k): {
            "value": v,
            "ci_low": v - 0.02,
            "ci_high": v + 0.02,
            "n": 8,
            "campaign": "c1",
        }
        for k, v in causes.items()
    }
    shares = claim("r1.x", "ordering", estimand("share", [], name="grid > launch > dequant"))
    assert one(shares, Evidence(constants=constants)).verdict == "CONFIRMED"
    shares["estimand"]["name"] = "grid > dequant > launch"
    found = one(shares, Evidence(constants=constants))
    assert found.verdict == "REFUTED" and found.ci_high < 0


def test_constants_shares_and_facts():
    constants = {
        "launch_floor_us": {"value": 1.6, "ci_low": 1.5, "ci_high": 1.7, "n": 9, "campaign": "c1"},
        share_key("dequant", objects(claim())[0].estimand.cells[0]): {
            "value": 1.6, "ci_low": 1.5, "ci_high": 1.7, "n": 9, "campaign": "c1"
        },
    }  # fmt: skip
    evidence = Evidence(constants=constants, facts={"bytes_per_weight/mxfp4": 0.53125})
    row = claim("r0.x", "point", estimand("constant", [], name="launch_floor_us"))
    found = one(row, evidence)
    assert (found.verdict, found.campaign) == ("HIT", "c1")
    assert (found.ci_low, found.ci_high) == pytest.approx((1.5, 1.7))
    assert one(claim("r1.x", "share", estimand("share", name="dequant")), evidence).verdict == "HIT"
    weight = claim(
        "r0.y",
        "equivalence",
        estimand("bytes_per_weight", [], name="mxfp4"),
        unit="bytes",
        threshold=0.53125,
        smallest_difference=1e-4,
    )
    assert one(weight, evidence).verdict == "CONFIRMED"
    assert one(weight | {"threshold": 0.5156}, evidence).verdict == "REFUTED"
    absent = claim("r0.z", "point", estimand("constant", [], name="no_such"))
    assert one(absent, evidence).verdict == "NOT_RUN"
    evidence.constants["launch_floor_us"]["value"] = math.nan
    assert one(row, evidence).verdict == "INVALID"


def check_row(passed, name="probe_ramp", **changes):
    key = cell()
    row = {k: key[k] for k in ("kernel", "format", "N", "K", "M")}
    return row | {"campaign": "c1", "shape": "q_o_proj", "name": name, "passed": passed} | changes


def test_correctness_is_confirmed_only_when_every_row_passed():
    row = claim("r0.x", "correctness", estimand("check", name="probe_ramp"), unit="bool")
    good = Evidence(checks=pd.DataFrame([check_row(True), check_row(False, "other")]))
    bad = Evidence(checks=pd.DataFrame([check_row(True), check_row(False)]))
    elsewhere = Evidence(checks=pd.DataFrame([check_row(True, N=1024)]))
    assert one(row, good).verdict == "CONFIRMED"
    assert one(row, bad).verdict == "REFUTED"
    assert one(row, elsewhere).verdict == "NOT_RUN"
    row["estimand"]["name"] = "*"
    assert one(row, good).verdict == "REFUTED"


def test_holm_across_a_family_weakens_a_lone_threshold():
    """An interval that excludes 1.5 alone does not after correction for nine others."""
    noisy = Evidence(**tables((cell(), 2.0), (fp8(), 3.2), noise=0.05))
    alone = one(ratio(), noisy)
    assert alone.verdict == "CONFIRMED"
    family = [ratio(id="r2.x.0")] + [ratio(id=f"r2.x.{i}", ms=(i,)) for i in range(2, 40)]
    found = judge(objects(*family), noisy)[0]
    assert found.verdict == "INCONCLUSIVE" and found.ci_low <= 1.5 <= found.ci_high
    assert found.ci_low < alone.ci_low
    others = [row | {"family": "r2.other"} for row in family[1:]]
    assert judge(objects(family[0], *others), noisy)[0].verdict == "CONFIRMED"


# Precedence.


def test_precedence():
    tampered = Problem("TAMPERED", "prereg/claims/r2.json", "edited", ("r2.x",))
    good = tables((cell(), 2.0), (fp8(), 4.0))
    bad = {"invalid": {"c1": "hash"}}
    off = {"deviations": {"c1": "another protocol"}}
    row = ratio()
    assert one(row, Evidence(**good, **bad, **off), [tampered]).verdict == "TAMPERED"
    assert one(row, Evidence(**good, **bad, **off)).verdict == "INVALID"
    assert one(row, Evidence(**good, **off)).verdict == "DEVIATED"
    assert one(row, Evidence(**good)).verdict == "CONFIRMED"
    assert one(row, Evidence(**off), [tampered]).verdict == "TAMPERED"
    assert one(row, Evidence(**off)).verdict == "NOT_RUN"
    other = Problem("TAMPERED", "f", "edited", ("r2.other",))
    found = judge(objects(row, claim("r2.other")), Evidence(**good), [other])
    assert [v.verdict for v in found] == ["CONFIRMED", "TAMPERED"]
    chain = Problem("TAMPERED", "prereg/manifest.jsonl", "chain broken")
    assert one(row, Evidence(**good), [chain]).verdict == "TAMPERED"
    unverifiable = Problem("UNVERIFIABLE", "prereg/manifest.jsonl", "shallow clone")
    assert one(row, Evidence(**good), [unverifiable]).verdict == "CONFIRMED"
    edited = Evidence(**good, tampered={"c1": "edited after its commit"})
    assert one(row, edited).verdict == "TAMPERED"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"time_us": math.nan}, "not a finite time"),
        ({"time_us": None}, "not a finite time"),
        ({"time_us": -1.0}, "not a finite time"),
        ({"correctness": "failed"}, "correctness failed"),
        ({"role": "correctness_only"}, "has no time"),
    ],
)
def test_a_cell_that_cannot_be_true_is_invalid(change, reason):
    evidence = tables((cell(), 1.6))
    evidence["cells"] = pd.DataFrame([cell_row(time=1.6) | change])
    found = one(claim(), Evidence(**evidence))
    assert found.verdict == "INVALID" and reason in found.reason and found.observed is None


def test_nan_block_is_invalid():
    evidence = tables((cell(), 1.6))
    evidence["blocks"].loc[3, "log_time"] = math.nan
    found = one(claim(), Evidence(**evidence))
    assert found.verdict == "INVALID" and "NaN" in found.reason


def test_duplicate_cell_and_duplicate_block_are_invalid():
    evidence = tables((cell(), 1.6))
    twice = {"cells": pd.concat([evidence["cells"]] * 2), "blocks": evidence["blocks"]}
    assert "duplicate cell" in one(claim(), Evidence(**twice)).reason
    twice = {"cells": evidence["cells"], "blocks": pd.concat([evidence["blocks"]] * 2)}
    assert one(claim(), Evidence(**twice)).verdict == "INVALID"


def test_missing_cell_is_not_run_and_is_named():
    found = one(ratio(ms=(1, 2), aggregate="geomean"), pair(2.0, 4.0))
    assert found.verdict == "NOT_RUN" and found.campaign is None
    assert "2 of 4 cells" in found.reason and "M=2" in found.reason
    assert one(claim(), Evidence()).reason == "no campaign is recorded"


def test_untuned_baseline_is_inadmissible():
    evidence = tables((cell(), 2.0), (fp8(), 4.0))
    evidence["cells"]["tuning_candidates"] = None
    assert "inadmissible" in one(ratio(), Evidence(**evidence)).reason


def test_the_first_campaign_that_holds_all_cells_judges_and_is_not_passed_over():
    new = tables((cell(), 1.6), campaign="new")
    old = tables((cell(), 5.0), campaign="old")
    both = {k: pd.concat([old[k], new[k]]) for k in ("cells", "blocks")}
    found = one(claim(), Evidence(**both, order=("new", "old")))
    assert (found.campaign, found.verdict) == ("new", "HIT")
    found = one(claim(), Evidence(**both, order=("new", "old"), invalid={"new": "hash"}))
    assert (found.campaign, found.verdict) == ("new", "INVALID")


# Registration.


def test_a_measured_claim_without_registration_is_exploratory_only():
    evidence = pair(2.0, 4.0)
    for row in (ratio(), ratio("exploratory", probability=None, threshold=None)):
        assert one(row, evidence, registered=[row["id"]]).verdict in ("CONFIRMED", "EXPLORATORY")
    found = judge(objects(ratio()), evidence, registered=[])
    assert [v.verdict for v in found] == ["EXPLORATORY"]
    assert found[0].observed == pytest.approx(2.0, rel=0.01)
    assert judge(objects(ratio()), Evidence(), registered=[])[0].verdict == "EXPLORATORY"


def test_unregistered_claims_do_not_dilute_a_family():
    noisy = Evidence(**tables((cell(), 2.0), (fp8(), 3.2), noise=0.05))
    drafts = [ratio(id=f"r2.x.{i}", ms=(i,)) for i in range(2, 40)]
    found = judge(objects(ratio(id="r2.x.0"), *drafts), noisy, registered=["r2.x.0"])
    assert found[0].verdict == "CONFIRMED"


def test_every_registered_id_has_exactly_one_verdict():
    evidence = pair(2.0, 4.0)
    rows = [ratio(id="r2.x.1"), claim("r2.y"), ratio(id="r2.x.2", ms=(2,))]
    found = judge(objects(*rows), evidence, registered=["r2.x.1", "r2.y", "r2.x.2", "r2.lost"])
    assert [v.claim for v in found] == ["r2.x.1", "r2.y", "r2.x.2", "r2.lost"]
    assert found[-1].verdict == "TAMPERED" and all(v.verdict in verdicts.VERDICTS for v in found)
    with pytest.raises(ValueError, match="given twice"):
        judge(objects(ratio(), ratio()), evidence)


def test_both_verdicts_of_an_amended_claim_are_reported():
    old = objects(ratio())[0]
    new = type(old)(**{**vars(old), "id": "r2.x+a1", "amends": "r2.x", "threshold": 2.5})
    found = judge([old, new], pair(2.0, 4.0))
    assert [(v.claim, v.verdict) for v in found] == [("r2.x", "CONFIRMED"), ("r2.x+a1", "REFUTED")]


# Tables.


def test_csv_has_the_exact_columns_and_no_nan(tmp_path):
    found = judge(objects(ratio(), claim("r2.y", of=estimand(cells=[cell(m=7)]))), pair(2.0, 4.0))
    path = tmp_path / "verdicts.csv"
    verdicts.write_csv(found, path)
    lines = path.read_text().splitlines()
    assert lines[0] == (
        "claim,rung,kind,novelty,unit,q05,q25,q50,q75,q95,observed,ci_low,ci_high,verdict,campaign"
    )
    assert lines[2] == "r2.y,R2,point,blind,us,1,1.4,1.6,1.8,2.2,,,,NOT_RUN,"
    assert len(lines) == 3 and "nan" not in path.read_text() and len(list(tmp_path.iterdir())) == 1


def test_campaigns_are_read_newest_first(tmp_path):
    repo = Repo(tmp_path / "r")
    arms = [(cell(), 2.0), (fp8(), 4.0)]
    old = repo.campaign(arms, name="r2-a-20261201-0")
    new = repo.campaign(arms, name="r2-b-20261202-0", created_utc="2026-12-02T00:00:00Z")
    pilot = repo.campaign(arms, name="r2-c-20261203-0", kind="pilot")
    evidence = Evidence.from_campaigns([old, new, pilot], protocol_sha256="0" * 64)
    assert evidence.order == (new.name, old.name)
    found = one(ratio(), evidence)
    assert (found.campaign, found.verdict) == (new.name, "CONFIRMED")
    assert found.observed == pytest.approx(2.0, rel=0.01)


def test_parts_of_a_rung_are_asked_together_the_newest_first(tmp_path):
    """A claim of R2 asks both campaigns of the decode part and that of the other, before any of another rung."""
    repo, arms = Repo(tmp_path / "r"), [(cell(), 2.0), (fp8(), 4.0)]
    plain = {"unit": "ratio", "ci_low": None, "ci_high": None, "n": None, "how": "made up"}

    def record(day, rung, arms=arms):
        name, created = f"{rung.lower()}-x-2026120{day}-0", f"2026-12-0{day}T00:00:00Z"
        given = {"made_up": plain | {"value": float(day)}}
        return repo.campaign(arms, name=name, rung=rung, created_utc=created, constants=given)

    old, other, new, last = (record(*x) for x in ((1, "R2"), (2, "R2b", arms[:1]), (3, "R2"), (4, "R0")))  # fmt: skip
    folders = [old, other, new, last]
    evidence = Evidence.from_campaigns(folders, {"R2": "0" * 64, "R2b": "1" * 64, "R0": "0" * 64})
    assert evidence.asked("R2") == [new.name, other.name, old.name, last.name]
    assert evidence.constant("R2", "made_up")["campaign"] == new.name
    assert evidence.constant("R1", "made_up")["campaign"] == last.name
    assert set(evidence.deviations) == {other.name}  # each part has a protocol of its own
    assert one(ratio(), evidence).campaign == new.name
    assert one(ratio(), Evidence.from_campaigns([old, other])).campaign == old.name
    computed = {"R2b": lambda folder: ({"of_the_part": plain | {"value": 7.0}}, {})}
    found = Evidence.from_campaigns(folders, computed=computed)
    assert found.own_constants["R2", "of_the_part"]["campaign"] == other.name


@pytest.mark.parametrize(
    ("change", "verdict", "reason"),
    [
        ({"protocol_sha256": "1" * 64}, "DEVIATED", "is not the frozen"),
        ({"source": {"commit": None, "dirty": True}}, "DEVIATED", "dirty"),
        ({"settings_untouched": False}, "INVALID", "settings were changed"),
    ],
)
def test_a_campaign_off_the_protocol(tmp_path, change, verdict, reason):
    folder = Repo(tmp_path / "r").campaign([(cell(), 2.0), (fp8(), 4.0)], **change)
    found = one(ratio(), Evidence.from_campaigns([folder], protocol_sha256="0" * 64))
    assert found.verdict == verdict and reason in found.reason


def test_dropped_blocks_leave_or_invalidate_all_arms_of_the_session(tmp_path):
    arms = [(cell(), 2.0), (fp8(), 4.0)]
    folder = Repo(tmp_path / "r").campaign(arms)
    path = folder / "samples.parquet"
    write_table(samples(*arms, n=20, dropped=(1,)), SAMPLES_SCHEMA, path)
    evidence = Evidence.from_campaigns([folder])
    assert evidence.blocks.groupby("kernel")["block"].agg(set).map(lambda b: 1 in b).sum() == 0
    assert one(ratio(), evidence).verdict == "CONFIRMED"
    write_table(samples(*arms, n=20, dropped=(1, 2, 3)), SAMPLES_SCHEMA, path)
    found = one(ratio(), Evidence.from_campaigns([folder]))
    assert found.verdict == "INVALID" and "3 of 20 blocks" in found.reason


def test_a_a_twins_have_no_cell(tmp_path):
    arms = [(cell(), 2.0), (fp8(), 4.0)]
    folder = Repo(tmp_path / "r").campaign(arms)
    table = samples(*arms)
    twin = table[table["kernel"] == "cublaslt_fp8"].assign(arm="cublaslt_fp8#2", time_us=40.0)
    write_table(pd.concat([table, twin]), SAMPLES_SCHEMA, folder / "samples.parquet")
    assert one(ratio(), Evidence.from_campaigns([folder])).observed == pytest.approx(2, rel=0.01)


def test_unreadable_samples_are_invalid(tmp_path):
    folder = Repo(tmp_path / "r").campaign([(cell(), 2.0), (fp8(), 4.0)])
    (folder / "samples.parquet").write_bytes(b"no parquet")
    assert one(ratio(), Evidence.from_campaigns([folder])).verdict == "INVALID"
