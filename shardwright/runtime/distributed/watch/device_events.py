"""The collective that an accelerator has come to, while the host is ahead of it.

The host queues a collective and goes on. At each wait point that the host leaves, an event is queued behind the
collective:

    host      … all_gather of fc1 ─ e1 ─ all_gather of fc2 ─ e2 ─ loss.item()
    device    … all_gather of fc1 ─ e1 ─ all_gather of fc2, which hangs

The oldest event that has not happened, e2, names the collective. Events are asked only by the watching thread, once a
rank has not moved for long or another rank asks; and where the ring is full. No event is queued into a recorded graph.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ....accelerators import event, is_accelerator, is_recording_graph

__all__ = ["Passed", "PassedPlaces"]

#: Events in the ring: as many kernels as an accelerator's queue takes before the host waits.
SIZE = 1024


class Passed(NamedTuple):
    """A wait point that the host has left."""

    place: Any
    call: int
    since: float  # time.monotonic() when the host left
    event: Any


class PassedPlaces:
    """The wait points that the host has left and the device may not have reached.

    Args:
        make: makes an event.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._queued: deque[Passed] = deque()
        self._free: list[Any] = []

    @classmethod
    def on(cls, device: torch.device) -> PassedPlaces | None:
        """The places of an accelerator; None for a device that does nothing behind the host's back, or has no
        events."""
        return cls(lambda: event(device)) if is_accelerator(device) and event(device) is not None else None

    def note(self, place: Any, call: int) -> None:
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
