"""Times of steps by computation and exposed communication."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright import accelerators
from shardwright.runtime.distributed.watch import wait_times
from shardwright.runtime.distributed.watch.rank_positions import WaitPoint, noted, position, waiting
from shardwright.runtime.distributed.watch.wait_times import HostTimes, StepTimes, times_on

PLACE = WaitPoint("a message")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Clock:
        now = 0.0

    monkeypatch.setattr(wait_times.time, "perf_counter", lambda: Clock.now)
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


class Event:
    """An event of a device that is at `now`, in milliseconds; each queued event takes one."""

    now = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.synchronized = False

    def record(self) -> None:
        Event.now += 1.0
        self.at = Event.now

    def synchronize(self) -> None:
        self.synchronized = True

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


def test_a_device_is_asked_once_it_is_done(monkeypatch) -> None:
    monkeypatch.setattr(accelerators, "module_of", lambda device: type("module", (), {"Event": Event}))
    times = times_on(torch.device("cuda"))
    assert times is not None and not times.every_step
    times.begin()
    with waiting(PLACE):
        Event.now += 500.0
    monkeypatch.setattr(wait_times, "is_recording_graph", lambda: True)
    with waiting(PLACE):  # events of a recorded graph have no time
        Event.now += 100.0
    measured = times.end()
    found = measured.read()
    assert measured.ready.synchronized
    assert found == pytest.approx((0.102, 0.501, 1))


def test_a_step_that_does_not_end_is_not_kept(monkeypatch) -> None:
    monkeypatch.setattr(accelerators, "module_of", lambda device: type("module", (), {"Event": Event}))
    monkeypatch.setattr(wait_times, "MOST", 3)
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
