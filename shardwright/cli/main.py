"""The command line: ``shardwright <command> ...``, and the script with which a shell completes it.

A command is a function ``add_..._parser(subparsers)``; `command_line` says what it does. Modules of commands import
torch inside the functions that use it, so that ``shardwright --help`` answers at once.

``shardwright completion`` reads the commands, options, choices and paths of this parser by shtab, an optional library.
Paths are completed where an argument says so (`command_line`).

Example: ``shardwright plan train.py --devices 8`` runs `plan_command.plan` and ends with its exit code, 0 for a plan
that was written. A mistake in the arguments ends with 2, Ctrl-C with 130.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import shardwright

from ..launch.progress import commanded
from ..launch.run import add_run_parser
from .checkpoint_command import add_checkpoint_parser
from .command_line import INTERRUPTED, Parser, failed
from .doctor_command import add_doctor_parser
from .measuring_commands import add_calibrate_parser, add_compare_trace_parser, add_rehearse_parser
from .plan_command import add_explain_parser, add_plan_parser, add_report_parser, add_simulate_parser
from .verify_command import add_verify_parser

__all__ = ["add_completion_parser", "completion", "main"]


SHELLS = ("bash", "zsh", "fish")


def add_completion_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``completion`` to the commands."""
    parser = subparsers.add_parser(
        "completion",
        allow_abbrev=False,
        help="print the script with which a shell completes commands, options and paths",
        description="Print the script with which a shell completes commands, options, choices and paths. It is made "
        "by shtab: pip install 'shardwright[completion]'. Exit code 0: printed, 1: there is no shtab.",
        examples=(
            ("shardwright completion bash > ~/.shardwright.bash", "for bash: source the file in ~/.bashrc"),
            ("shardwright completion fish > ~/.config/fish/completions/shardwright.fish", "for fish"),
        ),
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.set_defaults(func=completion, parser=parser)


def completion(arguments: argparse.Namespace) -> int:
    """Print the script, and return the exit code."""
    try:
        import shtab  # noqa: PLC0415  an optional library
    except ImportError:
        return failed("completion", ImportError("there is no shtab: pip install 'shardwright[completion]'"), 1)
    if arguments.shell not in shtab.SUPPORTED_SHELLS:
        known = ", ".join(shell for shell in SHELLS if shell in shtab.SUPPORTED_SHELLS)
        error = ImportError(f"shtab {shtab.__version__} knows {known}: a newer shtab may know {arguments.shell}")
        return failed("completion", error, 1)
    _with_modes(arguments.root)
    if arguments.shell == "zsh":
        _escape_colons(arguments.root)
    script = shtab.complete(arguments.root, arguments.shell)
    for before, after in ZSH_PATTERNS if arguments.shell == "zsh" else ():
        script = script.replace(before, after)
    print(script, flush=True)
    return 0


#: The text of shtab for several arguments -> the text that ``_arguments`` of zsh takes. ``(*):`` is one argument, and
#: ``*:`` are several. ``(-)*::`` ends the options; `plan` and `verify` take theirs behind a script, too.
ZSH_PATTERNS = (('"(*):', '"*:'), ('"(-)*::the script', '"*:the script'))


def _escape_colons(parser: Parser) -> None:
    """Escape the colons of ``STAGES[:MICRO]``, which would end the name of the value in a script for zsh."""
    for argument in parser.arguments:
        if isinstance(argument.metavar, str):
            argument.metavar = argument.metavar.replace(":", "\\:")
    for command in parser.commands.values():
        _escape_colons(command)


def _with_modes(parser: Parser) -> None:
    """Give ``--mode`` the parallel modes as its choices. Other calls do without them: their import takes seconds."""
    from ..planners.planning_problem import modes  # noqa: PLC0415  imports torch

    for argument in parser.arguments:
        if argument.dest == "mode":
            argument.choices = modes()
    for command in parser.commands.values():
        _with_modes(command)


COMMANDS = (
    add_run_parser,
    add_plan_parser,
    add_explain_parser,
    add_report_parser,
    add_simulate_parser,
    add_verify_parser,
    add_rehearse_parser,
    add_compare_trace_parser,
    add_checkpoint_parser,
    add_calibrate_parser,
    add_doctor_parser,
    add_completion_parser,
)


class _Version(argparse.Action):
    """Print the version. An action of the package's own looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"shardwright {shardwright.__version__}")
        parser.exit(0)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="shardwright",
        allow_abbrev=False,
        description="Operator-level parallel training on PyTorch.",
        examples=(
            ("shardwright plan train.py --devices 8", "how a training script's model is split over eight devices"),
            ("shardwright run --worker_num=8 train.py", "and its training, in eight processes"),
        ),
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the installed version")
    parser.set_defaults(root=parser)  # for the command that prints completions
    subparsers: Any = parser.add_subparsers(metavar="command", required=True)
    for add_parser in COMMANDS:
        add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments without the program's name; ``sys.argv[1:]`` if None.

    Returns:
        The command's code; 130 where Ctrl-C ended it, 141 where the reader of its output has ended.

    Raises:
        SystemExit: with code 2 for a mistake in the arguments, with 0 for ``--help`` and ``--version``.
    """
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        # The error names the command that was called: argparse itself would name the outer one, and its help.
        getattr(arguments, "parser", parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    with commanded(silent=getattr(arguments, "quiet", False)) as display:
        try:
            code: int = arguments.func(arguments)
            sys.stdout.flush()
            return code
        except BrokenPipeError:  # the reader, such as head, has ended; what it asked for was printed
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes again at its end
            return 128 + signal.SIGPIPE
        except KeyboardInterrupt:
            command = getattr(arguments, "parser", parser).prog
            where = f" in {display.stopped}" if display.stopped else ""
            remains = display.if_stopped or "nothing more is written"
            print(f"{command}: stopped by Ctrl-C{where}; {remains}", file=sys.stderr)
            return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
