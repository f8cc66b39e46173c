"""A plan as the text of its document. What the form is, `document` says, which reads it.

Lines stand in the order of the program, each operator's and each parameter's on one, so that two documents are compared
line by line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ShardwrightError
from ..graph import Graph, Op, types_of
from .decision import Decision, Feeding, feeding
from .graph_document import fingerprint, packed, write_graph, write_recompute
from .hybrid import fed_whole
from .spelling import spell_assignment, spell_digits, spell_layout

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["PIPELINE_SCHEMA", "SCHEMA", "Parts", "dataset_strategy", "digest", "fed_by", "fields_of", "head_digest",
           "parts_of", "section", "written"]

#: The version of the form. It rises when a document of the old form can no longer be read as what it meant.
SCHEMA = 1

#: Likewise of the form of a pipeline's document.
PIPELINE_SCHEMA = 2


class Parts(NamedTuple):
    """What a document says of a plan.

    Attributes:
        head: its fields.
        operators, parameters: its lines.
        held: what is packed.
    """

    head: dict[str, Any]
    operators: list[dict[str, Any]]
    parameters: list[dict[str, Any]]
    held: dict[str, Any]


def written(plan: Plan) -> str:
    """A plan as the text of its document: the same text for the same plan."""
    head, operators, parameters, held = parts_of(plan)
    parts = fields_of({"schema": SCHEMA} | head, "  ")
    parts += [section("operators", operators), section("parameters", parameters), f'  "captured": "{packed(held)}"']
    return "{\n" + ",\n".join(parts) + "\n}\n"


def parts_of(plan: Plan, word: bool = True) -> Parts:
    """A plan as the parts of its document.

    Args:
        word: whether how it is fed is written as one word, where one says it.
    """
    setting = plan.hsdp
    head: dict[str, Any] = {
        "graph": fingerprint(plan.graph), "devices": plan.devices, "mode": plan.mode,
        "dataset_strategy": dataset_strategy(plan) if word else [*map(spell_layout, plan.fed.inputs)],
        "hsdp": None if setting is None else {
            key: sorted(value) if isinstance(value, frozenset) else value for key, value in asdict(setting).items()}}
    if any(d.bound.uneven for d in plan.decisions.values()):
        head["uneven"] = True
    if any(d.open is not None for d in plan.decisions.values()):
        head["open"] = []  # of the lines that do not say
    if plan.own is not None:
        head["own"] = {"parameters": sorted(plan.own.parameters), "loss": plan.own.loss}
    head["optimizer"] = plan.optimizer
    if plan.found is not None and plan.found.limit is not None:
        limit = plan.found.limit
        head["memory"] = int(limit) if float(limit).is_integer() else limit
    head["cluster"] = None if plan.cluster is None else plan.cluster.to_dict()
    head["total"] = {"seconds": plan.cost, "bound": plan.bound, "gap": plan.gap, "memory": plan.memory(0),
                     "peak": plan.peak}
    seconds = plan.price.by_operator
    operators = [_operator(op, plan.decisions[op.name], seconds.get(op.name, 0.0), "open" in head)
                 for op in plan.graph.ops]
    parameters = list(_parameters(plan))
    said = {"head": head_digest(head),
            "operators": {op.name: digest(op, plan.decisions[op.name]) for op in plan.graph.ops},
            "parameters": {line["name"]: line["storage"] for line in parameters}}
    return Parts(head, operators, parameters, {
        "graph": write_graph(plan.graph), "said": said,
        "found": None if plan.found is None else asdict(plan.found) | {"seconds": plan.cost}})


def fields_of(head: Mapping[str, Any], indent: str) -> list[str]:
    """Fields as text, each on a line."""
    return [f"{indent}{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]


def section(name: str, lines: Iterable[dict[str, Any]], indent: str = "  ") -> str:
    """Lines of a document as text."""
    body = ",\n".join(f"{indent}  {json.dumps(line, ensure_ascii=False)}" for line in lines)
    return f'{indent}"{name}": [\n{body}\n{indent}]' if body else f'{indent}"{name}": []'


def fed_by(graph: Graph, devices: int, mode: str, strategy: Any) -> Feeding:
    """How a dataset_strategy feeds in a mode."""
    return (fed_whole if mode == "hybrid_parallel" else feeding)(graph, devices, strategy)


def dataset_strategy(plan: Plan) -> Any:
    """The dataset_strategy that feeds as the plan is fed."""
    for word in ("full_batch", "data_parallel"):
        try:
            if fed_by(plan.graph, plan.devices, plan.mode, word) == plan.fed:
                return word
        except ShardwrightError:
            pass  # a batch that does not divide
    return [spell_layout(layout) for layout in plan.fed.inputs]


def _operator(op: Op, decision: Decision, seconds: float, closed: bool) -> dict[str, Any]:
    line = {"name": op.name, "op": op.kind, **spell_assignment(decision.bound, decision.assignment)}
    if decision.out is not None:
        line["out_strategy"] = [spell_layout(layout) for layout in decision.out]
    if decision.open or closed and decision.open is None:
        line["open"] = decision.open and spell_digits(decision.assignment.devices, decision.open)
    line |= {"cause": decision.cause, "shapes": types_of(op)}
    if op.recompute is not None:
        line["recompute"] = write_recompute(op.recompute)
    line |= {key: value for key, value in (
        ("origin", decision.origin), ("via", decision.via), ("module", op.module), ("source", op.source),
        ("note", decision.note)) if value}
    return line | {"seconds": float(f"{seconds:.4g}")}


def _parameters(plan: Plan) -> Iterator[dict[str, Any]]:
    values = plan.graph.parameters | plan.graph.buffers
    for name, value in values.items():
        held = plan.parameters[name]
        line = {"name": name, "shape": list(value.shape), "dtype": str(value.stored.dtype).removeprefix("torch."),
                "storage": spell_layout(held.storage)}
        if held.layout != held.storage:
            line["used_as"] = spell_layout(held.layout)
        if plan.stored is not None and name in plan.stored:
            line["settled"] = True
        yield line


def head_digest(head: Mapping[str, Any]) -> str:
    """Of what the head says that a search depended on."""
    keys = ("graph", "devices", "dataset_strategy", "hsdp", "uneven", "optimizer", "cluster")
    said = [head.get(key) for key in keys]
    if head.get("memory") is not None:  # only then: documents from before there was such a field have this digest without
        said.append(head["memory"])
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:8]


def digest(op: Op, decision: Decision) -> str:
    """Of what a line says that is to be heeded, in normal form: the same however it is written."""
    said = (decision.assignment.digits, tuple(map(str, decision.out or ())), decision.open, op.recompute)
    return hashlib.sha256(repr(said).encode()).hexdigest()[:8]
