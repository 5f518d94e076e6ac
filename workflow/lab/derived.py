"""Constants of the device that follow from others: the ridge, and the M at which memory and compute take as long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qgemm_mx.formats import FORMATS, bytes_per_weight

BANDWIDTH = "read_bandwidth_tbps"
PEAKS = ("bf16", "fp8")


def derived(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The constants that follow from measured ones, as rows of a campaign; KeyError where one of those is missing."""
    bandwidth, out = found[BANDWIDTH], {}
    for kind in PEAKS:
        peak = found[f"{kind}_peak_tflops"]
        out[f"ridge_{kind}_flop_per_byte"] = {
            "value": peak["value"] / bandwidth["value"],
            "unit": "FLOP/B",
            "ci_low": peak["ci_low"] / bandwidth["ci_high"],
            "ci_high": peak["ci_high"] / bandwidth["ci_low"],
            "n": peak["n"],
            "how": f"{kind}_peak_tflops over {BANDWIDTH}",
        }
    ridge = out["ridge_bf16_flop_per_byte"]
    for fmt in FORMATS:
        factor = bytes_per_weight(fmt) / 2.0
        out[f"crossover_m_{fmt}"] = {
            "value": ridge["value"] * factor,
            "unit": "M",
            "ci_low": ridge["ci_low"] * factor,
            "ci_high": ridge["ci_high"] * factor,
            "n": ridge["n"],
            "how": f"ridge_bf16 x {bytes_per_weight(fmt)} bytes a weight / 2: memory and BF16 compute take as long",
        }
    return out


def is_derived(name: str) -> bool:
    """Whether a constant of that name follows from others."""
    return name.startswith(("ridge_", "crossover_m_"))
