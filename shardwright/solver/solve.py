"""The assignment of least cost, with a bound on its distance from the best: the solver's entry points; and the least
limit that can be kept.

Without a limit (`solve`):

1. Remove states that cannot be chosen (`presolve`).
2. Eliminate every node (`elimination`) where no joint is too large: the answer is exact. Equal layers are computed
   once where they share their tables; `merge` makes them share.
3. Otherwise alternate bounds, better states and reductions (`anytime`), until elimination is possible or neither
   bound nor cost moves.

With a memory limit (`solve_limited`):

1. Remove states that cannot be chosen, and moments at which the limit cannot be broken (`memory_rows`). With no
   moment left, the problem has no limit.
2. Where elimination can do the problem at any prices of memory, find the cheapest states by these prices
   (`priced_search`). Where it cannot, and the problem is large, bound by sweeps instead.
3. Otherwise give the limit a price at each moment (`lagrangian`): a bound, and states near the limit.
4. HiGHS (`milp`) or a local search at these prices makes the best states within the limit out of those that were
   seen.
5. A problem that is small enough goes to HiGHS as a whole, without the states that the bound excludes.

`marginals` gives the least cost with one node fixed in each of its states. `milp` is the oracle of all of it.

The least memory limit with which there is a plan, min_s max_t used_t(s), as a range (`least_memory`), and the error
that names it (`InfeasibleMemoryError`). No clock is read.

1. Prices of memory bound the least limit from below, where elimination can do the problem
   (`cutting_planes.leanest_by_prices`):

       least limit >= max_λ min_s Σ_t λ_t used_t(s),   λ >= 0, Σ λ = 1

   The upper end is kept by states of these minima, spliced.
2. Where elimination cannot do it, the lower end is a bound by sweeps, and the upper end is that of the states which
   look best to the sweeps (`swept_leanest`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import PlanError
from ..garbage_collection import gc_paused, roomy_stack
from ..identity_tables import IdentitySet
from .anytime import GRACE, bounded, descend, eliminated, wide, within
from .cutting_planes import LeastMemory, costless, leanest_by_prices
from .elimination import Tables, eliminate, elimination_order
from .lagrangian import Ascent, PricedProblem, Pricing, SweptPricing
from .memory_rows import Rows, binding
from .milp import WORK, NoAssignmentError, milp
from .presolve import consistent, contradiction, interned, reduced, restrict
from .priced_search import Searched, priced_search, swept_leanest
from .problem import Problem, Solution, stopping
from .search_memory import OutOfBudgetError, current, spending
from .tree_reweighted import Messages

__all__ = [
    "InfeasibleMemoryError",
    "LeastMemory",
    "Marginals",
    "infeasible",
    "least_memory",
    "marginals",
    "milp",
    "solve",
    "solve_limited",
]

# -- the least limit --


SHOWN = 5  # moments that the error names
ROUNDING = 1e-9  # relative, of a bound by prices
MOST_WORK = 2**28  # entries of all joints above which a problem is not priced at every moment


class InfeasibleMemoryError(PlanError):
    """A memory limit that no plan keeps.

    Attributes:
        moments: the moments that cannot be met: by themselves, or in the plan of the least memory known.
        least: no plan keeps a limit below it.
        enough: a plan keeps this limit; None: none is known.
        states: of that plan.
        bound: a lower bound on the cost of a plan within the limit; None: not known.
    """

    moments: tuple[int, ...] = ()
    least: float = 0.0
    enough: float | None = None
    states: tuple[int, ...] | None = None
    bound: float | None = None

    def located(
        self, *, operator: str | None = None, source: str | None = None, strategy: object | None = None
    ) -> InfeasibleMemoryError:
        out = super().located(operator=operator, source=source, strategy=strategy)
        out.moments, out.least, out.enough = self.moments, self.least, self.enough
        out.states, out.bound = self.states, self.bound
        return out


def least_memory(problem: Problem) -> LeastMemory:
    """The least limit with which the problem has an assignment, as a range; its states keep the upper end.

    Args:
        problem: the problem; its own limit is ignored.

    Raises:
        PlanError: nothing is allowed, whatever the memory.
    """
    with spending(current()):
        return _least_memory(problem)


def _least_memory(problem: Problem) -> LeastMemory:
    restricted = consistent(problem)
    bound, times = binding(replace(costless(restricted.problem), limit=-1.0))  # every moment is a row
    rows = Rows.of(bound, len(times))
    low = float(rows.least().max(initial=0.0))
    pricing = Pricing.of(bound, rows)
    if pricing is None or pricing.work > MOST_WORK:
        alive = [np.zeros(len(node_costs), bool) for node_costs in bound.costs]
        found = swept_leanest(bound, replace(rows, limit=0.0), alive, low)
    else:
        found = leanest_by_prices(bound, rows, pricing, low)
        least = (1.0 - ROUNDING) * found.least
        whole = (rows.amounts == np.floor(rows.amounts)).all()
        found = replace(found, least=max(low, float(np.ceil(least)) if whole else least))
    if found.states is None:
        return found
    states = tuple(restricted.lift(found.states[:-1]))
    return replace(found, states=states) if np.isfinite(problem.cost(states)) else LeastMemory(found.least, None, None)


def infeasible(
    problem: Problem, *, known: Sequence[int] | None = None, least: float = 0.0, search: bool = True
) -> InfeasibleMemoryError:
    """The error for a problem whose limit no assignment keeps.

    Args:
        problem: the problem.
        known: states of little memory.
        least: a limit below which there is no plan.
        search: False: the least limit is not searched, as `known` and `least` are its ends.
    """
    found = least_memory(problem) if search else LeastMemory(least, None, None)
    found = replace(found, least=max(found.least, least))
    bound, times = binding(replace(problem, limit=-1.0))
    rows = Rows.of(bound, len(times))
    if known is not None:
        most = float(rows.used((*known, 0)).max(initial=0.0))
        if found.enough is None or most < found.enough:
            found = replace(found, enough=most, states=tuple(known))
    needed, limit = rows.least(), np.inf if problem.limit is None else problem.limit
    if not (needed > limit).any() and found.states is not None:  # each moment can be met, but not all at once
        needed = rows.used((*found.states, 0))
    over = np.flatnonzero(needed > limit)
    moments = tuple(int(times[row]) for row in over)
    worst = over[np.argsort(-needed[over], kind="stable")][:SHOWN]
    shown = ", ".join(
        f"moment {times[row]} ({_largest_usages(problem, int(times[row]))}): at least {needed[row]:,.0f}"
        for row in worst
    )
    more = f" and {len(over) - len(worst):,} more" if len(over) > len(worst) else ""
    if found.enough is None:
        legal = f"a limit of more than {found.least:,.0f}; no plan that keeps one was found"
    elif found.enough <= (1.0 + 2 * ROUNDING) * found.least:
        legal = f"a limit of at least {found.enough:,.0f}"
    else:
        legal = f"a limit of {found.enough:,.0f}; none below {found.least:,.0f} can be kept"
    error = InfeasibleMemoryError(
        f"no plan keeps the memory limit of {limit:,.0f}" + (f"; it cannot be met at {shown}{more}" if shown else ""),
        legal=legal,
    )
    error.moments, error.least, error.enough, error.states = moments, found.least, found.enough, found.states
    return error


def _largest_usages(problem: Problem, moment: int) -> str:
    """The nodes with the most memory at a moment, in their least states, as text."""
    least: dict[int, float] = {}
    for use in problem.usages:
        if use.start <= moment < use.stop:
            least[use.node] = least.get(use.node, 0.0) + float(np.min(use.amount))
    largest = sorted(least, key=lambda v: -least[v])[:3]
    return "most in " + ", ".join(problem.names[v] if problem.names else f"node {v}" for v in largest)


# -- with a memory limit --

TURNS = 200  # most turns of the multipliers (of a large problem: only without a time limit), and of a search
FEW = 10  # the same, where the multipliers begin at the best ones
SWEEPS = 8  # sweeps at each of the multipliers
LAST = 20  # sweeps at the multipliers at which a search begins
WIDE = 2**12  # entries of a joint in a search among all nodes
SPARE = 0.05  # share of the time for the end of the last search and the steps after it
DEARER = (1.1, 1.4, 2.0, 4.0, 16.0, 256.0)  # factors on the best multipliers, to find first states within the limit
STILL = 3  # searches without success before one begins elsewhere
WHOLE = 300_000  # entries of the edges up to which HiGHS solves the whole problem
WHOLE_NODES = 2_000  # nodes up to which it does: over more it takes minutes and gigabytes
NOTHING = "no assignment within the memory limit was found in the time given"
COPIES = 4  # copies of all tables that a search takes, none shared
MANY = 10_000  # nodes above which dominated states are not removed


def solve_limited(problem: Problem, *, seconds: float | None = None, gap: float = 1e-9) -> Solution:
    """The best assignment within the limit, as far as it is found in the time.

    Args:
        problem: a problem with a limit.
        seconds: of the search at most; None: no clock is read, so the answer is the same on every machine.
        gap: relative gap to the bound at which the search ends.

    Raises:
        InfeasibleMemoryError: no assignment keeps the limit; the error names moments that cannot be met, and the
            least limit that can.
        PlanError: nothing is allowed, whatever the memory, or nothing was found in the time.
    """
    with spending(current()):
        return _solve_limited(problem, seconds, gap)


def _solve_limited(problem: Problem, seconds: float | None, gap: float) -> Solution:
    # A step that is running at the end may take `GRACE` longer.
    until = math.inf if seconds is None else time.monotonic() + seconds - min(GRACE, SPARE * seconds)
    restricted = consistent(problem)
    bound, times = binding(restricted.problem)
    if bound.limit is None:
        seconds = None if seconds is None else until - time.monotonic()
        free = solve(replace(problem, usages=(), limit=None), seconds=seconds)
        return replace(free, notes=(*free.notes, "no plan needs more than the memory limit"))
    rows = Rows.of(bound, len(times))
    over = rows.least() > bound.limit
    if over.any():
        raise infeasible(problem)
    large = sum(table.size for table in bound.edges.values()) > WHOLE or len(bound.costs) > WHOLE_NODES
    pricing: Pricing | SweptPricing | None = Pricing.of(bound, rows) if seconds is None else None
    if pricing is None and seconds is None and large:
        pricing = SweptPricing(bound, rows)
    searched = Searched() if pricing is None else None

    def lifted(found: Solution) -> Solution:
        states = tuple(restricted.lift(found.states[:-1]))
        cost = problem.cost(states)
        return Solution(states, cost, cost if found.bound >= found.cost else min(cost, found.bound), found.notes)

    with stopping(lambda best: lifted(best) if isinstance(best, Solution) else None):
        try:
            if pricing is not None:
                searched = priced_search(bound, rows, pricing, gap)
        except OutOfBudgetError:
            pricing = None  # its tables are released once the error is
        if searched is None:
            searched = priced_search(bound, rows, SweptPricing(bound, rows), gap)
    found, leanest, least, priced, prices = searched
    known = None if leanest is None else restricted.lift(leanest.states[:-1])
    if known is not None and found is None and large:
        return _leanest(problem, infeasible(problem, known=known, least=least or 0.0, search=least is None), priced)
    if least is not None and least > bound.limit:
        return _leanest(problem, infeasible(problem, known=known, least=least), priced)
    if found is not None and (found.gap <= gap or large):
        return lifted(found)
    try:
        with stopping(lambda _: None if found is None else lifted(found)):
            better = _searched(bound, rows, until, gap, prices)
    except NoAssignmentError:
        above = float(np.nextafter(bound.limit, np.inf))  # no plan keeps a limit below it
        raise infeasible(problem, known=known, least=above) from None
    except PlanError:  # HiGHS was not used, or ended without an assignment
        if found is None and known is None:
            raise
        better = None
    found = _best_of(found, better)
    if found is None:
        return _leanest(problem, infeasible(problem, known=known), priced)
    return lifted(found)


def swept(problem: Problem, gap: float) -> Solution:
    """The solution of a consistent problem without a limit, where the host memory does not suffice for elimination.

    Raises:
        PlanError: nothing was found.
    """
    names = (*problem.names, "what every plan holds") if problem.names else ()  # names as `binding` leaves them
    free = replace(problem, costs=(*problem.costs, np.zeros(1)), names=names, usages=(), limit=0.0)
    rows = Rows.of(free, 0)
    with stopping(lambda best: without_end(best) if isinstance(best, Solution) else None):
        found = priced_search(free, rows, SweptPricing(free, rows), gap).found
    if found is None:
        raise PlanError(
            "no allowed assignment of strategies was found in the host's memory that the search may take",
            legal="a larger search_memory",
        )
    return without_end(found)


def without_end(found: Solution) -> Solution:
    """A solution without the last node, which `binding` has added."""
    return replace(found, states=found.states[:-1])


def _leanest(problem: Problem, error: InfeasibleMemoryError, bound: float | None) -> Solution:
    """The states of the least memory known, where the limit allows them after all.

    Args:
        bound: a lower bound on the cost of states within the limit; None: not known.

    Raises:
        InfeasibleMemoryError: the limit does not allow them.
    """
    error.bound = bound
    if error.states is None or error.enough is None or problem.limit is None or error.enough > problem.limit:
        raise error
    cost = problem.cost(error.states)
    if bound is None:
        bound = sum(float(node_costs.min()) for node_costs in problem.costs) + sum(
            float(table.min()) for table in problem.edges.values()
        )
    return Solution(error.states, cost, min(cost, bound), ("the plan of the least memory known",))


def _best_of(a: Solution | None, b: Solution | None) -> Solution | None:
    """The cheaper of two answers, with the higher of their bounds; None where both are."""
    if a is None or b is None:
        return b if a is None else a
    best: Solution = min(a, b, key=lambda found: found.cost)
    bound = max(a.bound, b.bound)
    return replace(best, bound=min(bound, best.cost))


class _Best:
    """The best states within the limit, and the states that have been seen."""

    def __init__(self, problem: Problem, rows: Rows) -> None:
        self.problem, self.rows = problem, rows
        self.states: list[int] | None = None
        self.cost = np.inf
        self.taken: list[np.ndarray] = []  # all states that were seen, in order

    def see(self, states: Sequence[int]) -> bool:
        """Record states; True where they keep the limit and are cheaper than the best."""
        self.taken.append(np.asarray(states, np.int16))
        if (self.rows.used(states) > self.rows.limit).any():
            return False
        cost = self.problem.cost(states)
        if cost < self.cost:
            self.states, self.cost = list(states), cost
            return True
        return False

    def lately(self, many: int) -> list[np.ndarray]:
        """The states (bool, by node) of the best assignment and of the last `many` ones."""
        alive = [np.zeros(len(node_costs), bool) for node_costs in self.problem.costs]
        for states in (*self.taken[-many:], *((self.states,) if self.states is not None else ())):
            for mark, state in zip(alive, states):
                mark[state] = True
        return alive


def _searched(problem: Problem, rows: Rows, until: float, gap: float, prices: np.ndarray | None) -> Solution:
    """The result of `_search`; for a problem of at most `MANY` nodes, without its dominated states."""
    if len(problem.costs) > MANY:
        return _search(problem, rows, until, gap, prices)
    less = reduced(problem)
    found = _search(less.problem, Rows.of(less.problem, rows.count), until, gap, prices)
    return replace(
        found, states=tuple(less.lift(found.states)), cost=found.cost + less.constant, bound=found.bound + less.constant
    )


def _search(problem: Problem, rows: Rows, until: float, gap: float, prices: np.ndarray | None = None) -> Solution:
    """Bound and states of a problem of `binding`.

    Args:
        prices: of memory by moment, the best ones where they are known.
    """
    start = time.monotonic()
    current().ask(COPIES * 8 * sum(table.size for table in problem.edges.values()))
    priced = PricedProblem(problem, rows)
    ascent = Ascent(priced, prices)
    best = _Best(problem, rows)
    large = len(problem.costs) > MANY
    entries = sum(table.size for table in problem.edges.values())
    share = 0.3  # share of the time for the multipliers
    turn = 0
    while time.monotonic() < start + share * (until - start):
        best.see(ascent.advance(SWEEPS))
        turn += 1
        if best.states is not None and best.cost - priced.bound <= 1e-9 * abs(best.cost):
            return Solution(tuple(best.states), best.cost, best.cost, ("proved optimal: the bound meets the cost",))
        if best.states is not None and best.cost - priced.bound <= gap * abs(best.cost):
            return Solution(
                tuple(best.states), best.cost, priced.bound, ("by multipliers, as near to the bound as asked for",)
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
                return replace(proved, states=tuple(best.states or ()), cost=best.cost, bound=best.cost)
            return Solution(
                tuple(best.states or ()),
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
    """Let HiGHS combine the states seen lately, of more and more assignments."""
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
    """Search at the best multipliers, and move the multipliers so that the limit is just kept.

    Where a search from the current states finds nothing more, the next begins at the states of the sweeps at these
    prices.
    """
    rows, remaining = priced.rows, np.array(priced.order.remaining)
    if best.states is None:
        _dear(best, priced, until)
    priced.price(priced.best)
    priced.sweep(LAST)
    core_states = _allowed(priced, until)
    turn, pace, side, still = 0, 1.0, 0, 0
    while time.monotonic() < until and (until < math.inf or turn < TURNS):
        before = priced.core.cost(core_states)
        core_states = wide(priced.core, core_states, most=WIDE << min(2, still), seed=turn)
        turn += 1
        still = 0 if priced.core.cost(core_states) < before - 1e-4 * abs(before) else still + 1
        if still > STILL:
            priced.sweep(LAST)
            other = _allowed(priced, until)
            for _ in range(3):
                other = wide(priced.core, other, seed=turn)
                turn += 1
            if priced.core.cost(other) < priced.core.cost(core_states):
                core_states = other
            still = 0
        states = priced.lift(core_states)
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
        core_states = [states[v] for v in remaining]


def _dear(best: _Best, priced: PricedProblem, until: float) -> None:
    """See the cheapest states at multiples of the best multipliers, up to the first multiple whose states keep the
    limit.

    Such states are far from the best, but take the time of a few sweeps. They are looked for even after the time is
    over.
    """
    rows = best.rows
    multipliers = priced.best
    if not multipliers.any():  # none were found in time: equal prices, and a limit's worth of memory costs the bound
        multipliers = np.full(rows.count, max(priced.bound, 1.0) / (rows.count * rows.limit))
    for times in DEARER:
        priced.price(times * multipliers)
        priced.sweep(LAST)
        if best.see(priced.lift(_allowed(priced, until))):
            break


def _allowed(priced: PricedProblem, until: float) -> list[int]:
    """The states of the last sweep, repaired where they are forbidden."""
    states = priced.messages.states().tolist()
    if not np.isfinite(priced.core.cost(states)):
        states = descend(priced.core, states, patience=2, until=until)
    return states


PROVED = 1e-9  # relative gap up to which an answer is the best, except for rounding


def solve(problem: Problem, *, seconds: float | None = None, merge: bool = False, gap: float = PROVED) -> Solution:
    """The best assignment.

    Args:
        problem: the cost graph; a memory limit is kept too (`solve_limited`).
        seconds: approximate time of the search at most; None: no clock is read, so the answer is the same on every
            machine. A problem that cannot be eliminated at once then ends by its work.
        merge: make tables of equal values one table, so that repeated blocks are computed once although their tables
            are different objects. The answer is as exact as without.
        gap: with a limit, the relative gap to the bound at which the search ends.

    Raises:
        PlanError: nothing is allowed; the error names nodes whose states contradict one another.
    """
    with spending(current()):
        try:
            return _solve(problem, seconds, merge, gap)
        except OutOfBudgetError as error:
            raise PlanError(f"no assignment of strategies was found: {error}", legal="a larger search_memory") from None


@roomy_stack
@gc_paused()
def _solve(problem: Problem, seconds: float | None, merge: bool, gap: float) -> Solution:
    notes = []
    if merge:
        problem = interned(problem)
        tables = len(IdentitySet(problem.edges.values()))
        notes.append(f"merged: {len(problem.edges)} edges have {tables} different tables")
    if problem.limit is not None:
        return _solve_limited(problem, seconds, gap)
    until = math.inf if seconds is None else time.monotonic() + seconds
    restricted = consistent(problem)
    made = Tables()
    current().watch("elimination")

    def lifted(found: Solution) -> Solution:
        states = tuple(restricted.lift(found.states))
        cost = problem.cost(states)
        return Solution(states, cost, cost if found.gap == 0 else min(cost, found.bound), (*notes, *found.notes))

    with stopping(lambda best: lifted(best) if isinstance(best, Solution) else None):
        try:
            result = eliminated(restricted.problem, made, None if seconds is None else until)
            found = None if result is not None else bounded(restricted.problem, made, until)
        except OutOfBudgetError:
            result, made = None, Tables()  # release the tables
            found = swept(restricted.problem, gap)
    if result is None:
        if found is None:
            raise contradiction(problem)
        return lifted(found)
    if not np.isfinite(result.constant):
        raise contradiction(problem)
    states = tuple(restricted.lift(result.complete([0] * len(problem.costs))))
    cost = problem.cost(states)
    return Solution(states, cost, cost, (*notes, "proved optimal, by variable elimination"))


@dataclass(frozen=True)
class Marginals:
    """The least cost of the whole with a node in each of its states.

    Attributes:
        costs: by state; infinite where nothing is allowed.
        exact: True where an assignment reaches each cost; otherwise the costs are lower bounds.
    """

    costs: np.ndarray
    exact: bool


def marginals(problem: Problem, node: int, *, sweeps: int = 30) -> Marginals:
    """The least cost of the whole with the node in each state, by eliminating all other nodes.

    A memory limit is ignored: with one the costs are lower bounds, and `exact` is False.

    Args:
        problem: the cost graph.
        node: the number of the node.
        sweeps: of `tree_reweighted.Messages`, where elimination is too large.

    Raises:
        PlanError: nothing is allowed.
    """
    restricted = consistent(problem)
    costs = np.full(len(problem.costs[node]), np.inf)
    order = elimination_order(
        [len(node_costs) for node_costs in restricted.problem.costs], restricted.problem.edges, keep=(node,)
    )
    if order.remaining == (node,):
        result = eliminate(restricted.problem.costs, restricted.problem.edges, order)
        costs[restricted.state_numbers[node]] = result.tables[node,] + result.constant
        if not np.isfinite(costs).any():
            raise contradiction(problem)
        return Marginals(costs, problem.limit is None)
    # a sweep backwards to the node collects the shares of all other nodes in it
    rest = [v for v in range(len(problem.costs)) if v != node]
    messages = Messages(restricted.problem, [node, *rest])
    for _ in range(sweeps):
        messages.sweep()
    costs[restricted.state_numbers[node]] = messages.at_first()
    return Marginals(costs, False)
