"""A pipeline's plan as the text of its document. What the form is, `document_pipeline` says, which reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..cluster import Cluster
from ..errors import ShardwrightError
from ..graph import Graph
from ..layout import Layout
from ..schedules import SCHEDULES, Schedule, schedule
from .decision import Feeding, feeding
from .document_writing import PIPELINE_SCHEMA, Parts, fields_of, parts_of, section
from .graph_document import fingerprint, packed, write_graph
from .spelling import spell_layout

if TYPE_CHECKING:
    from .pipelined import PipelinePlan, Stage

__all__ = ["fed_of", "pipeline_dataset_strategy", "pipeline_words", "pipeline_written", "whole_graph"]


def pipeline_written(plan: PipelinePlan) -> str:
    """A plan as the text of its document: the same text for the same plan."""
    parts = [parts_of(stage.plan, word=False) for stage in plan.stages]
    head: dict[str, Any] = {
        "schema": PIPELINE_SCHEMA, "graph": fingerprint(plan.graph), "devices": plan.devices, "mode": plan.mode,
        "dataset_strategy": pipeline_dataset_strategy(plan), "optimizer": plan.optimizer,
        "cluster": None if plan.cluster is None else plan.cluster.to_dict(), "pipeline": pipeline_words(plan),
        "total": {"seconds": plan.cost, "bubble": plan.simulation.bubble, "peak": plan.peak}}
    if plan.notes_of_its_own:
        head["notes"] = list(plan.notes_of_its_own)
    micro, graphs = plan.micro, [part.held["graph"] for part in parts]
    held = {"graph": _beside(write_graph(plan.graph), graphs), "joins": micro.joins, "totals": micro.totals,
            "counts": None if micro.counts is None else write_graph(micro.counts), "micro_batches": plan.micro_batches,
            "updates": micro.updates, "stages": [{"sources": s.sources, "results": s.results, "sent": s.sent} for s in plan.stages]}
    captured = ",\n".join(f'    "{packed(x)}"' for x in (*(part.held for part in parts), held))
    stages = ",\n".join(_stage(plan, stage, part) for stage, part in zip(plan.stages, parts))
    body = [*fields_of(head, "  "), f'  "stages": [\n{stages}\n  ]', f'  "captured": [\n{captured}\n  ]']
    return "{\n" + ",\n".join(body) + "\n}\n"


def _stage(plan: PipelinePlan, stage: Stage, parts: Parts) -> str:
    """The text of a stage: what it has of its own."""
    head = {key: value for key, value in parts.head.items() if key != "dataset_strategy"}
    shared = {"optimizer": plan.optimizer, "cluster": Cluster.of(plan.cluster, stage.devices).to_dict()}
    head = {key: value for key, value in head.items() if key not in shared or value != shared[key]}
    first = {"stage": stage.number, "ranks": f"{stage.ranks[0]}-{stage.ranks[-1]}",
             "fed": [{"value": source.name, "from": _from(source), "layout": spell_layout(layout)}
                     for source, layout in zip(stage.sources, stage.plan.fed.inputs)]}
    body = [*fields_of(first | head, "      "), section("operators", parts.operators, "      "),
            section("parameters", parts.parameters, "      ")]
    return "    {\n" + ",\n".join(body) + "\n    }"


def _from(source: Any) -> str:
    return {"input": "the batch", "stage": f"stage {source.index}",
            "parameter": f"stage {source.index}, a parameter"}[source.kind]


def pipeline_words(plan: PipelinePlan) -> dict[str, Any]:
    """What there is to say of the pipeline itself; its actions, where no name says them."""
    made = plan.schedule
    out: dict[str, Any] = {"stages": made.groups, "scheduler": made.name, "micro_batches": made.micro_batches}
    if made.stages != made.groups:
        out["chunks"] = made.stages // made.groups
    out |= {"placement": list(made.placement), "split": list(plan.split)}
    if not _named(made):
        out["actions"] = [",".join(map(str, row)) for row in made.actions]
    return out


def _named(made: Schedule) -> bool:
    """Whether a schedule is that of its name."""
    if made.name not in SCHEDULES:
        return False
    try:
        return schedule(made.name, made.groups, made.micro_batches, chunks=made.stages // made.groups) == made
    except ShardwrightError:
        return False


# -- how the model is fed ----------------------------------------------------------------------------------------------


def fed_of(plan: PipelinePlan) -> dict[int, Layout]:
    """By index of the model's inputs, the layout in which the first stage that reads it is fed it."""
    out: dict[int, Layout] = {}
    names = [v.name for v in plan.graph.inputs]
    for stage in plan.stages:
        for source, layout in zip(stage.sources, stage.plan.fed.inputs):
            if source.kind == "input":
                out.setdefault(source.index, layout)
        if stage.counts is not None:
            for value, layout in zip(stage.counts.graph.inputs, stage.counts.fed.inputs):
                out.setdefault(names.index(value.name), layout)
    return out


def pipeline_dataset_strategy(plan: PipelinePlan) -> Any:
    """The dataset_strategy that feeds as the stages are fed; what none of them reads is whole."""
    inputs = plan.graph.inputs[:len(plan.graph.inputs) - len(plan.micro.totals)]
    alone, found = Graph(inputs, {}, {}, {}, (), ()), fed_of(plan)
    first = plan.stages[0]
    for word in ("full_batch", "data_parallel"):
        if all(_fits(word, alone, stage) for stage in plan.stages):
            return word
    return [spell_layout(found.get(i) or Layout.replicated(first.devices, len(v.shape))) for i, v in enumerate(inputs)]


def _fits(word: str, alone: Graph, stage: Stage) -> bool:
    """Whether a word feeds a stage as it is fed."""
    try:
        fed: Feeding = feeding(alone, stage.devices, word)
    except ShardwrightError:  # a batch that does not divide
        return False
    own = stage.plan.fed
    return fed.own_part == own.own_part and all(
        fed.inputs[source.index] == layout for source, layout in zip(stage.sources, own.inputs)
        if source.kind == "input" and source.index < len(alone.inputs))


# -- the graph of a micro-batch, which is nearly that of its stages ----------------------------------------------------


def _beside(said: dict[str, Any], stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a written graph has that its stages' have not: of an operator that one of them has too, the name; of a value
    likewise, nothing."""
    ops, values = _of_stages(stages)
    return said | {"ops": [op["name"] if ops.get(op["name"]) == op else op for op in said["ops"]],
                   "values": {name: None if values.get(name) == value else value
                              for name, value in said["values"].items()}}


def whole_graph(said: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The written graph of which `said` is what its stages' have not."""
    ops, values = _of_stages(stages)
    return {**said, "ops": [ops[op] if isinstance(op, str) else op for op in said["ops"]],
            "values": {name: values[name] if value is None else value for name, value in said["values"].items()}}


def _of_stages(stages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Operators and values of all stages by name."""
    return ({op["name"]: op for part in stages for op in part["ops"]},
            {name: value for part in stages for name, value in part["values"].items()})
