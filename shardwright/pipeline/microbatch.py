"""Micro-batches: a batch of B rows runs as m parts of b = B/m rows, through one graph captured for b rows.

    output     beside the others along the dim that carries the batch    "cat"
               Σ_k v_k             a sum over the batch                   "sum"
               Σ_k v_k / m         a mean over it                         "mean"
               v_0                 what does not depend on it             "same"

What each value is, `batching` reads off the rules. After a reduction over the batch only linear operators may follow.
Where a sum meets a mean, the mean is divided by m, so that the result is a sum. A mean whose terms do not count alike
(a cross entropy that ignores targets or weighs classes, a sum of losses divided by the sum of a mask) is of no part's
making: it is rewritten as

    Σ_k (Σ of the terms of part k) / total       total = Σ_k (what counts of part k)

with the total a further input of the graph. What counts comes from the model's inputs alone, so that `counts` makes
it of each part before the first of them runs.

The batch has to be read off more than the one graph, in which a number that a model makes of its batch size is a
number
like any other: the same model captured with more rows a part (`wide`) tells them apart, and rows of which a part has
only one from dims of size 1.

Buffers that change hold their old values in all parts, and get their new ones after the last, put together as outputs
are: what one device would give them. A batch norm that trains normalises each part by its own mean and variance; what
it counts is changed by each part in turn, as where parts are batches of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..errors import SettingError
from ..graph import Graph, Op, Value, values_in
from ..torch_private import pytree
from .batch_semantics import NotSeparable, ReducedOverBatch
from .microbatch_values import MicrobatchRewriter

__all__ = ["Join", "MicrobatchPlan", "is_split", "micro_calls", "rows_of", "split"]

aten = torch.ops.aten


class Join(NamedTuple):
    """How an output of the parts makes that of the whole batch: "cat" along `dim`, "sum", "mean" or "same". A gradient
    of the whole goes to every part: as it is for a sum, in slices for "cat", divided by m for a mean and what is the
    same."""

    how: str
    dim: int = 0


@dataclass(frozen=True)
class MicrobatchPlan:
    """A model that runs in micro-batches.

    Args:
        graph: what each of them runs. Totals are its last inputs.
        joins: for each entry of its outputs how the parts go together; None for one that is no value.
        totals: the names of its last inputs: sums over all micro-batches of the outputs of `counts`, in their order.
        counts: of those of the model's inputs (by their names) and buffers that it reads, what counts in one
            micro-batch; None where there are no totals.
        updates: by the names of buffers that change once a step, how the parts' new values go together; those of batch
            norms, which change in turn, are not among them.
    """

    graph: Graph
    joins: tuple[Join | None, ...]
    totals: tuple[str, ...] = ()
    counts: Graph | None = None
    updates: dict[str, Join] = field(default_factory=dict)


# -- inputs ------------------------------------------------------------------------------------------------------------


def rows_of(args: tuple, kwargs: dict[str, Any]) -> int | None:
    """How many rows a batch has: dim 0 of the first tensor that has dims; None without any."""
    tensors = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
    return next((x.shape[0] for x in tensors if x.dim()), None)


def is_split(args: tuple, kwargs: dict[str, Any] | None = None) -> tuple[bool, ...]:
    """For each tensor among the inputs whether micro-batches get a part of it, along dim 0: those with as many rows as
    the first tensor that has dims. Every micro-batch gets all of the others."""
    rows = rows_of(args, kwargs or {})
    return tuple(
        bool(x.dim()) and x.shape[0] == rows
        for x in pytree.tree_leaves((args, kwargs or {}))
        if isinstance(x, torch.Tensor)
    )


def micro_calls(args: tuple, kwargs: dict[str, Any] | None, count: int) -> list[tuple[tuple, dict[str, Any]]]:
    """Inputs of one micro-batch's shapes, on the meta device; where there are several micro-batches, also such with
    twice the rows, with which `split` compares.

    Args:
        args, kwargs: those of the whole batch.

    Returns:
        (args, kwargs) of each.

    Raises:
        SettingError: no tensor has rows, or `count` micro-batches do not divide them.
    """
    return [_resized(args, kwargs or {}, count, times) for times in ((1, 2) if count > 1 else (1,))]


def _resized(args: tuple, kwargs: dict[str, Any], count: int, times: int) -> tuple[tuple, dict[str, Any]]:
    rows = rows_of(args, kwargs)
    if rows is None:
        raise SettingError(
            "there is no batch to split: no input is a tensor with dims",
            strategy=f"micro_batches={count}",
            legal="micro_batches=1",
        )
    leaves, spec = pytree.tree_flatten_with_path((args, kwargs))
    made = []
    for path, x in leaves:
        if isinstance(x, torch.Tensor):
            shape = tuple(x.shape)
            if shape and shape[0] == rows:
                if rows % count or not rows:
                    raise SettingError(
                        f"the input {_called(path)} has {rows} rows, which {count} micro-batches do not divide",
                        strategy=f"micro_batches={count}",
                        legal=", ".join(str(d) for d in range(1, rows + 1) if rows % d == 0) or None,
                    )
                shape = (rows // count * times, *shape[1:])
            x = torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
        made.append(x)
    return pytree.tree_unflatten(made, spec)


def _called(path: Sequence[Any]) -> str:
    """``0`` or ``mask['left']`` for where a leaf lies in (args, kwargs)."""
    first = path[1]
    return f"{getattr(first, 'idx', getattr(first, 'key', first))}{pytree.keystr(tuple(path[2:]))}"


# -- the graph ---------------------------------------------------------------------------------------------------------


def split(graph: Graph, count: int, wide: Graph | None = None, parts: int = 1) -> MicrobatchPlan:
    """How a model runs in micro-batches.

    Args:
        graph: the model, with its loss where that is inside, captured for the rows of one micro-batch.
        count: how many micro-batches there are.
        wide: the same captured for more rows (`micro_calls`); needed where there is more than one micro-batch.
        parts: of how many parts the whole batch is the concatenation, where ranks feed their own: a micro-batch is a
            piece of each, in their order.

    Raises:
        SettingError: an output, or a buffer's new value, that mixes the rows of one micro-batch with those of another
            in another way than a sum or a mean, with the operator that does; a program that is another one for more
            rows.
    """
    if count == 1:
        return MicrobatchPlan(graph, tuple(Join("same") if isinstance(x, Value) else None for x in graph.outputs))
    assert wide is not None, "a second capture, with more rows, tells what grows with the batch"
    found = MicrobatchRewriter(graph, wide, count, parts)
    joins = tuple(_join(found, x) if isinstance(x, Value) else None for x in graph.outputs)
    totals = tuple(total for total, _ in found.totals.values())
    updates = {name: _update(found, name, value) for name, value in graph.updates.items() if name not in found.in_turn}
    rewritten = replace(graph, inputs=(*graph.inputs, *totals), ops=_alive(graph, found.ops), batch=found.batch)
    return MicrobatchPlan(rewritten, joins, tuple(v.name for v in totals), _counts(found) if totals else None, updates)


def _join(found: MicrobatchRewriter, value: Value) -> Join:
    kind = found.kinds[value.name]
    if isinstance(kind, NotSeparable):
        raise kind.error
    if isinstance(kind, ReducedOverBatch):
        return Join(kind.how)
    if kind.numbers:
        raise found.error(found.graph.producers().get(value.name), "it is a result, and counts the rows of the batch")
    if kind.outer != 1:
        raise found.error(
            found.graph.producers().get(value.name),
            f"the rows of the batch lie apart in dim {kind.dim} of its result, {list(value.shape)}",
            "micro_batches=1, or a result with a dim for the batch alone",
        )
    return Join("cat", kind.dim)


def _update(found: MicrobatchRewriter, name: str, value: Value) -> Join:
    """How the new values that the parts have for a buffer make that of the whole batch."""
    kind = found.kinds[value.name]
    if isinstance(kind, ReducedOverBatch):
        return Join(kind.how)
    reason = (
        "it is of rows of the batch, of which each micro-batch has its own"
        if not isinstance(kind, NotSeparable)
        else f"it is no sum or mean over the batch ({kind.error.message})"
    )
    raise found.error(
        found.graph.producers().get(value.name),
        f"the new value of the buffer {name!r}: {reason}",
        "micro_batches=1, or a buffer that gets a sum or a mean over the batch",
    )


def _counts(found: MicrobatchRewriter) -> Graph:
    """The operators that lead from inputs to what counts."""
    graph, outputs = found.graph, tuple(term for _, term in found.totals.values())
    wanted, ops = {v.name for v in outputs}, []
    for op in reversed([*found.ops, *found.counting]):
        if any(v is not None and v.name in wanted for v in op.outputs):
            ops.append(op)
            wanted |= {v.name for v in op.inputs}
    return Graph(
        tuple(v for v in graph.inputs if v.name in wanted),
        {},
        {name: v for name, v in graph.buffers.items() if v.name in wanted},
        {name: t for name, t in graph.constants.items() if name in wanted},
        tuple(reversed(ops)),
        outputs,
        batch={name: dim for name, dim in found.batch.items() if name in wanted},
    )


def _alive(graph: Graph, ops: Sequence[Op]) -> tuple[Op, ...]:
    """The operators without those of the graph that only counted."""
    wanted = {v.name for v in (*values_in(graph.outputs), *graph.updates.values())}
    read = wanted | {v.name for op in graph.ops for v in op.inputs}
    kept = []
    for op in reversed(ops):
        names = {v.name for v in op.outputs if v is not None}
        if names & wanted or not names & read:
            kept.append(op)
            wanted |= {v.name for v in op.inputs}
    return tuple(reversed(kept))
