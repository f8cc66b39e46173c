"""Each rank's tensors in a file of its own, in the format of torch.distributed.checkpoint.

    __R_0.distcp     what rank R has: of each box a tensor as ``torch.save`` writes it, one after the other; then `marking`'s end
    .metadata        which boxes make up each tensor, and where in which file each box is

``torch.distributed.checkpoint.load`` reads such a folder. Reading it here takes the manifest alone, where a box's place is
that of its elements inside of what ``torch.save`` wrote; nothing is unpickled.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.utils.serialization import config

from .folders import write_file
from .manifest import Entry, Piece
from .marking import trailer
from .whole_files import memory_of
from .words import dtype_of

__all__ = ["METADATA", "Item", "PartFile", "entries_of", "part_name", "write_metadata"]

METADATA = ".metadata"


def part_name(rank: int) -> str:
    """The file of a rank."""
    return f"__{rank}_0.distcp"


class Item(NamedTuple):
    """A box in a rank's file.

    Attributes:
        name: of the tensor.
        piece: where its elements are.
        offset, length: of what ``torch.save`` wrote.
    """

    name: str
    piece: Piece
    offset: int
    length: int


class PartFile:
    """The file of a rank, written box by box.

    Raises:
        OSError: the disk is full, …
    """

    def __init__(self, folder: Path, rank: int, save_id: str) -> None:
        self.name, self._rank, self._id = part_name(rank), rank, save_id
        self._file = open(folder / self.name, "wb+")
        self._end = 0
        self.items: list[Item] = []

    def add(self, name: str, starts: Sequence[int], tensor: Tensor) -> None:
        """Append a box that begins at `starts`; in host memory."""
        if not tensor.numel():
            return
        # The box alone, where it is a view of more: torch.save writes all of a tensor's memory.
        alone = torch.frombuffer(memory_of(tensor), dtype=tensor.dtype).view(tensor.shape)
        with config.patch({"save.compute_crc32": False}):  # which nobody looks at, and takes longer than all the rest
            _save(alone, self._file)
        self._file.flush()
        end = os.fstat(self._file.fileno()).st_size
        piece = Piece(self.name, self._data(), tuple(starts), tuple(tensor.shape))
        self.items.append(Item(name, piece, self._end, end - self._end))
        self._end = end
        self._file.seek(end)

    def _data(self) -> int:
        """Where the elements of the last box are."""
        with zipfile.ZipFile(self._file) as archive:  # it finds the last one in a file of several
            record = next(info for info in archive.infolist() if info.filename.endswith("/data/0"))
        self._file.seek(record.header_offset + 26)
        name, extra = (int.from_bytes(self._file.read(2), "little") for _ in range(2))
        return record.header_offset + 30 + name + extra

    def close(self) -> list[Item]:
        """Write the end; not yet through to the disk."""
        if not self._file.closed:
            self._file.seek(self._end)
            self._file.write(trailer(self._id, self._rank))
            self._file.close()
        return self.items

    def abandon(self) -> None:
        """Close without the end."""
        self._file.close()


def _save(tensor: Tensor, file: BinaryIO) -> None:
    """The same as torch.save, and nothing of the tensor is held after it: in torch 2.9 the class of its pickler holds it until
    garbage is collected."""
    made: list[Any] = []

    class Pickler(pickle.Pickler):
        def __init_subclass__(cls) -> None:
            made.append(cls)

    torch.save(tensor, file, pickle_module=SimpleNamespace(__name__="pickle", Pickler=Pickler))
    for kind in made:
        if "persistent_id" in vars(kind):
            del kind.persistent_id


def entries_of(tensors: Mapping[str, tuple[tuple[int, ...], str, dict | None]], items: Iterable[Item]) -> dict[str, Entry]:
    """As the manifest names them.

    Args:
        tensors: name -> (shape, dtype, layout), in order.
        items: of all ranks.
    """
    pieces: dict[str, list[Piece]] = {name: [] for name in tensors}
    for item in items:
        pieces[item.name].append(item.piece)
    return {name: Entry(shape, dtype, layout, tuple(pieces[name])) for name, (shape, dtype, layout) in tensors.items()}


def write_metadata(folder: Path, tensors: Mapping[str, tuple[tuple[int, ...], str, dict | None]], items: Iterable[Item],
                   save_id: str) -> None:
    """Write what torch.distributed.checkpoint needs to read the folder.

    Raises:
        OSError: the disk is full, …
    """
    # Half a second to import, and of use to this format alone.
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata,
    )

    from ..torch_private import StorageInfo
    chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in tensors}
    places = {}
    for item in items:
        starts, sizes = torch.Size(item.piece.starts), torch.Size(item.piece.sizes)
        places[MetadataIndex(item.name, starts, len(chunks[item.name]))] = StorageInfo(item.piece.file, item.offset, item.length)
        chunks[item.name].append(ChunkStorageMetadata(starts, sizes))
    described = {name: TensorStorageMetadata(TensorProperties(dtype_of(dtype)), torch.Size(shape), chunks[name])
                 for name, (shape, dtype, _) in tensors.items()}
    nested = {name: tuple(name.split(".", 1)) for name in tensors}
    made = Metadata(described, nested, places, StorageMeta(save_id=save_id), CURRENT_DCP_VERSION)
    write_file(folder / METADATA, pickle.dumps(made))
