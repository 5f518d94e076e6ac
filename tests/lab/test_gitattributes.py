"""A clone has the bytes of the commit, whatever line endings the cloner's git prefers: every digest is over bytes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
CODE, HASHED = b"a = 1\nb = 2\n", b"{}\r\n{}\n"
FILES = {
    "Snakefile": CODE,
    "workflow/lab/a.py": CODE,
    "kernels/qgemm_mx/cuda/k.cu": CODE,
    "pyproject.toml": CODE,
    "tests/lab/sentences.txt": CODE,
    "prereg/claims/r0.json": HASHED,
    "prereg/shapes.json": CODE,
    "data/campaigns/x/campaign.json": CODE,
    "data/campaigns/x/samples.parquet": b"PAR1\n\r\n\0",
    "reports/index.html": HASHED,
    "reports/cells.csv": CODE,
}


def _git(folder: Path, *arguments: str) -> None:
    settings = ["user.name=t", "user.email=t@example.org", "commit.gpgsign=false"]
    options = [part for setting in settings for part in ("-c", setting)]
    subprocess.run(
        ["git", "-C", str(folder), *options, *arguments], check=True, capture_output=True
    )


@pytest.mark.parametrize("setting", ["core.autocrlf=true", "core.eol=crlf", "core.autocrlf=input"])
def test_a_clone_has_the_bytes_of_the_commit(tmp_path: Path, setting: str) -> None:
    source, clone = tmp_path / "source", tmp_path / "clone"
    for name, data in FILES.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    shutil.copy(REPO / ".gitattributes", source)
    _git(tmp_path, "init", "-q", str(source))
    _git(source, "-c", setting, "add", "-A")
    _git(source, "commit", "-q", "-m", "one")
    _git(tmp_path, "clone", "-q", "-c", setting, str(source), str(clone))
    assert {name: (clone / name).read_bytes() for name in FILES} == FILES
