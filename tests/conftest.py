"""What all tests share: where the repository is, and when a GPU test can run."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab import select

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of this checkout. Tests read it and never write to it."""
    return REPOSITORY


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where nothing can be measured, and say why."""
    marked = [item for item in items if "gpu" in item.keywords]
    if not marked:
        return
    machine = select.this_machine()
    if not (reason := machine.obstacle):
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason=reason))


# ---- a test that measures wall time runs alone --------------------------------------------------------------------


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, how)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test marked `alone` waits for those of the other workers, which then wait for it: its cores are idle.

    Every test goes through a gate and then holds the floor, shared or alone; who waits for the floor keeps the gate, so
    that a worker with many short tests cannot hold up the one that waits.
    """
    run = getattr(item.config, "workerinput", {}).get("testrunuid")
    if run is None:  # no other worker
        return (yield)
    gate, floor = (Path(tempfile.gettempdir()) / f"{run}.{name}" for name in ("gate", "floor"))
    alone = item.get_closest_marker("alone") is not None
    with floor.open("a") as file:
        with _locked(gate, fcntl.LOCK_EX):
            fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        return (yield)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The controller takes the locks of its workers away; they are named after the run."""
    run = getattr(session.config, "workerinput", None)
    uid = getattr(session.config.pluginmanager.get_plugin("dsession"), "nodemanager", None)
    if run is None and uid is not None:
        for name in ("gate", "floor"):
            (Path(tempfile.gettempdir()) / f"{uid.testrunuid}.{name}").unlink(missing_ok=True)
