"""Reductions: sums, extremes, means, and the operators that need one dim whole.

A reduced dim is a contracted factor: cut, it leaves terms of a sum or of a maximum. A mean is a sum divided by the
global count; whether any or all are true is a count of them.
"""

from __future__ import annotations

import math

import torch

from ..graph import Op
from .dims import cut_size, listed, named, normal, operand, operands, whole, wide
from .notation import Assignment, Bound
from .registry import Expansion, Rule, register

aten = torch.ops.aten


def reduced_dims(op: Op) -> tuple[int, ...]:
    """The dims that a reduction takes away."""
    if op.target in (aten.any.dims, aten.all.dims) and op.argument("dim") == []:
        return ()
    return listed(op)


def reduction_text(op: Op, keep_whole: bool = False) -> str:
    """The notation of a reduction: the outputs lack the reduced dims, or have 1 in their place."""
    names, reduced = named(len(op.inputs[0].shape)), reduced_dims(op)
    kept = "1" if op.argument("keepdim", False) else None
    out = [kept if i in reduced else name for i, name in enumerate(names)]
    before = [whole([n])[0] if keep_whole and i in reduced else n for i, n in enumerate(names)]
    text = operand([n for n in out if n is not None])
    return f"{operand(before)} -> {', '.join([text] * len(op.outputs))}"


def reduction_cut(op: Op, bound: Bound, assignment: Assignment) -> int:
    """Into how many parts the reduced dims are cut together."""
    return cut_size(bound, assignment, [f"d{i}" for i in reduced_dims(op)])


def _whole_reduction(op: Op) -> str:
    return reduction_text(op, keep_whole=True)


def _expand_mean(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if reduction_cut(op, bound, assignment) == 1:
        return None
    x, out, dims = op.inputs[0], op.outputs[0], reduced_dims(op)
    count = math.prod(x.shape[d] for d in dims)

    def work(b):
        total = b.call(aten.sum.dim_IntList, x, list(dims), op.argument("keepdim", False), dtype=wide(out.dtype))
        return b.to(b.call(aten.div.Tensor, total, count), out.dtype)
    return work


def _expand_truth(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    """Any is true where the true ones count more than none, all where the false ones count none."""
    if reduction_cut(op, bound, assignment) == 1:
        return None
    one, finished = (aten.ne.Scalar, aten.ne.Scalar) if op.kind == "any" else (aten.eq.Scalar, aten.eq.Scalar)

    def work(b):
        hits = b.call(one, op.inputs[0], 0)
        count = b.call(aten.sum.dim_IntList, hits, list(reduced_dims(op)), op.argument("keepdim", False))
        return b.to(b.call(finished, count, 0), op.outputs[0].dtype)
    return work


def _along(op: Op) -> str:
    """One dim stays whole, and stands in the outputs too, or is gone from them, or is a 1 in its place."""
    shape = op.inputs[0].shape
    names = named(len(shape))
    if not shape:
        return "... -> " + ", ".join(["..."] * len(op.outputs))
    at = normal(op.argument("dim"), len(shape))
    out = [*names]
    out[at] = "out!"
    if len(op.outputs[0].shape) < len(shape):
        del out[at]
    names[at] += "!"
    return f"{operand(names)} -> {', '.join([operand(out)] * len(op.outputs))}"


def _diff(op: Op) -> str:
    """Neighbours along one dim, which stays whole, as does what is put before and after it."""
    shape = op.inputs[0].shape
    names = named(len(shape))
    at = normal(op.argument("dim"), len(shape))
    sides = [operand([*names[:at], f"{what}!", *names[at + 1:]]) for what in ("held", "before", "after", "out")]
    texts = operands(op, self=sides[0], prepend=sides[1], append=sides[2])
    return f"{texts} -> {sides[3]}"


def _quantile(op: Op) -> str:
    if op.argument("dim") is None or not op.inputs[0].shape:
        return f"...! -> {operand(whole(named(len(op.outputs[0].shape), 'o')))}"
    return reduction_text(op, keep_whole=True)


def _among(op: Op) -> str:
    """Whether elements are among the elements of another tensor, which stays whole."""
    return f"..., {operand(whole(named(len(op.inputs[1].shape), 't')))} -> ..."


def _renorm(op: Op) -> str:
    """A norm of all that has one index in one dim, which alone is cut."""
    names = named(len(op.inputs[0].shape))
    at = normal(op.argument("dim"), len(names))
    texts = operand([n if d == at else f"{n}!" for d, n in enumerate(names)])
    return f"{texts} -> {texts}"


def _paired(op: Op) -> str:
    """Two tensors, broadcast against each other, compared along one dim, which stays whole."""
    shapes = [v.shape for v in op.inputs]
    rank = max(map(len, shapes))
    at = normal(op.argument("dim", -1), rank)
    names = named(rank)
    out = [("1" if op.argument("keepdim", False) else None) if i == at else n for i, n in enumerate(names)]
    names[at] += "!"
    texts = [operand(names[rank - len(s):]) for s in shapes]
    return f"{', '.join(texts)} -> {operand([n for n in out if n])}"


SUM = Rule(reduction_text, linear=True, neutral=0)

register((aten.sum.default, aten.sum.dim_IntList), SUM)
register((aten.nansum.default, aten.count_nonzero.default, aten.count_nonzero.dim_IntList),
         Rule(reduction_text, neutral=0))
register((aten.mean.default, aten.mean.dim), Rule(reduction_text, linear=True, expand=_expand_mean, neutral=0))
register((aten.amax.default, aten.max.default), Rule(reduction_text, reduction="max", neutral=-math.inf))
register((aten.amin.default, aten.min.default), Rule(reduction_text, reduction="min", neutral=math.inf))
register((aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims),
         Rule(reduction_text, expand=_expand_truth, neutral=0))
register((aten.prod.default, aten.prod.dim_int, aten.aminmax.default, aten.nanmean.default, aten.median.default),
         Rule(_whole_reduction))
register((aten.msort.default,), Rule("d! ... -> d! ..."))
register((aten.diff.default,), Rule(_diff, linear=True))
register((aten.quantile.scalar, aten.nanquantile.scalar), Rule(_quantile))
register((aten.histc.default,), Rule("...! -> bins!"))
register((aten.isin.Tensor_Tensor,), Rule(_among))
register((aten.renorm.default,), Rule(_renorm))
register((aten.median.dim, aten.nanmedian.dim, aten.mode.default, aten.kthvalue.default, aten.topk.default,
          aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable, aten.cummax.default,
          aten.cummin.default, aten.cumprod.default, aten.logcumsumexp.default), Rule(_along))
register((aten.cosine_similarity.default, aten.linalg_vecdot.default), Rule(_paired))
register((aten.pairwise_distance.default,), Rule(_paired))
register((aten.cdist.default,), Rule("... p d!, ... r d! -> ... p r"))
register((aten.dist.default,), Rule("...!, ...! -> "))
