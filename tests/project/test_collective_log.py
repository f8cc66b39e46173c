"""The log of collectives itself: what it says of a data-parallel step of one rank of eight."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from collective_log import collective_log, rank_of_eight
from torch import nn

import shardwright as sw
from shardwright.layout import Digit, Layout
from shardwright.redistribution import redistribution
from shardwright.runtime.distributed import collectives
from shardwright.runtime.distributed.collectives import bind_all
from shardwright.runtime.distributed.process_groups import ProcessGroups


def test_the_sums_of_a_step() -> None:
    net, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), torch.randn(4, 16)
    with rank_of_eight():
        model = sw.AutoParallel(net, nn.MSELoss(), parallel_mode="data_parallel").dataset_strategy("data_parallel")
        model(x, x)
        with collective_log() as forward:
            loss = model(x, x)
        with collective_log() as backward:
            loss.backward()
    assert forward.kinds() == [("all_reduce", torch.float32)]  # the loss
    assert backward.kinds() == [("all_reduce", torch.float32)] and backward.sent[0].ranks == 8
    assert backward.bytes("all_reduce") >= 4 * sum(p.numel() for p in net.parameters())


def test_when_each_is_issued_and_waited_for() -> None:
    x = torch.ones(8)
    with rank_of_eight(), collective_log() as log:
        work = dist.all_reduce(x, async_op=True)
        x + 1
        work.wait()
        later = torch.ops._c10d_functional.all_gather_into_tensor(x, 8, dist.group.WORLD.group_name)
        x + 1
        x + 1
        torch.ops._c10d_functional.wait_tensor(later)
        dist.all_reduce(x, async_op=True)
    first, second, third = log.sent
    assert (first.kind, first.bytes, first.waited - first.issued) == ("all_reduce", 32, 1)
    assert (second.kind, second.bytes, second.waited - second.issued) == ("all_gather", 32, 2)
    assert third.waited is None
    assert log.counts() == {"all_reduce": 2, "all_gather": 1}


def test_a_library_is_asked_by_its_groups_own_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functional collectives take three times the host's time: programs that torch.compile traces alone have them."""
    for name in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "wait"):
        monkeypatch.setattr(collectives, f"functional_{name}", None)
    rows, columns = Layout.from_cuts(8, (8, 1, 1)), Layout.from_cuts(8, (1, 8, 1))
    whole = Layout.replicated(8, 3)
    terms = whole.with_partial((Digit(8, 1),))
    with rank_of_eight(rank=3), collective_log() as log:
        groups = ProcessGroups(8, 3)
        for source, target in ((rows, whole), (rows, columns), (terms, whole), (terms, rows)):
            x = torch.ones(source.local_shape((8, 16, 4)))
            for step in bind_all(redistribution(source, target), tuple(x.shape), 3, groups):
                x = step(x)
            assert tuple(x.shape) == tuple(target.local_shape((8, 16, 4)))
    assert [each.kind for each in log.sent] == ["all_gather", "all_to_all", "all_reduce", "reduce_scatter"]
    assert all(each.waited is not None for each in log.sent)
