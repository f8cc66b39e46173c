"""Boxes that a whole file has in short runs, brought together to long ones.

Of a tensor that is cut in a later dim a rank's box lies in the file as a run for each row, between those of the others. Ranks
that have the same rows send one another what they lack of some, and each writes its rows as one run:

    rank 0   a a . .        a a b b   rank 0
             c c . .   ->
    rank 1   . . b b        c c d d   rank 1
             . . d d

Sending takes less time than a call for each run, of which the file system lets one rank at a time write a file; and what was
written in long runs is read and put through to the disk faster, as the kernel keeps it in larger pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .boxes import Written
from .manifest import dtype_of, element_size
from .ranks import Alone

__all__ = ["Joint", "joined", "joints_of", "scattered"]

#: In bytes: a box that is joined has at least so many, in runs of at most so many; a rank joins so many of rows at a time.
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
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    extents: tuple[Extent, ...]
    dims: int

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
        return max(1, -(-self.rows * self.row * element_size(self.dtype) // (_STEP * len(self.ranks))))

    def share(self, number: int, step: int) -> tuple[int, int]:
        """The rows that a rank, by its number among them, writes in a step."""
        begin, end = (self.rows * n // len(self.ranks) for n in (number, number + 1))
        return begin + (end - begin) * step // self.steps, begin + (end - begin) * (step + 1) // self.steps


def scattered(written: Iterable[Written]) -> dict[str, Extent]:
    """Of a rank's boxes those that others may have the rest of the rows of."""
    return {w.name: (w.starts, tuple(w.tensor.shape)) for w in written if w.tensor.dim() > 1 and w.tensor.nbytes >= _LARGE}


def joints_of(tensors: Mapping[str, tuple[tuple[int, ...], str, dict | None]], said: Sequence[Mapping[str, Extent]]
              ) -> list[Joint]:
    """What is to be joined, in the order of the tensors.

    Args:
        tensors: name -> (shape, dtype, layout).
        said: what `scattered` has given on each rank. No two boxes overlap.
    """
    out = []
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
            joint = Joint(name, dtype, shape, tuple(ranks), extents, min(cut))
            size = element_size(dtype)
            if joint.row * size <= _STEP and all(math.prod(sizes[joint.dims:]) * size <= _SHORT for _, sizes in extents):
                out.append(joint)
    return out


def joined(joints: Iterable[Joint], mine: Mapping[str, Tensor], ranks: Alone) -> Iterator[tuple[str, int, Tensor]]:
    """Join boxes with other ranks, which do so at the same time.

    Args:
        mine: this rank's boxes, by name.

    Returns:
        Runs of whole rows that this rank is to write: name, the first element in the tensor, what is in it. Its memory is
        that of the next one.

    Raises:
        CheckpointError: a rank that does not answer.
    """
    steps = [(joint, step) for joint in joints if ranks.rank in joint.ranks for step in range(joint.steps)]
    memory, whole = (_Memory(), _Memory()), _Memory()
    boxes: dict[str, Tensor] = {}  # in host memory

    def begin(number: int) -> _Step | None:
        if number == len(steps):
            return None
        joint, step = steps[number]
        if joint.name not in boxes:
            boxes[joint.name] = mine[joint.name].cpu().contiguous().view(joint.rows, -1)
        return _Step(joint, step, boxes[joint.name], ranks, memory[number % 2])

    upcoming = begin(0)
    for number, (joint, _) in enumerate(steps):
        now, upcoming = upcoming, begin(number + 1)
        yield joint.name, now.first, now.put_together(whole)
        if upcoming is not None and upcoming.joint is not joint:
            del boxes[joint.name]


class _Memory:
    """Memory for one tensor after another, as fresh memory takes longer than filling it."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8, device="cpu")

    def of(self, sizes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
        """Tensors of these sizes."""
        lengths = [math.prod(s) * dtype.itemsize for s in sizes]
        if sum(lengths) > len(self._held):
            self._held = torch.empty(sum(lengths), dtype=torch.uint8, device="cpu")
        parts = self._held[:sum(lengths)].split(lengths)
        return [part.view(dtype).view(tuple(size)) for part, size in zip(parts, sizes)]


class _Step:
    """A step of joining, which begins at once: this rank gets what it lacks of some rows, and sends what others lack.

    Attributes:
        first: the element of the tensor with which its rows begin.
    """

    def __init__(self, joint: Joint, step: int, box: Tensor, ranks: Alone, memory: _Memory) -> None:
        self.joint = joint
        me = joint.ranks.index(ranks.rank)
        begin, end = joint.share(me, step)
        others = [number for number in range(len(joint.ranks)) if number != me]
        self.first = (joint.first + begin) * joint.row
        self._shape = end - begin, *joint.shape[joint.dims:]
        sizes = [(end - begin, *joint.extents[number][1][joint.dims:]) for number in others]
        received = memory.of(sizes, dtype_of(joint.dtype))
        self._parts = {me: box[begin:end].view(end - begin, *joint.extents[me][1][joint.dims:])} | dict(zip(others, received))
        sent = [(box[slice(*joint.share(number, step))], joint.ranks[number]) for number in others]
        self._finish = ranks.trade(sent, [(part, joint.ranks[number]) for number, part in zip(others, received)])

    def put_together(self, whole: _Memory) -> Tensor:
        """Its rows, as soon as all there is of them is here."""
        out, = whole.of([self._shape], dtype_of(self.joint.dtype))
        self._finish()
        for number, part in self._parts.items():
            starts, sizes = (x[self.joint.dims:] for x in self.joint.extents[number])
            out[(slice(None), *(slice(a, a + n) for a, n in zip(starts, sizes)))] = part
        return out
