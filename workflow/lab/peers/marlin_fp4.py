"""vLLM's Marlin kernel with FP4 weights and BF16 activations; only where `vllm` imports.

Read in vLLM's main branch: `quantization/utils/marlin_utils_fp4.py` (prepare_fp4_layer_for_marlin,
apply_fp4_marlin_linear) and `_custom_ops.py` (marlin_gemm). Its weight preparation is called, not rebuilt.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from lab.operands import WeightCopies
from lab.peers import _torch
from lab.peers._interface import Availability, Candidate

NAME = "peer/marlin_fp4"
requires = {"vllm": "vllm", "torch": "torch"}
formats = ("mxfp4", "nvfp4")
activations = "bf16"

#: Marlin's tiles: N is padded by vLLM in newer versions only, K never.
N_MULTIPLE, K_MULTIPLE = 64, 128


@dataclass
class Handle:
    """Prepared layers, one a weight copy."""

    layers: list[Any]
    n: int
    k: int
    version: str
    prepared_bytes: int


def available() -> Availability:
    """Packages and a device."""
    return _torch.packages(requires)


def unsupported(format: str, n: int, k: int, m: int) -> str | None:
    """Problems that are no whole tiles: the padded result would need a copy that is not the kernel's time."""
    if n % N_MULTIPLE:
        return f"N={n} is not a multiple of {N_MULTIPLE} ({format}, Marlin)"
    if k % K_MULTIPLE:
        return f"K={k} is not a multiple of {K_MULTIPLE} ({format}, Marlin)"
    return None


def prepare(weights: WeightCopies, copies: int) -> Handle:
    """Weights in Marlin's layout, through vLLM's own preparation of a layer."""
    import torch
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (
        prepare_fp4_layer_for_marlin,
    )

    layers = []
    for copy in range(copies):
        values, scales = weights.views(copy)
        layer = torch.nn.Module()
        layer.output_size_per_partition = weights.n
        layer.input_size_per_partition = weights.k
        layer.params_dtype = torch.bfloat16
        layer.weight = _frozen(_torch.as_tensor(values, torch.uint8))
        scale_dtype = torch.uint8 if weights.format == "mxfp4" else torch.float8_e4m3fn
        layer.weight_scale = _frozen(_torch.as_tensor(scales, scale_dtype))
        if weights.format == "nvfp4":
            scale = torch.tensor(weights.tensor_scale, dtype=torch.float32)
            layer.weight_global_scale = _frozen(scale.to(layer.weight.device))
        prepare_fp4_layer_for_marlin(layer)
        layers.append(layer)
    torch.cuda.synchronize()
    first = (layers[0].weight, layers[0].weight_scale)
    size = sum(t.numel() * t.element_size() for t in first)
    return Handle(layers, weights.n, weights.k, available().version or "?", size)


def _frozen(tensor: Any) -> Any:
    import torch

    return torch.nn.Parameter(tensor, requires_grad=False)


def bind(handle: Handle, x: Any, y: Any, stream: Any, budget: int) -> list[Candidate]:
    """vLLM's call, into our output. The kernel chooses its own tile inside the call, so there is one candidate."""
    import torch
    from vllm import _custom_ops
    from vllm.scalar_type import scalar_types

    _torch.adopt(stream)
    inputs = _torch.as_tensor(x, torch.bfloat16)
    outputs = _torch.as_tensor(y, torch.bfloat16)
    # The op allocates scratch in every call, and a captured graph keeps its address: the pool belongs to these calls.
    pool = torch.cuda.MemPool()
    fixed = SimpleNamespace(m=int(x.shape[0]), n=handle.n, k=handle.k)

    def launch(copy: int) -> None:
        layer = handle.layers[copy]
        with torch.cuda.use_mem_pool(pool):
            _custom_ops.marlin_gemm(
                a=inputs,
                c=outputs,
                b_q_weight=layer.weight,
                b_bias=None,
                b_scales=layer.weight_scale,
                a_scales=None,
                global_scale=getattr(layer, "weight_global_scale", None),
                b_zeros=None,
                g_idx=None,
                perm=None,
                workspace=layer.workspace,
                b_q_type=scalar_types.float4_e2m1f,
                size_m=fixed.m,
                size_n=fixed.n,
                size_k=fixed.k,
                use_atomic_add=False,
                use_fp32_reduce=True,
            )

    return [Candidate("vLLM marlin_gemm, fp32 reduce, no atomics", launch)]


def describe(handle: Handle) -> dict[str, Any]:
    """For the record."""
    return {
        "version": handle.version,
        "prepared_bytes": handle.prepared_bytes,
        "how": "the kernel's own tile choice; vLLM's defaults: FP32 reduce, no atomics",
    }
