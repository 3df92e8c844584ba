"""Fused and memory-saving ops. Each is one function; the device of its tensors picks the form."""

from .attention import attention
from .dropout import dropout
from .embedding import embedding
from .gelu import gelu
from .linear import linear
from .mlp import mlp
from .norm import dropout_add_norm
from .random import Dropout
from .softmax_attention import softmax_attention

__all__ = [
    "Dropout",
    "attention",
    "dropout",
    "dropout_add_norm",
    "embedding",
    "gelu",
    "linear",
    "mlp",
    "softmax_attention",
]
