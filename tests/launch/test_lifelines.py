"""Lifelines: connections that the kernel closes when a process ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

from shardwright.launch import lifelines
from shardwright.launch.lifelines import Lifelines
from shardwright.launch.run_settings import bound


@pytest.fixture
def three() -> Iterator[list[Lifelines]]:
    """The lifelines of three ranks, here in one process: rank 0's and the others have found each other."""
    store = HashStore()
    made = [Lifelines(store, rank, 3, "127.0.0.1", False) for rank in range(3)]
    look(made, lambda: sorted(made[0]._lines) == [1, 2])
    yield made
    for lines in made:
        lines.forget()


def look(made: list[Lifelines], until) -> None:
    deadline = time.monotonic() + 60
    while not until():
        assert time.monotonic() < deadline
        for lines in reversed(made):
            lines.look()
        time.sleep(0.01)


def cut(lines: Lifelines) -> None:
    """The kernel does this when a process is killed."""
    for line in lines._lines.values():
        line.connection.close()
    lines._lines.clear()
    if lines._listener is not None:
        lines._listener.close()


def closed(connection: socket.socket) -> bool:
    """True where the other side has closed a connection that does not block."""
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_the_end_of_a_rank_is_noticed_by_rank_0_alone(three) -> None:
    cut(three[2])
    look(three[:2], lambda: three[0].ended)
    assert list(three[0].ended) == [2] and three[1].ended == {}
    name = f"process {os.getpid()} on the host {socket.gethostname()}"
    assert three[0].ended[2] == f"has ended without a word: {name} was killed, or has crashed"
    assert three[0].connected and three[1].connected


def test_the_end_of_rank_0_is_noticed_by_all(three) -> None:
    cut(three[0])
    look(three[1:], lambda: three[1].ended and three[2].ended)
    assert [list(lines.ended) for lines in three[1:]] == [[0], [0]]


def test_a_process_that_says_goodbye_has_not_ended_badly(three) -> None:
    three[1].goodbye()
    cut(three[1])
    cut(three[2])
    look(three[:1], lambda: three[0].ended)
    look(three[:1], lambda: not three[0]._lines)
    assert list(three[0].ended) == [2]


def test_an_exception_is_told_and_is_blamed_after_a_kill(three, monkeypatch) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError("boom\nmore"), raising=False)
    three[1].goodbye()
    look(three, lambda: three[0]._lines[1].reason)
    assert three[0].ended == {}, "the process has not ended yet, and its own log is to be the first"
    cut(three[1])
    look(three[:1], lambda: 1 in three[0].ended)
    assert three[0].ended[1].endswith("): ValueError: boom")
    cut(three[2])
    look(three[:1], lambda: 2 in three[0].ended)
    assert list(three[0].ended) == [2, 1]


def test_an_exception_of_an_earlier_cell_is_no_reason(monkeypatch) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError("of a notebook"), raising=False)
    lines = Lifelines(HashStore(), 0, 2, "127.0.0.1", False)
    assert lifelines._last_error(lines._earlier) == ""
    try:
        raise KeyError("now")
    except KeyError:
        assert lifelines._last_error(lines._earlier) == "KeyError: 'now'"
    lines.forget()


def test_strangers_are_turned_away(three) -> None:
    place = json.loads(three[0]._store.get(lifelines._KEY))
    key = place["key"]
    before = dict(three[0]._lines)
    for text in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\n",
        b"[]\n{}\n",
        b"[" * 4000 + b"\n",
        json.dumps({"key": "0" * 32, "rank": 1}).encode() + b"\n",
        json.dumps({"key": None, "rank": 1}).encode() + b"\n",
        json.dumps({"key": key, "rank": 3}).encode() + b"\n",
        json.dumps({"key": key, "rank": "1"}).encode() + b"\n",
        json.dumps({"key": key, "rank": 1}).encode() + b"\n",  # rank 1 is there
        b"x" * 10_000,
    ):
        with socket.create_connection(("127.0.0.1", place["port"])) as stranger:
            stranger.sendall(text)
            stranger.setblocking(False)
            if text:
                look(three[:1], lambda: closed(stranger))
            else:
                look(three[:1], lambda: three[0]._unnamed)
        look(three[:1], lambda: not three[0]._unnamed)
        assert three[0]._lines == before and three[0].ended == {}, text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_holds_no_line(three) -> None:
    """The line would stay open after the rank was killed."""
    ready, reported = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(reported, b"1" if any(line.connection.fileno() >= 0 for line in three[2]._lines.values()) else b"0")
        time.sleep(600)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"0"
        cut(three[2])
        look(three[:2], lambda: 2 in three[0].ended)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready), os.close(reported)


def test_without_a_port_the_ranks_go_on_without_lifelines(monkeypatch) -> None:
    def none(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(lifelines, "bound", none)
    store = HashStore()
    two = [Lifelines(store, rank, 2, "127.0.0.1", False) for rank in range(2)]
    for lines in two:
        lines.look()
    assert all(lines.connected and not lines._lines and not lines.ended for lines in two)
    monkeypatch.undo()
    with bound("127.0.0.1", 0, False) as held:  # nobody listens there
        store.set(lifelines._KEY, json.dumps({"port": held.getsockname()[1], "key": "", "name": ""}))
        late = Lifelines(store, 1, 2, "127.0.0.1", False)
        late.look()
        assert late.connected and not late._lines
