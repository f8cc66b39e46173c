"""Why an operator is split as it is: what it costs, what else it could be, and what holds it there.

    in all(s)  = min over plans in which the operator has strategy s, of the energy   (`exact.marginals`: all others choose)
    alone(s)   = the energy of this plan with s in the place of its strategy          (no other operator changes)
    holder(s)  = the value whose edges become most dearer in `alone`, and who is at their other ends

The energy is that of the search (`energy.py`), over the same strategies and those of the plan; a plan that was not
searched is priced among them likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..cluster import Cluster
from ..errors import PlanError
from ..graph import Op
from ..layout import Digits
from .again import Again
from .candidates import Strategy, strategy_of
from .costs import Costs
from .decision import Decision
from .energy import Energy
from .exact import marginals
from .pipelined import PipelinePlan
from .plan import Plan, made_by, read_by
from .recompute import Recomputed
from .route import Compute, Extreme, Move
from .search import Search

__all__ = ["Alternative", "Explanation", "Holder", "Row", "Share", "explained", "opened", "shares_of"]


@dataclass(frozen=True)
class Share:
    """A part of what an operator costs in a step. What is sent between two operators is a share of both.

    Attributes:
        what: "computing"; "inside": what is sent while it works; "asked": what brings an input to it; "handed on": what
            brings an output to who asks for it, or completes its sum; "weights": what brings a parameter from where it is
            stored, and sums its gradient.
        value: which value; "" for computing.
        other: the operator at the other end, "" where there is none.
        sends: the collectives, forward, then backward, such as "all_reduce(8@1)".
        forward, backward: seconds.
    """

    what: str
    value: str
    other: str
    sends: tuple[str, ...]
    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Holder:
    """What makes a strategy dearer where nothing else changes.

    Attributes:
        value: the value that would have to be converted, a parameter or an operator's output; "": the operator's own work
            and what it is fed.
        operators: who is at its other end.
        marked: those of them that a mark keeps.
        more: seconds that it takes more; infinite where it cannot be.
    """

    value: str
    operators: tuple[str, ...]
    marked: tuple[str, ...]
    more: float


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


@dataclass(frozen=True)
class Alternative:
    """Another strategy of an operator.

    Attributes:
        decision: it.
        total: seconds of the best plan in which the operator has it.
        more: how much that is above this plan; below 0 where it is better.
        alone: how much dearer this plan is with it and no other change; infinite where that cannot be.
        holder: what makes it so.
        row: where memory is limited, the moment at which this plan would hold most with it and no other change, if that is
            above the limit.
    """

    decision: Decision
    total: float
    more: float
    alone: float
    holder: Holder | None
    row: Row | None = None


@dataclass(frozen=True)
class Explanation:
    """What there is to say of an operator in a plan.

    Attributes:
        decision: its strategy.
        shares: what it costs.
        cost: seconds of a step of this plan, as the search prices it.
        least: of the best plan in which the operator keeps its strategy.
        alternatives: the best, one for each way to cut that differs; of a marked operator, those that it had without the
            mark.
        strategies: among how many they were found.
        exact: whether `least` and `total` are reached by plans; otherwise they are lower bounds.
        missing: why there are no alternatives, where there are none.
        stage: of a pipeline, in which it is; `plan` is then that stage's, of one micro-batch.
    """

    plan: Plan
    decision: Decision
    shares: tuple[Share, ...]
    cost: float
    least: float
    alternatives: tuple[Alternative, ...]
    strategies: int
    exact: bool
    missing: str | None = None
    stage: int | None = None

    @property
    def seconds(self) -> float:
        """All shares together."""
        return sum(share.seconds for share in self.shares)

    @property
    def holder(self) -> Holder | None:
        """What holds it where it is: that of the best alternative which is dearer alone; None: nothing, or a `row`."""
        return next((a.holder for a in self.alternatives if a.alone > 0 and a.holder is not None), None)


def explained(plan: Plan | PipelinePlan, name: str, count: int = 3, memory: float | None = None) -> Explanation:
    """Explain one operator of a plan; of a pipeline in its stage, for one micro-batch.

    Args:
        name: as `Plan.operator` takes it.
        count: how many alternatives.
        memory: bytes that a device may hold; None: as the plan was searched for.

    Raises:
        PlanError: there is no such operator, or several.
    """
    if isinstance(plan, PipelinePlan):
        stage = plan.stage_of(name)
        return replace(explained(stage.plan, name, count, memory), stage=stage.number)
    name = plan.operator(name).name
    costs = Costs(Cluster.of(plan.cluster, plan.devices), plan.devices)
    decision, shares = plan.decisions[name], shares_of(plan, name, costs)
    if plan.own is not None:
        return Explanation(plan, decision, shares, plan.cost, plan.cost, (), 1, True,
                           f"in {plan.mode} every operator runs as it stands")
    try:
        neighbourhood = _Neighbourhood(plan, name, costs, memory)
        return neighbourhood.explanation(shares, count)
    except PlanError as error:
        return Explanation(plan, decision, shares, plan.cost, plan.cost, (), 1, True, error.message)


def shares_of(plan: Plan, name: str, costs: Costs) -> tuple[Share, ...]:
    """What an operator costs, by parts, the dearest first. What several ask for and is sent once is a share of the first
    of them."""
    routed = plan.routed
    known = {i.name: i for table in (routed.parameters, routed.buffers, routed.constants) for i in table.values()}
    known |= {i.name: i for i in (*routed.inputs, *((routed.seed,) if routed.seed is not None else ()))}
    for instruction in routed.instructions:
        known |= {o.name: o for o in made_by(instruction)}
    sums: dict[tuple[str, str, str], list[Any]] = {}
    for half, instructions in enumerate((routed.instructions, plan.backward)):
        for instruction in instructions:
            ran, again = instruction, isinstance(instruction, (Again, Recomputed))
            if again:
                ran = instruction.move if isinstance(instruction, Again) else instruction.instruction
            key = _part(ran, name)
            if key is None:
                continue
            entry = sums.setdefault(key, [[], 0.0, 0.0])
            entry[1 + half] += costs.backward(instruction, known) if half else costs.forward(instruction, known)
            if isinstance(ran, Compute):
                continue
            conversion = ran.forward if not half or again or isinstance(ran, Extreme) else ran.backward
            if conversion is not None:
                entry[0] += [f"{s.kind}({'·'.join(map(repr, s.digits))})" for s in costs.sends(conversion)]
    shares = (Share(*key, tuple(sends), forward, backward) for key, (sends, forward, backward) in sums.items())
    return tuple(sorted((s for s in shares if s.seconds or s.what == "computing"), key=lambda s: -s.seconds))


def _part(instruction: Any, name: str) -> tuple[str, str, str] | None:
    """Of which share of the operator an instruction is: what, value, other."""
    if isinstance(instruction, Compute):
        return ("computing", "", "") if instruction.operator == name else None
    value = instruction.source.value.name
    if isinstance(instruction, Extreme):
        return ("inside", value, "") if instruction.operator == name else None
    assert isinstance(instruction, Move)
    if instruction.cause == "parameter":
        return ("weights", value, "") if instruction.operator == name else None
    if instruction.producer == name:
        other = "" if instruction.operator == name else instruction.operator
        return "handed on", value, other
    return ("asked", value, instruction.producer) if instruction.operator == name else None


def opened(plan: Plan) -> dict[str, Digits]:
    """By operator of a plan, the digits of the sum that it lets through."""
    layouts, came = {}, {}
    for i in plan.routed.instructions:
        layouts.update((o.name, o.layout) for o in made_by(i))
        if isinstance(i, Compute) and i.op.origin is None:
            sources = [layouts[name] for name in read_by(i) if name in layouts]
            came[i.operator] = next((layout.partial for layout in sources if layout.reduction == "sum"), ())
    return {name: came.get(name, ()) if d.open is None else d.open for name, d in plan.decisions.items()}


class _Neighbourhood:
    """The search's problem around one operator of a plan."""

    def __init__(self, plan: Plan, name: str, costs: Costs, memory: float | None) -> None:
        self.plan, self.name = plan, name
        self.limit = memory or (plan.found.limit if plan.found is not None else None)
        graph = plan.graph.with_ops(tuple(
            replace(op, mark=self._mark(op, plan.decisions[op.name])) for op in plan.graph.ops))
        uneven = any(d.bound.uneven for d in plan.decisions.values())
        self.search = Search.of(graph, plan.devices, plan.fed, costs, on_missing_rule="replicate", stored=plan.stored,
                                uneven=uneven, hsdp=plan.hsdp)
        self.passing = opened(plan)
        decisions = {n: replace(d, open=self.passing[n]) for n, d in plan.decisions.items()}
        self.made: Energy = self.search.energy(self.search.options([decisions]), [decisions])
        self.chosen: dict[str, Strategy] = {n: strategy_of(d) for n, d in decisions.items()}
        self.problem, self.node = self.made.problem, self.made.operators[name]
        self.states = self.made.states(self.chosen)
        self.cost = self.problem.cost(self.states)

    def _mark(self, op: Op, decision: Decision) -> Any:
        """What is kept of a mark: nothing where the plan does not keep it, as in data_parallel; of the operator itself the
        out_strategy, for how it is cut is what is asked about."""
        if op.mark is None or decision.cause != "mark" and decision.out is None:
            return None
        return replace(op.mark, in_strategy=None) if op.name == self.name else op.mark

    def explanation(self, shares: tuple[Share, ...], count: int) -> Explanation:
        options = self.made.options[self.name]
        whole = marginals(self.problem, self.node)
        own = options.index(self.chosen[self.name])
        bound = self.plan.decisions[self.name].bound
        seen = {self._form(bound, options[own])}
        alternatives: list[Alternative] = []
        for state in np.argsort(whole.costs, kind="stable"):
            form = self._form(bound, options[state])
            if len(alternatives) == count or not np.isfinite(whole.costs[state]):
                break
            if form not in seen:
                seen.add(form)
                alternatives.append(self._alternative(options[state], float(whole.costs[state])))
        exact = whole.exact and self.limit is None  # what others choose is not asked whether it fits
        return Explanation(self.plan, self.plan.decisions[self.name], shares, self.cost, float(whole.costs[own]),
                           tuple(alternatives), len(options), exact)

    @staticmethod
    def _form(bound: Any, strategy: Strategy) -> tuple:
        """What of a strategy a reader tells apart: not which of several ranks that are alike hold what."""
        return bound.in_strategy(strategy.assignment), bound.out_cuts(strategy.assignment), strategy.open

    def _alternative(self, strategy: Strategy, total: float) -> Alternative:
        states = self.made.states(self.chosen | {self.name: strategy})
        alone = self.problem.cost(states) - self.cost
        decision = self.search.described.decided(self.plan.decisions[self.name].op, strategy, "search")
        return Alternative(decision, total, total - self.cost, alone, self._holder(states) if alone > 0 else None,
                           self._row(decision) if np.isfinite(alone) else None)

    def _row(self, decision: Decision) -> Row | None:
        """The moment of most memory, if it is above the limit, of the plan with this decision."""
        if self.limit is None:
            return None
        changed = {n: replace(d, open=self.passing[n]) for n, d in self.plan.decisions.items()} | {self.name: decision}
        walked = replace(self.plan, decisions=changed).timeline
        totals = walked.totals()
        at = max(range(len(totals)), key=totals.__getitem__)
        if totals[at] <= self.limit:
            return None
        return Row(f"the {'forward' if at < walked.forward else 'backward'} of {walked.moments[at]}", totals[at], self.limit)

    def _holder(self, states: tuple[int, ...]) -> Holder:
        """What becomes most dearer from the plan's states to these."""
        before, after = self.states, states
        own = float(self.problem.costs[self.node][after[self.node]] - self.problem.costs[self.node][before[self.node]])
        rises: dict[str, float] = {"": own}
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
            operators = list(self._others(value))
        fixed = tuple(n for n in operators if n in self.search.fixed)
        return Holder(value, tuple(operators), fixed, rises[value])

    def _value(self, i: int, j: int) -> str:
        """The value that an edge is about."""
        for node in (i, j):
            if self.problem.names[node] not in self.made.operators:
                return self.problem.names[node].lstrip("%")
        first, second = (self.problem.names[node] for node in (i, j))
        return next(value for value, producer in self._producers.items()
                    if producer == first and any(op.name == second for op, _ in self._consumers.get(value, ())))

    @cached_property
    def _producers(self) -> dict[str, str]:
        return {value: op.name for value, op in self.plan.graph.producers().items()}

    @cached_property
    def _consumers(self) -> dict[str, list]:
        return self.plan.graph.consumers()

    def _others(self, value: str) -> Iterator[str]:
        """Who else makes or reads a value."""
        name = self.plan.graph.parameters[value].name if value in self.plan.graph.parameters else value
        producer = self._producers.get(name)
        if producer is not None and producer != self.name:
            yield producer
        yield from dict.fromkeys(op.name for op, _ in self._consumers.get(name, ()) if op.name != self.name)
