"""What a plan may let go of a value and make again: a node for what is kept of it, and what that node asks of others.

A `Keeping` is kept (as its reader has it, or as its maker left it, or both where these differ; of a value that several
read, as it was left and as it is served once), dropped (made again, which costs the forward of its operators once more)
or, of a value that no backward wants, absent.

    inner       a value that no backward wants and one operator reads: it is made again with what that one makes
    remade      what makes a value again: its operator, and those of the inner values that this one reads, and so on

Nothing is sent again: a value can be dropped where it is read in the layout in which it was left; of a value that
several read, what is sent in between is kept all the same. Inner values have to have as many bytes at both ends; what
is sent between two layouts that do is kept too (`resent`). What is read by operators that run again has to be kept, or
dropped in the same segment of the program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from ..graph import Op, Value
from ..layout import Layout
from .energy import Shared
from .operator_memory import OperatorMemory

__all__ = ["ABSENT", "DROPPED", "KEPT", "Keeping", "KeepStates"]

ABSENT, KEPT, DROPPED = "absent", "kept", "dropped"


class Keeping(NamedTuple):
    """A state of what is kept of a value.

    Attributes:
        how: "absent", "kept" or "dropped".
        layout: of what is kept, in which it is both left and read, where the state says that these are one.
        size: bytes of the one tensor of that layout, or of what is dropped; 0: who makes and who reads it say how many.
    """

    how: str
    layout: Layout | None = None
    size: int = 0


class _Ends(NamedTuple):
    """How a value is left (rows) and how it is asked for (columns), each layout once.

    Attributes:
        left, want: bytes; 0 where several layouts are asked for.
        same, closed: whether it is asked for as it is left, and as it is left with its sum completed.
        several: whether it is asked for in several layouts.
        open: whether it is left with its sum open.
    """

    left: np.ndarray
    want: np.ndarray
    same: np.ndarray
    closed: np.ndarray
    several: np.ndarray
    open: np.ndarray


class KeepStates:
    """The nodes of what is kept.

    Args:
        memory: the operators.
        segments: by operator, the segment of the program that it is in.

    Attributes:
        states: by value that has a node, its states.
        remade: by value that may be dropped, the operators that run again.
        edges: by (node, node), tables; a node is a number of the energy's, or ("kept", value).
        as_left: values that are kept for their maker alone: what is sent of them is not.
    """

    def __init__(self, memory: OperatorMemory, segments: dict[str, int]) -> None:
        self.memory, self.energy, self.segments = memory, memory.energy, segments
        self.states: dict[str, tuple[Keeping, ...]] = {}
        self.remade: dict[str, tuple[Op, ...]] = {}
        self.edges: dict[tuple[Any, Any], np.ndarray] = {}
        self._inner = {name for name in memory.made_by if self._is_inner(name)}
        self.as_left: set[str] = set()
        for op in memory.graph.ops:
            for k, value in enumerate(v for v in op.outputs if v is not None):
                if memory.grads and value.name not in memory.ends and memory.consumers.get(value.name) and \
                        value.name not in self._inner and value.name not in memory.of_given:
                    self._node(op, k, value)
        self._again = {op.name for ops in self.remade.values() for op in ops}
        for name in self.remade:
            self._chain(name)

    def runs_again(self, op: Op) -> bool:
        """Whether it may."""
        return op.name in self._again

    # -- who runs again with whom --

    def savers(self, value: Value) -> list[Op]:
        """Its readers whose backward wants it."""
        return [reader for reader, i in self.memory.consumers.get(value.name, ()) if self.memory.saves_input(reader, i)]

    def _is_inner(self, name: str) -> bool:
        memory = self.memory
        op, k = memory.made_by[name]
        value = [v for v in op.outputs if v is not None][k]
        readers = memory.consumers.get(name, ())
        return memory.grads and len(readers) == 1 and name not in memory.ends and name not in self.energy.shared and \
            name not in memory.of_given and not memory.saves_output(op, k) and not self.savers(value) and self.droppable(op) and \
            self.segments[op.name] == self.segments[readers[0][0].name]

    def droppable(self, op: Op) -> bool:
        """Whether an operator can be computed again by itself: it makes one thing, and its backward wants the weights
        that it reads, biases aside, so that they are there."""
        memory = self.memory
        if not memory.grads or memory.is_view(op):
            return memory.grads
        weights = all(len(v.shape) < 2 or v.name not in self.energy.parameters or memory.saves_input(op, i)
                      for i, v in enumerate(op.inputs))
        return weights and sum(v is not None for v in op.outputs) == 1

    def _remade(self, op: Op) -> tuple[Op, ...]:
        out = {op.name: op}
        todo = [op]
        while todo:
            for value in todo.pop().inputs:
                if value.name in self._inner:
                    maker = self.memory.made_by[value.name][0]
                    if maker.name not in out:
                        out[maker.name] = maker
                        todo.append(maker)
        return tuple(out.values())

    # -- a node --

    def _node(self, op: Op, k: int, value: Value) -> None:
        """The node of what is kept of a value, with its edges to the operators and to how the value is shared."""
        memory, name = self.memory, ("kept", value.name)
        mine, savers = memory.saves_output(op, k), self.savers(value)
        droppable = self.droppable(op)
        prints, node = memory.prints(op), self.energy.operators[op.name]
        shared = self.energy.shared.get(value.name)
        if shared is not None:
            inner = any(v.name in self._inner for other in self._remade(op) for v in other.inputs)
            states = self._states_of_shared(value, bool(mine or savers), droppable, inner)
            carrier = self.energy.shares[value.name]
            self._edge(shared, name, memory.once(
                ("kept-shared", states, id(carrier), value.shape, value.dtype), lambda: np.array(
                    [[self._fits_shared(value, s, c) for s in states] for c in carrier])))
        else:
            (reader, i), = memory.consumers[value.name]
            asks = memory.prints(reader)
            states = self._states_of_one(op, k, reader, i, value, mine, bool(savers), droppable)
            if mine and not savers:
                self.as_left.add(value.name)
            self._edge(node, name, memory.once(("kept-made", states, id(prints), k, value.shape), lambda: np.array(
                [[self._fits_made(value, s, p.leaves[k]) for s in states] for p in prints])))
            self._edge(name, self.energy.operators[reader.name], memory.once(
                ("kept-read", states, id(asks), i, value.shape), lambda: np.array(
                    [[self._fits_read(value, s, p.asks[i]) for p in asks] for s in states])))
        self.states[value.name] = states
        if any(s.how == DROPPED for s in states):
            self.remade[value.name] = self._remade(op)
            for other in self.remade[value.name]:
                self._again_edge(value, other)

    def _again_edge(self, value: Value, op: Op) -> None:
        """What it costs that an operator runs again with a value, and that what comes in between is not sent."""
        memory, states = self.memory, self.states[value.name]
        prints = memory.prints(op)
        inner = tuple((i, v) for i, v in enumerate(op.inputs) if v.name in self._inner)
        outs = tuple((k, v) for k, v in enumerate(v for v in op.outputs if v is not None) if v.name in self._inner)
        key = ("again", states, id(prints), value.nbytes, tuple((i, v.nbytes) for i, v in inner),
               tuple((k, v.nbytes) for k, v in outs))

        def make() -> np.ndarray:
            gone = [n for n, s in enumerate(states) if s.how == DROPPED]
            sizes = np.array([states[n].size for n in gone])
            fits = np.ones((len(prints), len(gone)), bool)

            def as_large(v: Value, there: list[int]) -> np.ndarray:
                """Where an inner value has as many bytes as what is dropped, in proportion."""
                unit = math.gcd(value.nbytes, v.nbytes) or 1
                return np.array(there)[:, None] * (value.nbytes // unit) == sizes * (v.nbytes // unit)
            for k, v in outs:
                fits &= np.array([not p.leaves[k].partial for p in prints])[:, None]
                fits &= as_large(v, [memory.bytes_of(v, p.leaves[k]) for p in prints])
            for i, v in inner:
                wants = [_want(p.asks[i]) for p in prints]
                there = as_large(v, [-1 if want is None else memory.bytes_of(v, want) for want in wants])
                fits &= there | np.array([not p.asks[i] for p in prints])[:, None]
            table = np.zeros((len(prints), len(states)))
            table[:, gone] = np.where(fits, np.array([p.forward for p in prints])[:, None], math.inf)
            return table
        self._edge(self.energy.operators[op.name], ("kept", value.name), memory.once(key, make))

    def resent(self, value: Value) -> np.ndarray | None:
        """Bytes that are kept of an inner value because they were sent, by state of who makes and of who reads it; None:
        it is no inner value of something that may be dropped."""
        memory = self.memory
        if value.name not in self._inner or not self.runs_again(memory.made_by[value.name][0]):
            return None

        return self._of_both(value, "resent", lambda ends: np.where(
            (ends.want == ends.left) & ~(ends.several | ends.open | ends.same), ends.want, 0.0))

    def sent_back(self, value: Value) -> np.ndarray:
        """Bytes of the gradient of a value that one operator reads, as its maker takes it, where the reader's is in another
        layout: by state of who makes and of who reads it."""
        return self._of_both(value, "sent back", lambda ends: np.where(ends.closed, 0.0, ends.left))

    def received(self, value: Value) -> np.ndarray:
        """Bytes of a value that one operator reads, as that reader asks for it, where it is sent to it: by state of who
        makes and of who reads it."""
        return self._of_both(value, "received", lambda ends: np.where(
            ends.same, 0.0, np.where(ends.several, ends.left, ends.want)))

    def sent(self, value: Value) -> np.ndarray:
        """Bytes of a value that one operator reads, as its maker leaves it, where it is sent to that reader: by state of
        who makes and of who reads it."""
        return self._of_both(value, "sent", lambda ends: np.where(ends.same, 0.0, ends.left))

    def viewed_back(self, value: Value) -> np.ndarray:
        """Bytes of the gradient of a value that a view reads, the larger one of its two ends where it is sent: by state of
        who makes and of who reads it."""
        return self._of_both(value, "viewed back", lambda ends: np.maximum(ends.left, ends.want))

    def _of_both(self, value: Value, what: str, count: Callable[[_Ends], np.ndarray]) -> np.ndarray:
        """By state of who makes and of who reads a value: a number of how it is left and how it is asked for."""
        memory = self.memory
        (op, k), ((reader, i),) = memory.made_by[value.name], memory.consumers[value.name]
        prints, asks = memory.prints(op), memory.prints(reader)

        def ends() -> tuple[_Ends, np.ndarray, np.ndarray]:
            lefts, rows = _numbered(p.leaves[k] for p in prints)
            wants, columns = _numbered(_want(p.asks[i]) for p in asks)
            same, closed = (np.array([[one == want for want in wants] for one in some])
                            for some in (lefts, [left.without_partial() for left in lefts]))
            left = np.array([float(memory.bytes_of(value, one)) for one in lefts])
            want = np.array([0.0 if one is None else memory.bytes_of(value, one) for one in wants])
            return _Ends(left[:, None], want[None], same, closed, np.array([[one is None for one in wants]]),
                         np.array([[bool(one.partial)] for one in lefts])), rows, columns

        def make() -> np.ndarray:
            found, rows, columns = memory.once(("ends", *key), ends)
            table = np.broadcast_to(count(found), found.same.shape)
            return np.ascontiguousarray(table[rows][:, columns])
        key = id(prints), k, id(asks), i, value.shape, value.dtype
        return memory.once((what, *key), make)

    def _chain(self, name: str) -> None:
        """What the operators read that run again has to be there."""
        for op in self.remade[name]:
            for value in {v.name: v for v in op.inputs}.values():
                if value.name not in self.states:
                    continue
                maker, _ = self.memory.made_by[value.name]
                near = self.segments[maker.name] == self.segments[op.name]
                before, after, sent = self.states[value.name], self.states[name], value.name in self.as_left

                def there(b: Keeping) -> bool:
                    if b.how == DROPPED:
                        return near
                    return b.how == KEPT and not (sent and b.layout is None)
                table = self.memory.once(("chain", before, after, near, sent), lambda: np.array(
                    [[0.0 if a.how != DROPPED or there(b) else math.inf for a in after] for b in before]))
                if table.any():
                    self._edge(("kept", value.name), ("kept", name), table)

    def _edge(self, i: Any, j: Any, table: np.ndarray) -> None:
        known = self.edges.get((i, j))
        self.edges[i, j] = table if known is None else self.memory.once(
            ("sum", id(known), id(table)), lambda: (known + table, known, table))[0]

    # -- the states of a value that several read --

    def shared_bytes(self, value: Value, state: Shared) -> tuple[int, int]:
        """Of a shared value: bytes of it as it is left, complete, and as it is served once."""
        left = self.memory.bytes_of(value, state.left) if state.completed else 0
        return left, 0 if state.use is None else self.memory.bytes_of(value, state.use.want)

    def _states_of_shared(self, value: Value, wanted: bool, droppable: bool, inner: bool) -> tuple[Keeping, ...]:
        """
        Args:
            inner: whether inner values are made again with it, which have to have as many bytes.
        """
        out = [Keeping(KEPT)] if wanted else [Keeping(ABSENT), Keeping(KEPT)]
        if droppable and not inner:
            out.append(Keeping(DROPPED))
        elif droppable:
            sizes = dict.fromkeys(self.memory.bytes_of(value, s.left) for s in self.energy.shares[value.name]
                                  if s.use is None)
            out += [Keeping(DROPPED, None, size) for size in sizes]
        return tuple(out)

    def _fits_shared(self, value: Value, state: Keeping, carrier: Shared) -> float:
        if state.how != DROPPED:
            return 0.0
        fits = carrier.use is None and not carrier.left.partial
        return 0.0 if fits and state.size in (0, self.memory.bytes_of(value, carrier.left)) else math.inf

    # -- of a value that one reads --

    def _states_of_one(self, op: Op, k: int, reader: Op, i: int, value: Value, mine: bool, theirs: bool,
                       droppable: bool) -> tuple[Keeping, ...]:
        memory = self.memory
        prints, asks = memory.prints(op), memory.prints(reader)

        def make() -> tuple[Keeping, ...]:
            left = dict.fromkeys(p.leaves[k] for p in prints)
            wants = dict.fromkeys(_want(p.asks[i]) for p in asks)
            both = [layout for layout in left if layout in wants and not layout.partial]
            out = [Keeping(KEPT)] if mine or theirs else [Keeping(ABSENT), Keeping(KEPT)]
            if mine:  # it is one tensor for both, or for what runs again
                out += [Keeping(KEPT, layout, memory.bytes_of(value, layout)) for layout in both]
            if droppable:
                out += [Keeping(DROPPED, layout, memory.bytes_of(value, layout)) for layout in both]
            return tuple(out)
        return memory.once(("states", id(prints), k, id(asks), i, mine, theirs, droppable), make)

    def _fits_made(self, value: Value, state: Keeping, left: Layout) -> float:
        if state.layout is not None and left != state.layout:
            return math.inf
        if state.how == DROPPED and (left.partial or state.size != self.memory.bytes_of(value, left)):
            return math.inf
        return 0.0

    def _fits_read(self, value: Value, state: Keeping, asked: frozenset) -> float:
        want = _want(asked)
        if state.layout is not None and want != state.layout:
            return math.inf
        if state.how == DROPPED and (want is None or state.size != self.memory.bytes_of(value, want)):
            return math.inf
        return 0.0


def _want(asked: frozenset) -> Layout | None:
    """The one layout of the uses; None: there are several."""
    wants = {use.want for use in asked}
    return wants.pop() if len(wants) == 1 else None


def _numbered(things: Iterable[Any]) -> tuple[list[Any], np.ndarray]:
    """The different ones, and which of them each is."""
    place: dict[Any, int] = {}
    which = np.array([place.setdefault(one, len(place)) for one in things])
    return list(place), which
