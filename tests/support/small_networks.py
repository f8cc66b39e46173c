"""Small models that several tests train, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import shardwright as sw

D = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def labels(count: int, classes: int = 8, seed: int = 0) -> Tensor:
    return torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(seed))


class Apply(nn.Module):
    """``f(self, *inputs)`` on a module that holds an 8×8 weight ``w`` and whatever is named: tensors become buffers."""

    def __init__(self, f: Any, **held: Any) -> None:
        super().__init__()
        self.f, self.w = f, nn.Parameter(draw(8, 8, seed=1))
        for name, value in held.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.f(self, *inputs, **named)


class Marked(nn.Module):
    """Two marked products, a marked ReLU, a biased layer without a mark."""

    def __init__(
        self, first: Any = ((2, 4), (4, 1)), relu: Any = ((4, 1),), second: Any = ((1, 8), (8, 1)), out: Any = None
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.w1 = nn.Parameter(torch.randn(8, 16, dtype=D, generator=generator))
        self.w2 = nn.Parameter(torch.randn(16, 16, dtype=D, generator=generator))
        self.matmul1, self.relu1 = sw.shard(torch.matmul, first), sw.shard(torch.relu, relu)
        self.matmul2 = sw.shard(torch.matmul, second, out)
        self.head = nn.Linear(16, 8, dtype=D)
        for parameter in self.head.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.matmul2(self.relu1(self.matmul1(x, self.w1)), self.w2)))
