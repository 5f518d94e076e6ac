"""Write reports/cells.csv: every cell of the campaigns that the report shows."""

from lab import cells, replay
from lab.script import logged

with logged(snakemake.log[0]) as log:
    frame = cells.table(replay.chosen_campaigns(snakemake.input.pointers))
    cells.write(frame, snakemake.output.cells)
    log(f"{len(frame)} cells")
