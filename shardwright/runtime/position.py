"""Where this rank is in its program: noted while it runs, read by the thread that watches it (`peers`).

A note is two assignments: nothing is sent, and a collective that is under way can be named from outside of it.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from ..errors import PACKAGE_FOLDER

__all__ = ["Place", "Position", "noted", "position", "users_line", "waiting"]


@dataclass(frozen=True)
class Place:
    """Something that several ranks do together.

    Attributes:
        what: in words: ``the all_gather of fc2 (net.py:41), forward``.
        ranks: of the world, those that take part; none: all.
        back: whether it is of a backward.
        key: of a meeting, at which the rank itself looks after those that do not come (`steps`): the same for all that
            come to it; "": it is none.
    """

    what: str
    ranks: tuple[int, ...] = ()
    back: bool = False
    key: str = ""


class Position:
    """Attributes:
        place: what the rank is in, or None: it computes, or is outside of the model.
        moves: how often it has come to a place.
        call: how many calls of planned models it has begun.
        program: what the latest of them runs, in words.
        back: whether the rank has come to a place of a backward since the latest began.
    """

    __slots__ = ("back", "call", "moves", "place", "program")

    def __init__(self) -> None:
        self.place: Place | None = None
        self.moves = self.call = 0
        self.back = False
        self.program = ""

    @property
    def now(self) -> tuple[int, int, Place | None]:
        """What is another value whenever the rank has moved."""
        return self.moves, self.call, self.place


#: Of this process: one rank.
position = Position()


class waiting:
    """While active, this rank is at `place`."""

    __slots__ = ("place",)

    def __init__(self, place: Place) -> None:
        self.place = place

    def __enter__(self) -> None:
        position.place = self.place
        position.moves += 1
        position.back |= self.place.back

    def __exit__(self, *_: object) -> None:
        position.place = None


def noted(steps: Sequence[Callable[[Any], Any]], place: Place) -> tuple[Callable[[Any], Any], ...]:
    """The steps of a conversion as one, which is at `place` while it runs."""
    steps, back = tuple(steps), place.back

    def run(x: Any) -> Any:  # not `waiting`, which takes longer
        position.place = place
        position.moves += 1
        if back:
            position.back = True
        try:
            for step in steps:
                x = step(x)
            return x
        finally:
            position.place = None
    return (run,)


_NOT_THE_USERS = (os.path.dirname(torch.__file__), PACKAGE_FOLDER)
_LIBRARY = sysconfig.get_paths()["stdlib"]


def users_line() -> str:
    """Where the main thread is, in the user's own program: ``train.py:57 in main``; "" where it is in none."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name.strip('<>')}"


def _is_users(frame: FrameType) -> bool:
    name = os.path.abspath(frame.f_code.co_filename)
    library = name.startswith(_LIBRARY + os.sep) and "site-packages" not in name
    return not (frame.f_code.co_filename.startswith("<") or library or name.startswith(_NOT_THE_USERS))
