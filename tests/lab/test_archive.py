"""Carrying a campaign as one file: the same bytes each time, and a broken or hostile archive leaves nothing behind."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import recorded

from lab import archive, records
from lab.records import CampaignError

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A campaign and its archive."""
    tmp = tmp_path_factory.mktemp("shelf")
    folder = recorded.campaign(tmp, ms=(1,))
    return folder, archive.pack(folder, tmp / "one.tar.gz")


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("campaigns/*")) if folder.exists() else []


def _rewrite(source: Path, target: Path, edit) -> Path:
    """The archive with its members passed through `edit(list of (TarInfo, bytes))`."""
    with tarfile.open(source) as tar:
        members = [(m, tar.extractfile(m).read()) for m in tar]
    with tarfile.open(target, "w:gz") as tar:
        for member, data in edit(members):
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return target


def test_packed_and_imported_campaign_is_the_same_bytes(tmp_path, shelf):
    folder, packed = shelf
    imported, new = archive.import_archive(packed, tmp_path / "data")
    assert imported == tmp_path / "data/campaigns" / folder.name and new
    assert {p.name: p.read_bytes() for p in imported.iterdir()} == {
        p.name: p.read_bytes() for p in folder.iterdir()
    }
    assert records.verify(imported) == []
    stamp = (imported / "campaign.json").stat().st_mtime_ns
    assert archive.import_archive(packed, tmp_path / "data") == (imported, False), (
        "a second import changes nothing"
    )
    assert (imported / "campaign.json").stat().st_mtime_ns == stamp
    assert _names(tmp_path / "data") == [folder.name]


def test_two_packs_are_the_same_bytes_and_carry_no_clock_and_no_owner(tmp_path, shelf):
    folder, packed = shelf
    assert archive.pack(folder, tmp_path / "other.tar.gz").read_bytes() == packed.read_bytes()
    with tarfile.open(packed) as tar:
        assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in tar} == {
            (0, 0, 0, "", "", 0o644)
        }


def test_a_tampered_campaign_is_not_packed(tmp_path):
    folder = recorded.campaign(tmp_path, ms=(1,))
    path = folder / "campaign.json"
    path.write_text(path.read_text().replace('"seed": 7', '"seed": 8'))
    with pytest.raises(CampaignError, match="not packed"):
        archive.pack(folder, tmp_path / "out.tar.gz")
    assert not (tmp_path / "out.tar.gz").exists()
    with pytest.raises(CampaignError, match=r"\.tar\.gz"):
        archive.pack(folder, tmp_path / "out.zip")


@pytest.mark.parametrize("obstacle", ["file for a folder", "folder for a file"])
def test_packing_where_nothing_can_be_written_is_one_sentence(tmp_path, shelf, capsys, obstacle):
    out = tmp_path / "place" / "one.tar.gz"
    if obstacle == "file for a folder":
        out.parent.write_text("in the way")
    else:
        out.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    assert archive.main(["pack", str(shelf[0]), str(out)]) == 1
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert said.err.startswith(f"{out} cannot be written: ")
    assert sorted(tmp_path.rglob("*")) == before, "nothing is left behind"


@pytest.mark.parametrize("dangling", [True, False])
def test_a_link_in_the_campaigns_place_is_refused(tmp_path, shelf, dangling):
    folder, packed = shelf
    link = tmp_path / "data/campaigns" / folder.name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "nowhere" if dangling else folder)
    with pytest.raises(CampaignError, match=f"{folder.name} is a link"):
        archive.import_archive(packed, tmp_path / "data")
    assert link.is_symlink() and _names(tmp_path / "data") == [folder.name]


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.9])
def test_a_cut_archive_leaves_nothing(tmp_path, shelf, fraction):
    data = shelf[1].read_bytes()
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(CampaignError, match="cut.tar.gz"):
        archive.import_archive(cut, tmp_path / "data")
    assert _names(tmp_path / "data") == []


def test_a_flipped_byte_leaves_nothing(tmp_path, shelf):
    """Flipped in the tar itself, so that no checksum of gzip can be what notices."""
    tar = bytearray(gzip.decompress(shelf[1].read_bytes()))
    bad = tmp_path / "bad.tar.gz"
    at = tar.index(b"SYNTHETIC GPU")
    for place in (at, len(tar) // 3):
        edited = bytearray(tar)
        edited[place] ^= 1
        bad.write_bytes(gzip.compress(bytes(edited)))
        with pytest.raises(CampaignError):
            archive.import_archive(bad, tmp_path / "data")
        assert _names(tmp_path / "data") == []


def _renamed(name):
    def edit(members):
        members[0][0].name = name
        return members

    return edit


def _linked(kind):
    def edit(members):
        members[0][0].type = kind
        members[0][0].linkname = "/etc/passwd"
        return [(members[0][0], b""), *members[1:]]

    return edit


def _new_id(members):
    for member, _ in members:
        member.name = member.name.replace("r0-", "r1-")
    return members


@pytest.mark.parametrize(
    "edit",
    [
        _renamed("../../outside.json"),
        _renamed("/tmp/outside.json"),
        _renamed("r0-x-20260101-0123456789ab/../campaign.json"),
        _renamed("campaign.json"),
        _renamed("r0-other-20260102-0123456789ab/campaign.json"),
        _linked(tarfile.SYMTYPE),
        _linked(tarfile.LNKTYPE),
        _linked(tarfile.CHRTYPE),
        _linked(tarfile.DIRTYPE),
        lambda members: members[:-1],
        lambda members: [*members, members[0]],
        lambda members: [],
        _new_id,
    ],
)
def test_hostile_archives_leave_nothing(tmp_path, shelf, edit):
    bad = _rewrite(shelf[1], tmp_path / "bad.tar.gz", edit)
    with pytest.raises(CampaignError, match="bad.tar.gz"):
        archive.import_archive(bad, tmp_path / "a" / "data")
    left = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert left == [bad]


def test_an_archive_over_the_limit_is_refused_unread(tmp_path, shelf, monkeypatch):
    monkeypatch.setattr(archive, "MAX_BYTES", 1000)
    with pytest.raises(CampaignError, match="over 1000 bytes"):
        archive.import_archive(shelf[1], tmp_path / "data")


def test_a_changed_campaign_is_never_written_over(tmp_path, shelf):
    folder, packed = shelf
    imported, _ = archive.import_archive(packed, tmp_path / "data")
    (imported / "campaign.json").write_text("{}")
    with pytest.raises(CampaignError, match="never overwritten"):
        archive.import_archive(packed, tmp_path / "data")
    assert (imported / "campaign.json").read_text() == "{}"
    assert _names(tmp_path / "data") == [folder.name]


def test_command_line(tmp_path, shelf):
    folder, packed = shelf
    out = tmp_path / "out" / "c.tar.gz"

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "lab.archive", *map(str, arguments)],
            env={"PYTHONPATH": f"{REPO / 'kernels'}:{REPO / 'workflow'}"},
            capture_output=True,
            text=True,
            check=False,
        )

    assert run("pack", folder, out).returncode == 0
    assert out.read_bytes() == packed.read_bytes()
    for said in ("imported", "already here, identical"):
        done = run("import", out, "--data", tmp_path / "data")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"{tmp_path / 'data' / 'campaigns' / folder.name}: {said}\n"
    assert _names(tmp_path / "data") == [folder.name]
    out.write_bytes(b"no archive")
    failed = run("import", out, "--data", tmp_path / "other")
    assert failed.returncode == 1
    assert len(failed.stderr.strip().splitlines()) == 1 and "c.tar.gz" in failed.stderr
