"""`qgemm_mx::linear` for torch: an operator that torch.compile and CUDA graphs take, and a module around it.

Importing this module imports torch and registers the operator; the package alone does neither. ImportError says so
where torch is missing.
"""

try:
    import torch
except ImportError as error:
    raise ImportError(
        "qgemm_mx.torch_op needs torch, for the operator qgemm_mx::linear and its module:"
        " pip install torch (qgemm_mx.linear itself does without)",
        name="torch",
    ) from error

from . import gpu_linear
from .gpu_linear import LinearWeight

__all__ = ["Linear", "linear"]


@torch.library.custom_op("qgemm_mx::linear", mutates_args=(), device_types="cuda")
def linear(
    x: torch.Tensor,
    data: torch.Tensor,
    row_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    format: str,
    n: int,
    k: int,
    wide: bool,
    shift: int,
    matrix: bool,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """x W^T + bias, [M, N] of the type of x [M, K]; the rest are the fields of a `LinearWeight`."""
    weight = LinearWeight(format, n, k, data, row_scale, wide, x.get_device(), shift, matrix)
    return gpu_linear.linear(x, weight, bias=bias, batch_invariant=batch_invariant)


@linear.register_fake
def _(x, data, row_scale, bias, format, n, k, wide, shift, matrix, batch_invariant=False):
    torch._check(x.dim() == 2, lambda: f"x has {x.dim()} dimensions, not [M, K={k}]")
    torch._check(x.shape[1] == k, lambda: f"x has K={x.shape[1]}, the weight K={k}")
    return x.new_empty((x.shape[0], n))


class Linear(torch.nn.Module):
    """y = x W^T + bias for x [..., K]; the packed weight and the bias are buffers, so they move with the module."""

    def __init__(
        self, weight: LinearWeight, bias: torch.Tensor | None = None, batch_invariant: bool = False
    ):
        super().__init__()
        self.format, self.n, self.k, self.wide = weight.format, weight.n, weight.k, weight.wide
        self.shift, self.matrix = weight.shift, weight.matrix
        self.batch_invariant = batch_invariant
        self.register_buffer("data", _tensor(weight.data))
        self.register_buffer("row_scale", _tensor(weight.row_scale))
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., N] for x [..., K]."""
        rows = x.reshape(-1, self.k)
        y = linear(
            rows, self.data, self.row_scale, self.bias,
            self.format, self.n, self.k, self.wide, self.shift, self.matrix, self.batch_invariant,
        )  # fmt: skip
        return y.view(*x.shape[:-1], self.n)

    def extra_repr(self) -> str:
        """What `print` shows of the module."""
        return f"{self.format}, N={self.n}, K={self.k}, bias={self.bias is not None}"


def _tensor(array):
    return array if array is None or isinstance(array, torch.Tensor) else torch.from_dlpack(array)
