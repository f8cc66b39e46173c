"""Losses. A mean over a cut batch is a sum divided by the global count:

    mse, l1, …               Σ loss / count
    cross entropy, nll       see `classes`

In half precision the terms are summed in float32.
"""

from __future__ import annotations

import math

import torch

from ..graph import Op, Value
from .dims import cut_size, named, operand, operands, whole, wide
from .notation import Assignment, Bound
from .registry import Expansion, Rule, register

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for `reduction`


def _elementwise_text(op: Op) -> str:
    return ", ".join(["..."] * len(op.inputs)) + (" -> ..." if op.argument("reduction") == NONE else " -> ")


def summed(b, op: Op) -> Value:
    """The sum of the losses, wide enough to hold it."""
    out = op.outputs[0].dtype
    args, kwargs = op.with_arguments(reduction=SUM if wide(out) == out else NONE)
    made = b.call(op.target, *args, **kwargs)
    return made if wide(out) == out else b.call(aten.sum.default, made, dtype=wide(out))


def needs_work(op: Op, bound: Bound, assignment: Assignment) -> bool:
    return op.argument("reduction") == MEAN and cut_size(bound, assignment) > 1


def _expand_elementwise(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if not needs_work(op, bound, assignment):
        return None
    count = math.prod(torch.broadcast_shapes(*(v.shape for v in op.inputs)))
    return lambda b: b.to(b.call(aten.div.Tensor, summed(b, op), count), op.outputs[0].dtype)


def _rows_text(op: Op) -> str:
    """One loss a row: the last dim stays whole."""
    rows = operand(named(len(op.inputs[0].shape) - 1, "n"))
    row = f"{'' if rows == '...' else rows} d!"
    texts = operands(op, self=row, input1=row, input2=row, anchor=row, positive=row, negative=row,
                     target=row if op.kind == "multilabel_margin_loss" else rows,
                     weight="d!")
    return f"{texts} -> {rows if op.argument('reduction') == NONE else ''}"


def _expand_rows(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if not needs_work(op, bound, assignment):
        return None
    count = math.prod(op.inputs[0].shape[:-1])
    return lambda b: b.to(b.call(aten.div.Tensor, summed(b, op), count), op.outputs[0].dtype)


def counted(b, op: Op, dtype: torch.dtype) -> Value:
    """How much the targets that are not ignored count for together."""
    target, weight = op.argument("target"), op.argument("weight")
    kept = b.call(aten.ne.Scalar, target, op.argument("ignore_index"))
    if weight is None:
        return b.call(aten.sum.default, kept, dtype=dtype)
    index = b.call(aten.where.ScalarOther, kept, target, 0)  # an ignored target need not be a class
    weights = b.call(aten.take.default, b.call(aten.detach.default, weight), index)
    return b.call(aten.sum.default, b.call(aten.where.ScalarOther, kept, weights, 0), dtype=dtype)


def _take_text(op: Op) -> str:
    """Any index may reach any element."""
    held, index = (named(len(v.shape), name) for v, name in zip(op.inputs, ("h", "i")))
    return f"{operand(whole(held))}, {operand(index)} -> {operand(index)}"


def _of_zeros(op: Op) -> float | None:
    """Some losses of 0 against 0 are 0."""
    vanishes = op.kind in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
    return 0 if vanishes and len({v.shape for v in op.inputs}) == 1 else None


_ELEMENTWISE = Rule(_elementwise_text, expand=_expand_elementwise, neutral=_of_zeros)

register((aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
          aten.soft_margin_loss.default, aten.binary_cross_entropy.default,
          aten.binary_cross_entropy_with_logits.default, aten.kl_div.default, aten.poisson_nll_loss.default,
          aten.hinge_embedding_loss.default, aten.margin_ranking_loss.default), _ELEMENTWISE)
register((aten.triplet_margin_loss.default, aten.cosine_embedding_loss.default, aten.multi_margin_loss.default,
          aten.multilabel_margin_loss.default),
         Rule(_rows_text, expand=_expand_rows))
register((aten.take.default,), Rule(_take_text))
