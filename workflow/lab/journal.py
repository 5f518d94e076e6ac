"""A campaign while it is being measured: an append-only journal that survives a crash, a kill and Ctrl-C.

`.work/partial/<key>/` holds header.json, journal.jsonl and one pair of Parquet parts a finished
point. A part is on the disk before its journal line is written, so a line vouches for its part, and
a part without a line is ignored. A part that is lost or changed all the same takes its point with
it: the next `open` says so in a line, and the point is taken again. The key comes from what makes
legs comparable (device, cubins, protocol, seed, source): a change of any of them starts another
journal.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import rfc8785

from lab import samples as legs
from lab.files import sha256
from lab.rows import (
    INVALID_BY_DESIGN,
    KEY_COLUMNS,
    AttemptRow,
    CampaignError,
    CellRow,
    CheckRow,
    name_of,
    to_json,
)
from lab.schema import check_constants, check_counters, check_header

_IDENTITY = (
    "rung",
    "kind",
    "software",
    "source",
    "prereg_head",
    "protocol_sha256",
    "seed",
    "cubins",
)
_NO_WORD = "the process ended without a word"
_PART = re.compile(r"part-\d{5,}\.(samples|telemetry)\.parquet")


def utc_now() -> str:
    """The time now, such as 2026-11-30T12:00:00Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def partial_key(header: Mapping[str, Any]) -> str:
    """16 hex digits of what two runs must share to be parts of one campaign."""
    device = {name: header["device"][name] for name in ("name", "uuid", "driver")}
    identity = {name: header[name] for name in _IDENTITY} | {"device": device}
    return hashlib.sha256(rfc8785.dumps(identity)).hexdigest()[:16]


@dataclass(frozen=True)
class Contents:
    """Everything that a journal holds. `samples` and `telemetry` as in lab.samples, in the order they were taken."""

    header: dict[str, Any]
    cells: tuple[CellRow, ...]
    checks: tuple[CheckRow, ...]
    attempts: tuple[AttemptRow, ...]
    constants: dict[str, Any]
    counters: tuple[dict[str, Any], ...]
    samples: pd.DataFrame
    telemetry: pd.DataFrame


class Attempt:
    """What became of one attempt: `ok` unless told otherwise."""

    def __init__(self) -> None:
        self.status = "ok"
        self.reason: str | None = None

    def failed(self, reason: str) -> None:
        """It ran, and its result is wrong."""
        self.status, self.reason = "failed", reason

    def refused(self, reason: str) -> None:
        """It was not run, for a reason."""
        self.status, self.reason = "refused", reason


class PartialCampaign:
    """The open journal of one campaign. One process at a time; use it as a context manager or `close` it."""

    def __init__(
        self, folder: Path, header: dict[str, Any], lines: list[dict[str, Any]], lock: Any
    ) -> None:
        """Use `open`."""
        self.folder = folder
        self.header = header
        self._lines = lines
        self._size = (folder / "journal.jsonl").stat().st_size
        self._lock = lock

    @classmethod
    def open(cls, root: Path, header: Mapping[str, Any]) -> PartialCampaign:
        """Start `root/<key>/`, or go on with it; `header` holds the keys of lab.schema.HEADER_KEYS.

        An attempt that an earlier process left open becomes a `crashed` row, and so does a point whose parts are
        missing or changed: it counts as unfinished. Raises CampaignError on a header, given or found, that the schema
        refuses, on one found that is damaged or of another key, on a journal that another process has open, and on one
        that is damaged before its last line.
        """
        header = dict(header)
        header.setdefault("created_utc", utc_now())
        check_header(header)
        folder = Path(root) / partial_key(header)
        folder.mkdir(parents=True, exist_ok=True)
        _sync(folder.parent)
        lock = (folder / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise CampaignError(
                f"the partial campaign {folder.name} is open in another process"
            ) from None
        try:
            if (folder / "header.json").is_file():
                header = _read_header(folder)
            else:
                text = json.dumps(header, allow_nan=False)
                _write_durably(folder / "header.json", lambda path: path.write_text(text))
            lines = _read_journal(folder / "journal.jsonl")
            _sync(folder)
            partial = cls(folder, header, lines, lock)
            partial._close_dangling()
            partial._drop_lost_points()
        except BaseException:
            lock.close()
            raise
        return partial

    def __enter__(self) -> PartialCampaign:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process open the journal. What was appended stays."""
        self._lock.close()

    @property
    def finished(self) -> tuple[str, ...]:
        """Names of the finished points, in the order they were taken."""
        return tuple(_kept_points(self._lines))

    def append_point(
        self,
        point: str,
        cells: Sequence[CellRow],
        checks: Sequence[CheckRow],
        samples: pd.DataFrame | None = None,
        telemetry: pd.DataFrame | None = None,
    ) -> None:
        """Add a finished point, such as `q_o_proj/M1`, with all its rows; refused whole when a part is impossible.

        Cells come without time and floor: `finalise` takes them from the samples. Raises CampaignError.
        """
        if point in self.finished:
            raise CampaignError(f"point {point} is finished already")
        samples = legs.empty(legs.SAMPLES_SCHEMA) if samples is None else samples
        telemetry = legs.empty(legs.TELEMETRY_SCHEMA) if telemetry is None else telemetry
        problems = check_point(cells, checks, samples)
        earlier = {
            tuple(c[name] for name in KEY_COLUMNS) for line in self._points() for c in line["cells"]
        }
        problems += [f"{cell} is in an earlier point" for cell in cells if cell.key in earlier]
        if problems:
            raise CampaignError(f"point {point}: " + "; ".join(problems))
        # A lost point keeps its number: another point's parts may still be of the numbers after it.
        number = sum(line["type"] == "point" for line in self._lines)
        parts = {}
        for name, frame, schema in (
            ("samples", samples, legs.SAMPLES_SCHEMA),
            ("telemetry", telemetry, legs.TELEMETRY_SCHEMA),
        ):
            path = self.folder / f"part-{number:05d}.{name}.parquet"
            _write_durably(path, functools.partial(legs.write_table, frame, schema))
            parts[name] = {
                "file": path.name,
                "sha256": sha256(path),
            }
        _sync(self.folder)
        self._append(
            {
                "type": "point",
                "point": point,
                "cells": [to_json(c) for c in cells],
                "checks": [to_json(c) for c in checks],
                "parts": parts,
            }
        )

    def add_constants(self, constants: Mapping[str, Mapping[str, Any]]) -> None:
        """Add measured constants: name -> {value, unit, ci_low, ci_high, n, how}. A name twice is refused."""
        have = self.constants
        if twice := sorted(set(have) & set(constants)):
            raise CampaignError(f"constants {', '.join(twice)} are recorded already")
        plain = _as_json(constants)
        check_constants(plain)
        self._append({"type": "constants", "constants": plain})

    @property
    def constants(self) -> dict[str, Any]:
        """The constants recorded so far, by name: a rerun need not measure them again."""
        found: dict[str, Any] = {}
        for line in self._lines:
            if line["type"] == "constants":
                found |= line["constants"]
        return found

    @property
    def counters(self) -> tuple[dict[str, Any], ...]:
        """The profiler rows recorded so far."""
        return tuple(c for x in self._lines if x["type"] == "counters" for c in x["counters"])

    def add_counters(self, counters: Iterable[Mapping[str, Any]]) -> None:
        """Add profiler rows, as the schema's `counter`."""
        plain = _as_json(list(counters))
        check_counters(plain)
        self._append({"type": "counters", "counters": plain})

    @contextlib.contextmanager
    def attempt(self, stage: str, **cell: Any) -> Iterator[Attempt]:
        """Record what becomes of the body, with the cell's columns (kernel, format, shape, N, K, M, regime) if given.

        Ctrl-C leaves `interrupted`, an exception `crashed`, and both go on up. A killed process leaves a row too: the
        next `open` writes it.
        """
        attempt, started, clock = Attempt(), utc_now(), time.monotonic()
        opening = {"stage": stage, "started_utc": started, **cell}
        AttemptRow(
            status="ok", reason=None, seconds=None, **opening
        )  # refuses unknown columns before the work
        self._append({"type": "begin", **opening})
        try:
            yield attempt
        except BaseException as error:
            attempt.status = "crashed" if isinstance(error, Exception) else "interrupted"
            attempt.reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise
        finally:
            row = AttemptRow(
                status=attempt.status,
                reason=attempt.reason,
                seconds=time.monotonic() - clock,
                **opening,
            )
            self._append({"type": "attempt", "row": to_json(row)})

    def contents(self) -> Contents:
        """Everything recorded so far. Raises CampaignError on a part whose bytes are not those that were journalled."""
        points = self._points()
        return Contents(
            header=dict(self.header),
            cells=tuple(CellRow.from_json(c) for p in points for c in p["cells"]),
            checks=tuple(CheckRow.from_json(c) for p in points for c in p["checks"]),
            attempts=tuple(
                AttemptRow.from_json(x["row"]) for x in self._lines if x["type"] in _WITH_ROW
            ),
            constants=self.constants,
            counters=self.counters,
            samples=self._frame("samples", legs.SAMPLES_SCHEMA),
            telemetry=self._frame("telemetry", legs.TELEMETRY_SCHEMA),
        )

    def _points(self) -> list[dict[str, Any]]:
        return list(_kept_points(self._lines).values())

    def _frame(self, name: str, schema: Any) -> pd.DataFrame:
        frames = []
        for point in self._points():
            if lost := self._lost_part(point, name):
                raise CampaignError(f"{lost} of point {point['point']} is missing or changed")
            frames.append(legs.read_table(self.folder / point["parts"][name]["file"], schema))
        frames = [f for f in frames if len(f)]
        return pd.concat(frames, ignore_index=True) if frames else legs.empty(schema)

    def _lost_part(self, point: dict[str, Any], name: str) -> str | None:
        """The file of a point's part if its bytes are not those that were journalled."""
        part = point["parts"][name]
        path = self.folder / part["file"]
        if path.is_file() and sha256(path) == part["sha256"]:
            return None
        return path.name

    def _append(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, allow_nan=False) + "\n"
        data = text.encode()
        with (self.folder / "journal.jsonl").open("r+b") as file:
            # Whatever an interrupted append left behind the last whole line goes.
            file.truncate(self._size)
            file.seek(self._size)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._size += len(data)
        self._lines.append(json.loads(text))

    def _close_dangling(self) -> None:
        open_lines: list[dict[str, Any]] = []
        for line in self._lines:
            if line["type"] == "begin":
                open_lines.append(line)
            elif line["type"] == "attempt":
                open_lines.pop()
        for line in reversed(open_lines):
            opening = {k: v for k, v in line.items() if k != "type"}
            row = AttemptRow(status="crashed", reason=_NO_WORD, seconds=None, **opening)
            self._append({"type": "attempt", "row": to_json(row)})

    def _drop_lost_points(self) -> None:
        for point in self._points():
            lost = [
                file for name in sorted(point["parts"]) if (file := self._lost_part(point, name))
            ]
            if lost:
                row = AttemptRow(
                    stage="point",
                    status="crashed",
                    reason=f"{' and '.join(lost)} of the finished point {point['point']} missing or"
                    " changed: the point is to be taken again",
                    started_utc=utc_now(),
                    seconds=None,
                )
                self._append({"type": "lost", "point": point["point"], "row": to_json(row)})


def check_point(
    cells: Sequence[CellRow], checks: Sequence[CheckRow], samples: pd.DataFrame
) -> list[str]:
    """What cannot be true of cells, checks and legs together, one sentence each; empty when all is well.

    Cells are unique; a kernel has one role; `passed` and `failed` rest on checks; legs belong to cells that passed, or
    to testbed variants that are wrong by design, and have the role of their cell.
    """
    problems = []
    by_key = {cell.key: cell for cell in cells}
    if len(by_key) != len(cells):
        twice = sorted({c.key for c in cells if sum(d.key == c.key for d in cells) > 1})
        problems += [f"{name_of(key)} occurs twice" for key in twice]
    roles: dict[str, set[str]] = {}
    for cell in cells:
        roles.setdefault(cell.kernel, set()).add(cell.role)
    problems += [
        f"{k} has the roles {', '.join(sorted(r))}" for k, r in roles.items() if len(r) > 1
    ]

    verdicts: dict[tuple[Any, ...], list[bool]] = {}
    for check in checks:
        verdicts.setdefault(
            (check.kernel, check.format, check.shape, check.N, check.K, check.M), []
        ).append(check.passed)
    for cell in cells:
        seen = verdicts.get(cell.key[:-1], [])
        if cell.correctness == "passed" and not seen:
            problems.append(f"{cell} passed without a check")
        elif cell.correctness == "passed" and not all(seen):
            problems.append(
                f"{cell} passed, but {seen.count(False)} of its {len(seen)} checks failed"
            )
        elif cell.correctness == "failed" and all(seen):
            problems.append(f"{cell} failed, but no check of it did")
        elif cell.correctness == INVALID_BY_DESIGN and not all(seen):
            problems.append(f"{cell} is {INVALID_BY_DESIGN}, but what it does check failed")

    problems += legs.check_samples(samples)
    if len(samples) and not problems:
        for key in sorted(legs.cell_keys(samples)):
            if key not in by_key:
                problems.append(f"there are samples of {name_of(key)}, which is no cell here")
            elif by_key[key].correctness not in ("passed", INVALID_BY_DESIGN):
                problems.append(
                    f"there are samples of {name_of(key)}, whose correctness is not passed"
                )
        for role, *key in sorted(legs.cell_roles(samples)):
            cell = by_key.get(tuple(key))
            if cell is not None and role != cell.role:
                problems.append(f"there are samples of {cell} of the role {role}, not {cell.role}")
    return problems


def _read_journal(path: Path) -> list[dict[str, Any]]:
    path.touch()
    data = path.read_bytes()
    # A writer killed in mid-line leaves bytes without a newline: they vouch for nothing and go.
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    lines: list[dict[str, Any]] = []
    begun = 0
    for number, text in enumerate(whole.splitlines(), 1):
        where = f"line {number} of {path.parent.name}/{path.name}"
        try:
            line = json.loads(text)
        except ValueError:
            raise CampaignError(f"{where} is not JSON") from None
        try:
            begun += _check_line(line, lines, begun)
        except CampaignError as error:
            raise CampaignError(f"{where}: {error}") from None
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise CampaignError(f"{where} is no line of a journal: {error!r}") from None
        lines.append(line)
    return lines


def _check_line(line: Any, earlier: Sequence[dict[str, Any]], begun: int) -> int:
    """Refuse what `PartialCampaign` cannot have appended; how many attempts the line opens (-1 closes one)."""
    if not isinstance(line, dict):
        raise CampaignError(f"{type(line).__name__}, not an object")
    if (kind := line.get("type")) not in _CHECKS:
        raise CampaignError(f"type {kind!r} is not one of {', '.join(_CHECKS)}")
    if kind == "attempt" and not begun:
        raise CampaignError("an attempt ends that never began")
    if kind in ("point", "lost"):
        known = line["point"] in _kept_points(earlier)
        if known != (kind == "lost"):
            raise CampaignError(
                f"point {line['point']!r} is {'finished already' if known else 'lost, but never was'}"
            )
    _CHECKS[kind]({name: part for name, part in line.items() if name != "type"})
    return {"begin": 1, "attempt": -1}.get(kind, 0)


def _check_point_line(line: dict[str, Any]) -> None:
    if set(line) != {"point", "cells", "checks", "parts"} or not isinstance(line["point"], str):
        raise CampaignError(f"a point of the keys {sorted(line)}, named {line.get('point')!r}")
    for cell in line["cells"]:
        CellRow.from_json(cell)
    for check in line["checks"]:
        CheckRow.from_json(check)
    if set(line["parts"]) != {"samples", "telemetry"}:
        raise CampaignError(f"the parts {sorted(line['parts'])} are not samples and telemetry")
    for part in line["parts"].values():
        if not _PART.fullmatch(part["file"]) or not isinstance(part["sha256"], str):
            raise CampaignError(f"{part} is no part of a point")


_WITH_ROW = ("attempt", "lost")
_CHECKS: dict[str, Callable[[dict[str, Any]], object]] = {
    "begin": lambda line: AttemptRow(status="ok", reason=None, seconds=None, **line),
    "attempt": lambda line: AttemptRow.from_json(line["row"]),
    "point": _check_point_line,
    "lost": lambda line: AttemptRow.from_json(line["row"]),
    "constants": lambda line: check_constants(line["constants"]),
    "counters": lambda line: check_counters(line["counters"]),
}


def _kept_points(lines: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The lines of finished points by name, in the order they were taken, without those lost since."""
    kept = {}
    for line in lines:
        if line["type"] == "point":
            kept[line["point"]] = line
        elif line["type"] == "lost":
            del kept[line["point"]]
    return kept


def _read_header(folder: Path) -> dict[str, Any]:
    path = folder / "header.json"
    try:
        header = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
        if not isinstance(header, dict):
            raise CampaignError(f"it holds {type(header).__name__}, not an object")
        check_header(header)
        if (key := partial_key(header)) != folder.name:
            raise CampaignError(f"its key is {key}")
    except (CampaignError, ValueError) as error:
        raise CampaignError(
            f"{path} is damaged or of another campaign ({error}): what was measured there cannot be used;"
            f" move the folder {folder} away, and the same command starts a new one"
        ) from None
    return header


def _no_number(name: str) -> Any:
    raise CampaignError(f"it holds {name}, which is no JSON number")


def _write_durably(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make the file under another name, on the disk before it gets its own: `_sync` its folder then."""
    scratch = path.with_suffix(".tmp")
    write(scratch)
    _sync(scratch)
    os.replace(scratch, path)


def _sync(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on the disk: a power cut takes neither from now on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _as_json(value: Any) -> Any:
    # Measured values may be NumPy scalars; JSON knows only Python's numbers, and no NaN.
    try:
        return json.loads(json.dumps(value, allow_nan=False, default=lambda v: v.item()))
    except (ValueError, AttributeError) as error:
        raise CampaignError(f"{value!r} cannot be recorded as JSON: {error}") from None


__all__ = ["Attempt", "Contents", "PartialCampaign", "check_point", "partial_key", "utc_now"]
