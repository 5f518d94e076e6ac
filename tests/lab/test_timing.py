"""The arithmetic of a rotation and of a leg; the legs themselves need a device (tests/gpu)."""

from __future__ import annotations

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
