"""The planner sharding_propagation: operators follow a few marks, and cost decides between conflicting demands.

    options(operator) = what the marks ask of it (`layout_demands`), and what `semi_auto` would do
    choice            = argmin of the cost graph over all options together (`graph_problem`, `solve`)

1. A marked operator has one option.
2. An operator that no mark reaches is cut along the batch.
3. Every other operator has all strategies that the marks ask of it. The seconds of the whole step decide a conflict;
   the operator's note names the marks that lost, and the price of each strategy.

Where nothing is marked, the operators follow the layouts in which the batch is fed: with a part of the batch on each
rank that is the plan of `semi_auto`, or a cheaper one.

The strategies of `semi_auto` are among the options, so the plan is not dearer than that of `semi_auto` with the same
marks. Where the costs of the two plans are near, their programs are priced and compared.

With several priorities, an operator follows the marks above the lowest priority whatever the cost: its options are
what these marks ask, and what cuts it further.

`recursive_programming` and `dynamic_programming` weigh everything that the rules allow. This planner weighs what
follows from the marks, a handful of strategies an operator, so its time grows with the number of operators alone.

Example: in relu(x @ w) on 4 devices a mark cuts the columns of w 4 ways. The product has the one option of its mark,
and relu the options of 4 slices of columns, which sends nothing, and of the batch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

import numpy as np

from ..errors import PlanError
from ..graph import Graph, Op, Value
from ..layout import Layout, overlap
from ..partition.local_program import Decision, Decisions, SearchResult
from ..rules import Assignment, Bound
from ..sharded_plan import Plan
from ..solver.solve import solve
from .graph_problem import CostGraph
from .layout_demands import Demand, demands_of, ranking, within
from .plan_search import Search
from .planning_problem import PlanningProblem, planner
from .search_space import OperatorTable, Strategy, options_of, strategy_of
from .semi_auto import semi_auto

__all__ = ["sharding_propagation"]


#: Ratio of this plan's cost to that of `semi_auto`'s plan from which on both programs are priced: a program shares
#: more redistributions than the cost graph counts.
NEAR = 0.9

#: Preference among strategies of one cost: a basic demand, an aggressive demand, the batch, nothing cut.
_BASIC, _AGGRESSIVE, _ALONG, _WHOLE = range(4)


@planner("sharding_propagation", searches=True)
def sharding_propagation(problem: PlanningProblem) -> Decisions:
    """Decide every operator.

    Returns:
        The decisions, each with the mark that it follows (`origin`) and the operator that passed it on (`via`).

    Raises:
        StrategyError, LayoutError, MissingRuleError: as in `semi_auto`.
    """
    graph, devices = problem.graph, problem.devices
    along, batch_dims, *_ = semi_auto(problem)
    asked = demands_of(graph, along, devices, problem.input_placement.inputs)
    heard = {name: tuple(d for d in demands if not d.outranked) for name, demands in asked.items()}
    lowest = max((op.mark.priority for op in graph.ops if _marked(op)), default=0)
    bound_to = {
        name: first for name, demands in heard.items() if (first := ranking(demands)) and first[0].priority < lowest
    }
    search = Search.of(problem)
    made = search.cost_graph(_options(search.described, along, heard, bound_to))
    try:
        solution = solve(made.problem)
    except PlanError:
        try:  # a priority cannot be kept where other users of a parameter want it otherwise
            made = search.cost_graph(_options(search.described, along, heard, {}))
            solution = solve(made.problem)
        except PlanError:  # marks that contradict one another: the partitioner reports which
            return Decisions(along, batch_dims)
    marks = {name: decision for name, decision in along.items() if _settled(decision.op)}
    decisions = _labelled(graph, made.decisions(solution.states, marks, "search"), along, heard)
    decisions = _with_losers(made, solution.states, decisions, asked, bound_to)
    count = sum(map(len, made.options.values()))
    found = SearchResult(solution.cost, None, len(decisions), count, solution.notes)
    if bound_to or solution.cost < NEAR * made.cost({name: strategy_of(decision) for name, decision in along.items()}):
        return Decisions(decisions, batch_dims, found)

    stored = None if problem.stored is None else dict(problem.stored)

    def price(chosen: dict[str, Decision]) -> float:
        try:
            made = Plan(graph, devices, "semi_auto", problem.input_placement, chosen, batch_dims, stored, problem.hsdp)
            return problem.costs.plan(made).total
        except PlanError:  # a parameter in two layouts
            return math.inf

    ours, theirs = price(decisions), price(along)
    if theirs < ours:
        reason = (
            f"no operator follows a mark: that would take {ours * 1e6:.4g} us a step, along the batch it takes "
            f"{theirs * 1e6:.4g} us"
        )
        marked = next((decision for decision in along.values() if _marked(decision.op)), None)
        if marked is not None:
            along[marked.op.name] = replace(marked, note="; ".join(filter(None, (marked.note, reason))))
        return Decisions(along, batch_dims, replace(found, cost=theirs))
    return Decisions(decisions, batch_dims, found)


def _options(
    described: OperatorTable,
    along: Mapping[str, Decision],
    asked: Mapping[str, tuple[Demand, ...]],
    bound_to: Mapping[str, tuple[Demand, ...]],
) -> dict[str, tuple[Strategy, ...]]:
    """The strategies of every operator, the preferred first: the solver takes the first of those that cost the same.
    Operators that are alike have the same tuple.

    The strategy "whole" is an option only where no other is legal, or where other users of a parameter might need it.

    Args:
        bound_to: operators that must follow their marks -> the demands of which their cuts must hold one.
    """
    graph, consumers = described.graph, described.graph.consumers()
    several = {op.name for name in graph.parameters for op, _ in consumers.get(name, ()) if len(consumers[name]) > 1}
    settled = {name for name, decision in along.items() if _settled(decision.op)}
    outs = {name: decision.out for name, decision in along.items() if decision.out is not None}
    ranks = {
        name: {decision.assignment: _ALONG} if _follows(decision.assignment, bound_to.get(name)) else {}
        for name, decision in along.items()
    }
    for name, demands in asked.items():
        first = bound_to.get(name)
        ranks[name] |= {
            d.assignment: _WHOLE if not d.assignment.used else _AGGRESSIVE if d.aggressive else _BASIC
            for d in demands
            if d.settled or _follows(d.assignment, first)
        }
    for name in several - settled - bound_to.keys():
        ranks[name].setdefault(along[name].bound.whole(described.devices), _WHOLE)
    same: dict[tuple[Strategy, ...], tuple[Strategy, ...]] = {}
    out = {}
    for name, strategies in options_of(described, (), {}, outs, _plans(along, asked)).items():
        known = ranks[name]
        ranked = sorted((s for s in strategies if s.assignment in known), key=lambda s: (known[s.assignment], str(s)))
        out[name] = same.setdefault(tuple(ranked), tuple(ranked))
    return out


def _follows(assignment: Assignment, demands: tuple[Demand, ...] | None) -> bool:
    """True where an assignment holds the cuts of one of the demands, or where `demands` is None."""
    return demands is None or any(within(d.assignment, assignment) for d in demands)


def _marked(op: Op) -> bool:
    """True where a mark settles the strategy of an operator, or the layout of its result."""
    return _settled(op) or (op.mark is not None and op.mark.out_strategy is not None)


def _settled(op: Op) -> bool:
    """True where a mark settles the strategy of an operator."""
    return op.mark is not None and op.mark.in_strategy is not None


def _plans(along: Mapping[str, Decision], asked: Mapping[str, tuple[Demand, ...]]) -> Iterator[dict[str, Decision]]:
    """The options of all operators as plans: `semi_auto`'s, then the first demand of every operator, the second, …"""
    yield dict(along)
    for row in zip_longest(*(tuple((name, d.assignment) for d in demands) for name, demands in asked.items())):
        yield {
            name: replace(along[name], assignment=assignment)
            for name, assignment in (entry for entry in row if entry is not None)
        }


# -- the mark behind each decision --


def _labelled(
    graph: Graph, decisions: dict[str, Decision], along: Mapping[str, Decision], asked: Mapping[str, tuple[Demand, ...]]
) -> dict[str, Decision]:
    """The decisions with the mark that each comes from.

    The mark has the highest priority; among those, it is the nearest one along a chain of values with digits in
    common. Chains with equal layouts come before chains with layouts that agree in part.

    Where no such chain is left, because operators on the way followed another mark, the mark is that of the
    operator's own demand. An operator whose cuts no mark asked for is labelled as in `semi_auto`.
    """
    touching: dict[str, list[tuple[Op, int, bool]]] = {}
    for op in graph.ops:
        for value, index, output in _ports(op):
            touching.setdefault(value.name, []).append((op, index, output))
    by_name = {op.name: op for op in graph.ops}
    nearest: dict[str, tuple[str, str]] = {}
    # (priority, links where only some digits are alike, links, place in the program), operator, its mark, previous
    # operator
    reached = [
        (op.mark.priority, 0, 0, place, op.name, op.name, "") for place, op in enumerate(graph.ops) if _marked(op)
    ]
    heapq.heapify(reached)
    while reached:
        priority, partly, links, place, name, mark, via = heapq.heappop(reached)
        if name in nearest:
            continue
        nearest[name] = mark, via
        for value, index, output in _ports(by_name[name]):
            mine = _layout(decisions[name], index, output)
            for other, i, made in touching[value.name]:
                if other.name in nearest or _marked(other):
                    continue
                theirs = _layout(decisions[other.name], i, made)
                if _alike(mine, theirs):
                    same = mine.dims == theirs.dims
                    heapq.heappush(reached, (priority, partly + (not same), links + 1, place, other.name, mark, name))
    out, marked = {}, bool(nearest)
    for name, decision in decisions.items():
        demand = next((d for d in asked.get(name, ()) if d.assignment == decision.assignment), None)
        if _settled(decision.op):
            out[name] = decision
        elif name in nearest:
            out[name] = replace(decision, cause="propagated", origin=nearest[name][0], via=nearest[name][1])
        elif demand is not None and (marked or decision.assignment != along[name].assignment):
            out[name] = replace(decision, cause="propagated", origin=demand.mark)
        else:
            same = decision.assignment == along[name].assignment
            cause = "batch" if any(decision.assignment.digits) else "whole"
            if not marked and same and along[name].cause == "follow":
                cause = "follow"
            out[name] = replace(decision, cause=cause, note=along[name].note if same else decision.note)
    return out


def _ports(op: Op) -> Iterator[tuple[Value, int, bool]]:
    """The values that an operator consumes and produces, with the number of the input or output, and True for an
    output."""
    yield from ((v, i, False) for i, v in enumerate(op.inputs))
    yield from ((v, k, True) for k, v in enumerate(v for v in op.outputs if v is not None))


def _layout(decision: Decision, index: int, output: bool) -> Layout:
    if not output:
        return decision.input_layout(index)
    return decision.out[index] if decision.out is not None else decision.output_layout(index)


def _alike(one: Layout, other: Layout) -> bool:
    """True where two layouts of a value have digits in common: on a dim, or in a partial sum that is reduce-scattered
    to a dim."""
    assert one.dims is not None and other.dims is not None
    return any(
        overlap(a, b) or overlap(one.partial, b) or overlap(a, other.partial) for a, b in zip(one.dims, other.dims)
    )


# -- demands that were not met --


def _with_losers(
    found: CostGraph,
    states: Sequence[int],
    decisions: dict[str, Decision],
    asked: Mapping[str, tuple[Demand, ...]],
    bound_to: Mapping[str, tuple[Demand, ...]],
) -> dict[str, Decision]:
    """The decisions, with a note where marks that were not followed asked for something else."""
    prices = _Prices(found, states)
    out = dict(decisions)
    for name, decision in decisions.items():
        if _settled(decision.op):
            continue
        bound, won = decision.bound, decision.assignment
        lost: dict[str, Demand] = {}
        first = ranking(asked.get(name, ()))
        follows = _follows(won, bound_to.get(name))
        for demand in asked.get(name, ()):
            mine = demand.mark == decision.origin or (demand.aggressive and not demand.outranked)
            if (not mine or (not follows and demand in first)) and not within(demand.assignment, won):
                lost.setdefault(demand.mark, demand)
        if lost:
            winner = f"{decision.origin} asks for" if decision.origin else f"{decision.cause}:"
            texts = [f"{name}: {winner} {_cuts(bound, won)}, {prices.text(name, won)}: taken"]
            for mark, demand in lost.items():
                why = prices.text(name, demand.assignment)
                if demand.outranked:
                    why = f"after {first[0].mark}: priority {demand.priority} against {first[0].priority}"
                elif not follows and demand in first:
                    why = f"which other users of a parameter do not allow, in spite of its priority {demand.priority}"
                texts.append(f"{mark} asks for {_cuts(bound, demand.assignment)}, {why}")
            out[name] = replace(decision, note="; ".join(([decision.note] if decision.note else []) + texts))
    return out


def _cuts(bound: Bound, assignment: Assignment) -> str:
    """A strategy as cuts. Two strategies with the same cuts differ in digits, which the plan lists."""
    return str(bound.in_strategy(assignment))


class _Prices:
    """Costs of the strategies of one operator with all other operators as they are.

    A cost is the operator's own time and that of the redistributions around it; parameters and shared values take
    their best states for it.
    """

    def __init__(self, found: CostGraph, states: Sequence[int]) -> None:
        self.found, self.states = found, states
        self.edges: dict[int, list[tuple[int, np.ndarray]]] = {}
        for (i, j), table in found.problem.edges.items():
            self.edges.setdefault(i, []).append((j, table))
            self.edges.setdefault(j, []).append((i, table.T))
        self.dependent = {*found.parameters.values(), *found.shared.values()}

    def text(self, name: str, assignment: Assignment) -> str:
        """The least price of the strategies with this assignment."""
        options = self.found.options[name]
        node = self.found.operators[name]
        seconds = min(
            (self.price(node, s) for s, strategy in enumerate(options) if strategy.assignment == assignment),
            default=float("inf"),
        )
        return f"{seconds * 1e6:.4g} us" if seconds < float("inf") else "which its other users do not allow"

    def price(self, node: int, state: int) -> float:
        total = float(self.found.problem.costs[node][state])
        for other, table in self.edges.get(node, ()):
            if other not in self.dependent:
                total += float(table[state, self.states[other]])
                continue
            free = self.found.problem.costs[other] + table[state]
            for third, between in self.edges[other]:
                if third != node:
                    free = free + between[:, self.states[third]]
            total += float(free.min())
        return total
