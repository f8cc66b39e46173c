"""A plan in a terminal.

1. `explain` prints every operator with its strategy and traffic, and every parameter with its layout.
2. `summary` prints a plan at a glance: the time of a step, the memory of a device, the most expensive communications.

Both hand a pipeline to `pipeline_tables`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from rich.table import Table
from rich.text import Text

from ..cluster import Cluster
from ..cost.cost_model import PricedCollective
from ..cost.memory_timeline import OptimizerSetting, optimizer_text
from ..graph import Value
from ..layout import digits_size
from ..pipeline.pipeline_plan import PipelinePlan
from ..sharded_plan import Plan
from .description import cluster_line, describe, inputs_line
from .format import size_text, time_text
from .operator_names import OperatorNames
from .pipeline_tables import explain_pipeline, summary_of_pipeline
from .table_parts import (
    DEAREST,
    LEGEND,
    NOTES,
    beside_lines,
    console_of,
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

__all__ = ["explain", "memory", "summary"]


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
    head = f"{plan.mode} on {plan.devices} device{'s' * (plan.devices > 1)}"
    say(f"{head}: {len(plan.operators)} operators, plan {plan.fingerprint}")
    for line in (*describe(plan).body(), inputs_line(plan)):
        say(line)
    show(console, operators_table(rows(plan, sent, names), console))
    console.print(Text(LEGEND))
    say(total(plan, sent))
    if plan.parameters:
        show(console, parameters(plan))
        say(f"on a device: {memory_line(plan.memory(0), plan.counted_optimizer)}")
    for line in regions(plan, names):
        say(line)
    for note in notes_of(plan.notes):
        say(f"note: {note}")


# -- a plan at a glance ------------------------------------------------------------------------------------------------


def summary(plan: Plan | PipelinePlan, file: IO[str] | None = None, width: int | None = None) -> None:
    """Print the cost of a plan for one rank. Every rank has the same cost, except those of other stages of a pipeline.

    Args:
        plan: the plan.
        file: the file to print to; None: standard output.
        width: of tables, in characters; None: the terminal's, or 100 where there is none.
    """
    if isinstance(plan, PipelinePlan):
        summary_of_pipeline(plan, file, width)
        return
    console, names = console_of(file, width), OperatorNames(plan)
    price, cluster = plan.price, Cluster.of(plan.cluster, plan.devices)
    say = saying(console, width)
    say(
        f"{plan.mode} on {plan.devices} device{'s' * (plan.devices > 1)} of {cluster.name}: {len(plan.decisions)} "
        f"operators, plan {plan.fingerprint}"
    )
    for line in (*describe(plan).body(), cluster_line(plan), inputs_line(plan)):
        say(line)
    forward, backward, computing, sending = map(
        time_text, (price.forward, price.backward, price.compute, price.communication)
    )
    say(
        f"a step takes {time_text(price.total)}: forward {forward}, backward {backward}; computing {computing}, "
        f"communication {sending}"
    )
    for line in beside_lines(plan):
        say(line)
    if plan.bound is None:
        say(
            "no lower bound was proved"
            if plan.found is not None
            else "nothing was searched, so there is no lower bound"
        )
    else:
        say(f"cost {plan.cost:.6g} s, lower bound {plan.bound:.6g} s, gap {plan.gap:.3%}")
    show(console, memory(plan.timeline.kinds, plan.peak, cluster, plan.optimizer))
    if plan.peak > cluster.memory:
        say('that is more than a device has: memory="cluster" (--memory cluster) searches for a plan that fits')
        results = sum(value.nbytes for value in plan.graph.outputs if isinstance(value, Value))
        if results > cluster.memory / 10 and not plan.input_placement.per_rank_batch:
            say(f"every device gets the model's results whole, {size_text(results)}: return the loss alone")
    if price.collectives:
        show(console, _dearest(price.collectives, cluster, names))
    found = plan.found.notes if plan.found is not None else ()
    notes = notes_of(dict.fromkeys((*plan.notes, *found)))
    for note in notes[:NOTES]:
        say(f"note: {note}")
    if len(notes) > NOTES:
        say(f"note: and {len(notes) - NOTES} more, which the lines of the plan have")


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
    rows = sorted(alike.values(), key=lambda group: -sum(c.seconds for c in group))
    made = table(
        "communication",
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
    for group in rows[:DEAREST]:
        first, seconds = group[0], sum(c.seconds for c in group)
        over = ", ".join(f"{units} by {level.name}" for level, units in cluster.crossed(first.digits))
        made.add_row(
            *map(
                Text,
                (
                    first.kind,
                    str(digits_size(first.digits)),
                    over,
                    size_text(first.bytes),
                    str(len(group)),
                    time_text(seconds),
                    first.phase,
                    operators_text(names, (c.operator for c in group)),
                ),
            )
        )
    if len(rows) > DEAREST:
        seconds = sum(c.seconds for group in rows[DEAREST:] for c in group)
        made.add_row(*map(Text, ("others", "", "", "", str(sum(map(len, rows[DEAREST:]))), time_text(seconds), "", "")))
    return made
