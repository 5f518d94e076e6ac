"""Theoretical occupancy of a launch from what the compiler reports: no device is asked.

Limits: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability" (8.6 and
9.0). Allocation rules: NVIDIA's own calculator, cuda_occupancy.h of the CUDA toolkit (a test compiles
it and compares). Shared memory is taken at the largest carve-out, which the driver chooses by default
when occupancy needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pandas as pd

from qgemm_mx.build import BuildRecord

WARP = 32
KIB = 1024
COLUMNS = (
    "kernel", "entry", "arch", "threads", "registers", "spill_bytes", "smem_static_bytes", "smem_dynamic_bytes",
    "blocks_per_sm", "warps_per_sm", "occupancy", "limiter",
)  # fmt: skip


@dataclass(frozen=True)
class SmLimits:
    """What one multiprocessor (SM) offers. Registers are 32-bit; shared memory is in bytes."""

    warps: int
    blocks: int
    smem_bytes: int
    smem_per_block_bytes: int
    barriers: int | None
    registers: int = 65536
    registers_per_thread: int = 255
    sub_partitions: int = 4
    registers_per_warp_step: int = 256
    smem_step_bytes: int = 128
    smem_reserved_per_block_bytes: int = 1 * KIB


SM = {
    # The calculator counts named barriers from Hopper onwards only: two per resident block.
    "sm_86": SmLimits(
        warps=48, blocks=16, smem_bytes=100 * KIB, smem_per_block_bytes=99 * KIB, barriers=None
    ),
    "sm_90": SmLimits(
        warps=64, blocks=32, smem_bytes=228 * KIB, smem_per_block_bytes=227 * KIB, barriers=64
    ),
}


@dataclass(frozen=True)
class Occupancy:
    """Resident blocks and warps of one SM; `limiter` names every resource that sets the number, joined by `+`."""

    blocks_per_sm: int
    warps_per_sm: int
    fraction: float
    limiter: str


def occupancy(
    arch: str,
    registers_per_thread: int,
    threads_per_block: int,
    smem_bytes_per_block: int,
    barriers: int = 0,
) -> Occupancy:
    """Resident blocks per SM of `arch` (`sm_86`, `sm_90` or `sm_90a`) for one launch shape.

    `smem_bytes_per_block` is static plus dynamic. A launch that cannot run has 0 blocks and names what forbids it.
    Raises ValueError for an unknown architecture and for a block size outside 1..1024.
    """
    sm = SM.get(arch.removesuffix("a"))
    if sm is None:
        raise ValueError(f"no occupancy limits for architecture {arch!r}; known: {', '.join(SM)}")
    if not 1 <= threads_per_block <= 1024:
        raise ValueError(f"threads_per_block={threads_per_block} is outside 1..1024")
    if min(registers_per_thread, smem_bytes_per_block, barriers) < 0:
        raise ValueError("registers, shared memory and barriers cannot be negative")

    warps = _up(threads_per_block, WARP) // WARP
    limits = {
        "threads": sm.warps // warps,
        "blocks": sm.blocks,
        "registers": _register_limit(sm, registers_per_thread, warps),
        "shared_memory": _smem_limit(sm, smem_bytes_per_block),
    }
    if sm.barriers is not None and barriers:
        limits["barriers"] = sm.barriers // barriers
    blocks = min(limits.values())
    return Occupancy(
        blocks_per_sm=blocks,
        warps_per_sm=blocks * warps,
        fraction=blocks * warps / sm.warps,
        limiter="+".join(name for name, limit in limits.items() if limit == blocks),
    )


def table(
    records: Iterable[BuildRecord],
    launches: Mapping[str, Iterable[tuple[int, int]]] | None = None,
) -> pd.DataFrame:
    """One row per entry function and launch shape: the occupancy table.

    `launches` maps an entry to (threads per block, dynamic shared memory in bytes) pairs; an entry
    that it does not name gets its declared block size with no dynamic shared memory. Columns: kernel,
    entry, arch, threads, registers, spill_bytes, smem_static_bytes,
    smem_dynamic_bytes, blocks_per_sm, warps_per_sm, occupancy (0..1), limiter.
    """
    launches = launches or {}
    rows = []
    for record in records:
        for e in record.entries:
            for threads, dynamic in launches.get(e.entry, [(e.threads, 0)]):
                found = occupancy(
                    record.architecture,
                    e.registers,
                    threads,
                    e.smem_static_bytes + dynamic,
                    e.barriers,
                )
                rows.append(
                    {
                        "kernel": record.name,
                        "entry": e.entry,
                        "arch": record.architecture,
                        "threads": threads,
                        "registers": e.registers,
                        "spill_bytes": e.spill_store_bytes + e.spill_load_bytes,
                        "smem_static_bytes": e.smem_static_bytes,
                        "smem_dynamic_bytes": dynamic,
                        "blocks_per_sm": found.blocks_per_sm,
                        "warps_per_sm": found.warps_per_sm,
                        "occupancy": found.fraction,
                        "limiter": found.limiter,
                    }
                )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def compare(
    computed: pd.DataFrame, driver_blocks: Mapping[tuple[str, str, int, int], int]
) -> list[str]:
    """Differences between `table` and the driver's own answer, one sentence each; empty when they agree.

    `driver_blocks` maps (entry, arch, threads, dynamic shared memory bytes) to
    cuOccupancyMaxActiveBlocksPerMultiprocessor of that function. A launch that only one side knows is a difference.
    """
    keys = ["entry", "arch", "threads", "smem_dynamic_bytes"]
    ours = {
        tuple(row[:4]): row[4] for row in computed[[*keys, "blocks_per_sm"]].itertuples(index=False)
    }
    problems = []
    for key in sorted(ours.keys() | driver_blocks.keys()):
        entry, arch, threads, dynamic = key
        mine, theirs = ours.get(key), driver_blocks.get(key)
        if mine != theirs:
            problems.append(
                f"{entry} ({arch}, {threads} threads, {dynamic} B dynamic shared memory): "
                f"computed {mine} blocks per SM, the driver says {theirs}"
            )
    return problems


def _register_limit(sm: SmLimits, registers_per_thread: int, warps: int) -> int:
    if registers_per_thread > sm.registers_per_thread:
        return 0
    if registers_per_thread == 0:
        return sm.blocks
    per_warp = _up(registers_per_thread * WARP, sm.registers_per_warp_step)
    # The launch check assumes that a block's warps fill all sub-partitions evenly.
    if per_warp * _up(warps, sm.sub_partitions) > sm.registers:
        return 0
    warps_per_sub_partition = sm.registers // sm.sub_partitions // per_warp
    return warps_per_sub_partition * sm.sub_partitions // warps


def _smem_limit(sm: SmLimits, smem_bytes: int) -> int:
    if smem_bytes > sm.smem_per_block_bytes:
        return 0
    per_block = _up(smem_bytes + sm.smem_reserved_per_block_bytes, sm.smem_step_bytes)
    return sm.smem_bytes // per_block


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
