"""The report: one file that needs nothing else, counts every claim, and cannot time the reference kernel."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import synthetic  # noqa: E402

from lab import figures, report  # noqa: E402

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
    assert report.number(value) == shown


def test_no_date_but_the_campaigns(html):
    assert set(re.findall(r"20\d\d-\d\d-\d\d", html)) == {"2026-01-01"}
