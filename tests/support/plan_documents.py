"""Plans that are written as documents: many models, what a hand changes in one, what a rank sends."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import layout_functional
import operator_functional
import torch
import torch.nn.functional as F
from gpt import GPT, mark
from resnet_like import ResNetLike, expanded_cross_entropy
from torch import nn

import shardwright as sw
from shardwright.planfile.document_writer import written

DEVICES = 8


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = sw.Operator(F.cross_entropy)

    def forward(self, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.cross_entropy(scores.flatten(0, 1), target.flatten())


def gpt(marked: bool = False, dropout: float = 0.0, vocabulary: int = 64, **given: Any) -> sw.Plan:
    with torch.device("meta"):
        net, loss = GPT(vocabulary=vocabulary, length=16, layers=1, width=32, heads=8, dropout=dropout), Loss()
    if marked:
        mark(net, loss, 2, 4)
    tokens = meta(8, 16, dtype=torch.int64)
    return sw.plan(net, (tokens,), loss, tokens, devices=DEVICES, **given)


def tutorial(script: Any = operator_functional, **given: Any) -> sw.Plan:
    with torch.device("meta"):
        net = script.Network(torch.float32)
    return sw.plan(
        net, (meta(32, 1, 28, 28),), nn.CrossEntropyLoss(), meta(32, dtype=torch.int64), devices=DEVICES, **given
    )


def resnet(**given: Any) -> sw.Plan:
    with torch.device("meta"):
        net = ResNetLike()
    return sw.plan(
        net, (meta(16, 3, 16, 16),), expanded_cross_entropy, meta(16, dtype=torch.int64), devices=DEVICES, **given
    )


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor, words):
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * 3, None, None


@torch.library.custom_op("document_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: grad * 2)
sw.rule(doubled, "... -> ...")


class Odd(nn.Module):
    """A graph with all that stands beside plain operators: an operator and a function of the user's, a constant,
    buffers that change, complex and infinite numbers, a dtype, outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.product = sw.shard(torch.matmul, ((2, 4), (4, 1)), ((8, 1),))
        self.weight = nn.Parameter(torch.empty(16, 16))
        self.table = torch.arange(16.0)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> dict[str, Any]:
        x = Triple.apply(doubled(self.norm(self.linear(x))), 3.0, {"how": "so"}) + self.table + shift
        x = self.product(x.clamp(min=-math.inf), self.weight).expand(3, -1, -1)
        return {"scores": x.to(torch.float64), "largest": x.detach().amax(-1), "seven": 7}


def odd(**given: Any) -> sw.Plan:
    return sw.plan(Odd(), (torch.empty(16, 8), torch.empty(16)), devices=DEVICES, **given)


def hybrid() -> sw.Plan:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = sw.layerwise_parallel(nn.Parameter(torch.empty(8, 2)))
            self.out = nn.Linear(2, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(sw.ops.all_reduce(x @ self.w))

    return sw.plan(
        Net(),
        (meta(16, 8),),
        nn.MSELoss(),
        meta(16, 4),
        devices=4,
        parallel_mode="hybrid_parallel",
        dataset_strategy="data_parallel",
    )


PLANS: dict[str, Callable[[], sw.Plan]] = {
    "tutorial": tutorial,
    "tutorial by Layouts": lambda: tutorial(layout_functional),
    "tutorial, its own part fed": lambda: tutorial(dataset_strategy="data_parallel"),
    "tutorial, fed by Layouts": lambda: tutorial(
        dataset_strategy=(sw.Layout((2, 2, 2), ("a", "b", "c"))(("b", "c"), "None", "None", "None"), (8,))
    ),
    "tutorial, data_parallel": lambda: tutorial(parallel_mode="data_parallel", dataset_strategy="data_parallel"),
    "tutorial, stand_alone": lambda: tutorial(parallel_mode="stand_alone"),
    "tutorial, hsdp": lambda: tutorial(hsdp={"shard_size": 2, "threshold": 0, "optimizer_level": "level3"}),
    "tutorial, hsdp, allowance": lambda: tutorial(
        hsdp={"threshold": 0, "optimizer_level": "level3"}, comm_memory="1MB"
    ),
    "tutorial, on a cluster": lambda: tutorial(cluster="h100x8"),
    "tutorial, propagated": lambda: tutorial(parallel_mode="sharding_propagation"),
    "tutorial, searched": lambda: tutorial(parallel_mode="dynamic_programming", cluster="h100x8"),
    "gpt": lambda: gpt(dropout=0.1),
    "gpt, marked": lambda: gpt(marked=True),
    "gpt, recomputed": lambda: gpt(marked=True, recompute=lambda op: op.kind == "gelu" or op.kind == "linear"),
    "gpt, hsdp": lambda: gpt(marked=True, hsdp={"threshold": 0, "optimizer_level": "level2"}),
    "gpt, searched": lambda: gpt(parallel_mode="dynamic_programming", hsdp={}),
    "gpt, uneven": lambda: gpt(marked=True, vocabulary=61, uneven=True),
    "resnet": resnet,
    "resnet, data_parallel": lambda: resnet(parallel_mode="data_parallel"),
    "resnet, hsdp": lambda: resnet(hsdp={}),
    "odd": odd,
    "odd, uneven": lambda: odd(uneven=True),
    "hybrid_parallel": hybrid,
}


@cache
def made(name: str) -> sw.Plan:
    return PLANS[name]()


def edited(path: Path, plan: sw.Plan, name: str, section: str = "operators", **changes: Any) -> int:
    """Write the plan with other words in one line; the line's number. None takes a word out."""
    out, number = [], 0
    inside = False
    for i, line in enumerate(written(plan).splitlines(), 1):
        inside = line.startswith(f'  "{section}"') or (inside and not line.startswith('  "'))
        if inside and f'"name": "{name}",' in line:
            words = json.loads(line.strip().rstrip(",")) | changes
            words = {key: value for key, value in words.items() if value is not None}
            line, number = "    " + json.dumps(words) + ("," if line.endswith(",") else ""), i
        out.append(line)
    path.write_text("\n".join(out) + "\n")
    assert number
    return number


def sent(plan: sw.Plan, rank: int = 0) -> list[tuple]:
    """The collectives of a rank, whatever the operators are called: the marked ones have names of their own."""
    return [(c.op, c.ranks, c.shape, c.phase, c.cause) for c in plan.collectives(rank)]
