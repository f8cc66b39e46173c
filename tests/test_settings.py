"""`Settings`: one list of settings, which the entry points of the package take as keywords."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from torch import nn

import shardwright as sw
from shardwright.parallel.setting_methods import ProgramSettings
from shardwright.settings import Settings

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
