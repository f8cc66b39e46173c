"""Networks with marks that propagate, and their plans."""

from __future__ import annotations

from typing import Any

import torch
from small_networks import draw
from torch import Tensor, nn

import shardwright as sw

MODE = "sharding_propagation"


def planned(net: nn.Module, *inputs: Tensor, mode: str = MODE, **options: Any) -> sw.Plan:
    return sw.plan(net, inputs, parallel_mode=mode, **options)


class Chain(nn.Module):
    """product, ReLU, product; any of them marked."""

    def __init__(self, first: Any = None, relu: Any = None, second: Any = None, out: Any = None) -> None:
        super().__init__()
        self.w, self.w2 = nn.Parameter(draw(32, 16, seed=1)), nn.Parameter(draw(16, 16, seed=2))
        self.matmul, self.relu = sw.Operator(torch.matmul), sw.Operator(torch.relu)
        self.matmul2 = sw.Operator(torch.matmul)
        for operator, strategy in ((self.matmul, first), (self.relu, relu)):
            if strategy is not None:
                operator.shard(strategy)
        if second is not None or out is not None:
            self.matmul2.shard(second, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul2(self.relu(self.matmul(x, self.w)), self.w2)


FIRST = ((2, 4), (4, 1))
