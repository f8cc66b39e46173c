"""Writing by index: scatter, index_add, index_copy, index_fill, index_put.

    out = x;  out[index[i]] ∘= source[i]        cut along the indexed dim:   each rank writes what lies in its part
                                                cut along i, where ∘ is +:   out = x + Σ over ranks of what each adds

A rank's part gets one spare place: what belongs to other parts is written there, and the place is taken off again. So
each operator stays what it is, its order of writing and its gradient too.
"""

from __future__ import annotations

from typing import Any

import torch

from ..graph import Op, Value
from ..torch_private import overload_name
from .dims import all_whole, cut_size, named, normal, operand, operands
from .lookup import index_texts, indexed_dims, is_mask, part_names, part_places
from .notation import Assignment, Bound
from .positions import local_operator, part_length, starts, within
from .registry import Expansion, Rule, register

aten = torch.ops.aten


def _with_spare(x: torch.Tensor, dim: int) -> torch.Tensor:
    """One more place along a dim."""
    spare = [*x.shape]
    spare[dim] = 1
    return torch.cat([x, x.new_zeros(spare)], dim)


def _without_spare(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.narrow(dim, 0, x.shape[dim] - 1)


def _place(index: torch.Tensor, begin: torch.Tensor, length: int, size: int) -> torch.Tensor:
    """An index counted from where this rank's part begins; the spare place for what lies elsewhere."""
    inside, place = within(index, begin, length, size)
    return torch.where(inside, place, length)


@local_operator("write_part(str target, Tensor x, int dim, Tensor index, Tensor? source, Scalar? value, str? reduce, "
                "bool? include_self, Scalar? alpha, Tensor starts, int size) -> Tensor")
def write_part(target: str, x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor | None, value: Any,
               reduce: str | None, include_self: bool | None, alpha: Any, starts: torch.Tensor,
               size: int) -> torch.Tensor:
    """``aten.<target>`` into a dim of `size` of which this rank holds a part.

    Args:
        source, value: what is written; that which the target takes.
        reduce, include_self, alpha: given where the target takes them.
    """
    name, overload = target.split(".")
    more = {"reduce": reduce, "include_self": include_self, "alpha": alpha}
    made = getattr(getattr(torch.ops.aten, name), overload)(
        _with_spare(x, dim), dim, _place(index, starts, x.shape[dim], size), value if source is None else source,
        **{key: argument for key, argument in more.items() if argument is not None})
    return _without_spare(made, dim)


def _source(op: Op) -> Value | None:
    """The tensor that is written, along the dims of the index."""
    found = op.argument("src", op.argument("source", op.argument("value")))
    return found if isinstance(found, Value) else None


def _adds(op: Op) -> bool:
    """Whether what is written is added to what stands there, so that ranks may each add a part."""
    return op.kind in ("scatter_add", "index_add") or op.kind == "scatter_reduce" and op.argument("reduce") == "sum" \
        and op.argument("include_self", True) or op.kind == "index_put" and bool(op.argument("accumulate", False))


def _write_names(op: Op, part: bool = False) -> tuple[list[str], list[str], list[str], int]:
    """Names of x's, the index's and the source's dims, and the dim that is indexed.

    The index of a scatter has all dims; of one that is shorter than x's or the source's only a beginning is read, so
    that it stays whole. The index of an index_add has one dim.
    """
    x, index, source = op.argument("x" if part else "self"), op.argument("index"), _source(op)
    at = normal(op.argument("dim"), len(x.shape))
    held, read, given = named(len(x.shape)), named(len(x.shape)), named(len(x.shape))
    k = "k" if _adds(op) or part else "k!"
    if _is_scatter(op):
        for d, size in enumerate(index.shape):
            if source is not None and source.shape[d] != size or d != at and x.shape[d] != size:
                held[d] = held[d] if d == at else f"x{d}!"
                read[d], given[d] = f"k{d}!", f"s{d}!"
        if source is None or source.shape[at] == index.shape[at]:
            read[at] = given[at] = k
    else:
        read, given[at] = [k], k
    held[at] = "v"
    return held, read, given, at


def _is_scatter(op: Op) -> bool:
    return op.kind.startswith("scatter") or op.kind == "write_part" and op.argument("target").startswith("scatter")


def _write(op: Op) -> str:
    x, index, source = op.argument("self"), op.argument("index"), _source(op)
    fits = source is None or len(source.shape) == len(x.shape) or not source.shape and op.kind == "index_fill"
    if not x.shape or not index.shape or not fits:
        return all_whole(op)
    held, read, given, _ = _write_names(op)
    given = given if source is not None and source.shape else []
    texts = operands(op, self=operand(held), index=operand(read), src=operand(given), source=operand(given),
                     value=operand(given))
    return f"{texts} -> {operand(held)}"


def _expand_write(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    parted, shared = (cut_size(bound, assignment, [name]) > 1 for name in ("v", "k"))
    if not parted and not shared:
        return None
    x, index = op.argument("self"), op.argument("index")
    dim = normal(op.argument("dim"), len(x.shape))

    def work(b):
        onto = b.call(aten.zeros_like.default, x) if shared else x
        if parted:
            value, source = op.argument("value"), _source(op)
            more = [op.argument(name) if name in op.argument_names else None
                    for name in ("reduce", "include_self", "alpha")]
            made = b.call(write_part, f"{op.kind}.{overload_name(op.target)}", onto, dim, index, source,
                          None if source is not None else value, *more, starts(b, index, x, dim), x.shape[dim])
        else:
            made = b.call(op.target, onto, *op.args[1:], **op.kwargs)
        return b.call(aten.add.Tensor, x, made) if shared else made
    return work


def _write_part(op: Op) -> tuple[str, dict[str, int]]:
    x, source, begin = op.argument("x"), _source(op), op.argument("starts")
    held, read, given, at = _write_names(op, part=True)
    held[at] = "(p v!)"
    given = given if source is not None and source.shape else []
    texts = operands(op, x=operand(held), index=operand(read), source=operand(given), starts="p")
    return f"{texts} -> {operand(held)}", {"p": begin.shape[0], "v": part_length(x.shape[at], begin.shape[0])}


# -- several indices ---------------------------------------------------------------------------------------------------


@local_operator("put_part(Tensor x, Tensor?[] indices, Tensor values, bool accumulate, Tensor[] starts, int[] sizes) "
                "-> Tensor")
def put_part(x: torch.Tensor, indices: list[torch.Tensor | None], values: torch.Tensor, accumulate: bool,
             starts: list[torch.Tensor], sizes: list[int]) -> torch.Tensor:
    """`aten.index_put` where this rank holds a part of each indexed dim."""
    inside, places = part_places(x, indices, starts, sizes)
    first = next(d for d, index in enumerate(indices) if index is not None)
    places[first] = torch.where(inside, places[first], x.shape[first])
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
    given = operand(out[len(out) - len(values.shape):])
    return f"{', '.join([operand(names), *index_texts(indices, shared), given])} -> {operand(names)}"


def _put_by_mask(op: Op, masks: list[Value]) -> str:
    """One value wherever a mask is true is put on slices as on the whole."""
    x, values, indices = op.inputs[0], op.argument("values"), op.argument("indices")
    if len(masks) > 1 or len(indices) > 1 or values.numel != 1:
        return all_whole(op)
    names = named(len(x.shape))
    return f"{operand(names)}, {operand(names[:len(masks[0].shape)])}, {operand(['1'] * len(values.shape))} -> " \
        f"{operand(names)}"


def _expand_put(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    parted, shared = (cut_size(bound, assignment, [f.name for f in bound.factors if f.name.startswith(letter)]) > 1
                      for letter in "vi")
    if not parted and not shared:
        return None
    x, indices, values = op.inputs[0], op.argument("indices"), op.argument("values")
    at = [d for d, index in enumerate(indices) if index is not None]

    def work(b):
        onto = b.call(aten.zeros_like.default, x) if shared else x
        begins = [starts(b, indices[d], x, d) for d in at]
        made = b.call(put_part, onto, indices, values, op.argument("accumulate", False), begins,
                      [x.shape[d] for d in at])
        return b.call(aten.add.Tensor, x, made) if shared else made
    return work


def _put_part(op: Op) -> tuple[str, dict[str, int]]:
    x, indices, values = op.inputs[0], op.argument("indices"), op.argument("values")
    names, shared, out, at = indexed_dims(op, indices)
    counts, sizes = part_names(x, names, at, op.argument("starts"))
    given = operand(out[len(out) - len(values.shape):])
    texts = [operand(names), *index_texts(indices, shared), given, *counts]
    return f"{', '.join(texts)} -> {operand(names)}", sizes


# -- writes of all elements --------------------------------------------------------------------------------------------


@local_operator("assigned(Tensor x, Tensor value) -> Tensor")
def assigned(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The elements of `value`; the gradient goes to `x`: a write that autograd does not see."""
    return _Assigned.apply(x, value)


@local_operator("overwritten(Tensor x, Tensor value) -> Tensor")
def overwritten(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The elements of `value`, in the shape and type of `x`, whose gradient is 0: what `copy_` leaves."""
    return _Overwritten.apply(x, value.to(x.dtype).expand(x.shape))


class _Assigned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Overwritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(gradient), gradient


# -- parts of a dim ----------------------------------------------------------------------------------------------------


def _put_beside(op: Op) -> str:
    """select_scatter, slice_scatter, diagonal_scatter: the dims that are written to stay whole."""
    names = named(len(op.inputs[0].shape))
    if op.kind == "diagonal_scatter":
        at = [normal(op.argument(d), len(names)) for d in ("dim1", "dim2")]
        given = [n for d, n in enumerate(names) if d not in at] + ["diagonal!"]
    else:
        at = [normal(op.argument("dim", 0), len(names))]
        there = ["part!"] if op.kind == "slice_scatter" else []
        given = names[:at[0]] + there + names[at[0] + 1:]
    held = [f"{n}!" if d in at else n for d, n in enumerate(names)]
    return f"{operand(held)}, {operand(given)} -> {operand(held)}"


register((aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce,
          aten.scatter_add.default, aten.scatter_reduce.two, aten.index_add.default, aten.index_copy.default,
          aten.index_reduce.default, aten.index_fill.int_Scalar, aten.index_fill.int_Tensor),
         Rule(_write, expand=_expand_write))
register((write_part,), Rule(_write_part))
register((aten.index_put.default,), Rule(_put, expand=_expand_put))
register((put_part,), Rule(_put_part))
register((aten.select_scatter.default, aten.slice_scatter.default, aten.diagonal_scatter.default), Rule(_put_beside))
register((assigned, overwritten), Rule("..., ... -> ..."))
