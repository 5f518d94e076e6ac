"""The torch operator without a GPU: its schema, its fake implementation, and that torch.compile takes it whole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is in requirements-peers.txt")

from qgemm_mx import gemv_layout, gpu_linear, torch_op  # noqa: E402 torch may be missing


def module(fmt: str = "nvfp4", n: int = 40, k: int = 384, bias: bool = True, device: str = "meta"):
    """A module on tensors without contents: what tracing sees."""
    layout = gemv_layout.gemv_layout(fmt, n, k)
    weight = SimpleNamespace(
        format=fmt, n=n, k=k, wide=False, shift=0, matrix=True,
        data=torch.empty(layout.nbytes, dtype=torch.uint8, device=device),
        row_scale=torch.empty(n, device=device) if fmt == "nvfp4" else None,
    )  # fmt: skip
    made = torch.empty(n, dtype=torch.bfloat16, device=device) if bias else None
    return torch_op.Linear(weight, made)


@pytest.mark.parametrize("shape", [(3, 384), (2, 5, 384), (384,), (0, 384)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fake_has_the_shape_and_type_of_the_result(shape, dtype):
    y = module(bias=dtype == torch.bfloat16)(torch.empty(shape, dtype=dtype, device="meta"))
    assert y.shape == (*shape[:-1], 40) and y.dtype == dtype and y.device.type == "meta"


def test_the_fake_refuses_another_k():
    weight = module()
    with pytest.raises(RuntimeError, match="x has K=256, the weight K=384"):
        torch_op.linear(
            torch.empty(2, 256, device="meta"),
            weight.data,
            None,
            None,
            "nvfp4",
            40,
            384,
            False,
            0,
            True,
        )


def test_compile_takes_the_operator_whole_and_keeps_m_dynamic():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(module(), backend=backend, fullgraph=True, dynamic=True)
    for m in (2, 5, 9):
        y = compiled(torch.empty(m, 384, dtype=torch.bfloat16, device="meta"))
        assert y.shape == (m, 40)
    targets = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert len(graphs) == 1 and "qgemm_mx.linear" in " ".join(targets)


def test_buffers_are_saved_and_restored():
    saved = module("mxfp4", bias=False, device="cpu").state_dict()
    assert set(saved) == {"data"}
    assert set(module(device="cpu").state_dict()) == {"data", "row_scale", "bias"}


def test_a_tensor_that_is_on_no_gpu_has_no_implementation():
    weight = module(device="cpu")
    with pytest.raises((NotImplementedError, RuntimeError), match="qgemm_mx::linear"):
        weight(torch.empty(2, 384, dtype=torch.bfloat16))


def test_a_tensor_that_is_on_no_gpu_is_named():
    with pytest.raises(TypeError, match="a torch tensor is on cpu, not on a CUDA device"):
        gpu_linear.linear(torch.empty(2, 384, dtype=torch.bfloat16), None)
