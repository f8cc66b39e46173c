"""``torch.autograd.grad`` of parameters that are slices, on two processes beside one device."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_device import close
from pipeline_networks import Chain, batches, staged
from ranks import all_passed, run_ranks, run_scenarios
from small_networks import D, draw
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw

X, Y = draw(8, 8), draw(8, 4, seed=1)
SCENARIOS: dict[str, Callable[[int, int], None]] = {}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(8, 16, dtype=D), nn.Linear(16, 4, dtype=D)
        self.unused = nn.Parameter(torch.ones(3, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def trained(net: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in net.named_parameters() if name != "unused"]


def wrapped(mark: bool = True, level: str | None = None, feed: str = "full_batch", loss: Any = None) -> Any:
    sw.init()
    net = Net()
    one = copy.deepcopy(net)
    if mark:
        sw.shard(net.first, ((1, 1), (2, 1), (2,)))
    model = sw.AutoParallel(net, loss).dataset_strategy(feed)
    if level is not None:
        model.hsdp(threshold=0, optimizer_level=level)
    return net, one, model


def scenario(function: Callable[[int, int], None]) -> None:
    SCENARIOS[function.__name__] = function


def of_all(level: str | None, feed: str, inside: bool) -> Callable[[int, int], None]:
    def run(rank: int, world: int) -> None:
        net, one, model = wrapped(True, level, feed, nn.MSELoss() if inside else None)
        x, y = (X.chunk(world)[rank], Y.chunk(world)[rank]) if feed == "data_parallel" else (X, Y)

        def loss() -> Tensor:
            return model(x, y) if inside else F.mse_loss(model(x), y)

        if not inside and feed == "data_parallel":
            model.enable_gradients_mean()
        loss()
        expected = torch.autograd.grad(F.mse_loss(one(X), Y), trained(one))
        for _ in range(2):
            made = torch.autograd.grad(loss(), trained(net))
            close([full(g) for g in made], [*expected])
        assert all(p.grad is None for p in net.parameters())
        loss().backward()  # what came before is not in it
        close([full(p.grad) for p in trained(net)], [*expected])

    return run


for _level in (None, "level1", "level3"):
    SCENARIOS[f"level {_level}"] = of_all(_level, "full_batch", inside=True)
SCENARIOS["loss outside"] = of_all(None, "full_batch", inside=False)
SCENARIOS["own parts"] = of_all(None, "data_parallel", inside=True)
SCENARIOS["own parts, loss outside"] = of_all(None, "data_parallel", inside=False)


@scenario
def gradients_that_are_there_stay(rank: int, world: int) -> None:
    net, _, model = wrapped()
    F.mse_loss(model(X), Y).backward()
    before = [p.grad for p in trained(net)]
    values = [full(g).clone() for g in before]
    torch.autograd.grad(F.mse_loss(model(X), Y), trained(net))
    assert all(p.grad is g for p, g in zip(trained(net), before))
    close([full(p.grad) for p in trained(net)], values)


@scenario
def some_parameters_and_inputs(rank: int, world: int) -> None:
    net, one, model = wrapped()
    model(X)
    x, z = X.clone().requires_grad_(), X.clone().requires_grad_()
    made = torch.autograd.grad(F.mse_loss(model(x), Y), [net.second.weight, x, net.first.bias])
    expected = torch.autograd.grad(F.mse_loss(one(z), Y), [one.second.weight, z, one.first.bias])
    close([full(g) for g in made], [*expected])
    (alone,) = torch.autograd.grad(F.mse_loss(model(X), Y), net.first.weight)
    close(full(alone), torch.autograd.grad(F.mse_loss(one(X), Y), one.first.weight)[0])
    assert x.grad is None and all(p.grad is None for p in net.parameters())


@scenario
def outputs_with_gradients_of_their_own(rank: int, world: int) -> None:
    net, one, model = wrapped()
    seed = draw(8, 4, seed=5)
    for keep in (True, False):
        out, theirs = model(X), one(X)
        for _ in range(2 if keep else 1):
            made = torch.autograd.grad(out, trained(net), seed, retain_graph=keep)
            close([full(g) for g in made], [*torch.autograd.grad(theirs, trained(one), seed, retain_graph=True)])


@scenario
def parameters_that_are_not_used(rank: int, world: int) -> None:
    net, _, model = wrapped()
    model(X)
    with pytest.raises(RuntimeError, match="'unused' appears to not have been used in the graph"):
        torch.autograd.grad(model(X).sum(), [*net.parameters()])
    *_, none = torch.autograd.grad(model(X).sum(), [*trained(net), net.unused], allow_unused=True)
    *_, zero = torch.autograd.grad(
        model(X).sum(), [*trained(net), net.unused], materialize_grads=True, allow_unused=True
    )
    assert none is None and not full(zero).any()


@scenario
def hooks_see_the_whole_gradient(rank: int, world: int) -> None:
    net, one, model = wrapped()
    model(X)
    seen: list[Tensor] = []
    net.first.weight.register_hook(lambda g: seen.append(g.clone()))
    torch.autograd.grad(model(X).sum(), trained(net))
    close(seen, [torch.autograd.grad(one(X).sum(), one.first.weight)[0]])


@scenario
def what_is_refused(rank: int, world: int) -> None:
    net, _, model = wrapped()
    loss = model(X).sum()
    with model.no_sync(), pytest.raises(sw.SettingError, match="under no_sync"):
        torch.autograd.grad(model(X).sum(), trained(net))
    with pytest.raises(sw.SettingError, match="is_grads_batched"):
        torch.autograd.grad(loss, trained(net), torch.ones(2, dtype=D), is_grads_batched=True)
    handle = net.first.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(sw.SettingError, match="'first.weight', which has a post-accumulate hook"):
        torch.autograd.grad(loss, trained(net))
    handle.remove()
    torch.autograd.grad(loss, trained(net))


@scenario
def a_pipeline(rank: int, world: int) -> None:
    sw.init()
    net = Chain()
    model = sw.AutoParallel(net, nn.MSELoss()).dataset_strategy("full_batch")
    model.pipeline(stages=2, micro_batches=4, stage_config=staged(2))
    ((x, t),) = batches(1)
    with pytest.raises(sw.SettingError, match="through a pipeline in several processes") as raised:
        torch.autograd.grad(model(x, t), [*net.parameters()])
    assert "loss.backward()" in raised.value.legal


@scenario
def the_first_call_of_a_model(rank: int, world: int) -> None:
    net, one, model = wrapped()
    made = torch.autograd.grad(model(X).sum(), net.first.weight, allow_unused=True)  # read before it is a slice
    close([full(g) for g in made], [*torch.autograd.grad(one(X).sum(), one.first.weight)])


@scenario
def other_requests_are_passed_on(rank: int, world: int) -> None:
    _, _, model = wrapped()
    model(X)
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    close(torch.autograd.grad(slope.sum(), [x])[0], 6 * X)


@scenario
def torchs_own_is_put_back(rank: int, world: int) -> None:
    gc.collect()
    plain = torch.autograd.grad
    net, _, model = wrapped()
    model(X)
    assert torch.autograd.grad.__module__.startswith("shardwright")
    del net, model
    gc.collect()
    assert torch.autograd.grad is plain


def test_on_two_ranks() -> None:
    all_passed(run_ranks(run_scenarios, 2, SCENARIOS))
