"""The lock of a run's folder: one run at a time saves into it.

    PATH/.lock      the host, the process, and when it began to save

1. Rank 0 takes the lock (`hold`) with the first save of a model into the folder, and keeps it until the process ends or
   the model is freed. A second run is refused: it would remove the first one's checkpoints, and unfinished saves. A
   child that the holder forks belongs to its run: it may save under its parent's lock.

2. A lock of a run that died blocks nobody.

    on its own host      there is no process of this number that started at this time
    on another host      the file has not been touched for `SILENCE` seconds by the clock of the file's own server: a
                         thread of the holder touches it every `BEAT` seconds. A save waits until that is known

   Such a lock is renamed before a new one is made: of two runs that find it, one gets the new one.

3. A holder that was taken for dead, as on a machine that slept, finds another's lock at its next save, and is refused.

Example: of two hosts that run the same script by mistake, the second says ``process 4711 on the host gpu3 saves into
this folder since 2026-11-24 10:31``.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import secrets
import socket
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

__all__ = ["LOCK", "hold"]

LOCK = ".lock"

BEAT = 15.0
SILENCE = 120.0


class _Lock:
    """The lock of one folder, held by this process.

    Args:
        folder: the folder.

    Attributes:
        encoded: the content of the file.
        models: the models that are saved into the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / LOCK
        self.models: list[weakref.ref[object]] = []
        self.document: dict[str, Any] = {
            "host": socket.gethostname(),
            "kernel": _kernel(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "since": time.strftime("%Y-%m-%d %H:%M"),
            "id": secrets.token_hex(8),
        }

    @property
    def held(self) -> bool:
        """True while the file is this process's own."""
        return _read(self.file).get("id") == self.document["id"]

    def take(self) -> None:
        """Take the lock.

        Raises:
            CheckpointError: a run holds it that is not dead.
            OSError: the file cannot be made.
        """
        while not self._made():
            other = _read(self.file)
            if _lives(other, self.file):
                pid, host, since = (other.get(key, "?") for key in ("pid", "host", "since"))
                raise CheckpointError(
                    f"process {pid} on the host {host} saves into this folder since {since}",
                    source=str(self.file.parent),
                    legal="a folder for each run; or this one, after the end of that process",
                )
            self._bury(other)

    def _made(self) -> bool:
        """True where the file could be made, whole from the start: no reader finds a part of it."""
        whole = self.file.with_name(f"{LOCK}.{self.document['id']}")
        try:
            whole.write_text(json.dumps(self.document))
            try:
                os.link(whole, self.file)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK):
                    raise
                return self._made_without_links()
            return True
        finally:
            with contextlib.suppress(OSError):
                whole.unlink()

    def _made_without_links(self) -> bool:
        try:
            handle = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        with open(handle, "w") as file:
            file.write(json.dumps(self.document))
        return True

    def _bury(self, other: dict[str, object]) -> None:
        """Remove the lock of a dead run, and no other that has been made meanwhile."""
        grave = self.file.with_name(f"{LOCK}.{self.document['id']}.dead")
        with contextlib.suppress(FileNotFoundError):  # another run has removed it
            os.rename(self.file, grave)
            if _read(grave) != other:
                with contextlib.suppress(OSError):  # it is back already
                    os.link(grave, self.file)
            grave.unlink()

    def release(self) -> None:
        """Remove the file, if it is this process's own."""
        if self.held:
            with contextlib.suppress(OSError):
                self.file.unlink()

    def touch(self) -> None:
        """Show other hosts that this process lives."""
        with contextlib.suppress(OSError):  # the folder is gone, or its disk: the next save says so
            os.utime(self.file)


def _read(file: Path) -> dict[str, object]:
    """The content of a lock; {} where it cannot be read."""
    try:
        encoded = json.loads(file.read_bytes()[:4096])
    except (OSError, ValueError, RecursionError):
        return {}
    return encoded if isinstance(encoded, dict) else {}


def _lives(other: dict[str, object], file: Path) -> bool:
    """True where the process that made a lock lives, or may live."""
    pid = other.get("pid")
    if other.get("kernel") == _kernel() and isinstance(pid, int) and not isinstance(pid, bool):
        return _started(pid) is not None and _started(pid) == other.get("started")
    while True:
        try:
            touched = file.stat().st_mtime
            silence = _now(file.parent) - touched
        except FileNotFoundError:  # it has ended just now
            return False
        if silence > SILENCE:
            return False
        # The holder touches the file at its next beat, if it lives.
        deadline = time.monotonic() + min(2 * BEAT, SILENCE - silence + 1)
        while time.monotonic() < deadline:
            time.sleep(BEAT / 30)
            try:
                if file.stat().st_mtime != touched:
                    return True
            except FileNotFoundError:
                return False


def _now(folder: Path) -> float:
    """The time by the clock of the folder's file server."""
    probe = folder / f"{LOCK}.{secrets.token_hex(8)}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _kernel() -> str:
    """The running kernel and, where processes have several numbers, the name space of this one's number; the host's
    name on other systems than Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> int | None:
    """The time at which a process of this host started, as the kernel counts, 0 where it is not known; None where there
    is no such process."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return None if state in "ZX" else int(fields[18])
    except (OSError, ValueError, IndexError):
        if os.path.exists("/proc/self/stat"):
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:  # of another user
        pass
    return 0


#: The ids of the locks that this process's parent held when it forked.
_inherited: set[str] = set()
#: The locks that this process holds, by folder. The guard is entered again where a model is freed inside of it.
_locks: dict[str, _Lock] = {}
_guard = threading.RLock()
_beating: list[threading.Thread] = []


def hold(folder: Path, model: object) -> None:
    """Take the lock of a folder for this process, or keep it, as long as the model is there.

    Args:
        folder: the folder, which exists.
        model: the model that is saved.

    Raises:
        CheckpointError: another run holds it.
        OSError: the file cannot be made.
    """
    key = os.path.realpath(folder)
    if _read(Path(key) / LOCK).get("id") in _inherited:
        return
    lock = _locks.get(key)
    if lock is None or not lock.held:
        made = _Lock(Path(key))
        made.take()
        with _guard:
            if lock is not None:
                made.models += lock.models
            _locks[key] = lock = made
            if not (_beating and _beating[0].is_alive()):
                _beating[:] = [threading.Thread(target=_beat, daemon=True, name="shardwright lock of checkpoints")]
                _beating[0].start()
    if all(known() is not model for known in lock.models):
        lock.models.append(weakref.ref(model))
        weakref.finalize(model, _let_go, key).atexit = False


def _let_go(key: str) -> None:
    """Release the lock of a folder, once the last model that was saved into it is gone."""
    with _guard:
        lock = _locks.get(key)
        if lock is None or any(model() is not None for model in lock.models):
            return
        del _locks[key]
    lock.release()


def _beat() -> None:
    while True:
        time.sleep(BEAT)
        with _guard:
            held = list(_locks.values())
        for lock in held:
            lock.touch()


@atexit.register
def _release_all() -> None:
    for lock in list(_locks.values()):
        lock.release()


def _in_child() -> None:
    """A forked child releases no lock of its parent, whose thread may have been inside of the guard."""
    global _guard
    _guard = threading.RLock()
    _inherited.update(lock.document["id"] for lock in _locks.values())
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
