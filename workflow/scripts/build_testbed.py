"""Compile and check the testbed for one architecture, and lay its cubins beside those of the other kernels."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab import sass
from lab.files import read_json, write_json
from lab.script import logged
from qgemm_mx import build

with logged(snakemake.log[0]) as log:
    arch, cache = snakemake.params.architecture, Path(snakemake.params.cache)
    others = [build.BuildRecord.from_json(v) for v in read_json(snakemake.input.builds)]
    others = [record for record in others if record.architecture == arch]
    if not others:
        raise build.BuildError(
            f"the testbed needs kernels for {arch}: --config architectures={arch}"
        )
    sources = [s for s in build.load_sources().values() if s.role == "testbed"]
    with ThreadPoolExecutor(snakemake.threads + 1) as pool:
        records = list(pool.map(lambda source: build.compile_cubin(source, arch, cache), sources))

    problems = []
    for source, record in zip(sources, records, strict=True):
        build.check_declared_entries(source, [record])
        counts = sass.opcode_counts(sass.disassemble(cache / arch / record.cubin))
        problems += sass.check(source, arch, counts)
        log(f"{record.name} {arch} {record.cubin_sha256}: {len(record.entries)} entries")
    if problems:
        raise sass.SassError("; ".join(problems))

    target = Path(snakemake.output.cubins)
    target.mkdir(parents=True, exist_ok=True)
    beside = next(f for f in map(Path, snakemake.input.cubins) if f.name == arch)
    for folder, made in ((beside, others), (cache / arch, records)):
        for record in made:
            for name in (record.cubin, f"{record.name}.json"):
                shutil.copyfile(folder / name, target / name)
    write_json(snakemake.output.builds, [record.to_json() for record in (*others, *records)])
