"""Cross entropy of rows of logits with label smoothing and z-loss, V classes:

    loss = lse - a z_t - b sum_k z_k + z_loss lse^2        lse = log sum_k exp(z_k), t the target
    dz_k = exp(z_k - lse) (1 + 2 z_loss lse) - b - a [k = t]

    smoothing="torch"      b = eps / V,        a = 1 - eps
    smoothing="fairseq"    b = eps / (V - 1),  a = 1 - eps - b

All differences are taken from the largest logit, so a common offset costs no digits. Saves the
logits and 8 bytes a row: the largest logit and the sum of exp(z - largest).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from . import native
from .autograd import register_autograd
from .checks import check_floating, check_rows

SMOOTHINGS = ("torch", "fairseq")
REDUCTIONS = ("sum", "mean", "none")
_SERIAL_ROWS = 16384  # more, and PyTorch cuts a sum among its threads, however many there are

# on_target and on_all are a and b of the formula
CRITERION = "int ignore_index, float on_target, float on_all, float z_loss"
ROWS = f"Tensor logits, Tensor targets, {CRITERION}"
torch.library.define(
    "taut::cross_entropy_fwd",
    f"({ROWS}, str reduction, bool in_place) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "taut::cross_entropy_bwd",
    "(Tensor drows, Tensor logits, Tensor stats, Tensor targets, " + CRITERION + ") -> Tensor",
)
torch.library.define(
    "taut::cross_entropy_bwd_",
    "(Tensor drows, Tensor(a!) logits, Tensor stats, Tensor targets, " + CRITERION + ") -> ()",
)


class Rows(NamedTuple):
    """What was found about each row, shaped like the targets; not differentiable."""

    loss: Tensor  # 0 where there is no target
    correct: Tensor  # bool: whether the target is the (first) largest logit


def cross_entropy_reference(
    logits: Tensor,
    targets: Tensor,
    *,
    label_smoothing: float = 0.0,
    smoothing: str = "torch",
    ignore_index: int = -100,
    z_loss: float = 0.0,
    reduction: str = "sum",
    with_rows: bool = False,
) -> Tensor | tuple[Tensor, Rows]:
    """The truth every kernel is held to: plain PyTorch, differentiated by autograd.

    Of 16-bit logits in fp32, as under autocast.
    """
    flat, classes = targets.flatten(), logits.shape[-1]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(-1, classes)
    eps = label_smoothing
    if smoothing == "fairseq" and eps:
        eps *= classes / (classes - 1)  # PyTorch's form gives the target itself a share of eps
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": eps}
    rows = F.cross_entropy(wide, flat, reduction="none", **options)
    if z_loss:
        rows = rows + z_loss * wide.logsumexp(-1).square() * (flat != ignore_index)
    has_target = flat != ignore_index
    loss = rows.view(targets.shape)
    if reduction != "none":
        loss = rows.sum() / (has_target.sum().clamp(min=1) if reduction == "mean" else 1)
    if not with_rows:
        return loss
    correct = has_target & (wide.argmax(-1) == flat)
    return loss, Rows(rows.detach().view(targets.shape), correct.view(targets.shape))


def criterion(
    op: str,
    classes: int,
    label_smoothing: float,
    smoothing: str,
    ignore_index: int,
    z_loss: float,
    reduction: str,
) -> tuple[int, float, float, float]:
    """The arguments of CRITERION."""
    if smoothing not in SMOOTHINGS:
        raise ValueError(
            f"{op}: smoothing must be one of {', '.join(SMOOTHINGS)}; got {smoothing!r}"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"{op}: reduction must be one of {', '.join(REDUCTIONS)}; got {reduction!r}"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{op}: label_smoothing must lie in [0, 1]; got {label_smoothing}")
    if not z_loss >= 0:
        raise ValueError(f"{op}: z_loss must not be negative; got {z_loss}")
    if smoothing == "torch":
        return ignore_index, 1 - label_smoothing, label_smoothing / classes, z_loss
    if label_smoothing and classes == 1:
        raise ValueError(f"{op}: smoothing='fairseq' needs at least two classes; got one")
    on_all = label_smoothing / max(classes - 1, 1)
    return ignore_index, 1 - label_smoothing - on_all, on_all, z_loss


def check_targets(op: str, targets: Tensor, shape: torch.Size, device: torch.device) -> None:
    """One class a row."""
    if targets.dtype != torch.int64 or targets.shape != shape or targets.device != device:
        raise ValueError(
            f"{op}: targets must be int64, shaped {tuple(shape)}, on {device}; got "
            f"{targets.dtype}, {tuple(targets.shape)}, on {targets.device}"
        )


def is_in_range(targets: Tensor, classes: int, ignore_index: int) -> Tensor:
    return (targets == ignore_index) | ((targets >= 0) & (targets < classes))


def refuse_targets(op: str, targets: Tensor, classes: int, ignore_index: int) -> None:
    """Name the first target that is no class. Waits for a GPU."""
    is_fine = is_in_range(targets, classes, ignore_index)
    if not is_fine.all():
        row = int(is_fine.logical_not().nonzero()[0, 0])
        raise ValueError(
            f"{op}: targets must lie in [0, {classes}) or be {ignore_index}, the ignore_index; "
            f"row {row} has {int(targets[row])}"
        )


def criterion_(
    logits: Tensor, targets: Tensor, drows: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor]:
    """Loss and correctness of each row; with drows, the logits become their gradient.

    For the insides of ops: no autograd. A target that is no class makes the loss NaN, if the device
    is one on which it was not refused before.
    """
    loss, _, correct = _rows_of(logits, targets, drows, logits, *arguments)
    return loss, correct


def _rows_of(
    logits: Tensor, targets: Tensor, drows: Tensor | None, grad: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """loss, stats, correct; with drows, the gradient in grad, which may be the logits."""
    rows = logits.shape[0]
    wide = torch.promote_types(logits.dtype, torch.float32)
    loss, stats = (logits.new_empty(shape, dtype=wide) for shape in ((rows,), (rows, 2)))
    correct = logits.new_empty(rows, dtype=torch.bool)
    _kernel(logits)(
        logits, targets, drows, None if drows is None else grad, loss, stats, correct, *arguments
    )
    return loss, stats, correct


def _kernel(logits: Tensor) -> Any:
    if logits.is_cpu and native.takes(logits):
        return native.cross_entropy
    if logits.is_cuda and logits.dtype != torch.float64:
        from .triton.cross_entropy import cross_entropy  # on use: a CPU install has no Triton

        return cross_entropy
    return _composite


def _composite(
    logits: Tensor,
    targets: Tensor,
    drows: Tensor | None,
    grad: Tensor | None,
    loss: Tensor | None,
    stats: Tensor,
    correct: Tensor | None,
    ignore_index: int,
    on_target: float,
    on_all: float,
    z_loss: float,
) -> None:
    """loss, stats and correct are made, or where loss is None, stats are read; grad is made."""
    has_target = targets != ignore_index
    is_class = (targets >= 0) & (targets < logits.shape[-1])
    index = torch.where(has_target & is_class, targets, 0)[:, None]
    z = logits.to(stats.dtype)
    if loss is not None and correct is not None:
        stats[:, 0] = z.amax(-1)
        z = z - stats[:, :1]
        stats[:, 1] = z.exp().sum(-1)
        log_sum = stats[:, 1].log()
        row = log_sum - on_target * z.gather(1, index)[:, 0]
        row = row - on_all * z.sum(-1) if on_all else row
        row = row + z_loss * (stats[:, 0] + log_sum).square() if z_loss else row
        loss.copy_(torch.where(has_target, row.where(is_class, torch.nan), 0))
        correct.copy_(has_target & (logits.argmax(-1) == targets))
    else:
        z = z - stats[:, :1]
    if drows is None or grad is None:
        return
    softmax = z.exp_().div_(stats[:, 1:])
    dz = softmax - on_all if z_loss else softmax.sub_(on_all)
    dz.scatter_add_(1, index, dz.new_full((), -on_target).expand(index.shape))
    if z_loss:  # last: the rest cancels where one class takes all
        dz += softmax * (2 * z_loss * (stats[:, 0] + stats[:, 1].log()))[:, None]
    grad.copy_(dz.mul_(drows[:, None]).masked_fill_(~has_target[:, None], 0))


def reduce(rows: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """The loss of all rows, from the losses of each."""
    if reduction == "none":
        return rows.clone().view(targets.shape)
    parts = [part.sum(dtype=torch.float64) for part in rows.split(_SERIAL_ROWS)]
    total = torch.stack(parts).sum()
    total = total / count(targets, ignore_index) if reduction == "mean" else total
    return total.to(rows.dtype)


def count(targets: Tensor, ignore_index: int) -> Tensor:
    """The number of rows with a target, at least 1."""
    return (targets != ignore_index).sum().clamp(min=1)


def of_rows(dloss: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """The gradient of the loss of each row, from that of what `reduce` made."""
    if reduction == "mean":
        dloss = dloss / count(targets, ignore_index)
    return dloss.expand(targets.shape).flatten().contiguous()


@torch.library.impl("taut::cross_entropy_fwd", "default")  # the kernel picks itself by device
def _(
    logits: Tensor, targets: Tensor, ignore_index: int, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *weights, reduction, _ = arguments
    flat = logits.view(-1, logits.shape[-1])
    if not logits.is_cuda:  # a GPU is not waited for: there the loss is NaN
        refuse_targets("cross_entropy", targets.view(-1), logits.shape[-1], ignore_index)
    loss, stats, correct = _rows_of(flat, targets.view(-1), None, None, ignore_index, *weights)
    return reduce(loss, targets, ignore_index, reduction), loss, stats, correct


def _write_gradient(
    grad: Tensor, drows: Tensor, logits: Tensor, stats: Tensor, targets: Tensor, *arguments: Any
) -> None:
    z, dz = (t.view(-1, logits.shape[-1]) for t in (logits, grad))
    _kernel(logits)(z, targets.view(-1), drows, dz, None, stats, None, *arguments)


@torch.library.impl("taut::cross_entropy_bwd", "default")
def _(drows: Tensor, logits: Tensor, *arguments: Any) -> Tensor:
    grad = native.with_huge_pages(torch.empty_like(logits))
    _write_gradient(grad, drows, logits, *arguments)
    return grad


@torch.library.impl("taut::cross_entropy_bwd_", "default")
def _(drows: Tensor, logits: Tensor, *arguments: Any) -> None:
    _write_gradient(logits, drows, logits, *arguments)
    torch.autograd.graph.increment_version(logits)  # a kernel that gets pointers does not


@torch.library.register_fake("taut::cross_entropy_fwd")
def _(logits, targets, ignore_index, on_target, on_all, z_loss, reduction, in_place):
    rows, wide = targets.numel(), torch.promote_types(logits.dtype, torch.float32)
    return (
        logits.new_empty(targets.shape if reduction == "none" else (), dtype=wide),
        logits.new_empty(rows, dtype=wide),
        logits.new_empty(rows, 2, dtype=wide),
        logits.new_empty(rows, dtype=torch.bool),
    )


@torch.library.register_fake("taut::cross_entropy_bwd")
def _(drows, logits, stats, targets, ignore_index, on_target, on_all, z_loss):
    return torch.empty_like(logits)


@torch.library.register_fake("taut::cross_entropy_bwd_")
def _(drows, logits, stats, targets, ignore_index, on_target, on_all, z_loss):
    return None


def _setup_context(ctx, inputs, output):
    logits, targets, *ctx.criterion, ctx.reduction, ctx.in_place = inputs
    _, rows, stats, correct = output
    ctx.save_for_backward(logits, targets, stats)
    ctx.mark_non_differentiable(rows, stats, correct)
    ctx.set_materialize_grads(False)


def _backward(ctx, dloss, *_):
    if dloss is None:
        return (None,) * 8
    logits, targets, stats = ctx.saved_tensors
    drows = of_rows(dloss, targets, ctx.criterion[0], ctx.reduction)
    if ctx.in_place:
        grad = logits.detach()  # shares its version: a second use of the logits is noticed
        torch.ops.taut.cross_entropy_bwd_(drows, grad, stats, targets, *ctx.criterion)
    else:
        grad = torch.ops.taut.cross_entropy_bwd(drows, logits, stats, targets, *ctx.criterion)
    return grad, *(None,) * 7


register_autograd("cross_entropy_fwd", _backward, _setup_context)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    label_smoothing: float = 0.0,
    smoothing: str = "torch",
    ignore_index: int = -100,
    z_loss: float = 0.0,
    reduction: str = "sum",
    with_rows: bool = False,
    in_place: bool = False,
) -> Tensor | tuple[Tensor, Rows]:
    """Cross entropy of logits (..., V) and class numbers (...); where there is a head, prefer
    linear_cross_entropy.

    The loss is float32 for 16-bit logits. Rows whose target is ignore_index cost nothing. reduction
    "mean" divides by the number of the other rows, and is 0 if there are none, where PyTorch gives
    NaN; "none" gives a loss a row. smoothing: whose form of label smoothing. z_loss adds
    z_loss * logsumexp(logits)^2 to each row. with_rows returns (loss, Rows) at no cost.

    in_place: the backward pass writes the gradient over the logits (if they are contiguous), so
    that none of their size is allocated; using them or this loss again after that raises.
    """
    op = "cross_entropy"
    check_floating(op, logits=logits)
    check_rows(op, logits=logits)
    check_targets(op, targets, logits.shape[:-1], logits.device)
    arguments = criterion(
        op, logits.shape[-1], label_smoothing, smoothing, ignore_index, z_loss, reduction
    )
    loss, rows, _, correct = torch.ops.taut.cross_entropy_fwd(
        logits.contiguous(), targets.contiguous(), *arguments, reduction, in_place
    )
    if not with_rows:
        return loss
    return loss, Rows(rows.view(targets.shape), correct.view(targets.shape))
