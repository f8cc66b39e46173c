"""Batch semantics: how an operator's output on the whole batch follows from its outputs on the parts of the batch.

1. Kinds of a value. With v_k the value in part k of m:

    carried     the whole is the parts concatenated along one dim                               `BatchDim`
    sum         Σ_k v_k                                                                         `ReducedOverBatch`
    mean        Σ_k v_k / m           parts are equally long                                    `ReducedOverBatch`
    same        v_k, for any k        the value does not depend on the batch                    `ReducedOverBatch`
    mixed       none of these: rows of one part are combined with rows of another               `NotSeparable`

An operator whose batch factor is cut by the part's digit behaves as `rules` describes the cut: it runs on slices, or
is expanded into operators that do, and an output that is partial over the digit is a sum. In an expansion, a sum
divided by a number is a mean, since the number is the count of terms; a sum divided by another sum is a ratio, a mean
whose terms have unequal weights.

Example: ``mse_loss`` with mean reduction on 2 parts of 4 rows is the mean of the parts' losses; ``cross_entropy``
with ``ignore_index`` is a ratio, as the parts may ignore different numbers of targets.

2. Two captures (`pairs`): the same model captured for two sizes of the batch, compared operator by operator. The
   captures are one program, but torch leaves out an operator that returns its input: `contiguous` of a contiguous
   tensor, `expand` to the tensor's own shape. A batch of one row has fewer of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ShardwrightError
from ..graph import SEED, Graph, Op, map_values
from ..layout import Digit, Layout
from ..rules import Assignment, Bound, Rule, expand
from ..torch_private import overload_name

__all__ = [
    "BatchDim",
    "NotSeparable",
    "ReducedOverBatch",
    "additive",
    "after_cut",
    "batch_place",
    "differences",
    "followed",
    "image",
    "lends",
    "pairs",
    "product",
]

aten = torch.ops.aten

_ADDITIVE = ("add", "sub", "subtract", "rsub")
_PRODUCTS = ("mul", "multiply")
_QUOTIENTS = ("div", "divide", "true_divide")

#: Operator -> the index of the input from which it reads the dtype or device alone.
_LENDS = {
    aten.type_as.default: 1,
    aten.to.other: 1,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 0,
    aten.new_full.default: 0,
    aten.new_empty.default: 0,
}


@dataclass(frozen=True)
class BatchDim:
    """A value with rows of the batch in one dim.

    Args:
        dim: the dim.
        outer: the size of the dim's part before the batch: the dim's size is outer · rows · …; 1 where the batch is
            the major part.
        numbers: True where the elements are row numbers, counted in each part from 0: valid as indices of rows.
    """

    dim: int
    outer: int = 1
    numbers: bool = False


@dataclass(frozen=True)
class ReducedOverBatch:
    """A value without rows of the batch: "sum", "mean" or "same"."""

    how: str


@dataclass(frozen=True)
class NotSeparable:
    """A value that mixes the parts, and the error to raise where a result depends on it."""

    error: ShardwrightError


def lends(op: Op, index: int) -> bool:
    """True where an operator reads nothing but the dtype or device of input `index`."""
    return _LENDS.get(op.target) == index


def batch_place(bound: Bound, dims: tuple[tuple[int, ...], ...], carried: BatchDim) -> tuple[int, int] | None:
    """The factor that contains the batch, and the size before the batch within the factor; None where no factor
    divides so."""
    at = 1
    for index in dims[carried.dim]:
        size = bound.factors[index].size
        if carried.outer < at * size:
            return (index, carried.outer // at) if carried.outer % at == 0 else None
        at *= size
    return None


def image(bound: Bound, dims: tuple[tuple[int, ...], ...], place: tuple[int, int]) -> BatchDim | None:
    """The batch's dim in an output; None where the batch is reduced."""
    for d, dim in enumerate(dims):
        at = 1
        for index in dim:
            if index == place[0]:
                return BatchDim(d, at * place[1])
            at *= bound.factors[index].size
    return None


# -- an operator whose batch is cut ------------------------------------------------------------------------------------


def after_cut(op: Op, described: Rule, bound: Bound, factor: int, parts: int) -> list[str]:
    """The kind of each tensor output where one factor comes in `parts` parts: "cut", "sum", "mean", "ratio" or
    "mixed"."""
    outputs = [v for v in op.outputs if v is not None]
    if not bound.factors[factor].splittable:
        return ["mixed"] * len(outputs)
    assignment = bound.cut_by(parts, {factor: (Digit(parts, 1),)})
    if not bound.is_consistent(assignment):  # the batch is a minor part of a dim: there is no layout for it
        works_out = described.expand is not None and described.expand(op, bound, assignment) is not None
        return ["mixed" if works_out else _outcome(bound, dims, factor) for dims in bound.outputs]
    if any(bound.halos(i, assignment) for i in range(len(op.inputs))):  # windows over rows of two parts
        return ["mixed"] * len(outputs)
    try:
        steps, renamed = expand(op, described, bound, assignment)
    except ShardwrightError:
        return ["mixed"] * len(outputs)
    if len(steps) == 1 and steps[0][0] is op:
        return [_outcome(bound, dims, factor) for dims in bound.outputs]
    kinds: dict[str, str] = {}
    layouts: dict[str, Layout | None] = {}
    for i, value in enumerate(op.inputs):
        layouts[value.name] = bound.input_layout(i, assignment)
        kinds[value.name] = "same" if _is_whole(layouts[value.name]) else "cut"
    for step in steps:
        _follow_step(*step, kinds, layouts)
    return [kinds[renamed.get(v.name, v).name] for v in outputs]


def _outcome(bound: Bound, dims: tuple[tuple[int, ...], ...], factor: int) -> str:
    """The kind of an output of an operator that runs on slices unchanged."""
    if any(factor in dim for dim in dims):
        return "cut"
    return "sum" if bound.reduction == "sum" else "mixed"


def _is_whole(layout: Layout | None) -> bool:
    return layout is not None and not any(layout.dims or ())


def _follow_step(
    op: Op,
    described: Rule,
    bound: Bound,
    assignment: Assignment,
    kinds: dict[str, str],
    layouts: dict[str, Layout | None],
) -> None:
    """Record the kinds of the outputs of one operator of an expansion."""
    draws = any(v.name == SEED.name for v in op.inputs)  # a part's random numbers are offset: see `counter_rng`
    read = []
    for i, value in enumerate(op.inputs):
        wanted, kind = bound.input_layout(i, assignment), kinds.get(value.name, "same")
        if (kind == "cut" and wanted != layouts[value.name]) or (kind != "cut" and not _is_whole(wanted) and not draws):
            kind = "mixed"  # it would be gathered, or depend on the part's position in the whole
        read.append(kind)
    for i, value in enumerate(v for v in op.outputs if v is not None):
        layout = bound.output_layout(i, assignment)
        layouts[value.name] = layout.without_partial() if layout is not None else None
        if "mixed" in read:
            kinds[value.name] = "mixed"
        elif assignment.used:
            contracted = {"sum": "sum", "none": "same"}.get(bound.reduction, "mixed")
            kinds[value.name] = (
                "mixed"
                if {"sum", "mean", "ratio"} & set(read)
                else "cut"
                if not _is_whole(layouts[value.name])
                else contracted
            )
        else:
            kinds[value.name] = _worked_out(op, described, read)


def _worked_out(op: Op, described: Rule, read: Sequence[str]) -> str:
    """The kind of an output of one operator of an expansion whose inputs are already reduced."""
    if op.kind in _QUOTIENTS and read[0] == "sum":
        if len(read) == 1:
            return "mean"
        if read[1] == "sum":
            return "ratio"
    if set(read) <= {"same"}:
        return "same"
    if "ratio" in read:
        return "ratio" if len(read) == 1 and followed(op, described, read) else "mixed"
    if len(set(read)) > 1 and (additive(op) or described.is_linear(op)):
        return "mixed"
    return followed(op, described, read) or "mixed"


# -- after the reduction -----------------------------------------------------------------------------------------------


def additive(op: Op) -> bool:
    """True for a sum, a difference, or a weighted sum of two tensors (``lerp`` with a number)."""
    return (op.kind in _ADDITIVE or (op.kind == "lerp" and overload_name(op.target) == "Scalar")) and op.outputs[
        0
    ] is not None


def product(op: Op) -> int:
    """1 for a product, -1 for a quotient, 0 for neither."""
    if overload_name(op.target) not in ("Tensor", "Scalar"):
        return 0  # other overloads round
    return 1 if op.kind in _PRODUCTS else -1 if op.kind in _QUOTIENTS else 0


def followed(op: Op, described: Rule, kinds: Sequence[str]) -> str | None:
    """The kind of a linear operator's output on reduced inputs: "sum" where one input is a sum, else "mean".

    None where the operator is not linear in them. An additive operator is so only where all its inputs are of that
    kind.
    """
    reduced = [i for i, kind in enumerate(kinds) if kind != "same"]
    how = kinds[reduced[0]] if len(reduced) == 1 else "sum" if "sum" in (kinds[i] for i in reduced) else "mean"
    if additive(op) or described.is_linear(op) or (described.view and len(kinds) == 1):
        return how
    if op.kind in ("to", "_to_copy") and all(v.dtype.is_floating_point for v in (op.inputs[0], op.output(0))):
        return how  # terms are rounded before their sum, since each part can round only its own term
    of = product(op)
    if of and len(reduced) == 1 and (of > 0 or reduced == [0]):
        return how
    return None


# -- two captures

#: Operators that torch may leave out.
_OMITTED = (aten.contiguous.default, aten.expand.default)

#: Arguments that follow from the shapes of the results.
_SIZES = ("size", "shape", "sizes", "repeats")


def pairs(graph: Graph, wide: Graph, refused: Callable[[Op, str], Exception]) -> Iterator[tuple[Op, Op | None]]:
    """Yield each operator of one capture with the same operator of the other; None for one that is left out there.

    Twins are called at the same line. Where the captures were made by calls of the model at different lines of the
    user's loop, the loss's operators have those lines; lines are then not compared.

    Args:
        graph: the capture whose operators are yielded.
        wide: the capture of a larger batch.
        refused: the error for an operator and a reason, raised where the two are not one program.
    """
    try:
        found = list(_pairs(graph, wide, refused, _alike))
    except _Unlike as unlike:
        try:
            found = list(_pairs(graph, wide, refused, _alike_anywhere))
        except _Unlike:
            raise unlike.error from None
    yield from found


class _Unlike(Exception):
    """Two captures that are not one program."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _pairs(
    graph: Graph, wide: Graph, refused: Callable[[Op, str], Exception], same_form: Callable[[Op, Op], bool]
) -> Iterator[tuple[Op, Op | None]]:
    wide_ops = list(reversed(wide.ops))
    for op in graph.ops:
        while wide_ops and not (same := same_form(op, wide_ops[-1])) and wide_ops[-1].target in _OMITTED:
            wide_ops.pop()
        if wide_ops and same:
            yield op, wide_ops.pop()
        elif op.target in _OMITTED:
            yield op, None
        else:
            raise _Unlike(
                refused(op, f"with more rows the model calls {wide_ops[-1].kind if wide_ops else 'nothing'} here")
            )
    if further := [other for other in wide_ops if other.target not in _OMITTED]:
        raise _Unlike(refused(further[-1], "it is called with more rows alone"))


def _alike(op: Op, other: Op) -> bool:
    return _alike_anywhere(op, other) and op.source == other.source


def _alike_anywhere(op: Op, other: Op) -> bool:
    same = op.target is other.target or repr(op.target) == repr(other.target)
    return same and op.module == other.module


def differences(op: Op, other: Op) -> list[tuple[str, Any, Any]]:
    """The arguments in which two captures of a call differ: (name, value, value in the other).

    Sizes that follow from the shapes of the results are not compared.
    """
    sliced = op.kind in ("slice", "narrow") and op.inputs[0].shape == op.output(0).shape  # all of a dim
    found = []
    names = op.argument_names or tuple(str(i) for i in range(len(op.args)))
    mine, theirs = (map_values({**dict(zip(names, o.args)), **o.kwargs}, lambda v: "") for o in (op, other))
    for name in {**mine, **theirs}:
        a, b = mine.get(name), theirs.get(name)
        if (name in _SIZES and isinstance(a, (list, tuple))) or (sliced and name in ("start", "end", "length")):
            continue
        if a is not b and (type(a) is not type(b) or repr(a) != repr(b)):
            found.append((name, a, b))
    return found
