"""What ranks tell one another beside their collectives: through the store that they met at, from a thread of its own.

    a look        every second: has the store's alarm been raised since? A request of 8 bytes a rank, nothing else
    an alarm      raised by whoever has something to say or to ask: every rank then says where it is, and reads the news
    the news      a verdict (the run ends, and why), a wish to end (`ending`)

A rank that waits at a place for longer than its patience raises the alarm, looks where all others are, and says what it
finds (`stuck`). That is the verdict: every rank writes it to its standard error and ends with exit code 1, for a
collective that is under way cannot be called off. One that waits at a meeting (`steps`) raises it as an error.

On an accelerator collectives go on behind the host's back: ranks are found where their hosts wait, at meetings, and what
hangs on the device is ended by the library's own timeout.

Nothing is sent on behalf of a step. A store that does not answer any more ends the looking, not the run: whoever held it
has ended, which the process group tells by itself.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import ShardwrightError, StuckError
from ..torch_private import default_store, group_timeout
from .init import current
from .position import position, users_line
from .stuck import Seen, not_moving

__all__ = ["Peers", "peers"]

#: Seconds between two looks.
LOOK = 1.0
#: Where others are is waited for so many looks.
ANSWERS = 4
#: Of the time after which torch gives up a collective: before that this rank looks why.
SHARE = 0.8

#: The peers of the default process group, with its store: at most one.
_made: list[tuple[Any, Peers]] = []


def peers() -> Peers | None:
    """Those of this process; None where there are none: one process, a process group without a store that threads can
    share (MPI), or ``init(watch=False)``."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1 or not current().watch:
        return None
    store = default_store()
    if store is None:
        return None
    if not _made or _made[0][0] is not store:
        for _, old in _made:
            old.stop()
        try:
            store.clone()
        except (AttributeError, RuntimeError, NotImplementedError):
            return None
        _made[:] = [(store, Peers(store, dist.get_rank(), dist.get_world_size(), _patience()))]
    return _made[0][1]


def _patience() -> float:
    """Seconds that a rank waits at a place before it looks who is missing."""
    asked = current().timeout
    own = group_timeout(current().device)
    return asked if own is None else min(asked, SHARE * own.total_seconds())


class Peers:
    """This rank's line to the others.

    Args:
        store: of the process group.
        patience: seconds at one place after which it looks who is missing.

    Attributes:
        verdict: why the run ends, once a rank has said so.
        looks: called with the store at every look, by the watching thread.
        listeners: likewise, whenever the alarm was raised.
    """

    def __init__(self, store: Any, rank: int, world: int, patience: float) -> None:
        self.rank, self.world, self.patience = rank, world, patience
        self.look = min(LOOK, patience / 4)
        self.verdict: ShardwrightError | None = None
        self.looks: list[Callable[[Any], None]] = []
        self.listeners: list[Callable[[Any], None]] = []
        # One connection a thread: a request that waits holds its own.
        self.store = dist.PrefixStore("shardwright/watch", store.clone())
        self._thread_store = dist.PrefixStore("shardwright/watch", store.clone())
        for own in (self.store, self._thread_store):
            own.set_timeout(timedelta(seconds=max(30.0, patience)))
        self._group = dist.group.WORLD
        self._heard = 0.0
        self._alarm = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="shardwright peers")
        self._thread.start()
        # A daemon that is inside of C++ when the interpreter goes would bring the process down.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Look no longer."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * LOOK)

    def raise_alarm(self, store: Any = None) -> int:
        """Let all ranks look; the number of the alarm."""
        return (store or self.store).add("alarm", 1)

    def everyone(self, store: Any = None) -> dict[int, Seen]:
        """Where all ranks are now, by rank; those that do not answer within some looks are not in it."""
        store = store or self.store
        alarm, deadline = self.raise_alarm(store), time.monotonic() + ANSWERS * self.look + 1
        seen: dict[int, Seen] = {}
        if store is self._thread_store:
            self._answer(alarm)
        while len(seen) < self.world and time.monotonic() < deadline:
            for rank in range(self.world):
                if rank not in seen and store.check([f"at/{rank}"]):
                    at = json.loads(store.get(f"at/{rank}"))
                    if at.pop("alarm") >= alarm:
                        seen[rank] = Seen.of(at)
            if store is self._thread_store:
                self._answer(store.add("alarm", 0))
            time.sleep(self.look / 4)
        return seen

    def decide(self, error: ShardwrightError, store: Any = None) -> ShardwrightError:
        """Let an error end the run on all ranks; that which does, if another rank was first."""
        store = store or self.store
        mine = json.dumps([type(error).__name__, error.message, error.legal])
        said = json.loads(store.compare_set("verdict", "", mine))
        from .. import errors
        self.verdict = getattr(errors, said[0])(said[1], legal=said[2])
        self.raise_alarm(store)
        return self.verdict

    def wait(self, key: str, judge: Callable[[Mapping[int, Seen]], ShardwrightError | None] = lambda seen: None) -> None:
        """Until somebody has set `key`; by the main thread, at a place with a key.

        Args:
            judge: what is wrong, by where all ranks are; asked now and then.

        Raises:
            ShardwrightError: what it says; StuckError after the patience of a rank; or what has ended the run elsewhere.
        """
        began, pause = time.monotonic(), self.look
        while not self._came(key, pause):
            if self.verdict is None:
                seen = self.everyone()
                if self.store.check([key]):
                    return
                error = judge(seen)
                if error is None and time.monotonic() - began > self.patience and self.rank in seen:
                    error = StuckError(not_moving(seen, self.world, self.rank))
                if error is not None:
                    self.decide(error)
            if self.verdict is not None:
                self._linger(self.store)
                raise self.verdict
            pause = min(2 * pause, max(self.look, self.patience / 8))

    def _linger(self, store: Any) -> None:
        """Until all have heard the verdict, for some looks at most: once a rank ends collectives break, and with rank 0
        the store may go."""
        deadline = time.monotonic() + (ANSWERS + (self.rank == 0)) * self.look + 1
        try:
            heard = store.add("heard", 1)
            while heard < self.world and time.monotonic() < deadline:
                time.sleep(self.look / 4)
                heard = store.add("heard", 0)
        except RuntimeError:
            pass  # it is gone

    def _came(self, key: str, seconds: float) -> bool:
        """Whether a key is set within that time; not while there is a verdict."""
        deadline, pause = time.monotonic() + seconds, 1e-4
        while not self.store.check([key]):  # the store's own wait would write to standard error whenever its time is up
            if self.verdict is not None or time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, max(0.02, 1e-5 * self.world))  # at most 100,000 requests a second, by all together
        return True

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._heard = time.monotonic()
        moved = None
        try:
            while not self._stopped.wait(self.look) and dist.group.WORLD is self._group:
                if position.now != moved:
                    moved, self._heard = position.now, time.monotonic()
                for look in list(self.looks):
                    look(self._thread_store)
                alarm = self._thread_store.add("alarm", 0)
                if alarm != self._alarm:
                    self._answer(alarm)
                    self._news()
                waited = time.monotonic() - self._heard
                if waited > self.patience and moved[2] is not None and not moved[2].key:
                    self._judge(waited)
        except RuntimeError:
            pass  # the store is gone

    def _answer(self, alarm: int) -> None:
        """Say where this rank is."""
        if alarm == self._alarm:
            return
        self._alarm = alarm
        moves, call, place = position.now
        at = Seen(call, position.program, place.what if place else "", place.ranks if place else (),
                  place.key if place else "", time.monotonic() - self._heard, users_line())
        self._thread_store.set(f"at/{self.rank}", json.dumps({"alarm": alarm} | at.words()))

    def _news(self) -> None:
        for listener in list(self.listeners):
            listener(self._thread_store)
        if self._thread_store.check(["verdict"]):
            self._end(*json.loads(self._thread_store.get("verdict")))

    def _judge(self, waited: float) -> None:
        """This rank has waited too long."""
        # One rank judges; the others do if it has not said anything for long, which may be stopped itself.
        if self._thread_store.add("judges", 1) > 1 and waited < self.patience + 15 * self.look:
            return
        before = position.now
        seen = self.everyone(self._thread_store)
        if position.now == before and self.rank in seen:
            self.decide(StuckError(not_moving(seen, self.world, self.rank)), self._thread_store)
            self._news()
        else:
            self._thread_store.set("judges", "0")

    def _end(self, kind: str, text: str, legal: str | None) -> None:
        """The run has ended, on whichever rank that was found."""
        from .. import errors
        self.verdict = getattr(errors, kind)(text, legal=legal)
        place = position.place
        if place is not None and place.key:
            return  # it raises the error itself
        sys.stdout.flush()
        print(f"{type(self.verdict).__module__}.{kind}: {self.verdict}", file=sys.stderr, flush=True)
        self._linger(self._thread_store)
        os._exit(1)
