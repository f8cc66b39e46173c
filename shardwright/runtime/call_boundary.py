"""`hybrid_parallel` at the border of the model: parameters, inputs and results that are each rank's own.

Inside the program each rank's own tensor has an added first dim: size 1 on a rank, stacked over all ranks. Users see
tensors without that dim. With a process a rank, each process returns its rank's result. Where all devices are in one
process the ranks' results are put together:

1. Each rank is fed its own part of the batch: results are joined along the batch; numbers become their mean.
2. Every rank is fed the whole batch: all ranks must return the same.

The file also restores the caller's view of inputs that the model changes in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import SettingError
from ..graph import Value
from ..sharded_plan import Plan

__all__ = ["handings", "kept_apart", "put_back"]


def handings(plan: Plan, processes: bool, mean: bool) -> list[Callable[[Tensor], Tensor] | None]:
    """The function applied to each output before the user gets it; None where there is nothing to do.

    Args:
        plan: the plan, with its graph and its placed outputs.
        processes: True where each rank is a process; False where all devices are in this process.
        mean: True where gradients are those of the mean of the losses that the ranks compute; False for their sum.
    """
    out: list[Callable[[Tensor], Tensor] | None] = []
    for output, instance in zip(plan.graph.outputs, plan.program.outputs):
        apart = isinstance(output, Value) and len(instance.value.shape) > len(output.shape)
        if not apart:
            out.append(None)
        elif processes:
            out.append(_own(plan.devices if mean else 1))
        elif plan.fed.own_part:
            out.append(_joined if output.shape else _mean)
        else:
            out.append(_same)
    return out


def _own(parts: int) -> Callable[[Tensor], Tensor]:
    def handed(x: Tensor) -> Tensor:
        x = x.squeeze(0)
        if parts > 1 and x.requires_grad:
            x.register_hook(lambda gradient: gradient / parts)
        return x

    return handed


def _joined(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def _mean(x: Tensor) -> Tensor:
    return x.mean(0) if x.is_floating_point() or x.is_complex() else _same(x)


def _same(x: Tensor) -> Tensor:
    detached = x.detach()
    if not torch.allclose(detached, detached[:1].expand_as(x), equal_nan=True):
        raise SettingError(
            "the ranks are fed the same batch and return different things: in one process there is no telling "
            "which of them is meant",
            legal="sw.ops.all_reduce or all_gather at the end of the model, "
            'dataset_strategy("data_parallel"), or a process a device',
        )
    return x.mean(0) if x.is_floating_point() or x.is_complex() else x[0]


# -- inputs that the model changes in place: the caller's tensors change as on one device


def kept_apart(tensors: list[Tensor], changed: Sequence[int]) -> list[Tensor]:
    """The inputs of a call, with copies of those that the call changes: the backward still needs their old elements."""
    return [x.clone() if i in changed else x for i, x in enumerate(tensors)]


def put_back(tensors: list[Tensor], outputs: list[Any], changed: Sequence[int]) -> None:
    """Write the new elements, which are the last outputs, into the caller's tensors that the model changed in place."""
    for i, value in zip(changed, outputs[len(outputs) - len(changed) :]):
        tensors[i].copy_(value)
