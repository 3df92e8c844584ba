"""Steps of optimizers on lists of tensors: every number is read once and written once.

    g = grad_scale * grad;  of step t:  c1 = 1 - beta1^t,  c2 = 1 - beta2^t
    m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g^2
    direction = (m / c1) / (sqrt(v / c2) + eps)

    adamw   w = w - lr * decay * w - lr * direction        (Loshchilov and Hutter, 2019)
    adam    g = g + decay * w in front of m and v;  w = w - lr * direction
    lamb    u = direction + decay * w;  w = w - lr * |w| / |u| * u, norms of a tensor
            (You et al., 2020; the factor is 1 where a norm is 0)
    sgd     g = g + decay * w;  m = momentum * m + g, m = g in the first step;
            w = w - lr * m, or with nesterov  w - lr * (g + momentum * m)

A bf16 weight may have a `low`, (n,) int16, with which it is an fp32 number: bits = (weight << 16) +
low. The weight is that number rounded to nearest (ties away from 0), so a step on both is, bit by
bit, the step on an fp32 weight. Nothing here is differentiated.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import native

KINDS = ("adamw", "adam", "sgd", "lamb")  # by code in csrc/optimizer.cpp


def joined(weight: Tensor, low: Tensor | None) -> Tensor:
    """The fp32 number of a weight."""
    if low is None:
        return weight.float()
    bits = (weight.view(torch.int16).int() << 16) + low
    return bits.view(torch.float32)


def split(wide: Tensor) -> tuple[Tensor, Tensor]:
    """A bf16 weight and its low for an fp32 number."""
    bits = wide.view(torch.int32)
    upper = ((bits + 0x8000) >> 16).to(torch.int16)
    return upper.view(torch.bfloat16), bits.to(torch.int16)


def optimizer_step(
    kind: str,
    weights: Sequence[Tensor],
    lows: Sequence[Tensor] | None,
    grads: Sequence[Tensor],
    first: Sequence[Tensor] | None,
    second: Sequence[Tensor] | None,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    decay: float = 0.0,
    step: int = 1,
    grad_scale: float = 1.0,
    nesterov: bool = False,
) -> None:
    """One step in place. All weights are of one dtype, all grads of one; moments are fp32.

    step counts from 1. For sgd betas[0] is the momentum, and `first` None without it.
    """
    if not weights:
        return
    beta1, beta2 = betas
    corrections = 1 - beta1**step, 1 - beta2**step
    takes = all(map(native.takes, (weights[0], grads[0]))) and all(
        t.is_cpu and t.is_contiguous() for t in (*weights, *grads)
    )
    if not takes:
        for i, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
            low, m, v = (x if x is None else x[i] for x in (lows, first, second))
            g = grad.to(torch.promote_types(grad.dtype, torch.float32)) * grad_scale
            rates = lr, beta1, beta2, eps, *corrections, decay, step, nesterov
            _composite(kind, weight, low, g, m, v, *rates)
        return
    decays = [lr * decay if kind == "adamw" else decay] * len(weights)
    numbers = lr, beta1, beta2, eps, *corrections, grad_scale, KINDS.index(kind)
    native.optimizer_step(
        weights, lows, grads, first, second, decays, *numbers, nesterov, step == 1
    )


def _composite(
    kind: str,
    weight: Tensor,
    low: Tensor | None,
    g: Tensor,
    m: Tensor | None,
    v: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    correction1: float,
    correction2: float,
    decay: float,
    step: int,
    nesterov: bool,
) -> None:
    w = joined(weight, low) if weight.dtype == torch.bfloat16 else weight.to(g.dtype)
    if kind in ("adam", "sgd"):
        g = g + decay * w
    if kind == "sgd":
        if m is not None:
            m.copy_(g if step == 1 else m * beta1 + g)
            g = g + beta1 * m if nesterov else m
        w = w - lr * g
    else:
        assert m is not None
        assert v is not None
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        direction = (m / correction1) / ((v / correction2).sqrt() + eps)
        if kind == "lamb":
            direction = direction + decay * w
            norms = w.norm(), direction.norm()
            ratio = norms[0] / norms[1] if min(norms) > 0 else 1.0
            w = w - lr * ratio * direction
        else:
            w = w - lr * decay * w if kind == "adamw" else w
            w = w - lr * direction
    if low is None:
        weight.copy_(w)
    else:
        for part, made in zip((weight, low), split(w), strict=True):
            part.copy_(made)


def global_norm(grads: Sequence[Tensor]) -> float:
    """The norm of all gradients as one vector. On a GPU this waits for it."""
    total = 0.0
    for dtype in {grad.dtype for grad in grads}:
        alike = [grad for grad in grads if grad.dtype == dtype and grad.numel()]
        if all(native.takes(grad) and grad.is_cpu and grad.is_contiguous() for grad in alike):
            total += native.sum_of_squares(alike) if alike else 0.0
        else:
            total += sum(float(grad.double().square().sum()) for grad in alike)
    return math.sqrt(total) if total >= 0 else math.nan
