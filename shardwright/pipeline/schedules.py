"""Schedules of a pipeline: the order of computations of each group of devices.

An action is a computation of one stage on one micro-batch: F its forward, B its backward; or the backward in two
parts, I the gradients of its inputs and W those of its weights. With S stages:

    F(s, k)        needs F(s-1, k)
    B or I(s, k)   needs F(s, k), and B or I(s+1, k)
    W(s, k)        needs I(s, k)

A group runs its actions one after the other. The transfers follow from the actions. The orders of the interleaved and
the zero-bubble schedules are those of torch.distributed.pipelining; no process group is needed for them.

Example: 1f1b with 2 stages and 3 micro-batches:

    group 0   0F0 0F1 0B0 0F2 0B1 0B2
    group 1   1F0 1B0 1F1 1B1 1F2 1B2

CSV files (`read`, `Schedule.to_csv`) have a row for each group of devices and an action in each cell; cells may be
empty. The format is that of torch.distributed.pipelining, with computations alone: ``0F0,0F1,,0B0,0B1``.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from ..errors import SettingError, shown
from ..torch_private import computation, schedule_without_transfers

__all__ = ["SCHEDULES", "Action", "Schedule", "action_of", "check", "forward_only", "read", "schedule", "takes"]

#: The schedules by name, and the chunks of stages that a group has by default.
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1, "zbv": 2}

#: The legal actions, for errors.
LEGAL = (
    "a computation: stage, kind and micro-batch, such as 2F3, of the kinds F (forward), B (backward), "
    "I (gradients of inputs) and W (of weights)"
)


class Action(NamedTuple):
    """A computation of one stage on one micro-batch; ``str`` is torch's notation, ``2F3``.

    Attributes:
        kind: "F" forward, "B" backward, "I" backward to the inputs alone, "W" to the weights alone.
    """

    stage: int
    kind: str
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


@dataclass(frozen=True)
class Schedule:
    """The actions of every group of devices, in order. Schedules from `schedule` and `forward_only` are checked.

    Attributes:
        name: one of `SCHEDULES`, "forward" for one without backward, or the path of the file that it was read from.
        placement: stage -> the group that runs it.
        actions: by group, in order.
    """

    name: str
    placement: tuple[int, ...]
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    @property
    def groups(self) -> int:
        """The number of groups of devices."""
        return len(self.actions)

    @cached_property
    def _all(self) -> frozenset[Action]:
        return frozenset(action for row in self.actions for action in row)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """The actions that must be done before an action, of its own stage and its neighbours."""
        stage, kind, micro = action
        if kind == "F":
            return (Action(stage - 1, "F", micro),) if stage else ()
        if kind == "W":
            return (Action(stage, "I", micro),)
        forward = Action(stage, "F", micro)
        if stage == self.stages - 1:
            return (forward,)
        split = Action(stage + 1, "I", micro)
        return forward, split if split in self._all else Action(stage + 1, "B", micro)

    @cached_property
    def order(self) -> tuple[Action, ...]:
        """All actions in one order in which the needs of an action come before it; ends early at a deadlock."""
        return tuple(self.actions[group][place] for group, place in _played(self))

    @cached_property
    def steps(self) -> dict[Action, int]:
        """The time step of each action if all take one step: the first at which its group is free and its needs
        are done."""
        out: dict[Action, int] = {}
        free = [0] * self.groups
        for action in self.order:
            group = self.placement[action.stage]
            out[action] = max(free[group], *(out[need] + 1 for need in self.needs(action)), 0)
            free[group] = out[action] + 1
        return out

    def grid(self) -> str:
        """A table of time steps by groups, each action taking one step; blank where a group waits."""
        at = {(step, self.placement[action.stage]): str(action) for action, step in self.steps.items()}
        count = 1 + max(self.steps.values(), default=-1)
        rows = [["", *(f"Group {g}" for g in range(self.groups))]]
        rows += [
            [f"Step {step:0{len(str(count - 1))}}", *(at.get((step, g), "") for g in range(self.groups))]
            for step in range(count)
        ]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)) for row in rows)
        return "".join(f"{line.rstrip()}\n" for line in lines)

    def to_csv(self) -> str:
        """CSV text with one row a group, its actions in order: torch's format for schedules of computations alone."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(map(str, row) for row in self.actions)
        return out.getvalue()

    def most_saved(self, stage: int) -> int:
        """The largest number of micro-batches of a stage at one time between their forward and the end of their
        backward."""
        saved = most = 0
        if self.name != "forward":  # a forward alone keeps nothing
            for action in self.actions[self.placement[stage]]:
                if action.stage == stage:
                    saved += {"F": 1, "I": 0}.get(action.kind, -1)
                    most = max(most, saved)
        return most

    def __str__(self) -> str:
        return self.grid()


def schedule(
    name: str | None, groups: int, micro_batches: int, *, chunks: int | None = None, csv: str | Path | None = None
) -> Schedule:
    """A schedule by name, or that of a file.

    Args:
        name: one of `SCHEDULES`; ignored with `csv`.
        groups: the number of groups of devices. Stage v of groups · chunks lies on group v mod groups; for "zbv",
            which goes there and back, on the lesser of v and 2 · groups - 1 - v.
        chunks: the number of stages of a group; None: the default of `SCHEDULES`, or that of the file.
        csv: a file with a row for each group and an action in each cell, as written by `Schedule.to_csv`. Cells may
            be empty. A stage lies on the group that has its actions.

    Raises:
        SettingError: an unknown name; a number that the schedule cannot take; a file that cannot be read, or an error
            of `check`, with its row and cell.
    """
    numbers = {"stages": groups, "micro_batches": micro_batches, "chunks": 1 if chunks is None else chunks}
    for what, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SettingError(f"{what}={value!r}", legal="a whole number of at least 1")
    if micro_batches < groups:
        raise SettingError(
            f"micro_batches={micro_batches} for {groups} stages: some would never work at the same time",
            legal=f"at least {groups} micro-batches",
        )
    if csv is not None:
        return read(Path(csv), groups, micro_batches, chunks)
    if name not in SCHEDULES:
        raise SettingError(f"scheduler={name!r}", legal=", ".join(map(repr, SCHEDULES)) + ", or a CSV file")
    chunks = SCHEDULES[name] if chunks is None else chunks
    _fits(name, groups, micro_batches, chunks)
    stages = groups * chunks
    placement = tuple(min(v, stages - 1 - v) if name == "zbv" else v % groups for v in range(stages))
    if name == "gpipe":
        actions = [[Action(s, kind, k) for kind in "FB" for k in range(micro_batches)] for s in range(groups)]
    elif name == "1f1b":
        actions = [_one_forward_one_backward(s, min(groups - s, micro_batches), micro_batches) for s in range(groups)]
    else:
        actions = _torch_order(name, groups, chunks, micro_batches)
    out = Schedule(name, placement, micro_batches, tuple(map(tuple, actions)))
    check(out)
    return out


def takes(name: str, groups: int, micro_batches: int, chunks: int | None = None) -> bool:
    """True where a schedule by name can have so many micro-batches; see `schedule`."""
    try:
        _fits(name, groups, micro_batches, SCHEDULES.get(name, 1) if chunks is None else chunks)
    except SettingError:
        return False
    return micro_batches >= groups


def forward_only(placement: Sequence[int], micro_batches: int) -> Schedule:
    """A schedule of forwards alone: at every step a group runs the ready stage that is nearest to the end.

    Args:
        placement: stage -> the group that runs it.

    Raises:
        SettingError: no micro-batch, or a group without a stage.
    """
    if not isinstance(micro_batches, int) or isinstance(micro_batches, bool) or micro_batches < 1:
        raise SettingError(f"micro_batches={micro_batches!r}", legal="a whole number of at least 1")
    placement = tuple(placement)
    last = len(placement) - 1
    done = [0] * len(placement)
    actions: list[list[Action]] = [[] for _ in range(max(placement, default=-1) + 1)]
    while placement and done[last] < micro_batches:
        ready: dict[int, int] = {}
        for stage, group in enumerate(placement):
            if done[stage] < (done[stage - 1] if stage else micro_batches):
                ready[group] = stage
        for group, stage in ready.items():
            actions[group].append(Action(stage, "F", done[stage]))
            done[stage] += 1
    out = Schedule("forward", placement, micro_batches, tuple(map(tuple, actions)))
    check(out)
    return out


def check(schedule: Schedule) -> None:
    """Check that every stage has all actions of every micro-batch, once, on its group, and that no deadlock exists.

    Raises:
        SettingError: an action that is no computation, of an unknown stage or micro-batch, missing, repeated, on
            another group, or before its needs; B together with I or W; a group without actions; a deadlock, with the
            actions that wait for each other.
    """
    check_placed(schedule, lambda group, place: f"group {group}, action {place}", schedule.name != "forward", "")


def check_placed(schedule: Schedule, where: Callable[[int, int], str], backward: bool, file: str) -> None:
    """Do the same as `check`; errors name the place of an action in a file.

    Args:
        where: the text for a place, by its group and its number within.
        backward: True where there must be backwards; False where there must be none.
        file: the file that it was read from, or empty.
    """
    at: dict[Action, tuple[int, int]] = {}

    def error(message: str, *actions: Action, legal: str | None = None) -> SettingError:
        source = where(*at[actions[0]]) if actions else file or f"schedule {schedule.name!r}"
        return SettingError(message, source=source, legal=legal)

    def place(action: Action) -> str:
        return where(*at[action]).removeprefix(f"{file}, ")

    if not schedule.stages:
        raise error("there is no stage", legal="one at least")
    for group, row in enumerate(schedule.actions):
        if not row:
            raise error(f"group {group} does nothing", legal="a stage at least for every group")
        for number, action in enumerate(row):
            first = at.get(action)
            at[action] = group, number
            _in_range(schedule, action, group, where(group, number), backward)
            if first is not None:
                raise error(
                    f"{action} is there twice, first at {where(*first).removeprefix(f'{file}, ')}", action, legal="once"
                )
    for stage, group in enumerate(schedule.placement):
        for micro in range(schedule.micro_batches):
            forward, whole, inputs, weights = (Action(stage, kind, micro) for kind in "FBIW")
            if forward not in at:
                raise error(f"{forward} is missing", legal=f"it stands among the actions of group {group}")
            parts = [action for action in (inputs, weights) if action in at]
            if whole in at and parts:
                raise error(
                    f"{whole} is the whole backward, and {parts[0]} ({place(parts[0])}) a part of it",
                    whole,
                    legal=f"{whole}, or {inputs} and {weights}",
                )
            if backward and whole not in at and len(parts) < 2:
                missing = (
                    f"{weights if inputs in at else inputs} is missing: {parts[0]} does a part of the backward"
                    if parts
                    else f"{whole} is missing"
                )
                raise error(
                    missing, *parts, legal=f"{whole}, or {inputs} and {weights}, among the actions of group {group}"
                )
    for action in at:
        for need in schedule.needs(action):
            if at[need][0] == at[action][0] and at[need] > at[action]:
                raise error(
                    f"{action} comes before {need} ({place(need)}), which it needs",
                    action,
                    legal=f"{need} before {action}",
                )
    _no_deadlock(schedule, at, error, place)


def _in_range(schedule: Schedule, action: Action, group: int, source: str, backward: bool) -> None:
    """Check that the action exists and belongs to the group."""
    if action.kind not in ("FBIW" if backward else "F"):
        why = "is of an unknown kind" if backward else "stands in a schedule of forwards alone"
        raise SettingError(f"{action} {why}", source=source, legal=LEGAL if backward else "forwards, such as 2F3")
    for what, value, count in (
        ("stage", action.stage, schedule.stages),
        ("micro-batch", action.micro, schedule.micro_batches),
    ):
        if not 0 <= value < count:
            raise SettingError(
                f"{action} is of {what} {value}, and there are {count}",
                source=source,
                legal=f"{what} 0 to {count - 1}" if count > 1 else f"{what} 0",
            )
    home = schedule.placement[action.stage]
    if home != group:
        raise SettingError(
            f"{action} is given to group {group}, but stage {action.stage} lies on group {home}",
            source=source,
            legal=f"all actions of stage {action.stage} on one group",
        )


def _no_deadlock(
    schedule: Schedule,
    at: dict[Action, tuple[int, int]],
    error: Callable[..., SettingError],
    place: Callable[[Action], str],
) -> None:
    """Check that every action is reached when each group runs its own in order."""
    done = [0] * schedule.groups
    for group, number in _played(schedule):
        done[group] = number + 1
    stuck = [group for group in range(schedule.groups) if done[group] < len(schedule.actions[group])]
    if not stuck:
        return
    # Each stuck action waits for one behind another group's stuck action: following these leads to a cycle.
    chain: list[tuple[Action, Action]] = []
    group = stuck[0]
    while True:
        head = schedule.actions[group][done[group]]
        seen = next((i for i, (action, _) in enumerate(chain) if action == head), None)
        if seen is not None:
            chain = chain[seen:]
            break
        need = next(n for n in schedule.needs(head) if at[n][1] >= done[at[n][0]])
        chain.append((head, need))
        group = at[need][0]
    first, second = chain[0][0], chain[1][0]
    links = [
        f"{head} ({place(head)}) needs {need}" + (f", which comes after {then}" if need != then else "")
        for (head, need), then in zip(chain, [*(a for a, _ in chain[1:]), first])
    ]
    more = f" by way of {', '.join(str(a) for a, _ in chain[2:])}" if len(chain) > 2 else ""
    raise error(
        f"deadlock: {first} and {second} wait for each other{more}: {'; '.join(links)}",
        first,
        legal=f"{chain[0][1]} before {second}",
    )


def _played(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Yield group and number of every action, in an order in which needs come first; ends after all, or at a
    deadlock."""
    done: set[Action] = set()
    places = [0] * schedule.groups
    waiting: dict[Action, list[int]] = {}
    ready = list(range(schedule.groups))[::-1]
    while ready:
        group = ready.pop()
        row = schedule.actions[group]
        while places[group] < len(row):
            action = row[places[group]]
            missing = next((need for need in schedule.needs(action) if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(group)
                break
            done.add(action)
            yield group, places[group]
            places[group] += 1
            ready += waiting.pop(action, ())


def _one_forward_one_backward(stage: int, ahead: int, micro_batches: int) -> list[Action]:
    """Forwards until `ahead` are kept, then a backward and a forward in turn, then the remaining backwards."""
    out = [Action(stage, "F", k) for k in range(ahead)]
    for k in range(micro_batches):
        out.append(Action(stage, "B", k))
        if k + ahead < micro_batches:
            out.append(Action(stage, "F", k + ahead))
    return out


def _fits(name: str, groups: int, micro_batches: int, chunks: int) -> None:
    """Check that a schedule accepts these numbers."""
    if name in ("gpipe", "1f1b", "zbv") and chunks != SCHEDULES[name]:
        raise SettingError(
            f"chunks={chunks} for scheduler={name!r}",
            legal=f"chunks={SCHEDULES[name]}, or the scheduler 'interleaved' or 'zero_bubble'",
        )
    if name in ("interleaved", "zero_bubble"):
        fits = lambda m: m % (m // groups) == 0
        if not fits(micro_batches):
            less = next(m for m in range(micro_batches, 0, -1) if fits(m))
            more = next(m for m in range(micro_batches, 2 * micro_batches) if fits(m))
            raise SettingError(
                f"micro_batches={micro_batches} for scheduler={name!r} and {groups} stages: they make "
                f"{micro_batches // groups} rounds, which would not be equal",
                legal=f"{less} or {more} micro-batches, or any multiple of {groups}",
            )


def _torch_order(name: str, groups: int, chunks: int, micro_batches: int) -> list[list[Action]]:
    """The order of one of torch's own schedules."""
    # gpipe and 1f1b are not taken from torch: torch 2.13 numbers the forwards of the last stage of 1f1b from 1.
    from torch.distributed.pipelining import schedules as theirs  # noqa: PLC0415  only three schedules need it

    base: Any = {
        "interleaved": theirs.ScheduleInterleaved1F1B,
        "zero_bubble": theirs.ScheduleInterleavedZeroBubble,
        "zbv": theirs.ScheduleZBVZeroBubble,
    }[name]
    order = schedule_without_transfers(base)
    stages = [
        SimpleNamespace(
            stage_index=v * groups,
            num_stages=groups * chunks,
            group_size=groups,
            group_rank=0,
            submod=None,
            is_last=False,
        )
        for v in range(chunks)
    ]
    made = order(stages, micro_batches).pipeline_order
    return [
        [Action(a.stage_index, computation(a), a.microbatch_index) for a in made[g] if a is not None]
        for g in range(groups)
    ]


# -- CSV files

_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")

#: Bytes of a file, at most.
LONGEST = 64 << 20

#: Actions of torch's files that are no computations.
_IMPLIED = re.compile(r"UNSHARD|RESHARD|REDUCE_GRAD|SEND_[FB]|RECV_[FB]|OVERLAP_F_B")


def read(path: Path, groups: int, micro_batches: int, chunks: int | None) -> Schedule:
    """The schedule of a file.

    Args:
        groups: the number of its rows.
        chunks: the number of stages of a group; None: as in the file.

    Raises:
        SettingError: a file that cannot be read, another number of rows, a cell that is no action, a stage without
            actions, or an error of `check`, with its row and cell.
    """
    try:
        size = path.stat().st_size
        if size > LONGEST:
            raise SettingError(
                f"the schedule has {size:,} bytes, and at most {LONGEST:,} are read",
                source=str(path),
                legal="a CSV file with a row for each group of devices",
            )
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, ValueError, csv.Error) as error:  # ValueError: no text, or a path with a null character
        raise SettingError(
            f"the schedule cannot be read: {getattr(error, 'strerror', None) or error}",
            source=str(path),
            legal="a CSV file with a row for each group of devices",
        ) from error
    if len(rows) != groups:
        raise SettingError(
            f"the schedule has {len(rows)} rows for {groups} stages",
            source=str(path),
            legal=f"{groups} rows, one for each group of devices",
        )
    cells = [[(number, text.strip()) for number, text in enumerate(row, 1) if text.strip()] for row in rows]
    where = lambda group, place: f"{path}, row {group + 1}, cell {cells[group][place][0]}"
    actions = [
        tuple(action_of(text, where(group, place)) for place, (_, text) in enumerate(row))
        for group, row in enumerate(cells)
    ]
    counts: dict[int, Counter[int]] = {}  # stage -> number of its actions by group: single ones may be misplaced
    for group, row in enumerate(actions):
        for action in row:
            counts.setdefault(action.stage, Counter())[group] += 1
    stages = groups * chunks if chunks is not None else len(counts)
    missing = next((stage for stage in range(stages) if stage not in counts), None)
    if missing is not None:
        past = next(
            (
                where(group, place)
                for group, row in enumerate(actions)
                for place, action in enumerate(row)
                if action.stage > missing
            ),
            str(path),
        )
        last = max(counts, default=0)
        raise SettingError(
            f"there is stage {last}, but no action of stage {missing}"
            if last > missing
            else f"there are {len(counts)} stages, and no action of stage {missing}",
            source=past,
            legal=f"every stage from 0 to {max(last, stages - 1)}"
            if chunks is None
            else f"{stages} stages, chunks={chunks} for each of {groups}",
        )
    placement = tuple(counts[stage].most_common(1)[0][0] for stage in range(stages))
    out = Schedule(str(path), placement, micro_batches, tuple(actions))
    check_placed(out, where, True, str(path))
    return out


def action_of(text: str, source: str) -> Action:
    """The action of a cell; `source` names the cell in errors."""
    found = _ACTION.fullmatch(text)
    if found is None:
        why = ": what is sent, gathered or overlapped follows from the computations" if _IMPLIED.search(text) else ""
        raise SettingError(f"{shown(text)} is no action{why}", source=source, legal=LEGAL)
    return Action(int(found[1]), found[2], int(found[3]))
