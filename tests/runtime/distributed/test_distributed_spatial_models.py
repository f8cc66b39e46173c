"""Networks of images and volumes with spatial dims cut, on two, three and four real processes: the losses and
parameters of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks, run_scenarios
from small_networks import draw, labels
from spatial_networks import ResNet, UNet, Volumes, block, mark
from torch import Tensor, nn

import shardwright as sw
from shardwright.runtime.distributed import collectives

pytestmark = pytest.mark.long

STEPS = 5
FOLLOW = "sharding_propagation"
COMPILER = "aot_eager"

Model = Callable[[nn.Module, nn.Module], sw.AutoParallel]


def wrapped(net: nn.Module, loss: nn.Module, **options: Any) -> sw.AutoParallel:
    return sw.AutoParallel(net, loss, parallel_mode=FOLLOW, **options).dataset_strategy("full_batch")


def in_parts(net: nn.Module, loss: nn.Module) -> sw.AutoParallel:
    return wrapped(net, loss).hsdp(threshold=0, optimizer_level="level3")


def compiled(net: nn.Module, loss: nn.Module) -> sw.AutoParallel:
    return wrapped(net, loss, compile=COMPILER)


def recomputed(net: nn.Module, loss: nn.Module) -> sw.AutoParallel:
    for part in (net.down1, net.bottom, net.side1):
        sw.recompute(part)
    return wrapped(net, loss)


def staged(net: nn.Module, loss: nn.Module) -> sw.AutoParallel:
    return wrapped(net, loss).pipeline(stages=2, micro_batches=2, stage_config={"0": 0, "1": 1, "2": 1})


def chain() -> nn.Module:
    return nn.Sequential(block(2, 4, stride=2), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 3, 5, padding=2))


def convolution_and_pool() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.MaxPool2d(3, 1, 1))


def images(*shape: int, batch: int = 1) -> Callable[[], list[tuple[Tensor, Tensor]]]:
    return lambda: [(draw(batch, 2, *shape, seed=i), draw(batch, 3, *shape, seed=50 + i)) for i in range(STEPS)]


def photographs() -> list[tuple[Tensor, Tensor]]:
    return [(draw(1, 3, 64, 32, seed=i), labels(1, 8, seed=i)) for i in range(STEPS)]


def volumes() -> list[tuple[Tensor, Tensor]]:
    return [(draw(1, 1, 8, 16, 8, seed=i), draw(1, 2, 8, 8, 8, seed=50 + i)) for i in range(STEPS)]


def halves() -> list[tuple[Tensor, Tensor]]:
    return [(draw(2, 2, 16, 8, seed=i), draw(2, 3, 8, 4, seed=50 + i)) for i in range(STEPS)]


#: (number of ranks, network, batches, loss, cuts, the model)
CASES: dict[str, tuple[int, Callable[[], nn.Module], Callable[[], list], Callable, tuple[int, ...], Model]] = {
    "unet, rows": (4, UNet, images(16, 16), nn.MSELoss, (4, 1), wrapped),
    "unet, rows and columns": (4, UNet, images(16, 16), nn.MSELoss, (2, 2), wrapped),
    "unet, stored in parts": (4, UNet, images(16, 16), nn.MSELoss, (1, 2), in_parts),
    "unet, recomputed": (2, UNet, images(16, 16), nn.MSELoss, (2, 1), recomputed),
    "compiled": (2, convolution_and_pool, images(8, 8), nn.MSELoss, (2, 1), compiled),
    "resnet": (4, ResNet, photographs, nn.CrossEntropyLoss, (2, 2), wrapped),
    "volumes": (4, Volumes, volumes, nn.MSELoss, (2, 1, 2), wrapped),
    "two stages": (4, chain, halves, nn.MSELoss, (2, 1), staged),
    "two ranks": (2, UNet, images(16, 16), nn.MSELoss, (1, 2), wrapped),
    "three ranks": (3, UNet, images(24, 16), nn.MSELoss, (3, 1), wrapped),
}


def scenario(name: str) -> Callable[[int, int], None]:
    _, make, batches, make_loss, cuts, model_of = CASES[name]

    def run(rank: int, world: int) -> None:
        torch.manual_seed(1)
        net, loss = mark(make().double(), *cuts), make_loss()
        one = copy.deepcopy(net)
        sw.init()
        if name.endswith("compiled"):
            torch._dynamo.reset()
        model, optimizer = model_of(net, loss), None
        theirs = torch.optim.SGD(one.parameters(), 0.1, momentum=0.9)
        parts = 2 if name == "two stages" else 1
        for x, y in batches():
            got = model(x, y)
            optimizer = optimizer or torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)  # the call cuts parameters
            expected = sum(loss(one(a), b) for a, b in zip(x.chunk(parts), y.chunk(parts))) / parts
            torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-9, atol=1e-11)
            for value, step in ((got, optimizer), (expected, theirs)):
                value.backward()
                step.step()
                step.zero_grad()
        with model.whole() as plain:
            for key, b in one.state_dict().items():
                torch.testing.assert_close(
                    plain.state_dict()[key], b, rtol=1e-8, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}"
                )

    return run


def on_ranks(rank: int, world: int) -> dict[str, str | None]:
    return run_scenarios(rank, world, {name: scenario(name) for name, case in CASES.items() if case[0] == world})


@pytest.fixture(scope="module")
def results() -> dict[int, list[dict[str, str | None]]]:
    # The imports of a compiler, and of its partitioner: once here, and not in every rank.
    torch.compile(torch.relu, backend=COMPILER)(torch.ones(1, requires_grad=True))
    return {world: run_ranks(on_ranks, world) for world in sorted({case[0] for case in CASES.values()})}


@pytest.mark.parametrize("name", CASES)
def test_trains_as_one_device(results: dict[int, list[dict[str, str | None]]], name: str) -> None:
    for rank, result in enumerate(results[CASES[name][0]]):
        assert result[name] is None, f"rank {rank}:\n{result[name]}"


def own_slices(rank: int, world: int) -> tuple[int, int]:
    """Each rank feeds its own part of the rows and columns, and sends no more than the plan says."""
    torch.manual_seed(1)
    net = mark(nn.Sequential(block(2, 4, 5), nn.Conv2d(4, 3, 3, padding=1)).double(), 2, 2)
    one, loss = copy.deepcopy(net), nn.MSELoss()
    x, y = draw(1, 2, 16, 16), draw(1, 3, 16, 16, seed=1)
    sw.init()
    model = sw.AutoParallel(net, loss, parallel_mode=FOLLOW).dataset_strategy(((1, 1, 2, 2), (1, 1, 2, 2)))
    place = (..., slice(8 * (rank // 2), 8 * (rank // 2) + 8), slice(8 * (rank % 2), 8 * (rank % 2) + 8))
    plain, sent = collectives.exchange, [0]

    def counted(group: Any, x: Tensor, sends: Any = (), receives: Any = ()) -> Tensor:
        sent[0] += sum(sends) * x.element_size()
        return plain(group, x, sends, receives)

    collectives.exchange = counted
    got = model(x[place], y[place])
    got.backward()
    collectives.exchange = plain
    expected = loss(one(x), y)
    expected.backward()
    torch.testing.assert_close(got.detach(), expected.detach())
    for a, b in zip(net.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)
    message = sum(c.sent for c in model.plan.collectives(rank) if c.op in ("halo_exchange", "halo_reduce"))
    return sent[0], message


def test_ranks_send_what_the_plan_says() -> None:
    for sent, message in run_ranks(own_slices, 4):
        assert 0 < sent == message, (sent, message)
