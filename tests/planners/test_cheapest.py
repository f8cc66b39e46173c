"""No search answers with a plan that is dearer, at our own prices, than the plan of a mode that does not search."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from resnet_like import ResNetLike, expanded_cross_entropy
from test_random_networks import Network, networks
from torch import nn

import shardwright as sw
from shardwright import planning

SEARCHES = ("recursive_programming", "dynamic_programming")


def cost(net: nn.Module, args: tuple, mode: str, **given: Any) -> float:
    return sw.plan(net, args, parallel_mode=mode, **given).cost


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(networks(), st.sampled_from([2, 4, 8]), st.sampled_from(["a100x8", "h100x8", None]), st.sampled_from(SEARCHES))
def test_random_networks(made: tuple[Network, tuple[int, ...]], devices: int, cluster: str | None, search: str) -> None:
    net, shape = made
    x = (torch.zeros(shape, dtype=torch.float64),)
    try:
        found = cost(net, x, search, devices=devices, cluster=cluster)
    except sw.PlanError:  # no dim can be cut for so many devices
        return
    assert found <= cost(net, x, "semi_auto", devices=devices, cluster=cluster) * (1 + 1e-9)


@pytest.mark.parametrize("search", SEARCHES)
def test_a_cheaper_plan_of_another_mode_is_taken(search: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that answers with every operator whole: the plan of semi_auto takes its place, and says so."""
    net, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), (torch.zeros(4096, 64),)
    planner = planning.PLANNERS[search]

    def whole(problem: Any) -> Any:
        result = planner.decide(problem)
        decisions = {
            name: decision._replace(assignment=decision.bound.whole(problem.devices))
            if hasattr(decision, "_replace")
            else type(decision)(decision.op, decision.rule, decision.bound, decision.bound.whole(problem.devices))
            for name, decision in result.decisions.items()
        }
        return result._replace(decisions=decisions)

    monkeypatch.setitem(planning.PLANNERS, search, type(planner)(search, whole, True, True))
    plan = sw.plan(net, x, devices=8, parallel_mode=search, cluster="a100x8")
    along = sw.plan(net, x, devices=8, parallel_mode="semi_auto", cluster="a100x8")
    assert plan.cost == along.cost and [op.in_strategy for op in plan.operators] == [
        op.in_strategy for op in along.operators
    ]
    assert any("the plan of semi_auto" in note for note in plan.found.notes)
    assert plan.bound is None or plan.bound <= plan.cost


def test_the_resnet_of_the_goldens() -> None:
    net, x = ResNetLike(), torch.zeros(32, 3, 224, 224)
    given: dict[str, Any] = {"loss_fn": expanded_cross_entropy, "targets": torch.zeros(32, dtype=torch.long)}
    given |= {"devices": 8, "cluster": "a100x8", "sync_batch_norm": True}  # without, data_parallel is another model
    least = min(cost(net, (x,), mode, **given) for mode in ("semi_auto", "data_parallel"))
    assert all(cost(net, (x,), search, **given) <= least * (1 + 1e-9) for search in SEARCHES)
