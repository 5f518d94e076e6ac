"""Audit: exit statuses, order proofs, and that no edit of METHOD 5 passes."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from prereg_kit import Repo, cell, claim, estimand, fp8, speedup, write_claims

from lab import audit, registry, verdicts

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
    return audit.audit(root, audit.examine(root, folders, check), **options)


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
    assert "2 claims: 1 CONFIRMED, 1 MISS" in text and "above 1.5 p=0.75" in text
    assert "9 [7, 11] us" in text and "audit: OK (exit status 0)" in text


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
    path = repo.root / "reports" / "verdicts.csv"
    path.parent.mkdir()
    verdicts.write_csv(run(repo).verdicts, path)
    assert run(repo, shown=path).exit_code == 0
    path.write_text(path.read_text().replace("MISS", "HIT"))
    result = run(repo, shown=path)
    assert result.exit_code == 4
    assert "reports/verdicts.csv" in str(result.problems[0])
    assert "r2.qgemv_mx.time" in str(result.problems[0])


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
