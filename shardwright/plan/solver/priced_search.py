"""The cheapest states within a memory limit, where elimination can do the problem at any prices.

In turns, until cost and bound are near enough:

    1. prices    the best ones for a part of the problem: states that were least at some prices, and what goes with them
                 (ascent.py on few states, which is quick)
    2. bound     the least of the whole at those prices, exactly (pricing.py); its states join the part
    3. states    of all that are known, spliced and then improved stretch by stretch (splicing.py)

Nothing here looks at a clock: the same problem has the same answer everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import PlanError
from .ascent import Prices, ascend
from .local_search import within
from .moments import Rows
from .pricing import Cut, Pricing
from ..problem import Problem, Solution
from .reduce import consistent, restrict
from .splicing import Splicer

__all__ = ["priced_search"]

DIRECT = 2**21  # entries of the joints up to which the whole is its own part
ROUNDS = 8  # turns
ROUGH = 1e-2  # how near the first of them comes to a part's best prices; each further one a tenth of that
EVALUATIONS = 40  # of a part, in a turn
FIRST_PRICE = 0.2  # what the limit's worth of memory may cost at first, in times what is cheapest without a limit
MOST_PRICE = 1e5  # ... at most
DEARER = 4.0  # how much more at a time
HIGHER = (1.02, 1.1, 1.4, 2.0, 4.0, 16.0, 256.0)  # times the best prices, to find what keeps the limit
FEW = 12  # states: a node of no more has all of them in the part
NEAREST = 8  # of the known states, by what they come to at the best prices, are spliced with one another
MIXED = 500  # nodes up to which HiGHS is asked to mix known states: it may take minutes over thousands
ENTRIES = 20_000  # ... and entries of the edges
NODES = 300  # of its tree
WINDOWS = 60  # stretches that are chosen anew
LENGTH = 96  # nodes of a stretch


def priced_search(problem: Problem, rows: Rows, pricing: Pricing, gap: float) -> tuple[Solution | None, Cut]:
    """States that keep the limit, and a bound, or None where none were found; and of all states that were seen those that
    hold least at their fullest moment.

    Args:
        problem, rows: of `moments.binding`, consistent.
        pricing: its own.
        gap: how far from the bound, relative to it, the cost may be for the search to end.
    """
    search = _PricedSearch(problem, rows, pricing, gap)
    return search.run(), min(search.known.values(), key=lambda cut: cut.used.max())


class _PricedSearch:
    def __init__(self, problem: Problem, rows: Rows, pricing: Pricing, gap: float) -> None:
        self.problem, self.rows, self.pricing, self.gap = problem, rows, pricing, gap
        self.splicer = Splicer(problem, rows)
        self.prices = Prices(rows.count, rows.limit)
        self.states: list[int] | None = None
        self.cost = np.inf
        self.known: dict[tuple[int, ...], Cut] = {}

    @property
    def near(self) -> bool:
        return self.states is not None and self.cost - self.prices.bound <= max(self.gap, 1e-9) * abs(self.cost)

    def run(self) -> Solution | None:
        zero = np.zeros(self.rows.count)
        self.see(zero, *self.pricing.least(zero))
        if self.near:
            return self.solution("exact: what is best without a limit keeps it")
        least = max(abs(self.prices.bound), 1e-300)
        cap, most = FIRST_PRICE * least, MOST_PRICE * least
        direct = self.pricing.work <= DIRECT
        for turn in range(ROUNDS):
            part: Any = self.pricing if direct else _Part(self.problem, self.rows, self.marks())
            known = Prices(self.rows.count, self.rows.limit)
            known.cuts, known.multipliers = list(self.known.values()), self.prices.multipliers
            near = self.gap / 4 if direct else max(self.gap / 4, ROUGH * 0.1 ** turn)
            value = ascend(part, known, cap=cap, gap=near, most=EVALUATIONS)
            for cut in known.cuts:
                self.offer(cut)
            if direct:
                self.prices = known
            else:
                self.see(known.multipliers, *self.pricing.least(known.multipliers))
            if value == np.inf:
                if cap > most:
                    break
                cap *= DEARER
            elif value < np.inf:
                if direct or value - self.prices.bound <= max(self.gap / 2, 1e-9) * abs(value):
                    break
                if value - self.prices.bound <= self.gap * abs(value):
                    self.keep(part)
                    self.splice()
                if self.near:
                    break
        if not self.near:
            self.keep(part)
            self.splice()
        if self.states is not None and not self.near:
            self.windows()
        if not self.near and len(self.problem.costs) <= MIXED:
            self.mix()
        return None if self.states is None else self.solution("prices of memory, each minimised exactly, then splicing")

    def keep(self, part: Any) -> None:
        """States that keep the limit: those that are least at higher prices than the best ones."""
        spliced = False
        for times in HIGHER:
            if any((cut.used <= self.rows.limit).all() for cut in self.known.values()) and times > 2.0:
                break
            _, cut = part.least(times * self.prices.multipliers)
            self.offer(cut)
            if not spliced and (cut.used <= self.rows.limit).all():
                self.splice()  # the cheapest of them is often enough
                spliced = True
            if self.near:
                break

    def see(self, multipliers: np.ndarray, value: float, cut: Cut) -> None:
        """What the whole comes to at these prices."""
        self.prices.see(multipliers, value, cut)
        self.offer(cut)

    def offer(self, cut: Cut) -> None:
        self.known.setdefault(cut.states, cut)
        if cut.cost < self.cost and (cut.used <= self.rows.limit).all():
            self.states, self.cost = list(cut.states), cut.cost

    def marks(self) -> list[np.ndarray]:
        """Which states (bool, by node) the part has: of a node with few neighbours, few states or states that say which
        one a neighbour has, all; of others those that are known."""
        problem = self.problem
        neighbours = [0] * len(problem.costs)
        follows = [False] * len(problem.costs)
        for pair, table in problem.edges.items():
            for v in pair:
                neighbours[v] += 1
            small, large = (0, 1) if table.shape[0] < table.shape[1] else (1, 0)
            one = self.pricing.facts.share(table) * table.shape[small] <= 1.0 + 1e-9
            if one and table.shape[small] < table.shape[large]:
                follows[pair[large]] = True
        seen = np.array(list(self.known))
        alike: dict[int, np.ndarray] = {}  # by what nodes cost: in equal layers the same operator's
        for v, own in enumerate(problem.costs):
            mark = alike.setdefault(id(own), np.zeros(len(own), bool))
            mark[seen[:, v]] = True
        whole = {size: np.ones(size, bool) for size in {len(own) for own in problem.costs}}
        return [whole[len(own)] if len(own) <= FEW or neighbours[v] <= 1 or follows[v] else alike[id(own)]
                for v, own in enumerate(problem.costs)]

    def splice(self) -> None:
        """Known states that keep the limit with known ones that do not."""
        limit, order = self.rows.limit, self.order()
        keep = [cut for cut in order if (cut.used <= limit).all()][:NEAREST]
        others = [cut for cut in order if (cut.used > limit).any()][:NEAREST]
        if not keep and self.states is not None:
            keep = [self.known[tuple(self.states)]] if tuple(self.states) in self.known else []
        again: list[Sequence[int]] = [cut.states for cut in keep]
        while again:  # what came out is spliced once more
            before = self.cost
            for inside in again:
                for outside in others:
                    if self.near:
                        return
                    self.take(self.splicer.splice(inside, outside.states, self.cost))
            again = [self.states] if self.cost < before and self.states is not None else []

    def take(self, found: tuple[list[int], float] | None) -> bool:
        if found is None or found[1] >= self.cost:
            return False
        self.states, self.cost = found
        return True

    def windows(self) -> None:
        """Stretches anew, one after the other, until all of them have found nothing or as many as may be were tried."""
        alive = self.marks()
        for mark, state in zip(alive, self.states):
            mark[state] = True
        count, random = len(self.problem.costs), np.random.default_rng(0)
        for _ in range(WINDOWS):
            length = int(random.integers(LENGTH // 8, LENGTH))
            begin = int(random.integers(-length // 2, max(count - length // 2, 1)))
            self.take(self.splicer.window(self.states, max(begin, 0), min(begin + length, count), alive,
                                          self.prices.multipliers, self.cost))
            if self.near:
                break

    def mix(self) -> None:
        """The best out of the states of the nearest that are known, by HiGHS, where that is little to ask of it."""
        nearest = [*self.order()[:2 * NEAREST], *(() if self.states is None else (self.pricing.cut(self.states),))]
        alive = [np.zeros(len(own), bool) for own in self.problem.costs]
        for cut in nearest:
            for mark, state in zip(alive, cut.states):
                mark[state] = True
        found = within(self.problem, alive, entries=ENTRIES, nodes=NODES)
        if found is not None:
            self.offer(self.pricing.cut(found))

    def order(self) -> list[Cut]:
        """What is known, by what it comes to at the best prices."""
        limit, prices = self.rows.limit, self.prices.multipliers
        return sorted(self.known.values(), key=lambda cut: cut.cost + float(prices @ (cut.used - limit)))

    def solution(self, note: str) -> Solution:
        bound = min(self.cost, self.prices.bound)
        if self.cost - bound <= 1e-9 * abs(self.cost):
            note, bound = "exact: the bound meets the cost", self.cost
        return Solution(tuple(self.states), self.cost, bound, (note,))


class _Part:
    """A part of a problem's states, minimised as the whole is; what it finds is said in states of the whole."""

    def __init__(self, problem: Problem, rows: Rows, alive: Sequence[np.ndarray]) -> None:
        first = restrict(problem, alive)
        self._steps = [first, consistent(first.problem)]
        inner = self._steps[-1].problem
        found = Pricing.of(inner, Rows.of(inner, rows.count))
        if found is None:
            raise PlanError("a part of the problem is larger than the whole")
        self._pricing = found

    def least(self, multipliers: np.ndarray) -> tuple[float, Cut]:
        value, cut = self._pricing.least(multipliers)
        states: Sequence[int] = cut.states
        for step in reversed(self._steps):
            states = step.lift(states)
        return value, Cut(tuple(states), cut.cost, cut.used)
