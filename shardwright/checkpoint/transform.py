"""A checkpoint made into one for other devices, or into whole files, in one process that has no devices.

    every box that a destination's rank writes  =  read from the source's files where it lies, written, let go

So there is never more in memory than the largest box, and what the reading of it takes besides. The source is looked through
for damage before anything is written; the destination gets its name when all of it is on the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError
from ..plan.parameter_strategies import ParameterStrategies
from ..report.units import size_text
from .folders import folder_of, steps_in, sync_folder, write_file
from .manifest import MANIFEST, Entry, check_files, new_id
from .part_files import METADATA, Item, PartFile, entries_of, write_metadata
from .placing import Box, boxes_of, one_device, placed
from .reading import Stored, is_hugging_face
from .whole_files import WholeFiles
from .writing import CONFIG, PLAN, STATE, sealed

__all__ = ["Progress", "check_sound", "merge", "opened", "to_verify", "transform"]

#: Is told what is being done, how many bytes of it are, and how many there will be.
Progress = Callable[[str, int, int], None]

#: The search for damage says how far it is every so many bytes, or 64 times.
_SHARE = 256 << 20


def opened(source: str | os.PathLike, step: int | None = None) -> Stored:
    """The tensors of a checkpoint.

    Args:
        source: of a checkpoint, of a run (its latest), or as Hugging Face writes it.
        step: of the run.

    Raises:
        CheckpointError: nothing of the kind, or its manifest is damaged.
    """
    source = Path(source)
    if is_hugging_face(source) and step is None:
        return Stored(source)
    folder = folder_of(source, step) or (source if _without_manifest(source) else None)
    if folder is None:
        raise _no_checkpoint(source)
    return Stored(folder)


def to_verify(path: Path, step: int | None = None) -> list[Path]:
    """The folders whose files are to be looked through: all checkpoints of a run, or that of a step; one whose manifest is
    gone is among them.

    Raises:
        CheckpointError: there is none, or nothing says what its files were.
    """
    if is_hugging_face(path):
        raise CheckpointError("Hugging Face's files have no digests", source=str(path),
                              legal="a folder that save_checkpoint wrote")
    if step is not None or (path / MANIFEST).exists():
        folder = folder_of(path, step)
        if folder is not None:
            return [folder]
    found = list(steps_in(path).values()) or ([path] if _without_manifest(path) else [])
    if not found:
        raise _no_checkpoint(path)
    return found


def _without_manifest(path: Path) -> bool:
    """Whether a folder holds files of a checkpoint, and not the one that says what they are."""
    return path.is_dir() and any(p.name in (STATE, METADATA) or p.suffix == ".distcp" for p in path.iterdir()) and \
        not (path / MANIFEST).exists()


def _no_checkpoint(path: Path) -> CheckpointError:
    return CheckpointError("it is no checkpoint, and has none" if path.is_dir() else "there is no such folder",
                           source=str(path), legal="a folder that save_checkpoint wrote, or that of a run")


def check_sound(stored: Stored, progress: Progress | None = None) -> None:
    """That a checkpoint's files are what was written.

    Raises:
        CheckpointError: what is wrong, with the files.
    """
    made, progress = stored.manifest, progress or _silent
    if made is None:
        return  # what Hugging Face writes has no digests
    total, problems = sum(file.bytes for file in made.files.values()), []
    shares = min(-(-total // _SHARE), 64) or 1
    for share in range(shares):
        progress("checking", total * share // shares, total)
        problems += [p for p in check_files(stored.folder, made, share, shares) if p not in problems]
    progress("checking", total, total)
    if problems:
        raise CheckpointError("the checkpoint is damaged: " + "; ".join(problems), source=str(stored.folder),
                              legal="an earlier checkpoint of the run")


def transform(source: str | os.PathLike, target: str | os.PathLike, to: str | os.PathLike | ParameterStrategies, *,
              step: int | None = None, progress: Progress | None = None) -> Path:
    """Cut a checkpoint anew, as ranks of another run would have saved it in parts; the optimizer's state with it.

    Args:
        source: a checkpoint of either kind, a run (its latest), or a folder of Hugging Face.
        target: the folder of the new checkpoint, which must not be there yet.
        to: a plan that was saved, a file of `AutoParallel.save_param_strategy_file`, or 1: everything whole on one device.
        step: which checkpoint of a run.

    Returns:
        The new checkpoint.

    Raises:
        CheckpointError: a source that is none or damaged, a destination that exists or cannot be written, strategies of
            another model.
        PlanError, LayoutError: strategies that cannot be read.
    """
    progress = progress or _silent
    with opened(source, step) as stored:
        strategies = to if isinstance(to, ParameterStrategies) else \
            one_device(stored.entries) if str(to) == "1" else ParameterStrategies.read(to)
        places = placed(stored.entries, strategies, str(stored.folder))
        tensors = {name: lies.described for name, lies in places.items()}
        with _written(stored, target, progress) as new:
            items = [item for rank in range(strategies.devices) for item in new.part(rank, boxes_of(places, rank))]
            write_metadata(new.folder, tensors, items, new.id)
            if strategies.plan is not None and strategies.path is not None:
                write_file(new.folder / PLAN, strategies.path.read_bytes())
            new.finish("parts", strategies.devices, strategies.plan, entries_of(tensors, items))
    return new.target


def merge(source: str | os.PathLike, target: str | os.PathLike, *, step: int | None = None, progress: Progress | None = None
          ) -> Path:
    """Make whole files of the parts of a checkpoint: ``model.safetensors``, and the optimizer's.

    Args and raises: as `transform`; the source is in parts.
    """
    progress = progress or _silent
    with opened(source, step) as stored:
        made = stored.manifest
        if made is None or made.kind == "integrated":
            raise CheckpointError("its tensors are whole already", source=str(stored.folder), legal="a checkpoint in parts")
        tensors = {name: (entry.shape, entry.dtype, entry.layout) for name, entry in stored.entries.items()}
        with _written(stored, target, progress) as new:
            files = WholeFiles(tensors, new.id, made.step, new.state.get("tied"))
            files.begin(new.folder)
            files.write(new.folder, ((name, piece.starts, new.read(name, tuple(slice(a, a + n) for a, n in zip(
                piece.starts, piece.sizes)))) for name, entry in stored.entries.items() for piece in entry.pieces))
            if PLAN in made.files:
                write_file(new.folder / PLAN, (stored.folder / PLAN).read_bytes())
            new.finish("integrated", made.world, made.plan, files.entries)
    return new.target


def _silent(what: str, done: int, total: int) -> None:
    pass


class _New:
    """A checkpoint that is being written from another.

    Attributes:
        target: where it will be.
        folder: where it is until then.
        id: of this save.
        state: what is not a tensor.
    """

    def __init__(self, stored: Stored, target: Path, progress: Progress) -> None:
        self.target, self.id = target, new_id()
        self.folder = target.parent / f".{target.name}.{self.id}.part"
        self._stored, self._progress = stored, progress
        self._done, self._total = 0, sum(entry.bytes for entry in stored.entries.values())
        self.state = _state(stored)

    @property
    def bytes(self) -> int:
        """What its tensors take."""
        return self._total

    def read(self, name: str, box: Box) -> Tensor:
        """A box of the source's tensor."""
        tensor = self._stored.read(name, box)
        self._done += tensor.nbytes
        self._progress("writing", self._done, self._total)
        return tensor

    def part(self, rank: int, boxes: Iterable[tuple[str, Box]]) -> list[Item]:
        """Write the file of a rank, box by box."""
        file = PartFile(self.folder, rank, self.id)
        try:
            for name, box in boxes:
                file.add(name, [s.start for s in box], self.read(name, box))
            return file.close()
        finally:
            file.abandon()

    def finish(self, kind: str, world: int, plan: str | None, entries: Mapping[str, Entry]) -> None:
        """Write what there is beside tensors, the manifest last, and give the folder its name."""
        if (self._stored.folder / CONFIG).exists():
            write_file(self.folder / CONFIG, (self._stored.folder / CONFIG).read_bytes())
        write_file(self.folder / STATE, json.dumps({**self.state, "id": self.id}, ensure_ascii=False, indent=1).encode())
        self._progress("to the disk", 0, self._total)
        sealed(self.folder, {}, entries, kind, self.state["step"], self.id, plan, world)
        sync_folder(self.folder)
        self._progress("to the disk", self._total, self._total)
        os.rename(self.folder, self.target)
        sync_folder(self.target.parent)


def _state(stored: Stored) -> dict[str, Any]:
    """What a checkpoint holds besides tensors; its id first."""
    if stored.manifest is None:  # a model alone
        return {"id": "", "step": 0, "extra": None, "schedulers": [], "modules": {}, "tied": {}, "random": None, "data": None}
    try:
        return dict(json.loads((stored.folder / STATE).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"it cannot be read: {error}", source=str(stored.folder / STATE),
                              legal="a checkpoint that is whole") from None


@contextlib.contextmanager
def _written(stored: Stored, target: str | os.PathLike, progress: Progress) -> Iterator[_New]:
    """A new checkpoint: whole at the end, or nothing.

    Raises:
        CheckpointError: the source is damaged; the destination is there, or cannot be written.
    """
    target = Path(os.path.abspath(target))
    if os.path.lexists(target):
        raise CheckpointError("it is there already", source=str(target), legal="a folder that is not there yet")
    if not target.parent.is_dir():
        raise CheckpointError(f"there is no folder {target.parent}", source=str(target), legal="a folder in one that is there")
    check_sound(stored, progress)
    new = _New(stored, target, progress)
    needed, free = new.bytes, shutil.disk_usage(target.parent).free
    if needed > free:
        raise CheckpointError(f"it takes {size_text(needed)}, and {size_text(free)} are free", source=str(target),
                              legal="a disk with room for it")
    try:
        new.folder.mkdir()
        yield new
    except OSError as error:
        raise CheckpointError(f"the checkpoint cannot be written: {error.strerror or error}", source=str(target),
                              legal="a folder that can be written, and room on its disk") from None
    finally:
        shutil.rmtree(new.folder, ignore_errors=True)  # it has another name when it is whole
