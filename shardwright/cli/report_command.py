"""``shardwright report``: a plan, or two side by side, as one HTML file."""

from __future__ import annotations

import argparse

from ..errors import ShardwrightError
from .command_line import Parser, add_import_option, add_quiet_option, failed, refused
from .script import Nothing, import_modules

__all__ = ["add_report_parser", "report"]


def add_report_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add ``report`` to the commands."""
    parser = subparsers.add_parser(
        "report",
        allow_abbrev=False,
        help="a plan as one HTML file, or two plans side by side",
        description="Write plans as one HTML file: layers, operators, slices on the device mesh, parameters, memory, "
        "collectives, the step in time, the certificate. It opens without a network. Needs Jinja2 (pip install "
        "shardwright[report]). Exit code 0: written, 2: a plan cannot be read, or the file cannot be written.",
        examples=(
            ("shardwright report plan.json -o plan.html", "one plan, as a page that opens without a network"),
            ("shardwright report plan.json edited.json -o both.html", "two plans side by side, and their differences"),
        ),
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE.html", help="the file to write", completes="file"
    )
    parser.add_argument(
        "--explain",
        type=int,
        metavar="N",
        help="price the alternatives of the N most expensive operators (default: 3 in a small plan, otherwise none)",
    )
    add_import_option(parser)
    parser.add_argument(
        "plans", nargs="+", metavar="plan", help="one or two files of shardwright plan or Plan.save", completes="file"
    )
    add_quiet_option(parser)
    parser.set_defaults(func=report, parser=parser)


def report(arguments: argparse.Namespace) -> int:
    """Write the page, and return the exit code."""
    from ..planning import Plan  # noqa: PLC0415  imports torch; registers how plans are read
    from ..report.html_report import write  # noqa: PLC0415  imports torch

    if len(arguments.plans) > 2:
        arguments.parser.error(f"{len(arguments.plans)} plans: a report has one, or two side by side")
    if arguments.explain is not None and arguments.explain < 0:
        arguments.parser.error(f"--explain={arguments.explain} is below 0")
    try:
        import_modules(arguments.imports)
        plans = [Plan.load(path) for path in arguments.plans]
        write(plans, arguments.output, arguments.plans, arguments.explain)
    except Nothing as error:
        refused(arguments, error)
    except (ShardwrightError, OSError) as error:
        return failed("report", error, 2)
    print(f"written to {arguments.output}")
    return 0
