"""The rungs, in order: what each is for, and what has to exist before it can be measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KERNELS = Path("kernels", "qgemm_mx", "cuda")


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
            f"{KERNELS}/testbed*.cu": "the testbed kernel with its factor variants (testbed/<variant>)",
            "workflow/lab/peers/*.py": "the adaptors of the production kernels (peer/<name>)",
            "data/campaigns/r1-*/campaign.json": "an R1 campaign",
        },
    ),
    Rung(
        "R2",
        "r2_kernel",
        "the kernels: qgemv_mx for decode, qgemm_mx from M = 16 to prefill",
        {
            f"{KERNELS}/qgemv_mx.cu": "the decode kernel qgemv_mx",
            f"{KERNELS}/qgemm_mx.cu": "the wgmma/TMA kernel qgemm_mx",
            "data/campaigns/r2-*/campaign.json": "an R2 campaign",
        },
    ),
    Rung(
        "R3",
        "r3_moe_dsl",
        "the grouped (MoE) variant with routing skew, and the same kernel in DSLs",
        {
            f"{KERNELS}/*grouped*.cu": "the grouped kernel",
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


def not_measured(rung_id: str, repo: str | Path) -> str | None:
    """One paragraph that says why a rung has no result, or None when it has what it needs."""
    lacking = missing(rung_id, repo)
    if not lacking:
        return None
    wanted = rung(rung_id)
    return f"{rung_id} has not been measured ({wanted.title}). Missing: {'; '.join(lacking)}."
