"""The stages of a pipeline: cutting a graph, the units between which it may be cut, and the stages that a search has
chosen.

1. Stages (`cut`):

    stage of an operator    that of its innermost module with a stage; else the latest stage among its producers;
                            without producers in any stage, the earliest stage among its consumers
    crossing                a value with consumers in another stage: an operator `send` ends its producer's stage, and
                            the value is an input of each consumer's stage
    parameter               belongs to the first stage that reads it; it is an input of further ones, which receive it
                            at the beginning of a step and send its gradient back at the end

2. Units (`units_of`): the modules with parameters, in program order. Stages are cut between units.

    module of an operator   its path down to the first number ("blocks.3" of "blocks.3.attention.query"), else its
                            whole path, if an operator of the module reads a parameter
    unit                    modules whose operators do not read values of later units: modules that call each other in
                            turns form one unit, and a module without a trained parameter of its own joins the module
                            before it
    other operators         belong to the unit of their producers, by the rule for stages
    equal units             have equal operators on equal shapes, and read the same values of the unit before

The first unit of a run of equal units is its representative; the graph of representatives is searched instead of the
whole graph. Example: an embedding, 12 equal blocks and a head are 14 units; blocks 2 to 12 each read an equal block,
so they share one representative.

3. Chosen stages (`PipelineSearchResult`), and the pipelines that a search priced beside them. Example: 14 units on 8
   devices: ``StageChoice(0, 7, 4, False), StageChoice(7, 14, 4, True)`` are two stages of seven units on four devices
   each; the second one is recomputed in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ..capture.annotations import PipelineSettings
from ..errors import PlanError, SettingError
from ..graph import Graph, Op, Value, map_values
from ..json_files.json_reader import JsonObject
from ..rules.dims import send
from ..torch_private import pytree
from .schedules import Schedule, schedule

__all__ = [
    "PipelineSearchResult",
    "PricedPipeline",
    "StageChoice",
    "StageGraph",
    "StageInput",
    "Units",
    "cut",
    "placed",
    "units_of",
]

# -- stages, units


class StageInput(NamedTuple):
    """The source of an input of a stage.

    Attributes:
        kind: "input" of the model; "stage": a value that an earlier one produces; "parameter" of an earlier one.
        index: of the model's input, or the stage.
        name: of the model's input, the value, or the parameter.
    """

    kind: str
    index: int  # type: ignore[assignment]  # tuple has a method of this name
    name: str


@dataclass(frozen=True)
class StageGraph:
    """The graph of one stage.

    Attributes:
        graph: its inputs are those of the model, then parameters, then values of earlier stages; its outputs are
            those of the model that it produces, then the values that it sends.
        sources: one an input.
        results: indices of the model's tensor outputs that come first among its own outputs.
        sent: names of the values that follow.
    """

    graph: Graph
    sources: tuple[StageInput, ...]
    results: tuple[int, ...]
    sent: tuple[str, ...]


def cut(graph: Graph, modules: Mapping[str, int], count: int, batch_dims: Mapping[str, int]) -> tuple[StageGraph, ...]:
    """Cut a graph into stages.

    Args:
        modules: dotted path -> stage.
        count: the number of stages.
        batch_dims: value name -> the dim that carries the batch.

    Raises:
        SettingError: a stage past the count, one without an operator or without a parameter that is trained.
        PlanError: a value flows back to an earlier stage; a buffer is changed in one stage and used in another.
    """
    past = next(((path, s) for path, s in modules.items() if s >= count), None)
    if past is not None:
        raise SettingError(
            f"the module {past[0]!r} is in stage {past[1]}, of {count}", legal=f"stages 0 to {count - 1}"
        )
    return _Cutter(graph, modules, count, batch_dims).run()


def placed(graph: Graph, modules: Mapping[str, int], count: int) -> dict[str, int]:
    """The stage of every operator.

    Raises:
        PlanError: a value flows back to an earlier stage.
    """
    return _Cutter(graph, modules, count, {}).stage


class _Cutter:
    def __init__(self, graph: Graph, modules: Mapping[str, int], count: int, batch_dims: Mapping[str, int]) -> None:
        self.graph, self.modules, self.count, self.batch_dims = graph, modules, count, batch_dims
        self.producers = graph.producers()
        self.stage = self.stages()
        self.parameters = {v.name: n for n, v in graph.parameters.items()}
        self.used: dict[str, list[int]] = {}  # value without a producer -> the stages that use it
        for op in graph.ops:
            for v in op.inputs:
                if v.name not in self.producers and self.stage[op.name] not in self.used.setdefault(v.name, []):
                    self.used[v.name].append(self.stage[op.name])
        for stages in self.used.values():
            stages.sort()

    def marked(self, op: Op) -> int | None:
        """The stage of the innermost module around an operator that has a stage; None without one."""
        path = op.module
        while True:
            if path in self.modules:
                return self.modules[path]
            if not path:
                return None
            path = path.rpartition(".")[0]

    def stages(self) -> dict[str, int]:
        """The stage of every operator."""
        found: dict[str, int] = {}
        for op in self.graph.ops:
            before = [
                (found[p.name], p)
                for v in op.inputs
                if (p := self.producers.get(v.name)) is not None and p.name in found
            ]
            latest, producer = max(before, key=lambda entry: entry[0], default=(None, None))
            marked = self.marked(op)
            if marked is not None and latest is not None and producer is not None and latest > marked:
                raise PlanError(
                    f"reads what {producer.name} makes in stage {latest}, and is in stage {marked} itself: values flow "
                    "to later stages only",
                    **op.where,
                    legal=f"stage {latest} or later for its module "
                    f"{op.module!r}, or an earlier one for {producer.module!r}",
                )
            stage = latest if marked is None else marked
            if stage is not None:
                found[op.name] = stage
        consumers = self.graph.consumers()
        for op in reversed(self.graph.ops):
            if op.name not in found:
                after = [
                    found[c.name]
                    for v in op.outputs
                    if v is not None
                    for c, _ in consumers.get(v.name, ())
                    if c.name in found
                ]
                found[op.name] = min(after, default=0)
        return found

    def run(self) -> tuple[StageGraph, ...]:
        stages = set(self.stage.values())
        missing = [s for s in range(self.count) if s not in stages]
        if missing:
            raise SettingError(
                f"no operator is in stage {missing[0]} of {self.count}; those that there are: {sorted(stages)}",
                legal=f"sw.set_stage(module, number) or stage_config, with every number from 0 to {self.count - 1}",
            )
        made = tuple(self.one(s) for s in range(self.count))
        for s, part in enumerate(made):
            shared = [v for v, source in zip(part.graph.inputs, part.sources) if source.kind == "parameter"]
            if not any(v.requires_grad for v in (*part.graph.parameters.values(), *shared)):
                raise SettingError(
                    f"stage {s} has no parameter that is trained and its own, and shares none with another stage",
                    legal="stages that each read a trained parameter: other modules in them, or fewer stages",
                )
        return made

    def one(self, stage: int) -> StageGraph:
        graph = self.graph
        ops = [op for op in graph.ops if self.stage[op.name] == stage]
        read = dict.fromkeys(v.name for op in ops for v in op.inputs)
        results = [i for i, v in enumerate(graph.outputs) if isinstance(v, Value) and self.home(v) == stage]
        read.update(dict.fromkeys(graph.outputs[i].name for i in results))
        inputs, sources = [], []
        for i, v in enumerate(graph.inputs):
            if v.name in read:
                inputs.append(v)
                sources.append(StageInput("input", i, v.name))
        parameters, buffers = {}, {}
        for n, v in graph.parameters.items():
            first = self.used.get(v.name, [0])[0]
            if first == stage:
                parameters[n] = v
            elif v.name in read:
                inputs.append(v)
                sources.append(StageInput("parameter", first, n))
        for n, v in graph.buffers.items():
            if v.name in read or self.used.get(v.name, [0])[0] == stage:
                buffers[n] = v
        updates = {n: v for n, v in graph.updates.items() if self.home(v, n) == stage}
        self.check_updates(updates, stage)
        for name in read:
            producer = self.producers.get(name)
            if producer is not None and self.stage[producer.name] != stage:
                inputs.append(next(v for v in producer.outputs if v is not None and v.name == name))
                sources.append(StageInput("stage", self.stage[producer.name], name))
        sent, sends = [], []
        consumers = graph.consumers()
        for op in ops:
            for made in op.outputs:
                if made is not None and any(self.stage[c.name] != stage for c, _ in consumers.get(made.name, ())):
                    out = replace(made, name=f"{made.name}.sent")
                    sends.append(Op(f"send.{made.name}", send, (made,), {}, (made,), (out,), op.module, op.source))
                    sent.append(made.name)
        outputs = [graph.outputs[i] for i in results] + [op.output(0) for op in sends]
        batch = {
            v.name: d
            for v in inputs
            for d in (self.batch_dims.get(v.name),)
            if d is not None and v.name not in self.parameters
        }
        constants = {n: t for n, t in graph.constants.items() if n in read}
        spec = pytree.tree_flatten(tuple(range(len(outputs))))[1]
        aliases = {alias: n for alias, n in graph.aliases.items() if n in parameters or n in buffers}
        part = Graph(
            tuple(inputs),
            parameters,
            buffers,
            constants,
            (*ops, *sends),
            tuple(outputs),
            None,
            spec,
            updates,
            aliases,
            batch,
        )
        return StageGraph(part, tuple(sources), tuple(results), tuple(sent))

    def home(self, value: Value, buffer: str | None = None) -> int:
        """The stage that returns a result: that of its producer; for a value without a producer, the first that
        uses it."""
        producer = self.producers.get(value.name)
        if producer is not None:
            return self.stage[producer.name]
        name = value.name if buffer is None else self.graph.buffers[buffer].name
        return self.used.get(name, [0])[0]

    def check_updates(self, updates: Mapping[str, Value], stage: int) -> None:
        for n in updates:
            other_stages = [s for s in self.used.get(self.graph.buffers[n].name, ()) if s != stage]
            if other_stages:
                raise PlanError(
                    f"the buffer {n!r} is changed in stage {stage} and used in stage {other_stages[0]}",
                    legal="one stage for all that uses it",
                )


# -- units


@dataclass(frozen=True)
class Units:
    """A graph in units.

    Attributes:
        graph: the graph.
        paths: for each unit, its modules.
        of: operator -> its unit.
    """

    graph: Graph
    paths: tuple[tuple[str, ...], ...]
    of: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.paths)

    def on(self, graph: Graph) -> Units:
        """The same units for a capture of the same program with other shapes."""
        of = {other.name: self.of[op.name] for op, other in zip(self.graph.ops, graph.ops)}
        made = Units(graph, self.paths, of)
        made.__dict__["representative"] = self.representative
        return made

    @cached_property
    def members(self) -> tuple[tuple[Op, ...], ...]:
        """The operators of each unit."""
        out: list[list[Op]] = [[] for _ in self.paths]
        for op in self.graph.ops:
            out[self.of[op.name]].append(op)
        return tuple(map(tuple, out))

    @cached_property
    def consumers(self) -> dict[str, tuple[int, ...]]:
        """Value name -> the units that read it, in order."""
        out: dict[str, set[int]] = {}
        for op in self.graph.ops:
            for v in op.inputs:
                out.setdefault(v.name, set()).add(self.of[op.name])
        return {name: tuple(sorted(units)) for name, units in out.items()}

    @cached_property
    def homes(self) -> dict[str, int]:
        """Parameter, by its value's name -> the first unit that reads it."""
        return {v.name: self.consumers[v.name][0] for v in self.graph.parameters.values() if v.name in self.consumers}

    @cached_property
    def crossing(self) -> tuple[tuple[str, ...], ...]:
        """For each unit but the last, the values that it or earlier units produce and later units read."""
        out: list[list[str]] = [[] for _ in range(len(self) - 1)]
        for op in self.graph.ops:
            for v in op.outputs:
                if v is None:
                    continue
                last = self.consumers.get(v.name, (0,))[-1]
                for border in range(self.of[op.name], last):
                    out[border].append(v.name)
        return tuple(map(tuple, out))

    @cached_property
    def last(self) -> frozenset[int]:
        """The units that produce the model's outputs."""
        producers = self.graph.producers()
        return frozenset(
            self.of[producers[v.name].name] for v in self.graph.outputs if isinstance(v, Value) and v.name in producers
        )

    @cached_property
    def representative(self) -> tuple[int, ...]:
        """For each unit, the first of its run of equal units."""
        forms = _Forms(self)
        out: list[int] = []
        for unit in range(len(self)):
            same_form = unit > 0 and forms.of(unit) == forms.of(unit - 1)
            out.append(out[-1] if same_form else unit)
        return tuple(out)

    @cached_property
    def same(self) -> dict[str, Value]:
        """Name of a value that a unit produces -> the value in its place in the unit's representative."""
        out: dict[str, Value] = {}
        for unit, first in enumerate(self.representative):
            if first != unit:
                for op, other in zip(self.members[unit], self.members[first]):
                    out.update((v.name, w) for v, w in zip(op.outputs, other.outputs) if v and w)
        return out

    @cached_property
    def reduced(self) -> Graph:
        """The graph of the representatives alone."""
        graph = self.graph
        change: Callable[[Value], Value] = lambda v: self.same.get(v.name, v)
        ops = tuple(
            _changed(op, change) for op in graph.ops if self.representative[self.of[op.name]] == self.of[op.name]
        )
        read = {v.name for op in ops for v in op.inputs}
        read_of = lambda table: {n: v for n, v in table.items() if v.name in read}
        parameters, buffers = read_of(graph.parameters), read_of(graph.buffers)
        return replace(
            graph,
            ops=ops,
            parameters=parameters,
            buffers=buffers,
            constants={n: t for n, t in graph.constants.items() if n in read},
            outputs=tuple(map_values(v, change) for v in graph.outputs),
            updates={n: change(v) for n, v in graph.updates.items() if n in buffers},
            aliases={a: n for a, n in graph.aliases.items() if n in parameters or n in buffers},
        )


def _changed(op: Op, change: Callable[[Value], Value]) -> Op:
    args, kwargs = map_values((op.args, op.kwargs), change)
    return replace(op, args=args, kwargs=kwargs, inputs=tuple(map(change, op.inputs)))


def units_of(graph: Graph) -> Units:
    """The units of a graph; a graph that cannot be cut is one unit."""
    groups = _modules(graph)
    while len(groups) > 1:
        pair = _backwards(graph, groups) or _without_own(graph, groups)
        if pair is None:
            break
        first, last = pair
        groups[first : last + 1] = [[path for group in groups[first : last + 1] for path in group]]
    of = placed(graph, _stage_of(groups), max(len(groups), 1))
    return Units(graph, tuple(map(tuple, groups)) or ((),), of)


def _stage_of(groups: list[list[str]]) -> dict[str, int]:
    return {path: i for i, group in enumerate(groups) for path in group}


def _module(path: str) -> tuple[str, bool]:
    """A module's path down to its first number, and True where it has one."""
    parts = path.split(".")
    first = next((k for k, part in enumerate(parts) if part.isdigit()), None)
    return (path, False) if first is None else (".".join(parts[: first + 1]), True)


def _modules(graph: Graph) -> list[list[str]]:
    """The modules that read parameters, in the order of their first operators, without modules around numbered
    ones."""
    parameter_names = {v.name for v in graph.parameters.values()}
    reading = {_module(op.module) for op in graph.ops if any(v.name in parameter_names for v in op.inputs)}
    around = {
        ".".join(path.split(".")[:k]) for path, numbered in reading if numbered for k in range(path.count(".") + 1)
    }
    wanted = {path for path, numbered in reading if path and (numbered or path not in around)}
    order = dict.fromkeys(_module(op.module)[0] for op in graph.ops)
    return [[path] for path in order if path in wanted]


def _backwards(graph: Graph, groups: list[list[str]]) -> tuple[int, int] | None:
    """Two groups of which the first reads a value of the second; None without such a pair."""
    modules, producers, found = _stage_of(groups), graph.producers(), dict[str, int]()
    for op in graph.ops:
        latest = max(
            (
                found[producers[v.name].name]
                for v in op.inputs
                if v.name in producers and producers[v.name].name in found
            ),
            default=None,
        )
        path: str | None = op.module
        while path and path not in modules:
            path = path.rpartition(".")[0]
        set_stage = modules.get(path) if path else None
        if set_stage is not None and latest is not None and latest > set_stage:
            return set_stage, latest
        group = latest if set_stage is None else set_stage
        if group is not None:
            found[op.name] = group
    return None


def _without_own(graph: Graph, groups: list[list[str]]) -> tuple[int, int] | None:
    """A group that is not the first to read any trained parameter, and its neighbour; None without one."""
    units = Units(graph, tuple(map(tuple, groups)), placed(graph, _stage_of(groups), len(groups)))
    trained = {units.homes[v.name] for v in graph.parameters.values() if v.requires_grad and v.name in units.homes}
    without = next((i for i in range(len(groups)) if i not in trained), None)
    return None if without is None else (max(without - 1, 0), max(without, 1))


class _Forms:
    """Keys of units, equal for equal units."""

    def __init__(self, units: Units) -> None:
        self.units = units
        self.places: dict[str, tuple[int, int, int]] = {}
        for members in units.members:
            for k, op in enumerate(members):
                self.places.update(
                    (v.name, (units.of[op.name], k, i)) for i, v in enumerate(op.outputs) if v is not None
                )
        graph = units.graph
        self.stored = {v.name: "parameter" for v in graph.parameters.values()} | {
            v.name: "buffer" for v in graph.buffers.values()
        }
        self.known: dict[int, tuple[object, ...]] = {}

    def of(self, unit: int) -> tuple[object, ...]:
        """The key of a unit."""
        if unit not in self.known:
            seen: dict[str, int] = {}
            self.known[unit] = tuple(self.operator(op, unit, seen) for op in self.units.members[unit])
        return self.known[unit]

    def operator(self, op: Op, unit: int, seen: dict[str, int]) -> tuple[object, ...]:
        leaves, spec = pytree.tree_flatten((op.args, op.kwargs))
        mark = None if op.mark is None else (op.mark.in_strategy, op.mark.out_strategy)
        outputs = tuple(None if v is None else (v.shape, v.dtype, v.requires_grad) for v in op.outputs)
        region = None if op.recompute is None else replace(op.recompute, call=0, path="")
        return (
            str(op.target),
            tuple(self.leaf(leaf, unit, seen) for leaf in leaves),
            str(spec),
            outputs,
            repr(mark),
            region,
        )

    def leaf(self, leaf: object, unit: int, seen: dict[str, int]) -> object:
        if not isinstance(leaf, Value):
            return repr(leaf)
        kind = (leaf.shape, leaf.dtype, leaf.requires_grad)
        place = self.places.get(leaf.name)
        if place is not None and unit - 1 <= place[0] <= unit:
            return (unit - place[0], *place[1:], *kind)
        unshared = self.units.consumers[leaf.name] == (unit,)
        if leaf.name in self.stored and unshared:
            return (self.stored[leaf.name], seen.setdefault(leaf.name, len(seen)), *kind)
        return leaf.name, *kind


# -- chosen stages


class StageChoice(NamedTuple):
    """A stage: units [first, last) on `devices` devices, recomputed in the backward or not."""

    first: int
    last: int
    devices: int
    recompute: bool


@dataclass(frozen=True)
class PricedPipeline:
    """One pipeline that the search priced.

    Attributes:
        devices: number of devices of each stage.
        micro_batches: the number of micro-batches.
        recomputed: the number of stages that are recomputed.
        seconds: of a step, by the formula of `balance`; None: the pipeline is impossible.
        peak: bytes of the device that holds the most; for a pipeline that does not fit, the least achievable.
        why: the reason why it is impossible.
    """

    devices: tuple[int, ...]
    micro_batches: int
    recomputed: int = 0
    seconds: float | None = None
    peak: float | None = None
    why: str = ""

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.devices)


@dataclass(frozen=True)
class PipelineSearchResult:
    """The chosen pipeline and its alternatives.

    Attributes:
        paths: for each unit, its modules.
        stages: in order.
        seconds, peak: as in `PricedPipeline`.
        alternatives: the best first.
    """

    paths: tuple[tuple[str, ...], ...]
    stages: tuple[StageChoice, ...]
    micro_batches: int
    seconds: float
    peak: float
    alternatives: tuple[PricedPipeline, ...]

    def encode(self) -> dict[str, object]:
        """The same as values that `json_values` takes: one rank sends them to the others, which `read` them."""
        alternatives = [vars(pipeline) for pipeline in self.alternatives]
        return {**vars(self), "stages": [tuple(stage) for stage in self.stages], "alternatives": alternatives}

    @classmethod
    def read(cls, encoded: JsonObject) -> PipelineSearchResult:
        """The search result of `encoded`."""
        stages = tuple(StageChoice(*stage) for stage in encoded["stages"])
        alternatives = tuple(PricedPipeline(**pipeline) for pipeline in encoded["alternatives"])
        return cls(**{**encoded, "stages": stages, "alternatives": alternatives})

    @property
    def modules(self) -> dict[str, int]:
        """Dotted path -> stage."""
        return {
            path: s
            for s, stage in enumerate(self.stages)
            for paths in self.paths[stage.first : stage.last]
            for path in paths
            if path
        }

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of devices of each stage."""
        return tuple(stage.devices for stage in self.stages)

    @property
    def unequal(self) -> bool:
        """True where stages have unequal numbers of devices."""
        return len(set(self.sizes)) > 1

    @property
    def setting(self) -> PipelineSettings:
        """The setting by which a user would ask for these stages, apart from the numbers of devices."""
        return PipelineSettings(len(self.stages), "1f1b", self.micro_batches)

    @property
    def schedule(self) -> Schedule:
        """The 1F1B schedule of the chosen stages."""
        return schedule("1f1b", len(self.stages), self.micro_batches)

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The units that are recomputed."""
        return tuple(u for stage in self.stages if stage.recompute for u in range(stage.first, stage.last))
