"""The compiled program beside everything that changes what a program is: recomputed parts, weights that are stored in
parts and gathered again, dims that do not divide. On real processes the losses are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks, run_scenarios
from small_networks import D, draw, labels
from torch import Tensor, nn

import shardwright as sw

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
