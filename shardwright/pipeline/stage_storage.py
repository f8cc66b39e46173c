"""The storage of a pipeline's parameters by its step in time: ``hsdp(optimizer_level="auto")``.

    whole       each parameter as its operators use it
    level1      in parts; gathered once a step, and gradients scattered once a step
    level2      in parts; gathered once a step, and gradients scattered after every micro-batch
    level3      in parts; gathered in each forward and each backward, and gradients scattered after every micro-batch

Each is in parts over all replicas of a stage, or over those within a unit of a level of links. All stages have the same
storage. Strategies and stages are planned under one storage (`SEARCHED`). The storages of that pipeline are then
compared by the step that runs: its schedule, with messages beside computation as each stage's own schedule of
communication says (`pipeline_plan.timeline_of`). The fastest one that fits into memory is taken.

Example: 4 micro-batches of one row on a slow network. By level3 a stage gathers its weights eight times a step, by
level1 once: level1 is faster, and level3 is taken only where the memory is too small for gathered weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..cluster import Cluster
from ..errors import PlanError
from ..layout import Layout
from ..partition.parameter_sharding import LEVELS, OptimizerParallel
from ..partition.partitioner import received_layout
from ..planners.plan_search import choose_storage, storages
from ..sharded_plan import Plan
from .pipeline_plan import PipelinePlan, Stage, timeline_of

__all__ = ["in_fastest_storage"]

#: The levels under which strategies and stages are planned: the second where nothing fits under the first.
SEARCHED = ("level1", "level3")


def in_fastest_storage(
    of: Callable[[OptimizerParallel | None], PipelinePlan],
    setting: OptimizerParallel,
    cluster: Cluster,
    memory: float | None,
    earlier: Sequence[PipelinePlan],
    settled: bool,
) -> PipelinePlan:
    """The pipeline with the storage of its parameters under which its step is fastest.

    Args:
        of: storage -> the pipeline that is planned under it.
        setting: the user's setting, whose level is "auto".
        cluster: of all devices.
        memory: bytes a device; None: no limit.
        earlier: plans of the same model at other sizes, the latest first: the latest plan's storage is kept where it
            fits.
        settled: True where the layouts of storage are fixed already.

    Raises:
        PlanError: no storage fits.
    """
    if earlier:
        before = earlier[0]
        previous = of(before.stages[0].plan.hsdp)
        if memory is None or previous.peak <= memory:
            return replace(previous, notes_of_its_own=before.notes_of_its_own)
    searched = replace(setting, optimizer_level=SEARCHED[0])
    try:
        found = of(searched)
    except PlanError:  # of stages="auto": no stages fit
        if memory is None:
            raise
        searched = replace(setting, optimizer_level=SEARCHED[1])
        found = of(searched)
    most = max(stage.devices for stage in found.stages)
    whole = next((p.hsdp.whole for stage in found.stages if (p := stage.plan).hsdp is not None), frozenset[str]())
    best, storage, note, _ = choose_storage(
        lambda each: stored_by(found, None if each is None else replace(each, whole=whole)),
        storages(setting, cluster, most, settled, LEVELS),
        lambda plan: timeline_of(plan, beside=True).total,
        lambda plan: plan.peak,
        memory,
    )
    if storage != searched:  # bounds were proved for the storage of the search
        best = replace(best, stages=tuple(replace(stage, plan=_without_bound(stage.plan)) for stage in best.stages))
    return replace(best, notes_of_its_own=(*best.notes_of_its_own, note))


def stored_by(plan: PipelinePlan, storage: OptimizerParallel | None) -> PipelinePlan:
    """The pipeline with its stages and strategies, and another storage of its parameters.

    Args:
        plan: the pipeline.
        storage: the storage; None is whole.

    Raises:
        SettingError: a number of replicas that does not divide those of a parameter.
    """
    stages: list[Stage] = []
    for stage in plan.stages:
        layouts: list[Layout] = []
        for source, layout in zip(stage.sources, stage.plan.input_placement.inputs):
            if source.kind == "input":
                layouts.append(layout)
                continue
            producer = stages[source.index]
            produced = (
                producer.outgoing(source.name).layout
                if source.kind == "stage"
                else producer.plan.program.parameters[source.name].layout
            )
            layouts.append(received_layout(produced, producer.devices, stage.devices))
        placement = replace(stage.plan.input_placement, inputs=tuple(layouts))
        made = replace(stage.plan, hsdp=storage, input_placement=placement)
        _ = made.program  # raises where the plan cannot be partitioned
        stages.append(replace(stage, plan=made))
    return replace(plan, stages=tuple(stages))


def _without_bound(plan: Plan) -> Plan:
    return plan if plan.found is None else replace(plan, found=replace(plan.found, bound=None))
