"""Elimination of nodes with at most two neighbours, again for each new costs of the nodes: all of one shape at once.

    one neighbour:   c_u(t)     += min_s c_v(s) + e_vu(s, t)
    two:             e_ab(t, r) += min_s c_v(s) + e_va(s, t) + e_vb(s, r)

What depends on what is the same each time. Steps of one level (none needs what another of it makes) and of one shape
are one operation on arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..problem import Problem
from .order import Order

__all__ = ["Batched"]

AT_ONCE = 2**20  # entries of the joints that are made at once; above it state by state


@dataclass
class _Steps:
    """Equal steps.

    Attributes:
        size: states of the nodes that go.
        around: states of their neighbours: none, one or two.
        nodes: which they are.
        at: where the nodes lie among those of their size.
        near: by neighbour: which they are, where they lie among those of their size, the key of the tables between,
            where those lie, and whether they are turned.
        out: the key of the tables that are added to, and where they lie; of two neighbours.
        single: no table or node is added to twice.
    """

    size: int
    around: tuple[int, ...]
    nodes: np.ndarray
    at: np.ndarray
    near: list[tuple[np.ndarray, np.ndarray, tuple[int, int], np.ndarray, bool]]
    out: tuple[tuple[int, int], np.ndarray] | None
    single: bool


class Batched:
    """A problem whose easy nodes are eliminated.

    Args:
        problem: its edges; its costs are given anew each time.
        order: of `elimination_order(..., degree=2)`.

    Attributes:
        constant: what the last elimination left.
    """

    def __init__(self, problem: Problem, order: Order) -> None:
        self.order = order
        self.sizes = sizes = [len(own) for own in problem.costs]
        count = len(sizes)
        self._members: dict[int, np.ndarray] = {}
        self._at = np.zeros(count, np.int64)
        by_size: dict[int, list[int]] = {}
        for v, size in enumerate(sizes):
            mine = by_size.setdefault(size, [])
            self._at[v] = len(mine)
            mine.append(v)
        self._members = {size: np.array(mine) for size, mine in by_size.items()}
        slots: dict[tuple[int, int], int] = {}
        tables: dict[tuple[int, int], list[np.ndarray | None]] = {}

        def slot(a: int, b: int) -> int:
            if (a, b) not in slots:
                mine = tables.setdefault((sizes[a], sizes[b]), [])
                slots[a, b] = len(mine)
                mine.append(problem.edges.get((a, b)))
            return slots[a, b]

        for a, b in problem.edges:
            slot(a, b)
        level_of: dict[object, int] = {}  # of what a node or a pair was last written at
        found: dict[tuple, list] = {}
        for v, around in order.steps:
            if sizes[v] == 1:  # it makes no joint: each neighbour is a step
                for u in around:
                    self._step(found, level_of, slot, v, (u,))
                self._step(found, level_of, slot, v, ())
            else:
                self._step(found, level_of, slot, v, around)
        self._steps = [self._packed(key, mine) for key, mine in sorted(found.items(), key=lambda item: item[0][0])]
        self._given = {}
        for shape, mine in tables.items():
            self._given[shape] = given = np.zeros((len(mine), *shape))
            for n, table in enumerate(mine):
                if table is not None:
                    given[n] = table
        self._tables = {shape: given.copy() for shape, given in self._given.items()}
        left = set(order.left)
        number = {v: n for n, v in enumerate(order.left)}
        self._pairs = [((number[a], number[b]), (sizes[a], sizes[b]), at) for (a, b), at in sorted(slots.items())
                       if a in left and b in left]

    def _step(self, found: dict, level_of: dict, slot, v: int, around: tuple[int, ...]) -> None:
        """Put one step where it belongs."""
        sizes = self.sizes
        pairs = [(v, u) if v < u else (u, v) for u in around]
        level = 1 + max([level_of.get(v, 0), *(level_of.get(pair, 0) for pair in pairs)])
        out = around if len(around) == 2 else around[0] if around else None
        if out is not None:
            level_of[out] = max(level_of.get(out, 0), level)
        key = (level, sizes[v], tuple(sizes[u] for u in around), tuple(v > u for u in around))
        found.setdefault(key, []).append((v, around, [slot(*pair) for pair in pairs],
                                          slot(*around) if len(around) == 2 else -1))

    def _packed(self, key: tuple, mine: list) -> _Steps:
        _, size, around, turned = key
        nodes = np.array([step[0] for step in mine])
        near = []
        for n, (other, turn) in enumerate(zip(around, turned)):
            them = np.array([step[1][n] for step in mine])
            near.append((them, self._at[them], (other, size) if turn else (size, other),
                         np.array([step[2][n] for step in mine]), turn))
        out = (around, np.array([step[3] for step in mine])) if len(around) == 2 else None
        written = out[1] if out else near[0][0] if near else nodes
        return _Steps(size, around, nodes, self._at[nodes], near, out, len(np.unique(written)) == len(written))

    def eliminate(self, costs: Sequence[np.ndarray]) -> Problem:
        """What is left with these costs of the nodes; its tables are the same memory each time."""
        own = {size: np.stack([costs[v] for v in mine]) for size, mine in self._members.items()}
        for shape, given in self._given.items():
            np.copyto(self._tables[shape], given)
        self._own, tables, constant = own, self._tables, 0.0
        for step in self._steps:
            mine = own[step.size][step.at]
            if not step.near:
                constant += float(mine.min(axis=1).sum())
                continue
            parts = [self._between(near) for near in step.near]
            if step.out is None:
                # a node with one state pays for itself once, in the step of its own
                least = (parts[0] + (mine[:, :, None] if step.size > 1 else 0.0)).min(axis=1)
                target, where = own[step.around[0]], step.near[0][1]
            else:
                first, second = parts[0] + mine[:, :, None], parts[1]
                target, where = tables[step.out[0]], step.out[1]
                if len(mine) * step.size * step.around[0] * step.around[1] <= AT_ONCE:
                    least = (first[:, :, :, None] + second[:, :, None, :]).min(axis=1)
                else:
                    least = first[:, 0, :, None] + second[:, 0, None, :]
                    for s in range(1, step.size):
                        np.minimum(least, first[:, s, :, None] + second[:, s, None, :], out=least)
            if step.single:
                target[where] += least
            else:
                np.add.at(target, where, least)
        self.constant = constant
        return Problem(tuple(own[self.sizes[v]][self._at[v]] for v in self.order.left),
                       {pair: tables[shape][at] for pair, shape, at in self._pairs})

    def _between(self, near: tuple) -> np.ndarray:
        """The tables of a step's nodes and one neighbour each: (steps, own states, its states)."""
        _, _, shape, at, turn = near
        tables = self._tables[shape][at]
        return tables.swapaxes(1, 2) if turn else tables

    def complete(self, states: np.ndarray) -> np.ndarray:
        """The states with the best of the eliminated nodes filled in, in place."""
        for step in reversed(self._steps):
            costs = self._own[step.size][step.at]
            for near in step.near:
                _, _, shape, at, turn = near
                tables, theirs = self._tables[shape], states[near[0]]
                costs = costs + (tables[at, theirs] if turn else tables[at, :, theirs])
            states[step.nodes] = costs.argmin(axis=1)
        return states
