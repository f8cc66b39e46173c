"""Elements put beside one another, repeated, padded or turned round.

The dim along which they move stays whole; a repetition is a factor of its own beside the dim that it repeats.
"""

from __future__ import annotations

import torch

from ..graph import Op
from .dims import all_whole, cut_size, dims_of, named, normal, operand, whole
from .notation import Assignment, Bound
from .registry import Local, Rule, register

aten = torch.ops.aten


def _joined(op: Op, at: int) -> str:
    names = named(len(op.outputs[0].shape))
    texts = []
    for i, value in enumerate(op.inputs):
        empty = value.shape == (0,) and len(names) > 1  # torch lets such a tensor stand beside any other
        texts.append("empty!" if empty else operand([*names[:at], f"part{i}!", *names[at + 1:]]))
    names[at] = "joined!"
    return f"{', '.join(texts)} -> {operand(names)}"


def _cat(op: Op) -> str:
    return _joined(op, normal(op.argument("dim"), len(op.outputs[0].shape)))


def _hstack(op: Op) -> str:
    if not op.inputs[0].shape:
        return all_whole(op)
    return _joined(op, min(1, len(op.outputs[0].shape) - 1))


def _stacked(op: Op, at: int) -> str:
    names = named(len(op.outputs[0].shape))
    texts = [operand(names[:at] + names[at + 1:])] * len(op.inputs)
    names[at] = "stacked!"
    return f"{', '.join(texts)} -> {operand(names)}"


def _stack(op: Op) -> str:
    return _stacked(op, normal(op.argument("dim"), len(op.outputs[0].shape)))


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
    """flip and roll: the dims that move stay whole; a roll that names none moves all, as one."""
    rank = len(op.inputs[0].shape)
    names, moved = named(rank), {"fliplr": [1], "flipud": [0]}.get(op.kind, op.argument("dims"))
    moved = () if op.kind == "flip" and not moved else dims_of(moved, rank)
    before = [whole([n])[0] if i in moved else n for i, n in enumerate(names)]
    return f"{operand(before)} -> {operand(names)}"


def _rotated(op: Op) -> str:
    """Two dims stay whole, and change places in a quarter turn."""
    before = named(len(op.inputs[0].shape))
    a, b = (normal(d, len(before)) for d in op.argument("dims"))
    before[a], before[b] = f"{before[a]}!", f"{before[b]}!"
    after = [*before]
    if op.argument("k") % 2:
        after[a], after[b] = before[b], before[a]
    return f"{operand(before)} -> {operand(after)}"


def _pad(op: Op) -> str:
    """Padded dims stay whole. The amounts stand in pairs, the last dim first."""
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
    """How often each output dim repeats the input's."""
    times = op.argument("repeats" if op.kind == "repeat" else "dims")
    return [1] * (len(op.outputs[0].shape) - len(times)) + list(times)


def _repeat(op: Op) -> tuple[str, dict[str, int]]:
    rank = len(op.outputs[0].shape)
    shape = (1,) * (rank - len(op.inputs[0].shape)) + op.inputs[0].shape
    sizes, before, after = {}, [], []
    for i, (size, times) in enumerate(zip(shape, _repeats(op))):
        before.append("1" if size == 1 else f"d{i}")
        after.append(f"r{i}" if size == 1 else f"(r{i} d{i})")
        sizes |= {f"r{i}": times, f"d{i}": size}
    return f"{operand(before[rank - len(op.inputs[0].shape):])} -> {operand(after)}", sizes


def _local_repeat(op: Op, bound: Bound, assignment: Assignment) -> Local:
    times = [t // cut_size(bound, assignment, [f"r{i}"]) for i, t in enumerate(_repeats(op))]
    return Local(aten.repeat.default, (op.inputs[0], times), {})


def _grid(op: Op) -> str:
    """Each input is a dim of all outputs; indexing "xy" lets the first two change places."""
    names = named(len(op.inputs))
    out = [*names]
    if op.argument("indexing", "ij") == "xy" and len(out) > 1:
        out[0], out[1] = out[1], out[0]
    texts = [name if value.shape else "..." for name, value in zip(names, op.inputs)]
    return f"{', '.join(texts)} -> {', '.join([operand(out)] * len(op.outputs))}"


def _on_diagonal(op: Op) -> str:
    """A new pair of dims, whole, of which the last one of the input is the diagonal."""
    batch = iter(named(len(op.inputs[0].shape) - 1))
    rank = len(op.outputs[0].shape)
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
