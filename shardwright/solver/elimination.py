"""Exact minimisation by vertex elimination (bucket elimination, min-plus).

    To eliminate v: join all tables that mention v, and keep the joint's least over v's states:

        f(N) = min_(s_v) Σ_(tables g that mention v) g(s_v, s_N)        N: v's neighbours at that time

The constant after the last elimination is the least cost. Backwards, each node takes the state in which its joint is
least, given its neighbours' states.

Example: a chain a - b - c of nodes with 10 states. Eliminating a joins its costs and the edge a-b, 100 entries, into a
table of 10 over b; b and c follow likewise. No joint is larger than 100 entries, instead of 1000 assignments.

Sharing: tables are told apart by identity, and the same operation on the same tables gives the same table. The inside
of L equal layers is computed once, and a chain of equal links is squared log2(L) times. A node with one state
separates its tables: it makes no joint.

Time and space: the largest joint; the number of nodes times a few microseconds for the rest. Four parts:

1. Facts about single tables (`Facts`, `slices`): the share of a table that is allowed, and its equal columns. A
   layout determines the strategy that left it, and a save-or-recompute state says only whether the value is saved:
   such tables are mostly forbidden, or have few distinct columns, and elimination has less to do.
2. The order of the nodes (`elimination_order`): the least weighted fill first (entries of the pair tables that the
   node would newly make), then the smallest joint, then the node whose neighbourhood has been eliminated from least
   often, so that a long chain is halved again and again.
3. Tables made of tables (`Tables`): the same operation on the same tables is computed once. Where a table allows few
   pairs of a node and a neighbour, the joint covers the allowed pairs alone; where it has few distinct columns, those
   alone.
4. The elimination itself (`Script`, `eliminate`, `Eliminated`).
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np

from ..identity_tables import IdentityCache
from .joint_minima import BLOCK, by_group, by_state
from .search_memory import OutOfBudgetError, current

# fmt: off
__all__ = [
    "FEW", "MOST", "SPARSE", "Eliminated", "Facts", "Order", "Scope", "Script", "Shapes", "Tables", "eliminate",
    "elimination_order", "shared_work", "slices",
]
# fmt: on


# -- facts about single tables --

FEW = 0.5  # share of distinct columns up to which an operation works on these alone
SPARSE = 0.25  # share of finite entries up to which an operation works on these alone
SAMPLE = 8  # entries along each further dim that are compared first, to tell slices apart


def slices(table: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray | None]:
    """A table's distinct slices along a dim.

    Nothing is remembered between calls: the function is for large tables of a short life.

    Args:
        table: a table.
        axis: the dim.

    Returns:
        A table with each distinct slice once, and by slice its number in it; the table itself and None where few
        slices are equal.
    """
    rows = np.moveaxis(table, axis, 0)
    some = rows[(slice(None), *(slice(None, None, max(1, size // SAMPLE)) for size in rows.shape[1:]))]
    alike: dict[bytes, list[int]] = {}
    first: list[int] = []
    which = np.empty(len(rows), np.int64)
    for n, row in enumerate(some):
        found = alike.setdefault(row.tobytes(), [])
        same = next((k for k in found if np.array_equal(rows[first[k]], rows[n])), None)
        if same is None:
            same = len(first)
            first.append(n)
            found.append(same)
            if len(first) > FEW * len(rows):
                return table, None
        which[n] = same
    return np.ascontiguousarray(table.take(first, axis=axis)), which


class Facts:
    """Properties of single tables, remembered by identity, with those of `known`."""

    def __init__(self, known: Facts | None = None) -> None:
        self._made: IdentityCache = IdentityCache(None if known is None else known._made)

    def share(self, table: np.ndarray) -> float:
        """The share of a table's entries that is finite."""
        return self._made.once(
            "share", (table,), lambda: float(np.count_nonzero(np.isfinite(table)) / max(table.size, 1))
        )

    def columns(self, table: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The distinct columns of a table of two dims along `axis`, and by column its number among them; the table
        itself and None where few columns are equal."""

        def distinct() -> tuple[np.ndarray, np.ndarray | None]:
            rows = np.ascontiguousarray(table.T if axis else table)
            place: dict[bytes, int] = {}
            which = np.array([place.setdefault(row.tobytes(), len(place)) for row in rows])
            if len(place) > FEW * len(rows):
                return table, None
            first = np.unique(which, return_index=True)[1]
            return np.ascontiguousarray(table.take(first, axis=axis)), which

        return self._made.once(axis, (table,), distinct)

    def sparse(self, edges: Mapping[tuple[int, int], np.ndarray]) -> dict[tuple[int, int], float]:
        """By edge that allows few pairs, the share of its entries that is finite."""
        return {pair: share for pair, table in edges.items() if (share := self.share(table)) <= SPARSE}

    def few(self, edges: Mapping[tuple[int, int], np.ndarray]) -> dict[tuple[int, int], int]:
        """By (node, other): the number of the other's states that the edge distinguishes, where that is few of them."""
        out = {}
        for pair, table in edges.items():
            for axis in (0, 1):
                small, which = self.columns(table, axis)
                if which is not None:
                    out[pair[1 - axis], pair[axis]] = small.shape[axis]
        return out


# -- the order of the nodes --

MOST = 2**24  # most entries of a joint: 128 MiB where it is made at once, about 50 ms

Costs = Sequence[np.ndarray]
Edges = Mapping[tuple[int, int], np.ndarray]
Scope = tuple[int, ...]  # nodes, ascending


@dataclass(frozen=True)
class Order:
    """The order in which nodes are eliminated.

    Attributes:
        steps: (node, its neighbours at that time, ascending).
        remaining: the nodes that are not eliminated, ascending.
        cutset: the remaining nodes whose removal lets other nodes be eliminated; each is fixed in one state.
        largest: entries of the largest joint.
        work: entries of all joints, without the savings of sharing.
    """

    steps: tuple[tuple[int, Scope], ...]
    remaining: tuple[int, ...]
    cutset: tuple[int, ...]
    largest: int
    work: int


class _Rest:
    """The part of the graph that is not yet ordered."""

    def __init__(
        self,
        sizes: Sequence[int],
        pairs: Iterable[tuple[int, int]],
        most: int,
        degree: int | None,
        keep: Collection[int],
        allowed: Mapping[tuple[int, int], float],
        few: Mapping[tuple[int, int], int],
        room: int,
    ) -> None:
        self.sizes, self.most, self.degree = sizes, most, math.inf if degree is None else degree
        self.near: list[set[int]] = [set() for _ in sizes]
        self.allowed: list[list[tuple[int, float]]] = [[] for _ in sizes]  # by node: (neighbour, share), least first
        for (i, j), share in allowed.items():
            self.allowed[i].append((j, share))
            self.allowed[j].append((i, share))
        for mine in self.allowed:
            mine.sort(key=lambda entry: entry[1])
        self.few, self.room = dict(few), room
        for i, j in pairs:
            self.near[i].add(j)
            self.near[j].add(i)
        self.open = [True] * len(sizes)  # may still be eliminated or join the cutset
        for v in keep:
            self.open[v] = False
        self._level = [0] * len(sizes)  # eliminations from the neighbourhood so far, one after the other
        self._current: list[tuple[int, int, int] | None] = [None] * len(sizes)
        self._heap: list[tuple[int, int, int, int]] = []

    def key(self, v: int) -> tuple[int, int, int] | None:
        """(fill, joint, level); None where v cannot be eliminated."""
        sizes, near = self.sizes, self.near
        if len(near[v]) > self.degree:
            return None
        share = next((share for u, share in self.allowed[v] if u in near[v]), 1.0)
        joint, few = sizes[v] * share, self.few
        for u in near[v]:
            joint *= few.get((v, u), sizes[u])
            if joint > self.most:
                return None
        joint, fill = math.ceil(joint), 0
        if self.room:
            fill = math.prod(sizes[u] for u in near[v]) // self.room
        rest = list(near[v])
        while rest:
            a = rest.pop()
            linked = near[a]
            for b in rest:
                if b not in linked:
                    fill += sizes[a] * sizes[b]
        return fill, joint, self._level[v]

    def look(self, nodes: Iterable[int]) -> None:
        """Compute these nodes' keys again."""
        for v in nodes:
            if self.open[v]:
                self._current[v] = found = self.key(v)
                if found is not None:
                    heapq.heappush(self._heap, (*found, v))

    def next(self) -> tuple[int, int] | None:
        """(the best node to eliminate, its joint); None where there is none."""
        while self._heap:
            *found, v = heapq.heappop(self._heap)
            if self.open[v] and self._current[v] == tuple(found):
                return v, found[1]
        return None

    def take(self, v: int) -> set[int]:
        """Take a node out; its neighbours are returned."""
        self.open[v] = False
        for u in self.near[v]:
            self.near[u].discard(v)
        return self.near[v]

    def join(self, v: int) -> set[int]:
        """Take a node out and join its neighbours to one another; the nodes whose keys change are returned."""
        near, around = self.near, list(self.take(v))
        stale = set(around)
        for position, a in enumerate(around):
            self._level[a] = max(self._level[a], self._level[v] + 1)
            for b in around[position + 1 :]:
                if self.few:
                    self.few.pop((a, b), None)
                    self.few.pop((b, a), None)
                if b not in near[a]:
                    stale |= near[a] & near[b]
                    near[a].add(b)
                    near[b].add(a)
        return stale


def elimination_order(
    sizes: Sequence[int],
    pairs: Iterable[tuple[int, int]],
    *,
    most: int = MOST,
    degree: int | None = None,
    keep: Collection[int] = (),
    cutset_weights: Sequence[float] | None = None,
    allowed: Mapping[tuple[int, int], float] | None = None,
    few: Mapping[tuple[int, int], int] | None = None,
    room: int = 0,
) -> Order:
    """A min-fill order of the nodes.

    Args:
        sizes: by node, the number of its states.
        pairs: the nodes that share a table.
        most: entries of a joint; a node that would need more stays.
        degree: a node with more neighbours stays; None: no such limit. With 2, the nodes that stay form a pairwise
            problem again.
        keep: nodes that stay.
        cutset_weights: by node. Where no node can be eliminated, the node with the largest (neighbours times weight)
            joins the cutset, so that every node is eliminated or in the cutset; None: the cutset is empty.
        allowed, few: facts about the tables of the pairs (`Facts.sparse`, `Facts.few`), which make joints smaller.
        room: number of entries of the table that a joint leaves which count as one of fill; 0: they do not count.
    """
    rest = _Rest(sizes, pairs, most, degree, keep, allowed or {}, few or {}, room)
    steps: list[tuple[int, Scope]] = []
    cutset: list[int] = []
    largest = work = 0
    for v, size in enumerate(sizes):
        if size == 1 and rest.open[v]:
            steps.append((v, tuple(sorted(rest.take(v)))))
    rest.look(range(len(sizes)))
    heavy: list[tuple[float, int]] | None = None
    while True:
        found = rest.next()
        if found is not None:
            v, joint = found
            steps.append((v, tuple(sorted(rest.near[v]))))
            largest, work = max(largest, joint), work + joint
            rest.look(rest.join(v))
        elif cutset_weights is None:
            break
        else:
            if heavy is None:
                heavy = [(-len(rest.near[v]) * cutset_weights[v], v) for v, is_open in enumerate(rest.open) if is_open]
                heapq.heapify(heavy)
            while heavy:
                weight, v = heapq.heappop(heavy)
                now = -len(rest.near[v]) * cutset_weights[v]
                if rest.open[v] and weight == now:
                    cutset.append(v)
                    rest.look(rest.take(v))
                    break
                if rest.open[v]:
                    heapq.heappush(heavy, (now, v))
            else:
                break
    done = {v for v, _ in steps}
    if cutset:  # nodes of the cutset also leave the neighbourhoods of earlier steps
        out = frozenset(cutset)
        steps = [(v, tuple(u for u in around if u not in out)) for v, around in steps]
    return Order(tuple(steps), tuple(v for v in range(len(sizes)) if v not in done), tuple(cutset), largest, work)


# -- tables made of tables --

AT_ONCE = 2**18  # entries of a joint up to which it is made at once, not state by state: 2 MiB; measured


class Tables:
    """Tables made of tables; the same operation on the same tables is computed once.

    Tables are known by identity.

    Args:
        facts: of tables that outlive these; the facts of the tables that are made here end with them.
        most: entries of all results of `least`; with more, `OutOfBudgetError`. None: no limit.
    """

    def __init__(self, facts: Facts | None = None, most: int | None = None) -> None:
        self.facts = Facts(facts)
        self.entries_allowed = math.inf if most is None else most
        self.budget = current()
        self._made = IdentityCache()
        self._vectors: dict[bytes, np.ndarray] = {}

    def vector(self, values: np.ndarray) -> np.ndarray:
        """The one table of one dim with these values."""
        return self._vectors.setdefault(values.tobytes(), values)

    def sum(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """one + other, of equal shapes."""
        return self._made.once("sum", (one, other), lambda: self._add(one, other))

    def _add(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        self.budget.ask(one.nbytes)
        return one + other

    def least(self, where: tuple[tuple[int, ...], ...], tables: Sequence[np.ndarray], dims: int) -> np.ndarray:
        """The minimum of the joint of tables over its dim -1.

        Args:
            where: for each table, the joint's dim of each of its own dims; -1: the dim that is minimised over.
            tables: the tables.
            dims: the number of dims of the result.
        """
        return self._made.once(where, tuple(tables), lambda: self._reduce(list(zip(where, tables)), dims))

    def _reduce(self, parts: Sequence[tuple[tuple[int, ...], np.ndarray]], dims: int) -> np.ndarray:
        sizes = {dim: size for where, table in parts for dim, size in zip(where, table.shape) if dim >= 0}
        entries = math.prod(sizes.values())
        self.entries_allowed -= entries
        if self.entries_allowed < 0:
            raise OutOfBudgetError("elimination would make more tables than allowed")
        self.budget.ask(8 * entries)
        seen = [dim for where, _ in parts for dim in where]
        spread: dict[int, np.ndarray] = {}
        out = []
        for where, table in parts:
            alone = [dim for dim in where if dim >= 0 and seen.count(dim) == 1]
            if len(where) == 2 and alone and dims > 1:
                few, which = self.facts.columns(table, where.index(alone[0]))
                if which is not None:
                    table, spread[alone[0]] = few, which
            elif len(where) > 2 and table.size > AT_ONCE:
                for dim in alone:
                    table, which = slices(table, where.index(dim))
                    if which is not None:
                        spread[dim] = which
            out.append((where, table))
        least = _least(out, dims, self.facts)
        for dim, which in spread.items():
            least = least.take(which, axis=dim)
        return least

    def slice(self, table: np.ndarray, axis: int) -> np.ndarray:
        """The table without a dim of size one."""
        return self._made.once(("slice", axis), (table,), lambda: np.squeeze(table, axis))


def _least(parts: Sequence[tuple[tuple[int, ...], np.ndarray]], dims: int, facts: Facts) -> np.ndarray:
    """The result of `Tables.least`, computed."""
    # (its dims; the table with all dims, the minimised one first; True for a copy, which may be added to in place)
    aligned: list[tuple[frozenset[int], np.ndarray, bool]] = []
    for where, table in parts:
        by_dim = sorted(range(len(where)), key=where.__getitem__)
        shape = [1] * (dims + 1)
        for axis in by_dim:
            shape[where[axis] + 1] = table.shape[axis]
        turned = table.transpose(by_dim)
        if table.size <= AT_ONCE or where[-1] == -1:  # transposing a larger table takes longer
            turned = np.ascontiguousarray(turned)
        aligned.append((frozenset(where), turned.reshape(shape), turned.base is None))
    pairs = [(facts.share(table), where, n) for n, (where, table) in enumerate(parts) if len(where) == 2 and dims > 1]
    share, scope, number = min(pairs, key=lambda entry: entry[0], default=(1.0, (0, 0), -1))
    sparse = aligned[number][1] if share <= SPARSE else None
    aligned.sort(key=lambda part: -part[1].size)
    joined: list[tuple[frozenset[int], np.ndarray, bool]] = []
    for has, table, writable in aligned:  # a table within another is added to it: less work than in the joint
        for n, (more, larger, mine) in enumerate(joined):
            if has <= more and (mine or larger.size <= AT_ONCE):
                joined[n] = more, np.add(larger, table, out=larger if mine else None), True
                break
        else:
            joined.append((has, table, writable))
    tables = [table for _, table, _ in sorted(joined, key=lambda part: part[1].size)]
    if len(tables) == 1:
        return tables[0].min(axis=0)
    if sparse is not None:
        return by_group(tables, dims, max(scope), sparse)
    whole = np.broadcast_shapes(*(table.shape for table in tables))
    if math.prod(whole) <= AT_ONCE:
        joint = tables[0]
        for table in tables[1:]:
            joint = joint + table
        return joint.min(axis=0)
    least = np.empty(whole[1:])
    rows = max(1, BLOCK // math.prod(whole[2:]))
    for first in range(0, whole[1], rows):
        part = slice(first, first + rows)
        by_state([table if table.shape[1] == 1 else table[:, part] for table in tables], least[part])
    return least


class Shapes(Tables):
    """Tables without values: it counts the entries that their joints would have."""

    def __init__(self, facts: Facts | None = None) -> None:
        super().__init__(facts)
        self.entries = 0

    def _add(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        self.entries += one.size
        return np.broadcast_to(0.0, one.shape)

    def _reduce(self, parts: Sequence[tuple[tuple[int, ...], np.ndarray]], dims: int) -> np.ndarray:
        shape, share = [1] * (dims + 1), 1.0
        for where, table in parts:
            for dim, size in zip(where, table.shape):
                shape[dim + 1] = size
            if len(where) == 2 and dims > 1 and table.strides != (0, 0):
                share = min(share, self.facts.share(table))
        self.entries += int(math.prod(shape) * (share if share <= SPARSE else 1.0))
        return np.broadcast_to(0.0, shape[1:])


LEAST, SLICE, SUM, CONSTANT = range(4)
WATCHED = 512  # steps between two checks of the host memory

#: For `Tables.least`: by table, the joint's dim of each of its own dims; the numbers of the tables.
_Joint = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
_NO_JOINT: _Joint = (), ()

#: The number of a table, and the nodes of its scope before and after v.
Seen = tuple[int, Scope, Scope]


def shared_work(
    costs: Sequence[np.ndarray], edges: Mapping[tuple[int, int], np.ndarray], order: Order, facts: Facts | None = None
) -> int:
    """Entries of the joints that `eliminate` makes, each shared joint once."""
    shapes = Shapes(facts)
    eliminate(costs, edges, order, made=shapes)
    return shapes.entries


@dataclass(frozen=True)
class Eliminated:
    """The result of an elimination.

    Attributes:
        constant: the least cost, as far as it depends on no remaining node; infinite where nothing is allowed.
        tables: the tables of the remaining nodes, by scope.
    """

    constant: float
    tables: dict[Scope, np.ndarray]
    _made: Sequence[np.ndarray] = field(repr=False)
    _back: Sequence[tuple[int, tuple[Seen, ...]]] = field(repr=False)

    def complete(self, states: list[int]) -> list[int]:
        """Fill in the states of the eliminated nodes, in place: the best for the states of the others.

        Args:
            states: of all nodes; those of the eliminated nodes are overwritten.

        Returns:
            `states`.
        """
        made, every = self._made, slice(None)
        for v, tables in reversed(self._back):
            costs: np.ndarray = np.zeros(())
            for number, before, after in tables:
                of_v = made[number]
                if before or after:
                    at: tuple[int | slice, ...] = (*[states[u] for u in before], every, *[states[u] for u in after])
                    of_v = of_v[at]
                costs = costs + of_v
            states[v] = int(costs.argmin())
        return states


class Script:
    """An elimination order worked out for the edges of a problem: the tables that each step joins. It serves any
    costs.

    Tables are numbered: the nodes' own, then the edges', then the new ones in the order in which they are made.

    Args:
        sizes: by node, the number of its states.
        pairs: the nodes that share a table.
        order: an order of these nodes.
    """

    def __init__(self, sizes: Sequence[int], pairs: Iterable[tuple[int, int]], order: Order) -> None:
        self._pairs = tuple(pairs)
        self._back: list[tuple[int, tuple[Seen, ...]]] = []
        self._work: list[tuple[int, int, int, _Joint]] = []
        self._at: list[dict[Scope, int]] = [{(v,): v} for v in range(len(sizes))]
        for number, pair in enumerate(self._pairs, len(sizes)):
            self._at[pair[0]][pair] = self._at[pair[1]][pair] = number
        self._count = len(sizes) + len(self._pairs)
        for v, around in order.steps:
            self._step(v, around, sizes[v])
        self._remaining: dict[Scope, int] = {}
        for v in order.remaining:
            self._remaining.update(self._at[v])
        del self._at

    def _step(self, v: int, around: Scope, size: int) -> None:
        tables = sorted(self._at[v].items())
        for scope, _ in tables:
            for u in scope:
                if u != v:
                    del self._at[u][scope]
        self._at[v] = {}
        self._back.append(
            (v, tuple((number, scope[: (at := scope.index(v))], scope[at + 1 :]) for scope, number in tables))
        )
        if size == 1:
            for scope, number in tables:
                if len(scope) == 1:
                    self._work.append((CONSTANT, number, 0, _NO_JOINT))
                else:
                    axis = scope.index(v)
                    self._put(scope[:axis] + scope[axis + 1 :], self._made(SLICE, number, axis))
            return
        dim = {u: n for n, u in enumerate(around)} | {v: -1}
        where = tuple(tuple([dim[u] for u in scope]) for scope, _ in tables)
        least = self._made(LEAST, v, len(around), (where, tuple([number for _, number in tables])))
        if around:
            self._put(around, least)
        else:
            self._work.append((CONSTANT, least, 0, _NO_JOINT))

    def _made(self, kind: int, of: int, more: int, joint: _Joint = _NO_JOINT) -> int:
        self._work.append((kind, of, more, joint))
        self._count += 1
        return self._count - 1

    def _put(self, scope: Scope, number: int) -> None:
        known = self._at[scope[0]].get(scope)
        if known is not None:
            number = self._made(SUM, known, number)
        for u in scope:
            self._at[u][scope] = number

    @overload
    def run(self, costs: Costs, edges: Edges, *, made: Tables | None = None, until: None = None) -> Eliminated: ...

    @overload
    def run(
        self, costs: Costs, edges: Edges, *, made: Tables | None = None, until: float | None
    ) -> Eliminated | None: ...

    def run(
        self, costs: Costs, edges: Edges, *, made: Tables | None = None, until: float | None = None
    ) -> Eliminated | None:
        """Eliminate the nodes.

        Args:
            costs, edges: of these sizes and pairs.
            made: tables of earlier runs, to be used and added to.
            until: a time of time.monotonic().

        Returns:
            The result; None past `until`.
        """
        made = Tables() if made is None else made
        tables = [*map(made.vector, costs), *(edges[pair] for pair in self._pairs)]
        constant, put, least = 0.0, tables.append, made.least
        for step, (kind, of, more, (where, numbers)) in enumerate(self._work):
            if step % WATCHED == 0:
                made.budget.watch()
            if kind == LEAST:
                if until is not None and time.monotonic() > until:
                    return None
                put(least(where, [tables[n] for n in numbers], more))
            elif kind == SUM:
                put(made.sum(tables[of], tables[more]))
            elif kind == SLICE:
                put(made.slice(tables[of], more))
            else:
                constant += float(tables[of].reshape(()))
        return Eliminated(constant, {scope: tables[n] for scope, n in self._remaining.items()}, tables, self._back)


@overload
def eliminate(
    costs: Costs, edges: Edges, order: Order, *, made: Tables | None = None, until: None = None
) -> Eliminated: ...


@overload
def eliminate(
    costs: Costs, edges: Edges, order: Order, *, made: Tables | None = None, until: float | None
) -> Eliminated | None: ...


def eliminate(
    costs: Costs, edges: Edges, order: Order, *, made: Tables | None = None, until: float | None = None
) -> Eliminated | None:
    """Eliminate the nodes in that order; see `Script.run`."""
    return Script([len(node_costs) for node_costs in costs], edges, order).run(costs, edges, made=made, until=until)
