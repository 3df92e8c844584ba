"""Where the tests of the Triton kernels run, and with which dropout coordinates."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Generator, Tensor

from taut.ops.random import NO_DROPOUT

DEVICE = (
    "cuda" if torch.cuda.is_available() else "cpu"
)  # on a CPU conftest.py chose the interpreter
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def coordinates(p: float, rows: int) -> tuple[Any, ...]:
    """Arguments of SCHEMA: rows of large ids in no order."""
    if p == 0.0:
        return NO_DROPOUT
    numbers = torch.randint(2**32, (2, rows), generator=Generator().manual_seed(1))
    return p, 2**62 + 7, 3, 2**31 + 5, *numbers.to(DEVICE)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=Generator().manual_seed(seed)).to(DEVICE, dtype)


def without_grad(form: Callable[..., Any]) -> Callable[..., Any]:
    """Launchers stand below autograd: their inputs must not start a graph."""

    @wraps(form)
    def wrapped(*args, **kwargs):
        with torch.no_grad():
            return form(*(x.detach() if isinstance(x, Tensor) else x for x in args), **kwargs)

    return wrapped
