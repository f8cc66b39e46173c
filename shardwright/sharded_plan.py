"""A plan: a captured model, a strategy per operator, and what follows from them.

A value: made once, without a process group, for any number of devices; nothing in it depends on which rank reads it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from .cluster import Cluster
from .cost.cost_model import CostModel, Price
from .cost.memory_timeline import MemoryTimeline, optimizer_bytes, timeline
from .errors import PlanError
from .graph import Graph, Value
from .layout import Layout, group_of
from .partition.local_program import (
    Decision,
    GlobalExtreme,
    InputPlacement,
    LocalOp,
    LocalProgram,
    PlacedValue,
    Redistribute,
    SearchResult,
    made_by,
    read_by,
)
from .partition.parameter_sharding import OptimizerParallel
from .partition.partitioner import partition
from .partition.rank_local import OwnPrograms, own_programs
from .partition.rematerialization import RecomputedInstruction, Regather, Region, regions_of, started, wanted_again
from .partition.uneven import true_slice
from .redistribution import Redistribution

__all__ = ["Collective", "OperatorPlan", "ParameterPlan", "Plan", "SavedPlan"]


class SavedPlan:
    """Base of all plans: a plan is saved as a JSON file, and loaded from it without its model.

    The file has one line for each operator and each parameter, and the captured graph. `document_files`, which knows
    every kind of plan, registers how files are written and read.
    """

    _write: ClassVar[Callable[[SavedPlan, Path], None]]
    _read: ClassVar[Callable[[Path], SavedPlan]]

    def save(self, path: str | Path) -> None:
        """Write the plan as a JSON file: one line for each operator and parameter, and the captured graph.

        Example:
            >>> plan.save("plan.json")  # doctest: +SKIP
        """
        SavedPlan._write(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Any:
        """Load a plan that `save` wrote, a `Plan` or a `PipelinePlan`, without its model: every line is checked, and
        everything that follows from it is computed anew. The plan can be looked at, priced and compared; what runs is
        planned from a model, which takes the file by `AutoParallel.load_operator_strategy_file`.

        Raises:
            PlanError: no plan, one of another schema, an operator that is not registered in this process.
            ShardwrightError: an impossible line, with where it stands and what would be legal.
        """
        return SavedPlan._read(Path(path))

    @staticmethod
    def register_files(write: Callable[[Any, Path], None], read: Callable[[Path], Any]) -> None:
        """Register how plans are written to a path and read from one."""
        SavedPlan._write, SavedPlan._read = staticmethod(write), staticmethod(read)


@dataclass(frozen=True)
class OperatorPlan:
    """One operator of the user's program, as planned.

    Attributes:
        name: the mark's attribute path, or the operator's name in the graph.
        op: its plain name, such as "matmul".
        module, source: where it is called: the module's dotted path, ``file.py:41``.
        in_strategy: the cuts of each tensor input.
        out_strategy: the cuts of each output as it is handed on.
        in_layouts, out_layouts: the layouts, partial sums completed.
        cause: "mark", "batch", "follow", "whole", "propagated" or "search".
        note: what the user should know, or None.
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
    dtypes: tuple[Any, ...]
    cause: str
    note: str | None

    def local_shapes(self, rank: int) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """Shapes of the slices that `rank` works on, padding included: (inputs, outputs)."""
        return (
            tuple(layout.local_shape(layout.padded(s)) for layout, s in zip(self.in_layouts, self.in_shapes)),
            tuple(layout.local_shape(layout.padded(s)) for layout, s in zip(self.out_layouts, self.out_shapes)),
        )


@dataclass(frozen=True)
class ParameterPlan:
    """Where a parameter lies.

    Attributes:
        shape: of the whole parameter.
        layout: the layout in which its operator uses it.
        storage: the layout in which it is stored: with optimizer parallel cut further, over replicas.
        note: why optimizer parallel does not cut it, where it might have been expected to; else None.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout
    storage: Layout
    trainable: bool
    note: str | None = None

    def slice(self, rank: int) -> tuple[slice, ...]:
        """The part of the whole parameter that lies on `rank`."""
        return true_slice(self.storage, self.shape, rank)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of that part."""
        return tuple(s.stop - s.start for s in self.slice(rank))


@dataclass(frozen=True)
class Collective:
    """One collective that a rank takes part in.

    Attributes:
        op: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
        ranks: its group, ascending.
        shape: of the rank's own input to it.
        bytes: of that input.
        sent: bytes that the rank must send: 2(n−1)/n of the input for an all-reduce, (n−1)/n for a reduce-scatter
            and an all-to-all, n−1 times the input for an all-gather.
        phase: "forward", "backward", "gradient" (a parameter's), or "storage" (from a parameter's storage to its use).
        cause: "operator", "conversion" or "parameter".
        operator: the operator that causes it.
        again: it is the backward's, of what was not kept from the forward: a weight, or what is recomputed.
    """

    op: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    bytes: int
    sent: int
    phase: str
    cause: str
    operator: str
    again: bool = False


@dataclass(frozen=True)
class Plan(SavedPlan):
    """What every operator does on every device. See `shardwright.plan` for how one is made."""

    graph: Graph
    devices: int
    mode: str
    fed: InputPlacement
    decisions: dict[str, Decision]
    carries: dict[str, int]
    stored: dict[str, Layout] | None = None
    hsdp: OptimizerParallel | None = None
    own: OwnPrograms | None = None
    cluster: Cluster | None = None
    found: SearchResult | None = None
    optimizer: Any = "adam"

    @cached_property
    def routed(self) -> LocalProgram:
        """The program that all ranks run: local operators and conversions."""
        if self.own is not None:
            return own_programs(self.graph, self.devices, self.fed, self.own)
        return partition(self.graph, self.decisions, self.fed, self.devices, self.carries, self.stored, self.hsdp)

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return self.routed.seed is not None

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The parts of the program that are dropped in the forward and computed again in the backward."""
        return regions_of(self.graph, self.routed)

    @cached_property
    def operators(self) -> tuple[OperatorPlan, ...]:
        """The operators of the user's program, in order."""
        return tuple(self._operator(d) for d in self.decisions.values())

    def _operator(self, decision: Decision) -> OperatorPlan:
        op, bound = decision.op, decision.bound
        tensors = [v for v in op.outputs if v is not None]
        outs = decision.out or tuple(decision.left(i).without_partial() for i in range(len(tensors)))
        return OperatorPlan(
            op.name,
            op.kind,
            op.module,
            op.source,
            bound.in_strategy(decision.assignment),
            tuple(layout.cuts for layout in outs),
            tuple(decision.wanted(i) for i in range(len(op.inputs))),
            outs,
            tuple(v.shape for v in op.inputs),
            tuple(v.shape for v in tensors),
            tuple(v.name for v in op.inputs),
            tuple(v.dtype for v in (*op.inputs, *tensors)),
            decision.cause,
            decision.note,
        )

    def operator(self, name: str) -> OperatorPlan:
        """An operator by its mark's attribute path, its name, or the path of a module that calls just one.

        Raises:
            PlanError: there is none, or several.
        """
        for operator in self.operators:
            if operator.name == name:
                return operator
        inside = [o for o in self.operators if o.module == name]
        if len(inside) > 1:  # a batch norm counts batches beside
            buffers = set(self.graph.buffers)
            inside = [o for o in inside if not (o.in_names and buffers.issuperset(o.in_names))] or inside
        if len(inside) == 1:
            return inside[0]
        raise PlanError(
            f"no operator is called {name!r}" if not inside else f"the module {name!r} calls {len(inside)} operators",
            legal=", ".join(o.name for o in (inside or self.operators)),
        )

    @cached_property
    def parameters(self) -> dict[str, ParameterPlan]:
        """Every parameter and buffer by its dotted name."""
        routed = self.routed
        out = {}
        for table in (routed.parameters, routed.buffers):
            for name, instance in table.items():
                value, note = instance.value, routed.stored[name].note if name in routed.stored else None
                shape = (self.graph.parameters.get(name) or value).shape
                out[name] = ParameterPlan(
                    name, shape, routed.used.get(name, instance.layout), instance.layout, value.requires_grad, note
                )
        for alias, name in self.graph.aliases.items():
            if name in out:
                out[alias] = out[name]
        return out

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be done as one might expect, a line each."""
        return self.routed.notes

    def collectives(self, rank: int) -> tuple[Collective, ...]:
        """Every collective that `rank` takes part in, in the order of the program: forward, then backward."""
        if not 0 <= rank < self.devices:
            raise PlanError(f"rank {rank} is outside the {self.devices} devices")
        return tuple(replace(c, ranks=group_of(rank, digits)) for c, digits in self._collectives)

    @cached_property
    def _collectives(self) -> tuple[tuple[Collective, Any], ...]:
        forward = [c for i in self.routed.instructions for c in forward_collectives(i)]
        backward = [c for i in self.backward for c in backward_collectives(i)]
        return (*forward, *backward)

    @cached_property
    def backward(self) -> tuple[Any, ...]:
        """The instructions that a gradient reaches from the outputs, in the order in which their backwards run; `Again`
        before the first that wants a weight which was not kept, `Recomputed` before the first that wants what is."""
        routed, known = self.routed, {}
        for instance in (*routed.inputs, *routed.parameters.values(), *routed.buffers.values()):
            known[instance.name] = instance
        for i in routed.instructions:
            known.update((o.name, o) for o in made_by(i))
        wanted = wanted_again(routed)
        reached = {o.name for o in routed.outputs if isinstance(o, PlacedValue) and o.value.requires_grad}
        out: list[Any] = []
        there = {name for region in self.regions for name in region.dropped}  # gathered with all that is computed again
        begun: set[int] = set()
        for place, i in reversed(list(enumerate(routed.instructions))):
            if any(o.name in reached for o in made_by(i)):
                moves = [move for move in wanted.get(place, ()) if move.target.name not in there]
                out += [
                    *(Regather(move, i.operator) for move in moves),
                    *started(place, i.operator, self.regions, begun, routed.instructions),
                    i,
                ]
                there.update(move.target.name for move in moves)
                reached.update(n for n in read_by(i) if n in known and known[n].value.requires_grad)
        return tuple(out)

    @cached_property
    def sent(self) -> int:
        """Bytes that a rank sends in one step, forward and backward."""
        return sum(c.sent for c, _ in self._collectives)

    @cached_property
    def price(self) -> Price:
        """What a step takes on the plan's cluster, and where."""
        return CostModel(Cluster.of(self.cluster, self.devices), self.devices).plan(self)

    @property
    def cost(self) -> float:
        """What plans are compared by: seconds of one step, as `price` reckons them."""
        return self.price.total

    @property
    def bound(self) -> float | None:
        """What any other plan is priced at least by the search that made this one (`Found.bound`); None: nothing was
        proved. Where the search prices this plan above `cost`, as much below `cost` as its bound is below its own
        price: the search has proved no more."""
        if self.found is None or self.found.bound is None:
            return None
        above = self.found.cost > self.cost
        return (
            min(self.found.bound * self.cost / self.found.cost, self.cost)
            if above
            else min(self.found.bound, self.cost)
        )

    @property
    def gap(self) -> float | None:
        """How far `cost` is above the bound, relative to it; None without a bound."""
        return None if self.bound is None else (self.cost - self.bound) / self.cost if self.cost else 0.0

    def memory(self, rank: int) -> dict[str, int]:
        """Bytes on `rank`, by kind.

        "parameters": they and buffers, as they are stored; "gradients": as an optimizer's step finds them; "optimizer":
        the state of the plan's (see `memory.optimizer_bytes`), stored like the parameters;
        "activations": what operators and conversions make in one forward, and is kept; where some is dropped and
        computed again, "recomputed": the most of it that is there at one time; with optimizer parallel or mixed
        precision "gathered": the weights that are whole, or in the type of the computation, at one time: all of them
        or, where they are not kept for the backward, the largest.
        """
        parameters = sum(i.local_bytes for t in (self.routed.parameters, self.routed.buffers) for i in t.values())
        gradients = sum(i.local_bytes for i in self.routed.parameters.values() if i.value.requires_grad)
        made = sum(
            o.local_bytes
            for i in self.routed.instructions
            if isinstance(i, LocalOp)
            for o in i.outputs
            if o is not None
        )
        moves = [i for i in self.routed.instructions if not isinstance(i, LocalOp)]
        moved = sum(i.target.local_bytes for i in moves if i.forward.steps and not _copied(i))
        dropped = [sum(self._dropped(region)) for region in self.regions]
        state = sum(
            i.local_bytes // i.value.dtype.itemsize for i in self.routed.parameters.values() if i.value.requires_grad
        ) * optimizer_bytes(self.optimizer)
        out = {
            "parameters": parameters,
            "gradients": gradients,
            "optimizer": int(state),
            "activations": made + moved - sum(dropped),
        }
        if dropped:
            out["recomputed"] = max(dropped)
        regained = {name for region in self.regions for name in region.dropped}
        gathered = [(i.target.local_bytes, i.again or i.target.name in regained) for i in moves if _copied(i)]
        if gathered:
            out["gathered"] = sum(size for size, again in gathered if not again) + max(
                (size for size, again in gathered if again), default=0
            )
        return out

    @cached_property
    def gathered_once(self) -> frozenset[str]:
        """Of the weights that are brought from their storage, or its type, to their use, those that micro-batches of
        one step
        share: they are kept for the backward, and have one use. By the names of the instances that the program
            gathers."""
        moves = [i for i in self.routed.instructions if isinstance(i, Redistribute) and i.cause == "parameter"]
        uses = Counter(i.source.name for i in moves)
        stored = {i.name for i in self.routed.parameters.values()}
        dropped = {name for region in self.regions for name in region.dropped}
        return frozenset(
            i.target.name
            for i in moves
            if _copied(i)
            and not i.again
            and i.target.name not in dropped
            and uses[i.source.name] == 1
            and i.source.name in stored
        )

    def once(self, instruction: Any) -> bool:
        """Whether an instruction is due once a step, however many micro-batches that has: the gather or cast of a
        weight that they share, and the sum of a gradient over the devices that hold its parameter alike."""
        if not isinstance(instruction, Redistribute) or instruction.cause != "parameter":
            return False
        return instruction.target.name in self.gathered_once or instruction.forward.is_identity

    @cached_property
    def timeline(self) -> MemoryTimeline:
        """What a device holds at every moment of a step: each tensor for as long as somebody needs it."""
        return timeline(self, self.optimizer)

    @property
    def peak(self) -> float:
        """The most bytes that a device holds at any moment of a step; what a limit of memory is about."""
        return self.timeline.peak

    def _dropped(self, region: Region) -> Iterator[int]:
        """Bytes of what a region drops; what a conversion without a step hands on is there once."""
        made = {o.name: (i, o) for i in map(self.routed.instructions.__getitem__, region.again) for o in made_by(i)}
        seen: set[str] = set()
        for name in region.dropped:
            while (
                name in made and not isinstance(i := made[name][0], LocalOp) and not i.forward.steps and not _copied(i)
            ):
                name = i.source.name
            if name in made and name not in seen and not _copied(made[name][0]):
                seen.add(name)
                yield made[name][1].local_bytes

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of everything that all ranks must agree on."""
        return short_hash(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.devices} {self.mode}" + (f" {self.hsdp.optimizer_level}" if self.hsdp is not None else "")
        for instance in (*self.routed.inputs, *self.routed.parameters.values(), *self.routed.buffers.values()):
            yield f"{instance.name} {instance.value.shape} {instance.value.dtype} {instance.layout}"
        for i in self.routed.instructions:
            if isinstance(i, LocalOp):
                yield f"{i.op.name} {i.target} {i.args} {sorted(i.kwargs.items(), key=str)}"
            else:
                yield (
                    f"{i.source.name} {i.forward} {i.backward}"
                    + (" again" if getattr(i, "again", False) else "")
                    + (
                        f" {i.dtype} {i.sums}"
                        if isinstance(i, Redistribute) and i.target.value.master is not None
                        else ""
                    )
                )
        yield from map(str, self.regions)


def short_hash(lines: Iterable[str]) -> str:
    """What tells texts apart, in 16 digits."""
    text = hashlib.sha256()
    for line in lines:
        text.update(line.encode())
    return text.hexdigest()[:16]


def _copied(instruction: Any) -> bool:
    """Whether an instruction brings a parameter from its storage, or from its type there, to its use."""
    return (
        isinstance(instruction, Redistribute)
        and instruction.cause == "parameter"
        and (instruction.casts or bool(instruction.forward.collectives))
    )


def conversion_collectives(
    steps: Redistribution,
    shape: tuple[int, ...],
    value: Value,
    phase: str,
    cause: str,
    operator: str,
    producer: str = "",
) -> Iterator[tuple[Collective, Any]]:
    """The collectives of one conversion of a value whose local shape is `shape` at its start.

    A step that completes a sum is caused by the operator that left it open: `producer`, in the forward.
    """
    for step in steps.steps:
        if step.communicates:
            numel = 1
            for size in shape:
                numel *= size
            nbytes = numel * value.dtype.itemsize
            completes = step.reduces and cause != "parameter"
            yield (
                Collective(
                    step.kind,
                    (),
                    shape,
                    nbytes,
                    step.sent(nbytes),
                    phase,
                    "operator" if completes else "conversion" if cause == "operator" else cause,
                    producer if completes and producer else operator,
                ),
                step.digits,
            )
        shape = step.local_shape_after(shape)


def forward_collectives(instruction: Any) -> Iterator[tuple[Collective, Any]]:
    """What an instruction communicates in the forward."""
    if not isinstance(instruction, LocalOp):
        source = instruction.source
        cause = "operator" if isinstance(instruction, GlobalExtreme) else instruction.cause
        phase = "storage" if cause == "parameter" else "forward"
        yield from conversion_collectives(
            instruction.forward,
            source.local_shape,
            instruction.target.value,
            phase,
            cause,
            instruction.operator,
            getattr(instruction, "producer", ""),
        )


def backward_collectives(instruction: Any) -> Iterator[tuple[Collective, Any]]:
    """What an instruction communicates in the backward."""
    if isinstance(instruction, RecomputedInstruction):
        for collective, digits in forward_collectives(instruction.instruction):
            phase = "backward" if collective.phase == "forward" else collective.phase
            yield replace(collective, phase=phase, again=True), digits
        return
    if isinstance(instruction, Regather):
        move = instruction.move
        for collective, digits in conversion_collectives(
            move.forward, move.source.local_shape, move.target.value, "storage", "parameter", instruction.operator
        ):
            yield replace(collective, again=True), digits
    elif isinstance(instruction, Redistribute) and instruction.backward is not None:
        target = instruction.target
        phase = "gradient" if instruction.cause == "parameter" else "backward"
        yield from conversion_collectives(
            instruction.backward, target.local_shape, instruction.back, phase, instruction.cause, instruction.operator
        )
    elif isinstance(instruction, GlobalExtreme) and instruction.backward is not None:
        yield from conversion_collectives(
            instruction.forward,
            instruction.source.local_shape,
            instruction.source.value,
            "backward",
            "operator",
            instruction.operator,
        )
