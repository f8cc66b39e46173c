"""``torch.utils.checkpoint`` around a parallel model: the forward runs again in the backward, with the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_device import close, parallel
from pipeline_networks import Chain, batches, staged
from ranks import all_passed, run_ranks, run_scenarios
from small_networks import D, draw
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw

BOTH = pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])


class Net(nn.Module):
    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(8, 16, dtype=D), nn.Linear(16, 8, dtype=D)
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(torch.tanh(self.first(x))))


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def steps(call: Callable[[Tensor], Tensor], net: nn.Module) -> list[Any]:
    """Four steps of two calls each; the two backwards are one in every other step."""
    made = []
    torch.manual_seed(5)
    for step in range(4):
        xs = [draw(8, 8, seed=2 * step + k).requires_grad_() for k in range(2)]
        net.zero_grad()
        outs = [call(x) for x in xs]
        if step % 2:
            sum(out.square().sum() for out in outs).backward()
        else:
            for out in outs:
                out.square().sum().backward()
        gradients = [full(p.grad).clone() for p in net.parameters()]
        made.append(([out.detach() for out in outs], [x.grad for x in xs], gradients))
    return made


def as_without(model: sw.AutoParallel, reentrant: bool) -> None:
    """The same steps as of a model on one device without a checkpoint, random numbers included."""
    alone = sw.AutoParallel(copy.deepcopy(model.net), parallel_mode="stand_alone")
    ours = steps(lambda x: checkpoint(model, x, use_reentrant=reentrant), model.net)
    close(ours, steps(alone, alone.net))


@BOTH
@pytest.mark.parametrize("mode", ["stand_alone", "semi_auto", "hsdp", "recompute"])
def test_in_one_process(mode: str, reentrant: bool) -> None:
    net = Net()
    if mode == "semi_auto":
        sw.shard(net.first, ((2, 1), (2, 1), (2,)))
    if mode == "recompute":
        sw.recompute(net.first)
    model = parallel(net, devices=4, mode=mode if mode == "stand_alone" else "semi_auto")
    if mode == "hsdp":
        model.hsdp(threshold=0, optimizer_level="level3")
    as_without(model, reentrant)


def on_two_ranks(reentrant: bool, level: str | None) -> Callable[[int, int], None]:
    def run(rank: int, world: int) -> None:
        sw.init()
        net = Net()
        sw.shard(net.second, ((1, 1), (2, 1), (2,)))
        model = sw.AutoParallel(net).dataset_strategy("full_batch")
        if level is not None:
            model.hsdp(threshold=0, optimizer_level=level)
        as_without(model, reentrant)

    return run


def test_in_processes() -> None:
    scenarios = {
        f"{reentrant} {level}": on_two_ranks(reentrant, level)
        for reentrant in (False, True)
        for level in (None, "level3")
    }
    all_passed(run_ranks(run_scenarios, 2, scenarios))


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__(0.0)
        self.drop = nn.BatchNorm1d(16, dtype=D)


@pytest.mark.parametrize("kind", [Counting, Normed])
def test_what_is_done_besides_the_result(kind: type[Net]) -> None:
    """A reentrant checkpoint runs all of the forward twice, as on one device; another one ends the second run early."""
    model = parallel(kind(), devices=4)
    one = copy.deepcopy(model.net)
    x = draw(8, 8).requires_grad_()
    for each in (model, one):
        checkpoint(each, x, use_reentrant=True).sum().backward()
    close(dict(model.net.named_buffers()), dict(one.named_buffers()))
    assert getattr(model.net, "calls", 0) == getattr(one, "calls", 0)
    with pytest.raises(sw.SettingError, match="torch.utils.checkpoint around a parallel model that") as raised:
        checkpoint(model, x, use_reentrant=False)
    assert "sw.recompute(net)" in raised.value.legal
    if torch.__version__ >= "2.10":  # torch 2.9 leaves the hooks of a checkpoint in place that an error has ended
        model(x).sum().backward()  # without a checkpoint it goes on


def test_around_a_pipeline() -> None:
    ((x, t),) = batches(1)
    model = parallel(Chain(), nn.MSELoss(), devices=4).pipeline(stages=2, micro_batches=4, stage_config=staged(2))
    with pytest.raises(sw.SettingError, match="runs its backward in the call, as a pipeline does"):
        checkpoint(model, x, t, use_reentrant=False)


def test_other_hooks_for_saved_tensors() -> None:
    model = parallel(Net(0.0), devices=4)
    one = copy.deepcopy(model.net)
    for _ in range(2):
        with torch.autograd.graph.save_on_cpu():
            model(draw(8, 8)).square().sum().backward()
        one(draw(8, 8)).square().sum().backward()
    close([p.grad for p in model.net.parameters()], [p.grad for p in one.parameters()])
