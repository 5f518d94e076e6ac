"""R1 in the report: experiments on single causes, profiler counters, and instructions of the testbed's variants."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pandas as pd

from lab import analysis_r1
from lab import figures as drawings
from lab.decomposition import FACTORS, FULL, NONE
from lab.page import BLANK, Tables, absent, number
from lab.r1_words import SUMMARY_M, three
from qgemm_mx.formats import weight_bytes


def experiments(kit: Tables, text: Mapping[str, Any], frame: pd.DataFrame) -> list[dict]:
    """A table an experiment that was taken: `title`, `count` of rows in words, `table`."""
    out = []
    for name, title, what in text["experiments"]:
        own = frame[frame["experiment"] == name]
        if name == "launch":  # the other M are in the CSV
            own = own[own["M"].isin(SUMMARY_M)]
        if own.empty:
            continue
        rows = [
            {
                "setting": row["setting"],
                "kernel": row["kernel"],
                "format": drawings.FORMAT_NAME.get(row["format"], row["format"]),
                "problem": f"{row['shape']} M={row['M']}",
                "exp_time": three(row, "time_us", "ci_low_us", "ci_high_us"),
                "exp_ratio": three(row, "ratio", "ratio_low", "ratio_high"),
                "exp_cost": three(row, "cost_us", "cost_low_us", "cost_high_us"),
                "exp_tbps": number(row["read_tbps"]),
                "exp_ring": BLANK
                if absent(row["ring_bytes_per_sm"])
                else number(row["ring_bytes_per_sm"] / 1000),
                "exp_grid": BLANK if absent(row["grid"]) else str(row["grid"]),
            }
            for row in own.to_dict("records")
        ]
        keys = ["problem", "setting", "kernel", "format", "exp_ratio", "exp_time", "exp_cost"]
        keys += ["exp_tbps"] if name in ("stages", "warps", "waves") else []
        keys += ["exp_ring"] if name in ("stages", "warps") else []
        keys += ["exp_grid"] if name in ("waves", "split_k") else []
        table = kit.table(keys, rows, f"{title}: {what}", "")
        count = f"{len(rows)} row" + ("s" if len(rows) > 1 else "")
        out.append({"title": title, "count": count, "table": table})
    return out


_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")


def profile(kit: Tables, text: Mapping[str, Any], campaign: Mapping[str, Any]) -> dict:
    """One row a profiled call; values from replayed passes stand beside those of the cold pass, which come first."""
    metrics = {name: (column, how) for name, column, how in text["metrics"]}
    calls: dict[tuple[Any, ...], dict[str, float]] = {}
    # Cold values win: of two rows of one metric, the later one stays.
    for row in sorted(campaign["counters"], key=lambda r: r["regime"] == "cold_loop"):
        place = tuple(row[k] for k in ("shape", "M", "kernel", "format", "N", "K"))
        if row["metric"] in metrics or _STALL.fullmatch(row["metric"]):
            calls.setdefault(place, {})[row["metric"]] = row["value"]
    rows = []
    for (shape, m, kernel, fmt, n, k), values in sorted(calls.items()):
        row = {
            "problem": f"{shape} M={m}",
            "kernel": kernel,
            "format": drawings.FORMAT_NAME.get(fmt, fmt),
        }
        for metric, (column, how) in metrics.items():
            if metric in values:
                row[column] = number(_scaled(values[metric], how, fmt, n, k))
        stalls = {s[1]: v for name, v in values.items() if (s := _STALL.fullmatch(name))}
        if stalls:
            worst = max(stalls, key=stalls.__getitem__)
            row["ncu_stall"] = f"{worst.replace('_', ' ')} {number(stalls[worst])}"
        rows.append(row)
    columns = list(dict.fromkeys(column for column, _ in metrics.values()))
    keys = ("problem", "kernel", "format", *columns, "ncu_stall")
    nothing = "No profiler counters were recorded (see Attempts for the reason)."
    return kit.table(keys, rows, "Profiler counters, a pass of their own", nothing)


def _scaled(value: float, how: str, fmt: str, n: int, k: int) -> float:
    if how == "ns":
        return value / 1000
    if how == "weight_bytes":
        return value / weight_bytes(fmt, n, k)
    return value / (n * k / 64) if how == "per_64" else value


def sass_table(kit: Tables, campaign: Mapping[str, Any]) -> dict:
    """What each variant of the testbed is made of, beside the full one: the proof of what was removed."""
    counts: dict[tuple[int, str, str], dict[str, float]] = {}
    for row in campaign["counters"]:
        if row["metric"].startswith("sass_") or row["metric"] == analysis_r1.LOOP_INSTRUCTIONS:
            if row["kernel"].startswith(("testbed/", "cause/")):
                place = (row["M"], row["format"], row["kernel"])
                counts.setdefault(place, {})[row["metric"]] = row["value"]
    rows = []
    singles = {FULL: 0, NONE: 2} | {f"testbed/-{name}": 1 for name in FACTORS}
    for (m, fmt, kernel), own in sorted(
        counts.items(), key=lambda i: (i[0][:2], singles.get(i[0][2], 3), i[0][2])
    ):
        if kernel not in singles and not kernel.startswith("cause/"):
            continue  # the pairs and triples are in campaign.json
        base = counts.get((m, fmt, FULL), {})
        rows.append(
            {
                "m": str(m),
                "format": drawings.FORMAT_NAME.get(fmt, fmt),
                "variant": kernel,
                "per_64": number(own.get(analysis_r1.LOOP_INSTRUCTIONS)),
                "loop_total": number(own.get("sass_loop_total"), 6),
                "changed": _changed(own, base) if base and kernel != FULL else BLANK,
            }
        )
    keys = ("m", "format", "variant", "per_64", "loop_total", "changed")
    nothing = "No instruction counts were recorded."
    return kit.table(keys, rows, "Instructions of the testbed's variants (compiled code)", nothing)


def _changed(own: Mapping[str, float], base: Mapping[str, float]) -> str:
    skip = ("sass_total", "sass_loop_total")
    names = [n for n in sorted(set(own) | set(base)) if n.startswith("sass_") and n not in skip]
    parts = [(n.removeprefix("sass_"), own.get(n, 0) - base.get(n, 0)) for n in names]
    parts = sorted((p for p in parts if p[1]), key=lambda p: (-abs(p[1]), p[0]))
    said = [f"{name} {'+' if by > 0 else '−'}{abs(by):.0f}" for name, by in parts[:8]]
    rest = f", {len(parts) - 8} more" if len(parts) > 8 else ""
    return (", ".join(said) + rest) or "none"
