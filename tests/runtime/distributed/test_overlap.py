"""Communication beside computation on libraries: what travels together, when it is issued, when it is waited for.

Counts and order are of rank 3 of 8 on torch's "fake" group. Numbers are of four Gloo processes that take the same path.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from collective_log import CollectiveLog, collective_log, rank_of_eight
from gpt import GPT, mark
from ranks import all_passed, run_ranks, run_scenarios
from small_networks import D
from torch import Tensor, nn

import shardwright as sw
from shardwright.runtime.distributed.buckets import block_of
from shardwright.runtime.distributed.process_groups import ProcessGroups

LAYERS, BATCH, LENGTH, VOCABULARY, RANKS = 4, 16, 8, 32, 4
LEVELS = ("level1", "level2", "level3")
#: Bytes of the gradient of a slice of the table of positions, which the program sums before it is put into the table.
POSITIONS = LENGTH * 32 * 8


class TokenLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = sw.Operator(F.cross_entropy)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.cross_entropy(logits.flatten(0, 1), target.flatten())


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=VOCABULARY, length=LENGTH, layers=LAYERS, width=32, heads=8).to(D)


def tokens(seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randint(VOCABULARY, (BATCH, LENGTH)), torch.randint(VOCABULARY, (BATCH, LENGTH))


def wrapped(net: GPT, plan: str, world: int) -> sw.AutoParallel:
    """data_parallel, marks (2 replicas of a tensor-parallel model), or a level of hsdp."""
    loss = TokenLoss()
    if plan.endswith("recompute"):
        for block in net.blocks:
            sw.recompute(block)
    if plan == "marks":
        mark(net, loss, 2, world // 2)
    made = sw.AutoParallel(net, loss, parallel_mode="semi_auto" if plan == "marks" else "data_parallel")
    if plan.partition(" ")[0] in LEVELS:
        made.hsdp(threshold=0, optimizer_level=plan.partition(" ")[0])
    return made.dataset_strategy("full_batch")


def logs(plan: str, fusion: float | None = None) -> tuple[CollectiveLog, CollectiveLog, sw.AutoParallel]:
    """The collectives of a forward and of its backward, on rank 3 of 8."""
    net, (x, y) = gpt(), tokens()
    with rank_of_eight(rank=3):
        model = wrapped(net, plan, 8)
        if fusion is not None:
            model.comm_fusion(allreduce=fusion)
        model(x, y).backward()
        with collective_log() as forward:
            loss = model(x, y)
        with collective_log() as backward:
            loss.backward()
    return forward, backward, model


def test_sums_of_gradients_are_waited_for_at_the_end_alone() -> None:
    _, backward, _ = logs("data_parallel", fusion=0.05)
    assert set(backward.counts()) == {"all_reduce"} and len(backward.sent) >= 3
    sums = [each for each in backward.sent if each.bytes > POSITIONS]
    last_issued = max(each.issued for each in sums)
    assert all(each.waited is not None and each.waited >= last_issued for each in sums)
    assert sums[0].issued < backward.operators // 2  # the first is issued while the backward computes


def test_a_bucket_of_a_library_has_25_mebibytes_on_any_number_of_ranks() -> None:
    _, backward, model = logs("data_parallel")
    assert sum(p.numel() for p in model.parameters()) * 8 < 25 << 20
    assert [each.kind for each in backward.sent if each.bytes > POSITIONS] == ["all_reduce"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_block_has_one_scatter_which_nothing_waits_for_before_the_end(level: str) -> None:
    _, backward, model = logs(level)
    blocks = {block_of(name) for name, _ in model.named_parameters()}
    scatters = [each for each in backward.sent if each.kind == "reduce_scatter"]
    assert len(scatters) <= len(blocks)
    assert sum(each.bytes for each in scatters) >= 8 * 0.9 * sum(p.numel() for p in model.parameters())
    last_issued = max(each.issued for each in scatters)
    assert all(each.waited is not None and each.waited >= last_issued for each in scatters)
    assert scatters[0].issued < backward.operators // 2


@pytest.mark.parametrize("level", LEVELS)
def test_weights_of_a_block_are_gathered_together_one_block_ahead(level: str) -> None:
    forward, backward, model = logs(level)
    blocks = {block_of(name) for name, _ in model.named_parameters()}
    gathers = [each for each in forward.sent if each.kind == "all_gather"]
    assert len(gathers) == len(blocks)
    layers = [each for each in gathers if each.bytes == max(g.bytes for g in gathers)]
    assert len(layers) == LAYERS
    for before, layer in zip(layers, layers[1:]):
        assert layer.waited is not None and before.waited is not None
        assert layer.issued < before.waited < layer.waited  # it travels while the layer before computes
        assert layer.waited - layer.issued > 20
    again = [each for each in backward.sent if each.kind == "all_gather"]
    if level != "level3":
        assert not again
        return
    assert len(again) <= len(blocks)
    layers = [each for each in again if each.bytes > max(g.bytes for g in again) // 2]
    assert len(layers) == LAYERS
    assert all(layer.waited is not None and layer.waited - layer.issued > 20 for layer in layers[1:])


def test_a_first_backward_gathers_each_weight_by_itself_and_the_next_one_together() -> None:
    net, (x, y) = gpt(), tokens()
    with rank_of_eight(rank=3):
        model = wrapped(net, "level3", 8)
        counts = []
        for _ in range(3):
            loss = model(x, y)
            with collective_log() as backward:
                loss.backward()
            counts.append(backward.counts()["all_gather"])
    assert counts[0] > 10 * LAYERS > counts[1] == counts[2]


def test_blocks_are_layers_of_the_model() -> None:
    assert block_of("net.blocks.3.up.weight") == "net.blocks.3"
    assert block_of("tokens.weight") == "tokens" and block_of("weight") == ""


# -- numbers -----------------------------------------------------------------------------------------------------------


def as_a_library() -> None:
    """Make process groups of this process as on NCCL: no exchanges of Gloo's, no shared memory."""
    made = ProcessGroups.__init__

    def init(self: ProcessGroups, *args: Any, **given: Any) -> None:
        made(self, *args, **(given | {"exchanges": False, "share": False}))

    ProcessGroups.__init__ = init


def steps(plan: str, accumulate: bool) -> Any:
    def scenario(rank: int, world: int) -> None:
        one, net = gpt(), gpt()
        loss_one, model = TokenLoss(), wrapped(net, plan, world)
        optimizers = [torch.optim.AdamW(n.parameters(), 1e-2) for n in (one, net)]
        for turn in range(3):
            for part in range(2 if accumulate else 1):
                x, y = tokens(2 * turn + part)
                wanted = loss_one(one(x), y)
                wanted.backward()
                if accumulate and part == 0:
                    with model.no_sync():
                        found = model(x, y)
                        found.backward()
                else:
                    found = model(x, y)
                    found.backward()
                torch.testing.assert_close(found.detach(), wanted.detach(), rtol=1e-9, atol=1e-12)
                with torch.no_grad():  # gathered, and never asked for by a backward
                    assert abs(model(x, y).item() - wanted.item()) < 1e-9 or accumulate
            for (name, p), q in zip(one.named_parameters(), net.parameters()):
                gradient = q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad
                torch.testing.assert_close(gradient, p.grad, rtol=1e-8, atol=1e-12, msg=f"{plan}: {name}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    return scenario


SCENARIOS = {
    f"{plan}{', accumulated' if accumulate else ''}": steps(plan, accumulate)
    for plan in ("data_parallel", "marks", *LEVELS, "level1 recompute", "level3 recompute")
    for accumulate in (False, True)
}


def on_a_library(rank: int, world: int) -> Any:
    as_a_library()
    return run_scenarios(rank, world, SCENARIOS)


def test_numbers_are_those_of_one_device() -> None:
    all_passed(run_ranks(on_a_library, RANKS))
