"""A trace of torch.profiler beside what its plan promises, operator by operator.

1. A Chrome trace, read by the names of `runtime.profile_ranges` (`read_trace`).

    a range            an event "X" whose name begins with ``sw::``; ranges of one thread nest
    host               the seconds of a range without those of the ranges in it
    device             the seconds of the kernels, copies and fills that were launched inside of it: the event of the
                       launch has the kernel's correlation, or the operator around the launch has its "External id"
    a step             from the begin of one call of a program to the begin of the next, so with its backward

   On a trace with kernels the seconds are those of the device, on any other those of the host.

2. The comparison (`compare_trace`). Seconds of a step are medians over the steps of the trace. A name is known from the
   plan itself: `runtime.profile_ranges` makes the same texts for the runtime and for this file.

    operator           the seconds of its ranges, forward and backward, beside those of the cost model
    redistribution     likewise; the parts that are issued and waited for together
    bucket             likewise; what the plan promises for its gradients or weights stands here, and not by them
    exposed            on a device: seconds in which only communication runs; on a host: all of it, since a host waits
"""

from __future__ import annotations

import gzip
import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from ..cluster import Cluster
from ..cost.communication_schedule import Fusion
from ..errors import PlanError, SettingError
from ..identity_tables import IdentityMap
from ..json_files.json_reader import JsonObject
from ..partition.local_program import GlobalExtreme, LocalOp, Redistribute
from ..partition.rematerialization import RecomputedInstruction, Regather
from ..pipeline.pipeline_plan import PipelinePlan, Stage, moments
from ..planfile import load_plan
from ..report.format import time_text
from ..report.operator_names import OperatorNames
from ..report.table_elements import folded_parameters
from ..runtime.profile_ranges import (
    BACKWARD,
    ISSUE,
    PREFIX,
    RECOMPUTED,
    REGATHERED,
    UNSUMMED,
    WAIT,
    RangeNames,
    bucket_text,
    gather_text,
    receive_text,
    scatter_text,
)
from ..sharded_plan import Plan
from .rehearsal_report import OperatorSeconds, figure_line, folded, measured_table, ratio_of, table_text, together

__all__ = ["Trace", "TraceComparison", "TracedStep", "compare_trace", "read_trace"]

# -- reading a trace


#: Kineto's categories of work of a device, and of copies of the host's ranges in the device's rows.
DEVICE, COPIED = ("kernel", "gpu_memcpy", "gpu_memset"), "gpu_user_annotation"

#: The begin of the names of a library's communication kernels (NCCL, RCCL).
COMMUNICATION = ("nccl", "rccl")

_STEP = re.compile(r"step (?:rank (\d+) of (\d+)|(\d+) ranks? in one process), plan (\w+)")
_PART = re.compile(r"rank \d+")  # of an operator: its time is the operator's


@dataclass
class TracedStep:
    """One call of a program and its backward.

    Attributes:
        plan: the fingerprint of its plan.
        rank: the rank; None: all ranks, in one process.
        devices: the number of ranks.
        seconds: by name, without the prefix.
        span: seconds from its begin to the end of its last range or kernel.
        exposed: seconds in which a communication kernel runs and no other; None on a trace without kernels.
    """

    plan: str
    rank: int | None
    devices: int
    start: float
    seconds: dict[str, float] = field(default_factory=dict)
    span: float = 0.0
    exposed: float | None = None

    def add(self, text: str, seconds: float, stop: float) -> None:
        """Count seconds of a name, and the moment at which they end."""
        self.seconds[text] = self.seconds.get(text, 0.0) + seconds
        self.span = max(self.span, stop - self.start)


@dataclass(frozen=True)
class Trace:
    """The steps of a trace.

    Attributes:
        steps: in order.
        device: the name of the device whose kernels were measured; None: the host was.
    """

    steps: tuple[TracedStep, ...]
    device: str | None


def read_trace(path: str | Path) -> Trace:
    """Read a trace.

    Args:
        path: of a file of ``prof.export_chrome_trace``: ``.json``, or ``.json.gz``.

    Raises:
        SettingError: no such trace, or one without our names.
        OSError: the file cannot be read.
    """
    document = _document(Path(path))
    events = [e for e in document.get("traceEvents", ()) if isinstance(e, dict) and e.get("ph") == "X"]
    ranges = [e for e in events if str(e.get("name")).startswith(PREFIX) and e.get("cat") != COPIED]
    steps = sorted(
        (
            TracedStep(found[4], None if found[1] is None else int(found[1]), int(found[2] or found[3]), _start(e))
            for e in ranges
            if (found := _STEP.fullmatch(_text(e))) is not None
        ),
        key=lambda step: step.start,
    )
    if not steps:
        raise SettingError(
            f"{path} has no step of a planned model: it was profiled without a call of the model that began inside of "
            "the profile" + (f"; it has ranges such as {ranges[0]['name']!r}" if ranges else ""),
            legal="a trace of torch.profiler.profile() around steps of an AutoParallel model",
        )
    threads: dict[tuple[Hashable, Hashable], list[JsonObject]] = {}
    for e in ranges:
        threads.setdefault((e.get("pid"), e.get("tid")), []).append(e)
    rows = {thread: _Row(each) for thread, each in threads.items()}
    kernels = [e for e in events if e.get("cat") in DEVICE]
    if kernels:
        _count_device(steps, rows, events, kernels)
    else:
        _count_host(steps, rows)
    names = [d.get("name") for d in document.get("deviceProperties") or () if isinstance(d, dict)]
    return Trace(tuple(steps), str((names or ["a device"])[0]) if kernels else None)


def _document(path: Path) -> JsonObject:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            read = json.load(file)
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise SettingError(
            f"{path} is no Chrome trace: {error}", legal="a file of torch.profiler's export_chrome_trace, .json or .gz"
        ) from None
    if not isinstance(read, dict) or not isinstance(read.get("traceEvents"), list):
        raise SettingError(
            f"{path} is no Chrome trace: it has no list traceEvents",
            legal="a file of torch.profiler's export_chrome_trace, .json or .gz",
        )
    return read


def _start(event: JsonObject) -> float:
    return float(event["ts"]) * 1e-6


def _seconds(event: JsonObject) -> float:
    return float(event.get("dur", 0.0)) * 1e-6


def _text(event: JsonObject) -> str:
    return str(event["name"])[len(PREFIX) :]


class _Row:
    """The ranges of one thread, as pieces of time that belong to the innermost range.

    Attributes:
        starts: of the pieces, in order.
        texts: of the innermost range in each piece; "": none.
    """

    def __init__(self, ranges: Iterable[JsonObject]) -> None:
        self.starts: list[float] = []
        self.texts: list[str] = []
        open_: list[tuple[float, str]] = []
        # The longer one of two ranges that begin at the same time is around the other.
        for e in sorted(ranges, key=lambda e: (_start(e), -_seconds(e))):
            begin, text = _start(e), _text(e)
            self._close(open_, begin)
            if _PART.fullmatch(text) and open_:
                text = open_[-1][1]
            stop = begin + _seconds(e)
            open_.append((min(stop, open_[-1][0]) if open_ else stop, text))
            self._piece(begin, text)
        self._close(open_, float("inf"))

    def _piece(self, start: float, text: str) -> None:
        self.starts.append(start)
        self.texts.append(text)

    def _close(self, open_: list[tuple[float, str]], now: float) -> None:
        while open_ and open_[-1][0] <= now:
            stop, _ = open_.pop()
            self._piece(stop, open_[-1][1] if open_ else "")

    def at(self, time: float) -> str:
        """The name of the innermost range at this time."""
        place = bisect_right(self.starts, time) - 1
        return self.texts[place] if place >= 0 else ""


def _step_at(steps: Sequence[TracedStep], starts: Sequence[float], time: float) -> TracedStep | None:
    place = bisect_right(starts, time) - 1
    return steps[place] if place >= 0 else None


def _count_host(steps: Sequence[TracedStep], rows: Mapping[tuple[Hashable, Hashable], _Row]) -> None:
    starts = [step.start for step in steps]
    for row in rows.values():
        for begin, stop, text in zip(row.starts, row.starts[1:], row.texts):
            step = _step_at(steps, starts, begin)
            if text and step is not None:
                step.add(text, stop - begin, stop)


def _count_device(
    steps: Sequence[TracedStep],
    rows: Mapping[tuple[Hashable, Hashable], _Row],
    events: Iterable[JsonObject],
    kernels: Iterable[JsonObject],
) -> None:
    launches: dict[Hashable, JsonObject] = {}
    operators: dict[Hashable, JsonObject] = {}
    for e in events:
        arguments = e.get("args")
        if not isinstance(arguments, dict) or e.get("cat") in DEVICE or e.get("cat") == COPIED:
            continue
        if "correlation" in arguments:
            launches[arguments["correlation"]] = e
        elif "External id" in arguments:  # an operator, or a range
            operators[arguments["External id"]] = e
    starts = [step.start for step in steps]
    work = IdentityMap[TracedStep, tuple[list[tuple[float, float]], list[tuple[float, float]]]]()
    for kernel in kernels:
        arguments = kernel.get("args") or {}
        launch = launches.get(arguments.get("correlation")) or operators.get(arguments.get("External id"))
        if launch is None:
            continue
        row = rows.get((launch.get("pid"), launch.get("tid")))
        step = _step_at(steps, starts, _start(launch))
        if step is None:
            continue
        begin, seconds = _start(kernel), _seconds(kernel)
        text = "" if row is None else row.at(_start(launch))
        if text:
            step.add(text, seconds, begin + seconds)
        sends = str(kernel.get("name")).lower().startswith(COMMUNICATION)
        if sends or text:
            work.setdefault(step, ([], []))[sends].append((begin, begin + seconds))
    for step in steps:
        computing, sending = work.get(step, ([], []))
        step.exposed = _length([*computing, *sending]) - _length(computing)


def _length(spans: Sequence[tuple[float, float]]) -> float:
    """The length of a union of spans."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(spans):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


# -- the comparison


#: Names of ranges around operators and messages; their own time belongs to no operator.
_AROUND = re.compile(r"step (rank|\d+ ranks?) .*|stage \d+, micro-batch -?\d+, .*|rank \d+|")

#: The numbers of unknown names that an error lists.
LISTED = 5

Half = str  # "forward" or "backward"


@dataclass(frozen=True)
class TraceComparison:
    """The seconds of a step of one rank, measured and promised.

    Attributes:
        rank, devices: the rank, None for all ranks in one process; the number of ranks of the plan.
        stages: the pipeline stages that are compared; empty without a pipeline.
        device: the name of the device whose kernels were measured; None: the host was.
        cluster: the cluster that the plan is priced for.
        steps: the number of steps of the trace.
        operators: in program order.
        layers: the operators by their paths, those of equal layers together.
        communication: redistributions and buckets, those of equal layers together.
        step, promised_step: seconds of a step.
        exposed, promised_exposed: seconds of communication beside which nothing is computed.
        waiting, promised_waiting: seconds that a stage waits for messages of other stages; None without a pipeline.
        notes: what a reader should know of the trace.
    """

    rank: int | None
    devices: int
    stages: tuple[int, ...]
    device: str | None
    cluster: str
    steps: int
    operators: tuple[OperatorSeconds, ...]
    layers: tuple[OperatorSeconds, ...]
    communication: tuple[OperatorSeconds, ...]
    step: float
    promised_step: float
    exposed: float
    promised_exposed: float | None
    waiting: float | None
    promised_waiting: float | None
    notes: tuple[str, ...]

    def totals(self) -> dict[str, OperatorSeconds]:
        """The sums of "computing" and of "communication"."""
        return {
            "computing": together("computing", self.operators),
            "communication": together("communication", self.communication),
        }

    def to_dict(self) -> JsonObject:
        """Everything as JSON."""
        out = asdict(self)
        for name in ("operators", "layers", "communication"):
            out[name] = [asdict(o) | {"ratio": o.ratio} for o in getattr(self, name)]
        for name, total in self.totals().items():
            out[f"total_{name}"] = asdict(total) | {"ratio": total.ratio}
        return out

    def summary(self, width: int | None = None) -> str:
        """The comparison as text; arguments as of `Rehearsal.summary`."""
        ranks_text = (
            f"rank {self.rank} of {self.devices}" if self.rank is not None else f"{self.devices} ranks in one process"
        )
        where = f", stage {', '.join(map(str, self.stages))}" if self.stages else ""
        how = "on the host" if self.device is None else f"on {self.device}"
        totals = self.totals()
        lines = [
            f"{ranks_text}{where}, measured {how}; the plan is priced for {self.cluster}; medians of {self.steps} step"
            f"{'s' * (self.steps > 1)}",
            *(f"note: {note}" for note in self.notes),
            "",
            f"{'':<20} {'measured':>10} {'promised':>10} {'ratio':>7}",
        ]
        for name, total in totals.items():
            lines.append(figure_line(name, time_text(total.seconds), time_text(total.promised), total.ratio))
        lines.append(_figure("  exposed", self.exposed, self.promised_exposed))
        if self.waiting is not None:
            lines.append(_figure("waiting for stages", self.waiting, self.promised_waiting))
        lines.append(_figure("a step", self.step, self.promised_step))
        for title, each in (("operator", self.layers), ("redistribution or bucket", self.communication)):
            if each:
                lines += ["", table_text(measured_table(title, each), width)]
        return "\n".join(lines)


def _figure(name: str, measured: float, promised: float | None) -> str:
    if promised is None:
        return figure_line(name, time_text(measured), "", None)
    return figure_line(name, time_text(measured), time_text(promised), ratio_of(measured, promised))


def compare_trace(
    plan: Plan | PipelinePlan | str | Path, trace: str | Path, *, rank: int | None = None
) -> TraceComparison:
    """Set the seconds of a trace beside those that its plan promises.

    Args:
        plan: the plan, or the path of its file.
        trace: the path of a file of ``prof.export_chrome_trace``, of one rank or of the local runtime.
        rank: the rank of the trace, to check it; of a pipeline in the local runtime, the rank whose stages are
            compared.

    Raises:
        PlanError: the trace is of another plan or another rank.
        SettingError: the file is no trace, or has no step of a planned model.
    """
    if isinstance(plan, (str, Path)):
        plan = load_plan(plan)
    read = read_trace(trace)
    steps = [step for step in read.steps if step.plan == plan.fingerprint]
    other_plans = sorted({step.plan for step in read.steps} - {plan.fingerprint})
    notes = []
    if not steps:
        steps = list(read.steps)
        notes.append(
            f"the trace is of plan {other_plans[0]}, not of {plan.fingerprint}; its operators have the same names"
        )
    elif other_plans:
        omitted = len(read.steps) - len(steps)
        notes.append(f"{omitted} step{'s' * (omitted > 1)} of other plans ({', '.join(other_plans)}) left out")
    trained = [step for step in steps if any(text.endswith(BACKWARD) for text in step.seconds)]
    if trained and len(trained) < len(steps):
        omitted = len(steps) - len(trained)
        notes.append(f"{omitted} step{'s' * (omitted > 1)} without a backward left out")
        steps = trained
    first = steps[0]
    if first.devices != plan.devices:
        raise PlanError(
            f"{trace} is of {first.devices} ranks, and the plan of {plan.devices}",
            legal=f"a trace of plan {plan.fingerprint}",
        )
    if rank is not None and not 0 <= rank < plan.devices:
        raise PlanError(
            f"rank {rank} is outside the {plan.devices} devices of the plan", legal=f"0 to {plan.devices - 1}"
        )
    if first.rank is not None and rank not in (None, first.rank):
        raise PlanError(f"{trace} is of rank {first.rank}, not of rank {rank}", legal=f"--rank {first.rank}, or none")
    if first.rank is None and plan.devices > 1:
        notes.append(
            f"one process computed for all {plan.devices} ranks, and sent nothing; the plan's seconds are those of one"
        )
    shown = first.rank if first.rank is not None else rank
    promises = _Promises(plan, shown)
    each = [promises.measured(step) for step in steps]
    if promises.unknown:
        names = sorted(promises.unknown, key=lambda text: ": " in text)  # operators before redistributions
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        raise PlanError(
            f"{trace} is of plan {', '.join(other_plans) or first.plan}; plan {plan.fingerprint} has no "
            f"{', '.join(map(repr, names[:LISTED]))}{more}",
            legal="the plan of that run, such as model.plan.save(...) writes it",
        )
    return promises.compared(steps, each, read.device, tuple(notes))


Seconds = dict[tuple[str, Half], float]


class _Promises:
    """The seconds that a plan promises, by the names that its runtime gives.

    Args:
        plan: the plan.
        rank: the rank whose stages are compared; None: all stages.

    Attributes:
        operators: text -> name of an operator.
        labels: text of a redistribution or a weight's message -> its row.
        buckets: text of a bucket -> its half, and (row, half, seconds) of each of its members.
        computing, sending: the promised seconds.
        unknown: names of a trace that the plan does not have.
    """

    def __init__(self, plan: Plan | PipelinePlan, rank: int | None) -> None:
        self.plan, self.rank = plan, rank
        self.names, self.unknown = RangeNames.of(plan), dict[str, None]()
        self.operators: dict[str, str] = {}
        self.labels: dict[str, str] = {}
        self.buckets: dict[str, tuple[Half, list[tuple[str, Half, float]]]] = {}
        self.computing: Seconds = {}
        self.sending: Seconds = {}
        self.stages: tuple[Stage, ...] = ()
        if isinstance(plan, PipelinePlan):
            self.stages = plan.stages if rank is None else plan.of_rank(rank)
            for stage in plan.stages:
                self._know(stage.plan, self.names)
                if stage.counts is not None:
                    self._know(stage.counts, RangeNames.of(stage.counts))
            for stage in self.stages:
                self._add(stage.plan, plan.micro_batches, True)
        else:
            self._know(plan, self.names)
            self._add(plan, 1, False)

    def _know(self, plan: Plan, names: RangeNames) -> None:
        """Note the names of a program."""
        for i in plan.program.instructions:
            if isinstance(i, LocalOp):
                self.operators[names.operator(i.operator)] = i.operator
                continue
            if (text := names.redistribution(i)) is not None:
                self.labels[text] = self._label(i)
            if isinstance(i, Redistribute) and i.cause == "parameter":
                name = i.source.value.name
                self.labels[gather_text(name)] = self.labels[scatter_text(name)] = self._label(i)

    def _add(self, plan: Plan, micro: int, stage: bool) -> None:
        instructions = plan.program.instructions
        entries = [(i, False) for i in instructions] + [(i, True) for i in plan.backward]
        owed: list[tuple[str, Half, float]] = []
        for (entry, back), moment in zip(entries, moments(plan), strict=True):
            ran = entry.move if isinstance(entry, Regather) else entry
            ran = ran.instruction if isinstance(ran, RecomputedInstruction) else ran
            half, seconds = moment.half, moment.seconds * (1 if plan.once(entry, back) else micro)
            row = ran.operator if isinstance(ran, LocalOp) else self._label(ran)
            owed.append((row, half, seconds))
            table = self.computing if isinstance(ran, LocalOp) else self.sending
            table[row, half] = table.get((row, half), 0.0) + seconds
        trained = [p.name for p in plan.parameters.values() if p.trainable]
        for library in (True, False):
            schedule = plan.scheduled(library, Fusion(), trained, stage)
            for number, message in enumerate(schedule.messages):
                if message.role == "redistribution":
                    continue
                members = [owed[m.moment] for m in message.members if m.moment < len(owed)]
                half = "backward" if message.repeats_forward or message.role != "gather" else "forward"
                self.buckets.setdefault(bucket_text(number, message), (half, members))

    def _label(self, instruction: Redistribute | GlobalExtreme) -> str:
        """The row of a redistribution: its text without the words that all rows have."""
        text = self.names.redistribution(instruction) or self.names.value(instruction)
        return text.removeprefix("redistribute: ").removeprefix("the result of ")

    # -- measured --

    def measured(self, step: TracedStep) -> tuple[Seconds, Seconds, float]:
        """The seconds of one step: of operators, of redistributions and buckets, and of messages between stages."""
        computing, sending, waiting = Seconds(), Seconds(), 0.0
        for text, seconds in step.seconds.items():
            found, half = self._found(text)
            if found in self.operators:
                key = self.operators[found], half
                if self.stages and key not in self.computing:
                    continue  # of another stage, or a count of targets
                computing[key] = computing.get(key, 0.0) + seconds
            elif found in self.buckets or found == UNSUMMED:
                half = self.buckets[found][0] if found in self.buckets else "backward"
                sending[found, half] = sending.get((found, half), 0.0) + seconds
            elif found in self.labels:
                key = self.labels[found], half
                if self.stages and key not in self.sending:
                    continue
                sending[key] = sending.get(key, 0.0) + seconds
            elif found.startswith(receive_text("")):
                waiting += seconds
            elif found.startswith("bucket "):  # of a run with buckets of its own
                sending[found, half] = sending.get((found, half), 0.0) + seconds
            elif not _AROUND.fullmatch(text):
                self.unknown[found] = None
        return computing, sending, waiting

    def _found(self, text: str) -> tuple[str, Half]:
        """A name without what stands behind it, and its half."""
        if text in self.operators:
            return text, "forward"
        half = "backward" if text.startswith(scatter_text("")) else "forward"
        for part in (ISSUE, WAIT):
            text = text.removesuffix(part)
        if text in self.buckets or text in self.labels:
            return text, half
        for part in (BACKWARD, RECOMPUTED, REGATHERED):
            if text.endswith(part):
                return text.removesuffix(part), "backward"
        return text, half

    # -- compared --

    def compared(
        self,
        steps: Sequence[TracedStep],
        each: Sequence[tuple[Seconds, Seconds, float]],
        device: str | None,
        notes: tuple[str, ...],
    ) -> TraceComparison:
        """The comparison of steps with what they measured."""
        plan = self.plan
        computing, sending = _medians([one[0] for one in each]), _medians([one[1] for one in each])
        promised = dict(self.sending)
        for bucket in dict.fromkeys(row for row, _ in sending):
            half, members = self.buckets.get(bucket, ("", []))
            for row, way, seconds in members:
                promised[row, way] = max(0.0, promised.get((row, way), 0.0) - seconds)
                promised[bucket, half] = promised.get((bucket, half), 0.0) + seconds
        operators = _rows(computing, self.computing)
        labels = _rows(sending, promised)
        communication = _folded(o for o in labels if o.seconds)
        if absent := [o for o in labels if not o.seconds and o.promised]:
            communication += (together(f"{len(absent)} that the trace does not have", absent),)
        exposed = [
            math.fsum(one[1].values()) if step.exposed is None else step.exposed
            for step, one in zip(steps, each, strict=True)
        ]
        waiting = promised_waiting = promised_exposed = None
        if isinstance(plan, PipelinePlan):
            waiting = median(one[2] for one in each)
            if self.rank is not None:
                group = plan.schedule.placement[self.stages[0].number]
                promised_waiting = plan.simulation.total - plan.simulation.busy(group)
        else:
            promised_exposed = plan.price.communication if device is None else plan.price.exposed
        return TraceComparison(
            steps[0].rank,
            plan.devices,
            tuple(stage.number for stage in self.stages),
            device,
            Cluster.of(plan.cluster, plan.devices).name,
            len(steps),
            operators,
            folded(operators, OperatorNames(plan)),
            communication,
            median(step.span for step in steps),
            plan.cost,
            median(exposed),
            promised_exposed,
            waiting,
            promised_waiting,
            notes,
        )


def _medians(each: Sequence[Seconds]) -> Seconds:
    keys = dict.fromkeys(key for one in each for key in one)
    return {key: median(one.get(key, 0.0) for one in each) for key in keys}


def _rows(
    measured: Mapping[tuple[str, Half], float], promised: Mapping[tuple[str, Half], float]
) -> tuple[OperatorSeconds, ...]:
    names = dict.fromkeys(name for name, _ in (*promised, *measured))
    of: Callable[[Mapping[tuple[str, Half], float], str, Half], float] = lambda table, name, half: table.get(
        (name, half), 0.0
    )
    return tuple(
        OperatorSeconds(
            name,
            of(measured, name, "forward"),
            of(measured, name, "backward"),
            of(promised, name, "forward"),
            of(promised, name, "backward"),
        )
        for name in names
    )


def _folded(rows: Iterable[OperatorSeconds]) -> tuple[OperatorSeconds, ...]:
    """Redistributions of equal layers together."""
    of = {o.operator: o for o in rows}
    same = {name: (f"{o.promised_forward:.6g}", f"{o.promised_backward:.6g}") for name, o in of.items()}
    return tuple(together(text, [of[name] for name in names]) for text, names in folded_parameters(same))
