"""What a pipeline may be cut between: the modules of a model that hold parameters, in the order of the program.

    module of an operator   down to its first number ("blocks.3" of "blocks.3.attention.query"), else all of its path,
                            if an operator of it reads a parameter
    unit                    modules whose operators do not read later units': such as call each other in turns are one,
                            and so is a module with the one before it where it has no trained parameter of its own
    other operators         go with what they read, as `stages` has it
    kind                    alike are units of equal operators on equal shapes, which read the same of the one before

A run of alike units is represented by its first: the graph without the others is searched in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any


from ..graph import Graph, Op, Value, map_values
from ..torch_private import pytree
from .stages import placed

__all__ = ["Units", "units_of"]


@dataclass(frozen=True)
class Units:
    """A graph in units.

    Attributes:
        graph: it.
        paths: by unit, its modules.
        of: by operator, its unit.
    """

    graph: Graph
    paths: tuple[tuple[str, ...], ...]
    of: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.paths)

    def on(self, graph: Graph) -> Units:
        """The same units of the same program, captured for other shapes."""
        of = {other.name: self.of[op.name] for op, other in zip(self.graph.ops, graph.ops)}
        made = Units(graph, self.paths, of)
        made.__dict__["representative"] = self.representative
        return made

    @cached_property
    def members(self) -> tuple[tuple[Op, ...], ...]:
        """The operators of each."""
        out: list[list[Op]] = [[] for _ in self.paths]
        for op in self.graph.ops:
            out[self.of[op.name]].append(op)
        return tuple(map(tuple, out))

    @cached_property
    def readers(self) -> dict[str, tuple[int, ...]]:
        """Value name -> the units that read it, in order."""
        out: dict[str, set[int]] = {}
        for op in self.graph.ops:
            for v in op.inputs:
                out.setdefault(v.name, set()).add(self.of[op.name])
        return {name: tuple(sorted(units)) for name, units in out.items()}

    @cached_property
    def homes(self) -> dict[str, int]:
        """Parameter, by its value's name -> the first unit that reads it."""
        return {v.name: self.readers[v.name][0] for v in self.graph.parameters.values() if v.name in self.readers}

    @cached_property
    def crossing(self) -> tuple[tuple[str, ...], ...]:
        """By unit but the last, the values that it and those before make and later ones read."""
        out: list[list[str]] = [[] for _ in range(len(self) - 1)]
        for op in self.graph.ops:
            for v in op.outputs:
                last = self.readers.get(v.name, (0,))[-1] if v is not None else 0
                for border in range(self.of[op.name], last):
                    out[border].append(v.name)
        return tuple(map(tuple, out))

    @cached_property
    def last(self) -> frozenset[int]:
        """The units that make the model's outputs."""
        makers = self.graph.producers()
        return frozenset(self.of[makers[v.name].name] for v in self.graph.outputs
                         if isinstance(v, Value) and v.name in makers)

    @cached_property
    def representative(self) -> tuple[int, ...]:
        """By unit, the first of the run of alike units that it is in."""
        forms = _Forms(self)
        out: list[int] = []
        for unit in range(len(self)):
            alike = unit > 0 and forms.of(unit) == forms.of(unit - 1)
            out.append(out[-1] if alike else unit)
        return tuple(out)

    @cached_property
    def same(self) -> dict[str, Value]:
        """Value that a unit makes -> the one in its place in the unit's representative."""
        out = {}
        for unit, first in enumerate(self.representative):
            if first != unit:
                for op, other in zip(self.members[unit], self.members[first]):
                    out.update((v.name, w) for v, w in zip(op.outputs, other.outputs) if v is not None)
        return out

    @cached_property
    def reduced(self) -> Graph:
        """The graph with the representatives alone."""
        graph = self.graph
        change = lambda v: self.same.get(v.name, v)  # noqa: E731
        ops = tuple(_changed(op, change) for op in graph.ops
                    if self.representative[self.of[op.name]] == self.of[op.name])
        read = {v.name for op in ops for v in op.inputs}
        held = lambda table: {n: v for n, v in table.items() if v.name in read}  # noqa: E731
        parameters, buffers = held(graph.parameters), held(graph.buffers)
        return replace(graph, ops=ops, parameters=parameters, buffers=buffers,
                       constants={n: t for n, t in graph.constants.items() if n in read},
                       outputs=tuple(map_values(v, change) for v in graph.outputs),
                       updates={n: change(v) for n, v in graph.updates.items() if n in buffers},
                       aliases={a: n for a, n in graph.aliases.items() if n in parameters or n in buffers})


def _changed(op: Op, change: Any) -> Op:
    args, kwargs = map_values((op.args, op.kwargs), change)
    return replace(op, args=args, kwargs=kwargs, inputs=tuple(map(change, op.inputs)))


def units_of(graph: Graph) -> Units:
    """The units of a graph. One that cannot be cut is one unit."""
    groups = _modules(graph)
    while len(groups) > 1:
        pair = _backwards(graph, groups) or _without_own(graph, groups)
        if pair is None:
            break
        first, last = pair
        groups[first:last + 1] = [[path for group in groups[first:last + 1] for path in group]]
    of = placed(graph, _stage_of(groups), max(len(groups), 1))
    return Units(graph, tuple(map(tuple, groups)) or ((),), of)


def _stage_of(groups: list[list[str]]) -> dict[str, int]:
    return {path: i for i, group in enumerate(groups) for path in group}


def _module(path: str) -> tuple[str, bool]:
    """A module's path down to its first number, and whether it has one."""
    parts = path.split(".")
    first = next((k for k, part in enumerate(parts) if part.isdigit()), None)
    return (path, False) if first is None else (".".join(parts[:first + 1]), True)


def _modules(graph: Graph) -> list[list[str]]:
    """The modules that read parameters, in the order of their first operators; one around numbered ones is none."""
    own = {v.name for v in graph.parameters.values()}
    reading = {_module(op.module) for op in graph.ops if any(v.name in own for v in op.inputs)}
    around = {".".join(path.split(".")[:k]) for path, numbered in reading if numbered
              for k in range(path.count(".") + 1)}
    wanted = {path for path, numbered in reading if path and (numbered or path not in around)}
    order = dict.fromkeys(_module(op.module)[0] for op in graph.ops)
    return [[path] for path in order if path in wanted]


def _backwards(graph: Graph, groups: list[list[str]]) -> tuple[int, int] | None:
    """Two groups of which the first reads what the other makes, or None."""
    modules, makers, found = _stage_of(groups), graph.producers(), dict[str, int]()
    for op in graph.ops:
        latest = max((found[makers[v.name].name] for v in op.inputs
                      if v.name in makers and makers[v.name].name in found), default=None)
        path: str | None = op.module
        while path and path not in modules:
            path = path.rpartition(".")[0]
        own = modules.get(path) if path else None
        if own is not None and latest is not None and latest > own:
            return own, latest
        if own is not None or latest is not None:
            found[op.name] = latest if own is None else own
    return None


def _without_own(graph: Graph, groups: list[list[str]]) -> tuple[int, int] | None:
    """A group without a trained parameter that it reads first, and its neighbour; or None."""
    units = Units(graph, tuple(map(tuple, groups)), placed(graph, _stage_of(groups), len(groups)))
    trained = {units.homes[v.name] for v in graph.parameters.values() if v.requires_grad and v.name in units.homes}
    without = next((i for i in range(len(groups)) if i not in trained), None)
    return None if without is None else (max(without - 1, 0), max(without, 1))


class _Forms:
    """What tells units apart."""

    def __init__(self, units: Units) -> None:
        self.units, self.places = units, {}
        for members in units.members:
            for k, op in enumerate(members):
                self.places.update((v.name, (units.of[op.name], k, i)) for i, v in enumerate(op.outputs)
                                   if v is not None)
        graph = units.graph
        self.held = {v.name: "parameter" for v in graph.parameters.values()} | \
            {v.name: "buffer" for v in graph.buffers.values()}
        self.known: dict[int, tuple] = {}

    def of(self, unit: int) -> tuple:
        """Equal for units that are alike."""
        if unit not in self.known:
            seen: dict[str, int] = {}
            self.known[unit] = tuple(self.operator(op, unit, seen) for op in self.units.members[unit])
        return self.known[unit]

    def operator(self, op: Op, unit: int, seen: dict[str, int]) -> tuple:
        leaves, spec = pytree.tree_flatten((op.args, op.kwargs))
        mark = None if op.mark is None else (op.mark.in_strategy, op.mark.out_strategy)
        outputs = tuple(None if v is None else (v.shape, v.dtype, v.requires_grad) for v in op.outputs)
        again = None if op.recompute is None else replace(op.recompute, call=0, path="")
        return (str(op.target), tuple(self.leaf(leaf, unit, seen) for leaf in leaves), str(spec), outputs, repr(mark),
                again)

    def leaf(self, leaf: Any, unit: int, seen: dict[str, int]) -> Any:
        if not isinstance(leaf, Value):
            return repr(leaf)
        kind = (leaf.shape, leaf.dtype, leaf.requires_grad)
        place = self.places.get(leaf.name)
        if place is not None and unit - 1 <= place[0] <= unit:
            return (unit - place[0], *place[1:], *kind)
        own = self.units.readers[leaf.name] == (unit,)
        if leaf.name in self.held and own:
            return (self.held[leaf.name], seen.setdefault(leaf.name, len(seen)), *kind)
        return leaf.name, *kind
