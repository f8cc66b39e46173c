"""Saving checkpoints from a training loop: every N steps, every M minutes, or at SIGTERM, which ends all ranks
together.

1. `CheckpointCallback`. Minutes are measured on rank 0. Ranks ask rank 0 rarely: from the time that steps have taken,
   they compute the earliest step at which the time can have come, and ask after half of that many steps. Most steps
   therefore send nothing. Example: 8 minutes are left and a step takes 1 s, so the next question comes after 240 steps.

2. `Ending`: a signal on any rank ends all ranks at the end of the same step, once the step's work is saved.

       a signal            is noted; the rank's thread writes it to the store and raises the alarm
       the alarm           each rank's thread stores the step at whose end its rank comes next, e_r; from then on that
                           rank asks at the end of every step
       at the end of e_r   wait until all ranks have stored theirs; the run ends at the end of step max e_r

   No rank waits for ever: e_r is stored by a thread, whatever its rank is doing, so all are stored within a look. A
   rank that waits at the end of e_r has sent all that others need of it up to there; then it goes on to the last of
   the steps, max e_r. Example: ranks that are in steps 7, 8 and 7 end after step 8. No step sends or asks anything
   while no signal has come.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from ..errors import SettingError
from ..process_runtime import current
from ..runtime.distributed.rank_messages import SingleRank, ranks_of_now
from ..runtime.distributed.rank_positions import WaitPoint, waiting
from ..runtime.distributed.watchdog import Peers, peers
from .save import BackgroundSave, save_checkpoint

__all__ = ["ENDED", "CheckpointCallback", "CheckpointConfig", "Ending"]

# -- the end of all ranks on request


#: The exit code of a process that saved and ended because of SIGTERM: 128 + 15, as a shell counts.
ENDED = 128 + signal.SIGTERM


class Ending:
    """Notes the signals that ask this process to end, from its construction on. The main thread of every rank
    constructs it.

        ending = Ending()
        for step in ...:
            ...
            if ending.due(step):        # on all ranks at the same step
                save(); ending.leave()

    A second signal of the kind ends the process at once, as it would have without.

    Args:
        signals: the signals that ask for the end.
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM,)) -> None:
        self._ends = 0  # the step that ends next, as far as known
        self._lock = threading.Lock()  # guards what both threads use
        self._requested = False  # True once the other ranks know that step
        self._asked: int | None = None  # the signal
        self._last: int | None = None  # the step at whose end the run ends
        self._looked = False
        self._ranks: Peers | None = None
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
        for number in signals:
            self._before[number] = signal.signal(number, self._note)
        self._attach()

    @property
    def asked(self) -> bool:
        """True where this rank was sent a signal."""
        return self._asked is not None

    def close(self) -> None:
        """Restore the signals' former handlers."""
        for number, handler in self._before.items():
            with contextlib.suppress(ValueError):  # called by another thread's garbage collection: not restored
                signal.signal(number, handler)
        self._before.clear()
        if self._ranks is not None:
            self._ranks.listeners.remove(self._tell)
            self._ranks.looks.remove(self._look)
            self._ranks = None

    def due(self, step: int) -> bool:
        """True where the run ends at the end of this step, on all ranks alike.

        Args:
            step: its number, which grows by one each time.

        Raises:
            StuckError: other ranks do not store their step.
        """
        self._attach()
        if self._ranks is None:
            return self._any_asked()
        with self._lock:
            requested, self._ends = self._requested, step + 1
        if not requested:
            return False
        if self._last is None:
            self._last = self._decided(self._ranks)
        return step >= self._last

    def leave(self) -> NoReturn:
        """End this process with exit code 143."""
        self.close()
        raise SystemExit(ENDED)

    def _any_asked(self) -> bool:
        """True where any rank was sent a signal: without `Peers`, several ranks ask one another at every step."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return self._asked is not None
        asked = torch.tensor(self._asked is not None, dtype=torch.int32, device=current().device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked)

    def _attach(self) -> None:
        """Connect to the other ranks, as soon as there are any."""
        if self._ranks is None:
            self._ranks = peers()
            if self._ranks is not None:
                self._ranks.listeners.append(self._tell)
                self._ranks.looks.append(self._look)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked is not None:
            self.close()
            signal.raise_signal(number)
            return
        self._asked = number

    # -- on the thread that watches --

    def _look(self, store: dist.Store) -> None:
        """Raise the alarm where a signal has come to this rank."""
        if not self._looked:  # an alarm may be older than this listener
            self._looked = True
            self._tell(store)
        if self._asked is not None and not self._requested and self._ranks is not None:
            store.set("ending", "1")
            self._ranks.raise_alarm(store)

    def _tell(self, store: dist.Store) -> None:
        """Answer an alarm that concerns the end of the run: store this rank's next step."""
        if self._requested or not store.check(["ending"]):
            return
        assert self._ranks is not None
        with self._lock:
            ends, self._requested = self._ends, True
        store.set(f"ending/{self._ranks.rank}", str(ends))
        if store.add("ending/told", 1) == self._ranks.world:
            all_ends = store.multi_get([f"ending/{rank}" for rank in range(self._ranks.world)])
            store.set("ending/last", str(max(map(int, all_ends))))

    # -- on the main thread --

    def _decided(self, ranks: Peers) -> int:
        with waiting(WaitPoint("the end of the run, as a signal asks", key="ending")):
            ranks.wait("ending/last")
        return int(ranks.store.get("ending/last"))


# -- the times of checkpoints


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
        self._steps_to_go = self._steps = 1  # steps until the next question; steps between the last question and it

    def due(self) -> bool:
        """True where the time has passed; called after each step."""
        self._steps_to_go -= 1
        if self._steps_to_go:
            return False
        now = time.monotonic()
        rest = self.seconds - (now - self._began)
        a_step = max((now - self._asked) / self._steps, 1e-9)
        self._asked = now
        due, self._steps = self.ranks.from_first((rest <= 0, max(1, min(int(rest / a_step / 2), 1 << 20))))
        self._steps_to_go = self._steps
        return due

    def restart(self) -> None:
        """Restart the clock; called on all ranks after the same step."""
        self._began = time.monotonic()
        self._steps_to_go = self._steps = 1
        self._asked = self._began
