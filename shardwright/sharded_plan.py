"""A plan: a captured model, a strategy per operator, and everything that follows from them.

A plan is a value, made once and without a process group; nothing in it depends on the rank that reads it.

    graph + decisions -> program -> backward -> collectives, price, memory, timeline, fingerprint

Example: a linear operator cut ((8, 1), (1, 1), (1,)) has x [32, 16] as [4, 16] on each of 8 devices, and its weight
[32, 16] whole. The gradient of the weight is all-reduced. A `PipelinePlan` has one `Plan` per stage.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch

from .cluster import Cluster
from .cost.communication_pass import schedule_of
from .cost.communication_schedule import (
    Collective,
    CommunicationSchedule,
    Fusion,
    backward_collectives,
    forward_collectives,
)
from .cost.cost_model import CostModel, Price, StepInTime
from .cost.memory_timeline import Allocation, CountedOptimizer, MemoryTimeline, OptimizerSetting, timeline
from .errors import PlanError
from .graph import Graph
from .layout import Digits, Layout, group_of
from .partition.hybrid_parallel import OwnPrograms, own_programs
from .partition.local_program import (
    TAKEN,
    Decision,
    InputPlacement,
    Instruction,
    LocalOp,
    LocalProgram,
    PlacedValue,
    Redistribute,
    SearchResult,
    made_by,
    read_by,
)
from .partition.padded_dims import true_slice
from .partition.parameter_sharding import OptimizerParallel
from .partition.partitioner import partition
from .partition.rematerialization import BackwardStep, Regather, Region, RegionStarts, regathered_weights, regions_of
from .rules import in_order, ungathered_layouts

__all__ = [
    "Collective",
    "OperatorPlan",
    "OperatorPlans",
    "ParameterPlan",
    "Plan",
    "SavedPlan",
    "backward_collectives",
    "forward_collectives",
    "near",
]


#: The numbers of near names, and of other names where none is near, that an error lists.
NEAR, FEW = 5, 12


def near(name: str, known: Iterable[str]) -> str:
    """The names that an unknown one may stand for, by their last parts too; a few of all where none is near."""
    names = list(dict.fromkeys(known))
    last = lambda path: path.rpartition(".")[2]
    close = get_close_matches(name, names, NEAR)
    ends = set(get_close_matches(last(name), {last(path) for path in names}, NEAR))
    found = list(dict.fromkeys((*close, *(path for path in names if last(path) in ends))))
    if found:
        return ", ".join(found[:NEAR])
    return ", ".join(names[:FEW]) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")


class SavedPlan:
    """Base of all plans: a plan is saved as a JSON file, and loaded from it without its model.

    The file has one line for each operator and each parameter, and the captured graph. `planfile`, which
    knows every kind of plan, registers the functions that write and read files.
    """

    _write: ClassVar[Callable[[SavedPlan, Path], None]]
    _read: ClassVar[Callable[[Path], SavedPlan]]

    def save(self, path: str | Path) -> None:
        """Write the plan to `path`, a JSON file: one line for each operator and parameter, and the captured graph.

        Raises:
            PlanError: the file cannot be written. One that was there stays as it was.

        Example:
            >>> plan.save("plan.json")
        """
        SavedPlan._write(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Any:
        """The plan that `save` wrote to `path`, a `Plan` or a `PipelinePlan`, without its model.

        Every line is checked, and everything that follows from it is computed anew. The plan can be inspected, priced
        and compared. To run it, plan from a model, which takes the file by
        `AutoParallel.load_operator_strategy_file`.

        Raises:
            PlanError: no plan, one of another schema, an operator that is not registered in this process.
            ShardwrightError: an impossible line, with its place and a legal choice.
        """
        return SavedPlan._read(Path(path))

    def describe(self) -> Any:
        """The plan in the field's words, by groups of equal layers: a description, whose text is
        its `str`.

        Example:
            >>> print(plan.describe())
            semi_auto on 8 devices of h100x8, each fed the whole batch
            ...
        """
        # By name: texts about plans are a layer above plans.
        return import_module(".report.description", __package__).describe(self)

    def explain(self, name: str | None = None, *, width: int | None = None) -> None:
        """Print the plan as a table, equal layers once. With a name, print the operators of that module; of one
        operator its cost, its alternatives and the reasons that hold its strategy.

        Args:
            name: an operator or a module, or the end of its path, such as ``q_proj``.
            width: the width of the text, in characters; None: the terminal's, or 100 where there is none.

        Raises:
            PlanError: there is no such operator or module, or there are several that differ.
        """
        import_module(".report.explanations", __package__).tell(self, name, width=width)

    def report(self, path: str | Path, explain: int | None = None) -> None:
        """Write the plan as one HTML file that opens without a network. It needs Jinja2.

        Args:
            path: of the file.
            explain: the number of operators, the most expensive first, whose alternatives are priced; None: three,
                in a large plan while nothing else changes.

        Raises:
            PlanError: the file cannot be written.
        """
        import_module(".report.html_report", __package__).write([self], path, explain=explain)

    def __repr__(self) -> str:
        return import_module(".report.description", __package__).short(self)

    def __str__(self) -> str:
        return import_module(".report.description", __package__).on_a_screen(self)

    def _repr_html_(self) -> str:
        html: str = import_module(".report.html_report", __package__).plan_html(self)
        return html

    @staticmethod
    def register_files(write: Callable[[Any, Path], None], read: Callable[[Path], Any]) -> None:
        """Register the functions that write plans to a path and read them from one."""
        SavedPlan._write, SavedPlan._read = staticmethod(write), staticmethod(read)


@dataclass(frozen=True, repr=False)
class OperatorPlan:
    """One operator of the user's program, as planned.

    Attributes:
        name: the attribute path of the operator's `shardwright.shard` mark, or its name in the graph.
        op: its plain name, such as "matmul".
        module, source: the place of the call: the module's dotted path, ``file.py:41``.
        in_strategy: the cuts of each tensor input; where a product gathers the contracted dim of both operands, those
            before the gather. `in_layouts` are those of its run.
        out_strategy: the cuts of each output as it is handed on.
        in_layouts, out_layouts: the layouts, partial sums completed.
        cause: "mark", "batch", "follow", "whole", "propagated" or "search".
        note: a remark for the user, or None.
    """

    name: str
    op: str
    module: str
    source: str
    in_strategy: tuple[tuple[int, ...], ...]
    out_strategy: tuple[tuple[int, ...], ...]
    in_layouts: tuple[Layout, ...]
    out_layouts: tuple[Layout, ...]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]
    in_names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    cause: str
    note: str | None

    def __repr__(self) -> str:
        at = "".join(f", {where}" for where in (self.module, self.source) if where and where != self.name)
        return f"<operator {self.name} ({self.op}{at}): {self.in_strategy} -> {self.out_strategy}, by {self.cause}>"

    def _repr_html_(self) -> str:
        html: str = import_module(".report.html_report", __package__).operator_html(self)
        return html

    def local_shapes(self, rank: int) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """Shapes of the slices on `rank`, padding included: (inputs, outputs)."""
        return (
            tuple(layout.local_shape(layout.padded(s)) for layout, s in zip(self.in_layouts, self.in_shapes)),
            tuple(layout.local_shape(layout.padded(s)) for layout, s in zip(self.out_layouts, self.out_shapes)),
        )


class OperatorPlans(tuple[OperatorPlan, ...]):
    """The operators of a plan: a tuple whose repr is one line, and a table in a notebook."""

    __slots__ = ()

    def __repr__(self) -> str:
        names = ", ".join(operator.name for operator in self[:FEW])
        more = f" and {len(self) - FEW} more" if len(self) > FEW else ""
        return f"<{len(self)} operator{'s' * (len(self) != 1)}: {names}{more}>"

    def _repr_html_(self) -> str:
        html: str = import_module(".report.html_report", __package__).operators_html(self)
        return html


@dataclass(frozen=True)
class ParameterPlan:
    """The placement of a parameter.

    Attributes:
        shape: of the whole parameter.
        layout: the layout in which its operator consumes it.
        storage: the layout in which it is stored: with ZeRO/FSDP sharding (optimizer parallel) cut further, over
            replicas.
        note: the reason why optimizer parallel does not cut it, where a user might expect it to; else None.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout
    storage: Layout
    trainable: bool
    note: str | None = None

    def slice(self, rank: int) -> tuple[slice, ...]:
        """The part of the whole parameter on `rank`."""
        return true_slice(self.storage, self.shape, rank)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of that part."""
        return tuple(s.stop - s.start for s in self.slice(rank))


@dataclass(frozen=True, repr=False)
class Plan(CountedOptimizer, SavedPlan):
    """The strategy and placement of every operator on every device; made by `shardwright.plan`.

    Attributes:
        comm_memory: bytes by which messages under way may raise the peak; None: the default of the schedule.

    Example:
        >>> plan = sw.plan(net, (x,), devices=8)
        >>> plan.operator("0").in_strategy
        ((8, 1), (1, 1), (1,))
        >>> plan.parameters["0.weight"].local_shape(3)
        (32, 16)
    """

    graph: Graph
    devices: int
    mode: str
    input_placement: InputPlacement
    decisions: dict[str, Decision]
    batch_dims: dict[str, int]
    stored: dict[str, Layout] | None = None
    hsdp: OptimizerParallel | None = None
    own: OwnPrograms | None = None
    cluster: Cluster | None = None
    found: SearchResult | None = None
    optimizer: OptimizerSetting = None
    comm_memory: float | None = None

    @cached_property
    def program(self) -> LocalProgram:
        """The program that all ranks run: local operators and redistributions."""
        if self.own is not None:
            return own_programs(self.graph, self.devices, self.input_placement, self.own)
        return partition(
            self.graph, self.decisions, self.input_placement, self.devices, self.batch_dims, self.stored, self.hsdp
        )

    @property
    def draws(self) -> bool:
        """True where it draws random numbers."""
        return self.program.seed is not None

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The parts of the program that are dropped in the forward and recomputed in the backward."""
        return regions_of(self.graph, self.program)

    @cached_property
    def operators(self) -> OperatorPlans:
        """The operators of the user's program, in order."""
        return OperatorPlans(self._operator(d) for d in self.decisions.values())

    def _operator(self, decision: Decision) -> OperatorPlan:
        op = decision.op
        tensors = [v for v in op.outputs if v is not None]
        outs = decision.out or tuple(decision.output_layout(i).without_partial() for i in range(len(tensors)))
        return OperatorPlan(
            op.name,
            op.kind,
            op.module,
            op.source,
            _in_strategy(decision),
            tuple(layout.cuts for layout in outs),
            tuple(decision.input_layout(i) for i in range(len(op.inputs))),
            outs,
            tuple(v.shape for v in op.inputs),
            tuple(v.shape for v in tensors),
            tuple(v.name for v in op.inputs),
            tuple(v.dtype for v in (*op.inputs, *tensors)),
            decision.cause,
            decision.note,
        )

    def operator(self, name: str) -> OperatorPlan:
        """An operator by its mark's attribute path, its name, the path of a module that calls a single one, or the end
        of such a path.

        Raises:
            PlanError: there is none, or several.
        """
        for operator in self.operators:
            if operator.name == name:
                return operator
        inside = [o for o in self.operators if o.module == name]
        if len(inside) > 1:  # a batch norm also counts batches
            buffers = set(self.graph.buffers)
            inside = [o for o in inside if not (o.in_names and buffers.issuperset(o.in_names))] or inside
        if len(inside) == 1:
            return inside[0]
        ends = [o for o in self.operators if f".{name}" in (o.name[-len(name) - 1 :], o.module[-len(name) - 1 :])]
        if not inside and len(ends) == 1:
            return ends[0]
        found = inside or ends
        raise PlanError(
            f"no operator is called {name!r}"
            if not found
            else f"the module {name!r} calls {len(inside)} operators"
            if inside
            else f"{name!r} is the end of {len(ends)} names",
            legal=", ".join(o.name for o in found) or near(name, (o.name for o in self.operators)),
        )

    @cached_property
    def parameters(self) -> dict[str, ParameterPlan]:
        """Every parameter and buffer by its dotted name."""
        program = self.program
        out = {}
        for table in (program.parameters, program.buffers):
            for name, placed in table.items():
                value, note = placed.value, program.stored[name].note if name in program.stored else None
                shape = (self.graph.parameters.get(name) or value).shape
                out[name] = ParameterPlan(
                    name, shape, program.used.get(name, placed.layout), placed.layout, value.requires_grad, note
                )
        for alias, name in self.graph.aliases.items():
            if name in out:
                out[alias] = out[name]
        return out

    @property
    def notes(self) -> tuple[str, ...]:
        """Limitations that a user would not expect, and the mode whose plan was cheaper than what the search found; a
        line each."""
        taken = () if self.found is None else (note for note in self.found.notes if note.startswith(TAKEN))
        return (*self.program.notes, *taken)

    def collectives(self, rank: int) -> tuple[Collective, ...]:
        """Every collective in which `rank` takes part, in program order: forward, then backward.

        Raises:
            PlanError: no such rank.
        """
        if not 0 <= rank < self.devices:
            raise PlanError(f"rank {rank} is outside the {self.devices} devices")
        return tuple(replace(c, ranks=group_of(rank, digits)) for c, digits in self._collectives)

    @cached_property
    def _collectives(self) -> tuple[tuple[Collective, Digits], ...]:
        forward = [c for i in self.program.instructions for c in forward_collectives(i)]
        backward = [c for i in self.backward for c in backward_collectives(i)]
        return (*forward, *backward)

    @cached_property
    def backward(self) -> tuple[BackwardStep, ...]:
        """The instructions that a gradient reaches from the outputs, in the order in which their backwards run.

        A `Regather` comes before the first backward that needs a weight not saved from the forward, a
        `RecomputedInstruction` before the first that needs a dropped tensor.
        """
        program, known = self.program, {}
        for placed in (*program.inputs, *program.parameters.values(), *program.buffers.values()):
            known[placed.name] = placed
        for i in program.instructions:
            known.update((o.name, o) for o in made_by(i))
        wanted = regathered_weights(program)
        reached = {o.name for o in program.outputs if isinstance(o, PlacedValue) and o.value.requires_grad}
        out: list[BackwardStep] = []
        gathered = {
            name for region in self.regions for name in region.dropped
        }  # such a weight is gathered with its region
        starts = RegionStarts(self.regions, program.instructions)
        for place, i in reversed(list(enumerate(program.instructions))):
            if any(o.name in reached for o in made_by(i)):
                moves = [move for move in wanted.get(place, ()) if move.target.name not in gathered]
                out += [*(Regather(move, i.operator) for move in moves), *starts.before(place, i.operator), i]
                gathered.update(move.target.name for move in moves)
                reached.update(n for n in read_by(i) if n in known and known[n].value.requires_grad)
        return tuple(out)

    @cached_property
    def sent(self) -> int:
        """Bytes that a rank sends in one step, forward and backward."""
        return sum(c.sent for c, _ in self._collectives)

    @cached_property
    def price(self) -> Price:
        """The price of a step on the plan's cluster, by parts."""
        return CostModel(Cluster.of(self.cluster, self.devices), self.devices).plan(self)

    @cached_property
    def in_time(self) -> StepInTime:
        """A step whose messages travel beside computation, as `schedule` says; see `Price.elapsed`."""
        return CostModel(Cluster.of(self.cluster, self.devices), self.devices).in_time(self, self.schedule)

    @cached_property
    def stage_in_time(self) -> StepInTime:
        """The same of one micro-batch of a stage of a pipeline, without the work that is done once a step."""
        costs = CostModel(Cluster.of(self.cluster, self.devices), self.devices)
        return costs.in_time(self, self.stage_schedule, once=False)

    @cached_property
    def stage_in_time_once(self) -> StepInTime:
        """The same with the work that is done once a step."""
        return CostModel(Cluster.of(self.cluster, self.devices), self.devices).in_time(self, self.stage_schedule)

    @property
    def cost(self) -> float:
        """Seconds of one step by `price`, as a sum; plans are compared by it, and bounds are proved of it."""
        return self.price.total

    @property
    def bound(self) -> float | None:
        """A lower bound of the price of any other plan, proved by the search that made this plan
        (`SearchResult.bound`); None: nothing was proved.

        A search prices a value's consumers with one shared redistribution (`shared_values`). Where they share several,
        the program takes less: `cost` is below the price, and may be below the bound.
        """
        bound = None if self.found is None or self.found.bound is None else min(self.found.bound, self._price)
        rounded = bound is not None and self.cost < bound <= self.cost * (1 + 1e-9)  # the same seconds in another order
        return self.cost if rounded else bound

    @property
    def _price(self) -> float:
        return self.cost if self.found is None else max(self.found.cost, self.cost)

    @property
    def gap(self) -> float | None:
        """The distance of the plan's price from the bound, relative to the price; None without a bound."""
        return None if self.bound is None else (self._price - self.bound) / self._price if self._price else 0.0

    def memory(self, rank: int) -> dict[str, int]:
        """Bytes on `rank`, by kind: a view of `timeline`, whose sums of tensors they are.

        Returns:
            "parameters": parameters and buffers, as stored.
            "gradients": as the optimizer's step reads them.
            "optimizer": the state of `counted_optimizer`, stored like the parameters.
            "activations": the tensors of one forward that are saved for its backward, tensors internal to operators
            included, and its outputs; of a forward alone, the most bytes at one time.
            "recomputed", with recomputation: the most recomputed bytes at one time.
            "gathered", with optimizer parallel or mixed precision: the weights gathered, or cast to the computation's
            dtype, at one time: all of them or, where they are resharded after the forward, the largest.
            "under way", where messages raise the peak: the bytes by which they do.
        """
        counted = self.counted_optimizer
        walked = self.unscheduled if counted is self.optimizer else timeline(self, counted)
        always = ("parameters", "gradients", "optimizer", "activations")
        known = (*always, "recomputed", "gathered")
        by_kind = walked.by_kind
        out = {kind: by_kind.get(kind, 0) for kind in known if kind in always or kind in by_kind}
        if more := round(self.peak - self.unscheduled.peak):
            out["under way"] = more
        return out

    @cached_property
    def gathered_once(self) -> frozenset[str]:
        """Names of the gathered or cast weights that the micro-batches of one step share.

        Such a weight is saved for the backward and has one use.
        """
        moves = [i for i in self.program.instructions if isinstance(i, Redistribute) and i.cause == "parameter"]
        uses = Counter(i.source.name for i in moves)
        stored = {i.name for i in self.program.parameters.values()}
        dropped = {name for region in self.regions for name in region.dropped}
        return frozenset(
            i.target.name
            for i in moves
            if _copied(i)
            and not i.reshard_after_forward
            and i.target.name not in dropped
            and uses[i.source.name] == 1
            and i.source.name in stored
        )

    def once(self, instruction: BackwardStep, back: bool = False) -> bool:
        """True where an instruction runs once a step, for any number of micro-batches.

        These are the gather or cast of a weight that micro-batches share, and the sum of a gradient over the replicas
        of its parameter. The gradient of a shared weight is scattered once a step where gradients are accumulated
        whole (optimizer level 1), else after every micro-batch.

        Args:
            back: True: the backward of the instruction, False: its forward.
        """
        if not isinstance(instruction, Redistribute) or instruction.cause != "parameter":
            return False
        if back and instruction.forward.steps and self.hsdp is not None and not self.hsdp.accumulates_whole:
            return False
        return instruction.target.name in self.gathered_once or instruction.forward.is_identity

    @cached_property
    def accumulated(self) -> dict[str, int]:
        """Weight -> the bytes of its whole gradient, for the weights that micro-batches share and whose gradients they
        accumulate whole (as under optimizer level 1), in the dtype in which the parameter is stored."""
        if self.hsdp is not None and not self.hsdp.accumulates_whole:
            return {}
        return {
            i.target.name: i.target.local_bytes // i.target.value.dtype.itemsize * i.source.value.dtype.itemsize
            for i in self.program.instructions
            if isinstance(i, Redistribute)
            and i.target.name in self.gathered_once
            and i.forward.steps
            and i.source.value.requires_grad
        }

    @cached_property
    def unscheduled(self) -> MemoryTimeline:
        """The memory of a device at every moment of a step that waits for each message where it issues it."""
        return timeline(self, self.optimizer)

    @cached_property
    def stage_unscheduled(self) -> MemoryTimeline:
        """The same of a stage of a pipeline in one micro-batch: weights that micro-batches share stay gathered, and the
        part of a gradient that one of them has scattered is added to those before."""
        line, once = self.unscheduled, self.gathered_once
        allocations = [
            replace(a, stop=len(line.moments)) if a.what == "gathered" and a.name in once else a
            for a in line.allocations
        ]
        for moment, entry in enumerate(self.backward, line.forward):
            if isinstance(entry, Redistribute) and self._scatters_each(entry):
                part = entry.source
                allocations.append(Allocation("backward", part.name, moment, moment + 1, part.local_bytes))
        return replace(line, allocations=tuple(allocations))

    def _scatters_each(self, move: Redistribute) -> bool:
        """True where every micro-batch scatters the gradient of a weight."""
        return move.cause == "parameter" and bool(move.forward.collectives) and not self.once(move, back=True)

    @cached_property
    def schedule(self) -> CommunicationSchedule:
        """The moments at which each collective is issued and waited for, on a library such as NCCL."""
        return self._scheduled(True, None, None, False)

    @cached_property
    def stage_schedule(self) -> CommunicationSchedule:
        """The same for a stage of a pipeline, in one micro-batch."""
        return self._scheduled(True, None, None, True)

    def scheduled(self, library: bool, fusion: Fusion, order: Sequence[str], stage: bool) -> CommunicationSchedule:
        """The moments at which each collective is issued and waited for.

        Args:
            library: True where a library such as NCCL carries the messages, False on Gloo.
            fusion: the buckets of sums of gradients.
            order: names of the trained parameters in the order of the model.
            stage: True for a stage of a pipeline.
        """
        if library and fusion == Fusion():
            return self.stage_schedule if stage else self.schedule
        return self._scheduled(library, fusion, order, stage)

    def _scheduled(
        self, library: bool, fusion: Fusion | None, order: Sequence[str] | None, stage: bool
    ) -> CommunicationSchedule:
        cluster = Cluster.of(self.cluster, self.devices)
        return schedule_of(
            self.program,
            self.backward,
            (self.stage_unscheduled if stage else self.unscheduled) if library else None,
            scatters=self.hsdp is not None,
            allowance=self.comm_memory,
            limit=None if self.found is None else self.found.limit,
            fusion=fusion,
            order=order,
            several_hosts=lambda digits: any(units > 1 for units in cluster.units(digits)[1:]),
            library=library,
            stage=stage,
            outside=self.gathered_once if stage else (),
            accumulates=self.hsdp is None or self.hsdp.accumulates_whole,
        )

    @cached_property
    def timeline(self) -> MemoryTimeline:
        """The memory of a device at every moment of a step, with the messages under way."""
        return replace(self.unscheduled, allocations=(*self.unscheduled.allocations, *self.schedule.allocations))

    @cached_property
    def stage_timeline(self) -> MemoryTimeline:
        """The same of a stage of a pipeline, in one micro-batch."""
        line = self.stage_unscheduled
        return replace(line, allocations=(*line.allocations, *self.stage_schedule.allocations))

    @property
    def peak(self) -> float:
        """The most bytes that a device holds at any moment of a step, messages under way included; a limit of memory
        applies to it."""
        return self.timeline.peak

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of everything that all ranks must agree on."""
        return short_hash(self._lines())

    def _lines(self) -> Iterator[str]:
        level = "" if self.hsdp is None else f" {self.hsdp.optimizer_level}"
        yield f"{self.devices} {self.mode}{level}" + ("" if self.comm_memory is None else f" {self.comm_memory}")
        for placed in (*self.program.inputs, *self.program.parameters.values(), *self.program.buffers.values()):
            yield f"{placed.name} {placed.value.shape} {placed.value.dtype} {placed.layout}"
        for i in self.program.instructions:
            if isinstance(i, LocalOp):
                yield f"{i.op.name} {i.target} {i.args} {sorted(i.kwargs.items(), key=str)}"
            else:
                yield (
                    f"{i.source.name} {i.forward} {i.backward}"
                    + (" again" if getattr(i, "reshard_after_forward", False) else "")
                    + (
                        f" {i.dtype} {i.sums}"
                        if isinstance(i, Redistribute) and i.target.value.master is not None
                        else ""
                    )
                )
        yield from map(str, self.regions)


def short_hash(lines: Iterable[str]) -> str:
    """A hash of the lines, in 16 digits."""
    text = hashlib.sha256()
    for line in lines:
        text.update(line.encode())
    return text.hexdigest()[:16]


def _copied(instruction: Instruction) -> bool:
    """True where an instruction redistributes a parameter from its storage layout to its use, or casts it from
    its storage dtype."""
    return (
        isinstance(instruction, Redistribute)
        and instruction.cause == "parameter"
        and (instruction.casts or bool(instruction.forward.collectives))
    )


def _in_strategy(decision: Decision) -> tuple[tuple[int, ...], ...]:
    """The cuts of an operator's inputs, as its mark gave them where a product gathers the contracted dim of both."""
    bound, mark, cuts = decision.bound, decision.op.mark, decision.bound.in_strategy(decision.assignment)
    if mark is None:
        return cuts
    ungathered = ungathered_layouts(bound, in_order(bound, mark.in_strategy, mark.order), decision.assignment.devices)
    if ungathered is None or cuts[:2] != ((ungathered[0].cuts[0], 1), (1, ungathered[1].cuts[1])):
        return cuts
    return (ungathered[0].cuts, ungathered[1].cuts, *cuts[2:])
