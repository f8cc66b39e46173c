"""Views: the same elements under other dims. Splits and merges of dims go through compound dims.

Sizes that such a call carries are global; what a rank calls carries those of its slice. Dims of size 1 that come or go
have no factor; a squeeze on a slice must not take away a dim that is 1 there only, so it too is a reshape. What takes a
tensor apart does not let an open sum through: its parts would need a reduction each.
"""

from __future__ import annotations

import torch

from ..graph import Op, map_values
from ..torch_private import operators
from .dims import cut_size, named, normal, operand, refine, whole
from .notation import Assignment, Bound
from .registry import POINTWISE, Local, Rule, local_output_shape, register

aten = torch.ops.aten


def _reshape(op: Op) -> tuple[str, dict[str, int]]:
    before, after, sizes = refine(op.inputs[0].shape, op.outputs[0].shape)
    texts = [operand(before), *[operand(after)] * (len(op.inputs) - 1)]
    return f"{', '.join(texts)} -> {operand(after)}", sizes


def _local_reshape(op: Op, bound: Bound, assignment: Assignment) -> Local:
    return Local(aten.reshape.default, (op.inputs[0], list(local_output_shape(bound, assignment))), {})


def _local_expand(op: Op, bound: Bound, assignment: Assignment) -> Local:
    return Local(aten.expand.default, (op.inputs[0], list(local_output_shape(bound, assignment))), {})


def _permuted(op: Op) -> str:
    """Which dim goes where is read from the strides that the operator gives a tensor of dims of size 2."""
    rank = len(op.inputs[0].shape)
    probe = torch.empty((2,) * rank, device="meta")
    args, kwargs = map_values((op.args, op.kwargs), lambda _: probe)
    places = {stride: f"d{i}" for i, stride in enumerate(probe.stride())}
    return f"{operand(named(rank))} -> {operand([places[s] for s in op.target(*args, **kwargs).stride()])}"


def _one_dim(op: Op) -> tuple[list[str], int]:
    """Names of the input's dims, and the one that the call is about."""
    rank = len(op.inputs[0].shape)
    return named(rank), normal(op.argument("dim", 0), rank)


def _select(op: Op) -> str:
    names, at = _one_dim(op)
    out = operand(names[:at] + names[at + 1:])
    names[at] += "!"
    return f"{operand(names)} -> {', '.join([out] * len(op.outputs))}"


def _slice(op: Op) -> str:
    names, at = _one_dim(op)
    if op.inputs[0].shape[at] == op.outputs[0].shape[at] and op.argument("step", 1) == 1:
        return f"{operand(names)} -> {operand(names)}"  # all of it
    return _parted(op)


def _local_slice(op: Op, bound: Bound, assignment: Assignment) -> Local:
    """All of a dim is all of its slice."""
    names, at = _one_dim(op)
    if cut_size(bound, assignment, [names[at]]) == 1:
        return Local(op.target, op.args, op.kwargs)
    return Local(aten.alias.default, (op.inputs[0],), {})


def _parted(op: Op) -> str:
    """Parts of one dim: it stays whole, and so do the parts."""
    names, at = _one_dim(op)
    if "dim" not in op.argument_names:  # hsplit, vsplit, dsplit
        at = {"v": 0, "h": min(1, len(names) - 1), "d": 2}[op.kind[0]]
    outs = [operand([*names[:at], f"part{i}!", *names[at + 1:]]) for i in range(len(op.outputs))]
    names[at] += "!"
    return f"{operand(names)} -> {', '.join(outs)}"


def _diagonal(op: Op) -> str:
    names = named(len(op.inputs[0].shape))
    pair = {normal(op.argument("dim1"), len(names)), normal(op.argument("dim2"), len(names))}
    before = [whole([n])[0] if i in pair else n for i, n in enumerate(names)]
    return f"{operand(before)} -> {operand([n for i, n in enumerate(names) if i not in pair] + ['diagonal!'])}"


def _unfold(op: Op) -> str:
    names = named(len(op.inputs[0].shape))
    at = normal(op.argument("dimension"), len(names))
    out = operand([*names[:at], "windows!", *names[at + 1:], "window!"])
    names[at] += "!"
    return f"{operand(names)} -> {out}"


_RESHAPED = Rule(_reshape, linear=True, view=True, localize=_local_reshape)

register((aten.view.default, aten.reshape.default, *operators("_unsafe_view.default", "_reshape_alias.default"),
          aten.view_copy.default, aten.flatten.using_ints, aten.unflatten.int, aten.ravel.default,
          aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
          aten.atleast_1d.default, aten.atleast_2d.default, aten.atleast_3d.default), _RESHAPED)
register((aten.view_as.default, aten.reshape_as.default), Rule(_reshape, localize=_local_reshape))
register((aten.expand.default, aten.broadcast_to.default),
         Rule(POINTWISE.notation, linear=True, view=True, localize=_local_expand))
register((aten.expand_as.default, aten.broadcast_tensors.default), POINTWISE)
register((aten.transpose.int, aten.permute.default, aten.t.default, aten.numpy_T.default, aten.mT.default,
          aten.mH.default, aten.matrix_H.default, aten.adjoint.default, aten.movedim.int, aten.movedim.intlist,
          aten.moveaxis.int, aten.moveaxis.intlist, aten.swapaxes.default, aten.swapdims.default),
         Rule(_permuted, linear=True, view=True))
register((aten.select.int,), Rule(_select, linear=True, view=True))
register((aten.slice.Tensor, aten.narrow.default), Rule(_slice, linear=True, view=True, localize=_local_slice))
register((aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default,
          aten.tensor_split.sections, aten.tensor_split.indices, aten.hsplit.int, aten.hsplit.array, aten.vsplit.int,
          aten.vsplit.array, aten.dsplit.int, aten.dsplit.array), Rule(_parted, view=True))
register((aten.unbind.int,), Rule(_select, view=True))
register((aten.diagonal.default,), Rule(_diagonal, linear=True, view=True))
register((aten.unfold.default,), Rule(_unfold, linear=True, view=True))
