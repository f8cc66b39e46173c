"""From when to when tensors of a local program are there: in its forward, and their gradients in its backward.

    a tensor      from the instruction that makes it to the last that reads it; a view lies in the memory of what it views,
                  and so does the target of a conversion that takes no step: they are one, their root
    a gradient    of a tensor: from the backward of its last reader (of an output, from the first) to that of its maker.
                  Further terms of it are there while they are added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .instructions import Instance, Move, made_by, reads
from .saved import Saved

__all__ = ["Lives", "waiting"]


class Lives:
    """The tensors of a forward.

    Attributes:
        instances: all of them, by name.
        given: the names of those that no instruction makes.
        root: of every tensor, the one in whose memory it lies.
        born: of every root that an instruction makes, that instruction's place.
        read: of every root, the last place at which it is made or read; of one that is given and not read, none.
    """

    def __init__(self, given: Iterable[Instance], program: Sequence[Any], saved: Sequence[Saved]) -> None:
        self.instances = {instance.name: instance for instance in given}
        self.given = frozenset(self.instances)
        self.root = {name: name for name in self.instances}
        self.born: dict[str, int] = {}
        self.read: dict[str, int] = {}
        for place, (instruction, found) in enumerate(zip(program, saved)):
            views = dict(found.views)
            if isinstance(instruction, Move) and not instruction.copies:
                views[instruction.target.name] = instruction.source.name
            for name in reads(instruction):
                self.read[self.root.get(name, name)] = place
            for made in made_by(instruction):
                self.instances[made.name] = made
                root = self.root[made.name] = self.root.get(views.get(made.name, ""), made.name)
                if root not in self.given:
                    self.born.setdefault(root, place)
                self.read[root] = place


def waiting(backward: Sequence[tuple[int, Any]], instances: Mapping[str, Instance], begin: Mapping[str, int],
            grows: Callable[[str], bool]) -> Iterator[tuple[str, int, int]]:
    """The gradients of a backward: (of which tensor, from, up to), the last moment not included.

    Args:
        backward: (moment, instruction) in the order in which the instructions' backwards run.
        instances: the tensors by name.
        begin: the gradients that are there from the start, and since when.
        grows: whether a tensor has a gradient that counts.
    """
    waits = dict(begin)
    for at, instruction in backward:
        for made in made_by(instruction):
            if made.name in waits:
                yield made.name, waits.pop(made.name), at + 1
        passes = isinstance(instruction, Move) and not instruction.casts and \
            not (instruction.backward is not None and instruction.backward.steps)
        for name in reads(instruction):
            if name in instances and grows(name):
                if not passes:
                    yield name, at, at + 1
                waits.setdefault(name, at + 1)
