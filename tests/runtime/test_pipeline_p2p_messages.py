"""The line of a pipeline's exchanges: no rank waits for ever, on hardware that does one thing after the other.

The ranks of random pipelines are played: random schedules, placements, skips, shared parameters and sizes of stages. An
event is an action, which needs all ranks of its stage, or a batch, which needs the matching operations of its peer. A
rank begins its next event when the one before has ended.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from test_schedules import CHUNKS, fits

from shardwright.pipeline.pipeline_plan import PipelinePlan, Transfer
from shardwright.pipeline.schedules import Action, Schedule, check, forward_only, schedule
from shardwright.runtime.pipeline_p2p import Exchange, Message, exchanges, pairs, sent_by


class Source(NamedTuple):
    kind: str
    name: str
    index: int


class Sketch(SimpleNamespace):
    """The part of a `PipelinePlan` that is read here."""

    peers = PipelinePlan.peers

    def of_rank(self, rank: int) -> tuple[Any, ...]:
        return tuple(s for s in self.stages if rank in s.ranks)


def transfer(kind: str, name: str, source: int, target: int, gradient: bool) -> Transfer:
    return Transfer(kind, name, source, target, None, None, None, gradient)  # type: ignore[arg-type]


def drawn_schedule(rng: random.Random) -> Schedule:
    """One of the named schedules, or actions in an order of chance in which needs come first."""
    if rng.random() < 0.5:
        name, chunks = rng.choice(CHUNKS)
        groups = rng.randint(2, 5)
        micro = rng.choice([m for m in range(groups, 4 * groups + 1) if fits(name, groups, m)])
        made = schedule(name, groups, micro, chunks=chunks)
    else:
        groups, micro = rng.randint(2, 4), rng.randint(1, 5)
        placement = [*range(groups), *(rng.randrange(groups) for _ in range(rng.randint(0, 4)))]
        rng.shuffle(placement)
        split = {(s, k) for s in range(len(placement)) for k in range(micro) if rng.random() < 0.4}
        halves = lambda s, k: "IW" if (s, k) in split else "B"
        left = {Action(s, kind, k) for s in range(len(placement)) for k in range(micro) for kind in "F" + halves(s, k)}
        made = Schedule("chance", tuple(placement), micro, (tuple(left),))
        rows: list[list[Action]] = [[] for _ in range(groups)]
        done: set[Action] = set()
        while left:
            action = rng.choice(sorted(a for a in left if all(need in done for need in made.needs(a))))
            rows[placement[action.stage]].append(action)
            done.add(action)
            left.remove(action)
        made = Schedule("chance", tuple(placement), micro, tuple(map(tuple, rows)))
    check(made)
    return forward_only(made.placement, made.micro_batches) if rng.random() < 0.1 else made


def drawn(seed: int) -> Sketch:
    rng = random.Random(seed)
    made = drawn_schedule(rng)
    sizes = [rng.choice((1, 2, 4)) for _ in range(made.groups)]
    firsts = [sum(sizes[:g]) for g in range(made.groups)]
    count, transfers = made.stages, []
    for s in range(count - 1):
        transfers.append(transfer("value", f"v{s}", s, s + 1, rng.random() < 0.9))
        for target in range(s + 2, count):
            if rng.random() < 0.25:
                transfers.append(transfer("value", rng.choice((f"v{s}", f"w{s}")), s, target, rng.random() < 0.8))
    for n in range(rng.randint(0, 3)):
        owner, *users = sorted(rng.sample(range(count), rng.randint(2, count)))
        transfers += [transfer("parameter", f"p{n}", owner, user, rng.random() < 0.8) for user in users]
    transfers.sort(key=lambda t: t.source)
    stages = []
    for s, group in enumerate(made.placement):
        incoming = [Source("stage", t.name, t.source) for t in transfers if t.kind == "value" and t.target == s]
        rng.shuffle(incoming)
        sent = dict.fromkeys(t.name for t in transfers if t.kind == "value" and t.source == s)
        ranks = range(firsts[group], firsts[group] + sizes[group])
        stages.append(
            SimpleNamespace(
                number=s, first=firsts[group], devices=sizes[group], ranks=ranks, sources=incoming, sent=tuple(sent)
            )
        )
    return Sketch(transfers=tuple(transfers), stages=tuple(stages), schedule=made, devices=sum(sizes))


Event = Action | Exchange


def events_of(plan: Sketch, rank: int) -> list[Event]:
    """The actions and batches of a rank, in the order in which it issues them."""
    first, *later = exchanges(plan, plan.schedule, rank)
    actions = plan.schedule.actions[plan.schedule.placement[plan.of_rank(rank)[0].number]]
    out: list[Event] = list(first)
    for action, after in zip(actions, later[:-1], strict=True):
        out += [action, *after]
    return out + list(later[-1])


def played(plan: Sketch, each: list[list[Event]]) -> list[Event]:
    """Play all ranks, each its events one after the other.

    Returns:
        The events at which ranks stand for ever; empty: all have ended.
    """
    places = [0] * len(each)
    head = lambda rank: each[rank][places[rank]] if places[rank] < len(each[rank]) else None
    while True:
        moved = []
        for rank in range(len(each)):
            event = head(rank)
            if isinstance(event, Exchange):
                there = head(event.peer)
                if isinstance(there, Exchange) and there.peer == rank:  # as the two of a pair have the same batches
                    assert (event.sends, event.receives) == (there.receives, there.sends)
                    moved.append(rank)
            elif event is not None and all(head(r) == event for r in plan.stages[event.stage].ranks):
                moved.append(rank)
        if not moved:
            return [event for event in map(head, range(len(each))) if event is not None]
        for rank in moved:
            places[rank] += 1


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**40))
def test_every_rank_comes_to_its_end(seed: int) -> None:
    plan = drawn(seed)
    assert not played(plan, [events_of(plan, rank) for rank in range(plan.devices)])


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**40))
def test_a_message_is_made_before_it_leaves_and_there_before_its_use(seed: int) -> None:
    plan = drawn(seed)
    sent: Counter[tuple[int, int, Message]] = Counter()
    received: Counter[tuple[int, int, Message]] = Counter()
    for rank in range(plan.devices):
        mine = {s.number for s in plan.of_rank(rank)}
        done: set[Action] = set()
        here: set[Message] = set()
        for event in events_of(plan, rank):
            if isinstance(event, Exchange):
                assert event.sends or event.receives
                for message in event.sends:
                    assert message.micro < 0 or done & set(producers(message))
                sent.update((rank, event.peer, m) for m in event.sends)
                received.update((event.peer, rank, m) for m in event.receives)
                here |= set(event.receives)
            else:
                assert all(m in here for m in read_by(plan, event) if other_side(m) not in mine), event
                done.add(event)
    assert sent == received
    assert set(sent.values()) <= {1}
    for stage in plan.stages:
        group = plan.schedule.placement[stage.number]
        across = {m for m in sent_by(plan, plan.schedule, group) if plan.stages[receiver(m)].first != stage.first}
        assert {m for rank, _, m in sent if rank in stage.ranks} == across


def producers(message: Message) -> list[Action]:
    t = message.transfer
    kinds = "BI" if message.back else "F"
    return [Action(t.target if message.back else t.source, kind, message.micro) for kind in kinds]


def other_side(message: Message) -> int:
    """The stage that sends a message."""
    return message.transfer.target if message.back else message.transfer.source


def receiver(message: Message) -> int:
    return message.transfer.source if message.back else message.transfer.target


def read_by(plan: Sketch, action: Action) -> list[Message]:
    """The messages that an action uses."""
    stage, kind, micro = action
    backward = plan.schedule.name != "forward"
    if kind == "F":
        values = [Message(t, micro) for t in plan.transfers if t.kind == "value" and t.target == stage]
        return values + [Message(t, -1) for t in plan.transfers if t.kind == "parameter" and t.target == stage]
    if kind == "W" or not backward:
        return []
    return [Message(t, micro, True) for t in plan.transfers if t.kind == "value" and t.source == stage and t.gradient]


# -- the play finds what hangs -----------------------------------------------------------------------------------------


def ahead(events: list[Event]) -> list[Event]:
    """Two receives from each rank are posted before anything else."""
    out: list[Event] = []
    early: dict[int, list[Message]] = {}
    for event in events:
        if isinstance(event, Exchange):
            mine = early.setdefault(event.peer, [])
            mine += event.receives[: max(0, 2 - len(mine))]
            event = event._replace(receives=tuple(m for m in event.receives if m not in mine))
        out.append(event)
    return [*(Exchange(peer, (), tuple(m)) for peer, m in early.items() if m), *out]


def descending(events: list[Event]) -> list[Event]:
    """Swap two batches that follow each other: the one with the higher rank first."""
    out: list[Event] = []
    for event in events:
        if out and isinstance(event, Exchange) and isinstance(out[-1], Exchange) and event.peer > out[-1].peer:
            out.insert(-1, event)
        else:
            out.append(event)
    return out


@pytest.mark.parametrize("wrong", [ahead, descending])
def test_another_order_hangs(wrong: Callable[[list[Event]], list[Event]]) -> None:
    def hangs(seed: int) -> bool:
        plan = drawn(seed)
        each = [events_of(plan, rank) for rank in range(plan.devices)]
        each[0] = wrong(each[0])
        try:
            return bool(played(plan, each))
        except AssertionError:  # unlike batches of a pair
            return True

    assert sum(map(hangs, range(40))) >= (30 if wrong is ahead else 1)


def test_the_example_of_the_module() -> None:
    made = schedule("1f1b", 2, 3)
    forth = transfer("value", "v", 0, 1, True)
    stages = [
        SimpleNamespace(number=0, first=0, devices=1, ranks=range(1), sources=(), sent=("v",)),
        SimpleNamespace(number=1, first=1, devices=1, ranks=range(1, 2), sources=(Source("stage", "v", 0),), sent=()),
    ]
    plan = Sketch(transfers=(forth,), stages=stages, schedule=made, devices=2)
    assert pairs(plan) == [(0, 1)]
    f, b = (lambda k: Message(forth, k)), (lambda k: Message(forth, k, True))
    text = [str(a) if isinstance(a, Action) else (a.sends, a.receives) for a in events_of(plan, 0)]
    assert text == [
        "0F0", ((f(0),), ()), "0F1", ((f(1),), ()), ((), (b(0),)), "0B0", "0F2", ((f(2),), (b(1),)), "0B1",
        ((), (b(2),)), "0B2",
    ]  # fmt: skip
