"""Reading tensors of a stored checkpoint or a Hugging Face folder: any slice of any tensor, and nothing beyond it.

A requested box of a piece is stored as runs of neighbouring bytes. Each run is read straight to its destination. Runs
less than 16 KiB apart are read in one call together with the gap: the disk reads the gap anyway, and skipping it
takes less time than another call.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..accelerators import host_memory
from ..errors import CheckpointError, shown
from ..json_files.json_reader import MIB, kind_of, read_object
from ..json_files.json_values import dtype_named
from .manifest import MANIFEST, Manifest, Piece, TensorEntry, element_size, is_plain_name, read
from .tensor_files import header_of

__all__ = ["HUGGING_FACE", "StoredTensors", "WantedSlice", "is_hugging_face"]

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
        served: file that some rank does not see -> the rank that sends slices of it (`folders_of_ranks.fetch`).

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
