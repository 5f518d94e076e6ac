"""humming-kernels with FP8 activations that are there already: the product alone is timed.

MXFP4 only: humming refuses groups of fewer than 32 weights with 8-bit activations (is_humming_schema_compatible).
"""

from __future__ import annotations

from typing import Any

from lab.operands import WeightCopies
from lab.peers import _humming
from lab.peers._humming import available, describe, unsupported, warm
from lab.peers._interface import Candidate

NAME = "peer/humming_fp8"
requires = _humming.REQUIRES
formats = ("mxfp4",)
activations = "fp8"


def prepare(weights: WeightCopies, copies: int) -> _humming.Handle:
    """Weights in humming's layout for E4M3 activations: the group scales are fused into the elements."""
    return _humming.prepare(weights, copies, "float8e4m3")


def bind(handle: _humming.Handle, x: Any, y: Any, stream: Any, budget: int) -> list[Candidate]:
    """E4M3 codes in, BF16 out."""
    return _humming.bind(handle, x, y, stream, budget)


__all__ = [
    "NAME", "activations", "available", "bind", "describe", "formats", "prepare", "requires", "unsupported",
    "warm",
]  # fmt: skip
