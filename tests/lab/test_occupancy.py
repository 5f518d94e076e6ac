"""Occupancy: hand-computed cases, and NVIDIA's own calculator over a few thousand launches."""

from __future__ import annotations

import itertools
import subprocess

import pytest

from lab import occupancy
from lab.occupancy import COLUMNS
from qgemm_mx.build import BuildRecord, EntryRecord, find_tool

KIB = 1024


@pytest.mark.parametrize(
    ("arch", "registers", "threads", "smem", "barriers", "blocks", "limiter"),
    [
        # 1024 threads are 32 warps: 48 warps hold one block, 64 hold two.
        ("sm_86", 32, 1024, 0, 0, 1, "threads"),
        ("sm_90", 32, 1024, 0, 0, 2, "threads+registers"),
        # 256 threads, 32 registers: 8 warps a block; 48/8 = 6, 64/8 = 8 = 65536/(32*256).
        ("sm_86", 32, 256, 0, 0, 6, "threads"),
        ("sm_90a", 32, 256, 0, 0, 8, "threads+registers"),
        # 168 registers: 5376 a warp; a sub-partition holds 16384/5376 = 3 warps, the SM 12: 3 blocks of 4.
        ("sm_90", 168, 128, 0, 0, 3, "registers"),
        # 65 registers: 2080 a warp rounds up to 2304; 16384/2304 = 7, times 4 = 28 warps: 7 blocks of 4.
        ("sm_86", 65, 128, 0, 0, 7, "registers"),
        # 255 registers, 1024 threads: 8160 -> 8192 a warp, 32 warps are 262144 registers: cannot run.
        ("sm_90", 255, 1024, 0, 0, 0, "registers"),
        # 384 threads at 168 registers: 12 warps of 5376 = 64512 registers fit once (FlashAttention-3's shape).
        ("sm_90", 168, 384, 0, 0, 1, "registers"),
        # One warp a block: the block limit rules.
        ("sm_86", 16, 32, 0, 0, 16, "blocks"),
        ("sm_90", 16, 32, 0, 0, 32, "blocks"),
        # 1 KiB a block is reserved: 100/(49+1) = 2, 228/(113+1) = 2, one byte more and only one fits.
        ("sm_86", 32, 128, 49 * KIB, 0, 2, "shared_memory"),
        ("sm_86", 32, 128, 49 * KIB + 1, 0, 1, "shared_memory"),
        ("sm_90", 32, 128, 113 * KIB, 0, 2, "shared_memory"),
        ("sm_90", 32, 128, 113 * KIB + 1, 0, 1, "shared_memory"),
        ("sm_86", 32, 128, 99 * KIB, 0, 1, "shared_memory"),
        ("sm_86", 32, 128, 99 * KIB + 1, 0, 0, "shared_memory"),
        ("sm_90", 32, 128, 227 * KIB, 0, 1, "shared_memory"),
        ("sm_90", 32, 128, 227 * KIB + 1, 0, 0, "shared_memory"),
        # 64 named barriers on Hopper: 16 a block leave four blocks.
        ("sm_90", 32, 32, 0, 16, 4, "barriers"),
        ("sm_86", 32, 32, 0, 16, 16, "blocks"),
    ],
)
def test_hand_computed(arch, registers, threads, smem, barriers, blocks, limiter):
    found = occupancy.occupancy(arch, registers, threads, smem, barriers)
    assert (found.blocks_per_sm, found.limiter) == (blocks, limiter)
    warps = -(-threads // 32)
    assert found.warps_per_sm == blocks * warps
    assert found.fraction == blocks * warps / {"sm_86": 48}.get(arch, 64)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("sm_100", 32, 128, 0), "sm_100"),
        (("sm_90", 32, 0, 0), "threads_per_block=0"),
        (("sm_90", 32, 1025, 0), "threads_per_block=1025"),
        (("sm_90", -1, 128, 0), "negative"),
    ],
)
def test_impossible_launches_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        occupancy.occupancy(*arguments)


CALCULATOR = r"""
#include <climits>
#include <cstddef>
#include <cstdio>
#include <cuda_occupancy.h>
int main() {
  int minor, regs, threads, smem, barriers, major;
  while (std::scanf("%d %d %d %d %d %d", &major, &minor, &regs, &threads, &smem, &barriers) == 6) {
    const bool hopper = major == 9;
    cudaOccDeviceProp p;
    p.computeMajor = major; p.computeMinor = minor; p.maxThreadsPerBlock = 1024;
    p.maxThreadsPerMultiprocessor = hopper ? 2048 : 1536;
    p.regsPerBlock = p.regsPerMultiprocessor = 65536; p.warpSize = 32; p.sharedMemPerBlock = 48 << 10;
    p.sharedMemPerMultiprocessor = (hopper ? 228 : 100) << 10; p.numSms = 1;
    p.sharedMemPerBlockOptin = (hopper ? 227 : 99) << 10; p.reservedSharedMemPerBlock = 1024;
    cudaOccFuncAttributes a;
    a.maxThreadsPerBlock = INT_MAX; a.numRegs = regs; a.sharedSizeBytes = 0;
    a.partitionedGCConfig = PARTITIONED_GC_OFF; a.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    a.maxDynamicSharedSizeBytes = smem; a.numBlockBarriers = barriers; a.virtualResourceCount = 0;
    cudaOccDeviceState s; s.cacheConfig = CACHE_PREFER_NONE; s.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
    cudaOccResult r;
    cudaOccError e = cudaOccMaxActiveBlocksPerMultiprocessor(&r, &p, &a, &s, threads, smem);
    std::printf("%d\n", e == CUDA_OCC_SUCCESS ? r.activeBlocksPerMultiprocessor : -int(e));
  }
}
"""


def test_agrees_with_nvidias_calculator(tmp_path):
    source = tmp_path / "calculator.cpp"
    source.write_text(CALCULATOR)
    include = find_tool("nvcc").resolve().parents[1] / "include"
    program = tmp_path / "calculator"
    subprocess.run(["g++", "-w", f"-I{include}", str(source), "-o", str(program)], check=True)
    launches = [
        launch
        for launch in itertools.product(
            ("sm_86", "sm_90"),
            (0, 1, 16, 24, 32, 33, 40, 63, 64, 65, 80, 96, 127, 128, 168, 240, 255),
            (1, 32, 33, 64, 96, 128, 160, 256, 384, 512, 736, 1024),
            (
                0,
                1,
                1000,
                4096,
                20000,
                48 * KIB,
                99 * KIB,
                99 * KIB + 1,
                113 * KIB,
                227 * KIB,
                227 * KIB + 1,
            ),
            (0, 1, 3, 16),
        )
        # The calculator refuses a block that asks for more than the architecture can give; so do we, with 0.
    ]
    asked = "\n".join(f"{a[3]} {a[4]} {' '.join(map(str, rest))}" for a, *rest in launches)
    said = subprocess.run([str(program)], input=asked, capture_output=True, text=True, check=True)
    theirs = [int(line) for line in said.stdout.split()]
    assert len(theirs) == len(launches) and max(theirs) == 32
    ours = [occupancy.occupancy(*launch).blocks_per_sm for launch in launches]
    different = [
        (x, a, b) for x, a, b in zip(launches, ours, theirs, strict=True) if a != max(b, 0)
    ]
    assert different == []


def record(arch="sm_90a") -> BuildRecord:
    entry = EntryRecord("k", 256, 32, 1, 0, 4, 8, 1024)
    return BuildRecord(
        1, "k", "helper", arch, "13.0.88", (), "0" * 64, "k.cubin", "1" * 64, 10, (entry,)
    )


def test_table_has_a_row_per_launch_and_uses_the_declared_block_size_otherwise():
    table = occupancy.table([record("sm_86"), record()], {})
    assert list(table.columns) == list(COLUMNS)
    assert table[
        ["arch", "threads", "smem_static_bytes", "spill_bytes", "blocks_per_sm"]
    ].values.tolist() == [
        ["sm_86", 256, 1024, 12, 6],
        ["sm_90a", 256, 1024, 12, 8],
    ]
    table = occupancy.table([record()], {"k": [(128, 0), (128, 100 * KIB)]})
    assert table[
        ["threads", "smem_static_bytes", "smem_dynamic_bytes", "blocks_per_sm"]
    ].values.tolist() == [
        [128, 1024, 0, 16],
        [128, 1024, 100 * KIB, 2],
    ]
    assert list(occupancy.table([]).columns) == list(COLUMNS)


def test_comparison_with_the_driver_names_each_difference():
    table = occupancy.table([record()])
    key = ("k", "sm_90a", 256, 0)
    assert occupancy.compare(table, {key: 8}) == []
    (wrong,) = occupancy.compare(table, {key: 7})
    assert "k (sm_90a, 256 threads" in wrong and "computed 8" in wrong and "says 7" in wrong
    assert len(occupancy.compare(table, {})) == 1
    assert len(occupancy.compare(table, {key: 8, ("other", "sm_90a", 32, 0): 1})) == 1
