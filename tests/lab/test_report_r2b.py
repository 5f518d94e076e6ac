"""The section of R2b in the report and the block of README.md, on a made-up campaign. Nothing here was measured."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
import synthetic
import synthetic_r2b as made
from test_report import Page

from lab import (
    analysis_r2b,
    bars,
    cells,
    figures,
    figures_r2b,
    gemm_r2b,
    judgement,
    page,
    r1_words,
    readme,
    readme_r2b,
    records,
    registry,
    replay,
    report,
    report_r2,
    report_r2b,
    verdicts,
)

SVG = "{http://www.w3.org/2000/svg}"
PLAN = {f"qgemm_mx/step{i}": (f"idea {i}", 0.9 if i else None) for i in range(6)}
PLAN["qgemm_mx"] = ("the plan's own tile", 0.95)


class Shown:
    """A campaign on disk, its analysis, its verdicts, and the page that shows them."""

    def __init__(self, folder: Path, **how) -> None:
        slow = {("mxfp4", s["name"], 512): 1.2 for s in made.SHAPES}
        self.campaign = made.closed(**({"noise": 0.003, "blocks": 4, "slow": slow} | how))
        self.folder = records.write(self.campaign, folder)
        self.found = analysis_r2b.of_folder(self.folder, made.SHAPES)
        self.claims = registry.load_registered(made.PREREG).claims
        computed = {"R2b": lambda _: self.found.constants}
        evidence = verdicts.Evidence.from_campaigns([self.folder], computed=computed)
        self.verdicts = verdicts.to_frame(verdicts.judge(self.claims, evidence))

    def arguments(self) -> dict:
        campaigns = [*synthetic.campaigns(), replay.described(self.folder)]
        return synthetic.report_arguments() | {
            "verdicts": self.verdicts,
            "claims": [judgement.claim_json(claim) for claim in self.claims],
            "cells": cells.table([self.folder]),
            "campaigns": campaigns,
            "shapes": made.SHAPES,
            "r2b": self.found,
        }

    def html(self, folder: Path, **changed) -> str:
        out = folder / "index.html"
        given = {"figures": report_r2b.figures(self.found, PLAN)}
        report.render(out, **(given | self.arguments() | changed))
        return out.read_text(encoding="utf-8")

    def part(self) -> dict:
        known = json.loads((report.TEMPLATES / "words.json").read_text(encoding="utf-8"))["columns"]
        kit = page.Tables(known | report_r2.words()["columns"] | report_r2b.words()["columns"])
        drawn = {"wide": None, "narrow": None}
        return report_r2b.section(kit, self.found, self.verdicts, lambda key: drawn, PLAN)


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> Shown:
    return Shown(tmp_path_factory.mktemp("data"), regimes=("cold_graph", "hot_graph"))


@pytest.fixture(scope="module")
def part(shown) -> dict:
    return shown.part()


@pytest.fixture(scope="module")
def html(shown, tmp_path_factory) -> str:
    return shown.html(tmp_path_factory.mktemp("page"))


def section(text: str) -> str:
    return text[text.index('<section id="r2b">') : text.index('<section id="headline">')]


# The page.


def test_the_page_is_whole_and_the_section_stands_before_the_headline(html):
    whole = Page(html)
    ids = [a["id"] for _, a in whole.tags if a.get("id")]
    assert len(ids) == len(set(ids))
    targets = [a["href"] for tag, a in whole.tags if tag == "a"]
    assert all(t.startswith("#") and t[1:] in ids for t in targets)
    assert '<a href="#r2b">' in html and ".badge.met" in html
    text = Page(section(html)).text
    for words in (
        "The bars of the matrix kernel",
        "qgemm_mx in MXFP4, cold weights, graph replay",
        "qgemm_mx: means over the shapes, cold",
        "qgemm_mx: means, hot (weights in the L2)",
        "linear: means over the shapes, cold",
        "What linear launches in MXFP4, beside both kernels",
        "The M at which linear in MXFP4 stops being faster",
        "The ablation, step by step (MXFP4)",
        "Other formats against MXFP4, the same cells",
        "Cost of the batch-invariant mode",
        "Clock and power of the prefill legs",
        "Profiler counters of qgemm_mx, of steps of its ablation, and of cuBLASLt",
        "Instructions of qgemm_mx (compiled code)",
        "The BF16 rate is 700 TFLOP/s, of this campaign.",
    ):
        assert words in text, words
    assert section(html).count("<figure") == 2


def test_before_any_campaign_nothing_of_the_page_is_about_r2b(shown, tmp_path):
    text = shown.html(tmp_path, r2b=None, figures={})
    assert 'id="r2b"' not in text and "R2: the matrix kernel" not in text


def test_columns_are_explained_and_no_name_is_taken_twice(html):
    glossary = html[html.index('<section id="glossary">') :]
    for label in ("× bound (95 %)", "crossing M", "SM clock (MHz)", "launches"):
        assert f"<dt>{label}</dt>" in glossary
    own = set(report_r2b.words()["columns"])
    others = json.loads((report.TEMPLATES / "words.json").read_text(encoding="utf-8"))["columns"]
    assert not own & (set(others) | set(r1_words.words()["columns"]) | set(report_r2.words()["columns"]))  # fmt: skip


def test_recorded_campaigns_that_are_not_shown_and_their_verdicts_are_listed(shown, tmp_path):
    integrity = synthetic.report_arguments()["integrity"]
    notes = ["MISS by r2b-new, but HIT by r2b-old: r2.qgemm_mx.time.x"]
    name = shown.folder.name
    text = shown.html(tmp_path, integrity=integrity | {"notes": notes}, recorded=["r2b-old", name])
    rungs = text[text.index('<section id="rungs">') : text.index('<section id="r2b">')]
    assert "Recorded too, and not shown: <code>r2b-old</code>." in rungs
    assert "(<b>1</b> notes)" in rungs and f"<li>{notes[0]}</li>" in rungs
    assert "Recorded too" not in shown.html(tmp_path, recorded=[name])


def test_the_table_of_rungs_names_the_newest_campaign_of_each_part(shown, tmp_path):
    own = replay.described(shown.folder)
    old = own | {"id": "r2b-older", "created_utc": "2026-01-04T00:00:00Z"}
    decode = own | {"id": "r2-decode", "rung": "R2"}
    campaigns = [*synthetic.campaigns(), decode, old, own]
    text = shown.html(tmp_path, campaigns=campaigns)
    rungs = text[text.index('<section id="rungs">') : text.index('<section id="r2b">')]
    assert "r2-decode" in rungs and own["id"] in rungs and "r2b-older" not in rungs


# Bars and cells.


def test_the_bars_stand_with_limit_interval_and_frozen_verdict(part, shown):
    rows = {(r["r2_bar"], r["r2_format"]): r for r in part["bars"]["rows"]}
    assert len(rows) == len(shown.found.bars) == 34
    mean = rows["over BF16, mean, M = 512", "MXFP4"]
    assert (mean["r2_limit"], mean["r2_status"], mean["r2_verdict"]) == ("≥ 1", "missed", "REFUTED")
    assert mean["r2_off"].startswith("−") and mean["r2_cells"] == "9 of 9"
    assert rows["over FP8, mean, M = 32", "MXFP4"]["r2_verdict"] == "CONFIRMED"
    assert rows["over BF16, mean, M = 2048", "MXFP4"]["r2_verdict"] == page.BLANK
    titles = {r["title"] for r in part["reasons"]}
    assert any("over BF16, mean, M = 512, MXFP4" in t for t in titles)
    assert len(part["misses"]["rows"]) == len(shown.found.misses) > 0
    first = part["facts"][0]
    met = sum(b.status == bars.MET for b in shown.found.bars)
    assert first["value"] == f"{met} of 34 bars met"


def test_facts_have_the_means_and_the_crossings(part, shown):
    said = {f["value"]: f["text"] for f in part["facts"]}
    (fp8,) = [text for value, text in said.items() if "× FP8 at M = 32" in value]
    assert "At other M: M = 64: " in fp8 and "; M = 128: " in fp8 and "the bar is 1.6" in fp8
    (up,) = [(v, t) for v, t in said.items() if v.startswith("faster than FP8")]
    values = sorted(x.value for x in shown.found.crossings if x.against == "cublaslt_fp8")
    assert up[0] == f"faster than FP8 up to M = {values[4]:.0f}"
    assert "median of 9 shapes" in up[1]


def test_a_crossing_outside_what_was_measured_says_on_which_side():
    ms = (16, 8192)
    assert [report_r2b.crossed(v, ms) for v in (0.0, math.inf, 99.6)] == [
        "under 16", "over 8192", "100",
    ]  # fmt: skip


def test_cells_stand_beside_their_bound(part, shown):
    table = part["cells"][0]
    assert len(table["rows"]) == len([c for c in shown.found.cells if c.format == "mxfp4"])
    (row,) = [r for r in table["rows"] if (r["r2_shape"], r["r2_m"]) == ("gate_up", "2048")]
    assert row["r2b_bound"] == "tensor"
    assert float(row["r2b_over_bound"].split()[0]) == pytest.approx(1.1, rel=0.01)
    assert [t["caption"].split(",")[0] for t in part["cells"]] == [
        "qgemm_mx in MXFP4", "qgemm_mx in NVFP4", "qgemm_mx in INT4-g128",
    ]  # fmt: skip


def test_the_source_is_held_against_linear_on_the_frozen_shapes(part, shown):
    rows = {r["r2b_what"]: r for r in part["source"]["rows"]}
    assert len(rows) == 5
    ridge = next(r for what, r in rows.items() if "as long" in what)
    assert ridge["r2b_source"] == "about 44"
    assert float(ridge["r2b_seen"]) == pytest.approx(700 / 4.4 * 0.53125 / 2, rel=0.01)
    falls = [r for what, r in rows.items() if "falls under" in what]
    assert [r["r2b_source"] for r in falls] == ["about 32", "about 64"]
    first, second = (float(r["r2b_seen"]) for r in falls)
    assert 32 < first < second < 256


def test_other_formats_are_held_at_each_m_and_over_all(part):
    rows = {(r["r2_format"], r["r2_m"]): r for r in part["formats"]["rows"]}
    assert {m for f, m in rows if f == "NVFP4"} == {*map(str, gemm_r2b.MS), "all"}
    assert rows["NVFP4", "all"]["r2_shapes"] == "9" and rows["INT4-g128", "all"]["r2_shapes"] == "2"


def test_the_ablation_has_predicted_and_observed_changes(part):
    rows = [r for r in part["steps"]["rows"] if r["r2_problem"] == "gate_up M=512"]
    assert [r["r2_step"] for r in rows] == [*PLAN]
    assert rows[1]["r2_predicted"] == "−10.0 %" and rows[1]["r2_change"].startswith("−2")


def test_every_step_of_the_plan_has_words_and_a_prediction_of_the_kernels_plan(shown):
    plan = report_r2b.ablation_plan()
    rows = [row for row in made.PROTOCOL["plan"]["rows"] if row["group"] == "ablation"]
    kernels = {kernel for row in rows for kernel in row["kernels"]}
    assert kernels <= set(plan) and "qgemm_mx" in plan
    assert all(what for what, _ in plan.values())


def test_power_is_shown_of_kernels_in_use_alone(part):
    kernels = {r["r2b_arm"] for r in part["power"]["rows"]}
    assert kernels == {"qgemm_mx", "linear", "cublaslt_bf16", "cublaslt_fp8", "peer/humming_bf16"}
    assert part["power"]["rows"][0]["r2b_arm"] == "qgemm_mx"
    assert all(r["r2b_power"] == "400" for r in part["power"]["rows"])


def test_the_profile_has_the_tensor_pipe_and_the_rivals(part):
    rows = part["profile"]["rows"]
    assert rows[0]["r2_kernel"] == "qgemm_mx" and {"cublaslt_fp8", "qgemm_mx/step1"} <= {
        r["r2_kernel"] for r in rows
    }
    at = {(r["r2_problem"], r["r2_format"], r["r2_kernel"]): r for r in rows}
    row = at["q_o_proj M=512", "MXFP4", "qgemm_mx"]
    assert row["r2_tensor"] == "82.0" and row["r2_spills"] == "0"


def test_a_campaign_of_the_kernel_alone_still_has_a_section(tmp_path):
    left = ("stream_read", "cublaslt_fp8", "cublaslt_bf16", "qgemm_mx/searched", "linear")
    how = {"shapes": ("kv_gqa",), "ms": (64,), "peers": {}, "counters": False, "constants": {}}
    alone = Shown(tmp_path, without=left, noise=0.0, **how)
    assert report_r2b.figures(alone.found) == {}
    text = Page(section(alone.html(tmp_path, figures={}))).text
    for words in (
        "No profiler counters were recorded",
        "linear was not timed.",
        "No exhaustive search was measured.",
        "No reading fell into a leg of prefill.",
        "No campaign of this device has a BF16 rate",
        "Numbers that the campaign does not give",
    ):
        assert words in text, words
    assert "0 of 34 bars met" in text and "NOT_RUN" in text


# Figures.


def texts(svg: str) -> list[str]:
    return ["".join(t.itertext()) for t in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_figures_are_small_well_formed_labelled_and_reproducible(shown):
    drawn = report_r2b.figures(shown.found, PLAN)
    assert set(drawn) == {
        f"{name}{end}" for name in ("fig8_gemm", "fig9_gemm_ablation") for end in ("", "_narrow")
    }
    for name, svg in drawn.items():
        root = ElementTree.fromstring(svg)
        assert root.find(f"{SVG}title").text and len(svg.encode()) < 400_000, name
        width = float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1])
        assert width < (280 if name.endswith("_narrow") else 760), name
    assert drawn == report_r2b.figures(shown.found, PLAN)
    said = texts(drawn["fig8_gemm"])
    for title in ("MXFP4 over cuBLASLt FP8", "NVFP4 over cuBLASLt BF16", "MXFP4 over the fastest peer"):  # fmt: skip
        assert title in said, title
    assert "bar: geometric mean at this M" in said and "M (tokens)" in said
    said = texts(drawn["fig9_gemm_ablation"])
    assert "time, multiples of the bound" in said and sum("MXFP4, M=" in t for t in said) == 6


def test_a_figure_without_what_it_shows_is_refused():
    with pytest.raises(ValueError, match="no cell with a rival"):
        figures_r2b.fig_speed([])
    with pytest.raises(ValueError, match="no step"):
        figures_r2b.fig_ablation([], [], None, PLAN)


def test_other_plans_are_in_no_figure_and_what_linear_launches_is_drawn_once(shown):
    table = shown.arguments()["cells"]
    kept = figures.of_the_set(table, made.SHAPES)
    tried = {"qgemm_mx/searched", "qgemm_mx/batch_invariant", "qgemm_mx/step0"}
    assert tried <= set(table["kernel"])
    assert {"qgemm_mx", "linear"} <= set(kept["kernel"]) and not tried & set(kept["kernel"])
    assert gemm_r2b.NEIGHBOUR not in set(kept["shape"])
    assert "linear" not in set(figures.drawn_once(kept)["kernel"])
    alone = kept[kept["kernel"] == "linear"]
    assert len(figures.drawn_once(alone)) == len(alone)
    assert "qgemm_mx/" not in readme.headline(table)


def test_m_of_few_shapes_make_no_kink_in_the_line_of_the_floor(shown):
    kept = figures.of_the_set(shown.arguments()["cells"], made.SHAPES)
    own = kept[(kept["kernel"] == "qgemm_mx") & (kept["format"] == "mxfp4")]
    own = own[own["regime"] == "cold_graph"]
    assert set(own["M"]) - set(figures._of_most_shapes(own)["M"]) == set(gemm_r2b.ODD_MS)


# README.


def tables_of(found: analysis_r2b.Analysis, folder: Path) -> dict[str, pd.DataFrame]:
    for name, table in analysis_r2b.tables(found).items():
        (folder / f"{name}.csv").write_text(analysis_r2b.to_csv(table))
    return readme.r2b_tables(folder)


def test_the_block_of_the_readme_has_every_m_the_bars_and_the_reasons(shown, tmp_path):
    text = readme_r2b.matrix(tables_of(shown.found, tmp_path))
    lines = text.splitlines()
    assert [line for line in lines if len(line) > 125 and not line.startswith("|")] == []
    rows = [line.split("|") for line in lines if re.match(r"\| \d+ \|", line)]
    assert [int(row[1]) for row in rows] == list(gemm_r2b.MS)
    assert all(len(row) == len(rows[0]) for row in rows)
    at = {int(row[1]): [part.strip() for part in row] for row in rows}
    mean = next(b for b in shown.found.bars if b.id == "bf16_mean.m512")
    assert {row[2] for row in at.values()} == {"9"} and "ended it" not in text
    assert at[512][5] == f"{mean.observed.value:.2f} (≥ 1) **missed**"
    assert at[32][4].endswith("(≥ 1.6)") and "(" not in at[512][4]
    assert at[16][6] == at[16][7] == "-"
    others = [line for line in lines if re.search(r"\| (met|missed|undecided|NOT_RUN) \|", line)]
    assert len(others) == 7
    assert "- **over BF16, mean, MXFP4** at M = 512 (" in text and f"`{shown.folder.name}`" in text
    assert "`linear` in MXFP4 is faster than `cublaslt_fp8` up to M = " in text.replace("\n", " ")


def test_the_mean_of_the_readme_is_that_of_the_shapes_of_the_set(shown, tmp_path):
    tables = tables_of(shown.found, tmp_path)
    at = [c for c in shown.found.cells if (c.format, c.point.M) == ("mxfp4", 256)]
    own = [c.over_fp8.mean for c in at if c.over_fp8 is not None]
    assert len(own) == 9
    row = next(
        line for line in readme_r2b.matrix(tables).splitlines() if line.startswith("| 256 |")
    )
    assert row.split("|")[4].strip() == f"{math.exp(sum(own) / 9):.2f}"


# A campaign that its minutes ended.


@pytest.fixture(scope="module")
def cut(tmp_path_factory) -> Shown:
    """One shape of nine not at all, one without M = 128."""
    lost = [*(("llama70b_down", m) for m in gemm_r2b.MS), ("gate_up", 128)]
    return Shown(tmp_path_factory.mktemp("cut"), lost=lost, slow={})


def test_the_section_says_what_was_not_reached_and_that_means_are_over_the_rest(cut, tmp_path):
    part = cut.part()
    assert part["closed"].startswith(
        "The minutes of this campaign ended it before its plan: 11 of 132 points were not reached "
        "(llama70b_down at every M; gate_up at M = 128)."
    )
    text = Page(section(cut.html(tmp_path))).text
    assert "11 of 132 points were not reached" in text
    rows = {(r["r2_bar"], r["r2_format"]): r for r in part["bars"]["rows"]}
    mean = rows["over BF16, mean, M = 128", "MXFP4"]
    assert (mean["r2_status"], mean["r2_verdict"]) == ("undecided", "NOT_RUN")
    assert mean["r2_cells"].endswith(", 2 not measured")
    regret = rows["dispatch regret", page.BLANK]
    assert (regret["r2_status"], regret["r2_verdict"]) == ("NOT_RUN", "NOT_RUN")
    assert "4 of the 28 points with a search were not reached: the bar is not judged" in text
    assert "The 24 points that were give" in text
    assert any("8 of 9 shapes" in f["text"] for f in part["facts"])
    # Of the frozen set all six shapes are there, one of them at fewer M.
    assert part["source"]["caption"].endswith("geometric means of 6 shapes of the frozen set")
    assert not any(r["r2_status"] == "met" for r in part["bars"]["rows"] if "mean" in r["r2_bar"])


def test_a_whole_campaign_says_nothing_of_that(part, html):
    assert part["closed"] == "" and "not reached" not in html
    assert "not measured" not in section(html)


def test_points_that_were_not_reached_are_one_row_of_the_attempts(cut, tmp_path):
    text = cut.html(tmp_path)
    attempts = text[text.index('<section id="attempts">') :]
    assert "11 points of llama70b_down, gate_up" in attempts
    assert attempts.count("not reached: the minutes of the campaign were used up") == 1


def test_the_block_of_the_readme_says_how_many_shapes_were_measured(cut, tmp_path):
    text = readme_r2b.matrix(tables_of(cut.found, tmp_path))
    said = text.replace("\n", " ")
    assert "ended it before its plan: measured are 8 of 9 shapes (q_o_proj, kv_gqa, " in said
    lines = [line.split("|") for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    rows = {parts[1].strip(): parts for parts in lines}
    assert (rows["128"][2].strip(), rows["64"][2].strip()) == ("7 of 9", "8 of 9")
    assert rows["64"][5].strip().endswith("(≥ 2) undecided")
    assert "| dispatch regret |  | ≤ 1.03 | - | NOT_RUN |  |" in text
    assert "not measured |" in text and "(≥ 2) |" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "at no M from 16 on"), (math.inf, "at every M up to 8192"), (99.6, "up to M = 100")],
)
def test_up_to_which_m_is_said_in_words(value, text):
    assert report_r2b.faster_up_to(value, (16, 8192)) == text


def test_before_any_campaign_the_block_says_so(tmp_path):
    assert readme_r2b.matrix(readme.r2b_tables(tmp_path)) == readme_r2b.NO_R2B


def test_a_readme_without_a_missed_bar_has_no_reasons(shown, tmp_path):
    tables = tables_of(shown.found, tmp_path)
    tables["r2b_bars"] = tables["r2b_bars"].assign(status=bars.MET)
    assert "Where a bar is missed" not in readme_r2b.matrix(tables)
