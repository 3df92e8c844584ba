"""Packed forward passes of BART and Marian of transformers: both sides packed, each once."""

import math
from typing import Any

import torch
from torch import Tensor

from taut import ops
from taut.nn.blocks import State

from .encoders import Headed, head_rows, mean_loss
from .layers import Layer, check, check_hooks, memories_of, run_layers, seq2seq_layer
from .packing import Left, Packing, tokens_of_mask
from .swapped import Call, Swapped, compute_dtype

_BOTH = frozenset({"input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"})


class Seq2Seq(Swapped):
    """BartModel, MarianModel."""

    TAKES = _BOTH
    encoder: Any
    decoder: Any

    def check_call(self, call: Call) -> None:
        super().check_call(call)
        use_cache = call.get("use_cache")
        if not self.training and (self.config.use_cache if use_cache is None else use_cache):
            raise Left("a cache of keys and values is wanted", is_expected=True)
        if self.training and (self.config.encoder_layerdrop or self.config.decoder_layerdrop):
            raise Left("layers are dropped at random (layerdrop)")
        if call.get("input_ids") is None or call.get("decoder_input_ids") is None:
            raise Left("no input_ids or no decoder_input_ids")

    def layers_of(self, side: Any, *, is_decoder: bool) -> list[Layer]:
        layers = []
        check_hooks(side)
        for i, layer in enumerate(side.layers):
            check_hooks(layer)
            layers.append(seq2seq_layer(layer, self.config, i, is_decoder=is_decoder))
            check(layers[-1].modules())
        return layers

    def embed(
        self, side: Any, ids: Tensor, packing: Packing, dtype: torch.dtype, site: int
    ) -> State:
        table, places = side.embed_tokens, side.embed_positions
        norm = getattr(side, "layernorm_embedding", None)
        check([table, places] if norm is None else [table, places, norm])
        scale = math.sqrt(self.config.d_model) if self.config.scale_embedding else 1.0
        x = ops.embedding(
            packing.pack(ids),
            table.weight.to(dtype),
            scale=scale,
            positions=packing.columns() + getattr(places, "offset", 0),
            position_weight=places.weight.to(dtype),
            norm_weight=None if norm is None else norm.weight,
            norm_bias=None if norm is None else norm.bias,
            eps=1e-5 if norm is None else norm.eps,
            padding_idx=table.padding_idx,
            dropout=packing.layout.dropout(side.dropout, site),
        )
        return State(x, x)

    def decode(self, call: Call, is_target: Tensor | None) -> tuple[State, State, Packing, Packing]:
        """States of the source and of the target, and how they pack."""
        ids, target_ids = call["input_ids"], call["decoder_input_ids"]
        seed = self.seed()
        shape = (ids.shape[0], ids.shape[1])
        is_token = tokens_of_mask(call.get("attention_mask"), shape, causal=False)
        source = Packing.of(shape, is_token, ids.device, seed)
        shape = (target_ids.shape[0], target_ids.shape[1])
        target = Packing.of(shape, is_target, ids.device, seed)
        weight = self.encoder.embed_tokens.weight
        dtype = compute_dtype(weight)
        is_checkpointed = self.training and any(
            getattr(module, "gradient_checkpointing", False)
            for module in self.modules()  # type: ignore[attr-defined]
        )
        with torch.autocast(weight.device.type, enabled=False):
            memory = run_layers(
                self.layers_of(self.encoder, is_decoder=False),
                self.embed(self.encoder, ids, source, dtype, 0),
                source.layout,
                dtype,
                is_checkpointed=is_checkpointed,
            )
            layers = self.layers_of(self.decoder, is_decoder=True)
            cross = [layer.encoder_attn for layer in self.decoder.layers]
            state = run_layers(
                layers,
                self.embed(self.decoder, target_ids, target, dtype, 1),
                target.layout,
                dtype,
                is_checkpointed=is_checkpointed,
                memories=memories_of(cross, memory.x, memory.normed, source.layout, dtype),
            )
        return memory, state, source, target

    def packed(self, call: Call) -> Any:
        from transformers.modeling_outputs import Seq2SeqModelOutput

        mask, ids = call.get("decoder_attention_mask"), call["decoder_input_ids"]
        is_target = tokens_of_mask(mask, (ids.shape[0], ids.shape[1]), causal=True)
        memory, state, source, target = self.decode(call, is_target)
        wide = self.encoder.embed_tokens.weight.dtype
        return Seq2SeqModelOutput(
            last_hidden_state=target.unpack(state.x).to(wide),
            encoder_last_hidden_state=source.unpack(memory.x).to(wide),
        )


class Seq2SeqLm(Headed):
    """BartForConditionalGeneration, MarianMTModel."""

    TAKES = _BOTH | {"labels"}
    lm_head: Any
    final_logits_bias: Tensor

    def packed(self, call: Call) -> Any:
        from transformers.modeling_outputs import Seq2SeqLMOutput

        labels, config = call["labels"], self.config
        call = dict(call)
        if call.get("decoder_input_ids") is None:
            start = labels.new_full((labels.shape[0], 1), config.decoder_start_token_id)
            shifted = torch.cat([start, labels[:, :-1]], 1)
            call["decoder_input_ids"] = shifted.masked_fill(shifted == -100, config.pad_token_id)
        mask = call.get("decoder_attention_mask")
        is_target = tokens_of_mask(mask, (labels.shape[0], labels.shape[1]), causal=True)
        # what comes behind the last label of a row is seen by no row with a label
        counts = (labels != -100).flip(1).cumsum(1).flip(1) > 0
        is_target = counts if is_target is None else is_target & counts
        self.base_model.check_call({**call, "labels": None})
        check([self.lm_head])
        _, state, _, target = self.base_model.decode(call, is_target)
        rows, targets = head_rows(labels, target)
        bias = self.final_logits_bias[0]
        with torch.autocast(state.x.device.type, enabled=False):
            loss = mean_loss(state.x[rows], self.lm_head.weight, bias, targets)
        return Seq2SeqLMOutput(loss=loss)
