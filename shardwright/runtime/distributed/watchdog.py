"""To end when asked: a signal on any rank ends all of them at the end of the same step, once the step's work is saved.

    a signal            is noted; the rank's thread says so in the store and raises the alarm (`peers`)
    the alarm           each rank's thread says in the store at the end of which step its rank comes next, e_r, and
                        from then on that rank asks at the end of every step
    at the end of e_r   wait until all have said theirs; the run ends at the end of step max e_r

Why nobody waits for ever: e_r is said by a thread, whatever its rank is doing, so all are said within a look. A rank
    that
waits at the end of e_r has given all that others need of it up to there; the last of the others' steps, max e_r, it
goes on to. No step sends or asks anything while no signal has come.
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

from ...errors import PACKAGE_FOLDER, ShardwrightError, StuckError
from ...process import current
from ...torch_private import default_store, group_timeout

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


# ----------------------------------------------------------------------------------------------------
# Where this rank is in its program: noted while it runs, read by the thread that watches it (`peers`).
#
# A note is two assignments: nothing is sent, and a collective that is under way can be named from outside of it.
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WaitPoint:
    """Something that several ranks do together.

    Attributes:
        what: in words: ``the all_gather of fc2 (net.py:41), forward``.
        ranks: of the world, those that take part; none: all.
        back: whether it is of a backward.
        key: of a meeting, at which the rank itself looks after those that do not come (`steps`): the same for all that
            come to it; "": it is none.
    """

    what: str
    ranks: tuple[int, ...] = ()
    back: bool = False
    key: str = ""


class RankPosition:
    """Attributes:
    place: what the rank is in, or None: it computes, or is outside of the model.
    moves: how often it has come to a place.
    call: how many calls of planned models it has begun.
    program: what the latest of them runs, in words.
    back: whether the rank has come to a place of a backward since the latest began.
    """

    __slots__ = ("back", "call", "moves", "place", "program")

    def __init__(self) -> None:
        self.place: WaitPoint | None = None
        self.moves = self.call = 0
        self.back = False
        self.program = ""

    @property
    def now(self) -> tuple[int, int, WaitPoint | None]:
        """What is another value whenever the rank has moved."""
        return self.moves, self.call, self.place


#: Of this process: one rank.
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


def noted(steps: Sequence[Callable[[Any], Any]], place: WaitPoint) -> tuple[Callable[[Any], Any], ...]:
    """The steps of a conversion as one, which is at `place` while it runs."""
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

    return (run,)


_NOT_THE_USERS = (os.path.dirname(torch.__file__), PACKAGE_FOLDER)
_LIBRARY = sysconfig.get_paths()["stdlib"]


def users_line() -> str:
    """Where the main thread is, in the user's own program: ``train.py:57 in main``; "" where it is in none."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name.strip('<>')}"


def _is_users(frame: FrameType) -> bool:
    name = os.path.abspath(frame.f_code.co_filename)
    library = name.startswith(_LIBRARY + os.sep) and "site-packages" not in name
    return not (frame.f_code.co_filename.startswith("<") or library or name.startswith(_NOT_THE_USERS))


# ----------------------------------------------------------------------------------------------------
# Which rank does not come, and to what: read off where all ranks are.
#
#     r waits for q       r is at a place to which q belongs, and q is not there
#     a culprit           somebody that others wait for, and that waits for nobody itself: it is elsewhere, or silent
#     a circle            ranks that wait for one another at unlike places: they run different programs
#
# Follow the waits of any rank: they end at culprits, or go round.
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """Where one rank is, as it says itself.

    Attributes:
        call: how many calls of planned models it has begun.
        program: what the latest runs, in words.
        place: the place that it is at, in words; "": none.
        ranks: those that belong there.
        key: of a meeting: what is the same for all that come to it; "": the place is none.
        seconds: for how long it has not moved.
        line: the user's line that it is in: ``train.py:57 in main``.
    """

    call: int
    program: str
    place: str
    ranks: tuple[int, ...]
    key: str
    seconds: float
    line: str

    def words(self) -> dict[str, Any]:
        """As a document."""
        return asdict(self)

    @classmethod
    def of(cls, words: dict[str, Any]) -> Seen:
        """From the document."""
        return cls(**{**words, "ranks": tuple(words["ranks"])})


def not_moving(seen: Mapping[int, Seen], world: int, start: int) -> str:
    """Why rank `start` waits, in words.

    Args:
        seen: where ranks are; those that are missing have not answered.
        start: a rank that is at a place.
    """
    missing = {rank: _missing(rank, seen, world) for rank, at in seen.items() if at.place}
    culprits: dict[int, list[int]] = {}  # by rank, those that wait for it
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
    """Whom a rank waits for."""
    at = seen[rank]
    return [r for r in at.ranks or range(world) if r != rank and not (r in seen and _together(seen[r], at))]


def _together(a: Seen, b: Seen) -> bool:
    return (a.place, a.call, a.key) == (b.place, b.call, b.key)


def _culprits(culprits: Mapping[int, list[int]], seen: Mapping[int, Seen]) -> str:
    """The ranks that have not come, those that the same ranks wait for together."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for culprit, waiters in sorted(culprits.items()):
        first = seen[waiters[0]]
        alike = tuple(sorted(r for r in seen if _together(seen[r], first)))
        groups.setdefault(alike, []).append(culprit)
    lines = []
    for waiters, missing in groups.items():
        at = seen[waiters[0]]
        one = len(missing) == 1
        lines.append(
            f"{spelled(missing)} {'has' if one else 'have'} not come to {at.place} in call {at.call}; "
            f"{spelled(waiters)} {'waits' if len(waiters) == 1 else 'wait'} there since "
            f"{max(seen[r].seconds for r in waiters):.0f} s"
        )
        for rank in missing[:8]:
            lines.append(f"  {_whereabouts(rank, seen.get(rank))}")
        if len(missing) > 8:
            lines.append(f"  and {len(missing) - 8} more")
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
    """``rank 3``, ``ranks 0-2, 5``."""
    ranks = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return f"rank{'' if len(ranks) == 1 else 's'} " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


# ----------------------------------------------------------------------------------------------------
# What ranks tell one another beside their collectives: through the store that they met at, from a thread of its own.
#
#     a look        every second: has the store's alarm been raised since? A request of 8 bytes a rank, nothing else
#     an alarm      raised by whoever has something to say or to ask: every rank then says where it is, and reads the news
#     the news      a verdict (the run ends, and why), a wish to end (`ending`)
#
# A rank that waits at a place for longer than its patience raises the alarm, looks where all others are, and says what
# it finds (`stuck`). That is the verdict: every rank writes it to its standard error and ends with exit code 1, for a
# collective that is under way cannot be called off. One that waits at a meeting (`steps`) raises it as an error.
#
# On an accelerator collectives go on behind the host's back: ranks are found where their hosts wait, at meetings, and
# what hangs on the device is ended by the library's own timeout.
#
# Nothing is sent on behalf of a step. A store that does not answer any more ends the looking, not the run: whoever held
# it has ended, which the process group tells by itself.
# ----------------------------------------------------------------------------------------------------

#: Seconds between two looks.
LOOK_EVERY = 1.0
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
        self.look = min(LOOK_EVERY, patience / 4)
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
            self._thread.join(2 * LOOK_EVERY)

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
        from ... import errors

        self.verdict = getattr(errors, said[0])(said[1], legal=said[2])
        self.raise_alarm(store)
        return self.verdict

    def wait(
        self, key: str, judge: Callable[[Mapping[int, Seen]], ShardwrightError | None] = lambda seen: None
    ) -> None:
        """Until somebody has set `key`; by the main thread, at a place with a key.

        Args:
            judge: what is wrong, by where all ranks are; asked now and then.

        Raises:
            ShardwrightError: what it says; StuckError after the patience of a rank; or what has ended the run
                elsewhere.
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
        _moves, call, place = position.now
        at = Seen(
            call,
            position.program,
            place.what if place else "",
            place.ranks if place else (),
            place.key if place else "",
            time.monotonic() - self._heard,
            users_line(),
        )
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
        from ... import errors

        self.verdict = getattr(errors, kind)(text, legal=legal)
        place = position.place
        if place is not None and place.key:
            return  # it raises the error itself
        sys.stdout.flush()
        print(f"{type(self.verdict).__module__}.{kind}: {self.verdict}", file=sys.stderr, flush=True)
        self._linger(self._thread_store)
        os._exit(1)


#: The exit code of a process that saved and ended because of SIGTERM: 128 + 15, as a shell counts.
ENDED = 128 + signal.SIGTERM


class Ending:
    """Notes the signals that ask this process to end, from when it is made; to be made by the main thread of every
    rank.

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
        self._ends = 0  # the step that ends next, as far as is known
        self._lock = threading.Lock()  # of what the thread and the main thread both look at
        self._told = False  # whether the others have been told which step that is
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
        # A thread of Gloo's that lets go of the last collective's tensors once the interpreter is going brings the
        # process down (exit code 134, rarely): when all that the user does at the end is done, its threads are ended.
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
        with waiting(WaitPoint("the end of the run, as a signal asks", key="ending")):
            ranks.wait("ending/last")
        return int(ranks.store.get("ending/last"))


def _let_go() -> None:
    """Of the other ranks, where nothing is under way any more."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
