"""SASS facts: counts are of real instructions, and a promise that does not hold is named."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from lab import sass
from qgemm_mx import build

TEXT = """
	code for sm_90a
		Function : first
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;             /* 0x00000a00ff017b82 */
                                                                      /* 0x000e220000000800 */
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;   /* 0x000 */
        /*0020*/              @UP1 UBLKCP.S.G [UR4], [UR6], UR8 ;     /* 0x000 */
        /*0030*/             @!UPT UIADD3 UR4, UR4, UR4, URZ ;        /* 0x000 */
        /*0040*/                   LDG.E R4, desc[UR4][R2.64] ;       /* 0x000 */
        /*1fff0*/                  EXIT ;                             /* 0x000 */
		Function : second
        /*0000*/                   STL [R1], R2 ;                     /* 0x000 */
"""


def test_opcodes_are_counted_per_function_with_and_without_predicates():
    counts = sass.opcode_counts(TEXT)
    assert counts == {
        "first": Counter(
            {"LDC": 1, "LDG.E.128": 1, "UBLKCP.S.G": 1, "UIADD3": 1, "LDG.E": 1, "EXIT": 1}
        ),
        "second": Counter({"STL": 1}),
    }
    assert sass.count(counts["first"], "LDG") == 2
    assert sass.count(counts["first"], "LDG.E") == 2
    assert sass.count(counts["first"], "LDG.E.128") == 1
    assert sass.count(counts["first"], "LD") == 0


@pytest.mark.parametrize(
    "text", ["", "code for sm_90a", "\t\tFunction : k\n", TEXT + "\t\tFunction : k\n"]
)
def test_a_text_that_is_not_understood_is_an_error_not_a_zero(text):
    with pytest.raises(sass.SassError):
        sass.opcode_counts(text)


def _source(
    tmp_path,
    require,
    forbid,
    text='extern "C" __global__ void k(float* x) { x[threadIdx.x] += 1; }',
):
    facts = {"require": require, "forbid": forbid}
    sidecar = {
        "name": "k",
        "role": "helper",
        "description": "made for a test",
        "architectures": ["sm_86", "sm_90a"],
        "threads": {"k": 32},
        "sass": {"sm_86": facts, "sm_90a": facts},
    }
    (tmp_path / "k.cu").write_text(text)
    (tmp_path / "k.json").write_text(json.dumps(sidecar))
    return build.load_source(tmp_path / "k.cu")


def test_broken_promises_name_kernel_architecture_opcode_and_function(tmp_path):
    source = _source(tmp_path, ["UBLKCP", "HGMMA"], ["STL", "LDL"])
    assert sass.check(source, "sm_90a", sass.opcode_counts(TEXT)) == [
        "k (sm_90a) promises HGMMA, but no entry function has it",
        "k (sm_90a) forbids STL, but second has 1",
    ]


@pytest.mark.parametrize("arch", build.ARCHITECTURES)
def test_facts_of_a_real_cubin(tmp_path, arch):
    source = _source(tmp_path, ["LDG", "STG", "FADD", "EXIT"], ["STL", "LDL", "HGMMA"])
    record = build.compile_cubin(source, arch, tmp_path / "out", include_dir=tmp_path)
    cubin = tmp_path / "out" / arch / record.cubin
    assert sass.check_cubin(source, arch, cubin) == []
    wrong = _source(tmp_path, ["HGMMA"], ["FADD"])
    problems = sass.check_cubin(wrong, arch, cubin)
    assert len(problems) == 2 and all(f"k ({arch})" in text for text in problems)


def test_local_memory_is_found(tmp_path):
    text = """extern "C" __global__ void k(float* x, int n) {
      float v[40];
      for (int i = 0; i < 40; ++i) v[i] = x[i * n];
      for (int i = 0; i < n; ++i) x[i] = v[(int)x[i] % 40];
    }"""
    source = _source(tmp_path, [], ["LDL", "STL"], text)
    record = build.compile_cubin(source, "sm_90a", tmp_path / "out", include_dir=tmp_path)
    problems = sass.check_cubin(source, "sm_90a", tmp_path / "out/sm_90a" / record.cubin)
    assert [p.split(",")[0] for p in problems] == [
        "k (sm_90a) forbids LDL",
        "k (sm_90a) forbids STL",
    ]


def test_a_file_that_is_no_cubin_is_an_error(tmp_path):
    (tmp_path / "x.cubin").write_bytes(b"no ELF")
    with pytest.raises(sass.SassError, match="x.cubin"):
        sass.opcode_counts(sass.disassemble(tmp_path / "x.cubin"))
