"""Draw every figure that the data allow, one SVG file each (a `/` in a figure's name becomes a folder)."""

from pathlib import Path

import pandas as pd

from lab import accuracy, cells, figures, replay
from lab.accuracy_figure import fig_accuracy
from lab.files import read_json, write_text
from lab.script import logged

with logged(snakemake.log[0]) as log:
    folder = Path(snakemake.output.figures)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figures.build_all(
        cells=cells.read(snakemake.input.cells),
        verdicts=pd.read_csv(snakemake.input.verdicts),
        claims=read_json(snakemake.input.claims),
        campaigns=[replay.described(c) for c in replay.chosen_campaigns(snakemake.input.pointers)],
        shapes=read_json(snakemake.input.shapes)["shapes"],
        bytes_per_weight=replay.weight_sizes(),
    )
    if record := accuracy.newest(Path("data")):
        # No 4-bit kernel has a speed before R2: the figure then stands on the byte ratio, and says so.
        results = accuracy.summarise(accuracy.load(record))
        for name, columns in (("fig5_accuracy", 3), ("fig5_accuracy_narrow", 1)):
            drawn[name] = fig_accuracy(results, {r.format: None for r in results}, columns=columns)
    for name, svg in drawn.items():
        write_text(folder / f"{name}.svg", svg)
        log(name)
