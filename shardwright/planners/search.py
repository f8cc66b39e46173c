"""A search for the cheapest plan that fits in a device's memory.

    minimise the energy with what is kept (`usages`) within a limit; check the plan's own peak (`memory.timeline`)

The problem may reckon with a little less than the program holds (`usages`): where the program's peak is above the
limit, the problem is solved again with so much less, at last with the least that it can do with. So a plan that is
given fits; and if none is, the least memory that is named is that of a plan which was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ..cluster import format_bytes
from ..cost.memory_timeline import MemoryTimeline, optimizer_bytes
from ..errors import PlanError
from ..graph import Graph, Op
from ..layout import Digit, Layout, beside
from ..partition.local_program import Decision, Decisions, InputPlacement
from ..partition.parameter_sharding import OptimizerParallel
from ..partition.rematerialization import with_recompute
from ..rules import Assignment, Bound
from ..sharded_plan import Plan
from ..solver.least_memory import InfeasibleMemoryError
from ..solver.problem import Problem, Solution
from ..solver.solve import solve
from .graph_problem import CostGraph, Search
from .memory_problem import MemoryProblem, holding
from .propagation import sharding_propagation
from .search_space import atoms_of, options_among
from .semi_auto import semi_auto

__all__ = [
    "CUT",
    "ENOUGH",
    "TooLittleMemoryError",
    "dynamic_programming",
    "fit",
    "fits",
    "limited",
    "recursive_programming",
]

#: How parameters may be stored to save memory: cut over all replicas, gathered again in the backward or kept till then.
CUT = OptimizerParallel(-1, 0, "level3")

#: How often a problem is solved, with less because its plan's peak is above the limit, or with more because nothing
#: keeps that; and how often the least limit is halved.
MOST_TRIES = 6
#: By how much of the limit a peak may be above it for that much to be taken off; if by more, all is taken to be too
#: little.
SLIGHTLY = 0.1

#: How near to its bound a plan within a limit is near enough: the proof of the rest takes most of the time.
ENOUGH = 1e-3

#: How near, relative to it, the least limit is found where the solver does not name it.
NEAR = 2e-3

Solver = Callable[[Problem], Solution]


class TooLittleMemoryError(PlanError):
    """A limit of memory in which no plan was found that fits.

    Attributes:
        least: bytes a device, with which one does.
        bound: what those that the search may choose from are priced at least within the limit; None: not known.
    """

    least: float = float("inf")
    bound: float | None = None

    def located(self, **where: Any) -> TooLittleMemoryError:
        out = super().located(**where)
        out.least, out.bound = self.least, self.bound
        return out


def fit(
    search: Search,
    made: CostGraph,
    limit: float,
    optimizer: Any = "adam",
    cause: str = "search",
    solver: Solver | None = None,
) -> Decisions:
    """The cheapest plan within a limit, of those that the search may choose from.

    Args:
        made: the search's energy; its parameters may have states of storage.
        limit: bytes a device.
        optimizer: as `memory.optimizer_bytes` takes it.
        solver: of problems with a limit; None: `solve`, to within `ENOUGH`. It raises a PlanError where there is no
            plan, whose `least` may be the least limit with which there is one.

    Returns:
        What was decided; its decisions' operators and its storage are what keeps the limit.

    Raises:
        TooLittleMemoryError: no plan fits. It names the moments that cannot be met, and the least memory with which one
            does.
    """
    held = holding(made, search.fed, search.carries, limit, optimizer_bytes(optimizer))
    return _Fitting(search, held, limit, optimizer, cause, solver or partial(solve, gap=ENOUGH)).run()


def fits(search: Search, decided: Decisions, limit: float, optimizer: Any = "adam") -> bool:
    """Whether a plan keeps a limit as it is."""
    plan = Plan(
        search.described.graph,
        search.described.devices,
        "",
        search.fed,
        decided.decisions,
        decided.carries,
        dict(search.stored) if search.stored else None,
        search.hsdp,
        optimizer=optimizer,
    )
    return plan.peak <= limit


def limited(decided: Decisions, limit: float) -> Decisions:
    """A plan that was found without a limit, as one within it."""
    return decided._replace(found=replace(decided.found, limit=limit))


class _Fitting:
    def __init__(
        self, search: Search, held: MemoryProblem, limit: float, optimizer: Any, cause: str, solver: Solver
    ) -> None:
        self.search, self.held, self.limit, self.optimizer = search, held, limit, optimizer
        self.cause, self.solver, self.bound = cause, solver, None
        self.problem = held.energy.problem

    def run(self) -> Decisions:
        target, refused = self.limit, None
        low, high = 0.0, self.limit  # below the one nothing was found, and what keeps the other is too much
        for _ in range(MOST_TRIES):
            try:
                solution = self.solver(replace(self.problem, limit=target))
            except PlanError as error:
                self.seldom(error)
                if target == self.limit or refused is not None:  # what nothing keeps takes long to tell
                    return self.least(error)
                refused, low = error, target
                target = (low + high) / 2
                continue
            if self.bound is None:
                self.bound = solution.bound
            decided, walked = self.decided(solution)
            if walked.peak <= self.limit:
                return decided
            high, over = target, walked.peak - self.limit
            less = target - over if over < SLIGHTLY * self.limit else target * self.limit / walked.peak
            target = less if less > low else (low + high) / 2
        return self.least(refused)

    def seldom(self, error: PlanError) -> None:
        """An error that is not about memory is raised again: the marks contradict one another."""
        if getattr(error, "states", None) is None:
            self.solver(replace(self.problem, limit=None, usages=()))

    def least(self, error: PlanError | None) -> Decisions:
        """The plan that does with the least memory, if that is within the limit."""
        states, said = getattr(error, "states", None), self.bound is None
        if said:
            self.bound = getattr(error, "bound", None)
        solution = (
            self.bisected(getattr(error, "least", None) or 0.0)
            if states is None
            else Solution(states, cost := self.problem.cost(states), cost)
        )
        decided, walked = self.decided(solution)
        if walked.peak <= self.limit:
            return decided
        none = (
            said and getattr(error, "least", 0.0) > self.limit
        )  # else the search reckons with less than the program holds
        raise self.refused(walked, "fits" if none else "was found that fits")

    def bisected(self, low: float) -> Solution:
        """The solution with the least limit: at `low`, or found by halving what lies between it and what holds more."""
        try:
            return self.solver(replace(self.problem, limit=low))
        except InfeasibleMemoryError as error:
            if error.states is not None:
                return Solution(error.states, cost := self.problem.cost(error.states), cost)
            best = self.solver(replace(self.problem, limit=None, usages=()))
        except PlanError:
            best = self.solver(replace(self.problem, limit=None, usages=()))
        high = self.held.peak(best.states)
        for _ in range(MOST_TRIES):
            if high - low <= NEAR * high:
                break
            middle = (low + high) / 2
            try:
                best = self.solver(replace(self.problem, limit=middle))
                high = min(middle, self.held.peak(best.states))
            except PlanError:
                low = middle
        return best

    def decided(self, solution: Solution) -> tuple[Decisions, MemoryTimeline]:
        """What a solution decides, and the memory of its program."""
        search, held = self.search, self.held
        graph = with_recompute(search.described.graph, held.recomputed(solution.states), held.segments)
        ops = {op.name: op for op in graph.ops}
        bounded = solution if self.bound is None else replace(solution, bound=min(self.bound, solution.cost))
        made = search.decided(held.energy, bounded, self.cause, proved=self.bound is not None)
        decisions: dict[str, Decision] = {n: replace(d, op=ops[n]) for n, d in made.decisions.items()}
        hsdp = search.hsdp if search.hsdp is not None else held.storage(solution.states)
        plan = Plan(
            graph,
            search.described.devices,
            "",
            search.fed,
            decisions,
            made.carries,
            dict(search.stored) if search.stored else None,
            hsdp,
            optimizer=self.optimizer,
        )
        found = replace(made.found, limit=self.limit) if made.found is not None else None
        return made._replace(decisions=decisions, found=found, hsdp=hsdp), plan.timeline

    def refused(self, walked: MemoryTimeline, fits: str) -> TooLittleMemoryError:
        totals = walked.totals()
        over = sorted((t for t, total in enumerate(totals) if total > self.limit), key=lambda t: -totals[t])
        said: dict[str, float] = {}
        for t in over:
            name = f"the {'forward' if t < walked.forward else 'backward'} of {walked.moments[t]}"
            said.setdefault(name, totals[t])
        rows = [f"{name}: {format_bytes(total)}" for name, total in said.items()]
        rows = rows[:3] + ([f"and {len(rows) - 3} more"] if len(rows) > 3 else [])
        kinds = ", ".join(f"{kind} {format_bytes(count)}" for kind, count in walked.kinds.items())
        error = TooLittleMemoryError(
            f"no plan {fits} in {format_bytes(self.limit)} a device. The one that does with least holds more at "
            f"{len(over)} moments: {'; '.join(rows)}. At the first of these it holds {kinds}",
            legal=f"memory={int(-(-walked.peak // 1))} ({format_bytes(walked.peak)}) or more, or more devices",
        )
        error.least, error.bound = walked.peak, self.bound
        return error


# ----------------------------------------------------------------------------------------------------
# recursive_programming: recursion over the device count.
#
#     devices = p_1 · p_2 ⋯ p_k, the primes of the outermost level of links first; digit i is p_i @ devices / (p_1 ⋯ p_i)
#     level i: every operator gives digit i to one of its factors, or to none; all choose together:
#         minimise the energy of `energy.py` over {strategy of level i - 1} × {factor, none}, exactly
#
# What was chosen on a level stays and shapes shrink by it; the digits of further levels are repeated until their turn
# comes. An operator has a handful of states on a level, so the search is linear in operators and logarithmic in
# devices.
# To give a digit to none is always allowed: no level makes the plan dearer than the level before it left it.
#
# With a memory limit, what it finds without one is taken where it fits. Otherwise a level may hold as much more as the
# levels below it can still cut: r devices that they tell apart hold r times the limit together. The last level has to
# fit. Where it cannot, the levels above it are given less.
# ----------------------------------------------------------------------------------------------------

#: How much the levels below are counted on to cut, the most first; see `_Recursion.run`.
HOPES = (1.0, 0.5, 0.0)
#: How near to its bound a level within a limit is near enough: it is a step on the way to a plan of which nothing is
#: proved.
NEAR_MARGINAL = 1e-2


def recursive_programming(
    graph: Graph,
    devices: int,
    fed: InputPlacement,
    *,
    costs: Any,
    on_missing_rule: str = "error",
    stored: dict[str, Layout] | None = None,
    uneven: bool = False,
    memory: float | None = None,
    hsdp: OptimizerParallel | None = None,
    optimizer: Any = "adam",
    cut: OptimizerParallel = CUT,
    free: Decisions | None = None,
    search: Search | None = None,
) -> Decisions:
    """Decide every operator that no mark decides.

    Args:
        costs: a `Costs`: what a step takes, and how the devices are joined.
        memory: bytes that a device may hold at any moment; None: not looked at. With it, what operators leave may be
            computed again in the backward, and where `hsdp` is None parameters may be stored cut over their replicas.
        optimizer: with memory, what keeps state for each parameter: see `memory.optimizer_bytes`.
        cut: with memory, how parameters may be stored.
        free: with memory, what this finds without a limit, where it is known already.
        search: that of the same operators by another planner, whose prices are known here too.

    Raises:
        StrategyError, LayoutError, MissingRuleError: as `semi_auto`.
        PlanError: marks that no plan can keep, or (`TooLittleMemoryError`) no plan within the memory.
    """
    if search is None:
        search = Search.of(
            graph, devices, fed, costs, on_missing_rule=on_missing_rule, stored=stored, uneven=uneven, hsdp=hsdp
        ).check()
    recursion = _Recursion(search, optimizer, cut)
    if free is None:
        free = recursion.run()
    if memory is None:
        return free
    if fits(search, free, memory, optimizer):
        return limited(free, memory)
    for hope in HOPES[:-1]:
        try:
            return recursion.run(memory, hope)
        except TooLittleMemoryError:
            if not recursion.hoped:
                raise  # with less it is the same
    return recursion.run(memory, HOPES[-1])


class _Recursion:
    """The levels, and the options of each."""

    def __init__(self, search: Search, optimizer: Any, cut: OptimizerParallel) -> None:
        self.search, self.described, self.optimizer, self.cut = search, search.described, optimizer, cut
        self.grown: dict[tuple, tuple[Assignment, ...]] = {}
        #: Whether a level above the last kept its limit in the latest run: less hope would have asked it for less.
        self.hoped = False

    def run(self, memory: float | None = None, hope: float = 0.0) -> Decisions:
        """Go through the levels.

        Args:
            memory: bytes that a device may hold at last.
            hope: what the levels below are counted on for: to cut what is held by r^hope, where r are the devices that
                they tell apart.
        """
        assigned, decided, self.hoped = self.beginning(), None, False
        levels = self.levels() or (None,)
        rest, strategies, gaps = self.described.devices, 0, {}
        for digit in levels:
            rest //= digit.size if digit is not None else 1
            made = self.search.energy(
                self.options(assigned, digit),
                () if decided is None else (decided.decisions,),
                cut=self.cut if memory is not None else None,
            )
            if memory is not None and digit is levels[-1]:
                decided = fit(self.search, made, memory, self.optimizer)
            else:
                if memory is not None:
                    state = optimizer_bytes(self.optimizer)
                    made = holding(made, self.search.fed, self.search.carries, memory * rest**hope, state).energy
                solution, kept = _nearest(made.problem)
                self.hoped |= kept
                decided = self.search.decided(made, solution, "search")
                if solution.gap:
                    gaps[digit] = solution.gap
            assigned = {name: decision.assignment for name, decision in decided.decisions.items()}
            strategies += decided.found.strategies
        assert decided is not None and decided.found is not None
        notes = (
            (
                f"the levels of {', '.join(map(str, gaps))} may each be up to {max(gaps.values()):.2%} dearer than "
                "the best of its strategies",
            )
            if gaps
            else ()
        )
        # What is best on each level need not be the best of all: nothing is proved of the whole.
        return decided._replace(found=replace(decided.found, bound=None, strategies=strategies, notes=notes))

    def levels(self) -> tuple[Digit, ...]:
        """The digits of the levels, the outermost first: all primes."""
        sizes = [level.size for level in self.search.costs.cluster.levels]
        return atoms_of(self.described.devices, sizes, most=self.described.devices)

    def beginning(self) -> dict[str, Assignment]:
        """The strategies before any level: everything whole, but for what a mark on another operator settles. Where it
        asks for a parameter in some layout, the parameter's other users have to ask for it so too, and so on."""
        graph, devices, rules = self.described.graph, self.described.devices, self.described.rules
        out = {op.name: rules[op.name][1].whole(devices) for op in graph.ops}
        out |= {name: decision.assignment for name, decision in self.search.fixed.items()}
        consumers = graph.consumers()
        settled, todo = set(self.search.fixed), [op for op in graph.ops if op.name in self.search.fixed]
        own = {value.name for name, value in graph.parameters.items() if name not in (self.search.stored or {})}
        while todo:
            op = todo.pop()
            for i, value in enumerate(op.inputs):
                layout = rules[op.name][1].input_layout(i, out[op.name])
                if value.name not in own or layout is None or layout.is_replicated:
                    continue
                for other, j in consumers[value.name]:
                    followed = rules[other.name][1].follow({j: layout}) if other.name not in settled else None
                    if followed is not None:
                        out[other.name] = followed
                        settled.add(other.name)
                        todo.append(other)
        return out

    def options(self, assigned: dict[str, Assignment], digit: Digit | None) -> dict:
        """The strategies of every operator on a level."""

        def among(op: Op, bound: Bound) -> tuple[Assignment, ...]:
            before = assigned[op.name]
            key = (bound.factors, bound.inputs, bound.outputs, before, digit)
            if key not in self.grown:
                self.grown[key] = (before,) if digit is None else (before, *_grown(bound, before, digit))
            return self.grown[key]

        return options_among(self.described, among, self.search.fixed, self.search.outs)


def _nearest(problem: Problem) -> tuple[Solution, bool]:
    """The best that keeps the limit, to within `NEAR`, and whether there is one; where none does, the states of the
    least memory known, or the best without a limit: the last level is the one that has to fit, and that says what does
        not.

    Raises:
        PlanError: nothing is allowed, whatever the memory.
    """
    try:
        return solve(problem, gap=NEAR_MARGINAL), True
    except PlanError as error:
        if problem.limit is None:
            raise
        states = getattr(error, "states", None)
        if states is None:
            return solve(replace(problem, limit=None, usages=()), gap=NEAR_MARGINAL), False
        return Solution(states, cost := problem.cost(states), cost), False


def _grown(bound: Bound, before: Assignment, digit: Digit) -> Iterator[Assignment]:
    """The legal ways to give one more digit to a factor, where it is cut already as its minor part."""
    if not beside(before.devices, (*before.used, digit)):
        return
    for i, factor in enumerate(bound.factors):
        if factor.splittable and factor.size > 1:
            digits = {k: own for k, own in enumerate(before.digits)}
            assignment = bound.cut_by(before.devices, digits | {i: (*digits[i], digit)})
            if bound.divides(assignment) and bound.is_consistent(assignment):
                yield assignment


# ----------------------------------------------------------------------------------------------------
# dynamic_programming: the exact search.
#
#     minimise the energy of `energy.py` over all strategies of `candidates.py` and those that the quicker planners chose
#
# With a limit of memory, what is best without one is taken where it fits. Otherwise what is recomputed and how
# parameters are stored is searched too (`fitting.py`), and the recursion's strategies within the limit are among the
# others. The recursion's plan is taken where it is cheaper still: no other planner's is ever priced below this one's.
# But of networks above `RECURSED` operators the recursion within a limit is not made: each of its levels is a problem
# as large as the search's.
#
# The plan comes with the least price that any other of them has in this energy (`Found.bound`); where its own is that,
# it is the best of them, as the energy prices plans.
# ----------------------------------------------------------------------------------------------------

#: Operators of a network up to which the recursion within a limit of memory is made besides.
RECURSED = 600


def dynamic_programming(
    graph: Graph,
    devices: int,
    fed: InputPlacement,
    *,
    costs: Any,
    on_missing_rule: str = "error",
    stored: dict[str, Layout] | None = None,
    uneven: bool = False,
    memory: float | None = None,
    hsdp: OptimizerParallel | None = None,
    optimizer: Any = "adam",
    cut: OptimizerParallel = CUT,
) -> Decisions:
    """Decide every operator that no mark decides.

    Args:
        costs: a `Costs`: what a step takes.
        memory: bytes that a device may hold at any moment; None: not looked at. With it, what operators leave may be
            computed again in the backward, and where `hsdp` is None parameters may be stored cut over their replicas.
        optimizer: with memory, what keeps state for each parameter: see `memory.optimizer_bytes`.
        cut: with memory, how parameters may be stored.

    Raises:
        StrategyError, LayoutError, MissingRuleError: as `semi_auto`.
        PlanError: marks that no plan can keep, or no plan within the memory.
    """
    search = Search.of(
        graph, devices, fed, costs, on_missing_rule=on_missing_rule, stored=stored, uneven=uneven, hsdp=hsdp
    ).check()
    given = dict(on_missing_rule=on_missing_rule, stored=stored, uneven=uneven)
    recursion = partial(recursive_programming, graph, devices, fed, costs=costs, hsdp=hsdp, search=search, **given)
    recursed = recursion()
    known = [semi_auto(graph, devices, fed, **given)[0], recursed.decisions]
    if any(op.mark is not None for op in graph.ops):
        known.append(sharding_propagation(graph, devices, fed, costs=costs, hsdp=hsdp, **given).decisions)
    free = search.energy(search.options(known), known)
    decided = search.decided(free, solve(free.problem), "search")
    if memory is None:
        return decided
    decided, fitting = limited(decided, memory), fits(search, decided, memory, optimizer)
    if fitting and fits(search, recursed, memory, optimizer):
        return decided
    within = None
    if len(graph.ops) <= RECURSED:
        within = _tried(lambda: recursion(memory=memory, optimizer=optimizer, cut=cut, free=recursed))
    if fitting:
        return _cheaper(decided, within)
    if isinstance(within, Decisions):
        known.append(within.decisions)
    made = search.energy(search.options(known), known, cut=cut)
    return _cheaper(_tried(lambda: fit(search, made, memory, optimizer)), within)


def _tried(plan: Callable[[], Decisions]) -> Decisions | TooLittleMemoryError:
    try:
        return plan()
    except TooLittleMemoryError as error:
        return error


def _cheaper(found: Decisions | TooLittleMemoryError, other: Decisions | TooLittleMemoryError | None) -> Decisions:
    """What the search found, or what the recursion did within the same limit, where that is cheaper: a search ends near
    its bound, and reckons with less than the limit where its plans would be above it.

    Raises:
        PlanError: neither fits. It names the least memory of both.
    """
    if not isinstance(other, Decisions):
        if isinstance(found, Decisions):
            return found
        nearest = found if other is None else min(found, other, key=lambda error: error.least)
        raise PlanError(nearest.message, legal=nearest.legal)
    bound = found.found.bound if isinstance(found, Decisions) else found.bound
    if isinstance(found, Decisions) and found.found.cost <= other.found.cost:
        return found
    note = "of the recursion over the device count: the search found nothing as cheap within the limit"
    return other._replace(
        found=replace(other.found, bound=None if bound is None else min(bound, other.found.cost), notes=(note,))
    )
