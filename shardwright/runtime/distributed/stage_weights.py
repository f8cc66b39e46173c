"""The weights of one stage of a pipeline on this rank, and the reductions of their gradients, over the micro-batches of
a step.

    begin_step       weights that micro-batches share are gathered; the first forward waits for them
    begin_backward   …   end_backward      the gradients of one micro-batch are scattered as they come (optimizer level
                                           2 and 3), else accumulated; in the last one sums and scatters of what is
                                           accumulated begin as the last term of each gradient comes
    finish_step      everything is waited for

The messages and their moments are those of the schedule of communication (`Plan.stage_schedule`). On Gloo a weight is
gathered by itself in front of the first forward, and its gradient is scattered by itself: at the end of the step, or as
it comes.

Under `no_sync`, and while a parameter keeps a term of a backward under it, a step leaves gradients unsummed. The
backward of the loss then treats them as those of any program (`gradient_sums`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...redistribution import digits_value
from ..optimizer_guard import Accumulation
from ..profile_ranges import gather_text, range_of, scatter_text
from .gradient_sums import GradientSums
from .rank_executor import RankExecutor

__all__ = ["StageSums", "StageWeights"]


class StageSums(GradientSums):
    """The sums and scatters of a stage's gradients, which one step of a pipeline begins and finishes.

    Args: as of `GradientSums`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step: StageWeights | None = None  # of the step that runs
        self._second_half = False
        self._carried: list[int] = []  # messages of the latest backward that are still under way
        self._places: dict[nn.Parameter, tuple[int, int]] = {}  # bucket, and place in it

    def begin_step(self, step: StageWeights) -> None:
        """Begin a step; its complete gradients go to `StageWeights.take`."""
        self._step, self._next, self._carried, self._second_half = step, 0, [], False
        self._clear()
        self._places = {p: (k, i) for k, bucket in enumerate(self._buckets) for i, p in enumerate(bucket.parameters)}

    def finish_step(self) -> None:
        """Wait for everything."""
        self._finish_travelling()
        self._step = None

    def _is_once(self, number: int) -> bool:
        return self._schedule.messages[number].once

    def begin_backward(self) -> None:
        """Begin the backward of a micro-batch."""
        for number, scatters in self._scatter_buckets.items():
            if not self._is_once(number):
                scatters.clear()

    def end_backward(self) -> None:
        """End the backward of a micro-batch: issue what has come, and wait for what the next one does not wait for."""
        each = [scatters for number, scatters in self._scatter_buckets.items() if not self._is_once(number)]
        for scatters in each:
            if not scatters.started and any(term is not None for term in scatters.terms):
                self._begin_scatters(scatters)
        begun = [scatters.number for scatters in each if scatters.started]
        self._carried += [number for number in begun if number in self._schedule.carried]
        for _ in range(2):  # a sum over further replicas may follow
            for number in begun:
                if number not in self._schedule.carried:
                    self.finish(number)

    def _begin_scatters(self, bucket: Any) -> None:
        if not self._is_once(bucket.number):
            for number in self._carried:
                self.finish(number)
            self._carried = []
        super()._begin_scatters(bucket)

    def note(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Put a rank's term of a gradient into its bucket. A bucket is summed when all of its terms have come, and the
        buckets before it."""
        number, place = self._places[parameter]
        bucket = self._buckets[number]
        bucket.gradients[place] = gradient
        bucket.missing -= 1
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._start(self._buckets[self._next])
            self._next += 1

    def start_rest(self) -> None:
        """Begin what waits for gradients that do not come."""
        for bucket in self._buckets[self._next :]:
            if bucket.missing < len(bucket.parameters):
                self._start(bucket)
        self._next = len(self._buckets)
        for number, scatters in self._scatter_buckets.items():
            if self._is_once(number) and not scatters.started:
                self._begin_scatters(scatters)

    def hand(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        if self._step is None:
            super().hand(parameter, gradient)
        else:
            self._step.take(parameter, gradient)

    def note_backward(self) -> None:
        if self._step is None:
            super().note_backward()

    def _came(self, bucket: Any, place: int, leaf: Tensor) -> None:
        if leaf.grad is not None:  # else the step has summed it
            super()._came(bucket, place, leaf)

    def second_half(self, runs: bool) -> None:
        """Say that the second half of a backward in two runs: autograd then wants a gradient for each weight."""
        self._second_half = runs

    def nothing(self, parameter: nn.Parameter) -> Tensor | None:
        if self._step is None or not self._second_half:
            return None
        leaf = self._step.stored[parameter]
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.new_zeros(()).expand(leaf.shape)


class StageWeights:
    """The weights of one stage, in one step after the other.

    Args:
        body: the stage's program.
        sums: of its gradients.
        parameters: the stage's parameters, by name.
        cut: the gathered parameters whose gradients are scattered after every micro-batch.
        accumulation: the state of `no_sync`.
        rank: of this process in its stage.

    Attributes:
        stored: parameter -> the leaf of the step, as the parameter is stored; it gets the gradient.
    """

    def __init__(
        self,
        body: RankExecutor,
        sums: StageSums,
        parameters: Mapping[str, nn.Parameter],
        cut: Collection[str],
        accumulation: Accumulation,
        rank: int,
    ) -> None:
        self._body, self._sums, self._parameters, self._accumulation = body, sums, parameters, accumulation
        self._cut, self._rank = cut, rank
        self._once = {name for gather in body.gathered_once for name in gather.names}
        self._scattered = {scatter.name for scatter in body.scattered if scatter.message is not None}
        self.stored: dict[nn.Parameter, Tensor] = {}
        self._used: dict[str, Tensor] = {}
        self._owed: dict[str, Tensor] = {}  # gradients so far: layout as used, dtype as stored
        self._late: dict[str, None] = {}  # parameters whose sum or scatter the last micro-batch is to begin, in order
        self._summed = False
        self._last = False

    def begin_step(self, stored: Mapping[str, Tensor], trains: bool) -> dict[str, Tensor]:
        """Begin a step. The leaves that the program computes on are returned: the parameters' memory, or their gathered
        weights, of which some are still under way.

        Args:
            stored: leaves on the parameters' memory, by name.
            trains: True where a backward follows.
        """
        gathers = self._body.gathers
        self.stored = {self._parameters[name]: leaf for name, leaf in stored.items()}
        self._used, self._owed, self._last = dict(stored), {}, False
        self._summed = trains and not self._accumulation.open and not self._accumulation.unsummed
        self._late = dict.fromkeys(
            name
            for name in stored
            if (name in self._body.sums and self._summed)
            or (name in gathers and name in self._scattered and name not in self._cut)
        )
        self._sums.begin_step(self)
        for once in self._body.gathered_once:
            self._used.update(zip(once.names, once.begin([stored[name] for name in once.names])))
        for name, gather in gathers.items():
            if name not in self._once:
                with torch.no_grad(), range_of(gather_text(name)):
                    self._used[name] = gather(stored[name].detach()).requires_grad_(stored[name].requires_grad)
        for name in {**gathers, **self._late} if trains else ():
            if stored[name].requires_grad:
                self._used[name].register_post_accumulate_grad_hook(partial(self._hooked, name))
        return self._used

    def arrive(self) -> None:
        """Wait for all gathers of the step that the program does not wait for."""
        for once in self._body.gathered_once:
            once.arrive()

    # -- gradients --

    def begin_backward(self, last: bool) -> None:
        """Begin the backward of a micro-batch.

        Args:
            last: True where the stage computes no gradient of a weight after it.
        """
        self._last = last
        self._sums.begin_backward()

    def second_half(self, runs: bool) -> None:
        """Say that the second half of a backward in two begins, or has ended."""
        self._sums.second_half(runs)

    def _hooked(self, name: str, used: Tensor) -> None:
        self.came((name,))

    def came(self, names: Iterable[str]) -> None:
        """Note that the terms of this micro-batch are in the gradients of some weights."""
        for name in names:
            used = self._used[name]
            if used.grad is None:
                continue
            if name in self._cut:
                gradient, used.grad = used.grad, None
                self._reduce(name, gradient)
                continue
            self._widen(name)
            if self._last and name in self._late:
                self._reduce(name, self._accumulated(name))

    def _widen(self, name: str) -> None:
        """Sum gradients in the dtype in which the parameter is stored, where they come in another one."""
        used, leaf = self._used[name], self.stored[self._parameters[name]]
        if used.grad is not None and used.dtype != leaf.dtype:
            gradient, used.grad = used.grad, None
            before = self._owed.get(name)
            self._owed[name] = gradient.to(leaf.dtype) if before is None else before.add_(gradient)

    def _accumulated(self, name: str) -> Tensor:
        """The gradient of a weight, which is complete on this rank; it is removed."""
        used = self._used[name]
        gradient = self._owed.pop(name, used.grad)
        used.grad = None
        assert gradient is not None
        return gradient

    def _reduce(self, name: str, gradient: Tensor) -> None:
        """Reduce a gradient in the layout of the program to that of the storage; it may travel."""
        parameter, gather = self._parameters[name], self._body.gathers.get(name)
        due, part = name in self._late, gradient
        self._late.pop(name, None)
        with torch.no_grad():
            if gather is not None:
                with range_of(scatter_text(name)):
                    part = gather.back(gradient.to(self.stored[parameter].dtype))
            if part is None:  # under way
                return
            if due and name in self._body.sums:
                self._sums.note(parameter, part)
            else:
                self.take(parameter, part)

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient in the layout of the storage."""
        leaf = self.stored[parameter]
        with torch.no_grad():
            leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)

    def end_backward(self) -> None:
        """End the backward of a micro-batch."""
        self.came(self._body.gathers)  # those of a backward in two halves
        if self._last:
            self.came(tuple(self._late))
            self._sums.start_rest()
        self._sums.end_backward()
        for gather in self._body.regathers:
            gather.forget()

    def finish_step(self) -> frozenset[str]:
        """End the step: the leaves of `stored` have the gradients.

        Returns:
            The names of the parameters whose gradients are summed over replicas.
        """
        for name in self._body.gathers:
            if self._used[name].grad is not None or name in self._owed:
                self._reduce(name, self._accumulated(name))
        self._sums.finish_step()
        self._used, self._owed = {}, {}
        return frozenset(self._body.sums) if self._summed else frozenset()

    def hand(self, name: str, gradient: Tensor) -> None:
        """Hand a summed gradient over to its parameter."""
        if self._accumulation.unsummed:  # the end of this backward sums these
            self._sums.note_backward()
        self._sums.hand(self._parameters[name], gradient)

    def with_part(self, name: str, gradient: Tensor | None, part: Tensor, summed: bool) -> Tensor | None:
        """The sum of a leaf's gradient and a later stage's part of it. The part is complete; where ranks' terms of the
        leaf are still to be summed, the first rank alone adds it."""
        if not summed and digits_value(self._body.sums.get(name, ()), self._rank):
            return gradient
        return part if gradient is None else gradient + part
