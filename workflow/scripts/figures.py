"""Draw every figure that the data allow, one SVG file each (a `/` in a figure's name becomes a folder)."""

from functools import partial
from pathlib import Path

import pandas as pd

from lab import accuracy, cells, figures, replay, report_r1, report_r2, report_r2b
from lab.files import read_json, read_pickle, write_text
from lab.script import logged

with logged(snakemake.log[0]) as log:
    folder = Path(snakemake.output.figures)
    folder.mkdir(parents=True, exist_ok=True)
    shapes = read_json(snakemake.input.shapes)["shapes"]
    campaigns = replay.chosen_campaigns(snakemake.input.pointers)
    record = accuracy.newest(Path("data"))
    results = accuracy.summarise(accuracy.load(record)) if record else []
    drawn = figures.build_all(
        cells=cells.read(snakemake.input.cells),
        verdicts=pd.read_csv(snakemake.input.verdicts),
        claims=read_json(snakemake.input.claims),
        campaigns=[replay.described(c) for c in campaigns],
        shapes=shapes,
        bytes_per_weight=replay.weight_sizes(),
        processes=snakemake.threads,
        more=[
            partial(report_r1.figures, read_pickle(snakemake.input.r1), results),
            partial(report_r2.figures, read_pickle(snakemake.input.r2)),
            partial(report_r2b.figures, read_pickle(snakemake.input.r2b)),
        ],
    )
    for name, svg in drawn.items():
        write_text(folder / f"{name}.svg", svg)
        log(name)
