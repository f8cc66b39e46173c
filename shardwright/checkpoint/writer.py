"""The writing of a save whose content is known, by all ranks together.

1. Every step of a save (`SaveJob`) ends in an agreement: an error on one rank is raised on all, and everything written
   is removed.

    whole files     headers by rank 0, boxes by all ranks of its host that see its folder; boxes of other ranks are sent
                    to rank 0
    parts           one file a rank, then rank 0 writes ``.metadata``
    both            digests, fsync; then rank 0 writes state, plan and manifest, renames the folder, prunes

   Ranks that do not see the folder of rank 0 write their parts into a folder of their own path. One rank of each such
   folder leads it: the one that made it. It writes state, plan and manifest as rank 0 has them, and renames its folder
   before rank 0 renames the first one: a checkpoint that is whole under rank 0's path is whole in all folders.

2. Joining (`joined`): ranks of one host put short runs of a whole file together into long ones before they write. A
   tensor that is cut in a later dim gives each rank a short run of the file per row, between the runs of the other
   ranks. Ranks of one host that have the same rows put them together in memory that they share, and each rank writes
   some rows as one run:

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

import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..errors import CheckpointError, ShardwrightError
from ..json_files.json_reader import JsonObject
from ..json_files.json_values import dtype_named, encode
from ..launch.progress import Work
from ..pipeline.pipeline_plan import PipelinePlan
from ..runtime.distributed.rank_messages import ProcessRanks, SingleRank
from ..runtime.distributed.shared_memory import HostMemory
from ..sharded_plan import Plan
from . import checkpoint_folders as folders
from .checkpoint_folders import Synced, sealed
from .digests import digest, shares
from .manifest import MANIFEST, CheckpointFile, Piece, TensorEntry, element_size, write_file
from .run_state import STATE, state_text
from .stored_checkpoint import place_of
from .tensor_files import DcpItem, PartFile, WholeFiles, WrittenBox, entries_of, part_name, write_metadata

__all__ = ["CONFIG", "PLAN", "Described", "Joint", "SaveJob", "joined", "joints_of", "located", "scattered"]

# -- joining


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


# -- the save


PLAN, CONFIG = "plan.json", "config.json"

#: Name -> (shape, dtype, layout) of a tensor.
Described = Mapping[str, tuple[tuple[int, ...], str, dict[str, object] | None]]


def located(error: Exception, path: object) -> Exception:
    """The error of a save in the form that users see."""
    if isinstance(error, OSError):
        return CheckpointError(
            f"the checkpoint cannot be written: {error.strerror or error}",
            source=str(error.filename or path),
            legal="a folder that can be written, and room on its disk",
        )
    if isinstance(error, ShardwrightError):
        return error
    return CheckpointError(f"the checkpoint cannot be written: {type(error).__name__}: {error}", source=str(path))


@dataclass
class SaveJob:
    """One save, on one rank.

    Attributes:
        ranks: the ranks that save together.
        path: the folder of the run's checkpoints.
        step: the step of the run.
        whole: True: files of whole tensors; False: one file a rank.
        keep: the number of checkpoints kept; None: all.
        order: the names of the model's tensors.
        aliases: further name of a tied tensor -> its first name.
        plan: the plan, if there is one.
        written: the boxes that this rank writes.
        description: the description of this rank's part for the other ranks.
        random: the states of this rank's `generators`.
        data: this rank's position in the data, encoded.
        state: the rest of the state; rank 0's is written.
        texts: file -> content that rank 0 writes besides.
        tensors: the tensors of all ranks.
        remote: rank that does not write into the file of rank 0 -> the boxes that it sends: name, start, sizes, dtype.
        places: of each rank, where there are several folders, the folder that it writes to: ``host:path``.
        leads: True where this rank has made a folder that ranks beside it write to.
        id: the id of this save.
        failed: an error of this rank from before it began to write.
    """

    ranks: SingleRank
    path: Path
    step: int
    whole: bool
    keep: int | None
    order: list[str]
    aliases: Mapping[str, str]
    plan: Plan | PipelinePlan | None
    written: list[WrittenBox]
    description: JsonObject
    random: dict[str, object]
    data: dict[str, object] | None
    state: dict[str, Any]
    texts: dict[str, bytes]
    tensors: Described = field(default_factory=dict)
    remote: dict[int, list[tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype]]] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)
    leads: bool = False
    id: str = ""
    failed: Exception | None = None
    work: Work = field(default_factory=lambda: Work("checkpoint"))

    @property
    def part(self) -> Path:
        """The folder being written."""
        return self.path / f".{folders.name_of(self.step)}.{self.id}.part"

    def settle(self, descriptions: list[JsonObject]) -> None:
        """Combine the descriptions of all ranks.

        Args:
            descriptions: the descriptions, by rank.

        Raises:
            CheckpointError: ranks save different things; raised on all of them.
        """
        self.id = descriptions[0]["id"]
        for rank, other in enumerate(descriptions):
            for key in ("step", "integrated_save"):
                if other[key] != descriptions[0][key]:
                    raise CheckpointError(
                        f"rank {rank} saves with {key}={other[key]!r}, rank 0 with {descriptions[0][key]!r}",
                        source=str(self.path),
                        legal="the same on every rank",
                    )
        order = {name: i for i, name in enumerate(self.order)}
        parameters = {name.removeprefix("model."): i for name, i in order.items()}

        def place(name: str) -> tuple[int, int, str]:
            if not name.startswith("optimizer."):
                return 0, order[name], ""
            parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
            return 1, parameters[parameter], key

        everything = {name: described for other in descriptions for name, described in other["tensors"].items()}
        self.tensors = {name: everything[name] for name in sorted(everything, key=place)}
        if self.state["optimizer"] is not None:
            self.state["optimizer"]["scalars"] = {k: v for other in descriptions for k, v in other["scalars"].items()}

    def write(self) -> None:
        """Write the checkpoint.

        Raises:
            CheckpointError: the failure of any rank; raised on all of them.
        """
        size = sum(w.tensor.nbytes for w in self.written)
        if_stopped = "the earlier checkpoints are whole, and nothing is left of this one"
        try:
            with Work(f"checkpoint of step {self.step}", size, "bytes", if_stopped) as self.work:
                self._meet()
                self._gather()
                entries, files = self._write_whole() if self.whole else self._write_parts()
                with Work("to the disk"):
                    self._each(lambda: self._finish(entries, files) if self.ranks.rank == 0 else None)
                    self._rename()
        except BaseException:  # of any kind, and Ctrl-C: raised again
            self.give_up()
            raise
        finally:
            self.written = []

    def _meet(self) -> None:
        """Find out which ranks see the folder that rank 0 has made.

        The others make folders of their own for parts, and send their boxes of whole files.

        Raises:
            CheckpointError: a rank sees no folder and cannot make one, with both; raised on all ranks.
        """
        rank, boxes = self.ranks.rank, None
        sees = rank == 0 or self.part.is_dir()
        if self.whole and (not sees or self.ranks.remote(rank)):
            boxes = [[w.name, list(w.starts), list(w.tensor.shape), w.tensor.dtype] for w in self.written]
        views = self.ranks.exchanged([sees, place_of(self.path), boxes])
        self.remote = {
            other: [(name, tuple(starts), tuple(sizes), dtype) for name, starts, sizes, dtype in theirs]
            for other, (_, _, theirs) in enumerate(views)
            if theirs is not None
        }
        if self.whole or all(sees for sees, *_ in views):
            return
        self.places = [views[0][1] if sees else place for sees, place, _ in views]
        reason = None
        if not sees and self.failed is None:
            try:
                self.leads = folders.join(self.path, self.step, self.id)
            except OSError as error:
                reason = error.strerror or str(error)
        for other, why in enumerate(self.ranks.exchanged(reason)):
            if why is not None:
                raise CheckpointError(
                    f"rank {other} does not see the folder that rank 0 saves to, {self.places[0]}, and cannot make its "
                    f"own, {self.places[other]}: {why}",
                    source=self.places[other],
                    legal="a folder that all ranks see, or one for each host that can be written",
                )

    def _gather(self) -> None:
        """Gather the random state and the data position of each rank on rank 0."""
        rank_state: dict[str, object] = {}
        try:
            rank_state = {"random": {key: encode(value) for key, value in self.random.items()}, "data": self.data}
        except Exception as error:  # raised later, in an agreement of all ranks
            self.failed = self.failed or located(error, self.part)
        states = self.ranks.gathered(rank_state)
        self.state |= {key: _by_rank([theirs.get(key) for theirs in states]) for key in ("random", "data") if states}

    def give_up(self) -> None:
        """Remove everything written so far."""
        if self.ranks.rank == 0:
            self.id = self.description["id"]
        if self.ranks.rank == 0 or self.leads:
            shutil.rmtree(self.part, ignore_errors=True)

    def _each(self, work: Callable[[], object]) -> list[Any]:
        """The results of `work` on each rank, by rank.

        Raises:
            Exception: the error of one rank; raised on all of them.
        """
        made, error = None, None
        try:
            made = work()
        except Exception as raised:  # agreed on below, so that all ranks raise it
            error = located(raised, self.part)
        return self.ranks.agreed(error, made)

    # -- files of whole tensors --

    def _write_whole(self) -> tuple[dict[str, TensorEntry], dict[str, CheckpointFile]]:
        ranks, rank = self.ranks, self.ranks.rank
        near = [r for r in range(ranks.world) if r not in self.remote]
        files = WholeFiles(self.tensors, self.id, self.step, self.aliases)
        joints = [] if ranks.world == 1 or self.remote else self._joints()
        shared = {joint.name for joint in joints if rank in joint.ranks}

        def write() -> None:
            if rank in near or self.failed is not None:
                self._look()
                if rank == 0:
                    files.begin(self.part)
                files.write(
                    self.part, ((w.name, w.starts, self._host(w)) for w in self.written if w.name not in shared)
                )

        def check() -> dict[str, list[tuple[int, str]]]:
            mine: dict[str, list[tuple[int, str]]] = {}
            if rank in near:
                with Synced(self.part, list(files.sizes)):
                    for name, first, last in shares(files.sizes, near.index(rank), len(near)):
                        mine.setdefault(name, []).append((first, digest(self.part / name, first, last)))
            return mine

        self._each(write)
        if joints:
            self._each(lambda: self._join(files, joints))
        if self.remote:
            self._each(lambda: self._carry(files))
        blocks: dict[str, list[tuple[int, str]]] = {name: [] for name in files.sizes}
        for by_file in self._each(check):
            for name, some in by_file.items():
                blocks[name] += some
        return files.entries, {
            name: CheckpointFile(size, "".join(text for _, text in sorted(blocks[name])))
            for name, size in files.sizes.items()
        }

    def _host(self, written: WrittenBox) -> torch.Tensor:
        """The values of a box in host memory, which are written next."""
        self.work.add(written.tensor.nbytes)
        return written.tensor.cpu()

    @property
    def _several(self) -> ProcessRanks:
        """The ranks, where there are several; a single rank sends nothing."""
        return cast("ProcessRanks", self.ranks)

    def _joints(self) -> list[Joint]:
        """The boxes that ranks join, where all are on one host; empty where the ranks share no memory."""
        extents = self.ranks.exchanged(scattered(self.written))
        if not any(extents) or self._several.rows() is None:
            return []
        return joints_of(self.tensors, extents, self._several.row_bytes)

    def _join(self, files: WholeFiles, joints: list[Joint]) -> None:
        """Write boxes that are short runs in the file, joined with the other columns of their rows from other ranks."""
        failed: Exception | None = None
        for name, first, rows in joined(joints, {w.name: w.tensor for w in self.written}, self._several):
            try:
                if failed is None:
                    files.write_run(self.part, name, first, rows)
            except Exception as error:  # any: raised at the end, as the other ranks wait for this one in each round
                failed = error
        if failed is not None:
            raise failed

    def _carry(self, files: WholeFiles) -> None:
        """Send boxes of ranks that do not write into the file to rank 0, which writes them.

        Two hosts that write into one page of a file may each lose the writes of the other.
        """
        failed: OSError | None = None
        for rank, boxes in self.remote.items():
            mine = iter(self.written)
            for name, starts, sizes, dtype in boxes:
                if rank == self.ranks.rank:
                    self._several.send(next(mine).tensor.cpu().contiguous().reshape(-1).view(torch.uint8))
                elif self.ranks.rank == 0:
                    box = torch.empty(sizes, dtype=dtype, device="cpu")
                    self._several.receive(box.reshape(-1).view(torch.uint8), rank)
                    try:
                        if failed is None:
                            files.write(self.part, [(name, starts, box)])
                    except OSError as error:
                        failed = error  # goes on receiving: the other ranks go on sending
        if failed is not None:
            raise failed

    # -- one file a rank --

    def _write_parts(self) -> tuple[dict[str, TensorEntry], dict[str, CheckpointFile]]:
        items: list[DcpItem] = []
        files: dict[str, CheckpointFile] = {}

        def write() -> None:
            self._look()
            part = PartFile(self.part, self.ranks.rank, self.id)
            try:
                for name, starts, tensor in self.written:
                    part.add(name, starts, tensor.cpu())
                    self.work.add(tensor.nbytes)
                items.extend(part.close())
            finally:
                part.abandon()
            with Synced(self.part, [part.name]):
                path = self.part / part.name
                files[part.name] = CheckpointFile(path.stat().st_size, digest(path))

        self._each(write)
        # In lists: a large model has ten thousand boxes a rank, and rank 0 reads those of all ranks.
        boxes = [[i.name, *i.piece[:2], list(i.piece.starts), list(i.piece.sizes), i.offset, i.length] for i in items]
        gathered = self.ranks.gathered({"files": files, "boxes": boxes})
        items = [
            DcpItem(name, Piece(file, first, tuple(starts), tuple(sizes)), *at)
            for theirs in gathered
            for name, file, first, starts, sizes, *at in theirs["boxes"]
        ]
        self._each(lambda: write_metadata(self.part, self.tensors, items, self.id) if self.ranks.rank == 0 else None)
        files = {name: CheckpointFile(*file) for theirs in gathered for name, file in theirs["files"].items()}
        return entries_of(self.tensors, items), files

    def _look(self) -> None:
        if self.failed is not None:
            raise self.failed
        if not self.part.is_dir():
            raise CheckpointError(
                "the folder of the save is not there any more",
                source=str(self.part),
                legal="a folder that nothing else removes",
            )

    def _finish(self, entries: dict[str, TensorEntry], files: dict[str, CheckpointFile]) -> None:
        """Write the remaining files, on rank 0, and give the folder its final name."""
        if self.plan is not None:
            self.plan.save(self.part / PLAN)
        state = state_text(self.id, self.state, str(self.path))
        for name, text in {**self.texts, STATE: state}.items():
            write_file(self.part / name, text)
        sealed(
            self.part,
            files,
            entries,
            "integrated" if self.whole else "parts",
            self.step,
            self.id,
            None if self.plan is None else self.plan.fingerprint,
            self.ranks.world,
            self._folders(),
        )

    def _folders(self) -> dict[str, list[str]]:
        """Each folder with the parts that it alone has; empty where there is one folder."""
        out: dict[str, list[str]] = {}
        for rank, place in enumerate(self.places):
            out.setdefault(f"{place}/{folders.name_of(self.step)}", []).append(part_name(rank))
        return out

    def _rename(self) -> None:
        """Give the folders their final names, that of rank 0 last, and remove old checkpoints."""
        first = self.ranks.rank == 0
        if self.places:
            self._each(self._copy)
            self._each(lambda: self._finished() if self.leads else None)
            if first:
                _warn_once(self.places)
        self._each(lambda: self._named() if first else None)
        if self.places:
            self._each(lambda: folders.prune(self.path, self.keep, self.step) if self.leads else None)

    def _finished(self) -> None:
        folders.finish(self.part, self.step, self.id)

    def _named(self) -> None:
        self._finished()
        folders.prune(self.path, self.keep, self.step)

    def _copy(self) -> None:
        """Write everything but the parts, as rank 0 has written it, into the folder that this rank leads."""
        mine: dict[str, bytes] | None = None
        failed: OSError | None = None
        try:
            if self.ranks.rank == 0:
                parts = {part_name(rank) for rank in range(self.ranks.world)}
                mine = {p.name: p.read_bytes() for p in self.part.iterdir() if p.name not in parts}
        except OSError as error:  # raised once the other ranks, which wait for the files, have been told
            failed = error
        contents = self.ranks.from_first(mine)
        if failed is not None:
            raise failed
        if self.leads:
            for name in sorted(contents or (), key=lambda name: name == MANIFEST):
                write_file(self.part / name, contents[name])


def _warn_once(places: Sequence[str]) -> None:
    """Say once that the checkpoints of a run lie in several folders."""
    if tuple(places) not in _warned:
        _warned.add(tuple(places))
        warnings.warn(
            f"the checkpoints lie in {len(set(places))} folders, each with the parts of its own ranks: "
            f"{', '.join(dict.fromkeys(places))}. The run goes on from them; to read a checkpoint elsewhere, copy its "
            "folders together",
            stacklevel=2,
        )


_warned: set[tuple[str, ...]] = set()


def _by_rank(states: list[object]) -> dict[str, object] | None:
    """The ranks' own states, equal ones stored once: ``{"ranks": [0, 0, 1], "states": [...]}``.

    Returns:
        The states, and for each rank the index of its state; None where no rank has any.
    """
    if all(state is None for state in states):
        return None
    texts = [json.dumps(state) for state in states]
    known = list(dict.fromkeys(texts))
    return {"ranks": [known.index(text) for text in texts], "states": [states[texts.index(text)] for text in known]}
