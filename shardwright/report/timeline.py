"""A simulated step as a trace, as a picture, and as text.

1. `trace`: the Trace Event Format, for Perfetto or chrome://tracing. A process stands for each group of devices, with
   its actions, its memory and, if asked for, the operators within the actions. Times are microseconds, rounded to the
   nanosecond.
2. `picture`: SVG, with a row for each group.
3. `simulated`: text in a terminal: the time of a step, each group's waiting time and memory, and the schedule's grid.

All three also show a step whose messages travel beside computation (`cost.cost_model.StepInTime`): a row for the
computation and one for each level of links.

Example: a pipeline of 2 stages and 4 micro-batches has the headline "204 us a step, bubble 32.5%: 1f1b, 2 stages on 2
groups of devices, 4 micro-batches". In its trace an action that begins at 0.000018 s has the time 18.0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import IO
from xml.sax.saxutils import escape, quoteattr

from ..cost.cost_model import StepInTime, StreamSpan
from ..pipeline.pipeline_plan import Moment
from ..pipeline.schedule_simulation import Once, Simulation, Span
from ..pipeline.schedules import Action
from .console_tables import console_of, saying, show, table
from .format import size_text, time_text

__all__ = ["KINDS", "headline", "picture", "simulated", "trace"]

#: Kind of a span -> its name, and its colour from the palette of Okabe and Ito, made for the colour-blind too.
KINDS = {
    "F": ("forward", "#56b4e9"),
    "B": ("backward", "#e69f00"),
    "I": ("gradients of inputs", "#e69f00"),
    "W": ("gradients of weights", "#009e73"),
    "once": ("once a step", "#a6a6a6"),
}


def headline(simulation: Simulation) -> str:
    """The time of a step and the bubble's share of it, as a line."""
    made = simulation.schedule
    if made.stages == 1:
        return f"{time_text(simulation.total)} a step, without a pipeline"
    return (
        f"{time_text(simulation.total)} a step, bubble {simulation.bubble:.1%}: {made.name}, {made.stages} "
        f"stages on {made.groups} group{'s' * (made.groups > 1)} of devices, "
        f"{made.micro_batches} micro-batch{'es' * (made.micro_batches > 1)}"
    )


def _kind(span: Span) -> str:
    return "once" if isinstance(span.action, Once) else span.action.kind


def _name(simulation: Simulation, group: int, names: Sequence[str] | None) -> str:
    return f"group {group}" if names is None else names[group]


# -- traces ----------------------------------------------------------------------------------------------------------


def trace(
    simulation: Simulation,
    names: Sequence[str] | None = None,
    ranks: Sequence[Sequence[int]] | None = None,
    operators: Mapping[int, Sequence[Moment]] | None = None,
    beside: Mapping[str, StepInTime] | None = None,
) -> dict[str, object]:
    """A step in the Trace Event Format: complete events for actions, counters for bytes.

    Args:
        simulation: the simulated step.
        names: the names of the groups.
        ranks: by group, its ranks, each of which gets a row; None: one row a group.
        operators: by stage, the moments of its forward and its backward; drawn below each action, stretched to its
            length.
        beside: title -> a step, or a micro-batch of a stage, whose messages travel beside computation: a process with
            a row for the computation and one for each level of links.
    """
    events: list[dict[str, object]] = []
    for group in range(simulation.schedule.groups):
        named = {"process_name": {"name": _name(simulation, group, names)}, "process_sort_index": {"sort_index": group}}
        events += [{"ph": "M", "name": what, "pid": group, "args": values} for what, values in named.items()]
        rows = [(0, "actions")] if ranks is None else [(rank, f"rank {rank}") for rank in ranks[group]]
        parts = [part for span in simulation.by_group[group] for part in _parts(span, operators or {})]
        below = max(row for row, _ in rows) + 1
        events += [
            {"ph": "M", "name": "thread_name", "pid": group, "tid": row, "args": {"name": name}}
            for row, name in (*rows, *([(below, "operators")] if parts else ()))
        ]
        for row, _ in rows:
            events += [
                _event(str(span.action), _kind(span), span.start, span.stop, group, row, span.action._asdict())
                for span in simulation.by_group[group]
            ]
        events += [_event(*part, group, below, {}) for part in parts]
        events += [
            {"ph": "C", "name": "memory", "pid": group, "ts": stamp, "args": {"bytes": nbytes}}
            for stamp, nbytes in _counts(simulation, group)
        ]
    for pid, (title, step) in enumerate((beside or {}).items(), simulation.schedule.groups):
        events += [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": title}},
            {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}},
        ]
        for row, (stream, spans) in enumerate(_streams(step).items()):
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": row, "args": {"name": stream}})
            events += [_event(span.what, span.half, span.start, span.stop, pid, row, {}) for span in spans]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "step seconds": simulation.total,
            "bubble": simulation.bubble,
            "schedule": simulation.schedule.name,
            "micro-batches": simulation.schedule.micro_batches,
        },
    }


def _streams(step: StepInTime) -> dict[str, list[StreamSpan]]:
    """The spans of each stream, computation first."""
    out: dict[str, list[StreamSpan]] = {"computation": []}
    for span in step.spans:
        out.setdefault(span.stream, []).append(span)
    return out


def _stamp(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _counts(simulation: Simulation, group: int) -> Iterator[tuple[float, float]]:
    """(microseconds, bytes) of a group, up to the end of the step.

    A viewer shows the last of several counts at one time. A peak that lasts for no time is therefore drawn for a
    nanosecond.
    """
    values: dict[float, list[float]] = {}
    for seconds, nbytes in simulation.memory(group):
        values.setdefault(_stamp(seconds), []).append(nbytes)
    stamps = sorted(values)
    for stamp, following in zip(stamps, [*stamps[1:], math.inf]):
        most, last = max(values[stamp]), values[stamp][-1]
        yield stamp, most
        if last < most and (after := round(stamp + 1e-3, 3)) < following:
            yield after, last
    end = _stamp(simulation.total)
    if end > stamps[-1] + 1e-3:
        yield end, values[stamps[-1]][-1]


def _event(
    name: str, kind: str, start: float, stop: float, group: int, row: int, values: dict[str, object]
) -> dict[str, object]:
    begin = _stamp(start)
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": group,
        "tid": row,
        "ts": begin,
        "dur": round(_stamp(stop) - begin, 3),
        "args": values,
    }


def _parts(span: Span, operators: Mapping[int, Sequence[Moment]]) -> Iterator[tuple[str, str, float, float]]:
    """The operators of an action: (name, kind, start, stop). Neighbouring moments of one operator are joined."""
    half = {"F": "forward", "B": "backward"}.get(span.action.kind)
    within = [m for m in operators.get(span.action.stage, ()) if m.half == half]
    total = math.fsum(m.seconds for m in within)
    if not total:
        return
    scale, done, index = (span.stop - span.start) / total, 0.0, 0
    while index < len(within):
        name, start = within[index].operator, done
        while index < len(within) and within[index].operator == name:
            done += within[index].seconds
            index += 1
        if done > start:
            stop = min(span.start + done * scale, span.stop)
            yield name, span.action.kind, min(span.start + start * scale, stop), stop


# -- pictures --------------------------------------------------------------------------------------------------------

#: Sizes in pixels: the margin; the heights of a row of spans, of the memory below it, of the gap, of the head.
MARGIN, ROW, MEMORY_ROW, GAP, HEAD = 16, 26, 22, 10, 66

#: The sizes of text and of text in a narrow span; the width of a character relative to its size.
FONT, SMALL, WIDE = 11.0, 8.0, 0.58

#: The least and the largest width of the time axis in pixels, and the wanted width of an average action.
NARROW, WIDEST, EACH = 880, 2600, 36


def picture(
    simulation: Simulation,
    names: Sequence[str] | None = None,
    title: str | None = None,
    beside: StepInTime | None = None,
) -> str:
    """A step as SVG: a row for each group, its spans coloured by kind and labelled where there is room, its memory
    below; an axis of time; bubble and peaks as text.

    Args:
        simulation: the simulated step.
        names: the names of the groups.
        title: None: `headline`.
        beside: the step whose messages travel beside computation, in further rows: its computation, and each level of
            links.
    """
    return "\n".join(_Picture(simulation, names, title or headline(simulation), beside).lines()) + "\n"


class _Picture:
    def __init__(
        self, simulation: Simulation, names: Sequence[str] | None, title: str, beside: StepInTime | None
    ) -> None:
        self.simulation, self.title = simulation, title
        self.streams = {} if beside is None else _streams(beside)
        made = simulation.schedule
        self.groups = range(made.groups)
        self.names = [_name(simulation, group, names) for group in self.groups]
        self.memory = [simulation.memory(group) for group in self.groups]
        self.most = max((simulation.peak(group) for group in self.groups), default=0.0)
        self.holds = self.most > 0
        self.pitch = ROW + GAP + (MEMORY_ROW if self.holds else 0)
        peaks = [f"peak {size_text(simulation.peak(group))}" for group in self.groups]
        self.labels = list(zip(self.names, peaks if self.holds else [""] * made.groups))
        texts = [*(text for pair in self.labels for text in pair), *self.streams]
        self.left = MARGIN + 10 + FONT * WIDE * max(map(len, texts), default=0)
        # wide enough that an average action has EACH pixels, after the bubble has taken its share of the axis
        actions = max((len(row) for row in simulation.by_group), default=1)
        self.span = min(max(NARROW, EACH * actions / max(0.05, 1 - simulation.bubble)), WIDEST)
        self.width = self.left + self.span + MARGIN + 8
        self.below = HEAD + self.pitch * made.groups
        self.bottom = self.below + (ROW // 2 + 4) * len(self.streams)
        self.height = self.bottom + 40
        # stage -> the number of earlier stages of its group: later stages are paler
        self.depth = {
            stage: sum(home == made.placement[stage] for home in made.placement[:stage]) for stage in range(made.stages)
        }

    def x(self, seconds: float) -> float:
        return self.left + self.span * seconds / (self.simulation.total or 1.0)

    def lines(self) -> Iterator[str]:
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:.0f}" height="{self.height:.0f}" '
            f'viewBox="0 0 {self.width:.0f} {self.height:.0f}" font-family="Helvetica, Arial, sans-serif" '
            f'font-size="{FONT:g}">'
        )
        yield f'<path d="M0 0H{self.width:.0f}V{self.height:.0f}H0Z" fill="#ffffff"/>'
        yield _text(MARGIN, 24, self.title, size=14, weight="bold")
        yield from self.legend()
        yield from self.axis()
        for group in self.groups:
            yield from self.row(group)
        for number, stream in enumerate(self.streams):
            yield from self.stream(stream, self.below + (ROW // 2 + 4) * number)
        yield "</svg>"

    def stream(self, name: str, top: float) -> Iterator[str]:
        """The row of one stream of the step whose messages travel beside computation."""
        height = ROW / 2
        yield _text(self.left - 10, top + height - 2, name, anchor="end", size=SMALL + 1, fill="#444444")
        yield f'<path d="M{self.left:.1f} {top}h{self.span:.1f}v{height}h{-self.span:.1f}z" fill="{WAITS}"/>'
        for span in self.streams[name]:
            x, width = self.x(span.start), self.x(span.stop) - self.x(span.start)
            colour = KINDS["F" if span.half == "forward" else "B"][1]
            caption = f"{span.what}: {time_text(span.stop - span.start)} from {time_text(span.start)}"
            yield (
                f'<rect class="stream" x="{x:.2f}" y="{top}" width="{width:.2f}" height="{height}" fill="{colour}">'
                f"<title>{escape(caption)}</title></rect>"
            )

    def legend(self) -> Iterator[str]:
        kinds = [kind for kind in KINDS if any(_kind(span) == kind for span in self.simulation.spans)]
        x = float(MARGIN)
        entries = [(KINDS[kind][0], KINDS[kind][1]) for kind in kinds] + [("waits", WAITS)]
        if max(self.depth.values(), default=0):
            entries.append(("paler: further stages of the group", ""))
        if self.holds:
            entries += [
                ("memory of micro-batches", MEMORY),
                (f"always held; the full height is {size_text(self.most)}", ALWAYS),
            ]
        for text, colour in entries:
            if colour:
                yield f'<path d="M{x:.1f} 38h12v12h-12z" fill="{colour}"/>'
                x += 17
            yield _text(x, 48, text, fill="#444444")
            x += FONT * WIDE * len(text) + 18

    def axis(self) -> Iterator[str]:
        """Lines at round times, with their units."""
        total = self.simulation.total
        unit, factor = next(((u, f) for u, f in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)) if total >= f), ("ns", 1e-9))
        step = _round_step(total / factor, max(2, int(self.span / 90)))
        count = int(total / factor / step + 1e-9) if total else 0
        for i in range(count + 1):
            x = self.x(i * step * factor)
            yield f'<path d="M{x:.1f} {HEAD - 4}V{self.bottom + 4}" stroke="#dddddd" stroke-width="1"/>'
            yield _text(x, self.bottom + 18, f"{i * step:g}", anchor="middle", fill="#444444")
        yield f'<path d="M{self.left:.1f} {self.bottom + 4}H{self.left + self.span:.1f}" stroke="#888888"/>'
        yield _text(self.left + self.span / 2, self.bottom + 34, f"time in {unit}", anchor="middle", fill="#444444")

    def row(self, group: int) -> Iterator[str]:
        top = HEAD + self.pitch * group
        name, peak = self.labels[group]
        middle = top + (ROW + (MEMORY_ROW if self.holds else 0)) / 2
        yield _text(self.left - 10, middle - 2 if peak else middle + 4, name, anchor="end", weight="bold")
        if peak:
            yield _text(self.left - 10, middle + 12, peak, anchor="end", fill="#444444")
        yield f'<path d="M{self.left:.1f} {top}h{self.span:.1f}v{ROW}h{-self.span:.1f}z" fill="{WAITS}"/>'
        for span in self.simulation.by_group[group]:
            yield from self.box(span, top)
        if self.holds:
            yield self.area(group, top + ROW, MEMORY_ROW)

    def box(self, span: Span, top: float) -> Iterator[str]:
        x, width = self.x(span.start), self.x(span.stop) - self.x(span.start)
        colour, label = KINDS[_kind(span)][1], str(span.action)
        later = self.depth[span.action.stage]
        odd = isinstance(span.action, Action) and span.action.micro % 2
        colour = _paler(colour, 1 - (1 - 0.12 * odd) * 0.62 ** min(later, 3))
        edge = ' stroke="#ffffff" stroke-width="0.8"' if width >= 5 else ""
        caption = f"{label}, {KINDS[_kind(span)][0]}: {time_text(span.stop - span.start)} from {time_text(span.start)}"
        yield (
            f'<rect class="span" x="{x:.2f}" y="{top}" width="{width:.2f}" height="{ROW}" fill="{colour}"{edge}>'
            f"<title>{escape(caption)}</title></rect>"
        )
        size = next((size for size in (FONT, SMALL) if width - 2 >= WIDE * size * len(label)), None)
        if size is not None:
            yield _text(x + width / 2, top + ROW / 2 + 0.36 * size, label, size=size, anchor="middle")

    def area(self, group: int, top: float, height: float) -> str:
        """The memory of a group over time, as steps above a base line of zero."""
        floor = top + height
        scale = (height - 2) / self.most
        points, before = [f"M{self.left:.1f} {floor:.1f}"], ""
        for seconds, nbytes in self.memory[group]:
            point = f"H{self.x(seconds):.1f}V{floor - nbytes * scale:.1f}"
            points += [point] if point != before else []
            before = point
        always = self.memory[group][0][1]
        end = f"H{self.left + self.span:.1f}V{floor:.1f}Z"
        caption = (
            f"memory of {self.names[group]}: peak {size_text(self.simulation.peak(group))}, of which "
            f"{size_text(always)} always"
        )
        return (
            f'<g><title>{escape(caption)}</title><path class="memory" d="{"".join(points)}{end}" fill="{MEMORY}"/>'
            f'<path d="M{self.left:.1f} {floor - always * scale:.1f}H{self.left + self.span:.1f}V{floor:.1f}'
            f'H{self.left:.1f}Z" fill="{ALWAYS}"/></g>'
        )


#: The colours of waiting, of the memory of micro-batches, and of the memory that is always used.
WAITS, MEMORY, ALWAYS = "#f2f2f2", "#cc79a7", "#ecd3e1"


def _paler(colour: str, part: float) -> str:
    """A colour mixed with white; `part` is the share of white."""
    return "#" + "".join(f"{round(int(colour[i : i + 2], 16) * (1 - part) + 255 * part):02x}" for i in (1, 3, 5))


def _round_step(total: float, count: int) -> float:
    """The least of 1, 2, 5, 10, ... times a power of ten that divides the total into at most `count` steps."""
    least = total / count or 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _text(
    x: float, y: float, text: str, *, size: float = FONT, anchor: str = "start", weight: str = "", fill: str = "#111111"
) -> str:
    attributes = {"x": f"{x:.1f}", "y": f"{y:.1f}", "fill": fill}
    attributes |= {"font-size": f"{size:.3g}"} if size != FONT else {}
    attributes |= {"text-anchor": anchor} if anchor != "start" else {}
    attributes |= {"font-weight": weight} if weight else {}
    return f"<text {' '.join(f'{name}={quoteattr(value)}' for name, value in attributes.items())}>{escape(text)}</text>"


# -- text in a terminal ----------------------------------------------------------------------------------------------

#: The most lines and columns of a schedule's grid that are shown.
LINES, COLUMNS = 64, 120


def simulated(
    simulation: Simulation,
    ranks: Sequence[range],
    memory: float,
    file: IO[str] | None = None,
    beside: Sequence[str] = (),
) -> None:
    """Print a simulated step: its time, each group's work, waiting and memory, and the schedule.

    Args:
        simulation: the simulated step.
        ranks: by group, its ranks.
        memory: the bytes of a device's memory.
        file: the file to print to; None: standard output.
        beside: lines of the step whose messages travel beside computation (`beside_lines`).
    """
    console = console_of(file)
    say = saying(console)
    say(headline(simulation))
    for line in beside:
        say(line)
    numbers = ("works", "waits", "always holds", "peak memory")
    shown = table("ranks", "stages", *numbers, right=numbers)
    made = simulation.schedule
    for group, each in enumerate(ranks):
        stages = [str(stage) for stage, home in enumerate(made.placement) if home == group]
        busy, total = simulation.busy(group), simulation.total
        shown.add_row(
            f"{each[0]}-{each[-1]}" if len(each) > 1 else f"{each[0]}",
            ", ".join(stages),
            time_text(busy),
            f"{1 - busy / total:.1%}" if total else "",
            size_text(simulation.memory(group)[0][1]),
            size_text(simulation.peak(group)),
        )
    show(console, shown)
    most = max(simulation.peak(group) for group in range(made.groups))
    if most > memory:
        say(f"that is more than a device has, which is {size_text(memory)}")
    lines = made.grid().splitlines()
    wide = min(COLUMNS, console.width) if console.is_terminal else COLUMNS
    if made.stages > 1 and len(lines) <= LINES and max(map(len, lines)) <= wide:
        say("\n".join(["the schedule, if every action took as long:", *lines]))
