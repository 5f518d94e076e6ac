"""Verify an archive and add its campaign to the recorded ones."""

from pathlib import Path

from lab import archive
from lab.script import logged

with logged(snakemake.log[0], terminal=True) as log:
    if snakemake.params.archive is None:
        raise ValueError("say which: --config archive=FILE.tar.gz")
    log(f"{archive.import_archive(snakemake.params.archive, Path('data'))}")
