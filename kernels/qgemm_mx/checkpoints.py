"""Tensors of shipping checkpoints to PackedWeight, and back.

Every family packs two elements a byte with the even K index in the low nibble, so conversion is
reshaping; what differs is names, expert dimensions, row order and what the global scale means.

gpt-oss              mxfp4  blocks U8 [..., N, K/32, 16], scales U8 [..., N, K/32]
DeepSeek-V4          mxfp4  weight I8 [N, K/2], scale F8_E8M0 [N, K/32]
compressed-tensors   mxfp4  weight_packed U8 [N, K/2], weight_scale U8 [N, K/32]
compressed-tensors   nvfp4  weight_packed, weight_scale F8_E4M3 [N, K/16], weight_global_scale F32:
                            448 * 6 / amax, a DIVISOR
modelopt             nvfp4  weight, weight_scale F8_E4M3 [N, K/16], weight_scale_2 F32:
                            amax / (448 * 6), a MULTIPLIER

8-bit tensors of any dtype are taken by their bytes (uint8, int8, or the float8 dtypes of
ml_dtypes), never by their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .packing import PackedWeight

# numpy has no float8 or bfloat16, and no bit may be lost: those are read as integers.
_SAFETENSORS_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2",
    "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1", "BOOL": "?",
    "U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8",
    "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
}  # fmt: skip


def load_safetensors(path: Path | str, prefix: str = "") -> dict[str, np.ndarray]:
    """Tensors of a .safetensors file whose names start with `prefix`, F8 as uint8, BF16 as uint16.

    Needs the optional package `safetensors`; its own numpy loader refuses F8 dtypes, so the raw
    bytes are viewed instead. The whole file is read into memory. ImportError without the package,
    ValueError for a dtype that is not known.
    """
    try:
        from safetensors import deserialize
    except ImportError as error:
        raise ImportError(
            f"reading {path} needs the package safetensors: pip install safetensors"
        ) from error
    tensors = {}
    for name, entry in deserialize(Path(path).read_bytes()):
        if not name.startswith(prefix):
            continue
        if entry["dtype"] not in _SAFETENSORS_DTYPES:
            raise ValueError(f"{path}: {name} has dtype {entry['dtype']}, which is not known")
        dtype = np.dtype(_SAFETENSORS_DTYPES[entry["dtype"]])
        tensors[name] = np.frombuffer(entry["data"], dtype).reshape(entry["shape"])
    return tensors


# --- mxfp4 ----------------------------------------------------------------------------------------


def from_gpt_oss(
    blocks: np.ndarray, scales: np.ndarray, deinterleave: bool = False
) -> list[PackedWeight]:
    """One PackedWeight per expert from blocks [..., N, K/32, 16] and scales [..., N, K/32].

    Leading dimensions are experts, flattened in order; none gives a list of one. gate_up tensors
    alternate gate and up rows: `deinterleave` puts all gate rows first, then all up rows, as two
    shards of N/2. ValueError for shapes that do not fit, and for an N or K of 0.
    """
    blocks, scales = _bytes("blocks", blocks), _bytes("scales", scales)
    if blocks.ndim < 3 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise ValueError(
            f"blocks {list(blocks.shape)} and scales {list(scales.shape)} are not"
            " [..., N, K/32, 16] and [..., N, K/32]"
        )
    n, groups = scales.shape[-2:]
    if n < 1 or groups < 1:
        raise ValueError(f"blocks {list(blocks.shape)} hold no weight: N={n}, K={32 * groups}")
    experts = []
    for values, codes in zip(
        blocks.reshape(-1, n, groups * 16), scales.reshape(-1, n, groups), strict=True
    ):
        shard_rows = None
        if deinterleave:
            if n % 2:
                raise ValueError(f"N={n} is odd: gate and up rows do not alternate")
            values, codes = (np.concatenate([a[0::2], a[1::2]]) for a in (values, codes))
            shard_rows = (n // 2, n // 2)
        experts.append(PackedWeight("mxfp4", n, 32 * groups, values, codes, None, shard_rows))
    return experts


def to_gpt_oss(
    experts: Sequence[PackedWeight], interleave: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Blocks uint8 [E, N, K/32, 16] and scales uint8 [E, N, K/32]: `from_gpt_oss` undone."""
    if not experts:
        raise ValueError("to_gpt_oss needs at least one expert")
    for packed in experts:
        _require_format(packed, "mxfp4")
    values = np.stack([p.values for p in experts])
    scales = np.stack([p.scales for p in experts])
    if interleave:
        values, scales = _interleave(values), _interleave(scales)
    return values.reshape(*scales.shape, 16), scales


def from_deepseek_v4(weight: np.ndarray, scale: np.ndarray) -> PackedWeight:
    """mxfp4 from `weight` I8 [N, K/2] and `scale` F8_E8M0 [N, K/32]."""
    return _packed("mxfp4", weight, scale)


def to_deepseek_v4(packed: PackedWeight) -> dict[str, np.ndarray]:
    """`weight` int8 [N, K/2] and `scale` uint8 (the bytes of F8_E8M0) [N, K/32]."""
    _require_format(packed, "mxfp4")
    return {"weight": packed.values.view(np.int8), "scale": packed.scales}


def from_compressed_tensors_mxfp4(
    weight_packed: np.ndarray, weight_scale: np.ndarray
) -> PackedWeight:
    """mxfp4 from `weight_packed` U8 [N, K/2] and `weight_scale` U8 [N, K/32]."""
    return _packed("mxfp4", weight_packed, weight_scale)


def to_compressed_tensors_mxfp4(packed: PackedWeight) -> dict[str, np.ndarray]:
    """`weight_packed` uint8 [N, K/2] and `weight_scale` uint8 [N, K/32]."""
    _require_format(packed, "mxfp4")
    return {"weight_packed": packed.values, "weight_scale": packed.scales}


# --- nvfp4 ----------------------------------------------------------------------------------------


def from_compressed_tensors_nvfp4(
    weight_packed: np.ndarray,
    weight_scale: np.ndarray,
    weight_global_scale: np.ndarray,
    shard_rows: tuple[int, ...] | None = None,
) -> PackedWeight:
    """nvfp4 whose `weight_global_scale` (F32, one per shard) DIVIDES: W = e2m1 * scale / global.

    The tensor scale is its FP32 reciprocal, within half a unit in the last place. ValueError for a
    divisor so small that FP32 holds no reciprocal of it.
    """
    divisor = _global_scale("weight_global_scale", weight_global_scale)
    with np.errstate(over="ignore"):
        tensor_scale = np.float32(1) / divisor
    if not np.isfinite(tensor_scale).all():
        raise ValueError(
            f"weight_global_scale {divisor.tolist()} is too small: 1 / {divisor.min()} is no FP32"
        )
    return _packed("nvfp4", weight_packed, weight_scale, tensor_scale, shard_rows)


def to_compressed_tensors_nvfp4(packed: PackedWeight) -> dict[str, np.ndarray]:
    """`weight_packed`, `weight_scale` (the bytes of F8_E4M3) and the DIVISOR `weight_global_scale`.

    Of the divisors next to 1 / tensor scale, the one whose reciprocal comes closest. Some tensor
    scales are the FP32 reciprocal of no FP32 number: these come back one unit in the last place
    off, a relative 2^-23. ValueError for a tensor scale that comes back farther off (above 2^126
    its divisor is subnormal and short of bits) or has no finite divisor at all.
    """
    _require_format(packed, "nvfp4")
    scale = packed.tensor_scale
    with np.errstate(over="ignore", divide="ignore"):
        nearest = np.float32(1) / scale
        candidates = np.stack([nearest, np.nextafter(nearest, 0), np.nextafter(nearest, np.inf)])
        error = np.abs((np.float32(1) / candidates).astype(np.float64) - scale)
    best = np.take_along_axis(candidates, error.argmin(axis=0)[None], axis=0)[0]
    unit = scale - np.nextafter(scale, 0)  # of the last place; above the largest FP32 is no other
    lost = np.flatnonzero(~np.isfinite(nearest) | (error.min(axis=0) > unit))
    if lost.size:
        i = lost[0]
        raise ValueError(
            f"tensor_scale {scale[i]} of shard {i} has no FP32 divisor that gives it back within"
            f" one unit in the last place; the nearest is {nearest[i]}"
        )
    return {
        "weight_packed": packed.values,
        "weight_scale": packed.scales,
        "weight_global_scale": best.astype(np.float32),
    }


def from_modelopt_nvfp4(
    weight: np.ndarray,
    weight_scale: np.ndarray,
    weight_scale_2: np.ndarray,
    shard_rows: tuple[int, ...] | None = None,
) -> PackedWeight:
    """nvfp4 whose `weight_scale_2` (F32, one per shard) MULTIPLIES: W = e2m1 * scale * scale_2."""
    multiplier = _global_scale("weight_scale_2", weight_scale_2)
    return _packed("nvfp4", weight, weight_scale, multiplier, shard_rows)


def to_modelopt_nvfp4(packed: PackedWeight) -> dict[str, np.ndarray]:
    """`weight`, `weight_scale` (the bytes of F8_E4M3) and the MULTIPLIER `weight_scale_2`."""
    _require_format(packed, "nvfp4")
    return {
        "weight": packed.values,
        "weight_scale": packed.scales,
        "weight_scale_2": packed.tensor_scale,
    }


# --- Parts ----------------------------------------------------------------------------------------


def _packed(
    format: str,
    values: np.ndarray,
    scales: np.ndarray,
    tensor_scale: np.ndarray | None = None,
    shard_rows: tuple[int, ...] | None = None,
) -> PackedWeight:
    values, scales = _bytes("weight", values), _bytes("scale", scales)
    if values.ndim != 2:
        raise ValueError(f"weight is {list(values.shape)}, not [N, K/2]")
    n, k = values.shape[0], 2 * values.shape[1]
    return PackedWeight(format, n, k, values, scales, tensor_scale, shard_rows)


def _bytes(name: str, array: np.ndarray) -> np.ndarray:
    array = np.ascontiguousarray(array)
    if array.dtype.itemsize != 1:
        raise ValueError(f"{name} is {array.dtype}, not a dtype of one byte")
    return array.view(np.uint8)


def _global_scale(name: str, value: np.ndarray) -> np.ndarray:
    value = np.atleast_1d(np.asarray(value))
    if value.dtype != np.float32:
        raise ValueError(f"{name} is {value.dtype}, not float32")
    if not (np.isfinite(value).all() and (value > 0).all()):
        raise ValueError(f"{name} {value.tolist()} is not positive and finite")
    return value


def _interleave(rows: np.ndarray) -> np.ndarray:
    """[E, N, ...] with the rows of the second half between those of the first."""
    n = rows.shape[1]
    if n % 2:
        raise ValueError(f"N={n} is odd: gate and up rows do not alternate")
    halves = np.stack([rows[:, : n // 2], rows[:, n // 2 :]], axis=2)
    return halves.reshape(rows.shape)


def _require_format(packed: PackedWeight, name: str) -> None:
    if packed.format != name:
        raise ValueError(f"the weight is {packed.format}, and this family stores {name}")
