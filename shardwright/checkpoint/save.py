"""`save_checkpoint`: the state of a run, written whole or not at all.

    every rank   collect ─ copy ─ agree ─┆─ copy the rest ─ boxes ─ agree ─ digests, fsync ─ agree ────────── agree
    rank 0       make .part              ┆                                               manifest, rename, prune

With ``asynchronous=True`` everything right of the dotted line (module `writer`) runs in a thread, over a process
group of its own. Without it, nothing is copied.

A save in the background (`BackgroundSave`): at most one per process is under way. It writes copies in host memory
(`HostCopies`). Values that may change at any time (parameters, buffers, the user's values) are copied in the call.
An optimizer's state changes only in optimizer steps: the thread copies it after the call has returned, and the next
step helps with the copies and waits until they are complete.

From an accelerator nothing waits on the host. Copies go to pinned memory, which is kept from save to save, on a stream
of their own; events order them:

    compute   ... step ─┐           ┌─ forward, backward ... ─┐       ┌─ the optimizer's next step
    copies              └─ values ─ e1 ── optimizer's state ─ e2 ─────┘
    thread                                                     └─ boxes, digests, files
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
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ..accelerators import current_stream, event, host_memory, is_accelerator, side_stream, within
from ..errors import CheckpointError
from ..json_files.json_reader import JsonObject
from ..json_files.json_values import encode
from ..launch.progress import Work
from ..runtime.distributed.rank_messages import ranks_of_now
from ..runtime.optimizer_guard import before_next_step, says_when_it_steps
from ..torch_private import version_of
from . import checkpoint_folders as folders
from .manifest import new_id
from .run_state import CheckpointedModel, LocalTensor, Resumable, generators, optimizer_state, state_names
from .tensor_files import WrittenBox, descriptions_of, written_boxes
from .writer import CONFIG, SaveJob, located

__all__ = ["BackgroundSave", "HostCopies", "begun", "last_error", "save_checkpoint", "several", "wait_for_last"]


# -- a save in the background --

#: Added to the nice value of a save's thread: it gets a tenth of the processor where the training wants it too.
_NICE = 10


class BackgroundSave:
    """A save, under way or ended.

    Attributes:
        step: the step of the run.
        path: the checkpoint's folder; it exists once the save is done.
    """

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """True once the save has ended, successfully or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is written.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: the checkpoint could not be written. Raised on every rank alike, and only once.
        """
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.path

    def _join(self) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            if_stopped = "it goes on being written, and the interpreter waits for it at its end"
            with Work(f"wait for the checkpoint of step {self.step}", if_stopped=if_stopped):
                self._thread.join()

    def _run(self, work: Callable[[], None]) -> None:
        _step_back()
        self._do(work)

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # any: `wait` raises it in the thread of the user
            self._error = error


#: The save under way in this process; empty where there is none.
_last: list[BackgroundSave] = []


def begun(saving: BackgroundSave, work: Callable[[], None]) -> None:
    """Run the work of a save in a thread.

    The interpreter waits for the thread at its end. The work runs at once, in the caller, where no thread can start.
    """
    thread = threading.Thread(target=saving._run, args=(work,), name=f"checkpoint of step {saving.step}")
    _last[:] = [saving]
    try:
        thread.start()
        saving._thread = thread
    except RuntimeError:  # thread limit reached, or the interpreter is ending; the other ranks are already writing
        saving._do(work)


def last_error() -> Exception | None:
    """Wait for the save under way and return its error.

    Returns:
        The error, once; None where the save succeeded or `BackgroundSave.wait` has raised it already.
    """
    if not _last:
        return None
    saving = _last.pop()
    saving._join()
    error, saving._error = saving._error, None
    return error


def wait_for_last() -> None:
    """Wait for the save under way; its error stays to be reported."""
    if _last:
        _last[0]._join()


def _step_back() -> None:
    """Lower the priority of this thread below the training's (Linux alone: each thread has its own priority there)."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # not permitted here: the priority stays
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE))


@atexit.register
def _say_what_failed() -> None:
    """Print the error of the last save, where it has not been reported yet."""
    error = last_error()
    if error is not None:
        print(f"the checkpoint in the background was not written: {error}", file=sys.stderr)


# -- copies in host memory --

#: Host memory of this process's latest copies, by tensor name and start of the box.
_copies: dict[tuple[str, tuple[int, ...]], Tensor] = {}


class HostCopies:
    """Copies in host memory of the boxes that a save writes.

    The memory of the previous save is reused where shape and dtype fit: fresh memory takes several times as long.
    Optimizer state is copied by `complete`, in the save's thread, before the optimizer's next step; from an
    accelerator by the device itself, beside its computation.

    Args:
        given: the boxes that the save writes.
        later: the tensors of an optimizer's state, by name, as the optimizer holds them.

    Attributes:
        written: the same boxes, of the copies.
    """

    def __init__(self, boxes: Iterable[WrittenBox], later: Mapping[str, Tensor]) -> None:
        self.written: list[WrittenBox] = []
        self._later: deque[_Later] = deque()
        queued: dict[torch.device, tuple[list[_Later], list[_Later]]] = {}
        known = dict(_copies)
        _copies.clear()
        for name, starts, tensor in boxes:
            copy = known.get((name, starts))
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = host_memory(tensor)
            _copies[name, starts] = copy
            self.written.append(WrittenBox(name, starts, copy))
            both = tensor, later.get(name, tensor)
            counted = name in later and not any(t.is_inference() for t in both)
            one = _Later(name, copy, both, _versions(both) if counted else [])
            if is_accelerator(tensor.device):
                queued.setdefault(tensor.device, ([], []))[counted].append(one)
            elif counted:
                self._later.append(one)
            else:
                copy.copy_(tensor)
        self._unfinished, self._lock, self._all = len(self._later), threading.Lock(), threading.Event()
        self._error: Exception | None = None
        self._queued = [made for device, (now, then) in queued.items() if (made := _queue(device, now, then))]

    def complete(self) -> None:
        """Make all copies that are still to be made, and wait for those of an accelerator.

        Raises:
            CheckpointError: a tensor was changed since the call by something other than an optimizer's step.
        """
        self._make()
        for queue in self._queued:
            queue.ended.synchronize()
        self._check_queued()
        self._queued.clear()  # and with it the tensors
        if self._error is not None:
            raise self._error

    def help(self) -> None:
        """Make the copies that no thread has begun, and wait for the others; called before an optimizer's next step.

        An accelerator's next operators wait for its copies; the host does not.
        """
        self._make()
        self._check_queued()
        for queue in list(self._queued):
            current_stream(queue.device).wait_event(queue.ended)

    def _make(self) -> None:
        while self._later:
            try:
                one = self._later.popleft()
            except IndexError:  # another thread took the last one
                break
            try:
                one.copy.copy_(one.seen[0])
                one.check()
            except Exception as error:  # fails the save, not the optimizer step that helps
                self._error = self._error or error
            with self._lock:
                self._unfinished -= 1
        if self._unfinished:
            self._all.wait()
        self._all.set()

    def _check_queued(self) -> None:
        """Check, once, that nothing has changed the tensors since they were queued."""
        with self._lock:
            due = [one for queue in self._queued for one in queue.due]
            for queue in self._queued:
                queue.due.clear()
            for one in due:
                try:
                    one.check()
                except CheckpointError as error:
                    self._error = self._error or error


class _Later(NamedTuple):
    """A copy to be made of ``seen[0]``; valid only while all tensors of `seen` keep their version counters."""

    name: str
    copy: Tensor
    seen: tuple[Tensor, Tensor]
    versions: list[int]

    def check(self) -> None:
        """Raise a CheckpointError where a tensor was changed."""
        if self.versions and _versions(self.seen) != self.versions:
            raise CheckpointError(
                "it was changed while it was copied for the checkpoint in the background",
                source=self.name,
                legal="changes by the optimizer's step(), which waits for the copy, or after the save's wait()",
            )


class _Queue(NamedTuple):
    """Copies that an accelerator makes beside its computation.

    Attributes:
        ended: the event behind the last one.
        due: those whose tensors are to be checked for changes.
        tensors: the tensors, which stay until the copies have ended.
    """

    device: torch.device
    ended: torch.Event
    due: list[_Later]
    tensors: list[Tensor]


def _queue(device: torch.device, now: list[_Later], then: list[_Later]) -> _Queue | None:
    """Queue copies from an accelerator on a stream of their own.

    Args:
        device: the accelerator.
        now: copies of values that may change at any time: operators that are queued from now on wait for them.
        then: copies of values that change in an optimizer's step.

    Returns:
        The queue; None where the accelerator has no streams, and all copies are made.
    """
    copies, first, last = side_stream(device), event(device), event(device)
    if copies is None or first is None:
        for one in (*now, *then):
            one.copy.copy_(one.seen[0])
        return None
    compute = current_stream(device)
    copies.wait_stream(compute)
    with within(device, copies):
        for one in now:
            one.copy.copy_(one.seen[0], non_blocking=True)
        first.record(copies)
        for one in then:
            one.copy.copy_(one.seen[0], non_blocking=True)
        last.record(copies)
    compute.wait_event(first)
    return _Queue(device, last, list(then), [one.seen[0] for one in (*now, *then)])


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    """The version counter of each tensor: its number of in-place changes."""
    return [version_of(tensor) for tensor in tensors]


def save_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    path: str | Path | None = None,
    *,
    step: int,
    extra: object = None,
    schedulers: object = (),
    data: object = None,
    integrated_save: bool = True,
    keep_checkpoint_max: int | None = 5,
    asynchronous: bool = False,
) -> BackgroundSave:
    """Save the state that a run needs to resume, as ``path/step-00000100``.

    With several processes every rank calls it, with the same `step`. The checkpoint is written under a temporary name
    and gets its own once all of it is on the disk: existing checkpoints stay intact however a save ends. Where one
    rank fails, all ranks raise its error, and there is no new checkpoint.

    Args:
        model: the `AutoParallel`, or a module.
        optimizer: the optimizer whose state and settings are saved too.
        path: the folder of the run's checkpoints; created where it does not exist. Ranks may see folders of their own
            (each host has a disk, or relative paths in different folders): whole files lie in that of rank 0, and
            parts in those of their ranks, each of which has manifest, state and plan besides.
        step: the step of the run, from 0. An existing checkpoint of this step is replaced.
        extra: values of the user: numbers, text, lists, dicts, small tensors. With several processes, rank 0's are
            saved.
        schedulers: learning-rate schedulers or the like: one, or several in order; each with ``state_dict``.
        data: the object that holds the position in the data: with ``state_dict``, saved for each rank.
        integrated_save: True: whole tensors in ``model.safetensors`` under their own names, readable by plain PyTorch
            and Hugging Face, and ``optimizer.safetensors``. False: each rank's part in a file of its own, in the
            format of torch.distributed.checkpoint.
        keep_checkpoint_max: the number of checkpoints kept: once this one is whole, those of the lowest steps are
            removed. None: all are kept.
        asynchronous: copy the model's tensors and return. A thread copies the optimizer's state and writes the files;
            the next step of any optimizer waits for that copy. Until then only optimizer steps may change the state:
            a change that torch's version counter sees is an error of the save, a write through ``.data`` goes unseen.
            The next save waits, and so does the interpreter's end.

    Returns:
        The save; its ``wait()`` returns the checkpoint's folder and raises errors of the background.

    Raises:
        CheckpointError: the folder cannot be written, the step is below 0, a value cannot be saved, or an earlier
            save in the background failed (its error).

    Example:
        >>> saving = sw.save_checkpoint(model, optimizer, "runs/7", step=3)
        >>> sw.latest_checkpoint("runs/7").name
        'step-00000003'
    """
    ranks = ranks_of_now()
    job: SaveJob | None = None
    copies: HostCopies | None = None
    error = last_error()
    if error is None:
        try:
            _check(path, step, keep_checkpoint_max)
            assert path is not None
            job, state = _collected(
                CheckpointedModel(model, ranks),
                optimizer,
                Path(os.path.abspath(path)),  # the process may go to another folder while the save is under way
                step,
                bool(integrated_save),
                keep_checkpoint_max,
                extra,
                several(schedulers),
                cast("Resumable | None", data),
            )
            if asynchronous:
                copies = HostCopies(
                    job.written, state if optimizer is not None and says_when_it_steps(optimizer) else {}
                )
                job.written = copies.written
        except Exception as raised:  # any error must reach the other ranks
            error = located(raised, path)
    try:
        descriptions = ranks.agreed(error, None if job is None else job.description)
        assert job is not None  # agreed raises where this rank has an error
        job.settle(descriptions)
    except BaseException:  # of any kind, and Ctrl-C: raised again
        if job is not None:
            job.give_up()
        raise
    saving = BackgroundSave(step, job.path / folders.name_of(step))
    if asynchronous:
        assert copies is not None
        begun(saving, partial(_complete, copies, job))
        before_next_step(copies.help)
    else:
        job.write()
    return saving


def _complete(copies: HostCopies, job: SaveJob) -> None:
    """Complete the copies and write the checkpoint; runs in the background."""
    try:
        copies.complete()
    except Exception as raised:  # the other ranks are already writing; `write` passes it on
        job.failed = located(raised, job.path)
    job.write()


def several(objects: object) -> list[Resumable]:
    """The given object as a list: one object with a ``state_dict``, or several."""
    if hasattr(objects, "state_dict"):
        return [cast(Resumable, objects)]
    return list(cast(Iterable[Resumable], objects or ()))


def _check(path: object, step: object, keep: object) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise CheckpointError(f"path={path!r}", source="save_checkpoint", legal="the folder of a run's checkpoints")
    if os.path.isfile(path):
        raise CheckpointError("it is a file", source=str(path), legal="the folder of a run's checkpoints")
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
    extra: object,
    schedulers: Sequence[Resumable],
    data: Resumable | None,
) -> tuple[SaveJob, dict[str, Tensor]]:
    """The job of this rank, and the tensors of the optimizer's state in it by name.

    Rank 0 also makes the folder to write.

    Raises:
        CheckpointError: a value cannot be saved.
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

    def encoded(value: object, what: str) -> object:
        try:
            return encode(value, what)
        except (TypeError, RecursionError) as error:
            error = error if isinstance(error, TypeError) else TypeError(f"{what} is nested too deep")
            raise CheckpointError(
                f"{error}, which cannot be saved",
                source=str(path),
                legal="numbers, text, lists, tuples, dicts, sets, bytes, tensors, arrays",
            ) from None

    tensors: list[LocalTensor] = list(subject.local_tensors())
    scalars: dict[str, dict[str, object]] = {}
    state: dict[str, object] = {"step": step, "extra": encoded(extra, "extra"), "optimizer": None}
    if optimizer is not None:
        more, scalars = optimizer_state(subject, optimizer)
        tensors += more
        names = state_names(subject, optimizer)
        state["optimizer"] = {
            "kind": type(optimizer).__name__,
            "groups": [
                {
                    "parameters": [names[p] for p in group["params"]],
                    "settings": encoded({k: v for k, v in group.items() if k != "params"}, "the optimizer's settings"),
                }
                for group in optimizer.param_groups
            ],
        }
    state["schedulers"] = [
        {"kind": type(s).__name__, "state": encoded(s.state_dict(), type(s).__name__)} for s in schedulers
    ]
    state["modules"] = {name: encoded(module.get_extra_state(), name) for name, module in subject.extra.items()}
    state["tied"] = subject.aliases
    position = None if data is None else {"state": encoded(data.state_dict(), type(data).__name__)}
    texts, config = {}, getattr(subject.net, "config", None)
    if whole and hasattr(subject.net, "save_pretrained") and config is not None and hasattr(config, "to_json_string"):
        texts[CONFIG] = config.to_json_string().encode()  # Hugging Face needs it to read the folder
    written = written_boxes(tensors, ranks.rank)
    description: JsonObject = {
        "step": step,
        "integrated_save": whole,
        "tensors": descriptions_of(tensors, written),
        "scalars": encoded(scalars, "the optimizer's state"),
    }
    if ranks.rank == 0:
        description["id"] = new_id()
        folders.begin(path, step, description["id"], subject.net if subject.wrapper is None else subject.wrapper)
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
        description,
        generators(),
        position,
        state,
        texts,
    )
    return job, {h.name: h.state for h in tensors if h.state is not None}
