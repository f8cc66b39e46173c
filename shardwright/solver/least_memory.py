"""The least memory limit with which there is a plan, and the error that names it.

    least limit = min_s max_t used_t(s)

1. Prices of memory narrow the least limit to a range, where elimination can do the problem
   (`cutting_planes.leanest_by_prices`):

       least limit >= max_λ min_s Σ_t λ_t used_t(s),   λ >= 0, Σ λ = 1

   by cutting planes; the upper end is kept by states of these minima, spliced.
2. HiGHS halves the rest of the range: it is asked whether a limit can be kept, without any cost. For a small problem
   whose amounts are whole numbers the answer is exact. The two ends of another small problem come within `CLOSE`,
   those of a larger one within `NEAR`.
3. HiGHS is not used for a large problem. Where elimination cannot do it either, the lower end is a bound by sweeps,
   and the upper end is that of the states which look best to the sweeps (`swept_leanest`).

No clock is read unless the caller gives seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import PlanError
from .cutting_planes import APART, LeastMemory, costless, leanest_by_prices, swept_leanest
from .lagrangian import Pricing
from .memory_rows import Rows, binding
from .milp import WORK, NoAssignmentError, milp
from .presolve import consistent, reduced
from .problem import Problem

__all__ = ["InfeasibleMemoryError", "LeastMemory", "infeasible", "least_memory"]

SHOWN = 5  # moments that the error names
LARGE = 300_000  # entries of the edges above which HiGHS is not used: it may take hours
SMALL = 10_000  # entries of the edges up to which the two ends meet
NEAR = 2e-3  # relative distance of the two ends otherwise
QUICK = 2**25  # entries of all joints up to which prices narrow a smaller problem's range before HiGHS
ROUNDING = 1e-9  # relative, of a bound by prices
MOST_WORK = (
    2**28
)  # entries of all joints above which a large problem is not priced at every moment: no two tables are equal then
CLOSE = 1e-6  # relative distance of the two ends of a small problem whose amounts are not whole numbers


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

    def located(self, **where: Any) -> InfeasibleMemoryError:
        out = super().located(**where)
        out.moments, out.least, out.enough = self.moments, self.least, self.enough
        out.states, out.bound = self.states, self.bound
        return out


def _large(problem: Problem) -> bool:
    return sum(table.size for table in problem.edges.values()) > LARGE


def _fits(problem: Problem, limit: float, seconds: float | None) -> tuple[int, ...]:
    """States that keep the limit.

    Raises:
        NoAssignmentError: there are none.
        PlanError: none were found in the time, or in HiGHS's work.
    """
    bound, _ = binding(replace(problem, limit=limit))
    less = reduced(bound)
    found = milp(less.problem, seconds=seconds, work=WORK).states if less.problem.costs else ()
    return tuple(less.lift(found)[:-1])


def least_memory(problem: Problem, *, seconds: float | None = None, near: float = 0.0) -> LeastMemory:
    """The least limit with which the problem has an assignment: a range, whose ends meet for a small problem.

    Args:
        problem: the problem; its own limit is ignored.
        seconds: for HiGHS at most; None: no clock is read.
        near: relative distance of the two ends that is near enough.

    Raises:
        PlanError: nothing is allowed, whatever the memory.
    """
    until = math.inf if seconds is None else time.monotonic() + seconds
    inner = consistent(problem)
    free = costless(inner.problem)
    bound, times = binding(replace(free, limit=-1.0))  # every moment is a row
    rows = Rows.of(bound, len(times))
    whole = bool((rows.amounts == np.floor(rows.amounts)).all())
    low, high, states = float(rows.least().max(initial=0.0)), None, None
    most = float(rows.most().max(initial=0.0))
    pricing, large = Pricing.of(bound, rows), _large(bound)
    if large and (pricing is None or pricing.work > MOST_WORK):
        found = swept_leanest(bound, replace(rows, limit=0.0), [np.zeros(len(own), bool) for own in bound.costs], low)
        return found if found.states is None else replace(found, states=tuple(inner.lift(found.states[:-1])))
    small = sum(table.size for table in inner.problem.edges.values()) <= SMALL
    if pricing is not None and (large or pricing.work <= QUICK):
        found = leanest_by_prices(bound, rows, pricing, low)
        assert found.states is not None
        if large:
            return replace(found, states=tuple(inner.lift(found.states[:-1])))
        if np.isfinite(free.cost(found.states[:-1])):  # HiGHS does the rest of the range
            low, high, states = found.least * (1.0 - ROUNDING), found.enough, found.states[:-1]
            low = float(np.ceil(low)) if whole else low
    near = max(near, NEAR if not small else 0.0 if whole else CLOSE)
    trial = low if high is None else (low + high) / 2
    if small and whole and high is not None:
        trial = high - 1.0  # these states often have the least limit
    while (left := until - time.monotonic()) > 0 and (high is None or high - low > near * abs(high)):
        try:
            states = _fits(free, trial, None if left == math.inf else left)
            high = float(rows.used((*states, 0)).max(initial=0.0))
        except NoAssignmentError:
            low = float(np.floor(trial)) + 1.0 if whole else trial
            if trial >= most:  # forbidden for another reason than memory
                raise
        except PlanError:
            break
        if high is None:
            trial = min(most, 1.25 * trial + 1.0)
        else:
            trial = float(np.floor((low + high) / 2)) if whole else (low + high) / 2
    return LeastMemory(low, high, tuple(inner.lift(states)) if states is not None else None)


def infeasible(
    problem: Problem,
    *,
    seconds: float | None = None,
    known: Sequence[int] | None = None,
    least: float | None = None,
    near: float = 0.0,
) -> InfeasibleMemoryError:
    """The error for a problem whose limit no assignment keeps.

    Args:
        problem: the problem.
        seconds: to look for the least limit at most; None: no clock is read.
        known: states of little memory.
        least: a limit below which there is no plan, if the known states are near enough to it; None: the least limit
            is searched.
        near: relative distance from its bound at which the least limit is named.
    """
    found = LeastMemory(least, None, None) if least is not None else least_memory(problem, seconds=seconds, near=near)
    if known is not None:
        bound, times = binding(replace(problem, limit=-1.0))
        most = float(Rows.of(bound, len(times)).used((*known, 0)).max(initial=0.0))
        if found.enough is None or most < found.enough:
            found = LeastMemory(found.least, most, tuple(known))
    bound, times = binding(replace(problem, limit=-1.0))
    rows = Rows.of(bound, len(times))
    held, limit = rows.least(), np.inf if problem.limit is None else problem.limit
    if (
        not (held > limit).any() and found.states is not None and near < APART
    ):  # each moment can be met, but not all at once
        held = rows.used((*_lean(problem, found.states, found.enough), 0))
    over = np.flatnonzero(held > limit)
    moments = tuple(int(times[row]) for row in over)
    worst = over[np.argsort(-held[over], kind="stable")][:SHOWN]
    shown = ", ".join(
        f"moment {times[row]} ({_who(problem, int(times[row]))}): at least {held[row]:,.0f}" for row in worst
    )
    more = f" and {len(over) - len(worst):,} more" if len(over) > len(worst) else ""
    if found.enough is None:
        legal = f"a limit of more than {found.least:,.0f}; no plan that keeps one was found in the time given"
    elif found.enough <= found.least:
        legal = f"a limit of at least {found.enough:,.0f}"
    else:
        legal = f"a limit of {found.enough:,.0f}; none below {found.least:,.0f} can be kept"
    error = InfeasibleMemoryError(
        f"no plan keeps the memory limit of {limit:,.0f}" + (f"; it cannot be met at {shown}{more}" if shown else ""),
        legal=legal,
    )
    error.moments, error.least, error.enough, error.states = moments, found.least, found.enough, found.states
    return error


def _lean(problem: Problem, states: tuple[int, ...], limit: float | None) -> tuple[int, ...]:
    """States that keep the limit of these states and take little memory besides."""
    if _large(problem) or limit is None:
        return states
    inner = consistent(problem)
    bound, times = binding(replace(inner.problem, limit=-1.0))
    rows, ones = Rows.of(bound, len(times)), np.ones(len(times))
    costs = rows.priced([np.zeros(len(own)) for own in bound.costs], ones)[:-1]
    edges = rows.priced_edges(
        {pair: np.where(np.isfinite(table), 0.0, np.inf) for pair, table in inner.problem.edges.items()}, ones
    )
    try:
        return tuple(inner.lift(_fits(replace(inner.problem, costs=tuple(costs), edges=edges), limit, None)))
    except PlanError:  # none in the time: return the known states
        return states


def _who(problem: Problem, moment: int) -> str:
    """The nodes with the most memory at a moment, in their least states, as text."""
    held: dict[int, float] = {}
    for use in problem.usages:
        if use.start <= moment < use.stop:
            held[use.node] = held.get(use.node, 0.0) + float(np.min(use.amount))
    largest = sorted(held, key=lambda v: -held[v])[:3]
    return "most in " + ", ".join(problem.names[v] if problem.names else f"node {v}" for v in largest)
