"""The cost model: seconds of local operators and of the collectives between them, one model for every planner.

    operator        = max(flops / peak of its dtype, bytes / memory bandwidth) + overhead · launches; 0 for a view
    launches        = 1 in the forward, one for each input's gradient in the backward
    redistribution  = Σ over its steps of the time of a collective (see `primitive_costs`); a slice costs nothing
    gradient sum    = bytes / bucket · the time of an all-reduce of a bucket: small gradients share buckets
    forward         = Σ over instructions
    backward        = Σ over instructions that a gradient reaches, plus gathered weights and recomputed instructions
    step            = micro-batches · (forward + backward of the rest) + the part that runs once a step

The part that runs once a step: redistributions of parameters from their storage layout, and sums of their gradients.
Exceptions run in each micro-batch: gathers of weights that are resharded after the forward, and sums of gradients
that are stored cut while they accumulate.

The partitioned program is priced, so the price is that of the program that runs. Copies that join the pieces of a
tensor are not counted; but that of a slice for its halos is, as it is much larger than what is sent.

There are two figures of a step. `Price.total` is the sum of all seconds: plans are compared by it, and bounds are
proved of it, since it is a sum over operators and edges. `Price.elapsed` is the step in time (`StepInTime`): messages
are issued and waited for as the schedule of communication says, on a library such as NCCL,

    computation    one stream, in the order of the program; waits for a message until it has come
    level of links one stream each; a message occupies the levels that its ranks cross, from its issue on, in the order
                   of issue; it takes no longer than its members by themselves

and `Price.exposed` is the part of it in which the computation waits for messages. elapsed = compute + exposed.

Example: among 8 ranks a bucket has 16 MiB, and a replicated weight's gradient of 4 MiB costs a quarter of the time of
a 16 MiB all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Protocol

from ..cluster import Cluster
from ..errors import SettingError
from ..graph import Form, Op, Value, form_of
from ..layout import Digits, Layout, digits_size, merge
from ..partition.local_program import (
    GlobalExtreme,
    Instruction,
    LocalOp,
    LocalProgram,
    PlacedValue,
    Redistribute,
    made_by,
    refs_of,
)
from ..partition.parameter_sharding import OptimizerParallel
from ..partition.rematerialization import BackwardStep, RecomputedInstruction, Regather
from ..redistribution import CollectiveKind, Redistribution, RedistributionStep
from .communication_schedule import AUTO, PIECE, CommunicationSchedule, ScheduledMessage, own_redistribution
from .memory_timeline import WalkedPlan
from .primitive_costs import Line, OperatorWork, collective_lines, links_of, signature, work_of

__all__ = ["CostModel", "Price", "PricedCollective", "SentStep", "StepInTime", "StreamSpan", "placed_values"]

Shapes = Sequence[tuple[int, ...]]

#: By shapes of the inputs and outputs, the seconds of a local call: (forward, backward).
_Seconds = dict[tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]], tuple[float, float]]


class PlannedStep(WalkedPlan, Protocol):
    """The parts of a `Plan`, which is a layer above, that its price depends on."""

    @property
    def hsdp(self) -> OptimizerParallel | None: ...
    @property
    def in_time(self) -> StepInTime: ...
    def once(self, instruction: BackwardStep, back: bool = False) -> bool: ...


@dataclass(frozen=True)
class StreamSpan:
    """A part of a step in time.

    Attributes:
        stream: "computation", or the name of a level of links.
        what: the operator; of a message, its kind and the values that it moves.
        half: "forward" or "backward".
        start, stop: seconds since the begin of the step.
    """

    stream: str
    what: str
    half: str
    start: float
    stop: float


@dataclass(frozen=True, repr=False)
class StepInTime:
    """A step whose messages are issued and waited for as a schedule says.

    Attributes:
        compute: seconds of computation.
        forward: seconds from the begin of the step to the end of the forward.
        total: seconds of the step.
        spans: in the order of their starts; those of one stream do not overlap.
        waits: (number of a message, seconds that the computation waits for it), those of no wait left out.
    """

    compute: float
    forward: float
    total: float
    spans: tuple[StreamSpan, ...] = ()
    waits: tuple[tuple[int, float], ...] = ()

    def __repr__(self) -> str:
        parts = f"computing {self.compute * 1e3:.4g} ms, waiting {self.exposed * 1e3:.4g} ms"
        return f"<StepInTime: {self.total * 1e3:.4g} ms: {parts}; {len(self.spans)} spans>"

    @property
    def exposed(self) -> float:
        """Seconds in which the computation waits."""
        return max(0.0, self.total - self.compute)


@dataclass(frozen=True)
class PricedCollective:
    """One collective of a plan and its cost in a step.

    Attributes:
        kind: `RedistributionStep.pattern`.
        digits: its group: ranks that differ in these digits alone.
        bytes: of a rank's own input; of an exchange of halos, those that it sends.
        seconds: per step, over all its runs.
        phase: "forward", "backward", "gradient" (a parameter's), or "storage" (from a parameter's storage to its use).
        operator: the operator that causes it, as in `Plan.collectives`.
    """

    kind: CollectiveKind
    digits: Digits
    bytes: float
    seconds: float
    phase: str
    operator: str

    def __str__(self) -> str:
        over = "·".join(map(repr, self.digits))
        return f"{self.kind}({over}) of {self.bytes:,.0f} bytes for {self.operator}, {self.phase}: {self.seconds:.3g} s"


@dataclass(frozen=True, repr=False)
class Price:
    """Seconds of one step.

    Attributes:
        total: forward + backward; also compute + communication, and also the sum over all operators.
        forward, backward: gathers of stored parameters count as forward, sums of gradients as backward.
        compute, communication: of local operators, and of collectives.
        once: the part of the total that does not grow with the number of micro-batches.
        by_operator: operator of the user's program -> its cost, with the redistributions of its inputs and the
            partial sums that it produces; name of an output or buffer -> the cost of the redistributions that it
            needs.
        collectives: each collective, the most expensive first.
        in_time: returns the step in time; None for several micro-batches.
    """

    total: float
    forward: float
    backward: float
    compute: float
    communication: float
    once: float
    by_operator: dict[str, float] = field(default_factory=dict)
    collectives: tuple[PricedCollective, ...] = ()
    in_time: Callable[[], StepInTime] | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        ms = lambda seconds: f"{seconds * 1e3:.4g} ms"
        return (
            f"<Price: a step {ms(self.total)}: forward {ms(self.forward)}, backward {ms(self.backward)}; computing "
            f"{ms(self.compute)}, communication {ms(self.communication)} in {len(self.collectives)} collectives>"
        )

    @property
    def elapsed(self) -> float:
        """Seconds of a step whose messages travel beside computation; of several micro-batches `total`."""
        return self.total if self.in_time is None else self.in_time().total

    @property
    def exposed(self) -> float:
        """Seconds of a step in which the computation waits for messages."""
        return self.communication if self.in_time is None else self.in_time().exposed


@dataclass(frozen=True)
class SentStep:
    """A step of a redistribution that communicates: its times as lines over the bytes of the whole tensor."""

    kind: CollectiveKind
    digits: Digits
    fraction: float  # a rank's input as a fraction of the whole tensor; of an exchange of halos, what a rank sends
    lines: tuple[Line, ...]

    def seconds(self, nbytes: float, bucket: float = 0.0) -> float:
        """Seconds for a tensor of `nbytes`; for a tensor in a bucket, its share of the bucket's time.

        Args:
            bucket: bytes of the bucket, a rank's input; 0: no bucket.
        """
        together = max(nbytes, bucket / self.fraction)
        part = nbytes / together if together else 1.0  # an empty tensor is sent too
        return part * min(a + b * together for a, b in self.lines)


class CostModel:
    """Seconds of every action of a plan.

    Args:
        cluster: as `Cluster.of` takes it.
        devices: the number of its devices in use, the innermost ones; None: all.

    Raises:
        SettingError: an impossible cluster, or one with fewer devices.
    """

    def __init__(
        self, cluster: Cluster | str | PathLike[str] | Mapping[str, object] | None = None, devices: int | None = None
    ) -> None:
        self.cluster = Cluster.of(cluster, devices)
        self.devices = self.cluster.devices if devices is None else devices
        self._collectives: dict[tuple[Hashable, ...], tuple[Line, ...]] = {}
        self._redistributions: dict[Redistribution, tuple[tuple[Line, ...], ...]] = {}
        self._sends: dict[Redistribution, tuple[SentStep, ...]] = {}
        #: By signature, and by form, whose hash is known: the work of an operator, and its seconds by shapes.
        self._works: dict[tuple[Hashable, ...], tuple[OperatorWork, _Seconds]] = {}
        self._works_of_forms: dict[Form, tuple[OperatorWork, _Seconds]] = {}

    # -- communication --

    def lines(self, kind: CollectiveKind, digits: Digits, pieces: int = 1) -> tuple[Line, ...]:
        """The times of a collective as lines (seconds, seconds per byte of a rank's own input); the least is the
        price.
        """
        key = kind, digits, pieces
        found = self._collectives.get(key)
        if found is None:
            found = collective_lines(
                CollectiveKind.named(kind), links_of(self.cluster, self.devices, merge(digits)), pieces
            )
            self._collectives[key] = found
        return found

    def collective(self, kind: CollectiveKind, digits: Digits, nbytes: float) -> float:
        """Seconds of a collective among ranks that differ in `digits`.

        Args:
            kind: a kind, or its word.
            nbytes: of a rank's own input.

        Raises:
            SettingError: an unknown kind.
        """
        return min(a + b * nbytes for a, b in self.lines(kind, digits))

    def redistribution(self, redistribution: Redistribution, nbytes: float) -> float:
        """Seconds of a redistribution of a tensor with `nbytes` in total."""
        steps = self._redistributions.get(redistribution)
        if steps is None:
            steps = self._redistributions[redistribution] = tuple(sent.lines for sent in self.sends(redistribution))
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

    def stored(self, redistribution: Redistribution, nbytes: float) -> float:
        """Seconds of a redistribution of a parameter from its storage layout, or of its gradient back.

        A small gradient that needs an all-reduce alone is priced at its share of a bucket's time.
        """
        return sum(step.seconds(nbytes, _bucket(redistribution, step, nbytes)) for step in self.sends(redistribution))

    def sends(self, redistribution: Redistribution) -> tuple[SentStep, ...]:
        """The collectives of a redistribution, each with a rank's input as a fraction of the whole tensor."""
        found = self._sends.get(redistribution)
        if found is None:
            whole = redistribution.source.devices**2  # divisible by every cut before and after a step
            out, local = [], whole // digits_size(redistribution.source.carried)
            for step in redistribution.steps:
                kind = step.pattern
                if step.communicates:
                    fraction = local / whole * (1.0 if step.halo is None else float(step.share))
                    lines = tuple((a, b * fraction) for a, b in self.lines(kind, step.digits, _partners(step)))
                    out.append(SentStep(kind, step.digits, fraction, lines))
                local = kind.size_after(step.size, local)
            found = self._sends[redistribution] = tuple(out)
        return found

    # -- computing --

    def work(self, op: Op) -> OperatorWork:
        """The flops and bytes of an operator."""
        return self._work(op)[0]

    def _work(self, op: Op) -> tuple[OperatorWork, _Seconds]:
        form = form_of(op)
        found = self._works_of_forms.get(form)
        if found is None:
            key = signature(op)
            found = self._works.get(key)
            if found is None:
                found = self._works[key] = work_of(op), {}
            self._works_of_forms[form] = found
        return found

    def compute(self, op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[float, float]:
        """Seconds of a local call, (forward, backward); backward 0 where no gradient flows.

        Args:
            in_shapes, out_shapes: shapes of the slices, one a tensor; trailing inputs that are not read may be
                missing.
        """
        work, seconds = self._work(op)
        key = tuple(in_shapes), tuple(out_shapes)
        found = seconds.get(key)
        if found is None:
            forward, backward = work.local(*key)
            found = seconds[key] = (
                self._roofline(work.dtype, *forward, launches=1) if work.launched[0] else 0.0,
                self._roofline(work.dtype, *backward, launches=len(work.gradients)) if work.launched[1] else 0.0,
            )
        return found

    def _roofline(self, dtype: str, flops: float, nbytes: float, launches: int) -> float:
        cluster = self.cluster
        return max(flops / cluster.rate(dtype), nbytes / cluster.memory_bandwidth) + cluster.overhead * launches

    # -- instructions --

    def forward(self, instruction: Instruction, known: Mapping[str, PlacedValue]) -> float:
        """Seconds of an instruction of a local program.

        Args:
            known: placed values by name; must contain the tensors that a `LocalOp` reads.
        """
        if isinstance(instruction, LocalOp):
            return self._called(instruction, known)[0]
        if isinstance(instruction, GlobalExtreme):
            return self.redistribution(instruction.forward, instruction.source.value.nbytes)
        return self.redistribution(instruction.forward, _moved(instruction, True)) + self._copied(instruction)

    def backward(self, instruction: BackwardStep, known: Mapping[str, PlacedValue]) -> float:
        """Seconds of an instruction's backward; 0 where no gradient flows.

        For `Regather` and `RecomputedInstruction`: seconds of the forward that runs again.
        """
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
        ):  # ties are counted over ranks like the maximum itself; then the gradient is shared among them
            return self.redistribution(instruction.forward, instruction.source.value.nbytes) + self._shared(instruction)
        priced = self.stored if instruction.cause == "parameter" else self.redistribution
        return priced(instruction.backward, _moved(instruction, False)) + self._copied(instruction)

    def _copied(self, move: Redistribute) -> float:
        """Seconds of a redistribution's cast: read in one dtype, written in the other. Of an exchange of halos: the
        slice is read, and written with the halos, or the other way round."""
        if move.forward.exchanges_halos:
            nbytes = move.source.local_bytes + move.target.local_bytes
            return nbytes / self.cluster.memory_bandwidth + self.cluster.overhead
        return self.cast(move.target.value, move.source.layout) if move.casts else 0.0

    def cast(self, value: Value, layout: Layout) -> float:
        """Seconds of casting a parameter between its storage dtype and its consumers' dtype, or its gradient back.

        0 where the two dtypes are equal.

        Args:
            value: the parameter, in its consumers' dtype.
            layout: the layout in which it is cast.
        """
        if value.stored.dtype == value.dtype:
            return 0.0
        elements = math.prod(layout.local_shape(layout.padded(value.shape)))
        nbytes = elements * (value.stored.dtype.itemsize + value.dtype.itemsize)
        return nbytes / self.cluster.memory_bandwidth + self.cluster.overhead

    def _called(self, instruction: LocalOp, known: Mapping[str, PlacedValue]) -> tuple[float, float]:
        return self.compute(
            instruction.op,
            [known[ref.name].local_shape for ref in refs_of(instruction)],
            [o.local_shape for o in instruction.outputs if o is not None],
        )

    def _shared(self, instruction: GlobalExtreme) -> float:
        """Seconds of reading the operand and writing its gradient."""
        operand = instruction.operand
        nbytes = operand.value.nbytes / digits_size(operand.layout.carried)
        return 2 * nbytes / self.cluster.memory_bandwidth + self.cluster.overhead

    # -- plans --

    def plan(self, plan: PlannedStep, micro_batches: int = 1) -> Price:
        """The price of one step of a plan.

        Args:
            plan: a `Plan`; its shapes are those of one micro-batch.
            micro_batches: the number of micro-batches of a step.

        Raises:
            SettingError: a number of micro-batches below 1.
        """
        if not isinstance(micro_batches, int) or isinstance(micro_batches, bool) or micro_batches < 1:
            raise SettingError(f"micro_batches={micro_batches!r}", legal="a whole number of at least 1")
        return _Pricing(self, plan, micro_batches).run()

    def collectives_of(self, entry: BackwardStep, back: bool) -> list[tuple[SentStep, float, float]]:
        """(step, bytes of a rank's own input, seconds) of each collective of an instruction, or of a step of a
        backward."""
        ran, redistribution = own_redistribution(entry, back)
        if redistribution is None or isinstance(ran, LocalOp):
            return []
        forwards = redistribution is ran.forward
        nbytes = _moved(ran, forwards) if isinstance(ran, Redistribute) else ran.source.value.nbytes
        gradient = not forwards and isinstance(ran, Redistribute) and ran.cause == "parameter"
        return [
            (
                step,
                nbytes * step.fraction,
                step.seconds(nbytes, _bucket(redistribution, step, nbytes) if gradient else 0.0),
            )
            for step in self.sends(redistribution)
        ]

    def in_time(self, plan: PlannedStep, schedule: CommunicationSchedule, once: bool = True) -> StepInTime:
        """A step of a plan in time.

        Args:
            plan: a `Plan`.
            schedule: where its messages are issued and waited for.
            once: False leaves out what is done once a step for any number of micro-batches; and a micro-batch does
                not wait for the scatters that its successor waits for.
        """
        return _Play(self, plan, schedule, once).run()


def _bucket(gradient: Redistribution, sent: SentStep, nbytes: float) -> float:
    """The bytes of the bucket that a parameter's gradient shares; 0 for a large one, or one that needs more than
    a sum."""
    full = min(AUTO, digits_size(sent.digits) * PIECE)
    alone = nbytes * sent.fraction >= full
    return float(full) if not alone and gradient.is_all_reduce else 0.0


def _moved(move: Redistribute, forwards: bool) -> int:
    """Bytes of the whole tensor, or of its gradient, as a redistribution moves it."""
    return move.source.value.numel * (move.dtype if forwards else move.sums).itemsize


def _partners(step: RedistributionStep) -> int:
    """The number of ranks to which a permutation or an exchange of halos sends; 1 for the other steps."""
    if step.halo is not None:
        return step.halo.partners
    return step.size // digits_size(step.moved[i] for i, _ in step.permuted) if step.permuted else 1


class _Pricing:
    """One plan's price, summed instruction by instruction."""

    def __init__(self, costs: CostModel, plan: PlannedStep, micro_batches: int) -> None:
        self.costs, self.plan, self.micro_batches = costs, plan, micro_batches
        self.known = placed_values(plan.program)
        self.sums = {"forward": 0.0, "backward": 0.0, "compute": 0.0, "communication": 0.0, "once": 0.0}
        self.by_operator: dict[str, float] = {}
        self.collectives: list[PricedCollective] = []
        self.dropped = {name for region in plan.regions for name in region.dropped}
        self.sums_once = plan.hsdp is None or plan.hsdp.accumulates_whole

    def run(self) -> Price:
        for instruction in self.plan.program.instructions:
            self.add("forward", instruction, self.costs.forward(instruction, self.known))
        for step in self.plan.backward:
            self.add("backward", step, self.costs.backward(step, self.known))
        self.collectives.sort(key=lambda c: -c.seconds)
        total, plan = self.sums["forward"] + self.sums["backward"], self.plan
        return Price(
            total,
            **self.sums,
            by_operator=self.by_operator,
            collectives=tuple(self.collectives),
            in_time=(lambda: plan.in_time) if self.micro_batches == 1 else None,
        )

    def add(self, half: str, instruction: BackwardStep, seconds: float) -> None:
        ran, forwards = _ran(half, instruction)
        phase = half
        if isinstance(ran, Redistribute) and ran.cause == "parameter":
            phase = "storage" if forwards else "gradient"
        once = (
            self.sums_once or (isinstance(ran, Redistribute) and not ran.forward.steps)
            if phase == "gradient"
            else phase == "storage"
            and isinstance(ran, Redistribute)
            and half == "forward"
            and not ran.reshard_after_forward
            and ran.target.name not in self.dropped
        )
        times = 1 if once else self.micro_batches
        sent = 0.0
        for step, nbytes, price in self.costs.collectives_of(instruction, half == "backward"):
            operator = _causing(step, ran) if forwards else ran.operator
            self.collectives.append(PricedCollective(step.kind, step.digits, nbytes, price * times, phase, operator))
            self.charge(operator, price * times)
            sent += price
        self.charge(ran.operator, (seconds - sent) * times)
        self.sums[half] += seconds * times
        self.sums["communication"] += sent * times
        self.sums["compute"] += (seconds - sent) * times
        self.sums["once"] += seconds if once else 0.0

    def charge(self, operator: str, seconds: float) -> None:
        self.by_operator[operator] = self.by_operator.get(operator, 0.0) + seconds


def _ran(half: str, instruction: BackwardStep) -> tuple[Instruction, bool]:
    """The forward instruction that runs, and True where its forward runs, possibly during the backward."""
    if isinstance(instruction, Regather):
        return instruction.move, True
    if isinstance(instruction, RecomputedInstruction):
        return instruction.instruction, True
    return instruction, half == "forward"


def _causing(step: SentStep, instruction: Instruction) -> str:
    """The operator that causes a step of a forward redistribution; completing a partial sum counts for its
    producer."""
    completes = step.kind.reduces and getattr(instruction, "cause", "") != "parameter"
    producer = getattr(instruction, "producer", "") if completes else ""
    return producer or instruction.operator


# -- a step in time


def placed_values(program: LocalProgram) -> dict[str, PlacedValue]:
    """The tensors of a local program, by name."""
    seed = () if program.seed is None else (program.seed,)
    tables = (program.parameters, program.buffers, program.constants)
    made = (o for i in program.instructions for o in made_by(i))
    return {i.name: i for i in (*program.inputs, *seed, *(i for t in tables for i in t.values()), *made)}


#: The halves of a step.
HALVES = ("forward", "backward")


class _Play:
    """A step in time, moment by moment.

    Attributes:
        now: seconds at which the computation has come.
        free: by level of links, the seconds from which on it is free.
        ends: by message, the seconds at which it has come.
    """

    def __init__(self, costs: CostModel, plan: PlannedStep, schedule: CommunicationSchedule, once: bool) -> None:
        self.costs, self.plan, self.schedule, self.once = costs, plan, schedule, once
        self.known = placed_values(plan.program)
        self.entries = [(i, False) for i in plan.program.instructions] + [(i, True) for i in plan.backward]
        self.now, self.compute = 0.0, 0.0
        self.free = [0.0] * len(costs.cluster.levels)
        self.ends: dict[int, float] = {}
        self.spans: list[StreamSpan] = []
        self.waits: dict[int, float] = {}

    def run(self) -> StepInTime:
        due, forward = list(reversed(self.schedule.order)), None
        for moment, (entry, back) in enumerate(self.entries):
            if back and forward is None:
                while due and self.schedule.messages[due[-1][2]].issue < moment:  # results that nothing reads before
                    self.act(*due.pop())
                forward = self.now
            while due and due[-1][0] <= moment:
                self.act(*due.pop())
            if self.once or not self.plan.once(entry, back):
                self.work(entry, back)
        while due:
            self.act(*due.pop())
        spans = sorted(self.spans, key=lambda span: (span.start, span.stop))
        waits = sorted(self.waits.items(), key=lambda entry: -entry[1])
        return StepInTime(self.compute, self.now if forward is None else forward, self.now, tuple(spans), tuple(waits))

    def work(self, entry: BackwardStep, back: bool) -> None:
        """Compute an instruction; what it sends is a message of its own."""
        if back or isinstance(entry, (Regather, RecomputedInstruction)):
            seconds = self.costs.backward(entry, self.known)
        else:
            seconds = self.costs.forward(entry, self.known)
        seconds -= sum(price for _, _, price in self.costs.collectives_of(entry, back))
        if seconds > 0:
            self.spans.append(StreamSpan("computation", entry.operator, HALVES[back], self.now, self.now + seconds))
            self.now += seconds
            self.compute += seconds

    def act(self, moment: int, action: str, number: int) -> None:
        """Issue a message, or wait for it."""
        message = self.schedule.messages[number]
        if not self.once and (message.once or (action == "wait" and number in self.schedule.carried)):
            return
        back = message.issue >= self.schedule.forward
        first, rest = self.seconds(message, back)
        if action == "issue":
            self.ends[number] = self.send(self.now, message, message.digits, first, back)
            return
        ready = self.ends[number]
        for digits, seconds in rest:  # further steps of a redistribution
            ready = self.send(max(self.now, ready), message, digits, seconds, back)
        if ready > self.now:
            self.waits[number] = ready - self.now
            self.now = ready

    def send(self, since: float, message: ScheduledMessage, digits: Digits, seconds: float, back: bool) -> float:
        """Occupy the levels that a collective crosses, as soon as all of them are free. The end is returned."""
        levels = [k for k, units in enumerate(self.costs.cluster.units(merge(digits))) if units > 1]
        start = max(since, *(self.free[k] for k in levels), 0.0)
        for k in levels:
            self.free[k] = start + seconds
            if seconds:
                name = self.costs.cluster.levels[k].name
                self.spans.append(StreamSpan(name, str(message), HALVES[back], start, start + seconds))
        return start + seconds

    def seconds(self, message: ScheduledMessage, back: bool) -> tuple[float, list[tuple[Digits, float]]]:
        """(seconds of the message's collective, (ranks, seconds) of each further step of a redistribution)."""
        each = []
        for member in message.members:
            known = member.moment < len(self.entries)  # else no gradient reaches it
            entry, half = self.entries[member.moment] if known else (self.plan.program.instructions[member.place], back)
            each.append(self.costs.collectives_of(entry, half))
        step = int(message.role == "follow")
        apart = sum(steps[step][2] for steps in each)
        if message.role != "redistribution":
            if len(each) == 1:
                return apart, []
            return min(apart, self.costs.collective(message.kind, message.digits, message.bytes)), []
        return apart, [(step.digits, seconds) for step, _, seconds in each[0][1:]]
