"""A bound of a problem whose memory is paid for, where elimination is too large (pricing.py): by sweeps (trws.py).

    L(λ) >= Σ_v min θ_v + Σ_(u,v) min e'_uv      θ_v = c_v + Σ_u m_uv,   e'_uv(s, t) = e_uv(s, t) - m_vu(s) - m_uv(t)

for any messages m. They are those that sweeps over a shorter problem of few equal layers end with (repeats.py); where
such layers are many, most of θ and e' are the same then, and are worked out once. So a bound of the whole costs what a
few layers cost, in time and in memory, and it is as true as if all had been swept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..problem import Problem
from .budget import OutOfBudgetError, current
from .moments import Rows
from .repeats import Pair, Shorter, period, shorter
from .trws import Messages

__all__ = ["SweptPricing", "bound_of"]

SWEEPS = 48  # of the shorter problem at most
LOOK = 4  # after how many of them
STALLED = 3e-5  # ... the bound has to have moved, relative to it, for more of them
ENTRIES = 2**29  # entries of the tables that all sweeps together go through; about 2 s
BEST = 3  # states of a node, by what the sweeps say of them, that are worth a closer look


class SweptPricing:
    """A problem that sweeps bound at any prices.

    Args:
        problem: of `moments.binding`, consistent.
        rows: its usages.
    """

    def __init__(self, problem: Problem, rows: Rows) -> None:
        self.problem, self.rows = problem, rows
        self._period = period(problem.costs, problem.edges)
        self._last: Messages | None = None

    def least(self, multipliers: np.ndarray) -> tuple[float, list[np.ndarray]]:
        """A lower bound of L at these multipliers, and of each node the states that look best at them.

        Args:
            multipliers: by moment, the price of a unit of memory.
        """
        costs = self.rows.priced(self.problem.costs, multipliers)
        edges = self.rows.priced_edges(self.problem.edges, multipliers)
        short = None if self._period is None else shorter(costs, edges, self._period)
        if short is None:
            nodes = tuple(range(len(costs)))
            short = Shorter(nodes, edges, np.array(nodes), {pair: pair for pair in edges})
        inner = Problem(tuple(costs[v] for v in short.nodes), short.edges)
        try:
            messages = Messages(inner)
        except OutOfBudgetError:
            return self._unswept(costs, edges, short) - float(multipliers.sum()) * self.rows.limit, self._nearest(inner, short)
        budget = current()
        if self._last is not None:
            messages.resume(self._last)
        self._last = messages
        once = max(1, sum(table.size for table in short.edges.values()))
        before = -np.inf
        for turn in range(max(LOOK, min(SWEEPS, ENTRIES // once))):
            budget.watch()
            messages.sweep()
            if turn % LOOK == LOOK - 1:
                if messages.bound - before <= STALLED * abs(messages.bound):
                    break
                before = messages.bound
        thetas, sent = messages.thetas(), messages.sent()
        value = bound_of(costs, edges, short, sent)
        looks = [self._look(theta, state) for theta, state in zip(thetas, messages.states.tolist())]
        return value - float(multipliers.sum()) * self.rows.limit, [looks[v] for v in short.stands.tolist()]

    def forget(self) -> None:
        """Let go of the messages of the last sweeps, from which the next ones would begin."""
        self._last = None

    @staticmethod
    def _unswept(costs: Sequence[np.ndarray], edges: Mapping[Pair, np.ndarray], short: Shorter) -> float:
        """The bound without any messages: it takes no memory."""
        zeros = {size: np.zeros(size) for size in {len(own) for own in costs}}
        sent = {}
        for (x, y), table in short.edges.items():
            sent[x, y], sent[y, x] = zeros[table.shape[1]], zeros[table.shape[0]]
        return bound_of(costs, edges, short, sent)

    def _nearest(self, inner: Problem, short: Shorter) -> list[np.ndarray]:
        """The states of each node that look best by their own costs and those over its edges, each at its least."""
        least: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        totals = list(inner.costs)
        for pair, table in inner.edges.items():
            for axis, v in enumerate(pair):
                key = (id(table), axis)
                if key not in least:
                    least[key] = table.min(axis=1 - axis), table
                totals[v] = totals[v] + least[key][0]
        looks = [self._look(total, int(total.argmin())) for total in totals]
        return [looks[v] for v in short.stands.tolist()]

    @staticmethod
    def _look(theta: np.ndarray, state: int) -> np.ndarray:
        """The states (bool) of a node that look best, and the one that the sweep took."""
        mark = np.zeros(len(theta), bool)
        mark[np.argsort(theta, kind="stable")[:BEST]] = True
        mark[state] = True
        return mark


def bound_of(costs: Sequence[np.ndarray], edges: Mapping[Pair, np.ndarray], short: Shorter,
             sent: Mapping[Pair, np.ndarray]) -> float:
    """The bound that messages give.

    Args:
        costs, edges: of the whole.
        short: the problem that was swept.
        sent: its messages, by (from, to): to each state of the latter.
    """
    thetas: list[list[np.ndarray]] = [[] for _ in costs]
    known: dict[tuple[int, ...], float] = {}
    total = 0.0
    for (i, j), table in edges.items():
        x, y = short.pairs[i, j]
        up, down = sent[x, y], sent[y, x]  # to j, to i
        thetas[j].append(up)
        thetas[i].append(down)
        key = (id(table), id(up), id(down))
        if key not in known:
            known[key] = float((table - down[:, None] - up).min())
        total += known[key]
    sums: dict[tuple, float] = {}
    for own, mine in zip(costs, thetas):
        key = (own.tobytes(), *map(id, mine))
        if key not in sums:
            sums[key] = float(sum(mine, own).min())
        total += sums[key]
    return total
