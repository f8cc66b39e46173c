"""The least of a problem whose memory is paid for, exactly: by elimination.

    L(λ) = min_s [cost(s) + Σ_t λ_t (used_t(s) - limit)],   λ >= 0

is a lower bound of whatever keeps the limit, for each λ; the states that it is reached in come with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..problem import Problem
from .elimination import Script, shared_work
from .facts import Facts
from .merging import Merged, candidates, merged
from .moments import Rows
from .order import Order, elimination_order
from .tables import Tables

__all__ = ["Cut", "Pricing"]

MOST = 2**26  # entries of a joint, counting only what its tables allow
WORK = 2**31  # ... of all joints, equal ones once, above which the problem is not for elimination; about 3 s
ROOM = 64  # entries of what a joint leaves that count as one of fill; measured
DEGREE = 3  # of a node that is merged into a neighbour


@dataclass(frozen=True)
class Cut:
    """States, and what they say of every λ: L(λ) is at most cost + Σ_t λ_t (used_t - limit).

    Attributes:
        states: of the problem.
        cost: theirs, memory aside.
        used: what they hold at each moment.
    """

    states: tuple[int, ...]
    cost: float
    used: np.ndarray


class Pricing:
    """A problem that elimination can do at any prices.

    Args:
        problem: of `moments.binding`, consistent.
        rows: its usages.
    """

    def __init__(self, problem: Problem, rows: Rows, merges: Merged, order: Order, facts: Facts) -> None:
        self.problem, self.rows = problem, rows
        self._merged, self._order, self.facts = merges, order, facts
        self._script = Script([len(own) for own in merges.problem.costs], merges.problem.edges, order)
        self._inside = Rows.of(merges.problem, rows.count)

    @classmethod
    def of(cls, problem: Problem, rows: Rows, most: int = MOST) -> Pricing | None:
        """None where elimination is too large.

        Args:
            most: entries of a joint.
        """
        facts = Facts()
        best: tuple[int, Merged, Order] | None = None
        for into in ({}, candidates(problem, facts.sparse(problem.edges), DEGREE)):
            if best is not None and not into:
                break
            step = merged(problem, into)
            edges = step.problem.edges
            order = elimination_order([len(own) for own in step.problem.costs], edges, most=most,
                                      allowed=facts.sparse(edges), few=facts.few(edges), room=ROOM)
            if not order.left and (best is None or order.work < best[0]):
                best = order.work, step, order
        if best is None:
            return None
        work, step, order = best
        if work > WORK and shared_work(step.problem.costs, step.problem.edges, order, facts) > WORK:
            return None
        return cls(problem, rows, step, order, facts)

    @property
    def work(self) -> int:
        """Entries of all joints."""
        return self._order.work

    def least(self, multipliers: np.ndarray) -> tuple[float, Cut]:
        """L at these multipliers, and states in which it is reached.

        Args:
            multipliers: by moment, the price of a unit of memory.
        """
        inner, rows = self._merged.problem, self._inside
        costs, edges = rows.priced(inner.costs, multipliers), rows.priced_edges(inner.edges, multipliers)
        gone = self._script.run(costs, edges, made=Tables(self.facts))
        cut = self.cut(self._merged.lift(gone.complete([0] * len(inner.costs))))
        return gone.constant - float(multipliers.sum()) * self.rows.limit, cut

    def cut(self, states: Sequence[int]) -> Cut:
        states = tuple(map(int, states))
        return Cut(states, self.problem.cost(states), self.rows.used(states))
