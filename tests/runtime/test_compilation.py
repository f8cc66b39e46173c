"""Compiled programs beside everything that changes what a program is (recomputed parts, weights that are stored in
parts and gathered again, dims that do not divide), on real processes with the losses of one device; and masks as a
compiler traces them, bit for bit those of the operator.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks, run_scenarios
from small_networks import D, draw, labels
from torch import Tensor, nn

import shardwright as sw
from shardwright.rules.counter_rng import key
from shardwright.runtime.compilation import _key, traced_mask

# -- programs


WORLD = 2
COMPILER = "aot_eager"  # captures and partitions as the default one does, and makes no C++ of it


class Net(nn.Module):
    """Seven classes, which two devices do not divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(8, 16, dtype=D), nn.Linear(16, 8, dtype=D)
        self.head = nn.Linear(8, 7, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.second(F.gelu(self.first(x)))))


def recomputed() -> sw.AutoParallel:
    net = Net()
    sw.shard(net.first, ((1, 1), (2, 1)))
    sw.shard(net.second, ((1, 2), (1, 2)))
    sw.recompute(net.first)
    sw.recompute(net.second, mp_comm_recompute=False)
    return wrapped(net)


def gathered_again() -> sw.AutoParallel:
    return wrapped(Net()).hsdp(threshold=0, optimizer_level="level3")


def in_parts_and_recomputed() -> sw.AutoParallel:
    net = Net()
    sw.recompute(net.first, parallel_optimizer_comm_recompute=True)
    return wrapped(net).hsdp(threshold=0, optimizer_level="level2")


def uneven() -> sw.AutoParallel:
    net = Net()
    sw.shard(net.head, ((1, 1), (2, 1)))
    return wrapped(net, uneven=True)


def wrapped(net: nn.Module, **settings: Any) -> sw.AutoParallel:
    model = sw.AutoParallel(net, nn.CrossEntropyLoss(), compile=COMPILER, **settings)
    return model.dataset_strategy("full_batch")


CASES: dict[str, Callable[[], sw.AutoParallel]] = {
    f.__name__: f for f in (recomputed, gathered_again, in_parts_and_recomputed, uneven)
}


def trained(call: Callable[[Tensor, Tensor], Tensor], net: nn.Module) -> list[float]:
    optimizer, out = None, []
    for step in range(3):
        loss = call(draw(4, 8, seed=step), labels(4, 7, seed=step))
        optimizer = optimizer or torch.optim.AdamW(net.parameters(), 1e-2)  # the first call cuts the parameters
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return out


def as_one_device(make: Callable[[], sw.AutoParallel]) -> Callable[[int, int], None]:
    def scenario(rank: int, world: int) -> None:
        plain, model = Net(), make()
        expected = trained(lambda x, y: F.cross_entropy(plain(x), y), plain)
        # What a compiler gives up on it runs as it is, and says nothing.
        torch._dynamo.reset()
        counts = torch._dynamo.utils.counters
        counts.clear()
        got = trained(model, model)
        assert max(abs(a - b) for a, b in zip(got, expected)) < 1e-10, (got, expected)
        assert counts["stats"]["unique_graphs"] == 1 and not counts["graph_break"], counts

    return scenario


def on_ranks(rank: int, world: int) -> dict[str, str | None]:
    return run_scenarios(rank, world, {name: as_one_device(make) for name, make in CASES.items()})


@pytest.fixture(scope="module")
def results() -> list[dict[str, str | None]]:
    torch.compile(torch.relu, backend=COMPILER)(torch.ones(1))  # its imports: once here, and not in every rank
    return run_ranks(on_ranks, WORLD)


@pytest.mark.parametrize("name", CASES)
def test_compiled_as_one_device(results: list[dict[str, str | None]], name: str) -> None:
    for rank, result in enumerate(results):
        assert result[name] is None, f"rank {rank}:\n{result[name]}"


def test_the_cases_are_what_they_say() -> None:
    """The cases are of plans for as many devices, in this process."""
    batch = draw(4, 8), labels(4, 7)
    plans = {}
    for name, make in CASES.items():
        model = make()
        net, options = model.net, {"uneven": True} if name == "uneven" else {}
        plans[name] = sw.plan(net, batch[:1], nn.CrossEntropyLoss(), batch[1], devices=WORLD, **options)
    assert plans["recomputed"].regions and plans["in_parts_and_recomputed"].regions
    assert plans["uneven"].parameters["head.weight"].local_shape(0)[0] == 4


# -- masks


mask = torch.ops.shardwright.mask.default


def seed_of(seed: int, call: int, micro: int = 0) -> torch.Tensor:
    return torch.tensor([seed if seed < 1 << 63 else seed - (1 << 64), call, 1, micro])


def test_keys() -> None:
    draws = random.Random(0)
    for _ in range(300):
        seed, call, number = draws.getrandbits(64), draws.randrange(1 << 20), draws.randrange(1 << 10)
        made = [int(x) & ((1 << 64) - 1) for x in _key(seed_of(seed, call), number)]
        assert tuple(made) == key(seed, call, number)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(
    "whole, size, starts, micro",
    [
        ((64,), (64,), {}, ()),
        ((7, 5), (7, 5), {}, ()),
        ((8, 6, 10), (4, 6, 5), {0: 4, 2: 5}, ()),
        ((3, 9), (3, 3), {1: 6}, ()),
        ((4, 3, 5), (2, 3, 5), {0: 2}, (0, 4, 1)),
        ((8, 7), (4, 7), {0: 2}, (0, 2, 4)),
        ((), (), {}, ()),
        ((0, 4), (0, 4), {}, ()),
    ],
)
def test_the_same_bits(whole: tuple, size: tuple, starts: dict[int, int], micro: tuple, p: float) -> None:
    for k in range(micro[1] if micro else 1):
        for dtype in (torch.bool, torch.float32, torch.bfloat16):
            args = (
                seed_of(2**63 + 12345, 7, k),
                [torch.tensor([start]) for start in starts.values()],
                None,
                list(starts),
                list(size),
                list(whole),
                3,
                p,
                dtype,
                torch.device("cpu"),
                list(micro),
            )
            expected, got = mask(*args), traced_mask(*args)
            assert got.dtype == expected.dtype and got.shape == expected.shape
            assert torch.equal(got, expected)
            assert p in (0.0, 1.0) or expected.numel() < 20 or 0 < expected.float().mean() < 1
