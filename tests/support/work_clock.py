"""Seconds of a search, counted in its work: the same answer on a busy machine as on a quiet one."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

from shardwright.solver import anytime, milp as highs, solve
from shardwright.solver.problem import Problem, Solution

#: Work of HiGHS that is a second of its own: `milp.WORK` is about ten.
SECOND = highs.WORK / 10


@contextlib.contextmanager
def seconds_of_work(look: float = 1e-3) -> Iterator[None]:
    """Inside, a search with ``seconds=`` ends after a number of its steps: at each look at the clock, which it takes
    between two steps, `look` seconds have passed. HiGHS, which has a clock of its own, is asked for work."""

    def asked_for_work(problem: Problem, *, seconds: float | None = None, work: float | None = None) -> Solution:
        return highs.milp(problem, work=work if seconds is None else seconds * SECOND)

    looks: Any = itertools.count(0.0, look)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: next(looks))
        for module in (anytime, solve):
            patch.setattr(module, "milp", asked_for_work)
        yield
