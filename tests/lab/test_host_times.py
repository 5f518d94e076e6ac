"""Times on the host: the median and its interval, batches, and what is left out where torch is not."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from lab import host_times
from lab.host_times import HOST, PlainCalls, batches, median_row
from lab.schema import check_constants


def test_the_interval_of_a_median_holds_it_as_often_as_it_says() -> None:
    random, inside = np.random.default_rng(3), 0
    for _ in range(2000):
        row = median_row(random.exponential(1.0, 21), "us", "made up")
        inside += row["ci_low"] <= np.log(2) <= row["ci_high"]
    assert 0.95 <= inside / 2000 <= 0.985  # 0.973 by the order statistics 6 and 16 of 21


def test_one_call_that_the_system_held_up_moves_nothing() -> None:
    quiet = [7.0 + 0.01 * i for i in range(21)]
    row = median_row(quiet, "us", "made up")
    assert row["value"] == pytest.approx(7.10) and row["n"] == 21
    assert (row["ci_low"], row["ci_high"]) == (quiet[5], quiet[15])
    held = median_row([*quiet[:-1], 900.0], "us", "made up")
    assert held == row
    assert median_row(quiet[:-1], "us", "")["value"] == pytest.approx(7.095)  # between two
    with pytest.raises(ValueError, match="5 values"):
        median_row(quiet[:5], "us", "made up")


def test_batches_divide_and_leave_the_first_out(monkeypatch) -> None:
    clock = itertools.accumulate([0.0, 9.0, 0.0, 0.002, 0.0, 0.003])
    monkeypatch.setattr(host_times.time, "perf_counter", lambda: next(clock))
    done: list[str] = []
    found = list(batches(lambda: done.append("call"), lambda: done.append("wait"), 100, 2))
    assert found == pytest.approx([20.0, 30.0])
    assert done.count("call") == 300 and done.count("wait") == 4
    assert done[0] == done[101] == done[-1] == "wait"  # the stream is empty at the start of a batch


def test_the_larger_way_is_the_constant(monkeypatch) -> None:
    calls = PlainCalls.__new__(PlainCalls)
    waits = SimpleNamespace(synchronize=lambda: None)
    calls.bench = SimpleNamespace(protocol={"host": {"calls": 10, "batches": 21}}, stream=waits)
    calls.format, calls.m = "mxfp4", 1
    calls.packed = SimpleNamespace(weights=SimpleNamespace(n=1024, k=4096))
    calls.ways = {"cupy": "fast", "torch": "slow"}
    steps = {"fast": 6.0, "slow": 8.0}
    monkeypatch.setattr(host_times, "batches", lambda call, *rest: [steps[call]] * 21)
    found = calls.constants()
    assert set(found) == {HOST, f"{HOST}_cupy", f"{HOST}_torch"}
    assert found[HOST]["value"] == 8.0 == found[f"{HOST}_torch"]["value"]
    assert "torch arrays" in found[HOST]["how"] and "1024x4096" in found[HOST]["how"]
    check_constants(found)
