"""The least memory limit with which there is a plan, and the error that names it.

    least limit = min_s max_t used_t(s)

1. Prices of memory bound the least limit from below, where elimination can do the problem
   (`cutting_planes.leanest_by_prices`):

       least limit >= max_λ min_s Σ_t λ_t used_t(s),   λ >= 0, Σ λ = 1

   The upper end is kept by states of these minima, spliced.
2. Where elimination cannot do it, the lower end is a bound by sweeps, and the upper end is that of the states which
   look best to the sweeps (`swept_leanest`).

No clock is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..errors import PlanError
from .cutting_planes import LeastMemory, costless, leanest_by_prices, swept_leanest
from .lagrangian import Pricing
from .memory_rows import Rows, binding
from .presolve import consistent
from .problem import Problem

__all__ = ["InfeasibleMemoryError", "LeastMemory", "infeasible", "least_memory"]

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
    inner = consistent(problem)
    bound, times = binding(replace(costless(inner.problem), limit=-1.0))  # every moment is a row
    rows = Rows.of(bound, len(times))
    low = float(rows.least().max(initial=0.0))
    pricing = Pricing.of(bound, rows)
    if pricing is None or pricing.work > MOST_WORK:
        alive = [np.zeros(len(own), bool) for own in bound.costs]
        found = swept_leanest(bound, replace(rows, limit=0.0), alive, low)
    else:
        found = leanest_by_prices(bound, rows, pricing, low)
        least = (1.0 - ROUNDING) * found.least
        whole = (rows.amounts == np.floor(rows.amounts)).all()
        found = replace(found, least=max(low, float(np.ceil(least)) if whole else least))
    if found.states is None:
        return found
    states = tuple(inner.lift(found.states[:-1]))
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
    held, limit = rows.least(), np.inf if problem.limit is None else problem.limit
    if not (held > limit).any() and found.states is not None:  # each moment can be met, but not all at once
        held = rows.used((*found.states, 0))
    over = np.flatnonzero(held > limit)
    moments = tuple(int(times[row]) for row in over)
    worst = over[np.argsort(-held[over], kind="stable")][:SHOWN]
    shown = ", ".join(
        f"moment {times[row]} ({_who(problem, int(times[row]))}): at least {held[row]:,.0f}" for row in worst
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


def _who(problem: Problem, moment: int) -> str:
    """The nodes with the most memory at a moment, in their least states, as text."""
    held: dict[int, float] = {}
    for use in problem.usages:
        if use.start <= moment < use.stop:
            held[use.node] = held.get(use.node, 0.0) + float(np.min(use.amount))
    largest = sorted(held, key=lambda v: -held[v])[:3]
    return "most in " + ", ".join(problem.names[v] if problem.names else f"node {v}" for v in largest)
