"""Compile the kernels of the instrument for every architecture that they declare, and record what came of it."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab.files import write_json
from lab.script import logged
from qgemm_mx import build

with logged(snakemake.log[0]) as log:
    # The cache outlives the outputs, which Snakemake removes before it runs this again: only what changed is compiled.
    cache = Path(snakemake.params.cache)
    folders = dict(
        zip(snakemake.params.architectures, map(Path, snakemake.output.cubins), strict=True)
    )
    # Testbed and products have dozens of entries each, which take minutes: they are built where they are measured.
    sources = {
        n: s for n, s in build.load_sources().items() if s.role not in ("testbed", "product")
    }
    jobs = [(s, arch) for s in sources.values() for arch in s.architectures if arch in folders]

    with ThreadPoolExecutor(snakemake.threads + 1) as pool:
        records = list(pool.map(lambda job: build.compile_cubin(*job, cache), jobs))

    if set(folders) == set(build.ARCHITECTURES):
        for source in sources.values():
            build.check_declared_entries(source, [r for r in records if r.name == source.name])
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    for record in records:
        for name in (record.cubin, f"{record.name}.json"):
            shutil.copyfile(cache / record.architecture / name, folders[record.architecture] / name)
        log(f"{record.name} {record.architecture} {record.cubin_sha256}")
    write_json(snakemake.output.builds, [record.to_json() for record in records])
