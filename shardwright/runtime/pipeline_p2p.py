"""A pipeline on processes: each rank has the stages of its group of devices, and nothing of the others.

1. `process_pipeline` builds the program of one rank; `pipeline_step.PipelineProgram` plays it.

2. The order of sending (`sent_by`). Both ranks of a pair derive the order from the plan and the schedule, so no message
   needs a name.

3. Exchanges (`exchanges`), for libraries that run the operations of a rank in the order in which they are issued. All
   ranks walk one line: every action takes one time step (`Schedule.steps`), and

    before step 0       shared parameters go to the stages that use them
    step t              the actions of step t, then the messages that they make, pair by pair in ascending order
    after all steps     the gradients of shared parameters go to the stages that own them

   A message is sent at the position at which it is received. No action needs a message of its own step or a later one.
   So the first event of the line that has not happened can always happen: no rank waits for ever, even where an
   operation of one rank waits for all operations that the rank has issued before, and a send for its receive.

   Example: 1f1b with 2 stages and 3 micro-batches. Ranks 0 and 1 exchange

    step 0   0F0          0 -> 1 the value of micro-batch 0
    step 1   0F1   1F0    0 -> 1 the value of micro-batch 1
    step 2         1B0    1 -> 0 the gradient of micro-batch 0
    step 3   0B0   1F1
    step 4   0F2   1B1    0 -> 1 the value of micro-batch 2, 1 -> 0 the gradient of micro-batch 1: one batch

4. The links of one rank to the stages of other ranks.

    Gloo, MPI       `ProcessStageLink`: every operation by itself, receives ahead
    NCCL, HCCL      `BatchedStageLink`: both directions of a pair of ranks in one batch

   Gloo: between two ranks messages in one direction arrive in the order in which they were sent. A receive is posted
   before it is needed: while one message is worked on, the next ones travel. Results come last, from the rank at the
   same position in the stage that has them: no rank waits for all others.

   Libraries of accelerators: operations are queued on the device. A receive that is queued in front of a send can keep
   it back, and the first operation of two ranks keeps back the host until both have come to it. So

    each pair of ranks     has one group, and meets once when the groups are made: all ranks walk the pairs in one order
    a position             issues what two ranks have for each other as one batch, after the action that precedes it;
                           the positions are those of `exchanges`
    waits                  are put before the first use of what was received, and at the end of the step
    results                are broadcast among the ranks at one position of their stages
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..capture.module_calls import ModelAndLoss
from ..cost.communication_schedule import Fusion
from ..graph import Value
from ..layout import Layout
from ..partition.local_program import Redistribute
from ..pipeline.pipeline_plan import PipelinePlan, Stage, Transfer
from ..pipeline.schedules import Action, Schedule
from ..process_runtime import Runtime
from ..torch_private import number_of_groups
from .compilation import Compilation
from .device_seed import NO_SEED, trace_random_numbers
from .distributed.collectives import carried
from .distributed.gradient_tensors import of_stage
from .distributed.parameters import ParameterPlacement, ShardedState
from .distributed.process_groups import ProcessGroups, groups_of_world
from .distributed.rank_executor import RankExecutor
from .distributed.rank_positions import WaitPoint, waiting
from .distributed.stage_weights import StageSums, StageWeights
from .lowering import Lowered, lower
from .optimizer_guard import Accumulation, set_empty_aside
from .pipeline_step import PipelineProgram, StageBody
from .profile_ranges import range_of, receive_text

__all__ = [
    "BatchedStageLink",
    "Exchange",
    "Message",
    "ProcessStageLink",
    "exchanges",
    "link_of",
    "pairs",
    "process_pipeline",
    "sent_by",
]

# -- messages


class Message(NamedTuple):
    """A message between stages.

    Attributes:
        transfer: its kind, stages and layouts; None: an output of the model.
        micro: the micro-batch; −1: once a step; with `transfer` None, the index of the output.
        back: True for the gradient of the transferred value.
    """

    transfer: Transfer | None
    micro: int
    back: bool = False


class Exchange(NamedTuple):
    """The messages between this rank and another one at one position: one batch on both ranks.

    Attributes:
        peer: the other rank.
        sends, receives: the messages, in the order of sending.
    """

    peer: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


def _shared(plan: PipelinePlan) -> list[Transfer]:
    return [t for t in plan.transfers if t.kind == "parameter"]


def _made_by(plan: PipelinePlan, action: Action) -> Iterator[Message]:
    """The messages that an action makes, in the order in which `PipelineStep` sends them."""
    stage, kind, micro = action
    if kind == "F":
        for name in plan.stages[stage].sent:
            yield from (
                Message(t, micro) for t in plan.transfers if (t.kind, t.name, t.source) == ("value", name, stage)
            )
    elif kind in "BI":
        for source in plan.stages[stage].sources:
            yield from (
                Message(t, micro, True)
                for t in plan.transfers
                if (t.kind, t.name, t.source, t.target) == ("value", source.name, source.index, stage)
                and source.kind == "stage"
                and t.gradient
            )


def sent_by(plan: PipelinePlan, schedule: Schedule, group: int) -> Iterator[Message]:
    """The messages that a group of devices sends in a step, in the order of sending."""
    on = lambda stage: schedule.placement[stage] == group
    yield from (Message(t, -1) for t in _shared(plan) if on(t.source))
    for action in schedule.actions[group]:
        yield from _made_by(plan, action)
    if schedule.name != "forward":
        yield from (Message(t, -1, True) for t in _shared(plan) if t.gradient and on(t.target))


def exchanges(plan: PipelinePlan, schedule: Schedule, rank: int) -> tuple[tuple[Exchange, ...], ...]:
    """The exchanges of a rank in a step, by position: before its first action, after each of its actions, and last
    after all gradients of shared parameters are made. Exchanges of one position have an order too."""
    mine = {stage.number for stage in plan.of_rank(rank)}
    steps = [schedule.steps[a] for a in schedule.actions[schedule.placement[min(mine)]]]
    made: dict[int, list[Message]] = {}  # by time step
    for action, step in sorted(schedule.steps.items(), key=lambda item: (item[1], schedule.placement[item[0].stage])):
        made.setdefault(step, []).extend(_made_by(plan, action))
    out: list[list[Exchange]] = [[] for _ in range(len(steps) + 2)]
    out[0] += _between(plan, rank, mine, [Message(t, -1) for t in _shared(plan)])
    for step, messages in sorted(made.items()):
        out[bisect_right(steps, step)] += _between(plan, rank, mine, messages)
    if schedule.name != "forward":
        out[-1] += _between(plan, rank, mine, [Message(t, -1, True) for t in _shared(plan) if t.gradient])
    return tuple(map(tuple, out))


def _between(plan: PipelinePlan, rank: int, mine: set[int], messages: list[Message]) -> Iterator[Exchange]:
    """The exchanges of a rank at one moment of the line. Ascending peers of every rank are ascending pairs of all."""
    each: dict[int, tuple[list[Message], list[Message]]] = {}
    for message in messages:
        t = message.transfer
        assert t is not None
        source, target = (t.target, t.source) if message.back else (t.source, t.target)
        if (source in mine) != (target in mine):
            for peer in plan.peers(t, rank, message.back):
                each.setdefault(peer, ([], []))[target in mine].append(message)
    return (Exchange(peer, tuple(each[peer][0]), tuple(each[peer][1])) for peer in sorted(each))


def pairs(plan: PipelinePlan) -> list[tuple[int, int]]:
    """The pairs of ranks, lower first, that exchange messages, in ascending order."""
    return sorted(
        {
            (min(rank, peer), max(rank, peer))
            for t in plan.transfers
            for back in (False, True)
            for rank in plan.stages[t.target if back else t.source].ranks
            for peer in plan.peers(t, rank, back)
            if rank != peer
        }
    )


# -- links


#: The number of receives from one rank that are posted at a time.
AHEAD = 2


class _Posted(NamedTuple):
    works: Sequence[dist.Work]
    tensor: Tensor

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def link_of(
    plan: PipelinePlan, rank: int, device: torch.device, joined: list[tuple[int, ...] | None]
) -> ProcessStageLink:
    """The link of one rank; arguments as of `ProcessStageLink`. All ranks make theirs together."""
    kind = ProcessStageLink if dist.get_backend() in ("gloo", "mpi") else BatchedStageLink
    link = kind(plan, rank, device, joined)
    link.connect()
    return link


class ProcessStageLink:
    """The link of one rank.

    Args:
        plan: the plan.
        rank: in the world.
        device: on which messages are received.
        joined: by output of the model, its shape on this rank once micro-batches are put together; None where it has
            none.
    """

    def __init__(
        self, plan: PipelinePlan, rank: int, device: torch.device, joined: list[tuple[int, ...] | None]
    ) -> None:
        self.plan, self.rank, self.device, self.joined = plan, rank, device, joined
        self.mine = {stage.number for stage in plan.of_rank(rank)}
        self._inside: dict[Message, Tensor] = {}  # between stages on this rank
        self._sent: list[_Posted] = []
        self._coming: dict[int, deque[Message]] = {}  # by sending rank, messages whose receives are not posted yet
        self._posted: dict[Message, _Posted] = {}
        self._of: dict[int, deque[Message]] = {}  # by sending rank, receives posted and not taken yet
        self._expected: dict[Schedule, dict[int, tuple[Message, ...]]] = {}
        self._homes = [
            next((s for s in plan.stages if i in s.results), None) if isinstance(v, Value) else None
            for i, v in enumerate(plan.graph.outputs)
        ]

    def connect(self) -> None:
        """Make the groups that the link needs, together with all other ranks."""

    def _receivers(self, home: Stage) -> tuple[int, ...]:
        """The ranks to which this rank, of stage `home`, sends an output of the stage."""
        outside = [r for r in range(self.plan.devices) if r not in home.ranks]
        return tuple(r for r in outside if self._teller(home, r) == self.rank)

    def _teller(self, home: Stage, rank: int) -> int:
        """The rank of stage `home` that sends the stage's outputs to `rank`."""
        alike = len({stage.devices for stage in self.plan.stages}) == 1
        return home.first + rank % home.devices if alike else home.first

    # -- a step --

    def begin(self, schedule: Schedule) -> None:
        if schedule not in self._expected:
            self._expected[schedule] = self._incoming(schedule)
        self._settle()
        self._coming = {peer: deque(messages) for peer, messages in self._expected[schedule].items()}
        self._of = {peer: deque() for peer in self._coming}
        for peer in self._coming:
            self._ahead(peer)

    def _settle(self) -> None:
        """Wait for what a step that ended in an error has left."""
        for posted in self._posted.values():
            posted.wait()
        self._posted.clear()
        self._inside.clear()

    def send(self, transfer: Transfer, micro: int, back: bool, tensor: Tensor) -> None:
        message = Message(transfer, micro, back)
        if transfer.source in self.mine and transfer.target in self.mine:
            self._inside[message] = tensor
            return
        self._sent = [posted for posted in self._sent if not all(work.is_completed() for work in posted.works)]
        self._out(message, tensor.resolve_conj().contiguous())

    def _out(self, message: Message, tensor: Tensor) -> None:
        assert message.transfer is not None
        self._post_sends(tensor, self.plan.peers(message.transfer, self.rank, message.back))

    def _post_sends(self, tensor: Tensor, peers: Iterable[int]) -> None:
        for peer in peers:
            self._sent.append(_Posted((_begun(dist.isend(tensor, peer)),), tensor))

    def exchange(self) -> None:
        """End a position of the schedule."""

    def receive(self, transfer: Transfer, micro: int, back: bool) -> Tensor:
        message = Message(transfer, micro, back)
        if transfer.source in self.mine and transfer.target in self.mine:
            return self._inside.pop(message)
        (peer,) = self.plan.peers(transfer, self.rank, back)
        return self._taken(message, peer)

    def _taken(self, message: Message, peer: int) -> Tensor:
        """A message from another rank."""
        while message not in self._posted:
            self._post(peer)
        posted = self._posted.pop(message)
        place = self._place(message, peer)
        with waiting(place), range_of(receive_text(place.what)):
            posted.wait()
        self._of[peer].remove(message)
        self._ahead(peer)
        return posted.tensor

    def _place(self, message: Message, peer: int) -> WaitPoint:
        t, micro = message.transfer, f", micro-batch {message.micro}," if message.micro >= 0 else ""
        if t is None:
            return WaitPoint(f"output {message.micro} of the model, from rank {peer}", (peer, self.rank))
        what = (
            f"the {'gradient of ' if message.back else ''}{t.kind} {t.name!r}{micro} "
            f"of stage {t.source} for stage {t.target}"
        )
        return WaitPoint(what, (peer, self.rank))

    def finish(self, results: list[Tensor | None]) -> list[Tensor | None]:
        out = [
            None if home is None else self._result(i, home, result)
            for i, (home, result) in enumerate(zip(self._homes, results, strict=True))
        ]
        with waiting(WaitPoint("the end of a pipeline's step: what it has sent is to arrive")):
            for posted in self._sent:
                posted.wait()
        self._sent.clear()
        return out

    def _result(self, index: int, home: Stage, result: Tensor | None) -> Tensor:
        """An output of one stage, on the ranks of all stages."""
        if result is None:
            return self._taken(Message(None, index), self._teller(home, self.rank))
        self._post_sends(result.resolve_conj().contiguous(), self._receivers(home))
        return result

    def _ahead(self, peer: int) -> None:
        while self._coming[peer] and len(self._of[peer]) < AHEAD:
            self._post(peer)

    def _post(self, peer: int) -> None:
        message = self._coming[peer].popleft()
        tensor = self._room(message)
        self._posted[message] = _Posted((_begun(dist.irecv(tensor, peer)),), tensor)
        self._of[peer].append(message)

    def _room(self, message: Message) -> Tensor:
        """An empty tensor to receive a message in."""
        t = message.transfer
        value = self.plan.graph.outputs[message.micro] if t is None else t.value
        assert isinstance(value, Value)
        if t is None:
            shape = self.joined[message.micro]
            assert shape is not None
        else:
            shape = (t.layout if message.back else t.arriving).local_shape(value.shape)
        return torch.empty(shape, dtype=value.dtype, device=self.device)

    def _incoming(self, schedule: Schedule) -> dict[int, tuple[Message, ...]]:
        """The messages to this rank in a step, by sending rank, in the order of sending."""
        out: dict[int, list[Message]] = {}
        for group in range(schedule.groups):
            for message in sent_by(self.plan, schedule, group):
                t = message.transfer
                assert t is not None
                sender, receiver = (t.target, t.source) if message.back else (t.source, t.target)
                if receiver in self.mine and sender not in self.mine:
                    (peer,) = self.plan.peers(t, self.rank, message.back)
                    out.setdefault(peer, []).append(message)
        for i, home in enumerate(self._homes):
            if home is not None and self.rank not in home.ranks:
                out.setdefault(self._teller(home, self.rank), []).append(Message(None, i))
        return {peer: tuple(messages) for peer, messages in out.items()}


#: Groups of pairs whose ranks a library has connected.
_met: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


class BatchedStageLink(ProcessStageLink):
    """The link where a library queues operations on the device; arguments as of `ProcessStageLink`.

    Attributes:
        groups: by the ranks of a group, lowest first: the pairs, and the ranks at one position of their stages.
    """

    groups: dict[tuple[int, ...], dist.ProcessGroup]

    def connect(self) -> None:
        self._positions: dict[Schedule, tuple[tuple[Exchange, ...], ...]] = {}
        self._rest: Iterator[tuple[Exchange, ...]] = iter(())
        self._leaving: dict[Message, Tensor] = {}
        neighbours = pairs(self.plan)
        several = tuple(dict.fromkeys((*neighbours, *self._columns())))
        self.groups = dict(zip(several, groups_of_world(several)))
        for pair in neighbours:
            if self.rank in pair and self.groups[pair] not in _met:
                self._meet(pair)
                _met.add(self.groups[pair])

    def _columns(self) -> list[tuple[int, ...]]:
        """The ranks at each position of the stages; none where stages differ in size."""
        sizes = {stage.devices for stage in self.plan.stages}
        return [tuple(range(p, self.plan.devices, min(sizes))) for p in range(min(sizes))] if len(sizes) == 1 else []

    def _meet(self, pair: tuple[int, int]) -> None:
        """Have a pair exchange one element in each direction: the library connects the two."""
        (peer,) = set(pair) - {self.rank}
        x = torch.zeros(2, dtype=torch.uint8, device=self.device)
        with waiting(WaitPoint(f"the first exchange of ranks {pair[0]} and {pair[1]} of a pipeline", pair)):
            for work in self._issue(peer, [x[:1]], [x[1:]]):
                work.wait()

    def _issue(self, peer: int, sends: Iterable[Tensor], receives: Iterable[Tensor]) -> list[dist.Work]:
        """Issue a batch of sends to and receives from a rank."""
        group = self.groups[min(self.rank, peer), max(self.rank, peer)]
        return dist.batch_isend_irecv(
            [
                *(dist.P2POp(dist.isend, carried(x), peer, group) for x in sends),
                *(dist.P2POp(dist.irecv, carried(x), peer, group) for x in receives),
            ]
        )

    def begin(self, schedule: Schedule) -> None:
        if schedule not in self._positions:
            self._positions[schedule] = exchanges(self.plan, schedule, self.rank)
        self._settle()
        self._leaving.clear()
        self._rest = iter(self._positions[schedule])

    def _out(self, message: Message, tensor: Tensor) -> None:
        self._leaving[message] = tensor

    def exchange(self) -> None:
        for peer, sends, receives in next(self._rest):
            leaving = [self._leaving[message] for message in sends]
            rooms = [self._room(message) for message in receives]
            works = self._issue(peer, leaving, rooms)
            self._sent += [_Posted(works, tensor) for tensor in leaving]
            self._posted |= {message: _Posted(works, room) for message, room in zip(receives, rooms)}
        self._leaving.clear()

    def _taken(self, message: Message, peer: int) -> Tensor:
        posted = self._posted.pop(message)
        place = self._place(message, peer)
        with waiting(place), range_of(receive_text(place.what)):
            posted.wait()
        return posted.tensor

    def _result(self, index: int, home: Stage, result: Tensor | None) -> Tensor:
        result = self._room(Message(None, index)) if result is None else result.resolve_conj().contiguous()
        column = next((ranks for ranks in self._columns() if self.rank in ranks), None)
        group = None if column is None else self.groups[column]
        dist.broadcast(carried(result), self._teller(home, self.rank), group=group)
        return result


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None  # None: this rank is not in the group
    return work


# -- the program of a rank


class EarlierProgram(Protocol):
    """The program of a model that its next program replaces."""

    sharded: ShardedState | None


def process_pipeline(
    plan: PipelinePlan,
    holder: ModelAndLoss,
    runtime: Runtime,
    before: EarlierProgram | None,
    fusion: Fusion,
    accumulation: Accumulation,
    broadcast: bool,
    compiled: Compilation | None,
) -> PipelineProgram:
    """Set up a pipeline's plan on this rank. With the model's first program, parameters are created as slices.

    Args:
        plan: the plan.
        holder: has ``named_parameters`` and ``named_buffers`` under the graph's names.
        runtime: this process and its rank.
        before: the model's earlier program, if there is one.
        fusion, accumulation: the way gradients are summed.
        broadcast: True where parameters and buffers begin with the values of rank 0.
        compiled: the way ``torch.compile`` compiles the stages' programs, or None.
    """
    stages = plan.of_rank(runtime.rank)
    _make_even(runtime)
    sharded: ShardedState | None = None if before is None else before.sharded
    if sharded is None:
        sharded = _state(plan, stages, holder, runtime, broadcast)
    else:
        sharded.take_buffers(holder, runtime.device)
    parameters = dict(holder.named_parameters())
    bodies = {}
    for stage in stages:
        groups = sharded.groups
        lowered = lower(stage.plan, plan)
        seed = trace_random_numbers(lowered, runtime.device, groups.rank) if compiled else NO_SEED
        trained = [name for name, p in parameters.items() if name in lowered.parameters and p.requires_grad]
        schedule = stage.plan.scheduled(not groups.exchanges, fusion, trained, stage=True)
        outside = stage.plan.gathered_once
        body = RankExecutor(lowered, groups, schedule, compiled, stage=True, outside=outside)
        sums = StageSums(body.sums, body.types, groups, schedule, accumulation, body.scattered, body.followed)
        leaves = sharded.leaves(holder, sums, set(lowered.parameters))
        body.attach(parameters)
        mine = {n: parameters[n] for n in lowered.parameters}
        weights = StageWeights(body, sums, mine, _cut(stage, body), accumulation, groups.rank)
        counts = None if stage.counts is None else _counting(lower(stage.counts), sharded, runtime)
        bodies[stage.number] = StageBody(
            stage,
            partial(_compiled, seed.around(body), weights) if compiled else body,
            {n: leaves[n] for n in lowered.parameters},
            {n: sharded.buffers[n] for n in lowered.buffers},
            [stage.plan.graph.constants[n].to(runtime.device) for n in lowered.constants],
            lowered.updates,
            counts,
            weights,
            seed.device,
        )
    _make_even(runtime)
    link = link_of(plan, runtime.rank, runtime.device, _shapes(plan))
    _make_even(runtime)  # a rank may have more neighbours than another one of its stage
    return PipelineProgram(plan, bodies, link, sharded, runtime.device, _absent(plan, sharded))


def _compiled(body: Callable[..., list[Tensor]], weights: StageWeights, *local: Tensor) -> list[Tensor]:
    """A compiled program, which does not wait for gathers in front of it."""
    weights.arrive()
    return body(*local)


def _cut(stage: Stage, body: RankExecutor) -> frozenset[str]:
    """The gathered parameters whose gradients are scattered after every micro-batch."""
    moves = [i for i in stage.plan.program.instructions if isinstance(i, Redistribute)]
    return frozenset(
        i.source.value.name
        for i in moves
        if i.target.name in stage.plan.gathered_once and not stage.plan.once(i, back=True)
    ) & set(body.gathers)


def _make_even(runtime: Runtime) -> None:
    """Bring every rank to the same number of process groups.

    torch names a group after the number of groups so far; in torch 2.13 only one that its members alone make.
    Members from different stages that had made different numbers of groups would wait for one another under different
    names.
    """
    made = torch.tensor([number_of_groups()], device=runtime.device)
    dist.all_reduce(made, dist.ReduceOp.MAX)
    if dist.get_backend() != "mpi":
        for _ in range(int(made) - number_of_groups()):
            dist.new_group([runtime.rank], use_local_synchronization=True)  # a further one, so not `group_of_ranks`


def _state(
    plan: PipelinePlan, stages: tuple[Stage, ...], holder: ModelAndLoss, runtime: Runtime, broadcast: bool
) -> ShardedState:
    """The parameters of this rank's stages."""
    first, size = stages[0].first, stages[0].devices
    groups = ProcessGroups(size, runtime.rank - first, base=first)
    lying = {name: p for name, p in plan.parameters.items()}
    mine = {stage.number for stage in stages}

    def place(name: str, whole: Tensor) -> ParameterPlacement | None:
        p = lying.get(name)
        if p is None:  # no stage uses it
            return ParameterPlacement(Layout.replicated(size, whole.dim()), groups)
        return ParameterPlacement(p.storage, groups) if p.stage in mine else None

    sharded = ShardedState(place, holder, groups, runtime.device, broadcast)
    for name, parameter in holder.named_parameters():
        if name in lying:
            of_stage(parameter, lying[name].stage in mine and not groups.rank)
    set_empty_aside(holder.tables[0][1], list(sharded.absent.values()))
    return sharded


def _counting(lowered: Lowered, sharded: ShardedState, runtime: Runtime) -> Callable[..., list[Tensor]]:
    """The program that counts targets, as a function of the inputs that it reads."""
    constants = lowered.plan.graph.constants
    return partial(
        RankExecutor(lowered, sharded.groups),
        *(sharded.buffers[n] for n in lowered.buffers),
        *(constants[n].to(runtime.device) for n in lowered.constants),
    )


def _absent(plan: PipelinePlan, sharded: ShardedState) -> list[nn.Parameter]:
    """The parameters of other stages that a loss reaches. They get empty gradients, so that all ranks have
    equally many."""
    graph = plan.graph
    reached = {v.name for v in graph.outputs if isinstance(v, Value) and v.requires_grad}
    for op in reversed(graph.ops):
        if any(v is not None and v.name in reached and v.requires_grad for v in op.outputs):
            reached.update(v.name for v in op.inputs if v.requires_grad)
    return [
        p for name, p in sharded.absent.items() if name in graph.parameters and graph.parameters[name].name in reached
    ]


def _shapes(plan: PipelinePlan) -> list[tuple[int, ...] | None]:
    """The shape of each output of the model on a rank, once micro-batches are put together."""
    out: list[tuple[int, ...] | None] = [None] * len(plan.graph.outputs)
    for stage in plan.stages:
        for index, placed in zip(stage.results, stage.plan.program.outputs):
            how, dim = plan.micro.join(index)
            shape = list(placed.local_shape)
            if how == "cat":
                shape[dim] *= plan.micro_batches
            out[index] = tuple(shape)
    return out
