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

#: Those whose kernels and constructors work on fake tensors.
OPTIMIZERS = "SGD Adam AdamW Adagrad Adadelta Adamax NAdam RAdam RMSprop Rprop".split()


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
                found = fake.outcome(
                    fake.gpt,
                    fake.TOKENS,
                    fake.TokenLoss,
                    prepared=lambda net, criterion, model: fake.mark(net, criterion, 2, 4),
                    optimizer={"optimizer": kind, **how},
                )
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:400]}
            print(json.dumps({"name": f"{name} {how}", **found}), flush=True)


if __name__ == "__main__":
    main()
