"""Sums of gradients that travel while the backward goes on.

    turns = sums(x)      a collective is under way
    next(turns)          None: it has come, and another one is under way; else the sum
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout import Digits
from . import transport
from .process_groups import ProcessGroups, Rider
from .transport import reduced, rings

__all__ = ["SumInTurns"]


class SumInTurns:
    """Sums over the ranks that differ in `digits`, one after the other, each in turns: between two of them a collective is
    under way. Ranks that share groups take the turns of all their sums in one order.
    """

    def __init__(self, digits: Digits, groups: ProcessGroups) -> None:
        self._group, self._scratch = groups.seen(digits), groups.scratch

    def __call__(self, x: Tensor, rides: bool = False) -> Iterator[Tensor | None]:
        """The sum of everybody's `x`, flat and not complex: None for each turn, and the sum at the end. `x` is written to, and
        may be the sum.

        Args:
            rides: an all-gather over the same ranks is likely to come before the next turn: a short sum travels with it.
        """
        group, n, numel = self._group, self._group.size, len(x)
        host = group.through_memory(x)
        if host is not None:
            yield   # others need not have come here yet
            yield host.all_reduce(x, "sum", x)
        elif not group.exchanges or rings(n, x):
            work = dist.all_reduce(x, group=group.group, async_op=True)
            yield
            work.wait()
            yield x
        elif n == 2:
            memory, counts = self._scratch.take(numel, x), [0, 0]
            received, counts[1 - group.position] = memory[:numel], numel
            work = group.group.alltoall_base(received, x, counts, counts)
            yield
            work.wait()
            x.add_(received)
            self._scratch.give(memory)
            yield x
        elif n * x.nbytes <= transport.GATHERED_TERMS:
            yield from self._gathered(x, rides)
        else:
            yield from self._scattered(x)

    def _gathered(self, x: Tensor, rides: bool) -> Iterator[Tensor | None]:
        """Everybody's terms, summed here."""
        group, n = self._group, self._group.size
        if rides and not group.riders:
            rider = Rider(x)
            group.riders.append(rider)
            yield
            if rider.terms is not None:
                yield reduced(rider.terms, "sum")
                return
            group.riders.remove(rider)
        copies = torch.cat((x,) * n)
        memory = self._scratch.take(len(copies), x)
        terms = memory[:len(copies)]
        work = group.group.alltoall_base(terms, copies, [], [])
        yield
        work.wait()
        total = reduced(terms.view(n, -1), "sum")
        self._scratch.give(memory)
        yield total

    def _scattered(self, x: Tensor) -> Iterator[Tensor | None]:
        """A piece of the sum here, and then everybody's."""
        group, n, numel = self._group, self._group.size, len(x)
        whole = torch.cat((x, x.new_zeros(-numel % n))) if numel % n else x
        memory = self._scratch.take(len(whole), x)
        terms = memory[:len(whole)]
        work = group.group.alltoall_base(terms, whole, [], [])
        yield
        work.wait()
        piece, received = reduced(terms.view(n, -1), "sum"), whole  # which has been sent
        if received.nbytes <= transport.GATHERED_COPIES:
            copies = torch.cat((piece,) * n, out=terms)
            work = group.group.alltoall_base(received, copies, [], [])
        else:
            work = transport.all_gather_single(received, piece.contiguous(), group=group.group, async_op=True)
        yield
        work.wait()
        self._scratch.give(memory)
        yield received[:numel]

    def forget(self) -> None:
        """After an error: nothing of a sum that is still under way travels with others."""
        self._group.riders.clear()
