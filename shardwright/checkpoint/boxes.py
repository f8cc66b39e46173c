"""Who writes what: every box of every tensor once, its holders sharing the work.

Ranks that hold the same box each write some of its rows where it is large, else they take turns, the largest first. What
a rank writes is read off what it holds itself: nothing has to be asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from .state import Held

__all__ = ["Written", "described_here", "written_here"]

#: Of at least so many bytes for each of its holders a box is shared out in rows.
SHARED = 1 << 20


class Written(NamedTuple):
    """A box that this rank writes: of which tensor, where it begins in each dim, what is in it."""

    name: str
    starts: tuple[int, ...]
    tensor: Tensor


def written_here(held: Iterable[Held], rank: int) -> list[Written]:
    """The boxes that a rank writes, in the order of `held`."""
    here = [h for h in held if h.local is not None and h.place.box is not None and rank in h.place.holders]
    order = {h.name: i for i, h in enumerate(here)}
    turns: dict[tuple[int, ...], int] = {}
    out = []
    for h in sorted(here, key=lambda h: -h.local.nbytes):
        holders, local, starts = h.place.holders, h.local, tuple(s.start for s in h.place.box)
        if local.nbytes >= SHARED * len(holders) > SHARED and local.shape[0] >= len(holders):
            number, rows = holders.index(rank), local.shape[0]
            first, last = rows * number // len(holders), rows * (number + 1) // len(holders)
            out.append(Written(h.name, (starts[0] + first, *starts[1:]), local[first:last]))
            continue
        turn = turns[holders] = turns.get(holders, -1) + 1
        if holders[turn % len(holders)] == rank:
            out.append(Written(h.name, starts, local))
    return sorted(out, key=lambda w: order[w.name])


def described_here(held: Iterable[Held], written: Iterable[Written]) -> dict[str, tuple[tuple[int, ...], str, dict | None]]:
    """Name -> (shape, dtype, layout) of the tensors whose first box this rank writes: each is described by one rank."""
    mine = {w.name for w in written if not any(w.starts)}
    return {h.name: (h.shape, h.dtype, h.place.words) for h in held if h.name in mine}
