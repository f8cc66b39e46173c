"""JSON Schemas of the files that users write or edit: ``python docs/schemas.py`` writes them.

The names of fields, words and limits come from the tables of the readers; a field without a description here stops
the script. A schema refuses no document that its reader takes. It takes some that the reader refuses, because the
reader also knows the model: cuts that do not divide, an operator of another name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from shardwright.checkpoint import manifest
from shardwright.checkpoint.digests import ALGORITHMS
from shardwright.cluster import DTYPES, MOST_DEVICES, SCHEMA as CLUSTER_SCHEMA, Cluster, Level
from shardwright.cost.memory_timeline import OPTIMIZERS
from shardwright.graph import Recompute
from shardwright.partition.parameter_sharding import AUTO_LEVEL, LEVELS, OptimizerParallel
from shardwright.pipeline.schedules import SCHEDULES
from shardwright.planfile import parameter_file
from shardwright.planfile.document_writer import (
    HEAD_FIELDS,
    LINE_FIELDS,
    PIPELINE_FIELDS,
    PIPELINE_SCHEMA,
    SCHEMA,
    STAGE_FIELDS,
)
from shardwright.planfile.pipeline_document import MOST_MICRO_BATCHES, PIPELINE_KINDS
from shardwright.planners.planning_problem import modes

FOLDER = Path(__file__).parent / "reference" / "schemas"
DRAFT = "https://json-schema.org/draft/2020-12/schema"
LARGEST = (1 << 63) - 1

Schema = dict[str, Any]


# -- parts of schemas --------------------------------------------------------------------------------------------------


def described(description: str, **rest: Any) -> Schema:
    """A value with its description; without `rest` any value."""
    return {"description": description, **rest}


def whole(description: str, low: int, high: int | None = None) -> Schema:
    """A whole number."""
    return described(description, type="integer", minimum=low, **({} if high is None else {"maximum": high}))


def text(description: str, **rest: Any) -> Schema:
    return described(description, type="string", **rest)


def flag(description: str) -> Schema:
    return described(description, type="boolean")


def positive(description: str) -> Schema:
    return described(description, type="number", exclusiveMinimum=0)


def list_of(description: str, items: Schema | bool, **rest: Any) -> Schema:
    return described(description, type="array", items=items, **rest)


def either(description: str, *schemas: Schema) -> Schema:
    return described(description, anyOf=list(schemas))


def use(name: str) -> Schema:
    """A reference to a definition of the same file."""
    return {"$ref": f"#/$defs/{name}"}


def hexadecimal(description: str, digits: int | None = None) -> Schema:
    return text(description, pattern="^[0-9a-f]*$" if digits is None else f"^[0-9a-f]{{{digits}}}$")


def record(
    description: str, known: Iterable[str], properties: dict[str, Schema], required: Iterable[str] = (), **rest: Any
) -> Schema:
    """An object with the fields of a reader's table and no others.

    Raises:
        ValueError: a field of the table has no description, or a description no field.
    """
    known = set(known)
    if known != set(properties):
        raise ValueError(f"{description}: {sorted(known ^ set(properties))} stand on one side alone")
    return described(
        description, type="object", properties=properties, required=list(required), additionalProperties=False, **rest
    )


def document(title: str, schema: Schema, **definitions: Schema) -> Schema:
    """The whole of a schema's file. Editors find it by a file's field "$schema", which readers leave out."""
    name = title.removeprefix("Shardwright ").replace(" ", "-")
    edited = name != "checkpoint-manifest"
    named = {"patternProperties": {r"^\$schema$": text("Path of this schema, for an editor")}} if edited else {}
    head = {"$schema": DRAFT, "$id": f"urn:shardwright:schema:{name}", "title": title}
    return {**head, **schema, **named, **({"$defs": definitions} if definitions else {})}


WORDS_OR_NULL: Schema = {"type": ["string", "null"]}
CUT: Schema = {"type": "integer", "minimum": 1}
NAMED: Schema = {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": WORDS_OR_NULL}]}
MATRIX = list_of("Sizes of the device matrix's axes. The product is the number of devices.", CUT, minItems=1)
AXES = list_of("Names of the device matrix's axes, one for each size.", {"type": "string", "minLength": 1}, minItems=1)
PAIR = {"device_matrix": ["alias_name"], "alias_name": ["device_matrix"]}

LAYOUT = either(
    "Layout of a tensor: a cut for each dim, such as [4, 1], or axes of a device matrix.",
    {"type": "array", "items": CUT, "description": "The number of equal parts of each dim."},
    {
        "type": "object",
        "description": "Named axes.",
        "properties": {
            "device_matrix": MATRIX,
            "alias_name": AXES,
            "layout": list_of('For each dim the name of an axis, a list of names (major first), or "None".', NAMED),
        },
        "required": ["device_matrix", "alias_name", "layout"],
    },
)

OPEN = either(
    "Digits of a partial sum that the operator passes on unsummed; [] or null: none.",
    {"type": "null"},
    {"type": "array", "maxItems": 0},
    {
        "type": "object",
        "properties": {
            "device_matrix": MATRIX,
            "alias_name": AXES,
            "axes": list_of("Names of the axes over which the sum is open.", WORDS_OR_NULL, minItems=1),
        },
        "required": ["device_matrix", "alias_name", "axes"],
    },
)


# -- clusters ----------------------------------------------------------------------------------------------------------


def cluster() -> Schema:
    """The schema of a cluster, without definitions."""
    level = record(
        "One level of links.",
        [f.name for f in fields(Level)],
        {
            "name": text("Name of the level, for reports.", minLength=1),
            "size": whole(
                "Number of devices, or of units of the level below, that one unit of this level joins.", 1, MOST_DEVICES
            ),
            "bandwidth": positive(
                "Bytes per second that one device sends; with shared, of all devices of a unit together."
            ),
            "latency": positive("Seconds from one device to another."),
            "shared": flag("True where the devices of a unit share one medium, such as a bus. Default: false."),
        },
        [f.name for f in fields(Level) if f.default is MISSING],
    )
    return record(
        "Devices of one kind, with their links, memory and speed.",
        ["schema", *(f.name for f in fields(Cluster))],
        {
            "schema": described(f"Version of the format: {CLUSTER_SCHEMA}.", const=CLUSTER_SCHEMA),
            "name": text("Name of the cluster, for reports.", minLength=1),
            "levels": list_of(
                f"Levels of links, from the inside out. The product of the sizes is the number of devices, at most "
                f"{MOST_DEVICES:,}.",
                level,
                minItems=1,
            ),
            "memory": positive("Bytes of memory of a device."),
            "peak": described(
                "Peak rates of a device in flop/s, by the name of a dtype.",
                type="object",
                properties={name: positive(f"flop/s in {name}.") for name in DTYPES},
                additionalProperties=False,
                minProperties=1,
            ),
            "memory_bandwidth": positive("Bytes per second between a device and its memory."),
            "overhead": positive("Seconds to launch one operator."),
        },
        [f.name for f in fields(Cluster)],
    )


# -- plans -------------------------------------------------------------------------------------------------------------


def version(number: int) -> Schema:
    return described(f"Version of the format: {number}.", const=number)


def hsdp() -> Schema:
    """The setting of ZeRO/FSDP sharding."""
    names: Schema = {"type": "array", "items": {"type": "string"}}
    setting = record(
        "Setting of AutoParallel.hsdp.",
        [f.name for f in fields(OptimizerParallel)],
        {
            "shard_size": either(
                "Number of replicas over which a parameter is cut; -1: all.",
                {"const": -1},
                {"type": "integer", "minimum": 1},
            ),
            "threshold": described("KB of a whole parameter from which on it is cut.", type="number", minimum=0),
            "optimizer_level": described("Level of optimizer parallel.", enum=[*LEVELS, AUTO_LEVEL]),
            "whole": described("Names of the parameters that are left out.", **names),
            "kept": described("Names of the parameters whose gathered weights are saved for the backward.", **names),
        },
    )
    return either("Parameters, gradients and optimizer state in shards over replicas; null: none.", setting, NULL)


NULL: Schema = {"type": "null"}


def optimizer() -> Schema:
    """The optimizer: a word in letters of any size, or a number of bytes."""
    words = "|".join("".join(f"[{c.upper()}{c}]" for c in word) for word in OPTIMIZERS)
    return either(
        "Optimizer whose state is counted in the memory, or bytes of state for each element; null: adam.",
        {"enum": list(OPTIMIZERS)},
        {"type": "string", "pattern": f"^({words})$"},
        {"type": "number", "minimum": 0},
        NULL,
    )


def head() -> dict[str, Schema]:
    """The fields of the head of a plan of one program, by name."""
    return {
        "schema": version(SCHEMA),
        "graph": hexadecimal("Fingerprint of the captured graph. Not to be edited.", 16),
        "devices": whole("Number of devices.", 1, MOST_DEVICES),
        "mode": either("Parallel mode: a planner's name.", {"enum": list(modes())}, {"type": "string"}),
        "dataset_strategy": either(
            "How the inputs are fed: whole, a part of the batch to each device, or a layout for each input.",
            {"enum": ["full_batch", "data_parallel"]},
            {"type": "array", "items": use("layout")},
        ),
        "hsdp": hsdp(),
        "uneven": flag("True where cuts need not divide."),
        "open": {**OPEN, "description": f'Default of "open" in the lines of operators. {OPEN["description"]}'},
        "own": either(
            "Programs that are each rank's own, in hybrid_parallel alone.",
            NULL,
            record(
                "Parameters that each rank has its own values of, and the loss.",
                ("parameters", "loss"),
                {
                    "parameters": list_of("Names of the parameters that each rank has its own values of.", TEXT),
                    "loss": flag("True where the loss is each rank's own."),
                },
                ["parameters"],
            ),
        ),
        "optimizer": optimizer(),
        "memory": described(
            "Bytes that a device may hold: the limit of the search; null: no limit.",
            type=["number", "null"],
            exclusiveMinimum=0,
        ),
        "comm_memory": described(
            "Bytes by which messages under way may raise the peak; null: the default.",
            type=["number", "null"],
            minimum=0,
        ),
        "cluster": either("Devices for which the plan is priced; null: none.", use("cluster"), NULL),
        "total": described("Seconds and memory of a step. Computed again on loading: changes have no effect."),
    }


TEXT: Schema = {"type": "string"}


def operator() -> Schema:
    """The line of an operator."""
    kinds = {bool: flag, int: lambda d: described(d, type="integer"), str: text}
    recompute = {
        "call": "Number of the recomputed call: operators of one number are computed again together.",
        "path": "Path of the module for which recomputation was requested, or the operator's name.",
        "everywhere": "True where results used outside of the call are dropped too.",
        "mp_comm": "True where collectives are sent again; false: their results are saved.",
        "parallel_optimizer_comm": "True where weights that were gathered are gathered again.",
        "keep": "True where this operator's own results are saved.",
    }
    types = {f.name: int if f.default is MISSING else type(f.default) for f in fields(Recompute)}
    again = record(
        "Recomputation of the operator in the backward.",
        types,
        {name: kinds[types[name]](description) for name, description in recompute.items()},
        [f.name for f in fields(Recompute) if f.default is MISSING],
    )
    entry: Schema = {
        "anyOf": [
            {"type": "array", "items": {"anyOf": [CUT, *NAMED["anyOf"]]}},
            {"type": "null", "description": "No entry for an optional input."},
        ]
    }
    return record(
        "An operator and its strategy. An edited strategy is a mark.",
        LINE_FIELDS["operators"],
        {
            "name": text("Name of the operator in the captured graph."),
            "op": text("Kind of the operator. Must be that of the graph."),
            "device_matrix": MATRIX,
            "alias_name": AXES,
            "in_strategy": list_of(
                "Strategy: for each tensor input a cut for each dim, such as [[2, 4], [4, 1]]; or axes of the line's "
                "device_matrix.",
                entry,
            ),
            "leaves": list_of(
                "Layouts of the outputs by axes of device_matrix, where the inputs alone do not determine them.",
                {"type": "array", "items": NAMED},
            ),
            "out_strategy": either(
                "Layouts to which the outputs are brought, one for each output; null: as the operator leaves them.",
                {"type": "array", "items": use("layout")},
                NULL,
            ),
            "open": OPEN,
            "cause": described("Reason of the strategy: mark, batch, search, ... An edited line gets mark."),
            "shapes": text("Dtypes and shapes of inputs and outputs. Must be those of the graph."),
            "recompute": either("Recomputation in the backward; null: none.", again, NULL),
            "origin": described("Operator or mark from which the strategy was propagated."),
            "via": described("The way of the propagation."),
            "module": described("Path of the module that called the operator. For the reader of the file."),
            "source": described("Line of code that called the operator. For the reader of the file."),
            "note": described("A remark of the planner."),
            "seconds": described("Seconds of the operator. Computed again on loading: changes have no effect."),
        },
        ["name", "op", "in_strategy", "shapes"],
        dependentRequired=PAIR,
    )


def parameter(in_plan: bool) -> Schema:
    """The line of a parameter, in a plan or in a file of strategies."""
    shape, dtype = "Whole shape of the parameter.", 'Dtype of the parameter, such as "float32".'
    ranks = 'The ranks that hold the parameter, such as "4-7"; default: all.'
    sizes: Schema = {"type": "integer", "minimum": 0, "maximum": LARGEST}
    return record(
        "A parameter and its storage.",
        LINE_FIELDS["parameters"],
        {
            "name": text("Name of the parameter in the model."),
            "shape": described(f"{shape} For the reader of the file.")
            if in_plan
            else list_of(shape, sizes, maxItems=64),
            "dtype": described(f"{dtype} For the reader of the file.")
            if in_plan
            else text(dtype, examples=["float32", "bfloat16", "float16", "float64", "int64"]),
            "storage": use("layout"),
            "used_as": described("Layout in which operators use the parameter, where it is another one. Not read."),
            "settled": flag("True where the storage was fixed before planning.")
            if in_plan
            else described("Not read in this file."),
            "ranks": described(f"{ranks} Not read in a plan.")
            if in_plan
            else text(ranks, pattern="^[0-9]{1,7}-[0-9]{1,7}$"),
        },
        ["name", "storage"] if in_plan else ["name", "shape", "dtype", "storage"],
    )


def sections() -> dict[str, Schema]:
    """The lines of a plan of one program, or of a stage."""
    return {
        "operators": list_of("Operators in the order of the program, one a line.", use("operator")),
        "parameters": list_of("Parameters and buffers, one a line.", use("parameter")),
    }


STAGE = {
    "ranks": described("Ranks of the stage. For the reader of the file."),
    "fed": described("Sources and layouts of the stage's inputs. For the reader of the file."),
}
CAPTURED = "The captured graph, compressed. Not to be edited."


def plan() -> Schema:
    """A plan of one program."""
    own_goes_with_its_mode: Schema = {
        "if": {"properties": {"mode": {"const": "hybrid_parallel"}}, "required": ["mode"]},
        "then": {"properties": {"own": described("Required in hybrid_parallel.", type="object")}, "required": ["own"]},
        "else": {"properties": {"own": described("Goes with hybrid_parallel alone.", **NULL)}},
    }
    return document(
        "Shardwright plan",
        record(
            "A plan that Plan.save wrote.",
            {*STAGE_FIELDS, "operators", "parameters", "captured"},
            {
                **head(),
                "stage": described("Not read: the number of a stage in the plan of a pipeline."),
                **STAGE,
                **sections(),
                "captured": text(CAPTURED),
            },
            ["schema", "graph", "devices", "mode", "dataset_strategy", "operators", "parameters", "captured"],
            **own_goes_with_its_mode,
        ),
        **plan_parts(),
    )


def plan_parts() -> dict[str, Schema]:
    """The definitions that plans of both kinds share."""
    return {"cluster": cluster(), "layout": LAYOUT, "operator": operator(), "parameter": parameter(in_plan=True)}


def pipeline() -> Schema:
    """A plan of a pipeline."""
    words = head()
    stage = record(
        "One stage: a plan on the stage's devices. Mode, optimizer and cluster are those of the head by default.",
        {*STAGE_FIELDS, "operators", "parameters", "captured"},
        {
            **words,
            "schema": described("Not read in a stage."),
            "dataset_strategy": described("Not read in a stage."),
            "captured": described("Not read in a stage."),
            "stage": whole("Number of the stage, from 0, in order.", 0),
            **STAGE,
            **sections(),
        },
        ["stage", "graph", "devices", "operators", "parameters"],
    )
    kinds = {int: "integer", str: "string", list: "array"}
    descriptions: dict[str, Schema] = {
        "stages": whole("Number of groups of devices.", 1),
        "scheduler": either("Schedule.", {"enum": list(SCHEDULES)}, TEXT),
        "micro_batches": whole("Number of micro-batches. Must be that of the graph.", 1, MOST_MICRO_BATCHES),
        "placement": list_of("The group of devices of each stage.", {"type": "integer"}),
        "split": list_of("For each input, true where the input is cut into micro-batches.", {"type": "boolean"}),
        "chunks": described(
            "Number of stages of a group; null: the default of the schedule.", type=["integer", "null"], minimum=1
        ),
        "actions": list_of(
            "The schedule spelt out: for each group its actions with commas between them, such as 0F0,0B0.",
            {"anyOf": [TEXT, {"type": "array", "items": TEXT}]},
        ),
    }
    for name, kind in PIPELINE_KINDS.items():
        assert descriptions[name].get("type", "string") == kinds[kind], name
    setting = record(
        "Stages, schedule and micro-batches.", [*PIPELINE_KINDS, "chunks", "actions"], descriptions, PIPELINE_KINDS
    )
    unread = {
        name: described("Not read in the head of a pipeline: stages have it.")
        for name in HEAD_FIELDS
        if name not in ("schema", "graph", "devices", "mode", "dataset_strategy", "optimizer", "cluster", "total")
    }
    return document(
        "Shardwright plan of a pipeline",
        record(
            "A plan that PipelinePlan.save wrote.",
            {*PIPELINE_FIELDS, "stages", "captured"},
            {
                **words,
                **{name: unread[name] for name in words if name in unread},
                "schema": version(PIPELINE_SCHEMA),
                "pipeline": setting,
                "notes": list_of("Remarks of the planner.", TEXT),
                "stages": list_of("Stages in order.", use("stage"), minItems=1),
                "captured": list_of(
                    "Captured graphs, compressed: one for each stage, and one for the rest. Not to be edited.",
                    TEXT,
                    minItems=2,
                ),
            },
            ["schema", "graph", "devices", "mode", "dataset_strategy", "pipeline", "stages", "captured"],
        ),
        **plan_parts(),
        stage=stage,
    )


# -- parameter strategies and manifests --------------------------------------------------------------------------------


def parameters() -> Schema:
    """A file of parameter strategies."""
    lines: dict[str, Any] = {"items": use("parameter")}
    return document(
        "Shardwright parameter strategies",
        record(
            "A file that save_param_strategy_file wrote.",
            parameter_file.FIELDS,
            {
                "schema": version(parameter_file.SCHEMA),
                "kind": described("Kind of the file.", const=parameter_file.KIND),
                "devices": whole("Number of devices.", 1, MOST_DEVICES),
                "uneven": flag("True where cuts need not divide."),
                "parameters": described("Parameters, one a line.", type="array", **lines),
                "buffers": described("Buffers, one a line.", type="array", **lines),
            },
            ["schema", "kind", "devices", "parameters"],
        ),
        layout=LAYOUT,
        parameter=parameter(in_plan=False),
    )


def checkpoint() -> Schema:
    """The manifest of a checkpoint."""
    sizes = list_of("A number for each dim.", {"type": "integer", "minimum": 0, "maximum": LARGEST}, maxItems=64)
    digits = math.gcd(*(algorithm.digits for algorithm in ALGORITHMS.values()))
    file = record(
        "A file of the checkpoint's folder.",
        ("bytes", "digest"),
        {
            "bytes": whole("Size of the file in bytes.", 0, LARGEST),
            "digest": text(
                "Digest of each block of the file, one after the other.", pattern=f"^([0-9a-f]{{{digits}}})*$"
            ),
        },
        ("bytes", "digest"),
    )
    layout = record(
        "Layout of a tensor at the save.",
        ("devices", "first", "layout", "own"),
        {
            "devices": whole("Number of ranks that held the tensor.", 1, MOST_DEVICES),
            "first": whole("The first of these ranks.", 0, MOST_DEVICES),
            "layout": described("Layout over these ranks, spelt as in a plan.", type=["array", "object"]),
            "own": described("Present where each rank had its own values; dim 0 counts the ranks.", const=True),
        },
        ("devices", "first", "layout"),
    )
    piece = list_of(
        "A box of the tensor that lies in one file: file, offset, start in each dim, size in each dim.",
        False,  # nothing beyond these four
        prefixItems=[
            text("Name of the file."),
            whole("Offset of the first byte in the file.", 0, LARGEST),
            {**sizes, "description": "Start of the box in each dim."},
            {**sizes, "description": "Size of the box in each dim."},
        ],
        minItems=4,
        maxItems=4,
    )
    tensor = record(
        "A stored tensor.",
        ("shape", "dtype", "layout", "pieces"),
        {
            "shape": {**sizes, "description": "Shape of the whole tensor."},
            "dtype": text('Dtype of the tensor, such as "float32".'),
            "layout": either("Layout at the save; null: unknown, or on one device.", use("layout"), NULL),
            "pieces": list_of("Boxes that fill the tensor.", use("piece")),
        },
        ("shape", "dtype", "layout", "pieces"),
    )
    names = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[^/]+$"}
    head = {
        "schema": whole("Version of the format.", min(ALGORITHMS), max(ALGORITHMS)),
        "kind": described("Whole tensors in few files, or a file of parts for each rank.", enum=list(manifest.KINDS)),
        "step": whole("Step of the run.", 0, LARGEST),
        "id": hexadecimal("Identity of the save. Every data file carries it.", 32),
        "model": hexadecimal("Fingerprint of the model's names, shapes and dtypes."),
        "plan": either("Fingerprint of the plan; null: there was none.", hexadecimal("Fingerprint."), NULL),
        "world": whole("Number of ranks that saved.", 1, MOST_DEVICES),
        "digest": described("Algorithm of the files' digests: that of the schema."),
        "files": described(
            "All other files of the folder, by name.",
            type="object",
            additionalProperties=use("file"),
            propertyNames=names,
        ),
        "tensors": described("Stored tensors, by name.", type="object", additionalProperties=use("tensor")),
        "seal": hexadecimal("SHA-256 of all text above. A manifest is not to be edited.", 64),
    }
    places = described(
        "Folders (host:path) of a save to several folders, each with the files that it alone has.",
        type="object",
        additionalProperties={"type": "array", "items": TEXT},
    )
    versions = [
        {"properties": {"schema": {"const": number}, "digest": {"const": dict(algorithm.encoded)}}}
        for number, algorithm in ALGORITHMS.items()
    ]
    return document(
        "Shardwright checkpoint manifest",
        record(
            "manifest.json of a checkpoint.", [*head, "places"], {**head, "places": places}, [*head], anyOf=versions
        ),
        file=file,
        layout=layout,
        piece=piece,
        tensor=tensor,
    )


def made() -> dict[Path, str]:
    """The text of every schema, by its file."""
    schemas = {
        "cluster": document("Shardwright cluster", cluster()),
        "plan": plan(),
        "pipeline": pipeline(),
        "parameters": parameters(),
        "manifest": checkpoint(),
    }
    return {
        FOLDER / f"{name}.schema.json": json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
        for name, schema in schemas.items()
    }


if __name__ == "__main__":
    for path, words in made().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(words, encoding="utf-8")
