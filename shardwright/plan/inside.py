"""What an operator of several instructions holds while these run, beyond what it reads, leaves and keeps together.

    forward     what it makes on the way, from where it is made to where it is last read
    backward    gradients of that, from the backward of its reader to that of its maker

It is the operator's part of a program alone (`footprint`): what it reads is taken to go where it is read last, and what
it keeps where that is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from itertools import accumulate

from .footprint import Footprint
from .instructions import made_by, reads
from .keeping import saved_inside
from .lives import Lives, waiting

__all__ = ["inside"]


def inside(footprint: Footprint, given: Set[int]) -> tuple[float, float]:
    """Bytes at the fullest moment, forward and backward.

    Args:
        given: the numbers of inputs that no operator makes: they, and their gradients, are counted elsewhere.
    """
    if len(footprint.program) < 2:
        return 0.0, 0.0
    part = _Part(footprint, given)
    return part.forward(), part.backward()


class _Part:
    def __init__(self, footprint: Footprint, given: Set[int]) -> None:
        self.program, self.saved = footprint.program, saved_inside(footprint)
        self.own = float(sum(saved.own_bytes for saved in self.saved))
        self.lives = lives = Lives(footprint.fed, self.program, self.saved)
        self.asked = {i.name for k, i in enumerate(footprint.fed) if k not in given}
        self.left = {i.name for i in footprint.left}
        elsewhere = lives.given - self.asked
        self.apart = {name for name, root in lives.root.items() if root in elsewhere}
        self.born = {**dict.fromkeys(self.asked, 0), **lives.born}
        self.kept: dict[str, int] = {}  # what is saved, and the first instruction that saves it
        for place, saved in reversed(list(enumerate(self.saved))):
            self.kept.update((lives.root[name], place) for name in saved.values if lives.root.get(name) in self.born)

    def bytes_of(self, names: Iterable[str]) -> float:
        return float(sum(self.lives.instances[name].local_bytes for name in names))

    def grows(self, name: str) -> bool:
        """Whether it has a gradient that is counted here."""
        return name not in self.apart and self.lives.instances[name].value.requires_grad

    def forward(self) -> float:
        lives, end = self.lives, len(self.program)
        stays = self.kept.keys() | {lives.root[name] for name in self.left}
        spans = [(born, end if name in stays else lives.read.get(name, 0) + 1, self.bytes_of([name]))
                 for name, born in self.born.items()]
        spans += [(place, end, float(saved.own_bytes)) for place, saved in enumerate(self.saved)]
        return _beyond(spans, self.bytes_of((self.asked | stays) & self.born.keys()) + self.own)

    def backward(self) -> float:
        lives, reached = self.lives, {name for name in self.left if self.grows(name)}
        begin, backward = dict.fromkeys(reached, 0), []
        until = [0] * len(self.program)  # by instruction, the moment after its backward
        for place, instruction in reversed(list(enumerate(self.program))):
            if any(made.name in reached for made in made_by(instruction)):
                backward.append((len(backward), instruction))
                reached.update(name for name in reads(instruction) if name in lives.instances and self.grows(name))
            until[place] = len(backward)
        spans = [(start, stop, self.bytes_of([name]))
                 for name, start, stop in waiting(backward, lives.instances, begin, self.grows)]
        spans += [(0, until[place], self.bytes_of([name])) for name, place in self.kept.items()]
        spans += [(0, until[place], float(saved.own_bytes)) for place, saved in enumerate(self.saved)]
        asked = {name for name in self.asked if self.grows(name)}
        return _beyond(spans, self.bytes_of(begin.keys() | asked) + self.bytes_of(self.kept) + self.own)


def _beyond(spans: Iterable[tuple[int, int, float]], whole: float) -> float:
    """Of (from, up to, bytes): what they are together at the fullest moment, beyond all that is counted in any case."""
    spans = list(spans)
    changes = [0.0] * (max((stop for _, stop, _ in spans), default=0) + 1)
    for start, stop, count in spans:
        changes[start] += count
        changes[stop] -= count
    return max(0.0, max(accumulate(changes)) - whole)
