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
scattered and waited for as it comes. A bucket of sums is a copy of its gradients, beside which these lie as it is made;
without room for the copy it is several buckets, down to one gradient each, which needs none. A sum in a wider dtype
than the gradient's is waited for at once where there is no room for it until the end. So an allowance of 0 leaves the
peak as it is, and what travels at other moments is still under way. The default allowance is two blocks, twice the
weights of the largest one and their gradients, and at least the largest bucket.

On Gloo (``library=False``) sums alone travel beside the backward; everything else is waited for where it is issued.

Example: blocks 0 and 1 with 2 weights each, stored in parts. The 2 weights of block 1 are one message, which is issued
when block 0 begins to use its own. With an allowance of 0 bytes, and the peak at that moment, it is issued later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from ..identity_tables import IdentityMap
from ..layout import Digits, digits_size
from ..partition.local_program import GlobalExtreme, Instruction, LocalOp, LocalProgram, Redistribute, made_by, reads
from ..partition.rematerialization import BackwardStep, RecomputedInstruction, Regather, hands_on
from ..redistribution import CollectiveKind, Redistribution
from ..torch_private import schema_of
from .communication_schedule import (
    PLAIN,
    Bucket,
    CommunicationSchedule,
    Fusion,
    Member,
    ScheduledMessage,
    block_of,
    buckets_of,
    moved_bytes,
    own_redistribution,
    scattered_over,
)
from .memory_timeline import MemoryTimeline

__all__ = ["schedule_of"]


def schedule_of(
    program: LocalProgram,
    backward: Sequence[BackwardStep],
    timeline: MemoryTimeline | None,
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
    accumulates: bool = True,
) -> CommunicationSchedule:
    """The schedule of a program.

    Args:
        program, backward: the instructions, and the steps of their backward.
        timeline: the memory of a step that waits for every message at once; None: memory is no matter.
        scatters: True where parameters are stored in parts by optimizer parallel.
        allowance: bytes by which messages under way may raise the peak; None: twice the weights and gradients of the
            largest block, and at least the largest bucket of sums.
        limit: bytes within which the plan was searched; None: no limit.
        fusion: the buckets of sums; None: the default ones.
        order: names of the trained parameters in the order of the model; None: that of the program.
        several_hosts: True for the digits of ranks on several hosts.
        library: True where a library carries the messages, False on Gloo.
        stage: True for a stage of a pipeline: gradients are summed once a step, in the last micro-batch.
        outside: names of the gathered weights that micro-batches share: they are gathered once a step.
        accumulates: True where micro-batches accumulate the gradients of these, which are scattered once a step.
    """
    buckets = buckets_of(program, backward, fusion or Fusion(), order, several_hosts, library)
    made = _Pass(program, backward, timeline, buckets, allowance, limit, stage, outside, accumulates)
    if library:
        made.gather()
        made.split()
        made.regather_and_scatter(scatters)
    made.sum()
    made.rest()
    return made.result(library)


class _Pass:
    """The pass over one program.

    Attributes:
        room: bytes that messages may still hold, by moment.
        buckets: the buckets of sums, as large as they may be.
        stage, outside, accumulates: as of `schedule_of`.
        messages: the messages so far.
        covered: (place, moment) of their members.
    """

    def __init__(
        self,
        program: LocalProgram,
        backward: Sequence[BackwardStep],
        timeline: MemoryTimeline | None,
        buckets: Sequence[Bucket],
        allowance: float | None,
        limit: float | None,
        stage: bool,
        outside: Collection[str],
        accumulates: bool,
    ) -> None:
        self.program, self.backward, self.buckets = program, backward, buckets
        self.stage, self.outside, self.accumulates = stage, outside, accumulates
        self.instructions = program.instructions
        self.forward, self.end = len(program.instructions), len(program.instructions) + len(backward)
        self.place = IdentityMap[BackwardStep, int]((i, k) for k, i in enumerate(program.instructions))
        if allowance is None:
            allowance = max((2.0 * self._largest_block(), *(bucket.nbytes for bucket in buckets)))
        self.allowance = float(allowance)
        self.room = np.full(self.end + 1, np.inf)
        if timeline is not None:
            base = np.array(timeline.totals() or [0.0])
            peak = float(base.max())
            ceiling = peak + self.allowance
            if limit is not None:
                ceiling = min(ceiling, max(peak, float(limit)))
            self.room = np.append(ceiling - base, ceiling)
        self.messages: list[ScheduledMessage] = []
        self.covered: set[tuple[int, int]] = set()
        self.splits: dict[int, tuple[int, int]] = {}
        self.carried: set[int] = set()
        # By step of the backward: the place of the instruction whose backward the step is, or is made for.
        self.owners: list[int] = []
        self.back: dict[int, int] = {}
        owner = -1
        for entry in reversed(backward):
            owner = self.place.get(entry, owner)
            self.owners.append(owner)
        self.owners.reverse()
        for q, entry in enumerate(backward):
            if entry in self.place:
                self.back[self.place[entry]] = self.forward + q
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

    def has_room(self, ranges: Sequence[tuple[int, int, float]]) -> bool:
        """True where there is room for all of these (first moment, end, bytes)."""
        need = np.zeros(len(self.room))
        for start, stop, nbytes in ranges:
            need[start:stop] += nbytes
        return bool((self.room >= need)[need > 0].all())

    def hold(self, start: int, stop: int, nbytes: float) -> tuple[int, int, float]:
        self.room[start:stop] -= nbytes
        return start, stop, float(nbytes)

    # -- weights --

    def _gathered(self, instruction: Instruction) -> Digits | None:
        """The ranks of a weight's gather that may travel with others; None for any other instruction."""
        if not isinstance(instruction, Redistribute) or instruction.source.value.name not in self.program.parameters:
            return None
        steps, name = instruction.forward.steps, instruction.source.name
        if name in self.born or len(steps) != 1:
            return None
        if steps[0].pattern is not CollectiveKind.ALL_GATHER or not instruction.dtype.is_floating_point:
            return None
        return steps[0].digits

    def gather(self) -> None:
        """The gathers of the forward, one block ahead; those once a step in front of it."""
        blocks: dict[tuple[str, bool], dict[Digits, list[Member]]] = {}
        for place, instruction in enumerate(self.instructions):
            digits = self._gathered(instruction)
            if digits is not None:
                member, shared = self.member(place, place), made_by(instruction)[0].name in self.outside
                blocks.setdefault((block_of(member.name), shared), {}).setdefault(digits, []).append(member)
        since = 0
        for (_, once), groups in blocks.items():
            for digits, members in groups.items():
                for part in self._together(members, once):
                    issue = part[0].moment
                    ((_, _, nbytes), *_) = self._received(part, issue, once)
                    while issue > (0 if once else since) and self.room[issue - 1] >= nbytes:
                        issue -= 1
                    self._add_gather(digits, part, issue, self._received(part, issue, once), once=once)
            if not once:
                since = min(members[0].place for members in groups.values())

    def _together(self, members: list[Member], once: bool = False) -> list[list[Member]]:
        """The gathers of a block as one message; each by itself where there is no room for what one receives."""
        ranges = self._received(members, members[0].moment, once)
        return [members] if self.has_room(ranges) else [[member] for member in members]

    def _received(self, members: Sequence[Member], issue: int, once: bool = False) -> list[tuple[int, int, float]]:
        """(first moment, end, bytes) of the memory of a gather of weights, beyond that of weights gathered where they
        are used.

        Several weights are copied into what is sent, and each out of what is received, where it is used; those of a
        gather once a step, where the first one is used. A single weight is not copied.
        """
        moves = [self.parameter_move(m.place) for m in members]
        nbytes, first, last = sum(i.target.local_bytes for i in moves), members[0].moment, members[-1].moment
        if len(members) == 1:
            return [(issue, first, nbytes)]
        nbytes += sum(moved_bytes(i, i.forward) for i in moves)
        if not once:
            return [(issue, last + 1, nbytes)]
        copied = [(first, m.moment, float(i.target.local_bytes)) for m, i in zip(members, moves)]
        return [(issue, first + 1, nbytes), *(one for one in copied if one[0] < one[1])]

    def _add_gather(
        self,
        digits: Digits,
        members: Sequence[Member],
        issue: int,
        ranges: Sequence[tuple[int, int, float]],
        repeats_forward: bool = False,
        once: bool = False,
    ) -> int:
        nbytes = sum(moved_bytes(i, i.forward) for m in members for i in (self.parameter_move(m.place),))
        allocated = tuple(self.hold(*one) for one in ranges)
        kind, first = CollectiveKind.ALL_GATHER, members[0].moment
        return self.add(
            ScheduledMessage(
                "gather", kind, digits, tuple(members), issue, first, nbytes, repeats_forward, allocated, once
            )
        )

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
            allocation = self.hold(began, needed, gradient)
            self._add_part(place, self.back[place], move.backward, began, needed, allocation)

    def _add_part(
        self, place: int, moment: int, steps: Redistribution, issue: int, wait: int, allocation: tuple[int, int, float]
    ) -> None:
        first = next(step for step in steps.steps if step.communicates)
        nbytes = moved_bytes(self.move(place), steps)
        members = (self.member(place, moment),)
        self.add(
            ScheduledMessage(
                "redistribution", first.pattern, first.digits, members, issue, wait, nbytes, False, (allocation,)
            )
        )

    # -- the backward --

    def regather_and_scatter(self, scatters: bool) -> None:
        """The gathers and the scatters of the backward, in the order of their moments: they share the room."""
        todo = [(first, 0, partial(self._regather, *part)) for first, part in self._regathers()]
        if scatters:
            todo += [(first, 1, partial(self._scatter, *part)) for first, part in self._scatters()]
        self.open: list[tuple[int, float]] = []  # scatters waited for at the end: number, bytes; the oldest first
        self.early: dict[int, list[int]] = {}
        self.halves: dict[int, Digits] = {}  # scatters under way -> the further replicas over which parts are summed
        for _, _, run in sorted(todo, key=lambda entry: entry[:2]):
            run()
        for number in list(self.halves):
            self._follow(number)
        if self.stage:
            self._carry()

    def _regathers(self) -> Iterator[tuple[int, tuple[Digits, list[Member], list[int]]]]:
        """Yield (first moment, (digits, members, moments at which it may be issued)) for each block."""
        blocks: dict[str, dict[Digits, list[Member]]] = {}
        for q, entry in enumerate(self.backward):
            if isinstance(entry, (Regather, RecomputedInstruction)):
                instruction, _ = own_redistribution(entry, True)
                digits = self._gathered(instruction)
                if digits is not None:
                    member = self.member(self.place[instruction], self.forward + q)
                    blocks.setdefault(block_of(member.name), {}).setdefault(digits, []).append(member)
        before: list[int] = []
        for groups in blocks.values():
            # The runtime knows where it is in a backward by the weights that the backward reads.
            moments = [member.moment for members in groups.values() for member in members]
            for digits, members in groups.items():
                yield members[0].moment, (digits, members, sorted({*before, *moments}))
            before = moments

    def _regather(self, digits: Digits, members: list[Member], moments: Sequence[int]) -> None:
        ((first, stop, nbytes),) = self._received(members, members[0].moment)
        parts = [members] if self._with_room(first, stop, nbytes) is not None else [[member] for member in members]
        for part in parts:
            first = part[0].moment
            for issue in (m for m in moments if m <= first):
                (allocation,) = self._received(part, issue)
                waited = self._with_room(*allocation)
                if waited is not None:
                    self._wait_early(waited, self._add_gather(digits, part, issue, [allocation], repeats_forward=True))
                    break

    def _once_back(self, instruction: Instruction) -> bool:
        """True where micro-batches accumulate the gradient of a weight that they share."""
        if not self.stage or not isinstance(instruction, Redistribute):
            return False
        return instruction.target.name in self.outside and (self.accumulates or not instruction.forward.steps)

    def _scatters(self) -> Iterator[tuple[int, tuple[tuple[Digits, ...], list[Member], bool]]]:
        """Yield (moment, (ranks of the scatter and of the sum after it, members, once a step)) of each message."""
        groups: dict[tuple[str, torch.dtype, tuple[Digits, ...], bool], list[Member]] = {}
        for place, moment in sorted(self.back.items(), key=lambda entry: entry[1]):
            i = self.instructions[place]
            if isinstance(i, Redistribute) and (ranks := scattered_over(i)) is not None:
                key = block_of(i.source.value.name), i.sums, ranks, self._once_back(i)
                groups.setdefault(key, []).append(self.member(place, moment))
        for (_, _, ranks, once), members in groups.items():
            for part in self._that_can_wait(members, once):
                yield part[-1].moment, (ranks, part, once)

    def _that_can_wait(self, members: Sequence[Member], once: bool) -> Iterator[list[Member]]:
        """Yield the scatters of a block in parts, each as large as there is room for terms that wait for others.

        Terms that micro-batches have accumulated wait in any case; their copy needs room as it is made.
        """
        part, nbytes = [members[0]], self._term(members[0])
        for before, member in zip(members, members[1:]):
            since = member.moment if once else before.moment + 1
            if self.fits(since, member.moment + 1, nbytes + once * self._term(member)):
                if not once:
                    self.hold(since, member.moment + 1, nbytes)
                part.append(member)
                nbytes += self._term(member)
            else:
                yield part
                part, nbytes = [member], self._term(member)
        yield part

    def _term(self, member: Member) -> int:
        move = self.parameter_move(member.place)
        return math.prod(move.target.local_shape) * move.sums.itemsize

    def _scatter(self, ranks: tuple[Digits, ...], members: Sequence[Member], once: bool) -> None:
        issue, nbytes = members[-1].moment, sum(map(self._term, members))
        if once:
            self._scatter_once(ranks, members)
            return
        waits = [(m.moment + 1, issue + 1, float(self._term(m))) for m in members[:-1]]  # held since `_that_can_wait`
        # In a stage the parts are added to those of the micro-batches before.
        more = nbytes // digits_size(ranks[0]) if self.stage else 0
        waited = self._with_room(issue, self.end, nbytes + more)
        stop = issue if waited is None else self.end
        allocated = (*waits, self.hold(issue, stop, nbytes + more))
        kind = CollectiveKind.REDUCE_SCATTER
        number = self.add(
            ScheduledMessage("scatter", kind, ranks[0], tuple(members), issue, stop, nbytes, False, allocated)
        )
        before = [other for other in self.halves if other not in (waited or ())]
        self._wait_early([*(waited or ()), *before], number)
        if len(ranks) > 1:
            self.halves[number] = ranks[1]
        if waited is not None:
            self.open.append((number, nbytes + more))
        elif len(ranks) > 1:
            self._follow(number)

    def _scatter_once(self, ranks: tuple[Digits, ...], members: Sequence[Member]) -> None:
        """Scatter gradients that micro-batches have accumulated: their copy takes the place of the gradients."""
        issue, nbytes = members[-1].moment, sum(map(self._term, members))
        allocated = (self.hold(issue, issue + 1, nbytes),) if len(members) > 1 else ()
        kind = CollectiveKind.REDUCE_SCATTER
        number = self.add(
            ScheduledMessage("scatter", kind, ranks[0], tuple(members), issue, self.end, nbytes, False, allocated, True)
        )
        self._wait_early(list(self.halves), number)
        if len(ranks) > 1:
            self.halves[number] = ranks[1]

    def _carry(self) -> None:
        """Let the last scatters of a micro-batch travel on, as far as there is room until the next backward
        scatters."""
        each = [message.issue for message in self.messages if message.role == "scatter" and not message.once]
        for number, nbytes in reversed(self.open):
            message = self.messages[number]
            if any(other.members == message.members for other in self.messages if other.role == "follow"):
                continue
            if not self.fits(0, min(each) + 1, nbytes):
                break
            allocation = self.hold(0, min(each) + 1, nbytes)
            self.messages[number] = replace(message, allocated=(*message.allocated, allocation))
            self.carried.add(number)

    def _follow(self, number: int) -> None:
        """Sum the parts of a scatter over further replicas, once the scatter has been waited for."""
        scatter, digits = self.messages[number], self.halves.pop(number)
        nbytes = scatter.bytes // digits_size(scatter.digits)
        kind = CollectiveKind.ALL_REDUCE
        self.messages.append(
            ScheduledMessage("follow", kind, digits, scatter.members, scatter.wait, self.end, nbytes, once=scatter.once)
        )

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
            if not message.once:
                *terms, (start, _, nbytes) = message.allocated
                self.room[moment : self.end] += nbytes
                message = replace(message, allocated=(*terms, (start, moment, nbytes)))
            self.messages[other] = replace(message, wait=moment)
            self.early.setdefault(number, []).append(other)
            if other in self.halves:
                self._follow(other)
        self.open = [entry for entry in self.open if entry[0] not in waited]

    # -- sums --

    def sum(self) -> None:
        """The sums of gradients, in buckets that there is room for."""
        begun = self.forward
        for bucket in self.buckets:
            part: list[Member] = []
            nbytes, issued = 0, begun
            for place in bucket.places:
                member = self.member(place, self.back.get(place, self.end))
                more, moment = self._summed_bytes(member), max(issued, member.moment)
                if part and not self.fits(*self._copied(part[0], nbytes + more, moment)):
                    begun = self._add_sum(part, begun)
                    part, nbytes, moment = [], 0, max(begun, member.moment)
                part.append(member)
                nbytes, issued = nbytes + more, moment
            begun = self._add_sum(part, begun)

    def _add_sum(self, members: Sequence[Member], begun: int) -> int:
        """Add the message of a bucket. The moment at which it is issued is returned."""
        moves = [self.parameter_move(m.place) for m in members]
        begun = max(begun, *(m.moment for m in members))
        first = moves[0].backward
        assert first is not None
        nbytes = sum(moved_bytes(i, i.backward) for i in moves if i.backward is not None)
        later = self._in_another_dtype(members, begun)
        wait = self.end if self.fits(*later) else begun
        copied = self._copied(members[0], sum(map(self._summed_bytes, members)), begun) if len(members) > 1 else None
        ranges = [one for one in (copied, later if wait > begun else None) if one is not None]
        allocated = [self.hold(*one) for one in ranges if one[2]]
        digits, kind = first.steps[0].digits, CollectiveKind.ALL_REDUCE
        self.add(
            ScheduledMessage(
                "sum", kind, digits, tuple(members), begun, wait, nbytes, allocated=tuple(allocated), once=self.stage
            )
        )
        return begun

    def _summed_bytes(self, member: Member) -> int:
        """The bytes of a gradient in the dtype of its sum."""
        move = self.parameter_move(member.place)
        return math.prod(move.source.local_shape) * move.sums.itemsize

    def _copied(self, first: Member, nbytes: int, begun: int) -> tuple[int, int, float]:
        """(first moment, end, bytes) of the copies of several gradients, beside which these lie as they are made: in
        the dtype of the sum, then one after the other.

        Args:
            first: the first of them.
            nbytes: the bytes of all of them, in the dtype of the sum.
        """
        move = self.parameter_move(first.place)
        copies = 1 + (move.sums != move.source.value.dtype)
        return begun, min(begun + 1, self.end), float(copies * nbytes)

    def _in_another_dtype(self, members: Sequence[Member], begun: int) -> tuple[int, int, float]:
        """(first moment, end, bytes) by which gradients have more bytes in the dtype of their sum."""
        moves = [self.parameter_move(m.place) for m in members]
        wider = max(0, moves[0].sums.itemsize - moves[0].source.value.dtype.itemsize)
        return min(begun + 1, self.end), self.end, float(wider * sum(math.prod(i.source.local_shape) for i in moves))

    # -- the rest --

    def rest(self) -> None:
        """The redistributions that are waited for where they are issued."""
        steps: list[tuple[int, BackwardStep, bool]] = [(k, i, False) for k, i in enumerate(self.instructions)]
        steps += [(self.forward + q, entry, True) for q, entry in enumerate(self.backward)]
        for moment, entry, back in steps:
            instruction, moved = own_redistribution(entry, back)
            if moved is None or isinstance(instruction, LocalOp):
                continue
            if (first := next((s for s in moved.steps if s.communicates), None)) is None:
                continue
            place = self.place[instruction]
            if (place, moment) in self.covered:
                continue
            repeats_forward = back and entry is not instruction
            once = self._once_back(instruction) if back else instruction.target.name in self.outside
            at = (self.end if back else 0) if once else moment
            nbytes, members = moved_bytes(instruction, moved), (self.member(place, moment),)
            self.add(
                ScheduledMessage(
                    "redistribution", first.pattern, first.digits, members, at, at, nbytes, repeats_forward, once=once
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
            {number[n]: tuple(number[scatter] for scatter in scatters) for n, scatters in early.items()},
            library,
            frozenset(number[n] for n in self.carried),
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
