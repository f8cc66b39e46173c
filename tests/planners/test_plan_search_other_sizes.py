"""Plans reused at other sizes, and where they are not: empty batches, and parameters that are tied since."""

from __future__ import annotations

import pytest
import torch
from one_device import close, parallel
from small_networks import D, draw
from torch import Tensor, nn

import shardwright as sw

pytestmark = pytest.mark.filterwarnings("ignore::shardwright.RecaptureWarning")

SEARCHES = pytest.mark.parametrize("mode", ["dynamic_programming", "recursive_programming"])


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(8, 8, bias=False, dtype=D) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).sum(0)


def searched(net: nn.Module, mode: str) -> sw.AutoParallel:
    return parallel(net, devices=4, mode=mode, cluster=sw.Cluster.of("h100x8", 4).with_free_links())


@SEARCHES
def test_batches_of_other_sizes(mode: str) -> None:
    net = Two()
    net.first, net.second = nn.Linear(8, 8, dtype=D), nn.Linear(8, 4, dtype=D)
    model = searched(net, mode)
    for rows in (8, 16, 0, 8, 0, 1, 0):
        x = draw(rows, 8)
        close(model(x), model.net(x), f"{rows} rows")


@SEARCHES
@pytest.mark.parametrize("back", [False, True])
def test_weights_that_are_tied_later(mode: str, back: bool) -> None:
    net = Two()
    own, other = net.second.weight, net.first.weight
    if back:
        net.second.weight = other
    model, x = searched(net, mode), draw(8, 8)
    close(model(x), net(x))
    net.second.weight = own if back else other
    close(model(x), net(x))
    model(x).sum().backward()
    gradients = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    net(x).sum().backward()
    close(gradients, [p.grad for p in net.parameters()])
