"""Writes claims: from the cost model's formulas to claim files that are then frozen by `lab.registry`.

    python -m lab.predictions r0          writes prereg/claims/r0.json and prereg/forecasts/r0.json
    python -m lab.predictions r1_r3       the same for R1 to R3

A freeze can be rebuilt from its cost model version, and a test holds the rebuilt bytes against the frozen ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab import predictions_kernels, predictions_r0
from lab.claims import canonical_bytes
from lab.cost_model import lognormal_quantiles, roofline_us
from qgemm_mx.formats import bytes_per_weight, weight_bytes


def dumb_forecast(row: dict[str, Any], dumb: dict[str, Any]) -> dict[str, Any]:
    """The datasheet roofline's forecast of one claim: quantiles around a roofline ratio, or a coin."""
    answer: dict[str, Any] = {"claim": row["id"], "quantiles": None, "probability": None}
    if row["quantiles"] is None:
        return answer | {"probability": dumb["probability"]}
    of = row["estimand"]
    names = {
        "read_bandwidth_tbps": dumb["read_bandwidth_tbps"],
        "bf16_peak_tflops": dumb["bf16_tflops"],
        "fp8_peak_tflops": dumb["fp8_tflops"],
        "ridge_bf16_flop_per_byte": dumb["bf16_tflops"] / dumb["read_bandwidth_tbps"],
        "ridge_fp8_flop_per_byte": dumb["fp8_tflops"] / dumb["read_bandwidth_tbps"],
        "crossover_m_mxfp4": dumb["bf16_tflops"]
        / dumb["read_bandwidth_tbps"]
        * bytes_per_weight("mxfp4")
        / 2,
        "l2_read_bandwidth_tbps": dumb["read_bandwidth_tbps"],
    }

    def time_of(c: dict[str, Any]) -> float:
        rate = dumb["fp8_tflops"] if c["format"] == "fp8_e4m3" else dumb["bf16_tflops"]
        size = weight_bytes(c["format"], c["N"], c["K"])
        flop = 0.0 if c["kernel"] == "stream_read" else 2.0 * c["M"] * c["N"] * c["K"]
        return roofline_us(size, flop, dumb["read_bandwidth_tbps"], rate)

    match of["quantity"]:
        case "time_us":
            median = time_of(of["cells"][0])
        case "speedup":
            ratios = [
                time_of(r) / time_of(c)
                for c, r in zip(of["cells"], of["reference_cells"], strict=True)
            ]
            median = 1.0
            for ratio in ratios:
                median *= ratio ** (1.0 / len(ratios))
        case "constant":
            median = names.get(of["name"], 1.0)  # a roofline knows no launch cost: one microsecond
        case "share":
            median = dumb.get("share", 0.2)
        case _:
            median = 1.0  # a roofline knows no caches and no overheads: at the floor, no difference
    return answer | {"quantiles": lognormal_quantiles(median, dumb["sigma"])}


FREEZES: dict[str, tuple[Callable[[Path], list[dict[str, Any]]], str]] = {
    "r0": (predictions_r0.build_r0, "v1"),
    "r1_r3": (predictions_kernels.build_r1_r3, "v2"),
}


def documents(prereg_dir: Path, freeze: str) -> dict[Path, bytes]:
    """The claim file and the dumb forecaster's file of a freeze, as canonical bytes."""
    build, version = FREEZES[freeze]
    claims = build(prereg_dir)
    parameters = json.loads((prereg_dir / f"cost_model_{version}.json").read_text(encoding="utf-8"))
    dumb = parameters["dumb_forecaster"]
    scored = [c for c in claims if c["quantiles"] is not None or c["probability"] is not None]
    forecasts = {
        "schema_version": 1,
        "freeze": freeze,
        "forecaster": dumb["name"],
        "forecasts": [dumb_forecast(c, dumb) for c in scored],
    }
    return {
        prereg_dir / "claims" / f"{freeze}.json": canonical_bytes(
            {"schema_version": 1, "freeze": freeze, "claims": claims}
        ),
        prereg_dir / "forecasts" / f"{freeze}.json": canonical_bytes(forecasts),
    }


def main(arguments: list[str]) -> int:
    """Write the files of one freeze; a file that exists is never overwritten."""
    if len(arguments) != 1 or arguments[0] not in FREEZES:
        print(f"usage: python -m lab.predictions {'|'.join(FREEZES)}", file=sys.stderr)
        return 2
    for path, data in documents(Path("prereg"), arguments[0]).items():
        if path.exists():
            print(f"{path} exists: a written freeze is changed by amendment only", file=sys.stderr)
            return 1
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(data)
        temporary.replace(path)
        print(f"wrote {path}: {len(data)} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
