"""Whole tensors in files of the safetensors format, which several ranks write together, each its boxes at their places.

    model.safetensors        the model's, under their own names       loss_fn.safetensors       the loss's, if it has any
    optimizer.safetensors    under <parameter>.<key of its state>

A box of rows is one run of bytes in the file; one that is cut in a later dim is as many as it has rows, unless ranks bring
theirs together first (`joining`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from .manifest import Entry, Piece, element_size
from .marking import ID_KEY
from .safetensors import laid_out

__all__ = ["WholeFiles", "file_of", "memory_of"]

_CALL = 1 << 30


def file_of(name: str) -> tuple[str, str]:
    """The file of a tensor, and its name in there."""
    tree, _, rest = name.partition(".")
    return f"{tree}.safetensors", rest


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory, row-major; without a copy where they lie so already."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


class WholeFiles:
    """The files of a checkpoint of whole tensors. Every rank has the same, made from the same descriptions.

    Args:
        tensors: name -> (shape, dtype, layout as an `Entry` says it), in the order of the files.
        save_id: of the save.
        step: of the run.
        aliases: another name of a tensor -> the one it has here, as safetensors notes tied ones.

    Attributes:
        sizes: file -> its bytes.

    Raises:
        CheckpointError: a dtype that the format does not know.
    """

    def __init__(self, tensors: Mapping[str, tuple[tuple[int, ...], str, dict | None]], save_id: str, step: int,
                 aliases: Mapping[str, str] | None = None) -> None:
        self._tensors = tensors
        self._heads: dict[str, bytes] = {}
        self.sizes: dict[str, int] = {}
        self._places: dict[str, tuple[str, int]] = {}
        grouped: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        for name, (shape, dtype, _) in tensors.items():
            file, inside = file_of(name)
            grouped.setdefault(file, {})[inside] = (dtype, shape)
        for file, held in grouped.items():
            tied = {file_of(a)[1]: file_of(n)[1] for a, n in (aliases or {}).items() if file_of(n)[0] == file == file_of(a)[0]}
            metadata = {"format": "pt", ID_KEY: save_id, "step": str(step)}
            self._heads[file], places, self.sizes[file] = laid_out(held, metadata | tied)
            tree = file.removesuffix(".safetensors")
            self._places |= {f"{tree}.{inside}": (file, place) for inside, place in places.items()}

    @property
    def entries(self) -> dict[str, Entry]:
        """As the manifest names them."""
        return {name: Entry(shape, dtype, layout, (Piece(*self._places[name], (0,) * len(shape), shape),))
                for name, (shape, dtype, layout) in self._tensors.items()}

    def begin(self, folder: Path) -> None:
        """Write the headers; on one rank, while others write boxes already.

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
        """Write boxes: name, where it begins in each dim, what is in it, in host memory. Not yet through to the disk.

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
        """Write neighbouring elements of a tensor, from element `first` on. Not yet through to the disk.

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
        first = len(shape)  # from the dim before it on a box is one run
        while first > 0 and sizes[first - 1] == shape[first - 1]:
            first -= 1
        first = max(first - 1, 0)
        strides = [math.prod(shape[dim + 1:]) * size for dim in range(len(shape))]
        begin = place + sum(a * s for a, s in zip(starts, strides))
        memory, run = memory_of(tensor), math.prod(sizes[first:]) * size
        for number, outer in enumerate(product(*(range(n) for n in sizes[:first]))):
            at = begin + sum(i * s for i, s in zip(outer, strides))
            _put(handle, memory[number * run:(number + 1) * run], at)


def _put(handle: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(handle, data[:_CALL], at)
        data, at = data[count:], at + count
