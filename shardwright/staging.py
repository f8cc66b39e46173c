"""What a user says of a pipeline: its setting, and which stage each module is in (`set_stage`, `stage_config`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .errors import SettingError

__all__ = ["CUT", "Pipelining", "be_elsewhere", "pipelining", "set_stage", "staged_modules", "whole_shape"]

#: Attribute of a module that `set_stage` has put into a stage.
_STAGE = "_shardwright_stage"

#: Attribute of a parameter of which this process has a slice, or nothing: its name.
CUT = "_shardwright_cut"

#: Attribute of an empty parameter whose values are on the ranks of another stage: the shape of the whole.
_WHOLE_SHAPE = "_shardwright_whole_shape"


@dataclass(frozen=True)
class Pipelining:
    """The setting of a pipeline. See `AutoParallel.pipeline`."""

    stages: int | str = 1
    scheduler: str = "1f1b"
    micro_batches: int | str = 1
    stage_config: tuple[tuple[str, int], ...] = ()
    chunks: int | None = None

    @property
    def csv(self) -> str | None:
        """The file of a schedule of the user's own, or None."""
        return self.scheduler if self.scheduler.endswith(".csv") else None


def pipelining(given: Pipelining | Mapping[str, Any] | None) -> Pipelining | None:
    """The setting that someone asks for, as a dict of the arguments of `AutoParallel.pipeline`.

    Raises:
        SettingError: an argument that there is not, or of another kind.
    """
    if given is None or isinstance(given, Pipelining):
        return given
    names = tuple(Pipelining.__dataclass_fields__)
    if not isinstance(given, Mapping) or set(given) - set(names):
        raise SettingError(f"pipeline={given!r}", legal="a dict of " + ", ".join(names))
    given = {"micro_batches": "auto", **given} if given.get("stages") == "auto" else dict(given)
    config = given.pop("stage_config", None) or {}
    if not isinstance(config, Mapping):
        raise SettingError(f"stage_config={config!r}", legal='a dict such as {"layer1": 0, "layer2": 1}')
    made = Pipelining(**given, stage_config=tuple(config.items()))
    for what in ("stages", "micro_batches"):
        value = getattr(made, what)
        if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise SettingError(f"{what}={value!r}", legal='a whole number from 1, or "auto"')
    if not isinstance(made.scheduler, str):
        raise SettingError(f"scheduler={made.scheduler!r}", legal='"1f1b", "gpipe", "interleaved", "zero_bubble", "zbv", '
                           "or the path of a CSV file")
    return made


def set_stage(module: nn.Module, stage: int) -> nn.Module:
    """Put a module into a stage of the pipeline: it, and all inside that is in no stage of its own.

    Operators outside of any such module go with what they read: into the latest stage among it; what reads inputs and
    parameters alone, into the stage that uses it first.

    Args:
        module: of the model.
        stage: its number, from 0.

    Returns:
        The module itself.

    Raises:
        SettingError: not a module, not a number from 0, or a module that is in another stage already.
    """
    if not isinstance(module, nn.Module):
        raise SettingError(f"set_stage: {module!r} is not an nn.Module", legal="a module of the model")
    _check_number("set_stage", stage)
    held = vars(module).setdefault(_STAGE, stage)
    if held != stage:
        raise SettingError(f"set_stage: a {type(module).__name__} in stage {held} is put into stage {stage} too",
                           legal="one stage for each module")
    return module


def be_elsewhere(parameter: nn.Parameter, shape: torch.Size) -> None:
    """Note on a parameter, empty here, that it is of another stage, and the shape that it has there."""
    setattr(parameter, _WHOLE_SHAPE, shape)


def whole_shape(tensor: torch.Tensor) -> torch.Size:
    """The shape of a parameter, be it here or elsewhere."""
    return getattr(tensor, _WHOLE_SHAPE, tensor.shape)


def staged_modules(net: nn.Module, config: Mapping[str, int] | None = None) -> dict[str, int]:
    """Dotted path of each module that is put into a stage -> its stage.

    Args:
        config: path -> stage, besides what `set_stage` says.

    Raises:
        SettingError: a path that there is not, a number below 0, or a module in two stages, be it by two names.
    """
    modules = dict(net.named_modules(remove_duplicate=False))
    given: dict[str, tuple[int, str]] = {path: (vars(module)[_STAGE], "set_stage") for path, module in modules.items()
                                         if _STAGE in vars(module)}
    for path, stage in (config or {}).items():
        if path not in modules:
            near = ", ".join(p for p, _ in net.named_children()) or "none"
            raise SettingError(f"stage_config: there is no module {path!r}", legal=f"the path of a module, such as {near}")
        _check_number(f"stage_config of {path!r}", stage)
        if path in given and given[path][0] != stage:
            raise SettingError(f"the module {path!r} is in two stages: {given[path][0]} by set_stage, {stage} by stage_config",
                               legal="one stage for each module")
        given[path] = stage, "stage_config"
    first: dict[int, str] = {}
    for path, (stage, _) in given.items():
        other = first.setdefault(id(modules[path]), path)
        if given[other][0] != stage:
            raise SettingError(f"the modules {other!r} and {path!r} are one, in two stages: {given[other][0]} and {stage}",
                               legal="one stage for each module")
    return {path: stage for path, (stage, _) in given.items()}


def _check_number(what: str, stage: object) -> None:
    if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
        raise SettingError(f"{what}: the stage {stage!r}", legal="a whole number from 0")
