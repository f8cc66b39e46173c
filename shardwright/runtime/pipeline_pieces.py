"""How a batch falls into micro-batches where a process feeds it for several ranks that each have a part of their own.

    micro-batch k of m      the k-th of m pieces of every part, one after the other
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..plan.pipelined import PipelinePlan

__all__ = ["parts_of", "pieces", "together"]


def parts_of(plan: PipelinePlan, fed: int) -> tuple[list[int], list[int]]:
    """Of how many parts of the batch this process has rows in each input, and in each output; `fed`: see
    `pipeline.PipelineProgram`."""
    alone = fed == 1  # a rank, which has of each what its layout says
    inputs, outputs = [plan.parts] * len(plan.split), [plan.parts] * len(plan.graph.outputs)
    for stage in plan.stages if alone else ():
        for source, layout in zip(stage.sources, stage.plan.fed.inputs):
            if source.kind == "input" and source.index < len(inputs) and layout.dims:
                inputs[source.index] = max(1, plan.parts // layout.cuts[0])
        for index, made in zip(stage.results, stage.plan.routed.outputs):
            how, dim = plan.micro.joins[index]
            if how == "cat":
                outputs[index] = max(1, plan.parts // made.layout.cuts[dim])
    return inputs, outputs


def pieces(x: Tensor, count: int, parts: int) -> tuple[Tensor, ...]:
    """The micro-batches of a batch that this process feeds for so many: micro-batch k has the k-th piece of each part."""
    if parts == 1:
        return x.chunk(count)
    return tuple(piece.flatten(0, 1) for piece in x.unflatten(0, (parts, count, -1)).unbind(1))


def together(made: Sequence[Tensor], dim: int, parts: int) -> Tensor:
    """The inverse of `pieces`, along a dim."""
    if parts == 1:
        return torch.cat(list(made), dim)
    return torch.stack([piece.unflatten(dim, (parts, -1)) for piece in made], dim + 1).flatten(dim, dim + 2)
