"""Joining: ranks of one host put short runs of a file together into long ones before they write.

A tensor that is cut in a later dim gives each rank a short run of the file per row, between
the runs of the other ranks. Ranks of one host that have the same rows put them together in memory that they share,
and each rank writes some rows as one run:

    rank 0   a a . .        a a b b   rank 0
             c c . .   ->
    rank 1   . . b b        c c d d   rank 1
             . . d d

Joining takes less time than one call a run, as the file system lets one rank at a time write to a file. Data
written in long runs is also read and synced faster: the kernel keeps it in larger pieces. The steps of each joint
are taken one after another, in rounds; steps of joints without a common rank share a round, and all ranks meet in
each round. In a round a rank writes its columns into the rows of each rank of its joint, all meet, and each rank
then has whole rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ..json_files.json_values import dtype_named
from ..runtime.distributed.coordination import ProcessRanks
from ..runtime.distributed.shared_memory import HostMemory
from .manifest import element_size
from .tensor_files import WrittenBox

__all__ = ["Joint", "joined", "joints_of", "scattered"]

#: In bytes: a joined box has at least `LARGE`, in runs of at most `SHORT`; a rank joins at most `STEP` of rows at
#: a time.
LARGE, SHORT, STEP = 1 << 20, 64 << 10, 4 << 20


#: The start of a box in each dim, and its sizes.
Extent = tuple[tuple[int, ...], tuple[int, ...]]


class Joint(NamedTuple):
    """Boxes of one tensor that together fill their rows.

    A row spans the dims from the first one in which a box is cut; the dims before it count the rows.

    Attributes:
        name, dtype, shape: of the tensor.
        ranks: the ranks that have a box each.
        extents: the boxes of those ranks.
        dims: the number of leading dims that count the rows.
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
        """The number of rows, the same in every box."""
        return math.prod(self.extents[0][1][: self.dims])

    @property
    def first(self) -> int:
        """The index in the tensor of the first row."""
        return self.extents[0][0][0] * math.prod(self.shape[1 : self.dims])

    @property
    def row(self) -> int:
        """The elements of a row of the tensor."""
        return math.prod(self.shape[self.dims :])

    @property
    def steps(self) -> int:
        """The number of steps in which the boxes are joined."""
        at_once = self.most // (self.row * element_size(self.dtype))
        mine = -(-self.rows // len(self.ranks))
        return max(1, -(-mine // at_once))

    def share(self, number: int, step: int) -> tuple[int, int]:
        """The rows [begin, end) that a rank writes in a step.

        Args:
            number: the rank's index in `ranks`.
            step: the step, from 0.
        """
        begin, end = (self.rows * n // len(self.ranks) for n in (number, number + 1))
        return begin + (end - begin) * step // self.steps, begin + (end - begin) * (step + 1) // self.steps


def scattered(written: Iterable[WrittenBox]) -> dict[str, Extent]:
    """The boxes of this rank whose rows other ranks may complete."""
    return {
        w.name: (w.starts, tuple(w.tensor.shape)) for w in written if w.tensor.dim() > 1 and w.tensor.nbytes >= LARGE
    }


def joints_of(
    tensors: Mapping[str, tuple[tuple[int, ...], str, dict[str, object] | None]],
    extents_of_ranks: Sequence[Mapping[str, Extent]],
    most: int,
) -> list[Joint]:
    """The joints, in the order of the tensors.

    Args:
        tensors: name -> (shape, dtype, layout).
        extents_of_ranks: the result of `scattered` on each rank. No two boxes overlap.
        most: bytes of rows that a rank may write in a step.
    """
    out, most = [], min(most, STEP)
    for name, (shape, dtype, _) in tensors.items():
        ranks_of_part: dict[tuple[int, int], list[int]] = {}  # ranks by their part of dim 0
        for rank, extents in enumerate(extents_of_ranks):
            if name in extents:
                starts, sizes = extents[name]
                ranks_of_part.setdefault((starts[0], sizes[0]), []).append(rank)
        for (_, length), ranks in ranks_of_part.items():
            parts = tuple(extents_of_ranks[rank][name] for rank in ranks)
            cut = [dim for _, sizes in parts for dim in range(1, len(shape)) if sizes[dim] < shape[dim]]
            if not cut or sum(math.prod(sizes) for _, sizes in parts) < length * math.prod(shape[1:]):
                continue
            joint = Joint(name, dtype, shape, tuple(ranks), parts, min(cut), most)
            size = element_size(dtype)
            if joint.row * size <= most and all(math.prod(sizes[joint.dims :]) * size <= SHORT for _, sizes in parts):
                out.append(joint)
    return out


def joined(
    joints: Iterable[Joint], mine: Mapping[str, Tensor], ranks: ProcessRanks
) -> Iterator[tuple[str, int, Tensor]]:
    """Join boxes with other ranks. All ranks call it together, including those without a box to join.

    Args:
        joints: the joints, the same on all ranks.
        mine: this rank's boxes, by name.
        ranks: the ranks that save together.

    Returns:
        Runs of whole rows for this rank to write: name, first element in the tensor, values. The memory of a run is
        reused by the next but one.

    Raises:
        CheckpointError: a rank does not arrive.
        Exception: the error that kept this rank's boxes from host memory. Raised only at the end, as the other ranks
            wait for this one in each round.
    """
    memory = ranks.rows()
    failed: Exception | None = None
    boxes: dict[str, Tensor] = {}  # in host memory
    for now in _rounds(joints):
        assert memory is not None  # ranks that share no memory join nothing
        joint, step = now.get(ranks.rank, (None, 0))
        if joint is not None and failed is None:
            try:
                if joint.name not in boxes:
                    boxes = {joint.name: mine[joint.name].cpu().contiguous().view(joint.rows, -1)}
                _write(memory, joint, step, ranks.rank, boxes[joint.name])
            except Exception as error:  # any: raised at the end, as the other ranks wait for this one in each round
                failed = error
        turn = ranks.meet(memory)
        if joint is not None and failed is None:
            begin, end = joint.share(joint.ranks.index(ranks.rank), step)
            yield (
                joint.name,
                (joint.first + begin) * joint.row,
                _rows(memory.rows[turn, ranks.rank], joint, end - begin),
            )
    if failed is not None:
        raise failed


def _write(memory: HostMemory, joint: Joint, step: int, rank: int, box: Tensor) -> None:
    """Write this rank's columns of a step's rows into the rows of each rank of the joint."""
    starts, sizes = (x[joint.dims :] for x in joint.extents[joint.ranks.index(rank)])
    columns = tuple(slice(a, a + n) for a, n in zip(starts, sizes))
    for number, other in enumerate(joint.ranks):
        begin, end = joint.share(number, step)
        rows = _rows(memory.rows[memory.round, other], joint, end - begin)
        rows[(slice(None), *columns)] = box[begin:end].view(end - begin, *sizes)


def _rounds(joints: Iterable[Joint]) -> list[dict[int, tuple[Joint, int]]]:
    """The step of each rank in each round, by rank; a rank without a step has no entry."""
    out: list[dict[int, tuple[Joint, int]]] = []
    taken: dict[int, int] = {}  # by rank, its number of rounds so far
    for joint in joints:
        for step in range(joint.steps):
            at = max(taken.get(rank, 0) for rank in joint.ranks)
            if at == len(out):
                out.append({})
            out[at].update(dict.fromkeys(joint.ranks, (joint, step)))
            taken.update(dict.fromkeys(joint.ranks, at + 1))
    return out


def _rows(memory: Tensor, joint: Joint, count: int) -> Tensor:
    """The first bytes of `memory`, viewed as `count` rows of the joint's tensor."""
    dtype = dtype_named(joint.dtype)
    return memory[: count * joint.row * dtype.itemsize].view(dtype).view(count, *joint.shape[joint.dims :])
