"""The number of devices that the marks of a model imply, and the whole batch of which a process feeds a part.

A mark ((2, 4), (4, 1)) of x @ w cuts the three factors 2, 4 and 1 ways, and so implies 8 devices. Marks that imply 8
and 6 devices imply 24 together.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from ..capture.export import capture
from ..errors import SettingError
from ..graph import Graph, Op
from ..layout import Layout, digits_size
from ..rules import bound_rule, find_rule
from ..torch_private import pytree

__all__ = ["devices_of_call", "global_inputs", "implied_devices"]


def implied_devices(graph: Graph) -> int:
    """The number of devices that the marks of a model imply: the least number that all marks fit.

    Args:
        graph: a captured call of the model. Marks of operators that the call does not run do not count.

    Returns:
        The least common multiple of the numbers that the marks imply one by one. A tuple implies the product of its
            cuts over the operator's factors, a `Layout` its own number of devices.

    Raises:
        SettingError: no operator that runs is marked.
    """
    counts = []
    for op in graph.ops:
        if op.mark is None:
            continue
        counts.append(_devices_of(op))
        for strategy in (op.mark.in_strategy, op.mark.out_strategy):
            for entry in strategy if isinstance(strategy, (tuple, list)) else ():
                counts.append(entry.devices if isinstance(entry, Layout) else _product(entry))
    if not counts:
        raise SettingError(
            "how many devices? No launcher says, nor does the mark of an operator that the model runs",
            legal="shardwright.init(devices=8), or `shardwright run --devices 8`",
        )
    return math.lcm(*counts)


def devices_of_call(
    net: nn.Module, loss_fn: object, args: tuple[object, ...], kwargs: dict[str, object] | None = None
) -> int:
    """The number of devices that the marks of the operators in one call of a model imply.

    Args:
        net, loss_fn: the model and its loss; None: it has none.
        args, kwargs: the arguments of the call, for the whole batch; the target is the last of `args`.

    Raises:
        SettingError: no operator that runs is marked.
    """
    return implied_devices(capture(net, args, kwargs, loss_fn=loss_fn))


def _product(cuts: object) -> int:
    return math.prod(c for c in cuts if isinstance(c, int) and c > 0) if isinstance(cuts, (tuple, list)) else 1


def _devices_of(op: Op) -> int:
    """The number of devices that the tuples of a mark cut for: the product of the cuts over the operator's factors."""
    described = find_rule(op)
    cuts: dict[object, object] = {}
    if described is not None and isinstance(op.mark.in_strategy, (tuple, list)):
        inputs = bound_rule(op, described).inputs
        for place, entry in zip(op.mark.order, op.mark.in_strategy):
            if isinstance(entry, (tuple, list)):
                cuts.update((dim[0], cut) for dim, cut in zip(inputs[place], entry) if len(dim) == 1)
    return _product(tuple(cuts.values()))


def global_inputs(
    args: tuple[object, ...], kwargs: dict[str, object], devices: int, dataset: object
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The whole batch of which a process feeds a part, as meta tensors.

    Args:
        args, kwargs: the arguments that one process feeds.
        devices: the number of devices.
        dataset: "full_batch": the arguments are the whole batch already; "data_parallel": dim 0 of every tensor is
            one of `devices` parts; a tuple or list: by tensor in order, a `Layout` or a tuple of cuts. Every other
            value, and a tensor without a fitting entry, leaves the shape as it is.

    Returns:
        `args` and `kwargs` with every tensor replaced by a meta tensor of the whole batch's shape.
    """
    if dataset == "full_batch":
        return args, kwargs
    tensors = iter(range(1_000_000))

    def whole(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        index, shape = next(tensors), list(leaf.shape)
        if dataset == "data_parallel":
            cuts = (devices,) + (1,) * (len(shape) - 1) if shape else ()
        elif isinstance(dataset, (tuple, list)) and index < len(dataset):
            entry = dataset[index]
            cuts = tuple(map(digits_size, entry.dims or ())) if isinstance(entry, Layout) else entry
        else:
            cuts = (1,) * len(shape)
        if not isinstance(cuts, (tuple, list)) or len(cuts) != len(shape) or not all(isinstance(c, int) for c in cuts):
            cuts = (1,) * len(shape)  # the planner reports a wrong `dataset`
        return torch.empty(
            [s * c for s, c in zip(shape, cuts)], dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad
        )

    return pytree.tree_map(whole, (args, kwargs))
