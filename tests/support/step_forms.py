"""Step functions in the forms that people write, each made for a model; the same function runs on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import shardwright as sw

D = torch.float64

#: Takes a model, returns the step: (x, y) -> what is compared with one device.
Form = Callable[[nn.Module], Callable[[Tensor, Tensor], Tensor]]


class Net(nn.Module):
    """Three layers, the first one marked where `cuts` says how."""

    def __init__(self, cuts: Any = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(12, 16, dtype=D) * 0.2)
        self.product = torch.matmul if cuts is None else sw.shard(torch.matmul, in_strategy=cuts)
        self.middle, self.last = nn.Linear(16, 16, dtype=D), nn.Linear(16, 4, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.relu(self.product(x, self.w)))))


def net(cuts: Any = None, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(cuts)


def batches(count: int = 3, rows: int = 16, seed: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(rows, 12, dtype=D, generator=generator), torch.randint(0, 4, (rows,), generator=generator)


loss_fn = nn.CrossEntropyLoss()


def functional(net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """MindSpore's tutorials: `value_and_grad`, and an optimizer that is called with gradients."""
    optimizer = sw.optimizer(torch.optim.Adam(net.parameters(), lr=1e-2))

    def forward_fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = net(x)
        return loss_fn(logits, y), logits

    grad_fn = sw.value_and_grad(forward_fn, None, optimizer.parameters, has_aux=True)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        (loss, logits), grads = grad_fn(x, y)
        optimizer(grads)
        assert logits.shape == (len(x), 4) and not logits.requires_grad
        return loss

    return train_step


def functional_by_hand(net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Gradients of a list of parameters, put where torch has them, and clipped there."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    grad_fn = sw.value_and_grad(lambda x, y: 10 * loss_fn(net(x), y), None, list(net.parameters()))

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss, grads = grad_fn(x, y)
        for parameter, gradient in zip(net.parameters(), grads):
            assert parameter.grad is None
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


def functional_accumulated(net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Gradients of two halves of the batch, summed, clipped by their norm; a schedule of learning rates."""
    optimizer = sw.optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    grad_fn = sw.value_and_grad(lambda x, y: loss_fn(net(x), y), None, optimizer)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        (first, a), (second, b) = (grad_fn(*half) for half in zip(x.chunk(2), y.chunk(2)))
        grads = [(g + h) / 2 for g, h in zip(a, b)]
        scale = min(1.0, 0.1 / (float(nn.utils.get_total_norm(grads)) + 1e-6))
        for gradient in grads:
            gradient.mul_(scale)
        optimizer(grads)
        schedule.step()
        return (first + second) / 2

    return train_step


def functional_scaled(net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """A GradScaler, whose scale grows at each step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    optimizer = sw.optimizer(torch.optim.Adam(net.parameters(), lr=1e-2), scaler=scaler)
    grad_fn = sw.value_and_grad(lambda x, y: loss_fn(net(x), y), None, optimizer.parameters)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        before = scaler.get_scale()
        loss, grads = grad_fn(x, y)
        optimizer(grads)
        assert scaler.get_scale() == 2 * before
        return loss

    return train_step


def gradients_of_inputs(net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Gradients of inputs and of weights."""
    optimizer = sw.optimizer(torch.optim.Adam(net.parameters(), lr=1e-2))
    grad_fn = sw.value_and_grad(lambda x, y: loss_fn(net(x), y), (0,), optimizer.parameters)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss, ((of_x,), grads) = grad_fn(x, y)
        optimizer(grads)
        return loss + of_x.square().sum()

    return train_step


def plain(net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """PyTorch: the loss is computed outside of the model."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train_step


def plain_accumulated(net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """PyTorch: two backwards, a GradScaler, clipping, a schedule."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros((), dtype=D)
        for half, label in zip(x.chunk(2), y.chunk(2)):
            loss = F.cross_entropy(net(half), label) / 2
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        return total

    return train_step


def transformed(net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """torch.func over the model, which is called once before: in processes the first call cuts its parameters."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def loss_of(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(net, parameters, (x,)), y)

    grad_fn = torch.func.grad_and_value(loss_of)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            net(x)
        grads, loss = grad_fn(dict(net.named_parameters()), x, y)
        for name, parameter in net.named_parameters():
            parameter.grad = grads[name]
        optimizer.step()
        return loss.detach()

    return train_step


FUNCTIONAL: tuple[Form, ...] = (
    functional,
    functional_by_hand,
    functional_accumulated,
    functional_scaled,
    gradients_of_inputs,
)
OUTSIDE: tuple[Form, ...] = (plain, plain_accumulated, transformed)


def on_one_device(form: Form, model: nn.Module, data: Any = None) -> tuple[list[float], nn.Module]:
    """The results of the step on one device, and the model after it. `model` itself is left as it is."""
    model = copy.deepcopy(model)
    step = form(model)
    return [float(step(x, y)) for x, y in (batches() if data is None else data)], model


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def mean_of_ranks(values: list[float]) -> list[float]:
    total = torch.tensor(values, dtype=D)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def close(got: list[float], expected: list[Any]) -> None:
    gap = max(abs(float(a) - float(b)) for a, b in zip(got, expected, strict=True))
    assert gap < 1e-11, (got, expected)
