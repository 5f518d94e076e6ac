"""Measure what the formats cost in accuracy on a small public model, unless that is recorded already."""

from pathlib import Path

from lab import accuracy
from lab.script import logged

with logged(snakemake.log[0], terminal=True) as log:
    folder, new = accuracy.record(Path("data"))
    log(f"{folder}: {'measured' if new else 'measured before, with this model and code'}")
    for line in accuracy.table(accuracy.summarise(accuracy.load(folder))):
        log(line)
