"""The processes runtime's executor: one rank's part of a step, through torch.distributed.

    bound = bind(step, x.shape, rank, groups)      once: plain ints, and the process group; `bind_all`: several steps
    x = bound(x)                                   every time; no autograd here
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from ..conversion import Conversion, Step
from ..conversion_steps import Geometry, digits_value
from ..layout import group_of
from . import transport
from .joined import exchanged_and_gathered, joined_digits, reduced_slice
from .process_groups import ProcessGroups

__all__ = ["Bound", "bind", "bind_all"]

#: A step on one rank and one local shape: a local tensor in, a local tensor out. A slice gives a view; what comes in is
#: never written to.
Bound = Callable[[Tensor], Tensor]


def bind(step: Step, local_shape: tuple[int, ...], rank: int, groups: ProcessGroups) -> Bound:
    """A step for `rank`. Makes the step's process group: all ranks bind the same steps in one order.

    Raises:
        LayoutError: a dim that does not divide.
    """
    shape = tuple(local_shape)
    geometry = step.geometry(shape)
    if step.kind == "slice":
        return _slice(geometry, rank)
    group = groups.seen(step.digits)
    if step.kind == "all_reduce":
        return transport.all_reduce(group, step.reduction)
    if step.kind == "reduce_scatter":
        return _shaped(geometry, transport.reduce_scatter(group, step.reduction))
    if step.kind == "all_gather":
        return _shaped(geometry, transport.gather(group))
    if geometry.pieces == step.size:
        return _shaped(geometry, partial(transport.exchange, group))
    return _shaped(geometry, transport.routed(group, step, geometry.pieces, math.prod(shape) // geometry.pieces, rank))


def bind_all(steps: Conversion, shape: tuple[int, ...], rank: int, groups: ProcessGroups) -> tuple[Bound, ...]:
    """The steps of a conversion on one rank, in their order; two of them may be one exchange (`joined`).

    Args:
        shape: of the rank's local tensor.

    Raises:
        LayoutError: a dim that does not divide.
    """
    if 0 in shape:  # nothing is sent of an empty tensor
        after = steps.local_shapes(tuple(shape))[-1]
        return (lambda x: x.new_empty(after),)
    out: list[Bound] = []
    last: tuple[Step, tuple[int, ...]] | None = None    # the step before, and the shape before it, where they may be joined
    for step, before in zip(steps.steps, steps.local_shapes(tuple(shape))):
        joined = _joined(*last, step, before, rank, groups, out[-1]) if last is not None and groups.exchanges else None
        if joined is not None:
            out[-1], last = joined, None
        else:
            out.append(bind(step, before, rank, groups))
            last = step, before
    return tuple(out)


def _joined(first: Step, shape: tuple[int, ...], second: Step, between: tuple[int, ...], rank: int, groups: ProcessGroups,
            bound: Bound) -> Bound | None:
    """Two steps as one exchange, if they can be; `bound`: the first of them."""
    geometry = second.geometry(between)
    if first.kind == "all_reduce" and second.kind == "slice":
        group = groups.seen(first.digits)
        return reduced_slice(_slices(geometry, group_of(rank, first.digits)), _slice(geometry, rank), group.size,
                             transport.reduce_scatter(group, first.reduction), geometry.after, bound,
                             lambda: transport.GATHERED_TERMS if group.host is None else math.inf)
    digits = joined_digits(first, second)
    if digits is None:
        return None
    group = groups.seen(digits)
    return exchanged_and_gathered(first, second, shape, partial(transport.exchange, group),
                                  (bound, bind(second, between, rank, groups)), lambda: transport.GATHERED_PIECES)


def _slice(geometry: Geometry, rank: int) -> Bound:
    after = geometry.after
    if geometry.cuts is None:
        view, index = geometry.pre_view, [(axis, digit.value(rank)) for axis, digit in geometry.select]

        def select(x: Tensor) -> Tensor:
            x = x.reshape(view)
            for axis, i in index:
                x = x.select(axis, i)
            return x.reshape(after)
        return select
    ranges = [(dim, length * digits_value(digits, rank), length) for dim, length, digits in geometry.cuts]

    def narrow(x: Tensor) -> Tensor:
        for dim, start, length in ranges:
            x = x.narrow(dim, start, length)
        return x
    return narrow


def _slices(geometry: Geometry, ranks: Sequence[int]) -> Callable[[Tensor], list[Tensor]]:
    """Those of several ranks, flat."""
    if geometry.cuts is not None:
        each = {r: _slice(geometry, r) for r in ranks}
        return lambda x: [each[r](x).reshape(-1) for r in ranks]
    view, chosen = geometry.pre_view, geometry.select[::-1]
    axes = [axis for axis, _ in chosen]
    sizes = [view[axis] for axis in axes]
    order = (*axes, *(axis for axis in range(len(view)) if axis not in axes))
    permuted = None if order == tuple(range(len(view))) else order
    rows = []
    for r in ranks:  # the slices in the order of the axes, the last one moving first
        row = 0
        for size, (_, digit) in zip(sizes, chosen):
            row = row * size + digit.value(r)
        rows.append(row)
    count = math.prod(sizes)

    def slices(x: Tensor) -> list[Tensor]:
        if permuted is not None:
            x = x.reshape(view).permute(permuted)
        pieces = x.reshape(count, -1).unbind(0)
        return [pieces[row] for row in rows]
    return slices


def _shaped(geometry: Geometry, run: Bound) -> Bound:
    """`run` takes the pieces to send, flat, one after the other, and gives those received likewise."""
    pre_view, pre_perm, after = geometry.pre_view, geometry.pre_perm, geometry.after
    post_view, post_perm = geometry.post_view, geometry.post_perm
    if pre_perm is None and post_perm is None:
        return lambda x: run(x.reshape(-1)).view(after)  # a copy where they were not one after the other

    def shaped(x: Tensor) -> Tensor:
        if pre_perm is not None:
            x = x.reshape(pre_view).permute(pre_perm)
        x = run(x.reshape(-1))
        if post_perm is not None:
            x = x.view(post_view).permute(post_perm)
        return x.reshape(after)
    return shaped
