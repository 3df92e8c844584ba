"""Every call that a public op must refuse, with the sentence that it must answer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from taut import ops

ELSEWHERE = "all tensors must be on cpu; "


@dataclass(frozen=True)
class Refusal:
    """A call that must end in a ValueError, and a pattern of its sentence."""

    op: str
    name: str
    call: Callable[[], object]
    sentence: str

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"


def refusals() -> Iterator[Refusal]:
    x = torch.ones(2, 4)
    vector = torch.ones(4)
    for op, one_tensor in {
        "dropout": ops.dropout,
        "dropout_add_norm": lambda x: ops.dropout_add_norm(x, None, None),
        "gelu": ops.gelu,
        "cross_entropy": lambda x: ops.cross_entropy(x, torch.zeros(2).long()),
        "linear": lambda x: ops.linear(x, torch.ones(3, 4)),
        "linear_cross_entropy": lambda x: ops.linear_cross_entropy(
            x, torch.ones(3, 4), torch.zeros(2).long()
        ),
        "mlp": lambda x: ops.mlp(x, torch.ones(3, 4), None, torch.ones(2, 3), None),
    }.items():
        refuse = partial(Refusal, op)
        name = "logits" if op == "cross_entropy" else "x"
        dense = rf"{op}: {name} must be a dense float32, bfloat16, float16 or float64 tensor; got "
        yield refuse("integers", partial(one_tensor, x.long()), dense + "torch.int64")
        yield refuse("complex", partial(one_tensor, x + 0j), dense + "torch.complex64")
        yield refuse("sparse", partial(one_tensor, x.to_sparse()), dense + ".*sparse_coo")
        if op != "gelu":
            shape = rf"{op}: {name} must be shaped \(\.\.\., D\), D >= 1; got "
            yield refuse("scalar", partial(one_tensor, torch.ones(())), shape + r"\(\)")
            yield refuse("no columns", partial(one_tensor, torch.ones(2, 0)), shape + r"\(2, 0\)")
    yield from attention_refusals()
    yield from norm_refusals(x, vector)
    yield from embedding_refusals()
    yield from linear_refusals(x)
    yield from loss_refusals(x)
    yield from mlp_refusals(x)
    yield from dropout_refusals(x)
    yield from softmax_attention_refusals()


def attention_refusals() -> Iterator[Refusal]:
    op = "attention"
    q, k, cu_seqlens = torch.ones(5, 4, 8), torch.ones(7, 2, 8), torch.tensor([0, 2, 5]).int()

    def refuse(name: str, sentence: str, *args: Any, **kwargs: Any) -> Refusal:
        return Refusal(op, name, lambda: ops.attention(*args, **kwargs), f"{op}: {sentence}")

    yield refuse("integers", "q must be a dense .*; got torch.int64", q.long(), q, q, cu_seqlens)
    yield refuse("device", ELSEWHERE + "v is on meta", q, q, q.to("meta"), cu_seqlens)
    shapes = r"q must be \(Tq, H, E\), k and v \(Tk, K, E\), of one dtype; got q "
    for name, tensors, shown in (
        ("flat", (q[0], q, q), r"\(4, 8\)"),
        ("widths", (q, q[..., 1:], q[..., 1:]), r"\(5, 4, 8\) .* k \(5, 4, 7\)"),
        ("no width", (q[..., :0],) * 3, r"\(5, 4, 0\)"),
        ("values", (q, k, k[1:]), r".* k \(7, 2, 8\) .* v \(6, 2, 8\)"),
        ("dtypes", (q, q, q.bfloat16()), r".* v \(5, 4, 8\) torch.bfloat16"),
    ):
        yield refuse(name, shapes + shown, *tensors, cu_seqlens)
    heads = "the heads of q must be a multiple of those of k; got "
    yield refuse("heads", heads, q, *(torch.ones(5, 3, 8),) * 2, cu_seqlens)
    yield refuse("no heads", heads, q, *(q[:, :0],) * 2, cu_seqlens)
    for name, bad, shown in (
        ("int64", cu_seqlens.long(), r"\(3,\) torch.int64"),
        ("2-D", cu_seqlens[None], r"\(1, 3\)"),
        ("no sequence", cu_seqlens[:1], r"\(1,\)"),
        ("device", cu_seqlens.to("meta"), "on meta"),
    ):
        sentence = rf"cu_seqlens_q must hold B \+ 1 >= 2 offsets, int32 on cpu, .*; got .*{shown}"
        yield refuse(f"offsets {name}", sentence, q, q, q, bad)
    more = torch.tensor([0, 2, 5, 7]).int()
    sentence = r"cu_seqlens_k must hold .* as many as cu_seqlens_q; got \(4,\)"
    yield refuse("numbers of sequences", sentence, q, k, k, cu_seqlens, more)
    for name, values in (("start", [1, 2, 5]), ("decrease", [0, 6, 5]), ("end", [0, 2, 4])):
        bad = torch.tensor(values).int()
        sentence = "cu_seqlens must start at 0, not decrease and end at 5 tokens; got "
        yield refuse(f"offsets {name}", sentence, q, q, q, bad)
        yield refuse(f"offsets of keys {name}", sentence, q, q, q, cu_seqlens, bad)
    for name, length in (("positions", 4), ("key_positions", 6)):
        dropout = ops.Dropout(0.1, 0, **{name: torch.arange(length)})
        sentence = rf"dropout.{name} must hold one int64 per row on cpu; got \({length},\)"
        args = (q, k, k, cu_seqlens, torch.tensor([0, 2, 7]).int())
        yield refuse(name, sentence, *args, dropout=dropout)


def norm_refusals(x: Tensor, vector: Tensor) -> Iterator[Refusal]:
    op = "dropout_add_norm"

    def refuse(name: str, sentence: str, *args: Any, **kwargs: Any) -> Refusal:
        return Refusal(op, name, lambda: ops.dropout_add_norm(*args, **kwargs), f"{op}: {sentence}")

    unlike = r"these must be alike in shape and dtype: x \(2, 4\) torch.float32, residual "
    yield refuse("residual shape", unlike + r"\(2, 5\)", x, torch.ones(2, 5), vector)
    yield refuse("residual broadcast", unlike + r"\(1, 4\)", x, x[:1], vector)
    yield refuse("residual dtype", unlike + r"\(2, 4\) torch.bfloat16", x, x.bfloat16(), vector)
    yield refuse("residual device", ELSEWHERE + "residual is on meta", x, x.to("meta"), vector)
    yield refuse("weight shape", r"weight must be shaped \(4,\); got \(5,\)", x, x, torch.ones(5))
    yield refuse("weight 2-D", r"weight must be shaped \(4,\); got \(1, 4\)", x, x, x[:1])
    yield refuse("weight integers", "weight must be a dense", x, x, vector.long())
    yield refuse("weight device", ELSEWHERE + "weight is on meta", x, x, vector.to("meta"))
    yield refuse("bias shape", r"bias must be shaped \(4,\); got \(3,\)", x, x, None, vector[:3])
    bad = vector[:1]
    yield refuse("x_bias shape", r"x_bias must be .*; got \(1,\)", x, x, None, x_bias=bad)
    yield refuse("kind", "kind must be one of layer, rms; got 'batch'", x, x, None, kind="batch")
    yield refuse("eps", "eps must not be negative; got -1e-05", x, x, None, eps=-1e-5)
    yield refuse("eps nan", "eps must not be negative; got nan", x, x, None, eps=float("nan"))


def embedding_refusals() -> Iterator[Refusal]:
    op, ids, weight, vector = "embedding", torch.tensor([0, 2]), torch.ones(3, 4), torch.ones(4)

    def refuse(name: str, sentence: str, ids: Tensor = ids, weight: Tensor = weight, **kw: Any):
        return Refusal(op, name, lambda: ops.embedding(ids, weight, **kw), f"{op}: {sentence}")

    yield refuse("weight integers", "weight must be a dense", weight=weight.long())
    yield refuse("weight sparse", "weight must be a dense", weight=weight.to_sparse())
    yield refuse("weight 1-D", r"weight must be shaped \(V, D\), .*; got \(4,\)", weight=vector)
    no_columns = torch.ones(3, 0)
    yield refuse("no columns", r"weight must be shaped \(V, D\).*got \(3, 0\)", weight=no_columns)
    yield refuse("float ids", "ids must be int64 or int32 on cpu; got torch.float32", ids.float())
    yield refuse("ids device", "ids must be int64 or int32 on cpu; .* on meta", ids.to("meta"))
    outside = {
        "ids": {},
        "positions": {"position_weight": weight},
        "types": {"type_weight": weight},
    }
    for name, table in outside.items():
        for bad, shown in ((torch.tensor([0, 3]), "0 to 3"), (torch.tensor([-1, 1]), "-1 to 1")):
            for fault, index in ((f"{name} {shown}", bad), (f"{name} int32 {shown}", bad.int())):
                sentence = rf"{name} must lie in \[0, 3\), the rows of its table; got {shown}"
                yield refuse(fault, sentence, **({name: index} | table))
    far = {"positions": torch.tensor([0, 5]), "sinusoidal": 5}
    yield refuse("far position", r"positions must lie in \[0, 5\), .*got 0 to 5", **far)
    empty = torch.ones(0, 4)
    yield refuse("empty table", r"ids must lie in \[0, 0\), .*got 0 to 2", weight=empty)

    table = {"position_weight": weight}
    needs = "position_weight or sinusoidal needs positions, or cu_seqlens"
    offsets = torch.tensor([0, 2], dtype=torch.int32)
    yield refuse("no positions", needs, **table)
    yield refuse("no positions for sinusoids", needs, sinusoidal=5)
    yield refuse("no position table", needs, positions=ids)
    yield refuse("offsets alone", needs, cu_seqlens=offsets)
    yield refuse("both positions", needs, positions=ids, cu_seqlens=offsets, **table)
    both = {"positions": ids, "sinusoidal": 5}
    yield refuse("both tables", "got both position_weight and sinusoidal", **table, **both)
    yield refuse("no sinusoids", "sinusoidal is a number .*got 0", positions=ids, sinusoidal=0)
    alike = r"positions must be shaped as ids, \(2,\); got \(1,\)"
    yield refuse("positions shape", alike, positions=ids[:1], **table)
    for name, bad, shown in (
        ("width", weight[:, 1:], r"\(3, 3\) torch.float32"),
        ("dtype", weight.half(), r"\(3, 4\) torch.float16"),
        ("1-D", vector, r"\(4,\) torch.float32"),
    ):
        shape = rf"_weight must be shaped \(rows, 4\) and torch.float32, .*; got {shown}"
        wrong = {"positions": ids, "position_weight": bad}
        yield refuse(f"position {name}", f"position{shape}", **wrong)
        yield refuse(f"type {name}", f"type{shape}", types=ids, type_weight=bad)
    elsewhere = {"positions": ids, "position_weight": weight.to("meta")}
    yield refuse("position device", ELSEWHERE + "position_weight is on meta", **elsewhere)
    kind = r"cu_seqlens must be \(B \+ 1,\) int32 on cpu; got "
    yield refuse("offsets dtype", kind + r"\(2,\) torch.int64", cu_seqlens=offsets.long(), **table)
    yield refuse("offsets 2-D", kind + r"\(1, 2\)", cu_seqlens=offsets[None], **table)
    yield refuse("offsets device", kind + ".*meta", cu_seqlens=offsets.to("meta"), **table)
    packed = r"cu_seqlens needs packed ids \(T,\) and at least one number; got ids "
    yield refuse("unpacked", packed + r"\(1, 2\)", ids[None], cu_seqlens=offsets, **table)
    yield refuse("no offsets", packed + ".*0", cu_seqlens=offsets[:0], **table)
    values = "cu_seqlens must start at 0, not decrease and end at 2 tokens; got "
    for wrong_offsets, shown in (([0, 1], "0 to 1"), ([1, 2], "1 to 2"), ([0, 3, 2], "0 to 2")):
        bad = torch.tensor(wrong_offsets, dtype=torch.int32)
        yield refuse(f"offsets {wrong_offsets}", values + shown, cu_seqlens=bad, **table)

    yield refuse("types alone", "types and type_weight belong together", types=ids)
    yield refuse("type table alone", "types and type_weight belong together", type_weight=weight)
    unlike = r"types must be shaped as ids, \(2,\); got \(2, 1\)"
    yield refuse("types shape", unlike, types=ids[:, None], type_weight=weight)
    yield refuse("norm shape", r"norm_weight must be .*; got \(3, 4\)", norm_weight=weight)
    short = {"norm_weight": vector, "norm_bias": vector[1:]}
    yield refuse("norm bias shape", r"norm_bias must be .*; got \(3,\)", **short)
    yield refuse("norm bias alone", "norm_bias needs a norm_weight", norm_bias=vector)
    yield refuse("eps", "eps must not be negative; got -1e-05", norm_weight=vector, eps=-1e-5)
    yield refuse("padding", r"padding_idx must lie in \[-3, 3\); got 3", padding_idx=3)
    yield refuse("padding below", r"padding_idx must lie in \[-3, 3\); got -4", padding_idx=-4)
    buffer = r"weight_grad must be a \(3, 4\) buffer of torch.float32 or float32 .*got "
    for name, bad, shown in (
        ("shape", torch.zeros(4, 3), r"\(4, 3\)"),
        ("dtype", weight.half(), "torch.float16"),
        ("gradient", weight.clone().requires_grad_(), "requires_grad=True"),
    ):
        yield refuse(f"buffer {name}", buffer + f".*{shown}", weight_grad=bad)


def linear_refusals(x: Tensor) -> Iterator[Refusal]:
    weight = torch.ones(3, 4)

    def refuse(name: str, sentence: str, *args: Any, **kwargs: Any) -> Refusal:
        return Refusal("linear", name, lambda: ops.linear(*args, **kwargs), f"linear: {sentence}")

    yield refuse("weight shape", r"weight must be shaped \(F, 4\); got \(4, 3\)", x, weight.t())
    yield refuse("weight 1-D", r"weight must be shaped \(F, 4\); got \(4,\)", x, weight[0])
    yield refuse(
        "weight dtype",
        "weight must have the dtype of x, torch.bfloat16; got torch.float32",
        x.bfloat16(),
        weight,
    )
    yield refuse("weight device", ELSEWHERE + "weight is on meta", x, weight.to("meta"))
    yield refuse("bias shape", r"bias must be shaped \(3,\); got \(4,\)", x, weight, x[0])
    yield refuse(
        "bias dtype",
        "bias must have the dtype of x, torch.float32; got torch.float64",
        x,
        weight,
        weight[:, 0].double(),
    )
    unlike = r"these must be alike in shape and dtype: x \(2, 4\) torch.float32, xhat "
    yield refuse("xhat", unlike + r"\(1, 4\)", x, weight, normed=(x[:1], None, None))
    sentence = r"weight must be shaped \(4,\); got \(3,\)"
    yield refuse("norm", sentence, x, weight, normed=(x, x[0, :3], None))
    buffer = r"weight_grad must be a \(3, 4\) buffer of torch.float32 or float32 .*got "
    for name, bad, shown in (
        ("shape", torch.zeros(4, 3), r"\(4, 3\)"),
        ("dtype", weight.half(), "torch.float16"),
        ("gradient", weight.clone().requires_grad_(), "requires_grad=True"),
    ):
        yield refuse(f"buffer {name}", buffer + f".*{shown}", x, weight, weight_grad=bad)
    elsewhere = weight.to("meta")
    yield refuse(
        "buffer device", ELSEWHERE + "weight_grad is on meta", x, weight, weight_grad=elsewhere
    )


def mlp_refusals(x: Tensor) -> Iterator[Refusal]:
    w1, b1, w2, b2 = torch.ones(6, 4), torch.ones(6), torch.ones(2, 6), torch.ones(2)

    def refuse(name: str, sentence: str, *args: Any, **kwargs: Any) -> Refusal:
        return Refusal("mlp", name, lambda: ops.mlp(*args, **kwargs), f"mlp: {sentence}")

    yield refuse(
        "activation",
        "activation must be one of gelu, .*, geglu; got 'elu'",
        *(x, w1, b1, w2, b2),
        activation="elu",
    )
    yield refuse("w1 shape", r"w1 must be shaped \(F, 4\); got \(6, 3\)", x, w1[:, 1:], b1, w2, b2)
    yield refuse("b1 shape", r"b1 must be shaped \(6,\); got \(2,\)", x, w1, b2, w2, b2)
    yield refuse("w2 shape", r"w2 must be shaped \(F, 6\); got \(6, 2\)", x, w1, b1, w2.t(), b2)
    yield refuse("b2 shape", r"b2 must be shaped \(2,\); got \(6,\)", x, w1, b1, w2, b1)
    yield refuse(
        "odd gate",
        "swiglu needs an even number of rows in w1; got 5",
        *(x, w1[:5], b1[:5], w2, b2),
        activation="swiglu",
    )
    yield refuse(
        "gated w2",
        r"w2 must be shaped \(F, 3\); got \(2, 6\)",
        *(x, w1, b1, w2, b2),
        activation="geglu",
    )
    for name, bad in {"w1": (w1.half(), b1, w2), "b1": (w1, b1.half(), w2)}.items():
        wanted = f"{name} must have the dtype of x, torch.float32; got torch.float16"
        yield refuse(f"{name} dtype", wanted, x, *bad, b2)
    yield refuse("w2 integers", "w2 must be a dense", x, w1, b1, w2.long(), b2)
    yield refuse("w2 device", ELSEWHERE + "w2 is on meta", x, w1, b1, w2.to("meta"), b2)


def softmax_attention_refusals() -> Iterator[Refusal]:
    scores, v = torch.ones(2, 3, 4, 5), torch.ones(2, 3, 5, 6)
    op = "softmax_attention"

    def refuse(name: str, sentence: str, *args: Any, **dropout: Any) -> Refusal:
        def call() -> object:
            return ops.softmax_attention(
                *args, dropout=ops.Dropout(0.1, 0, **dropout) if dropout else None
            )

        return Refusal(op, name, call, f"{op}: {sentence}")

    dense = "must be a dense float32, bfloat16, float16 or float64 tensor; got "
    yield refuse("integers", f"scores {dense}torch.int64", scores.long(), v)
    yield refuse("complex values", f"v {dense}torch.complex64", scores, v + 0j)
    yield refuse("sparse", f"scores {dense}.*sparse_coo", scores.to_sparse(), v)
    yield refuse("values elsewhere", ELSEWHERE + "v is on meta", scores, v.to("meta"))
    shapes = r"scores must be \(..., H, Lq, Lk\) and v \(..., H, Lk, E\), of one dtype; got "
    shapes += r"\(.*\) torch.float.* and \(.*\) torch.float"
    for name, bad_scores, bad_v in (
        ("no heads", scores[0, 0], v[0, 0]),
        ("unlike dimensions", scores, v[0]),
        ("unlike sequences", scores, v[:1]),
        ("unlike heads", scores, v[:, :1]),
        ("unlike keys", scores, v[:, :, :4]),
        ("unlike dtypes", scores, v.double()),
    ):
        yield refuse(name, shapes, bad_scores, bad_v)
    for name, rows in (("sample_ids", 8), ("positions", 8), ("key_positions", 10)):
        one_each = rf"dropout.{name} must hold one int64 per row on cpu; got "
        counts = one_each + rf"\(9,\) torch.int64 on cpu for {rows} rows"
        yield refuse(f"{name} count", counts, scores, v, **{name: torch.arange(9)})
        bad = torch.arange(rows).int()
        yield refuse(f"{name} dtype", one_each + r".*torch.int32", scores, v, **{name: bad})
        bad = torch.arange(rows, device="meta")
        yield refuse(f"{name} device", one_each + ".*on meta", scores, v, **{name: bad})


def dropout_refusals(x: Tensor) -> Iterator[Refusal]:
    fields: dict[str, tuple[dict[str, Any], str]] = {
        "p one": ({"p": 1.0}, r"p must lie in \[0, 1\); got 1.0"),
        "p negative": ({"p": -0.1}, r"p must lie in \[0, 1\); got -0.1"),
        "p nan": ({"p": float("nan")}, r"p must lie in \[0, 1\); got nan"),
        "seed negative": ({"seed": -1}, r"seed must lie in \[0, 2\^63\); got -1"),
        "seed large": ({"seed": 2**63}, r"seed must lie in \[0, 2\^63\); got 9223372036854775808"),
        "first_head": (
            {"first_head": 2**30},
            r"first_head must lie in \[0, 2\^30\); got 1073741824",
        ),
        "step": ({"step": 2**32}, r"step must lie in \[0, 2\^32\); got 4294967296"),
        "site": ({"site": -1}, r"site must lie in \[0, 2\^32\); got -1"),
    }
    for name, (values, sentence) in fields.items():
        call = partial(ops.Dropout, **({"p": 0.1, "seed": 0} | values))
        yield Refusal("Dropout", name, call, f"dropout: {sentence}")
    forms: dict[str, Callable[[ops.Dropout], object]] = {
        "dropout": lambda d: ops.dropout(x, d),
        "dropout_add_norm": lambda d: ops.dropout_add_norm(x, x, None, dropout=d),
        "embedding": lambda d: ops.embedding(torch.tensor([0, 1]), x, dropout=d),
        "mlp": lambda d: ops.mlp(x, torch.ones(3, 4), None, torch.ones(2, 3), None, dropout=d),
    }
    ids = torch.arange(2)
    for op, form in forms.items():
        for name in ("sample_ids", "positions"):
            for bad, shown in (
                (torch.arange(3), r"got \(3,\) torch.int64 on cpu for 2 rows"),
                (ids.int(), r"got \(2,\) torch.int32 on cpu"),
                (ids.to("meta"), r"got \(2,\) torch.int64 on meta"),
            ):
                sentence = rf"{op}: dropout.{name} must hold one int64 per row on cpu; {shown}"
                fault = f"{name} {bad.dtype} {tuple(bad.shape)} {bad.device}"
                dropout = ops.Dropout(0.1, 0, **{name: bad})
                yield Refusal(op, fault, partial(form, dropout), sentence)
        for name, value in (("key_positions", ids), ("first_head", 1)):
            dropout = ops.Dropout(0.1, 0, **{name: value})
            sentence = f"{op}: dropout.key_positions and first_head are for attention alone"
            yield Refusal(op, name, partial(form, dropout), sentence)


def loss_refusals(x: Tensor) -> Iterator[Refusal]:
    weight, targets = torch.ones(3, 4), torch.tensor([2, 0])
    forms: dict[str, Callable[..., object]] = {
        "cross_entropy": lambda targets=targets, **options: ops.cross_entropy(
            x[:, :3], targets, **options
        ),
        "linear_cross_entropy": lambda targets=targets, weight=weight, **options: (
            ops.linear_cross_entropy(x, weight, targets, **options)
        ),
    }
    for op, form in forms.items():

        def refuse(name: str, sentence: str, op: str = op, form: Any = form, **options: Any) -> Any:
            return Refusal(op, name, partial(form, **options), f"{op}: {sentence}")

        wanted = r"targets must be int64, shaped \(2,\), on cpu; got "
        for name, bad, shown in (
            ("dtype", targets.int(), r"torch.int32, \(2,\), on cpu"),
            ("shape", targets[None], r"torch.int64, \(1, 2\), on cpu"),
            ("device", targets.to("meta"), r"torch.int64, \(2,\), on meta"),
            ("probabilities", x[:, :3], r"torch.float32, \(2, 3\), on cpu"),
        ):
            yield refuse(f"targets {name}", wanted + shown, targets=bad)
        range_of = r"targets must lie in \[0, 3\) or be -100, the ignore_index; row 1 has "
        for bad_class in (3, -1, 2**40):
            bad = torch.tensor([0, bad_class])
            yield refuse(f"class {bad_class}", f"{range_of}{bad_class}", targets=bad)
            yield refuse(
                f"class {bad_class}, none", f"{range_of}{bad_class}", targets=bad, reduction="none"
            )
        yield refuse(
            "ignored elsewhere",
            "targets must .* or be 1, the ignore_index; row 0 has -100",
            targets=torch.tensor([-100, 1]),
            ignore_index=1,
        )
        for eps in (-0.1, 1.1, float("nan")):
            sentence = rf"label_smoothing must lie in \[0, 1\]; got {eps}"
            yield refuse(f"label_smoothing {eps}", sentence, label_smoothing=eps)
        for z_loss in (-1e-4, float("nan")):
            sentence = f"z_loss must not be negative; got {z_loss}"
            yield refuse(f"z_loss {z_loss}", sentence, z_loss=z_loss)
        sentence = "smoothing must be one of torch, fairseq; got 'uniform'"
        yield refuse("smoothing", sentence, smoothing="uniform")
        sentence = "reduction must be one of sum, mean, none; got 'batchmean'"
        yield refuse("reduction", sentence, reduction="batchmean")

    def one_class(form: Callable[..., object], *inputs: Tensor) -> Callable[[], object]:
        options = {"smoothing": "fairseq", "label_smoothing": 0.1}
        return partial(form, *inputs, torch.zeros(2).long(), **options)

    sentence = ": smoothing='fairseq' needs at least two classes; got one"
    for op, call in {
        "cross_entropy": one_class(ops.cross_entropy, x[:, :1]),
        "linear_cross_entropy": one_class(ops.linear_cross_entropy, x, weight[:1]),
    }.items():
        yield Refusal(op, "one class", call, op + sentence)
    for name, sentence, bad_weight, bias in (
        ("weight shape", r"weight must be shaped \(F, 4\); got \(4, 3\)", weight.t(), None),
        ("weight dtype", "weight must have the dtype of x, .*float16", weight.half(), None),
        ("weight device", ELSEWHERE + "weight is on meta", weight.to("meta"), None),
        ("bias shape", r"bias must be shaped \(3,\); got \(4,\)", weight, x[0]),
        ("bias dtype", "bias must have the dtype of x, .*float64", weight, weight[:, 0].double()),
        ("no class", "weight must have at least one row, a class; got none", weight[:0], None),
    ):
        yield Refusal(
            "linear_cross_entropy",
            name,
            partial(ops.linear_cross_entropy, x, bad_weight, targets, bias),
            f"linear_cross_entropy: {sentence}",
        )


REFUSALS = list(refusals())
