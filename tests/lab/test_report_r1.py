"""The section of R1 in the report and the block of README.md, on a made-up campaign. Nothing here was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import synthetic
import synthetic_r1 as made
from test_report import Page

from lab import (
    accuracy,
    analysis_r1,
    cells,
    figures,
    judgement,
    page,
    r1_words,
    readme,
    records,
    registry,
    replay,
    report,
    report_causes,
    report_counts,
    report_production,
    report_r1,
    verdicts,
)
from lab.analysis_r1 import Analysis
from lab.statistics import Estimate

#: Enough for a section: the factorial of every shape at M = 1.
QUICK = {"ms": (1,), "regimes": ("cold_graph",), "causes": False, "noise": 0.0, "blocks": 3}
PREREG = Path(__file__).resolve().parents[2] / "prereg"


def exact(campaign, cell):
    return made.predicted(cell)


class Shown:
    """A campaign on disk, its analysis, its verdicts, and the page that shows them."""

    def __init__(self, folder: Path, predict=exact, **how) -> None:
        given = {
            "ms": (1, 2, 4, 16, 64),
            "regimes": ("cold_graph", "cold_loop"),
            "noise": 0.004,
            "blocks": 6,
        }
        self.campaign = made.campaign(**(given | how))
        self.folder = records.write(self.campaign, folder)
        record = made.accuracy_record()
        self.found = analysis_r1.analyse(
            self.campaign, self.folder.name, made.SHAPES, record, predict
        )
        self.claims = registry.load_registered(PREREG).claims
        evidence = verdicts.Evidence.from_campaigns(
            [self.folder], computed={"R1": lambda _: self.found.constants}
        )
        judged = verdicts.judge(self.claims, evidence)
        self.verdicts = verdicts.to_frame(judged)
        self.results = accuracy.summarise(record)

    def arguments(self) -> dict:
        plain = [judgement.claim_json(claim) for claim in self.claims]
        campaigns = [*synthetic.campaigns(), replay.described(self.folder)]
        return synthetic.report_arguments() | {
            "verdicts": self.verdicts,
            "claims": plain,
            "cells": cells.table([self.folder]),
            "campaigns": campaigns,
            "shapes": made.SHAPES,
            "r1": self.found,
        }

    def figures(self) -> dict[str, str]:
        return report_r1.figures(self.found, self.results)

    def html(self, folder: Path, **changed) -> str:
        out = folder / "index.html"
        report.render(out, figures=self.figures(), **(self.arguments() | changed))
        return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> Shown:
    return Shown(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def html(shown, tmp_path_factory) -> str:
    return shown.html(tmp_path_factory.mktemp("page"))


def section(text: str) -> str:
    return text[text.index('<section id="r1">') : text.index('<section id="headline">')]


def plain(text: str) -> str:
    return Page(text).text


def test_the_page_is_whole_and_the_section_stands_before_the_headline(html):
    whole = Page(html)
    ids = [a["id"] for _, a in whole.tags if a.get("id")]
    assert len(ids) == len(set(ids))
    targets = [a["href"] for tag, a in whole.tags if tag == "a"]
    assert all(t.startswith("#") and t[1:] in ids for t in targets)
    assert html.index('id="rungs"') < html.index('id="r1"') < html.index('id="headline"')
    assert '<a href="#r1">' in html


def test_before_any_campaign_there_is_no_section(shown, tmp_path):
    text = shown.html(tmp_path, r1=None)
    assert 'id="r1"' not in text and 'href="#r1"' not in text
    assert "It needs rung R1" not in text  # figure 3 was drawn, and then stands in Figures
    drawn = report_r1.figures(None, shown.results)
    assert set(drawn) == {"fig5_accuracy", "fig5_accuracy_narrow"}
    assert "speed not measured yet" in drawn["fig5_accuracy"]
    assert report_r1.figures(None, []) == {}


def test_figures_3_and_5_stand_in_the_section_and_only_there(html):
    part = section(html)
    assert (
        part.count("<figure") == 2
        and 'id="fig3_waterfall"' in part
        and 'id="fig5_accuracy"' in part
    )
    figures_part = html[html.index('<section id="figures">') :]
    assert (
        '<a href="#fig3_waterfall">R1</a>' in figures_part
        and 'id="fig3_waterfall"' not in figures_part
    )


def test_every_summary_has_a_panel(shown):
    svg = shown.figures()["fig3_waterfall"]
    for m in (1, 16, 64):
        assert f"MXFP4, M={m}, 6 frozen shapes" in svg and f"MXFP4, M={m}, 3 large shapes" in svg
    assert "speed-up over FP8 (ratio)" in shown.figures()["fig5_accuracy"]


def test_the_headline_says_how_much_of_the_bytes_arrives(shown, html):
    row = r1_words.pick(
        shown.found.production, kernel="peer/humming_bf16", format="mxfp4", regime="cold_graph", over="all", M=1,
        against="cublaslt_fp8",
    )  # fmt: skip
    text = plain(section(html))
    assert f"{row['speed']:.2f} × FP8: {100 * row['realised']:.0f} % of 1.88" in text
    assert f"{row['lowest']:.3f} on kv_gqa" in text
    assert "25 % of the gap: weight and scale load" in text
    assert "It stands above all others" in text
    assert "27 of 27 cells close by removal" in text and "27 of 27 cells close by counters" in text


def test_two_causes_that_overlap_are_no_largest_one(tmp_path):
    shares = made.SHARES | {"weight_load": 0.225, "dequant_issue": 0.225}
    how = QUICK | {"noise": 0.004, "blocks": 6}
    facts = report_r1._facts(Shown(tmp_path, shares=shares, **how).found, {})
    (largest,) = [f for f in facts if "of the gap:" in f["value"]]
    assert "is not decided" in largest["text"]


def test_the_tables_are_on_the_page(html):
    text = plain(section(html))
    for words in (
        "peer/humming_bf16, cold weights, graph replay; 9 shapes",
        "All kernels, cold_loop",
        "Causes of the MXFP4 gap, mean over 6 frozen shapes; evidence at M = 1",
        "Causes of the MXFP4 gap, mean over 3 large shapes",
        "Does the sum close? Every decomposed cell",
        "Factors two by two, frozen shapes",
        "Profiler counters, a pass of their own",
        "Instructions of the testbed's variants (compiled code)",
        "Whole waves of blocks: time over the floor",
        "Predictions P2 to P6 of the source",
        "All claims of R1 by family",
        "peer/marlin_fp4 MXFP4 NOT_INSTALLED – no module named vllm",
        "Go or no-go for R2: GO",
    ):
        assert words in text, words
    assert "testbed/none" not in [
        c.strip() for c in re.findall(r"<code>(.*?)</code>", section(html))
    ]


def test_every_column_of_the_section_is_explained(html):
    glossary = html[html.index('<section id="glossary">') :]
    for label in ("read / weight", "of 1.88 ×", "residual (95 %)", "in flight / SM (kB)"):
        assert f"<dt>{label}</dt>" in glossary
    known = r1_words.words()["columns"]
    assert not set(known) & set(json.loads((report.TEMPLATES / "words.json").read_text())["columns"]) - {
        "regime", "share"
    }  # fmt: skip
    assert all(len(row) == 3 and all(row) for row in known.values())


def test_refuted_and_confirmed_predictions_have_the_same_form(shown, html):
    part = section(html)
    table = part[part.index("Predictions P2 to P6") :]
    table = table[: table.index("</table>")]
    want = [
        c.id for c in shown.claims if re.match(r"r\d\.p[2-6]\.|r1\.(closure|cause_detail)\.", c.id)
    ]
    rows = [row for row in table.split("<tr") if "<code>" in row]
    assert len(rows) == len(want)
    badges = {row: re.findall(r'class="badge (\w+)"', row) for row in rows}
    assert all(len(found) == 1 for found in badges.values())
    flat = [found[0] for found in badges.values()]
    assert {"REFUTED", "CONFIRMED", "NOT_RUN", "HIT"} <= set(flat)
    # The source's order, not that of success.
    labels = re.findall(r'<td class="text">\s*(P\d|R1)</td>', table)
    assert labels == sorted(labels)


def test_every_paragraph_has_its_numbers_from_the_analysis(shown):
    found = report_causes.paragraphs(r1_words.words(), shown.found, replay.described(shown.folder))
    text = {p["title"]: p["text"] for p in found}
    assert len(text) == 10 and not any("{" in words or "nan" in words for words in text.values())
    launch = next(b for b in shown.found.summaries["frozen", 64].causes if b.name == "launch")
    assert r1_words.share(launch.share) in text["launch"]
    assert "3.25 of the 7.25" in text["dequantisation issue"]
    for words in text.values():
        numbers = re.sub(r"M = (1|16|64)|gpt_oss_2880|BF16|FP8|(MX|NV)FP4|humming_bf16", "", words)
        assert re.search(r"\d", numbers), words


def test_a_stacked_cause_says_so_and_never_no_effect(tmp_path):
    shown = Shown(tmp_path, stacked=True, **QUICK)
    told = report_causes.paragraphs(r1_words.words(), shown.found, replay.described(shown.folder))
    found = {p["title"]: p["text"] for p in told}
    assert "It is stacked on 6 of 6 shapes at M = 1" in found["dequantisation issue"]
    kit = page.Tables(page_columns())
    matrix = report_causes.cause_matrix(kit, r1_words.words(), shown.found, "frozen", {})
    evidence = {row["cause"]: row["evidence"] for row in matrix["rows"]}
    assert (
        "stacked (hidden behind another factor) on 6 of 6 shapes"
        in evidence["dequantisation issue"]
    )
    table = report_causes.interactions(kit, r1_words.words(), shown.found)
    (row,) = [
        r
        for r in table["rows"]
        if r["pair"] == "weight and scale load × dequantisation issue" and r["others"] == "present"
    ]
    assert row["overlap_1"] == "6 stacked; 25.0 %"  # of the gap, which is smaller by what hides


def page_columns() -> dict:
    known = json.loads((report.TEMPLATES / "words.json").read_text(encoding="utf-8"))["columns"]
    return known | r1_words.words()["columns"]


def unmeasured(tmp_path, **how) -> tuple[Shown, dict]:
    shown = Shown(tmp_path, **(QUICK | how))
    kit = page.Tables(page_columns())
    given = shown.arguments()
    by_id = {c["id"]: c for c in given["claims"]}
    words = json.loads((report.TEMPLATES / "words.json").read_text(encoding="utf-8"))
    part = report_r1.section(
        kit, shown.found, replay.described(shown.folder), shown.verdicts, by_id,
        lambda row, claim: report._claim_row(row, claim, words),
    )  # fmt: skip
    return shown, part


def test_a_missing_peer_and_missing_counters_are_said_claim_by_claim(tmp_path):
    peers = {k: v for k, v in made.PEERS.items() if k[0] != "peer/humming_fp8"}
    _, part = unmeasured(tmp_path, predict=lambda c, cell: None, counters=False, peers=peers)
    why = {row["claim_id"]: row["why_missing"] for row in part["missing"]["rows"]}
    assert "no prediction from counters" in why["r1.closure.residual.m1"]
    assert "no counter row" in why["r1.cause_detail.issue_slots_per_64_weights_testbed"]
    assert why["r1.production.humming_fp8.mxfp4.kv_gqa.m1"] == "not measured in this campaign"
    assert part["profile"]["rows"] == [] and "No profiler counters" in part["profile"]["nothing"]
    assert {row["closes_counters"] for row in part["residuals"]["rows"]} == {"NOT_RUN"}
    assert {row["closes_removed"] for row in part["residuals"]["rows"]} == {"CLOSED"}
    assert part["facts"][-2]["value"] == "9 of 9 cells close by removal"
    assert part["facts"][-1]["value"] == "Second closure: not taken"
    assert "(not taken)" in part["closing"] and "0 of 9 are CLOSED by both" in part["closing"]


def test_without_the_production_path_the_section_still_stands(tmp_path):
    shown, part = unmeasured(tmp_path, peers={})
    assert part["gap"]["rows"] == [] and "was not measured" in part["gap"]["nothing"]
    assert part["speeds"] == "The campaign has no speed of the production path."
    html = shown.html(tmp_path)
    assert "beyond the testbed" not in plain(section(html))
    assert "hollow: speed not measured yet" in shown.figures()["fig5_accuracy"]


def test_a_campaign_without_any_split_says_which_cells_and_why(tmp_path):
    lost = [("probe/launch_floor", s["name"], 1) for s in made.SHAPES]
    shown, part = unmeasured(tmp_path, without=lost)
    assert len(part["refused"]) == 9 and "was not timed" in part["refused"][0]
    assert part["paragraphs"] == [] and part["rankings"] == [None, None]
    assert "fig3_waterfall" not in shown.figures()
    text = plain(section(shown.html(tmp_path)))
    assert "Cells that could not be decomposed" in text and "No cell of the frozen shapes" in text


def test_an_unexplained_cell_is_a_badge(tmp_path):
    _, part = unmeasured(tmp_path, shares=made.SHARES | {"weight_load": 0.10})
    assert {row["closes_removed"] for row in part["residuals"]["rows"]} == {"UNEXPLAINED"}
    assert part["facts"][-2]["value"] == "0 of 9 cells close by removal"
    (row,) = [r for r in part["causes"][0]["rows"] if r["cause"] == "residual"]
    assert row["evidence"].startswith("by removal: 6 UNEXPLAINED; by counters: 6 ")


def test_profiler_values_have_their_units(shown):
    kit = page.Tables(page_columns())
    place = {
        "kernel": "testbed/full",
        "format": "mxfp4",
        "shape": "q_o_proj",
        "N": 4096,
        "K": 4096,
        "M": 1,
    }

    def row(metric, value, regime="cold_loop"):
        return {**place, "regime": regime, "metric": metric, "unit": "", "value": value, "tool": ""}

    counters = [
        row("gpu__time_duration.sum", 6500.0),
        row("gpu__time_duration.sum", 5000.0, "hot_graph"),
        row("dram__bytes_read.sum", 2 * 8912896.0),
        row("sm__inst_executed_pipe_alu.sum", 3.5 * 4096 * 64),
        row("smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio", 7.5, "hot_graph"),
        row("smsp__average_warps_issue_stalled_wait_per_issue_active.ratio", 1.5, "hot_graph"),
        row("some_other_metric", 1.0),
    ]  # fmt: skip
    (got,) = report_counts.profile(kit, r1_words.words(), {"counters": counters})["rows"]
    assert (got["ncu_us"], got["ncu_dram"], got["ncu_alu"]) == ("6.50", "2.00", "3.50")
    assert got["ncu_stall"] == "long scoreboard 7.50"


def test_instruction_counts_say_what_a_variant_lacks(shown):
    kit = page.Tables(page_columns())
    rows = report_counts.sass_table(kit, replay.described(shown.folder))["rows"]
    assert [r["variant"] for r in rows] == ["testbed/full", "testbed/-dequant_issue"]
    assert rows[1]["changed"] == "LOP3 −52" and rows[0]["changed"] == page.BLANK


def test_experiments_and_extra_shapes_are_in_no_figure_of_performance(shown):
    table = shown.arguments()["cells"]
    assert {"waves_8448", "decode_chain", "gate_up_tp2"} <= set(table["shape"])
    kept = figures.of_the_set(table, made.SHAPES)
    assert set(kept["shape"]) == {s["name"] for s in made.SHAPES}
    assert not kept["kernel"].str.startswith("cause/").any()
    assert figures.of_the_set(table.iloc[:0], made.SHAPES).empty


# README.


def tables_of(shown: Shown, folder: Path) -> dict[str, pd.DataFrame]:
    for name, table in analysis_r1.tables(shown.found).items():
        (folder / f"{name}.csv").write_text(analysis_r1.to_csv(table))
    return readme.r1_tables(folder)


def test_the_block_of_the_readme_is_filled_from_the_tables(shown, tmp_path):
    text = readme.throughput(tables_of(shown, tmp_path))
    assert f"`{shown.folder.name}`" in text and "over 9 shapes" in text
    speed = r1_words.pick(
        shown.found.production, kernel="peer/humming_bf16", format="nvfp4", regime="cold_graph", over="all", M=16,
        against="cublaslt_fp8",
    )  # fmt: skip
    (line,) = [line for line in text.splitlines() if line.startswith("| 16 |")]
    assert line.endswith(f"| {speed['speed']:.2f} | {100 * speed['realised']:.0f} % |")
    causes = [line.split("|")[1].strip() for line in text.splitlines() if "% (" in line]
    assert (
        causes[:2] == ["weight load", "dequant issue"] and "residual" in causes and len(causes) == 9
    )


def test_before_any_campaign_the_block_says_so(tmp_path):
    assert readme.throughput(readme.r1_tables(tmp_path)) == readme.NO_R1
    for name, table in analysis_r1.tables(None).items():
        (tmp_path / f"{name}.csv").write_text(analysis_r1.to_csv(table))
    assert readme.throughput(readme.r1_tables(tmp_path)) == readme.NO_R1


def test_a_cell_of_two_campaigns_is_that_of_the_later_rung(shown):
    own = cells.table([shown.folder])
    older = own.assign(rung="R0", campaign="r0-x", time_us=own["time_us"] * 2)
    both = pd.concat([own, older], ignore_index=True)
    assert set(readme.current(both)["campaign"]) == {shown.folder.name}
    # R1 has no stream of FP8 bytes: a row with its floor goes before the later one.
    fp8 = both["format"] == "fp8_e4m3"
    both.loc[fp8 & (both["rung"] == "R0"), "floor_us"] = 1.0
    assert both.loc[fp8 & (both["rung"] == "R1"), "floor_us"].isna().all()
    kept = readme.current(both)
    assert set(kept.loc[kept["format"] == "fp8_e4m3", "campaign"]) == {"r0-x"}
    campaigns = [
        {"id": name, "created_utc": at, "device": {"name": own["device"].iloc[0]}}
        for name, at in ((shown.folder.name, "2026-01-02"), ("r0-x", "2026-01-01"))
    ]
    newest = figures.newest_cells(both, campaigns)
    assert set(newest.loc[newest["format"] == "fp8_e4m3", "campaign"]) == {"r0-x"}
    assert set(newest.loc[newest["format"] == "mxfp4", "campaign"]) == {shown.folder.name}
    assert "testbed/-layout_staging" in set(newest["kernel"])
    assert "testbed/-layout_staging" not in set(figures.of_the_set(newest, made.SHAPES)["kernel"])
    assert "testbed/-layout_staging" not in set(kept["kernel"])
    assert not kept["shape"].str.startswith("waves_").any()
    assert re.search(
        r"\| `peer/humming_bf16` \| mxfp4 \| 6[67]\.?\d? % \(.* \| 9 \|", readme.headline(own)
    )
    assert "not a product" in readme.headline(own)


def test_the_analysis_names_the_campaign_of_a_report(shown, tmp_path):
    assert analysis_r1.chosen([shown.folder]) == shown.folder
    assert analysis_r1.chosen([]) is None
    assert isinstance(analysis_r1.of_folder(shown.folder, made.SHAPES, None, exact), Analysis)


# What a reader must not miss.


def test_counters_that_fall_short_everywhere_are_said_beside_the_closure_that_holds(tmp_path):
    _, part = unmeasured(
        tmp_path, predict=lambda c, cell: dec_exact(0.7 * made.predicted(cell).value)
    )
    removal, counters = part["facts"][-2:]
    assert removal["value"] == "9 of 9 cells close by removal"
    assert counters["value"] == "0 of 9 cells close by counters"
    assert "too short everywhere" in counters["text"] and "REFUTED" in counters["text"]


def dec_exact(value: float) -> Estimate:
    return Estimate(value, 0.0, 1.0, log=False)


def test_the_predicted_and_the_observed_order_stand_side_by_side(shown, tmp_path):
    _, part = unmeasured(tmp_path)
    want = ["grid fill (waves)", "launch", "layout staging", "dequantisation issue"]
    rows = part["order"]["rows"]
    assert [row["rank_predicted"] for row in rows[:4]] == want
    observed = [row["rank_among"].split(",")[0] for row in rows[:4]]
    shares = {c.name: c.share.value for c in shown.found.summaries["frozen", 1].causes}
    names = r1_words.words()["causes"]
    by_share = sorted(shares, key=lambda name: -shares[name])
    assert observed == [names[n] for n in by_share if names[n] in want]
    assert rows[0]["rank_all"].startswith(names[by_share[0]])
    badges = [one["badge"] for one in part["outcomes"]]
    bad = [b in ("REFUTED", "MISS") for b in badges]
    assert "P4: the order of the causes" in {one["title"] for one in part["outcomes"]}
    assert bad == sorted(bad, reverse=True)


@pytest.mark.parametrize(("size", "word"), [(-0.05, "negative"), (0.10, "positive")])
def test_the_sign_of_a_share_decides_what_its_paragraph_says(tmp_path, size, word):
    shown = Shown(tmp_path, shares=made.SHARES | {"layout_staging": size}, **QUICK)
    campaign = replay.described(shown.folder)
    told = report_causes.paragraphs(r1_words.words(), shown.found, campaign)
    (text,) = [p["text"] for p in told if p["title"] == "layout staging"]
    assert f"The share is {word}" in text
    kit = page.Tables(page_columns())
    rows = report_causes.cause_matrix(kit, r1_words.words(), shown.found, "frozen", {})["rows"]
    (evidence,) = [r["evidence"] for r in rows if r["cause"] == "layout staging"]
    assert ("the kernel is faster with it" in evidence) is (size < 0)


def test_a_peer_that_failed_a_check_is_named_with_value_and_limit(shown):
    campaign = dict(replay.described(shown.folder))
    place = {"kernel": "peer/humming_bf16", "format": "mxfp4", "shape": "down_proj", "N": 4096}
    place |= {"K": 14336, "M": 128}
    check = {"passed": False, "measured": 1.0016, "limit": 1.0, "detail": "max |error|/limit"}
    before = {"passed": True, "measured": 0.988, "limit": 1.0, "detail": "max |error|/limit"}
    cell = {**place, "role": "peer", "regime": "cold_graph", "correctness": "failed"}
    campaign["checks"] = [
        {**place, "name": "random_fp64_before", **before},
        {**place, "name": "random_fp64_after", **check},
    ]
    campaign["cells"] = [*campaign["cells"], {**cell, "tuning": None, "time": None}]
    kit = page.Tables(page_columns())
    rows = report_production.peer_table(kit, shown.found, campaign)["rows"]
    (failed,) = [row for row in rows if row["status_peer"] == "failed"]
    assert (
        failed["kernel"] == "peer/humming_bf16" and "measured 1.002 against the" in failed["reason"]
    )
    assert "before the timing it was 0.988" in failed["reason"]
    assert failed["reason"].endswith("No time in cold_graph")
    whole = next(r for r in rows if (r["kernel"], r["format"]) == (failed["kernel"], "MXFP4"))
    assert "but for 1 problem" in whole["reason"]


def test_a_profile_whose_passes_ncu_did_not_say_is_cold_only_by_its_bytes():
    kit = page.Tables(page_columns())
    size = 4096 * 4096 * 17 // 32

    def row(kernel, metric, value, regime="hot_graph"):
        place = {"format": "mxfp4", "shape": "q_o_proj", "N": 4096, "K": 4096, "M": 1}
        return {**place, "kernel": kernel, "regime": regime, "metric": metric, "value": value}

    counters = [
        row("a", report_counts.DRAM, 1.0 * size),
        row("b", report_counts.DRAM, 0.8 * size),
        row("c", report_counts.DRAM, 0.8 * size, "cold_loop"),
    ]
    campaign = {"counters": counters}
    assert report_counts.profile_rest(kit, r1_words.words(), campaign)["rows"] == []
    rows = report_counts.profile(kit, r1_words.words(), campaign)["rows"]
    assert [r["ncu_cold"] for r in rows] == ["bytes", "not shown", "ncu"]
    note = report_counts.profile_note(campaign)
    assert note.startswith("In 2 of 3 calls ncu did not say how many passes it took")


def test_go_or_no_go_shows_its_evidence(shown, tmp_path):
    _, part = unmeasured(tmp_path, ms=(1, 2, 4))
    rows = {row["step_name"]: row for row in part["decision_table"]["rows"]}
    room = shown.found.decision.room_m1.value
    fp8 = rows["FP8, cuBLASLt"]
    assert float(fp8["step_floor"]) == pytest.approx(room, rel=0.01)
    assert rows["the floor: the stream of the same bytes"]["step_floor"] == "1.00"
    assert {"the testbed with all factors", "the testbed without any factor"} <= set(rows)
    assert len(part["decision"]["lines"]) == 3


def test_shares_are_told_apart_from_their_interval():
    assert r1_words.share(Estimate(0.0, 0.0, 5.0, log=False)) == "0.0 %"
    assert r1_words.share(Estimate(0.0910, 0.00016, 30.0, log=False)) == "9.10 % (9.07 to 9.13)"
    assert r1_words.percent(-0.001) == "0 %"
    assert r1_words.listed(["a", "b", "c"]) == "a, b and c" and r1_words.listed(["a"]) == "a"
