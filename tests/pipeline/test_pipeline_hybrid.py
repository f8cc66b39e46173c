"""All at once: the script of the hybrid tutorial, and a GPT of two stages whose batch and products are split too."""

from __future__ import annotations

import contextlib
import io
from functools import cache, lru_cache

import multi_dimensional_hybrid as script
import pytest
import torch
from data import digits
from gpt import GPT, mark
from language import Loss, passages
from one_device import close
from ranks import run_ranks
from torch import nn

import shardwright as sw

STEPS, TOLERANCE = 20, 1e-6


@lru_cache
def one_device() -> list[float]:
    """The script's network in plain PyTorch."""
    torch.manual_seed(0)
    net = script.Network(torch.float64)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=1e-2), []
    for image, label in digits(32, dtype=torch.float64, limit=STEPS):
        loss = nn.L1Loss()(net(image), label.double().unsqueeze(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def as_the_user_runs_it() -> tuple[list[float], str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        losses = script.main(["--steps", str(STEPS), "--dtype", "float64"])
    return losses, printed.getvalue()


def largest_difference(ours: list[float]) -> float:
    assert len(ours) == len(one_device()) == STEPS
    return max(abs(a - b) for a, b in zip(ours, one_device()))


def test_the_script_in_one_process() -> None:
    losses, printed = as_the_user_runs_it()
    assert largest_difference(losses) < TOLERANCE
    assert losses[-1] < losses[0]
    assert [line.rsplit(" ", 1)[0] for line in printed.splitlines()] == [
        f"epoch: 0, step: {s}, loss is" for s in range(0, STEPS, 10)
    ]


def test_what_the_script_plans() -> None:
    """Two stages of four devices, their weights in parts on each, both ReLUs computed again."""
    with torch.device("meta"):
        net = script.Network()
        batch = torch.empty(32, 1, 28, 28), torch.empty(32, 1)
    sw.recompute(net.relu1), sw.recompute(net.relu2)
    plan = sw.plan(
        net,
        batch[:1],
        nn.L1Loss(),
        batch[1],
        parallel_mode="recursive_programming",
        hsdp={},
        pipeline=dict(stages=2, micro_batches=4, stage_config=script.STAGES),
    )
    assert [o.op for o in plan.stages[0].plan.operators if o.op != "send"] == ["flatten", "linear", "relu"]
    assert [region.operators for stage in plan.stages for region in stage.plan.regions] == [("relu",), ("relu_1",)]
    weights = {"layer1.weight": range(0, 4), "layer2.weight": range(4, 8)}
    for name, ranks in weights.items():
        size = [torch.Size(plan.parameters[name].local_shape(rank)).numel() for rank in range(8)]
        whole = torch.Size(plan.parameters[name].shape).numel()
        assert size == [whole // 4 if rank in ranks else 0 for rank in range(8)]


def both(rank: int, world: int) -> tuple[list[float], list[torch.Tensor]]:
    return as_the_user_runs_it()[0], gpt_losses()


@cache
def by_rank() -> list[tuple[list[float], list[torch.Tensor]]]:
    return run_ranks(both, 8)


@pytest.mark.long
def test_the_script_in_eight_processes() -> None:
    losses = [rank[0] for rank in by_rank()]
    assert all(rank == losses[0] for rank in losses), "the loss is the same on every rank, to the bit"
    assert largest_difference(losses[0]) < TOLERANCE


# -- GPT ---------------------------------------------------------------------------------------------------------------

LENGTH, LAYERS = 16, 2


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(length=LENGTH, layers=LAYERS, width=32, heads=4).double()


def gpt_losses(steps: int = 2) -> list[torch.Tensor]:
    """Losses and norms of gradients of 2 stages by 2 parts of the batch by 2 parts of the products."""
    sw.init(devices=8)
    net, loss_fn = gpt(), Loss()
    mark(net, loss_fn, 2, 2)
    for i, block in enumerate(net.blocks):
        sw.set_stage(block, i * 2 // LAYERS)
        sw.recompute(block)
    sw.set_stage(net.norm, 1), sw.set_stage(net.head, 1)
    model = sw.AutoParallel(net, loss_fn).pipeline(2, "1f1b", 4).hsdp(threshold=0, optimizer_level="level3")
    return trained(model.dataset_strategy("full_batch"), net, steps)


def trained(model: nn.Module, net: nn.Module, steps: int) -> list[torch.Tensor]:
    optimizer, out = torch.optim.AdamW(net.parameters(), lr=3e-3), []
    for batch in passages(8, LENGTH, limit=steps):
        loss = model(*batch)
        loss.backward()
        out += [loss.detach(), nn.utils.clip_grad_norm_(net.parameters(), 1.0).detach()]
        optimizer.step()
        optimizer.zero_grad()
    return out


@lru_cache
def gpt_on_one_device() -> list[torch.Tensor]:
    net, loss_fn = gpt(), Loss()
    return trained(lambda x, y: loss_fn(net(x), y), net, 2)


def test_gpt_in_one_process() -> None:
    close(gpt_losses(), gpt_on_one_device())


def test_gpt_in_eight_processes() -> None:
    for rank, (_, losses) in enumerate(by_rank()):
        close(losses, gpt_on_one_device(), f"rank {rank}")
