"""A tokenised corpus on disk: all tokens end to end, where each text begins, and a tokeniser.

    tokens.npy      (T,) uint16, or uint32 for more than 65,536 words
    offsets.npy     (N + 1,) int64
    tokenizer.json  of the tokenizers library
    corpus.json     what it was made of: a change of source or of settings makes it anew

Files are read where they lie, mapped into memory. A folder takes its name when it is complete.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # by id
MASK_ID = SPECIAL.index("[MASK]")
_BATCH = 1000  # texts that are tokenised at a time


@dataclass(frozen=True)
class Corpus:
    """Texts as ids, read from disk when asked for."""

    folder: Path
    tokens: Any  # of NumPy, mapped
    offsets: Any
    tokenizer: Tokenizer

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> "Corpus":
        path = Path(folder)
        if not (path / "corpus.json").is_file():
            raise ValueError(f"data: {path} holds no corpus: build one with build_corpus")
        facts = json.loads((path / "corpus.json").read_text())
        for name, wanted in facts["sha256"].items():
            if _sha256(path / name) != wanted:
                raise ValueError(f"data: {path / name} is damaged: delete {path}, it is made anew")
        return cls(
            path,
            np.load(path / "tokens.npy", mmap_mode="r"),
            np.load(path / "offsets.npy", mmap_mode="r"),
            Tokenizer.from_file(str(path / "tokenizer.json")),
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> Any:
        """The ids of a text, (n,) int64."""
        return self.tokens[self.offsets[i] : self.offsets[i + 1]].astype(np.int64)

    @property
    def lengths(self) -> Any:
        return np.diff(self.offsets)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size()


def build_corpus(
    folder: str | os.PathLike[str],
    texts: Iterable[str],
    name: str,
    *,
    vocab_size: int = 8192,
    longest: int = 256,
    progress: Callable[[str, int], None] = lambda stage, count: None,
) -> Corpus:
    """The corpus in a folder; made, if what is there was made of other texts or settings.

    A text of more than `longest` tokens is cut into pieces.
    """
    path = Path(folder)
    listed = []
    digest = hashlib.sha256()
    for text in texts:
        listed.append(text)
        digest.update(text.encode("utf-8", "replace") + b"\0")
        if len(listed) % _BATCH == 0:
            progress("reading", len(listed))
    if not listed:
        raise ValueError(f"data: the source {name} holds no texts")
    made_of = {
        "source": name,
        "texts": len(listed),
        "sha256": digest.hexdigest(),
        "vocab_size": vocab_size,
        "longest": longest,
        "version": 1,
    }
    if (path / "corpus.json").is_file():
        known = json.loads((path / "corpus.json").read_text())
        if known.get("made_of") == made_of:
            return Corpus.open(path)
    progress("training the tokeniser", 0)
    tokenizer = train_tokenizer(listed, vocab_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        _write(part, tokenizer, listed, longest, progress)
        hashes = {name: _sha256(part / name) for name in ("tokens.npy", "offsets.npy")}
        facts = {"made_of": made_of, "sha256": hashes}
        (part / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n")
        if path.exists():
            shutil.rmtree(path)
        os.replace(part, path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return Corpus.open(path)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """WordPiece as BERT's, lower case."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=ends
    )
    return tokenizer


def _write(
    folder: Path,
    tokenizer: Tokenizer,
    texts: list[str],
    longest: int,
    progress: Callable[[str, int], None],
) -> None:
    kind = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    first, last = (tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]"))
    pieces: list[Any] = []
    for start in range(0, len(texts), _BATCH):
        chosen = texts[start : start + _BATCH]
        for encoding in tokenizer.encode_batch(chosen, add_special_tokens=False):
            ids, room = encoding.ids, longest - 2
            for begin in range(0, len(ids), room):
                piece = [first, *ids[begin : begin + room], last]
                if len(piece) > 3:  # of one word there is nothing to learn
                    pieces.append(np.array(piece, dtype=kind))
        progress("tokenising", min(start + _BATCH, len(texts)))
    if not pieces:
        raise ValueError("data: no text of the source is longer than one word")
    np.save(folder / "tokens.npy", np.concatenate(pieces))
    offsets = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    np.save(folder / "offsets.npy", offsets)
    tokenizer.save(str(folder / "tokenizer.json"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
