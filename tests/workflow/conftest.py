"""A copy of the repository in which the workflow can run, be tampered with and be killed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import recorded

from lab import records, source

NOT_COPIED = (
    ".git", ".venv", ".work", ".snakemake", "__pycache__", ".pytest_cache", ".ruff_cache",
    ".hypothesis", ".benchmarks", "build", "*.egg-info",
)  # fmt: skip


@dataclass(frozen=True)
class Checkout:
    """A private copy of the repository."""

    root: Path

    def command(self, *arguments: str) -> list[str]:
        """Snakemake as a user would call it, on this Python."""
        return [sys.executable, "-m", "snakemake", *arguments]

    @property
    def environment(self) -> dict[str, str]:
        """The environment less what this test run put into it: the workflow finds its modules by itself."""
        return {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and k[:6] != "PYTEST"}

    def run(self, *arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Run Snakemake here; stdout and stderr are kept apart."""
        return subprocess.run(
            self.command(*arguments),
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def ok(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Snakemake and fail the test with its words when it fails."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def git(self, *arguments: str) -> None:
        """Run git here as somebody."""
        who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
        subprocess.run(
            ["git", *who, *arguments], cwd=self.root, check=True, capture_output=True, text=True
        )

    def snapshot(self, folder: str) -> dict[str, tuple[str, int]]:
        """SHA-256 and time of change of every file under a folder."""
        return {
            path.relative_to(self.root).as_posix(): (
                hashlib.sha256(path.read_bytes()).hexdigest(),
                path.stat().st_mtime_ns,
            )
            for path in sorted((self.root / folder).rglob("*"))
            if path.is_file()
        }

    def record(self, **header: object) -> str:
        """Add a made-up campaign of an "H200" that followed the frozen protocol; gives its id."""
        protocol = (self.root / "prereg" / "protocol.json").read_bytes()
        frozen = json.loads(protocol)
        head = json.loads((self.root / "prereg" / "HEAD.json").read_text())["head"]
        device = recorded.header()["device"] | {"name": "NVIDIA H200"}
        known = {
            "device": device,
            "source": source.describe(self.root),
            "protocol_sha256": hashlib.sha256(protocol).hexdigest(),
            "prereg_head": head,
            "seed": frozen["seed"],
        }
        partial = recorded.journal(self.root / ".work" / "partial", ms=(), **(known | header))
        for m in (1, 8):
            partial.append_point(f"q_o_proj/M{m}", **recorded.planned_point(frozen, m, seed=m))
        return records.finalise(partial, self.root / "data").name


@pytest.fixture(scope="session")
def new_checkout(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Checkout]:
    """Make a copy of the repository, with the cubins that were compiled here (the build checks their hashes).

    Without campaigns it has no report either.
    """
    cubins = repository / ".work" / "cache" / "cubins"

    def make(*, campaigns: bool = True) -> Checkout:
        root = tmp_path_factory.mktemp("checkout") / "qgemm-mx"
        shutil.copytree(repository, root, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        if not campaigns:
            for folder in ("data/campaigns", "reports"):
                shutil.rmtree(root / folder, ignore_errors=True)
        if cubins.is_dir():
            shutil.copytree(cubins, root / ".work" / "cache" / "cubins")
        return Checkout(root)

    return make


@pytest.fixture(scope="module")
def checkout(new_checkout: Callable[..., Checkout]) -> Checkout:
    """A copy whose only campaign is made up, with a history in which the freeze comes before it and the kernels."""
    made = new_checkout(campaigns=False)
    made.git("init", "-q")
    made.git("add", ".", ":!kernels/qgemm_mx/cuda")
    made.git("commit", "-q", "-m", "freeze")
    made.git("add", "kernels")
    made.git("commit", "-q", "-m", "kernels")
    made.record()
    made.git("add", "data")
    made.git("commit", "-q", "-m", "a campaign")
    return made
