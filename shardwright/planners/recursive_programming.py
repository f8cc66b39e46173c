"""The planner recursive_programming: recursion over the device count, one digit of the rank a level.

    devices = p_1 · p_2 ⋯ p_k, the primes of the outermost level of links first; digit i is p_i @ devices / (p_1 ⋯ p_i)
    level i: every operator gives digit i to one of its factors, or to none; all choose together:
        minimise the cost graph of `graph_problem` over {strategy of level i - 1} × {factor, none}, exactly

8 devices have three levels: 2 @ 4, 2 @ 2, 2 @ 1.

The choice of a level stays, and shapes shrink by it; on each level the digits of the later levels are replicas. An
operator has a handful of states on a level, so the search is linear in the operators and logarithmic in the devices.
An operator may always give the digit to none: no level makes the plan dearer than the level before left it.

With a memory limit, the plan found without a limit is returned where it fits. Otherwise a level's limit is larger by
what the later levels can still cut: with r = the product of their digits, r^hope times the limit. The last level has
the limit itself. Where no plan fits there, the levels above it run again with a smaller `hope`.

`dynamic_programming` assigns all digits at once, and so proves a bound; nothing is proved here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace

from ..cost.memory_timeline import OptimizerSetting, optimizer_bytes
from ..errors import PlanError
from ..graph import Op
from ..layout import Digit, beside
from ..partition.local_program import Decisions
from ..partition.parameter_sharding import OptimizerParallel
from ..rules import Assignment, Bound
from ..solver.problem import Problem, Solution, stopping
from ..solver.solve import solve
from .memory_fit import TooLittleMemoryError, fit, fits, limited
from .memory_problem import add_memory
from .plan_search import Search
from .planning_problem import PlanningProblem, planner
from .search_space import Strategy, options_among, prime_axes

__all__ = ["recursion", "recursive_programming"]


#: Exponents of the limit that a level gets for the cuts of later levels, the most hopeful first; see `_Recursion.run`.
HOPES = (1.0, 0.5, 0.0)


#: The exponents for a network of more than `LARGE` operators: a smaller one has its levels refuse their limits, which
#: takes five times as long as keeping them.
LARGE_HOPES = (1.0, 0.75)
LARGE = 600


#: Relative gap to the bound at which a level within a memory limit stops: a level is a step to a plan of which nothing
#: is proved.
NEAR_MARGINAL = 1e-2


@planner("recursive_programming", searches=True, fits_memory=True)
def recursive_programming(problem: PlanningProblem) -> Decisions:
    """Decide every operator that no mark decides.

    Returns:
        The decisions, with cost and notes in `found`; `found.bound` is None.

    Raises:
        StrategyError, LayoutError, MissingRuleError: as `semi_auto`.
        PlanError: marks that no plan can keep, or (`TooLittleMemoryError`) no plan within the memory.
    """
    return recursion(Search.of(problem).check(), problem.memory)


def recursion(search: Search, memory: float | None = None, free: Decisions | None = None) -> Decisions:
    """Decide every operator of a search.

    Args:
        search: the search; another planner's search over the same operators has its prices already.
        memory: the limit in bytes a device; None: no limit, whatever the search's problem has.
        free: the result without a limit of memory, where it is known already.
    """
    optimizer = search.problem.optimizer
    levels = _Recursion(search, optimizer, search.problem.cut)
    with stopping(lambda found: found if isinstance(found, Decisions) else levels.latest):
        return _recursed(search, levels, memory, free)


def _recursed(search: Search, levels: _Recursion, memory: float | None, free: Decisions | None) -> Decisions:
    optimizer = search.problem.optimizer
    if free is None:
        free = levels.run()
    if memory is None:
        return free
    if fits(search, free, memory, optimizer):
        return limited(free, memory)
    nearest: TooLittleMemoryError | None = None
    for hope in HOPES if len(search.described.graph.ops) <= LARGE else LARGE_HOPES:
        try:
            return levels.run(memory, hope)
        except TooLittleMemoryError as error:
            nearest = error if nearest is None or error.least < nearest.least else nearest
            if not levels.hoped:
                break  # no level kept its limit: a smaller `hope` changes nothing
    assert nearest is not None
    raise nearest


class _Recursion:
    """The levels, and the options of each."""

    def __init__(self, search: Search, optimizer: OptimizerSetting, cut: OptimizerParallel) -> None:
        self.search, self.described, self.optimizer, self.cut = search, search.described, optimizer, cut
        self.grown: dict[tuple[Hashable, ...], tuple[Assignment, ...]] = {}
        #: True where a level above the last kept its limit in the latest run: a smaller `hope` would have given it a
        #: smaller limit.
        self.hoped = False
        #: The plan of the latest level; the digits of the levels below are replicas in it.
        self.latest: Decisions | None = None

    def run(self, memory: float | None = None, hope: float = 0.0) -> Decisions:
        """Solve the levels one after the other.

        Args:
            memory: the limit of the last level in bytes a device; None: no limit.
            hope: the exponent of the limit of the levels above: r^hope · memory, with r the product of the digits of
                the levels below.
        """
        assigned, decided, self.hoped = self.beginning(), None, False
        levels = self.levels() or (None,)
        rest, strategies, gaps = self.described.devices, 0, {}
        for digit in levels:
            rest //= digit.size if digit is not None else 1
            made = self.search.cost_graph(
                self.options(assigned, digit),
                () if decided is None else (decided.decisions,),
                cut=self.cut if memory is not None else None,
            )
            if memory is not None and digit is levels[-1]:
                decided = fit(self.search, made, memory, self.optimizer)
            else:
                if memory is not None:
                    state = optimizer_bytes(self.optimizer)
                    made = add_memory(
                        made, self.search.input_placement, self.search.batch_dims, memory * rest**hope, state
                    ).cost_graph
                solution, fits = _nearest(made.problem)
                self.hoped |= fits
                decided = self.search.decided(made, solution, "search")
                if solution.gap:
                    gaps[digit] = solution.gap
            self.latest = decided
            assigned = {name: decision.assignment for name, decision in decided.decisions.items()}
            strategies += sum(map(len, made.options.values()))
        assert decided is not None and decided.found is not None
        notes = (
            (
                f"the levels of {', '.join(map(str, gaps))} may each be up to {max(gaps.values()):.2%} dearer than "
                "the best of its strategies",
            )
            if gaps
            else ()
        )
        # Optimal levels need not make an optimal plan: nothing is proved of the whole.
        return decided._replace(found=replace(decided.found, bound=None, strategies=strategies, notes=notes))

    def levels(self) -> tuple[Digit, ...]:
        """The digits of the levels, the outermost first: all primes."""
        sizes = [level.size for level in self.search.costs.cluster.levels]
        return prime_axes(self.described.devices, sizes, most=self.described.devices)

    def beginning(self) -> dict[str, Assignment]:
        """The strategies before any level: every operator whole, except where a mark settles more.

        A marked operator has its mark. Another operator that consumes a parameter in a marked operator's layout has
        to need the same layout, and so on along shared parameters.
        """
        graph, devices, rules = self.described.graph, self.described.devices, self.described.rules
        out = {op.name: rules[op.name][1].whole(devices) for op in graph.ops}
        out |= {name: decision.assignment for name, decision in self.search.fixed.items()}
        consumers = graph.consumers()
        settled, todo = set(self.search.fixed), [op for op in graph.ops if op.name in self.search.fixed]
        unstored = {value.name for name, value in graph.parameters.items() if name not in (self.search.stored or {})}
        while todo:
            op = todo.pop()
            for i, value in enumerate(op.inputs):
                layout = rules[op.name][1].input_layout(i, out[op.name])
                if value.name not in unstored or layout is None or layout.is_replicated:
                    continue
                for other, j in consumers[value.name]:
                    followed = rules[other.name][1].follow({j: layout}) if other.name not in settled else None
                    if followed is not None:
                        out[other.name] = followed
                        settled.add(other.name)
                        todo.append(other)
        return out

    def options(self, assigned: dict[str, Assignment], digit: Digit | None) -> dict[str, tuple[Strategy, ...]]:
        """The strategies of every operator on a level."""

        def among(op: Op, bound: Bound) -> tuple[Assignment, ...]:
            before = assigned[op.name]
            key = (bound.factors, bound.inputs, bound.outputs, before, digit)
            if key not in self.grown:
                self.grown[key] = (before,) if digit is None else (before, *_grown(bound, before, digit))
            return self.grown[key]

        return options_among(self.described, among, self.search.fixed, self.search.outs)


def _nearest(problem: Problem) -> tuple[Solution, bool]:
    """The best states within the limit, to within `NEAR_MARGINAL`, and True; with False where none is within the
    limit.

    With False: the states of the least memory that is known, or the best states without a limit. The last level alone
    has to fit, and reports where it does not.

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
    """The legal assignments that give one more digit to a factor; a factor that is cut already gets it as its minor
    part."""
    if not beside(before.devices, (*before.used, digit)):
        return
    for i, factor in enumerate(bound.factors):
        if factor.splittable and factor.size > 1:
            digits = dict(enumerate(before.digits))
            assignment = bound.cut_by(before.devices, digits | {i: (*digits[i], digit)})
            legal = bound.divides(assignment) and bound.is_consistent(assignment)
            if legal and bound.halos_may_pay(assignment, ((i, digit.size),)):
                yield assignment
