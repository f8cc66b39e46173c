"""The processes runtime: one process a device, the lowered program on this rank's local tensors.

The program stays a `torch.fx.GraphModule`; its conversions become submodules that hold this rank's part of each step,
forward and transposed. A local operator costs what it costs in plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..conversion import Conversion, conversion
from ..errors import RuntimeMismatchError
from ..lower import Lowered, extreme, move, sum_of_gradient
from ..plan.plan import Plan
from ..plan.route import Extreme, Move
from .collectives import Bound, ProcessGroups, bind_all
from .local import plain_function, ties

__all__ = ["ProcessProgram", "agree"]

Steps = tuple[Bound, ...]


class _Convert(torch.autograd.Function):
    """A conversion and its transpose, this rank's part of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Steps, backward: Steps) -> Tensor:
        ctx.steps = backward
        y = _run(x, forward)
        return y.view_as(y) if y is x else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _run(gradient, ctx.steps), None, None


def _run(x: Tensor, steps: Steps) -> Tensor:
    for step in steps:
        x = step(x)
    return x


class _Extreme(torch.autograd.Function):
    """A maximum or minimum over ranks; see the local runtime's for the gradient."""

    @staticmethod
    def forward(ctx: Any, reduced: Tensor, operand: Tensor, forward: Steps, count: Steps, dims: tuple[int, ...]
                ) -> Tensor:
        result = _run(reduced, forward)
        ctx.save_for_backward(reduced, operand, result)
        ctx.steps, ctx.dims = count, dims
        return result.view_as(result) if result is reduced else result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        reduced, operand, result = ctx.saved_tensors
        held = ties(operand, reduced, result, ctx.dims)
        return gradient * held / _run(held.to(gradient.dtype), ctx.steps), None, None, None, None


class BoundMove(nn.Module):
    """A conversion, as this rank does it."""

    def __init__(self, forward_steps: Steps, backward_steps: Steps, label: str) -> None:
        super().__init__()
        self.forward_steps, self.backward_steps, self.label = forward_steps, backward_steps, label

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return _Convert.apply(x, self.forward_steps, self.backward_steps)
        return _run(x, self.forward_steps)

    __call__ = forward  # without a module's hooks, of which it has none

    def extra_repr(self) -> str:
        return self.label


class BoundExtreme(nn.Module):
    """A maximum or minimum over ranks, as this rank does it."""

    def __init__(self, forward_steps: Steps, count_steps: Steps, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.forward_steps, self.count_steps, self.dims = forward_steps, count_steps, dims

    def forward(self, reduced: Tensor, operand: Tensor) -> Tensor:
        return _Extreme.apply(reduced, operand, self.forward_steps, self.count_steps, self.dims)


class ProcessProgram:
    """A lowered program on one rank.

    All ranks make it from the same plan at the same time: process groups come into being here, in the program's order.

    Attributes:
        sums: parameter -> how its gradient is summed once it is complete, where the program does not.
        module: the bound `torch.fx.GraphModule`: local parameters, buffers, constants, inputs in; outputs, then the new
            values of buffers, out.
    """

    def __init__(self, lowered: Lowered, groups: ProcessGroups) -> None:
        self.lowered, self.groups = lowered, groups
        root = nn.Module()
        graph = torch.fx.Graph()
        env: dict[torch.fx.Node, torch.fx.Node] = {}
        self.sums: dict[str, Steps] = {}
        passed: set[torch.fx.Node] = set()
        for node in lowered.module.graph.nodes:
            if node.op == "placeholder" and node.meta["instance"].value.name in lowered.parameters:
                sole = sum_of_gradient(node)
                if sole is not None:
                    passed.add(sole)
            if node in passed:
                instruction = node.meta["instruction"]
                env[node] = env[node.args[0]]
                self.sums[instruction.source.value.name] = self._steps(instruction.backward,
                                                                      instruction.target.local_shape)
            elif node.target is move or node.target is extreme:
                name = f"convert_{len(root._modules)}"
                root.add_module(name, self._bound(node.meta["instruction"]))
                env[node] = graph.call_module(name, tuple(env[a] for a in node.args))
            else:
                env[node] = graph.node_copy(node, env.__getitem__)
                if node.op == "call_function":
                    env[node].target = plain_function(node)
        self.module = torch.fx.GraphModule(root, graph)

    def __call__(self, *local: Tensor) -> list[Tensor]:
        return list(self.module.forward(*local))

    def _bound(self, instruction: Move | Extreme) -> nn.Module:
        forward = self._steps(instruction.forward, instruction.source.local_shape)
        if isinstance(instruction, Extreme):
            layout = instruction.source.layout
            summed = conversion(layout.without_partial().with_partial(layout.partial), layout.without_partial())
            return BoundExtreme(forward, self._steps(summed, instruction.source.local_shape), instruction.dims)
        backward = self._steps(instruction.backward, instruction.target.local_shape) \
            if instruction.backward is not None else ()
        return BoundMove(forward, backward, str(instruction.forward))

    def _steps(self, steps: Conversion, shape: tuple[int, ...]) -> Steps:
        return bind_all(steps, shape, self.groups.rank, self.groups)


def agree(planned: Plan | Exception, fed: list[tuple[tuple[int, ...], str]], started: dict[str, Any]) -> None:
    """See, before anything runs, that all ranks have made the same plan from the same parameters.

    Args:
        planned: the plan, or what this rank could not plan for.
        fed: shape and type of each input of the whole batch.
        started: what tells the values of each parameter from others.

    Raises:
        RuntimeMismatchError: on every rank alike, naming the ranks that differ and in what.
        Exception: `planned`, where no rank could plan.
    """
    failed = f"{type(planned).__name__}: {planned}" if isinstance(planned, Exception) else None
    mine = (None if failed else planned.fingerprint, fed, started, failed)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    first = everyone[0]
    inputs = [r for r, other in enumerate(everyone) if other[1] != first[1] and other[1] and first[1]]
    if inputs:
        raise RuntimeMismatchError(
            f"ranks {inputs} feed other inputs than rank 0: {everyone[inputs[0]][1]} against {first[1]} (whole batch)",
            legal="the same shapes and types on every rank")
    failures = [r for r, other in enumerate(everyone) if other[3]]
    if failures and len(failures) < len(everyone):
        raise RuntimeMismatchError(f"ranks {failures} cannot plan what the others can: {everyone[failures[0]][3]}",
                                   legal="the same model, marks and settings on every rank")
    if isinstance(planned, Exception):
        raise planned
    plans = [r for r, other in enumerate(everyone) if other[0] != first[0]]
    if plans:
        raise RuntimeMismatchError(f"ranks {plans} have planned another program than rank 0",
                                   legal="the same model, marks and settings on every rank")
    for name, value in first[2].items():
        other = [r for r, e in enumerate(everyone) if not _same(e[2].get(name), value)]
        if other:
            raise RuntimeMismatchError(f"the parameter {name!r} starts from other values on ranks {other} than on rank 0",
                                       legal="the same seed on every rank before the model is built")


def _same(a: Any, b: Any) -> bool:
    return a == b or (a is not None and a != a and b != b)
