"""Small models of transformers with random weights, and batches for them and for ours."""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

import taut
from taut import PackedBatch
from taut.models.base import Model

VOCAB, WIDTH, LONGEST = 97, 48, 17
LENGTHS = [5, 1, LONGEST, 9]
LAYERS = {"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 80}
BERT = {"vocab_size": VOCAB, "hidden_size": WIDTH, "max_position_embeddings": 40} | LAYERS
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": WIDTH,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 40,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SEQ2SEQ = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": 40,
}
MARIAN = {
    "decoder_vocab_size": VOCAB,
    "pad_token_id": 96,
    "decoder_start_token_id": 96,
    "eos_token_id": 0,
    "activation_function": "swish",
    "scale_embedding": True,
}
VIT = {"hidden_size": WIDTH, "image_size": 48, "patch_size": 16} | LAYERS
# class -> (class of its config, fields of it)
TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertModel": ("BertConfig", BERT),
    "BertForMaskedLM": ("BertConfig", BERT),
    "BertForPreTraining": ("BertConfig", BERT),
    "BertForSequenceClassification": ("BertConfig", BERT | {"num_labels": 3}),
    "BertForTokenClassification": ("BertConfig", BERT | {"num_labels": 3}),
    "RobertaModel": ("RobertaConfig", BERT | {"type_vocab_size": 1}),
    "RobertaForMaskedLM": ("RobertaConfig", BERT | {"hidden_act": "relu"}),
    "RobertaForSequenceClassification": ("RobertaConfig", BERT | {"num_labels": 3}),
    "GPT2Model": ("GPT2Config", GPT2),
    "GPT2LMHeadModel": ("GPT2Config", GPT2),
    "GPT2ForSequenceClassification": ("GPT2Config", GPT2 | {"num_labels": 3}),
    "ViTModel": ("ViTConfig", VIT),
    "ViTForImageClassification": ("ViTConfig", VIT | {"num_labels": 5}),
    "BartModel": ("BartConfig", SEQ2SEQ),
    "BartForConditionalGeneration": ("BartConfig", SEQ2SEQ),
    "MarianModel": ("MarianConfig", SEQ2SEQ | MARIAN),
    "MarianMTModel": ("MarianConfig", SEQ2SEQ | MARIAN),
}
HEADS = [name for name in TWINS if not name.endswith("Model") or "LMHead" in name]
HEADS.append("MarianMTModel")
NO_DROPOUT = dict.fromkeys(
    (
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout"),
        *("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    0.0,
)


def theirs(name: str, **fields: Any) -> Any:
    """A model of transformers without dropout, its vectors random too, in training mode."""
    config_name, own = TWINS[name]
    known = getattr(transformers, config_name)().to_dict()
    quiet = {key: value for key, value in NO_DROPOUT.items() if key in known}
    config = getattr(transformers, config_name)(**quiet | own | fields)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.05 * torch.randn_like(p))
    return model.train()


def ours(model: Any) -> Model:
    """Our model with the weights of theirs, by way of a folder."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return taut.load(folder).train()


def gradients(model: Any, twin: Model) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each of our parameters: the gradient by transformers, and ours."""
    holder = copy.deepcopy(model)  # of gradients, which take the way of the weights
    for mine, p in zip(holder.parameters(), model.parameters(), strict=True):
        mine.data = torch.zeros_like(p) if p.grad is None else p.grad.clone()
    pairs = zip(ours(holder).parameters(), twin.named_parameters(), strict=True)
    return {
        name: (want.detach(), torch.zeros_like(p) if p.grad is None else p.grad)
        for want, (name, p) in pairs
    }


@dataclass
class Batches:
    """One batch as keyword arguments of theirs, and as arguments of ours."""

    padded: dict[str, Tensor]
    packed: tuple[Any, ...]
    mask: Tensor  # which rows of their output are tokens


def ids(gen: torch.Generator, lengths: list[int]) -> list[Tensor]:
    return [torch.randint(3, VOCAB - 1, (n,), generator=gen) for n in lengths]


def pad(rows: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def make_batches(name: str, model: Any, twin: Model, lengths: list[int] = LENGTHS) -> Batches:
    """Sequences of these lengths with targets for the head of `name`."""
    gen = torch.Generator().manual_seed(1)
    maker: Callable[..., Batches] = _text
    if name.startswith("ViT"):
        maker = _images
    elif name.startswith(("Bart", "Marian")):
        maker = _pairs
    return maker(name, model, twin, gen, lengths)


def _text(name: str, model: Any, twin: Model, gen: torch.Generator, lengths: list[int]) -> Batches:
    rows = ids(gen, lengths)
    mask = pad([torch.ones(n, dtype=torch.long) for n in lengths], 0)
    padded = {"input_ids": pad(rows, model.config.pad_token_id or 0), "attention_mask": mask}
    types = None
    if name.startswith("Bert"):
        per_row = [(torch.arange(n) > n // 2).long() for n in lengths]
        padded["token_type_ids"], types = pad(per_row, 0), torch.cat(per_row)
    none = [torch.full((n,), -100) for n in lengths]
    classes = torch.randint(0, 3, (len(lengths),), generator=gen)
    if "LMHead" in name:
        padded["labels"] = padded["input_ids"].masked_fill(mask == 0, -100)
        batch = PackedBatch.from_sequences(rows)
        return Batches(padded, (taut.models.next_token_targets(batch),), mask.bool())
    if "Sequence" in name:
        place = -1 if name.startswith("GPT2") else 0
        for row, label in zip(none, classes, strict=True):
            row[place] = label
        padded["labels"] = classes
    elif "Token" in name:
        none = [torch.randint(0, 3, (n,), generator=gen) for n in lengths]
        padded["labels"] = pad(none, -100)
    elif "MaskedLM" in name or "PreTraining" in name:
        for row in none:
            chosen = torch.rand(len(row), generator=gen) < 0.4
            chosen[0] = False
            row[chosen] = torch.randint(0, VOCAB, (int(chosen.sum()),), generator=gen)
        padded["labels"] = pad(none, -100)
        if "PreTraining" in name:
            nexts = classes % 2
            padded["next_sentence_label"] = nexts
            for row, label in zip(none, nexts, strict=True):
                row[0] = label
    batch = PackedBatch.from_sequences(rows, none)
    return Batches(padded, (batch,) if types is None else (batch, types), mask.bool())


def _images(name: str, model: Any, twin: Any, gen: torch.Generator, lengths: list[int]) -> Batches:
    images = torch.randn(len(lengths), 3, 48, 48, generator=gen)
    labels = torch.randint(0, 5, (len(lengths),), generator=gen)
    padded = {"pixel_values": images}
    if "Classification" in name:
        padded["labels"] = labels
    rows = torch.ones(len(lengths), 10, dtype=torch.bool)
    return Batches(padded, (twin.pack(list(images), labels.tolist()),), rows)


def _pairs(name: str, model: Any, twin: Any, gen: torch.Generator, lengths: list[int]) -> Batches:
    sources, targets = ids(gen, lengths), ids(gen, [n % 7 + 1 for n in lengths])
    mask = pad([torch.ones(n, dtype=torch.long) for n in lengths], 0)
    start = torch.tensor([model.config.decoder_start_token_id])
    inputs = [torch.cat([start, row[:-1]]) for row in targets]
    target_mask = pad([torch.ones(len(row), dtype=torch.long) for row in targets], 0).bool()
    pad_id = model.config.pad_token_id
    padded = {"input_ids": pad(sources, pad_id), "attention_mask": mask}
    if name.endswith("Model") and "MT" not in name:
        padded["decoder_input_ids"] = pad(inputs, pad_id)
    else:
        padded["labels"] = pad(targets, -100)
    packed = PackedBatch.from_sequences(sources), PackedBatch.from_sequences(inputs, targets)
    return Batches(padded, packed, target_mask)
