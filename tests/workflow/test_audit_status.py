"""`snakemake --cores 1 audit` prints the table and ends with a status of its own; the next run is not in its way."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab import audit

AUDIT = ("--cores", "1", "audit", "--config", "measure=never")


@contextmanager
def edited(path: Path, old: bytes, new: bytes):
    """One place of a file changed, and put back."""
    before = path.read_bytes()
    assert old in before
    path.write_bytes(before.replace(old, new, 1))
    try:
        yield
    finally:
        path.write_bytes(before)


@pytest.fixture(scope="module", autouse=True)
def reported(checkout) -> None:
    """The report of the campaign, and its numbers in README.md."""
    checkout.ok("--cores", "2", "--config", "measure=never")
    checkout.ok("--cores", "1", "readme", "--config", "measure=never")


def assert_status(checkout, status: int, word: str, *named: str) -> str:
    done = checkout.run(*AUDIT)
    assert done.returncode == status, done.stdout + done.stderr
    assert f"audit: {word} (exit status {status})" in done.stdout
    for name in named:
        assert name in done.stdout
    assert not list((checkout.root / ".snakemake" / "locks").glob("*"))
    return done.stdout


def test_all_is_well(checkout) -> None:
    text = assert_status(checkout, 0, "OK")
    head = text.splitlines()[0]
    assert "predicted" in head and "observed" in head and "verdict" in head


def test_an_edited_claim_is_tampered(checkout) -> None:
    path = sorted((checkout.root / "prereg" / "claims").glob("*.json"))[0]
    with edited(path, b'"q50":4', b'"q50":5'):
        assert_status(checkout, 3, "TAMPERED", f"prereg/claims/{path.name}")
    assert_status(checkout, 0, "OK")


def test_a_removed_tail_of_the_chain_is_tampered(checkout) -> None:
    path = checkout.root / "prereg" / "manifest.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    whole = path.read_bytes()
    path.write_bytes(b"".join(lines[:-1]))
    try:
        assert_status(checkout, 3, "TAMPERED", "prereg/")
    finally:
        path.write_bytes(whole)


def test_an_edited_campaign_is_tampered(checkout) -> None:
    (path,) = (checkout.root / "data" / "campaigns").glob("*/campaign.json")
    time = json.loads(path.read_text())["cells"][0]["time"]["time_us"]
    with edited(path, str(time).encode(), str(time * 0.9).encode()):
        assert_status(checkout, 3, "TAMPERED", path.parent.name)


def test_a_campaign_that_cannot_be_read_is_tampered(checkout) -> None:
    (path,) = (checkout.root / "data" / "campaigns").glob("*/campaign.json")
    with edited(path, b"{", b"["):
        assert_status(checkout, 3, "TAMPERED", path.parent.name)


def test_an_edited_table_is_invalid(checkout) -> None:
    checkout.ok("reports/verdicts.csv", "--cores", "1", "--config", "measure=never")
    path = checkout.root / "reports" / "verdicts.csv"
    with edited(path, b",NOT_RUN,", b",HIT,"):
        assert_status(checkout, 4, "INVALID", "reports/verdicts.csv")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("reports/index.html", b"NOT_RUN", b"HIT"),
        ("reports/figures/fig2_floor.svg", b"</svg>", b" </svg>"),
        ("reports/cells.csv", b"passed", b"failed"),
        ("README.md", b" NOT_RUN", b" HIT"),
    ],
)
def test_an_edited_page_figure_table_or_readme_is_invalid(
    checkout, name: str, old: bytes, new: bytes
) -> None:
    with edited(checkout.root / name, old, new):
        assert_status(checkout, 4, "INVALID", name)


def test_missing_history_is_unverifiable(checkout) -> None:
    git, aside = checkout.root / ".git", checkout.root.parent / "history"
    shutil.move(git, aside)
    try:
        assert_status(checkout, 5, "UNVERIFIABLE", "manifest.jsonl")
        # The status belongs to the audit: a failure of something else, later, ends with 1.
        refused = checkout.run("--cores", "1", "pack_campaign")
        assert refused.returncode == 1
    finally:
        shutil.move(aside, git)


def test_the_committed_repository_audits_ok(repository: Path) -> None:

    state = subprocess.run(
        ["git", "-C", repository, "status", "--porcelain"], capture_output=True, text=True
    )
    shallow = (repository / ".git" / "shallow").exists()
    if state.returncode or state.stdout or shallow or not (repository / ".git").exists():
        pytest.skip("not a clean, full clone")
    found = audit.judge(repository)
    result = audit.audit(repository, found, shown=repository / "reports" / "verdicts.csv")
    assert result.status == "OK", [str(problem) for problem in result.problems]


def test_the_full_audit_has_a_line_for_each_claim(checkout) -> None:
    short = assert_status(checkout, 0, "OK")
    done = checkout.run(*AUDIT, "audit=full")
    assert done.returncode == 0, done.stdout + done.stderr
    claims = [
        claim["id"]
        for path in (checkout.root / "prereg" / "claims").glob("*.json")
        for claim in json.loads(path.read_text())["claims"]
    ]
    first = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    assert set(claims) <= first
    assert len(short.splitlines()) < len(claims)
    assert "NOT_RUN, by family" in short and "NOT_RUN, by family" not in done.stdout
