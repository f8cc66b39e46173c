"""Nodes made one with a neighbour that leaves them few states: an equal problem, in which elimination has less to do.

A node a whose edge to b allows few pairs, as where a says of b's state only whether something of it is kept, makes the
joints that both are part of larger by all of its states. Merged, the states of the two are the pairs that are allowed:

    c_ab(s, t) = c_a(s) + c_b(t) + e_ab(s, t)       (s, t) with e_ab(s, t) < inf
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..problem import Problem, Usage

__all__ = ["Merged", "candidates", "merged"]

GROWN = 2.5  # how many times the states of a node may become those of it and another
MANY = 256  # states of the two together at most


@dataclass(frozen=True)
class Merged:
    """A problem in which nodes are merged.

    Attributes:
        problem: with the same nodes; one that was merged into another is left with one state that says nothing.
    """

    problem: Problem
    _into: Mapping[int, int]
    _states: Mapping[int, np.ndarray]

    def lift(self, states: Sequence[int]) -> list[int]:
        """States of the merged problem as states of the given one."""
        out = [int(state) for state in states]
        for a, b in self._into.items():
            at = int(states[b])
            out[a], out[b] = int(self._states[a][at]), int(self._states[b][at])
        return out


def candidates(problem: Problem, allowed: Mapping[tuple[int, int], float], degree: int) -> dict[int, int]:
    """Which nodes of at least so many neighbours may be merged into which.

    Args:
        allowed: by pair, the share of its entries that is finite.
    """
    sizes = [len(own) for own in problem.costs]
    near: list[set[int]] = [set() for _ in sizes]
    for i, j in problem.edges:
        near[i].add(j)
        near[j].add(i)
    best: dict[int, tuple[int, float, int]] = {}
    for pair, share in allowed.items():
        small, large = sorted(pair, key=lambda v: (sizes[v], v))
        count = share * sizes[small] * sizes[large]
        if 1 < sizes[small] and len(near[small]) >= degree and count <= min(MANY, GROWN * sizes[large]):
            # with the more neighbours in common, the fewer it gets; of equal ones the one that stands last
            found = -len(near[small] & near[large]), count, -large
            best[small] = min(best.get(small, found), found)
    out: dict[int, int] = {}
    for a, b in ((a, -b) for a, (*_, b) in sorted(best.items())):
        if a not in out.values() and b not in out and b not in out.values():
            out[a] = b
    return out


def merged(problem: Problem, into: Mapping[int, int]) -> Merged:
    """The problem with each of these nodes merged into the other, which share an edge. A node takes part once."""
    known: dict[tuple, tuple] = {}

    def once(key: tuple, make, *held) -> np.ndarray:
        if key not in known:
            known[key] = (make(), *held)
        return known[key][0]

    target = list(range(len(problem.costs)))
    index: dict[int, np.ndarray] = {}
    costs = list(problem.costs)
    for a, b in into.items():
        pair = (a, b) if a < b else (b, a)
        table = problem.edges[pair]
        both = once(("pairs", id(table)), lambda: np.nonzero(np.isfinite(table)), table)
        index[pair[0]], index[pair[1]] = both
        target[a] = b
        own = problem.costs[a], problem.costs[b]
        costs[b] = once((id(table), id(own[0]), id(own[1])), lambda: table[both] + problem.costs[pair[0]][both[0]] +
                        problem.costs[pair[1]][both[1]], table, *own)
        costs[a] = np.zeros(1)

    def spread(table: np.ndarray, nodes: Sequence[int]) -> np.ndarray:
        """A table of these nodes as one of what they have become."""
        chosen = [index.get(v) for v in nodes]
        if all(rows is None for rows in chosen):
            return table

        def make() -> np.ndarray:
            out = np.asarray(table)
            for axis, rows in enumerate(chosen):
                out = out if rows is None else np.take(out, rows, axis=axis)
            return np.ascontiguousarray(out)
        return once((id(table), *map(id, chosen)), make, table, *chosen)

    edges: dict[tuple[int, int], np.ndarray] = {}
    for (i, j), table in problem.edges.items():
        if i not in index and j not in index:
            edges[i, j] = table
            continue
        if target[i] == target[j]:
            continue
        table, pair = spread(table, (i, j)), (target[i], target[j])
        if pair[0] > pair[1]:
            table, pair = once(("turned", id(table)), lambda: np.ascontiguousarray(table.T), table), pair[::-1]
        before = edges.get(pair)
        if before is not None:
            table = once(("sum", id(before), id(table)), lambda: (before + table, table), before)[0]
        edges[pair] = table
    usages = []
    for use in problem.usages:
        if use.node not in index and use.other not in index:
            usages.append(use)
            continue
        nodes = tuple(target[v] for v in use.nodes)
        amount = np.asarray(use.amount)
        if len(nodes) == 2 and nodes[0] == nodes[1]:
            rows = [index[v] for v in use.nodes]
            amount = once(("both", id(use.amount), *map(id, rows)), lambda: np.asarray(use.amount)[rows[0], rows[1]],
                          use.amount, *rows)
            nodes = nodes[:1]
        else:
            amount = spread(use.amount, use.nodes)
            if len(nodes) == 2 and nodes[0] > nodes[1]:
                amount = once(("turned", id(amount)), lambda: np.ascontiguousarray(amount.T), amount)
                nodes = nodes[::-1]
        usages.append(Usage(nodes[0], use.start, use.stop, amount, use.what, nodes[1] if len(nodes) == 2 else None))
    return Merged(replace(problem, costs=tuple(costs), edges=edges, usages=tuple(usages)), into, index)
