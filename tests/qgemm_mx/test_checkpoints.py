"""The five families of checkpoints: what is on disk decodes to the right weights, both ways."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgemm_mx import checkpoints as ck
from qgemm_mx.packing import PackedWeight, concatenate, dequantize, quantize, reference_matmul


def weights(n: int = 6, k: int = 64, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.3, (n, k)).astype(np.float32)


def same(a: PackedWeight, b: PackedWeight) -> bool:
    return (
        (a.format, a.n, a.k, a.shard_rows) == (b.format, b.n, b.k, b.shard_rows)
        and np.array_equal(a.values, b.values)
        and np.array_equal(a.scales, b.scales)
        and np.array_equal(a.tensor_scale, b.tensor_scale)
    )


# --- mxfp4 ----------------------------------------------------------------------------------------


def test_gpt_oss_decodes_block_by_block() -> None:
    """Against a loop over the tensors as the family stores them."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 4, 3, 16), dtype=np.uint8)
    scales = rng.integers(110, 130, (2, 4, 3), dtype=np.uint8)
    experts = ck.from_gpt_oss(blocks, scales)
    assert [(e.n, e.k) for e in experts] == [(4, 96), (4, 96)]
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    for e, row, block, byte in np.ndindex(blocks.shape):
        decoded = dequantize(experts[e])[row, 32 * block + 2 * byte :][:2]
        b, scale = blocks[e, row, block, byte], 2.0 ** (int(scales[e, row, block]) - 127)
        assert decoded.tolist() == [values[b & 15] * scale, values[b >> 4] * scale]


def test_gpt_oss_gate_and_up_rows_are_parted() -> None:
    gate, up = weights(5, seed=1), weights(5, seed=2)
    rows = np.empty((10, 64), np.float32)
    rows[0::2], rows[1::2] = gate, up
    stored = quantize(rows, "mxfp4")
    blocks, scales = ck.to_gpt_oss([stored])
    [plain] = ck.from_gpt_oss(blocks, scales)
    assert same(plain, stored)
    [parted] = ck.from_gpt_oss(blocks, scales, deinterleave=True)
    assert same(parted, concatenate([quantize(gate, "mxfp4"), quantize(up, "mxfp4")]))
    back = ck.to_gpt_oss([parted], interleave=True)
    assert np.array_equal(back[0], blocks) and np.array_equal(back[1], scales)


def test_gpt_oss_takes_one_expert_or_many() -> None:
    experts = [quantize(weights(seed=s), "mxfp4") for s in range(3)]
    blocks, scales = ck.to_gpt_oss(experts)
    assert blocks.shape == (3, 6, 2, 16) and scales.shape == (3, 6, 2)
    assert all(map(same, ck.from_gpt_oss(blocks, scales), experts))
    assert same(ck.from_gpt_oss(blocks[1], scales[1])[0], experts[1])
    with pytest.raises(ValueError, match=r"blocks \[3, 6, 32\] and scales \[3, 6, 2\]"):
        ck.from_gpt_oss(blocks.reshape(3, 6, 32), scales)
    for n, groups in ((0, 2), (6, 0), (0, 0)):
        empty = np.zeros((3, n, groups, 16), np.uint8), np.zeros((3, n, groups), np.uint8)
        with pytest.raises(ValueError, match=f"hold no weight: N={n}, K={32 * groups}"):
            ck.from_gpt_oss(*empty)
    with pytest.raises(ValueError, match="to_gpt_oss needs at least one expert"):
        ck.to_gpt_oss([])
    odd = ck.to_gpt_oss([quantize(weights(5), "mxfp4")])
    with pytest.raises(ValueError, match="N=5 is odd"):
        ck.from_gpt_oss(*odd, deinterleave=True)


def test_deepseek_v4_is_read_by_its_bytes() -> None:
    packed = quantize(weights(), "mxfp4")
    tensors = ck.to_deepseek_v4(packed)
    assert tensors["weight"].dtype == np.int8 and (tensors["weight"] < 0).any()
    assert same(ck.from_deepseek_v4(**tensors), packed)
    scale = tensors["scale"].view(ml_dtypes.float8_e8m0fnu)
    assert same(ck.from_deepseek_v4(tensors["weight"], scale), packed)


def test_compressed_tensors_mxfp4() -> None:
    packed = quantize(weights(), "mxfp4", "ocp_floor")
    assert same(ck.from_compressed_tensors_mxfp4(**ck.to_compressed_tensors_mxfp4(packed)), packed)


# --- nvfp4: CASES 6 and 7 -------------------------------------------------------------------------


def as_both_families_store(weight: np.ndarray) -> tuple[dict, dict]:
    """The tensors that modelopt and compressed-tensors write, each from the weights themselves."""
    packed, amax = quantize(weight, "nvfp4"), np.abs(weight).max()
    scale = packed.scales.view(ml_dtypes.float8_e4m3fn)
    modelopt = {
        "weight": packed.values,
        "weight_scale": scale,
        "weight_scale_2": np.float32(amax / np.float32(448 * 6)),
    }
    compressed = {
        "weight_packed": packed.values,
        "weight_scale": scale,
        "weight_global_scale": np.array([np.float32(448 * 6) / amax]),
    }
    return modelopt, compressed


@pytest.mark.parametrize("amax", [2688.0, 672.0, 21.0, 2.625])
def test_case_6_both_conventions_decode_identically(amax: float) -> None:
    """448 * 6 / amax is a power of two here, so that neither convention rounds."""
    weight = weights()
    weight *= np.float32(amax) / np.abs(weight).max() * np.float32(0.9)
    weight[2, 3] = -amax
    modelopt, compressed = as_both_families_store(weight)
    a, b = ck.from_modelopt_nvfp4(**modelopt), ck.from_compressed_tensors_nvfp4(**compressed)
    assert same(a, b) and same(a, quantize(weight, "nvfp4"))
    assert np.array_equal(dequantize(a), dequantize(b))
    assert np.abs(dequantize(a) - weight).max() < amax / 6


@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 1e3))
def test_case_6_both_conventions_agree_to_the_last_place(seed: int, size: float) -> None:
    """For any amax the divisor's reciprocal is within one unit of FP32's last place."""
    modelopt, compressed = as_both_families_store(weights(2, 32, seed) * np.float32(size))
    a, b = ck.from_modelopt_nvfp4(**modelopt), ck.from_compressed_tensors_nvfp4(**compressed)
    assert np.array_equal(a.values, b.values) and np.array_equal(a.scales, b.scales)
    assert np.abs(a.tensor_scale - b.tensor_scale) <= np.spacing(a.tensor_scale)


def test_case_6_a_mistaken_convention_is_far_off() -> None:
    weight = weights()
    modelopt, compressed = as_both_families_store(weight)
    wrong = ck.from_modelopt_nvfp4(
        modelopt["weight"], modelopt["weight_scale"], compressed["weight_global_scale"]
    )
    assert np.abs(dequantize(wrong)).max() > 1e5 * np.abs(weight).max()


@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_nvfp4_round_trips_through_both_families(tensor_scale: float) -> None:
    values, scales = np.full((2, 8), 0x5A, np.uint8), np.full((2, 1), 0x38, np.uint8)
    packed = PackedWeight("nvfp4", 2, 16, values, scales, np.array([tensor_scale], np.float32))
    assert same(ck.from_modelopt_nvfp4(**ck.to_modelopt_nvfp4(packed)), packed)
    again = ck.from_compressed_tensors_nvfp4(**ck.to_compressed_tensors_nvfp4(packed))
    assert np.array_equal(again.values, values) and np.array_equal(again.scales, scales)
    assert np.abs(again.tensor_scale - packed.tensor_scale) <= np.spacing(packed.tensor_scale)
    # What came from a divisor goes back to one that gives the very same tensor scale.
    assert same(ck.from_compressed_tensors_nvfp4(**ck.to_compressed_tensors_nvfp4(again)), again)


def nvfp4(*tensor_scale: float) -> PackedWeight:
    n = len(tensor_scale)
    values, scales = np.full((n, 8), 0x5A, np.uint8), np.full((n, 1), 0x38, np.uint8)
    return PackedWeight(
        "nvfp4", n, 16, values, scales, np.array(tensor_scale, np.float32), (1,) * n
    )


def test_a_tensor_scale_without_a_divisor_is_refused_by_its_value() -> None:
    """The reciprocal overflows, or is subnormal and comes back far off."""
    for bad in (1e-45, 2.0**-129, 2.0**-128, 1.9 * 2.0**127, 3.3e38, 3.4028235e38):
        value = np.float32(bad)
        with pytest.raises(ValueError, match=re.escape(f"tensor_scale {value} of shard 1")):
            ck.to_compressed_tensors_nvfp4(nvfp4(1.0, bad))
        assert same(ck.from_modelopt_nvfp4(**ck.to_modelopt_nvfp4(nvfp4(bad))), nvfp4(bad))


@given(st.floats(2.0**-149, 3.4028234663852886e38, width=32))
def test_a_divisor_is_written_only_if_it_gives_the_tensor_scale_back(tensor_scale: float) -> None:
    packed = nvfp4(tensor_scale)
    try:
        tensors = ck.to_compressed_tensors_nvfp4(packed)
    except ValueError:
        assert not 2.0**-126 <= tensor_scale <= 2.0**126
        return
    again = ck.from_compressed_tensors_nvfp4(**tensors)
    unit = packed.tensor_scale - np.nextafter(packed.tensor_scale, 0)
    assert np.abs(again.tensor_scale - packed.tensor_scale) <= unit


@pytest.mark.filterwarnings("error")
def test_a_divisor_too_small_to_invert_is_what_the_error_names() -> None:
    packed = nvfp4(1.0, 1.0)
    divisor = np.array([1.0, 1e-45], np.float32)
    with pytest.raises(ValueError, match=r"weight_global_scale \[1.0, 1.4\S*e-45\] is too small"):
        ck.from_compressed_tensors_nvfp4(packed.values, packed.scales, divisor, (1, 1))


def test_case_7_fused_shards_keep_their_tensor_scales_in_both_families() -> None:
    parts = [quantize(weights(n) * np.float32(s), "nvfp4") for n, s in ((4, 1), (2, 50), (2, 0.01))]
    fused = concatenate(parts)
    rows = fused.shard_rows
    a = ck.from_modelopt_nvfp4(**ck.to_modelopt_nvfp4(fused), shard_rows=rows)
    assert same(a, fused) and len(set(a.tensor_scale.tolist())) == 3
    tensors = ck.to_compressed_tensors_nvfp4(fused)
    b = ck.from_compressed_tensors_nvfp4(**tensors, shard_rows=rows)
    assert np.allclose(b.tensor_scale, fused.tensor_scale, rtol=2.0**-22, atol=0)
    y = np.concatenate([reference_matmul(np.ones((1, 64)), p) for p in parts], axis=1)
    assert np.allclose(reference_matmul(np.ones((1, 64)), b), y, rtol=1e-6)
    with pytest.raises(ValueError, match="not one per shard"):
        ck.from_modelopt_nvfp4(**ck.to_modelopt_nvfp4(fused))


# --- Refusals and files ---------------------------------------------------------------------------


def test_wrong_tensors_are_refused_by_name() -> None:
    packed = quantize(weights(), "nvfp4")
    tensors = ck.to_modelopt_nvfp4(packed)
    for value in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="weight_scale_2 .* is not positive and finite"):
            ck.from_modelopt_nvfp4(**{**tensors, "weight_scale_2": np.float32(value)})
        with pytest.raises(ValueError, match="weight_global_scale .* is not positive and finite"):
            ck.from_compressed_tensors_nvfp4(packed.values, packed.scales, np.float32(value))
    with pytest.raises(ValueError, match="weight_scale_2 is float64, not float32"):
        ck.from_modelopt_nvfp4(**{**tensors, "weight_scale_2": np.float64(1)})
    with pytest.raises(ValueError, match="scale is float32, not a dtype of one byte"):
        ck.from_deepseek_v4(packed.values, packed.scales.astype(np.float32))
    with pytest.raises(ValueError, match=r"scales is uint8 \[6, 4\], not uint8 \[6, 2\] \(mxfp4"):
        ck.from_compressed_tensors_mxfp4(packed.values, packed.scales)
    with pytest.raises(ValueError, match=r"weight is \[192\], not \[N, K/2\]"):
        ck.from_deepseek_v4(packed.values.reshape(-1), packed.scales)
    with pytest.raises(ValueError, match="the weight is nvfp4, and this family stores mxfp4"):
        ck.to_deepseek_v4(packed)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """The file format as it is specified: header length, JSON header, bytes end to end."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        end = len(data) + array.nbytes
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(data), end]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_a_safetensors_file_with_f8_tensors_is_read(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    packed = quantize(weights(), "nvfp4")
    tensors = ck.to_modelopt_nvfp4(packed)
    dtypes = {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32"}
    stored = {f"layer.{name}": (dtypes[name], tensor) for name, tensor in tensors.items()}
    bf16 = np.arange(3, dtype=np.float32).astype(ml_dtypes.bfloat16)
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {**stored, "norm": ("BF16", bf16)})

    loaded = ck.load_safetensors(path, "layer.")
    assert set(loaded) == set(stored) and loaded["layer.weight_scale"].dtype == np.uint8
    named = {name.removeprefix("layer."): tensor for name, tensor in loaded.items()}
    assert same(ck.from_modelopt_nvfp4(**named), packed)
    assert np.array_equal(ck.load_safetensors(path)["norm"], bf16.view(np.uint16))


def test_an_unknown_dtype_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors")
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"t": ("F64", np.ones(2))})
    assert ck.load_safetensors(path)["t"].tolist() == [1, 1]
    monkeypatch.delitem(ck._SAFETENSORS_DTYPES, "F64")
    with pytest.raises(ValueError, match="t has dtype F64, which is not known"):
        ck.load_safetensors(path)


def test_without_safetensors_the_error_says_what_to_install(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        ck.load_safetensors(tmp_path / "model.safetensors")
