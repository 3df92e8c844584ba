"""taut trains Transformers without slack: see README.md and docs/."""

from typing import TYPE_CHECKING, Any

from . import models, nn, ops, optim
from .packed import PackedBatch

if TYPE_CHECKING:
    from .hf import accelerate, load, restore, save

__version__ = "0.1.0"
__all__ = ["PackedBatch", "accelerate", "load", "models", "nn", "ops", "optim", "restore", "save"]
_OF_HF = {"accelerate", "load", "restore", "save"}


def __getattr__(name: str) -> Any:
    if name in _OF_HF:  # torch's compiler comes with it, which takes a second to import
        from . import hf

        return getattr(hf, name)
    raise AttributeError(f"module 'taut' has no attribute {name!r}")
