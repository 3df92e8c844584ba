"""Fused and memory-saving ops. Each is one function; the device of its tensors picks the form."""

from .attention import attention
from .cross_entropy import cross_entropy
from .dropout import dropout
from .embedding import embedding
from .gelu import gelu
from .linear import linear
from .linear_cross_entropy import linear_cross_entropy
from .mlp import mlp
from .norm import dropout_add_norm
from .random import Dropout
from .softmax_attention import softmax_attention

__all__ = [
    "Dropout",
    "attention",
    "cross_entropy",
    "dropout",
    "dropout_add_norm",
    "embedding",
    "gelu",
    "linear",
    "linear_cross_entropy",
    "mlp",
    "softmax_attention",
]
