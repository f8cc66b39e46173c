"""Progress: what the terminal shows while workers run.

On a terminal one live line stays below the rest; otherwise there is a plain line for each change of state. The workers'
own output goes to their logs and never here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, TextIO

from shardwright.launch.settings import RunSettings
from shardwright.launch.watch import WorkerExit

__all__ = ["Progress"]


class Progress:
    """The lines of one run. Use it as a context: the live line is there inside.

    Args:
        settings: the run.
        out: where to write; the live line needs it to be a terminal.
    """

    def __init__(self, settings: RunSettings, out: TextIO) -> None:
        self._settings = settings
        self._out = out
        self._stack = ExitStack()
        self._console: Any = None
        self._lock = threading.RLock()
        self._began = time.monotonic()
        # Replaced, never changed: the live line reads them without the lock. Its thread holds rich's lock then, and
        # `say` takes the two the other way round.
        self._running: frozenset[int] = frozenset()
        self._finished: frozenset[int] = frozenset()
        self._failed = False

    def __enter__(self) -> Progress:
        if self._out.isatty():
            from rich.console import Console
            from rich.live import Live

            self._console = Console(file=self._out, highlight=False, markup=False)
            self._stack.enter_context(Live(get_renderable=self._state, console=self._console, refresh_per_second=2,
                                           transient=True, redirect_stdout=False, redirect_stderr=False))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        self._console = None

    @property
    def seconds(self) -> float:
        """How long the run has taken so far."""
        return time.monotonic() - self._began

    def say(self, line: str) -> None:
        """Write one line. A terminal that went away does not end a training run."""
        with self._lock:
            try:
                if self._console is not None:
                    self._console.print(line, soft_wrap=True)
                else:
                    print(line, file=self._out, flush=True)
            except OSError:
                pass

    def started(self, pids: Mapping[int, int], attempt: int = 0) -> None:
        """The workers of this node run; their process ids by global rank."""
        with self._lock:
            self._running, self._finished, self._failed = frozenset(pids), frozenset(), False
        first = min(pids)
        self.say(f"started {_count(len(pids), 'worker')} (pids {', '.join(map(str, pids.values()))}), "
                 f"worker {first} writes to {self._settings.worker_log(first, attempt)}")

    def exited(self, exit: WorkerExit) -> None:
        """One worker ended. After the first failure the others are ended, and only that failure is told."""
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

    def ending(self, reason: str) -> None:
        """The workers are being ended for a reason that is not one of them."""
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
        return "  ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _ranges(ranks: Iterable[int]) -> str:
    """``0-3,5``: neighbours together, so that a thousand workers fit on a line."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
