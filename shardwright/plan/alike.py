"""Stages that are alike are planned once: what was decided for one holds for the others, in the same places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any


from ..graph import Graph, Value
from ..torch_private import pytree
from .decision import Feeding
from .plan import Plan

__all__ = ["Alike"]


class Alike:
    """A planner of stages that knows what it has planned.

    Args:
        planner: (graph, devices, fed, number) -> Plan.
        whole: names of parameters that are never stored cut.
    """

    def __init__(self, planner: Callable[[Graph, int, Feeding, int], Plan],
                 whole: frozenset[str] = frozenset()) -> None:
        self.planner, self.whole = planner, whole
        self.known: list[tuple[Any, Plan]] = []

    def __call__(self, graph: Graph, devices: int, fed: Feeding, number: int) -> Plan:
        """The plan of a stage."""
        if number < 0:
            return self.planner(graph, devices, fed, number)
        form = (tuple(name in self.whole for name in graph.parameters), *_form(graph, fed, devices))
        for other, plan in self.known:
            if other == form:
                return _taken(plan, graph, fed)
        plan = self.planner(graph, devices, fed, number)
        self.known.append((form, plan))
        return plan


def _taken(plan: Plan, graph: Graph, fed: Feeding) -> Plan:
    """The plan of a graph that is alike to the plan's."""
    names = dict(zip(_values(plan.graph), _values(graph)))
    names.update((a.name, b.name) for a, b in zip(plan.graph.ops, graph.ops))
    decisions = {}
    for op, before in zip(graph.ops, plan.decisions.values()):
        origin, via = (names.get(name, name) for name in (before.origin, before.via))
        decisions[op.name] = replace(before, op=op, origin=origin, via=via)
    carries = {names.get(name, name): dim for name, dim in plan.carries.items()}
    return replace(plan, graph=graph, fed=fed, decisions=decisions, carries=carries)


def _values(graph: Graph) -> Iterator[str]:
    """All values by name, in an order that graphs which are alike share."""
    for value in (*graph.inputs, *graph.parameters.values(), *graph.buffers.values()):
        yield value.name
    yield from graph.constants
    for op in graph.ops:
        yield from (v.name for v in op.outputs if v is not None)


def _form(graph: Graph, fed: Feeding, devices: int) -> Iterator[Any]:
    """What decides the plan of a stage, with numbers for names."""
    number = {name: k for k, name in enumerate(_values(graph))}
    calls: dict[int, int] = {}

    def leaf(x: Any) -> Any:
        return ("value", number[x.name]) if isinstance(x, Value) else repr(x)

    yield devices, fed.inputs, fed.own_part, fed.batch, len(graph.parameters), len(graph.buffers)
    for value in (*graph.inputs, *graph.parameters.values(), *graph.buffers.values()):
        yield value.shape, value.dtype, value.requires_grad, value.master, (graph.batch or {}).get(value.name)
    for name, tensor in graph.constants.items():
        yield tuple(tensor.shape), tensor.dtype, tensor.tolist() if tensor.numel() < 64 else id(tensor)
    for op in graph.ops:
        leaves, spec = pytree.tree_flatten((op.args, op.kwargs))
        mark = None if op.mark is None else (op.mark.in_strategy, op.mark.out_strategy)
        again = op.recompute and replace(op.recompute, call=calls.setdefault(op.recompute.call, len(calls)), path="")
        outputs = tuple(None if v is None else (v.shape, v.dtype, v.requires_grad) for v in op.outputs)
        yield op.target, tuple(map(leaf, leaves)), str(spec), outputs, repr(mark), again
    for x in graph.outputs:
        yield leaf(x), fed.kept.get(x.name) if isinstance(x, Value) else None
    yield tuple((number[graph.buffers[n].name], leaf(v)) for n, v in graph.updates.items())
