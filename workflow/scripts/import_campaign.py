"""Verify an archive and add its campaign to the recorded ones."""

from pathlib import Path

from lab import archive
from lab.script import logged

with logged(snakemake.log[0], terminal=True) as log:
    log(archive.imported(*archive.import_archive(Path(snakemake.input.archive), Path("data"))))
