"""The cheapest states within a memory limit, and the least limit, by the best prices of memory: cutting planes.

    max θ   with   θ <= cost_k + Σ_t λ_t (used_t,k - limit)  for all states k that are known,   λ >= 0

Each λ of this linear program gives new states, which are least there, and a bound; until bound and θ meet. θ is also
the cost of the best mixture of known states. Where no mixture is within the limit, the bound rises until dearer
states are found that take less memory. The next λ lies between the best λ so far and the program's, which jumps
about.

Two known states of (cost, memory) (0, 15) and (4, 5) and a limit of 10 at one moment give λ = 0.4 and θ = 2.

Splices of the known states with one another (`memory_rows`) take part in the program, where a splicer is given: the
nodes of some layers have the states of the one, those of the others the states of the other. A mixture of them is
nearer to the best one, and the program needs fewer evaluations.

The file has two parts:

1. `ascend`: the program and its cuts, over a problem whose least at any prices is known (`lagrangian.Pricing`).

2. `leanest_by_prices`: the states of the least memory at their fullest moment:

    least limit = min_s max_t used_t(s) >= max_λ min_s Σ_t λ_t used_t(s),   λ >= 0, Σ λ = 1

   Part 1 finds the best λ: the lower end. The upper end is kept by states that were least at some λ, spliced with one
   another. The lower end of a part of a problem's states (`lagrangian.Part`) holds for that part alone.

No clock is read: the same problem has the same answer on every machine.

`priced_search` searches states within a limit with both. `lagrangian.Ascent` climbs to the best prices step by step;
this file solves for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ..identity_tables import IdentityCache
from .lagrangian import Cut
from .memory_rows import Rows, Splicer, foremost
from .milp import quiet_highs
from .problem import Problem
from .search_memory import current

# fmt: off
__all__ = [
    "APART", "LEAST_SHARE", "InUnits", "LeastMemory", "Priced", "Prices", "ascend", "cheapest", "costless",
    "leanest_by_prices",
]
# fmt: on

BETWEEN = 0.6  # share of the way from the best λ towards the program's
PARTNERS = 3  # known states that new states are spliced with
LEAST_SHARE = 1e-7  # of states in a mixture that count as part of it
PLACES = 16  # parts of the nodes at whose ends two states are spliced


class Prices:
    """The best multipliers so far, and all known states.

    Args:
        count: the number of moments.
        limit: the memory limit.
        splicer: makes splices of new states with known ones; None: none are made.

    Attributes:
        multipliers, bound: the best multipliers, and their bound.
        cuts: the states that were least at some multipliers.
        spliced: splices of these.
        mixture: the states, of both, that are part of the cheapest mixture within the limit.
        seen: the number of evaluations.
    """

    def __init__(self, count: int, limit: float, splicer: Splicer | None = None) -> None:
        self.limit, self.splicer = limit, splicer
        self.cuts: dict[tuple[int, ...], Cut] = {}
        self.spliced: dict[tuple[int, ...], Cut] = {}
        self.mixture: list[Cut] = []
        self.multipliers, self.bound, self.seen = np.zeros(count), -np.inf, 0

    def see(self, multipliers: np.ndarray, value: float, cut: Cut) -> bool:
        """Record the result of an evaluation; True where its states are new."""
        self.seen += 1
        if value > self.bound:
            self.multipliers, self.bound = multipliers, value
        return self.add(cut)

    def add(self, cut: Cut) -> bool:
        """Add states, and their splices with the `PARTNERS` known ones that are cheapest at the best multipliers. True
        where the states are new."""
        if cut.states in self.cuts:
            return False
        if self.splicer is not None:
            near = sorted(self.cuts.values(), key=lambda known: known.cost + float(self.multipliers @ known.used))
            for partner in near[:PARTNERS]:
                for states, cost in self.splicer.evenly(cut.states, partner.states, PLACES):
                    self.spliced.setdefault(states, Cut(states, cost, self.splicer.rows.used(states)))
        self.cuts[cut.states] = cut
        return True


def cheapest(cuts: Sequence[Cut], limit: float, most: float) -> tuple[np.ndarray, float, np.ndarray]:
    """λ and θ of the linear program, and by cut its share in the mixture whose cost is θ.

    Args:
        cuts: the known states.
        limit: the memory limit.
        most: bound on the price of the limit's worth of memory.
    """
    import highspy  # noqa: PLC0415  see `milp`: few plans need it

    over = np.array([(cut.used - limit) / max(limit, 1.0) for cut in cuts])
    active = np.flatnonzero((over > 0).any(axis=0))
    active = active[foremost(over[:, active])]
    out = np.zeros(over.shape[1])
    costs = np.array([cut.cost for cut in cuts])
    if not len(active):
        return out, float(costs.min()), np.arange(len(cuts)) == costs.argmin()
    over, columns = over[:, active], len(active)
    scale = float(np.abs(costs).max()) or most
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = columns + 1, len(cuts) + 1
    model.sense_ = highspy.ObjSense.kMaximize
    model.col_cost_ = np.append(np.zeros(columns), 1.0)
    model.col_lower_ = np.append(np.zeros(columns), -highspy.kHighsInf)
    model.col_upper_ = np.full(columns + 1, highspy.kHighsInf)
    model.row_lower_ = np.full(len(cuts) + 1, -highspy.kHighsInf)
    model.row_upper_ = np.append(costs / scale, most / scale)
    matrix = np.zeros((len(cuts) + 1, columns + 1))
    matrix[:-1, :-1], matrix[:-1, -1], matrix[-1, :-1] = -over, 1.0, 1.0
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    rows, which = np.nonzero(matrix)
    model.a_matrix_.start_ = np.searchsorted(rows, np.arange(len(matrix) + 1))
    model.a_matrix_.index_, model.a_matrix_.value_ = which, matrix[rows, which]
    highs = quiet_highs()
    highs.setOptionValue("threads", 1)
    highs.passModel(model)
    highs.run()
    found = highs.getSolution()
    *paid, value = found.col_value
    out[active] = np.maximum(paid, 0.0) * scale / max(limit, 1.0)
    return out, float(value) * scale, np.abs(found.row_dual[:-1])


def ascend(
    pricing: Priced | InUnits,
    prices: Prices,
    *,
    cap: float,
    gap: float,
    most: int,
    most_capped: float = np.inf,
    until: float = np.inf,
) -> float:
    """Improve the prices, and add states.

    Args:
        pricing: a problem with `least` at any prices, such as a `Pricing`.
        prices: the prices and states so far; they are changed.
        cap: bound on the price of the limit's worth of memory.
        gap: relative distance of bound and θ at which it ends.
        most: evaluations of `pricing`.
        most_capped: evaluations while no mixture of known states is within the limit.
        until: a bound at which it ends.

    Returns:
        The program's value: the cost of the best mixture of known states within the limit. Infinite where no mixture
        is within it as far as prices up to `cap` show.
    """
    if not prices.cuts:
        prices.see(prices.multipliers, *pricing.least(prices.multipliers))
    value, capped, waited = np.inf, False, 0
    budget = current()
    for _ in range(most):
        budget.watch()
        cuts = [*prices.cuts.values(), *prices.spliced.values()]
        multipliers, value, shares = cheapest(cuts, prices.limit, cap)
        prices.mixture = [cuts[n] for n in np.flatnonzero(shares > LEAST_SHARE)]
        capped = float(multipliers.sum()) * max(prices.limit, 1.0) >= 0.999 * cap
        waited += capped
        if value - prices.bound <= gap * abs(value) or prices.bound > until or waited > most_capped:
            return np.inf if capped else value
        if prices.bound > -np.inf:
            at = prices.multipliers + BETWEEN * (multipliers - prices.multipliers)
            found, cut = pricing.least(at)
            if prices.see(at, found, cut) or found >= value - gap * abs(value):
                continue
        prices.see(multipliers, *pricing.least(multipliers))  # nothing new in between: use the program's own
    return np.inf if capped else value


# -- the least limit --

EVALUATIONS = 20  # most evaluations at prices
APART = 1e-2  # relative distance of the two ends of a large problem's least limit that is near enough
SPLICED = 8  # number of the leanest known states that are spliced with one another


class Priced(Protocol):
    """A problem, or a part of one, with its least at any prices."""

    rows: Rows

    def least(self, multipliers: np.ndarray) -> tuple[float, Cut]: ...


@dataclass(frozen=True)
class LeastMemory:
    """The range of the least limit.

    Attributes:
        least: no plan keeps a limit below it.
        enough: the states keep this limit; None: no states are known.
        states: of the plan that keeps `enough`.
    """

    least: float
    enough: float | None
    states: tuple[int, ...] | None


def costless(problem: Problem) -> Problem:
    """The problem with the same states allowed, all at no cost."""
    once = IdentityCache().once

    def free(table: np.ndarray) -> np.ndarray:
        return once("free", (table,), lambda: np.where(np.isfinite(table), 0.0, np.inf))

    return replace(
        problem,
        costs=tuple(free(node_costs) for node_costs in problem.costs),
        edges={pair: free(table) for pair, table in problem.edges.items()},
    )


def leanest_by_prices(
    problem: Problem,
    rows: Rows,
    pricing: Priced,
    low: float,
    seen: Sequence[Cut] = (),
    evaluations: int = EVALUATIONS,
    target: float = 0.0,
    limit: float = np.inf,
) -> LeastMemory:
    """The least limit of a problem without costs, of `binding`, as near as prices and splicing come to it.

    Args:
        problem: the problem; see `costless`.
        rows: its usages.
        pricing: its least at any prices.
        low: no plan keeps a limit below it.
        seen: allowed states, which are spliced as well.
        evaluations: at further prices than even ones. They raise the lower end; the upper end seldom falls with them,
            because states that are least at a few moments are large at all others.
        target: the search ends with states that keep this limit.
        limit: the lower end is not raised further once it is above this limit.
    """
    unit = max(low, 1.0)  # unit of the limits here: with Σ λ · unit = 1, L(λ) = least limit / unit - 1
    rows = replace(rows, limit=unit)
    known, in_units = Prices(rows.count, unit), InUnits(pricing, unit)
    even = np.full(rows.count, 1.0 / (unit * rows.count))
    known.see(even, *in_units.least(even))  # the states of little memory everywhere
    of_even, known.bound = known.bound, -np.inf  # prices between these and others would make all layers differ
    if evaluations:
        ascend(in_units, known, cap=1.0, gap=APART / 4, most=evaluations, until=limit / unit - 1.0)
    least = max(low, unit * (1.0 + max(of_even, known.bound)))
    near = sorted((*known.cuts.values(), *seen), key=lambda cut: float(cut.used.max()))[:SPLICED]
    states, enough = near[0].states, float(near[0].used.max())
    bold = True  # halve the range as long as that succeeds; then go down in small steps
    budget = current()
    while enough > max((1.0 + APART) * least, target):
        budget.tell()
        trial = max((least + enough) / 2 if bold else (1.0 - APART / 2) * enough, target)
        splicer = Splicer(problem, replace(rows, limit=trial))
        found = next(
            (
                spliced
                for one in near
                for other in near
                if one is not other and (spliced := splicer.splice(one.states, other.states, np.inf)) is not None
            ),
            None,
        )
        if found is not None:
            states, enough = tuple(found[0]), float(rows.used(found[0]).max())
        elif not bold:
            break
        else:
            bold = False
    return LeastMemory(least, enough, tuple(states))


class InUnits:
    """A pricing in another unit than bytes, as far as `ascend` needs one."""

    def __init__(self, pricing: Priced, unit: float) -> None:
        self.pricing, self.unit = pricing, unit

    def least(self, multipliers: np.ndarray) -> tuple[float, Cut]:
        value, cut = self.pricing.least(multipliers)
        # The pricing subtracts its own limit, which differs from the unit.
        return value + float(multipliers.sum()) * (self.pricing.rows.limit - self.unit), cut
