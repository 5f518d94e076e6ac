"""The report: one file that needs nothing else, counts every claim, and cannot time the reference kernel."""

from __future__ import annotations

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import recorded  # noqa: E402
import synthetic  # noqa: E402

from lab import (  # noqa: E402
    baselines,
    clocks,
    figures,
    page,
    pins,
    replay,
    report,
    sittings,
    soundness,
)
from lab.rows import NOT_REACHED  # noqa: E402

VOID = {"meta", "br", "wbr", "hr", "img", "link", "input", "col"}


class Page(HTMLParser):
    """Reads a page: checks nesting, collects visible text, tables, ids, links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.words: list[str] = []
        self.rows: list[int] = []
        self.by_id: dict[str, str] = {}
        self._id: str | None = None
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append((tag, given))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tbody":
            self.rows.append(0)
        if tag == "tr" and "tbody" in self.open:
            self.rows[-1] += 1
        self._id = given.get("id")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)
            if self._id:
                self.by_id[self._id] = data.strip()
        self._id = None

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return figures.build_all(**synthetic.figure_arguments())


def write(folder: Path, drawn: dict[str, str], **changed) -> str:
    out = folder / "reports" / "index.html"
    report.render(out, **(synthetic.report_arguments() | changed), figures=drawn)
    assert [p.name for p in out.parent.iterdir()] == ["index.html"]
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def html(tmp_path_factory, drawn) -> str:
    return write(tmp_path_factory.mktemp("report"), drawn)


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> str:
    """The report before anything was measured."""
    given = synthetic.report_arguments()
    nothing = {"observed": None, "ci_low": None, "ci_high": None, "campaign": None}
    return write(
        tmp_path_factory.mktemp("bare"),
        {},
        verdicts=given["verdicts"].assign(verdict="NOT_RUN", **nothing),
        cells=given["cells"].iloc[:0],
        campaigns=[],
        builds=[],
        occupancy=given["occupancy"].iloc[:0],
        scores={"rows": []},
        integrity={
            "status": "UNVERIFIABLE",
            "head": None,
            "problems": [{"status": "UNVERIFIABLE", "path": "prereg", "reason": "a shallow clone"}],
        },
    )


@pytest.mark.parametrize("which", ["html", "bare"])
def test_well_formed_and_self_contained(which, request):
    page = Page(request.getfixturevalue(which))
    ids = [a["id"] for _, a in page.tags if a.get("id")]
    assert len(ids) == len(set(ids))
    for tag, given in page.tags:
        assert tag not in ("script", "link", "iframe", "img", "object", "embed"), tag
        for name in ("src", "href", "xlink:href", "srcset", "data"):
            target = given.get(name)
            assert target is None or target.startswith("#"), (tag, name, target)
            assert target is None or target[1:] in ids, f"{target} leads nowhere"
    assert "@import" not in request.getfixturevalue(which)
    assert not re.search(r"url\((?!#)", request.getfixturevalue(which))


@pytest.mark.parametrize("which", ["html", "bare"])
def test_no_empty_table_and_no_nan(which, request):
    page = Page(request.getfixturevalue(which))
    assert page.rows and all(page.rows)
    assert not re.search(r"\b(nan|NaN|None|NaT|inf)\b", re.sub("filled with NaN", "", page.text))


def test_deterministic(html, drawn, tmp_path):
    assert write(tmp_path, drawn) == html


def test_every_registered_claim_is_counted_once(html):
    page = Page(html)
    claims = synthetic.claims()
    assert page.by_id["all-claims"] == str(len(claims))
    shown = re.findall(r'<td class="claim"><code>(.*?)</code>', html)
    assert sorted(s.replace("<wbr>", "") for s in shown) == sorted(c["id"] for c in claims)


def test_counts_split_by_novelty(html):
    verdicts = synthetic.verdicts()
    for verdict, rows in verdicts.groupby("verdict"):
        line = re.search(
            rf'<th scope="row"><span class="badge {verdict}">.*?</tr>', html, re.S
        ).group()
        counts = [int(n) for n in re.findall(r'<td class="num"[^>]*>(\d+)</td>', line)]
        split = [int((rows["novelty"] == n).sum()) for n in report.NOVELTIES]
        assert counts == [*split, len(rows)], verdict


def test_an_unknown_novelty_is_still_counted(tmp_path, drawn):
    verdicts = synthetic.verdicts()
    verdicts.loc[0, "novelty"] = "unregistered"
    page = Page(write(tmp_path, {}, verdicts=verdicts))
    assert page.by_id["all-claims"] == str(len(verdicts))
    assert "other: not registered" in page.text


def test_all_four_rungs_show_a_row(html, bare):
    for text, not_run in ((html, 3), (bare, 4)):
        section = re.search(r'<section id="rungs">.*?</section>', text, re.S).group()
        assert re.findall(r'<td class="text">(R\d)</td>', section) == ["R0", "R1", "R2", "R3"]
        assert section.count('class="badge NOT_RUN"') == not_run
    assert "Missing: " in bare


def test_what_a_rung_lacks_can_be_given(tmp_path):
    text = write(tmp_path, {}, missing={"R1": ["only the campaign"]})
    assert "Missing: only the campaign." in text


def test_failures_come_before_successes(html):
    section = re.search(r'<section id="claims">.*?</section>', html, re.S).group()
    assert (
        section.index("Refuted or missed")
        < section.index("Confirmed or hit")
        < section.index("Not run")
    )
    assert 'badge MISS">' in section and 'badge REFUTED">' in section


def test_placeholders_for_figures_without_data(html, bare):
    assert html.count("This figure will show") == 2
    assert bare.count("This figure will show") == 5
    assert "Figure 3. The gap waterfall" in html and "Figure 5. Speed against accuracy" in html


def test_integrity_is_said_on_the_first_screen(html, bare, tmp_path):
    assert html.index("the frozen chain is verified") < html.index('id="rungs"')
    assert "a shallow clone" in bare[: bare.index('id="rungs"')]
    problem = {"status": "TAMPERED", "path": "p", "reason": "edited"}
    text = write(
        tmp_path, {}, integrity={"status": "TAMPERED", "head": "f" * 64, "problems": [problem]}
    )
    assert (
        "must not be relied on" in text
        and "TAMPERED: p: edited" in text
        and "is verified" not in text
    )


def test_user_strings_are_escaped(html):
    assert "<script" not in html
    assert "&lt;script&gt;alert(" in html and "made up &lt;b&gt;detail&lt;/b&gt;" in html


def test_a_timed_reference_is_refused(tmp_path):
    cells = synthetic.cells(ms=[1], shapes=synthetic.SHAPES[:1])
    cells.loc[cells["role"] == "correctness_only", "time_us"] = 3.0
    with pytest.raises(ValueError, match="correctness_only"):
        write(tmp_path, {}, cells=cells)
    assert not list(tmp_path.rglob("*.html"))


def test_a_claim_without_verdict_and_a_word_that_is_no_verdict_are_refused(tmp_path):
    verdicts = synthetic.verdicts()
    with pytest.raises(
        ValueError, match="1 registered claims have no verdict, the first is r3.triton.ratio"
    ):
        write(tmp_path, {}, verdicts=verdicts[verdicts["claim"] != "r3.triton.ratio"])
    verdicts.loc[0, "verdict"] = "LUCKY"
    with pytest.raises(ValueError, match="'LUCKY' is no verdict"):
        write(tmp_path, {}, verdicts=verdicts)


def test_every_column_on_the_page_is_explained(html):
    page = Page(html)
    labels = {t for t in re.findall(r'<th scope="col"[^>]*title="[^"]+">(.*?)</th>', html)}
    glossary = html[html.index('<section id="glossary">') :]
    assert labels and all(f"<dt>{label}</dt>" in glossary for label in labels)
    assert all(given.get("title") for tag, given in page.tags if tag == "th" and "title" in given)


def test_headline_numbers_follow_from_the_cells(tmp_path):
    cells = synthetic.cells(ms=[1], shapes=synthetic.SHAPES[:2])
    for column in ("time_us", "ci_low_us", "ci_high_us"):
        cells.loc[cells["role"] != "correctness_only", column] = 10.0
    cells.loc[cells["kernel"] == "cublaslt_fp8", "time_us"] = 4.0
    cells["floor_us"] = cells["floor_us"].where(cells["floor_us"].isna(), 5.0)
    facts = [f["value"] for f in report._cell_facts(cells, 1 << 26)]
    assert facts == ["2.50 ×", "1.00 ×", "2.50 ×", "1.00 ×", "1.00 ×"]
    cells["correctness"] = "failed"
    assert report._cell_facts(cells, 1 << 26) == []
    assert report._floor_facts(cells, synthetic.SHAPES, None) == []


def floor_cells(shares: dict[str, float]) -> pd.DataFrame:
    """Cells of cuBLASLt BF16 at M = 1 that reach the given shares of their floor."""
    chosen = [s for s in synthetic.SHAPES if s["name"] in shares]
    cells = synthetic.cells(ms=[1], shapes=chosen)
    cells = cells[(cells["kernel"] == "cublaslt_bf16") & (cells["regime"] == "cold_graph")]
    return cells.assign(floor_us=10.0, time_us=10.0 / cells["shape"].map(shares))


def test_the_floor_card_has_range_mean_and_verdict():
    cells = floor_cells({"llama70b_gate_up": 0.9, "llama70b_down": 0.8, "q_o_proj": 0.5})
    (fact,) = report._floor_facts(cells, synthetic.SHAPES, {"verdict": "REFUTED"})
    assert fact["value"] == "80 to 90 % of the floor" and fact["claim"]["verdict"] == "REFUTED"
    assert "the 2 large shapes" in fact["text"]
    assert f"all 3 shapes is {100 * (0.9 * 0.8 * 0.5) ** (1 / 3):.0f} %" in fact["text"]
    assert "leaves up to 25 % over the floor" in fact["text"] and "conservative" in fact["text"]
    (fact,) = report._floor_facts(floor_cells({"llama70b_down": 1.1}), synthetic.SHAPES, None)
    assert fact["value"] == "110 % of the floor" and "flatter a kernel" in fact["text"]


def near_floor(verdict: str, observed: float | None) -> tuple[dict, pd.DataFrame]:
    """The frozen claim about the floor, and its verdict."""
    claim = synthetic.claim(soundness.NEAR_FLOOR, "R0", "r0.harness", "threshold", "blind", "ratio")
    claim |= {"threshold": 1.06, "direction": "below"}
    row = {k: claim[k] for k in ("rung", "kind", "novelty", "unit")} | {"claim": claim["id"]}
    row |= {"verdict": verdict, "observed": observed}
    row |= {"ci_low": observed and observed - 0.002, "ci_high": observed and observed + 0.002}
    return claim, pd.DataFrame([row])


def test_the_verdict_on_the_floor_stands_with_the_answer_and_the_card(tmp_path, drawn):
    claim, verdict = near_floor("REFUTED", 1.0974)
    given = synthetic.report_arguments()
    text = write(
        tmp_path,
        {},
        claims=[*given["claims"], claim],
        verdicts=pd.concat([given["verdicts"], verdict], ignore_index=True),
    )
    for name in ("headline", "sound"):
        part = section(text, name)
        assert f'href="#claim-{soundness.NEAR_FLOOR}"' in part and 'badge REFUTED">' in part
        assert "at most 1.06 times the floor. Observed 1.097 (1.095 to 1.099)" in Page(part).text
    assert f'<tr id="claim-{soundness.NEAR_FLOOR}">' in section(text, "claims")


def test_a_floor_claim_that_was_not_run_has_no_verdict_to_show():
    claim, verdict = near_floor("NOT_RUN", None)
    assert soundness.near_floor(verdict, {claim["id"]: claim}) is None
    assert soundness.near_floor(verdict.iloc[:0], {}) is None


def test_hot_ratios_are_apart_by_the_cache_they_fill():
    cells = synthetic.cells(ms=[1], shapes=synthetic.SHAPES[:3])
    shown = figures.timed(cells)
    ratios = pd.Series({"kv_gqa": 1.25, "q_o_proj": 1.1, "gate_up": 1.0})
    (fact,) = report._hot_fact(shown, ratios, 2 * 1024 * 4096)
    assert fact["value"] == "1.25 ×" and "up to half of the cache" in fact["text"]
    assert "Where they do not fit, the ratio is 1.05 (1.00 to 1.10 over 2 shapes)." in fact["text"]
    (fact,) = report._hot_fact(shown, ratios.iloc[1:], 4096 * 4096)
    assert fact["value"] == "1.10 ×" and "take more than half" in fact["text"]
    assert report._hot_fact(shown, ratios.iloc[:0], 1e6) == []


def section(html: str, name: str) -> str:
    return re.search(rf'<section id="{name}">.*?</section>', html, re.S).group()


def test_the_instrument_is_put_to_the_test(html, bare):
    answers = re.findall(r"<dd><b>(.*?)</b>", section(html, "sound"))
    bf16 = synthetic.cells()
    bf16 = bf16[(bf16["kernel"] == "cublaslt_bf16") & (bf16["regime"] == "cold_graph")]
    large = [s["name"] for s in synthetic.SHAPES if s["set"] == "large"]
    share = bf16.assign(share=100 * bf16["floor_us"] / bf16["time_us"])
    share = share[share["shape"].isin(large) & (share["M"] <= 16)]
    one = share[share["M"] == 1]["share"]
    best = share.groupby("shape")["share"].max()
    assert answers == [
        "At 7 of 126 points.",
        "0.950 to 1.00 bytes read for each byte of weight.",
        f"cuBLASLt BF16 reaches {one.min():.0f} to {one.max():.0f} % of it at M = 1, and {best.min():.0f} to "
        f"{best.max():.0f} % at its best M up to 16.",
        "In 1 of 1 comparisons.",
        "6 of 6 exact checks passed on the device.",
        "4 of 4 comparisons with 64-bit arithmetic passed.",
        "1.40 µs at least in a graph.",
        "No: 50 % of the readings show the power cap.",
        "No: in 2 sittings, 10 minutes together.",
    ]
    page = Page(html)
    assert "2 to 11 of 126 (95 % range of the binomial). 7 lies in that range." in page.text
    assert "By format: mxfp4: 4 of 4, nvfp4: 2 of 2." in page.text
    assert "1.40 µs with 132 blocks, 2.20 µs with 1056 blocks" in page.text
    assert "No campaign has been recorded yet that could answer" in section(bare, "sound")


@pytest.mark.parametrize(
    ("differ", "judged"),
    [(12, "too narrow"), (1, "wider than need be"), (11, "lies in that range")],
)
def test_a_count_outside_the_binomial_range_is_said(differ, judged):
    campaign = synthetic.campaigns()[0]
    campaign["a_a"]["differ"] = differ
    assert judged in soundness._twin_answer(None, campaign)["words"]


def test_a_failed_comparison_with_the_driver_is_said():
    failed = synthetic.attempt("occupancy", "failed", "stream_bulk: 3, not 4", 1, 0.1, (None,) * 7)
    campaign = synthetic.campaigns()[0]
    found = soundness._occupancy_answer(
        None, campaign | {"attempts": [failed, *campaign["attempts"]]}
    )
    assert found["short"] == "In 1 of 2 comparisons." and "stream_bulk: 3" in found["words"]


def test_an_older_campaign_answers_what_the_newest_did_not_ask():
    old = synthetic.campaigns()[0]
    new = old | {"a_a": None, "counters": [], "constants": {}, "checks": [], "attempts": []}
    new |= {"clocks": None, "sittings": []}
    kit = page.Tables(report_columns())
    found = soundness.answers(kit, synthetic.cells().iloc[:0], [old, new], synthetic.SHAPES)
    assert len(found) == 8 and found[0]["short"] == "At 7 of 126 points."


def twin_legs(points: int, blocks: int, shift: float) -> pd.DataFrame:
    """Legs of an arm and its duplicate at many points; the duplicate takes exp(shift) as long, with block noise."""
    parts = []
    for m in range(1, points + 1):
        legs = recorded.legs(m=m, blocks=blocks, seed=m)
        noise = np.random.default_rng(m).normal(0, 0.01, len(legs))
        twin = legs["arm"].str.endswith("#2")
        factor = np.exp(noise + np.where(twin, shift, 0.0))
        parts.append(legs.assign(time_us=legs["time_us"] * factor))
    return pd.concat(parts, ignore_index=True)


def test_twins_counts_false_positives():
    sound = replay.twins(twin_legs(200, 8, 0.0))
    assert sound["points"] == 200 and sound["low"] <= sound["differ"] <= sound["high"]
    upto = np.cumsum([math.comb(200, k) * 0.05**k * 0.95 ** (200 - k) for k in range(201)])
    assert (sound["low"], sound["high"]) == tuple(np.searchsorted(upto, [0.025, 0.975]))
    assert sound["kernel"] == "cublaslt_fp8" and 0 < sound["median"] < sound["largest"] < 0.05
    biased = replay.twins(twin_legs(40, 8, 0.03))
    assert biased["differ"] > biased["high"] and abs(biased["median"] - 0.03) < 0.005


def test_twins_need_a_duplicate_and_two_blocks():
    legs = twin_legs(2, 3, 0.0)
    assert replay.twins(legs[~legs["arm"].str.endswith("#2")]) is None
    assert replay.twins(legs[legs["block"] == 0]) is None
    dropped = legs.assign(dropped=(legs["M"] == 1) & (legs["block"] > 0))
    assert replay.twins(dropped)["points"] == 1


def test_constants_are_in_words_and_streams_stand_apart(html):
    part = section(html, "constants")
    page = Page(part)
    assert "empty kernel in a graph, one block per multiprocessor" in page.text
    assert "empty kernel launched as the int4_g128 stream of kv_gqa" in part.split("<details>")[1]
    assert page.rows == [6, 1]
    assert report._in_words("some_new_constant_us", []) == "some new constant us"


def test_only_timed_kernels_of_the_measured_architecture_stand_open(tmp_path, drawn):
    table = synthetic.occupancy()
    cells = synthetic.cells(ms=[1], shapes=synthetic.SHAPES[:1])
    table = pd.concat(
        [table, table.assign(kernel="naive_dequant"), table.assign(kernel="reference")]
    )
    found = report._occupancy(page.Tables(report_columns()), table, cells)
    assert [r["kernel"] for r in found["timed"]["rows"]] == ["naive_dequant"]
    assert {r["arch"] for r in found["timed"]["rows"]} == {"sm_90a"}
    assert len(found["rest"]["rows"]) == 5


def report_columns() -> dict:
    words = json.loads((report.TEMPLATES / "words.json").read_text(encoding="utf-8"))
    return words["columns"]


def test_regime_ratios(html):
    section = re.search(r'<section id="regimes">.*?</section>', html, re.S).group()
    rows = re.findall(r"<tr><td.*?</tr>", section, re.S)
    # Six kernel-format pairs at M = 1 and M = 64, nine shapes each.
    assert len(rows) == 12 and all(r.count('<td class="num">9</td>') == 1 for r in rows)
    assert re.search(r"(1\.\d\d) \(1\.02 to 1\.43\)", section)


def regime_cells(cold: float, hot: float, looped: float, m: int) -> pd.DataFrame:
    """One kernel at one point in three regimes."""
    cells = synthetic.cells(ms=[64], shapes=synthetic.SHAPES[:1])
    cells = cells[cells["kernel"] == "cublaslt_fp8"]
    times = {"cold_graph": cold, "hot_graph": hot, "cold_loop": looped}
    return cells.assign(time_us=cells["regime"].map(times), M=m)


def test_ratios_below_one_are_counted_and_the_largest_deviation_is_a_limit(tmp_path):
    bias = report._regime_bias(regime_cells(10.0, 12.5, 9.0, 512))
    assert (bias["below"], bias["of"], bias["lowest"], bias["large"]) == (2, 2, "0.800", "20 %")
    assert bias["where"] == "cold / hot, cublaslt_fp8 in FP8, q_o_proj, M = 512"
    bias = report._regime_bias(regime_cells(10.0, 9.0, 9.5, 16))
    assert (bias["below"], bias["of"], bias["large"]) == (1, 2, None)
    assert bias["where"].startswith("looped / graphed")
    assert report._regime_bias(regime_cells(10.0, 9.0, 11.0, 512)) is None
    assert report._regime_bias(synthetic.cells().iloc[:0]) is None
    page = Page(write(tmp_path, {}, cells=regime_cells(10.0, 12.5, 9.0, 512)))
    assert "2 of 2 single ratios lie below 1, the lowest at 0.800" in page.text
    assert "can differ by up to about 20 %" in page.text


def readings(times: list[int], reasons: list[int], clock: float = 1500.0) -> pd.DataFrame:
    row = {"sm_clock_mhz": clock, "mem_clock_mhz": None, "power_w": 650.0, "temperature_c": 50.0}
    rows = [row | {"t_ns": t, "throttle_reasons": r} for t, r in zip(times, reasons, strict=True)]
    return pd.DataFrame(rows)


def test_readings_are_joined_to_the_legs_by_time():
    spans = [(1, 100, 200), (1, 300, 400), (4096, 500, 900)]
    where = {"shape": "kv_gqa", "N": 1024, "K": 4096, "regime": "cold_graph"}
    legs = pd.DataFrame([where | {"M": m, "start_ns": a, "end_ns": b} for m, a, b in spans])
    # Before, inside, between, inside, inside the long one three times, after.
    times, reasons = [50, 150, 250, 400, 500, 600, 900, 950], [4, 0, 4, 4, 4, 5, 1, 4]
    found = clocks.steadiness(legs, readings(times, reasons))
    assert found["readings"] == 5 and found["capped"] == 0.6
    small, large = found["bands"]
    assert (small["m_low"], small["m_high"], small["readings"], small["capped"]) == (1, 1, 2, 0.5)
    assert (large["m_low"], large["readings"]) == (4096, 3) and abs(large["capped"] - 2 / 3) < 1e-9
    assert large["sm_clock_mhz"] == 1500.0 and large["power_w"] == 650.0
    assert clocks.steadiness(legs, readings([50, 950], [4, 4])) is None
    assert clocks.steadiness(legs.iloc[:0], readings([50], [4])) is None
    silent = readings([150], [0]).assign(throttle_reasons=None, sm_clock_mhz=None)
    assert clocks.steadiness(legs, silent)["capped"] is None


def test_clocks_are_reported_with_the_frozen_reasons(html):
    part = Page(section(html, "sound")).text
    assert "within the power limit of 700 W" in part
    assert "frozen reasons only: hardware slowdown, software thermal slowdown." in part
    assert "1024 to 8192 100 % 1420 690 200" in part
    legs = Page(section(html, "attempts")).text
    assert "hardware slowdown, software thermal slowdown" in legs
    campaign = synthetic.campaigns()[0]
    campaign["clocks"] |= {"capped": 0.0}
    found = soundness._clock_answer(page.Tables(report_columns()), campaign, {})
    assert found["short"].startswith("Yes") and "frozen reasons" not in found["words"]


POINT = ("cublaslt_fp8", "fp8_e4m3", "kv_gqa", 1024, 4096, 1, None)
NOWHERE = (None,) * 7


@pytest.mark.parametrize("ending", ["crashed", "interrupted", None])
def test_a_stopped_process_ends_a_sitting(ending):
    run = [
        synthetic.attempt("occupancy", "ok", None, 0, 0.1, NOWHERE),
        synthetic.attempt("constants", "ok", None, 1, 30.0, NOWHERE),
        synthetic.attempt("point", "ok", None, 2, 30.0, POINT),
    ]
    other = POINT[:2] + ("gate_up",) + POINT[3:]
    if ending:
        run.append(synthetic.attempt("point", ending, "made up", 4, None, other))
    run.append(synthetic.attempt("occupancy", "ok", None, 6, 0.1, NOWHERE))
    run.append(synthetic.attempt("point", "ok", None, 7, 60.0, other))
    first, second = sittings.sittings(run)
    assert first["shapes"] == ["kv_gqa"] and second["shapes"] == ["gate_up"]
    assert first["constants"] and not second["constants"]
    assert first["minutes"] == (4.0 if ending else 2.5) and second["minutes"] == 2.0
    assert first["cut_off"] is bool(ending) and first["stop"] == ("made up" if ending else None)
    assert second["end"] == "2026-01-01 12:08:00" and not second["cut_off"]


def test_one_sitting_is_one_and_a_failed_check_ends_none():
    run = [
        synthetic.attempt("occupancy", "failed", "differs", 0, 0.1, NOWHERE),
        synthetic.attempt("point", "failed", "wrong", 1, 30.0, POINT),
        synthetic.attempt("counters", "refused", "no right", 2, 0.0, NOWHERE),
    ]
    assert len(sittings.sittings(run)) == 1 and sittings.sittings([]) == []
    campaign = {"sittings": sittings.sittings(run), "longest_pause_s": 3.0}
    found = soundness._sitting_answer(page.Tables(report_columns()), campaign)
    assert found["short"] == "Yes, in 2 minutes." and "stopped" not in found["words"]


def test_points_that_the_minutes_of_a_campaign_did_not_reach_are_no_sitting_of_their_own():
    run = [
        synthetic.attempt("occupancy", "ok", None, 0, 0.1, NOWHERE),
        synthetic.attempt("point", "ok", None, 1, 30.0, POINT),
        synthetic.attempt("budget", "interrupted", "the minutes of this run are used", 2, 0.0, NOWHERE),
        synthetic.attempt("point", "refused", NOT_REACHED, 2, 0.0, POINT),
        synthetic.attempt("counters", "ok", None, 3, 60.0, NOWHERE),
    ]  # fmt: skip
    (one,) = sittings.sittings(run)
    assert one["minutes"] == 4.0 and one["stop"] is None and one["shapes"] == ["kv_gqa"]


def test_the_longest_pause_is_the_widest_gap():
    assert sittings.longest_pause(readings([0, 20, 5_000_000_020, 40], [0] * 4)) == 4.99999998
    assert sittings.longest_pause(readings([7], [0])) is None


def test_sittings_are_told(html):
    part = Page(section(html, "sound")).text
    assert "Measuring began 2026-01-01 12:00:00 and ended 2026-01-01 12:11:00 (UTC)." in part
    assert "The device constants come from sitting 1" in part
    assert "over 8.0 kv_gqa, gate_up; device constants" in part and "2.0 q_o_proj" in part
    assert "The longest pause between two readings of the clocks is 60.5 s." in part


def test_what_described_adds_to_a_recorded_campaign(tmp_path):
    found = replay.described(recorded.campaign(tmp_path))
    assert found["clocks"]["readings"] == 6 and found["clocks"]["capped"] == 0.0
    assert [s["shapes"] for s in found["sittings"]] == [["q_o_proj"]]
    assert found["longest_pause_s"] == 1e-6


def test_freezes_stand_before_the_claims(html, bare):
    assert html.index('<section id="frozen">') < html.index('<section id="claims">')
    part = Page(section(html, "frozen")).text
    assert "1 2026-01-01 11:00:00 60 none made-up freeze" in part
    assert (
        "2 of 2 freezes are older than the newest campaign, the last of these by 20 minutes" in part
    )
    assert "recorded the head of the chain as it stands here" in part
    assert "No freeze was given." in section(bare, "frozen")


def test_a_freeze_after_the_campaign_is_not_counted_as_older():
    integrity = synthetic.integrity()
    integrity["freezes"][1]["frozen_utc"] = "2026-01-01T12:30:00Z"
    integrity["head"] = "9" * 64
    found = report._frozen(page.Tables(report_columns()), integrity, synthetic.campaigns())
    assert found["order"] == (
        "1 of 2 freezes are older than the newest campaign, the last of these by 60 minutes."
    )


def test_baselines_follow_the_protocol_and_the_cells(html):
    part = Page(section(html, "baselines")).text
    assert "up to 24 candidates" in part and "8 MiB" in part
    assert "FP32, fast accumulation on" in part and "made-up choice of the stream" in part
    protocol = next(iter(synthetic.protocols().values()))
    protocol["cublaslt"]["fp8_fast_accumulation"] = False
    cells = [
        {"kernel": "cublaslt_fp8", "tuning": {"candidates": n, "chosen": "x"}} for n in (17, 24)
    ]
    rows = {r["kernel"]: r for r in baselines._rows(protocol, [*cells, {"kernel": "reference"}])}
    later = {"qgemv_mx", "qgemm_mx", "linear"}
    styles = {
        k for k in figures.KERNEL_STYLE if "/" not in k
    }  # testbed and peers: the section of R1
    assert set(rows) == {*styles, "stream_read", "reference"} - later
    assert "17 to 24 tried" in rows["cublaslt_fp8"]["budget"]
    assert "tried" not in rows["cublaslt_bf16"]["budget"]
    assert rows["cublaslt_fp8"]["accumulation"] == "FP32, fast accumulation off"


def test_versions_stand_against_the_pins(html, tmp_path):
    part = Page(section(html, "provenance")).text
    assert "numpy 2.4.6 2.4.6 yes" in part and "cupy 14.2.0 14.9.9 no" in part
    one, two = tmp_path / "requirements.txt", tmp_path / "requirements-gpu.txt"
    one.write_text("# numpy==9\nnumpy==2.4.6\ncuda-toolkit[nvcc,nvvm]==13.0.2\n")
    two.write_text("-r requirements.txt\ncupy-cuda13x==14.2.0  # driver 580\n")
    found = pins.read([one, two])
    assert found == {"numpy": "2.4.6", "cuda-toolkit": "13.0.2", "cupy-cuda13x": "14.2.0"}
    assert pins.pin_of("cupy", found) == "14.2.0" and pins.pin_of("cublaslt", found) is None


def test_changed_sources_are_said(html):
    part = Page(section(html, "provenance")).text
    assert "kernel sources since the same as measured" in part
    assert "all sources since changed" in part
    source = {"kernels_digest": "a", "tree_digest": "b"}
    found = report._changed_since(source, {"kernels_digest": "c", "tree_digest": "b"})
    assert found["kernel sources since"].startswith("changed")
    assert found["all sources since"] == "the same as measured"
    assert report._changed_since({"tree_digest": "b"}, {}) == {}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ((0.54986, 0.54956, 0.55017), ("0.5499", "0.5496 to 0.5502")),
        ((0.549859, 0.549857, 0.549861), ("0.549859", "0.549857 to 0.549861")),
        ((39.0626, 38.27, 39.87), ("39.06", "38.27 to 39.87")),
        ((12345.6, 12000.2, 13000.1), ("12346", "12000 to 13000")),
        ((0.53125, 0.53125, 0.53125), ("0.53125", "–")),
        ((1.0, float("nan"), None), ("1.000", "–")),
        ((None, None, None), ("–", "–")),
        ((0.0, -0.001, 0.001), ("0.000000", "-0.001000 to 0.001000")),
        ((2e-6, 1e-6, 3e-6), ("2.000e-06", "1.000e-06 to 3.000e-06")),
    ],
)
def test_a_value_and_its_interval_have_equal_decimals(given, shown):
    assert page.with_interval(*given) == shown


def test_a_claim_says_which_way_its_ratio_stands_and_what_its_constant_is():
    words = json.loads((report.TEMPLATES / "words.json").read_text(encoding="utf-8"))
    hot, cold = ({"regime": r} for r in ("hot_graph", "cold_graph"))
    ratio = {"quantity": "regime_ratio", "cells": [hot], "reference_cells": [cold]}
    note = report._claim_note({"estimand": ratio}, words)
    assert note.startswith("the number is cold_graph over hot_graph")
    constant = {"quantity": "constant", "name": "l2_read_bandwidth_tbps"}
    note = report._claim_note({"estimand": constant}, words)
    assert "launch included: a lower bound" in note
    assert report._claim_note(synthetic.claims()[0], words) == ""


def test_units_and_order_of_the_claim_table():
    row = synthetic.verdicts().iloc[0].to_dict() | {"unit": "M"}
    words = json.loads((report.TEMPLATES / "words.json").read_text(encoding="utf-8"))
    assert report._claim_row(row, None, words)["unit"] == "tokens"
    keys = list(report._CLAIM_KEYS)
    assert keys.index("observed") == keys.index("claim") + 1


def test_captions_say_why_lines_stop_and_where_a_format_stands_in():
    cells = synthetic.cells(ms=[1, 512, 1024], shapes=synthetic.SHAPES[:5])
    naive = cells["kernel"] == "naive_dequant"
    cells = cells[~(naive & (cells["M"] > 512) & (cells["format"] != "mxfp4"))]
    odd = cells["K"] % 128 > 0
    cells = cells[np.where(cells["format"] == "int4_g64", odd, True)]
    cells.loc[cells["M"] == 1024, "floor_us"] *= 1.03
    notes = report._figure_notes(cells)["fig1_latency"]
    assert notes[0].startswith("Naive lines of NVFP4, INT4-g128, INT4-g64 stop at M = 512:")
    assert "(MXFP4)" in notes[0] and "gpt_oss_2880 (K = 2880) only" in notes[1]
    assert "median 3.0 % from M = 1 to M = 1024" in notes[2] and "an inference" in notes[2]
    assert report._figure_notes(synthetic.cells(ms=[1]))["fig1_latency"] == []


def test_forest_headings_are_words(html):
    part = section(html, "claims")
    assert "Device constants, predicted against observed (TB/s) <small><code>r0.constant<" in part
    assert "<code>r0.cublaslt_fp8.time</code>, predicted against observed (µs)" in part


def test_the_naive_baseline_has_one_name(html, tmp_path):
    built = [b | {"role": "sanity_floor"} for b in synthetic.builds()]
    text = write(tmp_path, {}, builds=built)
    assert "naive baseline" in section(text, "builds")
    assert not re.search(r"sanity.floor", text + html)


def test_a_wide_or_long_table_says_that_it_scrolls(html):
    for caption in re.findall(r"<thead>.*?</thead>|<caption>.*?</caption>", html, re.S):
        assert caption.startswith("<thead>") or "<caption>" in caption
    tables = re.findall(r'<div class="scroll.*?</table>', html, re.S)
    assert tables
    for table in tables:
        head = re.search(r"<thead>.*?</thead>", table, re.S).group()
        assert ("scroll sideways" in table) == (head.count("<th ") > 3)
        rows = table.count("<tr") - 1
        assert (f"{rows} rows, scroll inside" in table) == (rows > 25)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (0.0, "0"),
        (4.2999, "4.30"),
        (123456.0, "123000"),
        (0.0123, "0.0123"),
    ]
    + [(2e-6, "2.00e-06"), (-1.5, "-1.50"), (9.999, "10.0")],
)
def test_numbers(value, shown):
    assert page.number(value) == shown


def test_no_date_but_the_campaigns(html):
    assert set(re.findall(r"20\d\d-\d\d-\d\d", html)) == {"2026-01-01"}
