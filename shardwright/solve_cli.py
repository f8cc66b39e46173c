"""``shardwright solve``: one strategy per node of a problem in the format of the ASPLOS 2025 contest."""

from __future__ import annotations

import argparse
import sys
import time

from shardwright.errors import ShardwrightError

__all__ = ["add_parser", "solve"]


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add ``solve`` to the commands."""
    parser = subparsers.add_parser(
        "solve", allow_abbrev=False, help="solve a sharding problem of the ASPLOS 2025 contest",
        description="Choose one strategy per node, of least total cost within the memory limit, and print the cost, a "
                    "lower bound of every choice's cost, and the gap. Exit code 0: solved, 1: there is no choice or "
                    "the file cannot be read.")
    parser.add_argument("problem", metavar="problem.json", help="the contest's format, plain or gzipped")
    parser.add_argument("--seconds", type=_seconds, default=60.0, metavar="N", help="to search (default: 60)")
    parser.add_argument("--output", metavar="FILE", help="write the choice: a JSON list of strategy numbers")
    parser.add_argument("--solver", choices=("exact", "milp"), default="exact",
                        help="exact: elimination, bounds and local search (default); milp: all of it by HiGHS")
    parser.add_argument("--merge", action="store_true",
                        help="take tables of equal values for one table, so that repeated blocks are computed once (exact)")
    parser.set_defaults(func=solve, parser=parser)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def solve(arguments: argparse.Namespace) -> int:
    """Do what the parsed arguments ask for and return the exit code."""
    from shardwright.plan import exact
    from shardwright.plan.contest import read_contest, write_assignment

    start = time.monotonic()
    try:
        contest = read_contest(arguments.problem)
        left = max(0.1, arguments.seconds - (time.monotonic() - start))
        if arguments.solver == "milp":
            solution = exact.milp(contest.problem, seconds=left)
        else:
            solution = exact.solve(contest.problem, seconds=left, merge=arguments.merge)
        if arguments.output:
            write_assignment(arguments.output, contest.assignment(solution.states))
    except ShardwrightError as error:
        print(f"shardwright solve: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"shardwright solve: error: {arguments.output}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"cost {solution.cost:,.0f}\nbound {solution.bound:,.0f}\ngap {100 * solution.gap:.4g} %\n"
          f"seconds {time.monotonic() - start:.1f}")
    for note in solution.notes:
        print(f"note: {note}")
    return 0
