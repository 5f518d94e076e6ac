"""Made-up legs, cells and campaigns for the tests of records and archive. Nothing here was measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from lab import protocol, records

SHAPE = {"shape": "q_o_proj", "N": 4096, "K": 4096}


def header(**changes):
    value = {
        "rung": "R0",
        "kind": "campaign",
        "created_utc": "2026-01-02T03:04:05Z",
        "device": {
            "name": "SYNTHETIC GPU",
            "uuid": "GPU-0",
            "driver": "580.1",
            "cuda_driver_version": 13000,
            "sm_count": 132,
            "l2_bytes": 1 << 20,
            "memory_bytes": 1 << 30,
            "ecc": True,
            "power_limit_w": 700.0,
        },
        "software": {"python": "3.11.7"},
        "source": {"commit": None, "dirty": None, "tree_digest": "1" * 64},
        "prereg_head": None,
        "protocol_sha256": "2" * 64,
        "seed": 7,
        "cubins": [
            {
                "name": "stream_read",
                "arch": "sm_90a",
                "sha256": "3" * 64,
                "registers": 32,
                "spill_bytes": 0,
                "smem_static_bytes": 0,
            }
        ],
    }
    return value | changes


def cell(
    kernel="cublaslt_fp8", role="baseline", fmt="fp8_e4m3", m=1, weight_bytes=4096 * 4096, **changes
):
    value = {
        "kernel": kernel,
        "role": role,
        "format": fmt,
        **SHAPE,
        "M": m,
        "regime": "cold_graph",
        "weight_bytes": weight_bytes,
        "correctness": "passed",
    }
    return records.CellRow(**(value | changes))


def check(of: records.CellRow, name="random_fp64", passed=True, **changes):
    return records.CheckRow(
        of.kernel, of.format, of.shape, of.N, of.K, of.M, name, passed, **changes
    )


ARMS = {
    "stream_read": ("stream_read", "floor", 4.0),
    "cublaslt_fp8": ("cublaslt_fp8", "baseline", 5.0),
    "cublaslt_fp8#2": ("cublaslt_fp8", "baseline", 5.0),
}


def legs(m=1, regime="cold_graph", blocks=4, seed=0, arms=ARMS, nodes=16):
    """Legs of a point in mirrored blocks: block b of arm a has legs of a's time times 1.01 and times 1/1.01."""
    rng = np.random.default_rng(seed)
    rows = []
    for block in range(blocks):
        order = list(arms) + list(arms)[::-1]
        scale = float(np.exp(rng.normal(0, 0.01)))
        for position, arm in enumerate(order):
            kernel, role, time = arms[arm]
            t = time * scale * (1.01 if position < len(arms) else 1 / 1.01)
            looped = regime == "cold_loop"
            t_n = nodes * t if looped else nodes * t + 2.0
            t_2n = float("nan") if looped else 2 * nodes * t + 2.0
            rows.append(
                {
                    "kernel": kernel,
                    "format": "fp8_e4m3",
                    "role": role,
                    **SHAPE,
                    "M": m,
                    "regime": regime,
                    "arm": arm,
                    "block": block,
                    "position": position,
                    "extension": False,
                    "nodes": nodes,
                    "t_n_us": t_n,
                    "t_2n_us": t_2n,
                    "time_us": t_n / nodes if looped else (t_2n - t_n) / nodes,
                    "intercept_us": float("nan") if looped else 2 * t_n - t_2n,
                    "start_ns": 1000 * len(rows),
                    "end_ns": 1000 * len(rows) + 500,
                    "dropped": False,
                    "drop_reason": None,
                }
            )
    return pd.DataFrame(rows)


def planned_point(frozen, m=1, seed=0, wide=False):
    """A point as the frozen protocol plans it: all its regimes, blocks in the order of its seed, with their cells.

    `wide` scatters the headline's first blocks beyond the frozen half width, so that it is extended.
    """
    regimes = frozen["regimes"]
    samples, cells = [], []
    for regime in (regimes["headline"], *regimes["secondary"]):
        headline = regime == regimes["headline"]
        arms = [name for name in ARMS if headline or not name.endswith("#2")]
        order = protocol.block_order(frozen, arms, SHAPE["shape"], m, regime)
        n = protocol.planned_blocks(frozen, m, regime)
        taken = len(order) if headline and wide else n
        frame = legs(m, regime, taken, seed, {name: ARMS[name] for name in arms})
        at = frame.groupby(["block", "arm"]).cumcount()  # first or second leg of an arm
        places = {}
        for block, names in enumerate(order[:taken]):
            for position, name in enumerate(names):
                places[block, name, int(position >= len(arms))] = position
        frame["position"] = [
            places[key] for key in zip(frame["block"], frame["arm"], at, strict=True)
        ]
        frame["extension"] = frame["block"] >= n
        if headline and wide:
            scale = 1 + 0.1 * (frame["block"] % 2)
            for name in ("t_n_us", "t_2n_us", "time_us", "intercept_us"):
                frame[name] *= scale
        frame = frame.sort_values(["block", "position"], ignore_index=True)
        samples.append(frame)
        cells += [
            cell("stream_read", "floor", m=m, regime=regime),
            cell(m=m, regime=regime, tuning=records.Tuning(candidates=32, chosen="made up")),
        ]
    cells.append(cell("reference", "correctness_only", m=m))
    frame = pd.concat(samples, ignore_index=True)
    # Longer than a leg takes, and all of them near the readings of `telemetry`.
    frame["start_ns"] = 400_000 * np.arange(len(frame))
    frame["end_ns"] = frame["start_ns"] + 399_000
    checked = {c.kernel: c for c in cells}
    return {
        "cells": cells,
        "checks": [check(c) for c in checked.values()],
        "samples": frame,
        "telemetry": telemetry(),
    }


def planned_campaign(tmp: Path, frozen, point=None, constants=None, **changes) -> Path:
    """A finished campaign under tmp/data of one planned point (given, or made here)."""
    partial = records.PartialCampaign.open(
        tmp / "partial", header(**{"seed": frozen["seed"]} | changes)
    )
    partial.append_point("q_o_proj/M1", **(point or planned_point(frozen)))
    if constants:
        partial.add_constants(constants)
    return records.finalise(partial, tmp / "data")


def telemetry():
    row = {"sm_clock_mhz": 1900.0, "mem_clock_mhz": None, "power_w": 300.0, "temperature_c": 40.0}
    return pd.DataFrame([{"t_ns": 1000 * i, **row, "throttle_reasons": i} for i in range(3)])


def point(m=1, **kwargs):
    """Cells, checks, samples and telemetry of one point, as `append_point` takes them."""
    cells = [
        cell("stream_read", "floor", m=m),
        cell(m=m),
        cell("reference", "correctness_only", m=m),
    ]
    return {
        "cells": cells,
        "checks": [check(c) for c in cells],
        "samples": legs(m=m, **kwargs),
        "telemetry": telemetry(),
    }


def journal(root: Path, ms=(1, 8), **changes) -> records.PartialCampaign:
    partial = records.PartialCampaign.open(root, header(**changes))
    for m in ms:
        with partial.attempt("point", shape="q_o_proj", M=m):
            partial.append_point(f"q_o_proj/M{m}", **point(m, seed=m))
    constant = {"value": 1.5, "unit": "us", "ci_low": 1.4, "ci_high": 1.6, "n": 8, "how": "made up"}
    partial.add_constants({"launch_floor_us": constant})
    return partial


def campaign(tmp: Path, **changes) -> Path:
    """A finished campaign under tmp/data."""
    return records.finalise(journal(tmp / "partial", **changes), tmp / "data")
