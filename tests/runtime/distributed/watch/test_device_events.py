"""The ring of events behind the host: what it keeps, and what it does not ask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright.runtime.distributed.watch import device_events
from shardwright.runtime.distributed.watch.device_events import PassedPlaces
from shardwright.runtime.distributed.watch.rank_positions import WaitPoint, noted, position, waiting


class Device:
    """A device that has reached the events up to number `reached`."""

    def __init__(self) -> None:
        self.queued = self.reached = self.made = self.asked = 0

    def event(self) -> Any:
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0

    def record(self) -> None:
        self.device.queued += 1
        self.at = self.device.queued

    def query(self) -> bool:
        self.device.asked += 1
        return self.at <= self.device.reached


def test_the_oldest_place_that_the_device_has_not_passed() -> None:
    device = Device()
    passed = PassedPlaces(device.event)
    assert passed.oldest() is None
    for call, place in enumerate("abc"):
        passed.note(place, call)
    assert device.asked == 0  # nothing is asked while nobody waits
    for reached, expected in ((0, ("a", 0)), (1, ("b", 1)), (2, ("c", 2))):
        device.reached = reached
        found = passed.oldest()
        assert found is not None and (found.place, found.call) == expected
    device.reached = 3
    assert passed.oldest() is None


def test_a_full_ring_keeps_the_oldest_and_makes_no_more_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_events, "SIZE", 8)
    device = Device()
    passed = PassedPlaces(device.event)
    for number in range(100):
        passed.note(number, 0)
    assert device.made == 8 and passed.oldest().place == 0
    device.reached = device.queued
    for number in range(100, 200):
        passed.note(number, 0)
        device.reached = device.queued
    assert device.made == 8 and passed.oldest() is None


def test_a_device_that_has_failed_and_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    passed = PassedPlaces(device.event)
    monkeypatch.setattr(device_events, "is_recording_graph", lambda: True)
    passed.note("in a graph", 0)
    assert not device.queued
    monkeypatch.setattr(device_events, "is_recording_graph", lambda: False)
    passed.note("a", 0)

    def failed(event: Event) -> bool:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(Event, "query", failed)
    assert passed.oldest() is None
    assert PassedPlaces.on(torch.device("cpu")) is None


def test_hosts_queue_an_event_at_each_place_that_they_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(position, "passed", PassedPlaces(device.event))
    (step,) = noted((lambda x: x + 1,), WaitPoint("the all_gather of w"))
    assert step(1) == 2 and position.passed.oldest().place.what == "the all_gather of w"
    with waiting(WaitPoint("the sum")):
        assert device.queued == 1  # behind the collective
    with waiting(WaitPoint("the start of a step", key="7")):
        pass
    assert device.queued == 2  # a meeting is the host's alone
