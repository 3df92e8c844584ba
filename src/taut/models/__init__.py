"""Models on packed batches, one architecture a file."""

from .bert import Bert, BertConfig
from .decoding import generate
from .gpt2 import Gpt2, Gpt2Config, next_token_targets
from .loss import Loss
from .transformer import Transformer, TransformerConfig
from .vit import Vit, VitConfig

__all__ = [
    "Bert",
    "BertConfig",
    "Gpt2",
    "Gpt2Config",
    "Loss",
    "Transformer",
    "TransformerConfig",
    "Vit",
    "VitConfig",
    "generate",
    "next_token_targets",
]
