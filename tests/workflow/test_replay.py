"""A recorded campaign becomes a report without a GPU; nothing the workflow does touches the campaign."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pandas as pd
import pytest

REPLAY = ("--cores", "2", "--config", "measure=never")


@pytest.fixture(scope="module")
def campaign(checkout) -> str:
    (folder,) = (checkout.root / "data" / "campaigns").iterdir()
    return folder.name


@pytest.fixture(scope="module")
def replay(checkout, campaign: str):
    """The run that makes the report, and data/ before it."""
    before = checkout.snapshot("data")
    return checkout.ok(*REPLAY), before


def test_one_line_says_what_is_replayed(replay, campaign: str) -> None:
    lines = [line for line in replay[0].stderr.splitlines() if line.startswith("R0: ")]
    assert len(lines) == 1
    assert f"replaying {campaign}" in lines[0]


def test_the_report_is_one_page_about_that_campaign(checkout, replay, campaign: str) -> None:
    page = (checkout.root / "reports" / "index.html").read_text()
    assert campaign in page and "NOT_RUN" in page
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"(?!data:|#)", page)


def test_cells_are_those_of_the_campaign(checkout, replay, campaign: str) -> None:
    cells = pd.read_csv(checkout.root / "reports" / "cells.csv")
    assert set(cells["campaign"]) == {campaign}
    reference = cells[cells["kernel"] == "reference"]
    assert len(reference) and reference["time_us"].isna().all()
    assert cells.loc[cells["kernel"] == "cublaslt_fp8", "floor_us"].notna().all()


def test_every_claim_has_one_verdict(checkout, replay) -> None:
    from lab import registry

    verdicts = pd.read_csv(checkout.root / "reports" / "verdicts.csv")
    ids = registry.frozen_ids(checkout.root / "prereg")
    assert sorted(verdicts["claim"]) == sorted(ids)
    assert verdicts["verdict"].notna().all()
    # The made-up campaign times 4096 x 4096 at M=1 in FP8: that claim is judged, others are not.
    assert {"NOT_RUN"} < set(verdicts["verdict"])


def test_a_second_run_has_nothing_to_do(checkout, replay) -> None:
    done = checkout.ok(*REPLAY)
    assert "Nothing to be done" in done.stdout + done.stderr


def test_touching_or_changing_code_leaves_campaigns_alone(checkout, replay) -> None:
    for path in [*checkout.root.glob("workflow/**/*.*"), *checkout.root.glob("kernels/**/*.*")]:
        os.utime(path)
    module = checkout.root / "workflow" / "lab" / "rungs.py"
    text = module.read_text()
    module.write_text(text + "\n# changed\n")
    try:
        done = checkout.ok(*REPLAY)
    finally:
        module.write_text(text)
    assert "Nothing to be done" not in done.stdout + done.stderr
    assert checkout.snapshot("data") == replay[1]


def test_no_rule_has_an_output_under_data(repository: Path, checkout, replay) -> None:
    rules = "".join(path.read_text() for path in (repository / "workflow" / "rules").glob("*.smk"))
    outputs = re.findall(r"^( *)output:\n((?:\1 +.*\n)+)", rules, flags=re.M)
    assert len(outputs) >= 8
    assert not [block for _, block in outputs if re.search(r"data/|CAMPAIGNS|REPLAYED", block)]
    table = checkout.ok("--summary", "all", *REPLAY).stdout.splitlines()
    files = [line.split("\t")[0] for line in table[1:]]
    assert "reports/index.html" in files
    assert not [file for file in files if file.startswith("data")]


def test_a_campaign_by_its_id(checkout, replay, campaign: str) -> None:
    done = checkout.ok("-n", "--config", f"campaign={campaign}")
    assert f"replaying {campaign}" in done.stderr
    missing = f"{campaign[:-12]}{'0' * 12}"
    refused = checkout.run("-n", "--config", f"campaign={missing}")
    assert refused.returncode == 1 and campaign in refused.stderr


def test_without_any_campaign_the_report_says_not_run(new_checkout) -> None:
    bare = new_checkout(campaigns=False)
    done = bare.ok(*REPLAY)
    assert "the report says NOT_RUN" in done.stderr
    assert "NOT_RUN" in (bare.root / "reports" / "index.html").read_text()
    assert len(pd.read_csv(bare.root / "reports" / "cells.csv")) == 0
    refused = bare.run("r0_instrument", *REPLAY)
    assert refused.returncode == 1 and "R0 has not been measured" in refused.stderr


def test_pack_here_and_import_there(checkout, replay, campaign: str, new_checkout) -> None:
    archive = checkout.root.parent / "campaign.tar.gz"
    done = checkout.ok("--cores", "1", "pack_campaign", "--config", f"archive={archive}")
    assert str(archive) in done.stderr
    there = new_checkout(campaigns=False)
    there.ok("--cores", "1", "import_campaign", "--config", f"archive={archive}")
    digests = [
        {name: sha for name, (sha, _) in place.snapshot("data/campaigns").items()}
        for place in (checkout, there)
    ]
    assert digests[0] == digests[1] and len(digests[0]) == 4
    assert f"replaying {campaign}" in there.ok("-n").stderr


def test_a_damaged_archive_is_refused_and_leaves_nothing(checkout, replay, new_checkout) -> None:
    archive = checkout.root.parent / "damaged.tar.gz"
    checkout.ok("--cores", "1", "pack_campaign", "--config", f"archive={archive}")
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)
    there = new_checkout(campaigns=False)
    done = there.run("--cores", "1", "import_campaign", "--config", f"archive={archive}")
    assert done.returncode == 1 and "CampaignError" in done.stderr
    assert not list((there.root / "data").glob("campaigns/*"))


def test_packing_needs_a_name(checkout) -> None:
    done = checkout.run("--cores", "1", "pack_campaign")
    assert done.returncode == 1 and "archive=FILE.tar.gz" in done.stderr
