"""Reading ncu's CSV: units, cases, and what is refused."""

from __future__ import annotations

import csv
import io
import json

import pytest

from lab import counters
from qgemm_mx.formats import weight_bytes

HEAD = ["ID", "Kernel Name", *counters.METRICS]


def report(per_call, units=("Mbyte", "us"), calls=counters.PROFILED_CALLS, head=HEAD) -> str:
    """What ncu would print: lines of its own, then CSV with a row of units."""
    out = io.StringIO()
    out.write("==PROF== Connected\n")
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerow(head)
    writer.writerow(["", "", *units][: len(head)])
    for case in counters.CASES:
        for _ in range(calls):
            writer.writerow(["1", f"{case[1]}(int)", f"{per_call(case):.6f}", "5.00"][: len(head)])
        writer.writerow(["2", "empty()", "0.0", "1.0"][: len(head)])
    return out.getvalue()


@pytest.fixture(scope="module")
def shapes(repository) -> list[dict]:
    return json.loads((repository / "prereg/shapes.json").read_text())["shapes"]


def test_cold_calls_read_their_weight_once(shapes) -> None:
    size = {s["name"]: (s["N"], s["K"]) for s in shapes}
    found = counters.parse(report(lambda c: weight_bytes(c[2], *size[c[0]]) / 1e6), shapes, "ncu")
    ratios = [r["value"] for r in found.rows if r["metric"] == "dram_bytes_over_weight_bytes"]
    assert found.refused is None and len(ratios) == len(counters.CASES)
    assert ratios == pytest.approx([1.0] * len(ratios), rel=1e-5)
    assert {r["value"] for r in found.rows if r["unit"] == "ns"} == {5000.0}


def test_a_missing_metric_is_refused_never_zero(shapes) -> None:
    found = counters.parse(report(lambda c: 1.0, head=HEAD[:3]), shapes, "ncu")
    assert not found.rows and "gpu__time_duration.sum" in found.refused


def test_a_lost_case_is_refused(shapes) -> None:
    text = report(lambda c: 1.0).replace('"empty()"', '"other()"', 1)
    assert "6 cases, not 7" in counters.parse(text, shapes, "ncu").refused


def test_no_output_is_refused(shapes) -> None:
    assert counters.parse("==ERROR== no permission\n", shapes, "ncu").refused


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [("1,234.5", "Kbyte", 1234500.0), ("3", "byte", 3.0), ("2.5", "us", 2500.0)],
)
def test_units(text, unit, value) -> None:
    assert counters.scaled(text, unit) == value
