"""A pipeline in one process: every stage's devices in lockstep, the stages in the order of the schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ..lower import Lowered, lower
from ..plan.pipelined import PipelinePlan
from ..plan.plan import Plan
from .deferred import materialize
from .local import LocalProgram
from .pipeline import Here, PipelineProgram, StageBody
from .single import SingleProgram

__all__ = ["local_pipeline"]


def local_pipeline(plan: PipelinePlan, holder: nn.Module, device: torch.device, first: bool) -> PipelineProgram:
    """Put a plan on this process.

    Args:
        holder: gives ``named_parameters`` and ``named_buffers`` under the graph's names.
        first: whether it is the model's first program: parameters may be without values.
    """
    if first:
        materialize(holder, lambda name, old, whole: whole, device, real=False)
    parameters, buffers = dict(holder.named_parameters()), dict(holder.named_buffers())
    bodies = {}
    for stage in plan.stages:
        lowered = lower(stage.plan)
        bodies[stage.number] = StageBody(
            stage, _body(lowered), {n: parameters[n] for n in lowered.parameters},
            {n: buffers[n] for n in lowered.buffers}, [stage.plan.graph.constants[n] for n in lowered.constants],
            lowered.updates, None if stage.counts is None else _counting(stage.counts, buffers), _added)
    return PipelineProgram(plan, bodies, Here(), parts=plan.parts)


def _body(lowered: Lowered) -> SingleProgram | LocalProgram:
    alone = lowered.plan.devices == 1 and not lowered.plan.regions
    return SingleProgram(lowered) if alone else LocalProgram(lowered)


def _counting(plan: Plan, buffers: dict[str, Tensor]) -> Callable[..., list[Tensor]]:
    """What counts targets, of the inputs that it reads."""
    lowered = lower(plan)
    return partial(_body(lowered), *(buffers[n] for n in lowered.buffers),
                   *(plan.graph.constants[n] for n in lowered.constants))


def _added(name: str, gradient: Tensor | None, part: Tensor) -> Tensor:
    return part if gradient is None else gradient + part
