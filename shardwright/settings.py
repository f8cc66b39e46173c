"""The settings that decide a plan: one value that `AutoParallel`, `shardwright.plan`, `shardwright.verify` and the
command line share, and the types of all settings.

1. The types (`ParallelMode`, `HsdpSetting`, …): the words that an argument takes, and the keys of arguments that are
   dicts. A type checker and an editor read them: ``parallel_mode="semi_atuo"`` is an error before the script runs, and
   an editor completes the modes. At run time they check nothing.

2. The value (`Settings`). Each of the four takes the settings as keywords and makes a `Settings` of them, which checks
   every value once and says what is legal. The planning of a call reads this value alone. Settings of a run that
   decide nothing of its plan, such as the buckets of gradients, are in `parallel.setting_methods.ProgramSettings`.

Example: ``Settings(parallel_mode="semi_atuo")`` is the error "unknown parallel_mode 'semi_atuo'", whose legal
alternative begins with: did you mean "semi_auto"?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict

from .capture.annotations import PipelineSettings, pipelining
from .cluster import format_bytes, parse_bytes
from .cost.memory_timeline import optimizer_bytes
from .errors import SettingError, did_you_mean
from .mixed_precision import MixedPrecision
from .partition.parameter_sharding import OptimizerParallel
from .planfile import as_document
from .planfile.parameter_file import ParameterStrategies, as_parameter_strategies
from .planfile.pipeline_document import PipelineDocument
from .planfile.plan_document import PlanDocument
from .planners.planning_problem import PLANNERS, modes
from .solver.search_memory import LEAST, SearchProgress

if TYPE_CHECKING:
    import torch
    from torch.utils.checkpoint import CheckpointPolicy

    from .cluster import Cluster
    from .graph import Op
    from .layout import Layout

__all__ = [
    "KEYWORDS_ELSEWHERE",
    "MODES_ELSEWHERE",
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
    "Settings",
    "decided_feeding",
]

# -- the types


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

#: The treatment of an operator that has no rule.
MissingRule: TypeAlias = Literal["error", "replicate"]

#: The random numbers of operators such as dropout.
RandomNumbers: TypeAlias = Literal["exact", "fast"]

#: The extent of ZeRO/FSDP sharding.
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
ClusterSetting: TypeAlias = "Cluster | str | PathLike[str] | Mapping[str, object]"

#: The operators that are recomputed: a function of an operator, or a list of those that are saved.
RecomputePolicy: TypeAlias = (
    "Callable[[Op], bool | CheckpointPolicy | Literal['save', 'recompute'] | None] | Sequence[Callable[..., object]]"
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

    backend: str | Callable[..., object]
    mode: str
    options: dict[str, object]


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
    dataset_strategy: DatasetStrategy | None
    on_missing_rule: MissingRule
    marks: Mapping[str, tuple[object, ...]] | None
    kwargs: dict[str, object] | None
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
    search_progress: Callable[[SearchProgress], object] | bool | None


# -- the value


def decided_feeding(dataset_strategy: DatasetStrategy | None, *, training_step: bool) -> DatasetStrategy:
    """The dataset_strategy of a call, where None is the batch as the call is handed it.

    Args:
        dataset_strategy: the value that a user gives, or None.
        training_step: True for the training step of a process, which is handed the process's own part of the batch.
            False for a plan for all devices at once, which is handed the whole batch.

    Returns:
        The value that the user gives, else "data_parallel" for a training step and "full_batch" for a plan.
    """
    if dataset_strategy is not None:
        return dataset_strategy
    return "data_parallel" if training_step else "full_batch"


_SEARCHES = '"sharding_propagation", "recursive_programming" or "dynamic_programming"'

#: Words of other systems for a mode -> the mode.
MODES_ELSEWHERE = {
    "semi_auto_parallel": '"semi_auto"',
    "semi": '"semi_auto"',
    "auto_parallel": f"a search: {_SEARCHES}",
    "auto": f"a search: {_SEARCHES}",
    "full_auto": f"a search: {_SEARCHES}",
    "double_recursive": '"recursive_programming"',
    "recursive": '"recursive_programming"',
    "dynamic": '"dynamic_programming"',
    "propagation": '"sharding_propagation"',
    "standalone": '"stand_alone"',
    "hybrid": '"hybrid_parallel"',
    "manual": '"hybrid_parallel"',
    "dp": '"data_parallel"',
    "ddp": '"data_parallel"',
    "fsdp": '"data_parallel", and model.hsdp(optimizer_level="level3")',
    "zero": '"data_parallel", and model.hsdp()',
}

#: Words of other systems for a setting -> the keyword here.
KEYWORDS_ELSEWHERE = {
    "search_mode": f"parallel_mode={_SEARCHES}",
    "auto_parallel_search_mode": f"parallel_mode={_SEARCHES}",
    "strategy_search_mode": f"parallel_mode={_SEARCHES}",
    "mode": "parallel_mode=",
    "loss": "loss_fn=",
    "loss_function": "loss_fn=",
    "criterion": "loss_fn=",
    "amp_level": "mixed_precision=, or torch.autocast around the call",
    "full_batch": 'dataset_strategy="full_batch"; "data_parallel" for full_batch=False',
    "device_num": "devices=",
    "num_devices": "devices=",
    "enable_parallel_optimizer": "hsdp={}",
    "parallel_optimizer_config": 'hsdp={"shard_size": -1, "threshold": 64}',
    "pipeline_stages": 'pipeline={"stages": 2}',
    "pipeline_config": 'pipeline={"stages": 2}',
    "strategy_ckpt_load_file": "strategies=",
    "target": "targets=",
}


@dataclass(frozen=True)
class Settings:
    """The settings that decide a plan.

    Attributes:
        parallel_mode: one of `planners.planning_problem.modes`.
        dataset_strategy: "full_batch", "data_parallel", or a tuple with one entry per tensor input. None (default): the
            batch as the call is handed it. A plan for all devices at once is handed the whole batch ("full_batch"), the
            training step of a process is handed the process's own part ("data_parallel"). Settings hold the decided
            value, that of a plan for all devices where none is given (`decided_feeding`).
        on_missing_rule: "error", or "replicate": operators without a rule run whole, with a note in the plan.
        sync_batch_norm: in data_parallel, batch norms train by the statistics of the whole batch, as in the other
            modes, instead of each device's own.
        hsdp: ZeRO/FSDP sharding (optimizer parallel) of parameters; None: none.
        recompute: the operators that are recomputed in the backward, as `AutoParallel` takes it.
        uneven: True where cuts need not divide their dims.
        cluster: the devices and their links, for the prices, as `Cluster.of` takes it.
        memory: limit per device, for the modes that search: bytes, "70GB", or "cluster" for the device's own; None:
            no limit.
        optimizer: the optimizer whose state is stored for each parameter: "adam", "momentum", "sgd", or its bytes per
            element. None: plans are made as for Adam, and those of a model count the optimizer that holds its
            parameters (`Plan.counted_optimizer`).
        strategies: a plan whose operators' strategies apply here too, with priority over the model's own marks.
        param_strategies: the storage layouts of parameters.
        pipeline: the pipeline; None: none.
        mixed_precision: the dtypes in which parameters are stored and read, and their gradients summed.
        comm_memory: bytes by which messages under way (weights gathered ahead of their use, gradients that are being
            sent) may raise the peak of a device's memory, on a library such as NCCL: bytes or text such as "2GB"; 0:
            the peak stays as it is; None: twice the weights and gradients of the largest block, and at least the
            largest bucket of sums. With `memory` the peak stays within that, too.
        search_memory: the growth of host memory allowed to the process during a search: bytes or text such as "2GB";
            None: half of the free memory, and at most 3 GB.
        search_progress: called with a `SearchProgress` every few seconds of a search; None: the plan's progress is
            shown as that of any long work (`launch.progress`); True: on standard error in any case; False: not at
            all.

    Raises:
        SettingError: an unknown value.
    """

    parallel_mode: str = "semi_auto"
    dataset_strategy: Any = None
    on_missing_rule: str = "error"
    sync_batch_norm: bool = False
    hsdp: OptimizerParallel | None = None
    recompute: RecomputePolicy | None = None
    uneven: bool = False
    cluster: ClusterSetting | None = None
    memory: str | float | None = None
    optimizer: str | float | None = None
    strategies: PlanDocument | PipelineDocument | None = None
    param_strategies: ParameterStrategies | None = None
    pipeline: PipelineSettings | None = None
    mixed_precision: MixedPrecision | None = None
    comm_memory: str | float | None = None
    search_memory: str | float | None = None
    search_progress: Callable[[SearchProgress], object] | bool | None = None

    @classmethod
    def of(
        cls,
        *,
        hsdp: OptimizerParallel | Mapping[str, object] | None = None,
        strategies: PlanDocument | PipelineDocument | str | PathLike[str] | None = None,
        param_strategies: ParameterStrategies | str | PathLike[str] | None = None,
        pipeline: PipelineSettings | Mapping[str, object] | None = None,
        mixed_precision: object = None,
        **settings: Any,
    ) -> Settings:
        """The settings as a user writes them: dicts, paths and names in place of this package's values.

        Raises:
            SettingError: an unknown value.
            PlanError: a file that cannot be read.
        """
        return cls(
            hsdp=OptimizerParallel.of(hsdp),
            strategies=as_document(strategies),
            param_strategies=as_parameter_strategies(param_strategies),
            pipeline=pipelining(pipeline),
            mixed_precision=MixedPrecision.of(mixed_precision),
            **settings,
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset_strategy", decided_feeding(self.dataset_strategy, training_step=False))
        if self.parallel_mode not in modes():
            raise SettingError(
                f"unknown parallel_mode {self.parallel_mode!r}",
                legal=did_you_mean(self.parallel_mode, modes(), MODES_ELSEWHERE),
            )
        if self.on_missing_rule not in ("error", "replicate"):
            raise SettingError(f"unknown on_missing_rule {self.on_missing_rule!r}", legal='"error" or "replicate"')
        if self.strategies is not None and self.parallel_mode not in PLANNERS:
            raise SettingError(
                f"{self.strategies.path} has strategies of operators, which {self.parallel_mode} runs as they stand",
                legal=", ".join(PLANNERS),
            )
        if self.param_strategies is not None and self.parallel_mode not in PLANNERS:
            raise SettingError(
                f"{self.param_strategies.source} has strategies of parameters, which {self.parallel_mode} stores as "
                "they are",
                legal=", ".join(PLANNERS),
            )
        optimizer_bytes(self.optimizer)  # raises for an unknown optimizer
        _ = self.budget, self.allowance

    @property
    def allowance(self) -> float | None:
        """`comm_memory` in bytes.

        Raises:
            SettingError: no amount of memory.
        """
        setting = self.comm_memory
        if setting is None or (setting == 0 and not isinstance(setting, bool)):
            return setting if setting is None else 0.0
        return parse_bytes(setting, "comm_memory", '"2GB", "512MiB", a number of bytes, or 0')

    @property
    def budget(self) -> tuple[float | None, Callable[[SearchProgress], object] | bool | None]:
        """The arguments of a `SearchBudget`: bytes or None, and the progress setting.

        Raises:
            SettingError: no amount of memory, or less than the least of a search; a progress setting that cannot be
                called.
        """
        memory, progress = self.search_memory, self.search_progress
        if progress is not None and not isinstance(progress, bool) and not callable(progress):
            raise SettingError(
                f"search_progress={progress!r} cannot be called",
                legal="a function of one argument, True, False or None",
            )
        if memory is None:
            return None, progress
        allowed = parse_bytes(memory, "search_memory", '"2GB", "512MiB" or a number of bytes')
        if allowed < LEAST:
            raise SettingError(
                f"search_memory={memory!r} is less than a search takes", legal=f"{format_bytes(LEAST)} or more"
            )
        return allowed, progress

    def keywords(self) -> dict[str, Any]:
        """The settings as keyword arguments of `shardwright.plan`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
