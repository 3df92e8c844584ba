"""Modules: parameters plus calls to ops."""

from .layers import GELU, Dropout, LayerNorm, RMSNorm

__all__ = ["GELU", "Dropout", "LayerNorm", "RMSNorm"]
