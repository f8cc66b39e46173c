"""The command ``shardwright verify``: compare a plan with one device.

The target is a training script, of which the first call of its `AutoParallel` model is verified; or a function that
returns what `shardwright.verify` takes.

Example: ``shardwright verify --devices 8 train.py`` runs the script up to the first call of its model, and trains 3
steps on one device and under the plan for 8. The exit code is 0 where all results agree within tolerances, else 1.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from ..errors import ShardwrightError
from .command_line import (
    OPTIONS_BEHIND,
    Nothing,
    add_json_option,
    add_quiet_option,
    arguments_of,
    failed,
    first_call,
    positive,
    print_json,
    refused,
    say,
    take_options_behind,
)

if TYPE_CHECKING:
    from ..verification.verify_report import VerifyReport

__all__ = ["add_verify_parser", "verify", "verify_function", "verify_script"]


def add_verify_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``verify`` to the commands."""
    parser = subparsers.add_parser(
        "verify",
        allow_abbrev=False,
        help="compare a plan with one device: losses, gradients, parameters",
        description="Compare a model under its plan with the same model on one device. Exit code 0: they agree, 1: "
        "they do not or the model cannot be planned, 2: there is nothing to verify. Where the plan cuts nothing "
        "or sends nothing, the report says that nothing was proved.",
        usage="%(prog)s [options] script.py [script arguments]\n"
        "       %(prog)s [options] module:function | file.py:function",
        epilog=OPTIONS_BEHIND,
        examples=(
            ("shardwright verify --devices 8 train.py", "the script's model under its plan, beside one device"),
            ("shardwright verify --devices 4 --cut model.py:build", "a function's model, cut wherever it can be"),
        ),
    )
    _add_verify_options(parser)
    parser.add_argument(
        "target",
        completes="file",
        help="a training script that calls an AutoParallel model; or a function without "
        "arguments that returns the keyword arguments of shardwright.verify as a dict, "
        "or (net, inputs, targets, loss_fn)",
    )
    rest = parser.add_argument(
        "script_args", nargs=argparse.REMAINDER, metavar="...", completes="file", help="the script's arguments"
    )
    rest.required = False  # otherwise argparse names it beside a missing target, though it may be empty
    parser.set_defaults(func=verify, parser=parser)


def _add_verify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=positive, metavar="N", help="how many devices (default: as the target says)")
    parser.add_argument("--steps", type=positive, metavar="K", help="steps of the optimizer (default: 3)")
    add_quiet_option(parser)
    parser.add_argument(
        "--cut",
        action="store_true",
        help="plan on links that are next to free, so that searches cut whatever can be cut",
    )
    add_json_option(parser)


def verify(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code. Errors of the script or function itself are raised as they are."""
    try:
        take_options_behind(arguments, _add_verify_options)
        if os.path.isfile(arguments.target):
            report = verify_script(
                arguments.target, arguments.script_args, arguments.devices, arguments.steps, arguments.cut
            )
        else:
            report = verify_function(
                arguments.target, arguments.script_args, arguments.devices, arguments.steps, arguments.cut
            )
    except Nothing as error:
        return refused(arguments, error)
    except ShardwrightError as error:
        return failed("verify", error, 1)
    if arguments.json:
        print_json(report.to_dict())
    else:
        say(report.summary())
    return 0 if report.ok else 1


def verify_script(
    script: str, script_args: list[str], devices: int | None, steps: int | None, cut: bool = False
) -> VerifyReport:
    """Run a script until it first calls an `AutoParallel` model, and verify that call.

    Args:
        script: the path of the script.
        script_args: its arguments.
        devices: the number of devices; None: as the script says.
        steps: the number of optimizer steps; None: 3.
        cut: see `shardwright.verify`.

    Raises:
        ShardwrightError: the model cannot be planned.
    """
    from ..verification.verify import verify_call  # noqa: PLC0415  imports torch

    return first_call(
        script,
        script_args,
        devices,
        lambda model, args, kwargs: verify_call(model, args, kwargs, devices=devices, steps=steps or 3, cut=cut),
    )


def verify_function(
    target: str, rest: list[str], devices: int | None, steps: int | None, cut: bool = False
) -> VerifyReport:
    """Verify the model that a function returns.

    Args:
        target: ``module:function`` or ``file.py:function``.
        rest: the words behind the target, of which there may be none.
        devices: the number of devices; None: as the function or `shardwright.verify` says.
        steps: the number of optimizer steps; None: as the function or `shardwright.verify` says.
        cut: see `shardwright.verify`.

    Raises:
        ShardwrightError: the model cannot be planned, or the function returns something else.
    """
    keywords = arguments_of(target, rest, "shardwright.verify")
    from ..verification.verify import verify as compare  # noqa: PLC0415  imports torch

    options = (("devices", devices), ("steps", steps), ("cut", cut or None))
    keywords |= {key: value for key, value in options if value is not None}
    return compare(**keywords)
