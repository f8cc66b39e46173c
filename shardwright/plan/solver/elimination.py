"""Exact minimisation by vertex elimination (bucket elimination, min-plus).

    To eliminate v: join all tables that mention v, and keep of the joint the least over v's states:

        f(N) = min_(s_v) Σ_(tables g that mention v) g(s_v, s_N)        N: v's neighbours at that time

    When all are gone the constant that is left is the least cost. Backwards, each takes the state in which the joint is
    least, given its neighbours' states.

Sharing: tables are told apart by identity, and what is made of the same tables in the same way is the same table. In a
network of L equal layers each layer's inside is then computed once, and a chain of equal links is squared log2(L)
times. A node with one state separates its tables: it makes no joint.

Time and space: the largest joint; the number of nodes times a few microseconds for the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .facts import Facts
from .order import Order, Scope
from .tables import Shapes, Tables

__all__ = ["Eliminated", "Script", "eliminate", "shared_work"]

LEAST, SLICE, SUM, CONSTANT = range(4)
WATCHED = 512  # steps between two looks at how much memory there is

#: The number of a table, and where v stands among its nodes: those before it, those after it.
Seen = tuple[int, Scope, Scope]


def shared_work(costs: Sequence[np.ndarray], edges: Mapping[tuple[int, int], np.ndarray], order: Order,
                facts: Facts | None = None) -> int:
    """Entries of the joints that eliminate makes, each of them once."""
    shapes = Shapes(facts)
    eliminate(costs, edges, order, made=shapes)
    return shapes.entries


@dataclass(frozen=True)
class Eliminated:
    """What elimination leaves.

    Attributes:
        constant: the least cost, of what no longer depends on any node that is left; infinite where nothing is allowed.
        tables: of the nodes that are left, by scope.
    """

    constant: float
    tables: dict[Scope, np.ndarray]
    _made: Sequence[np.ndarray] = field(repr=False)
    _back: Sequence[tuple[int, tuple[Seen, ...]]] = field(repr=False)

    def complete(self, states: list[int]) -> list[int]:
        """The states with those of the eliminated nodes filled in, in place: the best for the states of the others."""
        made, every = self._made, slice(None)
        for v, tables in reversed(self._back):
            costs = None
            for number, before, after in tables:
                of_v = made[number]
                if before or after:
                    of_v = of_v[(*[states[u] for u in before], every, *[states[u] for u in after])]
                costs = of_v if costs is None else costs + of_v
            states[v] = int(costs.argmin())
        return states


class Script:
    """An order, worked out for the edges of a problem: which tables each step joins. It serves any costs.

    Tables are numbered: the nodes' own, then the edges', then what is made, one after the other.

    Args:
        sizes: by node, how many states it has.
        pairs: the nodes that share a table.
        order: of these.
    """

    def __init__(self, sizes: Sequence[int], pairs: Iterable[tuple[int, int]], order: Order) -> None:
        self._pairs = tuple(pairs)
        self._back: list[tuple[int, tuple[Seen, ...]]] = []
        self._work: list[tuple] = []
        self._at: list[dict[Scope, int]] = [{(v,): v} for v in range(len(sizes))]
        for number, pair in enumerate(self._pairs, len(sizes)):
            self._at[pair[0]][pair] = self._at[pair[1]][pair] = number
        self._count = len(sizes) + len(self._pairs)
        for v, around in order.steps:
            self._step(v, around, sizes[v])
        self._left: dict[Scope, int] = {}
        for v in order.left:
            self._left.update(self._at[v])
        del self._at

    def _step(self, v: int, around: Scope, size: int) -> None:
        tables = sorted(self._at[v].items())
        for scope, _ in tables:
            for u in scope:
                if u != v:
                    del self._at[u][scope]
        self._at[v] = {}
        self._back.append((v, tuple((number, scope[:(at := scope.index(v))], scope[at + 1:]) for scope, number in tables)))
        if size == 1:
            for scope, number in tables:
                if len(scope) == 1:
                    self._work.append((CONSTANT, number, 0))
                else:
                    axis = scope.index(v)
                    self._put(scope[:axis] + scope[axis + 1:], self._made(SLICE, number, axis))
            return
        dim = {u: n for n, u in enumerate(around)} | {v: -1}
        where = tuple(tuple([dim[u] for u in scope]) for scope, _ in tables)
        least = self._made(LEAST, (where, tuple([number for _, number in tables])), len(around))
        if around:
            self._put(around, least)
        else:
            self._work.append((CONSTANT, least, 0))

    def _made(self, kind: int, of: object, more: object) -> int:
        self._work.append((kind, of, more))
        self._count += 1
        return self._count - 1

    def _put(self, scope: Scope, number: int) -> None:
        known = self._at[scope[0]].get(scope)
        if known is not None:
            number = self._made(SUM, known, number)
        for u in scope:
            self._at[u][scope] = number

    def run(self, costs: Sequence[np.ndarray], edges: Mapping[tuple[int, int], np.ndarray], *,
            made: Tables | None = None, until: float | None = None) -> Eliminated | None:
        """The nodes eliminated.

        Args:
            costs, edges: of these sizes and pairs.
            made: tables known from before, to be used and added to.
            until: a time of time.monotonic(); past it None is returned.
        """
        made = Tables() if made is None else made
        tables = [*map(made.vector, costs), *(edges[pair] for pair in self._pairs)]
        constant, put, least = 0.0, tables.append, made.least
        for step, (kind, of, more) in enumerate(self._work):
            if step % WATCHED == 0:
                made.budget.watch()
            if kind == LEAST:
                if until is not None and time.monotonic() > until:
                    return None
                where, numbers = of
                put(least(where, [tables[n] for n in numbers], more))
            elif kind == SUM:
                put(made.sum(tables[of], tables[more]))
            elif kind == SLICE:
                put(made.slice(tables[of], more))
            else:
                constant += float(tables[of].reshape(()))
        return Eliminated(constant, {scope: tables[n] for scope, n in self._left.items()}, tables, self._back)


def eliminate(costs: Sequence[np.ndarray], edges: Mapping[tuple[int, int], np.ndarray], order: Order, *,
              made: Tables | None = None, until: float | None = None) -> Eliminated | None:
    """The nodes eliminated in that order, see `Script`."""
    return Script([len(own) for own in costs], edges, order).run(costs, edges, made=made, until=until)
