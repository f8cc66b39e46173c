"""The autograd functions of redistributions, which both runtimes share, and the exchanges of halos.

1. A runtime gives the steps of a redistribution and those of its transpose; a step is a function of a tensor.

       RedistributionFunction.apply(x, forward, backward, parameter)
           x -> forward(x);  gradient -> backward(gradient);  in processes with the name of the parameter, if x is one
       ExtremeFunction.apply(reduced, operand, forward, count, dims)
           forward   the maximum, or minimum, of `reduced` over ranks
           backward  the gradient goes to the elements that attain the extreme, in equal shares: rank r with c_r such
                     elements gets c_r / Σ c of it, which its local operator shares among them

   Example: ranks hold 3, 5 and 5. The maximum is 5, and the second and third rank get half of the gradient each.

2. Halos: a slice becomes the elements that its rank reads, and the gradient of these the gradient of the slice.
   `redistribution.halos` has the numbers.

   All ranks in one process: the parts of a dim are joined, and filled where windows reach over the border; each rank
   reads a view of the joined dim. Back, each window's gradient is added at its place. The same for a list of all ranks'
   shards (`exchange_halos`), and for one tensor with the ranks as leading axes (`exchanging`).

   One rank of a process group (`part_of_rank`): all ranks of the group take part in one all-to-all with numbers of
   elements, 0 for ranks that share nothing: libraries send these numbers point to point, and no order of sends and
   receives can be wrong. Gradients are added in the order of the parts, as in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layout import Digits, group_of, groups
from ..redistribution import CollectiveKind, Geometry, Halo, Redistribution, RedistributionStep, digits_value
from ..torch_private import direct_apply, transforms
from .second_derivatives import refuse_graph

__all__ = [
    "ExtremeFunction",
    "RedistributionFunction",
    "Steps",
    "exchange_halos",
    "exchanging",
    "part_of_rank",
    "redistributed",
    "run_steps",
]

# -- autograd functions


#: Functions that a runtime calls one after the other.
Steps = tuple[Callable[[Tensor], Tensor], ...]


def run_steps(x: Tensor, steps: Steps) -> Tensor:
    """The tensor after all steps."""
    for step in steps:
        x = step(x)
    return x


class RedistributionFunction(torch.autograd.Function):
    """A redistribution and its transpose, each of which is the transpose of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Steps, backward: Steps, parameter: str = "") -> Tensor:
        ctx.moves = backward, forward, parameter
        y = x
        for step in forward:  # not `run_steps`: one layer of Python less
            y = step(y)
        return y.view_as(y) if y is x else y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        backward, forward, parameter = ctx.moves
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            if parameter:
                refuse_graph(parameter)
            # The steps may write to their input (`partition.in_place_sums`), and that of a further backward is read.
            back, forwards = ((torch.clone, *steps) if steps else () for steps in (backward, forward))
            return RedistributionFunction.apply(gradient, back, forwards), None, None, None
        for step in backward:
            gradient = step(gradient)
        return gradient, None, None, None


_direct = direct_apply(RedistributionFunction)


def redistributed(x: Tensor, forward: Steps, backward: Steps, parameter: str = "") -> Tensor:
    """`RedistributionFunction.apply`, in less of the host's time outside of torch.func and torch.compile."""
    apply = RedistributionFunction.apply if torch.compiler.is_compiling() or transforms() is not None else _direct
    made: Tensor = apply(x, forward, backward, parameter)
    return made


class ExtremeFunction(torch.autograd.Function):
    """A maximum or minimum over ranks."""

    @staticmethod
    def forward(
        ctx: Any, reduced: Tensor, operand: Tensor, forward: Steps, count: Steps, dims: tuple[int, ...]
    ) -> Tensor:
        result = run_steps(reduced, forward)
        ctx.save_for_backward(reduced, operand, result)
        ctx.steps, ctx.dims = count, dims
        return result.view_as(result) if result is reduced else result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        reduced, operand, result = ctx.saved_tensors
        with torch.no_grad():
            tied = _ties(operand, reduced, result, ctx.dims).to(gradient.dtype)
            share = tied / run_steps(tied, ctx.steps)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True: shares are constants
            gradient = RedistributionFunction.apply(gradient, (), ctx.steps)
        return gradient * share, None, None, None, None


def _ties(operand: Tensor, reduced: Tensor, result: Tensor, dims: Sequence[int]) -> Tensor:
    """The number of a rank's elements that attain the extreme of all ranks, per element of the result."""
    shape = [1 if d in dims else size for d, size in enumerate(operand.shape)]
    count = (
        (operand == reduced.reshape(shape)).sum(tuple(dims)).reshape(reduced.shape)
        if dims
        else torch.ones_like(reduced)
    )
    return torch.where(reduced == result, count, torch.zeros_like(count))


# -- exchanges of halos


# -- all ranks


def _margins(halo: Halo) -> tuple[int, int]:
    """The elements that windows read before the dim, and behind it."""
    begins = [halo.begins(part) for part in range(halo.parts)]
    return max(0, -min(begins)), max(0, max(begins) + halo.length - halo.size)


def _windows(parts: Sequence[Tensor], halo: Halo, dim: int) -> list[Tensor]:
    """The elements that each part reads, from the parts in the order of their numbers."""
    before, behind = _margins(halo)
    x = torch.cat(tuple(parts), dim).narrow(dim, 0, halo.size)
    if before or behind:
        amounts = [0, 0] * (x.dim() - 1 - dim) + [before, behind]
        x = torch.nn.functional.pad(x, amounts, value=halo.fill)
    return [x.narrow(dim, halo.begins(part) + before, halo.length) for part in range(halo.parts)]


def _added(windows: Sequence[Tensor], halo: Halo, dim: int) -> list[Tensor]:
    """The gradients of the parts, from those of what each part reads."""
    before, behind = _margins(halo)
    last = max(0, halo.part_size * halo.parts - halo.size - behind)  # of parts that are not full
    shape = list(windows[0].shape)
    shape[dim] = before + halo.size + behind + last
    total = windows[0].new_zeros(shape)
    for part, window in enumerate(windows):
        total.narrow(dim, halo.begins(part) + before, halo.length).add_(window)
    if halo.part_size * halo.parts > halo.size:  # padding elements get no gradient
        total.narrow(dim, before + halo.size, behind + last).zero_()
    return [total.narrow(dim, before + part * halo.part_size, halo.part_size) for part in range(halo.parts)]


_MOVES = {CollectiveKind.HALO_EXCHANGE: _windows, CollectiveKind.HALO_REDUCE: _added}


def exchange_halos(
    step: RedistributionStep, geometry: Geometry, devices: int, shape: tuple[int, ...]
) -> Callable[[list[Tensor]], list[Tensor]]:
    """An exchange of halos, or its transpose, on the shards of all ranks."""
    halo, move = step.halo, _MOVES[step.kind]
    assert halo is not None
    members = [
        sorted(ranks, key=lambda rank: digits_value(halo.digits, rank)) for ranks in groups(devices, step.digits)
    ]

    def run(shards: list[Tensor]) -> list[Tensor]:
        out = list(shards)
        for ranks in members:
            for rank, made in zip(ranks, move([shards[rank] for rank in ranks], halo, halo.dim)):
                out[rank] = made
        return out

    return run


def exchanging(
    numbers: Callable[[Digits], tuple[int, ...] | None], axes: int, redistribution: Redistribution
) -> Callable[[Tensor], Tensor] | None:
    """The exchanges of a redistribution on a value with all ranks' shards.

    Args:
        numbers: digits -> the leading axes that they are made of; None where they are not made of axes.
        axes: the number of leading axes.
        redistribution: an exchange of halos, or its transpose.

    Returns:
        The function; None where a dim's digits are not made of axes.
    """
    moves = []
    for step in redistribution.steps:
        assert step.halo is not None
        along = numbers(step.halo.digits)
        if along is None:
            return None
        moves.append(_moving(along, axes, step.halo, _MOVES[step.kind]))

    def run(x: Tensor) -> Tensor:
        for move in moves:
            x = move(x)
        return x

    return run


def _moving(
    along: tuple[int, ...], axes: int, halo: Halo, move: Callable[[Sequence[Tensor], Halo, int], list[Tensor]]
) -> Callable[[Tensor], Tensor]:
    """One exchange: the axes of the dim come first, and each of their entries is a part."""
    first, dim = tuple(range(len(along))), axes - len(along) + halo.dim

    def run(x: Tensor) -> Tensor:
        x = x.movedim(along, first)
        sizes = x.shape[: len(along)]
        parts = x.reshape(math.prod(sizes), *x.shape[len(along) :]).unbind(0)
        made = torch.stack(move(parts, halo, dim))
        return made.view(*sizes, *made.shape[1:]).movedim(first, along)

    return run


# -- one rank

#: Elements for all ranks of a group, flat, and the numbers of elements to and from each rank -> the elements that come.
Send = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]

#: A part of a tensor: (dim, start, length) of each dim that is not whole.
_Place = tuple[tuple[int, int, int], ...]


def _part(x: Tensor, place: _Place) -> Tensor:
    for dim, start, length in place:
        x = x.narrow(dim, start, length)
    return x


def _places(step: RedistributionStep, rank: int) -> tuple[dict[int, _Place], dict[int, _Place]]:
    """Two places by part of the dim, this rank's part included: elements of this rank's slice that the part reads, and
    elements of the part that this rank reads, counted in the dim as this rank reads it."""
    halo = step.halo
    assert halo is not None
    mine = digits_value(halo.digits, rank)
    beside = []  # of the halos exchanged before, only what lies within the tensor travels
    for other in halo.before:
        part = digits_value(other.digits, rank)
        reads = other.reads(part)
        beside.append((other.dim, reads.start - other.begins(part), len(reads)))

    def place(shared: range, first: int) -> _Place:
        return ((halo.dim, shared.start - first, len(shared)), *beside)

    sent = {q: place(shared, mine * halo.part_size) for q in range(halo.parts) if (shared := halo.shared(mine, q))}
    return sent, {q: place(shared, halo.begins(mine)) for q, shared in halo.sources(mine)}


def part_of_rank(step: RedistributionStep, geometry: Geometry, rank: int, send: Send) -> Callable[[Tensor], Tensor]:
    """One rank's part in an exchange of halos along one dim, or in its transpose.

    Args:
        step: the exchange or its transpose.
        geometry: the step on the rank's tensor.
        rank: the rank.
        send: an exchange among the ranks of the step's group.
    """
    halo, after, adds = step.halo, geometry.after, step.kind is CollectiveKind.HALO_REDUCE
    assert halo is not None
    fill, mine = 0 if adds else halo.fill, digits_value(halo.digits, rank)
    sent, taken = reversed(_places(step, rank)) if adds else _places(step, rank)

    def shape(place: _Place) -> list[int]:
        lengths = {dim: length for dim, _, length in place}
        return [lengths.get(dim, size) for dim, size in enumerate(after)]

    parts = [digits_value(halo.digits, r) for r in group_of(rank, step.digits)]  # of the group's ranks
    sends, receives = (
        [math.prod(shape(places[q])) if q != mine and q in places else 0 for q in parts] for places in (sent, taken)
    )
    to = [sent[q] for q in parts if q != mine and q in sent]
    communicates = step.communicates
    come = [(taken[q], shape(taken[q]), parts.index(q)) for q in sorted(taken)]  # added in the order of the parts

    def run(x: Tensor) -> Tensor:
        out, pieces = x.new_full(after, fill), ()
        if communicates:
            flat = torch.cat([_part(x, place).reshape(-1) for place in to]) if to else x.new_empty(0)
            pieces = send(flat, sends, receives).split(receives)
        for place, sizes, k in come:
            piece = _part(x, sent[mine]) if parts[k] == mine else pieces[k].view(sizes)
            _part(out, place).add_(piece) if adds else _part(out, place).copy_(piece)
        return out

    return run
