"""The border of the model: results of which each rank computes a loss of its own, and tensors that are each rank's own.

A loss outside of the model is each rank's own, and gradients are those of the mean of these losses: the gradient of a
result is divided by the number of ranks (`shared`). Where results of one model lead to another one, as in a GAN, the
gradient has been divided already when it leaves the second model, and is multiplied again (`leading_on`).

In `hybrid_parallel` parameters, inputs and results are each rank's own. Inside the program each rank's own tensor has
an added first dim: size 1 on a rank, stacked over all ranks. Users see tensors without that dim. With a process a rank,
each process returns its rank's result. Where all devices are in one process the ranks' results are put together:

1. Each rank is fed its own part of the batch: results are joined along the batch; numbers become their mean.
2. Every rank is fed the whole batch: all ranks must return the same.

The file also restores the caller's view of inputs that the model changes in place.

Example: 8 ranks in one process, each fed its own 4 rows. Results [4, 10] of the ranks are stacked as [8, 4, 10] and
joined to [32, 10]; losses from 0.0 to 7.0 become their mean 3.5.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..accelerators import moved
from ..errors import SettingError
from ..graph import Value
from ..sharded_plan import Plan

__all__ = ["handings", "leading_on", "put_back", "shared", "tensors_of"]

#: Entry in the metadata of the autograd node that divides a gradient.
_SHARED = "shardwright_shared"


def shared(output: Tensor, parts: int) -> Tensor:
    """An output of which each of `parts` ranks computes a loss of its own: gradients are those of the losses' mean.

    A view has the hook: the model itself may compute a loss of the whole batch from the same tensor.
    """
    return _divided(output.view_as(output), parts) if output.requires_grad else output


def _divided(x: Tensor, parts: int) -> Tensor:
    def divide(gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            _warn_of_mean(parts)
        return gradient / parts

    x.register_hook(divide)
    node: Any = x.grad_fn  # torch's stub has `metadata` as a method
    node.metadata[_SHARED] = True
    return x


@functools.cache
def _warn_of_mean(parts: int) -> None:
    """Say once that a gradient which is differentiated again, such as that of an input in a gradient penalty, is one of
    the mean of the ranks' losses: of a loss that is a sum over rows it is too small."""
    warnings.warn(
        f"create_graph=True of a loss outside of the model, of which each of {parts} ranks has its own: the gradients "
        f"are those of the losses' mean, 1/{parts} of this rank's own. They are those of one device where the loss is "
        'a mean over rows. Of a sum over rows, as in a gradient penalty: dataset_strategy("full_batch")',
        stacklevel=2,
    )


def leading_on(x: Tensor, parts: int) -> Tensor:
    """An input whose gradient goes on to the results of another model, if it does, where it is divided once more.

    Args:
        x: the input.
        parts: the number of ranks by which this program has divided the gradient of its results.
    """
    if parts > 1 and x.requires_grad and x.grad_fn is not None and _comes_from_shared(x.grad_fn):
        x = x.view_as(x)
        x.register_hook(lambda gradient: gradient * parts)
    return x


def _comes_from_shared(node: Any) -> bool:
    seen, waiting = {node}, [node]
    while waiting:
        node = waiting.pop()
        if _SHARED in node.metadata:
            return True
        further = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= further
        waiting += further
    return False


def handings(plan: Plan, processes: bool, mean: bool) -> list[Callable[[Tensor], Tensor] | None]:
    """The function applied to each output before the user gets it; None where there is nothing to do.

    Args:
        plan: the plan, with its graph and its placed outputs.
        processes: True where each rank is a process; False where all devices are in this process.
        mean: True where gradients are those of the mean of the losses that the ranks compute; False for their sum.
    """
    out: list[Callable[[Tensor], Tensor] | None] = []
    for output, placed in zip(plan.graph.outputs, plan.program.outputs):
        apart = isinstance(output, Value) and len(placed.value.shape) > len(output.shape)
        if not apart:
            out.append(None)
        elif processes:
            out.append(_of_rank(plan.devices if mean else 1))
        elif plan.input_placement.per_rank_batch:
            out.append(_joined if output.shape else _mean)
        else:
            out.append(_same)
    return out


def _of_rank(parts: int) -> Callable[[Tensor], Tensor]:
    def pass_gradient(x: Tensor) -> Tensor:
        x = x.squeeze(0)
        return _divided(x, parts) if parts > 1 and x.requires_grad else x

    return pass_gradient


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


def tensors_of(
    leaves: Sequence[object], changed: Sequence[int], device: torch.device | None
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors among a call's inputs, as the caller gave them, and as the program takes them.

    The program takes copies of those that the call changes: the backward still needs their old elements.

    Args:
        leaves: of the call's arguments.
        changed: the numbers of the tensors that the call changes in place.
        device: where the program takes them; None: where they are.
    """
    originals = [x for x in leaves if isinstance(x, Tensor)]
    taken = [x.clone() if i in changed else x for i, x in enumerate(originals)] if changed else originals
    return originals, taken if device is None else [moved(x, device) for x in taken]


def put_back(tensors: list[Tensor], outputs: list[Any], changed: Sequence[int]) -> None:
    """Write the new elements, which are the last outputs, into the caller's tensors that the model changed in place."""
    for i, value in zip(changed, outputs[len(outputs) - len(changed) :]):
        tensors[i].copy_(value)
