"""Contenders take turns step by step in the same processes, so that whatever else the machine does meets all of them.

What counts is the ratio of two steps of one round, its median and quartiles over the rounds. Before anything is timed a
check compares every contender with one device.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "support"))  # for its forked ranks

from ranks import run_ranks

__all__ = ["ROOT", "Check", "Contender", "Figure", "Results", "Spread", "run_race"]

SECONDS_ALONE = 0.05

# A process that is forked from one whose OpenMP has had threads hangs when it wants some too, as a contender alone
# does.
torch.set_num_threads(1)


# -- contenders --------------------------------------------------------------------------------------------------------


@dataclass
class Contender:
    """One way to train the network.

    Attributes:
        step: a whole step; gives the loss, as a tensor.
        parameters: what this process holds of the parameters, as plain tensors.
        alone: it runs on rank 0, while the others wait.
    """

    step: Callable[[], Tensor]
    parameters: Callable[[], list[Tensor]]
    alone: bool = False


# -- races -------------------------------------------------------------------------------------------------------------


#: Called with (name, contender, rank); raises AssertionError where a contender does not compute what one device does.
Check = Callable[[str, Contender, int], None]


def race(
    rank: int, world: int, make: Callable[[str], Contender], check: Check, entries: Sequence[str], steps: int
) -> dict[str, list[float]]:
    """On one rank: check all contenders, then time them in turns.

    Returns:
        Contender -> the seconds of each of its steps on this rank; nothing for one that ran elsewhere.
    """
    logging.disable(logging.WARNING)  # DTensor says that its all-to-all is slow here, and asks for a flattened mesh
    contenders = {}
    for name in entries:
        made = make(name)
        if rank == 0 or not made.alone:
            contenders[name] = made
        check(name, made, rank)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(steps):
        for name in order(entries, turn):
            if world > 1:
                dist.barrier()
            if name in contenders:
                times[name].append(timed(contenders[name]))
    return times


def timed(entry: Contender) -> float:
    """The seconds of one step; of a short one alone, which has all cores, the median of several in a row, for what the
    others have left in the caches would count."""
    seconds, threads = [], torch.get_num_threads()
    if entry.alone:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    while True:
        start = time.perf_counter()
        entry.step()
        seconds.append(time.perf_counter() - start)
        if not entry.alone or sum(seconds) > SECONDS_ALONE:
            torch.set_num_threads(threads)
            return statistics.median(seconds)


def order(entries: Sequence[str], turn: int) -> list[str]:
    """Everybody comes first in turn, and every second round goes backwards: nobody always follows the same one."""
    first = turn // 2 % len(entries)
    turned = [*entries[first:], *entries[:first]]
    return turned[::-1] if turn % 2 else turned


def run_race(
    world: int, make: Callable[[str], Contender], check: Check, entries: Sequence[str], steps: int, seconds: float = 5.0
) -> dict[str, list[float]]:
    """Contender -> the milliseconds of each step, those of the rank that took longest.

    Args:
        make: a contender of that name, on this rank.
        seconds: that a round may take.
    """
    by_rank = run_ranks(race, world, make, check, entries, steps, timeout=120 + seconds * (steps + 10))
    return {name: [1e3 * max(t) for t in zip(*(times[name] for times in by_rank if name in times))] for name in entries}


# -- results -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        digits = 2 if self.median < 10 else 1
        return f"{self.median:.{digits}f}  ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass(frozen=True)
class Figure:
    """A figure to compare with a target: median `at` most or at least so much; None: for information."""

    section: str
    name: str
    spread: Spread
    at_most: float | None = None
    at_least: float | None = None

    @property
    def ok(self) -> bool | None:
        if self.at_most is None and self.at_least is None:
            return None
        return (self.at_most is None or self.spread.median <= self.at_most) and (
            self.at_least is None or self.spread.median >= self.at_least
        )

    @property
    def target(self) -> str:
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return f"at least {self.at_least:g}" if self.at_least is not None else ""


@dataclass
class Results:
    """Everything that was measured.

    Attributes:
        times: section -> contender -> milliseconds of each step.
        figures: in the order of the sections.
    """

    times: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)

    def compare(self, section: str, one: str, other: str, **target: float) -> None:
        """The ratio of two contenders' steps, round by round."""
        pairs = zip(self.times[section][one], self.times[section][other], strict=True)
        self.figures.append(Figure(section, f"{one} / {other}", Spread.of([a / b for a, b in pairs]), **target))

    def fastest(self, section: str, word: str) -> str:
        """The form of a contender with the lowest median."""
        forms = [name for name in self.times[section] if name.startswith(word)]
        return min(forms, key=lambda name: statistics.median(self.times[section][name]))

    def finish(self, console: Console, path: Path) -> int:
        """Show and write everything; the script's exit code: 1 if a target was missed."""
        self.show(console)
        self.write(path)
        console.print(f"written to {path}")
        return 0 if all(f.ok is not False for f in self.figures) else 1

    def write(self, path: Path) -> None:
        figures = [asdict(f) | {"ok": f.ok} for f in self.figures]
        path.write_text(json.dumps({"machine": machine(), "figures": figures, "milliseconds": self.times}, indent=1))

    def show(self, console: Console) -> None:
        for section, times in self.times.items():
            table = Table("step", "ms", title=f"{section}: median (quartiles)", title_justify="left", box=box.SIMPLE)
            for name, values in times.items():
                table.add_row(name, str(Spread.of(values)))
            console.print(table)
        table = Table("", "", "median (quartiles)", "target", "", box=box.SIMPLE)
        for f in self.figures:
            table.add_row(f.section, f.name, str(f.spread), f.target, {True: "ok", False: "MISSED", None: ""}[f.ok])
        console.print(table)


def machine() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }
