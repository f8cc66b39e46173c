"""A search for the cheapest plan that fits in a device's memory.

1. Minimise the cost graph with its memory usages (`memory_problem`) within a limit.
2. Compute the peak of the plan's own program (`memory_timeline.timeline`). A plan within the limit is returned.
3. Otherwise solve again with a lower limit: the problem may count a little less than the program holds.
4. After `MOST_TRIES` solves, or where no states are within the limit, try the plan of the least memory.

Example: with a limit of 10 GB, a peak of 10.4 GB lowers the problem's limit to 9.6 GB (over by less than `SLIGHTLY`); a
peak of 20 GB lowers it to 10 · 10 / 20 = 5 GB.

A plan that is returned therefore fits. The error names the peak of a plan that exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..cluster import format_bytes
from ..cost.memory_timeline import MemoryTimeline, OptimizerSetting, optimizer_bytes
from ..errors import PlanError
from ..graph import Value
from ..partition.local_program import Decision, Decisions
from ..partition.rematerialization import with_recompute
from ..sharded_plan import Plan
from ..solver.problem import Problem, Solution, stopping
from ..solver.solve import InfeasibleMemoryError, solve
from .graph_problem import CostGraph
from .memory_problem import MemoryProblem, add_memory
from .plan_search import Search

__all__ = ["ENOUGH", "TooLittleMemoryError", "fit", "fits", "limited"]


#: Most solves of one problem: with a lower limit because the plan's peak is above the limit, or with a higher one
#: because no states are within it. Also the most halvings towards the least limit.
MOST_TRIES = 6


#: Relative excess of the peak up to which the excess is subtracted from the limit. With a larger excess, the whole
#: problem is taken to count too little, and the limit is scaled.
SLIGHTLY = 0.1


#: Relative gap to the bound at which a plan within a limit is good enough: proving the rest takes most of the time.
ENOUGH = 1e-3


#: Relative precision of the least limit, where the solver does not name it.
NEAR = 2e-3


Solver = Callable[[Problem], Solution]


class TooLittleMemoryError(PlanError):
    """A memory limit within which no plan was found.

    Attributes:
        least: bytes a device of a plan that exists.
        bound: a lower bound on the cost of the search's plans within the limit; None: not known.
    """

    least: float = float("inf")
    bound: float | None = None

    def located(
        self, *, operator: str | None = None, source: str | None = None, strategy: object | None = None
    ) -> TooLittleMemoryError:
        out = super().located(operator=operator, source=source, strategy=strategy)
        out.least, out.bound = self.least, self.bound
        return out


def fit(
    search: Search,
    made: CostGraph,
    limit: float,
    optimizer: OptimizerSetting = "adam",
    cause: str = "search",
    solver: Solver | None = None,
) -> Decisions:
    """The cheapest plan within a limit, among the options of the search.

    Args:
        search: the operators, the marks and the prices.
        made: the search's cost graph; its parameters may have states of storage.
        limit: bytes a device.
        optimizer: as `memory_timeline.optimizer_bytes` takes it.
        cause: the name under which the decisions are recorded.
        solver: of problems with a limit; None: `solve`, to within `ENOUGH`. It raises a PlanError where there is no
            plan, whose `least` may be the least limit with which there is one.

    Returns:
        The decisions. The recomputed operators (in the decisions' operators) and the storage (`hsdp`) are part of
        what keeps the limit.

    Raises:
        TooLittleMemoryError: no plan fits. It names the moments above the limit, and the least memory with which a
            plan fits.
    """
    memory_problem = add_memory(made, search.input_placement, search.batch_dims, limit, optimizer_bytes(optimizer))
    fitting = _Fitting(search, memory_problem, limit, optimizer, cause, solver or partial(solve, gap=ENOUGH))
    with stopping(lambda found: fitting.decided(found)[0] if isinstance(found, Solution) else None):
        return fitting.run()


def fits(search: Search, decided: Decisions, limit: float, optimizer: OptimizerSetting = "adam") -> bool:
    """True where a plan keeps a limit unchanged.

    Args:
        search: the operators and the storage of parameters.
        decided: the plan.
        limit: bytes a device.
        optimizer: as `memory_timeline.optimizer_bytes` takes it.
    """
    plan = Plan(
        search.described.graph,
        search.described.devices,
        "",
        search.input_placement,
        decided.decisions,
        decided.batch_dims,
        dict(search.stored) if search.stored else None,
        search.hsdp,
        optimizer=optimizer,
    )
    return plan.unscheduled.peak <= limit


def limited(decided: Decisions, limit: float) -> Decisions:
    """A plan that was found without a limit, recorded as one within the limit."""
    assert decided.found is not None
    return decided._replace(found=replace(decided.found, limit=limit))


class _Fitting:
    def __init__(
        self,
        search: Search,
        memory_problem: MemoryProblem,
        limit: float,
        optimizer: OptimizerSetting,
        cause: str,
        solver: Solver,
    ) -> None:
        self.search, self.memory_problem, self.limit, self.optimizer = search, memory_problem, limit, optimizer
        self.cause, self.solver = cause, solver
        self.bound: float | None = None
        self.problem = memory_problem.cost_graph.problem

    def run(self) -> Decisions:
        target, refused = self.limit, None
        low, high = (0.0, self.limit)  # no states were found at `low`; a plan within `high` has too high a peak
        for _ in range(MOST_TRIES):
            try:
                solution = self.solver(replace(self.problem, limit=target))
            except PlanError as error:
                self.seldom(error)
                if target == self.limit or refused is not None:  # proving that nothing is within a limit takes long
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
        """Raise an error that is not about memory again: the marks contradict one another."""
        if getattr(error, "states", None) is None:
            self.solver(replace(self.problem, limit=None, usages=()))

    def least(self, error: PlanError | None) -> Decisions:
        """The plan of the least memory, if its peak is within the limit."""
        states, unproved = getattr(error, "states", None), self.bound is None
        if unproved:
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
            unproved and getattr(error, "least", 0.0) > self.limit
        )  # else the search counts less than the program holds
        raise self.refused(walked, "fits" if none else "was found that fits")

    def bisected(self, low: float) -> Solution:
        """The solution with the least limit: at `low`, or found by halving the range between `low` and a limit that
        is kept."""
        try:
            return self.solver(replace(self.problem, limit=low))
        except InfeasibleMemoryError as error:
            if error.states is not None:
                return Solution(error.states, cost := self.problem.cost(error.states), cost)
            best = self.solver(replace(self.problem, limit=None, usages=()))
        except PlanError:
            best = self.solver(replace(self.problem, limit=None, usages=()))
        high = self.memory_problem.peak(best.states)
        for _ in range(MOST_TRIES):
            if high - low <= NEAR * high:
                break
            middle = (low + high) / 2
            try:
                best = self.solver(replace(self.problem, limit=middle))
                high = min(middle, self.memory_problem.peak(best.states))
            except PlanError:
                low = middle
        return best

    def decided(self, solution: Solution) -> tuple[Decisions, MemoryTimeline]:
        """The decisions of a solution, and the memory timeline of its program."""
        search, memory_problem = self.search, self.memory_problem
        graph = with_recompute(
            search.described.graph, memory_problem.recomputed(solution.states), memory_problem.segments
        )
        ops = {op.name: op for op in graph.ops}
        bounded = solution if self.bound is None else replace(solution, bound=min(self.bound, solution.cost))
        made = search.decided(memory_problem.cost_graph, bounded, self.cause, proved=self.bound is not None)
        decisions: dict[str, Decision] = {n: replace(d, op=ops[n]) for n, d in made.decisions.items()}
        hsdp = search.hsdp if search.hsdp is not None else memory_problem.storage(solution.states)
        plan = Plan(
            graph,
            search.described.devices,
            "",
            search.input_placement,
            decisions,
            made.batch_dims,
            dict(search.stored) if search.stored else None,
            hsdp,
            optimizer=self.optimizer,
        )
        found = replace(made.found, limit=self.limit) if made.found is not None else None
        return made._replace(decisions=decisions, found=found, hsdp=hsdp), plan.unscheduled

    def refused(self, walked: MemoryTimeline, fits: str) -> TooLittleMemoryError:
        totals = walked.totals()
        over = sorted((t for t, total in enumerate(totals) if total > self.limit), key=lambda t: -totals[t])
        largest: dict[str, float] = {}
        for t in over:
            name = f"the {'forward' if t < walked.forward else 'backward'} of {walked.moments[t]}"
            largest.setdefault(name, totals[t])
        rows = [f"{name}: {format_bytes(total)}" for name, total in largest.items()]
        rows = rows[:3] + ([f"and {len(rows) - 3} more"] if len(rows) > 3 else [])
        kinds = ", ".join(f"{kind} {format_bytes(count)}" for kind, count in walked.kinds.items())
        legal = [f"memory={int(-(-walked.peak // 1))} ({format_bytes(walked.peak)}) or more", "more devices"]
        if self.search.hsdp is None and fits != "fits":  # not proved: such a plan may fit
            legal.insert(0, 'hsdp={"optimizer_level": "level3"} (--hsdp level3), which stores parameters in shards')
        results = sum(v.nbytes for v in self.search.described.graph.outputs if isinstance(v, Value))
        if results > self.limit / 10 and not self.search.input_placement.per_rank_batch:
            legal.insert(0, f"a model that returns its loss alone, not {format_bytes(results)} on every device")
        error = TooLittleMemoryError(
            f"no plan {fits} in {format_bytes(self.limit)} a device. The one that does with least holds more at "
            f"{len(over)} moments: {'; '.join(rows)}. At the first of these it holds {kinds}",
            legal=", or ".join(legal),
        )
        error.least, error.bound = walked.peak, self.bound
        return error
