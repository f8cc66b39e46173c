"""A rank's step in time with its measured seconds of computation: the same schedule of messages, over the same links.

    computing     each operator's seconds as they were measured; several instructions of one operator share them as the
                  plan's cost model does
    messages      as the cost model has them, issued and waited for as the plan's schedule says (`StepInTime`)
    exposed       seconds in which the computation waits for messages
    elapsed       computing + exposed + casts of redistributions, and in a pipeline the waiting for other stages

In a pipeline the other stages compute as many times as long as promised as the rank's own stages do together.

Example: the forward of an operator has two instructions, to which the plan promises 10 us and 30 us. Of 80 us measured,
the first one is given 20 us and the second one 60 us.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..cluster import Cluster
from ..cost.cost_model import CostModel, StepInTime, placed_values
from ..identity_tables import IdentityMap
from ..partition.local_program import Instruction, LocalOp, PlacedValue
from ..partition.rematerialization import BackwardStep, RecomputedInstruction
from ..pipeline.pipeline_plan import PipelinePlan, Stage, timeline_of
from ..sharded_plan import Plan

__all__ = ["RankStep", "promised_seconds", "step_of"]

#: Seconds of computation by (operator, "forward" or "backward").
Seconds = Mapping[tuple[str, str], float]


class RankStep(NamedTuple):
    """A step of one rank in time, in seconds.

    Attributes:
        exposed: the computation waits for messages.
        waiting: the rank waits for other stages; 0 without a pipeline.
        elapsed: the whole step.
    """

    exposed: float
    waiting: float
    elapsed: float


def step_of(plan: Plan | PipelinePlan, rank: int, measured: Seconds | None = None) -> RankStep:
    """A step of a rank.

    Args:
        plan: the plan.
        rank: in the world.
        measured: seconds of the rank's operators, of all micro-batches; None: as the cost model has them.
    """
    if isinstance(plan, Plan):
        step = plan.in_time if measured is None else _MeasuredCosts(plan, measured).in_time(plan, plan.schedule)
        return RankStep(step.exposed, 0.0, step.total)
    mine = {stage.number for stage in plan.of_rank(rank)}
    steps = {stage.number: (stage.plan.stage_in_time, stage.plan.stage_in_time_once) for stage in plan.stages}
    if measured is not None:
        promised = promised_seconds([stage.plan for stage in plan.stages if stage.number in mine], plan.micro_batches)
        ratio = sum(measured.values()) / (sum(promised.values()) or 1.0)
        steps = {stage.number: _measured(stage, plan.micro_batches, measured, ratio, mine) for stage in plan.stages}
    line = timeline_of(plan, beside=True, steps=steps)
    return RankStep(
        sum(_exposed(*steps[number], plan.micro_batches) for number in mine),
        line.total - line.busy(plan.schedule.placement[min(mine)]),
        line.total,
    )


def _exposed(each: StepInTime, once: StepInTime, micro_batches: int) -> float:
    """Seconds in which a stage waits for messages, in a step: in one micro-batch for those sent once a step, too."""
    return micro_batches * each.exposed + max(0.0, once.exposed - each.exposed)


def _measured(
    stage: Stage, micro_batches: int, measured: Seconds, ratio: float, mine: set[int]
) -> tuple[StepInTime, StepInTime]:
    """A micro-batch of a stage, and one with what is done once a step: with the measured seconds, or with `ratio` times
    the promised ones."""
    promised = promised_seconds([stage.plan], 1)
    each = (
        {key: measured.get(key, 0.0) / micro_batches for key in promised}
        if stage.number in mine
        else {key: seconds * ratio for key, seconds in promised.items()}
    )
    costs, schedule = _MeasuredCosts(stage.plan, each), stage.plan.stage_schedule
    return costs.in_time(stage.plan, schedule, once=False), costs.in_time(stage.plan, schedule)


def promised_seconds(plans: Sequence[Plan], micro_batches: int) -> dict[tuple[str, str], float]:
    """The seconds of computation by (operator, "forward" or "backward"), in program order."""
    out: dict[tuple[str, str], float] = {}
    for plan in plans:
        for _, key, seconds in _computed(plan):
            out[key] = out.get(key, 0.0) + seconds * micro_batches
    return out


def _computed(plan: Plan) -> Iterator[tuple[BackwardStep, tuple[str, str], float]]:
    """Yield the local operators that a plan runs: (instruction, (operator, half), seconds by the cost model)."""
    costs, known = CostModel(Cluster.of(plan.cluster, plan.devices), plan.devices), placed_values(plan.program)
    for entry in plan.program.instructions:
        if isinstance(entry, LocalOp):
            yield entry, (entry.operator, "forward"), costs.forward(entry, known)
    for step in plan.backward:
        ran = step.instruction if isinstance(step, RecomputedInstruction) else step
        if isinstance(ran, LocalOp):
            yield step, (ran.operator, "backward"), costs.backward(step, known)


class _MeasuredCosts(CostModel):
    """The cost model with measured seconds in place of those of a plan's operators.

    Args:
        plan: the plan; of a pipeline, that of a stage.
        measured: seconds of the operators.
    """

    def __init__(self, plan: Plan, measured: Seconds) -> None:
        super().__init__(Cluster.of(plan.cluster, plan.devices), plan.devices)
        computed, promised = [*_computed(plan)], promised_seconds([plan], 1)
        counts = Counter(key for _, key, _ in computed)
        self._measured = {half: IdentityMap[BackwardStep | Instruction, float]() for half in ("forward", "backward")}
        for entry, key, seconds in computed:
            share = seconds / promised[key] if promised[key] else 1 / counts[key]
            self._measured[key[1]][entry] = measured.get(key, 0.0) * share

    def forward(self, instruction: Instruction, known: Mapping[str, PlacedValue]) -> float:
        """Seconds of an instruction in the forward."""
        found = self._measured["forward"].get(instruction)
        return super().forward(instruction, known) if found is None else found

    def backward(self, instruction: BackwardStep, known: Mapping[str, PlacedValue]) -> float:
        """Seconds of an instruction in the backward."""
        found = self._measured["backward"].get(instruction)
        return super().backward(instruction, known) if found is None else found
