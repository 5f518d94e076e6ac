"""Which code a campaign measured: a digest of the source files that can be recomputed from any commit.

A machine that measures may have no git. The digest is taken from the files as they are; whoever has
the history recomputes it from a commit's objects, and so proves that this commit was measured,
whatever was stated.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from lab import files
from lab.select import KERNEL_SOURCES, kernels_digest

COMMIT_VARIABLE = "QGEMM_MX_COMMIT"
TREES = Path("data", "measured_trees.json")  # tree digest -> commit
# What decides a measurement. Data, reports, tests and prose are left out: they may change afterwards.
FILES = ("Snakefile", "pyproject.toml", "environment.yml")
FILE_PATTERN = re.compile(r"requirements[^/]*\.txt")
FOLDERS = ("workflow", "kernels", "prereg")
SKIPPED_PARTS = ("__pycache__", ".ruff_cache", ".snakemake")
SKIPPED_SUFFIXES = (".pyc", ".egg-info")


class SourceError(Exception):
    """The repository has no source files, or git said something that is not understood."""


def is_source(path: str) -> bool:
    """Whether a path (relative, `/` between parts) belongs to the digest."""
    parts = path.split("/")
    if any(p in SKIPPED_PARTS or p.endswith(SKIPPED_SUFFIXES) for p in parts):
        return False
    if len(parts) == 1:
        return path in FILES or bool(FILE_PATTERN.fullmatch(path))
    return parts[0] in FOLDERS


def tree_digest(repo: Path) -> str:
    """SHA-256 over the sorted (path, SHA-256 of the bytes) of the source files on disk. SourceError when none.

    Editors' hidden files count too: where git would ignore a file that lies here, `matches_commit` says no.
    """
    repo = Path(repo)
    found = [repo / name for name in os.listdir(repo)]
    found += [p for folder in FOLDERS for p in (repo / folder).rglob("*")]
    paths = {p.relative_to(repo).as_posix(): p for p in found if p.is_file()}
    return _digest({path: _sha256(p.read_bytes()) for path, p in paths.items() if is_source(path)})


def commit_digest(repo: Path, commit: str) -> str | None:
    """The digest of a commit's source files, from git objects alone; None where git or the commit is not at hand."""
    commit = commit.strip()
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise SourceError(f"{commit!r} is no commit: 40 hex digits are needed")
    contents = _contents(repo, commit, is_source)
    if contents is None:
        return None
    return _digest({path: _sha256(data) for path, data in contents.items()})


def commit_kernels_digest(repo: Path, commit: str) -> str | None:
    """`lab.select.kernels_digest` of a commit, from git objects alone; None where it is not at hand."""

    def is_kernel(path: str) -> bool:
        inside = PurePosixPath(path.removeprefix("kernels/"))
        return path.startswith("kernels/") and any(
            len(inside.parts) == pattern.count("/") + 1 and inside.match(pattern)
            for pattern in KERNEL_SOURCES
        )

    contents = _contents(repo, commit, is_kernel)
    if contents is None:
        return None
    return files.digest_of({p.removeprefix("kernels/"): data for p, data in contents.items()})


def _contents(repo: Path, commit: str, wanted: Callable[[str], bool]) -> dict[str, bytes] | None:
    """Path -> bytes of a commit's files; None where git or the commit is not at hand."""
    # --full-tree: paths from the repository's root, wherever git is called. -z: names unquoted.
    listing = _git(repo, "ls-tree", "-r", "-z", "--full-tree", commit)
    if listing is None:
        return None
    blobs = {}
    for line in listing.decode().split("\0"):
        if not line:
            continue
        head, path = line.split("\t", 1)
        _mode, kind, name = head.split(" ")
        if kind == "blob" and wanted(path):
            blobs[path] = name
    found = _read_blobs(repo, blobs.values())
    return {path: found[name] for path, name in blobs.items()}


def describe(repo: Path) -> dict[str, Any]:
    """What a campaign records as `source`: commit, dirty, tree_digest, stated_commit, kernels_digest.

    `commit` and `dirty` are null where there is no git; `stated_commit` is what QGEMM_MX_COMMIT says, unverified.
    """
    repo = Path(repo)
    stated = os.environ.get(COMMIT_VARIABLE) or None
    if stated is not None and not re.fullmatch(r"[0-9a-f]{40}", stated):
        raise SourceError(f"{COMMIT_VARIABLE}={stated!r} is no commit: 40 hex digits are needed")
    commit = dirty = None
    # A repository around this one would answer for us: only one whose root is `repo` counts.
    top = _git(repo, "rev-parse", "--show-toplevel")
    if top is not None and Path(top.decode().rstrip("\n")).resolve() == repo.resolve():
        head = _git(repo, "rev-parse", "--verify", "HEAD")
        status = _git(repo, "status", "--porcelain", "--untracked-files=normal")
        if head is not None and status is not None:
            commit = head.decode().strip()
            dirty = bool(status.strip())
    return {
        "commit": commit,
        "dirty": dirty,
        "tree_digest": tree_digest(repo),
        "stated_commit": stated,
        "kernels_digest": kernels_digest(repo),
    }


def matches_commit(repo: Path, commit: str, digest: str) -> bool | None:
    """Whether a commit's source files have this digest; None where that cannot be known (no git, no such commit)."""
    found = commit_digest(repo, commit)
    return None if found is None else found == digest


def measured_commit(repo: Path, said: Mapping[str, Any]) -> str | None:
    """The commit whose source files a campaign measured; None where none is known.

    It is the recorded or stated one, but for a dirty tree: there it is the one that TREES names for the digest of that
    tree. A machine may get the files of a commit without its history, and its git then calls them changes of an older
    commit. The audit recomputes the digest from the commit that is named, as for one that was stated.
    """
    if not said.get("dirty"):
        return said.get("commit") or said.get("stated_commit")
    named = Path(repo, TREES)
    return files.read_json(named).get(said["tree_digest"]) if named.is_file() else None


def _digest(files: Mapping[str, str]) -> str:
    if not files:
        raise SourceError("no source files: this is not the root of the repository")
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(f"{path}\0{files[path]}\n".encode())
    return total.hexdigest()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git(repo: Path, *arguments: str, stdin: bytes | None = None) -> bytes | None:
    # GIT_DIR and its kin, set inside a hook, would make git speak of another repository.
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    try:
        done = subprocess.run(
            # Replacement objects could show another commit under the same name.
            ["git", "--no-replace-objects", "-C", str(repo), *arguments],
            env=clean,
            input=stdin,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def _read_blobs(repo: Path, names: Iterable[str]) -> dict[str, bytes]:
    wanted = sorted(set(names))
    out = _git(repo, "cat-file", "--batch", stdin="".join(f"{n}\n" for n in wanted).encode())
    if out is None:
        raise SourceError("git cat-file failed")
    contents, at = {}, 0
    for name in wanted:
        end = out.index(b"\n", at)
        fields = out[at:end].decode().split(" ")
        if len(fields) != 3 or fields[1] != "blob":
            raise SourceError(f"git has no blob {name}: {' '.join(fields)}")
        size = int(fields[2])
        contents[name] = out[end + 1 : end + 1 + size]
        at = end + 1 + size + 1
    return contents
