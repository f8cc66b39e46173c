"""The exact planner, dynamic_programming: the cheapest plan over all strategies of all operators at once.

    minimise the cost graph of `graph_problem` over all strategies of `search_space`,
    and those that semi_auto, the recursion and (with marks) propagation chose

With a memory limit:

1. Where the plan found without a limit and the recursion's both fit, the former is returned.
2. Otherwise the recursion also runs within the limit. In a network of more than `RECURSED` operators it runs only
   where case 4 just misses the limit: each of its levels is a problem as large as the search's own.
3. Where the plan found without a limit fits, the cheaper of that plan and the plan of case 2 is returned.
4. Otherwise the choice between saving and recomputing and the storage of parameters are searched too (`memory_fit`).
   The strategies of case 2 are among the options where they are known, and the cheaper of the two plans is returned.

Up to `RECURSED` operators no other planner's plan is therefore priced below the plan of this one. Above, within a
memory limit, the recursion's plan may be cheaper: by 0.01 % for Llama of 96 layers within 42 GB.

`SearchResult.bound` is a lower bound on the cost of every plan in the same cost graph. A plan whose cost equals the
bound is optimal under the cost graph's prices. In a large network the graph leaves out some of the uses that consumers
may share (`shared_values`): the search is repeated near its own plan, and a note says that the bound is of those tried.

`recursive_programming` chooses one digit of the rank at a time; this planner assigns all digits at once.

Example: ``Linear(16, 32), ReLU, Linear(32, 8)`` with a loss of 32 rows, on 8 devices h100x8. The plan of data_parallel
is priced at 90.7 us a step; the plan found here at 55.0 us, which is also its bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..partition.local_program import Decision, Decisions
from ..solver.problem import Solution, stopping
from ..solver.solve import solve
from .graph_problem import CostGraph
from .memory_fit import TooLittleMemoryError, fit, fits, limited
from .plan_search import SOME_SHARED, Search
from .planning_problem import PlanningProblem, planner
from .recursive_programming import recursion
from .semi_auto import semi_auto
from .sharding_propagation import sharding_propagation

__all__ = ["dynamic_programming"]


#: Most searches near the plan of the one before.
ROUNDS = 4

#: The largest network, in operators, for which the recursion is always run within a memory limit too.
RECURSED = 600

#: The largest least memory known, as a multiple of the limit, at which the recursion is run for a larger network. The
#: recursion takes as long as the search, and its leanest plan is seldom much leaner.
LEANER = 1.02


@planner("dynamic_programming", searches=True, fits_memory=True)
def dynamic_programming(problem: PlanningProblem) -> Decisions:
    """Decide every operator that no mark decides.

    Returns:
        The decisions, with cost, bound and notes in `found`.

    Raises:
        StrategyError, LayoutError, MissingRuleError: as `semi_auto`.
        PlanError: marks that no plan can keep, or no plan within the memory.
    """
    best: list[Decisions] = []
    with stopping(lambda found: found if isinstance(found, Decisions) else best[-1] if best else None):
        return _searched(problem, best)


def _searched(problem: PlanningProblem, best: list[Decisions]) -> Decisions:
    """The result of `dynamic_programming`.

    Args:
        best: receives plans on the way, each as good as the one before it or within the memory.
    """
    graph, memory, optimizer = problem.graph, problem.memory, problem.optimizer
    search = Search.of(problem).check()
    recursed = recursion(search)
    best.append(recursed)
    known = [semi_auto(problem).decisions, recursed.decisions]
    if any(op.mark is not None for op in graph.ops):
        known.append(sharding_propagation(problem).decisions)
    decided, fitting = _unlimited(search, known, lambda plan: memory is None or fits(search, plan, memory, optimizer))
    if memory is None:
        return decided
    decided = limited(decided, memory)
    if fitting:
        best.append(decided)
    if fitting and fits(search, recursed, memory, optimizer):
        return decided
    within = None
    if len(graph.ops) <= RECURSED:
        within = _tried(lambda: recursion(search, memory, recursed))
    if fitting:
        return _cheaper(decided, within)
    if isinstance(within, Decisions):
        best.append(within)
        known.append(within.decisions)
    made = search.cost_graph(search.options(known), known, cut=problem.cut)
    found = _tried(lambda: fit(search, made, memory, optimizer))
    if within is None and isinstance(found, TooLittleMemoryError) and found.least <= LEANER * memory:
        within = _tried(lambda: recursion(search, memory, recursed))
    return _cheaper(found, within)


def _unlimited(
    search: Search, known: list[dict[str, Decision]], fits: Callable[[Decisions], bool]
) -> tuple[Decisions, bool]:
    """The cheapest plan without a limit of memory, and True where it fits into the memory.

    Where too many uses may be shared to try them all, the search goes on near a plan that it has proved best of those
    tried, until nothing is cheaper within the memory.

    Args:
        search: the search.
        known: plans whose strategies are among the options; the result is added.
        fits: True for a plan that fits.
    """
    options, best, fitting = search.options(known), None, False
    for _ in range(ROUNDS):
        made, before = search.cost_graph(options, known), best

        def cheaper(found: object, made: CostGraph = made, before: Decisions | None = before) -> Decisions | None:
            plans = [before] if before is not None else []
            plans += [search.decided(made, found, "search")] if isinstance(found, Solution) else []
            return min(plans, key=_cost, default=None)

        with stopping(cheaper):
            best = cheaper(solve(made.problem))
        assert best is not None
        if best is before:
            break
        fitting = fits(best)
        if before is not None and not fitting:
            return before, True
        known.append(best.decisions)
        assert best.found is not None and best.found.bound is not None
        proved = best.found.bound >= best.found.cost * (1 - 1e-9)  # the others have taken all of their time
        if not made.limited or not fitting or not proved:
            break
    assert best is not None
    return best, fitting


def _cost(decided: Decisions) -> float:
    assert decided.found is not None
    return decided.found.cost


def _tried(plan: Callable[[], Decisions]) -> Decisions | TooLittleMemoryError:
    try:
        return plan()
    except TooLittleMemoryError as error:
        return error


def _cheaper(found: Decisions | TooLittleMemoryError, other: Decisions | TooLittleMemoryError | None) -> Decisions:
    """The cheaper of the search's plan and the recursion's plan within the same limit.

    The recursion's can be cheaper: a search ends near its bound, and searches below the limit where the peak of its
    plans would be above the limit. A plan below the search's bound is outside of what was searched: then nothing is
    proved.

    Raises:
        TooLittleMemoryError: neither fits. The error names the least memory of both.
    """
    if not isinstance(other, Decisions):
        if isinstance(found, Decisions):
            return found
        nearest = found if other is None else min(found, other, key=lambda error: error.least)
        raise nearest
    assert other.found is not None
    report = found.found if isinstance(found, Decisions) else None
    if isinstance(found, Decisions) and report is not None and report.cost <= other.found.cost:
        return found
    bound = found.bound if isinstance(found, TooLittleMemoryError) else None if report is None else report.bound
    cost = other.found.cost
    if bound is not None and cost < bound * (1 - 1e-9):
        bound = None
    some = (SOME_SHARED,) if report is not None and SOME_SHARED in report.notes and bound is not None else ()
    note = "of the recursion over the device count: the search found nothing as cheap within the limit"
    return other._replace(
        found=replace(other.found, bound=None if bound is None else min(bound, cost), notes=(note, *some))
    )
