"""A count of captures, by kind: exports, and light runs that follow an export. The second run of a capture, which is
compared with the first, is not counted."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest import mock

import torch

__all__ = ["captured_once", "counted_captures", "without_lines"]


def without_lines(function: Any) -> Any:
    """A function that is no code of the user: what it calls has the line of the test."""
    function.__code__ = function.__code__.replace(co_filename="<support>")
    return function


@without_lines
def captured_once(*args: Any, **kwargs: Any) -> Any:
    """The graph of a capture without its second run, which checks the graph and does not change it: a reference."""
    module = import_module("shardwright.capture.export")
    with mock.patch.object(module, "check_again", lambda *_: None):
        return module.capture(*args, **kwargs)


def counted_captures(monkeypatch: Any = None) -> list[str]:
    """A list that receives "export" and "light run" as models are captured, in order. No model follows another one's
    program.

    Args:
        monkeypatch: puts everything back; None: it stays, in a process of its own.
    """
    seen: list[str] = []
    module, recapture = import_module("shardwright.capture.export"), import_module("shardwright.capture.recapture")
    export, run, check = torch.export.export, module.LightRun, module.check_again

    def exported(*args: Any, **kwargs: Any) -> Any:
        seen.append("export")
        return export(*args, **kwargs)

    class Run(run):
        def __init__(self, *args: Any) -> None:
            seen.append("light run")
            super().__init__(*args)

    def checked(*args: Any) -> None:
        before = len(seen)
        check(*args)
        del seen[before:]

    for function in (exported, Run.__init__, checked):
        without_lines(function)
    put = setattr if monkeypatch is None else monkeypatch.setattr
    recapture.forget_programs()
    put(recapture, "MOST_PROGRAMS", 0)
    put(torch.export, "export", exported)
    put(module, "LightRun", Run)
    put(module, "check_again", checked)
    return seen
