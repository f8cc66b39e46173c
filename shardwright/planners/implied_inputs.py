"""The number of devices that the marks of a model imply, and the whole batch of which a process feeds a part."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ..capture.annotations import marked_operators
from ..errors import SettingError
from ..graph import Graph, Op
from ..layout import Layout, digits_size
from ..rules import bound_rule, find_rule
from ..torch_private import pytree

__all__ = ["global_inputs", "implied_devices"]


def implied_devices(net: nn.Module, graph: Graph | None = None) -> int:
    """How many devices the marks of a model speak of: the least number that all of them fit.

    Args:
        graph: of a call of the model. Without it the cuts of one tensor are counted together, not those of an operator.

    Raises:
        SettingError: nothing is marked.
    """
    counts = [1 for _ in marked_operators(net)]
    for operator in marked_operators(net):
        for strategy in (operator.in_strategy, operator.out_strategy):
            for entry in strategy if isinstance(strategy, (tuple, list)) else ():
                counts.append(entry.devices if isinstance(entry, Layout) else _product(entry))
    counts += [_devices_of(op) for op in (graph.ops if graph is not None else ()) if op.mark is not None]
    if not counts:
        raise SettingError(
            "how many devices? No launcher says, nor does a mark of the model",
            legal="shardwright.init(devices=8), or `shardwright run --devices 8`",
        )
    return math.lcm(*counts)


def _product(cuts: Any) -> int:
    return math.prod(c for c in cuts if isinstance(c, int) and c > 0) if isinstance(cuts, (tuple, list)) else 1


def _devices_of(op: Op) -> int:
    """The number of devices that the tuples of a mark cut for: their product over the operator's factors."""
    described, cuts = find_rule(op), {}
    if described is not None and isinstance(op.mark.in_strategy, (tuple, list)):
        inputs = bound_rule(op, described).inputs
        for place, entry in zip(op.mark.order, op.mark.in_strategy):
            if isinstance(entry, (tuple, list)):
                cuts.update((dim[0], cut) for dim, cut in zip(inputs[place], entry) if len(dim) == 1)
    return _product(tuple(cuts.values()))


def global_inputs(args: tuple, kwargs: dict[str, Any], devices: int, dataset: Any) -> tuple[tuple, dict[str, Any]]:
    """What a process feeds, as meta tensors of the whole batch's shapes."""
    if dataset == "full_batch":
        return args, kwargs
    tensors = iter(range(1_000_000))

    def whole(leaf: Any) -> Any:
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
            cuts = (1,) * len(shape)  # the planner says what is wrong with it
        return torch.empty(
            [s * c for s, c in zip(shape, cuts)], dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad
        )

    return pytree.tree_map(whole, (args, kwargs))
