"""A graph cut into the stages of a pipeline.

    stage of an operator    that of the innermost module around it that is in one; else the latest of what it reads;
                            what reads nothing of any stage: the earliest of those that use it
    crossing                a value that another stage uses: it leaves the stage that makes it by an operator `send`, and
                            is an input of every stage that uses it
    parameter               of the first stage that uses it; of further ones it is an input: they are sent it at the
                            beginning of a step, and send its gradient back at the end
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple


from ..errors import PlanError, SettingError
from ..graph import Graph, Op, Value
from ..rules.send import send
from ..torch_private import pytree

__all__ = ["Source", "StageGraph", "cut", "placed"]


class Source(NamedTuple):
    """Where an input of a stage comes from.

    Attributes:
        kind: "input" of the model; "stage": a value that an earlier one makes; "parameter" of an earlier one.
        index: of the model's input, or the stage.
        name: of the model's input, the value, or the parameter.
    """

    kind: str
    index: int
    name: str


@dataclass(frozen=True)
class StageGraph:
    """The graph of one stage.

    Attributes:
        graph: its inputs are those of the model, then parameters, then values of earlier stages; its outputs those of the
            model that it makes, then what it sends.
        sources: one an input.
        results: of the model's outputs that are tensors, the indices of those that come first among its own.
        sent: the names of the values that follow.
    """

    graph: Graph
    sources: tuple[Source, ...]
    results: tuple[int, ...]
    sent: tuple[str, ...]


def cut(graph: Graph, modules: Mapping[str, int], count: int, carries: Mapping[str, int]) -> tuple[StageGraph, ...]:
    """Cut a graph.

    Args:
        modules: dotted path -> stage, as `staging.staged_modules` gives it.
        count: how many stages there are.
        carries: value name -> the dim that carries the batch.

    Raises:
        SettingError: a stage past the count, one without an operator or without a parameter that is trained.
        PlanError: a value flows back to an earlier stage; a buffer is changed in one and used in another.
    """
    past = next(((path, s) for path, s in modules.items() if s >= count), None)
    if past is not None:
        raise SettingError(f"the module {past[0]!r} is in stage {past[1]}, of {count}", legal=f"stages 0 to {count - 1}")
    return _Cutter(graph, modules, count, carries).run()


def placed(graph: Graph, modules: Mapping[str, int], count: int) -> dict[str, int]:
    """The stage of every operator.

    Raises:
        PlanError: a value flows back to an earlier stage.
    """
    return _Cutter(graph, modules, count, {}).stage


class _Cutter:
    def __init__(self, graph: Graph, modules: Mapping[str, int], count: int, carries: Mapping[str, int]) -> None:
        self.graph, self.modules, self.count, self.carries = graph, modules, count, carries
        self.producers = graph.producers()
        self.stage = self.stages()
        self.parameters = {v.name: n for n, v in graph.parameters.items()}
        self.used: dict[str, list[int]] = {}    # of what no operator makes: the stages that use it
        for op in graph.ops:
            for v in op.inputs:
                if v.name not in self.producers and self.stage[op.name] not in self.used.setdefault(v.name, []):
                    self.used[v.name].append(self.stage[op.name])
        for stages in self.used.values():
            stages.sort()

    def marked(self, op: Op) -> int | None:
        """The stage of the innermost module around an operator that is in one."""
        path = op.module
        while True:
            if path in self.modules:
                return self.modules[path]
            if not path:
                return None
            path = path.rpartition(".")[0]

    def stages(self) -> dict[str, int]:
        """By operator."""
        found: dict[str, int] = {}
        for op in self.graph.ops:
            before = [(found[p.name], p) for v in op.inputs if (p := self.producers.get(v.name)) is not None
                      and p.name in found]
            latest, maker = max(before, key=lambda entry: entry[0], default=(None, None))
            own = self.marked(op)
            if own is not None and latest is not None and latest > own:
                raise PlanError(f"reads what {maker.name} makes in stage {latest}, and is in stage {own} itself: values flow "
                                "to later stages only", **op.where, legal=f"stage {latest} or later for its module "
                                f"{op.module!r}, or an earlier one for {maker.module!r}")
            if own is not None or latest is not None:
                found[op.name] = latest if own is None else own
        consumers = self.graph.consumers()
        for op in reversed(self.graph.ops):
            if op.name not in found:
                after = [found[c.name] for v in op.outputs if v is not None for c, _ in consumers.get(v.name, ())
                         if c.name in found]
                found[op.name] = min(after, default=0)
        return found

    def run(self) -> tuple[StageGraph, ...]:
        there = set(self.stage.values())
        missing = [s for s in range(self.count) if s not in there]
        if missing:
            raise SettingError(f"no operator is in stage {missing[0]} of {self.count}; those that there are: {sorted(there)}",
                               legal="sw.set_stage(module, number) or stage_config, with every number from 0 to "
                               f"{self.count - 1}")
        made = tuple(self.one(s) for s in range(self.count))
        for s, part in enumerate(made):
            if not any(v.requires_grad for v in part.graph.parameters.values()):
                raise SettingError(f"stage {s} has no parameter that is trained and its own",
                                   legal="stages that each have a trained parameter: other modules in them, or fewer stages")
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
                sources.append(Source("input", i, v.name))
        own, buffers = {}, {}
        for n, v in graph.parameters.items():
            first = self.used.get(v.name, [0])[0]
            if first == stage:
                own[n] = v
            elif v.name in read:
                inputs.append(v)
                sources.append(Source("parameter", first, n))
        for n, v in graph.buffers.items():
            if v.name in read or self.used.get(v.name, [0])[0] == stage:
                buffers[n] = v
        updates = {n: v for n, v in graph.updates.items() if self.home(v, n) == stage}
        self.check_updates(updates, stage)
        for name in read:
            maker = self.producers.get(name)
            if maker is not None and self.stage[maker.name] != stage:
                inputs.append(next(v for v in maker.outputs if v is not None and v.name == name))
                sources.append(Source("stage", self.stage[maker.name], name))
        sent, sends = [], []
        consumers = graph.consumers()
        for op in ops:
            for v in op.outputs:
                if v is not None and any(self.stage[c.name] != stage for c, _ in consumers.get(v.name, ())):
                    out = replace(v, name=f"{v.name}.sent")
                    sends.append(Op(f"send.{v.name}", send, (v,), {}, (v,), (out,), op.module, op.source))
                    sent.append(v.name)
        outputs = [graph.outputs[i] for i in results] + [op.outputs[0] for op in sends]
        batch = {v.name: d for v in inputs for d in (self.carries.get(v.name),)
                 if d is not None and v.name not in self.parameters}
        constants = {n: t for n, t in graph.constants.items() if n in read}
        spec = pytree.tree_flatten(tuple(range(len(outputs))))[1]
        aliases = {alias: n for alias, n in graph.aliases.items() if n in own or n in buffers}
        part = Graph(tuple(inputs), own, buffers, constants, (*ops, *sends), tuple(outputs), None, spec, updates, aliases,
                     batch)
        return StageGraph(part, tuple(sources), tuple(results), tuple(sent))

    def home(self, value: Value, buffer: str | None = None) -> int:
        """The stage that hands out a result; what no operator makes is handed out by the first that uses it."""
        maker = self.producers.get(value.name)
        if maker is not None:
            return self.stage[maker.name]
        name = value.name if buffer is None else self.graph.buffers[buffer].name
        return self.used.get(name, [0])[0]

    def check_updates(self, updates: Mapping[str, Value], stage: int) -> None:
        for n in updates:
            others = [s for s in self.used.get(self.graph.buffers[n].name, ()) if s != stage]
            if others:
                raise PlanError(f"the buffer {n!r} is changed in stage {stage} and used in stage {others[0]}",
                                legal="one stage for all that uses it")
