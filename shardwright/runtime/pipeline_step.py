"""One step of a pipeline: the actions of its schedule, played on the stages of this process.

    model(...)          runs every forward and every backward of every micro-batch; returns the loss, put together
    loss.backward()     hands over the gradients that exist already, times the gradient of the loss

1. Micro-batches (`parts_of`, `pieces`, `together`). Where a process feeds several ranks' parts of the batch,
   micro-batch k of m is the k-th of m pieces of every part, one after the other. Example: a batch of rows 0 to 7 in 2
   parts and 2 micro-batches: micro-batch 0 has rows 0, 1, 4, 5; micro-batch 1 has rows 2, 3, 6, 7.
2. One call (`PipelineStep`): a stage's program computes on leaves that share the memory of the parameters; the
   gradients of all micro-batches are summed in these leaves.
3. The program (`PipelineProgram`, `StageBody`), with the interface of `step_program.StepProgram`.
4. Links between stages (`StageLink`): `LocalStageLink` in one process, `pipeline_p2p.ProcessStageLink` among ranks.
5. A pipeline in one process (`local_pipeline`); `pipeline_p2p.process_pipeline` has a process a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from .. import torch_private
from ..capture.conditions import StridesAsked
from ..capture.guards import Guards
from ..capture.side_effects import Effects
from ..errors import SettingError
from ..graph import Value
from ..pipeline.pipeline_plan import PipelinePlan, Stage, Transfer
from ..pipeline.schedules import Action, Schedule, forward_only
from ..pipeline.stages import StageInput
from ..process_runtime import of_micro_batch, stream
from ..pytree_objects import closed, holds_objects
from ..sharded_plan import Plan
from ..torch_private import demand, is_view
from .deferred_init import materialize
from .distributed.rank_positions import position
from .local.local_executor import LocalExecutor, SingleDeviceExecutor
from .lowering import Lowered, lower
from .per_rank_values import put_back, tensors_of
from .profile_ranges import action_range, step_range
from .saved_tensors import check_checkpointed
from .second_derivatives import differentiated_once

if TYPE_CHECKING:
    from .distributed.parameters import ShardedState

__all__ = [
    "LocalStageLink",
    "PipelineProgram",
    "PipelineStep",
    "StageBody",
    "StageLink",
    "local_pipeline",
    "parts_of",
    "pieces",
    "together",
]

# -- micro-batches


def parts_of(plan: PipelinePlan, served_ranks: int) -> tuple[list[int], list[int]]:
    """The number of parts of the batch that this process has rows of: in each input, and in each output.

    Args:
        plan: the plan.
        served_ranks: for how many ranks of a stage this process feeds the batch (`parts` of `PipelineProgram`).
    """
    inputs, outputs = [plan.parts] * len(plan.split), [plan.parts] * len(plan.graph.outputs)
    for stage in plan.stages if served_ranks == 1 else ():  # one rank: its parts follow from the layouts
        for source, layout in zip(stage.sources, stage.plan.input_placement.inputs):
            if source.kind == "input" and source.index < len(inputs) and layout.dims:
                inputs[source.index] = max(1, plan.parts // layout.cuts[0])
        for index, made in zip(stage.results, stage.plan.program.outputs):
            how, dim = plan.micro.join(index)
            if how == "cat":
                outputs[index] = max(1, plan.parts // made.layout.cuts[dim])
    return inputs, outputs


def pieces(x: Tensor, count: int, parts: int) -> tuple[Tensor, ...]:
    """The `count` micro-batches of a batch of `parts` parts: micro-batch k has the k-th piece of each part."""
    if parts == 1:
        return x.chunk(count)
    return tuple(piece.flatten(0, 1) for piece in x.unflatten(0, (parts, count, -1)).unbind(1))


def together(made: Sequence[Tensor], dim: int, parts: int) -> Tensor:
    """The inverse of `pieces`, along dim `dim`."""
    if parts == 1:
        return torch.cat(list(made), dim)
    return torch.stack([piece.unflatten(dim, (parts, -1)) for piece in made], dim + 1).flatten(dim, dim + 2)


class PipelineStep:
    """One call of the model, with the state of its micro-batches."""

    def __init__(self, program: PipelineProgram, tensors: Sequence[Tensor], trains: bool) -> None:
        self.program, self.plan, self.trains = program, program.plan, trains
        self.count = self.plan.micro_batches
        self.input_parts = [
            pieces(x.detach(), self.count, parts) if split else (x.detach(),) * self.count
            for x, split, parts in zip(tensors, self.plan.split, program.batch_parts)
        ]
        self.wanted = [x.requires_grad and trains for x in tensors]
        self.stored = {s: self._stored(body) for s, body in program.bodies.items()}
        self.leaves: dict[int, Mapping[str, Tensor]] = {
            s: body.weights.begin_step(self.stored[s], trains) for s, body in program.bodies.items()
        }
        self.summed: dict[int, frozenset[str]] = {}  # by stage: the parameters whose gradients are summed over replicas
        self.seeds = self._seeds()
        self.shared: dict[tuple[int, str], Tensor] = {}  # parameters of earlier stages, by stage and name
        self.inputs: dict[tuple[int, int], list[Tensor]] = {}
        self.outputs: dict[tuple[int, int], list[Tensor]] = {}
        self.results: dict[int, list[Tensor]] = {}  # outputs of the model, by index
        self.updated: dict[tuple[int, str], Tensor] = {}  # new values of buffers that change once a step, so far
        self.weights: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]] | list[dict[str, Any]]] = {}  # 2nd halves
        self.input_gradients: dict[tuple[int, int], Tensor] = {}
        self.returned = False
        self.inputs_wanted: list[Tensor] = []  # the inputs of the call that take gradients

    def _stored(self, body: StageBody) -> dict[str, Tensor]:
        """Leaves on the memory of a stage's parameters."""
        return {n: p.detach().requires_grad_(p.requires_grad and self.trains) for n, p in body.parameters.items()}

    def _seeds(self) -> list[Tensor] | None:
        """One seed a micro-batch, derived from one draw a step; None where nothing random is computed."""
        if not self.plan.draws:
            return None
        seed = stream.draw(self.program.exact)
        return [of_micro_batch(seed, micro) for micro in range(self.count)]

    # -- the schedule --

    def run(self) -> list[Tensor | None]:
        """Play the schedule.

        Returns:
            The model's outputs, each put together; None for outputs of stages in other processes.
        """
        program = self.program
        schedule = self.plan.schedule if self.trains else program.forwards
        program.link.begin(schedule)
        for t in self._parameters():
            if t.source in program.bodies:
                program.link.send(t, -1, False, program.bodies[t.source].parameters[t.name].detach())
        program.link.exchange()
        for t in self._parameters():
            if t.target in program.bodies:
                got = program.link.receive(t, -1, False)
                self.shared[t.target, t.name] = got.requires_grad_(t.gradient and self.trains)
        self.totals = {s: self._totals(body) for s, body in program.bodies.items()}
        for action in program.orders[schedule]:
            with action_range(action):
                self._play(action)
            program.link.exchange()
        self._write_buffers()
        for s, body in program.bodies.items():
            self.summed[s] = body.weights.finish_step()
        self.leaves = dict(self.stored)
        if self.trains:
            self._share()
        return [self._joined(i) for i in range(len(self.plan.graph.outputs))]

    def _parameters(self) -> list[Transfer]:
        return [t for t in self.plan.transfers if t.kind == "parameter"]

    def _play(self, action: Action) -> None:
        if action.kind == "F":
            self._forward(action.stage, action.micro)
            return
        weights = self.program.bodies[action.stage].weights
        weights.begin_backward(action == self.program.last[action.stage])
        backward = {"B": self._backward, "I": self._backward_to_inputs, "W": self._backward_to_weights}[action.kind]
        backward(action.stage, action.micro)
        weights.end_backward()

    def _totals(self, body: StageBody) -> list[Tensor]:
        """The counts of targets, summed over all micro-batches."""
        if body.counts is None or body.stage.counts is None:
            return []
        names = [v.name for v in self.plan.graph.inputs]
        places = [names.index(v.name) for v in body.stage.counts.graph.inputs]
        with torch.no_grad():
            each = [body.counts(*(self.input_parts[i][k] for i in places)) for k in range(self.count)]
        return [sum(counted[1:], counted[0]) for counted in zip(*each)]

    def _forward(self, s: int, k: int) -> None:
        program, body = self.program, self.program.bodies[s]
        graph = body.stage.plan.graph
        inputs = []
        for _i, (value, source, transfer) in enumerate(zip(graph.inputs, body.stage.sources, program.incoming[s])):
            if transfer is None:
                x = (
                    self.input_parts[source.index][k]
                    if source.index < len(self.input_parts)
                    else self.totals[s][source.index - len(self.input_parts)]
                )
                takes_gradient = source.index < len(self.input_parts) and self.wanted[source.index]
            elif transfer.kind == "parameter":
                inputs.append(self.shared[s, transfer.name])
                continue
            else:
                x, takes_gradient = program.link.receive(transfer, k, False), value.requires_grad and self.trains
            inputs.append(x.detach().requires_grad_(takes_gradient))
        buffers = list(body.buffers.values())
        if body.updates and self.trains:
            buffers = [b.clone() for b in buffers]  # a forward's buffers must be unchanged in its backward
        seed = []
        if body.stage.plan.program.seed is not None:
            assert self.seeds is not None
            on_host, device = self.seeds[k], body.seed_device
            seed = [on_host if device is None else on_host.to(device, non_blocking=True)]
        with torch.set_grad_enabled(self.trains):
            made = body.run(*self.leaves[s].values(), *buffers, *body.constants, *seed, *inputs)
        outputs, updates = made[: len(graph.outputs)], made[len(graph.outputs) :]
        with torch.no_grad():
            for name, fresh in zip(body.updates, updates, strict=True):
                self._update(s, name, fresh)
        for index, out in zip(body.stage.results, outputs):
            self.results.setdefault(index, []).append(out.detach())
        for name, out in zip(body.stage.sent, outputs[len(body.stage.results) :]):
            for transfer in program.outgoing[s][name]:
                program.link.send(transfer, k, False, out.detach())
        if self.trains:
            self.inputs[s, k], self.outputs[s, k] = inputs, outputs

    def _update(self, s: int, name: str, value: Tensor) -> None:
        """Write a micro-batch's new value of a buffer, or collect it until the step ends."""
        join = self.plan.micro.updates.get(name)
        if join is None:
            self.program.bodies[s].buffers[name].copy_(value)
            return
        before = None if join.how == "same" else self.updated.get((s, name))
        self.updated[s, name] = value if before is None else before + value

    def _write_buffers(self) -> None:
        """Write the new values of buffers that change once a step."""
        with torch.no_grad():
            for (s, name), value in self.updated.items():
                mean = self.plan.micro.updates[name].how == "mean"
                self.program.bodies[s].buffers[name].copy_(value / self.count if mean else value)

    # -- backward --

    def _owed(self, s: int, k: int) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs of a forward that receive gradients, and the gradients."""
        program, body = self.program, self.program.bodies[s]
        outputs, gradients = [], []
        made = self.outputs.pop((s, k))
        for index, out in zip(body.stage.results, made):
            if index == program.loss:
                outputs.append(out)
                share = 1 if self.plan.micro.join(index).how == "sum" else self.count
                gradients.append(torch.full_like(out, 1 / share))
        for name, out in zip(body.stage.sent, made[len(body.stage.results) :]):
            came = [program.link.receive(t, k, True) for t in program.outgoing[s][name] if t.gradient]
            if came and out.requires_grad:
                outputs.append(out)
                gradients.append(sum(came[1:], came[0]))
        return outputs, gradients

    def _trained(self, s: int) -> list[Tensor]:
        """The leaves of a stage that sum gradients over all micro-batches."""
        shared = (x for (stage, _), x in self.shared.items() if stage == s)
        return [x for x in (*self.leaves[s].values(), *shared) if x.requires_grad]

    def _read(self, s: int, k: int) -> list[Tensor]:
        """The inputs of a forward that need gradients of this micro-batch alone."""
        shared = set(self.shared.values())
        return [x for x in self.inputs[s, k] if x.requires_grad and x not in shared]

    def _backward(self, s: int, k: int) -> None:
        outputs, gradients = self._owed(s, k)
        if outputs:
            torch.autograd.backward(outputs, gradients, inputs=[*self._read(s, k), *self._trained(s)])
        self._return(s, k)

    def _backward_to_inputs(self, s: int, k: int) -> None:
        outputs, gradients = self._owed(s, k)
        read = self._read(s, k)
        if self.program.bodies[s].weights_with_inputs:
            torch.autograd.backward(outputs, gradients, inputs=[*read, *self._trained(s)])
        elif read and outputs:
            with torch.enable_grad():  # torch detaches outputs in place, which is an error for views
                outputs = [o.clone() if is_view(o) else o for o in outputs]
            # torch marks the nodes where the paths to weights leave the paths to inputs, so that nothing is computed
            # twice.
            _, self.weights[s, k] = torch_private.stage_backward_input(outputs, gradients, read, iter(self._trained(s)))
        else:
            self.weights[s, k] = outputs, gradients
        self._return(s, k)

    def _backward_to_weights(self, s: int, k: int) -> None:
        waiting = self.weights.pop((s, k), None)
        if isinstance(waiting, tuple):
            outputs, gradients = waiting
            if outputs:
                torch.autograd.backward(outputs, gradients, inputs=self._trained(s))
        elif waiting is not None:
            weights = self.program.bodies[s].weights
            weights.second_half(True)
            for group, trained, names in self._groups(s, waiting):
                torch_private.stage_backward_weight(iter(trained), [group])
                weights.came(names)
            weights.second_half(False)

    def _groups(self, s: int, groups: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[Tensor], list[str]]]:
        """Yield the groups of weights whose gradients are computed together, the tensors of each and the names of the
        stage's own weights among them; the last used first, in an order that all ranks share."""
        trained = self._trained(s)
        named = [name for name, x in self.leaves[s].items() if x.requires_grad]
        number = {torch.autograd.graph.get_gradient_edge(x).node: i for i, x in enumerate(trained)}
        of = [(sorted(number[node] for node in group["params"]), group) for group in groups]
        for places, group in sorted(of, key=lambda entry: entry[0], reverse=True):
            yield group, [trained[i] for i in places], [named[i] for i in places if i < len(named)]

    def _return(self, s: int, k: int) -> None:
        """Send the gradients of a forward's inputs to their producers."""
        body = self.program.bodies[s]
        for x, source, transfer in zip(self.inputs.pop((s, k)), body.stage.sources, self.program.incoming[s]):
            if transfer is None:
                if x.grad is not None:
                    before = self.input_gradients.get((source.index, k))
                    self.input_gradients[source.index, k] = x.grad if before is None else before + x.grad
            elif transfer.kind == "value" and transfer.gradient:
                self.program.link.send(transfer, k, True, torch.zeros_like(x) if x.grad is None else x.grad)

    def _share(self) -> None:
        """Send gradients of shared parameters from later stages to the stage that owns them."""
        program = self.program
        due = [t for t in self._parameters() if t.gradient]
        for t in due:
            if t.target in program.bodies:
                x = self.shared[t.target, t.name]
                program.link.send(t, -1, True, torch.zeros_like(x) if x.grad is None else x.grad)
        program.link.exchange()
        for t in due:
            if t.source in program.bodies:
                leaf, weights = self.leaves[t.source][t.name], program.bodies[t.source].weights
                part = program.link.receive(t, -1, True)
                leaf.grad = weights.with_part(t.name, leaf.grad, part, t.name in self.summed[t.source])

    # -- outputs and gradients of the step --

    def _joined(self, index: int) -> Tensor | None:
        made = self.results.get(index)
        if made is None:
            return None
        how, dim = self.plan.micro.join(index)
        if how == "cat":
            return together(made, dim, self.program.made_parts[index])
        if how == "same":
            return made[-1]
        total = sum(made[1:], made[0])
        return total / self.count if how == "mean" else total

    def taken(self, gradient: Tensor) -> list[Tensor | None]:
        """The gradients of all leaves and of the inputs that want one, times `gradient`, that of the loss. Callable
        once.

        Raises:
            SettingError: a second call.
        """
        if self.returned:
            raise SettingError(
                "the backward of a pipeline's loss for a second time: its gradients have been handed over",
                legal="one backward for each call of the model",
            )
        self.returned = True
        # The usual gradient of a loss is 1; on other devices than the host `item` would wait.
        plain = gradient.device.type == "cpu" and gradient.item() == 1
        out: list[Tensor | None] = []
        for s, leaves in self.leaves.items():
            for name, leaf in leaves.items():
                if leaf.grad is not None and name in self.summed[s]:
                    self.program.bodies[s].weights.hand(name, leaf.grad if plain else leaf.grad.mul_(gradient))
                    leaf.grad = None
            out += [leaf.grad for leaf in leaves.values() if leaf.requires_grad]
        for i, wanted in enumerate(self.wanted):
            if wanted:
                came = [self.input_gradients.get((i, k)) for k in range(self.count)]
                parts = [torch.zeros_like(self.input_parts[i][k]) if g is None else g for k, g in enumerate(came)]
                out.append(
                    together(parts, 0, self.program.batch_parts[i]) if self.plan.split[i] else sum(parts[1:], parts[0])
                )
        out = out or [None]  # see `PipelineProgram`: a process that trains nothing of its own
        self.leaves.clear()
        if self.program.absent:
            from .distributed.gradient_tensors import hand_nothing  # noqa: PLC0415  imports DTensor

            for parameter in self.program.absent:
                hand_nothing(parameter)
        if plain:
            return out
        with torch.no_grad():
            return [None if g is None else g.mul_(gradient) for g in out]


# -- the program, its stages and the links between them


@dataclass
class StageBody:
    """One stage in this process.

    Attributes:
        stage: its plan.
        run: its program: parameters, buffers, constants, inputs in; outputs, then new values of buffers, out.
        parameters: leaves by name, in the program's order.
        buffers, constants: likewise.
        updates: names of the buffers that get new values.
        counts: a function of the model's inputs that counts targets; None where the stage needs no counts.
        weights: the leaves of a step, and what is done with their gradients.
        seed_device: the device on which the program takes its seed; None: host memory.
    """

    stage: Stage
    run: Callable[..., list[Tensor]]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    constants: list[Tensor]
    updates: tuple[str, ...]
    counts: Callable[..., list[Tensor]] | None
    weights: WeightsOfStage
    seed_device: torch.device | None = None

    @property
    def weights_with_inputs(self) -> bool:
        """True where a backward to the inputs computes all: of recomputed values, and with old versions of torch."""
        return bool(self.stage.plan.regions) or not torch_private.backward_can_start_at_functions()


class WeightsOfStage(Protocol):
    """The weights of a stage in one step after the other: `distributed.stage_weights.StageWeights`, which says more."""

    def begin_step(self, stored: Mapping[str, Tensor], trains: bool) -> Mapping[str, Tensor]:
        """Begin a step: leaves as stored -> leaves that the program computes on."""

    def begin_backward(self, last: bool) -> None:
        """Begin the backward of a micro-batch, possibly the last one that computes gradients of weights."""
        return None

    def second_half(self, runs: bool) -> None:
        """Say that the second half of a backward in two begins, or has ended."""
        return None

    def came(self, names: Iterable[str]) -> None:
        """Note that gradients of weights have come."""
        return None

    def end_backward(self) -> None:
        """End the backward of a micro-batch."""
        return None

    def finish_step(self) -> frozenset[str]:
        """End the step: the leaves as stored have the gradients. The names of those summed over replicas are
        returned."""

    def hand(self, name: str, gradient: Tensor) -> None:
        """Hand a summed gradient over to its parameter."""
        return None

    def with_part(self, name: str, gradient: Tensor | None, part: Tensor, summed: bool) -> Tensor | None:
        """The sum of a leaf's gradient and a later stage's part of it."""


class WholeWeights(WeightsOfStage):
    """Those of a stage whose ranks are all in this process: the leaves are the parameters."""

    def begin_step(self, stored: Mapping[str, Tensor], trains: bool) -> Mapping[str, Tensor]:
        return stored

    def finish_step(self) -> frozenset[str]:
        return frozenset()

    def with_part(self, name: str, gradient: Tensor | None, part: Tensor, summed: bool) -> Tensor | None:
        return part if gradient is None else gradient + part


class StageLink(Protocol):
    """The messages between stages."""

    def send(self, transfer: Transfer, micro: int, back: bool, tensor: Tensor) -> None:
        """Send a value, or its gradient (`back`), of one micro-batch; micro −1: a message sent once a step."""

    def receive(self, transfer: Transfer, micro: int, back: bool) -> Tensor:
        """The tensor that the other stage sent, or will send; arguments as of `send`."""

    def exchange(self) -> None:
        """End a position of the schedule: before the first action, after each action, and last after the gradients of
        shared parameters. What the position sends has been given to `send`."""

    def begin(self, schedule: Schedule) -> None:
        """Begin a step."""

    def finish(self, results: list[Tensor | None]) -> list[Tensor | None]:
        """End the step; return all outputs, those of stages elsewhere too; None for constants."""


class LocalStageLink:
    """The link where all stages are in this process."""

    def __init__(self) -> None:
        self._sent: dict[tuple[object, ...], Tensor] = {}

    def begin(self, schedule: Schedule) -> None:
        self._sent.clear()

    def send(self, transfer: Transfer, micro: int, back: bool, tensor: Tensor) -> None:
        self._sent[transfer.name, transfer.target, micro, back] = tensor

    def receive(self, transfer: Transfer, micro: int, back: bool) -> Tensor:
        return self._sent.pop((transfer.name, transfer.target, micro, back))

    def exchange(self) -> None:
        pass

    def finish(self, results: list[Tensor | None]) -> list[Tensor | None]:
        return list(results)


class _ReturnedResult(torch.autograd.Function):
    """The loss of a step whose gradients exist already; its backward hands them over."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, step: PipelineStep, *leaves: Tensor) -> Tensor:
        ctx.step = step
        return loss.view_as(loss)

    @staticmethod
    @differentiated_once("the loss of a pipeline", "the model without a pipeline")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        position.back = True
        return None, None, *ctx.step.taken(gradient)


class PipelineProgram:
    """A planned pipeline on a runtime: flattened inputs of the whole batch in, the user's outputs back.

    Args:
        plan: the plan.
        bodies: the stages of this process, by number.
        link: between stages.
        sharded: as in `StepProgram`.
        device: where inputs are moved to; None: they are there already.
        parts: for how many ranks of a stage this process feeds the batch, where each rank feeds its own part.
        absent: parameters of other stages, which are empty here, and get empty gradients.

    Attributes:
        exact, begin, guards, effects, strides: as in `StepProgram`.
        last: by stage, the last action that computes gradients of its weights.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        bodies: dict[int, StageBody],
        link: StageLink,
        sharded: ShardedState | None = None,
        device: torch.device | None = None,
        absent: Sequence[nn.Parameter] = (),
        parts: int = 1,
    ) -> None:
        if any(action.kind == "I" for actions in plan.schedule.actions for action in actions):
            demand("stage_backward_input", "stage_backward_weight")
        self.plan, self.bodies, self.link, self.sharded, self.device = plan, bodies, link, sharded, device
        self.exact, self.absent = True, absent
        self.begin: Callable[[], None] | None = None
        self.guards, self.effects, self.strides = Guards((), ()), Effects(), StridesAsked()
        self.batch_parts, self.made_parts = parts_of(plan, parts)
        self.forwards = forward_only(plan.schedule.placement, plan.micro_batches)
        outputs = plan.graph.outputs
        self.loss, self.why = _loss(plan)
        self._objects = holds_objects(plan.graph.out_spec)
        self._constants = [None if isinstance(v, Value) else v for v in outputs]
        # The transfers of each stage, in the order of its outputs and inputs.
        self.outgoing = {
            s: {
                name: [t for t in plan.transfers if (t.kind, t.name, t.source) == ("value", name, s)]
                for name in body.stage.sent
            }
            for s, body in bodies.items()
        }
        self.incoming = {s: [_transfer(plan, s, source) for source in body.stage.sources] for s, body in bodies.items()}
        groups = {plan.schedule.placement[s] for s in bodies}
        self.orders = {
            sched: tuple(a for a in sched.order if plan.schedule.placement[a.stage] in groups)
            if len(groups) > 1
            else sched.actions[next(iter(groups))]
            for sched in (plan.schedule, self.forwards)
        }
        of_weights = {s: "BI" if body.weights_with_inputs else "BW" for s, body in bodies.items()}
        self.last = {a.stage: a for a in self.orders[plan.schedule] if a.kind in of_weights[a.stage]}

    def __call__(self, *leaves: object) -> object:
        check_checkpointed("runs its backward in the call, as a pipeline does")
        if self.begin is not None:
            self.begin()
        originals, tensors = tensors_of(leaves, self.plan.graph.changed, self.device)
        trains = torch.is_grad_enabled() and (self.loss is not None or self.why is not None)
        if trains:
            self.check()
        with step_range(self.plan, self.sharded):
            step = PipelineStep(self, tensors, trains)
            results = self.link.finish(step.run())
        position.back = False  # the ranks of some stages have waited in the step's backward; the loss's is to come
        if trains:
            assert self.loss is not None  # `check` has refused all others
            trained = [p for body in self.bodies.values() for p in body.parameters.values() if p.requires_grad]
            step.inputs_wanted = [x for x in tensors if x.requires_grad]
            # Without any, all that this process trains belongs to another stage.
            trained = trained + step.inputs_wanted or [torch.zeros((), requires_grad=True)]
            results[self.loss] = _ReturnedResult.apply(results[self.loss], step, *trained)
        outputs = [r if c is None else c for r, c in zip(results, self._constants)]
        put_back(originals, outputs, self.plan.graph.changed)
        result = self.plan.graph.result(outputs)
        return closed(result) if self._objects else result

    def check(self) -> None:
        """Refuse a plan that cannot be trained.

        Raises:
            SettingError: the model returns no loss, or several.
        """
        if self.why is not None:
            raise SettingError(
                f"a pipeline runs the backward with the forward: {self.why}",
                legal="loss_fn in AutoParallel, a model that returns one loss, or in a step function "
                "sw.value_and_grad of a function that returns it; for outputs alone, torch.no_grad()",
            )


def _loss(plan: PipelinePlan) -> tuple[int | None, str | None]:
    """The index of the one output that is trained, and the reason why none can be, where gradients would flow."""
    wanted = [i for i, v in enumerate(plan.graph.outputs) if isinstance(v, Value) and v.requires_grad]
    losses = [i for i in wanted if not plan.graph.outputs[i].shape and plan.micro.join(i).how != "cat"]
    if not wanted or len(losses) == 1:
        return (losses[0] if losses else None), None
    return None, f"it returns {len(losses)} losses" if losses else "it returns no loss"


def _transfer(plan: PipelinePlan, stage: int, source: StageInput) -> Transfer | None:
    """The transfer that brings an input of a stage; None where the input is fed."""
    if source.kind == "input":
        return None
    kind = "value" if source.kind == "stage" else "parameter"
    return next(
        t for t in plan.transfers if (t.kind, t.name, t.source, t.target) == (kind, source.name, source.index, stage)
    )


# -- a pipeline in one process


def local_pipeline(plan: PipelinePlan, holder: nn.Module, device: torch.device, first: bool) -> PipelineProgram:
    """Run a pipeline's plan in this process.

    Args:
        plan: the plan.
        holder: has ``named_parameters`` and ``named_buffers`` under the graph's names.
        device: of this process.
        first: True for the model's first program: parameters may be without values.
    """
    if first:
        materialize(holder, lambda name, old, whole: whole, device, real=False)
    parameters, buffers = dict(holder.named_parameters()), dict(holder.named_buffers())
    bodies = {}
    for stage in plan.stages:
        lowered = lower(stage.plan, plan)
        bodies[stage.number] = StageBody(
            stage,
            _body(lowered),
            {n: parameters[n] for n in lowered.parameters},
            {n: buffers[n] for n in lowered.buffers},
            [stage.plan.graph.constants[n].to(device) for n in lowered.constants],
            lowered.updates,
            None if stage.counts is None else _counting(stage.counts, buffers, device),
            WholeWeights(),
        )
    return PipelineProgram(plan, bodies, LocalStageLink(), parts=plan.parts)


def _body(lowered: Lowered) -> SingleDeviceExecutor | LocalExecutor:
    alone = lowered.plan.devices == 1 and not lowered.plan.regions
    return SingleDeviceExecutor(lowered) if alone else LocalExecutor(lowered)


def _counting(plan: Plan, buffers: dict[str, Tensor], device: torch.device) -> Callable[..., list[Tensor]]:
    """The program that counts targets, as a function of the inputs that it reads."""
    lowered = lower(plan)
    return partial(
        _body(lowered),
        *(buffers[n] for n in lowered.buffers),
        *(plan.graph.constants[n].to(device) for n in lowered.constants),
    )
