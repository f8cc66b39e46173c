"""Side effects of a forward: its writes and prints besides its result.

During a capture the forward runs once, on tensors without values, and every change is undone. Each change is then one
of these:

    registered buffer holds another tensor   an update of the buffer, part of the program
    number that the forward counts up        the same steps at each call (`Counter` proves that nothing else reads it)
    number, string, tuple, ... assigned      assigned at each call; where it was read before, a guard checks it
    text printed or logged                   printed or logged at each call (`watched_calls`)
    any other change                         an error that names the line: tensors kept in attributes or lists,
                                             appended lists, Python's random numbers, hooks on tensors, hooks in the
                                             backward

Example of a counter: ``self.calls += 1``. The forward runs a second time with a `Counter` in place of ``calls``: an
integer that records each step added to it, and every other use of its value. Where the program is the same and there
was no other use, each call adds 1.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol, TypeGuard

import torch
from torch import nn

from ..errors import place_text
from ..identity_tables import IdentityMap, IdentitySet
from ..torch_private import buffer_table, part_tables
from .observed.places import CONTAINERS, MISSING, Entry, GuardedPlace, contents, is_simple, spelled
from .observed_state import Change, Observation
from .source_lines import is_users

__all__ = [
    "Blamed",
    "Counter",
    "Effects",
    "ForwardOutcome",
    "LineFinder",
    "Logged",
    "Printed",
    "TextStream",
    "advanced",
    "counter",
    "depends",
    "judged",
    "numbered",
]

_STATE = "a registered buffer (self.register_buffer) for state, or a further output of the forward"
_TABLE = f"{_STATE}; for a table that is made once, a call of the plain model before, or functools.lru_cache"


class Blamed(Exception):
    """A change that cannot be repeated at each call; the line of the change is looked for next.

    Args:
        message, legal: of the error.
        watch: called before the forward; returns a function that is True once the change has happened.
    """

    def __init__(self, message: str, legal: str, watch: Callable[[], Callable[[], bool]]) -> None:
        super().__init__(message)
        self.message, self.legal, self.watch = message, legal, watch


# -- effects at each call ----------------------------------------------------------------------------------------------


class TextStream(Protocol):
    """A stream to which texts are written: ``sys.stdout``, an open file."""

    def write(self, text: str, /) -> object: ...


@dataclass(frozen=True)
class Printed:
    """Text written to a stream: "stdout", "stderr", or a file of the user; and the line that has written it."""

    stream: str | TextStream
    text: str
    source: str | None = None

    def play(self) -> None:
        stream: TextStream = getattr(sys, self.stream) if isinstance(self.stream, str) else self.stream
        stream.write(self.text)

    def described(self) -> tuple[object, ...]:
        return "printed", self.stream if isinstance(self.stream, str) else f"file {id(self.stream)}", self.text


@dataclass(frozen=True)
class Logged:
    """A message given to a logger."""

    logger: logging.Logger
    level: int
    text: str
    name: str
    line: int

    def play(self) -> None:
        if self.logger.isEnabledFor(self.level):
            self.logger.handle(
                self.logger.makeRecord(self.logger.name, self.level, self.name, self.line, self.text, (), None)
            )

    def described(self) -> tuple[object, ...]:
        return "logged", self.logger.name, logging.getLevelName(self.level), self.text


@dataclass(frozen=True)
class _Assigned:
    """A value assigned to an attribute."""

    place: GuardedPlace
    value: object

    def play(self) -> None:
        self.place.set(self.value if is_simple(self.value) else copy.deepcopy(self.value))


@dataclass(frozen=True)
class _Advanced:
    """The steps of a counter."""

    place: GuardedPlace
    steps: tuple[float, ...]

    def play(self) -> None:
        value = self.place.get()
        assert isinstance(value, (int, float))
        for step in self.steps:
            value = value + step
        self.place.set(value)


Effect = Printed | Logged | _Assigned | _Advanced


@dataclass
class Effects:
    """The side effects of a captured forward at each call, in order.

    Attributes:
        entries: the effects.
        assigned: True where the assignments were made during the capture (`assign`).
    """

    entries: list[Effect] = field(default_factory=list)
    assigned: bool = False

    def play(self) -> None:
        """Repeat the effects."""
        for entry in self.entries:
            entry.play()

    def __deepcopy__(self, memo: dict[int, object]) -> Effects:
        """No effects: these belong to the captured model."""
        return Effects()

    def assign(self) -> None:
        """Make the assignments now, as the first call of the forward would."""
        self.assigned = True
        for entry in self.entries:
            if isinstance(entry, _Assigned):
                entry.place.set(entry.value)

    def described(self) -> list[tuple[object, ...]]:
        """A list to compare two captures of one model: texts with their streams in order, then sorted assignments."""
        return [described for described, _ in self._described()]

    def line_of(self, index: int) -> tuple[str, Callable[[], Callable[[], bool]] | None]:
        """The line of an effect by its index in `described`, "" where it is not known; and a function that starts to
        watch the place of an assignment, or None."""
        found = self._described()
        entry = found[index][1] if index < len(found) else None
        if isinstance(entry, (_Assigned, _Advanced)):
            return "", Change(entry.place, None, None).watch
        if isinstance(entry, Logged):
            return place_text(entry.name, entry.line), None
        return (entry.source or "") if isinstance(entry, Printed) else "", None

    def _described(self) -> list[tuple[tuple[object, ...], Effect]]:
        texts: list[tuple[tuple[object, ...], Effect]] = [
            (e.described(), e) for e in self.entries if isinstance(e, (Printed, Logged))
        ]
        writes = [
            ((type(e).__name__, e.place.path, repr(getattr(e, "value", None)), repr(getattr(e, "steps", None))), e)
            for e in self.entries
            if isinstance(e, (_Assigned, _Advanced))
        ]
        return texts + sorted(writes, key=lambda write: write[0])

    def advanced(self) -> list[GuardedPlace]:
        """The places of the counters."""
        return [e.place for e in self.entries if isinstance(e, _Advanced)]


# -- counters ----------------------------------------------------------------------------------------------------------


class _Trace:
    """The record of a counter: `used` is True once its value was used for more than a step."""

    def __init__(self, path: str) -> None:
        self.path, self.used = path, False


class Counter:
    """A number that records its steps; the base of `_Integer` and `_Float`, which have operators too."""

    trace: _Trace
    steps: tuple[float, ...]

    def plus(self, step: float) -> float:
        """The sum, as a counter where a number of the same kind is added."""
        if isinstance(self, float):
            plain: float = float.__float__(self)
        else:
            assert isinstance(self, int)
            plain = int.__index__(self)
        if type(step) is not int and type(step) is not _NUMBERS[type(self)]:
            self.trace.used = True
            return plain + step
        return counter(plain + step, self.trace, (*self.steps, step))

    def minus(self, step: float) -> float:
        """The difference, likewise."""
        if type(step) in (int, float):
            return self.plus(-step)
        self.trace.used = True
        return NotImplemented

    def __deepcopy__(self, memo: dict[int, object]) -> Counter:
        return self

    def __copy__(self) -> Counter:
        return self


class _Integer(Counter, int):
    pass


class _Float(Counter, float):
    pass


_NUMBERS: dict[type[Counter], type[float]] = {_Integer: int, _Float: float}


def _noting(name: str, kind: type) -> object:
    plain = getattr(kind, name)

    def asked(self: Counter, *args: object) -> object:
        self.trace.used = True
        return plain(self, *args)

    asked.__name__ = name
    return asked


for _made, _kind in _NUMBERS.items():
    for _name, _method in (("__add__", Counter.plus), ("__radd__", Counter.plus), ("__sub__", Counter.minus)):
        setattr(_made, _name, _method)
    for _name in (
        "__eq__",
        "__ne__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__hash__",
        "__bool__",
        "__int__",
        "__index__",
        "__float__",
        "__repr__",
        "__str__",
        "__format__",
        "__mul__",
        "__rmul__",
        "__floordiv__",
        "__rfloordiv__",
        "__truediv__",
        "__rtruediv__",
        "__mod__",
        "__rmod__",
        "__divmod__",
        "__rdivmod__",
        "__pow__",
        "__rpow__",
        "__rsub__",
        "__neg__",
        "__pos__",
        "__abs__",
        "__round__",
        "__trunc__",
        "__floor__",
        "__ceil__",
        "__and__",
        "__rand__",
        "__or__",
        "__ror__",
        "__xor__",
        "__rxor__",
        "__lshift__",
        "__rlshift__",
        "__rshift__",
        "__rrshift__",
        "__invert__",
        "is_integer",
        "hex",
        "bit_length",
    ):
        if hasattr(_kind, _name):
            setattr(_made, _name, _noting(_name, _kind))


def counter(value: float, trace: _Trace | str, steps: tuple[float, ...] = ()) -> _Float | _Integer:
    """A number equal to `value` that records its steps and uses."""
    made = _Float(value) if isinstance(value, float) else _Integer(value)
    made.trace, made.steps = _Trace(trace) if isinstance(trace, str) else trace, steps
    return made


def _counters_in(value: object) -> Iterator[Counter]:
    if isinstance(value, Counter):
        yield value
    elif isinstance(value, (tuple, *CONTAINERS)):
        for entry in contents(value):
            yield from _counters_in(entry)


# -- changes of a forward ----------------------------------------------------------------------------------------------


@dataclass
class ForwardOutcome:
    """The changes made by a forward.

    Attributes:
        updates: (the dict of buffers, name, path, new tensor) of assigned buffers.
        effects: the effects at each call.
        numbers: changed numbers: (place, old, new), possibly counters.
        texts: variables of the environment that were read and have changed: (place, new).
    """

    updates: list[tuple[dict[str, object], str, str, torch.Tensor]] = field(default_factory=list)
    effects: Effects = field(default_factory=Effects)
    numbers: list[tuple[GuardedPlace, float, float]] = field(default_factory=list)
    texts: list[tuple[GuardedPlace, str]] = field(default_factory=list)


def judged(seen: Observation, effects: Effects) -> ForwardOutcome:
    """The changes made by the last run of the forward.

    Args:
        seen: the observation of that run.
        effects: the texts that it has printed and logged.

    Raises:
        Blamed: a change that cannot be repeated at each call.
    """
    drawn = seen.drawn()
    if drawn is not None:
        raise Blamed(
            f"the forward draws a number from {drawn[0]}, which the captured program would repeat at each call",
            "torch.rand in the forward, or the number as an input",
            drawn[1],
        )
    outcome, done = ForwardOutcome(effects=Effects(list(effects.entries))), set()
    changes = list(seen.changes())
    modules = [m for _, m in seen.modules] if changes else []
    buffers = IdentitySet[object](map(buffer_table, modules))
    parts = IdentityMap[object, str]((table, kind) for m in modules for kind, table in part_tables(m).items())
    for change in changes:
        place, new = change.place, change.new
        done.add(place.identity)
        if place.owner in buffers:
            outcome.updates.append(_update(change))
        elif seen.is_hook(place):  # a hook for one call
            outcome.effects.entries.append(_Assigned(place, MISSING))
        elif place.owner in parts:
            what = parts[place.owner].removesuffix("s")
            raise Blamed(
                f"the forward replaces, adds or deletes its {what} {place.path}",
                "changes of the model outside of its forward",
                change.watch,
            )
        else:
            _written(change, new, outcome)
            if isinstance(place.key, Entry) and isinstance(new, str) and place.identity in seen.reads:
                outcome.texts.append((place, new))
    for place in seen.written.values():
        value = place.get()
        if place.identity not in done and value is not MISSING and is_simple(value) and not isinstance(value, Counter):
            outcome.effects.entries.append(_Assigned(place, value))
    return outcome


def _update(change: Change) -> tuple[dict[str, object], str, str, torch.Tensor]:
    place, old, new = change.place, change.old, change.new
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        what = "a buffer that it did not have" if not isinstance(old, torch.Tensor) else f"{spelled(new)} to its buffer"
        raise Blamed(
            f"the forward assigns {what}: {place.path}",
            "register_buffer, with a tensor of its shape and dtype, in the module's __init__",
            change.watch,
        )
    if (new.shape, new.dtype) != (old.shape, old.dtype):
        raise Blamed(
            f"the forward assigns a tensor of another shape or dtype to its buffer {place.path}: {new.dtype} "
            f"{list(new.shape)} for {old.dtype} {list(old.shape)}",
            "a buffer that keeps its shape and dtype",
            change.watch,
        )
    assert isinstance(place.owner, dict) and isinstance(place.key, str)
    return place.owner, place.key, place.path, new


def _written(change: Change, new: object, outcome: ForwardOutcome) -> None:
    place = change.place
    other = next((c for c in _counters_in(new) if c.trace.path != place.path), None)
    if other is not None:
        raise depends(GuardedPlace(place.owner, place.key, other.trace.path))
    if place.key is None:
        what = "a tensor is kept" if _holds_tensor(new) else "what it holds changes at each call"
        kind = {"ndarray": "numpy array"}.get(name := type(place.owner).__name__, name)
        legal = _STATE if isinstance(place.owner, CONTAINERS) else f"a number in its place (self.calls += 1); {_STATE}"
        raise Blamed(f"the forward changes {place.path}, a {kind}: {what}", legal, change.watch)
    if _holds_tensor(new):
        raise Blamed(
            f"the forward assigns a tensor to {place.path}, where the program would not put it", _TABLE, change.watch
        )
    if new is MISSING:
        raise Blamed(f"the forward deletes {place.path}", "a forward that leaves its attributes", change.watch)
    if _is_number(change.old) and _is_number(new):
        outcome.numbers.append((place, change.old, new))
    elif is_simple(new) or (isinstance(new, CONTAINERS) and _all_simple(new)):
        outcome.effects.entries.append(_Assigned(place, new))
    else:
        raise Blamed(
            f"the forward assigns {spelled(new)} to {place.path}, which the program would not do", _STATE, change.watch
        )


@dataclass
class NumberEffects:
    """The changed numbers of a forward, by kind.

    Attributes:
        counters: places whose number advances by the same steps at each call.
        read: (place, new number) of other numbers that were read before they were assigned.
    """

    counters: list[GuardedPlace] = field(default_factory=list)
    read: list[tuple[GuardedPlace, object]] = field(default_factory=list)


def numbered(
    outcome: ForwardOutcome, second: ForwardOutcome, counters: Mapping[GuardedPlace, Counter]
) -> NumberEffects:
    """Classify the changed numbers of a capture by a second capture with counters; add them to `outcome.effects`.

    Args:
        outcome: of the first capture.
        second: of the second capture.
        counters: place -> the counter that replaced its number in the second capture.

    Returns:
        The places by kind.

    Raises:
        Blamed: a number that is a counter and has another use.
    """
    found = {place.identity: new for place, _, new in second.numbers}
    numbers = NumberEffects()
    for place, old, new in outcome.numbers:
        end, was = found.get(place.identity), counters[place]
        if not isinstance(end, Counter):
            outcome.effects.entries.append(_Assigned(place, new))
            if was.trace.used:
                numbers.read.append((place, new))
        elif was.trace.used or (isinstance(old, int) and sum(end.steps) != new - old):
            raise depends(place)
        else:
            outcome.effects.entries.append(_Advanced(place, end.steps))
            numbers.counters.append(place)
    return numbers


def advanced(outcome: ForwardOutcome, counters: Mapping[GuardedPlace, Counter]) -> Effects | None:
    """The effects of a capture that ran with counters in place of the numbers known to be counters.

    Args:
        outcome: of the capture.
        counters: place -> its counter.

    Returns:
        None where another number has changed, or where the program depends on a counter.
    """
    ends: dict[tuple[int, object], float | None] = {place.identity: new for place, _, new in outcome.numbers}
    steps = [
        _Advanced(place, end.steps)
        for place, begun in counters.items()
        if isinstance(end := ends.pop(place.identity, None), (_Integer, _Float)) and not begun.trace.used
    ]
    return None if ends or len(steps) < len(counters) else Effects([*outcome.effects.entries, *steps])


def depends(place: GuardedPlace) -> Blamed:
    """The error of a number that changes at each call, and on which the program depends."""
    return Blamed(
        f"{place.path} changes at each call, and the forward depends on its value, which the program would repeat",
        "a registered buffer that counts (self.register_buffer), or counting outside of the forward",
        Change(place, None, None).watch,
    )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _holds_tensor(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (tuple, *CONTAINERS)):
        return any(map(_holds_tensor, contents(value)))
    attributes = getattr(value, "__dict__", None)
    return (
        isinstance(attributes, dict)
        and not isinstance(value, (nn.Module, type))
        and any(isinstance(entry, torch.Tensor) for entry in attributes.values())
    )


def _all_simple(container: Iterable[object]) -> bool:
    return all(is_simple(e) or (isinstance(e, CONTAINERS) and _all_simple(e)) for e in contents(container))


#: A function of `sys.settrace`; it returns that of the frame that begins.
_TraceFunction = Callable[[FrameType, str, object], "_TraceFunction | None"]


class LineFinder:
    """The user's line at which a change happens, found by a second run of the forward.

    Args:
        watch: called before the forward; returns a function that is True once the change has happened.
    """

    def __init__(self, watch: Callable[[], Callable[[], bool]]) -> None:
        self._watch, self._last = watch, ""
        self._before = sys.gettrace()
        self._changed: Callable[[], bool] = bool
        self.line: str | None = None

    def start(self) -> None:
        """Start tracing: the forward begins."""
        self._before, self._changed = sys.gettrace(), self._watch()
        sys.settrace(self._enter)

    def stop(self) -> None:
        """Stop tracing: the forward has ended."""
        self._look()
        sys.settrace(self._before)

    def _enter(self, frame: FrameType, event: str, arg: object) -> _TraceFunction | None:
        if not is_users(frame.f_code.co_filename):
            return None
        self._look()
        return self._inside

    def _inside(self, frame: FrameType, event: str, arg: object) -> _TraceFunction:
        self._look()
        at: FrameType | None = frame
        if event == "return":  # the caller continues
            at = frame.f_back
            while at is not None and not is_users(at.f_code.co_filename):
                at = at.f_back
        if at is not None:
            self._last = place_text(at.f_code.co_filename, at.f_lineno)
        return self._inside

    def _look(self) -> None:
        if self.line is None and self._last and self._changed():
            self.line = self._last
