"""Source lines of the user's code: the user's files, the line and the module of a node, the origin of an error.

1. A file is the user's where it is part of neither Shardwright nor torch nor Python (`is_users`).
2. The line of a node, or of a call, is the innermost one in a file of the user (`source_of`, `calling_line`).
3. An error is a mistake of this package where its innermost line is the package's (`is_mistake`).

Example: a call of ``self.fc(x)`` has the frames ``/home/me/model.py``, line 7, and ``torch/nn/modules/linear.py``, line
134. The user's line is "model.py:7".
"""

from __future__ import annotations

import functools
import re
import sys
import sysconfig
import traceback
from types import FrameType

import torch

from ..errors import PACKAGE_FOLDER, place_text

__all__ = [
    "UsersLine",
    "calling_line",
    "calling_module",
    "innermost",
    "is_mistake",
    "is_users",
    "module_path",
    "source_of",
    "stack_level",
    "user_frame",
]

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in ')


#: Key of a node's metadata that holds its line.
_LINE, _PATH, _CALLING = "shardwright_line", "shardwright_path", "shardwright_calling"

_TORCH = torch.__file__.rsplit("/", 1)[0] + "/"


_PYTHON = sysconfig.get_path("stdlib") + "/"

#: The begin of the names that IPython gives to what is typed in a terminal; cells of notebooks have names of files.
_CELL = "<ipython-input-"


@functools.cache
def is_users(file: str) -> bool:
    """True where a file is not part of Shardwright, torch or Python; an installed package may be the user's model, and
    so may what is typed into IPython."""
    return not (
        file.startswith((PACKAGE_FOLDER, _TORCH))
        or (file.startswith("<") and not file.startswith(_CELL))
        or (file.startswith(_PYTHON) and "-packages/" not in file)
        or file.endswith("/typing_extensions.py")  # around what torch calls deprecated
    )


def user_frame(frames: list[tuple[str, int]]) -> str:
    """The innermost frame in a file of the user, as ``file.py:41``; "" where there is none."""
    return next((place_text(file, line) for file, line in reversed(frames) if is_users(file)), "")


def stack_level() -> int:
    """The ``stacklevel`` with which the calling function warns at the user's innermost line."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level if frame is not None else 2


def calling_line() -> str | None:
    """The user's line that is being run, ``file.py:41``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else place_text(frame.f_code.co_filename, frame.f_lineno)


def source_of(node: torch.fx.Node) -> str:
    """``file.py:41``, the user's line of a node; read once a node."""
    line = node.meta.get(_LINE)
    if line is None:
        trace = node.meta.get("stack_trace") or ""
        line = node.meta[_LINE] = user_frame([(m["file"], int(m["line"])) for m in _FRAME.finditer(trace)])
    return line


def module_path(node: torch.fx.Node, prefix: str) -> str:
    """The path of the module that calls a node, without the path `prefix` of the user's model."""
    path = node.meta.get(_PATH)
    if path is None:
        stack = node.meta.get("nn_module_stack")
        path = node.meta[_PATH] = stack[next(reversed(stack))][0] if stack else ""
    return path.removeprefix(prefix).removeprefix(".") if path.startswith(prefix) else path


def calling_module(node: torch.fx.Node) -> str:
    """The path of the module that calls a node, without the number that export adds at a further call."""
    path: str | None = node.meta.get(_CALLING)
    if path is None:
        path = node.meta[_CALLING] = module_path(node, "").partition("@")[0]
    return path


class UsersLine:
    """A stack of one line, in place of the whole Python stack.

    Export formats the whole stack line by line for every operator, a sixth of its time.
    """

    @staticmethod
    def extract() -> type[UsersLine]:
        return UsersLine

    @staticmethod
    def summary() -> traceback.StackSummary:
        """The user's innermost line alone."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not is_users(frame.f_code.co_filename):
            frame = frame.f_back
        lines = [] if frame is None else [(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, None)]
        return traceback.StackSummary.from_list(lines)


def innermost(tracer: object, frames: traceback.StackSummary) -> traceback.StackSummary:
    """The user's innermost line, which may be in a helper: export keeps lines in functions called ``forward``."""
    return traceback.StackSummary.from_list([f for f in frames if is_users(f.filename)][-1:])


#: Errors by which a mistake in a program shows.
_MISTAKES = (AttributeError, LookupError, NameError, TypeError, AssertionError)


def is_mistake(error: BaseException) -> bool:
    """True for a mistake of this package; False where tensors without elements may be the cause of an error.

    The model and torch raise anything on such tensors. A mistake is an error of a kind in `_MISTAKES` whose innermost
    line is a line of this package. Special methods do not count, since they pass the model's own calls on (marks,
    stand-ins, attributes).
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = frames and frames[-1].filename.startswith(PACKAGE_FOLDER) and not frames[-1].name.startswith("__")
    return bool(ours and isinstance(error, _MISTAKES))
