"""Buffers that a forward assigns, in pipelines: after each of five steps they are what they are on one device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_device import close
from ranks import all_passed, run_ranks, run_scenarios
from small_networks import D, draw
from torch import Tensor, nn

import shardwright as sw

STEPS = 5


class Layer(nn.Module):
    """A layer with buffers, and what it does with them: (layer, its result) -> its result."""

    def __init__(self, number: int, habit: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.habit = nn.Linear(8, 8, dtype=D), habit
        self.fc.weight.data, self.fc.bias.data = draw(8, 8, seed=number) / 2, draw(8, seed=number + 10)
        self.register_buffer("e", torch.zeros((), dtype=D))
        self.register_buffer("v", torch.zeros(8, dtype=D))
        self.register_buffer("n", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.habit(self, self.fc(x)))


class Inner(nn.Module):
    """A submodule around it, so that no buffer is the outermost module's."""

    def __init__(self, number: int, habit: Callable) -> None:
        super().__init__()
        self.layer = Layer(number, habit)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def average(m: Layer, h: Tensor) -> Tensor:
    m.e = 0.9 * m.e + 0.1 * h.mean().detach()
    return h


def old_average(m: Layer, h: Tensor) -> Tensor:
    out = h - m.v
    m.v = m.v.lerp(h.detach().mean(0), 0.1)
    return out


def total(m: Layer, h: Tensor) -> Tensor:
    m.v.mul_(0.5).add_(h.detach().sum(0))
    return h


def steps(m: Layer, h: Tensor) -> Tensor:
    m.n = m.n + 1
    return h * (1 + m.n / 100)


def two_in_a_row(m: Layer, h: Tensor) -> Tensor:
    m.e, m.n = 0.5 * m.e + h.detach().mean() * (1 + m.n), m.n + 2
    return h


def new_average(m: Layer, h: Tensor) -> Tensor:
    m.e = 0.9 * m.e + 0.1 * h.mean().detach()
    return h + m.e


def largest(m: Layer, h: Tensor) -> Tensor:
    m.v = torch.maximum(m.v, h.detach().amax(0))
    return h


HABITS = [average, old_average, total, steps, two_in_a_row]


def check(
    rank: int,
    world: int,
    habit: Callable,
    stages: int,
    micro_batches: int,
    scheduler: str = "1f1b",
    feed: str = "full_batch",
    given: dict[str, Any] | None = None,
) -> None:
    net = nn.Sequential(*(Inner(i, habit) for i in range(4)))
    one = copy.deepcopy(net)
    given = given or {"stage_config": {str(i): i * stages // 4 for i in range(4)}}
    model = (
        sw.AutoParallel(net, nn.MSELoss())
        .dataset_strategy(feed)
        .pipeline(stages=stages, micro_batches=micro_batches, scheduler=scheduler, **given)
    )
    ours, theirs = (torch.optim.SGD(n.parameters(), 0.1) for n in (net, one))
    for step in range(STEPS):
        x, y = draw(8, 8, seed=step) + step, draw(8, 8, seed=step + 50)
        parts, mine = (world // stages, rank % (world // stages)) if feed == "data_parallel" and world > 1 else (1, 0)
        loss = model(x.chunk(parts)[mine], y.chunk(parts)[mine])
        expected = nn.functional.mse_loss(one(x), y)
        close(loss.detach(), expected.detach(), f"loss of step {step}")
        loss.backward(), expected.backward()
        ours.step(), theirs.step(), ours.zero_grad(), theirs.zero_grad()
        with model.whole() as plain:
            close(
                {n: b.clone() for n, b in plain.named_buffers()},
                dict(one.named_buffers()),
                f"buffers after step {step}",
            )
    with torch.no_grad():  # a call that trains nothing changes them too
        close(model(x.chunk(parts)[mine], y.chunk(parts)[mine]), nn.functional.mse_loss(one(x), y), "without gradients")
    with model.whole() as plain:
        close({n: b.clone() for n, b in plain.named_buffers()}, dict(one.named_buffers()), "buffers without gradients")


def is_refused(rank: int, world: int, habit: Callable, text: str, stages: int) -> None:
    """Alike on every rank, before anything runs."""
    net = nn.Sequential(*(Inner(i, habit) for i in range(4)))
    model = (
        sw.AutoParallel(net, nn.MSELoss())
        .dataset_strategy("full_batch")
        .pipeline(stages=stages, micro_batches=4, stage_config={str(i): i * stages // 4 for i in range(4)})
    )
    with pytest.raises(sw.ShardwrightError) as raised:
        model(draw(8, 8), draw(8, 8))
    assert (
        text in str(raised.value)
        and "test_pipeline_buffers.py:" in str(raised.value)
        and "legal: micro_batches=1" in str(raised.value)
    )
    assert not any(b.any() for b in net.buffers())


def scenarios(world: int) -> dict[str, Callable]:
    out = {
        f"{habit.__name__}, {scheduler}": functools.partial(
            check, habit=habit, stages=world, micro_batches=4, scheduler=scheduler
        )
        for scheduler, habits in (("1f1b", HABITS), ("zero_bubble", (old_average, two_in_a_row) if world == 2 else ()))
        for habit in habits
    }
    if world == 4:
        out |= {
            f"{habit.__name__}, parts": functools.partial(
                check, habit=habit, stages=2, micro_batches=2, feed="data_parallel"
            )
            for habit in (old_average, two_in_a_row)
        }
        out["interleaved"] = functools.partial(
            check,
            habit=average,
            stages=2,
            micro_batches=4,
            scheduler="interleaved",
            given={"chunks": 2, "stage_config": {str(i): i for i in range(4)}},
        )
    else:
        refused = {new_average: "otherwise than linearly", largest: "the new value of the buffer"}
        out |= {
            f"{habit.__name__} is refused": functools.partial(is_refused, habit=habit, text=text, stages=2)
            for habit, text in refused.items()
        }
    return out


@pytest.mark.parametrize("world", [2, 4])
def test_on_processes(world: int) -> None:
    all_passed(run_ranks(run_scenarios, world, scenarios(world)))


@pytest.mark.parametrize("habit", HABITS, ids=lambda f: f.__name__)
def test_in_one_process(habit: Callable) -> None:
    sw.init(devices=4)
    check(0, 1, habit, 2, 4)


@pytest.mark.parametrize("habit", HABITS, ids=lambda f: f.__name__)
def test_it_is_verified(habit: Callable) -> None:
    net = nn.Sequential(*(Inner(i, habit) for i in range(4)))
    report = sw.verify(
        net,
        (draw(8, 8),),
        draw(8, 8, seed=1),
        loss_fn=nn.MSELoss(),
        devices=4,
        steps=2,
        pipeline={"stages": 2, "micro_batches": 4, "stage_config": {str(i): i // 2 for i in range(4)}},
    )
    assert report.ok, report


def test_a_plan_that_was_saved_says_so(tmp_path: Any) -> None:
    sw.init(devices=4)
    for path in (None, tmp_path / "plan.json"):
        net = nn.Sequential(*(Inner(i, average) for i in range(4)))
        model = (
            sw.AutoParallel(net, nn.MSELoss())
            .dataset_strategy("full_batch")
            .pipeline(stages=2, micro_batches=4, stage_config={str(i): i // 2 for i in range(4)})
        )
        model(draw(8, 8), draw(8, 8, seed=1))
        if path is None:
            model.plan.save(tmp_path / "plan.json")
            plan = model.plan
    assert sw.Plan.load(path).micro.updates == plan.micro.updates == {f"{i}.layer.e": ("mean", 0) for i in range(4)}
