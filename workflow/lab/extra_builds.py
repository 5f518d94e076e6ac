"""Kernels that only measuring a rung needs, compiled and checked, and laid beside those of the instrument."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lab import sass
from lab.files import read_json, write_json
from qgemm_mx import build as compiler
from qgemm_mx.build import KernelSource


def is_testbed(source: KernelSource) -> bool:
    """Whether R1 needs a source: the testbed's variants."""
    return source.role == "testbed" and source.name.startswith("testbed")


def is_product(source: KernelSource) -> bool:
    """Whether R2 needs a source: the product, and its ablation, whose entries have the role of a testbed."""
    return source.role in ("product", "testbed") and not is_testbed(source)


def build(
    rule: Any, what: str, wanted: Callable[[KernelSource], bool], log: Callable[[str], None]
) -> None:
    """Compile the wanted sources; put their cubins and records, and those of `rule.input`, into `rule.output`.

    rule: Snakemake's object, with input `builds` and `cubins`, params `architecture` and `cache`, and output `builds`
    and `cubins`. Raises BuildError and SassError as the compiler and the check of instructions do.
    """
    arch, cache = rule.params.architecture, Path(rule.params.cache)
    others = [compiler.BuildRecord.from_json(v) for v in read_json(rule.input.builds)]
    others = [record for record in others if record.architecture == arch]
    if not others:
        raise compiler.BuildError(
            f"the {what} needs kernels for {arch}: --config architectures={arch}"
        )
    sources = [s for s in compiler.load_sources().values() if wanted(s)]
    with ThreadPoolExecutor(rule.threads + 1) as pool:
        records = list(pool.map(lambda one: compiler.compile_cubin(one, arch, cache), sources))

    problems = []
    for source, record in zip(sources, records, strict=True):
        compiler.check_declared_entries(source, [record])
        counts = sass.opcode_counts(sass.disassemble(cache / arch / record.cubin))
        problems += sass.check(source, arch, counts)
        log(f"{record.name} {arch} {record.cubin_sha256}: {len(record.entries)} entries")
    if problems:
        raise sass.SassError("; ".join(problems))

    target = Path(rule.output.cubins)
    target.mkdir(parents=True, exist_ok=True)
    beside = next(f for f in map(Path, rule.input.cubins) if f.name == arch)
    for folder, made in ((beside, others), (cache / arch, records)):
        for record in made:
            for name in (record.cubin, f"{record.name}.json"):
                shutil.copyfile(folder / name, target / name)
    write_json(rule.output.builds, [record.to_json() for record in (*others, *records)])
