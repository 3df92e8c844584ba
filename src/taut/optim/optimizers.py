"""Optimizers whose step reads and writes every number once, with clipping in the same pass.

They are torch.optim's by their constructors, groups, schedulers and state dicts, and take a model,
its parameters or groups of them. Of a bf16 weight the lower 16 bits of an fp32 one are kept beside
it: 4 bytes a weight are an exact fp32 master copy, and 1,000 small updates are not lost.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from taut.ops.optimizer import global_norm, optimizer_step

Given = nn.Module | Iterable[Tensor] | Iterable[dict[str, Any]]


class Optimizer(torch.optim.Optimizer):
    """What all share; `kind` and the names of the moments are those of a subclass.

    max_norm clips all gradients by their global norm; `norm` is what it was in the last step. A
    step whose norm is not finite changes nothing and is counted in `skipped`. A parameter without
    a gradient is passed over.
    """

    kind: str
    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, given: Given, max_norm: float | None, **defaults: Any) -> None:
        for name in ("lr", "weight_decay", "eps"):
            if defaults.get(name, 0.0) < 0:
                raise ValueError(
                    f"{type(self).__name__}: {name} must not be negative; got {defaults[name]}"
                )
        for beta in defaults.get("betas", ()):
            if not 0 <= beta < 1:
                raise ValueError(f"{type(self).__name__}: betas must lie in [0, 1); got {beta}")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"{type(self).__name__}: max_norm must be positive; got {max_norm}")
        self.max_norm, self.norm, self.skipped = max_norm, math.nan, 0
        super().__init__(groups_of(given) if isinstance(given, nn.Module) else given, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None, *, grad_scale: float = 1.0) -> Any:
        """One step with gradients multiplied by grad_scale, and clipped."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.is_sparse:
                    raise ValueError(f"{type(self).__name__}: gradients must be dense; got sparse")
        if self.max_norm is not None:
            grads = [p.grad for group in self.param_groups for p in group["params"]]
            self.norm = global_norm([g for g in grads if g is not None]) * abs(grad_scale)
            if not math.isfinite(self.norm):
                self.skipped += 1
                return loss
            grad_scale *= min(1.0, self.max_norm / (self.norm + 1e-6))
        for group in self.param_groups:
            for (_, _, count), params in self._alike(group).items():
                states = [self.state[p] for p in params]
                optimizer_step(
                    self.kind,
                    [p.detach() for p in params],
                    self._of(states, "remainder"),
                    [p.grad.contiguous() for p in params],
                    self._of(states, self.moments[0]) if self.moments else None,
                    self._of(states, self.moments[1]) if len(self.moments) > 1 else None,
                    lr=float(group["lr"]),
                    decay=group["weight_decay"],
                    step=count + 1,
                    grad_scale=grad_scale,
                    **self.numbers(group),
                )
                for p, state in zip(params, states, strict=True):
                    state["step"] += 1
                    torch.autograd.graph.increment_version(p)
        return loss

    def numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        """The arguments of optimizer_step that a group of this kind has."""
        return {"betas": group["betas"], "eps": group["eps"]}

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self.moments

    def _alike(self, group: dict[str, Any]) -> dict[Any, list[Any]]:
        """Parameters with a gradient, by dtypes and by the steps that they have taken."""
        alike: dict[Any, list[Any]] = {}
        for p in group["params"]:
            if p.grad is None or p.numel() == 0:
                continue
            state = self.state[p]
            if not state:
                state["step"] = torch.tensor(0.0)
                for name in self.moments_of(group):
                    state[name] = torch.zeros_like(p, dtype=_wide(p))
                if p.dtype == torch.bfloat16:
                    state["remainder"] = torch.zeros_like(p, dtype=torch.int16)
            alike.setdefault((p.dtype, p.grad.dtype, int(state["step"])), []).append(p)
        return alike

    @staticmethod
    def _of(states: list[dict[str, Any]], name: str) -> list[Tensor] | None:
        return [state[name] for state in states] if name in states[0] else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also one of torch.optim's: what it lacks begins at zero, and moments stay fp32."""
        super().load_state_dict(state_dict)
        saved = state_dict["state"]
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, params, strict=True):
            if number not in saved:
                continue
            state = self.state[p]
            for name, value in saved[number].items():  # torch has made them the parameter's dtype
                if isinstance(value, Tensor) and name != "step":
                    dtype = torch.int16 if name == "remainder" else _wide(p)
                    state[name] = value.to(p.device, dtype, copy=True)
            state["step"] = torch.tensor(float(saved[number].get("step", 0)))
            if p.dtype == torch.bfloat16 and "remainder" not in state:
                state["remainder"] = torch.zeros_like(p, dtype=torch.int16)


def _wide(p: Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups of a model's trained parameters: vectors (norms, biases) are not decayed."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]


class AdamW(Optimizer):
    """Adam with decoupled weight decay, as torch.optim.AdamW."""

    kind = "adamw"

    def __init__(
        self,
        params: Given,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_norm: float | None = None,
    ) -> None:
        super().__init__(params, max_norm, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class Adam(Optimizer):
    """Adam, with weight decay added to the gradient, as torch.optim.Adam."""

    kind = "adam"

    def __init__(
        self,
        params: Given,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_norm: float | None = None,
    ) -> None:
        super().__init__(params, max_norm, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class Lamb(Optimizer):
    """Adam's direction, scaled for each tensor by the norm of its weights."""

    kind = "lamb"

    def __init__(
        self,
        params: Given,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        max_norm: float | None = 1.0,
    ) -> None:
        super().__init__(params, max_norm, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, as torch.optim.SGD."""

    kind = "sgd"
    moments = ("momentum_buffer",)

    def __init__(
        self,
        params: Given,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        max_norm: float | None = None,
    ) -> None:
        if not 0 <= momentum < 1 or (nesterov and not momentum):
            raise ValueError(
                "SGD: momentum must lie in [0, 1), and nesterov needs one; got "
                f"momentum={momentum}, nesterov={nesterov}"
            )
        super().__init__(
            params,
            max_norm,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )

    def numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"betas": (group["momentum"], 0.0), "nesterov": group["nesterov"]}

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self.moments if group["momentum"] else ()
