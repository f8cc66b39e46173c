"""Indexing: reads (embedding, gather, index_select, indexing by tensors, one_hot) and writes (scatter, index_add, …).

1. *Reads*. The indexed dim is contracted:

       out[i] = x[index[i]]        x cut along the indexed dim:  out = Σ over parts  [index in part] · x[index - start]

   Where the dim is cut, each rank reads the elements in its part and has zeros for the rest: a term of a sum over
   ranks. The gradient needs no further operator: each part receives its own rows. All other dims may be cut.

2. *Writes* (scatter, index_add, index_copy, index_fill, index_put):

       out = x;  out[index[i]] ∘= source[i]     cut along the indexed dim:   each rank writes the elements in its part
                                                cut along i, where ∘ is +:   out = x + Σ over ranks of the added terms

   The part of a rank gets one spare place. Elements of other parts are written there, and the place is removed
   afterwards. Each operator thus keeps its order of writes and its gradient.

Example: a table of 10 rows cut in 2 parts, index 7. The row is row 2 of rank 1's part; rank 0 has zeros, and the sum
over both ranks is row 7.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..errors import RuleError
from ..graph import Op, Value
from ..torch_private import overload_name
from .dims import (
    all_whole,
    count,
    cut_size,
    local_operator,
    named,
    normal,
    operand,
    operands,
    part_length,
    starts,
    whole,
    within,
)
from .notation import Assignment, Bound
from .registry import Builder, Expansion, Rule, register

aten = torch.ops.aten


# -- embedding ---------------------------------------------------------------------------------------------------------


@local_operator("embedding_part(Tensor weight, Tensor index, Tensor starts, int size, int padding_idx) -> Tensor")
def embedding_part(
    weight: torch.Tensor, index: torch.Tensor, starts: torch.Tensor, size: int, padding_idx: int
) -> torch.Tensor:
    """The rows of a table of `size` rows of which this rank holds a part; zeros for the other rows."""
    inside, place = within(index, starts, weight.shape[0], size)
    rows = F.embedding(place, weight)
    if padding_idx >= 0 and weight.requires_grad:  # the padding row is read, but gets no gradient
        rows = torch.where((index == padding_idx).unsqueeze(-1), rows.detach(), rows)
    return torch.where(inside.unsqueeze(-1), rows, 0)


def _refuse_sparse(op: Op) -> None:
    if op.argument("sparse", False):
        raise RuleError("its gradient would be a sparse tensor, which has no slices", **op.where, legal="sparse=False")


def _embedding(op: Op) -> str:
    """The notation of an embedding; device matrix order: index, replicas, rows of the table, width.

    Where the rows are whole, the replicas come last.
    """
    _refuse_sparse(op)
    index = named(len(op.inputs[1].shape), "i")
    by_count = op.argument("scale_grad_by_freq")  # the counts need the whole index, and the whole table
    v, texts = ("v!", whole(index)) if by_count else ("v", index)
    return f"{' '.join(index)} * v w: {v} w, {operand(texts)} -> {operand([*texts, 'w'])}"


def _expand_embedding(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if cut_size(bound, assignment, ["v"]) == 1:
        return None
    weight, index = op.inputs

    def work(b: Builder) -> Value:
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
    """The notation of embedding_bag: only the width is cut, since a bag may start anywhere in the index.

    The other outputs are equal on all ranks.
    """
    _refuse_sparse(op)
    if op.argument("scale_grad_by_freq"):
        return all_whole(op)
    texts = operands(op, weight="v! w", indices="n!", offsets="offsets!", per_sample_weights="n!")
    outs = [operand(whole(named(len(v.shape), f"o{i}_"))) for i, v in enumerate(op.outputs) if v is not None]
    outs[0] = "bags! w"
    if len(op.output(3).shape) == 2:  # the position of the maximum
        outs[3] = "bags! w"
    return f"{texts} -> {', '.join(outs)}"


# -- gather ------------------------------------------------------------------------------------------------------------


@local_operator("gather_part(Tensor x, int dim, Tensor index, Tensor starts, int size) -> Tensor")
def gather_part(x: torch.Tensor, dim: int, index: torch.Tensor, starts: torch.Tensor, size: int) -> torch.Tensor:
    """`torch.take_along_dim` along a dim of `size` of which this rank holds a part; zeros for other parts."""
    inside, place = within(index, starts, x.shape[dim], size)
    return torch.where(inside, torch.take_along_dim(x, place, dim), 0)


def _along_dim(op: Op) -> tuple[list[str], list[str], list[str], int]:
    """Names of x's, the index's and the output's dims; a dim whose beginning alone is indexed stays whole."""
    x, index = (op.inputs[i].shape for i in (0, 1))
    at = normal(op.argument("dim"), len(x))
    table_dims, index_dims, output_dims = named(len(x)), named(len(x)), named(len(x))
    for d in range(len(x)):
        if d != at and x[d] != index[d] and 1 not in (x[d], index[d]):
            table_dims[d], index_dims[d], output_dims[d] = f"x{d}!", f"k{d}!", f"k{d}!"
        elif d != at and x[d] != index[d] and op.kind == "gather":
            table_dims[d] = "1" if x[d] == 1 else f"x{d}!"
            index_dims[d] = output_dims[d] = "1" if index[d] == 1 else f"k{d}!"
    table_dims[at], index_dims[at], output_dims[at] = "v", "k", "k"
    return table_dims, index_dims, output_dims, at


def _gather(op: Op) -> str:
    if not op.inputs[0].shape or not op.inputs[1].shape or op.argument("dim", 0) is None:
        return all_whole(op)
    table_dims, index_dims, output_dims, _ = _along_dim(op)
    return f"{operand(table_dims)}, {operand(index_dims)} -> {operand(output_dims)}"


def _expand_gather(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if cut_size(bound, assignment, ["v"]) == 1:
        return None
    x, index = op.inputs
    dim = normal(op.argument("dim"), len(x.shape))

    def work(b: Builder) -> Value:
        source = x
        for d, (size, length) in enumerate(zip(x.shape, index.shape)):
            if op.kind == "gather" and d != dim and length < size:  # the index covers the beginning of this dim only
                source = b.call(aten.narrow.default, source, d, 0, length)
        return gathered(b, source, dim, index)

    return work


def gathered(b: Builder, x: Value, dim: int, index: Value) -> Value:
    """The elements named by an index, from each line along a dim that may be cut."""
    return b.call(gather_part, x, dim, index, starts(b, index, x, dim), x.shape[dim])


def _gather_part(op: Op) -> tuple[str, dict[str, int]]:
    x, _, begin = op.inputs
    table_dims, index_dims, output_dims, at = _along_dim(op)
    parts = begin.shape[0]
    table_dims[at] = "(p v!)"
    return f"{operand(table_dims)}, {operand(index_dims)}, p -> {operand(output_dims)}", {
        "p": parts,
        "v": part_length(x.shape[at], parts),
    }


# -- indexing by tensors -----------------------------------------------------------------------------------------------


@local_operator("index_part(Tensor x, Tensor?[] indices, Tensor[] starts, int[] sizes) -> Tensor")
def index_part(
    x: torch.Tensor, indices: list[torch.Tensor | None], starts: list[torch.Tensor], sizes: list[int]
) -> torch.Tensor:
    """``x[indices]`` where this rank holds a part of each indexed dim; zeros for elements of other parts.

    Args:
        starts, sizes: one entry for each index that is not None.
    """
    at = [d for d, index in enumerate(indices) if index is not None]
    inside, places = part_places(x, indices, starts, sizes)
    first = index_place(at)
    inside = inside.reshape(inside.shape + (1,) * (x.dim() - len(at) - first))
    return torch.where(inside, torch.ops.aten.index.Tensor(x, places), 0)


def part_places(
    x: torch.Tensor, indices: list[torch.Tensor | None], starts: list[torch.Tensor], sizes: list[int]
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """A mask of the elements of broadcast indices in this rank's parts, and the indices relative to these parts.

    An index below 0 counts from the end.
    """
    places: list[torch.Tensor | None] = [None] * len(indices)
    inside = None
    parts = iter(zip(starts, sizes))
    for d, index in enumerate(indices):
        if index is not None:
            begin, size = next(parts)
            inside_dim, places[d] = within(torch.where(index < 0, index + size, index), begin, x.shape[d], size)
            inside = inside_dim if inside is None else inside & inside_dim
    assert inside is not None
    return inside, places


def index_place(at: Sequence[int]) -> int:
    """The position of the indices' dims in the output: that of the indexed dims where these are adjacent, else 0."""
    return at[0] if list(at) == list(range(at[0], at[-1] + 1)) else 0


def is_mask(index: object) -> bool:
    """True for a mask, an index of true and false: the shape of its result depends on its values."""
    return isinstance(index, Value) and index.dtype in (torch.bool, torch.uint8)


def indexed_dims(op: Op, indices: Sequence[Value | None]) -> tuple[list[str], list[str], list[str], list[int]]:
    """Names of x's dims, of the broadcast indices' dims and of the output's dims; and the indexed dims."""
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
    return [operand(shared[len(shared) - len(i.shape) :]) for i in indices if i is not None]


def _indices(op: Op) -> list[Value | None]:
    if op.kind == "index_select":
        return [None] * normal(op.argument("dim"), len(op.inputs[0].shape)) + [op.argument("index")]
    return list(op.argument("indices"))


def _index(op: Op) -> str:
    indices = _indices(op)
    if any(map(is_mask, indices)) or not op.inputs[0].shape or (not op.inputs[1].shape and op.kind == "index_select"):
        return all_whole(op)
    names, shared, out, _ = indexed_dims(op, indices)
    return f"{', '.join([operand(names), *index_texts(indices, shared)])} -> {operand(out)}"


def _expand_index(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if cut_size(bound, assignment, [f.name for f in bound.factors if f.name.startswith("v")]) == 1:
        return None
    x, indices = op.inputs[0], _indices(op)
    cut = {d: index for d, index in enumerate(indices) if index is not None}
    at = list(cut)

    def work(b: Builder) -> Value:
        begins = [starts(b, index, x, d) for d, index in cut.items()]
        return b.call(index_part, x, indices, begins, [x.shape[d] for d in at])

    return work


def part_names(
    x: Value, names: list[str], at: Sequence[int], begins: Sequence[Value]
) -> tuple[list[str], dict[str, int]]:
    """Name the indexed dims as parts ``(p v!)``, in `names`.

    Returns:
        The texts of the starts, and the sizes of the factors.
    """
    sizes: dict[str, int] = {}
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
    """The columns at `positions` of `F.one_hot` of `size` classes."""
    within(index, positions, size, size)
    return (index.unsqueeze(-1) == positions).long()


def _expand_one_hot(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if cut_size(bound, assignment, ["c"]) == 1:
        return None
    index, size = op.inputs[0], op.output(0).shape[-1]
    digits = assignment.digits[[f.name for f in bound.factors].index("c")]
    return lambda b: b.call(one_hot_part, index, b.lay(b.call(count, index, size, 1), [digits]), size)


def _sought(op: Op) -> str:
    """The notation of searchsorted and bucketize: the number of boundaries below is a sum over parts.

    With a sorter, boundaries are in any order, and everything stays whole.
    """
    if op.kind == "bucketize":
        return "..., c -> ..."
    if op.argument("sorter") is not None:
        return all_whole(op)
    if op.target is aten.searchsorted.Scalar:
        return "c -> "
    bounds, values = (len(v.shape) for v in op.inputs)
    return (
        "c, ... -> ..."
        if bounds == 1
        else f"{operand(named(bounds - 1))} c, {operand(named(values - 1))} k -> {operand(named(values - 1))} k"
    )


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


# -- writes by index


def _with_spare(x: torch.Tensor, dim: int) -> torch.Tensor:
    """`x` with one more place along a dim."""
    spare = [*x.shape]
    spare[dim] = 1
    return torch.cat([x, x.new_zeros(spare)], dim)


def _without_spare(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.narrow(dim, 0, x.shape[dim] - 1)


def _place(index: torch.Tensor, begin: torch.Tensor, length: int, size: int) -> torch.Tensor:
    """An index relative to this rank's part; the spare place for elements of other parts."""
    inside, place = within(index, begin, length, size)
    return torch.where(inside, place, length)


@local_operator(
    "write_part(str target, Tensor x, int dim, Tensor index, Tensor? source, Scalar? value, str? reduce, "
    "bool? include_self, Scalar? alpha, Tensor starts, int size) -> Tensor"
)
def write_part(
    target: str,
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor | None,
    value: object,
    reduce: str | None,
    include_self: bool | None,
    alpha: object,
    starts: torch.Tensor,
    size: int,
) -> torch.Tensor:
    """``aten.<target>`` into a dim of `size` of which this rank holds a part.

    Args:
        source, value: the written tensor or number; one of them, as the target takes.
        reduce, include_self, alpha: given where the target takes them.
    """
    name, overload = target.split(".")
    more = {"reduce": reduce, "include_self": include_self, "alpha": alpha}
    made = getattr(getattr(torch.ops.aten, name), overload)(
        _with_spare(x, dim),
        dim,
        _place(index, starts, x.shape[dim], size),
        value if source is None else source,
        **{key: argument for key, argument in more.items() if argument is not None},
    )
    return _without_spare(made, dim)


def _source(op: Op) -> Value | None:
    """The tensor that is written, along the dims of the index."""
    found = op.argument("src", op.argument("source", op.argument("value")))
    return found if isinstance(found, Value) else None


def _adds(op: Op) -> bool:
    """True where the written elements are added to the present ones, so that each rank may add a part."""
    return (
        op.kind in ("scatter_add", "index_add")
        or (op.kind == "scatter_reduce" and op.argument("reduce") == "sum" and op.argument("include_self", True))
        or (op.kind == "index_put" and bool(op.argument("accumulate", False)))
    )


def _write_names(op: Op, part: bool = False) -> tuple[list[str], list[str], list[str], int]:
    """Names of x's, the index's and the source's dims, and the indexed dim.

    The index of a scatter has all dims. A dim in which it is shorter than x or the source stays whole, since only its
    beginning is read. The index of an index_add has one dim.
    """
    x, index, source = op.argument("x" if part else "self"), op.argument("index"), _source(op)
    at = normal(op.argument("dim"), len(x.shape))
    target_dims, read, written = named(len(x.shape)), named(len(x.shape)), named(len(x.shape))
    k = "k" if _adds(op) or part else "k!"
    if _is_scatter(op):
        for d, size in enumerate(index.shape):
            if (source is not None and source.shape[d] != size) or (d != at and x.shape[d] != size):
                target_dims[d] = target_dims[d] if d == at else f"x{d}!"
                read[d], written[d] = f"k{d}!", f"s{d}!"
        if source is None or source.shape[at] == index.shape[at]:
            read[at] = written[at] = k
    else:
        read, written[at] = [k], k
    target_dims[at] = "v"
    return target_dims, read, written, at


def _is_scatter(op: Op) -> bool:
    return op.kind.startswith("scatter") or (op.kind == "write_part" and op.argument("target").startswith("scatter"))


def _write(op: Op) -> str:
    x, index, source = op.argument("self"), op.argument("index"), _source(op)
    fits = source is None or len(source.shape) == len(x.shape) or (not source.shape and op.kind == "index_fill")
    if not x.shape or not index.shape or not fits:
        return all_whole(op)
    target_dims, read, written, _ = _write_names(op)
    written = written if source is not None and source.shape else []
    texts = operands(
        op,
        self=operand(target_dims),
        index=operand(read),
        src=operand(written),
        source=operand(written),
        value=operand(written),
    )
    return f"{texts} -> {operand(target_dims)}"


def _expand_write(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    parted, shared = (cut_size(bound, assignment, [name]) > 1 for name in ("v", "k"))
    if not parted and not shared:
        return None
    x, index = op.argument("self"), op.argument("index")
    dim = normal(op.argument("dim"), len(x.shape))

    def work(b: Builder) -> Value:
        onto = b.call(aten.zeros_like.default, x) if shared else x
        if parted:
            value, source = op.argument("value"), _source(op)
            more = [
                op.argument(name) if name in op.argument_names else None for name in ("reduce", "include_self", "alpha")
            ]
            made = b.call(
                write_part,
                f"{op.kind}.{overload_name(op.target)}",
                onto,
                dim,
                index,
                source,
                None if source is not None else value,
                *more,
                starts(b, index, x, dim),
                x.shape[dim],
            )
        else:
            made = b.call(op.target, onto, *op.args[1:], **op.kwargs)
        return b.call(aten.add.Tensor, x, made) if shared else made

    return work


def _write_part(op: Op) -> tuple[str, dict[str, int]]:
    x, source, begin = op.argument("x"), _source(op), op.argument("starts")
    target_dims, read, written, at = _write_names(op, part=True)
    target_dims[at] = "(p v!)"
    written = written if source is not None and source.shape else []
    texts = operands(op, x=operand(target_dims), index=operand(read), source=operand(written), starts="p")
    return f"{texts} -> {operand(target_dims)}", {"p": begin.shape[0], "v": part_length(x.shape[at], begin.shape[0])}


# -- several indices ---------------------------------------------------------------------------------------------------


@local_operator(
    "put_part(Tensor x, Tensor?[] indices, Tensor values, bool accumulate, Tensor[] starts, int[] sizes) -> Tensor"
)
def put_part(
    x: torch.Tensor,
    indices: list[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool,
    starts: list[torch.Tensor],
    sizes: list[int],
) -> torch.Tensor:
    """`aten.index_put` where this rank holds a part of each indexed dim."""
    inside, places = part_places(x, indices, starts, sizes)
    first, place = next((d, index) for d, index in enumerate(places) if index is not None)
    places[first] = torch.where(inside, place, x.shape[first])
    made = torch.ops.aten.index_put.default(_with_spare(x, first), places, values, accumulate)
    return _without_spare(made, first)


def _put(op: Op, part: bool = False) -> str:
    x, values, indices = op.inputs[0], op.argument("values"), op.argument("indices")
    masks = [i for i in indices if i is not None and is_mask(i)]
    if masks:
        return _put_by_mask(op, masks)
    if not x.shape:
        return all_whole(op)
    names, shared, out, _ = indexed_dims(op, indices)
    if not (_adds(op) or part):
        shared = [f"{n}!" for n in shared]
        out = [f"{n}!" if n.startswith("i") else n for n in out]
    values_text = operand(out[len(out) - len(values.shape) :])
    return f"{', '.join([operand(names), *index_texts(indices, shared), values_text])} -> {operand(names)}"


def _put_by_mask(op: Op, masks: list[Value]) -> str:
    """The notation of index_put with a mask: one value is put on slices as on the whole tensor."""
    x, values, indices = op.inputs[0], op.argument("values"), op.argument("indices")
    if len(masks) > 1 or len(indices) > 1 or values.numel != 1:
        return all_whole(op)
    names = named(len(x.shape))
    return (
        f"{operand(names)}, {operand(names[: len(masks[0].shape)])}, {operand(['1'] * len(values.shape))} -> "
        f"{operand(names)}"
    )


def _expand_put(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    parted, shared = (
        cut_size(bound, assignment, [f.name for f in bound.factors if f.name.startswith(letter)]) > 1 for letter in "vi"
    )
    if not parted and not shared:
        return None
    x, indices, values = op.inputs[0], op.argument("indices"), op.argument("values")
    at = [d for d, index in enumerate(indices) if index is not None]

    def work(b: Builder) -> Value:
        onto = b.call(aten.zeros_like.default, x) if shared else x
        begins = [starts(b, indices[d], x, d) for d in at]
        made = b.call(
            put_part, onto, indices, values, op.argument("accumulate", False), begins, [x.shape[d] for d in at]
        )
        return b.call(aten.add.Tensor, x, made) if shared else made

    return work


def _put_part(op: Op) -> tuple[str, dict[str, int]]:
    x, indices, values = op.inputs[0], op.argument("indices"), op.argument("values")
    names, shared, out, at = indexed_dims(op, indices)
    counts, sizes = part_names(x, names, at, op.argument("starts"))
    values_text = operand(out[len(out) - len(values.shape) :])
    texts = [operand(names), *index_texts(indices, shared), values_text, *counts]
    return f"{', '.join(texts)} -> {operand(names)}", sizes


# -- writes of all elements --------------------------------------------------------------------------------------------


@local_operator("assigned(Tensor x, Tensor value) -> Tensor")
def assigned(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The elements of `value`; the gradient goes to `x`: a write that autograd does not see."""
    return _Assigned.apply(x, value)


@local_operator("overwritten(Tensor x, Tensor value) -> Tensor")
def overwritten(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The elements of `value` in the shape and dtype of `x`; the gradient of `x` is 0: the result of `copy_`."""
    return _Overwritten.apply(x, value.to(x.dtype).expand(x.shape))


class _Assigned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Overwritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(gradient), gradient


# -- parts of a dim ----------------------------------------------------------------------------------------------------


def _put_beside(op: Op) -> str:
    """The notation of select_scatter, slice_scatter and diagonal_scatter: the dims that are written stay whole."""
    names = named(len(op.inputs[0].shape))
    if op.kind == "diagonal_scatter":
        at = [normal(op.argument(d), len(names)) for d in ("dim1", "dim2")]
        written = [n for d, n in enumerate(names) if d not in at] + ["diagonal!"]
    else:
        at = [normal(op.argument("dim", 0), len(names))]
        part_flag = ["part!"] if op.kind == "slice_scatter" else []
        written = names[: at[0]] + part_flag + names[at[0] + 1 :]
    target_dims = [f"{n}!" if d in at else n for d, n in enumerate(names)]
    return f"{operand(target_dims)}, {operand(written)} -> {operand(target_dims)}"


register(
    (
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter.reduce,
        aten.scatter.value_reduce,
        aten.scatter_add.default,
        aten.scatter_reduce.two,
        aten.index_add.default,
        aten.index_copy.default,
        aten.index_reduce.default,
        aten.index_fill.int_Scalar,
        aten.index_fill.int_Tensor,
    ),
    Rule(_write, expand=_expand_write),
)
register((write_part,), Rule(_write_part))
register((aten.index_put.default,), Rule(_put, expand=_expand_put))
register((put_part,), Rule(_put_part))
register((aten.select_scatter.default, aten.slice_scatter.default, aten.diagonal_scatter.default), Rule(_put_beside))
register((assigned, overwritten), Rule("..., ... -> ..."))
