"""``torch.testing.assert_close`` of parameters of which each rank has a slice: as on one device, on all ranks alike."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from one_device import close
from ranks import run_ranks, run_scenarios
from small_networks import D, draw
from torch import nn
from torch.testing import assert_close

import shardwright as sw
from shardwright.runtime.distributed.dtensors import SUBCLASSES_HAVE_VIEWS

X = draw(8, 8)


def begun() -> tuple[nn.Sequential, sw.AutoParallel, nn.Sequential]:
    sw.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8, dtype=D), nn.Tanh(), nn.Linear(8, 8, dtype=D))
    one = copy.deepcopy(net)
    sw.shard(net[0], ((1, 1), (2, 1)))
    sw.shard(net[2], ((1, 2), (1, 2)))
    model = sw.AutoParallel(net).dataset_strategy("full_batch")
    model(X).square().mean().backward(), one(X).square().mean().backward()
    assert net[0].weight.to_local().shape == (4, 8)
    return net, model, one


def equal_values_are_close(rank: int, world: int) -> None:
    net, _, one = begun()
    for p, plain in zip(net.parameters(), one.parameters()):
        assert_close(p, plain), assert_close(plain, p), assert_close(p, p), assert_close(p.data, plain.data)
        close(p.grad.full_tensor(), plain.grad)
        assert_close(p.grad, plain.grad)
    assert_close(dict(net.named_parameters()), dict(one.named_parameters()))
    assert_close(list(net.parameters()), list(one.parameters()))


def a_difference_on_one_rank_is_said_on_all(rank: int, world: int) -> None:
    net, model, one = begun()
    other = copy.deepcopy(model).net
    with torch.no_grad():
        one[0].weight[7, 3] = 5
        other[0].weight[7, 3] = 5
    for theirs in (one, other):
        with pytest.raises(AssertionError, match=r"Mismatched elements: 1 / 64(.|\n)*at index \(7, 3\)"):
            assert_close(net[0].weight, theirs[0].weight)


def the_last_model_puts_torchs_own_back(rank: int, world: int) -> None:
    comparison = pytest.importorskip("torch.testing._comparison")
    gc.collect()
    before = vars(comparison).copy()
    made = begun()
    changed = [name for name, value in before.items() if vars(comparison)[name] is not value]
    assert len(changed) <= 1
    del made
    gc.collect()
    assert all(vars(comparison)[name] is value for name, value in before.items())


SCENARIOS: dict[str, Callable[[int, int], None]] = {
    scenario.__name__: scenario
    for scenario in (
        equal_values_are_close,
        a_difference_on_one_rank_is_said_on_all,
        the_last_model_puts_torchs_own_back,
    )
}


@pytest.mark.skipif(not SUBCLASSES_HAVE_VIEWS, reason="parameters are plain DTensors with this torch")
def test_on_two_ranks() -> None:
    for rank, texts in enumerate(run_ranks(run_scenarios, 2, SCENARIOS)):
        for name, text in texts.items():
            assert text is None, f"rank {rank}, {name}: {text}"
