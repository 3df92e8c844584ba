"""taut trains Transformers without slack: see README.md and docs/."""

from . import nn, ops
from .packed import PackedBatch

__version__ = "0.1.0"
__all__ = ["PackedBatch", "nn", "ops"]
