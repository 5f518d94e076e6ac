"""Render reports/index.html: one page that carries everything it shows."""

import hashlib
from pathlib import Path

import pandas as pd

from lab import (
    cells,
    pins,
    replay,
    report,
    report_audit,
    rungs,
    select,
    source,
)
from lab.files import read_json, read_pickle
from lab.script import logged

with logged(snakemake.log[0]) as log:
    drawn = Path(snakemake.input.figures)
    sass = {(s["name"], s["architecture"]): s["entries"] for s in read_json(snakemake.input.sass)}
    builds = read_json(snakemake.input.builds)
    protocols = [Path(path) for path in snakemake.input.protocols]
    shapes = read_json(snakemake.input.shapes)["shapes"]
    campaigns = replay.chosen_campaigns(snakemake.input.pointers)
    report.render(
        snakemake.output.html,
        verdicts=pd.read_csv(snakemake.input.verdicts),
        cells=cells.read(snakemake.input.cells),
        claims=read_json(snakemake.input.claims),
        campaigns=[replay.described(c) for c in campaigns],
        occupancy=pd.read_csv(snakemake.input.occupancy),
        builds=[build | {"sass": sass[build["name"], build["architecture"]]} for build in builds],
        scores=read_json(snakemake.input.scores),
        integrity=read_json(snakemake.input.integrity),
        shapes=shapes,
        figures={
            path.relative_to(drawn).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
            for path in sorted(drawn.rglob("*.svg"))
        },
        missing={rung.id: rungs.missing(rung.id, ".") for rung in rungs.RUNGS},
        protocols={hashlib.sha256(p.read_bytes()).hexdigest(): read_json(p) for p in protocols},
        pinned=pins.read(snakemake.input.requirements),
        present={
            "kernels_digest": select.kernels_digest("."),
            "tree_digest": source.tree_digest(Path(".")),
        },
        r1=read_pickle(snakemake.input.r1_found),
        r2=read_pickle(snakemake.input.r2_found),
        r2b=read_pickle(snakemake.input.r2b_found),
        recorded=[campaign.id for campaign in select.recorded_campaigns(".")],
    )
    report_audit.write_sums(Path(snakemake.output.html).parent)
    log(f"{Path(snakemake.output.html).stat().st_size} bytes")
