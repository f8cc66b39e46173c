"""Lines that a monitor writes; a monitor does not wait for losses."""

from __future__ import annotations

import io
import re
import sys
import types
from typing import Any, ClassVar

import pytest
import torch
from small_networks import D, draw, labels
from torch import nn

import shardwright as sw
from shardwright import monitor as room, process as runtime_init


class Clock:
    """A clock that goes on by a given time at each step of the monitor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds
        monkeypatch.setattr(room.time, "perf_counter", self)

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


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
    monkeypatch.setattr(runtime_init, "_current", [runtime_init.Runtime(True, 2, 1, torch.device("cpu"))])
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


class Writer:
    """The part of TensorBoard's writer that is used."""

    made: ClassVar[list[Writer]] = []

    def __init__(self, folder: str) -> None:
        self.folder, self.scalars, self.closed = folder, [], False
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        self.closed = True


def test_tensorboard_gets_what_the_lines_say(monkeypatch, tmp_path) -> None:
    Clock(monkeypatch, 0.5)
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with sw.Monitor(every=2, tensorboard=tmp_path, out=io.StringIO()) as monitor:
        monitor.step(1.0), monitor.step(3.0, lr=0.1)
    writer = Writer.made[-1]
    assert writer.folder == str(tmp_path) and writer.closed
    assert writer.scalars == [("loss", 2.0, 1), ("lr", 0.1, 1), ("throughput/steps_per_s", 2.0, 1)]


def test_tensorboard_reads_it(tmp_path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with sw.Monitor(every=2, tensorboard=tmp_path, out=io.StringIO()) as monitor:
        for loss in (1.0, 3.0, 5.0, 7.0):
            monitor.step(torch.tensor(loss), lr=0.1)
    found = reading.EventAccumulator(str(tmp_path))
    found.Reload()
    assert sorted(found.Tags()["scalars"]) == ["loss", "lr", "throughput/steps_per_s"]
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(1, 2.0), (3, 6.0)]


def test_without_tensorboard_a_line_says_so(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    out = io.StringIO()
    with sw.Monitor(every=1, tensorboard=tmp_path, out=out) as monitor:
        monitor.step(1.0)
    assert written(out)[0].startswith("TensorBoard is not installed") and re.match("step 0  loss 1", written(out)[1])


@pytest.mark.parametrize("every", [0, 1.5, True])
def test_every_is_a_number_of_steps(every: Any) -> None:
    with pytest.raises(sw.SettingError, match="at least 1"):
        sw.Monitor(every=every)
