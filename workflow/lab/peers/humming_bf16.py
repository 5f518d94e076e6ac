"""humming-kernels with BF16 activations: vLLM's first choice for FP4 weights on Hopper."""

from __future__ import annotations

from typing import Any

from lab.operands import WeightCopies
from lab.peers import _humming
from lab.peers._humming import available, describe, unsupported, warm
from lab.peers._interface import Candidate

NAME = "peer/humming_bf16"
requires = _humming.REQUIRES
formats = ("mxfp4", "nvfp4")
activations = "bf16"


def prepare(weights: WeightCopies, copies: int) -> _humming.Handle:
    """Weights in humming's layout for BF16 activations."""
    return _humming.prepare(weights, copies, "bfloat16")


def bind(handle: _humming.Handle, x: Any, y: Any, stream: Any, budget: int) -> list[Candidate]:
    """BF16 in, BF16 out."""
    return _humming.bind(handle, x, y, stream, budget)


__all__ = [
    "NAME", "activations", "available", "bind", "describe", "formats", "prepare", "requires", "unsupported",
    "warm",
]  # fmt: skip
