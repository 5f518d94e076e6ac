"""Write the tables of R2b: cells, bars, crossings, ablation and power; empty before any campaign of R2b."""

from pathlib import Path

from lab import analysis_r2, analysis_r2b, replay
from lab.files import read_json, write_pickle, write_text
from lab.script import logged

with logged(snakemake.log[0]) as log:
    shapes = read_json(snakemake.input.shapes)["shapes"]
    campaigns = replay.chosen_campaigns(snakemake.input.pointers)
    folder = analysis_r2.chosen(campaigns, analysis_r2b.RUNG)
    found = folder and analysis_r2b.of_folder(folder, shapes)
    write_pickle(snakemake.output.found, found)
    for name, table in analysis_r2b.tables(found).items():
        write_text(Path("reports") / f"{name}.csv", analysis_r2b.to_csv(table))
        log(f"{name}: {len(table)} rows")
    if found:
        for bar in found.bars:
            log(f"{bar.id} {bar.format or ''}: {bar.status}")
        for name, why in found.constants.missing.items():
            log(f"{name} is missing: {why}")
