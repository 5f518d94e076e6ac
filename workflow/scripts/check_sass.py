"""Disassemble every cubin, count its instructions, and refuse one that breaks what its sidecar promises."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab import sass
from lab.files import read_json, write_json
from lab.script import logged
from qgemm_mx import build

with logged(snakemake.log[0]) as log:
    folders = {Path(folder).name: Path(folder) for folder in snakemake.input.cubins}
    records = [build.BuildRecord.from_json(value) for value in read_json(snakemake.input.builds)]
    sources = build.load_sources()

    def counted(record):
        cubin = folders[record.architecture] / f"{record.name}.cubin"
        return sass.opcode_counts(sass.disassemble(cubin))

    with ThreadPoolExecutor(snakemake.threads + 1) as pool:
        counts = list(pool.map(counted, records))

    problems = []
    for record, found in zip(records, counts, strict=True):
        problems += sass.check(sources[record.name], record.architecture, found)
        log(
            f"{record.name} {record.architecture} {sum(c.total() for c in found.values())} instructions"
        )
    if problems:
        raise sass.SassError("; ".join(problems))
    write_json(
        snakemake.output.sass,
        [
            {
                "name": r.name,
                "architecture": r.architecture,
                "entries": {e: dict(c) for e, c in found.items()},
            }
            for r, found in zip(records, counts, strict=True)
        ],
    )
