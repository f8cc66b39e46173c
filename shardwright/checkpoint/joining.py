"""Boxes that a whole file has in short runs, brought together to long ones.

Of a tensor that is cut in a later dim a rank's box lies in the file as a run for each row, between those of the others. Ranks
of one host that have the same rows put them together in memory that they share, and each writes some rows as one run:

    rank 0   a a . .        a a b b   rank 0
             c c . .   ->
    rank 1   . . b b        c c d d   rank 1
             . . d d

That takes less time than a call for each run, of which the file system lets one rank at a time write a file; and what was
written in long runs is read and put through to the disk faster, as the kernel keeps it in larger pieces.

    round     of every joint's steps one after the other, those of different ranks at once; all ranks meet in each

In a round a rank writes its part of the rows of every rank that it joins some with, they meet, and each has its rows whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ..runtime.host_memory import HostMemory
from .boxes import Written
from .manifest import element_size
from .ranks import Ranks
from .words import dtype_of

__all__ = ["Joint", "joined", "joints_of", "scattered"]

#: In bytes: a box that is joined has at least so many, in runs of at most so many; a rank joins so many of rows at a time,
#: at most.
_LARGE, _SHORT, _STEP = 1 << 20, 64 << 10, 4 << 20

#: Where a box begins in each dim, and its sizes.
Extent = tuple[tuple[int, ...], tuple[int, ...]]


class Joint(NamedTuple):
    """Boxes of a tensor that fill their rows: of its first dims, down to the first one in which a box is cut.

    Attributes:
        name, dtype, shape: of the tensor.
        ranks: that have a box each.
        extents: of their boxes.
        dims: how many dims rows are of.
        most: bytes of rows that a rank writes in a step, at most.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    extents: tuple[Extent, ...]
    dims: int
    most: int

    @property
    def rows(self) -> int:
        """Of every box."""
        return math.prod(self.extents[0][1][:self.dims])

    @property
    def first(self) -> int:
        """The row of the tensor with which they begin."""
        return self.extents[0][0][0] * math.prod(self.shape[1:self.dims])

    @property
    def row(self) -> int:
        """The elements of a row of the tensor."""
        return math.prod(self.shape[self.dims:])

    @property
    def steps(self) -> int:
        """In how many steps they are joined."""
        at_once = self.most // (self.row * element_size(self.dtype))
        mine = -(-self.rows // len(self.ranks))
        return max(1, -(-mine // at_once))

    def share(self, number: int, step: int) -> tuple[int, int]:
        """The rows that a rank, by its number among them, writes in a step."""
        begin, end = (self.rows * n // len(self.ranks) for n in (number, number + 1))
        return begin + (end - begin) * step // self.steps, begin + (end - begin) * (step + 1) // self.steps


def scattered(written: Iterable[Written]) -> dict[str, Extent]:
    """Of a rank's boxes those that others may have the rest of the rows of."""
    return {w.name: (w.starts, tuple(w.tensor.shape)) for w in written if w.tensor.dim() > 1 and w.tensor.nbytes >= _LARGE}


def joints_of(tensors: Mapping[str, tuple[tuple[int, ...], str, dict | None]], said: Sequence[Mapping[str, Extent]],
              most: int) -> list[Joint]:
    """What is to be joined, in the order of the tensors.

    Args:
        tensors: name -> (shape, dtype, layout).
        said: what `scattered` has given on each rank. No two boxes overlap.
        most: bytes of rows that a rank may write in a step.
    """
    out, most = [], min(most, _STEP)
    for name, (shape, dtype, _) in tensors.items():
        alike: dict[tuple[int, int], list[int]] = {}  # ranks by the part of dim 0 they have
        for rank, extents in enumerate(said):
            if name in extents:
                starts, sizes = extents[name]
                alike.setdefault((starts[0], sizes[0]), []).append(rank)
        for (_, length), ranks in alike.items():
            extents = tuple(said[rank][name] for rank in ranks)
            cut = [dim for _, sizes in extents for dim in range(1, len(shape)) if sizes[dim] < shape[dim]]
            if not cut or sum(math.prod(sizes) for _, sizes in extents) < length * math.prod(shape[1:]):
                continue
            joint = Joint(name, dtype, shape, tuple(ranks), extents, min(cut), most)
            size = element_size(dtype)
            if joint.row * size <= most and all(math.prod(sizes[joint.dims:]) * size <= _SHORT for _, sizes in extents):
                out.append(joint)
    return out


def joined(joints: Iterable[Joint], mine: Mapping[str, Tensor], ranks: Ranks) -> Iterator[tuple[str, int, Tensor]]:
    """Join boxes with other ranks. All ranks do so at the same time, whichever of them have something to join.

    Args:
        joints: the same on all.
        mine: this rank's boxes, by name.

    Returns:
        Runs of whole rows that this rank is to write: name, the first element in the tensor, what is in it. Its memory is
        that of the next but one.

    Raises:
        CheckpointError: a rank that does not come.
        Exception: what kept this rank's boxes from getting to host memory; once all is done, for the others count on it.
    """
    memory, failed = ranks.rows(), None
    boxes: dict[str, Tensor] = {}  # in host memory
    for now in _rounds(joints):
        joint, step = now.get(ranks.rank, (None, 0))
        if joint is not None and failed is None:
            try:
                if joint.name not in boxes:
                    boxes = {joint.name: mine[joint.name].cpu().contiguous().view(joint.rows, -1)}
                _write(memory, joint, step, ranks.rank, boxes[joint.name])
            except Exception as error:
                failed = error  # the others go on, and meet this rank
        turn = ranks.meet(memory)
        if joint is not None and failed is None:
            begin, end = joint.share(joint.ranks.index(ranks.rank), step)
            yield joint.name, (joint.first + begin) * joint.row, _rows(memory.rows[turn, ranks.rank], joint, end - begin)
    if failed is not None:
        raise failed


def _write(memory: HostMemory, joint: Joint, step: int, rank: int, box: Tensor) -> None:
    """Put a rank's columns of a step's rows where each of the joint's ranks has its rows."""
    starts, sizes = (x[joint.dims:] for x in joint.extents[joint.ranks.index(rank)])
    columns = tuple(slice(a, a + n) for a, n in zip(starts, sizes))
    for number, other in enumerate(joint.ranks):
        begin, end = joint.share(number, step)
        rows = _rows(memory.rows[memory.round, other], joint, end - begin)
        rows[(slice(None), *columns)] = box[begin:end].view(end - begin, *sizes)


def _rounds(joints: Iterable[Joint]) -> list[dict[int, tuple[Joint, int]]]:
    """By rank, the step that it takes in each round, if any."""
    out: list[dict[int, tuple[Joint, int]]] = []
    taken: dict[int, int] = {}  # by rank, its rounds so far
    for joint in joints:
        for step in range(joint.steps):
            at = max(taken.get(rank, 0) for rank in joint.ranks)
            if at == len(out):
                out.append({})
            out[at].update(dict.fromkeys(joint.ranks, (joint, step)))
            taken.update(dict.fromkeys(joint.ranks, at + 1))
    return out


def _rows(memory: Tensor, joint: Joint, count: int) -> Tensor:
    """The first of some bytes, as so many rows of a tensor."""
    dtype = dtype_of(joint.dtype)
    return memory[:count * joint.row * dtype.itemsize].view(dtype).view(count, *joint.shape[joint.dims:])
