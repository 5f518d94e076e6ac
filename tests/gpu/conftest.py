"""What the tests on a device share: the bench, with freshly built cubins."""

from __future__ import annotations

import json

import pytest

from qgemm_mx import build


@pytest.fixture(scope="module")
def bench(repository, tmp_path_factory):
    """An open measuring bench on device 0, its cubins built in a folder of the test's own."""
    from lab.bench import Bench

    out = tmp_path_factory.mktemp("cubins")
    for source in build.load_sources().values():
        build.compile_cubin(source, "sm_90a", out)
    protocol = json.loads((repository / "prereg/protocol.json").read_text())
    return Bench.open(protocol, out / "sm_90a", seed=11)
