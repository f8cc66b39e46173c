"""`sw.value_and_grad` and `sw.optimizer` by themselves, on one device, and their errors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import shardwright as sw

D = torch.float64


@pytest.fixture
def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2, dtype=D)


X, Y = torch.randn(4, 3, dtype=D), torch.randn(4, 2, dtype=D)


def expected(net: nn.Linear) -> tuple[torch.Tensor, ...]:
    x = X.clone().requires_grad_()
    return torch.autograd.grad(F.mse_loss(net(x), Y), (net.weight, net.bias, x))


def test_the_gradients_of_what_is_asked_for(net: nn.Linear) -> None:
    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(net(x), y)

    weight, bias, x = expected(net)
    close = torch.testing.assert_close
    close(sw.value_and_grad(loss_of)(X, Y)[1], x)  # by default the first argument, as MindSpore has it
    close(sw.value_and_grad(loss_of, (0,))(X, Y)[1], (x,))
    close(sw.value_and_grad(loss_of, None, net)(X, Y)[1], (weight, bias))
    close(sw.value_and_grad(loss_of, None, net.weight)(X, Y)[1], weight)
    close(sw.value_and_grad(loss_of, None, [net.bias])(X, Y)[1], (bias,))
    close(sw.value_and_grad(loss_of, None, net.parameters())(X, Y)[1], (weight, bias))
    close(sw.value_and_grad(loss_of, None, torch.optim.SGD(net.parameters()))(X, Y)[1], (weight, bias))
    close(sw.value_and_grad(loss_of, 0, net.weight)(X, Y)[1], (x, weight))
    assert net.weight.grad is None and net.bias.grad is None


def test_the_value_and_what_comes_beside_it(net: nn.Linear) -> None:
    grad_fn = sw.value_and_grad(lambda x, *, scale: (scale * net(x).sum(), net(x), "text"), None, net, has_aux=True)
    (loss, rows, text), _ = grad_fn(X, scale=2.0)
    assert torch.equal(loss, 2 * net(X).sum()) and torch.equal(rows, net(X)) and text == "text"
    assert not loss.requires_grad and not rows.requires_grad


def test_gradients_that_were_there_stay_and_others_are_none(net: nn.Linear) -> None:
    apart = nn.Parameter(torch.ones(2, dtype=D))
    net.weight.grad = torch.full_like(net.weight, 7.0)
    with torch.no_grad():  # differentiates all the same
        _, (weight, other) = sw.value_and_grad(lambda: net(X).sum(), None, [net.weight, apart])()
    assert other is None and torch.equal(net.weight.grad, torch.full_like(net.weight, 7.0))
    assert torch.allclose(weight, X.sum(0).expand(2, 3)) and net.bias.grad is None
    net.requires_grad_(False)
    assert sw.value_and_grad(lambda: net(X).sum(), None, net.weight)()[1] is None


def test_an_optimizer_steps_with_the_gradients_that_it_is_called_with(net: nn.Linear) -> None:
    one = copy.deepcopy(net)
    plain = torch.optim.Adam(one.parameters(), lr=0.1)
    given = torch.optim.Adam(net.parameters(), lr=0.1)
    optimizer = sw.optimizer(given)
    assert optimizer is given and isinstance(optimizer, torch.optim.Adam) and type(optimizer).__name__ == "Adam"
    assert sw.optimizer(optimizer) is optimizer
    assert list(optimizer.parameters) == [net.weight, net.bias] and optimizer.parameters[1] is net.bias
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    net.bias.grad = torch.ones(2, dtype=D)
    optimizer((torch.ones(2, 3, dtype=D), None))
    schedule.step()
    assert torch.equal(net.bias.grad, torch.ones(2, dtype=D)) and net.weight.grad is None
    one.weight.grad = torch.ones(2, 3, dtype=D)
    plain.step()
    assert torch.equal(net.weight, one.weight) and torch.equal(net.bias, one.bias)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    for counterpart in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(counterpart) is type(optimizer) and callable(counterpart)
        assert counterpart.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_a_scaler_steps_and_skips_what_is_not_finite(net: nn.Linear) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = sw.optimizer(torch.optim.SGD(net.parameters(), lr=1.0), scaler=scaler)
    before = net.weight.detach().clone()
    _, grads = sw.value_and_grad(lambda: net(X).sum(), None, optimizer.parameters)()
    assert torch.allclose(grads[0], 4 * X.sum(0).expand(2, 3))
    optimizer([torch.full_like(g, torch.inf) for g in grads])
    assert torch.equal(net.weight, before) and scaler.get_scale() == 2.0
    optimizer([g / 2 for g in grads])
    assert torch.allclose(net.weight, before - X.sum(0), rtol=0, atol=1e-12)


REFUSED: dict[str, tuple[Callable[[nn.Linear], Any], str]] = {
    "no function": (lambda net: sw.value_and_grad(3), "value_and_grad"),
    "nothing to differentiate by": (lambda net: sw.value_and_grad(net, None), "neither inputs nor weights"),
    "a position that is none": (lambda net: sw.value_and_grad(net, "x"), "grad_position='x'"),
    "no parameter": (lambda net: sw.value_and_grad(net, None, [3]), "with a int, which is no parameter"),
    "no weights": (lambda net: sw.value_and_grad(net, None, []), "without a parameter"),
    "no argument": (lambda net: sw.value_and_grad(net, 1)(X), "argument 1 of Linear is missing"),
    "an integer": (lambda net: sw.value_and_grad(lambda i: net(X).sum(), 0)(torch.ones(2, dtype=torch.long)), "int64"),
    "no loss": (lambda net: sw.value_and_grad(lambda x: net(x), 0)(X), r"shape \[4, 2\](.|\n)*one element"),
    "a tuple": (lambda net: sw.value_and_grad(lambda x: (net(x).sum(), x), 0)(X), r"a tuple(.|\n)*has_aux=True"),
    "no optimizer": (lambda net: sw.optimizer(net), r"sw\.optimizer\(Linear\)"),
    "gradients of others": (lambda net: sw.optimizer(torch.optim.SGD(net.parameters()))([X]), "1 gradients for 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes(name: str, net: nn.Linear) -> None:
    wrong, message = REFUSED[name]
    with pytest.raises(sw.SettingError, match=message):
        wrong(net)


def test_a_scaler_inside_of_a_captured_function_is_refused(net: nn.Linear) -> None:
    sw.init(devices=2)
    scaler = torch.amp.GradScaler("cpu")
    grad_fn = sw.value_and_grad(lambda x: scaler.scale(net(x).sum()), None, net)
    with pytest.raises(sw.CaptureError, match=r"test_value_and_grad\.py:\d+: a GradScaler scales(.|\n)*sw\.optimizer"):
        sw.AutoParallel(lambda x: grad_fn(x))(X)
