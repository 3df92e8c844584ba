"""What Hugging Face's files call the fields and tensors of our models: a table for each family."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from taut.models import (
    Bert,
    BertConfig,
    Gpt2,
    Gpt2Config,
    Transformer,
    TransformerConfig,
    Vit,
    VitConfig,
)
from taut.models.base import BlockConfig, Model

# their names of activations -> ours; of several the first is written
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True)
class Entry:
    """One of our tensors and those that it is made of in a file, one below the other."""

    ours: str
    theirs: tuple[str, ...]
    is_transposed: bool = False
    shape: tuple[int, ...] | None = None  # of theirs, where it is not that of ours

    def read(self, parts: list[Tensor], shape: torch.Size) -> Tensor:
        parts = [part.t() for part in parts] if self.is_transposed else parts
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        if self.shape is not None and tuple(parts[0].shape) == self.shape:
            whole = whole.reshape(shape)
        return whole.contiguous()

    def write(self, whole: Tensor) -> dict[str, Tensor]:
        parts = whole.chunk(len(self.theirs))
        parts = tuple(part.t() for part in parts) if self.is_transposed else parts
        parts = tuple(part.reshape(self.shape) for part in parts) if self.shape else parts
        return {
            name: part.contiguous().clone() for name, part in zip(self.theirs, parts, strict=True)
        }


@dataclass(frozen=True)
class Family:
    """A model_type of Hugging Face."""

    model: type[Model]
    config: type[BlockConfig]
    base: str  # what the names of a model's tensors begin with where it stands below a head
    heads: dict[str, dict[str, Any]]  # architecture -> fields of our config
    fields: dict[str, str]  # ours -> theirs
    fixed: dict[str, Any]  # theirs -> the one value that we compute with
    entries: Callable[[Any], Iterator[Entry]]
    # tensors that repeat another one: name -> name
    tied: dict[str, str] = field(default_factory=dict)
    # fields of ours that are not one of theirs: (theirs) -> ours, and back
    more_fields: Callable[[dict[str, Any]], dict[str, Any]] = lambda theirs: {}
    more_theirs: Callable[[Any], dict[str, Any]] = lambda config: {}


def _layers(ours: str, theirs: str, table: dict[str, str], **options: Any) -> Iterator[Entry]:
    """Weight and bias of each module of a table: our name -> their names, with spaces between."""
    for module, names in table.items():
        for kind in ("weight", "bias"):
            yield Entry(
                f"{ours}{module}.{kind}",
                tuple(f"{theirs}{name}.{kind}" for name in names.split()),
                **options if kind == "weight" else {},
            )


_BERT_BLOCK = {
    "attention.qkv": "attention.self.query attention.self.key attention.self.value",
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}


def _bert_encoder(config: BertConfig, base: str) -> Iterator[Entry]:
    tables = {"tokens": "word", "positions": "position"}
    if config.num_types:
        tables["types"] = "token_type"
    for ours, theirs in tables.items():
        yield Entry(f"{ours}.weight", (f"{base}embeddings.{theirs}_embeddings.weight",))
    yield from _layers("", base, {"norm": "embeddings.LayerNorm"})
    for i in range(config.num_layers):
        yield from _layers(f"blocks.{i}.", f"{base}encoder.layer.{i}.", _BERT_BLOCK)


def _bert(config: BertConfig) -> Iterator[Entry]:
    yield from _bert_encoder(config, "bert.")
    if config.head in ("pretraining", "sequence") or config.has_pooler:
        yield from _layers("", "bert.", {"pooler": "pooler.dense"})
    if config.head in ("mlm", "pretraining"):
        names = {"mlm.transform": "transform.dense", "mlm.norm": "transform.LayerNorm"}
        yield from _layers("", "cls.predictions.", names)
        yield Entry("mlm.bias", ("cls.predictions.bias",))
    if config.head == "pretraining":
        yield from _layers("", "cls.", {"classifier": "seq_relationship"})
    elif config.head in ("sequence", "token"):
        yield from _layers("", "", {"classifier": "classifier"})


def _roberta(config: BertConfig) -> Iterator[Entry]:
    yield from _bert_encoder(config, "roberta.")
    if config.has_pooler:
        yield from _layers("", "roberta.", {"pooler": "pooler.dense"})
    if config.head == "mlm":
        yield from _layers("", "lm_head.", {"mlm.transform": "dense", "mlm.norm": "layer_norm"})
        yield Entry("mlm.bias", ("lm_head.bias",))
    if config.head == "sequence":
        yield from _layers("", "classifier.", {"pooler": "dense", "classifier": "out_proj"})
    elif config.head == "token":
        yield from _layers("", "", {"classifier": "classifier"})


def _bert_fields(theirs: dict[str, Any]) -> dict[str, Any]:
    dropout = theirs.get("classifier_dropout")
    return {} if dropout is None else {"head_dropout": dropout}


def _bert_theirs(config: BertConfig) -> dict[str, Any]:
    is_same = config.head_dropout == config.dropout
    return {"classifier_dropout": None if is_same else config.head_dropout}


_BERT_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "activation": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "max_positions": "max_position_embeddings",
    "num_types": "type_vocab_size",
    "init_std": "initializer_range",
    "norm_eps": "layer_norm_eps",
    "pad_id": "pad_token_id",
}
_BERT_FIXED = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}

BERT = Family(
    model=Bert,
    config=BertConfig,
    base="bert.",
    heads={
        "BertModel": {"head": "none", "has_pooler": True},
        "BertForMaskedLM": {"head": "mlm"},
        "BertForPreTraining": {"head": "pretraining"},
        "BertForSequenceClassification": {"head": "sequence"},
        "BertForTokenClassification": {"head": "token"},
    },
    fields=_BERT_FIELDS,
    fixed=_BERT_FIXED,
    entries=_bert,
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    more_fields=_bert_fields,
    more_theirs=_bert_theirs,
)


def _roberta_fields(theirs: dict[str, Any]) -> dict[str, Any]:
    offset = theirs.get("pad_token_id", 1) + 1
    return _bert_fields(theirs) | {
        "pad_id": 1,
        "position_offset": offset,
        "mlm_activation": "gelu",
        "has_pooler_dropout": True,
    }


ROBERTA = replace(
    BERT,
    base="roberta.",
    heads={
        "RobertaModel": {"head": "none", "has_pooler": True},
        "RobertaForMaskedLM": {"head": "mlm"},
        "RobertaForSequenceClassification": {"head": "sequence"},
        "RobertaForTokenClassification": {"head": "token"},
    },
    entries=_roberta,
    tied={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    more_fields=_roberta_fields,
)


def _gpt2(config: Gpt2Config) -> Iterator[Entry]:
    base = "transformer."
    yield Entry("tokens.weight", (f"{base}wte.weight",))
    yield Entry("positions.weight", (f"{base}wpe.weight",))
    linears = {"attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj"}
    linears |= {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    yield from _layers("", base, {"norm": "h.0.ln_1"})
    for i in range(config.num_layers):
        layer = f"h.{i}."
        yield from _layers(f"blocks.{i}.", base + layer, linears, is_transposed=True)
        following = f"h.{i + 1}.ln_1" if i + 1 < config.num_layers else "ln_f"
        norms = {"attention_norm": f"{layer}ln_2", "mlp_norm": following}
        yield from _layers(f"blocks.{i}.", base, norms)
    if config.head == "sequence":
        yield Entry("classifier.weight", ("score.weight",))


def _gpt2_theirs(config: Gpt2Config) -> dict[str, Any]:
    return {"embd_pdrop": config.dropout, "tie_word_embeddings": True}


def _gpt2_fields(theirs: dict[str, Any]) -> dict[str, Any]:
    if theirs.get("embd_pdrop", 0.1) != theirs.get("resid_pdrop", 0.1):
        raise ValueError(
            "load: embd_pdrop and resid_pdrop must be one number, our dropout; got "
            f"{theirs.get('embd_pdrop')} and {theirs.get('resid_pdrop')}: edit config.json"
        )
    return {}


GPT2 = Family(
    model=Gpt2,
    config=Gpt2Config,
    base="transformer.",
    heads={
        "GPT2Model": {"head": "none"},
        "GPT2LMHeadModel": {"head": "lm"},
        "GPT2ForSequenceClassification": {"head": "sequence"},
    },
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "n_embd",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "intermediate_size": "n_inner",
        "activation": "activation_function",
        "dropout": "resid_pdrop",
        "attention_dropout": "attn_pdrop",
        "max_positions": "n_positions",
        "init_std": "initializer_range",
        "norm_eps": "layer_norm_epsilon",
    },
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    entries=_gpt2,
    tied={"lm_head.weight": "transformer.wte.weight"},
    more_fields=_gpt2_fields,
    more_theirs=_gpt2_theirs,
)


def _vit(config: VitConfig) -> Iterator[Entry]:
    width, side = config.hidden_size, config.patch_size
    embeddings = "vit.embeddings."
    rows = config.grid**2 + config.has_class_token
    yield Entry("class_token", (f"{embeddings}cls_token",), shape=(1, 1, width))
    yield Entry("positions.weight", (f"{embeddings}position_embeddings",), shape=(1, rows, width))
    kernel = (width, config.num_channels, side, side)
    patches = {"patches": "patch_embeddings.projection"}
    yield from _layers("", embeddings, patches, shape=kernel)
    linears = {
        "attention.qkv": " ".join(f"attention.attention.{x}" for x in ("query", "key", "value")),
        "attention.out": "attention.output.dense",
        "attention_norm": "layernorm_after",
        "mlp.up": "intermediate.dense",
        "mlp.down": "output.dense",
    }
    yield from _layers("", "vit.", {"norm": "encoder.layer.0.layernorm_before"})
    for i in range(config.num_layers):
        yield from _layers(f"blocks.{i}.", f"vit.encoder.layer.{i}.", linears)
        is_last = i + 1 == config.num_layers
        following = "layernorm" if is_last else f"encoder.layer.{i + 1}.layernorm_before"
        yield from _layers(f"blocks.{i}.", "vit.", {"mlp_norm": following})
    if config.has_pooler:
        yield from _layers("", "vit.", {"pooler": "pooler.dense"})
    if config.head == "sequence":
        yield from _layers("", "", {"classifier": "classifier"})


VIT = Family(
    model=Vit,
    config=VitConfig,
    base="vit.",
    heads={
        "ViTModel": {"head": "none", "has_pooler": True},
        "ViTForImageClassification": {"head": "sequence"},
    },
    fields={
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "intermediate_size": "intermediate_size",
        "activation": "hidden_act",
        "dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
        "init_std": "initializer_range",
        "norm_eps": "layer_norm_eps",
        "image_size": "image_size",
        "patch_size": "patch_size",
        "num_channels": "num_channels",
    },
    fixed={"qkv_bias": True},
    entries=_vit,
)


def _seq2seq_entries(config: TransformerConfig) -> Iterator[Entry]:
    if config.source_vocab_size:
        yield Entry("source_embedder.tokens.weight", ("model.encoder.embed_tokens.weight",))
        yield Entry("target_embedder.tokens.weight", ("model.decoder.embed_tokens.weight",))
    else:
        yield Entry("target_embedder.tokens.weight", ("model.shared.weight",))
    own = {
        "attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "attention.out": "self_attn.out_proj",
        "attention_norm": "self_attn_layer_norm",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
        "mlp_norm": "final_layer_norm",
    }
    cross = {"cross.q": "encoder_attn.q_proj", "cross.out": "encoder_attn.out_proj"}
    cross |= {"cross_norm": "encoder_attn_layer_norm"}
    sides = (("source", "encoder", config.num_layers), ("target", "decoder", 0))
    for side, stack, layers in sides:
        theirs = f"model.{stack}."
        if config.positions == "learned":
            name = f"{side}_embedder.positions.weight"
            yield Entry(name, (f"{theirs}embed_positions.weight",))
        if config.has_embedding_norm:
            yield from _layers(f"{side}_embedder.", theirs, {"norm": "layernorm_embedding"})
        for i in range(layers or config.num_decoder_layers):
            table = own if stack == "encoder" else own | cross
            yield from _layers(f"{stack}.{i}.", f"{theirs}layers.{i}.", table)
    kv = " ".join(
        f"layers.{i}.encoder_attn.{x}_proj" for i in range(config.num_decoder_layers) for x in "kv"
    )
    yield from _layers("", "model.decoder.", {"cross_kv": kv})
    if config.has_head_bias:
        yield Entry("head_bias", ("final_logits_bias",), shape=(1, config.vocab_size))


_SEQ2SEQ_FIELDS = {
    "hidden_size": "d_model",
    "num_layers": "encoder_layers",
    "num_decoder_layers": "decoder_layers",
    "num_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
    "activation": "activation_function",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
    "init_std": "init_std",
    "scales_embedding": "scale_embedding",
    "start_id": "decoder_start_token_id",
    "end_id": "eos_token_id",
    "pad_id": "pad_token_id",
}


_SEQ2SEQ_DEFAULTS = {  # of theirs, where ours differ
    "activation": "gelu",
    "attention_dropout": 0.0,
    "scales_embedding": False,
    "init_std": 0.02,
    "label_smoothing": 0.0,
    "smoothing": "torch",
}


def _require_alike(theirs: dict[str, Any]) -> None:
    for name in ("attention_heads", "ffn_dim"):
        sides = theirs.get(f"encoder_{name}"), theirs.get(f"decoder_{name}")
        if sides[0] != sides[1]:
            raise ValueError(
                f"load: encoder_{name} and decoder_{name} must be one number; got {sides[0]} and "
                f"{sides[1]}: such a model is not supported"
            )


def _seq2seq_theirs(config: TransformerConfig) -> dict[str, Any]:
    if config.is_pre_norm:
        raise ValueError("save: BART and Marian are post-norm; this model has is_pre_norm=True")
    return {
        "decoder_attention_heads": config.num_heads,
        "decoder_ffn_dim": config.intermediate_size,
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
    }


def _bart_fields(theirs: dict[str, Any]) -> dict[str, Any]:
    _require_alike(theirs)
    return _SEQ2SEQ_DEFAULTS | {
        "vocab_size": theirs.get("vocab_size", 50265),
        "positions": "learned",
        "position_offset": 2,
        "max_positions": theirs.get("max_position_embeddings", 1024) + 2,
        "has_embedding_norm": True,
    }


def _bart_theirs(config: TransformerConfig) -> dict[str, Any]:
    return _seq2seq_theirs(config) | {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions - config.position_offset,
    }


BART = Family(
    model=Transformer,
    config=TransformerConfig,
    base="model.",
    heads={
        "BartForConditionalGeneration": {"has_head_bias": True},
        "BartModel": {"has_head_bias": False},
    },
    fields=_SEQ2SEQ_FIELDS,
    fixed={"tie_word_embeddings": True},
    entries=_seq2seq_entries,
    tied={
        "model.encoder.embed_tokens.weight": "model.shared.weight",
        "model.decoder.embed_tokens.weight": "model.shared.weight",
        "lm_head.weight": "model.shared.weight",
    },
    more_fields=_bart_fields,
    more_theirs=_bart_theirs,
)


def _marian_fields(theirs: dict[str, Any]) -> dict[str, Any]:
    _require_alike(theirs)
    target_vocab = theirs.get("decoder_vocab_size") or theirs.get("vocab_size", 58101)
    is_shared = theirs.get("share_encoder_decoder_embeddings", True)
    return _SEQ2SEQ_DEFAULTS | {
        "vocab_size": target_vocab,
        "source_vocab_size": 0 if is_shared else theirs.get("vocab_size", 58101),
        "positions": "sinusoidal_halves",
        "max_positions": theirs.get("max_position_embeddings", 1024),
    }


def _marian_theirs(config: TransformerConfig) -> dict[str, Any]:
    return _seq2seq_theirs(config) | {
        "vocab_size": config.source_vocab_size or config.vocab_size,
        "decoder_vocab_size": config.vocab_size,
        "share_encoder_decoder_embeddings": not config.source_vocab_size,
        "max_position_embeddings": config.max_positions,
    }


MARIAN = replace(
    BART,
    heads={"MarianMTModel": {"has_head_bias": True}, "MarianModel": {"has_head_bias": False}},
    tied=BART.tied | {"lm_head.weight": "model.decoder.embed_tokens.weight"},
    more_fields=_marian_fields,
    more_theirs=_marian_theirs,
)

FAMILIES = {
    "bert": BERT,
    "roberta": ROBERTA,
    "gpt2": GPT2,
    "vit": VIT,
    "bart": BART,
    "marian": MARIAN,
}
