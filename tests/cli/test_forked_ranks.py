"""Forked processes: what they answer, and what is said of those that do not."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from shardwright.cli.forked_ranks import ForkedAnswer, in_children
from shardwright.errors import SettingError


def fail() -> None:
    raise ValueError("first\nsecond")


def refuse() -> None:
    raise SettingError("wrong", legal="right")


def test_answers_of_forked_processes() -> None:
    assert in_children([lambda: 1, os.getppid], 20) == [ForkedAnswer(1), ForkedAnswer(os.getpid())]
    assert in_children([fail], 20) == [ForkedAnswer(error="ValueError: first")]
    assert in_children([refuse], 20) == [ForkedAnswer(error="wrong", mend="right")]
    assert in_children([lambda: os._exit(3)], 20) == [ForkedAnswer(error="the process ended with exit code 3")]
    assert in_children([lambda: os.kill(os.getpid(), signal.SIGKILL)], 20)[0].error.endswith("SIGKILL")


def test_a_process_without_an_answer_is_killed(tmp_path: Path) -> None:
    def sleep() -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(60)

    for seconds in (0.5, 5.0, 50.0):  # a busy machine may need more of them to begin
        answers = in_children([os.getpid, sleep], seconds)
        assert answers[1] == ForkedAnswer(error=f"no answer within {seconds:g} s")
        if (tmp_path / "pid").exists():
            break
    assert isinstance(answers[0].value, int)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_one_that_fails_ends_the_others() -> None:
    begun = time.monotonic()
    answers = in_children([fail, lambda: time.sleep(60)], 60)
    assert answers[1].error == "ended, since another process failed" and time.monotonic() - begun < 30
