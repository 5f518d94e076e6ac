"""Which campaigns the claims are held against, and what the report is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab import audit, judgement, replay


def test_weight_sizes_are_those_of_the_formats() -> None:
    sizes = replay.weight_sizes()
    assert sizes["mxfp4"] == 0.53125 and sizes["nvfp4"] == 0.5625 and sizes["bf16"] == 2


def other_device(checkout, name: str) -> Path:
    import recorded

    device = recorded.header()["device"] | {"name": name, "uuid": "GPU-9"}
    campaign = checkout.record(device=device, created_utc="2026-02-02T00:00:00Z")
    return checkout.root / "data" / "campaigns" / campaign


@pytest.fixture(scope="module")
def folders(checkout) -> list[Path]:
    return sorted((checkout.root / "data" / "campaigns").iterdir())


def judged_by(checkout, chosen: list[Path]) -> set[str]:
    found = audit.judge(checkout.root, chosen)
    return {v.campaign for v in found.verdicts if v.campaign}


def test_claims_are_held_against_the_chosen_campaign(checkout, folders: list[Path]) -> None:
    assert judged_by(checkout, folders) == {folders[0].name}


def test_a_campaign_of_another_device_judges_nothing(checkout, folders: list[Path]) -> None:
    other = other_device(checkout, "NVIDIA RTX 3060")
    assert judged_by(checkout, [other]) == {folders[0].name}


def test_nothing_chosen_still_judges_what_is_recorded(checkout, folders: list[Path]) -> None:
    assert judged_by(checkout, []) == {folders[0].name}


def test_json_for_the_report(checkout, folders: list[Path]) -> None:
    found = audit.judge(checkout.root, folders)
    (first,) = {p for p in (checkout.root / "prereg" / "claims").glob("r0.json")}
    rows = json.loads(first.read_text())["claims"]
    given = {c.id: judgement.claim_json(c) for c in found.claims}
    for row in rows:
        assert {k: v for k, v in given[row["id"]].items() if k != "amends"} == {**row} | {
            k: v for k, v in given[row["id"]].items() if k not in row and k != "amends"
        }
    scores = judgement.scores_json(found)
    blind = [r["forecaster"] for r in scores["rows"] if r["set"] == "blind"]
    assert len(blind) == 2 and blind[0] == "ours"
    json.dumps(scores, allow_nan=False)
    integrity = judgement.integrity_json(audit.audit(checkout.root, found), checkout.root)
    assert (
        integrity["status"] == "OK" and len(integrity["head"]) == 64 and integrity["problems"] == []
    )
    manifest = (checkout.root / "prereg" / "manifest.jsonl").read_text().splitlines()
    frozen = [json.loads(line) for line in manifest]
    assert [f["claims"] for f in integrity["freezes"]] == [len(f["claim_ids"]) for f in frozen]
    assert [f["access"] for f in integrity["freezes"]] == [f["access"] for f in frozen]
    assert all(f["note"] and f["frozen_utc"].endswith("Z") for f in integrity["freezes"])


def test_a_damaged_line_of_the_chain_hides_no_other(tmp_path) -> None:
    line = {"seq": 2, "frozen_utc": "2026-01-01T00:00:00Z", "access": "none", "note": "n"}
    text = json.dumps(line | {"claim_count": 3})
    (tmp_path / "manifest.jsonl").write_text(f"{{broken\n{json.dumps(line)}\n{text}\n[]\n")
    assert judgement._freezes(tmp_path / "manifest.jsonl") == [line | {"claims": 3}]
    assert judgement._freezes(tmp_path / "none.jsonl") == []
