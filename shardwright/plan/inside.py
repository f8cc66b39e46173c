"""What an operator of several instructions holds while these run, beyond what it reads, leaves and keeps together.

    forward     what it makes on the way, from where it is made to where it is last read
    backward    gradients of that, from the backward of its reader to that of its maker

It is walked as `memory.timeline` walks a whole program, the operator's part of one alone (`footprint`): what it reads
is taken to go where it is read last, and what it keeps where that is used.
"""

from __future__ import annotations

from collections.abc import Set
from itertools import accumulate
from typing import Any

from torch.utils import _pytree as pytree

from .footprint import Footprint
from .keeping import saved_inside
from .route import Compute, Extreme, Instance, Move, Ref

__all__ = ["inside"]


def inside(footprint: Footprint, given: Set[int]) -> tuple[float, float]:
    """Bytes at the fullest moment, forward and backward.

    Args:
        given: the numbers of inputs that no operator makes: they, and their gradients, are counted elsewhere.
    """
    if len(footprint.program) < 2:
        return 0.0, 0.0
    walk = _Walk(footprint, given)
    return walk.forward(), walk.backward()


class _Walk:
    def __init__(self, footprint: Footprint, given: Set[int]) -> None:
        self.program, self.saved = footprint.program, saved_inside(footprint)
        self.count = len(self.program)
        self.asked = {i.name: i for k, i in enumerate(footprint.fed) if k not in given}
        self.apart = {i.name for i in footprint.fed} - self.asked.keys()
        self.left = {i.name: i for i in footprint.left}
        self.known = {i.name: i for i in footprint.fed}
        self.root = {name: name for name in self.known}  # in whose memory it lies
        self.born = dict.fromkeys(self.asked, 0)
        self.last: dict[str, int] = dict.fromkeys(self.asked, 0)
        for place, (instruction, saved) in enumerate(zip(self.program, self.saved)):
            views = dict(saved.views)
            if isinstance(instruction, Move) and not instruction.forward.steps:
                views[instruction.target.name] = instruction.source.name
            for name in _reads(instruction):
                self.last[self.root.get(name, name)] = place
            for made in _makes(instruction):
                self.known[made.name] = made
                root = self.root[made.name] = self.root.get(views.get(made.name, ""), made.name)
                self.born.setdefault(root, place)
                self.last[root] = place
        self.kept: dict[str, int] = {}  # what is saved, up to the first instruction that saves it
        for place, saved in reversed(list(enumerate(self.saved))):
            self.kept.update((self.root.get(name, name), place) for name in saved.values)
        self.tensors = {name for name in self.born if name not in self.apart}

    def bytes_of(self, names: Set[str]) -> float:
        return float(sum(self.known[name].local_bytes for name in names))

    def grows(self, name: str) -> bool:
        """Whether it has a gradient that is counted here."""
        return name in self.known and self.root[name] not in self.apart and self.known[name].value.requires_grad

    def forward(self) -> float:
        change = [0.0] * (self.count + 1)
        lefts = {self.root[name] for name in self.left}
        for name in self.tensors:
            stays = name in self.kept or name in lefts
            change[self.born[name]] += self.known[name].local_bytes
            change[self.count if stays else self.last[name] + 1] -= self.known[name].local_bytes
        for place, saved in enumerate(self.saved):
            change[place] += saved.own_bytes
        whole = self.bytes_of((self.asked.keys() | lefts | self.kept.keys()) & self.tensors)
        return max(0.0, max(list(accumulate(change))[:-1]) - whole - sum(saved.own_bytes for saved in self.saved))

    def backward(self) -> float:
        own = float(sum(saved.own_bytes for saved in self.saved))
        kept = {name: place for name, place in self.kept.items() if name in self.tensors}
        waits = {name: i.local_bytes for name, i in self.left.items() if self.grows(name)}
        whole = sum(waits.values()) + self.bytes_of(kept.keys()) + own
        whole += sum(i.local_bytes for name, i in self.asked.items() if i.value.requires_grad and name not in waits)
        most = 0.0
        for place, instruction in reversed(list(enumerate(self.program))):
            makes = [made.name for made in _makes(instruction) if made.name in waits]
            reads = {name: self.known[name].local_bytes for name in _reads(instruction) if self.grows(name)}
            if makes:  # a gradient reaches it
                passes = isinstance(instruction, Move) and \
                    not (instruction.backward is not None and instruction.backward.steps)
                there = float(sum(waits.values())) + (0.0 if passes else sum(reads.values()))
                there += self.bytes_of({name for name, until in kept.items() if until <= place})
                most = max(most, there + sum(saved.own_bytes for saved in self.saved[:place + 1]))
                for name in makes:
                    del waits[name]
                for name, count in reads.items():
                    waits.setdefault(name, count)
        return max(0.0, most - whole)


def _makes(instruction: Any) -> tuple[Instance, ...]:
    return tuple(o for o in instruction.outputs if o is not None) if isinstance(instruction, Compute) \
        else (instruction.target,)


def _reads(instruction: Any) -> tuple[str, ...]:
    if isinstance(instruction, Compute):
        leaves = pytree.tree_leaves((instruction.args, instruction.kwargs))
        return tuple(dict.fromkeys(leaf.name for leaf in leaves if isinstance(leaf, Ref)))
    operand = (instruction.operand.name,) if isinstance(instruction, Extreme) else ()
    return (instruction.source.name, *operand)
