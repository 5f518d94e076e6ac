"""What all tests share: where the repository is, and when a GPU test can run."""

from __future__ import annotations

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
