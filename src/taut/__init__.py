"""taut trains Transformers without slack: see README.md and docs/."""

from . import models, nn, ops
from .hf import load, save
from .packed import PackedBatch

__version__ = "0.1.0"
__all__ = ["PackedBatch", "load", "models", "nn", "ops", "save"]
