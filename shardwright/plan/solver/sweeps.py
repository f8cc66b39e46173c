"""Sequential tree-reweighted message passing (trws.py) in an order in which many nodes are swept at once.

Nodes of one colour share no edge: swept one after the other, none needs what another of them sends. The order is by
colour, and all edges between nodes of two colours with equally many states are one operation on arrays. Bounds are
those of `trws.Messages` in that order: a sweep brings less than in the order of a program, along which what one end
says reaches the other in one sweep, and takes a small part of its time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..problem import Problem
from .trws import ROUNDING, UNIT

__all__ = ["Sweeps", "colours"]

AT_ONCE = 2**15  # entries of the sums that are made at once; above it state by state: 256 KiB; measured


def colours(count: int, pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """By node, a number that none of its neighbours has: the least, the nodes of most neighbours first."""
    near: list[list[int]] = [[] for _ in range(count)]
    for i, j in pairs:
        near[i].append(j)
        near[j].append(i)
    out = [-1] * count
    for v in sorted(range(count), key=lambda v: (-len(near[v]), v)):
        taken = {out[u] for u in near[v]}
        out[v] = next(number for number in range(len(near[v]) + 1) if number not in taken)
    return np.array(out, np.int64)


class _Side:
    """What nodes of one colour get from neighbours of lower colours, or of higher ones.

    Attributes:
        begin, end: where that lies in the messages of that direction.
        at: of each entry, which state of the colour's nodes it is for.
        share: by state of the colour's nodes, what part of it they give each edge to the other side.
    """

    def __init__(self, begin: int, end: int, at: np.ndarray, share: np.ndarray) -> None:
        self.begin, self.end, self.at, self.share = begin, end, at, share


class _Between:
    """Edges between nodes of a lower and a higher colour, with equally many states each.

    Attributes:
        pairs: the edges, and whether the node of the higher colour has the lower number.
        ends: the nodes of the lower colour, and of the higher.
        colours, sizes: of the two.
        tables: (states below, states above, edges).
        at: where the messages to either side begin.
    """

    def __init__(self, key: tuple[int, ...], pairs: Sequence[tuple[int, int]]) -> None:
        lower, upper, *sizes, turned = key
        self.colours, self.sizes, self.turned, self.pairs = (lower, upper), sizes, bool(turned), pairs
        ends = np.array(pairs, np.int64).T
        self.ends = (ends[1], ends[0]) if turned else (ends[0], ends[1])
        self.tables = np.empty((*sizes, len(pairs)))
        self.at = [0, 0]


class Sweeps:
    """The messages of a problem, swept through its colours upwards and downwards.

    Args:
        problem: its memory limit is not looked at.

    Attributes:
        bound: no assignment costs less.
        best: the cost of states that are known; the caller's to lower.
        alive: by node, which states (bool) may still be part of an assignment that costs at most `best`.
    """

    def __init__(self, problem: Problem, best: float = np.inf) -> None:
        self.best, self.bound = best, -np.inf
        sizes = np.array([len(own) for own in problem.costs], np.int64)
        colour = colours(len(sizes), list(problem.edges))
        self._nodes = [np.flatnonzero(colour == c) for c in range(colour.max(initial=-1) + 1)]
        self._starts = [np.cumsum(sizes[mine]) - sizes[mine] for mine in self._nodes]
        self._sizes = [sizes[mine] for mine in self._nodes]
        groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for (i, j) in problem.edges:
            turned = colour[i] > colour[j]
            a, b = (j, i) if turned else (i, j)
            groups.setdefault((colour[a], colour[b], sizes[a], sizes[b], turned), []).append((i, j))
        self._groups = [_Between(tuple(map(int, key)), mine) for key, mine in sorted(groups.items())]
        self._lay(sizes, colour)
        self.alive = [np.ones(size, bool) for size in sizes.tolist()]
        self._retained = np.zeros(len(sizes))  # min r_v of the last sweep over v, and what was brought since
        self._swept = 0
        self.load(problem)

    def _lay(self, sizes: np.ndarray, colour: np.ndarray) -> None:
        """Put the messages where those of one colour's nodes are side by side."""
        first = np.zeros(len(sizes), np.int64)  # of each node among the states of its colour
        count = np.zeros((2, len(sizes)), np.int64)  # neighbours of lower colours, of higher ones
        for mine, starts in zip(self._nodes, self._starts):
            first[mine] = starts
        for group in self._groups:
            np.add.at(count[1], group.ends[0], 1)
            np.add.at(count[0], group.ends[1], 1)
        most = np.maximum(count.max(axis=0), 1)
        self._sides: list[list[_Side]] = []
        self._sources: list[list[list[_Between]]] = []
        ends = [0, 0]
        for c, mine in enumerate(self._nodes):
            two, sources = [], []
            for side in (0, 1):  # from below, from above
                begin, parts = ends[side], [np.empty(0, np.int64)]
                from_there = [group for group in self._groups if group.colours[1 - side] == c]
                for group in from_there:
                    group.at[1 - side] = ends[side]
                    at = first[group.ends[1 - side]] + np.arange(group.sizes[1 - side])[:, None]
                    parts.append(at.ravel())
                    ends[side] += at.size
                share = np.repeat(1.0 / most[mine], sizes[mine])
                two.append(_Side(begin, ends[side], np.concatenate(parts), share))
                sources.append(from_there)
            self._sides.append(two)
            self._sources.append(sources)
        self._kept = [[1.0 - count[side][mine] / most[mine] for side in (0, 1)] for mine in self._nodes]
        self._messages = [np.zeros(end) for end in ends]  # from below, from above
        self._given = [np.zeros(end) for end in ends]  # to below, to above: less what had come from there

    def load(self, problem: Problem) -> None:
        """Take other costs of the same nodes and edges; the messages stay."""
        self._own = [np.concatenate([problem.costs[v] for v in mine]) for mine in self._nodes]
        for group in self._groups:
            tables = np.array([problem.edges[pair] for pair in group.pairs])
            np.copyto(group.tables, tables.transpose((2, 1, 0) if group.turned else (1, 2, 0)))
        self.bound, self._swept = -np.inf, 0
        self.alive = [np.ones(len(own), bool) for own in self.alive]
        finite = (np.abs(array[np.isfinite(array)]).max(initial=0.0)
                  for array in (*self._own, *(group.tables for group in self._groups)))
        self._slack = UNIT * float(max(finite, default=0.0))

    def sweep(self) -> float:
        """Once up and once down; the bound."""
        self._pass(1)
        self._pass(0)
        return self.bound

    def _pass(self, to: int) -> None:
        """`to` 1: upwards, 0: downwards."""
        retained, behind, ahead = self._retained, 0.0, float(self._retained.sum())
        fixing = self._swept > 0 and np.isfinite(self.best)
        worst = self.best + ROUNDING * abs(self.best) + self._slack
        order = range(len(self._nodes))
        for c in order if to else reversed(order):
            mine, theta = self._nodes[c], self._theta(c)
            least = np.minimum.reduceat(theta, self._starts[c])
            ahead -= float(retained[mine].sum())
            if fixing:
                room = worst - behind - ahead - float(least.sum())
                self._fix(c, theta - np.repeat(least, self._sizes[c]) <= room)
            ahead += self._send(c, to, theta)
            retained[mine] = self._kept[c][to] * least
            behind += float(retained[mine].sum())
        self._swept += 1
        self.bound = max(self.bound, behind)

    def _theta(self, c: int) -> np.ndarray:
        """A colour's costs and all that its nodes were sent."""
        theta = self._own[c].copy()
        for side, messages in zip(self._sides[c], self._messages):
            theta += np.bincount(side.at, messages[side.begin:side.end], len(theta))
        return theta

    def _send(self, c: int, to: int, theta: np.ndarray) -> float:
        """The messages of a colour to those above (`to` 1) or below; what they bring those at least, all in all."""
        side = self._sides[c][to]
        given = self._given[to][side.begin:side.end]
        with np.errstate(invalid="ignore"):
            np.subtract((side.share * theta)[side.at], self._messages[to][side.begin:side.end], out=given)
        given[np.isnan(given)] = np.inf  # a state that all neighbours forbid: inf - inf
        total = 0.0
        for group in self._sources[c][to]:
            mine = self._part(self._given[to], group, 1 - to)
            message = self._part(self._messages[1 - to], group, to)
            _least(group.tables if to else group.tables.swapaxes(0, 1), mine, message)
            brought = (message + self._part(self._given[1 - to], group, to)).min(axis=0)
            np.add.at(self._retained, group.ends[to], brought)
            total += float(brought.sum())
        return total

    def _part(self, flat: np.ndarray, group: _Between, end: int) -> np.ndarray:
        """What is for the nodes at one end of the edges: (states, edges)."""
        begin, shape = group.at[end], (group.sizes[end], len(group.pairs))
        return flat[begin:begin + shape[0] * shape[1]].reshape(shape)

    def _fix(self, c: int, stays: np.ndarray) -> None:
        if not stays.all():
            for v, start, size in zip(self._nodes[c].tolist(), self._starts[c].tolist(), self._sizes[c].tolist()):
                self.alive[v] &= stays[start:start + size]

    def states(self) -> np.ndarray:
        """States: each colour's are the best given those of lower colours and what those of higher ones send."""
        out = np.zeros(len(self.alive), np.int64)
        for c, mine in enumerate(self._nodes):
            above = self._sides[c][1]
            choice = self._own[c] + np.bincount(above.at, self._messages[1][above.begin:above.end], len(self._own[c]))
            forbidden = np.zeros(len(choice))
            for group in self._sources[c][0]:
                taken = group.tables[out[group.ends[0]], :, np.arange(len(group.pairs))].T.ravel()
                at = self._sides[c][0].at[group.at[1] - self._sides[c][0].begin:][:len(taken)]
                finite = np.isfinite(taken)
                choice += np.bincount(at, np.where(finite, taken, 0.0), len(choice))
                forbidden += np.bincount(at, ~finite, len(choice))
            # where those taken contradict one another: the fewest of them
            fewest = np.repeat(np.minimum.reduceat(forbidden, self._starts[c]), self._sizes[c])
            choice = np.where(forbidden == fewest, choice, np.inf)
            least = np.repeat(np.minimum.reduceat(choice, self._starts[c]), self._sizes[c])
            first = np.where(choice == least, np.arange(len(choice)), len(choice))
            out[mine] = np.minimum.reduceat(first, self._starts[c]) - self._starts[c]
        return out


def _least(tables: np.ndarray, given: np.ndarray, out: np.ndarray) -> None:
    """min_s tables(s, t, edge) + given(s, edge)."""
    if tables.size <= AT_ONCE:
        np.min(tables + given[:, None], axis=0, out=out)
        return
    np.add(tables[0], given[0], out=out)
    some = np.empty(out.shape)
    for table, own in zip(tables[1:], given[1:]):
        np.minimum(out, np.add(table, own, out=some), out=out)
