"""The schedule of communication as a value: where each collective is issued, where it is waited for, and the memory of
what is under way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpt import GPT, mark
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import shardwright as sw
from shardwright.cost.communication_schedule import (
    HOSTS,
    LIBRARY,
    CommunicationSchedule,
    Due,
    Fusion,
    ScheduledMessage,
    block_of,
    own_redistribution,
)
from shardwright.cost.cost_model import CostModel, StreamSpan
from shardwright.partition.local_program import LocalOp, Redistribute, SearchResult, made_by, reads
from shardwright.partition.rematerialization import hands_on

LAYERS, DEVICES = 4, 8
LEVELS = ("level1", "level2", "level3")
PLANS = ("data_parallel", "dp2 x tp4", *LEVELS, "level1 recompute", "level3 recompute", "dp2 x tp4 level3")
PLANS = (*PLANS, "level1 halves", "level3 halves")  # in parts over two neighbours, summed over the four pairs


class TokenLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = sw.Operator(F.cross_entropy)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.cross_entropy(logits.flatten(0, 1), target.flatten())


@cache
def planned(kind: str) -> sw.Plan:
    with torch.device("meta"):
        net, loss = GPT(vocabulary=32, length=8, layers=LAYERS, width=32, heads=8), TokenLoss()
        tokens = torch.empty(16, 8, dtype=torch.int64)
    if "recompute" in kind:
        for block in net.blocks:
            sw.recompute(block)
    if "tp4" in kind:
        mark(net, loss, 2, 4)
    level = next((word for word in kind.split() if word in LEVELS), None)
    return sw.plan(
        net,
        (tokens,),
        loss,
        tokens,
        devices=DEVICES,
        parallel_mode="semi_auto" if "tp4" in kind else "data_parallel",
        hsdp=None
        if level is None
        else {"threshold": 0, "optimizer_level": level, "shard_size": 2 if "halves" in kind else -1},
    )


def sent_by(plan: sw.Plan) -> Iterator[tuple[int, int]]:
    """(place, moment) of each redistribution that communicates."""
    program, places = plan.program, {id(i): k for k, i in enumerate(plan.program.instructions)}
    steps = [*((k, i, False) for k, i in enumerate(program.instructions))]
    steps += [(len(program.instructions) + q, entry, True) for q, entry in enumerate(plan.backward)]
    for moment, entry, back in steps:
        instruction, moved = own_redistribution(entry, back)
        if moved is not None and moved.collectives:
            yield places[id(instruction)], moment


def members_of(plan: sw.Plan) -> list[tuple[int, int]]:
    """(place, moment) of the members of all messages, but for the second half of a scatter."""
    messages = [message for message in plan.schedule.messages if message.role != "follow"]
    return sorted((m.place, m.moment) for message in messages for m in message.members)


@pytest.mark.parametrize("kind", PLANS)
def test_each_collective_of_the_step_is_issued_once_and_waited_for_once(kind: str) -> None:
    plan = planned(kind)
    schedule = plan.schedule
    assert members_of(plan) == sorted(sent_by(plan))
    issued, waited = Counter[int](), Counter[int]()
    for _, action, number in schedule.order:
        (issued if action == "issue" else waited)[number] += 1
        assert issued[number] >= waited[number]
    assert set(issued.values()) == set(waited.values()) == {1}
    assert len(issued) == len(waited) == len(schedule.messages)
    assert [m.issue for m in schedule.messages] == sorted(m.issue for m in schedule.messages)


@pytest.mark.parametrize("kind", [kind for kind in PLANS if "level" in kind])
def test_the_weights_of_a_block_are_one_message_one_block_ahead(kind: str) -> None:
    plan = planned(kind)
    for again in (False, True):
        gathers = [message for _, message in plan.schedule.of("gather", repeats_forward=again)]
        keys = [(block_of(message.members[0].name), message.digits) for message in gathers]
        assert len(keys) == len(set(keys))  # one a block and set of ranks
        assert all(len({block_of(m.name) for m in message.members}) == 1 for message in gathers)
        first: dict[str, int] = {}  # block -> where it begins to use weights
        for message in gathers:
            block = block_of(message.members[0].name)
            first[block] = min(first.get(block, message.wait), message.wait)
        blocks = sorted(first, key=first.__getitem__)
        for before, block in zip(blocks, blocks[1:]):
            mine = [m for m in gathers if block_of(m.members[0].name) == block]
            assert all(message.issue == first[before] for message in mine), block
        assert len(gathers) >= LAYERS or (again and "level3" not in kind)


@pytest.mark.parametrize("kind", [kind for kind in PLANS if "level" in kind])
def test_a_block_has_one_scatter_for_each_set_of_ranks(kind: str) -> None:
    plan = replace(planned(kind), comm_memory=1e9)
    scatters = [message for _, message in plan.schedule.of("scatter")]
    keys = [(block_of(message.members[0].name), message.digits) for message in scatters]
    assert len(keys) == len(set(keys)) and len(scatters) >= LAYERS
    assert all(message.issue == message.members[-1].moment for message in scatters)
    if "halves" not in kind:
        assert all(message.wait == plan.schedule.end for message in scatters)
        return
    # A scatter is waited for as the next one is issued; there the sum over further replicas begins, until the end.
    issues = [message.issue for message in scatters]
    assert [message.wait for message in scatters] == [*issues[1:], plan.schedule.end]
    follows = {message.members: message for _, message in plan.schedule.of("follow")}
    assert len(follows) == len(scatters)
    for message in scatters:
        follow = follows[message.members]
        assert (follow.issue, follow.wait) == (message.wait, plan.schedule.end)
        assert (follow.kind, 2 * follow.bytes) == ("all_reduce", message.bytes)


@pytest.mark.parametrize("kind", ["data_parallel", "dp2 x tp4"])
def test_sums_are_waited_for_at_the_end(kind: str) -> None:
    schedule = planned(kind).schedule
    sums = [message for _, message in schedule.of("sum")]
    assert sums and all(message.wait == schedule.end for message in sums)
    assert all(message.issue >= max(m.moment for m in message.members) for message in sums)


# -- nothing waits in front of independent work ------------------------------------------------------------------------


def forward_needs(plan: sw.Plan) -> list[set[int]]:
    """By place: the places on which an instruction depends, itself included."""
    born = {o.name: k for k, i in enumerate(plan.program.instructions) for o in made_by(i)}
    out: list[set[int]] = []
    for k, instruction in enumerate(plan.program.instructions):
        mine = {k}
        for name in reads(instruction):
            if name in born:
                mine |= out[born[name]]
        out.append(mine)
    return out


def computes(instruction: Any) -> bool:
    return isinstance(instruction, LocalOp) and not hands_on(instruction.target)


@pytest.mark.parametrize("kind", PLANS)
def test_no_wait_of_the_forward_stands_in_front_of_independent_work(kind: str) -> None:
    plan = planned(kind)
    needs, instructions = forward_needs(plan), plan.program.instructions
    waits = [
        m for m in plan.schedule.messages if m.wait < plan.schedule.forward and m.role in ("gather", "redistribution")
    ]
    assert waits
    for message in waits:
        following = next((k for k in range(message.wait, len(instructions)) if computes(instructions[k])), None)
        if following is not None:
            assert any(member.place in needs[following] for member in message.members), message


@pytest.mark.parametrize("kind", [kind for kind in PLANS if "level3" in kind])
def test_no_gather_of_the_backward_waits_in_front_of_independent_work(kind: str) -> None:
    """The wait is followed by the backward of an operator that reads the weight, or its recomputation."""
    plan = planned(kind)
    instructions, forward = plan.program.instructions, plan.schedule.forward
    needs = forward_needs(plan)
    gathers = [message for _, message in plan.schedule.of("gather", repeats_forward=True)]
    assert gathers
    for message in gathers:
        entries = plan.backward[message.wait - forward :]
        following = next(own_redistribution(e, True)[0] for e in entries if computes(own_redistribution(e, True)[0]))
        place = next(k for k, i in enumerate(instructions) if i is following)
        assert any(member.place in needs[place] for member in message.members), message


# -- redistributions with something beside them ------------------------------------------------------------------------


class Towers(nn.Module):
    """Two independent branches; each result is redistributed, and the first one is used last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        self.join = sw.shard(torch.add, ((1, 8), (1, 8)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a = self.first(x)
        b = torch.tanh(torch.tanh(self.second(y)))
        return self.join(torch.sin(b), a)


class Overwritten(Towers):
    """The same; an operator writes in place beside the branches."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a = self.first(x)
        b = torch.tanh(self.second(y))
        b.relu_()
        return self.join(b, a)


def towers(net: type[Towers] = Towers, **more: Any) -> sw.Plan:
    with torch.device("meta"):
        made = net()
        x = torch.empty(16, 16)
    sw.shard(made.first, ((8, 1), (1, 1)))
    sw.shard(made.second, ((8, 1), (1, 1)))
    return sw.plan(made, (x, x), nn.MSELoss(), torch.empty(16, 32, device="meta"), devices=DEVICES, **more)


def moves_of(plan: sw.Plan, producer: str) -> tuple[int, ScheduledMessage, ScheduledMessage]:
    """The place of the redistribution of an operator's result, and its messages forward and backward."""
    place = next(
        k
        for k, i in enumerate(plan.program.instructions)
        if isinstance(i, Redistribute) and i.producer == producer and i.cause != "parameter"
    )
    there, back = (
        next(
            m for m in plan.schedule.messages if m.members[0].place == place and (m.issue >= plan.schedule.forward) == b
        )
        for b in (False, True)
    )
    return place, there, back


def test_a_redistribution_is_issued_as_its_input_comes_and_waited_for_where_it_is_used() -> None:
    plan = towers()
    instructions, forward = plan.program.instructions, plan.schedule.forward
    place, there, back = moves_of(plan, "first")
    born = next(k for k, i in enumerate(instructions) if i.operator == "first" and isinstance(i, LocalOp))
    used = next(k for k, i in enumerate(instructions) if i.operator == "join" and isinstance(i, LocalOp))
    assert (there.issue, there.wait) == (born + 1, used) and place < used
    assert sum(computes(i) for i in instructions[there.issue : there.wait]) == 4
    # The transpose: issued when the join's backward has run, waited for by the backward of the producer.
    after = plan.backward[back.issue - forward - 1]
    assert after is instructions[used]
    assert next(e for e in plan.backward[back.wait - forward :] if isinstance(e, LocalOp)) is instructions[born]
    assert back.issue < back.wait


def test_an_operator_that_writes_in_place_keeps_redistributions_in_one_piece() -> None:
    assert any(True for _ in towers().schedule.splits)
    plan = towers(Overwritten)
    written = [i.op.kind for i in plan.program.instructions if isinstance(i, LocalOp)]
    if "relu_" in written:  # a capture may also replace the operator by one that writes nothing
        assert not plan.schedule.splits


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PLANS)
def test_the_peak_stays_within_the_allowance(kind: str) -> None:
    drawn = random.Random(kind)
    whole = planned(kind)
    most = whole.schedule.allowance
    for allowance in (0, *(drawn.uniform(0, most) for _ in range(6))):
        plan = replace(whole, comm_memory=allowance)
        assert plan.unscheduled.peak == whole.unscheduled.peak
        assert plan.schedule.allowance == allowance
        assert plan.peak <= plan.unscheduled.peak + allowance
        assert plan.memory(0).get("under way", 0) == round(plan.peak - plan.unscheduled.peak)
        assert members_of(plan) == sorted(sent_by(plan))
    assert whole.peak <= whole.unscheduled.peak + most


def test_with_more_room_weights_come_earlier_and_together() -> None:
    tight, loose = replace(planned("level3"), comm_memory=0), planned("level3")
    assert tight.peak == tight.unscheduled.peak < loose.peak
    blocks = lambda plan: Counter(
        block_of(m.members[0].name) for _, m in plan.schedule.of("gather", repeats_forward=True)
    )
    assert max(blocks(loose).values()) == 1 < max(blocks(tight).values())


def test_without_room_for_the_copy_of_a_bucket_it_is_several() -> None:
    tight, loose = replace(planned("data_parallel"), comm_memory=0), planned("data_parallel")
    assert tight.peak == tight.unscheduled.peak < loose.peak
    (one,) = (message for _, message in loose.schedule.of("sum"))
    parts = [message for _, message in tight.schedule.of("sum")]
    assert len(parts) > 1 and sum(message.bytes for message in parts) == one.bytes
    assert [m for message in parts for m in message.members] == list(one.members)
    assert loose.schedule.allowance >= one.bytes  # a whole bucket, where blocks are small


def test_sums_in_a_wider_dtype_are_waited_for_at_once_without_room() -> None:
    with torch.device("meta"):
        net, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).bfloat16(), torch.empty(64, 64).bfloat16()
    policy = sw.MixedPrecision(reduce_dtype=torch.float32)
    plan = sw.plan(net, (x,), nn.MSELoss(), x, devices=DEVICES, parallel_mode="data_parallel", mixed_precision=policy)
    moves = [i for i in plan.program.instructions if isinstance(i, Redistribute) and i.cause == "parameter"]
    assert {(move.source.value.dtype, move.sums) for move in moves} == {(torch.bfloat16, torch.float32)}
    for allowance in (0, None):
        made = replace(plan, comm_memory=allowance)
        sums = [message for _, message in made.schedule.of("sum")]
        assert all(message.wait == made.schedule.end for message in sums) == (allowance is None)
        assert made.peak <= made.unscheduled.peak + made.schedule.allowance


def test_scatters_are_waited_for_early_where_their_room_is_needed() -> None:
    schedule = replace(planned("level3"), comm_memory=planned("level3").schedule.allowance / 2).schedule
    early = [number for numbers in schedule.early.values() for number in numbers]
    assert early and all(schedule.messages[number].wait < schedule.end for number in early)
    for number, others in schedule.early.items():
        assert all(schedule.messages[other].wait == schedule.messages[number].issue for other in others)
        assert all(schedule.messages[other].role == "scatter" for other in others)


@pytest.mark.parametrize("kind", LEVELS)
def test_a_plan_that_was_searched_within_a_limit_keeps_it(kind: str) -> None:
    plan = planned(kind)
    raised = plan.peak - plan.unscheduled.peak
    assert raised > 0
    for part in (0.0, 0.5, 0.9):
        limit = plan.unscheduled.peak + part * raised
        found = SearchResult(plan.cost, None, 0, 0, (), limit)
        assert plan.unscheduled.peak <= replace(plan, found=found).peak <= limit
    # A plan above its limit, as an edited one may be, is not made any larger.
    found = SearchResult(plan.cost, None, 0, 0, (), plan.unscheduled.peak / 2)
    assert replace(plan, found=found).peak == plan.unscheduled.peak


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_random_allowances_of_random_branches(seed: int) -> None:
    drawn = random.Random(seed)

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(5))
            self.join0, self.join1, self.join2, self.join3 = (sw.Operator(torch.add) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            values = [x]
            for k, layer in enumerate(self.layers):
                values.append(torch.tanh(layer(values[order[k] % len(values)])))
            out = values[-1]
            for k in range(4):
                out = getattr(self, f"join{k}")(values[k + 1], out)
            return out

    order = [drawn.randrange(6) for _ in range(5)]
    with torch.device("meta"):
        net, x = Branches(), torch.empty(16, 16)
    for layer in net.layers:
        sw.shard(layer, drawn.choice((((8, 1), (1, 1)), ((1, 1), (8, 1)), ((1, 8), (1, 8)))))
    for k in range(4):
        getattr(net, f"join{k}").shard((drawn.choice(((8, 1), (1, 8), (1, 1))),) * 2)
    plan = sw.plan(
        net, (x,), nn.MSELoss(), torch.empty_like(x), devices=DEVICES, comm_memory=drawn.choice((None, 0, 500, 2000))
    )
    schedule = plan.schedule
    assert plan.peak <= plan.unscheduled.peak + schedule.allowance
    assert members_of(plan) == sorted(sent_by(plan))
    born = {o.name: k for k, i in enumerate(plan.program.instructions) for o in made_by(i)}
    for place, (issue, use) in schedule.splits.items():
        move = plan.program.instructions[place]
        assert born.get(move.source.name, -1) < issue <= place < use
        for k, instruction in enumerate(plan.program.instructions[:use]):
            assert k == place or move.target.name not in reads(instruction)


# -- stages of a pipeline ----------------------------------------------------------------------------------------------


@cache
def staged(level: str | None) -> tuple[sw.Plan, ...]:
    """The plans of two stages of four devices."""
    with torch.device("meta"):
        net, loss = GPT(vocabulary=32, length=8, layers=LAYERS, width=32, heads=8), TokenLoss()
        tokens = torch.empty(16, 8, dtype=torch.int64)
    config = {"tokens": 0, "positions": 0, "norm": 1, "head": 1} | {
        f"blocks.{i}": 2 * i // LAYERS for i in range(LAYERS)
    }
    plan = sw.plan(
        net,
        (tokens,),
        loss,
        tokens,
        devices=DEVICES,
        parallel_mode="data_parallel",
        pipeline={"stages": 2, "scheduler": "1f1b", "micro_batches": 4, "stage_config": config},
        hsdp=None
        if level is None
        else {"threshold": 0, "optimizer_level": level.split()[0], "shard_size": 2 if level.endswith("halves") else -1},
    )
    return tuple(stage.plan for stage in plan.stages)


STAGED = (None, *LEVELS, "level1 halves", "level2 halves", "level3 halves")


@pytest.mark.parametrize("level", STAGED)
def test_each_collective_of_a_stage_is_in_one_message(level: str | None) -> None:
    for plan in staged(level):
        schedule = plan.stage_schedule
        messages = [message for message in schedule.messages if message.role != "follow"]
        assert sorted((m.place, m.moment) for message in messages for m in message.members) == sorted(sent_by(plan))
        issued = Counter(number for _, action, number in schedule.order if action == "issue")
        waited = Counter(number for _, action, number in schedule.order if action == "wait")
        assert set(issued.values()) == set(waited.values()) == {1} and len(issued) == len(schedule.messages)
        once = {(m.place, m.moment) for message in messages if message.once for m in message.members}
        entries = (*((i, False) for i in plan.program.instructions), *((e, True) for e in plan.backward))
        for moment, (entry, back) in enumerate(entries):
            place = next((place for place, at in sent_by(plan) if at == moment), None)
            if place is not None:
                assert ((place, moment) in once) == plan.once(entry, back), (entry, back)


@pytest.mark.parametrize("level", STAGED[1:])
def test_a_block_of_a_stage_has_one_gather_and_one_scatter(level: str) -> None:
    for plan in staged(level):
        schedule = replace(plan, comm_memory=1e9).stage_schedule
        for role, again in (("gather", False), ("gather", True), ("scatter", False)):
            messages = [message for _, message in schedule.of(role, repeats_forward=again)]
            keys = [(block_of(message.members[0].name), message.digits) for message in messages]
            assert len(keys) == len(set(keys)) and (len(keys) >= LAYERS // 2 or again)
        gathers = [message for _, message in schedule.of("gather")]
        scatters = [message for _, message in schedule.of("scatter")]
        assert {message.once for message in gathers} == {not level.startswith("level3")}
        assert {message.once for message in scatters} == {level.startswith("level1")}
        if not level.startswith("level3"):  # in front of the first forward, which waits where a weight is used
            assert all(message.issue == 0 and message.wait == message.members[0].place for message in gathers)
        assert all(message.issue == message.members[-1].moment for message in scatters)
        if not level.endswith("halves"):
            assert all(message.wait == schedule.end for message in scatters)
            travelling = {number for number, message in schedule.of("scatter") if not message.once}
            assert schedule.carried == travelling


def test_sums_of_a_stage_begin_in_its_last_backward() -> None:
    for plan in staged(None):
        schedule = plan.stage_schedule
        sums = [message for _, message in schedule.of("sum")]
        assert sums and all(message.once and message.wait == schedule.end for message in sums)
        assert all(message.issue == max(m.moment for m in message.members) < schedule.end for message in sums)


@pytest.mark.parametrize("level", STAGED)
def test_messages_of_a_stage_stay_within_the_allowance(level: str | None) -> None:
    drawn = random.Random(level)
    for whole in staged(level):
        most = whole.stage_schedule.allowance
        for allowance in (0, *(drawn.uniform(0, most) for _ in range(4)), None):
            plan = replace(whole, comm_memory=allowance)
            schedule = plan.stage_schedule
            assert plan.stage_timeline.peak <= plan.stage_unscheduled.peak + schedule.allowance


@pytest.mark.parametrize("level", STAGED)
def test_a_stage_in_time_has_what_is_sent_once_a_step_once(level: str | None) -> None:
    for plan in staged(level):
        each, once = plan.stage_in_time, plan.stage_in_time_once
        assert once.compute == pytest.approx(plan.price.compute) and each.compute <= once.compute
        assert each.forward <= once.forward and each.total - each.forward <= once.total - once.forward
        assert once.total <= plan.cost * (1 + 1e-9)
        if level is None or level == "level1":  # what is left is sent within a micro-batch
            sent = [message for message in plan.stage_schedule.messages if not message.once]
            assert all(message.role == "redistribution" for message in sent)


# -- buckets -----------------------------------------------------------------------------------------------------------


def test_buckets_are_larger_where_several_hosts_sum() -> None:
    mib = 1 << 20
    near = [Due(f"w{k}", 10 * mib, "f", k, 8) for k in range(30)]
    far = [Due(f"w{k}", 10 * mib, "f", k, 16, hosts=True) for k in range(30)]
    assert {len(bucket) for bucket in Fusion().buckets(near, library=True)} == {-(-LIBRARY // (10 * mib))}
    assert {len(bucket) for bucket in Fusion().buckets(far, library=True)} == {HOSTS // (10 * mib)}
    with torch.device("meta"):
        net, x = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(16))), torch.empty(32, 2048)
    for devices, most in ((8, LIBRARY), (16, HOSTS)):
        plan = sw.plan(net, (x,), nn.MSELoss(), x, devices=devices, parallel_mode="data_parallel", cluster="h100x8x2")
        sizes = [message.bytes for _, message in plan.schedule.of("sum")]
        assert sum(sizes) == 16 * 2048 * 2048 * 4 and max(sizes) >= most
        assert len(sizes) == -(-sum(sizes) // -(-most // (16 * mib)) // (16 * mib))


def test_on_gloo_sums_alone_travel() -> None:
    plan = planned("level3")
    names = list(plan.program.parameters)
    schedule = plan.scheduled(False, Fusion(), names, stage=False)
    assert isinstance(schedule, CommunicationSchedule) and not schedule.library
    assert not schedule.splits and not list(schedule.of("gather")) and not list(schedule.of("scatter"))
    assert all(message.issue == message.wait for message in schedule.messages if message.role != "sum")
    assert list(planned("data_parallel").scheduled(False, Fusion(), names, stage=False).of("sum"))


# -- a step in time ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PLANS)
def test_a_step_in_time_is_computation_and_what_stays_exposed(kind: str) -> None:
    plan = planned(kind)
    price, step = plan.price, plan.in_time
    assert step.compute == pytest.approx(price.compute)
    assert (price.elapsed, price.exposed) == (step.total, step.total - step.compute)
    assert (
        price.compute < price.elapsed <= price.total * (1 + 1e-9) and 0 < price.exposed <= price.communication * 1.001
    )
    assert sum(seconds for _, seconds in step.waits) == pytest.approx(price.exposed)
    streams: dict[str, list[StreamSpan]] = {}
    for span in step.spans:
        streams.setdefault(span.stream, []).append(span)
    assert set(streams) == {"computation", "NVLink 4"}
    for spans in streams.values():
        assert all(a.stop <= b.start * (1 + 1e-9) for a, b in zip(spans, spans[1:]))
    assert sum(s.stop - s.start for s in streams["computation"]) == pytest.approx(step.compute)
    assert 0 < step.forward < step.total
    if "halves" in kind:
        return
    # Where each message takes time of its own, a step takes the sum of its seconds, or less: several travel as one.
    alone = replace(
        plan.schedule, messages=tuple(replace(m, issue=m.wait) for m in plan.schedule.messages), splits={}, early={}
    )
    slow = CostModel(plan.cluster, plan.devices).in_time(plan, alone)
    assert price.elapsed <= slow.total * (1 + 1e-9) <= price.total * (1 + 2e-9)


def test_a_step_in_time_by_hand() -> None:
    """Level 1 of three layers: only the first gather and the last scatter are exposed, where links are fast enough."""
    level = sw.Level("links", DEVICES, 1e12, 1e-12)
    cluster = sw.Cluster("by hand", (level,), 1e12, {"float32": 1e12}, 1e18, 1e-12)
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)))
        x = torch.empty(8 * 512, 512)
    plan = sw.plan(
        net,
        (x,),
        nn.MSELoss(),
        x,
        devices=DEVICES,
        cluster=cluster,
        parallel_mode="data_parallel",
        dataset_strategy="data_parallel",
        hsdp={"threshold": 0},
    )
    weight = 512 * 512 * 4
    gather = scatter = 7 / 8 * weight / 1e12  # seconds on the links
    layer = 2 * 512**3 / 1e12  # seconds of a product
    assert gather < layer
    # One product a layer in the forward; two in the backward, but for the first layer, whose input needs no gradient.
    assert plan.in_time.compute == pytest.approx((3 + 2 + 2 + 1) * layer, rel=1e-3)
    assert plan.price.communication == pytest.approx(3 * gather + 3 * scatter, rel=1e-2)
    assert plan.price.exposed == pytest.approx(gather + scatter, rel=1e-2)
    # With links so slow that they are never idle, computation hides behind them instead.
    slow = replace(plan, cluster=replace(cluster, levels=(replace(level, bandwidth=1e12 / 5000),)))
    last = slow.in_time.spans[-1]
    assert last.stream == "links" and slow.price.elapsed == last.stop
    # Forward: the links from the first gather to the last; then the backward of the last layer, and three scatters.
    expected = 5000 * 3 * gather + layer + 2 * layer + 5000 * 3 * scatter
    assert slow.price.elapsed == pytest.approx(expected, rel=1e-2)


def test_a_step_without_messages_takes_what_it_computes() -> None:
    net, x = nn.Linear(8, 8), torch.empty(4, 8)
    plan = sw.plan(net, (x,), nn.MSELoss(), x, parallel_mode="stand_alone")
    assert plan.price.elapsed == pytest.approx(plan.cost) and plan.price.exposed == pytest.approx(0)
    two = CostModel(plan.cluster, 1).plan(plan, micro_batches=2)
    assert (two.elapsed, two.exposed) == (two.total, two.communication)


def test_levels_of_links_work_side_by_side() -> None:
    """Gradients that are summed over hosts leave the links inside a host to others."""
    with torch.device("meta"):
        net, loss = GPT(vocabulary=32, length=8, layers=2, width=32, heads=8), TokenLoss()
        tokens = torch.empty(32, 8, dtype=torch.int64)
    mark(net, loss, 2, 8)
    plan = sw.plan(net, (tokens,), loss, tokens, devices=16, cluster="h100x8x2")
    assert {span.stream for span in plan.in_time.spans} == {"computation", "NVLink 4", "InfiniBand NDR"}
