"""Along a cut dim: cumulative sums, and where the largest and smallest lie.

    cumsum x      = cumsum within the part + Σ totals of the parts before it      one reduce-scatter of the totals
    argmax x      = min { i : x[i] = max x }                                      the first, as on one device
    max x along a dim = x[argmax x], which alone gets the gradient
"""

from __future__ import annotations

from typing import Any

import torch

from ..graph import Op, Value
from ..layout import digits_size
from .dims import cut_size, named, normal, operand, wide
from .lookup import gathered
from .notation import Assignment, Bound
from .positions import count, positions
from .reduce import reduced_dims, reduction_cut, reduction_text
from .registry import Expansion, Rule, register

aten = torch.ops.aten


def _scanned(op: Op) -> str:
    names = operand(named(len(op.inputs[0].shape)))
    return f"{names} -> {names}"


def _expand_cumsum(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    x, out = op.inputs[0], op.outputs[0]
    dim = normal(op.argument("dim"), len(x.shape))
    if not x.shape or cut_size(bound, assignment, [f"d{dim}"]) == 1:
        return None

    def work(b):
        values = b.to(x, wide(out.dtype))
        digits = b.layouts[values.name].dims[dim]
        parts, tail = digits_size(digits), [1] * (len(x.shape) - 1 - dim)
        split = [*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1:]]
        within = b.call(aten.cumsum.default, b.call(aten.view.default, values, split), dim + 1)
        total = b.call(aten.narrow.default, within, dim + 1, split[dim + 1] - 1, 1)
        total = b.call(aten.unsqueeze.default, total, dim + 1)
        # What each part adds to every part after it: a term of a sum over the ranks, of which each takes its own line.
        mine = b.call(aten.view.default, positions(b, x, total, dim), [parts, 1, 1, *tail])
        theirs = b.call(aten.view.default, b.call(count, x, parts, 1), [parts, 1, *tail])
        added = b.call(aten.where.ScalarOther, b.call(aten.lt.Tensor, mine, theirs), total, 0)
        before = b.call(aten.sum.dim_IntList, added, [dim])
        laid = [*b.layouts[before.name].dims]
        laid[dim] = digits
        made = b.call(aten.add.Tensor, within, b.lay(before, laid))
        made = b.call(aten.view.default, made, list(x.shape))
        return b.to(made, out.dtype)
    return work


# -- extremes ----------------------------------------------------------------------------------------------------------


def _first(b, x: Value, dim: int, largest: bool) -> Value:
    """Where along a dim the extreme first stands, the dim kept with size 1. A NaN is the extreme."""
    x = b.call(aten.detach.default, x)
    top = b.call(aten.amax.default if largest else aten.amin.default, x, [dim], True)
    hit = b.call(aten.eq.Tensor, x, top)
    if x.dtype.is_floating_point:
        hit = b.call(aten.logical_or.default, hit, b.call(aten.isnan.default, x))
    at = b.call(aten.view.default, positions(b, x, x, dim), [x.shape[dim]] + [1] * (len(x.shape) - 1 - dim))
    candidates = b.call(aten.where.ScalarOther, hit, at, x.shape[dim])
    return b.call(aten.amin.default, candidates, [dim], True)


def _index_text(op: Op) -> str:
    """Where no dim is named the position is one in all elements in order: of the dims only the first is cut."""
    if op.argument("dim") is not None:
        return reduction_text(op)
    names = named(len(op.inputs[0].shape))
    out = ["1"] * len(names) if op.argument("keepdim") else []
    return f"{operand([*names[:1], *(f'{n}!' for n in names[1:])])} -> {operand(out) if out else ''}"


def _expand_index(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if reduction_cut(op, bound, assignment) == 1:
        return None
    x, out, dim = op.inputs[0], op.outputs[0], op.argument("dim")

    def work(b):
        line = b.call(aten.view.default, x, [x.numel]) if dim is None else x
        found = _first(b, line, normal(dim or 0, len(line.shape)), op.kind == "argmax")
        return b.call(aten.view.default, found, list(out.shape))
    return work


def _expand_extreme(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if reduction_cut(op, bound, assignment) == 1:
        return None
    x, (dim,) = op.inputs[0], reduced_dims(op)

    def work(b) -> list[Any]:
        found = _first(b, x, dim, op.kind == "max")
        pair = [gathered(b, x, dim, found), found]
        return pair if op.argument("keepdim") else [b.call(aten.squeeze.dim, part, dim) for part in pair]
    return work


register((aten.cumsum.default,), Rule(_scanned, linear=True, expand=_expand_cumsum))
register((aten.argmax.default, aten.argmin.default), Rule(_index_text, expand=_expand_index, neutral=0))
register((aten.max.dim, aten.min.dim), Rule(reduction_text, expand=_expand_extreme, neutral=0))
