"""Bound and states of a problem that is too large to be eliminated at once.

In turns, on the core that the exact reductions leave (`presolve`):

    sweeps             a bound, and states (`tree_reweighted`)
    descent            better states (`descend`)
    reduced costs      states that cannot be part of an assignment as cheap as the best known are removed
    elimination        of the rest, as soon as that is small enough: then the answer is exact

until bound and cost meet, or neither moves. A small rest then goes to HiGHS.

Three functions improve given states:

1. `descend`: the nodes of a cutset keep their states, and elimination chooses those of all other nodes at once. Each
   pass draws another cutset, among those that keep the joints small. The other nodes are minimised exactly, so a
   pass never makes the cost higher. The descent ends when several passes in a row have found nothing. From forbidden
   states it moves towards allowed ones: a forbidden state or pair then costs more than all allowed ones together can.
2. `wide`: a single such pass, with a cutset that lets the rest be eliminated within a joint of so many entries.
3. `within`: each node may take one of a few states only; the remaining problem is small enough for HiGHS, with the
   memory rows.

Example: with a bound of 90 and states of cost 100, a state whose reduced cost is 12 is removed: each assignment with it
costs at least 102. States of reduced cost 10 or less remain.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from ..errors import PlanError
from ..identity_tables import IdentityCache, IdentitySet
from .elimination import Eliminated, Tables, eliminate, elimination_order, shared_work
from .memory_rows import binding
from .milp import WORK as HIGHS_WORK, milp
from .presolve import ReducedProblem, RestrictedProblem, Wiped, arcs, reduced, restrict
from .problem import Problem, Solution, stopping
from .search_memory import current
from .tree_reweighted import ROUNDING, Messages

__all__ = ["bounded", "descend", "eliminated", "wide", "within"]


# -- descent --

MOST_HERE = 2**16  # most entries of a joint in a descent
SPREADS = (0.3, None, 1.0, None, 3.0, None)  # spreads of the log weights that choose the held nodes; None: by distance
GRACE = 1.0  # seconds that a pass may take past the end


def _allowed(problem: Problem) -> Problem:
    """The same problem with a finite cost for forbidden states and pairs, above the cost of any allowed assignment."""
    once, tables = IdentityCache().once, [*problem.costs, *problem.edges.values()]
    price = 1.0 + 2.0 * sum(
        once("most", (table,), lambda: float(np.abs(table[np.isfinite(table)]).max(initial=0.0))) for table in tables
    )

    def finite(table: np.ndarray) -> np.ndarray:
        return once("finite", (table,), lambda: np.where(np.isfinite(table), table, price))

    return Problem(
        tuple(finite(node_costs) for node_costs in problem.costs),
        {pair: finite(table) for pair, table in problem.edges.items()},
        problem.names,
    )


def _distances(near: Sequence[Sequence[int]], start: int) -> np.ndarray:
    """By node, its distance from the start in edges; the number of nodes where there is no way."""
    out = np.full(len(near), float(len(near)))
    out[start] = 0.0
    front = [start]
    while front:
        after = []
        for v in front:
            for u in near[v]:
                if out[u] == len(near):
                    out[u] = out[v] + 1
                    after.append(u)
        front = after
    return out


def descend(
    problem: Problem,
    states: Sequence[int],
    *,
    patience: int = len(SPREADS),
    most: int = MOST_HERE,
    until: float | None = None,
    seed: int = 0,
) -> list[int]:
    """States that cost no more than the given ones. A memory limit is ignored.

    Args:
        problem, states: the problem, and the first states.
        patience: passes in a row without success before it ends.
        most: entries of a joint.
        until: a time of time.monotonic() after which no pass begins.
        seed: of the choice of the cutset.
    """
    whole = problem
    if not np.isfinite(problem.cost(states)):
        problem = _allowed(problem)
    random = np.random.default_rng(seed)
    sizes = [len(node_costs) for node_costs in problem.costs]
    near: list[list[int]] = [[] for _ in sizes]
    for i, j in problem.edges:
        near[i].append(j)
        near[j].append(i)
    best, cost = [int(s) for s in states], problem.cost(states)
    failed = tried = 0
    while failed < patience and (until is None or time.monotonic() < until):
        spread = SPREADS[tried % len(SPREADS)]
        if spread is None:
            at = [v for v in range(len(best)) if np.isinf(whole.costs[v][best[v]])]
            at += [i for (i, j), table in whole.edges.items() if np.isinf(table[best[i], best[j]])]
            weights = _distances(near, int(random.choice(at or len(best)))) ** 2
        else:
            weights = np.exp(spread * random.standard_normal(len(best)))
        order = elimination_order(sizes, problem.edges, most=most, cutset_weights=weights.tolist())
        cutset = frozenset(order.cutset)
        costs, edges = list(problem.costs), {}
        for (i, j), table in problem.edges.items():
            if i in cutset:
                if j not in cutset:
                    costs[j] = costs[j] + table[best[i]]
            elif j in cutset:
                costs[i] = costs[i] + table[:, best[j]]
            else:
                edges[i, j] = table
        eliminated_core = eliminate(costs, edges, order, until=None if until is None else until + GRACE)
        if eliminated_core is None:
            break
        found = eliminated_core.complete(list(best))
        now, tried = problem.cost(found), tried + 1
        failed = 0 if now < cost else failed + 1
        if now < cost:
            best, cost = found, now
            if problem is not whole and np.isfinite(whole.cost(best)):
                problem, cost = whole, whole.cost(best)
        if not cutset:
            break
    return best


LARGEST = 2**26  # most entries of a joint, of those that its tables allow
WORK = 2**31  # most entries of all joints for elimination without a further reduction first; about 6 s
SWEEPS = (1, 1, 2, 4, 8)  # sweeps between two checks of their effect: at first, then, ...; later the last
STALLED = 1e-2  # share of the gap that these sweeps must close for more of them
SHRUNK = 0.9  # share of the states below which the core is reduced again
#: Where no time is given: the work of sweeps and descents after which a search ends, and that of the last elimination,
#: in entries of tables, a shared one once. On one core each is about a minute.
MOST_SWEPT, MOST_ELIMINATED = 1.2e10, 2**34
EDGE = 8000  # entries that take as long as what a sweep does for an edge besides its own table
DESCENT = 20  # sweeps that take as long as a descent
MILP_ENTRIES = 300_000  # most entries of a core's edges for HiGHS


def eliminated(
    problem: Problem, made: Tables, until: float | None = None, work: int | None = WORK
) -> Eliminated | None:
    """Eliminate every node.

    Args:
        problem: the problem; a memory limit is ignored.
        made: tables of earlier eliminations, to be used and added to.
        until: a time of time.monotonic() at which it ends.
        work: most entries of all joints; None: no limit.

    Returns:
        The result; None where one joint or all of them together are too large, or the time is over.
    """
    facts = made.facts
    order = elimination_order(
        [len(node_costs) for node_costs in problem.costs],
        problem.edges,
        most=LARGEST,
        allowed=facts.sparse(problem.edges),
        few=facts.few(problem.edges),
    )
    if order.remaining:
        return None
    if work is not None and order.work > work and shared_work(problem.costs, problem.edges, order, facts) > work:
        return None
    return eliminate(problem.costs, problem.edges, order, made=made, until=until)


class _Search:
    """The best states, their cost and the bound so far, and the remaining core."""

    def __init__(self, problem: Problem, made: Tables, until: float) -> None:
        self.whole, self.made, self.until = problem, made, until
        self.core, self.constant = problem, 0.0  # the difference between the whole's cost and the core's
        self.states: list[int] | None = None
        self.cost, self.bound = np.inf, -np.inf
        self._lifts: list[ReducedProblem | RestrictedProblem] = []
        self._descents, self._swept = 0, 0.0

    @property
    def timed(self) -> bool:
        """True where a clock ends the search. Otherwise its work does, so the answer is the same on every machine."""
        return self.until < math.inf

    @property
    def late(self) -> bool:
        return time.monotonic() > self.until if self.timed else self._swept > MOST_SWEPT

    @property
    def proved(self) -> bool:
        return self.cost < np.inf and self.cost - self.bound <= ROUNDING * abs(self.cost)

    def offer(self, states: Sequence[int]) -> None:
        """Record states of the core where they are the best."""
        for step in reversed(self._lifts):
            states = step.lift(states)
        cost = self.whole.cost(states)
        if cost < self.cost:
            self.states, self.cost = list(states), cost

    def prove(self, bound: float) -> None:
        """Record a bound of the core."""
        self.bound = min(max(self.bound, self.constant + bound), self.cost)

    def reduce(self, compare: bool = True) -> None:
        """Apply the exact reductions to the core."""
        step = reduced(self.core, made=self.made, compare=compare)
        self.core, self.constant = step.problem, self.constant + step.constant
        self._lifts.append(step)

    def keep(self, messages: Messages) -> Messages | None:
        """Restrict the core to the states that the messages leave, made consistent; None where that is nothing."""
        step = restrict(self.core, messages.alive)
        alive = arcs(step.problem)
        if isinstance(alive, Wiped):  # every assignment that is not known yet costs more
            self.bound = self.cost
            return None
        last = restrict(step.problem, alive)
        self.core = last.problem
        self._lifts += [step, last]
        return messages.cut(
            last.problem, [states[more] for states, more in zip(step.state_numbers, last.state_numbers)]
        )

    def sweep(self) -> None:
        """Sweep and descend until both stall; states that the sweeps exclude are removed from the core."""
        messages = Messages(self.core)
        looks = 0
        while not (self.late or self.proved):
            current().watch(
                "bounds", None if self.cost == np.inf else self.cost, None if self.bound == -np.inf else self.bound
            )
            messages.best = self.cost - self.constant
            before, states_before = messages.bound, sum(map(len, self.core.costs))
            found, least = messages.states, np.inf
            many = SWEEPS[min(looks, len(SWEEPS) - 1)]
            looks += 1
            work = sum(table.size for table in IdentitySet(self.core.edges.values())) + EDGE * len(self.core.edges)
            for _ in range(many):
                messages.sweep()
                self._swept += work
                cost = self.core.cost(messages.states.tolist())
                if cost < least or least == np.inf:
                    found, least = messages.states.copy(), cost
                if self.late:
                    break
            self.prove(messages.bound)
            if not self.proved:
                self.offer(descend(self.core, found.tolist(), until=self.until, seed=self._descents))
                self._descents, self._swept = self._descents + 1, self._swept + DESCENT * work
            if sum(int(mark.sum()) for mark in messages.alive) < SHRUNK * states_before:
                restricted = self.keep(messages)
                if restricted is None:
                    return
                messages = restricted
            elif many == SWEEPS[-1] and messages.bound - before <= STALLED * (self.cost - self.bound):
                break
        self.keep(messages)

    def solution(self, note: str) -> Solution:
        assert self.states is not None
        return Solution(tuple(self.states), self.cost, self.bound, (note,))

    def finish(self, result: Eliminated) -> None:
        """Record the elimination of the core. States removed before cost more than the best ones known then."""
        if np.isfinite(result.constant):
            self.offer(result.complete([0] * len(self.core.costs)))
        self.bound = self.cost


def bounded(problem: Problem, made: Tables, until: float) -> Solution | None:
    """The best states that were found, and a bound; None where nothing is allowed.

    Args:
        problem: a consistent one (`presolve.consistent`); a memory limit is ignored.
        made: tables of earlier eliminations, to be used and added to.
        until: a time of time.monotonic() at which it ends; infinity: no clock is read, and `MOST_SWEPT` ends it.

    Raises:
        PlanError: nothing was found in time, or by that work.
    """
    search = _Search(problem, made, until)
    with stopping(lambda _: None if search.states is None else search.solution("stopped: not proved optimal")):
        return _bounded(search, made, until)


def _bounded(search: _Search, made: Tables, until: float) -> Solution | None:
    compare = False  # not at first: bounds shrink the core sooner
    while True:
        try:
            search.reduce(compare)
        except PlanError:  # no allowed assignment costs less than the best known
            search.bound = search.cost
            return search.solution("proved optimal: the bound meets the cost") if search.states is not None else None
        eliminated_core = eliminated(search.core, made, until)
        if eliminated_core is not None:
            search.finish(eliminated_core)
            return (
                search.solution("proved optimal, by bounds and variable elimination")
                if search.states is not None
                else None
            )
        size = sum(map(len, search.core.costs))
        search.sweep()
        if search.proved:
            search.bound = search.cost
            return search.solution("proved optimal: the bound meets the cost")
        if search.late or (compare and sum(map(len, search.core.costs)) > SHRUNK * size):
            break
        compare = True
    note = "not proved optimal: by bounds and local search"
    if not search.late:
        eliminated_core = eliminated(search.core, made, until, None if search.timed else MOST_ELIMINATED)
        seconds = until - time.monotonic() if search.timed else None
        if eliminated_core is not None:
            search.finish(eliminated_core)
            note = "proved optimal, by bounds and variable elimination"
        elif (seconds is None or seconds > 0) and sum(
            table.size for table in search.core.edges.values()
        ) <= MILP_ENTRIES:
            try:
                found = milp(search.core, seconds=seconds, work=None if search.timed else HIGHS_WORK)
            except PlanError:  # infeasible, or nothing found in time
                note = "not proved optimal: by bounds and local search; HiGHS found nothing better"
            else:
                search.offer(found.states)
                search.prove(found.bound)
                note = "by bounds and local search, then HiGHS on what was left"
    if search.states is None:
        searched = "in the time given" if search.timed else "by sweeps, descents and HiGHS"
        raise PlanError(f"no allowed assignment of strategies was found {searched}", legal="more seconds")
    return search.solution(note)


# -- wide, within --


def wide(problem: Problem, states: Sequence[int], *, most: int = 2**12, seed: int = 0) -> list[int]:
    """States that cost no more than the given ones. A memory limit is ignored.

    Args:
        problem, states: the problem, and the first states, which are allowed.
        most: entries of a joint.
        seed: of the choice of the cutset.
    """
    random = np.random.default_rng(seed)
    sizes = [len(node_costs) for node_costs in problem.costs]
    order = elimination_order(
        sizes, problem.edges, most=most, cutset_weights=random.uniform(0.2, 1.0, len(sizes)).tolist()
    )
    in_cutset = [False] * len(sizes)
    for v in order.cutset:
        in_cutset[v] = True
    costs, edges = list(problem.costs), {}
    for (i, j), table in problem.edges.items():
        if in_cutset[i]:
            if not in_cutset[j]:
                costs[j] = costs[j] + table[states[i]]
        elif in_cutset[j]:
            costs[i] = costs[i] + table[:, states[j]]
        else:
            edges[i, j] = table
    out = [int(state) for state in states]
    result = eliminate(costs, edges, order, made=Tables())
    return result.complete(out) if np.isfinite(result.constant) else out


def within(
    problem: Problem,
    alive: Sequence[np.ndarray],
    *,
    entries: int,
    until: float | None = None,
    work: float | None = None,
) -> list[int] | None:
    """The best of the states that are marked alive (bool, by node), within the memory limit.

    Args:
        problem: with its limit.
        alive: by node, the states to choose from.
        entries: most entries of the remaining edges.
        until: a time of time.monotonic() at which HiGHS ends.
        work: of HiGHS (`milp`), after which it ends.

    Returns:
        The states; None where there are none, none was found in time, or more than `entries` are left.
    """
    try:
        some = restrict(problem, alive)
        bound, _ = binding(some.problem)
        less = reduced(bound)
        if sum(table.size for table in less.problem.edges.values()) > entries:
            return None
        seconds = None if until is None else until - time.monotonic()
        if seconds is not None and seconds <= 0:
            return None
        found = milp(less.problem, seconds=seconds, work=work).states if less.problem.costs else ()
    except PlanError:
        return None
    return some.lift(less.lift(found)[:-1])
