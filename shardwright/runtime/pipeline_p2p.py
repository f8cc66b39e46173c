"""A pipeline on processes: each rank has the stages of its group of devices, and nothing of the others.

`process_pipeline` builds the program of one rank; `pipeline_step.PipelineProgram` plays it. `ProcessStageLink`
carries the messages between ranks of different stages:

1. Order: between two ranks messages in one direction arrive in the order in which they were sent. Both ranks derive
   this order from the plan and the schedule, so no message needs a name.
2. Groups: each direction between two ranks has a group of its own where a library serialises the operations of one
   group.
3. Receives ahead: a receive is posted before it is needed; while one message is worked on, the next ones travel.
4. Results come last, from the rank at the same position in the stage that has them: no rank waits for all others.
   Where a library serialises, results are broadcast among the ranks of one position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..graph import Value
from ..layout import Layout
from ..pipeline.pipeline_plan import PipelinePlan, Stage, Transfer
from ..pipeline.schedules import Schedule
from ..process import Runtime
from ..redistribution import digits_value
from ..torch_private import number_of_groups
from .distributed.buckets import GradientSums
from .distributed.collectives import ProcessGroups
from .distributed.gradient_fusion import Accumulation, Fusion
from .distributed.gradients import of_stage
from .distributed.parameters import ParameterPlacement, ShardedState
from .distributed.rank_executor import RankExecutor
from .distributed.watchdog import WaitPoint, waiting
from .lower import Lowered, lower
from .optimizer_guard import set_empty_aside
from .pipeline_step import PipelineProgram, StageBody

__all__ = ["ProcessStageLink", "process_pipeline"]


#: The number of receives from one rank that are posted at a time.
AHEAD = 2


class _Message(NamedTuple):
    """A message between stages; `transfer` None: an output of the model, and `micro` is its index."""

    transfer: Transfer | None
    micro: int
    back: bool = False


class _Posted(NamedTuple):
    work: dist.Work
    tensor: Tensor


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
        self._inside: dict[_Message, Tensor] = {}  # between stages on this rank
        self._sent: list[_Posted] = []
        self._coming: dict[int, deque[_Message]] = {}  # by sending rank, messages whose receives are not posted yet
        self._posted: dict[_Message, _Posted] = {}
        self._of: dict[int, deque[_Message]] = {}  # by sending rank, receives posted and not taken yet
        self._expected: dict[Schedule, dict[int, tuple[_Message, ...]]] = {}
        self._homes = [
            next((s for s in plan.stages if i in s.results), None) if isinstance(v, Value) else None
            for i, v in enumerate(plan.graph.outputs)
        ]
        self._serialises = dist.get_backend() not in ("gloo", "mpi")
        self._groups = self._directions()
        self._column = self._make_column() if self._serialises else None

    def _directions(self) -> dict[tuple[int, int], dist.ProcessGroup | None]:
        """The group of each pair (sender, receiver). All ranks make all groups, in one order."""
        if not self._serialises:
            return {}
        pairs = {
            (rank, peer)
            for t in self.plan.transfers
            for back in (False, True)
            for rank in self.plan.stages[t.target if back else t.source].ranks
            for peer in self.plan.peers(t, rank, back)
            if rank != peer
        }
        return {pair: dist.new_group(list(pair)) for pair in sorted(pairs)}

    def _make_column(self) -> dist.ProcessGroup | None:
        """The ranks at this rank's position in their stages; None (all ranks) where stages differ in size."""
        sizes = {stage.devices for stage in self.plan.stages}
        if len(sizes) > 1:
            return None
        (size,) = sizes
        made = [dist.new_group(list(range(p, self.plan.devices, size))) for p in range(size)]
        return made[self.rank % size]

    def _told(self, home: Stage) -> tuple[int, ...]:
        """The ranks to which this rank, of stage `home`, sends an output of the stage."""
        others = [r for r in range(self.plan.devices) if r not in home.ranks]
        return tuple(r for r in others if self._teller(home, r) == self.rank)

    def _teller(self, home: Stage, rank: int) -> int:
        """The rank of stage `home` that sends the stage's outputs to `rank`."""
        alike = len({stage.devices for stage in self.plan.stages}) == 1
        return home.first + rank % home.devices if alike else home.first

    # -- a step --

    def begin(self, schedule: Schedule) -> None:
        if schedule not in self._expected:
            self._expected[schedule] = self._incoming(schedule)
        for posted in self._posted.values():  # left by a step that ended in an error
            posted.work.wait()
        self._posted.clear()
        self._inside.clear()
        self._coming = {peer: deque(messages) for peer, messages in self._expected[schedule].items()}
        self._of = {peer: deque() for peer in self._coming}
        for peer in self._coming:
            self._ahead(peer)

    def send(self, transfer: Transfer, micro: int, back: bool, tensor: Tensor) -> None:
        message = _Message(transfer, micro, back)
        if transfer.source in self.mine and transfer.target in self.mine:
            self._inside[message] = tensor
            return
        self._sent = [posted for posted in self._sent if not posted.work.is_completed()]
        self._post_sends(tensor, self.plan.peers(transfer, self.rank, back))

    def _post_sends(self, tensor: Tensor, peers: Iterable[int]) -> None:
        tensor = tensor.contiguous()
        for peer in peers:
            work = dist.isend(tensor, peer, group=self._groups.get((self.rank, peer)))
            self._sent.append(_Posted(work, tensor))

    def receive(self, transfer: Transfer, micro: int, back: bool) -> Tensor:
        message = _Message(transfer, micro, back)
        if transfer.source in self.mine and transfer.target in self.mine:
            return self._inside.pop(message)
        (peer,) = self.plan.peers(transfer, self.rank, back)
        return self._taken(message, peer)

    def _taken(self, message: _Message, peer: int) -> Tensor:
        """A message from another rank."""
        while message not in self._posted:
            self._post(peer)
        posted = self._posted.pop(message)
        with waiting(self._place(message, peer)):
            posted.work.wait()
        self._of[peer].remove(message)
        self._ahead(peer)
        return posted.tensor

    def _place(self, message: _Message, peer: int) -> WaitPoint:
        t, micro = message.transfer, f", micro-batch {message.micro}," if message.micro >= 0 else ""
        if t is None:
            return WaitPoint(f"output {message.micro} of the model, from rank {peer}", (peer, self.rank))
        what = (
            f"the {'gradient of ' if message.back else ''}{t.kind} {t.name!r}{micro} "
            f"of stage {t.source} for stage {t.target}"
        )
        return WaitPoint(what, (peer, self.rank))

    def finish(self, results: list[Tensor | None]) -> list[Tensor | None]:
        tells = self._broadcast if self._serialises else self._told_or_heard
        out = [
            None if home is None else tells(i, home, result)
            for i, (home, result) in enumerate(zip(self._homes, results, strict=True))
        ]
        with waiting(WaitPoint("the end of a pipeline's step: what it has sent is to arrive")):
            for posted in self._sent:
                posted.work.wait()
        self._sent.clear()
        return out

    def _told_or_heard(self, index: int, home: Stage, result: Tensor | None) -> Tensor:
        """An output of one stage, on the ranks of all stages."""
        if result is None:
            return self._taken(_Message(None, index), self._teller(home, self.rank))
        self._post_sends(result, self._told(home))
        return result

    def _broadcast(self, index: int, home: Stage, result: Tensor | None) -> Tensor:
        if result is None:
            result = self._room(_Message(None, index))
        result = result.contiguous()
        dist.broadcast(result, self._teller(home, self.rank), group=self._column)
        return result

    def _ahead(self, peer: int) -> None:
        while self._coming[peer] and len(self._of[peer]) < AHEAD:
            self._post(peer)

    def _post(self, peer: int) -> None:
        message = self._coming[peer].popleft()
        tensor = self._room(message)
        work = dist.irecv(tensor, peer, group=self._groups.get((peer, self.rank)))
        self._posted[message] = _Posted(work, tensor)
        self._of[peer].append(message)

    def _room(self, message: _Message) -> Tensor:
        """An empty tensor to receive a message in."""
        t = message.transfer
        value = self.plan.graph.outputs[message.micro] if t is None else t.value
        shape = (
            self.joined[message.micro]
            if t is None
            else (t.layout if message.back else t.arriving).local_shape(t.value.shape)
        )
        return torch.empty(shape, dtype=value.dtype, device=self.device)

    # -- the order of messages --

    def _incoming(self, schedule: Schedule) -> dict[int, tuple[_Message, ...]]:
        """The messages to this rank in a step, by sending rank, in the order of sending."""
        out: dict[int, list[_Message]] = {}
        for group in range(schedule.groups):
            for message in self._of_group(schedule, group):
                t = message.transfer
                assert t is not None
                there, here = (t.target, t.source) if message.back else (t.source, t.target)
                if here in self.mine and there not in self.mine:
                    (peer,) = self.plan.peers(t, self.rank, message.back)
                    out.setdefault(peer, []).append(message)
        if not self._serialises:
            for i, home in enumerate(self._homes):
                if home is not None and self.rank not in home.ranks:
                    out.setdefault(self._teller(home, self.rank), []).append(_Message(None, i))
        return {peer: tuple(messages) for peer, messages in out.items()}

    def _of_group(self, schedule: Schedule, group: int) -> Iterator[_Message]:
        """The messages that a group of devices sends, in the order in which `PipelineStep` sends them."""
        plan = self.plan
        shared = [t for t in plan.transfers if t.kind == "parameter"]
        on = lambda stage: plan.schedule.placement[stage] == group
        yield from (_Message(t, -1, False) for t in shared if on(t.source))
        for stage, kind, micro in schedule.actions[group]:
            if kind == "F":
                for name in plan.stages[stage].sent:
                    yield from (
                        _Message(t, micro, False)
                        for t in plan.transfers
                        if (t.kind, t.name, t.source) == ("value", name, stage)
                    )
            elif kind in "BI":
                for source in plan.stages[stage].sources:
                    yield from (
                        _Message(t, micro, True)
                        for t in plan.transfers
                        if (t.kind, t.name, t.source, t.target) == ("value", source.name, source.index, stage)
                        and source.kind == "stage"
                        and t.gradient
                    )
        if schedule.name != "forward":
            yield from (_Message(t, -1, True) for t in shared if t.gradient and on(t.target))


def process_pipeline(
    plan: PipelinePlan,
    holder: nn.Module,
    runtime: Runtime,
    before: Any,
    fusion: Fusion,
    accumulation: Accumulation,
    broadcast: bool,
    compiled: str | None,
) -> PipelineProgram:
    """Set up a pipeline's plan on this rank. With the model's first program, parameters are created as slices.

    Args:
        plan: the plan.
        holder: has ``named_parameters`` and ``named_buffers`` under the graph's names.
        runtime: this process and its rank.
        before: the model's earlier program, if there is one.
        fusion, accumulation: the way gradients are summed.
        broadcast: True where parameters and buffers begin with the values of rank 0.
        compiled: the backend by which ``torch.compile`` compiles the stages' programs, or None.
    """
    stages = plan.of_rank(runtime.rank)
    _make_even(runtime)
    held: ShardedState | None = None if before is None else before.held
    if held is None:
        held = _state(plan, stages, holder, runtime, broadcast)
    else:
        held.take_buffers(holder, runtime.device)
    parameters = dict(holder.named_parameters())
    bodies = {}
    for stage in stages:
        groups = held.groups
        lowered = lower(stage.plan)
        body = RankExecutor(lowered, groups, compiled, scatters=True, outside=stage.plan.gathered_once)
        sums = GradientSums(body.sums, body.types, groups, fusion, accumulation, followed=body.followed)
        leaves = held.leaves(holder, sums, set(lowered.parameters))
        body.attach(parameters)
        counts = None if stage.counts is None else _counting(lower(stage.counts), held, runtime)
        bodies[stage.number] = StageBody(
            stage,
            body,
            {n: leaves[n] for n in lowered.parameters},
            {n: held.buffers[n] for n in lowered.buffers},
            [stage.plan.graph.constants[n].to(runtime.device) for n in lowered.constants],
            lowered.updates,
            counts,
            partial(_added, body, groups.rank),
            body.gathers,
        )
    _make_even(runtime)
    link = ProcessStageLink(plan, runtime.rank, runtime.device, _shapes(plan))
    return PipelineProgram(plan, bodies, link, held, runtime.device, _absent(plan, held))


def _make_even(runtime: Runtime) -> None:
    """Bring every rank to the same number of process groups.

    torch names a group that its members alone make after the number of groups so far. Members from different stages
    that had made different numbers of groups would wait for one another under different names.
    """
    made = torch.tensor([number_of_groups()], device=runtime.device)
    dist.all_reduce(made, dist.ReduceOp.MAX)
    if dist.get_backend() != "mpi":
        for _ in range(int(made) - number_of_groups()):
            dist.new_group([runtime.rank], use_local_synchronization=True)


def _state(
    plan: PipelinePlan, stages: tuple[Stage, ...], holder: nn.Module, runtime: Runtime, broadcast: bool
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

    held = ShardedState(place, holder, groups, runtime.device, broadcast)
    for name, parameter in holder.named_parameters():
        if name in lying:
            of_stage(parameter, lying[name].stage in mine and not groups.rank)
    set_empty_aside(holder.tables[0][1], list(held.absent.values()))
    return held


def _counting(lowered: Lowered, held: ShardedState, runtime: Runtime) -> Callable[..., list[Tensor]]:
    """The program that counts targets, as a function of the inputs that it reads."""
    constants = lowered.plan.graph.constants
    return partial(
        RankExecutor(lowered, held.groups),
        *(held.buffers[n] for n in lowered.buffers),
        *(constants[n].to(runtime.device) for n in lowered.constants),
    )


def _absent(plan: PipelinePlan, held: ShardedState) -> list[nn.Parameter]:
    """The parameters of other stages that a loss reaches. They get empty gradients, so that all ranks have
    equally many."""
    graph = plan.graph
    reached = {v.name for v in graph.outputs if isinstance(v, Value) and v.requires_grad}
    for op in reversed(graph.ops):
        if any(v is not None and v.name in reached and v.requires_grad for v in op.outputs):
            reached.update(v.name for v in op.inputs if v.requires_grad)
    return [p for name, p in held.absent.items() if name in graph.parameters and graph.parameters[name].name in reached]


def _shapes(plan: PipelinePlan) -> list[tuple[int, ...] | None]:
    """The shape of each output of the model on a rank, once micro-batches are put together."""
    out: list[tuple[int, ...] | None] = [None] * len(plan.graph.outputs)
    for stage in plan.stages:
        for index, instance in zip(stage.results, stage.plan.program.outputs):
            how, dim = plan.micro.join(index)
            shape = list(instance.local_shape)
            if how == "cat":
                shape[dim] *= plan.micro_batches
            out[index] = tuple(shape)
    return out


def _added(body: RankExecutor, rank: int, name: str, gradient: Tensor | None, part: Tensor) -> Tensor | None:
    """The sum of a leaf's gradient and a later stage's part. The part is complete; where ranks' terms of the leaf are
    still to be summed, only the first rank adds it."""
    if digits_value(body.sums.get(name, ()), rank):
        return gradient
    return part if gradient is None else gradient + part
