"""Calls of a forward that a captured program would repeat wrongly or leave out: prints and logs, hooks, numbers taken
out of tensors.

    print, a log                    recorded, and repeated at each call of the program
    the same of a tensor's values   an error: no tensor has values while a model is captured. A number that was taken
                                    out of a tensor by ``item()`` is a symbol of torch then, such as ``zuf0``
    a hook on a tensor or module    an error
    a collective of torch           an error (`hybrid_models.refused_collective`)
"""

from __future__ import annotations

import builtins
import contextlib
import io
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError, place_text
from ..torch_private import hooks_of, hooks_of_all_modules
from .hybrid_models import refused_collective
from .observed.stand_ins import by_user, frames, held_by
from .side_effects import Effects, Logged, Printed
from .source_lines import calling_line

__all__ = ["refuse_backward_hooks", "watched_calls"]

_VALUELESS = re.compile(r"(Fake|Functional)Tensor\(")

#: The text of a number without a value, which `_VALUELESS` finds.
_UNKNOWN = "FakeTensor(a number)"


@contextlib.contextmanager
def watched_calls(effects: Effects, running: Callable[[], bool]) -> Iterator[None]:
    """Record prints and logs of a forward in `effects` instead of writing them, and refuse hooks on its tensors.

    Args:
        effects: receives the texts.
        running: returns True while the forward runs.
    """

    def note_text(stream: Any, text: str) -> None:
        if _VALUELESS.search(text):
            raise CaptureError(
                "the forward prints the values of tensors, which are not there while it is captured: what a tensor "
                "holds, and what item() takes out of it, is known once the program runs",
                legal="a text without tensors, or a further output of the forward that is printed outside",
            )
        last, line = effects.entries[-1] if effects.entries else None, calling_line()
        if isinstance(last, Printed) and (last.stream, last.source) == (stream, line):
            effects.entries[-1] = Printed(stream, last.text + text, line)
        else:
            effects.entries.append(Printed(stream, text, line))

    def without_value(kind: type, name: str) -> Callable[..., str]:
        plain = getattr(kind, name)

        def text(self: Any, *args: Any) -> str:
            unknown = isinstance(self, torch.SymBool) or not self.node.has_hint()
            return _UNKNOWN if unknown and running() and by_user() else plain(self, *args)

        return text

    def without_collective(name: str) -> Callable[..., Any]:
        plain = getattr(groups, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            error = refused_collective(name, calling_line()) if running() and threading.get_ident() == thread else None
            if error is not None:
                raise error
            return plain(self, *args, **kwargs)

        return call

    thread = threading.get_ident()  # other threads, of a save in the background say, go on
    groups = getattr(sys.modules.get("torch.distributed"), "ProcessGroup", None)
    plain_print, plain_handle = builtins.print, logging.Logger.handle

    def print_(*args: Any, **kwargs: Any) -> None:
        file = held_by(kwargs.get("file"))
        if file is None or isinstance(file, _Stream) or not running() or not by_user():
            plain_print(*args, **kwargs)
            return
        text = io.StringIO()
        plain_print(*args, **{**kwargs, "file": text, "flush": False})
        note_text(file, text.getvalue())

    def handle(self: logging.Logger, record: logging.LogRecord) -> None:
        if not running() or not by_user() or _once():
            plain_handle(self, record)
            return
        text = record.getMessage()
        if _VALUELESS.search(text):
            raise CaptureError(
                "the forward logs the values of tensors, which are not there while it is captured: what a tensor "
                "holds, and what item() takes out of it, is known once the program runs",
                legal="a text without tensors, or a further output of the forward that is logged outside",
            )
        effects.entries.append(Logged(self, record.levelno, text, record.pathname, record.lineno))

    def refused(name: str) -> Callable[..., Any]:
        plain = getattr(torch.Tensor, name)

        def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if running() and by_user():
                raise CaptureError(
                    f"the forward calls {name} on a tensor, which the captured program would leave out",
                    legal="a torch.autograd.Function with that backward, or a further output of the forward on "
                    f"which {name} is called outside",
                )
            return plain(self, *args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name, ours in (
            (builtins, "print", print_),
            (logging.Logger, "handle", handle),
            *((torch.Tensor, n, refused(n)) for n in _TENSOR_HOOKS),
            *((kind, n, without_value(kind, n)) for kind in _NUMBERS for n in ("__str__", "__repr__", "__format__")),
            *((groups, n, without_collective(n)) for n in _COLLECTIVES if hasattr(groups, n)),
            (sys, "stdout", _Stream(sys.stdout, "stdout", note_text, running)),
            (sys, "stderr", _Stream(sys.stderr, "stderr", note_text, running)),
        ):
            if name in vars(owner):  # as stored: getattr of a class unwraps methods of C++
                stack.callback(setattr, owner, name, vars(owner)[name])
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, ours)
        yield


#: Methods of a process group that torch's own collectives end in, where these leave no operator in the program.
_COLLECTIVES = (
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "scatter",
    "send",
)
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_TENSOR_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")


class _Stream:
    """A stream that records the writes of the user's forward, and passes all other writes on."""

    def __init__(self, stream: Any, name: str, note: Callable[[Any, str], None], running: Callable[[], bool]) -> None:
        self._stream, self._name, self._note, self._running = stream, name, note, running

    def write(self, text: str) -> int:
        if self._running() and by_user():
            self._note(self._name, text)
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _once() -> bool:
    """True for a message that is given once, by `logger.warning_once` of transformers, say."""
    for depth, frame in enumerate(frames()):
        if frame.f_code.co_name.endswith("_once"):
            return True
        if depth > 8:
            break
    return False


def refuse_backward_hooks(modules: list[tuple[str, nn.Module]]) -> None:
    """Refuse hooks of modules that run in the backward.

    Raises:
        CaptureError: with the line of the hook.
    """
    for path, hooks in [
        *((path, table) for path, m in modules for table in (hooks_of(m).backward, hooks_of(m).backward_pre)),
        ("all modules", hooks_of_all_modules().backward),
        ("all modules", hooks_of_all_modules().backward_pre),
    ]:
        for hook in hooks.values():
            code = getattr(getattr(hook, "__func__", hook), "__code__", None)
            line = None if code is None else place_text(code.co_filename, code.co_firstlineno)
            raise CaptureError(
                f"{path} has a hook that runs in its backward, which the captured program would leave out",
                source=line,
                legal="a torch.autograd.Function in the forward, a hook of a parameter, or "
                "register_full_backward_hook on the AutoParallel model",
            )
