"""Better states from given ones, where the problem is too large to be solved at once.

wide: nodes are held at their states until the rest can be eliminated within a joint of so many entries; the rest is
then chosen anew at once, and exactly. Which are held is drawn anew each time, so that all have their turn.

within: each node may take one of a few states only; what is left is small enough for HiGHS, with the memory rows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ...errors import PlanError
from ..problem import Problem
from .elimination import eliminate
from .milp import milp
from .moments import binding
from .order import elimination_order
from .reduce import reduced, restrict
from .tables import Tables

__all__ = ["wide", "within"]


def wide(problem: Problem, states: Sequence[int], *, most: int = 2**12, seed: int = 0) -> list[int]:
    """States that cost no more than the given ones. The memory limit is not looked at.

    Args:
        problem, states: where from; the states allowed.
        most: entries of a joint.
        seed: of the choice of what is held.
    """
    random = np.random.default_rng(seed)
    sizes = [len(own) for own in problem.costs]
    order = elimination_order(sizes, problem.edges, most=most, hold=random.uniform(0.2, 1.0, len(sizes)))
    held = [False] * len(sizes)
    for v in order.held:
        held[v] = True
    costs, edges = list(problem.costs), {}
    for (i, j), table in problem.edges.items():
        if held[i]:
            if not held[j]:
                costs[j] = costs[j] + table[states[i]]
        elif held[j]:
            costs[i] = costs[i] + table[:, states[j]]
        else:
            edges[i, j] = table
    out = [int(state) for state in states]
    gone = eliminate(costs, edges, order, made=Tables())
    return gone.complete(out) if np.isfinite(gone.constant) else out


def within(problem: Problem, alive: Sequence[np.ndarray], *, entries: int, until: float | None = None,
           work: float | None = None) -> list[int] | None:
    """The best of the states that are marked alive (bool, by node), within the memory limit.

    Args:
        problem: with its limit.
        entries: of the edges that are left; None is returned where there are more.
        until: a time of time.monotonic() at which HiGHS ends.
        work: of HiGHS (`milp`), after which it ends.

    Returns:
        The states; None where there are none, or none was found in time.
    """
    try:
        some = restrict(problem, alive)
        bound, _ = binding(some.problem)
        less = reduced(bound)
        if sum(table.size for table in less.problem.edges.values()) > entries:
            return None
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            return None
        found = milp(less.problem, seconds=left, work=work).states if less.problem.costs else ()
    except PlanError:
        return None
    return some.lift(less.lift(found)[:-1])
