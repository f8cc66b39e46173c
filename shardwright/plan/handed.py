"""What a planner decided, without the graph that it decided on: what one rank hands to others that hold the same graph.

    decisions + what the search found = Handed + graph

A document (`document`) holds more, for those who have no model: the graph, and figures for its reader. What follows
from a graph, each operator's description and shapes, is never sent: each rank has it from its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..graph import Graph, Recompute, changed, types_of
from ..layout import Digits, Layout
from .decision import Decided, Decision, Found, description
from .storage import OptimizerParallel

__all__ = ["Handed", "graph_digest"]


@dataclass(frozen=True)
class _Operator:
    """A `Decision` by what is not its operator's: fields as there."""

    digits: tuple[Digits, ...]
    out: tuple[Layout, ...] | None
    cause: str
    note: str | None
    open: Digits | None
    origin: str
    via: str
    recompute: Recompute | None


@dataclass(frozen=True)
class Handed:
    """A `Decided` without its graph; it can be pickled.

    Attributes:
        operators: by name, in the order of the program.
        carries, found, hsdp: as of `Decided`.
    """

    operators: dict[str, _Operator]
    carries: dict[str, int]
    found: Found | None
    hsdp: OptimizerParallel | None

    @classmethod
    def of(cls, decided: Decided) -> Handed:
        """What was decided."""
        return cls({name: _Operator(d.assignment.digits, d.out, d.cause, d.note, d.open, d.origin, d.via,
                                    d.op.recompute) for name, d in decided.decisions.items()},
                   decided.carries, decided.found, decided.hsdp)

    def onto(self, graph: Graph, devices: int, *, on_missing_rule: str = "error", uneven: bool = False) -> Decided:
        """The same decisions of another copy of the graph, equal to those that were handed in.

        Args:
            graph: of the same `graph_digest`.
            on_missing_rule, uneven: as the planner was given them.
        """
        decisions = {}
        for op in graph.ops:
            said = self.operators[op.name]
            rule, bound, _ = description(op, on_missing_rule, devices, uneven)
            assignment = replace(bound.whole(devices), digits=said.digits)
            decisions[op.name] = Decision(changed(op, recompute=said.recompute), rule, bound, assignment, said.out,
                                          said.cause, said.note, said.open, said.origin, said.via)
        return Decided(decisions, self.carries, self.found, self.hsdp)


def graph_digest(graph: Graph) -> str:
    """A short hash of what two ranks' graphs must have in common for decisions on one to hold on the other: operators,
    marks, shapes and dtypes. Whatever else differs, plans' fingerprints tell."""
    text = hashlib.sha256()
    for line in _lines(graph):
        text.update(line.encode() + b"\n")
    return text.hexdigest()[:16]


def _lines(graph: Graph) -> Iterator[str]:
    for table in ({v.name: v for v in graph.inputs}, graph.parameters, graph.buffers):
        for name, value in table.items():
            yield f"{name} {value.name} {value.shape} {value.dtype} {value.requires_grad} {value.master}"
    for op in graph.ops:
        mark = None if op.mark is None else (op.mark.in_strategy, op.mark.out_strategy, op.mark.priority)
        yield f"{op.name} {op.kind} {op.inputs} {types_of(op)} {mark} {op.recompute}"
