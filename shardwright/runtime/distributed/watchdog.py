"""The watchdog: messages beside the collectives, the rank that others wait for, and a common end of all ranks.

The messages go through the store of the process group, from a thread.

    a look        every second: has an alarm been raised since? One request of 8 bytes a rank, nothing else
    an alarm      raised by a rank with a message or a question: every rank then stores its position, and reads the
                  news
    the news      a verdict (the run ends, and the reason), or a request to end (`checkpoint.callback.Ending`)

A rank that waits at a wait point for longer than its patience raises the alarm, reads the positions of all others,
and explains them with `rank_positions.not_moving`. This is the verdict: every rank writes it to its standard error and
ends with exit code 1, because a collective that is under way cannot be cancelled. A rank that waits at a meeting
(`agreement.Steps`) raises it as an error.

On an accelerator collectives run behind the host's back: a host that is at no wait point is where its device is, at the
oldest collective that has not ended (`rank_positions`).

A rank whose process has ended (`launch.lifelines`) is a verdict, too: at once where it is waited for, and after
`GRACE` seconds where the others compute. A collective that fails in between, because a connection is closed, waits for
the verdict (`explain`).

A step itself sends nothing. A store that does not answer any more ends the looking, not the run: the process that had
the store has ended, and the process group notices this by itself, if the lifeline to rank 0 does not.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...errors import ShardwrightError, StuckError
from ...json_files.json_values import dumps, loads
from ...launch.lifelines import Lifelines
from ...process_runtime import current, lifelines
from ...torch_private import default_store, group_timeout
from .rank_messages import error_as_json, error_of
from .rank_positions import PassedPlaces, Seen, WaitPoint, not_moving, position, users_line

__all__ = ["Peers", "peers"]

#: Seconds between two looks.
LOOK_EVERY = 1.0
#: The number of looks to wait for the positions of other ranks.
ANSWERS = 4
#: The part of torch's timeout of a collective that is left to find the reason: at least this fraction, and so many
#: seconds, but no more than the second fraction.
RESERVED, RESERVED_SECONDS, RESERVED_AT_MOST = 0.2, 15.0, 0.4
#: The number of looks that it takes, at most, from a rank's patience to the end of all ranks.
LOOKS = 13
#: Seconds between two looks for the address of rank 0's lifelines.
CONNECT_EVERY = 0.1
#: Seconds after which the end of a rank is a verdict where no rank waits for it.
GRACE = 4.0

#: The peers of the default process group, with its store: at most one.
_made: list[tuple[dist.Store, Peers]] = []


def peers() -> Peers | None:
    """The `Peers` of this process. None where there are none: one process, a process group without a store that threads
    can share (MPI), or ``init(watch=False)``."""
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
        _made[:] = [(store, Peers(store, dist.get_rank(), dist.get_world_size(), *_patience()))]
    return _made[0][1]


def _patience() -> tuple[float, float]:
    """Seconds that a rank waits at a wait point before it looks for the missing rank, and seconds between two looks."""
    asked, torch_timeout = current().timeout, group_timeout(current().device)
    if torch_timeout is None:
        return asked, min(LOOK_EVERY, asked / 4)
    torchs = torch_timeout.total_seconds()
    patience = min(asked, torchs - max(RESERVED * torchs, min(RESERVED_SECONDS, RESERVED_AT_MOST * torchs)))
    return patience, min(LOOK_EVERY, patience / 4, (torchs - patience) / LOOKS)


class Peers:
    """This rank's connection to the other ranks.

    Args:
        store: of the process group.
        rank: of this process.
        world: the number of ranks.
        patience: seconds at one wait point after which this rank looks for the missing rank.
        look: seconds between two looks.

    Attributes:
        verdict: the reason why the run ends, once a rank has found one.
        looks: called with the store at every look, by the watching thread.
        listeners: likewise, whenever an alarm was raised.
    """

    def __init__(self, store: Any, rank: int, world: int, patience: float, look: float) -> None:
        self.rank, self.world, self.patience, self.look = rank, world, patience, look
        self.verdict: ShardwrightError | None = None
        self.looks: list[Callable[[dist.Store], None]] = []
        self.listeners: list[Callable[[dist.Store], None]] = []
        # One connection a thread: a request that waits occupies its connection.
        self.store = dist.PrefixStore("shardwright/watch", store.clone())
        self._thread_store = dist.PrefixStore("shardwright/watch", store.clone())
        for connection in (self.store, self._thread_store):
            connection.set_timeout(timedelta(seconds=max(30.0, patience)))
        position.passed = PassedPlaces.on(current().device)
        self._group = dist.group.WORLD
        self._heard = 0.0
        self._alarm = 0
        self._lines = lifelines()
        self._ended_at: dict[int, float] = {}  # rank whose process has ended -> when this was seen
        self._stopped, self._hurry = threading.Event(), threading.Event()
        position.explain = self.explain
        self._thread = threading.Thread(target=self._run, daemon=True, name="shardwright peers")
        self._thread.start()
        # A daemon thread inside of C++ while the interpreter shuts down would crash the process.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop looking."""
        self._stopped.set()
        self._hurry.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * LOOK_EVERY)

    def raise_alarm(self, store: dist.Store | None = None) -> int:
        """Let all ranks look; return the number of the alarm."""
        return (store or self.store).add("alarm", 1)

    def everyone(self, store: dist.Store | None = None) -> dict[int, Seen]:
        """The present positions of all ranks, by rank, without ranks that do not answer within some looks."""
        store = store or self.store
        alarm, deadline = self.raise_alarm(store), time.monotonic() + (ANSWERS + 1) * self.look
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

    def decide(self, error: ShardwrightError, store: dist.Store | None = None) -> ShardwrightError:
        """End the run on all ranks with an error; return the error that ends it, which is another rank's where that was
        first."""
        store = store or self.store
        verdict = store.compare_set("verdict", "", dumps(error_as_json(error)).decode())
        self.verdict = _verdict(verdict)
        self.raise_alarm(store)
        return self.verdict

    def wait(
        self, key: str, judge: Callable[[Mapping[int, Seen]], ShardwrightError | None] = lambda seen: None
    ) -> None:
        """Wait until some rank has set `key`. Called by the main thread, at a wait point with a key.

        Args:
            key: in the store.
            judge: positions of all ranks -> the error, or None; called now and then.

        Raises:
            ShardwrightError: the error of `judge`; StuckError after the patience of a rank; or the error that has
                ended the run elsewhere.
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

    def _linger(self, store: dist.Store) -> None:
        """Wait until all ranks have heard the verdict, for some looks at most: once a rank ends, collectives break, and
        with rank 0 the store may go."""
        deadline = time.monotonic() + (ANSWERS + 1 + (self.rank == 0)) * self.look
        try:
            heard = store.add("heard", 1)
            while heard < self.world and time.monotonic() < deadline:
                time.sleep(self.look / 4)
                heard = store.add("heard", 0)
            if self.rank == 0:  # the store may be in this process: the others are to see the count before it goes
                time.sleep(self.look / 2)
        except RuntimeError:
            pass  # the store is gone

    def _came(self, key: str, seconds: float) -> bool:
        """True where a key is set within `seconds`; False at once where there is a verdict."""
        deadline, pause = time.monotonic() + seconds, 1e-4
        while not self.store.check([key]):  # the store's own wait would write to standard error at each timeout
            if self.verdict is not None or time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, max(0.02, 1e-5 * self.world))  # at most 100,000 requests a second of all ranks
        return True

    # -- the watching thread --

    def _run(self) -> None:
        self._heard = time.monotonic()
        moved = None
        try:
            while self._pause() and self.verdict is None and dist.group.WORLD is self._group:
                if position.now != moved:
                    moved, self._heard = position.now, time.monotonic()
                for look in list(self.looks):
                    look(self._thread_store)
                if self._lines is not None:
                    self._bury(self._lines)
                alarm = self._thread_store.add("alarm", 0)
                if alarm != self._alarm:
                    self._answer(alarm)
                    self._news()
                waited = time.monotonic() - self._heard
                if waited > self.patience and (place := self._place()[1]) is not None and not place.key:
                    self._judge(waited)
        except RuntimeError:  # the store is gone, and the process of rank 0 with it, if that had it
            self._store_lost()
        if self._lines is not None and not self._stopped.is_set():  # another process group has taken this one's place
            self._lines.goodbye()

    def _pause(self) -> bool:
        """Wait until the next look; False where there is none."""
        connected = self._lines is None or self._lines.connected
        self._hurry.wait(self.look if connected else min(self.look, CONNECT_EVERY))
        if not self._stopped.is_set():
            self._hurry.clear()
        return not self._stopped.is_set()

    def _bury(self, lines: Lifelines) -> None:
        """Find the verdict where a rank's process has ended."""
        lines.look()
        now, place = time.monotonic(), self._place()[1]
        for rank in list(lines.ended):
            since = self._ended_at.setdefault(rank, now)
            waits = place is not None and (not place.ranks or rank in place.ranks) and now - since >= self.look
            if waits or now - since > GRACE or self._thread_store.check(["faults"]):
                self.decide(StuckError(f"rank {rank} {lines.ended[rank]}"), self._thread_store)
                self._news()
                return

    def _store_lost(self) -> None:
        """End this process where the process of rank 0 has ended, which had the store."""
        deadline, lines = time.monotonic() + ANSWERS * self.look, self._lines
        while lines is not None and not self._stopped.wait(self.look / 4) and time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):
                lines.look()
            if 0 in lines.ended:
                self._end(StuckError(f"rank 0 {lines.ended[0]}"), notify=False)
                return

    def explain(self, error: Exception) -> Exception | None:
        """The verdict that explains a collective that has failed on the main thread; None where there is none.

        A process that has ended closes its connections: the collectives of the others fail before its lifeline is
        read.
        """
        if threading.current_thread() is self._thread or self._stopped.is_set() or not self._thread.is_alive():
            return self.verdict
        with contextlib.suppress(RuntimeError):  # the store is gone
            self.store.add("faults", 1)
        deadline = time.monotonic() + 3 * self.look
        while self.verdict is None and self._thread.is_alive() and time.monotonic() < deadline:
            self._hurry.set()
            time.sleep(self.look / 20)
        if self.verdict is not None and not (position.place is not None and position.place.key):
            self._thread.join(LOOKS * self.look)  # it ends this process
        return self.verdict

    def _answer(self, alarm: int) -> None:
        """Store the position of this rank."""
        if alarm == self._alarm:
            return
        self._alarm = alarm
        call, place, since = self._place()
        place = place or WaitPoint("")
        waited = time.monotonic() - since
        at = Seen(call, position.program, place.what, place.ranks, place.key, place.back, waited, users_line())
        self._thread_store.set(f"at/{self.rank}", json.dumps({"alarm": alarm} | at.encode()))

    def _place(self) -> tuple[int, WaitPoint | None, float]:
        """The call and wait point of the host, or of the device where the host is at none; and since when."""
        _moves, call, place = position.now
        behind = position.passed.oldest() if place is None and position.passed is not None else None
        return (call, place, self._heard) if behind is None else (behind.call, behind.place, behind.since)

    def _news(self) -> None:
        for listener in list(self.listeners):
            listener(self._thread_store)
        if self._thread_store.check(["verdict"]):
            self._end(_verdict(self._thread_store.get("verdict")))

    def _judge(self, waited: float) -> None:
        """Find the verdict, after this rank has waited too long."""
        # One rank judges. The others do so if that rank has not answered for long: it may be stopped itself.
        if self._thread_store.add("judges", 1) > 1 and waited < self.patience + 15 * self.look:
            return
        before = position.now
        seen = self.everyone(self._thread_store)
        if position.now == before and self.rank in seen and seen[self.rank].place:
            self.decide(StuckError(not_moving(seen, self.world, self.rank)), self._thread_store)
            self._news()
        else:
            self._thread_store.set("judges", "0")

    def _end(self, verdict: ShardwrightError, notify: bool = True) -> None:
        """End this process with a verdict that some rank has found.

        Args:
            notify: False where the store is gone, and no rank can tell others that it has heard the verdict.
        """
        self.verdict = verdict
        place = position.place
        if place is not None and place.key:
            return  # the main thread raises the error itself
        if notify:
            self._linger(self._thread_store)
        # Last of all: what torch has to say about closed connections comes before it.
        sys.stdout.flush()
        kind = type(verdict)
        print(f"{kind.__module__}.{kind.__name__}: {verdict}", file=sys.stderr, flush=True)
        os._exit(1)


def _verdict(text: bytes) -> ShardwrightError:
    error = error_of(loads(text))
    return error if isinstance(error, ShardwrightError) else StuckError(str(error))
