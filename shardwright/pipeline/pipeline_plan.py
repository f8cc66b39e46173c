"""A pipeline plan: each stage planned on its own devices, a schedule, and the transfers between stages.

    rank of the world = first rank of the stage's group of devices + rank in the stage

1. Chosen stages (`PipelineSearchResult`): the stages that a search has chosen, and the alternatives it priced.

2. The plan (`PipelinePlan`). A stage's plan is an ordinary `Plan` of one micro-batch on the stage's own devices.

3. The timeline (`timeline_of`): a step in time. A stage's forward and backward take the seconds that one more
   micro-batch adds to the stage's price; the rest of the price is spent once a step. A transfer takes as long as the
   slowest of the ranks that send, each over its own links.

Example: 8 devices in 2 groups: rank 2 of stage 1 is rank 4 + 2 = 6 of the world.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from ..cluster import Cluster
from ..cost.cost_model import CostModel, StepInTime
from ..cost.memory_timeline import OptimizerSetting
from ..errors import PlanError
from ..graph import Graph, Value
from ..layout import Digits, Layout, digits_size, group_of
from ..partition.local_program import PlacedValue, made_by
from ..partition.partitioner import between, sender
from ..redistribution import CollectiveKind
from ..rules.dims import send
from ..sharded_plan import (
    Collective,
    OperatorPlan,
    OperatorPlans,
    ParameterPlan,
    Plan,
    SavedPlan,
    backward_collectives,
    forward_collectives,
    short_hash,
)
from .schedule_simulation import Profile, Simulation, simulate
from .schedules import Schedule, forward_only, schedule
from .stages import PipelineSearchResult, PricedPipeline, StageInput

__all__ = [
    "Join",
    "MicrobatchPlan",
    "Moment",
    "PipelinePlan",
    "Stage",
    "StageParameter",
    "Transfer",
    "moments",
    "timeline_of",
]


class Join(NamedTuple):
    """The join of the parts' outputs to the output of the whole batch: "cat" along `dim`, "sum", "mean" or "same".

    A gradient of the whole goes to every part: unchanged for "sum", in slices for "cat", divided by m for "mean" and
    "same".
    """

    how: str
    dim: int = 0


@dataclass(frozen=True)
class MicrobatchPlan:
    """A model that runs in micro-batches.

    Args:
        graph: the graph that each micro-batch runs. Totals are its last inputs.
        joins: for each of its outputs, the join of the parts; None for an output that is no value.
        totals: names of its last inputs: sums over all micro-batches of the outputs of `counts`, in their order.
        counts: the graph that computes the weights of one micro-batch from the model's inputs (by name) and buffers;
            None where there are no totals.
        updates: buffer that changes once a step -> the join of the parts' new values. Buffers of batch norms, which
            change in turn, are not among them.
    """

    graph: Graph
    joins: tuple[Join | None, ...]
    totals: tuple[str, ...] = ()
    counts: Graph | None = None
    updates: dict[str, Join] = field(default_factory=dict)

    def join(self, index: int) -> Join:
        """The join of output `index`, a value."""
        join = self.joins[index]
        assert join is not None
        return join


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline.

    Attributes:
        number: from 0.
        plan: of one micro-batch on its own devices.
        first: its first rank in the world.
        sources: for each input of the plan's graph, its source.
        results: indices of the model's outputs that come first among the plan's outputs; the sent values follow.
        sent: names of the values that it sends.
        counts: the plan that counts the targets of a micro-batch, where the loss is a mean over the whole batch with
            unequal weights; else None.
    """

    number: int
    plan: Plan
    first: int
    sources: tuple[StageInput, ...]
    results: tuple[int, ...]
    sent: tuple[str, ...]
    counts: Plan | None = None

    @property
    def devices(self) -> int:
        """The number of its devices."""
        return self.plan.devices

    @property
    def ranks(self) -> range:
        """Its ranks in the world."""
        return range(self.first, self.first + self.devices)

    def outgoing(self, value: str) -> PlacedValue:
        """A value that the stage sends, in the layout in which it is sent."""
        return self.plan.program.outputs[len(self.results) + self.sent.index(value)]


@dataclass(frozen=True)
class StageParameter(ParameterPlan):
    """The placement of a parameter of one stage.

    Ranks are those of the world; ranks of other stages hold nothing of it.

    Attributes:
        stage: the number of its stage.
        ranks: of the stage, in the world.
    """

    stage: int = 0
    ranks: range = range(0)

    def slice(self, rank: int) -> tuple[slice, ...]:
        """The part of the whole parameter that lies on `rank`."""
        if rank not in self.ranks:
            return (slice(0, 0),) * len(self.shape)
        return super().slice(rank - self.ranks.start)


class Transfer(NamedTuple):
    """A transfer from one stage to another.

    Attributes:
        kind: "value", once for each micro-batch, or "parameter", once a step.
        name: of the value, or of the parameter.
        source, target: stages.
        layout: on the sending stage; see `partition.partitioner`.
        arriving: on the receiving stage.
        value: global shape and dtype.
        gradient: True where a gradient comes back.
    """

    kind: str
    name: str
    source: int
    target: int
    layout: Layout
    arriving: Layout
    value: Value
    gradient: bool

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part that one rank sends."""
        return self.layout.local_shape(self.layout.padded(self.value.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the part that one rank sends."""
        out = self.value.dtype.itemsize
        for size in self.local_shape:
            out *= size
        return out


@dataclass(frozen=True, repr=False)
class PipelinePlan(SavedPlan):
    """The strategy and placement of every operator on every device of a pipeline; made by `shardwright.plan`.

    Attributes:
        graph: of one micro-batch, before it was cut into stages.
        devices: of all stages together.
        mode: the parallel mode of the stages' planners.
        stages: by number.
        schedule: the order of actions of each group of devices.
        micro: the join of the micro-batches' results.
        split: per tensor input of the model, True where it is split into micro-batches; the others go whole to each.
        cluster: of all devices; None: see `Cluster.of`.
        chosen: the report of the search for stages="auto"; else None.

    Example:
        >>> setting = {"stages": 2, "micro_batches": 4, "stage_config": {"0": 0, "2": 1}}
        >>> plan = sw.plan(net, (x,), loss_fn, y, devices=8, pipeline=setting)
        >>> [stage.ranks for stage in plan.stages]
        [range(0, 4), range(4, 8)]
    """

    graph: Graph
    devices: int
    mode: str
    stages: tuple[Stage, ...]
    schedule: Schedule
    micro: MicrobatchPlan
    split: tuple[bool, ...]
    cluster: Cluster | None = None
    optimizer: OptimizerSetting = None
    notes_of_its_own: tuple[str, ...] = ()
    chosen: PipelineSearchResult | None = None

    @property
    def alternatives(self) -> tuple[PricedPipeline, ...]:
        """For stages="auto", the priced pipelines, the best first; otherwise empty."""
        return () if self.chosen is None else self.chosen.alternatives

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a step."""
        return self.schedule.micro_batches

    @property
    def parts(self) -> int:
        """The number of parts of the batch where each rank feeds its own; a micro-batch has a piece of each part."""
        input_placement = self.stages[0].plan.input_placement
        return digits_size(input_placement.batch) if input_placement.per_rank_batch else 1

    @property
    def draws(self) -> bool:
        """True where it draws random numbers."""
        return any(stage.plan.draws for stage in self.stages)

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """The transfers between stages, in the order of the sending stages."""
        out = []
        for stage in self.stages:
            for value, source, layout in zip(stage.plan.graph.inputs, stage.sources, stage.plan.input_placement.inputs):
                if source.kind == "input":
                    continue
                producer = self.stages[source.index]
                produced = (
                    producer.outgoing(source.name).layout
                    if source.kind == "stage"
                    else producer.plan.program.parameters[source.name].layout
                )
                kind = "value" if source.kind == "stage" else "parameter"
                out.append(
                    Transfer(
                        kind,
                        source.name,
                        source.index,
                        stage.number,
                        produced,
                        layout,
                        value.stored,
                        value.requires_grad,
                    )
                )
        return tuple(sorted(out, key=lambda t: (t.source, t.target)))

    # -- queries -----------------------------------------------------------------------------------------------------

    @cached_property
    def operators(self) -> OperatorPlans:
        """The operators of the user's program, stage by stage."""
        return OperatorPlans(
            o
            for stage in self.stages
            for o, op in zip(stage.plan.operators, stage.plan.graph.ops)
            if op.target is not send
        )

    def operator(self, name: str) -> OperatorPlan:
        """The operator of a `name`, as `Plan.operator` finds it.

        Raises:
            PlanError: there is none, or several.
        """
        return self.stage_of(name).plan.operator(name)

    def stage_of(self, name: str) -> Stage:
        """The stage of the operator of a `name`.

        Raises:
            PlanError: there is no such operator, or several.
        """
        for stage in self.stages:
            if any(o.name == name for o in stage.plan.operators):
                return stage
        inside = [stage for stage in self.stages if any(o.module == name for o in stage.plan.operators)]
        if len(inside) != 1:
            raise PlanError(
                f"no operator is called {name!r}"
                if not inside
                else f"the module {name!r} calls operators of {len(inside)} stages",
                legal=", ".join(o.name for o in self.operators),
            )
        return inside[0]

    @cached_property
    def parameters(self) -> dict[str, StageParameter]:
        """Every parameter and buffer by its dotted name; a buffer of several stages is listed with the first."""
        out: dict[str, StageParameter] = {}
        for stage in self.stages:
            for name, p in stage.plan.parameters.items():
                out.setdefault(
                    name,
                    StageParameter(
                        p.name, p.shape, p.layout, p.storage, p.trainable, p.note, stage.number, stage.ranks
                    ),
                )
        for alias, name in self.graph.aliases.items():
            if name in out:
                out.setdefault(alias, out[name])
        return out

    @property
    def notes(self) -> tuple[str, ...]:
        """Limitations that a user would not expect, a line each."""
        notes_of_stages = tuple(f"stage {stage.number}: {note}" for stage in self.stages for note in stage.plan.notes)
        return self.notes_of_its_own + notes_of_stages

    def of_rank(self, rank: int) -> tuple[Stage, ...]:
        """The stages that run on a rank.

        Raises:
            PlanError: no such rank.
        """
        if not 0 <= rank < self.devices:
            raise PlanError(f"rank {rank} is outside the {self.devices} devices")
        return tuple(stage for stage in self.stages if rank in stage.ranks)

    def peers(self, transfer: Transfer, rank: int, back: bool = False) -> tuple[int, ...]:
        """The ranks to which `rank` sends a value, or the rank from which it receives the value.

        Args:
            transfer: one of `transfers`.
            back: the same for the value's gradient.
        """
        source, target = self.stages[transfer.source], self.stages[transfer.target]
        if back:
            source, target = target, source
        if rank in source.ranks:
            return tuple(
                q
                for q in target.ranks
                if source.first + sender(q - target.first, source.devices, target.devices) == rank
            )
        return (source.first + sender(rank - target.first, source.devices, target.devices),)

    def collectives(self, rank: int) -> tuple[Collective, ...]:
        """Every collective, send and receive of one step in which `rank` takes part, in the order of the schedule."""
        return tuple(_Step(self, rank).run())

    @cached_property
    def sent(self) -> int:
        """Bytes that a rank sends in one step; the maximum over the first ranks of all stages."""
        firsts = {stage.first for stage in self.stages}
        return max(sum(c.sent for c in self.collectives(rank)) for rank in firsts)

    def memory(self, rank: int) -> dict[str, int]:
        """Bytes on `rank` by kind, as `Plan.memory` has them.

        Activations count for as many micro-batches as are kept at one time. "sent": the values being sent and
        received. "accumulated", with optimizer level 1: the whole gradients of gathered weights, which all
        micro-batches add to before they are scattered.
        """
        out: dict[str, int] = {}
        for stage in self.of_rank(rank):
            for kind, count in self.memory_of(stage).items():
                out[kind] = out.get(kind, 0) + count
        moving = [t.nbytes for t in self.transfers if any(rank in self.stages[s].ranks for s in (t.source, t.target))]
        return out | {"sent": sum(moving)}

    def memory_of(self, stage: Stage) -> dict[str, int]:
        """Bytes of one stage on each of its devices, by kind."""
        saved = max(1, self.schedule.most_saved(stage.number))
        out = {kind: count * (saved if kind == "activations" else 1) for kind, count in stage.plan.memory(0).items()}
        accumulated = sum(stage.plan.accumulated.values())
        return out | ({"accumulated": accumulated} if accumulated else {})

    # -- pricing -----------------------------------------------------------------------------------------------------

    @cached_property
    def simulation(self) -> Simulation:
        """The timeline of one step (`simulate.Simulation`)."""
        return timeline_of(self)

    @property
    def cost(self) -> float:
        """Seconds of one step: its schedule, played with each stage's price and the transfers."""
        return self.simulation.total

    @property
    def bound(self) -> None:
        """None: the optimality of each single stage gives no bound for the pipeline."""
        return None

    gap = bound

    @property
    def peak(self) -> float:
        """The most bytes held by a device at any moment of a step."""
        return max(self.simulation.peak(group) for group in range(self.schedule.groups))

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of everything that all ranks must agree on."""
        return short_hash(self._lines())

    def _lines(self) -> Iterator[str]:
        yield (
            f"{self.devices} {self.mode} {self.schedule.placement} {self.split} {self.micro.joins} {self.micro.updates}"
        )
        yield self.schedule.to_csv()
        for stage in self.stages:
            yield f"{stage.first} {stage.plan.fingerprint} {stage.counts and stage.counts.fingerprint} {stage.sources}"
            yield f"{stage.results} {stage.sent}"


class _Step:
    """The communication of one rank in one step."""

    def __init__(self, plan: PipelinePlan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.mine = {stage.number: stage for stage in plan.of_rank(rank)}

    def run(self) -> Iterator[Collective]:
        plan = self.plan
        shared = [t for t in plan.transfers if t.kind == "parameter"]
        for t in shared:
            yield from self.moved(t, "storage")
        for stage in self.mine.values():
            yield from self.of(
                stage,
                (
                    (c, d)
                    for i in stage.plan.program.instructions
                    if stage.plan.once(i)
                    for c, d in forward_collectives(i)
                ),
            )
        for action in plan.schedule.actions[plan.schedule.placement[next(iter(self.mine))]]:
            stage = self.mine[action.stage]
            if action.kind == "F":
                yield from self.moved_of(stage, "forward", into=True)
                yield from self.of(
                    stage,
                    (
                        (c, d)
                        for i in stage.plan.program.instructions
                        if not stage.plan.once(i)
                        for c, d in forward_collectives(i)
                    ),
                )
                yield from self.moved_of(stage, "forward", into=False)
            elif action.kind in "BI":
                yield from self.moved_of(stage, "backward", into=True)
                yield from self.of(
                    stage,
                    (
                        (c, d)
                        for i in stage.plan.backward
                        if not stage.plan.once(i, back=True)
                        for c, d in backward_collectives(i)
                    ),
                )
                yield from self.moved_of(stage, "backward", into=False)
        for t in shared:
            if t.gradient:
                yield from self.moved(t, "gradient", back=True)
        for stage in self.mine.values():
            yield from self.of(
                stage,
                (
                    (c, d)
                    for i in stage.plan.backward
                    if stage.plan.once(i, back=True)
                    for c, d in backward_collectives(i)
                ),
            )

    def of(self, stage: Stage, collectives: Iterator[tuple[Collective, Digits]]) -> Iterator[Collective]:
        for collective, digits in collectives:
            ranks = group_of(self.rank - stage.first, digits)
            yield replace(collective, ranks=tuple(stage.first + r for r in ranks))

    def moved_of(self, stage: Stage, phase: str, into: bool) -> Iterator[Collective]:
        """Yield the transfers into or out of a stage with one micro-batch."""
        back = phase == "backward"
        for t in self.plan.transfers:
            receiver, sender = (t.target, t.source) if into != back else (t.source, t.target)
            if t.kind == "value" and receiver == stage.number and (t.gradient or not back) and sender not in self.mine:
                yield from self.moved(t, phase, back, stage)

    def moved(self, t: Transfer, phase: str, back: bool = False, at: Stage | None = None) -> Iterator[Collective]:
        """Yield a transfer if this rank takes part in it; `back`: that of the gradient."""
        for stage in (at,) if at is not None else tuple(self.mine.values()):
            if stage.number not in (t.source, t.target) or {t.source, t.target} <= set(self.mine):
                continue
            kind = CollectiveKind.SEND if stage.number == t.source else CollectiveKind.RECV
            kind = kind.transpose if back else kind
            cause = "parameter" if t.kind == "parameter" else "conversion"
            for peer in self.plan.peers(t, self.rank, back):
                ranks = (self.rank, peer) if kind is CollectiveKind.SEND else (peer, self.rank)
                yield Collective(kind, ranks, t.local_shape, t.nbytes, kind.sent(2, t.nbytes), phase, cause, t.name)


# -- the timeline ----------------------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """A moment of a plan's timeline: the operator that runs, in the "forward" or the "backward", and its seconds."""

    operator: str
    half: str
    seconds: float


def moments(plan: Plan) -> tuple[Moment, ...]:
    """The moments of a plan's timeline, with their seconds."""
    program, costs = plan.program, CostModel(Cluster.of(plan.cluster, plan.devices), plan.devices)
    tables = (program.parameters, program.buffers, program.constants)
    seed = () if program.seed is None else (program.seed,)
    made = (o for i in program.instructions for o in made_by(i))
    known = {i.name: i for i in (*program.inputs, *seed, *(i for table in tables for i in table.values()), *made)}
    return (
        *(Moment(i.operator, "forward", costs.forward(i, known)) for i in program.instructions),
        *(Moment(i.operator, "backward", costs.backward(i, known)) for i in plan.backward),
    )


#: A micro-batch in time, and a micro-batch with what is done once a step.
StepsOfStage = tuple[StepInTime, StepInTime]


def timeline_of(
    plan: Plan | PipelinePlan, beside: bool = False, steps: Mapping[int, StepsOfStage] | None = None
) -> Simulation:
    """The timeline of one step of a plan.

    Args:
        plan: the plan.
        beside: False: every message takes time of its own, as plans are priced. True: messages travel beside
            computation, as the schedule of communication says (`Price.elapsed`).
        steps: with `beside`, stage of a pipeline -> a micro-batch in time, in place of the plan's `stage_in_time` and
            `stage_in_time_once`.

    A plan without a pipeline is one stage and one micro-batch, with its bytes at every moment (`Plan.timeline`). For
    a stage of a pipeline, the bytes are the maximum during a forward, and during a backward.
    """
    return _of_one(plan, beside) if isinstance(plan, Plan) else _of_stages(plan, beside, steps or {})


def _of_one(plan: Plan, beside: bool) -> Simulation:
    fixed, saved, running = _bytes_of_stage(plan, together=False)
    seconds = [[m.seconds for m in moments(plan) if m.half == half] for half in ("forward", "backward")]
    one = schedule("gpipe", 1, 1) if plan.backward else forward_only((0,), 1)
    halves = [sum(half) for half in seconds]
    if beside:
        halves = [plan.in_time.forward, plan.in_time.total - plan.in_time.forward]
    return simulate(
        one,
        halves[:1],
        halves[1:],
        fixed=[fixed],
        saved=[saved],
        devices=[plan.devices],
        running=[(_profile(seconds[0], running[0]), _profile(seconds[1], running[1]))],
    )


def _profile(seconds: Sequence[float], nbytes: Sequence[float]) -> Profile:
    """Bytes over the moments of one half, as parts of the half's time."""
    total = sum(seconds) or 1.0
    return tuple(zip((min(before / total, 1.0) for before in accumulate(seconds, initial=0.0)), nbytes)) or (
        (0.0, 0.0),
    )


def _bytes_of_stage(plan: Plan, together: bool) -> tuple[float, float, tuple[list[float], list[float]]]:
    """Bytes of a stage: always held; kept by a micro-batch for its backward; at each moment of its forward and
    backward.

    Args:
        together: True where micro-batches share gathered parameters, and accumulate their gradients.
    """
    line = plan.stage_timeline if together else plan.timeline
    crosses = lambda h: h.start < line.forward < h.stop and h.what != "under way"
    stands = lambda h: (
        h.what in ("parameters", "gradients", "optimizer") or (together and h.what == "gathered" and crosses(h))
    )
    not_crossing = replace(line, allocations=tuple(h for h in line.allocations if not stands(h)))
    totals = not_crossing.totals()
    accumulated = sum(plan.accumulated.values()) if together else 0
    return (
        sum(h.bytes for h in line.allocations if stands(h)) + accumulated,
        sum(h.bytes for h in not_crossing.allocations if crosses(h)),
        (totals[: line.forward], totals[line.forward :]),
    )


def _of_stages(plan: PipelinePlan, beside: bool, steps: Mapping[int, StepsOfStage]) -> Simulation:
    costs = CostModel(Cluster.of(plan.cluster, plan.devices), plan.devices)
    each: dict[str, list[Any]] = {
        name: [] for name in ("forward", "backward", "begin", "end", "fixed", "saved", "running")
    }
    devices = [0] * plan.schedule.groups
    for stage in plan.stages:
        devices[plan.schedule.placement[stage.number]] = stage.devices
        one = stage.plan.price
        two = CostModel(Cluster.of(stage.plan.cluster, stage.devices), stage.devices).plan(stage.plan, 2)
        forward, backward = two.forward - one.forward, two.backward - one.backward
        fixed, saved, running = _bytes_of_stage(stage.plan, together=True)
        begin, end = one.forward - forward, one.backward - backward
        if beside:
            # The messages of a whole step make its first forward and its last backward longer.
            in_time, once = steps.get(stage.number) or (stage.plan.stage_in_time, stage.plan.stage_in_time_once)
            forward, backward = in_time.forward, in_time.total - in_time.forward
            begin, end = once.forward - forward, once.total - once.forward - backward
        if plan.schedule.placement.count(plan.schedule.placement[stage.number]) > 1:
            fixed += stage.plan.stage_schedule.carried_bytes  # under way while another stage of the group works
        values = (
            forward,
            backward,
            max(0.0, begin),
            max(0.0, end),
            fixed,
            saved,
            tuple(((0.0, max(half, default=0.0)),) for half in running),
        )
        for entries, value in zip(each.values(), values):
            entries.append(value)
    sending: dict[tuple[int, int], float] = {}
    for transfer in plan.transfers:
        source, target = transfer.source, transfer.target
        seconds = _sends(plan, transfer, costs)
        if transfer.kind == "parameter":
            each["begin"][target] += seconds
            each["end"][source] += seconds * transfer.gradient
            continue
        for pair in ((source, target), (target, source))[: 1 + transfer.gradient]:
            sending[pair] = sending.get(pair, 0.0) + seconds
    skips = {(source, target) for source, target in sending if target > source + 1}
    return simulate(
        plan.schedule, **each, transfer=lambda *pair: sending.get(pair, 0.0), skips=sorted(skips), devices=devices
    )


def _sends(plan: PipelinePlan, transfer: Transfer, costs: CostModel) -> float:
    """Seconds of a transfer: those of the rank that takes the longest."""
    most = 0.0
    for rank in plan.stages[transfer.source].ranks:
        peers = [peer for peer in plan.peers(transfer, rank) if peer != rank]
        most = max(
            most,
            sum(
                costs.collective(CollectiveKind.SEND, between(costs.cluster, rank, peer), transfer.nbytes)
                for peer in peers
            ),
        )
    return most
