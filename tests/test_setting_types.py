"""The types of settings name the same words and keys as the checks of settings."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any, get_args

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import setting_types
from shardwright.cost.memory_timeline import OPTIMIZERS
from shardwright.partition.parameter_sharding import OptimizerParallel
from shardwright.pipeline.schedules import SCHEDULES
from shardwright.planners.planning_problem import modes
from shardwright.runtime.compilation import Compilation


def model() -> sw.AutoParallel:
    return sw.AutoParallel(nn.Linear(4, 4), nn.MSELoss())


def keywords(method: Any) -> set[str]:
    return set(inspect.signature(method).parameters) - {"self", "config"}


def test_words_are_those_of_the_checks() -> None:
    assert set(get_args(setting_types.ParallelMode)) == set(modes())
    assert set(get_args(setting_types.Schedule)) == set(SCHEDULES)
    assert {word for word in get_args(get_args(setting_types.OptimizerState)[0])} == set(OPTIMIZERS)


@pytest.mark.parametrize("mode", get_args(setting_types.ParallelMode))
def test_help_names_every_mode(mode: str) -> None:
    assert f'"{mode}"' in (sw.AutoParallel.__doc__ or "")


@pytest.mark.parametrize("word", get_args(setting_types.OptimizerLevel))
def test_every_level_is_taken(word: Any) -> None:
    assert model().hsdp(optimizer_level=word).settings.hsdp == OptimizerParallel(optimizer_level=word)


@pytest.mark.parametrize("word", get_args(setting_types.RandomNumbers))
def test_every_kind_of_random_numbers_is_taken(word: Any) -> None:
    assert sw.AutoParallel(nn.Linear(4, 4), random=word).program_settings.random == word


@pytest.mark.parametrize("word", get_args(setting_types.MissingRule))
def test_every_answer_to_a_missing_rule_is_taken(word: Any) -> None:
    assert sw.AutoParallel(nn.Linear(4, 4), on_missing_rule=word).settings.on_missing_rule == word


@pytest.mark.parametrize("word", ["data_parallel", "full_batch", ((4, 1),), (sw.Layout((4,), ("dp",))("dp", "None"),)])
def test_ways_of_feeding_are_taken(word: Any) -> None:
    assert model().dataset_strategy(word).settings.dataset_strategy == word


def test_keys_of_dicts_are_those_of_the_methods() -> None:
    assert set(setting_types.HsdpSetting.__annotations__) == keywords(sw.AutoParallel.hsdp)
    assert set(setting_types.PipelineSetting.__annotations__) == keywords(sw.AutoParallel.pipeline)
    assert set(setting_types.FusionSetting.__annotations__) == keywords(sw.AutoParallel.comm_fusion)
    assert set(setting_types.MixedPrecisionSetting.__annotations__) == {f.name for f in fields(sw.MixedPrecision)}
    assert set(setting_types.CompileSetting.__annotations__) == {f.name for f in fields(Compilation)}
    positional = {"net", "inputs", "loss_fn", "targets"}
    assert {"pipeline", *setting_types.PlanKeywords.__annotations__} == keywords(sw.plan) - positional


def test_a_key_of_each_dict_is_taken() -> None:
    pipeline: setting_types.PipelineSetting = {"stages": 2, "scheduler": "gpipe"}
    dtypes: setting_types.MixedPrecisionSetting = {"param_dtype": torch.bfloat16}
    compiling: setting_types.CompileSetting = {"backend": "eager"}
    fusion: setting_types.FusionSetting = {"allreduce": {"mode": "index", "config": [1]}}
    made = sw.AutoParallel(nn.Linear(4, 4), nn.MSELoss(), mixed_precision=dtypes, compile=compiling).comm_fusion(fusion)
    made.pipeline(**pipeline)
    assert made.settings.pipeline is not None and made.settings.pipeline.scheduler == "gpipe"
    assert made.settings.mixed_precision == sw.MixedPrecision(torch.bfloat16)
    assert made.program_settings.compiled is not None and made.program_settings.fusion.ends == (1,)
