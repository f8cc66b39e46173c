"""dynamic_programming: the exact search.

    minimise the energy of `graph_problem` over all strategies of `search_space` and those that the quicker planners chose

With a limit of memory, what is best without one is taken where it fits. Otherwise what is recomputed and how
parameters are stored is searched too (`memory_fit`), and the recursion's strategies within the limit are among the
others. The recursion's plan is taken where it is cheaper still: no other planner's is ever priced below this one's.
But of networks above `RECURSED` operators the recursion within a limit is not made: each of its levels is a problem
as large as the search's.

The plan comes with the least price that any other of them has in this energy (`SearchResult.bound`); where its own is that,
it is the best of them, as the energy prices plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..errors import PlanError
from ..graph import Graph
from ..layout import Layout
from ..partition.local_program import Decisions, InputPlacement
from ..partition.parameter_sharding import OptimizerParallel
from ..solver.solve import solve
from .graph_problem import Search
from .memory_fit import CUT, TooLittleMemoryError, fit, fits, limited
from .propagation import sharding_propagation
from .recursive import recursive_programming
from .semi_auto import semi_auto

__all__ = ["dynamic_programming"]


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
