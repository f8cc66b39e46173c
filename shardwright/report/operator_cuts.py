"""The cuts of each operator in the field's words: data, column, row, heads, vocabulary, expert, sequence, spatial.

1. Roles: each dim of each value has a role, from where it comes.

    inputs       batch, sequence, feature; of an image the pixels' dims: spatial
    parameters   weight
    results      by the factors of the operator: a factor has the role of the first input's dim that carries it

   A dim made of several (``view``) has several roles, major first; ``sizes`` say how they share it.

2. Cuts: a cut factor of an operator has a word, from the factor's role and its place in the operator.

    batch                                              data
    sequence, spatial                                  sequence, spatial
    in a weight and in the result, not in the input    column; of an embedding's rows, or a head as wide: vocabulary
    in a weight and in the input, not in the result    row
    in a weight, in the input and in the result        expert, of a product; otherwise feature
    a batch dim of attention that is no batch          heads

Example: a linear of x [batch, sequence, in] and weight [out, in] with the batch cut 2 ways and out cut 4 ways has the
cuts ``data`` by 2 and ``column`` by 4: Megatron's column parallel layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..graph import Graph, Op, Value
from ..layout import Digits, digits_size
from ..partition.local_program import Decision
from ..sharded_plan import Plan

__all__ = ["FactorCut", "OperatorCuts", "operator_cuts", "vocabularies"]

#: A part of a dim: (role, size), major first.
Dim = tuple[tuple[str, int], ...]
Dims = tuple[Dim, ...]


@dataclass(frozen=True)
class FactorCut:
    """A factor of an operator that a plan cuts.

    Attributes:
        word: "data", "sequence", "spatial", "column", "row", "vocabulary", "heads", "expert" or "feature".
        digits: the digits of the rank that cut it.
    """

    word: str
    digits: Digits

    @property
    def size(self) -> int:
        """The number of parts."""
        return digits_size(self.digits)


@dataclass(frozen=True)
class OperatorCuts:
    """An operator with its cuts.

    Attributes:
        decision: the operator and its strategy.
        cuts: the factors that are cut.
        main: True for an operator that a reader names a layer's parallelism by: a product, a convolution, an attention
            or an embedding. All others lie between these.
        weighted: True where it reads a parameter.
    """

    decision: Decision
    cuts: tuple[FactorCut, ...]
    main: bool
    weighted: bool

    @property
    def op(self) -> Op:
        """The operator."""
        return self.decision.op


def operator_cuts(
    plan: Plan, shared: frozenset[str] = frozenset(), rows: frozenset[int] | None = None
) -> tuple[OperatorCuts, ...]:
    """The operators of a plan, in program order, with their cuts.

    Args:
        plan: the plan.
        shared: of a stage of a pipeline, the inputs that are parameters of other stages.
        rows: of a stage, the rows of embeddings in the whole model; None: those of the plan's.
    """
    return tuple(_Roles(plan, shared, vocabularies(plan.graph) if rows is None else rows).run())


def vocabularies(graph: Graph) -> frozenset[int]:
    """The numbers of rows of a graph's embeddings; a head as wide makes scores of a vocabulary."""
    return frozenset(
        next(v.shape[0] for v in op.inputs if v.dtype.is_floating_point)
        for op in graph.ops
        if op.kind == "embedding" and any(v.dtype.is_floating_point for v in op.inputs)
    )


class _Roles:
    """The roles of all values, and with them the words of all cuts."""

    def __init__(self, plan: Plan, shared: frozenset[str], rows: frozenset[int]) -> None:
        self.plan, self.vocabularies, graph = plan, rows, plan.graph
        images = any(d.bound.windowed or d.op.kind.startswith("conv") for d in plan.decisions.values())
        self.known: dict[str, Dims] = {}
        for value in (v for v in graph.inputs if v.name not in shared):
            self.known[value.name] = _of_input(value, plan.batch_dims.get(value.name), images)
        for value in (*graph.inputs, *graph.sources()):
            if value.name not in self.known:
                self.known[value.name] = tuple((("weight", size),) for size in value.shape)

    def run(self) -> Iterator[OperatorCuts]:
        for decision in self.plan.decisions.values():
            op, bound = decision.op, decision.bound
            inputs = [self._dims(value) for value in op.inputs]
            roles = self._factors(decision, inputs)
            weights = {i for i, dims in enumerate(inputs) if dims and all(s[0] == "weight" for d in dims for s in d)}
            for i, value in enumerate(op.outputs):
                if value is not None and i < len(bound.outputs):
                    self.known[value.name] = tuple(
                        _joined([(roles[f], bound.factors[f].size) for f in dim]) or (("", size),)
                        for dim, size in zip(bound.outputs[i], value.shape)
                    )
            main = _is_main(decision, weights)
            cuts = tuple(
                FactorCut(self._word(decision, f, roles[f], weights, main), digits)
                for f, digits in enumerate(decision.assignment.digits)
                if digits
            )
            yield OperatorCuts(decision, cuts, main, bool(weights))

    def _dims(self, value: Value) -> Dims:
        return self.known.get(value.name) or tuple((("", size),) for size in value.shape)

    def _factors(self, decision: Decision, inputs: list[Dims]) -> list[str]:
        """The role of each factor; one of an activation goes before that of a weight."""
        bound, roles = decision.bound, [""] * len(decision.bound.factors)
        for dims, named in zip(inputs, bound.inputs):
            for parts, factors in zip(dims, named):
                sizes = [bound.factors[f].size for f in factors]
                for place, f in enumerate(factors):
                    role = _part(parts, math.prod(sizes[:place]))
                    if roles[f] in ("", "weight") and role:
                        roles[f] = role if role != "weight" or not roles[f] else roles[f]
        made = {f for dims in bound.outputs for dim in dims for f in dim}
        product = any(f not in made for dims in bound.inputs for dim in dims for f in dim)
        activations = [dims for dims in inputs if any(s[0] not in ("", "weight") for d in dims for s in d)]
        for f, role in enumerate(roles):
            if role == "weight" and activations and (product or decision.op.kind == "embedding"):
                roles[f] = "expert" if self._in_activation(decision, inputs, f) else "feature"
            elif role == "weight" and activations:
                roles[f] = "feature"
        return roles

    @staticmethod
    def _in_activation(decision: Decision, inputs: list[Dims], factor: int) -> bool:
        """True where an input that is no weight carries the factor."""
        return any(
            any(s[0] != "weight" for d in dims for s in d) and any(factor in dim for dim in named)
            for dims, named in zip(inputs, decision.bound.inputs)
        )

    def _word(self, decision: Decision, factor: int, role: str, weights: set[int], main: bool) -> str:
        bound, op = decision.bound, decision.op
        carriers = {i for i, dims in enumerate(bound.inputs) if any(factor in dim for dim in dims)}
        made = any(factor in dim for dims in bound.outputs for dim in dims)
        weighed = carriers & weights
        if main and weighed and carriers - weights and not made and op.kind != "embedding":
            return "row"
        if role in ("batch", "sequence", "spatial"):
            return "data" if role == "batch" else role
        if not main:
            return "feature"
        if op.kind == "embedding":
            return "column" if made else "vocabulary"
        if weighed and carriers - weights:
            # Groups of a convolution lie in its weight's first dim, like channels.
            return "column" if op.kind.startswith("conv") else "expert"
        if weighed:
            wide = bound.factors[factor].size in self.vocabularies
            return "vocabulary" if wide and not _numbers(op.module) else "column"
        if not weights and made and len(carriers) > 1:
            return "heads"
        return "feature"


def _of_input(value: Value, batch: int | None, images: bool) -> Dims:
    """The roles of an input's dims, by its rank and dtype."""
    rank, whole = len(value.shape), not value.dtype.is_floating_point and not value.dtype.is_complex
    if images and rank >= 4:
        names = ["batch", "feature", *["spatial"] * (rank - 2)]
    elif whole or rank < 3:
        names = ["batch", *["sequence" if whole else "feature"] * (rank - 1)]
    else:
        names = ["batch", *["sequence"] * (rank - 2), "feature"]
    if batch:
        names[0], names[batch] = names[batch], "batch"
    return tuple(((word, size),) for word, size in zip(names, value.shape))


def _joined(parts: list[tuple[str, int]]) -> Dim:
    """The roles of a dim made of several factors; pixels joined to one dim are a sequence."""
    parts = [part for part in parts if part[1] > 1] or parts[:1]
    if len(parts) > 1 and all(role == "spatial" for role, _ in parts):
        return (("sequence", math.prod(size for _, size in parts)),)
    return tuple(parts)


def _part(parts: Dim, before: int) -> str:
    """The role of the part of a dim that begins after `before` steps from its major end."""
    done = 1
    for role, size in parts:
        done *= size
        if before < done:
            return role
    return parts[-1][0] if parts else ""


def _is_main(decision: Decision, weights: set[int]) -> bool:
    op, bound = decision.op, decision.bound
    kind = op.kind
    if kind == "embedding" or "attention" in kind or kind.startswith("conv"):
        return True
    made = {f for dims in bound.outputs for dim in dims for f in dim}
    shared = [{f for dim in dims for f in dim} - made for dims in bound.inputs]
    return kind in PRODUCTS or (
        len(shared) > 1 and bool(shared[0] & shared[1]) and "loss" not in kind and bool(weights)
    )


#: Products by their plain names.
PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "_grouped_mm", "bilinear"})


def _numbers(module: str) -> bool:
    """True for a module inside of a numbered one, a layer."""
    return any(part.isdecimal() for part in module.split(".")[:-1])
