"""The end of all ranks on request: a signal on any rank ends all ranks at the end of the same step, once the step's
work is saved.

    a signal            is noted; the rank's thread writes it to the store and raises the alarm
    the alarm           each rank's thread stores the step at whose end its rank comes next, e_r; from then on that
                        rank asks at the end of every step
    at the end of e_r   wait until all ranks have stored theirs; the run ends at the end of step max e_r

No rank waits for ever: e_r is stored by a thread, whatever its rank is doing, so all are stored within a look. A rank
that waits at the end of e_r has sent all that others need of it up to there; then it goes on to the last of the
steps, max e_r. Example: ranks that are in steps 7, 8 and 7 end after step 8. No step sends or asks anything while no
signal has come.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ....process import current
from .rank_positions import WaitPoint, waiting
from .watchdog import Peers, peers

__all__ = ["ENDED", "Ending"]

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
        self._before: dict[signal.Signals, Any] = {}
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

    def _look(self, store: Any) -> None:
        """Raise the alarm where a signal has come to this rank."""
        if not self._looked:  # an alarm may be older than this listener
            self._looked = True
            self._tell(store)
        if self._asked is not None and not self._requested and self._ranks is not None:
            store.set("ending", "1")
            self._ranks.raise_alarm(store)

    def _tell(self, store: Any) -> None:
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
