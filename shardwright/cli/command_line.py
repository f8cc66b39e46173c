"""The parts that all commands share: the parser with its examples, ``--json``, ``--import``, ``--quiet``.

A command is a function ``add_..._parser(subparsers)``. It calls ``subparsers.add_parser`` and sets two defaults:
``func``, which takes the parsed arguments and returns the exit code, and ``parser``, its parser, for errors found
later. Beside argparse's own keywords

    add_parser(..., examples=((line, meaning), ...))       the last lines of the help; a test runs each
    add_argument(..., completes="file" or "directory")     the kind of path that a shell completes

The parser of ``shardwright run``, in `launch.run`, is made in the same way.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

__all__ = [
    "INTERRUPTED",
    "Parser",
    "add_import_option",
    "add_json_option",
    "add_quiet_option",
    "failed",
    "print_json",
    "refused",
    "say",
]

#: The exit code of a command that Ctrl-C ended: 128 + SIGINT.
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose help ends with examples. Its errors are one line, not below thirty lines of usage.

    Args:
        examples: (command line, meaning) of each.
        keywords: as `argparse.ArgumentParser` takes them.

    Attributes:
        examples: as given.
        arguments: all that were added.
        commands: the parsers of its commands, by name.
    """

    def __init__(self, *args: Any, examples: tuple[tuple[str, str], ...] = (), **keywords: Any) -> None:
        self.examples, self.arguments = examples, list[argparse.Action]()
        self.commands: Mapping[str, Parser] = {}
        super().__init__(*args, **keywords)  # adds --help

    def add_argument(self, *names: Any, completes: str | None = None, **keywords: Any) -> argparse.Action:
        """Add an argument.

        Args:
            names, keywords: as argparse takes them.
            completes: "file" or "directory" for a path, which a shell completes (shtab reads the attribute
                ``complete`` of an argument).
        """
        action = super().add_argument(*names, **keywords)
        if completes is not None:
            vars(action)["complete"] = completes
        self.arguments.append(action)
        return action

    def add_subparsers(self, **keywords: Any) -> Any:
        """Add commands, as argparse does."""
        made = super().add_subparsers(**keywords)
        self.commands = made.choices
        return made

    def format_help(self) -> str:
        """The help, and below it the examples."""
        lines = [part for line, meaning in self.examples for part in (f"  {line}", f"      {meaning}")]
        return super().format_help() + "".join(f"{line}\n" for line in (["", "examples:", *lines] if lines else ()))

    def options_near(self, word: str) -> str:
        """The option that a word such as ``--parallel_mode`` may stand for, or all options, as a sentence."""
        options = [name for action in self.arguments for name in action.option_strings if name.startswith("--")]
        near = difflib.get_close_matches(word.partition("=")[0], options, 1, 0.55)
        return (f"did you mean {near[0]}? " if near else "") + f"the options are {', '.join(options)}"

    def error(self, message: str) -> NoReturn:
        """End with exit code 2 and one line."""
        unknown = re.match(r"unrecognized arguments: (--\S+)", message)
        if unknown:
            message += f"; {self.options_near(unknown[1])}"
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def refused(arguments: argparse.Namespace, error: Exception) -> NoReturn:
    """End with exit code 2 and the error, of a command that has nothing to work on."""
    arguments.parser.error(str(error))
    raise AssertionError("argparse has ended this process")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, for a command that prints tables. Its values are printed by `print_json`."""
    parser.add_argument(
        "--json", action="store_true", help="one JSON object in place of the tables: seconds, bytes, bytes a second"
    )


def add_quiet_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--quiet``, for a command that may take long."""
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="show no progress (default: a line on a terminal, elsewhere one every ten seconds on standard error)",
    )


def print_json(value: dict[str, object]) -> None:
    """Print a value on standard output as one JSON object. A number that is infinite or unknown is None."""
    print(json.dumps(value, indent=1, allow_nan=False), flush=True)


def say(text: str) -> None:
    """Print sentences and tables on standard output; a terminal gets them wrapped to its width."""
    from ..report.console_tables import console_of, saying  # noqa: PLC0415  imports rich

    write = saying(console_of(None))
    for line in text.splitlines():
        write(line)
    sys.stdout.flush()


def add_import_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--import``, for a command that reads plans with operators of the user. See `script.import_modules`."""
    parser.add_argument(
        "--import",
        action="append",
        default=[],
        dest="imports",
        metavar="MODULE",
        help="import a module first, which registers operators of yours (may be repeated)",
    )


def failed(command: str, error: Exception, code: int) -> int:
    """Print the error of a command on standard error, and return the exit code."""
    print(f"shardwright {command}: error: {error}", file=sys.stderr)
    return code
