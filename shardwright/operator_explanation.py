"""The explanation of one operator's strategy: its cost, its alternatives, and the values that hold it in place.

1. Alternatives (`explained`):

    in all(s)  = min over plans in which the operator has strategy s, of the cost graph's cost
                 (`solver.solve.marginals`: the other operators choose); within a limit of memory, min over the plans
                 that keep it (`Within`)
    alone(s)   = the cost of this plan with s in the place of its strategy         (no other operator changes)
    holder(s)  = the value whose edges rise most in `alone`, and the operators at their other ends

The cost is that of the search's cost graph (`planners/graph_problem.py`), over its strategies and those of the plan.

2. Bounds. Where a search proved that no plan costs less than `bound`, no alternative is said to cost less: where
`in all` is itself a lower bound (`Explanation.exact` is False), it is raised to that bound.

3. Shares (`shares_of`): the cost of an operator in a step of a plan, by parts.

4. Local alternatives (`local_alternatives`): alone(s) without a search. The cost graph has one strategy for each other
operator, so it takes a second for a plan of 2,000 operators.

Example: the plan costs 10 ms. With the operator cut along its rows, and all others as they are, it costs 10.4 ms:
alone = 10.4 ms. Where its neighbours choose anew, it costs 10.1 ms: in all = 10.1 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from .capture.graph_reader import MarkUse
from .cluster import Cluster
from .cost.communication_schedule import own_redistribution
from .cost.cost_model import CostModel, SentStep, placed_values
from .graph import Op
from .identity_tables import IdentityMap
from .layout import Digits, Layout
from .partition.local_program import Decision, GlobalExtreme, Instruction, LocalOp, Redistribute, made_by, read_by
from .partition.rematerialization import RecomputedInstruction, Regather
from .pipeline.pipeline_plan import PipelinePlan
from .planners.graph_problem import CostGraph
from .planners.limited_alternatives import PricedStrategies, Row, Within, row_above, without_search
from .planners.memory_fit import ENOUGH
from .planners.plan_search import Search
from .planners.planning_problem import PlanningProblem
from .planners.search_space import EdgeCosts, Strategy, strategy_of
from .sharded_plan import Plan
from .solver.solve import marginals

__all__ = [
    "Alternative",
    "Explanation",
    "Holder",
    "SearchesOfPlan",
    "Share",
    "explained",
    "local_alternatives",
    "partial_sums",
    "seconds_of",
    "shares_of",
]


# -- shares


@dataclass(frozen=True)
class Share:
    """A part of an operator's cost in a step. Communication between two operators is a share of both.

    Attributes:
        what: "computing"; "inside": communication during the operator; "asked": redistribution of an input; "handed
            on": redistribution of an output to its consumer, or completion of its partial sum; "weights":
            redistribution of a parameter from its storage, and the sum of its gradient.
        value: the value's name; "" for computing.
        other: the operator at the other end, "" where there is none.
        sends: the collectives, forward, then backward, such as "all_reduce(8@1)".
        forward, backward: seconds.
        own: the seconds that count as this operator's; the rest counts as that of the operator at the other end.
    """

    what: str
    value: str
    other: str
    sends: tuple[str, ...]
    forward: float
    backward: float
    own: float

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward together."""
        return self.forward + self.backward


def shares_of(plan: Plan, name: str, costs: CostModel) -> tuple[Share, ...]:
    """The cost of an operator by parts, the most expensive first.

    A redistribution that several consumers share is a share of the first of them.
    """
    program, known = plan.program, placed_values(plan.program)
    sums: dict[tuple[str, str, str], tuple[list[str], list[float]]] = {}
    for half, instructions in enumerate((program.instructions, plan.backward)):
        for instruction in instructions:
            repeats_forward = isinstance(instruction, (Regather, RecomputedInstruction))
            ran, redistribution = own_redistribution(instruction, bool(half))
            if (key := _part(ran, name)) is None:
                continue
            sends, parts = sums.setdefault(key, ([], [0.0, 0.0, 0.0]))
            seconds = costs.backward(instruction, known) if half else costs.forward(ran, known)
            parts[half] += seconds
            paid = (
                0.0 if half and not repeats_forward else _completed(ran, costs.collectives_of(instruction, bool(half)))
            )
            parts[2] += seconds - paid if ran.operator == name else 0.0
            parts[2] += paid if getattr(ran, "producer", "") == name else 0.0
            if redistribution is not None:
                sends += [f"{s.kind}({'·'.join(map(repr, s.digits))})" for s in costs.sends(redistribution)]
    shares = (Share(*key, tuple(sends), *seconds) for key, (sends, seconds) in sums.items())
    return tuple(sorted((s for s in shares if s.seconds or s.what == "computing"), key=lambda s: -s.seconds))


def seconds_of(plan: Plan, names: Iterable[str]) -> float:
    """Seconds of some operators in a step: the one cost of an operator, or of a layer's, in all tables.

    A redistribution counts for its consumer, the completion of a partial sum for its producer (`Price.by_operator`).
    """
    prices = plan.price.by_operator
    return sum(prices.get(name, 0.0) for name in names)


def _completed(ran: Instruction, sent: Iterable[tuple[SentStep, float, float]]) -> float:
    """Seconds of a forward redistribution in which it completes a partial sum of its producer."""
    if not isinstance(ran, Redistribute) or ran.cause == "parameter" or not ran.producer:
        return 0.0
    return sum(seconds for step, _, seconds in sent if step.kind.reduces)


def _part(instruction: Instruction, name: str) -> tuple[str, str, str] | None:
    """The share of the operator to which an instruction belongs: (what, value, other); None for none."""
    if isinstance(instruction, LocalOp):
        return ("computing", "", "") if instruction.operator == name else None
    value = instruction.source.value.name
    if isinstance(instruction, GlobalExtreme):
        return ("inside", value, "") if instruction.operator == name else None
    if instruction.cause == "parameter":
        return ("weights", value, "") if instruction.operator == name else None
    if instruction.producer == name:
        other = "" if instruction.operator == name else instruction.operator
        return "handed on", value, other
    return ("asked", value, instruction.producer) if instruction.operator == name else None


#: Other ways to cut that are searched within a limit of memory, at most: for each alternative asked for, and in all.
TRIED_EACH, MOST_TRIED = 4, 12

#: The least difference of two prices, relative to them, that counts.
LESS = 1e-9


@dataclass(frozen=True)
class Holder:
    """The reason why a strategy costs more where nothing else changes.

    Attributes:
        value: the value that would have to be redistributed, a parameter or an operator's output; "": the operator's
            own work and its fed inputs.
        operators: the operators at its other end.
        marked: those of them that a user strategy keeps.
        more: additional seconds; infinite where the strategy is impossible.
    """

    value: str
    operators: tuple[str, ...]
    marked: tuple[str, ...]
    more: float


@dataclass(frozen=True)
class Alternative:
    """Another strategy of an operator.

    Attributes:
        decision: the strategy.
        total: seconds of the best plan in which the operator has it and which keeps the limit of memory, if any;
            infinite where none does.
        more: `total` less the seconds of this plan; below 0 where it is better.
        alone: additional seconds of this plan with it and no other change, by the prices of the search's cost graph: a
            program in which consumers share a redistribution may take less. Infinite where that is impossible.
        holder: the reason for `alone`.
        row: with a limit, the moment at which this plan would hold most with it and no other change, if above the
            limit.
        bound: with a limit, the search's lower bound of `total`: below `total` where that plan was not proved the
            best.
        aside: with a limit, seconds of the best plan with it without the limit.
        over: the moment at which that plan would hold most, if above the limit.
        refused: the reason why no plan with it fits, where none does.
    """

    decision: Decision
    total: float
    more: float
    alone: float
    holder: Holder | None
    row: Row | None = None
    bound: float | None = None
    aside: float | None = None
    over: Row | None = None
    refused: str = ""

    @property
    def proved(self) -> bool:
        """True where, within a limit, no plan with it is better than `total`."""
        return self.bound is None or self.bound >= self.total * (1 - LESS)


@dataclass(frozen=True)
class Explanation:
    """The explanation of an operator in a plan.

    Attributes:
        decision: its strategy.
        shares: its cost by parts.
        cost: seconds of a step of this plan, by the search's prices.
        least: seconds of the best plan in which the operator keeps its strategy.
        alternatives: the best, one for each different way to cut; for a marked operator, those that it would have
            without the mark. Within a limit of memory also those that are cheaper without the limit and fit in no
            plan; these last.
        strategies: the number of strategies that were compared.
        exact: True where plans reach `least` and `total`; False: these are lower bounds, and never below `bound`.
        bound: a lower bound of any plan with one of the alternatives, proved by the plan's own search; None: nothing
            was proved, or a mark that the alternatives lift was part of that search.
        missing: the reason why there are no alternatives, where there are none.
        limit: bytes that a device may hold, in this plan and all others; None: memory was not limited.
        over: the moment at which this plan itself holds most, if above the limit.
        unlimited: the operator's strategy without the limit, where that is another way to cut, and the reason against
            it.
        tried: (number of other ways to cut that were searched within the limit, the cheapest without it first; total).
        stage: the stage of a pipeline to which the operator belongs; `plan` is then that stage's, of one micro-batch.
    """

    plan: Plan
    decision: Decision
    shares: tuple[Share, ...]
    cost: float
    least: float
    alternatives: tuple[Alternative, ...]
    strategies: int
    exact: bool
    bound: float | None = None
    missing: str | None = None
    stage: int | None = None
    limit: float | None = None
    over: Row | None = None
    unlimited: Alternative | None = None
    tried: tuple[int, int] = (0, 0)

    @property
    def seconds(self) -> float:
        """Seconds of the operator in a step, as in all tables."""
        return seconds_of(self.plan, (self.decision.op.name,))

    def is_better(self, other: Alternative) -> bool:
        """True where a plan with the alternative was found that costs less than this plan."""
        less = min(other.more if self.exact else 0.0, other.alone if other.row is None else 0.0)
        return less < -LESS * self.cost

    @property
    def holder(self) -> Holder | None:
        """The holder of the best alternative that costs more alone; None: nothing holds the operator, or memory
        does."""
        return next((a.holder for a in self.alternatives if a.alone > 0 and a.holder is not None), None)


class SearchesOfPlan:
    """The searches around operators of one plan, for several explanations. Operators without a mark have one search and
    one cost graph: in each of their searches every strategy but a marked one is open.

    Args:
        plan: the plan; in a pipeline, that of a stage.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.costs = CostModel(Cluster.of(plan.cluster, plan.devices), plan.devices)
        passing = partial_sums(plan)
        self.decisions = {n: replace(d, partial=passing[n]) for n, d in plan.decisions.items()}
        self._deliveries = EdgeCosts(self.costs)
        self._searches: dict[str | None, Search] = {}
        self._graphs: dict[str | None, CostGraph] = {}

    @classmethod
    def of(cls, plan: Plan, known: IdentityMap[Plan, SearchesOfPlan] | None) -> SearchesOfPlan:
        """The searches of a plan among those that are known, which receive them."""
        if known is None:
            return cls(plan)
        if plan not in known:
            known[plan] = cls(plan)
        return known[plan]

    def around(self, name: str) -> Search:
        """The search in which an operator's own strategy is open."""
        plan = self.plan
        marks = {op.name: _kept_mark(op, plan.decisions[op.name]) for op in plan.graph.ops}
        mark = marks[name]
        key = None if mark is None else name
        if key not in self._searches:
            if mark is not None:  # its out_strategy stays: its own strategy is the question
                marks[name] = replace(mark, in_strategy=None)
            problem = PlanningProblem(
                plan.graph.with_ops(tuple(replace(op, mark=marks[op.name]) for op in plan.graph.ops)),
                plan.devices,
                plan.input_placement,
                "replicate",
                plan.stored,
                any(d.bound.uneven for d in plan.decisions.values()),
                self.costs,
                plan.hsdp,
                deliveries=self._deliveries,
            )
            self._searches[key] = Search.of(problem)
        return self._searches[key]

    def cost_graph(self, name: str) -> CostGraph:
        """The cost graph of the search around an operator."""
        search = self.around(name)
        key = name if name in self._searches else None
        if key not in self._graphs:
            self._graphs[key] = search.cost_graph(search.options([self.decisions]), [self.decisions])
        return self._graphs[key]


def _kept_mark(op: Op, decision: Decision) -> MarkUse | None:
    """The mark of an operator; None where the plan does not keep it, as in data_parallel."""
    return None if decision.cause != "mark" and decision.out is None else op.mark


def explained(
    plan: Plan | PipelinePlan,
    name: str,
    count: int = 3,
    memory: float | None = None,
    searches: IdentityMap[Plan, SearchesOfPlan] | None = None,
) -> Explanation:
    """Explain one operator of a plan; in a pipeline, within its stage and for one micro-batch.

    Args:
        name: as `Plan.operator` takes it.
        count: the number of alternatives.
        memory: bytes that a device may hold; None: the limit of the plan's search.
        searches: the searches of earlier explanations, by the plan, or by that of the stage; receives those that it
            lacks.

    Raises:
        PlanError: there is no such operator, or several.
    """
    if isinstance(plan, PipelinePlan):
        stage = plan.stage_of(name)
        return replace(explained(stage.plan, name, count, memory, searches), stage=stage.number)
    name = plan.operator(name).name
    costs = CostModel(Cluster.of(plan.cluster, plan.devices), plan.devices)
    decision, shares = plan.decisions[name], shares_of(plan, name, costs)
    if plan.own is not None:
        reason = f"in {plan.mode} every operator runs as it stands"
        return Explanation(plan, decision, shares, plan.cost, plan.cost, (), 1, True, missing=reason)
    neighbourhood = _Neighbourhood(SearchesOfPlan.of(plan, searches), name, memory)
    missing = neighbourhood.missing()
    if missing is not None:
        return Explanation(plan, decision, shares, plan.cost, plan.cost, (), 1, True, missing=missing)
    return neighbourhood.explanation(shares, count)


def partial_sums(plan: Plan) -> dict[str, Digits]:
    """Operator of a plan -> the digits of the partial sum that passes through it."""
    layouts: dict[str, Layout] = {}
    came: dict[str, Digits] = {}
    for i in plan.program.instructions:
        layouts.update((o.name, o.layout) for o in made_by(i))
        if isinstance(i, LocalOp) and i.op.origin is None:
            sources = [layouts[name] for name in read_by(i) if name in layouts]
            came[i.operator] = next((layout.partial for layout in sources if layout.reduction == "sum"), ())
    return {name: came.get(name, ()) if d.partial is None else d.partial for name, d in plan.decisions.items()}


class _Neighbourhood:
    """The search's problem around one operator of a plan."""

    def __init__(self, searches: SearchesOfPlan, name: str, memory: float | None) -> None:
        plan = self.plan = searches.plan
        self.name = name
        self.limit = memory or (plan.found.limit if plan.found is not None else None)
        self.decisions = searches.decisions
        self.chosen: dict[str, Strategy] = {n: strategy_of(d) for n, d in self.decisions.items()}
        self.search = searches.around(name)
        self.made = self._cost_graph(searches)
        self.problem, self.node = self.made.problem, self.made.operators[name]

    def _cost_graph(self, searches: SearchesOfPlan) -> CostGraph:
        return searches.cost_graph(self.name)

    @cached_property
    def states(self) -> tuple[int, ...]:
        """The plan's states."""
        return self.made.states(self.chosen)

    @cached_property
    def cost(self) -> float:
        """The plan's cost by the cost graph."""
        return self.problem.cost(self.states)

    def missing(self) -> str | None:
        """The reason why the plan is none of the search's plans and cannot be compared; None where it can."""
        for name, strategy in self.chosen.items():
            if strategy not in self.made.options[name]:
                return f"the strategy of {name} is not among the {len(self.made.options[name])} of the search"
        return None if np.isfinite(self.cost) else "the search allows no plan like this one, and has no price for it"

    def explanation(self, shares: tuple[Share, ...], count: int) -> Explanation:
        """The explanation; with alternatives within the limit, where there is one."""
        if self.limit is not None:
            return self._limited(shares, count, self.limit)
        options = self.made.options[self.name]
        whole = marginals(self.problem, self.node)
        forms = self._forms(options, whole.costs)
        chosen_index = options.index(self.chosen[self.name])
        forms.pop(self._form(options[chosen_index]))
        firsts = [states[0] for states in forms.values()][:count]
        least, bound, totals, cost = float(whole.costs[chosen_index]), self.bound, whole.costs, self.cost
        if self.plan.found is not None and self.proved is not None:
            cost = min(cost, self.plan.found.cost)  # the program may cost less than the cost graph says
        if not whole.exact:  # bounds of the problem around one operator, which the bound of the whole raises
            proved = self.proved or 0.0
            least, totals = max(least, proved), np.maximum(whole.costs, bound or 0.0)
        found = tuple(self._alternative(options[first], float(totals[first]), cost) for first in firsts)
        mine = self.plan.decisions[self.name]
        return Explanation(self.plan, mine, shares, cost, min(least, cost), found, len(options), whole.exact, bound)

    @property
    def proved(self) -> float | None:
        """The lower bound that the plan's search has proved, by its prices, of every plan that keeps the limit of
        memory and all marks; None: none."""
        found = self.plan.found
        if found is None or found.bound is None:
            return None
        proves = found.limit is None if self.limit is None else found.limit is not None and self.limit <= found.limit
        return found.bound if proves else None

    @property
    def bound(self) -> float | None:
        """The same of every plan with another strategy of the operator; None where a mark keeps the operator."""
        return None if self.plan.decisions[self.name].cause == "mark" else self.proved

    def _limited(self, shares: tuple[Share, ...], count: int, limit: float) -> Explanation:
        """The explanation where all plans must keep a limit."""
        found, within = self.plan.found, self._within(limit)
        cost = self.cost if found is None else found.cost
        options = within.free.options[self.name]
        whole = marginals(within.free.problem, within.free.operators[self.name])
        forms = {form: [options[s] for s in states] for form, states in self._forms(options, whole.costs).items()}
        mine = forms.pop(self._form(self.chosen[self.name]))
        searched = found is not None and found.limit == limit and found.bound is not None
        chosen_price = within.aside(mine) if searched else within.priced(mine)
        fitting, refused = self._tried(
            within, forms.values(), lambda s: float(whole.costs[options.index(s)]), count, cost
        )
        tried = len(fitting) + len(refused)
        alone = lambda a: np.inf if a.aside is None else a.aside
        first = min((*fitting, *refused), key=alone, default=None)
        unlimited = (
            first
            if first is not None and first.over is not None and alone(first) < chosen_price.aside * (1 - LESS)
            else None
        )
        fitting = fitting[:count]
        most = fitting[-1].total if len(fitting) == count else np.inf
        shown = (*fitting, *[a for a in refused if alone(a) < most][:count])
        return Explanation(
            self.plan,
            self.plan.decisions[self.name],
            shares,
            cost,
            cost if searched else chosen_price.total,
            shown,
            len(options),
            True,
            self.bound,
            limit=limit,
            over=row_above(self.plan.timeline, limit),
            unlimited=unlimited,
            tried=(tried, len(forms)),
        )

    def _tried(
        self,
        within: Within,
        forms: Iterable[list[Strategy]],
        least: Callable[[Strategy], float],
        count: int,
        cost: float,
    ) -> tuple[list[Alternative], list[Alternative]]:
        """Plan other ways to cut within the limit.

        Stops after some of them (`MOST_TRIED`), or once `count` fit and the rest can be better only within the search's
        own tolerance.

        Args:
            forms: the ways, the cheapest first, with the strategies of each.
            least: lower bound of a plan's cost with a strategy, without a limit.
            cost: of the plan.

        Returns:
            Those that fit, the cheapest first, and those that the search refuses.
        """
        fitting: list[Alternative] = []
        refused: list[Alternative] = []
        for strategies in forms:
            if len(fitting) + len(refused) >= max(count, min(TRIED_EACH * count, MOST_TRIED)) or (
                len(fitting) >= count and fitting[count - 1].total * (1 - ENOUGH) <= least(strategies[0])
            ):
                break
            priced = within.priced(strategies)
            made = self._alternative(priced.strategy, priced.total, cost, priced)
            (refused if made.refused else fitting).append(made)
            fitting.sort(key=lambda a: a.total)
        return fitting, refused

    def _within(self, limit: float) -> Within:
        """The search within a limit; its decisions for the plan, apart from strategies, are made anew."""
        graph, hsdp = without_search(self.plan)
        marks = {op.name: op.mark for op in self.search.described.graph.ops}
        graph = graph.with_ops(tuple(replace(op, mark=marks[op.name]) for op in graph.ops))
        search = replace(
            self.search,
            problem=replace(self.search.problem, graph=graph, hsdp=hsdp),
            described=replace(self.search.described, graph=graph),
        )
        free = (
            replace(self.made, described=search.described)
            if hsdp == self.plan.hsdp
            else search.cost_graph(search.options([self.decisions]), [self.decisions])
        )
        return Within(self.plan, self.name, search, self.decisions, free, limit)

    def _forms(self, options: tuple[Strategy, ...], costs: np.ndarray) -> dict[tuple[object, ...], list[int]]:
        """The ways to cut, the cheapest first, with the states of each."""
        out: dict[tuple[object, ...], list[int]] = {}
        for state in np.argsort(costs, kind="stable"):
            if np.isfinite(costs[state]):
                out.setdefault(self._form(options[state]), []).append(int(state))
        return out

    def _form(self, strategy: Strategy) -> tuple[object, ...]:
        """The part of a strategy that a reader distinguishes: not the assignment of slices among equivalent ranks."""
        bound = self.plan.decisions[self.name].bound
        return bound.in_strategy(strategy.assignment), bound.out_cuts(strategy.assignment), strategy.partial

    def _alternative(
        self, strategy: Strategy, total: float, cost: float, priced: PricedStrategies | None = None
    ) -> Alternative:
        states = self.made.states(self.chosen | {self.name: strategy})
        alone = self.problem.cost(states) - self.cost
        decision = self.search.described.decided(self.plan.decisions[self.name].op, strategy, "search")
        made = Alternative(
            decision,
            total,
            total - cost,
            alone,
            self._holder(states) if alone > 0 else None,
            self._row(decision) if np.isfinite(alone) else None,
        )
        return (
            made
            if priced is None
            else replace(
                made,
                bound=max(priced.bound, min(self.bound or 0.0, total)),
                aside=priced.aside,
                over=priced.over,
                refused=priced.refused,
            )
        )

    def _row(self, decision: Decision) -> Row | None:
        """The moment of most memory of the plan with this decision; None where it keeps the limit."""
        if self.limit is None:
            return None
        changed = self.decisions | {self.name: decision}
        return row_above(replace(self.plan, decisions=changed).timeline, self.limit)

    def _holder(self, states: tuple[int, ...]) -> Holder:
        """The value whose cost rises most from the plan's states to these."""
        before, after = self.states, states
        costs = self.problem.costs[self.node]
        rises: dict[str, float] = {"": float(costs[after[self.node]] - costs[before[self.node]])}
        ends: dict[tuple[str, str], float] = {}
        for (i, j), table in self.problem.edges.items():
            if (before[i], before[j]) == (after[i], after[j]):
                continue
            rise = float(table[after[i], after[j]] - table[before[i], before[j]])
            value = self._value(i, j)
            rises[value] = rises.get(value, 0.0) + rise
            for node in (i, j):
                if node != self.node and self.problem.names[node] in self.made.operators:
                    end = value, self.problem.names[node]
                    ends[end] = ends.get(end, 0.0) + rise
        value = max(rises, key=rises.__getitem__)
        operators = sorted((n for v, n in ends if v == value), key=lambda n: -ends[value, n])
        if value and not operators:
            operators = list(self._other_users(value))
        fixed = tuple(n for n in operators if n in self.search.fixed)
        return Holder(value, tuple(operators), fixed, rises[value])

    def _value(self, i: int, j: int) -> str:
        """The value of an edge."""
        for node in (i, j):
            if self.problem.names[node] not in self.made.operators:
                return self.problem.names[node].lstrip("%")
        first, second = (self.problem.names[node] for node in (i, j))
        return next(
            value
            for value, producer in self._producers.items()
            if producer == first and any(op.name == second for op, _ in self._consumers.get(value, ()))
        )

    @cached_property
    def _producers(self) -> dict[str, str]:
        return {value: op.name for value, op in self.plan.graph.producers().items()}

    @cached_property
    def _consumers(self) -> dict[str, list[tuple[Op, int]]]:
        return self.plan.graph.consumers()

    def _other_users(self, value: str) -> Iterator[str]:
        """Yield the other producers and consumers of a value."""
        name = self.plan.graph.parameters[value].name if value in self.plan.graph.parameters else value
        producer = self._producers.get(name)
        if producer is not None and producer != self.name:
            yield producer
        yield from dict.fromkeys(op.name for op, _ in self._consumers.get(name, ()) if op.name != self.name)


# -- local alternatives


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
