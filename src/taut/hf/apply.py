"""taut.accelerate: a Hugging Face model on packed tokens and our kernels, and taut.restore.

A module is replaced by giving it another class, by its type and nothing else: parameters, names and
the optimizers that know them stay as they are, and restore gives the class back. Each layer is
compared with its replacement on a small batch before anything is replaced.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from taut.nn.blocks import State, first_norm

from . import encoders, seq2seq
from .layers import Layer, memories_of, run_layers
from .packing import Left, Packing
from .swapped import Swapped, swapped_class

log = logging.getLogger("taut")
# the class of a model in transformers -> what is mixed in front of it
REPLACEMENTS: dict[str, type[Swapped]] = {
    "BertModel": encoders.Bert,
    "BertForMaskedLM": encoders.BertMlm,
    "BertForPreTraining": encoders.BertPretraining,
    "RobertaModel": encoders.Bert,
    "RobertaForMaskedLM": encoders.BertMlm,
    "GPT2Model": encoders.Gpt2,
    "GPT2LMHeadModel": encoders.Gpt2Lm,
    "ViTModel": encoders.Vit,
    "BartModel": seq2seq.Seq2Seq,
    "BartForConditionalGeneration": seq2seq.Seq2SeqLm,
    "MarianModel": seq2seq.Seq2Seq,
    "MarianMTModel": seq2seq.Seq2SeqLm,
}
# of the largest entry of a layer's output on the small batch
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass
class Report:
    """What accelerate did: lines to print."""

    replaced: dict[str, str] = field(default_factory=dict)  # module -> what it is now
    left: dict[str, str] = field(default_factory=dict)  # module -> why

    def __str__(self) -> str:
        lines = [f"{name or '(model)'}: {what}" for name, what in self.replaced.items()]
        lines += [f"{name or '(model)'}: left, {why}" for name, why in self.left.items()]
        return "\n".join(["taut.accelerate", *(f"  {line}" for line in lines)])


def accelerate(model: nn.Module) -> Report:
    """Replace what can be replaced in a model of transformers, in place; `restore` undoes it.

    In training with labels, a model's logits are not made: its output has the loss alone.
    """
    report = Report()
    theirs = {
        name: module
        for name, module in model.named_modules()
        if type(module).__module__.startswith("transformers.models.")
    }
    heads = {}
    for name, module in theirs.items():
        kind, mixin = type(module), REPLACEMENTS.get(type(module).__name__)
        if isinstance(module, Swapped):
            report.replaced[name] = f"{kind.__name__}: replaced before"
        elif mixin is not None and issubclass(mixin, encoders.Headed):
            heads[name] = module, mixin
        elif mixin is not None:
            try:
                layers = _compared(mixin, module)
            except (Left, AttributeError) as why:
                report.left[name] = f"{kind.__name__}: {why}"
                log.warning("taut.accelerate leaves %s as it is: %s", kind.__name__, why)
                continue
            module.__class__ = swapped_class(mixin, kind)
            report.replaced[name] = f"{kind.__name__}: {layers} layers on packed tokens"
        elif name == "" or kind.__name__.endswith("Model"):
            report.left[name] = f"{kind.__name__}: no replacement, it runs on what is below it"
    for name, (module, mixin) in heads.items():
        kind = type(module)
        if isinstance(module.base_model, Swapped):
            module.__class__ = swapped_class(mixin, kind)
            report.replaced[name] = f"{kind.__name__}: head and loss on rows with a label"
        else:
            report.left[name] = f"{kind.__name__}: the model below it is left"
    if not report.replaced and not report.left:
        raise ValueError(
            f"accelerate: a model of transformers is needed, with one of {', '.join(REPLACEMENTS)} "
            f"in it; got {type(model).__name__}"
        )
    return report


def restore(model: nn.Module) -> nn.Module:
    """Give every module that accelerate replaced its class back."""
    for module in model.modules():
        if isinstance(module, Swapped):
            module.__class__ = type(module).__bases__[1]
            module.__dict__.pop("_taut_said", None)
    return model


def _compared(mixin: type[Swapped], module: Any) -> int:
    """Compare every layer with its replacement; returns their number or raises Left."""
    view: Any = object.__new__(swapped_class(mixin, type(module)))
    view.__dict__ = module.__dict__
    if isinstance(view, seq2seq.Seq2Seq):
        sides = [(view.encoder.layers, view.layers_of(view.encoder, is_decoder=False), False)]
        sides += [(view.decoder.layers, view.layers_of(view.decoder, is_decoder=True), True)]
    else:
        stack = view.encoder.layer if isinstance(view, encoders.Bert) else None
        stack = stack or (view.h if isinstance(view, encoders.Gpt2) else view.layers)
        sides = [(stack, view.layers_of(), False)]
    was_training = module.training
    module.eval()
    try:
        for originals, layers, crosses in sides:
            for i, (original, layer) in enumerate(zip(originals, layers, strict=True)):
                _compare(i, original, layer, view, crosses=crosses)
    finally:
        module.train(was_training)
    return sum(len(layers) for _, layers, _ in sides)


@torch.no_grad()
def _compare(i: int, original: Any, layer: Layer, view: Any, *, crosses: bool) -> None:
    weight: Any = layer.out.weight
    width, device, dtype = view.config.hidden_size, weight.device, weight.dtype
    generator = torch.Generator().manual_seed(i)
    lengths = [7, 4]
    x = torch.randn(2, 7, width, generator=generator).to(device, dtype)
    is_token = torch.arange(7) < torch.tensor(lengths)[:, None]
    packing = Packing.of((2, 7), is_token.to(device), device, None)
    mask = _additive(is_token.to(device), dtype, causal=layer.options.causal)
    given: dict[str, Any] = {}
    memories = None
    if crosses:
        given["encoder_hidden_states"] = x.flip(1)
        given["encoder_attention_mask"] = _additive(is_token.to(device), dtype, causal=False)
        source = packing.pack(x.flip(1))
        own = [original.encoder_attn]
        memories = memories_of(own, source, None, packing.layout, dtype)
    want = original(x, attention_mask=mask, **given)
    want = packing.pack(want[0] if isinstance(want, tuple) else want)
    flat = packing.pack(x)
    state = State(flat, flat)
    if layer.options.is_pre_norm:
        norm = original.ln_1 if hasattr(original, "ln_1") else original.layernorm_before
        state = first_norm(flat, norm.weight, norm.bias, norm.eps)
    state = run_layers(
        [layer], state, packing.layout, dtype, is_checkpointed=False, memories=memories
    )
    got = state.stream if layer.options.is_pre_norm else state.x
    error = float((got - want).abs().max() / want.abs().max())
    if not error <= TOLERANCE[dtype]:
        raise Left(
            f"layer {i} gives other numbers than transformers', by {error:.2g} of the largest"
        )


def _additive(is_token: Tensor, dtype: torch.dtype, *, causal: bool) -> Tensor:
    seen = is_token[:, None, None, :].expand(-1, 1, is_token.shape[1], -1)
    if causal:
        seen = seen & torch.ones_like(seen[0, 0]).tril()
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(
        ~seen, torch.finfo(dtype).min
    )
