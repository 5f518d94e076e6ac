"""R1 in the report: experiments on single causes, profiler counters, and instructions of the testbed's variants."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

from lab import analysis_r1
from lab import figures as drawings
from lab.counters_r1 import COLD, COLD_FRACTION
from lab.decomposition import FACTORS, FULL, NONE
from lab.page import BLANK, Tables, absent, number
from lab.r1_words import SUMMARY_M, count, percent, three
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


DRAM = "dram__bytes_read.sum"
Place = tuple[str, int, str, str, int, int]
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")


def profile(kit: Tables, text: Mapping[str, Any], campaign: Mapping[str, Any]) -> dict:
    """One row a call that was profiled for stalls too, or every call where none was; `profile_rest` has the others."""
    calls = _calls(campaign, {name for name, _, _ in text["metrics"]})
    deep = {place: values for place, values in calls.items() if _stalls(values)}
    return _profile(kit, text, deep or calls, "Profiler counters, a pass of their own")


def profile_rest(kit: Tables, text: Mapping[str, Any], campaign: Mapping[str, Any]) -> dict:
    """One row a call of which only the counters of the second closure were taken, where others have more."""
    calls = _calls(campaign, {name for name, _, _ in text["metrics"]})
    rest = {place: values for place, values in calls.items() if not _stalls(values)}
    if len(rest) == len(calls):
        rest = {}
    return _profile(kit, text, rest, "Profiler counters of the second closure only")


def _stalls(values: Mapping[str, tuple[float, str]]) -> dict[str, float]:
    return {s[1]: v for name, (v, _) in values.items() if (s := _STALL.fullmatch(name))}


def _profile(
    kit: Tables,
    text: Mapping[str, Any],
    calls: Mapping[Place, Mapping[str, tuple[float, str]]],
    caption: str,
) -> dict:
    metrics = {name: (column, how) for name, column, how in text["metrics"]}
    rows = []
    for (shape, m, kernel, fmt, n, k), values in sorted(calls.items()):
        row = {
            "problem": f"{shape} M={m}",
            "kernel": kernel,
            "format": drawings.FORMAT_NAME.get(fmt, fmt),
            "ncu_cold": _cold(values, weight_bytes(fmt, n, k)),
        }
        for metric, (column, how) in metrics.items():
            if metric in values:
                row[column] = _scaled(values[metric][0], how, fmt, n, k)
        if stalls := _stalls(values):
            worst = max(stalls, key=stalls.__getitem__)
            row["ncu_stall"] = f"{worst.replace('_', ' ')} {number(stalls[worst])}"
        rows.append(row)
    columns = list(dict.fromkeys(column for column, _ in metrics.values()))
    columns.insert(columns.index("ncu_dram") + 1, "ncu_cold")
    keys = ("problem", "kernel", "format", *columns, "ncu_stall")
    nothing = "No profiler counters were recorded (see Attempts for the reason)."
    return kit.table(keys, rows, caption, nothing)


def _calls(
    campaign: Mapping[str, Any], metrics: set[str]
) -> dict[Place, dict[str, tuple[float, str]]]:
    """Value and regime of each metric of a call. Of two rows the cold one stays; without one, `hot_graph` is taken."""
    calls: dict[Place, dict[str, tuple[float, str]]] = {}
    # Cold values win: of two rows of one metric, the later one stays.
    for row in sorted(campaign["counters"], key=lambda r: r["regime"] == COLD):
        place = tuple(row[k] for k in ("shape", "M", "kernel", "format", "N", "K"))
        if row["metric"] in metrics or _STALL.fullmatch(row["metric"]):
            calls.setdefault(place, {})[row["metric"]] = (row["value"], row["regime"])
    return calls


def _cold(values: Mapping[str, tuple[float, str]], bytes_of_weight: int) -> str:
    """What shows that a profiled call found no weight in the cache: `lab.counters_r1.proven_cold`."""
    if DRAM not in values:
        return BLANK
    read, regime = values[DRAM]
    if regime == COLD:
        return "ncu"
    return "bytes" if read >= COLD_FRACTION * bytes_of_weight else "not shown"


def profile_note(campaign: Mapping[str, Any]) -> str:
    """Which profiled calls were cold, and how that is known."""
    found = [
        _cold(values, weight_bytes(fmt, n, k))
        for (_, _, _, fmt, n, k), values in _calls(campaign, {DRAM}).items()
        if DRAM in values
    ]
    if not found:
        return ""
    by = Counter(found)
    unsaid = by["bytes"] + by["not shown"]
    if not unsaid:
        return f"ncu says that it took the memory counters of all {count(len(found), 'call')} in one cold pass."
    return (
        f"In {unsaid} of {count(len(found), 'call')} ncu did not say how many passes it took, so everything that "
        f"depends on the cache is recorded as warm (hot_graph). In {by['bytes']} of these the profile read "
        f"{percent(COLD_FRACTION)} of the weight's bytes or more from memory, which shows that it was cold (“bytes” "
        f"in the column “cold?”); in {by['not shown']} it read less, so that is not shown. The rule by bytes is "
        "one of the analysis (lab.counters_r1.proven_cold), not of the frozen protocol. Issue, stalls "
        "and L2 hits come from a second run, of which nothing shows that it was cold."
    )


def _scaled(value: float, how: str, fmt: str, n: int, k: int) -> str:
    if how == "whole":
        return f"{value:.0f}"
    if how == "ns":
        return number(value / 1000)
    if how == "weight_bytes":
        return number(value / weight_bytes(fmt, n, k))
    return number(value / (n * k / 64) if how == "per_64" else value)


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
                "loop_total": _whole(own.get("sass_loop_total")),
                "changed": _changed(own, base) if base and kernel != FULL else BLANK,
            }
        )
    keys = ("m", "format", "variant", "per_64", "loop_total", "changed")
    nothing = "No instruction counts were recorded."
    return kit.table(keys, rows, "Instructions of the testbed's variants (compiled code)", nothing)


def _whole(value: float | None) -> str:
    return BLANK if absent(value) else f"{value:.0f}"


def _changed(own: Mapping[str, float], base: Mapping[str, float]) -> str:
    skip = ("sass_total", "sass_loop_total")
    names = [n for n in sorted(set(own) | set(base)) if n.startswith("sass_") and n not in skip]
    parts = [(n.removeprefix("sass_"), own.get(n, 0) - base.get(n, 0)) for n in names]
    parts = sorted((p for p in parts if p[1]), key=lambda p: (-abs(p[1]), p[0]))
    said = [f"{name} {'+' if by > 0 else '−'}{abs(by):.0f}" for name, by in parts[:8]]
    rest = f", {len(parts) - 8} more" if len(parts) > 8 else ""
    return (", ".join(said) + rest) or "none"
