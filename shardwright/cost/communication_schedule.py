"""The communication of a plan: its collectives as records, the gradients that are summed together, and the schedule,
which says where each collective is issued and where it is waited for.

1. The collectives of an instruction (`forward_collectives`, `backward_collectives`), one record each:

       instruction -> (Collective, the digits of its group)

   Example: the backward of a gather of a weight that is stored in 4 parts is a reduce-scatter of phase "gradient".

2. Gradient fusion (`Fusion`): a sum of many small gradients is sent as one bucket. Example: 8 layers of 1024 x 1024 in
   float32 have 32 MiB of gradients, which are two buckets of 16 MiB (`AUTO`).

3. The schedule (`CommunicationSchedule`). A program is static, so its messages can begin early and be waited for late.
   One pass over the instructions (`communication_pass`) decides both, once. The runtime, the dumps, the prices in time
   and `shardwright simulate` read the result, which is this value.

    moments      the instructions of the forward in order, then the steps of the backward (`Plan.backward`) in order,
                 as in `memory_timeline`; the end of the step is one further moment
    a message    one collective, or several that travel as one: issued before one moment, waited for before another

    role            members                                       issued                    waited for
    gather          weights of one block, over the same ranks     one block ahead           each weight at its use
    sum             gradients in one bucket                       with the last of them     at the end
    scatter         gradients of one block, dtype, set of ranks   with the last of them     at the end
    follow          the same, summed over further replicas        after the scatter         at the end
    redistribution  one, of any other value                       as its input comes        at its first use

   A scatter that a sum over further replicas follows (parameters in parts over the devices of a host, replicated over
   hosts) is waited for before the next scatter is issued.

   In a stage of a pipeline the moments are those of one micro-batch, and some messages are sent once a step:

       gathers of weights that micro-batches share       issued in front of the first forward, waited for in it
       sums, and scatters of what micro-batches          issued in the last backward, with the last gradient; waited
       have accumulated                                  for at the end of the step
       scatters of a micro-batch (optimizer level 2, 3)  in each backward; the last ones may still be under way until
                                                         the stage's next backward scatters (`carried`)

   Example: blocks A and B under optimizer level 3, moments 0 to 3 the forward, 4 to 9 the backward:

    0 A.w    1 A    2 B.w    3 B    |    4 B.w    5 B    6 B.w's gradient    7 A.w    8 A    9 A.w's gradient
    gather of A.w: issue 0, wait 0       of B.w: issue 0, wait 2      again B.w: issue 4, wait 4    A.w: issue 4, wait 7
    scatter of B.w's gradient: issue 6, wait 10                       of A.w's: issue 9, wait 10
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch

from ..errors import SettingError
from ..graph import Value
from ..identity_tables import IdentitySet
from ..layout import Digits, digits_size
from ..partition.local_program import (
    GlobalExtreme,
    Instruction,
    LocalOp,
    LocalProgram,
    PlacedValue,
    Redistribute,
    reads,
)
from ..partition.rematerialization import BackwardStep, RecomputedInstruction, Regather
from ..redistribution import CollectiveKind, Redistribution
from ..redistribution.redistribution_search import refine
from .memory_timeline import Allocation

__all__ = [
    "PLAIN",
    "Bucket",
    "Collective",
    "CommunicationSchedule",
    "Due",
    "Fusion",
    "Member",
    "ScheduledMessage",
    "backward_collectives",
    "block_of",
    "buckets_of",
    "forward_collectives",
    "fusion_of",
    "moved_bytes",
    "own_redistribution",
    "redistribution_collectives",
    "scattered_over",
]

# -- collectives, as records


@dataclass(frozen=True)
class Collective:
    """One collective in which a rank takes part.

    Attributes:
        op: the kind; its word is "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "halo_exchange" or
            "halo_reduce", or "send" or "recv" in a pipeline.
        ranks: its group, ascending.
        shape: of the rank's own input to it.
        bytes: of that input; of an exchange of halos, those of its elements that the rank sends.
        sent: bytes that the rank must send, `CollectiveKind.sent`: 2(n−1)/n of the input for an all-reduce, (n−1)/n
            for a reduce-scatter and an all-to-all, n−1 times the input for an all-gather. The most over ranks.
        phase: "forward", "backward", "gradient" (a parameter's), or "storage" (from a parameter's storage to its use).
        cause: "operator", "conversion" or "parameter".
        operator: the operator that causes it.
        again: True in the backward, for a tensor not saved from the forward: a weight gathered again, or a
            recomputation.
    """

    op: CollectiveKind
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    bytes: int
    sent: int
    phase: str
    cause: str
    operator: str
    again: bool = False


def redistribution_collectives(
    steps: Redistribution,
    shape: tuple[int, ...],
    value: Value,
    phase: str,
    cause: str,
    operator: str,
    producer: str = "",
) -> Iterator[tuple[Collective, Digits]]:
    """Yield the collectives of one redistribution of a value whose local shape is `shape` at its start.

    A step that completes a partial sum is caused, in the forward, by the producer of the sum.
    """
    for step in steps.steps:
        if step.communicates:
            numel = 1
            for size in shape:
                numel *= size
            nbytes = numel * value.dtype.itemsize
            completes = step.reduces and cause != "parameter"
            yield (
                Collective(
                    step.kind,
                    (),
                    shape,
                    nbytes if step.halo is None else step.sent(nbytes),
                    step.sent(nbytes),
                    phase,
                    "operator" if completes else "redistribution" if cause == "operator" else cause,
                    producer if completes and producer else operator,
                ),
                step.digits,
            )
        shape = step.local_shape_after(shape)


def forward_collectives(instruction: Instruction) -> Iterator[tuple[Collective, Digits]]:
    """Yield the collectives of an instruction in the forward."""
    if not isinstance(instruction, LocalOp):
        source = instruction.source
        cause = "operator" if isinstance(instruction, GlobalExtreme) else instruction.cause
        phase = "storage" if cause == "parameter" else "forward"
        yield from redistribution_collectives(
            instruction.forward,
            source.local_shape,
            instruction.target.value,
            phase,
            cause,
            instruction.operator,
            getattr(instruction, "producer", ""),
        )


def backward_collectives(instruction: BackwardStep) -> Iterator[tuple[Collective, Digits]]:
    """Yield the collectives of an instruction in the backward."""
    if isinstance(instruction, RecomputedInstruction):
        for collective, digits in forward_collectives(instruction.instruction):
            phase = "backward" if collective.phase == "forward" else collective.phase
            yield replace(collective, phase=phase, again=True), digits
        return
    if isinstance(instruction, Regather):
        move = instruction.move
        for collective, digits in redistribution_collectives(
            move.forward, move.source.local_shape, move.target.value, "storage", "parameter", instruction.operator
        ):
            yield replace(collective, again=True), digits
    elif isinstance(instruction, Redistribute) and instruction.backward is not None:
        target = instruction.target
        phase = "gradient" if instruction.cause == "parameter" else "backward"
        yield from redistribution_collectives(
            instruction.backward, target.local_shape, instruction.back, phase, instruction.cause, instruction.operator
        )
    elif isinstance(instruction, GlobalExtreme) and instruction.backward is not None:
        yield from redistribution_collectives(
            instruction.forward,
            instruction.source.local_shape,
            instruction.source.value,
            "backward",
            "operator",
            instruction.operator,
        )


# -- gradient fusion


# Bytes of a bucket in automatic mode: the fastest of 0.25 to 64 MiB for four and eight Gloo processes, and within 5 %
# of the fastest for two (measured: benchmarks/README.md).
AUTO = 16 << 20


# Bytes, times the number of ranks that sum: a bucket is full at this size, even below `AUTO`, and a gradient of this
# size travels by itself. The pieces that ranks send one another are then long enough, and a copy into a bucket takes
# longer than another start of a collective (`RING` in `collectives`). With half of it, steps took 12 % longer. A
# bucket is in memory three times: its gradients, the concatenation, and the receive buffer.
PIECE = 2 << 20


# The same on a library such as NCCL, whatever the number of ranks: DistributedDataParallel's default. Assumed: four
# times as much where ranks of several hosts sum, since a start takes longer through the network.
LIBRARY, HOSTS = 25 << 20, 100 << 20


LEGAL = (
    '{"mode": "auto"}, {"mode": "size", "config": 25} (MB a bucket), or {"mode": "index", "config": [10, 20]} '
    "(parameters before which a new bucket begins)"
)


@dataclass(frozen=True)
class Due:
    """A gradient that is to be summed.

    Attributes:
        name: of the parameter.
        nbytes: of the gradient on one rank.
        kind: gradients travel together only with those of equal kind (ranks, dtype).
        index: of the parameter among the trained ones, in the model's order.
        ranks: the number of ranks over which it is summed.
        hosts: True where these ranks are on several hosts.
    """

    name: str
    nbytes: int
    kind: Hashable
    index: int
    ranks: int
    hosts: bool = False


@dataclass(frozen=True)
class Fusion:
    """The division of gradients into buckets.

    Attributes:
        limit: bytes at which a bucket is full, and from which a gradient travels by itself; 0: every gradient by
            itself; None: on a library `LIBRARY`, over several hosts `HOSTS`; on Gloo `AUTO`, and at most `PIECE` for
            each rank.
        ends: in place of `limit`, indices of parameters before which a new bucket begins.
    """

    limit: int | None = None
    ends: tuple[int, ...] | None = None

    def check(self, trained: int) -> None:
        """Check that the indices refer to parameters of the model.

        Args:
            trained: the number of trained parameters.

        Raises:
            SettingError: an index is not below `trained`.
        """
        if self.ends is not None and self.ends[-1] >= trained:
            raise SettingError(
                f"comm_fusion: the index {self.ends[-1]}, but the model trains {trained} parameters",
                strategy=list(self.ends),
                legal=f"indices from 1 to {trained - 1}",
            )

    def buckets(self, gradients: Sequence[Due], library: bool = False) -> tuple[tuple[str, ...], ...]:
        """The names of the gradients of each bucket, in the order in which buckets are filled.

        Args:
            gradients: in the order in which they come.
            library: True where a library such as NCCL sums them, False on Gloo.
        """
        if self.ends is not None:
            parts: dict[tuple[int, Hashable], list[str]] = {}
            last: dict[tuple[int, Hashable], int] = {}
            for place, due in enumerate(gradients):
                key = (bisect_right(self.ends, due.index), due.kind)
                parts.setdefault(key, []).append(due.name)
                last[key] = place
            return tuple(tuple(parts[key]) for key in sorted(parts, key=last.__getitem__))
        full: list[tuple[str, ...]] = []
        open_: dict[Hashable, list[Due]] = {}
        for due in gradients:
            most, pieces = AUTO, due.ranks * PIECE
            if library:
                most = pieces = HOSTS if due.hosts else LIBRARY
            limit = min(most, pieces) if self.limit is None else self.limit
            if due.nbytes >= min(limit, pieces):  # by itself: in a bucket it would be in memory twice
                full.append((due.name,))
                continue
            bucket = open_.setdefault(due.kind, [])
            bucket.append(due)
            if sum(d.nbytes for d in bucket) >= limit:
                full.append(tuple(d.name for d in open_.pop(due.kind)))
        return (*full, *(tuple(d.name for d in bucket) for bucket in open_.values()))


def fusion_of(setting: object) -> Fusion:
    """The `Fusion` of a user's ``comm_fusion(allreduce=…)``.

    Args:
        setting: "auto", a number of MB, a list of indices, or ``{"mode": …, "config": …}``.

    Raises:
        SettingError: `setting` is none of these.
    """
    if isinstance(setting, dict):
        if "mode" not in setting or set(setting) - {"mode", "config"}:
            raise SettingError(f"comm_fusion: {setting!r} must have a mode, and may have a config", legal=LEGAL)
        mode, config = setting["mode"], setting.get("config")
    else:
        mode = setting if isinstance(setting, str) else "index" if isinstance(setting, (list, tuple)) else "size"
        config = None if isinstance(setting, str) else setting
    if mode == "auto":
        if config is not None:
            raise SettingError(f'comm_fusion: the mode "auto" takes no config, not {config!r}', legal=LEGAL)
        return Fusion()
    if mode == "size":
        if isinstance(config, bool) or not isinstance(config, (int, float)) or not 0 < config < math.inf:
            raise SettingError(f"comm_fusion: a bucket of {config!r} MB", legal="a number above 0")
        return Fusion(limit=int(config * (1 << 20)))
    if mode == "index":
        ends = config if isinstance(config, (list, tuple)) else ()
        whole = bool(ends) and all(isinstance(i, int) and not isinstance(i, bool) for i in ends)
        if not whole or ends[0] < 1 or any(a >= b for a, b in zip(ends, ends[1:])):
            raise SettingError(
                f"comm_fusion: the indices {config!r}",
                legal="a list of whole numbers of at least 1, each above the one before",
            )
        return Fusion(ends=tuple(ends))
    raise SettingError(f"comm_fusion: unknown mode {mode!r}", legal=LEGAL)


# -- the schedule


#: The dtypes that every library moves and sums. Messages in other dtypes are converted on the way, and travel alone.
PLAIN = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
PLAIN |= {torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64}

Role = Literal["gather", "sum", "scatter", "follow", "redistribution"]


@dataclass(frozen=True)
class Member:
    """One redistribution of a message.

    Attributes:
        place: its index in `LocalProgram.instructions`.
        moment: the moment at which it stands in the step: a gather or a redistribution is needed there, the input of a
            sum or a scatter is there.
        name: of the value that it moves, or whose gradient it moves.
    """

    place: int
    moment: int
    name: str


@dataclass(frozen=True)
class ScheduledMessage:
    """One collective, or several of the same ranks that travel as one.

    Attributes:
        role: see the head of the file.
        kind: of the first collective.
        digits: its ranks: those that differ in these digits alone.
        members: in the order of their moments.
        issue: the moment before which it is issued.
        wait: the moment before which it is first waited for.
        bytes: of a rank's own input.
        repeats_forward: True where the step runs an instruction of the forward once more: a weight gathered again, or a
            recomputation.
        allocated: (first moment, end, bytes) of its memory beyond that of a step which waits at once.
        once: True where it is sent once a step, for any number of micro-batches.
    """

    role: Role
    kind: CollectiveKind
    digits: Digits
    members: tuple[Member, ...]
    issue: int
    wait: int
    bytes: int
    repeats_forward: bool = False
    allocated: tuple[tuple[int, int, float], ...] = ()
    once: bool = False

    @property
    def apart(self) -> bool:
        """True where anything stands between its issue and its wait."""
        return self.issue < self.wait

    def __str__(self) -> str:
        """``all_gather, weights of blocks.1, again``: its kind and the values that it moves."""
        return f"{self.kind}, {self.whose}"

    @property
    def whose(self) -> str:
        """``weights of blocks.1``, ``gradients``, or the name of a value: what it moves."""
        blocks = {block_of(member.name) for member in self.members}
        if self.role == "redistribution":
            return self.members[0].name
        what = "weights" if self.role == "gather" else "gradients"
        of = f" of {blocks.pop()}" if len(blocks) == 1 and "" not in blocks else ""
        return f"{what}{of}{', again' * self.repeats_forward}"


@dataclass(frozen=True, repr=False)
class CommunicationSchedule:
    """The schedule of one program.

    Attributes:
        messages: in the order of their issue.
        forward: the number of moments of the forward.
        end: the moment after the last one.
        allowance: bytes by which messages under way may raise the peak.
        splits: place of a redistribution in two parts -> (the place before which it is issued, the place before which
            it is waited for). A split serves both directions, of which one may send nothing.
        early: number of a message -> the numbers of the scatters that are waited for before it is issued.
        library: True where a library such as NCCL carries the messages, False on Gloo.
        carried: numbers of the scatters of a micro-batch that are waited for in front of the first scatter of the
            stage's next backward, and at the end of the step.
    """

    messages: tuple[ScheduledMessage, ...]
    forward: int
    end: int
    allowance: float
    splits: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    early: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    library: bool = True
    carried: frozenset[int] = frozenset()

    def __repr__(self) -> str:
        apart = sum(message.apart for message in self.messages)
        return f"<CommunicationSchedule: {len(self.messages)} messages, {apart} of them beside computation>"

    @cached_property
    def order(self) -> tuple[tuple[int, str, int], ...]:
        """Everything that is issued and waited for, in order: (moment, "issue" or "wait", number of the message).

        At one moment what is issued comes before what is waited for, but for a wait that makes room.
        """
        out: list[tuple[tuple[int, ...], tuple[int, str, int]]] = []
        made_room = {number for numbers in self.early.values() for number in numbers}
        following = {message.members: number for number, message in self.of("follow")}
        for number, message in enumerate(self.messages):
            if message.role == "follow":
                continue  # with its scatter
            place = message.members[0].place
            begun, needed = self.splits.get(place, (place, place))
            back = message.issue >= self.forward
            # Where each of the two stands among others of its moment: redistributions in two parts, before the
            # instruction; weights; what the instruction itself sends. Autograd runs the first in the opposite order.
            first: tuple[int, ...] = (2, number, 0)
            second: tuple[int, ...] = (2, number, 1)
            if message.role == "redistribution" and message.apart:
                first, second = (
                    ((0, -needed, -1, -place), (0, -begun, 0, -place)) if back else ((0, 0, place), (0, 1, place))
                )
            elif message.role == "gather":
                first, second = (1, 0, number), (1, 1, number)
            for k, other in enumerate(self.early.get(number, ())):
                at = (message.issue, back, *first, k - len(self.messages))
                out.append(((*at, 0), (message.issue, "wait", other)))
                if (follow := following.get(self.messages[other].members)) is not None:
                    out.append(((*at, 1), (message.issue, "issue", follow)))
            out.append(((message.issue, back, *first, 0), (message.issue, "issue", number)))
            follow = following.get(message.members) if message.role == "scatter" else None
            if follow is not None:
                out.append(((self.end, True, *second, 1), (self.end, "wait", follow)))
            if number not in made_room:
                if follow is not None:
                    second = (2, -1, number) if message.wait == self.end else (2, number, 1)
                    out.append(((message.wait, back, *second, 2), (message.wait, "issue", follow)))
                out.append(((message.wait, back, *second, 1), (message.wait, "wait", number)))
        return tuple(entry for _, entry in sorted(out, key=lambda pair: pair[0]))

    @cached_property
    def actions(self) -> dict[int, tuple[tuple[str, int], ...]]:
        """Moment -> ("issue" or "wait", number of the message), in order, of the messages that are under way while
        anything else runs."""
        out: dict[int, list[tuple[str, int]]] = {}
        for moment, action, number in self.order:
            if self.messages[number].apart:
                out.setdefault(moment, []).append((action, number))
        return {moment: tuple(each) for moment, each in out.items()}

    def of(self, role: Role, repeats_forward: bool = False) -> Iterator[tuple[int, ScheduledMessage]]:
        """Yield the messages of a role with their numbers; of gathers those of the forward, or the further ones."""
        for number, message in enumerate(self.messages):
            if message.role == role and message.repeats_forward == repeats_forward:
                yield number, message

    @property
    def allocations(self) -> Iterator[Allocation]:
        """Yield the memory of the messages under way, as entries of a `MemoryTimeline`."""
        for number, message in enumerate(self.messages):
            for start, stop, nbytes in message.allocated:
                if stop > start and nbytes:
                    yield Allocation("under way", f"message {number}", start, stop, nbytes)

    @property
    def carried_bytes(self) -> float:
        """Bytes of the scatters that are under way between two backwards of a stage."""
        return float(sum(self.messages[number].allocated[-1][2] for number in self.carried))

    @cached_property
    def under_way(self) -> float:
        """The most bytes that messages under way hold at one moment."""
        allocated = np.zeros(self.end + 1)
        for one in self.allocations:
            allocated[one.start : one.stop] += one.bytes
        return float(allocated.max(initial=0.0))


def block_of(name: str) -> str:
    """The block of the model that a parameter belongs to: the path up to its first number (``blocks.3`` of
    ``blocks.3.up.weight``), else the path of its module."""
    path = name.split(".")
    end = next((i + 1 for i, part in enumerate(path) if part.isdigit()), len(path) - 1)
    return ".".join(path[:end])


def own_redistribution(entry: BackwardStep, back: bool) -> tuple[Instruction, Redistribution | None]:
    """The instruction of the forward that a step runs, and the redistribution that it performs; None: a `LocalOp`, or
    nothing to send.

    Args:
        entry: an instruction, or a step of `Plan.backward`.
        back: True in the backward.
    """
    if isinstance(entry, (Regather, RecomputedInstruction)):
        ran, back = entry.move if isinstance(entry, Regather) else entry.instruction, False
    else:
        ran = entry
    if isinstance(ran, LocalOp):
        return ran, None
    if not back:
        return ran, ran.forward
    if ran.backward is None:
        return ran, None
    return ran, ran.forward if isinstance(ran, GlobalExtreme) else ran.backward


def moved_bytes(instruction: Redistribute | GlobalExtreme, steps: Redistribution) -> int:
    """Bytes of a rank's own input to the first collective of a redistribution."""
    back = isinstance(instruction, Redistribute) and steps is not instruction.forward
    shape = instruction.target.local_shape if back else instruction.source.local_shape
    dtype = instruction.source.value.dtype
    if isinstance(instruction, Redistribute):
        dtype = instruction.sums if back else instruction.dtype
    for step, before in zip(steps.steps, steps.local_shapes(shape)):
        if step.communicates:
            return math.prod(before) * dtype.itemsize
    return 0


# -- gradients of parameters that messages of their own reduce


class Bucket(NamedTuple):
    """Gradients whose sums fit into one message: the places of their redistributions, in the order in which they
    come."""

    places: tuple[int, ...]
    nbytes: int


def buckets_of(
    program: LocalProgram,
    backward: Sequence[BackwardStep],
    fusion: Fusion,
    order: Sequence[str] | None,
    several_hosts: Callable[[Digits], bool],
    library: bool,
) -> list[Bucket]:
    """The buckets of sums of gradients. Arguments as of `schedule_of`."""
    trained = [n for n, p in program.parameters.items() if p.value.requires_grad]
    index = {name: k for k, name in enumerate(trained if order is None else order)}
    places, due = summed_late(program, backward), {}
    for name, place in places.items():
        move = program.instructions[place]
        assert isinstance(move, Redistribute) and move.backward is not None
        digits = move.backward.steps[0].digits
        nbytes = math.prod(move.source.local_shape) * move.sums.itemsize
        kind = digits, move.source.value.dtype, move.sums
        due[name] = Due(name, nbytes, kind, index.get(name, 0), digits_size(digits), several_hosts(digits))
    return [
        Bucket(tuple(places[name] for name in names), sum(due[name].nbytes for name in names))
        for names in fusion.buckets(list(due.values()), library)
    ]


def scattered_over(move: Redistribute) -> tuple[Digits, ...] | None:
    """The ranks over which the gradient of a stored weight is scattered as one reduce-scatter that nothing needs
    before the end of the backward, and those over which its part is then summed; None: it is reduced otherwise."""
    if move.cause != "parameter" or move.backward is None or not move.forward.collectives:
        return None
    steps, dtype = move.backward.steps, move.source.value.dtype
    patterns = [step.pattern for step in steps]
    if patterns[1:] not in ([], [CollectiveKind.ALL_REDUCE]) or any(step.reduction != "sum" for step in steps):
        return None
    if patterns[:1] != [CollectiveKind.REDUCE_SCATTER]:
        return None
    if dtype.is_complex or move.sums not in PLAIN or not move.sums.is_floating_point:
        return None
    if not move.backward.source.partial or refine(move.backward.source, move.backward.target) is None:
        return None
    return tuple(step.digits for step in steps)


def summed_late(program: LocalProgram, backward: Sequence[BackwardStep]) -> dict[str, int]:
    """Parameter -> the place of the redistribution that does nothing but sum its gradient, where it is the only
    consumer of the parameter that the backward reaches.

    The order is that in which gradients come: by the parameter's first use, last use first; among the parameters of
    one operator, the last first.
    """
    consumers: dict[str, list[int]] = {}
    reached = IdentitySet(backward)
    for place, instruction in enumerate(program.instructions):
        for name in reads(instruction) if instruction in reached else ():
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
