"""Registry: freeze documents, and detect every later change.

``prereg/manifest.jsonl`` has one canonical line (RFC 8785) per freeze. A line holds the SHA-256
of each frozen file and of the line before it, so an edited byte or a rewritten line breaks the
chain; ``prereg/HEAD.json`` holds the count and the last hash, so a removed tail is seen. Someone
who rewrites HEAD.json as well is caught by history: every manifest that was ever committed must
be a prefix of the present one.

    python -m lab.registry freeze --note "R0 to R3" --access none prereg/claims/r0.json
    python -m lab.registry verify
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab import claims as claim_files
from lab.claims import Amendment, Claim, ClaimError, Forecast, canonical_bytes, parse_strict

MANIFEST = "manifest.jsonl"
HEAD = "HEAD.json"
ZEROS = "0" * 64
ACCESS = ("none", "pilot", "some", "all")
FOLDERS = ("claims", "forecasts", "amendments")  # every file here must be registered
LINE_KEYS = {
    "seq",
    "frozen_utc",
    "files",
    "claim_ids",
    "claim_count",
    "total_claims",
    "access",
    "previous",
    "note",
}


class RegistryError(ValueError):
    """A freeze is refused."""


@dataclass(frozen=True)
class Problem:
    """One finding. ``claims`` are the ids it touches; empty means that it touches all."""

    status: str  # TAMPERED, INVALID, UNREGISTERED or UNVERIFIABLE
    path: str
    reason: str
    claims: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.status}: {self.path}: {self.reason}"


@dataclass(frozen=True)
class History:
    """What the version history says; status OK, TAMPERED or UNVERIFIABLE."""

    status: str
    problems: tuple[Problem, ...] = ()


def sha256(data: bytes) -> str:
    """Hex SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def _lines(data: bytes) -> list[bytes]:
    return [line for line in data.split(b"\n") if line]


def parse_line(raw: bytes, where: str | Path) -> dict[str, Any]:
    """A manifest line with the keys and types that readers rely on. Raises ClaimError that says what is wrong."""

    def texts(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(v, str) for v in value)

    entry = parse_strict(raw, where)
    if not isinstance(entry, dict) or set(entry) != LINE_KEYS:
        raise ClaimError(where, [("(line)", f"keys are not {sorted(LINE_KEYS)}")])
    if not texts(entry["claim_ids"]):
        raise ClaimError(where, [("claim_ids", "not a list of ids")])
    files = entry["files"]
    if not isinstance(files, list) or not all(
        isinstance(f, dict) and texts([f.get("path"), f.get("sha256")]) for f in files
    ):
        raise ClaimError(where, [("files", "not a list of {path, sha256, bytes}")])
    return entry


def read_manifest(prereg_dir: str | Path) -> list[tuple[bytes, dict[str, Any]]]:
    """The lines of the manifest, raw and parsed. One that cannot be read is left out: `verify` reports it."""
    path = Path(prereg_dir) / MANIFEST
    found = []
    for raw in _lines(path.read_bytes()) if path.is_file() else []:
        try:
            found.append((raw, parse_line(raw, path)))
        except ClaimError:
            continue
    return found


def _entries(prereg_dir: Path) -> list[dict[str, Any]]:
    return [entry for _, entry in read_manifest(prereg_dir)]


def _kind(path: str) -> str:
    """claims, forecasts, amendments, or document."""
    folder = Path(path).parent.name
    return folder if folder in FOLDERS and path.endswith(".json") else "document"


def frozen_ids(prereg_dir: str | Path) -> tuple[str, ...]:
    """All claim ids of the manifest, in order of freezing."""
    return tuple(key for entry in _entries(Path(prereg_dir)) for key in entry["claim_ids"])


def frozen_files(prereg_dir: str | Path) -> dict[str, str]:
    """Path (from the repository root) to SHA-256, of every frozen file."""
    files = (file for entry in _entries(Path(prereg_dir)) for file in entry["files"])
    return {file["path"]: file["sha256"] for file in files}


def head(prereg_dir: str | Path) -> str | None:
    """SHA-256 of the manifest's last line; None before the first freeze."""
    path = Path(prereg_dir) / MANIFEST
    lines = _lines(path.read_bytes()) if path.exists() else []
    return sha256(lines[-1]) if lines else None


def _check_content(path: Path, name: str) -> list[str]:
    """Validate a file before it is frozen; gives the claim ids it registers."""
    match _kind(name):
        case "claims":
            return [claim.id for claim in claim_files.load(path)]
        case "amendments":
            return [claim_files.load_amendment(path).replacement.id]
        case "forecasts":
            claim_files.load_forecasts(path)
        case _ if path.suffix == ".json":
            parse_strict(path.read_bytes(), path)
    return []


def freeze(
    paths: Sequence[str | Path],
    prereg_dir: str | Path,
    note: str,
    access: str,
    now: datetime | None = None,
) -> dict[str, Any]:
    """Freeze files under one manifest line, and return the line.

    ``access`` says what data the authors had seen. Raises ``ClaimError`` for an invalid file and
    ``RegistryError`` for an id or a path that is frozen already, a file outside the repository, a
    registry that does not verify, or an empty note.
    """
    prereg_dir = Path(prereg_dir).resolve()
    root = prereg_dir.parent
    if access not in ACCESS:
        raise RegistryError(f"access={access!r} is not one of {', '.join(ACCESS)}")
    if not note.strip():
        raise RegistryError("note is empty; say what is frozen and why")
    if not paths:
        raise RegistryError("no file to freeze")
    broken = [problem for problem in verify(prereg_dir) if problem.status == "TAMPERED"]
    if broken:
        raise RegistryError("the registry does not verify:\n" + "\n".join(map(str, broken)))

    entries = _entries(prereg_dir)
    taken_paths, taken_ids = frozen_files(prereg_dir), set(frozen_ids(prereg_dir))
    originals = {key for key in taken_ids if "+" not in key}
    files, ids = [], []
    for path in sorted({Path(path).resolve() for path in paths}):
        if not path.is_relative_to(root):
            raise RegistryError(f"{path} lies outside the repository {root}")
        name = path.relative_to(root).as_posix()
        if name in taken_paths:
            raise RegistryError(f"{name} is frozen already; a change is a new amendment file")
        if path.name in (MANIFEST, HEAD) and path.parent == prereg_dir:
            raise RegistryError(f"{name} is the registry itself")
        new = _check_content(path, name)
        again = sorted(key for key in new if key in taken_ids or key in ids)
        if again:
            raise RegistryError(f"{name}: {again[0]} is frozen already ({len(again)} such ids)")
        ids += new
        data = path.read_bytes()
        files.append({"path": name, "sha256": sha256(data), "bytes": len(data)})
    originals |= {key for key in ids if "+" not in key}
    for key in ids:
        if key.partition("+")[0] not in originals:
            raise RegistryError(f"{key} amends {key.partition('+')[0]}, which was never frozen")

    path = prereg_dir / MANIFEST
    before = path.read_bytes() if path.exists() else b""
    line = {
        "seq": len(entries) + 1,
        "frozen_utc": (now or datetime.now(UTC)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "files": files,
        "claim_ids": ids,
        "claim_count": len(ids),
        "total_claims": len(taken_ids) + len(ids),
        "access": access,
        "previous": head(prereg_dir) or ZEROS,
        "note": note,
    }
    data = canonical_bytes(line)
    _write(path, before + data)
    _write(prereg_dir / HEAD, _head_bytes(line, data))
    return line


def _head_bytes(line: dict[str, Any], data: bytes) -> bytes:
    return canonical_bytes(
        {
            "count": line["seq"],
            "head": sha256(data.rstrip(b"\n")),
            "total_claims": line["total_claims"],
        }
    )


def verify(prereg_dir: str | Path) -> list[Problem]:
    """Every difference between the registry and the files it froze; empty when there is none.

    TAMPERED: an edited or missing file, a broken chain, a removed tail, a re-frozen id or path.
    UNREGISTERED: a file under claims, forecasts or amendments that no line lists.
    """
    prereg_dir = Path(prereg_dir).resolve()
    root = prereg_dir.parent
    manifest, head_file = prereg_dir / MANIFEST, prereg_dir / HEAD
    shown = manifest.relative_to(root).as_posix()
    problems: list[Problem] = []

    def tampered(path: str, reason: str, ids: Iterable[str] = ()) -> None:
        problems.append(Problem("TAMPERED", path, reason, tuple(ids)))

    lines = _lines(manifest.read_bytes()) if manifest.is_file() else []
    if not lines and head_file.exists():
        tampered(shown, "missing or empty, but HEAD.json counts freezes")
    if lines and manifest.read_bytes() != b"\n".join(lines) + b"\n":
        tampered(shown, "blank line, or no newline at the end")
    previous, seen_ids, seen_paths, last = ZEROS, set(), set(), None
    for number, raw in enumerate(lines, 1):
        where = f"{shown}:{number}"
        try:
            entry = parse_line(raw, where)
        except ClaimError as error:
            tampered(where, str(error).removeprefix(f"{where}: "))
            break
        ids = entry["claim_ids"]
        if raw + b"\n" != canonical_bytes(entry):
            tampered(where, "line is not canonical")
        if entry["previous"] != previous:
            tampered(where, f"chain broken: previous is {entry['previous']}, not {previous}")
        for key in ids:
            if key in seen_ids:
                tampered(where, f"{key} is frozen twice", [key])
            seen_ids.add(key)
        counts = (entry["seq"], entry["claim_count"], entry["total_claims"])
        if counts != (number, len(ids), len(seen_ids)):
            tampered(where, f"counts {counts} are not {(number, len(ids), len(seen_ids))}")
        for file in entry["files"]:
            name = file["path"]
            if name in seen_paths:
                tampered(where, f"{name} is frozen twice")
            seen_paths.add(name)
            touched = _ids_of(name, entry, prereg_dir)
            path = root / name
            if not path.is_file():
                tampered(name, "frozen file is missing", touched)
            elif sha256(path.read_bytes()) != file["sha256"]:
                tampered(name, f"SHA-256 is not the frozen {file['sha256']}", touched)
        previous, last = sha256(raw), entry

    if last is not None:
        if not head_file.exists():
            tampered(head_file.relative_to(root).as_posix(), "missing")
        elif not head_file.is_file() or head_file.read_bytes() != _head_bytes(last, lines[-1]):
            reason = f"does not match the manifest: {len(lines)} lines, last {sha256(lines[-1])}"
            tampered(head_file.relative_to(root).as_posix(), reason)
    for folder in FOLDERS:
        for path in sorted((prereg_dir / folder).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.is_file() and name not in seen_paths and not path.name.startswith("."):
                problems.append(Problem("UNREGISTERED", name, "in no manifest line"))
    return problems


def _ids_of(name: str, entry: dict[str, Any], prereg_dir: Path) -> tuple[str, ...]:
    """Ids that a change of one frozen file touches; empty means all.

    A claim file is listed with others, so its ids are read from the line: those that no other
    intact file of the line registers. A forecast or a document (protocol, shapes) touches all.
    """
    if _kind(name) not in ("claims", "amendments"):
        return ()
    others: set[str] = set()
    for file in entry["files"]:
        path = prereg_dir.parent / file["path"]
        if file["path"] == name or _kind(file["path"]) not in ("claims", "amendments"):
            continue
        if path.is_file() and sha256(path.read_bytes()) == file["sha256"]:
            try:
                others.update(_check_content(path, file["path"]))
            except ClaimError:
                continue  # frozen before a rule that it breaks: its ids count as touched
    return tuple(key for key in entry["claim_ids"] if key not in others)


@dataclass(frozen=True)
class Registered:
    """What prereg/ holds: registered claims, and drafts that no manifest line lists."""

    claims: tuple[Claim, ...]
    amendments: tuple[Amendment, ...]
    forecasts: tuple[Forecast, ...]
    unregistered: tuple[Claim, ...]
    ids: tuple[str, ...]
    source: dict[str, str] = field(default_factory=dict)  # claim id -> file
    unreadable: tuple[Problem, ...] = ()


def load_registered(prereg_dir: str | Path) -> Registered:
    """Load every claim, amendment and forecast; a file that cannot be read is a problem.

    An amendment's replacement is a claim of its own, beside the one it amends. A file that repeats an id that another
    file holds is a problem too, and its claims of that id are left out.
    """
    prereg_dir = Path(prereg_dir).resolve()
    root = prereg_dir.parent
    frozen, ids = frozen_files(prereg_dir), set(frozen_ids(prereg_dir))
    claims, amendments, forecasts, drafts, unreadable = [], [], [], [], []
    source: dict[str, str] = {}
    for folder in FOLDERS:
        paths = sorted((prereg_dir / folder).rglob("*.json"))
        names = {path: path.relative_to(root).as_posix() for path in paths}
        for path in sorted(paths, key=lambda p: names[p] not in frozen):  # the frozen ones first
            name = names[path]
            registered = name in frozen
            try:
                if folder == "claims":
                    found = claim_files.load(path)
                elif folder == "amendments":
                    amendment = claim_files.load_amendment(path)
                    found = (amendment.replacement,)
                    if registered:
                        amendments.append(amendment)
                else:
                    found = ()
                    if registered:
                        forecasts.extend(claim_files.load_forecasts(path))
            except (ClaimError, OSError) as error:
                problem = Problem("TAMPERED" if registered else "UNREGISTERED", name, str(error))
                if not registered and (again := ids & _ids_in(path)):
                    reason = f"repeats {len(again)} frozen ids, first {min(again)}"
                    problem = Problem("INVALID", name, reason)
                unreadable.append(problem)
                continue
            taken = set(source) if registered else ids | set(source)
            again = [claim.id for claim in found if claim.id in taken]
            if again:
                status = "TAMPERED" if registered else "INVALID"
                reason = f"repeats {len(again)} ids that another file registers, first {again[0]}"
                unreadable.append(Problem(status, name, reason, tuple(again) if registered else ()))
            found = [claim for claim in found if claim.id not in taken]
            (claims if registered else drafts).extend(found)
            source.update({claim.id: name for claim in found})
    return Registered(
        tuple(claims),
        tuple(amendments),
        tuple(forecasts),
        tuple(drafts),
        frozen_ids(prereg_dir),
        source,
        tuple(unreadable),
    )


def _ids_in(path: Path) -> set[str]:
    """Claim ids that a file names, even where it is not what a claim file must be."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["claims"]
        return {row["id"] for row in rows if isinstance(row.get("id"), str)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()


# History.


class Unverifiable(RuntimeError):
    """History cannot answer."""


class Git:
    """Read-only questions to the history of one repository."""

    def __init__(self, repo: str | Path) -> None:
        """Raise ``Unverifiable`` where there is no git, no repository of its own, or a shallow one."""
        self.repo = Path(repo).resolve()
        top = self.text("rev-parse", "--show-toplevel")
        # An archive unpacked inside another repository would otherwise borrow that history.
        if Path(top).resolve() != self.repo:
            raise Unverifiable(f"{self.repo} is not the root of a repository (an archive?)")
        if self.text("rev-parse", "--is-shallow-repository") != "false":
            raise Unverifiable("shallow clone: run git fetch --unshallow")
        if self.run("rev-parse", "--verify", "--quiet", "HEAD^{commit}").returncode:
            raise Unverifiable("the repository has no commit")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        """Run git; replacement objects are ignored, they could show another history."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        try:
            return subprocess.run(
                ["git", "--no-replace-objects", "-C", str(self.repo), *arguments],
                capture_output=True,
                check=False,
                env={**environment, "LC_ALL": "C"},
            )
        except OSError as error:
            raise Unverifiable(f"git does not run: {error}") from error

    def text(self, *arguments: str) -> str:
        """Output of git as text; a failure raises ``Unverifiable``."""
        result = self.run(*arguments)
        if result.returncode:
            reason = result.stderr.decode(errors="replace").strip() or f"exit {result.returncode}"
            raise Unverifiable(f"git {arguments[0]}: {reason}")
        return result.stdout.decode(errors="replace").strip()

    def commits(self, *paths: str, added: bool = False) -> list[str]:
        """Commits up to HEAD that touch a path (``added``: create it), parents first."""
        options = ["--diff-filter=A", "--no-renames"] if added else []
        listed = self.text(
            "log", "--full-history", "--topo-order", "-m", "--format=%H", *options, "--", *paths
        )
        return list(dict.fromkeys(reversed(listed.split())))

    def blob(self, commit: str, path: str) -> bytes | None:
        """Bytes of a file in a commit, None where it is absent."""
        result = self.run("cat-file", "blob", f"{commit}:{path}")
        return None if result.returncode else result.stdout

    def tree(self, *paths: str) -> dict[str, tuple[str, str]]:
        """Path -> (mode, object name) of the files that HEAD holds under some paths; the index is not asked."""
        result = self.run("ls-tree", "-r", "-z", "--full-tree", "HEAD", "--", *paths)
        if result.returncode:
            raise Unverifiable(f"git ls-tree: {result.stderr.decode(errors='replace').strip()}")
        found = {}
        for line in result.stdout.decode(errors="surrogateescape").split("\0"):
            if line:
                head, path = line.split("\t", 1)
                mode, _kind, name = head.split(" ")
                found[path] = (mode, name)
        return found

    def exists(self, commit: str) -> bool:
        """Whether the commit is in this repository."""
        return self.run("cat-file", "-e", f"{commit}^{{commit}}").returncode == 0

    def is_ancestor(self, older: str, newer: str) -> bool:
        """Whether ``older`` is ``newer`` or one of its ancestors."""
        result = self.run("merge-base", "--is-ancestor", older, newer)
        if result.returncode not in (0, 1):
            raise Unverifiable(f"git merge-base: {result.stderr.decode(errors='replace').strip()}")
        return result.returncode == 0


def same_bytes(path: Path, mode: str, name: str) -> bool:
    """Whether a file on disk is the blob `name` of git (SHA-1, or SHA-256 in a repository of that kind)."""
    if path.is_symlink() or not path.is_file() or mode not in ("100644", "100755"):
        return False
    data = path.read_bytes()
    digest = hashlib.new("sha256" if len(name) == 64 else "sha1")
    digest.update(b"blob %d\0" % len(data) + data)
    return digest.hexdigest() == name


def history(repo: str | Path, prereg: str = "prereg") -> History:
    """Check that history agrees with the registry.

    Every committed manifest must be a prefix of the present one, and each frozen file must have,
    in the commit that froze it, the bytes that the manifest lists.
    """
    repo = Path(repo).resolve()
    name = f"{prereg}/{MANIFEST}"
    path = repo / name
    try:
        git = Git(repo)
        present = path.read_bytes() if path.is_file() else b""
        problems: list[Problem] = []
        versions = [(commit, git.blob(commit, name)) for commit in git.commits(name)]
        for commit, version in versions:
            if version is not None and not present.startswith(version):
                lost = _ids(version) - _ids(present)
                reason = f"the manifest of commit {commit[:12]} is no prefix of the present one"
                problems.append(Problem("TAMPERED", name, reason, tuple(sorted(lost))))
        committed = git.blob("HEAD", name) or b""
        if present.startswith(committed) and present != committed:
            problems.append(Problem("UNVERIFIABLE", name, "its last lines are not committed"))
        held = git.tree(prereg)
        for file, digest in frozen_files(repo / prereg).items():
            there = repo / file
            intact = there.is_file() and sha256(there.read_bytes()) == digest
            # An edited file on disk is verify()'s. Here: a good one that hides what the commit holds.
            if intact and file in held and not same_bytes(there, *held[file]):
                reason = "the present commit holds other bytes than those that were frozen"
                problems.append(Problem("TAMPERED", file, reason))
            commit = _first(versions, file)
            if commit is None:
                continue  # not committed: said once, above
            blob = git.blob(commit, file)
            if blob is None:
                reason = f"absent from commit {commit[:12]}, which froze it"
                problems.append(Problem("TAMPERED", file, reason))
            elif sha256(blob) != digest:
                reason = f"had other bytes in commit {commit[:12]}, which froze it"
                problems.append(Problem("TAMPERED", file, reason))
    except Unverifiable as error:
        return History("UNVERIFIABLE", (Problem("UNVERIFIABLE", name, str(error)),))
    statuses = {problem.status for problem in problems}
    status = next((s for s in ("TAMPERED", "UNVERIFIABLE") if s in statuses), "OK")
    return History(status, tuple(problems))


def _ids(manifest: bytes) -> set[str]:
    found: set[str] = set()
    for line in _lines(manifest):
        try:
            found.update(json.loads(line)["claim_ids"])
        except (ValueError, KeyError, TypeError):
            continue  # a broken line has no ids; verify() reports it
    return found


def _first(versions: Iterable[tuple[str, bytes | None]], file: str) -> str | None:
    """First commit whose manifest lists the file."""
    quoted = json.dumps(file, ensure_ascii=False).encode()  # canonical lines hold it so
    for commit, version in versions:
        if any(b'"path":' + quoted in line for line in _lines(version or b"")):
            return commit
    return None


def freeze_commit(git: Git, file: str, prereg: str = "prereg") -> str:
    """The commit that froze a file: the first whose manifest lists it.

    Raises ``Unverifiable`` when no commit does.
    """
    name = f"{prereg}/{MANIFEST}"
    versions = ((commit, git.blob(commit, name)) for commit in git.commits(name))
    commit = _first(versions, file)
    if commit is None:
        raise Unverifiable(f"no commit froze {file}")
    return commit


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit status 0, or 2 for a refused freeze, or 3 for a registry with problems."""
    parser = argparse.ArgumentParser(prog="python -m lab.registry", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser(
        "freeze",
        help="append one line to the manifest",
        description="Freeze files: check them, and append one line with their hashes to the manifest.",
        epilog="Commit the files, the manifest and HEAD.json together: the audit dates the freeze by that commit.",
    )
    add.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="what to freeze: claims (prereg/claims/*.json), forecasts, amendments, or a document such as "
        "prereg/protocol.json; never a file or a claim id that is frozen already",
    )
    add.add_argument(
        "--note", required=True, help="one sentence: what is frozen, and why; kept in the manifest"
    )
    add.add_argument(
        "--access",
        required=True,
        choices=ACCESS,
        help="measurements of these claims' subject that the authors had seen when they wrote them: none at all, "
        "a pilot's, some, or all; kept in the manifest",
    )
    check = commands.add_parser("verify", help="compare the manifest with the files")
    for command in (add, check):
        command.add_argument("--prereg", default="prereg", help="default: %(default)s")
    options = parser.parse_args(arguments)
    if options.command == "freeze":
        try:
            line = freeze(options.files, options.prereg, options.note, options.access)
        except (ClaimError, RegistryError, OSError) as error:
            print(f"refused: {error}", file=sys.stderr)
            return 2
        print(
            f"froze {len(line['files'])} files with {line['claim_count']} claims as "
            f"line {line['seq']}; {line['total_claims']} claims in all"
        )
        return 0
    problems = verify(options.prereg)
    for problem in problems:
        print(problem)
    entries = len(_lines((Path(options.prereg) / MANIFEST).read_bytes())) if not problems else 0
    if not problems:
        print(f"OK: {entries} freezes, {len(frozen_ids(options.prereg))} claims")
    return 3 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
