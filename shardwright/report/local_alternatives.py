"""The alternatives of one operator while all other operators keep their strategies: prices without a search.

    alone(s) = cost of the plan with strategy s of the operator - cost of the plan

The cost graph has one strategy for each other operator, so it takes a second for a plan of 2,000 operators. `explained`
of `operator_explanation` lets the others choose anew, which is a search.

Example: the plan costs 10 ms. With the operator cut along its rows, and all others as they are, it costs 10.4 ms:
alone = 0.4 ms.
"""

from __future__ import annotations

import numpy as np

from ..identity_tables import IdentityMap
from ..operator_explanation import Alternative, SearchesOfPlan, _Neighbourhood
from ..pipeline.pipeline_plan import PipelinePlan
from ..planners.graph_problem import CostGraph
from ..sharded_plan import Plan

__all__ = ["local_alternatives"]


def local_alternatives(
    plan: Plan | PipelinePlan, name: str, count: int = 3, searches: IdentityMap[Plan, SearchesOfPlan] | None = None
) -> tuple[Alternative, ...]:
    """The alternatives of an operator that cost least where no other operator changes. Memory is not looked at.

    Args:
        plan: the plan; of a pipeline, the operator's stage counts, with one micro-batch.
        name: as `Plan.operator` takes it.
        count: the number of alternatives, one for each way to cut.
        searches: as `explained` takes them.

    Returns:
        The cheapest first, at most `count`: `alone` and `more` are the additional seconds, `total` the whole cost.

    Raises:
        PlanError: there is no such operator, or several.
    """
    if isinstance(plan, PipelinePlan):
        return local_alternatives(plan.stage_of(name).plan, name, count, searches)
    name = plan.operator(name).name
    if plan.own is not None:
        return ()
    around = _Alone(SearchesOfPlan.of(plan, searches), name, None)
    return () if around.missing() is not None else around.cheapest(count)


class _Alone(_Neighbourhood):
    """The search's problem around one operator, in which the others have one strategy each."""

    def _cost_graph(self, searches: SearchesOfPlan) -> CostGraph:
        options = self.search.options([self.decisions])
        unchanged = {
            name: (choice,) for name, choice in self.chosen.items() if name != self.name and choice in options[name]
        }
        return self.search.cost_graph(options | unchanged, [self.decisions])

    def cheapest(self, count: int) -> tuple[Alternative, ...]:
        """The alternatives that cost least, one for each way to cut."""
        options = self.made.options[self.name]
        whole = [self.problem.cost(self.made.states(self.chosen | {self.name: strategy})) for strategy in options]
        forms = self._forms(options, np.array(whole))
        forms.pop(self._form(self.chosen[self.name]), None)
        firsts = [states[0] for states in forms.values()][:count]
        return tuple(self._alternative(options[first], float(whole[first]), self.cost) for first in firsts)
