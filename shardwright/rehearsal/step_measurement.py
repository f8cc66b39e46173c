"""The measurement of a rank's step on one device: seconds of each operator, and the most bytes that are held.

Seconds (`OperatorClock`), in the forward and in the backward:

    forward        around each call of a local operator
    backward       around each function of autograd that the call has made; a call that recomputes counts here too

A span is exclusive: an operator that is recomputed inside another one's backward is taken off from that. On the CPU
the clock is the process's; on an accelerator spans lie between two events of its stream, which are read after the
step. What is in no span (copies of redistributions, sums of gradients, autograd itself) is the rest of the step.

Bytes (`most_held`), at any moment of a step:

    accelerator    the allocator's own count
    CPU            the memory of all tensors that are alive, counted after each operator; what an operator holds only
                   while it runs is not seen
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..partition.local_program import LocalOp
from ..rules.counter_rng import PLAIN
from ..runtime.profile_ranges import around_backward
from ..solver.search_memory import free_memory
from ..torch_private import TorchDispatchMode, backward_number, local_tensor, pytree, storage_id

__all__ = ["OperatorClock", "memory_of", "most_held"]


@dataclass
class _Span:
    operator: str
    half: str
    start: Any  # seconds, or an event of the device
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

    def timed(self, instruction: LocalOp) -> Callable[..., object]:
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

    def _now(self) -> object:
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


class _Alive(TorchDispatchMode):
    """The memory of the tensors that operators have seen or made, and that are still alive."""

    def __init__(self, standing: Iterable[Tensor]) -> None:
        super().__init__()
        self._memory: dict[int, tuple[StorageWeakRef, int]] = {}
        for x in standing:
            self._note(x)
        self.peak = self._now()

    def __torch_dispatch__(
        self,
        function: Any,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # a DTensor: the operators on its slice come here again
        result = function(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor):
                self._note(x)
        self.peak = max(self.peak, self._now())
        return result

    def _note(self, x: Tensor) -> None:
        if x.is_meta or isinstance(x, DTensor):
            return
        storage = x.untyped_storage()
        self._memory.setdefault(storage_id(storage), (StorageWeakRef(storage), storage.nbytes()))

    def _now(self) -> int:
        self._memory = {key: (ref, size) for key, (ref, size) in self._memory.items() if not ref.expired()}
        return sum(size for _, size in self._memory.values())


def most_held(play: Callable[[], None], standing: Iterable[Tensor], device: torch.device) -> int:
    """The most bytes held while `play` runs.

    Args:
        play: runs once.
        standing: the tensors that are there before. Other tensors from before are counted on an accelerator alone.
        device: on which they are.
    """
    if device.type == "cpu":
        with _Alive(local_tensor(x) if isinstance(x, DTensor) else x for x in standing) as alive:
            play()
        return alive.peak
    module = torch.get_device_module(device)
    module.synchronize()
    module.reset_peak_memory_stats(device)
    play()
    module.synchronize()
    return module.max_memory_allocated(device)


def memory_of(device: torch.device) -> float:
    """Bytes that are free on a device."""
    if device.type == "cpu":
        return free_memory()
    return float(torch.get_device_module(device).mem_get_info(device)[0])
