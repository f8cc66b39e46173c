"""The memory of one operator under one strategy, its program taken alone.

1. Saved tensors (`keeps`): the inputs, outputs and other tensors of an operator's forward that its backward needs, as
   autograd says.

2. Workspace (`inside`): the memory of an operator of several instructions while these run, beyond its inputs, outputs
   and saved tensors. The forward counts values inside the operator from their production to their last use; the
   backward counts their gradients, from the backward of the consumer to that of the producer. An input is released
   after its last use, a saved tensor after the backward that uses it.

Example: a softmax of f32[32, 1000] over dim 1, which is cut 4 ways, is a maximum, a difference, an exponential, a sum
and a quotient, on 32,000 bytes a rank. While the difference is computed, its result of 32,000 bytes lies beside the
input; once the exponential has consumed it, it is released.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from types import SimpleNamespace

from ..graph import SEED
from ..layout import Layout
from ..partition.local_program import Instruction, LocalOp, PlacedValue, made_by, reads
from ..partition.rematerialization import LiveRanges, SavedTensors, saved_by, waiting
from .search_space import OpCost

__all__ = ["KeptTensors", "inside", "keeps", "saved_inputs", "without_gradients"]


# -- saved tensors --


@dataclass(frozen=True)
class KeptTensors:
    """The tensors saved from the forward for the backward.

    Attributes:
        inputs, outputs: the numbers of the inputs and outputs that are saved.
        internal: bytes of saved tensors that are neither.
        views: (output, input) numbers, for each output that lies in the memory of an input.
    """

    inputs: frozenset[int]
    outputs: frozenset[int]
    internal: int
    views: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class _Program:
    """The program of an operator's cost; two are equal where they do the same to the same local shapes."""

    cost: OpCost

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Program) and self.key == other.key

    @property
    def key(self) -> tuple[Hashable, ...]:
        forms = []
        for i in self.cost.program:
            made = i.outputs if isinstance(i, LocalOp) else (i.target,)
            what = (i.target, repr(i.args), repr(i.kwargs)) if isinstance(i, LocalOp) else (i.source.name,)
            forms.append((*what, tuple(o and (o.name, o.local_shape) for o in made)))
        inputs = tuple((i.name, i.local_shape, i.value.dtype, i.value.requires_grad) for i in self.cost.inputs)
        return inputs, tuple(forms), tuple(i.name for i in self.cost.outputs)


def keeps(cost: OpCost) -> KeptTensors:
    """The tensors that an operator's backward needs under one strategy."""
    return _keeps(_Program(cost))


def saved_inputs(op_costs: Sequence[OpCost]) -> frozenset[int]:
    """The numbers of the inputs that an operator's backward needs under its first strategy."""
    return keeps(op_costs[0]).inputs


@lru_cache(maxsize=1 << 16)
def _saved(program: _Program) -> tuple[SavedTensors, ...]:
    """The tensors that each of an operator's instructions saves."""
    cost = program.cost
    by_name = {i.name: i for i in cost.inputs}
    made = {o.name for i in cost.program for o in made_by(i)}
    local_program = SimpleNamespace(
        inputs=tuple(by_name.values()),
        parameters={},
        buffers={},
        constants={},
        seed=_seed(cost, {*by_name, *made}),
        instructions=cost.program,
    )
    return tuple(saved_by(local_program))  # type: ignore[arg-type]


@lru_cache(maxsize=1 << 16)
def _keeps(program: _Program) -> KeptTensors:
    cost = program.cost
    saved = _saved(program)
    live_ranges = LiveRanges(cost.inputs, cost.program, saved)
    out = {live_ranges.root[name] for one in saved for name in one.values if name in live_ranges.root}
    results = [live_ranges.root[i.name] for i in cost.outputs]
    places = [i.name for i in cost.inputs]
    internal = sum(one.own_bytes for one in saved)
    internal += sum(live_ranges.tensors[name].local_bytes for name in out - live_ranges.inputs if name not in results)
    return KeptTensors(
        frozenset(places.index(n) for n in out if n in places),
        frozenset(results.index(n) for n in out if n in results and n not in places),
        internal,
        tuple((k, places.index(n)) for k, n in enumerate(results) if n in places),
    )


def _seed(cost: OpCost, known: set[str]) -> PlacedValue | None:
    """The seed as a placed value, where the program consumes one; else None."""
    names = {name for i in cost.program for name in reads(i)}
    if SEED.name not in names - known:
        return None
    return PlacedValue(SEED.name, SEED, Layout.replicated(cost.outputs[0].layout.devices, 1))


# -- workspace --


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
        self.program, self.saved = cost.program, _saved(_Program(cost))
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
