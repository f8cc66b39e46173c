"""Watch: which worker ended when, and with what.

Torchrun's engine looks at its workers ten times a second. When one dies, its peers often die of it within
milliseconds, so that one look finds several dead and cannot say which was first. Here one sleeping thread a worker is
woken by the kernel the moment the worker ends; the order of those moments tells the cause from its consequences.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Watch", "WorkerExit"]


@dataclass(frozen=True)
class WorkerExit:
    """How one worker ended.

    Args:
        rank: its global rank.
        code: its exit code; ``128 + n`` if signal ``n`` ended it, as a shell counts.
        cause: the code or the signal in words: ``exit code 7``, ``exit code 137, SIGKILL``.
    """

    rank: int
    code: int
    cause: str

    @classmethod
    def of(cls, rank: int, returncode: int) -> WorkerExit:
        """From a return code as Python has it, where ``-n`` is signal ``n``."""
        if returncode >= 0:
            return cls(rank, returncode, f"exit code {returncode}")
        try:
            name = signal.Signals(-returncode).name
        except ValueError:  # real-time signals have no name
            name = f"signal {-returncode}"
        return cls(rank, 128 - returncode, f"exit code {128 - returncode}, {name}")


class Watch:
    """Follows the workers of one node and ends what is left of them.

    Args:
        on_exit: told of each exit as it happens, from a thread of the watch, one at a time.
    """

    def __init__(self, on_exit: Callable[[WorkerExit], None]) -> None:
        self._on_exit = on_exit
        self._lock = threading.Lock()
        self._exits: list[WorkerExit] = []
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._children_before = _children()

    @property
    def first_failure(self) -> WorkerExit | None:
        """The exit of the worker that was the first to fail, or None."""
        with self._lock:
            return next((exit for exit in self._exits if exit.code), None)

    def follow(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Take up one worker. Somebody else, here the engine, reaps it."""
        self._workers[rank] = process
        thread = threading.Thread(target=self._follow, args=(rank, process), daemon=True, name=f"watch worker {rank}")
        self._threads.append(thread)
        thread.start()

    def _follow(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        exit = WorkerExit.of(rank, _wait(process))
        with self._lock:
            self._exits.append(exit)
            self._on_exit(exit)

    def kill(self) -> None:
        """Kill whatever still runs, with its children."""
        if self._workers:
            running = [process.pid for process in self._workers.values() if process.poll() is None]
        else:
            running = sorted(_children() - self._children_before)
        for pid in running:
            _kill_group(pid)

    def end(self, patience: float = 5.0) -> None:
        """Kill what still runs and wait until every exit is known.

        The engine ends its workers itself, and politely. This is the floor beneath it: it holds when the engine itself
        fails, or when a signal comes while the workers are being started and the engine has not yet noted them.
        """
        self.kill()
        deadline = time.monotonic() + patience
        for process in self._workers.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass  # stuck in the kernel, as a process can be on a lost disk or device: nobody can end it
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait until the process ends, without reaping it, and return its code. If it failed, its children end with it."""
    if hasattr(os, "waitid"):
        try:
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            pass  # reaped already
        else:
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            if code:
                # Until it is reaped its id belongs to no other group, so this reaches its own children only.
                _kill_group(process.pid)
            return code
    # Where there is no waitid, or it came late, the one who reaps tells. Reaping here would free the process id
    # while the engine still means to send a signal to it.
    while process.returncode is None:
        time.sleep(0.02)
    return process.returncode


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass  # none left, or all of them are already dead


def _children() -> frozenset[int]:
    """The children of this process's main thread, where the system tells them (Linux); else none."""
    try:
        with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
            return frozenset(map(int, file.read().split()))
    except OSError:
        return frozenset()
