"""A plan as a document: JSON to read, compare, edit and load.

    head           fields of the whole plan: devices, mode, dataset_strategy, cluster, ... (`DocumentHead`)
    operators      a line per operator: its strategy (`DocumentLine`)
    parameters     a line per parameter: its storage
    captured       one compressed line: the captured graph, so that a plan is loaded without its model

On loading, each line is checked against the captured graph, and everything derived from the lines (layouts,
redistributions, costs) is recomputed; figures in the document serve its reader only. The captured line also has a
digest of each line's content at the time of writing: a strategy that differs from its digest was edited by hand, and
is a mark from then on. Example: ``"in_strategy": [[2, 1], [1, 2]]`` edited to ``[[4, 1], [1, 1]]`` makes the operator
a marked one, with cause "mark".

`pipeline_document` reads the plan of a pipeline, whose stages are documents of this format; `document_writer` writes
both.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..capture.graph_reader import MarkUse
from ..cluster import MOST_DEVICES, Cluster
from ..cost.memory_timeline import optimizer_bytes
from ..errors import LayoutError, PlanError, ShardwrightError, shown
from ..graph import Graph, Op, types_of
from ..json_files.json_reader import JsonObject, check_fields, field_line, section_places
from ..layout import Digit, Layout
from ..partition.hybrid_parallel import OwnPrograms
from ..partition.local_program import Decision, Decisions, InputPlacement, SearchResult, description, find_batch_dims
from ..partition.parameter_sharding import OptimizerParallel
from ..pipeline.schedules import Schedule
from ..planners.planning_problem import PLANNERS, Planner, modes
from ..rules import Bound, bound_rule, whole_rule
from ..rules.user_strategy import output_layouts_of
from ..sharded_plan import Plan
from .document_writer import LINE_FIELDS, STAGE_FIELDS, digest, head_digest, placement_under
from .encoding import read_assignment, read_digits, read_graph, read_layout, recompute_of, spell_layout, unpacked

__all__ = ["DocumentHead", "DocumentLine", "PlanDocument", "called", "read_lines"]


# -- the head: fields of the whole plan, each checked on access --------------------------------------------------------


@dataclass(frozen=True)
class DocumentHead:
    """The fields of a document, without its sections.

    Attributes:
        path: the file.
        encoded: the fields.
        lines: field -> its line in the file, for fields whose errors name a line.
    """

    path: Path
    encoded: JsonObject
    lines: dict[str, int] = field(default_factory=dict, kw_only=True)

    @property
    def devices(self) -> int:
        """The number of devices of the plan."""
        devices = self.encoded.get("devices")
        if type(devices) is not int or not 1 <= devices <= MOST_DEVICES:
            raise self.wrong(f"devices: {shown(devices)}", f"a whole number from 1 to {MOST_DEVICES:,}")
        return devices

    @property
    def uneven(self) -> bool:
        """True where cuts need not divide."""
        field = self.encoded.get("uneven", False)
        if not isinstance(field, bool):
            raise self.wrong(f"uneven: {shown(field)}", "true or false")
        return field

    @property
    def mode(self) -> str:
        """The parallel mode of the plan."""
        if self.encoded.get("mode") not in [*modes()]:
            raise self.wrong(f"mode: {shown(self.encoded.get('mode'))}", ", ".join(modes()))
        return self.encoded["mode"]

    def cluster(self, devices: int) -> Cluster | None:
        """The cluster for which a plan for `devices` devices is priced, or None."""
        field = self.encoded.get("cluster")
        found = None if field is None else Cluster.from_dict(field, f"{self.path}: cluster")
        if found is not None and found.devices < devices:
            has = f"cluster: {found.name!r} has {found.devices} devices, the plan {devices}"
            raise self.wrong(has, f"levels with {devices} devices or more, or at most {found.devices} devices")
        return found

    @property
    def hsdp(self) -> OptimizerParallel | None:
        """The setting of ZeRO/FSDP sharding (optimizer parallel), or None."""
        field = self.encoded.get("hsdp")
        if field is None:
            return None
        known = {f.name for f in fields(OptimizerParallel)}
        if not isinstance(field, dict) or set(field) - known:
            raise self.wrong(f"hsdp: {shown(field)}", f"an object with {', '.join(sorted(known))}")
        for name in ("whole", "kept"):
            if not isinstance(field.get(name, []), list) or not all(isinstance(x, str) for x in field.get(name, [])):
                raise self.wrong(f"hsdp: {name}: {shown(field[name])}", "a list of names of parameters")
        try:
            settings: dict[str, Any] = {k: frozenset(v) if isinstance(v, list) else v for k, v in field.items()}
            return OptimizerParallel(**settings)
        except (TypeError, ShardwrightError) as error:
            raise self.wrong(
                getattr(error, "message", f"hsdp: {shown(field)}"),
                getattr(error, "legal", None) or "the settings of AutoParallel.hsdp",
            ) from None

    @property
    def own(self) -> OwnPrograms | None:
        """The parameters and the loss of programs that are each rank's own (hybrid_parallel); None in other modes."""
        field = self.encoded.get("own")
        if (field is None) != (self.mode != "hybrid_parallel"):
            raise self.wrong(f"own: {shown(field)} in {self.mode}", "it goes with hybrid_parallel")
        if field is None:
            return None
        if (
            not isinstance(field, dict)
            or not isinstance(field.get("parameters"), list)
            or not all(isinstance(name, str) for name in field["parameters"])
            or not isinstance(field.get("loss", False), bool)
            or set(field) - {"parameters", "loss"}
        ):
            raise self.wrong(f"own: {shown(field)}", '{"parameters": [], "loss": true}')
        return OwnPrograms(frozenset(field["parameters"]), field.get("loss", False))

    @property
    def optimizer(self) -> str | float | None:
        """The optimizer whose state is counted in the memory."""
        field = self.encoded.get("optimizer", "adam")
        try:
            optimizer_bytes(field)
        except ShardwrightError as error:
            raise self.wrong(error.message, error.legal or "") from None
        return field

    @property
    def comm_memory(self) -> float | None:
        """Bytes by which messages under way may raise the peak; None: the default, or no such field."""
        field = self.encoded.get("comm_memory")
        if field is None:
            return None
        if isinstance(field, bool) or not isinstance(field, (int, float)) or not 0 <= field < math.inf:
            raise self.wrong(f"comm_memory: {field!r}", "bytes, at least 0, or no such field", "comm_memory")
        return float(field)

    @property
    def memory(self) -> float | None:
        """The limit of the search, in bytes a device; None: memory was ignored, or the document has no such field."""
        field = self.encoded.get("memory")
        if field is None:
            return None
        if isinstance(field, bool) or not isinstance(field, (int, float)) or not 0 < field < math.inf:
            raise self.wrong(
                f"memory: {shown(field)}", "bytes that a device may hold, a number above 0, or no such field", "memory"
            )
        return float(field)

    @property
    def stage(self) -> int | None:
        """The number of the pipeline stage that the document describes, or None."""
        return self.encoded.get("stage")

    @property
    def where(self) -> str:
        """The document's name in errors."""
        return str(self.path) + (f", stage {self.stage}" if self.stage is not None else "")

    def wrong(self, message: str, legal: str, name: str = "") -> PlanError:
        """An error about a field's value.

        Args:
            message: the error.
            legal: the legal values.
            name: the name of the field.
        """
        where = f"{self.path}:{self.lines[name]}" if name in self.lines else self.where
        return PlanError(message, source=where, legal=legal)


# -- the lines of operators and parameters -----------------------------------------------------------------------------


@dataclass(frozen=True)
class DocumentLine:
    """A line of a document: the fields of one operator or parameter.

    Attributes:
        name: the operator or parameter.
        encoded: the fields.
        where: the place of the line: ``plan.json:17``.
    """

    name: str
    encoded: JsonObject
    where: str

    def decision(self, op: Op, devices: int, on_missing_rule: str, uneven: bool, per_rank: bool = False) -> Decision:
        """The line as a decision of the operator that it names, with the cause that the line gives.

        Args:
            op: the operator.
            devices: the number of devices.
            on_missing_rule: "error", or "replicate": an operator without a rule runs whole on every device.
            uneven: True where cuts need not divide.
            per_rank: True in hybrid_parallel, where every operator runs unchanged.

        Raises:
            ShardwrightError: a strategy that the operator cannot follow, with the line.
        """
        if per_rank:
            rule, note = whole_rule(op), None
            bound = bound_rule(op, rule)
        else:
            rule, bound, note = description(op, on_missing_rule, devices, uneven)
        try:
            partial = None if self.encoded.get("open") is None else read_digits(self.encoded["open"], devices)
            return Decision(
                op,
                rule,
                bound,
                read_assignment(bound, self.encoded, devices),
                self.out(bound, devices),
                str(self.encoded.get("cause", "mark")),
                note,
                partial,
            )
        except ShardwrightError as error:
            keys = ("in_strategy", "out_strategy", "leaves", "open")
            strategies = {key: self.encoded[key] for key in keys if key in self.encoded}
            raise type(error)(
                error.message,
                operator=called(op),
                source=self.where,
                strategy=strategies.get("in_strategy") if len(strategies) == 1 else strategies,
                legal=error.legal,
            ) from None

    def out(self, bound: Bound, devices: int) -> tuple[Layout, ...] | None:
        """The layouts to which the outputs are brought, or None."""
        strategy = self.encoded.get("out_strategy")
        if strategy is None:
            return None
        if isinstance(strategy, list) and len(strategy) == len(bound.out_shapes):
            strategy = tuple(read_layout(e, devices, s, bound.uneven) for e, s in zip(strategy, bound.out_shapes))
        return output_layouts_of(bound, strategy, devices)

    def check(self, op: Op) -> None:
        """Check that the line describes this operator.

        Raises:
            PlanError: the line is of another operator, or of other shapes.
        """
        kind, shapes = self.encoded.get("op"), self.encoded.get("shapes")
        if kind != op.kind or shapes != types_of(op):
            raise PlanError(
                f"the line is of {kind} {shapes}, the model's operator is {op.kind} {types_of(op)}",
                operator=self.name,
                source=self.where,
                legal="a plan made for this model and batch",
            )

    def recomputed(self, op: Op) -> Op:
        """The operator, with the recomputation that the line gives.

        Raises:
            PlanError: the line's "recompute" is invalid.
        """
        try:
            return replace(op, recompute=recompute_of(self.encoded.get("recompute")))
        except TypeError:
            raise PlanError(
                f"recompute: {shown(self.encoded['recompute'])}",
                operator=called(op),
                source=self.where,
                legal='{"call": 0}: operators of one number are computed again together',
            ) from None


def called(op: Op) -> str | None:
    """The name of an operator in errors."""
    return op.where["operator"]


def read_lines(path: Path, text: str, lines: object, section: str, number: int = -1) -> dict[str, DocumentLine]:
    """The lines of a section by name, each with its place in the file.

    Args:
        path: the file.
        text: its text.
        lines: the section's value.
        section: the section's name.
        number: the index of the section among those of that name, where the text has several.

    Raises:
        PlanError: the section is missing, an entry has no name, or two have the same one.
    """
    if not isinstance(lines, list):
        raise PlanError(f"the plan has no {section}", source=str(path), legal="a file that Plan.save wrote")
    starts = section_places(text, section)
    start = starts[number] if -len(starts) <= number < len(starts) else 0
    begin = text.count("\n", 0, start)
    places: dict[str, list[int]] = {}
    for number, line in enumerate(text.split("\n")[begin:], begin + 1):
        for found in re.findall(r'"name":\s*("(?:[^"\\]|\\.)*")', line):
            with suppress(ValueError):  # within a text
                places.setdefault(json.loads(found), []).append(number)
    out: dict[str, DocumentLine] = {}
    for number, encoded in enumerate(lines):
        name = encoded.get("name") if isinstance(encoded, dict) else None
        if not isinstance(name, str):
            raise PlanError(f"{section}[{number}] names none", source=str(path), legal='{"name": "matmul1", ...}')
        found = places.get(name, [begin + 1])
        where = f"{path}:{found[min(name in out, len(found) - 1)]}"
        if name in out:
            raise PlanError(f"a second line for {shown(name)}", source=where, legal="one")
        check_fields(encoded, LINE_FIELDS[section], PlanError, f"the line of {shown(name)}", where)
        out[name] = DocumentLine(name, encoded, where)
    return out


@dataclass(frozen=True)
class PlanDocument(DocumentHead):
    """A plan's document as it was read.

    Attributes:
        operators, parameters: its lines by name.
        captured: the packed graph, with the digests.
    """

    operators: dict[str, DocumentLine]
    parameters: dict[str, DocumentLine]
    captured: str

    @classmethod
    def of(cls, path: Path, text: str, encoded: dict[str, object], number: int = -1) -> PlanDocument:
        """The document of a JSON object.

        Args:
            path: the file.
            text: its text.
            encoded: the object.
            number: the index of its sections among those of the same name in the text.

        Raises:
            PlanError: a section is missing, or an operator has two lines.
        """
        operators, parameters = (
            read_lines(path, text, encoded.pop(section, None), section, number)
            for section in ("operators", "parameters")
        )
        check_fields(encoded.keys() - {"captured"}, STAGE_FIELDS, PlanError, "the plan", str(path))
        for line in operators.values() if "open" in encoded else ():
            line.encoded.setdefault("open", encoded["open"])
        captured = encoded.pop("captured", None)
        if not isinstance(captured, str):
            raise PlanError("the plan has no captured graph", source=str(path), legal="a file that Plan.save wrote")
        lines = {} if encoded.get("memory") is None else {"memory": field_line(text, "memory", encoded["memory"])}
        return cls(path, encoded, operators, parameters, captured, lines=lines)

    # -- as a plan of its own --

    @cached_property
    def content(self) -> JsonObject:
        """The content of the captured line: graph, search report, and the digests of the other lines when written."""
        content = unpacked(self.captured, self.where)
        with self.captured_content():
            digests, found = content["said"], content["found"]
            if found is not None:
                fields = {key: value for key, value in found.items() if key != "seconds"}
                SearchResult(**fields)
                numbers = [
                    found["cost"],
                    found["seconds"],
                    *(x for x in (fields["bound"], fields["limit"]) if x is not None),
                ]
                if not all(type(x) in (int, float) for x in numbers) or not isinstance(fields["notes"], list):
                    raise TypeError(f"found: {shown(found)}")
            return {
                "graph": dict(content["graph"]),
                "found": found,
                "said": {
                    "head": digests["head"],
                    "operators": dict(digests["operators"]),
                    "parameters": dict(digests["parameters"]),
                },
            }

    @contextmanager
    def captured_content(self) -> Iterator[None]:
        """Around code that interprets what a captured line holds: its errors become errors of the plan.

        Raises:
            PlanError: the code raised an error that is none of the package's.
        """
        try:
            yield
        except ShardwrightError:
            raise
        except Exception as error:  # of any kind: what was captured goes through torch's own functions too
            raise self.wrong(
                f"the captured graph cannot be read: Plan.save writes no such graph ({type(error).__name__}: {error})",
                "a file that Plan.save wrote",
            ) from error

    def graph(self) -> Graph:
        """The captured graph, with the recomputation that its lines give.

        Raises:
            PlanError: the graph is damaged, is not the head's, or has an operator that is not registered here.
        """
        graph = read_graph(self.content["graph"], self.where, str(self.encoded.get("graph")))
        with self.captured_content():
            self.matched(graph, complete=True)
            return graph.with_ops(tuple(self.operators[op.name].recomputed(op) for op in graph.ops))

    def matched(self, graph: Graph, complete: bool) -> None:
        """Check that every line names an operator or parameter of `graph`.

        Args:
            graph: the captured graph of the plan, or of a model.
            complete: check also that every operator has a line.

        Raises:
            PlanError: the first line that does not, with its place, or the operators without a line.
        """
        names = dict.fromkeys(op.name for op in graph.ops)
        what = "the model" if self.stage is None else f"stage {self.stage} of the model"
        for name, line in self.operators.items():
            if name not in names:
                near = difflib.get_close_matches(name, names, 3, 0.4)
                raise PlanError(
                    f"{what} has no operator {name!r}: a plan for another model?",
                    source=line.where,
                    legal=", ".join(near or [*names][:8]) or "no such line",
                )
        for name, line in self.parameters.items():
            if name not in graph.parameters and name not in graph.buffers:
                near = difflib.get_close_matches(name, [*graph.parameters, *graph.buffers], 3, 0.0)
                raise PlanError(
                    f"{what} has no parameter {name!r}: a plan for another model?",
                    source=line.where,
                    legal=", ".join(near) or "no such line",
                )
        if complete and (missing := [name for name in names if name not in self.operators]):
            raise PlanError(
                f"the plan has no line for {', '.join(missing[:8])}",
                source=self.where,
                legal="a line for each operator",
            )

    def plan(self, graph: Graph | None = None, input_placement: InputPlacement | None = None) -> Plan:
        """The plan: every line checked, edited strategies as marks, everything else recomputed.

        Args:
            graph: the result of `graph`, where the caller has read it.
            input_placement: the placement of the inputs of a pipeline stage; None: by the head.

        Raises:
            ShardwrightError: an impossible line, with its place and the legal values.
        """
        graph = graph or self.graph()
        with self.captured_content():
            return self._planned(graph, input_placement)

    def _planned(self, graph: Graph, input_placement: InputPlacement | None) -> Plan:
        devices, mode, hsdp, own = self.devices, self.mode, self.hsdp, self.own
        input_placement = input_placement or self.input_placement(graph, devices, mode)
        decisions = {}
        for op in graph.ops:
            self.operators[op.name].check(op)
            decision = self.decided(op, devices, "replicate", self.uneven, own is not None)
            decisions[op.name] = self.marked(decision) if decision.cause == "mark" else decision
        graph = graph.with_ops(tuple(decision.op for decision in decisions.values()))
        batch_dims = {} if own is not None else find_batch_dims(graph, {n: d.bound for n, d in decisions.items()})
        settled = self.settled(graph, devices)
        memory, found = self.memory, self.found(input_placement)
        made = Plan(
            graph,
            devices,
            mode,
            input_placement,
            decisions,
            batch_dims,
            settled,
            hsdp,
            own,
            self.cluster(devices),
            optimizer=self.optimizer,
            comm_memory=self.comm_memory,
        )
        try:
            _ = made.program
        except ShardwrightError as error:
            raise self.unroutable(error, decisions) from None
        limit = memory if found is None else found.limit
        # Edited lines, and costs other than those of the search, show in the seconds of a step.
        if found is not None and not math.isclose(made.cost, self.content["found"]["seconds"], rel_tol=1e-9):
            found = None
        if found is None and limit is not None:  # the bound is no longer proved; the memory limit still holds
            found = SearchResult(made.cost, None, len(decisions), 0, (), limit)
        return replace(made, found=found)

    def found(self, input_placement: InputPlacement) -> SearchResult | None:
        """The search's report, where the head still equals the one that was searched for; otherwise None.

        Documents without "memory" have the memory limit only here.
        """
        content = self.content["found"]
        inputs = {} if self.stage is None else {"dataset_strategy": [*map(spell_layout, input_placement.inputs)]}
        if content is None or self.content["said"]["head"] != head_digest(self.encoded | inputs):
            return None
        fields = {key: value for key, value in content.items() if key != "seconds"}
        return SearchResult(**fields | {"notes": tuple(content["notes"])})

    def decided(self, op: Op, devices: int, on_missing_rule: str, uneven: bool, per_rank: bool = False) -> Decision:
        """The decision of an operator's line, with its original cause, or "mark" where the line was edited since."""
        line = self.operators[op.name]
        decision = line.decision(op, devices, on_missing_rule, uneven, per_rank)
        if digest(op, decision) != self.content["said"]["operators"].get(line.name):
            return replace(decision, cause="mark")
        texts = {key: line.encoded[key] for key in ("note", "origin", "via") if isinstance(line.encoded.get(key), str)}
        return replace(decision, **texts)

    def marked(self, decision: Decision) -> Decision:
        """The decision as a mark, which its operator carries."""
        op = decision.op
        mark = MarkUse(decision.assignment, decision.out, self.operators[op.name].where, tuple(range(len(op.inputs))))
        return replace(decision, op=replace(op, mark=mark), cause="mark", origin="", via="")

    def input_placement(self, graph: Graph, devices: int, mode: str) -> InputPlacement:
        """The placement of the inputs."""
        strategy = self.encoded.get("dataset_strategy")
        try:
            if isinstance(strategy, list) and len(strategy) == len(graph.inputs):
                strategy = tuple(
                    read_layout(entry, devices, [0] * len(v.shape)) for entry, v in zip(strategy, graph.inputs)
                )
            return placement_under(graph, devices, mode, strategy)
        except ShardwrightError as error:
            raise error.located(operator="dataset_strategy", source=str(self.path), strategy=strategy) from None

    def settled(self, graph: Graph, devices: int) -> dict[str, Layout] | None:
        """The storage of parameters that the document fixes (settled when written, or edited since), or None.

        Raises:
            LayoutError: a layout that does not fit the parameter, with the line.
            PlanError: "settled" is neither true nor false.
        """
        out = {}
        values = graph.parameters | graph.buffers
        for name, line in self.parameters.items():
            storage, fixed = line.encoded.get("storage"), line.encoded.get("settled", False)
            if not isinstance(fixed, bool):
                raise PlanError(
                    f"settled: {shown(fixed)}",
                    operator=f"the parameter {shown(name)}",
                    source=line.where,
                    legal="true or false",
                )
            if not fixed and _same(storage, self.content["said"]["parameters"].get(name)):
                continue
            try:
                out[name] = read_layout(storage, devices, values[name].shape, self.uneven)
            except ShardwrightError as error:
                raise LayoutError(
                    error.message,
                    operator=f"the parameter {name!r}",
                    source=line.where,
                    strategy=storage,
                    legal=error.legal or f"cuts, one for each dim of {tuple(values[name].shape)}",
                ) from None
        return out or None

    def unroutable(self, error: ShardwrightError, decisions: Mapping[str, Decision]) -> ShardwrightError:
        """The error of lines that are each legal and together impossible, with the line at fault."""
        partial_digits: dict[str, set[Digit]] = {}
        for name, decision in decisions.items():
            partial = set(decision.partial or ())
            if any(not partial <= partial_digits.get(v.name, set()) for v in decision.op.inputs):
                return PlanError(
                    f"it lets a sum through, open over {decision.partial}, that does not come to it so",
                    operator=called(decision.op),
                    source=self.operators[name].where,
                    legal='the line without "open"',
                )
            for i, value in enumerate(v for v in decision.op.outputs if v is not None):
                partial_digits[value.name] = set() if decision.out else set(decision.output_layout(i).partial) | partial
        return type(error)(
            error.message,
            operator=error.operator,
            source=f"{self.where}: {error.source}" if error.source else self.where,
            strategy=error.strategy,
            legal=error.legal,
        )

    # -- on a model --

    def per_stage(self, planned: Schedule, devices: int) -> tuple[PlanDocument, ...]:
        """Raise an error: a plan without a pipeline has no stages.

        Raises:
            PlanError: always.
        """
        raise self.wrong(
            f"the plan is of no pipeline, and {planned.groups} stages are asked for",
            "a plan of a pipeline, or no pipeline()",
        )

    def renamed(self, graph: Graph) -> PlanDocument:
        """The document with the operator names of `graph`, where `graph` has the same operators in the same order.

        A marked operator has another name than the same one without its mark.
        """
        try:
            captured = read_graph(self.content["graph"], self.where)
        except PlanError:
            return self  # the lines still apply by name
        if _alike(captured) != _alike(graph):
            return self
        names = {old.name: new.name for old, new in zip(captured.ops, graph.ops)}
        return replace(self, operators={names.get(name, name): line for name, line in self.operators.items()})

    def onto(
        self,
        graph: Graph,
        devices: int,
        mode: Planner,
        stored: Mapping[str, Layout] | None = None,
        *,
        on_missing_rule: str = "error",
        uneven: bool = False,
        first: bool = True,
    ) -> tuple[Graph, Planner, dict[str, Layout] | None]:
        """A model's graph with the lines as marks, the planner for it, and the fixed storage of parameters or None.

        Args:
            graph: the model's graph.
            devices: the number of devices.
            mode: the mode's planner, for operators that have no line. Where each operator has a line, the lines
                decide, including the partial sums that stay open.
            stored: storage of parameters that is fixed already.
            on_missing_rule, uneven: see `DocumentLine.decision`.
            first: True where the model is called with the shapes of the plan. Otherwise lines apply to the operators
                that exist, and shapes may differ.

        Raises:
            ShardwrightError: a plan for another model, other shapes or another number of devices, with the line.
        """
        if self.devices != devices:
            raise self.wrong(
                f"the plan is for {self.devices} devices, there are {devices}",
                f"a plan for {devices} devices, or {self.devices} devices",
            )
        lines = self.renamed(graph)
        if first:
            lines.matched(graph, complete=False)
        ops, decisions = [], {}
        for op in graph.ops:
            line = lines.operators.get(op.name)
            if line is not None and (first or line.encoded.get("op") == op.kind):
                if first:
                    line.check(op)
                if line.encoded.get("recompute") is not None:
                    op = line.recomputed(op)
                decisions[op.name] = lines.marked(lines.decided(op, devices, on_missing_rule, uneven))
                op = decisions[op.name].op
            ops.append(op)
        graph = graph.with_ops(tuple(ops))
        if first:
            stored = {**(self.settled(graph, devices) or {}), **(stored or {})}
        if first and len(decisions) == len(ops):
            batch_dims = find_batch_dims(graph, {name: decision.bound for name, decision in decisions.items()})
            mode = replace(mode, decide=lambda _: Decisions(decisions, batch_dims))
        elif mode.name == "data_parallel":
            mode = PLANNERS["semi_auto"]  # `data_parallel` ignores marks
        return graph, mode, dict(stored) if stored else None


def _same(one: object, other: object) -> bool:
    """True for the same JSON. In Python true equals 1."""
    return one == other and json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _alike(graph: Graph) -> list[tuple[str, str]]:
    """The part of a graph that is independent of operator names: kind and module of each operator."""
    return [(op.kind, op.module) for op in graph.ops]
