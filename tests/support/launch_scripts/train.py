"""Trains on all processes of a run: ``train.py FOLDER [forever]``.

Each rank writes to ``FOLDER/rank_N.json`` what it is and the losses and weights of three steps; with ``forever`` it
then goes on until it is ended.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

import shardwright as sw

STEPS = 3


def network(devices: int) -> nn.Sequential:
    """Two layers, the first with its contracted dim cut; unmarked for one device."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 6)).double()
    if devices > 1:
        net[0] = sw.shard(net[0], ((1, devices), (1, devices), (1,)))
    return net


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of one step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 24, generator=generator, dtype=torch.float64), torch.arange(12) % 6


def train(net: nn.Module, loss_of, step: int) -> float:
    """One step of plain descent; its loss."""
    loss = loss_of(*batch(step))
    loss.backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return loss.item()


def on_one_device() -> tuple[list[float], list[list[float]]]:
    """The losses, and the weights of the last layer after them, without this library."""
    net = network(1)
    loss_fn = nn.CrossEntropyLoss()
    losses = [train(net, lambda x, y: loss_fn(net(x), y), step) for step in range(STEPS)]
    return losses, net[2].weight.tolist()


def main(folder: str, forever: bool) -> None:
    runtime = sw.init(timeout=60)
    net = network(runtime.devices)
    model = sw.AutoParallel(net, nn.CrossEntropyLoss()).dataset_strategy("full_batch")
    losses = [train(net, model, step) for step in range(STEPS)]
    weight = net[2].weight
    facts = {
        "pid": os.getpid(),
        "rank": runtime.rank,
        "size": runtime.devices,
        "processes": runtime.processes,
        "losses": losses,
        "weight": getattr(weight, "full_tensor", lambda: weight)().tolist(),
        "local": list(getattr(net[0].weight, "to_local", lambda: net[0].weight)().shape),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    }
    written = Path(folder, f"rank_{runtime.rank}.json")
    written.with_suffix(".part").write_text(json.dumps(facts))
    written.with_suffix(".part").rename(written)  # a reader finds all of it or nothing
    step = STEPS
    while forever:
        train(net, model, step)
        step += 1


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] == ["forever"])
