"""hybrid_parallel at the border: parameters and results that are each rank's own.

A program has them stacked, a rank's along a first dim of size 1; users do not. Where all devices are in one process
what
the ranks return is put together: fed by parts, along the batch, and numbers as their mean; fed whole, all return the
    same.
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
    """What is to be done with each output before the user has it; None: nothing.

    Args:
        mean: whether gradients are those of the mean of the losses that the ranks compute, or of their sum.
    """
    out: list[Callable[[Tensor], Tensor] | None] = []
    for output, instance in zip(plan.graph.outputs, plan.routed.outputs):
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


# ----------------------------------------------------------------------------------------------------
# Inputs that the model changes in place: the caller's tensors are changed as on one device.
# ----------------------------------------------------------------------------------------------------


def kept_apart(tensors: list[Tensor], changed: Sequence[int]) -> list[Tensor]:
    """A call's inputs, copies of those that it changes: what a backward needs of them stays as it was."""
    return [x.clone() if i in changed else x for i, x in enumerate(tensors)]


def put_back(tensors: list[Tensor], outputs: list[Any], changed: Sequence[int]) -> None:
    """The caller's tensors that the model changed in place get their new elements, which are the last outputs."""
    for i, value in zip(changed, outputs[len(outputs) - len(changed) :]):
        tensors[i].copy_(value)
