"""The sum of the embeddings of a token, its norm and its dropout in one pass:

    z = scale * weight[ids] + position_weight[positions] + type_weight[types]
    y = dropout(norm_weight * xhat + norm_bias)        xhat = (z - mean) * rstd
    without a norm:  y = dropout(z)

    g  = dropout(dy),  h = g * norm_weight
    dz = rstd * (h - mean(h) - xhat * mean(h * xhat))  without a norm: g
    dweight[i] = scale * sum of dz over the rows with ids = i, the other tables likewise
    dnorm_weight = sum over rows of g * xhat,  dnorm_bias = sum over rows of g

Sinusoidal positions: column 2i is sin(position / 10000^(2i / D)) and column 2i + 1 its cosine
(Vaswani et al., "Attention is all you need", 2017), from a table that was made in float64.

Saves ids, positions and types, which a batch keeps anyway; with a norm also xhat in the dtype of
the tables and rstd in fp32 (4 bytes a row).

dz is in fp32, and so is its sum for each id, made in the order of the rows: one rounding in all.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import native
from .autograd import register_autograd
from .checks import check_floating, check_vector
from .linear import column_sum
from .random import SCHEMA, Dropout, apply_dropout, op_arguments

torch.library.define(
    "taut::embedding_fwd",
    "(Tensor ids, Tensor weight, Tensor? position_ids, Tensor? position_weight, Tensor? types, "
    "Tensor? type_weight, Tensor? norm_weight, Tensor? norm_bias, Tensor? weight_grad, "
    f"float scale, int sinusoidal, int padding_idx, float eps, {SCHEMA}) "
    "-> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "taut::embedding_bwd",
    "(Tensor dy, Tensor? xhat, Tensor? rstd, Tensor? norm_weight, bool with_affine, "
    f"{SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "taut::embedding_wgrad",
    "(Tensor dz, Tensor ids, SymInt size, ScalarType dtype, float scale, int padding_idx) "
    "-> Tensor",
)
torch.library.define(
    "taut::embedding_wgrad_",
    "(Tensor(a!) total, Tensor dz, Tensor ids, float scale, int padding_idx) -> ()",
)
torch.library.define("taut::count_positions", "(Tensor cu_seqlens, SymInt rows) -> Tensor")

_WAVELENGTHS = 10000.0


def embedding_reference(
    ids: Tensor,
    weight: Tensor,
    *,
    scale: float = 1.0,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    position_weight: Tensor | None = None,
    sinusoidal: int | None = None,
    types: Tensor | None = None,
    type_weight: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    padding_idx: int | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """The truth every kernel is held to: plain PyTorch, differentiated by autograd."""
    z = F.embedding(ids, weight, padding_idx) * scale
    if cu_seqlens is not None:
        lengths = cu_seqlens.diff().tolist()
        positions = torch.cat([torch.arange(n, device=ids.device) for n in lengths])
    position_table = position_weight
    if sinusoidal is not None:
        position_table = sinusoids(sinusoidal, z.shape[-1], z.dtype, z.device)
    for index, table in ((positions, position_table), (types, type_weight)):
        if index is not None and table is not None:
            z = z + F.embedding(index, table)
    if norm_weight is not None:
        norm_weight, norm_bias = (
            t if t is None else t.to(z.dtype) for t in (norm_weight, norm_bias)
        )
        z = F.layer_norm(z, z.shape[-1:], norm_weight, norm_bias, eps)
    return apply_dropout(z, *op_arguments("embedding", dropout, z))


@lru_cache(maxsize=8)
def sinusoids(
    num_positions: int, width: int, dtype: torch.dtype, device: torch.device
) -> Tensor:  # (num_positions, width)
    """Sinusoidal positions, rounded once. An angle in fp32 would be off by 4e-3 at position 1e5."""
    column = torch.arange(width, dtype=torch.float64)
    frequency = _WAVELENGTHS ** (-(column - column % 2) / width)
    angle = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequency
    return torch.where(column % 2 == 0, angle.sin(), angle.cos()).to(dtype).to(device)


def _count_positions(cu_seqlens: Tensor, rows: int) -> Tensor:
    if cu_seqlens.is_cpu:  # elsewhere reading a value would stall the stream
        first, *_, last = offsets = cu_seqlens.tolist()
        if first != 0 or last != rows or offsets != sorted(offsets):
            raise ValueError(
                f"embedding: cu_seqlens must start at 0, not decrease and end at {rows} tokens; "
                f"got {first} to {last}"
            )
    row = torch.arange(rows, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, row, right=True) - 1
    return (row - cu_seqlens[sequence]).long()


torch.library.impl("taut::count_positions", "default", _count_positions)


@torch.library.register_fake("taut::count_positions")
def _(cu_seqlens: Tensor, rows: int) -> Tensor:
    return cu_seqlens.new_empty(rows, dtype=torch.int64)


def _check_range(name: str, index: Tensor, size: int) -> None:
    """On a CPU. Elsewhere the kernel looks, and ends the process by a device-side assertion."""
    if index.numel() == 0:
        return
    low, high = (int(x) for x in index.aminmax())
    if low < 0 or high >= size:
        raise ValueError(
            f"embedding: {name} must lie in [0, {size}), the rows of its table; got {low} to {high}"
        )


def _forward(
    form: Callable[..., tuple[Tensor, Tensor, Tensor]],
    ids: Tensor,
    weight: Tensor,
    positions: Tensor | None,
    position_weight: Tensor | None,
    types: Tensor | None,
    type_weight: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    _weight_grad: Tensor | None,
    scale: float,
    sinusoidal: int,
    _padding_idx: int,
    eps: float,
    *dropout: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """A form of the op on what it needs: three tables with an index each, two of them optional."""
    if sinusoidal:
        wide = torch.promote_types(weight.dtype, torch.float32)
        position_weight = sinusoids(sinusoidal, weight.shape[1], wide, weight.device)
    tables = (
        ("ids", ids, weight),
        ("positions", positions, position_weight),
        ("types", types, type_weight),
    )
    for name, index, table in tables:
        if index is not None and table is not None and index.is_cpu:
            _check_range(name, index, table.shape[0])
    pairs = (t for _, *pair in tables for t in pair)
    return form(*pairs, norm_weight, norm_bias, scale, eps, *dropout)


def _composite_fwd(
    ids: Tensor,
    weight: Tensor,
    positions: Tensor | None,
    position_weight: Tensor | None,
    types: Tensor | None,
    type_weight: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    scale: float,
    eps: float,
    *dropout: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(weight.dtype, torch.float32)
    y = F.embedding(ids, weight).to(wide) * scale
    for index, table in ((positions, position_weight), (types, type_weight)):
        if index is not None and table is not None:
            y = y + F.embedding(index, table)
    xhat, rstd = weight.new_empty(0), weight.new_empty(0, dtype=wide)
    if norm_weight is not None:
        y = y - y.mean(-1, keepdim=True)
        scales = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
        y = y * scales
        xhat, rstd = y.to(weight.dtype, copy=True), scales.flatten()
        y = y * norm_weight
        y = y if norm_bias is None else y + norm_bias
    return apply_dropout(y, *dropout).to(weight.dtype), xhat, rstd


def _composite_bwd(
    dy: Tensor,
    xhat: Tensor | None,
    rstd: Tensor | None,
    norm_weight: Tensor | None,
    with_affine: bool,
    *dropout: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(dy.dtype, torch.float32)
    g = apply_dropout(dy.to(wide), *dropout)
    if xhat is None or rstd is None or norm_weight is None:
        return g.clone() if g is dy else g, g.new_empty(0), g.new_empty(0)
    dnorm_weight, dnorm_bias = g.new_empty(0), g.new_empty(0)
    if with_affine:
        dnorm_weight, dnorm_bias = column_sum(g * xhat), column_sum(g)
    h = g * norm_weight
    dz = h - h.mean(-1, keepdim=True) - xhat * (h * xhat).mean(-1, keepdim=True)
    return dz * rstd.view(*dy.shape[:-1], 1), dnorm_weight, dnorm_bias


def _composite_wgrad(
    dz: Tensor, ids: Tensor, size: int, dtype: torch.dtype, scale: float, padding_idx: int
) -> Tensor:
    # in double: a sum in fp32 loses what a token repeated 10,000 times adds last
    total = torch.ops.aten.embedding_dense_backward(dz.double(), ids, size, padding_idx, False)
    return total.mul_(scale).to(dtype)


def _composite_wgrad_(
    total: Tensor, dz: Tensor, ids: Tensor, scale: float, padding_idx: int
) -> None:
    wide = torch.promote_types(dz.dtype, torch.float32)
    total.add_(_composite_wgrad(dz, ids, total.shape[0], wide, scale, padding_idx))


@torch.library.impl("taut::embedding_fwd", "default")  # any device without a kernel of its own
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(_composite_fwd, *arguments)


torch.library.impl("taut::embedding_bwd", "default", _composite_bwd)
torch.library.impl("taut::embedding_wgrad", "default", _composite_wgrad)
torch.library.impl("taut::embedding_wgrad_", "default", _composite_wgrad_)


@torch.library.impl("taut::embedding_fwd", "cpu")
def _(ids: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    form = native.embedding_fwd if native.takes(weight) else _composite_fwd
    return _forward(form, ids, weight, *arguments)


@torch.library.impl("taut::embedding_bwd", "cpu")
def _(dy: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    form = native.embedding_bwd if native.takes(dy) else _composite_bwd
    return form(dy, *arguments)


@torch.library.impl("taut::embedding_wgrad", "cpu")
def _(dz: Tensor, ids: Tensor, size: int, dtype: torch.dtype, *arguments: Any) -> Tensor:
    _check_range("ids", ids, size)
    if not native.takes(dz):
        return _composite_wgrad(dz, ids, size, dtype, *arguments)
    total = native.with_huge_pages(dz.new_empty(size, dz.shape[-1], dtype=dtype))
    native.embedding_wgrad(False, total, dz, ids, *arguments)
    return total


@torch.library.impl("taut::embedding_wgrad_", "cpu")
def _(total: Tensor, dz: Tensor, ids: Tensor, *arguments: Any) -> None:
    _check_range("ids", ids, total.shape[0])
    if native.takes(dz) and total.is_contiguous():
        native.embedding_wgrad(True, total, dz, ids, *arguments)
    else:
        _composite_wgrad_(total, dz, ids, *arguments)


@torch.library.impl("taut::embedding_fwd", "cuda")
def _(ids: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    if weight.dtype == torch.float64:
        return _forward(_composite_fwd, ids, weight, *arguments)
    from .triton.embedding import embedding_fwd  # imported on use: a CPU install has no Triton

    return _forward(embedding_fwd, ids, weight, *arguments)


@torch.library.impl("taut::embedding_bwd", "cuda")
def _(dy: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    if dy.dtype == torch.float64:
        return _composite_bwd(dy, *arguments)
    from .triton.embedding import embedding_bwd

    return embedding_bwd(dy, *arguments)


@torch.library.impl("taut::embedding_wgrad", "cuda")
def _(dz: Tensor, ids: Tensor, size: int, dtype: torch.dtype, *arguments: Any) -> Tensor:
    if dz.dtype == torch.float64:
        return _composite_wgrad(dz, ids, size, dtype, *arguments)
    from .triton.embedding import embedding_wgrad

    total = dz.new_zeros(size, dz.shape[-1], dtype=dtype)
    embedding_wgrad(total, dz, ids, *arguments)
    return total


@torch.library.impl("taut::embedding_wgrad_", "cuda")
def _(total: Tensor, dz: Tensor, ids: Tensor, *arguments: Any) -> None:
    if dz.dtype == torch.float64 or not total.is_contiguous():
        return _composite_wgrad_(total, dz, ids, *arguments)
    from .triton.embedding import embedding_wgrad

    return embedding_wgrad(total, dz, ids, *arguments)


@torch.library.register_fake("taut::embedding_fwd")
def _(ids, weight, positions, position_weight, types, type_weight, norm_weight, *arguments):
    y = weight.new_empty(*ids.shape, weight.shape[1])
    wide = torch.promote_types(weight.dtype, torch.float32)
    if norm_weight is None:
        return y, weight.new_empty(0), weight.new_empty(0, dtype=wide)
    return y, torch.empty_like(y), weight.new_empty(ids.numel(), dtype=wide)


@torch.library.register_fake("taut::embedding_bwd")
def _(dy, xhat, rstd, norm_weight, with_affine, *dropout):
    dz = torch.empty_like(dy, dtype=torch.promote_types(dy.dtype, torch.float32))
    width = dy.shape[-1] if with_affine and norm_weight is not None else 0
    return dz, dz.new_empty(width), dz.new_empty(width)


@torch.library.register_fake("taut::embedding_wgrad")
def _(dz, ids, size, dtype, scale, padding_idx):
    return dz.new_empty(size, dz.shape[-1], dtype=dtype)


@torch.library.register_fake("taut::embedding_wgrad_")
def _(total, dz, ids, scale, padding_idx):
    return None


_NUM_TENSORS, _NUM_ARGUMENTS = 9, 19  # of embedding_fwd


def _setup_context(ctx, inputs, output):
    ids, weight, positions, position_weight, types, type_weight, norm_weight, norm_bias = inputs[:8]
    ctx.weight_grad, ctx.scale, _, ctx.padding_idx, _, *scalars, sample_ids, where = inputs[8:]
    _, xhat, rstd = output
    ctx.has_norm, ctx.scalars = norm_weight is not None, scalars
    kept = (xhat, rstd, norm_weight) if ctx.has_norm else (None,) * 3
    ctx.save_for_backward(ids, positions, types, *kept, sample_ids, where)
    ctx.tables = [t if t is None else t.shape[0] for t in (weight, position_weight, type_weight)]
    ctx.dtype = weight.dtype
    ctx.norm_dtypes = [t if t is None else t.dtype for t in (norm_weight, norm_bias)]
    ctx.set_materialize_grads(False)  # an unused output costs no tensor of zeros


def _backward(ctx, dy, _dxhat, _drstd):
    grads: list[Tensor | None] = [None] * _NUM_ARGUMENTS
    if dy is None:
        return tuple(grads)
    *indices, xhat, rstd, norm_weight, sample_ids, where = ctx.saved_tensors
    needs = ctx.needs_input_grad[:_NUM_TENSORS]
    dz = dy.contiguous()
    if ctx.has_norm or ctx.scalars[0] > 0:
        need_affine = needs[6] or needs[7]
        dz, *dnorm = torch.ops.taut.embedding_bwd(
            dz, xhat, rstd, norm_weight, need_affine, *ctx.scalars, sample_ids, where
        )
        for i, dvector, dtype in zip((6, 7), dnorm, ctx.norm_dtypes, strict=True):
            grads[i] = dvector.to(dtype) if needs[i] else None
    of_tokens = (ctx.scale, ctx.padding_idx)
    factors = (of_tokens, (1.0, -1), (1.0, -1))
    for i, index, size, factor in zip((1, 3, 5), indices, ctx.tables, factors, strict=True):
        if not needs[i]:
            continue
        if i == 1 and ctx.weight_grad is not None:
            torch.ops.taut.embedding_wgrad_(ctx.weight_grad, dz, index, *factor)
        else:
            grads[i] = torch.ops.taut.embedding_wgrad(dz, index, size, ctx.dtype, *factor)
    return tuple(grads)


register_autograd("embedding_fwd", _backward, _setup_context)


def _check_index(name: str, index: Tensor, shape: torch.Size, device: torch.device) -> Tensor:
    """Dense int64 ids, a row each."""
    if index.dtype not in (torch.int64, torch.int32) or index.device != device:
        raise ValueError(
            f"embedding: {name} must be int64 or int32 on {device}; got {index.dtype} "
            f"on {index.device}"
        )
    if index.shape != shape:
        raise ValueError(
            f"embedding: {name} must be shaped as ids, {tuple(shape)}; got {tuple(index.shape)}"
        )
    return index.long().contiguous()


def _check_table(name: str, table: Tensor | None, weight: Tensor) -> Tensor | None:
    if table is None:
        return None
    if table.dim() != 2 or table.shape[1] != weight.shape[1] or table.dtype != weight.dtype:
        raise ValueError(
            f"embedding: {name} must be shaped (rows, {weight.shape[1]}) and {weight.dtype}, as "
            f"the columns of weight; got {tuple(table.shape)} {table.dtype}"
        )
    return table.contiguous()


def _check_positions(
    ids: Tensor,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
    position_weight: Tensor | None,
    sinusoidal: int | None,
) -> Tensor | None:
    """The position of each row, given or counted, if there is something that goes by it."""
    op = "embedding"
    is_wanted = position_weight is not None or sinusoidal is not None
    if position_weight is not None and sinusoidal is not None:
        raise ValueError(f"{op}: got both position_weight and sinusoidal; give one of them")
    if sinusoidal is not None and sinusoidal < 1:
        raise ValueError(f"{op}: sinusoidal is a number of positions, at least 1; got {sinusoidal}")
    if (positions is not None) + (cu_seqlens is not None) != is_wanted:
        raise ValueError(
            f"{op}: position_weight or sinusoidal needs positions, or cu_seqlens to count them by; "
            "give one of each, or none"
        )
    if cu_seqlens is None:
        return positions
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.device != ids.device:
        raise ValueError(
            f"{op}: cu_seqlens must be (B + 1,) int32 on {ids.device}; got "
            f"{tuple(cu_seqlens.shape)} {cu_seqlens.dtype} on {cu_seqlens.device}"
        )
    if ids.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(
            f"{op}: cu_seqlens needs packed ids (T,) and at least one number; got ids "
            f"{tuple(ids.shape)}, cu_seqlens {tuple(cu_seqlens.shape)}"
        )
    return torch.ops.taut.count_positions(cu_seqlens.contiguous(), ids.shape[0])


def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    scale: float = 1.0,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    position_weight: Tensor | None = None,
    sinusoidal: int | None = None,
    types: Tensor | None = None,
    type_weight: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    padding_idx: int | None = None,
    dropout: Dropout | None = None,
    weight_grad: Tensor | None = None,
) -> Tensor:
    """dropout(norm(scale * weight[ids] + position + type)), shaped (*ids.shape, D).

    ids, positions, types: int64 or int32, alike in shape. weight: (V, D), position_weight: (P, D),
    type_weight: (N, D), of one dtype; norm_weight, norm_bias: (D,), of any floating dtype.
    Positions are given, or counted within the sequences of cu_seqlens, (B + 1,) int32. They are
    looked up in position_weight or, with sinusoidal=P, in the formula above for positions below P.
    LayerNorm if there is a norm_weight. The row padding_idx of weight gets no gradient.

    An id outside of its table raises ValueError on a CPU; on a GPU, without waiting for it, a
    device-side assertion, as in PyTorch. Nothing is read there.

    weight_grad: a buffer shaped like weight, of its dtype or float32. The backward pass adds the
    gradient of weight to it and gives autograd none: rows that no id names are not even touched.
    """
    op = "embedding"
    check_floating(
        op,
        weight=weight,
        position_weight=position_weight,
        type_weight=type_weight,
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        weight_grad=weight_grad,
    )
    if weight.dim() != 2 or weight.shape[1] == 0:
        raise ValueError(f"{op}: weight must be shaped (V, D), D >= 1; got {tuple(weight.shape)}")
    check_vector(op, weight.shape[1], norm_weight=norm_weight, norm_bias=norm_bias)
    if norm_bias is not None and norm_weight is None:
        raise ValueError(f"{op}: norm_bias needs a norm_weight, which asks for the norm")
    if not eps >= 0:
        raise ValueError(f"{op}: eps must not be negative; got {eps}")
    if (types is None) != (type_weight is None):
        raise ValueError(f"{op}: types and type_weight belong together; got one of them")
    size = weight.shape[0]
    if padding_idx is not None and not -size <= padding_idx < size:
        raise ValueError(f"{op}: padding_idx must lie in [-{size}, {size}); got {padding_idx}")
    if weight_grad is not None and (
        weight_grad.shape != weight.shape
        or weight_grad.dtype not in (weight.dtype, torch.float32)
        or weight_grad.requires_grad
    ):
        raise ValueError(
            f"{op}: weight_grad must be a {tuple(weight.shape)} buffer of {weight.dtype} or "
            f"float32 without a gradient of its own; got {tuple(weight_grad.shape)} "
            f"{weight_grad.dtype}, requires_grad={weight_grad.requires_grad}"
        )
    ids = _check_index("ids", ids, ids.shape, weight.device)
    positions = _check_positions(ids, positions, cu_seqlens, position_weight, sinusoidal)
    positions, types = (
        index if index is None else _check_index(name, index, ids.shape, weight.device)
        for name, index in (("positions", positions), ("types", types))
    )
    y, _, _ = torch.ops.taut.embedding_fwd(
        ids,
        weight.contiguous(),
        positions,
        _check_table("position_weight", position_weight, weight),
        types,
        _check_table("type_weight", type_weight, weight),
        norm_weight,
        norm_bias,
        weight_grad,
        scale,
        sinusoidal or 0,
        -1 if padding_idx is None else padding_idx % size,
        eps,
        *op_arguments(op, dropout, ids[..., None]),
    )
    return y
