"""The section of R2 in the report and the block of README.md, on a made-up campaign. Nothing here was measured."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
import synthetic
import synthetic_r2 as made
from test_report import Page

from lab import (
    analysis_r1,
    analysis_r2,
    bars_r2,
    cells,
    decode_r2,
    figures,
    figures_r2,
    judgement,
    page,
    r1_words,
    readme,
    readme_r2,
    records,
    registry,
    replay,
    report,
    report_r2,
    verdicts,
)

PREREG = Path(__file__).resolve().parents[2] / "prereg"
SVG = "{http://www.w3.org/2000/svg}"
#: What each step adds, and its predicted ratio; of the third the prediction is far off.
PLAN = {
    "qgemv_mx/step0": ("one thread a row, plain loads", None),
    "qgemv_mx/step1": ("weights go to registers in words of 16 bytes", 0.80),
    "qgemv_mx/step2": ("a ring of stages keeps bytes on their way", 0.50),
    "qgemv_mx/step3": ("K is split over warps", 0.90),
    "qgemv_mx/step4": ("products on the tensor cores", 0.95),
    "qgemv_mx": ("programmatic launch and the rest", 0.87),
}


class Shown:
    """A campaign on disk, its analysis, its verdicts, and the page that shows them."""

    def __init__(self, folder: Path, **how) -> None:
        self.campaign = made.campaign(**({"noise": 0.003, "blocks": 4} | how))
        self.folder = records.write(self.campaign, folder)
        self.found = analysis_r2.of_folder(self.folder, made.SHAPES)
        self.claims = registry.load_registered(PREREG).claims
        self.evidence = verdicts.Evidence.from_campaigns(
            [self.folder], computed={"R2": lambda _: self.found.constants}
        )
        self.judged = verdicts.judge(self.claims, self.evidence)
        self.verdicts = verdicts.to_frame(self.judged)

    def arguments(self) -> dict:
        campaigns = [*synthetic.campaigns(), replay.described(self.folder)]
        return synthetic.report_arguments() | {
            "verdicts": self.verdicts,
            "claims": [judgement.claim_json(claim) for claim in self.claims],
            "cells": cells.table([self.folder]),
            "campaigns": campaigns,
            "shapes": made.SHAPES,
            "r2": self.found,
        }

    def figures(self) -> dict[str, str]:
        return report_r2.figures(self.found, PLAN)

    def html(self, folder: Path, **changed) -> str:
        out = folder / "index.html"
        report.render(out, **({"figures": self.figures()} | self.arguments() | changed))
        return out.read_text(encoding="utf-8")

    def part(self) -> dict:
        known = json.loads((report.TEMPLATES / "words.json").read_text(encoding="utf-8"))["columns"]
        kit = page.Tables(known | report_r2.words()["columns"])
        by_id = {c.id: judgement.claim_json(c) for c in self.claims}
        return report_r2.section(
            kit, self.found, self.verdicts, by_id, lambda key: {"wide": None, "narrow": None}, PLAN
        )


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> Shown:
    return Shown(tmp_path_factory.mktemp("data"), regimes=made.REGIMES)


@pytest.fixture(scope="module")
def html(shown, tmp_path_factory) -> str:
    return shown.html(tmp_path_factory.mktemp("page"), figures=shown.figures())


@pytest.fixture(scope="module")
def part(shown) -> dict:
    return shown.part()


def section(text: str) -> str:
    return text[text.index('<section id="r2">') : text.index('<section id="headline">')]


def plain(text: str) -> str:
    return Page(text).text


# The page.


def test_the_page_is_whole_and_the_section_stands_before_the_headline(html):
    whole = Page(html)
    ids = [a["id"] for _, a in whole.tags if a.get("id")]
    assert len(ids) == len(set(ids))
    targets = [a["href"] for tag, a in whole.tags if tag == "a"]
    assert all(t.startswith("#") and t[1:] in ids for t in targets)
    assert html.index('id="rungs"') < html.index('id="r2"') < html.index('id="headline"')
    assert '<a href="#r2">' in html and ".badge.met" in html


def test_before_any_campaign_nothing_of_the_page_is_about_r2(shown, tmp_path):
    text = shown.html(tmp_path, r2=None, figures={})
    assert 'id="r2"' not in text and 'href="#r2"' not in text and ".badge.met" not in text
    assert "fig6_ablation" not in text and "fig7_decode" not in text
    assert report_r2.figures(None) == {}


def test_every_table_and_figure_is_in_the_section(html):
    text = plain(section(html))
    for words in (
        "The bars of the decode kernel",
        "qgemv_mx in MXFP4, cold weights, graph replay",
        "qgemv_mx in NVFP4, cold weights, graph replay",
        "qgemv_mx in INT4-g128, cold weights, graph replay",
        "Means over the shapes, cold",
        "Means in other regimes",
        "The ablation, step by step (MXFP4)",
        "One element taken out alone (MXFP4)",
        "Regret of the dispatch choice, the worst first",
        "Cost of the batch-invariant mode",
        "Time at M = 16 over time at M = 1",
        "Other formats against MXFP4, the same cells",
        "The chain of decode layers",
        "Times on the host",
        "Profiler counters of qgemv_mx and its floor",
        "Instructions of qgemv_mx (compiled code)",
        "All claims of R2 by family",
    ):
        assert words in text, words
    assert section(html).count("<figure") == 2


def test_every_column_is_explained_and_new(html):
    glossary = html[html.index('<section id="glossary">') :]
    for label in ("× floor (95 %)", "met?", "regret (95 %)", "loop / 64"):
        assert f"<dt>{label}</dt>" in glossary
    own = set(report_r2.words()["columns"])
    others = json.loads((report.TEMPLATES / "words.json").read_text(encoding="utf-8"))["columns"]
    assert not own & (set(others) | set(r1_words.words()["columns"]))


def test_other_plans_of_the_kernel_are_in_no_figure_and_no_headline(shown):
    table = shown.arguments()["cells"]
    tried = {"qgemv_mx/searched", "qgemv_mx/batch_invariant", "qgemv_mx/step0", "qgemv_mx/-ring"}
    assert tried <= set(table["kernel"])
    kept = figures.of_the_set(table, made.SHAPES)
    assert "qgemv_mx" in set(kept["kernel"]) and not tried & set(kept["kernel"])
    assert "`qgemv_mx`" in readme.headline(table) and "qgemv_mx/" not in readme.headline(table)


# Bars.


def test_the_bars_stand_with_limit_interval_and_frozen_verdict(part, shown):
    rows = {(r["r2_bar"], r["r2_format"]): r for r in part["bars"]["rows"]}
    assert len(rows) == len(shown.found.bars) == 16
    mean = rows["over FP8, mean", "MXFP4"]
    assert mean["r2_limit"] == "≥ 1.88" and mean["r2_status"] == "missed"
    assert mean["r2_verdict"] == "REFUTED" and mean["r2_off"].startswith("−")
    why = {r["title"]: r for r in part["reasons"]}
    reason = why["over FP8, mean, MXFP4"]
    assert reason["badge"] == "missed" and reason["text"].startswith("Worst cell kv_gqa M = ")
    assert "a kernel at the floor in every cell would reach" in reason["text"]
    assert not any("host" in title for title in why)
    host = rows["host time of a call", page.BLANK]
    assert (host["r2_limit"], host["r2_status"]) == ("≤ 10 µs", "met")
    assert host["r2_verdict"] == "CONFIRMED"
    assert rows["packing on the device", page.BLANK]["r2_verdict"] == page.BLANK
    chain = rows["chain over the asymptote", "MXFP4"]
    assert chain["r2_worst"] == "decode_chain M = 16"


def test_each_missed_cell_has_its_amount_and_the_profilers_reason(part, shown):
    rows = part["misses"]["rows"]
    assert len(rows) == len(shown.found.misses) > 0
    by_profile = [row for row in rows if row["r2_shape"] != decode_r2.CHAIN_SHAPE]
    where = r"(^|; )in (its own profile|the profiled call, \w+ M = \d+): latency-bound, warps wait for memory"
    for row in by_profile:
        wrong = row["r2_off"].startswith("−") == row["r2_limit"].startswith("≥")
        assert wrong or row["r2_status"] == "undecided"
        said = row["r2_reason"]
        assert re.search(where, said) and "TB/s under the profiler, " in said
        assert "% of the asymptote" in said and "issue slots 41 %" in said
    assert {row["r2_status"] for row in by_profile} == {"missed", "undecided"}


def test_missed_and_undecided_cells_are_counted_apart(part, shown):
    bars = {(b.id, b.format): b for b in shown.found.bars}
    names = report_r2.words()["bars"]
    rows = {(r["r2_bar"], r["r2_format"]): r["r2_cells"] for r in part["bars"]["rows"]}
    for fmt, shown_fmt in (("mxfp4", "MXFP4"), ("nvfp4", "NVFP4")):
        b = bars["fp8_geomean", fmt]
        over = [d.over_fp8 for d in shown.found.decode if d.format == fmt]
        missed = sum(e.interval()[1] < b.limit for e in over)
        undecided = sum(e.interval()[0] < b.limit <= e.interval()[1] for e in over)
        assert undecided > 0
        assert rows[names["fp8_geomean"], shown_fmt] == f"{missed} of 45, {undecided} undecided"
    assert report_r2.cells_missed(9, 9, 0) == "9 of 9"
    assert rows[names["host"], page.BLANK] == page.BLANK
    statuses = [r["r2_status"] for r in part["misses"]["rows"]]
    assert part["missed_line"].startswith(f"{statuses.count('missed')} cell")
    assert ("undecided" in part["missed_line"]) == ("undecided" in statuses)


def test_the_heading_says_one_cell_and_leaves_out_what_is_none(shown):
    def line(*statuses: str) -> str:
        miss = shown.found.misses[0]
        misses = tuple(dataclasses.replace(miss, status=s) for s in statuses)
        return report_r2.missed_line(misses)

    assert line("missed", "undecided", "missed") == "2 cells missed and 1 undecided"
    assert line("missed") == "1 cell missed"
    assert line("undecided") == "0 cells missed and 1 undecided"


def test_the_tooltip_of_the_claim_says_which_peer_it_is_about():
    (label, _, help_) = report_r2.words()["columns"]["r2_verdict"]
    assert label == "claim" and "nearest to the bar" in help_
    claims = {c.id: c for c in registry.load_registered(PREREG).claims}
    claim = judgement.claim_json(claims["r2.bar.gemv_peer.mxfp4"])
    peers = set(re.findall(r"peer/\w+", json.dumps(claim)))
    assert peers == set(re.findall(r"peer/\w+", help_)) == {"peer/humming_bf16"}


def test_off_by_has_a_sign_and_no_false_precision():
    assert report_r2.off_by(0.05) == "+5.0 %" and report_r2.off_by(-0.234) == "−23 %"
    assert report_r2.off_by(None) == page.BLANK and report_r2.off_by(-0.0001) == "+0.0 %"


def test_the_facts_count_the_bars(part, shown):
    first, *rest = part["facts"]
    met = sum(bar.status == bars_r2.MET for bar in shown.found.bars)
    assert first["value"] == f"{met} of 16 bars met" and "Missed: over FP8, mean, MXFP4;" in first["text"]  # fmt: skip
    said = " ".join(f["value"] for f in rest)
    for words in ("× FP8 in MXFP4", "× FP8 in NVFP4", "× the floor", "µs on the host"):
        assert words in said


# Tables.


def test_the_ablation_has_predicted_and_observed_changes(part):
    rows = [r for r in part["steps"]["rows"] if r["r2_problem"] == "gate_up M=1"]
    assert [r["r2_step"] for r in rows] == [f"qgemv_mx/step{i}" for i in range(5)] + ["qgemv_mx"]
    assert rows[0]["r2_predicted"] == rows[0]["r2_change"] == page.BLANK
    assert rows[1]["r2_predicted"] == "−20 %" and re.match(
        r"−2[01]\.\d % \(−2\d\.\d to −[12]\d\.\d\)$", rows[1]["r2_change"]
    )
    assert rows[2]["r2_predicted"] == "−50 %" and rows[2]["r2_what"].startswith("a ring of stages")


def test_the_plan_of_the_kernel_gives_the_words_of_the_steps(monkeypatch):
    steps = (("step1", "words of 16 bytes", 0.8), ("qgemv_mx", "the rest", 0.9))
    monkeypatch.setattr(report_r2.gemv_plan, "ABLATION_STEPS", steps)
    plan = report_r2.ablation_plan()
    assert plan == {"qgemv_mx/step1": ("words of 16 bytes", 0.8), "qgemv_mx": ("the rest", 0.9)}


def test_every_step_of_the_campaign_has_words_and_a_prediction_of_the_kernels_plan(shown):
    plan = report_r2.ablation_plan()
    shown_steps = [s for s in shown.found.steps if (s.point.shape, s.point.M) == ("gate_up", 1)]
    assert [s.kernel for s in shown_steps] == list(plan)
    assert all(figures_r2.label(s, plan) != s.kernel.rpartition("/")[2] for s in shown_steps)
    ratios = [ratio for _, ratio in plan.values()]
    assert ratios[0] is None and all(0 < ratio < 1 for ratio in ratios[1:])
    drawn = report_r2.figures(shown.found)
    said = texts(drawn["fig6_ablation"])
    assert any(figures_r2.label(shown_steps[1], plan) in t for t in said)


def test_regret_says_how_often_the_dispatch_was_right(part, shown):
    assert "geometric mean of 45 cells; in 45 of them both are the same plan" in part["regret_line"]
    values = [float(r["r2_regret"].split(" ")[0]) for r in part["regret"]["rows"]]
    assert len(values) == 45 and all(
        a > b - 0.006 for a, b in zip(values, values[1:], strict=False)
    )


def test_formats_and_the_batch_invariant_mode_are_held_against_the_truth(part):
    rows = {(r["r2_format"], r["r2_m"]): r for r in part["formats"]["rows"]}
    assert rows["NVFP4", "1"]["r2_byte_ratio"] == "1.059"
    assert rows["INT4-g128", "all"]["r2_shapes"] == "3"
    for row in part["invariant"]["rows"]:
        assert float(row["r2_invariant"].split(" ")[0]) == pytest.approx(made.INVARIANT, rel=0.02)
    assert len(part["invariant"]["rows"]) == 6


def test_the_chain_stands_beside_its_bound(part):
    rows = [r for r in part["chain"]["rows"] if r["r2_m"] == "1"]
    assert [r["r2_kernel"] for r in rows] == ["stream_read", "qgemv_mx", "qgemv_mx"]
    assert [r["r2_regime"] for r in rows] == ["cold_graph", "cold_graph", "chain_pdl"]
    assert rows[0]["r2_bound"] == "26.3" and rows[2]["r2_over_bound"].startswith("1.1")
    assert "4.40 TB/s, of this campaign" in part["bandwidth"]


def test_the_profile_says_throughput_registers_spills_and_occupancy(part):
    (row,) = [
        r
        for r in part["profile"]["rows"]
        if (r["r2_problem"], r["r2_format"], r["r2_kernel"])
        == ("q_o_proj M=1", "MXFP4", "qgemv_mx")
    ]
    (floor,) = [
        r
        for r in part["profile"]["rows"]
        if (r["r2_problem"], r["r2_kernel"]) == ("q_o_proj M=1", "stream_read")
    ]
    assert floor["r2_asymptote"] == "100 %" and row["r2_dram"] == "61.0"
    assert (row["r2_registers"], row["r2_spills"]) == ("128", "0")
    assert (row["r2_occupancy"], row["r2_limiter"]) == ("25 %", "registers")
    assert row["r2_stall"] == "long scoreboard 9.50" and row["r2_issue"] == "41.0"
    assert row["r2_instructions"] == "4.00"
    sass = part["sass"]["rows"]
    both = [(fmt, m) for m in ("1", "16") for fmt in ("MXFP4", "NVFP4")]
    assert [(r["r2_format"], r["r2_m"]) for r in sass] == both
    assert sass[0]["r2_loop"] == "3.25" and sass[0]["r2_sass"] == "32 HMMA, 8 LDG"


def test_host_times_say_which_call(part):
    rows = {r["r2_call"]: r["r2_value"] for r in part["host"]["rows"]}
    assert rows["a plain Python call, the slowest way of calling"].startswith("8.0")
    assert rows["a plain call with CuPy arrays"].startswith("7.0")


def test_a_campaign_of_the_kernel_alone_still_has_a_section(tmp_path):
    left = ("stream_read", "cublaslt_fp8", "cublaslt_bf16", "qgemv_mx/searched")
    how = {"ms": (1,), "peers": {}, "chain": False, "counters": False, "constants": {}}
    alone = Shown(tmp_path, without=left, noise=0.0, **how)
    assert alone.figures() == {}
    text = plain(section(alone.html(tmp_path, figures={})))
    for words in (
        "The chain was not measured.",
        "No profiler counters were recorded",
        "No time on the host was recorded.",
        "No exhaustive search",
        "Numbers that the campaign does not give",
    ):
        assert words in text, words
    assert "0 of 16 bars met" in text and "NOT_RUN" in text


# Figures.


def texts(svg: str) -> list[str]:
    return ["".join(t.itertext()) for t in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_figures_are_small_well_formed_labelled_and_reproducible(shown):
    drawn = shown.figures()
    assert set(drawn) == {"fig6_ablation", "fig6_ablation_narrow", "fig7_decode", "fig7_decode_narrow"}  # fmt: skip
    for name, svg in drawn.items():
        root = ElementTree.fromstring(svg)
        assert root.find(f"{SVG}title").text and len(svg.encode()) < 400_000, name
        width = float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1])
        assert width < (280 if name.endswith("_narrow") else 760), name
    assert drawn == shown.figures()
    said = texts(drawn["fig6_ablation"])
    assert "time, multiples of the floor" in said and "predicted, from the step before" in said
    assert sum("MXFP4, M=" in t for t in said) == 6 and "a ring of stages keeps bytes…" in said
    said = texts(drawn["fig7_decode"])
    assert "speed over FP8 (ratio)" in said and "time over the floor (ratio)" in said
    assert "M (tokens)" in said and "1.88" in said and "1.45" in said


def test_a_step_that_costs_time_has_another_colour_and_no_floor_is_refused(shown):
    steps = [s for s in shown.found.steps if (s.point.shape, s.point.M) == ("gate_up", 1)]
    assert "the step is slower" not in figures_r2.fig_ablation(steps, PLAN)
    slower = [decode_r2.Step(**{**vars(s), "over_previous": made_estimate(1.1)}) for s in steps]
    assert "the step is slower" in figures_r2.fig_ablation(slower, PLAN)
    bare = [decode_r2.Step(**{**vars(s), "floor": None}) for s in steps]
    with pytest.raises(ValueError, match="no floor beside qgemv_mx/step0 at gate_up"):
        figures_r2.fig_ablation(bare, PLAN)
    with pytest.raises(ValueError, match="no step"):
        figures_r2.fig_ablation([], PLAN)


def made_estimate(value: float):
    from lab.statistics import from_interval

    return from_interval(value, value, value, n=None, log=True)


# README.


def tables_of(shown: Shown, folder: Path) -> dict[str, pd.DataFrame]:
    for name, table in analysis_r2.tables(shown.found).items():
        (folder / f"{name}.csv").write_text(analysis_r2.to_csv(table))
    return readme.r2_tables(folder)


def test_the_block_of_the_readme_has_the_cells_the_bars_and_the_reasons(shown, tmp_path):
    text = readme_r2.decode(tables_of(shown, tmp_path))
    lines = text.splitlines()
    assert [line for line in lines if len(line) > 125 and not line.startswith("|")] == []
    rows = [
        line for line in lines if line.startswith("| ") and line.split("|")[2].strip().isdigit()
    ]
    assert len(rows) == 27 and all(row.count("|") == 13 for row in rows)
    assert {row.split("|")[2].strip() for row in rows} == {"1", "4", "16"}
    (row,) = [r for r in rows if r.startswith("| q_o_proj | 1 |")]
    d = shown.found.decode[0]
    assert (d.format, d.point.shape, d.point.M) == ("mxfp4", "q_o_proj", 1)
    assert (
        f"| {d.over_fp8.value:.2f} | {d.over_floor.value:.2f} |" in row and " humming_fp8 |" in row
    )
    bars = [line for line in lines if re.search(r"\| (met|missed|undecided|NOT_RUN) \|", line)]
    assert len(bars) == 16
    mean = next(b for b in shown.found.bars if (b.id, b.format) == ("fp8_geomean", "mxfp4"))
    low, high = mean.observed.interval()
    assert f"| {mean.observed.value:.3f} ({low:.3f} to {high:.3f}) |" in bars[0]
    missed = [line for line in lines if line.startswith("- **")]
    assert len(missed) == sum(b.status == bars_r2.MISSED for b in shown.found.bars)
    assert "latency-bound" in text and f"`{shown.folder.name}`" in text


def test_before_any_campaign_the_block_says_so(tmp_path):
    assert readme_r2.decode(readme.r2_tables(tmp_path)) == readme_r2.NO_R2
    tables = {"r1": analysis_r1.empty_tables(), "cells": cells.table([]), "verdicts": synthetic.verdicts()}  # fmt: skip
    assert readme.blocks(**tables)["decode"] == readme_r2.NO_R2


def test_a_readme_without_a_missed_bar_has_no_reasons(shown, tmp_path):
    tables = tables_of(shown, tmp_path)
    tables["r2_bars"] = tables["r2_bars"].assign(status=bars_r2.MET)
    assert "Where a bar is missed" not in readme_r2.decode(tables)
