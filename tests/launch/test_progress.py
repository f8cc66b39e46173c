"""Progress of long work: a terminal, a log, silence, and the line after Ctrl-C. Clocks are handed in."""

from __future__ import annotations

import io
import logging
import os
import pty
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from forked_python import fresh
from ranks import PATIENCE

import shardwright as sw
from shardwright.launch import progress
from shardwright.launch.console import PREFIX
from shardwright.launch.environment import TOKEN
from shardwright.launch.progress import EVERY, FIRST, Display, Work, commanded, each, keep, keeper, showing


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def logged(monkeypatch) -> Iterator[tuple[Display, Clock, io.StringIO]]:
    """A display whose lines go to a text, without its thread."""
    monkeypatch.setattr(Display, "_start", lambda self: None)
    clock, text = Clock(), io.StringIO()
    display = Display(text, clock=clock)
    token = progress._SHOWN.set(display)
    yield display, clock, text
    progress._SHOWN.reset(token)


def test_a_log_gets_a_line_every_ten_seconds(logged):
    display, clock, text = logged
    for op in each(range(40), "prices", "operators"):
        if op == 3:
            assert display.tick() == EVERY and not text.getvalue()
            clock.now += EVERY - 0.5
            assert display.tick() == 0.5 and not text.getvalue()
            clock.now += 0.5
            display.tick()
        if op == 4:
            display.tick()
            clock.now += 12
            display.tick()
    assert text.getvalue().splitlines() == [
        f"{PREFIX}prices: 3 of 40 operators; 10 s",
        f"{PREFIX}prices: 4 of 40 operators; 22 s",
    ]
    assert not display.stack


def test_the_lines_of_a_command_are_ten_seconds_apart_whatever_its_phases(logged):
    display, clock, text = logged
    for name in ("capture", "search", "save"):
        with Work(name):
            clock.now += 6
            display.tick()
    assert text.getvalue() == f"{PREFIX}search; 6 s\n"


def test_phases_nest_and_the_innermost_is_shown(logged):
    display, _, _ = logged
    with Work("plan"), Work("search of stages", 3, "sizes") as outer, Work("search"):
        outer.add()
        with Work("writing", 2_500_000_000, "bytes") as work:
            work.add(1_240_000_000)
            assert display.text() == "search of stages: 1 of 3 sizes > writing: 1.2 of 2.5 GB"
        assert display.text() == "search of stages: 1 of 3 sizes > search"
    assert str(Work("reading", None, "bytes")) == "reading: 0.0 KB"


def test_a_loop_that_is_left_ends_its_phase(logged):
    display, _, _ = logged
    with Work("plan"):
        for op in each([1, 2, 3], "prices", "operators"):
            if op == 2:
                break
        assert [work.name for work in display.stack] == ["plan"]
    assert not display.stack


def _terminal(display_of, act) -> str:
    """The output that `act` leaves on a pseudo-terminal of 60 columns."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        display = display_of(stream)
        token = progress._SHOWN.set(display)
        try:
            act(display)
        finally:
            progress._SHOWN.reset(token)
    out = b""
    while True:
        try:
            out += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not out:
            break
    os.close(ours)
    return out.decode()


@pytest.mark.parametrize("colours", [True, False])
def test_a_terminal_gets_one_line_that_goes_away(monkeypatch, colours):
    monkeypatch.setattr(Display, "_start", lambda self: None)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colours:
        monkeypatch.setenv("NO_COLOR", "1")
    clock = Clock()

    def act(display: Display) -> None:
        with Work("capture of the model"):
            assert display.tick() == FIRST  # nothing yet
            clock.now += FIRST
            display.tick()
        with Work(
            "costs of strategies of a model with a name that is much longer than the line", 8, "operators"
        ) as work:
            work.add(2)
            clock.now += FIRST
            display.tick()

    shown = _terminal(lambda stream: Display(stream, clock=clock), act)
    assert "capture of the model" in shown and "0:02" in shown and "…" in shown  # cut to the line
    assert shown.rstrip().endswith(("\x1b[2K", "\x1b[?25h"))  # the line is gone, the cursor is back
    assert ("\x1b[3" in shown) == colours


RICH = """
import io, random, sys
from shardwright.launch.progress import Display, Work
if sys.argv[1] == "display":
    assert "rich" not in sys.modules
random.seed(3)
state = random.getstate()
if sys.argv[1] == "display":
    display = Display(io.StringIO(), live=True)
    display.begin(Work("capture of the model"))
else:
    import shardwright.report.tables
assert "rich.style" in sys.modules and random.getstate() == state
"""


@pytest.mark.parametrize("what", ["display", "tables"])
def test_what_is_shown_draws_no_random_numbers(what):
    """rich draws one at its import: a forward that is captured meanwhile seemed to draw it, and was refused."""
    done = fresh(RICH, what)
    assert done.returncode == 0, done.stderr


def test_short_work_says_nothing_and_leaves_no_thread(capfd, caplog):
    before = threading.active_count()
    with caplog.at_level("INFO"), commanded(), Work("capture"):
        assert threading.active_count() == before + 1
    sw.plan(torch.nn.Linear(8, 8), (torch.zeros(8, 8),), devices=2)
    assert not capfd.readouterr().err
    assert not [record for record in caplog.records if record.name == "shardwright.progress"]


def test_the_thread_shows_what_is_due(monkeypatch):
    written = threading.Event()

    class Log(io.StringIO):
        def flush(self) -> None:
            written.set()

    monkeypatch.setattr(progress, "EVERY", 0.0)
    log = Log()
    display = Display(log)
    token = progress._SHOWN.set(display)
    try:
        with Work("saving", 4, "tensors"):
            assert written.wait(PATIENCE)
    finally:
        progress._SHOWN.reset(token)
    assert log.getvalue().startswith(f"{PREFIX}saving: 0 of 4 tensors; 0 s")


def test_a_library_writes_to_the_log_where_somebody_reads_it(monkeypatch, caplog, capfd):
    monkeypatch.setattr(Display, "_start", lambda self: None)
    monkeypatch.delenv(TOKEN, raising=False)
    caplog.set_level(logging.WARNING, "shardwright.progress")
    with Work("capture"):
        assert (display := keeper()) is not None and display._stream is None and not display._log
    with caplog.at_level(logging.INFO, "shardwright.progress"):
        with Work("capture"):
            display = keeper()
            assert display is not None
            display._last_line -= EVERY
            display.tick()
        assert [record.getMessage() for record in caplog.records] == ["capture; 0 s"]
    monkeypatch.setenv(TOKEN, "x" * 40)  # a worker of `shardwright run`: its standard error is its log
    with Work("capture"):
        display = keeper()
        assert display is not None
        display._last_line -= EVERY
        display.tick()
    assert capfd.readouterr().err == f"{PREFIX}capture; 0 s\n"


def test_only_rank_0_shows(monkeypatch):
    monkeypatch.setattr(Display, "_start", lambda self: None)
    for rank in "01":
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv(TOKEN, "x" * 40)
        with Work("capture"):
            display = keeper()
            assert display is not None and (display._stream is not None) == (rank == "0")


def test_quiet_is_silence_and_what_is_silent_outside_stays_so(monkeypatch, caplog):
    monkeypatch.setattr(Display, "_start", lambda self: None)

    def seen() -> bool:
        with Work("capture"):
            display = keeper()
            assert display is not None
            return display._log or display._stream is not None

    with caplog.at_level(logging.INFO, "shardwright.progress"):
        assert seen()
        with sw.quiet():
            assert not seen()
            with showing(True), showing(None):
                assert not seen()
        with showing(print):  # a function is told instead
            assert not seen()
        assert seen()


def test_a_setting_mutes_a_command_inside_of_it(logged):
    display, clock, text = logged
    with Work("plan"):
        with showing(False):
            clock.now += 11
            display.tick()
            assert not text.getvalue()
        display.tick()
    assert text.getvalue() == f"{PREFIX}plan; 11 s\n"


def test_ctrl_c_says_the_innermost_phase_once_and_passes_on(capfd):
    with pytest.raises(KeyboardInterrupt), Work("checkpoint of step 3", if_stopped="the earlier checkpoints are whole"):
        for number in each(range(9), "tensors", "tensors"):
            if number == 2:
                raise KeyboardInterrupt
    assert capfd.readouterr().err == (
        f"{PREFIX}stopped by Ctrl-C in tensors: 2 of 9 tensors, after 0 s; the earlier checkpoints are whole\n"
    )
    with pytest.raises(KeyboardInterrupt), sw.quiet(), Work("capture"):
        raise KeyboardInterrupt
    with pytest.raises(ValueError), Work("capture"):
        raise ValueError
    assert not capfd.readouterr().err


def test_a_command_gets_what_is_kept():
    with commanded(silent=True) as display:
        with pytest.raises(KeyboardInterrupt), Work("search", if_stopped="nothing"):
            keep(lambda: 7)
            raise KeyboardInterrupt
        assert display.stopped == "search, after 0 s" and display.if_stopped == "nothing"
        assert display.best is not None and display.best() == 7


def test_a_stop_that_a_script_has_caught_is_forgotten():
    with commanded(silent=True) as display:
        with pytest.raises(KeyboardInterrupt), Work("search", if_stopped="nothing"):
            raise KeyboardInterrupt
        assert display.stopped
        with Work("save"):
            assert not display.stopped and not display.if_stopped


def test_a_closed_log_ends_no_work(logged):
    display, clock, text = logged
    text.close()
    with Work("capture"):
        clock.now += 11
        display.tick()


def test_the_launcher_shows_the_work_of_rank_0(tmp_path, monkeypatch):
    """The last line of a worker says so: in a log it is a line, on a terminal it stands behind the workers' state."""
    from shardwright.launch import console

    log = tmp_path / "worker_0.log"
    settings = SimpleNamespace(worker_log=lambda rank, attempt: str(log))
    clock, out = Clock(), io.StringIO()
    monkeypatch.setattr(console.time, "monotonic", clock)
    shown = console.Progress(settings, out)  # type: ignore[arg-type]  # only its logs are asked for
    shown.started({0: 11, 1: 12})
    assert out.getvalue().startswith("started 2 workers")
    for text, message in (
        ("hello\n", ""),
        (
            f"{PREFIX}calibration: 1 of 2 levels of links; 10 s\n",
            "worker 0: calibration: 1 of 2 levels of links; 10 s\n",
        ),
        ("", ""),  # the same line
    ):
        with log.open("a") as file:
            file.write(text)
        before = out.getvalue()
        clock.now += 1.5
        shown.look()
        assert out.getvalue().removeprefix(before) == message
    assert shown._state().endswith("running: 0-1  calibration: 1 of 2 levels of links; 10 s")
    clock.now += 0.5  # looks once a second
    log.write_text("hello\n")
    shown.look()
    assert "calibration" in shown._state()
    clock.now += 0.6
    shown.look()
    assert "calibration" not in shown._state()
