"""A lower bound where memory is limited: the limit's price at each moment (Lagrangian multipliers).

    bound(λ) = min_s [cost(s) + Σ_t λ_t (used_t(s) - limit)],   λ >= 0

The inner minimum has no limit: nodes of at most two neighbours are eliminated, the rest is swept (sweeps.py), which
bounds it from below; the messages are kept from one λ to the next. λ grows where the states that the sweep takes hold
more than the limit, in proportion, and falls where they hold less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..problem import Problem
from .batched import Batched
from .moments import Rows
from .order import elimination_order
from .sweeps import Sweeps

__all__ = ["Ascent", "Priced"]


FIRST = 20  # sweeps before there is any price
FIXING = 20  # sweeps that look which states may be part of something as good as what is known
NEAR = 0.1  # of the limit: how far below the fullest moment one may be to have a price at first


class Priced:
    """A problem whose memory is paid for.

    Args:
        problem: of `moments.binding`, consistent.
        rows: its usages.

    Attributes:
        multipliers: by moment, the price of a unit of memory.
        bound: no assignment that keeps the limit costs less: the best one of all multipliers so far.
        best: the multipliers that gave it.
    """

    def __init__(self, problem: Problem, rows: Rows) -> None:
        self.problem, self.rows = problem, rows
        self.order = elimination_order([len(own) for own in problem.costs], problem.edges, degree=2)
        self.multipliers = self.best = np.zeros(rows.count)
        self.bound = -np.inf
        self.easy = Batched(problem, self.order)
        self._messages: Sweeps | None = None
        self._fresh = False

    def price(self, multipliers: np.ndarray) -> None:
        """Look at the problem with these multipliers from now on: `core` and `constant` are at these."""
        self.multipliers = multipliers
        if self.rows.paired:  # the tables themselves change
            edges = self.rows.priced_edges(self.problem.edges, multipliers)
            self.easy = Batched(replace(self.problem, edges=edges), self.order)
        self.core = self.easy.eliminate(self.rows.priced(self.problem.costs, multipliers))
        self.constant = self.easy.constant - float(multipliers.sum()) * self.rows.limit
        self._fresh = False

    @property
    def messages(self) -> Sweeps:
        """Of the core; kept from one price to the next."""
        if self._messages is None:
            self._messages = Sweeps(self.core)
        elif not self._fresh:
            self._messages.load(self.core)
        self._fresh = True
        return self._messages

    def sweep(self, times: int = 1) -> float:
        """The bound at these multipliers after so many sweeps."""
        self.messages.bound = -np.inf  # that of earlier prices says nothing about these
        for _ in range(times):
            self.messages.sweep()
        now = self.messages.bound + self.constant
        if now > self.bound:
            self.bound, self.best = now, self.multipliers
        return now

    def lift(self, states: Sequence[int]) -> list[int]:
        """States of the core as states of the problem: the best for them at these prices."""
        out = np.zeros(len(self.problem.costs), np.int64)
        out[list(self.order.left)] = states
        return self.easy.complete(out).tolist()

    def alive(self, cost: float) -> list[np.ndarray]:
        """Which states (bool, by node) may be part of an assignment that keeps the limit and costs at most so much."""
        self.price(self.best)
        self.messages.best = cost - self.constant
        self.sweep(FIXING)
        out = [np.ones(len(own), bool) for own in self.problem.costs]
        for v, mark in zip(self.order.left, self.messages.alive):
            out[v] = mark
        return out


class Ascent:
    """Multipliers made better step by step.

    They start where they are said to, or where the least that every plan holds comes nearest to the limit. A step has two halves: one that is
    added, in all so large a part of the multipliers' sum, and one by which each is multiplied. After steps that have
    brought nothing it goes back to the best multipliers, and the steps are shorter.
    """

    def __init__(self, priced: Priced, start: np.ndarray | None = None, *, step: float = 0.2) -> None:
        self.priced, self.step = priced, step
        self._over: np.ndarray | None = None
        self._failed = 0
        rows = priced.rows
        least = rows.least() / rows.unit
        near = np.maximum(least - least.max() + NEAR, 0.0) ** 2
        priced.price(np.zeros(rows.count))
        self._scale = max(abs(priced.sweep(FIRST)), 1.0) / rows.unit
        priced.price(near / near.sum() * self._scale if start is None else start)

    def advance(self, sweeps: int) -> list[int]:
        """Sweep at these multipliers, and go on to the next.

        Returns:
            The states that the sweeps took at these.
        """
        priced = self.priced
        now = priced.sweep(sweeps)
        states = priced.lift(priced.messages.states())
        over = priced.rows.over(states)
        self._over = over if self._over is None else 0.6 * self._over + 0.4 * over
        multipliers = priced.multipliers
        if now >= priced.bound:
            self._failed = 0
        else:
            self._failed += 1
            if self._failed > 5:
                self.step, self._failed = 0.8 * self.step, 0
                multipliers, self._over = priced.best, over
        change = np.where((multipliers <= 0) & (self._over < 0), 0.0, np.clip(self._over, -1.0, 1.0))
        total = max(float(multipliers.sum()), 1e-3 * self._scale)
        added = 0.5 * self.step * total * change / max(float(np.abs(change).sum()), 1e-12)
        factor = 1.0 + 0.5 * self.step * np.clip(5.0 * self._over, -1.0, 1.0)
        priced.price(np.maximum(multipliers * factor + added, 0.0))
        return states
