"""The numbers of README.md come from the committed tables, block by block."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pandas as pd
import pytest
import synthetic

from lab import analysis_r1, analysis_r2, cells, files, readme, select
from lab import verdicts as judged


def test_the_committed_readme_is_current(repository: Path) -> None:
    tables = repository / "reports"
    if not (tables / "cells.csv").exists():
        pytest.skip("no report is committed yet")
    blocks = readme.blocks(
        cells.read(tables / "cells.csv"),
        pd.read_csv(tables / "verdicts.csv"),
        readme.r1_tables(tables),
        readme.r2_tables(tables),
        readme.r2b_tables(tables),
    )
    text = (repository / "README.md").read_text()
    assert readme.fill(text, blocks) == text, "run: snakemake --cores 1 readme"


@pytest.mark.parametrize("page", ["README.md", "data/README.md", "kernels/README.md"])
def test_links_lead_somewhere(repository: Path, page: str) -> None:
    path = repository / page
    recorded = select.recorded_campaigns(repository)
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", path.read_text()):
        if target.startswith("reports/") and not recorded:
            continue  # there is nothing to show yet
        linked = path.parent / target if target else path
        assert linked.exists(), target
        if anchor and linked.suffix == ".html":
            assert f'id="{anchor}"' in linked.read_text(), anchor
        elif anchor:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(), flags=re.M)
            assert anchor in {title.lower().replace(" ", "-") for title in titles}, anchor


def test_the_readme_leads_to_the_glossary_and_the_kernels(repository: Path) -> None:
    text = (repository / "README.md").read_text()
    assert "](reports/index.html#glossary)" in text and "](kernels/README.md)" in text


@pytest.mark.parametrize("page", ["README.md", "data/README.md", "kernels/README.md"])
def test_lines_are_short_but_for_tables(repository: Path, page: str) -> None:
    lines = (repository / page).read_text().splitlines()
    assert [line for line in lines if len(line) > 125 and not line.startswith("|")] == []


def test_the_first_screen_keeps_its_order(repository: Path) -> None:
    text = (repository / "README.md").read_text()
    parts = [
        "**How much of",
        "<!-- rungs -->",
        "snakemake --cores all\n",
        "pytest\n",
        "![",
        "## The",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert text[: places[-1]].count("![") == 1


def test_the_library_example_prints_what_it_says(repository: Path) -> None:
    section = (repository / "README.md").read_text().split("## The library\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.S)
    assert "qgemm_mx.quantize(" in code and "qgemm_mx.dequantize(" in code
    said = re.findall(r"^print\(.*\)  # (.*)$", code, flags=re.M)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert len(said) == code.count("print(") > 0
    assert printed.getvalue().splitlines() == said


def test_rules_that_the_readme_says_have_no_benchmark_have_none(repository: Path) -> None:
    text = " ".join((repository / "README.md").read_text().split())
    (said,) = re.findall(r"those without an output: (.*?) have no benchmark file", text)
    found = set()
    for path in (repository / "workflow" / "rules").glob("*.smk"):
        for name, body in re.findall(
            r"^ *rule (\w+):\n((?:.*\n)*?)(?=^ *rule |\Z)", path.read_text(), flags=re.M
        ):
            if "script:" in body and "benchmark:" not in body:
                found.add(name)
    assert set(re.findall(r"`(\w+)`", said)) == found


@pytest.mark.parametrize(
    ("table", "columns"),
    [
        ("cells.csv", cells.COLUMNS),
        ("verdicts.csv", judged.COLUMNS),
        *((f"{name}.csv", tuple(t)) for name, t in analysis_r1.empty_tables().items()),
        *((f"{name}.csv", tuple(t)) for name, t in analysis_r2.empty_tables().items()),
    ],
)
def test_the_data_dictionary_has_a_row_for_each_column(
    repository: Path, table: str, columns: tuple[str, ...]
) -> None:
    text = (repository / "data" / "README.md").read_text()
    section = text.split(f"## reports/{table}")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row[0])] == list(columns)
    for row in rows:
        assert len(row) == 3 and row[2].strip(), row
        if "_us`" in row[0]:
            assert row[1].strip() == "µs"


def test_one_pair_of_commands_carries_a_campaign(repository: Path) -> None:
    for page in ("README.md", "data/README.md"):
        text = (repository / page).read_text()
        for rule in ("pack_campaign", "import_campaign"):
            assert f"snakemake --cores 1 {rule} --config archive=campaign.tar.gz" in text
        assert "lab.archive" not in text


def test_rung_table_counts_every_claim_once() -> None:
    verdicts = synthetic.verdicts()
    rows = [line for line in readme.rung_table(verdicts).splitlines() if line.startswith("| R")]
    counts = [
        int(word)
        for row in rows
        for word in row.split("|")[-2].replace(",", " ").split()
        if word.isdigit()
    ]
    assert len(rows) == 4
    assert sum(counts) == len(verdicts)


def test_headline_holds_baselines_and_never_the_reference() -> None:
    text = readme.headline(synthetic.cells())
    assert "`cublaslt_fp8`" in text and synthetic.CAMPAIGN in text
    assert "reference" not in text and "stream_read" not in text


def test_headline_is_the_geometric_mean_of_floor_over_time() -> None:
    frame = synthetic.cells(ms=[1])
    frame = frame[(frame["kernel"] == "cublaslt_bf16") & (frame["regime"] == "cold_graph")][
        :2
    ].copy()
    frame["floor_us"], frame["time_us"] = [9.0, 4.0], [10.0, 10.0]
    assert "| `cublaslt_bf16` | bf16 | 60 % (40 to 90) | 2 |" in readme.headline(frame)


def test_without_cells_the_blocks_say_so() -> None:
    nothing = cells.table([])
    assert readme.headline(nothing) == readme.prize(nothing) == "No campaign has been recorded yet."


def test_the_bad_baseline_is_called_so_until_there_is_a_kernel() -> None:
    frame = synthetic.cells(ms=[1])
    frame = frame[frame["role"] != "product"].copy()
    words = "no 4-bit kernel of this project exists yet"
    assert words in readme.headline(frame)
    frame.loc[frame["kernel"] == "naive_dequant", "role"] = "product"
    assert words not in readme.headline(frame)


def timed(
    kernel: str, fmt: str, *times: float, m: int = 1, regime: str = "cold_graph"
) -> list[dict]:
    known = {"campaign": "c", "rung": "R0", "kernel": kernel, "format": fmt, "M": m}
    known |= {"regime": regime, "N": 1, "K": 1}
    return [known | {"shape": f"s{i}", "time_us": time} for i, time in enumerate(times)]


def test_the_prize_is_the_geometric_mean_of_the_ratios_of_floors() -> None:
    frame = pd.DataFrame(
        [
            *timed("stream_read", "fp8_e4m3", 4.0, 9.0),
            *timed("stream_read", "mxfp4", 4.0, 1.0),
            *timed("stream_read", "mxfp4", 1.0, 1.0, m=8),
            *timed("stream_read", "fp8_e4m3", 1.0, 1.0, regime="hot_graph"),
            *timed("cublaslt_fp8", "fp8_e4m3", 5.0, 5.0),
            *timed("cublaslt_bf16", "bf16", 10.0),
        ]
    )
    text = readme.prize(frame)
    assert "of 2 shapes" in text
    assert "| MXFP4 against FP8 | 1.88 | 3.00 (1.00 to 9.00) | - |" in text
    assert "| NVFP4 against FP8 | 1.78 | - | - |" in text
    assert "| FP8 against BF16 | 2.00 | - | 2.00 (2.00 to 2.00) |" in text


def test_both_times_of_a_prize_are_of_one_campaign() -> None:
    """A later campaign that holds one of the floors alone takes nothing away, and never mixes two sessions."""
    later = [
        row | {"campaign": "d", "rung": "R1"} for row in timed("stream_read", "mxfp4", 2.0, 2.0)
    ]
    first = [*timed("stream_read", "fp8_e4m3", 4.0, 9.0), *timed("stream_read", "mxfp4", 4.0, 1.0)]
    for rows in (first, first + later, later + first):
        assert "| 1.88 | 3.00 (1.00 to 9.00) |" in readme.prize(pd.DataFrame(rows))
    whole = [row | {"campaign": "d", "rung": "R1"} for row in first]
    whole[0] = whole[0] | {"time_us": 16.0}
    assert "| 1.88 | 6.00 (4.00 to 9.00) |" in readme.prize(pd.DataFrame(whole + first))


def test_fill_replaces_the_content_alone() -> None:
    text = "a\n<!-- one -->\nold\nlines\n<!-- /one -->\nb\n"
    filled = readme.fill(text, {"one": "new | \\1"})
    assert filled == "a\n<!-- one -->\nnew | \\1\n<!-- /one -->\nb\n"
    assert readme.fill(filled, {"one": "new | \\1"}) == filled


@pytest.mark.parametrize(
    "text", ["no marker", "<!-- one -->\nnot closed", "<!-- other -->\n<!-- /other -->"]
)
def test_markers_that_do_not_match_are_refused(text: str) -> None:
    with pytest.raises(readme.ReadmeError):
        readme.fill(text, {"one": "x"})


def test_update_writes_only_when_something_changed(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    names = ("rungs", "prize", "headline", "throughput", "decode", "matrix")
    path.write_text("".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in names))
    tables = {"cells": synthetic.cells(ms=[1]), "verdicts": synthetic.verdicts()}
    tables["r1"] = analysis_r1.empty_tables()
    assert readme.update(path, **tables)
    assert not readme.update(path, **tables)


def test_the_minutes_of_the_recorded_campaign_are_its_attempts(repository: Path) -> None:
    recorded = select.recorded_campaigns(repository, "R0")
    if not recorded:
        pytest.skip("no campaign is recorded yet")
    campaign = files.read_json(repository / select.CAMPAIGNS / recorded[-1].id / "campaign.json")
    minutes = round(sum(a["seconds"] or 0 for a in campaign["attempts"]) / 60)
    assert (
        f"the recorded one took {minutes} minutes of measuring"
        in (repository / "README.md").read_text()
    )
