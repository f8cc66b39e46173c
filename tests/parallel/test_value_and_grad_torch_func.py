"""torch.func over a parallel model: gradients of one device, by its own parameters and by others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from ranks import all_passed, run_ranks, run_scenarios
from step_forms import batches, close, loss_fn, net, whole
from torch import Tensor

import shardwright as sw

WORLD = 4
MARKS = ((2, 2), (2, 1))


def descended(model: Callable[..., Tensor], plain: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    """Descent in functional style: parameters are a dict of tensors, and the model keeps its own."""
    parameters = {name: p.detach() for name, p in plain.named_parameters()}

    def loss_of(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(torch.func.functional_call(model, parameters, (x,)), y)

    losses = []
    for x, y in batches():
        grads, loss = torch.func.grad_and_value(loss_of)(parameters, x, y)
        losses.append(float(loss.detach()))
        parameters = {name: p - 0.5 * grads[name] for name, p in parameters.items()}
    return losses, parameters


def check(level: str | None) -> None:
    plain = net(MARKS)
    expected, one = descended(plain, copy.deepcopy(plain))
    model = sw.AutoParallel(plain).dataset_strategy("full_batch")
    if level is not None:
        model.hsdp(threshold=0, optimizer_level=level)
    with torch.no_grad():
        model(next(iter(batches()))[0])
    before = {name: whole(p.detach()).clone() for name, p in plain.named_parameters()}
    losses, parameters = descended(model, plain)
    close(losses, expected)
    for name, p in plain.named_parameters():
        assert torch.allclose(whole(parameters[name]), one[name], rtol=0, atol=1e-11), name
        assert torch.equal(whole(p.detach()), before[name]) and p.grad is None, name


@pytest.mark.parametrize("level", [None, "level3"])
def test_parameters_of_ones_own_in_one_process(level: str | None) -> None:
    sw.init(devices=WORLD)
    check(level)


def on_ranks(level: str | None) -> Callable[[int, int], None]:
    def scenario(rank: int, world: int) -> None:
        sw.init()
        check(level)

    return scenario


def other_cuts(rank: int, world: int) -> None:
    """Values that do not lie as the parameters do."""
    sw.init()
    plain = net(MARKS)
    model, x = sw.AutoParallel(plain).dataset_strategy("full_batch"), next(iter(batches()))[0]
    whole_ones = {name: p.detach().clone() for name, p in plain.named_parameters()}
    model(x)
    loss_of = torch.func.grad(lambda parameters: torch.func.functional_call(model, parameters, (x,)).sum())
    with pytest.raises(sw.SettingError, match=r"functional_call with 'w' as a plain tensor, of which this rank has"):
        loss_of(whole_ones)
    # Before torch 2.13 a value that is computed of a parameter is a plain DTensor.
    with pytest.raises(sw.SettingError, match=r"the parameter 'w' is (a value that was computed of slices|a DTensor)"):
        torch.func.functional_call(model, {name: p * 2 for name, p in plain.named_parameters()}, (x,))
    model(x)  # the parameters are back


@pytest.mark.filterwarnings("ignore")
def test_parameters_of_ones_own_on_ranks() -> None:
    scenarios = {str(level): on_ranks(level) for level in (None, "level1", "level3")} | {"other cuts": other_cuts}
    all_passed(run_ranks(run_scenarios, WORLD, scenarios))


def test_gradients_of_inputs_and_vector_jacobian_products() -> None:
    sw.init(devices=WORLD)
    plain = net(MARKS)
    model, x = sw.AutoParallel(plain), next(iter(batches()))[0]
    of_x = torch.func.grad(lambda x: model(x).square().sum())(x)
    torch.testing.assert_close(of_x, torch.func.grad(lambda x: plain(x).square().sum())(x), rtol=0, atol=1e-12)
    rows, product = torch.func.vjp(model, x)
    expected, plainly = torch.func.vjp(plain, x)
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(product(rows)[0], plainly(expected)[0], rtol=0, atol=1e-12)


class Several(nn.Module):
    """Returns a dict of tensors; counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 4, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, *, scale: float) -> dict[str, Any]:
        self.calls += 1
        rows = self.layer(x)
        return {"rows": rows * scale, "best": rows.argmax(1)}


def test_results_of_any_structure_and_buffers() -> None:
    sw.init(devices=WORLD)
    plain = Several()
    model, x = sw.AutoParallel(plain), next(iter(batches()))[0]

    def loss_of(parameters: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        out = torch.func.functional_call(model, parameters, (x,), {"scale": 2.0})
        return out["rows"].square().mean(), out

    grads, (_, out) = torch.func.grad_and_value(loss_of, has_aux=True)(dict(model.named_parameters()))
    loss = (2 * plain.layer(x)).square().mean()
    expected = torch.autograd.grad(loss, list(plain.parameters()))
    torch.testing.assert_close([*grads.values()], list(expected), rtol=0, atol=1e-12)
    assert torch.equal(out["best"], plain.layer(x).argmax(1)) and float(plain.calls) == 1


@pytest.mark.parametrize(
    "name, transform",
    {
        "torch.func.vmap": lambda model, x: torch.func.vmap(model)(x.expand(3, *x.shape)),
        "a forward-mode derivative": lambda model, x: torch.func.jvp(model, (x,), (x,)),
        "a transform of torch.func inside another one, around a call": lambda model, x: torch.func.grad(
            lambda x: torch.func.grad(lambda x: model(x).sum())(x).sum()
        )(x),
    }.items(),
)
def test_other_transforms_are_refused(name: str, transform: Callable[..., Any]) -> None:
    sw.init(devices=WORLD)
    model = sw.AutoParallel(net())
    with pytest.raises(sw.SettingError, match=rf"{name}(.|\n)*sw\.value_and_grad"):
        transform(model, next(iter(batches()))[0])


def test_a_second_backward_is_refused() -> None:
    sw.init(devices=WORLD)
    plain = net()
    model, x = sw.AutoParallel(plain), next(iter(batches()))[0]
    _, loss = torch.func.grad_and_value(lambda p: torch.func.functional_call(model, p, (x,)).sum())(
        dict(plain.named_parameters())
    )
    with pytest.raises(sw.SettingError, match=r"a second backward of a call under torch\.func"):
        loss.backward()
