"""Rungs say what they lack, and the Snakefile has exactly their targets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab import protocol, rungs, select


def test_each_rung_has_its_target_in_the_snakefile(repository: Path) -> None:
    rules = re.findall(r"^rule (\w+):", (repository / "Snakefile").read_text(), flags=re.M)
    assert [r for r in rules if re.match(r"r\d_", r)] == [r.target for r in rungs.RUNGS]


@pytest.mark.parametrize("rung", [r.id for r in rungs.RUNGS])
def test_an_empty_repository_lacks_everything(tmp_path: Path, rung: str) -> None:
    with pytest.raises(rungs.NotMeasured) as refused:
        rungs.require(rung, tmp_path)
    text = str(refused.value)
    assert text.startswith(f"{rung} has not been measured") and "\n" not in text
    for what in rungs.rung(rung).needs.values():
        assert what in text


def test_a_part_has_the_target_of_its_rung_and_a_protocol_of_its_own() -> None:
    targets = {rung.id: rung.target for rung in rungs.RUNGS}
    assert {part: select.MEASURED[part] for part in rungs.PARTS} == {"R2b": targets["R2"]}
    assert {part: protocol.file_of(part) for part in rungs.PARTS} == {
        "R2b": "prereg/protocol_r2b.json"
    }
    assert [rungs.rung_of(name) for name in ("R0", "R2", "R2b")] == ["R0", "R2", "R2"]


def test_a_rung_with_all_it_needs_lacks_nothing(tmp_path: Path) -> None:
    for glob in rungs.rung("R2").needs:
        path = tmp_path / glob.replace("*", "x")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert rungs.missing("R2", tmp_path) == []
    rungs.require("R2", tmp_path)
