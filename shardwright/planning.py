"""Planning: from a model to a plan.

1. `plan` captures the model (`capture.export`), for a pipeline one micro-batch of it, marks the operators to
   recompute, and reads saved strategies.
2. `make_plan` checks the settings and calls the planner of the mode (`planners.planning_problem.PLANNERS`). The result
   is partitioned at once, so every error is raised here.
3. `make_pipeline` cuts a captured model into stages and runs `make_plan` for each.

Example: ``plan(net, (x,), loss_fn, y, parallel_mode="data_parallel", devices=8)`` with x [32, 16] cuts dim 0 of every
operator 8 ways: each device has 4 rows of x, and all parameters whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from .capture.annotations import PipelineSettings, staged_modules, stored_whole
from .capture.export import capture, captures
from .capture.graph_reader import MarkUse
from .capture.hybrid_models import check_mode, one_slice, own_parameters
from .capture.regions import with_policy
from .cluster import Cluster, memory_of
from .errors import CaptureError, PlanError, SettingError, known_keywords
from .garbage_collection import gc_paused, roomy_stack
from .graph import Graph
from .launch.progress import keep, phase
from .layout import Layout
from .ops import COLLECTIVES, for_ranks
from .partition.hybrid_parallel import (
    OwnPrograms,
    decided,
    local_inputs,
    place_whole_inputs,
    with_own_statistics,
    with_stacked,
)
from .partition.local_program import Decisions, InputPlacement, PortableDecisions, place_inputs
from .partition.parameter_sharding import OptimizerParallel
from .pipeline.build import PlanCache, is_split, micro_calls, pipeline_plan, schedule_of, until_stopped
from .pipeline.pipeline_plan import PipelinePlan, PipelineSearchResult
from .pipeline.stage_costs import recomputed
from .pipeline.stage_search import UNITS_BY, AutomaticStages, check_automatic
from .pipeline.stage_storage import in_fastest_storage
from .pipeline.stages import units_of
from .planfile.parameter_file import ParameterStrategies
from .planfile.pipeline_document import PipelineDocument
from .planfile.plan_document import PlanDocument
from .planners.memory_fit import TooLittleMemoryError
from .planners.plan_search import at_other_sizes, cheapest_of_modes, fastest_storage, plan_so_far, storages
from .planners.planning_problem import CUT, PLANNERS, PlanningProblem, PriceBook, planners, warn_of_ignored_marks
from .planners.semi_auto import ungathered_parameters
from .pytree_objects import with_tensors
from .settings import (
    KEYWORDS_ELSEWHERE,
    ClusterSetting,
    DatasetStrategy,
    HsdpSetting,
    Limit,
    MissingRule,
    OptimizerState,
    ParallelMode,
    PipelineSetting,
    PlanKeywords,
    PrecisionSetting,
    RecomputePolicy,
    Settings,
)
from .sharded_plan import Plan
from .solver.problem import StoppedSearch
from .solver.search_memory import SearchBudget, SearchProgress, spending

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["capture_micro", "make_pipeline", "make_plan", "plan"]

#: Runs a search for several processes: (graph, settings that decide the result, search, a function that carries
#: portable decisions onto the process's own graph) -> decisions.
Searcher = Callable[[Graph, object, Callable[[], Decisions], Callable[[PortableDecisions], Decisions]], Decisions]

#: Modes in which each device has its own batch-norm statistics, unless `sync_batch_norm` is set.
OWN_STATISTICS = ("data_parallel",)


@phase("plan", lambda graph, devices, settings, **_: settings.search_progress)
@roomy_stack
@gc_paused()
def make_plan(
    graph: Graph,
    devices: int,
    settings: Settings,
    *,
    stored: dict[str, Layout] | None = None,
    used: dict[str, Layout] | None = None,
    own: OwnPrograms | None = None,
    whole: frozenset[str] = frozenset(),
    searcher: Searcher | None = None,
    input_placement: InputPlacement | None = None,
    earlier: Sequence[Plan] = (),
    prices: PriceBook | None = None,
) -> Plan:
    """Plan a captured model; every error that a strategy can cause is raised here.

    Args:
        settings: the settings. Those of the capture (`recompute`, `mixed_precision`, `pipeline`) and
            `param_strategies`, which `stored` holds already, are not read.
        stored: storage layouts of parameters and buffers, where already fixed.
        used: the layouts in which an earlier plan's operators consume parameters; None: as `stored`.
        own: in hybrid_parallel, whose graph has one rank's shapes, the facts that the graph does not contain.
        whole: parameters that are never stored cut over their replicas.
        searcher: where several processes plan together, the function that runs the search on one; None: this process
            searches.
        input_placement: the placement of the inputs, for a stage of a pipeline; None: by `dataset_strategy`.
        earlier: plans of the same model at other sizes, the latest first: the strategies of the first that fits apply
            here too (`at_other_sizes`).
        prices: prices that plans of other graphs share; None: the plan has its own.

    Raises:
        ShardwrightError: a strategy or a setting that does not fit, with the operator and a legal choice.
    """
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise SettingError(f"a plan is for a whole number of devices, not {devices!r}", legal="devices=8")
    parallel_mode, dataset_strategy = settings.parallel_mode, settings.dataset_strategy
    on_missing_rule, uneven, strategies = settings.on_missing_rule, settings.uneven, settings.strategies
    hsdp = None if settings.hsdp is None else replace(settings.hsdp, whole=whole)
    automatic = hsdp if hsdp is not None and hsdp.is_automatic else None
    cluster = Cluster.of(settings.cluster, devices)
    memory, optimizer, fitting = memory_of(settings.memory, cluster), settings.optimizer, planners(fits_memory=True)
    if memory is not None and parallel_mode not in fitting and (automatic is None or parallel_mode not in PLANNERS):
        follows = parallel_mode in planners(searches=True)
        raise SettingError(
            f"memory={settings.memory!r} limits what is searched; {parallel_mode} "
            + ("follows marks, whatever memory that takes" if follows else "searches nothing"),
            legal=f'no memory=, or parallel_mode={" or ".join(map(repr, fitting))}, or hsdp(optimizer_level="auto")',
        )
    if parallel_mode == "stand_alone":
        input_placement = place_inputs(graph, 1, "full_batch")
        alone = PLANNERS["data_parallel"](PlanningProblem(graph, 1, input_placement, on_missing_rule="replicate"))
        made = Plan(graph, 1, "stand_alone", input_placement, alone.decisions, alone.batch_dims, cluster=cluster)
        _ = made.program
        return made
    if parallel_mode == "hybrid_parallel":
        if hsdp is not None:
            raise SettingError(
                "hsdp cuts what is replicated; in hybrid_parallel each rank runs its own program",
                legal="data_parallel or semi_auto, or no hsdp",
            )
        own = own or OwnPrograms(frozenset(), False)
        made = Plan(
            with_stacked(graph, devices, own),
            devices,
            parallel_mode,
            place_whole_inputs(graph, devices, dataset_strategy),
            decided(graph, devices),
            {},
            own=own,
            cluster=cluster,
            comm_memory=settings.allowance,
        )
        _ = made.program
        return made
    placed = next((op for op in graph.ops if op.target in COLLECTIVES), None)
    if placed is not None:
        raise SettingError(
            f"sw.ops.{placed.kind} joins the programs of ranks, which {parallel_mode} makes itself",
            **placed.where,
            legal='parallel_mode="hybrid_parallel", or the model without it',
        )
    if parallel_mode in OWN_STATISTICS and not settings.sync_batch_norm:
        graph = with_own_statistics(graph, devices, on_missing_rule)
    input_placement = input_placement or place_inputs(graph, devices, dataset_strategy)
    mode, settled = PLANNERS[parallel_mode], used or stored
    if strategies is not None:
        graph, mode, stored = strategies.onto(
            graph, devices, mode, stored, on_missing_rule=on_missing_rule, uneven=uneven, first=used is None
        )
    if automatic is not None:  # strategies are searched under one storage
        hsdp = replace(automatic, optimizer_level="level1" if memory is None else "level3")
    deliveries = (prices or PriceBook()).of(cluster, devices, on_missing_rule, uneven)
    problem = PlanningProblem(
        graph,
        devices,
        input_placement,
        on_missing_rule=on_missing_rule,
        stored=settled,
        uneven=uneven,
        cost_model=deliveries.costs,
        hsdp=hsdp,
        memory=memory,
        optimizer=optimizer,
        cut=replace(CUT, whole=whole),
        deliveries=deliveries,
    )
    if parallel_mode != "data_parallel":  # which ignores marks
        stored = {**ungathered_parameters(problem), **(stored or {})} or None
        settled = used or stored
        problem = replace(problem, stored=settled)
    for one in earlier if strategies is None else ():
        same = at_other_sizes(one, graph, devices, on_missing_rule=on_missing_rule, uneven=uneven)
        if same is None:
            continue
        ops = tuple(same.decisions[op.name].op for op in graph.ops)
        made = Plan(
            graph.with_ops(ops),
            devices,
            parallel_mode,
            input_placement,
            same.decisions,
            same.batch_dims,
            stored,
            same.hsdp,
            cluster=cluster,
            found=same.found,
            optimizer=optimizer,
            comm_memory=settings.allowance,
        )
        if memory is None or made.unscheduled.peak <= memory:
            _ = made.program
            return made

    def plan_of(result: Decisions, chosen_setting: OptimizerParallel | None = hsdp) -> Plan:
        decisions, batch_dims, found, storage = result
        # With a limit of memory a search has decided the recomputed operators too.
        ops = graph.ops if memory is None else tuple(decisions[op.name].op for op in graph.ops)
        made = Plan(
            graph.with_ops(ops),
            devices,
            parallel_mode,
            input_placement,
            decisions,
            batch_dims,
            stored,
            chosen_setting or storage,
            cluster=cluster,
            found=found,
            optimizer=optimizer,
            comm_memory=settings.allowance,
        )
        _ = made.program  # raises where the plan cannot be partitioned
        return made

    plan: Plan | None = None
    keep(None)
    if mode.searches:

        def find() -> Decisions:
            nonlocal plan
            result, failed = None, None
            with spending(SearchBudget(*settings.budget)):
                try:
                    result = mode(problem)
                except TooLittleMemoryError as error:
                    failed = error
                except StoppedSearch as stop:
                    so_far = stop.found if isinstance(stop.found, Decisions) else None
                    keep(lambda: plan_so_far(so_far, problem, plan_of))  # a stage's: see `until_stopped`
                    raise KeyboardInterrupt from None
            if result is not None and not mode.fits_memory:  # it follows marks, and compares for itself
                return result
            keep(lambda: plan_so_far(result, problem, plan_of))
            result, plan = cheapest_of_modes(result, problem, plan_of)
            if result is None:
                assert failed is not None
                raise PlanError(failed.message, legal=failed.legal) from failed
            return result

        result = (
            find()
            if searcher is None
            else searcher(
                graph,
                dict(
                    devices=devices,
                    memory=settings.memory,
                    optimizer=optimizer,
                    hsdp=hsdp,
                    uneven=uneven,
                    on_missing_rule=on_missing_rule,
                ),
                find,
                lambda portable: portable.onto(graph, devices, on_missing_rule=on_missing_rule, uneven=uneven),
            )
        )
    else:
        result = mode(problem)
    if automatic is not None:
        choices = storages(automatic, cluster, devices, stored is not None)
        return fastest_storage(lambda setting: plan_of(result._replace(hsdp=None), setting), choices, hsdp, memory)
    return plan_of(result) if plan is None or plan.decisions is not result.decisions else plan


def capture_micro(
    net: nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    count: int,
    setting: PipelineSettings | None = None,
    **options: Any,
) -> tuple[Graph, Graph | None]:
    """Capture a model for one micro-batch of the inputs of a whole batch.

    Args:
        setting: see `micro_calls`.
        options: as `capture` takes it.

    Returns:
        Its graph, and that for more rows, which `microbatch.split` compares with it; None for a single micro-batch.
    """
    graph, *wide = captures(net, micro_calls(args, kwargs, count, setting), **options)
    return graph, wide[0] if wide else None


@phase("plan of a pipeline", lambda graph, wide, devices, settings, *_, **__: settings.search_progress)
def make_pipeline(
    graph: Graph,
    wide: Graph | None,
    devices: int,
    settings: Settings,
    modules: Mapping[str, int],
    splits: tuple[bool, ...],
    *,
    stored: dict[str, Layout] | None = None,
    used: dict[str, Layout] | None = None,
    whole: frozenset[str] = frozenset(),
    searcher: Searcher | None = None,
    automatic: AutomaticStages | None = None,
    chosen: PipelineSearchResult | None = None,
    earlier: Sequence[PipelinePlan] = (),
    prices: PriceBook | None = None,
) -> PipelinePlan:
    """Plan a captured model as a pipeline, each stage by `make_plan`.

    Args:
        graph, wide: of one micro-batch, from `capture_micro`.
        settings: the settings, with a `pipeline`.
        modules: dotted path -> stage.
        splits: per tensor input, True where it is split into micro-batches.
        stored, used, whole, searcher: as `make_plan` takes them.
        automatic: for stages="auto", the settings of the choice.
        chosen: the chosen stages.
        earlier: plans of the same model at other sizes, the latest first: their stages' strategies apply here where
            they fit.
        prices: prices that the plans of its stages share; None: new ones.

    Raises:
        ShardwrightError: as `make_plan` and `pipeline_plan`.
    """
    parallel_mode, setting, strategies = settings.parallel_mode, settings.pipeline, settings.strategies
    prices = prices or PriceBook()
    assert setting is not None
    if parallel_mode not in PLANNERS:
        raise SettingError(f"a pipeline in {parallel_mode}", legal=", ".join(PLANNERS))
    if settings.hsdp is not None and settings.hsdp.is_automatic:
        cluster, chooses = Cluster.of(settings.cluster, devices), setting.stages == "auto"
        limit = memory_of(settings.memory, cluster)
        more: dict[str, Any] = dict(stored=stored, used=used, whole=whole, searcher=searcher, automatic=automatic)

        def stored_by(storage: OptimizerParallel | None) -> PipelinePlan:
            stored_settings = replace(settings, hsdp=storage, memory=settings.memory if chooses else None)
            return make_pipeline(
                graph, wide, devices, stored_settings, modules, splits, earlier=earlier, prices=prices, **more
            )

        if limit is None and chooses:
            limit = cluster.memory
        return in_fastest_storage(stored_by, settings.hsdp, cluster, limit, earlier, stored is not None)
    if setting.stages == "auto" and automatic is not None:
        check_automatic(setting, modules, None if strategies is None else strategies.path)
        cluster = Cluster.of(settings.cluster, devices)
        unit = replace(
            settings,
            parallel_mode=UNITS_BY.get(parallel_mode, parallel_mode),
            cluster=cluster,
            memory=None,
            strategies=None,
        )

        def units_plan(part: Graph, size: int, input_placement: InputPlacement) -> Plan:
            return make_plan(part, size, unit, input_placement=input_placement, whole=whole, prices=prices)

        def piped(found: PipelineSearchResult, quick: bool = False) -> PipelinePlan:
            same = found.micro_batches == automatic.count
            mine, wider = (graph, wide) if same else automatic.captured(found.micro_batches)
            mine = recomputed(mine, units_of(mine), found.recomputed)
            return make_pipeline(
                mine,
                wider,
                devices,
                replace(unit if quick else settings, pipeline=found.setting, cluster=cluster, memory=None),
                found.modules,
                splits,
                stored=stored,
                used=used,
                whole=whole,
                searcher=searcher,
                chosen=found,
                earlier=earlier,
                prices=prices,
            )

        found = automatic.run(
            graph,
            wide,
            splits,
            devices,
            settings.dataset_strategy,
            cluster,
            memory_of(settings.memory, cluster),
            units_plan,
            piped,
            setting.micro_batches,
        )
        keep(lambda: found)
        return found
    if settings.memory is not None:
        raise SettingError(
            f"memory={settings.memory!r} for a pipeline of given stages",
            legal='stages="auto", or hsdp(optimizer_level="auto"), or no memory=',
        )
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise SettingError(f"a plan is for a whole number of devices, not {devices!r}", legal="devices=8")
    settings = replace(settings, cluster=Cluster.of(settings.cluster, devices), strategies=None)
    counting = Settings(
        "semi_auto", settings.dataset_strategy, on_missing_rule=settings.on_missing_rule, cluster=settings.cluster
    )
    marked = any(op.mark is not None for op in graph.ops)  # a stage without marks follows the batch
    planned = schedule_of(setting, devices) if chosen is None else chosen.schedule
    lines = None if strategies is None else strategies.per_stage(planned, devices)

    def planner(
        part: Graph, size: int, input_placement: InputPlacement, number: int, mode: str = parallel_mode
    ) -> Plan:
        if number < 0:  # the graph that counts targets: no strategy to decide
            return make_plan(part, size, counting, input_placement=input_placement, prices=prices)
        own_names = {*part.parameters, *part.buffers}
        mine = [
            None if all_ is None else {n: layout for n, layout in all_.items() if n in own_names}
            for all_ in (stored, used)
        ]
        follows = parallel_mode != "sharding_propagation" or not marked or any(op.mark for op in part.ops)
        stage_settings = replace(
            settings,
            parallel_mode=mode if follows else "semi_auto",
            strategies=None if lines is None else lines[number],
        )
        return make_plan(
            part,
            size,
            stage_settings,
            stored=mine[0],
            used=mine[1],
            whole=whole,
            searcher=searcher,
            input_placement=input_placement,
            earlier=[p.stages[number].plan for p in earlier if len(p.stages) == planned.stages],
            prices=prices,
        )

    once = PlanCache(planner, whole) if chosen is not None and stored is None else planner

    def pipeline(by: Callable[[Graph, int, InputPlacement, int], Plan]) -> PipelinePlan:
        return pipeline_plan(
            graph,
            wide,
            devices,
            parallel_mode,
            settings.dataset_strategy,
            planned,
            modules,
            by,
            chosen=chosen,
            sizes=None if chosen is None else chosen.sizes,
            splits=splits,
            on_missing_rule=settings.on_missing_rule,
            uneven=settings.uneven,
            cluster=settings.cluster,
            optimizer=settings.optimizer,
        )

    return until_stopped(pipeline, once, partial(planner, mode="semi_auto"))


@overload
def plan(
    net: nn.Module,
    inputs: tuple[object, ...],
    loss_fn: Callable[..., object] | None = None,
    targets: object = None,
    *,
    pipeline: None = None,
    **settings: Unpack[PlanKeywords],
) -> Plan: ...
@overload
def plan(
    net: nn.Module,
    inputs: tuple[object, ...],
    loss_fn: Callable[..., object] | None = None,
    targets: object = None,
    *,
    pipeline: PipelineSetting,
    **settings: Unpack[PlanKeywords],
) -> PipelinePlan: ...
@overload
def plan(
    net: nn.Module,
    inputs: tuple[object, ...],
    loss_fn: Callable[..., object] | None = None,
    targets: object = None,
    *,
    pipeline: PipelineSetting | None,
    **settings: Unpack[PlanKeywords],
) -> Plan | PipelinePlan: ...
@known_keywords(KEYWORDS_ELSEWHERE)
@phase("plan", lambda *_, search_progress=None, **__: search_progress)
@gc_paused()
def plan(
    net: nn.Module,
    inputs: tuple[object, ...],
    loss_fn: Callable[..., object] | None = None,
    targets: object = None,
    *,
    parallel_mode: ParallelMode = "semi_auto",
    devices: int = 8,
    dataset_strategy: DatasetStrategy | None = None,
    on_missing_rule: MissingRule = "error",
    marks: Mapping[str, tuple[object, ...]] | None = None,
    kwargs: dict[str, object] | None = None,
    sync_batch_norm: bool = False,
    hsdp: HsdpSetting | OptimizerParallel | None = None,
    recompute: RecomputePolicy | None = None,
    uneven: bool = False,
    cluster: ClusterSetting | None = None,
    memory: Limit | None = None,
    optimizer: OptimizerState | None = None,
    strategies: PlanDocument | PipelineDocument | str | PathLike[str] | None = None,
    param_strategies: ParameterStrategies | str | PathLike[str] | None = None,
    pipeline: PipelineSetting | None = None,
    mixed_precision: PrecisionSetting | None = None,
    comm_memory: Limit | None = None,
    search_memory: Limit | None = None,
    search_progress: Callable[[SearchProgress], object] | bool | None = None,
) -> Plan | PipelinePlan:
    """Plan a model without running it: no process group, no devices, nothing allocated.

    Args:
        net: the model; its parameters may be real or meta.
        inputs: the model's inputs, a tuple of tensors of **global** shapes; real, fake or meta.
        loss_fn, targets: the loss, called as ``loss_fn(net(*inputs), targets)``; None: the forward alone.
        parallel_mode: "stand_alone", "data_parallel", "semi_auto", "sharding_propagation", "recursive_programming",
            "dynamic_programming" or "hybrid_parallel"; `AutoParallel` says what each does.
        devices: the number of devices.
        dataset_strategy: what each rank is fed, as `AutoParallel.dataset_strategy` takes it. None (default): the batch
            as the call is handed it. A plan for all devices at once is handed the whole batch ("full_batch"), the
            training step of a process is handed the process's own part ("data_parallel").
        on_missing_rule: "error", or "replicate": operators without a rule run whole, with a note in the plan.
        marks: in_strategies by the name of the operator (as in `Plan.operators`), with priority over the model's own.
        kwargs: keyword inputs of the model.
        sync_batch_norm: in data_parallel, batch norms train by the statistics of the whole batch, as in the other
            modes, instead of each device's own.
        hsdp: the arguments of `AutoParallel.hsdp` as a dict, ``{}`` for its defaults; None: no ZeRO/FSDP sharding.
        recompute: the operators that are recomputed in the backward, as `AutoParallel` takes it.
        uneven: True where cuts need not divide their dims, as `AutoParallel` takes it.
        cluster: the devices and their links, for the prices: a `Cluster`, the name of a preset such as "h100x8", a
            JSON file; None: see `Cluster.of`.
        memory: limit per device, for the modes that search: bytes, "70GB", or "cluster" for the device's own; None:
            no limit.
        strategies: a file written by `Plan.save`: its operators' strategies apply here too.
        param_strategies: a file written by `AutoParallel.save_param_strategy_file`, or a plan: gives the storage
            layouts of parameters.
        pipeline: the arguments of `AutoParallel.pipeline` as a dict; None: no pipeline.
        optimizer: the optimizer whose state counts as memory of each parameter: "adam", "momentum", "sgd", or its
            bytes per element; None: as for Adam.
        mixed_precision: the dtypes in which parameters are stored and read, and their gradients summed, as
            `AutoParallel` takes it.
        comm_memory: bytes by which messages under way may raise the peak of a device's memory, as `AutoParallel` takes
            it.
        search_memory: the growth of host memory allowed to the process during a search: bytes or text such as "2GB";
            None: half of the free memory. A search that would need more keeps less, so its plan may be farther from
            its bound.
        search_progress: called with a `SearchProgress` (phase, seconds, best, bound, grown) every few seconds of a
            search, and nothing else is shown; None: capture, prices and search of more than two seconds show how far
            they are on a terminal, and every ten seconds in the log "shardwright.progress" (`shardwright.quiet`);
            True: every ten seconds on standard error, where that is no terminal; False: nothing.

    Returns:
        The plan.

    Raises:
        ShardwrightError: a setting, strategy or operator that does not fit, with the operator, the line, the sizes
            and a legal choice.

    Example:
        >>> plan = sw.plan(net, (x,), loss_fn, y, parallel_mode="data_parallel", devices=8, cluster="h100x8")
        >>> print(plan)
        data_parallel on 8 devices of h100x8, each fed the whole batch
        the model: data 8
    """
    if not isinstance(net, nn.Module):
        raise SettingError(f"{net!r} is not an nn.Module", legal="a model, and its inputs as a tuple")
    if targets is not None and loss_fn is None:
        raise SettingError(
            "targets without a loss_fn, which would take them",
            legal="plan(net, inputs, loss_fn, targets); or the target among the inputs of a model with its own loss",
        )
    inputs, targets, kwargs = with_tensors((inputs, targets, kwargs))
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if loss_fn is not None:
        inputs = (*inputs, targets)
    settings = Settings.of(
        parallel_mode=parallel_mode,
        dataset_strategy=dataset_strategy,
        on_missing_rule=on_missing_rule,
        sync_batch_norm=sync_batch_norm,
        hsdp=hsdp,
        recompute=recompute,
        uneven=uneven,
        cluster=cluster,
        memory=memory,
        optimizer=optimizer,
        strategies=strategies,
        param_strategies=param_strategies,
        pipeline=pipeline,
        mixed_precision=mixed_precision,
        comm_memory=comm_memory,
        search_memory=search_memory,
        search_progress=search_progress,
    )
    check_mode(net, parallel_mode)
    own, setting, lies = None, settings.pipeline, settings.param_strategies
    kwargs = kwargs or {}
    if parallel_mode == "hybrid_parallel":
        own = OwnPrograms(own_parameters(net), loss_fn is not None)
        inputs, kwargs = local_inputs(tuple(inputs), kwargs, devices, settings.dataset_strategy)
    splits, policy = is_split(tuple(inputs), kwargs), settings.mixed_precision

    def captured(count: int | None) -> tuple[Graph, Graph | None]:
        with for_ranks(devices), one_slice(net):
            try:
                made = (
                    (capture(net, tuple(inputs), kwargs, loss_fn=loss_fn, mixed_precision=policy), None)
                    if count is None
                    else capture_micro(
                        net, tuple(inputs), kwargs, count, setting, loss_fn=loss_fn, mixed_precision=policy
                    )
                )
            except CaptureError as error:
                if loss_fn is None or targets is not None:
                    raise
                raise SettingError(
                    f"the target is missing: loss_fn is given, and targets=None. {error.message}",
                    source=error.source,
                    legal="plan(net, inputs, loss_fn, targets)",
                ) from error
        return with_policy(_with_marks(made[0], marks or {}), recompute), made[1]

    automatic = None if setting is None else AutomaticStages.of(setting, tuple(inputs), kwargs, captured)
    graph, wide = captured(None if automatic is None else automatic.count)
    warn_of_ignored_marks(graph, parallel_mode)
    whole = stored_whole(net, loss_fn)
    stored = None if lies is None else lies.onto(graph, devices, 1 if setting is None else setting.stages, None, uneven)
    made: Plan | PipelinePlan
    if setting is None:
        made = make_plan(graph, devices, settings, own=own, stored=stored, whole=whole)
    else:
        modules = staged_modules(net, dict(setting.stage_config))
        made = make_pipeline(
            graph, wide, devices, settings, modules, splits, stored=stored, whole=whole, automatic=automatic
        )
    if lies is not None:
        lies.check_stored(made)
    return made


def _with_marks(graph: Graph, marks: Mapping[str, tuple[object, ...]]) -> Graph:
    """The graph with further marks, by operator name."""
    names = [op.name for op in graph.ops]
    for name, strategy in marks.items():
        if name not in names:
            legal = ", ".join([op.name for op in graph.ops if op.module == name] or names)  # those that a module calls
            raise SettingError(f"marks: no operator is called {name!r}", strategy=strategy, legal=legal)
    return graph.with_ops(
        tuple(
            replace(op, mark=MarkUse(marks[op.name], None, op.source, tuple(range(len(op.inputs)))))
            if op.name in marks
            else op
            for op in graph.ops
        )
    )
