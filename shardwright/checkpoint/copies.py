"""What a save in the background writes: copies, of which those of an optimizer's state are made when the call has returned."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..torch_private import version_of
from .boxes import Written

__all__ = ["Copies"]

#: Of this process: the memory that tensors were copied to for the latest save, by name and place.
_copies: dict[tuple[str, tuple[int, ...]], Tensor] = {}


class Copies:
    """Copies in host memory of what a save writes, in that of the save before where it fits: fresh memory takes several times
    as long. Those of an optimizer's state are made by `complete`, in the save's thread, before the optimizer's next step.

    Args:
        given: what the save writes.
        later: by name, those of an optimizer's state, as the optimizer has them.

    Attributes:
        written: the same of copies.
    """

    def __init__(self, given: Iterable[Written], later: Mapping[str, Tensor]) -> None:
        self.written: list[Written] = []
        self._later: deque[_Later] = deque()
        known = dict(_copies)
        _copies.clear()
        for name, starts, tensor in given:
            copy = known.get((name, starts))
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            _copies[name, starts] = copy
            self.written.append(Written(name, starts, copy))
            both = tensor, later.get(name, tensor)
            if name in later and tensor.device.type == "cpu" and not any(t.is_inference() for t in both):
                self._later.append(_Later(name, copy, both, _versions(both)))
            else:
                copy.copy_(tensor)
        self._left, self._lock, self._all = len(self._later), threading.Lock(), threading.Event()
        self._error: Exception | None = None

    def complete(self) -> None:
        """Make the copies that are still to be made.

        Raises:
            CheckpointError: a tensor that has been changed since the call, by something else than a step.
        """
        self.help()
        if self._error is not None:
            raise self._error

    def help(self) -> None:
        """Make those that nobody has begun, and wait for the others: as the optimizer does that is about to step."""
        while self._later:
            try:
                one = self._later.popleft()
            except IndexError:  # another thread was quicker
                break
            try:
                one.copy.copy_(one.seen[0])
                if _versions(one.seen) != one.versions:
                    raise CheckpointError("it was changed while it was copied for the checkpoint in the background",
                                          source=one.name, legal="changes by the optimizer's step(), which waits for the copy, "
                                                                 "or after the save's wait()")
            except Exception as error:  # the save fails, and not who helps
                self._error = self._error or error
            with self._lock:
                self._left -= 1
        if self._left:
            self._all.wait()
        self._all.set()


class _Later(NamedTuple):
    """A copy to be made: of the first of the tensors `seen`, if they have been changed in place so often still."""

    name: str
    copy: Tensor
    seen: tuple[Tensor, Tensor]
    versions: list[int]


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    """How often each has been changed in place."""
    return [version_of(tensor) for tensor in tensors]
