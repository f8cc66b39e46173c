"""A save that goes on while the training does, and the one that a process has under way at most."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError
from .boxes import Written

__all__ = ["Copies", "Saving", "begun", "last_error", "wait_for_last"]

#: How much less the thread of a save counts than one of the training: a tenth of the processor where both want it.
_NICE = 10


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
        _step_back()
        self._do(work)

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error


#: Of this process: the save under way, and the memory that tensors were copied to for it, by name and place.
_last: list[Saving] = []
_copies: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}


def begun(saving: Saving, work: Callable[[], None]) -> None:
    """Do the work of a save in a thread, which the end of the interpreter waits for; at once where there can be none."""
    thread = threading.Thread(target=saving._run, args=(work,), name=f"checkpoint of step {saving.step}")
    _last[:] = [saving]
    try:
        thread.start()
        saving._thread = thread
    except RuntimeError:  # as many as there may be, or the interpreter is about to end: the other ranks write already
        saving._do(work)


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
    return [tensor._version for tensor in tensors]


def _step_back() -> None:
    """Leave the processor to the training wherever it wants it: on Linux each thread has a priority of its own."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # not allowed here: it goes on as it is
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE))


@atexit.register
def _say_what_failed() -> None:
    """What nobody has asked for before the end."""
    error = last_error()
    if error is not None:
        print(f"the checkpoint in the background was not written: {error}", file=sys.stderr)
