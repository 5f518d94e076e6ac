"""Audit: exit statuses, order proofs, and that no edit of METHOD 5 passes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import pandas as pd
import pytest
from prereg_kit import Repo, cell, claim, estimand, fp8, speedup, write_claims

from lab import (
    analysis_r1,
    analysis_r2,
    analysis_r2b,
    audit,
    cells,
    readme,
    registry,
    report_audit,
    verdicts,
)

ARMS = [(cell(), 2.0), (fp8(), 4.0)]
ROW = claim("r2.qgemv_mx.fast", "threshold", speedup())
MISSED = claim("r2.qgemv_mx.time", quantiles=dict(q05=7, q25=8, q50=9, q75=10, q95=11))
KERNEL = "kernels/qgemm_mx/cuda/qgemv_mx.cu"


def sound(folder):
    """The content of a campaign is the records' business; here it is taken as sound."""
    return []


def run(repo, check=sound, **options):
    root = repo.root if isinstance(repo, Repo) else repo
    folders = sorted((root / "data" / "campaigns").glob("*"))
    found = audit.examine(root, folders, check, rules=lambda repo, folder: [])
    return audit.audit(root, found, **options)


@pytest.fixture(autouse=True)
def no_constants_of_legs(monkeypatch):
    """The campaigns here have the cells of one problem and are no whole records of R2."""
    nothing = SimpleNamespace(constants=({}, {}))
    monkeypatch.setattr(report_audit, "analysis_r2_of", lambda repo, folder: nothing)
    monkeypatch.setattr(report_audit, "analysis_r2b_of", lambda repo, folder: nothing)


@pytest.fixture
def repo(tmp_path):
    """Frozen, then the kernel, then a campaign: the right order."""
    repo = Repo(tmp_path / "repo")
    repo.freeze(ROW, MISSED)
    repo.commit("freeze")
    repo.write(KERNEL)
    repo.measured = repo.commit("kernel")
    repo.folder = repo.campaign(ARMS, repo.measured, registry.head(repo.prereg))
    repo.commit("campaign")
    return repo


def by_claim(result):
    return {v.claim: v.verdict for v in result.verdicts}


def test_a_sound_repository_passes_with_a_missed_claim(repo):
    result = run(repo)
    assert (result.exit_code, result.problems) == (0, ())
    assert by_claim(result) == {"r2.qgemv_mx.fast": "CONFIRMED", "r2.qgemv_mx.time": "MISS"}
    text = "\n".join(audit.lines(result))
    assert "2 claims: 1 CONFIRMED, 1 MISS" in text and "above 1.5 chance 0.75" in text
    assert "9 [7, 11] µs" in text and "audit: OK (exit status 0)" in text


def test_one_edited_byte_of_a_frozen_file_is_tampered(repo):
    path = repo.prereg / "claims" / "r2.json"
    path.write_bytes(path.read_bytes().replace(b"1.5", b"1.4"))
    for commit in (False, True):
        if commit:
            repo.commit("edit")
        result = run(repo)
        assert result.exit_code == 3
        assert set(by_claim(result).values()) == {"TAMPERED"}
        assert any(p.path == "prereg/claims/r2.json" for p in result.problems)


def test_claims_of_an_unreadable_file_still_have_their_verdict(repo):
    (repo.prereg / "claims" / "r2.json").write_bytes(b"{")
    assert by_claim(run(repo)) == {"r2.qgemv_mx.fast": "TAMPERED", "r2.qgemv_mx.time": "TAMPERED"}


@pytest.mark.parametrize("rewritten", [False, True])
def test_dropped_tail_is_tampered(repo, rewritten):
    repo.freeze(claim("r3.moe", of=estimand(cells=[cell("peer/x")])), freeze="r3")
    repo.commit("second freeze")
    assert run(repo).exit_code == 0
    manifest = repo.prereg / "manifest.jsonl"
    first = manifest.read_bytes().splitlines()[0]
    manifest.write_bytes(first + b"\n")
    if rewritten:
        (repo.prereg / "HEAD.json").write_bytes(
            registry.canonical_bytes(
                {"count": 1, "head": registry.sha256(first), "total_claims": 2}
            )
        )
        (repo.prereg / "claims" / "r3.json").unlink()
        repo.commit("nothing to see")
    result = run(repo)
    assert result.exit_code == 3 and by_claim(result)["r3.moe"] == "TAMPERED"


def test_a_kernel_older_than_its_prediction_is_tampered(tmp_path):
    repo = Repo(tmp_path / "r")
    repo.write(KERNEL)
    repo.commit("kernel first")
    repo.freeze(ROW, MISSED, claim("r2.other", of=estimand(cells=[cell("peer/x")])))
    repo.commit("then the freeze")
    result = run(repo)
    assert result.exit_code == 3 and f"{KERNEL} came with commit" in str(result.problems[0])
    assert by_claim(result) == {
        "r2.qgemv_mx.fast": "TAMPERED",
        "r2.qgemv_mx.time": "TAMPERED",
        "r2.other": "NOT_RUN",
    }


def test_a_kernel_in_the_commit_of_the_freeze_proves_no_order(tmp_path):
    repo = Repo(tmp_path / "r")
    repo.write(KERNEL)
    repo.freeze(ROW)
    repo.commit("both")
    assert run(repo).exit_code == 3


def test_a_kernel_that_was_deleted_and_came_back_keeps_its_first_date(tmp_path):
    repo = Repo(tmp_path / "r")
    path = repo.write(KERNEL)
    repo.commit("kernel first")
    path.unlink()
    repo.commit("hidden")
    repo.freeze(ROW)
    repo.commit("freeze")
    repo.write(KERNEL)
    repo.commit("back")
    assert run(repo).exit_code == 3


def test_seen_claims_need_no_order(tmp_path):
    repo = Repo(tmp_path / "r")
    repo.write(KERNEL)
    repo.commit("kernel")
    repo.freeze(ROW | {"novelty": "seen"})
    repo.commit("freeze")
    assert run(repo).exit_code == 0


@pytest.mark.parametrize("kind", ["campaign", "pilot"])
def test_a_campaign_older_than_the_prediction_is_tampered(tmp_path, kind):
    """A pilot is not judged by, but it shows the answer all the same."""
    repo = Repo(tmp_path / "r")
    start = repo.commit("start")
    repo.campaign(ARMS, start, kind=kind)
    repo.commit("campaign")
    repo.freeze(ROW)
    repo.commit("freeze")
    result = run(repo)
    assert result.exit_code == 3 and by_claim(result) == {"r2.qgemv_mx.fast": "TAMPERED"}


def test_a_campaign_of_other_cells_says_nothing_about_order(tmp_path):
    repo = Repo(tmp_path / "r")
    start = repo.commit("start")
    repo.campaign([(cell(m=64), 2.0)], start)
    repo.commit("campaign")
    repo.freeze(ROW)
    repo.commit("freeze")
    assert run(repo).exit_code == 0


def test_measured_at_a_commit_before_the_freeze_is_tampered(tmp_path):
    repo = Repo(tmp_path / "r")
    before = repo.commit("before")
    repo.freeze(ROW)
    repo.commit("freeze")
    repo.campaign(ARMS, before)
    repo.commit("campaign, kept back")
    result = run(repo)
    assert result.exit_code == 3 and "before the freeze" in str(result.problems[0])


def test_registry_head_of_a_campaign_proves_or_disproves_order(tmp_path):
    repo = Repo(tmp_path / "r")
    repo.freeze(claim("r3.moe", of=estimand(cells=[cell(m=2)])), freeze="r3")
    early = registry.head(repo.prereg)
    repo.commit("one freeze")
    repo.freeze(ROW)
    repo.commit("another")
    for head, status, reason in (
        (registry.head(repo.prereg), "OK", ""),
        (early, "TAMPERED", "before the freeze of prereg/claims/r2.json"),
        ("f" * 64, "TAMPERED", "which never was"),
        (None, "UNVERIFIABLE", "neither the commit nor the registry"),
    ):
        folder = repo.campaign(ARMS, None, head)
        result = run(repo)
        assert result.status == status and reason in "".join(map(str, result.problems))
        shutil.rmtree(folder)
    repo.campaign(ARMS, "a" * 40)
    result = run(repo)
    assert result.exit_code == 5 and "which history lacks" in str(result.problems[0])


def test_shallow_clone_and_archive_are_unverifiable_and_never_ok(repo, tmp_path):
    shallow = tmp_path / "shallow"
    url = f"file://{repo.root}"
    subprocess.run(["git", "clone", "-q", "--depth", "1", url, str(shallow)], check=True)
    archive = tmp_path / "archive"
    shutil.copytree(repo.root, archive, ignore=shutil.ignore_patterns(".git"))
    for root in (shallow, archive):
        result = run(root)
        assert result.exit_code == 5 and "prereg/manifest.jsonl" in str(result.problems[0])
        assert by_claim(result)["r2.qgemv_mx.fast"] == "CONFIRMED"  # judged, but not proved
    full = tmp_path / "full"
    subprocess.run(["git", "clone", "-q", url, str(full)], check=True)
    assert run(full).exit_code == 0


def edit(folder, change):
    path = folder / "campaign.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def test_committed_campaigns_are_write_once(repo):
    edit(repo.folder, lambda record: record["cells"][0]["time"].update(time_us=1.99))
    for commit in (False, True):
        if commit:
            repo.commit("edited")
        result = run(repo)
        assert result.exit_code == 3 and "write-once" in str(result.problems[0])
        assert by_claim(result)["r2.qgemv_mx.fast"] == "TAMPERED"
    shutil.rmtree(repo.folder)
    assert any("removed" in str(p) for p in run(repo).problems)


def duplicate(record):
    record["cells"].append(record["cells"][0])


def not_a_number(record):
    record["cells"][0]["time"]["time_us"] = float("nan")


def failed(record):
    record["cells"][0]["correctness"] = "failed"


@pytest.mark.parametrize("change", [duplicate, not_a_number, failed])
def test_nan_duplicate_and_failed_cells_are_invalid(repo, change):
    folder = repo.campaign(
        ARMS,
        repo.measured,
        registry.head(repo.prereg),
        name="r2-new-20261202-0",
        created_utc="2026-12-02T00:00:00Z",
    )
    edit(folder, change)
    result = run(repo)
    assert result.exit_code == 4
    assert set(by_claim(result).values()) == {"INVALID"}
    assert {p.path for p in result.problems} == {"r2-new-20261202-0"}


def test_missing_cell_is_not_run_and_passes(repo):
    repo.freeze(claim("r2.qgemm_mx.time", of=estimand(cells=[cell("qgemm_mx")])), freeze="b")
    repo.commit("more")
    result = run(repo)
    assert result.exit_code == 0 and by_claim(result)["r2.qgemm_mx.time"] == "NOT_RUN"


def test_wrong_content_hash_is_invalid_with_file_and_reason(repo):
    result = run(repo, lambda folder: ["samples.parquet has SHA-256 aa, not bb"])
    assert result.exit_code == 4 and set(by_claim(result).values()) == {"INVALID"}
    (problem,) = {p for p in result.problems if p.path.startswith("data/")}
    assert problem.path == f"data/campaigns/{repo.folder.name}" and "SHA-256" in problem.reason


def test_the_real_check_of_records_is_the_default(repo, capsys):
    """The little campaign of these tests lacks its hashes, and the command says so."""
    assert audit.main(["--repo", str(repo.root)]) == 4
    out = capsys.readouterr().out
    assert "INVALID: data/campaigns/" in out and "SHA256SUMS.json is missing" in out


def test_a_campaign_that_cannot_be_read_at_all_is_invalid(repo):
    (repo.root / "data/campaigns/r2-broken-20261203-0").mkdir()
    result = run(
        repo, lambda folder: ["campaign.json is missing"] if "broken" in folder.name else []
    )
    assert result.exit_code == 4 and by_claim(result)["r2.qgemv_mx.fast"] == "CONFIRMED"


def test_unregistered_claim_is_exploratory_and_only_noted(repo):
    write_claims(repo.prereg, claim("r2.late", "threshold", speedup()), freeze="late")
    result = run(repo)
    assert by_claim(result)["r2.late"] == "EXPLORATORY"
    assert result.exit_code == 0 and "prereg/claims/late.json" in result.notes[0]


def test_a_report_that_differs_from_the_data_is_invalid(repo):
    path = report_of(repo)
    assert run(repo, shown=path).exit_code == 0
    path.write_text(path.read_text().replace("MISS", "HIT"))
    result = run(repo, shown=path)
    assert result.exit_code == 4
    assert "reports/verdicts.csv" in str(result.problems[0])
    assert "r2.qgemv_mx.time" in str(result.problems[0])


def test_records_of_accuracy_are_write_once_and_hold_what_they_say(repo, repository):
    source = next((repository / "data" / "accuracy").glob("*/accuracy.json"))
    name = f"data/accuracy/{source.parent.name}"
    path = repo.write(f"{name}/accuracy.json", source.read_text())
    assert run(repo).exit_code == 0  # new, and not committed yet
    repo.commit("accuracy")
    assert run(repo).exit_code == 0
    path.write_text(source.read_text().replace("2026-", "2025-", 1))
    edited = {(p.status, p.path) for p in run(repo).problems}
    assert edited == {("TAMPERED", f"{name}/accuracy.json"), ("INVALID", name)}
    path.write_text("[1,")
    assert any("cannot be read" in str(p) for p in run(repo).problems)
    shutil.rmtree(path.parent)
    repo.commit("gone")
    (problem,) = run(repo).problems
    assert problem.status == "TAMPERED" and "edited or removed" in problem.reason


def report_of(repo):
    """The report of a repository, without pictures; gives its table of verdicts."""
    reports = repo.root / "reports"
    verdicts.write_csv(run(repo).verdicts, reports / "verdicts.csv")
    folders = sorted((repo.root / "data" / "campaigns").glob("*"))
    cells.write(cells.table(folders, verify=sound), reports / "cells.csv")
    for module in (analysis_r1, analysis_r2, analysis_r2b):
        for name, table in module.tables(None).items():
            (reports / f"{name}.csv").write_text(module.to_csv(table))
    (reports / "index.html").write_text("<p>2 claims, 1 MISS</p>")
    shown = pd.read_csv(reports / "verdicts.csv")
    blocks = readme.blocks(cells.read(reports / "cells.csv"), shown, readme.r1_tables(reports))
    marks = "".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in blocks)
    (repo.root / "README.md").write_text(readme.fill(marks, blocks))
    report_audit.write_sums(reports)
    return reports / "verdicts.csv"


def removed(path):
    path.unlink()


def digits(path):
    text = path.read_text()
    path.write_text(text.replace("1", "3"))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("reports/verdicts.csv", removed),
        ("reports/cells.csv", removed),
        ("reports/SHA256SUMS.json", removed),
        ("reports/index.html", removed),
        ("README.md", removed),
        ("reports/cells.csv", digits),
        ("reports/index.html", digits),
        ("reports/SHA256SUMS.json", lambda path: path.write_text(path.read_text() + " ")),
        ("README.md", digits),
        ("reports/figures/extra.svg", lambda path: (path.parent.mkdir(), path.touch())),
        ("reports/cells.csv", lambda path: path.write_text(path.read_text().splitlines()[0])),
        ("reports/cells.csv", lambda path: path.write_bytes(b"\xff\n")),
        ("reports/r1_production.csv", removed),
        ("reports/r2_bars.csv", removed),
        ("reports/r2b_bars.csv", removed),
        ("reports/r1_experiments.csv", lambda path: path.write_text(path.read_text() + "\n")),
        (
            "reports/r1_causes.csv",
            lambda path: path.write_text(path.read_text() + "r1-x" + 25 * ","),
        ),
        ("reports/r1_causes.csv", lambda path: path.write_bytes(b"\xff\n")),
    ],
)
def test_any_part_of_a_report_that_is_not_what_the_data_give_is_invalid(repo, name, change):
    shown = report_of(repo)
    change(repo.root / name)
    result = run(repo, shown=shown)
    assert result.exit_code == 4 and name in {p.path for p in result.problems}


def test_sums_that_were_redone_do_not_hide_an_edited_table(repo):
    shown = report_of(repo)
    digits(repo.root / "reports" / "cells.csv")
    report_audit.write_sums(repo.root / "reports")
    result = run(repo, shown=shown)
    assert {p.path for p in result.problems} == {"reports/cells.csv"}


@pytest.mark.parametrize(
    "name",
    [name for part in (analysis_r1, analysis_r2, analysis_r2b) for name in part.empty_tables()],
)
def test_sums_that_were_redone_do_not_hide_an_edited_table_of_a_rung(repo, name):
    shown = report_of(repo)
    path = repo.root / "reports" / f"{name}.csv"
    path.write_text(path.read_text() + "\n")
    report_audit.write_sums(repo.root / "reports")
    (problem,) = run(repo, shown=shown).problems
    assert problem.path == f"reports/{name}.csv" and "is not what the data give" in problem.reason


def test_other_line_ends_and_another_order_are_named(repo):
    shown = report_of(repo)
    path = repo.root / "reports" / "cells.csv"
    right = path.read_bytes()
    path.write_bytes(right.replace(b"\n", b"\r\n"))
    report_audit.write_sums(repo.root / "reports")
    (problem,) = run(repo, shown=shown).problems
    assert problem.path == "reports/cells.csv" and "other line ends" in problem.reason
    head, first, second, *rest = right.decode().splitlines(keepends=True)
    path.write_text("".join([head, second, first, *rest]))
    report_audit.write_sums(repo.root / "reports")
    (problem,) = run(repo, shown=shown).problems
    assert "rows in another order, or repeated, from line 2 on" in problem.reason


def test_a_row_is_named_by_what_it_is_about():
    name = "r1-nvidia-h200-20261130-84162b1ed90b"
    row = f"{name},cell,1,mxfp4,q_o_proj,4096,4096,16,cold_graph,launch,term,-0.1"
    assert report_audit._row_name(row) == "cell 1 mxfp4 q_o_proj 4096 4096 16 cold_graph launch"
    assert report_audit._row_name("r1.cause.launch.m1,R1,point") == "r1.cause.launch.m1"


def recorded_of_r1(monkeypatch, name):
    def found(repo, rung=None):
        return [SimpleNamespace(id=name)] if rung in (None, "R1") else []

    monkeypatch.setattr(report_audit.select, "recorded_campaigns", found)


def test_a_report_without_a_recorded_rung_is_invalid(repo, monkeypatch):
    """A campaign of R1 that no table shows: sums and README may be redone, the campaign is there."""
    shown = report_of(repo)
    recorded_of_r1(monkeypatch, "r1-new")
    (problem,) = run(repo, shown=shown).problems
    assert problem.path == "reports/cells.csv"
    assert "shows no campaign of R1, though r1-new is recorded" in problem.reason


def test_tables_of_r1_without_the_campaign_of_the_cells_are_invalid(repo, monkeypatch):
    shown = report_of(repo)
    recorded_of_r1(monkeypatch, repo.folder.name)
    found = run(repo, shown=shown).problems
    assert {p.path for p in found} == {f"reports/{n}.csv" for n in analysis_r1.empty_tables()}
    assert all(f"does not show {repo.folder.name}, as cells.csv does" in p.reason for p in found)


NEWER = {"name": "r2-new-20261202-0", "created_utc": "2026-12-02T00:00:00Z"}


def newer(repo, arms, **more):
    head = registry.head(repo.prereg)
    return repo.campaign(arms, repo.measured, head, **(NEWER | more))


def test_a_newer_campaign_without_a_cell_leaves_the_verdict_of_the_older(repo):
    newer(repo, [(cell(), 2.0)])
    result = run(repo)
    assert by_claim(result)["r2.qgemv_mx.fast"] == "CONFIRMED"
    assert {v.campaign for v in result.verdicts} == {repo.folder.name, NEWER["name"]}
    assert result.notes == tuple(n for n in result.notes if "legs" in n)


def test_another_verdict_of_an_older_campaign_is_noted_with_both(repo):
    newer(repo, [(cell(), 9.0), (fp8(), 4.0)])
    result = run(repo)
    assert by_claim(result) == {"r2.qgemv_mx.fast": "REFUTED", "r2.qgemv_mx.time": "HIT"}
    for verdict, old in (("REFUTED", "CONFIRMED"), ("HIT", "MISS")):
        said = f"{verdict} by {NEWER['name']}, but {old} by {repo.folder.name}: "
        (note,) = (note for note in result.notes if said in note)
        assert "r2.qgemv_mx." in note
    assert result.exit_code == 0


def test_judging_takes_all_campaigns_of_the_claimed_device_and_no_pilot(repo):
    newer(repo, [(cell(), 9.0)], kind="pilot")
    newer(repo, [(cell(), 9.0)], name="r2-other-20261203-0", device={"name": "NVIDIA H100"})
    for chosen in (None, [], sorted((repo.root / "data/campaigns").glob("*"))):
        assert audit._of_claimed_device(repo.root, chosen) == [repo.folder]


@pytest.mark.parametrize("kind", [{"kind": "pilot"}, {"device": {"name": "NVIDIA H100"}}, None])
def test_every_folder_is_verified_whatever_its_device_or_kind(repo, kind):
    if kind is None:
        (repo.root / "data/campaigns/stray").write_text("no folder")
    else:
        newer(repo, [(cell(), 9.0)], **kind)
    found = audit.examine(
        repo.root,
        [repo.folder],
        lambda f: [] if f == repo.folder else ["bad hash"],
        rules=lambda repo, folder: [],
    )
    assert [p.reason for p in found.campaign_problems] == ["bad hash"]
    assert audit.audit(repo.root, found).exit_code == 4


def test_reasons_of_a_bad_campaign_are_given_once(repo):
    result = run(repo, lambda folder: ["samples.parquet has SHA-256 aa"])
    assert set(by_claim(result).values()) == {"INVALID"}
    text = "\n".join(audit.lines(result))
    assert text.count("samples.parquet has SHA-256 aa") == 1 and "2 claims, first" in text


def test_many_or_long_reasons_are_cut(repo):
    result = run(repo, lambda folder: ["x" * 5000] * 100)
    assert sum(len(str(p)) for p in result.problems) < 10_000
    assert any("more such reasons" in str(p) for p in result.problems)


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["source"].update(commit=5),
        lambda r: r.update(prereg_head=["x"]),
        lambda r: r.update(cells=[1]),
        lambda r: r.update(device=3),
        lambda r: r.update(constants=[[]]),
        lambda r: r["cells"][0].update(M=[1]),
        lambda r: r["cells"][0]["time"].update(time_us="x"),
        lambda r: r.update(created_utc=None),
        lambda r: r["checks"].append({}),
    ],
)
def test_wrong_types_in_a_campaign_are_invalid_with_its_name(repo, change, capsys):
    edit(newer(repo, ARMS), change)
    assert audit.main(["--repo", str(repo.root)]) == 4
    assert f"INVALID: data/campaigns/{NEWER['name']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"{", b"["),
        (b'"claim_ids":[', b'"claim_ids":[5,'),
        (b'"path":', b'"path":5,"pat":'),
        (b'"files":[', b'"files":[1,'),
    ],
)
def test_a_broken_manifest_line_is_tampered_with_file_and_reason(repo, old, new, capsys):
    path = repo.prereg / "manifest.jsonl"
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    assert audit.main(["--repo", str(repo.root)]) == 3
    assert "TAMPERED: prereg/manifest.jsonl:1: " in capsys.readouterr().out


@pytest.mark.parametrize("canonical", [True, False])
def test_a_draft_that_repeats_frozen_ids_is_invalid(repo, canonical):
    path = write_claims(repo.prereg, ROW, freeze="zz")
    if not canonical:
        path.write_bytes(path.read_bytes() + b"\n\n")
    result = run(repo)
    assert result.exit_code == 4 and by_claim(result)["r2.qgemv_mx.fast"] == "CONFIRMED"
    (problem,) = result.problems
    assert problem.path == "prereg/claims/zz.json" and "r2.qgemv_mx.fast" in problem.reason


def test_what_nobody_foresaw_is_invalid_with_its_text(repo, monkeypatch, capsys):
    def boom(*arguments):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(audit.registry, "load_registered", boom)
    assert audit.main(["--repo", str(repo.root)]) == 4
    assert "RuntimeError: no such thing" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--skip-worktree", "--assume-unchanged"])
def test_an_edit_that_the_index_is_told_to_pass_over_is_tampered(repo, flag):
    names = repo.git("ls-files", "data/campaigns").split()
    repo.git("update-index", flag, *names)
    edit(repo.folder, lambda record: record["cells"][0]["time"].update(time_us=1.99))
    assert run(repo).exit_code == 3
    shutil.rmtree(repo.folder)
    assert any("removed" in str(p) for p in run(repo).problems)


def test_a_good_file_on_disk_does_not_hide_an_edited_commit(repo):
    path = repo.prereg / "claims" / "r2.json"
    good = path.read_bytes()
    path.write_bytes(good.replace(b"1.5", b"1.4"))
    repo.commit("edit")
    path.write_bytes(good)
    result = run(repo)
    assert result.exit_code == 3 and "present commit" in str(result.problems[0])


@pytest.mark.parametrize("name", ["fast.cu", "inner/deep.cuh", "impl.h"])
@pytest.mark.parametrize("gone", [False, True])
def test_a_kernel_source_of_no_kernel_is_invalid_and_stays_so(repo, name, gone):
    path = repo.write(f"kernels/qgemm_mx/cuda/{name}")
    repo.commit("something")
    if gone:
        path.unlink()
        repo.commit("gone")
    result = run(repo)
    assert result.exit_code == 4
    assert {p.path for p in result.problems} == {f"kernels/qgemm_mx/cuda/{name}"}


@pytest.mark.parametrize(("kernel", "exit_code"), [("naive_dequant", 3), ("qgemv_mx", 0)])
def test_the_decoder_belongs_to_the_proof_of_the_kernels_it_came_with(tmp_path, kernel, exit_code):
    """A shared header that is older than a kernel says nothing about that kernel's claims."""
    repo = Repo(tmp_path / "r")
    repo.write("kernels/qgemm_mx/cuda/formats.cuh")
    repo.commit("the decoder first")
    of = estimand(cells=[cell(kernel)])
    quantiles = dict(q05=7, q25=8, q50=9, q75=10, q95=11)
    repo.freeze(claim(f"r0.{kernel}.time", of=of, quantiles=quantiles), freeze="r0")
    repo.commit("freeze")
    result = run(repo)
    assert result.exit_code == exit_code
    if exit_code:
        assert "formats.cuh came with" in str(result.problems[0])


def test_instrument_sources_are_of_no_kernel(repo):
    for name in ("harness.cu", "stream_read.cu", "ptx_memory.cuh", "harness.json"):
        repo.write(f"kernels/qgemm_mx/cuda/{name}")
    assert run(repo).exit_code == 0


def test_the_worst_status_decides(repo):
    (repo.prereg / "claims" / "r2.json").unlink()
    result = run(repo, lambda folder: ["bad hash"])
    assert {p.status for p in result.problems} >= {"TAMPERED", "INVALID"}
    assert result.exit_code == 3 and result.status == "TAMPERED"


def test_another_protocol_is_a_deviation_and_passes(tmp_path):
    repo = Repo(tmp_path / "r")
    repo.freeze(ROW, extra=[repo.write("prereg/protocol.json", '{"seed": 1}')])
    repo.commit("freeze")
    repo.campaign(ARMS, None, registry.head(repo.prereg))
    result = run(repo)
    assert by_claim(result) == {"r2.qgemv_mx.fast": "DEVIATED"} and result.exit_code == 0


def test_bytes_per_weight_are_facts_of_the_code():
    facts = audit.mechanical_facts()
    assert facts["bytes_per_weight/mxfp4"] == 0.53125
    assert facts["bytes_per_weight/nvfp4"] == 0.5625
    assert facts["bytes_per_weight/fp8_e4m3"] == 1.0


# What is printed.


def after_totals(lines):
    (at,) = [i for i, line in enumerate(lines) if re.match(r"\d+ claims: ", line)]
    return lines[at + 1 :]


def test_the_header_says_what_each_bracket_is(repo):
    header = audit.lines(run(repo))[0]
    assert "predicted: median [90% band]" in header and "observed [95% interval]" in header


def test_failures_are_repeated_after_the_totals(repo):
    lines = audit.lines(run(repo))
    (row,) = {line for line in lines if line.startswith("r2.qgemv_mx.time")}
    assert lines.count(row) == 2 and row.endswith("MISS")
    assert row in after_totals(lines)
    assert not any("r2.qgemv_mx.fast" in line for line in after_totals(lines))


def test_without_failures_nothing_is_repeated(tmp_path):
    repo = Repo(tmp_path / "r")
    repo.freeze(ROW)
    repo.commit("freeze")
    assert after_totals(audit.lines(run(repo))) == ["audit: OK (exit status 0)"]


@pytest.fixture
def waiting(tmp_path):
    """Three claims of two families that nothing has measured; one of them has a long id."""
    repo = Repo(tmp_path / "r")
    far = estimand(cells=[cell("qgemm_mx")])
    long = "r2.qgemm_mx.time.mxfp4.a_shape_with_a_very_long_name_indeed.m8192_and_more"
    repo.freeze(ROW, claim(long, of=far), claim("r2.qgemm_mx.time.b", of=far, family="r2.qgemm_mx"))
    repo.commit("freeze")
    return run(repo)


def test_claims_that_are_not_run_are_counted_by_family(waiting):
    lines = audit.lines(waiting)
    assert [line.split() for line in lines[2:4]] == [["2", "r2.qgemm_mx"], ["1", "r2.qgemv_mx"]]
    assert "audit=full" in lines[1] and "--all" in lines[1]
    assert not any(v.claim in line for v in waiting.verdicts for line in lines)


def test_all_of_them_are_printed_when_asked_for(waiting):
    text = "\n".join(audit.lines(waiting, full=True))
    assert all(v.claim in text and v.reason in text for v in waiting.verdicts)
    assert "by family" not in text


def test_lines_are_short_and_lose_nothing(waiting, repo):
    for result in (waiting, run(repo, lambda folder: ["a bad hash, " * 40 + "the end"])):
        for full in (False, True):
            lines = audit.lines(result, full)
            assert max(map(len, lines)) <= 160
    assert "the end" in " ".join(lines)


def test_what_tampers_with_many_claims_is_said_once(repo):
    path = repo.prereg / "claims" / "r2.json"
    path.write_bytes(path.read_bytes().replace(b"1.5", b"1.4"))
    result = run(repo)
    lines = audit.lines(result)
    text = " ".join(line.strip() for line in lines)
    assert [line.split()[-1] for line in lines[1:3]] == ["TAMPERED", "TAMPERED"]
    assert text.count("prereg/claims/r2.json: SHA-256 is not the frozen") == 1
    assert "[2 claims, first r2.qgemv_mx.fast]" in " ".join(after_totals(lines))


@pytest.mark.parametrize("verdict", ["INVALID", "DEVIATED"])
def test_what_stops_claims_is_said_after_the_totals(repo, verdict):
    if verdict == "INVALID":
        result = run(repo, lambda folder: ["bad hash"])
    else:
        protocol = repo.write("prereg/protocol.json", '{"seed": 1}')
        registry.freeze([protocol], repo.prereg, "another protocol", "none")
        result = run(repo)
    assert set(by_claim(result).values()) == {verdict}
    lines = after_totals(audit.lines(result))
    reason = result.verdicts[0].reason
    (line,) = [line for line in lines if "2 claims, first" in line]
    assert line.startswith(f"{verdict}: {repo.folder.name}: ") and reason in line


def test_tokens_and_microseconds_and_passed():
    row = dict(rung="R0", kind="point", novelty="blind", campaign="c", verdict="HIT")
    numbers = dict(q05=1, q25=1, q50=2, q75=3, q95=3, observed=2.0, ci_low=1.5, ci_high=2.5)
    found = [
        verdicts.Verdict(claim=unit, unit=unit, **row, **numbers) for unit in ("us", "M", "bool")
    ]
    lines = audit.lines(audit.AuditResult("OK", (), (), tuple(found)))
    assert lines[1].count(" µs") == 2 and " us" not in lines[1]
    assert lines[2].count(" tokens") == 2
    assert " passed " in lines[3]


def test_the_command_prints_all_when_asked(waiting, tmp_path, capsys):
    root = str(tmp_path / "r")
    printed = []
    for more in ([], ["--all"]):
        audit.main(["--repo", root, *more])  # without a report its status is not 0
        printed.append(capsys.readouterr().out)
    reason = waiting.verdicts[0].reason
    assert reason and reason not in printed[0] and printed[1].count(reason) == 3
