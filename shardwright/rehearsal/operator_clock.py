"""Seconds of each operator of a rank's program, in the forward and in the backward.

    forward     around each call of a local operator
    backward    around each function of autograd that the call has made; a call that recomputes counts here too

A span is exclusive: an operator that is recomputed inside another one's backward is taken off from that. On the CPU
the clock is the process's; on an accelerator spans lie between two events of its stream, which are read after the
step. What is in no span (copies of redistributions, sums of gradients, autograd itself) is the rest of the step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..partition.local_program import LocalOp
from ..rules.random_numbers.counter_rng import PLAIN
from ..runtime.profile_ranges import around_backward
from ..torch_private import backward_number

__all__ = ["OperatorClock"]


@dataclass
class _Span:
    operator: str
    half: str
    start: Any
    stop: Any = None
    inside: list[_Span] = field(default_factory=list)


class OperatorClock:
    """Measures the operators of programs on one device.

    Args:
        device: on which the operators run.

    Attributes:
        runs: True while spans are recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self.runs = False
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._open: list[_Span] = []
        self._spans: list[_Span] = []

    def timed(self, instruction: LocalOp) -> Callable[..., Any]:
        """The function of a local operator, which measures itself."""
        target, operator = PLAIN.get(instruction.target, instruction.target), instruction.operator

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.runs:
                return target(*args, **kwargs)
            span = self._begin(operator, "forward" if backward_number() == -1 else "backward")
            try:
                made = target(*args, **kwargs)
            finally:
                self._end(span)
            around_backward(made, (args, kwargs), lambda: self._begin_back(operator), self._end)
            return made

        call.__name__ = f"timed_{instruction.op.kind}"
        # With the attributes of the overload: the lowering asks its schema how many results there are.
        return functools.update_wrapper(call, instruction.target, assigned=())

    def _begin_back(self, operator: str) -> _Span | None:
        return self._begin(operator, "backward") if self.runs else None

    def _begin(self, operator: str, half: str) -> _Span:
        span = _Span(operator, half, self._now())
        (self._open[-1].inside if self._open else self._spans).append(span)
        self._open.append(span)
        return span

    def _end(self, span: _Span) -> None:
        span.stop = self._now()
        while self._open and self._open.pop() is not span:
            pass

    def _now(self) -> Any:
        if self._module is None:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Wait for the device."""
        if self._module is not None:
            self._module.synchronize()

    def step(self, play: Callable[[], None]) -> tuple[float, dict[tuple[str, str], float]]:
        """Play one step.

        Returns:
            The seconds of the step, and those of each (operator, "forward" or "backward") that ran.
        """
        self._open.clear()
        self._spans.clear()
        self.wait()
        self.runs, start = True, time.perf_counter()
        try:
            play()
            self.wait()
        finally:
            self.runs = False
        seconds = time.perf_counter() - start
        out: dict[tuple[str, str], float] = {}
        for span in _all(self._spans):
            own = self._seconds(span) - sum(map(self._seconds, span.inside))
            out[span.operator, span.half] = out.get((span.operator, span.half), 0.0) + max(0.0, own)
        self._spans.clear()
        return seconds, out

    def _seconds(self, span: _Span) -> float:
        if span.stop is None:  # an error came between
            return 0.0
        return span.stop - span.start if self._module is None else span.start.elapsed_time(span.stop) / 1e3


def _all(spans: list[_Span]) -> Iterator[_Span]:
    for span in spans:
        yield span
        yield from _all(span.inside)
