"""The lock of a run's folder: one run at a time, and no dead run for ever."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import PATIENCE
from torch import nn

import shardwright as sw
from shardwright.checkpoint import checkpoint_folders
from shardwright.checkpoint.checkpoint_folders import LOCK, hold

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def another() -> Iterator[Callable[..., Any]]:
    """``another(act)``: a process that has done `act` and goes on running until the test kills it."""
    started = []

    def begun(act: Callable[[], None]) -> Any:
        done, text = FORK.Pipe(duplex=False)

        def run() -> None:
            try:
                act()
                text.send(None)
            except BaseException as error:
                text.send(f"{type(error).__name__}: {error}")
            time.sleep(600)

        process = FORK.Process(target=run, daemon=True)
        process.start()
        started.append(process)
        assert done.poll(120)
        assert (error := done.recv()) is None, error
        return process

    yield begun
    for process in started:
        process.kill()
        process.join()


def written(folder: Path, **words: Any) -> Path:
    """A lock that another process has written."""
    kept = {"host": "gpu3", "kernel": "another", "pid": 4711, "started": 1, "since": "2026-11-24 10:31", "id": "x"}
    (folder / LOCK).write_text(json.dumps(kept | words))
    return folder / LOCK


def mine(folder: Path) -> bool:
    return json.loads((folder / LOCK).read_text())["pid"] == os.getpid()


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path, another) -> None:
    first = another(lambda: save(tmp_path, 1))
    with pytest.raises(sw.CheckpointError) as raised:
        save(tmp_path, 2)
    assert re.fullmatch(
        rf"process {first.pid} on the host {re.escape(socket.gethostname())} saves into this folder since "
        r"\d{4}-\d\d-\d\d \d\d:\d\d",
        raised.value.message,
    )
    assert raised.value.source == str(tmp_path) and "a folder for each run" in raised.value.legal
    assert {name for name in os.listdir(tmp_path) if name != LOCK} == {"step-00000001"}, "nothing was begun"
    first.kill()
    first.join()
    save(tmp_path, 2)  # a run that was killed blocks nobody
    assert mine(tmp_path) and sw.latest_checkpoint(tmp_path).name == "step-00000002"


def save(folder: Path, step: int) -> None:
    kept.append(nn.Linear(2, 2))
    sw.save_checkpoint(kept[-1], None, folder, step=step)


kept: list[Any] = []


def test_a_process_that_is_another_one_of_the_same_number_is_dead(tmp_path) -> None:
    kernel, here = checkpoint_folders._kernel(), checkpoint_folders._started(os.getpid())
    model = nn.Linear(1, 1)
    written(tmp_path, kernel=kernel, pid=os.getpid(), started=here + 1)
    hold(tmp_path, model)
    assert mine(tmp_path)
    for pid in (None, "1", True):
        written(tmp_path, kernel=kernel, pid=pid)
        os.utime(tmp_path / LOCK, (1, 1))
        hold(tmp_path, model)
        assert mine(tmp_path)


class Clock:
    """The clock of the saves and of the file's server, which goes on while a save sleeps. Where it `beats`, the lock's
    holder touches the lock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lock: Path, beats: bool = False) -> None:
        self.now, self.touched, self.lock, self.beats = 0.0, 0.0, lock, beats
        self.begin = float(int(os.stat(lock).st_mtime))
        os.utime(lock, (self.begin, self.begin))
        monkeypatch.setattr(checkpoint_folders, "_now", lambda folder: self.begin + self.now)
        own = {"monotonic": lambda: self.now, "sleep": self.sleep}
        monkeypatch.setattr(checkpoint_folders, "time", SimpleNamespace(**vars(time) | own))

    def sleep(self, seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.01)
            return
        self.now += seconds
        if self.beats and self.now >= self.touched + checkpoint_folders.BEAT:
            self.touched = self.now
            os.utime(self.lock, (self.begin + self.now,) * 2)


@pytest.mark.parametrize("words", [b"", b"{", b"[]", b"[" * 4000, b'{"pid": "x"}'])
def test_a_lock_that_cannot_be_read_goes_by_its_age(tmp_path, words, monkeypatch) -> None:
    (tmp_path / LOCK).write_bytes(words)
    clock = Clock(monkeypatch, tmp_path / LOCK)
    hold(tmp_path, model := nn.Linear(1, 1))
    assert mine(tmp_path) and model is not None and clock.now > checkpoint_folders.SILENCE


def test_a_lock_of_another_host_is_good_as_long_as_it_is_touched(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint_folders, "_beating", [])  # a thread that has this clock
    lock = written(tmp_path)
    clock = Clock(monkeypatch, lock, beats=True)
    with pytest.raises(sw.CheckpointError, match="process 4711 on the host gpu3 saves into this folder since 2026"):
        hold(tmp_path, nn.Linear(1, 1))
    clock.beats, heard = False, clock.now
    hold(tmp_path, model := nn.Linear(1, 1))
    assert mine(tmp_path) and model is not None
    assert clock.now > heard + checkpoint_folders.SILENCE - checkpoint_folders.BEAT
    before = os.stat(lock).st_mtime_ns
    deadline = time.monotonic() + 60
    while os.stat(lock).st_mtime_ns == before:  # and so does this one, for others
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_clock_that_runs_ahead_makes_no_lock_dead(tmp_path, monkeypatch) -> None:
    """The age is the difference of two times of the file's server; this host's own clock is not asked."""
    lock = written(tmp_path)
    Clock(monkeypatch, lock, beats=True)
    monkeypatch.setattr(time, "time", lambda: 1e12)
    with pytest.raises(sw.CheckpointError, match="gpu3"):
        hold(tmp_path, nn.Linear(1, 1))


def test_a_holder_that_was_taken_for_dead_is_refused(tmp_path, another) -> None:
    model = nn.Linear(1, 1)
    hold(tmp_path, model)
    (tmp_path / LOCK).unlink()
    other = another(lambda: kept.append(nn.Linear(1, 1)) or hold(tmp_path, kept[-1]))
    with pytest.raises(sw.CheckpointError, match=f"process {other.pid} "):
        hold(tmp_path, model)


def test_the_lock_goes_with_the_last_model_and_not_before(tmp_path) -> None:
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    for model in (one, two, one):
        hold(tmp_path, model)
    del one, model
    gc.collect()
    assert mine(tmp_path)
    del two
    gc.collect()
    assert not (tmp_path / LOCK).exists()
    hold(tmp_path, three := nn.Linear(1, 1))
    (tmp_path / LOCK).unlink()  # with the folder, say
    hold(tmp_path, three)
    assert mine(tmp_path)


def test_a_forked_child_saves_under_its_parents_lock_and_does_not_release_it(tmp_path, another) -> None:
    model = nn.Linear(1, 1)
    hold(tmp_path, model)

    def save_and_end() -> None:
        assert not checkpoint_folders._locks
        hold(tmp_path, model)
        checkpoint_folders._release_all()

    another(save_and_end)
    assert mine(tmp_path)


def test_without_hard_links_the_lock_is_made_all_the_same(tmp_path, monkeypatch, another) -> None:
    def none(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", none)
    other = another(lambda: kept.append(nn.Linear(1, 1)) or hold(tmp_path, kept[-1]))
    with pytest.raises(sw.CheckpointError, match=f"process {other.pid} "):
        hold(tmp_path, nn.Linear(1, 1))


def test_of_several_runs_that_find_a_dead_ones_lock_one_gets_the_folder(tmp_path) -> None:
    def run(rounds: int, start: Any, answers: Any) -> None:
        models = []
        for number in range(rounds):
            start.wait()
            models.append(nn.Linear(1, 1))
            try:
                hold(tmp_path / str(number), models[-1])
                answers.put((number, True))
            except sw.CheckpointError:
                answers.put((number, False))
        start.wait()  # none ends before the last has asked

    runs, rounds = 3, 20
    for number in range(rounds):
        (tmp_path / str(number)).mkdir()
        written(tmp_path / str(number), kernel=checkpoint_folders._kernel(), pid=2**22 + 1)
    start, answers = FORK.Barrier(runs), FORK.Queue()
    processes = [FORK.Process(target=run, args=(rounds, start, answers), daemon=True) for _ in range(runs)]
    for process in processes:
        process.start()
    got = [answers.get(timeout=PATIENCE) for _ in range(runs * rounds)]
    for process in processes:
        process.join(60)
    assert [sum(won for number, won in got if number == n) for n in range(rounds)] == [1] * rounds
