"""The memory of an operator of several instructions while these run, beyond its inputs, outputs and saved tensors.

The forward counts values inside the operator from their production to their last use; the backward counts their
gradients, from the backward of the consumer to that of the producer. The operator's program is taken alone: an input is
released after its last use, a saved tensor after the backward that uses it.

Example: a softmax over a cut dim is a maximum, a difference, an exponential, a sum and a quotient. While the difference
is computed, its result lies beside the input; once the exponential has consumed it, it is released.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace
from itertools import accumulate

from ..partition.local_program import Instruction, LocalOp, PlacedValue, made_by, reads
from ..partition.rematerialization import LiveRanges, waiting
from .search_space import OpCost, saved_inside

__all__ = ["inside", "without_gradients"]


def inside(cost: OpCost, from_outside: Set[int]) -> tuple[float, float]:
    """Bytes inside an operator at the fullest moment, in the forward and in the backward.

    Args:
        cost: the operator under one strategy.
        from_outside: the numbers of inputs that no operator produces; they and their gradients are counted elsewhere.
    """
    if len(cost.program) < 2:
        return 0.0, 0.0
    part = _Part(cost, from_outside)
    return part.forward(), part.backward()


class _Part:
    def __init__(self, cost: OpCost, from_outside: Set[int]) -> None:
        self.program, self.saved = cost.program, saved_inside(cost)
        self.internal = float(sum(saved.own_bytes for saved in self.saved))
        self.live_ranges = live_ranges = LiveRanges(cost.inputs, self.program, self.saved)
        self.asked = {i.name for k, i in enumerate(cost.inputs) if k not in from_outside}
        self.outputs = {i.name for i in cost.outputs}
        elsewhere = live_ranges.inputs - self.asked
        self.apart = {name for name, root in live_ranges.root.items() if root in elsewhere}
        self.born = {**dict.fromkeys(self.asked, 0), **live_ranges.born}
        self.saved_at: dict[str, int] = {}  # saved value -> the first instruction that saves it
        for place, saved in reversed(list(enumerate(self.saved))):
            self.saved_at.update(
                (live_ranges.root[name], place) for name in saved.values if live_ranges.root.get(name) in self.born
            )

    def bytes_of(self, names: Iterable[str]) -> float:
        return float(sum(self.live_ranges.tensors[name].local_bytes for name in names))

    def grows(self, name: str) -> bool:
        """True where a value has a gradient that is counted here."""
        return name not in self.apart and self.live_ranges.tensors[name].value.requires_grad

    def forward(self) -> float:
        live_ranges, end = self.live_ranges, len(self.program)
        stays = self.saved_at.keys() | {live_ranges.root[name] for name in self.outputs}
        spans = [
            (born, end if name in stays else live_ranges.read.get(name, 0) + 1, self.bytes_of([name]))
            for name, born in self.born.items()
        ]
        spans += [(place, end, float(saved.own_bytes)) for place, saved in enumerate(self.saved)]
        return _beyond(spans, self.bytes_of((self.asked | stays) & self.born.keys()) + self.internal)

    def backward(self) -> float:
        live_ranges, reached = self.live_ranges, {name for name in self.outputs if self.grows(name)}
        begin = dict.fromkeys(reached, 0)
        backward: list[tuple[int, Instruction]] = []
        until = [0] * len(self.program)  # by instruction, the moment after its backward
        for place, instruction in reversed(list(enumerate(self.program))):
            if any(made.name in reached for made in made_by(instruction)):
                backward.append((len(backward), instruction))
                reached.update(name for name in reads(instruction) if name in live_ranges.tensors and self.grows(name))
            until[place] = len(backward)
        spans = [
            (start, stop, self.bytes_of([name]))
            for name, start, stop in waiting(backward, live_ranges.tensors, begin, self.grows)
        ]
        spans += [(0, until[place], self.bytes_of([name])) for name, place in self.saved_at.items()]
        spans += [(0, until[place], float(saved.own_bytes)) for place, saved in enumerate(self.saved)]
        asked = {name for name in self.asked if self.grows(name)}
        return _beyond(spans, self.bytes_of(begin.keys() | asked) + self.bytes_of(self.saved_at) + self.internal)


def _beyond(spans: Iterable[tuple[int, int, float]], whole: float) -> float:
    """Bytes at the fullest moment of spans (start, stop, bytes), less the bytes that are counted in any case."""
    spans = list(spans)
    changes = [0.0] * (max((stop for _, stop, _ in spans), default=0) + 1)
    for start, stop, count in spans:
        changes[start] += count
        changes[stop] -= count
    return max(0.0, max(accumulate(changes)) - whole)


def without_gradients(cost: OpCost) -> OpCost:
    """The cost of an operator to which no gradient comes: it has no backward, and saves nothing."""

    def plain(placed: PlacedValue) -> PlacedValue:
        return replace(placed, value=replace(placed.value, requires_grad=False))

    def without(instruction: Instruction) -> Instruction:
        if isinstance(instruction, LocalOp):
            return replace(instruction, outputs=tuple(o and plain(o) for o in instruction.outputs))
        return replace(instruction, source=plain(instruction.source), target=plain(instruction.target), backward=None)

    program, inputs, outputs = map(without, cost.program), map(plain, cost.inputs), map(plain, cost.outputs)
    return replace(cost, backward=0.0, program=tuple(program), inputs=tuple(inputs), outputs=tuple(outputs))
