"""A save that goes on while the training does, and the one that a process has under way at most."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError
from .boxes import Written

__all__ = ["Copies", "Saving", "begun", "last_error", "wait_for_last"]


class Saving:
    """A save.

    Attributes:
        step: of the run.
        path: of the checkpoint, which is there once the save is done.
    """

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is there.

        Returns:
            Its folder.

        Raises:
            CheckpointError: it could not be written, on every rank alike; once.
        """
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.path

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error


#: Of this process: the save under way, and the memory that tensors were copied to for it, by name and place.
_last: list[Saving] = []
_copies: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}


def begun(saving: Saving, work: Callable[[], None]) -> None:
    """Do the work of a save in a thread, which the end of the interpreter waits for."""
    saving._thread = threading.Thread(target=saving._run, args=(work,), name=f"checkpoint of step {saving.step}")
    _last[:] = [saving]
    saving._thread.start()


def last_error() -> Exception | None:
    """Wait for the save under way; what went wrong with it, once, and not where `Saving.wait` has said so."""
    if not _last:
        return None
    saving = _last.pop()
    if saving._thread is not None:
        saving._thread.join()
    error, saving._error = saving._error, None
    return error


def wait_for_last() -> None:
    """Wait for the save under way; what went wrong with it is still to be told."""
    if _last and _last[0]._thread is not None:
        _last[0]._thread.join()


class Copies:
    """Copies in host memory of what a save writes, in that of the save before where it fits: fresh memory takes several times
    as long. Those of an optimizer's state are made by `complete`, which the optimizer's next step waits for.

    Args:
        given: what the save writes.
        later: by name, those of an optimizer's state, as the optimizer has them.

    Attributes:
        written: the same of copies.
        complete_now: set once all copies are made.
    """

    def __init__(self, given: Iterable[Written], later: Mapping[str, Tensor]) -> None:
        self.written: list[Written] = []
        self.complete_now = threading.Event()
        self._later: list[tuple[str, Tensor, tuple[Tensor, Tensor], list[int]]] = []
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
                self._later.append((name, copy, both, _versions(both)))
            else:
                copy.copy_(tensor)

    def complete(self) -> None:
        """Make the copies that are still to be made.

        Raises:
            CheckpointError: a tensor that has been changed since the call, by something else than a step.
        """
        try:
            for name, copy, both, versions in self._later:
                copy.copy_(both[0])
                if _versions(both) != versions:
                    raise CheckpointError("it was changed while it was copied for the checkpoint in the background",
                                          source=name, legal="changes by the optimizer's step(), which waits for the copy, or "
                                                             "after the save's wait()")
        finally:
            self._later.clear()
            self.complete_now.set()


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    """How often each has been changed in place."""
    return [tensor._version for tensor in tensors]


@atexit.register
def _say_what_failed() -> None:
    """What nobody has asked for before the end."""
    error = last_error()
    if error is not None:
        print(f"the checkpoint in the background was not written: {error}", file=sys.stderr)
