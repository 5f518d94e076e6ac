"""Launch shapes of the stream, and the operands' tables, without a device."""

from __future__ import annotations

import json
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from lab import arms, operands
from qgemm_mx import formats


@pytest.fixture(scope="module")
def protocol(repository) -> dict:
    return json.loads((repository / "prereg/protocol.json").read_text())


@pytest.mark.parametrize("size", [16, 2_228_224, 939_524_096])
def test_stream_shapes_cover_the_frozen_grid_and_fit_the_device(protocol, size) -> None:
    shapes = list(arms.stream_shapes(protocol, size, 132))
    assert len({s.describe() for s in shapes}) <= len(shapes) == 50
    assert {s.style for s in shapes} == set(protocol["stream"]["styles"])
    for shape in shapes:
        assert shape.grid >= 1 and shape.threads <= 1024
        assert shape.smem_bytes <= 227 * 1024
        if shape.style != "bulk":
            assert shape.grid <= max(1, -(-size // 16))


def test_bytes_in_flight_of_a_bulk_ring_stay_at_the_frozen_number(protocol) -> None:
    allowed = set(protocol["stream"]["bulk"]["bytes_in_flight_per_sm"])
    for shape in arms.stream_shapes(protocol, 1 << 30, 132):
        if shape.style == "bulk":
            in_flight = shape.stages * shape.chunk_bytes * (shape.grid // 132)
            assert any(
                in_flight <= a < in_flight + shape.chunk_bytes * (shape.grid // 132)
                for a in allowed
            )


@pytest.mark.parametrize("fmt", formats.FORMATS)
def test_random_weights_use_many_codes_and_no_special_ones(fmt) -> None:
    pairs = operands.nibble_pair_table(fmt)
    assert len(pairs) == 256 and len(np.unique(pairs)) > 60
    spec = formats.FORMATS[fmt]
    if spec.scale == "bf16":
        scales = operands.int4_scale_table().view(ml_dtypes.bfloat16).astype(np.float64)
    else:
        scales = operands.scale_table(fmt)[operands.scale_code_table(fmt)]
    assert np.isfinite(scales).all() and (scales > 0).all()
    assert 3 < scales.max() / scales.min() < 2**12


@pytest.mark.parametrize("fmt", formats.FORMATS)
def test_decoding_tables_agree_with_the_package(fmt) -> None:
    codes = np.arange(16)
    ours = operands.element_table(fmt)
    assert np.array_equal(ours, formats.FORMATS[fmt].element_values[codes].astype(np.float64))
    if formats.FORMATS[fmt].scale != "bf16":
        theirs = formats.decode_scales(fmt, np.arange(256, dtype=np.uint8)).astype(np.float64)
        assert np.array_equal(operands.scale_table(fmt), theirs, equal_nan=True)


def test_quantiles_have_the_asked_moments() -> None:
    values = operands.normal_quantiles(65536, 0.02)
    assert abs(values.mean()) < 1e-9 and values.std() == pytest.approx(0.02, rel=1e-3)
    fp8 = operands.fp8_table(0.02, 2.0**-12).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert np.isfinite(fp8).all() and (fp8 * 2.0**-12).std() == pytest.approx(0.02, rel=0.03)


def test_alignment() -> None:
    assert [operands.align(n) for n in (1, 256, 257)] == [256, 256, 512]


class ScreeningTimer:
    """A timer whose candidates have known times; it counts the legs that each is given."""

    def __init__(self, times: dict) -> None:
        self.times = times
        self.legs = dict.fromkeys(times, 0)

    def single_call(self, launch) -> float:
        return self.times[launch]

    def capture(self, launch, copies, nodes):
        return launch

    def graph_leg(self, graph_n, graph_2n, nodes, warm):
        self.legs[graph_n] += 1
        return SimpleNamespace(time_us=self.times[graph_n])


@pytest.mark.parametrize(
    ("times", "timed"),
    [
        ({"a": 10.0, "b": 9.0, "c": 17.0, "d": 90.0}, {"a", "b", "c"}),
        ({"a": 1000.0, "b": 900.0, "c": 1200.0, "d": 20000.0}, {"a", "b"}),
        ({"a": 5.0}, {"a"}),
    ],
)
def test_slow_candidates_are_screened_and_the_fastest_is_found(times, timed) -> None:
    timer = ScreeningTimer(times)
    best, medians = arms.pick_fastest(timer, list(times), 2, 16, 2)
    assert list(times)[best] == min(times, key=times.get)
    assert medians == list(times.values())
    assert {name for name, count in timer.legs.items() if count == 2} == timed


# FP64 products that arms share.


class Counted:
    """Stands in for `Product.compute`: counts, and gives a product of the right size."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __call__(self, x64, weights, copy, n, as_bf16):
        self.calls.append((weights, copy, n, as_bf16))
        return arms.Product(np.zeros((x64.shape[0], n)), None, None)


@pytest.fixture
def counted(monkeypatch) -> Counted:
    made = Counted()
    monkeypatch.setattr(arms.Product, "compute", made)
    return made


def test_arms_of_the_same_operands_share_a_product(counted) -> None:
    x, other = np.zeros((2, 8)), np.zeros((2, 8))
    with arms.SharedProducts([x], 10**6):
        first = arms.product(x, "w", 0, 16, False)
        assert arms.product(x, "w", 0, 16, False) is first
        for change in (
            ("v", 0, 16, False),
            ("w", 1, 16, False),
            ("w", 0, 8, False),
            ("w", 0, 16, True),
        ):
            assert arms.product(x, *change) is not first
        # What a peer quantised itself is known to no other arm.
        assert arms.product(other, "w", 0, 16, False) is not arms.product(other, "w", 0, 16, False)
    assert len(counted.calls) == 1 + 4 + 2


def test_a_product_is_kept_while_it_fits_and_never_after_its_point(counted) -> None:
    x = np.zeros((2, 8))
    size = 8 * 2 * 16
    with arms.SharedProducts([x], 2 * size):
        for copy in (0, 1, 0, 1, 2, 1, 0):  # 2 pushes 0 out, the oldest
            arms.product(x, "w", copy, 16, False)
        assert [c[1] for c in counted.calls] == [0, 1, 2, 0]
        arms.product(x, "w", 0, 64, False)  # too large for any room
        arms.product(x, "w", 0, 64, False)
        assert len(counted.calls) == 6
    arms.product(x, "w", 0, 16, False)
    assert arms.SharedProducts.current is None and len(counted.calls) == 7
