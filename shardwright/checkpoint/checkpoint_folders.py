"""The folders of a run's checkpoints: their names, the unfinished ones, and the old ones that go.

    PATH/step-00000100                  a checkpoint; a folder of this name is always whole
    PATH/.step-00000100.5f3a.part       a checkpoint being written or removed, or left by a dead process
    PATH/.step-00000100.5f3a.old        a checkpoint about to be replaced by another one of the same step
    PATH/.lock                          the run that saves here (`folder_lock`)

A save writes its files into a ``.part``, syncs each of them to the disk, and renames the folder last. A checkpoint to
be removed becomes a ``.part`` first. An ``.old`` without its step means that a save died between two renames: the
``.old`` counts as that step's checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .folder_lock import hold
from .manifest import MANIFEST, sync_folder

__all__ = [
    "absent",
    "begin",
    "clean",
    "finish",
    "folder_of",
    "folder_of_files",
    "join",
    "latest_checkpoint",
    "name_of",
    "prune",
    "runs_inside",
    "steps_in",
]


_WHOLE = re.compile(r"step-(\d{8,})")


_OLD = re.compile(r"\.(step-(\d{8,}))\.[0-9a-f]+\.old")


_LEFT = re.compile(r"\.(step-\d{8,})\.[0-9a-f]+\.(part|old)")


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
        match = None if save_id and save_id in name else _LEFT.fullmatch(name)
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
