"""Packed forward passes of BERT, RoBERTa, GPT-2 and ViT of transformers, with and without heads."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from taut import ops
from taut.nn.blocks import State, first_norm
from taut.ops.mlp import activate

from .layers import (
    Layer,
    activation_of,
    affine,
    bert_layer,
    check,
    check_hooks,
    gpt2_layer,
    vit_layer,
)
from .packing import Left, Packing
from .swapped import Call, Swapped, run_stack

_TEXT = frozenset({"input_ids", "attention_mask", "position_ids", "cu_seq_lens_q"})


def head_rows(labels: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """The packed rows that carry a label, and their labels."""
    packed = packing.pack(labels)
    if packing.rows is not None and int((labels != -100).sum()) != int((packed != -100).sum()):
        raise Left("labels on padding", is_whole=True)
    rows = (packed != -100).nonzero().squeeze(1)
    return rows, packed[rows]


def mean_loss(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, count: Any = None
) -> Tensor:
    """The head's cross entropy over `count` targets, or over those that there are."""
    dtype = x.dtype
    bias = None if bias is None else bias.to(dtype)
    total = ops.linear_cross_entropy(x, weight.to(dtype), targets, bias)
    assert isinstance(total, Tensor)  # not the pair that with_rows asks for
    return total / (max(len(targets), 1) if count is None else count)


class Bert(Swapped):
    """BertModel, RobertaModel."""

    TAKES = _TEXT | {"token_type_ids"}
    embeddings: Any
    encoder: Any
    pooler: Any

    def layers_of(self) -> list[Layer]:
        layers = []
        for i, layer in enumerate(self.encoder.layer):
            check_hooks(layer)
            layers.append(bert_layer(layer, self.config, i))
            check(layers[-1].modules())
        return layers

    def encode(self, call: Call) -> tuple[State, Packing]:
        ids, table = call.get("input_ids"), self.embeddings
        if ids is None or getattr(self.config, "is_decoder", False):
            raise Left("no input_ids" if ids is None else "a decoder")
        tables = table.word_embeddings, table.position_embeddings, table.token_type_embeddings
        check([*tables, table.LayerNorm])
        is_roberta = self.config.model_type == "roberta"
        first = table.padding_idx + 1 if is_roberta else 0
        packing, positions = self.packing(ids, call, causal=False, first_position=first)
        if is_roberta and call.get("position_ids") is None and call.get("cu_seq_lens_q") is None:
            is_text = ids.ne(table.padding_idx).long()  # as RoBERTa counts, whatever the mask
            positions = packing.pack(is_text.cumsum(1) * is_text + table.padding_idx)
        types = call.get("token_type_ids")
        types = torch.zeros_like(ids) if types is None else types

        def embed(dtype: torch.dtype) -> State:
            words, places, kinds = (module.weight.to(dtype) for module in tables)
            x = ops.embedding(
                packing.pack(ids),
                words,
                positions=positions,
                position_weight=places,
                types=packing.pack(types),
                type_weight=kinds,
                norm_weight=table.LayerNorm.weight,
                norm_bias=table.LayerNorm.bias,
                eps=table.LayerNorm.eps,
                padding_idx=table.word_embeddings.padding_idx,
                dropout=packing.layout.dropout(table.dropout.p, 0),
            )
            return State(x, x)

        weight = table.word_embeddings.weight
        return run_stack(self, self.layers_of(), embed, packing, weight), packing

    def packed(self, call: Call) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

        state, packing = self.encode(call)
        hidden = packing.unpack(state.x).to(self.embeddings.word_embeddings.weight.dtype)
        pooled = None if self.pooler is None else self.pooler(hidden)
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=hidden, pooler_output=pooled
        )


class Headed(Swapped):
    """A model with a head that computes its loss: in training, on rows with a target alone."""

    base_model: Any

    def check_call(self, call: Call) -> None:
        super().check_call(call)
        labels, mask = call.get("labels"), call.get("attention_mask")
        if labels is None or not self.training:
            if labels is not None and mask is not None and mask.shape == labels.shape:
                on_padding = labels.masked_fill(mask != 0, -100)
                if bool((on_padding != -100).any()):
                    raise Left("labels on padding", is_whole=True)
            raise Left("logits are wanted, and no loss", is_expected=True)
        check_hooks(self.base_model)
        if not isinstance(self.base_model, Swapped):
            raise Left("the model below the head is transformers' own")


class BertMlm(Headed):
    """BertForMaskedLM, RobertaForMaskedLM."""

    TAKES = Bert.TAKES | {"labels"}
    cls: Any
    lm_head: Any

    def packed(self, call: Call) -> Any:
        from transformers.modeling_outputs import MaskedLMOutput

        state, packing = self.base_model.encode(call)
        return MaskedLMOutput(loss=self.mlm_loss(state.x, packing, call["labels"]))

    def mlm_loss(self, x: Tensor, packing: Packing, labels: Tensor) -> Tensor:
        rows, targets = head_rows(labels, packing)
        if self.config.model_type == "roberta":
            head = self.lm_head
            dense, norm, activation = head.dense, head.layer_norm, "gelu"
        else:
            head = self.cls.predictions
            dense, norm = head.transform.dense, head.transform.LayerNorm
            activation = activation_of(self.config.hidden_act)
        check([dense, norm, head.decoder])
        with torch.autocast(x.device.type, enabled=False):
            y = activate(ops.linear(x[rows], *affine([dense], x.dtype)), activation)
            y = ops.dropout_add_norm(y, None, norm.weight, norm.bias, eps=norm.eps)
            return mean_loss(y, head.decoder.weight, head.decoder.bias, targets)


class BertPretraining(BertMlm):
    """BertForPreTraining."""

    TAKES = BertMlm.TAKES | {"next_sentence_label"}

    def packed(self, call: Call) -> Any:
        from transformers.models.bert.modeling_bert import BertForPreTrainingOutput

        nexts = call.get("next_sentence_label")
        if nexts is None:
            raise Left("no next_sentence_label")
        state, packing = self.base_model.encode(call)
        if packing.shape[0] != nexts.numel() or bool((packing.layout.cu_seqlens.diff() == 0).any()):
            raise Left("a sequence without tokens, or without a next_sentence_label of its own")
        loss = self.mlm_loss(state.x, packing, call["labels"])
        first = state.x[packing.layout.cu_seqlens[:-1].long()]
        pooled = self.base_model.pooler(first.to(self.cls.seq_relationship.weight.dtype)[:, None])
        scores = self.cls.seq_relationship(pooled).float()
        return BertForPreTrainingOutput(
            loss=loss + F.cross_entropy(scores, nexts.view(-1)), seq_relationship_logits=scores
        )


class Gpt2(Swapped):
    """GPT2Model."""

    TAKES = _TEXT
    wte: Any
    wpe: Any
    drop: Any
    h: Any
    ln_f: Any

    def layers_of(self) -> list[Layer]:
        layers = []
        norms = [*(layer.ln_1 for layer in self.h[1:]), self.ln_f]
        for i, (layer, following) in enumerate(zip(self.h, norms, strict=True)):
            check_hooks(layer)
            layers.append(gpt2_layer(layer, self.config, i, following))
            check(layers[-1].modules())
        return layers

    def check_call(self, call: Call) -> None:
        super().check_call(call)
        use_cache = call.get("use_cache")
        if not self.training and (self.config.use_cache if use_cache is None else use_cache):
            raise Left("a cache of keys and values is wanted", is_expected=True)

    def encode(self, call: Call) -> tuple[State, Packing]:
        ids = call.get("input_ids")
        if ids is None or ids.dim() != 2:
            raise Left("no input_ids (B, S)")
        check([self.wte, self.wpe, self.h[0].ln_1])
        packing, positions = self.packing(ids, call, causal=True)

        def embed(dtype: torch.dtype) -> State:
            x = ops.embedding(
                packing.pack(ids),
                self.wte.weight.to(dtype),
                positions=positions,
                position_weight=self.wpe.weight.to(dtype),
                padding_idx=self.wte.padding_idx,
                dropout=packing.layout.dropout(self.drop.p, 0),
            )
            norm = self.h[0].ln_1
            return first_norm(x, norm.weight, norm.bias, norm.eps)

        return run_stack(self, self.layers_of(), embed, packing, self.wte.weight), packing

    def packed(self, call: Call) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        state, packing = self.encode(call)
        hidden = packing.unpack(state.x).to(self.wte.weight.dtype)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)


class Gpt2Lm(Headed):
    """GPT2LMHeadModel."""

    TAKES = Gpt2.TAKES | {"labels"}
    lm_head: Any

    def packed(self, call: Call) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

        state, packing = self.base_model.encode(call)
        check([self.lm_head])
        labels = F.pad(call["labels"], (0, 1), value=-100)[:, 1:]  # those of the next token
        if packing.shape[0] == 1 and len(packing.layout.cu_seqlens) > 2:
            ends = packing.layout.cu_seqlens[1:].long() - 1
            labels = labels.index_fill(1, ends, -100)  # not the first token of the next sequence
        rows, targets = head_rows(labels, packing)
        with torch.autocast(state.x.device.type, enabled=False):
            loss = mean_loss(
                state.x[rows], self.lm_head.weight, None, targets, call.get("num_items_in_batch")
            )
        return CausalLMOutputWithCrossAttentions(loss=loss)


class Vit(Swapped):
    """ViTModel."""

    TAKES = frozenset({"pixel_values"})
    embeddings: Any
    layernorm: Any
    layers: Any
    pooler: Any

    def layers_of(self) -> list[Layer]:
        layers = []
        norms = [*(layer.layernorm_before for layer in self.layers[1:]), self.layernorm]
        for i, (layer, following) in enumerate(zip(self.layers, norms, strict=True)):
            check_hooks(layer)
            layers.append(vit_layer(layer, self.config, i, following))
            check(layers[-1].modules())
        return layers

    def check_call(self, call: Call) -> None:
        super().check_call({k: v for k, v in call.items() if v is not False})

    def packed(self, call: Call) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        table, pixels = self.embeddings, call.get("pixel_values")
        if pixels is None or tuple(pixels.shape[-2:]) != tuple(table.image_size):
            raise Left("no images of the model's size")
        projection = table.patch_embeddings.projection
        check([projection, self.layers[0].layernorm_before])
        count = pixels.shape[0]
        patches = table.patch_embeddings(pixels.to(projection.weight.dtype))
        x = torch.cat([table.cls_token.expand(count, -1, -1).to(patches.dtype), patches], 1)
        x = x + table.position_embeddings
        packing = Packing.of((count, x.shape[1]), None, x.device, self.seed())

        def embed(dtype: torch.dtype) -> State:
            flat = x.flatten(0, 1).to(dtype)
            flat = ops.dropout(flat, packing.layout.dropout(table.dropout.p, 0))
            norm = self.layers[0].layernorm_before
            return first_norm(flat, norm.weight, norm.bias, norm.eps)

        state = run_stack(self, self.layers_of(), embed, packing, projection.weight)
        hidden = packing.unpack(state.x).to(projection.weight.dtype)
        pooled = None if self.pooler is None else self.pooler(hidden)
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)
