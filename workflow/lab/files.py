"""Files of the workflow: written under a temporary name first, so that a reader never meets half of one."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any


def write_text(path: str | Path, text: str) -> None:
    """Write a text file at once, with its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(scratch, 0o644)  # mkstemp makes private files; reports are for everybody
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file at once. NaN and infinity are refused."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_pickle(path: str | Path, value: Any) -> None:
    """A value for a later rule of the same run, under a temporary name first. Only what this pipeline wrote is read."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_bytes(pickle.dumps(value))
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def read_pickle(path: str | Path) -> Any:
    """What `write_pickle` wrote in this run."""
    return pickle.loads(Path(path).read_bytes())


def read_json(path: str | Path) -> Any:
    """Read a JSON file."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def sha256(path: str | Path) -> str:
    """Hex SHA-256 of a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def digest(root: str | Path, patterns: Iterable[str]) -> str:
    """SHA-256 over the names and bytes of the files under `root` that match some patterns; order does not matter."""
    root = Path(root)
    found = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
    return digest_of({path.relative_to(root).as_posix(): path.read_bytes() for path in found})


def digest_of(contents: Mapping[str, bytes]) -> str:
    """SHA-256 over names (`/` between parts) and bytes, in the order of the parts of the names."""
    total = hashlib.sha256()
    for name in sorted(contents, key=PurePosixPath):
        total.update(name.encode() + b"\0")
        total.update(hashlib.sha256(contents[name]).digest())
    return total.hexdigest()
