"""Positions of ranks: the rank that others wait for, the collective that a device has come to, the time at wait
points."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from shardwright import accelerators
from shardwright.runtime.distributed import rank_positions
from shardwright.runtime.distributed.rank_positions import (
    HostTimes,
    PassedPlaces,
    Seen,
    StepTimes,
    WaitPoint,
    not_moving,
    noted,
    position,
    spelled,
    times_on,
    waiting,
)


def at(place: str = "", ranks: tuple[int, ...] = (), call: int = 1) -> Seen:
    return Seen(call, "p", place, ranks, "", False, 60.0, "train.py:57 in main")


def test_the_blame_is_followed_to_the_rank_that_waits_for_nobody() -> None:
    """0 waits for 1, which waits for 3, which sleeps; 2 has nothing to do with it."""
    seen = {0: at("the gather of 'a'", (0, 1)), 1: at("the sum of 'b'", (1, 3)), 2: at(), 3: at()}
    reported = not_moving(seen, 4, 0)
    assert reported.startswith(
        "rank 3 has not come to the sum of 'b' in call 1; rank 1 waits there since 60 s\n"
        "  rank 3 is at train.py:57 in main, since call 1 began"
    )
    assert "rank 2" not in reported


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_are_spelled_as_ranges(ranks: set[int]) -> None:
    word, _, reported = spelled(ranks).partition(" ")
    assert word == ("rank" if len(ranks) == 1 else "ranks")
    read = [range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1) for part in reported.split(", ")]
    assert [r for run in read for r in run] == sorted(ranks)
    assert all(a[-1] + 1 < b[0] for a, b in zip(read, read[1:]))


@given(st.data())
def test_whoever_is_blamed_is_waited_for_and_waits_for_nobody(data) -> None:
    world = data.draw(st.integers(2, 6))
    groups = st.lists(st.integers(0, world - 1), min_size=1, unique=True)
    seen = {}
    for rank in range(world):
        if not data.draw(st.booleans()) or rank == 0:
            ranks = tuple(sorted({rank, *data.draw(groups)}))
            seen[rank] = at(f"the sum over {ranks}", ranks)
        elif data.draw(st.booleans()):
            seen[rank] = at()
    reported = not_moving(seen, world, 0)
    idle = [r for r in range(world) if r not in seen or not seen[r].place]
    blamed = re.match(r"ranks? ([\d, -]+) ha(?:s|ve) not come", reported)
    if blamed:
        for part in blamed[1].split(", "):
            for rank in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1):
                assert rank in idle
                assert any(rank in s.ranks for s in seen.values() if s.place)
    else:  # a circle, or nobody is missing: then whom rank 0 waits for waits itself
        assert all(r not in idle for r in seen[0].ranks)


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
    monkeypatch.setattr(rank_positions, "SIZE", 8)
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
    monkeypatch.setattr(rank_positions, "is_recording_graph", lambda: True)
    passed.note("in a graph", 0)
    assert not device.queued
    monkeypatch.setattr(rank_positions, "is_recording_graph", lambda: False)
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


PLACE = WaitPoint("a message")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Clock:
        now = 0.0

    monkeypatch.setattr(rank_positions.time, "perf_counter", lambda: Clock.now)
    return Clock


def took(clock: Any, seconds: float, value: Any = None) -> Any:
    clock.now += seconds
    return value


def test_a_host_waits_at_wait_points(clock) -> None:
    times = HostTimes()
    times.begin()
    took(clock, 1.0)
    with waiting(PLACE):
        took(clock, 10.0)
    (step,) = noted((lambda x: took(clock, 100.0, x + 1), lambda x: took(clock, 200.0, 2 * x)), PLACE)
    assert step(3) == 8
    took(clock, 2.0)
    measured = times.end()
    assert measured is not None and measured.ready is None
    assert measured.read() == StepTimes(3.0, 310.0, 2)
    with waiting(PLACE):
        took(clock, 10.0)
    assert measured.read() == StepTimes(3.0, 310.0, 2) and position.times == () and times.end() is None


def test_meetings_count_as_no_communication(clock) -> None:
    times = HostTimes()
    times.begin()
    with waiting(WaitPoint("the start of a program", key="start")):
        took(clock, 5.0)
    with waiting(PLACE):
        took(clock, 2.0)
    assert times.end().read() == StepTimes(5.0, 2.0, 1)


def test_a_wait_point_inside_of_another_counts_once(clock) -> None:
    times = HostTimes()
    times.begin()
    with waiting(PLACE):
        took(clock, 1.0)
        with waiting(PLACE):
            took(clock, 2.0)
        took(clock, 4.0)
    assert times.end().read() == StepTimes(0.0, 7.0, 1)


def test_a_step_may_begin_at_a_wait_point_and_a_message_may_fail(clock) -> None:
    times = HostTimes()
    with waiting(PLACE):
        times.begin()
        took(clock, 1.0)
    with pytest.raises(KeyError), waiting(PLACE):
        took(clock, 2.0)
        raise KeyError
    (failing,) = noted(({}.__getitem__,), PLACE)
    with pytest.raises(KeyError):
        failing(3)
    assert times.end().read() == StepTimes(1.0, 2.0, 2)


def test_two_measure_at_once_and_what_begins_again_is_forgotten(clock) -> None:
    one, other = HostTimes(), HostTimes()
    one.begin(), other.begin()
    with waiting(PLACE):
        took(clock, 1.0)
    other.begin()
    with waiting(PLACE):
        took(clock, 2.0)
    assert one.end().read() == StepTimes(0.0, 3.0, 2) and other.end().read() == StepTimes(0.0, 2.0, 1)


class TimedEvent:
    """An event of a device that is at `now`, in milliseconds; each queued event takes one."""

    now = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.synchronized = False

    def record(self) -> None:
        TimedEvent.now += 1.0
        self.at = TimedEvent.now

    def synchronize(self) -> None:
        self.synchronized = True

    def elapsed_time(self, other: TimedEvent) -> float:
        return other.at - self.at


def test_a_device_is_asked_once_it_is_done(monkeypatch) -> None:
    monkeypatch.setattr(accelerators, "module_of", lambda device: type("module", (), {"Event": TimedEvent}))
    times = times_on(torch.device("cuda"))
    assert times is not None and not times.every_step
    times.begin()
    with waiting(PLACE):
        TimedEvent.now += 500.0
    monkeypatch.setattr(rank_positions, "is_recording_graph", lambda: True)
    with waiting(PLACE):  # events of a recorded graph have no time
        TimedEvent.now += 100.0
    measured = times.end()
    found = measured.read()
    assert measured.ready.synchronized
    assert found == pytest.approx((0.102, 0.501, 1))


def test_a_step_that_does_not_end_is_not_kept(monkeypatch) -> None:
    monkeypatch.setattr(accelerators, "module_of", lambda device: type("module", (), {"Event": TimedEvent}))
    monkeypatch.setattr(rank_positions, "MOST", 3)
    times = times_on(torch.device("cuda"))
    times.begin()
    for _ in range(5):
        with waiting(PLACE):
            pass
    assert position.times == () and times.end() is None


def test_an_accelerator_without_events_is_not_measured(monkeypatch) -> None:
    monkeypatch.setattr(accelerators, "module_of", lambda device: object())
    assert times_on(torch.device("xpu")) is None
    assert isinstance(times_on(torch.device("cpu")), HostTimes)
