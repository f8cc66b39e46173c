"""The end of a process that was in a process group."""

from __future__ import annotations

import sys
import threading

import pytest

from shardwright import process_runtime as process


def test_a_thread_that_needs_the_interpreter_has_it_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread stands for one of Gloo, which frees the tensors of a collective that has returned."""
    freed: list[bool] = []
    returned = threading.Lock()
    returned.acquire()
    thread = threading.Thread(target=lambda: (returned.acquire(), freed.append(True)))
    monkeypatch.setattr(process, "_joined", [lambda: None])
    monkeypatch.setattr(process.time, "sleep", lambda seconds: thread.join())  # as long as it needs
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # the thread does not get the interpreter by itself
    try:
        thread.start()
        returned.release()
        assert not freed
        process._leave()
        assert freed
    finally:
        sys.setswitchinterval(interval)
        thread.join()
