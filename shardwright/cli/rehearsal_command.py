"""The commands that set measurements beside a plan.

1. ``shardwright rehearse``: play one rank of a plan on one device, beside what the plan promises.
2. ``shardwright compare-trace``: the seconds of a profile beside those of its plan, operator by operator.
"""

from __future__ import annotations

import argparse

from ..errors import ShardwrightError
from .command_line import Parser, add_import_option, add_json_option, add_quiet_option, failed, print_json, refused, say
from .script import Nothing, import_modules, positive, rank_number

__all__ = ["add_compare_trace_parser", "add_rehearse_parser", "compare", "rehearse"]


def add_rehearse_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``rehearse`` to the commands."""
    parser = subparsers.add_parser(
        "rehearse",
        allow_abbrev=False,
        help="play one rank of a plan on one device: seconds and memory beside the plan's",
        description="Play one rank of a plan on one device: real kernels on the rank's real shapes, and the memory "
        "that it holds. The other ranks are not there; what they would send takes no time. Prints the seconds of each "
        "operator, the communication that they do not hide and the step in time, both as the plan's schedule and cost "
        "model have the messages, and the peak of memory, each beside what the plan promises. "
        "The plan's file is enough. Exit code 0: played, 2: it cannot be played.",
        examples=(
            ("shardwright rehearse plan.json --rank 7", "one device plays rank 7 of the plan, be it for 1,024 devices"),
            ("shardwright rehearse plan.json --with-links --json", "rank 0, with the time of its messages, as JSON"),
        ),
    )
    parser.add_argument("--rank", type=rank_number, default=0, metavar="R", help="the rank (default: 0)")
    parser.add_argument("--device", metavar="DEVICE", help="such as cuda:1 or cpu (default: the accelerator, if any)")
    parser.add_argument(
        "--steps", type=positive, default=3, metavar="K", help="steps that are measured, after one (default: 3)"
    )
    parser.add_argument(
        "--with-links", action="store_true", help="sleep for each message as long as the plan's cost model says"
    )
    parser.add_argument(
        "--force", action="store_true", help="play also where the plan promises to need more memory than is free"
    )
    add_json_option(parser)
    add_import_option(parser)
    parser.add_argument("plan", completes="file", help="a file that shardwright plan or Plan.save wrote")
    add_quiet_option(parser)
    parser.set_defaults(func=rehearse, parser=parser)


def rehearse(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    from ..rehearsal.rehearse import rehearse as play  # noqa: PLC0415  imports torch

    try:
        import_modules(arguments.imports)
        made = play(
            arguments.plan,
            rank=arguments.rank,
            device=arguments.device,
            steps=arguments.steps,
            links=arguments.with_links,
            force=arguments.force,
        )
    except Nothing as error:
        return refused(arguments, error)
    except (ShardwrightError, OSError) as error:
        return failed("rehearse", error, 2)
    if arguments.json:
        print_json(made.to_dict())
    else:
        say(made.summary())
    return 0


def add_compare_trace_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add ``compare-trace`` to the commands."""
    parser = subparsers.add_parser(
        "compare-trace",
        allow_abbrev=False,
        help="a profile beside its plan: seconds of each operator and message",
        description="Set the seconds of a profile beside those that its plan promises: each operator, redistribution "
        "and bucket of gradients, forward and backward; equal layers share a row. The trace is a file of "
        "export_chrome_trace of torch.profiler, of one rank or of the local runtime. With kernels of a device in it, "
        "their seconds count, otherwise those of the host. Exit code 0: compared, 2: the plan or the trace cannot be "
        "read, or the trace is of another plan.",
        examples=(
            ("shardwright compare-trace plan.json trace.json", "each operator: measured, promised, and their ratio"),
            ("shardwright compare-trace plan.json trace.json --rank 0 --json", "as JSON, and the trace is of rank 0"),
        ),
    )
    parser.add_argument(
        "--rank", type=rank_number, metavar="R", help="the rank that the trace is to be of (default: as the trace says)"
    )
    add_json_option(parser)
    add_import_option(parser)
    parser.add_argument("plan", completes="file", help="a file that shardwright plan or Plan.save wrote")
    parser.add_argument("trace", completes="file", help="a Chrome trace of torch.profiler: .json or .json.gz")
    parser.set_defaults(func=compare, parser=parser)


def compare(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    from ..rehearsal.trace_comparison import compare_trace  # noqa: PLC0415  imports torch

    try:
        import_modules(arguments.imports)
        made = compare_trace(arguments.plan, arguments.trace, rank=arguments.rank)
    except Nothing as error:
        return refused(arguments, error)
    except (ShardwrightError, OSError) as error:
        return failed("compare-trace", error, 2)
    if arguments.json:
        print_json(made.to_dict())
    else:
        say(made.summary())
    return 0
