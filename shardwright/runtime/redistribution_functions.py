"""The autograd functions of redistributions, which both runtimes share.

A runtime gives the steps of a redistribution and those of its transpose; a step is a function of a tensor.

    RedistributionFunction.apply(x, forward, backward, parameter)
        x -> forward(x);  gradient -> backward(gradient);  in processes with the name of the parameter, if x is one
    ExtremeFunction.apply(reduced, operand, forward, count, dims)
        forward   the maximum, or minimum, of `reduced` over ranks
        backward  the gradient goes to the elements that attain the extreme, in equal shares: rank r with c_r such
                  elements gets c_r / Σ c of it, which its local operator shares among them

Ranks that hold 3, 5 and 5: the maximum is 5, and the second and third rank get half of the gradient each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .second_derivatives import refuse_graph

__all__ = ["ExtremeFunction", "RedistributionFunction", "Steps", "run_steps"]

#: What a runtime does one after the other.
Steps = tuple[Callable[[Tensor], Tensor], ...]


def run_steps(x: Tensor, steps: Steps) -> Tensor:
    """The tensor after all steps."""
    for step in steps:
        x = step(x)
    return x


class RedistributionFunction(torch.autograd.Function):
    """A redistribution and its transpose, each of which is the transpose of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Steps, backward: Steps, parameter: str = "") -> Tensor:
        ctx.steps, ctx.forwards, ctx.parameter = backward, forward, parameter
        y = run_steps(x, forward)
        return y.view_as(y) if y is x else y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            if ctx.parameter:
                refuse_graph(ctx.parameter)
            return RedistributionFunction.apply(gradient, ctx.steps, ctx.forwards), None, None, None
        return run_steps(gradient, ctx.steps), None, None, None


class ExtremeFunction(torch.autograd.Function):
    """A maximum or minimum over ranks."""

    @staticmethod
    def forward(
        ctx: Any, reduced: Tensor, operand: Tensor, forward: Steps, count: Steps, dims: tuple[int, ...]
    ) -> Tensor:
        result = run_steps(reduced, forward)
        ctx.save_for_backward(reduced, operand, result)
        ctx.steps, ctx.dims = count, dims
        return result.view_as(result) if result is reduced else result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        reduced, operand, result = ctx.saved_tensors
        with torch.no_grad():
            held = _ties(operand, reduced, result, ctx.dims).to(gradient.dtype)
            share = held / run_steps(held, ctx.steps)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True: shares are constants
            gradient = RedistributionFunction.apply(gradient, (), ctx.steps)
        return gradient * share, None, None, None, None


def _ties(operand: Tensor, reduced: Tensor, result: Tensor, dims: Sequence[int]) -> Tensor:
    """The number of a rank's elements that attain the extreme of all ranks, per element of the result."""
    shape = [1 if d in dims else size for d, size in enumerate(operand.shape)]
    count = (
        (operand == reduced.reshape(shape)).sum(tuple(dims)).reshape(reduced.shape)
        if dims
        else torch.ones_like(reduced)
    )
    return torch.where(reduced == result, count, torch.zeros_like(count))
