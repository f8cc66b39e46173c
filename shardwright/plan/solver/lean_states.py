"""The states that hold least at their fullest moment, by prices of memory.

    least limit = min_s max_t used_t(s) >= max_λ min_s Σ_t λ_t used_t(s),   λ >= 0, Σ λ = 1

The best λ is found by cutting planes (ascent.py). It gives the lower end; the upper end is held by the states that were
least at some λ, spliced with one another (splicing.py). Of a part of a problem's states (`Part`) the lower end is the
part's alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from .ascent import Prices, ascend
from .moments import Rows
from .pricing import Cut
from ..problem import Problem
from .splicing import Splicer

__all__ = ["APART", "LeastMemory", "costless", "leanest_by_prices"]

EVALUATIONS = 20  # at prices, at most
APART = 1e-2  # how near the two ends of a large problem's least limit are near enough, relative to it
SPLICED = 8  # of its known states, by what they hold at most, are spliced with one another


class _Priced(Protocol):
    """A problem, or a part of one, whose least at any prices is known."""

    rows: Rows

    def least(self, multipliers: np.ndarray) -> tuple[float, Cut]: ...


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


def costless(problem: Problem) -> Problem:
    """The problem with the same states allowed, all of them for nothing."""
    given = (*problem.costs, *problem.edges.values())
    free = {id(table): np.where(np.isfinite(table), 0.0, np.inf) for table in {id(table): table for table in given}.values()}
    return replace(problem, costs=tuple(free[id(own)] for own in problem.costs),
                   edges={pair: free[id(table)] for pair, table in problem.edges.items()})


def leanest_by_prices(problem: Problem, rows: Rows, pricing: _Priced, low: float) -> LeastMemory:
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

    def __init__(self, pricing: _Priced, unit: float) -> None:
        self.pricing, self.unit = pricing, unit

    def least(self, multipliers: np.ndarray) -> tuple[float, Cut]:
        value, cut = self.pricing.least(multipliers)
        # The pricing takes its own limit off, which is another one.
        return value + float(multipliers.sum()) * (self.pricing.rows.limit - self.unit), cut
