"""A save that goes on while the training does, and the one that a process has under way at most."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from .boxes import Written

__all__ = ["Saving", "begun", "last_error", "staged", "wait_for_last"]


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


def staged(written: Iterable[Written]) -> list[Written]:
    """Copies in host memory, in that of the save before where it fits: fresh memory takes several times as long."""
    known, out = dict(_copies), []
    _copies.clear()
    for name, starts, tensor in written:
        copy = known.get((name, starts))
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        copy.copy_(tensor)
        _copies[name, starts] = copy
        out.append(Written(name, starts, copy))
    return out


@atexit.register
def _say_what_failed() -> None:
    """What nobody has asked for before the end."""
    error = last_error()
    if error is not None:
        print(f"the checkpoint in the background was not written: {error}", file=sys.stderr)
