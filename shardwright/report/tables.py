"""A plan, or a pipeline, in a terminal.

1. `explain` prints every operator with its strategy and traffic, and every parameter with its layout; of a pipeline
   those of every stage, the transfers between the stages, and the schedule as a grid.
2. `summary` prints a plan at a glance: the time of a step, the memory of a device, the most expensive communications;
   of a pipeline the simulated step, and a line for each stage.

Example, a line of `summary` for ``Linear(16, 32), ReLU, Linear(32, 8)`` in data_parallel on 8 devices, with 32 rows::

    a step takes 90.7 us: forward 40.7 us, backward 50 us; computing 85 us, communication 5.71 us
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..cluster import Cluster
from ..cost.cost_model import PricedCollective
from ..cost.memory_timeline import OptimizerSetting, optimizer_text
from ..graph import Value
from ..layout import Digits, digits_size
from ..pipeline.pipeline_plan import PipelinePlan, Stage, Transfer
from ..pipeline.schedule_simulation import Once, Simulation
from ..rules.dims import send
from ..sharded_plan import Plan
from .console_tables import UNLIMITED, console_of, saying, show, table
from .description import cluster_line, describe, inputs_line, numbers_text
from .format import cost_text, link_text, size_text, time_text
from .operator_names import OperatorNames
from .table_elements import (
    DEAREST,
    NOTES,
    alternatives_of,
    beside_lines,
    cuts_of,
    legend,
    memory_line,
    notes_of,
    operators_table,
    operators_text,
    parameters,
    regions,
    rows,
    total,
)
from .timeline import COLUMNS, LINES, headline

__all__ = [
    "crossing",
    "explain",
    "explain_pipeline",
    "grid",
    "memory",
    "ranks_text",
    "stages",
    "summary",
    "summary_of_pipeline",
]


def explain(plan: Plan | PipelinePlan, file: IO[str] | None = None, width: int | None = None) -> None:
    """Print a plan: what it is in the field's words, then every operator, its call site, its strategy, layouts, local
    shapes and traffic; equal layers once. A pipeline is printed stage by stage, with the transfers between stages.

    All numbers are those of the plan's own collectives, for one rank; no rank sends more.

    Args:
        plan: the plan.
        file: the file to print to; None: standard output.
        width: the width of tables, in characters; None: the terminal's, or 100 where there is none. Operators that do
            not fit on one line take several; nothing is cut off.
    """
    if isinstance(plan, PipelinePlan):
        explain_pipeline(plan, file, width)
        return
    sent, names, console = plan.collectives(0), OperatorNames(plan), console_of(file, width)
    say = saying(console, width)
    say(headline_of(plan))
    for line in (*describe(plan).body(), cluster_line(plan), inputs_line(plan), step_line(plan), bound_line(plan)):
        say(line)
    show(console, operators_table(rows(plan, sent, names), console))
    console.print(Text(legend(names)))
    say(total(plan, sent))
    if plan.parameters:
        show(console, parameters(plan))
        say(f"on a device: {memory_line(plan.memory(0), plan.counted_optimizer)}")
    for line in regions(plan, names):
        say(line)
    for note in notes_of(plan.notes, names):
        say(f"note: {note}")


# -- a plan at a glance ------------------------------------------------------------------------------------------------


def summary(
    plan: Plan | PipelinePlan, file: IO[str] | None = None, width: int | None = None, named: bool = False
) -> None:
    """Print the cost of a plan for one rank. Every rank has the same cost, except those of other stages of a pipeline.

    Args:
        plan: the plan.
        file: the file to print to; None: standard output.
        width: of tables, in characters; None: the terminal's, or 100 where there is none.
        named: True where the user has named the cluster.
    """
    if isinstance(plan, PipelinePlan):
        summary_of_pipeline(plan, file, width, named)
        return
    console, names = console_of(file, width), OperatorNames(plan)
    price, cluster = plan.price, Cluster.of(plan.cluster, plan.devices)
    say = saying(console, width)
    say(headline_of(plan))
    for line in (*describe(plan).body(), cluster_line(plan, named), inputs_line(plan), step_line(plan)):
        say(line)
    for line in beside_lines(plan):
        say(line)
    say(bound_line(plan))
    show(console, memory(plan.timeline.kinds, plan.peak, cluster, plan.optimizer))
    if plan.peak > cluster.memory:
        say('that is more than a device has: memory="cluster" (--memory cluster) searches for a plan that fits')
        results = sum(value.nbytes for value in plan.graph.outputs if isinstance(value, Value))
        if results > cluster.memory / 10 and not plan.input_placement.per_rank_batch:
            say(f"every device gets the model's results whole, {size_text(results)}: return the loss alone")
    if price.collectives:
        show(console, _dearest(price.collectives, cluster, names))
    found = plan.found.notes if plan.found is not None else ()
    notes = notes_of(dict.fromkeys((*plan.notes, *found)), names)
    for note in notes[:NOTES]:
        say(f"note: {note}")
    if len(notes) > NOTES:
        say(f"note: and {len(notes) - NOTES} more, which the lines of the plan have")


def headline_of(plan: Plan) -> str:
    """The mode, the devices, the cluster, the number of operators and the fingerprint of a plan, as a line."""
    devices = f"{plan.devices} device{'s' * (plan.devices > 1)} of {Cluster.of(plan.cluster, plan.devices).name}"
    return f"{plan.mode} on {devices}: {len(plan.decisions)} operators, plan {plan.fingerprint}"


def step_line(plan: Plan) -> str:
    """The time of a step by its parts, as a sentence."""
    price = plan.price
    halves = f"forward {time_text(price.forward)}, backward {time_text(price.backward)}"
    parts = f"computing {time_text(price.compute)}, communication {time_text(price.communication)}"
    return f"a step takes {time_text(price.total)}: {halves}; {parts}"


def bound_line(plan: Plan) -> str:
    """The lower bound of a plan, as a sentence."""
    if plan.bound is None:
        searched = plan.found is not None
        return "no lower bound was proved" if searched else "nothing was searched, so there is no lower bound"
    return cost_text(plan.cost, plan.bound, plan.gap)


def memory(kinds: dict[str, float], peak: float, cluster: Cluster, optimizer: OptimizerSetting) -> Table:
    """The memory of a device at the peak of a step, by kind."""
    made = table("on a device, when it holds most", "bytes", right=("bytes",))
    for kind, count in kinds.items():
        made.add_row(f"{kind} ({optimizer_text(optimizer)})" if kind == "optimizer" else kind, size_text(count))
    made.add_row("all together", size_text(peak), style="bold")
    made.add_row(f"a device of {cluster.name} has", size_text(cluster.memory))
    return made


def _dearest(collectives: Iterable[PricedCollective], cluster: Cluster, names: OperatorNames) -> Table:
    """The most expensive communications; equal ones share a row."""
    alike: dict[tuple[object, ...], list[PricedCollective]] = {}
    for c in collectives:
        alike.setdefault((c.kind, c.digits, c.bytes, c.phase), []).append(c)
    rows = sorted(alike.values(), key=lambda group: -_seconds_of(group))
    made = _communication_table()
    for group in rows[:DEAREST]:
        made.add_row(*_communication_row(group, cluster, names))
    if len(rows) > DEAREST:
        seconds = sum(map(_seconds_of, rows[DEAREST:]))
        made.add_row(*map(Text, ("others", "", "", "", str(sum(map(len, rows[DEAREST:]))), time_text(seconds), "", "")))
    return made


def _seconds_of(collectives: Iterable[PricedCollective]) -> float:
    return sum(c.seconds for c in collectives)


def _communication_table(*more: str) -> Table:
    """An empty table of communications, with more columns behind the first one."""
    return table(
        "communication",
        *more,
        "ranks",
        "over",
        "bytes",
        "times",
        "seconds",
        "phase",
        "for",
        right=("ranks", "bytes", "times", "seconds"),
        wraps=("over", "for"),
    )


def _communication_row(
    equal: Sequence[PricedCollective], cluster: Cluster, names: OperatorNames, *more: str
) -> Iterator[Text]:
    """The row of communications that differ in their operators alone; `more` are the cells behind the first one."""
    first = equal[0]
    over = ", ".join(f"{units} by {link_text(level)}" for level, units in cluster.crossed(first.digits))
    return map(
        Text,
        (
            first.kind,
            *more,
            str(digits_size(first.digits)),
            over,
            size_text(first.bytes),
            str(len(equal)),
            time_text(_seconds_of(equal)),
            first.phase,
            operators_text(names, (c.operator for c in equal)),
        ),
    )


def ranks_text(ranks: range) -> str:
    """World ranks as text: ``0-3``."""
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])


def grid(plan: PipelinePlan, width: int = COLUMNS) -> str | None:
    """The schedule as a grid of actions; None where the grid would be too long or wider than `width`."""
    text = plan.schedule.grid()
    lines = text.splitlines()
    return text if len(lines) <= LINES and max(map(len, lines), default=0) <= width else None


def explain_pipeline(plan: PipelinePlan, file: IO[str] | None = None, width: int | None = None) -> None:
    """Print a pipeline: each stage for one micro-batch, as `tables.explain` prints a plan, and the transfers between
    stages.

    Args:
        plan: the pipeline.
        file: the file to print to; None: standard output.
        width: see `tables.explain`.
    """
    sent = {stage.number: stage.plan.collectives(0) for stage in plan.stages}
    console, names = console_of(file, width), OperatorNames(plan)
    say = saying(console, width)
    say(
        f"{plan.mode} on {plan.devices} devices of {Cluster.of(plan.cluster, plan.devices).name}: {_scheduled(plan)}, "
        f"{len(plan.operators)} operators, plan {plan.fingerprint}"
    )
    for line in (*describe(plan).body(), cluster_line(plan), inputs_line(plan), headline(plan.simulation)):
        say(line)
    say_chosen(plan, console, say)
    console.print(Text(legend(names)))
    for stage in plan.stages:
        say(f"stage {stage.number} on rank{'s' * (stage.devices > 1)} {ranks_text(stage.ranks)}, one micro-batch")
        number = stage.number
        show(console, operators_table(rows(stage.plan, sent[number], names, (send,)), console))
        say(total(stage.plan, sent[number], "with one micro-batch"))
        if stage.plan.parameters:
            show(console, parameters(stage.plan))
        for line in regions(stage.plan, names):
            say(line)
    if plan.transfers:
        show(console, crossing(plan, names))
    for stage in _firsts(plan):
        sends = sum(c.sent for c in plan.collectives(stage.first))
        memory = memory_line(plan.memory(stage.first), stage.plan.counted_optimizer)
        say(f"{_on(plan, stage)}: {memory}; sends {size_text(sends)} in a step")
    if (text := grid(plan, min(COLUMNS, console.width) if console.is_terminal or width else COLUMNS)) is not None:
        say(text.rstrip("\n"))
    for note in notes_of(plan.notes, names):
        say(f"note: {note}")


def say_chosen(plan: PipelinePlan, console: Console, say: Callable[[str], None]) -> None:
    """Print the alternatives that stages="auto" priced and its choice. Nothing is printed where the stages were
    given."""
    if plan.chosen is not None:
        show(console, alternatives_of(plan.chosen))
        for line in cuts_of(plan.chosen):
            say(line)


def _scheduled(plan: PipelinePlan) -> str:
    made = plan.schedule
    groups = f" on {made.groups} groups of devices" if made.groups != made.stages else ""
    return f"{made.stages} stages{groups}, {made.name}, {made.micro_batches} micro-batches"


def _firsts(plan: PipelinePlan) -> Iterator[Stage]:
    """The first stage of each group of devices."""
    placement = plan.schedule.placement
    for group in range(plan.schedule.groups):
        yield plan.stages[placement.index(group)]


def _on(plan: PipelinePlan, first: Stage) -> str:
    numbers = [str(stage.number) for stage in plan.stages if stage.first == first.first]
    which = f"each of the ranks {ranks_text(first.ranks)}" if first.devices > 1 else f"rank {first.first}"
    return f"on {which} (stage{'s' * (len(numbers) > 1)} {', '.join(numbers)})"


def crossing(plan: PipelinePlan, names: OperatorNames) -> Table:
    """The transfers between stages, a row each."""
    made = table("crosses", "from", "to", "shape", "cuts", "a rank sends", "when", "gradient", right=("a rank sends",))
    for t in plan.transfers:
        when = "each micro-batch" if t.kind == "value" else "once a step"
        shape = "x".join(map(str, t.value.shape)) or "scalar"
        made.add_row(
            *map(
                Text,
                (
                    names.value(t.name),
                    f"stage {t.source}",
                    f"stage {t.target}",
                    shape,
                    str(t.layout.cuts),
                    _sent(plan, t),
                    when,
                    "comes back" if t.gradient else "",
                ),
            )
        )
    return made


def _sent(plan: PipelinePlan, t: Transfer) -> str:
    if plan.stages[t.source].first == plan.stages[t.target].first:
        return "nothing"  # both stages run on the same devices
    return size_text(t.nbytes)


def summary_of_pipeline(
    plan: PipelinePlan, file: IO[str] | None = None, width: int | None = None, named: bool = False
) -> None:
    """Print the cost of a pipeline: the time of a step, and each stage's share of it; arguments as of `summary`."""
    console, names = console_of(file, width), OperatorNames(plan)
    say = saying(console, width)
    cluster, simulation = Cluster.of(plan.cluster, plan.devices), plan.simulation
    say(
        f"{plan.mode} on {plan.devices} devices of {cluster.name}: {len(plan.operators)} operators, plan "
        f"{plan.fingerprint}"
    )
    for line in (*describe(plan).body(), cluster_line(plan, named), inputs_line(plan)):
        say(line)
    say(headline(simulation))
    say("no lower bound was proved: stages are planned one by one")
    say_chosen(plan, console, say)
    for made in stages(plan, simulation, console):
        show(console, made)
    if plan.peak > cluster.memory:
        say(f"that is more than a device has, which is {size_text(cluster.memory)}")
    if plan.transfers:
        show(console, crossing(plan, names))
    spent = [(c, stage) for stage in plan.stages for c in stage.plan.price.collectives]
    if spent:
        show(console, _dearest_stage(spent, cluster, names))
    notes = notes_of(plan.notes, names)
    for note in notes[:NOTES]:
        say(f"note: {note}")
    if len(notes) > NOTES:
        say(f"note: and {len(notes) - NOTES} more, which the lines of the plan have")


def stages(plan: PipelinePlan, simulation: Simulation, console: Console) -> Iterator[Table]:
    """The table of the stages, a row each: seconds of one micro-batch, bytes on a device. Two tables where one is too
    wide for the console."""
    kinds = list(dict.fromkeys(kind for stage in plan.stages for kind in stage.plan.memory(0)))
    headings = {"optimizer": f"optimizer ({optimizer_text(plan.stages[0].plan.counted_optimizer)})"}
    times, sizes = (
        ("operators", "forward", "backward", "once a step", "kept", "waits"),
        [headings.get(k, k) for k in kinds],
    )

    def drawn(*parts: str) -> Table:
        numbers = [*(times if "times" in parts else ()), *((*sizes, "peak") if "sizes" in parts else ())]
        made = table("stage", "ranks", *numbers, right=tuple(numbers))
        for stage in plan.stages:
            group = plan.schedule.placement[stage.number]
            most_saved, memory = plan.schedule.most_saved(stage.number), plan.memory_of(stage)
            operators = sum(op.target is not send for op in stage.plan.graph.ops)
            waits = 1 - simulation.busy(group) / simulation.total if simulation.total else 0.0
            spent = (str(operators), *map(time_text, _seconds(simulation, stage)), f"{most_saved}x", f"{waits:.1%}")
            stored = (*(size_text(memory[k]) if k in memory else "" for k in kinds), size_text(simulation.peak(group)))
            cells = (*(spent if "times" in parts else ()), *(stored if "sizes" in parts else ()))
            made.add_row(str(stage.number), ranks_text(stage.ranks), *cells)
        return made

    whole = drawn("times", "sizes")
    if console.measure(whole, options=console.options.update(max_width=UNLIMITED)).maximum <= console.width:
        yield whole
    else:
        yield drawn("times")
        yield drawn("sizes")


def _seconds(simulation: Simulation, stage: Stage) -> tuple[float, float, float]:
    """Seconds of a stage: the forward and the backward of its first micro-batch, and its operations of once a step."""
    spent = {"forward": 0.0, "backward": 0.0, "once": 0.0}
    for span in simulation.spans:
        if span.action.stage == stage.number:
            if isinstance(span.action, Once):
                spent["once"] += span.stop - span.start
            elif span.action.micro == 0:
                spent["forward" if span.action.kind == "F" else "backward"] += span.stop - span.start
    return spent["forward"], spent["backward"], spent["once"]


def _dearest_stage(spent: Iterable[tuple[PricedCollective, Stage]], cluster: Cluster, names: OperatorNames) -> Table:
    """The most expensive communications inside stages, for one micro-batch. Equal communications share a row; a row
    that several stages share counts one of them, the most expensive."""
    alike: dict[tuple[str, Digits, float, str, int], dict[int, list[PricedCollective]]] = {}
    for c, stage in spent:
        key = c.kind, c.digits, c.bytes, c.phase, stage.devices
        alike.setdefault(key, {}).setdefault(stage.number, []).append(c)
    made = _communication_table("stages")
    rows = [(max(by_stage.values(), key=_seconds_of), by_stage, devices) for (*_, devices), by_stage in alike.items()]
    for most, by_stage, devices in sorted(rows, key=lambda row: -_seconds_of(row[0]))[:DEAREST]:
        made.add_row(*_communication_row(most, Cluster.of(cluster, devices), names, numbers_text(by_stage)))
    return made
