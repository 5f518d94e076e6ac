"""The committed tables and page are what the recorded campaigns give when they are replayed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

TABLES = (
    "cells.csv", "verdicts.csv", "r1_causes.csv", "r1_experiments.csv", "r1_interactions.csv", "r1_production.csv",
    "r2_ablation.csv", "r2_bars.csv", "r2_chain.csv", "r2_decode.csv",
    "r2b_ablation.csv", "r2b_bars.csv", "r2b_cells.csv", "r2b_crossover.csv", "r2b_power.csv",
)  # fmt: skip


@pytest.fixture(scope="module")
def replayed(repository: Path, new_checkout) -> Path:
    """reports/ of a fresh replay of the newest recorded campaign."""
    if not (repository / "reports" / "cells.csv").exists():
        pytest.skip("no report is committed yet")
    fresh = new_checkout()
    shutil.rmtree(fresh.root / "reports")
    fresh.ok("--cores", "2", "--config", "measure=never")
    return fresh.root / "reports"


@pytest.mark.parametrize("table", TABLES)
def test_tables(repository: Path, replayed: Path, table: str) -> None:
    committed = (repository / "reports" / table).read_text().splitlines()
    fresh = (replayed / table).read_text().splitlines()
    differ = sorted(set(committed) ^ set(fresh))
    assert committed == fresh, (
        f"{len(differ)} rows differ, such as {differ[:2]}: run snakemake --cores 2"
    )


def test_figures(repository: Path, replayed: Path) -> None:
    names = [
        {p.relative_to(root).as_posix() for p in (root / "figures").rglob("*.svg")}
        for root in (repository / "reports", replayed)
    ]
    assert names[0] == names[1]
