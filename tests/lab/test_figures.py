"""Figures: what may be drawn, reproducible bytes, size, and text that stands on its own."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import synthetic  # noqa: E402

from lab import figures  # noqa: E402

MAX_BYTES = 400_000
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return figures.build_all(**synthetic.figure_arguments())


@pytest.fixture
def few() -> pd.DataFrame:
    return synthetic.cells(ms=[1, 64], shapes=synthetic.SHAPES[:2])


def texts(svg: str) -> list[str]:
    return ["".join(t.itertext()) for t in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_every_figure_that_the_data_allow_is_drawn(drawn):
    assert {k for k in drawn if not k.endswith("_narrow")} == {
        "fig1_latency",
        "fig2_floor",
        "fig4_roofline",
        "forest/r0.constant/TB-per-s",
        "forest/r0.cublaslt_fp8.time/us",
    }
    assert all(f"{k}_narrow" in drawn for k in drawn if not k.endswith("_narrow"))


def test_figures_are_small_well_formed_and_named(drawn):
    for name, svg in drawn.items():
        root = ElementTree.fromstring(svg)
        assert root.tag == f"{SVG}svg", name
        assert root.find(f"{SVG}title").text, name
        assert len(svg.encode()) < MAX_BYTES, name
        assert not re.search("<(style|script|image)", svg), name


def test_ids_are_unique_across_figures_and_references_resolve(drawn):
    seen: set[str] = set()
    for name, svg in drawn.items():
        ids = re.findall(r'\bid="([^"]+)"', svg)
        assert len(ids) == len(set(ids)), name
        assert not seen & set(ids), name
        used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
        assert used and used <= set(ids), name
        seen |= set(ids)


def test_same_input_same_bytes(few):
    first = figures.fig_latency(few, synthetic.SHAPES)
    assert figures.fig_latency(few.sample(frac=1, random_state=3), synthetic.SHAPES) == first
    assert figures.fig_floor_fraction(few) == figures.fig_floor_fraction(few)


def test_axes_carry_units(drawn):
    assert "time per call (µs)" in texts(drawn["fig1_latency"])
    assert "M (tokens)" in texts(drawn["fig1_latency"])
    assert "% of the measured floor" in texts(drawn["fig2_floor"])
    assert {"TFLOP/s", "FLOP per byte"} <= set(texts(drawn["fig4_roofline"]))
    assert "time (µs)" in texts(drawn["forest/r0.cublaslt_fp8.time/us"])
    assert "TB/s" in texts(drawn["forest/r0.constant/TB-per-s"])


def test_the_floor_is_drawn_into_figure_1(few):
    with_floor = figures.fig_latency(few, synthetic.SHAPES)
    without = figures.fig_latency(few.assign(floor_us=float("nan")), synthetic.SHAPES)
    assert any("stream floor" in t for t in texts(with_floor))
    assert not any("stream floor" in t for t in texts(without))
    assert len(with_floor) > len(without)


def test_columns_rearrange_the_panels(few):
    def width(svg: str) -> float:
        return float(re.search(r'viewBox="0 0 ([0-9.]+)', svg).group(1))

    wide = figures.fig_latency(few, synthetic.SHAPES, columns=3)
    slim = figures.fig_latency(few, synthetic.SHAPES, columns=1)
    assert width(slim) < 300 < width(wide)
    # At 328 px (a 360 px screen less its margins) no text may fall under 10 px.
    smallest = min(float(s) for s in re.findall(r"font(?:-size)?: ([0-9.]+)px", slim))
    assert smallest * 328 / width(slim) >= 10
    with pytest.raises(ValueError, match="columns=0"):
        figures.fig_latency(few, synthetic.SHAPES, columns=0)


def test_a_timed_reference_is_refused_everywhere(few):
    few.loc[few["kernel"] == "reference", "time_us"] = 12.0
    given = synthetic.figure_arguments() | {"cells": few}
    for draw in (
        lambda: figures.fig_latency(few, synthetic.SHAPES),
        lambda: figures.fig_floor_fraction(few),
        lambda: figures.build_all(**given),
    ):
        with pytest.raises(ValueError, match="correctness_only"):
            draw()


def test_the_reference_is_never_drawn(drawn):
    for name in ("fig1_latency", "fig2_floor", "fig4_roofline"):
        assert not any("reference" in t for t in texts(drawn[name]))


@pytest.mark.parametrize("state", ["failed", "not_applicable"])
def test_a_cell_that_is_not_passed_is_not_drawn(few, state):
    few.loc[few["kernel"] == "naive_dequant", "correctness"] = state
    svg = figures.fig_latency(few, synthetic.SHAPES)
    assert not any("naive_dequant" in t for t in texts(svg))
    few["correctness"] = state
    with pytest.raises(ValueError, match="figure 1: no timed cell"):
        figures.fig_latency(few, synthetic.SHAPES)


def test_a_cell_that_occurs_twice_is_refused(few):
    with pytest.raises(ValueError, match="occurs twice"):
        figures.fig_latency(pd.concat([few, few]), synthetic.SHAPES)


def test_the_newer_campaign_of_the_last_device_wins():
    old, new, other = ({"id": i, "created_utc": u, "device": {"name": d}} for i, u, d in [
        ("old", "2026-01-01", "A"), ("new", "2026-01-03", "A"), ("other", "2026-01-02", "B"),
    ])  # fmt: skip
    base = synthetic.cells(ms=[1], shapes=synthetic.SHAPES[:1])
    parts = [
        base.assign(campaign=c["id"], device=c["device"]["name"], time_us=t)
        for c, t in [(new, 3.0), (old, 1.0), (other, 2.0)]
    ]
    found = figures.newest_cells(pd.concat(parts), [new, old, other])
    assert set(found["campaign"]) == {"new"} and set(found["time_us"]) == {3.0}
    only_old = pd.concat([parts[0].iloc[:1], parts[1]])
    found = figures.newest_cells(only_old, [new, old, other])
    assert sorted(found["time_us"].unique()) == [1.0, 3.0] and len(found) == len(base)


def test_roofline_needs_measured_constants_and_bytes(few):
    campaign = synthetic.campaigns()[0]
    assert figures.roofline_constants([campaign]) == (4.3, {"BF16": 720.0, "FP8": 1350.0})
    assert figures.roofline_constants([campaign | {"constants": {}}]) is None
    with pytest.raises(ValueError, match="no bytes per weight for format bf16"):
        figures.fig_roofline(
            few, bytes_per_weight={}, bandwidth_tbps=4.0, ceilings_tflops={"BF16": 700.0}
        )


def test_roofline_points_lie_where_the_bytes_say():
    one = synthetic.cells(ms=[1], shapes=synthetic.SHAPES[:1])
    one = one[(one["kernel"] == "cublaslt_bf16") & (one["regime"] == "cold_graph")]
    moved = 4096 * 4096 * 2 + 4096 * 2 + 4096 * 2
    on_the_roof = one.assign(time_us=moved / 4.0e6)

    svg = figures.fig_roofline(
        on_the_roof,
        bytes_per_weight={"bf16": 2.0},
        bandwidth_tbps=4.0,
        ceilings_tflops={"BF16": 700.0},
        columns=1,
    )
    body = svg[svg.index("PathCollection") :]
    x, y = map(float, re.search(r'<use [^>]*x="([0-9.]+)" y="([0-9.]+)"', body).groups())
    slopes = re.findall(r'd="M ([0-9.]+) ([0-9.]+)\s+L ([0-9.]+) ([0-9.]+)\s*" clip-path', svg)
    # The bandwidth line is the only slanted one.
    x0, y0, x1, y1 = next(tuple(map(float, s)) for s in slopes if s[0] != s[2] and s[1] != s[3])
    assert abs(y - (y0 + (y1 - y0) * (x - x0) / (x1 - x0))) < 0.5


def test_forest_takes_measured_point_and_share_claims_only():
    verdicts = synthetic.verdicts()
    chosen = figures.measured_point_claims(verdicts)
    assert set(chosen["kind"]) == {"point"} and "NOT_RUN" not in set(chosen["verdict"])
    assert len(chosen) == 20
    share = verdicts["claim"] == "r1.share.grid"
    verdicts.loc[share, ["observed", "ci_low", "ci_high"]] = 0.2, 0.1, 0.3
    verdicts.loc[share, "verdict"] = "STRADDLE"
    assert len(figures.measured_point_claims(verdicts)) == 21


def test_forest_accepts_values_that_have_no_log():
    row = {"claim": "r1.share.x", "q05": -0.1, "q25": 0.0, "q50": 0.1, "q75": 0.2, "q95": 0.3}
    row |= {"observed": -0.05, "ci_low": -0.2, "ci_high": 0.1, "verdict": "STRADDLE"}
    svg = figures.fig_forest(pd.DataFrame([row]), family="r1.share", unit="fraction")
    assert any("STRADDLE" in t for t in texts(svg))


def test_forest_escapes_names():
    row = {"claim": "r1.<b>&x", "q05": 1, "q25": 2, "q50": 3, "q75": 4, "q95": 5}
    row |= {"observed": 3, "ci_low": 2.9, "ci_high": 3.1, "verdict": "HIT"}
    svg = figures.fig_forest(pd.DataFrame([row]), family="r1.<b>&", unit="us")
    assert any("r1.<b>&x" in t for t in texts(svg)) and "<b>" not in svg


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [(8000.0, 13000.0, {"8000", "10k", "12k"}), (0.9, 2.1, {"1", "1.2", "2"})],
)
def test_forest_axis_reads_in_plain_numbers(low, high, labels):
    row = {"claim": "r0.x", "q05": low, "q25": low * 1.05, "q50": low * 1.1, "q75": low * 1.15}
    row |= {"q95": high, "observed": low, "ci_low": low, "ci_high": high, "verdict": "HIT"}
    shown = texts(figures.fig_forest(pd.DataFrame([row]), family="r0", unit="us"))
    assert labels <= set(shown) and not any("e+" in t for t in shown)


def test_a_title_keeps_its_distance_from_the_label_above(drawn):
    svg = drawn["fig1_latency"]
    at = re.findall(
        r'<text[^>]*(?:y="([0-9.]+)"|translate\([0-9.]+ ([0-9.]+)\))[^>]*>([^<]+)<', svg
    )
    height = {text: max(float(y or t) for y, t, s in at if s == text) for _, _, text in at}
    first_row = min(float(y or t) for y, t, s in at if s == "M (tokens)")
    gap = height["down_proj: N=4096, K=14336"] - first_row
    # Baseline to baseline, points: two lines of 9 pt text and at least half a line between them.
    assert gap > 9.5 + 4.5 + 72 * figures.ROW_GAP / 2


def test_natural_order():
    assert sorted(["m16", "m2", "m1", "a"], key=figures.natural) == ["a", "m1", "m2", "m16"]


def test_themed_leaves_only_data_colours(drawn):
    page = figures.themed(drawn["fig1_latency"])
    assert figures.INK not in page and figures.PAPER not in page and "var(--ink)" in page
    assert figures.FORMAT_COLOUR["mxfp4"] in page
