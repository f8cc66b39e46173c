"""Planning: from a model to a plan.

1. `plan` captures the model (`capture.export`), for a pipeline one micro-batch of it, marks the operators to
   recompute, and reads saved strategies.
2. `make_plan` checks the settings and calls the planner of the mode (`planners.planning_problem.PLANNERS`). The result
   is partitioned at once, so every error is raised here.
3. `make_pipeline` cuts a captured model into stages and runs `make_plan` for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .capture.annotations import PipelineSettings, pipelining, staged_modules, stored_whole
from .capture.export import capture
from .capture.graph_reader import MarkUse
from .capture.manual import check_mode, one_slice, own_parameters
from .capture.regions import with_policy
from .cluster import Cluster, format_bytes, memory_of, parse_bytes
from .cost.cost_model import CostModel
from .cost.memory_timeline import optimizer_bytes
from .errors import SettingError
from .garbage import gc_paused
from .graph import Graph
from .layout import Layout
from .mixed_precision import MixedPrecision
from .ops import COLLECTIVES, for_ranks
from .partition.local_program import Decisions, InputPlacement, PortableDecisions, input_placement
from .partition.parameter_sharding import OptimizerParallel
from .partition.rank_local import OwnPrograms, decided, fed_whole, local_inputs, with_own_statistics, with_stacked
from .pipeline.build import PlanCache, pipeline_plan, schedule_of
from .pipeline.microbatch import is_split, micro_calls
from .pipeline.pipeline_plan import PipelinePlan, PipelineSearchResult
from .pipeline.stage_costs import recomputed
from .pipeline.stage_search import UNITS_BY, AutomaticStages, check_automatic
from .pipeline.stages import units_of
from .planfile.load_save import as_document
from .planfile.parameter_file import as_parameter_strategies
from .planfile.plan_document import PlanDocument
from .planners.planning_problem import CUT, PLANNERS, PlanningProblem, modes, planners
from .planners.replanning import at_other_sizes
from .sharded_plan import Plan
from .solver.search_memory import LEAST, SearchBudget, spending

__all__ = ["capture_micro", "make_pipeline", "make_plan", "plan"]


#: Runs a search for several processes: (graph, settings that decide the result, search, a function that carries
#: portable decisions onto the process's own graph) -> decisions.
Searcher = Callable[[Graph, Any, Callable[[], Decisions], Callable[[PortableDecisions], Decisions]], Decisions]

#: Modes in which each device has its own batch-norm statistics, unless `sync_batch_norm` is set.
OWN_STATISTICS = ("data_parallel",)


def make_plan(
    graph: Graph,
    devices: int,
    parallel_mode: str,
    dataset_strategy: Any,
    *,
    on_missing_rule: str = "error",
    stored: dict[str, Layout] | None = None,
    sync_batch_norm: bool = False,
    hsdp: OptimizerParallel | None = None,
    used: dict[str, Layout] | None = None,
    own: OwnPrograms | None = None,
    uneven: bool = False,
    cluster: Any = None,
    memory: Any = None,
    optimizer: Any = "adam",
    whole: frozenset[str] = frozenset(),
    strategies: PlanDocument | None = None,
    searcher: Searcher | None = None,
    fed: InputPlacement | None = None,
    earlier: Sequence[Plan] = (),
    search_memory: Any = None,
    search_progress: Any = None,
) -> Plan:
    """Plan a captured model; every error that a strategy can cause is raised here.

    Args:
        stored: storage layouts of parameters and buffers, where already fixed.
        hsdp: storage of the other parameters, by ZeRO/FSDP sharding (optimizer parallel); None: the layouts in which
            their operators consume them.
        used: the layouts in which an earlier plan's operators consume parameters; None: as `stored`.
        own: in hybrid_parallel, whose graph has one rank's shapes, the facts that the graph does not contain.
        uneven: dims that their cuts do not divide are padded, where possible.
        cluster: the cluster for the prices: a `Cluster`, or a value that `Cluster.of` takes.
        memory: limit per device, for the modes that search: bytes, "70GB", or "cluster"; None: no limit.
        optimizer: the optimizer whose state is stored for each parameter: "adam", "momentum", "sgd", or its bytes per
            element.
        whole: parameters that are never stored cut over their replicas.
        strategies: a plan whose operators' strategies apply here too, with priority over the model's own marks.
        searcher: where several processes plan together, the function that runs the search on one; None: this process
            searches.
        fed: the placement of the inputs, for a stage of a pipeline; None: by `dataset_strategy`.
        earlier: plans of the same model at other sizes, the latest first: the strategies of the first that fits apply
            here too (`at_other_sizes`).
        search_memory: the growth of host memory allowed to the process during a search: bytes or text such as "2GB";
            None: half of the free memory.
        search_progress: called with a `SearchProgress` every few seconds of a search; None: a line of it goes to the
            log `shardwright.search`, and to stderr where that is a terminal; True: to stderr in any case; False:
            nothing.

    Raises:
        ShardwrightError: a strategy or a setting that does not fit, with the operator and a legal choice.
    """
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise SettingError(f"a plan is for a whole number of devices, not {devices!r}", legal="devices=8")
    if parallel_mode not in modes():
        raise SettingError(f"unknown parallel_mode {parallel_mode!r}", legal=", ".join(modes()))
    if on_missing_rule not in ("error", "replicate"):
        raise SettingError(f"unknown on_missing_rule {on_missing_rule!r}", legal='"error" or "replicate"')
    cluster = Cluster.of(cluster, devices)
    asked, memory = memory, memory_of(memory, cluster)
    optimizer_bytes(optimizer)  # raises for an unknown optimizer
    budget = budget_of(search_memory, search_progress)
    fitting = planners(fits_memory=True)
    if memory is not None and parallel_mode not in fitting:
        follows = parallel_mode in planners(searches=True)
        raise SettingError(
            f"memory={asked!r} limits what is searched; {parallel_mode} "
            + ("follows marks, whatever memory that takes" if follows else "searches nothing"),
            legal=f"no memory=, or parallel_mode={' or '.join(map(repr, fitting))}",
        )
    if strategies is not None and parallel_mode not in PLANNERS:
        raise SettingError(
            f"{strategies.path} has strategies of operators, which {parallel_mode} runs as they stand",
            legal=", ".join(PLANNERS),
        )
    if parallel_mode == "stand_alone":
        fed = input_placement(graph, 1, "full_batch")
        alone = PLANNERS["data_parallel"](PlanningProblem(graph, 1, fed, on_missing_rule="replicate"))
        made = Plan(graph, 1, "stand_alone", fed, alone.decisions, alone.carries, cluster=cluster)
        _ = made.routed
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
            fed_whole(graph, devices, dataset_strategy),
            decided(graph, devices),
            {},
            own=own,
            cluster=cluster,
        )
        _ = made.routed
        return made
    placed = next((op for op in graph.ops if op.target in COLLECTIVES), None)
    if placed is not None:
        raise SettingError(
            f"sw.ops.{placed.kind} joins the programs of ranks, which {parallel_mode} makes itself",
            **placed.where,
            legal='parallel_mode="hybrid_parallel", or the model without it',
        )
    if parallel_mode in OWN_STATISTICS and not sync_batch_norm:
        graph = with_own_statistics(graph, devices, on_missing_rule)
    fed = fed or input_placement(graph, devices, dataset_strategy)
    mode, settled = PLANNERS[parallel_mode], used or stored
    if strategies is not None:
        graph, mode, stored = strategies.onto(
            graph, devices, mode, stored, on_missing_rule=on_missing_rule, uneven=uneven, first=used is None
        )
    for one in earlier if strategies is None else ():
        same = at_other_sizes(one, graph, devices, on_missing_rule=on_missing_rule, uneven=uneven)
        if same is None:
            continue
        ops = tuple(same.decisions[op.name].op for op in graph.ops)
        made = Plan(
            graph.with_ops(ops),
            devices,
            parallel_mode,
            fed,
            same.decisions,
            same.carries,
            stored,
            same.hsdp,
            cluster=cluster,
            found=same.found,
            optimizer=optimizer,
        )
        if memory is None or made.peak <= memory:
            _ = made.routed
            return made
    problem = PlanningProblem(
        graph,
        devices,
        fed,
        on_missing_rule=on_missing_rule,
        stored=settled,
        uneven=uneven,
        cost_model=CostModel(cluster, devices),
        hsdp=hsdp,
        memory=memory,
        optimizer=optimizer,
        cut=replace(CUT, whole=whole),
    )
    if mode.searches:

        def find() -> Decisions:
            with spending(SearchBudget(*budget)):
                return mode(problem)

        result = (
            find()
            if searcher is None
            else searcher(
                graph,
                dict(
                    devices=devices,
                    memory=asked,
                    optimizer=optimizer,
                    hsdp=hsdp,
                    uneven=uneven,
                    on_missing_rule=on_missing_rule,
                ),
                find,
                lambda handed: handed.onto(graph, devices, on_missing_rule=on_missing_rule, uneven=uneven),
            )
        )
    else:
        result = mode(problem)
    decisions, carries, found, storage = result
    if memory is not None:  # the search decided the recomputed operators too
        graph = graph.with_ops(tuple(decisions[op.name].op for op in graph.ops))
    made = Plan(
        graph,
        devices,
        parallel_mode,
        fed,
        decisions,
        carries,
        stored,
        hsdp or storage,
        cluster=cluster,
        found=found,
        optimizer=optimizer,
    )
    _ = made.routed  # raises where the plan cannot be partitioned
    return made


def budget_of(memory: Any, progress: Any) -> tuple[float | None, Any]:
    """The arguments of a `SearchBudget`: bytes or None, and the progress setting.

    Raises:
        SettingError: no amount of memory, or less than the least of a search; a progress setting that cannot be
            called.
    """
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise SettingError(
            f"search_progress={progress!r} cannot be called", legal="a function of one argument, True, False or None"
        )
    if memory is None:
        return None, progress
    allowed = parse_bytes(memory, "search_memory", '"2GB", "512MiB" or a number of bytes')
    if allowed < LEAST:
        raise SettingError(
            f"search_memory={memory!r} is less than a search takes", legal=f"{format_bytes(LEAST)} or more"
        )
    return allowed, progress


def capture_micro(
    net: nn.Module, args: tuple, kwargs: dict[str, Any], count: int, **given: Any
) -> tuple[Graph, Graph | None]:
    """Capture a model for one micro-batch of the inputs of a whole batch.

    Args:
        given: as `capture` takes it.

    Returns:
        Its graph, and that for more rows, which `microbatch.split` compares with it; None for a single micro-batch.
    """
    graph, *wide = [capture(net, *call, **given) for call in micro_calls(args, kwargs, count)]
    return graph, wide[0] if wide else None


def make_pipeline(
    graph: Graph,
    wide: Graph | None,
    devices: int,
    parallel_mode: str,
    dataset_strategy: Any,
    setting: PipelineSettings,
    modules: Mapping[str, int],
    splits: tuple[bool, ...],
    *,
    stored: dict[str, Layout] | None = None,
    used: dict[str, Layout] | None = None,
    automatic: AutomaticStages | None = None,
    chosen: PipelineSearchResult | None = None,
    earlier: Sequence[PipelinePlan] = (),
    **given: Any,
) -> PipelinePlan:
    """Plan a captured model as a pipeline, each stage by `make_plan`.

    Args:
        graph, wide: of one micro-batch, from `capture_micro`.
        modules: dotted path -> stage.
        splits: per tensor input, True where it is split into micro-batches.
        automatic: for stages="auto", the settings of the choice.
        chosen: the chosen stages.
        earlier: plans of the same model at other sizes, the latest first: their stages' strategies apply here where
            they fit.
        given: as `make_plan` takes it.

    Raises:
        ShardwrightError: as `make_plan` and `pipeline_plan`.
    """
    if parallel_mode not in PLANNERS:
        raise SettingError(f"a pipeline in {parallel_mode}", legal=", ".join(PLANNERS))
    if setting.stages == "auto" and automatic is not None:
        check_automatic(setting, modules, given.get("strategies"))
        return _automatic_pipeline(
            graph,
            wide,
            devices,
            parallel_mode,
            dataset_strategy,
            setting,
            splits,
            automatic,
            stored=stored,
            used=used,
            earlier=earlier,
            **given,
        )
    if given.get("memory") is not None:
        raise SettingError(
            f"memory={given['memory']!r} for a pipeline of given stages", legal='stages="auto", or no memory='
        )
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise SettingError(f"a plan is for a whole number of devices, not {devices!r}", legal="devices=8")
    cluster = Cluster.of(given.pop("cluster", None), devices)
    marked = any(op.mark is not None for op in graph.ops)  # a stage without marks follows the batch
    counting = {"on_missing_rule": given.get("on_missing_rule", "error"), "cluster": cluster}
    planned, strategies = (
        schedule_of(setting, devices) if chosen is None else chosen.schedule,
        given.pop("strategies", None),
    )
    lines = None if strategies is None else strategies.per_stage(planned, devices)

    def planner(part: Graph, size: int, fed: InputPlacement, number: int) -> Plan:
        if number < 0:  # the graph that counts targets: no strategy to decide
            return make_plan(part, size, "semi_auto", dataset_strategy, fed=fed, **counting)
        held = {*part.parameters, *part.buffers}
        mine = [
            None if all_ is None else {n: layout for n, layout in all_.items() if n in held} for all_ in (stored, used)
        ]
        same = [p.stages[number].plan for p in earlier if len(p.stages) == planned.stages]
        follows = parallel_mode != "sharding_propagation" or not marked or any(op.mark for op in part.ops)
        return make_plan(
            part,
            size,
            parallel_mode if follows else "semi_auto",
            dataset_strategy,
            fed=fed,
            stored=mine[0],
            used=mine[1],
            cluster=cluster,
            strategies=None if lines is None else lines[number],
            earlier=same,
            **given,
        )

    once = PlanCache(planner, given.get("whole", frozenset())) if chosen is not None and stored is None else planner
    return pipeline_plan(
        graph,
        wide,
        devices,
        parallel_mode,
        dataset_strategy,
        planned,
        modules,
        once,
        chosen=chosen,
        sizes=None if chosen is None else chosen.sizes,
        splits=splits,
        on_missing_rule=given.get("on_missing_rule", "error"),
        uneven=given.get("uneven", False),
        cluster=cluster,
        optimizer=given.get("optimizer", "adam"),
    )


def _automatic_pipeline(
    graph: Graph,
    wide: Graph | None,
    devices: int,
    parallel_mode: str,
    dataset: Any,
    setting: PipelineSettings,
    splits: tuple[bool, ...],
    automatic: AutomaticStages,
    *,
    memory: Any = None,
    **given: Any,
) -> PipelinePlan:
    """The pipeline of automatically chosen stages, made by `make_pipeline`."""
    cluster = Cluster.of(given.pop("cluster", None), devices)
    unit = {
        name: value
        for name, value in given.items()
        if name not in ("stored", "used", "searcher", "strategies", "earlier")
    }

    def units_plan(part: Graph, size: int, fed: InputPlacement) -> Plan:
        return make_plan(
            part, size, UNITS_BY.get(parallel_mode, parallel_mode), dataset, fed=fed, cluster=cluster, **unit
        )

    def piped(chosen: PipelineSearchResult) -> PipelinePlan:
        same = chosen.micro_batches == automatic.count
        mine, wider = (graph, wide) if same else automatic.captured(chosen.micro_batches)
        mine = recomputed(mine, units_of(mine), chosen.recomputed)
        return make_pipeline(
            mine,
            wider,
            devices,
            parallel_mode,
            dataset,
            chosen.setting,
            chosen.modules,
            splits,
            chosen=chosen,
            cluster=cluster,
            **given,
        )

    return automatic.run(
        graph,
        wide,
        splits,
        devices,
        dataset,
        cluster,
        memory_of(memory, cluster),
        units_plan,
        piped,
        setting.micro_batches,
    )


@gc_paused()
def plan(
    net: nn.Module,
    inputs: tuple,
    loss_fn: Any = None,
    targets: Any = None,
    *,
    parallel_mode: str = "semi_auto",
    devices: int = 8,
    dataset_strategy: Any = "full_batch",
    on_missing_rule: str = "error",
    marks: Mapping[str, Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    sync_batch_norm: bool = False,
    hsdp: Mapping[str, Any] | OptimizerParallel | None = None,
    recompute: Any = None,
    uneven: bool = False,
    cluster: Any = None,
    memory: Any = None,
    optimizer: Any = "adam",
    strategies: Any = None,
    param_strategies: Any = None,
    pipeline: Mapping[str, Any] | None = None,
    mixed_precision: Any = None,
    search_memory: Any = None,
    search_progress: Any = None,
) -> Plan | PipelinePlan:
    """Plan a model without running it: no process group, no devices, nothing allocated.

    Args:
        net: the model; its parameters may be real or meta.
        inputs: the model's inputs, a tuple of tensors of **global** shapes; real, fake or meta.
        loss_fn, targets: the loss, called as ``loss_fn(net(*inputs), targets)``; None: the forward alone.
        parallel_mode: one of `planners.planning_problem.modes`.
        devices: the number of devices.
        dataset_strategy: "full_batch", "data_parallel", or a tuple with one entry per tensor input.
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
            bytes per element.
        mixed_precision: the dtypes in which parameters are stored and read, and their gradients summed, as
            `AutoParallel` takes it.
        search_memory: the growth of host memory allowed to the process during a search: bytes or text such as "2GB";
            None: half of the free memory. A search that would need more keeps less, so its plan may be farther from
            its bound.
        search_progress: called with a `SearchProgress` (phase, seconds, best, bound, grown) every few seconds of a
            search; None: a line of it goes to the log `shardwright.search`, and to stderr where that is a terminal;
            True: to stderr in any case; False: nothing.

    Returns:
        The plan.

    Raises:
        ShardwrightError: a setting, strategy or operator that does not fit, with the operator, the line, the sizes
            and a legal choice.
    """
    if not isinstance(net, nn.Module):
        raise SettingError(f"{net!r} is not an nn.Module", legal="a model, and its inputs as a tuple")
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if loss_fn is not None:
        inputs = (*inputs, targets)
    check_mode(net, parallel_mode)
    own, setting, kwargs = None, pipelining(pipeline), kwargs or {}
    if parallel_mode == "hybrid_parallel":
        own = OwnPrograms(own_parameters(net), loss_fn is not None)
        inputs, kwargs = local_inputs(tuple(inputs), kwargs, devices, dataset_strategy)
    splits, policy = is_split(tuple(inputs), kwargs), MixedPrecision.of(mixed_precision)

    def captured(count: int | None) -> tuple[Graph, Graph | None]:
        with for_ranks(devices), one_slice(net):
            made = (
                (capture(net, tuple(inputs), kwargs, loss_fn=loss_fn, mixed_precision=policy), None)
                if count is None
                else capture_micro(net, tuple(inputs), kwargs, count, loss_fn=loss_fn, mixed_precision=policy)
            )
        return with_policy(_with_marks(made[0], marks or {}), recompute), made[1]

    automatic = None if setting is None else AutomaticStages.of(setting, tuple(inputs), kwargs, captured)
    graph, wide = captured(None if automatic is None else automatic.count)
    given = dict(
        on_missing_rule=on_missing_rule,
        sync_batch_norm=sync_batch_norm,
        hsdp=optimizer_parallel(hsdp, net, loss_fn),
        uneven=uneven,
        cluster=cluster,
        memory=memory,
        optimizer=optimizer,
        whole=stored_whole(net, loss_fn),
        strategies=as_document(strategies),
        search_memory=search_memory,
        search_progress=search_progress,
    )
    lies = as_parameter_strategies(param_strategies)
    if lies is not None:
        if parallel_mode in ("stand_alone", "hybrid_parallel"):
            raise SettingError(
                f"{lies.source} has strategies of parameters, which {parallel_mode} stores as they are",
                legal=", ".join(PLANNERS),
            )
        given["stored"] = lies.onto(graph, devices, 1 if setting is None else setting.stages, None, uneven)
    made = (
        make_plan(graph, devices, parallel_mode, dataset_strategy, own=own, **given)
        if setting is None
        else make_pipeline(
            graph,
            wide,
            devices,
            parallel_mode,
            dataset_strategy,
            setting,
            staged_modules(net, dict(setting.stage_config)),
            splits,
            automatic=automatic,
            **given,
        )
    )
    if lies is not None:
        lies.check_kept(made)
    return made


def optimizer_parallel(given: Any, net: nn.Module, loss_fn: Any) -> OptimizerParallel | None:
    """The setting `hsdp` for a model, some of whose parameters may be left out of it.

    Raises:
        SettingError: an invalid setting.
    """
    setting = OptimizerParallel.of(given)
    return None if setting is None else replace(setting, whole=stored_whole(net, loss_fn))


def _with_marks(graph: Graph, marks: Mapping[str, Any]) -> Graph:
    """The graph with further marks, by operator name."""
    names = [op.name for op in graph.ops]
    for name, strategy in marks.items():
        if name not in names:
            raise SettingError(f"marks: no operator is called {name!r}", strategy=strategy, legal=", ".join(names))
    return graph.with_ops(
        tuple(
            replace(op, mark=MarkUse(marks[op.name], None, op.source, tuple(range(len(op.inputs)))))
            if op.name in marks
            else op
            for op in graph.ops
        )
    )
