"""The memory timeline of a device over one step of a local program.

    moments       the instructions of the forward in order, then the steps of the backward in order
    held(t)       = Σ bytes of the tensors whose live range contains t;  peak = max over t of held(t)

Live ranges:

    parameters, buffers, constants, inputs    always, in the layouts in which they are stored and fed
    gradients, the optimizer's state          always, in the parameter's storage layout
    a tensor      from its producer to its last consumer in the forward; a saved tensor, to the last backward that
                  needs it; a recomputed or re-gathered tensor, again from its recomputation to that backward. What is
                  saved for a backward that a detach ends: to the detach
    an internal tensor of an operator (a mask, statistics)    from the operator's forward to its backward; recomputed
                                                              likewise
    a gradient    of a tensor: from the backward of its last consumer (of an output: from the start) to that of its
                  producer; of a gathered weight: to the sum of its gradient. Each further term exists while it is
                  added

A view lies in the memory of the tensor it views, and so does the target of a redistribution without steps. Scratch
memory of collectives and waste of the allocator are not counted.

`LiveRanges` of `partition/rematerialization.py` gives the live ranges of the forward alone; this file adds the
backward, recomputation and bytes.

Example: y = relu(x @ w), three instructions with the loss. The product is held from moment 0 to 1, where relu consumes
it; y, which relu's backward needs, from moment 1 to moment 4, the backward of relu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from ..cluster import format_bytes
from ..errors import SettingError
from ..identity_tables import IdentityMap
from ..partition.local_program import Instruction, LocalProgram, PlacedValue, Redistribute, made_by, reads
from ..partition.rematerialization import (
    BackwardStep,
    LiveRanges,
    RecomputedInstruction,
    Regather,
    Region,
    saved_by,
    waiting,
)

__all__ = [
    "OPTIMIZERS",
    "Allocation",
    "CountedOptimizer",
    "MemoryTimeline",
    "OptimizerSetting",
    "OptimizerState",
    "WalkedPlan",
    "optimizer_bytes",
    "optimizer_state",
    "optimizer_text",
    "peak",
    "timeline",
    "trained_parameters",
]

#: Optimizer -> its float32 numbers for each element of a parameter.
OPTIMIZERS = {"adam": 2, "adamw": 2, "momentum": 1, "sgd": 0}

#: Class of an optimizer -> the numbers that it keeps for each element of a parameter, by the settings of a group.
_STATE_NUMBERS: dict[str, Callable[[Mapping[str, float]], int]] = {
    "SGD": lambda group: int(group["momentum"] != 0),
    "Muon": lambda group: 1,
    "RMSprop": lambda group: 1 + (group["momentum"] > 0) + bool(group["centered"]),
    "Adagrad": lambda group: 1,
    "ASGD": lambda group: 1,
    "Rprop": lambda group: 2,
    "Adadelta": lambda group: 2,
    "Adamax": lambda group: 2,
    **dict.fromkeys(("Adam", "AdamW"), lambda group: 2 + bool(group["amsgrad"])),
    **dict.fromkeys(("NAdam", "RAdam"), lambda group: 2),
}


class OptimizerState(NamedTuple):
    """The optimizers of a model's parameters, and the size of their state.

    Attributes:
        name: their classes, such as "AdamW" or "SGD and AdamW".
        bytes: of state for each element of a trained parameter, on average.
    """

    name: str
    bytes: float


#: The optimizer whose state counts: a word of `OPTIMIZERS`, bytes for each element, or the optimizers of
#: the model; None: as for Adam.
OptimizerSetting: TypeAlias = str | float | OptimizerState | None


def optimizer_state(optimizers: Iterable[Optimizer], parameters: Iterable[Tensor]) -> OptimizerState | None:
    """The state that optimizers keep for the parameters of a model.

    Allocated state is counted; of torch's own optimizers the state is known before their first step. Two float32
    moments are taken for others.

    Args:
        optimizers: torch optimizers, some of which may hold parameters of other models.
        parameters: the model's trained parameters.

    Returns:
        None: no optimizer holds a parameter of the model.
    """
    groups: dict[Tensor, tuple[Optimizer, Mapping[str, float]]] = {}
    for optimizer in sorted(optimizers, key=lambda one: bool(one.state)):  # the last one that has state counts
        groups.update({p: (optimizer, group) for group in optimizer.param_groups for p in group["params"]})
    names: dict[str, None] = {}
    elements, total = 0, 0.0
    for parameter in parameters:
        elements += parameter.numel()
        if parameter not in groups:
            continue
        optimizer, group = groups[parameter]
        name = next((kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in _STATE_NUMBERS), "")
        names[type(optimizer).__name__] = None
        tensors = [x for x in optimizer.state.get(parameter, {}).values() if getattr(x, "shape", ())]
        if tensors:
            total += sum(x.numel() * x.element_size() for x in tensors)
        else:
            total += parameter.numel() * (
                _STATE_NUMBERS[name](group) * parameter.element_size() if name else 4.0 * OPTIMIZERS["adam"]
            )
    return OptimizerState(" and ".join(names), total / elements) if names and elements else None


class CountedOptimizer:
    """The optimizer whose state the memory of a plan counts, as a base class of plans."""

    optimizer: OptimizerSetting

    def count_optimizer(self, find: Callable[[], OptimizerState | None]) -> None:
        """Count the optimizer that `find` returns at a call, where none was given for the plan."""
        vars(self)["_find_optimizer"] = find

    @property
    def counted_optimizer(self) -> OptimizerSetting:
        """The optimizer that was given for the plan, else the one that holds the model's parameters; None: there is
        none yet, and its state is counted as for Adam."""
        find = vars(self).get("_find_optimizer")
        return self.optimizer if self.optimizer is not None or find is None else find()


def optimizer_text(optimizer: OptimizerSetting) -> str:
    """The words for an optimizer beside the bytes of its state."""
    if optimizer is None:
        return "as for Adam"
    if isinstance(optimizer, OptimizerState):
        return optimizer.name
    return optimizer if isinstance(optimizer, str) else f"{optimizer:g} B an element"


def optimizer_bytes(optimizer: OptimizerSetting) -> float:
    """Bytes of an optimizer's state for each element of a parameter.

    Args:
        optimizer: "adam" or "adamw" (two float32 moments), "momentum" (one), "sgd" (none), the bytes, or a
            `OptimizerState`; None: as for "adam".

    Raises:
        SettingError: any other value.
    """
    if optimizer is None:
        return 4.0 * OPTIMIZERS["adam"]
    if isinstance(optimizer, OptimizerState):
        return optimizer.bytes
    if isinstance(optimizer, str) and optimizer.lower() in OPTIMIZERS:
        return 4.0 * OPTIMIZERS[optimizer.lower()]
    if isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool) and 0 <= optimizer < float("inf"):
        return float(optimizer)
    raise SettingError(f"optimizer={optimizer!r}", legal=", ".join(map(repr, OPTIMIZERS)) + ", or bytes an element")


@dataclass(frozen=True)
class Allocation:
    """Memory held from one moment to another.

    Attributes:
        what: "parameters", "constants", "gradients", "optimizer", "inputs", "activations", "recomputed", "gathered" or
            "backward".
        name: of the tensor, or of the operator that the internal tensor belongs to.
        start, stop: the moments, in [start, stop).
        regathered: True for a gathered weight that the backward gathers again, where it needs the weight.
    """

    what: str
    name: str
    start: int
    stop: int
    bytes: float
    regathered: bool = False


@dataclass(frozen=True, repr=False)
class MemoryTimeline:
    """The memory of a device at every moment of a step.

    Attributes:
        moments: for each moment, the operator of the user's program that runs.
        forward: the number of moments that belong to the forward.
        allocations: the memory that tensors take, each over its moments.
    """

    moments: tuple[str, ...]
    forward: int
    allocations: tuple[Allocation, ...]

    def __repr__(self) -> str:
        kinds = ", ".join(f"{kind} {format_bytes(count)}" for kind, count in self.kinds.items())
        count = f"{len(self.moments)} moments, {self.forward} of them forward"
        return f"<MemoryTimeline: {count}; at most {format_bytes(self.peak)} ({kinds})>"

    def totals(self, kinds: Iterable[str] | None = None) -> list[float]:
        """Bytes at every moment.

        Args:
            kinds: count only these kinds of `Allocation.what`; None: all.
        """
        changes = [0.0] * (len(self.moments) + 1)
        only = None if kinds is None else set(kinds)
        for h in self.allocations:
            if only is None or h.what in only:
                changes[h.start] += h.bytes
                changes[h.stop] -= h.bytes
        return list(accumulate(changes))[:-1]

    @property
    def peak(self) -> float:
        """The most bytes held at any moment."""
        return max(self.totals(), default=0.0)

    @property
    def kinds(self) -> dict[str, float]:
        """Bytes by kind at the moment of the peak."""
        totals = self.totals()
        at = totals.index(max(totals)) if totals else 0
        out: dict[str, float] = {}
        for h in self.allocations:
            if h.start <= at < h.stop and h.bytes:
                out[h.what] = out.get(h.what, 0.0) + h.bytes
        return out

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind over the step, whatever the moment of the peak, by the kinds of `Allocation.what`.

        The bytes of a kind are the most at one moment, but for two kinds. "activations" are those between the forward
        and the backward: the saved tensors and the outputs; of a forward alone, the most at one moment. "gathered" are
        all weights that stay gathered, and the largest one that the backward gathers again.
        """
        out = {kind: max(self.totals((kind,))) for kind in dict.fromkeys(h.what for h in self.allocations)}
        if self.forward < len(self.moments):
            out["activations"] = self.totals(("activations",))[self.forward]
        gathered = {h.name: h for h in self.allocations if h.what == "gathered"}.values()
        if gathered:
            out["gathered"] = sum(h.bytes for h in gathered if not h.regathered) + max(
                (h.bytes for h in gathered if h.regathered), default=0
            )
        return {kind: round(nbytes) for kind, nbytes in out.items()}


class WalkedPlan(Protocol):
    """The parts of a `Plan`, which is a layer above, whose memory is counted."""

    @property
    def program(self) -> LocalProgram: ...
    @property
    def backward(self) -> tuple[BackwardStep, ...]: ...
    @property
    def regions(self) -> tuple[Region, ...]: ...


def peak(plan: WalkedPlan, optimizer: OptimizerSetting = None) -> float:
    """The most bytes that a device holds at any moment of a step. See `timeline`."""
    return timeline(plan, optimizer).peak


def trained_parameters(program: LocalProgram, backward: Sequence[BackwardStep]) -> frozenset[str]:
    """The names of the parameters to which a gradient comes: none to one that is used before a detach alone. Without
    a backward, all that require one.

    Args:
        backward: of the program's plan.
    """
    wanted = {p.name for p in program.parameters.values() if p.value.requires_grad}
    ran = [i for i in backward if not isinstance(i, (Regather, RecomputedInstruction))]
    if not ran:
        return frozenset(wanted)
    results = {o.name for o in program.outputs if isinstance(o, PlacedValue)}
    return frozenset(wanted & (results | {name for i in ran for name in reads(i)}))


def timeline(plan: WalkedPlan, optimizer: OptimizerSetting = None) -> MemoryTimeline:
    """The memory of a device over a step of a plan.

    Args:
        plan: a `Plan`; its local program and backward are walked.
        optimizer: as `optimizer_bytes` takes it.

    Raises:
        SettingError: an unknown optimizer.
    """
    return _Walk(plan.program, plan.backward, plan.regions, optimizer_bytes(optimizer)).run()


class _Walk:
    def __init__(
        self, program: LocalProgram, backward: Sequence[BackwardStep], regions: Sequence[Region], state: float
    ) -> None:
        self.program, self.instructions, self.backward, self.regions = (
            program,
            program.instructions,
            backward,
            regions,
        )
        self.state = state
        self.count = len(self.instructions)
        self.end = self.count + len(backward)
        self.saved = saved_by(program)
        seed = () if program.seed is None else (program.seed,)
        tables = (program.parameters, program.buffers, program.constants)
        self.live_ranges = LiveRanges(
            (*program.inputs, *seed, *(i for t in tables for i in t.values())), program.instructions, self.saved
        )
        self.tensors, self.root, self.read = self.live_ranges.tensors, self.live_ranges.root, self.live_ranges.read
        for o in (*(o for o in program.outputs if isinstance(o, PlacedValue)), *program.updates.values()):
            self.read[self.root[o.name]] = self.end - 1
        self.out: list[Allocation] = []

    def run(self) -> MemoryTimeline:
        self.standing()
        self.places = IdentityMap[Instruction, int](
            (i, self.count + p)
            for p, i in enumerate(self.backward)
            if not isinstance(i, (Regather, RecomputedInstruction))
        )
        self.forward_tensors()
        self.gradients()
        names = [*(i.operator for i in self.instructions), *(i.operator for i in self.backward)]
        return MemoryTimeline(tuple(names), self.count, tuple(self.out))

    def hold(self, what: str, name: str, start: int, stop: int, nbytes: float, regathered: bool = False) -> None:
        if nbytes and stop > start:
            self.out.append(Allocation(what, name, start, stop, nbytes, regathered))

    def standing(self) -> None:
        """Hold the tensors that are live during the whole step."""
        program = self.program
        for placed in program.buffers.values():
            self.hold("parameters", placed.name, 0, self.end, placed.local_bytes)
        for placed in program.constants.values():
            self.hold("constants", placed.name, 0, self.end, placed.local_bytes)
        for placed in program.inputs:
            self.hold("inputs", placed.name, 0, self.end, placed.local_bytes)
        trained = trained_parameters(program, self.backward)
        for placed in program.parameters.values():
            self.hold("parameters", placed.name, 0, self.end, placed.local_bytes)
            if placed.name in trained:
                self.hold("gradients", placed.name, 0, self.end, placed.local_bytes)
                elements = placed.local_bytes // placed.value.dtype.itemsize
                self.hold("optimizer", placed.name, 0, self.end, elements * self.state)

    def forward_tensors(self) -> None:
        """Hold the forward's tensors, as long as some backward needs them, and the recomputed ones."""
        begun = IdentityMap(
            (r.region, self.count + p)
            for p, r in reversed(list(enumerate(self.backward)))
            if isinstance(r, RecomputedInstruction)
        )
        regathered_at = {
            b.move.target.name: self.count + p for p, b in enumerate(self.backward) if isinstance(b, Regather)
        }
        remade_at = dict(regathered_at)
        restored_at: dict[int, int] = {}
        for region in self.regions:
            place = begun.get(region)
            if place is None:
                continue
            remade_at.update((name, place) for name in region.dropped)
            restored_at.update((i, place) for i in region.internal)
        stays: dict[str, int] = {}  # root -> the last moment at which the forward's tensor is needed
        returns: dict[str, list[int]] = {}  # root -> [first, last] moment of the recomputed tensor

        def needs(name: str, until: int) -> None:
            root = self.root[name]
            dropped = remade_at.get(name, remade_at.get(root))
            if dropped is None:
                stays[root] = max(stays.get(root, 0), until)
            else:
                span = returns.setdefault(root, [dropped, until])
                span[:] = min(span[0], dropped), max(span[1], until)

        detached = self.detached()
        for place, (i, saved) in enumerate(zip(self.instructions, self.saved)):
            at = self.places.get(i, detached.get(place))
            if at is None:
                continue
            for name in saved.values:
                needs(name, at)
            if saved.own_bytes:
                self.hold(
                    "activations", i.operator, place, (at if place not in restored_at else place) + 1, saved.own_bytes
                )
                if place in restored_at:
                    self.hold("recomputed", i.operator, restored_at[place], at + 1, saved.own_bytes)
        for region in self.regions:
            if region in begun:
                for name in region.inputs:
                    needs(name, begun[region])
        dropped_with_region = {name for region in self.regions for name in region.dropped}
        gathered = {  # weight -> True where the backward gathers it again
            i.target.name: i.reshard_after_forward or i.target.name in dropped_with_region
            for i in self.instructions
            if isinstance(i, Redistribute) and i.cause == "parameter"
        }
        for root, born in self.live_ranges.born.items():
            nbytes = self.tensors[root].local_bytes
            kind, regathered = ("gathered", gathered[root]) if root in gathered else ("activations", False)
            self.hold(kind, root, born, max(self.read[root], stays.get(root, 0)) + 1, nbytes, regathered)
            if root in returns:
                start, stop = returns[root]
                start = max(start, stays.get(root, 0) + 1)
                self.hold("gathered" if root in gathered else "recomputed", root, start, stop + 1, nbytes, regathered)

    def detached(self) -> dict[int, int]:
        """By instruction whose backward a detach ends, the last moment at which autograd has what it saved: that at
        which the last tensor that was computed from its results, with a gradient to come, is read."""
        readers: dict[str, list[int]] = {}
        for place, instruction in enumerate(self.instructions):
            for name in reads(instruction):
                readers.setdefault(name, []).append(place)
        results = {
            o.name for o in (*self.program.outputs, *self.program.updates.values()) if isinstance(o, PlacedValue)
        }
        out: dict[int, int] = {}
        for place, instruction in reversed(list(enumerate(self.instructions))):
            names = {made.name for made in made_by(instruction) if made.value.requires_grad}
            if not names or self.places.get(instruction) is not None:
                continue
            places = (max(r, out.get(r, r)) for name in names for r in readers.get(name, ()))
            out[place] = self.end - 1 if results & names else max(places, default=place)
        return out

    def gradients(self) -> None:
        """Hold the gradients of intermediate tensors: those that wait for their producer's backward, and terms
        being added."""
        begin = {
            o.name: self.count for o in self.program.outputs if isinstance(o, PlacedValue) and o.value.requires_grad
        }
        backward = [
            (self.count + p, i)
            for p, i in enumerate(self.backward)
            if not isinstance(i, (Regather, RecomputedInstruction))
        ]

        def grows(name: str) -> bool:  # a parameter's own gradient is live during the whole step
            return self.tensors[name].value.requires_grad and self.root[name] not in self.live_ranges.inputs

        for name, start, stop in waiting(backward, self.tensors, begin, grows):
            self.hold("backward", name, start, stop, self.tensors[name].local_bytes)
