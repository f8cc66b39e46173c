"""Bound and states of a problem that is too large to be eliminated at once.

In turns, on the core that the exact reductions leave (reduce.py):

    sweeps             a bound, and states (trws.py)
    descent            better states (descent.py)
    reduced costs      what cannot be part of anything that costs at most those states goes
    elimination        of what is left, as soon as that is small enough: then the answer is exact

until bound and cost meet, or neither moves. What is then left, if small, goes to HiGHS.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ...errors import PlanError
from ..problem import Problem, Solution
from .budget import current
from .descent import descend
from .elimination import Eliminated, eliminate, shared_work
from .milp import milp
from .order import elimination_order
from .reduce import Reduced, Restricted, Wiped, arcs, reduced, restrict
from .tables import Tables
from .trws import ROUNDING, Messages

__all__ = ["bounded", "eliminated"]

LARGEST = 2**26  # entries of a joint, of those that its tables allow
WORK = 2**31  # entries of all joints up to which nothing smaller is looked for first; about 6 s
SWEEPS = (1, 1, 2, 4, 8)  # between two looks at what they have changed: at first, then, ...; later the last
STALLED = 1e-2  # of the gap: what that many sweeps have to close for more of them to be worth it
SHRUNK = 0.9  # of the states: what has to be left at most for the core to be reduced again
MILP_ENTRIES = 300_000  # entries of a core's edges up to which HiGHS is asked


def eliminated(problem: Problem, made: Tables, until: float | None = None,
               work: int | None = WORK) -> Eliminated | None:
    """Every node eliminated; None where that is too large: one joint, the entries of all of them, or the time."""
    facts = made.facts
    order = elimination_order([len(own) for own in problem.costs], problem.edges, most=LARGEST,
                              allowed=facts.sparse(problem.edges), few=facts.few(problem.edges))
    if order.left:
        return None
    if work is not None and order.work > work and shared_work(problem.costs, problem.edges, order, facts) > work:
        return None
    return eliminate(problem.costs, problem.edges, order, made=made, until=until)


class _Search:
    """The best states, their cost and the bound so far, and the core that is left."""

    def __init__(self, problem: Problem, made: Tables, until: float) -> None:
        self.whole, self.made, self.until = problem, made, until
        self.core, self.constant = problem, 0.0  # what the core's cost lacks of the whole's
        self.states: list[int] | None = None
        self.cost, self.bound = np.inf, -np.inf
        self._lifts: list[Reduced | Restricted] = []
        self._descents = 0

    @property
    def late(self) -> bool:
        return time.monotonic() > self.until

    @property
    def proved(self) -> bool:
        return self.cost < np.inf and self.cost - self.bound <= ROUNDING * abs(self.cost)

    def offer(self, states: Sequence[int]) -> None:
        """States of the core: kept if they are the best."""
        for step in reversed(self._lifts):
            states = step.lift(states)
        cost = self.whole.cost(states)
        if cost < self.cost:
            self.states, self.cost = list(states), cost

    def prove(self, bound: float) -> None:
        """A bound of the core."""
        self.bound = min(max(self.bound, self.constant + bound), self.cost)

    def reduce(self, compare: bool = True) -> None:
        """The core without what the exact reductions take."""
        step = reduced(self.core, made=self.made, compare=compare)
        self.core, self.constant = step.problem, self.constant + step.constant
        self._lifts.append(step)

    def keep(self, messages: Messages) -> Messages | None:
        """Only what the messages leave, and what is consistent of it; None where that is nothing."""
        step = restrict(self.core, messages.alive)
        left = arcs(step.problem)
        if isinstance(left, Wiped):  # whatever is not known yet costs more
            self.bound = self.cost
            return None
        last = restrict(step.problem, left)
        self.core = last.problem
        self._lifts += [step, last]
        return messages.cut(last.problem, [kept[more] for kept, more in zip(step.kept, last.kept)])

    def sweep(self) -> None:
        """Sweeps and descents until they stall; what they exclude is taken out of the core."""
        messages = Messages(self.core)
        looks = 0
        while not (self.late or self.proved):
            current().watch("bounds", None if self.cost == np.inf else self.cost, None if self.bound == -np.inf else self.bound)
            messages.best = self.cost - self.constant
            before, left = messages.bound, sum(map(len, self.core.costs))
            found, least = messages.states, np.inf
            many = SWEEPS[min(looks, len(SWEEPS) - 1)]
            looks += 1
            for _ in range(many):
                messages.sweep()
                cost = self.core.cost(messages.states)
                if cost < least or least == np.inf:
                    found, least = messages.states.copy(), cost
                if self.late:
                    break
            self.prove(messages.bound)
            if not self.proved:
                self.offer(descend(self.core, found.tolist(), until=self.until, seed=self._descents))
                self._descents += 1
            if sum(int(mark.sum()) for mark in messages.alive) < SHRUNK * left:
                messages = self.keep(messages)
                if messages is None:
                    return
            elif many == SWEEPS[-1] and messages.bound - before <= STALLED * (self.cost - self.bound):
                break
        self.keep(messages)

    def solution(self, note: str) -> Solution:
        return Solution(tuple(self.states), self.cost, self.bound, (note,))

    def finish(self, gone: Eliminated) -> None:
        """The core is eliminated: what went before costs more than the states that were known then."""
        if np.isfinite(gone.constant):
            self.offer(gone.complete([0] * len(self.core.costs)))
        self.bound = self.cost


def bounded(problem: Problem, made: Tables, until: float) -> Solution | None:
    """The best states that were found and a bound; None where nothing is allowed.

    Args:
        problem: a consistent one (see reduce.py). Its limit is not looked at.
        made: tables known from before.
        until: a time of time.monotonic() at which it ends.

    Raises:
        PlanError: where nothing was found in time.
    """
    search = _Search(problem, made, until)
    compare = False  # at first: bounds shrink it sooner
    while True:
        try:
            search.reduce(compare)
        except PlanError:  # nothing is left that is allowed and costs less than what is known
            search.bound = search.cost
            return search.solution("exact: the bound meets the cost") if search.states is not None else None
        gone = eliminated(search.core, made, until)
        if gone is not None:
            search.finish(gone)
            return search.solution("exact: bounds, then elimination") if search.states is not None else None
        size = sum(map(len, search.core.costs))
        search.sweep()
        if search.proved:
            search.bound = search.cost
            return search.solution("exact: the bound meets the cost")
        if search.late or compare and sum(map(len, search.core.costs)) > SHRUNK * size:
            break
        compare = True
    note = "bounds and descent: not proved"
    if not search.late:
        gone = eliminated(search.core, made, until, None)
        left = until - time.monotonic()
        if gone is not None:
            search.finish(gone)
            note = "exact: bounds, then elimination"
        elif left > 0 and sum(table.size for table in search.core.edges.values()) <= MILP_ENTRIES:
            try:
                found = milp(search.core, seconds=left)
            except PlanError:  # infeasible, or nothing found in time
                note = "bounds and descent, HiGHS without avail: not proved"
            else:
                search.offer(found.states)
                search.prove(found.bound)
                note = "bounds and descent, then HiGHS on the core"
    if search.states is None:
        raise PlanError("no allowed assignment of strategies was found in the time given", legal="more seconds")
    return search.solution(note)
