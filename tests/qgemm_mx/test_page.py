"""The example of the page that runs a weight on a GPU, as far as it goes without one; whole, it runs in tests/gpu."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

import qgemm_mx


def test_the_example_quantises_and_without_a_gpu_says_what_is_missing(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```py\n(.*?)```", (repository / "README.md").read_text(), flags=re.S)
    on_the_host, on_a_gpu = code.split("import cupy as cp")
    names: dict = {}
    exec(compile(on_the_host, "README.md", "exec"), names)
    quantised = names["quantised"]
    assert (quantised.n, quantised.k, quantised.format) == (64, 256, "mxfp4")

    # Row sums: of the weight itself within its quantisation, and of the decoded weight exactly.
    y = qgemm_mx.reference_matmul(np.ones((1, 256), np.float16), quantised)
    assert y.shape == (1, 64)
    assert np.allclose(y[0], qgemm_mx.dequantize(quantised).sum(1, dtype=np.float64), atol=1e-9)
    assert np.abs(y[0] - names["weight"].sum(1)).max() < 6

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(qgemm_mx.DeviceError, match="CuPy, which packs and launches on a GPU"):
        exec(compile(on_a_gpu.partition("\n")[2], "README.md", "exec"), names)
    lines = [line for line in code.splitlines() if line]
    assert len(lines) == 10 and code.count("print(") == 2
