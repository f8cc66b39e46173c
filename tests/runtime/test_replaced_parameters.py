"""Parameters that a script holds since before the first call: in processes they stand for their slices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_device import close
from ranks import run_ranks, run_scenarios
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.runtime.distributed.dtensors import SUBCLASSES_HAVE_VIEWS, gathered

D = torch.float64
X = [torch.randn(8, 8, dtype=D, generator=torch.Generator().manual_seed(i)) for i in range(5)]
SCENARIOS: dict[str, Callable[[int, int], None]] = {}


def scenario(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    SCENARIOS[function.__name__] = function
    return function


def wrapped(net: nn.Module) -> sw.AutoParallel:
    sw.init()
    sw.shard(net[0], ((1, 1), (2, 1)))
    return sw.AutoParallel(net).dataset_strategy("full_batch")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).double()


def whole(x: Any) -> Any:
    return gathered(x) if isinstance(x, DTensor) else x


def as_one_device(use: Callable[..., Any], *, optimizer: bool = True) -> None:
    """Five steps with `use(parameters, call, x)`, which gives a loss that has its gradients, in processes and on one
    device; `parameters` was listed before the first call."""
    net = network()
    one = copy.deepcopy(net)
    model = wrapped(net)
    sides = []
    for called, inner in ((model, net), (one, one)):
        held = list(inner.parameters())
        steps = torch.optim.SGD(inner.parameters(), 0.1) if optimizer else None
        made = []
        for x in X:
            loss = use(held, called, x)
            grads = {n: None if p.grad is None else whole(p.grad).clone() for n, p in inner.named_parameters()}
            made.append((loss.detach().clone(), grads))
            if steps is not None:
                steps.step(), steps.zero_grad()
        sides.append((made, {n: whole(p.detach()).clone() for n, p in inner.named_parameters()}))
    close(sides[0], sides[1])


def backward(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    loss = call(x).square().mean()
    loss.backward()
    return loss


@scenario
def gradients_are_clipped(rank: int, world: int) -> None:
    def use(held: list[nn.Parameter], call: Any, x: Tensor) -> Tensor:
        loss = backward(call, x)
        norm = nn.utils.clip_grad_norm_(held, 0.01)
        assert norm > 0.01
        nn.utils.clip_grad_value_(held, 0.002)
        return loss

    as_one_device(use)


@scenario
def gradients_are_removed(rank: int, world: int) -> None:
    def use(held: list[nn.Parameter], call: Any, x: Tensor) -> Tensor:
        for parameter in held:
            parameter.grad = None
        loss = backward(call, x)
        with torch.no_grad():
            for parameter in held:
                parameter.sub_(parameter.grad, alpha=0.1)
        return loss

    as_one_device(use, optimizer=False)


@scenario
def a_step_is_written_by_hand(rank: int, world: int) -> None:
    def use(held: list[nn.Parameter], call: Any, x: Tensor) -> Tensor:
        loss = backward(call, x)
        with torch.no_grad():
            for parameter in held:
                parameter -= 0.1 * parameter.grad
                parameter.grad.zero_()
        return loss

    as_one_device(use, optimizer=False)


@scenario
def parameters_are_frozen(rank: int, world: int) -> None:
    def use(held: list[nn.Parameter], call: Any, x: Tensor) -> Tensor:
        held[0].requires_grad_(x is not X[2])
        return backward(call, x)

    as_one_device(use)


@scenario
def values_are_written(rank: int, world: int) -> None:
    def use(held: list[nn.Parameter], call: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            held[0].clamp_(-0.1, 0.1)
            held[2].fill_(0.2) if x is X[3] else None
        return backward(call, x)

    as_one_device(use)


@scenario
def gradients_are_asked_for(rank: int, world: int) -> None:
    def use(held: list[nn.Parameter], call: Any, x: Tensor) -> Tensor:
        loss = call(x).square().mean()
        gradients = torch.autograd.grad(loss, held)
        with torch.no_grad():
            for parameter, gradient in zip(held, gradients):
                parameter.sub_(gradient, alpha=0.1)
        return loss

    as_one_device(use, optimizer=False)


@scenario
def the_object_stands_for_its_slice(rank: int, world: int) -> None:
    net = network()
    held, bias = net[0].weight, net[0].bias
    model = wrapped(net)
    backward(model, X[0])
    assert isinstance(held, nn.Parameter) and held.shape == (16, 8) and held.grad is net[0].weight.grad
    assert held.placements == net[0].weight.placements and held.to_local().shape == (8, 8)
    close(whole(held.detach() * 2), whole(net[0].weight.detach()) * 2)
    copied = copy.deepcopy(held)
    assert copied is not net[0].weight and torch.equal(whole(copied), whole(net[0].weight))
    assert hash(held) != hash(net[0].weight) and len({held, bias}) == 2  # an object of its own, as a key
    assert "of (16, 8), on rank" in repr(held) or not SUBCLASSES_HAVE_VIEWS


@scenario
def a_plain_tensor_from_before_takes_whole_values(rank: int, world: int) -> None:
    net = network()
    held = list(net.parameters())
    average = [p.detach().clone() * 2 for p in held]
    expected = [p.detach().clone().lerp(p.detach() * 2, 0.9) for p in held]
    backward(wrapped(net), X[0])
    with torch.no_grad():
        for a, p in zip(average, held):
            if not SUBCLASSES_HAVE_VIEWS:
                with pytest.raises(sw.SettingError, match=r"has a slice since the first call, and lerp_ is called"):
                    a.lerp_(p, 0.1)
                return
            a.lerp_(p, 0.1)
    close(average, expected)


@scenario
def a_gradient_of_a_value_from_before_the_first_call_is_an_error(rank: int, world: int) -> None:
    net = network()
    model = wrapped(net)
    penalty = sum(p.square().sum() for p in net.parameters())
    loss = model(X[0]).square().mean() + penalty
    with pytest.raises(
        sw.SettingError, match=r"a value that was computed of the parameter '2\.bias' before the"
    ) as caught:
        loss.backward()
    assert "after the first call" in caught.value.legal


@scenario
def a_penalty_is_added_outside_of_the_model(rank: int, world: int) -> None:
    """The penalty is added to the whole parameters, or by a backward of its own, as the page says."""
    net = network()
    one = copy.deepcopy(net)
    model = wrapped(net)
    backward(model, X[0]), backward(one, X[0])
    for apart in (False, True):
        for call, inner in ((model, net), (one, one)):
            inner.zero_grad()
            loss, penalty = call(X[1]).square().mean(), sum(p.abs().sum() for p in inner.parameters())
            if apart:
                loss.backward(), (0.01 * penalty).backward()
            else:
                (loss + 0.01 * (penalty.full_tensor() if isinstance(penalty, DTensor) else penalty)).backward()
        close(*({n: whole(p.grad) for n, p in inner.named_parameters()} for inner in (net, one)))


@pytest.fixture(scope="module")
def results() -> list[dict[str, str | None]]:
    sw.init(devices=2)
    backward(sw.AutoParallel(network()).dataset_strategy("full_batch"), X[0])  # what a capture loads, before the fork
    return run_ranks(run_scenarios, 2, SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_two_ranks(results: list[dict[str, str | None]], name: str) -> None:
    for rank, text in enumerate(results):
        assert text[name] is None, f"rank {rank}: {text[name]}"
