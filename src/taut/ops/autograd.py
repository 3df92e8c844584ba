"""What the backward passes of all ops share."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Sequence[Tensor | None]]:
    """A backward pass that cannot be differentiated again, and says so when somebody tries.

    torch's own decorator lets gradients pass as constants where no upstream gradient wants one, as
    under the sum of an output: a gradient penalty would then vanish without a word.
    """

    @wraps(backward)
    def run(ctx: Any, *dys: Tensor | None) -> Sequence[Tensor | None]:
        with torch.no_grad():
            grads = backward(ctx, *dys)
        grads = grads if isinstance(grads, tuple) else (grads,)
        if not torch.is_grad_enabled():
            return grads
        refuse: Any = torch._C._functions.DelayedError(
            b"taut: this op cannot be differentiated twice; use the reference beside it instead",
            len(grads),
        )
        # no tensor of the graph may be touched: what is marked is an alias of each gradient
        return refuse(*(g if g is None else g.detach().requires_grad_() for g in grads))

    return run
