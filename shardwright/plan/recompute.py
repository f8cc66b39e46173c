"""What of a program is dropped in the forward and computed again in the backward.

    a region      the instructions of one recomputed call, the conversions of its operators among them
    dropped       what some backward needs, and an instruction of the region makes
    again         the instructions of the region from which what is dropped follows
    inputs        what these read and do not make: it is kept

Nothing of a region runs twice that no backward asks for, so a collective whose result nobody saves is not sent again.
A region hands its `inputs` to `again` when a backward first asks for something dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..graph import Graph, Recompute
from ..torch_private import schema_of
from .instructions import Compute, Instance, Move, Routed, made_by, reads
from .saved import saved_by

__all__ = ["Recomputed", "Region", "hands_on", "regions_of", "started"]


@dataclass(frozen=True)
class Region:
    """A part of a program that the backward computes again. Numbers are indices of `Routed.instructions`.

    Attributes:
        path: who asks for it: a module's path or an operator's name.
        operators: the operators of the user's program in it.
        again: what the backward runs, in order.
        own: those of `again` that save something of their own, which is dropped with the rest.
        inputs: names of the tensors that it is given; a further region may have to compute some of them first.
        dropped: names of the tensors of which no backward keeps the forward's.
        savers: the instructions that save any of that: the first of their backwards starts the region.
    """

    path: str
    operators: tuple[str, ...]
    again: tuple[int, ...]
    own: frozenset[int]
    inputs: tuple[str, ...]
    dropped: frozenset[str]
    savers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.path}: again {self.again}, own {sorted(self.own)}, drop {sorted(self.dropped)}"


@dataclass(frozen=True)
class Recomputed:
    """In the backward: an instruction of the forward, once more.

    Args:
        operator: the operator whose backward wants it.
    """

    instruction: Any
    region: Region
    operator: str


def started(place: int, operator: str, regions: tuple[Region, ...], done: set[int], instructions: tuple) -> list[Recomputed]:
    """What runs again before the backward of the instruction at `place`; `done`: the regions that have, by number."""
    out: list[Recomputed] = []

    def start(k: int) -> None:
        done.add(k)
        for other, region in enumerate(regions):
            if other not in done and region.dropped.intersection(regions[k].inputs):
                start(other)
        out.extend(Recomputed(instructions[i], regions[k], operator) for i in regions[k].again)

    for k, region in enumerate(regions):
        if place in region.savers and k not in done:
            start(k)
    return out


def regions_of(graph: Graph, routed: Routed) -> tuple[Region, ...]:
    """The regions of a program in the order in which they begin; those that would drop nothing are left out."""
    said = {op.name: op.recompute for op in graph.ops if op.recompute is not None}
    return _Regions(said, routed).run() if said else ()


class _Regions:
    def __init__(self, said: dict[str, Recompute], routed: Routed) -> None:
        self.said, self.routed, self.instructions = said, routed, routed.instructions
        self.names = [(reads(i), tuple(o.name for o in made_by(i))) for i in self.instructions]
        self.calls: dict[int, list[str]] = {}      # call -> its operators
        for name, recompute in said.items():
            self.calls.setdefault(recompute.call, []).append(name)
        self.settings = {call: said[operators[0]] for call, operators in self.calls.items()}
        self.everywhere = {call for call in self.calls if self.settings[call].everywhere or self.single(call)}
        self.inside: list[int | None] = []         # per instruction: the call whose operator it works for
        self.member: list[int | None] = []         # ... and by which it is computed again
        self.maker: dict[str, int] = {}            # name -> the instruction that makes it
        for i in range(len(self.instructions)):
            self.place(i)
        self.droppable = self.find_droppable()

    def single(self, call: int) -> bool:
        """Whether a region is one operator, views aside."""
        computes = {i.operator for i in self.instructions if isinstance(i, Compute) and not hands_on(i.target)
                    and i.operator in self.said and self.said[i.operator].call == call}
        return len(computes) == 1

    def place(self, i: int) -> None:
        instruction, (read, makes) = self.instructions[i], self.names[i]
        said = self.said.get(instruction.operator)
        call = said.call if said is not None else None
        member = call
        if isinstance(instruction, Compute):
            if said is not None and said.keep:
                member = None
        elif said is not None:
            sends = bool(instruction.forward.collectives)
            if getattr(instruction, "cause", "operator") == "parameter":
                member = call if sends and (said.parallel_optimizer_comm or instruction.again) else None
            elif (sends and not said.mp_comm) or (said.keep and getattr(instruction, "cause", "operator") == "operator"):
                member = None
        if call is None:
            member = self.follows(instruction, read)
        self.inside.append(call if call is not None else member)
        self.member.append(member)
        self.maker.update((name, i) for name in makes)

    def follows(self, instruction: Any, read: tuple[str, ...]) -> int | None:
        """The region whose results a conversion or a view hands on: dropped with them, where they are dropped everywhere."""
        if isinstance(instruction, Compute) and not hands_on(instruction.target) or not read:
            return None
        calls = {self.member[self.maker[n]] if n in self.maker else None for n in read}
        call = calls.pop()
        if calls or call is None or call not in self.everywhere:
            return None
        sends = isinstance(instruction, Move) and bool(instruction.forward.collectives)
        return None if sends and not self.settings[call].mp_comm else call

    def find_droppable(self) -> set[str]:
        """What may be dropped: made by a member, and not used outside of its region unless that does not matter."""
        out = {name for i, (_, makes) in enumerate(self.names) if self.member[i] is not None for name in makes}
        out -= {o.name for o in self.routed.outputs if isinstance(o, Instance)}
        out -= {i.name for i in self.routed.updates.values()}
        for i, (read, _) in enumerate(self.names):
            for name in out.intersection(read):
                call = self.member[self.maker[name]]
                if call not in self.everywhere and self.inside[i] != call:
                    out.discard(name)
        return out

    def run(self) -> tuple[Region, ...]:
        saved = saved_by(self.routed)
        needed = {call: {n for s in saved for n in s.values & self.droppable if self.call_of(n) == call}
                  for call in self.calls}
        first = {call: self.inside.index(call) for call in self.calls if call in self.inside}
        out = []
        for call in sorted(first, key=first.__getitem__, reverse=True):
            own = {i for i, s in enumerate(saved) if s.own and self.member[i] == call and
                   isinstance(self.instructions[i], Compute)}
            again, inputs, waiting = set(own), set(), list(needed[call])
            waiting += [n for i in own for n in self.names[i][0]]
            while waiting:
                name = waiting.pop()
                if name in self.droppable and self.call_of(name) == call:
                    if self.maker[name] not in again or self.maker[name] in own:
                        more = self.names[self.maker[name]][0] if self.maker[name] not in again else ()
                        again.add(self.maker[name])
                        waiting += more
                elif name not in inputs:
                    inputs.add(name)
                    if name in self.droppable:  # another region's, which begins earlier
                        needed[self.call_of(name)].add(name)
            if not again:
                continue
            savers = tuple(i for i, s in enumerate(saved) if i in own or s.values & needed[call])
            out.append(Region(self.settings[call].path or self.calls[call][0], tuple(self.calls[call]),
                              tuple(sorted(again)), frozenset(own), tuple(sorted(inputs)), frozenset(needed[call]),
                              savers))
        return tuple(reversed(out))

    def call_of(self, name: str) -> int:
        call = self.member[self.maker[name]]
        assert call is not None
        return call


def hands_on(target: Any) -> bool:
    """Whether what an operator makes may lie in the memory of its one input, as its schema says."""
    schema = schema_of(target)
    return schema is not None and len(schema.returns) == 1 and schema.returns[0].alias_info is not None
