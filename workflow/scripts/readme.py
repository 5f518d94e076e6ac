"""Fill the blocks of README.md whose numbers come from the report's tables."""

import pandas as pd

from lab import cells, readme
from lab.script import logged

with logged(snakemake.log[0]) as log:
    changed = readme.update(
        "README.md",
        cells=cells.read(snakemake.input.cells),
        verdicts=pd.read_csv(snakemake.input.verdicts),
        r1=readme.r1_tables("reports"),
        r2=readme.r2_tables("reports"),
        r2b=readme.r2b_tables("reports"),
    )
    log("changed" if changed else "current already")
