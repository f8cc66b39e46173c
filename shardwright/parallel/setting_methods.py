"""The settings of a wrapped model that are methods of `parallel.AutoParallel`, called before its first call.

A wrapped model has two values: `Settings` decides its plans, `ProgramSettings` decides how they run. Each method
replaces one of the two by a changed copy.

Example: ``model.hsdp(optimizer_level="level3")`` changes `Settings.hsdp`, and so the plan. ``model.comm_fusion(…)``
changes `ProgramSettings.fusion`, the buckets of gradients. ``model.dataset_strategy("full")`` is an error.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import nn

from ..autocast import Autocast
from ..capture.annotations import forget_planned, pipelining
from ..capture.guards import Guards
from ..capture.module_calls import FunctionOfModels, LossFunction, ModelAndLoss
from ..cost.communication_schedule import Fusion, fusion_of
from ..errors import SettingError, did_you_mean, known_keywords
from ..partition.parameter_sharding import OptimizerParallel
from ..pipeline.pipeline_plan import PipelinePlan
from ..planfile import read_document
from ..planfile.parameter_file import ParameterStrategies
from ..planners.planning_problem import PLANNERS
from ..runtime.compilation import Compilation
from ..runtime.optimizer_guard import Accumulation
from ..settings import (
    KEYWORDS_ELSEWHERE,
    DatasetStrategy,
    FusionSetting,
    GradientFusion,
    OptimizerLevel,
    Schedule,
    Settings,
    decided_feeding,
)
from ..sharded_plan import Plan
from ..torch_private import gradient_hooks, pytree
from .sequence_buckets import SequenceBuckets

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..layout import Layout
    from ..process_runtime import Runtime
    from ..runtime.pipeline_step import PipelineProgram
    from ..runtime.step_program import StepProgram
    from .graph_cache import GraphCache

    _Module = nn.Module  # the one subclass is a module

    #: The inputs of a call, in which a program is found: their structure, or their number, where all are tensors; the
    #: state of autocast and the function that is called; shape, dtype and gradient of each tensor, type and value of
    #: the rest.
    Feed = tuple[pytree.TreeSpec | int, tuple[Autocast, FunctionOfModels | None], tuple[tuple[object, ...], ...]]
    #: The key of a program: its feed, and its guards.
    ProgramKey = tuple[
        pytree.TreeSpec | int, tuple[Autocast, FunctionOfModels | None], tuple[tuple[object, ...], ...], Guards
    ]
else:
    _Module = object

__all__ = ["MODEL_KEYWORDS", "ProgramSettings", "SettingMethods"]


#: Words of other systems, and settings that are methods of the model -> where they are set.
MODEL_KEYWORDS = {
    **KEYWORDS_ELSEWHERE,
    "full_batch": 'model.dataset_strategy("full_batch"), or "data_parallel" for full_batch=False',
    "dataset_strategy": 'model.dataset_strategy("full_batch")',
    "devices": "sw.init(devices=8) before",
    "device_num": "sw.init(devices=8) before",
    "num_devices": "sw.init(devices=8) before",
    "backend": "sw.init(backend=...) before",
    "hsdp": "model.hsdp()",
    "enable_parallel_optimizer": "model.hsdp()",
    "parallel_optimizer_config": "model.hsdp(shard_size=-1, threshold=64)",
    "pipeline": "model.pipeline(stages=2)",
    "pipeline_stages": "model.pipeline(stages=2)",
    "pipeline_config": "model.pipeline(stages=2)",
    "micro_batches": "model.pipeline(stages=2, micro_batches=4)",
    "comm_fusion": "model.comm_fusion(...)",
    "gradients_mean": "model.enable_gradients_mean()",
    "strategies": "model.load_operator_strategy_file(path)",
    "strategy_ckpt_load_file": "model.load_operator_strategy_file(path)",
    "strategy_ckpt_save_file": "model.save_operator_strategy_file(path)",
    "param_strategies": "model.load_param_strategy_file(path)",
    "device_ids": "no device: sw.init finds it",
    "target": "the target as the last argument of the call: model(x, target)",
    "targets": "the target as the last argument of the call: model(x, target)",
}


@dataclass(frozen=True)
class ProgramSettings:
    """The settings of a wrapped model that decide nothing of its plans.

    Attributes:
        save_graphs: a directory for the IR dumps of every rank; None: none are written.
        random: "exact" or "fast", see `AutoParallel`.
        parameter_broadcast: True: in processes, parameters and buffers begin with the values of rank 0.
        gradients_mean: True: gradients are those of the mean of the ranks' losses, where the loss is outside the model.
        fusion: the buckets of gradients.
        compiled: the way of ``torch.compile``; None: the program runs operator by operator.
        max_programs: the number of programs that are kept.
        varying: dims of the inputs whose sizes differ from call to call, which no warning announces.
        buckets: lengths to which sequences are padded; None: none.

    Raises:
        SettingError: an unknown value.
    """

    save_graphs: str | Path | None = None
    random: str = "exact"
    parameter_broadcast: bool = False
    gradients_mean: bool = False
    fusion: Fusion = field(default_factory=Fusion)
    compiled: Compilation | None = None
    max_programs: int = 64
    varying: tuple[int, ...] = ()
    buckets: SequenceBuckets | None = None

    def __post_init__(self) -> None:
        if self.random not in ("exact", "fast"):
            raise SettingError(f"unknown random {self.random!r}", legal='"exact" or "fast"')
        if not isinstance(self.max_programs, int) or isinstance(self.max_programs, bool) or self.max_programs < 1:
            raise SettingError(f"max_programs={self.max_programs!r}", legal="a whole number of at least 1")
        if self.save_graphs is not None:
            existing = next(
                path for path in (Path(self.save_graphs), *Path(self.save_graphs).absolute().parents) if path.exists()
            )
            if not existing.is_dir():
                raise SettingError(
                    f"save_graphs={str(self.save_graphs)!r}: {existing} is a file", legal="a folder for the dumps"
                )
        if not isinstance(self.varying, (tuple, list)) or not all(type(d) is int and d >= 0 for d in self.varying):
            raise SettingError(
                f"varying={self.varying!r}", legal="dims of the inputs, counted from 0, such as varying=(0, 1)"
            )


class OpenWhole(Protocol):
    """The ``with`` block of `AutoParallel.whole` that is open."""

    @property
    def rank(self) -> int | None:
        """The rank that has whole parameters; None: all ranks."""


class SettingMethods(_Module):
    """The methods, as a base class of `AutoParallel`. Each returns the model, so that calls can be chained."""

    _settings: Settings
    _running: ProgramSettings

    # The attributes that `AutoParallel` sets.
    net: nn.Module
    loss_fn: LossFunction | None
    _kind: str
    _loss_trains: bool
    _programs: OrderedDict[ProgramKey, StepProgram | PipelineProgram]
    _states: dict[Feed, list[Guards]]  # of each feed, the guards of its programs
    _warned: bool
    _number_changes: Counter[str]  # name of a number that the forward reads -> its changes that were announced
    _graphs: GraphCache
    _accumulation: Accumulation
    _strategy_files: list[Callable[[Plan | PipelinePlan], None]]
    _awaited: list[Callable[[], None]]
    _copies: list[weakref.ref[SettingMethods]]
    _whole: OpenWhole | None
    _first_ranks: dict[str, int]
    _stored: dict[str, Layout] | None
    _used: dict[str, Layout] | None
    _step: Any  # the `StepFunction` that calls run, whose module is above this one, or None
    _entry: FunctionOfModels | None  # the function that is called now
    _own_parameters: dict[str, nn.Parameter]  # also while functional_call has others in their places

    if TYPE_CHECKING:

        @property
        def plan(self) -> Plan | PipelinePlan: ...

        @property
        def settings(self) -> Settings: ...

        @property
        def in_processes(self) -> bool: ...

        def _runtime(self) -> Runtime: ...

    #: The library that hands batches to the processes, and its dataset_strategy; None: the user's own loop.
    _wrapper: tuple[str, object] | None = None

    @known_keywords({"full_batch": '"full_batch" itself, or "data_parallel" for full_batch=False'})
    def dataset_strategy(self, strategy: DatasetStrategy | None = None) -> Self:
        """Set the way in which the batch is fed.

        Args:
            strategy: "data_parallel": each process feeds its own part, and the whole batch is their concatenation in
                the order of the ranks. "full_batch": every process feeds the same whole batch. A tuple with one entry
                per tensor input, a tuple of cuts or a `Layout`: each process feeds the slice of its rank. In the local
                runtime the one process feeds the whole batch in every case. None (default): the batch as the call is
                handed it. A plan for all devices at once is handed the whole batch ("full_batch"), the training step
                of a process is handed the process's own part ("data_parallel").

        A model's calls are training steps: its processes read different rows, as under DistributedDataParallel.
        `shardwright.plan` and `shardwright.verify` plan for all devices at once.

        Raises:
            SettingError: after the first call, or an unknown word.
        """
        if isinstance(strategy, (str, bool)) and strategy not in ("data_parallel", "full_batch"):
            raise SettingError(
                f"unknown dataset_strategy {strategy!r}",
                legal=did_you_mean(
                    strategy,
                    ("data_parallel", "full_batch", "a tuple with one entry per tensor input"),
                    {"full": '"full_batch"', "fullbatch": '"full_batch"', "dp": '"data_parallel"'},
                ),
            )
        self._plan_with("dataset_strategy", dataset_strategy=decided_feeding(strategy, training_step=True))
        return self

    def enable_gradients_mean(self, enabled: bool = True) -> Self:
        """Set whether gradients are those of the mean of the ranks' losses or of their sum. It matters where the loss
        is outside the model and each rank feeds its own part; with `loss_fn` it makes no difference.

        Args:
            enabled: True: the mean, the default of data_parallel, hybrid_parallel and step functions. False: the sum.

        Raises:
            SettingError: after the first call.
        """
        self._run_with("enable_gradients_mean", gradients_mean=bool(enabled))
        return self

    def parameter_broadcast(self, enabled: bool = True) -> Self:
        """Set whether parameters and buffers begin with the values of rank 0, in processes. In one process it changes
        nothing.

        Args:
            enabled: False (the state without this call): all ranks must begin with equal values; ranks that differ
                are named in an error.

        Raises:
            SettingError: after the first call.
        """
        self._run_with("parameter_broadcast", parameter_broadcast=bool(enabled))
        return self

    def comm_fusion(
        self,
        config: FusionSetting | None = None,
        *,
        allreduce: GradientFusion | Literal["auto"] | float | Sequence[int] | None = None,
        openstate: bool = True,
    ) -> Self:
        """Set the buckets of gradients. The gradients of a bucket are summed over ranks in one collective: they wait
        for one another, and the collective runs while the backward goes on.

        Args:
            config: the arguments below as a dict.
            allreduce: ``{"mode": "auto"}`` (the default): the package chooses the buckets' size. ``{"mode": "size",
                "config": 25}``, or 25: a bucket is full at 25 MB. ``{"mode": "index", "config": [10, 20]}``, or the
                list: buckets begin before the parameters of these indices, counted in the order of
                ``model.parameters()`` among the trained ones.
            openstate: False: one collective for each gradient.

        In one process the buckets change nothing, but wrong arguments are refused all the same.

        Raises:
            SettingError: after the first call, an unknown mode or key, or a config that does not fit the mode.
        """
        if config is not None:
            known = {"openstate", "allreduce"}
            if not isinstance(config, dict) or set(config) - known or allreduce is not None:
                raise SettingError(
                    f"comm_fusion: unknown config {config!r}",
                    legal='{"openstate": True, "allreduce": {"mode": "auto"}}: sums of gradients are what is fused',
                )
            openstate, allreduce = config.get("openstate", openstate), config.get("allreduce")
        if not isinstance(openstate, bool):
            raise SettingError(f"comm_fusion: openstate={openstate!r}", legal="True or False")
        fusion = Fusion() if allreduce is None else fusion_of(allreduce)
        self._run_with("comm_fusion", fusion=fusion if openstate else Fusion(limit=0))
        return self

    @known_keywords({"optimizer_weight_shard_size": "shard_size=", "parallel_optimizer_threshold": "threshold="})
    def hsdp(self, shard_size: int = -1, threshold: float = 64, optimizer_level: OptimizerLevel = "level1") -> Self:
        """Set ZeRO/FSDP sharding (optimizer parallel): parameters that are replicated on several devices are stored
        in shards, on top of the cuts of the operators' own strategies. They are gathered before use; their gradients
        are summed and scattered. The computed values stay the same.

        Args:
            shard_size: the number of neighbouring replicas over which a parameter is cut; -1: all of its replicas.
                The gradient is then summed over the rest.
            threshold: the least size of a whole parameter, in KB (1024 bytes), that is cut. A parameter stays whole,
                and the plan notes it, where dim 0 of its slices does not divide, or where
                `shardwright.no_optimizer_parallel` names it.
            optimizer_level: "level1": parameters and the optimizer's state are cut; under `no_sync`, and over the
                micro-batches of a pipeline, gradients are accumulated whole. "level2": gradients are cut as well: each
                is scattered as it comes, and parts are accumulated. "level3": weights are also resharded after the
                forward, and gathered again for the backward. "auto": whole parameters, level1 or level3, in a pipeline
                also level2, over all replicas or those of one host: the fastest step, with messages beside computation,
                that fits into `memory`, which may then be given in every mode. (With `compile` the compiler decides
                which weights gathered under "level1" and "level2" are saved, and gradients are cut.)

        Raises:
            SettingError: after the first call, or an unknown value. At the first call: a `shard_size` that does not
                divide the replicas of a parameter.
            PlanError: at the first call: with "auto", nothing fits into `memory`.
        """
        self._plan_with("hsdp", hsdp=OptimizerParallel(shard_size, threshold, optimizer_level))
        return self

    @known_keywords({"pipeline_scheduler": "scheduler=", "num_stages": "stages=", "micro_batch_num": "micro_batches="})
    def pipeline(
        self,
        stages: int | Literal["auto"] = 2,
        scheduler: Schedule | str = "1f1b",
        micro_batches: int | Literal["auto"] | None = None,
        stage_config: Mapping[str, int] | None = None,
        chunks: int | None = None,
    ) -> Self:
        """Cut the model into stages on different groups of devices, and split each batch into micro-batches.

        Of N devices and S stages, stage s has the ranks from s·N/S to (s+1)·N/S; with 8 devices and 2 stages, stage 1
        has ranks 4 to 7. Strategies and layouts inside a stage refer to these N/S devices. With
        ``dataset_strategy("data_parallel")`` ranks at one position in their stages feed the same part of the batch.
        The batch is split: dim 0 of every tensor input whose dim 0 is as long as that of the first input. Losses and
        gradients are those of the whole batch. Batch norms train by the statistics of each micro-batch.

        A pipeline runs forward and backward together: the model needs its loss, by `loss_fn` or in itself, and
        ``loss.backward()`` hands over gradients that were computed already. Under ``torch.no_grad()`` a pipeline runs
        the forward alone, and returns the results of the model.

        Args:
            stages: the number of groups of devices, or "auto": a search decides where the model is cut, how many
                devices each stage has, and what is recomputed (see `PipelinePlan.alternatives`). Processes then feed
                the whole batch.
            scheduler: "1f1b", "gpipe", "interleaved", "zero_bubble", "zbv", or a CSV file with a row for each group
                of devices and an action in each cell, such as 2F3 (stage 2, forward, micro-batch 3).
            micro_batches: the number of micro-batches, at least `stages`; with stages="auto" also "auto". None: 4, or
                "auto" with stages="auto".
            stage_config: path of a module -> its stage, in addition to `shardwright.set_stage`.
            chunks: the number of stages of each group of devices: `stages` · `chunks` in all. None: 2 for
                "interleaved" and "zbv", else 1.

        Raises:
            SettingError: after the first call, or an unknown value. At the first call: stages that do not fit the
                model or the devices.
        """
        if micro_batches is None:
            micro_batches = "auto" if stages == "auto" else 4
        setting = dict(
            stages=stages, scheduler=scheduler, micro_batches=micro_batches, stage_config=stage_config, chunks=chunks
        )
        self._plan_with("pipeline", pipeline=pipelining(setting))
        return self

    def buckets(
        self,
        seq: Sequence[int],
        dim: int = 1,
        fill: Mapping[str, float] | None = None,
        mask: str | None = "attention_mask",
    ) -> Self:
        """Pad sequences to one of a few lengths, so that a language model fed with many lengths has few programs.

        Each call is padded on the right to the shortest bucket that holds it. Padding is masked, its labels are
        ignored by the loss, and results are cut back to the sequence's own length. Where each process feeds its own
        part of the batch, all processes take the longest bucket that one of them needs.

            model.buckets(seq=[512, 1024, 2048])

        Args:
            seq: the lengths, ascending.
            dim: the sequence dim of the inputs.
            fill: name of an input of the model -> the value that fills it up, in addition to the names that models of
                Hugging Face transformers use; "target" is the input of the loss, by default its ``ignore_index``.
            mask: the input of the model that is 1 at tokens and 0 in padding; made where a call gives none. None: the
                model needs no mask, because its earlier positions do not depend on later ones.

        Raises:
            SettingError: after the first call, or invalid lengths. At a call: a sequence longer than the longest
                bucket, an input whose padding is not known, a model without such a mask.
        """
        value = SequenceBuckets(tuple(seq), dim, dict(fill or {}), mask)
        self._run_with("buckets", buckets=value)
        return self

    def load_operator_strategy_file(self, path: str | Path) -> Self:
        """Read operators' strategies from a saved plan: each line acts as a mark, and overrides the model's own
        marks. Operators without a line are left to the mode; where each has one, the plan is that of the file.

        Args:
            path: a file that `save_operator_strategy_file` or `Plan.save` wrote, edited or not.

        Raises:
            SettingError: after the first call, or in a mode that runs operators as they stand.
            PlanError: no such file, not a plan. At the first call: a plan for another model, other shapes or another
                number of devices, with the line.
        """
        if self._settings.parallel_mode not in PLANNERS:
            raise SettingError(
                f"load_operator_strategy_file: {self._settings.parallel_mode} runs operators as they stand",
                legal=", ".join(PLANNERS),
            )
        self._check_together("load_operator_strategy_file")
        self._check_before_first_call("load_operator_strategy_file")
        self._plan_with("load_operator_strategy_file", strategies=read_document(path))
        return self

    def save_operator_strategy_file(self, path: str | Path) -> Self:
        """Write the plan as a document (`Plan.save`): now, or as soon as it exists, at the first call or by
        `infer_layout`. In processes rank 0 writes.

        Args:
            path: the file.

        Raises:
            SettingError: there is no such folder.
            OSError: the file cannot be written.
        """
        self._save_when_planned("save_operator_strategy_file", path, lambda plan: plan.save(path))
        return self

    def load_param_strategy_file(self, path: str | Path) -> Self:
        """Read the stored layouts of parameters from a file. Operators are split as marks and the mode say; the
        redistribution of a parameter from its stored layout to its use is part of the plan, and searches count its
        cost. Parameters without a line are stored as the mode and `hsdp` say.

        Args:
            path: a file that `save_param_strategy_file` wrote, edited or not, or a plan that was saved.

        Raises:
            SettingError: after the first call, or in a mode in which parameters are stored as they are.
            PlanError: no such file, or none of this kind. At the first call: a line of a parameter that the model
                does not have, or that has another shape or type; another number of devices.
            LayoutError: a line that no layout of the parameter follows.
        """
        if self._settings.parallel_mode not in PLANNERS:
            raise SettingError(
                f"load_param_strategy_file: {self._settings.parallel_mode} stores parameters as they are",
                legal=", ".join(PLANNERS),
            )
        self._check_together("load_param_strategy_file")
        self._check_before_first_call("load_param_strategy_file")
        self._plan_with("load_param_strategy_file", param_strategies=ParameterStrategies.read(path))
        return self

    def save_param_strategy_file(self, path: str | Path) -> Self:
        """Write the stored layout of each parameter, one line each (`ParameterStrategies`): now, or as soon as the
        plan exists, at the first call or by `infer_layout`. In processes rank 0 writes. Checkpoints are transformed
        by such files.

        Args:
            path: the file.

        Raises:
            SettingError: there is no such folder.
            OSError: the file cannot be written.
        """
        self._save_when_planned("save_param_strategy_file", path, lambda plan: ParameterStrategies.of(plan).save(path))
        return self

    def _save_when_planned(self, name: str, path: str | Path, save: Callable[[Plan | PipelinePlan], None]) -> None:
        self._check_together(name)
        if not Path(path).absolute().parent.is_dir():
            raise SettingError(
                f"{name}: there is no folder {Path(path).parent}", legal="a file in a folder that is there"
            )
        if not self._programs:
            self._strategy_files.append(save)
        elif self._runtime().rank == 0:
            save(self.plan)

    def _write_strategies(self, plan: Plan | PipelinePlan) -> None:
        """Write the files that wait for a plan."""
        if self._runtime().rank == 0:
            for save in self._strategy_files:
                save(plan)

    def replan(self) -> Self:
        """Forget all plans of the model. The next call captures and plans it anew, with the marks (`shardwright.shard`,
        `recompute`, `set_stage`) that were given since, which are an error while there is a plan.

            model.replan()
            sw.shard(net.layer1, ((4, 1), (1, 1), (1,)))
            loss = model(x, y)                              # plans, as the first call does

        In one process, settings such as `hsdp` and `pipeline` may be changed as well. In several processes parameters
        stay stored in the slices that they have, which optimizers hold: the plan redistributes them where operators
        ask for others, and settings stay as they are. All ranks call it alike.

        Returns:
            The model.

        Raises:
            SettingError: inside of `whole` or `no_sync`; in several processes, a pipeline, whose ranks hold the
                parameters of their own stage alone.
        """
        if self._whole is not None or self._accumulation.open:
            raise SettingError(
                f"replan() inside of {'no_sync' if self._whole is None else 'whole'}()", legal="replan() after it"
            )
        if self.in_processes and self._settings.pipeline is not None and self._stored is not None:
            raise SettingError(
                "replan() of a pipeline in several processes: each rank holds the parameters of its own stage alone",
                legal="save_checkpoint, and load_checkpoint into a new model of a new run, with other marks",
            )
        self._programs.clear()
        self._states.clear()
        self._warned, self._used = False, None
        if not self.in_processes:
            self._stored = None
        forget_planned(self)
        for part in self._parts():
            part.replan()
        return self

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of backwards inside the ``with`` block unsummed on each rank. The next backward outside
        sums them together with its own, once: the communication of one backward, and the same gradients as without
        `no_sync`.

        Between the two, the sums are not complete: an optimizer's step and ``clip_grad_norm_`` are refused
        (`SettingError`), ``zero_grad`` drops them. Sums inside the program, such as those of a cut parameter's
        activations, are taken as ever. It changes nothing in one process, where gradients are whole, nor where
        parameters have hooks, which need the gradient of each backward.

        Returns:
            A context manager.
        """
        trained = [*self.parameters(), *(self.loss_fn.parameters() if isinstance(self.loss_fn, nn.Module) else ())]
        before, self._accumulation.open = self._accumulation.open, not any(any(gradient_hooks(p)) for p in trained)
        try:
            yield
        finally:
            self._accumulation.open = before

    def _check_together(self, name: str) -> None:
        """Refuse what belongs to one of several models, by the method `name`: `AutoParallel` has such."""

    def _note_parameters(self) -> None:
        """Note the model's parameters, by name."""
        self.__dict__["_own_parameters"] = dict(ModelAndLoss(self.net, self.loss_fn).named_parameters())

    def _plan_with(self, name: str, **changed: Any) -> None:
        """Change settings that decide plans, by the method `name`."""
        self._check_before_first_call(name)
        self._settings = replace(self._settings, **changed)
        for part in self._parts():
            part._plan_with(name, **changed)

    def _run_with(self, name: str, **changed: Any) -> None:
        """Change settings that decide how plans run, by the method `name`."""
        self._check_before_first_call(name)
        self._running = replace(self._running, **changed)
        for part in self._parts():
            part._run_with(name, **changed)

    def _check_before_first_call(self, name: str) -> None:
        if self._programs or self._stored is not None:
            raise SettingError(
                f"{name}() comes too late: the model has been called and planned",
                legal=f"{name}() before the first call; in a single process also after model.replan()",
            )
        for part in self._parts():
            part._check_before_first_call(name)

    def _parts(self) -> Sequence[SettingMethods]:
        """The wrappers of the models of a step that calls them by themselves; `AutoParallel` may have such."""
        return []

    def _check_wrapper(self, wrapper: tuple[str, object] | None) -> None:
        """Check that the settings fit the way in which a library hands out batches.

        Args:
            wrapper: see `_wrapper`.

        Raises:
            SettingError: a pipeline whose stages would get different parts of a batch; another `dataset_strategy`
                than the library was given.
        """
        if wrapper is None:
            return
        library, strategy = wrapper
        if self._settings.pipeline is not None and strategy == "data_parallel":
            raise SettingError(
                f"{library} hands each process its own part of a batch, and a pipeline's stages work on the same one",
                legal='dataset_strategy("full_batch")'
                + (f" before {library} is given the model" if self._wrapper is wrapper else ""),
            )
        if self._settings.dataset_strategy != strategy:
            raise SettingError(
                f"{library} hands out batches by dataset_strategy({strategy!r}), and the model has been given "
                f"dataset_strategy({self._settings.dataset_strategy!r}) since",
                legal=f"dataset_strategy before {library} is given the model",
            )
