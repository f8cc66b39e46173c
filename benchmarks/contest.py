"""The public instances of the ASPLOS 2025 contest: what `solve` finds in the time, against the best values known.

    python benchmarks/contest.py [NAME ...] [--instances FOLDER] [--seconds N] [--cpu]

G and B are given 10 s, the others 120 s, file reading included. `--cpu` counts the seconds of this process alone: for a
machine that others use at the same time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from iopddl import read_contest
from race import ROOT, machine
from rich import box
from rich.console import Console
from rich.table import Table

from shardwright.solver.solve import solve


@dataclass(frozen=True)
class Target:
    """The target of one instance.

    Attributes:
        best: the best cost known: published by the contest's teams, or XLA's own, or proved by HiGHS.
        ratio: to it, that has to be reached.
        seconds: within.
    """

    best: float
    ratio: float
    seconds: float


TARGETS = {
    "G": Target(217_039, 1.0, 10),
    "B": Target(532_843, 1.0, 10),
    "V": Target(1_632_051, 1.3, 120),
    "A": Target(6_548_641_531, 1.05, 120),
    "K": Target(2_274_276_676, 1.05, 120),
    "P": Target(651_833_115_436, 1.05, 120),
}


@dataclass(frozen=True)
class Row:
    """The result that was found.

    Attributes:
        fullest: the memory at the fullest moment, relative to the limit.
        wall, cpu: seconds, reading included.
    """

    name: str
    cost: float
    best: float
    ratio: float
    bound: float
    gap: float
    fullest: float
    wall: float
    cpu: float
    target: float
    ok: bool


def measure(name: str, path: Path, seconds: float) -> Row:
    """Solve one instance."""
    wall, cpu, clock = time.perf_counter(), time.process_time(), time.monotonic()
    problem = read_contest(path).problem
    found = solve(problem, seconds=seconds - (time.monotonic() - clock))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    target = TARGETS[name]
    fullest = peak(problem, found.states)
    cost = problem.cost(found.states)  # counted anew
    ratio = cost / target.best
    return Row(
        name,
        cost,
        target.best,
        ratio,
        found.bound,
        found.gap,
        fullest,
        wall,
        cpu,
        target.ratio,
        ratio <= target.ratio and fullest <= 1,
    )


def peak(problem, states) -> float:
    """The memory at the fullest moment, relative to the limit."""
    change = np.zeros(1 + max(use.stop for use in problem.usages))
    for use in problem.usages:
        change[use.start] += use.amount[states[use.node]]
        change[use.stop] -= use.amount[states[use.node]]
    return float(change.cumsum().max() / problem.limit)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*TARGETS, []], metavar="NAME", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--instances", type=Path, default=ROOT.parent / "shared/iopddl")
    parser.add_argument("--seconds", type=float, help="for each instead of 10 and 120")
    parser.add_argument("--cpu", action="store_true", help="count this process's own seconds")
    parser.add_argument("--output", type=Path, default=Path("contest.json"))
    arguments = parser.parse_args()
    if arguments.cpu:
        time.monotonic = time.process_time
    console = Console(width=max(Console().width, 140))
    table = Table(
        "", "cost", "best known", "ratio", "bound", "gap", "memory", "wall s", "cpu s", "target", "", box=box.SIMPLE
    )
    rows = []
    for name in arguments.names or TARGETS:
        path = arguments.instances / f"asplos-2025-iopddl-{name}.json.gz"
        row = measure(name, path, arguments.seconds or TARGETS[name].seconds)
        rows.append(row)
        table.add_row(
            name,
            f"{row.cost:,.0f}",
            f"{row.best:,.0f}",
            f"{row.ratio:.4f}",
            f"{row.bound:,.0f}",
            f"{100 * row.gap:.2f} %",
            f"{row.fullest:.4f}",
            f"{row.wall:.1f}",
            f"{row.cpu:.1f}",
            f"at most {row.target:g}",
            "ok" if row.ok else "MISSED",
        )
    console.print(table)
    arguments.output.write_text(
        json.dumps({"machine": machine(), "instances": [asdict(row) for row in rows]}, indent=1) + "\n"
    )
    console.print(f"written to {arguments.output}")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
