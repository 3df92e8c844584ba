"""Layers of transformers as the weights and options of our blocks: a function for each type."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from taut import ops
from taut.nn.blocks import SITES, Affine, Layout, Memory, Options, State, Weights, run_block

from .families import ACTIVATIONS
from .packing import Left


@dataclass(frozen=True)
class Layer:
    """The modules of a layer, and the options of the block that they make."""

    qkv: Sequence[nn.Module]
    out: nn.Module
    attention_norm: nn.Module
    up: nn.Module
    down: nn.Module
    mlp_norm: nn.Module
    options: Options
    cross: tuple[nn.Module, nn.Module, nn.Module] | None = None  # q, out, norm

    def modules(self) -> Iterator[nn.Module]:
        yield from self.qkv
        yield from (self.out, self.attention_norm, self.up, self.down, self.mlp_norm)
        yield from self.cross or ()


def activation_of(name: Any) -> str:
    if name not in ACTIVATIONS:
        raise Left(f"the activation {name!r}")
    return ACTIVATIONS[name]


def bert_layer(layer: Any, config: Any, i: int) -> Layer:
    own, after = layer.attention.self, layer.attention.output
    eps = after.LayerNorm.eps
    return Layer(
        (own.query, own.key, own.value),
        after.dense,
        after.LayerNorm,
        layer.intermediate.dense,
        layer.output.dense,
        layer.output.LayerNorm,
        Options(
            own.num_attention_heads,
            is_pre_norm=False,
            activation=activation_of(config.hidden_act),
            dropout=one_dropout(after.dropout.p, layer.output.dropout.p),
            attention_dropout=own.dropout.p,
            eps=eps,
            first_site=1 + SITES * i,
        ),
    )


def gpt2_layer(layer: Any, config: Any, i: int, following: nn.Module) -> Layer:
    own = layer.attn
    if getattr(own, "scale_attn_by_inverse_layer_idx", False) or not own.scale_attn_weights:
        raise Left("attention scores that are not scaled by 1 / sqrt(width)")
    return Layer(
        (own.c_attn,),
        own.c_proj,
        layer.ln_2,
        layer.mlp.c_fc,
        layer.mlp.c_proj,
        following,
        Options(
            own.num_heads,
            is_pre_norm=True,
            causal=True,
            activation=activation_of(config.activation_function),
            dropout=one_dropout(own.resid_dropout.p, layer.mlp.dropout.p),
            attention_dropout=own.attn_dropout.p,
            eps=layer.ln_2.eps,
            first_site=1 + SITES * i,
        ),
    )


def vit_layer(layer: Any, config: Any, i: int, following: nn.Module) -> Layer:
    own = layer.attention
    return Layer(
        (own.q_proj, own.k_proj, own.v_proj),
        own.o_proj,
        layer.layernorm_after,
        layer.mlp.fc1,
        layer.mlp.fc2,
        following,
        Options(
            config.num_attention_heads,
            is_pre_norm=True,
            activation=activation_of(config.hidden_act),
            dropout=layer.dropout.p,
            attention_dropout=config.attention_probs_dropout_prob,
            eps=layer.layernorm_after.eps,
            first_site=1 + SITES * i,
        ),
    )


def seq2seq_layer(layer: Any, config: Any, i: int, *, is_decoder: bool) -> Layer:
    own = layer.self_attn
    cross = None
    first_site = 2 + SITES * i
    if is_decoder:
        other = layer.encoder_attn
        cross = other.q_proj, other.out_proj, layer.encoder_attn_layer_norm
        first_site += SITES * config.encoder_layers
    return Layer(
        (own.q_proj, own.k_proj, own.v_proj),
        own.out_proj,
        layer.self_attn_layer_norm,
        layer.fc1,
        layer.fc2,
        layer.final_layer_norm,
        Options(
            own.num_heads,
            is_pre_norm=False,
            causal=is_decoder,
            activation=activation_of(config.activation_function),
            dropout=layer.dropout,
            attention_dropout=own.dropout,
            activation_dropout=layer.activation_dropout,
            eps=layer.final_layer_norm.eps,
            first_site=first_site,
        ),
        cross,
    )


def one_dropout(*ps: float) -> float:
    if len(set(ps)) > 1:
        raise Left(f"dropouts of {' and '.join(map(str, ps))} in one layer")
    return ps[0]


def check(modules: Iterator[nn.Module] | Sequence[nn.Module]) -> None:
    """Only plain modules may be looked through: an adapter or a hook would be left out."""
    for module in modules:
        kind = type(module).__name__
        is_plain = type(module) in (nn.Linear, nn.LayerNorm, nn.Embedding, nn.Conv2d) or (
            kind in ("Conv1D", "BartScaledWordEmbedding", "BartLearnedPositionalEmbedding")
            or kind == "MarianSinusoidalPositionalEmbedding"
        )
        if not is_plain:
            raise Left(f"a {kind} in a layer, where transformers has a plain one")
        check_hooks(module)


def check_hooks(module: nn.Module) -> None:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    hooks += module._backward_hooks.values()
    for hook in hooks:
        # set by activation checkpointing, whose other form needs an input with a gradient
        if "make_inputs_require_grad" not in getattr(hook, "__qualname__", ""):
            raise Left(f"a hook on a {type(module).__name__}")


def affine(modules: Sequence[Any], dtype: torch.dtype) -> Affine:
    """Weight and bias of linears or of a norm, those of several one below the other."""
    # Conv1D of GPT-2 has its weight as (in, out)
    weights = [m.weight.t() if type(m).__name__ == "Conv1D" else m.weight for m in modules]
    weight = joined(weights, dtype)
    biases = [m.bias for m in modules]
    if any(bias is None for bias in biases):
        return weight, None
    return weight, joined(biases, dtype)


def joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    cast = [part.to(dtype) for part in parts]
    return torch.cat(cast) if len(cast) > 1 else cast[0].contiguous()


def weights_of(layer: Layer, dtype: torch.dtype) -> Weights:
    def one(module: nn.Module) -> Affine:
        return affine([module], dtype)

    cross = None if layer.cross is None else tuple(one(module) for module in layer.cross)
    return Weights(
        affine(layer.qkv, dtype),
        one(layer.out),
        one(layer.attention_norm),
        one(layer.up),
        one(layer.down),
        one(layer.mlp_norm),
        cross,  # type: ignore[arg-type]
    )


def run_layers(
    layers: Sequence[Layer],
    state: State,
    layout: Layout,
    dtype: torch.dtype,
    *,
    is_checkpointed: bool,
    memories: Sequence[Memory] | None = None,
) -> State:
    for i, layer in enumerate(layers):
        memory = memories[i] if memories else None

        def run(state: State, layer: Layer = layer, memory: Memory | None = memory) -> State:
            return run_block(weights_of(layer, dtype), layer.options, state, layout, memory)

        # masks are drawn by coordinates: there is no state of a generator to restore
        state = (
            checkpoint(run, state, use_reentrant=False, preserve_rng_state=False)
            if is_checkpointed
            else run(state)
        )
    return state


def memories_of(
    cross: Sequence[Any], x: Tensor, normed: Any, layout: Layout, dtype: torch.dtype
) -> list[Memory]:
    """Keys and values of all layers by one GEMM. cross: the attention modules of a decoder."""
    linears = [module for own in cross for module in (own.k_proj, own.v_proj)]
    check(linears)
    kv = ops.linear(x, *affine(linears, dtype), normed=normed)
    parts = kv.view(len(kv), len(linears), cross[0].num_heads, -1).unbind(1)
    return [Memory(k, v, layout) for k, v in zip(parts[::2], parts[1::2], strict=True)]
