"""A pipeline on processes: each rank has the stages of its group of devices, and nothing of the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..conversion_steps import digits_value
from ..graph import Value
from ..layout import Layout
from ..lower import Lowered, lower
from ..plan.pipelined import PipelinePlan, Stage
from ..torch_private import number_of_groups
from .buckets import GradientSums
from .fusion import Accumulation, Fusion
from .gradients import of_stage
from .init import Runtime
from .optimizers import set_empty_aside
from .parameters import Place, ShardedState
from .pipeline import PipelineProgram, StageBody
from .pipeline_link import Ranks
from .process_groups import ProcessGroups
from .processes import ProcessProgram

__all__ = ["process_pipeline"]


def process_pipeline(plan: PipelinePlan, holder: nn.Module, runtime: Runtime, before: Any, fusion: Fusion,
                     accumulation: Accumulation, broadcast: bool, compiled: str | None) -> PipelineProgram:
    """Put a plan on this rank; at the first time parameters come into being as slices.

    Args:
        holder: gives ``named_parameters`` and ``named_buffers`` under the graph's names.
        before: the model's earlier program, if there is one.
        fusion, accumulation: how gradients are summed.
        broadcast: whether parameters and buffers begin with the values of rank 0.
        compiled: the backend by which ``torch.compile`` compiles the stages' programs, or None.
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
        lowered = lower(stage.plan)
        body = ProcessProgram(lowered, groups, compiled, scatters=True, outside=stage.plan.gathered_once)
        sums = GradientSums(body.sums, body.types, groups, fusion, accumulation, followed=body.followed)
        leaves = held.leaves(holder, sums, set(lowered.parameters))
        body.attach(parameters)
        counts = None if stage.counts is None else _counting(lower(stage.counts), held, runtime)
        bodies[stage.number] = StageBody(
            stage, body, {n: leaves[n] for n in lowered.parameters}, {n: held.buffers[n] for n in lowered.buffers},
            [stage.plan.graph.constants[n].to(runtime.device) for n in lowered.constants], lowered.updates, counts,
            partial(_added, body, groups.rank), body.gathers)
    _make_even(runtime)
    link = Ranks(plan, runtime.rank, runtime.device, _shapes(plan))
    return PipelineProgram(plan, bodies, link, held, runtime.device, _absent(plan, held))


def _make_even(runtime: Runtime) -> None:
    """Let every rank have made as many process groups: torch names one whose members alone make it after their number,
    and members that have made unlike numbers, being of unlike stages, would wait for one another under unlike names."""
    made = torch.tensor([number_of_groups()], device=runtime.device)
    dist.all_reduce(made, dist.ReduceOp.MAX)
    if dist.get_backend() != "mpi":
        for _ in range(int(made) - number_of_groups()):
            dist.new_group([runtime.rank], use_local_synchronization=True)


def _state(plan: PipelinePlan, stages: tuple[Stage, ...], holder: nn.Module, runtime: Runtime, broadcast: bool
           ) -> ShardedState:
    """The parameters of this rank's stages."""
    first, size = stages[0].first, stages[0].devices
    groups = ProcessGroups(size, runtime.rank - first, base=first)
    lying = {name: p for name, p in plan.parameters.items()}
    mine = {stage.number for stage in stages}

    def place(name: str, whole: Tensor) -> Place | None:
        p = lying.get(name)
        if p is None:  # nobody uses it
            return Place(Layout.replicated(size, whole.dim()), groups)
        return Place(p.storage, groups) if p.stage in mine else None

    held = ShardedState(place, holder, groups, runtime.device, broadcast)
    for name, parameter in holder.named_parameters():
        if name in lying:
            of_stage(parameter, lying[name].stage in mine and not groups.rank)
    set_empty_aside(holder.tables[0][1], list(held.absent.values()))
    return held


def _counting(lowered: Lowered, held: ShardedState, runtime: Runtime) -> Callable[..., list[Tensor]]:
    """What counts targets, of the inputs that it reads."""
    constants = lowered.plan.graph.constants
    return partial(ProcessProgram(lowered, held.groups), *(held.buffers[n] for n in lowered.buffers),
                   *(constants[n].to(runtime.device) for n in lowered.constants))


def _absent(plan: PipelinePlan, held: ShardedState) -> list[nn.Parameter]:
    """The parameters of other stages that a loss reaches: they have empty gradients, so that all ranks have as many."""
    graph = plan.graph
    reached = {v.name for v in graph.outputs if isinstance(v, Value) and v.requires_grad}
    for op in reversed(graph.ops):
        if any(v is not None and v.name in reached and v.requires_grad for v in op.outputs):
            reached.update(v.name for v in op.inputs if v.requires_grad)
    return [p for name, p in held.absent.items() if name in graph.parameters and graph.parameters[name].name in reached]


def _shapes(plan: PipelinePlan) -> list[tuple[int, ...] | None]:
    """By output of the model, its shape on a rank once micro-batches are put together."""
    out: list[tuple[int, ...] | None] = [None] * len(plan.graph.outputs)
    for stage in plan.stages:
        for index, instance in zip(stage.results, stage.plan.routed.outputs):
            how, dim = plan.micro.joins[index]
            shape = list(instance.local_shape)
            if how == "cat":
                shape[dim] *= plan.micro_batches
            out[index] = tuple(shape)
    return out


def _added(body: ProcessProgram, rank: int, name: str, gradient: Tensor | None, part: Tensor) -> Tensor | None:
    """What a later stage owes a parameter is complete: of ranks whose terms are still to be summed, the first adds it."""
    if digits_value(body.sums.get(name, ()), rank):
        return gradient
    return part if gradient is None else gradient + part
