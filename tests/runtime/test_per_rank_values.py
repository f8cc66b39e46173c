"""Losses outside of the model, in processes: gradients are those of the mean of the ranks' losses."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from ranks import all_passed, run_ranks, run_scenarios
from torch import Tensor

import shardwright as sw

D = torch.float64
WORLD = 4


class WithOwnLoss(nn.Module):
    """Returns a loss of the whole batch beside its rows, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3, dtype=D)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.layer(x)
        return F.mse_loss(rows, y), rows


def gradients(net: nn.Module) -> list[Tensor]:
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in net.parameters()]


def close(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b) and all(torch.allclose(x, y, rtol=0, atol=1e-13) for x, y in zip(a, b)), (a, b)


def parallel(net: nn.Module, mode: str) -> sw.AutoParallel:
    return sw.AutoParallel(net, parallel_mode=mode).enable_gradients_mean()


def a_loss_inside_is_whole_and_one_outside_is_each_ranks_own(mode: str) -> Callable[[int, int], None]:
    def scenario(rank: int, world: int) -> None:
        net = WithOwnLoss()
        x, y = torch.randn(8, 6, dtype=D), torch.randn(8, 3, dtype=D)
        one = copy.deepcopy(net)
        loss, rows = one(x, y)
        (loss + rows.square().mean()).backward()
        model = parallel(net, mode)
        loss, rows = model(x.chunk(world)[rank], y.chunk(world)[rank])
        assert rows.shape == (2, 3)
        (loss + rows.square().mean()).backward()
        close(gradients(net), gradients(one))

    return scenario


def a_model_of_another_models_rows(mode: str) -> Callable[[int, int], None]:
    def scenario(rank: int, world: int) -> None:
        first, second = nn.Linear(6, 5, dtype=D), nn.Linear(5, 3, dtype=D)
        ones = copy.deepcopy((first, second))
        x = torch.randn(8, 6, dtype=D)

        def loss_of(a: Callable[..., Tensor], b: Callable[..., Tensor], x: Tensor) -> Tensor:
            rows = a(x)
            return b(rows.tanh()).square().mean() + rows.square().mean()  # the first model's gradient comes on two ways

        whole = x.clone().requires_grad_()
        loss_of(*ones, whole).backward()
        mine = x.chunk(world)[rank].clone().requires_grad_()
        models = parallel(first, mode), parallel(second, mode)
        for _ in range(2):
            mine.grad = None
            for net in (first, second):
                net.zero_grad()
            loss_of(*models, mine).backward()
            close(gradients(first) + gradients(second), gradients(ones[0]) + gradients(ones[1]))
            close([mine.grad], [whole.grad.chunk(world)[rank]])

    return scenario


def a_gradient_that_is_differentiated_again(rank: int, world: int) -> None:
    """The gradient of a mean over rows is that of one device; a line says that one of a sum is not."""
    net, x = nn.Sequential(nn.Linear(6, 5, dtype=D), nn.Tanh(), nn.Linear(5, 1, dtype=D)), torch.randn(8, 6, dtype=D)
    one, whole, mine = copy.deepcopy(net), x.clone().requires_grad_(), x.chunk(world)[rank].clone().requires_grad_()
    (expected,) = torch.autograd.grad(one(whole).mean(), whole, create_graph=True)
    loss = parallel(net, "data_parallel")(mine).mean()
    with pytest.warns(UserWarning, match=r"1/4 of this rank's own(.|\n)*full_batch"):
        (made,) = torch.autograd.grad(loss, mine, create_graph=True)
    close([made.detach()], [expected.detach().chunk(world)[rank]])


@pytest.mark.filterwarnings("ignore")
def test_losses_on_ranks() -> None:
    cases = (a_loss_inside_is_whole_and_one_outside_is_each_ranks_own, a_model_of_another_models_rows)
    modes = ("semi_auto", "data_parallel", "dynamic_programming")
    scenarios = {f"{case.__name__} {mode}": case(mode) for case in cases for mode in modes}
    scenarios["chained hybrid"] = a_model_of_another_models_rows("hybrid_parallel")
    scenarios["a gradient of a gradient"] = a_gradient_that_is_differentiated_again
    all_passed(run_ranks(run_scenarios, WORLD, scenarios))
