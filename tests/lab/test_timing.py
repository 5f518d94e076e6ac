"""The arithmetic of a rotation and of a leg; the legs themselves need a device (tests/gpu)."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from lab import timing

L2 = 60 * 2**20


@pytest.mark.parametrize(
    ("weight_bytes", "copies"),
    [(1, 3 * L2), (2_228_224, 85), (8_912_896, 22), (31_195_136, 7), (939_524_096, 2)],
)
def test_copies_total_three_times_l2(weight_bytes: int, copies: int) -> None:
    found = timing.copies_for(weight_bytes, L2, 3.0, 2)
    assert found == copies
    assert found * weight_bytes >= 3 * L2
    timing.check_rotation(found, weight_bytes, L2, 3.0)


def test_too_few_copies_are_refused_with_the_numbers() -> None:
    with pytest.raises(timing.LegError, match=r"2 copies of 8912896 bytes are 17825792 bytes"):
        timing.check_rotation(2, 8_912_896, L2, 3.0)


def test_a_weight_without_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="weight_bytes=0"):
        timing.copies_for(0, L2, 3.0, 2)


@pytest.mark.parametrize(("copies", "nodes"), [(2, 16), (16, 16), (17, 17), (85, 85)])
def test_every_copy_is_captured_and_at_least_sixteen_calls(copies: int, nodes: int) -> None:
    assert timing.nodes_for(copies, 16) == nodes


class Event:
    """Done once the host has taken longer than the delay in front of it."""

    def __init__(self, clock):
        self.clock, self.at = clock, 0.0

    def record(self, stream):
        self.at = max(self.clock["host"], self.clock["device"])
        self.clock["device"] = self.at

    @property
    def done(self):
        return self.clock["host"] >= self.at

    def synchronize(self):
        self.clock["host"] = max(self.clock["host"], self.at)


def made_up_timer(host_us: float, call_us: float) -> timing.Timer:
    """A timer whose launch takes the host `host_us` and the device `call_us`, on one made-up clock in microseconds."""
    clock = {"host": 0.0, "device": 0.0}
    timer = timing.Timer.__new__(timing.Timer)
    timer.stream = contextlib.nullcontext()
    timer._events = [Event(clock) for _ in range(3)]
    elapsed = SimpleNamespace(get_elapsed_time=lambda a, b: (b.at - a.at) / 1000)
    timer._cp = SimpleNamespace(cuda=elapsed)

    def delay(nanoseconds):
        clock["device"] = max(clock["host"], clock["device"]) + nanoseconds / 1000

    def launch(copy):
        assert copy == 1
        clock["host"] += host_us
        clock["device"] = max(clock["host"], clock["device"]) + call_us

    timer.delay = delay
    timer.launch = launch
    return timer


@pytest.mark.parametrize("host_us", [5.0, 119.0, 133.0, 5000.0])
def test_a_single_call_is_the_time_of_the_device_however_slow_the_host_is(host_us):
    """A host slower than the first delay once made an 8 us kernel a 133 us one, which screening then dropped."""
    timer = made_up_timer(host_us, 8.0)
    assert timer.single_call(timer.launch) == pytest.approx(8.0)


def test_a_host_that_no_delay_hides_is_named():
    timer = made_up_timer(10 * timing.MAX_DELAY_NS / 1000, 8.0)
    with pytest.raises(timing.LegError, match="to queue one call"):
        timer.single_call(timer.launch)
