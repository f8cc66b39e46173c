"""The assignment of least cost, with a proof of how far it can be from the best.

1. States that cannot be chosen go (reduce.py). If every node can then be eliminated (elimination.py) the answer is
   exact. Equal layers are computed once, where they share their tables; `merge` makes them share.
2. Otherwise bounds, better states and reductions in turns (bounding.py) until it can, or until neither moves.

Memory rows, where the problem has a limit, are the subject of limits.py, which solves such problems by the same means.
`milp` is the oracle of all of it: the same problem through HiGHS.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from ..errors import PlanError
from ..garbage import gc_paused
from .anytime import GRACE, bounded, descend, eliminated, wide, within
from .cutting_planes import Searched, priced_search
from .elimination import Tables, eliminate, elimination_order
from .lagrangian import Ascent, PricedProblem, Pricing, SweptPricing
from .least_memory import InfeasibleMemoryError, infeasible
from .memory_rows import Rows, binding
from .milp import WORK, NoAssignmentError, milp
from .presolve import consistent, contradiction, interned, reduced, restrict
from .problem import Problem, Solution
from .search_memory import OutOfBudgetError, current, spending
from .trws import Messages

__all__ = ["InfeasibleMemoryError", "Marginals", "marginals", "milp", "min_marginals", "solve", "solve_limited"]


# ----------------------------------------------------------------------------------------------------
# The assignment of least cost that keeps a memory limit at every moment.
#
# 1. States that cannot be chosen go, and so do the moments at which the limit cannot be broken (moments.py). Without
# any
#    left the problem has no limit.
# 2. Where elimination can do the problem at any prices, they are found exactly (priced_search.py). Otherwise:
# 3. The limit gets a price at each moment (multipliers.py): that gives a bound, and states that nearly keep the limit.
# 4. Of the states that were seen, HiGHS or a local search at those prices (local_search.py) makes the best that keep
# it.
# 5. A problem that is small enough goes to HiGHS as a whole, without the states that the bound excludes.
# ----------------------------------------------------------------------------------------------------

TURNS = 200  # of the multipliers, and of a search; where no time is given, of the largest problems too
FEW = 10  # turns of multipliers that are the best ones at the beginning
SWEEPS = 8  # at each of the multipliers
LAST = 20  # ... at those that a search begins at
WIDE = 2**12  # entries of a joint in a search among all nodes
SPARE = 0.05  # of the time, for the last of the searches and what comes after it
DEARER = (1.1, 1.4, 2.0, 4.0, 16.0, 256.0)  # than at the best multipliers, for first states that keep the limit
STILL = 3  # searches that find nothing, after which one begins elsewhere
WHOLE = 300_000  # entries of the edges up to which HiGHS is asked about the whole
LEAST = 5.0  # seconds to look for the least limit at least
NOTHING = "no assignment within the memory limit was found in the time given"
COPIES = 4  # of all tables that this takes, none shared
MANY = 10_000  # nodes above which dominated states are not looked for


def solve_limited(problem: Problem, *, seconds: float | None = None, gap: float = 1e-9) -> Solution:
    """The best assignment that keeps the limit, as far as it is found in the time.

    Args:
        seconds: to search at most; None: nothing looks at a clock, and so the answer is the same everywhere.
        gap: how far from the bound, relative to it, the cost may be for the search to end.

    Raises:
        InfeasibleMemoryError: where none keeps it; it names moments that cannot be met, and the least limit that can.
        PlanError: where nothing is allowed, whatever the memory, or nothing was found in the time.
    """

    # What is under way at the end may take `GRACE` longer.
    until = math.inf if seconds is None else time.monotonic() + seconds - min(GRACE, SPARE * seconds)
    inner = consistent(problem)
    bound, times = binding(inner.problem)
    if bound.limit is None:
        left = None if seconds is None else until - time.monotonic()
        found = solve(replace(problem, usages=(), limit=None), seconds=left)
        return replace(found, notes=(*found.notes, "the memory limit cannot be broken"))
    rows = Rows.of(bound, len(times))
    over = rows.least() > bound.limit
    if over.any():
        raise infeasible(problem, seconds=_left(until), near=gap)
    large = sum(table.size for table in bound.edges.values()) > WHOLE
    pricing: Pricing | SweptPricing | None = Pricing.of(bound, rows) if seconds is None else None
    if pricing is None and seconds is None and large:
        pricing = SweptPricing(bound, rows)
    try:
        found, leanest, least, priced, prices = (
            Searched() if pricing is None else priced_search(bound, rows, pricing, gap)
        )
    except OutOfBudgetError:
        pricing = None  # what it made goes first
        found, leanest, least, priced, prices = priced_search(bound, rows, SweptPricing(bound, rows), gap)
    known = None if leanest is None else inner.lift(leanest.states[:-1])
    if known is not None and found is None and large:
        return _leanest(problem, infeasible(problem, known=known, least=least), priced)
    if least is not None and least > bound.limit:
        return _leanest(problem, infeasible(problem, known=known, near=gap), priced)
    if found is not None and (found.gap <= gap or large):
        states, least = found.states, found.bound
    else:
        try:
            better = _searched(bound, rows, until, gap, prices)
        except NoAssignmentError:
            raise infeasible(problem, seconds=_left(until), near=gap) from None
        except PlanError:  # HiGHS was not asked, or not for long enough
            if found is None and known is None:
                raise
            better = None
        if found is None and better is None:
            return _leanest(problem, infeasible(problem, known=known, near=gap), priced)
        found = _best_of(found, better)
        states, least = found.states, found.bound
    states = tuple(inner.lift(states[:-1]))
    cost = problem.cost(states)
    return Solution(states, cost, cost if found.bound >= found.cost else min(cost, least), found.notes)


def swept(problem: Problem, gap: float) -> Solution:
    """A consistent problem without a limit, where there is not the memory for elimination.

    Raises:
        PlanError: nothing was found.
    """
    names = (*problem.names, "what every plan holds") if problem.names else ()  # as `binding` leaves it
    free = replace(problem, costs=(*problem.costs, np.zeros(1)), names=names, usages=(), limit=0.0)
    rows = Rows.of(free, 0)
    found = priced_search(free, rows, SweptPricing(free, rows), gap).found
    if found is None:
        raise PlanError(
            "no allowed assignment of strategies was found in the host's memory that the search may take",
            legal="a larger search_memory",
        )
    return replace(found, states=found.states[:-1])


def _leanest(problem: Problem, error: InfeasibleMemoryError, bound: float | None) -> Solution:
    """The states of the least memory known, where the limit is not below that after all.

    Args:
        bound: what states that keep the limit cost at least.

    Raises:
        InfeasibleMemoryError: it is.
    """
    error.bound = bound
    if error.states is None or error.enough is None or error.enough > problem.limit:
        raise error
    cost = problem.cost(error.states)
    if bound is None:
        bound = sum(float(own.min()) for own in problem.costs) + sum(
            float(table.min()) for table in problem.edges.values()
        )
    return Solution(error.states, cost, min(cost, bound), ("the plan of the least memory known",))


def _best_of(a: Solution | None, b: Solution | None) -> Solution:
    """The cheaper of two answers, with the higher of their bounds. One of them is there."""
    if a is None or b is None:
        return b if a is None else a
    best, bound = min(a, b, key=lambda found: found.cost), max(a.bound, b.bound)
    return replace(best, bound=min(bound, best.cost))


def _left(until: float) -> float | None:
    """Seconds to look for the least limit; None: no clock decides."""
    return None if until == math.inf else max(LEAST, until - time.monotonic())


class _Best:
    """The best states that keep the limit, and which states have been seen."""

    def __init__(self, problem: Problem, rows: Rows) -> None:
        self.problem, self.rows = problem, rows
        self.states, self.cost = None, np.inf
        self.taken: list[np.ndarray] = []  # all states that were seen, last ones last

    def see(self, states) -> bool:
        """Whether they are better than the best."""
        self.taken.append(np.asarray(states, np.int16))
        if (self.rows.used(states) > self.rows.limit).any():
            return False
        cost = self.problem.cost(states)
        if cost < self.cost:
            self.states, self.cost = list(states), cost
            return True
        return False

    def lately(self, many: int) -> list[np.ndarray]:
        """Which states (bool, by node) the best and the last so many have."""
        alive = [np.zeros(len(own), bool) for own in self.problem.costs]
        for states in (*self.taken[-many:], *((self.states,) if self.states is not None else ())):
            for mark, state in zip(alive, states):
                mark[state] = True
        return alive


def _searched(problem: Problem, rows: Rows, until: float, gap: float, prices: np.ndarray | None) -> Solution:
    """`_search`, of a problem that is not among the largest without its dominated states."""
    if len(problem.costs) > MANY:
        return _search(problem, rows, until, gap, prices)
    less = reduced(problem)
    found = _search(less.problem, Rows.of(less.problem, rows.count), until, gap, prices)
    return replace(
        found, states=less.lift(found.states), cost=found.cost + less.constant, bound=found.bound + less.constant
    )


def _search(problem: Problem, rows: Rows, until: float, gap: float, prices: np.ndarray | None = None) -> Solution:
    """Bound and states of a problem of `binding`.

    Args:
        prices: of memory, by moment, the best ones if they are known.
    """
    start = time.monotonic()
    current().ask(COPIES * 8 * sum(table.size for table in problem.edges.values()))
    priced = PricedProblem(problem, rows)
    ascent = Ascent(priced, prices)
    best = _Best(problem, rows)
    large = len(problem.costs) > MANY
    entries = sum(table.size for table in problem.edges.values())
    share = 0.3  # of the time for the multipliers
    turn = 0
    while time.monotonic() < start + share * (until - start):
        best.see(ascent.advance(SWEEPS))
        turn += 1
        if best.states is not None and best.cost - priced.bound <= 1e-9 * abs(best.cost):
            return Solution(tuple(best.states), best.cost, best.cost, ("exact: the bound meets the cost",))
        if best.states is not None and best.cost - priced.bound <= gap * abs(best.cost):
            return Solution(
                tuple(best.states), best.cost, priced.bound, ("multipliers: as near to the bound as asked for",)
            )
        if turn >= (TURNS if prices is None else FEW) and (not large or until == math.inf):
            break
    if large:
        _polish(best, priced, until - SPARE * (until - start))
    elif entries <= WHOLE:
        _merge(best, min(until, time.monotonic() + 0.3 * (until - time.monotonic())))
        alive = priced.alive(best.cost)
        proved = Solution(tuple(best.states or ()), best.cost, best.cost, ("bounds, then HiGHS on what is left",))
        if not all(mark.any() for mark in alive):
            return proved
        step = restrict(problem, alive)
        try:
            whole = reduced(step.problem)
            found = milp(
                whole.problem,
                seconds=None if until == math.inf else max(0.1, until - time.monotonic()),
                work=WORK if until == math.inf else None,
            )
            best.see(step.lift(whole.lift(found.states)))
            least = found.bound + whole.constant
            if found.gap == 0:
                return replace(proved, states=tuple(best.states), cost=best.cost, bound=best.cost)
            return Solution(
                tuple(best.states),
                best.cost,
                min(best.cost, max(priced.bound, least)),
                ("bounds and HiGHS; not proved",),
            )
        except NoAssignmentError:
            if best.states is None:
                raise
            return proved
        except PlanError:
            if best.states is None:
                raise PlanError(NOTHING, legal="more seconds") from None
    else:
        _polish(best, priced, time.monotonic() + 0.3 * (until - time.monotonic()))
        _merge(best, until)
    if best.states is None:
        raise PlanError(NOTHING, legal="more seconds")
    return Solution(
        tuple(best.states), best.cost, min(best.cost, priced.bound), ("multipliers and search; not proved",)
    )


def _merge(best: _Best, until: float) -> None:
    """The best of the states that have been seen lately, by HiGHS; of more and more of them."""
    many = 10
    while time.monotonic() < until:
        forever = until == math.inf
        found = within(
            best.problem,
            best.lately(many),
            entries=WHOLE,
            until=None if forever else until,
            work=WORK / 10 if forever else None,
        )
        if found is not None:
            best.see(found)
        if many >= len(best.taken):
            break
        many *= 2


def _polish(best: _Best, priced: PricedProblem, until: float) -> None:
    """Search at the best multipliers, and move those so that the limit is just kept.

    Where a search from what is held finds nothing more, the next begins at what the sweeps take at these prices.
    """
    rows, left = priced.rows, np.array(priced.order.left)
    if best.states is None:
        _dear(best, priced, until)
    priced.price(priced.best)
    priced.sweep(LAST)
    inner = _allowed(priced, until)
    turn, pace, side, still = 0, 1.0, 0, 0
    while time.monotonic() < until and (until < math.inf or turn < TURNS):
        before = priced.core.cost(inner)
        inner = wide(priced.core, inner, most=WIDE << min(2, still), seed=turn)
        turn += 1
        still = 0 if priced.core.cost(inner) < before - 1e-4 * abs(before) else still + 1
        if still > STILL:
            priced.sweep(LAST)
            other = _allowed(priced, until)
            for _ in range(3):
                other = wide(priced.core, other, seed=turn)
                turn += 1
            if priced.core.cost(other) < priced.core.cost(inner):
                inner = other
            still = 0
        states = priced.lift(inner)
        best.see(states)
        over = rows.over(states)
        if side * over.max() < 0:
            pace = max(0.05, 0.7 * pace)
        side = 1 if over.max() > 0 else -1
        multipliers = priced.multipliers * (1.0 + pace * np.clip(2.0 * over, -0.02, 0.1))
        positive = np.maximum(over, 0.0)
        if positive.any():
            multipliers = multipliers + pace * 0.02 * multipliers.sum() * positive / positive.sum()
        priced.price(multipliers)
        inner = [states[v] for v in left]


def _dear(best: _Best, priced: PricedProblem, until: float) -> None:
    """See what is cheapest where memory is dearer than at the best multipliers, up to the first that keeps the limit:
    states far from the best, but some, in the time of a few sweeps. They are looked for even where the time is over."""
    rows = best.rows
    multipliers = priced.best
    if not multipliers.any():  # there was no time for any: as much at each moment, and together what all else costs
        multipliers = np.full(rows.count, max(priced.bound, 1.0) / (rows.count * rows.limit))
    for times in DEARER:
        priced.price(times * multipliers)
        priced.sweep(LAST)
        if best.see(priced.lift(_allowed(priced, until))):
            break


def _allowed(priced: PricedProblem, until: float) -> list[int]:
    """What the sweeps took, made allowed where it is not."""
    states = priced.messages.states().tolist()
    if not np.isfinite(priced.core.cost(states)):
        states = descend(priced.core, states, patience=2, until=until)
    return states


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


@gc_paused()
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
