"""Pipelines under a library of accelerators, on its model: no schedule hangs, and each is one device's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from library_model import Hang, library
from one_device import close
from ranks import all_passed, run_ranks, run_scenarios
from small_networks import D, draw
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.pipeline.schedules import SCHEDULES

ORDERS = ("communicator", "device")


class Deep(nn.Module):
    """Layers, of which the first and the last have one weight, and the first is added to the last but one."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=D) for _ in range(layers))
        for i, layer in enumerate(self.layers):
            layer.weight.data, layer.bias.data = draw(8, 8, seed=i) / 3, draw(8, seed=10 + i)
        self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        first = x = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x + first)


def same_gradient(tensor: Tensor, expected: Tensor, plan: sw.PipelinePlan, name: str) -> None:
    """A rank holds a whole parameter, whose gradient is that of one device, or nothing of it. Nothing is sent."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if dist.get_rank() in plan.parameters[name].ranks:
        close(local, expected, f"gradient of {name}")
    else:
        assert not local.numel(), name


def trained(rank: int, world: int, scheduler: str, stages: int) -> sw.AutoParallel:
    """Two steps as a pipeline and on one device, and a call without gradients."""
    chunks = SCHEDULES[scheduler]
    net = Deep(stages * chunks)
    one, micro = copy.deepcopy(net), 2 * stages
    model = sw.AutoParallel(net, nn.MSELoss()).pipeline(
        stages, scheduler, micro, {f"layers.{i}": i for i in range(stages * chunks)}
    )
    model.dataset_strategy("full_batch")
    for seed in (0, 2):
        x, y = draw(2 * micro, 8, seed=seed), draw(2 * micro, 8, seed=seed + 1)
        loss, expected = model(x, y), nn.MSELoss()(one(x), y)
        close(loss.detach(), expected.detach(), "loss")
        loss.backward(), expected.backward()
        for (name, p), q in zip(net.named_parameters(), one.parameters()):
            same_gradient(p.grad, q.grad, model.plan, name)
        net.zero_grad(), one.zero_grad()
    with torch.no_grad():
        close(model(x, y), nn.MSELoss()(one(x), y), "without gradients")
    return model


def modelled(rank: int, world: int, scheduler: str, order: Any, stages: int) -> None:
    with library(order) as made:
        trained(rank, world, scheduler, stages)
    assert not [call for kind, call in made.calls if kind == "single"]


# -- single properties -------------------------------------------------------------------------------------------------


def neighbours_exchange_in_one_batch(rank: int, world: int) -> None:
    """The value of a micro-batch and the gradient of an earlier one travel together where 1f1b makes them together."""
    with library("communicator") as made:
        trained(rank, world, "1f1b", 2)
    both = f"send {rank} -> {1 - rank}, recv {1 - rank} -> {rank}"
    issued = [call for kind, call in made.calls if kind == "issue"]
    assert issued[0] == both  # the two meet before anything else
    assert both in issued[1:]


def waits_come_before_the_use(rank: int, world: int) -> None:
    """A rank waits for a batch when it uses what came, and for its sends at the end of the step."""
    with library("communicator") as made:
        net = nn.Sequential(nn.Linear(8, 8, dtype=D), nn.Linear(8, 8, dtype=D))
        model = sw.AutoParallel(net, nn.MSELoss()).pipeline(2, "gpipe", 4, {"0": 0, "1": 1})
        model.dataset_strategy("full_batch")
        model(draw(8, 8), draw(8, 8)).backward()
        made.calls.clear()
        model(draw(8, 8), draw(8, 8)).backward()
    kinds = [kind for kind, _ in made.calls]
    if rank == 0:  # four values leave one after the other: nothing is waited for until the first gradient is used
        assert kinds[:5] == ["issue"] * 5 and kinds.index("wait") > 4
    assert kinds.count("issue") == 8


def groups_are_used_again(rank: int, world: int) -> None:
    """Another size of the batch is another program, but the same two ranks."""
    with library("communicator") as made:
        net = nn.Sequential(nn.Linear(8, 8, dtype=D), nn.Linear(8, 8, dtype=D))
        model = sw.AutoParallel(net, nn.MSELoss()).pipeline(2, "1f1b", 2, {"0": 0, "1": 1})
        model.dataset_strategy("full_batch")
        for rows in (4, 8, 4):
            model(draw(rows, 8), draw(rows, 8)).backward()
    assert len(made.connected) == 2  # the directions of one group


def numbers_that_a_library_lacks(rank: int, world: int) -> None:
    """Such numbers travel as their parts, or as bytes."""
    with library("communicator"):
        model = trained(rank, world, "1f1b", 2)
        (link,) = {program.link for program in model._programs.values()}
        given = torch.arange(6).view(2, 3)
        for dtype in (torch.int16, torch.uint32, torch.complex64, torch.bfloat16, torch.bool):
            for x in (given.to(dtype), given.to(dtype)[1, 2]):
                room = torch.empty_like(x)
                for work in link._issue(1 - rank, [x], [room]):
                    work.wait()
                assert torch.equal(room, x)


# -- the model itself --------------------------------------------------------------------------------------------------


def raised_hang(call: Callable[[], Any]) -> str:
    try:
        call()
    except Hang as hang:
        return str(hang)
    raise AssertionError("it did not hang")


def the_model_hangs(rank: int, world: int) -> list[str]:
    """Two ranks that receive first; and, once connected, a receive in front of the send that the other needs."""
    peer, message = 1 - rank, []
    with library("communicator", 1.0):
        message.append(raised_hang(lambda: dist.irecv(torch.zeros(2), peer)))
    dist.barrier()
    for order in ORDERS:
        group = dist.new_group([0, 1])
        with library(order, 1.0) as made:
            made.connected |= {(group.group_name, pair) for pair in ((0, 1), (1, 0))}

            def receive_first(group: Any = group) -> None:
                coming = dist.irecv(torch.zeros(2), peer, group=group)
                dist.isend(torch.ones(2), peer, group=group)
                coming.wait()

            message.append(raised_hang(receive_first))
    return message


@pytest.mark.parametrize("world", [2, 3, 4])
def test_no_schedule_hangs(world: int) -> None:
    scenarios: dict[str, Callable[[int, int], Any]] = {
        f"{scheduler}, {order}": partial(modelled, scheduler=scheduler, order=order, stages=world)
        for scheduler, order in product(SCHEDULES, ORDERS)
    }
    if world == 2:
        for function in (
            neighbours_exchange_in_one_batch,
            waits_come_before_the_use,
            groups_are_used_again,
            numbers_that_a_library_lacks,
        ):
            scenarios[function.__name__] = function
    if world == 4:  # two stages of two ranks, with either order in turn: both are those of two stages of one rank
        for scheduler, order in zip(SCHEDULES, cycle(ORDERS)):
            scenarios[f"{scheduler}, {order}, two ranks a stage"] = partial(
                modelled, scheduler=scheduler, order=order, stages=2
            )
    all_passed(run_ranks(_on_ranks, world, scenarios))


def _on_ranks(rank: int, world: int, scenarios: dict[str, Callable[[int, int], Any]]) -> dict[str, str | None]:
    sw.init()
    return run_scenarios(rank, world, scenarios)


def test_the_model_names_the_place_of_a_hang() -> None:
    for rank, (connecting, *queued) in enumerate(run_ranks(the_model_hangs, 2)):
        assert f"rank {rank}'s host waits for the other call of the first recv {1 - rank} -> {rank}" in connecting
        assert all(f"rank {rank}'s host waits for the end of recv {1 - rank} -> {rank}" in text for text in queued)
