"""Hugging Face at the edge: folders in and out."""

from .folder import load, save

__all__ = ["load", "save"]
