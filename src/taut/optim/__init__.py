"""Optimizers on a model, its parameters or groups of them."""

from .optimizers import SGD, Adam, AdamW, Lamb

__all__ = ["SGD", "Adam", "AdamW", "Lamb"]
