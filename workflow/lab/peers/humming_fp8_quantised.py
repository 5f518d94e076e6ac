"""humming-kernels with FP8 activations that every call makes from BF16 first: what a layer pays."""

from __future__ import annotations

from typing import Any

from lab.peers import _humming
from lab.peers._humming import available, describe, unsupported, warm
from lab.peers._interface import Candidate
from lab.peers.humming_fp8 import formats, prepare

NAME = "peer/humming_fp8_quantised"
requires = _humming.REQUIRES
activations = "bf16"


def bind(handle: _humming.Handle, x: Any, y: Any, stream: Any, budget: int) -> list[Candidate]:
    """BF16 in, humming's own quantiser (one scale a row), E4M3 product, BF16 out: two kernels a call."""
    return _humming.bind(handle, x, y, stream, budget, quantise=True)


__all__ = [
    "NAME", "activations", "available", "bind", "describe", "formats", "prepare", "requires", "unsupported",
    "warm",
]  # fmt: skip
