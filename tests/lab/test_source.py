"""Which code was measured: the digest from disk and the digest from git objects are one, and tell edits apart."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from lab import select, source

FILES = {
    "Snakefile": "rule all:\n",
    "pyproject.toml": "[project]\n",
    "requirements.txt": "numpy\n",
    "requirements-gpu.txt": "cupy\n",
    "workflow/lab/a.py": "a = 1\n",
    "workflow/lab/ümlaut name.json": "{}\n",
    "kernels/qgemm_mx/cuda/k.cu": "// k\n",
    "prereg/protocol.json": "{}",
    "data/campaigns/x/campaign.json": "{}",
    "reports/index.html": "<p>",
    "tests/test_a.py": "",
    "README.md": "# x\n",
    ".gitignore": "__pycache__/\nkernels/*.egg-info/\n",
}
PROSE = ("data/campaigns/x/campaign.json", "reports/index.html", "tests/test_a.py", "README.md")


def _git(repo, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(repo), *identity, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repo(tmp_path):
    root = tmp_path / "repo"
    for path, text in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    _git(tmp_path, "init", "-q", str(root))
    _git(root, "add", "-A")
    _git(root, "commit", "-q", "-m", "one")
    return root


@pytest.fixture(autouse=True)
def nothing_stated(monkeypatch):
    monkeypatch.delenv(source.COMMIT_VARIABLE, raising=False)


def test_disk_and_commit_have_one_digest(repo):
    commit = _git(repo, "rev-parse", "HEAD")
    digest = source.tree_digest(repo)
    assert source.commit_digest(repo, commit) == digest
    assert source.matches_commit(repo, commit, digest) is True
    assert source.matches_commit(repo, commit, "0" * 64) is False
    assert source.describe(repo) == {
        "commit": commit,
        "dirty": False,
        "tree_digest": digest,
        "stated_commit": None,
        "kernels_digest": select.kernels_digest(repo),
    }


@pytest.mark.parametrize("path", [p for p in FILES if p not in PROSE and p != ".gitignore"])
def test_each_source_file_counts(repo, path):
    commit, digest = _git(repo, "rev-parse", "HEAD"), source.tree_digest(repo)
    (repo / path).write_text(FILES[path] + " ")
    changed = source.tree_digest(repo)
    assert changed != digest
    assert source.matches_commit(repo, commit, changed) is False
    assert source.describe(repo)["dirty"] is True
    _git(repo, "commit", "-q", "-am", "two")
    assert source.matches_commit(repo, _git(repo, "rev-parse", "HEAD"), changed) is True
    assert source.matches_commit(repo, commit, digest) is True, (
        "the old commit is still what it was"
    )
    (repo / path).unlink()
    assert source.tree_digest(repo) not in (changed, digest)


def test_renaming_a_file_and_moving_bytes_between_files_count(repo):
    digest = source.tree_digest(repo)
    (repo / "workflow/lab/a.py").rename(repo / "workflow/lab/b.py")
    assert source.tree_digest(repo) != digest


@pytest.mark.parametrize("path", PROSE)
def test_data_reports_tests_and_prose_do_not_count(repo, path):
    digest = source.tree_digest(repo)
    (repo / path).write_text("changed")
    (repo / "workflow/__pycache__").mkdir(exist_ok=True)
    (repo / "workflow/__pycache__/a.cpython-311.pyc").write_text("x")
    (repo / "kernels/qgemm_mx.egg-info").mkdir(exist_ok=True)
    (repo / "kernels/qgemm_mx.egg-info/PKG-INFO").write_text("x")
    assert source.tree_digest(repo) == digest


def test_a_copy_without_git_has_the_digest_and_only_a_stated_commit(repo, tmp_path, monkeypatch):
    commit, digest = _git(repo, "rev-parse", "HEAD"), source.tree_digest(repo)
    copy = tmp_path / "copy"
    shutil.copytree(repo, copy, ignore=shutil.ignore_patterns(".git"))
    monkeypatch.setenv(source.COMMIT_VARIABLE, commit)
    assert source.describe(copy) == {
        "commit": None,
        "dirty": None,
        "tree_digest": digest,
        "stated_commit": commit,
        "kernels_digest": select.kernels_digest(repo),
    }
    assert source.matches_commit(copy, commit, digest) is None, "no history here: unknown, not true"
    assert source.matches_commit(repo, commit, digest) is True
    monkeypatch.setenv(source.COMMIT_VARIABLE, "main")
    with pytest.raises(source.SourceError, match="QGEMM_MX_COMMIT='main'"):
        source.describe(copy)


def test_a_repository_around_this_one_does_not_answer_for_it(repo, tmp_path):
    inner = repo / "inner"
    shutil.copytree(repo, inner, ignore=shutil.ignore_patterns(".git", "inner"))
    assert source.describe(inner)["commit"] is None


def test_without_the_git_program_nothing_is_known(repo, monkeypatch):
    commit, digest = _git(repo, "rev-parse", "HEAD"), source.tree_digest(repo)
    monkeypatch.setenv("PATH", "")
    assert source.describe(repo)["commit"] is None
    assert source.describe(repo)["tree_digest"] == digest
    assert source.matches_commit(repo, commit, digest) is None


def test_an_unknown_commit_is_unknown_and_no_commit_is_an_error(repo):
    assert source.matches_commit(repo, "0" * 40, "0" * 64) is None
    for bad in ("HEAD", "", "--all", "g" * 40):
        with pytest.raises(source.SourceError, match="no commit"):
            source.matches_commit(repo, bad, "0" * 64)


def test_a_folder_without_sources_is_an_error(tmp_path):
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(source.SourceError, match="no source files"):
        source.tree_digest(tmp_path)


def test_a_dirty_tree_measured_the_commit_that_is_named_for_its_digest(repo):
    """A machine that got the files and an old history: its git calls them changes, the digest knows better."""
    (repo / "kernels" / "new.py").write_text("x = 1\n")
    said = source.describe(repo)
    assert said["dirty"] and source.measured_commit(repo, said) is None
    _git(repo, "add", "-A")
    _git(repo, "commit", "-qm", "new")
    later = _git(repo, "rev-parse", "HEAD")
    (repo / source.TREES).write_text(json.dumps({said["tree_digest"]: later}))
    assert source.measured_commit(repo, said) == later
    assert source.matches_commit(repo, later, said["tree_digest"])  # what the audit recomputes
    assert source.measured_commit(repo, {**said, "tree_digest": "0" * 64}) is None


def test_a_clean_or_stated_commit_is_the_measured_one(repo):
    said = source.describe(repo)
    assert source.measured_commit(repo, said) == said["commit"]
    assert (
        source.measured_commit(repo, {**said, "commit": None, "stated_commit": "a" * 40})
        == "a" * 40
    )
    assert source.measured_commit(repo, {**said, "commit": None}) is None
