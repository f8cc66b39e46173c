"""The cheapest states within a memory limit, and the least limit, by the best prices of memory: cutting planes.

    max θ   with   θ <= cost_k + Σ_t λ_t (used_t,k - limit)  for all states k that are known,   λ >= 0

Each λ of this linear program gives new states, which are least there, and a bound; until bound and θ meet. θ is also
the cost of the best mixture of known states. Where no mixture is within the limit, the bound rises until dearer
states are found that take less memory. The next λ lies between the best λ so far and the program's, which jumps
about.

Two known states of (cost, memory) (0, 15) and (4, 5) and a limit of 10 at one moment give λ = 0.4 and θ = 2.

The file has three parts:

1. `ascend`: the program and its cuts, over a problem whose least at any prices is known (`lagrangian.Pricing`).

2. `leanest_by_prices`, `swept_leanest`: the states of the least memory at their fullest moment:

    least limit = min_s max_t used_t(s) >= max_λ min_s Σ_t λ_t used_t(s),   λ >= 0, Σ λ = 1

   Part 1 finds the best λ: the lower end. The upper end is kept by states that were least at some λ, spliced with one
   another (`memory_rows`). The lower end of a part of a problem's states (`lagrangian.Part`) holds for that part alone.

3. `priced_search`: the cheapest states within the limit, in turns, until cost and bound are near enough:

    prices    the best ones for a part of the problem: states that were least at some prices, and further states that
              go with them (part 1 on few states, which is quick)
    bound     the least of the whole at those prices, exactly (`lagrangian.Pricing`); its states join the part. Where
              elimination cannot do the whole: a bound by sweeps (`lagrangian.SweptPricing`); the states that look best
              to the sweeps join the part
    states    all known states, spliced and then improved stretch by stretch (`memory_rows`)

No clock is read: the same problem has the same answer on every machine.

`lagrangian.Ascent` climbs to the best prices step by step; this file solves for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from ..errors import PlanError
from ..identity_tables import IdentityCache, numbered
from .anytime import within
from .elimination import Facts
from .lagrangian import Cut, Part, Pricing, SweptPricing
from .memory_rows import Rows, Splicer, foremost, kinds
from .milp import quiet_highs
from .problem import Problem, Solution, stopping
from .search_memory import OutOfBudgetError, current

__all__ = [
    "APART",
    "LeastMemory",
    "Prices",
    "Searched",
    "ascend",
    "cheapest",
    "costless",
    "leanest_by_prices",
    "priced_search",
    "swept_leanest",
]

BETWEEN = 0.6  # share of the way from the best λ towards the program's


class Prices:
    """The best multipliers so far, and all known states.

    Args:
        count: the number of moments.
        limit: the memory limit.

    Attributes:
        multipliers, bound: the best multipliers, and their bound.
        cuts: the states.
        seen: the number of evaluations.
    """

    def __init__(self, count: int, limit: float) -> None:
        self.limit = limit
        self.cuts: list[Cut] = []
        self.multipliers, self.bound, self.seen = np.zeros(count), -np.inf, 0

    def see(self, multipliers: np.ndarray, value: float, cut: Cut) -> None:
        self.seen += 1
        if all(cut.states != other.states for other in self.cuts):
            self.cuts.append(cut)
        if value > self.bound:
            self.multipliers, self.bound = multipliers, value


def cheapest(cuts: Sequence[Cut], limit: float, most: float) -> tuple[np.ndarray, float]:
    """λ and θ of the linear program.

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
    highs = quiet_highs()
    highs.setOptionValue("threads", 1)
    highs.passModel(model)
    highs.run()
    found = np.array(highs.getSolution().col_value)
    out[active] = np.maximum(found[:-1], 0.0) * scale / max(limit, 1.0)
    return out, float(found[-1]) * scale


def ascend(
    pricing: _Priced | _InUnits,
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
        multipliers, value = cheapest(prices.cuts, prices.limit, cap)
        capped = float(multipliers.sum()) * max(prices.limit, 1.0) >= 0.999 * cap
        waited += capped
        if value - prices.bound <= gap * abs(value) or prices.bound > until or waited > most_capped:
            return np.inf if capped else value
        known = len(prices.cuts)
        if prices.bound > -np.inf:
            at = prices.multipliers + BETWEEN * (multipliers - prices.multipliers)
            found, cut = pricing.least(at)
            prices.see(at, found, cut)
            if len(prices.cuts) > known or found >= value - gap * abs(value):
                continue
        prices.see(multipliers, *pricing.least(multipliers))  # nothing new in between: use the program's own
    return np.inf if capped else value


# -- the least limit --

EVALUATIONS = 20  # most evaluations at prices
APART = 1e-2  # relative distance of the two ends of a large problem's least limit that is near enough
SPLICED = 8  # number of the leanest known states that are spliced with one another


class _Priced(Protocol):
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
    pricing: _Priced,
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
    known, in_units = Prices(rows.count, unit), _InUnits(pricing, unit)
    even = np.full(rows.count, 1.0 / (unit * rows.count))
    known.see(even, *in_units.least(even))  # the states of little memory everywhere
    of_even, known.bound = known.bound, -np.inf  # prices between these and others would make all layers differ
    if evaluations:
        ascend(in_units, known, cap=1.0, gap=APART / 4, most=evaluations, until=limit / unit - 1.0)
    least = max(low, unit * (1.0 + max(of_even, known.bound)))
    near = sorted((*known.cuts, *seen), key=lambda cut: float(cut.used.max()))[:SPLICED]
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


class _InUnits:
    """A pricing in another unit than bytes, as far as `ascend` needs one."""

    def __init__(self, pricing: _Priced, unit: float) -> None:
        self.pricing, self.unit = pricing, unit

    def least(self, multipliers: np.ndarray) -> tuple[float, Cut]:
        value, cut = self.pricing.least(multipliers)
        # The pricing subtracts its own limit, which differs from the unit.
        return value + float(multipliers.sum()) * (self.pricing.rows.limit - self.unit), cut


# -- the cheapest states within the limit --

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
FIRST_PRICE = 0.2  # first bound on the price of the limit's worth of memory, as a multiple of the cost without a limit
MOST_PRICE = 1e5  # its largest bound
DEARER = 4.0  # factor from one bound to the next
HIGHER = (1.02, 1.1, 1.4, 2.0, 4.0, 16.0, 256.0)  # factors on the best prices, to find states within the limit
FINER = (1.003, 1.01)  # further factors, where sweeps bound the whole
FEW = 12  # a node with at most so many states has all of them in the part
NEAREST = 8  # number of the known states, the best at the best prices, that are spliced with one another
SETTLED = 0.2  # share of the gap between bound and the part's value that a turn must close for another turn
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
        lacking, spliced, evaluated = np.inf, False, 0
        for turn in range(ROUNDS):
            if not direct:
                part = self.part()
            assert part is not None
            self.tell()
            known = Prices(self.rows.count, self.rows.limit)
            known.cuts, known.multipliers = list(self.known.values()), self.prices.multipliers
            near = self.gap / 4 if direct else max(self.gap / 4, ROUGH * 0.1**turn)
            waits = (
                TURN_EVALUATIONS
                if direct or (self.least is not None and self.states is not None)
                else max(CAPPED, STATES // part.size if isinstance(part, Part) and not exact else 0)
            )
            value = ascend(part, known, cap=cap, gap=near, most=TURN_EVALUATIONS, most_capped=waits)
            evaluated += known.seen
            for cut in known.cuts:
                self.offer(cut)
            if value == np.inf and turn >= DEAR and self.least is None:
                if not self.lean():
                    break
                cap = DEARER * max(cap, self.cost - self.prices.bound if self.states is not None else 0.0)
                continue
            if value < np.inf and not exact:
                self.swept_at = known.multipliers
            before = self.prices.bound
            if direct:
                self.prices = known
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
                    self.keep(part)
                    self.splice()
                    spliced = True
                if self.near:
                    break
                if not exact:
                    lacks, closed = value - self.prices.bound, self.prices.bound - before
                    if max(closed, lacking - lacks if lacking < np.inf else 0.0) < SETTLED * min(
                        lacking, lacks + closed
                    ):
                        break  # a further turn would close as little
                    lacking = lacks
            if not direct and evaluated >= EVALUATED:
                break
        if not self.near and part is not None:
            self.keep(part)
            self.splice()
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

    def keep(self, part: _Priced) -> None:
        """Add states within the limit: those that are least at higher prices than the best ones."""
        spliced = False
        for times in HIGHER if self.swept_at is None else (*FINER, *HIGHER):
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

    def look(self, multipliers: np.ndarray) -> None:
        """Evaluate the whole at these prices."""
        if isinstance(self.pricing, Pricing):
            value, cut = self.pricing.least(multipliers)
            self.prices.see(multipliers, value, cut)
            self.offer(cut)
            return
        value, looks = self.pricing.least(multipliers)
        self.looks = [a | b for a, b in zip(self.looks, looks)] if self.looks else looks
        if value > self.prices.bound:
            self.prices.multipliers, self.prices.bound = multipliers, value

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
        """Splice known states within the limit with known states above it."""
        limit, order = self.rows.limit, self.order()
        keep = [cut for cut in order if (cut.used <= limit).all()][:NEAREST]
        above = [cut for cut in order if (cut.used > limit).any()][:NEAREST]
        if not keep and self.states is not None:
            keep = [self.known[tuple(self.states)]] if tuple(self.states) in self.known else []
        below: list[Sequence[int]] = [cut.states for cut in keep]
        while below:  # splice the result once more
            before = self.cost
            for inside in below:
                for outside in above:
                    if self.near:
                        return
                    current().tell()
                    self.take(self.splicer.splice(inside, outside.states, self.cost))
            below = [self.states] if self.cost < before and self.states is not None else []

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
