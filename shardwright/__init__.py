"""Shardwright: a PyTorch model written for one device, trained on many."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from . import ops
    from .cluster import Cluster, Level
    from .errors import (
        CaptureError, CheckpointError, LayoutError, MissingRuleError, PlanError, RuleError, RuntimeMismatchError, SettingError,
        ShardwrightError, StrategyError, StuckError, TorchVersionError,
    )
    from .checkpoint.callback import CheckpointCallback, CheckpointConfig
    from .checkpoint.folders import latest_checkpoint
    from .checkpoint.loading import Restored, load_checkpoint
    from .checkpoint.offline import load_distributed_checkpoint, rank_list_for_transform, transform_checkpoints
    from .checkpoint.saving import save_checkpoint
    from .layerwise import layerwise_parallel
    from .layout import Digit, Layout
    from .marks import Operator, no_optimizer_parallel, recompute, shard
    from .mixed_precision import MixedPrecision
    from .monitor import Monitor
    from .parallel import AutoParallel, RecaptureWarning
    from .plan import PipelinePlan, Plan, plan
    from .plan.solver.least_memory import InfeasibleMemoryError
    from .rules import rule
    from .runtime.deferred import no_init_parameters
    from .runtime.init import init, rank, world_size
    from .staging import set_stage
    from .verify import VerifyReport, verify

#: Public name -> the room that it lives in. Loaded when first used: the launcher needs none of torch.
_ROOMS = {
    **dict.fromkeys(("CaptureError", "CheckpointError", "LayoutError", "MissingRuleError", "PlanError", "RuleError",
                     "RuntimeMismatchError", "SettingError", "ShardwrightError", "StrategyError", "StuckError",
                     "TorchVersionError"), "errors"),
    **dict.fromkeys(("Cluster", "Level"), "cluster"),
    **dict.fromkeys(("Digit", "Layout"), "layout"),
    **dict.fromkeys(("Operator", "no_optimizer_parallel", "recompute", "shard"), "marks"),
    **dict.fromkeys(("AutoParallel", "RecaptureWarning"), "parallel"),
    **dict.fromkeys(("PipelinePlan", "Plan", "plan"), "plan"),
    "MixedPrecision": "mixed_precision",
    "Monitor": "monitor",
    "InfeasibleMemoryError": "plan.solver.least_memory",
    "rule": "rules",
    "set_stage": "staging",
    "no_init_parameters": "runtime.deferred",
    **dict.fromkeys(("init", "rank", "world_size"), "runtime.init"),
    "layerwise_parallel": "layerwise",
    **dict.fromkeys(("CheckpointCallback", "CheckpointConfig"), "checkpoint.callback"),
    "latest_checkpoint": "checkpoint.folders",
    **dict.fromkeys(("Restored", "load_checkpoint"), "checkpoint.loading"),
    **dict.fromkeys(("load_distributed_checkpoint", "rank_list_for_transform", "transform_checkpoints"),
                    "checkpoint.offline"),
    "save_checkpoint": "checkpoint.saving",
    **dict.fromkeys(("VerifyReport", "verify"), "verify"),
}

__all__ = sorted([*_ROOMS, "__version__", "ops"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata  # 20 ms, of which a worker that trains has no use

        try:
            return metadata.version("shardwright")  # pyproject.toml's, as it was when the package was installed
        except metadata.PackageNotFoundError:  # a checkout that is on the path
            return "0+unknown"
    if name == "ops":
        return import_module(".ops", __name__)  # a room with public functions of its own
    if name not in _ROOMS:
        raise AttributeError(f"module 'shardwright' has no attribute {name!r}")
    value = getattr(import_module(f".{_ROOMS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """`plan` and `verify` are rooms and public functions: the name of the package stands for the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _ROOMS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
