"""The assignment of least cost, with a proof of how far it can be from the best.

1. States that cannot be chosen go (reduce.py). If every node can then be eliminated (elimination.py) the answer is
   exact. Equal layers are computed once, where they share their tables; `merge` makes them share.
2. Otherwise bounds, better states and reductions in turns (bounding.py) until it can, or until neither moves.

Memory rows, where the problem has a limit, are the subject of limits.py, which solves such problems by the same means.
`milp` is the oracle of all of it: the same problem through HiGHS.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ..errors import PlanError
from ..uncollected import uncollected
from .solver.bounding import bounded, eliminated
from .solver.budget import OutOfBudgetError, current, spending
from .solver.contradiction import contradiction
from .solver.elimination import eliminate
from .solver.limits import solve_limited, swept
from .solver.order import elimination_order
from .solver.tables import Tables
from .solver.milp import milp
from .problem import Problem, Solution
from .solver.reduce import consistent, interned
from .solver.trws import Messages

__all__ = ["Marginals", "marginals", "milp", "min_marginals", "solve"]

SECONDS = 60.0  # for a problem that cannot be eliminated at once, where the caller gives no time
PROVED = 1e-9  # relative: what is as near as that to its bound is the best, but for rounding


def solve(problem: Problem, *, seconds: float | None = None, merge: bool = False, gap: float = PROVED) -> Solution:
    """The best assignment.

    Args:
        problem: the energy; with a limit, the memory is kept too (limits.py).
        seconds: about how long to search at most; None: as long as elimination takes, or a minute for what cannot be
            eliminated at once.
        merge: make tables of equal values one table, so that repeated blocks are computed once although their tables
            are different objects. It restricts nothing: the answer is as exact as without.
        gap: with a limit, how far from the bound, relative to it, an answer may be at which the search ends.

    Raises:
        PlanError: where nothing is allowed; it names nodes whose states contradict one another.
    """
    with spending(current()):
        try:
            return _solve(problem, seconds, merge, gap)
        except OutOfBudgetError as error:
            raise PlanError(f"no assignment of strategies was found: {error}", legal="a larger search_memory") from None


@uncollected()
def _solve(problem: Problem, seconds: float | None, merge: bool, gap: float) -> Solution:
    notes = []
    if merge:
        problem = interned(problem)
        tables = len({id(table) for table in problem.edges.values()})
        notes.append(f"merged: {len(problem.edges)} edges have {tables} different tables")
    if problem.limit is not None:
        return solve_limited(problem, seconds=seconds, gap=gap)
    until = time.monotonic() + (SECONDS if seconds is None else seconds)
    inner = consistent(problem)
    made = Tables()
    current().watch("elimination")
    try:
        gone = eliminated(inner.problem, made, None if seconds is None else until)
        found = None if gone is not None else bounded(inner.problem, made, until)
    except OutOfBudgetError:
        gone, made = None, Tables()  # what was made goes
        found = swept(inner.problem, gap)
    if gone is None:
        if found is None:
            raise contradiction(problem)
        states = tuple(inner.lift(found.states))
        cost = problem.cost(states)
        return Solution(states, cost, cost if found.gap == 0 else min(cost, found.bound), (*notes, *found.notes))
    if not np.isfinite(gone.constant):
        raise contradiction(problem)
    states = tuple(inner.lift(gone.complete([0] * len(problem.costs))))
    cost = problem.cost(states)
    return Solution(states, cost, cost, (*notes, "exact: every node was eliminated"))


@dataclass(frozen=True)
class Marginals:
    """What the whole costs at least with a node in each of its states.

    Attributes:
        costs: by state; infinite where none is allowed.
        exact: whether they are reached; otherwise they are lower bounds.
    """

    costs: np.ndarray
    exact: bool


def marginals(problem: Problem, node: int, *, sweeps: int = 30) -> Marginals:
    """The least cost of the whole with the node in each state, by eliminating all others.

    A memory limit is not looked at: with one they are lower bounds, and `exact` is False.

    Args:
        sweeps: of trws.py, where elimination is too large.

    Raises:
        PlanError: where nothing is allowed.
    """
    inner = consistent(problem)
    costs = np.full(len(problem.costs[node]), np.inf)
    order = elimination_order([len(own) for own in inner.problem.costs], inner.problem.edges, keep=(node,))
    if order.left == (node,):
        gone = eliminate(inner.problem.costs, inner.problem.edges, order)
        costs[inner.kept[node]] = gone.tables[node,] + gone.constant
        if not np.isfinite(costs).any():
            raise contradiction(problem)
        return Marginals(costs, problem.limit is None)
    # swept backwards to the node, everything else's share is in its own
    others = [v for v in range(len(problem.costs)) if v != node]
    messages = Messages(inner.problem, [node, *others])
    for _ in range(sweeps):
        messages.sweep()
    costs[inner.kept[node]] = messages.at_first()
    return Marginals(costs, False)


def min_marginals(problem: Problem, node: int) -> np.ndarray:
    """The least cost of the whole with the node in each state; a lower bound where `marginals` is not exact."""
    return marginals(problem, node).costs
