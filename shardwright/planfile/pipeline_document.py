"""A pipeline's plan as a document: each of its stages is described as in the document of a plan of its own.

    head        fields of the whole pipeline: devices, dataset_strategy, schedule, cluster
    stages      per stage its devices, its operators and its parameters, a line each, as in a document of one plan
    captured    one compressed line per stage: its graph; and one for the rest: the sources of the stages' inputs, the
                graph of a micro-batch, the joins of the micro-batches' results

On loading, the stages are planned again in order, so an edited line changes the inputs of later stages. The number of
micro-batches is fixed by the graph; the schedule may be edited to another one with the same stages. Example: a plan
of 4 stages keeps ``"micro_batches": 8``, and its ``"scheduler"`` may be replaced by another one on the same
placement.

`plan_document` reads the plan of one program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from ..cluster import Cluster
from ..errors import PlanError, ShardwrightError, shown
from ..graph import Graph
from ..json_files.json_reader import JsonObject, check_fields, section_places
from ..partition.local_program import InputPlacement
from ..pipeline.build import planned_stages
from ..pipeline.pipeline_plan import Join, MicrobatchPlan, PipelinePlan
from ..pipeline.schedules import SCHEDULES, Schedule, action_of, check, schedule
from ..pipeline.stages import StageGraph, StageInput
from ..planners.planning_problem import PlanningProblem
from ..planners.semi_auto import semi_auto
from ..sharded_plan import Plan
from .document_writer import PIPELINE_FIELDS, whole_graph
from .encoding import read_graph, unpacked
from .plan_document import PlanDocument

__all__ = ["PipelineDocument"]

#: Micro-batches of a step, at most. A number beyond it is a mistake, or a file that was tampered with.
MOST_MICRO_BATCHES = 1 << 16

#: The types of the fields of "pipeline".
PIPELINE_KINDS = {"stages": int, "scheduler": str, "micro_batches": int, "placement": list, "split": list}


@dataclass(frozen=True)
class PipelineDocument:
    """A pipeline's document as it was read.

    Attributes:
        head: its fields, without lines.
        stages: the documents of the stages, by number.
        line: the place of the schedule: ``plan.json:9``.
    """

    head: PlanDocument
    stages: tuple[PlanDocument, ...]
    line: str

    @classmethod
    def of(cls, path: Path, text: str, encoded: dict[str, object]) -> PipelineDocument:
        """The document of a JSON object.

        Args:
            path: the file.
            text: its text.
            encoded: the object.

        Raises:
            PlanError: a part is missing or invalid.
        """
        legal = "a file that PipelinePlan.save wrote"
        stages, captured = encoded.pop("stages", None), encoded.pop("captured", None)
        if not isinstance(stages, list) or not stages or not all(isinstance(stage, dict) for stage in stages):
            raise PlanError("the plan has no stages", source=str(path), legal=legal)
        if (
            not isinstance(captured, list)
            or len(captured) != len(stages) + 1
            or not all(isinstance(line, str) for line in captured)
        ):
            raise PlanError(
                f"the plan has {len(stages)} stages, and not as many captured graphs and one line more",
                source=str(path),
                legal=legal,
            )
        check_fields(encoded, PIPELINE_FIELDS, PlanError, "the plan", str(path))
        head = PlanDocument(path, encoded, {}, {}, captured[-1])
        shared: dict[str, object] = {"mode": encoded.get("mode"), "optimizer": encoded.get("optimizer", "adam")}
        documents = []
        for number, written in enumerate(stages):
            if type(written.get("stage")) is not int or written["stage"] != number:
                raise PlanError(
                    f"stages[{number}] is stage {shown(written.get('stage'))}",
                    source=str(path),
                    legal="all stages, in order",
                )
            part = PlanDocument.of(path, text, shared | written | {"captured": captured[number]}, number)
            if "cluster" not in written:
                try:
                    part.encoded["cluster"] = Cluster.of(head.cluster(part.devices), part.devices).to_dict()
                except ShardwrightError as error:
                    raise error.located(operator="cluster", source=str(path)) from None
            documents.append(part)
        place = section_places(text, "pipeline")
        return cls(head, tuple(documents), f"{path}:{text.count(chr(10), 0, place[0]) + 1}" if place else str(path))

    @property
    def path(self) -> Path:
        """The file."""
        return self.head.path

    @property
    def devices(self) -> int:
        """The number of devices of all stages together."""
        return self.head.devices

    def wrong(self, message: str, legal: str) -> PlanError:
        """An error about the pipeline's fields."""
        return PlanError(message, source=self.line, legal=legal)

    # -- what the head says --

    @property
    def setting(self) -> JsonObject:
        """The fields of the pipeline.

        Raises:
            PlanError: an invalid value.
        """
        fields = self.head.encoded["pipeline"]
        for key, kind in PIPELINE_KINDS.items():
            value = fields.get(key) if isinstance(fields, dict) else None
            if type(value) is not kind:
                raise self.wrong(
                    f"pipeline: {key}={shown(value)}",
                    ", ".join(f"{name}: {kind.__name__}" for name, kind in PIPELINE_KINDS.items()),
                )
        check_fields(fields, {*PIPELINE_KINDS, "chunks", "actions"}, PlanError, "the pipeline", self.line)
        if not 1 <= fields["stages"] <= len(self.stages):
            raise self.wrong(
                f"pipeline: stages={shown(fields['stages'])}, and the plan has {len(self.stages)} stages",
                f"1 to {len(self.stages)}: the groups of devices that they are on",
            )
        if fields["micro_batches"] != self.content["micro_batches"]:
            raise self.wrong(
                f"{shown(fields['micro_batches'])} micro-batches, and the graph is that of one of "
                f"{shown(self.content['micro_batches'])}",
                f"{shown(self.content['micro_batches'])}, or the model planned anew",
            )
        if not 1 <= fields["micro_batches"] <= MOST_MICRO_BATCHES:
            raise self.wrong(
                f"{shown(fields['micro_batches'])} micro-batches", f"a whole number from 1 to {MOST_MICRO_BATCHES:,}"
            )
        chunks = fields.get("chunks")
        if chunks is not None and (type(chunks) is not int or not 1 <= chunks <= len(self.stages)):
            raise self.wrong(f"pipeline: chunks={shown(chunks)}", f"a whole number from 1 to {len(self.stages)}")
        if not all(type(group) is int for group in fields["placement"]):
            raise self.wrong(f"pipeline: placement={shown(fields['placement'])}", "the group of devices of each stage")
        return fields

    @property
    def notes(self) -> tuple[str, ...]:
        """The remarks of the whole pipeline."""
        notes = self.head.encoded.get("notes", [])
        if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
            raise self.head.wrong(f"notes: {shown(notes)}", "a list of texts")
        return tuple(notes)

    def schedule(self) -> Schedule:
        """The schedule of the pipeline.

        Raises:
            PlanError: an unknown schedule, one that deadlocks, or one of other stages, with its place.
        """
        fields = self.setting
        groups, count, placement = fields["stages"], fields["micro_batches"], tuple(fields["placement"])
        try:
            if "actions" in fields:
                rows = [row.split(",") if isinstance(row, str) else row for row in fields["actions"]]
                made = Schedule(
                    fields["scheduler"],
                    placement,
                    count,
                    tuple(
                        tuple(action_of(cell, f"{self.line}, group {group}") for cell in row)
                        for group, row in enumerate(rows)
                    ),
                )
                check(made)
            else:
                made = schedule(fields["scheduler"], groups, count, chunks=fields.get("chunks"))
        except (ShardwrightError, TypeError) as error:
            raise self.wrong(
                getattr(error, "message", f"actions={shown(fields.get('actions'))}"),
                getattr(error, "legal", None) or "a row for each group, its actions with commas between them",
            ) from None
        if made.placement != placement:
            raise self.wrong(
                f"{made.name} on {groups} groups has its stages on {list(made.placement)}, the plan on "
                f"{list(placement)}",
                ", ".join(SCHEDULES) + ": one that has them there, or a new plan",
            )
        if made.stages != len(self.stages):
            raise self.wrong(
                f"{made.name} has {made.stages} stages, the plan {len(self.stages)}",
                f"a schedule of {len(self.stages)} stages",
            )
        return made

    def sizes(self, made: Schedule) -> tuple[int, ...]:
        """The number of devices of each group, by group.

        Args:
            made: the schedule.

        Raises:
            PlanError: stages of one group have different numbers of devices, or the sum is not the plan's.
        """
        sizes: dict[int, int] = {}
        for stage, group in zip(self.stages, made.placement):
            if sizes.setdefault(group, stage.devices) != stage.devices:
                raise stage.wrong(
                    f"{stage.devices} devices, and an earlier stage of group {group} has {sizes[group]}",
                    "as many for all stages of a group",
                )
        out = tuple(sizes[group] for group in range(made.groups))
        if sum(out) != self.devices:
            raise self.head.wrong(
                f"the groups have {' + '.join(map(str, out))} devices, the plan has {self.devices}",
                f"{sum(out)} devices",
            )
        return out

    # -- the content of the last line --

    @cached_property
    def content(self) -> JsonObject:
        """The content of the last captured line: everything beside the stages' graphs.

        Raises:
            PlanError: it is damaged.
        """
        content = unpacked(self.head.captured, self.head.where)
        with self.head.captured_content():
            # Files from before buffers were joined once a step have no "updates".
            content = {"updates": {}, **content}
            return {
                key: content[key]
                for key in ("graph", "joins", "totals", "counts", "micro_batches", "updates", "stages")
            }

    def graph(self, stage_graphs: Sequence[Graph]) -> Graph:
        """The graph of one micro-batch, with the recomputation that its lines give.

        Args:
            stage_graphs: the stages' graphs.

        Raises:
            PlanError: the graph is not the head's.
        """
        encoded = whole_graph(self.content["graph"], [stage.content["graph"] for stage in self.stages])
        graph = read_graph(encoded, self.head.where, str(self.head.encoded.get("graph")))
        recompute_of = {op.name: op.recompute for part in stage_graphs for op in part.ops if op.recompute is not None}
        return graph.with_ops(
            tuple(
                op if op.name not in recompute_of else replace(op, recompute=recompute_of[op.name]) for op in graph.ops
            )
        )

    # -- as a plan --

    def plan(self) -> PipelinePlan:
        """The plan: every stage's document read by `PlanDocument.plan`, fed by the earlier stages.

        Raises:
            ShardwrightError: an impossible value, with its place and the legal ones.
        """
        made = self.schedule()
        sizes = self.sizes(made)
        stage_graphs = [stage.graph() for stage in self.stages]
        with self.head.captured_content():
            return self._planned(made, sizes, stage_graphs)

    def _planned(self, made: Schedule, sizes: tuple[int, ...], stage_graphs: Sequence[Graph]) -> PipelinePlan:
        devices, cluster = self.devices, self.head.cluster(self.devices)
        content, graph = self.content, self.graph(stage_graphs)
        counts = None if content["counts"] is None else read_graph(content["counts"], self.head.where)
        joins = tuple(None if join is None else Join(*join) for join in content["joins"])
        updates = {name: Join(*join) for name, join in content["updates"].items()}
        parts = [
            StageGraph(
                part,
                tuple(StageInput(*source) for source in ends["sources"]),
                tuple(ends["results"]),
                tuple(ends["sent"]),
            )
            for part, ends in zip(stage_graphs, content["stages"], strict=True)
        ]
        inputs = graph.inputs[: len(graph.inputs) - len(content["totals"])]
        splits = tuple(self.setting["split"])
        if len(splits) != len(inputs) or not all(isinstance(split, bool) for split in splits):
            raise self.wrong(f"split={shown(list(splits))}", f"true or false for each of the {len(inputs)} inputs")
        alone = Graph(inputs, {}, {}, {}, (), ())
        input_placement = {size: self.head.input_placement(alone, size, self.head.mode) for size in sorted(set(sizes))}

        def planner(part: Graph, size: int, inputs_of_stage: InputPlacement, number: int) -> Plan:
            if number < 0:  # the graph that counts targets has nothing to decide
                decided = semi_auto(PlanningProblem(part, size, inputs_of_stage, on_missing_rule="replicate"))
                return Plan(
                    part, size, "semi_auto", inputs_of_stage, decided.decisions, decided.batch_dims, cluster=cluster
                )
            return self.stages[number].plan(part, inputs_of_stage)

        stages = planned_stages(parts, inputs, counts, made.placement, sizes, input_placement, planner)
        micro = MicrobatchPlan(graph, joins, tuple(content["totals"]), counts, updates)
        return PipelinePlan(
            graph, devices, self.head.mode, stages, made, micro, splits, cluster, self.head.optimizer, self.notes
        )

    # -- on a model --

    def per_stage(self, planned: Schedule, devices: int) -> tuple[PlanDocument, ...]:
        """The documents of the stages, for a pipeline with the same stages and devices.

        Raises:
            PlanError: another number of stages or devices.
        """
        if self.devices != devices:
            raise self.head.wrong(
                f"the plan is for {self.devices} devices, there are {devices}",
                f"a plan for {devices} devices, or {self.devices} devices",
            )
        mine = len(self.stages), self.setting["stages"]
        if mine != (planned.stages, planned.groups):
            raise self.wrong(
                f"the plan has {_count(*mine)}, asked for are {_count(planned.stages, planned.groups)}",
                f"a plan of {_count(planned.stages, planned.groups)}",
            )
        return self.stages

    def onto(self, *_: object, **__: object) -> NoReturn:
        """Raise an error: counterpart of `PlanDocument.onto` for a model without a pipeline.

        Raises:
            PlanError: always.
        """
        raise self.wrong(
            f"the plan is of a pipeline of {len(self.stages)} stages, and no pipeline is asked for",
            "a plan of no pipeline, or pipeline()",
        )


def _count(stages: int, groups: int) -> str:
    return f"{stages} stages" + (f" on {groups} groups of devices" if groups != stages else "")
