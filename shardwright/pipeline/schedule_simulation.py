"""Simulation of one pipeline step in time: the spans of each group of devices, its waiting, and its memory.

    start(a)    = max(the group is free, max over the needs of a of their stop + seconds of the transfer)
    stop(a)     = start(a) + seconds of the stage's forward, backward, or part of the backward
    bubble      = 1 - Σ over devices of the seconds at work / (devices · total)
    held(g, t)  = fixed + Σ over micro-batches between the start of their forward and the end of their backward

Transfers between groups overlap with computing, and each has its link for itself. Work that is done once a step,
before a group's first action or after its last, counts as work. With equal stages and no transfers the bubble is
(p-1) / (m + p-1) for gpipe and 1f1b, (p-1) / (m·v + p-1) for interleaved stages, v on a group.

Example: p = 4 stages, m = 8 micro-batches: bubble 3/11 = 27 % for 1f1b, 3/19 = 16 % with v = 2 stages on a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..errors import SettingError
from .schedules import Action, Schedule, check

__all__ = ["Once", "Profile", "Simulation", "Span", "simulate"]

#: Bytes of a micro-batch while an action runs: (part of the action's time, in [0, 1), bytes from there on).
Profile = Sequence[tuple[float, float]]


class Once(NamedTuple):
    """Work of a stage that is done once a step.

    Attributes:
        kind: "begin": before its group's first action; "end": after its last.
    """

    stage: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} {self.stage}"


class Span(NamedTuple):
    """Work of a group from `start` to `stop`, in seconds."""

    group: int
    action: Action | Once
    start: float
    stop: float


@dataclass(frozen=True, repr=False)
class Simulation:
    """One step in time.

    Attributes:
        spans: in the order in which they start; those of a group do not overlap.
        devices: by group, its number of devices.
        fixed: by stage, the bytes that each of its devices always holds.
        saved: by stage, the bytes of each micro-batch between its forward and its backward.
        running: by stage, the bytes of a micro-batch during its forward, and during its backward.
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    devices: tuple[int, ...]
    fixed: tuple[float, ...]
    saved: tuple[float, ...]
    running: tuple[tuple[Profile, Profile], ...]

    def __repr__(self) -> str:
        made = self.schedule
        what = f"{made.stages} stages, {made.name}, {made.micro_batches} micro-batches"
        return f"<Simulation: {what}: {self.total * 1e3:.4g} ms a step, bubble {self.bubble:.1%}>"

    @cached_property
    def total(self) -> float:
        """Seconds of the step."""
        return max((span.stop for span in self.spans), default=0.0)

    @cached_property
    def by_group(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of each group, in order."""
        out: list[list[Span]] = [[] for _ in range(self.schedule.groups)]
        for span in self.spans:
            out[span.group].append(span)
        return tuple(map(tuple, out))

    def busy(self, group: int) -> float:
        """Seconds that a group is at work, including its work once a step."""
        return math.fsum(span.stop - span.start for span in self.by_group[group])

    @property
    def bubble(self) -> float:
        """The part of the devices' time that they wait, in [0, 1]."""
        if not self.total:
            return 0.0
        work = math.fsum(n * self.busy(group) for group, n in enumerate(self.devices))
        return max(0.0, 1 - work / (sum(self.devices) * self.total))

    def memory(self, group: int) -> list[tuple[float, float]]:
        """The bytes on a device of a group over time: (seconds, bytes from there on)."""
        allocated = sum(fixed for fixed, home in zip(self.fixed, self.schedule.placement) if home == group)
        out = [(0.0, allocated)]
        stays = self.schedule.name != "forward"
        for span in self.by_group[group]:
            stage, kind = span.action.stage, span.action.kind
            if isinstance(span.action, Once):
                continue
            saved_bytes, (forward, backward) = self.saved[stage], self.running[stage]
            if kind != "F":
                allocated -= saved_bytes
            for part, nbytes in forward if kind == "F" else backward if kind in "BI" else ((0.0, saved_bytes),):
                out.append((span.start + part * (span.stop - span.start), allocated + nbytes))
            if kind == "I" or (kind == "F" and stays):
                allocated += saved_bytes
            out.append((span.stop, allocated))
        return out

    def peak(self, group: int) -> float:
        """The most bytes that a device of a group holds."""
        return max(nbytes for _, nbytes in self.memory(group))


def simulate(
    planned: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    *,
    weights: Sequence[float] | None = None,
    transfer: Callable[[int, int], float] | None = None,
    skips: Iterable[tuple[int, int]] = (),
    begin: Sequence[float] = (),
    end: Sequence[float] = (),
    fixed: Sequence[float] | None = None,
    saved: Sequence[float] | None = None,
    running: Sequence[tuple[Profile, Profile]] | None = None,
    devices: Sequence[int] | None = None,
) -> Simulation:
    """Play a schedule. Sequences by stage have one entry for each stage.

    Args:
        forward, backward: seconds of one micro-batch.
        weights: the part of `backward` for the gradients of the weights, where a schedule splits the backward; None:
            half.
        transfer: (source stage, target stage) -> seconds of a transfer between them, of values forwards and of their
            gradients backwards; called for stages on different groups alone. None: no time.
        skips: (producer, consumer) pairs of stages that are not neighbours and have a transfer.
        begin, end: seconds of a stage's work once a step, before the first action of its group, and after the last.
        fixed: bytes that a device always holds.
        saved: bytes that it keeps for each micro-batch between its forward and its backward.
        running: bytes of a micro-batch during its forward and during its backward; None: as `saved`, all the time.
        devices: by group, its number of devices; None: equal.

    Raises:
        SettingError: another number of entries; seconds or bytes below 0, or no numbers; weights that take longer
            than the backward; a schedule that `schedules.check` refuses.
    """
    count = planned.stages
    seconds = {
        "forward": forward,
        "backward": backward,
        "weights": [b / 2 for b in backward] if weights is None else weights,
        "begin": begin or (0.0,) * count,
        "end": end or (0.0,) * count,
        "fixed": (0.0,) * count if fixed is None else fixed,
        "saved": (0.0,) * count if saved is None else saved,
    }
    for name, entries in seconds.items():
        _counted(name, entries, count, "stages")
        for stage, value in enumerate(entries):
            if not 0 <= value < math.inf:
                raise SettingError(f"{name}={value!r} of stage {stage}", legal="a finite number that is not below 0")
    for stage, (part, whole) in enumerate(zip(seconds["weights"], backward)):
        if part > whole:
            raise SettingError(
                f"weights={part!r} of stage {stage}: that is more than its backward={whole!r}",
                legal="a part of the backward",
            )
    sizes = (1,) * planned.groups if devices is None else tuple(devices)
    _counted("devices", sizes, planned.groups, "groups")
    of_micro_batches = tuple(map(float, seconds["saved"]))
    profiles = (
        tuple((((0.0, saved_bytes),),) * 2 for saved_bytes in of_micro_batches) if running is None else tuple(running)
    )
    _counted("running", profiles, count, "stages")
    spans = _Play(planned, seconds, transfer, skips).run()
    return Simulation(planned, spans, sizes, tuple(map(float, seconds["fixed"])), of_micro_batches, profiles)


def _counted(name: str, entries: Sequence[object], count: int, of: str) -> None:
    if len(entries) != count:
        raise SettingError(f"{name} has {len(entries)} entries for {count} {of}", legal=f"{count} entries")


class _Play:
    def __init__(
        self,
        schedule: Schedule,
        seconds: dict[str, Sequence[float]],
        transfer: Callable[[int, int], float] | None,
        skips: Iterable[tuple[int, int]],
    ) -> None:
        self.schedule, self.seconds = schedule, seconds
        self.transfer = transfer
        self.crossing: dict[tuple[int, int], float] = {}
        self.producers: dict[int, list[int]] = {}
        self.users: dict[int, list[int]] = {}
        for producer, user in skips:
            self.producers.setdefault(user, []).append(producer)
            self.users.setdefault(producer, []).append(user)
        self.stops: dict[Action, float] = {}

    def run(self) -> tuple[Span, ...]:
        schedule, placement = self.schedule, self.schedule.placement
        if len(schedule.order) < sum(map(len, schedule.actions)):
            check(schedule)  # raises the error of the deadlock
        spans: list[Span] = []
        free = [0.0] * schedule.groups

        def add(group: int, action: Action | Once, start: float, seconds: float) -> None:
            spans.append(Span(group, action, start, start + seconds))
            free[group] = start + seconds

        for stage, seconds in enumerate(self.seconds["begin"]):
            if seconds:
                add(placement[stage], Once(stage, "begin"), free[placement[stage]], seconds)
        for action in schedule.order:
            group = placement[action.stage]
            add(group, action, max(free[group], self.ready(action)), self.takes(action))
            self.stops[action] = free[group]
        for stage, seconds in enumerate(self.seconds["end"]):
            if seconds:
                add(placement[stage], Once(stage, "end"), free[placement[stage]], seconds)
        spans.sort(key=lambda span: (span.start, span.stop))  # a stable sort: spans of a group stay in order
        return tuple(spans)

    def takes(self, action: Action) -> float:
        """Seconds of an action."""
        stage, kind, _ = action
        if kind == "F":
            return self.seconds["forward"][stage]
        part = self.seconds["weights"][stage]
        return part if kind == "W" else self.seconds["backward"][stage] - (part if kind == "I" else 0.0)

    def ready(self, action: Action) -> float:
        """Seconds at which everything that an action needs has arrived."""
        stage, kind, micro = action
        needs = self.schedule.needs(action)
        out = max((self.stops[need] + self.crosses(need.stage, stage) for need in needs), default=0.0)
        for producer in self.producers.get(stage, ()) if kind == "F" else ():
            out = max(out, self.stops[Action(producer, "F", micro)] + self.crosses(producer, stage))
        for user in self.users.get(stage, ()) if kind in "BI" else ():
            back = Action(user, "I", micro)
            back = back if back in self.stops else Action(user, "B", micro)
            out = max(out, self.stops[back] + self.crosses(user, stage))
        return out

    def crosses(self, source: int, target: int) -> float:
        """Seconds of the transfers from one stage to another."""
        if self.transfer is None or self.schedule.placement[source] == self.schedule.placement[target]:
            return 0.0
        key = source, target
        if key not in self.crossing:
            self.crossing[key] = self.transfer(source, target)
        return self.crossing[key]
