"""The softmax family. Over a cut dim, with the maximum taken out first, so that nothing overflows:

    softmax x = e / Σ e     log_softmax x = y - log Σ e     logsumexp x = m + log Σ e
    where m = max x, y = x - m, e = exp y

The maximum carries no gradient: it is a constant that cancels.
"""

from __future__ import annotations

import torch

from ..graph import Op, Value
from ..torch_private import operators
from .dims import cut_size, listed, named, operand, wide
from .notation import Assignment, Bound
from .reduce import reduced_dims, reduction_cut, reduction_text
from .registry import Expansion, Rule, register

aten = torch.ops.aten


def _text(op: Op) -> str:
    names = operand(named(len(op.inputs[0].shape)))
    return f"{names} -> {names}"


def maximum(b, x: Value, dims: list[int]) -> Value:
    """The maximum, as a constant."""
    return b.call(aten.amax.default, b.call(aten.detach.default, x), dims, True)


def _expand_softmax(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    dims = list(listed(op))
    if cut_size(bound, assignment, [f"d{d}" for d in dims]) == 1:
        return None
    x, out = op.inputs[0], op.outputs[0]

    def work(b):
        values = b.to(x, wide(out.dtype))
        shifted = b.call(aten.sub.Tensor, values, maximum(b, values, dims))
        raised = b.call(aten.exp.default, shifted)
        total = b.call(aten.sum.dim_IntList, raised, dims, True)
        if "log" in op.kind:
            made = b.call(aten.sub.Tensor, shifted, b.call(aten.log.default, total))
        else:
            made = b.call(aten.div.Tensor, raised, total)
        return b.to(made, out.dtype)
    return work


def _expand_logsumexp(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if reduction_cut(op, bound, assignment) == 1:
        return None
    x, out, dims = op.inputs[0], op.outputs[0], list(reduced_dims(op))

    def work(b):
        values = b.to(x, wide(out.dtype))
        top = maximum(b, values, dims)
        top = b.call(aten.masked_fill.Scalar, top, b.call(aten.isinf.default, top), 0)  # inf - inf is no number
        raised = b.call(aten.exp.default, b.call(aten.sub.Tensor, values, top))
        total = b.call(aten.sum.dim_IntList, raised, dims, True)
        made = b.call(aten.add.Tensor, b.call(aten.log.default, total), top)
        if not op.argument("keepdim", False):
            made = b.call(aten.squeeze.dims, made, dims)
        return b.to(made, out.dtype)
    return work


register((aten.softmax.int, aten.special_softmax.default, aten.log_softmax.int, aten.special_log_softmax.default,
          *operators("_softmax.default", "_log_softmax.default")), Rule(_text, expand=_expand_softmax))
register((aten.logsumexp.default,), Rule(reduction_text, expand=_expand_logsumexp, neutral=0))
