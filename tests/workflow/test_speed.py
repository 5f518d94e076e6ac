"""How long the pipeline itself takes. `pytest tests/workflow/test_speed.py -n 0 -s` prints the times."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

IMPORT_LIMIT_S = 0.5
IMPORT = "import time; t = time.perf_counter(); import qgemm_mx; print(time.perf_counter() - t)"


def test_import_of_the_library(repository: Path) -> None:
    def once() -> float:
        command = [sys.executable, "-c", IMPORT]
        env = {"PYTHONPATH": str(repository / "kernels")}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return float(done.stdout)

    # The least of five: others use this machine too.
    seconds = min(once() for _ in range(5))
    print(f"\nimport of qgemm_mx: {seconds:.3f} s (limit {IMPORT_LIMIT_S} s)")
    assert seconds < IMPORT_LIMIT_S


@pytest.mark.alone
def test_replay_and_no_op(new_checkout) -> None:
    limits_s = {"replay to report": 60, "nothing to do": 10}
    fresh = new_checkout()
    fresh.ok("build", "--cores", "2", "--config", "measure=never")  # compiling is no replay
    for what, limit_s in limits_s.items():
        started = time.monotonic()
        fresh.ok("--cores", "2", "--config", "measure=never")
        seconds = time.monotonic() - started
        print(f"{what}: {seconds:.1f} s (limit {limit_s} s)")
        assert seconds < limit_s, what
