"""Plans within a limit of memory around one operator of a plan: the best one with some of its strategies.

    aside(S)   = the best plan in which the operator has a strategy of S, without the limit
    within(S)  = aside(S) where that plan fits; else the cheapest fitting plan with a strategy of S, with
                 recomputation and storage of parameters chosen anew

This is the search that keeps a limit (`memory_fit`), with the operator's other strategies forbidden. Costs are those of
the cost graph, memory is that of `cost/memory_timeline.py`.

Example: a limit of 10 GB, and an operator cut along its columns. The best plan with it cut along its rows takes 1.2 ms
and 12 GB: aside = 1.2 ms. With recomputation it fits and takes 1.3 ms: within = 1.3 ms.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..cost.memory_timeline import MemoryTimeline
from ..graph import Graph
from ..partition.local_program import Decision, Decisions
from ..partition.parameter_sharding import OptimizerParallel
from ..sharded_plan import Plan
from ..solver.solve import solve
from .graph_problem import CostGraph
from .memory_fit import TooLittleMemoryError, fit
from .plan_search import Search
from .planning_problem import CUT
from .search_space import Strategy, strategy_of

__all__ = ["PricedStrategies", "Row", "Within", "row_above", "without_search"]


@dataclass(frozen=True)
class Row:
    """A moment at which a device would hold more than its limit.

    Attributes:
        moment: the half of the step, and the operator that runs.
        allocated: bytes at that moment.
        limit: bytes.
    """

    moment: str
    allocated: float
    limit: float


def row_above(walked: MemoryTimeline, limit: float | None) -> Row | None:
    """The moment at which most is held; None where that keeps the limit.

    Args:
        walked: the timeline of a plan.
        limit: bytes; None: no limit.
    """
    totals = walked.totals()
    at = max(range(len(totals)), key=totals.__getitem__, default=None)
    if limit is None or at is None or totals[at] <= limit:
        return None
    return Row(f"the {'forward' if at < walked.forward else 'backward'} of {walked.moments[at]}", totals[at], limit)


def without_search(plan: Plan) -> tuple[Graph, OptimizerParallel | None]:
    """A plan's graph and its setting of ZeRO/FSDP sharding (optimizer parallel), as they were given to the search.

    The decisions of a search within a limit, apart from strategies, are removed. A user's own setting that equals one
    such a search would choose is taken for the search's.
    """
    if plan.found is None or plan.found.limit is None:
        return plan.graph, plan.hsdp
    ops = tuple(
        replace(op, recompute=None)
        if op.recompute is not None
        and op.recompute.everywhere
        and not op.recompute.mp_comm
        and op.recompute.path == op.name
        else op
        for op in plan.graph.ops
    )
    chosen = plan.hsdp is not None and replace(plan.hsdp, whole=CUT.whole, kept=CUT.kept) == CUT
    return plan.graph.with_ops(ops), None if chosen else plan.hsdp


@dataclass(frozen=True)
class PricedStrategies:
    """Prices of some strategies of the operator, within the limit.

    Attributes:
        strategy: the one in the best plan.
        aside: seconds of the best plan with one of them, without the limit.
        over: the moment at which that plan holds most, if above the limit.
        total: seconds of the cheapest fitting plan that was found; infinite: none fits.
        bound: the search's lower bound of `total`: where `aside` fits, over plans that store parameters as given.
        refused: the reason where none fits.
    """

    strategy: Strategy
    aside: float
    over: Row | None
    total: float
    bound: float
    refused: str = ""


class Within:
    """The search within a limit, around one operator of a plan.

    Args:
        name: the operator.
        search: the search's inputs, without the decisions of a search within a limit (`without_search`).
        decisions: of the plan.
        free: the cost graph of `search`, in which the storage of parameters is fixed.
        limit: bytes.
    """

    def __init__(
        self, plan: Plan, name: str, search: Search, decisions: dict[str, Decision], free: CostGraph, limit: float
    ) -> None:
        self.plan, self.name, self.search, self.free, self.limit = plan, name, search, free, limit
        self.decisions = decisions

    @cached_property
    def cut(self) -> CostGraph:
        """The cost graph in which the storage of parameters is chosen too."""
        return self.search.cost_graph(self.search.options([self.decisions]), [self.decisions], cut=CUT)

    def priced(self, strategies: Collection[Strategy]) -> PricedStrategies:
        """Prices of plans in which the operator has one of `strategies`.

        Raises:
            PlanError: no plan allows one of them, for any memory.
        """
        aside = self.aside(strategies)
        if aside.over is None:
            return aside
        try:
            decided = fit(self.search, self.only(self.cut, strategies), self.limit, self.plan.optimizer)
        except TooLittleMemoryError as error:
            return replace(aside, total=np.inf, bound=np.inf, refused=error.message)
        found = decided.found
        assert found is not None and found.bound is not None
        return replace(aside, strategy=strategy_of(decided.decisions[self.name]), total=found.cost, bound=found.bound)

    def aside(self, strategies: Collection[Strategy]) -> PricedStrategies:
        """The same without the limit: `total` equals `aside`.

        Raises:
            PlanError: as `priced`.
        """
        made = self.only(self.free, strategies)
        solution = solve(made.problem)
        decided = self.search.decided(made, solution, "search")
        over = row_above(self.planned(decided).timeline, self.limit)
        return PricedStrategies(
            strategy_of(decided.decisions[self.name]), solution.cost, over, solution.cost, solution.bound
        )

    def only(self, made: CostGraph, strategies: Collection[Strategy]) -> CostGraph:
        """A cost graph in which the operator has one of `strategies`."""
        node, options = made.operators[self.name], made.options[self.name]
        costs = list(made.problem.costs)
        costs[node] = np.where([option in strategies for option in options], costs[node], np.inf)
        return replace(made, problem=replace(made.problem, costs=tuple(costs)))

    def planned(self, decided: Decisions) -> Plan:
        """The plan of the decisions, without the limit."""
        return replace(
            self.plan,
            graph=self.search.described.graph,
            decisions=decided.decisions,
            batch_dims=decided.batch_dims,
            hsdp=self.search.hsdp,
            found=None,
        )
