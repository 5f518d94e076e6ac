"""A run that is stopped half way is finished by the same command."""

from __future__ import annotations

import os
import signal
import subprocess
import time

RUN = ("--cores", "1", "--config", "measure=never")


def stop_half_way(checkout, how: signal.Signals) -> None:
    """Start a run from nothing and send its process group a signal once its first results are there."""
    checkout.ok("--delete-all-output", *RUN)
    running = subprocess.Popen(
        checkout.command(*RUN),
        cwd=checkout.root,
        env=checkout.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 120
        while not (checkout.root / ".work" / "build" / "builds.json").exists():
            assert time.monotonic() < until, "no result after two minutes"
            assert running.poll() is None, "the run ended before it could be stopped"
            time.sleep(0.05)
        os.killpg(running.pid, how)
        assert running.wait(timeout=60) != 0
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait(timeout=60)
    assert not (checkout.root / "reports" / "index.html").exists()


def test_the_same_command_finishes(checkout) -> None:
    data = checkout.snapshot("data")
    stop_half_way(checkout, signal.SIGINT)
    checkout.ok(*RUN)
    assert (checkout.root / "reports" / "index.html").exists()
    assert checkout.snapshot("data") == data


def test_after_a_kill_the_lock_says_what_to_do(checkout) -> None:
    stop_half_way(checkout, signal.SIGKILL)
    refused = checkout.run(*RUN)
    assert refused.returncode == 1 and "--unlock" in refused.stderr
    checkout.ok("--unlock", *RUN)
    checkout.ok(*RUN)
    assert (checkout.root / "reports" / "index.html").exists()
