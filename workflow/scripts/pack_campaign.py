"""Pack the newest campaign, or the one of `--config campaign=ID`, into one archive."""

from lab import archive, select
from lab.script import logged

with logged(snakemake.log[0], terminal=True) as log:
    if snakemake.params.archive is None:
        raise ValueError("say where to: --config archive=FILE.tar.gz")
    if snakemake.params.campaign is None:
        raise ValueError(f"there is no campaign to pack in {select.CAMPAIGNS}")
    log(f"{archive.pack(select.CAMPAIGNS / snakemake.params.campaign, snakemake.params.archive)}")
