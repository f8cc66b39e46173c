"""Tensors without elements, as a partial rotary embedding leaves where it turns all of a head: they are cut and sent
too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_device import assert_as_one_device, close
from ranks import run_ranks
from small_networks import draw
from torch import Tensor, nn

import shardwright as sw

STRATEGIES = (((2, 2), (2, 1)), ((4, 1), (1, 1)), ((2, 1), (1, 2)), ((1, 2), (2, 2)), ((1, 4), (4, 1)))
SEARCHES = ("recursive_programming", "dynamic_programming")


class Net(nn.Module):
    """All columns on one side of a cut, none on the other."""

    def __init__(self, strategy: Any) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(draw(8, 8)), nn.Parameter(draw(8, 8, seed=3))
        self.first, self.second = sw.shard(torch.matmul, strategy), sw.shard(torch.matmul, ((1, 4), (4, 1)))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.first(x, self.w)
        turned, passed = h[..., :8], h[..., 8:]
        h = torch.cat([torch.tanh(turned), passed * 2], -1)
        return self.second(h, self.v), passed.relu().sum(), passed


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("mode", ["semi_auto", "sharding_propagation"])
def test_empty_tensors_are_converted(strategy: tuple, mode: str) -> None:
    model = assert_as_one_device(Net(strategy), (draw(8, 8),), devices=4, mode=mode)
    assert model.plan.cost > 0


@pytest.mark.parametrize("mode", SEARCHES)
def test_empty_tensors_are_priced(mode: str) -> None:
    assert_as_one_device(Net(((2, 1), (1, 2))), (draw(8, 8),), devices=4, mode=mode)


def train(strategy: Any) -> tuple[Tensor, ...]:
    net = Net(strategy)
    model = sw.AutoParallel(net).dataset_strategy("full_batch")
    outputs = model(draw(8, 8))
    sum((x**2).sum() for x in outputs).backward()
    whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in (net.w, net.v)]
    return tuple(x.detach() for x in (*outputs, *whole))


def on_ranks(rank: int, world: int) -> list[tuple[Tensor, ...]]:
    sw.init()
    return [train(strategy) for strategy in STRATEGIES[:3]]


def test_empty_tensors_are_sent_nowhere_among_processes() -> None:
    each = run_ranks(on_ranks, 4)
    sw.init(devices=4)
    for i, strategy in enumerate(STRATEGIES[:3]):
        expected = train(strategy)
        assert expected[2].shape == (8, 0)
        for made in each:
            close(made[i], expected)
