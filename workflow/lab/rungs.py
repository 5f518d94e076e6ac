"""The rungs, in order: what each is for, its parts, and what has to exist before it can be measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KERNELS = Path("kernels", "qgemm_mx", "cuda")
# The decoder came with the first two kernels, and is in the proof of theirs alone: a later kernel is its own source.
_FORMATS = f"{KERNELS}/formats*.cuh"
# 4-bit kernels and what they are made of (globs): blind claims about a kernel precede the first commit of each file.
KERNEL_SOURCES: dict[str, tuple[str, ...]] = {
    "reference": (f"{KERNELS}/reference.cu", _FORMATS),
    "naive_dequant": (f"{KERNELS}/naive_dequant.cu", _FORMATS),
    "testbed": (f"{KERNELS}/testbed*.cu", f"{KERNELS}/testbed.cuh"),
    "qgemv_mx": (
        f"{KERNELS}/qgemv_mx.cu",
        f"{KERNELS}/qgemv_mx.cuh",
        f"{KERNELS}/qgemv_ablations.cu",
        f"{KERNELS}/pack_gemv.cu",
    ),
    "qgemm_mx": (f"{KERNELS}/qgemm_mx.cu", f"{KERNELS}/qgemm_*.cu*", f"{KERNELS}/pack_gemm*.cu"),
    "linear": (f"{KERNELS}/qgemv_mx.cu", f"{KERNELS}/qgemm_mx.cu"),
    "grouped": (f"{KERNELS}/*grouped*.cu",),
}
# What measures, and decodes nothing: no claim about a 4-bit kernel waits for it.
INSTRUMENT_SOURCES = tuple(
    f"{KERNELS}/{name}" for name in ("harness.cu", "stream_read.cu", "ptx_*.cuh")
)
#: Parts of a rung that are campaigns of their own, with a protocol of their own. Any other rung is its only part.
PARTS = {"R2b": "R2"}


def rung_of(part: str) -> str:
    """The rung that a campaign's part belongs to: claims and the report know rungs alone."""
    return PARTS.get(part, part)


def source_of(kernel: str) -> str:
    """The glob of a kernel's own source, the first of its list."""
    return KERNEL_SOURCES[kernel][0]


class NotMeasured(RuntimeError):
    """A rung was asked for that has no result yet; the message says what it lacks."""


@dataclass(frozen=True)
class Rung:
    """One rung. `needs` maps a file that must exist (a glob from the repository's root) to what it is."""

    id: str
    target: str
    title: str
    needs: dict[str, str]


RUNGS = (
    Rung(
        "R0",
        "r0_instrument",
        "the instrument: harness, formats, baselines, floor, reference kernel",
        {"data/campaigns/r0-*/campaign.json": "an R0 campaign"},
    ),
    Rung(
        "R1",
        "r1_decomposition",
        "where the Hopper FP4 throughput goes: the gap of the production path split into causes",
        {
            source_of("testbed"): "the testbed kernel with its factor variants (testbed/<variant>)",
            "workflow/lab/peers/*.py": "the adaptors of the production kernels (peer/<name>)",
            "data/campaigns/r1-*/campaign.json": "an R1 campaign",
        },
    ),
    Rung(
        "R2",
        "r2_kernel",
        "the kernels: qgemv_mx for decode, qgemm_mx from M = 16 to prefill",
        {
            source_of("qgemv_mx"): "the decode kernel qgemv_mx",
            source_of("qgemm_mx"): "the wgmma/TMA kernel qgemm_mx",
            "data/campaigns/r2-*/campaign.json": "an R2 campaign",
            "data/campaigns/r2b-*/campaign.json": "an R2b campaign (from M = 16 to prefill)",
        },
    ),
    Rung(
        "R3",
        "r3_moe_dsl",
        "the grouped (MoE) variant with routing skew, and the same kernel in DSLs",
        {
            source_of("grouped"): "the grouped kernel",
            "workflow/lab/dsl/*.py": "the DSL twins of the kernel",
            "data/campaigns/r3-*/campaign.json": "an R3 campaign",
        },
    ),
)


def rung(rung_id: str) -> Rung:
    """The rung with that id. Raises KeyError."""
    return {r.id: r for r in RUNGS}[rung_id]


def missing(rung_id: str, repo: str | Path) -> list[str]:
    """What a rung still lacks, in words; empty when nothing."""
    repo = Path(repo)
    return [what for glob, what in rung(rung_id).needs.items() if not any(repo.glob(glob))]


def require(rung_id: str, repo: str | Path) -> None:
    """Raise NotMeasured, with what it lacks, for a rung that has no result yet."""
    if lacking := missing(rung_id, repo):
        raise NotMeasured(
            f"{rung_id} has not been measured ({rung(rung_id).title}). Missing: {'; '.join(lacking)}."
        )
