"""Reductions: sums, extremes, means, norms, softmax, cumulative sums, and operators that need one dim whole.

1. *Plain reductions*. A reduced dim is a contracted factor: where the dim is cut, each rank holds a term of a sum or
   of a maximum. A mean is a sum divided by the global count; any and all count true or false elements.

2. *Variances and vector norms* over a cut dim:

       var  = Σ (x - mean)² / (count - correction)      no gradient through the mean, since Σ (x - mean) = 0
       norm = (Σ |x|^p)^(1/p), Σ [x ≠ 0] for p = 0, max |x| for p = ∞
       weight norm = g v / √(Σ v²), over all dims but one

   The gradient of the root at zero is zero, as in torch.

3. *Softmax family* over a cut dim, with the maximum subtracted first, so that nothing overflows:

       softmax x = e / Σ e     log_softmax x = y - log Σ e     logsumexp x = m + log Σ e
       where m = max x, y = x - m, e = exp y

   The maximum carries no gradient: it is a constant that cancels.

4. *Cumulative sums and positions of extremes* along a cut dim:

       cumsum x      = cumsum within the part + Σ totals of the parts before it     one reduce-scatter of the totals
       argmax x      = min { i : x[i] = max x }                                     the first, as on one device
       max x along a dim = x[argmax x], which alone gets the gradient

Example: (1, 4, 2, 5) cut in 2. Sums: 5 and 7, together 12. Cumulative sums: (1, 5), and (2, 7) + 5 = (7, 12).
"""

from __future__ import annotations

import math

import torch

from ..graph import Op, Value
from ..layout import digits_size
from ..torch_private import operators
from .dims import count, cut_size, dims_of, listed, named, normal, operand, operands, positions, whole, wide
from .indexing import gathered
from .notation import Assignment, Bound
from .registry import Builder, Expansion, Rule, register

aten = torch.ops.aten


def reduced_dims(op: Op) -> tuple[int, ...]:
    """The dims that a reduction removes."""
    if op.target in (aten.any.dims, aten.all.dims) and op.argument("dim") == []:
        return ()
    return listed(op)


def reduction_text(op: Op, keep_whole: bool = False) -> str:
    """The notation of a reduction: the outputs lack the reduced dims, or have 1 in their place."""
    names, reduced = named(len(op.inputs[0].shape)), reduced_dims(op)
    in_place = "1" if op.argument("keepdim", False) else None
    out = [in_place if i in reduced else name for i, name in enumerate(names)]
    before = [whole([n])[0] if keep_whole and i in reduced else n for i, n in enumerate(names)]
    text = operand([n for n in out if n is not None])
    return f"{operand(before)} -> {', '.join([text] * len(op.outputs))}"


def reduction_cut(op: Op, bound: Bound, assignment: Assignment) -> int:
    """The number of parts into which the reduced dims are cut together."""
    return cut_size(bound, assignment, [f"d{i}" for i in reduced_dims(op)])


def _whole_reduction(op: Op) -> str:
    return reduction_text(op, keep_whole=True)


def _expand_mean(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if reduction_cut(op, bound, assignment) == 1:
        return None
    x, out, dims = op.inputs[0], op.output(0), reduced_dims(op)
    count = math.prod(x.shape[d] for d in dims)

    def work(b: Builder) -> Value:
        total = b.call(aten.sum.dim_IntList, x, list(dims), op.argument("keepdim", False), dtype=wide(out.dtype))
        return b.to(b.call(aten.div.Tensor, total, count), out.dtype)

    return work


def _expand_truth(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    """Count: any is true where the count of true elements is above 0, all where the count of false elements is 0."""
    if reduction_cut(op, bound, assignment) == 1:
        return None
    one, finished = (aten.ne.Scalar, aten.ne.Scalar) if op.kind == "any" else (aten.eq.Scalar, aten.eq.Scalar)

    def work(b: Builder) -> Value:
        hits = b.call(one, op.inputs[0], 0)
        count = b.call(aten.sum.dim_IntList, hits, list(reduced_dims(op)), op.argument("keepdim", False))
        return b.to(b.call(finished, count, 0), op.output(0).dtype)

    return work


def _along(op: Op) -> str:
    """The notation of an operator along one whole dim; in the outputs that dim is kept, removed, or of size 1."""
    shape = op.inputs[0].shape
    names = named(len(shape))
    if not shape:
        return "... -> " + ", ".join(["..."] * len(op.outputs))
    at = normal(op.argument("dim"), len(shape))
    out = [*names]
    out[at] = "out!"
    if len(op.output(0).shape) < len(shape):
        del out[at]
    names[at] += "!"
    return f"{operand(names)} -> {', '.join([operand(out)] * len(op.outputs))}"


def _diff(op: Op) -> str:
    """The notation of differences along one dim, which stays whole, as do the tensors prepended and appended."""
    shape = op.inputs[0].shape
    names = named(len(shape))
    at = normal(op.argument("dim"), len(shape))
    sides = [operand([*names[:at], f"{what}!", *names[at + 1 :]]) for what in ("held", "before", "after", "out")]
    texts = operands(op, self=sides[0], prepend=sides[1], append=sides[2])
    return f"{texts} -> {sides[3]}"


def _quantile(op: Op) -> str:
    if op.argument("dim") is None or not op.inputs[0].shape:
        return f"...! -> {operand(whole(named(len(op.output(0).shape), 'o')))}"
    return reduction_text(op, keep_whole=True)


def _among(op: Op) -> str:
    """The notation of isin: the tensor of test elements stays whole."""
    return f"..., {operand(whole(named(len(op.inputs[1].shape), 't')))} -> ..."


def _renorm(op: Op) -> str:
    """The notation of renorm: a norm for each index of one dim; only that dim may be cut."""
    names = named(len(op.inputs[0].shape))
    at = normal(op.argument("dim"), len(names))
    texts = operand([n if d == at else f"{n}!" for d, n in enumerate(names)])
    return f"{texts} -> {texts}"


def _paired(op: Op) -> str:
    """The notation of a comparison of two broadcast tensors along one dim, which stays whole."""
    shapes = [v.shape for v in op.inputs]
    rank = max(map(len, shapes))
    at = normal(op.argument("dim", -1), rank)
    names = named(rank)
    out = [("1" if op.argument("keepdim", False) else None) if i == at else n for i, n in enumerate(names)]
    names[at] += "!"
    texts = [operand(names[rank - len(s) :]) for s in shapes]
    return f"{', '.join(texts)} -> {operand([n for n in out if n])}"


SUM = Rule(reduction_text, linear=True, neutral=0)

register((aten.sum.default, aten.sum.dim_IntList), SUM)
register(
    (aten.nansum.default, aten.count_nonzero.default, aten.count_nonzero.dim_IntList), Rule(reduction_text, neutral=0)
)
register((aten.mean.default, aten.mean.dim), Rule(reduction_text, linear=True, expand=_expand_mean, neutral=0))
register((aten.amax.default, aten.max.default), Rule(reduction_text, reduction="max", neutral=-math.inf))
register((aten.amin.default, aten.min.default), Rule(reduction_text, reduction="min", neutral=math.inf))
register(
    (aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims),
    Rule(reduction_text, expand=_expand_truth, neutral=0),
)
register(
    (aten.prod.default, aten.prod.dim_int, aten.aminmax.default, aten.nanmean.default, aten.median.default),
    Rule(_whole_reduction),
)
register((aten.msort.default,), Rule("d! ... -> d! ..."))
register((aten.diff.default,), Rule(_diff, linear=True))
register((aten.quantile.scalar, aten.nanquantile.scalar), Rule(_quantile))
register((aten.histc.default,), Rule("...! -> bins!"))
register((aten.isin.Tensor_Tensor,), Rule(_among))
register((aten.renorm.default,), Rule(_renorm))
register(
    (
        aten.median.dim,
        aten.nanmedian.dim,
        aten.mode.default,
        aten.kthvalue.default,
        aten.topk.default,
        aten.sort.default,
        aten.sort.stable,
        aten.argsort.default,
        aten.argsort.stable,
        aten.cummax.default,
        aten.cummin.default,
        aten.cumprod.default,
        aten.logcumsumexp.default,
    ),
    Rule(_along),
)
register((aten.cosine_similarity.default, aten.linalg_vecdot.default), Rule(_paired))
register((aten.pairwise_distance.default,), Rule(_paired))
register((aten.cdist.default,), Rule("... p d!, ... r d! -> ... p r"))
register((aten.dist.default,), Rule("...!, ...! -> "))


# -- variances and vector norms


def _moments_text(op: Op) -> str:
    return reduction_text(op, keep_whole=op.inputs[0].dtype.is_complex)


def _expand_moments(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    """Expand var and std, also those that return the mean."""
    if reduction_cut(op, bound, assignment) == 1:
        return None
    x, out, dims = op.inputs[0], op.output(0), list(reduced_dims(op))
    keepdim = op.argument("keepdim", False)
    correction = op.argument("correction", 1 if op.argument("unbiased", True) else 0)
    count = math.prod(x.shape[d] for d in dims)
    degrees_of_freedom = max(0, count - (1 if correction is None else correction))

    def work(b: Builder) -> Value | tuple[Value, Value]:
        values = b.to(x, wide(x.dtype))
        mean = b.call(aten.div.Tensor, b.call(aten.sum.dim_IntList, values, dims, True), count)
        away = b.call(aten.sub.Tensor, values, b.call(aten.detach.default, mean))
        squares = b.call(aten.sum.dim_IntList, b.call(aten.square.default, away), dims, keepdim)
        spread = b.call(aten.div.Tensor, squares, degrees_of_freedom)
        if op.kind.startswith("std"):
            spread = _root(b, spread, 2)
        if len(op.outputs) == 1:
            return b.to(spread, out.dtype)
        if not keepdim:
            mean = b.call(aten.squeeze.dims, mean, dims)
        return b.to(spread, out.dtype), b.to(mean, op.output(1).dtype)

    return work


def _root(b: Builder, total: Value, p: float) -> Value:
    """total^(1/p), with gradient zero where the total is zero."""
    zero = b.call(aten.eq.Scalar, total, 0)
    safe = b.call(aten.masked_fill.Scalar, total, zero, 1)
    root = b.call(aten.sqrt.default, safe) if p == 2 else b.call(aten.pow.Tensor_Scalar, safe, 1 / p)
    return b.call(aten.masked_fill.Scalar, root, zero, 0)


def _order(op: Op) -> float | None:
    """The p of a vector norm; None for another norm."""
    if op.kind in ("linalg_vector_norm", "norm"):
        p = op.argument("ord") if op.kind == "linalg_vector_norm" else op.argument("p")
        return 2.0 if p is None else float(p)
    if op.kind == "frobenius_norm":
        return 2.0
    order, dims = op.argument("ord"), op.argument("dim")
    if order is None:
        return 2.0
    named = 1 if isinstance(dims, int) else len(op.inputs[0].shape if dims is None else dims)
    if order == "fro" and named == 2:
        return 2.0
    return float(order) if named == 1 and not isinstance(order, str) else None


def _norm_text(op: Op) -> str:
    p = _order(op)
    return reduction_text(
        op, keep_whole=p is None or -math.inf < p < 0 or math.isnan(p) or op.inputs[0].dtype.is_complex
    )


def _expand_norm(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if reduction_cut(op, bound, assignment) == 1:
        return None
    x, out, p = op.inputs[0], op.output(0), _order(op)
    dims, keepdim = list(dims_of(op.argument("dim"), len(x.shape))), op.argument("keepdim", False)

    def total(b: Builder, terms: Value) -> Value:
        return b.call(aten.sum.dim_IntList, terms, dims, keepdim)

    def work(b: Builder) -> Value:
        values = b.to(x, wide(out.dtype))
        if p == 0:
            made = total(b, b.to(b.call(aten.ne.Scalar, values, 0), values.dtype))
        elif p == 2:
            made = _root(b, total(b, b.call(aten.square.default, values)), 2)
        else:
            assert p is not None
            size = b.call(aten.abs.default, values)
            if math.isinf(p):
                made = b.call(aten.amax.default if p > 0 else aten.amin.default, size, dims, keepdim)
            elif p == 1:
                made = total(b, size)
            else:
                made = _root(b, total(b, _power(b, size, p)), p)
        return b.to(made, out.dtype)

    return work


def _power(b: Builder, size: Value, p: float) -> Value:
    """size^p, with gradient zero where the size is zero, also for p < 1."""
    if p > 1:
        return b.call(aten.pow.Tensor_Scalar, size, p)
    zero = b.call(aten.eq.Scalar, size, 0)
    safe = b.call(aten.masked_fill.Scalar, size, zero, 1)
    return b.call(aten.masked_fill.Scalar, b.call(aten.pow.Tensor_Scalar, safe, p), zero, 0)


# -- weight norm -------------------------------------------------------------------------------------------------------


def _lengths(op: Op) -> list[int]:
    """The dims over which the norm of a weight is taken: all but one, or all."""
    free_dim, rank = op.argument("dim", 0), len(op.inputs[0].shape)
    return [d for d in range(rank) if free_dim == -1 or d != free_dim]


def _weight_norm_text(op: Op) -> str:
    names = named(len(op.inputs[0].shape))
    over = _lengths(op)
    length = ["1" if d in over else name for d, name in enumerate(names)] if op.inputs[1].shape else []
    return f"{operand(names)}, {operand(length)} -> {operand(names)}"


def _expand_weight_norm(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    (v, g), dims = op.inputs, _lengths(op)
    if cut_size(bound, assignment, [f"d{d}" for d in dims]) == 1:
        return None

    def work(b: Builder) -> Value:
        squares = b.call(aten.square.default, v)
        length = b.call(aten.sqrt.default, b.call(aten.sum.dim_IntList, squares, dims, True))
        return b.call(aten.mul.Tensor, v, b.call(aten.div.Tensor, g, length))

    return work


register(operators("_weight_norm"), Rule(_weight_norm_text, expand=_expand_weight_norm, neutral=0))
register(
    (
        aten.var.default,
        aten.var.dim,
        aten.var.correction,
        aten.std.default,
        aten.std.dim,
        aten.std.correction,
        aten.var_mean.default,
        aten.var_mean.dim,
        aten.var_mean.correction,
        aten.std_mean.default,
        aten.std_mean.dim,
        aten.std_mean.correction,
    ),
    Rule(_moments_text, expand=_expand_moments, neutral=0),
)
register(
    (
        aten.linalg_vector_norm.default,
        aten.norm.Scalar,
        aten.norm.ScalarOpt_dim,
        aten.norm.ScalarOpt_dtype,
        aten.norm.ScalarOpt_dim_dtype,
        aten.frobenius_norm.dim,
        aten.linalg_norm.default,
        aten.linalg_norm.ord_str,
        aten.linalg_matrix_norm.default,
        aten.linalg_matrix_norm.str_ord,
    ),
    Rule(_norm_text, expand=_expand_norm, neutral=0),
)


# -- the softmax family


def _text(op: Op) -> str:
    names = operand(named(len(op.inputs[0].shape)))
    return f"{names} -> {names}"


def maximum(b: Builder, x: Value, dims: list[int]) -> Value:
    """The maximum over `dims`, as a constant."""
    return b.call(aten.amax.default, b.call(aten.detach.default, x), dims, True)


def _expand_softmax(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    dims = list(listed(op))
    if cut_size(bound, assignment, [f"d{d}" for d in dims]) == 1:
        return None
    x, out = op.inputs[0], op.output(0)

    def work(b: Builder) -> Value:
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
    x, out, dims = op.inputs[0], op.output(0), list(reduced_dims(op))

    def work(b: Builder) -> Value:
        values = b.to(x, wide(out.dtype))
        top = maximum(b, values, dims)
        top = b.call(aten.masked_fill.Scalar, top, b.call(aten.isinf.default, top), 0)  # inf - inf is NaN
        raised = b.call(aten.exp.default, b.call(aten.sub.Tensor, values, top))
        total = b.call(aten.sum.dim_IntList, raised, dims, True)
        made = b.call(aten.add.Tensor, b.call(aten.log.default, total), top)
        if not op.argument("keepdim", False):
            made = b.call(aten.squeeze.dims, made, dims)
        return b.to(made, out.dtype)

    return work


register(
    (
        aten.softmax.int,
        aten.special_softmax.default,
        aten.log_softmax.int,
        aten.special_log_softmax.default,
        *operators("_softmax.default", "_log_softmax.default"),
    ),
    Rule(_text, expand=_expand_softmax),
)
register((aten.logsumexp.default,), Rule(reduction_text, expand=_expand_logsumexp, neutral=0))


# -- cumulative sums and positions of extremes


def _scanned(op: Op) -> str:
    names = operand(named(len(op.inputs[0].shape)))
    return f"{names} -> {names}"


def _expand_cumsum(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    x, out = op.inputs[0], op.output(0)
    dim = normal(op.argument("dim"), len(x.shape))
    if not x.shape or cut_size(bound, assignment, [f"d{dim}"]) == 1:
        return None

    def work(b: Builder) -> Value:
        values = b.to(x, wide(out.dtype))
        digits = b.layouts[values.name].tensor_dims[dim]
        parts, tail = digits_size(digits), [1] * (len(x.shape) - 1 - dim)
        split = [*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :]]
        within = b.call(aten.cumsum.default, b.call(aten.view.default, values, split), dim + 1)
        total = b.call(aten.narrow.default, within, dim + 1, split[dim + 1] - 1, 1)
        total = b.call(aten.unsqueeze.default, total, dim + 1)
        # The total of each part for every part after it: a term of a sum over the ranks, of which each rank takes its
        # own row.
        mine = b.call(aten.view.default, positions(b, x, total, dim), [parts, 1, 1, *tail])
        theirs = b.call(aten.view.default, b.call(count, x, parts, 1), [parts, 1, *tail])
        added = b.call(aten.where.ScalarOther, b.call(aten.lt.Tensor, mine, theirs), total, 0)
        before = b.call(aten.sum.dim_IntList, added, [dim])
        laid = [*b.layouts[before.name].tensor_dims]
        laid[dim] = digits
        made = b.call(aten.add.Tensor, within, b.lay(before, laid))
        made = b.call(aten.view.default, made, list(x.shape))
        return b.to(made, out.dtype)

    return work


# -- extremes ----------------------------------------------------------------------------------------------------------


def _first(b: Builder, x: Value, dim: int, largest: bool) -> Value:
    """The first position of the extreme along a dim, which keeps size 1. A NaN is the extreme."""
    x = b.call(aten.detach.default, x)
    top = b.call(aten.amax.default if largest else aten.amin.default, x, [dim], True)
    hit = b.call(aten.eq.Tensor, x, top)
    if x.dtype.is_floating_point:
        hit = b.call(aten.logical_or.default, hit, b.call(aten.isnan.default, x))
    at = b.call(aten.view.default, positions(b, x, x, dim), [x.shape[dim]] + [1] * (len(x.shape) - 1 - dim))
    candidates = b.call(aten.where.ScalarOther, hit, at, x.shape[dim])
    return b.call(aten.amin.default, candidates, [dim], True)


def _index_text(op: Op) -> str:
    """The notation of argmax and argmin; without a dim the tensor counts as flat, and only dim 0 may be cut."""
    if op.argument("dim") is not None:
        return reduction_text(op)
    names = named(len(op.inputs[0].shape))
    out = ["1"] * len(names) if op.argument("keepdim") else []
    return f"{operand([*names[:1], *(f'{n}!' for n in names[1:])])} -> {operand(out) if out else ''}"


def _expand_index(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if reduction_cut(op, bound, assignment) == 1:
        return None
    x, out, dim = op.inputs[0], op.output(0), op.argument("dim")

    def work(b: Builder) -> Value:
        line = b.call(aten.view.default, x, [x.numel]) if dim is None else x
        found = _first(b, line, normal(dim or 0, len(line.shape)), op.kind == "argmax")
        return b.call(aten.view.default, found, list(out.shape))

    return work


def _expand_extreme(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if reduction_cut(op, bound, assignment) == 1:
        return None
    x, (dim,) = op.inputs[0], reduced_dims(op)

    def work(b: Builder) -> list[Value]:
        found = _first(b, x, dim, op.kind == "max")
        pair = [gathered(b, x, dim, found), found]
        return pair if op.argument("keepdim") else [b.call(aten.squeeze.dim, part, dim) for part in pair]

    return work


register((aten.cumsum.default,), Rule(_scanned, linear=True, expand=_expand_cumsum))
register((aten.argmax.default, aten.argmin.default), Rule(_index_text, expand=_expand_index, neutral=0))
register((aten.max.dim, aten.min.dim), Rule(reduction_text, expand=_expand_extreme, neutral=0))
