"""The numbers of README.md come from the committed tables, block by block."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import synthetic

from lab import cells, files, readme, select


def test_the_committed_readme_is_current(repository: Path) -> None:
    tables = repository / "reports"
    if not (tables / "cells.csv").exists():
        pytest.skip("no report is committed yet")
    blocks = readme.blocks(cells.read(tables / "cells.csv"), pd.read_csv(tables / "verdicts.csv"))
    text = (repository / "README.md").read_text()
    assert readme.fill(text, blocks) == text, "run: snakemake --cores 1 readme"


def test_links_of_the_readme_lead_somewhere(repository: Path) -> None:
    import re

    text = (repository / "README.md").read_text()
    recorded = select.recorded_campaigns(repository)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if target.startswith("reports/figures/") and not recorded:
            continue  # there is nothing to draw yet
        assert (repository / target).exists(), target


def test_rung_table_counts_every_claim_once() -> None:
    verdicts = synthetic.verdicts()
    rows = [line for line in readme.rung_table(verdicts).splitlines() if line.startswith("| R")]
    counts = [
        int(word)
        for row in rows
        for word in row.split("|")[-2].replace(",", " ").split()
        if word.isdigit()
    ]
    assert len(rows) == 4
    assert sum(counts) == len(verdicts)


def test_headline_holds_baselines_and_never_the_reference() -> None:
    text = readme.headline(synthetic.cells())
    assert "`cublaslt_fp8`" in text and synthetic.CAMPAIGN in text
    assert "reference" not in text and "stream_read" not in text


def test_headline_is_the_geometric_mean_of_floor_over_time() -> None:
    frame = synthetic.cells(ms=[1])
    frame = frame[(frame["kernel"] == "cublaslt_bf16") & (frame["regime"] == "cold_graph")][
        :2
    ].copy()
    frame["floor_us"], frame["time_us"] = [9.0, 4.0], [10.0, 10.0]
    assert "| `cublaslt_bf16` | bf16 | 60 % (40 to 90) | 2 |" in readme.headline(frame)


def test_without_cells_the_headline_says_so() -> None:
    assert readme.headline(cells.table([])) == "No campaign has been recorded yet."


def test_fill_replaces_the_content_alone() -> None:
    text = "a\n<!-- one -->\nold\nlines\n<!-- /one -->\nb\n"
    filled = readme.fill(text, {"one": "new | \\1"})
    assert filled == "a\n<!-- one -->\nnew | \\1\n<!-- /one -->\nb\n"
    assert readme.fill(filled, {"one": "new | \\1"}) == filled


@pytest.mark.parametrize(
    "text", ["no marker", "<!-- one -->\nnot closed", "<!-- other -->\n<!-- /other -->"]
)
def test_markers_that_do_not_match_are_refused(text: str) -> None:
    with pytest.raises(readme.ReadmeError):
        readme.fill(text, {"one": "x"})


def test_update_writes_only_when_something_changed(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("<!-- rungs -->\n<!-- /rungs -->\n<!-- headline -->\n<!-- /headline -->\n")
    tables = {"cells": synthetic.cells(ms=[1]), "verdicts": synthetic.verdicts()}
    assert readme.update(path, **tables)
    assert not readme.update(path, **tables)


def test_the_minutes_of_the_recorded_campaign_are_its_attempts(repository: Path) -> None:
    recorded = select.recorded_campaigns(repository, "R0")
    if not recorded:
        pytest.skip("no campaign is recorded yet")
    campaign = files.read_json(repository / select.CAMPAIGNS / recorded[-1].id / "campaign.json")
    minutes = round(sum(a["seconds"] or 0 for a in campaign["attempts"]) / 60)
    assert (
        f"the recorded one took {minutes} minutes of measuring"
        in (repository / "README.md").read_text()
    )
