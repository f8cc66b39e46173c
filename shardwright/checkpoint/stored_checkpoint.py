"""A stored checkpoint as ranks read it: any slice of any tensor, from the folders that the ranks see.

1. `StoredTensors` reads tensors of a checkpoint or a Hugging Face folder: any slice, and nothing beyond it. A requested
   box of a piece is stored as runs of neighbouring bytes. Each run is read straight to its destination. Runs less than
   16 KiB apart are read in one call together with the gap: the disk reads the gap anyway, and skipping it takes less
   time than another call.

2. `seen_by_all` finds the folders of one checkpoint that ranks see, where they share no file system or give paths of
   their own. A save in parts writes the parts of a rank into the folder that the rank's own path names, and manifest,
   state and plan into each of these folders alike. A rank then reads

       its own folder      the checkpoint of the same step under its own path
       those of others     folders that other ranks have named, where this rank sees them under the same name
       other ranks         slices of files that it does not see at all, which the lowest rank that sees them sends
                           (`fetch`)

   Example: ranks 0, 1 of host a and 2, 3 of host b save to ``/scratch/run``, which each host has for itself. Host a has
   the files of ranks 0 and 1. When rank 2 loads under another plan and needs rows that rank 0 has written, rank 0 sends
   them. Folders that are copied together are one checkpoint: manifests are the same in all of them.

   Folders with the same content are told from one folder that several hosts share by the inode and the time of change
   of the manifest: ranks that see the same folders share the check of their bytes, others check what they see.
"""

from __future__ import annotations

import math
import os
import re
import socket
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..accelerators import host_memory
from ..errors import CheckpointError, shown
from ..json_files.json_reader import MIB, kind_of, parse, read_object
from ..json_files.json_values import dtype_named
from ..runtime.distributed.rank_messages import ProcessRanks, SingleRank
from .checkpoint_folders import absent, folder_of, runs_inside, steps_in
from .manifest import (
    MANIFEST,
    Manifest,
    Piece,
    TensorEntry,
    check_files,
    element_size,
    is_plain_name,
    model_fingerprint,
    parsed,
    read,
)
from .run_state import STATE
from .tensor_files import header_of

__all__ = [
    "HUGGING_FACE",
    "SeenCheckpoint",
    "StoredTensors",
    "WantedSlice",
    "fetch",
    "is_hugging_face",
    "place_of",
    "seen_by_all",
]

# -- reading slices


#: Files of a Hugging Face folder: the whole model, or the index from tensors to shard files.
HUGGING_FACE = ("model.safetensors", "model.safetensors.index.json")

#: In bytes: runs less than `_APART` apart are read in one call of at most `_TOGETHER`.
_APART, _TOGETHER = 16 << 10, 1 << 20

#: Bytes that one call reads at most: Linux reads no more than 2 GiB.
_CALL = 1 << 30


def is_hugging_face(folder: Path) -> bool:
    """True where a folder holds a model as Hugging Face stores it; False for a checkpoint that lost its manifest."""
    return not any((folder / name).exists() for name in (MANIFEST, "state.json")) and any(
        (folder / name).exists() for name in HUGGING_FACE
    )


class WantedSlice(NamedTuple):
    """A slice of a file that this rank does not see.

    Attributes:
        out: the destination, of the slice's shape.
        dtype: the stored dtype's name in torch.
        piece: the piece that the slice is of.
        starts: the start of the slice in the piece, in each dim.
    """

    out: Tensor
    dtype: str
    piece: Piece
    starts: list[int]


class StoredTensors:
    """The tensors of a checkpoint by name: ``model.<name>``, ``loss_fn.<name>``, ``optimizer.<parameter>.<key>``.

    Args:
        folder: the folder of a checkpoint, or of a Hugging Face model (`HUGGING_FACE`), which has ``model.<name>``
            alone.
        manifest: the checkpoint's manifest, where the caller has read it.
        paths: the place of each file; None: all are in the folder.
        served: file that some rank does not see -> the rank that sends slices of it (`stored_checkpoint.fetch`).

    Attributes:
        wanted: slices of files that are not in `paths`, which other ranks are to send.
        manifest: the manifest; None for a Hugging Face folder.
        entries: the tensors, by name.
        bytes_read: bytes of tensors read so far.

    Raises:
        CheckpointError: the folder is neither, or its manifest or headers are damaged.
    """

    def __init__(
        self,
        folder: str | Path,
        manifest: Manifest | None = None,
        paths: Mapping[str, Path] | None = None,
        served: Mapping[str, int] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.paths, self.served = paths, served or {}
        self.wanted: list[WantedSlice] = []
        self.bytes_read = 0
        self._open: dict[str, int] = {}
        if manifest is None and is_hugging_face(self.folder):
            self.manifest, self.entries = None, _hugging_face(self.folder)
        else:
            self.manifest = manifest or read(self.folder)
            self.entries = dict(self.manifest.tensors)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors, in file order."""
        return tuple(self.entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the tensor."""
        return dtype_named(self.entries[name].dtype)

    def read(self, name: str, box: Sequence[slice] | None = None) -> Tensor:
        """A tensor, or a slice of it, in memory of its own.

        Args:
            name: the tensor.
            box: for each dim a slice with a start and a stop; None: the whole tensor.

        Raises:
            CheckpointError: a file cannot be read, or ends too early.
        """
        shape = self.shape(name)
        sizes = [s.stop - s.start for s in box] if box is not None else shape
        out = torch.empty(sizes, dtype=self.dtype(name), device="cpu")
        self.read_into(out, name, box)
        return out

    def read_into(self, out: Tensor, name: str, box: Sequence[slice] | None = None) -> None:
        """Read a tensor, or a slice of it, into a given tensor.

        Extra memory, of one piece, is used only where `out` is on a device, has another dtype, or is not row-major.

        Args:
            out: the destination, of the box's shape; any strides, and any dtype (values are converted).
            name: the tensor.
            box: for each dim a slice with a start and a stop; None: the whole tensor.

        Raises:
            CheckpointError: a file cannot be read, or ends too early.
        """
        shape = self.shape(name)
        starts = [0] * len(shape) if box is None else [s.start for s in box]
        stops = list(shape) if box is None else [s.stop for s in box]
        for piece in self.entries[name].pieces:
            low = [max(a, p) for a, p in zip(starts, piece.starts)]
            high = [min(b, p + n) for b, p, n in zip(stops, piece.starts, piece.sizes)]
            if all(a < b for a, b in zip(low, high)):
                part = out[tuple(slice(a - s, b - s) for a, b, s in zip(low, high, starts))] if shape else out
                within = [a - p for a, p in zip(low, piece.starts)]
                if self.paths is not None and piece.file not in self.paths and piece.file in self.served:
                    self.wanted.append(WantedSlice(part, self.entries[name].dtype, piece, within))
                else:
                    self.read_piece(part, self.entries[name].dtype, piece, within)

    def close(self) -> None:
        """Close the files."""
        for handle in self._open.values():
            os.close(handle)
        self._open.clear()

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read_piece(self, out: Tensor, word: str, piece: Piece, starts: list[int]) -> None:
        """Read the box of a piece that begins at `starts` and has the shape of `out` into `out`."""
        dtype = dtype_named(word)
        if out.device.type != "cpu" or out.dtype != dtype or not out.is_contiguous():
            made = host_memory(out, dtype)
            self.read_piece(made, word, piece, starts)
            out.copy_(made, non_blocking=made.is_pinned())  # the next piece is read meanwhile
            return
        size, sizes, lengths = element_size(word), piece.sizes, list(out.shape)
        # One run: the trailing dims that are whole, together with the part of the dim before them.
        first = len(sizes)
        while first > 0 and lengths[first - 1] == sizes[first - 1]:
            first -= 1
        first = max(first - 1, 0)
        strides = [math.prod(sizes[dim + 1 :]) * size for dim in range(len(sizes))]
        run = math.prod(lengths[first:]) * size
        begin = piece.offset + sum(a * s for a, s in zip(starts, strides))
        view = out.view(-1).view(torch.uint8) if out.numel() else None
        if view is None:
            return
        if first == 0:
            self._fill(piece.file, view, begin)
            return
        gap = strides[first - 1]  # from the start of a run to the start of the next
        rows = lengths[first - 1]
        step = max(1, min(rows, _TOGETHER // gap)) if gap - run < _APART else 1
        place, both = 0, torch.empty((step - 1) * gap + run if step > 1 else 0, dtype=torch.uint8, device="cpu")
        for outer in product(*(range(n) for n in lengths[: first - 1])):
            at = begin + sum(i * s for i, s in zip(outer, strides))
            for row in range(0, rows, step):
                count = min(step, rows - row)
                target = view[place : place + count * run]
                if count == 1:
                    self._fill(piece.file, target, at + row * gap)
                else:
                    self._fill(piece.file, both[: (count - 1) * gap + run], at + row * gap)
                    target.view(count, run).copy_(both.as_strided((count, run), (gap, 1)))
                place += count * run

    def _fill(self, name: str, target: Tensor, offset: int) -> None:
        """Fill `target` (bytes) from a file, from `offset` on."""
        handle = self._open.get(name)
        path = (self.paths or {}).get(name, self.folder / name)
        memory, count = target.numpy().data, 0
        try:
            if handle is None:
                handle = self._open[name] = os.open(path, os.O_RDONLY)
            while count < len(memory):
                got = os.preadv(handle, [memory[count : count + _CALL]], offset + count)
                if not got:
                    raise CheckpointError(
                        "the file ends before its tensors do: cut short",
                        source=str(path),
                        legal="an earlier checkpoint of the run",
                    )
                count += got
        except OSError as error:
            where = self.manifest.written_to(name) if self.manifest is not None and handle is None else ""
            raise CheckpointError(
                f"the file cannot be read: {error.strerror}{where}",
                source=str(path),
                legal="a checkpoint that is whole",
            ) from None
        self.bytes_read += count


def _hugging_face(folder: Path) -> dict[str, TensorEntry]:
    """The tensors of a folder in the layout that Hugging Face writes."""
    whole, index = (folder / name for name in HUGGING_FACE)
    places: dict[str, str] | None = None
    files = [whole.name]
    if index.exists():
        legal = 'an object with a "weight_map" from names of tensors to files beside the index'
        found = read_object(index, CheckpointError, "the index", legal, 100 * MIB)[1].get("weight_map")
        if not isinstance(found, dict):
            raise CheckpointError(
                f'its "weight_map" is {kind_of(found)}, and no object', source=str(index), legal=legal
            )
        for name, file in found.items():
            if not is_plain_name(file):
                raise CheckpointError(
                    f"{shown(name)} is in {shown(file)}, which is no file beside the index",
                    source=str(index),
                    legal=legal,
                )
        places, files = found, sorted(set(found.values()))
    out: dict[str, TensorEntry] = {}
    for file in files:
        for name, (dtype, shape, offset) in header_of(folder / file).tensors.items():
            if places is None or places.get(name) == file:
                out[f"model.{name}"] = TensorEntry(shape, dtype, None, (Piece(file, offset, (0,) * len(shape), shape),))
    for name, file in (places or {}).items():
        if f"model.{name}" in out:
            continue
        raise CheckpointError(
            f"{shown(name)} is not in it, where {index.name} says so",
            source=str(folder / file),
            legal="the files of one model",
        )
    return out


# -- folders that ranks see


_STEP = re.compile(r"\.?step-(\d{8,})(?:\.[0-9a-f]+\.old)?")
_ID = re.compile(rb'"id": "([0-9a-f]+)"')


@dataclass(frozen=True)
class SeenCheckpoint:
    """A checkpoint that all ranks have found undamaged.

    Attributes:
        stored: its tensors, as this rank reads them.
        folder: the folder of this rank; where it has none, that of another rank.
        state: the text of ``state.json``, where this rank does not see the file; otherwise None.
    """

    stored: StoredTensors
    folder: Path
    state: str | None


def place_of(path: str | os.PathLike[str]) -> str:
    """A folder as ranks of other hosts know it: ``host:/absolute/path``."""
    return f"{socket.gethostname()}:{os.path.abspath(path)}"


def seen_by_all(path: Any, step: int | None, missing_ok: bool, ranks: SingleRank) -> SeenCheckpoint | None:
    """The checkpoint to load. All ranks call it together.

    Rank 0 decides which one, or the first rank that has one: other ranks look at another moment.

    Args:
        path: this rank's folder of a run, of a checkpoint, or of a Hugging Face model.
        step: the step; None: the highest.
        missing_ok: return None where no rank has a checkpoint.
        ranks: the ranks that load together.

    Raises:
        CheckpointError: no rank has a checkpoint; ranks have different ones; a file that no rank has; damage. Raised on
            all ranks alike.
    """
    mine, failed = None, None
    try:
        mine = _found(path, step)
    except Exception as raised:  # raised below, unless another rank has a checkpoint
        failed = raised
    found = ranks.exchanged(None if mine is None else [os.path.abspath(mine), _step_of(mine)])
    first = next((rank for rank, other in enumerate(found) if other is not None), None)
    if first is None:
        ranks.agreed(failed or (None if missing_ok else _nothing(Path(path), step)))
        if (inside := runs_inside(Path(path))) and not ranks.rank:
            warnings.warn(
                f"load_checkpoint: {path}: {absent(Path(path))}; nothing is loaded, as missing_ok=True asks\n"
                f"  legal: the folder of the run, {inside[0]}",
                RuntimeWarning,
                stacklevel=3,
            )
        return None
    stored: StoredTensors | None = None
    error: Exception | None = None
    visible: list[Path] = []
    try:
        visible = _visible(path, mine, found, found[first][1])
        stored = StoredTensors(visible[0]) if visible else None
    except Exception as raised:  # agreed on below, so that all ranks raise it
        error = raised
    seen = ranks.agreed(error, None if stored is None else [_identity(stored), place_of(stored.folder)])
    _check_same(seen, first, found[first][0])
    if stored is not None and stored.manifest is None:
        return SeenCheckpoint(stored, stored.folder, None)  # a Hugging Face folder, which each rank has
    manifest = None if stored is None else stored.manifest
    if any(other is None for other in seen):
        text = ranks.exchanged(manifest.text() if manifest is not None and ranks.rank == first else None)[first]
        if manifest is None:
            manifest = parsed(text, parse(text, CheckpointError, "the manifest", seen[first][1], ""), seen[first][1])
    assert manifest is not None
    return _together(Path(found[first][0]) if stored is None else stored.folder, visible, manifest, ranks)


def _found(path: object, step: int | None) -> Path | None:
    """The folder to load; None where there is no checkpoint.

    Raises:
        CheckpointError: no path, no step, or a run that does not have this step.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise CheckpointError(
            f"path={path!r}",
            source="load_checkpoint",
            legal="load_checkpoint(model, optimizer, path): the folder of a run or of a checkpoint",
        )
    path = Path(path)
    if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
        raise CheckpointError(f"step={step!r}", source=str(path), legal="a whole number, or None for the highest")
    if step is None and is_hugging_face(path):
        return path
    if step is None and (path / STATE).exists():
        return path  # a checkpoint; a missing manifest is reported when it is read
    return folder_of(path, step)


def _nothing(path: Path, step: int | None) -> CheckpointError:
    """The error of a path without a checkpoint."""
    what = absent(path)
    return CheckpointError(
        what if step is None else f"there is no checkpoint of step {step}: {what}",
        source=str(path),
        legal=f"a folder with checkpoints, with a {MANIFEST}, or with {' or '.join(HUGGING_FACE)}",
    )


def _step_of(folder: Path) -> int | None:
    """The step that the name of a checkpoint's folder says."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def _visible(path: object, mine: Path | None, found: Iterable[list[Any] | None], step: int | None) -> list[Path]:
    """The folders of the checkpoint that this rank sees: its own first, then those that other ranks have named."""
    seen_path = mine if mine is not None and _step_of(mine) == step else None
    if seen_path is None and step is not None and isinstance(path, (str, os.PathLike)):
        seen_path = steps_in(Path(path)).get(step)
    named = dict.fromkeys(Path(other[0]) for other in found if other is not None and other[1] == step)
    if seen_path is not None:
        named.pop(Path(os.path.abspath(seen_path)), None)
    return [*([] if seen_path is None else [seen_path]), *filter(_holds_one, named)]


def _holds_one(folder: Path) -> bool:
    try:
        return (folder / MANIFEST).exists() or is_hugging_face(folder)
    except OSError:  # a folder of this name that may not be read
        return False


def _identity(stored: StoredTensors) -> str:
    """A text that tells one checkpoint from another."""
    if stored.manifest is not None:
        return stored.manifest.id
    return "Hugging Face " + model_fingerprint((n, e.shape, e.dtype) for n, e in stored.entries.items())


def _check_same(seen: list[list[str] | None], first: int, folder: str) -> None:
    """Check that all ranks that see a checkpoint see the same one, and that all see one that cannot be sent.

    Raises:
        CheckpointError: with both folders.
    """
    deciding = seen[first]
    assert deciding is not None
    legal = "paths of one checkpoint on every rank, or the folders copied together"
    for rank, other in enumerate(seen):
        if other is not None and other[0] != deciding[0]:
            raise CheckpointError(
                f"ranks have different checkpoints: rank {first} has {deciding[0]} in {deciding[1]}, rank {rank} has "
                f"{other[0]} in {other[1]}",
                source=folder,
                legal=legal,
            )
        if other is None and deciding[0].startswith("Hugging Face"):
            raise CheckpointError(
                f"rank {rank} does not see the model that rank {first} has in {deciding[1]}", source=folder, legal=legal
            )


def _together(folder: Path, visible: list[Path], manifest: Manifest, ranks: SingleRank) -> SeenCheckpoint:
    """The checkpoint, once its files are found on some rank each, and undamaged."""
    paths = _paths(visible, manifest)
    views = ranks.exchanged([_view(visible), [name for name in manifest.files if name not in paths]])
    lacking = [set(names) for _, names in views]
    served = {
        name: next(rank for rank, names in enumerate(lacking) if name not in names)
        for name in dict.fromkeys(name for _, names in views for name in names)
        if not all(name in names for names in lacking)
    }
    same_view = [rank for rank, (view, _) in enumerate(views) if view == views[ranks.rank][0]]
    error, state = None, None
    try:
        problems = _missing(manifest, set.intersection(*lacking))
        problems += check_files(folder, manifest, same_view.index(ranks.rank), len(same_view), paths)
        problems += _misnamed(folder, manifest)
        if problems:
            name = problems[0].partition(":")[0]
            more = f", and {len(problems) - 1} more files" if len(problems) > 1 else ""
            raise CheckpointError(
                f"the checkpoint is damaged: {problems[0]}{more}",
                source=str(paths.get(name, folder / name)),
                legal=_other_steps(folder),
            )
        if STATE in served and ranks.rank == served[STATE]:
            state = paths[STATE].read_text(encoding="utf-8")
    except Exception as raised:  # agreed on below, so that all ranks raise it
        error = raised
    states = ranks.agreed(error, state)  # no rank interprets content that another rank has found damaged
    state = states[served[STATE]] if STATE in served and STATE not in paths else None
    return SeenCheckpoint(StoredTensors(folder, manifest, paths, served), folder, state)


def _paths(visible: Iterable[Path], manifest: Manifest) -> dict[str, Path]:
    """The place of each file of the checkpoint that this rank sees."""
    out: dict[str, Path] = {}
    for folder in visible:
        try:
            with open(folder / MANIFEST, "rb") as file:
                found = _ID.search(file.read(4096))
            names = os.listdir(folder)
        except OSError:
            continue
        if found and found[1].decode() == manifest.id:  # otherwise another save's, of which its own rank tells
            out = {name: folder / name for name in names if name in manifest.files} | out
    return out


def _view(visible: Iterable[Path]) -> list[list[int]]:
    """The folders that this rank sees, told from others of the same content on other hosts."""
    files = []
    for folder in visible:
        try:
            stat = os.stat(folder / MANIFEST)
        except OSError:
            continue
        files.append([stat.st_ino, stat.st_ctime_ns, stat.st_size])
    return sorted(files)


def _missing(manifest: Manifest, names: Iterable[str]) -> list[str]:
    """The problems of files that no rank sees."""
    return [f"{name}: it is missing{manifest.written_to(name)}" for name in manifest.files if name in set(names)]


def _misnamed(folder: Path, manifest: Manifest) -> list[str]:
    steps = steps_in(folder.parent) if folder.name.startswith("step-") else {}
    if folder in steps.values() and steps.get(manifest.step) != folder:
        return [f"{MANIFEST}: it is of step {manifest.step}"]
    return []


def _other_steps(folder: Path) -> str:
    steps = [str(step) for step, path in steps_in(folder.parent).items() if path != folder]
    return f"another checkpoint of the run: step {', '.join(steps)}" if steps else "a checkpoint that is whole"


def fetch(stored: StoredTensors, ranks: ProcessRanks) -> None:
    """Fill the slices that this rank has asked for of files that it does not see. All ranks call it together.

    Args:
        stored: the tensors; its `wanted` slices are filled.
        ranks: the ranks that load together.

    Raises:
        CheckpointError: a file cannot be read here for another rank.
    """
    requests = ranks.exchanged(
        [
            [w.piece.file, w.piece.offset, list(w.piece.sizes), w.dtype, w.starts, list(w.out.shape)]
            for w in stored.wanted
        ]
    )
    mine, failed = iter(stored.wanted), None
    for rank, wanted in enumerate(requests):
        for file, offset, sizes, dtype, starts, lengths in wanted:
            server = stored.served[file]
            if ranks.rank not in (rank, server):
                continue
            box = torch.empty(lengths, dtype=dtype_named(dtype), device="cpu")
            if ranks.rank == rank:
                ranks.receive(box.reshape(-1).view(torch.uint8), server)
                next(mine).out.copy_(box)
                continue
            try:
                stored.read_piece(box, dtype, Piece(file, offset, (), tuple(sizes)), starts)
            except CheckpointError as error:  # raised at the end: the other rank waits for the bytes
                failed = failed or error
            ranks.send(box.reshape(-1).view(torch.uint8), rank)
    stored.wanted.clear()
    if failed is not None:
        raise failed
