"""The two networks that are measured, as one writes them for one device; operators can be marked.

tutorial   32 x 784 -> 512 -> 512 -> 10, cross entropy: small messages, the strategies of the tutorial
mlp        256 x 1024 -> 4096 -> 1024, mean squared error: data parallel 2 by tensor parallel 4
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MLP", "TUTORIAL", "Network"]

DEVICES = 8


def unmarked(operator: Callable, in_strategy: tuple) -> Callable:
    """The stand-in for `shardwright.shard` where a network runs on one device."""
    return operator


class Tutorial(nn.Module):
    """Three products; rows, columns and contracted dims are cut in turn, so that every kind of collective occurs."""

    def __init__(self, shard: Callable = unmarked) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(784, 512) * 0.01)
        self.w2 = nn.Parameter(torch.randn(512, 512) * 0.01)
        self.w3 = nn.Parameter(torch.randn(512, 10) * 0.01)
        self.matmul1 = shard(torch.matmul, in_strategy=((2, 4), (4, 1)))
        self.relu1 = shard(torch.relu, in_strategy=((4, 1),))
        self.matmul2 = shard(torch.matmul, in_strategy=((1, 8), (8, 1)))
        self.relu2 = shard(F.relu, in_strategy=((8, 1),))

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.matmul1(x.flatten(1), self.w1))
        x = self.relu2(self.matmul2(x, self.w2))
        return x @ self.w3


class Mlp(nn.Module):
    """Two products: the first by columns, the second by rows, the batch in two."""

    def __init__(self, shard: Callable = unmarked) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(1024, 4096) * 0.02)
        self.w2 = nn.Parameter(torch.randn(4096, 1024) * 0.02)
        self.matmul1 = shard(torch.matmul, in_strategy=((2, 1), (1, 4)))
        self.relu = shard(torch.relu, in_strategy=((2, 4),))
        self.matmul2 = shard(torch.matmul, in_strategy=((2, 4), (4, 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul2(self.relu(self.matmul1(x, self.w1)), self.w2)


@dataclass(frozen=True)
class Network:
    """A network with its loss, its batch and its optimizer.

    Attributes:
        name: how tables call it.
        make: ``make(shard) -> module``; the same values each time.
        loss_fn: the loss.
        input, target: shapes; `classes`: the target holds numbers of classes.
        learning_rate: of plain SGD; large enough that a wrong gradient shows in the losses.
        cuts: per parameter ``(dim, parts, stride)``: rank r holds part (r // stride) % parts; None: all of it.
    """

    name: str
    module: type[nn.Module]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    input: tuple[int, ...]
    target: tuple[int, ...]
    classes: int | None
    learning_rate: float
    cuts: tuple[tuple[int, int, int] | None, ...]

    def make(self, shard: Callable = unmarked) -> nn.Module:
        torch.manual_seed(0)
        return self.module(shard)

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.input, generator=generator)
        if self.classes is not None:
            return x, torch.randint(0, self.classes, self.target, generator=generator)
        return x, torch.randn(self.target, generator=generator)

    def slices(self, whole: list[Tensor], rank: int) -> list[Tensor]:
        """A rank's slices of the parameters."""
        return [
            w if cut is None else w.chunk(cut[1], cut[0])[rank // cut[2] % cut[1]]
            for w, cut in zip(whole, self.cuts, strict=True)
        ]


TUTORIAL = Network(
    "tutorial", Tutorial, nn.CrossEntropyLoss(), (32, 1, 28, 28), (32,), 10, 1e-2, cuts=((0, 4, 1), (0, 8, 1), None)
)
MLP = Network("mlp", Mlp, nn.MSELoss(), (256, 1024), (256, 1024), None, 1.0, cuts=((1, 4, 1), (0, 4, 1)))
