"""R1 in the report: the production gap, the kernels of others, and go or no-go for R2."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import pandas as pd

from lab import figures as drawings
from lab.analysis_r1 import Analysis
from lab.decomposition import FLOOR, FULL, NONE
from lab.page import BLANK, Tables, number
from lab.production import (
    BF16,
    CLAIMED,
    FALSIFIED,
    FP8,
    PROBE_BALANCED,
    PRODUCTION,
    byte_ratio,
    format_speeds,
)
from lab.r1_words import count, observed, percent, pick, spread, three


def gap_table(kit: Tables, frame: pd.DataFrame) -> dict:
    """One row an M: the production path in both formats, cold, over all shapes."""
    own = frame[
        (frame["kernel"] == PRODUCTION)
        & (frame["regime"] == "cold_graph")
        & (frame["over"] == "all")
    ]
    rows = []
    for m in sorted(set(own["M"])):
        row = {"m": str(m)}
        for fmt, end in (("mxfp4", "mx"), ("nvfp4", "nv")):
            fp8 = pick(own, M=m, format=fmt, against=FP8.kernel)
            bf16 = pick(own, M=m, format=fmt, against=BF16.kernel)
            floor = pick(own, M=m, format=fmt, against=FLOOR)
            if fp8 is not None:
                row[f"fp8_{end}"] = three(fp8, "speed", "ci_low", "ci_high")
                row[f"range_{end}"] = spread(fp8["lowest"], fp8["highest"])
                row[f"realised_{end}"] = percent(fp8["realised"])
            if bf16 is not None:
                row[f"bf16_{end}"] = number(bf16["speed"])
            if floor is not None:
                row[f"floor_{end}"] = percent(floor["speed"])
        rows.append(row)
    keys = [
        f"{k}_{end}" for end in ("mx", "nv") for k in ("fp8", "range", "realised", "bf16", "floor")
    ]
    keys.remove("bf16_nv")
    shapes = int(own["shapes"].max()) if len(own) else 0
    caption = f"{PRODUCTION}, cold weights, graph replay; {shapes} shapes"
    fewer = own[own["shapes"] < shapes].drop_duplicates(["format", "M"])
    for row in fewer.to_dict("records"):
        name = drawings.FORMAT_NAME[row["format"]]
        caption += f"; {name} at M = {row['M']}: {row['shapes']}, see the failed check below"
    return kit.table(["m", *keys], rows, caption, f"{PRODUCTION} was not measured.")


def others_table(
    kit: Tables, frame: pd.DataFrame, regime: str, caption: str, everything: bool = False
) -> dict:
    """One row a kernel, format and M in a regime; without the production path, unless `everything`."""
    own = frame[(frame["regime"] == regime) & (frame["over"] == "all")]
    if not everything:
        own = own[own["kernel"] != PRODUCTION]
    rows = []
    for (kernel, fmt, m), group in own.groupby(["kernel", "format", "M"], sort=True):
        fp8, bf16, floor = (pick(group, against=a) for a in (FP8.kernel, BF16.kernel, FLOOR))
        first = group.iloc[0]
        row = {"kernel": kernel, "format": drawings.FORMAT_NAME.get(fmt, fmt), "m": str(m)}
        row["n_shapes"] = str(first["shapes"])
        if fp8 is not None:
            row["over_fp8"] = three(fp8, "speed", "ci_low", "ci_high")
            row["speed_range"] = spread(fp8["lowest"], fp8["highest"])
            row["realised"] = percent(fp8["realised"])
        if bf16 is not None:
            row["over_bf16"] = number(bf16["speed"])
        if floor is not None:
            row["of_floor"] = percent(floor["speed"])
        rows.append(row)
    keys = (
        "kernel",
        "format",
        "m",
        "over_fp8",
        "speed_range",
        "realised",
        "over_bf16",
        "of_floor",
        "n_shapes",
    )
    return kit.table(keys, rows, caption, "No other kernel was measured.")


def peer_table(kit: Tables, found: Analysis, campaign: Mapping[str, Any]) -> dict:
    """Every kernel of others: measured, or why not."""
    own = found.production[found.production["role"] == "peer"]
    rows = []
    for (kernel, fmt), group in own.groupby(["kernel", "format"], sort=True):
        ms = sorted(set(group["M"]))
        failed = _failed(campaign, kernel, fmt)
        said = f"M = {ms[0]} to {ms[-1]}, {int(group['shapes'].max())} shapes"
        if failed:
            said += f"; but for {count(len(failed), 'problem')}, see the failed check"
        rows.append(
            {
                "kernel": kernel,
                "format": drawings.FORMAT_NAME.get(fmt, fmt),
                "status_peer": "measured",
                "tried": _tried(campaign, kernel, fmt),
                "reason": said,
            }
        )
        rows += [
            {
                "kernel": kernel,
                "format": drawings.FORMAT_NAME.get(fmt, fmt),
                "status_peer": "failed",
                "reason": one,
            }
            for one in failed
        ]
    shown = {(row["kernel"], row["format"]) for row in rows}
    whole: dict[tuple[str, str, str], list[str]] = {}
    for kernel, fmt, reason in found.missing_peers:
        word, _, why = reason.partition(": ")
        whole.setdefault((kernel, drawings.FORMAT_NAME.get(fmt, fmt), word), []).append(why)
    for (kernel, fmt, word), reasons in sorted(whole.items()):
        extra = f" (and {len(set(reasons)) - 1} more reasons)" if len(set(reasons)) > 1 else ""
        note = "on some problems: " if (kernel, fmt) in shown else ""
        rows.append(
            {
                "kernel": kernel,
                "format": fmt,
                "status_peer": word,
                "reason": f"{note}{reasons[0]}{extra}",
            }
        )
    versions = ", ".join(
        f"{name} {version}"
        for name, version in campaign["software"].items()
        if re.search("humming|vllm|torch|marlin", name)
    )
    caption = "Kernels of others, measured or not" + (f" ({versions})" if versions else "")
    keys = ("kernel", "format", "status_peer", "tried", "reason")
    return kit.table(keys, rows, caption, "No peer is known.")


def _failed(campaign: Mapping[str, Any], kernel: str, fmt: str) -> list[str]:
    """The checks that a peer failed, one line a check: its value against the limit, and what that took away."""
    cells, lines = campaign["cells"], []
    for check in campaign["checks"]:
        if (check["kernel"], check["format"]) != (kernel, fmt) or check["passed"]:
            continue
        place = ("kernel", "format", "shape", "N", "K", "M")
        lost = [
            c["regime"]
            for c in cells
            if c["correctness"] == "failed" and all(c[k] == check[k] for k in place)
        ]
        before = next(
            (
                other["measured"]
                for other in campaign["checks"]
                if all(other[k] == check[k] for k in place)
                and other["name"] == check["name"].replace("_after", "_before")
                and other is not check
            ),
            None,
        )
        said = (
            f"{check['shape']} M = {check['M']}: {check['name']} measured {number(check['measured'], 4)} against the "
            f"limit {number(check['limit'], 4)} ({check['detail']})"
        )
        if before is not None:
            said += f"; before the timing it was {number(before, 4)}"
        lines.append(said + (f". No time in {', '.join(lost)}" if lost else ""))
    return lines


def _tried(campaign: Mapping[str, Any], kernel: str, fmt: str) -> str:
    """How many configurations a peer was given at a point, over its cells."""
    own = [c for c in campaign["cells"] if (c["kernel"], c["format"]) == (kernel, fmt)]
    counts = sorted({c["tuning"]["candidates"] for c in own if c["tuning"]})
    if not counts:
        return BLANK
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def decision(found: Analysis) -> dict[str, Any]:
    """Go or no-go: `word`, `meaning`, the `rule` and `lines` of evidence."""
    d = found.decision
    lines = []
    if d.room is not None and d.room_m1 is not None:
        lines.append(
            f"A kernel as fast as the floor would reach {observed(d.room)} times FP8 at M = 1, 2 and 4 and "
            f"{observed(d.room_m1)} times at M = 1 (geometric means, {d.shapes} frozen shapes). So it may take up to "
            f"{number(d.need)} times the floor and still reach {CLAIMED} times FP8 at M up to 4."
        )
    lines += _reach(found)
    meaning = {
        "GO": f"the floor leaves room for {CLAIMED} times FP8 at M up to 4, with the whole interval above it.",
        "NO-GO": f"even a kernel as fast as the floor would stay below {CLAIMED} times FP8 at M up to 4, or below "
        f"{FALSIFIED} times at M = 1.",
        "OPEN": "the floors of this campaign do not decide.",
    }
    return {
        "word": d.word,
        "meaning": meaning[d.word],
        "lines": lines,
        "rule": f"The source's rule for P3: when the best kernel stays below {FALSIFIED} times FP8 at M = 1, the "
        f"central claim of {CLAIMED} times at M up to 4 is falsified. R1 has no such kernel yet; what it can say is "
        "whether one is possible.",
    }


_STEPS = {
    NONE: ("the testbed without any factor", "bound"),
    PROBE_BALANCED: ("a balanced stream: no factor, a balanced grid", "bound"),
    FULL: ("the testbed with all factors", "measured"),
    PRODUCTION: (f"today's production path, {PRODUCTION}", "measured"),
}


def _steps(found: Analysis) -> list[tuple[str, str, float, str]]:
    """Name, kind, speed over FP8 at M=1 on the frozen shapes, and the same with its interval; the fastest first."""
    d = found.decision
    steps = [(*_STEPS[name], ratio.value, observed(ratio)) for name, ratio in d.reached]
    others = found.production[
        (found.production["role"] == "peer")
        & (found.production["regime"] == "cold_graph")
        & (found.production["over"] == "frozen")
        & (found.production["format"] == "mxfp4")
        & (found.production["against"] == FP8.kernel)
        & (found.production["M"] == 1)
        & (found.production["kernel"] != PRODUCTION)
    ]
    for row in others.to_dict("records"):
        steps.append(
            (row["kernel"], "measured", row["speed"], three(row, "speed", "ci_low", "ci_high"))
        )
    if d.room_m1 is not None:
        steps.append(
            (
                "the floor: the stream of the same bytes",
                "bound",
                d.room_m1.value,
                observed(d.room_m1),
            )
        )
        steps.append(("FP8, cuBLASLt", "measured", 1.0, "1"))
    return sorted(steps, key=lambda step: -step[2])


def _reach(found: Analysis) -> list[str]:
    """In words: the fastest bound and the fastest kernel against what is claimed."""
    steps = [s for s in _steps(found) if not s[0].startswith(("the floor", "FP8"))]
    lines = []
    for kind, what in (
        ("bound", "bound that is no kernel"),
        ("measured", "kernel that gives a right result"),
    ):
        own = [s for s in steps if s[1] == kind]
        if own:
            name, _, speed, said = own[0]
            word = "enough for" if speed >= CLAIMED else "short of"
            lines.append(
                f"The fastest {what} at M = 1 is {name}: {said} times FP8, {word} {CLAIMED}."
            )
    return lines


def decision_table(kit: Tables, found: Analysis) -> dict:
    """The evidence: times over the floor and speeds over FP8 at M=1, from the floor to FP8."""
    d = found.decision
    rows = [
        {
            "step_name": name,
            "step_kind": kind,
            "step_floor": BLANK if d.room_m1 is None else number(d.room_m1.value / speed),
            "step_fp8": said,
            "step_enough": "yes" if speed >= CLAIMED else "no",
        }
        for name, kind, speed, said in _steps(found)
    ]
    caption = (
        f"Evidence: MXFP4 at M = 1, geometric means of {d.shapes} frozen shapes, cold, graph replay"
    )
    keys = ("step_name", "step_kind", "step_floor", "step_fp8", "step_enough")
    return kit.table(keys, rows, caption, "The floors of this campaign do not decide.")


def speed_note(found: Analysis) -> str:
    """Which speeds figure 5 shows, for its caption."""
    speeds = format_speeds(found.production, ("mxfp4", "nvfp4"))
    named = [
        f"{drawings.FORMAT_NAME[f]} {number(s)}"
        for f, s in speeds.items()
        if s and math.isfinite(s)
    ]
    if not named:
        return "The campaign has no speed of the production path."
    ratio = byte_ratio("fp8_e4m3", "mxfp4")
    return (
        f"Speeds are those of {PRODUCTION} at M = 1, cold ({', '.join(named)}; the bytes alone would give MXFP4 "
        f"{ratio:.2f}); a hollow marker has no kernel in this campaign and stands at its byte ratio."
    )
