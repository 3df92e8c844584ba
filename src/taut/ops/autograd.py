"""What the backward passes of all ops share."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("taut", "FRAGMENT")


def register_autograd(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> None:
    """torch.library.register_autograd for a raw op whose schema has no defaults.

    torch's own looks for defaults in every call, which takes longer than the rest of the call, and
    lets a gradient be differentiated again as if it were a constant.
    """
    raw = getattr(torch.ops.taut, name).default

    def run(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return raw(*inputs)

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = run(*inputs)
        setup_context(ctx, inputs, output)
        return output

    members = {"forward": forward, "backward": _once_differentiable(backward)}
    node: Any = type(
        f"{name}_backward",
        (torch.autograd.Function,),
        {member: staticmethod(form) for member, form in members.items()},
    )

    def autograd(*inputs: Any) -> Any:
        is_wanted = torch.is_grad_enabled() and any(
            isinstance(x, Tensor) and x.requires_grad for x in inputs
        )
        return node.apply(*inputs) if is_wanted else run(*inputs)

    _LIBRARY.impl(name, autograd, "Autograd")


def _once_differentiable(backward: Callable[..., Any]) -> Callable[..., Sequence[Tensor | None]]:
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
