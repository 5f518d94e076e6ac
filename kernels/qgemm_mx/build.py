"""Compile the CUDA sources to cubins, reproducibly, and record what the compiler made of them.

Every `<name>.cu` has a sidecar `<name>.json` beside it: what the file is for, the architectures it
builds for, the block sizes it is launched with and the SASS facts it promises. `load_sources` reads
the pairs, `compile_cubin` builds one. No GPU is needed. nvcc is found in the pinned wheels first; it
needs a host C++ compiler as preprocessor.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

CUDA_DIR = Path(__file__).with_name("cuda")
ARCHITECTURES = ("sm_86", "sm_90a")
ROLES = (
    "floor", "baseline", "sanity_floor", "correctness_only", "peer", "testbed", "product", "helper",
)  # fmt: skip
HEADER_SUFFIXES = (".cuh", ".h", ".hpp", ".inc")
SCHEMA_VERSION = 1
MAX_THREADS_PER_BLOCK = 1024


class BuildError(Exception):
    """A source, a sidecar, the toolchain or a compilation is not as it must be; the message says which and why."""


# ---------------------------------------------------------------- toolchain


@cache
def find_tool(name: str) -> Path:
    """Path of `nvcc`, `cuobjdump`, `nvdisasm` or `ptxas`: pinned wheels, then $CUDA_HOME/bin, then PATH.

    The wheels come first so that two machines build the same bytes whatever CUDA they have. Raises BuildError.
    """
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        found = None
    else:
        found = find_nvidia_binary_utility(name)
    if found is None and os.environ.get("CUDA_HOME"):
        found = shutil.which(name, path=os.path.join(os.environ["CUDA_HOME"], "bin"))
    found = found or shutil.which(name)
    if found is None:
        raise BuildError(
            f"{name} not found in the installed wheels, in $CUDA_HOME/bin or on PATH; "
            "`pip install -r requirements.txt` brings the pinned toolchain"
        )
    return Path(found)


@cache
def nvcc_version() -> str:
    """Full version of the compiler in use, such as `13.0.88`. Raises BuildError."""
    text = _run([str(find_tool("nvcc")), "--version"], cwd=None, what="nvcc --version")[0]
    match = re.search(r"\bV(\d+(?:\.\d+)+)", text)
    if not match:
        raise BuildError(f"nvcc --version names no version: {text.strip()!r}")
    return match[1]


def flags_for(arch: str) -> tuple[str, ...]:
    """The fixed compiler flags of one architecture (`sm_90a` -> compute_90a/sm_90a)."""
    if arch not in ARCHITECTURES:
        raise BuildError(f"architecture {arch!r} is not one of {', '.join(ARCHITECTURES)}")
    virtual = arch.replace("sm_", "compute_")
    return ("-O3", "-std=c++17", "-cubin", f"-gencode=arch={virtual},code={arch}")


# ---------------------------------------------------------------- sources and their sidecars


@dataclass(frozen=True)
class SassFacts:
    """Opcodes of one architecture: some entry has each of `require`, no entry has any of `forbid`."""

    require: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()


@dataclass(frozen=True)
class KernelSource:
    """One `.cu` file with its sidecar. `threads` holds the block size (threads) of each entry function."""

    name: str
    path: Path
    role: str
    description: str
    architectures: tuple[str, ...]
    threads: Mapping[str, int]
    sass: Mapping[str, SassFacts]


def load_source(path: Path) -> KernelSource:
    """The source `<name>.cu` with its sidecar `<name>.json`. Raises BuildError naming the file and the key."""
    sidecar = path.with_suffix(".json")
    for file in (path, sidecar):
        if not file.is_file():
            raise BuildError(
                f"{file.name} is missing: {path.stem} needs its .cu and its .json sidecar"
            )
    value = _load_json(sidecar)
    keys = {"name", "role", "description", "architectures", "threads", "sass"}
    _closed(value, keys, sidecar.name)
    if value["name"] != path.stem:
        raise BuildError(
            f"{sidecar.name}: name {value['name']!r} is not the file's stem {path.stem!r}"
        )
    if value["role"] not in ROLES:
        raise BuildError(f"{sidecar.name}: role {value['role']!r} is not one of {', '.join(ROLES)}")
    architectures = tuple(value["architectures"])
    if not architectures or not set(architectures) <= set(ARCHITECTURES):
        raise BuildError(
            f"{sidecar.name}: architectures {list(architectures)} are not a non-empty part of {list(ARCHITECTURES)}"
        )
    for entry, threads in value["threads"].items():
        if type(threads) is not int or not 1 <= threads <= MAX_THREADS_PER_BLOCK:
            raise BuildError(
                f"{sidecar.name}: threads of {entry} is {threads!r}, not an integer in 1..{MAX_THREADS_PER_BLOCK}"
            )
    _closed(value["sass"], set(architectures), f"{sidecar.name}: sass")
    sass = {}
    for arch, facts in value["sass"].items():
        _closed(facts, {"require", "forbid"}, f"{sidecar.name}: sass.{arch}")
        for opcode in (*facts["require"], *facts["forbid"]):
            # A misspelt opcode in `forbid` would hold for ever, so its form at least is checked.
            if not re.fullmatch(r"[A-Z][A-Z0-9]*(\.[A-Z0-9_]+)*", str(opcode)):
                raise BuildError(
                    f"{sidecar.name}: sass.{arch} names {opcode!r}, which is no SASS opcode"
                )
        sass[arch] = SassFacts(tuple(facts["require"]), tuple(facts["forbid"]))
    return KernelSource(
        name=path.stem,
        path=path,
        role=value["role"],
        description=value["description"],
        architectures=architectures,
        threads=dict(value["threads"]),
        sass=sass,
    )


def load_sources(folder: Path = CUDA_DIR) -> dict[str, KernelSource]:
    """Every source of a folder by name, sorted. A `.cu` without sidecar, or the reverse, is a BuildError."""
    stems = sorted({p.stem for p in folder.iterdir() if p.suffix in (".cu", ".json")})
    return {stem: load_source(folder / f"{stem}.cu") for stem in stems}


# ---------------------------------------------------------------- records


@dataclass(frozen=True)
class EntryRecord:
    """What the compiler gave one entry function. Bytes unless the name says otherwise; stack is per thread."""

    entry: str
    threads: int
    registers: int
    barriers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    smem_static_bytes: int


@dataclass(frozen=True)
class BuildRecord:
    """One cubin: how it was made and what it holds. `inputs_sha256` is the cache key, `cubin` a bare file name."""

    schema_version: int
    name: str
    role: str
    architecture: str
    nvcc_version: str
    flags: tuple[str, ...]
    inputs_sha256: str
    cubin: str
    cubin_sha256: str
    cubin_bytes: int
    entries: tuple[EntryRecord, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON value with exactly the keys of this class."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_json(cls, value: Any) -> BuildRecord:
        """The inverse of `to_json`. Unknown or missing keys and another schema version are a BuildError."""
        where = "build record"
        _closed(value, {f.name for f in fields(cls)}, where)
        if value["schema_version"] != SCHEMA_VERSION:
            raise BuildError(
                f"{where}: schema_version {value['schema_version']!r} is not {SCHEMA_VERSION}"
            )
        for entry in value["entries"]:
            _closed(entry, {f.name for f in fields(EntryRecord)}, f"{where}: entry")
        rest = {**value, "flags": tuple(value["flags"])}
        return cls(**{**rest, "entries": tuple(EntryRecord(**e) for e in value["entries"])})

    def campaign_row(self) -> dict[str, Any]:
        """The cubin's row in a campaign: the worst entry's registers, spills and static shared memory."""
        return {
            "name": self.name,
            "arch": self.architecture,
            "sha256": self.cubin_sha256,
            "registers": max(e.registers for e in self.entries),
            "spill_bytes": max(e.spill_store_bytes + e.spill_load_bytes for e in self.entries),
            "smem_static_bytes": max(e.smem_static_bytes for e in self.entries),
        }


def read_record(path: Path) -> BuildRecord:
    """The record in a JSON file. Raises BuildError naming the file."""
    try:
        return BuildRecord.from_json(_load_json(path))
    except BuildError as error:
        raise BuildError(f"{path.name}: {error}") from None


# ---------------------------------------------------------------- compilation


def compile_cubin(
    source: KernelSource, arch: str, out_dir: Path, include_dir: Path = CUDA_DIR
) -> BuildRecord:
    """Build `out_dir/<arch>/<name>.cubin` and its record `<name>.json`; reuse them when nothing changed.

    The key of reuse covers the source, the sidecar, every header beside it or in `include_dir`, the flags and the
    compiler's version; the cubin's own hash is checked too. Raises BuildError with the compiler's words.
    """
    if arch not in source.architectures:
        raise BuildError(
            f"{source.name} is declared for {', '.join(source.architectures)}, not for {arch}"
        )
    key = _inputs_digest(source, arch, include_dir)
    folder = out_dir / arch
    folder.mkdir(parents=True, exist_ok=True)
    cubin = folder / f"{source.name}.cubin"
    record_path = cubin.with_suffix(".json")
    if (record := _reusable(record_path, cubin, key)) is not None:
        return record

    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
        # --resource-usage is -Xptxas -v, which is written into the cubin: the report comes from a second compilation
        # whose cubin is thrown away, so the kept bytes depend on the fixed flags alone.
        plain, verbose = Path(scratch, "plain.cubin"), Path(scratch, "report.cubin")
        with ThreadPoolExecutor(2) as pool:
            kept = pool.submit(_nvcc, source, arch, include_dir, plain, ())
            report = pool.submit(_nvcc, source, arch, include_dir, verbose, ("--resource-usage",))
            kept.result()
            usage = parse_resource_usage(report.result())
        entries = _entries(source, arch, usage)
        data = plain.read_bytes()
        _check_no_path_hash(source, arch, data)
        record = BuildRecord(
            schema_version=SCHEMA_VERSION,
            name=source.name,
            role=source.role,
            architecture=arch,
            nvcc_version=nvcc_version(),
            flags=flags_for(arch),
            inputs_sha256=key,
            cubin=cubin.name,
            cubin_sha256=hashlib.sha256(data).hexdigest(),
            cubin_bytes=len(data),
            entries=entries,
        )
        text = Path(scratch, "record.json")
        text.write_text(json.dumps(record.to_json(), indent=2) + "\n")
        # The record goes last: a cubin without a matching record is never reused.
        os.replace(plain, cubin)
        os.replace(text, record_path)
    return record


def check_declared_entries(source: KernelSource, records: Iterable[BuildRecord]) -> None:
    """Every entry of the sidecar exists in a cubin of some architecture, else BuildError.

    An entry may be missing from one architecture (its instructions do not exist there), not from all.
    """
    built = {entry.entry for record in records for entry in record.entries}
    if missing := sorted(set(source.threads) - built):
        raise BuildError(
            f"{source.name}.json declares threads of {', '.join(missing)}: no cubin has that entry"
        )


def parse_resource_usage(report: str) -> dict[str, dict[str, int]]:
    """Registers, barriers, stack, spills and static shared memory of each entry from `nvcc --resource-usage`.

    Raises BuildError when an entry's report is incomplete, so that a changed compiler output is never read as zero.
    """
    usage: dict[str, dict[str, int]] = {}
    parts = re.split(r"Compiling entry function '([^']+)' for '[^']+'", report)
    for entry, body in zip(parts[1::2], parts[2::2], strict=True):
        # Functions that were not inlined have properties of their own; the entry's follow its own name.
        frame = re.search(
            rf"Function properties for {re.escape(entry)}\n"
            r"\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
            body,
        )
        used = re.search(r"Used (\d+) registers, used (\d+) barriers(.*)", body)
        if not frame or not used:
            raise BuildError(
                f"the compiler's resource report of {entry} is incomplete: {body.strip()!r}"
            )
        smem = re.search(r"(\d+) bytes smem", used[3])
        cumulative = re.search(r"(\d+) bytes cumulative stack", used[3])
        usage[entry] = {
            "registers": int(used[1]),
            "barriers": int(used[2]),
            "stack_bytes": max(int(frame[1]), int(cumulative[1]) if cumulative else 0),
            "spill_store_bytes": int(frame[2]),
            "spill_load_bytes": int(frame[3]),
            "smem_static_bytes": int(smem[1]) if smem else 0,
        }
    return usage


def _entries(
    source: KernelSource, arch: str, usage: Mapping[str, dict[str, int]]
) -> tuple[EntryRecord, ...]:
    if not usage:
        raise BuildError(f"{source.name} for {arch} has no entry function")
    if undeclared := sorted(set(usage) - set(source.threads)):
        raise BuildError(
            f"{source.name} for {arch} has entries without threads in {source.name}.json: {', '.join(undeclared)}"
        )
    return tuple(EntryRecord(entry=e, threads=source.threads[e], **usage[e]) for e in sorted(usage))


def _check_no_path_hash(source: KernelSource, arch: str, cubin: bytes) -> None:
    # nvcc names internal symbols by a hash of the source's absolute path (-frandom-seed does not change
    # that): such a cubin has other bytes in another folder.
    for match in re.finditer(rb"[\w$]*(?:_INTERNAL_|_GLOBAL__N__)[0-9a-f]{8}\w*", cubin):
        raise BuildError(
            f"{source.name} for {arch}: the symbol {match[0].decode()} holds a hash of the folder's path; "
            "move what is static or in an anonymous namespace, and is not inlined, to a named namespace"
        )


def _nvcc(
    source: KernelSource, arch: str, include_dir: Path, out: Path, extra: tuple[str, ...]
) -> str:
    # The compiler runs in the source's folder with relative names, so that no absolute path can reach
    # the cubin through __FILE__.
    folder = source.path.resolve().parent
    include = os.path.relpath(include_dir.resolve(), folder)
    command = [str(find_tool("nvcc")), *flags_for(arch), *extra, "-I", include, source.path.name]
    return _run(
        [*command, "-o", str(out.resolve())], cwd=folder, what=f"compiling {source.name} for {arch}"
    )[1]


def _run(command: list[str], cwd: Path | None, what: str) -> tuple[str, str]:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()
        hint = ""
        if "host compiler" in said:
            hint = "\nnvcc needs a host C++ compiler (g++) on PATH to preprocess"
        raise BuildError(f"{what} failed with status {done.returncode}:\n{said}{hint}")
    return done.stdout, done.stderr


def _inputs_digest(source: KernelSource, arch: str, include_dir: Path) -> str:
    headers = {
        p.resolve()
        for folder in (source.path.parent, include_dir)
        for p in folder.iterdir()
        if p.suffix in HEADER_SUFFIXES
    }
    files = [source.path, source.path.with_suffix(".json"), *sorted(headers, key=lambda p: p.name)]
    inputs = {
        "files": [[p.name, hashlib.sha256(p.read_bytes()).hexdigest()] for p in files],
        "flags": flags_for(arch),
        "nvcc": nvcc_version(),
        "record_schema": SCHEMA_VERSION,
    }
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def _reusable(record_path: Path, cubin: Path, key: str) -> BuildRecord | None:
    if not (record_path.is_file() and cubin.is_file()):
        return None
    try:
        record = read_record(record_path)
    except BuildError:
        return None  # a record of another version or a damaged one: build again
    same = hashlib.sha256(cubin.read_bytes()).hexdigest() == record.cubin_sha256
    return record if same and record.inputs_sha256 == key else None


def _load_json(path: Path) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise BuildError(f"{path.name}: a key occurs twice among {sorted(k for k, _ in pairs)}")
        return dict(pairs)

    try:
        return json.loads(path.read_text(), object_pairs_hook=unique)
    except ValueError as error:
        raise BuildError(f"{path.name} is not JSON: {error}") from None


def _closed(value: Any, keys: set[str], where: str) -> None:
    if not isinstance(value, dict):
        raise BuildError(f"{where} is {type(value).__name__}, not an object")
    if unknown := sorted(set(value) - keys):
        raise BuildError(f"{where}: unknown keys {unknown}; allowed are {sorted(keys)}")
    if missing := sorted(keys - set(value)):
        raise BuildError(f"{where}: missing keys {missing}")
