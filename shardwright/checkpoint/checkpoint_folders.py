"""The folders of a run's checkpoints: their names, the unfinished ones, the old ones that go, and the lock of the run.

    PATH/step-00000100                  a checkpoint; a folder of this name is always whole
    PATH/.step-00000100.5f3a.part       a checkpoint being written or removed, or left by a dead process
    PATH/.step-00000100.5f3a.old        a checkpoint about to be replaced by another one of the same step
    PATH/.lock                          the run that saves here: the host, the process, and when it began to save

1. A save writes its files into a ``.part``, syncs each of them to the disk (`sealed`), and renames the folder last. A
   checkpoint to be removed becomes a ``.part`` first. An ``.old`` without its step means that a save died between two
   renames: the ``.old`` counts as that step's checkpoint.

2. One run at a time saves into a folder. Rank 0 takes the lock (`hold`) with the first save of a model into the folder,
   and keeps it until the process ends or the model is freed. A second run is refused: it would remove the first one's
   checkpoints, and unfinished saves. A child that the holder forks belongs to its run: it may save under its parent's
   lock. Example: of two hosts that run the same script by mistake, the second says ``process 4711 on the host gpu3
   saves into this folder since 2026-11-24 10:31``.

3. A lock of a run that died blocks no other run.

    on its own host      there is no process of this number that started at this time
    on another host      the file has not been touched for `SILENCE` seconds by the clock of the file's own server: a
                         thread of the holder touches it every `BEAT` seconds. A save waits until that is known

   Such a lock is renamed before a new one is made: of two runs that find it, one gets the new one. A holder that was
   taken for dead, as on a machine that slept, finds another's lock at its next save, and is refused.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..json_files.json_reader import JsonObject
from .digests import digest
from .manifest import (
    MANIFEST,
    CheckpointFile,
    Manifest,
    TensorEntry,
    model_fingerprint,
    sync_folder,
    write as write_manifest,
)

__all__ = [
    "LOCK",
    "absent",
    "begin",
    "clean",
    "finish",
    "folder_of",
    "folder_of_files",
    "hold",
    "join",
    "latest_checkpoint",
    "name_of",
    "prune",
    "runs_inside",
    "sealed",
    "steps_in",
]

# -- the folders


_WHOLE = re.compile(r"step-(\d{8,})")


_OLD = re.compile(r"\.(step-(\d{8,}))\.[0-9a-f]+\.old")


_UNFINISHED = re.compile(r"\.(step-\d{8,})\.[0-9a-f]+\.(part|old)")


def name_of(step: int) -> str:
    """The folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def steps_in(path: str | Path) -> dict[int, Path]:
    """The checkpoints of a run, by step, the lowest first; empty where the folder does not exist.

    Raises:
        CheckpointError: a folder that cannot be read.
    """
    found: dict[int, Path] = {}
    try:
        names = sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise CheckpointError(
            f"the folder of checkpoints cannot be read: {error.strerror}",
            source=str(path),
            legal="a folder that may be read",
        ) from None
    for name in names:  # names with a dot come first, so that a whole folder wins over an ``.old``
        for pattern, group in ((_OLD, 2), (_WHOLE, 1)):
            match = pattern.fullmatch(name)
            if match and (Path(path) / name).is_dir():
                found[int(match[group])] = Path(path) / name
    return dict(sorted(found.items()))


def absent(path: Path, empty: str = "there is no checkpoint in it") -> str:
    """The reason why a path has no checkpoint: an empty folder (`empty`), a file, or no folder."""
    if path.is_dir():
        inside = runs_inside(path)
        return f"{empty}; {' and '.join(map(str, inside))} has one" if inside else empty
    return (
        f"it is a file, and not the folder of a checkpoint; its folder is {path.parent}"
        if path.is_file()
        else ("there is no such folder")
    )


def runs_inside(path: Path) -> list[Path]:
    """The first folder inside of `path` that is the folder of a run with checkpoints, as a list; empty: there is none.

    A caller that meant this folder gets its name instead of an answer that nothing has been saved.
    """
    try:
        folders = sorted(p for p in path.iterdir() if p.is_dir())
    except OSError:
        return []
    return [folder for folder in folders if steps_in(folder)][:1]


def latest_checkpoint(path: str | Path) -> Path | None:
    """The checkpoint of the highest step in a run's folder.

    Args:
        path: the run's folder, as `save_checkpoint` takes it.

    Returns:
        The checkpoint's folder or file; None where there is none.

    Raises:
        CheckpointError: a folder that cannot be read, or a file.

    Example:
        >>> saving = sw.save_checkpoint(model, optimizer, "runs/7", step=3)
        >>> sw.latest_checkpoint("runs/7").name
        'step-00000003'
        >>> sw.latest_checkpoint("nowhere") is None
        True
    """
    if Path(path).is_file():
        raise CheckpointError(absent(Path(path)), source=str(path), legal="the folder of a run")
    return next(reversed(steps_in(path).values()), None)


def folder_of(path: str | Path, step: int | None = None) -> Path | None:
    """The folder of a checkpoint.

    Args:
        path: the folder of a run, or of a checkpoint itself.
        step: the step; None: the highest.

    Returns:
        The folder; None for a run without checkpoints.

    Raises:
        CheckpointError: no such step, with the steps that exist.
    """
    path = Path(path)
    if (path / MANIFEST).exists() and step is None:
        return path
    found = steps_in(path)
    if step is None or (not found and not (path / MANIFEST).exists()):
        return next(reversed(found.values()), None)
    if step not in found:
        steps_text = ", ".join(map(str, found)) or "none in this folder, which is a checkpoint itself"
        raise CheckpointError(
            f"there is no checkpoint of step {step}", source=str(path), legal=f"the steps there are: {steps_text}"
        )
    return found[step]


def clean(path: Path, save_id: str = "") -> None:
    """Remove the remains of dead saves, and restore a checkpoint that one of them was about to replace.

    Args:
        path: the folder of the run.
        save_id: the id of a save that is alive.
    """
    for name in os.listdir(path):
        match = None if save_id and save_id in name else _UNFINISHED.fullmatch(name)
        if match and match[2] == "old" and not (path / match[1]).exists():
            os.rename(path / name, path / match[1])
        elif match:
            shutil.rmtree(path / name, ignore_errors=True)


def folder_of_files(checkpoint: Any) -> Path:
    """The folder of a checkpoint that is given by itself, or by the list of its files.

    Raises:
        CheckpointError: no path, or files of several folders.
    """
    listed = isinstance(checkpoint, (list, tuple))
    paths = list(checkpoint) if listed else [checkpoint]
    if not paths or not all(isinstance(path, (str, os.PathLike)) for path in paths):
        raise CheckpointError(
            f"checkpoint={checkpoint!r}",
            source="load_distributed_checkpoint",
            legal="the folder of a checkpoint or of a run, or the list of the files of one checkpoint",
        )
    folders = {Path(path).parent if listed and not Path(path).is_dir() else Path(path) for path in paths}
    if len(folders) > 1:
        raise CheckpointError(
            f"the {len(paths)} files of the list are in {len(folders)} folders: "
            + ", ".join(sorted(map(str, folders))[:3]),
            source="load_distributed_checkpoint",
            legal="the files of one checkpoint, which are in one folder, or that folder",
        )
    (folder,) = folders
    missing = next((path for path in paths if listed and not os.path.exists(path)), None)
    if missing is not None:
        raise CheckpointError(
            "there is no such file",
            source=str(missing),
            legal=f"files of {folder}" if folder.is_dir() else "the files of a checkpoint, or its folder",
        )
    return folder


def begin(path: Path, step: int, save_id: str, model: object) -> Path:
    """Make a new folder to write a checkpoint of a model into, and return it.

    Raises:
        CheckpointError: another run saves into the folder.
        OSError: it cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True)
    hold(path, model)
    clean(path)
    made = path / f".{name_of(step)}.{save_id}.part"
    made.mkdir()
    return made


def join(path: Path, step: int, save_id: str) -> bool:
    """Make the folder of a save that another rank has begun elsewhere.

    Returns:
        True where this rank made it, and looks after it; False where it is there already.

    Raises:
        OSError: it cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True)
    try:
        (path / f".{name_of(step)}.{save_id}.part").mkdir()
    except FileExistsError:
        return False
    clean(path, save_id)
    return True


def finish(part: Path, step: int, save_id: str) -> Path:
    """Give a written checkpoint its final name, replacing an existing one of that name.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: it cannot be renamed.
    """
    sync_folder(part)
    path, old = part.parent / name_of(step), part.parent / f".{name_of(step)}.{save_id}.old"
    replaces = path.exists()
    if replaces:
        os.rename(path, old)
    os.rename(part, path)
    sync_folder(part.parent)
    if replaces:
        shutil.rmtree(old, ignore_errors=True)
    return path


def prune(path: Path, keep: int | None, newest: int) -> None:
    """Remove the checkpoints of the lowest steps, so that `keep` are left; the one of step `newest` always stays.

    Args:
        path: the folder of the run.
        keep: the number of checkpoints to keep; None or 0: all.
        newest: the step just saved.
    """
    steps = [s for s in steps_in(path) if s != newest]
    for step in steps[: max(0, len(steps) + 1 - keep)] if keep else []:
        dying = path / f".{name_of(step)}.0.part"
        with contextlib.suppress(OSError):  # a checkpoint that cannot be removed does no harm
            os.rename(steps_in(path)[step], dying)
            shutil.rmtree(dying, ignore_errors=True)


# -- files on the disk


def sealed(
    folder: Path,
    files: Mapping[str, CheckpointFile],
    entries: Mapping[str, TensorEntry],
    kind: str,
    step: int,
    save_id: str,
    plan: str | None,
    world: int,
    places: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Write the manifest of a folder whose other files are complete.

    Files of the folder that are not in `files` are synced to the disk and digested here.

    Args:
        folder: the folder of the checkpoint.
        files: the files whose size and digest are known.
        entries: the tensors, by name.
        kind, step, save_id, plan, world, places: see `Manifest`.

    Raises:
        OSError: the disk is full, …
    """
    listed = dict(files)
    for path in sorted(p for p in folder.iterdir() if p.name not in listed):
        synced(folder, [path.name])
        listed[path.name] = CheckpointFile(path.stat().st_size, digest(path))
    model = model_fingerprint((n, e.shape, e.dtype) for n, e in entries.items() if not n.startswith("optimizer."))
    write_manifest(folder, Manifest(kind, step, save_id, model, plan, world, listed, entries, places=places or {}))


def synced(folder: Path, names: Iterable[str]) -> None:
    """Sync files to the disk."""
    for name in names:
        handle = os.open(folder / name, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class Synced(threading.Thread):
    """`synced` in a thread, in parallel with the block inside.

    The thread waits for the disk while the block uses the processor.
    """

    def __init__(self, folder: Path, names: list[str]) -> None:
        super().__init__()
        self._what = (folder, names)
        self._error: OSError | None = None

    def run(self) -> None:
        try:
            synced(*self._what)
        except OSError as error:
            self._error = error

    def __enter__(self) -> None:
        try:
            self.start()
        except RuntimeError:  # the interpreter is ending and waits for this save: it starts no more threads
            self.run()

    def __exit__(self, kind: object, *rest: object) -> None:
        if self.ident is not None:
            self.join()
        if self._error is not None and kind is None:
            raise self._error


# -- the lock


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
        self.document: JsonObject = {
            "host": socket.gethostname(),
            "kernel": _kernel(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "since": time.strftime("%Y-%m-%d %H:%M"),
            "id": secrets.token_hex(8),
        }

    @property
    def is_ours(self) -> bool:
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
        if self.is_ours:
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
    if lock is None or not lock.is_ours:
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
            locks = list(_locks.values())
        for lock in locks:
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
