"""Figure 3: bars that add up, marks for what is stacked or unexplained, and reproducible bytes."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from test_decomposition import PARTS, added, exact, overlapped, split

from lab import decomposition as dec
from lab import waterfall
from lab.decomposition import FACTORS, Cell
from lab.statistics import Estimate

SVG = "{http://www.w3.org/2000/svg}"
CELLS = [Cell("mxfp4", name, 4096, 4096, 1, "cold_graph") for name in ("q_o_proj", "other")]


def cells(time=None, production=None, **how):
    more = {"production": Estimate(production, 0.1, 7, log=False)} if production else {}
    return [
        split(time, cell=cell, noise=0.004, seed=i, more=more, **how)
        for i, cell in enumerate(CELLS)
    ]


@pytest.fixture(scope="module")
def summary() -> dec.Summary:
    both = overlapped("weight_load", "dequant_issue", PARTS | {"dequant_issue": 2.9})
    return dec.summarise(cells(lambda on: both(on) + 2.5, production=22.0), "frozen")


def texts(svg: str) -> list[str]:
    return ["".join(t.itertext()) for t in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_steps_lead_from_the_floor_to_the_production_time(summary):
    panel = waterfall.waterfall_of(summary)
    labels = [step.label for step in panel.steps]
    assert labels[0] == "stream floor" and labels[-3:] == [
        "testbed",
        "beyond testbed",
        "production path",
    ]
    assert labels[1:8] == [waterfall.WORDS[c] for c in ("launch", "grid_fill", *FACTORS)]
    at = 0.0
    for step in panel.steps:
        if step.kind == "total":
            assert at == 0.0 or at == pytest.approx(step.amount.value, abs=1e-9)
            at = step.amount.value
        else:
            at += step.amount.value
    assert panel.unit == "x floor" and panel.steps[0].amount.value == 1


def test_a_cell_is_in_microseconds_and_ends_at_the_testbed_without_production():
    panel = waterfall.waterfall_of(cells()[0])
    assert panel.unit == "µs" and panel.steps[-1].label == "testbed"
    parts = sum(s.amount.value for s in panel.steps if s.kind != "total")
    assert parts == pytest.approx(panel.steps[-1].amount.value - panel.steps[0].amount.value)


def test_what_is_stacked_is_hatched_and_nothing_else(summary):
    stacked = {step.label for step in waterfall.waterfall_of(summary).steps if step.stacked}
    assert stacked == {"weight load", "dequant issue"}
    hatched = waterfall.fig_waterfall([summary])
    plain = waterfall.fig_waterfall([dec.summarise(cells(), "frozen")])
    # one hatched bar a stacked cause, and one in the legend
    assert len(re.findall(r"fill: url\(#", hatched)) == 3
    assert "<pattern" in hatched and "<pattern" not in plain
    assert any("stacked" in t for t in texts(hatched)) and not any(
        "stacked" in t for t in texts(plain)
    )


def test_a_cause_stacked_on_one_shape_of_three_is_not_hatched():
    pair = overlapped("weight_load", "dequant_issue", PARTS | {"dequant_issue": 3.0})
    third = split(pair, cell=CELLS[0]._replace(shape="third"), noise=0.002)
    panel = waterfall.waterfall_of(dec.summarise([*cells(), third], "frozen"))
    assert third.causes[2].stacked and not any(step.stacked for step in panel.steps)


def test_verdict_and_residual_are_in_the_text(summary):
    found = texts(waterfall.fig_waterfall([summary], columns=1))
    assert "testbed: UNEXPLAINED" in found and "production path: UNEXPLAINED" in found
    assert "MXFP4, M=1, 2 frozen shapes" in found
    assert any(t.startswith("residual") for t in found)
    share = f"{100 * summary.residual.share.value:.0f} %"
    assert share in found


def test_production_has_a_verdict_of_its_own():
    more = {"predicted": exact(18.9), "production": exact(24.0)}
    found = texts(waterfall.fig_waterfall([split(noise=0.001, more=more)]))
    assert "testbed: CLOSED" in found and "production path: UNEXPLAINED" in found


def test_same_input_same_bytes_and_columns_differ(summary):
    for columns in (1, 3):
        first = waterfall.fig_waterfall([summary] * 2, columns=columns)
        assert first == waterfall.fig_waterfall([summary] * 2, columns=columns)
        assert len(first.encode()) < 400_000
    wide, narrow = (waterfall.fig_waterfall([summary], columns=c) for c in (3, 1))
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (wide, narrow)]
    assert not ids[0] & ids[1]
    for svg, own in zip((wide, narrow), ids, strict=True):
        used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
        assert used and used <= own
        assert not re.search("<(style|script|image)", svg)


def test_one_column_is_narrow_and_all_labels_stay(summary):
    svg = waterfall.fig_waterfall([summary] * 3, columns=1)
    width = float(re.search(r'width="([\d.]+)pt"', svg).group(1))
    assert width * 4 / 3 <= 360  # CSS pixels
    assert texts(svg).count("dequant issue") == 3
    beside = texts(waterfall.fig_waterfall([summary] * 3, columns=3))
    assert beside.count("dequant issue") == 1  # at the left of the row


def test_without_a_gap_the_bars_have_no_share():
    found = split(lambda on: 10.0, terms={}, noise=0.01)
    svg = waterfall.fig_waterfall([found])
    assert "testbed: NO_GAP" in texts(svg) and texts(svg).count("–") == len(FACTORS) + 1


def test_nothing_and_mixed_units_are_refused(summary):
    with pytest.raises(ValueError, match="no decomposed cell"):
        waterfall.fig_waterfall([])
    with pytest.raises(ValueError, match="in one figure"):
        waterfall.fig_waterfall([summary, cells()[0]])


def test_negative_amounts_go_back():
    """A factor whose removal costs time: its bar runs to the left, and the sum still ends at the testbed."""
    found = split(added(PARTS | {"matrix_issue": -0.8}), noise=0.001)
    panel = waterfall.waterfall_of(found)
    spans = dict(zip((s.label for s in panel.steps), waterfall._spans(panel), strict=True))
    start, end, low, high = spans["matrix issue"]
    assert low < end < high < start == spans["dequant issue"][1]
    assert spans["residual"][1] == pytest.approx(found.full.value)
    assert waterfall.fig_waterfall([found]).startswith("<svg")
