"""What the humming adaptors share: weights, configurations, calls. Written against humming-kernels 0.1.20.

Read in its sources: `humming/transform.py` (prepare_and_transform_humming_tensors), `humming/schema/mxfp4.py` and
`modelopt.py` (checkpoint layouts, equal to ours), `humming/tune/__init__.py` (get_heuristics_config),
`humming/kernel/humming.py` (HummingKernel.prepare_kernels), `humming/ops/launcher.py` (launch_kernel),
`humming/ops/input.py` (process_input) and `humming/csrc/launcher/` (what a launch checks and does).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.operands import FP8_ACTIVATION_SCALE, WeightCopies
from lab.peers import _torch
from lab.peers._interface import Availability, Candidate, PeerError

REQUIRES = {"humming-kernels": "humming", "torch": "torch"}

#: Checkpoint schema of each format: values and scales as in ours, the tensor scale beside them.
SCHEMAS = {
    "mxfp4": {"quant_method": "mxfp4"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "nvfp4"},
}
#: Padding that vLLM asks of humming for a linear layer.
PAD_N, PAD_K = 256, 128
#: humming refuses a padding of N that is no multiple of this (HummingKernel.check_shape).
N_MULTIPLE = 8
#: int32 words of Stream-K locks, as HummingLayer allocates them.
LOCKS = 2048


@dataclass
class Handle:
    """Prepared weights: humming's layer configuration and the tensors of every copy."""

    config: Any
    tensors: list[dict[str, Any]]
    locks: Any
    a_dtype: str
    version: str
    prepared_bytes: int
    refused: list[str] = field(default_factory=list)


def available() -> Availability:
    """Packages and a device."""
    return _torch.packages(REQUIRES)


def unsupported(format: str, n: int, k: int, m: int) -> str | None:
    """N that humming cannot pad."""
    if n % N_MULTIPLE:
        return f"N={n} is not a multiple of {N_MULTIPLE} ({format}, humming)"
    return None


def checkpoint_tensors(weights: WeightCopies, copy: int) -> dict[str, Any]:
    """A copy under the names and dtypes of its checkpoint schema; views of our buffer."""
    import torch

    values, scales = weights.views(copy)
    tensors = {"weight": _torch.as_tensor(values, torch.uint8)}
    if weights.format == "mxfp4":
        tensors["weight_scale"] = _torch.as_tensor(scales, torch.uint8)
    else:
        tensors["weight_scale"] = _torch.as_tensor(scales, torch.float8_e4m3fn)
        scale = torch.tensor([weights.tensor_scale], dtype=torch.float32)
        tensors["weight_scale_2"] = scale.to(tensors["weight"].device)
    return tensors


def prepare(weights: WeightCopies, copies: int, a_dtype: str) -> Handle:
    """`copies` weights in humming's layout for BF16 (`bfloat16`) or E4M3 (`float8e4m3`) activations."""
    import torch
    from humming import dtypes
    from humming.schema import BaseWeightSchema, HummingInputSchema
    from humming.transform import prepare_and_transform_humming_tensors

    config, prepared = None, []
    for copy in range(copies):
        tensors = checkpoint_tensors(weights, copy)
        device = tensors["weight"].device
        schema, tensors = BaseWeightSchema.from_config(SCHEMAS[weights.format]).convert_humming(
            tensors=tensors,
            shape_n_stacks=[weights.n],
            shape_k_stacks=[weights.k],
            param_dtype=torch.bfloat16,
            device=device,
        )
        # FP8 without a group size: one scale a row of X, the mode of vLLM's per-token scheme.
        one, tensors = prepare_and_transform_humming_tensors(
            tensors,
            shape_n=weights.n,
            shape_k=weights.k,
            weight_schema=schema,
            input_schema=HummingInputSchema(a_dtype=dtypes.DataType.from_str(a_dtype)),
            pad_n_to_multiple=PAD_N,
            pad_k_to_multiple=PAD_K,
            torch_dtype=torch.bfloat16,
            device=device,
        )
        if config is not None and one.to_str() != config.to_str():
            raise PeerError(
                f"humming prepares copy {copy} of {weights.format} N={weights.n} K={weights.k} for another kernel"
                " than copy 0: its scales span another range"
            )
        config = one
        prepared.append(tensors)
    torch.cuda.synchronize()
    size = sum(t.numel() * t.element_size() for t in prepared[0].values())
    locks = torch.zeros(LOCKS, dtype=torch.int32, device=prepared[0]["weight"].device)
    return Handle(config, prepared, locks, a_dtype, available().version or "?", size)


def configurations(handle: Handle, m: int, budget: int) -> list[tuple[dict, dict]]:
    """Distinct (compute, tuning) configurations for M rows, humming's own choice first.

    Then the same without Stream-K, which adds slices of K in BF16 (`epilogue/gmem_writer.cuh`); the choice for
    batch-invariant results, which has no Stream-K either; and humming's choices for half and for twice the rows.
    """
    from humming.tune import get_heuristics_config

    def heuristic(rows: int, invariant: bool = False) -> tuple[dict, dict]:
        compute = {"gemm_type": "dense", "use_batch_invariant": invariant}
        return compute, dict(get_heuristics_config(handle.config, shape_m=rows, **compute))

    compute, own = heuristic(m)
    found = [(compute, own)]
    if own.get("use_stream_k", True):
        found.append((compute, own | {"use_stream_k": False}))
    found += [heuristic(m, invariant=True), heuristic(max(1, m // 2)), heuristic(2 * m)]
    distinct = {json.dumps(entry, sort_keys=True, default=str): entry for entry in found}
    return list(distinct.values())[:budget]


def words(compute: dict, tuning: dict) -> str:
    """A configuration in one line of the record."""
    text = ", ".join(f"{k}={v}" for k, v in sorted(tuning.items()) if v not in (None, False))
    return text + (", batch_invariant" if compute["use_batch_invariant"] else "")


def compiled(handle: Handle, m: int, budget: int) -> list[tuple[str, Any, dict]]:
    """(words, launch row, tuning) of every configuration that compiles; humming's own choice must.

    A launch row is int64 [4] on the host: rows above, rows up to, kernel id, SMs (0: all). humming compiles a list in
    parallel and fails as a whole; then they are compiled one by one, and a refused variant is noted.
    """
    wanted = configurations(handle, m, budget)
    try:
        rows = list(_compile(handle, wanted))
        return [(words(*c), row, c[1]) for c, row in zip(wanted, rows, strict=True)]
    except Exception:
        if len(wanted) == 1:
            raise
    found = []
    for index, one in enumerate(wanted):
        try:
            found.append((words(*one), _compile(handle, [one])[0], one[1]))
        except Exception as error:
            if index == 0:
                raise
            handle.refused.append(f"{words(*one)}: {type(error).__name__} {error}"[:300])
    return found


def warm(work: Sequence[tuple[Handle, Sequence[int]]], budget: int) -> None:
    """Compile the configurations of all handles and rows in one parallel pass (KernelRuntime.compile_many).

    humming keeps a compiled kernel by its configuration, so `bind` finds it. A configuration that does not compile ends
    the pass: `bind` then compiles one by one, and notes what it refuses.
    """
    import torch
    from humming.kernel.humming import HummingKernel

    wanted: dict[str, tuple[Any, dict]] = {}
    for handle, rows in work:
        device = handle.tensors[0]["weight"].device
        for m in rows:
            for compute, tuning in configurations(handle, m, budget):
                layer, _, one = HummingKernel._resolve_configs(
                    handle.config.to_str(), "{}", json.dumps(compute | tuning), device
                )
                config = layer | one
                config.pop("num_sms", None)
                wanted[json.dumps(config, sort_keys=True, default=str)] = (HummingKernel, config)
    if wanted:
        HummingKernel.compile_many(list(wanted.values()), torch.cuda.current_device())


def _compile(handle: Handle, wanted: list[tuple[dict, dict]]) -> Any:
    from humming.kernel.humming import HummingKernel

    every_m = 1 << 30
    intervals = [[0, every_m, compute | tuning] for compute, tuning in wanted]
    device = handle.tensors[0]["weight"].device
    rows = HummingKernel.prepare_kernels(
        handle.config.to_str(), "{}", json.dumps(intervals), device
    )
    return rows.reshape(-1, 4)


def bind(
    handle: Handle, x: Any, y: Any, stream: Any, budget: int, quantise: bool = False
) -> list[Candidate]:
    """Candidates on these operands. `quantise`: x is BF16 and every call makes E4M3 of it first."""
    import torch
    from humming import ops

    _torch.adopt(stream)
    m = int(x.shape[0])
    outputs = _torch.as_tensor(y, torch.bfloat16)
    input_scale, quantiser, seen = None, None, None
    if handle.a_dtype == "bfloat16":
        inputs = _torch.as_tensor(x, torch.bfloat16)
    elif quantise:
        quantiser, inputs, input_scale = _quantiser(handle, _torch.as_tensor(x, torch.bfloat16))

        def seen() -> Any:
            import cupy as cp

            return cp.from_dlpack(inputs.double() * input_scale.double().reshape(m, 1))

    else:
        inputs = _torch.as_tensor(x, torch.float8_e4m3fn)
        input_scale = torch.full(
            (m, 1), float(FP8_ACTIVATION_SCALE), dtype=torch.float32, device=inputs.device
        )

    def launcher(row: Any) -> Any:
        calls = [
            dict(
                configs=row,
                inputs=inputs,
                weight=tensors["weight"],
                weight_scale=tensors["weight_scale"],
                weight_scale_2=tensors.get("weight_scale_2"),
                input_scale=input_scale,
                outputs=outputs,
                locks=handle.locks,
            )
            for tensors in handle.tensors
        ]

        def launch(copy: int) -> None:
            if quantiser is not None:
                quantiser()
            ops.launch_kernel(**calls[copy])

        return launch

    last = "fp32" if handle.a_dtype == "bfloat16" else "fp8_fast"
    return [
        Candidate(name, launcher(row), last, tuning.get("use_stream_k", True), seen)
        for name, row, tuning in compiled(handle, m, budget)
    ]


def _quantiser(handle: Handle, x: Any) -> tuple[Any, Any, Any]:
    """A call without arguments that quantises x, its E4M3 output [M, K], and the scale of each row [M, 1]."""
    from humming import ops

    options = dict(quant_mode=handle.config.input_quant_mode.value, quant_dtype=handle.a_dtype)
    # The first call compiles and allocates; humming lays the scales out as its kernel wants them.
    codes, _, scales = ops.process_input(x, **options)

    def quantise() -> None:
        ops.process_input(x, outputs=codes, token_scales=scales, **options)

    return quantise, codes, scales


def describe(handle: Handle) -> dict[str, Any]:
    """For the record."""
    how = (
        "first: humming.tune.get_heuristics_config, what vLLM runs; then the same without Stream-K, batch-invariant,"
        " and the choices for half and twice the rows"
    )
    return {
        "version": handle.version,
        "prepared_bytes": handle.prepared_bytes,
        "how": how,
        "layer_config": handle.config.to_str(),
        "refused": list(handle.refused),
    }
