"""Small claims, evidence and throw-away repositories for the tests of the judging side."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd

from lab import registry
from lab.claims import Claim, canonical_bytes
from lab.samples import SAMPLES_SCHEMA, write_table

QUANTILES = {"q05": 1.0, "q25": 1.4, "q50": 1.6, "q75": 1.8, "q95": 2.2}
SHAPES = {4096: "q_o_proj", 1024: "kv_gqa", 14336: "gate_up"}


def cell(kernel="qgemv_mx", fmt="mxfp4", m=1, n=4096, k=4096, regime="cold_graph", baseline=None):
    return {
        "kernel": kernel,
        "baseline": baseline,
        "baseline_tuning": "best of 16 candidates" if baseline else None,
        "format": fmt,
        "N": n,
        "K": k,
        "M": m,
        "regime": regime,
    }


def fp8(m=1, n=4096, k=4096, regime="cold_graph"):
    return cell("cublaslt_fp8", "fp8_e4m3", m, n, k, regime)


def estimand(quantity="time_us", cells=None, reference=None, aggregate="single", name=None):
    return {
        "quantity": quantity,
        "cells": [cell()] if cells is None else cells,
        "reference_cells": reference or [],
        "aggregate": aggregate,
        "name": name,
    }


def speedup(ms=(1,), aggregate="single", quantity="speedup"):
    cells = [cell(m=m, baseline="cublaslt_fp8") for m in ms]
    return estimand(quantity, cells, [fp8(m) for m in ms], aggregate)


RULES = {
    "point": "interval_vs_band90",
    "share": "interval_vs_band90",
    "threshold": "interval_vs_threshold",
    "ordering": "order_by_interval",
    "equivalence": "tost",
    "correctness": "boolean",
    "exploratory": "none",
}


def claim(id="r2.qgemv_mx.time", kind="point", of=None, **changes):
    yes_no = kind in ("threshold", "ordering", "equivalence", "correctness")
    row = {
        "id": id,
        "rung": id[:2].upper(),
        "family": ".".join(id.split(".")[:2]),
        "kind": kind,
        "novelty": "blind",
        "statement": "One sentence.",
        "estimand": of or estimand(),
        "unit": "us",
        "direction": "above" if kind in ("threshold", "ordering", "correctness") else "two_sided",
        "quantiles": None if yes_no else dict(QUANTILES),
        "probability": 0.75 if yes_no else None,
        "threshold": 1.5 if kind == "threshold" else None,
        "smallest_difference": 0.02,
        "decision_rule": RULES[kind],
        "mechanism": {"formula": "bytes / bandwidth", "cost_model": "v1", "text": "weight traffic"},
        "refuted_by": "an interval on the other side",
        "does_not_show": "anything about another device",
        "provenance": {"source": "test", "registered": "2026-11-30", "access": "none"},
    }
    if row["estimand"]["quantity"] in ("speedup", "regime_ratio", "floor_ratio"):
        row["unit"] = "ratio"
    if kind == "share":
        row["unit"] = "fraction"
    return copy.deepcopy(row | changes)


def objects(*rows) -> list[Claim]:
    return [Claim.from_json(row) for row in rows]


def document(*rows, freeze="r2"):
    return {"schema_version": 1, "freeze": freeze, "claims": list(rows)}


def write_claims(prereg: Path, *rows, freeze="r2") -> Path:
    path = prereg / "claims" / f"{freeze}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(canonical_bytes(document(*rows, freeze=freeze)))
    return path


def amendment(amends="r2.qgemv_mx.time", number=1, **changes):
    row = {
        "schema_version": 1,
        "id": f"amendment-{number}",
        "amends": amends,
        "date": "2026-12-01",
        "access": "some",
        "who_knew_what": "The author had seen the pilot's floor.",
        "reason": "The unit was wrong.",
        "replacement": claim(f"{amends}+a{number}", novelty="seen"),
    }
    return row | changes


# Evidence.


def cell_row(campaign="c1", key=None, time=2.0, role="product", correctness="passed", **changes):
    key = key or cell()
    row = {
        "campaign": campaign,
        **{name: key[name] for name in ("kernel", "format", "N", "K", "M", "regime")},
        "role": "baseline" if key["kernel"].startswith("cublaslt") else role,
        "shape": SHAPES[key["N"]],
        "correctness": correctness,
        "time_us": time,
        "ci_low_us": time * 0.99,
        "ci_high_us": time * 1.01,
        "n_blocks": 8,
        "floor_us": 1.0,
        "floor_ci_low_us": 0.99,
        "floor_ci_high_us": 1.01,
        "tuning_candidates": 16 if key["kernel"].startswith("cublaslt") else None,
    }
    return row | changes


def block_rows(campaign="c1", key=None, time=2.0, noise=0.005, n=8, seed=0):
    key = key or cell()
    values = np.log(time) + np.random.default_rng(seed).normal(0, noise, n)
    shared = {name: key[name] for name in ("kernel", "format", "N", "K", "M", "regime")}
    shared |= {"campaign": campaign, "shape": SHAPES[key["N"]]}
    return [shared | {"block": i, "log_time": v} for i, v in enumerate(values)]


def tables(*arms, campaign="c1", noise=0.005):
    """Cells and blocks of (cell, time) pairs."""
    cells = [cell_row(campaign, key, time) for key, time in arms]
    blocks = [
        row
        for seed, (key, time) in enumerate(arms)
        for row in block_rows(campaign, key, time, noise, seed=seed)
    ]
    return {"cells": pd.DataFrame(cells), "blocks": pd.DataFrame(blocks)}


def samples(*arms, n=8, noise=0.005, dropped=()):
    """Legs of (cell, time) arms of one problem, in mirrored order, as samples.parquet holds them."""
    rng = np.random.default_rng(3)
    rows = []
    for block in range(n):
        for position, (key, time) in enumerate([*arms, *reversed(arms)]):
            t = time * float(np.exp(rng.normal(0, noise)))
            lost = block in dropped
            rows.append(
                {
                    **{name: key[name] for name in ("kernel", "format", "N", "K", "M", "regime")},
                    "role": "baseline" if key["kernel"].startswith("cublaslt") else "product",
                    "shape": SHAPES[key["N"]],
                    "arm": key["kernel"],
                    "block": block,
                    "position": position,
                    "extension": False,
                    "nodes": 16,
                    "t_n_us": 16 * t + 5,
                    "t_2n_us": 32 * t + 5,
                    "time_us": t,
                    "intercept_us": 5.0,
                    "start_ns": 0,
                    "end_ns": 1,
                    "dropped": lost,
                    "drop_reason": "hw_slowdown" if lost else None,
                }
            )
    return pd.DataFrame(rows)


# Throw-away repositories.


class Repo:
    """A git repository in a temporary folder, with a prereg/ to freeze in."""

    def __init__(self, root: Path):
        self.root = root
        self.prereg = root / "prereg"
        self.prereg.mkdir(parents=True)
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str) -> str:
        names = {f"GIT_{who}_{what}": "t@example.org" for who in ("AUTHOR", "COMMITTER")
                 for what in ("NAME", "EMAIL")}  # fmt: skip
        done = subprocess.run(
            ["git", "-C", str(self.root), *arguments],
            check=True,
            capture_output=True,
            text=True,
            env={"PATH": os.environ["PATH"], "HOME": str(self.root), **names},
        )
        return done.stdout.strip()

    def commit(self, message="change") -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD")

    def write(self, name: str, text="x\n") -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def freeze(self, *rows, freeze="r2", extra=()) -> dict:
        path = write_claims(self.prereg, *rows, freeze=freeze)
        return registry.freeze([path, *extra], self.prereg, "a test", "none")

    def campaign(self, arms, commit=None, head=None, name="r2-test-20261201-000000000000", **more):
        """Record a campaign of (cell, time) arms of one problem; gives its folder."""
        folder = self.root / "data" / "campaigns" / name
        folder.mkdir(parents=True)
        cells = []
        for key, time in arms:
            row = cell_row(name, key, time)
            tuned = row["tuning_candidates"]
            cells.append(
                {
                    **{k: row[k] for k in ("kernel", "role", "format", "shape", "N", "K", "M")},
                    "regime": row["regime"],
                    "weight_bytes": 1,
                    "tuning": {"candidates": tuned, "chosen": "3"} if tuned else None,
                    "correctness": "passed",
                    "time": {k: row[k] for k in ("time_us", "ci_low_us", "ci_high_us", "n_blocks")},
                    "floor": None,
                }
            )
        record = {
            "schema_version": 1,
            "rung": "R2",
            "kind": "campaign",
            "created_utc": "2026-12-01T00:00:00Z",
            "device": {"name": "NVIDIA H200", "uuid": "GPU-0"},
            "source": {"commit": commit, "dirty": False},
            "prereg_head": head,
            "protocol_sha256": "0" * 64,
            "constants": {},
            "cells": cells,
            "checks": [],
            "settings_untouched": True,
        }
        (folder / "campaign.json").write_text(json.dumps(record | more))
        write_table(samples(*arms), SAMPLES_SCHEMA, folder / "samples.parquet")
        return folder
