"""Carry a campaign between machines as one file: `python -m lab.archive pack DIR OUT.tar.gz`.

The archive holds one folder with the files of a campaign and nothing else. `import ARCHIVE` checks
every hash before the campaign gets its name, so a broken or hostile archive leaves nothing behind.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import os
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from lab.records import FILES, ID_PATTERN, MAX_BYTES, CampaignError, place, verify

SUFFIX = ".tar.gz"


def pack(campaign_dir: Path, out: Path) -> Path:
    """Write a verified campaign to `out` (`.tar.gz`); the same campaign gives the same bytes. Raises CampaignError."""
    folder, out = Path(campaign_dir), Path(out)
    if not out.name.endswith(SUFFIX):
        raise CampaignError(f"{out.name}: the archive's name must end in {SUFFIX}")
    if problems := verify(folder):
        raise CampaignError(f"{folder.name} is not packed: " + "; ".join(problems))
    buffer = io.BytesIO()
    # No clock and no owner may enter the bytes: two packs of a campaign are the same file.
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", filename="", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for name in sorted(FILES):
            data = (folder / name).read_bytes()
            member = tarfile.TarInfo(f"{folder.name}/{name}")
            member.size, member.mode, member.mtime = len(data), 0o644, 0
            tar.addfile(member, io.BytesIO(data))
    scratch = out.with_name(f".{out.name}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(buffer.getvalue())
        os.replace(scratch, out)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise CampaignError(f"{out} cannot be written: {error}") from None
    return out


def import_archive(archive: Path, data_dir: Path) -> tuple[Path, bool]:
    """Unpack an archive into `data_dir/campaigns/<id>`; that folder, and whether it is new.

    The same campaign again is left alone, and not new. Raises CampaignError, leaving nothing behind, on a damaged
    archive, a link, a path that leads elsewhere, a member too many or too few, a hash that differs,
    or another campaign of that name.
    """
    archive = Path(archive)
    name, files = _read(archive)
    campaigns = Path(data_dir) / "campaigns"
    campaigns.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=campaigns, prefix=".importing-"))
    try:
        folder = scratch / name
        folder.mkdir()
        for file, data in files.items():
            (folder / file).write_bytes(data)
        if problems := verify(folder):
            raise CampaignError(f"{archive.name}: " + "; ".join(problems))
        new = not (campaigns / name).exists()
        return place(folder, campaigns / name), new
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def imported(folder: Path, new: bool) -> str:
    """What `import_archive` did, in words."""
    return f"{folder}: {'imported' if new else 'already here, identical'}"


def _read(archive: Path) -> tuple[str, dict[str, bytes]]:
    # Members are read into memory and written under names that we choose: nothing of the archive is ever a path.
    name = None
    files: dict[str, bytes] = {}
    total = 0
    try:
        with tarfile.open(archive, mode="r:gz") as tar:
            for member in tar:
                folder, _, file = member.name.partition("/")
                if not member.isreg():
                    raise CampaignError(f"{archive.name}: {member.name!r} is not a plain file")
                if not ID_PATTERN.fullmatch(folder) or file not in FILES:
                    raise CampaignError(
                        f"{archive.name}: {member.name!r} does not belong to a campaign"
                    )
                if name not in (None, folder) or file in files:
                    raise CampaignError(
                        f"{archive.name}: {member.name!r} is of a second campaign or occurs twice"
                    )
                total += member.size
                if total > MAX_BYTES:
                    raise CampaignError(
                        f"{archive.name}: over {MAX_BYTES} bytes, the limit of a campaign"
                    )
                reader = tar.extractfile(member)
                data = reader.read() if reader else b""
                if len(data) != member.size:
                    raise CampaignError(f"{archive.name}: {member.name!r} is cut short")
                name, files[file] = folder, data
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise CampaignError(f"{archive.name} cannot be read as {SUFFIX}: {error}") from None
    if name is None or set(files) != set(FILES):
        raise CampaignError(f"{archive.name} lacks {', '.join(sorted(set(FILES) - set(files)))}")
    return name, files


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns 0, or 1 after one line on stderr that says what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.archive", description="Pack or import a campaign."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="make one archive of a campaign")
    packing.add_argument("campaign", type=Path, help="data/campaigns/<id>")
    packing.add_argument("out", type=Path, help=f"archive to write, {SUFFIX}")
    importing = commands.add_parser("import", help="verify an archive and add its campaign")
    importing.add_argument("archive", type=Path, help=f"archive to read, {SUFFIX}")
    importing.add_argument(
        "--data", type=Path, default=Path("data"), help="data folder (default: data)"
    )
    given = parser.parse_args(arguments)
    try:
        if given.command == "pack":
            done = str(pack(given.campaign, given.out))
        else:
            done = imported(*import_archive(given.archive, given.data))
    except CampaignError as error:
        print(error, file=sys.stderr)
        return 1
    print(done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
