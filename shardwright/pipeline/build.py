"""The plan of a pipeline: micro-batches, stages, and for each stage a plan on its own devices.

    devices of a group          devices / groups, neighbouring ranks
    inputs of a stage           the model's inputs, laid out by the dataset_strategy on the stage's devices; values and
                                parameters of earlier stages, in the layout in which those stages hold them
    inputs of a micro-batch     B/m of the B rows of each input that has as many rows as the first one (`micro_calls`)

Equal stages are planned once (`PlanCache`): the decisions of one hold for the others, in the same places.

Example: 8 devices and 2 groups: stage 0 has the ranks 0 to 3, stage 1 the ranks 4 to 7. With 4 micro-batches of a batch
of 32 rows, each stage is planned for 8 rows on 4 devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import cast

import torch
from torch.utils.weak import WeakIdRef

from ..capture.annotations import PipelineSettings
from ..cluster import Cluster
from ..cost.memory_timeline import OptimizerSetting
from ..errors import SettingError
from ..graph import Graph, Value
from ..launch.progress import keep, keeper
from ..layout import Layout
from ..partition.local_program import InputPlacement, descriptions, find_batch_dims, place_inputs
from ..partition.partitioner import neighbours, received_layout
from ..sharded_plan import Plan
from ..torch_private import pytree
from .microbatch import split
from .pipeline_plan import PipelinePlan, PipelineSearchResult, Stage
from .schedules import Schedule, schedule, takes
from .stages import StageGraph, StageInput, cut

__all__ = [
    "PlanCache",
    "is_split",
    "micro_calls",
    "pipeline_plan",
    "planned_stages",
    "rows_of",
    "schedule_of",
    "until_stopped",
]

#: The planner of one stage: (graph, devices, fed, number) -> Plan.
Planner = Callable[[Graph, int, InputPlacement, int], Plan]


def schedule_of(setting: PipelineSettings, devices: int) -> Schedule:
    """The schedule that a setting asks for.

    Raises:
        SettingError: devices that the stages do not divide, or an unknown schedule.
    """
    groups, micro_batches = cast("int", setting.stages), cast("int", setting.micro_batches)
    if devices % groups:
        raise SettingError(
            f"{groups} stages on {devices} devices",
            legal="a number of stages that divides the devices: "
            f"{', '.join(str(n) for n in range(1, devices + 1) if devices % n == 0)}",
        )
    return schedule(
        None if setting.csv else setting.scheduler, groups, micro_batches, chunks=setting.chunks, csv=setting.csv
    )


def pipeline_plan(
    graph: Graph,
    wide: Graph | None,
    devices: int,
    mode: str,
    dataset: object,
    planned: Schedule,
    modules: Mapping[str, int],
    planner: Planner,
    *,
    splits: tuple[bool, ...],
    sizes: tuple[int, ...] | None = None,
    on_missing_rule: str = "error",
    uneven: bool = False,
    cluster: Cluster | str | PathLike[str] | Mapping[str, object] | None = None,
    optimizer: OptimizerSetting = "adam",
    chosen: PipelineSearchResult | None = None,
) -> PipelinePlan:
    """Plan a captured model as a pipeline.

    Args:
        graph, wide: captures for one micro-batch, as `microbatch.split` takes them.
        planned: its schedule.
        modules: dotted path -> stage.
        planner: the planner of a stage.
        splits: per tensor input, True where it is split into micro-batches.
        sizes: devices of each group; None: equal groups.
        chosen: the report of the search that chose the stages; None: the user chose them.

    Raises:
        ShardwrightError: impossible stages, or an error of the planner, with the stage.
    """
    sizes = sizes or (devices // planned.groups,) * planned.groups
    input_placement = {n: place_inputs(graph, n, dataset) for n in sorted(set(sizes))}
    parts = _parts(input_placement[sizes[0]])
    if len(set(sizes)) > 1 and input_placement[sizes[0]].per_rank_batch:
        raise SettingError(
            f"stages of {', '.join(map(str, sizes))} devices, each rank feeding its own part",
            legal='dataset_strategy("full_batch"), or stages of one size',
        )
    micro = split(graph, planned.micro_batches, wide, parts)
    described = descriptions(micro.graph.ops, on_missing_rule, devices, uneven)
    bounds = {op.name: bound for op, (_, bound, _) in zip(micro.graph.ops, described)}
    graphs = cut(micro.graph, modules, planned.stages, find_batch_dims(micro.graph, bounds))
    made = planned_stages(graphs, graph.inputs, micro.counts, planned.placement, sizes, input_placement, planner)
    return PipelinePlan(
        micro.graph, devices, mode, made, planned, micro, splits, Cluster.of(cluster, devices), optimizer, chosen=chosen
    )


def planned_stages(
    graphs: Sequence[StageGraph],
    inputs: Sequence[Value],
    counting: Graph | None,
    placement: Sequence[int],
    sizes: Sequence[int],
    input_placement: Mapping[int, InputPlacement],
    planner: Planner,
) -> tuple[Stage, ...]:
    """The stages, each planned on its own devices, in order; a value arrives in the layout in which it left its stage.

    Args:
        inputs: the model's inputs, without totals.
        counting: the graph that counts targets (`MicrobatchPlan.counts`); None without totals.
        placement: stage -> group of devices.
        sizes: group -> its number of devices.
        input_placement: number of devices -> the placement of the model's inputs.
    """
    firsts = [sum(sizes[:g]) for g in range(len(sizes))]
    stages: list[Stage] = []
    for number, part in enumerate(graphs):
        size = sizes[placement[number]]
        targets = {
            name: [
                sizes[placement[t]]
                for t, other in enumerate(graphs)
                if StageInput("stage", number, name) in other.sources
            ]
            for name in part.sent
        }
        feeding = _feeding(part, input_placement[size], len(inputs), stages, size)
        sent_shares = {f"{name}.sent": max(neighbours(size, n) for n in targets[name]) for name in part.sent}
        plan = planner(part.graph, size, replace(feeding, sends_to_next_stage=sent_shares), number)
        counts = None
        if counting is not None and any(s.kind == "input" and s.index >= len(inputs) for s in part.sources):
            names = [v.name for v in inputs]
            layouts = tuple(input_placement[size].inputs[names.index(v.name)] for v in counting.inputs)
            counts = planner(counting, size, InputPlacement(layouts, feeding.per_rank_batch), -1)
        stages.append(Stage(number, plan, firsts[placement[number]], part.sources, part.results, part.sent, counts))
    return tuple(stages)


def _parts(input_placement: InputPlacement) -> int:
    """The number of parts of the batch where each rank feeds its own."""
    return (
        next((layout.cuts[0] for layout in input_placement.inputs if layout.dims and layout.dims[0]), 1)
        if input_placement.per_rank_batch
        else 1
    )


def _feeding(
    part: StageGraph, input_placement: InputPlacement, inputs: int, stages: list[Stage], devices: int
) -> InputPlacement:
    """The placement of a stage's inputs."""
    layouts = []
    for value, source in zip(part.graph.inputs, part.sources):
        if source.kind == "input":
            layouts.append(
                input_placement.inputs[source.index]
                if source.index < inputs
                else Layout.replicated(devices, len(value.shape))
            )
            continue
        producer = stages[source.index]
        produced = (
            producer.outgoing(source.name).layout
            if source.kind == "stage"
            else producer.plan.program.parameters[source.name].layout
        )
        layouts.append(received_layout(produced, producer.devices, devices))
    first = next((layout.dims[0] for layout in input_placement.inputs if layout.dims and layout.dims[0]), ())
    return InputPlacement(
        tuple(layouts), input_placement.per_rank_batch, first if input_placement.per_rank_batch else ()
    )


# -- Ctrl-C


def until_stopped(make: Callable[[Planner], PipelinePlan], planner: Planner, quick: Planner) -> PipelinePlan:
    """A pipeline; at Ctrl-C the command around keeps the best pipeline so far.

    That one has the stages that are planned already, the best plan so far of the stage that was being searched, and
    the other stages by a quick planner.

    Args:
        make: the planner of one stage -> the pipeline; it plans the stages in order.
        planner: of one stage. A search in it keeps the best plan so far of its stage (`keep`).
        quick: of one stage, without a search.

    Raises:
        KeyboardInterrupt: at Ctrl-C.
    """
    done: dict[int, Plan] = {}

    def noted(graph: Graph, devices: int, input_placement: InputPlacement, number: int) -> Plan:
        made = planner(graph, devices, input_placement, number)
        keep(None)  # what is kept now is of this stage
        if number >= 0:
            done[number] = made
        return made

    def so_far(best: Callable[[], object] | None) -> PipelinePlan:
        whole = len(done)
        begun = None if best is None else best()
        known = done | {whole: begun} if isinstance(begun, Plan) else done

        def stage(graph: Graph, devices: int, input_placement: InputPlacement, number: int) -> Plan:
            if number in known:
                return _taken(known[number], graph, input_placement)
            return quick(graph, devices, input_placement, number)

        made = make(stage)
        note = f"stopped by Ctrl-C: {whole} of {len(made.stages)} stages were searched until then"
        return replace(made, notes_of_its_own=(*made.notes_of_its_own, note))

    keep(None)
    try:
        found = make(noted)
    except KeyboardInterrupt:
        command = keeper()
        best = None if command is None else command.best
        keep(lambda: so_far(best))
        raise
    keep(lambda: found)
    return found


# -- equal stages


class PlanCache:
    """A planner of stages that remembers its plans.

    Args:
        planner: (graph, devices, fed, number) -> Plan.
        whole: names of parameters that are never stored cut.
    """

    def __init__(
        self, planner: Callable[[Graph, int, InputPlacement, int], Plan], whole: frozenset[str] = frozenset()
    ) -> None:
        self.planner, self.whole = planner, whole
        self.known: list[
            tuple[tuple[object, ...], Plan, Graph]
        ] = []  # the graph holds the constants that its form refers to

    def __call__(self, graph: Graph, devices: int, input_placement: InputPlacement, number: int) -> Plan:
        """The plan of a stage; that of an equal stage where there is one."""
        if number < 0:
            return self.planner(graph, devices, input_placement, number)
        form = (tuple(name in self.whole for name in graph.parameters), *_form(graph, input_placement, devices))
        for other, plan, _ in self.known:
            if other == form:
                return _taken(plan, graph, input_placement)
        plan = self.planner(graph, devices, input_placement, number)
        self.known.append((form, plan, graph))
        return plan


def _taken(plan: Plan, graph: Graph, input_placement: InputPlacement) -> Plan:
    """The plan carried over to an equal graph."""
    names = dict(zip(_values(plan.graph), _values(graph)))
    names.update((a.name, b.name) for a, b in zip(plan.graph.ops, graph.ops))
    decisions = {}
    for op, before in zip(graph.ops, plan.decisions.values()):
        origin, via = (names.get(name, name) for name in (before.origin, before.via))
        decisions[op.name] = replace(before, op=op, origin=origin, via=via)
    batch_dims = {names.get(name, name): dim for name, dim in plan.batch_dims.items()}
    return replace(plan, graph=graph, input_placement=input_placement, decisions=decisions, batch_dims=batch_dims)


def _values(graph: Graph) -> Iterator[str]:
    """Names of all values, in an order that equal graphs share."""
    for value in (*graph.inputs, *graph.parameters.values(), *graph.buffers.values()):
        yield value.name
    yield from graph.constants
    for op in graph.ops:
        yield from (v.name for v in op.outputs if v is not None)


def _form(graph: Graph, input_placement: InputPlacement, devices: int) -> Iterator[object]:
    """Everything that decides the plan of a stage, with numbers for names."""
    number = {name: k for k, name in enumerate(_values(graph))}
    calls: dict[int, int] = {}

    def leaf(x: object) -> object:
        return ("value", number[x.name]) if isinstance(x, Value) else repr(x)

    yield (
        devices,
        input_placement.inputs,
        input_placement.per_rank_batch,
        input_placement.batch,
        len(graph.parameters),
        len(graph.buffers),
    )
    for value in (*graph.inputs, *graph.parameters.values(), *graph.buffers.values()):
        yield value.shape, value.dtype, value.requires_grad, value.master, (graph.batch or {}).get(value.name)
    for _name, tensor in graph.constants.items():
        yield tuple(tensor.shape), tensor.dtype, tensor.tolist() if tensor.numel() < 64 else WeakIdRef(tensor)
    for op in graph.ops:
        leaves, spec = pytree.tree_flatten((op.args, op.kwargs))
        mark = None if op.mark is None else (op.mark.in_strategy, op.mark.out_strategy)
        region = op.recompute and replace(op.recompute, call=calls.setdefault(op.recompute.call, len(calls)), path="")
        outputs = tuple(None if v is None else (v.shape, v.dtype, v.requires_grad) for v in op.outputs)
        yield op.target, tuple(map(leaf, leaves)), str(spec), outputs, repr(mark), region
    for x in graph.outputs:
        yield leaf(x), input_placement.sends_to_next_stage.get(x.name) if isinstance(x, Value) else None
    yield tuple((number[graph.buffers[n].name], leaf(v)) for n, v in graph.updates.items())


# -- the inputs of one micro-batch


def rows_of(args: tuple[object, ...], kwargs: dict[str, object]) -> int | None:
    """The number of rows of a batch: the size of dim 0 of the first tensor with dims; None without such a tensor."""
    tensors = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
    return next((x.shape[0] for x in tensors if x.dim()), None)


def is_split(args: tuple[object, ...], kwargs: dict[str, object] | None = None) -> tuple[bool, ...]:
    """For each tensor among the inputs, True where each micro-batch gets a part of it along dim 0.

    Inputs with as many rows as the first tensor with dims are split; every micro-batch gets all of the others.
    """
    rows = rows_of(args, kwargs or {})
    return tuple(
        bool(x.dim()) and x.shape[0] == rows
        for x in pytree.tree_leaves((args, kwargs or {}))
        if isinstance(x, torch.Tensor)
    )


def micro_calls(
    args: tuple[object, ...], kwargs: dict[str, object] | None, count: int, setting: PipelineSettings | None = None
) -> list[tuple[tuple[object, ...], dict[str, object]]]:
    """Inputs in one micro-batch's shapes, on the meta device.

    With several micro-batches, a second entry has twice the rows, for the wide capture of `split`.

    Args:
        args, kwargs: those of the whole batch.
        setting: the pipeline, whose schedule says which other numbers would be legal.

    Returns:
        (args, kwargs) of each.

    Raises:
        SettingError: no tensor has rows, or `count` micro-batches do not divide them.
    """
    return [_resized(args, kwargs or {}, count, times, setting) for times in ((1, 2) if count > 1 else (1,))]


def _resized(
    args: tuple[object, ...], kwargs: dict[str, object], count: int, times: int, setting: PipelineSettings | None
) -> tuple[tuple[object, ...], dict[str, object]]:
    rows = rows_of(args, kwargs)
    if rows is None:
        raise SettingError(
            "there is no batch to split: no input is a tensor with dims",
            strategy=f"micro_batches={count}",
            legal="micro_batches=1",
        )
    leaves, spec = pytree.tree_flatten_with_path((args, kwargs))
    made = []
    for path, x in leaves:
        if isinstance(x, torch.Tensor):
            shape = tuple(x.shape)
            if shape and shape[0] == rows:
                if rows % count or not rows:
                    raise SettingError(
                        f"the input {_called(path)} has {rows} rows, which {count} micro-batches do not divide",
                        strategy=f"micro_batches={count}",
                        legal=_legal(rows, setting),
                    )
                shape = (rows // count * times, *shape[1:])
            x = torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
        made.append(x)
    return pytree.tree_unflatten(made, spec)


def _legal(rows: int, setting: PipelineSettings | None) -> str:
    """The numbers of micro-batches that rows, stages and schedule allow, or the nearest other sizes."""
    named = setting is not None and isinstance(setting.stages, int) and setting.csv is None
    divisors = [d for d in range(1, rows + 1) if rows % d == 0]
    if not named:
        return ", ".join(map(str, divisors)) or "a batch with rows"
    assert setting is not None and isinstance(setting.stages, int)
    stages = setting.stages
    fits = [d for d in divisors if takes(setting.scheduler, stages, d, setting.chunks)]
    return ", ".join(map(str, fits)) or f"a batch of more rows: at least {stages} micro-batches for {stages} stages"


def _called(path: Sequence[object]) -> str:
    """``0`` or ``mask['left']``: the name of a leaf by its path in (args, kwargs)."""
    first = path[1]
    return f"{getattr(first, 'idx', getattr(first, 'key', first))}{pytree.keystr(tuple(path[2:]))}"
