"""Micro-batches: a batch of B rows runs as m parts of b = B/m rows, through one graph captured for b rows.

An output of the whole batch is joined from the outputs v_k of the parts:

    "cat"      concatenation along the dim that carries the batch
    "sum"      Σ_k v_k             for a sum over the batch
    "mean"     Σ_k v_k / m         for a mean over the batch
    "same"     v_0                 for a value that does not depend on the batch

`batch_semantics` reads the kind of one operator's output off its rule, and `MicrobatchRewriter` follows a whole graph.
Only linear operators may follow a reduction over the batch. Where a sum meets a mean, the mean is divided by m and the
result is a sum. A mean whose terms have unequal weights (a cross entropy that ignores targets or weighs classes, a sum
of losses divided by the sum of a mask) cannot be computed by any part alone. It is rewritten as

    Σ_k (Σ of the terms of part k) / total       total = Σ_k (weights of part k)

with the total as a further input of the graph. The weights depend on the model's inputs alone, so `counts` computes
them for each part before the first part runs.

`MicrobatchRewriter` also rewrites other values without a kind of their own:

    sum + mean, sum + a value that is the same    the others are divided by m: a sum
    sum / sum, and other nonlinear operators      a sum that depends on inputs alone is replaced by its total, which
                                                  is the same for all micro-batches; an error for other sums

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

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from ..errors import SettingError, ShardwrightError
from ..graph import Graph, Op, Pieces, Value, form_of, map_values, values_in
from ..layout import Layout
from ..rules import Bound, Builder, Rule, bound_rule, find_rule, normalization
from ..rules.dims import wide as wide_type
from ..rules.loss import counted, summed
from .batch_semantics import (
    BatchDim,
    NotSeparable,
    ReducedOverBatch,
    additive,
    after_cut,
    batch_place,
    differences,
    followed,
    image,
    lends,
    pairs,
    product,
)
from .pipeline_plan import Join, MicrobatchPlan

__all__ = ["MicrobatchRewriter", "split"]

# -- kinds of values


aten = torch.ops.aten


SAME = ReducedOverBatch("same")


#: Operators that may normalise by the statistics of one part; their further outputs differ from part to part.
_BATCH_NORMS = (aten.batch_norm.default, normalization.batch_norm, normalization.instance_norm)


Kind = BatchDim | ReducedOverBatch | NotSeparable


class MicrobatchRewriter:
    """Walks a graph and the graph of a larger micro-batch and determines the kind of each value.

    Attributes:
        kinds: value name -> its kind.
        batch: split input -> the dim that carries the batch.
        ops: the program of one micro-batch.
        totals: value name -> its total, a further input of that program, and the value that is summed to the total.
        counting: operators that compute the summed values and nothing else.
        in_turn: the buffers that every micro-batch changes: those of batch norms that train.
    """

    def __init__(self, graph: Graph, wide: Graph, count: int, parts: int) -> None:
        self.graph, self.wide, self.count, self.parts = graph, wide, count, parts
        self.kinds: dict[str, Kind] = {}
        self.batch: dict[str, int] = {}
        self.ops: list[Op] = []
        self.counting: list[Op] = []
        self.totals: dict[str, tuple[Value, Value]] = {}
        self.free: set[str] = set()  # values that depend on inputs alone
        # Form of a call that reads rows of the batch -> kinds of its outputs.
        self.known_calls: dict[object, list[Kind]] = {}
        self.in_turn = _statistics(graph)
        self.names = {v.name for op in graph.ops for v in op.outputs if v is not None} | set(graph.constants)
        self.names |= {op.name for op in graph.ops} | {v.name for v in graph.sources()}
        self._sources()
        for op, wide_op in pairs(
            graph,
            wide,
            lambda op, what: self.error(
                op,
                f"{what}: the program depends on the size of the batch",
                "micro_batches=1, or a model that does the same for any batch",
            ),
        ):
            self._take(op, wide_op)

    # -- sources

    def error(self, op: Op | None, reason: str, legal: str | None = None) -> SettingError:
        where = op.where if op is not None else {}
        return SettingError(
            f"cannot be split into {self.count} micro-batches: {reason}",
            **where,
            strategy=f"micro_batches={self.count}",
            legal=legal
            or "micro_batches=1, or a model that returns a sum or a mean over the batch, or a result for each row",
        )

    def _sources(self) -> None:
        ratios = set()
        for value, wide_op in zip(self.graph.inputs, self.wide.inputs, strict=True):
            is_split = value.shape != wide_op.shape
            if is_split:
                self.batch[value.name] = 0
                ratios.add(wide_op.shape[0] / value.shape[0])
            self.kinds[value.name] = BatchDim(0) if is_split else SAME
            if not value.requires_grad:
                self.free.add(value.name)
        assert len(ratios) == 1, "the wide capture has more rows"
        self.ratio = round(ratios.pop())
        self.kinds |= {v.name: SAME for v in self.graph.parameters.values()}
        for name, value in self.graph.buffers.items():
            if name in self.in_turn:
                self.kinds[value.name] = NotSeparable(
                    self.error(
                        None,
                        f"the result depends on the buffer {name!r}, which changes from one micro-batch to the next",
                    )
                )
            else:
                self.kinds[value.name] = SAME
                self.free.add(value.name)
        for name, tensor in self.graph.constants.items():
            other = self.wide.constants.get(name)
            same_form = (
                other is not None
                and other.shape == tensor.shape
                and other.dtype == tensor.dtype
                and (tensor.is_meta or other.is_meta or torch.equal(tensor, other))
            )
            self.kinds[name] = (
                SAME
                if same_form
                else NotSeparable(
                    self.error(None, f"the constant {name!r}, made by the model, depends on the size of the batch")
                )
            )
            self.free.add(name)

    # -- one operator

    def _take(self, op: Op, wide_op: Op | None) -> None:
        """Add an operator and determine the kinds of its outputs."""
        outputs = [v for v in op.outputs if v is not None]
        if wide_op is None:
            self.ops.append(op)
            self.kinds[outputs[0].name] = self.kinds[op.inputs[0].name]
            self.free |= {outputs[0].name} if op.inputs[0].name in self.free else set()
            return
        decided: Op | None = op
        kinds: list[Kind]
        try:
            decided, kinds = self._decided(op, wide_op)
        except ShardwrightError as error:
            kinds = [NotSeparable(error)] * len(outputs)
        if decided is not None:
            op = decided
            random = torch.Tag.nondeterministic_seeded in getattr(op.target, "tags", ())
            if random and isinstance(kinds[0], BatchDim):
                op = replace(op, micro=self._pieces(outputs[0], kinds[0]))
            self.ops.append(op)
            if not random and all(v.name in self.free for v in op.inputs):
                self.free |= {v.name for v in outputs}
        for value, wider, kind in zip(outputs, (v for v in wide_op.outputs if v is not None), kinds, strict=True):
            self.kinds[value.name] = (
                kind
                if self._fits(value, wider, kind)
                else NotSeparable(
                    self.error(
                        op,
                        f"its result is {list(value.shape)} for a micro-batch and {list(wider.shape)} for {self.ratio} "
                        "times the rows, of which it carries no more",
                    )
                )
            )

    def _pieces(self, value: Value, rows: BatchDim) -> Pieces:
        """The position of a random operator's numbers in the whole batch.

        Where the dim does not have the rows of each rank's part in a piece of their own, the position differs from
        that of one device, but never overlaps that of another micro-batch.
        """
        parts = rows.outer * self.parts
        return Pieces(rows.dim, self.count, rows.outer if value.shape[rows.dim] % parts else parts)

    def _fits(self, value: Value, wider: Value, kind: Kind) -> bool:
        if isinstance(kind, NotSeparable):
            return True
        batch_dim = kind.dim if isinstance(kind, BatchDim) else None
        return tuple(s * self.ratio if d == batch_dim else s for d, s in enumerate(value.shape)) == wider.shape

    def _decided(self, op: Op, wide_op: Op) -> tuple[Op | None, list[Kind]]:
        """The operator as it runs in a micro-batch, and the kinds of its outputs; None where others, already
        added, replace it."""
        inputs = [SAME if lends(op, i) else self._read(*both) for i, both in enumerate(zip(op.inputs, wide_op.inputs))]
        if op.target in _BATCH_NORMS and isinstance(inputs[0], BatchDim):
            return self._normalised(op, wide_op, inputs[0])
        for kind in inputs:
            if isinstance(kind, NotSeparable):
                raise kind.error.located(**op.where)
        if any(isinstance(kind, BatchDim) for kind in inputs):
            op = self._promoted(op, [i for i, k in enumerate(inputs) if isinstance(k, ReducedOverBatch) and k != SAME])
            return self._of_alike(op, wide_op, inputs)
        if all(kind == SAME for kind in inputs):
            return op, self._of_nothing(op, wide_op)
        return self._of_reduced(op, wide_op, [kind.how for kind in inputs if isinstance(kind, ReducedOverBatch)])

    def _read(self, value: Value, wider: Value) -> Kind:
        """The kind of an input; a dim of size 1 that stands for all rows of a larger micro-batch carries the batch."""
        kind = self.kinds[value.name]
        grown = [d for d, (a, b) in enumerate(zip(value.shape, wider.shape)) if a != b]
        if kind == SAME and len(grown) == 1 and value.shape[grown[0]] == 1:
            return BatchDim(grown[0])
        return kind

    def _described(self, op: Op, wide_op: Op) -> tuple[Rule, Bound]:
        described = find_rule(wide_op)
        if described is None:
            raise self.error(
                op,
                f"there is no rule for {op.target}, which says what it does with the batch",
                f'micro_batches=1, or sw.rule({op.target}, "…"), which describes it',
            )
        return described, bound_rule(wide_op, described)

    def _same_numbers(self, op: Op, wide_op: Op) -> None:
        for found in differences(op, wide_op):
            raise self._grows(op, *found)

    def _grows(self, op: Op, name: str, mine: object, theirs: object) -> SettingError:
        return self.error(
            op,
            f"its argument {name} is {mine} in a micro-batch and {theirs} in one of {self.ratio} "
            "times the rows: it depends on the size of the batch",
        )

    def _normalised(self, op: Op, wide_op: Op, rows: BatchDim) -> tuple[Op, list[Kind]]:
        _, bound = self._described(op, wide_op)
        place = batch_place(bound, bound.inputs[0], rows)
        kind = image(bound, bound.outputs[0], place) if place is not None else None
        if place is None or kind is None or any(place[0] in dim for dims in bound.inputs[1:] for dim in dims):
            raise self.error(op, "it has a channel for each row")
        running_statistics = NotSeparable(
            self.error(op, "its running statistics are those of each micro-batch in turn")
        )
        return op, [kind, *[running_statistics] * (len(bound.outputs) - 1)]

    def _of_nothing(self, op: Op, wide_op: Op) -> list[Kind]:
        """The kinds of the outputs where no input depends on the batch: "same", unless an argument gives a dim
        the batch's size."""
        values = [v for v in op.outputs if v is not None]
        wider = [v for v in wide_op.outputs if v is not None]
        kinds: list[Kind] = []
        for i, (value, wide_value) in enumerate(zip(values, wider)):
            grown = [d for d, (a, b) in enumerate(zip(value.shape, wide_value.shape)) if a != b]
            if not grown:
                self._same_numbers(op, wide_op)
                kinds.append(SAME)
                continue
            if _counts_off(op) and _counts_off(wide_op):
                return [BatchDim(0, numbers=True)]
            described, bound = self._described(op, wide_op)
            factors = bound.outputs[i][grown[0]]
            if (
                len(grown) > 1
                or not factors
                or after_cut(wide_op, described, bound, factors[0], self.ratio)[i] != "cut"
            ):
                raise self.error(op, "its result depends on the size of the batch and on the place in it")
            kinds.append(BatchDim(grown[0]))
        if any(isinstance(kind, BatchDim) for kind in kinds):
            self._same_numbers(op, wide_op)
        return kinds

    def _of_alike(self, op: Op, wide_op: Op, inputs: Sequence[Kind]) -> tuple[Op | None, list[Kind]]:
        """The result of `_of_rows`, computed once for all calls of one form, since layers of a model are often
        equal.

        Raises:
            SettingError: an argument depends on the size of the batch.
        """
        form = form_of(op), form_of(wide_op), tuple(inputs)
        known = self.known_calls.get(form)
        if known is not None:
            return op, known
        self._same_numbers(op, wide_op)
        made, kinds = self._of_rows(op, wide_op, inputs)
        if made is op:
            self.known_calls[form] = kinds
        return made, kinds

    def _of_rows(self, op: Op, wide_op: Op, inputs: Sequence[Kind]) -> tuple[Op | None, list[Kind]]:
        described, bound = self._described(op, wide_op)
        numbers = any(isinstance(kind, BatchDim) and kind.numbers for kind in inputs)
        chosen = numbers and _chooses_rows(op, inputs)
        if numbers and not chosen and not described.view:
            raise self.error(op, "it uses the numbers of the rows in the batch otherwise than to choose rows")
        places = set()
        for i, kind in enumerate(inputs):
            if isinstance(kind, BatchDim) and not (chosen and i == 0):
                places.add(batch_place(bound, bound.inputs[i], kind))
        if None in places or len(places) > 1:
            raise self.error(op, "rows of the batch meet other rows")
        (place,) = places
        assert place is not None
        if bound.factors[place[0]].size % (place[1] * self.ratio):
            raise self.error(op, "it takes rows apart")
        for i, (value, kind) in enumerate(zip(op.inputs, inputs)):
            if not isinstance(kind, BatchDim) and not lends(op, i) and any(place[0] in dim for dim in bound.inputs[i]):
                raise self.error(
                    op, f"{value} {list(value.shape)} has a row for each of the batch and is not split with it"
                )
        kinds: list[Kind] = []
        for dims, made in zip(bound.outputs, after_cut(wide_op, described, bound, place[0], self.ratio)):
            if made == "ratio" and isinstance(op.argument("target"), Value):
                self._counted(op)
                return None, [ReducedOverBatch("sum")]
            if made in ("mixed", "ratio"):
                raise self.error(op, "rows of the batch meet other rows in more than a sum or a mean")
            to = image(bound, dims, place)
            assert (to is not None) == (made == "cut")
            kinds.append(ReducedOverBatch(made) if to is None else replace(to, numbers=numbers and not chosen))
        return op, kinds

    def _of_reduced(self, op: Op, wide_op: Op, inputs: list[str]) -> tuple[Op, list[Kind]]:
        described = find_rule(wide_op)
        for i in range(len(inputs) - 1, -2, -1):
            how = followed(op, described, inputs) if described is not None else None
            if how is not None and (scaled := self._scaled(op, wide_op, inputs, how)) is not None:
                return scaled, [ReducedOverBatch(self._grown(op, wide_op, how))] * sum(
                    v is not None for v in op.outputs
                )
            if i >= 0 and inputs[i] != "same" and self._countable(op.inputs[i]):
                op = self._promoted(op, [i])
                inputs[i] = "same"
                if set(inputs) == {"same"}:
                    return op, self._of_nothing(op, wide_op)
        raise self.error(op, "it is not linear in what was reduced over the batch")

    def _grown(self, op: Op, wide_op: Op, how: str) -> str:
        """The kind after a product with, or a quotient by, a number that grows with the batch."""
        found = differences(op, wide_op)
        if not found:
            return how
        name, mine, theirs = found[0]
        if len(found) == 1 and name == "other" and all(isinstance(x, (int, float)) for x in (mine, theirs)):
            for times, power in ((self.ratio, product(op)), (1 / self.ratio, -product(op))):
                if math.isclose(theirs, mine * times) and (how, power) in (("sum", -1), ("mean", 1)):
                    return "mean" if power < 0 else "sum"
        raise self._grows(op, *found[0])

    def _scaled(self, op: Op, wide_op: Op, inputs: Sequence[str], how: str) -> Op | None:
        """The operator with its inputs brought to one kind, that of its result; None where this is impossible."""
        rule = find_rule(op)
        adds = additive(op) or (len(inputs) > 1 and rule is not None and rule.is_linear(op))
        if how != "sum" or not adds:
            return op
        if not all(v.dtype.is_floating_point or v.dtype.is_complex for v in (*op.inputs, *op.outputs) if v is not None):
            return op if set(inputs) == {"sum"} and not self._adds_number(op) else None
        shares = {v.name: self._share(op, v) for v, kind in zip(op.inputs, inputs) if kind != "sum"}
        if self._adds_number(op) and not differences(op, wide_op):
            args, kwargs = op.with_arguments(other=op.argument("other") / self.count)
            op = replace(op, args=args, kwargs=kwargs)
        return _reading(op, shares)

    def _adds_number(self, op: Op) -> bool:
        return additive(op) and op.kind != "lerp" and not isinstance(op.argument("other"), Value)

    # -- inserted operators

    def _fresh(self, base: str) -> str:
        name, n = base, 0
        while name in self.names:
            name, n = f"{base}_{n}", n + 1
        self.names.add(name)
        return name

    def _builder(self, op: Op, what: str, values: Iterable[Value]) -> Builder:
        named = replace(op, name=self._fresh(f"{op.name}_{what}"))
        return Builder(named, {v.name: Layout.replicated(1, len(v.shape)) for v in values})

    def _built(self, op: Op, builder: Builder) -> list[Op]:
        return [replace(step, origin=op.name, recompute=op.recompute) for step, *_ in builder.steps]

    def _share(self, op: Op, value: Value) -> Value:
        """value / m"""
        builder = self._builder(op, "share", [value])
        made = builder.call(aten.div.Tensor, value, self.count)
        self.ops += self._built(op, builder)
        if value.name in self.free:
            self.free.add(made.name)
        return made

    def _countable(self, value: Value) -> bool:
        return value.name in self.free

    def _promoted(self, op: Op, which: Sequence[int]) -> Op:
        """The operator with totals in the place of inputs that are reduced over the batch.

        Raises:
            SettingError: an input that does not depend on the model's inputs alone.
        """
        changes = {}
        for i in which:
            value = op.inputs[i]
            if not self._countable(value):
                raise self.error(op, f"it uses {value}, which is reduced over the batch, otherwise than linearly")
            kind = self.kinds[value.name]
            assert isinstance(kind, ReducedOverBatch)
            if kind.how == "mean" and value.name not in self.totals:
                builder = self._builder(op, "share", [value])
                share = builder.call(aten.div.Tensor, value, self.count)
                self.counting += self._built(op, builder)
                changes[value.name] = self._total(value, share)
            else:
                changes[value.name] = self._total(value, value)
        return _reading(op, changes)

    def _total(self, value: Value, term: Value, base: str | None = None) -> Value:
        if value.name not in self.totals:
            self.totals[value.name] = Value(self._fresh(f"{base or value.name}_total"), term.shape, term.dtype), term
        return self.totals[value.name][0]

    def _counted(self, op: Op) -> None:
        """Rewrite a mean with unequal weights as a sum divided by the sum of weights of the whole batch."""
        for name in ("target", "weight"):
            value = op.argument(name)
            if isinstance(value, Value) and value.name not in self.free:
                raise self.error(
                    op,
                    f"its mean is over what counts of all micro-batches, and its {name} {value} does "
                    f"not come from the model's inputs alone",
                    f'micro_batches=1, a {name} made of inputs and buffers alone, or reduction="sum"',
                )
        out = op.outputs[0]
        assert out is not None
        counting = self._builder(op, "count", op.inputs)
        count = counted(counting, op, wide_type(out.dtype))
        self.counting += self._built(op, counting)
        total = self._total(count, count, op.name)
        builder = self._builder(op, "mean", [*op.inputs, total])
        made = builder.to(builder.call(aten.div.Tensor, summed(builder, op), total), out.dtype)
        ops = self._built(op, builder)
        ops[0] = replace(ops[0], name=op.name, mark=op.mark, origin=op.origin, number=op.number)
        ops[-1] = replace(ops[-1], outputs=(out,))
        assert made.name == builder.steps[-1][0].output(0).name
        self.ops += ops


def _statistics(graph: Graph) -> set[str]:
    """The buffers updated with the statistics of a batch norm, and ``num_batches_tracked`` of the same modules."""
    made: set[str] = set()
    for op in graph.ops:
        values = [v.name for v in op.outputs if v is not None]
        if op.target in _BATCH_NORMS:
            made.update(values[1:])
        if any(v.name in made for v in op.inputs):
            made.update(values[1:] if op.target in _BATCH_NORMS else values)
    found = {name for name, value in graph.updates.items() if value.name in made}
    modules = {name.rpartition(".")[0] for name in found}
    return found | {
        name for name in graph.updates if name.rpartition(".")[0] in modules and name.endswith("num_batches_tracked")
    }


def _counts_off(op: Op) -> bool:
    """True for the operator that produces 0, 1, …"""
    return op.kind == "arange" and (op.argument("start", 0), op.argument("step", 1)) == (0, 1)


def _chooses_rows(op: Op, inputs: Sequence[Kind]) -> bool:
    """True where the operator picks one element of each row by other indices, using the row numbers."""
    rows = inputs[0]
    if op.target is not aten.index.Tensor or not isinstance(rows, BatchDim) or rows != BatchDim(rows.dim):
        return False
    kinds = iter(inputs[1:])
    indices = [(x, None if x is None else next(kinds)) for x in op.argument("indices")]
    numbered = [(d, x.shape[k.dim]) for d, (x, k) in enumerate(indices) if isinstance(k, BatchDim) and k.numbers]
    return numbered == [(rows.dim, op.inputs[0].shape[rows.dim])]


def _reading(op: Op, changes: dict[str, Value]) -> Op:
    """The operator with some inputs replaced."""
    if not changes:
        return op
    args, kwargs = map_values((op.args, op.kwargs), lambda v: changes.get(v.name, v))
    return replace(op, args=args, kwargs=kwargs, inputs=tuple(changes.get(v.name, v) for v in op.inputs))


# -- the graph of one micro-batch


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
    alive = []
    for op in reversed(ops):
        names = {v.name for v in op.outputs if v is not None}
        if names & wanted or not names & read:
            alive.append(op)
            wanted |= {v.name for v in op.inputs}
    return tuple(reversed(alive))
