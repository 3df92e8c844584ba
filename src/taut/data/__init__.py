"""From text to packed batches: sources, a tokenised corpus on disk, batches by token budget."""

from .corpus import Corpus, build_corpus
from .masking import causal, mask_words
from .sampler import TokenBudgetSampler
from .sources import SOURCES, read_source

__all__ = [
    "SOURCES",
    "Corpus",
    "TokenBudgetSampler",
    "build_corpus",
    "causal",
    "mask_words",
    "read_source",
]
