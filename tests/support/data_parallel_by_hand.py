"""Data parallelism by hand: a copy of the network per device, each on its part of the batch, and averages taken."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from one_device import close, parallel
from torch import Tensor, nn


def assert_as_copies(
    net: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    devices: int,
    rate: float = 0.1,
) -> dict[str, Tensor]:
    """Train a network in data_parallel, and as many copies: losses, gradients, and the state after each step agree,
    where the copies' losses, gradients and running statistics are averaged.

    Args:
        batches: inputs and targets of the whole batch; the loss is a mean over its rows.
        rate: of SGD.

    Returns:
        The state of the copies after the last step.
    """
    copies = [copy.deepcopy(net) for _ in range(devices)]
    model = parallel(net, loss_fn, devices=devices, mode="data_parallel", dataset="data_parallel")
    for step, (x, target) in enumerate(batches):
        losses = [
            loss_fn(own(part), wanted) for own, part, wanted in zip(copies, x.chunk(devices), target.chunk(devices))
        ]
        theirs = torch.stack(losses).mean()
        theirs.backward()
        ours = model(x, target)
        ours.backward()
        close(ours, theirs, f"loss of step {step}")
        with torch.no_grad():
            for mine, *parts in zip(net.parameters(), *(own.parameters() for own in copies)):
                gradient = torch.stack([p.grad for p in parts]).sum(0)  # each loss counted by its share of the mean
                close(mine.grad, gradient, f"gradients of step {step}")
                for p in (mine, *parts):
                    p -= rate * gradient
                    p.grad = None
            for parts in zip(*(own.buffers() for own in copies)):
                average = torch.stack([b.double() for b in parts]).mean(0)
                for b in parts:
                    b.copy_(average)
        close(dict(net.state_dict()), dict(copies[0].state_dict()), f"state after step {step}")
    return dict(copies[0].state_dict())
