"""Instruction counts: of real instructions, of the loop that does the work, and of what an ablation changed."""

from __future__ import annotations

import subprocess
from collections import Counter

import pytest

from lab import sass_counts, schema
from lab.sass import SassError
from lab.sass_counts import count_entries, difference, loop_instructions_per_64_weights
from qgemm_mx.build import find_tool, flags_for


def listing(*lines: str, entry="k") -> str:
    """What cuobjdump prints: an instruction every 16 bytes, each with its encoding behind it."""
    code = "".join(
        f"        /*{16 * i:04x}*/  {line};   /* 0x000fc00000000f00 */\n"
        f"                                    /* 0x000fe20000000800 */\n"
        for i, line in enumerate(lines)
    )
    return f'\tcode for sm_90a\n\t\tFunction : {entry}\n\t.headerflags\t@"EF_CUDA_SM90"\n{code}\t\t..........\n'


def only(text: str) -> sass_counts.EntryCounts:
    (counts,) = count_entries(text).values()
    return counts


def test_counts_are_by_mnemonic_without_the_padding_at_the_end() -> None:
    text = listing(
        "LDC R1, c[0x0][0x28] ", "@!P0 LDG.E.128 R4, desc[UR4][R2.64] ", "@UP1 UMOV UR4, URZ ", "NOP ",
        "LDG.E R4, desc[UR4][R2.64] ", "EXIT ", "BRA 0x60", "NOP", "NOP",
    )  # fmt: skip
    found = only(text)
    assert found.opcodes == Counter({"LDC": 1, "LDG": 2, "UMOV": 1, "NOP": 1, "EXIT": 1})
    assert found.total == 6 and found.loop is None


def test_the_main_loop_holds_the_matrix_instructions() -> None:
    found = only(
        listing(
            "LDG.E R0, [R2] ",          # 00: a loop that loads, longer than the one with HMMA
            "IADD3 R0, R0, R1, RZ ",    # 10
            "IADD3 R0, R0, R1, RZ ",    # 20
            "IADD3 R0, R0, R1, RZ ",    # 30
            "@P0 BRA 0x0 ",             # 40
            "LDS R0, [R2] ",            # 50
            "HMMA.16816.F32.BF16 R4, R0, R2, R4 ",  # 60
            "@P0 BRA 0x50 ",            # 70
            "EXIT ",
        )
    )  # fmt: skip
    assert (found.loop.first, found.loop.last) == (0x50, 0x70)
    assert found.loop.opcodes == Counter({"LDS": 1, "HMMA": 1, "BRA": 1})


def test_without_matrix_instructions_the_largest_loop_that_loads_and_does_not_write() -> None:
    found = only(
        listing(
            "LDG.E R0, [R2] ",      # 00: main loop
            "LDG.E R1, [R2] ",      # 10
            "@P0 BRA 0x0 ",         # 20
            "LDS R0, [R2] ",        # 30: epilogue, longer, and it writes
            "FADD R0, R0, R1 ",     # 40
            "STG.E [R2], R0 ",      # 50
            "FADD R0, R0, R1 ",     # 60
            "@P0 BRA 0x30 ",        # 70
            "LDG.E.STRONG.GPU R0, [R2] ",  # 80: waits for another block
            "IADD3 R0, R0, R1, RZ ",
            "IADD3 R0, R0, R1, RZ ",
            "@P0 BRA 0x80 ",
            "EXIT ",
        )
    )  # fmt: skip
    assert (found.loop.first, found.loop.last) == (0x0, 0x20)


def test_a_loop_over_tiles_gives_way_to_the_one_within_and_a_copy_loop_does_not_take_over() -> None:
    found = only(
        listing(
            "IADD3 R9, R9, R1, RZ ",    # 00: over output tiles
            "LDGSTS.E [R0], [R2] ",     # 10: over K
            "LDGSTS.E [R0], [R2] ",     # 20: copies a stage
            "@P1 BRA 0x20 ",            # 30
            "HMMA.16816.F32.BF16 R4, R0, R2, R4 ",  # 40
            "@P0 BRA 0x10 ",            # 50
            "STG.E [R2], R4 ",          # 60
            "@P2 BRA 0x0 ",             # 70
            "EXIT ",
        )
    )  # fmt: skip
    assert (found.loop.first, found.loop.last, found.loop.total) == (0x10, 0x50, 5)


def test_where_k_is_unrolled_the_loop_over_tiles_is_taken() -> None:
    found = only(
        listing("HMMA.1688.F32 R4, R0, R2, R4 ", "STG.E [R2], R4 ", "@P2 BRA 0x0 ", "EXIT ")
    )
    assert found.loop.total == 3


def test_a_wait_out_of_line_belongs_to_the_loop_and_makes_none() -> None:
    found = only(
        listing(
            "LDS R0, [R2] ",        # 00
            "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R0], R1 ",  # 10
            "@!P0 BRA 0x70 ",       # 20: to the wait behind the end
            "HGMMA.64x8x16.F32.BF16 R4, R0, gdesc[UR4], R4 ",  # 30
            "@P1 BRA 0x0 ",         # 40
            "STG.E [R2], R4 ",      # 50
            "EXIT ",                # 60
            "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R0], R1 ",  # 70
            "@!P0 BRA 0x70 ",       # 80
            "BRA 0x30 ",            # 90: back, but no loop from 0x30 to 0x90
            "BRA 0xa0",
        )
    )  # fmt: skip
    assert found.loop.opcodes == Counter({"LDS": 1, "SYNCS": 2, "BRA": 4, "HGMMA": 1})
    assert found.opcodes["STG"] == 1
    assert found.loop.path_total == 8


def test_an_iteration_takes_one_side_of_a_branch_and_an_inner_loop_once() -> None:
    found = only(
        listing(
            "HMMA.16816.F32.BF16 R4, R0, R2, R4 ",  # 00
            "@P1 BRA 0x50 ",        # 10
            "LOP3.LUT R0, R0, R1 ", # 20: short side
            "@P2 BRA 0x20 ",        # 30: itself a loop
            "BRA 0x90 ",            # 40
            "HMUL2 R0, R0, R1 ",    # 50: long side
            "HMUL2 R0, R0, R1 ",    # 60
            "HMUL2 R0, R0, R1 ",    # 70
            "HMUL2 R0, R0, R1 ",    # 80
            "IADD3 R0, R0, R1, RZ ",  # 90
            "@P0 BRA 0x0 ",         # a0
            "EXIT ",
        )
    )  # fmt: skip
    assert found.loop.total == 11
    assert found.loop.path == Counter({"HMMA": 1, "BRA": 2, "HMUL2": 4, "IADD3": 1})
    shorter = only(
        listing(
            "HMMA.16816.F32.BF16 R4, R0, R2, R4 ", "LOP3.LUT R0, R0, R1 ", "@P2 BRA 0x10 ", "@P0 BRA 0x0 ", "EXIT ",
        )
    )  # fmt: skip
    assert shorter.loop.path == shorter.loop.opcodes == Counter({"HMMA": 1, "LOP3": 1, "BRA": 2})


def test_a_branch_over_distinct_values_of_a_warp_is_no_loop() -> None:
    found = only(
        listing("R2UR UR4, R0 ", "UBLKCP.S.G [UR4], [UR6], UR8 ", "@P0 BRA.U.ANY 0x0 ", "EXIT ")
    )
    assert found.loop is None


@pytest.mark.parametrize(
    "text",
    ["", "code for sm_90a", "\t\tFunction : k\n", listing("EXIT ") + "\t\tFunction : k2\n", listing("BRA `(.L_x_1) ")],
)  # fmt: skip
def test_a_text_that_is_not_understood_is_an_error_not_a_zero(text) -> None:
    with pytest.raises(SassError):
        count_entries(text)


# ---- what counts say ---------------------------------------------------------------------------------------------


def test_a_difference_names_what_was_not_meant() -> None:
    found = difference(
        {"HMMA": 8, "LOP3": 30, "IMAD": 5}, {"HMMA": 8, "LOP3": 6, "IMAD": 7, "PRMT": 1}
    )
    assert found.removed == Counter(LOP3=24) and found.added == Counter(IMAD=2, PRMT=1)
    assert found.beyond(["LOP3", "PRMT"]) == {"IMAD": 2}
    assert found.beyond([]) == {"IMAD": 2, "LOP3": -24, "PRMT": 1}
    assert difference({"HMMA": 8}, {"HMMA": 8}).beyond([]) == {}


def test_instructions_for_64_weights() -> None:
    assert loop_instructions_per_64_weights(826, 2048) == pytest.approx(25.8125)
    with pytest.raises(ValueError, match="weights_per_iteration=0"):
        loop_instructions_per_64_weights(826, 0)


PLACE = {"shape": "q_o_proj", "N": 4096, "K": 4096, "M": 1}


def test_rows_of_a_campaign() -> None:
    found = only(listing("LDG.E R0, [R2] ", "LDG.E R1, [R2] ", "@P0 BRA 0x0 ", "EXIT "))
    rows = sass_counts.counter_rows(found, "testbed/none", "mxfp4", PLACE, 64, "cuobjdump 13")
    schema.check_counters(rows)
    assert {row["metric"]: row["value"] for row in rows} == {
        "sass_LDG": 2, "sass_BRA": 1, "sass_EXIT": 1, "sass_total": 4, "sass_loop_total": 3,
        "loop_instructions_per_64_weights": 3,
    }  # fmt: skip
    assert {row["regime"] for row in rows} == {"cold_graph"}
    said = {row["metric"]: row["tool"] for row in rows}
    assert said["sass_LDG"] == said["sass_total"] == "cuobjdump 13; entry k"
    assert said["sass_loop_total"] == f"cuobjdump 13; entry k; {sass_counts.MAIN_LOOP_RULE}"


def test_what_is_not_known_has_no_row() -> None:
    loop, none = only(listing("LDG.E R0, [R2] ", "@P0 BRA 0x0 ", "EXIT ")), only(listing("EXIT "))
    names = [
        {row["metric"] for row in sass_counts.counter_rows(counts, "k", "mxfp4", PLACE, weights, "t")}
        for counts, weights in ((loop, None), (none, 64))
    ]  # fmt: skip
    assert names[0] == {"sass_LDG", "sass_BRA", "sass_EXIT", "sass_total", "sass_loop_total"}
    assert names[1] == {"sass_EXIT", "sass_total"}
    with pytest.raises(ValueError, match="keys"):
        sass_counts.counter_rows(loop, "k", "mxfp4", {**PLACE, "regime": "cold_graph"})


# ---- a real cubin ------------------------------------------------------------------------------------------------

SOURCE = r"""
#include <cstdint>
template <bool kDequant, bool kMatrix>
__device__ __forceinline__ void product(const uint4* w, const uint2* x, float* y, int steps) {
  const int lane = threadIdx.x & 31;
  float c[4] = {0, 0, 0, 0};
#pragma unroll 1
  for (int s = 0; s < steps; ++s) {
    const uint4 q = w[s * 32 + lane];
    const uint32_t words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = kDequant ? ((words[j] >> 4 * i) & 0x000f000f) | 0x43004300 : words[j];
      const uint2 b = x[(s * 4 + j) * 32 + lane];
      if constexpr (kMatrix) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
      } else {
        c[0] += __uint_as_float(a[0] ^ a[1] ^ a[2] ^ a[3] ^ b.x ^ b.y);
      }
    }
  }
  for (int i = 0; i < 4; ++i) y[lane * 4 + i] = c[i];
}
#define ENTRY(name, ...) extern "C" __global__ void name(const uint4* w, const uint2* x, float* y, int steps) { \
    product<__VA_ARGS__>(w, x, y, steps); }
ENTRY(full, true, true)
ENTRY(no_dequant, false, true)
ENTRY(no_matrix, true, false)
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cubin")
    (folder / "k.cu").write_text(SOURCE)
    command = [str(find_tool("nvcc")), *flags_for("sm_90a"), "k.cu", "-o", "k.cubin"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return sass_counts.count_cubin(folder / "k.cubin")


def test_the_loop_of_a_real_kernel(real) -> None:
    assert set(real) == {"full", "no_dequant", "no_matrix"}
    loop = real["full"].loop
    # One 16-byte load of weights, four of activations, and an mma for each of the four words.
    assert loop.opcodes["LDG"] == 5 and loop.opcodes["HMMA"] == 4
    assert loop.opcodes["STG"] == 0 and real["full"].opcodes["STG"] > 0
    assert loop.total < real["full"].total
    # A warp handles 32 lanes x 32 nibbles an iteration.
    assert loop.path == loop.opcodes
    assert loop_instructions_per_64_weights(loop.path_total, 1024) == loop.total / 16


def test_an_ablation_of_a_real_kernel_removes_what_was_meant(real) -> None:
    less = difference(real["full"].loop.opcodes, real["no_dequant"].loop.opcodes)
    # Four words, each with four masks, four ors and three shifts.
    assert less.removed["LOP3"] >= 16 and less.removed["SHF"] >= 12
    # A mma reads four consecutive registers, so equal ones are copied there.
    assert not set(less.beyond(["LOP3", "SHF"])) & {"HMMA", "LDG", "STG", "BRA"}
    other = difference(real["full"].opcodes, real["no_matrix"].opcodes)
    assert other.removed["HMMA"] == 4 and real["no_matrix"].loop.opcodes["LDG"] == 5


def test_the_tool_says_its_version() -> None:
    assert sass_counts.tool().startswith("cuobjdump 1")
