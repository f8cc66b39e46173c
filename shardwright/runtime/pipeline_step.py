"""One step of a pipeline: the actions of its schedule, played on the stages of this process.

    model(...)          runs every forward and every backward of every micro-batch; returns the loss, put together
    loss.backward()     hands over the gradients that exist already, times the gradient of the loss

1. Micro-batches (`parts_of`, `pieces`, `together`). Where a process feeds several ranks' parts of the batch,
   micro-batch k of m is the k-th of m pieces of every part, one after the other. Example: a batch of rows 0 to 7 in 2
   parts and 2 micro-batches: micro-batch 0 has rows 0, 1, 4, 5; micro-batch 1 has rows 2, 3, 6, 7.
2. One call (`PipelineStep`): a stage's program computes on leaves that share the memory of the parameters; the
   gradients of all micro-batches are summed in these leaves.
3. The program (`PipelineProgram`, `StageBody`), with the interface of `step_program.StepProgram`.
4. Links between stages (`StageLink`): `LocalStageLink` where all stages are in one process,
   `pipeline_p2p.ProcessStageLink` where ranks send to the ranks of other stages.
5. A pipeline in one process (`local_pipeline`): every stage's devices in lockstep, the stages in the order of the
   schedule. `pipeline_p2p.process_pipeline` is its counterpart with a process a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .. import torch_private
from ..capture.guards import Guards
from ..capture.side_effects import Effects
from ..errors import SettingError
from ..graph import Value
from ..pipeline.pipeline_plan import PipelinePlan, Stage, Transfer
from ..pipeline.schedules import Action, Schedule, forward_only
from ..process import of_micro_batch, stream
from ..pytree_objects import closed, holds_objects
from ..sharded_plan import Plan
from ..torch_private import demand, is_view
from .deferred_init import materialize
from .distributed.rank_positions import position
from .local.local_executor import LocalExecutor, SingleDeviceExecutor
from .lowering import Lowered, lower
from .per_rank_values import put_back, tensors_of
from .profile_ranges import action_range, gather_text, range_of, scatter_text, step_range

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
    alone = served_ranks == 1  # one rank: its parts follow from the layouts
    inputs, outputs = [plan.parts] * len(plan.split), [plan.parts] * len(plan.graph.outputs)
    for stage in plan.stages if alone else ():
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
        self.gathered: dict[tuple[int, str], Tensor] = {}  # by stage and name: leaves as stored, of gathered parameters
        self.owed: dict[tuple[int, str], Tensor] = {}  # their gradients so far: layout as used, type as stored
        self.leaves = {
            s: {n: self._leaf(s, n, p) for n, p in body.parameters.items()} for s, body in program.bodies.items()
        }
        self.seeds = self._seeds()
        self.shared: dict[tuple[int, str], Tensor] = {}  # parameters of earlier stages, by stage and name
        self.inputs: dict[tuple[int, int], list[Tensor]] = {}
        self.outputs: dict[tuple[int, int], list[Tensor]] = {}
        self.results: dict[int, list[Tensor]] = {}  # outputs of the model, by index
        self.updated: dict[tuple[int, str], Tensor] = {}  # new values of buffers that change once a step, so far
        self.weights: dict[tuple[int, int], Any] = {}  # second half of a backward that runs in two
        self.input_gradients: dict[tuple[int, int], Tensor] = {}
        self.returned = False
        self.inputs_wanted: list[Tensor] = []  # the inputs of the call that take gradients

    def _leaf(self, s: int, name: str, parameter: Tensor) -> Tensor:
        """The leaf that a stage's program computes on: the parameter's memory, or its gathered weight."""
        leaf = parameter.detach().requires_grad_(parameter.requires_grad and self.trains)
        gather = self.program.bodies[s].gathers.get(name)
        if gather is None:
            return leaf
        self.gathered[s, name] = leaf
        with torch.no_grad(), range_of(gather_text(name)):
            used = gather(leaf.detach()).requires_grad_(leaf.requires_grad)
        if leaf.requires_grad and name in self.program.bodies[s].cut:
            used.register_post_accumulate_grad_hook(lambda x: self._reduce(s, name, x))
        return used

    def _reduce(self, s: int, name: str, used: Tensor) -> None:
        """Scatter the gradient of a micro-batch, and add the part to the leaf as stored (optimizer level 2)."""
        if used.grad is None:
            return
        leaf, gradient, used.grad = self.gathered[s, name], used.grad, None
        with torch.no_grad(), range_of(scatter_text(name)):
            part = self.program.bodies[s].gathers[name].back(gradient.to(leaf.dtype))
            leaf.grad = part if leaf.grad is None else leaf.grad.add_(part)

    def _widen(self, s: int) -> None:
        """Sum gradients in the type in which the parameters are stored, where they come in another type."""
        for name, used in self.leaves[s].items():
            leaf = self.gathered.get((s, name))
            if name in self.program.bodies[s].cut:
                self._reduce(s, name, used)  # the gradients that a backward in two halves leaves
            elif leaf is not None and leaf.dtype != used.dtype and used.grad is not None:
                gradient, used.grad = used.grad, None
                before = self.owed.get((s, name))
                self.owed[s, name] = gradient.to(leaf.dtype) if before is None else before.add_(gradient)

    def _scatter(self) -> None:
        """Reduce the gradients of gathered parameters to the layout in which these are stored."""
        for (s, name), leaf in self.gathered.items():
            if name in self.program.bodies[s].cut:
                self.leaves[s][name] = leaf
                continue
            gradient = self.owed.pop((s, name), self.leaves[s][name].grad)
            if gradient is not None:
                with torch.no_grad(), range_of(scatter_text(name)):
                    leaf.grad = self.program.bodies[s].gathers[name].back(gradient)
            self.leaves[s][name] = leaf
        self.gathered.clear()

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
        if self.trains:
            self._scatter()
            self._share()
        return [self._joined(i) for i in range(len(self.plan.graph.outputs))]

    def _parameters(self) -> list[Transfer]:
        return [t for t in self.plan.transfers if t.kind == "parameter"]

    def _play(self, action: Action) -> None:
        if action.kind == "F":
            self._forward(action.stage, action.micro)
        elif action.kind == "B":
            self._backward(action.stage, action.micro)
        elif action.kind == "I":
            self._backward_to_inputs(action.stage, action.micro)
        else:
            self._backward_to_weights(action.stage, action.micro)
        if action.kind != "F":
            self._widen(action.stage)

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
                wants = source.index < len(self.input_parts) and self.wanted[source.index]
            elif transfer.kind == "parameter":
                inputs.append(self.shared[s, transfer.name])
                continue
            else:
                x, wants = program.link.receive(transfer, k, False), value.requires_grad and self.trains
            inputs.append(x.detach().requires_grad_(wants))
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
        return [
            x
            for x in (*self.leaves[s].values(), *(x for (stage, _), x in self.shared.items() if stage == s))
            if x.requires_grad
        ]

    def _read(self, s: int, k: int) -> list[Tensor]:
        """The inputs of a forward that need gradients of this micro-batch alone."""
        shared = {id(x) for x in self.shared.values()}
        return [x for x in self.inputs[s, k] if x.requires_grad and id(x) not in shared]

    def _backward(self, s: int, k: int) -> None:
        outputs, gradients = self._owed(s, k)
        if outputs:
            torch.autograd.backward(outputs, gradients, inputs=[*self._read(s, k), *self._trained(s)])
        self._return(s, k)

    def _backward_to_inputs(self, s: int, k: int) -> None:
        outputs, gradients = self._owed(s, k)
        read = self._read(s, k)
        # Recomputed values exist once, and some versions of torch cannot start a backward at weights: then the
        # gradients of the weights are computed now.
        if self.program.bodies[s].stage.plan.regions or not torch_private.backward_can_start_at_functions():
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
        left = self.weights.pop((s, k), None)
        if isinstance(left, tuple):
            outputs, gradients = left
            if outputs:
                torch.autograd.backward(outputs, gradients, inputs=self._trained(s))
        elif left is not None:
            for groups in self._groups(s, left):
                torch_private.stage_backward_weight(iter(self._trained(s)), groups)
                self._widen(s)

    def _groups(self, s: int, left: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """The groups of weights whose gradients are computed before the next ones are scattered: all at once, or one
        after the other where gradients are accumulated as parts, in an order that all ranks share."""
        if not self.program.bodies[s].cut:
            return [left]
        number = {torch.autograd.graph.get_gradient_edge(x).node: i for i, x in enumerate(self._trained(s))}
        return [[group] for group in sorted(left, key=lambda group: min(number[node] for node in group["params"]))]

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
                leaf = self.leaves[t.source][t.name]
                part = program.link.receive(t, -1, True)
                leaf.grad = program.bodies[t.source].shared(t.name, leaf.grad, part)

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
        out: list[Tensor | None] = [p.grad for s in self.leaves for p in self.leaves[s].values() if p.requires_grad]
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
            from .distributed.gradients import hand_nothing  # noqa: PLC0415  imports DTensor

            for parameter in self.program.absent:
                hand_nothing(parameter)
        if gradient.device.type == "cpu" and gradient.item() == 1:  # the usual case; on other devices `item` would wait
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
        shared: adds a later stage's gradient of a parameter to that of its leaf: (name, gradient so far, part) ->
            sum.
        gathers: parameter -> the redistribution from its storage to its use, for weights that are gathered once a
            step for all micro-batches (`Plan.gathered_once`).
        cut: those of them whose gradients are scattered after every micro-batch, and accumulated as parts (optimizer
            level 2); the gradients of the others are accumulated whole, and scattered once a step.
        seed_device: the device on which the program takes its seed; None: host memory.
    """

    stage: Stage
    run: Callable[..., list[Tensor]]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    constants: list[Tensor]
    updates: tuple[str, ...]
    counts: Callable[..., list[Tensor]] | None
    shared: Callable[[str, Tensor | None, Tensor], Tensor | None]
    gathers: Mapping[str, GatherOfWeight] = field(default_factory=dict)
    cut: frozenset[str] = frozenset()
    seed_device: torch.device | None = None


class GatherOfWeight(Protocol):
    """The redistribution of a weight from its storage to its use."""

    def __call__(self, stored: Tensor, /) -> Tensor: ...

    def back(self, gradient: Tensor, /) -> Tensor:
        """The gradient of the weight as it is stored, from that of the weight as it is used."""


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
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        position.back = True
        return None, None, *ctx.step.taken(gradient)


class PipelineProgram:
    """A planned pipeline on a runtime: flattened inputs of the whole batch in, the user's outputs back.

    Args:
        plan: the plan.
        bodies: the stages of this process, by number.
        link: between stages.
        held: as in `StepProgram`.
        device: where inputs are moved to; None: they are there already.
        parts: for how many ranks of a stage this process feeds the batch, where each rank feeds its own part.
        absent: parameters of other stages, which are empty here, and get empty gradients.

    Attributes:
        exact, begin, guards, effects: as in `StepProgram`.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        bodies: dict[int, StageBody],
        link: StageLink,
        held: Any = None,
        device: torch.device | None = None,
        absent: Sequence[nn.Parameter] = (),
        parts: int = 1,
    ) -> None:
        if any(action.kind == "I" for actions in plan.schedule.actions for action in actions):
            demand("stage_backward_input", "stage_backward_weight")
        self.plan, self.bodies, self.link, self.held, self.device = plan, bodies, link, held, device
        self.exact, self.absent = True, absent
        self.begin: Callable[[], None] | None = None
        self.guards, self.effects = Guards((), ()), Effects()
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

    def __call__(self, *leaves: Any) -> Any:
        if self.begin is not None:
            self.begin()
        originals, tensors = tensors_of(leaves, self.plan.graph.changed, self.device)
        trains = torch.is_grad_enabled() and (self.loss is not None or self.why is not None)
        if trains:
            self.check()
        with step_range(self.plan, self.held):
            step = PipelineStep(self, tensors, trains)
            results = self.link.finish(step.run())
        if trains:
            assert self.loss is not None  # `check` has refused all others
            trained = [p for body in self.bodies.values() for p in body.parameters.values() if p.requires_grad]
            step.inputs_wanted = [x for x in tensors if x.requires_grad]
            trained += step.inputs_wanted
            if not trained:  # all that this process trains belongs to another stage
                trained = [torch.zeros((), requires_grad=True)]
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


def _transfer(plan: PipelinePlan, stage: int, source: Any) -> Transfer | None:
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
            _added,
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


def _added(name: str, gradient: Tensor | None, part: Tensor) -> Tensor:
    return part if gradient is None else gradient + part
