"""The console of a run on one node: its logs, the order in which workers end, and the lines on the terminal.

1. Logs: `coordinator_log` sends the launcher's own output to a file, `last_lines` reads the end of a worker's log.
   Its control characters are spelt (`spelt`): a terminal that shows the lines obeys none of them.

2. `Watch`: the time and the cause of each worker's end. Torchrun's engine checks its workers ten times a second. When
   one worker dies, its peers often die of it within milliseconds, so one check finds several dead and cannot tell the
   first. Here one sleeping thread a worker is woken by the kernel the moment the worker ends; the order of these
   moments tells the cause from its consequences. No worker is sent a signal before the exits so far are recorded
   (`Watch.settle`): a thread that is woken late would otherwise record the cause after the consequence.

3. `Progress`: the lines on the terminal while workers run. On a terminal one live line stays below the rest;
   elsewhere each change of state is one plain line. The workers' own output goes to their logs and never to the
   terminal.

Example: signal 9 ends worker 2 of 8. Its `WorkerExit` has the code 137 and the cause "exit code 137, SIGKILL", and the
terminal shows "worker 2 failed (exit code 137, SIGKILL), ending the others".
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from .run_settings import RunSettings

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "PREFIX",
    "Progress",
    "Watch",
    "WorkerExit",
    "coordinator_log",
    "last_lines",
    "logger",
    "refusal",
    "remove_restarts",
    "spelt",
]

logger = logging.getLogger("shardwright.launch")

#: The beginning of a line that says how far long work is (`progress`), in the log of rank 0 and on standard error.
PREFIX = "shardwright: "

# Bytes read from the end of a log: enough for twenty long lines.
TAIL_BYTES = 64 * 1024

# Bytes that are written to a folder to see that it takes them: more than is left in the last block of any file.
_PROBE = 64 * 1024


@contextlib.contextmanager
def coordinator_log(path: str) -> Iterator[None]:
    """Redirect this process's standard error into a fresh file, and log there, inside the block.

    The descriptor itself is redirected, not only the loggers: torch's sockets and stores warn from C++.
    """
    sys.stderr.flush()
    with open(path, "wb"):
        pass
    # Append mode: a background run has the same file as standard output, and neither overwrites the other.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    terminal = os.dup(2)
    handler = logging.FileHandler(path, mode="a")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    level = logger.level
    os.dup2(descriptor, 2)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(descriptor)


#: Characters that move the cursor, colour or clear a terminal, or reverse the order of what follows: C0 and C1 but the
#: tab, and Unicode's line separators and marks of direction.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def spelt(text: str) -> str:
    """The text with each control character written out: ``\\x1b[31m`` for an escape sequence that turns it red."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def refusal(folder: str) -> str | None:
    """The reason why a folder takes no more bytes, such as "No space left on device"; None where it does."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE))
            probe.flush()
            os.fsync(probe.fileno())  # where blocks are allocated late, and a server has the quota
    except OSError as error:
        return error.strerror or str(error)
    return None


def last_lines(path: str, count: int = 20) -> list[str]:
    """The last lines of a text file; empty where the file is empty or missing.

    A line that was overwritten by carriage returns, as progress bars are, is returned in its last state. Control
    characters are `spelt`.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = text.rstrip().split("\n") if text.strip() else []
    return [spelt(line.rstrip("\r").rpartition("\r")[2]) for line in lines[-count:]]


def remove_restarts(settings: RunSettings) -> None:
    """Remove the logs of this node's restarted workers from an earlier run, lest they be taken for this run's."""
    names = [re.fullmatch(r"restart_([1-9]\d*)", name) for name in os.listdir(settings.log_dir)]
    for attempt in [int(name[1]) for name in names if name]:
        for rank in settings.ranks:
            with contextlib.suppress(OSError):
                os.remove(settings.worker_log(rank, attempt))
        with contextlib.suppress(OSError):  # not empty: files of another node or of the user
            os.rmdir(settings.attempt_dir(attempt))


# -- watch -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerExit:
    """The end of one worker.

    Args:
        rank: its global rank.
        code: its exit code; ``128 + n`` if signal ``n`` ended it, as in a shell.
        cause: the code or the signal in words: ``exit code 7``, ``exit code 137, SIGKILL``.
    """

    rank: int
    code: int
    cause: str

    @classmethod
    def of(cls, rank: int, returncode: int) -> WorkerExit:
        """The exit for a return code of Python's `subprocess`, where ``-n`` is signal ``n``."""
        if returncode >= 0:
            return cls(rank, returncode, f"exit code {returncode}")
        try:
            name = signal.Signals(-returncode).name
        except ValueError:  # real-time signals have no name
            name = f"signal {-returncode}"
        return cls(rank, 128 - returncode, f"exit code {128 - returncode}, {name}")


class Watch:
    """A watch that follows the workers of one node and ends those that remain.

    Args:
        on_exit: called at each exit, from a thread of the watch, one call at a time.
        on_change: called with the process ids of the workers that run, at each start and exit, one call at a time.
    """

    def __init__(
        self, on_exit: Callable[[WorkerExit], None], on_change: Callable[[list[int]], None] = lambda pids: None
    ) -> None:
        self._on_exit, self._on_change = on_exit, on_change
        self._lock = threading.Condition()
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
        """Follow one worker. The engine, not the watch, reaps it."""
        with self._lock:
            self._workers[rank] = process
            self._changed()
        thread = threading.Thread(target=self._follow, args=(rank, process), daemon=True, name=f"watch worker {rank}")
        self._threads.append(thread)
        thread.start()

    def _follow(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        exit = WorkerExit.of(rank, _wait(process))
        with self._lock:
            self._exits.append(exit)
            self._changed()
            self._on_exit(exit)
            self._lock.notify_all()

    def _changed(self) -> None:
        ended = {exit.rank for exit in self._exits}
        self._on_change([process.pid for rank, process in self._workers.items() if rank not in ended])

    def settle(self, patience: float = 5.0) -> None:
        """Wait until the exit of every worker that has ended by now is recorded.

        To be called before a worker is sent a signal. Otherwise the exit that the signal causes may be recorded before
        the exit that is the reason for the signal: two threads are woken, in no certain order.

        Args:
            patience: seconds to wait.
        """
        ended = {rank for rank, process in self._workers.items() if process.poll() is not None}
        with self._lock:
            self._lock.wait_for(lambda: ended <= {exit.rank for exit in self._exits}, patience)

    def kill(self) -> None:
        """Kill all workers that still run, with their children."""
        if self._workers:
            running = [process.pid for process in self._workers.values() if process.poll() is None]
        else:
            running = sorted(_children() - self._children_before)
        for pid in running:
            _kill_group(pid)

    def end(self, patience: float = 5.0) -> None:
        """Kill all workers that still run and wait until every exit is known.

        The engine ends its workers itself, with a grace period. This is the fallback: it holds when the engine itself
        fails, or when a signal comes while the workers are being started and the engine has not registered them yet.

        Args:
            patience: seconds to wait.
        """
        self.kill()
        deadline = time.monotonic() + patience
        for process in self._workers.values():
            # A process stuck in the kernel, on a lost disk or device, cannot be ended.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The return code of a process, without reaping it, once it has ended. A failed process's children are killed."""
    if hasattr(os, "waitid"):
        try:
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            pass  # reaped already
        else:
            assert ended is not None
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            if code:
                # Until the process is reaped, no other group has its id: the kill reaches its own children only.
                _kill_group(process.pid)
            return code
    # Without waitid, or where it came too late, wait until the engine has reaped the process. Reaping it here would
    # free the process id while the engine may still send a signal to it.
    while process.returncode is None:
        time.sleep(0.02)
    return process.returncode


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):  # no process is left, or all are dead
        os.killpg(pid, signal.SIGKILL)


def _children() -> frozenset[int]:
    """The children of this process's main thread (Linux); empty on other systems."""
    try:
        with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
            return frozenset(map(int, file.read().split()))
    except OSError:
        return frozenset()


# -- progress ----------------------------------------------------------------------------------------------------------


class Progress:
    """The terminal lines of one run. Used as a context: the live line is shown inside the block.

    Args:
        settings: the run.
        out: the output stream; the live line needs it to be a terminal.
    """

    def __init__(self, settings: RunSettings, out: TextIO) -> None:
        self._settings = settings
        self._out = out
        self._stack = ExitStack()
        self._console: Console | None = None
        self._lock = threading.RLock()
        self._began = time.monotonic()
        # Replaced, never mutated: the live line's thread reads them without this lock. It holds rich's lock at that
        # time, and `say` takes the two locks in the other order.
        self._running: frozenset[int] = frozenset()
        self._finished: frozenset[int] = frozenset()
        self._failed = False
        self._log = ""  # rank 0's; "" on another node
        self._work = ""  # rank 0's long work
        self._looked = self._began

    def __enter__(self) -> Progress:
        if self._out.isatty():
            from rich import console  # noqa: PLC0415  for terminals alone
            from rich.live import Live  # noqa: PLC0415  for terminals alone

            self._console = console.Console(file=self._out, highlight=False, markup=False)
            self._stack.enter_context(
                Live(
                    get_renderable=self._state,
                    console=self._console,
                    refresh_per_second=2,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
            )
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        self._console = None

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    @property
    def work(self) -> str:
        """The long work of rank 0, as `look` has seen it; empty: none."""
        return self._work

    def say(self, line: str) -> None:
        """Write one line. A terminal that has gone away does not end a training run."""
        line = spelt(line)
        with self._lock:
            try:
                if self._console is not None:
                    self._console.print(line, soft_wrap=True)
                else:
                    print(line, file=self._out, flush=True)
            except OSError:
                pass

    def started(self, pids: Mapping[int, int], attempt: int = 0) -> None:
        """Report that the workers of this node run.

        Args:
            pids: their process ids by global rank.
            attempt: the number of restarts so far.
        """
        with self._lock:
            self._running, self._finished, self._failed = frozenset(pids), frozenset(), False
        first = min(pids)
        self._log = self._settings.worker_log(0, attempt) if first == 0 else ""
        self.say(
            f"started {_count(len(pids), 'worker')} (pids {', '.join(map(str, pids.values()))}), "
            f"worker {first} writes to {self._settings.worker_log(first, attempt)}"
        )

    def exited(self, exit: WorkerExit) -> None:
        """Report the end of one worker; after the first failure, which ends the other workers, report nothing more."""
        with self._lock:
            self._running -= {exit.rank}
            if self._failed:
                return
            if exit.code:
                self._failed = True
                self.say(f"worker {exit.rank} failed ({exit.cause}), ending the others")
            else:
                self._finished |= {exit.rank}
                self.say(f"worker {exit.rank} finished")

    def look(self) -> None:
        """Show the long work of rank 0, where the last line of its log says so; looks at most once a second."""
        now = time.monotonic()
        if not self._log or now - self._looked < 1:
            return
        self._looked = now
        (line,) = last_lines(self._log, 1) or [""]
        work = line.removeprefix(PREFIX) if line.startswith(PREFIX) else ""
        if work and work != self._work and self._console is None:
            self.say(f"worker 0: {work}")
        self._work = work

    def ending(self, reason: str) -> None:
        """Report that the workers are being ended for a reason outside of this node's workers."""
        with self._lock:
            if not self._failed:
                self._failed = True
                self.say(f"{reason}, ending the workers")

    def _state(self) -> str:
        minutes, seconds = divmod(int(self.seconds), 60)
        running, finished = self._running, self._finished
        parts = [f"{minutes}:{seconds:02d}"]
        if running:
            parts.append(f"{'ending' if self._failed else 'running'}: {_ranges(running)}")
        if finished:
            parts.append(f"finished: {_ranges(finished)}")
        if len(parts) == 1:
            parts.append("ending" if self._failed else "starting")
        if self._work and running:
            parts.append(self._work)
        return "  ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _ranges(ranks: Iterable[int]) -> str:
    """Ranks as text, ``0-3,5``: neighbours together, so that a thousand workers fit on a line."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
