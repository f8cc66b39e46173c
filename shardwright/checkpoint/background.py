"""A save that goes on while the training does, and the one that a process has under way at most."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["Saving", "begun", "last_error", "wait_for_last"]

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


#: Of this process: the save under way.
_last: list[Saving] = []


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
