"""What a terminal shows of a simulated step: what it takes, who waits how long and holds how much, and the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..plan.simulate import Simulation
from .timeline import headline
from .units import size_text, time_text

__all__ = ["simulated"]

#: The most lines and columns of a schedule's grid that are shown.
LINES, COLUMNS = 64, 120


def simulated(simulation: Simulation, ranks: Sequence[range], memory: float, file: IO[str] | None = None) -> None:
    """Print a step in time.

    Args:
        ranks: by group.
        memory: bytes that a device has.
    """
    console = Console(file=file, highlight=False, soft_wrap=True)
    console = console if console.is_terminal else Console(file=file, highlight=False, width=200)
    say = lambda text: console.print(Text(text))  # noqa: E731
    say(headline(simulation))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in ("ranks", "stages", "works", "waits", "always holds", "peak memory"):
        table.add_column(name, justify="left" if name in ("ranks", "stages") else "right", overflow="fold")
    made = simulation.schedule
    for group, each in enumerate(ranks):
        stages = [str(stage) for stage, home in enumerate(made.placement) if home == group]
        busy, total = simulation.busy(group), simulation.total
        table.add_row(f"{each[0]}-{each[-1]}" if len(each) > 1 else f"{each[0]}", ", ".join(stages), time_text(busy),
                      f"{1 - busy / total:.1%}" if total else "", size_text(simulation.memory(group)[0][1]),
                      size_text(simulation.peak(group)))
    console.print(table)
    most = max(simulation.peak(group) for group in range(made.groups))
    if most > memory:
        say(f"that is more than a device has, which is {size_text(memory)}")
    lines = made.grid().splitlines()
    if made.stages > 1 and len(lines) <= LINES and max(map(len, lines)) <= COLUMNS:
        say("\n".join(["the schedule, if every action took as long:", *lines]))
