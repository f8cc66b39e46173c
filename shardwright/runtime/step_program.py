"""The step program: a planned model on its runtime, and the work of one call of it.

A call checks in with the other ranks (`begin`), draws the seed, runs the local program, writes new values into buffers
and inputs that the model changes, and builds the user's outputs. `make_program` chooses the runtime: one device, all
devices in one process, a process a rank, or a pipeline of either kind. `pipeline_step.PipelineProgram` has the same
interface for a plan with stages.

Example: a model of a linear layer and a batch norm, with a loss. A call runs the program, which returns the loss and
new values of 3 buffers, ``running_mean``, ``running_var`` and ``num_batches_tracked``; these are written into the
buffers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..capture.conditions import StridesAsked
from ..capture.guards import Guards
from ..capture.module_calls import ModelAndLoss
from ..capture.side_effects import Effects
from ..capture.source_lines import stack_level
from ..cost.communication_schedule import Fusion
from ..garbage_collection import gc_paused
from ..graph import Value
from ..layout import Layout
from ..pipeline.pipeline_plan import PipelinePlan
from ..process_runtime import Runtime, stream
from ..pytree_objects import closed, holds_objects
from ..sharded_plan import Plan
from .compilation import Compilation, keep_in_place
from .deferred_init import materialize, put_in_place
from .device_seed import NO_SEED, CompiledSeed, trace_random_numbers
from .distributed.parameter_hooks import with_rank_dim
from .local.local_executor import LocalExecutor, SingleDeviceExecutor
from .lowering import Lowered, lower
from .optimizer_guard import Accumulation
from .per_rank_values import handings, leading_on, put_back, shared, tensors_of
from .pipeline_step import PipelineProgram, local_pipeline
from .profile_ranges import step_range
from .saved_tensors import check_checkpointed

if TYPE_CHECKING:
    from .distributed.parameters import ShardedState

__all__ = ["StepProgram", "make_program"]


class StepProgram:
    """A planned model on a runtime: flattened inputs in, the user's outputs back.

    Attributes:
        plan: the plan.
        body: the runtime's own program: `SingleDeviceExecutor`, `LocalExecutor` or `RankExecutor`.
        sharded: the parameters of the processes runtime, for the model's next program; None in the local one.
        exact: True where random numbers belong to positions of whole tensors; False where they belong to operators
            and slices.
        begin: called at the begin of each call, or None.
        guards: the state of the model that the program was captured for.
        effects: the side effects of a call besides its result.
        strides: the forward's question for strides of its inputs.
    """

    def __init__(
        self,
        plan: Plan,
        body: Callable[..., list[Tensor]],
        state: list[Tensor],
        updated: list[Tensor],
        sharded: ShardedState | None = None,
        device: torch.device | None = None,
        mean: bool = False,
        seed: CompiledSeed = NO_SEED,
    ) -> None:
        self.plan, self.body, self.sharded, self.exact = plan, body, sharded, True
        self.begin: Callable[[], None] | None = None
        self.guards, self.effects, self.strides = Guards((), ()), Effects(), StridesAsked()
        self._draws = plan.program.seed is not None
        self._state, self._updated, self._device, self._seed = state, updated, device, seed
        self._outputs = plan.graph.outputs
        self._objects = holds_objects(plan.graph.out_spec)
        self._sole = (
            plan.graph.out_spec.is_leaf() and isinstance(plan.graph.outputs[0], Value) and not plan.graph.changed
        )
        #: For each input, the number of ranks whose own losses share its gradient.
        self._input_parts: list[int] = []
        if mean:
            stacked = plan.devices if plan.own is not None else 1
            self._input_parts = [
                layout.cuts[0] if stacked == 1 and layout.dims else stacked for layout in plan.input_placement.inputs
            ]
        if plan.own is not None:
            self._handings = handings(plan, sharded is not None, mean)
        else:
            parts = [
                i.layout.cuts[0] if mean and isinstance(o, Value) and i.layout.dims else 1
                for o, i in zip(plan.graph.outputs, plan.program.outputs)
            ]
            self._handings = [partial(shared, parts=n) if n > 1 else None for n in parts]

    def __call__(self, *leaves: object) -> object:
        if self._updated or self.effects.entries:
            check_checkpointed("updates its buffers" if self._updated else "counts, prints or sets attributes")
        if self.begin is not None:
            self.begin()
        originals, tensors = tensors_of(leaves, self.plan.graph.changed, self._device)
        if self._input_parts:
            tensors = [leading_on(x, parts) for x, parts in zip(tensors, self._input_parts)]
        if self._draws:
            seed = stream.draw(self.exact)
            device = self._seed.device
            tensors.insert(0, seed if device is None else seed.to(device, non_blocking=True))
        with step_range(self.plan, self.sharded):
            made = self._seed.around(self.body)(*self._state, *tensors)
        if self._sole and not self._updated:
            return _wrapper(made[0], self._handings[0])  # most often the loss: no tree to build
        results = iter(made)
        outputs = [
            _wrapper(next(results), handing) if isinstance(o, Value) else o
            for o, handing in zip(self._outputs, self._handings)
        ]
        if self._updated:
            with torch.no_grad():
                for buffer, value in zip(self._updated, results, strict=True):
                    buffer.copy_(value)
        put_back(originals, outputs, self.plan.graph.changed)
        result = self.plan.graph.result(outputs)
        return closed(result) if self._objects else result


def _wrapper(output: Tensor, handing: Callable[[Tensor], Tensor] | None) -> Tensor:
    return output if handing is None else handing(output)


@gc_paused()
def make_program(
    plan: Plan | PipelinePlan,
    holder: ModelAndLoss,
    runtime: Runtime,
    *,
    gradients_mean: bool,
    before: StepProgram | PipelineProgram | None,
    fusion: Fusion,
    accumulation: Accumulation,
    broadcast: bool = False,
    compiled: Compilation | None = None,
) -> StepProgram | PipelineProgram:
    """Lower a plan and put it on the runtime. With the model's first program, parameters are created as slices.

    Args:
        plan: the plan of a model or of a pipeline.
        holder: has ``named_parameters`` and ``named_buffers`` under the graph's names.
        runtime: the devices of this process, and whether there are others.
        gradients_mean: with the loss outside of the model and each rank feeding its own part: True where gradients
            are those of the mean of the ranks' losses, False for their sum.
        before: the model's earlier program, if there is one.
        fusion, accumulation: the way gradients are summed in processes.
        broadcast: in processes, True where parameters and buffers begin with the values of rank 0.
        compiled: the way ``torch.compile`` compiles the program; ignored with a warning where one
            process plays several devices.
    """
    if runtime.chosen and before is None:
        _move(holder, runtime.device)
    moved = runtime.device if runtime.chosen else None
    if isinstance(plan, PipelinePlan):
        if runtime.processes:
            from .distributed.agreement import counted  # noqa: PLC0415  processes alone use it
            from .pipeline_p2p import process_pipeline  # noqa: PLC0415  processes alone use it

            piped = process_pipeline(plan, holder, runtime, before, fusion, accumulation, broadcast, compiled)
            piped.begin = counted(plan)
            return piped
        if compiled:
            warnings.warn(
                "compile=True: one process plays all devices, operator by operator, and is not compiled",
                stacklevel=stack_level(),
            )
        piped = local_pipeline(plan, holder, runtime.device, before is None)
        piped.device = moved
        return piped
    lowered = lower(plan)
    single = plan.devices == 1 and (compiled or not plan.regions)
    of_ranks = runtime.processes and plan.devices > 1
    seed = NO_SEED
    if compiled and (single or of_ranks):
        seed = trace_random_numbers(lowered, runtime.device, runtime.rank if of_ranks else 0)
    if of_ranks:
        return _on_processes(
            lowered, holder, runtime, gradients_mean, before, fusion, accumulation, broadcast, compiled, seed
        )
    if before is None:
        materialize(holder, lambda name, old, whole: whole, runtime.device, real=False)
    named = dict(holder.named_parameters()) | dict(holder.named_buffers())
    state = [with_rank_dim(named[n]) for n in (*lowered.parameters, *lowered.buffers)]
    state += [plan.graph.constants[n].to(runtime.device) for n in lowered.constants]
    if compiled and not single:
        warnings.warn(
            "compile=True: one process plays all devices, operator by operator, and is not compiled",
            stacklevel=stack_level(),
        )
    body = SingleDeviceExecutor(lowered, compiled) if single else LocalExecutor(lowered)
    return StepProgram(plan, body, state, [named[n] for n in lowered.updates], device=moved, seed=seed)


def _move(holder: nn.Module, device: torch.device) -> None:
    """Move the parameters and buffers that have values to the device that the user has named for this process."""
    for tensor in (*holder.parameters(), *holder.buffers()):
        if not tensor.is_meta and tensor.device != device:
            put_in_place(tensor, tensor.detach().to(device))


def _on_processes(
    lowered: Lowered,
    holder: nn.Module,
    runtime: Runtime,
    gradients_mean: bool,
    before: StepProgram | PipelineProgram | None,
    fusion: Fusion,
    accumulation: Accumulation,
    broadcast: bool,
    compiled: Compilation | None,
    seed: CompiledSeed,
) -> StepProgram:
    # DTensor and the rest take a second to import: a program that runs in one process does without.
    from .distributed.agreement import counted  # noqa: PLC0415  processes alone use it
    from .distributed.gradient_sums import GradientSums  # noqa: PLC0415  imports DTensor
    from .distributed.parameters import ParameterPlacement as Place, ShardedState  # noqa: PLC0415  imports DTensor
    from .distributed.process_groups import ProcessGroups  # noqa: PLC0415  processes alone use it
    from .distributed.rank_executor import RankExecutor as ProcessProgram  # noqa: PLC0415  processes alone use it

    plan = lowered.plan
    sharded = before.sharded if before is not None else None
    if sharded is None:
        groups = ProcessGroups(plan.devices, runtime.rank)
        stored = {name: parameter.storage for name, parameter in plan.parameters.items()}
        sharded = ShardedState(
            lambda name, whole: Place(stored.get(name) or Layout.replicated(plan.devices, whole.dim()), groups),
            holder,
            groups,
            runtime.device,
            broadcast,
        )
    else:
        sharded.take_buffers(holder, runtime.device)
    parameters = dict(holder.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    schedule = plan.scheduled(not sharded.groups.exchanges, fusion, trained, stage=False)
    body = ProcessProgram(lowered, sharded.groups, schedule, compiled)
    leaves = sharded.leaves(
        holder,
        GradientSums(body.sums, body.types, sharded.groups, schedule, accumulation, body.scattered, body.followed),
    )
    body.attach(parameters)
    state = [leaves[n] for n in lowered.parameters] + [sharded.buffers[n] for n in lowered.buffers]
    state += [plan.graph.constants[n].to(runtime.device) for n in lowered.constants]
    if compiled:
        keep_in_place(state)
    program = StepProgram(
        plan,
        body,
        state,
        [sharded.buffers[n] for n in lowered.updates],
        sharded,
        runtime.device,
        gradients_mean and (plan.input_placement.per_rank_batch or plan.own is not None),
        seed,
    )
    program.begin = counted(plan)
    return program
