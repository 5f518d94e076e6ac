"""Profiler counters from a pass of their own, never from the timed run (METHOD 4): DRAM bytes prove that cold is
cold.

`take` runs this module under ncu. It replays the rotation of a few cells, call by call, with the same copies as the
timed run; DRAM bytes a call over the weight's bytes must then be about one. Clocks and caches are left alone.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METRICS = ("dram__bytes_read.sum", "gpu__time_duration.sum")
#: (shape, kernel, format) at M=1; a rotation of each is profiled.
CASES = (
    ("q_o_proj", "stream_read", "mxfp4"),
    ("q_o_proj", "cublaslt_fp8", "fp8_e4m3"),
    ("q_o_proj", "cublaslt_bf16", "bf16"),
    ("gate_up", "stream_read", "mxfp4"),
    ("gate_up", "cublaslt_fp8", "fp8_e4m3"),
    ("llama70b_down", "stream_read", "mxfp4"),
    ("llama70b_down", "cublaslt_fp8", "fp8_e4m3"),
)
PROFILED_CALLS = 8
MARKER = "empty"  # a launch of this kernel separates the cases
TIMEOUT_S = 120
#: The profiler leaves clocks and caches as they are.
UNTOUCHED = ("--clock-control", "none", "--cache-control", "none")


@dataclass
class Found:
    """Counter rows, or the reason why there are none."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    refused: str | None = None


def take(repo: Path, cubin_dir: Path, log: Callable[[str], None]) -> Found:
    """Run the profiler pass. A machine without ncu, or without leave to read counters, is told and not an error."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return Found(refused="ncu is not on PATH")
    log("profiler pass: DRAM bytes of cold calls")
    command = [
        ncu, *UNTOUCHED, "--metrics", ",".join(METRICS),
        "--csv", "--page", "raw", "--profile-from-start", "off",
        sys.executable, "-m", "lab.counters", str(repo), str(cubin_dir),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Found(refused=f"ncu took over {TIMEOUT_S} s")
    if done.returncode:
        return Found(refused=f"ncu: exit {done.returncode}: {(done.stdout + done.stderr)[-400:]}")
    return parse(
        done.stdout, json.loads((repo / "prereg" / "shapes.json").read_text())["shapes"], tool(ncu)
    )


def tool(ncu: str) -> str:
    """Name and version of the profiler, with the settings that leave the device alone."""
    version = subprocess.run([ncu, "--version"], capture_output=True, text=True, check=False).stdout
    return f"ncu {version.strip().splitlines()[-1]}; {' '.join(UNTOUCHED)}"


def parse(text: str, shapes: list[dict[str, Any]], tool: str) -> Found:
    """Counter rows from ncu's CSV: per case the mean of a call, and DRAM bytes over the weight's bytes.

    A metric that ncu does not know makes the pass refused: a missing name is never zero.
    """
    from qgemm_mx.formats import weight_bytes

    units, groups = read_groups(text)
    if missing := [m for m in METRICS if m not in units]:
        return Found(refused=f"ncu did not report {', '.join(missing)}")
    groups = [g for g in groups if g]
    if len(groups) != len(CASES):
        return Found(refused=f"ncu reported {len(groups)} cases, not {len(CASES)}")
    by_name = {s["name"]: s for s in shapes}
    rows = []
    for (shape, kernel, fmt), group in zip(CASES, groups, strict=True):
        n, k = by_name[shape]["N"], by_name[shape]["K"]
        place = {
            "kernel": kernel,
            "format": fmt,
            "shape": shape,
            "N": n,
            "K": k,
            "M": 1,
            "regime": "cold_loop",
        }
        for metric in METRICS:
            value = sum(scaled(r[metric], units[metric]) for r in group) / PROFILED_CALLS
            unit = {"dram__bytes_read.sum": "bytes", "gpu__time_duration.sum": "ns"}[metric]
            rows.append({**place, "metric": metric, "unit": unit, "value": value, "tool": tool})
        read = next(r["value"] for r in reversed(rows) if r["metric"] == METRICS[0])
        ratio = read / weight_bytes(fmt, n, k)
        rows.append(
            {
                **place,
                "metric": "dram_bytes_over_weight_bytes",
                "unit": "ratio",
                "value": ratio,
                "tool": tool,
            }
        )
    return Found(rows)


def read_groups(text: str) -> tuple[dict[str, str], list[list[dict[str, str]]]]:
    """ncu's CSV: unit of each column, and the rows of kernels, split at every marker.

    A group ends with its marker, so the last one, behind the last marker, is empty unless the program ended early.
    ({}, [[]]) where ncu printed no table.
    """
    table = csv.DictReader(line for line in text.splitlines() if line.startswith('"'))
    units = dict(next(table, {}))  # the first row holds units
    groups: list[list[dict[str, str]]] = [[]]
    for row in table:
        if row["Kernel Name"].split("(")[0] == MARKER:
            groups.append([])
        else:
            groups[-1].append(row)
    return units, groups


def scaled(text: str, unit: str) -> float:
    """A value of ncu's CSV in bytes or nanoseconds."""
    factors = {
        "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9,
        "ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6,
    }  # fmt: skip
    return float(text.replace(",", "")) * factors[unit]


def main(arguments: list[str]) -> int:
    """The profiled program: after a full rotation, `PROFILED_CALLS` calls of each case, cases separated by a marker."""
    from lab.arms import CublasLtArm, tune_stream
    from lab.bench import Bench, forbid_predictions
    from lab.operands import decode_activations, make_activations, make_weights
    from qgemm_mx.formats import weight_bytes

    repo, cubin_dir = Path(arguments[0]), Path(arguments[1])
    forbid_predictions()
    protocol = json.loads((repo / "prereg" / "protocol.json").read_text())
    shapes = {
        s["name"]: s for s in json.loads((repo / "prereg" / "shapes.json").read_text())["shapes"]
    }
    bench = Bench.open(protocol, cubin_dir, protocol["seed"])
    for shape_name, kernel, fmt in CASES:
        n, k = shapes[shape_name]["N"], shapes[shape_name]["K"]
        weights = make_weights(
            bench.random,
            fmt,
            n,
            k,
            bench.copies(weight_bytes(fmt, n, k)),
        )
        if kernel == "stream_read":
            arm = tune_stream(
                bench.timer, bench.modules, weights, protocol, bench.probe["sm_count"]
            )
        else:
            x = make_activations(bench.random, 1, k)[fmt == "fp8_e4m3"]
            arm = CublasLtArm(weights, x, decode_activations(x), bench.lt, bench.stream, protocol)
            arm.tune(bench.timer)
        profile(bench, arm.launch, arm.copies, PROFILED_CALLS)
    return 0


def profile(bench: Any, launch: Callable[[int], None], copies: int, calls: int) -> None:
    """A full rotation, then `calls` calls and the marker under the profiler. calls=0: the marker alone."""
    import cupy as cp

    with bench.stream:
        for copy in range(copies if calls else 0):
            launch(copy)
        bench.stream.synchronize()
        cp.cuda.profiler.start()
        for call in range(calls):
            launch(call % copies)
        bench.modules["harness"].kernel(MARKER)((1,), (32,), ())
        bench.stream.synchronize()
        cp.cuda.profiler.stop()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
