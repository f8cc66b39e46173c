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
3. Gathers ahead (`gathers_ahead`). The compiler puts a gather that runs again in front of its first use, and waits at
   once. A pass over each graph, forward and backward, issues it one block ahead:

    before      gather B, wait B, compute B, gather A, wait A, compute A
    after       gather B, gather A, wait B, compute B, wait A, compute A
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ...redistribution import CollectiveKind, Redistribution
from ...torch_private import (
    CHECKPOINT_LOGGER,
    OpOverload,
    functional_all_gather,
    functional_all_reduce,
    functional_reduce_scatter,
    functional_wait,
)
from .collectives import Bound
from .process_groups import Group, ProcessGroups

__all__ = ["BoundSum", "SumsEnd", "gathered_again", "gathers_ahead", "late_scatter", "options_ahead"]


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


# -- gathers ahead

_MOVES = ("_to_copy", "_unsafe_view", "cat", "clone", "constant_pad_nd", "convert_element_type")


def gathers_ahead(graph: torch.fx.Graph) -> None:
    """Issue each gather of a graph's own inputs in front of the wait for the one before it.

    The inputs are the stored weights, and in a backward what the forward has saved.

    Args:
        graph: of a forward or a backward, without autograd. It is changed in place.
    """
    before: torch.fx.Node | None = None
    for wait in [n for n in graph.nodes if n.target is functional_wait.default]:
        gather = wait.all_input_nodes[0]
        chain = _chain(gather) if gather.target is functional_all_gather.default else None
        if chain is None:
            continue
        if before is not None:
            order = {node: place for place, node in enumerate(graph.nodes)}
            for node in sorted((n for n in chain if order[n] > order[before]), key=order.__getitem__):
                before.prepend(node)
        before = wait


def _chain(gather: torch.fx.Node) -> set[torch.fx.Node] | None:
    """A gather, and the nodes that make what it sends; None where these do more than move and cast inputs."""
    chain, due = set[torch.fx.Node](), [gather]
    while due:
        node = due.pop()
        if node.op == "placeholder" or node in chain:
            continue
        if node is not gather and not _moves(node.target):
            return None
        chain.add(node)
        due += node.all_input_nodes
    return chain


def _moves(target: Any) -> bool:
    """True for an operator that moves or casts elements: a view, a copy, a concatenation."""
    return isinstance(target, OpOverload) and (target.is_view or target.overloadpacket.__name__ in _MOVES)


@cache
def options_ahead() -> dict[str, Any]:
    """The options of inductor with which gathers travel ahead. Its own search for less memory would bring them back."""
    from ...torch_private import CustomGraphPass  # noqa: PLC0415  loads the compiler

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            gathers_ahead(graph)

        def uuid(self) -> str:  # inductor keeps what it has compiled, until this file changes
            return Path(__file__).read_text()

    return {"post_grad_custom_post_pass": Pass(), "reorder_for_peak_memory": False}
