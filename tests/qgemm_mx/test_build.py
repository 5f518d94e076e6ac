"""Building cubins: reproducible bytes, honest reports, a cache that is never stale, errors that name their object."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from qgemm_mx import build
from qgemm_mx.build import BuildError, BuildRecord

SIMPLE = """
#include "shared.cuh"
namespace own { __device__ __noinline__ float twice(float x) { return 2 * x + kOffset; } }
extern "C" __global__ void scale(float* x) {
  __shared__ float s[64];
  s[threadIdx.x % 64] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = own::twice(s[(threadIdx.x + 1) % 64]);
  if (x[0] == 123.0f) printf("%s %s", __FILE__, kHeader);
}
"""
HEADER = """
#include <cstdio>
constexpr float kOffset = 1.0f;
constexpr const char* kHeader = __FILE__;
"""
# Held to 64 registers with more live values than that: it must spill.
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spill(const float* in, float* out, int n) {
  float v[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = in[i * n + threadIdx.x];
  for (int r = 0; r < n; ++r) {
#pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = v[(i + 7) % 64] * v[i] + in[r];
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) out[i * n + threadIdx.x] = v[i];
}
"""


def write(folder: Path, stem: str, text: str, blocks, **changes) -> build.KernelSource:
    sidecar = {
        "name": stem,
        "role": "helper",
        "description": "made for a test",
        "architectures": ["sm_86", "sm_90a"],
        "threads": blocks,
        "sass": {a: {"require": [], "forbid": []} for a in ("sm_86", "sm_90a")},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.cu").write_text(text)
    (folder / f"{stem}.json").write_text(json.dumps(sidecar | changes))
    return build.load_source(folder / f"{stem}.cu")


def simple(folder: Path) -> build.KernelSource:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shared.cuh").write_text(HEADER)
    return write(folder, "scale", SIMPLE, {"scale": 64})


def compile_in(source: build.KernelSource, arch: str, out: Path) -> BuildRecord:
    return build.compile_cubin(source, arch, out, include_dir=source.path.parent)


@pytest.mark.parametrize("arch", build.ARCHITECTURES)
def test_bytes_do_not_depend_on_the_folder_and_the_record_tells_them(tmp_path, arch):
    one = compile_in(simple(tmp_path / "a"), arch, tmp_path / "out1")
    two = compile_in(simple(tmp_path / "b" / "deeper folder"), arch, tmp_path / "x" / "out2")
    assert one == two
    data = (tmp_path / "out1" / arch / one.cubin).read_bytes()
    assert data == (tmp_path / "x" / "out2" / arch / two.cubin).read_bytes()
    assert one.cubin_sha256 == hashlib.sha256(data).hexdigest()
    assert one.cubin_bytes == len(data)
    assert str(tmp_path).encode() not in data
    assert str(tmp_path) not in json.dumps(one.to_json())
    assert [p.name for p in sorted((tmp_path / "out1" / arch).iterdir())] == [
        "scale.cubin",
        "scale.json",
    ]
    assert one.flags == build.flags_for(arch)
    assert one.nvcc_version.startswith("13.")
    (entry,) = one.entries
    assert (entry.entry, entry.threads, entry.smem_static_bytes) == ("scale", 64, 256)
    assert entry.registers > 0 and entry.barriers >= 1 and entry.spill_store_bytes == 0


@pytest.mark.parametrize("scope", ["namespace own {", "namespace own { static"])
def test_a_symbol_named_by_the_path_is_refused(tmp_path, scope):
    """nvcc hashes the absolute path into the names of internal functions that are not inlined."""
    anonymous = SIMPLE.replace("namespace own {", scope if "static" in scope else "namespace {")
    anonymous = anonymous if "static" in scope else anonymous.replace("own::", "")
    source = simple(tmp_path)
    source.path.write_text(anonymous)
    with pytest.raises(BuildError, match="twice.*hash of the folder's path"):
        compile_in(source, "sm_90a", tmp_path / "out")
    assert not list((tmp_path / "out/sm_90a").iterdir())


def test_the_report_is_of_another_compilation_because_it_changes_the_bytes(tmp_path):
    """Why two compilations: should this fail, one with --resource-usage is enough."""
    source = simple(tmp_path)
    plain, verbose = tmp_path / "plain.cubin", tmp_path / "verbose.cubin"
    build._nvcc(source, "sm_90a", tmp_path, plain, ())
    build._nvcc(source, "sm_90a", tmp_path, verbose, ("--resource-usage",))
    record = compile_in(source, "sm_90a", tmp_path / "out")
    assert record.cubin_sha256 == hashlib.sha256(plain.read_bytes()).hexdigest()
    assert plain.read_bytes() != verbose.read_bytes()
    # What was reported is true of what is kept: the instructions are the same.
    from lab import sass

    assert sass.disassemble(plain) == sass.disassemble(verbose)


def test_spills_are_seen(tmp_path):
    source = write(tmp_path, "spill", SPILLING, {"spill": 1024})
    (entry,) = compile_in(source, "sm_86", tmp_path / "out").entries
    assert entry.registers <= 64
    assert entry.spill_store_bytes > 0 and entry.spill_load_bytes > 0 and entry.stack_bytes > 0
    row = compile_in(source, "sm_86", tmp_path / "out").campaign_row()
    assert row["spill_bytes"] == entry.spill_store_bytes + entry.spill_load_bytes
    assert set(row) == {"name", "arch", "sha256", "registers", "spill_bytes", "smem_static_bytes"}


class Compiled(Exception):
    """The compiler was called."""


@pytest.fixture
def no_compiler(monkeypatch):
    def refuse(*_):
        raise Compiled

    return lambda: monkeypatch.setattr(build, "_nvcc", refuse)


def test_an_unchanged_source_is_not_compiled_again(tmp_path, no_compiler):
    source = simple(tmp_path)
    first = compile_in(source, "sm_90a", tmp_path / "out")
    no_compiler()
    assert compile_in(simple(tmp_path), "sm_90a", tmp_path / "out") == first


def _touch_header(folder, _out):
    (folder / "shared.cuh").write_text(HEADER.replace("1.0f", "2.0f"))


def _touch_source(folder, _out):
    (folder / "scale.cu").write_text(SIMPLE + "\n// x")


def _touch_sidecar(folder, _out):
    write(folder, "scale", SIMPLE, {"scale": 128})


def _damage_cubin(_folder, out):
    (out / "scale.cubin").write_bytes(b"x")


def _lose_cubin(_folder, out):
    (out / "scale.cubin").unlink()


def _damage_record(_folder, out):
    (out / "scale.json").write_text("{}")


@pytest.mark.parametrize(
    "change",
    [_touch_header, _touch_source, _touch_sidecar, _damage_cubin, _lose_cubin, _damage_record],
)
def test_any_change_is_compiled_again(tmp_path, no_compiler, change):
    source = simple(tmp_path)
    compile_in(source, "sm_90a", tmp_path / "out")
    change(tmp_path, tmp_path / "out" / "sm_90a")
    no_compiler()
    with pytest.raises(Compiled):
        compile_in(build.load_source(source.path), "sm_90a", tmp_path / "out")
    assert not list((tmp_path / "out").rglob(".build-*"))


def test_another_compiler_version_is_compiled_again(tmp_path, no_compiler, monkeypatch):
    source = simple(tmp_path)
    compile_in(source, "sm_90a", tmp_path / "out")
    monkeypatch.setattr(build, "nvcc_version", lambda: "13.9.9")
    no_compiler()
    with pytest.raises(Compiled):
        compile_in(source, "sm_90a", tmp_path / "out")


def test_a_source_that_does_not_compile_says_where_and_keeps_the_old_cubin(tmp_path):
    source = simple(tmp_path)
    record = compile_in(source, "sm_90a", tmp_path / "out")
    source.path.write_text(SIMPLE.replace("2 * x", "2 * undefined_name"))
    with pytest.raises(BuildError, match=r"compiling scale for sm_90a failed(.|\n)*undefined_name"):
        compile_in(source, "sm_90a", tmp_path / "out")
    assert build.read_record(tmp_path / "out/sm_90a/scale.json") == record
    assert sorted(p.name for p in (tmp_path / "out/sm_90a").iterdir()) == [
        "scale.cubin",
        "scale.json",
    ]


def test_entries_and_sidecar_must_agree(tmp_path):
    with pytest.raises(BuildError, match="without threads in spill.json: spill"):
        compile_in(write(tmp_path, "spill", SPILLING, {"spil": 1024}), "sm_86", tmp_path / "out")
    source = write(tmp_path, "spill", SPILLING, {"spill": 1024, "gone": 32})
    records = [compile_in(source, "sm_86", tmp_path / "out")]
    with pytest.raises(BuildError, match="threads of gone"):
        build.check_declared_entries(source, records)
    with pytest.raises(BuildError, match="no entry function"):
        compile_in(write(tmp_path, "none", "__device__ int x;", {}), "sm_86", tmp_path / "out")
    only_hopper = write(
        tmp_path, "spill", SPILLING, {"spill": 32}, architectures=["sm_90a"], sass={"sm_90a": EMPTY}
    )
    with pytest.raises(BuildError, match="declared for sm_90a, not for sm_86"):
        compile_in(only_hopper, "sm_86", tmp_path / "out")


EMPTY = {"require": [], "forbid": []}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"note": 1}, "unknown keys \\['note'\\]"),
        ({"name": "other"}, "'other' is not the file's stem 'k'"),
        ({"role": "fastest"}, "'fastest'"),
        ({"architectures": []}, "architectures"),
        ({"architectures": ["sm_100"]}, "sm_100"),
        ({"sass": {"sm_86": EMPTY}}, "sm_90a"),
        ({"sass": {"sm_86": EMPTY, "sm_90a": {"require": []}}}, "forbid"),
        ({"sass": {"sm_86": EMPTY, "sm_90a": {"require": ["ldl"], "forbid": []}}}, "'ldl'"),
        ({"threads": {"k": 0}}, "threads of k is 0"),
        ({"threads": {"k": 1025}}, "1..1024"),
        ({"threads": {"k": True}}, "True"),
    ],
)
def test_sidecars_are_closed(tmp_path, changes, says):
    with pytest.raises(BuildError, match=says):
        write(tmp_path, "k", SPILLING, {"spill": 32}, **changes)


def test_a_pair_without_its_half_and_a_key_twice_are_refused(tmp_path):
    write(tmp_path, "k", SPILLING, {"spill": 32})
    assert list(build.load_sources(tmp_path)) == ["k"]
    sidecar = (tmp_path / "k.json").read_text()
    (tmp_path / "k.json").write_text(sidecar.replace('"role"', '"role": "floor", "role"'))
    with pytest.raises(BuildError, match="occurs twice"):
        build.load_sources(tmp_path)
    (tmp_path / "k.json").unlink()
    with pytest.raises(BuildError, match="k.json is missing"):
        build.load_sources(tmp_path)
    (tmp_path / "k.cu").rename(tmp_path / "k.txt")
    (tmp_path / "k.json").write_text(sidecar)
    with pytest.raises(BuildError, match="k.cu is missing"):
        build.load_sources(tmp_path)


def test_records_are_closed_and_read_back(tmp_path):
    record = compile_in(simple(tmp_path), "sm_86", tmp_path / "out")
    value = record.to_json()
    assert BuildRecord.from_json(json.loads(json.dumps(value))) == record
    for bad, says in [
        (value | {"x": 1}, "unknown"),
        ({k: v for k, v in value.items() if k != "flags"}, "missing"),
        (value | {"schema_version": 2}, "schema_version 2"),
        (value | {"entries": [value["entries"][0] | {"x": 1}]}, "entry"),
        ([], "list"),
    ]:
        with pytest.raises(BuildError, match=says):
            BuildRecord.from_json(bad)


REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for helper
    999 bytes stack frame, 888 bytes spill stores, 777 bytes spill loads
ptxas info    : Function properties for k
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 2 barriers, 160 bytes cumulative stack size, 256 bytes smem
"""


def test_resource_report_is_read_for_the_entry_itself():
    assert build.parse_resource_usage(REPORT) == {
        "k": {
            "registers": 40,
            "barriers": 2,
            "stack_bytes": 160,
            "spill_store_bytes": 8,
            "spill_load_bytes": 12,
            "smem_static_bytes": 256,
        }
    }
    with pytest.raises(BuildError, match="report of k is incomplete"):
        build.parse_resource_usage(REPORT.replace("Used 40 registers", "Took 40 registers"))


@pytest.fixture
def fresh_tools():
    build.find_tool.cache_clear()
    yield
    build.find_tool.cache_clear()


def test_tools_are_found_in_order_and_missing_ones_say_what_to_do(
    tmp_path, monkeypatch, fresh_tools
):
    for folder in ("cuda/bin", "path"):
        (tmp_path / folder).mkdir(parents=True)
        tool = tmp_path / folder / "cuobjdump"
        tool.write_text("#!/bin/sh\n")
        tool.chmod(0o755)
    from cuda import pathfinder

    assert shutil.which("cuobjdump") != str(build.find_tool("cuobjdump"))
    build.find_tool.cache_clear()
    monkeypatch.setattr(pathfinder, "find_nvidia_binary_utility", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert build.find_tool("cuobjdump") == tmp_path / "cuda/bin/cuobjdump"
    build.find_tool.cache_clear()
    monkeypatch.delenv("CUDA_HOME")
    assert build.find_tool("cuobjdump") == tmp_path / "path/cuobjdump"
    with pytest.raises(BuildError, match="nvcc not found.*requirements.txt"):
        build.find_tool("nvcc")


def test_without_a_host_compiler_the_error_says_so(tmp_path, monkeypatch):
    source = simple(tmp_path)
    build.nvcc_version()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="host C\\+\\+ compiler"):
        compile_in(source, "sm_90a", tmp_path / "out")


@pytest.mark.parametrize("arch", build.ARCHITECTURES)
def test_every_source_of_the_project_builds_and_keeps_its_promises(tmp_path, arch):
    from lab import sass

    sources = [s for s in build.load_sources().values() if arch in s.architectures]
    assert sources
    for source in sources:
        record = build.compile_cubin(source, arch, tmp_path)
        assert sass.check_cubin(source, arch, tmp_path / arch / record.cubin) == []
