"""Saving in the background, in one process: what it writes, what waits for it, and what goes wrong."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_runs import KINDS, steps, train, trained, unlocked
from fake_streams import on_fake_streams
from forked_python import fresh
from ranks import PATIENCE
from torch import nn

import shardwright as sw
from shardwright.checkpoint import manifest, save, tensor_files, writer
from shardwright.checkpoint.stored_checkpoint import StoredTensors
from shardwright.errors import CheckpointError


@KINDS
def test_a_background_save_has_the_values_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    model, optimizer = trained()
    gate, write = threading.Event(), writer.SaveJob.write
    monkeypatch.setattr(writer.SaveJob, "write", lambda job: (gate.wait(PATIENCE), write(job))[1])
    before = {n: t.clone() for n, t in model.state_dict().items()}
    held = sw.save_checkpoint(model, optimizer, tmp_path, step=1, integrated_save=whole, asynchronous=True)
    train(model, optimizer, 1, 2)
    assert not held.done and sw.latest_checkpoint(tmp_path) is None
    gate.set()
    stored = StoredTensors(held.wait())
    assert all(torch.equal(stored.read(f"model.{n}"), t) for n, t in before.items())
    assert not any(torch.equal(before[n], t) for n, t in model.state_dict().items())
    places = {key: tensor.data_ptr() for key, tensor in save._copies.items()}
    sw.save_checkpoint(model, optimizer, tmp_path, step=2, integrated_save=whole, asynchronous=True).wait()
    assert {key: tensor.data_ptr() for key, tensor in save._copies.items()} == places, "into the same memory"


def test_a_relative_path_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    gate, write = threading.Event(), writer.SaveJob.write
    monkeypatch.setattr(writer.SaveJob, "write", lambda job: (gate.wait(PATIENCE), write(job))[1])
    monkeypatch.chdir(tmp_path)
    held = sw.save_checkpoint(model, optimizer, "run", step=1, asynchronous=True)
    monkeypatch.chdir("/")
    gate.set()
    assert held.wait() == tmp_path / "run" / "step-00000001" and manifest.verify(held.path) == []


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event for which a save's thread waits before it copies the optimizer's state."""
    opens, complete = threading.Event(), save.HostCopies.complete
    monkeypatch.setattr(save.HostCopies, "complete", lambda made: (opens.wait(PATIENCE), complete(made))[1])
    return opens


@KINDS
def test_an_optimizer_steps_once_its_state_is_copied(tmp_path: Path, gate: threading.Event, whole: bool) -> None:
    """An optimizer's step makes the copies that the thread has not begun."""
    model, optimizer = trained()
    names = dict(model.named_parameters())
    before = {n: optimizer.state[p]["momentum_buffer"].clone() for n, p in names.items()}
    held = sw.save_checkpoint(model, optimizer, tmp_path, step=1, integrated_save=whole, asynchronous=True)
    train(model, optimizer, 1, 2)
    assert not held.done
    gate.set()
    stored = StoredTensors(held.wait())
    assert all(torch.equal(stored.read(f"optimizer.{n}.momentum_buffer"), t) for n, t in before.items())
    assert not any(torch.equal(optimizer.state[p]["momentum_buffer"], before[n]) for n, p in names.items())


def test_a_step_waits_for_a_copy_that_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, opens, waits, versions = threading.Event(), threading.Event(), threading.Event(), save._versions

    class Copied(threading.Event):
        """The event of complete copies, which says that the thread of the steps waits for it."""

        def wait(self, timeout: float | None = None) -> bool:
            if threading.current_thread() is stepping:
                waits.set()
            return super().wait(timeout)

    def slow(tensors: Any) -> Any:
        if threading.current_thread().name == "checkpoint of step 1":
            begun.set()
            opens.wait(PATIENCE)
        return versions(tensors)

    monkeypatch.setattr(save, "_versions", slow)
    monkeypatch.setattr(save, "threading", SimpleNamespace(**vars(threading) | {"Event": Copied}))
    model, optimizer = trained()
    stepping = threading.Thread(target=train, args=(model, optimizer, 1, 2))
    before = {n: optimizer.state[p]["momentum_buffer"].clone() for n, p in model.named_parameters()}
    held = sw.save_checkpoint(model, optimizer, tmp_path, step=1, asynchronous=True)
    assert begun.wait(PATIENCE)
    stepping.start()
    while stepping.is_alive() and not waits.is_set():
        time.sleep(0.01)
    waiting = stepping.is_alive() and any(p.grad is not None for p in model.parameters())
    opens.set()
    stepping.join()
    assert waiting, "the step waits, its backward does not"
    stored = StoredTensors(held.wait())
    assert all(torch.equal(stored.read(f"optimizer.{n}.momentum_buffer"), t) for n, t in before.items())


def test_state_that_something_else_changes_before_it_is_copied_is_an_error(
    tmp_path: Path, gate: threading.Event
) -> None:
    model, optimizer = trained()
    held = sw.save_checkpoint(model, optimizer, tmp_path, step=1, asynchronous=True)
    optimizer.state[model.get_parameter("layers.1.weight")]["momentum_buffer"].mul_(0.5)
    gate.set()
    with pytest.raises(CheckpointError, match=r"optimizer\.layers\.1\.weight\.momentum_buffer: it was changed while"):
        held.wait()
    assert unlocked(tmp_path) == set()
    sw.save_checkpoint(model, optimizer, tmp_path, step=1, asynchronous=True).wait()
    assert steps(tmp_path) == [1]


def test_state_of_an_optimizer_that_does_not_say_when_it_steps_is_copied_in_the_call(
    tmp_path: Path, gate: threading.Event
) -> None:
    class Own:
        """One with what a save reads, and steps of its own making."""

        def __init__(self, of: torch.optim.Optimizer) -> None:
            self.param_groups, self.state = of.param_groups, of.state

    model, optimizer = trained()
    weight = model.get_parameter("layers.1.weight")
    before = optimizer.state[weight]["momentum_buffer"].clone()
    held = sw.save_checkpoint(model, Own(optimizer), tmp_path, step=1, asynchronous=True)
    optimizer.state[weight]["momentum_buffer"].mul_(0.5)
    gate.set()
    assert torch.equal(StoredTensors(held.wait()).read("optimizer.layers.1.weight.momentum_buffer"), before)


def test_an_accelerator_copies_beside_its_work(tmp_path: Path, gate: threading.Event) -> None:
    """Only the compute stream waits: for parameters at once, for the optimizer's state before the next step."""
    model, optimizer = trained()
    before = {n: optimizer.state[p]["momentum_buffer"].clone() for n, p in model.named_parameters()}
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    save._copies.clear()
    with on_fake_streams(save) as fake:
        held = sw.save_checkpoint(model, optimizer, tmp_path, step=1, asynchronous=True)
        called = [line for line in fake.log if line != "pinned memory"]
        assert called == ["side waits for compute", "e1 on side", "e2 on side", "compute waits for e1"]
        assert fake.log.count("pinned memory") == len(save._copies)
        fake.log.clear()
        train(model, optimizer, 1, 2)
        assert fake.log == ["compute waits for e2"]  # and no wait of the host
        gate.set()
        stored = StoredTensors(held.wait())
        assert fake.log == ["compute waits for e2", "host waits for e2"]
        assert all(torch.equal(stored.read(f"optimizer.{n}.momentum_buffer"), t) for n, t in before.items())
        assert all(torch.equal(stored.read(f"model.{n}"), t) for n, t in values.items())
        places = {key: tensor.data_ptr() for key, tensor in save._copies.items()}
        fake.log.clear()
        saved = sw.save_checkpoint(model, optimizer, tmp_path, step=2, asynchronous=True)
        saved.wait()
        assert {key: tensor.data_ptr() for key, tensor in save._copies.items()} == places
        assert "pinned memory" not in fake.log
        # A change by anything but a step is seen, by the thread or by the step that comes first.
        for stepping in (False, True):
            gate.clear()
            held = sw.save_checkpoint(model, optimizer, tmp_path, step=3, asynchronous=True)
            optimizer.state[model.get_parameter("layers.1.weight")]["momentum_buffer"].mul_(0.5)
            if stepping:
                train(model, optimizer, 1, 2)
            gate.set()
            with pytest.raises(CheckpointError, match=r"layers\.1\.weight\.momentum_buffer: it was changed while"):
                held.wait()


def test_an_accelerator_without_streams_is_copied_in_the_call(tmp_path: Path, gate: threading.Event) -> None:
    model, optimizer = trained()
    before = {n: optimizer.state[p]["momentum_buffer"].clone() for n, p in model.named_parameters()}
    with on_fake_streams(save) as fake:
        fake.Stream = None
        held = sw.save_checkpoint(model, optimizer, tmp_path, step=1, asynchronous=True)
        train(model, optimizer, 1, 2)
        gate.set()
        stored = StoredTensors(held.wait())
    assert all(torch.equal(stored.read(f"optimizer.{n}.momentum_buffer"), t) for n, t in before.items())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux")
def test_the_thread_of_a_save_leaves_the_processor_to_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, write = [], writer.SaveJob.write
    monkeypatch.setattr(
        writer.SaveJob,
        "write",
        lambda job: (seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())), write(job))[1],
    )
    for asynchronous in (True, False):
        sw.save_checkpoint(nn.Linear(2, 2), path=tmp_path, step=1, asynchronous=asynchronous).wait()
    here = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert seen == [min(19, here + 10), here]


def test_without_a_thread_it_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    model, optimizer = trained()
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        held = sw.save_checkpoint(model, optimizer, tmp_path, step=1, asynchronous=True)
    assert held.done and manifest.verify(held.path) == [] and held.wait() == held.path
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
    train(model, optimizer, 1, 2)


def test_what_cannot_be_copied_is_an_error_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise MemoryError("no room for copies")

    monkeypatch.setattr(save, "HostCopies", full)
    with pytest.raises(CheckpointError, match="cannot be written: MemoryError: no room for copies"):
        sw.save_checkpoint(nn.Linear(2, 2), path=tmp_path, step=1, asynchronous=True)
    assert unlocked(tmp_path) == set()


def test_what_goes_wrong_in_the_background_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(2, 2)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "model.safetensors"))

    with monkeypatch.context() as patch:
        patch.setattr(tensor_files, "_put", full)
        first = sw.save_checkpoint(net, path=tmp_path, step=1, asynchronous=True)
        with pytest.raises(CheckpointError, match="model.safetensors: .*No space left"):
            first.wait()
        first.wait()
        sw.save_checkpoint(net, path=tmp_path, step=2, asynchronous=True)
        with pytest.raises(CheckpointError, match="No space left"):
            sw.save_checkpoint(net, path=tmp_path, step=3)
    sw.save_checkpoint(net, path=tmp_path, step=4)
    assert unlocked(tmp_path) == {"step-00000004"}


@pytest.mark.long
def test_the_end_of_the_interpreter_waits_for_it(tmp_path: Path) -> None:
    script = (
        "import atexit, sys, threading, time, torch, shardwright as sw\n"
        "from shardwright.checkpoint import writer\n"
        "write, began = writer.SaveJob.write, threading.Event()\n"
        "writer.SaveJob.write = lambda job: ("
        "began.set(), threading.main_thread().join(), time.sleep(0.5), write(job))\n"
        "saving = sw.save_checkpoint(torch.nn.Linear(2, 2), path=sys.argv[1], step=1, asynchronous=True)\n"
        "began.wait()\n"
        "atexit.register(lambda: print('written:', saving.done))\n"
        "writer.SaveJob.write = None\n"
    )
    done = fresh(script, str(tmp_path), timeout=PATIENCE)
    assert not done.returncode and "written: True" in done.stdout
    assert manifest.verify(sw.latest_checkpoint(tmp_path)) == []
    failed = script.replace("threading.main_thread().join()", "1 / 0").replace("writer.SaveJob.write = None\n", "")
    done = fresh(failed, str(tmp_path), timeout=PATIENCE)
    assert "the checkpoint in the background was not written: " in done.stderr and "division by zero" in done.stderr
