"""`save_checkpoint`: a run's state, written whole or not at all.

    every rank   what it has ─ copy ─ agree ─┆─ copy the rest ─ its boxes ─ agree ─ digests, to the disk ─ agree ────── agree
    rank 0       make .part                  ┆                                                      manifest, rename, prune

With ``asynchronous=True`` what is right of the dotted line (`writing`) happens in a thread, over a process group of its own;
without there are no copies. What may change at any time is copied in the call: parameters, buffers, what the user gives. The
state of an optimizer changes in its steps alone, the next of which waits until the thread has copied it, and helps.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..runtime.optimizers import before_next_step, says_when_it_steps
from . import folders
from .background import Saving, begun, last_error
from .boxes import described_here, written_here
from .copies import Copies
from .generators import generators
from .manifest import new_id
from .ranks import ranks_of_now
from .state import Held, Subject, optimizer_state, state_names
from .words import to_words
from .writing import CONFIG, Job, located

__all__ = ["save_checkpoint", "several"]


def save_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, path: str | Path | None = None, *,
                    step: int, extra: Any = None, schedulers: Any = (), data: Any = None, integrated_save: bool = True,
                    keep_checkpoint_max: int | None = 5, asynchronous: bool = False) -> Saving:
    """Save what a run needs to go on, as ``path/step-00000100``. On processes every rank calls it, with the same `step`.

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
        integrated_save: whole tensors in ``model.safetensors`` under their own names, as plain PyTorch or Hugging Face reads
            them, and ``optimizer.safetensors``; else each rank's part in a file of its own, in the format of
            torch.distributed.checkpoint.
        keep_checkpoint_max: so many are kept: once this one is whole those of the lowest steps are removed. None: all.
        asynchronous: copy the model's tensors and return; a thread copies the optimizer's state, for which the next step of any
            optimizer waits, and writes. That state is to be changed by steps alone until then: what torch counts as a change is
            an error of the save, a write through ``.data`` is not seen. The next save waits, and so does the interpreter's end.

    Returns:
        The save; its ``wait()`` returns the checkpoint's folder, and raises what went wrong in the background.

    Raises:
        CheckpointError: a folder that cannot be written, a step below 0, what cannot be saved; of an earlier save in the
            background: what went wrong with it.
    """
    ranks = ranks_of_now()
    job: Job | None = None
    copies: Copies | None = None
    error = last_error()
    if error is None:
        try:
            _check(path, step, keep_checkpoint_max)
            job, state = _collected(Subject(model, ranks), optimizer, Path(path), step, bool(integrated_save),
                                    keep_checkpoint_max, extra, several(schedulers), data)
            if asynchronous:
                copies = Copies(job.written, state if optimizer is not None and says_when_it_steps(optimizer) else {})
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
    saving = Saving(step, job.path / folders.name_of(step))
    if asynchronous:
        begun(saving, partial(_complete, copies, job))
        before_next_step(copies.help)
    else:
        job.write()
    return saving


def _complete(copies: Copies, job: Job) -> None:
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
        raise CheckpointError(f"keep_checkpoint_max={keep!r}", source=str(path), legal="a whole number from 1, or None for all")


def _collected(subject: Subject, optimizer: torch.optim.Optimizer | None, path: Path, step: int, whole: bool, keep: int | None,
               extra: Any, schedulers: Sequence[Any], data: Any) -> tuple[Job, dict[str, Tensor]]:
    """What this rank has to save, and by name what of it is of the optimizer's state; on rank 0 a folder to write it into.

    Raises:
        CheckpointError: what cannot be saved.
        OSError: the folder cannot be made.
    """
    ranks = subject.ranks
    if subject.unborn is not None:
        raise CheckpointError(f"{subject.unborn.partition('.')[2]!r} has no values yet", source=str(path),
                              legal="a save after the first call of the model, which gives them")
    if subject.wrapper is not None and subject.wrapper._awaited:
        raise CheckpointError("the model waits for its first call to take the values that were loaded", source=str(path),
                              legal="a save after the first call of the model")

    def words(value: Any, what: str) -> Any:
        try:
            return to_words(value, what)
        except TypeError as error:
            raise CheckpointError(f"{error}, which cannot be saved", source=str(path),
                                  legal="numbers, text, lists, tuples, dicts, sets, bytes, tensors, arrays") from None

    held: list[Held] = list(subject.held())
    others: dict[str, dict[str, Any]] = {}
    state: dict[str, Any] = {"step": step, "extra": words(extra, "extra"), "optimizer": None}
    if optimizer is not None:
        more, others = optimizer_state(subject, optimizer)
        held += more
        names = state_names(subject, optimizer)
        state["optimizer"] = {"kind": type(optimizer).__name__, "groups": [
            {"parameters": [names[id(p)] for p in group["params"]],
             "settings": words({k: v for k, v in group.items() if k != "params"}, "the optimizer's settings")}
            for group in optimizer.param_groups]}
    state["schedulers"] = [{"kind": type(s).__name__, "state": words(s.state_dict(), type(s).__name__)} for s in schedulers]
    state["modules"] = {name: words(module.get_extra_state(), name) for name, module in subject.extra.items()}
    state["tied"] = subject.aliases
    position = None if data is None else {"state": words(data.state_dict(), type(data).__name__)}
    texts, config = {}, getattr(subject.net, "config", None)
    if whole and hasattr(subject.net, "save_pretrained") and hasattr(config, "to_json_string"):
        texts[CONFIG] = config.to_json_string().encode()  # with it Hugging Face reads the folder
    written = written_here(held, ranks.rank)
    said: dict[str, Any] = {"step": step, "integrated_save": whole, "tensors": described_here(held, written),
                            "scalars": words(others, "the optimizer's state")}
    if whole and ranks.remote(ranks.rank):
        said["boxes"] = [(w.name, w.starts, tuple(w.tensor.shape), w.tensor.dtype) for w in written]
    if ranks.rank == 0:
        said["id"] = new_id()
        folders.begin(path, step, said["id"])
    job = Job(ranks, path, step, whole, keep, list(subject.tensors), subject.aliases, subject.plan, written, said,
              generators(), position, state, texts)
    return job, {h.name: h.state for h in held if h.state is not None}
