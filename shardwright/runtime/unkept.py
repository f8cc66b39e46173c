"""Gathered weights that are not kept for the backward.

    forward     a weight is gathered, used, let go; where an operator saves a tensor in its memory, the place is kept
    backward    whoever wants such a tensor first gathers again; the others share that; after the last it is let go

Operators save what they save, views of a weight as well as itself: `torch.autograd.graph.saved_tensors_hooks` sees it
all, and the memory that a tensor lies in tells whether it is a gathered weight's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
# Hardly documented, though torch's own multiprocessing rests on it: while it is held, no other memory gets that number.
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import SettingError
from ..torch_private import storage_id, version_of

__all__ = ["Unkept"]


class _Weight:
    """One gathered weight of one forward, on the ranks of this process."""

    def __init__(self, name: str, stored: Sequence[Tensor], gather: Callable[[], Sequence[Tensor]]) -> None:
        self.name, self._gather = name, gather
        self._stored = [(x, version_of(x)) for x in stored]
        self._saved = self._due = 0
        self._gathered: Sequence[Tensor] | None = None

    def save(self) -> None:
        """One more is saved."""
        self._saved, self._due = self._saved + 1, self._due + 1

    def again(self, index: int) -> Tensor:
        """For one of the saved: what is gathered on the rank of that index."""
        if any(version_of(x) != version for x, version in self._stored):
            raise SettingError(f"the parameter {self.name!r} has been changed between a forward and its backward, "
                               "which gathers it again",
                               legal='optimizer.step() after backward(), or optimizer_level="level2"')
        if self._gathered is None:
            with torch.no_grad():
                self._gathered = self._gather()
        gathered, self._due = self._gathered[index], self._due - 1
        if not self._due:  # the backward has all; another one through the same graph begins anew
            self._gathered, self._due = None, self._saved
        return gathered


class Unkept:
    """The weights of the forward that is under way; while active, operators do not save them."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[StorageWeakRef, _Weight, int]] = {}
        self._hooks: Any = None

    def __enter__(self) -> Unkept:
        self._places = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._places = {}

    def note(self, name: str, stored: Sequence[Tensor], gathered: Sequence[Tensor],
             gather: Callable[[], Sequence[Tensor]]) -> None:
        """A weight has been gathered.

        Args:
            stored: what it is gathered from; none of it may be changed before the backward.
            gathered: one entry a rank of this process.
            gather: does so again, in the same way.
        """
        weight = _Weight(name, stored, gather)
        for index, tensor in enumerate(gathered):
            memory = StorageWeakRef(tensor.untyped_storage())
            self._places.setdefault(memory.cdata, (memory, weight, index))

    def _pack(self, x: Tensor) -> Any:
        _, weight, index = self._places.get(storage_id(x.untyped_storage()), (None, None, 0))
        if weight is None:
            return x.detach()  # without its graph, which would hold an output, and itself, for ever
        weight.save()
        return weight, index, x.dtype, x.storage_offset(), x.shape, x.stride()


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    weight, index, dtype, offset, shape, stride = packed
    gathered = weight.again(index)
    return torch.empty(0, dtype=dtype, device=gathered.device).set_(gathered.untyped_storage(), offset, shape, stride)
