"""Searches for a plan: the part that all searching planners share, the storage of parameters that is fastest in time,
and a plan reused at other sizes.

1. `Search`: operators, decisions of marks, and the way from a solution to a plan. `cheapest_of_modes` compares the plan
   of a search with those of the modes that search less; `plan_so_far` is the plan of a search that was stopped.

2. The storage of parameters, chosen by the step in time (`fastest_storage`): ``hsdp(optimizer_level="auto")``. A search
   compares plans by the sum of their seconds, of which bounds can be proved. Whether parameters are stored in parts
   shows in that sum as gathers and scatters alone; in a step they travel beside computation, and their sums may be
   waited for less than one all-reduce of all gradients. So the storages of one set of strategies are compared by
   `Price.elapsed`, the step with the plan's own schedule of communication:

       whole       each parameter as its operators use it
       level1      in parts, the gathered weights kept from the forward to the backward
       level3      in parts, gathered again in the backward

   in parts over all replicas, or over those within a unit of each level of links. The fastest one that fits into memory
   is taken. Example: a GPT with 8 blocks of width 2048 on two hosts of eight H100, a batch of 32 x 1024 tokens. By the
   sums whole parameters take 15.4 ms and parts on all devices 17.5 ms; in time 10.7 and 10.4 ms, and parts on each host
   10.2.

3. A plan reused at other sizes of the model's inputs (`at_other_sizes`): the same operators with the same strategies. A
   new size needs no search of its own where each cut of the earlier plan divides it as it divided the old one:

       gcd(old size, devices) = gcd(new size, devices)      for every dim of every value that is not empty

   On 4 devices, after a plan for a batch of 8 rows:

       16 rows     gcd(8, 4) = gcd(16, 4) = 4: the plan is reused
       6 rows      gcd(6, 4) = 2: a new search, because 4 does not divide 6

   A batch of 8 after one of 6 is searched anew too: the batch can be cut further than before. So is an empty batch,
   which has no parts, and a model in which other parameters are tied than before. A bound that a search has proved
   holds for its own sizes alone; the reused plan has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

from ..cluster import Cluster, format_bytes
from ..cost.cost_model import CostModel
from ..errors import PlanError, SettingError, ShardwrightError
from ..graph import Form, Graph, Op, changed, form_of
from ..identity_tables import IdentityCache
from ..layout import Digits, Layout
from ..partition.local_program import (
    TAKEN,
    Decision,
    Decisions,
    InputPlacement,
    SearchResult,
    descriptions,
    find_batch_dims,
)
from ..partition.parameter_sharding import OptimizerParallel
from ..partition.partitioner import wanted_in_two
from ..rules import Assignment, Bound
from ..sharded_plan import Plan
from ..solver.problem import Solution
from .graph_problem import CostGraph, cost_graph
from .planning_problem import PLANNERS, PlanningProblem
from .search_space import EdgeCosts, OperatorTable, Strategy, options_of, prime_axes, strategy_of
from .semi_auto import marked_decision, marked_output

__all__ = [
    "SOME_SHARED",
    "Search",
    "at_other_sizes",
    "cheapest_of_modes",
    "choose_storage",
    "fastest_storage",
    "plan_so_far",
    "storages",
]

P = TypeVar("P")

#: The note of a bound in whose cost graph some uses are left out.
SOME_SHARED = (
    "not every redistribution that some consumers of a value may share was tried: the bound is of those that were"
)

# -- the search


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
        unstored = {v.name for n, v in self.described.graph.parameters.items() if n not in (self.stored or {})}
        layouts: dict[str, tuple[Layout, Op]] = {}
        for op in self.described.graph.ops:
            for i, value in enumerate(op.inputs if op.name in self.fixed else ()):
                mine = self.fixed[op.name].input_layout(i), op
                if value.name in unstored and layouts.setdefault(value.name, mine)[0] != mine[0]:
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
                out[op.name] = replace(decision, partial=(), out=self.outs.get(op.name))
        return out

    @cached_property
    def outs(self) -> dict[str, tuple[Layout, ...]]:
        """By operator, the output layouts that marks settle."""
        out, devices = {}, self.described.devices
        for op in self.described.graph.ops:
            if op.mark is not None and op.mark.out_strategy is not None:
                rule, bound, _ = self.described.rules[op.name]
                assignment = (
                    None if op.mark.in_strategy is None else marked_decision(op, rule, bound, devices).assignment
                )
                out[op.name] = marked_output(op, bound, devices, assignment)
        return out

    @cached_property
    def axes(self) -> Digits:
        """The digits of the rank that the search assigns to factors."""
        return prime_axes(self.described.devices, [level.size for level in self.costs.cluster.levels])

    @cached_property
    def deliveries(self) -> EdgeCosts:
        """Prices that all cost graphs of the search share."""
        return self.problem.deliveries or EdgeCosts(self.costs)

    def options(
        self, known: Iterable[Mapping[str, Decision]] = (), axes: Digits | None = None
    ) -> dict[str, tuple[Strategy, ...]]:
        """The strategies of every operator, those of known plans among them.

        A known plan's strategy of one operator is an option of every operator that is alike: equal layers then have
        equal options, also where a plan decides them differently.

        Args:
            known: plans by operator.
            axes: the digits to assign; None: `self.axes`.
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
        return options_of(self.described, self.axes if axes is None else axes, self.fixed, self.outs, several)

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
            known: plans near which shared uses are tried, where there are too many to try all.
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
        notes = (*solution.notes, SOME_SHARED) if proved and made.limited else solution.notes
        found = SearchResult(solution.cost, solution.bound if proved else None, len(decisions), count, notes)
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
        None, None: no plan fits. A bound that the search proved of its own plans stays where the plan of a mode is not
        below it; a plan below it is outside of what was searched, where nothing is proved: then there is no bound.
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
        text = f"{TAKEN}{mode}, {made.cost * 1e6:.4g} us a step: the search found "
        text += f"nothing below {plan.cost * 1e6:.4g} us" if plan is not None else "none that fits in the memory"
        known = SearchResult(made.cost, None, len(other.decisions), 0) if best is None else best.found
        assert known is not None
        bound = known.bound
        if bound is not None and made.cost < bound * (1 - 1e-9):
            text += f", and proved {bound * 1e6:.4g} us of its own plans alone: nothing is proved of others"
            bound = None
        found = replace(
            known,
            cost=made.cost,
            bound=None if bound is None else min(bound, made.cost),
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


# -- storage by the step in time


def storages(
    setting: OptimizerParallel,
    cluster: Cluster,
    devices: int,
    settled: bool,
    levels: Sequence[str] = ("level1", "level3"),
) -> Iterator[OptimizerParallel | None]:
    """The storages to compare; None is whole.

    Args:
        setting: the user's setting; its level is "auto".
        cluster: the links.
        devices: the number of devices.
        settled: True where the layouts of storage are fixed already.
        levels: those to compare; in a pipeline also level2, whose gradients are in parts after each micro-batch.
    """
    sizes, inside = [setting.shard_size], 1
    if setting.shard_size == -1 and not settled:
        for level in cluster.levels:
            inside *= level.size
            if 1 < inside < devices:
                sizes.append(inside)
    if not settled:
        yield None
    for level_of in levels:
        for size in sizes:
            yield replace(setting, shard_size=size, optimizer_level=level_of)


def choose_storage(
    of: Callable[[OptimizerParallel | None], P],
    storages: Iterable[OptimizerParallel | None],
    seconds: Callable[[P], float],
    peak: Callable[[P], float],
    memory: float | None,
) -> tuple[P, OptimizerParallel | None, str, int]:
    """The plan of the storage with the fastest step that fits into memory, that storage, a note of all that were
    compared, and their number.

    Args:
        of: storage -> the plan.
        storages: the storages.
        seconds: plan -> seconds of a step in time.
        peak: plan -> the most bytes that a device holds.
        memory: bytes a device; None: no limit.

    Raises:
        PlanError: no storage fits.
    """
    tried: list[tuple[float, P, OptimizerParallel | None]] = []
    refused: list[tuple[float, str]] = []
    for storage in storages:
        try:
            plan = of(storage)
        except SettingError:  # a number of replicas that does not divide those of a parameter
            continue
        if memory is not None and (needs := peak(plan)) > memory:
            refused.append((needs, f"{_storage_text(storage)} needs {format_bytes(needs)}"))
            continue
        tried.append((seconds(plan), plan, storage))
    if not tried:
        least = min(refused)[0]
        raise PlanError(
            f"no storage of the parameters fits in {format_bytes(memory or 0.0)} a device: "
            + "; ".join(text for _, text in refused),
            legal=f"memory={int(-(-least // 1))} ({format_bytes(least)}) or more, or more devices",
        )
    ordered = sorted(tried, key=lambda entry: entry[0])
    takes, best, storage = ordered[0]
    alternatives = [f"{_storage_text(other)} {more * 1e3:.3g} ms" for more, _, other in ordered[1:]]
    alternatives += [text for _, text in refused]
    note = (
        f"parameters are stored {_storage_text(storage)}: a step takes {takes * 1e3:.3g} ms with messages beside "
        f"computation ({'; '.join(alternatives)})"
    )
    return best, storage, note, len(tried) + len(refused)


def fastest_storage(
    of: Callable[[OptimizerParallel | None], Plan],
    storages: Iterable[OptimizerParallel | None],
    searched: OptimizerParallel | None,
    memory: float | None,
) -> Plan:
    """The plan of the storage with the fastest step that fits into memory.

    Args:
        of: storage -> the plan.
        storages: the storages.
        searched: the storage under which the strategies were searched, if they were: a bound was proved for it alone.
        memory: bytes a device; None: no limit.

    Raises:
        PlanError: no storage fits.
    """

    def limited(storage: OptimizerParallel | None) -> Plan:
        plan = of(storage)
        found = plan.found or SearchResult(plan.cost, None, len(plan.decisions), 0)
        return plan if memory is None else replace(plan, found=replace(found, limit=memory))

    best, storage, note, compared = choose_storage(
        limited, storages, lambda plan: plan.price.elapsed, lambda plan: plan.unscheduled.peak, memory
    )
    found = best.found or SearchResult(best.cost, None, len(best.decisions), 0)
    bound = found.bound if storage == searched else None
    counted = found.strategies or compared
    report = replace(found, cost=best.cost, bound=bound, strategies=counted, notes=(*found.notes, note), limit=memory)
    return replace(best, found=report)


def _storage_text(storage: OptimizerParallel | None) -> str:
    if storage is None:
        return "whole"
    over = "" if storage.shard_size == -1 else f" over {storage.shard_size} replicas"
    return f"by {storage.optimizer_level}{over}"


# -- a plan at other sizes


def at_other_sizes(
    plan: Plan, graph: Graph, devices: int, *, on_missing_rule: str = "error", uneven: bool = False
) -> Decisions | None:
    """The strategies of a plan on the graph of the same model at other sizes.

    Args:
        plan: the earlier plan.
        graph: the captured program at the other sizes.
        devices: the number of devices.
        on_missing_rule, uneven: the settings that the planner was given.

    Returns:
        The decisions; None where the plan does not fit.
    """
    if plan.devices != devices or len(plan.graph.ops) != len(graph.ops):
        return None
    alike: dict[tuple[Form, Form], bool] = {}  # equal layers have operators of one form
    named_alike = plan.graph.parameters.keys() == graph.parameters.keys()
    for mine, theirs in zip(plan.graph.ops, graph.ops):
        if (mine.name, mine.target, mine.mark) != (theirs.name, theirs.target, theirs.mark):
            return None
        same_inputs = named_alike and [v.name for v in mine.inputs] == [v.name for v in theirs.inputs]
        if not same_inputs and _parameters(plan.graph, mine) != _parameters(graph, theirs):
            return None
        forms = form_of(mine), form_of(theirs)
        are_alike = alike.get(forms)
        if are_alike is None:
            are_alike = alike[forms] = _alike(mine, theirs, devices)
        if not are_alike:
            return None
    found = plan.found
    if found is not None:
        sizes = ", ".join(str(list(v.shape)) for v in plan.graph.inputs)
        note = f"strategies are those of the plan for inputs of {sizes}: nothing was searched"
        found = replace(found, bound=None, notes=(*found.notes, note) if note not in found.notes else found.notes)
    decisions: dict[str, Decision] = {}
    once = IdentityCache().once  # equal layers share their bound rules
    for op, (rule, bound, _) in zip(graph.ops, descriptions(graph.ops, on_missing_rule, devices, uneven)):
        earlier = plan.decisions[op.name]
        digits = earlier.assignment.digits
        assignment = once(digits, (earlier.bound, bound), partial(_onto, earlier, bound, devices))
        if assignment is None:
            return None
        if op.recompute != earlier.op.recompute:
            op = changed(op, recompute=earlier.op.recompute)
        decisions[op.name] = changed(earlier, op=op, rule=rule, bound=bound, assignment=assignment)
    return Decisions(decisions, plan.batch_dims, found, plan.hsdp)


def _parameters(graph: Graph, op: Op) -> list[str]:
    """The names of the parameters that an operator reads."""
    return [v.name for v in op.inputs if v.name in graph.parameters]


def _onto(earlier: Decision, bound: Bound, devices: int) -> Assignment | None:
    """The assignment of an operator at other sizes; None where the two bindings differ in more than the sizes of
    factors, or the cuts do not fit. A view of a dim of one row, for instance, has fewer factors."""
    mine, theirs = ((len(b.factors), b.inputs, b.outputs) for b in (earlier.bound, bound))
    assignment = replace(bound.whole(devices), digits=earlier.assignment.digits)
    return assignment if mine == theirs and bound.is_consistent(assignment) else None


def _alike(mine: Op, theirs: Op, devices: int) -> bool:
    """True where two captures of an operator differ in sizes alone, and in no size that matters to its cuts."""
    for a, b in zip((*mine.inputs, *mine.outputs), (*theirs.inputs, *theirs.outputs)):
        if (a is None) != (b is None):
            return False
        if a is None or b is None or a.shape == b.shape:
            continue
        if len(a.shape) != len(b.shape) or any(
            x != y and (0 in (x, y) or math.gcd(x, devices) != math.gcd(y, devices)) for x, y in zip(a.shape, b.shape)
        ):
            return False
    return len(mine.inputs) == len(theirs.inputs) and len(mine.outputs) == len(theirs.outputs)
