"""``shardwright compare-trace``: the seconds of a profile beside those of its plan, operator by operator."""

from __future__ import annotations

import argparse

from ..errors import ShardwrightError
from .command_line import Parser, add_import_option, add_json_option, failed, print_json, refused
from .script import Nothing, import_modules, rank_number

__all__ = ["add_compare_trace_parser", "compare"]


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
        print(made.summary(), flush=True)
    return 0
