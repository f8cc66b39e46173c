"""Saving checkpoints from a training loop: every N steps, every M minutes, or at SIGTERM.

Minutes are measured on rank 0. Ranks ask rank 0 rarely: from the time that steps have taken, they compute the
earliest step at which the time can have come, and ask after half of that many steps. Most steps therefore send
nothing. Example: 8 minutes are left and a step takes 1 s, so the next question comes after 240 steps.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..errors import SettingError
from ..runtime.distributed.coordination import SingleRank, ranks_of_now
from ..runtime.distributed.watch.ending import Ending
from .save import BackgroundSave, save_checkpoint

__all__ = ["CheckpointCallback", "CheckpointConfig"]


@dataclass(frozen=True)
class CheckpointConfig:
    """The times and the form of checkpoints.

    Attributes:
        path: the folder of the run's checkpoints.
        every_n_steps: save after each step whose number is a multiple of it.
        every_n_minutes: save once so many minutes have passed since the last save, or since the start.
        keep_checkpoint_max, integrated_save, asynchronous: see `save_checkpoint`.
        on_sigterm: on SIGTERM to any rank, save at the end of the current step and end all ranks with exit code 143.

    Raises:
        SettingError: neither steps nor minutes are given, or a number is invalid.

    Example:
        >>> sw.CheckpointConfig("runs/7", every_n_steps=100, every_n_minutes=30).every_n_steps
        100
    """

    path: str | Path
    every_n_steps: int | None = None
    every_n_minutes: float | None = None
    keep_checkpoint_max: int | None = 5
    integrated_save: bool = True
    asynchronous: bool = False
    on_sigterm: bool = True

    def __post_init__(self) -> None:
        steps, minutes = self.every_n_steps, self.every_n_minutes
        if not isinstance(self.path, (str, os.PathLike)):
            raise SettingError(f"CheckpointConfig: path={self.path!r}", legal="the folder of a run's checkpoints")
        if steps is None and minutes is None:
            raise SettingError(
                "CheckpointConfig: neither every_n_steps nor every_n_minutes", legal="one of them, or both"
            )
        if os.path.isfile(self.path):
            raise SettingError(
                f"CheckpointConfig: path={str(self.path)!r} is a file", legal="the folder of the run's checkpoints"
            )
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise SettingError(f"CheckpointConfig: every_n_steps={steps!r}", legal="a whole number from 1")
        if minutes is not None and (
            isinstance(minutes, bool) or not isinstance(minutes, (int, float)) or not minutes > 0
        ):
            raise SettingError(f"CheckpointConfig: every_n_minutes={minutes!r}", legal="a number above 0")


class CheckpointCallback:
    """Saves checkpoints from a loop::

        callback = sw.CheckpointCallback(sw.CheckpointConfig("runs/7", every_n_steps=100), model, optimizer)
        for step in range(first, last + 1):
            ...
            callback.step(step)
        callback.wait()

    Args:
        config: the times and the form of the checkpoints.
        model, optimizer, schedulers, data: see `save_checkpoint`.

    Example:
        >>> config = sw.CheckpointConfig("runs/9", every_n_steps=2)
        >>> callback = sw.CheckpointCallback(config, model, optimizer)
        >>> for step in range(1, 4):
        ...     loss = model(x, y)
        ...     saving = callback.step(step)  # None where nothing is saved
        >>> callback.wait()
        >>> sw.latest_checkpoint("runs/9").name
        'step-00000002'
    """

    def __init__(
        self,
        config: CheckpointConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        schedulers: object = (),
        data: object = None,
    ) -> None:
        if not isinstance(config, CheckpointConfig):
            raise SettingError(f"CheckpointCallback({config!r})", legal='a CheckpointConfig("path", every_n_steps=100)')
        self.config, self.model, self.optimizer = config, model, optimizer
        self.schedulers, self.data = schedulers, data
        self.last: BackgroundSave | None = None
        self._clock: _Clock | None = None
        self._began = time.monotonic()
        self._ending: Ending | None = None

    def step(self, step: int, extra: object = None) -> BackgroundSave | None:
        """Save if a save is due. With several processes every rank calls it, after each step.

        Args:
            step: the number of steps done.
            extra: see `save_checkpoint`.

        Returns:
            The save, or None.

        Raises:
            CheckpointError: see `save_checkpoint`.
            SystemExit: the run was asked to end, and this step is saved.
        """
        if self.config.on_sigterm and self._ending is None and threading.current_thread() is threading.main_thread():
            self._ending = Ending()
            weakref.finalize(self, self._ending.close)
        ends = self._ending is not None and self._ending.due(step)
        saving = self._if_due(step, extra, ends)
        if ends and self._ending is not None:
            self.wait()
            self._ending.leave()
        return saving

    def _if_due(self, step: int, extra: object, ends: bool) -> BackgroundSave | None:
        every = self.config.every_n_steps
        due = every is not None and step > 0 and step % every == 0
        if self.config.every_n_minutes is not None:
            if self._clock is None:
                self._clock = _Clock(60 * self.config.every_n_minutes, ranks_of_now("clock"), self._began)
            due |= self._clock.due()
        if not (due or ends) or (self.last is not None and self.last.step == step):
            return None
        return self.save(step, extra)

    def save(self, step: int, extra: object = None) -> BackgroundSave:
        """Save now, whatever the config's times are.

        Args:
            step: the number of steps done.
            extra: see `save_checkpoint`.

        Returns:
            The save; ``wait()`` returns when it is on the disk.

        Raises:
            CheckpointError: see `save_checkpoint`.
        """
        config = self.config
        self.last = save_checkpoint(
            self.model,
            self.optimizer,
            config.path,
            step=step,
            extra=extra,
            schedulers=self.schedulers,
            data=self.data,
            integrated_save=config.integrated_save,
            keep_checkpoint_max=config.keep_checkpoint_max,
            asynchronous=config.asynchronous,
        )
        if self._clock is not None:
            self._clock.restart()
        return self.last

    def wait(self) -> None:
        """Wait for the last save.

        Raises:
            CheckpointError: the last save failed.
        """
        if self.last is not None:
            self.last.wait()


class _Clock:
    """A clock that tells all ranks alike whether a time has passed on rank 0."""

    def __init__(self, seconds: float, ranks: SingleRank, began: float) -> None:
        self.seconds, self.ranks = seconds, ranks
        self._began = self._asked = began
        self._left = self._steps = 1  # steps until the next question; steps between the last question and it

    def due(self) -> bool:
        """True where the time has passed; called after each step."""
        self._left -= 1
        if self._left:
            return False
        now = time.monotonic()
        rest = self.seconds - (now - self._began)
        a_step = max((now - self._asked) / self._steps, 1e-9)
        self._asked = now
        due, self._steps = self.ranks.from_first((rest <= 0, max(1, min(int(rest / a_step / 2), 1 << 20))))
        self._left = self._steps
        return due

    def restart(self) -> None:
        """Restart the clock; called on all ranks after the same step."""
        self._began = time.monotonic()
        self._left = self._steps = 1
        self._asked = self._began
