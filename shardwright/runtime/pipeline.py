"""A pipeline at work: the actions of its schedule, played on the stages of this process.

    model(...)          every forward and backward of every micro-batch; the loss, put together
    loss.backward()     hands over the gradients that are there already, times the gradient of the loss

A stage's program computes on leaves that share the memory of the parameters: gradients of all micro-batches gather there.
Who sends, and how, is the `Link`'s: in one process all stages are here (`Here`), in processes the ranks of other groups
are written to (`pipeline_link`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..errors import SettingError
from ..graph import Value
from ..guards import Guards
from ..plan.pipelined import PipelinePlan, Stage, Transfer
from ..side_effects import Effects
from ..schedules import Schedule, forward_only
from ..torch_private import demand
from ..trees import closed, holds_objects
from .changed_inputs import kept_apart, put_back
from .freed import freed
from .pipeline_pieces import parts_of
from .pipeline_step import Step

__all__ = ["Here", "Link", "PipelineProgram", "StageBody"]


@dataclass
class StageBody:
    """One stage in this process.

    Attributes:
        stage: its plan.
        run: its program: parameters, buffers, constants, inputs in; outputs, then new values of buffers, out.
        parameters: leaves, in the program's order.
        buffers, constants: likewise.
        updates: which of the buffers get new values.
        counts: what counts targets, of the inputs of the model that it reads; or None.
        shared: adds what a further stage owes a parameter to the gradient of its leaf: (name, gradient so far, part) -> sum.
        gathers: parameter -> what brings it to its use, for those that micro-batches of a step share (`Plan.gathered_once`).
    """

    stage: Stage
    run: Callable[..., list[Tensor]]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    constants: list[Tensor]
    updates: tuple[str, ...]
    counts: Callable[..., list[Tensor]] | None
    shared: Callable[[str, Tensor | None, Tensor], Tensor]
    gathers: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)


class Link(Protocol):
    """How stages write to one another."""

    def send(self, transfer: Transfer, micro: int, back: bool, tensor: Tensor) -> None:
        """A value, or its gradient, of one micro-batch; micro −1: what is sent once a step."""

    def receive(self, transfer: Transfer, micro: int, back: bool) -> Tensor:
        """What was sent, or will be."""

    def begin(self, schedule: Schedule) -> None:
        """A step begins."""

    def finish(self, results: list[Tensor | None]) -> list[Tensor]:
        """The step is at its end: results of stages that are elsewhere, for None."""


class Here:
    """All stages are in this process."""

    def __init__(self) -> None:
        self._sent: dict[tuple, Tensor] = {}

    def begin(self, schedule: Schedule) -> None:
        self._sent.clear()

    def send(self, transfer: Transfer, micro: int, back: bool, tensor: Tensor) -> None:
        self._sent[transfer.name, transfer.target, micro, back] = tensor

    def receive(self, transfer: Transfer, micro: int, back: bool) -> Tensor:
        return self._sent.pop((transfer.name, transfer.target, micro, back))

    def finish(self, results: list[Tensor | None]) -> list[Tensor]:
        return list(results)


class _Given(torch.autograd.Function):
    """The loss of a step whose gradients are there: hands them over."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, step: Step, *leaves: Tensor) -> Tensor:
        ctx.step = step
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.step.taken(gradient)


class PipelineProgram:
    """A planned pipeline on a runtime: flattened inputs of the whole batch in, the user's outputs back.

    Args:
        plan: the plan.
        bodies: the stages of this process, by number.
        link: between stages.
        held: as of `Program`.
        device: to which inputs are brought; None: they are there.
        parts: for how many ranks of a stage this process feeds the batch, where each rank feeds its own part.
        absent: parameters of other stages, which are empty here, and are given empty gradients.

    Attributes:
        exact, begin, guards, effects: as of `Program`.
    """

    def __init__(self, plan: PipelinePlan, bodies: dict[int, StageBody], link: Link, held: Any = None,
                 device: torch.device | None = None, absent: Sequence[nn.Parameter] = (),
                 parts: int = 1) -> None:
        if any(action.kind == "I" for actions in plan.schedule.actions for action in actions):
            demand("stage_backward_input", "stage_backward_weight")
        self.plan, self.bodies, self.link, self.held, self.device = plan, bodies, link, held, device
        self.exact, self.absent = True, absent
        self.begin: Callable[[], None] | None = None
        self.guards, self.effects = Guards((), ()), Effects()
        self.fed_parts, self.made_parts = parts_of(plan, parts)
        self.forwards = forward_only(plan.schedule.placement, plan.micro_batches)
        outputs = plan.graph.outputs
        self.loss, self.why = _loss(plan)
        self._objects = holds_objects(plan.graph.out_spec)
        self._constants = [None if isinstance(v, Value) else v for v in outputs]
        # What each stage sends and receives, in the order of its outputs and inputs.
        self.outgoing = {s: {name: [t for t in plan.transfers if (t.kind, t.name, t.source) == ("value", name, s)]
                             for name in body.stage.sent} for s, body in bodies.items()}
        self.incoming = {s: [_transfer(plan, s, source) for source in body.stage.sources] for s, body in bodies.items()}
        groups = {plan.schedule.placement[s] for s in bodies}
        self.orders = {sched: tuple(a for a in sched.order if plan.schedule.placement[a.stage] in groups)
                       if len(groups) > 1 else sched.actions[next(iter(groups))]
                       for sched in (plan.schedule, self.forwards)}

    def __call__(self, *leaves: Any) -> Any:
        if self.begin is not None:
            self.begin()
        freed.step()
        tensors = given = [x for x in leaves if isinstance(x, Tensor)]
        if self.plan.graph.changed:
            tensors = kept_apart(given, self.plan.graph.changed)
        if self.device is not None:
            tensors = [x.to(self.device) for x in tensors]
        trains = torch.is_grad_enabled() and (self.loss is not None or self.why is not None)
        if trains:
            self.check()
        step = Step(self, tensors, trains)
        results = self.link.finish(step.run())
        if trains:
            leaves = [p for body in self.bodies.values() for p in body.parameters.values() if p.requires_grad]
            step.inputs_wanted = [x for x in tensors if x.requires_grad]
            results[self.loss] = _Given.apply(results[self.loss], step, *leaves, *step.inputs_wanted)
        outputs = [r if c is None else c for r, c in zip(results, self._constants)]
        put_back(given, outputs, self.plan.graph.changed)
        result = self.plan.graph.result(outputs)
        return closed(result) if self._objects else result

    def check(self) -> None:
        """That it can be trained.

        Raises:
            SettingError: it returns no loss, or several.
        """
        if self.why is not None:
            raise SettingError(f"a pipeline runs the backward with the forward: {self.why}",
                               legal="loss_fn in AutoParallel, or a model that returns one loss; for outputs alone, "
                                     "torch.no_grad()")


def _loss(plan: PipelinePlan) -> tuple[int | None, str | None]:
    """The index of the one output that is trained; and why none can be, if gradients would flow."""
    wanted = [i for i, v in enumerate(plan.graph.outputs) if isinstance(v, Value) and v.requires_grad]
    losses = [i for i in wanted if not plan.graph.outputs[i].shape and plan.micro.joins[i].how != "cat"]
    if not wanted or len(losses) == 1:
        return (losses[0] if losses else None), None
    return None, f"it returns {len(losses)} losses" if losses else "it returns no loss"


def _transfer(plan: PipelinePlan, stage: int, source: Any) -> Transfer | None:
    """The transfer by which an input of a stage comes; None: it is fed."""
    if source.kind == "input":
        return None
    kind = "value" if source.kind == "stage" else "parameter"
    return next(t for t in plan.transfers if (t.kind, t.name, t.source, t.target) == (kind, source.name, source.index, stage))
