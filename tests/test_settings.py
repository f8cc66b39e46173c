"""Settings: their checks, and their types, which name the same words and keys as the checks."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import settings
from shardwright.cost.memory_timeline import OPTIMIZERS
from shardwright.parallel.setting_methods import ProgramSettings
from shardwright.partition.parameter_sharding import OptimizerParallel
from shardwright.pipeline.schedules import SCHEDULES
from shardwright.planners.planning_problem import modes
from shardwright.runtime.compilation import Compilation
from shardwright.settings import Settings, decided_feeding

SETTINGS = {field.name: field.default for field in fields(Settings)}
#: Settings that `AutoParallel` takes by a method.
METHODS = {"dataset_strategy", "hsdp", "pipeline", "strategies", "param_strategies"}


def defaults(function: Any) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(function).parameters.items()}


def test_plan_takes_every_setting_with_its_default() -> None:
    given = defaults(sw.plan)
    assert {name: given[name] for name in SETTINGS} == SETTINGS


def test_a_model_takes_every_setting_by_a_keyword_or_a_method() -> None:
    given = defaults(sw.AutoParallel.__init__)
    assert {name: given[name] for name in SETTINGS if name not in METHODS} == {
        name: value for name, value in SETTINGS.items() if name not in METHODS
    }
    assert set(SETTINGS) >= METHODS and not METHODS & set(given)


def test_verify_takes_settings_with_their_defaults() -> None:
    given = defaults(sw.verify)
    mine = set(given) & set(SETTINGS) - {"optimizer"}  # there it is the optimizer that trains
    assert {"parallel_mode", "memory", "pipeline"} <= mine
    assert {name: given[name] for name in mine} == {name: SETTINGS[name] for name in mine}


#: The rule of the default, in the words of every place that has it; pages may break the line elsewhere.
FEEDING = (
    'the batch as the call is handed it. A plan for all devices at once is handed the whole batch ("full_batch"), the '
    'training step of a process is handed the process\'s own part ("data_parallel").'
)


@pytest.mark.parametrize("place", [sw.plan, sw.verify, sw.AutoParallel.dataset_strategy, Settings])
def test_the_feeding_of_inputs_has_one_default(place: Any) -> None:
    default = defaults(place)["strategy" if place is sw.AutoParallel.dataset_strategy else "dataset_strategy"]
    assert default is None
    assert f"None (default): {FEEDING}" in " ".join((place.__doc__ or "").split())


@pytest.mark.parametrize("page", ["learn/many-hosts.md", "design/semantics.md"])
def test_pages_have_the_rule_of_the_default(page: str) -> None:
    text = " ".join((Path(__file__).parents[1] / "docs" / page).read_text(encoding="utf-8").split())
    assert f"The default is `None`: {FEEDING}" in text


def test_a_plan_is_handed_the_whole_batch_and_a_training_step_its_part() -> None:
    net, x, y = nn.Linear(4, 4), torch.ones(8, 4), torch.ones(8, 4)
    assert [decided_feeding(None, training_step=step) for step in (False, True)] == ["full_batch", "data_parallel"]
    assert decided_feeding(((2, 1),), training_step=True) == ((2, 1),)
    plans = [
        sw.plan(net, (x,), nn.MSELoss(), y, devices=2, dataset_strategy=strategy)
        for strategy in (None, "full_batch", "data_parallel")
    ]
    assert plans[0].fingerprint == plans[1].fingerprint != plans[2].fingerprint
    stepped = sw.AutoParallel(net, nn.MSELoss())
    assert (Settings().dataset_strategy, stepped.settings.dataset_strategy) == ("full_batch", "data_parallel")
    assert stepped.dataset_strategy("full_batch").dataset_strategy().settings.dataset_strategy == "data_parallel"
    assert "dataset_strategy='data_parallel'" in repr(stepped.settings)
    part = sw.data_shard(stepped)
    assert (part.index, part.count) == (0, 1)


def test_a_verification_is_handed_the_whole_batch() -> None:
    """A batch of 3, which 2 devices do not divide, can be the whole batch alone."""
    net, x, y = nn.Linear(4, 4), torch.ones(3, 4), torch.ones(3, 4)
    assert sw.verify(net, (x,), y, loss_fn=nn.MSELoss(), devices=2, steps=1).ok
    with pytest.raises(sw.SettingError, match="has size 3, which 2 devices do not divide"):
        sw.verify(net, (x,), y, loss_fn=nn.MSELoss(), devices=2, steps=1, dataset_strategy="data_parallel")


def test_a_model_has_the_settings_that_were_given(tmp_path) -> None:
    model = sw.AutoParallel(nn.Linear(4, 4), nn.MSELoss(), "dynamic_programming", memory="1GB", random="fast")
    model.hsdp(optimizer_level="level3").pipeline(2).comm_fusion(openstate=False).dataset_strategy("full_batch")
    assert (model.settings.memory, model.settings.dataset_strategy) == ("1GB", "full_batch")
    assert (model.settings.hsdp.optimizer_level, model.settings.pipeline.stages) == ("level3", 2)
    assert (model.program_settings.random, model.program_settings.fusion.limit) == ("fast", 0)
    assert Settings.of(**model.settings.keywords()) == model.settings


@pytest.mark.parametrize(
    "wrong",
    [
        {"parallel_mode": "auto"},
        {"on_missing_rule": "ignore"},
        {"optimizer": "lion"},
        {"search_memory": "1MB"},
        {"comm_memory": "much"},
        {"comm_memory": -1},
        {"comm_memory": True},
        {"search_progress": "loud"},
        {"hsdp": {"optimizer_level": "level4"}},
        {"pipeline": {"stage": 2}},
    ],
    ids=lambda wrong: " ".join(map(str, *wrong.items())),
)
def test_a_wrong_value_is_an_error_with_a_legal_one(wrong: dict[str, Any]) -> None:
    with pytest.raises(sw.SettingError) as raised:
        Settings.of(**wrong)
    assert raised.value.legal


@pytest.mark.parametrize("value", [Settings(), ProgramSettings()])
def test_settings_cannot_be_changed_in_place(value: Any) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(value, fields(value)[0].name, 1)


def model() -> sw.AutoParallel:
    return sw.AutoParallel(nn.Linear(4, 4), nn.MSELoss())


def keywords(method: Any) -> set[str]:
    return set(inspect.signature(method).parameters) - {"self", "config"}


def test_words_are_those_of_the_checks() -> None:
    assert set(get_args(settings.ParallelMode)) == set(modes())
    assert set(get_args(settings.Schedule)) == set(SCHEDULES)
    assert {word for word in get_args(get_args(settings.OptimizerState)[0])} == set(OPTIMIZERS)


@pytest.mark.parametrize("mode", get_args(settings.ParallelMode))
def test_help_names_every_mode(mode: str) -> None:
    assert f'"{mode}"' in (sw.AutoParallel.__doc__ or "")


@pytest.mark.parametrize("word", get_args(settings.OptimizerLevel))
def test_every_level_is_taken(word: Any) -> None:
    assert model().hsdp(optimizer_level=word).settings.hsdp == OptimizerParallel(optimizer_level=word)


@pytest.mark.parametrize("word", get_args(settings.RandomNumbers))
def test_every_kind_of_random_numbers_is_taken(word: Any) -> None:
    assert sw.AutoParallel(nn.Linear(4, 4), random=word).program_settings.random == word


@pytest.mark.parametrize("word", get_args(settings.MissingRule))
def test_every_answer_to_a_missing_rule_is_taken(word: Any) -> None:
    assert sw.AutoParallel(nn.Linear(4, 4), on_missing_rule=word).settings.on_missing_rule == word


@pytest.mark.parametrize("word", ["data_parallel", "full_batch", ((4, 1),), (sw.Layout((4,), ("dp",))("dp", "None"),)])
def test_ways_of_feeding_are_taken(word: Any) -> None:
    assert model().dataset_strategy(word).settings.dataset_strategy == word


def test_keys_of_dicts_are_those_of_the_methods() -> None:
    assert set(settings.HsdpSetting.__annotations__) == keywords(sw.AutoParallel.hsdp)
    assert set(settings.PipelineSetting.__annotations__) == keywords(sw.AutoParallel.pipeline)
    assert set(settings.FusionSetting.__annotations__) == keywords(sw.AutoParallel.comm_fusion)
    assert set(settings.MixedPrecisionSetting.__annotations__) == {f.name for f in fields(sw.MixedPrecision)}
    assert set(settings.CompileSetting.__annotations__) == {f.name for f in fields(Compilation)}
    positional = {"net", "inputs", "loss_fn", "targets"}
    assert {"pipeline", *settings.PlanKeywords.__annotations__} == keywords(sw.plan) - positional


def test_a_key_of_each_dict_is_taken() -> None:
    pipeline: settings.PipelineSetting = {"stages": 2, "scheduler": "gpipe"}
    dtypes: settings.MixedPrecisionSetting = {"param_dtype": torch.bfloat16}
    compiling: settings.CompileSetting = {"backend": "eager"}
    fusion: settings.FusionSetting = {"allreduce": {"mode": "index", "config": [1]}}
    made = sw.AutoParallel(nn.Linear(4, 4), nn.MSELoss(), mixed_precision=dtypes, compile=compiling).comm_fusion(fusion)
    made.pipeline(**pipeline)
    assert made.settings.pipeline is not None and made.settings.pipeline.scheduler == "gpipe"
    assert made.settings.mixed_precision == sw.MixedPrecision(torch.bfloat16)
    assert made.program_settings.compiled is not None and made.program_settings.fusion.ends == (1,)
