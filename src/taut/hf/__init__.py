"""Hugging Face at the edge: folders in and out, and their models on our kernels."""

from .apply import accelerate, restore
from .folder import load, save

__all__ = ["accelerate", "load", "restore", "save"]
