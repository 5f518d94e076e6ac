"""Measure a new R0 campaign on this machine's device, and point at it."""

from pathlib import Path

from lab import measure
from lab.files import read_json, write_json
from lab.script import logged
from qgemm_mx.build import BuildRecord

with logged(snakemake.log[0], terminal=True) as log:
    cubin_dir = Path(snakemake.params.cubin_dir)
    records = [BuildRecord.from_json(value) for value in read_json(snakemake.input.builds)]
    campaign = measure.run_campaign(
        rung="R0",
        repo=Path.cwd(),
        cubin_dir=cubin_dir,
        builds=[r for r in records if r.architecture == cubin_dir.name],
        log=log,
    )
    write_json(snakemake.output.pointer, {"campaign": campaign.name})
