"""A plan in a terminal.

1. `explain` prints every operator with its strategy and traffic, and every parameter with its layout.
2. `summary` prints a plan at a glance: the time of a step, the memory of a device, the most expensive communications.

Both hand a pipeline to `pipeline_tables`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..cluster import Cluster
from ..cost.cost_model import PricedCollective
from ..cost.memory_timeline import optimizer_text
from ..layout import digits_size
from ..pipeline.pipeline_plan import PipelinePlan
from ..sharded_plan import Plan
from .format import size_text, time_text
from .pipeline_tables import explain_pipeline, summary_of_pipeline
from .table_parts import (
    DEAREST,
    LEGEND,
    NOTES,
    UNLIMITED,
    beside_lines,
    memory_line,
    narrow,
    parameters,
    rows,
    total,
    wide,
)

__all__ = ["explain", "summary"]


def explain(plan: Plan | PipelinePlan, file: IO[str] | None = None, width: int | None = None) -> None:
    """Print a plan: every operator, its call site, its strategy, layouts, local shapes and traffic. A pipeline is
    printed stage by stage, with the transfers between stages.

    All numbers are those of the plan's own collectives, for one rank; no rank sends more.

    Args:
        plan: the plan.
        file: the file to print to; None: standard output.
        width: the width of the text, in characters; None: the terminal's, or as needed where there is none. Operators
            that do not fit on one line take several; nothing is cut off.
    """
    if isinstance(plan, PipelinePlan):
        explain_pipeline(plan, file, width)
        return
    sent = plan.collectives(0)
    lines = rows(plan, sent)
    shown = wide(lines)
    console = Console(file=file, width=width, highlight=False)
    needed = console.measure(shown, options=console.options.update(max_width=UNLIMITED)).maximum
    if width is None and not console.is_terminal:
        console = Console(file=file, width=max(needed, 100), highlight=False)
    head = f"{plan.mode} on {plan.devices} device{'s' * (plan.devices > 1)}"
    console.print(Text(f"{head}: {len(plan.operators)} operators, plan {plan.fingerprint}"))
    console.print(shown if needed <= console.width else narrow(lines))
    console.print(Text(LEGEND))
    console.print(Text(total(plan, sent)))
    if plan.parameters:
        console.print(parameters(plan))
        console.print(Text(f"on a device: {memory_line(plan.memory(0), plan.counted_optimizer)}"))
    for region in plan.regions:
        console.print(Text(f"recomputed in the backward: {region.path} ({', '.join(region.operators)})"))
    for note in plan.notes:
        console.print(Text(f"note: {note}"))


# -- a plan at a glance ------------------------------------------------------------------------------------------------


def summary(plan: Plan | PipelinePlan, file: IO[str] | None = None) -> None:
    """Print the cost of a plan for one rank. Every rank has the same cost, except those of other stages of a pipeline.

    Args:
        plan: the plan.
        file: the file to print to; None: standard output.
    """
    if isinstance(plan, PipelinePlan):
        summary_of_pipeline(plan, file)
        return
    console = Console(file=file, highlight=False, soft_wrap=True)
    console = console if console.is_terminal else Console(file=file, highlight=False, width=200)
    price, cluster = plan.price, Cluster.of(plan.cluster, plan.devices)
    say = lambda text: console.print(Text(text))
    say(
        f"{plan.mode} on {plan.devices} device{'s' * (plan.devices > 1)} of {cluster.name}: {len(plan.decisions)} "
        f"operators, plan {plan.fingerprint}"
    )
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
    console.print(_memory(plan.timeline.kinds, plan.peak, cluster, plan.optimizer))
    if plan.peak > cluster.memory:
        say('that is more than a device has: memory="cluster" (--memory cluster) searches for a plan that fits')
    if price.collectives:
        console.print(_dearest(price.collectives, price.communication, cluster))
    notes = [*dict.fromkeys((*plan.notes, *(plan.found.notes if plan.found is not None else ())))]
    for note in notes[:NOTES]:
        say(f"note: {note}")
    if len(notes) > NOTES:
        say(f"note: and {len(notes) - NOTES} more, which the lines of the plan have")


def _table(*columns: str, right: tuple[str, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _memory(kinds: dict[str, float], peak: float, cluster: Cluster, optimizer: Any) -> Table:
    """The memory of a device at the peak of a step, by kind."""
    table = _table("on a device, when it holds most", "bytes", right=("bytes",))
    for kind, count in kinds.items():
        table.add_row(f"{kind} ({optimizer_text(optimizer)})" if kind == "optimizer" else kind, size_text(count))
    table.add_row("all together", size_text(peak), style="bold")
    table.add_row(f"a device of {cluster.name} has", size_text(cluster.memory))
    return table


def _dearest(collectives: Iterable[PricedCollective], together: float, cluster: Cluster) -> Table:
    """The most expensive communications; equal ones share a row."""
    alike: dict[tuple[object, ...], list[PricedCollective]] = {}
    for c in collectives:
        alike.setdefault((c.kind, c.digits, c.bytes, c.phase), []).append(c)
    rows = sorted(alike.values(), key=lambda group: -sum(c.seconds for c in group))
    table = _table(
        "communication",
        "ranks",
        "over",
        "bytes",
        "times",
        "seconds",
        "part",
        "phase",
        "for",
        right=("ranks", "bytes", "times", "seconds", "part"),
    )
    for group in rows[:DEAREST]:
        first, seconds = group[0], sum(c.seconds for c in group)
        names = list(dict.fromkeys(c.operator for c in group))
        over = ", ".join(f"{units} by {level.name}" for level, units in cluster.crossed(first.digits))
        table.add_row(
            *map(
                Text,
                (
                    first.kind,
                    str(digits_size(first.digits)),
                    over,
                    size_text(first.bytes),
                    str(len(group)),
                    time_text(seconds),
                    f"{seconds / together:.0%}" if together else "",
                    first.phase,
                    ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
                ),
            )
        )
    if len(rows) > DEAREST:
        seconds = sum(c.seconds for group in rows[DEAREST:] for c in group)
        table.add_row(
            *map(
                Text,
                (
                    "others",
                    "",
                    "",
                    "",
                    str(sum(map(len, rows[DEAREST:]))),
                    time_text(seconds),
                    f"{seconds / together:.0%}" if together else "",
                    "",
                    "",
                ),
            )
        )
    return table
