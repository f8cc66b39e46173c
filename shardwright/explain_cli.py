"""``shardwright explain``: what a plan costs, and why an operator is split as it is."""

from __future__ import annotations

import argparse
import sys

from shardwright.errors import ShardwrightError

__all__ = ["add_parser", "explain"]


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add ``explain`` to the commands."""
    parser = subparsers.add_parser(
        "explain", allow_abbrev=False, help="what a plan costs, and why an operator is split as it is",
        description="Of a plan that was written: what a step takes and where, its lower bound. Of one of its operators: what "
                    "it costs, its best alternatives and what a step would take with each, and what holds it where it is. "
                    "Exit code 0: explained, 2: the plan cannot be read, or has no such operator.")
    parser.add_argument("--alternatives", type=int, default=3, metavar="N", help="how many alternatives (default: 3)")
    parser.add_argument("--memory", metavar="SIZE", help='what a device may hold, such as "70GB", or "cluster" for its own '
                                                         "(default: as the plan was searched for)")
    parser.add_argument("--import", action="append", default=[], dest="imports", metavar="MODULE",
                        help="import a module first, which registers operators of yours (may be repeated)")
    parser.add_argument("plan", help="a file that shardwright plan or Plan.save wrote")
    parser.add_argument("operator", nargs="?", help="an operator's name, or the path of a module that calls just one")
    parser.set_defaults(func=explain, parser=parser)


def explain(arguments: argparse.Namespace) -> int:
    """Explain a plan or one of its operators, and return the exit code."""
    from shardwright.cluster import Cluster
    from shardwright.plan import Plan
    from shardwright.plan.bytes import memory_of
    from shardwright.plan.explain import explained
    from shardwright.report.explained import costs, explanation
    from shardwright.scripts import Nothing, import_modules

    if arguments.alternatives < 1:
        arguments.parser.error(f"--alternatives={arguments.alternatives} is below 1")
    try:
        import_modules(arguments.imports)
        plan = Plan.load(arguments.plan)
        if arguments.operator is None:
            costs(plan)
        else:
            memory = memory_of(arguments.memory, Cluster.of(plan.cluster, plan.devices))
            explanation(explained(plan, arguments.operator, arguments.alternatives, memory))
    except Nothing as error:
        arguments.parser.error(str(error))
    except ShardwrightError as error:
        print(f"shardwright explain: error: {error}", file=sys.stderr)
        return 2
    return 0
