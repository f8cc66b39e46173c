"""What a plan costs: seconds of local operators and of the collectives between them, by one model for every planner.

    operator      = max(flops / peak of its type, bytes / memory bandwidth) + overhead · launches; nothing for a view
    launches      = 1 forward, one for each input's gradient backward
    conversion    = Σ over its steps of the time of a collective (see `collective_costs`); a slice costs nothing
    gradient sum  = bytes / bucket · the time of an all-reduce of a bucket: gradients travel together, but large ones
    forward       = Σ over instructions
    backward      = Σ over those that a gradient reaches, what is gathered or computed again among them
    step          = micro-batches · (forward + backward of the rest) + what is done once

Once a step: the conversions of parameters from how they are stored, and the sums of their gradients; but for each
micro-batch those of weights that are not kept for the backward, and the sums of gradients that are held cut while they
accumulate. What is priced is the routed program, so the price is of what runs. Communication is not taken to overlap
with computing, and copies that bring a tensor's pieces together are not counted.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..cluster import Cluster
from ..errors import SettingError
from ..graph import Op, Value, leaves
from ..layout import Digits, Layout, digits_size, merge
from ..partition.local_program import GlobalExtreme, LocalOp, PlacedValue, Redistribute, Ref
from ..partition.rematerialization import RecomputedInstruction, Regather
from ..redistribution import Redistribution, RedistributionStep
from .primitives import KINDS, Line, OperatorWork, collective_lines, links_of, signature, work_of

__all__ = ["CostModel", "Price", "PricedCollective"]

Shapes = Sequence[tuple[int, ...]]

# Bytes that gradients make up together before they are summed, and those, for each of the ranks, that are enough: the
# runtime's own choice (`runtime.fusion`, where the figures are).
BUCKET, PIECE = 16 << 20, 2 << 20


@dataclass(frozen=True)
class PricedCollective:
    """One collective of a plan and what it costs in a step.

    Attributes:
        kind: as of `conversion_steps.Step`; "permute" for an all-to-all that permutes.
        digits: its group: ranks that differ in these digits alone.
        bytes: of a rank's own input.
        seconds: in a step: of all times that it runs.
        phase: "forward", "backward", "gradient" (a parameter's), or "storage" (from a parameter's storage to its use).
        operator: the operator that causes it, as of `Plan.collectives`.
    """

    kind: str
    digits: Digits
    bytes: float
    seconds: float
    phase: str
    operator: str

    def __str__(self) -> str:
        over = "·".join(map(repr, self.digits))
        return f"{self.kind}({over}) of {self.bytes:,.0f} bytes for {self.operator}, {self.phase}: {self.seconds:.3g} s"


@dataclass(frozen=True)
class Price:
    """Seconds of one step.

    Attributes:
        total: of forward and backward; also of compute and communication, and of all operators.
        forward, backward: the gathering of stored parameters counts as forward, the sums of gradients as backward.
        compute, communication: of local operators, and of collectives.
        once: what of the total does not grow with the number of micro-batches.
        by_operator: by the operators of the user's program, what they cost together with the conversions that they ask
            for and the sums that they leave open; under the names of outputs and buffers, what these ask for.
        collectives: each of them, the dearest first.
    """

    total: float
    forward: float
    backward: float
    compute: float
    communication: float
    once: float
    by_operator: dict[str, float] = field(default_factory=dict)
    collectives: tuple[PricedCollective, ...] = ()


@dataclass(frozen=True)
class _Sent:
    """A step of a conversion that sends: its times as lines over the bytes of the whole tensor."""

    kind: str
    digits: Digits
    fraction: float  # of the whole tensor, that a rank puts in
    lines: tuple[Line, ...]

    def seconds(self, nbytes: float, bucket: float = 0.0) -> float:
        """For a tensor of so many bytes; of one that travels with others its part of the time.

        Args:
            bucket: bytes that a rank puts in for all of them.
        """
        together = max(nbytes, bucket / self.fraction)
        part = nbytes / together if together else 1.0  # an empty tensor travels all the same
        return part * min(a + b * together for a, b in self.lines)


class CostModel:
    """Seconds of everything that a plan does.

    Args:
        cluster: as `Cluster.of` takes it.
        devices: how many of its devices are used, the innermost; None: all.

    Raises:
        SettingError: a cluster that cannot be, or has fewer devices.
    """

    def __init__(self, cluster: Any = None, devices: int | None = None) -> None:
        self.cluster = Cluster.of(cluster, devices)
        self.devices = self.cluster.devices if devices is None else devices
        self._collectives: dict[tuple, tuple[Line, ...]] = {}
        self._conversions: dict[Redistribution, tuple[tuple[Line, ...], ...]] = {}
        self._sends: dict[Redistribution, tuple[_Sent, ...]] = {}
        self._works: dict[tuple, OperatorWork] = {}
        self._ops: dict[int, tuple[weakref.ref[Op], OperatorWork]] = {}  # an operator has no quick hash
        self._computes: dict[tuple, tuple[float, float]] = {}

    # -- communication --

    def lines(self, kind: str, digits: Digits, pieces: int = 1) -> tuple[Line, ...]:
        """The times of a collective as lines (seconds, seconds a byte of a rank's own input): the least is paid.

        Raises:
            SettingError: no such kind.
        """
        key = kind, digits, pieces
        found = self._collectives.get(key)
        if found is None:
            if kind not in KINDS:
                raise SettingError(f"unknown kind of collective {kind!r}", legal=", ".join(KINDS))
            found = collective_lines(kind, links_of(self.cluster, self.devices, merge(digits)), pieces)
            self._collectives[key] = found
        return found

    def collective(self, kind: str, digits: Digits, nbytes: float) -> float:
        """Seconds of a collective among ranks that differ in `digits`.

        Args:
            kind: "slice", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"; "permute", "send", "recv": from
                one rank to another.
            nbytes: of a rank's own input.

        Raises:
            SettingError: no such kind.
        """
        return min(a + b * nbytes for a, b in self.lines(kind, digits))

    def conversion(self, conversion: Redistribution, nbytes: float) -> float:
        """Seconds of a conversion of a tensor of so many bytes, the whole of it."""
        steps = self._conversions.get(conversion)
        if steps is None:
            steps = self._conversions[conversion] = tuple(sent.lines for sent in self.sends(conversion))
        total = 0.0
        for lines in steps:
            a, b = lines[0]
            best = a + b * nbytes
            for a, b in lines[1:]:
                other = a + b * nbytes
                if other < best:
                    best = other
            total += best
        return total

    def stored(self, conversion: Redistribution, nbytes: float) -> float:
        """Seconds of a conversion of a parameter from how it is stored, or of its gradient back. A mere sum of a
        gradient travels with others, if it is not large: its part of a bucket's time."""
        return sum(step.seconds(nbytes, _bucket(conversion, step, nbytes)) for step in self.sends(conversion))

    def sends(self, conversion: Redistribution) -> tuple[_Sent, ...]:
        """The collectives of a conversion, with what part of the whole tensor a rank puts into each."""
        found = self._sends.get(conversion)
        if found is None:
            out, fraction = [], 1.0 / digits_size(conversion.source.carried)
            for step in conversion.steps:
                if step.communicates:
                    kind, pieces = _kind(step)
                    lines = tuple((a, b * fraction) for a, b in self.lines(kind, step.digits, pieces))
                    out.append(_Sent(kind, step.digits, fraction, lines))
                fraction *= _grows(step)
            found = self._sends[conversion] = tuple(out)
        return found

    # -- computing --

    def work(self, op: Op) -> OperatorWork:
        """What an operator does."""
        known = self._ops.get(id(op))
        if known is not None and known[0]() is op:  # and not a later one in the same place
            return known[1]
        key = signature(op)
        work = self._works.get(key)
        if work is None:
            work = self._works[key] = work_of(op)
        self._ops[id(op)] = (weakref.ref(op), work)
        return work

    def compute(self, op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[float, float]:
        """Seconds of a local call, (forward, backward); the backward where a gradient flows, else 0.

        Args:
            in_shapes, out_shapes: of the slices, one a tensor; last inputs may be missing, which are not read.
        """
        work = self.work(op)
        key = id(work), tuple(in_shapes), tuple(out_shapes)
        found = self._computes.get(key)
        if found is None:
            forward, backward = work.local(*key[1:])
            found = self._computes[key] = (
                self._roofline(work.dtype, *forward, launches=1) if work.launched[0] else 0.0,
                self._roofline(work.dtype, *backward, launches=len(work.gradients)) if work.launched[1] else 0.0,
            )
        return found

    def _roofline(self, dtype: str, flops: float, nbytes: float, launches: int) -> float:
        cluster = self.cluster
        return max(flops / cluster.rate(dtype), nbytes / cluster.memory_bandwidth) + cluster.overhead * launches

    # -- instructions --

    def forward(self, instruction: Any, known: Mapping[str, PlacedValue]) -> float:
        """Seconds of an instruction of a routed program.

        Args:
            known: instances by name; what a `Compute` reads must be among them.
        """
        if isinstance(instruction, LocalOp):
            return self._called(instruction, known)[0]
        if isinstance(instruction, GlobalExtreme):
            return self.conversion(instruction.forward, instruction.source.value.nbytes)
        return self.conversion(instruction.forward, _moved(instruction, True)) + self._cast(instruction)

    def backward(self, instruction: Any, known: Mapping[str, PlacedValue]) -> float:
        """Seconds of an instruction's backward, 0 where no gradient flows; of `Again` and `Recomputed` what runs."""
        if isinstance(instruction, LocalOp):
            return self._called(instruction, known)[1]
        if isinstance(instruction, Regather):
            return self.forward(instruction.move, known)
        if isinstance(instruction, RecomputedInstruction):
            return self.forward(instruction.instruction, known)
        if instruction.backward is None:
            return 0.0
        if isinstance(
            instruction, GlobalExtreme
        ):  # ties are counted, as the maximum was found; then it is shared among them
            return self.conversion(instruction.forward, instruction.source.value.nbytes) + self._shared(instruction)
        priced = self.stored if instruction.cause == "parameter" else self.conversion
        return priced(instruction.backward, _moved(instruction, False)) + self._cast(instruction)

    def _cast(self, move: Redistribute) -> float:
        """What goes from one type to another is read in one, and written in the other."""
        return self.cast(move.target.value, move.source.layout) if move.casts else 0.0

    def cast(self, value: Value, layout: Layout) -> float:
        """Seconds in which a parameter that lies in `layout` goes from the type in which it is stored to the other, or
        its gradient back; 0 where they are one."""
        if value.stored.dtype == value.dtype:
            return 0.0
        elements = math.prod(layout.local_shape(layout.padded(value.shape)))
        nbytes = elements * (value.stored.dtype.itemsize + value.dtype.itemsize)
        return nbytes / self.cluster.memory_bandwidth + self.cluster.overhead

    def _called(self, instruction: LocalOp, known: Mapping[str, PlacedValue]) -> tuple[float, float]:
        read = tuple(leaf for leaf in leaves((instruction.args, instruction.kwargs)) if isinstance(leaf, Ref))
        return self.compute(
            instruction.op,
            [known[a.name].local_shape for a in read],
            [o.local_shape for o in instruction.outputs if o is not None],
        )

    def _shared(self, instruction: GlobalExtreme) -> float:
        """The operand is read and its gradient written."""
        operand = instruction.operand
        nbytes = operand.value.nbytes / digits_size(operand.layout.carried)
        return 2 * nbytes / self.cluster.memory_bandwidth + self.cluster.overhead

    # -- plans --

    def plan(self, plan: Any, micro_batches: int = 1) -> Price:
        """What one step of a plan costs.

        Args:
            plan: a `Plan`; its shapes are those of one micro-batch.
            micro_batches: how many of them make a step.

        Raises:
            SettingError: a number of micro-batches below 1.
        """
        if not isinstance(micro_batches, int) or isinstance(micro_batches, bool) or micro_batches < 1:
            raise SettingError(f"micro_batches={micro_batches!r}", legal="a whole number of at least 1")
        return _Pricing(self, plan, micro_batches).run()


def _bucket(gradient: Redistribution, sent: _Sent, nbytes: float) -> float:
    """The bytes in which a parameter's gradient travels: a bucket's, if it is summed and no more, and not large; 0: its
    own."""
    full = min(BUCKET, digits_size(sent.digits) * PIECE)
    alone = nbytes * sent.fraction >= full
    return float(full) if not alone and [step.kind for step in gradient.steps] == ["all_reduce"] else 0.0


def _moved(move: Redistribute, forwards: bool) -> int:
    """Bytes of the whole tensor as a conversion moves it, or its gradient."""
    return move.source.value.numel * (move.dtype if forwards else move.sums).itemsize


def _kind(step: RedistributionStep) -> tuple[str, int]:
    """The kind of a step, and to how many ranks a permutation sends."""
    if step.kind == "all_to_all" and step.permuted:
        return "permute", step.size // digits_size(step.moved[i] for i, _ in step.permuted)
    return step.kind, 1


def _grows(step: RedistributionStep) -> float:
    """By how much a step makes the local tensor larger."""
    out = 1.0
    for dim in step.dims:
        for atom in dim:
            if atom.gathered is not None:
                out *= atom.size
            if atom.scattered is not None:
                out /= atom.size
    return out


class _Pricing:
    """One plan's price, put together instruction by instruction."""

    def __init__(self, costs: CostModel, plan: Any, micro_batches: int) -> None:
        self.costs, self.plan, self.micro_batches = costs, plan, micro_batches
        routed = plan.routed
        seed = () if routed.seed is None else (routed.seed,)
        made = (o for i in routed.instructions for o in (i.outputs if isinstance(i, LocalOp) else (i.target,)))
        tables = (routed.parameters, routed.buffers, routed.constants)
        self.known = {
            i.name: i for i in (*routed.inputs, *seed, *(i for t in tables for i in t.values()), *made) if i is not None
        }
        self.sums = {"forward": 0.0, "backward": 0.0, "compute": 0.0, "communication": 0.0, "once": 0.0}
        self.by_operator: dict[str, float] = {}
        self.collectives: list[PricedCollective] = []
        self.dropped = {name for region in plan.regions for name in region.dropped}
        self.sums_once = plan.hsdp is None or plan.hsdp.accumulates_whole

    def run(self) -> Price:
        for instruction in self.plan.routed.instructions:
            self.add("forward", instruction, self.costs.forward(instruction, self.known))
        for instruction in self.plan.backward:
            self.add("backward", instruction, self.costs.backward(instruction, self.known))
        self.collectives.sort(key=lambda c: -c.seconds)
        total = self.sums["forward"] + self.sums["backward"]
        return Price(total, **self.sums, by_operator=self.by_operator, collectives=tuple(self.collectives))

    def add(self, half: str, instruction: Any, seconds: float) -> None:
        ran, forwards = _ran(half, instruction)
        phase, conversion = half, None
        if isinstance(ran, GlobalExtreme):
            conversion = ran.forward
        elif isinstance(ran, Redistribute):
            conversion = ran.forward if forwards else ran.backward
            if ran.cause == "parameter":
                phase = "storage" if forwards else "gradient"
        once = (
            self.sums_once
            if phase == "gradient"
            else phase == "storage" and half == "forward" and not ran.again and ran.target.name not in self.dropped
        )
        times = 1 if once else self.micro_batches
        sent = 0.0
        for step in self.costs.sends(conversion) if conversion is not None else ():
            nbytes = _moved(ran, forwards) if isinstance(ran, Redistribute) else ran.source.value.nbytes
            price = step.seconds(nbytes, _bucket(conversion, step, nbytes) if phase == "gradient" else 0.0)
            operator = _causing(step, ran) if forwards else ran.operator
            self.collectives.append(
                PricedCollective(step.kind, step.digits, nbytes * step.fraction, price * times, phase, operator)
            )
            self.charge(operator, price * times)
            sent += price
        self.charge(ran.operator, (seconds - sent) * times)
        self.sums[half] += seconds * times
        self.sums["communication"] += sent * times
        self.sums["compute"] += (seconds - sent) * times
        self.sums["once"] += seconds if once else 0.0

    def charge(self, operator: str, seconds: float) -> None:
        self.by_operator[operator] = self.by_operator.get(operator, 0.0) + seconds


def _ran(half: str, instruction: Any) -> tuple[Any, bool]:
    """The instruction of the forward that runs, and whether it is its forward that does, be it in the backward."""
    if isinstance(instruction, Regather):
        return instruction.move, True
    if isinstance(instruction, RecomputedInstruction):
        return instruction.instruction, True
    return instruction, half == "forward"


def _causing(step: _Sent, instruction: Any) -> str:
    """The operator that a step of a forward conversion is for: a sum is completed for the one that left it open."""
    completes = step.kind in ("all_reduce", "reduce_scatter") and getattr(instruction, "cause", "") != "parameter"
    return (completes and getattr(instruction, "producer", "")) or instruction.operator
