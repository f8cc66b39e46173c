"""To end when asked: a signal on any rank ends all of them at the end of the same step, once the step's work is saved.

    a signal            is noted; the rank's thread says so in the store and raises the alarm (`peers`)
    the alarm           each rank's thread says in the store at the end of which step its rank comes next, e_r, and
                        from then on that rank asks at the end of every step
    at the end of e_r   wait until all have said theirs; the run ends at the end of step max e_r

Why nobody waits for ever: e_r is said by a thread, whatever its rank is doing, so all are said within a look. A rank that
waits at the end of e_r has given all that others need of it up to there; the last of the others' steps, max e_r, it goes
on to. No step sends or asks anything while no signal has come.
"""

from __future__ import annotations

import atexit
import contextlib
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .init import current
from .peers import Peers, peers
from .position import Place, waiting

__all__ = ["ENDED", "Ending"]

#: The exit code of a process that saved and ended because of SIGTERM: 128 + 15, as a shell counts.
ENDED = 128 + signal.SIGTERM


class Ending:
    """Notes the signals that ask this process to end, from when it is made; to be made by the main thread of every rank.

        ending = Ending()
        for step in ...:
            ...
            if ending.due(step):        # on all ranks at the same step
                save(); ending.leave()

    A second signal of the kind ends the process at once, as it would have without.

    Args:
        signals: those that ask.
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM,)) -> None:
        self._ends = 0                  # the step that ends next, as far as is known
        self._lock = threading.Lock()   # of what the thread and the main thread both look at
        self._told = False              # whether the others have been told which step that is
        self._asked: int | None = None  # the signal
        self._last: int | None = None   # the step at whose end the run ends
        self._looked = False
        self._ranks: Peers | None = None
        self._before: dict[signal.Signals, Any] = {}
        for number in signals:
            self._before[number] = signal.signal(number, self._note)
        self._attach()

    @property
    def asked(self) -> bool:
        """Whether this rank was sent a signal."""
        return self._asked is not None

    def close(self) -> None:
        """Let signals do what they did before."""
        for number, handler in self._before.items():
            with contextlib.suppress(ValueError):  # another thread's garbage collection calls it: then they stay noted
                signal.signal(number, handler)
        self._before.clear()
        if self._ranks is not None:
            self._ranks.listeners.remove(self._tell)
            self._ranks.looks.remove(self._look)
            self._ranks = None

    def due(self, step: int) -> bool:
        """At the end of a step: whether the run ends here, on all ranks alike.

        Args:
            step: its number, which grows by one each time.

        Raises:
            StuckError: other ranks do not say where they are.
        """
        self._attach()
        if self._ranks is None:
            return self._any_asked()
        with self._lock:
            told, self._ends = self._told, step + 1
        if not told:
            return False
        if self._last is None:
            self._last = self._decided(self._ranks)
        return step >= self._last

    def leave(self) -> NoReturn:
        """End this process with exit code 143."""
        self.close()
        # A thread of Gloo's that lets go of the last collective's tensors once the interpreter is going brings the process
        # down (exit code 134, rarely): when all that the user does at the end is done, its threads are ended.
        atexit.register(_let_go)
        raise SystemExit(ENDED)

    def _any_asked(self) -> bool:
        """Where ranks do not look after one another they ask at every step, if there are several."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return self._asked is not None
        asked = torch.tensor(self._asked is not None, dtype=torch.int32, device=current().device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked)

    def _attach(self) -> None:
        """To the other ranks, as soon as there are any."""
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
        """Has a signal come?"""
        if not self._looked:  # an alarm from before this was listened for
            self._looked = True
            self._tell(store)
        if self._asked is not None and not self._told:
            store.set("ending", "1")
            self._ranks.raise_alarm(store)

    def _tell(self, store: Any) -> None:
        """The alarm was raised: for this?"""
        if self._told or not store.check(["ending"]):
            return
        with self._lock:
            ends, self._told = self._ends, True
        store.set(f"ending/{self._ranks.rank}", str(ends))
        if store.add("ending/told", 1) == self._ranks.world:
            all_ends = store.multi_get([f"ending/{rank}" for rank in range(self._ranks.world)])
            store.set("ending/last", str(max(map(int, all_ends))))

    # -- on the main thread --

    def _decided(self, ranks: Peers) -> int:
        with waiting(Place("the end of the run, as a signal asks", key="ending")):
            ranks.wait("ending/last")
        return int(ranks.store.get("ending/last"))


def _let_go() -> None:
    """Of the other ranks, where nothing is under way any more."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
