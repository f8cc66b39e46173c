"""The plan of one call of a wrapped model, on which all ranks agree.

1. The global inputs of the call follow from the local ones and the `dataset_strategy`.
2. The model is captured at these sizes (`graph_cache`); a pipeline captures one micro-batch, and one of more rows.
3. `planning.make_plan` or `planning.make_pipeline` plans the graph.
4. In processes the ranks compare their plans, settings, first values and random state (`Agreement`). A rank whose
   planning failed tells the others, so that none waits for it.

Example: 8 processes each pass x [4, 16] under ``dataset_strategy("data_parallel")``. The model is captured and planned
at the global x [32, 16]; in a pipeline of 4 micro-batches it is captured at [8, 16].
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from .. import autocast
from ..capture.annotations import staged_modules, stored_whole, warn_of_ignored_stages
from ..capture.export import CaptureSettings, Recording, captures
from ..capture.hybrid_models import check_held, check_mode, one_slice, own_parameters
from ..capture.model_device import check_inputs, check_values, device_of
from ..capture.module_calls import FunctionOfModels, ModelAndLoss
from ..capture.regions import with_policy
from ..capture.source_lines import stack_level
from ..errors import SettingError
from ..graph import Graph
from ..launch.progress import showing
from ..ops import for_ranks
from ..partition.hybrid_parallel import OwnPrograms, local_inputs
from ..pipeline.build import is_split, micro_calls
from ..pipeline.pipeline_plan import PipelinePlan, PipelineSearchResult, StageParameter
from ..pipeline.stage_search import AutomaticStages
from ..planners.planning_problem import global_inputs, implied_devices, warn_of_ignored_marks
from ..planning import make_pipeline, make_plan
from ..process_runtime import Runtime, compare_devices, current, stream
from ..pytree_objects import opened, with_tensors
from ..rules.attention import with_fast_attention
from ..runtime.deferred_init import beginnings
from ..runtime.pipeline_step import PipelineProgram
from ..runtime.step_program import StepProgram
from ..sharded_plan import ParameterPlan, Plan
from ..torch_private import pytree
from .data_shards import digest_of_parts, warn_of_parts
from .foreign_wrappers import check_inside
from .setting_methods import SettingMethods

__all__ = ["CallPlanning"]

Earlier = TypeVar("Earlier", Plan, PipelinePlan)


class CallPlanning(SettingMethods):
    """The planning of a wrapped model, as a base class: `AutoParallel` has the attributes that are read here."""

    def infer_layout(self, *args: object, **kwargs: object) -> dict[str, ParameterPlan] | dict[str, StageParameter]:
        """Plan a call without running it, and return the layout of each parameter and buffer. No parameter is cut or
        allocated. Files that `save_operator_strategy_file` and `save_param_strategy_file` still have to write are
        written.

        Args:
            args, kwargs: the arguments of a call of the model, or of the step function, which runs up to its first call
                of the model. In processes every rank calls `infer_layout`.

        Returns:
            By name: the whole ``shape``, the ``layout`` in which the parameter is used, the layout of its
                ``storage``, ``slice(rank)`` and ``local_shape(rank)``.

        Raises:
            ShardwrightError: whatever cannot be planned.
        """
        self._check_together("infer_layout")
        return self.infer(None, args, kwargs) if self._step is None else self._step.inferred(self, args, kwargs)

    def infer(
        self, entry: FunctionOfModels | None, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> dict[str, ParameterPlan] | dict[str, StageParameter]:
        """`infer_layout` of a call of the model, or of a function of it."""
        args, kwargs = with_tensors((args, kwargs))
        with self._entered(entry):
            before = self._before()
            plan = self._planned(args, kwargs, ModelAndLoss(self.net, self.loss_fn), before, runs=False)
        if before is None:
            self._write_strategies(plan)
        return plan.parameters

    def _planned(
        self,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        module: ModelAndLoss,
        before: StepProgram | PipelineProgram | None,
        *,
        runs: bool = True,
        recording: Recording | None = None,
        hooks_around: bool = True,
    ) -> Plan | PipelinePlan:
        """The plan of a call, on which all ranks agree. The model is not changed.

        Args:
            before: the program of an earlier call, or None.
            runs: True where the plan is about to run, so that ranks must hold the same values too.
            recording: receives what the captures observe of the model besides operators.
            hooks_around: see `AutoParallel._build`.
        """
        args, kwargs = opened((args, kwargs))
        runtime = self._runtime_of(args, kwargs)
        settings, broadcast = self._settings, self._running.parameter_broadcast
        alone, hybrid = settings.parallel_mode == "stand_alone", settings.parallel_mode == "hybrid_parallel"
        if alone:
            settings = replace(settings, dataset_strategy="full_batch")
        devices, dataset = 1 if alone else runtime.devices, settings.dataset_strategy
        parts = runtime.processes and not alone
        plan: Plan | PipelinePlan
        signature: list[tuple[tuple[int, ...], str]] = []
        ranks = None
        if parts:
            from ..runtime.distributed.agreement import Agreement, begin_planning  # noqa: PLC0415  in processes alone

            begin_planning("" if recording is None else recording.why)
            compare_devices()
            ranks = Agreement(settings.parallel_mode, signature)
        try:
            self._check_wrapper(self._wrapper)
            check_inside(self.net)
            latest = next(reversed(self._programs.values()), None)
            retyped = None if latest is None or not parts else latest.guards.retyped()
            if retyped is not None:
                raise SettingError(
                    f"{retyped}: after the first call in several processes, parameters keep their dtypes and shapes, "
                    "which optimizers hold in slices",
                    legal="net.bfloat16() before AutoParallel(net); AutoParallel(net, mixed_precision=…)",
                )
            if runs:
                check_values((args, kwargs))
            stored, used = self._stored, self._used
            if before is None and parts and (stored is None or self._programs):
                from ..runtime.distributed.parameters import stored_layouts, used_layouts  # noqa: PLC0415  in processes alone

                stored, used = stored_layouts(module), used_layouts(module) if self._programs else None
            if runtime.processes and before is None and not stored:
                device_of(self.net, self.loss_fn)  # an error where it is on several
            check_mode(module, settings.parallel_mode)
            if hybrid:
                devices = devices or 1
                check_held(module, devices, runtime.processes)
                whole_args, whole_kwargs = (args, kwargs) if parts else local_inputs(args, kwargs, devices, dataset)
            else:
                whole_args, whole_kwargs = (
                    global_inputs(args, kwargs, devices // self._groups(devices), dataset)
                    if parts and devices
                    else (args, kwargs)
                )
            signature += [
                (tuple(x.shape), str(x.dtype))
                for x in pytree.tree_leaves((whole_args, whole_kwargs))
                if isinstance(x, torch.Tensor)
            ]
            if self._loss_trains and isinstance(self.loss_fn, nn.Module):
                self.loss_fn.train(self.training)
            self._running.fusion.check(sum(p.requires_grad for p in module.parameters()))
            splits = is_split(whole_args, whole_kwargs)

            how = CaptureSettings(
                loss_fn=self.loss_fn,
                device=runtime.device,
                hooks_around=hooks_around,
                mixed_precision=settings.mixed_precision,
            )
            recording = recording or Recording()

            def captured(count: int | None) -> tuple[Graph, Graph | None]:
                with for_ranks(devices), one_slice(module), showing(settings.search_progress):
                    calls = (
                        [(whole_args, whole_kwargs)]
                        if count is None
                        else micro_calls(whole_args, whole_kwargs, count, settings.pipeline)
                    )
                    graph, *wide = self._graphs.graphs(
                        (autocast.current("cpu", self._kind), runtime.device, self._entry),
                        calls,
                        recording,
                        partial(captures, self.net, **how),
                    )
                graph = with_policy(graph, settings.recompute)
                fast = self._running.random == "fast"
                return with_fast_attention(graph) if fast else graph, wide[0] if wide else None

            automatic = (
                None
                if settings.pipeline is None
                else AutomaticStages.of(
                    settings.pipeline,
                    whole_args,
                    whole_kwargs,
                    captured,
                    None if before is None else before.plan,
                    None if ranks is None else partial(ranks.first, PipelineSearchResult),
                    per_rank_batch=parts and dataset != "full_batch",
                )
            )
            graph, wide = captured(None if automatic is None else automatic.count)
            if before is None and runtime.rank == 0:
                warn_of_ignored_marks(graph, settings.parallel_mode)
                if settings.pipeline is None:
                    warn_of_ignored_stages(self.net)
            files = [file for file in (settings.strategies, settings.param_strategies) if file is not None]
            devices = devices or (files[0].devices if files else implied_devices(graph) * self._groups(None))
            lies = settings.param_strategies if before is None else None
            if lies is not None:
                groups = 1 if settings.pipeline is None else settings.pipeline.stages
                stored = lies.onto(graph, devices, groups, stored, settings.uneven)
            whole, searcher = stored_whole(self.net, self.loss_fn), None if ranks is None else ranks.search
            if settings.pipeline is not None:
                modules = staged_modules(self.net, dict(settings.pipeline.stage_config))
                earlier = self._earlier(PipelinePlan)
                plan = make_pipeline(
                    graph,
                    wide,
                    devices,
                    settings,
                    modules,
                    splits,
                    automatic=automatic,
                    earlier=earlier,
                    stored=stored,
                    used=used,
                    whole=whole,
                    searcher=searcher,
                )
            else:
                own = OwnPrograms(own_parameters(module), self.loss_fn is not None) if hybrid else None
                plan = make_plan(
                    graph,
                    devices,
                    settings,
                    own=own,
                    earlier=() if hybrid else self._earlier(Plan),
                    stored=stored,
                    used=used,
                    whole=whole,
                    searcher=searcher,
                )
            if lies is not None:
                lies.check_stored(plan)
        except Exception as error:  # of any kind: the other ranks raise it too
            if ranks is not None:
                ranks.missed(error)  # the other ranks wait for this one's plan
            raise
        if ranks is not None:
            begin = {} if before is not None or broadcast or self._awaited or not runs else beginnings(module)
            first = before is None and runs
            digests = ranks.agree(
                plan,
                {name: value for name, value in begin.items() if name not in own_parameters(module)},
                (*stream.upcoming(), self._running.random) if plan.draws and runs else None,
                (self._running.fusion, broadcast),
                digest_of_parts((args, kwargs)) if first else "",
            )
            warn_of_parts(self, (args, kwargs), digests)
        if before is None and runs and runtime.rank == 0:
            from ..report.description import nothing_split_warning  # noqa: PLC0415  imports the tables of a terminal

            if text := nothing_split_warning(plan, settings.cluster is not None):
                warnings.warn(text, stacklevel=stack_level())
        return plan

    def _agreed_bucket(self, index: int) -> int:
        """The index of the longest bucket that any process needs, where processes feed different parts of the batch."""
        runtime = self._runtime()
        settings = self._settings
        whole = settings.dataset_strategy == "full_batch" or settings.parallel_mode == "stand_alone"
        if not runtime.processes or whole:
            return index
        from torch import distributed  # noqa: PLC0415  needed by runs in processes alone

        compare_devices()
        needed = torch.tensor(index, device=runtime.device)
        distributed.all_reduce(needed, distributed.ReduceOp.MAX)
        return int(needed)

    def _heard(self, error: SettingError) -> SettingError:
        """The error that keeps this rank from a call after the first one, which the other ranks have heard of."""
        mode = self._settings.parallel_mode
        if self._runtime().processes and mode != "stand_alone":
            from ..runtime.distributed.agreement import begin_refused  # noqa: PLC0415  in processes alone

            begin_refused(mode, error)
        return error

    @contextlib.contextmanager
    def _entered(self, entry: FunctionOfModels | None) -> Iterator[None]:
        """Let calls be calls of a function of the wrapped models inside the ``with`` block; None: of the model."""
        before, self.__dict__["net"], self.__dict__["_entry"] = self.net, entry or self.net, entry
        try:
            yield
        finally:
            self.__dict__["net"], self.__dict__["_entry"] = before, None

    def _before(self) -> StepProgram | PipelineProgram | None:
        """The model's latest program, which tells how its parameters are stored.

        None where there is no program, or where parameters or submodules were replaced since. In several processes
        the parameters that stay keep their slices then, and new ones are cut as at a first call.
        """
        before = next(reversed(self._programs.values()), None)
        if before is None or not before.guards.parts_changed():
            return before
        if before.sharded is None:
            self._stored = self._used = None
            return None
        now = dict(ModelAndLoss(self.net, self.loss_fn).named_parameters())
        known = self._own_parameters
        return before if now.keys() == known.keys() and all(known[n] is p for n, p in now.items()) else None

    def _earlier(self, kind: type[Earlier]) -> list[Earlier]:
        """Plans of one kind, the latest first: candidates for the plan of the same model at other sizes."""
        return [program.plan for program in reversed(self._programs.values()) if isinstance(program.plan, kind)]

    def _varying(self) -> set[int]:
        """The dims of the inputs that are known beforehand to differ in size from call to call."""
        buckets, varying = self._running.buckets, {*self._running.varying}
        return varying if buckets is None or len(buckets.seq) == 1 else varying | {0, buckets.dim}

    def _groups(self, devices: int | None) -> int:
        """The number of device groups of a pipeline, where it is known and divides `devices`; else 1."""
        pipeline = self._settings.pipeline
        groups = pipeline.stages if pipeline is not None and isinstance(pipeline.stages, int) else 1
        return groups if devices is None or devices % groups == 0 else 1

    def _runtime(self) -> Runtime:
        return current()

    def _runtime_of(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Runtime:
        """The runtime of a call: in a single process that was given no device, on the device of the model.

        Raises:
            SettingError: a model on several devices, or an input on another one.
        """
        runtime = self._runtime()
        if not runtime.processes and not runtime.chosen:
            device = device_of(self.net, self.loss_fn, (args, kwargs))
            check_inputs(device, (args, kwargs))
            runtime = replace(runtime, device=device)
        self._kind = runtime.device.type
        return runtime
