"""Each probe is exact, and each fails on the faults that it claims to find.

The stand-in kernel is another path than the oracle inside the probes: it dequantises to float64,
tensor scale included, and multiplies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qgemm_mx import formats, probes
from qgemm_mx.formats import FORMATS
from qgemm_mx.packing import PackedWeight, dequantize, pack_nibbles, unpack_nibbles
from qgemm_mx.probes import Probe, check, probes_for

replace = dataclasses.replace
# N, K in groups of 128, M: one row, tails, more rows than columns of a tile.
PROBLEMS = [(16, 2, 1), (33, 3, 3), (100, 14, 7), (8, 5, 33)]


def kernel(packed: PackedWeight, x: np.ndarray) -> np.ndarray:
    """y float32 [M, N]: a correct kernel."""
    with np.errstate(invalid="ignore"):
        y = x.astype(np.float64) @ dequantize(packed, np.float64).T
    return y.astype(np.float32)


def passes(probe: Probe, mutated: PackedWeight) -> bool:
    return check(probe, kernel(mutated, probe.x)).passed


@pytest.fixture(params=[(f, n, 128 * g, m) for f in FORMATS for n, g, m in PROBLEMS], ids=str)
def problem(request: pytest.FixtureRequest) -> tuple[str, int, int, int]:
    return request.param


# --- A correct kernel passes ----------------------------------------------------------------------


def test_a_correct_kernel_passes_all_probes(problem: tuple[str, int, int, int]) -> None:
    names = []
    for probe in probes_for(*problem):
        result = check(probe, kernel(probe.weight, probe.x))
        assert result.passed and result.measured == result.limit == 0, result.detail
        names.append(probe.name)
    assert len(set(names)) == len(names) >= 8


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(1, 0), (7, 2880), (2880, 0)])
def test_odd_shapes(format: str, n: int, k: int) -> None:
    """One row, odd rows, 2880 rows; one scale group, or 2880 (or the last K before it that fits)."""
    group = FORMATS[format].group
    for probe in probes_for(format, n, max(k // group, 1) * group, 3):
        result = check(probe, kernel(probe.weight, probe.x))
        assert result.passed, result.detail


def test_x_is_exactly_bf16(problem: tuple[str, int, int, int]) -> None:
    for probe in probes_for(*problem):
        assert probe.x.dtype == np.float32
        assert np.array_equal(formats.round_bf16(probe.x), probe.x, equal_nan=True), probe.name


@pytest.mark.parametrize("order", ["ascending", "descending", "random", "largest", "pairwise"])
def test_fp32_sums_are_exact_in_any_order(problem: tuple[str, int, int, int], order: str) -> None:
    """FP32 products and FP32 partial sums, tensor scale last: not one rounding may show."""
    rng = np.random.default_rng(0)
    for probe in probes_for(*problem):
        packed = probe.weight
        plain = replace(packed, tensor_scale=np.ones_like(packed.tensor_scale))
        with np.errstate(invalid="ignore"):
            terms = probe.x[:2, None, :] * dequantize(plain)[None]  # float32 [M, N, K]
            if order == "descending":
                terms = terms[..., ::-1]
            elif order == "random":
                terms = terms[..., rng.permutation(packed.k)]
            elif order == "largest":
                terms = np.sort(terms, axis=-1)
            if order == "pairwise":
                total = terms.sum(axis=-1, dtype=np.float32)
            else:
                total = np.add.accumulate(terms, axis=-1, dtype=np.float32)[..., -1]
            y = total * packed.row_tensor_scale
        exact = replace(probe, x=probe.x[:2], y=probe.y[:2])
        assert check(exact, y).passed, check(exact, y).detail


def test_the_largest_problems_stay_exact() -> None:
    """The longest K of the shape set is accepted, one that could round is refused."""
    for format in FORMATS:
        assert len(list(probes_for(format, 2, 28672, 2))) >= 8
        with pytest.raises(ValueError, match=r"K=2097152 is too long for the probe ramp"):
            probes.ramp(format, 1, 2097152, 1)


# --- Faults that a layout or an index error makes ---------------------------------------------------


def swap_nibbles_of_a_byte(p: PackedWeight) -> PackedWeight:
    values = p.values.copy()
    row, byte = p.n // 2, (p.k // 2) * 2 // 3
    values[row, byte] = values[row, byte] >> 4 | (values[row, byte] & 0xF) << 4
    return replace(p, values=values)


def swap_nibble_order(p: PackedWeight) -> PackedWeight:
    return replace(p, values=p.values >> 4 | p.values << 4)


def shift_scales_by_a_block(p: PackedWeight) -> PackedWeight:
    return replace(p, scales=np.roll(p.scales, 1, axis=1))


def shift_one_row_of_scales(p: PackedWeight) -> PackedWeight:
    scales = p.scales.copy()
    scales[p.n // 2] = np.roll(scales[p.n // 2], -1)
    return replace(p, scales=scales)


def shift_scales_by_a_row(p: PackedWeight) -> PackedWeight:
    return replace(p, scales=np.roll(p.scales, 1, axis=0))


def with_fragment(p: PackedWeight, change: Callable[[np.ndarray], np.ndarray]) -> PackedWeight:
    """The first 8 x 16 tile of codes, changed; all its other tiles left alone."""
    codes = unpack_nibbles(p.values)
    codes[:8, :16] = change(codes[:8, :16].copy())
    return replace(p, values=pack_nibbles(codes))


def transpose_fragment(p: PackedWeight) -> PackedWeight:
    return with_fragment(p, lambda tile: tile.T.reshape(8, 16))


def transpose_square_fragments(p: PackedWeight) -> PackedWeight:
    return with_fragment(p, lambda tile: np.concatenate([tile[:, :8].T, tile[:, 8:].T], axis=1))


def swap_rows_in_a_fragment(p: PackedWeight) -> PackedWeight:
    return with_fragment(p, lambda tile: tile[[0, 1, 3, 2, 4, 5, 6, 7]])


def swap_halves_of_a_fragment(p: PackedWeight) -> PackedWeight:
    return with_fragment(p, lambda tile: np.roll(tile, 8, axis=1))


def shift_rows(p: PackedWeight) -> PackedWeight:
    return replace(p, values=np.roll(p.values, 1, axis=0))


def shift_columns(p: PackedWeight) -> PackedWeight:
    return replace(p, values=np.roll(p.values, 1, axis=1))


# Which probe claims to catch what, for any N >= 8 and any M, M = 1 included.
CLAIMS = [
    ("one_hot", swap_nibble_order),
    ("one_hot", shift_scales_by_a_block),
    ("one_hot", shift_scales_by_a_row),
    ("one_hot", transpose_fragment),
    ("one_hot", transpose_square_fragments),
    ("one_hot", shift_rows),
    ("one_hot", shift_columns),
    ("ramp", swap_nibbles_of_a_byte),
    ("ramp", swap_nibble_order),
    ("ramp", transpose_fragment),
    ("ramp", transpose_square_fragments),
    ("ramp", swap_rows_in_a_fragment),
    ("ramp", swap_halves_of_a_fragment),
    ("ramp", shift_rows),
    ("ramp", shift_columns),
    ("prime_block_scales", shift_scales_by_a_block),
    ("prime_block_scales", shift_one_row_of_scales),
    ("prime_block_scales", shift_scales_by_a_row),
]


@pytest.mark.parametrize(("name", "mutate"), CLAIMS, ids=lambda v: getattr(v, "__name__", v))
def test_each_claimed_fault_is_caught(
    problem: tuple[str, int, int, int], name: str, mutate: Callable
) -> None:
    probe = getattr(probes, name)(*problem)
    assert passes(probe, probe.weight)
    mutated = mutate(probe.weight)
    changed = (mutated.values != probe.weight.values).any() or (
        mutated.scales != probe.weight.scales
    ).any()
    assert changed, "the mutation left the weight as it was"
    assert not passes(probe, mutated)


@pytest.mark.parametrize("n", [2, 8, 33])
@pytest.mark.parametrize("m", [1, 5])
def test_tensor_scale_faults_are_caught(n: int, m: int) -> None:
    """Dropped: every probe of nvfp4. Merged by maximum or swapped: shard_scales."""
    for probe in probes_for("nvfp4", n, 48, m):
        if not np.isfinite(probe.y).any():
            continue  # x_nan and x_inf with one row of x
        dropped = replace(probe.weight, tensor_scale=np.ones_like(probe.weight.tensor_scale))
        assert not passes(probe, dropped), probe.name
    probe = probes.shard_scales("nvfp4", n, 48, m)
    scales = probe.weight.tensor_scale
    assert not passes(probe, replace(probe.weight, tensor_scale=np.full(2, scales.max())))
    assert not passes(probe, replace(probe.weight, tensor_scale=scales[::-1].copy()))
    rows = probe.weight.shard_rows
    if rows != rows[::-1]:
        assert not passes(probe, replace(probe.weight, shard_rows=rows[::-1]))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(FORMATS)), st.data())
def test_ramp_sees_a_swap_in_any_byte(format: str, data) -> None:
    n, m = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    k = FORMATS[format].group * data.draw(st.integers(1, 3))
    row, byte = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, k // 2 - 1))
    probe = probes.ramp(format, n, k, m)
    values = probe.weight.values.copy()
    values[row, byte] = values[row, byte] >> 4 | (values[row, byte] & 0xF) << 4
    result = check(probe, kernel(replace(probe.weight, values=values), probe.x))
    assert not result.passed and result.measured == m  # every output of that row of W, no other


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(FORMATS)), st.data())
def test_prime_block_scales_sees_any_one_wrong_scale(format: str, data) -> None:
    n, m, groups = (data.draw(st.integers(1, high)) for high in (9, 3, 9))
    probe = probes.prime_block_scales(format, n, groups * FORMATS[format].group, m)
    row, block = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, groups - 1))
    scales = probe.weight.scales.copy()
    scales[row, block] = int(scales[row, block]) + data.draw(st.sampled_from([-1, 1]))
    result = check(probe, kernel(replace(probe.weight, scales=scales), probe.x))
    assert not result.passed and result.measured == m


@pytest.mark.parametrize("format", FORMATS)
def test_neighbouring_prime_scales_differ(format: str) -> None:
    scales = probes.prime_block_scales(format, 64, 64 * FORMATS[format].group, 1).weight.scales
    assert (scales[:, 1:] != scales[:, :-1]).all()
    assert (scales[1:] != scales[:-1]).any(axis=1).all()


@pytest.mark.parametrize("format", FORMATS)
def test_one_hot_covers_k_and_sees_any_one_wrong_nibble(format: str) -> None:
    n, k, m = 3, 2 * FORMATS[format].group, 5
    columns = probes.one_hot_columns(format, k)
    assert sorted(columns.tolist()) == list(range(k))
    group = FORMATS[format].group
    assert {0, k - 1, group - 1, group} <= set(columns[:8].tolist())

    hits = np.zeros(k, int)
    caught = 0
    for offset in range(0, k, m):
        probe = probes.one_hot(format, n, k, m, offset)
        hits[np.flatnonzero(probe.x.any(axis=0))] += 1
        codes = unpack_nibbles(probe.weight.values)
        codes[1, 11] ^= 0b0010
        caught += not passes(probe, replace(probe.weight, values=pack_nibbles(codes)))
    assert (hits >= 1).all() and caught == hits[11]


# --- Faults of decoding and arithmetic: the cases -------------------------------------------------


def elements_times(p: PackedWeight, scales: np.ndarray) -> np.ndarray:
    """float64 [N, K] with these float scales [N, K/group] in place of the decoded ones."""
    elements = p.spec.element_values[unpack_nibbles(p.values)].astype(np.float64)
    return elements * np.repeat(scales.astype(np.float64), p.spec.group, axis=1)


def scale_table_kernel(
    change: dict[int, float],
) -> Callable[[PackedWeight, np.ndarray], np.ndarray]:
    """A kernel that decodes these scale codes wrong."""

    def run(p: PackedWeight, x: np.ndarray) -> np.ndarray:
        scales = formats.decode_scales(p.format, p.scales)
        for code, value in change.items():
            scales = np.where(p.scales == code, np.float32(value), scales)
        return x.astype(np.float64) @ elements_times(p, scales).T * p.row_tensor_scale

    return run


def fp16_folded_tensor_scale(p: PackedWeight, x: np.ndarray) -> np.ndarray:
    scales = formats.decode_scales(p.format, p.scales) * p.row_tensor_scale[:, None]
    return x.astype(np.float64) @ elements_times(p, scales.astype(np.float16)).T


def fp16_output_before_tensor_scale(p: PackedWeight, x: np.ndarray) -> np.ndarray:
    y = x.astype(np.float64) @ elements_times(p, formats.decode_scales(p.format, p.scales)).T
    return y.astype(np.float16).astype(np.float64) * p.row_tensor_scale


def fp16_activations(p: PackedWeight, x: np.ndarray) -> np.ndarray:
    return kernel(p, x.astype(np.float16).astype(np.float32))


def fp16_scales(p: PackedWeight, x: np.ndarray) -> np.ndarray:
    scales = formats.decode_scales(p.format, p.scales).astype(np.float16)
    return x.astype(np.float64) @ elements_times(p, scales).T * p.row_tensor_scale


def flush_subnormal_outputs(p: PackedWeight, x: np.ndarray) -> np.ndarray:
    y = kernel(p, x)
    return np.where(np.abs(y) < np.finfo(np.float32).tiny, 0, y)


def flush_subnormal_weights(p: PackedWeight, x: np.ndarray) -> np.ndarray:
    w = dequantize(p, np.float64)
    return x.astype(np.float64) @ np.where(np.abs(w) < 2.0**-126, 0, w).T


def swallow_nan(p: PackedWeight, x: np.ndarray) -> np.ndarray:
    return kernel(p, np.nan_to_num(x, nan=0.0, posinf=np.finfo(np.float32).max))


def skip_zero_weights(p: PackedWeight, x: np.ndarray) -> np.ndarray:
    """Infinity times a zero weight must be NaN: a kernel that skips zeros gives 0."""
    terms = x[:, None, :].astype(np.float64) * dequantize(p, np.float64)[None]
    return np.where(dequantize(p)[None] == 0, 0, terms).sum(axis=-1)


def nan_leaks_to_all_rows(p: PackedWeight, x: np.ndarray) -> np.ndarray:
    y = kernel(p, x)
    return np.where(np.isnan(y).any(axis=0), np.nan, y)


def nan_scale_poisons_its_row_only_where_x_is_not_zero(
    p: PackedWeight, x: np.ndarray
) -> np.ndarray:
    return np.nan_to_num(kernel(p, x), nan=0.0)


def negative_zero_is_minus_eight(p: PackedWeight, x: np.ndarray) -> np.ndarray:
    codes = unpack_nibbles(p.values)
    y = kernel(p, x).astype(np.float64)
    return y + x.astype(np.float64) @ np.where(codes == 8, -8.0, 0.0).T * p.row_tensor_scale


CASES = [
    ("mxfp4", "e8m0_code_0", scale_table_kernel({0: 0.0})),
    ("mxfp4", "e8m0_code_0", scale_table_kernel({0: np.inf})),
    ("mxfp4", "e8m0_code_0", scale_table_kernel({0: 2.0**-126})),
    ("mxfp4", "e8m0_code_0", flush_subnormal_weights),
    ("mxfp4", "e8m0_code_0_subnormal", flush_subnormal_outputs),
    ("mxfp4", "e8m0_code_254", scale_table_kernel({254: np.inf})),
    ("mxfp4", "e8m0_code_255", scale_table_kernel({255: np.inf})),
    ("mxfp4", "e8m0_code_255", scale_table_kernel({255: 0.0})),
    ("mxfp4", "one_hot", scale_table_kernel({134: np.nan})),
    ("nvfp4", "e4m3_subnormal", scale_table_kernel({1: 2.0**-10})),
    ("nvfp4", "e4m3_subnormal", scale_table_kernel({1: 0.0})),
    ("nvfp4", "e4m3_subnormal", scale_table_kernel({7: 15 * 2.0**-10})),
    ("nvfp4", "e4m3_nan", scale_table_kernel({0x7F: 480.0})),
    ("nvfp4", "e4m3_nan", scale_table_kernel({0xFF: -480.0})),
    ("nvfp4", "scale_zero", scale_table_kernel({0: 2.0**-7})),
    ("nvfp4", "tensor_scale_underflow", fp16_folded_tensor_scale),
    ("nvfp4", "tensor_scale_overflow", fp16_output_before_tensor_scale),
    ("int4_g128", "scale_zero", scale_table_kernel({0: 1.0})),
    ("int4_g64", "scale_bf16_range", fp16_scales),
    ("int4_g128", "scale_bf16_range", fp16_scales),
    ("mxfp4", "negative_zero", negative_zero_is_minus_eight),
    ("nvfp4", "negative_zero", negative_zero_is_minus_eight),
    *[
        (format, name, wrong)
        for format in FORMATS
        for name, wrong in [
            ("x_large", fp16_activations),
            ("x_nan", swallow_nan),
            ("x_nan", nan_leaks_to_all_rows),
            ("x_inf", swallow_nan),
            ("x_inf", skip_zero_weights),
        ]
    ],
]


@pytest.mark.parametrize(("format", "name", "wrong"), CASES)
def test_each_reported_fault_is_caught(format: str, name: str, wrong: Callable) -> None:
    group = FORMATS[format].group
    for n, k, m in [(17, 2 * group, 3), (32, 5 * group, 8)]:
        probe = next(p for p in probes_for(format, n, k, m) if p.name == name)
        with np.errstate(all="ignore"):
            assert not check(probe, wrong(probe.weight, probe.x)).passed


@pytest.mark.parametrize("format", FORMATS)
def test_special_probes_hold_what_they_are_named_for(format: str) -> None:
    group = FORMATS[format].group
    by_name = {p.name: p for p in probes_for(format, 16, 4 * group, 5)}
    nan_rows = np.isnan(by_name["x_nan"].y).all(axis=1)
    assert nan_rows.tolist() == [False, False, True, False, False]
    assert np.isfinite(np.delete(by_name["x_nan"].y, 2, axis=0)).all()
    row = by_name["x_inf"].y[2]
    assert np.isposinf(row).any() and np.isneginf(row).any() and np.isnan(row).any()
    if format == "mxfp4":
        y = by_name["e8m0_code_255"].y
        assert np.isnan(y[:, 0::2]).all() and np.isfinite(y[:, 1::2]).all()
        y = np.abs(by_name["e8m0_code_0_subnormal"].y)
        assert (y < 2.0**-124).all() and ((y > 0) & (y < 2.0**-126)).any()
        assert (by_name["e8m0_code_0"].weight.scales == 0).all()
    if format == "nvfp4":
        assert 1 in by_name["e4m3_subnormal"].weight.scales
        overflow = by_name["tensor_scale_overflow"]
        assert (overflow.y / overflow.weight.tensor_scale > 65504).all()
        assert (overflow.y < 65504).all()


# --- The check itself -----------------------------------------------------------------------------


def test_the_check_names_the_first_difference() -> None:
    probe = probes.ramp("mxfp4", 6, 64, 3)
    y = kernel(probe.weight, probe.x)
    y[1, 4] += 0.5
    y[2, 2] = np.nan
    result = check(probe, y)
    assert result.name == "ramp" and not result.passed
    assert (result.measured, result.limit) == (2.0, 0.0)
    assert "ramp (mxfp4, N=6, K=64, M=3): 2 of 18 outputs differ" in result.detail
    assert "first at m=1, n=4" in result.detail


def test_a_poisoned_output_never_passes(problem: tuple[str, int, int, int]) -> None:
    for probe in probes_for(*problem):
        if np.isnan(probe.y).all():
            continue
        assert not check(probe, np.full(probe.y.shape, np.nan, np.float32)).passed, probe.name
        assert not check(probe, np.zeros(probe.y.shape, np.float32)).passed, probe.name


def test_bf16_outputs_are_rounded_once() -> None:
    probe = probes.prime_block_scales("nvfp4", 9, 480, 4)
    y = kernel(probe.weight, probe.x)
    rounded = formats.round_bf16(y)
    assert (rounded != y).any()  # else this test would show nothing
    assert check(probe, rounded, "bfloat16").passed
    assert not check(probe, y, "bfloat16").passed
    assert not check(probe, rounded).passed
    truncated = (y.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert not check(probe, truncated, "bfloat16").passed


def test_arguments_are_checked() -> None:
    probe = probes.ramp("mxfp4", 6, 64, 3)
    with pytest.raises(ValueError, match=r"y is \[6, 3\], not \[3, 6\]"):
        check(probe, probe.y.T)
    with pytest.raises(ValueError, match="'float16' is not one of float32, bfloat16"):
        check(probe, probe.y, "float16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="M=0 is below 1"):
        probes.ramp("mxfp4", 6, 64, 0)
    with pytest.raises(ValueError, match="K=63 is not a multiple of the mxfp4 scale group 32"):
        probes.one_hot("mxfp4", 6, 63, 1)
    with pytest.raises(ValueError, match="mxfp4 has no tensor scale"):
        probes.shard_scales("mxfp4", 6, 64, 1)
    with pytest.raises(ValueError, match="N=1 is below 2"):
        probes.shard_scales("nvfp4", 1, 64, 1)
