"""Progress of long work: what it does, how far it is, and where Ctrl-C stopped it.

    with Work("capture of the model"):                            a phase; phases nest, and the innermost is shown
    for op in each(ops, "prices of strategies", "operators"):     a phase that counts

    a terminal            one line below the rest, once the work takes longer than `FIRST` seconds
    a log                 a line every `EVERY` seconds: on standard error of a command and of a worker of
                          ``shardwright run``, elsewhere in the log "shardwright.progress"
    `quiet`               nothing

The phases of a thread are a stack, which a `Display` shows. A phase only counts; a thread that sleeps until something
is due looks at the innermost one. It runs only where there is something to show it on, and rank 0 alone shows.

Ctrl-C is an exception that passes all phases on its way: the first notes where it was, the last says so.

The seconds of steps have one form in progress, tables, pages and messages (`time_text`).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, ParamSpec, Protocol, TextIO, TypeVar

from ..errors import SettingError
from .console import PREFIX
from .environment import TOKEN, find

__all__ = [
    "EVERY",
    "FIRST",
    "ROUNDING",
    "Display",
    "Work",
    "commanded",
    "each",
    "keep",
    "keeper",
    "load_rich",
    "phase",
    "quiet",
    "showing",
    "time_text",
]

FIRST = 2.0  # seconds of work before a terminal shows it
RENEWED = 0.25  # seconds between two states of a terminal's line
EVERY = 10.0  # seconds between two lines of a log

logger = logging.getLogger("shardwright.progress")

T = TypeVar("T")
P = ParamSpec("P")


class BestPlan(Protocol):
    """A plan, as a command that keeps the best one so far sees it; cost and bound in seconds."""

    @property
    def cost(self) -> float: ...
    @property
    def bound(self) -> float | None: ...
    @property
    def gap(self) -> float | None: ...

    def save(self, path: str | Path) -> None: ...


class Work:
    """A phase of long work, as a context.

    Args:
        name: what is done, such as "capture of the model".
        total: of how much; None: not known.
        unit: of the counts, such as "operators"; "bytes" are shown as MB and GB.
        if_stopped: what is left where Ctrl-C stops it, such as "the earlier checkpoints are whole".

    Attributes:
        done: how much is done. The thread that shows it only reads it.
        describe: returns the text of the phase, in place of name and counts.
    """

    __slots__ = ("_before", "_depth", "_display", "describe", "done", "if_stopped", "name", "total", "unit")

    def __init__(self, name: str, total: int | None = None, unit: str = "", if_stopped: str = "") -> None:
        self.name, self.total, self.unit, self.if_stopped = name, total, unit, if_stopped
        self.done = 0
        self.describe: Callable[[], str] | None = None
        self._before: Display | None = None
        self._display: Display | None = None
        self._depth = 0

    def add(self, count: int = 1) -> None:
        """Count more as done."""
        self.done += count

    def counts(self) -> str:
        """``12 of 40 operators``, ``1.2 of 3.4 GB``; empty where nothing is counted."""
        if not self.unit:
            return ""
        if self.unit != "bytes":
            return f"{self.done:,}{'' if self.total is None else f' of {self.total:,}'} {self.unit}"
        size, unit = next(
            (
                (size, unit)
                for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"))
                if (self.total or self.done) >= size
            ),
            (1e3, "KB"),
        )
        return f"{self.done / size:.1f}{'' if self.total is None else f' of {self.total / size:.1f}'} {unit}"

    def __str__(self) -> str:
        if self.describe is not None:
            return self.describe()
        counts = self.counts()
        return f"{self.name}: {counts}" if counts else self.name

    def __enter__(self) -> Work:
        display = self._before = _SHOWN.get()
        if display is None or display.process != os.getpid():
            display = Display.of_library()
            _SHOWN.set(display)
        self._display, self._depth = display, len(display.stack)
        display.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        display = self._display
        assert display is not None
        if isinstance(error, KeyboardInterrupt):
            display.note_stop()
        display.end(self._depth, kind is GeneratorExit)
        if display is not self._before:
            _SHOWN.set(self._before)
            if isinstance(error, KeyboardInterrupt):
                display.say_stop()


class Each(Generic[T]):
    """The items of `each`; their phase ends with the loop, or with the phase around it."""

    def __init__(self, items: Iterable[T], work: Work) -> None:
        self._items, self._work = items, work

    def __iter__(self) -> Iterator[T]:
        with self._work as work:
            for item in self._items:
                yield item
                work.done += 1


def each(items: Collection[T] | Iterator[T], name: str, unit: str, total: int | None = None) -> Iterable[T]:
    """The items one after the other, as a phase that counts them.

    Args:
        total: their number, where they are an iterator.
    """
    return Each(items, Work(name, len(items) if isinstance(items, Collection) else total, unit))


def load_rich() -> None:
    """Import rich, and leave Python's random numbers as they are.

    The import of ``rich.style`` draws a number. A forward that is captured meanwhile would seem to draw it, and ranks
    that import rich, such as rank 0 alone, would draw other numbers than the rest from then on.
    """
    state = random.getstate()
    try:
        importlib.import_module("rich.style")
    finally:
        random.setstate(state)


class Display:
    """The place where the phases of one thread are shown.

    Args:
        stream: the terminal or the log; None: neither.
        log: True where lines go to the log "shardwright.progress".
        speaks: True where the line about Ctrl-C is said.
        live: True for a terminal's line, which is renewed; None: where the stream is a terminal.
        clock: returns seconds.

    Attributes:
        stack: the phases, the innermost last.
        muted: more than 0 while nothing is shown.
        stopped: the innermost phase at Ctrl-C, and how far it was; empty: there was none.
        if_stopped: what is left of it.
        best: returns the best result so far, for a command that keeps it; None: there is none.
        process: the id of the process.
    """

    def __init__(
        self,
        stream: TextIO | None,
        *,
        log: bool = False,
        speaks: bool = True,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stack: list[Work] = []
        self.muted = 0
        self.stopped = self.if_stopped = ""
        self.best: Callable[[], BestPlan | None] | None = None
        self.process = os.getpid()
        self._stream, self._log, self._speaks, self._clock = stream, log, speaks, clock
        self._live = (stream is not None and stream.isatty()) if live is None else live
        self._began = self._last_line = clock()
        self._lock = threading.Lock()
        self._ended: threading.Event | None = None
        self._line: Any = None  # of rich
        self._loop_text = ""  # the text of the loop that was left last

    @classmethod
    def of_library(cls) -> Display:
        """The display of work that no command has asked for: a script, a notebook, a worker."""
        setting = _SETTING.get()
        if setting is False or not _is_first():
            return cls(None, speaks=False)
        log = logger.isEnabledFor(logging.INFO)
        if threading.current_thread() is not threading.main_thread():  # a line on the terminal is the main thread's
            return cls(None, log=log, speaks=False)
        shown = sys.stderr is not None and (setting is True or TOKEN in os.environ or sys.stderr.isatty())
        return cls(sys.stderr if shown else None, log=log)

    # -- phases --

    def begin(self, work: Work) -> None:
        """Put a phase on the stack."""
        if not self.stack:
            self._began = self._clock()
            self.stopped = self.if_stopped = ""  # of work before, whose Ctrl-C a script has caught
            if self._stream is not None or self._log:
                self._start()
        self._loop_text = ""
        self.stack.append(work)

    def end(self, depth: int, of_loop: bool = False) -> None:
        """Take all phases from a depth on off the stack.

        Args:
            of_loop: True where a loop over `each` was left: by an exception, which comes here next, or by break.
        """
        self._loop_text = self.text() if of_loop else ""
        del self.stack[depth:]
        if not self.stack:
            if self._ended is None and self._line is None:
                return
            if self._ended is not None:
                self._ended.set()
                self._ended = None
            with self._lock:
                self._clear()

    def text(self) -> str:
        """The innermost phase, behind the counts of those around it."""
        stack = self.stack[:]
        return " > ".join(str(work) for n, work in enumerate(stack, 1) if n == len(stack) or work.total is not None)

    def insist(self) -> None:
        """Show lines on standard error, also where that is no terminal."""
        if self._speaks and self._stream is None and sys.stderr is not None:
            self._stream, self._live = sys.stderr, sys.stderr.isatty()
            if self.stack and self._ended is None:
                self._start()

    def note_stop(self) -> None:
        """Note the innermost phase, the first time."""
        if not self.stopped and self.stack:
            self.stopped = f"{self._loop_text or self.text()}, after {self._clock() - self._began:.0f} s"
            self.if_stopped = next((work.if_stopped for work in reversed(self.stack) if work.if_stopped), "")

    def say_stop(self) -> None:
        """Say where Ctrl-C has stopped the work."""
        if self._speaks and not self.muted and self.stopped:
            remains = f"; {self.if_stopped}" if self.if_stopped else ""
            print(f"{PREFIX}stopped by Ctrl-C in {self.stopped}{remains}", file=sys.stderr, flush=True)

    # -- the thread that shows them --

    def tick(self) -> float:
        """Show what is due.

        Returns:
            Seconds until more is due.
        """
        with self._lock:
            innermost = self.stack[-1:]
            if not innermost or self.muted:
                self._clear()
                return RENEWED if self._live else EVERY
            now, wait_seconds = self._clock(), EVERY
            if self._stream is None or not self._live or self._log:
                wait_seconds = self._last_line + EVERY - now
                if wait_seconds <= 0:
                    self._last_line, wait_seconds = now, EVERY
                    self._write(f"{self.text()}; {now - self._began:.0f} s")
            if self._live:
                wait = self._began + FIRST - now
                if wait > 0:
                    return min(wait_seconds, wait)
                self._draw(innermost[0], now - self._began)
                wait_seconds = RENEWED
            return wait_seconds

    def _start(self) -> None:
        if self._live:
            load_rich()  # here, not in the thread: between two states of a generator the caller may draw
        ended = self._ended = threading.Event()
        first = FIRST if self._live else max(0.0, self._last_line + EVERY - self._clock())

        def run() -> None:
            wait_seconds = first
            while not ended.wait(wait_seconds):
                wait_seconds = self.tick()

        # where no thread can start, nothing is shown
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=run, name="progress", daemon=True).start()

    def _write(self, text: str) -> None:
        if self._log:
            logger.info("%s", text)
        if self._stream is not None and not self._live:
            with contextlib.suppress(OSError, ValueError):  # a log that is gone or closed ends no work
                print(f"{PREFIX}{text}", file=self._stream, flush=True)

    def _draw(self, work: Work, seconds: float) -> None:
        """Renew the terminal's line."""
        # rich: needed only by work on a terminal
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn  # noqa: PLC0415
        from rich.table import Column  # noqa: PLC0415

        with contextlib.suppress(OSError, ValueError):  # a terminal that has gone away ends no work
            if self._line is None:
                text = Column(no_wrap=True, overflow="ellipsis", ratio=1)
                self._line = Progress(
                    SpinnerColumn(),
                    TextColumn("{task.description}", markup=False, table_column=text),
                    BarColumn(20),
                    TextColumn("{task.fields[seconds]}"),
                    console=Console(file=self._stream, highlight=False),
                    auto_refresh=False,
                    transient=True,
                    expand=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._line.add_task("", total=None, seconds="")
                self._line.start()
            minutes, rest = divmod(int(seconds), 60)
            self._line.update(
                0,
                description=self.text(),
                total=work.total,
                completed=work.done,
                seconds=f"{minutes}:{rest:02d}",
                refresh=True,
            )

    def _clear(self) -> None:
        if self._line is not None:
            with contextlib.suppress(OSError, ValueError):
                self._line.stop()
            self._line = None


#: The display of the work under way in this thread.
_SHOWN: ContextVar[Display | None] = ContextVar("progress_shown", default=None)

#: The setting of `showing` for work that begins.
_SETTING: ContextVar[bool | None] = ContextVar("progress_setting", default=None)


@contextlib.contextmanager
def commanded(silent: bool = False) -> Iterator[Display]:
    """The display of a command: its lines go to standard error, whatever that is. It does not say where Ctrl-C has
    stopped the work; the command does.

    Args:
        silent: True: nothing is shown.
    """
    shown = not silent and _is_first()
    display, before = Display(sys.stderr if shown else None, speaks=False), _SHOWN.get()
    _SHOWN.set(display)
    try:
        yield display
    finally:
        display.end(0)
        _SHOWN.set(before)


@contextlib.contextmanager
def showing(setting: object) -> Iterator[None]:
    """Let work inside the ``with`` block be shown, or not.

    Args:
        setting: True: lines on standard error, also where that is no terminal; None: as outside of the block; False or
            a function, which is told instead: nothing is shown. What was silent outside stays so.
    """
    display, before = _SHOWN.get(), _SETTING.get()
    silent = setting is False or callable(setting)
    if display is not None:
        display.muted += silent
        if setting is True and before is not False:
            display.insist()
    elif before is not False and setting is not None:
        _SETTING.set(not silent)
    try:
        yield
    finally:
        if display is not None:
            display.muted -= silent
        else:
            _SETTING.set(before)


def phase(
    name: str, setting: Callable[..., object] = lambda *_, **__: None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: the function is a phase, which is shown as its arguments say.

    Args:
        name: of the phase.
        setting: from the function's arguments to that of `showing`; by default as outside.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with showing(setting(*args, **kwargs)), Work(name):
                return function(*args, **kwargs)

        return call

    return decorate


def quiet() -> contextlib.AbstractContextManager[None]:
    """Show no progress of plans, checkpoints and measurements inside the ``with`` block.

    Work of more than two seconds shows what it does: on a terminal as a line that goes away at its end, elsewhere as
    a line every ten seconds in the log "shardwright.progress". For one plan alone, ``search_progress=False`` does the
    same.

    Returns:
        A context manager.

    Example:
        >>> import shardwright as sw, torch
        >>> with sw.quiet():
        ...     made = sw.plan(torch.nn.Linear(8, 8), (torch.zeros(8, 8),), devices=2)
        >>> made.devices
        2
    """
    return showing(False)


def keep(best: Callable[[], BestPlan | None] | None) -> None:
    """Tell the command around, where there is one, how to make the best result so far.

    Args:
        best: returns the result; None: there is none.
    """
    display = _SHOWN.get()
    if display is not None:
        display.best = best


def keeper() -> Display | None:
    """The display of the command around; None: there is none."""
    return _SHOWN.get()


def _is_first() -> bool:
    """True in rank 0, and in a process that is alone."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    try:
        place = find(os.environ)
    except (SettingError, OSError):  # an environment that `init` refuses
        return True
    return place is None or place.rank == 0


#: Seconds below which a sum, or a difference of two, is rounding alone.
ROUNDING = 1e-12


def time_text(seconds: float, digits: int = 3) -> str:
    """Seconds: ``1.23 ms``, in s, ms, us or ns; rounding alone is ``0 us``.

    Args:
        digits: how many are shown.
    """
    rounded = 1 - 0.5 * 10.0**-digits  # 999.6 us have three digits as 1 ms, not as 1e+03 us
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if abs(seconds) >= factor * rounded:
            return f"{seconds / factor:.{digits}g} {unit}" if abs(seconds) < 999.5 else f"{seconds:.0f} s"
    return "0 us" if abs(seconds) < ROUNDING else f"{seconds / 1e-9:.{digits}g} ns"
