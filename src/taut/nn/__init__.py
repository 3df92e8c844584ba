"""Modules: parameters plus calls to ops."""

from .layers import GELU, Dropout, LayerNorm, RMSNorm
from .precision import training_dtype

__all__ = ["GELU", "Dropout", "LayerNorm", "RMSNorm", "training_dtype"]
