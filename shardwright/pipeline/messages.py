"""The messages of a pipeline's step: the order in which a group sends them, and the exchanges of a rank.

1. The order of sending (`sent_by`). Both ranks of a pair derive the order from the plan and the schedule, so no message
   needs a name.

2. Exchanges (`exchanges`), for libraries that run the operations of a rank in the order in which they are issued. All
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
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from .pipeline_plan import PipelinePlan, Transfer
from .schedules import Action, Schedule

__all__ = ["Exchange", "Message", "exchanges", "pairs", "sent_by"]


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
    own = [schedule.steps[a] for a in schedule.actions[schedule.placement[min(mine)]]]
    made: dict[int, list[Message]] = {}  # by time step
    for action, step in sorted(schedule.steps.items(), key=lambda item: (item[1], schedule.placement[item[0].stage])):
        made.setdefault(step, []).extend(_made_by(plan, action))
    out: list[list[Exchange]] = [[] for _ in range(len(own) + 2)]
    out[0] += _between(plan, rank, mine, [Message(t, -1) for t in _shared(plan)])
    for step, messages in sorted(made.items()):
        out[bisect_right(own, step)] += _between(plan, rank, mine, messages)
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
