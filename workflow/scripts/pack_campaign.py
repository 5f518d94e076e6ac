"""Pack the newest campaign, or the one of `--config campaign=ID`, into one archive."""

from pathlib import Path

from lab import archive
from lab.script import logged

with logged(snakemake.log[0], terminal=True) as log:
    folder = Path(snakemake.input.campaign[0]).parent
    log(f"{archive.pack(folder, Path(snakemake.params.archive))}: {folder.name} packed")
