"""The links of one rank to the stages of other ranks.

    Gloo, MPI       `ProcessStageLink`: every operation by itself, receives ahead
    NCCL, HCCL      `BatchedStageLink`: both directions of a pair of ranks in one batch

1. Gloo. Between two ranks messages in one direction arrive in the order in which they were sent. A receive is posted
   before it is needed: while one message is worked on, the next ones travel. Results come last, from the rank at the
   same position in the stage that has them: no rank waits for all others.

2. Libraries of accelerators. Operations are queued on the device. A receive that is queued in front of a send can keep
   it back, and the first operation of two ranks keeps back the host until both have come to it. So

    each pair of ranks     has one group, and meets once when the groups are made: all ranks walk the pairs in one order
    a position             issues what two ranks have for each other as one batch, after the action that precedes it;
                           the positions are those of `pipeline.messages.exchanges`
    waits                  are put before the first use of what was received, and at the end of the step
    results                are broadcast among the ranks at one position of their stages
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..graph import Value
from ..pipeline.messages import Exchange, Message, exchanges, pairs, sent_by
from ..pipeline.pipeline_plan import PipelinePlan, Stage, Transfer
from ..pipeline.schedules import Schedule
from .distributed.collectives import carried
from .distributed.watch.rank_positions import WaitPoint, waiting
from .profile_ranges import range_of, receive_text

__all__ = ["BatchedStageLink", "ProcessStageLink", "link_of"]

#: The number of receives from one rank that are posted at a time.
AHEAD = 2


class _Posted(NamedTuple):
    works: Sequence[dist.Work]
    tensor: Tensor

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def link_of(
    plan: PipelinePlan,
    rank: int,
    device: torch.device,
    joined: list[tuple[int, ...] | None],
    before: ProcessStageLink | None = None,
) -> ProcessStageLink:
    """The link of one rank; arguments as of `ProcessStageLink`. All ranks make theirs together.

    Args:
        before: the link of the model's earlier program, whose groups are used again.
    """
    kind = ProcessStageLink if dist.get_backend() in ("gloo", "mpi") else BatchedStageLink
    link = kind(plan, rank, device, joined)
    link.connect(before)
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

    def connect(self, before: ProcessStageLink | None) -> None:
        """Make the groups that the link needs, together with all other ranks."""

    def _receivers(self, home: Stage) -> tuple[int, ...]:
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


class BatchedStageLink(ProcessStageLink):
    """The link where a library queues operations on the device; arguments as of `ProcessStageLink`.

    Attributes:
        groups: by the ranks of a group, lowest first: the pairs, and the ranks at one position of their stages.
    """

    groups: dict[tuple[int, ...], dist.ProcessGroup]

    def connect(self, before: ProcessStageLink | None) -> None:
        self.groups = dict(before.groups) if isinstance(before, BatchedStageLink) else {}
        self._positions: dict[Schedule, tuple[tuple[Exchange, ...], ...]] = {}
        self._rest: Iterator[tuple[Exchange, ...]] = iter(())
        self._leaving: dict[Message, Tensor] = {}
        new = [pair for pair in pairs(self.plan) if pair not in self.groups]
        self._make(ranks for ranks in dict.fromkeys((*new, *self._columns())) if ranks not in self.groups)
        for pair in new:
            if self.rank in pair:
                self._meet(pair)

    def _make(self, made: Iterable[tuple[int, ...]]) -> None:
        for ranks in made:
            group = dist.new_group(list(ranks))
            assert group is not None
            self.groups[ranks] = group

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
