"""`save_checkpoint`: a run's state, written whole or not at all.

    every rank   what it has ─ copy ─ agree ─┆─ copy the rest ─ its boxes ─ agree ─ digests, to the disk ─ agree ────── agree
    rank 0       make .part                  ┆                                                      manifest, rename, prune

With ``asynchronous=True`` what is right of the dotted line (`writing`) happens in a thread, over a process group of its
own; without there are no copies. What may change at any time is copied in the call: parameters, buffers, what the user
gives. The state of an optimizer changes in its steps alone, the next of which waits until the thread has copied it, and
helps.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..json_values import encode
from ..runtime.distributed.coordination import ranks_of_now
from ..runtime.optimizer_guard import before_next_step, says_when_it_steps
from ..torch_private import version_of
from . import manifest as folders
from .formats import WrittenBox, described_here, written_here
from .manifest import new_id
from .state import CheckpointedModel, LocalTensor, generators, optimizer_state, state_names
from .writer import CONFIG, SaveJob, located

__all__ = ["BackgroundSave", "HostCopies", "begun", "last_error", "save_checkpoint", "several", "wait_for_last"]


# ----------------------------------------------------------------------------------------------------
# A save that goes on while the training does, and the one that a process has under way at most.
# ----------------------------------------------------------------------------------------------------

#: How much less the thread of a save counts than one of the training: a tenth of the processor where both want it.
_NICE = 10


class BackgroundSave:
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
_last: list[BackgroundSave] = []


def begun(saving: BackgroundSave, work: Callable[[], None]) -> None:
    """Do the work of a save in a thread, which the end of the interpreter waits for; at once where there can be
    none."""
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


# ----------------------------------------------------------------------------------------------------
# What a save in the background writes: copies, of which those of an optimizer's state are made when the call has
# returned. ----------------------------------------------------------------------------------------------------

#: Of this process: the memory that tensors were copied to for the latest save, by name and place.
_copies: dict[tuple[str, tuple[int, ...]], Tensor] = {}


class HostCopies:
    """Copies in host memory of what a save writes, in that of the save before where it fits: fresh memory takes several
    times as long. Those of an optimizer's state are made by `complete`, in the save's thread, before the optimizer's
    next step.

    Args:
        given: what the save writes.
        later: by name, those of an optimizer's state, as the optimizer has them.

    Attributes:
        written: the same of copies.
    """

    def __init__(self, given: Iterable[WrittenBox], later: Mapping[str, Tensor]) -> None:
        self.written: list[WrittenBox] = []
        self._later: deque[_Later] = deque()
        known = dict(_copies)
        _copies.clear()
        for name, starts, tensor in given:
            copy = known.get((name, starts))
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            _copies[name, starts] = copy
            self.written.append(WrittenBox(name, starts, copy))
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
                    raise CheckpointError(
                        "it was changed while it was copied for the checkpoint in the background",
                        source=one.name,
                        legal="changes by the optimizer's step(), which waits for the copy, or after the save's wait()",
                    )
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


def save_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    path: str | Path | None = None,
    *,
    step: int,
    extra: Any = None,
    schedulers: Any = (),
    data: Any = None,
    integrated_save: bool = True,
    keep_checkpoint_max: int | None = 5,
    asynchronous: bool = False,
) -> BackgroundSave:
    """Save what a run needs to go on, as ``path/step-00000100``. On processes every rank calls it, with the same
    `step`.

    It is written beside and gets its name when all of it is on the disk: whatever ends a save, the checkpoints that are
    there stay as they are. Where one rank fails, all raise its error, and there is no new checkpoint.

    Args:
        model: the `AutoParallel`, or a module.
        optimizer: whose state and settings are saved too.
        path: the folder of the run's checkpoints, which all hosts see; made where it is not there.
        step: of the run, from 0. One that is there already is replaced.
        extra: of the user's: numbers, text, lists, dicts, small tensors. In processes that of rank 0.
        schedulers: of learning rates or the like: one, or several in an order; each with ``state_dict``.
        data: what knows the position in the data: with ``state_dict``, each rank's own.
        integrated_save: whole tensors in ``model.safetensors`` under their own names, as plain PyTorch or Hugging Face
            reads them, and ``optimizer.safetensors``; else each rank's part in a file of its own, in the format of
            torch.distributed.checkpoint.
        keep_checkpoint_max: so many are kept: once this one is whole those of the lowest steps are removed. None: all.
        asynchronous: copy the model's tensors and return; a thread copies the optimizer's state, for which the next
            step of any optimizer waits, and writes. That state is to be changed by steps alone until then: what torch
            counts as a change is an error of the save, a write through ``.data`` is not seen. The next save waits, and
            so does the interpreter's end.

    Returns:
        The save; its ``wait()`` returns the checkpoint's folder, and raises what went wrong in the background.

    Raises:
        CheckpointError: a folder that cannot be written, a step below 0, what cannot be saved; of an earlier save in
            the
            background: what went wrong with it.
    """
    ranks = ranks_of_now()
    job: SaveJob | None = None
    copies: HostCopies | None = None
    error = last_error()
    if error is None:
        try:
            _check(path, step, keep_checkpoint_max)
            job, state = _collected(
                CheckpointedModel(model, ranks),
                optimizer,
                Path(path),
                step,
                bool(integrated_save),
                keep_checkpoint_max,
                extra,
                several(schedulers),
                data,
            )
            if asynchronous:
                copies = HostCopies(
                    job.written, state if optimizer is not None and says_when_it_steps(optimizer) else {}
                )
                job.written = copies.written
        except Exception as raised:  # whatever it is, the others have to hear of it
            error = located(raised, path)
    try:
        said = ranks.agreed(error, None if job is None else job.said)
        job.settle(said)
    except Exception:
        if job is not None:
            job.give_up()
        raise
    saving = BackgroundSave(step, job.path / folders.name_of(step))
    if asynchronous:
        begun(saving, partial(_complete, copies, job))
        before_next_step(copies.help)
    else:
        job.write()
    return saving


def _complete(copies: HostCopies, job: SaveJob) -> None:
    """What is done in the background."""
    try:
        copies.complete()
    except Exception as raised:  # the others write already, and hear of it there
        job.failed = located(raised, job.path)
    job.write()


def several(given: Any) -> list[Any]:
    """One thing with a state, or several, as a list."""
    return [given] if hasattr(given, "state_dict") else list(given or ())


def _check(path: Any, step: Any, keep: Any) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise CheckpointError(f"path={path!r}", source="save_checkpoint", legal="the folder of a run's checkpoints")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CheckpointError(f"step={step!r}", source=str(path), legal="a whole number from 0")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise CheckpointError(
            f"keep_checkpoint_max={keep!r}", source=str(path), legal="a whole number from 1, or None for all"
        )


def _collected(
    subject: CheckpointedModel,
    optimizer: torch.optim.Optimizer | None,
    path: Path,
    step: int,
    whole: bool,
    keep: int | None,
    extra: Any,
    schedulers: Sequence[Any],
    data: Any,
) -> tuple[SaveJob, dict[str, Tensor]]:
    """What this rank has to save, and by name what of it is of the optimizer's state; on rank 0 a folder to write it
    into.

    Raises:
        CheckpointError: what cannot be saved.
        OSError: the folder cannot be made.
    """
    ranks = subject.ranks
    if subject.unborn is not None:
        raise CheckpointError(
            f"{subject.unborn.partition('.')[2]!r} has no values yet",
            source=str(path),
            legal="a save after the first call of the model, which gives them",
        )
    if subject.wrapper is not None and subject.wrapper._awaited:
        raise CheckpointError(
            "the model waits for its first call to take the values that were loaded",
            source=str(path),
            legal="a save after the first call of the model",
        )

    def words(value: Any, what: str) -> Any:
        try:
            return encode(value, what)
        except TypeError as error:
            raise CheckpointError(
                f"{error}, which cannot be saved",
                source=str(path),
                legal="numbers, text, lists, tuples, dicts, sets, bytes, tensors, arrays",
            ) from None

    held: list[LocalTensor] = list(subject.held())
    others: dict[str, dict[str, Any]] = {}
    state: dict[str, Any] = {"step": step, "extra": words(extra, "extra"), "optimizer": None}
    if optimizer is not None:
        more, others = optimizer_state(subject, optimizer)
        held += more
        names = state_names(subject, optimizer)
        state["optimizer"] = {
            "kind": type(optimizer).__name__,
            "groups": [
                {
                    "parameters": [names[id(p)] for p in group["params"]],
                    "settings": words({k: v for k, v in group.items() if k != "params"}, "the optimizer's settings"),
                }
                for group in optimizer.param_groups
            ],
        }
    state["schedulers"] = [
        {"kind": type(s).__name__, "state": words(s.state_dict(), type(s).__name__)} for s in schedulers
    ]
    state["modules"] = {name: words(module.get_extra_state(), name) for name, module in subject.extra.items()}
    state["tied"] = subject.aliases
    position = None if data is None else {"state": words(data.state_dict(), type(data).__name__)}
    texts, config = {}, getattr(subject.net, "config", None)
    if whole and hasattr(subject.net, "save_pretrained") and hasattr(config, "to_json_string"):
        texts[CONFIG] = config.to_json_string().encode()  # with it Hugging Face reads the folder
    written = written_here(held, ranks.rank)
    said: dict[str, Any] = {
        "step": step,
        "integrated_save": whole,
        "tensors": described_here(held, written),
        "scalars": words(others, "the optimizer's state"),
    }
    if whole and ranks.remote(ranks.rank):
        said["boxes"] = [(w.name, w.starts, tuple(w.tensor.shape), w.tensor.dtype) for w in written]
    if ranks.rank == 0:
        said["id"] = new_id()
        folders.begin(path, step, said["id"])
    job = SaveJob(
        ranks,
        path,
        step,
        whole,
        keep,
        list(subject.tensors),
        subject.aliases,
        subject.plan,
        written,
        said,
        generators(),
        position,
        state,
        texts,
    )
    return job, {h.name: h.state for h in held if h.state is not None}
