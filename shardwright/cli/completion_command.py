"""``shardwright completion``: the script with which a shell completes commands, options, choices and paths.

The script is made by shtab, an optional library. Paths are completed where an argument says so (`command_line`).
"""

from __future__ import annotations

import argparse

from .command_line import Parser, failed

__all__ = ["add_completion_parser", "completion"]

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
            ("shardwright completion bash > ~/.local/share/bash-completion/completions/shardwright", "for bash"),
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
    print(shtab.complete(arguments.root, arguments.shell), flush=True)
    return 0


def _with_modes(parser: Parser) -> None:
    """Give ``--mode`` the parallel modes as its choices. Other calls do without them: their import takes seconds."""
    from ..planners.planning_problem import modes  # noqa: PLC0415  imports torch

    for argument in parser.arguments:
        if argument.dest == "mode":
            argument.choices = modes()
    for command in parser.commands.values():
        _with_modes(command)
