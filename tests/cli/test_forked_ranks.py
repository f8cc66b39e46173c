"""Forked processes: what they answer, and what is said of those that do not."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from ranks import PATIENCE

from shardwright.cli import forked_ranks
from shardwright.cli.forked_ranks import ForkedAnswer, in_children
from shardwright.errors import SettingError


def fail() -> None:
    raise ValueError("first\nsecond")


def refuse() -> None:
    raise SettingError("wrong", legal="right")


def test_answers_of_forked_processes() -> None:
    assert in_children([lambda: 1, os.getppid], PATIENCE) == [ForkedAnswer(1), ForkedAnswer(os.getpid())]
    assert in_children([fail], PATIENCE) == [ForkedAnswer(error="ValueError: first")]
    assert in_children([refuse], PATIENCE) == [ForkedAnswer(error="wrong", mend="right")]
    assert in_children([lambda: os._exit(3)], PATIENCE) == [ForkedAnswer(error="the process ended with exit code 3")]
    assert in_children([lambda: os.kill(os.getpid(), signal.SIGKILL)], PATIENCE)[0].error.endswith("SIGKILL")


def test_a_process_without_an_answer_is_killed(tmp_path: Path) -> None:
    def sleep() -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(600)

    for seconds in (0.5, 5.0, 50.0):  # a busy machine may need more of them to begin
        answers = in_children([os.getpid, sleep], seconds)
        assert answers[1] == ForkedAnswer(error=f"no answer within {seconds:g} s")
        if (tmp_path / "pid").exists() and answers[0].value is not None:
            break
    assert isinstance(answers[0].value, int)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_one_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once one has failed, the others are waited for no longer than a second."""
    waits: list[float] = []
    monkeypatch.setattr(forked_ranks, "wait", lambda pending, left: (waits.append(left), wait(pending, left))[1])
    answers = in_children([fail, lambda: time.sleep(600)], 120)
    assert answers[1].error == "ended, since another process failed"
    assert waits[0] > 100 and waits[-1] <= 1
