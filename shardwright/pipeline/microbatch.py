"""Micro-batches: a batch of B rows runs as m parts of b = B/m rows, through one graph captured for b rows.

An output of the whole batch is joined from the outputs v_k of the parts:

    "cat"      concatenation along the dim that carries the batch
    "sum"      Σ_k v_k             for a sum over the batch
    "mean"     Σ_k v_k / m         for a mean over the batch
    "same"     v_0                 for a value that does not depend on the batch

`batch_semantics` reads the kind of each value off the rules. Only linear operators may follow a reduction over the
batch. Where a sum meets a mean, the mean is divided by m and the result is a sum. A mean whose terms have unequal
weights (a cross entropy that ignores targets or weighs classes, a sum of losses divided by the sum of a mask) cannot
be computed by any part alone. It is rewritten as

    Σ_k (Σ of the terms of part k) / total       total = Σ_k (weights of part k)

with the total as a further input of the graph. The weights depend on the model's inputs alone, so `counts` computes
them for each part before the first part runs.

Example: 8 rows in 2 micro-batches, of which 3 and 1 targets are not ignored: total = 4, and the loss is the sum of
the 4 losses / 4, not the mean of the two parts' means.

One capture is not enough: a number that a model computes from its batch size looks like any other number. The same
model captured with more rows a part (`wide`) distinguishes the two, and distinguishes a part's single row from a dim
of size 1.

Buffers that change keep their old values in all parts. They get their new values after the last part, joined like
outputs: the values that one device would give them. A batch norm that trains normalises each part by its own mean and
variance; its running statistics are updated by each part in turn, as where parts are batches of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..capture.annotations import PipelineSettings
from ..errors import SettingError
from ..graph import Graph, Op, Value, values_in
from ..torch_private import pytree
from .batch_semantics import NotSeparable, ReducedOverBatch
from .microbatch_values import MicrobatchRewriter
from .schedules import takes

__all__ = ["Join", "MicrobatchPlan", "is_split", "micro_calls", "rows_of", "split"]

aten = torch.ops.aten


class Join(NamedTuple):
    """The join of the parts' outputs to the output of the whole batch: "cat" along `dim`, "sum", "mean" or "same".

    A gradient of the whole goes to every part: unchanged for "sum", in slices for "cat", divided by m for "mean" and
    "same".
    """

    how: str
    dim: int = 0


@dataclass(frozen=True)
class MicrobatchPlan:
    """A model that runs in micro-batches.

    Args:
        graph: the graph that each micro-batch runs. Totals are its last inputs.
        joins: for each of its outputs, the join of the parts; None for an output that is no value.
        totals: names of its last inputs: sums over all micro-batches of the outputs of `counts`, in their order.
        counts: the graph that computes the weights of one micro-batch from the model's inputs (by name) and buffers;
            None where there are no totals.
        updates: buffer that changes once a step -> the join of the parts' new values. Buffers of batch norms, which
            change in turn, are not among them.
    """

    graph: Graph
    joins: tuple[Join | None, ...]
    totals: tuple[str, ...] = ()
    counts: Graph | None = None
    updates: dict[str, Join] = field(default_factory=dict)

    def join(self, index: int) -> Join:
        """The join of output `index`, a value."""
        join = self.joins[index]
        assert join is not None
        return join


# -- inputs ------------------------------------------------------------------------------------------------------------


def rows_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The number of rows of a batch: the size of dim 0 of the first tensor with dims; None without such a tensor."""
    tensors = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
    return next((x.shape[0] for x in tensors if x.dim()), None)


def is_split(args: tuple[object, ...], kwargs: dict[str, Any] | None = None) -> tuple[bool, ...]:
    """For each tensor among the inputs, True where each micro-batch gets a part of it along dim 0.

    Inputs with as many rows as the first tensor with dims are split; every micro-batch gets all of the others.
    """
    rows = rows_of(args, kwargs or {})
    return tuple(
        bool(x.dim()) and x.shape[0] == rows
        for x in pytree.tree_leaves((args, kwargs or {}))
        if isinstance(x, torch.Tensor)
    )


def micro_calls(
    args: tuple[object, ...], kwargs: dict[str, Any] | None, count: int, setting: PipelineSettings | None = None
) -> list[tuple[tuple[object, ...], dict[str, Any]]]:
    """Inputs in one micro-batch's shapes, on the meta device.

    With several micro-batches, a second entry has twice the rows, for the wide capture of `split`.

    Args:
        args, kwargs: those of the whole batch.
        setting: the pipeline, whose schedule says which other numbers would be legal.

    Returns:
        (args, kwargs) of each.

    Raises:
        SettingError: no tensor has rows, or `count` micro-batches do not divide them.
    """
    return [_resized(args, kwargs or {}, count, times, setting) for times in ((1, 2) if count > 1 else (1,))]


def _resized(
    args: tuple[object, ...], kwargs: dict[str, Any], count: int, times: int, setting: PipelineSettings | None
) -> tuple[tuple[object, ...], dict[str, Any]]:
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
                        legal=_legal(rows, setting),
                    )
                shape = (rows // count * times, *shape[1:])
            x = torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
        made.append(x)
    return pytree.tree_unflatten(made, spec)


def _legal(rows: int, setting: PipelineSettings | None) -> str:
    """The numbers of micro-batches that rows, stages and schedule allow, or the nearest other sizes."""
    named = setting is not None and isinstance(setting.stages, int) and setting.csv is None
    divisors = [d for d in range(1, rows + 1) if rows % d == 0]
    if not named:
        return ", ".join(map(str, divisors)) or "a batch with rows"
    assert setting is not None and isinstance(setting.stages, int)
    stages = setting.stages
    fits = [d for d in divisors if takes(setting.scheduler, stages, d, setting.chunks)]
    return ", ".join(map(str, fits)) or f"a batch of more rows: at least {stages} micro-batches for {stages} stages"


def _called(path: Sequence[Any]) -> str:
    """``0`` or ``mask['left']``: the name of a leaf by its path in (args, kwargs)."""
    first = path[1]
    return f"{getattr(first, 'idx', getattr(first, 'key', first))}{pytree.keystr(tuple(path[2:]))}"


# -- the graph ---------------------------------------------------------------------------------------------------------


def split(graph: Graph, count: int, wide: Graph | None = None, parts: int = 1) -> MicrobatchPlan:
    """The plan of a model in micro-batches.

    Args:
        graph: the model, with its loss where that is inside, captured for the rows of one micro-batch.
        count: the number of micro-batches.
        wide: the same captured for more rows (`micro_calls`); required for more than one micro-batch.
        parts: the number of parts of which the whole batch is the concatenation, where ranks feed their own: a
            micro-batch is a piece of each part, in their order.

    Raises:
        SettingError: an output, or a buffer's new value, that combines rows of different micro-batches in another way
            than a sum or a mean, with the operator that does; a program that differs for more rows.
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
    """The join of the parts' new values of a buffer."""
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
    """The graph of the operators between inputs and weights."""
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
    """The operators without those of the graph whose only use was to compute weights."""
    wanted = {v.name for v in (*values_in(graph.outputs), *graph.updates.values())}
    read = wanted | {v.name for op in graph.ops for v in op.inputs}
    kept = []
    for op in reversed(ops):
        names = {v.name for v in op.outputs if v is not None}
        if names & wanted or not names & read:
            kept.append(op)
            wanted |= {v.name for v in op.inputs}
    return tuple(reversed(kept))
