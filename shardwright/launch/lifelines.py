"""Lifelines: rank 0 notices the end of every other rank's process, and they notice the end of its process.

Each rank holds a connection to rank 0 open, over which it sends nothing while it runs. The kernel closes the connection
when the process ends, whatever ended it: SIGKILL, a crash, the end of the memory.

    rank 0          listens at the address of the rendezvous, and tells the port and a key through the run's store
    rank k          connects, and sends the key, its rank, its process and its host
    at its end      a process that ends by itself says goodbye, with its exception if it has one
    no goodbye      the process was killed, or has crashed
    a lost host     answers no probe of the kernel for a minute, which closes the connection

A process that ends by ``os._exit`` says nothing. A forked child, such as a worker of a DataLoader, closes its copies of
the connections: they would stay open when the rank is killed. No thread belongs to this: the ranks' watchdog calls
`look` once a second.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import json
import multiprocessing
import multiprocessing.util
import os
import secrets
import socket
import sys
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from .run_settings import bound

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["Lifelines"]

_KEY = "shardwright/lifeline"
_CONNECT = 2.0  # seconds to connect to rank 0
_NAMED = 10.0  # seconds in which a connection has to name its rank
_LONGEST = 4096  # bytes of a message

_made: weakref.WeakSet[Lifelines] = weakref.WeakSet()


class _Line:
    """One connection, and the bytes of it that make no whole message yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.since, self.unread = connection, time.monotonic(), b""
        self.name = ""  # the process and host of the other side
        self.reason: str | None = None  # of its end, as its goodbye gives it; "": none; None: no goodbye yet
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def read(self) -> tuple[list[dict[str, object]], bool]:
        """The messages that have come, and True where the other side has ended."""
        ended = False
        try:
            while part := self.connection.recv(_LONGEST):
                self.unread += part
                if len(self.unread) > _LONGEST:
                    return [], True
            ended = True
        except BlockingIOError:
            pass
        except OSError:  # reset, or no answer to the kernel's probes
            ended = True
        *whole, self.unread = self.unread.split(b"\n")
        return [_message(line) for line in whole], ended

    def write(self, message: dict[str, object]) -> None:
        with contextlib.suppress(OSError):  # the other side has ended
            self.connection.send(json.dumps(message).encode() + b"\n")


class Lifelines:
    """The lifelines of one rank.

    Args:
        store: of the run; all ranks have it.
        rank, world: of this process, and the number of ranks.
        address: at which the others look for rank 0's host.
        several: True where ranks may be on several hosts.

    Attributes:
        ended: rank -> how its process ended, for those that ended without a goodbye or with an exception; those without
            a goodbye come first, as the end of one rank is the reason for the exceptions of others. On ranks other than
            0 it has rank 0 at most.
    """

    def __init__(self, store: Store, rank: int, world: int, address: str, several: bool) -> None:
        self.ended: dict[int, str] = {}
        self._store, self._rank, self._world, self._address = store, rank, world, address
        self._listener: socket.socket | None = None
        self._lines: dict[int, _Line] = {}
        self._unnamed: list[_Line] = []
        self._tried = self._parted = False
        self._earlier = getattr(sys, "last_value", None)  # of an interactive session, say
        if rank == 0:
            self._open(several)
        _made.add(self)
        _at_exit(weakref.WeakMethod(self.goodbye))

    def _open(self, several: bool) -> None:
        self._key = secrets.token_hex(16)
        place: dict[str, object] = {"port": 0}
        with contextlib.suppress(OSError):  # no port is left: there are no lifelines
            self._listener = bound(self._address, 0, several)
            self._listener.listen(self._world)
            self._listener.setblocking(False)
            place = {"port": self._listener.getsockname()[1], "key": self._key, "name": _name()}
        self._store.set(_KEY, json.dumps(place))

    def _connect(self) -> None:
        """Connect to rank 0, once it has told where it listens."""
        if self._tried or not self._store.check([_KEY]):
            return
        self._tried = True
        place = json.loads(self._store.get(_KEY))
        if not place["port"]:
            return
        with contextlib.suppress(OSError):  # nothing leads there: the ranks go on without this line
            line = _Line(socket.create_connection((self._address, place["port"]), timeout=_CONNECT))
            line.name = place["name"]
            line.write({"key": place["key"], "rank": self._rank, "name": _name()})
            self._lines[0] = line

    @property
    def connected(self) -> bool:
        """True where this rank has come to rank 0, or has tried to."""
        return self._rank == 0 or self._tried

    def look(self) -> None:
        """Read what has come, and fill in `ended`.

        Raises:
            RuntimeError: the store is gone.
        """
        if self._parted:
            return
        if self._rank:
            self._connect()
        self._accept()
        for rank, line in list(self._lines.items()):
            messages, ended = line.read()
            for message in messages:
                line.reason = str(message.get("goodbye", ""))
            if ended:
                del self._lines[rank]
                line.connection.close()
                if line.reason is None:
                    how = f"has ended without a word: {line.name} was killed, or has crashed"
                    self.ended = {rank: how, **self.ended}
                elif line.reason:
                    self.ended[rank] = f"has ended ({line.name}): {line.reason}"

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                self._unnamed.append(_Line(self._listener.accept()[0]))
            except OSError:  # no rank is waiting, or no descriptor is left
                break
        for line in list(self._unnamed):
            messages, ended = line.read()
            rank = messages[0].get("rank") if messages and self._knows(messages[0].get("key")) else None
            if isinstance(rank, int) and 0 < rank < self._world and rank not in self._lines:
                line.name = str(messages[0].get("name"))
                self._lines[rank] = line
                self._unnamed.remove(line)
            elif ended or messages or time.monotonic() - line.since > _NAMED:
                line.connection.close()
                self._unnamed.remove(line)

    def _knows(self, key: object) -> bool:
        return isinstance(key, str) and hmac.compare_digest(key.encode(), self._key.encode())

    def goodbye(self) -> None:
        """Tell the other side that this process ends by itself, or with which exception it ends. The connections stay
        open until it has ended."""
        if not self._parted:
            self._parted = True
            for line in self._lines.values():
                line.write({"goodbye": _last_error(self._earlier)})

    def forget(self) -> None:
        """Close this process's copies of the connections, without a word."""
        self._parted = True
        for line in (*self._lines.values(), *self._unnamed):
            line.connection.close()
        if self._listener is not None:
            self._listener.close()


def _message(line: bytes) -> dict[str, object]:
    """A message; {} where the line is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _name() -> str:
    return f"process {os.getpid()} on the host {socket.gethostname()}"


def _last_error(earlier: BaseException | None) -> str:
    """The exception that ends this process; "" where there is none, or where it was there `earlier`."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if error is None or error is earlier or isinstance(error, SystemExit):
        return ""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[: _LONGEST // 8]


def _at_exit(call: weakref.WeakMethod[Callable[[], object]]) -> None:
    """Call a method at the end of this process, if its object is still there."""

    def run() -> None:
        method = call()
        if method is not None:
            method()

    atexit.register(run)
    if multiprocessing.parent_process() is not None:  # its children end without the functions of atexit
        multiprocessing.util.Finalize(None, run, exitpriority=100)


def _forget_all() -> None:
    for lines in list(_made):
        lines.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
