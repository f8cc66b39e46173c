"""The least memory limit with which there is a plan, and the error that says so.

    least limit = min_s max_t used_t(s)

By halving: whether a limit can be kept is asked of HiGHS without any cost; states that keep it show how much less they
need. Where all amounts are whole numbers the answer is exact once one less cannot be kept. Where elimination can do the
problem the two ends are brought near to one another first,

    least limit >= max_λ min_s Σ_t λ_t used_t(s),   λ >= 0, Σ λ = 1

by cutting planes (ascent.py), and states are those of these minima, spliced; a large problem is not HiGHS's at all, and
the two ends need not meet then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...errors import PlanError
from .ascent import Prices, ascend
from .milp import NoAssignmentError, milp
from .moments import Rows, binding
from .pricing import Cut, Pricing
from ..problem import Problem
from .reduce import consistent, reduced
from .splicing import Splicer

__all__ = ["InfeasibleMemoryError", "LeastMemory", "infeasible", "least_memory"]

SHOWN = 5  # moments that the error names
LARGE = 300_000  # entries of the edges above which HiGHS is not asked: it may take hours
QUICK = 2**23  # entries of all joints up to which prices narrow a smaller one down before HiGHS is asked
ROUNDING = 1e-9  # relative, of a bound by prices
MOST_WORK = 2**28  # entries of all joints above which a large one is not priced at every moment: no two tables are equal then
EVALUATIONS = 16  # at prices, at most
APART = 1e-2  # how near the two ends of a large problem's least limit are near enough, relative to it
SPLICED = 8  # of its known states, by what they hold at most, are spliced with one another
CLOSE = 1e-6  # of the limit: how near the two ends come where amounts are not whole numbers


class InfeasibleMemoryError(PlanError):
    """A memory limit that no plan keeps.

    Attributes:
        moments: that cannot be met: by themselves, or in the plan of the least memory known.
        least: no plan keeps a limit below it.
        enough: a plan keeps this limit; None: none is known.
        states: of that plan.
    """

    moments: tuple[int, ...] = ()
    least: float = 0.0
    enough: float | None = None
    states: tuple[int, ...] | None = None

    def located(self, **where) -> InfeasibleMemoryError:
        out = super().located(**where)
        out.moments, out.least, out.enough, out.states = self.moments, self.least, self.enough, self.states
        return out


@dataclass(frozen=True)
class LeastMemory:
    """How far the limit can be lowered.

    Attributes:
        least: no plan keeps a limit below it.
        enough: the states keep this limit; None: no states are known.
        states: of the plan that does.
    """

    least: float
    enough: float | None
    states: tuple[int, ...] | None


def _large(problem: Problem) -> bool:
    return sum(table.size for table in problem.edges.values()) > LARGE


def _fits(problem: Problem, limit: float, seconds: float) -> tuple[int, ...]:
    """States that keep the limit.

    Raises:
        NoAssignmentError: where there are none.
        PlanError: where none were found in the time.
    """
    bound, _ = binding(replace(problem, limit=limit))
    less = reduced(bound)
    found = milp(less.problem, seconds=seconds).states if less.problem.costs else ()
    return tuple(less.lift(found)[:-1])


def least_memory(problem: Problem, *, seconds: float = 10.0) -> LeastMemory:
    """The least limit with which the problem has an assignment, exact where the time is enough.

    Raises:
        PlanError: where nothing is allowed, whatever the memory.
    """
    until = time.monotonic() + seconds
    inner = consistent(problem)
    tables = {id(table): np.where(np.isfinite(table), 0.0, np.inf) for table in inner.problem.edges.values()}
    free = replace(inner.problem, costs=tuple(np.zeros(len(own)) for own in inner.problem.costs),
                   edges={pair: tables[id(table)] for pair, table in inner.problem.edges.items()})
    bound, times = binding(replace(free, limit=-1.0))  # every moment is a row
    rows = Rows.of(bound, len(times))
    whole = bool((rows.amounts == np.floor(rows.amounts)).all())
    low, high, states = float(rows.least().max(initial=0.0)), None, None
    most = float(rows.most().max(initial=0.0))
    pricing, large = Pricing.of(bound, rows), _large(bound)
    if large and (pricing is None or pricing.work > MOST_WORK):
        return LeastMemory(low, None, None)
    if pricing is not None and (large or pricing.work <= QUICK):
        found = _priced(bound, rows, pricing, low)
        if large:
            return replace(found, states=tuple(inner.lift(found.states[:-1])))
        if np.isfinite(free.cost(found.states[:-1])):  # what is left between the two ends is HiGHS's
            low, high, states = found.least * (1.0 - ROUNDING), found.enough, found.states[:-1]
            low = float(np.ceil(low)) if whole else low
    trial = low if high is None or not whole else high - 1.0  # such states are often those of the least limit
    while (left := until - time.monotonic()) > 0 and (high is None or high > low):
        try:
            states = _fits(free, trial, left)
            high = float(rows.used((*states, 0)).max(initial=0.0))
        except NoAssignmentError:
            low = float(np.floor(trial)) + 1.0 if whole else trial
            if trial >= most:  # forbidden for another reason than memory
                raise
        except PlanError:
            break
        if high is None:
            trial = min(most, 1.25 * trial + 1.0)
        elif high - low <= (0.0 if whole else CLOSE * abs(high)):
            break
        else:
            trial = float(np.floor((low + high) / 2)) if whole else (low + high) / 2
    return LeastMemory(low, high, tuple(inner.lift(states)) if states is not None else None)


def _priced(problem: Problem, rows: Rows, pricing: Pricing, low: float) -> LeastMemory:
    """The least limit of a problem without costs, of `binding`, as near as prices and splicing come to it.

    Args:
        low: no plan keeps a limit below it.
    """
    unit = max(low, 1.0)  # in which limits are said here: with Σ λ · unit = 1, L(λ) = least limit / unit - 1
    rows = replace(rows, limit=unit)
    known, in_units = Prices(rows.count, unit), _InUnits(pricing, unit)
    even = np.full(rows.count, 1.0 / (unit * rows.count))
    known.see(even, *in_units.least(even))  # what holds little everywhere
    ascend(in_units, known, cap=1.0, gap=APART / 4, most=EVALUATIONS)
    least = max(low, unit * (1.0 + known.bound))
    best = min(known.cuts, key=lambda cut: cut.used.max())
    states, enough = best.states, float(best.used.max())
    near = sorted(known.cuts, key=lambda cut: float(cut.used.max()))[:SPLICED]
    while enough > (1.0 + APART) * least:
        trial = (least + enough) / 2
        splicer = Splicer(problem, replace(rows, limit=trial))
        found = next((spliced for one in near for other in near if one is not other
                      and (spliced := splicer.splice(one.states, other.states, np.inf)) is not None), None)
        if found is None:
            break
        states, enough = tuple(found[0]), float(rows.used(found[0]).max())
    return LeastMemory(least, enough, tuple(states))


class _InUnits:
    """Prices of memory in another unit than bytes: all that `ascend` asks of a `Pricing`."""

    def __init__(self, pricing: Pricing, unit: float) -> None:
        self.pricing, self.unit = pricing, unit

    def least(self, multipliers: np.ndarray) -> tuple[float, Cut]:
        value, cut = self.pricing.least(multipliers)
        # The pricing takes its own limit off, which is another one.
        return value + float(multipliers.sum()) * (self.pricing.rows.limit - self.unit), cut


def infeasible(problem: Problem, *, seconds: float = 10.0, known: Sequence[int] | None = None) -> InfeasibleMemoryError:
    """The error for a problem whose limit nothing keeps.

    Args:
        seconds: to look for the least limit.
        known: states that hold little.
    """
    found = least_memory(problem, seconds=seconds)
    if known is not None:
        bound, times = binding(replace(problem, limit=-1.0))
        held = float(Rows.of(bound, len(times)).used((*known, 0)).max(initial=0.0))
        if found.enough is None or held < found.enough:
            found = LeastMemory(found.least, held, tuple(known))
    bound, times = binding(replace(problem, limit=-1.0))
    rows = Rows.of(bound, len(times))
    held = rows.least()
    if not (held > problem.limit).any() and found.states is not None:  # each can be met, but not all at once
        held = rows.used((*_lean(problem, found), 0))
    over = np.flatnonzero(held > problem.limit)
    moments = tuple(int(times[row]) for row in over)
    worst = over[np.argsort(-held[over], kind="stable")][:SHOWN]
    shown = ", ".join(f"moment {times[row]} ({_who(problem, int(times[row]))}): at least {held[row]:,.0f}"
                      for row in worst)
    more = f" and {len(over) - len(worst):,} more" if len(over) > len(worst) else ""
    if found.enough is None:
        legal = f"a limit of more than {found.least:,.0f}; no plan that keeps one was found in the time given"
    elif found.enough <= found.least:
        legal = f"a limit of at least {found.enough:,.0f}"
    else:
        legal = f"a limit of {found.enough:,.0f}; none below {found.least:,.0f} can be kept"
    error = InfeasibleMemoryError(f"no plan keeps the memory limit of {problem.limit:,.0f}" +
                                  (f"; it cannot be met at {shown}{more}" if shown else ""), legal=legal)
    error.moments, error.least, error.enough, error.states = moments, found.least, found.enough, found.states
    return error


def _lean(problem: Problem, found: LeastMemory) -> tuple[int, ...]:
    """States that keep the least limit and hold little besides."""
    if _large(problem):
        return found.states
    inner = consistent(problem)
    bound, times = binding(replace(inner.problem, limit=-1.0))
    rows, ones = Rows.of(bound, len(times)), np.ones(len(times))
    costs = rows.priced([np.zeros(len(own)) for own in bound.costs], ones)[:-1]
    edges = rows.priced_edges({pair: np.where(np.isfinite(table), 0.0, np.inf)
                               for pair, table in inner.problem.edges.items()}, ones)
    try:
        return tuple(inner.lift(_fits(replace(inner.problem, costs=tuple(costs), edges=edges), found.enough, 10.0)))
    except PlanError:  # not in the time: those that are known
        return found.states


def _who(problem: Problem, moment: int) -> str:
    """Who holds most at a moment, at least."""
    held: dict[int, float] = {}
    for use in problem.usages:
        if use.start <= moment < use.stop:
            held[use.node] = held.get(use.node, 0.0) + float(np.min(use.amount))
    largest = sorted(held, key=lambda v: -held[v])[:3]
    return "most in " + ", ".join(problem.names[v] if problem.names else f"node {v}" for v in largest)
