"""taut trains Transformers without slack: see README.md and docs/."""

from . import models, nn, ops
from .hf import accelerate, load, restore, save
from .packed import PackedBatch

__version__ = "0.1.0"
__all__ = ["PackedBatch", "accelerate", "load", "models", "nn", "ops", "restore", "save"]
