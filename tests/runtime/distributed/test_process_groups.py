"""Process groups: programs of one process share them, whichever model and batch size they are of."""

from __future__ import annotations

import copy
from datetime import timedelta

import torch
import torch.distributed as dist
from library_model import library
from one_device import close
from pipeline_networks import Chain, batches, setting
from ranks import all_passed, run_ranks, run_scenarios
from torch import nn

import shardwright as sw
from shardwright.runtime.distributed.process_groups import group_of_ranks, groups_of_world
from shardwright.torch_private import number_of_groups


def trained(width: int, rows: int, pipeline: dict | None = None) -> None:
    """A step of a new model, cut over groups of two of the four ranks, against one device."""
    net, (pair,) = Chain(width=width), batches(1, rows=rows, width=width)
    one = copy.deepcopy(net)
    for layer in net.layers:
        sw.shard(layer, ((1, 2), (1, 2), (1,)))
    model = sw.AutoParallel(net, nn.MSELoss(), parallel_mode="semi_auto").dataset_strategy("full_batch")
    if pipeline is not None:
        model.pipeline(**pipeline)
    loss, expected = model(*pair), nn.MSELoss()(one(pair[0]), pair[1])
    loss.backward(), expected.backward()
    close(loss.detach(), expected.detach(), "loss")


def programs_share_their_groups(rank: int, world: int) -> None:
    trained(16, 16)
    made = number_of_groups()
    assert made > 1
    for width, rows in ((16, 32), (32, 16), (16, 16)):
        trained(width, rows)
    assert number_of_groups() == made


def pipelines_share_their_groups(rank: int, world: int) -> None:
    with library("communicator"):
        trained(16, 16, setting("1f1b", 2))
        made = number_of_groups()
        for scheduler, width in (("1f1b", 32), ("gpipe", 16)):
            trained(width, 16, setting(scheduler, 2))
        assert number_of_groups() == made


def another_timeout_has_another_group(rank: int, world: int) -> None:
    pair = (0, 1) if rank < 2 else (2, 3)
    usual, patient = group_of_ranks(pair), group_of_ranks(pair, timedelta(seconds=77))
    assert usual is group_of_ranks(pair) and patient is not usual
    assert patient is group_of_ranks(pair, timedelta(seconds=77))


def groups_that_all_ranks_make(rank: int, world: int) -> None:
    several = ((0, 3), (1, 2))
    made = groups_of_world(several)
    assert all(a is b for a, b in zip(made, groups_of_world(several)))
    mine = made[0 if rank in several[0] else 1]
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=mine)
    assert x.item() == 3.0


SCENARIOS = {
    f.__name__: f
    for f in (
        programs_share_their_groups,
        pipelines_share_their_groups,
        another_timeout_has_another_group,
        groups_that_all_ranks_make,
    )
}


def on_ranks(rank: int, world: int) -> dict[str, str | None]:
    sw.init()
    return run_scenarios(rank, world, SCENARIOS)


def test_programs_of_a_process_share_groups() -> None:
    all_passed(run_ranks(on_ranks, 4))
