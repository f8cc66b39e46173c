"""Parts of a rank's program that only a compiled program has.

1. Gathers that run again (`gathered_again`): the gather of a weight that is not kept for the backward. It is a
   checkpointed region whose results must be recomputed: the compiler's partitioner then puts the gather into the
   backward, too.
2. Sums of gradients inside the graph (`BoundSum`, `SumsEnd`). The backward of a `BoundSum` starts the sum of one
   parameter's gradient and does not wait; the backward of the `SumsEnd`, through which all these parameters pass
   first, comes last, and waits for all of them:

    forward     parameters -> SumsEnd -> BoundSum of each -> operators
    backward    operators -> each sum starts as its gradient comes -> all are waited for

   Nothing may read a sum before: autograd would, to cast a sum in another dtype than the parameter's.
   A gradient that is scattered to the ranks that store the parameter in parts (`late_scatter`) goes the same way.
   Each gradient travels by itself: the compiler's own passes may put several into one message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ...redistribution import CollectiveKind, Redistribution
from ...torch_private import CHECKPOINT_LOGGER, functional_all_reduce, functional_reduce_scatter, functional_wait
from .collectives import Bound
from .process_groups import Group, ProcessGroups

__all__ = ["BoundSum", "SumsEnd", "gathered_again", "late_scatter"]


# The only operators of these regions are those of a gather: none is in place.
logging.getLogger(CHECKPOINT_LOGGER).addFilter(lambda record: "context_fn is passed" not in record.getMessage())


def _again(*_: object, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


_contexts = partial(create_selective_checkpoint_contexts, _again)


def gathered_again(gather: Callable[..., Any], *stored: Tensor) -> Any:
    """The gathered weight, or the weights of a block, which a compiled backward gathers again.

    All of the gather is one region: what goes from a region to another is saved.
    """
    return checkpoint(gather, *stored, use_reentrant=False, context_fn=_contexts)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        ctx.name, ctx.dtype = name, dtype
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return functional_all_reduce(gradient.to(ctx.dtype).contiguous(), "sum", ctx.name), None, None


class BoundSum(nn.Module):
    """A parameter whose gradient is summed over a group; the sum is not waited for.

    Args:
        group: the ranks.
        dtype: of the sum.
    """

    def __init__(self, group: Group, dtype: torch.dtype) -> None:
        super().__init__()
        self.name, self.dtype = group.name, dtype

    def forward(self, x: Tensor) -> Tensor:
        return _Sum.apply(x, self.name, self.dtype)


def late_scatter(steps: Redistribution, shape: tuple[int, ...], groups: ProcessGroups) -> Bound | None:
    """A reduce-scatter of a gradient that is not waited for; None where the redistribution is another one, or its
    result has to be rearranged.

    Args:
        steps: from terms of the gradient to the slices in which the parameter is stored.
        shape: of a term.
        groups: this rank's process groups.
    """
    if [step.pattern for step in steps.steps] != [CollectiveKind.REDUCE_SCATTER]:
        return None
    step = steps.steps[0]
    geometry, group = step.geometry(tuple(shape)), groups.seen(step.digits)
    if geometry.post_perm is not None or 0 in shape:
        return None

    def scatter(x: Tensor) -> Tensor:
        if geometry.pre_view is not None and geometry.pre_perm is not None:
            x = x.reshape(geometry.pre_view).permute(geometry.pre_perm)
        return functional_reduce_scatter(x.reshape(-1), step.reduction, group.size, group.name).view(geometry.after)

    return scatter


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.held = tuple(x.dtype for x in parameters)
        return tuple(x.view_as(x) for x in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *sums: Tensor) -> tuple[Tensor, ...]:
        return tuple(functional_wait(x).to(dtype) for x, dtype in zip(sums, ctx.held))


class SumsEnd(nn.Module):
    """The parameters of all `BoundSum` and `late_scatter`, whose sums are waited for once all of them have started."""

    def forward(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        return _End.apply(*parameters)
