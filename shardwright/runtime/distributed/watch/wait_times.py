"""The time of a step by computation and exposed communication, as this rank measures it.

    exposed communication    the time at wait points (`rank_positions`): redistributions with the copies around their
                             messages, sums of gradients, their norms and GradScaler's check, messages between
                             stages and the wait for other stages
    computation              the rest of the step

    HostTimes      the host itself waits: one clock
    DeviceTimes    the host queues a collective and goes on: an event before and one after each wait point, on the
                   queue that computes. Between them the device stands still, until what was sent is there

Communication beside computation has no wait point until something asks for its result, and counts from there on.
Nothing is measured between `end` and the next `begin`: a wait point then costs a look at an empty tuple. A program that
torch.compile has compiled has no wait points.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ....accelerators import event, is_accelerator, is_recording_graph
from .rank_positions import position

__all__ = ["DeviceTimes", "HostTimes", "MeasuredStep", "StepTimes", "WaitTimes", "times_on"]

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
    ready: Any = None


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

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self._make = make

    def _now(self) -> Any:
        made = self._make()
        made.record()
        return made

    def _start(self) -> None:
        self._first, self._came = self._now(), None
        self._pairs: list[tuple[Any, Any]] = []

    def _end(self) -> MeasuredStep:
        first, last, pairs = self._first, self._now(), self._pairs

        def read() -> StepTimes:
            last.synchronize()
            exposed = sum(came.elapsed_time(left) for came, left in pairs) / 1e3
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
