"""Equal layers of a problem: where they stand, and a shorter problem that has a few of them in place of all.

    period P        node v + P costs what node v does, and shares the same tables with nodes that stand P further on;
                    tables are the same where they are one object
    run             nodes [a, b + P) of which all v in [a, b) repeat P later
    shorter         of a run of more than `KEPT` layers those in the middle go, and the two sides are joined as
                    neighbouring layers are
    hub             a node that shares tables with nodes of many layers, as a table of positions does: it is joined to the
                    layers that are left

Prices of memory differ between the two sides of a moment that has a price: they end a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Shorter", "kinds", "period", "shorter"]

KEPT = 3  # layers of a run that are left
AHEAD = 1  # of them, before the cut; the one behind the cut stands for those that went
NEAR = 2  # periods: up to so far from a node another one is its neighbour in its own layer, or in the next
TRIED = 16  # periods that are tried

Pair = tuple[int, int]


@dataclass(frozen=True)
class Shorter:
    """A problem without most of its equal layers.

    Attributes:
        nodes: by node of the shorter problem, which one of the whole it was.
        edges: the shorter problem's.
        stands: by node of the whole, the node of the shorter problem that stands for it.
        pairs: by edge of the whole, the edge of the shorter problem that stands for it.
    """

    nodes: tuple[int, ...]
    edges: dict[Pair, np.ndarray]
    stands: np.ndarray
    pairs: dict[Pair, Pair]


def period(costs: Sequence[np.ndarray], edges: Mapping[Pair, np.ndarray]) -> int | None:
    """After how many nodes a layer begins anew; None: there are no equal layers."""
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
    """By node a number, which nodes of equal costs that share the same tables with others have in common."""
    looks: list[list[tuple[int, ...]]] = [[] for _ in costs]
    for (i, j), table in edges.items():
        looks[i].append((0, id(table)))
        looks[j].append((1, id(table)))
    return _kinds(costs, looks)


def _kinds(costs: Sequence[np.ndarray], looks: Sequence[list[tuple[int, ...]]]) -> np.ndarray:
    """By node a number, which nodes of equal costs and equal tables have in common."""
    number: dict[tuple, int] = {}
    return np.array([number.setdefault((own.tobytes(), *sorted(mine)), len(number)) for own, mine in zip(costs, looks)])


def shorter(costs: Sequence[np.ndarray], edges: Mapping[Pair, np.ndarray], size: int) -> Shorter | None:
    """The problem without most of its equal layers; None where there is nothing to leave out.

    Args:
        size: the period.
    """
    count, reach = len(costs), NEAR * size
    looks: list[list[tuple[int, int, int]]] = [[] for _ in costs]
    for (i, j), table in edges.items():
        near = j - i <= reach
        looks[i].append((0, j - i, id(table)) if near else (1, j, id(table)))
        looks[j].append((0, i - j, id(table)) if near else (1, i, id(table)))
    kind = _kinds(costs, looks)
    same = np.concatenate(([False], kind[size:] == kind[:-size], [False]))
    begins, ends = np.flatnonzero(same[1:] & ~same[:-1]), np.flatnonzero(same[:-1] & ~same[1:])
    cuts: list[tuple[int, int]] = []  # the nodes [from, to) that go
    for a, b in zip(begins.tolist(), ends.tolist()):
        layers = (b - a) // size + 1
        if layers > KEPT:
            cuts.append((a + AHEAD * size, a + (AHEAD + layers - KEPT) * size))
    if not cuts:
        return None
    stands, gone, left = np.empty(count, np.int64), np.zeros(count, bool), 0
    begin = 0
    for start, stop in cuts:
        stands[begin:start] = np.arange(left, left + start - begin)
        left += start - begin
        stands[start:stop] = left + np.arange(stop - start) % size  # the layer behind the cut stands for these
        gone[start:stop] = True
        begin = stop
    stands[begin:] = np.arange(left, left + count - begin)
    nodes = np.flatnonzero(~gone)
    out: dict[Pair, np.ndarray] = {}
    pairs: dict[Pair, Pair] = {}
    for (i, j), table in edges.items():
        x, y = int(stands[i]), int(stands[j])
        if j - i <= reach:
            y = x + j - i
        pairs[i, j] = (x, y)
        if not x < y < len(nodes) or out.setdefault((x, y), table) is not table:
            return None  # it repeats itself in another way than this file knows
    return Shorter(tuple(nodes.tolist()), out, stands, pairs)
