"""What an operator's strategies cost in all within a limit of memory.

    aside(S)   = the best plan in which the operator has a strategy of S, memory not looked at
    within(S)  = aside(S) where that plan fits; else the cheapest plan with a strategy of S that does, in which what is
                 recomputed and how parameters are stored is chosen anew too

That is what the search does that keeps a limit (`dynamic`), with the operator's other strategies forbidden: costs and
memory are those of `energy`, `fitting` and `memory`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..graph import Graph
from .candidates import Strategy, strategy_of
from .decision import Decided, Decision
from .energy import Energy
from .exact import solve
from .fitting import CUT, TooLittleMemoryError, fit
from .memory import Timeline
from .plan import Plan
from .search import Search
from .storage import OptimizerParallel

__all__ = ["Priced", "Row", "Within", "as_given", "row_above"]


@dataclass(frozen=True)
class Row:
    """A moment at which a device would hold more than it may.

    Attributes:
        moment: the half of the step, and which operator is at work.
        held: bytes.
        limit: bytes.
    """

    moment: str
    held: float
    limit: float


def row_above(walked: Timeline, limit: float | None) -> Row | None:
    """The moment at which most is held, if that is above a limit."""
    totals = walked.totals()
    at = max(range(len(totals)), key=totals.__getitem__, default=None)
    if limit is None or at is None or totals[at] <= limit:
        return None
    return Row(f"the {'forward' if at < walked.forward else 'backward'} of {walked.moments[at]}", totals[at], limit)


def as_given(plan: Plan) -> tuple[Graph, OptimizerParallel | None]:
    """A plan's graph and its setting of optimizer parallel as they were given to the search: without what a search
    within a limit decides beside strategies. A user's own setting of the kind that such a search chooses is taken for
    the search's."""
    if plan.found is None or plan.found.limit is None:
        return plan.graph, plan.hsdp
    ops = tuple(replace(op, recompute=None) if op.recompute is not None and op.recompute.everywhere and
                not op.recompute.mp_comm and op.recompute.path == op.name else op for op in plan.graph.ops)
    chosen = plan.hsdp is not None and replace(plan.hsdp, whole=CUT.whole, kept=CUT.kept) == CUT
    return plan.graph.with_ops(ops), None if chosen else plan.hsdp


@dataclass(frozen=True)
class Priced:
    """Some strategies of the operator, within the limit.

    Attributes:
        strategy: which of them the best plan has.
        aside: seconds of the best plan with one of them, memory not looked at.
        over: of that plan, the moment at which it holds most, if that is above the limit.
        total: seconds of a plan that fits, the cheapest that was found; infinite: none does.
        bound: the search's lower bound of `total`: where `aside` fits, of plans that store parameters as given.
        refused: where none fits, why.
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
        search: the givens, without what a search within a limit decides (`as_given`).
        decisions: of the plan.
        free: the energy of `search`, without storage to be chosen.
    """

    def __init__(self, plan: Plan, name: str, search: Search, decisions: dict[str, Decision], free: Energy,
                 limit: float) -> None:
        self.plan, self.name, self.search, self.free, self.limit = plan, name, search, free, limit
        self.decisions = decisions

    @cached_property
    def cut(self) -> Energy:
        """The energy in which it is chosen how parameters are stored."""
        return self.search.energy(self.search.options([self.decisions]), [self.decisions], cut=CUT)

    def priced(self, strategies: Collection[Strategy]) -> Priced:
        """What plans cost in which the operator has one of some strategies.

        Raises:
            PlanError: nothing allows one of them, whatever the memory.
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

    def aside(self, strategies: Collection[Strategy]) -> Priced:
        """The same, memory not looked at: `total` is `aside`.

        Raises:
            PlanError: as `priced`.
        """
        made = self.only(self.free, strategies)
        solution = solve(made.problem)
        decided = self.search.decided(made, solution, "search")
        over = row_above(self.planned(decided).timeline, self.limit)
        return Priced(strategy_of(decided.decisions[self.name]), solution.cost, over, solution.cost, solution.bound)

    def only(self, made: Energy, strategies: Collection[Strategy]) -> Energy:
        """An energy in which the operator has one of some strategies."""
        node, options = made.operators[self.name], made.options[self.name]
        costs = list(made.problem.costs)
        costs[node] = np.where([option in strategies for option in options], costs[node], np.inf)
        return replace(made, problem=replace(made.problem, costs=tuple(costs)))

    def planned(self, decided: Decided) -> Plan:
        """A plan of what was decided, memory not looked at."""
        return replace(self.plan, graph=self.search.described.graph, decisions=decided.decisions,
                       carries=decided.carries, hsdp=self.search.hsdp, found=None)
