"""The types of settings: the words that an argument takes, and the keys of arguments that are dicts.

A type checker and an editor read them: ``parallel_mode="semi_atuo"`` is an error before the script runs, and an editor
completes the modes. At run time nothing is checked here: `settings.Settings` and the methods of `AutoParallel` check
values, and their errors say what is legal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict

if TYPE_CHECKING:
    import torch
    from torch.utils.checkpoint import CheckpointPolicy

    from .cluster import Cluster
    from .graph import Op
    from .layout import Layout
    from .mixed_precision import MixedPrecision
    from .partition.parameter_sharding import OptimizerParallel
    from .planfile.parameter_file import ParameterStrategies
    from .planfile.pipeline_document import PipelineDocument
    from .planfile.plan_document import PlanDocument
    from .solver.search_memory import SearchProgress

__all__ = [
    "ClusterSetting",
    "CompileSetting",
    "Cuts",
    "DatasetStrategy",
    "FusionSetting",
    "GradientFusion",
    "HsdpSetting",
    "Limit",
    "MissingRule",
    "MixedPrecisionSetting",
    "OptimizerLevel",
    "OptimizerState",
    "ParallelMode",
    "PipelineSetting",
    "PlanKeywords",
    "PrecisionSetting",
    "RandomNumbers",
    "RecomputePolicy",
    "Schedule",
]

#: How strategies are decided. A planner that you add (`planners.planning_problem.planner`) is a mode too; a checker
#: does not know its name.
ParallelMode: TypeAlias = Literal[
    "stand_alone",
    "data_parallel",
    "semi_auto",
    "sharding_propagation",
    "recursive_programming",
    "dynamic_programming",
    "hybrid_parallel",
]

#: What happens with an operator that has no rule.
MissingRule: TypeAlias = Literal["error", "replicate"]

#: Which random numbers operators such as dropout give.
RandomNumbers: TypeAlias = Literal["exact", "fast"]

#: What ZeRO/FSDP sharding cuts.
OptimizerLevel: TypeAlias = Literal["level1", "level2", "level3", "auto"]

#: The schedule of a pipeline; a path of a CSV file is another one.
Schedule: TypeAlias = Literal["1f1b", "gpipe", "interleaved", "zero_bubble", "zbv"]

#: The optimizer whose state counts as memory, or its bytes an element.
OptimizerState: TypeAlias = Literal["adam", "adamw", "momentum", "sgd"] | float

#: The strategy of one tensor: the number of parts of each dim, or a named layout.
Cuts: TypeAlias = "tuple[int, ...] | Layout"

#: How the batch is fed: a word, or an entry for each tensor input.
DatasetStrategy: TypeAlias = "Literal['data_parallel', 'full_batch'] | tuple[Cuts | None, ...]"

#: A number of bytes, or a text such as "70GB".
Limit: TypeAlias = str | float

#: The devices and their links: a value, the name of a preset such as "h100x8", a JSON file, or its content.
ClusterSetting: TypeAlias = "Cluster | str | PathLike[str] | Mapping[str, Any]"

#: The operators that are recomputed: a function of an operator, or a list of those that are saved.
RecomputePolicy: TypeAlias = (
    "Callable[[Op], bool | CheckpointPolicy | Literal['save', 'recompute'] | None] | Sequence[Callable[..., Any]]"
)

#: The dtypes of parameters, computation and gradients; a dtype alone is that of computation.
PrecisionSetting: TypeAlias = "MixedPrecision | MixedPrecisionSetting | PrecisionPolicy | torch.dtype"


class PrecisionPolicy(Protocol):
    """The MixedPrecisionPolicy of FSDP2, or a value like it."""

    @property
    def param_dtype(self) -> torch.dtype | None: ...
    @property
    def reduce_dtype(self) -> torch.dtype | None: ...


class HsdpSetting(TypedDict, total=False):
    """The arguments of `AutoParallel.hsdp` as a dict."""

    shard_size: int
    threshold: float
    optimizer_level: OptimizerLevel


class PipelineSetting(TypedDict, total=False):
    """The arguments of `AutoParallel.pipeline` as a dict."""

    stages: int | Literal["auto"]
    scheduler: Schedule | str
    micro_batches: int | Literal["auto"]
    stage_config: Mapping[str, int] | None
    chunks: int | None


class MixedPrecisionSetting(TypedDict, total=False):
    """The arguments of `MixedPrecision` as a dict."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    cast_forward_inputs: bool


class CompileSetting(TypedDict, total=False):
    """The arguments of ``torch.compile`` that a compiled program takes."""

    backend: str | Callable[..., Any]
    mode: str
    options: dict[str, Any]


class GradientFusion(TypedDict, total=False):
    """The buckets of gradients: ``{"mode": "size", "config": 25}``."""

    mode: Literal["auto", "size", "index"]
    config: float | Sequence[int] | None


class FusionSetting(TypedDict, total=False):
    """The arguments of `AutoParallel.comm_fusion` as a dict."""

    openstate: bool
    allreduce: GradientFusion | float | Sequence[int]


class PlanKeywords(TypedDict, total=False):
    """The keyword arguments of `shardwright.plan` apart from `pipeline`, on which the type of its plan depends."""

    parallel_mode: ParallelMode
    devices: int
    dataset_strategy: DatasetStrategy
    on_missing_rule: MissingRule
    marks: Mapping[str, tuple[Any, ...]] | None
    kwargs: dict[str, Any] | None
    sync_batch_norm: bool
    hsdp: HsdpSetting | OptimizerParallel | None
    recompute: RecomputePolicy | None
    uneven: bool
    cluster: ClusterSetting | None
    memory: Limit | None
    optimizer: OptimizerState | None
    strategies: PlanDocument | PipelineDocument | str | PathLike[str] | None
    param_strategies: ParameterStrategies | str | PathLike[str] | None
    mixed_precision: PrecisionSetting | None
    comm_memory: Limit | None
    search_memory: Limit | None
    search_progress: Callable[[SearchProgress], Any] | bool | None
