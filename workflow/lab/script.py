"""What every script of the workflow does around its one call: keep a log, and fail with a sentence for people."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

Log = Callable[[str], None]


def prepend_python_path(folders: Iterable[str]) -> None:
    """Have processes started from here look for modules in `folders` first, then where PYTHONPATH says."""
    found = [*folders, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(found)


@contextlib.contextmanager
def one_sentence(*refusals: type[Exception]) -> Iterator[None]:
    """Where the Snakefile is read: end on one of these exceptions with its sentence alone, and status 1.

    Snakemake would put a traceback around every exception that is not a SystemExit.
    """
    try:
        yield
    except refusals as refusal:
        raise SystemExit(f"Error: {refusal}") from None


@contextlib.contextmanager
def logged(path: str | Path, terminal: bool = False) -> Iterator[Log]:
    """Give a function that writes a line to the log file, and to stderr as well if `terminal`.

    An exception goes to the log with its traceback and to the terminal as one sentence; the process ends with status 1.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", buffering=1) as file:

        def log(line: str) -> None:
            print(line, file=file)
            if terminal:
                print(line, file=sys.stderr, flush=True)

        try:
            yield log
        except KeyboardInterrupt:
            print("interrupted", file=file)
            print("interrupted: the same command goes on from here", file=sys.stderr, flush=True)
            raise SystemExit(130) from None
        except Exception as error:
            traceback.print_exc(file=file)
            print(f"{type(error).__name__}: {error}\n(log: {path})", file=sys.stderr, flush=True)
            raise SystemExit(1) from None
