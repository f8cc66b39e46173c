"""Shardwright: a PyTorch model written for one device, trained on many."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `as` hands a name on to type checkers
    __version__: str
    from . import ops as ops
    from .capture.annotations import (
        Operator as Operator,
        no_optimizer_parallel as no_optimizer_parallel,
        recompute as recompute,
        set_stage as set_stage,
        shard as shard,
    )
    from .capture.hybrid_models import layerwise_parallel as layerwise_parallel
    from .checkpoint.callback import CheckpointCallback as CheckpointCallback, CheckpointConfig as CheckpointConfig
    from .checkpoint.checkpoint_folders import latest_checkpoint as latest_checkpoint
    from .checkpoint.load import Restored as Restored, load_checkpoint as load_checkpoint
    from .checkpoint.save import save_checkpoint as save_checkpoint
    from .checkpoint.transform import (
        load_distributed_checkpoint as load_distributed_checkpoint,
        rank_list_for_transform as rank_list_for_transform,
        transform_checkpoints as transform_checkpoints,
    )
    from .cluster import Cluster as Cluster, Level as Level
    from .errors import (
        CaptureError as CaptureError,
        CheckpointError as CheckpointError,
        LayoutError as LayoutError,
        MissingRuleError as MissingRuleError,
        PlanError as PlanError,
        RuleError as RuleError,
        RuntimeMismatchError as RuntimeMismatchError,
        SettingError as SettingError,
        ShardwrightError as ShardwrightError,
        StrategyError as StrategyError,
        StuckError as StuckError,
        TorchVersionError as TorchVersionError,
    )
    from .launch.progress import quiet as quiet
    from .layout import Digit as Digit, Layout as Layout
    from .mixed_precision import MixedPrecision as MixedPrecision
    from .monitor import Monitor as Monitor
    from .parallel.auto_parallel import AutoParallel as AutoParallel, RecaptureWarning as RecaptureWarning
    from .parallel.data_shards import data_shard as data_shard, sampler as sampler
    from .parallel.value_and_grad import optimizer as optimizer, value_and_grad as value_and_grad
    from .planning import PipelinePlan as PipelinePlan, Plan as Plan, plan as plan
    from .process_runtime import init as init, rank as rank, world_size as world_size
    from .rehearsal.rehearsal_report import Rehearsal as Rehearsal
    from .rehearsal.rehearse import rehearse as rehearse
    from .rules import rule as rule
    from .runtime.deferred_init import no_init_parameters as no_init_parameters
    from .solver.solve import InfeasibleMemoryError as InfeasibleMemoryError
    from .verification.verify import verify as verify
    from .verification.verify_report import VerifyReport as VerifyReport

#: Public name -> its module. A module is imported when one of its names is first used, so that the launcher does not
#: import torch.
_MODULES = {
    **dict.fromkeys(
        (
            "CaptureError",
            "CheckpointError",
            "LayoutError",
            "MissingRuleError",
            "PlanError",
            "RuleError",
            "RuntimeMismatchError",
            "SettingError",
            "ShardwrightError",
            "StrategyError",
            "StuckError",
            "TorchVersionError",
        ),
        "errors",
    ),
    **dict.fromkeys(("Cluster", "Level"), "cluster"),
    **dict.fromkeys(("Digit", "Layout"), "layout"),
    **dict.fromkeys(("Operator", "no_optimizer_parallel", "recompute", "set_stage", "shard"), "capture.annotations"),
    **dict.fromkeys(("AutoParallel", "RecaptureWarning"), "parallel.auto_parallel"),
    **dict.fromkeys(("data_shard", "sampler"), "parallel.data_shards"),
    **dict.fromkeys(("optimizer", "value_and_grad"), "parallel.value_and_grad"),
    **dict.fromkeys(("PipelinePlan", "Plan", "plan"), "planning"),
    "MixedPrecision": "mixed_precision",
    "Monitor": "monitor",
    "InfeasibleMemoryError": "solver.solve",
    "rule": "rules",
    "no_init_parameters": "runtime.deferred_init",
    **dict.fromkeys(("init", "rank", "world_size"), "process_runtime"),
    "quiet": "launch.progress",
    "layerwise_parallel": "capture.hybrid_models",
    **dict.fromkeys(("CheckpointCallback", "CheckpointConfig"), "checkpoint.callback"),
    "latest_checkpoint": "checkpoint.checkpoint_folders",
    **dict.fromkeys(("Restored", "load_checkpoint"), "checkpoint.load"),
    **dict.fromkeys(
        ("load_distributed_checkpoint", "rank_list_for_transform", "transform_checkpoints"), "checkpoint.transform"
    ),
    "save_checkpoint": "checkpoint.save",
    "rehearse": "rehearsal.rehearse",
    "Rehearsal": "rehearsal.rehearsal_report",
    "verify": "verification.verify",
    "VerifyReport": "verification.verify_report",
}

__all__ = sorted([*_MODULES, "__version__", "ops"])


if not TYPE_CHECKING:  # a checker reads the imports above, and says which name is none of them

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib import metadata  # noqa: PLC0415  20 ms that a worker does not need

            try:
                return metadata.version("shardwright")  # the version in pyproject.toml at installation
            except metadata.PackageNotFoundError:  # a checkout on the path, not installed
                return "0+unknown"
        if name == "ops":
            return import_module(".ops", __name__)  # a public module, not a name of one
        if name not in _MODULES:
            raise AttributeError(f"module 'shardwright' has no attribute {name!r}")
        value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
