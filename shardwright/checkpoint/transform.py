"""Transformation of a checkpoint for other devices, or into whole files, in one process without devices.

    for each box that a rank of the destination writes:  read it from the source's files, write it, free it

Memory therefore holds at most the largest box, and the buffers of reading it. The source is checked for damage before
anything is written; the destination gets its final name when all of it is on the disk.

1. `transform`: cut one checkpoint anew, for another plan or strategy file. Example: a weight (8, 8) that 2 ranks have
   saved by rows of 4 becomes, for 4 ranks, 4 parts with 2 rows each; parts 0 and 1 are read from rank 0's file.
2. `merge`: write the parts of a checkpoint as whole files.
3. Public functions for scripts: `rank_list_for_transform` (the ranks whose parts another layout needs),
   `transform_checkpoints` (all checkpoints of a run), `load_distributed_checkpoint` (slices loaded into a plain
   module).

`load_checkpoint` does the same inside a run, for the slices of the present ranks, without writing files.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, PlanError, SettingError, known_keywords
from ..launch.progress import Work, showing
from ..planfile.parameter_file import ParameterStrategies, TensorStorage
from ..process_runtime import rank as this_rank
from ..report.format import size_text
from ..runtime.deferred_init import substitute
from ..runtime.distributed.rank_messages import SingleRank
from ..sharded_plan import ParameterPlan
from . import manifest
from .checkpoint_folders import absent, folder_of, folder_of_files, name_of, sealed, steps_in
from .load import load_checkpoint
from .manifest import MANIFEST, TensorEntry, check_all, new_id, sync_folder, write_file
from .run_state import STATE, Box, CheckpointedModel, generators, read_state, restore_generators, state_text
from .stored_checkpoint import StoredTensors, is_hugging_face
from .target_placement import boxes_of, one_device, placed, strategy_name
from .tensor_files import METADATA, DcpItem, PartFile, WholeFiles, entries_of, write_metadata
from .writer import CONFIG, PLAN

__all__ = [
    "Box",
    "Progress",
    "check_sound",
    "load_distributed_checkpoint",
    "merge",
    "opened",
    "rank_list_for_transform",
    "to_verify",
    "transform",
    "transform_checkpoints",
]


#: Called with the current activity, the bytes of it done, and its total bytes.
Progress = Callable[[str, int, int], None]


def opened(source: str | os.PathLike[str], step: int | None = None) -> StoredTensors:
    """The tensors of a checkpoint.

    Args:
        source: the folder of a checkpoint, of a run (its latest checkpoint), or of a Hugging Face model.
        step: the step of the run.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.
    """
    source = Path(source)
    if is_hugging_face(source) and step is None:
        return StoredTensors(source)
    folder = folder_of(source, step) or (source if _without_manifest(source) else None)
    if folder is None:
        raise _no_checkpoint(source)
    return StoredTensors(folder)


def to_verify(path: Path, step: int | None = None) -> list[Path]:
    """The folders whose files are to be checked: all checkpoints of a run, or the one of a step.

    A checkpoint whose manifest is gone is included.

    Raises:
        CheckpointError: there is no checkpoint, or the files have no digests.
    """
    if is_hugging_face(path):
        raise CheckpointError(
            "Hugging Face's files have no digests", source=str(path), legal="a folder that save_checkpoint wrote"
        )
    if step is not None or (path / MANIFEST).exists():
        folder = folder_of(path, step)
        if folder is not None:
            return [folder]
    found = list(steps_in(path).values()) or ([path] if _without_manifest(path) else [])
    if not found:
        raise _no_checkpoint(path)
    return found


def _without_manifest(path: Path) -> bool:
    """True where a folder holds files of a checkpoint but no manifest."""
    return (
        path.is_dir()
        and any(p.name in (STATE, METADATA) or p.suffix == ".distcp" for p in path.iterdir())
        and not (path / MANIFEST).exists()
    )


def _no_checkpoint(path: Path) -> CheckpointError:
    return CheckpointError(
        absent(path, "it is no checkpoint, and has none"),
        source=str(path),
        legal="a folder that save_checkpoint wrote, or that of a run",
    )


def check_sound(stored: StoredTensors, progress: Progress | None = None) -> None:
    """Check that a checkpoint's files are as they were written.

    Raises:
        CheckpointError: the files that are damaged, and their problems.
    """
    made = stored.manifest
    if made is None:
        return  # files of Hugging Face have no digests
    problems = check_all(stored.folder, made, None if progress is None else partial(progress, "checking"))
    if problems:
        raise CheckpointError(
            "the checkpoint is damaged: " + "; ".join(problems),
            source=str(stored.folder),
            legal="an earlier checkpoint of the run",
        )


def transform(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str | os.PathLike[str] | ParameterStrategies,
    *,
    step: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Cut a checkpoint anew, optimizer state included, into the parts that ranks of another run would have saved.

    Args:
        source: a checkpoint of either kind, a run (its latest checkpoint), or a folder of Hugging Face.
        target: the folder of the new checkpoint, which must not exist yet.
        to: a saved plan, a file of `AutoParallel.save_param_strategy_file`, or 1: everything whole on one device.
        step: the step of a run's checkpoint.
        progress: called with the current activity, its bytes done and its total bytes; None: progress is shown as
            that of any long work (`shardwright.quiet`).

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: the source is no checkpoint or damaged, the destination exists or cannot be written, or the
            strategies are of another model.
        PlanError, LayoutError: the strategies cannot be read.
    """
    with _announced("transform", progress) as progress, opened(source, step) as stored:
        strategies = (
            to
            if isinstance(to, ParameterStrategies)
            else one_device(stored.entries)
            if str(to) == "1"
            else ParameterStrategies.read(to)
        )
        places = placed(stored.entries, strategies, str(stored.folder))
        tensors = {name: lies.described for name, lies in places.items()}
        with _written(stored, target, progress) as new:
            items = [item for rank in range(strategies.devices) for item in new.part(rank, boxes_of(places, rank))]
            write_metadata(new.folder, tensors, items, new.id)
            if strategies.plan is not None and strategies.path is not None:
                write_file(new.folder / PLAN, strategies.path.read_bytes())
            new.finish("parts", strategies.devices, strategies.plan, entries_of(tensors, items))
    return new.target


def merge(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    step: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the parts of a checkpoint as whole files: ``model.safetensors``, and the optimizer's.

    Args and raises: see `transform`; the source is a checkpoint in parts.
    """
    with _announced("merge", progress) as progress, opened(source, step) as stored:
        made = stored.manifest
        if made is None or made.kind == "integrated":
            raise CheckpointError(
                "its tensors are whole already", source=str(stored.folder), legal="a checkpoint in parts"
            )
        tensors = {name: (entry.shape, entry.dtype, entry.layout) for name, entry in stored.entries.items()}
        with _written(stored, target, progress) as new:
            files = WholeFiles(tensors, new.id, made.step, new.state.get("tied"))
            files.begin(new.folder)
            files.write(
                new.folder,
                (
                    (
                        name,
                        piece.starts,
                        new.read(name, tuple(slice(a, a + n) for a, n in zip(piece.starts, piece.sizes))),
                    )
                    for name, entry in stored.entries.items()
                    for piece in entry.pieces
                ),
            )
            if PLAN in made.files:
                write_file(new.folder / PLAN, (stored.folder / PLAN).read_bytes())
            new.finish("integrated", made.world, made.plan, files.entries)
    return new.target


@contextlib.contextmanager
def _announced(name: str, progress: Progress | None) -> Iterator[Progress]:
    """The work of making a checkpoint from another, told what it does; a user's function is told in place of a
    display."""
    with showing(progress), Work(name, if_stopped="nothing is left of the new checkpoint") as work:

        def tell(what: str, done: int, total: int) -> None:
            work.name, work.done, work.total, work.unit = f"{name}: {what}", done, total, "bytes"
            if progress is not None:
                progress(what, done, total)

        yield tell


class _New:
    """A checkpoint being written from another.

    Attributes:
        target: its final folder.
        folder: its folder while it is written.
        id: the id of this save.
        state: everything but the tensors.
    """

    def __init__(self, stored: StoredTensors, target: Path, progress: Progress) -> None:
        self.target, self.id = target, new_id()
        self.folder = target.parent / f".{target.name}.{self.id}.part"
        self._stored, self._progress = stored, progress
        self._done, self._total = 0, sum(entry.bytes for entry in stored.entries.values())
        self.state = _state(stored)

    @property
    def bytes(self) -> int:
        """The bytes of its tensors."""
        return self._total

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor of the source."""
        tensor = self._stored.read(name, box)
        self._done += tensor.nbytes
        self._progress("writing", self._done, self._total)
        return tensor

    def part(self, rank: int, boxes: Iterable[tuple[str, Box]]) -> list[DcpItem]:
        """Write the file of a rank, box by box."""
        file = PartFile(self.folder, rank, self.id)
        try:
            for name, box in boxes:
                file.add(name, [s.start for s in box], self.read(name, box))
            return file.close()
        finally:
            file.abandon()

    def finish(self, kind: str, world: int, plan: str | None, entries: Mapping[str, TensorEntry]) -> None:
        """Write everything but the tensors, the manifest last, and give the folder its final name."""
        if (self._stored.folder / CONFIG).exists():
            write_file(self.folder / CONFIG, (self._stored.folder / CONFIG).read_bytes())
        write_file(self.folder / STATE, state_text(self.id, {**self.state, "id": self.id}, str(self.target)))
        self._progress("to the disk", 0, self._total)
        sealed(self.folder, {}, entries, kind, self.state["step"], self.id, plan, world)
        sync_folder(self.folder)
        self._progress("to the disk", self._total, self._total)
        os.rename(self.folder, self.target)
        sync_folder(self.target.parent)


def _state(stored: StoredTensors) -> dict[str, Any]:
    """The state of a checkpoint other than tensors; its id first."""
    if stored.manifest is None:  # a Hugging Face model: no other state
        return {
            "id": "",
            "step": 0,
            "extra": None,
            "schedulers": [],
            "modules": {},
            "tied": {},
            "random": None,
            "data": None,
        }
    return read_state(stored.folder, stored.manifest)


@contextlib.contextmanager
def _written(stored: StoredTensors, target: str | os.PathLike[str], progress: Progress) -> Iterator[_New]:
    """A new checkpoint: whole at the end of the block, or removed.

    Raises:
        CheckpointError: the source is damaged; the destination exists, or cannot be written.
    """
    target = Path(os.path.abspath(target))
    if os.path.lexists(target):
        raise CheckpointError("it is there already", source=str(target), legal="a folder that is not there yet")
    if not target.parent.is_dir():
        raise CheckpointError(
            f"there is no folder {target.parent}", source=str(target), legal="a folder in one that is there"
        )
    check_sound(stored, progress)
    new = _New(stored, target, progress)
    needed, free = new.bytes, shutil.disk_usage(target.parent).free
    if needed > free:
        raise CheckpointError(
            f"it takes {size_text(needed)}, and {size_text(free)} are free",
            source=str(target),
            legal="a disk with room for it",
        )
    try:
        new.folder.mkdir()
        yield new
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint cannot be written: {error.strerror or error}",
            source=str(target),
            legal="a folder that can be written, and room on its disk",
        ) from None
    finally:
        shutil.rmtree(new.folder, ignore_errors=True)  # a whole checkpoint has been renamed by now


# -- public functions without devices ----------------------------------------------------------------------------------


def rank_list_for_transform(
    rank_id: int,
    src_strategy_file: str | os.PathLike[str] | None = None,
    dst_strategy_file: str | os.PathLike[str] | None = None,
) -> list[int]:
    """The ranks of a source whose slices make up the slices of one rank of a destination.

    Args:
        rank_id: the rank of the destination.
        src_strategy_file: the storage of the source's parameters: a file of `AutoParallel.save_param_strategy_file`,
            or a plan. Among ranks that hold the same slice, the list has as few as possible, and the lower ones. A
            saved checkpoint is allowed too: the list then has the ranks whose parts hold the slices, each slice
            having been written by one of its holders. None: one whole file.
        dst_strategy_file: the storage of the destination's parameters, likewise; None: whole.

    Returns:
        The ranks, ascending; ``[0]`` where the source is whole.

    Raises:
        SettingError: the destination has no such rank.
        PlanError: a file cannot be read, or is of another model.
        CheckpointError: a checkpoint cannot be read.

    Example:
        >>> plan.save("whole.json")  # each rank has all of each parameter
        >>> sw.rank_list_for_transform(0, "whole.json")
        [0]
        >>> cut = sw.shard(net[0], ((1, 1), (8, 1)))  # each rank has an eighth of this one
        >>> sw.plan(net, (x,), loss_fn, y, devices=8).save("cut.json")
        >>> sw.rank_list_for_transform(0, "cut.json")
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    target = None if dst_strategy_file is None else ParameterStrategies.read(dst_strategy_file)
    devices = 1 if target is None else target.devices
    if not isinstance(rank_id, int) or isinstance(rank_id, bool) or not 0 <= rank_id < devices:
        raise SettingError(
            f"rank_list_for_transform: rank_id={rank_id!r} of {devices} devices",
            legal=f"0 to {devices - 1}" if devices > 1 else "0",
        )
    if src_strategy_file is None:
        return [0]
    if Path(src_strategy_file).is_dir():
        source = _of_checkpoint(Path(src_strategy_file))
    else:
        strategies = ParameterStrategies.read(src_strategy_file)
        source = {
            name: [(storage.shape, box, ranks) for box, ranks in storage.boxes]
            for name, storage in strategies.all.items()
        }
    return _fewest(
        [
            ranks
            for name, parts in source.items()
            for shape, box, ranks in parts
            for wanted in (_wanted(name, shape, target, rank_id),)
            if wanted is not None and _meet(box, wanted)
        ]
    )


def _wanted(name: str, shape: tuple[int, ...], target: ParameterStrategies | None, rank: int) -> Box | None:
    """The box of a tensor that a rank of the destination has; None: nothing.

    Raises:
        PlanError: the destination has no such parameter, or one of another shape.
    """
    if target is None:
        return tuple(slice(0, size) for size in shape)
    storage = target.all.get(name)
    if storage is None or storage.shape != shape:
        raise PlanError(
            f"it has no {name!r} of shape {list(shape)}, which the source has: of another model?",
            source=storage.where if storage is not None else target.source,
            legal="strategies of one model",
        )
    return storage.slice(rank) if rank in storage.ranks else None


def _of_checkpoint(folder: Path) -> dict[str, list[tuple[tuple[int, ...], Box, tuple[int, ...]]]]:
    """The shape and the parts of each parameter and buffer of a checkpoint, with the rank that wrote each part."""
    return {
        strategy_name(name) or name: [
            (
                entry.shape,
                tuple(slice(a, a + n) for a, n in zip(piece.starts, piece.sizes)),
                (rank_of(piece.file, folder),),
            )
            for piece in entry.pieces
        ]
        for name, entry in manifest.read(folder).tensors.items()
        if not name.startswith("optimizer.")
    }


def rank_of(file: str, folder: Path) -> int:
    """The rank that wrote a file of a checkpoint; 0 for a file of whole tensors.

    Raises:
        CheckpointError: the file is no rank's part.
    """
    found = re.fullmatch(r"__(\d+)_\d+\.distcp", file)
    if found:
        return int(found[1])
    if file.endswith(".safetensors"):
        return 0
    raise CheckpointError(f"{file!r} is no rank's part", source=str(folder), legal="__0_0.distcp")


def _meet(box: Box, other: Box) -> bool:
    """True where two boxes have an element in common."""
    return all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in zip(box, other))


def _fewest(needs: Sequence[tuple[int, ...]]) -> list[int]:
    """A set of ranks that has one rank of each need: first the only candidates, then the lowest of each other need."""
    found: set[int] = set()
    for ranks in sorted(set(needs), key=lambda ranks: (len(ranks), ranks)):
        if found.isdisjoint(ranks):
            found.add(ranks[0])
    return sorted(found)


def transform_checkpoints(
    src_checkpoints_dir: str | os.PathLike[str],
    dst_checkpoints_dir: str | os.PathLike[str],
    dst_strategy_file: str | os.PathLike[str] | None = None,
    *,
    progress: Progress | None = None,
) -> list[Path]:
    """Transform every checkpoint of a run, optimizer state included, one after another in one process.

    The layout of the source is read from its manifests.

    Args:
        src_checkpoints_dir: the folder of the run, or of one checkpoint.
        dst_checkpoints_dir: the folder of the new run, created where it does not exist. Each checkpoint keeps its
            step.
        dst_strategy_file: the target storage of the parameters: a file of `AutoParallel.save_param_strategy_file`, or
            a saved plan. None: whole files.
        progress: called with the current activity, its bytes done and its total bytes.

    Returns:
        The folders of the new checkpoints.

    Raises:
        CheckpointError: there is no checkpoint; one is damaged, or of another model; one of its step exists already.
            Checkpoints that were done before stay.
        PlanError, LayoutError: the strategies cannot be read.

    Example:
        >>> saving = sw.save_checkpoint(model, optimizer, "runs/7", step=3)
        >>> plan.save("plan.json")
        >>> [path.name for path in sw.transform_checkpoints("runs/7", "runs/8", "plan.json")]
        ['step-00000003']
    """
    source, target = Path(src_checkpoints_dir), Path(dst_checkpoints_dir)
    single = folder_of(source) if (source / manifest.MANIFEST).exists() else None
    found = list(steps_in(source).values()) if single is None else [single]
    if not found:
        raise CheckpointError(absent(source), source=str(source), legal="the folder of a run, or of a checkpoint")
    strategies = None if dst_strategy_file is None else ParameterStrategies.read(dst_strategy_file)
    named = {folder: target / name_of(manifest.read(folder).step) for folder in found}
    existing = next((new for new in named.values() if os.path.lexists(new)), None)
    if existing is not None:
        raise CheckpointError(
            "it is there already", source=str(existing), legal="a folder without checkpoints of these steps"
        )
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"it cannot be made: {error.strerror}", source=str(target), legal="a folder that can be written"
        ) from None
    return [
        merge(folder, new, progress=progress)
        if strategies is None
        else transform(folder, new, strategies, progress=progress)
        for folder, new in named.items()
    ]


@known_keywords(
    {
        "unified_safetensors_dir": "checkpoint=, the folder",
        "format": "nothing: the folder says what is in it",
        "dst_safetensors_dir": "transform_checkpoints",
        "name_map": "nothing: names are those of the model",
    }
)
def load_distributed_checkpoint(
    network: nn.Module,
    checkpoint: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    predict_strategy: Mapping[str, ParameterPlan] | str | os.PathLike[str] | None = None,
    *,
    rank_id: int | None = None,
    strict_load: bool = True,
    checkpoint_filenames: Sequence[str | os.PathLike[str]] | None = None,
    train_strategy_filename: str | os.PathLike[str] | None = None,
) -> None:
    """Load the model of a checkpoint of any kind and layout for prediction, without optimizer and random state.

        sw.load_distributed_checkpoint(network, "runs/7", model.infer_layout(x))
        sw.load_distributed_checkpoint(network, sorted(glob("runs/7/step-00000100/*.distcp")), model.infer_layout(x))

    Args:
        network: an `AutoParallel`, or a module.
        checkpoint: a checkpoint, a run (its latest checkpoint), or a folder of Hugging Face; or the list of the files
            of one checkpoint, which stands for their folder.
        checkpoint_filenames: another word for `checkpoint`.
        train_strategy_filename: not needed, and not read: a checkpoint knows how its tensors were cut.
        predict_strategy: the storage of the parameters, with which a plain module gets the slices of one rank: the
            result of `AutoParallel.infer_layout`, a file of `AutoParallel.save_param_strategy_file`, or a saved plan.
            A parameter of the whole shape, or without values, is replaced by one of its slice's shape. None: whole
            tensors, or, for an `AutoParallel`, each rank's own slices.
        rank_id: the rank whose slices are loaded; None: this process's rank.
        strict_load: names and dtypes must be the same; otherwise the tensors in common are loaded, and converted.

    Raises:
        CheckpointError: no checkpoint, a damaged one, or one of another model; nothing is changed then.
        SettingError: an `AutoParallel` with a `predict_strategy`, or no such rank.
        PlanError, LayoutError: the strategies cannot be read.

    Example:
        >>> saving = sw.save_checkpoint(model, path="runs/7", step=3)
        >>> sw.load_distributed_checkpoint(net, "runs/7")
    """
    checkpoint = folder_of_files(checkpoint if checkpoint_filenames is None else checkpoint_filenames)
    if predict_strategy is None:
        if rank_id is not None:
            raise SettingError(
                f"load_distributed_checkpoint: rank_id={rank_id} and no predict_strategy",
                legal="a predict_strategy, which says what lies on a rank",
            )
        before = generators()
        load_checkpoint(network, path=checkpoint, strict=strict_load)
        restore_generators(before)
        return
    subject = CheckpointedModel(network, SingleRank())
    if subject.wrapper is not None:
        raise SettingError(
            "load_distributed_checkpoint: an AutoParallel cuts its parameters itself",
            legal="no predict_strategy, or the module in it",
        )
    rank_id = this_rank() if rank_id is None else rank_id
    with opened(checkpoint) as stored:
        wanted = _wanted_boxes(subject, stored, _slices(predict_strategy, rank_id), strict_load)
        check_sound(stored)
        successors: dict[Tensor, nn.Parameter] = {}
        for name, (stored_name, box) in wanted.items():
            tensor = subject.tensors[name]
            sizes = [s.stop - s.start for s in box]
            if list(tensor.shape) == sizes and not tensor.is_meta:
                stored.read_into(tensor.detach(), stored_name, box)
                continue
            made = torch.empty(sizes, dtype=tensor.dtype, device="cpu" if tensor.is_meta else tensor.device)
            stored.read_into(made, stored_name, box)
            successors[tensor] = nn.Parameter(made, requires_grad=tensor.requires_grad)
    substitute(subject.net, successors)


def _slices(
    strategies_of: Mapping[str, TensorStorage | ParameterPlan] | str | os.PathLike[str], rank: int
) -> dict[str, tuple[tuple[int, ...], Box]]:
    """The whole shape of each parameter and buffer, and the box of it that a rank has.

    Raises:
        SettingError: no such rank.
    """
    if isinstance(strategies_of, Mapping):
        known: Mapping[str, TensorStorage | ParameterPlan] = strategies_of
        devices = max(
            (p.ranks.stop if hasattr(p, "ranks") else p.storage.devices for p in strategies_of.values()), default=1
        )
    else:
        strategies = ParameterStrategies.read(strategies_of)
        known, devices = strategies.all, strategies.devices
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < devices:
        raise SettingError(
            f"load_distributed_checkpoint: rank_id={rank!r} of {devices} devices", legal=f"0 to {devices - 1}"
        )
    return {name: (tuple(placed.shape), placed.slice(rank)) for name, placed in known.items()}


def _wanted_boxes(
    subject: CheckpointedModel, stored: StoredTensors, slices: Mapping[str, tuple[tuple[int, ...], Box]], strict: bool
) -> dict[str, tuple[str, Box]]:
    """For each tensor of a module its name in the checkpoint, and the box to load.

    Raises:
        CheckpointError: a checkpoint of another model.
    """
    source, out, seen = str(stored.folder), {}, set()
    other = {name: alias for alias, name in subject.aliases.items()}
    for name, tensor in subject.tensors.items():
        called = strategy_name(name) or name
        stored_name = next((n for n in (name, other.get(name)) if n in stored.entries), None)
        if stored_name is None or called not in slices:
            if strict:
                what = (
                    f"it has no {called!r}"
                    if stored_name is None
                    else f"the predict_strategy says nothing of {called!r}"
                )
                raise CheckpointError(
                    f"a checkpoint of another model: {what}",
                    source=source,
                    legal="that of this model, or strict_load=False for what they have in common",
                )
            continue
        seen.add(stored_name)
        shape, box = slices[called]
        sizes = tuple(s.stop - s.start for s in box)
        if stored.shape(stored_name) != shape:
            raise CheckpointError(
                f"its {called!r} is {list(stored.shape(stored_name))}, and the predict_strategy's {list(shape)}",
                source=source,
                legal="a predict_strategy of the model that was saved",
            )
        if tuple(tensor.shape) not in (sizes, shape) or (
            not isinstance(tensor, nn.Parameter) and tuple(tensor.shape) != sizes
        ):
            raise CheckpointError(
                f"the network's {called!r} is {list(tensor.shape)}, the rank's slice {list(sizes)} of {list(shape)}",
                source=source,
                legal="a module of the whole shapes, or of the slices",
            )
        if strict and stored.dtype(stored_name) != tensor.dtype:
            raise CheckpointError(
                f"its {called!r} is {stored.dtype(stored_name)}, the network's {tensor.dtype}",
                source=source,
                legal="the same dtypes, or strict_load=False, which converts",
            )
        out[name] = stored_name, box
    extra = [n for n in stored.entries if strategy_name(n) is not None and n.startswith("model.") and n not in seen]
    if strict and extra and stored.manifest is not None:
        raise CheckpointError(
            f"a checkpoint of another model: it has {strategy_name(extra[0])!r}, which the network does not",
            source=source,
            legal="that of this model, or strict_load=False for what they have in common",
        )
    return out
