"""Shape operators: views, and operators that join, repeat, pad or reorder elements.

1. *Views* keep the elements and change the dims. Splits and merges of dims go through compound dims. A call carries
   global sizes; the call of a rank carries the sizes of its slice. Dims of size 1 that are added or removed have no
   factor. A squeeze on a slice must not remove a dim that has size 1 in the slice only, so a squeeze too becomes a
   reshape. An operator that splits a tensor lets no partial sum through: each of its outputs would need a reduction.

2. *Joins, repetitions, pads and reorderings* (cat, stack, repeat, pad, flip, roll, …): the dim along which elements
   move stays whole; a repetition is a factor of its own beside the repeated dim.

Example: [8, 6] viewed as [8, 2, 3]: the dim of 6 is ``(a b)`` with a = 2 and b = 3. Cut in 2 it is a that is cut, and
the call of a rank views [8, 3] as [8, 1, 3].
"""

from __future__ import annotations

import torch

from ..graph import Op, map_values
from ..torch_private import operators
from .dims import all_whole, cut_size, dims_of, named, normal, operand, refine, whole
from .notation import Assignment, Bound
from .registry import POINTWISE, Local, Rule, local_output_shape, register

aten = torch.ops.aten


def _reshape(op: Op) -> tuple[str, dict[str, int]]:
    before, after, sizes = refine(op.inputs[0].shape, op.output(0).shape)
    texts = [operand(before), *[operand(after)] * (len(op.inputs) - 1)]
    return f"{', '.join(texts)} -> {operand(after)}", sizes


def _local_reshape(op: Op, bound: Bound, assignment: Assignment) -> Local:
    return Local(aten.reshape.default, (op.inputs[0], list(local_output_shape(bound, assignment))), {})


def _local_expand(op: Op, bound: Bound, assignment: Assignment) -> Local:
    return Local(aten.expand.default, (op.inputs[0], list(local_output_shape(bound, assignment))), {})


def _permuted(op: Op) -> str:
    """The order of the dims, read from the strides that the operator gives a tensor with dims of size 2."""
    rank = len(op.inputs[0].shape)
    probe = torch.empty((2,) * rank, device="meta")
    args, kwargs = map_values((op.args, op.kwargs), lambda _: probe)
    places = {stride: f"d{i}" for i, stride in enumerate(probe.stride())}
    return f"{operand(named(rank))} -> {operand([places[s] for s in op.target(*args, **kwargs).stride()])}"


def _one_dim(op: Op) -> tuple[list[str], int]:
    """Names of the input's dims, and the dim that the call names."""
    rank = len(op.inputs[0].shape)
    return named(rank), normal(op.argument("dim", 0), rank)


def _select(op: Op) -> str:
    names, at = _one_dim(op)
    out = operand(names[:at] + names[at + 1 :])
    names[at] += "!"
    return f"{operand(names)} -> {', '.join([out] * len(op.outputs))}"


def _slice(op: Op) -> str:
    names, at = _one_dim(op)
    if op.inputs[0].shape[at] == op.output(0).shape[at] and op.argument("step", 1) == 1:
        return f"{operand(names)} -> {operand(names)}"  # the whole dim
    return _parted(op)


def _local_slice(op: Op, bound: Bound, assignment: Assignment) -> Local:
    """Keep the whole slice of a cut dim, of which the call takes all elements."""
    names, at = _one_dim(op)
    if cut_size(bound, assignment, [names[at]]) == 1:
        return Local(op.target, op.args, op.kwargs)
    return Local(aten.alias.default, (op.inputs[0],), {})


def _parted(op: Op) -> str:
    """Parts of one dim; the dim and its parts stay whole."""
    names, at = _one_dim(op)
    if "dim" not in op.argument_names:  # hsplit, vsplit, dsplit
        at = {"v": 0, "h": min(1, len(names) - 1), "d": 2}[op.kind[0]]
    outs = [operand([*names[:at], f"part{i}!", *names[at + 1 :]]) for i in range(len(op.outputs))]
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
    out = operand([*names[:at], "windows!", *names[at + 1 :], "window!"])
    names[at] += "!"
    return f"{operand(names)} -> {out}"


_RESHAPED = Rule(_reshape, linear=True, view=True, localize=_local_reshape)

register(
    (
        aten.view.default,
        aten.reshape.default,
        *operators("_unsafe_view.default", "_reshape_alias.default"),
        aten.view_copy.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.ravel.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.atleast_1d.default,
        aten.atleast_2d.default,
        aten.atleast_3d.default,
    ),
    _RESHAPED,
)
register((aten.view_as.default, aten.reshape_as.default), Rule(_reshape, localize=_local_reshape))
register(
    (aten.expand.default, aten.broadcast_to.default),
    Rule(POINTWISE.notation, linear=True, view=True, localize=_local_expand),
)
register((aten.expand_as.default, aten.broadcast_tensors.default), POINTWISE)
register(
    (
        aten.transpose.int,
        aten.permute.default,
        aten.t.default,
        aten.numpy_T.default,
        aten.mT.default,
        aten.mH.default,
        aten.matrix_H.default,
        aten.adjoint.default,
        aten.movedim.int,
        aten.movedim.intlist,
        aten.moveaxis.int,
        aten.moveaxis.intlist,
        aten.swapaxes.default,
        aten.swapdims.default,
    ),
    Rule(_permuted, linear=True, view=True),
)
register((aten.select.int,), Rule(_select, linear=True, view=True))
register((aten.slice.Tensor, aten.narrow.default), Rule(_slice, linear=True, view=True, localize=_local_slice))
register(
    (
        aten.split.Tensor,
        aten.split.sizes,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.tensor_split.sections,
        aten.tensor_split.indices,
        aten.hsplit.int,
        aten.hsplit.array,
        aten.vsplit.int,
        aten.vsplit.array,
        aten.dsplit.int,
        aten.dsplit.array,
    ),
    Rule(_parted, view=True),
)
register((aten.unbind.int,), Rule(_select, view=True))
register((aten.diagonal.default,), Rule(_diagonal, linear=True, view=True))
register((aten.unfold.default,), Rule(_unfold, linear=True, view=True))


# -- joins, repetitions, pads and reorderings


def _joined(op: Op, at: int) -> str:
    names = named(len(op.output(0).shape))
    texts = []
    for i, value in enumerate(op.inputs):
        empty = value.shape == (0,) and len(names) > 1  # torch joins such a tensor with any other
        texts.append("empty!" if empty else operand([*names[:at], f"part{i}!", *names[at + 1 :]]))
    names[at] = "joined!"
    return f"{', '.join(texts)} -> {operand(names)}"


def _cat(op: Op) -> str:
    return _joined(op, normal(op.argument("dim"), len(op.output(0).shape)))


def _hstack(op: Op) -> str:
    if not op.inputs[0].shape:
        return all_whole(op)
    return _joined(op, min(1, len(op.output(0).shape) - 1))


def _stacked(op: Op, at: int) -> str:
    names = named(len(op.output(0).shape))
    texts = [operand(names[:at] + names[at + 1 :])] * len(op.inputs)
    names[at] = "stacked!"
    return f"{', '.join(texts)} -> {operand(names)}"


def _stack(op: Op) -> str:
    return _stacked(op, normal(op.argument("dim"), len(op.output(0).shape)))


def _vstack(op: Op) -> str:
    rank = len(op.inputs[0].shape)
    return all_whole(op) if rank == 0 else _stacked(op, 0) if rank == 1 else _joined(op, 0)


def _column_stack(op: Op) -> str:
    rank = len(op.inputs[0].shape)
    return all_whole(op) if rank == 0 else _stacked(op, 1) if rank == 1 else _joined(op, 1)


def _dstack(op: Op) -> str:
    rank = len(op.inputs[0].shape)
    return all_whole(op) if rank < 2 else _stacked(op, 2) if rank == 2 else _joined(op, 2)


def _turned(op: Op) -> str:
    """flip and roll: the moved dims stay whole; a roll without dims moves all dims as one."""
    rank = len(op.inputs[0].shape)
    names, moved = named(rank), {"fliplr": [1], "flipud": [0]}.get(op.kind, op.argument("dims"))
    moved = () if op.kind == "flip" and not moved else dims_of(moved, rank)
    before = [whole([n])[0] if i in moved else n for i, n in enumerate(names)]
    return f"{operand(before)} -> {operand(names)}"


def _rotated(op: Op) -> str:
    """Two dims stay whole, and are exchanged in a quarter turn."""
    before = named(len(op.inputs[0].shape))
    a, b = (normal(d, len(before)) for d in op.argument("dims"))
    before[a], before[b] = f"{before[a]}!", f"{before[b]}!"
    after = [*before]
    if op.argument("k") % 2:
        after[a], after[b] = before[b], before[a]
    return f"{operand(before)} -> {operand(after)}"


def _pad(op: Op) -> str:
    """Padded dims stay whole. The amounts are in pairs, the last dim first."""
    names, amounts = named(len(op.inputs[0].shape)), op.argument("pad")
    out = [*names]
    for i in range(len(amounts) // 2):
        if amounts[2 * i] or amounts[2 * i + 1]:
            at = len(names) - 1 - i
            names[at], out[at] = f"{names[at]}!", f"p{at}!"
    return f"{operand(names)} -> {operand(out)}"


def _pads_zeros(op: Op) -> bool:
    return op.argument("mode", "constant") == "constant" and not op.argument("value")


def _repeats(op: Op) -> list[int]:
    """The number of repetitions of the input in each output dim."""
    times = op.argument("repeats" if op.kind == "repeat" else "dims")
    return [1] * (len(op.output(0).shape) - len(times)) + list(times)


def _repeat(op: Op) -> tuple[str, dict[str, int]]:
    rank = len(op.output(0).shape)
    shape = (1,) * (rank - len(op.inputs[0].shape)) + op.inputs[0].shape
    sizes: dict[str, int] = {}
    before: list[str] = []
    after: list[str] = []
    for i, (size, times) in enumerate(zip(shape, _repeats(op))):
        before.append("1" if size == 1 else f"d{i}")
        after.append(f"r{i}" if size == 1 else f"(r{i} d{i})")
        sizes |= {f"r{i}": times, f"d{i}": size}
    return f"{operand(before[rank - len(op.inputs[0].shape) :])} -> {operand(after)}", sizes


def _local_repeat(op: Op, bound: Bound, assignment: Assignment) -> Local:
    times = [t // cut_size(bound, assignment, [f"r{i}"]) for i, t in enumerate(_repeats(op))]
    return Local(aten.repeat.default, (op.inputs[0], times), {})


def _grid(op: Op) -> str:
    """Each input is a dim of all outputs; indexing "xy" exchanges the first two."""
    names = named(len(op.inputs))
    out = [*names]
    if op.argument("indexing", "ij") == "xy" and len(out) > 1:
        out[0], out[1] = out[1], out[0]
    texts = [name if value.shape else "..." for name, value in zip(names, op.inputs)]
    return f"{', '.join(texts)} -> {', '.join([operand(out)] * len(op.outputs))}"


def _on_diagonal(op: Op) -> str:
    """A new pair of dims, whole; the last dim of the input is their diagonal."""
    batch = iter(named(len(op.inputs[0].shape) - 1))
    rank = len(op.output(0).shape)
    pair = {normal(op.argument("dim1"), rank): "rows!", normal(op.argument("dim2"), rank): "columns!"}
    out = [pair[d] if d in pair else next(batch) for d in range(rank)]
    return f"{operand([n for n in out if n[-1] != '!'] + ['diagonal!'])} -> {operand(out)}"


def _repeat_each(op: Op) -> str | tuple[str, dict[str, int]]:
    if op.argument("dim") is None:
        return all_whole(op)
    names = named(len(op.inputs[0].shape))
    at = normal(op.argument("dim"), len(names))
    out = [*names]
    out[at] = f"({names[at]} r)"
    return f"{operand(names)} -> {operand(out)}", {"r": op.argument("repeats"), names[at]: op.inputs[0].shape[at]}


def _local_repeat_each(op: Op, bound: Bound, assignment: Assignment) -> Local:
    args, kwargs = op.with_arguments(repeats=op.argument("repeats") // cut_size(bound, assignment, ["r"]))
    kwargs.pop("output_size", None)
    return Local(op.target, args, kwargs)


register((aten.cat.default, aten.concat.default, aten.concatenate.default), Rule(_cat, linear=True))
register((aten.hstack.default,), Rule(_hstack, linear=True))
register((aten.vstack.default, aten.row_stack.default), Rule(_vstack, linear=True))
register((aten.column_stack.default,), Rule(_column_stack, linear=True))
register((aten.dstack.default,), Rule(_dstack, linear=True))
register((aten.block_diag.default, aten.diag.default, aten.trace.default), Rule(all_whole, linear=True))
register((aten.put.default, aten.masked_scatter.default), Rule(all_whole))
register((aten.diag_embed.default,), Rule(_on_diagonal, linear=True))
register((aten.meshgrid.default, aten.meshgrid.indexing), Rule(_grid))
register((aten.stack.default,), Rule(_stack, linear=True))
register((aten.flip.default, aten.fliplr.default, aten.flipud.default, aten.roll.default), Rule(_turned, linear=True))
register((aten.rot90.default,), Rule(_rotated, linear=True))
register((aten.pad.default, aten.constant_pad_nd.default), Rule(_pad, linear=_pads_zeros))
register((aten.repeat.default, aten.tile.default), Rule(_repeat, linear=True, localize=_local_repeat))
register((aten.repeat_interleave.self_int,), Rule(_repeat_each, linear=True, localize=_local_repeat_each))
