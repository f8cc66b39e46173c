"""The storage of a pipeline's parameters by its step in time: hsdp(optimizer_level="auto")."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pipeline_networks import Chain, batches, staged
from torch import nn
from two_hosts import CLUSTER

import shardwright as sw
from shardwright.partition.parameter_sharding import LEVELS, OptimizerParallel
from shardwright.pipeline.pipeline_plan import timeline_of
from shardwright.pipeline.stage_storage import in_fastest_storage, stored_by

AUTO = {"optimizer_level": "auto", "threshold": 0}


def planned(hsdp: Any, stages: Any = 2, layers: int = 6, width: int = 512, rows: int = 16, **more: Any) -> Any:
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        x = torch.empty(16 * rows, width)
    pipeline: dict[str, Any] = {"stages": stages, "micro_batches": 4}
    if stages != "auto":
        pipeline["stage_config"] = {str(i): i * stages // layers for i in range(layers)}
    given = {"parallel_mode": "data_parallel", "cluster": CLUSTER, "devices": 16 if stages == 1 else 8, **more}
    return sw.plan(net, (x,), nn.MSELoss(), x, hsdp=hsdp, pipeline=pipeline, **given)


def seconds(plan: Any) -> float:
    """Seconds of the step that runs: the schedule, with messages beside computation."""
    return timeline_of(plan, beside=True).total


def level_of(plan: Any) -> set[Any]:
    return {(p.hsdp.optimizer_level, p.hsdp.shard_size) if p.hsdp else None for p in (s.plan for s in plan.stages)}


@pytest.mark.parametrize("rows", [1, 64, 1024])
def test_the_fastest_step_is_taken(rows: int) -> None:
    found = planned(AUTO, rows=rows)
    others: dict[Any, Any] = {None: planned(None, rows=rows)}
    for level in LEVELS:
        for size in (-1, 4):
            hsdp = {"threshold": 0, "optimizer_level": level, "shard_size": size}
            if size == 4 and found.stages[0].devices == 4:
                continue  # all replicas of a stage
            others[level, size] = planned(hsdp, rows=rows)
    best = min(others, key=lambda key: seconds(others[key]))
    assert seconds(found) == seconds(others[best]) and found.fingerprint == others[best].fingerprint
    assert level_of(found) == {best}
    note = found.notes[0]
    assert note.startswith("parameters are stored ") and "a step takes " in note
    assert note.count(" ms") == len(others)


def test_the_sum_of_seconds_would_choose_another() -> None:
    plans = {level: planned(level and {"threshold": 0, "optimizer_level": level}, rows=64) for level in (None, *LEVELS)}
    by_time = min(plans, key=lambda level: seconds(plans[level]))
    by_sum = min(plans, key=lambda level: plans[level].cost)
    assert level_of(planned(AUTO, rows=64)) == level_of(plans[by_time])
    assert seconds(plans[by_time]) < seconds(plans[by_sum]), (by_time, by_sum)


def test_the_fastest_one_that_fits_is_taken() -> None:
    peaks = {level: planned(level and {"threshold": 0, "optimizer_level": level}).peak for level in (None, *LEVELS)}
    assert peaks["level3"] < peaks["level1"] < peaks[None]
    for level in ("level1", "level3"):
        found = planned(AUTO, memory=peaks[level])
        assert found.peak <= peaks[level] and None not in level_of(found)
        assert "whole needs" in found.notes[0]
    assert {level for level, _ in level_of(planned(AUTO, memory=peaks["level3"]))} == {"level3"}
    with pytest.raises(sw.PlanError, match="no storage of the parameters fits") as raised:
        planned(AUTO, memory=peaks["level3"] / 2)
    assert "memory=" in raised.value.legal
    with pytest.raises(sw.SettingError, match="pipeline of given stages") as raised:
        planned({"threshold": 0}, memory=peaks[None])
    assert 'hsdp(optimizer_level="auto")' in raised.value.legal


def test_stages_that_are_searched() -> None:
    """Strategies and stages are those of level1; of their storages the fastest one is taken."""
    how: dict[str, Any] = {"stages": "auto", "parallel_mode": "dynamic_programming"}
    found = planned(AUTO, **how)
    searched = planned({"threshold": 0, "optimizer_level": "level1"}, **how)
    assert [o.in_strategy for o in found.operators] == [o.in_strategy for o in searched.operators]
    for level in (None, *LEVELS):
        other = stored_by(found, level and OptimizerParallel(-1, 0, level))
        assert seconds(found) <= seconds(other)
    proved = level_of(found) == level_of(searched)
    assert all((stage.plan.bound is not None) == proved for stage in found.stages)


def test_where_nothing_fits_under_level1_level3_is_searched() -> None:
    """The search of stages="auto" keeps the limit itself, and fails."""
    asked: list[Any] = []

    def of(storage: Any) -> Any:
        asked.append(storage.optimizer_level)
        if storage.optimizer_level == "level1":
            raise sw.PlanError("no stages fit")
        return planned(storage)

    setting = OptimizerParallel(-1, 0, "auto")
    limit = planned(replace(setting, optimizer_level="level3")).peak
    found = in_fastest_storage(of, setting, CLUSTER, limit, (), False)
    assert asked == ["level1", "level3"] and {level for level, _ in level_of(found)} == {"level3"}
    with pytest.raises(sw.PlanError, match="no stages fit"):
        in_fastest_storage(of, setting, CLUSTER, None, (), False)


def test_it_comes_back_from_its_file(tmp_path: Any) -> None:
    plan = planned(AUTO)
    plan.save(tmp_path / "plan.json")
    loaded = sw.Plan.load(tmp_path / "plan.json")
    assert (level_of(loaded), loaded.notes, loaded.fingerprint) == (level_of(plan), plan.notes, plan.fingerprint)


@pytest.mark.parametrize("memory", [None, "1GB"])
def test_a_model_trains_with_it(memory: Any) -> None:
    sw.init(devices=8)
    one, two = Chain(), Chain()
    two.load_state_dict(one.state_dict())
    model = sw.AutoParallel(two, nn.MSELoss(), "data_parallel", cluster=CLUSTER, memory=memory)
    model.dataset_strategy("full_batch").hsdp(threshold=0, optimizer_level="auto")
    model.pipeline(stages=2, micro_batches=4, stage_config=staged(2))
    kept = []
    for x, y in [*batches(2), *((x.repeat(2, 1), y.repeat(2, 1)) for x, y in batches(1))]:  # a further size, too
        loss, wanted = model(x, y), nn.functional.mse_loss(one(x), y)
        torch.testing.assert_close(loss, wanted)
        loss.backward()
        wanted.backward()
        kept.append(level_of(model.plan))
    for p, q in zip(one.parameters(), two.parameters()):
        torch.testing.assert_close(q.grad, p.grad)
    assert kept[0] == kept[1] == kept[2]
