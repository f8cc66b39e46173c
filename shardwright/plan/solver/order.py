"""In which order nodes are eliminated.

The least weighted fill first (entries of the pair tables that it would newly make), then the smallest joint, then the
one whose neighbourhood has been eliminated from least often, so that a long chain is halved again and again.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["MOST", "Order", "Scope", "elimination_order"]

MOST = 2**24  # entries of a joint: 128 MiB where it is made at once, about 50 ms

Scope = tuple[int, ...]  # nodes, ascending


@dataclass(frozen=True)
class Order:
    """In which order the nodes go.

    Attributes:
        steps: (node, its neighbours at that time, ascending).
        left: the nodes that were not eliminated, ascending.
        held: of them, those that were taken out to let others go; their tables are to be taken at a given state.
        largest: entries of the largest joint.
        work: entries of all joints; what sharing saves is not taken off.
    """

    steps: tuple[tuple[int, Scope], ...]
    left: tuple[int, ...]
    held: tuple[int, ...]
    largest: int
    work: int


class _Rest:
    """What is left of the graph while an order is made."""

    def __init__(self, sizes: Sequence[int], pairs: Iterable[tuple[int, int]], most: int, degree: int | None,
                 keep: Collection[int], allowed: Mapping[tuple[int, int], float],
                 few: Mapping[tuple[int, int], int], room: int) -> None:
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
        self.open = [True] * len(sizes)  # may still be eliminated or held
        for v in keep:
            self.open[v] = False
        self._level = [0] * len(sizes)  # how often the neighbourhood has been eliminated from, one after the other
        self._current: list[tuple[int, int, int] | None] = [None] * len(sizes)
        self._heap: list[tuple[int, int, int, int]] = []

    def key(self, v: int) -> tuple[int, int, int] | None:
        """(fill, joint, level), or None where v cannot go."""
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
        """These nodes' keys anew."""
        for v in nodes:
            if self.open[v]:
                self._current[v] = found = self.key(v)
                if found is not None:
                    heapq.heappush(self._heap, (*found, v))

    def next(self) -> tuple[int, int] | None:
        """(the best node to go, its joint); None: none can."""
        while self._heap:
            *found, v = heapq.heappop(self._heap)
            if self.open[v] and self._current[v] == tuple(found):
                return v, found[1]
        return None

    def take(self, v: int) -> set[int]:
        """Takes a node out; its neighbours."""
        self.open[v] = False
        for u in self.near[v]:
            self.near[u].discard(v)
        return self.near[v]

    def join(self, v: int) -> set[int]:
        """Takes a node out and makes its neighbours neighbours of one another; the nodes whose keys that changed."""
        near, around = self.near, list(self.take(v))
        stale = set(around)
        for position, a in enumerate(around):
            self._level[a] = max(self._level[a], self._level[v] + 1)
            for b in around[position + 1:]:
                if self.few:
                    self.few.pop((a, b), None)
                    self.few.pop((b, a), None)
                if b not in near[a]:
                    stale |= near[a] & near[b]
                    near[a].add(b)
                    near[b].add(a)
        return stale


def elimination_order(sizes: Sequence[int], pairs: Iterable[tuple[int, int]], *, most: int = MOST,
                      degree: int | None = None, keep: Collection[int] = (),
                      hold: Sequence[float] | None = None,
                      allowed: Mapping[tuple[int, int], float] | None = None,
                      few: Mapping[tuple[int, int], int] | None = None, room: int = 0) -> Order:
    """A min-fill order of the nodes.

    Args:
        sizes: by node, how many states it has.
        pairs: the nodes that share a table.
        most: entries of a joint; a node that would need more stays.
        degree: a node with more neighbours stays; None: no such limit. With 2, what is left is pairwise again.
        keep: nodes that stay.
        hold: where nothing more can go, the node with the most (neighbours times this weight of it) is held, so that
            all go or are held; None: none is.
        allowed, few: what is known of the pairs' tables (`Facts.sparse`, `Facts.few`): they make joints smaller.
        room: so many entries of what a joint leaves count as one of fill; 0: they do not count.
    """
    rest = _Rest(sizes, pairs, most, degree, keep, allowed or {}, few or {}, room)
    steps: list[tuple[int, Scope]] = []
    held: list[int] = []
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
        elif hold is None:
            break
        else:
            if heavy is None:
                heavy = [(-len(rest.near[v]) * hold[v], v) for v, is_open in enumerate(rest.open) if is_open]
                heapq.heapify(heavy)
            while heavy:
                weight, v = heapq.heappop(heavy)
                now = -len(rest.near[v]) * hold[v]
                if rest.open[v] and weight == now:
                    held.append(v)
                    rest.look(rest.take(v))
                    break
                if rest.open[v]:
                    heapq.heappush(heavy, (now, v))
            else:
                break
    done = {v for v, _ in steps}
    if held:  # also of those that went before them
        out = frozenset(held)
        steps = [(v, tuple(u for u in around if u not in out)) for v, around in steps]
    return Order(tuple(steps), tuple(v for v in range(len(sizes)) if v not in done), tuple(held), largest, work)
