"""Lines that a monitor writes; a monitor does not wait for losses."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
import torch
from small_networks import D, draw, labels
from torch import nn

import shardwright as sw
from shardwright import monitor as room, process_runtime as process

MEMORY_FIGURES = room.memory_figures


class Clock:
    """A clock that goes on by a given time at each step of the monitor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds
        monkeypatch.setattr(room.time, "perf_counter", self)

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


@pytest.fixture(autouse=True)
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines without the memory of this process, which differs from run to run."""
    monkeypatch.setattr(room, "memory_figures", lambda device, plan: [])


def written(out: io.StringIO) -> list[str]:
    return out.getvalue().splitlines()


def test_lines_tell_the_mean_loss_and_how_fast_steps_are(monkeypatch) -> None:
    Clock(monkeypatch, 0.25)
    out = io.StringIO()
    with sw.Monitor(every=4, samples=32, tokens=2048, out=out) as monitor:
        for step in range(9):
            monitor.step(torch.tensor(float(step), requires_grad=True), lr=0.5)
    assert written(out) == [
        "step 3  loss 1.5  lr 0.5  4 steps/s  128 samples/s  8,192 tokens/s",
        "step 7  loss 5.5  lr 0.5  4 steps/s  128 samples/s  8,192 tokens/s",
    ]


def test_the_first_step_which_plans_counts_in_no_rate(monkeypatch) -> None:
    clock = Clock(monkeypatch, 100.0)
    out = io.StringIO()
    monitor = sw.Monitor(every=3, out=out)
    monitor.step(1.0)
    clock.seconds = 0.5
    monitor.step(1.0), monitor.step(1.0)
    assert written(out) == ["step 2  loss 1  2 steps/s"]


def test_numbers_of_steps_go_on_after_a_resumption(monkeypatch) -> None:
    Clock(monkeypatch, 1.0)
    out = io.StringIO()
    monitor = sw.Monitor(every=10, out=out)
    for step in range(105, 121):
        monitor.step(2.0, step)
    assert [line.split("  ")[0] for line in written(out)] == ["step 109", "step 119"]


@pytest.mark.parametrize("stages", [1, 2])
def test_the_work_of_a_model_is_that_of_the_whole_batch_on_one_device(monkeypatch, stages: int) -> None:
    Clock(monkeypatch, 1e-6)
    sw.init(devices=4)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16, bias=False, dtype=D), nn.Linear(16, 8, bias=False, dtype=D))
    model = sw.AutoParallel(net, nn.CrossEntropyLoss())
    if stages > 1:
        model.pipeline(stages=2, micro_batches=4)
        sw.set_stage(net[0], 0), sw.set_stage(net[1], 1)
    model(draw(64, 8), labels(64)).backward()
    out = io.StringIO()
    monitor = sw.Monitor(model, every=2, out=out)
    monitor.step(1.0), monitor.step(1.0)
    # Two products of 2·64·8·16, forward, and by the weight backward; by what came in too, but for what is fed.
    flops = 2 * 64 * 8 * 16 * (2 + 2 + 1)
    assert f"{flops / 1e-6 / 1e12:,.3g} TFLOP/s" in written(out)[0]


def test_other_ranks_are_silent(monkeypatch) -> None:
    monkeypatch.setattr(process, "_current", [process.Runtime(True, 2, 1, torch.device("cpu"))])
    out = io.StringIO()
    monitor = sw.Monitor(every=1, out=out)
    monitor.step(1.0), monitor.close()
    assert out.getvalue() == ""


def test_a_loss_is_not_waited_for(monkeypatch) -> None:
    """A line is written when the copy of its loss is there, at the latest with the next one or at the end."""

    class Event:
        there = False

        def query(self) -> bool:
            return self.there

        def synchronize(self) -> None:
            self.there = True

    Clock(monkeypatch, 1.0)
    out, events = io.StringIO(), []
    monitor = sw.Monitor(every=2, out=out)
    line = monitor._line

    def with_event(*args: Any) -> Any:
        made = line(*args)
        made.ready = Event()
        events.append(made.ready)
        return made

    monkeypatch.setattr(monitor, "_line", with_event)
    monitor.step(1.0), monitor.step(1.0)
    assert written(out) == []
    monitor.step(1.0)
    assert written(out) == []
    events[0].there = True
    monitor.step(1.0)
    assert len(written(out)) == 1
    monitor.step(1.0), monitor.step(1.0)
    assert len(written(out)) == 2, "the one before is waited for: never more than one is open"
    monitor.close()
    assert [text.split("  ")[0] for text in written(out)] == ["step 1", "step 3", "step 5"]


def test_a_step_may_have_numbers_of_its_own(monkeypatch) -> None:
    """Samples and tokens are those of the steps since the last line; the first step counts in no rate."""
    Clock(monkeypatch, 0.5)
    out = io.StringIO()
    with sw.Monitor(every=3, samples=4, out=out) as monitor:
        for tokens in (1000, 10, 20, 30, 40, 50):
            monitor.step(tokens=tokens)
    assert written(out) == [
        "step 2  2 steps/s  8 samples/s  30 tokens/s",
        "step 5  2 steps/s  8 samples/s  80 tokens/s",
    ]


def test_what_is_no_training_is_left_out_of_rates(monkeypatch) -> None:
    clock = Clock(monkeypatch, 1.0)
    out = io.StringIO()
    monitor = sw.Monitor(every=4, out=out)
    monitor.leave_out()  # nothing has begun
    monitor.step(), monitor.step()
    clock.now += 500.0
    monitor.leave_out()
    clock.now += 500.0
    monitor.leave_out()
    monitor.step()
    began = clock()
    clock.now += 500.0
    monitor.leave_out(began)
    monitor.step()
    assert clock.now < 2100.0
    assert written(out) == ["step 3  0.75 steps/s"]  # 3 steps in 4 s, one of them for this test's own question


def test_the_most_memory_is_on_the_line() -> None:
    room.memory_figures = MEMORY_FIGURES  # undone by the fixture
    out = io.StringIO()
    with sw.Monitor(every=1, out=out) as monitor:
        monitor.step(1.0)
    assert re.fullmatch(r"step 0  loss 1  peak [\d.]+ [MG]iB resident", written(out)[0])


@pytest.mark.parametrize("every", [0, 1.5, True])
def test_every_is_a_number_of_steps(every: Any) -> None:
    with pytest.raises(sw.SettingError, match="at least 1"):
        sw.Monitor(every=every)
