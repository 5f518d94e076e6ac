"""Registry: each edit of METHOD 5 is caught, by files or by history."""

from __future__ import annotations

import json
import shutil
import subprocess
from datetime import UTC, datetime

import pytest
from prereg_kit import Repo, amendment, claim, write_claims

from lab import registry
from lab.claims import ClaimError, canonical_bytes
from lab.registry import Git, RegistryError, Unverifiable, freeze_commit, history, verify


@pytest.fixture
def repo(tmp_path):
    repo = Repo(tmp_path / "repo")
    protocol = repo.write("prereg/protocol.json", '{"seed": 1}\n')
    repo.freeze(claim(), extra=[protocol])
    repo.commit("first freeze")
    repo.freeze(claim("r3.moe"), freeze="r3")
    repo.commit("second freeze")
    return repo


def statuses(problems):
    return {problem.status for problem in problems}


def rewrite_head(repo):
    """HEAD.json as a forger would write it, from the manifest that is there."""
    last = (repo.prereg / "manifest.jsonl").read_bytes().splitlines()[-1]
    entry = json.loads(last)
    head = {"count": entry["seq"], "head": registry.sha256(last)}
    head["total_claims"] = entry["total_claims"]
    (repo.prereg / "HEAD.json").write_bytes(canonical_bytes(head))


def drop_tail(repo):
    path = repo.prereg / "manifest.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])


def test_untouched_registry_verifies(repo):
    assert verify(repo.prereg) == []
    assert history(repo.root).status == "OK"
    assert registry.frozen_ids(repo.prereg) == ("r2.qgemv_mx.time", "r3.moe")


def test_line_holds_the_chain_and_the_counts(tmp_path):
    prereg = tmp_path / "prereg"
    path = write_claims(prereg, claim())
    now = datetime(2026, 11, 30, 12, tzinfo=UTC)
    first = registry.freeze([path], prereg, "one", "none", now)
    second = registry.freeze(
        [write_claims(prereg, claim("r3.x"), freeze="b")], prereg, "two", "pilot"
    )
    lines = (prereg / "manifest.jsonl").read_bytes().splitlines()
    assert first["previous"] == "0" * 64 and first["frozen_utc"] == "2026-11-30T12:00:00Z"
    assert second["previous"] == registry.sha256(lines[0])
    assert first["files"] == [
        {
            "path": "prereg/claims/r2.json",
            "sha256": registry.sha256(path.read_bytes()),
            "bytes": len(path.read_bytes()),
        }
    ]
    head = json.loads((prereg / "HEAD.json").read_text())
    assert head == {"count": 2, "head": registry.sha256(lines[1]), "total_claims": 2}
    assert registry.head(prereg) == head["head"]


@pytest.mark.parametrize("name", ["prereg/claims/r2.json", "prereg/protocol.json"])
def test_one_edited_byte_is_tampered(repo, name):
    path = repo.root / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    (problem,) = verify(repo.prereg)
    assert (problem.status, problem.path) == ("TAMPERED", name)
    # A claim file spoils its own claims; the protocol spoils all (no ids).
    assert problem.claims == (("r2.qgemv_mx.time",) if "claims" in name else ())


def test_missing_file_is_tampered(repo):
    (repo.prereg / "claims" / "r3.json").unlink()
    (problem,) = verify(repo.prereg)
    assert problem.status == "TAMPERED" and "missing" in problem.reason
    assert problem.claims == ("r3.moe",)


@pytest.mark.parametrize("line", [0, 1])
def test_one_edited_byte_of_the_manifest_is_tampered(repo, line):
    path = repo.prereg / "manifest.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = lines[line].replace(b'"note":"a test"', b'"note":"a tesT"')
    path.write_bytes(b"".join(lines))
    assert statuses(verify(repo.prereg)) == {"TAMPERED"}


def test_dropped_tail_is_tampered(repo):
    drop_tail(repo)
    assert any("HEAD.json" in p.path and p.status == "TAMPERED" for p in verify(repo.prereg))


def test_dropped_tail_with_head_rewritten_is_caught_by_history(repo):
    drop_tail(repo)
    rewrite_head(repo)
    (repo.prereg / "claims" / "r3.json").unlink()
    assert verify(repo.prereg) == []  # the files alone cannot tell
    for commit in (False, True):
        if commit:
            repo.commit("hide the second freeze")
        found = history(repo.root)
        assert found.status == "TAMPERED"
        assert found.problems[0].claims == ("r3.moe",)


def test_dropped_registry_is_caught(repo):
    (repo.prereg / "manifest.jsonl").unlink()
    assert "TAMPERED" in statuses(verify(repo.prereg))
    (repo.prereg / "HEAD.json").unlink()
    assert history(repo.root).status == "TAMPERED"


def test_refreeze_of_an_id_or_a_path_is_refused(repo):
    before = (repo.prereg / "manifest.jsonl").read_bytes()
    again = write_claims(repo.prereg, claim(statement="Another."), freeze="again")
    with pytest.raises(RegistryError, match=r"again.json: r2.qgemv_mx.time is frozen already"):
        registry.freeze([again], repo.prereg, "again", "none")
    again.unlink()
    with pytest.raises(RegistryError, match=r"claims/r2.json is frozen already"):
        registry.freeze([repo.prereg / "claims" / "r2.json"], repo.prereg, "again", "none")
    assert (repo.prereg / "manifest.jsonl").read_bytes() == before


def test_refrozen_id_written_by_hand_is_tampered(repo):
    path = repo.prereg / "manifest.jsonl"
    lines = path.read_bytes().splitlines()
    entry = json.loads(lines[1])
    entry |= {"seq": 3, "previous": registry.sha256(lines[1])}
    path.write_bytes(path.read_bytes() + canonical_bytes(entry))
    rewrite_head(repo)
    assert any("r3.moe is frozen twice" in p.reason for p in verify(repo.prereg))


def test_rewritten_history_of_a_frozen_file_is_tampered(repo):
    """File, manifest and HEAD changed together, and committed: only history can tell."""
    shutil.rmtree(repo.prereg / "claims")
    for name in ("manifest.jsonl", "HEAD.json"):
        (repo.prereg / name).unlink()
    repo.freeze(claim(statement="A luckier sentence."), extra=[repo.prereg / "protocol.json"])
    repo.freeze(claim("r3.moe"), freeze="r3")
    repo.commit("as if nothing had been")
    assert verify(repo.prereg) == []
    assert history(repo.root).status == "TAMPERED"


@pytest.mark.parametrize("name", ["claims/x.json", "forecasts/x.json", "amendments/x.json"])
def test_unregistered_file_is_reported(repo, name):
    repo.write(f"prereg/{name}", "{}\n")
    (problem,) = verify(repo.prereg)
    assert (problem.status, problem.path) == ("UNREGISTERED", f"prereg/{name}")


def test_invalid_freezes_are_refused(repo, tmp_path):
    bad = write_claims(repo.prereg, claim("r2.y", quantiles=None), freeze="bad")
    with pytest.raises(ClaimError, match="quantiles: missing"):
        registry.freeze([bad], repo.prereg, "n", "none")
    bad.unlink()
    outside = tmp_path / "outside.json"
    outside.write_text("{}")
    with pytest.raises(RegistryError, match="outside the repository"):
        registry.freeze([outside], repo.prereg, "n", "none")
    shapes = repo.write("prereg/shapes.json", '{"a": 1, "a": 2}')
    with pytest.raises(ClaimError, match="a: duplicate key"):
        registry.freeze([shapes], repo.prereg, "n", "none")
    shapes.write_text('{"a": 1}')
    with pytest.raises(RegistryError, match="note is empty"):
        registry.freeze([shapes], repo.prereg, " ", "none")
    with pytest.raises(RegistryError, match="access='lots'"):
        registry.freeze([shapes], repo.prereg, "n", "lots")
    drop_tail(repo)
    with pytest.raises(RegistryError, match="does not verify"):
        registry.freeze([shapes], repo.prereg, "n", "none")


def test_amendment_is_a_claim_of_its_own_beside_the_old_one(repo):
    path = repo.prereg / "amendments" / "a1.json"
    path.parent.mkdir()
    path.write_bytes(canonical_bytes(amendment()))
    registry.freeze([path], repo.prereg, "unit", "some")
    loaded = registry.load_registered(repo.prereg)
    assert [c.id for c in loaded.claims] == ["r2.qgemv_mx.time", "r3.moe", "r2.qgemv_mx.time+a1"]
    assert loaded.amendments[0].reason == "The unit was wrong."
    stray = repo.prereg / "amendments" / "a2.json"
    stray.write_bytes(canonical_bytes(amendment("r2.nobody", 2)))
    with pytest.raises(RegistryError, match="r2.nobody, which was never frozen"):
        registry.freeze([stray], repo.prereg, "n", "some")


def test_drafts_are_loaded_apart(repo):
    write_claims(repo.prereg, claim("r2.draft"), freeze="draft")
    loaded = registry.load_registered(repo.prereg)
    assert [c.id for c in loaded.unregistered] == ["r2.draft"]
    assert "r2.draft" not in loaded.ids


def test_uncommitted_freeze_is_unverifiable(repo):
    repo.freeze(claim("r1.share"), freeze="r1")
    found = history(repo.root)
    assert found.status == "UNVERIFIABLE" and "not committed" in found.problems[0].reason


def test_shallow_clone_archive_and_no_git_are_unverifiable(repo, tmp_path, monkeypatch):
    shallow = tmp_path / "shallow"
    url = f"file://{repo.root}"
    subprocess.run(["git", "clone", "-q", "--depth", "1", url, str(shallow)], check=True)
    found = history(shallow)
    assert found.status == "UNVERIFIABLE" and "shallow" in found.problems[0].reason

    archive = repo.root / "archive"  # unpacked inside another repository: must not borrow it
    shutil.copytree(repo.prereg, archive / "prereg")
    assert history(archive).status == "UNVERIFIABLE"

    alone = tmp_path / "alone"
    shutil.copytree(repo.prereg, alone / "prereg")
    assert history(alone).status == "UNVERIFIABLE"

    monkeypatch.setenv("PATH", str(tmp_path))
    found = history(repo.root)
    assert found.status == "UNVERIFIABLE" and "git does not run" in found.problems[0].reason


def test_freeze_commit_is_where_the_manifest_first_lists_the_file(tmp_path):
    repo = Repo(tmp_path / "r")
    path = write_claims(repo.prereg, claim())
    draft = repo.commit("a draft, not frozen")
    with pytest.raises(Unverifiable, match="no commit froze"):
        freeze_commit(Git(repo.root), "prereg/claims/r2.json")
    registry.freeze([path], repo.prereg, "n", "none")
    frozen = repo.commit("frozen")
    repo.commit("later")
    assert freeze_commit(Git(repo.root), "prereg/claims/r2.json") == frozen != draft


def test_freeze_of_bytes_that_were_never_committed_is_tampered(tmp_path):
    """The manifest line was committed first, the file it lists only later."""
    repo = Repo(tmp_path / "r")
    path = write_claims(repo.prereg, claim())
    registry.freeze([path], repo.prereg, "n", "none")
    data = path.read_bytes()
    path.unlink()
    repo.commit("a promise")
    path.write_bytes(data)
    repo.commit("the file")
    assert verify(repo.prereg) == []
    found = history(repo.root)
    assert found.status == "TAMPERED" and "absent from commit" in found.problems[0].reason


def test_command_line(repo, capsys, monkeypatch):
    monkeypatch.chdir(repo.root)
    assert registry.main(["verify"]) == 0
    assert "OK: 2 freezes, 2 claims" in capsys.readouterr().out
    path = write_claims(repo.prereg, claim("r1.x"), freeze="r1")
    arguments = ["freeze", "--note", "n", "--access", "none", str(path)]
    assert registry.main(arguments) == 0
    assert registry.main(arguments) == 2
    assert "frozen already" in capsys.readouterr().err
    path.write_bytes(path.read_bytes() + b" ")
    assert registry.main(["verify"]) == 3
    assert "TAMPERED: prereg/claims/r1.json" in capsys.readouterr().out


def test_the_help_of_freeze_explains_each_argument(capsys):
    with pytest.raises(SystemExit) as ended:
        registry.main(["freeze", "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    options = text.split("positional arguments:")[1]
    assert "FILE what to freeze: claims" in options
    assert "--note NOTE one sentence: what is frozen, and why" in options
    access = options.split("--access")[1].split("--prereg")[0]
    assert "the authors had seen" in access and all(word in access for word in registry.ACCESS)
