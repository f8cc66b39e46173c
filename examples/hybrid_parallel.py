"""Hybrid parallel: each device holds a slice of a weight that you cut yourself, and you place the collective.

    python examples/hybrid_parallel.py                                    two devices in one process
    shardwright run --worker_num=2 examples/hybrid_parallel.py            two processes

A weight of 512×128 is 512×64 on each of two devices; its product with x is summed over the last dim, and the devices'
sums are summed. Losses and gradients are those of the network of 512×128 on one device.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import shardwright as sw

FEATURES, COLUMNS, BATCH = 512, 128, 32


def whole_weight() -> torch.Tensor:
    return torch.rand(FEATURES, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.01


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # A function of the rank: a process calls it with its own, one process for all devices with each.
        self.weight = sw.layerwise_parallel(lambda rank: whole_weight().chunk(sw.world_size(), dim=1)[rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.matmul(x, self.weight)
        x = torch.sum(x, dim=-1)
        return sw.ops.all_reduce(x)


class OneDevice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole_weight())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sum(torch.matmul(x, self.weight), dim=-1)


def train(model: nn.Module, steps: int) -> list[float]:
    """The losses of some steps, of batches that all devices are fed whole."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, fused=True)
    losses = []
    for step in range(steps):
        x = torch.rand(BATCH, FEATURES, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.sum(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args(argv)
    sw.init(devices=2)
    model = sw.AutoParallel(Network(), parallel_mode="hybrid_parallel").dataset_strategy("full_batch")
    losses, expected = train(model, args.steps), train(OneDevice(), args.steps)
    if sw.rank() == 0:
        for step, (loss, one) in enumerate(zip(losses, expected), 1):
            print(f"step {step}: loss {loss:.4f}, on one device {one:.4f}")
    return losses


if __name__ == "__main__":
    main()
