"""A search's bound on its own host memory, and its progress.

    allowed     bytes by which the process may grow during a search; by default half of the free memory, at most 3 GB
    ask         before a large allocation: refused (`OutOfBudgetError`) where the process would grow past `allowed`
    watch       between two steps without a large allocation: the same check, and news for who shows the progress

The growth of the process is read from the system, so all its memory counts. A refusal is caught where another method
takes less memory: sweeps instead of elimination, a few states instead of all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from ..launch.progress import Work, time_text

__all__ = ["LEAST", "OutOfBudgetError", "SearchBudget", "SearchProgress", "current", "free_memory", "spending"]

SHARE = 0.5  # default share of the free memory that a search may take
MOST = 3e9  # most bytes by default: with more, tables take longer than the prices that they would save
UNKNOWN = 4e9  # bytes taken as free where the system does not say
LEAST = 256e6  # least budget in bytes: memory between two strategies takes some of it
SMALL = 2**20  # bytes up to which `ask` always grants
SILENT = 2.0  # seconds before a function that asked for news of a search is called first
EVERY = 3.0  # seconds between two calls
DIGITS = 4  # of the seconds of a step, which a bound often shares to the third


class OutOfBudgetError(Exception):
    """A search that would take more host memory than allowed.

    The error never leaves the search. A `ShardwrightError` would be taken for a problem without a solution.
    """


class SearchProgress(NamedTuple):
    """The progress of a search.

    Attributes:
        phase: the current phase.
        seconds: since the search began.
        best: seconds of a step of the best plan so far; None: there is none.
        bound: no plan is priced below it; None: nothing is proved yet.
        grown: bytes of host memory by which the process has grown.
    """

    phase: str
    seconds: float
    best: float | None
    bound: float | None
    grown: float

    def __str__(self) -> str:
        best = "" if self.best is None else f", best {time_text(self.best, DIGITS)} a step"
        bound = "" if self.bound is None else f", bound {time_text(self.bound, DIGITS)}"
        gap = "" if not (self.best and self.bound) else f", gap {max(0.0, 1 - self.bound / self.best):.2%}"
        phase = f": {self.phase}" if self.phase else ""
        return f"search{phase}{best}{bound}{gap}; {self.grown / 1e6:.0f} MB"


class SearchBudget:
    """The host memory that a search may take, and its progress.

    Args:
        allowed: bytes; None: half of the free memory, and at most 3 GB.
        progress: called with a `SearchProgress` every few seconds, once a search takes longer than `SILENT`; anything
            else: `spending` shows the progress as that of any long work.
    """

    def __init__(self, allowed: float | None = None, progress: Callable[[SearchProgress], object] | bool | None = None):
        self.allowed = min(SHARE * free_memory(), MOST) if allowed is None else float(allowed)
        self.progress = progress
        self._began = self._announced = time.monotonic()
        self._resident = resident_memory()
        self.phase = ""
        self.best: float | None = None
        self.bound: float | None = None

    @property
    def grown(self) -> float:
        """Bytes by which the process has grown since the search began."""
        return max(0.0, resident_memory() - self._resident)

    def room(self) -> float:
        """Bytes that may still be taken."""
        return self.allowed - self.grown

    def ask(self, size: float) -> None:
        """Check an allocation before it is made.

        Args:
            size: bytes of the allocation.

        Raises:
            OutOfBudgetError: the process would grow past what is allowed.
        """
        if size > SMALL and size > self.room():
            raise OutOfBudgetError(
                f"the search may take {self.allowed / 1e6:,.0f} MB of host memory, and would take more"
            )

    def watch(self, phase: str | None = None, best: float | None = None, bound: float | None = None) -> None:
        """Report progress and check the growth of the process.

        Args:
            phase, best, bound: as `tell` takes them.

        Raises:
            OutOfBudgetError: the process has grown past what is allowed.
        """
        self.tell(phase, best, bound)
        if self.room() < 0:
            self.ask(2 * SMALL)

    def tell(self, phase: str | None = None, best: float | None = None, bound: float | None = None) -> None:
        """Report progress.

        Args:
            phase, best, bound: see `SearchProgress`; None: as before. A new phase has neither best nor bound.
        """
        if phase is not None and phase != self.phase:
            self.phase, self.best, self.bound = phase, None, None
        self.best = self.best if best is None else best
        self.bound = self.bound if bound is None else bound
        if not callable(self.progress):
            return
        now = time.monotonic()
        if now - self._began >= SILENT and (now - self._announced >= EVERY or self._announced == self._began):
            self._announced = now
            self.progress(self.now())

    def now(self) -> SearchProgress:
        """The progress so far."""
        return SearchProgress(self.phase, time.monotonic() - self._began, self.best, self.bound, self.grown)


_CURRENT: ContextVar[SearchBudget | None] = ContextVar("search_budget", default=None)


@contextmanager
def spending(budget: SearchBudget) -> Iterator[SearchBudget]:
    """Make `budget` the current budget of all searches inside the context, and show the search's progress."""
    token = _CURRENT.set(budget)
    try:
        with Work("search") as work:
            work.describe = lambda: str(budget.now())
            yield budget
    finally:
        _CURRENT.reset(token)


def current() -> SearchBudget:
    """The budget of the current search; outside a search, a new one of half the free memory."""
    return _CURRENT.get() or SearchBudget(SHARE * free_memory())


def resident_memory() -> float:
    """Bytes of memory that the process takes now; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return float(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0.0


def free_memory() -> float:
    """Bytes of free memory: the least of the machine's and of what the process's control groups allow."""
    found = [_available(), *_of_groups()]
    return min((size for size in found if size is not None), default=UNKNOWN)


def _available() -> float | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, AttributeError):
        return None


def _of_groups() -> Iterator[float]:
    """The free bytes of the process's control group and of those above it, version 2 or 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if controllers not in ("", "memory"):
            continue
        base = Path("/sys/fs/cgroup") / controllers
        most, used = (
            ("memory.max", "memory.current") if not controllers else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            if not place.is_relative_to(base):
                break
            try:
                yield max(0.0, float((place / most).read_text()) - float((place / used).read_text()))
            except (OSError, ValueError):  # no such file, or "max"
                continue
