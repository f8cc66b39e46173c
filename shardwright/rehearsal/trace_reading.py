"""A Chrome trace of torch.profiler, read by the names of `runtime.profile_ranges`.

    a range      an event "X" whose name begins with ``sw::``; ranges of one thread nest
    host         the seconds of a range without those of the ranges in it
    device       the seconds of the kernels, copies and fills that were launched inside of it: the event of the launch
                 has the kernel's correlation, or the operator around the launch has its "External id"
    a step       from the begin of one call of a program to the begin of the next, so with its backward

On a trace with kernels the seconds are those of the device, on any other those of the host.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SettingError
from ..runtime.profile_ranges import PREFIX

__all__ = ["Trace", "TracedStep", "read_trace"]

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
    threads: dict[tuple[Hashable, Hashable], list[Mapping[str, object]]] = {}
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


def _document(path: Path) -> dict[str, Any]:
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


def _start(event: Mapping[str, Any]) -> float:
    return float(event["ts"]) * 1e-6


def _seconds(event: Mapping[str, Any]) -> float:
    return float(event.get("dur", 0.0)) * 1e-6


def _text(event: Mapping[str, object]) -> str:
    return str(event["name"])[len(PREFIX) :]


class _Row:
    """The ranges of one thread, as pieces of time that belong to the innermost range.

    Attributes:
        starts: of the pieces, in order.
        texts: of the innermost range in each piece; "": none.
    """

    def __init__(self, ranges: Iterable[Mapping[str, object]]) -> None:
        self.starts: list[float] = []
        self.texts: list[str] = []
        open_: list[tuple[float, str]] = []
        # Of two ranges that begin at the same time the longer one is around the other.
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
    events: Iterable[Mapping[str, object]],
    kernels: Iterable[Mapping[str, Any]],
) -> None:
    launches: dict[Hashable, Mapping[str, object]] = {}
    operators: dict[Hashable, Mapping[str, object]] = {}
    for e in events:
        arguments = e.get("args")
        if not isinstance(arguments, dict) or e.get("cat") in DEVICE or e.get("cat") == COPIED:
            continue
        if "correlation" in arguments:
            launches[arguments["correlation"]] = e
        elif "External id" in arguments:  # an operator, or a range
            operators[arguments["External id"]] = e
    starts = [step.start for step in steps]
    work: dict[int, tuple[list[tuple[float, float]], list[tuple[float, float]]]] = {}
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
            work.setdefault(id(step), ([], []))[sends].append((begin, begin + seconds))
    for step in steps:
        computing, sending = work.get(id(step), ([], []))
        step.exposed = _length([*computing, *sending]) - _length(computing)


def _length(spans: Sequence[tuple[float, float]]) -> float:
    """The length of a union of spans."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(spans):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total
