"""The cheapest states within a memory limit, by the best prices of memory (`priced_search`).

The search goes in turns, until cost and bound are near enough:

    prices    the best ones for a part of the problem: states that were least at some prices, and further states that
              go with them (`cutting_planes.ascend` on few states, which is quick)
    bound     the least of the whole at those prices, exactly (`lagrangian.Pricing`); its states join the part. Where
              elimination cannot do the whole: a bound by sweeps (`lagrangian.SweptPricing`); the states that look best
              to the sweeps join the part
    states    all known states, spliced with one another and then improved stretch by stretch (`memory_rows`)

Where sweeps bound the whole, the turns end with one whose mixture is no cheaper than that of the turn before. The
states within the limit are then splices of the states of mixtures within the limit and within lower limits. Where no
mixture is within the limit, or no splice, `swept_leanest` finds states of little memory.

Example: of two known states with (cost, memory) of (0, 15) and (4, 5) and a limit of 10 at one moment, half of each is
the cheapest mixture. It costs 2, the bound. A splice that takes 50 of 100 equal nodes from each costs 2 as well.

No clock is read: the same problem has the same answer on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..errors import PlanError
from ..identity_tables import numbered
from .anytime import within
from .cutting_planes import (
    APART,
    LEAST_SHARE,
    InUnits,
    LeastMemory,
    Priced,
    Prices,
    ascend,
    cheapest,
    costless,
    leanest_by_prices,
)
from .elimination import Facts
from .lagrangian import Cut, Part, Pricing, SweptPricing
from .memory_rows import Rows, Splicer, kinds
from .problem import Problem, Solution, stopping
from .search_memory import OutOfBudgetError, current

__all__ = ["Searched", "priced_search", "swept_leanest"]

DIRECT = 2**21  # entries of the joints up to which the part is the whole
ROUNDS = 8  # most turns
DEAR = 1  # first turn that searches the states of the least memory, where no mixture is within the limit
QUICK = 2**24  # entries of all joints up to which the whole's leanest states are searched
MOMENTS = 4  # moments with a price when sweeps search for states of little memory
ROUNDING = 1e-9  # relative, of a bound by prices
ROUGH = 1e-2  # relative gap of the first turn's prices to a part's best ones; each later turn's is a tenth of it
TURN_EVALUATIONS = 40  # most evaluations of a part in a turn
EVALUATED = 80  # evaluations in all turns after which no further turn begins
CAPPED = 8  # evaluations of a turn without a mixture within the limit; then states of little memory are searched
STATES = 1_500_000  # states in all such evaluations up to which there are more of them, for splicing
FIRST_PRICE = 0.8  # first bound on the price of the limit's worth of memory, as a multiple of the cost without a limit
MOST_PRICE = 1e5  # its largest bound
DEARER = 4.0  # factor from one bound to the next
HIGHER = (1.02, 1.1, 1.4, 2.0, 4.0, 16.0, 256.0)  # factors on the best prices, to find states within the limit
FEW = 12  # a node with at most so many states has all of them in the part
NEAREST = 8  # number of the known states, the best at the best prices, that are spliced with one another
BEAM = 4  # number of the cheapest splices that are spliced again
LOWER = (0.997, 0.99, 0.97)  # lower limits of mixtures, as shares of the limit
LOOKS = 2  # most looks of sweeps at the same prices
SETTLED = 0.2  # share of the gap between bound and the part's value that a look must close for another look
MIXED = 500  # most nodes for which HiGHS mixes known states: it may take minutes over thousands
ENTRIES = 20_000  # most entries of the edges for it
WORK = 1e7  # its work, see `milp`
WINDOWS = 60  # most stretches that are chosen anew
LENGTH = 96  # most nodes of a stretch


class Searched(NamedTuple):
    """The result of a search.

    Attributes:
        found: states within the limit, and a bound; None: none were found.
        leanest: the states seen that take least memory at their fullest moment.
        least: no states keep a limit below it; None: the states of the least memory were not searched.
        bound: a lower bound on the cost of states within the limit; None: not known.
        prices: of memory by moment, at which the bound is highest.
    """

    found: Solution | None = None
    leanest: Cut | None = None
    least: float | None = None
    bound: float | None = None
    prices: np.ndarray | None = None


def priced_search(problem: Problem, rows: Rows, pricing: Pricing | SweptPricing, gap: float) -> Searched:
    """The cheapest states within the limit.

    Args:
        problem, rows: of `memory_rows.binding`, consistent.
        pricing: the problem's least, or a bound on it, at any prices.
        gap: relative gap to the bound at which the search ends.

    Raises:
        OutOfBudgetError: the host memory does not suffice for a single elimination of a `Pricing`.
    """
    search = _PricedSearch(problem, rows, pricing, gap)
    with stopping(lambda _: None if search.states is None else search.solution("stopped: not proved optimal")):
        found = search.run()
    leanest = min(search.known.values(), key=lambda cut: cut.used.max(initial=0.0), default=None)
    bound = search.prices.bound
    return Searched(found, leanest, search.least, None if bound == -np.inf else bound, search.prices.multipliers)


class _PricedSearch:
    def __init__(self, problem: Problem, rows: Rows, pricing: Pricing | SweptPricing, gap: float) -> None:
        self.problem, self.rows, self.pricing, self.gap = problem, rows, pricing, gap
        self.facts = pricing.facts if isinstance(pricing, Pricing) else Facts()
        self.kinds = None if isinstance(pricing, Pricing) else kinds(problem.costs, problem.edges).tolist()
        self.looks: list[np.ndarray] = []  # states (bool, by node) that look best to the sweeps
        self.splicer = Splicer(problem, rows)
        self.prices = Prices(rows.count, rows.limit)
        self.swept_at: np.ndarray | None = None  # a part's best prices, where sweeps bound the whole
        self.states: list[int] | None = None
        self.cost = np.inf
        self.known: dict[tuple[int, ...], Cut] = {}
        self.least: float | None = None
        self.parts = Prices(rows.count, rows.limit)  # of the last part, with the states that were least in any part
        self.dearest = np.inf  # bound on the price of the limit's worth of memory
        self.tried = set[tuple[tuple[int, ...], tuple[int, ...]]]()  # pairs that were spliced

    @property
    def near(self) -> bool:
        return self.states is not None and self.cost - self.prices.bound <= max(self.gap, 1e-9) * abs(self.cost)

    @property
    def fair(self) -> np.ndarray:
        """The prices at which states are compared: those of the best bound, or of the last part, which elimination
        minimises, where sweeps bound the whole: a bound by sweeps is often highest at prices that are too low."""
        return self.prices.multipliers if self.swept_at is None else self.swept_at

    def run(self) -> Solution | None:
        """The solution; None where no states within the limit were found.

        Raises:
            OutOfBudgetError: the host memory does not suffice for a single elimination.
        """
        try:
            return self.turns()
        except OutOfBudgetError:
            if isinstance(self.pricing, Pricing):
                raise
        return None if self.states is None else self.solution("prices of memory, as far as the host's memory went")

    def turns(self) -> Solution | None:
        self.look(np.zeros(self.rows.count))
        if self.near:
            return self.solution("the plan without a limit keeps it")
        least = max(abs(self.prices.bound), 1e-300)
        cap, most = FIRST_PRICE * least, MOST_PRICE * least
        exact = isinstance(self.pricing, Pricing)
        direct = isinstance(self.pricing, Pricing) and self.pricing.work <= DIRECT
        part: Pricing | Part | None = self.pricing if isinstance(self.pricing, Pricing) else None
        known = self.parts = Prices(self.rows.count, self.rows.limit, None if direct else self.splicer)
        settled, spliced, evaluated = np.inf, False, 0
        for turn in range(ROUNDS):
            if not direct:
                part = self.part()
            assert part is not None
            self.tell()
            known.bound, known.seen = -np.inf, 0
            for cut in self.known.values():
                known.add(cut)
            near = self.gap / 4 if direct else max(self.gap / 4, ROUGH * 0.1**turn)
            waits = (
                TURN_EVALUATIONS
                if direct or (self.least is not None and self.states is not None)
                else max(CAPPED, STATES // part.size if isinstance(part, Part) and not exact else 0)
            )
            value = ascend(part, known, cap=cap, gap=near, most=TURN_EVALUATIONS, most_capped=waits)
            evaluated += known.seen
            for cut in known.cuts.values():
                self.offer(cut)
            keeping = [cut for cut in known.spliced.values() if (cut.used <= self.rows.limit).all()]
            if keeping:
                self.offer(self.cut(min(keeping, key=lambda cut: cut.cost).states))
            self.dearest = DEARER * cap
            if value == np.inf and turn >= DEAR and self.least is None:
                if not self.lean():
                    break
                cap = DEARER * max(cap, self.cost - self.prices.bound if self.states is not None else 0.0)
                continue
            if value < np.inf and not exact:
                self.swept_at = known.multipliers
            if direct:
                self.prices.multipliers, self.prices.bound = known.multipliers, known.bound
            elif value < np.inf and not exact and settled - value > self.gap * abs(value):
                self.look_again(known.multipliers, value)
            else:
                self.look(known.multipliers)
            if value == np.inf:
                if cap > most or (self.least is not None and self.states is None):
                    break  # neither states nor a mixture were found
                cap *= DEARER
            elif value < np.inf:
                if direct or value - self.prices.bound <= max(self.gap / 2, 1e-9) * abs(value):
                    break
                if value - self.prices.bound <= self.gap * abs(value) and (exact or not spliced):
                    self.combine(part)
                    spliced = True
                if self.near:
                    break
                if not exact:
                    if settled - value <= self.gap * abs(value):
                        break
                    settled = value
            if not direct and evaluated >= EVALUATED:
                break
        if not self.near and part is not None:
            self.combine(part)
        if self.states is not None and not self.near:
            self.windows(self.states)
        if not self.near and len(self.problem.costs) <= MIXED:
            self.mix()
        return (
            None
            if self.states is None
            else self.solution(
                "not proved optimal: by prices of memory, each minimised exactly, then splicing"
                if isinstance(self.pricing, Pricing)
                else "not proved optimal: by prices of memory, bounded by sweeps, then splicing"
            )
        )

    def lean(self) -> bool:
        """Search the states of the least memory. False: none of them is within the limit."""
        free, low = costless(self.problem), float(self.rows.least().max(initial=0.0))
        self.least = low
        try:
            exact = isinstance(self.pricing, Pricing) and self.pricing.work <= QUICK
            pricing = Pricing.of(free, self.rows) if exact else None
            if pricing is not None:
                limit, known = self.rows.limit, list(self.known.values())
                found = leanest_by_prices(
                    free, self.rows, pricing, low, known, target=limit, limit=limit * (1.0 + APART / 4)
                )
                self.least = max(low, found.least * (1.0 - ROUNDING))
                may = self.least <= self.rows.limit
            else:
                if isinstance(self.pricing, SweptPricing):
                    self.pricing.forget()
                known = list(self.known.values())
                found = swept_leanest(free, self.rows, self.marks(), low, known, self.rows.limit)
                self.least, may = found.least, found.enough is not None and found.enough <= self.rows.limit
        except OutOfBudgetError:
            return True
        if found.states is not None:
            self.offer(self.cut(found.states))
        return may

    def tell(self) -> None:
        """Report the progress."""
        best, bound = None if self.states is None else self.cost, self.prices.bound
        current().watch("prices of memory", best, None if bound == -np.inf else bound)

    def combine(self, part: Priced) -> None:
        """Make states within the limit of the known ones, or of further ones."""
        if self.swept_at is None:
            self.keep(part)
            self.splice()
        else:
            self.splice()
            if self.states is None:
                self.lower(part)
        if self.states is None and self.least is None and self.lean():  # a mixture is within the limit, no states are
            self.splice()

    def keep(self, part: Priced) -> None:
        """Add states within the limit: those that are least at higher prices than the best ones."""
        spliced = False
        for times in HIGHER:
            self.tell()
            if any((cut.used <= self.rows.limit).all() for cut in self.known.values()) and times > 2.0:
                break
            _, cut = part.least(times * self.fair)
            self.offer(cut)
            if not spliced and (cut.used <= self.rows.limit).all():
                self.splice()  # splicing the cheapest of them is often enough
                spliced = True
            if self.near:
                break

    def lower(self, part: Priced) -> None:
        """Add states of mixtures within lower limits. Where all states of the best mixture are a little above the
        limit, at different moments, no splice of them may be within it."""
        for share in LOWER:
            self.tell()
            limit = share * self.rows.limit
            prices = Prices(self.rows.count, limit, self.parts.splicer)
            prices.cuts, prices.spliced, prices.multipliers = self.parts.cuts, self.parts.spliced, self.fair
            ascend(InUnits(part, limit), prices, cap=self.dearest, gap=ROUGH, most=CAPPED)
            for cut in prices.cuts.values():
                self.offer(cut)
            self.splice()
            if self.states is not None:
                break

    def look(self, multipliers: np.ndarray) -> float:
        """Evaluate the whole at these prices: its least, or a bound on it."""
        if isinstance(self.pricing, Pricing):
            value, cut = self.pricing.least(multipliers)
            self.prices.see(multipliers, value, cut)
            self.offer(cut)
            return value
        value, looks = self.pricing.least(multipliers)
        self.looks = [a | b for a, b in zip(self.looks, looks)] if self.looks else looks
        if value > self.prices.bound:
            self.prices.multipliers, self.prices.bound = multipliers, value
        return value

    def look_again(self, multipliers: np.ndarray, most: float) -> None:
        """Look at the same prices until the sweeps, each of which goes on from the last, come no nearer.

        Args:
            multipliers: the prices.
            most: the cost of the best mixture of a part's states, which no bound of the whole is above.
        """
        before = self.look(multipliers)
        for _ in range(LOOKS - 1):
            found = self.look(multipliers)
            if found - before < SETTLED * (most - found):
                break
            before = found

    def offer(self, cut: Cut) -> None:
        self.known.setdefault(cut.states, cut)
        if cut.cost < self.cost and (cut.used <= self.rows.limit).all():
            self.states, self.cost = list(cut.states), cut.cost

    def part(self) -> Pricing | Part:
        """The part of the problem that the next prices are for; the whole where no state would be left out."""
        marks = self.marks()
        if isinstance(self.pricing, Pricing) and all(mark.all() for mark in marks):
            return self.pricing
        try:
            return Part(self.problem, self.rows, marks)
        except PlanError:  # elimination is too large for it
            return Part(self.problem, self.rows, self.marks(known=True))

    def marks(self, known: bool = False) -> list[np.ndarray]:
        """The states (bool, by node) of the part: the known ones; unless `known`, all those of a node that has few
        neighbours or few states, or whose state follows from a neighbour's."""
        problem = self.problem
        neighbours, follows = [0] * len(problem.costs), [False] * len(problem.costs)
        for pair, table in problem.edges.items():
            for v in pair:
                neighbours[v] += 1
            small, large = (0, 1) if table.shape[0] < table.shape[1] else (1, 0)
            if table.shape[small] < table.shape[large] and self.facts.share(table) * table.shape[small] <= 1.0 + 1e-9:
                follows[pair[large]] = True
        seen = np.array(list(self.known), np.int64).reshape(-1, len(neighbours))
        which = numbered(problem.costs) if self.kinds is None else self.kinds
        alike: dict[int, np.ndarray] = {}  # by the node's costs: in equal layers the same operator's
        sizes = [len(node_costs) for node_costs in problem.costs]
        for v, size in enumerate(sizes):
            mark = alike.setdefault(which[v], np.zeros(size, bool))
            mark[seen[:, v]] = True
            if self.looks:
                mark |= self.looks[v]
        whole = {size: np.ones(size, bool) for size in set(sizes)}
        return [
            whole[size] if not known and (size <= FEW or neighbours[v] <= 1 or follows[v]) else alike[which[v]]
            for v, size in enumerate(sizes)
        ]

    def splice(self) -> None:
        """Splice the cheapest states within the limit, and the states of the cheapest mixture, with the latter. In a
        small problem the nearest states above the limit are partners too. In a large one the states of mixtures within
        lower limits follow, as long as cheaper states come of it."""
        limit, order, parts = self.rows.limit, self.order(), self.parts
        keep = [cut for cut in order if (cut.used <= limit).all()][:NEAREST]
        inside = {cut.states: cut.cost for cut in (*keep, *parts.mixture) if (cut.used <= limit).all()}
        if self.states is not None:
            inside[tuple(self.states)] = self.cost
        above = [cut for cut in order if (cut.used > limit).any()][:NEAREST]
        few = parts.splicer is not None and parts.mixture  # of a large problem: a pair takes 10 ms
        partners = [cut.states for cut in (parts.mixture if few else (*above, *parts.mixture))]
        self.pair(inside, [*sorted(inside, key=inside.__getitem__)[:BEAM], *partners], partners)
        cuts = [*parts.cuts.values(), *parts.spliced.values()]
        for share in LOWER if parts.splicer is not None else ():
            before = self.cost
            shares = cheapest(cuts, share * limit, self.dearest)[2]
            mixture = [cuts[n].states for n in np.flatnonzero(shares > LEAST_SHARE)]
            self.pair(inside, mixture, mixture)
            if self.near or before <= self.cost < np.inf:
                break

    def pair(
        self, inside: dict[tuple[int, ...], float], todo: Sequence[tuple[int, ...]], partners: Sequence[tuple[int, ...]]
    ) -> None:
        """Splice states with partners, then the `BEAM` cheapest splices, until nothing cheaper comes of it.

        Args:
            inside: the cost of states within the limit; splices are added.
            todo: the states.
            partners: what each of them is spliced with.
        """
        tried = set[tuple[int, ...]]()
        while todo:
            for one in todo:
                tried.add(one)
                for other in partners:
                    if self.near:
                        return
                    if one == other or (one, other) in self.tried or (other, one) in self.tried:
                        continue
                    self.tried.add((one, other))
                    self.tell()
                    below = sorted(inside.values())[BEAM - 1] if len(inside) >= BEAM else np.inf
                    found = self.splicer.splice(one, other, below)
                    if found is not None:
                        inside[tuple(found[0])] = found[1]
                        self.take(found)
            todo = [one for one in sorted(inside, key=inside.__getitem__)[:BEAM] if one not in tried]

    def take(self, found: tuple[list[int], float] | None) -> bool:
        if found is None or found[1] >= self.cost:
            return False
        self.states, self.cost = found
        return True

    def windows(self, states: list[int]) -> None:
        """Choose stretches of nodes anew, one after the other, from states within the limit."""
        alive = self.marks()
        for mark, state in zip(alive, states):
            mark[state] = True
        count, random = len(self.problem.costs), np.random.default_rng(0)
        tried: set[tuple[int, int]] = set()  # stretches, with these states
        for _ in range(WINDOWS):
            self.tell()
            length = int(random.integers(LENGTH // 8, LENGTH))
            begin = int(random.integers(-length // 2, max(count - length // 2, 1)))
            stretch = max(begin, 0), min(begin + length, count)
            found = None if stretch in tried else self.splicer.window(states, *stretch, alive, self.fair, self.cost)
            tried.add(stretch)
            if self.take(found) and found is not None:
                states, tried = found[0], set()
            if self.near:
                break

    def mix(self) -> None:
        """Let HiGHS combine the best known states, where the problem is small enough for it."""
        nearest = [*self.order()[: 2 * NEAREST], *(() if self.states is None else (self.cut(self.states),))]
        alive = [np.zeros(len(node_costs), bool) for node_costs in self.problem.costs]
        for cut in nearest:
            for mark, state in zip(alive, cut.states):
                mark[state] = True
        found = within(self.problem, alive, entries=ENTRIES, work=WORK)
        if found is not None:
            self.offer(self.cut(found))

    def cut(self, states: Sequence[int]) -> Cut:
        states = tuple(map(int, states))
        return Cut(states, self.problem.cost(states), self.rows.used(states))

    def order(self) -> list[Cut]:
        """The known states, ordered by their cost with memory at the best prices."""
        return sorted(self.known.values(), key=lambda cut: cut.cost + float(self.fair @ (cut.used - self.rows.limit)))

    def solution(self, note: str) -> Solution:
        assert self.states is not None
        bound = min(self.cost, self.prices.bound)
        if self.cost - bound <= 1e-9 * abs(self.cost):
            note, bound = "proved optimal: the bound meets the cost", self.cost
        return Solution(tuple(self.states), self.cost, bound, (note,))


def swept_leanest(
    problem: Problem, rows: Rows, alive: Sequence[np.ndarray], low: float, seen: Sequence[Cut] = (), target: float = 0.0
) -> LeastMemory:
    """The states of the least memory of a problem without costs that elimination cannot do.

    The search covers the states that look best to sweeps where a few moments have a price: with a price at each
    moment, no two layers would be equal.

    Args:
        problem: the problem; see `costless`.
        rows: its usages.
        alive: further states (bool, by node) to choose from.
        low: no plan keeps a limit below it.
        seen: allowed states, which are spliced with those found.
        target: the search ends with states that keep this limit.
    """
    swept = SweptPricing(problem, rows)
    search = _PricedSearch(problem, rows, swept, 0.0)
    search.looks = list(alive)
    least, prices = rows.least(), np.zeros(rows.count)
    for stretch in np.array_split(np.arange(rows.count), min(MOMENTS, rows.count)):
        prices[stretch[least[stretch].argmax()]] = 1.0  # the stretch's moment with the largest least memory
    search.look(prices / prices.sum())
    swept.forget()
    low = max(low, search.prices.bound + rows.limit)
    try:
        part = Part(problem, rows, search.marks())
        found = leanest_by_prices(problem, rows, part, low, seen, evaluations=0, target=target)
        return replace(found, least=low)
    except PlanError:  # these states exclude one another
        return LeastMemory(low, None, None)
