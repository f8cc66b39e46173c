"""The tensor files of a checkpoint, and the assignment of every box of every tensor to the rank that writes it.

1. Assignment (`written_boxes`). Each box is written once. Ranks that hold the same box share a large one by rows;
   smaller ones go to the holders in turn, the largest first. A rank derives its boxes from the tensors it holds:
   nothing is communicated.

2. Joining of short runs of a file into long ones is in `writer`.

3. The safetensors format (`laid_out`, `header_of`). A file is 8 bytes with the length n of the header (little
   endian), n bytes of JSON, then the tensors, row-major and without gaps. The header has the dtype, the shape and the
   byte range [begin, end) of each tensor, counted from the end of the header:

       {"__metadata__": {"format": "pt"}, "w1": {"dtype": "F32", "shape": [8, 8], "data_offsets": [0, 256]}}

   Only headers are read and written by this part: several ranks write one file, each at its own offsets, and each
   reads its own slices.

4. Whole tensors in safetensors files, which several ranks write together (`WholeFiles`):

       model.safetensors        the model's tensors, under their own names
       loss_fn.safetensors      the loss's, if it has any
       optimizer.safetensors    under <parameter>.<key of its state>

   A box of rows is one run of bytes in the file. A box that is cut in a later dim is one run per row, unless ranks
   join their boxes first (2).

5. Each rank's tensors in a file of its own, in the format of torch.distributed.checkpoint (`PartFile`):

       __R_0.distcp     rank R's boxes, each as ``torch.save`` writes a tensor, one after another; then
                        `manifest.trailer`
       .metadata        the boxes of each tensor, with the file and offset of each box

   ``torch.distributed.checkpoint.load`` reads such a folder. Shardwright reads it by the manifest alone, whose offset
   of a box is that of its elements inside the bytes ``torch.save`` wrote; nothing is unpickled.

Example of 1: ranks 0 and 1 both hold a float32 weight (1024, 1024), 4 MiB, at least 1 MiB for each of them: rank 0
writes rows 0 to 511 and rank 1 rows 512 to 1023. Two biases of 4 KiB each are written in turn: the first by rank 0, the
second by rank 1.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.utils.serialization import config

from ..errors import CheckpointError, shown
from ..json_files.json_reader import kind_of, parse
from ..json_files.json_values import dtype_named, is_shape
from .manifest import ID_KEY, Piece, TensorEntry, element_size, trailer, write_file
from .run_state import LocalTensor

__all__ = [
    "METADATA",
    "DcpItem",
    "Header",
    "PartFile",
    "StoredSpan",
    "WholeFiles",
    "WrittenBox",
    "descriptions_of",
    "entries_of",
    "file_of",
    "header_of",
    "laid_out",
    "memory_of",
    "part_name",
    "write_metadata",
    "written_boxes",
]

#: The longest header that the format allows, in bytes.
_LONGEST = 100 << 20

#: Bytes: a box with at least so many for each of its holders is shared by rows.
SHARED = 1 << 20


class WrittenBox(NamedTuple):
    """A box that this rank writes: the tensor's name, the box's start in each dim, its values."""

    name: str
    starts: tuple[int, ...]
    tensor: Tensor


def written_boxes(tensors: Iterable[LocalTensor], rank: int) -> list[WrittenBox]:
    """The boxes that a rank writes, in the order of `tensors`."""
    own_pieces = [
        (h, h.local, h.place.box)
        for h in tensors
        if h.local is not None and h.place.box is not None and rank in h.place.holders
    ]
    order = {h.name: i for i, (h, _, _) in enumerate(own_pieces)}
    turns: dict[tuple[int, ...], int] = {}
    out = []
    for h, local, box in sorted(own_pieces, key=lambda one: -one[1].nbytes):
        holders, starts = h.place.holders, tuple(s.start for s in box)
        if local.nbytes >= SHARED * len(holders) > SHARED and local.shape[0] >= len(holders):
            number, rows = holders.index(rank), local.shape[0]
            first, last = rows * number // len(holders), rows * (number + 1) // len(holders)
            out.append(WrittenBox(h.name, (starts[0] + first, *starts[1:]), local[first:last]))
            continue
        turn = turns[holders] = turns.get(holders, -1) + 1
        if holders[turn % len(holders)] == rank:
            out.append(WrittenBox(h.name, starts, local))
    return sorted(out, key=lambda w: order[w.name])


def descriptions_of(
    tensors: Iterable[LocalTensor], written: Iterable[WrittenBox]
) -> dict[str, tuple[tuple[int, ...], str, dict[str, object] | None]]:
    """Name -> (shape, dtype, layout) of the tensors whose first box this rank writes.

    Each tensor is thus described by one rank.
    """
    mine = {w.name for w in written if not any(w.starts)}
    return {h.name: (h.shape, h.dtype, h.place.encoded) for h in tensors if h.name in mine}


# -- 2. joining boxes --


# -- 3. the safetensors format --


_DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


class StoredSpan(NamedTuple):
    """A tensor in a file: its dtype's name in torch, its shape, and the offset of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class Header(NamedTuple):
    """The header of a safetensors file: its tensors and its metadata."""

    tensors: dict[str, StoredSpan]
    metadata: dict[str, str]


def laid_out(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """The layout of a safetensors file of these tensors.

    Args:
        tensors: name -> (dtype, shape), in file order; larger elements come first, which aligns all tensors.
        metadata: the header's metadata.

    Returns:
        The beginning of the file; the offset of each tensor's first byte; the length of the whole file.

    Raises:
        CheckpointError: a dtype that the format does not know; the error has no source.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    place, places = 0, {}
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -element_size(item[1][0])):
        if dtype not in _DTYPE_NAMES:
            raise CheckpointError(
                f"{name!r} is of {dtype}, which the safetensors format does not know",
                legal="integrated_save=False, or one of " + ", ".join(_DTYPE_NAMES),
            )
        places[name] = place
        end = place + math.prod(shape) * element_size(dtype)
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: begin + at for name, at in places.items()}, begin + place


def header_of(path: Path) -> Header:
    """The header of a file.

    Raises:
        CheckpointError: the file cannot be read, is not of this format, or is cut short.
    """

    legal = "a whole file in the safetensors format"

    def wrong(what: str) -> CheckpointError:
        return CheckpointError(what, source=str(path), legal=legal)

    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > min(_LONGEST, size - 8):
                raise wrong(
                    f"its header is said to have {length:,} bytes, and the file has {size:,}: cut short or altered"
                )
            text = file.read(length).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise wrong(f"its header cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}") from None
    encoded = parse(text, CheckpointError, "its header", str(path), legal, lines=False)
    if not isinstance(encoded, dict):
        raise wrong(f"its header is {kind_of(encoded)}, and no object")
    metadata = encoded.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise wrong(f"its header is damaged: __metadata__ is {shown(metadata)}, and no object of texts")
    tensors, spans = {}, []
    for name, entry in encoded.items():
        if not name.isprintable() or not isinstance(entry, dict):
            raise wrong(f"its header is damaged: {shown(name)} is {shown(entry)}")
        shape, offsets = entry.get("shape"), entry.get("data_offsets")
        dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry.get("dtype"), str) else None
        if dtype is None:
            raise wrong(f"{shown(name)} has the dtype {shown(entry.get('dtype'))}, of which torch has none")
        if not is_shape(shape) or not _is_span(offsets):
            raise wrong(f"its header is damaged: {shown(name)} has the shape {shown(shape)} at {shown(offsets)}")
        first, last = offsets
        if last - first != math.prod(shape) * element_size(dtype):
            raise wrong(f"its header is damaged: {shown(name)} has {last - first} bytes for {shape} of {dtype}")
        tensors[name] = StoredSpan(dtype, tuple(shape), 8 + length + first)
        spans.append((first, last, name))
    end = 0
    for first, last, name in sorted(spans):
        if first != end:
            raise wrong(
                f"its header is damaged: {shown(name)} begins at byte {first:,} of the tensors, and those before it "
                f"end at {end:,}: tensors lie one after another"
            )
        end = last
    if size != 8 + length + end:
        raise wrong(f"it has {size:,} bytes instead of {8 + length + end:,}: cut short, or longer than its tensors")
    return Header(tensors, metadata)


def _is_span(value: object) -> TypeGuard[list[int]]:
    """True for ``[begin, end]`` of a run of bytes."""
    return isinstance(value, list) and [type(x) for x in value] == [int, int] and 0 <= value[0] <= value[1] < 1 << 63


# -- 4. whole tensors in safetensors files --

#: Bytes that one call writes at most.
_CALL = 1 << 30


def file_of(name: str) -> tuple[str, str]:
    """The file of a tensor, and its name in that file."""
    tree, _, rest = name.partition(".")
    return f"{tree}.safetensors", rest


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory, row-major; no copy where the tensor is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


class WholeFiles:
    """The files of a checkpoint of whole tensors. Every rank builds the same from the same descriptions.

    Args:
        tensors: name -> (shape, dtype, layout as in `TensorEntry`), in file order.
        save_id: the id of the save.
        step: the step of the run.
        aliases: further name of a tied tensor -> its stored name, noted in the metadata as safetensors does.

    Attributes:
        sizes: file -> its size in bytes.

    Raises:
        CheckpointError: a dtype that the format does not know.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[tuple[int, ...], str, dict[str, object] | None]],
        save_id: str,
        step: int,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self._tensors = tensors
        self._heads: dict[str, bytes] = {}
        self.sizes: dict[str, int] = {}
        self._places: dict[str, tuple[str, int]] = {}
        grouped: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        for name, (shape, dtype, _) in tensors.items():
            file, inside = file_of(name)
            grouped.setdefault(file, {})[inside] = (dtype, shape)
        for file, entries in grouped.items():
            tied = {
                file_of(a)[1]: file_of(n)[1]
                for a, n in (aliases or {}).items()
                if file_of(n)[0] == file == file_of(a)[0]
            }
            metadata = {"format": "pt", ID_KEY: save_id, "step": str(step)}
            self._heads[file], places, self.sizes[file] = laid_out(entries, metadata | tied)
            tree = file.removesuffix(".safetensors")
            self._places |= {f"{tree}.{inside}": (file, place) for inside, place in places.items()}

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """The tensors' entries in the manifest."""
        return {
            name: TensorEntry(shape, dtype, layout, (Piece(*self._places[name], (0,) * len(shape), shape),))
            for name, (shape, dtype, layout) in self._tensors.items()
        }

    def begin(self, folder: Path) -> None:
        """Write the headers; called on one rank, while other ranks may already write boxes.

        Raises:
            OSError: the disk is full, …
        """
        for file, head in self._heads.items():
            handle = os.open(folder / file, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                _put(handle, memoryview(head), 0)
                os.truncate(handle, self.sizes[file])
            finally:
                os.close(handle)

    def write(self, folder: Path, boxes: Iterable[tuple[str, Sequence[int], Tensor]]) -> None:
        """Write boxes, without a sync to the disk.

        Args:
            folder: the folder of the files.
            boxes: name, start in each dim, values in host memory.

        Raises:
            OSError: the disk is full, …
        """
        handles: dict[str, int] = {}
        try:
            for name, starts, tensor in boxes:
                file, place = self._places[name]
                if file not in handles:
                    handles[file] = os.open(folder / file, os.O_WRONLY | os.O_CREAT, 0o666)
                self._write(handles[file], name, place, starts, tensor)
        finally:
            for handle in handles.values():
                os.close(handle)

    def write_run(self, folder: Path, name: str, first: int, tensor: Tensor) -> None:
        """Write neighbouring elements of a tensor, from element `first` on, without a sync to the disk.

        Raises:
            OSError: the disk is full, …
        """
        file, place = self._places[name]
        handle = os.open(folder / file, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            _put(handle, memory_of(tensor), place + first * tensor.itemsize)
        finally:
            os.close(handle)

    def _write(self, handle: int, name: str, place: int, starts: Sequence[int], tensor: Tensor) -> None:
        shape, dtype, _ = self._tensors[name]
        size, sizes = element_size(dtype), list(tensor.shape)
        if not tensor.numel():
            return
        first = len(shape)  # from dim `first - 1` on, the box is one run
        while first > 0 and sizes[first - 1] == shape[first - 1]:
            first -= 1
        first = max(first - 1, 0)
        strides = [math.prod(shape[dim + 1 :]) * size for dim in range(len(shape))]
        begin = place + sum(a * s for a, s in zip(starts, strides))
        memory, run = memory_of(tensor), math.prod(sizes[first:]) * size
        for number, outer in enumerate(product(*(range(n) for n in sizes[:first]))):
            at = begin + sum(i * s for i, s in zip(outer, strides))
            _put(handle, memory[number * run : (number + 1) * run], at)


def _put(handle: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(handle, data[:_CALL], at)
        data, at = data[count:], at + count


# -- 5. one file a rank --

METADATA = ".metadata"


def part_name(rank: int) -> str:
    """The file name of a rank's part."""
    return f"__{rank}_0.distcp"


class DcpItem(NamedTuple):
    """A box in a rank's file.

    Attributes:
        name: the tensor's name.
        piece: the location of the box's elements.
        offset, length: the byte range that ``torch.save`` wrote.
    """

    name: str
    piece: Piece
    offset: int
    length: int


class PartFile:
    """The file of a rank, written box by box.

    Args:
        folder: the folder of the checkpoint.
        rank: the rank.
        save_id: the id of the save.

    Attributes:
        name: the file's name.
        items: the boxes written so far.

    Raises:
        OSError: the disk is full, …
    """

    def __init__(self, folder: Path, rank: int, save_id: str) -> None:
        self.name, self._rank, self._id = part_name(rank), rank, save_id
        self._file = _Recorded(folder / self.name)
        self._end = 0
        self.items: list[DcpItem] = []

    def add(self, name: str, starts: Sequence[int], tensor: Tensor) -> None:
        """Append a box that begins at `starts`; `tensor` is in host memory."""
        if not tensor.numel():
            return
        # The box must not be a view of a larger tensor: torch.save writes all of the storage.
        alone = torch.frombuffer(memory_of(tensor), dtype=tensor.dtype).view(tensor.shape)
        settings: Any = config
        with settings.patch({"save.compute_crc32": False}):  # no reader checks it, and it takes longer than the rest
            _save(alone, self._file)
        self._file.flush()
        end = os.fstat(self._file.fileno()).st_size
        piece = Piece(self.name, self._data(), tuple(starts), tuple(tensor.shape))
        self.items.append(DcpItem(name, piece, self._end, end - self._end))
        self._end = end
        self._file.seek(end)

    def _data(self) -> int:
        """The offset of the elements of the last box."""
        with zipfile.ZipFile(self._file) as archive:  # finds the last archive of the file
            record = next(info for info in archive.infolist() if info.filename.endswith("/data/0"))
        self._file.seek(record.header_offset + 26)
        name, extra = (int.from_bytes(self._file.read(2), "little") for _ in range(2))
        return record.header_offset + 30 + name + extra

    def close(self) -> list[DcpItem]:
        """Write the trailer and close the file, without a sync to the disk; the boxes written."""
        if not self._file.closed:
            self._file.seek(self._end)
            self._file.write(trailer(self._id, self._rank))
            self._file.close()
        return self.items

    def abandon(self) -> None:
        """Close the file without a trailer. The error of a full disk has been raised before."""
        with contextlib.suppress(OSError):
            self._file.close()


class _Recorded(io.FileIO):
    """A file that is written without a buffer and keeps the error of a write: torch.save raises another one in its
    place, which does not say that the disk is full.

    Args:
        path: the file; it is made.

    Attributes:
        error: of a write; None: none.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb+")
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        remaining = memoryview(data).cast("B")
        written = len(remaining)
        try:
            while remaining:
                remaining = remaining[super().write(remaining) or 0 :]
        except OSError as error:
            self.error = self.error or error
            raise
        return written


def _save(tensor: Tensor, file: _Recorded) -> None:
    """Save as torch.save does, and hold no reference to the tensor afterwards.

    The class of torch 2.9's pickler holds the tensor until garbage is collected.

    Raises:
        OSError: the disk is full, …
    """
    made: list[Any] = []

    class Pickler(pickle.Pickler):
        def __init_subclass__(cls) -> None:
            made.append(cls)

    try:
        torch.save(tensor, file, pickle_module=SimpleNamespace(__name__="pickle", Pickler=Pickler))
    except RuntimeError:
        if file.error is not None:
            raise file.error from None
        raise
    for kind in made:
        if "persistent_id" in vars(kind):
            del kind.persistent_id


def entries_of(
    tensors: Mapping[str, tuple[tuple[int, ...], str, dict[str, object] | None]], items: Iterable[DcpItem]
) -> dict[str, TensorEntry]:
    """The tensors' entries in the manifest.

    Args:
        tensors: name -> (shape, dtype, layout), in order.
        items: the boxes of all ranks.
    """
    pieces: dict[str, list[Piece]] = {name: [] for name in tensors}
    for item in items:
        pieces[item.name].append(item.piece)
    return {
        name: TensorEntry(shape, dtype, layout, tuple(pieces[name])) for name, (shape, dtype, layout) in tensors.items()
    }


def write_metadata(
    folder: Path,
    tensors: Mapping[str, tuple[tuple[int, ...], str, dict[str, object] | None]],
    items: Iterable[DcpItem],
    save_id: str,
) -> None:
    """Write ``.metadata``, which torch.distributed.checkpoint needs to read the folder.

    Raises:
        OSError: the disk is full, …
    """
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION  # noqa: PLC0415  half a second to import
    from torch.distributed.checkpoint.metadata import (  # noqa: PLC0415  half a second, for this format alone
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    from ..torch_private import StorageInfo  # noqa: PLC0415  imports torch.distributed.checkpoint at first use

    chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in tensors}
    places = {}
    for item in items:
        starts, sizes = torch.Size(item.piece.starts), torch.Size(item.piece.sizes)
        places[MetadataIndex(item.name, starts, len(chunks[item.name]))] = StorageInfo(
            item.piece.file, item.offset, item.length
        )
        chunks[item.name].append(ChunkStorageMetadata(starts, sizes))
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        name: TensorStorageMetadata(TensorProperties(dtype_named(dtype)), torch.Size(shape), chunks[name])
        for name, (shape, dtype, _) in tensors.items()
    }
    nested = {name: tuple(name.split(".", 1)) for name in tensors}
    made = Metadata(described, nested, places, StorageMeta(save_id=save_id), CURRENT_DCP_VERSION)
    write_file(folder / METADATA, pickle.dumps(made))
