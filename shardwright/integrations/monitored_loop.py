"""Shared by the training loops of other libraries: the check of the batches that they give to processes, and a
`Monitor` that they drive.

    loss        of a step: the sum of its micro-batches' losses, which the libraries divide by their number
    samples     rows of ``input_ids``, or else of the first tensor of a batch
    tokens      elements of ``input_ids``, padding too

Where each process is fed its own part of a batch, samples and tokens are those of rank 0 times the number of processes.
A step ends when the library's count of steps grows.

Example: 2 micro-batches with the losses 0.4 and 0.6, which the library has divided by 2, are a step with the loss 1.0.
A batch with ``input_ids`` [8, 128] on rank 0 of 4 processes counts as 32 samples and 4,096 tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import SupportsFloat, TextIO

import torch
from torch import Tensor, nn

from ..monitor import MetricRun, Monitor, ScalarWriter
from ..parallel.auto_parallel import AutoParallel
from ..torch_private import pytree

__all__ = ["MonitoredLoop", "check_feeding"]


def check_feeding(model: AutoParallel, library: str) -> None:
    """Check that all ranks of a pipeline's stages are fed the same batch.

    The check runs now, and again when a call of the model is planned, because settings may still change until then.

    Args:
        model: the parallel model.
        library: the library's name, for errors.

    Raises:
        SettingError: each process is handed its own part of a batch, so that the stages would get different ones.
    """
    wrapper = library, model.settings.dataset_strategy
    model._check_wrapper(wrapper)
    model._wrapper = wrapper


class MonitoredLoop:
    """A `Monitor`, driven by the calls of a library.

    Args:
        every, tensorboard, wandb, out: see `Monitor`.
    """

    def __init__(
        self,
        every: int = 10,
        tensorboard: str | Path | ScalarWriter | None = None,
        *,
        wandb: bool | Mapping[str, object] | MetricRun | None = None,
        out: TextIO | None = None,
    ) -> None:
        self._monitor_of = partial(Monitor, every=every, tensorboard=tensorboard, wandb=wandb, out=out)
        self._monitor: Monitor | None = None
        self._loss: Tensor | None = None
        self._counts: Counter[str] = Counter()
        self._parts, self._steps = 1, 0

    def _begin(self, model: nn.Module | None, processes: int, steps: int) -> None:
        """Begin a training.

        Args:
            model: the model; None: not known.
            processes: their number.
            steps: the number of steps done before.
        """
        self._close()
        whole = isinstance(model, AutoParallel) and model.settings.dataset_strategy == "full_batch"
        self._parts, self._steps = 1 if whole else processes, steps
        self._loss, self._counts = None, Counter()
        self._monitor = self._monitor_of(model)

    def note(self, batch: object, loss: Tensor | SupportsFloat | None) -> None:
        """Note a micro-batch: what was fed, and its part of the step's loss."""
        if self._monitor is None:
            return
        self._counts.update({noun: count * self._parts for noun, count in _counted(batch).items()})
        if loss is not None:
            part = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss))
            self._loss = part if self._loss is None else self._loss + part

    def _done(self, steps: int) -> None:
        """End the micro-batch, and the step if `steps`, the number of steps done, is larger than before."""
        if self._monitor is not None and steps > self._steps:
            self._monitor.step(
                self._loss, steps - 1, samples=self._counts.get("samples"), tokens=self._counts.get("tokens")
            )
            self._loss, self._counts, self._steps = None, Counter(), steps

    def _leave_out(self, began: float | None = None) -> None:
        if self._monitor is not None:
            self._monitor.leave_out(began)

    def _close(self, failed: bool = False) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.close(failed)


def _counted(batch: object) -> dict[str, int]:
    """The numbers of samples and tokens of a batch, where they are known."""
    tokens = batch.get("input_ids") if hasattr(batch, "get") else None
    if isinstance(tokens, Tensor) and tokens.dim():
        return {"samples": len(tokens), "tokens": tokens.numel()}
    first = next((x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.dim()), None)
    return {} if first is None else {"samples": len(first)}
