"""Tensors made from nothing. Where the value is the same everywhere any dim may be split, and a rank makes its slice
alone; where it depends on the position the tensor is made whole."""

from __future__ import annotations

import torch

from ..graph import Op
from .dims import lent, named, operand, whole
from .notation import Assignment, Bound
from .registry import Local, Rule, local_output_shape, register

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
    batch = named(len(op.inputs[0].shape) - 2)
    return f"{operand([*batch, 'm!', 'n!'])} -> {operand([*batch, 'm', 'n'])}"


register((aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format),
         Rule(_even, localize=_local_even))
register((aten.scalar_tensor.default, aten.arange.default, aten.arange.start, aten.arange.start_step,
          aten.linspace.default, aten.logspace.default, aten.eye.default, aten.eye.m, aten.tril_indices.default,
          aten.triu_indices.default), Rule(_placed))
register((aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default),
         Rule(_new, localize=_local_even))
register((aten.tril.default, aten.triu.default), Rule(_triangle, linear=True))
