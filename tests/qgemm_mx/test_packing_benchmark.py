"""How long host packing takes: seconds, not minutes, for the largest weight of the shape set."""

from __future__ import annotations

import time

import numpy as np
import pytest

from qgemm_mx.formats import FORMATS, weight_bytes
from qgemm_mx.packing import dequantize, quantize

LIMIT_S = 60.0  # for 1.9 GB of float32 on two cores that others share; 2 to 3 s when they are free


@pytest.fixture(scope="module")
def llama70b_gate_up() -> np.ndarray:
    """float32 [57344, 8192]; a repeated block of rows, since drawing it would take longer."""
    rows = np.random.default_rng(0).standard_normal((512, 8192), dtype=np.float32)
    weight = np.empty((57344, 8192), np.float32)
    weight.reshape(-1, *rows.shape)[:] = rows
    return weight


@pytest.mark.benchmark(group="quantize 57344x8192, 2 threads")
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "int4_g128"])
def test_quantize_the_largest_weight(benchmark, llama70b_gate_up: np.ndarray, format: str) -> None:
    started = time.perf_counter()  # pytest-benchmark keeps no time when it runs under xdist
    packed = benchmark.pedantic(
        quantize, (llama70b_gate_up, format), {"threads": 2}, rounds=1, iterations=1
    )
    assert time.perf_counter() - started < LIMIT_S
    assert packed.nbytes == weight_bytes(format, 57344, 8192)
    assert np.array_equal(packed.values[:512], packed.values[-512:])


@pytest.mark.benchmark(group="quantize and dequantize 4096x4096")
@pytest.mark.parametrize("step", ["quantize", "dequantize"])
@pytest.mark.parametrize("format", FORMATS)
def test_quantize_and_dequantize(benchmark, format: str, step: str) -> None:
    weight = np.random.default_rng(0).standard_normal((4096, 4096), dtype=np.float32)
    packed = quantize(weight, format)
    call = (quantize, (weight, format)) if step == "quantize" else (dequantize, (packed,))
    result = benchmark.pedantic(*call, rounds=3, iterations=1)
    decoded = dequantize(result) if step == "quantize" else result
    assert np.abs(weight - decoded).max() < 1
