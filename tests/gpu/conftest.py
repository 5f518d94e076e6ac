"""What the tests on a device share: the bench, with freshly built cubins."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from qgemm_mx import build


@pytest.fixture(scope="module")
def bench(repository):
    """An open measuring bench on device 0; cubins are kept in the workflow's cache."""
    from lab.bench import Bench

    out = repository / ".work" / "cache" / "cubins"
    with ThreadPoolExecutor() as pool:
        list(
            pool.map(lambda s: build.compile_cubin(s, "sm_90a", out), build.load_sources().values())
        )
    protocol = json.loads((repository / "prereg/protocol.json").read_text())
    return Bench.open(protocol, out / "sm_90a", seed=11)
