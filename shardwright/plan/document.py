"""A plan as a document: JSON to read, compare, edit and load.

A line for each operator says its strategy, a line for each parameter where it lies, and one compressed line at the
end holds the captured graph, so that a plan is loaded without its model. What a line says is checked anew against that
graph, and whatever follows from it (layouts, conversions, costs) is worked out anew; figures in the document are for
its reader. Beside the graph stands a digest of what each line said: a strategy that is another one now was edited by
hand, and is a mark from then on.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import LayoutError, PlanError, ShardwrightError
from ..graph import Graph, Op
from ..layout import Layout
from ..reading import MarkUse
from ..schedules import Schedule
from .decision import Decision, Feeding, Found, batch_dims
from .document_head import Head
from .document_lines import Line, called, field_line, read_lines
from .document_writing import digest, fed_by, head_digest
from .graph_document import fingerprint, read_graph, unpacked
from .plan import Plan
from .semi_auto import data_parallel, semi_auto
from .spelling import read_layout, spell_layout

__all__ = ["Document"]

#: As those of `make.PLANNERS`.
Planner = Callable[..., tuple[dict[str, Decision], dict[str, int]]]


@dataclass(frozen=True)
class Document(Head):
    """A plan's document as it was read.

    Attributes:
        operators, parameters: its lines by name.
        captured: the graph, packed.
    """

    operators: dict[str, Line]
    parameters: dict[str, Line]
    captured: str

    @classmethod
    def of(cls, path: Path, text: str, words: dict[str, Any], number: int = -1) -> Document:
        """The document of an object.

        Args:
            number: which of the sections of one name in the text are its own.

        Raises:
            PlanError: a section that is not there, or two lines for one operator.
        """
        operators, parameters = (read_lines(path, text, words.pop(section, None), section, number)
                                 for section in ("operators", "parameters"))
        for line in operators.values() if "open" in words else ():
            line.words.setdefault("open", words["open"])
        captured = words.pop("captured", None)
        if not isinstance(captured, str):
            raise PlanError("the plan has no captured graph", source=str(path), legal="a file that Plan.save wrote")
        lines = {} if words.get("memory") is None else {"memory": field_line(text, "memory", words["memory"])}
        return cls(path, words, operators, parameters, captured, lines=lines)

    # -- as a plan of its own --

    @cached_property
    def held(self) -> dict[str, Any]:
        """What its last line holds: the graph, and what the other lines said when they were written."""
        try:
            held = unpacked(self.captured)
            said = held["said"]
            return {"graph": held["graph"], "found": held["found"], "said": {
                "head": said["head"], "operators": dict(said["operators"]), "parameters": dict(said["parameters"])}}
        except (ValueError, KeyError, TypeError) as error:
            raise self.wrong(f"the captured graph cannot be read: {error}", "a file that Plan.save wrote") from None

    def graph(self) -> Graph:
        """The captured graph, as its lines have it recomputed.

        Raises:
            PlanError: it is damaged, is another than the head's, or has an operator that is not registered here.
        """
        try:
            graph = read_graph(self.held["graph"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self.wrong(f"the captured graph cannot be read: {type(error).__name__}: {error}",
                             "a file that Plan.save wrote") from None
        if fingerprint(graph) != self.words.get("graph"):
            raise self.wrong(f"the captured graph is {fingerprint(graph)}, the plan is of {self.words.get('graph')!r}",
                             "a file that Plan.save wrote")
        self.matched(graph, complete=True)
        return graph.with_ops(tuple(self.operators[op.name].recomputed(op) for op in graph.ops))

    def matched(self, graph: Graph, complete: bool) -> None:
        """That every line is of an operator of `graph`; with `complete`, that each of those has one.

        Raises:
            PlanError: the first that is not, with its line.
        """
        names = dict.fromkeys(op.name for op in graph.ops)
        what = "the model" if self.stage is None else f"stage {self.stage} of the model"
        for name, line in self.operators.items():
            if name not in names:
                near = difflib.get_close_matches(name, names, 3, 0.4)
                raise PlanError(f"{what} has no operator {name!r}: a plan for another model?", source=line.where,
                                legal=", ".join(near or [*names][:8]))
        for name, line in self.parameters.items():
            if name not in graph.parameters and name not in graph.buffers:
                near = difflib.get_close_matches(name, [*graph.parameters, *graph.buffers], 3, 0.0)
                raise PlanError(f"{what} has no parameter {name!r}: a plan for another model?", source=line.where,
                                legal=", ".join(near) or "no such line")
        if complete and (missing := [name for name in names if name not in self.operators]):
            raise PlanError(f"the plan has no line for {', '.join(missing[:8])}", source=self.where,
                            legal="a line for each operator")

    def plan(self, graph: Graph | None = None, fed: Feeding | None = None) -> Plan:
        """The plan: every line checked, strategies that were edited as marks, everything else worked out anew.

        Args:
            graph: as `graph` reads it, where that was done.
            fed: how it is fed, of the stage of a pipeline; None: as the head says.

        Raises:
            ShardwrightError: an impossible line, with where it stands and what would be legal.
        """
        graph, devices, mode, hsdp = graph or self.graph(), self.devices, self.mode, self.hsdp
        own = self.own
        fed = fed or self.fed(graph, devices, mode)
        decisions = {}
        for op in graph.ops:
            self.operators[op.name].check(op)
            decision = self.decided(op, devices, "replicate", self.uneven, own is not None)
            decisions[op.name] = self.marked(decision) if decision.cause == "mark" else decision
        graph = graph.with_ops(tuple(decision.op for decision in decisions.values()))
        carries = {} if own is not None else batch_dims(graph, {n: d.bound for n, d in decisions.items()})
        settled = self.settled(graph, devices)
        memory, found = self.memory, self.found(fed)
        made = Plan(graph, devices, mode, fed, decisions, carries, settled, hsdp, own, self.cluster,
                    optimizer=self.optimizer)
        try:
            made.routed
        except ShardwrightError as error:
            raise self.unroutable(error, decisions) from None
        limit = memory if found is None else found.limit
        # Edited lines, and other costs than were reckoned with then, tell in the seconds of a step.
        if found is not None and not math.isclose(made.cost, self.held["found"]["seconds"], rel_tol=1e-9):
            found = None
        if found is None and limit is not None:  # what was proved is so no longer; what the plan is to keep still is
            found = Found(made.cost, None, len(decisions), 0, (), limit)
        return replace(made, found=found)

    def found(self, fed: Feeding) -> Found | None:
        """What the search said of it, where the head is still what it searched for. Documents that do not say "memory"
        say the limit only here."""
        held = self.held["found"]
        head = self.words if self.stage is None else self.words | {"dataset_strategy": [*map(spell_layout, fed.inputs)]}
        if held is None or self.held["said"]["head"] != head_digest(head):
            return None
        told = {key: value for key, value in held.items() if key != "seconds"}
        return Found(**told | {"notes": tuple(held["notes"])})

    def decided(self, op: Op, devices: int, on_missing_rule: str, uneven: bool, own: bool = False) -> Decision:
        """What an operator's line decides: as whoever it was decided then, by a mark if it was edited since."""
        line = self.operators[op.name]
        decision = line.decision(op, devices, on_missing_rule, uneven, own)
        if digest(op, decision) != self.held["said"]["operators"].get(line.name):
            return replace(decision, cause="mark")
        said = {key: line.words[key] for key in ("note", "origin", "via") if isinstance(line.words.get(key), str)}
        return replace(decision, **said)

    def marked(self, decision: Decision) -> Decision:
        """The decision as a mark, which its operator carries."""
        op = decision.op
        mark = MarkUse(decision.assignment, decision.out, self.operators[op.name].where, tuple(range(len(op.inputs))))
        return replace(decision, op=replace(op, mark=mark), cause="mark", origin="", via="")

    def fed(self, graph: Graph, devices: int, mode: str) -> Feeding:
        """How its batch comes in."""
        strategy = self.words.get("dataset_strategy")
        try:
            if isinstance(strategy, list) and len(strategy) == len(graph.inputs):
                strategy = tuple(read_layout(entry, devices, [0] * len(v.shape)) for entry, v in
                                 zip(strategy, graph.inputs))
            return fed_by(graph, devices, mode, strategy)
        except ShardwrightError as error:
            raise error.located(operator="dataset_strategy", source=str(self.path), strategy=strategy) from None

    def settled(self, graph: Graph, devices: int) -> dict[str, Layout] | None:
        """How parameters are stored of which the document says so: settled when it was written, or edited since.

        Raises:
            LayoutError: what does not fit the parameter, with the line.
        """
        out = {}
        values = graph.parameters | graph.buffers
        for name, line in self.parameters.items():
            said = line.words.get("storage")
            if not line.words.get("settled") and said == self.held["said"]["parameters"].get(name):
                continue
            try:
                out[name] = read_layout(said, devices, values[name].shape, self.uneven)
            except ShardwrightError as error:
                raise LayoutError(error.message, operator=f"the parameter {name!r}", source=line.where, strategy=said,
                                  legal=error.legal) from None
        return out or None

    def unroutable(self, error: ShardwrightError, decisions: Mapping[str, Decision]) -> ShardwrightError:
        """The error of lines that are legal each and impossible together, with the line."""
        left: dict[str, set] = {}
        for name, decision in decisions.items():
            opened = set(decision.open or ())
            if any(not opened <= left.get(v.name, set()) for v in decision.op.inputs):
                return PlanError(f"it lets a sum through, open over {decision.open}, that does not come to it so",
                                 operator=called(decision.op), source=self.operators[name].where,
                                 legal='the line without "open"')
            for i, value in enumerate(v for v in decision.op.outputs if v is not None):
                left[value.name] = set() if decision.out else set(decision.left(i).partial) | opened
        return type(error)(error.message, operator=error.operator, source=f"{self.where}: {error.source}"
                           if error.source else self.where, strategy=error.strategy, legal=error.legal)

    # -- on a model --

    def per_stage(self, planned: Schedule, devices: int) -> tuple[Document, ...]:
        """The documents of the stages of a pipeline.

        Raises:
            PlanError: always: it is a plan of none.
        """
        raise self.wrong(f"the plan is of no pipeline, and {planned.groups} stages are asked for",
                         "a plan of a pipeline, or no pipeline()")

    def renamed(self, graph: Graph) -> Document:
        """The document with operators called as in `graph`, where that has the same ones in the same order: a marked
        operator has another name than the same one without its mark."""
        try:
            captured = read_graph(self.held["graph"])
        except (PlanError, ValueError, KeyError, TypeError, AttributeError):
            return self  # what it has to say can be said by names alone
        if _alike(captured) != _alike(graph):
            return self
        names = {old.name: new.name for old, new in zip(captured.ops, graph.ops)}
        return replace(self, operators={names.get(name, name): line for name, line in self.operators.items()})

    def onto(self, graph: Graph, devices: int, planner: Planner, stored: Mapping[str, Layout] | None = None, *,
             on_missing_rule: str = "error", uneven: bool = False, first: bool = True
             ) -> tuple[Graph, Planner, dict[str, Layout] | None]:
        """A model's graph with the lines as marks, the planner for it, and how parameters are stored, where that is
        settled.

        Args:
            planner: the mode's, for operators that have no line. Where each has one, the lines decide, down to the sums
                that stay open.
            first: whether the model is called in the shapes that the plan is for; otherwise its lines hold for the
                operators that are there, and need not be of their shapes.

        Raises:
            ShardwrightError: a plan for another model, other shapes or another number of devices, with the line.
        """
        if self.devices != devices:
            raise self.wrong(f"the plan is for {self.devices} devices, there are {devices}",
                             f"a plan for {devices} devices, or {self.devices} devices")
        lines = self.renamed(graph)
        if first:
            lines.matched(graph, complete=False)
        ops, decisions = [], {}
        for op in graph.ops:
            line = lines.operators.get(op.name)
            if line is not None and (first or line.words.get("op") == op.kind):
                if first:
                    line.check(op)
                if line.words.get("recompute") is not None:
                    op = line.recomputed(op)
                decisions[op.name] = lines.marked(lines.decided(op, devices, on_missing_rule, uneven))
                op = decisions[op.name].op
            ops.append(op)
        graph = graph.with_ops(tuple(ops))
        if first:
            stored = {**(self.settled(graph, devices) or {}), **(stored or {})}
        if first and len(decisions) == len(ops):
            carries = batch_dims(graph, {name: decision.bound for name, decision in decisions.items()})
            planner = lambda *_, **__: (decisions, carries)  # noqa: E731
        elif planner is data_parallel:
            planner = semi_auto  # it heeds marks
        return graph, planner, dict(stored) if stored else None


def _alike(graph: Graph) -> list[tuple[str, str]]:
    """What two graphs have in common that differ in the names of their operators."""
    return [(op.kind, op.module) for op in graph.ops]
