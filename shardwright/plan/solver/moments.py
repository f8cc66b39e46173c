"""The moments at which a memory limit matters, and what a plan holds at each.

A moment is a row: Σ_(usages u that live then) m_u(s_node(u)) <= limit. What lives at one moment may be part of what
lives at another: then only the other is a row. A row that even the greatest states cannot break is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..problem import Problem, Usage

__all__ = ["Rows", "binding"]


def _latest(first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """The moments at which as much as possible lives: something begins at one or since the last, and then something
    ends."""
    begins, ends = np.unique(first), np.unique(stop)
    before = np.searchsorted(begins, ends)  # how many moments of beginning lie before that end
    grown = np.diff(before, prepend=0) > 0
    return begins[before[grown] - 1]


def binding(problem: Problem) -> tuple[Problem, np.ndarray]:
    """The same problem with usages only where the limit can be broken; its moments are numbered from 0.

    One node with one state is added at the end. It holds what every plan holds.

    Returns:
        The problem, and of each of its moments which one of the given problem it is.
    """
    fixed = len(problem.costs)
    uses = [use for use in problem.usages if use.start < use.stop and np.any(use.amount)]
    allowed = [np.isfinite(own) for own in problem.costs]
    if not uses:
        return replace(problem, usages=(), limit=None), np.empty(0, np.int64)
    least = np.array([np.min(use.amount[allowed[use.node]], initial=np.inf) for use in uses])
    most = np.array([np.max(use.amount[allowed[use.node]], initial=-np.inf) for use in uses])
    start, stop = (np.array([getattr(use, name) for use in uses]) for name in ("start", "stop"))
    varies = most > least
    times = _latest(start, stop)
    first, last = np.searchsorted(times, start), np.searchsorted(times, stop)
    peak = _running(first, last, most, len(times))
    times = times[peak > problem.limit]
    first, last = np.searchsorted(times, start), np.searchsorted(times, stop)
    merged: dict[tuple[int, int, int], np.ndarray] = {}
    for use, a, b, moves in zip(uses, first.tolist(), last.tolist(), varies.tolist()):
        if a < b:
            key = (use.node if moves else fixed, a, b)
            amount = np.asarray(use.amount, float) if moves else np.min(use.amount[allowed[use.node]], keepdims=True)
            merged[key] = merged[key] + amount if key in merged else amount
    usages = tuple(Usage(v, a, b, amount) for (v, a, b), amount in merged.items())
    names = (*problem.names, "what every plan holds") if problem.names else ()
    return replace(problem, costs=(*problem.costs, np.zeros(1)), names=names, usages=usages,
                   limit=problem.limit if usages else None), times


def _running(first: np.ndarray, last: np.ndarray, amounts: np.ndarray, count: int) -> np.ndarray:
    """The sum of the amounts that live at each of so many moments."""
    change = np.zeros(count + 1)
    np.add.at(change, first, amounts)
    np.add.at(change, last, -amounts)
    return np.cumsum(change)[:-1]


@dataclass(frozen=True)
class Rows:
    """The usages of a problem of `binding`, or of a part of it, as arrays.

    Attributes:
        count: of the moments.
        limit: at each.
        node, first, last: of each usage its node, and its moments [first, last).
        amounts: by usage and state, one after the other.
        offset: where each usage's begin.
    """

    count: int
    limit: float
    node: np.ndarray
    first: np.ndarray
    last: np.ndarray
    amounts: np.ndarray
    offset: np.ndarray

    @classmethod
    def of(cls, problem: Problem, count: int) -> Rows:
        uses = problem.usages
        sizes = np.array([len(use.amount) for use in uses], np.int64)
        node, first, last = (np.array([getattr(use, name) for use in uses], np.int64)
                             for name in ("node", "start", "stop"))
        amounts = np.concatenate([np.asarray(use.amount, float) for use in uses]) if uses else np.empty(0)
        return cls(count, problem.limit, node, first, last, amounts, np.cumsum(sizes) - sizes)

    def used(self, states: Sequence[int]) -> np.ndarray:
        """What the states hold at each moment."""
        held = self.amounts[self.offset + np.asarray(states, np.int64)[self.node]]
        return _running(self.first, self.last, held, self.count)

    @property
    def unit(self) -> float:
        """What `over` counts in: the limit."""
        return self.limit if self.limit > 0 else 1.0

    def over(self, states: Sequence[int]) -> np.ndarray:
        """How far the states pass the limit at each moment, relative to it; below 0 where they keep it."""
        return (self.used(states) - self.limit) / self.unit

    def least(self) -> np.ndarray:
        """What is held at each moment at least: each usage in its least state."""
        if not len(self.node):
            return np.zeros(self.count)
        return _running(self.first, self.last, np.minimum.reduceat(self.amounts, self.offset), self.count)

    def most(self) -> np.ndarray:
        """What is held at each moment at most."""
        if not len(self.node):
            return np.zeros(self.count)
        return _running(self.first, self.last, np.maximum.reduceat(self.amounts, self.offset), self.count)

    def priced(self, costs: Sequence[np.ndarray], multipliers: np.ndarray) -> list[np.ndarray]:
        """The costs with the memory paid for: Σ_t multiplier_t · m(s) over the moments that a usage lives at."""
        total = np.concatenate(([0.0], np.cumsum(multipliers)))
        price = total[self.last] - total[self.first]
        out = list(costs)
        ends = np.append(self.offset[1:], len(self.amounts))
        paid = np.repeat(price, ends - self.offset) * self.amounts
        for v, a, b, live in zip(self.node.tolist(), self.offset.tolist(), ends.tolist(), (price > 0).tolist()):
            if live:
                out[v] = out[v] + paid[a:b]
        return out
