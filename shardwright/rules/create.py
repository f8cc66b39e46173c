"""Tensors made from nothing. Where the value is the same everywhere any dim may be split, and a rank makes its slice
alone; where it depends on the position the tensor is made whole. Triangles cut from a tensor."""

from __future__ import annotations

import torch

from ..graph import Op
from .dims import cut_size, lent, named, operand, whole
from .notation import Assignment, Bound
from .positions import positions
from .registry import Expansion, Local, Rule, local_output_shape, register

aten = torch.ops.aten


def _even(op: Op) -> str:
    return f" -> {operand(named(len(op.outputs[0].shape)))}"


def _local_even(op: Op, bound: Bound, assignment: Assignment) -> Local:
    args, kwargs = op.with_arguments(size=list(local_output_shape(bound, assignment)))
    return Local(op.target, args, kwargs)


def _placed(op: Op) -> str:
    return f" -> {operand(whole(named(len(op.outputs[0].shape))))}"


def _new(op: Op) -> str:
    """The input lends its dtype and device alone, under any layout that its dims can share with the output's."""
    shape = op.outputs[0].shape
    return f"{operand(lent(op.inputs[0].shape, shape))} -> {operand(named(len(shape)))}"


def _triangle(op: Op) -> str:
    names = operand([*named(len(op.inputs[0].shape) - 2), "m", "n"])
    return f"{names} -> {names}"


def _expand_triangle(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    """A slice keeps what stands, by its place in the whole, on the right side of the diagonal."""
    if cut_size(bound, assignment, ["m", "n"]) == 1:
        return None
    x, beyond = op.inputs[0], aten.gt.Scalar if op.kind == "tril" else aten.lt.Scalar

    def work(b):
        rows, columns = (positions(b, x, x, len(x.shape) - k) for k in (2, 1))
        right = b.call(aten.sub.Tensor, columns, b.call(aten.unsqueeze.default, rows, 1))
        dropped = b.call(beyond, right, op.argument("diagonal"))
        return b.call(aten.masked_fill.Scalar, x, dropped, 0)
    return work


register((aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format),
         Rule(_even, localize=_local_even))
register((aten.scalar_tensor.default, aten.arange.default, aten.arange.start, aten.arange.start_step,
          aten.linspace.default, aten.logspace.default, aten.eye.default, aten.eye.m, aten.tril_indices.default,
          aten.triu_indices.default), Rule(_placed))
register((aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default),
         Rule(_new, localize=_local_even))
register((aten.tril.default, aten.triu.default), Rule(_triangle, linear=True, expand=_expand_triangle))
