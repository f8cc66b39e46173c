"""A pipeline in a terminal: its stages, the transfers between them, each stage's operators and parameters.

1. `explain_pipeline` prints every operator and parameter of every stage, and the schedule as a grid.
2. `summary_of_pipeline` prints the simulated step, a line for each stage, and the most expensive communications.

Plans without stages are printed by `tables`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..cluster import Cluster
from ..cost.cost_model import PricedCollective
from ..cost.memory_timeline import optimizer_text
from ..layout import Digits, digits_size
from ..pipeline.pipeline_plan import PipelinePlan, Stage, Transfer
from ..pipeline.simulate import Once, Simulation
from ..rules.dims import send
from .description import cluster_line, describe, inputs_line, numbers_text
from .format import size_text, time_text
from .operator_names import OperatorNames
from .table_parts import (
    DEAREST,
    LEGEND,
    NOTES,
    UNLIMITED,
    alternatives_of,
    console_of,
    cuts_of,
    memory_line,
    notes_of,
    operators_table,
    operators_text,
    parameters,
    regions,
    rows,
    saying,
    show,
    table,
    total,
)
from .timeline import COLUMNS, LINES, headline

__all__ = ["crossing", "explain_pipeline", "grid", "ranks_text", "stages", "summary_of_pipeline"]


def ranks_text(ranks: range) -> str:
    """World ranks as text: ``0-3``."""
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])


def grid(plan: PipelinePlan) -> str | None:
    """The schedule as a grid of actions; None where the grid would be too long or too wide to read."""
    text = plan.schedule.grid()
    lines = text.splitlines()
    return text if len(lines) <= LINES and max(map(len, lines), default=0) <= COLUMNS else None


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
        f"{plan.mode} on {plan.devices} devices: {_scheduled(plan)}, {len(plan.operators)} operators, plan "
        f"{plan.fingerprint}"
    )
    for line in (*describe(plan).body(), inputs_line(plan)):
        say(line)
    say_chosen(plan, console, say)
    console.print(Text(LEGEND))
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
        show(console, crossing(plan))
    for stage in _firsts(plan):
        sends = sum(c.sent for c in plan.collectives(stage.first))
        held = memory_line(plan.memory(stage.first), stage.plan.counted_optimizer)
        say(f"{_on(plan, stage)}: {held}; sends {size_text(sends)} in a step")
    if (text := grid(plan)) is not None:
        say(text.rstrip("\n"))
    for note in notes_of(plan.notes):
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


def crossing(plan: PipelinePlan) -> Table:
    """The transfers between stages, a row each."""
    made = table("crosses", "from", "to", "shape", "cuts", "a rank sends", "when", "gradient", right=("a rank sends",))
    for t in plan.transfers:
        when = "each micro-batch" if t.kind == "value" else "once a step"
        shape = "x".join(map(str, t.value.shape)) or "scalar"
        made.add_row(
            *map(
                Text,
                (
                    t.name,
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


def summary_of_pipeline(plan: PipelinePlan, file: IO[str] | None = None, width: int | None = None) -> None:
    """Print the cost of a pipeline: the time of a step, and each stage's share of it."""
    console, names = console_of(file, width), OperatorNames(plan)
    say = saying(console, width)
    cluster, simulation = Cluster.of(plan.cluster, plan.devices), plan.simulation
    say(
        f"{plan.mode} on {plan.devices} devices of {cluster.name}: {len(plan.operators)} operators, plan "
        f"{plan.fingerprint}"
    )
    for line in (*describe(plan).body(), cluster_line(plan), inputs_line(plan)):
        say(line)
    say(headline(simulation))
    say("no lower bound was proved: stages are planned one by one")
    say_chosen(plan, console, say)
    for made in stages(plan, simulation, console):
        show(console, made)
    if plan.peak > cluster.memory:
        say(f"that is more than a device has, which is {size_text(cluster.memory)}")
    if plan.transfers:
        show(console, crossing(plan))
    spent = [(c, stage) for stage in plan.stages for c in stage.plan.price.collectives]
    if spent:
        show(console, _dearest_stage(spent, cluster, names))
    notes = notes_of(plan.notes)
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
            kept, held = plan.schedule.most_kept(stage.number), plan.memory_of(stage)
            operators = sum(op.target is not send for op in stage.plan.graph.ops)
            waits = 1 - simulation.busy(group) / simulation.total if simulation.total else 0.0
            spent = (str(operators), *map(time_text, _seconds(simulation, stage)), f"{kept}x", f"{waits:.1%}")
            stored = (*(size_text(held[k]) if k in held else "" for k in kinds), size_text(simulation.peak(group)))
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
    seconds = lambda of: sum(c.seconds for c in of)
    made = table(
        "communication",
        "stages",
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
    order = [(key, stages, max(stages.values(), key=seconds)) for key, stages in alike.items()]
    for (kind, digits, size, phase, devices), stages, most in sorted(order, key=lambda one: -seconds(one[2]))[:DEAREST]:
        over = ", ".join(f"{units} by {level.name}" for level, units in Cluster.of(cluster, devices).crossed(digits))
        made.add_row(
            *map(
                Text,
                (
                    kind,
                    numbers_text(stages),
                    str(digits_size(digits)),
                    over,
                    size_text(size),
                    str(len(most)),
                    time_text(seconds(most)),
                    phase,
                    operators_text(names, (c.operator for c in most)),
                ),
            )
        )
    return made
