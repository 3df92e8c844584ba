"""Every public op with its reference, inputs and arguments: what test_every_op.py puts to the test.

A new op needs its cases here, and in refusals.py the calls that it must refuse.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from taut import ops
from taut.ops.attention import attention_reference
from taut.ops.cross_entropy import cross_entropy_reference
from taut.ops.dropout import dropout_reference
from taut.ops.embedding import embedding_reference
from taut.ops.gelu import gelu_reference
from taut.ops.linear import linear_reference
from taut.ops.linear_cross_entropy import linear_cross_entropy_reference
from taut.ops.mlp import ACTIVATIONS, mlp_reference
from taut.ops.norm import dropout_add_norm_reference
from taut.ops.softmax_attention import softmax_attention_reference

Shape = tuple[int, ...]
Inputs = list[Tensor | None]


@dataclass(frozen=True)
class Case:
    """An op with one choice of arguments. Its inputs follow from a shape of rows and a dtype."""

    op: str
    name: str
    fn: Callable[..., Any]
    reference: Callable[..., Any]
    make: Callable[[Generator, Shape, torch.dtype], Inputs]
    options: dict[str, Any] = field(default_factory=dict)
    # what wants no gradient, such as ids and offsets, by shape and device
    also: Callable[[Shape, str], dict[str, Any]] | None = None
    differentiable: int | None = None  # of the output: what follows is told, without a gradient
    p: float = 0.0
    has_ids: bool = True  # whether the dropout is given sample ids and positions
    tokens_a_row: int = 1  # for attention, where sequences of one token would be no test
    least_width: int = 1
    is_onednn: bool = False  # which fp32 GEMM runs, whatever the probe would choose here
    factor_32: float = 2  # times the error of plain PyTorch, in fp32

    def inputs(self, shape: Shape, dtype: torch.dtype = torch.float32) -> Inputs:
        return self.make(Generator().manual_seed(0), shape, dtype)

    def kwargs(self, shape: Shape, device: str = "cpu") -> dict[str, Any]:
        kwargs = self.options | (self.also(shape, device) if self.also else {})
        if self.p:
            kwargs = kwargs | {"dropout": self.dropout(shape, device)}
        return kwargs

    def dropout(self, shape: Shape, device: str) -> ops.Dropout:
        if not self.has_ids:
            return ops.Dropout(self.p, seed=2**62 + 5, step=3, site=2**31 + 1)
        rows = self.tokens_a_row * num_rows(shape)
        numbers = torch.randint(2**32, (rows, 2), generator=Generator().manual_seed(1))
        sample_ids, positions = numbers.to(device).unbind(1)  # strided, too
        return ops.Dropout(self.p, 7, 3, 5, sample_ids=sample_ids, positions=positions)

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"


def randn(gen: Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)


def rows_alone(gen: Generator, shape: Shape, dtype: torch.dtype) -> Inputs:
    return [randn(gen, dtype, *shape)]


def away_from_the_minimum(gen: Generator, shape: Shape, dtype: torch.dtype) -> Inputs:
    """Near its minimum GELU cannot be inverted to full precision; test_gelu.py looks there."""
    x = 2 * randn(gen, torch.float64, *shape)
    return [torch.where((x + 0.75).abs() < 0.5, x + 1.5, x).to(dtype)]


def norm_inputs(
    gen: Generator,
    shape: Shape,
    dtype: torch.dtype,
    without: tuple[str, ...] = (),
    has_fp32_vectors: bool = False,
) -> Inputs:
    """x, residual, weight, bias, x_bias."""
    of_vectors = torch.promote_types(dtype, torch.float32) if has_fp32_vectors else dtype
    named = {name: randn(gen, dtype, *shape) for name in ("x", "residual")}
    named |= {name: randn(gen, of_vectors, shape[-1]) for name in VECTORS}
    return [None if name in without else t for name, t in named.items()]


def linear_inputs(
    gen: Generator, shape: Shape, dtype: torch.dtype, without: tuple[str, ...] = ()
) -> Inputs:
    """x, weight, bias; the shape is that of x."""
    width = shape[-1]
    x, weight = randn(gen, dtype, *shape), randn(gen, dtype, 33, width) / width**0.5
    return [x, weight, None if "bias" in without else randn(gen, dtype, 33)]


def mlp_inputs(
    gen: Generator,
    shape: Shape,
    dtype: torch.dtype,
    activation: str = "gelu",
    without: tuple[str, ...] = (),
) -> Inputs:
    """x, w1, b1, w2, b2; the shape is that of the activations."""
    *rows, hidden = shape
    rows_of_w1 = 2 * hidden if ACTIVATIONS[activation][1] else hidden
    named = {
        "x": randn(gen, dtype, *rows, 9),
        "w1": randn(gen, dtype, rows_of_w1, 9) / 3,
        "b1": randn(gen, dtype, rows_of_w1),
        "w2": randn(gen, dtype, 33, hidden) / hidden**0.5,
        "b2": randn(gen, dtype, 33),
    }
    return [None if name in without else t for name, t in named.items()]


def num_rows(shape: Shape) -> int:
    return torch.Size(shape[:-1]).numel()


def attention_inputs(
    gen: Generator, shape: Shape, dtype: torch.dtype, kv_heads: int = 2, more_keys: int = 0
) -> Inputs:
    """q, k, v of two heads."""
    tokens, width = TOKENS_A_ROW * num_rows(shape), shape[-1]
    keys = randn(gen, dtype, 2, tokens + more_keys, kv_heads, width)
    return [randn(gen, dtype, tokens, 2, width), *keys]


def offsets(total: int, device: str) -> Tensor:
    """Four sequences, one of them without tokens."""
    return torch.tensor([0, total // 3, total // 3, (total + 1) // 2, total], device=device).int()


def self_offsets(shape: Shape, device: str) -> dict[str, Any]:
    return {"cu_seqlens_q": offsets(TOKENS_A_ROW * num_rows(shape), device)}


def cross_offsets(shape: Shape, device: str, more_keys: int) -> dict[str, Any]:
    cu_seqlens_k = offsets(TOKENS_A_ROW * num_rows(shape) + more_keys, device).flip(0)
    return self_offsets(shape, device) | {"cu_seqlens_k": cu_seqlens_k[0] - cu_seqlens_k}


TABLES = ("weight", "position_weight", "type_weight", "norm_weight", "norm_bias")
NUM_IDS = {"ids": 11, "positions": 7, "types": 2}


def embedding_inputs(
    gen: Generator,
    shape: Shape,
    dtype: torch.dtype,
    only: tuple[str, ...] = TABLES,
    has_fp32_vectors: bool = False,
) -> Inputs:
    """Those of TABLES; the shape is that of the output."""
    of_vectors = torch.promote_types(dtype, torch.float32) if has_fp32_vectors else dtype
    named = {
        table: randn(gen, dtype, size, shape[-1])
        for table, size in zip(TABLES, NUM_IDS.values(), strict=False)
    }
    named |= {name: randn(gen, of_vectors, shape[-1]) for name in TABLES[3:]}
    return [named[name] if name in only else None for name in TABLES]


def make_ids(shape: Shape, device: str, names: tuple[str, ...] = tuple(NUM_IDS)) -> dict[str, Any]:
    gen = Generator().manual_seed(3)
    return {
        name: torch.randint(NUM_IDS[name], shape[:-1], generator=gen).to(device) for name in names
    }


def positional_tables(form: Callable[..., Any]) -> Callable[..., Any]:
    """embedding with its tables among the inputs, whose gradients are looked at."""

    def embedding(*tables, ids, **kwargs):
        weight, *others = tables
        return form(ids, weight, **dict(zip(TABLES[1:], others, strict=True)), **kwargs)

    return embedding


def softmax_attention_inputs(
    gen: Generator, shape: Shape, dtype: torch.dtype, hides: bool = False
) -> Inputs:
    """Scores and values of two heads: queries are the rows of the shape, keys its columns."""
    *sequences, queries, keys = shape if len(shape) > 1 else (1, *shape)
    scores = randn(gen, dtype, *sequences, 2, queries, keys)
    if hides:  # every third key, and all of them from the first query of the second head
        scores[..., ::3] = -torch.inf
        scores[..., 1, :1, :] = -torch.inf
    return [scores, randn(gen, dtype, *sequences, 2, keys, 5)]


def head_targets(shape: Shape, device: str, ignored: int = -100) -> dict[str, Any]:
    """Classes of the head of linear_inputs; every third row has none."""
    return class_targets((*shape[:-1], 33), device, ignored)


def class_targets(shape: Shape, device: str, ignored: int = -100) -> dict[str, Any]:
    """Classes of logits of this shape; every third row has none."""
    rows = torch.Size(shape[:-1])
    targets = torch.randint(shape[-1], (rows.numel(),), generator=Generator().manual_seed(3))
    targets[1::3] = ignored
    return {"targets": targets.view(rows).to(device)}


def with_each_row(form: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of inputs that all want a gradient, and beside it that of each row.

    The rounding of a sum, one number, may vanish by luck: that of its terms bounds it.
    """

    def losses(x, *weight_and_bias, targets, **kwargs):
        before, after = weight_and_bias[:1], weight_and_bias[1:]
        loss, rows = form(x, *before, targets, *after, with_rows=True, **kwargs)
        if kwargs.get("reduction") == "none":
            return loss[None]  # one element along the first dimension
        return torch.cat([loss[None] / max(targets.numel(), 1), rows.loss.flatten()])

    return losses


def positional_x_bias(form: Callable[..., Any]) -> Callable[..., Any]:
    """dropout_add_norm with its fifth tensor among the inputs, whose gradients are looked at."""

    def norm(x, residual, weight, bias, x_bias, **kwargs):
        return form(x, residual, weight, bias, x_bias=x_bias, **kwargs)

    return norm


def after_norm(norm: Callable[..., Any], form: Callable[..., Any]) -> Callable[..., Any]:
    """form on a norm's output; ours keeps x-hat in its place."""

    def run(x, norm_weight, norm_bias, *weights, **kwargs):
        if norm is dropout_add_norm_reference:
            return form(norm(x, None, norm_weight, norm_bias), *weights, **kwargs)
        y, xhat = norm(x, None, norm_weight, norm_bias, return_xhat=True)
        return form(y, *weights, normed=(xhat, norm_weight, norm_bias), **kwargs)

    return run


def after_norm_inputs(
    gen: Generator,
    shape: Shape,
    dtype: torch.dtype,
    make: Callable[[Generator, Shape, torch.dtype], Inputs],
) -> Inputs:
    x, *weights = make(gen, shape, dtype)
    assert x is not None
    return [x, randn(gen, dtype, x.shape[-1]), randn(gen, dtype, x.shape[-1]), *weights]


VECTORS = ("weight", "bias", "x_bias")
TOKENS_A_ROW = 8
RMS = {"kind": "rms"}
SMOOTHED: dict[str, Any] = {"label_smoothing": 0.1}
# oneDNN sums a row of K products in one chain, where MKL keeps up to 64 sums for few rows: up to
# sqrt(64) times the rounding (measured: 2.9 at K = 3072 and 3.5 at K = 300 on 64 rows of Zen 5,
# 6.7 at K = 255 on 3 rows of an Intel with AVX-512, where the probe does not choose oneDNN)
ONEDNN: dict[str, Any] = {"is_onednn": True, "factor_32": 8}

attention_case = partial(
    Case,
    "attention",
    fn=ops.attention,
    reference=attention_reference,
    make=attention_inputs,
    also=self_offsets,
    tokens_a_row=TOKENS_A_ROW,
)
CROSS: dict[str, Any] = {
    "make": partial(attention_inputs, kv_heads=1, more_keys=5),
    "also": partial(cross_offsets, more_keys=5),
}
# With dropout PyTorch keeps the probabilities p, and in dp - sum(dp * p) much of the rounding of dp
# cancels. From the output alone it does not: measured up to 2.4 times, 6 for heads of one number.
drops_case = partial(attention_case, factor_32=3, least_width=2)
dropout_case = partial(
    Case, "dropout", fn=ops.dropout, reference=dropout_reference, make=rows_alone
)
norm_case = partial(
    Case,
    "dropout_add_norm",
    fn=positional_x_bias(ops.dropout_add_norm),
    reference=positional_x_bias(dropout_add_norm_reference),
    make=norm_inputs,
)
rms_case = partial(norm_case, least_width=2)  # see test_norm.py on rows of one number
embedding_case = partial(
    Case,
    "embedding",
    fn=positional_tables(ops.embedding),
    reference=positional_tables(embedding_reference),
    make=embedding_inputs,
    also=make_ids,
    least_width=2,  # the norm of one number is zero, and its gradient rounding alone
)
token_case = partial(
    embedding_case,
    make=partial(embedding_inputs, only=("weight",)),
    also=partial(make_ids, names=("ids",)),
    least_width=1,
)
gelu_case = partial(Case, "gelu", fn=ops.gelu, reference=gelu_reference, make=away_from_the_minimum)
linear_case = partial(Case, "linear", fn=ops.linear, reference=linear_reference, make=linear_inputs)
mlp_case = partial(Case, "mlp", fn=ops.mlp, reference=mlp_reference, make=mlp_inputs)
softmax_case = partial(
    Case,
    "softmax_attention",
    fn=ops.softmax_attention,
    reference=softmax_attention_reference,
    make=softmax_attention_inputs,
)

cross_entropy_case = partial(
    Case,
    "cross_entropy",
    fn=with_each_row(ops.cross_entropy),
    reference=with_each_row(cross_entropy_reference),
    make=rows_alone,
    also=class_targets,
    differentiable=1,
)
head_case = partial(
    Case,
    "linear_cross_entropy",
    fn=with_each_row(ops.linear_cross_entropy),
    reference=with_each_row(linear_cross_entropy_reference),
    make=linear_inputs,
    also=head_targets,
    differentiable=1,
)

CASES = [
    attention_case("self"),
    drops_case("self, dropout", p=0.1),
    drops_case("causal, by number", p=0.3, has_ids=False, options={"causal": True}),
    attention_case("cross, one head of keys", **CROSS, options={"scale": 0.3}),
    drops_case("cross, causal, dropout", **CROSS, p=0.1, options={"causal": True}),
    dropout_case("off"),
    dropout_case("on", p=0.1),
    dropout_case("by row", p=0.5, has_ids=False),
    norm_case("layer"),
    norm_case("layer, dropout", p=0.1),
    norm_case("layer, fp32 vectors", make=partial(norm_inputs, has_fp32_vectors=True), p=0.1),
    norm_case("layer, x alone", make=partial(norm_inputs, without=("residual", *VECTORS))),
    norm_case("layer, sum", p=0.1, options={"return_sum": True}),
    rms_case("rms", make=partial(norm_inputs, without=("bias",)), options=RMS),
    rms_case("rms, dropout", p=0.1, options=RMS),
    rms_case(
        "rms, sum, no residual",
        make=partial(norm_inputs, without=("residual", "x_bias")),
        p=0.1,
        has_ids=False,
        options=RMS | {"return_sum": True, "eps": 1e-3},
    ),
    token_case("token"),
    token_case("token, scale", options={"scale": 3.0}),
    token_case("token, by row", p=0.5, has_ids=False),
    token_case(
        "token, sinusoidal",
        also=partial(make_ids, names=("ids", "positions")),
        p=0.1,
        options={"scale": 8.0, "sinusoidal": 7},
    ),
    embedding_case("token, position", make=partial(embedding_inputs, only=TABLES[:3]), p=0.1),
    embedding_case("norm"),
    embedding_case("norm, dropout", p=0.1),
    embedding_case("norm, by row", p=0.5, has_ids=False, options={"eps": 1e-3}),
    embedding_case(
        "norm, fp32 vectors", make=partial(embedding_inputs, has_fp32_vectors=True), p=0.1
    ),
    embedding_case(
        "norm, no bias",
        make=partial(embedding_inputs, only=("weight", "norm_weight")),
        also=partial(make_ids, names=("ids",)),
        p=0.1,
    ),
    gelu_case("erf"),
    gelu_case("tanh", options={"tanh": True}),
    linear_case("bias"),
    linear_case("no bias", make=partial(linear_inputs, without=("bias",))),
    linear_case("bias, oneDNN", **ONEDNN),
    linear_case(
        "after a norm",
        fn=after_norm(ops.dropout_add_norm, ops.linear),
        reference=after_norm(dropout_add_norm_reference, linear_reference),
        make=partial(after_norm_inputs, make=linear_inputs),
        least_width=2,
    ),
    mlp_case(
        "after a norm",
        fn=after_norm(ops.dropout_add_norm, ops.mlp),
        reference=after_norm(dropout_add_norm_reference, mlp_reference),
        make=partial(after_norm_inputs, make=mlp_inputs),
        p=0.1,
    ),
    cross_entropy_case("sum"),
    cross_entropy_case("mean, z-loss", options={"reduction": "mean", "z_loss": 1e-2}),
    # of one class PyTorch's gradient is exactly 0, of which no rounding is twice
    cross_entropy_case("none, smoothed", options=SMOOTHED | {"reduction": "none"}, least_width=2),
    cross_entropy_case(
        "sum, smoothed as in fairseq", options=SMOOTHED | {"smoothing": "fairseq"}, least_width=2
    ),
    head_case("sum"),
    head_case("sum, no bias", make=partial(linear_inputs, without=("bias",))),
    head_case("mean, smoothed", options=SMOOTHED | {"reduction": "mean"}),
    head_case("none", options={"reduction": "none"}),
    head_case("none, z-loss", options=SMOOTHED | {"reduction": "none", "z_loss": 1e-2}),
    head_case(
        "sum, smoothed as in fairseq",
        options=SMOOTHED | {"smoothing": "fairseq", "ignore_index": 5},
        also=partial(head_targets, ignored=5),
    ),
    head_case("sum, oneDNN", **ONEDNN),
    mlp_case("no biases", make=partial(mlp_inputs, without=("b1", "b2"))),
    mlp_case("oneDNN", p=0.1, **ONEDNN),
    *(
        mlp_case(
            name, make=partial(mlp_inputs, activation=name), p=0.1, options={"activation": name}
        )
        for name in ACTIVATIONS
    ),
    softmax_case("no dropout"),
    softmax_case("dropout", p=0.1),
    softmax_case("dropout by number", p=0.5, has_ids=False),
    softmax_case("hidden keys", make=partial(softmax_attention_inputs, hides=True)),
    softmax_case("hidden keys, dropout", make=partial(softmax_attention_inputs, hides=True), p=0.1),
]


def accumulate_into_a_buffer() -> None:
    x, weight, _ = (t.requires_grad_() for t in CASES_BY_NAME["linear: bias"].inputs((2, 3)))
    ops.linear(x, weight, weight_grad=torch.zeros(33, 3)).sum().backward()


def add_to_a_table_buffer() -> None:
    weight = torch.ones(5, 3, requires_grad=True)
    ids = torch.tensor([1, 4, 1])
    ops.embedding(ids, weight, weight_grad=torch.zeros(5, 3)).sum().backward()


def count_positions() -> None:
    weight = torch.ones(5, 3, requires_grad=True)
    offsets = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    ops.embedding(
        torch.tensor([1, 4, 1]), weight, cu_seqlens=offsets, sinusoidal=2
    ).sum().backward()


def overwrite_the_logits() -> None:
    logits, targets = torch.ones(2, 3).requires_grad_(), torch.tensor([0, 2])
    ops.cross_entropy(logits, targets, in_place=True).backward()


CASES_BY_NAME = {str(case): case for case in CASES}
# Calls that reach raw ops which no case reaches.
FURTHER_CALLS = [
    accumulate_into_a_buffer,
    add_to_a_table_buffer,
    count_positions,
    overwrite_the_logits,
]
