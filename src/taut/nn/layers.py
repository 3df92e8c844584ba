"""torch.nn's layers on the memory-saving ops: same constructors, state dicts and numbers."""

import torch
from torch import Tensor, nn

from taut import ops


def _norm(
    layer: nn.LayerNorm | nn.RMSNorm, x: Tensor, bias: Tensor | None, eps: float, kind: str
) -> Tensor:
    """The norm over the last dimensions of x, which the op takes as one."""
    shape = tuple(layer.normalized_shape)
    if tuple(x.shape[x.dim() - len(shape) :]) != shape:
        raise ValueError(
            f"{type(layer).__name__}: the last dimensions of its input must be {shape}; "
            f"got {tuple(x.shape)}"
        )
    weight = None if layer.weight is None else layer.weight.flatten()
    bias = None if bias is None else bias.flatten()
    rows = x.flatten(-len(shape))
    y = ops.dropout_add_norm(rows, None, weight, bias, eps=eps, kind=kind)
    assert isinstance(y, Tensor)  # not the pair that return_sum asks for
    return y.view(x.shape)


class LayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm that keeps x-hat and 4 bytes a row for the backward pass."""

    def forward(self, input: Tensor) -> Tensor:
        return _norm(self, input, self.bias, self.eps, "layer")


class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm that keeps x-hat and 4 bytes a row for the backward pass."""

    def forward(self, input: Tensor) -> Tensor:
        # without an eps PyTorch takes that of the type it computes in, which is fp32 for 16 bits
        wide = torch.promote_types(input.dtype, torch.float32)
        eps = torch.finfo(wide).eps if self.eps is None else self.eps
        return _norm(self, input, None, eps, "rms")


class GELU(nn.GELU):
    """torch.nn.GELU that keeps its output and one bit an element for the backward pass."""

    def __init__(self, approximate: str = "none") -> None:
        if approximate not in ("none", "tanh"):
            raise ValueError(f"GELU: approximate must be 'none' or 'tanh'; got {approximate!r}")
        super().__init__(approximate)

    def forward(self, input: Tensor) -> Tensor:
        return ops.gelu(input, tanh=self.approximate == "tanh")


class Dropout(nn.Dropout):
    """torch.nn.Dropout that keeps nothing for the backward pass: it draws its mask again.

    Each call in training draws a seed from torch's default CPU generator, so torch.manual_seed
    reproduces it. For masks that belong to tokens, not to calls, see taut.ops.dropout.
    """

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        if inplace:
            raise ValueError(
                "Dropout: inplace=True is not supported; leave it out, it would save no memory"
            )
        super().__init__(p)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0 or input.numel() == 0:
            return input
        if self.p == 1:  # not 0 * input, which makes NaN of infinity
            return torch.where(input.new_zeros((), dtype=torch.bool), input, 0.0)
        rows = input if input.dim() else input.view(1)
        return ops.dropout(rows, ops.Dropout(self.p, draw_seed())).view(input.shape)


def draw_seed() -> int:  # read by the host: under torch.compile the one break of the graph
    return int(torch.randint(2**63 - 1, ()))
