"""A pipeline's plan as a document: what it says of each stage is the document of a plan of its own.

    head        what holds of all: devices, how the model is fed, the schedule, the cluster
    stages      for each its devices, its operators and its parameters, a line each, as in a document of one plan
    captured    a compressed line for each stage, its graph; and one for what there is beside them: where the inputs of
                stages come from, the graph of a micro-batch, how results of micro-batches are put together

When it is loaded every stage is planned anew in turn, so that a line that was edited changes what later stages are fed.
The number of micro-batches is that of the graph; another schedule may be written in, if it has the same stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..cluster import Cluster
from ..errors import PlanError, ShardwrightError
from ..graph import Graph
from ..partition.local_program import InputPlacement
from ..pipeline.build import planned_stages
from ..pipeline.microbatch import Join, MicrobatchPlan
from ..pipeline.pipeline_plan import PipelinePlan
from ..pipeline.schedules import SCHEDULES, Schedule, action_of, check, schedule
from ..pipeline.stages import StageGraph, StageInput
from ..planners.semi_auto import semi_auto
from ..sharded_plan import Plan
from .document_writer import whole_graph
from .encoding import fingerprint, read_graph, unpacked
from .plan_document import PlanDocument, section_places

__all__ = ["PipelineDocument"]

#: Of what "pipeline" holds, the kinds.
_KINDS = {"stages": int, "scheduler": str, "micro_batches": int, "placement": list, "split": list}


@dataclass(frozen=True)
class PipelineDocument:
    """A pipeline's document as it was read.

    Attributes:
        head: its fields, without lines.
        stages: by number.
        line: where the schedule stands, ``plan.json:9``.
    """

    head: PlanDocument
    stages: tuple[PlanDocument, ...]
    line: str

    @classmethod
    def of(cls, path: Path, text: str, words: dict[str, Any]) -> PipelineDocument:
        """The document of an object.

        Raises:
            PlanError: a part that is not there, or is something else.
        """
        legal = "a file that PipelinePlan.save wrote"
        stages, captured = words.pop("stages", None), words.pop("captured", None)
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
        head = PlanDocument(path, words, {}, {}, captured[-1])
        shared: dict[str, Any] = {"mode": words.get("mode"), "optimizer": words.get("optimizer", "adam")}
        documents = []
        for number, said in enumerate(stages):
            if said.get("stage") != number:
                raise PlanError(
                    f"stages[{number}] is stage {said.get('stage')!r}", source=str(path), legal="all stages, in order"
                )
            part = PlanDocument.of(path, text, shared | said | {"captured": captured[number]}, number)
            if "cluster" not in said:
                try:
                    part.words["cluster"] = Cluster.of(head.cluster, part.devices).to_dict()
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
        """How many devices all stages have together."""
        return self.head.devices

    def wrong(self, message: str, legal: str) -> PlanError:
        """An error of what is said of the pipeline."""
        return PlanError(message, source=self.line, legal=legal)

    # -- what the head says --

    @property
    def setting(self) -> dict[str, Any]:
        """What is said of the pipeline.

        Raises:
            PlanError: something that it cannot be.
        """
        given = self.head.words["pipeline"]
        for key, kind in _KINDS.items():
            value = given.get(key) if isinstance(given, dict) else None
            if type(value) is not kind:
                raise self.wrong(
                    f"pipeline: {key}={value!r}", ", ".join(f"{name}: {kind.__name__}" for name, kind in _KINDS.items())
                )
        if given["micro_batches"] != self.held["micro_batches"]:
            raise self.wrong(
                f"{given['micro_batches']} micro-batches, and the graph is that of one of {self.held['micro_batches']}",
                f"{self.held['micro_batches']}, or the model planned anew",
            )
        return given

    def schedule(self) -> Schedule:
        """Its schedule.

        Raises:
            PlanError: one that there is not, that deadlocks, or that has other stages, and where.
        """
        given = self.setting
        groups, count, placement = given["stages"], given["micro_batches"], tuple(given["placement"])
        try:
            if "actions" in given:
                rows = [row.split(",") if isinstance(row, str) else row for row in given["actions"]]
                made = Schedule(
                    given["scheduler"],
                    placement,
                    count,
                    tuple(
                        tuple(action_of(cell, f"{self.line}, group {group}") for cell in row)
                        for group, row in enumerate(rows)
                    ),
                )
                check(made)
            else:
                made = schedule(given["scheduler"], groups, count, chunks=given.get("chunks"))
        except (ShardwrightError, TypeError) as error:
            raise self.wrong(
                getattr(error, "message", f"actions={given.get('actions')!r}"),
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
        """By group of devices, how many.

        Raises:
            PlanError: stages of one group on different numbers of devices, or another sum than the plan's devices.
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

    # -- what the last line holds --

    @cached_property
    def held(self) -> dict[str, Any]:
        """What there is beside the stages' graphs.

        Raises:
            PlanError: it is damaged.
        """
        try:
            # Files that were written before buffers were joined once a step have no "updates".
            held = {"updates": {}, **unpacked(self.head.captured)}
            return {
                key: held[key] for key in ("graph", "joins", "totals", "counts", "micro_batches", "updates", "stages")
            }
        except (ValueError, KeyError, TypeError) as error:
            raise self.head.wrong(
                f"the captured graph cannot be read: {error}", "a file that PipelinePlan.save wrote"
            ) from None

    def graph(self, own: Sequence[Graph]) -> Graph:
        """The graph of one micro-batch, as its lines have it recomputed.

        Args:
            own: the stages' graphs.
        """
        graph = read_graph(whole_graph(self.held["graph"], [stage.held["graph"] for stage in self.stages]))
        if fingerprint(graph) != self.head.words.get("graph"):
            raise self.head.wrong(
                f"the captured graph is {fingerprint(graph)}, the plan is of {self.head.words.get('graph')!r}",
                "a file that PipelinePlan.save wrote",
            )
        again = {op.name: op.recompute for part in own for op in part.ops if op.recompute is not None}
        return graph.with_ops(
            tuple(op if op.name not in again else replace(op, recompute=again[op.name]) for op in graph.ops)
        )

    # -- as a plan --

    def plan(self) -> PipelinePlan:
        """The plan: every stage's document as `Document.plan` reads it, fed by those before it.

        Raises:
            ShardwrightError: what cannot be, with where it stands and what would be legal.
        """
        made, devices, cluster = self.schedule(), self.devices, self.head.cluster
        sizes = self.sizes(made)
        own = [stage.graph() for stage in self.stages]
        try:
            held, graph = self.held, self.graph(own)
            counts = None if held["counts"] is None else read_graph(held["counts"])
            joins = tuple(None if join is None else Join(*join) for join in held["joins"])
            updates = {name: Join(*join) for name, join in held["updates"].items()}
            parts = [
                StageGraph(
                    part,
                    tuple(StageInput(*source) for source in ends["sources"]),
                    tuple(ends["results"]),
                    tuple(ends["sent"]),
                )
                for part, ends in zip(own, held["stages"], strict=True)
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self.head.wrong(
                f"the captured graph cannot be read: {type(error).__name__}: {error}",
                "a file that PipelinePlan.save wrote",
            ) from None
        inputs = graph.inputs[: len(graph.inputs) - len(held["totals"])]
        splits = tuple(self.setting["split"])
        if len(splits) != len(inputs) or not all(isinstance(split, bool) for split in splits):
            raise self.wrong(f"split={list(splits)}", f"true or false for each of the {len(inputs)} inputs")
        alone = Graph(inputs, {}, {}, {}, (), ())
        fed = {size: self.head.fed(alone, size, self.head.mode) for size in sorted(set(sizes))}

        def planner(part: Graph, size: int, given: InputPlacement, number: int) -> Plan:
            if number < 0:  # it counts targets: nothing to be decided
                decided = semi_auto(part, size, given, on_missing_rule="replicate")
                return Plan(part, size, "semi_auto", given, *decided, cluster=cluster)
            return self.stages[number].plan(part, given)

        stages = planned_stages(parts, inputs, counts, made.placement, sizes, fed, planner)
        micro = MicrobatchPlan(graph, joins, tuple(held["totals"]), counts, updates)
        return PipelinePlan(
            graph,
            devices,
            self.head.mode,
            stages,
            made,
            micro,
            splits,
            cluster,
            self.head.optimizer,
            tuple(map(str, self.head.words.get("notes", ()))),
        )

    # -- on a model --

    def per_stage(self, planned: Schedule, devices: int) -> tuple[PlanDocument, ...]:
        """The documents of the stages, for a pipeline of the same stages on as many devices.

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

    def onto(self, *_: Any, **__: Any) -> Any:
        """As of `Document`, of a model that is no pipeline.

        Raises:
            PlanError: always.
        """
        raise self.wrong(
            f"the plan is of a pipeline of {len(self.stages)} stages, and no pipeline is asked for",
            "a plan of no pipeline, or pipeline()",
        )


def _count(stages: int, groups: int) -> str:
    return f"{stages} stages" + (f" on {groups} groups of devices" if groups != stages else "")
