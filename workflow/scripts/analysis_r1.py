"""Write the tables of R1: production gap, causes, interactions, experiments; empty before any campaign of R1."""

from pathlib import Path

from lab import accuracy, analysis_r1, replay
from lab.files import read_json, write_pickle, write_text
from lab.script import logged

with logged(snakemake.log[0]) as log:
    shapes = read_json(snakemake.input.shapes)["shapes"]
    folder = analysis_r1.chosen(replay.chosen_campaigns(snakemake.input.pointers))
    found = folder and analysis_r1.of_folder(folder, shapes, accuracy.newest(Path("data")))
    write_pickle(snakemake.output.found, found)
    for name, table in analysis_r1.tables(found).items():
        write_text(Path("reports") / f"{name}.csv", analysis_r1.to_csv(table))
        log(f"{name}: {len(table)} rows")
    if found:
        for cell, why in found.refused.items():
            log(f"{cell}: {why}")
        for name, why in found.constants.missing.items():
            log(f"{name} is missing: {why}")
        log(f"R2: {found.decision.word}")
