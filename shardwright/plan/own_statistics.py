"""Data-parallel batch norms: each device normalises by the statistics of its own part of the batch.

    out of part p = (x_p − mean_p) / √(variance_p + eps) · weight + bias
    running statistics: next = (1 − momentum) · old + momentum · mean over the parts of their statistics

So running statistics stay equal on all devices, and are what each part's own would be on average (unbiased variances;
not the variance of the whole batch, which also holds how far the parts lie from each other). What all layers have seen
is averaged in one all-reduce at the end of the forward, instead of one per layer.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ..errors import StrategyError
from ..graph import Graph, Op, Value, map_values, values_in
from ..normalisation import batch_norm, own_batch_norm, running_averages
from .decision import batch_dims, description

__all__ = ["with_own_statistics"]

aten = torch.ops.aten

_Layer = tuple[Op, Value]  # the batch norm, and the sums over the parts that it leaves: [2, channels]


def with_own_statistics(graph: Graph, devices: int, on_missing_rule: str = "error") -> Graph:
    """The graph with every batch norm that trains along the batch working on `devices` parts of it.

    One whose batch dim is not the batch, or that the devices do not divide, stays as it is.

    Raises:
        StrategyError: a part would have one value a channel, which has no variance.
    """
    if devices == 1 or not any(map(_trains, graph.ops)):
        return graph
    carries = batch_dims(graph, {op.name: description(op, on_missing_rule, devices)[1] for op in graph.ops})
    changed: dict[str, Value] = {}     # new running statistics as the plain operator names them -> as they are made now
    read = {v.name for op in graph.ops for v in op.inputs}
    layers: list[_Layer] = []
    ops = []
    for op in graph.ops:
        op = _swapped(op, changed)
        if not _trains(op) or carries.get(op.inputs[0].name) != 0 or op.inputs[0].shape[0] % devices:
            ops.append(op)
            continue
        own, stats = _own(op, devices)
        ops.append(own)
        if any(v.name in read for v in op.outputs[1:]):  # as by the same layer, called again
            ops += _averaged([(op, stats)], f"{op.name}.running_statistics", devices, changed)
        elif len(op.outputs) == 3:
            layers.append((op, stats))
    counted = [layer for layer in layers if layer[0].argument("tracked") is not None]
    others = [layer for layer in layers if layer[0].argument("tracked") is None]
    groups = [[layer] for layer in counted]
    groups += [[layer for layer in others if layer[1].dtype == dtype]
               for dtype in dict.fromkeys(stats.dtype for _, stats in others)]
    for number, group in enumerate(groups):
        ops += _averaged(group, f"running_statistics{f'_{number}' if number else ''}", devices, changed)
    now = lambda tree: map_values(tree, lambda v: changed.get(v.name, v))  # noqa: E731
    return replace(graph, ops=tuple(ops), outputs=now(graph.outputs), updates=now(graph.updates))


def _trains(op: Op) -> bool:
    return op.target is batch_norm or op.target is aten.batch_norm.default and op.argument("training")


def _own(op: Op, devices: int) -> tuple[Op, Value]:
    """The operator on parts, and what it leaves of their statistics."""
    x, mean = op.inputs[0], op.argument("running_mean")
    if x.numel // x.shape[1] == devices:
        raise StrategyError(f"on {devices} devices each would normalise by the statistics of one value a channel of "
                            f"{x.shape}", **op.where, legal="a larger batch, or sync_batch_norm=True")
    dtype = mean.dtype if mean is not None else torch.float64 if x.dtype == torch.float64 else torch.float32
    weight, bias, eps, cudnn = map(op.argument, ("weight", "bias", "eps", "cudnn_enabled"))
    stats = Value(f"{op.name}.statistics", (2, x.shape[1]), dtype)
    inputs = tuple(v for v in (x, weight, bias) if v is not None)
    return replace(op, target=own_batch_norm, args=(x, weight, bias, devices, dtype, eps, cudnn), kwargs={},
                   inputs=inputs, outputs=(op.outputs[0], stats)), stats


def _swapped(op: Op, changed: dict[str, Value]) -> Op:
    if not any(v.name in changed for v in op.inputs):
        return op
    args, kwargs = map_values((op.args, op.kwargs), lambda v: changed.get(v.name, v))
    return replace(op, args=args, kwargs=kwargs, inputs=values_in((args, kwargs)))


def _averaged(group: list[_Layer], name: str, devices: int, changed: dict[str, Value]) -> list[Op]:
    """The operators that make the new running statistics of several layers."""
    made, stats = [], tuple(s for _, s in group)
    seen = stats[0]
    if len(group) > 1:
        seen = Value(f"{name}.seen", (2, sum(s.shape[1] for s in stats)), seen.dtype)
        made.append(Op(seen.name, aten.cat.default, (list(stats), 1), {}, stats, (seen,)))
    old = [op.argument(which) for op, _ in group for which in ("running_mean", "running_var")]
    tracked = [op.argument("tracked") for op, _ in group if op.argument("tracked") is not None]
    momenta = [0.0 if math.isnan(op.argument("momentum")) else op.argument("momentum") for op, _ in group]
    new = tuple(Value(f"{name}.{i}", v.shape, v.dtype) for i, v in enumerate(old))
    changed.update((v.name, n) for v, n in zip((v for op, _ in group for v in op.outputs[1:]), new))
    made.append(Op(name, running_averages, (seen, old, tracked, momenta, [1 / devices] * 2), {},
                   (seen, *old, *tracked), new))
    return made
