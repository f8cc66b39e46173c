"""Variances and vector norms. Over a cut dim, with a mean first and its gradient left out where it is zero:

    var  = Σ (x - mean)² / (count - correction)         Σ (x - mean) = 0, so no gradient goes through the mean
    norm = (Σ |x|^p)^(1/p), Σ [x ≠ 0] for p = 0, max |x| for p = ∞
    weight norm = g v / √(Σ v²), over all dims but one

The root's gradient at zero is zero, as in torch.
"""

from __future__ import annotations

import math

import torch

from ..graph import Op, Value
from .dims import cut_size, dims_of, named, operand, wide
from .notation import Assignment, Bound
from .reduce import reduced_dims, reduction_cut, reduction_text
from .registry import Expansion, Rule, register
from ..torch_private import operators

aten = torch.ops.aten


def _moments_text(op: Op) -> str:
    return reduction_text(op, keep_whole=op.inputs[0].dtype.is_complex)


def _expand_moments(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    """var, std and those that return the mean beside it."""
    if reduction_cut(op, bound, assignment) == 1:
        return None
    x, out, dims = op.inputs[0], op.outputs[0], list(reduced_dims(op))
    keepdim = op.argument("keepdim", False)
    correction = op.argument("correction", 1 if op.argument("unbiased", True) else 0)
    count = math.prod(x.shape[d] for d in dims)
    left = max(0, count - (1 if correction is None else correction))

    def work(b):
        values = b.to(x, wide(x.dtype))
        mean = b.call(aten.div.Tensor, b.call(aten.sum.dim_IntList, values, dims, True), count)
        away = b.call(aten.sub.Tensor, values, b.call(aten.detach.default, mean))
        squares = b.call(aten.sum.dim_IntList, b.call(aten.square.default, away), dims, keepdim)
        spread = b.call(aten.div.Tensor, squares, left)
        if op.kind.startswith("std"):
            spread = _root(b, spread, 2)
        if len(op.outputs) == 1:
            return b.to(spread, out.dtype)
        if not keepdim:
            mean = b.call(aten.squeeze.dims, mean, dims)
        return b.to(spread, out.dtype), b.to(mean, op.outputs[1].dtype)
    return work


def _root(b, total: Value, p: float) -> Value:
    """total^(1/p), with the gradient zero where the total is."""
    zero = b.call(aten.eq.Scalar, total, 0)
    safe = b.call(aten.masked_fill.Scalar, total, zero, 1)
    root = b.call(aten.sqrt.default, safe) if p == 2 else b.call(aten.pow.Tensor_Scalar, safe, 1 / p)
    return b.call(aten.masked_fill.Scalar, root, zero, 0)


def _order(op: Op) -> float | None:
    """The p of a call that is a vector norm, None where it is another norm."""
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
    return reduction_text(op, keep_whole=p is None or -math.inf < p < 0 or math.isnan(p)
                          or op.inputs[0].dtype.is_complex)


def _expand_norm(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if reduction_cut(op, bound, assignment) == 1:
        return None
    x, out, p = op.inputs[0], op.outputs[0], _order(op)
    dims, keepdim = list(dims_of(op.argument("dim"), len(x.shape))), op.argument("keepdim", False)

    def total(b, terms: Value) -> Value:
        return b.call(aten.sum.dim_IntList, terms, dims, keepdim)

    def work(b):
        values = b.to(x, wide(out.dtype))
        if p == 0:
            made = total(b, b.to(b.call(aten.ne.Scalar, values, 0), values.dtype))
        elif p == 2:
            made = _root(b, total(b, b.call(aten.square.default, values)), 2)
        else:
            size = b.call(aten.abs.default, values)
            if math.isinf(p):
                made = b.call(aten.amax.default if p > 0 else aten.amin.default, size, dims, keepdim)
            elif p == 1:
                made = total(b, size)
            else:
                made = _root(b, total(b, _power(b, size, p)), p)
        return b.to(made, out.dtype)
    return work


def _power(b, size: Value, p: float) -> Value:
    """size^p, with the gradient zero where the size is, also for p < 1."""
    if p > 1:
        return b.call(aten.pow.Tensor_Scalar, size, p)
    zero = b.call(aten.eq.Scalar, size, 0)
    safe = b.call(aten.masked_fill.Scalar, size, zero, 1)
    return b.call(aten.masked_fill.Scalar, b.call(aten.pow.Tensor_Scalar, safe, p), zero, 0)


# -- a weight by its direction and its length --------------------------------------------------------------------------


def _lengths(op: Op) -> list[int]:
    """The dims over which a weight's length is taken: all but one, or all."""
    kept, rank = op.argument("dim", 0), len(op.inputs[0].shape)
    return [d for d in range(rank) if kept == -1 or d != kept]


def _weight_norm_text(op: Op) -> str:
    names = named(len(op.inputs[0].shape))
    over = _lengths(op)
    length = ["1" if d in over else name for d, name in enumerate(names)] if op.inputs[1].shape else []
    return f"{operand(names)}, {operand(length)} -> {operand(names)}"


def _expand_weight_norm(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    (v, g), dims = op.inputs, _lengths(op)
    if cut_size(bound, assignment, [f"d{d}" for d in dims]) == 1:
        return None

    def work(b):
        squares = b.call(aten.square.default, v)
        length = b.call(aten.sqrt.default, b.call(aten.sum.dim_IntList, squares, dims, True))
        return b.call(aten.mul.Tensor, v, b.call(aten.div.Tensor, g, length))
    return work


register(operators("_weight_norm"), Rule(_weight_norm_text, expand=_expand_weight_norm, neutral=0))
register((aten.var.default, aten.var.dim, aten.var.correction, aten.std.default, aten.std.dim, aten.std.correction,
          aten.var_mean.default, aten.var_mean.dim, aten.var_mean.correction, aten.std_mean.default,
          aten.std_mean.dim, aten.std_mean.correction), Rule(_moments_text, expand=_expand_moments, neutral=0))
register((aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dtype,
          aten.norm.ScalarOpt_dim_dtype, aten.frobenius_norm.dim, aten.linalg_norm.default, aten.linalg_norm.ord_str,
          aten.linalg_matrix_norm.default, aten.linalg_matrix_norm.str_ord),
         Rule(_norm_text, expand=_expand_norm, neutral=0))
