"""The class that takes the place of a model's: packed where it can be, the original elsewhere."""

import logging
from abc import abstractmethod
from collections.abc import Callable
from functools import wraps
from inspect import Signature, signature
from typing import Any

import torch
from torch import Tensor

from taut.nn.blocks import State
from taut.nn.layers import draw_seed

from .layers import Layer, run_layers
from .packing import Left, Packing, flattened_lengths, tokens_of_mask

log = logging.getLogger("taut")
_FLAGS = ("output_attentions", "output_hidden_states")
# read by none of our forward passes, and without effect on what they compute
_HARMLESS = {*_FLAGS, "return_dict", "use_cache", "num_items_in_batch", "cu_seq_lens_k"}
_HARMLESS |= {"max_length_q", "max_length_k", "seq_idx", "logits_to_keep"}

Call = dict[str, Any]


class Swapped:
    """Mixed in front of the class of a model."""

    TAKES: frozenset[str]  # the arguments that `packed` computes with
    training: bool
    config: Any

    @abstractmethod
    def packed(self, call: Call) -> Any:
        """What a call of the model gives, or Left."""

    def __reduce_ex__(self, protocol: Any) -> Any:  # its class has no name of its own
        return _unpickled, type(self).__bases__, self.__dict__

    def check_call(self, call: Call) -> None:
        """Leave calls with arguments that we do not compute with."""
        given = {name for name, value in call.items() if value is not None}
        unknown = given - self.TAKES - _HARMLESS
        if unknown:
            raise Left(f"{', '.join(sorted(unknown))} is given")
        for name in _FLAGS:
            is_asked = call.get(name)
            if is_asked or (is_asked is None and getattr(self.config, name, False)):
                raise Left(f"{name} is asked for", is_expected=True)
        if call.get("return_dict", True) is False or not self.config.return_dict:
            raise Left("return_dict=False is asked for", is_expected=True)

    def seed(self) -> int | None:
        return draw_seed() if self.training else None

    def packing(
        self, ids: Tensor, call: Call, *, causal: bool, first_position: int = 0
    ) -> tuple[Packing, Tensor]:
        """How a batch packs, and the row of each token in the table of positions."""
        shape, mask = (ids.shape[0], ids.shape[1]), call.get("attention_mask")
        position_ids, cu_seqlens = call.get("position_ids"), call.get("cu_seq_lens_q")
        lengths = flattened_lengths(position_ids, shape, cu_seqlens, first_position)
        if lengths is not None:
            if mask is not None and not bool(mask.all()):
                raise Left("an attention_mask beside sequences end to end")
            packing = Packing.of_flattened(lengths, self.seed())
            return packing, packing.layout.positions + first_position
        packing = Packing.of(
            shape, tokens_of_mask(mask, shape, causal=causal), ids.device, self.seed()
        )
        return packing, packing.columns() if position_ids is None else packing.pack(position_ids)


def compute_dtype(weight: Tensor) -> torch.dtype:
    """That of autocast where it is on, else of the parameters."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def run_stack(
    model: Any,
    layers: list[Layer],
    embed: Callable[[torch.dtype], State],
    packing: Packing,
    weight: Tensor,
) -> State:
    """The layers on what embed(dtype) gives; weight: a parameter of the model."""
    dtype = compute_dtype(weight)
    is_checkpointed = model.training and any(
        getattr(module, "gradient_checkpointing", False) for module in model.modules()
    )
    with torch.autocast(weight.device.type, enabled=False):
        return run_layers(
            layers, embed(dtype), packing.layout, dtype, is_checkpointed=is_checkpointed
        )


@torch.compiler.disable  # shapes are data here, and a compiler would gain nothing on the kernels
def _attempt(
    model: Any, original: Signature, args: tuple[Any, ...], kwargs: Call
) -> tuple[Any, bool]:
    """The packed forward pass, or None where it is left to transformers, which is said once a
    reason, and whether the model below is left too."""
    if model.__dict__.get("_taut_off"):
        return None, False
    call = dict(original.bind(model, *args, **kwargs).arguments)
    call.pop("self")
    call |= call.pop("kwargs", {})
    try:
        model.check_call(call)
        return model.packed(call), False
    except Left as left:
        said = model.__dict__.setdefault("_taut_said", set())
        if str(left) not in said:
            said.add(str(left))
            level = logging.INFO if left.is_expected else logging.WARNING
            log.log(level, "%s runs as transformers has it: %s", type(model).__name__, left)
        return None, left.is_whole


_MADE: dict[tuple[type, type], type[Swapped]] = {}


def swapped_class(mixin: type[Swapped], cls: Any) -> type[Swapped]:
    """The subclass of a model's class that goes by its name: files and messages do not change."""
    if (mixin, cls) in _MADE:
        return _MADE[mixin, cls]

    original = signature(cls.forward)

    @wraps(cls.forward)  # its signature tells Trainer which columns to keep
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, is_whole = _attempt(self, original, args, kwargs)
        if output is not None:
            return output
        if not is_whole:
            return cls.forward(self, *args, **kwargs)
        self.base_model._taut_off = True
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            del self.base_model._taut_off

    members = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    _MADE[mixin, cls] = type(cls.__name__, (mixin, cls), members)
    return _MADE[mixin, cls]


def _unpickled(mixin: type[Swapped], cls: type) -> Swapped:
    return object.__new__(swapped_class(mixin, cls))
