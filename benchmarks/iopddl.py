"""One strategy per node of a problem of the ASPLOS 2025 / EuroSys 2025 contest.

    python benchmarks/iopddl.py FILE [--seconds 60] [--output OUT] [--solver exact|milp] [--merge]

The contest is about intra-operator parallelism (github.com/google/iopddl). Its format is one JSON object, plain or
gzipped, with the field `problem`:

    nodes.costs[i][s]       the cost of strategy s of node i
    nodes.usages[i][s]      its memory
    nodes.intervals[i]      [from, to): the live range of node i
    edges.nodes[e]          the nodes of edge e; one may occur twice, and there may be one, two or more
    edges.costs[e]          one cost for each joint choice of strategies, the last node's running fastest
    usage_limit             the limit of the live nodes' summed memory, at every moment; absent: none

A cost of 10^18 or more is forbidden. The answer is a JSON list with the strategy number of each node.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.errors import PlanError, ShardwrightError
from shardwright.solver import solve
from shardwright.solver.problem import MemoryUsage, Problem

__all__ = ["FORBIDDEN", "Contest", "main", "read_contest", "write_assignment"]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Solve one problem, print the cost, a lower bound of every assignment's cost, and the gap.

    Returns:
        The exit code. 0: solved. 1: no assignment is allowed, or a file cannot be read or written.
    """
    parser = argparse.ArgumentParser(description="Choose one strategy per node, of least total cost within the limit.")
    parser.add_argument("problem", metavar="problem.json", help="the contest's format, plain or gzipped")
    parser.add_argument("--seconds", type=_seconds, default=60.0, metavar="N", help="to search (default: 60)")
    parser.add_argument("--output", metavar="FILE", help="write the choice: a JSON list of strategy numbers")
    parser.add_argument(
        "--solver",
        choices=("exact", "milp"),
        default="exact",
        help="exact: elimination, bounds and local search (default); milp: all of it by HiGHS",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="take tables of equal values for one table, so that repeated blocks are computed once (exact)",
    )
    arguments = parser.parse_args(argv)
    start = time.monotonic()
    try:
        contest = read_contest(arguments.problem)
        left = max(0.1, arguments.seconds - (time.monotonic() - start))
        if arguments.solver == "milp":
            solution = solve.milp(contest.problem, seconds=left)
        else:
            solution = solve.solve(contest.problem, seconds=left, merge=arguments.merge)
        if arguments.output:
            write_assignment(arguments.output, contest.assignment(solution.states))
    except ShardwrightError as error:
        print(f"iopddl: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"iopddl: error: {arguments.output}: {error.strerror}", file=sys.stderr)
        return 1
    print(
        f"cost {solution.cost:,.0f}\nbound {solution.bound:,.0f}\ngap {100 * solution.gap:.4g} %\n"
        f"seconds {time.monotonic() - start:.1f}"
    )
    for note in solution.notes:
        print(f"note: {note}")
    return 0


# -- the contest's format ----------------------------------------------------------------------------------------------

FORBIDDEN = 10**18


@dataclass(frozen=True)
class Contest:
    """A problem of the contest.

    Attributes:
        problem: its cost graph. The contest's own nodes are followed by one more for each edge that names three or
            more nodes; the states of such a node are the allowed joint choices.
        count: the number of the contest's own nodes.
    """

    problem: Problem
    count: int

    def assignment(self, states: Sequence[int]) -> list[int]:
        """The contest's answer, from the states of all nodes of the problem."""
        return [int(state) for state in states[: self.count]]


def read_contest(path: str | Path) -> Contest:
    """The problem in a contest file, `.json` or `.json.gz`.

    Raises:
        PlanError: a file that cannot be read, is cut short, lacks a field or contradicts itself; the error names the
            file and the node or edge.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        document = json.loads(text)
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile):
            raise PlanError(f"the file is damaged: {error}", source=str(path), legal="the whole file") from None
        raise PlanError(f"the file cannot be read: {error.strerror}", source=str(path)) from None
    except (EOFError, zlib.error):
        raise PlanError(
            f"the compressed file is cut short after {len(data):,} bytes", source=str(path), legal="the whole file"
        ) from None
    except json.JSONDecodeError as error:
        if error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated"):
            raise PlanError(
                f"the file is cut short: JSON ends after {len(text):,} bytes, in the midst of a value",
                source=str(path),
                legal="the whole file",
            ) from None
        raise PlanError(f"not JSON: {error}", source=str(path)) from None
    except UnicodeDecodeError as error:
        raise PlanError(f"not JSON: {error}", source=str(path)) from None
    try:
        return _contest(document)
    except PlanError as error:
        raise error.located(source=str(path)) from None


def write_assignment(path: str | Path, assignment: Sequence[int]) -> None:
    """Write a JSON list of strategy numbers, one a node."""
    Path(path).write_text(json.dumps([int(state) for state in assignment]) + "\n")


def _field(document: Any, name: str, kind: type, *, of: str) -> Any:
    """The field of a JSON object; `of` names the object in errors."""
    if not isinstance(document, dict) or name not in document:
        raise PlanError(f"{of} has no field {name!r}")
    if not isinstance(document[name], kind):
        raise PlanError(f"{of}.{name} is {type(document[name]).__name__}", legal=kind.__name__)
    return document[name]


def _numbers(values: Any, what: str, count: int | None = None) -> np.ndarray:
    """A list of numbers as float64; forbidden costs are infinite.

    Args:
        what: the name of the list, for errors.
        count: the required length; None: any.
    """
    try:
        out = np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise PlanError(f"{what} are not all numbers") from None
    if out.ndim != 1 or (count is not None and len(out) != count):
        raise PlanError(f"{what}: there are {len(values)}", legal=f"{count:,}" if count is not None else None)
    if np.isnan(out).any():
        raise PlanError(f"{what} are not all numbers")
    out[out >= FORBIDDEN] = np.inf
    return out


def _contest(document: Any) -> Contest:
    """The problem of the file's JSON."""
    document = _field(document, "problem", dict, of="the file")
    nodes, edges = (_field(document, name, dict, of="problem") for name in ("nodes", "edges"))
    own, usages, intervals = (_field(nodes, name, list, of="nodes") for name in ("costs", "usages", "intervals"))
    named, paid = (_field(edges, name, list, of="edges") for name in ("nodes", "costs"))
    if not len(own) == len(usages) == len(intervals):
        raise PlanError(
            f"nodes has {len(own):,} costs, {len(usages):,} usages and {len(intervals):,} intervals",
            legal="one of each a node",
        )
    if len(named) != len(paid):
        raise PlanError(f"edges has {len(named):,} nodes and {len(paid):,} costs", legal="one of each an edge")
    limit = document.get("usage_limit")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float))):
        raise PlanError("problem.usage_limit is not a number")
    costs, uses = [], []
    for i, (cost, usage, interval) in enumerate(zip(own, usages, intervals)):
        costs.append(_numbers(cost, f"costs of node {i}"))
        if not len(cost):
            raise PlanError(f"node {i} has no strategy")
        amount = _numbers(usage, f"usages of node {i}", len(cost))
        if not (isinstance(interval, list) and len(interval) == 2 and all(isinstance(t, int) for t in interval)):
            raise PlanError(f"interval of node {i} is {interval!r}", legal="[from, to]")
        if interval[0] < interval[1] and amount.any():
            uses.append(MemoryUsage(i, interval[0], interval[1], amount))
    pairs: dict[tuple[int, int], np.ndarray] = {}

    def put(i: int, j: int, table: np.ndarray) -> None:
        key, table = ((i, j), table) if i < j else ((j, i), table.T)
        pairs[key] = pairs[key] + table if key in pairs else table

    for e, (ends, cost) in enumerate(zip(named, paid)):
        if not isinstance(ends, list) or not all(isinstance(v, int) and 0 <= v < len(own) for v in ends) or not ends:
            raise PlanError(f"edge {e} names the nodes {ends!r}", legal=f"nodes from 0 to {len(own) - 1:,}")
        sizes = [len(own[v]) for v in ends]
        table = _numbers(cost, f"costs of edge {e}", math.prod(sizes)).reshape(sizes)
        distinct = sorted(set(ends))
        if len(distinct) < len(ends) or distinct != ends:  # a node named twice: one choice for both
            table = np.einsum(table, [distinct.index(v) for v in ends], list(range(len(distinct))))
        if len(distinct) == 1:
            costs[distinct[0]] = costs[distinct[0]] + table
        elif len(distinct) == 2:
            put(*distinct, table)
        else:
            choices = np.nonzero(np.isfinite(table))
            if not len(choices[0]):
                raise PlanError(f"edge {e} forbids everything")
            for v, chosen in zip(distinct, choices):
                put(v, len(costs), np.where(np.arange(len(own[v]))[:, None] == chosen, 0.0, np.inf))
            costs.append(table[choices])
    return Contest(Problem(tuple(costs), pairs, (), tuple(uses), None if limit is None else float(limit)), len(own))


if __name__ == "__main__":
    sys.exit(main())
