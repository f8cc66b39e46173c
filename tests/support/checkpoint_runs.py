"""Parts that the tests of checkpoints share: a network of four layers planned in every way, its training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_networks import D, draw, labels
from torch import Tensor, nn

import shardwright as sw
from shardwright.checkpoint import checkpoint_folders
from shardwright.checkpoint.checkpoint_folders import LOCK

CROSS_ENTROPY = nn.CrossEntropyLoss()


def unlocked(path: Path) -> set[str]:
    """The names in the folder of a run, without its lock, which stays as long as the model is there."""
    return {name.name for name in path.iterdir()} - {LOCK}


class Net(nn.Module):
    """Four linear layers with a dropout between; the batch norm is for modes that know it alone."""

    def __init__(self, width: int = 16, norm: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=D) for _ in range(4))
        for i, layer in enumerate(self.layers):
            layer.weight.data, layer.bias.data = draw(width, width, seed=i) / 4, draw(width, seed=10 + i)
        if tied:
            self.layers[2].weight = self.layers[1].weight
        self.norm = nn.BatchNorm1d(width, dtype=D) if norm else nn.Identity()
        self.head = nn.Linear(width, 8, dtype=D)
        self.head.weight.data, self.head.bias.data = draw(8, width, seed=20), draw(8, seed=21)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = torch.relu(layer(x))
        x = F.dropout(self.norm(x), 0.25, self.training)
        for layer in self.layers[2:]:
            x = torch.relu(layer(x))
        return self.head(x)


def marked(net: Net, *strategies: tuple) -> Net:
    """Marks on its layers, in their order."""
    for layer, strategy in zip(net.layers, strategies):
        sw.shard(layer, strategy)
    return net


#: By name, how the network is wrapped on so many devices.
PLANS: dict[str, Callable[[int], sw.AutoParallel]] = {
    "rows and columns": lambda n: _wrap(
        marked(Net(), ((1, 1), (n, 1)), ((1, n), (1, n)), ((n, 1), (1, 1)), ((n // 2, 1), (2, 1)))
    ),
    "columns": lambda n: _wrap(
        marked(Net(), ((1, n), (1, n)), ((1, 1), (n, 1)), ((2, 1), (n // 2, 1)), ((1, n), (1, n)))
    ),
    "data_parallel": lambda n: _wrap(Net(), "data_parallel"),
    "level1": lambda n: _wrap(marked(Net(), ((2, 1), (n // 2, 1)))).hsdp(threshold=0),
    "level2": lambda n: _wrap(Net(), "data_parallel").hsdp(2, 0, "level2"),
    "level3": lambda n: _wrap(Net()).hsdp(threshold=0, optimizer_level="level3"),
    "two stages": lambda n: _wrap(marked(Net(), ((1, 1), (n // 2, 1)))).pipeline(
        stages=2, micro_batches=4, stage_config={"layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1, "head": 1}
    ),
    "as many stages": lambda n: _wrap(Net()).pipeline(
        stages=n, micro_batches=4, stage_config={f"layers.{i}": i * n // 4 for i in range(4)} | {"head": n - 1}
    ),
}


def _wrap(net: nn.Module, mode: str = "semi_auto") -> sw.AutoParallel:
    return sw.AutoParallel(net, CROSS_ENTROPY, mode).dataset_strategy("full_batch")


def batch(step: int) -> tuple[Tensor, Tensor]:
    return draw(16, 16, seed=100 + step), labels(16, seed=100 + step)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01, **options)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int, scheduler: Any = None
) -> list[float]:
    """The losses of the steps from `first` to before `last`."""
    losses = []
    for step in range(first, last):
        x, y = batch(step)
        loss = model(x, y) if isinstance(model, sw.AutoParallel) else CROSS_ENTROPY(model(x), y)
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def alike(ours: list[float], theirs: list[float]) -> None:
    """Losses that differ by the order of sums at most."""
    torch.testing.assert_close(torch.tensor(ours, dtype=D), torch.tensor(theirs, dtype=D), rtol=1e-8, atol=1e-8)


#: Of a save in one file for all, and in one for each rank.
KINDS = pytest.mark.parametrize("whole", [True, False], ids=["integrated", "parts"])


def trained(name: str = "rows and columns", devices: int = 4) -> tuple[sw.AutoParallel, torch.optim.Optimizer]:
    """A model and its optimizer after a step, in one process."""
    torch.manual_seed(5)
    sw.init(devices=devices)
    model = PLANS[name](devices)
    optimizer = sgd(model)
    train(model, optimizer, 0, 1)
    return model, optimizer


def steps(path: Path) -> list[int]:
    """The steps of the checkpoints of a run."""
    return list(checkpoint_folders.steps_in(path))
