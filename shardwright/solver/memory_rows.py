"""The moments at which a memory limit matters, the memory of a plan at each, and states within the limit that are
combined of others.

A moment is a row: Σ_(usages u that live then) m_u(s) <= limit. Where the live usages of one moment are part of those
of another, only the other is a row. A row that even the largest states cannot break is none.

Example: usages over [0, 3), [1, 2) and [2, 4) have 2 rows: moment 1 (the first two) and moment 2 (the first and third).

`shorter` finds the equal layers of a problem, and a shorter problem that has a few of them in place of all:

    period P        node v + P costs what node v does, and shares the same tables with nodes that stand P further on;
                    tables are the same where they are one object
    run             nodes [a, b + P) of which all v in [a, b) repeat P later
    shorter         of a run of more than `KEPT` layers those in the middle are left out, and the two sides are joined
                    as neighbouring layers are
    hub             a node that shares tables with nodes of many layers, as a table of positions does: it is joined to
                    the remaining layers

A run ends at a moment with a price: prices of memory differ between its two sides.

`Splicer` combines states within the limit from states above it and states within it:

    splice      the nodes before k from the one states, the others from the other: the best of all k
    window      the nodes of a stretch chosen anew, at prices between zero and the best ones, the others unchanged

The nodes stand in program order. A splice of two plans of a network of many layers therefore changes plan at one
boundary, which is as short as an edge, and reaches the value of a mixture of the two except for about one layer.

With 4 nodes, states (0, 0, 0, 0) and (1, 1, 1, 1) and k = 1, the splices are (0, 1, 1, 1) and (1, 0, 0, 0).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..identity_tables import IdentityCache, IdentitySet, numbered
from .elimination import Script, elimination_order
from .problem import MemoryUsage, Problem
from .search_memory import current

__all__ = ["Rows", "Shorter", "Splicer", "binding", "foremost", "kinds", "period", "shorter"]

# -- rows --


def _latest(first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """The moments at which as much as possible lives: a usage has begun since the last such moment, and the next
    event is an end."""
    begins, ends = np.unique(first), np.unique(stop)
    before = np.searchsorted(begins, ends)  # number of distinct beginnings before that end
    grown = np.diff(before, prepend=0) > 0
    return begins[before[grown] - 1]


def binding(problem: Problem) -> tuple[Problem, np.ndarray]:
    """The same problem with usages only where the limit can be broken; its moments are numbered from 0.

    One node with one state is added at the end. Its memory is the part that does not depend on the states.

    Args:
        problem: a problem with a limit.

    Returns:
        The problem, without a limit where none can be broken; and by moment of it, the moment of the given problem.
    """
    fixed = len(problem.costs)
    uses = [use for use in problem.usages if use.start < use.stop and np.any(use.amount)]
    if not uses:
        return replace(problem, usages=(), limit=None), np.empty(0, np.int64)
    extremes = _Extremes(problem)
    least, most = np.array([extremes.of(use) for use in uses]).T
    start, stop = (np.array([getattr(use, name) for use in uses]) for name in ("start", "stop"))
    varies = most > least
    times = _latest(start, stop)
    first, last = np.searchsorted(times, start), np.searchsorted(times, stop)
    peak = _running(first, last, most, len(times))
    times = times[peak > problem.limit]
    first, last = np.searchsorted(times, start), np.searchsorted(times, stop)
    merged: dict[tuple[int, int | None, int, int], np.ndarray] = {}
    once = IdentityCache().once  # equal sums of equal amounts are one array
    for use, a, b, moves, low in zip(uses, first.tolist(), last.tolist(), varies.tolist(), least.tolist()):
        if a >= b:
            continue
        key = (use.node, use.other, a, b) if moves else (fixed, None, a, b)
        amount = (
            np.array([low])
            if not moves
            else use.amount
            if use.amount.dtype == np.float64
            else np.asarray(use.amount, float)
        )
        known = merged.get(key)
        if known is not None:
            one, other = known, amount
            amount = once("sum", (one, other), lambda: one + other)
        merged[key] = amount
    usages = tuple(MemoryUsage(v, a, b, amount, other=other) for (v, other, a, b), amount in merged.items())
    names = (*problem.names, "what every plan holds") if problem.names else ()
    return replace(
        problem,
        costs=(*problem.costs, np.zeros(1)),
        names=names,
        usages=usages,
        limit=problem.limit if usages else None,
    ), times


class _Extremes:
    """The least and the largest amounts of usages in allowed states."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._allowed = [np.isfinite(node_costs) for node_costs in problem.costs]
        self._known = IdentityCache()

    def of(self, use: MemoryUsage) -> tuple[float, float]:
        problem = self.problem
        edge = None if use.other is None else problem.edges[use.node, use.other]

        def extremes() -> tuple[float, float]:
            if edge is None:
                some = np.asarray(use.amount)[self._allowed[use.node]]
            else:
                first, other = (self._allowed[v] for v in use.nodes)
                some = np.asarray(use.amount)[np.isfinite(edge) & first[:, None] & other]
            return float(some.min(initial=np.inf)), float(some.max(initial=-np.inf))

        return self._known.once("extremes", (use.amount, edge, *(problem.costs[v] for v in use.nodes)), extremes)


def _running(first: np.ndarray, last: np.ndarray, amounts: np.ndarray, count: int) -> np.ndarray:
    """By moment of `count`, the sum of the amounts that live there."""
    change = np.bincount(np.concatenate((first, last)), np.concatenate((amounts, -amounts)), count + 1)
    return np.cumsum(change)[:-1]


@dataclass(frozen=True)
class Rows:
    """The usages of a problem of `binding`, or of a part of it, as arrays.

    Attributes:
        count: the number of moments.
        limit: at each moment.
        node, first, last: by usage, its node, and its moments [first, last).
        other, step: by usage, the other node that decides it, and the number of that node's states; for a usage that
            a single node decides: any node, and 0.
        amounts: the distinct arrays of amounts, one after the other.
        array, offset: by usage, the number of its array, and the array's beginning in `amounts`.
        arrays: the distinct arrays, as they were given.
    """

    count: int
    limit: float
    node: np.ndarray
    first: np.ndarray
    last: np.ndarray
    other: np.ndarray
    step: np.ndarray
    amounts: np.ndarray
    array: np.ndarray
    offset: np.ndarray
    arrays: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, problem: Problem, count: int) -> Rows:
        uses = problem.usages
        arrays, which = list(IdentitySet(use.amount for use in uses)), numbered(use.amount for use in uses)
        sizes = np.array([array.size for array in arrays], np.int64)
        node, first, last = (
            np.array([getattr(use, name) for use in uses], np.int64) for name in ("node", "start", "stop")
        )
        other = np.array([use.node if use.other is None else use.other for use in uses], np.int64)
        step = np.array([0 if use.other is None else use.amount.shape[1] for use in uses], np.int64)
        amounts = np.concatenate([np.asarray(array, float).ravel() for array in arrays]) if uses else np.empty(0)
        array = np.array(which, np.int64)
        return cls(
            count,
            np.inf if problem.limit is None else problem.limit,
            node,
            first,
            last,
            other,
            step,
            amounts,
            array,
            (np.cumsum(sizes) - sizes)[array],
            tuple(arrays),
        )

    def used(self, states: Sequence[int] | np.ndarray) -> np.ndarray:
        """By moment, the memory of the states."""
        return _running(self.first, self.last, self.usage_bytes(states), self.count)

    def usage_bytes(self, states: Sequence[int] | np.ndarray) -> np.ndarray:
        """By usage, the memory of the states."""
        chosen = np.asarray(states, np.int64)
        mine, theirs = chosen[self.node], chosen[self.other]
        return self.amounts[self.offset + np.where(self.step > 0, mine * self.step + theirs, mine)]

    @property
    def unit(self) -> float:
        """The unit of `over`: the limit."""
        return self.limit if self.limit > 0 else 1.0

    def over(self, states: Sequence[int]) -> np.ndarray:
        """By moment, the memory of the states above the limit, relative to the limit; below 0 where they keep it."""
        return (self.used(states) - self.limit) / self.unit

    def least(self) -> np.ndarray:
        """By moment, a lower bound on the memory: each usage in its least state."""
        return self._sum([float(np.min(array)) for array in self.arrays])

    def most(self) -> np.ndarray:
        """By moment, an upper bound on the memory: each usage in its largest state."""
        return self._sum([float(np.max(array)) for array in self.arrays])

    def _sum(self, by_array: Sequence[float]) -> np.ndarray:
        if not len(self.node):
            return np.zeros(self.count)
        return _running(self.first, self.last, np.array(by_array)[self.array], self.count)

    def prices(self, multipliers: np.ndarray) -> np.ndarray:
        """By usage, the price of a unit of it: Σ_t multiplier_t over the moments at which it lives."""
        total = np.concatenate(([0.0], np.cumsum(multipliers)))
        return total[self.last] - total[self.first]

    def priced(self, costs: Sequence[np.ndarray], multipliers: np.ndarray) -> list[np.ndarray]:
        """The costs of the nodes, with the memory paid for that one node decides alone."""
        price, out = self.prices(multipliers), list(costs)
        paid: dict[tuple[int, float], np.ndarray] = {}
        for n in np.flatnonzero((price > 0) & (self.step == 0)).tolist():
            key = (int(self.array[n]), float(price[n]))
            if key not in paid:
                paid[key] = key[1] * np.asarray(self.arrays[key[0]], float)
            out[self.node[n]] = out[self.node[n]] + paid[key]
        return out

    @property
    def paired(self) -> bool:
        """True where two nodes decide a usage together."""
        return bool(self.step.any())

    def priced_edges(
        self, edges: Mapping[tuple[int, int], np.ndarray], multipliers: np.ndarray
    ) -> dict[tuple[int, int], np.ndarray]:
        """The edges, with the memory paid for that two nodes decide; equal tables and prices give one table."""
        price, out = self.prices(multipliers), dict(edges)
        once, budget = IdentityCache().once, current()
        for place, n in enumerate(np.flatnonzero((price > 0) & (self.step > 0)).tolist()):
            pair = (int(self.node[n]), int(self.other[n]))
            table = out[pair]
            paid, amount = float(price[n]), self.arrays[int(self.array[n])]

            def priced() -> np.ndarray:
                budget.ask(table.nbytes)
                return table + paid * amount

            if place % 64 == 0:
                budget.watch()
            out[pair] = once(paid, (table, amount), priced)
        return out


def foremost(over: np.ndarray) -> np.ndarray:
    """The moments that matter to some states: those at which no other moment has as much memory in all of them.

    Args:
        over: memory by states and moment.

    Returns:
        The moments, ascending; of equal ones the first. A price at any other moment is as well paid at one of these.
    """
    rest = np.argsort(-over.sum(axis=0), kind="stable")
    out = []
    while len(rest):
        out.append(rest[0])
        rest = rest[1:][(over[:, rest[1:]] > over[:, rest[:1]]).any(axis=0)]
    return np.sort(np.array(out, np.int64))


# -- equal layers --

REMAINING_LAYERS = 3  # layers of a run that stay
AHEAD = 1  # of these, layers before the cut; the layer behind the cut stands for those that are left out
NEAR = 2  # in periods: a nearer node counts as a neighbour in the same layer or the next
TRIED = 16  # most periods that are tried

Pair = tuple[int, int]


@dataclass(frozen=True)
class Shorter:
    """A problem without most of its equal layers.

    Attributes:
        nodes: by node of the shorter problem, its number in the whole.
        edges: the shorter problem's.
        stands: by node of the whole, the node of the shorter problem that stands for it.
        pairs: by edge of the whole, the edge of the shorter problem that stands for it.
    """

    nodes: tuple[int, ...]
    edges: dict[Pair, np.ndarray]
    stands: np.ndarray
    pairs: dict[Pair, Pair]


def period(costs: Sequence[np.ndarray], edges: Mapping[Pair, np.ndarray]) -> int | None:
    """The number of nodes after which a layer begins anew; None where there are no equal layers."""
    kind = kinds(costs, edges)
    last: dict[int, int] = {}
    gaps: Counter[int] = Counter()
    for v, k in enumerate(kind.tolist()):
        if k in last:
            gaps[v - last[k]] += 1
        last[k] = v
    scores = [(int((kind[gap:] == kind[:-gap]).sum()), -gap) for gap, _ in gaps.most_common(TRIED)]
    best, gap = max(scores, default=(0, 0))
    return -gap if best > len(kind) // 2 else None


def kinds(costs: Sequence[np.ndarray], edges: Mapping[Pair, np.ndarray]) -> np.ndarray:
    """By node, a number that it shares with the nodes of equal costs and the same tables."""
    looks: list[list[tuple[int, ...]]] = [[] for _ in costs]
    for (i, j), number in zip(edges, numbered(edges.values())):
        looks[i].append((0, number))
        looks[j].append((1, number))
    return _kinds(costs, looks)


def _kinds(costs: Sequence[np.ndarray], looks: Sequence[Sequence[tuple[int, ...]]]) -> np.ndarray:
    """By node, a number that it shares with the nodes of equal costs and equal looks."""
    number: dict[tuple[Hashable, ...], int] = {}
    return np.array(
        [
            number.setdefault((node_costs.tobytes(), *sorted(mine)), len(number))
            for node_costs, mine in zip(costs, looks)
        ]
    )


def shorter(costs: Sequence[np.ndarray], edges: Mapping[Pair, np.ndarray], size: int) -> Shorter | None:
    """The problem without most of its equal layers; None where there is nothing to leave out.

    Args:
        costs, edges: of the problem.
        size: the period.
    """
    count, reach = len(costs), NEAR * size
    looks: list[list[tuple[int, int, int]]] = [[] for _ in costs]
    for (i, j), number in zip(edges, numbered(edges.values())):
        near = j - i <= reach
        looks[i].append((0, j - i, number) if near else (1, j, number))
        looks[j].append((0, i - j, number) if near else (1, i, number))
    kind = _kinds(costs, looks)
    same = np.concatenate(([False], kind[size:] == kind[:-size], [False]))
    begins, ends = np.flatnonzero(same[1:] & ~same[:-1]), np.flatnonzero(same[:-1] & ~same[1:])
    cuts: list[tuple[int, int]] = []  # the nodes [from, to) that are left out
    for a, b in zip(begins.tolist(), ends.tolist()):
        layers = (b - a) // size + 1
        if layers > REMAINING_LAYERS:
            cuts.append((a + AHEAD * size, a + (AHEAD + layers - REMAINING_LAYERS) * size))
    if not cuts:
        return None
    stands, removed, shorter_count = np.empty(count, np.int64), np.zeros(count, bool), 0
    begin = 0
    for start, stop in cuts:
        stands[begin:start] = np.arange(shorter_count, shorter_count + start - begin)
        shorter_count += start - begin
        stands[start:stop] = shorter_count + np.arange(stop - start) % size  # the layer behind the cut stands for these
        removed[start:stop] = True
        begin = stop
    stands[begin:] = np.arange(shorter_count, shorter_count + count - begin)
    nodes = np.flatnonzero(~removed)
    out: dict[Pair, np.ndarray] = {}
    pairs: dict[Pair, Pair] = {}
    for (i, j), table in edges.items():
        x, y = int(stands[i]), int(stands[j])
        if j - i <= reach:
            y = x + j - i
        pairs[i, j] = (x, y)
        if not x < y < len(nodes) or out.setdefault((x, y), table) is not table:
            return None  # the repetition is of another kind than this file knows
    return Shorter(tuple(nodes.tolist()), out, stands, pairs)


# -- splices --


WORST = 16  # moments at which all places are checked at once
SPLICED = 24  # places that are then checked one by one
PARTS = (0.0, 0.5, 0.8, 0.95)  # shares of the prices, in a window
JOINT = 2**22  # most entries of a joint in a window; a window that needs more is skipped


class Splicer:
    """States of a problem of `memory_rows.binding`, mixed.

    Args:
        problem, rows: the problem and its usages.
    """

    def __init__(self, problem: Problem, rows: Rows) -> None:
        self.problem, self.rows = problem, rows
        self._node_costs = _Flat([(v,) for v in range(len(problem.costs))], problem.costs)
        self._edges = _Flat(list(problem.edges), list(problem.edges.values()))
        self._near: list[list[tuple[int, int]]] = [[] for _ in problem.costs]
        for pair in problem.edges:
            for v in pair:
                self._near[v].append(pair)

    def fits(self, states: Sequence[int]) -> bool:
        return bool((self.rows.used(states) <= self.rows.limit).all())

    def splice(self, first: Sequence[int], second: Sequence[int], below: float) -> tuple[list[int], float] | None:
        """The cheapest states within the limit that take their nodes up to some node from one assignment, and the
        rest from the other.

        Args:
            first, second: the two assignments, in either order.
            below: only states that cost less.

        Returns:
            The states and their cost; None where there are none.
        """
        best: tuple[list[int], float] | None = None
        one, other = np.asarray(first, np.int64), np.asarray(second, np.int64)
        used = self.rows.used(first), self.rows.used(second)
        for a, b in ((one, other), (other, one)):
            costs = self._node_costs.along(a, b) + self._edges.along(a, b)
            fits = costs < below
            over = np.maximum(*used) - self.rows.limit
            for row in np.argsort(-over, kind="stable")[:WORST]:
                if over[row] <= 0 or not fits.any():
                    break
                fits &= self._spliced_bytes(a, b, int(row)) <= self.rows.limit
            places = np.flatnonzero(fits)
            for k in places[np.argsort(costs[places], kind="stable")[:SPLICED]]:
                mixed = np.concatenate((a[:k], b[k:]))
                if (self.rows.used(mixed) <= self.rows.limit).all():
                    below = float(costs[k])
                    best = mixed.tolist(), below
                    break
        return best

    def evenly(
        self, first: Sequence[int], second: Sequence[int], parts: int
    ) -> Iterator[tuple[tuple[int, ...], float]]:
        """Allowed states that take their nodes up to some node from one assignment and the rest from the other, within
        the limit or not, and their cost: in either order, the cheapest near each of `parts` - 1 even places."""
        one, other, count = np.asarray(first, np.int64), np.asarray(second, np.int64), len(first)
        for a, b in ((one, other), (other, one)):
            costs = self._node_costs.along(a, b) + self._edges.along(a, b)
            for part in range(1, parts):
                low, high = ((4 * part + side) * count // (4 * parts) for side in (-1, 1))
                place = low + int(costs[low : high + 1].argmin())
                if np.isfinite(costs[place]):
                    yield (*a[:place].tolist(), *b[place:].tolist()), float(costs[place])

    def _spliced_bytes(self, a: np.ndarray, b: np.ndarray, row: int) -> np.ndarray:
        """By place, the memory at a moment."""
        rows = self.rows
        live = np.flatnonzero((rows.first <= row) & (row < rows.last))
        low, high = np.minimum(rows.node[live], rows.other[live]), np.maximum(rows.node[live], rows.other[live])

        def of_states(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            mine, theirs = x[rows.node[live]], y[rows.other[live]]
            step = rows.step[live]
            return rows.amounts[rows.offset[live] + np.where(step > 0, mine * step + theirs, mine)]

        return _along(low, high, of_states(a, a), of_states(a, b), of_states(b, b), len(a))

    # -- windows --

    def window(
        self,
        states: Sequence[int],
        begin: int,
        end: int,
        alive: Sequence[np.ndarray],
        multipliers: np.ndarray,
        below: float,
    ) -> tuple[list[int], float] | None:
        """The nodes from `begin` to `end` chosen anew.

        Args:
            states: of all nodes.
            begin, end: the stretch [begin, end).
            alive: by node, the states (bool) to choose from.
            multipliers: by moment, the price of a unit of memory.
            below: only states that cost less.

        Returns:
            The cheapest states found within the limit, and their cost; None where there are none.
        """
        problem, rows, inside = self.problem, self.rows, range(begin, end)
        numbers = [np.flatnonzero(alive[v]) for v in inside]
        alone = [problem.costs[v][some].astype(float) for v, some in zip(inside, numbers)]
        between: dict[tuple[int, int], np.ndarray] = {}

        def cut(nodes: tuple[int, ...], table: np.ndarray) -> tuple[int | tuple[int, int], np.ndarray]:
            """The one or two nodes of the stretch that a table belongs to, and its entries that may be chosen."""
            table, low = np.asarray(table, float), nodes[0]
            high = nodes[-1]
            if len(nodes) == 1:
                return low - begin, table[numbers[low - begin]]
            if not begin <= low < end:
                return high - begin, table[states[low], numbers[high - begin]]
            if not begin <= high < end:
                return low - begin, table[numbers[low - begin], states[high]]
            return (low - begin, high - begin), table[numbers[low - begin][:, None], numbers[high - begin]]

        for pair in dict.fromkeys(pair for v in inside for pair in self._near[v]):
            where, table = cut(pair, problem.edges[pair])
            if isinstance(where, int):
                alone[where] = alone[where] + table
            else:
                between[where] = table
        order = elimination_order([len(node_costs) for node_costs in alone], between, most=JOINT)
        if order.remaining:
            return None
        script = Script([len(node_costs) for node_costs in alone], between, order)
        price, priced = rows.prices(multipliers), []
        mine = ((rows.node >= begin) & (rows.node < end)) | ((rows.other >= begin) & (rows.other < end))
        for n in np.flatnonzero(mine & (price > 0)).tolist():
            node = int(rows.node[n])
            nodes = (node, int(rows.other[n])) if rows.step[n] else (node,)
            priced.append((*cut(nodes, rows.arrays[rows.array[n]]), float(price[n])))
        best: tuple[list[int], float] | None = None
        for part in PARTS:
            costs, edges = list(alone), dict(between)
            for where, amount, paid in priced if part else ():
                if isinstance(where, int):
                    costs[where] = costs[where] + amount * (part * paid)
                else:
                    edges[where] = edges[where] + amount * (part * paid)
            result = script.run(costs, edges)
            if not np.isfinite(result.constant):
                return None
            found = list(states)
            for v, some, state in zip(inside, numbers, result.complete([0] * len(costs))):
                found[v] = int(some[state])
            cost = problem.cost(found)
            if cost < below and self.fits(found):
                below, best = cost, (found, cost)
        return best


class _Flat:
    """Tables of nodes as arrays."""

    def __init__(self, scopes: Sequence[tuple[int, ...]], tables: Sequence[np.ndarray]) -> None:
        arrays = [np.asarray(table, float).ravel() for table in IdentitySet(tables)]
        begins = np.cumsum([0, *(array.size for array in arrays)])
        self.values = np.concatenate(arrays) if arrays else np.empty(0)
        self.offset = begins[numbered(tables)]
        self.low = np.array([scope[0] for scope in scopes], np.int64)
        self.high = np.array([scope[-1] for scope in scopes], np.int64)
        self.step = np.array([table.shape[1] if table.ndim == 2 else 0 for table in tables], np.int64)

    def at(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The entries with the lower nodes' states from x and the higher nodes' from y."""
        mine = x[self.low]
        return self.values[self.offset + np.where(self.step > 0, mine * self.step + y[self.high], mine)]

    def along(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """By place, the sum of the entries."""
        return _along(self.low, self.high, self.at(a, a), self.at(a, b), self.at(b, b), len(a))


def _along(
    low: np.ndarray, high: np.ndarray, before: np.ndarray, across: np.ndarray, after: np.ndarray, count: int
) -> np.ndarray:
    """By place k in 0..count: Σ before (both nodes below k) + across (the lower node alone) + after (neither)."""
    places = np.concatenate((high + 1, np.full(len(low), count + 1), low + 1, high + 1, np.zeros_like(low), low + 1))

    def sums(*amounts: np.ndarray) -> np.ndarray:
        """By place, the sum of the amounts, each over its stretch."""
        weights = np.concatenate([signed for one in amounts for signed in (one, -one)])
        return np.cumsum(np.bincount(places, weights, count + 2))[:-1]

    finite = [np.isfinite(values) for values in (before, across, after)]
    if all(some.all() for some in finite):
        return sums(before, across, after)
    whole = sums(*(np.where(some, values, 0.0) for some, values in zip(finite, (before, across, after))))
    return np.where(sums(*((~some).astype(float) for some in finite)) > 0.5, np.inf, whole)
