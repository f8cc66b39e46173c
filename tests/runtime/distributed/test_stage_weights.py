"""Weights and gradients of pipelines under hsdp on a library: one message a block, beside the computation.

Order is of ranks of torch's "fake" group. Numbers are of four Gloo processes that take the path of a library, under the
model of NCCL's point-to-point operations.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_log import CollectiveLog, collective_log, rank_of_eight
from library_model import library
from one_device import close
from pipeline_networks import Chain, batches
from ranks import all_passed, run_ranks, run_scenarios
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.pipeline.schedules import SCHEDULES
from shardwright.runtime import pipeline_p2p

LEVELS = ("level1", "level2", "level3")
MICRO = 4


def piped(scheduler: str, level: str | None, net: Chain | None = None, **more: Any) -> sw.AutoParallel:
    """A chain of four layers in two groups of devices."""
    model = sw.AutoParallel(net or Chain(width=32), nn.MSELoss(), parallel_mode="data_parallel", **more)
    chunks = SCHEDULES[scheduler]
    model.pipeline(2, scheduler, MICRO, {f"layers.{i}": i * chunks // 2 for i in range(4)})
    if level is not None:
        sized = {"shard_size": 2} if level.endswith("halves") else {}
        model.hsdp(threshold=0, optimizer_level=level.split()[0], **sized)
    return model.dataset_strategy("full_batch")


# -- order -------------------------------------------------------------------------------------------------------------

Events = list[tuple[str, str, int]]


@contextlib.contextmanager
def fake_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pipeline_p2p, "_make_even", lambda runtime: None)
    with rank_of_eight(rank=rank):
        yield


def logged(model: sw.AutoParallel) -> CollectiveLog:
    """The collectives of a step within the stages, in the second call."""
    ((x, y),) = batches(1, rows=32, width=32)
    for _ in range(2):
        with collective_log() as log:
            loss = model(x, y)
        with collective_log() as rest:
            loss.backward()
        assert not rest.sent
    return log


def ran(log: CollectiveLog) -> Events:
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    return [(action, one.kind, one.bytes) for action, one in log.events if one.kind in kinds]


def scheduled(model: sw.AutoParallel, rank: int) -> tuple[Events, Events]:
    """The same, as the schedules of the rank's stages have it: before the step ends, and as it ends."""
    plan = model.plan
    stages = {stage.number: stage.plan.stage_schedule for stage in plan.of_rank(rank)}
    out: Events = []
    ending: Events = []
    carried: dict[int, list[int]] = {s: [] for s in stages}

    def note(s: int, action: str, number: int, events: Events) -> None:
        message = stages[s].messages[number]
        events.append((action, str(message.kind), message.bytes))

    for s, schedule in stages.items():
        for moment, action, number in schedule.order:
            if schedule.messages[number].once and not moment and action == "issue":
                note(s, action, number, out)
    actions = plan.schedule.actions[plan.schedule.placement[next(iter(stages))]]
    seen = set()
    last = {action.stage: action for action in actions if action.kind == "B"}
    for action in actions:
        s, schedule = action.stage, stages[action.stage]
        back = action.kind == "B"
        for moment, what, number in schedule.order:
            message = schedule.messages[number]
            if (message.issue >= schedule.forward) != back:
                continue
            if message.once:
                early = what == "issue" and not moment
                if not early and moment < schedule.end and (last[s] == action if back else s not in seen):
                    note(s, what, number, out)
                continue
            if what == "wait" and number in schedule.carried:
                carried[s].append(number)
                continue
            if what == "issue" and message.role == "scatter":
                for other in carried[s]:
                    note(s, "wait", other, out)
                carried[s].clear()
            note(s, what, number, out)
        seen.add(s)
    for s, schedule in stages.items():
        for number in carried[s]:
            note(s, "wait", number, ending)
        for number, message in enumerate(schedule.messages):
            if message.once:
                for what, moment in (("issue", message.issue), ("wait", message.wait)):
                    if moment == schedule.end:
                        note(s, what, number, ending)
    return out, ending


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("level", [None, *LEVELS, "level1 halves", "level2 halves", "level3 halves"])
@pytest.mark.parametrize("scheduler", ["gpipe", "1f1b", "interleaved"])
def test_what_runs_is_the_schedule(
    scheduler: str, level: str | None, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_rank(rank, monkeypatch):
        model = piped(scheduler, level)
        events = ran(logged(model))
    before, ending = scheduled(model, rank)
    assert events[: len(before)] == before
    assert Counter(events[len(before) :]) == Counter(ending)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scheduler", ["zero_bubble", "zbv"])
def test_a_backward_in_two_halves_gathers_once_in_each(
    scheduler: str, level: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of a block in one message a half, gradients in one a micro-batch or a step; everything is waited for."""
    with fake_rank(rank, monkeypatch):
        model = piped(scheduler, level)
        log = logged(model)
    assert all(one.waited is not None for one in log.sent if one.kind in ("all_gather", "reduce_scatter"))
    stages = {stage.number: len(stage.plan.program.parameters) // 2 for stage in model.plan.of_rank(rank)}  # layers
    actions = model.plan.schedule.actions[rank // 4]
    gathers = sum(stages[a.stage] for a in actions) if level == "level3" else sum(stages.values())
    scatters = sum(stages.values() if level == "level1" else (stages[a.stage] for a in actions if a.kind in "BW"))
    assert 0 < log.counts()["all_gather"] <= gathers
    assert log.counts()["reduce_scatter"] == scatters


# -- numbers -----------------------------------------------------------------------------------------------------------


def check_part(gradient: Tensor | None, plan: sw.PipelinePlan, name: str, expected: Tensor, what: str) -> None:
    """The part of a gradient that this rank stores is that of one device; ranks of other stages store nothing."""
    parameter = plan.parameters[name]
    assert gradient is not None
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    stores = any(name in stage.plan.program.parameters for stage in plan.of_rank(dist.get_rank()))
    assert bool(local.numel()) == stores, what
    if stores:
        close(local, expected[parameter.slice(dist.get_rank())], what)


def trained(
    rank: int,
    world: int,
    scheduler: str,
    level: str | None,
    order: Any = "communicator",
    kind: Any = (),
    recomputed: bool = False,
    **given: Any,
) -> None:
    """Steps as a pipeline and on one device: plain ones, one with two backwards, one whose first backward does not sum;
    and a call without gradients."""
    with library(order):
        net = Chain(width=16, **dict.fromkeys(kind, True))
        one = copy.deepcopy(net)
        for layer in net.layers if recomputed else ():
            sw.recompute(layer)
        model = piped(scheduler, level, net, **given)
        optimizers = [torch.optim.SGD(n.parameters(), 0.1, momentum=0.9) for n in (net, one)]
        pairs = batches(2)
        for calls, unsummed in ((1, False), (2, True), (2, False)):
            for x, y in pairs[:calls]:
                first = unsummed and x is pairs[0][0]
                with model.no_sync() if first else contextlib.nullcontext():
                    loss = model(x, y)
                    (3 * loss).backward()
                expected = nn.MSELoss()(one(x), y)
                (3 * expected).backward()
                close(loss.detach(), expected.detach(), "loss")
            for (name, p), q in zip(net.named_parameters(), one.parameters()):
                check_part(p.grad, model.plan, name, q.grad, f"{name}, {calls}, {unsummed}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad() if recomputed else torch.inference_mode():
            close(model(*pairs[0]), nn.MSELoss()(one(pairs[0][0]), pairs[0][1]), "without gradients")


#: Each schedule and each level with both orders of messages.
SCENARIOS: dict[str, Callable[[int, int], Any]] = {
    f"{scheduler}, {level}, {order}": partial(trained, scheduler=scheduler, level=level, order=order)
    for s, scheduler in enumerate(SCHEDULES)
    for k, level in enumerate((None, *LEVELS))
    for order in [("communicator", "device")[(s + k) % 2]]
}
SCENARIOS |= {
    f"{scheduler}, {level}, tied": partial(trained, scheduler=scheduler, level=level, kind=("tied", "skip"))
    for scheduler, levels in (("1f1b", (None, *LEVELS)), ("zbv", ("level1", "level3")))  # on two groups, on one group
    for level in levels
}
SCENARIOS |= {
    f"{level} without an allowance": partial(trained, scheduler="1f1b", level=level, comm_memory=0) for level in LEVELS
}
SCENARIOS |= {
    f"{scheduler}, {level}, recomputed": partial(trained, scheduler=scheduler, level=level, recomputed=True)
    for scheduler, level in (("1f1b", "level1"), ("zbv", "level2"), ("1f1b", "level3"), ("zbv", "level3"))
}
SCENARIOS["level3 compiled"] = partial(trained, scheduler="1f1b", level="level3", compile="aot_eager")
#: Stages of four ranks, which store parts over two, and sum these over the two pairs.
HALVES: dict[str, Callable[[int, int], Any]] = {
    f"{scheduler}, {level}": partial(trained, scheduler=scheduler, level=f"{level} halves")
    for scheduler, level in (*product(("1f1b",), LEVELS), ("zero_bubble", "level2"), ("zero_bubble", "level3"))
}


def on_ranks(rank: int, world: int, scenarios: dict[str, Callable[[int, int], Any]]) -> dict[str, str | None]:
    sw.init()
    return run_scenarios(rank, world, scenarios)


def test_numbers_are_those_of_one_device() -> None:
    # The imports of a compiler, and of its partitioner: once here, and not in every rank.
    torch.compile(torch.relu, backend="aot_eager")(torch.ones(1, requires_grad=True))
    all_passed(run_ranks(on_ranks, 4, SCENARIOS))


def test_numbers_with_further_replicas_are_those_of_one_device() -> None:
    all_passed(run_ranks(on_ranks, 8, HALVES))
