"""Measure the R2b campaign on this machine's device, or the next piece of it, and point at it when it is whole."""

from pathlib import Path

from lab import measure_r2b
from lab.files import read_json, write_json
from lab.script import logged
from qgemm_mx.build import BuildRecord

with logged(snakemake.log[0], terminal=True) as log:
    campaign = measure_r2b.run_campaign_r2b(
        repo=Path.cwd(),
        cubin_dir=Path(snakemake.input.cubins),
        builds=[BuildRecord.from_json(value) for value in read_json(snakemake.input.builds)],
        log=log,
        minutes=snakemake.params.minutes,
        close=snakemake.params.close,
    )
    write_json(snakemake.output.pointer, {"campaign": campaign.name})
