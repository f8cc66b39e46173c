"""Losses: elementwise and row losses, and losses over classes.

1. *Elementwise and row losses*. A mean over a cut batch is a sum divided by the global count:

       mse, l1, …               Σ loss / count

2. *Cross entropy and nll*: losses over classes, one of which is the target. Where the class dim is cut, no rank ever
   holds the scores of all classes, forward or backward: each rank gives its terms of sums over ranks, which are
   completed in one reduction.

       y = x - max x        loss = log Σ exp y - y[target]
       smoothed by ε:       loss = (1-ε) w[target] (log Σ exp y - y[target]) + ε/C (Σw · log Σ exp y - Σ w·y)
       target t by class:   t' = (1-ε) t + ε/C,   loss = Σ w·t' · log Σ exp y - Σ w·t'·y
       mean:                Σ loss / Σ w[target]·[target ≠ ignore_index]     both in one reduction; of t: Σ loss / rows

3. *CTC*: the batch may be cut, steps, classes and labels stay whole. The operator here has results of known sizes: its
   backward makes the table of the forward again.

In half precision the terms are summed in float32.

Example: 8 classes cut in 2 parts, target 6. Both ranks give Σ exp y of their 4 classes; rank 1 gives y[6], rank 0 gives
0 for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..graph import Op, Value
from ..torch_private import ctc_loss_backward
from .dims import cut_size, local_operator, named, operand, operands, part_length, starts, whole, wide, within
from .notation import Assignment, Bound
from .reduction import maximum
from .registry import Builder, Expansion, Rule, register

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for `reduction`


def _elementwise_text(op: Op) -> str:
    return ", ".join(["..."] * len(op.inputs)) + (" -> ..." if op.argument("reduction") == NONE else " -> ")


def summed(b: Builder, op: Op) -> Value:
    """The sum of the losses, in a dtype wide enough for it."""
    out = op.output(0).dtype
    args, kwargs = op.with_arguments(reduction=SUM if wide(out) == out else NONE)
    made = b.call(op.target, *args, **kwargs)
    return made if wide(out) == out else b.call(aten.sum.default, made, dtype=wide(out))


def needs_work(op: Op, bound: Bound, assignment: Assignment) -> bool:
    return op.argument("reduction") == MEAN and cut_size(bound, assignment) > 1


def _expand_elementwise(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if not needs_work(op, bound, assignment):
        return None
    count = math.prod(torch.broadcast_shapes(*(v.shape for v in op.inputs)))
    return lambda b: b.to(b.call(aten.div.Tensor, summed(b, op), count), op.output(0).dtype)


def _rows_text(op: Op) -> str:
    """The notation of losses with one value a row: the last dim stays whole."""
    rows = operand(named(len(op.inputs[0].shape) - 1, "n"))
    row = f"{'' if rows == '...' else rows} d!"
    texts = operands(
        op,
        self=row,
        input1=row,
        input2=row,
        anchor=row,
        positive=row,
        negative=row,
        target=row if op.kind == "multilabel_margin_loss" else rows,
        weight="d!",
    )
    return f"{texts} -> {rows if op.argument('reduction') == NONE else ''}"


def _expand_rows(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if not needs_work(op, bound, assignment):
        return None
    count = math.prod(op.inputs[0].shape[:-1])
    return lambda b: b.to(b.call(aten.div.Tensor, summed(b, op), count), op.output(0).dtype)


def counted(b: Builder, op: Op, dtype: torch.dtype) -> Value:
    """The total weight of the targets that are not ignored."""
    target, weight = op.argument("target"), op.argument("weight")
    counted_targets = b.call(aten.ne.Scalar, target, op.argument("ignore_index"))
    if weight is None:
        return b.call(aten.sum.default, counted_targets, dtype=dtype)
    index = b.call(aten.where.ScalarOther, counted_targets, target, 0)  # an ignored target need not be a class
    weights = b.call(aten.take.default, b.call(aten.detach.default, weight), index)
    return b.call(aten.sum.default, b.call(aten.where.ScalarOther, counted_targets, weights, 0), dtype=dtype)


def _take_text(op: Op) -> str:
    """The notation of take: the source stays whole, since any index may reach any element."""
    table_dims, index = (named(len(v.shape), name) for v, name in zip(op.inputs, ("h", "i")))
    return f"{operand(whole(table_dims))}, {operand(index)} -> {operand(index)}"


def _of_zeros(op: Op) -> float | None:
    """The neutral number of a loss: 0 where the loss of 0 against 0 is 0."""
    vanishes = op.kind in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
    return 0 if vanishes and len({v.shape for v in op.inputs}) == 1 else None


_ELEMENTWISE = Rule(_elementwise_text, expand=_expand_elementwise, neutral=_of_zeros)

register(
    (
        aten.mse_loss.default,
        aten.l1_loss.default,
        aten.smooth_l1_loss.default,
        aten.huber_loss.default,
        aten.soft_margin_loss.default,
        aten.binary_cross_entropy.default,
        aten.binary_cross_entropy_with_logits.default,
        aten.kl_div.default,
        aten.poisson_nll_loss.default,
        aten.hinge_embedding_loss.default,
        aten.margin_ranking_loss.default,
    ),
    _ELEMENTWISE,
)
register(
    (
        aten.triplet_margin_loss.default,
        aten.cosine_embedding_loss.default,
        aten.multi_margin_loss.default,
        aten.multilabel_margin_loss.default,
    ),
    Rule(_rows_text, expand=_expand_rows),
)
register((aten.take.default,), Rule(_take_text))


# -- losses over classes


def _has_probabilities(op: Op) -> bool:
    """True where the target holds a probability per class instead of the index of a class."""
    scores, target = op.argument("self"), op.argument("target")
    return op.kind == "cross_entropy_loss" and scores.shape == target.shape and target.dtype.is_floating_point


def _text(op: Op) -> str:
    rank = len(op.argument("self").shape)
    places = ["n", *named(rank - 2, "s")] if rank > 1 else []
    scores = operand([*places[:1], "c", *places[1:]])
    target = scores if _has_probabilities(op) else operand(places)
    out = operand(places) if op.argument("reduction") == NONE else ""
    return f"{operands(op, self=scores, target=target, weight='c')} -> {out}"


def _expand(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if cut_size(bound, assignment, ["c"]) > 1:
        return lambda b: _finished(b, op, *(_by_probability if _has_probabilities(op) else _by_class)(b, op))
    out = op.output(0).dtype
    if not bound.divides(assignment) and op.argument("reduction") != NONE:  # padded rows would add to the sum
        return lambda b: _finished(b, op, *_by_row(b, op))
    if not needs_work(op, bound, assignment):
        return None
    if _has_probabilities(op):
        return lambda b: _finished(b, op, summed(b, op), None)

    def work(b: Builder) -> Value:
        total, count = _fused(b, op) or (summed(b, op), counted(b, op, wide(out)))
        return _ratio(b, op, total, count)

    return work


def _ratio(b: Builder, op: Op, total: Value, count: Value) -> Value:
    """A mean: both of its sums in one reduction."""
    total, count = b.call(aten.unbind.int, b.call(aten.stack.default, [total, count]))
    return b.to(b.call(aten.div.Tensor, total, b.call(aten.detach.default, count)), op.output(0).dtype)


def _fused(b: Builder, op: Op) -> tuple[Value, Value] | None:
    """Numerator and denominator from one kernel, where torch has it for this call; None otherwise."""
    scores, out = op.argument("self"), op.output(0).dtype
    if len(scores.shape) != 2 or op.argument("label_smoothing", 0.0) or wide(out) != out:
        return None
    if op.kind == "cross_entropy_loss":
        scores = b.call(aten.log_softmax.int, scores, 1)
    return b.call(
        aten.nll_loss_forward.default,
        scores,
        op.argument("target"),
        op.argument("weight"),
        SUM,
        op.argument("ignore_index"),
    )


def _by_row(b: Builder, op: Op) -> tuple[Value, Value | None]:
    """Loss and weight of each row."""
    args, kwargs = op.with_arguments(reduction=NONE)
    loss = b.to(b.call(op.target, *args, **kwargs), wide(op.output(0).dtype))
    return loss, None if _has_probabilities(op) else counted(b, op, loss.dtype)


def _fused_text(op: Op) -> str:
    n = "n" if op.argument("reduction") == SUM else "n!"
    return f"{operands(op, self=f'{n} c!', target=n, weight='c!')} -> {n if op.argument('reduction') == NONE else ''}, "


def _finished(b: Builder, op: Op, loss: Value, count: Value | None) -> Value:
    """Losses of rows, or their sum, reduced as the call asks.

    Args:
        count: the weight of each row in a mean; None where all rows have the same weight.
    """
    scores, out = op.argument("self"), op.output(0).dtype
    reduction = op.argument("reduction")
    if reduction == NONE:
        return b.to(loss, out)
    total = b.call(aten.sum.default, loss) if loss.shape else loss
    if reduction == SUM:
        return b.to(total, out)
    if count is not None:
        return _ratio(b, op, total, b.call(aten.sum.default, count) if count.shape else count)
    rows = scores.numel // scores.shape[_class_dim(scores)]
    return b.to(b.call(aten.div.Tensor, total, rows), out)


def _class_dim(scores: Value) -> int:
    return min(1, len(scores.shape) - 1)


# -- the class dim cut -------------------------------------------------------------------------------------------------


def _together(b: Builder, parts: Sequence[Value]) -> Sequence[Value]:
    """Sums over ranks, completed in one reduction and split along their first dim."""
    joined = b.call(aten.cat.default, list(parts)) if len(parts) > 1 else parts[0]
    return b.call(aten.unbind.int, joined) if joined.shape[0] > 1 else [b.call(aten.squeeze.dim, joined, 0)]


def _beside_classes(b: Builder, scores: Value, weight: Value) -> Value:
    """A weight per class, as it broadcasts against scores."""
    tail = len(scores.shape) - 1 - _class_dim(scores)
    weight = b.to(b.call(aten.detach.default, weight), wide(scores.dtype))
    return b.call(aten.view.default, weight, [weight.shape[0], *[1] * tail]) if tail else weight


def _by_class(b: Builder, op: Op) -> tuple[Value, Value]:
    """Loss and weight of each row, where the target is the index of a class."""
    scores, target, weight = op.argument("self"), op.argument("target"), op.argument("weight")
    dim, classes, smoothing = _class_dim(scores), scores.shape[_class_dim(scores)], op.argument("label_smoothing", 0.0)
    counted_targets = b.call(aten.ne.Scalar, target, op.argument("ignore_index"))
    chosen = b.call(aten.where.ScalarOther, counted_targets, target, 0)
    begin = starts(b, target, scores, dim)
    if op.kind == "cross_entropy_loss":
        highest = maximum(b, scores, [dim])
        parts = [b.call(class_sums, scores, highest, chosen, begin, dim, classes)]
        if smoothing:
            shifted = b.call(aten.sub.Tensor, b.to(scores, wide(scores.dtype)), b.to(highest, wide(scores.dtype)))
            if weight is not None:
                shifted = b.call(aten.mul.Tensor, shifted, _beside_classes(b, scores, weight))
            parts.append(b.call(aten.unsqueeze.default, b.call(aten.sum.dim_IntList, shifted, [dim]), 0))
    else:
        parts = [b.call(picked, b.to(scores, wide(scores.dtype)), chosen, begin, dim, classes)]
    wide_weight = None
    if weight is not None:
        wide_weight = b.to(b.call(aten.detach.default, weight), wide(scores.dtype))
        parts.append(b.call(picked, wide_weight, chosen, begin, 0, classes))
    sums = iter(_together(b, parts))
    raised = b.call(aten.log.default, next(sums)) if op.kind == "cross_entropy_loss" else None
    at_target = next(sums)
    loss = b.call(aten.sub.Tensor, raised, at_target) if raised is not None else b.call(aten.neg.default, at_target)
    of_all = next(sums) if smoothing else None
    counts = next(sums) if weight is not None else b.to(counted_targets, wide(scores.dtype))
    if weight is not None:
        loss = b.call(aten.mul.Tensor, loss, counts)
        counts = b.call(aten.where.ScalarOther, counted_targets, counts, 0)
    if of_all is not None:
        for_all = b.call(
            aten.mul.Tensor, raised, classes if wide_weight is None else b.call(aten.sum.default, wide_weight)
        )
        smooth = b.call(aten.mul.Tensor, b.call(aten.sub.Tensor, for_all, of_all), smoothing / classes)
        loss = b.call(aten.add.Tensor, b.call(aten.mul.Tensor, loss, 1 - smoothing), smooth)
    return b.call(aten.where.ScalarOther, counted_targets, loss, 0), counts


def _by_probability(b: Builder, op: Op) -> tuple[Value, None]:
    """Loss of each row, where the target is a probability per class."""
    scores, target, weight = op.argument("self"), op.argument("target"), op.argument("weight")
    dim, smoothing = _class_dim(scores), op.argument("label_smoothing", 0.0)
    values, share = (b.to(x, wide(x.dtype)) for x in (scores, target))
    shifted = b.call(aten.sub.Tensor, values, maximum(b, values, [dim]))
    if smoothing:
        share = b.call(aten.add.Tensor, b.call(aten.mul.Tensor, share, 1 - smoothing), smoothing / scores.shape[dim])
    if weight is not None:
        share = b.call(aten.mul.Tensor, share, _beside_classes(b, scores, weight))
    terms = (b.call(aten.exp.default, shifted), share, b.call(aten.mul.Tensor, share, shifted))
    sums = (b.call(aten.sum.dim_IntList, term, [dim]) for term in terms)
    raised, shares, of_all = _together(b, [b.call(aten.unsqueeze.default, total, 0) for total in sums])
    scaled = b.call(aten.mul.Tensor, shares, b.call(aten.log.default, raised))
    return b.call(aten.sub.Tensor, scaled, of_all), None


@local_operator("class_picked(Tensor x, Tensor target, Tensor starts, int dim, int size) -> Tensor")
def picked(x: torch.Tensor, target: torch.Tensor, starts: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """[1, rows…]: the element of each row at its target, zero where the target is in another rank's part.

    A weight per class has one row for all targets.
    """
    inside, place = within(target, starts, x.shape[dim], size)
    found = torch.take(x, place) if x.dim() == 1 else x.gather(dim, place.unsqueeze(dim)).squeeze(dim)
    return torch.where(inside, found, 0).unsqueeze(0)


def _picked_text(op: Op) -> tuple[str, dict[str, int]]:
    x, target, begin = op.inputs
    rows = named(len(target.shape), "n")
    score_dims = (
        ["(p c!)"] if len(x.shape) == 1 else [*rows[: op.argument("dim")], "(p c!)", *rows[op.argument("dim") :]]
    )
    return f"{operand(score_dims)}, {operand(rows)}, p -> {operand(['one!', *rows])}", _part_sizes(
        x, op.argument("dim"), begin
    )


def _part_sizes(x: Value, dim: int, begin: Value) -> dict[str, int]:
    return {"p": begin.shape[0], "c": part_length(x.shape[dim], begin.shape[0])}


# One operator for both sums: of all tensors of the scores' size, only the scores are saved for the backward.


@torch.library.custom_op("shardwright::class_sums", mutates_args=())
def _class_sums(
    x: torch.Tensor, highest: torch.Tensor, target: torch.Tensor, starts: torch.Tensor, dim: int, size: int
) -> torch.Tensor:
    """[2, rows…], with y = x - highest: Σ exp y over this rank's classes, and y at the target.

    y is zero where the target is another rank's class.
    """
    inside, place = within(target, starts, x.shape[dim], size)
    dtype = wide(x.dtype)
    high = highest.to(dtype)
    total = (x - high).exp_().sum(dim)
    found = (x.gather(dim, place.unsqueeze(dim)).to(dtype) - high).squeeze(dim)
    return torch.stack([total, torch.where(inside, found, 0)])


@_class_sums.register_fake
def _class_sums_shape(
    x: torch.Tensor, highest: torch.Tensor, target: torch.Tensor, starts: torch.Tensor, dim: int, size: int
) -> torch.Tensor:
    return x.new_empty((2, *target.shape), dtype=wide(x.dtype))


def _keep(ctx: Any, inputs: tuple[object, ...], output: torch.Tensor) -> None:
    x, highest, target, starts, ctx.dim, _ = inputs
    ctx.save_for_backward(x, highest, target, starts)


def _class_sums_back(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, highest, target, starts = ctx.saved_tensors
    dim = ctx.dim
    place = target - starts[0]
    inside = (place >= 0) & (place < x.shape[dim])
    of_total, of_found = gradient.unbind(0)
    found = torch.where(inside, of_found, 0).unsqueeze(dim)
    made = (x - highest.to(gradient.dtype)).exp_().mul_(of_total.unsqueeze(dim))
    made.scatter_add_(dim, torch.where(inside, place, 0).unsqueeze(dim), found)
    return made.to(x.dtype), None, None, None, None, None


_class_sums.register_autograd(_class_sums_back, setup_context=_keep)
class_sums = torch.ops.shardwright.class_sums.default


def _class_sums_text(op: Op) -> tuple[str, dict[str, int]]:
    x, _, target, begin = op.inputs
    rows, dim = named(len(target.shape), "n"), op.argument("dim")
    score_dims, high = ([*rows[:dim], c, *rows[dim:]] for c in ("(p c!)", "1"))
    return f"{operand(score_dims)}, {operand(high)}, {operand(rows)}, p -> {operand(['two!', *rows])}", _part_sizes(
        x, dim, begin
    )


# -- connectionist temporal classification


@torch.library.custom_op("shardwright::ctc_loss", mutates_args=())
def _ctc(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """The losses of a batch: log_probs [t, n, c], targets [n, s], lengths [n] -> [n]."""
    made = aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]
    return torch.where(made == math.inf, 0, made) if zero_infinity else made.clone()


@_ctc.register_fake
def _(log_probs: torch.Tensor, *_: object) -> torch.Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@torch.library.custom_op("shardwright::ctc_loss_backward", mutates_args=())
def _ctc_backward(
    gradient: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    tensors = log_probs, targets, input_lengths, target_lengths
    made, table = aten._ctc_loss.Tensor(*tensors, blank, zero_infinity)
    return ctc_loss_backward(gradient, *tensors, made, table, blank, zero_infinity)


@_ctc_backward.register_fake
def _(gradient: torch.Tensor, log_probs: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(log_probs)


def _keep_ctc(ctx: Any, inputs: tuple[object, ...], output: torch.Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _back_through_ctc(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    made = _ctc_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return made, None, None, None, None, None


_ctc.register_autograd(_back_through_ctc, setup_context=_keep_ctc)
ctc_losses = torch.ops.shardwright.ctc_loss.default


register((ctc_losses,), Rule("t! n c!, n s!, n, n -> n", pads=False))
register(
    (aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default),
    Rule(_text, expand=_expand, neutral=0),
)
register((aten.nll_loss_forward.default,), Rule(_fused_text))
register((picked,), Rule(_picked_text, neutral=0))
register((class_sums,), Rule(_class_sums_text, neutral=-math.inf))
