"""States within a memory limit, combined from states above it and states within it.

    splice      the nodes before k from the one states, the others from the other: the best of all k
    window      the nodes of a stretch chosen anew, at prices between zero and the best ones, the others unchanged

The nodes stand in program order. A splice of two plans of a network of many layers therefore changes plan at one
boundary, which is as short as an edge, and reaches the value of a mixture of the two except for about one layer.

With 4 nodes, states (0, 0, 0, 0) and (1, 1, 1, 1) and k = 1, the splices are (0, 1, 1, 1) and (1, 0, 0, 0).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .elimination import Tables, eliminate, elimination_order
from .memory_rows import Rows
from .problem import Problem

__all__ = ["Splicer"]

WORST = 16  # moments at which all places are checked at once
TRIED = 24  # places that are then checked one by one
PARTS = (0.0, 0.5, 0.8, 0.95)  # shares of the prices, in a window
JOINT = 2**22  # most entries of a joint in a window; a window that needs more is skipped


class Splicer:
    """States of a problem of `memory_rows.binding`, mixed.

    Args:
        problem, rows: the problem and its usages.
    """

    def __init__(self, problem: Problem, rows: Rows) -> None:
        self.problem, self.rows = problem, rows
        self._own = _Flat([(v,) for v in range(len(problem.costs))], problem.costs)
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
            costs = self._own.along(a, b) + self._edges.along(a, b)
            fits = np.ones(len(costs), bool)
            over = np.maximum(*used) - self.rows.limit
            for row in np.argsort(-over, kind="stable")[:WORST]:
                if over[row] <= 0 or not fits.any():
                    break
                fits &= self._held(a, b, int(row)) <= self.rows.limit
            places = np.flatnonzero(fits & (costs < below))
            for k in places[np.argsort(costs[places], kind="stable")[:TRIED]]:
                states = [*a[:k].tolist(), *b[k:].tolist()]
                if self.fits(states):
                    cost = self.problem.cost(states)
                    if cost < below:
                        below, best = cost, (states, cost)
                    break
        return best

    def _held(self, a: np.ndarray, b: np.ndarray, row: int) -> np.ndarray:
        """By place, the memory at a moment."""
        rows = self.rows
        live = np.flatnonzero((rows.first <= row) & (row < rows.last))
        low, high = np.minimum(rows.node[live], rows.other[live]), np.maximum(rows.node[live], rows.other[live])

        def held(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            mine, theirs = x[rows.node[live]], y[rows.other[live]]
            step = rows.step[live]
            return rows.amounts[rows.offset[live] + np.where(step > 0, mine * step + theirs, mine)]

        return _along(low, high, held(a, a), held(a, b), held(b, b), len(a))

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
        problem, inside = self.problem, range(begin, end)
        numbers = [np.flatnonzero(alive[v]) for v in inside]
        price = self.rows.prices(multipliers)
        mine = np.flatnonzero(
            ((self.rows.node >= begin) & (self.rows.node < end))
            | ((self.rows.other >= begin) & (self.rows.other < end))
        )
        best: tuple[list[int], float] | None = None
        order = None
        for part in PARTS:
            costs = [problem.costs[v][some].astype(float) for v, some in zip(inside, numbers)]
            edges: dict[tuple[int, int], np.ndarray] = {}

            def add(nodes: tuple[int, ...], table: np.ndarray, scale: float = 1.0) -> None:
                at = tuple(numbers[v - begin] if begin <= v < end else np.array([states[v]]) for v in nodes)
                cut = np.asarray(table)[np.ix_(*at)] * scale
                free = [v - begin for v in nodes if begin <= v < end]
                if len(free) == 2:
                    edges[free[0], free[1]] = edges[free[0], free[1]] + cut if tuple(free) in edges else cut
                else:
                    costs[free[0]] = costs[free[0]] + cut.ravel()

            for pair in dict.fromkeys(pair for v in inside for pair in self._near[v]):
                add(pair, problem.edges[pair])
            for n in mine.tolist() if part else ():
                if price[n] > 0:
                    nodes = (
                        (int(self.rows.node[n]),)
                        if not self.rows.step[n]
                        else (int(self.rows.node[n]), int(self.rows.other[n]))
                    )
                    add(nodes, self.rows.arrays[self.rows.array[n]], part * float(price[n]))
            if order is None:
                order = elimination_order([len(own) for own in costs], edges, most=JOINT)
                if order.left:
                    return None
            result = eliminate(costs, edges, order, made=Tables())
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
        place: dict[int, int] = {}
        arrays, offsets, total = [], [], 0
        for table in tables:
            if id(table) not in place:
                place[id(table)] = total
                arrays.append(np.asarray(table, float).ravel())
                total += table.size
            offsets.append(place[id(table)])
        self.values = np.concatenate(arrays) if arrays else np.empty(0)
        self.offset = np.array(offsets, np.int64)
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
