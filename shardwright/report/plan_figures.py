"""The figures of a plan as JSON: seconds, bytes, and the plan in the field's words, for programs that read them.

1. `figures`: a plan: cost, bound, memory by kind, collectives, operators.
2. `operator_figures`: one operator: its parts and its alternatives. `module_figures`: the operators of a module.
3. `step_figures`: a step in time: the waiting of each group of ranks, and its memory.
4. `difference_figures`: two plans compared.

A number that is infinite or unknown is None. The tables in a terminal show the same figures.

Example: ``Linear(16, 32), ReLU, Linear(32, 8)`` with a batch of 32 rows, in data_parallel on 8 devices h100x8::

    {"cost": 9.07e-05, "bound": null, "sent": 5670, "memory": {"parameters": 3232.0, "gradients": 3232.0, …}, …}
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..cluster import Cluster
from ..json_files.json_reader import JsonObject
from ..operator_explanation import Alternative, Explanation, seconds_of
from ..pipeline.pipeline_plan import PipelinePlan, timeline_of
from ..pipeline.schedules import Schedule
from ..sharded_plan import Plan
from .description import describe
from .operator_names import OperatorNames
from .plan_diff import Difference, PlanChange, strategy_text

__all__ = ["difference_figures", "figures", "module_figures", "operator_figures", "ranks_of_groups", "step_figures"]


def figures(plan: Plan | PipelinePlan) -> dict[str, object]:
    """The figures of a plan.

    Returns:
        headline, words: the plan in the field's words. mode, devices, cluster, fingerprint. cost, bound: seconds of a
        step, as plans are compared; gap: in [0, 1]. elapsed: seconds of a step with messages beside computation; None
        for a pipeline. bubble: of a pipeline, in [0, 1]. peak, memory (by kind), sent: bytes of a device. collectives,
        operators: of a pipeline, those of one micro-batch, with their stage.
    """
    described, names = describe(plan), OperatorNames(plan)
    single = plan if isinstance(plan, Plan) else None
    return {
        "headline": described.headline,
        "words": list(described.body()),
        "mode": plan.mode,
        "devices": plan.devices,
        "cluster": Cluster.of(plan.cluster, plan.devices).name,
        "fingerprint": plan.fingerprint,
        "cost": _number(plan.cost),
        "bound": _number(single.bound) if single else None,
        "gap": _number(single.gap) if single else None,
        "elapsed": _number(single.price.elapsed) if single else None,
        "bubble": plan.simulation.bubble if isinstance(plan, PipelinePlan) else None,
        "peak": plan.peak,
        "memory": dict(single.timeline.kinds) if single else {},
        "sent": plan.sent,
        "collectives": [
            {"stage": stage, "kind": str(c.op), "ranks": list(c.ranks), "bytes": c.bytes, "sent": c.sent}
            | {"phase": str(c.phase), "operator": names.path(c.operator)}
            for stage, each in _plans(plan)
            for c in each.collectives(0)
        ],
        "operators": [_operator(each, name, names, stage) for stage, each in _plans(plan) for name in each.decisions],
    }


def module_figures(plan: Plan | PipelinePlan, operators: Sequence[str]) -> dict[str, object]:
    """The figures of some operators of a plan, such as those of a module.

    Args:
        plan: the plan.
        operators: their names.
    """
    names = OperatorNames(plan)
    found = [
        _operator(each, name, names, stage)
        for stage, each in _plans(plan)
        for name in operators
        if name in each.decisions
    ]
    return {"operators": found, "seconds": math.fsum(one["seconds"] for one in found)}


def operator_figures(explanation: Explanation) -> dict[str, object]:
    """The figures of an operator's explanation.

    Returns:
        Those of `figures`, and: parts: of its cost. cost: seconds of a step of this plan, and least: of the best plan
        in which the operator keeps its strategy, by the search's prices. bound: proved of all plans with an
        alternative; None: nothing was proved. exact: False where `least` and the totals of alternatives are lower
        bounds, never below `bound`. alternatives: other strategies, with the seconds of the best plan with each;
        better: True where a plan with one was found that takes less. missing: the reason why there are none.
    """
    plan, name = explanation.plan, explanation.decision.op.name
    return _operator(plan, name, OperatorNames(plan), explanation.stage) | {
        "parts": [
            {"what": s.what, "value": s.value, "other": s.other, "sends": list(s.sends)}
            | {"forward": s.forward, "backward": s.backward, "own": s.own}
            for s in explanation.shares
        ],
        "cost": _number(explanation.cost),
        "least": _number(explanation.least),
        "bound": _number(explanation.bound),
        "exact": explanation.exact,
        "limit": explanation.limit,
        "strategies": explanation.strategies,
        "alternatives": [_alternative(a) | {"better": explanation.is_better(a)} for a in explanation.alternatives],
        "missing": explanation.missing,
    }


def step_figures(plan: Plan | PipelinePlan) -> dict[str, object]:
    """The figures of a step in time, by group of ranks: seconds of work and of waiting, bytes at the peak."""
    made = timeline_of(plan)
    return {
        "seconds": made.total,
        "bubble": made.bubble,
        "elapsed": timeline_of(plan, beside=True).total if isinstance(plan, PipelinePlan) else plan.price.elapsed,
        "schedule": made.schedule.name,
        "stages": made.schedule.stages,
        "micro_batches": made.schedule.micro_batches,
        "groups": [
            {"ranks": list(members), "busy": made.busy(group), "waits": made.total - made.busy(group)}
            | {"peak": made.peak(group)}
            for group, members in enumerate(ranks_of_groups(plan, made.schedule))
        ],
    }


def ranks_of_groups(plan: Plan | PipelinePlan, schedule: Schedule) -> list[range]:
    """The ranks of each group of a schedule: of its stages, or all ranks of a plan without a pipeline."""
    if isinstance(plan, Plan):
        return [range(plan.devices)]
    return [plan.stages[schedule.placement.index(group)].ranks for group in range(schedule.groups)]


def difference_figures(found: Difference) -> dict[str, object]:
    """Two plans compared.

    Returns:
        equal. settings: a line for each that differs. operators, parameters: those that differ, those of equal layers
        together: change ("-": only in the first plan, "+": only in the second, "~": in both), path, names; before,
        after: strategy or storage, and seconds, as text, None where the plan has none.
    """
    return {
        "equal": found.equal,
        "settings": list(found.settings),
        "operators": list(map(_change, found.operators)),
        "parameters": list(map(_change, found.parameters)),
    }


def _change(one: PlanChange) -> dict[str, object]:
    texts = {"before": one.before or None, "after": one.after or None}
    return {"change": one.sign, "path": one.path.removeprefix("parameter "), "names": list(one.names), **texts}


def _plans(plan: Plan | PipelinePlan) -> list[tuple[int | None, Plan]]:
    return [(None, plan)] if isinstance(plan, Plan) else [(stage.number, stage.plan) for stage in plan.stages]


def _operator(plan: Plan, name: str, names: OperatorNames, stage: int | None) -> JsonObject:
    decision = plan.decisions[name]
    return {
        "name": name,
        "path": names.path(name),
        "stage": stage,
        "strategy": strategy_text(decision),
        "cause": decision.cause,
        "seconds": seconds_of(plan, (name,)),
    }


def _alternative(one: Alternative) -> dict[str, object]:
    return {
        "strategy": strategy_text(one.decision),
        "total": _number(one.total),
        "more": _number(one.more),
        "alone": _number(one.alone),
        "refused": one.refused,
    }


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
