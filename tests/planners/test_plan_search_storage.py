"""The storage of parameters by the step in time: hsdp(optimizer_level="auto")."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from two_hosts import CLUSTER

import shardwright as sw
from shardwright.cluster import Cluster
from shardwright.partition.parameter_sharding import OptimizerParallel
from shardwright.planners.plan_search import storages

AUTO = {"optimizer_level": "auto", "threshold": 0}


def planned(hsdp: Any, layers: int = 6, width: int = 512, rows: int = 64, **more: Any) -> sw.Plan:
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        x = torch.empty(8 * rows, width)
    given = {"parallel_mode": "data_parallel", "cluster": CLUSTER, "devices": 8, **more}
    return sw.plan(net, (x,), nn.MSELoss(), x, hsdp=hsdp, **given)


def test_the_storages_that_are_compared() -> None:
    setting = OptimizerParallel(-1, 0, "auto")
    found = list(storages(setting, CLUSTER, 8, False))
    assert [(s.optimizer_level, s.shard_size) if s else None for s in found] == [
        None,
        ("level1", -1),
        ("level1", 4),
        ("level3", -1),
        ("level3", 4),
    ]
    found = list(storages(OptimizerParallel(2, 0, "auto"), CLUSTER, 8, False))
    assert [s and s.shard_size for s in found] == [None, 2, 2]
    assert [s and s.optimizer_level for s in storages(setting, CLUSTER, 8, True)] == ["level1", "level3"]
    assert len(list(storages(setting, Cluster.of("h100x8"), 8, False))) == 3


def test_the_fastest_step_is_taken() -> None:
    found = planned(AUTO)
    others = {None: planned(None)}
    for level in ("level1", "level3"):
        for size in (-1, 4):
            others[level, size] = planned({"threshold": 0, "optimizer_level": level, "shard_size": size})
    best = min(others, key=lambda key: others[key].price.elapsed)
    assert found.price.elapsed == others[best].price.elapsed
    # By the sums of seconds another one would be cheapest: gathers and scatters count there, not what they wait for.
    assert best == ("level1", 4) and min(others, key=lambda key: others[key].cost) != best
    assert found.hsdp == others[best].hsdp and found.fingerprint == others[best].fingerprint
    assert found.found is not None and found.found.strategies == 5
    note = found.found.notes[-1]
    assert note.startswith("parameters are stored by level1 over 4 replicas: a step takes ") and "whole " in note


def test_the_fastest_one_that_fits_is_taken() -> None:
    whole, parts = planned(None), planned({"threshold": 0, "optimizer_level": "level3"})
    assert parts.unscheduled.peak < whole.unscheduled.peak
    limit = (parts.unscheduled.peak + whole.unscheduled.peak) / 2
    found = planned(AUTO, memory=limit)
    assert found.hsdp is not None and found.peak <= limit and found.found.limit == limit
    assert "whole needs" in found.found.notes[-1]
    tight = planned(AUTO, memory=parts.unscheduled.peak)
    assert tight.hsdp.optimizer_level == "level3" and tight.peak <= parts.unscheduled.peak
    with pytest.raises(sw.PlanError, match="no storage of the parameters fits") as raised:
        planned(AUTO, memory=parts.unscheduled.peak / 2)
    assert f"memory={int(-(-parts.unscheduled.peak // 1))}" in str(raised.value)
    with pytest.raises(sw.SettingError, match="data_parallel searches nothing"):
        planned({"threshold": 0}, memory=limit)


def test_a_search_decides_the_strategies_first() -> None:
    found = planned(AUTO, layers=2, width=64, parallel_mode="dynamic_programming")
    searched = planned(
        {"threshold": 0, "optimizer_level": "level1"}, layers=2, width=64, parallel_mode="dynamic_programming"
    )
    assert [o.in_strategy for o in found.operators] == [o.in_strategy for o in searched.operators]
    assert found.price.elapsed <= searched.price.elapsed
    # The bound was proved for the storage under which the search ran.
    assert (found.bound is not None) == (found.hsdp == searched.hsdp)


def test_a_plan_with_a_chosen_storage_comes_back_from_its_file(tmp_path: Any) -> None:
    plan = planned(AUTO, memory="1GB")
    plan.save(tmp_path / "plan.json")
    loaded = sw.Plan.load(tmp_path / "plan.json")
    assert (loaded.hsdp, loaded.found, loaded.fingerprint) == (plan.hsdp, plan.found, plan.fingerprint)
    assert loaded.price.elapsed == plan.price.elapsed


def test_where_it_is_refused() -> None:
    with pytest.raises(sw.SettingError, match="own program"):
        planned(AUTO, parallel_mode="hybrid_parallel")


def test_a_model_trains_with_it() -> None:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).double()
    two = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).double()
    two.load_state_dict(one.state_dict())
    sw.init(devices=8)
    model = sw.AutoParallel(two, nn.MSELoss(), "data_parallel", cluster=CLUSTER).dataset_strategy("full_batch")
    model.hsdp(threshold=0, optimizer_level="auto")
    for rows in (16, 32):  # a further size keeps the storage
        x, y = torch.randn(rows, 16, dtype=torch.float64), torch.randn(rows, 8, dtype=torch.float64)
        loss, wanted = model(x, y), nn.functional.mse_loss(one(x), y)
        torch.testing.assert_close(loss, wanted)
        loss.backward()
        wanted.backward()
        storages_ = {name: p.storage for name, p in model.plan.parameters.items()}
    for p, q in zip(one.parameters(), two.parameters()):
        torch.testing.assert_close(q.grad, p.grad)
    assert storages_ == {name: p.storage for name, p in model.plan.parameters.items()}
