"""What a plan's choices hold in memory, and what they may let go and make again: an `Energy` with usages and a limit.

    moments     forward of operator k of n: k;  results are handed out: n, and their gradients come in: n + 1;
                backward of operator k: 2n + 1 - k
    always      parameters, gradients, optimizer state as stored; inputs, buffers, constants
    source      an operator's output, as it is left: up to where the one that reads it has its own; where several read
                it, up to the last, together with the use that is served once
    delivered   an operator's input, as it asks for it: while it runs
    kept        a node of its own for a value (`Keeping`): what some backward wants of it, from there to that backward
    gathered    a parameter that is stored cut: from its first use to its last backward, or only around either
    backward    gradients of inputs while an operator's backward runs; of an output from its last reader's on

A `Keeping` is absent (nobody wants it), kept (as its reader has it, or as its maker left it, or both where these
differ), or dropped: made again by its operator, which costs its forward once more. Nothing is sent again: a value can
be dropped where it is read with as many bytes as it was left with, which as a rule is the same layout; what an
all-to-all in between has brought is kept all the same. What an operator reads that runs again has to be kept, or
dropped in the same segment of the program; what is dropped counts from the backward of its segment's end.

The estimate is that of `memory.timeline` where nothing is converted or dropped, but that a view of what is kept may
count once more. It is above where a value is dropped, for longer than need be; and may be below where one is
converted, whose two ends are not counted at the same moment.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..graph import Op, Value
from ..layout import Layout
from .decision import Feeding, output_layouts
from .energy import Energy, Shared
from .footprint import Footprint
from .keeping import Keeps, keeps
from .problem import Problem, Usage
from .segments import segments_of
from .storage import OptimizerParallel

__all__ = ["Holding", "holding"]

ABSENT, KEPT, DROPPED = "absent", "kept", "dropped"


class Keeping(NamedTuple):
    """A state of what is kept of a value.

    Attributes:
        how: "absent", "kept" or "dropped".
        layout: in which it is both left and read, where the state says that these are one.
        made, read: bytes of the tensor as it was left, and of another as it is read.
    """

    how: str
    layout: Layout | None
    made: int
    read: int


@dataclass(frozen=True)
class Holding:
    """An energy with memory.

    Attributes:
        energy: its problem has a limit, usages, and the nodes of what is kept.
        kept: by value, the node of what is kept of it.
        states: by value, that node's states.
        segments: by operator, the segment of the program that it is in.
        views: operators that only view what they read.
    """

    energy: Energy
    kept: dict[str, int]
    states: dict[str, tuple[Keeping, ...]]
    segments: dict[str, int]
    views: frozenset[str]

    def recomputed(self, states: tuple[int, ...]) -> frozenset[str]:
        """The operators that run again; a view comes again with what it views."""
        made = self.energy.described.graph.producers()
        return frozenset(made[v].name for v, node in self.kept.items()
                         if self.states[v][states[node]].how == DROPPED) - self.views

    def storage(self, states: tuple[int, ...]) -> OptimizerParallel | None:
        """The setting that stores parameters as the states say."""
        whole, kept, cut = set(), set(), False
        graph = self.energy.described.graph
        names = {value.name: name for name, value in graph.parameters.items()}
        for value, node in self.energy.parameters.items():
            state = self.energy.storages[value][states[node]]
            if state.stored == state.layout:
                whole.add(names[value])
            else:
                cut = True
                if not state.again:
                    kept.add(names[value])
        if not cut:
            return None
        return OptimizerParallel(-1, 0, "level3", frozenset(whole), frozenset(kept))

    def peak(self, states: tuple[int, ...]) -> float:
        """The most bytes that the states hold at any moment, as the problem reckons them."""
        uses = self.energy.problem.usages
        changes = np.zeros(max((u.stop for u in uses), default=0) + 1)
        for u in uses:
            changes[u.start] += u.amount[states[u.node]]
            changes[u.stop] -= u.amount[states[u.node]]
        return float(np.cumsum(changes).max(initial=0.0))


def holding(energy: Energy, fed: Feeding, carries: Mapping[str, int], limit: float, state: float) -> Holding:
    """The problem with memory.

    Args:
        fed: how inputs come in and results go out.
        carries: value name -> the dim that carries the batch.
        limit: bytes a device.
        state: bytes of an optimizer's state for each element of a parameter.
    """
    return _Holder(energy, fed, carries, limit, state).run()


class _Holder:
    def __init__(self, energy: Energy, fed: Feeding, carries: Mapping[str, int], limit: float, state: float) -> None:
        self.energy, self.graph, self.fed, self.limit, self.state = energy, energy.described.graph, fed, limit, state
        self.place = {op.name: k for k, op in enumerate(self.graph.ops)}
        self.count = len(self.graph.ops)
        grads = any(isinstance(v, Value) and v.requires_grad for v in self.graph.outputs)
        self.end = 2 * self.count + 2 if grads else self.count + 1
        self.grads = grads
        self.consumers = {name: list({op.name: (op, i) for op, i in reversed(readers)}.values())[::-1]
                          for name, readers in self.graph.consumers().items()}
        self.segments = segments_of(self.graph)
        last: dict[int, int] = {}
        for name, segment in self.segments.items():
            last[segment] = self.place[name]
        self.segment_end = {name: last[segment] for name, segment in self.segments.items()}
        outputs = [v for v in self.graph.outputs if isinstance(v, Value)]
        devices = energy.described.devices
        self.ends = {v.name: Layout.replicated(devices, len(v.shape)) for v in self.graph.updates.values()}
        self.ends |= {v.name: to for v, to in zip(outputs, output_layouts(outputs, devices, fed, dict(carries)))}
        self.usages: list[tuple[Any, int, int, np.ndarray, str]] = []
        self.known: dict[Hashable, Any] = {}
        self.kept: dict[str, tuple[Keeping, ...]] = {}
        self.edges: dict[tuple[Any, Any], np.ndarray] = {}
        self.made_by: dict[str, tuple[Op, int]] = {}

    # -- what is known of operators --

    def prints(self, op: Op) -> tuple[Footprint, ...]:
        return self.energy.footprints[op.name]

    def once(self, key: Hashable, make: Any) -> Any:
        """Made once; equal arrays are then one object."""
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def keeps(self, op: Op) -> Keeps:
        """What an operator's backward needs, as its first strategy has it."""
        prints = self.prints(op)
        return self.once(("keeps", id(prints)), lambda: keeps(prints[0]))

    def own(self, op: Op) -> np.ndarray:
        """Bytes of what is kept that is neither an input nor an output, by strategy."""
        prints, first = self.prints(op), self.keeps(op)

        def count() -> np.ndarray:
            plain = [len(p.program) == 1 for p in prints]
            none = not first.own and plain[0]
            return np.array([0 if none and one else keeps(p).own for p, one in zip(prints, plain)], dtype=np.float64)
        return self.once(("own", id(prints)), count)

    def saves_input(self, op: Op, index: int) -> bool:
        same = {i for i, v in enumerate(op.inputs) if v.name == op.inputs[index].name}
        return self.grads and bool(same & self.keeps(op).inputs)

    def saves_output(self, op: Op, index: int) -> bool:
        return self.grads and index in self.keeps(op).outputs

    def is_view(self, op: Op) -> bool:
        outputs = sum(v is not None for v in op.outputs)
        return outputs > 0 and len(self.keeps(op).views) == outputs

    def bytes_of(self, value: Value, layout: Layout) -> int:
        def count() -> int:
            layout_ = layout.without_partial()
            return math.prod(layout_.local_shape(layout_.padded(value.shape))) * value.dtype.itemsize
        return self.once(("bytes", value.shape, value.dtype, layout), count)

    def left(self, op: Op, index: int, value: Value) -> np.ndarray:
        """Bytes of an output as it is left, by strategy."""
        prints = self.prints(op)
        return self.once(("left", id(prints), index), lambda: np.array(
            [self.bytes_of(value, p.leaves[index]) for p in prints], dtype=np.float64))

    def wanted(self, op: Op, index: int, value: Value) -> np.ndarray:
        """Bytes of an input as it is asked for, by strategy."""
        prints = self.prints(op)
        return self.once(("wanted", id(prints), index), lambda: np.array(
            [sum(self.bytes_of(value, want) for want in {use.want for use in p.asks[index]}) for p in prints],
            dtype=np.float64))

    # -- usages --

    def use(self, node: Any, start: int, stop: int, amount: np.ndarray, what: str) -> None:
        if stop > start and amount.any():
            self.usages.append((node, start, min(stop, self.end), amount, what))

    def back(self, place: int) -> int:
        """The moment of an operator's backward."""
        return 2 * self.count + 1 - place

    def run(self) -> Holding:
        self.standing()
        for name, value in self.graph.parameters.items():
            if value.name in self.energy.parameters:
                self.parameter(value)
        for op in self.graph.ops:
            self.operator(op)
            for k, value in enumerate(v for v in op.outputs if v is not None):
                self.made_by[value.name] = op, k
                self.made(op, k, value)
        for op in self.graph.ops:
            self.chain(op)
        return self.finish()

    def standing(self) -> None:
        """What every plan holds; it stands with the first node."""
        fixed = sum(self.bytes_of(v, layout) for v, layout in zip(self.graph.inputs, self.fed.inputs))
        fixed += sum(t.numel() * t.element_size() for t in self.graph.constants.values())
        fixed += sum(v.nbytes for v in self.graph.buffers.values())
        used = self.energy.parameters
        for v in self.graph.parameters.values():
            if v.name not in used:
                fixed += v.nbytes * (2 if v.requires_grad else 1) + int(v.numel * self.state * v.requires_grad)
        if self.energy.problem.costs:
            self.use(0, 0, self.end, np.full(len(self.energy.problem.costs[0]), float(fixed)), "inputs")

    def parameter(self, value: Value) -> None:
        node, states = self.energy.parameters[value.name], self.energy.storages[value.name]
        stored = np.array([self.bytes_of(value, s.stored) for s in states], dtype=np.float64)
        if value.requires_grad:
            stored = stored * (2 + self.state / value.dtype.itemsize)
        self.use(node, 0, self.end, stored, "parameters")
        cut = np.array([s.stored != s.layout for s in states])
        if not cut.any():
            return
        readers = self.consumers[value.name]
        whole = np.array([self.bytes_of(value, s.layout) for s in states], dtype=np.float64)
        again = np.array([s.again for s in states])
        places = [self.place[op.name] for op, _ in readers]
        saves = [self.place[op.name] for op, i in readers if self.saves_input(op, i)]
        first, last = min(places), max(places)
        if saves:
            self.use(node, first, self.back(min(saves)) + 1, whole * (cut & ~again), "gathered")
            self.use(node, first, last + 1, whole * (cut & again), "gathered")
            self.use(node, self.back(max(saves)), self.back(min(saves)) + 1, whole * (cut & again), "gathered")
        else:
            self.use(node, first, last + 1, whole * cut, "gathered")
        if value.requires_grad and self.grads:
            self.use(node, self.back(last), self.back(first) + 1, whole * cut, "backward")

    def operator(self, op: Op) -> None:
        """What an operator holds of its own, and of its inputs while it runs."""
        node, here = self.energy.operators[op.name], self.place[op.name]
        grads = self.grads
        if grads:
            self.use(node, here, self.back(here) + 1, self.own(op), "activations")
        if self.is_view(op):
            return
        for value, index in {v.name: (v, i) for i, v in reversed(list(enumerate(op.inputs)))}.values():
            if value.name not in self.made_by:
                if value.name not in self.energy.parameters:
                    self.given(op, index, value)
                continue
            maker, k = self.made_by[value.name]
            if value.name not in self.energy.shared and not self.saves_output(maker, k):
                self.use(node, here, here + 1, self.wanted(op, index, value), "delivered")
            if grads and value.requires_grad:
                self.use(node, self.back(here), self.back(here) + 1, self.wanted(op, index, value), "backward")

    def given(self, op: Op, index: int, value: Value) -> None:
        """An input of the program, a buffer or a constant: there is more of it where it is converted."""
        node, here, prints = self.energy.operators[op.name], self.place[op.name], self.prints(op)
        at = dict(zip((v.name for v in self.graph.inputs), self.fed.inputs)).get(value.name)
        amount = np.array([0 if all(use.want == at or at is None and use.want.is_replicated for use in p.asks[index])
                           else w for p, w in zip(prints, self.wanted(op, index, value))], dtype=np.float64)
        self.use(node, here, (self.back(here) if self.saves_input(op, index) else here) + 1, amount, "activations")

    def made(self, op: Op, k: int, value: Value) -> None:
        """A value that an operator makes: up to its last reader, and beyond where some backward wants it."""
        node, here = self.energy.operators[op.name], self.place[op.name]
        left, readers = self.left(op, k, value), self.consumers.get(value.name, [])
        places = [self.place[reader.name] for reader, _ in readers]
        ends, last = value.name in self.ends, max(places, default=here)
        shared = self.energy.shared.get(value.name)
        if ends:  # what is handed out is there to the end; where it is converted, for a while so is its source
            to = self.ends[value.name]
            handed = np.array([float(self.bytes_of(value, to) * (p.leaves[k] != to)) for p in self.prints(op)])
            self.use(node, self.count, self.end, handed, "activations")
            if self.grads and value.requires_grad:
                self.use(node, self.count + 1, self.count + 2, handed, "backward")
        if self.grads and value.requires_grad and (readers or ends):
            start = self.count + 1 if ends else self.back(last) + 1
            self.use(node, start, self.back(here) + 1, left, "backward")
        if shared is not None:
            self.held_for_several(value, shared, here, min(places), self.end if ends else last + 1)
        elif ends:
            self.use(node, here, self.count + 1, left, "activations")
            self.use(node, self.count + 1, self.end, left * (handed == 0), "activations")
        elif not readers:
            self.use(node, here, here + 1, left, "activations")
        elif not self.saves_output(op, k):
            self.use(node, here, last, left, "activations")
        if not ends and readers:
            self.keep(op, k, value, readers)

    def held_for_several(self, value: Value, node: int, here: int, first: int, stop: int) -> None:
        states = self.energy.shares[value.name]
        left = np.array([self.bytes_of(value, s.left) for s in states], dtype=np.float64)
        self.use(node, here, first, left, "activations")
        self.use(node, first, stop, np.array([_made(self.shared_bytes(value, s)) for s in states]), "activations")

    def shared_bytes(self, value: Value, state: Shared) -> tuple[int, int]:
        """Of a shared value: bytes of it as it is left, complete, and as it is served once."""
        left = self.bytes_of(value, state.left) if state.completed else 0
        return left, 0 if state.use is None else self.bytes_of(value, state.use.want)

    # -- what is kept --

    def keep(self, op: Op, k: int, value: Value, readers: list[tuple[Op, int]]) -> None:
        """The node of what is kept of a value, its edges and usages."""
        here, name = self.place[op.name], ("kept", value.name)
        mine = self.saves_output(op, k)
        savers = [self.place[reader.name] for reader, i in readers if self.saves_input(reader, i)]
        places = [self.place[reader.name] for reader, _ in readers]
        droppable = self.droppable(op)
        if not (mine or savers) and not self.grads:
            return
        prints, node = self.prints(op), self.energy.operators[op.name]
        shared = self.energy.shared.get(value.name)
        if shared is not None:
            states = self.states_of_shared(value, bool(mine or savers), droppable)
            carrier = self.energy.shares[value.name]
            table = self.once(("kept-shared", states, id(carrier), value.shape, value.dtype), lambda: np.array(
                [[self.fits_shared(value, s, c) for s in states] for c in carrier]))
            self.edge(shared, name, table)
            again = self.once(("kept-made", states, id(prints)), lambda: np.array(
                [[p.forward if s.how == DROPPED else 0.0 for s in states] for p in prints]))
            self.edge(node, name, again)
        else:
            (reader, i), = readers
            asks = self.prints(reader)
            states = self.states_of_one(op, k, reader, i, value, mine, bool(savers), droppable)
            made = self.once(("kept-made", states, id(prints), k, mine, value.shape), lambda: np.array(
                [[self.fits_made(value, s, p.leaves[k], mine, p.forward) for s in states] for p in prints]))
            read = self.once(("kept-read", states, id(asks), i, mine, bool(savers), value.shape), lambda: np.array(
                [[self.fits_read(value, s, p.asks[i], not mine or bool(savers)) for p in asks] for s in states]))
            self.edge(node, name, made)
            self.edge(name, self.energy.operators[reader.name], read)
        self.kept[value.name] = states
        until = self.back(min([here] if mine else savers or places)) + 1
        whole = np.array([s.made * (s.how == KEPT) for s in states], dtype=np.float64)
        other = np.array([s.read * (s.how == KEPT) for s in states], dtype=np.float64)
        after = max(places) + 1
        if shared is None:
            self.use(name, here if mine else after, until, whole, "activations")
            self.use(name, after, self.back(min(savers or places)) + 1, other, "activations")
        else:
            self.use(name, after, until, whole + other, "activations")
        gone = np.array([(s.made + s.read) * (s.how == DROPPED) for s in states], dtype=np.float64)
        if gone.any():
            if shared is None and mine:  # it is there until it is read, all the same
                self.use(name, here, after, gone, "activations")
            begun = self.back(max([self.segment_end[op.name], *(savers or places)]))
            self.use(name, begun, until, gone, "recomputed")

    def droppable(self, op: Op) -> bool:
        """Whether an operator can be computed again by itself: it makes one thing, and its backward wants the weights
        that it reads, biases aside, so that they are there."""
        if not self.grads or self.is_view(op):
            return self.grads
        weights = all(len(v.shape) < 2 or v.name not in self.energy.parameters or self.saves_input(op, i)
                      for i, v in enumerate(op.inputs))
        return weights and sum(v is not None for v in op.outputs) == 1

    def states_of_shared(self, value: Value, wanted: bool, droppable: bool) -> tuple[Keeping, ...]:
        out = [] if wanted else [Keeping(ABSENT, None, 0, 0)]
        amounts = dict.fromkeys(self.shared_bytes(value, s) for s in self.energy.shares[value.name])
        out += [Keeping(KEPT, None, *amount) for amount in amounts]
        if droppable:
            out += [Keeping(DROPPED, None, *amount) for amount in amounts if not amount[1]]
        return tuple(out)

    def fits_shared(self, value: Value, state: Keeping, carrier: Shared) -> float:
        if state.how == ABSENT:
            return 0.0
        fits = self.shared_bytes(value, carrier) == (state.made, state.read)
        return 0.0 if fits and (state.how == KEPT or not carrier.left.partial) else math.inf

    def states_of_one(self, op: Op, k: int, reader: Op, i: int, value: Value, mine: bool, theirs: bool,
                      droppable: bool) -> tuple[Keeping, ...]:
        prints, asks = self.prints(op), self.prints(reader)

        def make() -> tuple[Keeping, ...]:
            left = dict.fromkeys(p.leaves[k] for p in prints)
            wants = dict.fromkeys(_want(p.asks[i]) for p in asks)
            both = [layout for layout in left if layout in wants and not layout.partial]
            made = sorted({self.bytes_of(value, layout) for layout in left})
            read = sorted(set(map(int, self.wanted(reader, i, value))))
            out = [] if mine or theirs else [Keeping(ABSENT, None, 0, 0)]
            if mine and theirs:
                out += [Keeping(KEPT, layout, self.bytes_of(value, layout), 0) for layout in both]
                out += [Keeping(KEPT, None, a, b) for a in made for b in read]
            elif mine:
                out += [Keeping(KEPT, None, a, 0) for a in made]
            else:
                out += [Keeping(KEPT, None, 0, b) for b in read]
            if droppable:
                sizes = dict.fromkeys(self.bytes_of(value, layout) for layout in both)
                out += [Keeping(DROPPED, None, size, 0) for size in sizes]
            return tuple(out)
        return self.once(("states", id(prints), k, id(asks), i, mine, theirs, droppable), make)

    def fits_made(self, value: Value, state: Keeping, left: Layout, mine: bool, forward: float) -> float:
        if state.layout is not None and left != state.layout:
            return math.inf
        if state.how == DROPPED:
            return forward if state.made == self.bytes_of(value, left) and not left.partial else math.inf
        return math.inf if state.how == KEPT and mine and state.made != self.bytes_of(value, left) else 0.0

    def fits_read(self, value: Value, state: Keeping, asked: frozenset, reads: bool) -> float:
        if state.layout is not None:
            return 0.0 if _want(asked) == state.layout else math.inf
        if state.how == DROPPED:
            want = _want(asked)
            return 0.0 if want is not None and self.bytes_of(value, want) == state.made else math.inf
        if state.how == ABSENT or not reads:
            return 0.0
        return 0.0 if state.read == sum(self.bytes_of(value, w) for w in {use.want for use in asked}) else math.inf

    def chain(self, op: Op) -> None:
        """What an operator that runs again reads has to be there."""
        outs = [v for v in op.outputs if v is not None and v.name in self.kept]
        for value in {v.name: v for v in op.inputs}.values():
            if value.name not in self.kept:
                continue
            maker, _ = self.made_by[value.name]
            near = self.segments[maker.name] == self.segments[op.name]
            for out in outs:
                before, after = self.kept[value.name], self.kept[out.name]
                table = self.once(("chain", before, after, near), lambda: np.array(
                    [[math.inf if b.how == DROPPED and (a.how == ABSENT or a.how == DROPPED and not near) else 0.0
                      for b in after] for a in before]))
                if table.any():
                    self.edge(("kept", value.name), ("kept", out.name), table)

    # -- the whole --

    def edge(self, i: Any, j: Any, table: np.ndarray) -> None:
        self.edges[i, j] = self.edges[i, j] + table if (i, j) in self.edges else table

    def finish(self) -> Holding:
        """Everything as one problem; the node of what is kept of a value stands behind what makes it."""
        energy, problem = self.energy, self.energy.problem
        order: list[tuple[float, Any]] = [(node, node) for node in range(len(problem.costs))]
        for value in self.kept:
            op, _ = self.made_by[value]
            order.append((max(energy.operators[op.name], energy.shared.get(value, 0)) + 0.5, ("kept", value)))
        order.sort(key=lambda entry: entry[0])
        number = {node: k for k, (_, node) in enumerate(order)}
        costs = [problem.costs[node] if isinstance(node, int) else self.once(
            ("zeros", len(self.kept[node[1]])), lambda: np.zeros(len(self.kept[node[1]]))) for _, node in order]
        names = [problem.names[node] if isinstance(node, int) else f"kept %{node[1]}" for _, node in order]
        edges: dict[tuple[int, int], np.ndarray] = {}
        for (a, b), table in (*problem.edges.items(), *self.edges.items()):
            i, j = number[a], number[b]
            if i > j:
                i, j, table = j, i, self.once(("turned", id(table)), lambda: np.ascontiguousarray(table.T))
            edges[i, j] = edges[i, j] + table if (i, j) in edges else table
        usages = tuple(Usage(number[node], *held) for node, *held in self.usages)
        moved = {name: {v: number[node] for v, node in getattr(energy, name).items()}
                 for name in ("operators", "parameters", "shared")}
        made = Problem(tuple(costs), edges, tuple(names), usages, self.limit)
        views = frozenset(op.name for op in self.graph.ops if self.is_view(op))
        return Holding(replace(energy, problem=made, **moved), {v: number["kept", v] for v in self.kept}, self.kept,
                       self.segments, views)


def _made(amounts: tuple[int, int]) -> float:
    return float(sum(amounts))


def _want(asked: frozenset) -> Layout | None:
    """The one layout of the uses; None: there are several."""
    wants = {use.want for use in asked}
    return wants.pop() if len(wants) == 1 else None
