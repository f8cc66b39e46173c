"""The planner semi_auto: marked operators as marked, the others along the batch.

1. Marked operator: the strategy of the mark.
2. Unmarked operator: the batch dim cut by gcd(its size, devices), replicas over the remaining devices, every other
   dim whole.
3. Unmarked view, or cast between floating dtypes: the layout with the least traffic to and from its producer and its
   consumers.

Example: a batch of 6 rows on 4 devices is cut gcd(6, 4) = 2 ways, and 2 devices each repeat the same work.

`data_parallel` is the same without marks. Nothing is searched here: `sharding_propagation` follows marks by cost,
`recursive_programming` and `dynamic_programming` search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ..errors import ShardwrightError, StrategyError
from ..graph import Graph, Op, Value
from ..layout import Digits, Layout, allocate, beside
from ..mixed_precision import is_float_cast
from ..partition.local_program import Decision, Decisions, InputPlacement, batch_factor, description, find_batch_dims
from ..partition.parameter_sharding import stored_layouts
from ..partition.partitioner import wanted_in_two
from ..redistribution import redistribution
from ..rules import Assignment, Bound, Rule, assignment_of, in_order, output_layouts_of, ungathered_layouts
from .planning_problem import PlanningProblem, planner

__all__ = ["data_parallel", "marked_decision", "marked_output", "semi_auto", "ungathered_parameters"]


@planner("data_parallel")
def data_parallel(problem: PlanningProblem) -> Decisions:
    """Cut every operator along the batch; parameters are whole and marks are ignored.

    Raises:
        StrategyError: the devices do not divide the batch.
    """
    graph, devices = problem.graph, problem.devices
    for value in graph.inputs:
        if value.shape and value.shape[0] % devices:
            raise StrategyError(
                f"the batch of input {value.name!r} has size {value.shape[0]}; data_parallel cuts it "
                f"into {devices} equal parts",
                legal=f"a batch that {devices} divides",
            )
    plain = graph.with_ops(tuple(replace(op, mark=None) for op in graph.ops))
    return semi_auto(replace(problem, graph=plain))


@planner("semi_auto")
def semi_auto(problem: PlanningProblem) -> Decisions:
    """Decide every operator: a marked one as marked, another one along the batch.

    Raises:
        StrategyError, LayoutError, MissingRuleError: with the operator, its source line and a legal choice.
    """
    graph, devices = problem.graph, problem.devices
    described = {op.name: description(op, problem.on_missing_rule, devices, problem.uneven) for op in graph.ops}
    bounds = {name: bound for name, (_, bound, _) in described.items()}
    batch_dims = find_batch_dims(graph, bounds, pieces=True)
    decisions: dict[str, Decision] = {}
    for op in graph.ops:
        rule, bound, note = described[op.name]
        mark = op.mark
        if mark is not None and mark.in_strategy is not None:
            decisions[op.name] = marked_decision(op, rule, bound, devices, note)
        elif not rule.view and not is_float_cast(op):
            decisions[op.name] = _along_batch(op, rule, bound, devices, batch_dims, note)
        if mark is not None and mark.out_strategy is not None:
            decision = decisions.get(op.name) or _along_batch(op, rule, bound, devices, batch_dims, note)
            assignment = None if mark.in_strategy is None else decision.assignment
            decisions[op.name] = replace(decision, out=marked_output(op, bound, devices, assignment))
    _Views(graph, devices, problem.input_placement, described, decisions, batch_dims, problem.stored or {}).decide()
    return Decisions({op.name: decisions[op.name] for op in graph.ops}, find_batch_dims(graph, bounds))


def marked_decision(op: Op, rule: Rule, bound: Bound, devices: int, note: str | None = None) -> Decision:
    """The decision of a mark's in_strategy, checked and in normal form. The mark's entries are in the order of the
    user's call.

    Args:
        note: of the operator's rule.

    Raises:
        StrategyError, LayoutError: the operator cannot follow the mark; with the operator and its source line.
    """
    where = {
        "operator": op.name if op.kind in op.name else f"{op.name} ({op.kind})",
        "source": op.source or op.mark.source,
    }
    strategy = in_order(bound, op.mark.in_strategy, op.mark.order)
    try:
        assignment = assignment_of(bound, strategy, devices)
    except ShardwrightError as error:
        raise error.located(**where, strategy=op.mark.in_strategy) from None
    if ungathered_layouts(bound, strategy, devices) is not None:
        gathered = f"{op.name}: {strategy[:2]} gathers the contracted dim of both operands, and runs as "
        note = "; ".join(filter(None, (note, gathered + str(bound.in_strategy(assignment)[:2]))))
    return Decision(op, rule, bound, assignment, note=note)


def ungathered_parameters(problem: PlanningProblem) -> dict[str, Layout]:
    """The storage of parameters that are operands of a product whose mark gathers the contracted dim: they are stored
    as the mark cuts them, and gathered before their use.

    Raises:
        PlanError: two marks ask for a parameter in different layouts.
    """
    graph, devices = problem.graph, problem.devices
    found: dict[str, tuple[Layout, Op]] = {}
    for op in graph.ops:
        if op.mark is None or op.mark.in_strategy is None or not graph.parameters.keys() & {v.name for v in op.inputs}:
            continue
        _, bound, _ = description(op, problem.on_missing_rule, devices, problem.uneven)
        try:
            layouts = ungathered_layouts(bound, in_order(bound, op.mark.in_strategy, op.mark.order), devices)
        except ShardwrightError:  # the planner says what is wrong with the mark
            continue
        for value, layout in zip(op.inputs, layouts or ()):
            if value.name in graph.parameters and found.setdefault(value.name, (layout, op))[0] != layout:
                raise wanted_in_two(value, found[value.name], (layout, op))
    if problem.hsdp is None:
        return {name: layout for name, (layout, _) in found.items()}
    cut = stored_layouts({name: (graph.parameters[name], layout) for name, (layout, _) in found.items()}, problem.hsdp)
    return {name: sharding.layout for name, sharding in cut.items()}


def marked_output(op: Op, bound: Bound, devices: int, assignment: Assignment | None = None) -> tuple[Layout, ...]:
    """The layouts of a mark's out_strategy, checked.

    Args:
        assignment: of the mark's in_strategy, if it has one.

    Raises:
        StrategyError, LayoutError: the outputs cannot have these layouts; with the operator and its source line.
    """
    try:
        return output_layouts_of(bound, op.mark.out_strategy, devices, assignment)
    except ShardwrightError as error:
        raise error.located(
            operator=op.name if op.kind in op.name else f"{op.name} ({op.kind})",
            source=op.source or op.mark.source,
            strategy=f"out_strategy {op.mark.out_strategy}",
        ) from None


def _along_batch(
    op: Op, rule: Rule, bound: Bound, devices: int, batch_dims: dict[str, int], note: str | None
) -> Decision:
    assignment, reason = batch_assignment(op, bound, devices, batch_dims)
    cause = "batch" if any(assignment.digits) else "whole"
    return Decision(op, rule, bound, assignment, cause=cause, note=note or reason)


def batch_assignment(op: Op, bound: Bound, devices: int, batch_dims: dict[str, int]) -> tuple[Assignment, str | None]:
    """The batch factor cut by gcd(its size, devices), with replicas over the remaining devices; and a note for the
    report, or None."""
    factor = batch_factor(op, bound, batch_dims, pieces=True)
    if factor is None:
        return bound.whole(devices), None
    size = bound.factors[factor].size
    if not bound.factors[factor].splittable:
        return bound.whole(devices), f"{op.name}: {op.kind} cannot be cut along the batch: it runs whole everywhere"
    cut = math.gcd(size, devices)
    assignment = bound.cut_by(devices, {factor: allocate(devices, (cut,))[0]})
    if not bound.is_consistent(assignment):
        return bound.whole(devices), f"{op.name}: {op.kind} cannot be cut along the batch: it runs whole everywhere"
    if cut < devices:
        return assignment, (
            f"{op.name}: the batch of {size} is cut {cut} ways on {devices} devices; "
            f"{devices // cut} devices repeat the same work"
        )
    return assignment, None


class _Views:
    """Views follow: each view takes, among the layouts of its neighbours, the one with the least traffic."""

    def __init__(
        self,
        graph: Graph,
        devices: int,
        input_placement: InputPlacement,
        described: Mapping[str, tuple[Rule, Bound, str | None]],
        decisions: dict[str, Decision],
        batch_dims: dict[str, int],
        stored: Mapping[str, Layout],
    ) -> None:
        self.graph, self.devices, self.described, self.decisions = graph, devices, described, decisions
        self.batch_dims = batch_dims
        self.consumers = graph.consumers()
        self.demanded: dict[str, tuple[Layout, ...]] = {}
        self.layouts = {v.name: layout for v, layout in zip(graph.inputs, input_placement.inputs)}
        self.layouts.update({n: Layout.replicated(devices, len(v.shape)) for n, v in graph.buffers.items()})
        self.layouts.update({n: Layout.replicated(devices, t.dim()) for n, t in graph.constants.items()})
        for name in graph.parameters:
            fixed = stored.get(name) or next(
                (
                    self.decisions[op.name].input_layout(i)
                    for op, i in self.consumers.get(name, ())
                    if op.name in self.decisions
                ),
                None,
            )
            if fixed is not None:
                self.layouts[name] = fixed

    def decide(self) -> None:
        for op in self.graph.ops:
            if op.name not in self.decisions:
                self.decisions[op.name] = self.best(op)
            decision = self.decisions[op.name]
            for i, value in enumerate(v for v in op.outputs if v is not None):
                layout = decision.output_layout(i)
                if layout.reduction != "sum":
                    layout = layout.without_partial()
                if decision.cause == "follow" and op.inputs:
                    layout = layout.with_partial(self.passed(op, decision))
                self.layouts[value.name] = decision.out[i] if decision.out is not None else layout

    def passed(self, op: Op, decision: Decision) -> Digits:
        """The digits of the partial sum that passes through a view which follows its input."""
        came = self.layouts.get(op.inputs[0].name)
        if came is None or not came.partial or not decision.rule.is_linear(op) or len(op.inputs) > 1:
            return ()
        if decision.input_layout(0) != came.without_partial() or not beside(
            self.devices, came.partial + decision.assignment.used
        ):
            return ()
        return came.partial

    def best(self, op: Op) -> Decision:
        rule, bound, note = self.described[op.name]
        made = op.outputs[0]
        demands = self.demands(made)
        came = self.layouts.get(op.inputs[0].name) if op.inputs else None
        candidates: list[tuple[Assignment, str]] = []
        if came is not None:
            followed = bound.follow({0: came.without_partial()})
            if followed is not None:
                candidates.append((followed, "follow"))
        for demand in demands:
            followed = bound.follow({0: demand}, of_outputs=True)
            if followed is not None:
                candidates.append((followed, "follow"))
        along, reason = batch_assignment(op, bound, self.devices, self.batch_dims)
        candidates.append((along, "batch" if any(along.digits) else "whole"))
        candidates.append((bound.whole(self.devices), "whole"))

        def cost(candidate: tuple[Assignment, str]) -> float:
            decision = Decision(op, rule, bound, *candidate[:1], cause=candidate[1])
            total = 0.0
            output_layout = decision.output_layout(0)
            if came is not None:
                passed = self.passed(op, decision) if candidate[1] == "follow" else ()
                output_layout = output_layout.with_partial(passed)
                if not passed:
                    total += self.traffic(op.inputs[0], came, decision.input_layout(0))
            return total + (
                0.0 if made is None else sum(self.traffic(made, output_layout, demand) for demand in demands)
            )

        best = min(candidates, key=cost)
        return Decision(op, rule, bound, best[0], cause=best[1], note=note or (reason if best[0] == along else None))

    def traffic(self, value: Value, source: Layout, target: Layout) -> float:
        """Bytes that a rank sends in the forward and, where a gradient flows, in the backward."""
        fraction = redistribution(source, target).sent
        if value.requires_grad:
            fraction += redistribution(target.without_partial(), source.without_partial()).sent
        return float(fraction) * value.nbytes

    def demands(self, value: Value | None) -> tuple[Layout, ...]:
        """The layouts in which the consumers want a value. A consumer that is an undecided view is replaced by its
        own consumers, their layouts pulled back through the view."""
        if value is None:
            return ()
        if value.name not in self.demanded:
            found: dict[Layout, None] = {}
            for op, i in self.consumers.get(value.name, ()):
                if op.name in self.decisions:
                    found.setdefault(self.decisions[op.name].input_layout(i))
                elif i == 0:
                    bound = self.described[op.name][1]
                    pulled = (bound.follow({0: d}, of_outputs=True) for d in self.demands(op.outputs[0]))
                    input_layouts = (bound.input_layout(0, p) for p in pulled if p is not None)
                    found.update(
                        dict.fromkeys(input_layout for input_layout in input_layouts if input_layout is not None)
                    )
            self.demanded[value.name] = tuple(found)
        return self.demanded[value.name]
