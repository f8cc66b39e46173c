"""How ranks of different stages write to one another.

    order       between two ranks messages in one direction come in the order in which they were sent, which both read off
                the plan and the schedule: no message needs a name
    groups      each direction between two ranks has a group of its own where a library serialises what one group does
    ahead       a receive is posted before it is needed: while a message is worked on, the next ones travel
    results     come last, from the rank at one's own position in the stage that has them: nobody waits for all others.
                Where a library serialises, they are broadcast among the ranks of one position
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..graph import Value
from ..plan.pipelined import PipelinePlan, Stage, Transfer
from ..schedules import Schedule
from .position import Place, waiting

__all__ = ["Ranks"]

#: How many receives from one rank are posted at a time.
AHEAD = 2


class _Message(NamedTuple):
    """`transfer` None: an output of the model, whose index `micro` is."""

    transfer: Transfer | None
    micro: int
    back: bool = False


class _Posted(NamedTuple):
    work: dist.Work
    tensor: Tensor


class Ranks:
    """The link of one rank.

    Args:
        rank: in the world.
        joined: by output of the model, the shape in which this rank has it once micro-batches are put together.
    """

    def __init__(self, plan: PipelinePlan, rank: int, device: torch.device, joined: list[tuple[int, ...] | None]) -> None:
        self.plan, self.rank, self.device, self.joined = plan, rank, device, joined
        self.mine = {stage.number for stage in plan.of_rank(rank)}
        self._inside: dict[_Message, Tensor] = {}                    # from stage to stage on this rank
        self._sent: list[_Posted] = []
        self._coming: dict[int, deque[_Message]] = {}                # by rank, what it sends and is not posted yet
        self._posted: dict[_Message, _Posted] = {}
        self._of: dict[int, deque[_Message]] = {}                    # by rank, what is posted and not taken yet
        self._expected: dict[Schedule, dict[int, tuple[_Message, ...]]] = {}
        self._homes = [next((s for s in plan.stages if i in s.results), None) if isinstance(v, Value) else None
                       for i, v in enumerate(plan.graph.outputs)]
        self._serialises = dist.get_backend() not in ("gloo", "mpi")
        self._groups = self._directions()
        self._column = self._make_column() if self._serialises else None

    def _directions(self) -> dict[tuple[int, int], dist.ProcessGroup | None]:
        """By (sender, receiver) the group of the two: all ranks make all of them, in one order."""
        if not self._serialises:
            return {}
        pairs = {(rank, peer) for t in self.plan.transfers for back in (False, True)
                 for rank in self.plan.stages[t.target if back else t.source].ranks
                 for peer in self.plan.peers(t, rank, back) if rank != peer}
        return {pair: dist.new_group(list(pair)) for pair in sorted(pairs)}

    def _make_column(self) -> dist.ProcessGroup | None:
        """The ranks at this one's position in their stages; None: all, where stages are of unlike sizes."""
        sizes = {stage.devices for stage in self.plan.stages}
        if len(sizes) > 1:
            return None
        size, = sizes
        made = [dist.new_group(list(range(p, self.plan.devices, size))) for p in range(size)]
        return made[self.rank % size]

    def _told(self, home: Stage) -> tuple[int, ...]:
        """The ranks that this one, which has an output of a stage, tells it."""
        others = [r for r in range(self.plan.devices) if r not in home.ranks]
        return tuple(r for r in others if self._teller(home, r) == self.rank)

    def _teller(self, home: Stage, rank: int) -> int:
        """The rank of a stage that tells another one an output of it."""
        alike = len({stage.devices for stage in self.plan.stages}) == 1
        return home.first + rank % home.devices if alike else home.first

    # -- a step --

    def begin(self, schedule: Schedule) -> None:
        if schedule not in self._expected:
            self._expected[schedule] = self._incoming(schedule)
        for posted in self._posted.values():  # since a step that ended in an error
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
        peer, = self.plan.peers(transfer, self.rank, back)
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

    def _place(self, message: _Message, peer: int) -> Place:
        t, micro = message.transfer, f", micro-batch {message.micro}," if message.micro >= 0 else ""
        if t is None:
            return Place(f"output {message.micro} of the model, from rank {peer}", (peer, self.rank))
        what = f"the {'gradient of ' if message.back else ''}{t.kind} {t.name!r}{micro} of stage {t.source} for stage {t.target}"
        return Place(what, (peer, self.rank))

    def finish(self, results: list[Tensor | None]) -> list[Tensor | None]:
        tells = self._broadcast if self._serialises else self._told_or_heard
        out = [None if home is None else tells(i, home, result)
               for i, (home, result) in enumerate(zip(self._homes, results, strict=True))]
        with waiting(Place("the end of a pipeline's step: what it has sent is to arrive")):
            for posted in self._sent:
                posted.work.wait()
        self._sent.clear()
        return out

    def _told_or_heard(self, index: int, home: Stage, result: Tensor | None) -> Tensor:
        """An output of one stage on the ranks of all."""
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
        """What a message is received in."""
        t = message.transfer
        value = self.plan.graph.outputs[message.micro] if t is None else t.value
        shape = self.joined[message.micro] if t is None else \
            (t.layout if message.back else t.arriving).local_shape(t.value.shape)
        return torch.empty(shape, dtype=value.dtype, device=self.device)

    # -- what comes --

    def _incoming(self, schedule: Schedule) -> dict[int, tuple[_Message, ...]]:
        """By rank, what it sends this one in a step, in its order."""
        out: dict[int, list[_Message]] = {}
        for group in range(schedule.groups):
            for message in self._of_group(schedule, group):
                t = message.transfer
                there, here = (t.target, t.source) if message.back else (t.source, t.target)
                if here in self.mine and there not in self.mine:
                    peer, = self.plan.peers(t, self.rank, message.back)
                    out.setdefault(peer, []).append(message)
        if not self._serialises:
            for i, home in enumerate(self._homes):
                if home is not None and self.rank not in home.ranks:
                    out.setdefault(self._teller(home, self.rank), []).append(_Message(None, i))
        return {peer: tuple(messages) for peer, messages in out.items()}

    def _of_group(self, schedule: Schedule, group: int) -> Iterator[_Message]:
        """What a group of devices sends, in order: as `pipeline.PipelineProgram` does."""
        plan = self.plan
        shared = [t for t in plan.transfers if t.kind == "parameter"]
        on = lambda stage: plan.schedule.placement[stage] == group  # noqa: E731
        yield from (_Message(t, -1, False) for t in shared if on(t.source))
        for stage, kind, micro in schedule.actions[group]:
            if kind == "F":
                for name in plan.stages[stage].sent:
                    yield from (_Message(t, micro, False) for t in plan.transfers
                                if (t.kind, t.name, t.source) == ("value", name, stage))
            elif kind in "BI":
                for source in plan.stages[stage].sources:
                    yield from (_Message(t, micro, True) for t in plan.transfers
                                if (t.kind, t.name, t.source, t.target) == ("value", source.name, source.index, stage)
                                and source.kind == "stage" and t.gradient)
        if schedule.name != "forward":
            yield from (_Message(t, -1, True) for t in shared if t.gradient and on(t.target))
