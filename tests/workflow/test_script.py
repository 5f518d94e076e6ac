"""What a script leaves in its log, and what the user reads when it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import files, script


def test_lines_go_to_the_log(tmp_path: Path, capsys) -> None:
    with script.logged(tmp_path / "logs" / "a.log") as log:
        log("one")
    assert (tmp_path / "logs" / "a.log").read_text() == "one\n"
    assert capsys.readouterr() == ("", "")


def test_progress_goes_to_the_terminal_too(tmp_path: Path, capsys) -> None:
    with script.logged(tmp_path / "a.log", terminal=True) as log:
        log("3 cells left")
    assert capsys.readouterr().err == "3 cells left\n"


def test_a_failure_is_one_sentence_with_the_traceback_in_the_log(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as ended, script.logged(tmp_path / "a.log"):
        raise ValueError("N=2881 is not a multiple of 8")
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert (
        said.startswith("ValueError: N=2881 is not a multiple of 8\n") and "Traceback" not in said
    )
    assert "Traceback" in (tmp_path / "a.log").read_text()


def test_an_interrupt_says_how_to_go_on(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as ended, script.logged(tmp_path / "a.log"):
        raise KeyboardInterrupt
    assert ended.value.code == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_python_path_keeps_what_the_user_has(monkeypatch) -> None:
    import os

    monkeypatch.setenv("PYTHONPATH", "/theirs")
    script.prepend_python_path(["/ours"])
    assert os.environ["PYTHONPATH"] == os.pathsep.join(["/ours", "/theirs"])
    monkeypatch.delenv("PYTHONPATH")
    script.prepend_python_path(["/ours"])
    assert os.environ["PYTHONPATH"] == "/ours"


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(ValueError):
        files.write_json(path, {"a": float("nan")})
    assert files.read_json(path) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]


def test_digest_sees_names_and_bytes_and_no_order(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("1")
    (tmp_path / "b.cu").write_text("2")
    first = files.digest(tmp_path, ["*.cu"])
    assert files.digest(tmp_path, ["b.cu", "a.cu", "*.cu"]) == first
    (tmp_path / "a.cu").rename(tmp_path / "c.cu")
    renamed = files.digest(tmp_path, ["*.cu"])
    (tmp_path / "c.cu").write_text("3")
    assert len({first, renamed, files.digest(tmp_path, ["*.cu"])}) == 3


def test_a_refusal_is_its_sentence_and_nothing_more() -> None:
    with pytest.raises(SystemExit) as ended, script.one_sentence(KeyError, ValueError):
        raise ValueError("no such campaign")
    assert ended.value.code == "Error: no such campaign"  # printed to stderr; exit status 1
    assert ended.value.__suppress_context__
    with pytest.raises(TypeError), script.one_sentence(ValueError):
        raise TypeError("a defect keeps its traceback")
