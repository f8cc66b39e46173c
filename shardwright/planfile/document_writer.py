"""A plan as the text of its document, of one program (`written`) or of a pipeline (`pipeline_written`).

`plan_document` and `pipeline_document` describe the formats, and read them. Lines follow the order of the program,
one line per operator and per parameter, so that two documents can be compared line by line.

The graph of a pipeline's micro-batch is nearly the union of its stages' graphs: it is written without the operators
and values that the stages have (`_beside`), and put together again by `whole_graph`.

Example, the line of a linear operator on 8 devices, whose x [32, 16] is cut along the batch::

    {"name": "linear", "op": "linear", "in_strategy": [[8, 1], [1, 1], [1]], "cause": "batch", "shapes": "f32[32, 16],
     f32[32, 16], f32[32] -> f32[32, 32]", "module": "fc1", "source": "model.py:7", "seconds": 1.501e-05}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

from ..cluster import Cluster
from ..errors import ShardwrightError
from ..graph import Graph, Op, types_of
from ..json_files.json_reader import JsonObject
from ..layout import Layout
from ..partition.hybrid_parallel import place_whole_inputs
from ..partition.local_program import Decision, InputPlacement, place_inputs
from ..pipeline.schedules import SCHEDULES, Schedule, schedule
from .encoding import fingerprint, packed, spell_assignment, spell_digits, spell_layout, write_graph, write_recompute

if TYPE_CHECKING:
    from ..pipeline.pipeline_plan import PipelinePlan, Stage
    from ..pipeline.stages import StageInput
    from ..sharded_plan import Plan

__all__ = [
    "LINE_FIELDS",
    "PIPELINE_FIELDS",
    "PIPELINE_SCHEMA",
    "SCHEMA",
    "STAGE_FIELDS",
    "Parts",
    "dataset_strategy",
    "digest",
    "encode_pipeline",
    "fields_of",
    "head_digest",
    "layouts_of_inputs",
    "parts_of",
    "pipeline_dataset_strategy",
    "pipeline_written",
    "placement_under",
    "section",
    "whole_graph",
    "written",
]

#: The version of the format. It rises when documents of the old format can no longer be read with their old meaning.
SCHEMA = 1

#: The version of the format of a pipeline's document, likewise.
PIPELINE_SCHEMA = 2


#: The fields of a document's head, of a stage's, and of the lines of each section.
HEAD_FIELDS = {
    "schema", "graph", "devices", "mode", "dataset_strategy", "hsdp", "uneven", "open", "own", "optimizer", "memory",
    "comm_memory", "cluster", "total",
}  # fmt: skip
PIPELINE_FIELDS = HEAD_FIELDS | {"pipeline", "notes"}
STAGE_FIELDS = HEAD_FIELDS | {"stage", "ranks", "fed"}
LINE_FIELDS = {
    "operators": {
        "name", "op", "device_matrix", "alias_name", "in_strategy", "leaves", "out_strategy", "open", "cause", "shapes",
        "recompute", "origin", "via", "module", "source", "note", "seconds",
    },
    "parameters": {"name", "shape", "dtype", "storage", "used_as", "settled", "ranks"},
}  # fmt: skip
LINE_FIELDS["buffers"] = LINE_FIELDS["parameters"]


class Parts(NamedTuple):
    """The parts of a plan's document.

    Attributes:
        head: its fields.
        operators, parameters: its lines.
        content: of the packed line.
    """

    head: dict[str, object]
    operators: list[dict[str, object]]
    parameters: list[dict[str, object]]
    content: JsonObject


def written(plan: Plan) -> str:
    """A plan as the text of its document: the same text for the same plan."""
    head, operators, parameters, content = parts_of(plan)
    parts = fields_of({"schema": SCHEMA} | head, "  ")
    parts += [section("operators", operators), section("parameters", parameters), f'  "captured": "{packed(content)}"']
    return "{\n" + ",\n".join(parts) + "\n}\n"


def parts_of(plan: Plan, word: bool = True) -> Parts:
    """The parts of a plan's document.

    Args:
        plan: the plan.
        word: True: the dataset_strategy is written as one word, where a word gives it.
    """
    setting = plan.hsdp
    head: dict[str, object] = {
        "graph": fingerprint(plan.graph),
        "devices": plan.devices,
        "mode": plan.mode,
        "dataset_strategy": dataset_strategy(plan) if word else [*map(spell_layout, plan.input_placement.inputs)],
        "hsdp": None
        if setting is None
        else {key: sorted(value) if isinstance(value, frozenset) else value for key, value in asdict(setting).items()},
    }
    if any(d.bound.uneven for d in plan.decisions.values()):
        head["uneven"] = True
    if any(d.partial is not None for d in plan.decisions.values()):
        head["open"] = []  # the default of lines without "open"
    if plan.own is not None:
        head["own"] = {"parameters": sorted(plan.own.parameters), "loss": plan.own.loss}
    head["optimizer"] = plan.optimizer
    if plan.found is not None and plan.found.limit is not None:
        limit = plan.found.limit
        head["memory"] = int(limit) if float(limit).is_integer() else limit
    if plan.comm_memory is not None:
        head["comm_memory"] = plan.comm_memory
    head["cluster"] = None if plan.cluster is None else plan.cluster.to_dict()
    head["total"] = {
        "seconds": plan.cost,
        "bound": plan.bound,
        "gap": plan.gap,
        "memory": plan.memory(0),
        "peak": plan.peak,
    }
    seconds = plan.price.by_operator
    operators = [
        _operator(op, plan.decisions[op.name], seconds.get(op.name, 0.0), "open" in head) for op in plan.graph.ops
    ]
    parameters = list(_parameters(plan))
    digests = {
        "head": head_digest(head),
        "operators": {op.name: digest(op, plan.decisions[op.name]) for op in plan.graph.ops},
        "parameters": {line["name"]: line["storage"] for line in parameters},
    }
    return Parts(
        head,
        operators,
        parameters,
        {
            "graph": write_graph(plan.graph),
            "said": digests,
            "found": None if plan.found is None else asdict(plan.found) | {"seconds": plan.cost},
        },
    )


def fields_of(head: Mapping[str, object], indent: str) -> list[str]:
    """Fields as text, one a line."""
    return [f"{indent}{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]


def section(name: str, lines: Iterable[dict[str, object]], indent: str = "  ") -> str:
    """A section's lines as text."""
    body = ",\n".join(f"{indent}  {json.dumps(line, ensure_ascii=False)}" for line in lines)
    return f'{indent}"{name}": [\n{body}\n{indent}]' if body else f'{indent}"{name}": []'


def placement_under(graph: Graph, devices: int, mode: str, strategy: object) -> InputPlacement:
    """The placement of the inputs under a dataset_strategy, in a parallel mode."""
    return (place_whole_inputs if mode == "hybrid_parallel" else place_inputs)(graph, devices, strategy)


def dataset_strategy(plan: Plan) -> object:
    """The dataset_strategy that gives the plan's placement of the inputs: a word where there is one, else layouts."""
    for word in ("full_batch", "data_parallel"):
        try:
            if placement_under(plan.graph, plan.devices, plan.mode, word) == plan.input_placement:
                return word
        except ShardwrightError:
            pass  # a batch that does not divide
    return [spell_layout(layout) for layout in plan.input_placement.inputs]


def _operator(op: Op, decision: Decision, seconds: float, closed: bool) -> dict[str, object]:
    line = {"name": op.name, "op": op.kind, **spell_assignment(decision.bound, decision.assignment)}
    if decision.out is not None:
        line["out_strategy"] = [spell_layout(layout) for layout in decision.out]
    if decision.partial or (closed and decision.partial is None):
        line["open"] = decision.partial and spell_digits(decision.assignment.devices, decision.partial)
    line |= {"cause": decision.cause, "shapes": types_of(op)}
    if op.recompute is not None:
        line["recompute"] = write_recompute(op.recompute)
    line |= {
        key: value
        for key, value in (
            ("origin", decision.origin),
            ("via", decision.via),
            ("module", op.module),
            ("source", op.source),
            ("note", decision.note),
        )
        if value
    }
    return line | {"seconds": float(f"{seconds:.4g}")}


def _parameters(plan: Plan) -> Iterator[dict[str, object]]:
    values = plan.graph.parameters | plan.graph.buffers
    for name, value in values.items():
        sharding = plan.parameters[name]
        line = {
            "name": name,
            "shape": list(value.shape),
            "dtype": str(value.stored.dtype).removeprefix("torch."),
            "storage": spell_layout(sharding.storage),
        }
        if sharding.layout != sharding.storage:
            line["used_as"] = spell_layout(sharding.layout)
        if plan.stored is not None and name in plan.stored:
            line["settled"] = True
        yield line


def head_digest(head: Mapping[str, object]) -> str:
    """A digest of the head's fields that a search depends on."""
    keys = ("graph", "devices", "dataset_strategy", "hsdp", "uneven", "optimizer", "cluster")
    settings = [head.get(key) for key in keys]
    if head.get("memory") is not None:  # only then: documents older than this field have a digest without it
        settings.append(head["memory"])
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]


def digest(op: Op, decision: Decision) -> str:
    """A digest of a line's content that planning depends on, in normal form: independent of its notation."""
    identity = (decision.assignment.digits, tuple(map(str, decision.out or ())), decision.partial, op.recompute)
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:8]


# -- the document of a pipeline ----------------------------------------------------------------------------------------


def pipeline_written(plan: PipelinePlan) -> str:
    """A pipeline's plan as the text of its document: the same text for the same plan."""
    parts = [parts_of(stage.plan, word=False) for stage in plan.stages]
    head: dict[str, object] = {
        "schema": PIPELINE_SCHEMA,
        "graph": fingerprint(plan.graph),
        "devices": plan.devices,
        "mode": plan.mode,
        "dataset_strategy": pipeline_dataset_strategy(plan),
        "optimizer": plan.optimizer,
        "cluster": None if plan.cluster is None else plan.cluster.to_dict(),
        "pipeline": encode_pipeline(plan),
        "total": {"seconds": plan.cost, "bubble": plan.simulation.bubble, "peak": plan.peak},
    }
    if plan.notes_of_its_own:
        head["notes"] = list(plan.notes_of_its_own)
    micro, graphs = plan.micro, [part.content["graph"] for part in parts]
    content = {
        "graph": _beside(write_graph(plan.graph), graphs),
        "joins": micro.joins,
        "totals": micro.totals,
        "counts": None if micro.counts is None else write_graph(micro.counts),
        "micro_batches": plan.micro_batches,
        "updates": micro.updates,
        "stages": [{"sources": s.sources, "results": s.results, "sent": s.sent} for s in plan.stages],
    }
    captured = ",\n".join(f'    "{packed(x)}"' for x in (*(part.content for part in parts), content))
    stages = ",\n".join(_stage(plan, stage, part) for stage, part in zip(plan.stages, parts))
    body = [*fields_of(head, "  "), f'  "stages": [\n{stages}\n  ]', f'  "captured": [\n{captured}\n  ]']
    return "{\n" + ",\n".join(body) + "\n}\n"


def _stage(plan: PipelinePlan, stage: Stage, parts: Parts) -> str:
    """The text of a stage: the fields that differ from the head's, and its sections."""
    head = {key: value for key, value in parts.head.items() if key != "dataset_strategy"}
    shared = {"optimizer": plan.optimizer, "cluster": Cluster.of(plan.cluster, stage.devices).to_dict()}
    head = {key: value for key, value in head.items() if key not in shared or value != shared[key]}
    first = {
        "stage": stage.number,
        "ranks": f"{stage.ranks[0]}-{stage.ranks[-1]}",
        "fed": [
            {"value": source.name, "from": _from(source), "layout": spell_layout(layout)}
            for source, layout in zip(stage.sources, stage.plan.input_placement.inputs)
        ],
    }
    body = [
        *fields_of(first | head, "      "),
        section("operators", parts.operators, "      "),
        section("parameters", parts.parameters, "      "),
    ]
    return "    {\n" + ",\n".join(body) + "\n    }"


def _from(source: StageInput) -> str:
    return {"input": "the batch", "stage": f"stage {source.index}", "parameter": f"stage {source.index}, a parameter"}[
        source.kind
    ]


def encode_pipeline(plan: PipelinePlan) -> dict[str, object]:
    """The fields of the pipeline itself; with its actions, where no schedule name gives them."""
    made = plan.schedule
    out: dict[str, object] = {"stages": made.groups, "scheduler": made.name, "micro_batches": made.micro_batches}
    if made.stages != made.groups:
        out["chunks"] = made.stages // made.groups
    out |= {"placement": list(made.placement), "split": list(plan.split)}
    if not _named(made):
        out["actions"] = [",".join(map(str, row)) for row in made.actions]
    return out


def _named(made: Schedule) -> bool:
    """True where a schedule equals the standard one of its name."""
    if made.name not in SCHEDULES:
        return False
    try:
        return schedule(made.name, made.groups, made.micro_batches, chunks=made.stages // made.groups) == made
    except ShardwrightError:
        return False


# -- how the model is fed ----------------------------------------------------------------------------------------------


def layouts_of_inputs(plan: PipelinePlan) -> dict[int, Layout]:
    """By index of the model's inputs, the layout in which the first stage that reads the input is fed it."""
    out: dict[int, Layout] = {}
    names = [v.name for v in plan.graph.inputs]
    for stage in plan.stages:
        for source, layout in zip(stage.sources, stage.plan.input_placement.inputs):
            if source.kind == "input":
                out.setdefault(source.index, layout)
        if stage.counts is not None:
            for value, layout in zip(stage.counts.graph.inputs, stage.counts.input_placement.inputs):
                out.setdefault(names.index(value.name), layout)
    return out


def pipeline_dataset_strategy(plan: PipelinePlan) -> object:
    """The dataset_strategy that gives the stages' placement of the inputs; an input that no stage reads is whole."""
    inputs = plan.graph.inputs[: len(plan.graph.inputs) - len(plan.micro.totals)]
    alone, found = Graph(inputs, {}, {}, {}, (), ()), layouts_of_inputs(plan)
    first = plan.stages[0]
    for word in ("full_batch", "data_parallel"):
        if all(_fits(word, alone, stage) for stage in plan.stages):
            return word
    return [spell_layout(found.get(i) or Layout.replicated(first.devices, len(v.shape))) for i, v in enumerate(inputs)]


def _fits(word: str, alone: Graph, stage: Stage) -> bool:
    """True where a dataset_strategy word gives the stage's placement of its inputs."""
    try:
        input_placement: InputPlacement = place_inputs(alone, stage.devices, word)
    except ShardwrightError:  # a batch that does not divide
        return False
    placement = stage.plan.input_placement
    return input_placement.per_rank_batch == placement.per_rank_batch and all(
        input_placement.inputs[source.index] == layout
        for source, layout in zip(stage.sources, placement.inputs)
        if source.kind == "input" and source.index < len(alone.inputs)
    )


# -- the graph of a micro-batch, which is nearly that of its stages ----------------------------------------------------


def _beside(encoded: JsonObject, stages: Sequence[JsonObject]) -> dict[str, object]:
    """A written graph reduced by its stages' graphs.

    An operator that a stage has is replaced by its name, a value that a stage has by None.
    """
    ops, values = _of_stages(stages)
    return encoded | {
        "ops": [op["name"] if ops.get(op["name"]) == op else op for op in encoded["ops"]],
        "values": {name: None if values.get(name) == value else value for name, value in encoded["values"].items()},
    }


def whole_graph(encoded: JsonObject, stages: Sequence[JsonObject]) -> dict[str, object]:
    """The written graph that `_beside` has reduced to `encoded`."""
    ops, values = _of_stages(stages)
    return {
        **encoded,
        "ops": [ops[op] if isinstance(op, str) else op for op in encoded["ops"]],
        "values": {name: values[name] if value is None else value for name, value in encoded["values"].items()},
    }


def _of_stages(stages: Sequence[JsonObject]) -> tuple[dict[str, object], dict[str, object]]:
    """The operators and values of all stages, by name."""
    return (
        {op["name"]: op for part in stages for op in part["ops"]},
        {name: value for part in stages for name, value in part["values"].items()},
    )
