"""The position of each rank, the rank that others wait for, and the time at wait points.

1. Position (`RankPosition`, `WaitPoint`). A rank notes its position while it runs, and a thread of the process reads
   it. A note is two assignments: nothing is sent, and a collective that is under way can be named from outside of it.

2. The missing rank (`not_moving`), derived from the positions of all ranks:

    r waits for q       r is at a wait point that q takes part in, and q is not there
    a culprit           a rank that others wait for and that waits for none: it is elsewhere, or does not answer
    a circle            ranks that wait for one another at different wait points: they run different programs

Following the waits of any rank leads to culprits, or round a circle.

3. The collective that an accelerator has come to, while the host is ahead of it (`PassedPlaces`). The host queues a
   collective and goes on. At each wait point that the host leaves, an event is queued behind the collective:

    host      … all_gather of fc1 ─ e1 ─ all_gather of fc2 ─ e2 ─ loss.item()
    device    … all_gather of fc1 ─ e1 ─ all_gather of fc2, which hangs

   The oldest event that has not happened, e2, names the collective. Events are asked only by the watching thread, once
   a rank has not moved for long or another rank asks; and where the ring is full. No event is queued into a recorded
   graph.

4. The time of a step by computation and exposed communication, as this rank measures it (`times_on`).

    exposed communication    the time at wait points: redistributions with the copies around their messages, sums of
                             gradients, their norms and GradScaler's check, messages between stages and the wait for
                             other stages
    computation              the rest of the step

    HostTimes                the host itself waits: one clock
    DeviceTimes              the host queues a collective and goes on: an event before and one after each wait point, on
                             the queue that computes. Between them the device stands still, until what was sent is there

   Communication beside computation has no wait point until something asks for its result, and counts from there on.
   Nothing is measured between `end` and the next `begin`: a wait point then costs a look at an empty tuple. A program
   that torch.compile has compiled has no wait points.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch

from ...accelerators import event, is_accelerator, is_recording_graph
from ...errors import PACKAGE_FOLDER
from ...json_files.json_reader import JsonObject

__all__ = [
    "DeviceTimes",
    "Event",
    "HostTimes",
    "MeasuredStep",
    "Passed",
    "PassedPlaces",
    "RankPosition",
    "Seen",
    "StepTimes",
    "WaitPoint",
    "WaitTimes",
    "explaining",
    "not_moving",
    "noted",
    "position",
    "spelled",
    "times_on",
    "users_line",
    "waiting",
]


# -- the collective that a device has come to


#: Events in the ring: as many kernels as an accelerator's queue takes before the host waits.
SIZE = 1024


class Event(Protocol):
    """An event of an accelerator; `elapsed_time` of one that is timed."""

    def record(self) -> object: ...

    def query(self) -> bool: ...

    def synchronize(self) -> object: ...

    def elapsed_time(self, end: Event, /) -> float: ...


class Passed(NamedTuple):
    """A wait point that the host has left."""

    place: WaitPoint
    call: int
    since: float  # time.monotonic() when the host left
    event: Event


class PassedPlaces:
    """The wait points that the host has left and the device may not have reached.

    Args:
        make: makes an event.
    """

    def __init__(self, make: Callable[[], Event]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._queued: deque[Passed] = deque()
        self._free: list[Event] = []

    @classmethod
    def on(cls, device: torch.device) -> PassedPlaces | None:
        """The places of an accelerator; None for a device that does nothing behind the host's back, or has no
        events."""
        return cls(lambda: event(device)) if is_accelerator(device) and event(device) is not None else None

    def note(self, place: WaitPoint, call: int) -> None:
        """Queue an event at a wait point that the host leaves in its call number `call`."""
        if is_recording_graph():
            return
        with self._lock:
            if len(self._queued) >= SIZE:
                self._retire()
            if len(self._queued) < SIZE:  # else the oldest ones, which are asked for, stay
                made = self._free.pop() if self._free else self._make()
                made.record()
                self._queued.append(Passed(place, call, time.monotonic(), made))

    def oldest(self) -> Passed | None:
        """The first wait point that the device has not passed; None where it has passed all, or cannot be asked."""
        with self._lock:
            try:
                self._retire()
            except RuntimeError:  # the device itself has failed, which the library reports
                return None
            return self._queued[0] if self._queued else None

    def _retire(self) -> None:
        while self._queued and self._queued[0].event.query():
            self._free.append(self._queued.popleft().event)


# -- the time at wait points


#: Wait points of one step of which an accelerator's events are kept. A step with more is not measured: it does not end.
MOST = 1 << 16


class StepTimes(NamedTuple):
    """A step in two parts, in seconds.

    Attributes:
        computation, exposed: the parts.
        waits: the number of wait points.
    """

    computation: float
    exposed: float
    waits: int


class MeasuredStep(NamedTuple):
    """A step that has been measured.

    Attributes:
        read: returns its times, waiting for the device.
        ready: the event after which the device is not waited for; None: it never is.
    """

    read: Callable[[], StepTimes]
    ready: object = None


class WaitTimes(ABC):
    """Measures the steps of a rank, one after the other.

    Attributes:
        every_step: True where a step is measured at so little cost that every one may be.
    """

    every_step = True

    def __init__(self) -> None:
        self._depth = 0  # a wait point may be inside of another
        self._begun = False

    def begin(self) -> None:
        """Begin a step; one that has begun and not ended is forgotten."""
        self.stop()
        self._depth, self._begun = 0, True
        self._start()
        position.times = (*position.times, self)

    def stop(self) -> None:
        """Measure nothing from now on."""
        self._begun = False
        position.times = tuple(other for other in position.times if other is not self)

    def end(self) -> MeasuredStep | None:
        """End the step; None where none has begun."""
        begun = self._begun
        self.stop()
        return self._end() if begun else None

    def come(self) -> None:
        """Come to a wait point."""
        self._depth += 1
        if self._depth == 1:
            self._come()

    def leave(self) -> None:
        """Leave a wait point; one at which the rank was before the step began does not count."""
        if self._depth:
            self._depth -= 1
            if not self._depth:
                self._leave()

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _end(self) -> MeasuredStep: ...

    @abstractmethod
    def _come(self) -> None: ...

    @abstractmethod
    def _leave(self) -> None: ...


class HostTimes(WaitTimes):
    """Times by the host's clock."""

    def _start(self) -> None:
        self._since, self._exposed, self._waits = time.perf_counter(), 0.0, 0

    def _end(self) -> MeasuredStep:
        computation = time.perf_counter() - self._since - self._exposed
        found = StepTimes(computation, self._exposed, self._waits)
        return MeasuredStep(lambda: found)

    def _come(self) -> None:
        self._came = time.perf_counter()

    def _leave(self) -> None:
        self._exposed += time.perf_counter() - self._came
        self._waits += 1


class DeviceTimes(WaitTimes):
    """Times by events of an accelerator.

    Args:
        make: makes an event that can be timed.
    """

    every_step = False

    def __init__(self, make: Callable[[], Event]) -> None:
        super().__init__()
        self._make = make
        self._came: Event | None = None

    def _now(self) -> Event:
        made = self._make()
        made.record()
        return made

    def _start(self) -> None:
        self._first, self._came = self._now(), None
        self._pairs: list[tuple[Event, Event]] = []

    def _end(self) -> MeasuredStep:
        first, last, pairs = self._first, self._now(), self._pairs

        def read() -> StepTimes:
            last.synchronize()
            exposed = sum(came.elapsed_time(ended) for came, ended in pairs) / 1e3
            return StepTimes(first.elapsed_time(last) / 1e3 - exposed, exposed, len(pairs))

        return MeasuredStep(read, last)

    def _come(self) -> None:
        self._came = None if is_recording_graph() else self._now()

    def _leave(self) -> None:
        if self._came is None or is_recording_graph():
            return
        self._pairs.append((self._came, self._now()))
        if len(self._pairs) == MOST:
            self.stop()


def times_on(device: torch.device) -> WaitTimes | None:
    """The way to measure steps on a device; None: an accelerator whose events have no time."""
    if not is_accelerator(device):
        return HostTimes()
    return DeviceTimes(lambda: event(device, timed=True)) if event(device, timed=True) is not None else None


# -- positions


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
        back: True where the rank has come to a wait point of a backward since the latest call began. A pipeline's step
            does not count; the backward of its loss does.
        passed: the wait points that the host has left and the device may not have; None without an accelerator.
        explain: the error of a failed collective -> the reason, or None where there is no better one; None: nobody
            knows more.
        times: what measures the time at wait points (`rank_positions.WaitTimes`); most often empty.
    """

    __slots__ = ("back", "call", "explain", "moves", "passed", "place", "program", "times")

    def __init__(self) -> None:
        self.place: WaitPoint | None = None
        self.moves = self.call = 0
        self.back = False
        self.program = ""
        self.passed: PassedPlaces | None = None
        self.explain: Callable[[Exception], Exception | None] | None = None
        self.times: tuple[WaitTimes, ...] = ()

    @property
    def now(self) -> tuple[int, int, WaitPoint | None]:
        """A value that changes whenever the rank moves."""
        return self.moves, self.call, self.place

    def come(self) -> None:
        """Tell `times` that the rank has come to a wait point."""
        for each in self.times:
            each.come()

    def leave(self) -> None:
        """Tell `times` that the rank has left it."""
        for each in self.times:
            each.leave()


#: The position of this process.
position = RankPosition()


class waiting:
    """While active, this rank is at `place`.

    Args:
        place: the wait point.
        of_messages: True for an error of messages between ranks, which is `explained`; None: each RuntimeError is one.
            A search for the reason takes seconds.
    """

    __slots__ = ("of_messages", "place")

    def __init__(self, place: WaitPoint, of_messages: Callable[[Exception], bool] | None = None) -> None:
        self.place, self.of_messages = place, of_messages

    def __enter__(self) -> None:
        position.place = self.place
        position.moves += 1
        position.back |= self.place.back
        if position.times and not self.place.key:  # a meeting is not part of a step
            position.come()

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        try:
            if isinstance(error, RuntimeError) and (self.of_messages is None or self.of_messages(error)):
                explained(error)
        finally:
            position.place = None
            if position.times and not self.place.key:
                position.leave()
        if position.passed is not None and not self.place.key:
            position.passed.note(self.place, position.call)


def explained(error: RuntimeError) -> None:
    """Raise the reason for which a collective has failed, where the watch of the ranks knows one: torch's own error
    says that a connection is closed, and not whose process has ended."""
    reason = None if position.explain is None else position.explain(error)
    if reason is not None:
        raise reason from error


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """While active, the failure of a message between ranks is `explained`. Unlike a wait point, the messages may take
    as long as a search takes."""
    try:
        yield
    except RuntimeError as error:
        explained(error)
        raise


def noted(steps: Sequence[Callable[[Any], Any]], place: WaitPoint) -> tuple[Callable[[Any], Any], ...]:
    """The steps of a redistribution as one function, which is at `place` while it runs."""
    steps, back = tuple(steps), place.back

    def run(x: object) -> object:  # not `waiting`, which takes longer
        position.place = place
        position.moves += 1
        if back:
            position.back = True
        if position.times:
            position.come()
        try:
            for step in steps:
                x = step(x)
            return x
        except RuntimeError as error:
            explained(error)
            raise
        finally:
            position.place = None
            if position.times:
                position.leave()
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
        back: True where the wait point is part of a backward.
        seconds: since the rank last moved.
        line: of the user's program: ``train.py:57 in main``.
    """

    call: int
    program: str
    place: str
    ranks: tuple[int, ...]
    key: str
    back: bool
    seconds: float
    line: str

    def encode(self) -> dict[str, object]:
        """The position as a JSON document."""
        return asdict(self)

    @classmethod
    def of(cls, encoded: JsonObject) -> Seen:
        """The position from the document."""
        return cls(**{**encoded, "ranks": tuple(encoded["ranks"])})


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
    for culprit, waiting_ranks in sorted(culprits.items()):
        first = seen[waiting_ranks[0]]
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
