"""Attention over packed sequences of any length, self, causal or cross:

    s = scale log2(e) q k^T over the keys that a query sees,   lse = log2 sum 2^s
    p = 2^(s - lse),   out = dropout(p) v

    dv = dropout(p)^T dout,   dp = dropout(dout v^T),   ds = p * (dp - sum(dout * out))
    dq = scale * ds k,        dk = scale * ds^T q

A causal query sees the keys up to its own place, where the last query of a sequence stands at its
last key: fewer queries than keys are the end of the sequence. A query without keys gives zero.

Saves q, k, v, out and lse (4 bytes a query and head). There is no padding to compute anything on.
Sums over keys and queries are in fp32; the gradients have the same bits in every run.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import native
from .autograd import register_autograd
from .checks import check_floating, check_offsets
from .random import (
    KEYS_SCHEMA,
    SCHEMA,
    Dropout,
    attention_arguments,
    keep_heads,
    keep_scale,
)

torch.library.define(
    "taut::attention_fwd",
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, bool causal, "
    f"float scale, {SCHEMA}, {KEYS_SCHEMA}) -> (Tensor, Tensor)",
)
torch.library.define(
    "taut::attention_bwd",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens_q, "
    f"Tensor cu_seqlens_k, bool causal, float scale, {SCHEMA}, {KEYS_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor)",
)


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """The truth every kernel is held to: plain PyTorch, differentiated by autograd."""
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    where = attention_arguments("attention", dropout, q, k)
    out = torch.zeros_like(q) + 0 * (q.sum() + k.sum() + v.sum())  # gradients, be they all zero
    for i, rows, keys in _sequences(q, k, cu_seqlens_q, cu_seqlens_k):
        drop = _drop(q, i, rows, keys, *where)
        here = _attend(q[None, rows], k[None, keys], v[None, keys], causal, scale, drop)
        out = torch.cat([out[: rows.start], here[0], out[rows.stop :]])
    return out


def _sequences(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> Iterator[tuple[int, slice, slice]]:
    """The number, queries and keys of the sequences that have both."""
    offsets_q = check_offsets("attention", cu_seqlens_q, q.shape[0])
    offsets_k = check_offsets("attention", cu_seqlens_k, k.shape[0])
    for i in range(len(offsets_q) - 1):
        rows, keys = slice(*offsets_q[i : i + 2]), slice(*offsets_k[i : i + 2])
        if rows.stop > rows.start and keys.stop > keys.start:
            yield i, rows, keys


def _drop(q: Tensor, i: int, rows: slice, keys: slice, p: float, *where: Any) -> Tensor | None:
    """What the probabilities of sequence i, (1, heads, queries, keys), are multiplied by."""
    if p == 0.0:
        return None
    seed, step, site, sample_ids, positions, key_positions, first_head = where
    queries = torch.arange(rows.stop - rows.start, device=q.device)
    keep = keep_heads(
        q.shape[1],
        first_head,
        torch.full_like(queries, i) if sample_ids is None else sample_ids[rows],
        queries if positions is None else positions[rows],
        torch.arange(keys.stop - keys.start, device=q.device)
        if key_positions is None
        else key_positions[keys],
        *(p, seed, step, site),
    )
    return keep[None].to(q.dtype) * keep_scale(p)


def _attend(
    q: Tensor,  # (B, queries, H, E)
    k: Tensor,  # (B, keys, K, E)
    v: Tensor,
    causal: bool,
    scale: float,
    drop: Tensor | None,
) -> Tensor:
    """Attention of sequences of equal lengths."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    heads = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(heads, 1) for x in (k, v))
    visible = _visible(q.shape[2], k.shape[2], q.device) if causal else None
    if drop is not None:
        return (_probabilities(q @ k.transpose(-1, -2) * scale, visible) * drop @ v).transpose(1, 2)
    if visible is None:
        return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)
    seen = visible.any(1)[:, None]
    out = F.scaled_dot_product_attention(q, k, v, visible | ~seen, scale=scale)
    return torch.where(seen, out, 0.0).transpose(1, 2)


def _visible(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Which keys a causal query sees, (queries, keys)."""
    place = torch.arange(num_queries, device=device) + num_keys - num_queries
    return torch.arange(num_keys, device=device) <= place[:, None]


def _probabilities(scores: Tensor, visible: Tensor | None) -> Tensor:
    """Softmax over the visible keys; zero for a query that sees none."""
    if visible is None:
        return scores.softmax(-1)
    hidden = ~visible & visible.any(-1, keepdim=True)  # else the gradient of a blind row is NaN
    return torch.where(visible, scores.masked_fill(hidden, -math.inf).softmax(-1), 0.0)


def _composite_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    scale: float,
    *where: Any,
) -> tuple[Tensor, Tensor]:
    """Sequences of equal lengths together. The backward pass needs no lse: it is zero."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    groups: dict[tuple[int, int], list[tuple[int, slice, slice]]] = {}
    for i, rows, keys in _sequences(q, k, cu_seqlens_q, cu_seqlens_k):
        lengths = (rows.stop - rows.start, keys.stop - keys.start)
        groups.setdefault(lengths, []).append((i, rows, keys))
    for group in groups.values():
        qs = torch.stack([q[rows] for _, rows, _ in group])
        ks, vs = (torch.stack([x[keys] for _, _, keys in group]) for x in (k, v))
        drops = [_drop(q, *sequence, *where) for sequence in group]
        drop = torch.cat([d for d in drops if d is not None]) if where[0] else None
        for (_, rows, _), here in zip(group, _attend(qs, ks, vs, causal, scale, drop), strict=True):
            out[rows] = here
    wide = torch.promote_types(q.dtype, torch.float32)
    return out, q.new_zeros(q.shape[:2], dtype=wide)


def _composite_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _out: Tensor,
    _lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    scale: float,
    *where: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    heads = q.shape[1] // k.shape[1]
    for i, rows, keys in _sequences(q, k, cu_seqlens_q, cu_seqlens_k):
        qi, douti = (x[rows].to(wide).transpose(0, 1) for x in (q, dout))
        ki, vi = (x[keys].to(wide).transpose(0, 1).repeat_interleave(heads, 0) for x in (k, v))
        visible = _visible(qi.shape[1], ki.shape[1], q.device) if causal else None
        p = _probabilities(qi @ ki.transpose(1, 2) * scale, visible)
        drop = _drop(q, i, rows, keys, *where)
        dropped = p if drop is None else p * drop[0]
        dp = douti @ vi.transpose(1, 2)
        dp = dp if drop is None else dp * drop[0]
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        dq[rows] = (ds @ ki).transpose(0, 1).to(q.dtype)
        for dx, of_heads in ((dk, ds.transpose(1, 2) @ qi), (dv, dropped.transpose(1, 2) @ douti)):
            dx[keys] = of_heads.unflatten(0, (-1, heads)).sum(1).transpose(0, 1).to(q.dtype)
    return dq, dk, dv


torch.library.impl("taut::attention_fwd", "default", _composite_fwd)
torch.library.impl("taut::attention_bwd", "default", _composite_bwd)


@torch.library.impl("taut::attention_fwd", "cpu")
def _(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    form = native.attention_fwd if native.takes(q) else _composite_fwd
    return form(q, *arguments)


@torch.library.impl("taut::attention_bwd", "cpu")
def _(dout: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    form = native.attention_bwd if native.takes(dout) else _composite_bwd
    return form(dout, *arguments)


def _triton_takes(q: Tensor) -> bool:
    return q.dtype != torch.float64 and q.shape[-1] <= 256


@torch.library.impl("taut::attention_fwd", "cuda")
def _(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    if not _triton_takes(q):
        return _composite_fwd(q, *arguments)
    from .triton.attention import attention_fwd  # imported on use: a CPU install has no Triton

    return attention_fwd(q, *arguments)


@torch.library.impl("taut::attention_bwd", "cuda")
def _(dout: Tensor, q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    if not _triton_takes(q):
        return _composite_bwd(dout, q, *arguments)
    from .triton.attention_bwd import attention_bwd

    return attention_bwd(dout, q, *arguments)


@torch.library.register_fake("taut::attention_fwd")
def _(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale, *where):
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=wide)


@torch.library.register_fake("taut::attention_bwd")
def _(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, causal, scale, *where):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup_context(ctx, inputs, output):
    q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale, *where = inputs
    p, seed, step, site, sample_ids, positions, key_positions, first_head = where
    ctx.save_for_backward(
        q, k, v, *output, cu_seqlens_q, cu_seqlens_k, sample_ids, positions, key_positions
    )
    ctx.causal, ctx.scale = causal, scale
    ctx.scalars, ctx.first_head = (p, seed, step, site), first_head
    ctx.set_materialize_grads(False)  # lse has no gradient: no tensor of zeros for it


def _backward(ctx, dout, _dlse):
    if dout is None:
        return (None,) * 15
    *tensors, sample_ids, positions, key_positions = ctx.saved_tensors
    grads = torch.ops.taut.attention_bwd(
        _dense(dout),
        *tensors,
        ctx.causal,
        ctx.scale,
        *ctx.scalars,
        sample_ids,
        positions,
        key_positions,
        ctx.first_head,
    )
    needed = (g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False))
    return *needed, *(None,) * 12


register_autograd("attention_fwd", _backward, _setup_context)


def _dense(x: Tensor) -> Tensor:
    """x with its features side by side: views of one projection of q, k and v go in as they lie."""
    return x if x.stride(-1) == 1 else x.contiguous()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """Softmax attention of each packed sequence: softmax(scale q k^T) v, shaped as q.

    q: (Tq, H, E), k, v: (Tk, K, E), one dtype, H a multiple of K: query head h meets key head
    h // (H / K). cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, as in PackedBatch; without the second
    one keys belong to sequences as queries do. causal aligns the last query of a sequence with its
    last key. scale: 1 / sqrt(E) without one. dropout acts on the probabilities. A query without
    keys gives zero.
    """
    check_floating("attention", q=q, k=k, v=v)
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if scale < 0:  # kernels look for the largest q k
        q, scale = -q, -scale
    return torch.ops.taut.attention_fwd(
        _dense(q),
        _dense(k),
        _dense(v),
        cu_seqlens_q.contiguous(),
        cu_seqlens_k.contiguous(),
        causal,
        scale,
        *attention_arguments("attention", dropout, q, k),
    )[0]


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    shown = (
        f"q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype}"
    )
    is_shaped = q.dim() == k.dim() == 3 and k.shape == v.shape and q.shape[-1] == k.shape[-1] > 0
    if not is_shaped or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"attention: q must be (Tq, H, E), k and v (Tk, K, E), of one dtype; got {shown}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"attention: the heads of q must be a multiple of those of k; got {shown}")
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if (
            cu_seqlens.dim() != 1
            or cu_seqlens.shape[0] != cu_seqlens_q.shape[0]
            or cu_seqlens.shape[0] < 2
            or cu_seqlens.dtype != torch.int32
            or cu_seqlens.device != q.device
        ):
            raise ValueError(
                f"attention: {name} must hold B + 1 >= 2 offsets, int32 on {q.device}, as many as "
                f"cu_seqlens_q; got {tuple(cu_seqlens.shape)} {cu_seqlens.dtype} on "
                f"{cu_seqlens.device} beside {tuple(cu_seqlens_q.shape)}"
            )
