"""Reading by index: embedding, gather, index_select, indexing by tensors, one_hot.

    out[i] = x[index[i]]           x cut along the indexed dim:  out = Σ over parts  [index in part] · x[index - start]

The indexed dim is contracted: cut, each rank reads what lies in its part and has zeros for the rest, a term of a sum
over ranks. The gradient needs nothing more: a rank's part gets what belongs to it. All other dims are cut freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import RuleError
from ..graph import Op, Value
from .dims import all_whole, cut_size, named, normal, operand, operands, whole
from .notation import Assignment, Bound
from .positions import count, local_operator, part_length, starts, within
from .registry import Expansion, Rule, register

aten = torch.ops.aten


# -- embedding ---------------------------------------------------------------------------------------------------------


@local_operator("embedding_part(Tensor weight, Tensor index, Tensor starts, int size, int padding_idx) -> Tensor")
def embedding_part(weight: torch.Tensor, index: torch.Tensor, starts: torch.Tensor, size: int,
                   padding_idx: int) -> torch.Tensor:
    """The rows of a table of `size` rows of which this rank holds some; zeros for the others."""
    inside, place = within(index, starts, weight.shape[0], size)
    rows = F.embedding(place, weight)
    if padding_idx >= 0 and weight.requires_grad:  # that row is read, but gets no gradient
        rows = torch.where((index == padding_idx).unsqueeze(-1), rows.detach(), rows)
    return torch.where(inside.unsqueeze(-1), rows, 0)


def _refuse_sparse(op: Op) -> None:
    if op.argument("sparse", False):
        raise RuleError("its gradient would be a sparse tensor, which has no slices", **op.where, legal="sparse=False")


def _embedding(op: Op) -> str:
    """In the device matrix the index comes first and the table's rows last, before them what is repeated."""
    _refuse_sparse(op)
    index = named(len(op.inputs[1].shape), "i")
    by_count = op.argument("scale_grad_by_freq")  # all of the index is counted, and all of the rows are in it
    v, texts = ("v!", whole(index)) if by_count else ("v", index)
    return f"{' '.join(index)} w * v: {v} w, {operand(texts)} -> {operand([*texts, 'w'])}"


def _expand_embedding(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if cut_size(bound, assignment, ["v"]) == 1:
        return None
    weight, index = op.inputs

    def work(b):
        begin = starts(b, index, weight, 0)
        return b.call(embedding_part, weight, index, begin, weight.shape[0], op.argument("padding_idx"))
    return work


def _embedding_part(op: Op) -> tuple[str, dict[str, int]]:
    weight, index, begin = op.inputs
    names = named(len(index.shape), "i")
    parts = begin.shape[0]
    sizes = {"p": parts, "v": part_length(weight.shape[0], parts)}
    return f"(p v!) w, {operand(names)}, p -> {operand([*names, 'w'])}", sizes


def _embedding_bag(op: Op) -> str:
    """Bags lie anywhere in the index, so that only the width is cut; all else that is said of them is the same on
    all ranks."""
    _refuse_sparse(op)
    if op.argument("scale_grad_by_freq"):
        return all_whole(op)
    texts = operands(op, weight="v! w", indices="n!", offsets="offsets!", per_sample_weights="n!")
    outs = [operand(whole(named(len(v.shape), f"o{i}_"))) for i, v in enumerate(op.outputs)]
    outs[0] = "bags! w"
    if len(op.outputs[3].shape) == 2:  # which element was the maximum
        outs[3] = "bags! w"
    return f"{texts} -> {', '.join(outs)}"


# -- gather ------------------------------------------------------------------------------------------------------------


@local_operator("gather_part(Tensor x, int dim, Tensor index, Tensor starts, int size) -> Tensor")
def gather_part(x: torch.Tensor, dim: int, index: torch.Tensor, starts: torch.Tensor, size: int) -> torch.Tensor:
    """`torch.take_along_dim` along a dim of `size` of which this rank holds a part; zeros for what lies elsewhere."""
    inside, place = within(index, starts, x.shape[dim], size)
    return torch.where(inside, torch.take_along_dim(x, place, dim), 0)


def _along_dim(op: Op) -> tuple[list[str], list[str], list[str], int]:
    """Names of x's, the index's and the output's dims; a dim that the index has only a beginning of stays whole."""
    x, index = (op.inputs[i].shape for i in (0, 1))
    at = normal(op.argument("dim"), len(x))
    held, read, out = named(len(x)), named(len(x)), named(len(x))
    for d in range(len(x)):
        if d != at and x[d] != index[d] and 1 not in (x[d], index[d]):
            held[d], read[d], out[d] = f"x{d}!", f"k{d}!", f"k{d}!"
        elif d != at and x[d] != index[d] and op.kind == "gather":
            held[d] = "1" if x[d] == 1 else f"x{d}!"
            read[d] = out[d] = "1" if index[d] == 1 else f"k{d}!"
    held[at], read[at], out[at] = "v", "k", "k"
    return held, read, out, at


def _gather(op: Op) -> str:
    if not op.inputs[0].shape or not op.inputs[1].shape or op.argument("dim", 0) is None:
        return all_whole(op)
    held, read, out, _ = _along_dim(op)
    return f"{operand(held)}, {operand(read)} -> {operand(out)}"


def _expand_gather(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if cut_size(bound, assignment, ["v"]) == 1:
        return None
    x, index = op.inputs
    dim = normal(op.argument("dim"), len(x.shape))

    def work(b):
        held = x
        for d, (size, read) in enumerate(zip(x.shape, index.shape)):
            if op.kind == "gather" and d != dim and read < size:  # the index has a beginning of this dim alone
                held = b.call(aten.narrow.default, held, d, 0, read)
        return gathered(b, held, dim, index)
    return work


def gathered(b, x: Value, dim: int, index: Value) -> Value:
    """Of each line along a dim, which may be cut, the elements that an index names."""
    return b.call(gather_part, x, dim, index, starts(b, index, x, dim), x.shape[dim])


def _gather_part(op: Op) -> tuple[str, dict[str, int]]:
    x, _, begin = op.inputs
    held, read, out, at = _along_dim(op)
    parts = begin.shape[0]
    held[at] = "(p v!)"
    return f"{operand(held)}, {operand(read)}, p -> {operand(out)}", {"p": parts, "v": part_length(x.shape[at], parts)}


# -- indexing by tensors -----------------------------------------------------------------------------------------------


@local_operator("index_part(Tensor x, Tensor?[] indices, Tensor[] starts, int[] sizes) -> Tensor")
def index_part(x: torch.Tensor, indices: list[torch.Tensor | None], starts: list[torch.Tensor],
               sizes: list[int]) -> torch.Tensor:
    """``x[indices]`` where this rank holds a part of each indexed dim; zeros for what lies elsewhere.

    Args:
        starts, sizes: one an index that is not None.
    """
    at = [d for d, index in enumerate(indices) if index is not None]
    inside, places = part_places(x, indices, starts, sizes)
    first = index_place(at)
    inside = inside.reshape(inside.shape + (1,) * (x.dim() - len(at) - first))
    return torch.where(inside, torch.ops.aten.index.Tensor(x, places), 0)


def part_places(x: torch.Tensor, indices: list[torch.Tensor | None], starts: list[torch.Tensor], sizes: list[int]
                ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Which elements of broadcast indices lie in this rank's parts, and the indices counted from where these begin.
    An index below 0 counts from the end."""
    places: list[torch.Tensor | None] = [None] * len(indices)
    inside = None
    parts = iter(zip(starts, sizes))
    for d, index in enumerate(indices):
        if index is not None:
            begin, size = next(parts)
            here, places[d] = within(torch.where(index < 0, index + size, index), begin, x.shape[d], size)
            inside = here if inside is None else inside & here
    assert inside is not None
    return inside, places


def index_place(at: Sequence[int]) -> int:
    """Where in the output the indices' dims stand: in the place of the indexed dims where these stand together."""
    return at[0] if list(at) == list(range(at[0], at[-1] + 1)) else 0


def is_mask(index: Any) -> bool:
    """Whether an index chooses by true and false, so that what it gives depends on its values."""
    return isinstance(index, Value) and index.dtype in (torch.bool, torch.uint8)


def indexed_dims(op: Op, indices: Sequence[Value | None]) -> tuple[list[str], list[str], list[str], list[int]]:
    """Names of x's dims, of the broadcast indices' dims and of the output's dims; and which dims are indexed."""
    names = named(len(op.inputs[0].shape))
    at = [d for d, index in enumerate(indices) if index is not None]
    shared = named(max(len(i.shape) for i in indices if i is not None), "i")
    first = index_place(at)
    free = [n for d, n in enumerate(names) if d not in at]
    out = free[:first] + shared + free[first:]
    for d in at:
        names[d] = f"v{d}"
    return names, shared, out, at


def index_texts(indices: Sequence[Value | None], shared: Sequence[str]) -> list[str]:
    """The text of each index that is not None; they broadcast, aligned on the right."""
    return [operand(shared[len(shared) - len(i.shape):]) for i in indices if i is not None]


def _indices(op: Op) -> list[Value | None]:
    if op.kind == "index_select":
        return [None] * normal(op.argument("dim"), len(op.inputs[0].shape)) + [op.argument("index")]
    return list(op.argument("indices"))


def _index(op: Op) -> str:
    indices = _indices(op)
    if any(map(is_mask, indices)) or not op.inputs[0].shape or not op.inputs[1].shape and op.kind == "index_select":
        return all_whole(op)
    names, shared, out, _ = indexed_dims(op, indices)
    return f"{', '.join([operand(names), *index_texts(indices, shared)])} -> {operand(out)}"


def _expand_index(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if cut_size(bound, assignment, [f.name for f in bound.factors if f.name.startswith("v")]) == 1:
        return None
    x, indices = op.inputs[0], _indices(op)
    at = [d for d, index in enumerate(indices) if index is not None]

    def work(b):
        begins = [starts(b, indices[d], x, d) for d in at]
        return b.call(index_part, x, indices, begins, [x.shape[d] for d in at])
    return work


def part_names(x: Value, names: list[str], at: Sequence[int], begins: Sequence[Value]) -> tuple[list[str], dict]:
    """The indexed dims as parts ``(p v!)``: their starts' texts, and the factors' sizes. Changes `names`."""
    sizes = {}
    for d, begin in zip(at, begins):
        names[d] = f"(p{d} v{d}!)"
        sizes |= {f"p{d}": begin.shape[0], f"v{d}": part_length(x.shape[d], begin.shape[0])}
    return [f"p{d}" for d in at], sizes


def _index_part(op: Op) -> tuple[str, dict[str, int]]:
    indices, begins = op.argument("indices"), op.argument("starts")
    names, shared, out, at = indexed_dims(op, indices)
    counts, sizes = part_names(op.inputs[0], names, at, begins)
    return f"{', '.join([operand(names), *index_texts(indices, shared), *counts])} -> {operand(out)}", sizes


# -- classes and sorted boundaries -------------------------------------------------------------------------------------


@local_operator("one_hot_part(Tensor index, Tensor positions, int size) -> Tensor")
def one_hot_part(index: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """`F.one_hot` of `size` classes, those columns that stand at `positions`."""
    within(index, positions, size, size)
    return (index.unsqueeze(-1) == positions).long()


def _expand_one_hot(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if cut_size(bound, assignment, ["c"]) == 1:
        return None
    index, size = op.inputs[0], op.outputs[0].shape[-1]
    digits = assignment.digits[[f.name for f in bound.factors].index("c")]
    return lambda b: b.call(one_hot_part, index, b.lay(b.call(count, index, size, 1), [digits]), size)


def _sought(op: Op) -> str:
    """How many boundaries lie below: counts of the parts add up. With a sorter, boundaries lie anywhere."""
    if op.kind == "bucketize":
        return "..., c -> ..."
    if op.argument("sorter") is not None:
        return all_whole(op)
    if op.target is aten.searchsorted.Scalar:
        return "c -> "
    bounds, values = (len(v.shape) for v in op.inputs)
    return "c, ... -> ..." if bounds == 1 else f"{operand(named(bounds - 1))} c, {operand(named(values - 1))} k -> " \
        f"{operand(named(values - 1))} k"


register((aten.embedding.default,), Rule(_embedding, expand=_expand_embedding, neutral=0))
register((embedding_part,), Rule(_embedding_part, neutral=0))
register((aten.embedding_bag.default, aten.embedding_bag.padding_idx), Rule(_embedding_bag, reduction="none"))
register((aten.gather.default, aten.take_along_dim.default), Rule(_gather, expand=_expand_gather, neutral=0))
register((gather_part,), Rule(_gather_part, neutral=0))
register((aten.index.Tensor, aten.index_select.default), Rule(_index, expand=_expand_index, neutral=0))
register((index_part,), Rule(_index_part, neutral=0))
register((aten.one_hot.default,), Rule("... -> ... c", expand=_expand_one_hot))
register((one_hot_part,), Rule("..., c -> ... c"))
register((aten.bucketize.Tensor, aten.searchsorted.Tensor, aten.searchsorted.Scalar), Rule(_sought))
