"""``shardwright simulate``: a step of a plan in time, as text, as a trace and as a picture."""

from __future__ import annotations

import argparse
import sys

from shardwright.errors import ShardwrightError

__all__ = ["add_parser", "simulate"]

#: The most operators of all actions together that a trace has; more make it slow to open.
OPERATORS = 200_000


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add ``simulate`` to the commands."""
    parser = subparsers.add_parser(
        "simulate", allow_abbrev=False, help="a step of a plan in time: bubbles, and memory on each group of ranks",
        description="Of a plan that was written: what a step takes, for how much of it devices wait, the most memory "
                    "that each group of ranks holds, and the schedule of a pipeline. "
                    "Exit code 0: simulated, 2: the plan cannot be read, or a file cannot be written.")
    parser.add_argument("--trace", metavar="FILE", help="write the step for ui.perfetto.dev or chrome://tracing")
    parser.add_argument("--picture", metavar="FILE.svg", help="write the step as a picture")
    parser.add_argument("--import", action="append", default=[], dest="imports", metavar="MODULE",
                        help="import a module first, which registers operators of yours (may be repeated)")
    parser.add_argument("plan", help="a file that shardwright plan or Plan.save wrote")
    parser.set_defaults(func=simulate, parser=parser)


def simulate(arguments: argparse.Namespace) -> int:
    """Simulate a step of a plan, and return the exit code."""
    import json
    from pathlib import Path

    from shardwright.cluster import Cluster
    from shardwright.plan import Plan
    from shardwright.plan.pipelined import moments, timeline_of
    from shardwright.report.simulated import simulated
    from shardwright.report.timeline import picture, trace
    from shardwright.scripts import Nothing, import_modules

    if arguments.picture is not None and not arguments.picture.lower().endswith(".svg"):
        arguments.parser.error(f"--picture={arguments.picture} is no SVG file: its name ends with .svg")
    try:
        import_modules(arguments.imports)
        plan = Plan.load(arguments.plan)
        simulation = timeline_of(plan)
        made = simulation.schedule
        plans = [plan] if isinstance(plan, Plan) else [stage.plan for stage in plan.stages]
        ranks = [range(plan.devices)]
        if not isinstance(plan, Plan):
            ranks = [plan.stages[made.placement.index(group)].ranks for group in range(made.groups)]
        simulated(simulation, ranks, Cluster.of(plan.cluster, plan.devices).memory)
        names = [f"ranks {each[0]}-{each[-1]}" if len(each) > 1 else f"rank {each[0]}" for each in ranks]
        if arguments.trace is not None:
            within = {stage: moments(each) for stage, each in enumerate(plans)}
            if sum(map(len, within.values())) * made.micro_batches > OPERATORS:
                within = {}
                print("the trace is without operators, which would be too many")
            Path(arguments.trace).write_text(json.dumps(trace(simulation, names, operators=within)), encoding="utf-8")
        if arguments.picture is not None:
            Path(arguments.picture).write_text(picture(simulation, names), encoding="utf-8")
    except Nothing as error:
        arguments.parser.error(str(error))
    except (ShardwrightError, OSError) as error:
        print(f"shardwright simulate: error: {error}", file=sys.stderr)
        return 2
    return 0
