"""Softmax, dropout and the product with the values in one, for who needs the probabilities:

    p = softmax(scores),   out = dropout(p) v

    dv      = dropout(p)^T dout
    dp      = dropout(dout v^T) + what comes back to p as an output
    dscores = p * (dp - sum(dp * p))

A row of scores that is -inf throughout, a query without keys, gives zeros.

Saves p and v. Not the scores, not the dropped probabilities, no mask: they are rebuilt, some
matrices at a time, in scratch memory that the products find in cache.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import native
from .autograd import register_autograd
from .checks import check_floating
from .random import KEYS_SCHEMA, NO_DROPOUT, SCHEMA, Dropout, keep_heads, keep_scale, threshold

OP = "softmax_attention"
# What is worked on between two products: in a last-level cache on a CPU, while on a GPU it bounds
# scratch memory alone.
CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}

torch.library.define(
    "taut::softmax_attention_fwd",
    f"(Tensor scores, Tensor v, {SCHEMA}, {KEYS_SCHEMA}) -> (Tensor, Tensor)",
)
torch.library.define(
    "taut::softmax_attention_bwd",
    "(Tensor dout, Tensor? dprobabilities, Tensor probabilities, Tensor v, "
    f"{SCHEMA}, {KEYS_SCHEMA}) -> (Tensor, Tensor)",
)


def softmax_attention_reference(
    scores: Tensor, v: Tensor, *, dropout: Dropout | None = None
) -> tuple[Tensor, Tensor]:
    """The truth every kernel is held to: plain PyTorch, differentiated by autograd."""
    p_drop, *where = _arguments(dropout, scores)
    blind = (scores == -math.inf).all(-1, keepdim=True)
    p = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    if p_drop == 0.0:
        return p @ v, p
    keep = _keep(scores.flatten(0, -3), 0, scores.shape[-3], p_drop, *where).view(scores.shape)
    return torch.where(keep, p * keep_scale(p_drop), 0.0) @ v, p


def _arguments(dropout: Dropout | None, scores: Tensor) -> tuple[Any, ...]:
    """The arguments of SCHEMA and KEYS_SCHEMA for scores (..., H, Lq, Lk)."""
    if dropout is None or threshold(dropout.p) == 0:
        return (*NO_DROPOUT, None, 0)
    *sequences, _, queries, keys = scores.shape
    batch = torch.Size(sequences).numel()
    return (
        *dropout.arguments(OP, batch * queries, scores.device),
        *dropout.key_arguments(OP, batch * keys, scores.device),
    )


def _keep(
    p: Tensor,  # (matrices, queries, keys), from matrix `first` on of (sequences, heads)
    first: int,
    heads: int,
    p_drop: float,
    seed: int,
    step: int,
    site: int,
    sample_ids: Tensor | None,
    positions: Tensor | None,
    key_positions: Tensor | None,
    first_head: int,
) -> Tensor:
    """The decisions, True = kept, shaped as p."""
    matrices, num_queries, num_keys = p.shape
    if p.numel() == 0:
        return torch.ones_like(p, dtype=torch.bool)
    queries, keys = (torch.arange(n, device=p.device) for n in (num_queries, num_keys))
    found: list[Tensor] = []
    for matrix in range(first, first + matrices):
        sequence, head = divmod(matrix, heads)
        rows, columns = queries + sequence * num_queries, keys + sequence * num_keys
        found += keep_heads(
            1,
            first_head + head,
            torch.full_like(queries, sequence) if sample_ids is None else sample_ids[rows],
            queries if positions is None else positions[rows],
            keys if key_positions is None else key_positions[columns],
            *(p_drop, seed, step, site),
        )
    return torch.stack(found)


def _softmax_fwd(
    scores: Tensor, p: Tensor, dropped: Tensor | None, first: int, heads: int, *where: Any
) -> None:
    """Of some matrices, p and what dropout leaves of it, not yet scaled."""
    wide = scores.to(torch.promote_types(p.dtype, torch.float32))
    blind = (scores == -math.inf).all(-1, keepdim=True)
    p.copy_(wide.softmax(-1).masked_fill_(blind, 0.0))
    if dropped is not None:
        dropped.copy_(torch.where(_keep(p, first, heads, *where), p, 0.0))


def _softmax_bwd(
    p: Tensor,
    dp: Tensor | None,
    ds: Tensor,
    dropped: Tensor | None,
    first: int,
    heads: int,
    *where: Any,
) -> None:
    """Of some matrices, the dropped p, and in place of its gradient, ds, that of the scores."""
    wide_p, gradient = (x.to(torch.promote_types(p.dtype, torch.float32)) for x in (p, ds))
    if dropped is not None:
        keep = _keep(p, first, heads, *where)
        dropped.copy_(torch.where(keep, p, 0.0))
        gradient = torch.where(keep, gradient, 0.0)
    gradient = gradient if dp is None else gradient + dp
    mean = (gradient * wide_p).sum(-1, keepdim=True)
    ds.copy_(wide_p * (gradient - mean))


def _chunks(p: Tensor) -> Iterator[slice]:
    """Cuts (matrices, queries, keys) to what is worked on between two products."""
    bytes_each = max(1, p.shape[1] * p.shape[2] * p.element_size())
    size = max(1, CHUNK_BYTES.get(p.device.type, CHUNK_BYTES["cuda"]) // bytes_each)
    return (slice(i, min(i + size, len(p))) for i in range(0, len(p), size))


def _scratch(p: Tensor, p_drop: float) -> Tensor | None:
    """Room for the dropped p of a chunk."""
    return torch.empty_like(p[next(_chunks(p), slice(0))]) if p_drop else None


def _empty_like(x: Tensor) -> Tensor:
    return native.with_huge_pages(torch.empty_like(x))


def _product(out: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """out = scale * a b, matrix by matrix."""
    if out.is_cpu and out.dtype == torch.float32 and native.takes(out):
        native.products(out, a, b, scale)
    else:
        out.baddbmm_(a, b, beta=0, alpha=scale)


def _fwd(
    softmax: Callable[..., None], scores: Tensor, v: Tensor, p_drop: float, *where: Any
) -> tuple[Tensor, Tensor]:
    """Between the products: softmax, one of the forms of _softmax_fwd."""
    p, out = _empty_like(scores), v.new_empty(*scores.shape[:-1], v.shape[-1])
    scores_, v_, p_, out_ = (x.flatten(0, -3) for x in (scores, v, p, out))
    scratch = _scratch(p_, p_drop)
    for chunk in _chunks(p_):
        weights = p_[chunk]
        dropped = scratch if scratch is None else scratch[: len(weights)]
        softmax(scores_[chunk], weights, dropped, chunk.start, scores.shape[-3], p_drop, *where)
        weights = weights if dropped is None else dropped
        # the scale of dropout rides on the product
        _product(out_[chunk], weights, v_[chunk], keep_scale(p_drop))
    return out, p


def _bwd(
    softmax: Callable[..., None],
    dout: Tensor,
    dp: Tensor | None,
    p: Tensor,
    v: Tensor,
    p_drop: float,
    *where: Any,
) -> tuple[Tensor, Tensor]:
    """Between the products: softmax, one of the forms of _softmax_bwd."""
    ds, dv = _empty_like(p), v.new_empty(v.shape)
    dout_, p_, v_, ds_, dv_ = (x.flatten(0, -3) for x in (dout, p, v, ds, dv))
    dp_ = dp if dp is None else dp.flatten(0, -3)
    scale, scratch = keep_scale(p_drop), _scratch(p_, p_drop)
    for chunk in _chunks(p_):
        weights = p_[chunk]
        dropped = scratch if scratch is None else scratch[: len(weights)]
        _product(ds_[chunk], dout_[chunk], v_[chunk].transpose(1, 2), scale)
        of_p = dp_ if dp_ is None else dp_[chunk]
        softmax(weights, of_p, ds_[chunk], dropped, chunk.start, p.shape[-3], p_drop, *where)
        weights = weights if dropped is None else dropped
        _product(dv_[chunk], weights.transpose(1, 2), dout_[chunk], scale)
    return ds, dv


# any device without kernels of its own
@torch.library.impl("taut::softmax_attention_fwd", "default")
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _fwd(_softmax_fwd, *arguments)


@torch.library.impl("taut::softmax_attention_bwd", "default")
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _bwd(_softmax_bwd, *arguments)


@torch.library.impl("taut::softmax_attention_fwd", "cpu")
def _(scores: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    form = native.softmax_fwd if native.takes(scores) else _softmax_fwd
    return _fwd(form, scores, *arguments)


@torch.library.impl("taut::softmax_attention_bwd", "cpu")
def _(dout: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    form = native.softmax_bwd if native.takes(dout) else _softmax_bwd
    return _bwd(form, dout, *arguments)


@torch.library.impl("taut::softmax_attention_fwd", "cuda")
def _(scores: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    if scores.dtype == torch.float64:
        return _fwd(_softmax_fwd, scores, *arguments)
    from .triton.softmax_attention import softmax_fwd  # on use: a CPU install has no Triton

    return _fwd(softmax_fwd, scores, *arguments)


@torch.library.impl("taut::softmax_attention_bwd", "cuda")
def _(dout: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    if dout.dtype == torch.float64:
        return _bwd(_softmax_bwd, dout, *arguments)
    from .triton.softmax_attention import softmax_bwd

    return _bwd(softmax_bwd, dout, *arguments)


@torch.library.register_fake("taut::softmax_attention_fwd")
def _(scores, v, *where):
    return v.new_empty(*scores.shape[:-1], v.shape[-1]), torch.empty_like(scores)


@torch.library.register_fake("taut::softmax_attention_bwd")
def _(dout, dp, p, v, *where):
    return torch.empty_like(p), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output):
    _, v, *scalars, sample_ids, positions, key_positions, first_head = inputs
    ctx.save_for_backward(output[1], v, sample_ids, positions, key_positions)
    ctx.scalars, ctx.first_head = scalars, first_head
    ctx.set_materialize_grads(False)  # probabilities that nobody differentiates cost no zeros


def _backward(ctx, dout, dp):
    p, v, *ids = ctx.saved_tensors
    if dout is None:
        dout = v.new_zeros(*p.shape[:-1], v.shape[-1])
    dscores, dv = torch.ops.taut.softmax_attention_bwd(
        dout.contiguous(),
        dp if dp is None else dp.contiguous(),
        *(p, v, *ctx.scalars, *ids, ctx.first_head),
    )
    need_scores, need_v, *_ = ctx.needs_input_grad
    return dscores if need_scores else None, dv if need_v else None, *(None,) * 8


register_autograd("softmax_attention_fwd", _backward, _setup_context)


def softmax_attention(
    scores: Tensor, v: Tensor, *, dropout: Dropout | None = None
) -> tuple[Tensor, Tensor]:
    """(dropout(softmax(scores)) v, softmax(scores)): attention that gives its probabilities too.

    scores: (..., H, Lq, Lk), scaled and masked: -inf hides a key, and a query that sees none gets
    zeros. v: (..., H, Lk, E). The dropout is that of `attention`: a query or key is known by its
    number, a sequence by its number in the leading dimensions, flattened, and sample ids and
    positions, one for each of them, are (sequences, Lq) and key positions (sequences, Lk), flat.
    The probabilities are those before dropout. Where they are not needed `attention` keeps less.
    """
    check_floating(OP, scores=scores, v=v)
    if (
        scores.dim() < 3
        or scores.dim() != v.dim()
        or scores.shape[:-2] != v.shape[:-2]
        or scores.shape[-1] != v.shape[-2]
        or scores.dtype != v.dtype
    ):
        raise ValueError(
            f"{OP}: scores must be (..., H, Lq, Lk) and v (..., H, Lk, E), of one dtype; got "
            f"{tuple(scores.shape)} {scores.dtype} and {tuple(v.shape)} {v.dtype}"
        )
    return torch.ops.taut.softmax_attention_fwd(
        scores.contiguous(), v, *_arguments(dropout, scores)
    )
