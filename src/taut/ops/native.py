"""The C++ kernels of csrc/, checked and called here alone.

Without a library (no compiler at install, or run from the source tree) `library` is None and every
op runs on its composite; `taut info` says which and why.
"""

import logging
from collections.abc import Sequence
from ctypes import byref, c_double, c_float, c_int64, c_void_p, cast
from typing import Any

import torch
from torch import Tensor

from .checks import check_offsets
from .library import (
    Activation,
    Attention,
    CrossEntropy,
    Dropout,
    Embedding,
    Heads,
    NormBwd,
    NormFwd,
    Softmax,
    Step,
    TableGrad,
    load,
)
from .random import derive_key, keep_scale, threshold

log = logging.getLogger(__name__)

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # codes of with_storage in vec.h

library, build = load()
if library is None:
    log.info("CPU ops run on PyTorch composites: %s", build)


def takes(x: Tensor) -> bool:
    """Whether x can go to a C++ kernel."""
    return library is not None and x.dtype in _DTYPES


def _pointer(t: Tensor | None, dtype: torch.dtype | None = None) -> int | None:
    """The address of a tensor, once it is certain that a kernel may read it as it lies."""
    if t is None:
        return None
    assert t.is_cpu, t.device
    assert t.is_contiguous(), t.stride()
    assert dtype is None or t.dtype == dtype, (t.dtype, dtype)
    return t.data_ptr()


def _float(t: Tensor | None) -> Tensor | None:
    """A parameter vector as the kernels read it."""
    return None if t is None else t.to(torch.float32).contiguous()


def _dropout(arguments: Sequence[Any]) -> Dropout:
    p, seed, step, site, sample_ids, positions = arguments
    if p == 0.0:
        return Dropout(threshold=0, scale=1.0)
    return Dropout(
        threshold(p),
        *derive_key(seed, step, site),
        keep_scale(p),
        _pointer(sample_ids, torch.int64),
        _pointer(positions, torch.int64),
    )


def _rows(x: Tensor) -> tuple[int, int]:
    return x.shape[:-1].numel(), x.shape[-1]


def dropout(x: Tensor, arguments: Sequence[Any]) -> Tensor:
    assert library is not None
    y = torch.empty_like(x)
    d = _dropout(arguments)
    library.taut_dropout(_DTYPES[x.dtype], *_rows(x), _pointer(x), _pointer(y, x.dtype), byref(d))
    return y


def norm_fwd(
    x: Tensor,
    residual: Tensor | None,
    x_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    is_rms: bool,
    with_sum: bool,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert library is not None
    rows, width = _rows(x)
    y, xhat = torch.empty_like(x), torch.empty_like(x)
    rstd = x.new_empty(rows, dtype=torch.float32)
    kept_sum = torch.empty_like(x) if with_sum else x.new_empty(0)
    x_bias, weight, bias = _float(x_bias), _float(weight), _float(bias)
    a = NormFwd(
        rows,
        width,
        _pointer(x),
        _pointer(residual, x.dtype),
        _pointer(x_bias),
        _pointer(weight),
        _pointer(bias),
        _pointer(y),
        _pointer(xhat),
        _pointer(rstd),
        _pointer(kept_sum) if with_sum else None,
        eps,
        is_rms,
    )
    d = _dropout(arguments)
    library.taut_norm_fwd(_DTYPES[x.dtype], byref(a), byref(d))
    return y, xhat, rstd, kept_sum


def norm_bwd(
    dy: Tensor,
    dsum: Tensor | None,
    xhat: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    is_rms: bool,
    with_residual: bool,
    with_affine: bool,
    with_x_bias: bool,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    assert library is not None
    rows, width = _rows(dy)
    d = _dropout(arguments)
    apart = with_residual and d.threshold > 0  # else both gradients are one tensor
    dx = torch.empty_like(dy)
    dresidual = torch.empty_like(dy) if apart else dy.new_empty(0)
    dweight, dbias, dx_bias = (
        rstd.new_empty(width if wanted else 0) for wanted in (with_affine, with_affine, with_x_bias)
    )
    weight = _float(weight)
    a = NormBwd(
        rows,
        width,
        _pointer(dy),
        _pointer(dsum, dy.dtype),
        _pointer(xhat, dy.dtype),
        _pointer(rstd, torch.float32),
        _pointer(weight),
        _pointer(dx),
        _pointer(dresidual) if apart else None,
        _pointer(dweight) if with_affine else None,
        _pointer(dbias) if with_affine else None,
        _pointer(dx_bias) if with_x_bias else None,
        is_rms,
    )
    library.taut_norm_bwd(_DTYPES[dy.dtype], byref(a), byref(d))
    return dx, dresidual, dweight, dbias, dx_bias


def activation_fwd(u: Tensor, code: int, gated: bool, arguments: Sequence[Any]) -> Tensor:
    assert library is not None
    rows, width = _rows(u)
    width = width // 2 if gated else width
    out = u.new_empty(*u.shape[:-1], width)
    a = Activation(rows, width, _pointer(u), None, _pointer(out), None, None, code, gated)
    d = _dropout(arguments)
    library.taut_activation_fwd(_DTYPES[u.dtype], byref(a), byref(d))
    return out


def activation_bwd(
    da: Tensor, u: Tensor, code: int, gated: bool, arguments: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    assert library is not None
    du, out = torch.empty_like(u), torch.empty_like(da)
    du_sum = u.new_empty(u.shape[-1], dtype=torch.float32)
    a = Activation(
        *_rows(da),
        _pointer(u),
        _pointer(da, u.dtype),
        _pointer(out),
        _pointer(du),
        _pointer(du_sum),
        code,
        gated,
    )
    d = _dropout(arguments)
    library.taut_activation_bwd(_DTYPES[u.dtype], byref(a), byref(d))
    return du, out, du_sum


def gelu_fwd(x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    assert library is not None
    y, side = torch.empty_like(x), x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)
    library.taut_gelu_fwd(
        _DTYPES[x.dtype], x.numel(), _pointer(x), tanh, _pointer(y), _pointer(side)
    )
    return y, side


def gelu_bwd(dy: Tensor, y: Tensor, side: Tensor, tanh: bool) -> Tensor:
    assert library is not None
    dx = torch.empty_like(dy)
    library.taut_gelu_bwd(
        _DTYPES[y.dtype],
        y.numel(),
        _pointer(dy, y.dtype),
        _pointer(y),
        _pointer(side, torch.uint8),
        tanh,
        _pointer(dx),
    )
    return dx


def column_sum(x: Tensor) -> Tensor:
    assert library is not None
    total = x.new_empty(x.shape[-1], dtype=torch.float32)
    library.taut_column_sum(_DTYPES[x.dtype], *_rows(x), _pointer(x), _pointer(total))
    return total


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    drows: Tensor | None,
    grad: Tensor | None,
    loss: Tensor | None,
    stats: Tensor | None,
    correct: Tensor | None,
    *criterion: Any,
) -> None:
    assert library is not None
    ignore_index, *weights = criterion
    a = CrossEntropy(
        *_rows(logits),
        ignore_index,
        _pointer(logits),
        _pointer(targets, torch.int64),
        _pointer(drows, torch.float32),
        _pointer(grad, logits.dtype),
        _pointer(loss, torch.float32),
        _pointer(stats, torch.float32),
        _pointer(correct, torch.bool),
        *weights,
    )
    library.taut_cross_entropy(_DTYPES[logits.dtype], byref(a))


def accumulate(high: Tensor, low: Tensor | None, add: Tensor, has_low: bool, is_last: bool) -> None:
    """Add to sums in fp32 of which `high` (bfloat16) and `low` (int16) hold half the bits each."""
    assert library is not None
    halves = _pointer(high, torch.bfloat16), _pointer(low, torch.int16)
    library.taut_accumulate(add.numel(), _pointer(add, high.dtype), *halves, has_low, is_last)


def with_huge_pages(x: Tensor) -> Tensor:
    """A large tensor that nobody has written to yet, so that its first touch is cheap."""
    if library is not None and x.is_cpu:
        library.taut_ask_for_huge_pages(x.data_ptr(), x.nbytes)
    return x


def _offsets(cu_seqlens: Tensor, tokens: int) -> int | None:
    check_offsets("attention", cu_seqlens, tokens)
    return _pointer(cu_seqlens, torch.int32)


def _heads(t: Tensor, dtype: torch.dtype) -> Heads:
    assert t.is_cpu, t.device
    assert t.stride(-1) == 1, t.stride()
    assert t.dtype == dtype, (t.dtype, dtype)
    return Heads(t.data_ptr(), t.stride(0), t.stride(1))


def _attention(
    heads: dict[str, Tensor],
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    scale: float,
    *arguments: Any,
) -> tuple[Attention, Dropout]:
    q, k = heads["q"], heads["k"]
    *where, key_positions, first_head = arguments
    a = Attention(
        cu_seqlens_q.shape[0] - 1,
        q.shape[1],
        k.shape[1],
        q.shape[2],
        _offsets(cu_seqlens_q, q.shape[0]),
        _offsets(cu_seqlens_k, k.shape[0]),
        lse=_pointer(lse, torch.float32),
        scale=scale,
        causal=causal,
        key_positions=_pointer(key_positions, torch.int64),
        first_head=first_head,
        **{name: _heads(t, q.dtype) for name, t in heads.items()},
    )
    return a, _dropout(where)


def attention_fwd(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    assert library is not None
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
    a, d = _attention({"q": q, "k": k, "v": v, "out": out}, lse, *arguments)
    library.taut_attention_fwd(_DTYPES[q.dtype], byref(a), byref(d))
    return out, lse


def attention_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    assert library is not None
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    heads = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
    a, d = _attention(heads, lse, *arguments)
    library.taut_attention_bwd(_DTYPES[q.dtype], byref(a), byref(d))
    return dq, dk, dv


def embedding_fwd(
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
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    assert library is not None
    dtype, has_norm = weight.dtype, norm_weight is not None
    y = weight.new_empty(*ids.shape, weight.shape[1])
    xhat = torch.empty_like(y) if has_norm else weight.new_empty(0)
    rstd = weight.new_empty(ids.numel() if has_norm else 0, dtype=torch.float32)
    sinusoids = position_weight
    if position_weight is not None and position_weight.dtype == dtype:  # in fp32 it is one table
        sinusoids = None
    else:
        position_weight = None
    norm_weight, norm_bias = _float(norm_weight), _float(norm_bias)
    a = Embedding(
        *_rows(y),
        *(_pointer(index, torch.int64) for index in (ids, positions, types)),
        *(_pointer(table, dtype) for table in (weight, position_weight, type_weight)),
        *(_pointer(t, torch.float32) for t in (sinusoids, norm_weight, norm_bias)),
        y=_pointer(y),
        xhat=_pointer(xhat),
        rstd=_pointer(rstd),
        scale=scale,
        eps=eps,
    )
    d = _dropout(arguments)
    library.taut_embedding_fwd(_DTYPES[dtype], byref(a), byref(d))
    return y, xhat, rstd


def embedding_bwd(
    dy: Tensor,
    xhat: Tensor | None,
    rstd: Tensor | None,
    norm_weight: Tensor | None,
    with_affine: bool,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    assert library is not None
    rows, width = _rows(dy)
    dz = torch.empty_like(dy, dtype=torch.float32)
    is_summed = with_affine and norm_weight is not None
    dnorm_weight, dnorm_bias = (dz.new_empty(width if is_summed else 0) for _ in range(2))
    norm_weight = _float(norm_weight)
    a = Embedding(
        rows,
        width,
        norm_weight=_pointer(norm_weight),
        dy=_pointer(dy),
        xhat=_pointer(xhat, dy.dtype),
        rstd=_pointer(rstd, torch.float32),
        dz=_pointer(dz),
        dnorm_weight=_pointer(dnorm_weight) if is_summed else None,
        dnorm_bias=_pointer(dnorm_bias) if is_summed else None,
    )
    d = _dropout(arguments)
    library.taut_embedding_bwd(_DTYPES[dy.dtype], byref(a), byref(d))
    return dz, dnorm_weight, dnorm_bias


def embedding_wgrad(
    is_added: bool, out: Tensor, dz: Tensor, ids: Tensor, scale: float, padding_idx: int
) -> None:
    assert library is not None
    a = TableGrad(
        *_rows(dz),
        out.shape[0],
        _pointer(ids, torch.int64),
        _pointer(dz),
        _pointer(out),
        padding_idx,
        scale,
        is_added,
    )
    library.taut_table_grad(_DTYPES[dz.dtype], _DTYPES[out.dtype], byref(a))


def _softmax(
    matrices: dict[str, Tensor | None], first: int, heads: int, arguments: Sequence[Any]
) -> tuple[Softmax, Dropout]:
    p = matrices["p"]
    assert p is not None
    *where, key_positions, first_head = arguments
    a = Softmax(
        first,
        p.shape[0],
        heads,
        *p.shape[1:],
        key_positions=_pointer(key_positions, torch.int64),
        first_head=first_head,
        **{name: _pointer(t, p.dtype) for name, t in matrices.items()},
    )
    return a, _dropout(where)


def softmax_fwd(
    scores: Tensor, p: Tensor, dropped: Tensor | None, first: int, heads: int, *arguments: Any
) -> None:
    assert library is not None
    a, d = _softmax({"scores": scores, "p": p, "dropped": dropped}, first, heads, arguments)
    library.taut_softmax_fwd(_DTYPES[p.dtype], byref(a), byref(d))


def softmax_bwd(
    p: Tensor,
    dp: Tensor | None,
    ds: Tensor,
    dropped: Tensor | None,
    first: int,
    heads: int,
    *arguments: Any,
) -> None:
    assert library is not None
    a, d = _softmax({"p": p, "dp": dp, "ds": ds, "dropped": dropped}, first, heads, arguments)
    library.taut_softmax_bwd(_DTYPES[p.dtype], byref(a), byref(d))


def products(out: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """out = scale * a b, of many small float32 matrices."""
    assert library is not None
    assert out.dtype == a.dtype == b.dtype == torch.float32, (out.dtype, a.dtype, b.dtype)
    assert a.is_cpu, a.device
    assert b.is_cpu, b.device
    operands = (a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride())
    library.taut_products(*out.shape, a.shape[2], *operands, _pointer(out), scale)


def _pointers(tensors: Sequence[Tensor], dtype: torch.dtype) -> Any:
    return (c_void_p * len(tensors))(*(_pointer(t, dtype) for t in tensors))


def _sizes(tensors: Sequence[Tensor]) -> Any:
    return (c_int64 * len(tensors))(*(t.numel() for t in tensors))


def optimizer_step(
    weights: Sequence[Tensor],
    lows: Sequence[Tensor] | None,
    grads: Sequence[Tensor],
    first: Sequence[Tensor] | None,
    second: Sequence[Tensor] | None,
    decays: Sequence[float],
    *numbers: float,  # in the order of Step
) -> None:
    assert library is not None
    dtype, grad_dtype = weights[0].dtype, grads[0].dtype
    for others in (lows, grads, first, second):
        assert others is None or [t.numel() for t in others] == [t.numel() for t in weights]
    arrays = (
        _sizes(weights),
        _pointers(weights, dtype),
        None if lows is None else _pointers(lows, torch.int16),
        _pointers(grads, grad_dtype),
        None if first is None else _pointers(first, torch.float32),
        None if second is None else _pointers(second, torch.float32),
        (c_float * len(decays))(*decays),
    )
    a = Step(len(weights), *(None if x is None else cast(x, c_void_p) for x in arrays), *numbers)
    library.taut_optimizer_step(_DTYPES[dtype], _DTYPES[grad_dtype], byref(a))


def sum_of_squares(grads: Sequence[Tensor]) -> float:
    """Of gradients of one dtype, in blocks of fp32 that are summed in double."""
    assert library is not None
    total, dtype = c_double(), grads[0].dtype
    arrays = _sizes(grads), _pointers(grads, dtype)
    library.taut_sum_of_squares(_DTYPES[dtype], len(grads), *arrays, byref(total))
    return total.value
