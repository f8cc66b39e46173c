"""The watchdog: the position of each rank, the rank that others wait for, and a common end of all ranks.

1. Position (`RankPosition`, `WaitPoint`). A rank notes its position while it runs, and a thread of the process reads
   it. A note is two assignments: nothing is sent, and a collective that is under way can be named from outside of it.

2. The missing rank (`not_moving`), derived from the positions of all ranks:

    r waits for q       r is at a wait point that q takes part in, and q is not there
    a culprit           a rank that others wait for and that waits for none: it is elsewhere, or does not answer
    a circle            ranks that wait for one another at different wait points: they run different programs

Following the waits of any rank leads to culprits, or round a circle.

3. Messages beside the collectives (`Peers`): through the store of the process group, from a thread.

    a look        every second: has an alarm been raised since? One request of 8 bytes a rank, nothing else
    an alarm      raised by a rank with a message or a question: every rank then stores its position, and reads the
                  news
    the news      a verdict (the run ends, and the reason), or a request to end (`Ending`)

A rank that waits at a wait point for longer than its patience raises the alarm, reads the positions of all others,
and explains them with `not_moving`. This is the verdict: every rank writes it to its standard error and ends with
exit code 1, because a collective that is under way cannot be cancelled. A rank that waits at a meeting
(`agreement.Steps`) raises it as an error.

On an accelerator collectives run behind the host's back: a host that is at no wait point is where its device is, at the
oldest collective that has not ended (`device_events`).

A step itself sends nothing. A store that does not answer any more ends the looking, not the run: the process that had
the store has ended, and the process group notices this by itself.

4. The end on request (`Ending`): a signal on any rank ends all ranks at the end of the same step, once the step's
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

import atexit
import contextlib
import json
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ... import errors
from ...errors import PACKAGE_FOLDER, ShardwrightError, StuckError
from ...process import current
from ...torch_private import default_store, group_timeout
from .device_events import PassedPlaces

__all__ = [
    "ENDED",
    "Ending",
    "Peers",
    "RankPosition",
    "Seen",
    "WaitPoint",
    "not_moving",
    "noted",
    "peers",
    "position",
    "spelled",
    "users_line",
    "waiting",
]


# -- position


@dataclass(frozen=True)
class WaitPoint:
    """A point of the program at which several ranks communicate.

    Attributes:
        what: in words: ``the all_gather of fc2 (net.py:41), forward``.
        ranks: the ranks of the world that take part; empty: all.
        back: True where it is part of a backward.
        key: of a meeting, at which the rank itself checks on ranks that do not come (`agreement.Steps`); the same for
            all that come to it. "": not a meeting.
    """

    what: str
    ranks: tuple[int, ...] = ()
    back: bool = False
    key: str = ""


class RankPosition:
    """The position of this process, which is one rank.

    Attributes:
        place: the wait point that the rank is at, or None: it computes, or is outside of the model.
        moves: the number of wait points so far.
        call: the number of calls of planned models begun so far.
        program: the program of the latest call, in words.
        back: True where the rank has come to a wait point of a backward since the latest call began.
        passed: the wait points that the host has left and the device may not have; None without an accelerator.
    """

    __slots__ = ("back", "call", "moves", "passed", "place", "program")

    def __init__(self) -> None:
        self.place: WaitPoint | None = None
        self.moves = self.call = 0
        self.back = False
        self.program = ""
        self.passed: PassedPlaces | None = None

    @property
    def now(self) -> tuple[int, int, WaitPoint | None]:
        """A value that changes whenever the rank moves."""
        return self.moves, self.call, self.place


#: The position of this process.
position = RankPosition()


class waiting:
    """While active, this rank is at `place`."""

    __slots__ = ("place",)

    def __init__(self, place: WaitPoint) -> None:
        self.place = place

    def __enter__(self) -> None:
        position.place = self.place
        position.moves += 1
        position.back |= self.place.back

    def __exit__(self, *_: object) -> None:
        position.place = None
        if position.passed is not None and not self.place.key:
            position.passed.note(self.place, position.call)


def noted(steps: Sequence[Callable[[Any], Any]], place: WaitPoint) -> tuple[Callable[[Any], Any], ...]:
    """The steps of a redistribution as one function, which is at `place` while it runs."""
    steps, back = tuple(steps), place.back

    def run(x: Any) -> Any:  # not `waiting`, which takes longer
        position.place = place
        position.moves += 1
        if back:
            position.back = True
        try:
            for step in steps:
                x = step(x)
            return x
        finally:
            position.place = None
            if position.passed is not None:
                position.passed.note(place, position.call)

    return (run,)


_NOT_THE_USERS = (os.path.dirname(torch.__file__), PACKAGE_FOLDER)
_LIBRARY = sysconfig.get_paths()["stdlib"]


def users_line() -> str:
    """The line of the user's own program at which the main thread is: ``train.py:57 in main``; "" where it is in
    none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name.strip('<>')}"


def _is_users(frame: FrameType) -> bool:
    name = os.path.abspath(frame.f_code.co_filename)
    library = name.startswith(_LIBRARY + os.sep) and "site-packages" not in name
    return not (frame.f_code.co_filename.startswith("<") or library or name.startswith(_NOT_THE_USERS))


# -- the missing rank


@dataclass(frozen=True)
class Seen:
    """The position of one rank, as the rank itself stored it.

    Attributes:
        call: the number of calls of planned models begun so far.
        program: the program of the latest call, in words.
        place: the wait point, in words; "": none.
        ranks: the ranks that take part in it; empty: all.
        key: of a meeting, the same for all that come to it; "": not a meeting.
        seconds: since the rank last moved.
        line: of the user's program: ``train.py:57 in main``.
    """

    call: int
    program: str
    place: str
    ranks: tuple[int, ...]
    key: str
    seconds: float
    line: str

    def words(self) -> dict[str, Any]:
        """The position as a JSON document."""
        return asdict(self)

    @classmethod
    def of(cls, words: dict[str, Any]) -> Seen:
        """The position from the document."""
        return cls(**{**words, "ranks": tuple(words["ranks"])})


def not_moving(seen: Mapping[int, Seen], world: int, start: int) -> str:
    """The reason why rank `start` waits, in words.

    Args:
        seen: the positions, by rank; ranks that are missing have not answered.
        world: the number of ranks.
        start: a rank that is at a wait point.
    """
    missing = {rank: _missing(rank, seen, world) for rank, at in seen.items() if at.place}
    culprits: dict[int, list[int]] = {}  # by culprit, the ranks that wait for it
    known, due = {start}, [start]
    while due:
        rank = due.pop(0)
        for other in missing[rank]:
            if other not in missing:
                culprits.setdefault(other, []).append(rank)
            elif other not in known:
                known.add(other)
                due.append(other)
    if culprits:
        return _culprits(culprits, seen)
    if len(known) > 1:
        return _circle(known, seen)
    at = seen[start]
    return (
        f"{spelled(at.ranks or range(world))} have all come to {at.place} in call {at.call} and have not ended it "
        f"since {at.seconds:.0f} s: a message between them is lost, or one of them has died"
    )


def _missing(rank: int, seen: Mapping[int, Seen], world: int) -> list[int]:
    """The ranks that a rank waits for."""
    at = seen[rank]
    return [r for r in at.ranks or range(world) if r != rank and not (r in seen and _together(seen[r], at))]


def _together(a: Seen, b: Seen) -> bool:
    return (a.place, a.call, a.key) == (b.place, b.call, b.key)


def _culprits(culprits: Mapping[int, list[int]], seen: Mapping[int, Seen]) -> str:
    """The text about ranks that have not come, grouped by the ranks that wait for them."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for culprit, waiters in sorted(culprits.items()):
        first = seen[waiters[0]]
        alike = tuple(sorted(r for r in seen if _together(seen[r], first)))
        groups.setdefault(alike, []).append(culprit)
    lines = []
    for waiters, absent in groups.items():
        at = seen[waiters[0]]
        one = len(absent) == 1
        lines.append(
            f"{spelled(absent)} {'has' if one else 'have'} not come to {at.place} in call {at.call}; "
            f"{spelled(waiters)} {'waits' if len(waiters) == 1 else 'wait'} there since "
            f"{max(seen[r].seconds for r in waiters):.0f} s"
        )
        for rank in absent[:8]:
            lines.append(f"  {_whereabouts(rank, seen.get(rank))}")
        if len(absent) > 8:
            lines.append(f"  and {len(absent) - 8} more")
    return "\n".join(lines)


def _whereabouts(rank: int, at: Seen | None) -> str:
    if at is None:
        return (
            f"rank {rank} does not answer: its process has ended or is stopped, its interpreter is held, it has not "
            "called a model yet, or its host cannot be reached"
        )
    where = at.line or "outside of any line of the user's"
    began = f"since call {at.call} began" if at.call else "before its first call"
    return f"rank {rank} is at {where}, {began}; it has come to no collective since {at.seconds:.0f} s"


def _circle(ranks: Collection[int], seen: Mapping[int, Seen]) -> str:
    groups: dict[tuple[str, int], list[int]] = {}
    for rank in sorted(ranks):
        groups.setdefault((seen[rank].place, seen[rank].call), []).append(rank)
    each = "; ".join(
        f"{spelled(rs)} {'is' if len(rs) == 1 else 'are'} at {place} in call {call}"
        for (place, call), rs in groups.items()
    )
    return f"ranks wait for one another at different places, as where one makes a backward that others do not: {each}"


def spelled(ranks: Iterable[int]) -> str:
    """The ranks in words: ``rank 3``, ``ranks 0-2, 5``."""
    ranks = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return f"rank{'' if len(ranks) == 1 else 's'} " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


# -- messages beside the collectives

#: Seconds between two looks.
LOOK_EVERY = 1.0
#: The number of looks to wait for the positions of other ranks.
ANSWERS = 4
#: The fraction of torch's timeout of a collective after which this rank asks for the reason.
SHARE = 0.8

#: The peers of the default process group, with its store: at most one.
_made: list[tuple[Any, Peers]] = []


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
        _made[:] = [(store, Peers(store, dist.get_rank(), dist.get_world_size(), _patience()))]
    return _made[0][1]


def _patience() -> float:
    """Seconds that a rank waits at a wait point before it looks for the missing rank."""
    asked = current().timeout
    own = group_timeout(current().device)
    return asked if own is None else min(asked, SHARE * own.total_seconds())


class Peers:
    """This rank's connection to the other ranks.

    Args:
        store: of the process group.
        rank: of this process.
        world: the number of ranks.
        patience: seconds at one wait point after which this rank looks for the missing rank.

    Attributes:
        verdict: the reason why the run ends, once a rank has found one.
        looks: called with the store at every look, by the watching thread.
        listeners: likewise, whenever an alarm was raised.
    """

    def __init__(self, store: Any, rank: int, world: int, patience: float) -> None:
        self.rank, self.world, self.patience = rank, world, patience
        self.look = min(LOOK_EVERY, patience / 4)
        self.verdict: ShardwrightError | None = None
        self.looks: list[Callable[[Any], None]] = []
        self.listeners: list[Callable[[Any], None]] = []
        # One connection a thread: a request that waits occupies its connection.
        self.store = dist.PrefixStore("shardwright/watch", store.clone())
        self._thread_store = dist.PrefixStore("shardwright/watch", store.clone())
        for own in (self.store, self._thread_store):
            own.set_timeout(timedelta(seconds=max(30.0, patience)))
        position.passed = PassedPlaces.on(current().device)
        self._group = dist.group.WORLD
        self._heard = 0.0
        self._alarm = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="shardwright peers")
        self._thread.start()
        # A daemon thread inside of C++ while the interpreter shuts down would crash the process.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop looking."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * LOOK_EVERY)

    def raise_alarm(self, store: Any = None) -> int:
        """Let all ranks look; return the number of the alarm."""
        return (store or self.store).add("alarm", 1)

    def everyone(self, store: Any = None) -> dict[int, Seen]:
        """The present positions of all ranks, by rank, without ranks that do not answer within some looks."""
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
        """End the run on all ranks with an error; return the error that ends it, which is another rank's where that was
        first."""
        store = store or self.store
        mine = json.dumps([type(error).__name__, error.message, error.legal])
        said = json.loads(store.compare_set("verdict", "", mine))
        self.verdict = getattr(errors, said[0])(said[1], legal=said[2])
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

    def _linger(self, store: Any) -> None:
        """Wait until all ranks have heard the verdict, for some looks at most: once a rank ends, collectives break, and
        with rank 0 the store may go."""
        deadline = time.monotonic() + (ANSWERS + (self.rank == 0)) * self.look + 1
        try:
            heard = store.add("heard", 1)
            while heard < self.world and time.monotonic() < deadline:
                time.sleep(self.look / 4)
                heard = store.add("heard", 0)
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
                if waited > self.patience and (place := self._place()[1]) is not None and not place.key:
                    self._judge(waited)
        except RuntimeError:
            pass  # the store is gone

    def _answer(self, alarm: int) -> None:
        """Store the position of this rank."""
        if alarm == self._alarm:
            return
        self._alarm = alarm
        call, place, since = self._place()
        what, ranks, key = (place.what, place.ranks, place.key) if place else ("", (), "")
        at = Seen(call, position.program, what, ranks, key, time.monotonic() - since, users_line())
        self._thread_store.set(f"at/{self.rank}", json.dumps({"alarm": alarm} | at.words()))

    def _place(self) -> tuple[int, WaitPoint | None, float]:
        """The call and wait point of the host, or of the device where the host is at none; and since when."""
        _moves, call, place = position.now
        behind = position.passed.oldest() if place is None and position.passed is not None else None
        return (call, place, self._heard) if behind is None else (behind.call, behind.place, behind.since)

    def _news(self) -> None:
        for listener in list(self.listeners):
            listener(self._thread_store)
        if self._thread_store.check(["verdict"]):
            self._end(*json.loads(self._thread_store.get("verdict")))

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

    def _end(self, kind: str, text: str, legal: str | None) -> None:
        """End this process with a verdict that some rank has found."""
        self.verdict = getattr(errors, kind)(text, legal=legal)
        place = position.place
        if place is not None and place.key:
            return  # the main thread raises the error itself
        sys.stdout.flush()
        print(f"{type(self.verdict).__module__}.{kind}: {self.verdict}", file=sys.stderr, flush=True)
        self._linger(self._thread_store)
        os._exit(1)


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
        self._told = False  # True once the other ranks know that step
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
            told, self._ends = self._told, step + 1
        if not told:
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
        if self._asked is not None and not self._told and self._ranks is not None:
            store.set("ending", "1")
            self._ranks.raise_alarm(store)

    def _tell(self, store: Any) -> None:
        """Answer an alarm that concerns the end of the run: store this rank's next step."""
        if self._told or not store.check(["ending"]):
            return
        assert self._ranks is not None
        with self._lock:
            ends, self._told = self._ends, True
        store.set(f"ending/{self._ranks.rank}", str(ends))
        if store.add("ending/told", 1) == self._ranks.world:
            all_ends = store.multi_get([f"ending/{rank}" for rank in range(self._ranks.world)])
            store.set("ending/last", str(max(map(int, all_ends))))

    # -- on the main thread --

    def _decided(self, ranks: Peers) -> int:
        with waiting(WaitPoint("the end of the run, as a signal asks", key="ending")):
            ranks.wait("ending/last")
        return int(ranks.store.get("ending/last"))
