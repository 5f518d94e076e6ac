"""SYNTHETIC cells, claims, verdicts and campaigns for the tests of figures and report.

Nothing here was measured. The device is called "SYNTHETIC" in every table, and no rule imports this module.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from qgemm_mx.formats import bytes_per_weight

DEVICE = "SYNTHETIC GPU (not measured)"
CAMPAIGN = "r0-synthetic-20260101-0123456789ab"
ALL_M = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
CELL_COLUMNS = [
    "campaign",
    "device",
    "rung",
    "kernel",
    "role",
    "format",
    "shape",
    "N",
    "K",
    "M",
    "regime",
    "time_us",
    "ci_low_us",
    "ci_high_us",
    "floor_us",
    "correctness",
]
SHAPES = [
    {"name": name, "N": n, "K": k, "why": why, "set": group}
    for name, n, k, why, group in [
        ("q_o_proj", 4096, 4096, "square canonical", "frozen"),
        ("kv_gqa", 1024, 4096, "small N: tails, starved occupancy", "frozen"),
        ("gate_up", 14336, 4096, "wide N: friendly", "frozen"),
        ("down_proj", 4096, 14336, "deep K: split-K stress", "frozen"),
        ("gpt_oss_2880", 2880, 2880, "not 128-aligned", "frozen"),
        ("fused_qkv", 6144, 4096, "end-to-end linear check", "frozen"),
        ("llama70b_gate_up", 57344, 8192, "large", "large"),
        ("llama70b_down", 8192, 28672, "large", "large"),
        ("llama70b_qkv", 10240, 8192, "large", "large"),
    ]
]
FP8_CELL = ("cublaslt_fp8", "fp8_e4m3", "kv_gqa", 1024, 4096)
ARMS = [
    ("cublaslt_bf16", "baseline", "bf16"),
    ("cublaslt_fp8", "baseline", "fp8_e4m3"),
    ("naive_dequant", "sanity_floor", "mxfp4"),
    ("naive_dequant", "sanity_floor", "nvfp4"),
    ("naive_dequant", "sanity_floor", "int4_g128"),
    ("naive_dequant", "sanity_floor", "int4_g64"),
]


def cells(ms: list[int] | None = None, shapes: list[dict] | None = None) -> pd.DataFrame:
    """Made-up cells in the columns of cells.csv; the reference kernel's rows carry no time."""
    rng = np.random.default_rng(7)
    rows = []

    def add(kernel, role, fmt, s, m, regime, time, floor):
        row = [
            CAMPAIGN,
            DEVICE,
            "R0",
            kernel,
            role,
            fmt,
            s["name"],
            s["N"],
            s["K"],
            m,
            regime,
            time,
        ]
        row += [
            None if time is None else time * 0.985,
            None if time is None else time * 1.02,
            floor,
            "passed",
        ]
        rows.append(dict(zip(CELL_COLUMNS, row, strict=True)))

    for s in shapes or SHAPES:
        weights = s["N"] * s["K"]
        for m in ms or ALL_M:
            for kernel, role, fmt in ARMS:
                moved = weights * bytes_per_weight(fmt)
                floor = 1.8 + moved / 4.3e6
                rate = 1.35e9 if fmt == "fp8_e4m3" else 0.72e9
                time = max(floor * 1.12, 2.0 * m * weights / rate) * math.exp(rng.normal(0, 0.03))
                if kernel == "naive_dequant":
                    time += 2.0 + weights * 2.6 / 3.6e6
                add(kernel, role, fmt, s, m, "cold_graph", time, floor)
                if m in (1, 64):
                    hot = time * (0.7 if moved < 4e7 else 0.98)
                    add(kernel, role, fmt, s, m, "hot_graph", hot, floor)
                    add(kernel, role, fmt, s, m, "cold_loop", time + 2.4, floor)
            for fmt in ("mxfp4", "nvfp4"):
                add("reference", "correctness_only", fmt, s, m, "cold_graph", None, None)
    frame = pd.DataFrame(rows, columns=CELL_COLUMNS)
    number = ["time_us", "ci_low_us", "ci_high_us", "floor_us"]
    return frame.astype(dict.fromkeys(number, float))


def claim(cid: str, rung: str, family: str, kind: str, novelty: str, unit: str, **more) -> dict:
    """One claim in the closed schema of prereg/claims."""
    q50 = more.get("q50", 2.0)
    numeric = kind in ("point", "equivalence", "share")
    spread = {"q05": 0.8, "q25": 0.93, "q50": 1.0, "q75": 1.08, "q95": 1.3}
    return {
        "id": cid,
        "rung": rung,
        "family": family,
        "kind": kind,
        "novelty": novelty,
        "statement": more.get(
            "statement", "A made-up statement: this call takes about as long as the model says."
        ),
        "estimand": {
            "quantity": "time_us",
            "cells": [],
            "reference_cells": [],
            "aggregate": "single",
            "name": None,
        },
        "unit": unit,
        "direction": "above" if kind == "threshold" else "two_sided",
        "quantiles": {k: q50 * v for k, v in spread.items()} if numeric else None,
        "probability": None if numeric else 0.8,
        "threshold": 1.2 if kind == "threshold" else None,
        "smallest_difference": 0.02,
        "decision_rule": "interval_vs_band90" if numeric else "interval_vs_threshold",
        "mechanism": {
            "formula": "T = bytes / bandwidth + launch",
            "cost_model": "v1",
            "text": "made-up mechanism",
        },
        "refuted_by": "an interval outside the band",
        "does_not_show": "anything about another device",
        "provenance": {"source": "synthetic", "registered": "2026-01-01", "access": "none"},
    }


def claims() -> list[dict]:
    """Made-up claims of all rungs: measured ones in R0, large families in R2."""
    out = []
    for s in SHAPES:
        for m in (1, 16):
            cid = f"r0.cublaslt_fp8.time.{s['name']}.m{m}"
            q50 = 2.0 + s["N"] * s["K"] / 4.0e6
            out.append(claim(cid, "R0", "r0.cublaslt_fp8.time", "point", "blind", "us", q50=q50))
    for name, q50 in (("asymptote", 4.2), ("launch", 1.4)):
        out.append(
            claim(f"r0.constant.{name}", "R0", "r0.constant", "point", "seen", "TB/s", q50=q50)
        )
    for i, novelty in enumerate(["blind", "blind", "seen", "mechanical", "mechanical"]):
        out.append(claim(f"r0.order.{i}", "R0", "r0.order", "threshold", novelty, "ratio"))
    out.append(
        claim("r0.reference.bits", "R0", "r0.reference", "correctness", "mechanical", "boolean")
    )
    for cause in ("grid", "launch", "staging", "dequant"):
        out.append(
            claim(f"r1.share.{cause}", "R1", "r1.share", "share", "blind", "share", q50=0.25)
        )
    for fmt in ("mxfp4", "nvfp4"):
        for s in SHAPES:
            for m in (1, 4, 16):
                cid = f"r2.qgemv_mx.time.{fmt}.{s['name']}.m{m}"
                out.append(claim(cid, "R2", "r2.qgemv_mx.time", "point", "blind", "us", q50=5.0))
    out.append(claim("r3.triton.ratio", "R3", "r3.dsl", "point", "blind", "ratio", q50=0.6))
    return out


def verdicts(from_claims: list[dict] | None = None) -> pd.DataFrame:
    """One made-up verdict a claim, in the columns of verdicts.csv."""
    rng = np.random.default_rng(11)
    rows = []
    for c in from_claims or claims():
        q = c["quantiles"] or dict.fromkeys(["q05", "q25", "q50", "q75", "q95"])
        row = {k: c[k] for k in ("rung", "kind", "novelty", "unit")} | q
        row |= {"claim": c["id"], "observed": None, "ci_low": None, "ci_high": None}
        row |= {"verdict": "NOT_RUN", "campaign": None}
        if c["rung"] == "R0":
            row["campaign"] = CAMPAIGN
            if c["kind"] == "point":
                seen = q["q50"] * math.exp(rng.normal(0, 0.2))
                low, high = seen * 0.98, seen * 1.02
                row |= {"observed": seen, "ci_low": low, "ci_high": high}
                inside = low >= q["q05"] and high <= q["q95"]
                apart = high < q["q05"] or low > q["q95"]
                row["verdict"] = "HIT" if inside else "MISS" if apart else "STRADDLE"
            elif c["kind"] == "threshold":
                row |= {"observed": 1.3, "ci_low": 1.1, "ci_high": 1.5}
                row["verdict"] = ["CONFIRMED", "REFUTED", "INCONCLUSIVE", "CONFIRMED", "DEVIATED"][
                    int(c["id"][-1]) % 5
                ]
            else:
                row["verdict"] = "CONFIRMED"
        rows.append(row)
    columns = ["claim", "rung", "kind", "novelty", "unit", "q05", "q25", "q50", "q75", "q95"]
    columns += ["observed", "ci_low", "ci_high", "verdict", "campaign"]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.astype(dict.fromkeys(columns[5:13], float))


def attempt(
    stage: str, status: str, reason: str | None, minute: int, seconds: float | None, key: tuple
) -> dict:
    """One made-up attempt row (lab.rows.AttemptRow)."""
    row = {"stage": stage, "status": status, "reason": reason, "seconds": seconds}
    names = ("kernel", "format", "shape", "N", "K", "M", "regime")
    return (
        row | {"started_utc": f"2026-01-01T12:0{minute}:00Z"} | dict(zip(names, key, strict=True))
    )


def campaigns() -> list[dict]:
    """One made-up campaign.json, plus the `id` and the summaries that the report's caller attaches."""
    constant = {"ci_low": None, "ci_high": None, "n": 9, "how": "made up"}
    return [
        {
            "id": CAMPAIGN,
            "schema_version": 1,
            "rung": "R0",
            "kind": "campaign",
            "created_utc": "2026-01-01T12:00:00Z",
            "device": {
                "name": DEVICE,
                "uuid": "GPU-00000000",
                "driver": "580.0",
                "cuda_driver_version": 13000,
                "sm_count": 132,
                "l2_bytes": 62914560,
                "memory_bytes": 150_000_000_000,
                "ecc": True,
                "power_limit_w": 700,
            },
            "software": {"python": "3.11.2", "numpy": "2.4.6", "cupy": "14.2.0", "nvcc": "13.0.88"},
            "source": {"commit": "0" * 40, "dirty": False, "tree_digest": "1" * 64}
            | {"kernels_digest": "4" * 64},
            "prereg_head": "2" * 64,
            "protocol_sha256": "3" * 64,
            "seed": 20260101,
            "cubins": [],
            "constants": {
                "launch_floor_grid1056_us": constant | {"value": 2.2, "unit": "us"},
                "launch_floor_stream_int4_g128_kv_gqa_us": constant | {"value": 1.6, "unit": "us"},
                "launch_loop_us": constant | {"value": 6.1, "unit": "us"},
                "read_bandwidth_tbps": constant
                | {"value": 4.3, "unit": "TB/s", "ci_low": 4.28, "ci_high": 4.31},
                "bf16_peak_tflops": constant | {"value": 720.0, "unit": "TFLOP/s"},
                "fp8_peak_tflops": constant | {"value": 1350.0, "unit": "TFLOP/s"},
                "launch_floor_us": constant | {"value": 1.4, "unit": "us"},
            },
            "cells": [],
            "checks": [
                {
                    "kernel": "reference",
                    "format": fmt,
                    "shape": "q_o_proj",
                    "N": 4096,
                    "K": 4096,
                    "M": m,
                    "name": name,
                    "passed": not (fmt == "nvfp4" and name == "poison" and m == 2),
                    "measured": 0.1 * m,
                    "limit": 1.0,
                    "detail": "made up <b>detail</b>",
                }
                for fmt in ("mxfp4", "nvfp4")
                for name in ("probe_one_hot", "random_fp64", "poison")
                for m in (1, 2)
            ]
            + [
                {
                    "kernel": "reference",
                    "format": "mxfp4",
                    "shape": "probe_7x256",
                    "N": 7,
                    "K": 256,
                    "M": 33,
                    "name": name,
                    "passed": True,
                    "measured": 0.0,
                    "limit": 0.0,
                    "detail": "made up",
                }
                for name in ("decode_bits", "all_codes")
            ],
            "attempts": [attempt("occupancy", "ok", None, 0, 0.01, (None,) * 7)]
            + [
                attempt(
                    "time",
                    "ok",
                    None,
                    i,
                    1.25,
                    ("cublaslt_fp8", "fp8_e4m3", "kv_gqa", 1024, 4096, m, "cold_graph"),
                )
                for i, m in enumerate([1, 2, 4])
            ]
            + [
                attempt(
                    "stream floor",
                    "crashed",
                    "<script>alert('made up')</script>",
                    9,
                    None,
                    (None,) * 7,
                )
            ],
            "counters": [
                {
                    "kernel": "stream_read",
                    "format": "mxfp4",
                    "shape": shape,
                    "N": n,
                    "K": k,
                    "M": 1,
                    "regime": "cold_loop",
                    "metric": metric,
                    "unit": unit,
                    "value": value * (n * k * 0.53125 if unit == "bytes" else 1.0),
                    "tool": "made up",
                }
                for shape, n, k, value in (
                    ("q_o_proj", 4096, 4096, 1.0),
                    ("gate_up", 14336, 4096, 0.95),
                )
                for metric, unit in (
                    ("dram__bytes_read.sum", "bytes"),
                    ("dram_bytes_over_weight_bytes", "ratio"),
                )
            ],
            "settings_untouched": True,
            "legs": {
                "total": 4000,
                "dropped": 16,
                "extension": 40,
                "reasons": {"thermal slowdown": 16},
            },
            "a_a": {
                "kernel": "cublaslt_fp8",
                "format": "fp8_e4m3",
                "regime": "cold_graph",
                "shape": "kv_gqa",
                "M": 64,
                "points": 126,
                "differ": 7,
                "low": 2,
                "high": 11,
                "median": 0.003,
                "largest": 0.02,
            },
            "clocks": {
                "readings": 400,
                "capped": 0.5,
                "sm_clock_mhz": 1700.0,
                "power_w": 600.0,
                "bands": [
                    {"m_low": 1, "m_high": 64, "readings": 200, "capped": 0.0}
                    | {"sm_clock_mhz": 1980.0, "power_w": 500.0},
                    {"m_low": 1024, "m_high": 8192, "readings": 200, "capped": 1.0}
                    | {"sm_clock_mhz": 1420.0, "power_w": 690.0},
                ],
            },
            "sittings": [
                {"start": "2026-01-01 12:00:00", "end": "2026-01-01 12:08:00", "minutes": 8.0}
                | {"cut_off": True, "stop": "the process ended without a word"}
                | {"shapes": ["kv_gqa", "gate_up"], "constants": True},
                {"start": "2026-01-01 12:09:00", "end": "2026-01-01 12:11:00", "minutes": 2.0}
                | {"cut_off": False, "stop": None, "shapes": ["q_o_proj"], "constants": False},
            ],
            "longest_pause_s": 60.5,
            "telemetry": {
                "sm_clock_mhz": {"min": 1700, "median": 1905, "max": 1980},
                "power_w": {"min": 120, "median": 430, "max": 690},
            },
        }
    ]


def occupancy() -> pd.DataFrame:
    """Made-up occupancy table in the columns of lab.occupancy.table."""
    row = {
        "kernel": "stream_read",
        "entry": "stream_read_u4",
        "threads": 256,
        "registers": 32,
        "spill_bytes": 0,
    }
    row |= {"smem_static_bytes": 0, "smem_dynamic_bytes": 0, "blocks_per_sm": 8, "warps_per_sm": 64}
    row |= {"occupancy": 1.0, "limiter": "threads"}
    return pd.DataFrame([row | {"arch": arch} for arch in ("sm_86", "sm_90a")])


def builds() -> list[dict]:
    """Made-up build records (qgemm_mx.build.BuildRecord.to_json), with the opcode counts of its entries beside it."""
    entry = {
        "entry": "stream_read_u4",
        "threads": 256,
        "registers": 32,
        "barriers": 1,
        "stack_bytes": 0,
    }
    entry |= {"spill_store_bytes": 0, "spill_load_bytes": 0, "smem_static_bytes": 0}
    return [
        {
            "schema_version": 1,
            "name": "stream_read",
            "role": "floor",
            "architecture": arch,
            "nvcc_version": "13.0.88",
            "flags": ["-O3"],
            "inputs_sha256": "b" * 64,
            "cubin": f"stream_read.{arch}.cubin",
            "cubin_sha256": "a" * 64,
            "cubin_bytes": 4096,
            "entries": [entry],
            "sass": {"stream_read_u4": {"LDG.E.128": 8, "EXIT": 1}},
        }
        for arch in ("sm_86", "sm_90a")
    ]


def integrity() -> dict:
    """A made-up verified chain of two freezes, both before the campaign."""
    freeze = {"access": "none", "note": "made-up freeze of everything"}
    freezes = [
        freeze | {"seq": 1, "frozen_utc": "2026-01-01T11:00:00Z", "claims": 60},
        freeze | {"seq": 2, "frozen_utc": "2026-01-01T11:40:00Z", "claims": 30, "access": "pilot"},
    ]
    return {"status": "OK", "head": "2" * 64, "problems": [], "freezes": freezes}


def protocols() -> dict:
    """A made-up protocol under the digest that the made-up campaign recorded."""
    return {
        "3" * 64: {
            "telemetry": {"drop_reasons": ["hw_slowdown", "sw_thermal_slowdown"]},
            "cublaslt": {
                "requested_candidates": 24,
                "workspace_bytes": 8 << 20,
                "fp8_fast_accumulation": True,
                "select": "made-up choice of cuBLASLt",
            },
            "stream": {"select": "made-up choice of the stream"},
        }
    }


def scores() -> dict:
    """Made-up scores of two forecasters."""
    share = {"k": 9, "n": 18, "value": 0.5, "low": 0.29, "high": 0.71}
    row = {
        "set": "blind",
        "n_numeric": 18,
        "coverage50": share,
        "coverage90": share | {"k": 16, "value": 0.89},
    }
    row |= {"wis": 0.08, "n_yes_no": 2, "brier": 0.12}
    return {
        "rows": [
            row | {"forecaster": "ours"},
            row | {"forecaster": "dumb (roofline only)", "brier": None},
        ]
    }


def figure_arguments() -> dict:
    """Everything that figures.build_all takes."""
    given = report_arguments()
    taken = {k: given[k] for k in ("cells", "verdicts", "claims", "campaigns", "shapes")}
    formats = {fmt for _, _, fmt in ARMS}
    return taken | {"bytes_per_weight": {fmt: bytes_per_weight(fmt) for fmt in formats}}


def report_arguments() -> dict:
    """Everything that report.render takes beside the path and the figures."""
    registered = claims()
    return {
        "verdicts": verdicts(registered),
        "cells": cells(),
        "claims": registered,
        "campaigns": campaigns(),
        "occupancy": occupancy(),
        "builds": builds(),
        "scores": scores(),
        "integrity": integrity(),
        "shapes": SHAPES,
        "protocols": protocols(),
        "pinned": {"numpy": "2.4.6", "cupy-cuda13x": "14.9.9", "scipy": "1.0"},
        "present": {"kernels_digest": "4" * 64, "tree_digest": "5" * 64},
    }
