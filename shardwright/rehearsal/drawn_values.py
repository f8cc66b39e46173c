"""Values for a program of which a plan knows only shapes: parameters, buffers, constants and inputs, drawn at random.

    parameters            normal, of a standard deviation of 0.02
    buffers, constants    uniform between 0.5 and 1.5: they may be variances
    inputs                normal
    bool                  True: a mask that hides nothing
    whole numbers         uniform in [0, limit), where the limit is that of the tables which they are an index of; 0 or
                          1 where they are an index of none

The limits (`index_limits`) follow from the operators: a token is below the rows of its embedding, a target below the
number of classes. A value that is computed from others hands its limit on to them. Example: tokens that are cut,
flattened and then looked up have the limit of that table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..graph import Graph, Op, Value

__all__ = ["DrawnValues", "index_limits"]

#: Standard deviation of parameters, that of GPT-2's.
SPREAD = 0.02

#: Operator -> (its argument with the table, its argument with the indices, the table's dim: a number, or the argument
#: that has it).
_LOOKUPS: dict[str, tuple[int, int, int | str]] = {
    "embedding": (0, 1, 0),
    "embedding_bag": (0, 1, 0),
    "index_select": (0, 2, "1"),
    "index_add": (0, 2, "1"),
    "index_copy": (0, 2, "1"),
    "index_fill": (0, 2, "1"),
    "gather": (0, 2, "1"),
    "scatter": (0, 2, "1"),
    "scatter_add": (0, 2, "1"),
    "scatter_reduce": (0, 2, "1"),
    "take_along_dim": (0, 1, "2"),
}

#: Losses of (scores, classes): the scores' dim of the classes is 1, or 0 without a batch.
_LOSSES = ("cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward")


class DrawnValues:
    """Draws values on a device.

    Args:
        graphs: the graphs in whose operators values are an index.
        device: on which values are drawn.
    """

    def __init__(self, graphs: Sequence[Graph], device: torch.device) -> None:
        self.device = device
        self.limits: dict[str, int] = {}
        for graph in graphs:
            for name, limit in index_limits(graph).items():
                self.limits[name] = min(limit, self.limits.get(name, limit))

    def parameter(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A parameter, or the slice of one."""
        return self._normal(shape, dtype, SPREAD)

    def buffer(self, value: Value, shape: Sequence[int]) -> Tensor:
        """A buffer or constant, or the slice of one."""
        if not value.dtype.is_floating_point:
            return self.draw(value, shape)
        return torch.empty(tuple(shape), device=self.device).uniform_(0.5, 1.5).to(value.dtype)

    def draw(self, value: Value, shape: Sequence[int]) -> Tensor:
        """An input, a value that another stage sends, or the slice of one."""
        if value.dtype.is_floating_point or value.dtype.is_complex:
            return self._normal(shape, value.dtype, 1.0)
        if value.dtype == torch.bool:
            return torch.ones(tuple(shape), dtype=torch.bool, device=self.device)
        limit = max(1, self.limits.get(value.name, 2))
        return torch.randint(0, limit, tuple(shape), dtype=torch.int64, device=self.device).to(value.dtype)

    def _normal(self, shape: Sequence[int], dtype: torch.dtype, spread: float) -> Tensor:
        if not dtype.is_floating_point and not dtype.is_complex:
            return torch.ones(tuple(shape), dtype=dtype, device=self.device)
        made = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(tuple(shape), dtype=made, device=self.device).mul_(spread).to(dtype)


def index_limits(graph: Graph) -> dict[str, int]:
    """Name of a value of whole numbers -> the number that it must stay below, where an operator uses it as an index."""
    limits: dict[str, int] = {}

    def lower(value: Value, limit: int) -> None:
        if not value.dtype.is_floating_point and value.dtype != torch.bool:
            limits[value.name] = min(limit, limits.get(value.name, limit))

    for op in reversed(graph.ops):
        used = dict(_indices(op))
        for value, limit in used.items():
            lower(value, limit)
        made = [limits[v.name] for v in op.outputs if v is not None and v.name in limits]
        for value in op.inputs if made else ():
            if value not in used:
                lower(value, min(made))
    return limits


def _indices(op: Op) -> Iterator[tuple[Value, int]]:
    """Yield the values that an operator uses as an index, each with its limit."""
    args: Mapping[int, object] = dict(enumerate(op.args))
    if op.kind in _LOOKUPS:
        table_at, index_at, where = _LOOKUPS[op.kind]
        table, index = args.get(table_at), args.get(index_at)
        dim = where if isinstance(where, int) else args.get(int(where), op.kwargs.get("dim"))
        if isinstance(table, Value) and isinstance(index, Value) and isinstance(dim, int) and table.shape:
            yield index, table.shape[dim]
    elif op.kind in _LOSSES:
        scores, classes = args.get(0), args.get(1)
        if isinstance(scores, Value) and isinstance(classes, Value) and scores.shape:
            yield classes, scores.shape[1 if len(scores.shape) > 1 else 0]
    elif op.kind in ("index", "index_put", "_unsafe_index"):
        table, indices = args.get(0), args.get(1)
        for dim, index in enumerate(indices if isinstance(indices, (list, tuple)) else ()):
            if isinstance(index, Value) and isinstance(table, Value) and dim < len(table.shape):
                yield index, table.shape[dim]
    elif op.kind == "one_hot":
        classes, count = args.get(0), args.get(1, op.kwargs.get("num_classes"))
        if isinstance(classes, Value) and isinstance(count, int) and count > 0:
            yield classes, count
