"""The part that all searching planners share: operators, decisions of marks, and the way from a solution to a plan.

`cheapest_of_modes` compares the plan of a search with those of the modes that search less; `plan_so_far` is the plan of
a search that was stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..cost.cost_model import CostModel
from ..errors import PlanError, ShardwrightError
from ..graph import Op
from ..layout import Digits, Layout
from ..partition.local_program import TAKEN, Decision, Decisions, InputPlacement, SearchResult, find_batch_dims
from ..partition.parameter_sharding import OptimizerParallel
from ..partition.partitioner import wanted_in_two
from ..sharded_plan import Plan
from ..solver.problem import Solution
from .graph_problem import CostGraph, cost_graph
from .planning_problem import PLANNERS, PlanningProblem
from .search_space import EdgeCosts, OperatorTable, Strategy, atoms_of, options_of, strategy_of
from .semi_auto import marked_decision, marked_output

__all__ = ["Search", "cheapest_of_modes", "plan_so_far"]


@dataclass(frozen=True)
class Search:
    """A planning problem with the rule of every operator, shared by the searching planners.

    Args:
        problem: the problem.
        described: its operators.
    """

    problem: PlanningProblem
    described: OperatorTable

    @classmethod
    def of(cls, problem: PlanningProblem) -> Search:
        """The search of a problem.

        Raises:
            MissingRuleError: an operator without a rule.
        """
        table = OperatorTable.of(problem.graph, problem.devices, problem.on_missing_rule, problem.uneven)
        return cls(problem, table)

    @property
    def input_placement(self) -> InputPlacement:
        """The layouts of the inputs, and the handling of the results."""
        return self.problem.input_placement

    @property
    def costs(self) -> CostModel:
        """Prices of a step."""
        return self.problem.costs

    @property
    def stored(self) -> Mapping[str, Layout] | None:
        """Layouts of parameters and buffers that are settled already."""
        return self.problem.stored

    @property
    def hsdp(self) -> OptimizerParallel | None:
        """ZeRO/FSDP sharding of the other parameters."""
        return self.problem.hsdp

    def check(self) -> Search:
        """The search itself, where there is anything to search.

        Raises:
            PlanError: nothing of the model can be cut for so many devices, or two marks ask for a parameter in
                different layouts.
        """
        own = {v.name for n, v in self.described.graph.parameters.items() if n not in (self.stored or {})}
        layouts: dict[str, tuple[Layout, Op]] = {}
        for op in self.described.graph.ops:
            for i, value in enumerate(op.inputs if op.name in self.fixed else ()):
                mine = self.fixed[op.name].input_layout(i), op
                if value.name in own and layouts.setdefault(value.name, mine)[0] != mine[0]:
                    raise wanted_in_two(value, layouts[value.name], mine)
        devices = self.described.devices
        factors = [f for _, bound, _ in self.described.rules.values() for f in bound.factors if f.splittable]
        sizes = {f.size for f in factors}
        if (
            devices > 1
            and not self.fixed
            and not any(f.pads for f in factors)
            and all(math.gcd(size, devices) == 1 for size in sizes)
        ):
            counts = [n for n in range(devices - 1, 1, -1) if any(math.gcd(size, n) > 1 for size in sizes)]
            raise PlanError(
                f"no dim that may be cut divides by {devices} or a factor of it: all {devices} devices would "
                "repeat the same work",
                strategy=f"devices={devices}",
                legal=f"{', '.join(map(str, counts[:3]))} devices" if counts else "one device, or uneven=True",
            )
        return self

    @cached_property
    def batch_dims(self) -> dict[str, int]:
        """Value name -> the dim that carries the batch."""
        return find_batch_dims(self.described.graph, {n: bound for n, (_, bound, _) in self.described.rules.items()})

    @cached_property
    def fixed(self) -> dict[str, Decision]:
        """The decisions of operators that marks settle.

        Raises:
            StrategyError, LayoutError: a mark that the operator cannot follow.
        """
        out = {}
        for op in self.described.graph.ops:
            if op.mark is not None and op.mark.in_strategy is not None:
                rule, bound, note = self.described.rules[op.name]
                decision = marked_decision(op, rule, bound, self.described.devices, note)
                out[op.name] = replace(decision, open=(), out=self.outs.get(op.name))
        return out

    @cached_property
    def outs(self) -> dict[str, tuple[Layout, ...]]:
        """By operator, the output layouts that marks settle."""
        out, devices = {}, self.described.devices
        for op in self.described.graph.ops:
            if op.mark is not None and op.mark.out_strategy is not None:
                rule, bound, _ = self.described.rules[op.name]
                own = None if op.mark.in_strategy is None else marked_decision(op, rule, bound, devices).assignment
                out[op.name] = marked_output(op, bound, devices, own)
        return out

    @cached_property
    def atoms(self) -> Digits:
        """The digits of the rank that the search assigns to factors."""
        return atoms_of(self.described.devices, [level.size for level in self.costs.cluster.levels])

    @cached_property
    def deliveries(self) -> EdgeCosts:
        """Prices that all cost graphs of the search share."""
        return self.problem.deliveries or EdgeCosts(self.costs)

    def options(
        self, known: Iterable[Mapping[str, Decision]] = (), atoms: Digits | None = None
    ) -> dict[str, tuple[Strategy, ...]]:
        """The strategies of every operator, those of known plans among them.

        A known plan's strategy of one operator is an option of every operator that is alike: equal layers then have
        equal options, also where a plan decides them differently.

        Args:
            known: plans by operator.
            atoms: the digits to assign; None: `self.atoms`.
        """
        strategies: dict[Hashable, dict[Strategy, Decision]] = {}
        for plan in known:
            for name, decision in plan.items():
                strategies.setdefault(self._kind(name), {}).setdefault(strategy_of(decision), decision)
        most = max(map(len, strategies.values()), default=0)
        several = [
            {
                op.name: tuple(mine.values())[n]
                for op in self.described.graph.ops
                if n < len(mine := strategies.get(self._kind(op.name), {}))
            }
            for n in range(most)
        ]
        return options_of(self.described, self.atoms if atoms is None else atoms, self.fixed, self.outs, several)

    def _kind(self, name: str) -> Hashable:
        """The key that operators share which may have the same strategies."""
        return self.described.kinds[name], self.outs.get(name), name in self.fixed

    def cost_graph(
        self,
        options: Mapping[str, tuple[Strategy, ...]],
        known: Iterable[Mapping[str, Decision]] = (),
        cut: OptimizerParallel | None = None,
    ) -> CostGraph:
        """The cost graph over the options. Its minimum is no dearer than a known plan whose strategies are among the
        options.

        Args:
            options: by operator, its strategies.
            known: plans whose shared uses are among those that may be served once.
            cut: a further storage of each parameter whose storage nothing settles.
        """
        plans = [{name: strategy_of(decision) for name, decision in plan.items()} for plan in known]
        return cost_graph(
            self.described,
            options,
            self.input_placement,
            self.batch_dims,
            self.costs,
            stored=self.stored,
            hsdp=self.hsdp,
            cut=cut,
            known=plans,
            deliveries=self.deliveries,
        )

    def decided(self, made: CostGraph, solution: Solution, cause: str, proved: bool = True) -> Decisions:
        """A solution as a planner's result.

        Args:
            made: the cost graph.
            solution: its solution.
            cause: the cause of the decisions that no mark settles.
            proved: False drops the solution's bound.
        """
        decisions = made.decisions(solution.states, self.fixed, cause)
        count = sum(map(len, made.options.values()))
        found = SearchResult(solution.cost, solution.bound if proved else None, len(decisions), count, solution.notes)
        return Decisions(decisions, self.batch_dims, found)


def cheapest_of_modes(
    result: Decisions | None,
    problem: PlanningProblem,
    plan_of: Callable[[Decisions], Plan],
    modes: Sequence[str] = ("semi_auto", "sharding_propagation"),
) -> tuple[Decisions | None, Plan | None]:
    """The cheapest of a search's plan and the plans of the modes that search less, and its decisions.

    Args:
        result: of the search; None: it found no plan that fits in the memory.
        plan_of: the plan of decisions.
        modes: those that search less.

    Returns:
        None, None: no plan fits.
    """
    best, plan, memory = result, None if result is None else plan_of(result), problem.memory
    for mode in modes:
        try:
            other = PLANNERS[mode](replace(problem, memory=None))
            made = plan_of(other)
        except ShardwrightError:  # this mode has no plan of these marks
            continue
        dearer = plan is not None and made.cost >= plan.cost * (1 - 1e-9)
        if dearer or (memory is not None and made.unscheduled.peak > memory):
            continue
        text = f"{TAKEN}{mode}, {made.cost * 1e6:.4g} µs a step: the search found "
        text += f"nothing below {plan.cost * 1e6:.4g} µs" if plan is not None else "none that fits in the memory"
        known = SearchResult(made.cost, None, len(other.decisions), 0) if best is None else best.found
        assert known is not None
        found = replace(
            known,
            cost=made.cost,
            bound=None if known.bound is None else min(known.bound, made.cost),
            notes=(*(note for note in known.notes if not note.startswith(TAKEN)), text),
            limit=memory,
        )
        best = other._replace(found=found)
        plan = plan_of(best)
    return best, plan


def plan_so_far(found: Decisions | None, problem: PlanningProblem, plan_of: Callable[[Decisions], Plan]) -> Plan | None:
    """The best plan of a search that was stopped; None: none that fits in the memory."""
    if found is not None and problem.memory is not None and plan_of(found).unscheduled.peak > problem.memory:
        found = None
    if found is not None and found.found is not None:
        notes = (*found.found.notes, "stopped by Ctrl-C: the best plan until then")
        found = found._replace(found=replace(found.found, notes=notes, limit=problem.memory))
    return cheapest_of_modes(found, problem, plan_of, ("semi_auto",))[1]
