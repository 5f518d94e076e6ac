"""Point at the recorded R2b campaign that the report is made from."""

from lab.files import write_json
from lab.script import logged

with logged(snakemake.log[0]) as log:
    log(f"replaying {snakemake.params.campaign}")
    write_json(snakemake.output.pointer, {"campaign": snakemake.params.campaign})
