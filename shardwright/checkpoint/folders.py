"""The folders of a run's checkpoints, and how one comes to be there whole or not at all.

    PATH/step-00000100                  a checkpoint; a folder of this name is always whole
    PATH/.step-00000100.5f3a.part       one that is being written, or being removed; or was, when its process died
    PATH/.step-00000100.5f3a.old        one in whose place another of the same step is about to be put

A save writes its files into a ``.part``, each of them to the disk, and renames it last. One that is to be removed becomes a
``.part`` first. Where an ``.old`` stands and its step does not, a save died between two renames: it counts as that step's.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from ..errors import CheckpointError
from .manifest import MANIFEST

__all__ = ["begin", "clean", "finish", "folder_of", "latest_checkpoint", "name_of", "prune", "steps_in", "sync_folder",
           "write_file"]

_WHOLE = re.compile(r"step-(\d{8,})")
_OLD = re.compile(r"\.(step-(\d{8,}))\.[0-9a-f]+\.old")
_LEFT = re.compile(r"\.(step-\d{8,})\.[0-9a-f]+\.(part|old)")


def name_of(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step-{step:08d}"


def steps_in(path: str | Path) -> dict[int, Path]:
    """The checkpoints of a run, by step, the lowest first; none where there is no such folder.

    Raises:
        CheckpointError: a folder that cannot be looked into.
    """
    found: dict[int, Path] = {}
    try:
        names = sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise CheckpointError(f"the folder of checkpoints cannot be read: {error.strerror}", source=str(path),
                              legal="a folder that may be read") from None
    for name in names:  # those with a dot come first
        for pattern, group in ((_OLD, 2), (_WHOLE, 1)):
            match = pattern.fullmatch(name)
            if match and (Path(path) / name).is_dir():
                found[int(match[group])] = Path(path) / name
    return dict(sorted(found.items()))


def latest_checkpoint(path: str | Path) -> Path | None:
    """The checkpoint of the highest step in a run's folder, or None where there is none.

    Raises:
        CheckpointError: a folder that cannot be looked into.
    """
    return next(reversed(steps_in(path).values()), None)


def folder_of(path: str | Path, step: int | None = None) -> Path | None:
    """The folder of a checkpoint.

    Args:
        path: the folder of a run, or of a checkpoint itself.
        step: which; None: the highest.

    Returns:
        None: a run without checkpoints.

    Raises:
        CheckpointError: no such step, with those there are.
    """
    path = Path(path)
    if (path / MANIFEST).exists() and step is None:
        return path
    found = steps_in(path)
    if step is None or not found and not (path / MANIFEST).exists():
        return next(reversed(found.values()), None)
    if step not in found:
        there = ", ".join(map(str, found)) or "none in this folder, which is a checkpoint itself"
        raise CheckpointError(f"there is no checkpoint of step {step}", source=str(path), legal=f"the steps there are: {there}")
    return found[step]


# -- writing -----------------------------------------------------------------------------------------------------------


def write_file(path: Path, content: bytes) -> None:
    """Write a file through to the disk.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """See that the names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems know no such thing
            os.fsync(handle)
    finally:
        os.close(handle)


def clean(path: Path) -> None:
    """Remove what dead saves have left, and put back what one was about to replace."""
    for name in os.listdir(path):
        match = _LEFT.fullmatch(name)
        if match and match[2] == "old" and not (path / match[1]).exists():
            os.rename(path / name, path / match[1])
        elif match:
            shutil.rmtree(path / name, ignore_errors=True)


def begin(path: Path, step: int, save_id: str) -> Path:
    """A new folder to write a checkpoint into.

    Raises:
        OSError: it cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True)
    clean(path)
    made = path / f".{name_of(step)}.{save_id}.part"
    made.mkdir()
    return made


def finish(part: Path, step: int, save_id: str) -> Path:
    """Give a written checkpoint its name, in the place of one that has it.

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
    """Remove the checkpoints of the lowest steps, so that `keep` are left; never that of step `newest`.

    Args:
        keep: None or 0: all.
    """
    steps = [s for s in steps_in(path) if s != newest]
    for step in steps[:max(0, len(steps) + 1 - keep)] if keep else []:
        dying = path / f".{name_of(step)}.0.part"
        with contextlib.suppress(OSError):  # one that cannot be removed harms nobody
            os.rename(steps_in(path)[step], dying)
            shutil.rmtree(dying, ignore_errors=True)
