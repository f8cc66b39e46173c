"""A small model with one habit, and its training in parallel beside plain PyTorch.

A habit is a forward of `Habit` (two layers, of which the first is cut 2 x 2 on four devices). It is trained for five
steps on one
device and on four, beside plain PyTorch: outputs, gradients, parameters, buffers and whatever else the habit leaves
    behind.
"""

from __future__ import annotations

import contextlib
import copy
import io
import random
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from one_device import close, parallel
from torch import Tensor, nn

import shardwright as sw

D = torch.float64
STEPS = 5
COUNT, NAMES = 0, []


@dataclass
class Config:
    beta: float = 2.0
    calls: int = 0


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8, dtype=D)
        self.register_buffer("e", torch.zeros((), dtype=D))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Habit(nn.Module):
    beta_of_class = 2.0

    def __init__(self, f: Callable[[Habit, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.head, self.drop = Inner(), nn.Linear(8, 4, dtype=D), nn.Dropout(0.0)
        self.register_buffer("mean", torch.zeros(8, dtype=D))
        self.register_buffer("before", torch.zeros(8, dtype=D))
        self.register_buffer("queue", torch.zeros(6, 8, dtype=D))
        self.register_buffer("hidden", torch.ones(8, dtype=D), persistent=False)
        self.table = torch.ones(8, dtype=D)
        self.f, self.beta, self.calls, self.time, self.first = f, 2.0, 0, 0.0, True
        self.config, self.space = Config(), types.SimpleNamespace(beta=2.0)
        self.stats, self.scales, self.saved, self.cache = {"calls": 0}, [2.0, 3.0], [], {}
        self.shape, self.last = None, None
        self.random, self.numpy = random.Random(0), numpy.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, x)

    def out(self, h: Tensor) -> Tensor:
        return self.head(torch.tanh(h))

    def scale(self, h: Tensor) -> Tensor:
        return h * 2


def batches() -> list[Tensor]:
    return [torch.randn(8, 8, dtype=D, generator=torch.Generator().manual_seed(s)) + s for s in range(STEPS)]


def left_behind(net: Habit) -> dict[str, Any]:
    """Python state that a habit may change."""
    return {
        "calls": net.calls,
        "inner": net.inner.calls,
        "time": net.time,
        "first": net.first,
        "config": net.config.calls,
        "stats": net.stats,
        "shape": net.shape,
        "cache": net.cache,
        "count": COUNT,
        "names": list(NAMES),
    }


def run_both(
    f: Callable,
    devices: int,
    between: Callable[[Any, int], None] = lambda net, step: None,
    loss: Callable[[], Callable] | None = None,
    prepare: Callable[[Habit], Any] = lambda net: None,
    *,
    text: bool = False,
    marked: bool = True,
) -> sw.AutoParallel:
    """Train copies of a habit in parallel and in plain PyTorch, step by step, and compare.

    Args:
        between: called with a model before each of its steps.
        loss: makes a loss function, one for each of the two; None: outside.
        prepare: called with each of the two models.
        text: whether what is printed is compared.
        marked: whether the first layer is cut.
    """
    global COUNT
    net = Habit(f)
    one = copy.deepcopy(net)
    cut = 2 if devices == 4 else 1
    if marked:
        sw.shard(net.inner.fc, ((cut, 1), (cut, 1)))
    prepare(net), prepare(one)
    losses = (loss(), loss()) if loss else (None, None)
    model = parallel(net, losses[0], devices=devices)
    ours, theirs = (torch.optim.SGD(n.parameters(), 0.1) for n in (net, one))
    start, NAMES[:] = COUNT, []
    made: list[list[dict]] = [[], []]
    written: list[str] = []
    for side, (called, inner, optimizer) in enumerate(((model, net, ours), (one, one, theirs))):
        COUNT, NAMES[:] = start, []
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            for step, x in enumerate(batches()):
                between(inner, step)
                if loss is None:
                    value = called(x)
                    value = (value**2).mean()
                else:
                    value = model(x, x[:, :4]) if side == 0 else losses[1](one(x), x[:, :4])
                if value.requires_grad:
                    value.backward()
                gradients = {n: None if p.grad is None else p.grad.clone() for n, p in inner.named_parameters()}
                made[side].append(
                    {
                        "loss": value.detach().clone(),
                        "gradients": gradients,
                        "buffers": {n: b.clone() for n, b in inner.named_buffers()},
                        "left": copy.deepcopy(left_behind(inner)),
                    }
                )
                optimizer.step(), optimizer.zero_grad()
        written.append(out.getvalue())
    COUNT, NAMES[:] = start, []
    for step, (mine, yours) in enumerate(zip(*made)):
        close(mine, yours, f"step {step}")
    assert written[0] == written[1]
    assert bool(written[1]) == text
    assert not any(isinstance(v, Tensor) and type(v) is not Tensor for m in net.modules() for v in vars(m).values())
    return model


def counter_of_the_program(m, x):
    global COUNT
    COUNT += 1
    return m.out(m.inner(x))
