"""Norms, clipping, GradScaler's check and optimizers on the accelerator of `fake_accelerator`: a script.

The script prints a line of JSON for each optimizer: its name, and the error, or where loss and parameters are.
"""

from __future__ import annotations

import inspect
import json
import math
import warnings
from typing import Any

import fake_accelerator as fake
import torch
from torch import nn, optim

import shardwright as sw

#: Those whose kernels and constructors work on fake tensors.
OPTIMIZERS = "SGD Adam AdamW Adagrad Adadelta Adamax NAdam RAdam RMSprop Rprop".split()


class Layers(nn.Module):
    """Two products on unlike meshes, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def mark(net: nn.Module, criterion: nn.Module, model: sw.AutoParallel) -> None:
    sw.shard(net.first, ((2, 1), (4, 1)))
    sw.shard(net.last, ((1, 8), (1, 8)))


def clipped(model: nn.Module, optimizer: type[optim.Optimizer], **options: Any) -> optim.Optimizer:
    """An optimizer of a model whose gradients have been unscaled and clipped."""
    parameters = list(model.parameters())
    found, scale = torch.zeros((), device=fake.DEVICE), torch.ones((), device=fake.DEVICE)
    torch._amp_foreach_non_finite_check_and_unscale_([p.grad for p in parameters], found, scale)
    for order in (2.0, 1.0, 3.0, math.inf):
        for foreach in (None, False):
            assert nn.utils.clip_grad_norm_(parameters, 1.0, order, foreach=foreach).device == fake.DEVICE
    nn.utils.clip_grad_value_(parameters, 1.0)
    return optimizer(parameters, 1e-3, **options)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fake.prepare()
    fake.optimizer_of = clipped
    for name in OPTIMIZERS:
        kind = getattr(optim, name)
        ways = [{}, {"foreach": True}, *({"fused": True} for _ in range("Adam" in name))]
        for how in [w for w in ways if w.keys() <= inspect.signature(kind).parameters.keys()]:
            try:
                found = fake.outcome(Layers, fake.ROWS, nn.MSELoss, prepared=mark, optimizer={"optimizer": kind, **how})
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:400]}
            print(json.dumps({"name": f"{name} {how}", **found}), flush=True)


if __name__ == "__main__":
    main()
