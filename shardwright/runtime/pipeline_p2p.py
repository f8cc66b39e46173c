"""A pipeline on processes: each rank has the stages of its group of devices, and nothing of the others.

`process_pipeline` builds the program of one rank; `pipeline_step.PipelineProgram` plays it. `stage_links` carries the
messages between ranks of different stages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..capture.export import ModelAndLoss
from ..cost.communication_schedule import Fusion
from ..graph import Value
from ..layout import Layout
from ..partition.local_program import Redistribute
from ..pipeline.pipeline_plan import PipelinePlan, Stage
from ..process import Runtime
from ..redistribution import digits_value
from ..torch_private import number_of_groups
from .compilation import Compilation, place_seed
from .distributed.buckets import GradientSums
from .distributed.gradients import of_stage
from .distributed.parameters import ParameterPlacement, ShardedState
from .distributed.process_groups import ProcessGroups
from .distributed.rank_executor import RankExecutor
from .lowering import Lowered, lower
from .optimizer_guard import Accumulation, set_empty_aside
from .pipeline_step import PipelineProgram, StageBody
from .stage_links import link_of

__all__ = ["process_pipeline"]


def process_pipeline(
    plan: PipelinePlan,
    holder: ModelAndLoss,
    runtime: Runtime,
    before: Any,
    fusion: Fusion,
    accumulation: Accumulation,
    broadcast: bool,
    compiled: Compilation | None,
) -> PipelineProgram:
    """Set up a pipeline's plan on this rank. With the model's first program, parameters are created as slices.

    Args:
        plan: the plan.
        holder: has ``named_parameters`` and ``named_buffers`` under the graph's names.
        runtime: this process and its rank.
        before: the model's earlier program, if there is one.
        fusion, accumulation: the way gradients are summed.
        broadcast: True where parameters and buffers begin with the values of rank 0.
        compiled: the way ``torch.compile`` compiles the stages' programs, or None.
    """
    stages = plan.of_rank(runtime.rank)
    _make_even(runtime)
    held: ShardedState | None = None if before is None else before.held
    if held is None:
        held = _state(plan, stages, holder, runtime, broadcast)
    else:
        held.take_buffers(holder, runtime.device)
    parameters = dict(holder.named_parameters())
    bodies = {}
    for stage in stages:
        groups = held.groups
        lowered = lower(stage.plan, plan)
        seed_device = place_seed(lowered, runtime.device) if compiled else None
        trained = [name for name, p in parameters.items() if name in lowered.parameters and p.requires_grad]
        schedule = stage.plan.scheduled(not groups.exchanges, fusion, trained, stage=True)
        outside = stage.plan.gathered_once
        body = RankExecutor(lowered, groups, schedule, compiled, scatters=True, outside=outside)
        sums = GradientSums(body.sums, body.types, groups, schedule, accumulation, followed=body.followed)
        leaves = held.leaves(holder, sums, set(lowered.parameters))
        body.attach(parameters)
        counts = None if stage.counts is None else _counting(lower(stage.counts), held, runtime)
        bodies[stage.number] = StageBody(
            stage,
            body,
            {n: leaves[n] for n in lowered.parameters},
            {n: held.buffers[n] for n in lowered.buffers},
            [stage.plan.graph.constants[n].to(runtime.device) for n in lowered.constants],
            lowered.updates,
            counts,
            partial(_added, body, groups.rank),
            body.gathers,
            _cut(stage, body),
            seed_device,
        )
    _make_even(runtime)
    link = link_of(plan, runtime.rank, runtime.device, _shapes(plan), getattr(before, "link", None))
    _make_even(runtime)  # a rank may have more neighbours than another one of its stage
    return PipelineProgram(plan, bodies, link, held, runtime.device, _absent(plan, held))


def _cut(stage: Stage, body: RankExecutor) -> frozenset[str]:
    """The gathered parameters whose gradients are scattered after every micro-batch."""
    moves = [i for i in stage.plan.program.instructions if isinstance(i, Redistribute)]
    return frozenset(
        i.source.value.name
        for i in moves
        if i.target.name in stage.plan.gathered_once and not stage.plan.once(i, back=True)
    ) & set(body.gathers)


def _make_even(runtime: Runtime) -> None:
    """Bring every rank to the same number of process groups.

    torch names a group after the number of groups so far; in torch 2.13 only one that its members alone make.
    Members from different stages that had made different numbers of groups would wait for one another under different
    names.
    """
    made = torch.tensor([number_of_groups()], device=runtime.device)
    dist.all_reduce(made, dist.ReduceOp.MAX)
    if dist.get_backend() != "mpi":
        for _ in range(int(made) - number_of_groups()):
            dist.new_group([runtime.rank], use_local_synchronization=True)


def _state(
    plan: PipelinePlan, stages: tuple[Stage, ...], holder: ModelAndLoss, runtime: Runtime, broadcast: bool
) -> ShardedState:
    """The parameters of this rank's stages."""
    first, size = stages[0].first, stages[0].devices
    groups = ProcessGroups(size, runtime.rank - first, base=first)
    lying = {name: p for name, p in plan.parameters.items()}
    mine = {stage.number for stage in stages}

    def place(name: str, whole: Tensor) -> ParameterPlacement | None:
        p = lying.get(name)
        if p is None:  # no stage uses it
            return ParameterPlacement(Layout.replicated(size, whole.dim()), groups)
        return ParameterPlacement(p.storage, groups) if p.stage in mine else None

    held = ShardedState(place, holder, groups, runtime.device, broadcast)
    for name, parameter in holder.named_parameters():
        if name in lying:
            of_stage(parameter, lying[name].stage in mine and not groups.rank)
    set_empty_aside(holder.tables[0][1], list(held.absent.values()))
    return held


def _counting(lowered: Lowered, held: ShardedState, runtime: Runtime) -> Callable[..., list[Tensor]]:
    """The program that counts targets, as a function of the inputs that it reads."""
    constants = lowered.plan.graph.constants
    return partial(
        RankExecutor(lowered, held.groups),
        *(held.buffers[n] for n in lowered.buffers),
        *(constants[n].to(runtime.device) for n in lowered.constants),
    )


def _absent(plan: PipelinePlan, held: ShardedState) -> list[nn.Parameter]:
    """The parameters of other stages that a loss reaches. They get empty gradients, so that all ranks have
    equally many."""
    graph = plan.graph
    reached = {v.name for v in graph.outputs if isinstance(v, Value) and v.requires_grad}
    for op in reversed(graph.ops):
        if any(v is not None and v.name in reached and v.requires_grad for v in op.outputs):
            reached.update(v.name for v in op.inputs if v.requires_grad)
    return [p for name, p in held.absent.items() if name in graph.parameters and graph.parameters[name].name in reached]


def _shapes(plan: PipelinePlan) -> list[tuple[int, ...] | None]:
    """The shape of each output of the model on a rank, once micro-batches are put together."""
    out: list[tuple[int, ...] | None] = [None] * len(plan.graph.outputs)
    for stage in plan.stages:
        for index, instance in zip(stage.results, stage.plan.program.outputs):
            how, dim = plan.micro.join(index)
            shape = list(instance.local_shape)
            if how == "cat":
                shape[dim] *= plan.micro_batches
            out[index] = tuple(shape)
    return out


def _added(body: RankExecutor, rank: int, name: str, gradient: Tensor | None, part: Tensor) -> Tensor | None:
    """The sum of a leaf's gradient and a later stage's part. The part is complete; where ranks' terms of the leaf are
    still to be summed, only the first rank adds it."""
    if digits_value(body.sums.get(name, ()), rank):
        return gradient
    return part if gradient is None else gradient + part
