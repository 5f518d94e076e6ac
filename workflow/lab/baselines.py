"""How the kernels of R0 ran: operands, accumulation, scaling, tuning and workspace, one row a kernel.

What a kernel computes is fixed in its code (lab.cublaslt, lab.arms, lab.fp4_arms and the CUDA sources); budgets come
from the frozen protocol, and the numbers of candidates from the cells of the campaign.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lab.page import BLANK, Row, Tables

KEYS = (
    "kernel",
    "weights",
    "activations",
    "output",
    "accumulation",
    "scaling",
    "budget",
    "workspace",
)
_MIB = 1 << 20


def table(kit: Tables, ordered: Sequence[Mapping], protocols: Mapping[str, Mapping]) -> dict:
    """The table for the newest campaign of R0 whose protocol is at hand, else none."""
    for campaign in reversed([c for c in ordered if c["rung"] == "R0"]):
        protocol = protocols.get(campaign["protocol_sha256"])
        if protocol is not None:
            rows = _rows(protocol, campaign["cells"])
            return kit.table(KEYS, rows, f"Kernels as measured in {campaign['id']}", "")
    return kit.table(KEYS, [], "", "No campaign with a known protocol has been recorded yet.")


def _tried(cells: Sequence[Mapping], kernel: str) -> str:
    """How many candidates a kernel had, over its cells."""
    counts = [c["tuning"]["candidates"] for c in cells if c["kernel"] == kernel and c.get("tuning")]
    if not counts:
        return ""
    low, high = min(counts), max(counts)
    return f"; {low} tried" if low == high else f"; {low} to {high} tried"


def _rows(protocol: Mapping, cells: Sequence[Mapping]) -> list[Row]:
    lt = protocol["cublaslt"]
    workspace = f"{lt['workspace_bytes'] / _MIB:g} MiB"
    fast = "on" if lt["fp8_fast_accumulation"] else "off"

    def library_budget(kernel: str) -> str:
        return (
            f"up to {lt['requested_candidates']} candidates of the heuristic a point{_tried(cells, kernel)}; "
            f"{lt['select']}"
        )

    return [
        {
            "kernel": "cublaslt_bf16",
            "weights": "BF16",
            "activations": "BF16",
            "output": "BF16",
            "accumulation": "FP32",
            "scaling": "none",
            "budget": library_budget("cublaslt_bf16"),
            "workspace": workspace,
        },
        {
            "kernel": "cublaslt_fp8",
            "weights": "FP8 E4M3",
            "activations": "FP8 E4M3",
            "output": "BF16",
            "accumulation": f"FP32, fast accumulation {fast}",
            "scaling": "one scale per tensor: weights and activations",
            "budget": library_budget("cublaslt_fp8"),
            "workspace": workspace,
        },
        {
            "kernel": "naive_dequant",
            "weights": "4 bits, written out as BF16 in every call",
            "activations": "BF16",
            "output": "BF16",
            "accumulation": "FP32",
            "scaling": "group scales in the write-out, tensor scale after the product",
            "budget": "none of its own: the choice of cublaslt_bf16 at the same point",
            "workspace": f"{workspace}, and 2 bytes a weight for the BF16 copy",
        },
        {
            "kernel": "stream_read",
            "weights": "the bytes of any format, not decoded",
            "activations": BLANK,
            "output": "none",
            "accumulation": BLANK,
            "scaling": BLANK,
            "budget": f"a grid of launch shapes for each size{_tried(cells, 'stream_read')}; "
            f"{protocol['stream']['select']}",
            "workspace": "none",
        },
        {
            "kernel": "reference",
            "weights": "4 bits",
            "activations": "BF16",
            "output": "FP32",
            "accumulation": "FP32, one product after the other, no tensor cores",
            "scaling": "group scale on each weight, tensor scale last",
            "budget": "none: never timed",
            "workspace": "none",
        },
    ]
