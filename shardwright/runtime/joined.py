"""Two steps of a conversion that small messages on Gloo take as one exchange: half the meetings for the same bytes.

    an all-reduce and a slice           every rank is sent the terms of its own slice, and adds up those
    an all-to-all and an all-gather     every rank is sent by all what the others of its own gather would have passed on
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from ..conversion_steps import Geometry, Step
from ..layout import Digits

__all__ = ["exchanged_and_gathered", "joined_digits", "reduced_slice"]

Exchange = Callable[[Tensor], Tensor]


def reduced_slice(slices: Callable[[Tensor], Sequence[Tensor]], mine: Exchange, ranks: int,
                  reduce_scatter: Exchange, after: tuple[int, ...], whole: Exchange, limit: Callable[[], float]) -> Exchange:
    """An all-reduce and a slice.

    Args:
        slices: those of every rank of the group, flat.
        mine: the slice of this rank.
        ranks: how many they are.
        reduce_scatter: equal pieces, flat, one after the other; gives this rank's, reduced.
        after: the shape of a slice.
        whole: the all-reduce, for more received bytes than `limit` says.
    """
    numel = ranks * math.prod(after)

    def run(x: Tensor) -> Tensor:
        if numel * x.element_size() > limit():
            return mine(whole(x))
        return reduce_scatter(torch.cat(slices(x))).view(after)
    return run


def joined_digits(first: Step, second: Step) -> Digits | None:
    """The digits over which two steps are one exchange, most major first; None: they cannot be."""
    if first.kind != "all_to_all" or first.permuted or second.kind != "all_gather":
        return None
    return tuple(sorted(first.moved + second.moved, key=lambda d: -d.stride))


def exchanged_and_gathered(first: Step, second: Step, shape: tuple[int, ...], exchange: Exchange,
                           apart: Sequence[Exchange], limit: Callable[[], int]) -> Exchange:
    """An all-to-all and the all-gather after it.

    Args:
        shape: of the local tensor before the two.
        exchange: equal pieces, flat, one after the other, to all ranks of `joined_digits`; gives theirs.
        apart: the two by themselves, for more received bytes than `limit` says.
    """
    digits = joined_digits(first, second)
    assert digits is not None
    sizes = tuple(d.size for d in digits)
    gathered = [k for k, d in enumerate(digits) if d in second.moved]
    others = [k for k in range(len(digits)) if k not in gathered]
    one, two = first.geometry(shape), second.geometry(first.local_shape_after(shape))
    copies, piece = math.prod(sizes[k] for k in gathered), math.prod(shape) // first.size
    sent = (*(1 if k in gathered else size for k, size in enumerate(sizes)), piece)
    arrange = _arranged((*sizes, piece), (*gathered, *others, len(digits)), copies, one, two)

    def run(x: Tensor) -> Tensor:
        if copies * x.nbytes > limit():
            for step in apart:
                x = step(x)
            return x
        if one.pre_perm is not None:
            x = x.reshape(one.pre_view).permute(one.pre_perm)
        received = exchange(x.reshape(sent).expand(*sizes, piece).reshape(-1))
        return arrange(received)
    return run


def _arranged(view: tuple[int, ...], perm: tuple[int, ...], copies: int, one: Geometry, two: Geometry) -> Exchange:
    """How the received pieces, of shape `view`, become the result: brought by `perm` into the order in which `copies` ranks
    have what the all-to-all gives each, then arranged as this arranges it, then as the all-gather does."""
    moves = [(view, perm)]
    for after in ((copies, *one.post_view), (0, *(1 + k for k in one.post_perm))) if one.post_perm else None, \
            (two.post_view, two.post_perm) if two.post_perm else None:
        if after is not None:
            once = _composed(*moves[-1], *after)
            moves[-1:] = [moves[-1], after] if once is None else [once]
    last = _arrangement(*moves[-1], two.after)
    if len(moves) == 1:
        return last
    before = [_arrangement(*move, None) for move in moves[:-1]]

    def arrange(x: Tensor) -> Tensor:
        for arrangement in before:
            x = arrangement(x)
        return last(x)
    return arrange


def _arrangement(view: tuple[int, ...], perm: tuple[int, ...], shape: tuple[int, ...] | None) -> Exchange:
    shape = shape or tuple(view[k] for k in perm)
    return lambda x: x.reshape(view).permute(perm).reshape(shape)


def _composed(view: tuple[int, ...], perm: tuple[int, ...], second: tuple[int, ...], order: tuple[int, ...]
              ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Two arrangements as one: (view, perm). None where they divide the axes between them in ways that do not nest."""
    permuted = tuple(view[k] for k in perm)
    ends = sorted({*accumulate(permuted, mul), *accumulate(second, mul)})
    sizes = [end // start for start, end in zip([1, *ends], ends)]
    if any(end % start for start, end in zip([1, *ends], ends)):
        return None
    parts, wholes = _runs(sizes, permuted), _runs(sizes, second)
    fine = [part for k in sorted(range(len(perm)), key=perm.__getitem__) for part in parts[k]]
    place = {part: k for k, part in enumerate(fine)}
    return tuple(sizes[part] for part in fine), tuple(place[part] for k in order for part in wholes[k])


def _runs(sizes: Sequence[int], shape: Sequence[int]) -> list[list[int]]:
    """Which of `sizes`, one after the other, make up each of `shape`."""
    out, at = [], 0
    for size in shape:
        run: list[int] = []
        while math.prod(sizes[k] for k in run) < size:
            run.append(at)
            at += 1
        out.append(run)
    return out
