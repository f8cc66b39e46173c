"""The best prices of memory, where the least at any prices is known exactly (pricing.py): cutting planes.

    max θ   with   θ <= cost_k + Σ_t λ_t (used_t,k - limit)  for all states k that are known,   λ >= 0

Each λ that this gives brings new states, which are least there, and a bound; until bound and θ meet. θ is also what the
known states come to where they may be mixed: what no mixture of them keeps has no bound above, until dearer states are
found that hold less. What is looked at lies between the best λ so far and the one of the program, which jumps about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .budget import current
from .pricing import Cut

__all__ = ["Prices", "ascend", "cheapest"]

BETWEEN = 0.6  # how far it goes from the best λ towards the program's


class Prices:
    """The best multipliers so far, and all states that are known.

    Attributes:
        multipliers, bound: the best, and the bound that they gave.
        cuts: states.
    """

    def __init__(self, count: int, limit: float) -> None:
        self.limit, self.cuts = limit, []
        self.multipliers, self.bound = np.zeros(count), -np.inf

    def see(self, multipliers: np.ndarray, value: float, cut: Cut) -> None:
        if all(cut.states != other.states for other in self.cuts):
            self.cuts.append(cut)
        if value > self.bound:
            self.multipliers, self.bound = multipliers, value


def cheapest(cuts: Sequence[Cut], limit: float, most: float) -> tuple[np.ndarray, float]:
    """λ and θ of the linear program; the price of the limit's worth of memory is at most `most`."""
    import highspy  # see `milp`
    over = np.array([(cut.used - limit) / max(limit, 1.0) for cut in cuts])
    active = np.flatnonzero((over > 0).any(axis=0))
    out = np.zeros(over.shape[1])
    costs = np.array([cut.cost for cut in cuts])
    if not len(active):
        return out, float(costs.min())
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
    highs = highspy.Highs()
    for option, value in (("output_flag", False), ("threads", 1)):
        highs.setOptionValue(option, value)
    highs.passModel(model)
    highs.run()
    found = np.array(highs.getSolution().col_value)
    out[active] = np.maximum(found[:-1], 0.0) * scale / max(limit, 1.0)
    return out, float(found[-1]) * scale


def ascend(pricing: Any, prices: Prices, *, cap: float, gap: float, most: int) -> float:
    """Better prices, and more states.

    Args:
        pricing: whose `least` says what is least at any prices.
        cap: what the limit's worth of memory may cost at most.
        gap: how near bound and program come, relative to it, for it to end.
        most: evaluations.

    Returns:
        The program's value: what the states that are known come to at best; infinite where no mixture of them keeps the
        limit, as far as such prices can tell.
    """
    if not prices.cuts:
        prices.see(prices.multipliers, *pricing.least(prices.multipliers))
    value = np.inf
    budget = current()
    for _ in range(most):
        budget.watch()
        multipliers, value = cheapest(prices.cuts, prices.limit, cap)
        if value - prices.bound <= gap * abs(value):
            capped = float(multipliers.sum()) * max(prices.limit, 1.0) >= 0.999 * cap
            return np.inf if capped else value
        known = len(prices.cuts)
        if prices.bound > -np.inf:
            at = prices.multipliers + BETWEEN * (multipliers - prices.multipliers)
            found, cut = pricing.least(at)
            prices.see(at, found, cut)
            if len(prices.cuts) > known or found >= value - gap * abs(value):
                continue
        prices.see(multipliers, *pricing.least(multipliers))  # nothing new in between: the program's own
    return value
