"""The pass that makes the schedule of communication of a program (`CommunicationSchedule`).

1. Weights that are gathered for their use (`role` "gather"). The gathers of one block of the model over the same ranks
   are one message. It is issued when the block in front of it begins to use its weights, and each weight is taken where
   it is used. Weights that the backward gathers again: likewise, in the order of the backward.
2. Gradients that are summed over the replicas of their parameter ("sum"): in buckets (`cost.communication_schedule`),
   issued with their last gradient, waited for at the end.
3. Gradients that are scattered to the ranks which store parts ("scatter"): those of one block, dtype and set of ranks
   are one message, issued with the last of them, waited for at the end. Where the parts are then summed over further
   replicas ("follow"), the scatter is waited for before the next one is issued, and the sum at the end.
4. Other redistributions ("redistribution"): issued as soon as their input is there and waited for at their first use,
   where anything stands between the two. The transpose is then issued as soon as the gradient is complete and waited
   for by the producer: autograd runs the two halves in the opposite order. A redistribution that nothing stands beside
   stays in one piece, and so does one that an operator writes in place beside.

Memory. A message under way holds memory that a step without it would not hold at that moment: weights that are not
used yet, gradients that have been copied to be sent. With base(t) the bytes held where every message is waited for at
once (`memory_timeline`), and a(t) those of the messages under way,

    base(t) + a(t) <= max base + allowance        at every moment t

and where a plan was searched within a limit, the right side is at most that limit (and at least max base). A message
for which there is no room is issued later, down to its first use; scatters are waited for in front of the message that
needs their room. Without any room at its moments a weight is gathered by itself where it is used, and a gradient is
scattered and waited for as it comes. So an allowance of 0 leaves the peak as it is, and what travels at other moments
is still under way. The default allowance is two blocks: twice the weights of the largest one and their gradients.

On Gloo (``library=False``) sums alone travel beside the backward; everything else is waited for where it is issued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from ..layout import Digits, digits_size
from ..partition.local_program import (
    GlobalExtreme,
    Instruction,
    LocalOp,
    LocalProgram,
    PlacedValue,
    Redistribute,
    made_by,
    reads,
)
from ..partition.rematerialization import BackwardStep, RecomputedInstruction, Regather, hands_on
from ..redistribution import CollectiveKind, Redistribution
from ..redistribution.redistribution_search import refine
from ..torch_private import schema_of
from .communication_schedule import (
    PLAIN,
    CommunicationSchedule,
    Due,
    Fusion,
    Member,
    ScheduledMessage,
    block_of,
    moved_bytes,
    own_redistribution,
)
from .memory_timeline import MemoryTimeline

__all__ = ["schedule_of"]


def schedule_of(
    program: LocalProgram,
    backward: Sequence[BackwardStep],
    held: MemoryTimeline,
    *,
    scatters: bool,
    allowance: float | None = None,
    limit: float | None = None,
    fusion: Fusion | None = None,
    order: Sequence[str] | None = None,
    several_hosts: Callable[[Digits], bool] = lambda digits: False,
    library: bool = True,
    stage: bool = False,
    outside: Collection[str] = (),
) -> CommunicationSchedule:
    """The schedule of a program.

    Args:
        program, backward: the instructions, and the steps of their backward.
        held: the memory of a step that waits for every message at once.
        scatters: True where parameters are stored in parts by optimizer parallel.
        allowance: bytes by which messages under way may raise the peak; None: twice the weights and gradients of the
            largest block.
        limit: bytes within which the plan was searched; None: no limit.
        fusion: the buckets of sums; None: the default ones.
        order: names of the trained parameters in the order of the model; None: that of the program.
        several_hosts: True for the digits of ranks on several hosts.
        library: True where a library carries the messages, False on Gloo.
        stage: True for a stage of a pipeline: gradients are summed once a step, after the micro-batches.
        outside: names of gathered weights that micro-batches share; they are gathered outside of the program.
    """
    made = _Pass(program, backward, held, allowance, limit)
    if library:
        made.gather(outside)
        made.split()
        made.gather_again_and_scatter(scatters and not stage)
    made.sum(fusion or Fusion(), order, several_hosts, library, stage)
    made.rest(outside)
    return made.result(library)


class _Pass:
    """The pass over one program.

    Attributes:
        room: bytes that messages may still hold, by moment.
        messages: the messages so far.
        covered: (place, moment) of their members.
    """

    def __init__(
        self,
        program: LocalProgram,
        backward: Sequence[BackwardStep],
        held: MemoryTimeline,
        allowance: float | None,
        limit: float | None,
    ) -> None:
        self.program, self.backward = program, backward
        self.instructions = program.instructions
        self.forward, self.end = len(program.instructions), len(program.instructions) + len(backward)
        self.place = {id(i): k for k, i in enumerate(program.instructions)}
        self.allowance = 2.0 * self._largest_block() if allowance is None else float(allowance)
        base = np.array(held.totals() or [0.0])
        peak = float(base.max())
        ceiling = peak + self.allowance
        if limit is not None:
            ceiling = min(ceiling, max(peak, float(limit)))
        self.room = np.append(ceiling - base, ceiling)
        self.messages: list[ScheduledMessage] = []
        self.covered: set[tuple[int, int]] = set()
        self.splits: dict[int, tuple[int, int]] = {}
        # By step of the backward: the place of the instruction whose backward the step is, or is made for.
        self.owners: list[int] = []
        self.back: dict[int, int] = {}
        owner = -1
        for entry in reversed(backward):
            owner = self.place.get(id(entry), owner)
            self.owners.append(owner)
        self.owners.reverse()
        for q, entry in enumerate(backward):
            if id(entry) in self.place:
                self.back[self.place[id(entry)]] = self.forward + q
        self.born = {o.name: k for k, i in enumerate(self.instructions) for o in made_by(i)}

    def _largest_block(self) -> float:
        """The most bytes of the weights of one block, as a rank computes with them, and of their gradients, as they are
        summed."""
        used = {p.value.name: p.local_bytes * (1 + p.value.requires_grad) for p in self.program.parameters.values()}
        for i in self.instructions:
            if isinstance(i, Redistribute) and i.cause == "parameter":
                numel, wide = math.prod(i.target.local_shape), i.backward is not None
                nbytes = numel * (i.dtype.itemsize + i.sums.itemsize * wide)
                used[i.source.value.name] = max(used[i.source.value.name], nbytes)
        blocks: dict[str, int] = {}
        for name, nbytes in used.items():
            blocks[block_of(name)] = blocks.get(block_of(name), 0) + nbytes
        return float(max(blocks.values(), default=0))

    def member(self, place: int, moment: int) -> Member:
        return Member(place, moment, self.move(place).source.value.name)

    def move(self, place: int) -> Redistribute | GlobalExtreme:
        """The instruction at a place, which sends."""
        instruction = self.instructions[place]
        assert not isinstance(instruction, LocalOp)
        return instruction

    def parameter_move(self, place: int) -> Redistribute:
        """The redistribution of a parameter at a place."""
        instruction = self.instructions[place]
        assert isinstance(instruction, Redistribute)
        return instruction

    # -- memory --

    def fits(self, start: int, stop: int, nbytes: float, room: np.ndarray | None = None) -> bool:
        room = self.room if room is None else room
        return stop <= start or bool(room[start:stop].min() >= nbytes)

    def hold(self, start: int, stop: int, nbytes: float) -> tuple[int, int, float]:
        self.room[start:stop] -= nbytes
        return start, stop, float(nbytes)

    # -- weights --

    def _gathered(self, instruction: Instruction, outside: Collection[str] = ()) -> Digits | None:
        """The ranks of a weight's gather that may travel with others; None for any other instruction."""
        if not isinstance(instruction, Redistribute) or instruction.source.value.name not in self.program.parameters:
            return None
        steps, name = instruction.forward.steps, instruction.source.name
        if name in self.born or instruction.target.name in outside or len(steps) != 1:
            return None
        if steps[0].pattern is not CollectiveKind.ALL_GATHER or not instruction.dtype.is_floating_point:
            return None
        return steps[0].digits

    def gather(self, outside: Collection[str]) -> None:
        """The gathers of the forward, one block ahead."""
        blocks: dict[str, dict[Digits, list[Member]]] = {}
        for place, instruction in enumerate(self.instructions):
            digits = self._gathered(instruction, outside)
            if digits is not None:
                member = self.member(place, place)
                blocks.setdefault(block_of(member.name), {}).setdefault(digits, []).append(member)
        since = 0
        for groups in blocks.values():
            for digits, members in groups.items():
                for part in self._together(members):
                    nbytes, first, stop = self._received(part)
                    issue = first
                    while issue > since and self.room[issue - 1] >= nbytes:
                        issue -= 1
                    self._add_gather(digits, part, issue, self.hold(issue, stop, nbytes))
            since = min(members[0].place for members in groups.values())

    def _together(self, members: list[Member]) -> list[list[Member]]:
        """The gathers of a block as one message; each by itself where there is no room for what one receives."""
        nbytes, first, stop = self._received(members)
        return [members] if self.fits(first, stop, nbytes) else [[member] for member in members]

    def _received(self, members: Sequence[Member]) -> tuple[float, int, int]:
        """The bytes of a gather of several weights; the moment of the first weight, and the moment up to which the
        message holds memory of its own.

        Several weights are copied into what is sent, and each out of what is received; a single one is not.
        """
        moves = [self.parameter_move(m.place) for m in members]
        nbytes, first, last = sum(i.target.local_bytes for i in moves), members[0].moment, members[-1].moment
        if len(members) == 1:
            return nbytes, first, first
        return nbytes + sum(moved_bytes(i, i.forward) for i in moves), first, last + 1

    def _add_gather(
        self, digits: Digits, members: Sequence[Member], issue: int, held: tuple[int, int, float], again: bool = False
    ) -> int:
        nbytes = sum(moved_bytes(i, i.forward) for m in members for i in (self.parameter_move(m.place),))
        kind = CollectiveKind.ALL_GATHER
        first = members[0].moment
        return self.add(ScheduledMessage("gather", kind, digits, tuple(members), issue, first, nbytes, again, (held,)))

    # -- other redistributions --

    def split(self) -> None:
        """Redistributions in two parts, where anything stands beside them."""
        first_read: dict[str, int] = {}
        for place, instruction in enumerate(self.instructions):
            for name in reads(instruction):
                first_read.setdefault(name, place)
        for place, instruction in enumerate(self.instructions):
            if not isinstance(instruction, Redistribute) or instruction.cause == "parameter":
                continue
            sent = [s for s in (instruction.forward, instruction.backward) if s is not None and s.collectives]
            if not sent or not {instruction.dtype, instruction.sums} <= PLAIN:
                continue
            if not all(r.collectives[0].pattern.travels_alone for r in sent):
                continue
            self._split(place, instruction, first_read.get(instruction.target.name, self.forward))

    def _split(self, place: int, move: Redistribute, use: int) -> None:
        ready = self.born.get(move.source.name, -1) + 1
        nbytes = move.target.local_bytes if move.copies else 0
        issue = place
        while issue > ready and self.room[issue - 1] >= nbytes:
            issue -= 1
        beside = [i for k, i in enumerate(self.instructions[issue:use], issue) if k != place]
        if any(_writes(i) for i in beside) or not any(_independent(i) for i in beside):
            return
        back = None
        if place in self.back:
            began = self.forward + next((q for q, k in enumerate(self.owners) if k < use), len(self.owners))
            needed = self.forward + next((q for q, k in enumerate(self.owners) if k < issue), len(self.owners))
            gradient = math.prod(move.target.local_shape) * move.sums.itemsize
            if not self.fits(began, needed, gradient):
                return
            if move.backward is not None and move.backward.collectives:
                back = began, needed, gradient
        self.splits[place] = issue, use
        if move.forward.collectives:
            self._add_part(place, place, move.forward, issue, use, self.hold(issue, place, nbytes))
        if back is not None:
            assert move.backward is not None
            began, needed, gradient = back
            held = self.hold(began, needed, gradient)
            self._add_part(place, self.back[place], move.backward, began, needed, held)

    def _add_part(
        self, place: int, moment: int, steps: Redistribution, issue: int, wait: int, held: tuple[int, int, float]
    ) -> None:
        first = next(step for step in steps.steps if step.communicates)
        nbytes = moved_bytes(self.move(place), steps)
        members = (self.member(place, moment),)
        self.add(
            ScheduledMessage(
                "redistribution", first.pattern, first.digits, members, issue, wait, nbytes, False, (held,)
            )
        )

    # -- the backward --

    def gather_again_and_scatter(self, scatters: bool) -> None:
        """The gathers and the scatters of the backward, in the order of their moments: they share the room."""
        todo = [(first, 0, partial(self._gather_again, *part)) for first, part in self._gathers_again()]
        if scatters:
            todo += [(first, 1, partial(self._scatter, *part)) for first, part in self._scatters()]
        self.open: list[tuple[int, float]] = []  # scatters waited for at the end: number, bytes; the oldest first
        self.early: dict[int, list[int]] = {}
        self.halves: dict[int, Digits] = {}  # scatters under way -> the further replicas over which parts are summed
        for _, _, run in sorted(todo, key=lambda entry: entry[:2]):
            run()
        for number in list(self.halves):
            self._follow(number)

    def _gathers_again(self) -> Iterator[tuple[int, tuple[Digits, list[Member], list[int]]]]:
        """Yield (first moment, (digits, members, moments at which it may be issued)) for each block."""
        blocks: dict[str, dict[Digits, list[Member]]] = {}
        for q, entry in enumerate(self.backward):
            if isinstance(entry, (Regather, RecomputedInstruction)):
                instruction, _ = own_redistribution(entry, True)
                digits = self._gathered(instruction)
                if digits is not None:
                    member = self.member(self.place[id(instruction)], self.forward + q)
                    blocks.setdefault(block_of(member.name), {}).setdefault(digits, []).append(member)
        before: list[int] = []
        for groups in blocks.values():
            # The runtime knows where it is in a backward by the weights that the backward asks for.
            own = [member.moment for members in groups.values() for member in members]
            for digits, members in groups.items():
                yield members[0].moment, (digits, members, sorted({*before, *own}))
            before = own

    def _gather_again(self, digits: Digits, members: list[Member], moments: Sequence[int]) -> None:
        nbytes, first, stop = self._received(members)
        parts = [members] if self._with_room(first, stop, nbytes) is not None else [[member] for member in members]
        for part in parts:
            nbytes, first, stop = self._received(part)
            for issue in (m for m in moments if m <= first):
                waited = self._with_room(issue, stop, nbytes)
                if waited is not None:
                    held = self.hold(issue, stop, nbytes)
                    self._wait_early(waited, self._add_gather(digits, part, issue, held, again=True))
                    break

    def _scatters(self) -> Iterator[tuple[int, tuple[tuple[Digits, ...], list[Member]]]]:
        """Yield (moment, (ranks of the scatter and of the sum after it, members)) of each message."""
        groups: dict[tuple[str, torch.dtype, tuple[Digits, ...]], list[Member]] = {}
        for place, moment in sorted(self.back.items(), key=lambda entry: entry[1]):
            i = self.instructions[place]
            if isinstance(i, Redistribute) and (ranks := scattered_over(i)) is not None:
                key = block_of(i.source.value.name), i.sums, ranks
                groups.setdefault(key, []).append(self.member(place, moment))
        for (_, _, ranks), members in groups.items():
            for part in self._that_can_wait(members):
                yield part[-1].moment, (ranks, part)

    def _that_can_wait(self, members: Sequence[Member]) -> Iterator[list[Member]]:
        """Yield the scatters of a block in parts, each as large as there is room for terms that wait for others."""
        part, nbytes = [members[0]], self._term(members[0])
        for before, member in zip(members, members[1:]):
            if self.fits(before.moment + 1, member.moment + 1, nbytes):
                self.hold(before.moment + 1, member.moment + 1, nbytes)
                part.append(member)
                nbytes += self._term(member)
            else:
                yield part
                part, nbytes = [member], self._term(member)
        yield part

    def _term(self, member: Member) -> int:
        move = self.parameter_move(member.place)
        return math.prod(move.target.local_shape) * move.sums.itemsize

    def _scatter(self, ranks: tuple[Digits, ...], members: Sequence[Member]) -> None:
        issue, nbytes = members[-1].moment, sum(map(self._term, members))
        waits = [(m.moment + 1, issue + 1, float(self._term(m))) for m in members[:-1]]  # held since `_that_can_wait`
        waited = self._with_room(issue, self.end, nbytes)
        stop = issue if waited is None else self.end
        held = (*waits, self.hold(issue, stop, nbytes))
        kind = CollectiveKind.REDUCE_SCATTER
        number = self.add(ScheduledMessage("scatter", kind, ranks[0], tuple(members), issue, stop, nbytes, False, held))
        before = [other for other in self.halves if other not in (waited or ())]
        self._wait_early([*(waited or ()), *before], number)
        if len(ranks) > 1:
            self.halves[number] = ranks[1]
        if waited is not None:
            self.open.append((number, nbytes))
        elif len(ranks) > 1:
            self._follow(number)

    def _follow(self, number: int) -> None:
        """Sum the parts of a scatter over further replicas, once the scatter has been waited for."""
        scatter, digits = self.messages[number], self.halves.pop(number)
        nbytes = scatter.bytes // digits_size(scatter.digits)
        kind = CollectiveKind.ALL_REDUCE
        self.messages.append(ScheduledMessage("follow", kind, digits, scatter.members, scatter.wait, self.end, nbytes))

    def _with_room(self, start: int, stop: int, nbytes: float) -> list[int] | None:
        """The numbers of the scatters to wait for before `start`, so that there is room; None: there is too little."""
        room, waited = self.room, []
        for number, freed in self.open:
            if self.fits(start, stop, nbytes, room):
                break
            if self.messages[number].issue < start:
                room = room.copy() if room is self.room else room
                room[start : self.end] += freed
                waited.append(number)
        return waited if self.fits(start, stop, nbytes, room) else None

    def _wait_early(self, waited: Sequence[int], number: int) -> None:
        """Wait for scatters before message `number` is issued."""
        moment = self.messages[number].issue
        for other in waited:
            message = self.messages[other]
            *terms, (start, _, nbytes) = message.held
            self.room[moment : self.end] += nbytes
            self.messages[other] = replace(message, wait=moment, held=(*terms, (start, moment, nbytes)))
            self.early.setdefault(number, []).append(other)
            if other in self.halves:
                self._follow(other)
        self.open = [entry for entry in self.open if entry[0] not in waited]

    # -- sums --

    def sum(
        self,
        fusion: Fusion,
        order: Sequence[str] | None,
        several_hosts: Callable[[Digits], bool],
        library: bool,
        stage: bool,
    ) -> None:
        """The sums of gradients, in buckets."""
        trained = [n for n, p in self.program.parameters.items() if p.value.requires_grad]
        index = {name: k for k, name in enumerate(trained if order is None else order)}
        places = summed_late(self.program)
        due, ranks = [], {}
        for name, place in places.items():
            move = self.parameter_move(place)
            assert move.backward is not None
            digits = ranks[name] = move.backward.steps[0].digits
            nbytes = math.prod(move.source.local_shape) * move.sums.itemsize
            kind = digits, move.source.value.dtype, move.sums
            due.append(Due(name, nbytes, kind, index.get(name, 0), digits_size(digits), several_hosts(digits)))
        begun = self.forward
        for names in fusion.buckets(due, library):
            members = [self.member(places[name], self.back.get(places[name], self.end)) for name in names]
            begun = max(begun, *(m.moment for m in members))
            moves = [self.parameter_move(m.place) for m in members]
            nbytes = sum(moved_bytes(i, i.backward) for i in moves if i.backward is not None)
            self.add(
                ScheduledMessage(
                    "sum",
                    CollectiveKind.ALL_REDUCE,
                    ranks[names[0]],
                    tuple(members),
                    self.end if stage else begun,
                    self.end,
                    nbytes,
                )
            )

    # -- the rest --

    def rest(self, outside: Collection[str]) -> None:
        """The redistributions that are waited for where they are issued."""
        steps: list[tuple[int, BackwardStep, bool]] = [(k, i, False) for k, i in enumerate(self.instructions)]
        steps += [(self.forward + q, entry, True) for q, entry in enumerate(self.backward)]
        for moment, entry, back in steps:
            instruction, moved = own_redistribution(entry, back)
            if moved is None or isinstance(instruction, LocalOp):
                continue
            if (first := next((s for s in moved.steps if s.communicates), None)) is None:
                continue
            place = self.place[id(instruction)]
            if (place, moment) in self.covered:
                continue
            if getattr(instruction, "cause", "") == "parameter" and instruction.target.name in outside:
                continue
            self.add(
                ScheduledMessage(
                    "redistribution",
                    first.pattern,
                    first.digits,
                    (self.member(place, moment),),
                    moment,
                    moment,
                    moved_bytes(instruction, moved),
                    back and entry is not instruction,
                )
            )

    def add(self, message: ScheduledMessage) -> int:
        self.messages.append(message)
        self.covered.update((m.place, m.moment) for m in message.members)
        return len(self.messages) - 1

    def result(self, library: bool) -> CommunicationSchedule:
        early = getattr(self, "early", {})
        order = sorted(range(len(self.messages)), key=lambda n: (self.messages[n].issue, self.messages[n].wait, n))
        number = {old: new for new, old in enumerate(order)}
        return CommunicationSchedule(
            tuple(self.messages[n] for n in order),
            self.forward,
            self.end,
            self.allowance,
            self.splits,
            {number[n]: tuple(number[other] for other in others) for n, others in early.items()},
            library,
        )


def _independent(instruction: Instruction) -> bool:
    """True where an instruction computes, or sends a value of another redistribution."""
    if isinstance(instruction, LocalOp):
        return not hands_on(instruction.target)
    parameter = isinstance(instruction, Redistribute) and instruction.cause == "parameter"
    return not parameter and bool(instruction.forward.collectives)


def _writes(instruction: Instruction) -> bool:
    """True where an operator writes into a tensor that it is given."""
    schema = schema_of(instruction.target) if isinstance(instruction, LocalOp) else None
    return schema is not None and schema.is_mutable


def scattered_over(move: Redistribute) -> tuple[Digits, ...] | None:
    """The ranks over which the gradient of a stored weight is scattered as one reduce-scatter that nothing needs
    before the end of the backward, and those over which its part is then summed; None: it is reduced otherwise."""
    if move.cause != "parameter" or move.backward is None or not move.forward.collectives:
        return None
    steps, held = move.backward.steps, move.source.value.dtype
    patterns = [step.pattern for step in steps]
    if patterns[1:] not in ([], [CollectiveKind.ALL_REDUCE]) or any(step.reduction != "sum" for step in steps):
        return None
    if patterns[:1] != [CollectiveKind.REDUCE_SCATTER]:
        return None
    if held.is_complex or move.sums not in PLAIN or not move.sums.is_floating_point:
        return None
    if not move.backward.source.partial or refine(move.backward.source, move.backward.target) is None:
        return None
    return tuple(step.digits for step in steps)


def summed_late(program: LocalProgram) -> dict[str, int]:
    """Parameter -> the place of the redistribution that does nothing but sum its gradient, where it is the only
    consumer of the parameter.

    The order is that in which gradients come: by the parameter's first use, last use first; among the parameters of
    one operator, the last first.
    """
    consumers: dict[str, list[int]] = {}
    for place, instruction in enumerate(program.instructions):
        for name in reads(instruction):
            consumers.setdefault(name, []).append(place)
    for made in (*(o for o in program.outputs if isinstance(o, PlacedValue)), *program.updates.values()):
        consumers.setdefault(made.name, []).append(len(program.instructions))
    found: list[tuple[int, str, int]] = []
    for name, parameter in program.parameters.items():
        places = consumers.get(parameter.name, [])
        move = program.instructions[places[0]] if len(places) == 1 and places[0] < len(program.instructions) else None
        if (
            isinstance(move, Redistribute)
            and move.forward.is_identity
            and move.backward is not None
            and move.backward.is_all_reduce
        ):
            found.append((min(consumers.get(move.target.name, [0])), name, places[0]))
    ordered = sorted(reversed(found), key=lambda use: -use[0])
    return {name: place for _, name, place in ordered}
