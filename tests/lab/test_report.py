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

from lab import figures, page, replay, report, soundness  # noqa: E402

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
    facts = {f["value"] for f in report._cell_facts(cells)}
    assert facts == {"50 % of the floor", "2.50 ×", "1.00 ×"}
    cells["correctness"] = "failed"
    assert report._cell_facts(cells) == []


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
    kit = page.Tables({k: [k, "text", k] for k in ("kernel", "format", "shape", "dram_mb", "dram")})
    found = soundness.answers(kit, synthetic.cells().iloc[:0], [old, new], synthetic.SHAPES)
    assert len(found) == 6 and found[0]["short"] == "At 7 of 126 points."


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
